"""What a measurement of the gateway needs: an engine that answers at once, nginx, the gateway, each its own process."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fakes.unix_http import call
from tests.system.harness import REPOSITORY

SOURCES = REPOSITORY / "bench"
START_LIMIT_S = 20.0
NGINX = """
worker_processes 1;
daemon off;
pid {home}/nginx.pid;
error_log {home}/nginx.log;
events {{ worker_connections 4096; }}
http {{
  access_log off;
  keepalive_requests 1000000000;
  client_body_temp_path {home}/body;
  proxy_temp_path {home}/proxy;
  fastcgi_temp_path {home}/fastcgi;
  uwsgi_temp_path {home}/uwsgi;
  scgi_temp_path {home}/scgi;
  upstream engine {{ server unix:{socket}; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://engine;
      proxy_http_version 1.1;
      proxy_buffering off;
      proxy_request_buffering off;
      client_max_body_size 0;
    }}
  }}
}}
"""


@dataclass(frozen=True, slots=True)
class Load:
    """What the clients of bench/gateway_load.c do.

    Attributes:
        clients: each with one request at a time.
        seconds: after which none begins another; 0 for one request each.
        pieces: of an answer; 0 for a short document.
        interval_us: between them.
        piece_bytes: of each.
        keep: a connection is used again.
        pause_us: at most, between two requests of a client.
    """

    clients: int
    seconds: float
    pieces: int = 0
    interval_us: int = 0
    piece_bytes: int = 200
    keep: bool = True
    pause_us: int = 0


@dataclass(slots=True)
class Seen:
    """What the clients saw, milliseconds."""

    first_ms: list[float] = field(default_factory=list)
    piece_ms: list[float] = field(default_factory=list)
    complete: int = 0
    broken: int = 0
    seconds: float = 0.0

    def add(self, other: Seen) -> None:
        """Another round of the same."""
        self.first_ms += other.first_ms
        self.piece_ms += other.piece_ms
        self.complete += other.complete
        self.broken += other.broken
        self.seconds += other.seconds


def quantile(values: list[float], part: float) -> float:
    """The value below which that part of them lies."""
    return sorted(values)[min(len(values) - 1, int(len(values) * part))]


class Program:
    """A gateway in a process of its own; see bench/gateway_process.py."""

    def __init__(self, path: Path, slots: int) -> None:
        command = [sys.executable, "-m", "bench.gateway_process", str(path), str(slots)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
        )
        self.port = int(self._line())

    def state(self) -> dict[str, Any]:
        """What it holds now."""
        if self.process.stdin is None:
            raise RuntimeError("no pipe")
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        state: dict[str, Any] = json.loads(self._line())
        return state

    def resident_mib(self) -> float:
        """``VmRSS``, without asking it."""
        text = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii")
        kib = next(int(line.split()[1]) for line in text.splitlines() if line.startswith("VmRSS:"))
        return kib / 1024

    def close(self) -> None:
        """End it."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process.wait(START_LIMIT_S)

    def _line(self) -> str:
        if self.process.stdout is None or not (line := self.process.stdout.readline()):
            sys.exit("the gateway's process has ended")
        return line


