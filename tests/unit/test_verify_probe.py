"""The first batch: against a fake engine in a process of its own, and against servers that answer nonsense."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from lllm3090d.checkpoints.purpose import Purpose
from lllm3090d.gpus.readings import CardKind
from lllm3090d.serving import engine_http
from lllm3090d.serving.engine_http import EngineTalkError, ask
from lllm3090d.serving.probe import PeakWatch, Probe, Probed, probe, wants_probe
from lllm3090d.serving.readiness import cgroups_of
from lllm3090d.settings import VerifyAfterLoad
from tests.fakes.engine import edited_state, install_fake_engine
from tests.fakes.nvml import FakeCard, FakeNvml
from tests.fakes.unix_http import UnixConnection, call, health

pytestmark = pytest.mark.unit

MIB = 1 << 20
TIMEOUT_S = 60.0
GROUP = min(cgroups_of(os.getpid()))
T = TypeVar("T")


def run(work: Awaitable[T]) -> T:
    return asyncio.run(asyncio.wait_for(work, TIMEOUT_S))


@pytest.fixture
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory, "engine.sock")


@contextlib.contextmanager
def engine(tmp_path: Path, path: Path, *extra: str, **behaviour: Any) -> Iterator[subprocess.Popen[str]]:
    """A fake engine that is ready."""
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF and nothing more")
    server = install_fake_engine(tmp_path / "engine", **behaviour) / "llama-server"
    command = [str(server), "--host", str(path), "-m", str(model), "-c", "4096", *extra]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, text=True) as process:
        limit = time.monotonic() + TIMEOUT_S
        while health(path) != 200:
            assert process.poll() is None
            assert time.monotonic() < limit
            time.sleep(0.01)
        try:
            yield process
        finally:
            process.kill()


def what(path: Path, **changed: Any) -> Probe:
    return Probe(
        **{"socket": path, "control_group": GROUP, "batch_tokens": 512, "window_tokens": 4096, **changed}
    )


def test_an_idle_engine_is_probed(tmp_path: Path, path: Path) -> None:
    figures = iter([5, 9, *[7] * 100_000])
    with engine(tmp_path, path):
        found = run(probe(what(path), lambda: next(figures)))
    assert (found.prompt_tokens, found.skipped) == (512, "")
    assert found.peak_bytes in {5, 9}
    assert 0 < found.seconds < TIMEOUT_S


@pytest.mark.parametrize(
    ("purpose", "flag"), [(Purpose.EMBEDDING, "--embeddings"), (Purpose.RERANK, "--reranking")]
)
def test_what_gives_no_text_is_asked_for_what_it_gives(
    tmp_path: Path, path: Path, purpose: Purpose, flag: str
) -> None:
    with engine(tmp_path, path, flag):
        found = run(probe(what(path, purpose=purpose), lambda: 7))
        assert found.skipped == "" and found.peak_bytes == 7
        # Of vectors exactly; a text that is scored has whole words, and leaves room for the question.
        assert (
            found.prompt_tokens == 512 if purpose is Purpose.EMBEDDING else 256 < found.prompt_tokens < 512
        )


@pytest.mark.parametrize(
    ("purpose", "path_asked"), [(Purpose.EMBEDDING, "/embedding"), (Purpose.RERANK, "/v1/rerank")]
)
def test_an_engine_that_refuses_what_it_is_asked_for(
    tmp_path: Path, path: Path, purpose: Purpose, path_asked: str
) -> None:
    with engine(tmp_path, path):
        refused = run(probe(what(path, purpose=purpose), lambda: 7))
    assert refused.prompt_tokens == 0 and "501" in refused.skipped and path_asked in refused.skipped


def test_a_slot_without_room_for_a_text_is_not_scored(tmp_path: Path, path: Path) -> None:
    with engine(tmp_path, path, "--reranking"):
        found = run(probe(what(path, purpose=Purpose.RERANK, window_tokens=80), lambda: 7))
    assert found.prompt_tokens == 0 and "no room for a text" in found.skipped


def test_what_comes_with_the_first_prompt_is_seen(tmp_path: Path, path: Path) -> None:
    """The card's memory rises with the first completion, as with a real engine."""
    nvml = FakeNvml(tmp_path / "nvml")
    with engine(tmp_path, path, vram_mib=1000, prompt_vram_mib=300, nvml_state=str(nvml.state)) as process:

        def held() -> int:
            with edited_state(nvml.state) as lines:
                rows = [line.split() for line in lines]
            return sum(int(row[3]) for row in rows if row[:1] == ["process"] and row[2] == str(process.pid))

        assert held() == 1000 * MIB
        found = run(probe(what(path), held))
    assert found == Probed(1300 * MIB, 512, found.seconds)


