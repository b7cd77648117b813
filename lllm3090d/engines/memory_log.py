"""What an engine says in its log of the memory that it takes. Pure.

At its usual verbosity (3) a ``llama-server`` says nothing of it. At 4 (``-lv 4``) it writes a line for each buffer when
it is made, with two decimals of a MiB, and when it ends a table in whole MiB, rounded down. The lines are preferred,
the table is taken where there are none.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from decimal import Decimal

from lllm3090d.planning.units import MIB

LONGEST_LINE = 2000  # characters; nothing that is looked for comes near
VERBOSITY = "-lv 4"  # what makes an engine tell
HOST_DEVICE = "Host"
_SIZE = r"[0-9]{1,9}(?:\.[0-9]{1,3})?"
_NEW_CONTEXT = re.compile(r"\bllama_context: n_ctx\s+= [0-9]{1,10}\Z")
_BUFFER = re.compile(
    r"\b(?P<by>[A-Za-z_]{1,60}):\s+(?P<device>[A-Za-z0-9_.:-]{1,60})\s+(?P<kind>KV|RS|compute|output|model)"
    rf" buffer size =\s*(?P<mib>{_SIZE}) MiB\Z"
)
_PROJECTOR_DEVICE = re.compile(r"\bCLIP using (?P<device>[A-Za-z0-9_.:-]{1,60}) backend\Z")
_PROJECTOR_SIZE = re.compile(rf"\bmodel size:\s+(?P<mib>{_SIZE}) MiB\Z")
_PROJECTOR_GRAPHS = frozenset({"alloc_compute_meta", "reserve_compute_meta"})
_TABLE = re.compile(r"\| memory breakdown \[MiB\]\s+\|")
_ROW = re.compile(
    r"\|\s+- (?P<device>[A-Za-z0-9_.:-]{1,60})(?: \(.{0,120}\))?\s+\|(?:\s*[0-9]{1,9} = +[0-9]{1,9} \+)? *\(?"
    r"\s*[0-9]{1,9} =\s+(?P<model>[0-9]{1,9}) \+\s+(?P<context>[0-9]{1,9}) \+\s+(?P<compute>[0-9]{1,9})\)?"
    r"(?: \+\s*-?[0-9]{1,9})?\s*\|"
)


class EnginePart(enum.StrEnum):
    """What a buffer is for."""

    MODEL = "model"
    CONTEXT = "context"  # caches and recurrent states
    COMPUTE = "compute"  # graphs
    OUTPUT = "output"  # logits
    PROJECTOR = "projector"
    PROJECTOR_GRAPH = "projector graph"


_PARTS = {
    "model": EnginePart.MODEL,
    "KV": EnginePart.CONTEXT,
    "RS": EnginePart.CONTEXT,
    "compute": EnginePart.COMPUTE,
    "output": EnginePart.OUTPUT,
}


@dataclass(frozen=True, slots=True)
class EngineBuffer:
    """All buffers for one purpose on one device.

    Attributes:
        device: as the engine names it, such as ``CUDA0``, ``CPU_Mapped`` or ``Vulkan_Host``.
        part: what for.
        bytes: the sum; as exact as the log, see :mod:`lllm3090d.engines.memory_log`.
    """

    device: str
    part: EnginePart
    bytes: int

    @property
    def on_card(self) -> bool:
        """It lies on a card, not in memory of the host, pinned or not."""
        name = self.device
        return not (name.startswith("CPU") or name.endswith("_Host") or name == HOST_DEVICE)


@dataclass(frozen=True, slots=True)
class MemoryLog:
    """What a log tells.

    Attributes:
        buffers: in the order of their first line; empty where it tells nothing.
        is_summary: they come from the table at the end, in whole MiB rounded down and without outputs of their own.
    """

    buffers: tuple[EngineBuffer, ...] = ()
    is_summary: bool = False

    def total_bytes(self, part: EnginePart, *, on_card: bool | None = None) -> int | None:
        """Of one purpose, everywhere or on one side; None where the log says nothing of it at all."""
        found = [each for each in self.buffers if each.part is part]
        if not found:
            return None
        return sum(each.bytes for each in found if on_card is None or each.on_card is on_card)


Key = tuple[str, EnginePart]


@dataclass(slots=True)
class _Seen:
    sizes: dict[Key, int] = field(default_factory=dict)
    # Of the context that is being made: a graph that is reserved anew takes the place of the old one.
    graphs: dict[Key, int] = field(default_factory=dict)
    table: dict[Key, int] | None = None
    projector_device: str | None = None

    def take(self, line: str) -> None:
        if found := _BUFFER.search(line):
            self._buffer(found)
        elif _NEW_CONTEXT.search(line):
            self._end_context()
        elif found := _PROJECTOR_DEVICE.search(line):
            self.projector_device = found["device"]
        elif self.projector_device and (found := _PROJECTOR_SIZE.search(line)):
            self._add(self.projector_device, EnginePart.PROJECTOR, _bytes(found["mib"]))
        elif _TABLE.search(line):
            self.table = {}
        elif self.table is not None and (found := _ROW.search(line)):
            for part in (EnginePart.MODEL, EnginePart.CONTEXT, EnginePart.COMPUTE):
                key = (found["device"], part)
                self.table[key] = self.table.get(key, 0) + int(found[part.value]) * MIB

    def _buffer(self, found: re.Match[str]) -> None:
        device, size, part = found["device"], _bytes(found["mib"]), _PARTS[found["kind"]]
        if found["by"] in _PROJECTOR_GRAPHS:
            key = (device, EnginePart.PROJECTOR_GRAPH)
            self.sizes[key] = max(size, self.sizes.get(key, 0))
        elif part is EnginePart.COMPUTE:
            key = (device, part)
            self.graphs[key] = max(size, self.graphs.get(key, 0))
        else:
            self._add(device, part, size)

    def _add(self, device: str, part: EnginePart, size: int) -> None:
        self.sizes[device, part] = self.sizes.get((device, part), 0) + size

    def _end_context(self) -> None:
        for (device, part), size in self.graphs.items():
            self._add(device, part, size)
        self.graphs.clear()

    def log(self) -> MemoryLog:
        self._end_context()
        if self.sizes:
            return MemoryLog(_buffers(self.sizes))
        return MemoryLog(_buffers(self.table or {}), is_summary=bool(self.table))


def read_memory_log(lines: Iterable[str]) -> MemoryLog:
    """Read the log of one start.

    Args:
        lines: in order, from the start on; anything may be among them.
    """
    seen = _Seen()
    for line in lines:
        if len(line) <= LONGEST_LINE:
            seen.take(line.rstrip())
    return seen.log()


def _buffers(sizes: dict[Key, int]) -> tuple[EngineBuffer, ...]:
    return tuple(EngineBuffer(device, part, size) for (device, part), size in sizes.items())


def _bytes(mib: str) -> int:
    return int(Decimal(mib) * MIB)
