"""Waiting for an engine: ready is ``/health`` answered with 200 by a listener that belongs to the unit."""

from __future__ import annotations

import asyncio
import enum
import os
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from lllm3090d.serving.load_watch import LoadCounters, LoadLimits, LoadTrack, LoadVerdict

HEALTH_REQUEST = b"GET /health HTTP/1.1\r\nHost: engine\r\nConnection: close\r\n\r\n"
# Asking costs the engine a connection: often while a small model loads, seldom while a large one does.
SHORTEST_INTERVAL_S = 0.005
LONGEST_INTERVAL_S = 0.25
INTERVAL_FRACTION = 0.02
HEALTH_TIMEOUT_S = 2.0
PROGRESS_INTERVAL_S = 0.1


class Health(enum.StrEnum):
    """What a socket says."""

    SILENT = "silent"  # nobody listens yet, or no answer came in time
    LOADING = "loading"  # the engine answers that it is not ready
    READY = "ready"
    STRANGER = "stranger"  # the listener is not a process of the unit


def cgroups_of(pid: int, proc: Path = Path("/proc")) -> frozenset[str]:
    """The cgroup paths by which systemd knows a process; in the hybrid layout there are two."""
    try:
        # For each request of the gateway: pathlib and text layers would double what it takes.
        with open(f"{proc}/{pid}/cgroup", "rb", buffering=0) as file:  # noqa: PTH123
            lines = os.fsdecode(file.read()).splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return frozenset()
    parts = (line.split(":", 2) for line in lines)
    return frozenset(path for _, controllers, path in parts if controllers in {"", "name=systemd"})


def belongs_to(pid: int, control_group: str, proc: Path = Path("/proc")) -> bool:
    """The process lies in the unit's cgroup or below it."""
    return any(
        path == control_group or path.startswith(control_group + "/") for path in cgroups_of(pid, proc)
    )


def peer_belongs_to(peer: asyncio.StreamWriter | socket.socket, control_group: str) -> bool:
    """The listener at the other end of a Unix socket is a process of the unit; of an unknown one nobody is."""
    connection: socket.socket = peer if isinstance(peer, socket.socket) else peer.get_extra_info("socket")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, _, _ = struct.unpack("3i", credentials)
    return bool(control_group) and belongs_to(pid, control_group)


async def health(path: Path, control_group: str, timeout_s: float = HEALTH_TIMEOUT_S) -> Health:
    """Ask once.

    Args:
        path: the engine's socket.
        control_group: ``ControlGroup`` of its unit.
        timeout_s: after which it counts as silent.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await _health(path, control_group)
    except (OSError, TimeoutError):
        return Health.SILENT


async def _health(path: Path, control_group: str) -> Health:
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        if not peer_belongs_to(writer, control_group):
            return Health.STRANGER
        writer.write(HEALTH_REQUEST)
        await writer.drain()
        status_line = await reader.readline()
    except ValueError:  # longer than any status line
        return Health.LOADING
    finally:
        writer.close()
    fields = status_line.split()
    ready = len(fields) >= 2 and fields[0].startswith(b"HTTP/") and fields[1] == b"200"
    return Health.READY if ready else Health.LOADING


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a load is.

    Attributes:
        resident_bytes: what the engine holds.
        elapsed_s: since the watch began.
        idle_s: since the last progress.
        disk_bytes_per_s: what the disk gives; None where too little came from it to tell.
        cap_s: after how many seconds altogether it is given up.
    """

    resident_bytes: int
    elapsed_s: float
    idle_s: float
    disk_bytes_per_s: float | None = None
    cap_s: float = float("inf")


async def wait_until_ready(
    path: Path,
    control_group: Callable[[], str],
    resident_bytes: Callable[[], int],
    on_progress: Callable[[Progress], None],
    *,
    limits: LoadLimits,
    counters: Callable[[], LoadCounters] = LoadCounters,
) -> LoadVerdict | None:
    """Wait for the engine; None when it is ready, else why it was given up.

    Progress is growth of what the engine holds, or of what it has read and written. Cancel it when the unit ends: a
    death is systemd's news.

    Args:
        path: the engine's socket.
        control_group: the unit's cgroup; asked each time, since it is known only once the unit has started.
        resident_bytes: what the engine holds now; asked at most every PROGRESS_INTERVAL_S.
        on_progress: told whenever it was asked.
        limits: when the load is given up.
        counters: what else the engine has done, asked as often; by default nobody can tell.
    """
    began = time.monotonic()
    track = LoadTrack.start(began)
    while True:
        if await health(path, control_group()) is Health.READY:
            return None
        now = time.monotonic()
        if now - track.seen_s >= PROGRESS_INTERVAL_S:
            resident = resident_bytes()
            track = track.after(now, replace(counters(), device_bytes=resident))
            on_progress(
                Progress(
                    resident, track.elapsed_s, track.idle_s, track.disk_bytes_per_s, track.cap_s(limits)
                )
            )
            verdict = track.verdict(limits)
            if verdict is not LoadVerdict.GOES_ON:
                return verdict
        await asyncio.sleep(
            min(LONGEST_INTERVAL_S, max(SHORTEST_INTERVAL_S, (now - began) * INTERVAL_FRACTION))
        )
