"""Observations: the card's reading, and the part of it that our engines hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lllm3090d.gpus.host import HostMemoryReader
from lllm3090d.gpus.readings import CardKind, CardReader
from lllm3090d.planning.tier_conditions import HostMemory
from lllm3090d.serving.events import Observation

KIB = 1024


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Host memory of a process, bytes (``/proc/PID/status``).

    Attributes:
        resident_bytes: everything it has in memory, mapped files included.
        anonymous_bytes: what the kernel cannot drop: anonymous and shared memory.
    """

    resident_bytes: int
    anonymous_bytes: int


def process_memory(pid: int, proc: Path = Path("/proc")) -> ProcessMemory | None:
    """Memory of a process; None when it is gone."""
    try:
        text = (proc / str(pid) / "status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = dict(line.split(":", 1) for line in text.splitlines() if line.startswith(("VmRSS", "Rss")))

    def read_bytes(key: str) -> int:
        # A zombie has no such lines: it holds nothing.
        return int(fields.get(key, "0 kB").split()[0]) * KIB

    return ProcessMemory(read_bytes("VmRSS"), read_bytes("RssAnon") + read_bytes("RssShmem"))


def observe(reader: CardReader, main_pids: Mapping[str, int], desktop_active: bool | None) -> Observation:
    """Read the card now and attribute what our engines hold.

    Args:
        reader: the card.
        main_pids: main process of each run that has one, by run.
        desktop_active: whether a desktop session is on the card; None when unknown.

    Raises:
        LlmError: CARD_UNREADABLE.
    """
    reading = reader.read()
    resident: dict[str, int] = {}
    in_use: dict[str, int] = {}
    if reader.card.kind is CardKind.CPU:
        for run, pid in main_pids.items():
            memory = process_memory(pid)
            if memory is not None:
                resident[run] = memory.resident_bytes
                in_use[run] = memory.anonymous_bytes
    else:
        held = {process.pid: process.used_bytes for process in reading.processes}
        for run, pid in main_pids.items():
            used = held.get(pid)
            if used is not None:
                resident[run] = in_use[run] = used
    return Observation(reader.card, reading, resident, in_use, desktop_active, _host(reader))


def _host(reader: CardReader) -> HostMemory | None:
    if reader.card.kind is CardKind.CPU:
        return None
    host = HostMemoryReader().read()
    return HostMemory(host.free_bytes, host.total_bytes)


def held_bytes(reader: CardReader, pid: int) -> int:
    """What one process holds of the card now; 0 when it is gone. Raises LlmError CARD_UNREADABLE."""
    return observe(reader, {"": pid}, None).resident.get("", 0)
