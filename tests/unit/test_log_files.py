"""Log files: bounded while they are written, no line lost, whole lines read; and which log a run has."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import AsyncGenerator, Awaitable
from pathlib import Path
from typing import TypeVar

import pytest

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.serving import engine_logs, log_files
from lllm3090d.serving.engine_logs import EngineLogs, LogEntry, with_log_file
from lllm3090d.serving.journal import LINES_MAX
from lllm3090d.serving.journal_access import JournalAccess
from lllm3090d.serving.log_files import (
    BLOCK_BYTES,
    KEPT_DAYS,
    KEPT_FILES,
    last_lines,
    log_file,
    make,
    tend,
    trim,
)
from lllm3090d.serving.log_keeper import LogKeeper
from lllm3090d.serving.unit_spec import LOG_FILE_PROPERTY, UnitSpec

pytestmark = pytest.mark.unit

TIMEOUT_S = 60.0
UNIT = "lllm3090-m-r.service"
T = TypeVar("T")


def run(work: Awaitable[T]) -> T:
    return asyncio.run(asyncio.wait_for(work, TIMEOUT_S))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_files, "KEPT_BYTES", 4 * BLOCK_BYTES)
    monkeypatch.setattr(log_files, "MOST_BYTES", 8 * BLOCK_BYTES)


def used_bytes(path: Path) -> int:
    os.sync()
    return path.stat().st_blocks * 512


class Engine:
    """Writes as systemd has it write: at the end of the file, wherever that is."""

    def __init__(self, path: Path) -> None:
        make(path)
        self.path = path
        self.file = os.open(path, os.O_WRONLY | os.O_APPEND)
        self.lines = 0

    def say(self, count: int) -> None:
        for _ in range(count):
            os.write(self.file, f"line {self.lines:06d} {'x' * 50}\n".encode())
            self.lines += 1

    def close(self) -> None:
        os.close(self.file)


def test_a_file_is_private(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "a.log"
    make(path)
    make(path)  # again: what is in it stays
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.usefixtures("small")
def test_a_file_is_bounded_while_it_is_written_and_no_line_is_lost(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "a.log")
    for _ in range(20):
        engine.say(300)
        trim(engine.path)
        lines = last_lines(engine.path, 100_000)
        numbers = [int(line.split()[1]) for line in lines]
        assert numbers == list(range(numbers[0], engine.lines))
    assert used_bytes(engine.path) <= log_files.MOST_BYTES + BLOCK_BYTES
    assert engine.path.stat().st_size > 20 * BLOCK_BYTES
    assert 200 < len(lines) < 1000
    engine.close()


@pytest.mark.usefixtures("small")
def test_where_nothing_can_be_punched_out_the_file_is_cut_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(_descriptor: int, _end: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(log_files, "_punch", unsupported)
    engine = Engine(tmp_path / "a.log")
    engine.say(2000)
    trim(engine.path)
    assert engine.path.stat().st_size == 0
    engine.say(2)
    assert [line.split()[1] for line in last_lines(engine.path, 9)] == ["002000", "002001"]
    engine.close()


@pytest.mark.usefixtures("small")
def test_small_files_are_left_alone(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "a.log")
    engine.say(10)
    trim(engine.path)
    assert len(last_lines(engine.path, 99)) == 10
    engine.close()


@pytest.mark.parametrize(
    ("content", "count", "lines"),
    [
        (b"", 9, ()),
        (b"one\ntwo\n", 9, ("one", "two")),
        (b"one\ntwo\n", 1, ("two",)),
        (b"one\ntwo\n", 0, ()),
        (b"one\nunfinished", 9, ("one", "unfinished")),
        (b"10 %\r50 %\r100 %\r\nnext\r\n", 9, ("100 %", "next")),
        (b"\xff\x00\n\n", 9, ("\ufffd\x00", "")),
    ],
)
def test_lines_are_whole(tmp_path: Path, content: bytes, count: int, lines: tuple[str, ...]) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(content)
    assert last_lines(path, count) == lines


def test_files_of_ended_runs_go_the_oldest_first(tmp_path: Path) -> None:
    now = time.time()
    for n in range(KEPT_FILES + 5):
        path = log_file(tmp_path, f"run-{n}")
        make(path)
        os.utime(path, (now - 1000 + n, now - 1000 + n))
    make(tmp_path / "no-log")
    assert tend(tmp_path, {"run-0"})
    left = {path.stem for path in tmp_path.glob("*.log")}
    assert left == {"run-0", *(f"run-{n}" for n in range(5, KEPT_FILES + 5))}
    assert (tmp_path / "no-log").exists()
    assert not tend(tmp_path, set())
    for path in tmp_path.glob("*.log"):
        os.utime(path, (now - KEPT_DAYS * 86_400 - 10, now - KEPT_DAYS * 86_400 - 10))
    assert tend(tmp_path, {"run-7"})
    assert {path.stem for path in tmp_path.glob("*.log")} == {"run-7"}
    assert not tend(tmp_path / "nowhere", set())


def test_one_file_that_cannot_be_bounded_does_not_keep_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.log").mkdir()
    make(log_file(tmp_path, "b"))
    assert tend(tmp_path, {"b"})
    assert "cannot be bounded" in caplog.text


# --- which log a run has -----------------------------------------------------------------------------------


def logs_at(directory: Path) -> tuple[EngineLogs, Path]:
    return EngineLogs(lambda: directory), log_file(directory, UNIT.removesuffix(".service"))


def test_a_run_with_a_file_has_its_log_there(tmp_path: Path) -> None:
    logs, path = logs_at(tmp_path)
    assert logs.file_of(UNIT) is None
    path.write_text("one\ntwo\n")
    assert logs.file_of(UNIT) == path
    assert run(logs.tail(UNIT, 1)) == (LogEntry(None, "two"),)
    assert run(logs.last_words(UNIT, 9)) == (LogEntry(None, "one"), LogEntry(None, "two"))
    assert EngineLogs().file_of(UNIT) is None


def test_lines_without_times_have_no_since(tmp_path: Path) -> None:
    logs, path = logs_at(tmp_path)
    path.touch()
    with pytest.raises(LlmError, match="no times") as caught:
        run(logs.tail(UNIT, 1, since_us=1))
    assert caught.value.code is ErrorCode.INVALID_REQUEST
    with pytest.raises(LlmError, match="no times"):
        logs.check_time(UNIT, 1)
    logs.check_time(UNIT, None)


@pytest.mark.parametrize("lines", [-1, LINES_MAX + 1])
def test_an_impossible_number_of_lines_is_an_error(tmp_path: Path, lines: int) -> None:
    logs, path = logs_at(tmp_path)
    path.touch()
    with pytest.raises(ValueError, match="is not within 0 to"):
        run(logs.tail(UNIT, lines))


def test_a_file_that_cannot_be_read_says_so(tmp_path: Path) -> None:
    logs, path = logs_at(tmp_path)
    path.mkdir()
    with pytest.raises(LlmError, match="cannot be read") as caught:
        run(logs.tail(UNIT, 1))
    assert caught.value.code is ErrorCode.LOGS_UNAVAILABLE


async def following(stream: AsyncGenerator[LogEntry, None], count: int) -> list[str]:
    return [(await anext(stream)).message for _ in range(count)]


def test_following_goes_on_also_over_a_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_logs, "FOLLOW_POLL_S", 0.001)
    logs, path = logs_at(tmp_path)

    async def scenario() -> None:
        engine = Engine(path)
        engine.say(3)
        stream = logs.follow(UNIT, 1)
        assert (await following(stream, 1))[0].startswith("line 000002")
        engine.say(2)
        assert [text[:11] for text in await following(stream, 2)] == ["line 000003", "line 000004"]
        os.write(engine.file, b"half")
        os.write(engine.file, b" and half\n")
        assert await following(stream, 1) == ["half and half"]
        coming = asyncio.create_task(following(stream, 1))
        os.truncate(path, 0)
        os.write(engine.file, b"after the cut\n")
        assert await coming == ["after the cut"]
        await stream.aclose()
        engine.close()

    run(scenario())


def test_a_launch_whose_file_cannot_be_made_logs_to_the_journal(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "a.log"
    properties = {"Type": "exec", LOG_FILE_PROPERTY: str(path), "StandardErrorFileToAppend": str(path)}
    spec = UnitSpec(UNIT, properties)
    assert with_log_file(spec) == properties
    assert path.exists()
    path.unlink()
    path.parent.rmdir()
    path.parent.touch()
    assert with_log_file(spec) == {"Type": "exec"}
    assert with_log_file(UnitSpec(UNIT, {"Type": "exec"})) == {"Type": "exec"}


# --- the keeper --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("problem", [None, LlmError(ErrorCode.LOGS_UNAVAILABLE, "closed")])
def test_where_logs_go_is_known_once_the_journal_was_probed(
    tmp_path: Path, problem: LlmError | None
) -> None:
    async def scenario() -> None:
        asked = asyncio.Event()

        async def probe() -> JournalAccess:
            await asked.wait()
            return JournalAccess(problem)

        keeper = LogKeeper(lambda: tmp_path / "logs", frozenset, probe)
        tasks: list[asyncio.Task[None]] = []
        told: list[Path | None] = []
        keeper.start(
            lambda work: tasks.append(asyncio.create_task(work)), lambda: told.append(keeper.files_dir)
        )
        waiting = asyncio.create_task(keeper.probed())
        await asyncio.sleep(0)
        assert not waiting.done()
        assert keeper.files_dir is None
        asked.set()
        await waiting
        assert keeper.problem is problem
        assert told == [tmp_path / "logs" if problem else None]
        tasks[0].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    run(scenario())
