"""What a daemon that is killed again and again, at random moments, does to models.

    packaging/dev/user-manager --private -- .venv/bin/python -m bench.kills --rounds 100 --seed 1

Two models: one is loaded and always in the middle of a streamed answer, straight from its engine's socket; the other
is brought up and down, and the daemon is killed (SIGKILL) while it loads, is ready, answers, or is unloaded. Each
time: no main process of an engine changes, no stream breaks, and the next daemon knows every engine within 1 s of its
start (``ExecMainStartTimestampMonotonic``) or twice the time of the bare imports, measured next to it. The start limit
of the unit is lifted. With ``--real`` the engines are llama-server with SmolLM2 on the processor, else stand-ins.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import _support as support
from bench.adoption import IMPORT_FACTOR, LIMIT_MS, MS_PER_S, bare_import_ms, imported_at_start
from tests.fakes.engine import install_fake_engine
from tests.fakes.gguf_files import write_llama
from tests.system.harness import (
    DAEMON_UNIT,
    PAUSE,
    Service,
    UnixConnection,
    eventually,
    http_request,
    model_units,
    properties,
    running,
)

MOMENTS = ("load", "ready", "busy", "unload")
STEADY, MOVING = "steady", "moving"
UP = frozenset({"ready", "busy"})
ON_THE_WAY_DOWN = frozenset({"stopping", "releasing"})
FAKE_LOAD_S = 3.0
UNLOAD_S = 0.06
WITHIN_S = 60.0
RETRY_S = 0.002


@dataclass
class Streams:
    """Streamed answers of one engine, one after the other, in a thread of its own.

    Attributes:
        endpoint: the engine's socket.
        words: how long an answer is.
        whole: answers that came to their end.
        broken: why others did not.
    """

    endpoint: str
    words: int
    whole: int = 0
    pieces: int = 0
    broken: list[str] = field(default_factory=list)
    _done: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin; returns when the first piece has come."""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        eventually(lambda: self.pieces > 0 or self.broken, WITHIN_S, "an answer has begun")

    def stop(self) -> None:
        """Let the answer that has begun come to its end, and ask no more."""
        self._done.set()
        if self._thread is not None:
            self._thread.join(WITHIN_S)

    def _run(self) -> None:
        while not self._done.is_set():
            try:
                self._one()
            except (OSError, http.client.HTTPException) as error:
                self.broken.append(f"{type(error).__name__}: {error}")
                self._done.wait(0.1)

    def _one(self) -> None:
        question = [{"role": "user", "content": "Count."}]
        body = {"messages": question, "stream": True, "max_tokens": self.words, "ignore_eos": True}
        connection = UnixConnection(self.endpoint)
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(body))
            end = b""
            for line in connection.getresponse():
                self.pieces += line.startswith(b"data: ")
                end = line if line.strip() else end
            if not end.startswith(b"data: [DONE]"):
                self.broken.append(f"it ended with {end!r}")
            else:
                self.whole += 1
        finally:
            connection.close()


@dataclass(frozen=True, slots=True)
class Round:
    """One death and return.

    Attributes:
        moment: what was going on.
        states: of the models, when the next daemon answered first.
        adopted_ms: from its start to the answer that told the truth about every engine.
        import_ms: of the bare imports.
    """

    moment: str
    states: Mapping[str, str]
    adopted_ms: float
    import_ms: float


