"""A real llama-server that is stopped in the middle of an answer is found, and is well again; another is drained."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from lllm3090d.serving.activity import ActivityWatch, EngineSocket, in_flight
from lllm3090d.serving.drains import Drain, reopen, shut
from lllm3090d.serving.events import Activity
from lllm3090d.serving.hangs import Verdict
from lllm3090d.serving.running import Instance
from lllm3090d.serving.stalls import StallWatch
from tests.engine.test_activity_real import LIMIT_S, OWN, Completion, running
from tests.fakes.scheduler_world import World
from tests.fakes.unix_http import call, health

pytestmark = pytest.mark.engine

# Small batches and one thread, so that nothing takes long even where the machine is busy with other things; and as
# patient as it takes where it gives the engine no core for a while.
PATIENCE_S, BATCH = 3.0, 32
FLAGS = ("--metrics", "--slots", "-b", str(BATCH), "-ub", str(BATCH), "-t", "1")


def made() -> Instance:
    """What is known of its launch."""
    instance = World().bring_up("a")
    launch = replace(instance.plan.launch, batch_tokens=BATCH)
    instance.plan = replace(instance.plan, launch=launch)
    return instance


def pid_of(path: Path) -> int:
    """Who listens."""
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[0])


@dataclass
class Watched:
    """An engine that is looked at ten times a second."""

    path: Path
    instance: Instance = field(default_factory=made)
    activity: ActivityWatch = field(default_factory=ActivityWatch)
    stalls: StallWatch = field(default_factory=StallWatch)

    def look(self) -> tuple[Activity, Verdict]:
        run = self.instance.run
        engine = EngineSocket(run, self.path, OWN)
        seen = asyncio.run(self.activity.look([engine]))
        verdicts = self.stalls.look(time.monotonic(), [self.instance], seen, None, least_s=PATIENCE_S)
        return seen[run], verdicts[run]

    def until(
        self, what: Callable[[Activity, Verdict], bool], within_s: float = LIMIT_S
    ) -> tuple[Activity, Verdict]:
        limit_s = time.monotonic() + within_s
        while not what(*(seen := self.look())):
            assert time.monotonic() < limit_s, seen
            time.sleep(0.1)
        return seen


def test_it_is_stalled_while_it_is_stopped_and_at_no_other_time(
    llama_server: Path, smollm2_path: Path
) -> None:
    with running(llama_server, smollm2_path, *FLAGS) as path:
        watched, pid = Watched(path), pid_of(path)
        # A prompt of some length, and its speed is known by its own word.
        prompt = {"prompt": "one two three four " * 40, "n_predict": 4}
        assert call(path, "POST", "/completion", prompt, timeout_s=LIMIT_S)[0] == 200
        work = watched.until(lambda seen, _: seen.busy is False)[0].work
        assert work is not None
        assert work.prompt_tokens_per_s
        request = Completion(path, 100)
        request.start()
        _, verdict = watched.until(lambda seen, _: seen.work is not None and bool(seen.work.slots))
        for _ in range(3):
            _, verdict = watched.look()
            assert not verdict.stalled
        assert verdict.patience_s < LIMIT_S
        os.kill(pid, signal.SIGSTOP)
        try:
            # A look takes half a second now.
            _, verdict = watched.until(lambda _, found: found.stalled, verdict.patience_s + LIMIT_S)
            assert "it does not answer" in verdict.reason
        finally:
            os.kill(pid, signal.SIGCONT)
        watched.until(lambda _, found: not found.stalled)
        request.join(LIMIT_S)
        assert request.status == 200
        watched.until(lambda seen, found: seen.busy is False and not found.stalled)


def test_a_drained_one_takes_nobody_new_and_finishes_what_it_has(
    llama_server: Path, smollm2_path: Path
) -> None:
    with running(llama_server, smollm2_path, *FLAGS) as path:
        request = Completion(path, 400)
        request.start()
        Watched(path).until(lambda seen, _: seen.busy is True)
        door = shut(path, Drain(60.0, time.monotonic() + 60.0))
        assert health(path) is None
        engine = EngineSocket("r", door, OWN)
        assert asyncio.run(in_flight(engine, LIMIT_S)) == 1
        request.join(LIMIT_S)
        assert request.status == 200
        while asyncio.run(in_flight(engine, LIMIT_S)) != 0:
            assert health(door) == 200
        assert reopen(path)
        assert health(path) == 200
