"""Units with our prefix that nobody here understands: shown, counted at what they hold, and left alone.

Somebody may start such a unit at any time, a later release may have made it, or its model may be gone. It is never
stopped from here. What it holds of a memory is measured with every reading, by its control group like what models
hold, and is charged as it is; so it is no part of what other programs hold, and nothing is counted twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from lllm3090d.bus.unit_status import UnitStatus
from lllm3090d.serving.adoption import Unadopted, is_dead
from lllm3090d.serving.observation import HOST, Observation, RunProcesses
from lllm3090d.wire_cards import ForeignUnitView, HeldView

SOCKET_SUFFIX = ".sock"
HOST_VARIABLE = "LLAMA_ARG_HOST"


@dataclass(frozen=True, slots=True)
class ForeignUnit:
    """A unit that is left alone.

    Attributes:
        name: of the unit.
        why: why it is no instance, as the end of a sentence about it.
        since: when it was found.
        status: what systemd said of it last.
        behind: the unit that stands in its way; empty where none does.
    """

    name: str
    why: str
    since: str
    status: UnitStatus
    behind: str = ""

    @property
    def processes(self) -> RunProcesses:
        """Everything in its control group."""
        return RunProcesses(self.status.main_pid or None, self.status.control_group or None)

    @property
    def sockets(self) -> frozenset[Path]:
        """Sockets that it may listen on: nobody else removes them."""
        words = (*self.status.argv, self.status.variables.get(HOST_VARIABLE, ""))
        # ``--host=/run/x.sock`` of another program is one word.
        return frozenset(Path(word.rpartition("=")[2]) for word in words if word.endswith(SOCKET_SUFFIX))


class ForeignUnits:
    """Those that are there now.

    Args:
        is_ours: whether a unit, by name, is that of an instance; such a one is never shown here, so that what becomes
            an instance is foreign until that very moment and not a moment longer.
    """

    def __init__(self, is_ours: Callable[[str], bool]) -> None:
        self._is_ours = is_ours
        self._units: dict[str, ForeignUnit] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._units

    @property
    def all(self) -> tuple[ForeignUnit, ...]:
        """In order of their names."""
        # What has become an instance ends as one.
        self._units = {name: each for name, each in self._units.items() if not self._is_ours(name)}
        return tuple(self._units[name] for name in sorted(self._units))

    @property
    def names(self) -> tuple[str, ...]:
        """Sorted."""
        return tuple(each.name for each in self.all)

    @property
    def processes(self) -> Mapping[str, RunProcesses]:
        """By unit name, which takes the place of a run."""
        return {each.name: each.processes for each in self.all}

    def found(self, unit: Unadopted, now: str) -> bool:
        """A unit is left alone; whether that is news. One that is dead holds nothing and is not shown."""
        name = unit.status.name
        if is_dead(unit.status):
            self._units.pop(name, None)
            return False
        known = self._units.get(name)
        self._units[name] = ForeignUnit(
            name, unit.why, known.since if known else now, unit.status, unit.behind
        )
        return known is None or known.why != unit.why

    def freed(self, is_there: Callable[[str], bool]) -> tuple[str, ...]:
        """Names of those that nothing stands in the way of any more; each is given once."""
        found = [each for each in self._units.values() if each.behind and not is_there(each.behind)]
        for each in found:
            self._units[each.name] = replace(each, behind="")
        return tuple(each.name for each in found)

    def seen(self, status: UnitStatus) -> bool:
        """What systemd says of a unit now; whether it was shown and has ended."""
        known = self._units.get(status.name)
        if known is None:
            return False
        if is_dead(status):
            return self.gone(status.name)
        self._units[status.name] = replace(known, status=_merged(known.status, status))
        return False

    def gone(self, name: str) -> bool:
        """systemd has unloaded it; whether it was shown."""
        return self._units.pop(name, None) is not None and not self._is_ours(name)

    def keep_only(self, listed: frozenset[str]) -> tuple[str, ...]:
        """Units that are not listed any more have ended; names of those that were shown."""
        return tuple(name for name in sorted(self._units.keys() - listed) if self.gone(name))

    def views(self, observation: Observation | None) -> tuple[ForeignUnitView, ...]:
        """As clients see them, with what each holds now; None where nothing could be read."""
        return tuple(_view(each, observation) for each in self.all)


def _merged(known: UnitStatus, now: UnitStatus) -> UnitStatus:
    """What signals leave out stays as it was read."""
    return replace(
        now,
        argv=now.argv or known.argv,
        environment=now.environment or known.environment,
        control_group=now.control_group or known.control_group,
        main_pid=now.main_pid or known.main_pid,
    )


def _view(unit: ForeignUnit, observation: Observation | None) -> ForeignUnitView:
    held = [
        HeldView(where=state.card.uuid, name=state.card.name, bytes=state.in_use.get(unit.name, 0))
        for state in (observation.cards if observation else ())
        if state.reading is not None and state.attributed
    ]
    if observation is not None and observation.host is not None:
        held.append(
            HeldView(where=HOST, name="host memory", bytes=observation.host_in_use.get(unit.name, 0))
        )
    return ForeignUnitView(
        unit=unit.name,
        why=unit.why,
        since=unit.since,
        active_state=unit.status.active_state,
        main_pid=unit.status.main_pid or None,
        command=unit.status.argv[0] if unit.status.argv else None,
        held=tuple(held),
    )
