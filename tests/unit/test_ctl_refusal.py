"""A refusal in the terminal: the whole page at 80 columns, its colours, and what reaches a pipe."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import pytest

from lllm3090ctl.documents import Document
from lllm3090ctl.failures import Failure, as_failure
from lllm3090ctl.output import Screen
from lllm3090ctl.render import failure
from lllm3090ctl.tables import cells
from lllm3090ctl.text import Prose
from lllm3090d.errors import ErrorCode, LlmError
from tests.fakes.control_server import ControlServer, ctl
from tests.unit.refusal_scenes import BESIDE_PINNED, BESIDE_STRANGERS, TOO_BIG

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "tests" / "data" / "refusals"
HOW_TO = ROOT / "docs" / "how-to" / "make-room.md"
SITUATIONS = {"too-big": TOO_BIG, "strangers": BESIDE_STRANGERS, "pinned": BESIDE_PINNED}
every_situation = pytest.mark.parametrize("name", SITUATIONS)


class Terminal(io.StringIO):
    """A stream that says that a person watches."""

    def isatty(self) -> bool:
        """They do."""
        return True


def problem_of(error: LlmError, **details: Any) -> dict[str, Any]:
    """As a client has it, with some details changed."""
    problem: dict[str, Any] = json.loads(json.dumps(error.problem()))
    problem["details"] |= details
    return problem


def shown(
    monkeypatch: pytest.MonkeyPatch, problem: Mapping[str, object], *, colour: bool = False, width: int = 80
) -> str:
    """What a person sees."""
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if not colour:
        monkeypatch.setenv("NO_COLOR", "1")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    Screen(as_json=False).failure(as_failure(problem), streaming=False)
    return terminal.getvalue()


@every_situation
def test_the_page_at_80_columns(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    page = shown(monkeypatch, problem_of(SITUATIONS[name].refusal()))
    assert page == (PAGES / f"{name}.txt").read_text(encoding="utf-8")


@every_situation
@pytest.mark.parametrize("width", [60, 80, 120])
def test_only_commands_are_wider_than_the_terminal(
    monkeypatch: pytest.MonkeyPatch, name: str, width: int
) -> None:
    """Whoever copies one gets it whole."""
    problem = problem_of(SITUATIONS[name].refusal())
    lines = shown(monkeypatch, problem, width=width).splitlines()
    commands = {f"       {remedy['command']}" for remedy in problem["details"]["remedies"]} - {"       "}
    assert commands <= set(lines)
    assert all(cells(line) <= width for line in lines if line not in commands)


@every_situation
def test_colours_change_nothing_but_colour(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    problem = problem_of(SITUATIONS[name].refusal())
    coloured = shown(monkeypatch, problem, colour=True)
    assert "\x1b[31mlllm3090ctl: " in coloured  # why not: red
    assert "\x1b[32mWhat would help" in coloured  # what would help: green
    assert re.search(r"\x1b\[1mNEEDED", coloured)
    assert click.unstyle(coloured) == shown(monkeypatch, problem)


def test_a_pipe_gets_whole_lines_without_colour() -> None:
    error = BESIDE_STRANGERS.refusal()
    with ControlServer(load=error) as server:
        done = ctl(server, "load", "x")
    assert done.exit_code == 5
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert lines[0] == f"lllm3090ctl: {error.details['summary']}"
    assert "  1. Unload smollm2-135m (800.0 MiB, idle 14 min)." in lines
    assert "       lllm3090ctl unload smollm2-135m" in lines
    assert "\x1b" not in done.stderr


@every_situation
def test_json_is_the_problem_document(name: str) -> None:
    error = SITUATIONS[name].refusal()
    with ControlServer(load=error) as server:
        done = ctl(server, "load", "x", "--json")
    assert (done.exit_code, json.loads(done.stdout)) == (5, json.loads(json.dumps(error.problem())))
    assert json.loads(done.stdout)["code"] == "insufficient_vram"


def test_the_sums_add_up_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(BESIDE_STRANGERS.refusal())
    details = problem["details"]
    page = shown(monkeypatch, problem)
    figures = {
        line.rsplit(None, 1)[0].strip(): line.rsplit(None, 1)[1]
        for line in page.splitlines()
        if line.startswith(("sum", "Missing:"))
    }
    assert figures["sum"] == f"{details['needed_bytes'] / (1 << 20):,.1f}"
    missing = -(-details["missing_bytes"] * 10 // (1 << 20))
    assert f"Missing: {missing / 10:,.1f} MiB" in page


# --- parts that are not always there ---------------------------------------------------------------------------------


def page_of(**details: Any) -> str:
    """The page for a pipe."""
    blocks = failure(Document(problem_of(BESIDE_STRANGERS.refusal(), **details)))
    return "\n".join(
        f"{block.lead}{block.text}" if isinstance(block, Prose) else repr(block) for block in blocks
    )


def test_what_nobody_names_and_nobody_measured_is_told() -> None:
    page = page_of(
        unlisted_bytes=5 << 30, strangers=[{"name": "", "pid": 5, "user": "", "bytes": None}], ours=[]
    )
    assert "('a process', 'unknown', 'pid 5')" in page
    assert "('others', '5,120.0', 'the driver names no program for it')" in page


def test_nobody_on_the_card_has_no_table() -> None:
    assert "HELD BY" not in page_of(strangers=[], ours=[], quarantine=[])
    assert "HELD BY" in page_of()


def test_without_remedies_the_hint_is_shown() -> None:
    problem = problem_of(BESIDE_STRANGERS.refusal(), remedies=[])
    problem["hint"] = "Choose a smaller model."
    last = failure(Document(problem))[-1]
    assert last == Prose("Choose a smaller model.", "Hint: ")
    del problem["hint"]
    assert "Hint" not in repr(failure(Document(problem)))


def test_several_cards_have_a_line_each() -> None:
    card = {"name": "CUDA0", "layers": 5, "needed_bytes": 2 << 30, "grantable_bytes": 1 << 30, "items": []}
    page = page_of(cards=[card, card | {"name": "CUDA1"}])
    assert "('CUDA0', '2,048.0', '1,024.0')" in page
    assert "('CUDA1', '2,048.0', '1,024.0')" in page
    assert "NEEDED MIB" in page


def test_host_memory_is_no_card() -> None:
    assert "MEMORY" in page_of(card_kind="cpu")
    assert "THE CARD" in page_of()


@pytest.mark.parametrize(
    "details",
    [
        {"summary": 5},
        {"needed": "none"},
        {"needed": [{"name": 1}]},
        {"strangers": [{"name": "x"}]},
        {"remedies": [{}]},
        {"remedies": None},
        {"budget": {}},
    ],
)
def test_misshapen_details_do_not_hide_the_failure(details: dict[str, Any]) -> None:
    """Of another version: message and hint are shown."""
    problem = problem_of(BESIDE_STRANGERS.refusal(), **details)
    blocks = failure(Document(problem))
    assert problem["detail"] in str(blocks[0])
    assert blocks[-1] == Prose(problem["hint"], "Hint: ")


def test_names_cannot_steer_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stranger = {"name": "\x1b[2Jgame", "pid": 5, "user": "\x07", "bytes": 1}
    remedy = {
        "kind": "close",
        "text": "Close \x1b[2J",
        "command": "kill \x1b",
        "gain_bytes": 1,
        "verified": True,
    }
    problem = problem_of(
        BESIDE_STRANGERS.refusal(), strangers=[stranger], remedies=[remedy], summary="a\x1bb"
    )
    page = shown(monkeypatch, problem)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", page)


def test_a_refusal_of_an_older_daemon_is_shown_as_before() -> None:
    old = LlmError(
        ErrorCode.INSUFFICIENT_MEMORY, "It needs more.", hint="Wait.", budget=[], verdict="too-big"
    )
    with pytest.raises(Failure, match="It needs more"):
        raise as_failure(old.problem())
    assert failure(Document(old.problem()))[0] == Prose("It does not fit: It needs more.")


def test_the_how_to_shows_the_page() -> None:
    """Line for line, as it is drawn."""
    page = HOW_TO.read_text(encoding="utf-8")
    for name in SITUATIONS:
        drawn = (PAGES / f"{name}.txt").read_text(encoding="utf-8")
        assert f"```text\n{drawn.rstrip()}\n```\n" in page
