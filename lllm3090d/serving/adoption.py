"""Finding our units again after the daemon was killed or restarted: sorted by what is to be done. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lllm3090d.bus.unit_status import UnitStatus
from lllm3090d.serving.unit_spec import Record, read_record, unit_name


@dataclass(frozen=True, slots=True)
class Found:
    """A unit of ours and what it says of itself."""

    status: UnitStatus
    record: Record


@dataclass(frozen=True, slots=True)
class Findings:
    """The units with our prefix, sorted.

    Attributes:
        adopt: one unit of each model, the live one where there is one.
        forget: dead units of a model that has a better one; their failure is only reported.
        strangers: units without a record we understand or with another unit's, and second live units of one model:
            left alone.
    """

    adopt: tuple[Found, ...]
    forget: tuple[Found, ...]
    strangers: tuple[UnitStatus, ...]


def sort_units(statuses: Iterable[UnitStatus]) -> Findings:
    """Decide what becomes of each unit; the order of the statuses does not matter."""
    adopt: dict[str, Found] = {}
    forget: list[Found] = []
    strangers: list[UnitStatus] = []
    # Live ones first, then the latest start: the first of a name is the one that is kept.
    ordered = sorted(
        statuses, key=lambda s: (s.is_failed or s.is_gone, -s.exec_main_start_monotonic_s, s.name)
    )
    for status in ordered:
        record = read_record(status.environment)
        # A record belongs to the one unit it was written for: what is done to its run is done to that unit.
        if record is None or status.name != unit_name(record.name, record.run):
            strangers.append(status)
        elif record.name not in adopt:
            adopt[record.name] = Found(status, record)
        elif status.is_failed or status.is_gone:
            forget.append(Found(status, record))
        else:
            strangers.append(status)
    return Findings(tuple(adopt.values()), tuple(forget), tuple(strangers))
