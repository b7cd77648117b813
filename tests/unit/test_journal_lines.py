"""What journalctl may answer, odd entries included, without a journal that would have to hold them."""

from __future__ import annotations

import asyncio
import json

import pytest
from pytest_subprocess import FakeProcess

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.serving.journal import JournalLine, tail

pytestmark = pytest.mark.unit

IDENTIFIER = "lllm3090-a-00000001"


def entry(message: object, at: int = 7) -> str:
    return json.dumps({"__REALTIME_TIMESTAMP": str(at), "MESSAGE": message})


def answer(fp: FakeProcess, *lines: str, stderr: str = "", returncode: int = 0) -> tuple[JournalLine, ...]:
    fp.register(
        ["journalctl", fp.any()], stdout="\n".join(lines).encode(), stderr=stderr, returncode=returncode
    )
    return asyncio.run(tail(IDENTIFIER, 10, uid=1000))


def test_the_entries_of_one_identifier_and_user_are_asked_for(fp: FakeProcess) -> None:
    assert answer(fp, entry("one", 1), entry("two", 2)) == (JournalLine(1, "one"), JournalLine(2, "two"))
    (command,) = fp.calls
    assert {"--lines=10", f"SYSLOG_IDENTIFIER={IDENTIFIER}", "_UID=1000"} <= set(command)


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (None, ""),
        ("Пример 🦙", "Пример 🦙"),
        ([104, 105, 255], "hi\ufffd"),  # bytes that are no UTF-8
        (["first", "second"], "first\nsecond"),  # a field that was given twice
        ([[104, 105], "x"], "hi\nx"),
        (12, "12"),
    ],
)
def test_every_form_of_a_message(fp: FakeProcess, message: object, text: str) -> None:
    assert answer(fp, entry(message)) == (JournalLine(7, text),)


@pytest.mark.parametrize("remark", ["-- No entries --", "", '{"__REALTIME_TIMES', '{"MESSAGE": "x"}', "[]"])
def test_what_is_no_entry_is_left_out(fp: FakeProcess, remark: str) -> None:
    assert answer(fp, remark, entry("kept")) == (JournalLine(7, "kept"),)


@pytest.mark.parametrize(
    ("stderr", "returncode", "hint"),
    [
        ("Failed to open the journal: Permission denied", 1, "systemd-journal"),
        ("No journal files were found.", 0, "journalctl -n 5"),
        ("", 1, "journalctl -n 5"),
    ],
)
def test_a_journal_that_cannot_be_read(fp: FakeProcess, stderr: str, returncode: int, hint: str) -> None:
    with pytest.raises(LlmError) as caught:
        answer(fp, stderr=stderr, returncode=returncode)
    assert caught.value.code is ErrorCode.LOGS_UNAVAILABLE
    assert hint in (caught.value.hint or "")
    assert (stderr or "without saying why") in caught.value.message


def test_without_journalctl(fp: FakeProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    fp.allow_unregistered(True)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(LlmError, match="cannot be run") as caught:
        asyncio.run(tail(IDENTIFIER, 10))
    assert caught.value.code is ErrorCode.LOGS_UNAVAILABLE
