"""Comparing what systemd runs with what the daemon knows.

At start, after a reload of systemd, after a lost bus, and whenever a unit with our prefix turns up that nobody here has
started.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from lllm3090d.bus.systemd import SystemdManager
from lllm3090d.bus.unit_status import UnitStatus
from lllm3090d.errors import LlmError
from lllm3090d.gpus.readings import CardReader
from lllm3090d.serving.adoption import Found, Unadopted, behind, is_dead, same_launch, sort_units
from lllm3090d.serving.adoption_check import check
from lllm3090d.serving.drains import Drain, doors, remove, taken_up
from lllm3090d.serving.events import Event, UnitAdopted, UnitSeen, UnitVanished
from lllm3090d.serving.foreign_units import ForeignUnits
from lllm3090d.serving.history import History, now_text
from lllm3090d.serving.instance import ENDED, InstanceState
from lllm3090d.serving.measure import observe
from lllm3090d.serving.model_files import file_notes
from lllm3090d.serving.observation import RunProcesses
from lllm3090d.serving.peaks import Peaks
from lllm3090d.serving.plausible import NOT_UNDERSTOOD, why
from lllm3090d.serving.readiness import Health, health
from lllm3090d.serving.scheduler import Scheduler
from lllm3090d.serving.unit_reader import UnitReader
from lllm3090d.wire import EventKind

log = logging.getLogger(__name__)

# An engine that does not answer by then counts as loading; nobody waits for it with the daemon's start.
ADOPTION_HEALTH_TIMEOUT_S = 0.5
# Their units may not exist yet; the start job reports on them.
UNIT_NOT_YET = frozenset({InstanceState.PLANNED, InstanceState.RESERVED, InstanceState.STARTING})
NEW = "it has just been found"
MOST_ENDED = 1000
# Between two attempts to list the units, which nobody would ask for again.
LIST_FIRST_S, LIST_LAST_S = 0.2, 5.0


class Reconciler:
    """Turns units into events, and keeps those that nobody understands.

    Args:
        manager: the user's systemd.
        scheduler: read, never changed.
        readers: the cards.
        history: told when units were compared.
        submit: hands an event to the writer.
        units: makes records out of the commands of units that lack one.
        foreign: what is not understood.
    """

    def __init__(
        self,
        *,
        manager: SystemdManager,
        scheduler: Scheduler,
        readers: Sequence[CardReader],
        history: History,
        submit: Callable[[Event], None],
        units: UnitReader,
        foreign: ForeignUnits,
    ) -> None:
        self._manager = manager
        self._scheduler = scheduler
        self._readers = readers
        self._history = history
        self._submit = submit
        self._units = units
        self._foreign = foreign
        self._looking: set[str] = set()
        # Units whose end was told since they were listed last: what was read of them before is old.
        self._ended: set[str] = set()

    async def adopt(
        self,
        apply: Callable[[Event], None],
        pinned: frozenset[str] = frozenset(),
        wanted: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Take over the units that were found at start; apply carries out each event at once.

        Args:
            apply: carries out an event.
            pinned: runs that are never evicted.
            wanted: models that are remembered as wanted, each with its last launch.

        Raises:
            LlmError: BUS_UNAVAILABLE.
        """
        self._ended.clear()
        statuses = await self._manager.list()
        known = pinned | {run for run in wanted.values() if run}
        findings = sort_units(statuses, await self._units.rebuild(statuses), known)
        adopt = [
            replace(each, is_known=each.is_known or each.record.name in wanted) for each in findings.adopt
        ]
        events, odd = await self._adoptions(adopt, pinned)
        for event in events:
            apply(event)
        for found in findings.forget:
            log.warning(
                "a dead unit of a model that runs again is forgotten", extra={"unit": found.status.name}
            )
            await self._manager.reset_failed(found.status.name)
        left = (*findings.strangers, *odd)
        self._leave_alone(each for each in left if each.status.name not in self._ended)
        self._sweep_sockets()
        if events:
            units = "1 unit" if len(events) == 1 else f"{len(events)} units"
            self._history.add(EventKind.RECONCILED, message=f"adopted {units}")

    async def compare(self) -> None:
        """Submit what differs now; what is not listed has vanished. Tried again until systemd gives the list."""
        pause_s = LIST_FIRST_S
        while not await self._compared():
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, LIST_LAST_S)

    async def _compared(self) -> bool:
        # Taken before the list: what starts meanwhile is not missed because it is not on it.
        expected = [i.unit for i in self._scheduler.instances if i.state not in UNIT_NOT_YET]
        self._ended.clear()
        try:
            statuses = await self._manager.list()
        except LlmError as error:
            log.warning("units cannot be listed", extra={"reason": error.message})
            return False
        listed = frozenset(status.name for status in statuses)
        for unit in expected:
            if unit not in listed:
                self._submit(UnitVanished(unit, None))
        for unit in self._foreign.keep_only(listed):
            self._tell_end(unit)
        for status in statuses:
            if self._foreign.seen(status):
                self._tell_end(status.name)
            self._submit(UnitSeen(status))
        self._history.add(EventKind.RECONCILED, message=f"{len(statuses)} units")
        try:
            await self._take_in(statuses)
        except LlmError as error:
            log.warning("new units cannot be looked at", extra={"reason": error.message})
            return False
        return True

    def is_news(self, status: UnitStatus) -> bool:
        """Whether a unit that systemd tells of is to be looked at: one that runs, and that nobody here knows."""
        if self._foreign.seen(status):
            self._tell_end(status.name)
        (self._ended.add if is_dead(status) else self._ended.discard)(status.name)
        return (
            not is_dead(status)
            and status.name not in self._foreign
            and status.name not in self._looking
            and self._scheduler.by_unit(status.name) is None
        )

    def vanished(self, unit: str) -> None:
        """systemd has unloaded a unit."""
        if len(self._ended) >= MOST_ENDED:
            self._ended.clear()  # of those nobody has an old answer any more
        self._ended.add(unit)
        if self._foreign.gone(unit):
            self._tell_end(unit)

    async def look_at(self, unit: str) -> None:
        """A unit has turned up that nobody here has started."""
        await self.look_at_all((unit,))

    async def look_at_all(self, units: Sequence[str]) -> None:
        """Units that nobody here has started have turned up, or may be understood now."""
        self._looking.update(units)
        try:
            found = [await self._manager.status(unit) for unit in units]
            await self._take_in([status for status in found if status is not None])
        except LlmError as error:
            log.warning("units cannot be looked at", extra={"units": units, "reason": error.message})
        finally:
            self._looking.difference_update(units)

    def freed(self) -> tuple[str, ...]:
        """Foreign units that an instance stood in the way of, which has ended; each is given once."""
        return self._foreign.freed(self._is_there)

    def _is_there(self, unit: str) -> bool:
        instance = self._scheduler.by_unit(unit)
        return instance.state not in ENDED if instance is not None else unit in self._foreign

    # --- what nobody here has started -------------------------------------------------------------------------------

    async def _take_in(self, statuses: Iterable[UnitStatus]) -> None:
        """Adopt those that run and are no instance, or leave them alone. What has ended is nobody's news any more."""
        unknown = self._unknown(statuses)
        for status in unknown:  # counted from now on, whatever comes of it
            if status.name not in self._foreign:
                self._foreign.found(Unadopted(status, NEW), now_text())
        rebuilt = await self._units.rebuild(unknown)
        findings = sort_units(self._unknown(unknown), rebuilt)
        free, taken = [], list(findings.strangers)
        for found in findings.adopt:
            other = self._scheduler.instance(found.record.name)
            twin = self._scheduler.by_run(found.record.run)
            if other is not None and other.state not in ENDED:
                taken.append(behind(found.status, other.name, other.unit))
            elif twin is not None and twin is not other:
                taken.append(same_launch(found.status, twin.run, twin.unit))
            else:
                free.append(found)
        # A signal may have told of an end while all that was read.
        self._leave_alone(each for each in taken if each.status.name in self._foreign)
        events, odd = await self._adoptions([each for each in free if each.status.name in self._foreign])
        self._leave_alone(each for each in odd if each.status.name in self._foreign)
        for event in events:
            self._submit(event)
            # The signal of its end may have come before anybody knew it; after this one, none is missed.
            now = await self._manager.status(event.status.name)
            self._submit(UnitSeen(now) if now is not None else UnitVanished(event.status.name, None))

    def _unknown(self, statuses: Iterable[UnitStatus]) -> list[UnitStatus]:
        return [
            each
            for each in statuses
            if not is_dead(each)
            and each.name not in self._ended
            and self._scheduler.by_unit(each.name) is None
        ]

    async def _adoptions(
        self, units: Sequence[Found], pinned: frozenset[str] = frozenset()
    ) -> tuple[list[UnitAdopted], list[Unadopted]]:
        """The events by which units become instances, and units of which nothing can be made."""
        if not units:
            return [], []
        measured = self._measured(units)
        work = (
            self._adoption(found, found.record.run in pinned, measured[found.record.run]) for found in units
        )
        events: list[UnitAdopted] = []
        odd: list[Unadopted] = []
        for found, made in zip(units, await asyncio.gather(*work), strict=True):
            if isinstance(made, Unadopted):
                odd.append(made)
                continue
            events.append(made)
            if found.reconstructed:
                self._tell(
                    f"{found.status.name} is adopted as {found.record.name}, reconstructed from its command line:"
                    f" {found.reconstructed}",
                    found,
                )
            if made.file_note:
                self._tell(made.file_note, found)
        return events, odd

    async def _adoption(
        self, found: Found, is_pinned: bool, held: Mapping[str, int]
    ) -> UnitAdopted | Unadopted:
        """What becomes of one unit: whatever is wrong with it is its own trouble, and nobody else's."""
        try:
            drain = self._drain_of(found)
            healthy, notes = await asyncio.gather(self._is_healthy(found), file_notes((found,)))
            event = UnitAdopted(
                found.status,
                found.record,
                healthy,
                found.record.shares(self._readers[0].card.uuid),
                held,
                pinned=is_pinned,
                reconstructed=found.reconstructed,
                file_note=notes.get(found.record.run, ""),
                drain=drain,
                is_known=found.is_known,
            )
            check(event)
        except NOT_UNDERSTOOD as error:
            log.warning("a unit cannot be adopted", extra={"unit": found.status.name}, exc_info=error)
            return Unadopted(found.status, f"it cannot be adopted: {why(error)}")
        return event

    def _drain_of(self, found: Found) -> Drain | None:
        """The drain that a daemon before this one has left."""
        try:
            return taken_up(found.record.socket, self._scheduler.clock())
        except OSError as error:
            log.warning(
                "whether a model is drained cannot be seen",
                extra={"unit": found.status.name, "reason": str(error)},
            )
            return None

    def _leave_alone(self, units: Iterable[Unadopted]) -> None:
        for each in units:
            if self._foreign.found(each, now_text()):
                self._tell(f"foreign unit {each.status.name} is left alone: {each.why}")

    def _tell_end(self, unit: str) -> None:
        message = f"foreign unit {unit} has ended"
        log.info(message)
        self._history.add(EventKind.RECONCILED, message=message)

    def _tell(self, message: str, found: Found | None = None) -> None:
        log.warning("%s", message)
        if found is None:
            self._history.add(EventKind.RECONCILED, message=message)
        else:
            self._history.add(
                EventKind.RECONCILED, model=found.record.name, run=found.record.run, message=message
            )

    async def _is_healthy(self, found: Found) -> bool:
        if not found.status.is_active:
            return False
        answer = await health(
            found.record.socket, found.status.control_group, timeout_s=ADOPTION_HEALTH_TIMEOUT_S
        )
        return answer is Health.READY

    def _measured(self, units: Sequence[Found]) -> Mapping[str, Mapping[str, int]]:
        """What each holds now, of each memory, by run."""
        runs = {
            found.record.run: RunProcesses(found.status.main_pid or None, found.status.control_group or None)
            for found in units
        }
        peaks = {run: Peaks(run) for run in runs}
        try:
            observation = observe(self._readers, runs, None)
        except LlmError as error:
            log.warning("what adopted models hold cannot be read", extra={"reason": error.message})
        else:
            for each in peaks.values():
                each.look(observation)
        return {run: each.highest for run, each in peaks.items()}

    def _sweep_sockets(self) -> None:
        """Remove sockets of engines that no longer exist."""
        directory = self._scheduler.policy.engine_sockets_dir
        kept = {instance.record.socket for instance in self._scheduler.instances}
        kept |= {socket for unit in self._foreign.all for socket in unit.sockets}
        kept = {door for socket in kept for door in doors(socket)}
        for pattern in doors(Path("*.sock")):
            for path in directory.glob(str(pattern)):
                if path in kept:
                    continue
                try:
                    remove(path)
                except OSError as error:
                    log.warning("an old socket stays", extra={"path": path, "reason": str(error)})
