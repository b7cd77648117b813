"""Reading the journal: real units, a real journald, the real journalctl."""

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.serving import journal
from lllm3090d.serving.journal import LINES_MAX, JournalLine

pytestmark = pytest.mark.system
T = TypeVar("T")
TIMEOUT_S = 30.0
Scenario = Callable[[str], Awaitable[T]]


def play(scenario: Scenario[T]) -> T:
    """Run a scenario with an identifier of its own, bounded; no journalctl may be left behind."""

    async def run() -> T:
        async with asyncio.timeout(TIMEOUT_S * 2):
            result = await scenario(f"lllm3090-test{uuid.uuid4().hex[:8]}")
        assert children() == []
        return result

    return asyncio.run(run())


def children() -> list[str]:
    """Commands of the processes that this one has started and not ended."""
    names = []
    for process in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            _, name, rest = re.split(r" \((.*)\) ", process.read_text(encoding="utf-8"))
            if int(rest.split()[1]) == os.getpid():
                names.append(name)
    return names


async def unit(identifier: str, program: str) -> str:
    """Run a Python program as a unit to its end; the name of the unit."""
    name = f"{identifier}.service"
    done = await asyncio.to_thread(
        subprocess.run,
        [
            *("systemd-run", "--user", "--quiet", "--wait", "--collect", f"--unit={name}"),
            *(f"--property=SyslogIdentifier={identifier}", "--property=Type=exec"),
            *(sys.executable, "-c", program),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Failed to" not in done.stderr, done.stderr
    return name


def messages(lines: tuple[JournalLine, ...]) -> list[str]:
    return [line.message for line in lines]


def say(identifier: str, *texts: str) -> None:
    """Write entries, and return once journald has them."""
    for text in texts:
        subprocess.run(["systemd-cat", f"--identifier={identifier}", "echo", text], check=True)


async def written(identifier: str, count: int) -> tuple[JournalLine, ...]:
    """The entries of an identifier once there are so many: follow() waits for them."""
    lines: list[JournalLine] = []
    follower = journal.follow(identifier, lines=count)
    async for line in follower:
        lines.append(line)
        if len(lines) == count:
            break
    await follower.aclose()
    return tuple(lines)


def test_the_last_lines_come_in_order_and_no_more_than_asked() -> None:
    async def scenario(identifier: str) -> None:
        begin_us = time.time_ns() // 1000
        await unit(identifier, "for n in range(20): print('line', n)")
        await written(identifier, 20)
        lines = await journal.tail(identifier, 5)
        assert messages(lines) == [f"line {n}" for n in range(15, 20)]
        assert all(begin_us <= line.at_realtime_us <= time.time_ns() // 1000 for line in lines)
        assert len(await journal.tail(identifier, LINES_MAX)) == 20
        assert await journal.tail(identifier, 0) == ()

    play(scenario)


@pytest.mark.parametrize("lines", [-1, LINES_MAX + 1])
def test_an_impossible_number_of_lines_is_an_error(lines: int) -> None:
    async def scenario(identifier: str) -> None:
        with pytest.raises(ValueError, match="is not within 0 to"):
            await journal.tail(identifier, lines)
        with pytest.raises(ValueError, match="is not within 0 to"):
            await anext(journal.follow(identifier, lines))
        with pytest.raises(ValueError, match="is not within 0 to"):
            await journal.last_lines_after_death(identifier, "x.service", lines)

    play(scenario)


def test_bytes_long_lines_and_odd_characters_come_through() -> None:
    async def scenario(identifier: str) -> None:
        program = (
            "import sys\n"
            "out = sys.stdout.buffer\n"
            "out.write(b'bell \\x07 and \\xff\\n')\n"
            "out.write('na\\u00efve \\U0001f999 \\\\ \"quoted\" $x;%n\\n'.encode())\n"
            "out.write(b'x' * 40000 + b'\\n')\n"
            "out.write(b'last without newline')\n"
        )
        await unit(identifier, program)
        assert messages(await written(identifier, 4)) == [
            "bell \x07 and \ufffd",
            'naïve 🦙 \\ "quoted" $x;%n',
            "x" * 40_000,
            "last without newline",
        ]

    play(scenario)


def test_an_entry_with_several_messages_or_none_is_read_too() -> None:
    import socket

    async def scenario(identifier: str) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as native:
            native.connect("/run/systemd/journal/socket")
            native.send(f"SYSLOG_IDENTIFIER={identifier}\nMESSAGE=one\nMESSAGE=two\n".encode())
            native.send(f"SYSLOG_IDENTIFIER={identifier}\nOTHER=x\n".encode())
        assert messages(await written(identifier, 2)) == ["one\ntwo", ""]

    play(scenario)


def test_nothing_written_is_no_error() -> None:
    async def scenario(identifier: str) -> None:
        assert await journal.tail(identifier, 10) == ()

    play(scenario)


def test_entries_of_another_user_are_not_ours() -> None:
    async def scenario(identifier: str) -> None:
        say(identifier, "mine")
        await written(identifier, 1)
        assert messages(await journal.tail(identifier, 10)) == ["mine"]
        assert messages(await journal.tail(identifier, 10, uid=os.getuid())) == ["mine"]
        assert await journal.tail(identifier, 10, uid=os.getuid() + 1) == ()

    play(scenario)


def test_following_shows_what_is_there_and_then_what_comes() -> None:
    async def scenario(identifier: str) -> None:
        say(identifier, "one", "two", "three")
        await written(identifier, 3)
        follower = journal.follow(identifier, lines=2)
        assert [(await anext(follower)).message for _ in range(2)] == ["two", "three"]
        say(identifier, "four")
        assert (await anext(follower)).message == "four"
        await follower.aclose()

    play(scenario)


def test_a_follower_that_is_cancelled_leaves_no_process() -> None:
    async def scenario(identifier: str) -> None:
        say(identifier, "one")
        got = asyncio.Event()

        async def read() -> None:
            async for _ in journal.follow(identifier, lines=1):
                got.set()

        task = asyncio.create_task(read())
        await got.wait()
        assert children() == ["journalctl"]
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    play(scenario)


@pytest.mark.parametrize("status", [1, 2, 3])
def test_the_last_words_of_the_dead_are_complete(status: int) -> None:
    async def scenario(identifier: str) -> None:
        name = await unit(identifier, f"import sys\nfor n in range(200): print(n)\nsys.exit({status})")
        begin = time.monotonic()
        lines = await journal.last_lines_after_death(identifier, name, 50, timeout_s=TIMEOUT_S)
        took_s = time.monotonic() - begin
        assert messages(lines) == [str(n) for n in range(150, 200)]
        assert took_s < TIMEOUT_S  # the report of the end was recognised

    play(scenario)


def test_a_good_end_which_systemd_does_not_report_has_its_last_words_too() -> None:
    async def scenario(identifier: str) -> None:
        name = await unit(identifier, "print('bye')")
        await written(identifier, 1)
        assert messages(await journal.last_lines_after_death(identifier, name, 5, timeout_s=0.5)) == ["bye"]

    play(scenario)


def test_a_death_that_nobody_reports_is_waited_for_no_longer_than_allowed() -> None:
    """Systemd says nothing of this one: without a limit it would be waited for for ever."""

    async def scenario(identifier: str) -> None:
        say(identifier, "one")
        await written(identifier, 1)
        begin = time.monotonic()
        lines = await journal.last_lines_after_death(identifier, "no-such.service", 10, timeout_s=0.5)
        assert messages(lines) == ["one"]
        assert 0.5 <= time.monotonic() - begin < TIMEOUT_S
        assert await journal.last_lines_after_death(identifier, "no-such.service", 0) == ()

    play(scenario)


def test_without_journalctl_the_logs_are_unavailable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def scenario(identifier: str) -> None:
        for attempt in (
            journal.tail(identifier, 1),
            anext(journal.follow(identifier)),
            journal.last_lines_after_death(identifier, "x.service", 1),
        ):
            with pytest.raises(LlmError, match="journalctl cannot be run: No such file") as caught:
                await attempt
            assert caught.value.code is ErrorCode.LOGS_UNAVAILABLE
            assert caught.value.hint

    monkeypatch.setenv("PATH", str(tmp_path))
    play(scenario)


@pytest.mark.parametrize(
    ("script", "message", "hint"),
    [
        # What journalctl 252 says, and its exit status, where an ordinary user may read no journal file.
        (
            "echo No journal files were opened due to insufficient permissions. >&2; exit 1",
            "due to insufficient permissions",
            "systemd-journal",
        ),
        ("echo No journal files were found. >&2; exit 0", "No journal files were found", "journalctl -n 5"),
        ("exit 3", "ended without saying why", "journalctl -n 5"),
    ],
)
def test_a_journal_that_cannot_be_read_is_not_an_empty_one(
    script: str, message: str, hint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def scenario(identifier: str) -> None:
        for attempt in (
            journal.tail(identifier, 1),
            anext(journal.follow(identifier)),
            journal.last_lines_after_death(identifier, "x.service", 1),
        ):
            with pytest.raises(LlmError, match=message) as caught:
                await attempt
            assert caught.value.code is ErrorCode.LOGS_UNAVAILABLE
            assert caught.value.hint is not None and hint in caught.value.hint

    stand_in = tmp_path / "journalctl"
    stand_in.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    play(scenario)


def test_half_an_entry_of_a_journalctl_that_was_killed_is_no_entry(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def scenario(identifier: str) -> None:
        assert [line.message for line in await journal.tail(identifier, 9)] == ["whole"]
        with pytest.raises(LlmError) as caught:
            await journal.last_lines_after_death(identifier, "x.service", 9)
        assert caught.value.code is ErrorCode.LOGS_UNAVAILABLE

    whole = json.dumps({"__REALTIME_TIMESTAMP": "1", "MESSAGE": "whole"})
    stand_in = tmp_path / "journalctl"
    stand_in.write_text(f"#!/bin/sh\nprintf '%s\\n%s' '{whole}' '{whole[:-9]}'\n", encoding="utf-8")
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    play(scenario)


def test_an_entry_beyond_all_bounds_ends_the_following_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def scenario(identifier: str) -> None:
        follower = journal.follow(identifier)
        assert (await anext(follower)).message == "small"
        with pytest.raises(LlmError, match="an entry is larger than 1024 bytes") as caught:
            await anext(follower)
        assert caught.value.code is ErrorCode.LOGS_UNAVAILABLE

    entries = [{"__REALTIME_TIMESTAMP": "1", "MESSAGE": text} for text in ("small", "x" * 100_000)]
    (tmp_path / "entries").write_text("\n".join(map(json.dumps, entries)) + "\n", encoding="utf-8")
    stand_in = tmp_path / "journalctl"
    stand_in.write_text(f"#!/bin/sh\nexec /bin/cat {tmp_path}/entries\n", encoding="utf-8")
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(journal, "LINE_BYTES_MAX", 1024)
    play(scenario)
