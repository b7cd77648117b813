"""Whether an engine is busy: against real servers on real Unix sockets, and the fake engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pytest

from lllm3090d.serving import activity as module
from lllm3090d.serving.activity import ActivityWatch, EngineSocket, in_flight
from lllm3090d.serving.events import Activity
from lllm3090d.serving.hangs import EngineWork, SlotLook
from lllm3090d.serving.readiness import cgroups_of
from tests.fakes.engine import install_fake_engine, set_behaviour
from tests.fakes.unix_http import call, health

pytestmark = pytest.mark.unit

T = TypeVar("T")
LIMIT_S = 60.0
OWN = min(cgroups_of(os.getpid()))
UNKNOWN = Activity(None, None)
NO_ANSWER = Activity(busy=True, served_tokens=None)
NOT_OFFERED = b"HTTP/1.1 501 Not Implemented\r\nContent-Length: 2\r\n\r\n{}"


def run(work: Awaitable[T]) -> T:
    return asyncio.run(asyncio.wait_for(work, LIMIT_S))


@pytest.fixture
def path() -> Iterator[Path]:
    """A socket path that is short enough wherever the tests run."""
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory, "engine.sock")


def ok(body: bytes, more: str = "") -> bytes:
    return f"HTTP/1.1 200 OK\r\n{more}Content-Length: {len(body)}\r\n\r\n".encode() + body


def metrics(**values: object) -> bytes:
    lines = [
        f"# HELP llamacpp:{k} x\n# TYPE llamacpp:{k} gauge\nllamacpp:{k} {v}\n" for k, v in values.items()
    ]
    return ok("".join(lines).encode())


def slots(*busy: object) -> bytes:
    return ok(json.dumps([{"id": i, "is_processing": state} for i, state in enumerate(busy)]).encode())


IDLE = metrics(requests_processing=0, requests_deferred=0, prompt_tokens_total=7, tokens_predicted_total=60)


class Server:
    """Answers by target; None keeps silent until the end."""

    def __init__(self, answers: Mapping[str, bytes | None]) -> None:
        self.answers = dict(answers)
        self.asked: list[str] = []
        self.most_at_once = 0
        self.end = asyncio.Event()
        self._now = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._now += 1
        self.most_at_once = max(self.most_at_once, self._now)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            target = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
            self.asked.append(target)
            answer = self.answers[target]
            if answer is None:
                await self.end.wait()
            else:
                await asyncio.sleep(0)  # let others come
                writer.write(answer)
                await writer.drain()
        self._now -= 1
        writer.close()


@contextlib.asynccontextmanager
async def serving(path: Path, **answers: bytes | None) -> AsyncIterator[Server]:
    server = Server({f"/{name}": answer for name, answer in answers.items()})
    async with await asyncio.start_unix_server(server.serve, path):
        try:
            yield server
        finally:
            server.end.set()


async def look(path: Path, *, control_group: str = OWN, timeout_s: float = 5.0) -> Activity:
    seen = await ActivityWatch().look([EngineSocket("r", path, control_group)], timeout_s)
    assert list(seen) == ["r"]
    return seen["r"]


def said(path: Path, **answers: bytes | None) -> tuple[Activity, list[str]]:
    async def scenario() -> tuple[Activity, list[str]]:
        async with serving(path, **answers) as server:
            patience_s = 1.0 if None in answers.values() else LIMIT_S
            return await look(path, timeout_s=patience_s), server.asked

    return run(scenario())


# --- metrics -----------------------------------------------------------------------------------------------


def test_an_idle_engine_and_what_it_served(path: Path) -> None:
    assert said(path, metrics=IDLE) == (Activity(busy=False, served_tokens=67), ["/metrics"])


@pytest.mark.parametrize(("processing", "deferred"), [(1, 0), (0, 1), (3, 9)])
def test_a_request_in_flight_or_waiting_is_busy(path: Path, processing: int, deferred: int) -> None:
    answer = metrics(requests_processing=processing, requests_deferred=deferred, tokens_predicted_total=5)
    assert said(path, metrics=answer)[0] == Activity(busy=True, served_tokens=5)


def test_large_counters_are_read(path: Path) -> None:
    answer = metrics(
        requests_processing=0, prompt_tokens_total="1.23457e+06", tokens_predicted_total="2e+07"
    )
    assert said(path, metrics=answer)[0] == Activity(busy=False, served_tokens=21_234_570)


@pytest.mark.parametrize(
    "answer",
    [
        metrics(requests_processing="many"),
        metrics(requests_processing="nan"),
        metrics(requests_processing="-1"),
        metrics(requests_processing="1e999"),
        metrics(tokens_predicted_total=3),
        ok(b""),
        ok(b"\xff\xfe\x00"),
        ok(b"llamacpp:requests_processing"),
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 many\r\n\r\n",
        b"HTTP/1.1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: much\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * (1 << 21),
    ],
    ids=lambda value: repr(value[:60]),
)
def test_what_no_engine_says_tells_nothing(path: Path, answer: bytes) -> None:
    assert said(path, metrics=answer)[0] == UNKNOWN


@pytest.mark.parametrize("status", ["503 Service Unavailable", "500 Oops", "429 Too Many"])
def test_an_engine_that_cannot_answer_is_busy(path: Path, status: str) -> None:
    answer = f"HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n".encode()
    assert said(path, metrics=answer) == (NO_ANSWER, ["/metrics"])


# --- slots -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", ["404 Not Found", "501 Not Implemented"])
@pytest.mark.parametrize(("busy", "expected"), [((False, False), False), ((False, True), True)])
def test_slots_where_there_are_no_metrics(
    path: Path, status: str, busy: tuple[bool, ...], expected: bool
) -> None:
    missing = f"HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n".encode()
    answer, asked = said(path, metrics=missing, slots=slots(*busy))
    assert answer == Activity(expected, None)
    assert asked == ["/metrics", "/slots"]


def test_neither_is_unknown(path: Path) -> None:
    assert said(path, metrics=NOT_OFFERED, slots=NOT_OFFERED)[0] == UNKNOWN


@pytest.mark.parametrize(
    "answer",
    [
        ok(b"[]"),
        ok(b"{}"),
        ok(b"[1]"),
        ok(b"[[]]"),
        ok(b"nothing"),
        ok(b"[" * 100_000),
        slots(None),
        slots(1),
    ],
    ids=lambda value: repr(value[38:70]),
)
def test_slots_that_no_engine_has_tell_nothing(path: Path, answer: bytes) -> None:
    assert said(path, metrics=NOT_OFFERED, slots=answer)[0] == UNKNOWN


# --- no answer ---------------------------------------------------------------------------------------------


def test_one_that_does_not_answer_in_time_is_busy(path: Path) -> None:
    assert said(path, metrics=None) == (NO_ANSWER, ["/metrics"])
    assert said(path.with_name("b.sock"), metrics=NOT_OFFERED, slots=None) == (
        NO_ANSWER,
        ["/metrics", "/slots"],
    )


def test_an_answer_that_breaks_off_is_none(path: Path) -> None:
    for number, answer in enumerate((b"", b"HTTP/1.1 200 OK\r\n", ok(b"x" * 100)[:-1])):
        assert said(path.with_name(f"{number}.sock"), metrics=answer)[0] == NO_ANSWER


def test_nobody_listens(path: Path) -> None:
    assert run(look(path)) == NO_ANSWER
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
    assert run(look(path)) == NO_ANSWER


@pytest.mark.parametrize("control_group", ["/some.slice/x.service", ""])
def test_a_listener_that_is_not_the_unit_is_not_asked(path: Path, control_group: str) -> None:
    async def scenario() -> None:
        async with serving(path, metrics=IDLE) as server:
            assert await look(path, control_group=control_group) == UNKNOWN
            assert await look(path) == Activity(busy=False, served_tokens=67)
            assert server.asked == ["/metrics"]

    run(scenario())


# --- between two looks -------------------------------------------------------------------------------------


def test_counters_that_are_rounded_still_show_that_it_was_used(path: Path) -> None:
    """Six digits: 30 tokens more than 12 millions are not to be seen."""

    def answer(since: float) -> bytes:
        return metrics(
            requests_processing=0, tokens_predicted_total="1.2e+07", predicted_tokens_seconds=since
        )

    async def scenario() -> list[int | None]:
        watch, engine, served = ActivityWatch(), EngineSocket("r", path, OWN), []
        async with serving(path, metrics=None) as server:
            for since in (50.0, 0.0, 80.5, 0.0, 20.0):
                server.answers["/metrics"] = answer(since)
                served.append((await watch.look([engine]))["r"].served_tokens)
        return served

    first, *later = run(scenario())
    assert first == 12_000_000
    assert later == [first, first + 1, first + 1, first + 2]


def test_what_is_remembered_is_bounded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_REMEMBERED", 3)
    busy = metrics(requests_processing=0, tokens_predicted_total=5, predicted_tokens_seconds=1)

    async def scenario() -> None:
        watch = ActivityWatch()
        async with serving(path, metrics=busy):
            for run_name in ("a", "b", "c", "d", "a"):
                (seen,) = (await watch.look([EngineSocket(run_name, path, OWN)])).values()
                assert seen.served_tokens == 5  # each is new, or forgotten
            assert (await watch.look([EngineSocket("d", path, OWN)]))["d"].served_tokens == 6

    run(scenario())


def test_many_are_asked_at_once_but_not_all(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_AT_ONCE", 4)

    async def scenario() -> None:
        async with serving(path, metrics=IDLE) as server:
            engines = [EngineSocket(str(number), path, OWN) for number in range(40)]
            seen = await ActivityWatch().look(engines, 5.0)
            assert seen == {str(number): Activity(busy=False, served_tokens=67) for number in range(40)}
            assert 1 < server.most_at_once <= 5  # one that is answered may still be closing

    run(scenario())


def test_one_that_is_silent_does_not_hold_the_others_up(path: Path) -> None:
    async def scenario() -> None:
        silent = path.with_name("silent.sock")
        async with serving(path, metrics=IDLE), serving(silent, metrics=None):
            engines = [EngineSocket("a", silent, OWN), EngineSocket("b", path, OWN)]
            seen = await ActivityWatch().look(engines, 1.0)
            assert seen == {"a": NO_ANSWER, "b": Activity(busy=False, served_tokens=67)}

    run(scenario())


def test_nobody_to_ask() -> None:
    assert run(ActivityWatch().look([])) == {}


# --- the fake engine ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def fake_engine(directory: Path, path: Path, *extra: str, **behaviour: Any) -> Iterator[None]:
    engine = install_fake_engine(directory, **behaviour) / "llama-server"
    model = directory / "model.gguf"
    model.write_bytes(b"GGUF")
    command = [str(engine), "--host", str(path), "-m", str(model), *extra]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            limit = time.monotonic() + LIMIT_S
            while health(path) != 200:
                assert time.monotonic() < limit
                time.sleep(0.01)
            yield
        finally:
            process.kill()


def complete(path: Path) -> threading.Thread:
    """A completion on a thread of its own."""
    body = {"messages": [{"role": "user", "content": "hi"}]}
    thread = threading.Thread(target=call, args=(path, "POST", "/v1/chat/completions", body))
    thread.start()
    return thread


async def until_idle(now: Callable[[], Awaitable[Activity]]) -> Activity:
    """The first look that finds no work: the client has its answer a moment before the engine is done with it."""
    async with asyncio.timeout(30):
        while (activity := await now()).busy is not False:
            pass
        return activity


@pytest.mark.parametrize("flags", [("--metrics",), ()], ids=["metrics", "slots"])
def test_the_fake_engine_idle_busy_idle(tmp_path: Path, path: Path, flags: tuple[str, ...]) -> None:
    async def scenario() -> None:
        watch, engine = ActivityWatch(), EngineSocket("r", path, OWN)

        async def now() -> Activity:
            return (await watch.look([engine], 5.0))["r"]

        before = await now()
        assert before.busy is False
        set_behaviour(tmp_path, tokens=["x"] * 4, held=True)
        thread = await asyncio.to_thread(complete, path)
        while not (await now()).busy:
            assert thread.is_alive()
        set_behaviour(tmp_path, tokens=["x"] * 4)  # it was seen at work, and may end
        await asyncio.to_thread(thread.join)
        after = await until_idle(now)
        if flags:
            assert before.served_tokens is not None
            assert after.served_tokens is not None
            assert after.served_tokens >= before.served_tokens + 5
        else:
            assert after.served_tokens is None

    with fake_engine(tmp_path, path, *flags):
        run(scenario())


def test_a_request_between_two_looks_is_seen(tmp_path: Path, path: Path) -> None:
    async def scenario() -> None:
        watch, engine = ActivityWatch(), EngineSocket("r", path, OWN)
        first = (await watch.look([engine], 5.0))["r"]
        await asyncio.to_thread(lambda: complete(path).join())

        async def now() -> Activity:
            return (await watch.look([engine], 5.0))["r"]

        second = await until_idle(now)
        assert (first.busy, second.busy) == (False, False)
        assert (second.served_tokens or 0) > (first.served_tokens or 0)
        assert (await watch.look([engine], 5.0))["r"] == second

    with fake_engine(tmp_path, path, "--metrics"):
        run(scenario())


# --- what progress is told by ----------------------------------------------------------------------------------------


AT_WORK = {
    "id": 0,
    "id_task": 3,
    "is_processing": True,
    "n_prompt_tokens": 1536,
    "n_prompt_tokens_processed": 1024,
    "next_token": [{"n_decoded": 2}],
}
BUSY = metrics(
    requests_processing=1,
    requests_deferred=2,
    prompt_tokens_total=3000,
    prompt_seconds_total=1.5,
    tokens_predicted_total=100,
    tokens_predicted_seconds_total=4,
)


def test_of_a_busy_engine_its_slots_are_asked_too(path: Path) -> None:
    seen, asked = said(path, metrics=BUSY, slots=ok(json.dumps([AT_WORK]).encode()))
    assert asked == ["/metrics", "/slots"]
    assert seen.work == EngineWork((SlotLook(0, 3, True, 1536, 1024, 2),), 2, 3, 2000.0, 0.04)


def test_an_idle_engine_is_not_asked_for_its_slots(path: Path) -> None:
    seen, asked = said(path, metrics=IDLE)
    assert asked == ["/metrics"]
    assert seen.work == EngineWork((), 0, 0)


@pytest.mark.parametrize(
    ("values", "speed", "token_s"),
    [
        ({"prompt_tokens_seconds": 50, "predicted_tokens_seconds": 5}, 50.0, 0.2),
        ({"prompt_tokens_seconds": 0, "predicted_tokens_seconds": 0}, None, None),
        ({"prompt_tokens_total": 7, "prompt_seconds_total": 0}, None, None),
    ],
)
def test_the_speed_of_an_engine(
    path: Path, values: dict[str, float], speed: float | None, token_s: float | None
) -> None:
    work = said(path, metrics=metrics(requests_processing=0, **values))[0].work
    assert work is not None
    assert (work.prompt_tokens_per_s, work.token_s) == (speed, token_s)


def test_one_that_does_not_tell_of_progress_cannot_be_judged(path: Path) -> None:
    """As some forks: it has answered, so it is not silent either."""
    assert said(path, metrics=BUSY, slots=slots(True))[0].work is None
    assert said(path.with_name("b.sock"), metrics=BUSY, slots=NOT_OFFERED)[0].work is None


def test_one_that_is_silent_is_at_work_as_far_as_anybody_knows(path: Path) -> None:
    assert said(path, metrics=None)[0].work == EngineWork()
    seen, _ = said(path.with_name("b.sock"), metrics=BUSY, slots=None)
    assert seen.busy
    assert seen.work == EngineWork(None, 2, 3, 2000.0, 0.04)


@pytest.mark.parametrize(
    ("answers", "number"),
    [
        ({"metrics": BUSY, "slots": slots(True)}, 3),
        ({"metrics": IDLE}, 0),
        ({"metrics": NOT_OFFERED, "slots": ok(json.dumps([AT_WORK]).encode())}, 1),
        ({"metrics": NOT_OFFERED, "slots": slots(False)}, 0),
        ({"metrics": NOT_OFFERED, "slots": slots(True)}, None),
        ({"metrics": NOT_OFFERED, "slots": NOT_OFFERED}, None),
    ],
)
def test_how_many_requests_an_engine_has(path: Path, answers: dict[str, bytes], number: int | None) -> None:
    async def scenario() -> int | None:
        async with serving(path, **answers):
            return await in_flight(EngineSocket("r", path, OWN), 5.0)

    assert run(scenario()) == number


def test_nobody_counts_the_requests_of_one_that_is_gone(path: Path) -> None:
    assert run(in_flight(EngineSocket("r", path, OWN), 5.0)) is None
