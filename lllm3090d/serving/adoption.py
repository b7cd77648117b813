"""Finding our units again after the daemon was killed or restarted: sorted by what is to be done. Pure.

What a unit is adopted by is its record. Where that is missing or cannot be used, what was reconstructed from the unit's
own command takes its place (:mod:`lllm3090d.serving.reconstruction`); where that is not to be had either, the unit is
foreign (:mod:`lllm3090d.serving.foreign_units`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from lllm3090d.bus.unit_status import UnitStatus
from lllm3090d.serving.unit_spec import RECORD_SCHEMA, RECORD_VARIABLE, Record, read_record, unit_name

NO_RECORD = "it carries no record"
DAMAGED_RECORD = "its record is damaged"
ANOTHERS_RECORD = "its record is that of another unit"


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
    """

    status: UnitStatus
    record: Record
    reconstructed: str = ""


@dataclass(frozen=True, slots=True)
class Unadopted:
    """A unit that is left alone, and why, as the end of a sentence about it."""

    status: UnitStatus
    why: str


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
        return "" if status.name == unit_name(record.name, record.run) else ANOTHERS_RECORD
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


def sort_units(
    statuses: Iterable[UnitStatus], rebuilt: Mapping[str, Rebuilt] = MappingProxyType({})
) -> Findings:
    """Decide what becomes of each unit; the order of the statuses does not matter.

    Args:
        statuses: of all units.
        rebuilt: what was made out of those that cannot be adopted by their own record, by unit.
    """
    adopt: dict[str, Found] = {}
    forget: list[Found] = []
    strangers: list[Unadopted] = []
    runs: set[str] = set()
    # Live ones first, then the latest start: the first of a name is the one that is kept.
    ordered = sorted(statuses, key=lambda s: (is_dead(s), -s.exec_main_start_monotonic_s, s.name))
    for status in ordered:
        why = lacking(status)
        made = rebuilt.get(status.name, Rebuilt(None)) if why else None
        record = made.record if made is not None else read_record(status.environment)
        if record is None:
            told = f", and {made.why_not}" if made is not None and made.why_not else ""
            strangers.append(Unadopted(status, why + told))
        elif record.name in adopt:
            found = Found(status, record, why)
            if is_dead(status):
                forget.append(found)
            else:
                other = adopt[record.name].status.name
                strangers.append(Unadopted(status, f"{record.name} runs in {other} too"))
        elif record.run in runs:
            strangers.append(Unadopted(status, f"another unit is the launch {record.run} too"))
        else:
            adopt[record.name] = Found(status, record, why)
            runs.add(record.run)
    return Findings(tuple(adopt.values()), tuple(forget), tuple(strangers))
