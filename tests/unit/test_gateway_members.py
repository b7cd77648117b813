"""Members of a JSON object that arrives in pieces."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lllm3090d.gateway.body import FormScan
from lllm3090d.gateway.members import LONGEST_VALUE_BYTES, MemberScan, NotAnObjectError

pytestmark = pytest.mark.unit

WANTED = ("model", "stream", "keep_alive")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)
MEMBERS = st.dictionaries(st.sampled_from([*WANTED, "messages", "tools", 'mo"del', "\\"]), JSON, max_size=7)


def scanned(pieces: list[bytes]) -> MemberScan:
    scan = MemberScan(WANTED)
    for piece in pieces:
        scan.feed(piece)
    return scan


def expected(document: dict[str, Any]) -> dict[str, Any]:
    scalars = {key: value for key, value in document.items() if not isinstance(value, dict | list)}
    return {key: value for key, value in scalars.items() if key in WANTED}


@given(MEMBERS, st.integers(1, 7), st.sampled_from([None, 1]), st.booleans())
def test_any_document_in_any_pieces(
    document: dict[str, Any], size: int, indent: int | None, ascii_only: bool
) -> None:
    text = json.dumps(document, indent=indent, ensure_ascii=ascii_only).encode()
    scan = scanned([text[at : at + size] for at in range(0, len(text), size)])
    assert scan.complete
    assert scan.found == expected(document)
    whole = scanned([text])
    assert (whole.complete, whole.found) == (True, scan.found)


def test_a_member_is_known_before_the_document_has_ended() -> None:
    scan = scanned([b'{"model": "a", "messages": [{"content": "'])
    assert scan.found == {"model": "a"}
    assert not scan.complete


def test_the_same_name_deeper_down_is_another() -> None:
    document = {
        "messages": [{"model": "no"}, {"x": {"model": "no"}}],
        "model": "yes",
        "tools": {"model": "no"},
    }
    assert scanned([json.dumps(document).encode()]).found == {"model": "yes"}


def test_the_last_of_two_counts_as_parsers_have_it() -> None:
    assert scanned([b'{"model":"a","model":"b"}']).found == {"model": "b"}


@pytest.mark.parametrize("text", [b"[1]", b'"model"', b"null", b"  7", b"model=x&stream=1"])
def test_what_is_no_object_is_told(text: bytes) -> None:
    with pytest.raises(NotAnObjectError):
        scanned([text])


@pytest.mark.parametrize(
    "text", [b'{"model": nonsense}', b'{"model": }', b'{"model"}', b'{"model": 1e}', b"{,,::}"]
)
def test_what_is_no_json_gives_nothing(text: bytes) -> None:
    assert scanned([text]).found.get("model") is None


def test_a_value_that_nobody_wants_is_not_kept() -> None:
    scan = MemberScan(WANTED)
    scan.feed(b'{"messages": "')
    for _ in range(100):
        scan.feed(b"x" * 65536)
    scan.feed(b'", "model": "' + b"y" * (LONGEST_VALUE_BYTES + 1) + b'", "stream": true}')
    assert scan.complete
    assert scan.found == {"model": None, "stream": True}


# --- forms ------------------------------------------------------------------------------------------------------


def part(head: bytes, value: bytes) -> bytes:
    return b"--b\r\n" + head + b"\r\n\r\n" + value + b"\r\n"


@pytest.mark.parametrize("size", [1, 7, 1 << 16])
@pytest.mark.parametrize(
    ("head", "found"),
    [
        (b'Content-Disposition: form-data; name="model"', True),
        (b"content-disposition: form-data; name=model", True),
        (b'Content-Type: text/plain\r\nContent-Disposition: form-data; name="model"\r\nX-A: b', True),
        (b'Content-Disposition: form-data; name="model"; filename="a"', True),
        (b'Content-Disposition: form-data; filename="a"; name="model"', True),
        (b'Content-Disposition: form-data; name="model_kind"', False),
        (b"Content-Disposition: form-data; name=models", False),
        (b'Content-Disposition: form-data; name="file"; filename="model"', False),
        (b'X-Content-Disposition: form-data; name="model"', False),
        (b"X: " + b"a" * 5000 + b'\r\nContent-Disposition: form-data; name="model"', False),
        (b"", False),
    ],
)
def test_a_field_of_a_form_in_any_pieces(head: bytes, found: bool, size: int) -> None:
    form = part(b'Content-Disposition: form-data; name="file"; filename="f"', b"--b\r\n\r\n\0" * 99)
    form += part(head, b"small") + b"--b--\r\n"
    scan = FormScan(b"b")
    for at in range(0, len(form), size):
        scan.feed(form[at : at + size])
    assert scan.found == ({"model": "small"} if found else {})


@pytest.mark.parametrize(
    "piece",
    [
        b"--b\r\nContent-Disposition:" + b" name=model" * 5900 + b"\r\n",
        b"--b\r\n" * 9000,
        (b"--b\r\n" + b"x\r\n" * 7) * 2400,
        part(b'Content-Disposition:; name="' * 140, b"x") * 16,
    ],
    ids=["names", "boundaries", "lines", "heads"],
)
def test_no_form_holds_the_others_up(piece: bytes) -> None:
    """64 KiB of the first took 2 s, and a body may have thousands of them."""
    scan = FormScan(b"b")
    began_s = time.process_time()
    for _ in range(10):
        scan.feed(piece)
    assert time.process_time() - began_s < 2.0
    assert scan.found == {}
