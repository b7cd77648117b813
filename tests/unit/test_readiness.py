"""Readiness against real servers on real Unix sockets, honest, slow, rude and strange ones."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import pytest

from lllm3090d.serving import readiness
from lllm3090d.serving.load_watch import LoadCounters, LoadLimits, LoadVerdict
from lllm3090d.serving.readiness import Health, Progress, belongs_to, cgroups_of, health, wait_until_ready

pytestmark = pytest.mark.unit

TIMEOUT_S = 60.0
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 15\r\n\r\n" + b'{"status":"ok"}'
LOADING = b'HTTP/1.1 503 Service Unavailable\r\nContent-Length: 2\r\n\r\n{"'
T = TypeVar("T")


def run(work: Awaitable[T]) -> T:
    return asyncio.run(asyncio.wait_for(work, TIMEOUT_S))


@pytest.fixture
def path() -> Iterator[Path]:
    """A socket path that is short enough wherever the tests run."""
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory, "engine.sock")


@pytest.fixture
def own_cgroup() -> str:
    """The cgroup of the tests' own process, which runs the servers: the unit's, as far as readiness can see."""
    return min(cgroups_of(os.getpid()))


@dataclass
class Server:
    """Answers every request with what `answer` is at that moment, and remembers the requests."""

    answer: bytes
    requests: list[bytes] = field(default_factory=list)
    asked: asyncio.Condition = field(default_factory=asyncio.Condition)
    talks: asyncio.Event = field(default_factory=asyncio.Event)
    connections: set[asyncio.Task[None] | None] = field(default_factory=set)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.add(asyncio.current_task())
        # The client may leave at any time.
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            self.requests.append(await reader.readuntil(b"\r\n\r\n"))
            async with self.asked:
                self.asked.notify_all()
            await self.talks.wait()
            writer.write(self.answer)
            await writer.drain()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async def wait_for_requests(self, count: int) -> None:
        async with self.asked:
            await self.asked.wait_for(lambda: len(self.requests) >= count)


@contextlib.asynccontextmanager
async def serving(path: Path, answer: bytes) -> AsyncIterator[Server]:
    server = Server(answer)
    server.talks.set()
    async with await asyncio.start_unix_server(server.serve, path):
        yield server
        server.talks.set()
        # Connections are served in order: once this one is answered, all others have begun and can be awaited.
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(b"\r\n\r\n")
        await reader.read()
        writer.close()
        await writer.wait_closed()
        await asyncio.gather(*(connection for connection in server.connections if connection))


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (OK, Health.READY),
        (b"HTTP/1.0 200\r\n\r\n", Health.READY),
        (LOADING, Health.LOADING),
        (b"HTTP/1.1 404 Not Found\r\n\r\n", Health.LOADING),
        (b"HTTP/1.1 2000 What\r\n\r\n", Health.LOADING),
        (b"HTTP/1.1\r\n\r\n", Health.LOADING),
        (b"SSH 200 OK\r\n", Health.LOADING),
        (b"200 OK\r\n", Health.LOADING),
        (b"\x00\xff\xfe\r\n\r\n", Health.LOADING),
        (b"\r\n\r\nHTTP/1.1 200 OK\r\n", Health.LOADING),
        (b"", Health.LOADING),
        (b"HTTP/1.1 200", Health.READY),
        (b"x" * 1_000_000, Health.LOADING),
    ],
    ids=lambda value: repr(value[:24]) if isinstance(value, bytes) else str(value),
)
def test_an_answer_is_judged_by_its_status_line(
    path: Path, own_cgroup: str, answer: bytes, expected: Health
) -> None:
    async def scenario() -> None:
        async with serving(path, answer) as server:
            assert await health(path, own_cgroup) is expected
            (request,) = server.requests
            assert request.startswith(b"GET /health HTTP/1.1\r\nHost:")

    run(scenario())


def test_nobody_listens(path: Path, own_cgroup: str) -> None:
    assert run(health(path, own_cgroup)) is Health.SILENT


def test_the_file_of_a_dead_server_is_silent(path: Path, own_cgroup: str) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
    assert path.is_socket()
    assert run(health(path, own_cgroup)) is Health.SILENT


def test_a_file_that_is_no_socket_is_silent(path: Path, own_cgroup: str) -> None:
    path.write_text("x")
    assert run(health(path, own_cgroup)) is Health.SILENT


def test_a_path_that_no_socket_can_have_is_silent(path: Path, own_cgroup: str) -> None:
    assert run(health(path.with_name("x" * 120), own_cgroup)) is Health.SILENT


def test_a_server_that_accepts_and_says_nothing_is_given_up(
    path: Path, own_cgroup: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readiness, "HEALTH_TIMEOUT_S", 0.2)

    async def scenario() -> None:
        async with serving(path, OK) as server:
            server.talks.clear()
            assert await health(path, own_cgroup) is Health.SILENT
            await server.wait_for_requests(1)
            assert len(server.requests) == 1

    run(scenario())


# --- whose listener it is ----------------------------------------------------------------------------------


def test_a_listener_outside_the_unit_is_a_stranger_and_not_asked(path: Path) -> None:
    async def scenario() -> None:
        async with serving(path, OK) as server:
            for control_group in ("/some.slice/lllm3090-x-1.service", ""):
                assert await health(path, control_group) is Health.STRANGER
            # Both connections are closed before this one is served, so nothing of them can still come.
            assert await health(path, min(cgroups_of(os.getpid()))) is Health.READY
            assert len(server.requests) == 1

    run(scenario())


def test_our_own_cgroup_is_known() -> None:
    groups = cgroups_of(os.getpid())
    assert groups
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    assert groups <= {line.split(":", 2)[2] for line in lines}


def test_a_process_that_is_gone_is_in_no_cgroup(tmp_path: Path) -> None:
    assert cgroups_of(7, tmp_path) == frozenset()
    assert not belongs_to(7, "/", tmp_path)


UNIT = "/user.slice/user@1000.service/lllm3090.slice/lllm3090-qwen-1.service"


@pytest.mark.parametrize(
    ("cgroup", "expected"),
    [
        (f"0::{UNIT}\n", True),
        (f"0::{UNIT}/sub/group\n", True),
        (f"0::{UNIT}0\n", False),
        (f"0::{UNIT.removesuffix('.service')}\n", False),
        ("0::/user.slice/user@1000.service/lllm3090.slice\n", False),
        ("0::/\n", False),
        ("", False),
        (f"9:name=systemd:{UNIT}\n4:memory:/elsewhere\n0::/\n", True),
        (f"9:name=systemd:/elsewhere\n4:memory:{UNIT}\n0::/\n", False),
        (f"0::/a:b{UNIT}\n", False),
    ],
)
def test_what_belongs_to_a_unit(tmp_path: Path, cgroup: str, expected: bool) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "cgroup").write_text(cgroup)
    assert belongs_to(7, UNIT, tmp_path) is expected


def test_a_cgroup_with_a_colon_is_read_whole(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "cgroup").write_text("0::/a:b/c\n")
    assert cgroups_of(7, tmp_path) == {"/a:b/c"}


# --- waiting -----------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Intervals that let a test see many rounds."""
    monkeypatch.setattr(readiness, "PROGRESS_INTERVAL_S", 0.005)
    monkeypatch.setattr(readiness, "LONGEST_INTERVAL_S", 0.005)


