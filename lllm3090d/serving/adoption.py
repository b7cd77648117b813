"""Finding our units again after the daemon was killed or restarted: sorted by what is to be done. Pure.

What a unit is adopted by is its record. Where that is missing or cannot be used, what was reconstructed from the unit's
own command takes its place (:mod:`lllm3090d.serving.reconstruction`); where that is not to be had either, the unit is
foreign (:mod:`lllm3090d.serving.foreign_units`).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType

from lllm3090d.bus.unit_status import UnitStatus
from lllm3090d.engines.places import SERVER_NAME
from lllm3090d.serving.unit_spec import RECORD_SCHEMA, RECORD_VARIABLE, Record, read_record, unit_name

NO_RECORD = "it carries no record"
DAMAGED_RECORD = "its record is damaged"
ANOTHERS_RECORD = "its record is that of another unit"
OTHER_COMMAND = "its record is not that of its command"


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """What came of reading a unit's own command: a record like the one that it lacks, or why there is none."""

    record: Record | None
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class Found:
    """A unit of ours and what it says of itself.

    Attributes:
        status: of the unit.
        record: its own, or one that was reconstructed.
        reconstructed: why its own was not used; empty where it was.
        is_known: somebody loaded it here: its own record says so, or this launch is remembered.
    """

    status: UnitStatus
    record: Record
    reconstructed: str = ""
    is_known: bool = True


@dataclass(frozen=True, slots=True)
class Unadopted:
    """A unit that is left alone.

    Attributes:
        status: of the unit.
        why: as the end of a sentence about it.
        behind: the unit that stands in its way; empty where it would be left alone without any.
    """

    status: UnitStatus
    why: str
    behind: str = ""


def behind(status: UnitStatus, name: str, other: str) -> Unadopted:
    """A unit whose model runs in another one."""
    return Unadopted(status, f"{name} runs in {other} too", other)


def same_launch(status: UnitStatus, run: str, other: str) -> Unadopted:
    """A unit that claims to be a launch that another one is."""
    return Unadopted(status, f"another unit is the launch {run} too", other)


@dataclass(frozen=True, slots=True)
class Findings:
    """The units with our prefix, sorted.

    Attributes:
        adopt: one unit of each model, the live one where there is one.
        forget: dead units of a model that has a better one; their failure is only reported.
        strangers: units that nobody understands, and second live units of one model: left alone.
    """

    adopt: tuple[Found, ...]
    forget: tuple[Found, ...]
    strangers: tuple[Unadopted, ...]


def is_dead(status: UnitStatus) -> bool:
    """Nothing of it runs, and nothing is about to change that."""
    return status.is_failed or status.is_gone


def lacking(status: UnitStatus) -> str:
    """Why a unit cannot be adopted by its own record; empty where it can."""
    record = read_record(status.environment)
    # A record belongs to the one unit it was written for: what is done to its run is done to that unit.
    if record is not None:
        if status.name != unit_name(record.name, record.run):
            return ANOTHERS_RECORD
        return "" if _is_command_of(status, record) else OTHER_COMMAND
    text = status.variables.get(RECORD_VARIABLE)
    if not text:
        return NO_RECORD
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return DAMAGED_RECORD
    schema = values.get("schema_version") if isinstance(values, dict) else None
    if isinstance(schema, int) and schema > RECORD_SCHEMA:
        return f"its record is of schema {schema}, and this release reads {RECORD_SCHEMA}"
    return DAMAGED_RECORD


def _is_command_of(status: UnitStatus, record: Record) -> bool:
    """Whether a unit runs what its record says: that server, with that model, behind that socket.

    What has ended holds nothing, and of some of those systemd tells no command any more.
    """
    if not status.argv:
        return is_dead(status)
    server, words = status.argv[0], status.argv[1:]
    if Path(server).name != SERVER_NAME or record.engine_server not in {None, server}:
        return False
    return _last(words, "--host") == str(record.socket) and _last(words, "-m", "--model") == str(record.path)


def _last(words: tuple[str, ...], *spellings: str) -> str | None:
    """The value of an option as the daemon writes it: a word of its own; the last one counts."""
    found = None
    for word, value in pairwise(words):
        if word in spellings:
            found = value
    return found


def sort_units(
    statuses: Iterable[UnitStatus],
    rebuilt: Mapping[str, Rebuilt] = MappingProxyType({}),
    known: Collection[str] = frozenset(),
) -> Findings:
    """Decide what becomes of each unit; the order of the statuses does not matter.

    Of several units of a model the live ones come first; then those that are remembered as what was loaded here; then
    those with a record of their own; then the latest start.

    Args:
        statuses: of all units.
        rebuilt: what was made out of those that cannot be adopted by their own record, by unit.
        known: launches that are remembered: they are pinned, or wanted.
    """
    adopt: dict[str, Found] = {}
    forget: list[Found] = []
    strangers: list[Unadopted] = []
    runs: dict[str, str] = {}
    understood: list[Found] = []
    for status in statuses:
        why = lacking(status)
        made = rebuilt.get(status.name, Rebuilt(None)) if why else None
        record = made.record if made is not None else read_record(status.environment)
        if record is None:
            told = f", and {made.why_not}" if made is not None and made.why_not else ""
            strangers.append(Unadopted(status, why + told))
        else:
            # A reconstructed run is taken from the unit's name, which anybody may give to a unit of another model.
            is_remembered = record.run in known and status.name == unit_name(record.name, record.run)
            understood.append(Found(status, record, why, is_known=not why or is_remembered))
    for found in sorted(understood, key=lambda each: _rank(each, known)):
        record, status = found.record, found.status
        if record.name in adopt:
            if is_dead(status):
                forget.append(found)
            else:
                strangers.append(behind(status, record.name, adopt[record.name].status.name))
        elif record.run in runs:
            strangers.append(same_launch(status, record.run, runs[record.run]))
        else:
            adopt[record.name] = found
            runs[record.run] = status.name
    return Findings(tuple(adopt.values()), tuple(forget), tuple(strangers))


def _rank(found: Found, known: Collection[str]) -> tuple[bool, bool, bool, float, str]:
    """The first of a name is the one that is kept."""
    status = found.status
    return (
        is_dead(status),
        not (found.is_known and found.record.run in known),
        bool(found.reconstructed),
        -status.exec_main_start_monotonic_s,
        status.name,
    )