def test_the_prompt_is_a_batch_or_what_a_slot_holds(path: Path) -> None:
    assert what(path).prompt_tokens == 512
    assert what(path, window_tokens=512).prompt_tokens == 510
    assert what(path, window_tokens=512, predict_tokens=5).prompt_tokens == 506
    tiny = run(probe(what(path, window_tokens=3), lambda: 1))
    assert "no room" in tiny.skipped
    assert tiny.prompt_tokens == 0


def test_a_busy_engine_is_left_alone(tmp_path: Path, path: Path) -> None:
    with (
        engine(tmp_path, path, "--parallel", "2", hang=True),
        contextlib.closing(UnixConnection(path)) as other,
    ):
        other.request("POST", "/v1/chat/completions", json.dumps({"stream": True}))
        limit = time.monotonic() + TIMEOUT_S
        while not any(slot["is_processing"] for slot in json.loads(call(path, "GET", "/slots")[1])):
            assert time.monotonic() < limit
        found = run(probe(what(path), lambda: 5))
    assert found.skipped == "it is busy with a request"
    assert found.peak_bytes == 5


def test_an_engine_that_does_not_answer_is_given_up(tmp_path: Path, path: Path) -> None:
    with engine(tmp_path, path, hang=True):
        found = run(probe(what(path, timeout_s=1.5), lambda: 5))
    assert found.skipped == "it did not answer /completion within 1.5 s"
    assert (found.peak_bytes, found.prompt_tokens) == (5, 0)


def test_an_engine_that_dies_meanwhile(tmp_path: Path, path: Path) -> None:
    nvml = FakeNvml(tmp_path / "nvml")
    nvml.write(FakeCard(total_bytes=2000 * MIB))
    with engine(tmp_path, path, vram_mib=1000, prompt_vram_mib=1000, nvml_state=str(nvml.state)):
        found = run(probe(what(path), lambda: 5))
    assert "cannot be read" in found.skipped


def test_nobody_and_a_stranger(tmp_path: Path, path: Path) -> None:
    assert "nobody answers" in run(probe(what(path), lambda: 5)).skipped
    with engine(tmp_path, path):
        for group in ("", "/some.slice/lllm3090-x-1.service"):
            assert "is not in its unit" in run(probe(what(path, control_group=group), lambda: 5)).skipped


def test_it_can_be_cancelled(tmp_path: Path, path: Path) -> None:
    async def scenario() -> None:
        asked, before = asyncio.Event(), len(asyncio.all_tasks())
        with engine(tmp_path, path, hang=True):

            def held() -> int:
                asked.set()
                return 5

            work = asyncio.ensure_future(probe(what(path), held))
            await asked.wait()
            work.cancel()
            with pytest.raises(asyncio.CancelledError):
                await work
        # This one, and the one that limits its time.
        assert len(asyncio.all_tasks()) == before

    run(scenario())


def test_a_reading_that_fails_is_no_number(tmp_path: Path, path: Path) -> None:
    with engine(tmp_path, path):
        found = run(probe(what(path), lambda: None))
    assert (found.peak_bytes, found.prompt_tokens) == (0, 512)


@pytest.mark.parametrize("kind", CardKind)
@pytest.mark.parametrize("choice", VerifyAfterLoad)
def test_only_a_card_is_probed(choice: VerifyAfterLoad, kind: CardKind) -> None:
    assert wants_probe(choice, kind) is (choice is VerifyAfterLoad.PROBE and kind is not CardKind.CPU)


def test_the_watch_stands_in_for_the_reading() -> None:
    figures = iter([3, None, 9, 4])
    watch = PeakWatch(lambda: next(figures))
    assert [watch() for _ in range(4)] == [3, 0, 9, 4]
    assert watch.peak_bytes == 9


