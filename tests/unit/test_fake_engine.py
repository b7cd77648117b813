"""The stand-ins keep their promises: a test that rests on a fake is worth no more than the fake."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.engine import free_bytes, install_fake_engine, set_behaviour
from tests.fakes.nvml import FakeCard, FakeNvml
from tests.fakes.unix_http import call, health

pytestmark = pytest.mark.unit

MIB = 1 << 20


class Running:
    """A started fake engine."""

    def __init__(self, process: subprocess.Popen[str], path: Path) -> None:
        self.process = process
        self.path = path

    def get(self, target: str) -> tuple[int, Any]:
        """Status and document."""
        status, body = call(self.path, "GET", target)
        return status, json.loads(body)

    def health(self) -> int | None:
        """Status of /health; None while nobody listens."""
        return health(self.path)

    def until(self, status: int) -> set[int | None]:
        """Wait for a status of /health; the statuses seen before."""
        seen: set[int | None] = set()
        limit = time.monotonic() + 60
        while (now := self.health()) != status:
            assert time.monotonic() < limit, "the fake engine did not get there"
            assert self.process.poll() is None, "the fake engine ended"
            seen.add(now)
            time.sleep(0.01)
        return seen

    def chat(self, timeout_s: float = 20) -> bytes:
        """The body of a streamed completion."""
        request = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
        return call(self.path, "POST", "/v1/chat/completions", request, timeout_s)[1]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF and nothing more")
    return path


@contextlib.contextmanager
def _engine(tmp_path: Path, model: Path, *extra: str, **behaviour: Any) -> Iterator[Running]:
    directory = install_fake_engine(tmp_path / "engine", **behaviour)
    path = tmp_path / "e.sock"
    command = [str(directory / "llama-server"), "--host", str(path), "-m", str(model), "-c", "4096", *extra]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield Running(process, path)
        finally:
            process.kill()
            process.communicate()


def _deltas(body: bytes) -> list[str]:
    events = [line.removeprefix(b"data: ") for line in body.splitlines() if line.startswith(b"data: ")]
    assert events[-1] == b"[DONE]"
    choices = [json.loads(event)["choices"][0] for event in events[:-1]]
    assert choices[-1]["finish_reason"] == "stop"
    return [choice["delta"]["content"] for choice in choices if choice["delta"].get("content")]


def test_serves_like_the_real_one(tmp_path: Path, model: Path) -> None:
    with _engine(tmp_path, model, "--parallel", "2", "--alias", "fake", load_held=True) as engine:
        engine.until(503)
        set_behaviour(tmp_path / "engine")
        engine.until(200)
        props = engine.get("/props")[1]
        assert (props["total_slots"], props["default_generation_settings"]["n_ctx"]) == (2, 2048)
        assert [slot["is_processing"] for slot in engine.get("/slots")[1]] == [False, False]
        assert engine.get("/v1/models")[1]["data"][0]["id"] == "fake"
        assert engine.get("/nowhere")[0] == 404
        assert "".join(_deltas(engine.chat())) == "Hello from the fake engine."

        engine.process.terminate()
        assert engine.process.wait(60) == 0


def test_socket_left_by_a_killed_engine_is_in_the_way(tmp_path: Path, model: Path) -> None:
    with _engine(tmp_path, model) as engine:
        engine.until(200)
    with _engine(tmp_path, model) as engine:
        assert engine.process.wait(60) == 1
        assert engine.process.stderr is not None
        assert "couldn't bind" in engine.process.stderr.read()


def test_unknown_flag_and_damaged_model_end_it(tmp_path: Path, model: Path) -> None:
    with _engine(tmp_path, model, "--no-such-flag") as engine:
        assert engine.process.wait(60) == 1
        assert engine.process.stderr is not None
        assert "invalid argument: --no-such-flag" in engine.process.stderr.read()
    model.write_bytes(b"<html>")
    with _engine(tmp_path, model) as engine:
        assert engine.process.wait(60) == 1


@pytest.mark.parametrize(
    ("crash", "status"),
    [({"exit": 7}, 7), ({"signal": "SIGSEGV"}, -signal.SIGSEGV), ({"signal": "SIGKILL"}, -9)],
)
def test_crash_during_load(tmp_path: Path, model: Path, crash: dict[str, Any], status: int) -> None:
    with _engine(tmp_path, model, crash_during_load={**crash, "lines": ["last words"]}) as engine:
        assert engine.process.wait(60) == status
        assert engine.process.stderr is not None
        assert engine.process.stderr.read().rstrip().endswith("last words")


def test_crash_after_tokens(tmp_path: Path, model: Path) -> None:
    with _engine(tmp_path, model, crash_after_tokens=3) as engine:
        engine.until(200)
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            engine.chat()
        assert engine.process.wait(60) == -signal.SIGABRT


def test_hang_keeps_health(tmp_path: Path, model: Path) -> None:
    with _engine(tmp_path, model) as engine:
        engine.until(200)
        set_behaviour(tmp_path / "engine", hang=True)
        with pytest.raises(TimeoutError):
            engine.chat(timeout_s=0.3)
        assert engine.health() == 200
        limit = time.monotonic() + 60
        while not engine.get("/slots")[1][0]["is_processing"]:  # it may read it later
            assert time.monotonic() < limit
            time.sleep(0.01)


def test_ignores_sigterm(tmp_path: Path, model: Path) -> None:
    with _engine(tmp_path, model, ignore_sigterm=True) as engine:
        engine.until(200)
        engine.process.terminate()
        with pytest.raises(subprocess.TimeoutExpired):
            engine.process.wait(0.3)
        assert engine.health() == 200


def test_claims_memory_of_the_card_in_steps_and_gives_it_back(tmp_path: Path, model: Path) -> None:
    card = FakeNvml(tmp_path)
    free = FakeCard().total_bytes - FakeCard().reserved_bytes
    behaviour: dict[str, Any] = {"vram_mib": 1000, "nvml_state": str(card.state), "steps": 5}

    def now() -> int:
        return free_bytes(card.state.read_text(encoding="utf-8").splitlines())

    with _engine(tmp_path, model, load_held=True, **behaviour) as engine:
        limit = time.monotonic() + 60
        while now() != free - 800 * MIB:  # all steps but the last, before which it is held
            assert engine.process.poll() is None and time.monotonic() < limit
            time.sleep(0.01)
        assert engine.health() != 200
        set_behaviour(tmp_path / "engine", **behaviour)
        engine.until(200)
        assert now() == free - 1000 * MIB
        engine.process.terminate()
        engine.process.wait(60)
    assert now() == free

    (tmp_path / "e.sock").unlink()
    with _engine(tmp_path, model, **behaviour) as engine:
        engine.until(200)
    assert now() == free  # also after SIGKILL


def test_full_card_means_out_of_memory(tmp_path: Path, model: Path) -> None:
    card = FakeNvml(tmp_path)
    card.write(FakeCard(other_bytes=24000 * MIB))
    with _engine(tmp_path, model, vram_mib=1000, nvml_state=str(card.state)) as engine:
        assert engine.process.wait(60) == 1
        assert engine.process.stderr is not None
        assert "cudaMalloc failed: out of memory" in engine.process.stderr.read()
    assert "process" not in card.state.read_text(encoding="utf-8")


def test_memory_can_stay_claimed_after_the_end(tmp_path: Path, model: Path) -> None:
    """Through the library: it counts the claim until the time is over."""
    card = FakeNvml(tmp_path)
    behaviour: dict[str, Any] = {"vram_mib": 1000, "nvml_state": str(card.state), "hold_after_exit_s": 0.5}
    with _engine(tmp_path, model, **behaviour) as engine:
        engine.until(200)
    code = """
import pynvml, time
pynvml.nvmlInit()
handle = pynvml.nvmlDeviceGetHandleByIndex(0)
def used(): return pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).used
start = time.monotonic()
first = used()
while used(): time.sleep(0.01)
print(first, time.monotonic() - start)
"""
    asked = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **card.environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=20,
    )
    first, held_s = asked.stdout.split()
    assert int(first) == 1000 * MIB
    assert 0.4 < float(held_s) < 10
