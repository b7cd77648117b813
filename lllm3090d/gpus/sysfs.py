"""AMD and Intel cards, whose drivers are in the kernel: totals from sysfs, processes from their DRM clients.

AMD (amdgpu): ``mem_info_vram_total`` and ``mem_info_vram_used`` of the device, bytes.

Intel (xe): sysfs tells no use of video memory, and clients of other users tell theirs to nobody, so a sum of clients
would be too small. The dmem controller has the capacity of each region, and in its root group the use of all; a card
without both (i915, kernels before 6.14) is not offered.

Neither tells what the driver keeps: it is in the used figure, but not told apart, and what firmware and page tables
will still take is in none. So reserved is None and the setting for the driver applies, never 0.
"""

from __future__ import annotations

import functools
import logging
import platform
import re
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus import dmem
from lllm3090d.gpus.fdinfo import card_use, own_processes
from lllm3090d.gpus.pci import PCI_IDS, link_of, product_name, text_of
from lllm3090d.gpus.readings import (
    Card,
    CardKind,
    CardProcess,
    MemoryReading,
    NoCardError,
    normal_pci_address,
)

log = logging.getLogger(__name__)

VENDORS = {CardKind.AMD: "0x1002", CardKind.INTEL: "0x8086"}
BRANDS = {CardKind.AMD: "AMD", CardKind.INTEL: "Intel"}
_CARD = re.compile(r"card(?P<number>\d+)")
# Looking through all processes of the user takes some 10 ms; those that are watched are looked at in every reading.
SEARCH_PAUSE_S = 5.0

Memory = Callable[[], tuple[int, int]]  # total and used bytes; raises OSError, ValueError


@dataclass(frozen=True, slots=True)
class Roots:
    """Where the kernel's file systems are mounted.

    Attributes:
        sys: sysfs.
        proc: proc.
        cgroup: control groups.
        pci_ids: tables of names.
    """

    sys: Path = Path("/sys")
    proc: Path = Path("/proc")
    cgroup: Path = dmem.CGROUP
    pci_ids: tuple[Path, ...] = PCI_IDS


SYSTEM = Roots()


def open_amd(roots: Roots = SYSTEM) -> tuple[SysfsReader, ...]:
    """A reader for each AMD card, the one with the most memory first. Raises NoCardError."""
    return _opened(CardKind.AMD, roots)


def open_intel(roots: Roots = SYSTEM) -> tuple[SysfsReader, ...]:
    """A reader for each Intel card with memory of its own, the one with the most first. Raises NoCardError."""
    return _opened(CardKind.INTEL, roots)