def ignore(_: Progress) -> None:
    """Progress that nobody wants to see."""


def wait(
    path: Path,
    control_group: str | Callable[[], str],
    *,
    resident: Callable[[], int] = lambda: 1,
    on_progress: Callable[[Progress], None] = ignore,
    stall_timeout_s: float = 3600.0,
    cap_s: float = 3600.0,
    counters: Callable[[], LoadCounters] = LoadCounters,
) -> Awaitable[LoadVerdict | None]:
    group = control_group if callable(control_group) else lambda: control_group
    return wait_until_ready(
        path, group, resident, on_progress, limits=LoadLimits(stall_timeout_s, cap_s), counters=counters
    )


def test_waiting_ends_when_the_server_turns_200(path: Path, own_cgroup: str) -> None:
    async def scenario() -> None:
        async with serving(path, LOADING) as server:
            waiting = asyncio.ensure_future(wait(path, own_cgroup))
            await server.wait_for_requests(3)
            assert not waiting.done()
            server.answer = OK
            assert await waiting is None

    run(scenario())


def test_waiting_begins_before_anybody_listens(path: Path, own_cgroup: str) -> None:
    async def scenario() -> None:
        looked = asyncio.Event()

        def control_group() -> str:
            looked.set()
            return own_cgroup

        waiting = asyncio.ensure_future(wait(path, control_group))
        await looked.wait()
        async with serving(path, OK):
            assert await waiting is None

    run(scenario())


def test_the_cgroup_may_become_known_later(path: Path, own_cgroup: str) -> None:
    async def scenario() -> None:
        answers = iter(["", "", "/some.slice", own_cgroup])
        async with serving(path, OK) as server:
            assert await wait(path, lambda: next(answers)) is None
            assert len(server.requests) == 1

    run(scenario())