@dataclass
class Kills:
    """The rounds.

    Args:
        service: a daemon with both models, none of them loaded.
        seed: of the moments.
        words: length of an answer.
    """

    service: Service
    seed: int
    words: int
    load_s: float = FAKE_LOAD_S
    import_each_time: bool = True
    rounds: list[Round] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    answers: int = 0

    def run(self, count: int) -> None:
        """Kill so often, at moments in turn. Raises AssertionError where something does not come back at all."""
        chance = random.Random(self.seed)  # noqa: S311  # no secret
        modules = imported_at_start()
        import_ms = bare_import_ms(modules)
        steady = self._loaded(STEADY)
        streams = Streams(steady["endpoint"], self.words)
        streams.start()
        try:
            with ThreadPoolExecutor(4) as clients:
                for number in range(count):
                    if self.import_each_time:
                        import_ms = bare_import_ms(modules)
                    moment = MOMENTS[number % len(MOMENTS)]
                    self.rounds.append(self._round(moment, steady, chance.random(), import_ms, clients))
        finally:
            streams.stop()
        self.answers += streams.whole
        self.problems += [f"a stream of {STEADY} broke: {why}" for why in streams.broken]
        for name in self.service.instances():
            self._unload(name)
        eventually(lambda: model_units() == {}, WITHIN_S, "no unit is left")

    def _round(
        self,
        moment: str,
        steady: Mapping[str, Any],
        share: float,
        import_ms: float,
        clients: ThreadPoolExecutor,
    ) -> Round:
        before = self.service.instances().get(MOVING)
        stream: Streams | None = None
        asked: Future[Any] | None = None
        if moment == "load":
            if before is not None:
                self._unload(MOVING)
            asked = clients.submit(self._ask, "/v1/load", {"model": MOVING})
            eventually(lambda: self.service.state(MOVING), WITHIN_S, "it is on its way up")
            PAUSE.wait(share * self.load_s)
        else:
            moving = before if before and before["state"] in UP else self._loaded(MOVING)
            if moment == "busy":
                stream = Streams(moving["endpoint"], self.words)
                stream.start()
                PAUSE.wait(share * 0.3)
            elif moment == "unload":
                asked = clients.submit(self._ask, "/v1/unload", {"model": MOVING})
                PAUSE.wait(share * UNLOAD_S)
            else:
                PAUSE.wait(share * 0.3)
        pids = engine_pids()
        old = self.service.main_pid()
        killed = time.monotonic()
        os.kill(old, signal.SIGKILL)
        states, adopted = self._adopted(old)
        executed = support.exec_time_s(DAEMON_UNIT)
        if executed < killed:
            raise AssertionError("the daemon that answered is the one that was killed")
        if stream is not None:
            stream.stop()
            self.answers += stream.whole
            self.problems += [f"a stream of {MOVING} broke: {why}" for why in stream.broken]
        if asked is not None:
            asked.result(WITHIN_S)
        self._compare(moment, steady, pids)
        return Round(moment, states, (adopted - executed) * MS_PER_S, import_ms)

    def _adopted(self, old: int) -> tuple[Mapping[str, str], float]:
        """When the next daemon tells every engine that runs, with its process; what it tells."""
        deadline = time.monotonic() + WITHIN_S
        told: Mapping[str, Any] = {}
        while time.monotonic() < deadline:
            try:
                # systemd holds the socket: a request that comes too early waits for the next daemon.
                told = self.service.instances()
            except (OSError, http.client.HTTPException, ValueError):
                PAUSE.wait(RETRY_S)
                continue
            now = time.monotonic()
            known = {each["main_pid"] for each in told.values()}
            if self.service.main_pid() != old and set(engine_pids().values()) <= known:
                return {name: each["state"] for name, each in told.items()}, now
        raise AssertionError(f"not every engine was known within {WITHIN_S:g} s: {engine_pids()}, {told}")

    def _compare(self, moment: str, steady: Mapping[str, Any], pids: Mapping[str, int]) -> None:
        """Nothing has happened to engines; what was on its way has come to its end."""

        def rests() -> bool:
            states = {each["state"] for each in self.service.instances().values()}
            return states <= UP | {"failed", "latched"}

        eventually(rests, WITHIN_S, f"everything rests after {moment}")
        now = engine_pids()
        told = self.service.instances()
        if (
            told.get(STEADY, {}).get("main_pid") != steady["main_pid"]
            or now.get(STEADY) != steady["main_pid"]
        ):
            self.problems.append(
                f"{moment}: {STEADY} was process {steady['main_pid']}, and is {now.get(STEADY)}"
            )
        after, was = now.get(MOVING), pids.get(MOVING)
        # An unload that had reached systemd goes on; one that had not is forgotten with its daemon.
        if was is not None and after != was and not (moment == "unload" and after is None):
            self.problems.append(f"{moment}: {MOVING} was process {was}, and is {after}")
        if after != told.get(MOVING, {}).get("main_pid") and (
            after or told.get(MOVING, {}).get("state") in UP
        ):
            self.problems.append(f"{moment}: {MOVING} is process {after}, and is told {told.get(MOVING)}")

    def _ask(self, target: str, body: Mapping[str, Any]) -> None:
        """A client whose daemon is killed."""
        with contextlib.suppress(OSError, http.client.HTTPException):
            http_request(self.service.control_socket, "POST", target, json.dumps(body).encode())

    def _loaded(self, name: str) -> dict[str, Any]:
        last = self.service.load(name)[-1]
        if last.get("kind") != "ready":
            raise AssertionError(f"the load of {name} failed: {last}")
        instance: dict[str, Any] = last["instance"]
        return instance

    def _unload(self, name: str) -> None:
        answer = self.service.request("POST", "/v1/unload", {"model": name})
        if answer.status not in {200, 404}:
            raise AssertionError(f"the unload of {name} failed: {answer.body!r}")