class SysfsReader:
    """Reads one card; made by :func:`open_amd` and :func:`open_intel`.

    Its list of processes has those of this user only, and finds others than the watched ones a few seconds late.
    """

    def __init__(
        self, card: Card, memory: Memory, proc: Path, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Make it.

        Args:
            card: what is known of it.
            memory: reads total and used bytes.
            proc: where proc is mounted.
            clock: seconds, never going back.
        """
        self._card = card
        self._memory = memory
        self._proc = proc
        self._clock = clock
        self._watched: frozenset[int] = frozenset()
        self._found: frozenset[int] = frozenset()
        self._searched_s: float | None = None

    @property
    def card(self) -> Card:
        """The card that is read."""
        return self._card

    def watch(self, pids: Collection[int]) -> None:
        """These processes are looked at in every reading."""
        self._watched = frozenset(pids)

    def read(self) -> MemoryReading:
        """The card's memory now. Raises LlmError CARD_UNREADABLE, also for absurd figures and a total that changed."""
        try:
            total, used = self._memory()
        except (OSError, ValueError) as error:
            raise self._unreadable(f"{error}") from error
        if total <= 0 or not 0 <= used <= total:
            raise self._unreadable(f"its figures cannot be true: total {total}, used {used} bytes")
        if self._card.total_bytes not in (0, total):
            raise self._unreadable(
                f"its total was {self._card.total_bytes} bytes and is now {total}, which cannot be the same card"
            )
        return MemoryReading(
            taken_monotonic_s=self._clock(),
            total_bytes=total,
            reserved_bytes=None,
            used_bytes=used,
            free_bytes=total - used,
            processes=tuple(self._processes()),
            processes_known=True,
        )

    def close(self) -> None:
        """Nothing is held."""

    def _processes(self) -> Iterator[CardProcess]:
        now_s = self._clock()
        address = self._card.pci_address
        if self._searched_s is None or now_s - self._searched_s >= SEARCH_PAUSE_S:
            self._searched_s = now_s
            everybody = (card_use(pid, address, self._proc) for pid in own_processes(self._proc))
            self._found = frozenset(
                process.pid
                for process in everybody
                if process is not None and process.used_bytes is not None
            )
        for pid in sorted(self._watched | self._found):
            process = card_use(pid, address, self._proc)
            if process is not None:
                yield process

    def _unreadable(self, why: str) -> LlmError:
        brand = BRANDS[self._card.kind]
        return LlmError(
            ErrorCode.CARD_UNREADABLE,
            f"{brand}: {self._card.name} could not be read: {why}.",
            hint="See what the kernel says: journalctl -k --grep 'amdgpu|xe|drm'; if it goes on, restart the computer.",
            card=self._card.uuid,
        )


def _opened(kind: CardKind, roots: Roots) -> tuple[SysfsReader, ...]:
    readers, left_out = [], []
    for device in _devices(roots.sys, VENDORS[kind]):
        address = normal_pci_address(device.name)
        driver = (device / "driver").resolve().name
        memory, why = (
            _amd_memory(device) if kind is CardKind.AMD else _intel_memory(address, driver, roots.cgroup)
        )
        card = _card(kind, device, driver, roots)
        if memory is None:
            left_out.append(f"{card.name} at {address}: {why}")
            continue
        try:
            total, _ = memory()
        except (OSError, ValueError) as error:
            # It is there: its reader will say what is wrong, and read it when it comes back.
            log.warning("%s at %s cannot be read now: %s", card.name, address, error)
            total = 0
        readers.append(SysfsReader(replace(card, total_bytes=total), memory, roots.proc))
    for reason in left_out:
        log.info("a card is left out: %s", reason)
    if not readers:
        raise NoCardError("; ".join(left_out) or f"the kernel lists no card of {BRANDS[kind]}")
    return tuple(sorted(readers, key=lambda reader: -reader.card.total_bytes))


def _devices(sys: Path, vendor: str) -> Iterator[Path]:
    """Directories of the PCI devices behind the cards of a vendor, in the kernel's order."""
    try:
        entries = list((sys / "class" / "drm").iterdir())
    except FileNotFoundError:
        return
    numbered = sorted((int(match[1]), entry) for entry in entries if (match := _CARD.fullmatch(entry.name)))
    seen = set()
    for _, entry in numbered:
        device = (entry / "device").resolve()
        # Cards that are no PCI devices (virtual ones, boards) have no address and no memory of their own.
        if normal_pci_address(device.name) and device not in seen and text_of(device / "vendor") == vendor:
            seen.add(device)
            yield device


def _card(kind: CardKind, device: Path, driver: str, roots: Roots) -> Card:
    address = normal_pci_address(device.name)
    identifier = text_of(device / "device").removeprefix("0x")
    brand = BRANDS[kind]
    name = text_of(device / "product_name") or product_name(
        VENDORS[kind].removeprefix("0x"), identifier, roots.pci_ids
    )
    unique = text_of(device / "unique_id")  # amdgpu, where the chip has one; ROCm takes it as GPU-...
    return Card(
        kind=kind,
        uuid=f"GPU-{unique}" if re.fullmatch(r"[0-9a-f]{16}", unique) else f"pci-{address}",
        name=f"{brand} {(name or f'graphics {identifier}').removeprefix(brand).strip()}",
        driver_version=f"{driver} of Linux {platform.release()}" if driver else None,
        pci_address=address,
        # The links that Intel's cards report are those of a switch inside.
        link=link_of(device) if kind is CardKind.AMD else None,
    )


def _amd_memory(device: Path) -> tuple[Memory | None, str]:
    files = device / "mem_info_vram_total", device / "mem_info_vram_used"
    if not all(file.is_file() for file in files):
        return None, "its driver tells no use of video memory; amdgpu does"
    return functools.partial(_numbers, *files), ""


def _numbers(total: Path, used: Path) -> tuple[int, int]:
    return int(total.read_text(encoding="ascii")), int(used.read_text(encoding="ascii"))


def _intel_memory(address: str, driver: str, cgroup: Path) -> tuple[Memory | None, str]:
    regions = dmem.capacities(address, cgroup)
    if not regions:
        return None, (
            f"its driver {driver} tells no video memory in dmem.capacity: a card that shares the machine's memory, or"
            " driver i915, or a kernel before 6.14"
        )
    return functools.partial(_in_regions, address, cgroup), ""


def _in_regions(address: str, cgroup: Path) -> tuple[int, int]:
    regions = dmem.capacities(address, cgroup)
    used = dmem.used_bytes(regions, cgroup)
    if not regions or used is None:
        raise ValueError("the kernel's dmem controller does not tell its memory")
    return sum(regions.values()), used
