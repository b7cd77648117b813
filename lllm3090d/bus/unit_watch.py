"""From systemd's signals to events: what is known of each watched unit, and what changed. No bus here.

A unit that ends well is unloaded at once, so its end is told by its last signal only: the last status is
kept until the unit is gone.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from lllm3090d.bus.unit_status import SERVICE_KEYS, UNIT_KEYS, UnitStatus

# Never in a signal, or the same all along: kept when states become doubtful.
_CONSTANT = frozenset({"Description", "Transient", "LoadState", "Environment", "ExecStart", "ControlGroup"})


@dataclass(frozen=True, slots=True)
class UnitChanged:
    """A watched unit is in another state.

    ``argv``, ``environment``, ``description`` and ``control_group`` are not part of systemd's signals: they
    are those given at the start or last read by ``status()`` or ``list()``, else empty. There is no
    ``memory_current_bytes``.
    """

    status: UnitStatus


@dataclass(frozen=True, slots=True)
class UnitGone:
    """A watched unit was unloaded; ``last`` is what was known of it last, None if nothing was."""

    name: str
    last: UnitStatus | None


@dataclass(frozen=True, slots=True)
class Relist:
    """Signals may have been missed, or units read anew (daemon-reload): list them and compare."""


@dataclass(frozen=True, slots=True)
class BusLost:
    """systemd cannot be reached; nothing is heard until :class:`BusBack`."""


@dataclass(frozen=True, slots=True)
class BusBack:
    """systemd can be reached again; :class:`Relist` follows."""


Event = UnitChanged | UnitGone | Relist | BusLost | BusBack


@dataclass(slots=True)
class _Seen:
    unit: dict[str, Any] = field(default_factory=dict)
    service: dict[str, Any] = field(default_factory=dict)
    told: UnitStatus | None = None

    def status(self, name: str) -> UnitStatus | None:
        """What is known, None without a state."""
        if "ActiveState" not in self.unit:
            return None
        return UnitStatus.from_properties(name, self.unit, self.service)


class UnitWatch:
    """What is known of the units whose names match a shell pattern.

    Args:
        pattern: of unit names.
        tell: called with each event.
    """

    def __init__(self, pattern: str, tell: Callable[[Event], None]) -> None:
        self._pattern = pattern
        self._tell = tell
        self._seen: dict[str, _Seen] = {}
        self._reloading = False

    def watches(self, name: str) -> bool:
        """Whether the name matches the pattern."""
        return fnmatch.fnmatchcase(name, self._pattern)

    @property
    def known(self) -> frozenset[str]:
        """Names of the units of which something is known."""
        return frozenset(self._seen)

    def expect(self, name: str, properties: Mapping[str, Any]) -> bool:
        """Remember what signals will not say of a unit about to be started; False if it is known already."""
        if name in self._seen or not self.watches(name):
            return False
        unit = {"LoadState": "loaded", "Transient": True} | _kept(properties, UNIT_KEYS)
        self._seen[name] = _Seen(unit=unit, service=_kept(properties, SERVICE_KEYS))
        return True

    def forget(self, names: Collection[str]) -> None:
        """Drop what is known of units that are not there."""
        for name in names:
            self._seen.pop(name, None)

    def doubt(self) -> None:
        """Signals were missed: keep what cannot have changed, drop the states and a reload without end."""
        self._reloading = False
        for seen in self._seen.values():
            seen.unit = _kept(seen.unit, _CONSTANT)
            seen.service = _kept(seen.service, _CONSTANT)
            seen.told = None

    def was_read(self, name: str, unit: Mapping[str, Any], service: Mapping[str, Any]) -> None:
        """Take in an answer of systemd. States of later signals, which may have overtaken it, stay."""
        if not self.watches(name):
            return
        seen = self._seen.setdefault(name, _Seen())
        service = {key: value for key, value in service.items() if key != "MemoryCurrent"}
        seen.unit = _kept(unit, UNIT_KEYS) | seen.unit | _kept(unit, UNIT_KEYS & _CONSTANT)
        seen.service = _kept(service, SERVICE_KEYS) | seen.service | _kept(service, SERVICE_KEYS & _CONSTANT)

    def service_changed(self, name: str, properties: Mapping[str, Any]) -> None:
        """PropertiesChanged of the interface Service; that of Unit always follows, and tells."""
        if self.watches(name):
            self._seen.setdefault(name, _Seen()).service.update(_kept(properties, SERVICE_KEYS))

    def unit_changed(self, name: str, properties: Mapping[str, Any]) -> None:
        """PropertiesChanged of the interface Unit."""
        if not self.watches(name):
            return
        seen = self._seen.setdefault(name, _Seen())
        seen.unit.update(_kept(properties, UNIT_KEYS))
        status = seen.status(name)
        if status is not None and status != seen.told:
            seen.told = status
            self._tell(UnitChanged(status))

    def unit_removed(self, name: str) -> None:
        """UnitRemoved, which says nothing while systemd reads its units anew."""
        if self._reloading or not self.watches(name):
            return
        seen = self._seen.pop(name, None)
        self._tell(UnitGone(name, seen.status(name) if seen is not None else None))

    def reloading(self, active: bool) -> None:
        """Reloading: daemon-reload or daemon-reexec began or ended."""
        self._reloading = active
        if not active:
            self._tell(Relist())


def _kept(properties: Mapping[str, Any], keys: frozenset[str]) -> dict[str, Any]:
    return {key: value for key, value in properties.items() if key in keys}