def engine_pids() -> dict[str, int]:
    """Main processes of running models by name, by systemd."""
    units = [unit for unit, state in model_units().items() if state == "active"]
    found = {unit: int(properties(unit, "MainPID").get("MainPID", "0")) for unit in units}
    return {unit.removeprefix("lllm3090-").rpartition("-")[0]: pid for unit, pid in found.items() if pid}


@contextlib.contextmanager
def stand_ins(directory: Path, load_s: float = FAKE_LOAD_S) -> Iterator[Service]:
    """A daemon with two stand-in engines on host memory."""
    words = ("word ",) * 40
    engine = install_fake_engine(directory / "engine", load_s=load_s, tokens=words, token_s=0.05)
    service = Service(directory, {"llama_dir": str(engine)})
    for name in (STEADY, MOVING):
        write_llama(service.models_dir / name / f"{name}.gguf", head_count=2, kv_head_count=1)
    with running(service):
        yield service


@contextlib.contextmanager
def real_ones(directory: Path) -> Iterator[Service]:
    """A daemon with llama-server, and SmolLM2 under two names."""
    service = Service(directory, {"llama_dir": str(support.engine_dir())})
    for name in (STEADY, MOVING):
        home = service.models_dir / name
        home.mkdir(parents=True)
        (home / "model.gguf").symlink_to(support.checkpoint("smollm2.gguf"))
    with running(service):
        yield service


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="kill -9 of the daemon at random moments")
    parser.add_argument("--rounds", type=int, default=100, help="how often it is killed (default: 100)")
    parser.add_argument("--seed", type=int, default=1, help="of the moments (default: 1)")
    parser.add_argument("--real", action="store_true", help="with llama-server and SmolLM2")
    options = parser.parse_args()
    if os.environ.get("PRIVATE_USER_MANAGER") != "1":
        sys.exit("needs a user manager of its own; run: packaging/dev/user-manager --private -- COMMAND")
    support.compile_bytecode()
    print(support.machine_line() + "\n")
    scene = real_ones if options.real else stand_ins
    with tempfile.TemporaryDirectory(prefix="bench-") as directory, scene(Path(directory)) as service:
        kills = Kills(service, options.seed, words=40)
        kills.run(options.rounds)
    return report(kills)


def report(kills: Kills) -> int:
    """Print the figures; the exit status, 1 where a target is missed."""
    samples: dict[str, Sequence[float]] = {"bare import": [each.import_ms for each in kills.rounds]}
    samples["exec to adopted"] = [each.adopted_ms for each in kills.rounds]
    for moment in MOMENTS:
        found = [each.adopted_ms for each in kills.rounds if each.moment == moment]
        if found:
            samples[f"  killed at: {moment}"] = found
    print(f"{len(kills.rounds)} times kill -9 of the daemon, seed {kills.seed}")
    print(support.table(support.SPREAD_HEADS, support.spread_rows("ms", samples)))
    seen: dict[str, int] = {}
    for each in kills.rounds:
        state = each.states.get(MOVING, "gone")
        seen[f"{each.moment}: {state}"] = seen.get(f"{each.moment}: {state}", 0) + 1
    print(
        "\nfound by the next daemon: " + ", ".join(f"{what} {count}" for what, count in sorted(seen.items()))
    )
    print(f"{kills.answers} streamed answers came whole; problems: {'; '.join(kills.problems) or 'none'}")
    limit_ms = max(LIMIT_MS, IMPORT_FACTOR * statistics.median(each.import_ms for each in kills.rounds))
    worst_ms = max(each.adopted_ms for each in kills.rounds)
    return support.report_targets(
        (
            support.Target("exec to adopted, the slowest", worst_ms, limit_ms, "ms"),
            support.Target("engines changed or streams broken", len(kills.problems), 0, ""),
        )
    )


if __name__ == "__main__":
    sys.exit(main())
