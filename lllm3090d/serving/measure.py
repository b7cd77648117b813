"""Observations: the reading of each card, the part of it that our engines hold, and who else holds memory.

What is ours is told by control group, so that an engine's child processes count as ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from lllm3090d.errors import LlmError
from lllm3090d.gpus.host import HostMemoryReader
from lllm3090d.gpus.readings import CardKind, CardReader, MemoryReading, WatchesProcesses
from lllm3090d.gpus.sysfs import SYSTEM, Roots
from lllm3090d.planning.tier_conditions import HostMemory
from lllm3090d.planning.units import MIB
from lllm3090d.serving.observation import CardState, Observation, RunProcesses, Stranger
from lllm3090d.serving.processes import host_memory_of, owner_of, pids_of
from lllm3090d.serving.strangers import engines_of_others, stranger_of

# Used memory of a card that no process accounts for, such as a console and contexts of the driver, stays below this.
UNEXPLAINED_BYTES = 512 * MIB
# Their kernels' drivers tell what a process holds to nobody but its user.
LISTS_OWN_USER_ONLY = frozenset({CardKind.AMD, CardKind.INTEL})


def observe(
    readers: Sequence[CardReader],
    runs: Mapping[str, RunProcesses],
    desktop_active: bool | None,
    roots: Roots = SYSTEM,
    *,
    foreign: Mapping[str, RunProcesses] = MappingProxyType({}),
) -> Observation:
    """Read all cards now and attribute what our engines hold. A card that cannot be read carries its error.

    Args:
        readers: the cards, the one with the most memory first.
        runs: processes of each run, by run.
        desktop_active: whether a desktop session is on the machine; None when unknown.
        roots: where proc and control groups are mounted.
        foreign: processes of foreign units, by unit; what they hold is told beside that of runs.

    Raises:
        LlmError: CARD_UNREADABLE where host memory beside the cards cannot be read.
    """
    known = _Known({**foreign, **runs}, any(run.main_pid is not None for run in runs.values()))
    runs = known.runs
    states = tuple(_state(reader, known, roots) for reader in readers)
    if states[0].card.kind is CardKind.CPU:
        return Observation(states, desktop_active)
    host = HostMemoryReader(roots.proc / "meminfo").read()
    in_use = {
        run: memory.anonymous_bytes
        for run, processes in runs.items()
        if (memory := host_memory_of(processes, roots)) is not None
    }
    return Observation(states, desktop_active, HostMemory(host.free_bytes, host.total_bytes), in_use)


@dataclass(frozen=True, slots=True)
class _Known:
    """Processes of runs and of foreign units, and whether one of the runs has any."""

    runs: Mapping[str, RunProcesses]
    has_engine: bool


def _state(reader: CardReader, known: _Known, roots: Roots) -> CardState:
    runs = known.runs
    if isinstance(reader, WatchesProcesses):
        reader.watch(frozenset().union(*(pids_of(run, roots) for run in runs.values())))
    try:
        reading = reader.read()
    except LlmError as error:
        return CardState(reader.card, None, error)
    if reader.card.kind is CardKind.CPU:
        held = {run: host_memory_of(processes, roots) for run, processes in runs.items()}
        return CardState(
            reader.card,
            reading,
            resident={run: memory.resident_bytes for run, memory in held.items() if memory is not None},
            in_use={run: memory.anonymous_bytes for run, memory in held.items() if memory is not None},
        )
    return _attributed(reader, reading, known, roots)


def _attributed(reader: CardReader, reading: MemoryReading, known: _Known, roots: Roots) -> CardState:
    runs = known.runs
    held: dict[str, int] = {}
    strangers: list[Stranger] = []
    told = reading.processes_known
    explained = 0  # by processes that are on this machine under the numbers of the list
    for process in reading.processes:
        owner = owner_of(process.pid, runs, roots.proc)
        if owner is None:
            stranger = stranger_of(process, roots.proc)
            strangers.append(stranger)
            explained += 0 if stranger.unseen else process.used_bytes or 0
            continue
        explained += process.used_bytes or 0
        if process.used_bytes is None:
            told = False
        else:
            held[owner] = held.get(owner, 0) + process.used_bytes
    if reader.card.kind in LISTS_OWN_USER_ONLY:
        listed = sum(held.values()) + sum(each.used_bytes or 0 for each in strangers)
        if reading.used_bytes - listed >= UNEXPLAINED_BYTES:
            strangers += engines_of_others(roots)
    lists_numbers_of_host = reader.card.kind is CardKind.NVIDIA
    if lists_numbers_of_host and not held and known.has_engine:
        # None of our engines is on the list, and somebody holds memory that nobody here accounts for: inside a
        # container NVML lists no process, or those of the host by the host's numbers. Then it may be ours.
        told = told and reading.used_bytes - explained < UNEXPLAINED_BYTES
    strangers.sort(key=lambda one: (one.used_bytes is None, -(one.used_bytes or 0), one.pid))
    return CardState(
        reader.card,
        reading,
        resident=held if told else {},
        in_use=held if told else {},
        strangers=tuple(strangers),
        attributed=told,
    )