class Scene:
    """An engine and what stands before it.

    Args:
        home: for sockets and programs.
        nginx: its program; None where there is none.
    """

    def __init__(self, home: Path, nginx: str | None) -> None:
        self.home = home
        self.socket = home / "engine.sock"
        for name in ("engine", "load"):
            source = SOURCES / f"gateway_{name}.c"
            subprocess.run(["gcc", "-O2", "-o", str(home / name), str(source)], check=True)
        self._processes: list[subprocess.Popen[Any]] = []
        self._start([str(home / "engine"), str(self.socket)])
        _wait(self.socket.exists)
        self.nginx_port = self._start_nginx(nginx) if nginx else None
        self.gateway = Program(self.socket, 4096)
        self._processes.append(self.gateway.process)

    def _start(self, command: list[str]) -> subprocess.Popen[Any]:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        self._processes.append(process)
        return process

    def _start_nginx(self, program: str) -> int:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            port: int = taken.getsockname()[1]
        # Its worker is another user, where we are root.
        self.home.chmod(0o755)
        self.socket.chmod(0o777)
        config = self.home / "nginx.conf"
        config.write_text(NGINX.format(home=self.home, socket=self.socket, port=port))
        self._start([program, "-c", str(config), "-e", str(self.home / "nginx.log")])

        def listens() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        _wait(listens)
        return port

    @property
    def places(self) -> dict[str, str]:
        """Where a client may ask, by name."""
        found = {"direct": f"unix:{self.socket}"}
        if self.nginx_port is not None:
            found["nginx"] = str(self.nginx_port)
        return found | {"gateway": str(self.gateway.port)}

    def load(self, place: str, load: Load, *, first: bool = False) -> Seen:
        """Let clients ask.

        Args:
            place: address.
            load: what they do.
            first: they go before all other programs of the machine.
        """
        process = self.start_load(place, load)
        if first:
            go_first(process.pid)
        return self.seen(process, load)

    def start_load(self, place: str, load: Load) -> subprocess.Popen[str]:
        """Let clients begin."""
        numbers = (
            load.clients,
            load.seconds,
            load.pieces,
            load.interval_us,
            load.piece_bytes,
            int(load.keep),
        )
        command = [str(self.home / "load"), place, *map(str, numbers), str(load.pause_us)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def seen(self, process: subprocess.Popen[str], load: Load) -> Seen:
        """What they have seen when they have ended."""
        seen = Seen(seconds=load.seconds)
        lines = process.communicate()[0].splitlines()
        for line in lines:
            word, number, *rest = line.split()
            if word == "first":
                seen.first_ms.append(float(number) / 1e3)
            elif word == "piece":
                seen.piece_ms.append(float(number) / 1e3)
            else:
                seen.complete, seen.broken = int(number), int(rest[1])
        if process.returncode:
            sys.exit("the clients failed")
        return seen

    def counts(self) -> dict[str, int]:
        """What the engine says of its requests."""
        counts: dict[str, int] = json.loads(call(self.socket, "GET", "/counts")[1])
        return counts

    def go_first(self) -> bool:
        """Engine, proxies and their workers run before other programs; False where that is not allowed."""
        pids = [process.pid for process in self._processes]
        for pid in list(pids):
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
            pids += [int(child) for child in children.split()]
        return all([go_first(pid) for pid in pids])

    def go_as_others(self) -> None:
        """The contrary."""
        for process in self._processes:
            with contextlib.suppress(PermissionError):
                os.sched_setscheduler(process.pid, os.SCHED_OTHER, os.sched_param(0))

    def close(self) -> None:
        """End all."""
        self.gateway.close()
        for process in self._processes:
            process.send_signal(signal.SIGTERM)
            process.wait(START_LIMIT_S)


@contextlib.contextmanager
def scene(nginx: str | None) -> Iterator[Scene]:
    """One, removed in the end."""
    if shutil.which("gcc") is None:
        sys.exit("needs gcc, for the engine and the clients; run: packaging/dev/setup.sh test")
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        made = Scene(Path(directory), nginx)
        try:
            yield made
        finally:
            made.close()


def go_first(pid: int) -> bool:
    """A process runs before all that are not in a hurry; False where that is not allowed."""
    try:
        os.sched_setscheduler(pid, os.SCHED_RR, os.sched_param(1))
    except PermissionError:
        return False
    return True


def median(values: list[float]) -> float:
    """Of milliseconds; nan where there is none."""
    return statistics.median(values) if values else float("nan")


def _wait(condition: Any) -> None:
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > START_LIMIT_S:
            sys.exit("a program of the scene does not start")
        time.sleep(0.01)
