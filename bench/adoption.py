"""How long a killed daemon takes to be back, and whether its engine notices.

    packaging/dev/user-manager --private -- .venv/bin/python -m bench.adoption

With SmolLM2 ready, the daemon is killed (SIGKILL) and systemd starts it again. Measured from the new
daemon's start (``ExecMainStartTimestampMonotonic`` of lllm3090d.service) until ``GET /v1/instances`` shows
the same main PID as ready; beside it, alternating, how long a bare interpreter takes to import what the
daemon imports at start. All the while the engine's own socket is asked every 50 ms.
"""

from __future__ import annotations

import argparse
import ast
import http.client
import inspect
import os
import signal
import statistics
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bench import _support as support
from lllm3090d import __main__ as start_up
from tests.system.harness import DAEMON_UNIT, PAUSE, REPOSITORY, Service, http_request, properties

LIMIT_MS = 1000.0
IMPORT_FACTOR = 2.0
POLL_S = 0.05
RETRY_S = 0.002
RETURN_TIMEOUT_S = 30.0
MS_PER_S = 1000.0


@dataclass(slots=True)
class EnginePoll:
    """Asks the engine's socket again and again, and counts."""

    endpoint: str
    asked: int = 0
    failures: list[str] = field(default_factory=list)
    slowest_ms: float = 0.0
    _done: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Until told to stop."""
        while not self._done.is_set():
            began = time.monotonic()
            try:
                status = http_request(self.endpoint, "GET", "/health", timeout=5).status
                if status != 200:
                    self.failures.append(f"status {status}")
            except (OSError, http.client.HTTPException) as error:
                self.failures.append(repr(error))
            self.asked += 1
            self.slowest_ms = max(self.slowest_ms, (time.monotonic() - began) * MS_PER_S)
            self._done.wait(POLL_S)

    def stop(self) -> None:
        """Ask no more."""
        self._done.set()


@dataclass(frozen=True, slots=True)
class Return:
    """One death and return, milliseconds."""

    dead_ms: float  # from the signal to the new daemon's start: systemd's and RestartSec
    announced_ms: float  # from its start to READY=1
    adopted_ms: float  # from its start to the answer that shows the engine ready
    import_ms: float  # the bare imports, measured next to it


def imported_at_start() -> tuple[str, ...]:
    """The modules that the daemon imports before it is ready, read from its start-up code."""
    source = ast.parse(textwrap.dedent(inspect.getsource(start_up.run)))
    found = {
        f"{node.module}.{alias.name}" if node.module == "aiohttp" else node.module
        for node in ast.walk(source)
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    return (start_up.__name__, *sorted(found))


def bare_import_ms(modules: Sequence[str]) -> float:
    """From the start of an interpreter until it has imported the modules."""
    code = f"import {', '.join(modules)}\nimport time\nprint(repr(time.monotonic()))"
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=REPOSITORY
    )
    return (float(done.stdout) - began) * MS_PER_S


def seen_ready_s(service: Service, main_pid: int) -> float:
    """When the control socket first shows the engine as ready. Raises RuntimeError."""
    deadline = time.monotonic() + RETURN_TIMEOUT_S
    shown: Any = None
    while time.monotonic() < deadline:
        try:
            # systemd holds the socket: a request that comes too early waits for the new daemon.
            shown = service.instances().get(support.MODEL_NAME)
        except (OSError, http.client.HTTPException, ValueError):
            shown = None
        now = time.monotonic()
        if shown and shown["state"] == "ready" and shown["main_pid"] == main_pid and shown["adopted"]:
            return now
        PAUSE.wait(RETRY_S)
    raise RuntimeError(f"the engine was not adopted within {RETURN_TIMEOUT_S:g} s; last seen: {shown}")


def kill_once(service: Service, main_pid: int, modules: Sequence[str]) -> Return:
    """Kill the daemon and see it return."""
    import_ms = bare_import_ms(modules)
    old = service.main_pid()
    killed = time.monotonic()
    os.kill(old, signal.SIGKILL)
    seen = seen_ready_s(service, main_pid)
    executed = support.exec_time_s(DAEMON_UNIT)
    while (state := properties(DAEMON_UNIT, "ActiveState", "MainPID"))["ActiveState"] != "active":
        PAUSE.wait(RETRY_S)
    if int(state["MainPID"]) == old or executed < killed:
        raise RuntimeError("the daemon that answered is the one that was killed")
    announced = int(
        properties(DAEMON_UNIT, "ActiveEnterTimestampMonotonic")["ActiveEnterTimestampMonotonic"]
    )
    return Return(
        dead_ms=(executed - killed) * MS_PER_S,
        announced_ms=(announced / support.US_PER_S - executed) * MS_PER_S,
        adopted_ms=(seen - executed) * MS_PER_S,
        import_ms=import_ms,
    )


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="adoption after kill -9")
    parser.add_argument("--kills", type=int, default=10, help="how often it is killed (default: 10)")
    count = parser.parse_args().kills
    modules = imported_at_start()
    with support.daemon() as service:
        instance = support.load(service)
        bare_import_ms(modules)  # the first one reads the files from disk
        poll = EnginePoll(instance["endpoint"])
        poller = threading.Thread(target=poll.run)
        poller.start()
        try:
            returns = [kill_once(service, instance["main_pid"], modules) for _ in range(count)]
        finally:
            poll.stop()
            poller.join()
        support.unload(service)
    samples: dict[str, Sequence[float]] = {
        "bare import": [r.import_ms for r in returns],
        "exec to adopted": [r.adopted_ms for r in returns],
        "  exec to READY=1": [r.announced_ms for r in returns],
        "signal to exec (RestartSec=200ms)": [r.dead_ms for r in returns],
    }
    print(f"{count} times kill -9 of the daemon with {support.MODEL_NAME} ready")
    print(support.table(support.SPREAD_HEADS, support.spread_rows("ms", samples)))
    print(
        f"\nthe engine was asked {poll.asked} times, slowest answer {poll.slowest_ms:.1f} ms, "
        f"failures: {', '.join(poll.failures) or 'none'}"
    )
    limit_ms = max(LIMIT_MS, IMPORT_FACTOR * statistics.median(r.import_ms for r in returns))
    slowest_ms = max(r.adopted_ms for r in returns)
    return support.report_targets(
        (
            support.Target("exec to adopted, the slowest", slowest_ms, limit_ms, "ms"),
            support.Target("failed requests to the engine", len(poll.failures), 0, ""),
        )
    )


if __name__ == "__main__":
    sys.exit(main())
