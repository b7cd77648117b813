"""Comparing what systemd runs with what the daemon knows: at start, after a reload of systemd, after a lost bus."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

from lllm3090d.bus.systemd import SystemdManager
from lllm3090d.errors import LlmError
from lllm3090d.gpus.readings import CardReader
from lllm3090d.serving.adoption import Found, sort_units
from lllm3090d.serving.events import Event, UnitAdopted, UnitSeen, UnitVanished
from lllm3090d.serving.history import History
from lllm3090d.serving.instance import InstanceState
from lllm3090d.serving.measure import observe
from lllm3090d.serving.observation import RunProcesses
from lllm3090d.serving.peaks import Peaks
from lllm3090d.serving.readiness import Health, health
from lllm3090d.serving.scheduler import Scheduler
from lllm3090d.wire import EventKind

log = logging.getLogger(__name__)

# An engine that does not answer by then counts as loading; nobody waits for it with the daemon's start.
ADOPTION_HEALTH_TIMEOUT_S = 0.5
# Their units may not exist yet; the start job reports on them.
UNIT_NOT_YET = frozenset({InstanceState.PLANNED, InstanceState.RESERVED, InstanceState.STARTING})


class Reconciler:
    """Turns a list of units into events.

    Args:
        manager: the user's systemd.
        scheduler: read, never changed.
        readers: the cards.
        history: told when units were compared.
        submit: hands an event to the writer.
    """

    def __init__(
        self,
        *,
        manager: SystemdManager,
        scheduler: Scheduler,
        readers: Sequence[CardReader],
        history: History,
        submit: Callable[[Event], None],
    ) -> None:
        self._manager = manager
        self._scheduler = scheduler
        self._readers = readers
        self._history = history
        self._submit = submit

    async def adopt(self, apply: Callable[[Event], None], pinned: frozenset[str] = frozenset()) -> None:
        """Take over the units that were found at start; apply carries out each event at once.

        Args:
            apply: carries out an event.
            pinned: runs that are never evicted.

        Raises:
            LlmError: BUS_UNAVAILABLE.
        """
        findings = sort_units(await self._manager.list())
        healths = await asyncio.gather(*(self._is_healthy(found) for found in findings.adopt))
        measured = self._measured(findings.adopt)
        for found, healthy in zip(findings.adopt, healths, strict=True):
            run = found.record.run
            shares = found.record.shares(self._readers[0].card.uuid)
            apply(UnitAdopted(found.status, found.record, healthy, shares, measured[run], run in pinned))
        for found in findings.forget:
            log.warning(
                "a dead unit of a model that runs again is forgotten", extra={"unit": found.status.name}
            )
            await self._manager.reset_failed(found.status.name)
        for status in findings.strangers:
            log.warning(
                "a unit with our prefix is not understood and left alone", extra={"unit": status.name}
            )
        self._sweep_sockets()
        if findings.adopt:
            units = "1 unit" if len(findings.adopt) == 1 else f"{len(findings.adopt)} units"
            self._history.add(EventKind.RECONCILED, message=f"adopted {units}")

    async def compare(self) -> None:
        """Submit what differs now; what is not listed has vanished."""
        # Taken before the list: what starts meanwhile is not missed because it is not on it.
        expected = [i.unit for i in self._scheduler.instances if i.state not in UNIT_NOT_YET]
        try:
            statuses = await self._manager.list()
        except LlmError as error:
            log.warning("units cannot be listed", extra={"reason": error.message})
            return
        listed = {status.name for status in statuses}
        for unit in expected:
            if unit not in listed:
                self._submit(UnitVanished(unit, None))
        for status in statuses:
            self._submit(UnitSeen(status))
        self._history.add(EventKind.RECONCILED, message=f"{len(statuses)} units")

    async def _is_healthy(self, found: Found) -> bool:
        if not found.status.is_active:
            return False
        answer = await health(
            found.record.socket, found.status.control_group, timeout_s=ADOPTION_HEALTH_TIMEOUT_S
        )
        return answer is Health.READY

    def _measured(self, units: tuple[Found, ...]) -> Mapping[str, Mapping[str, int]]:
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
        for path in directory.glob("*.sock"):
            if path not in kept:
                path.unlink(missing_ok=True)