# --- servers that answer something else --------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def answering(path: Path, answers: dict[str, bytes]) -> AsyncIterator[list[tuple[str, Any]]]:
    """Answers by target; what was asked, with its body."""
    asked: list[tuple[str, Any]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = int(head.lower().split("content-length:")[1].split("\r\n")[0])
            body = await reader.readexactly(length)
            target = head.split()[1]
            asked.append((target, json.loads(body) if body else None))
            writer.write(answers[target])
            await writer.drain()
        writer.close()

    async with await asyncio.start_unix_server(serve, path):
        yield asked


def ok(document: Any) -> bytes:
    body = json.dumps(document).encode()
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body


IDLE = ok([{"id": 0, "is_processing": False}, {"id": 1, "is_processing": False}])
WORDS = ok({"tokens": [7, 1, 2, 7, 3]})


def test_what_is_asked(path: Path) -> None:
    answers = {"/slots": IDLE, "/tokenize": WORDS, "/completion": ok({})}

    async def scenario() -> None:
        async with answering(path, answers) as asked:
            found = await probe(what(path, batch_tokens=5, predict_tokens=4), lambda: 1)
            assert (found.prompt_tokens, found.skipped) == (5, "")
            requests = [body for target, body in asked if target == "/completion"]
            assert [(body["prompt"], body["n_predict"]) for body in requests] == [
                ([1, 2, 3, 1, 2], 4),
                ([7], 1),
            ]
            for body in requests:
                assert body["id_slot"] == 1
                assert body["cache_prompt"] is False

    run(scenario())


NO_ENDPOINT = b"HTTP/1.1 501 Not Implemented\r\nContent-Length: 4\r\n\r\nnone"


@pytest.mark.parametrize(
    ("target", "answer", "reason"),
    [
        ("/slots", NO_ENDPOINT, "it answers /slots with 501: none"),
        ("/slots", ok([]), "nothing of its slots"),
        ("/slots", ok({"a": 1}), "nothing of its slots"),
        ("/slots", ok([1]), "nothing of its slots"),
        ("/slots", ok([{"id": 0}]), "busy"),
        ("/slots", ok([{"is_processing": False}]), "no numbers"),
        ("/slots", b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n[", "no JSON"),
        ("/slots", b"SSH-2.0\r\n\r\n", "begins with 'SSH-2.0'"),
        ("/slots", b"", "cannot be read"),
        ("/slots", b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n[]", "cannot be read"),
        (
            "/slots",
            b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n[]",
            "a body of 99999999999 bytes",
        ),
        ("/slots", b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n[]", "cannot be read"),
        ("/slots", b"HTTP/1.1 200 OK\r\nX: " + b"x" * 200_000, "cannot be read"),
        ("/tokenize", ok({}), "no text into tokens"),
        ("/tokenize", ok({"tokens": ["a"]}), "no text into tokens"),
        ("/tokenize", ok({"tokens": [1, 1, 1]}), "no words"),
        ("/tokenize", ok({"tokens": []}), "no words"),
        ("/completion", NO_ENDPOINT, "it answers /completion with 501"),
    ],
)
def test_odd_answers_skip_with_a_reason(path: Path, target: str, answer: bytes, reason: str) -> None:
    answers = {"/slots": IDLE, "/tokenize": WORDS, "/completion": ok({})} | {target: answer}

    async def scenario() -> None:
        async with answering(path, answers):
            found = await probe(what(path), lambda: 5)
        assert reason in found.skipped
        assert found.prompt_tokens == 0

    run(scenario())


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n[1\r\n1;x=y\r\n]\r\n0\r\n\r\n",
        b"HTTP/1.0 200 OK\r\n\r\n[1]",
        b"HTTP/1.1 200 OK\r\ncontent-LENGTH:3\r\n\r\n[1]and more",
    ],
)
def test_bodies_in_every_form(path: Path, answer: bytes) -> None:
    async def scenario() -> None:
        async with answering(path, {"/x": answer}):
            reply = await ask(path, GROUP, "GET", "/x")
        assert (reply.status, reply.document()) == (200, [1])

    run(scenario())


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 3000,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"3e8\r\n" + b"x" * 1000 + b"\r\n3e8\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n",
    ],
)
def test_a_body_without_end_is_not_read(path: Path, answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_http, "LARGEST_BODY_BYTES", 1500)

    async def scenario() -> None:
        async with answering(path, {"/x": answer}):
            with pytest.raises(EngineTalkError, match="a body of"):
                await ask(path, GROUP, "GET", "/x")

    run(scenario())
