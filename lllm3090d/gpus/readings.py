"""Card and MemoryReading: what is known of a card and what its memory looked like at one moment. Plain data."""

from __future__ import annotations

import enum
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol, runtime_checkable

# Of one lane after encoding, bytes/s (PCI-SIG): 2.5 and 5 GT/s with 8b/10b, 8 to 32 GT/s with 128b/130b, 64 GT/s.
LANE_BYTES_PER_S: Mapping[int, int] = MappingProxyType(
    {1: 250_000_000, 2: 500_000_000, 3: 984_600_000, 4: 1_969_200_000, 5: 3_938_500_000, 6: 7_563_000_000}
)
_PCI_ADDRESS = re.compile(r"(?P<domain>[0-9a-f]{4,8}):(?P<bus>[0-9a-f]{2}):(?P<device>[0-9a-f]{2}\.[0-7])")


class CardKind(enum.StrEnum):
    """Who answers for the card's memory."""

    NVIDIA = "nvidia"  # the driver, through NVML
    AMD = "amd"  # the kernel's amdgpu, through sysfs
    INTEL = "intel"  # the kernel's xe, through sysfs and the dmem controller
    CPU = "cpu"  # no card: host memory takes its place


@dataclass(frozen=True, slots=True)
class PcieLink:
    """What connects a card to the host.

    Attributes:
        generation: of PCI Express, the highest that card and slot have in common.
        width: lanes in use.
    """

    generation: int
    width: int

    @property
    def bytes_per_s(self) -> int | None:
        """Each way, by the standard, after encoding; None for a generation that is unknown here."""
        lane = LANE_BYTES_PER_S.get(self.generation)
        return None if lane is None else lane * self.width


@dataclass(frozen=True, slots=True)
class Card:
    """A graphics card, or host memory in its place.

    Attributes:
        kind: who answers for its memory.
        uuid: the driver's UUID; ``pci-`` and the address where it has none; ``host`` for host memory.
        name: product name.
        driver_version: e.g. ``580.95.05``; None for host memory.
        total_bytes: nameplate; 0 where it has not been read yet. A reading with another total is refused.
        pci_address: such as ``0000:01:00.0``; empty for host memory and where unknown.
        compute_capability: such as ``8.6``; None where there is none.
        link: to the host; None where unknown.
        driver_problem: what a person should know of the driver; empty where nothing.
    """

    kind: CardKind
    uuid: str
    name: str
    driver_version: str | None
    total_bytes: int = 0
    pci_address: str = ""
    compute_capability: str | None = None
    link: PcieLink | None = None
    driver_problem: str = ""


def normal_pci_address(text: str) -> str:
    """A PCI address as sysfs writes it (``0000:01:00.0``), whatever the width and case of its domain; or empty."""
    found = _PCI_ADDRESS.fullmatch(text.strip().lower())
    return f"{int(found['domain'], 16):04x}:{found['bus']}:{found['device']}" if found else ""


@dataclass(frozen=True, slots=True)
class CardProcess:
    """A process that holds memory of the card; used_bytes is None where the driver does not tell."""

    pid: int
    used_bytes: int | None


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """The card's memory at one moment, bytes.

    Attributes:
        taken_monotonic_s: when, on the monotonic clock.
        total_bytes: nameplate.
        reserved_bytes: what the driver keeps for itself, live; None where it does not tell (never read as
            0).
        used_bytes: used by processes; with the driver's own part where reserved_bytes is None.
        free_bytes: the driver's own free figure (MemAvailable for host memory).
        processes: who holds memory.
        processes_known: False where nobody tells who holds memory; ``processes`` may then lack some or all.
        busy_percent: of the last sampling period, in which something was computed; None where the driver does not tell.
        memory_busy_percent: in which memory was read or written, likewise.
    """

    taken_monotonic_s: float
    total_bytes: int
    reserved_bytes: int | None
    used_bytes: int
    free_bytes: int
    processes: tuple[CardProcess, ...]
    processes_known: bool = True
    busy_percent: int | None = None
    memory_busy_percent: int | None = None


class CardReader(Protocol):
    """Reads one card. Implementations never open a compute context."""

    @property
    def card(self) -> Card:
        """The card that is read."""
        ...

    def read(self) -> MemoryReading:
        """Read the memory now; takes about a millisecond. Raises LlmError CARD_UNREADABLE, never returns a guess."""
        ...

    def close(self) -> None:
        """Release the driver's library."""
        ...


@runtime_checkable
class WatchesProcesses(Protocol):
    """A reader that finds other processes than the watched ones late."""

    def watch(self, pids: Collection[int]) -> None:
        """These processes are looked at in every reading."""
        ...


class NoCardError(Exception):
    """There is no card of a vendor, for a reason that is no fault: no driver, no device, none that can be managed.

    Args:
        why: for a person.
        is_installed: the vendor's software is there all the same, so that a card which was there before is missing.
    """

    def __init__(self, why: str, *, is_installed: bool = False) -> None:
        super().__init__(why)
        self.is_installed = is_installed
