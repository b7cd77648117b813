"""The taxonomy: total, without two names for one thing, and the same in the reference."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from lllm3090d.errors import DBUS_ERROR_PREFIX, KINDS, PROBLEM_TYPE_PREFIX, ErrorCode, ExitStatus, LlmError

pytestmark = pytest.mark.unit

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "errors.md"
# Statuses that only the client gives itself.
NEVER_OF_AN_ERROR = {
    ExitStatus.OK,
    ExitStatus.UNREACHABLE,
    ExitStatus.WARNED,
    ExitStatus.UNFIT,
    ExitStatus.INTERRUPTED,
}
every_code = pytest.mark.parametrize("code", list(ErrorCode))


def test_every_code_has_a_row_under_its_own_name() -> None:
    assert set(KINDS) == set(ErrorCode)
    assert all(kind.code is code for code, kind in KINDS.items())


def test_codes_and_bus_names_are_injective() -> None:
    assert len({str(code) for code in ErrorCode}) == len(ErrorCode.__members__)
    assert len({kind.dbus_name for kind in KINDS.values()}) == len(KINDS)
    assert len({kind.title for kind in KINDS.values()}) == len(KINDS)


def test_the_table_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        KINDS[ErrorCode.INTERNAL] = KINDS[ErrorCode.NOT_JSON]  # type: ignore[index]  # the point of the test


@every_code
def test_a_row_has_possible_values(code: ErrorCode) -> None:
    kind = KINDS[code]
    assert re.fullmatch(r"[a-z]+(_[a-z]+)*", code)
    # An element of a D-Bus name begins with a letter; the whole has 255 bytes at most.
    assert re.fullmatch(r"org\.lllm3090\.Error\.([A-Z][a-z]+)+", kind.dbus_name)
    assert len(kind.dbus_name) <= 255
    assert 400 <= kind.http_status <= 599
    assert kind.exit_status not in NEVER_OF_AN_ERROR
    assert kind.title[0].isupper() or kind.title.startswith(("llama-server", "systemd"))
    assert not kind.title.endswith(".")


@every_code
def test_a_problem_document_is_json_of_rfc_9457(code: ErrorCode) -> None:
    error = LlmError(code, "it happened", hint="do this", needed_bytes=3, names=["a"])
    document = json.loads(json.dumps(error.problem()))
    assert document == {
        "type": PROBLEM_TYPE_PREFIX + code.value,
        "title": KINDS[code].title,
        "status": KINDS[code].http_status,
        "detail": "it happened",
        "code": code.value,
        "exit_status": KINDS[code].exit_status.value,
        "hint": "do this",
        "details": {"needed_bytes": 3, "names": ["a"]},
    }
    assert type(error.problem()["code"]) is str
    assert type(error.problem()["exit_status"]) is int


def test_what_is_not_known_is_left_out() -> None:
    document = LlmError(ErrorCode.INTERNAL, "it happened").problem()
    assert document.keys().isdisjoint({"hint", "details"})


def test_an_error_shows_its_message() -> None:
    error = LlmError(ErrorCode.NOT_LOADED, "qwen is not loaded", hint="load it")
    assert str(error) == error.message == "qwen is not loaded"
    assert error.kind is KINDS[ErrorCode.NOT_LOADED]


def test_details_are_a_copy_that_cannot_be_changed() -> None:
    facts: dict[str, Any] = {"a": 1}
    error = LlmError(ErrorCode.INTERNAL, "x", **facts)
    facts["a"] = 2
    assert error.details["a"] == 1
    with pytest.raises(TypeError):
        error.details["a"] = 3  # type: ignore[index]  # the point of the test
    error.problem()["details"]["a"] = 4
    assert error.details["a"] == 1


def rows() -> dict[str, list[str]]:
    """Cells of the reference's table, by code; fails for a code that has two rows."""
    found: dict[str, list[str]] = {}
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `") and len(cells) == 6:
            code = cells[0].strip("`")
            assert code not in found, f"{code} has two rows"
            found[code] = cells
    return found


def test_the_reference_has_a_row_for_every_code_and_no_other() -> None:
    assert list(rows()) == [code.value for code in ErrorCode]


@every_code
def test_the_reference_gives_the_values_of_the_table(code: ErrorCode) -> None:
    kind = KINDS[code]
    _, http_status, exit_status, dbus_name, meaning, remedy = rows()[code]
    assert (http_status, exit_status) == (str(kind.http_status), str(kind.exit_status.value))
    assert dbus_name == f"`{kind.dbus_name.removeprefix(DBUS_ERROR_PREFIX)}`"
    assert meaning.startswith(kind.title)
    assert remedy


def test_the_reference_names_the_prefixes() -> None:
    page = PAGE.read_text()
    assert PROBLEM_TYPE_PREFIX in page
    assert DBUS_ERROR_PREFIX in page
