"""What a load costs beside the engine's own time.

    packaging/dev/user-manager --private -- .venv/bin/python -m bench.load_overhead

Overhead is the time from the moment the client sends ``POST /v1/load`` until its ``ready`` line arrives,
minus the engine's own time: from the start of its process (``ExecMainStartTimestampMonotonic``, the fork,
so systemd's preparation of the process counts as the engine's) until an independent process that asks every
millisecond gets the first 200 on ``/health``. The daemon is warm: it has loaded the model once before.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import _support as support
from tests.system.harness import REPOSITORY, Service, UnixConnection, model_units

OVERHEAD_LIMIT_MS = 150.0
FRACTION_LIMIT_PERCENT = 25.0
MS_PER_S = 1000.0


@dataclass(frozen=True, slots=True)
class Load:
    """Moments of one load, seconds of CLOCK_MONOTONIC."""

    asked: float
    admitted: float | None  # only the stream tells
    executed: float
    healthy: float
    ended: float  # the ready line has arrived, or the client has ended

    @property
    def engine_ms(self) -> float:
        """The engine's own time."""
        return (self.healthy - self.executed) * MS_PER_S

    @property
    def overhead_ms(self) -> float:
        """All but the engine's own time."""
        return (self.ended - self.asked) * MS_PER_S - self.engine_ms


class Observer:
    """An independent process that sees when an engine is ready."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def arm(self) -> None:
        """Watch the next load."""
        assert self._process.stdin is not None
        self._process.stdin.write("next\n")
        self._process.stdin.flush()

    def healthy_s(self) -> float:
        """When the engine was first ready. Raises ValueError when it never was."""
        assert self._process.stdout is not None
        return float(self._process.stdout.readline())


@contextlib.contextmanager
def observing(sockets: Path) -> Iterator[Observer]:
    """An observer of the engines that listen in a directory."""
    command = [sys.executable, "-m", "bench._first_health", str(sockets)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
    ) as process:
        try:
            yield Observer(process)
        finally:
            process.kill()  # it may wait for an engine that never comes


def load_by_api(service: Service, observer: Observer) -> Load:
    """One load on the control socket."""
    observer.arm()
    connection = UnixConnection(service.control_socket)
    connection.connect()
    body = json.dumps({"model": support.MODEL_NAME}).encode()
    admitted = None
    asked = time.monotonic()
    connection.request("POST", "/v1/load", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    while True:
        line = response.readline()
        now = time.monotonic()
        document = json.loads(line)
        if document["kind"] == "admitted":
            admitted = now
        elif document["kind"] == "ready":
            break
        elif document["kind"] == "failed" or "kind" not in document:
            raise RuntimeError(f"the load failed: {document}")
    connection.close()
    return Load(
        asked, admitted, support.exec_time_s(document["instance"]["unit"]), observer.healthy_s(), now
    )


def load_by_client(service: Service, observer: Observer) -> Load:
    """One load with ``lllm3090ctl``, from its start to its end."""
    observer.arm()
    asked = time.monotonic()
    service.ctl("load", support.MODEL_NAME)
    ended = time.monotonic()
    (unit,) = model_units()
    return Load(asked, None, support.exec_time_s(unit), observer.healthy_s(), ended)


def steps_ms(loads: Sequence[Load]) -> dict[str, Sequence[float]]:
    """Where the time of the loads went, milliseconds."""
    steps: dict[str, Sequence[float]] = {"whole": [(i.ended - i.asked) * MS_PER_S for i in loads]}
    if all(i.admitted is not None for i in loads):
        steps["  request to admitted"] = [(i.admitted - i.asked) * MS_PER_S for i in loads if i.admitted]
        steps["  admitted to exec"] = [(i.executed - i.admitted) * MS_PER_S for i in loads if i.admitted]
    else:
        steps["  start of the client to exec"] = [(i.executed - i.asked) * MS_PER_S for i in loads]
    steps["  exec to first 200 (the engine's own)"] = [i.engine_ms for i in loads]
    steps["  first 200 to the end"] = [(i.ended - i.healthy) * MS_PER_S for i in loads]
    steps["overhead"] = [i.overhead_ms for i in loads]
    return steps


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="the overhead of a load")
    parser.add_argument("--loads", type=int, default=10, help="loads of each kind (default: 10)")
    count = parser.parse_args().loads
    measured: dict[str, list[Load]] = {"POST /v1/load": [], "lllm3090ctl load": []}
    with support.daemon() as service:
        instance = support.load(service)
        context_tokens = instance["context_tokens"]
        sockets = Path(instance["endpoint"]).parent
        support.unload(service)
        with observing(sockets) as observer:
            for name, load in zip(measured, (load_by_api, load_by_client), strict=True):
                for _ in range(count):
                    measured[name].append(load(service, observer))
                    support.unload(service)
    for name, loads in measured.items():
        print(f"{name}: {support.MODEL_NAME}, {context_tokens} tokens, {count} loads")
        print(support.table(support.SPREAD_HEADS, support.spread_rows("ms", steps_ms(loads))) + "\n")
    loads = measured["POST /v1/load"]
    overhead_ms = statistics.median(i.overhead_ms for i in loads)
    percent = 100 * overhead_ms / statistics.median(i.engine_ms for i in loads)
    return support.report_targets(
        (
            support.Target("overhead of POST /v1/load", overhead_ms, OVERHEAD_LIMIT_MS, "ms"),
            support.Target("the same, of the engine's own time", percent, FRACTION_LIMIT_PERCENT, "%"),
        )
    )


if __name__ == "__main__":
    sys.exit(main())
