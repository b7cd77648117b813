"""Log lines: priorities for the journal only, one record on one line, values that can be told apart."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lllm3090d.log import StructuredFormatter, set_up, to_journal

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def root_logger_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def stderr_file(tmp_path: Path) -> Iterator[io.TextIOWrapper]:
    """A file for the place of stderr; pytest has its own there until the test itself runs."""
    with (tmp_path / "stderr").open("w+") as file:
        yield file


def stream_name(file: io.TextIOWrapper) -> str:
    status = os.fstat(file.fileno())
    return f"{status.st_dev}:{status.st_ino}"


def lines_of(file: io.TextIOWrapper) -> list[str]:
    file.flush()
    return Path(file.name).read_text().splitlines()


def rendered(message: str, *args: object, journal: bool = True, **fields: object) -> str:
    record = logging.LogRecord("x", logging.INFO, "x.py", 1, message, args, None)
    vars(record).update(fields)
    return StructuredFormatter(journal=journal).format(record)


@pytest.mark.parametrize(
    ("level", "priority"),
    [
        (logging.DEBUG, 7),
        (logging.INFO, 6),
        (logging.WARNING, 4),
        (logging.ERROR, 3),
        (logging.CRITICAL, 2),
        (25, 6),
    ],
)
def test_lines_for_the_journal_carry_its_priorities(
    stderr_file: io.TextIOWrapper, monkeypatch: pytest.MonkeyPatch, level: int, priority: int
) -> None:
    monkeypatch.setattr(sys, "stderr", stderr_file)
    monkeypatch.setenv("JOURNAL_STREAM", stream_name(stderr_file))
    assert to_journal()
    set_up("debug")
    logging.getLogger("some.module").log(level, "%s is %s", "qwen", "ready", extra={"run": "abc"})
    assert lines_of(stderr_file) == [f"<{priority}>qwen is ready run=abc"]


@pytest.mark.parametrize("stream", [None, "", "1:1", "garbage"])
def test_lines_for_anything_else_carry_time_and_level(
    stderr_file: io.TextIOWrapper, monkeypatch: pytest.MonkeyPatch, stream: str | None
) -> None:
    # As in a terminal of a session whose JOURNAL_STREAM was inherited: another file than stderr.
    monkeypatch.setattr(sys, "stderr", stderr_file)
    if stream is None:
        monkeypatch.delenv("JOURNAL_STREAM", raising=False)
    else:
        monkeypatch.setenv("JOURNAL_STREAM", stream)
    assert not to_journal()
    set_up("info")
    logging.getLogger("some.module").warning("here")
    (line,) = lines_of(stderr_file)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} warning here", line)


@pytest.mark.parametrize(("level", "written"), [("debug", 4), ("info", 3), ("warning", 2), ("error", 1)])
def test_less_severe_records_are_left_out(
    stderr_file: io.TextIOWrapper, monkeypatch: pytest.MonkeyPatch, level: str, written: int
) -> None:
    monkeypatch.setattr(sys, "stderr", stderr_file)
    monkeypatch.setenv("JOURNAL_STREAM", stream_name(stderr_file))
    set_up(level)
    log = logging.getLogger("some.module")
    for write in (log.debug, log.info, log.warning, log.error):
        write("said")
    assert len(lines_of(stderr_file)) == written


def test_setting_up_again_replaces_the_handler(
    stderr_file: io.TextIOWrapper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stderr_file)
    monkeypatch.setenv("JOURNAL_STREAM", stream_name(stderr_file))
    set_up("info")
    set_up("info")
    logging.getLogger("some.module").info("once")
    assert lines_of(stderr_file) == ["<6>once"]


@pytest.mark.parametrize("journal", [True, False])
@pytest.mark.parametrize(
    "nasty", ["a\nb", "a\r\nb", "a\x0bb", "a\u2028b", "a\x1b[2Jb", "a\x00b", "<3>b\n<2>c", "\n"]
)
def test_one_record_is_one_line(journal: bool, nasty: str) -> None:
    text = rendered("said %s", nasty, journal=journal, field=nasty)
    assert len(text.splitlines()) == 1
    assert text.isprintable()


def test_every_line_of_a_traceback_carries_the_priority() -> None:
    try:
        raise ValueError("first\nsecond")
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, "x.py", 1, "failed", (), sys.exc_info())
    lines = StructuredFormatter(journal=True).format(record).splitlines()
    assert lines[0] == "<3>failed"
    assert len(lines) > 4
    assert all(line.startswith("<3>") for line in lines)
    assert lines[-2:] == ["<3>ValueError: first", "<3>second"]


def test_a_traceback_in_a_terminal_follows_the_line() -> None:
    try:
        raise ValueError("why")
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, "x.py", 1, "failed", (), sys.exc_info())
    lines = StructuredFormatter(journal=False).format(record).splitlines()
    assert lines[0].endswith(" error failed")
    assert lines[1].startswith("Traceback")
    assert lines[-1] == "ValueError: why"


@pytest.mark.parametrize(
    "value", ["", "two words", 'say "so"', "a=b", "tab\there", "line\nbreak", "\udcff", "\x7f"]
)
def test_values_that_could_be_mistaken_are_quoted(value: str) -> None:
    text = rendered("message", field=value)
    assert text.startswith("<6>message field=")
    assert json.loads(text.removeprefix("<6>message field=")) == value


@pytest.mark.parametrize("value", ["plain", "Größe", "日本語", "/a/b.sock", 17, 1.5, True, None, Path("/x")])
def test_plain_values_are_not_quoted(value: object) -> None:
    assert rendered("message", field=value) == f"<6>message field={value}"


def test_fields_keep_their_order() -> None:
    assert rendered("m", b=1, a=2, c=3) == "<6>m b=1 a=2 c=3"