def test_an_engine_that_is_ready_at_once_costs_no_wait(path: Path, own_cgroup: str) -> None:
    async def scenario() -> None:
        async with serving(path, OK) as server:
            # Neither progress nor memory is asked for.
            assert await wait(path, own_cgroup, resident=lambda: 1 // 0) is None
            assert len(server.requests) == 1

    run(scenario())


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("resident", [0, 4096])
def test_a_load_without_growth_is_given_up(path: Path, own_cgroup: str, resident: int) -> None:
    seen: list[Progress] = []

    async def scenario() -> None:
        async with serving(path, LOADING):
            ready = wait(
                path,
                own_cgroup,
                resident=lambda: resident,
                on_progress=seen.append,
                stall_timeout_s=0.05,
            )
            assert await ready is LoadVerdict.STALLED

    began = time.monotonic()
    run(scenario())
    assert time.monotonic() - began > 0.05
    assert {progress.resident_bytes for progress in seen} == {resident}
    assert seen[-1].idle_s > 0.05
    assert all(progress.idle_s <= 0.05 for progress in seen[:-1])


@pytest.mark.usefixtures("quick")
def test_growth_keeps_a_load_alive_longer_than_the_limit(path: Path, own_cgroup: str) -> None:
    limit_s = 0.05
    seen: list[Progress] = []

    async def scenario() -> None:
        async with serving(path, LOADING) as server:

            def note(progress: Progress) -> None:
                seen.append(progress)
                if progress.elapsed_s > 4 * limit_s:
                    server.answer = OK

            growth = iter(range(1, 1_000_000))
            ready = wait(
                path,
                own_cgroup,
                resident=lambda: next(growth),
                on_progress=note,
                stall_timeout_s=limit_s,
            )
            assert await ready is None

    run(scenario())
    assert seen[-1].elapsed_s > 4 * limit_s
    assert all(progress.idle_s == 0 for progress in seen)
    elapsed = [progress.elapsed_s for progress in seen]
    assert elapsed == sorted(elapsed)
    assert [progress.resident_bytes for progress in seen] == list(range(1, len(seen) + 1))


@pytest.mark.usefixtures("quick")
def test_memory_that_shrinks_and_comes_back_is_no_growth(path: Path, own_cgroup: str) -> None:
    figures = iter([5, 9] + [1, 9] * 1_000_000)

    async def scenario() -> None:
        async with serving(path, LOADING):
            given_up = await wait(path, own_cgroup, resident=lambda: next(figures), stall_timeout_s=0.05)
            assert given_up is LoadVerdict.STALLED

    run(scenario())


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("name", ["read_bytes", "disk_bytes", "written_bytes", "resident_bytes"])
def test_a_load_that_only_reads_or_logs_gets_on(path: Path, own_cgroup: str, name: str) -> None:
    """Its memory was taken at once, as an engine does that fills a card through a staging buffer."""
    seen: list[Progress] = []
    growth = iter(range(1, 1_000_000))

    async def scenario() -> None:
        async with serving(path, LOADING) as server:

            def note(progress: Progress) -> None:
                seen.append(progress)
                if progress.elapsed_s > 0.2:
                    server.answer = OK

            ready = wait(
                path,
                own_cgroup,
                resident=lambda: 1 << 30,
                counters=lambda: LoadCounters(**{name: next(growth)}),
                on_progress=note,
                stall_timeout_s=0.05,
            )
            assert await ready is None

    run(scenario())
    assert seen[-1].elapsed_s > 0.2


@pytest.mark.usefixtures("quick")
def test_a_load_that_gets_on_for_ever_is_given_up_at_its_bound(path: Path, own_cgroup: str) -> None:
    growth = iter(range(1, 1_000_000))

    async def scenario() -> None:
        async with serving(path, LOADING):
            ready = wait(path, own_cgroup, resident=lambda: next(growth), stall_timeout_s=0.05, cap_s=0.1)
            assert await ready is LoadVerdict.TOO_LONG

    began = time.monotonic()
    run(scenario())
    assert time.monotonic() - began > 0.1


@pytest.mark.usefixtures("quick")
def test_a_stranger_never_makes_it_ready(path: Path) -> None:
    async def scenario() -> None:
        async with serving(path, OK):
            assert await wait(path, "/some.slice/x.service", stall_timeout_s=0.05) is LoadVerdict.STALLED

    run(scenario())


def test_waiting_can_be_cancelled(path: Path, own_cgroup: str) -> None:
    async def scenario() -> None:
        async with serving(path, LOADING) as server:
            waiting = asyncio.ensure_future(wait(path, own_cgroup))
            await server.wait_for_requests(1)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting

    run(scenario())
