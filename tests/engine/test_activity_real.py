"""A real llama-server tells whether it is busy, and how much it has served."""

from __future__ import annotations

import asyncio
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lllm3090d.serving.activity import ActivityWatch, EngineSocket
from lllm3090d.serving.events import Activity
from lllm3090d.serving.readiness import cgroups_of
from tests.fakes.unix_http import call, health

pytestmark = pytest.mark.engine

LIMIT_S = 60.0
OWN = min(cgroups_of(os.getpid()))


@contextmanager
def running(llama_server: Path, model: Path, *flags: str) -> Iterator[Path]:
    """The engine with one slot; its socket."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "e.sock")
        command = [
            str(llama_server),
            "-m",
            str(model),
            "--host",
            str(path),
            "-c",
            "2048",
            "-np",
            "1",
            *flags,
        ]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            try:
                limit = time.monotonic() + LIMIT_S
                while health(path) != 200:
                    assert process.poll() is None, "the engine ended"
                    assert time.monotonic() < limit, "the engine did not become ready"
                    time.sleep(0.02)
                yield path
            finally:
                process.terminate()


class Completion(threading.Thread):
    """A completion of so many tokens on a thread of its own."""

    def __init__(self, path: Path, tokens: int) -> None:
        super().__init__()
        self._path = path
        self._tokens = tokens
        self.status = 0

    def run(self) -> None:
        """Ask, and wait for the whole answer."""
        body = {"prompt": "Once upon a time there was", "n_predict": self._tokens, "ignore_eos": True}
        self.status, _ = call(self._path, "POST", "/completion", body, timeout_s=LIMIT_S)


def looks(path: Path) -> Callable[[], Activity]:
    """Look at the engine, each time with the same memory."""
    watch, engine = ActivityWatch(), EngineSocket("r", path, OWN)

    def look() -> Activity:
        return asyncio.run(watch.look([engine], LIMIT_S))["r"]

    return look


@pytest.mark.parametrize(
    ("flags", "counts"), [(("--metrics",), True), ((), False)], ids=["metrics", "slots alone"]
)
def test_idle_busy_idle(
    llama_server: Path, smollm2_path: Path, flags: tuple[str, ...], counts: bool
) -> None:
    with running(llama_server, smollm2_path, *flags) as path:
        look = looks(path)
        before = look()
        assert before == Activity(busy=False, served_tokens=0 if counts else None)
        request = Completion(path, 150)
        request.start()
        while not (seen := look()).busy:
            assert request.is_alive(), "the whole answer came between two looks"
        assert seen.busy is True
        request.join(LIMIT_S)
        assert request.status == 200
        after = look()
        assert after.busy is False
        if counts:
            assert after.served_tokens is not None
            assert after.served_tokens >= 150
        else:
            assert after.served_tokens is None


def test_a_request_that_waits_for_a_slot_is_busy_too_and_both_are_counted(
    llama_server: Path, smollm2_path: Path
) -> None:
    with running(llama_server, smollm2_path, "--metrics") as path:
        look, requests = looks(path), [Completion(path, 100), Completion(path, 100)]
        for request in requests:
            request.start()
        states = [look().busy]
        while any(request.is_alive() for request in requests):
            states.append(look().busy)
        assert True in states
        for request in requests:
            request.join(LIMIT_S)
        seen = look()
        assert (seen.busy, [request.status for request in requests]) == (False, [200, 200])
        assert (seen.served_tokens or 0) >= 200


def test_a_request_that_came_and_went_between_two_looks_is_seen(
    llama_server: Path, smollm2_path: Path
) -> None:
    with running(llama_server, smollm2_path, "--metrics") as path:
        look = looks(path)
        seen = [look().served_tokens]
        for _ in range(3):  # the same prompt again, which is in the cache by then
            request = Completion(path, 1)
            request.start()
            request.join(LIMIT_S)
            assert request.status == 200
            activity = look()
            assert activity.busy is False
            seen.append(activity.served_tokens)
        assert look().served_tokens == seen[-1]
    known = [each for each in seen if each is not None]
    assert len(known) == len(seen)
    assert known == sorted(set(known))


def test_neither_endpoint_is_unknown(llama_server: Path, smollm2_path: Path) -> None:
    with running(llama_server, smollm2_path, "--no-slots") as path:
        assert looks(path)() == Activity(None, None)
