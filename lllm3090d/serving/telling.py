"""What the world is told beside states: evictions, deviations, pressure, tiers, limits; to the log and the history."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from lllm3090d.gpus.readings import Card
from lllm3090d.planning.units import mib_text
from lllm3090d.serving.actors import DAEMON, ENGINE, PRESSURE
from lllm3090d.serving.card_health import CardNews
from lllm3090d.serving.effects import LoadProgress
from lllm3090d.serving.events import TellDeviation, TellDrain, TellEviction, TellTier
from lllm3090d.serving.fences import fence
from lllm3090d.serving.history import History
from lllm3090d.serving.ledger import Ledger
from lllm3090d.serving.pressure import Over, Unload, Warn
from lllm3090d.serving.running import Instance
from lllm3090d.serving.statistics import Statistics
from lllm3090d.wire import EventKind

log = logging.getLogger(__name__)


class Telling:
    """Tells of what happened.

    Args:
        history: remembers.
        statistics: counts.
    """

    def __init__(self, history: History, statistics: Statistics) -> None:
        self._history = history
        self._statistics = statistics

    def eviction(self, told: TellEviction) -> None:
        """A model goes for another one, or for somebody else."""
        self._statistics.evicted(told.name, told.cause)
        self._history.add(
            EventKind.EVICTION,
            model=told.name,
            run=told.run,
            message=told.reason,
            details={"cause": told.cause},
        )

    def drain(self, told: TellDrain) -> None:
        """A model that goes has requests in flight, or they have ended, or their time is over."""
        log.info("%s %s", told.name, told.text, extra={"model": told.name, "run": told.run})
        details = {"in_flight": told.in_flight, "limit_s": told.limit_s}
        self._history.add(EventKind.DRAIN, model=told.name, run=told.run, message=told.text, details=details)

    def deviation(self, told: TellDeviation) -> None:
        """A model takes much more or less than it was priced at."""
        log.warning(told.text, extra={"model": told.name, "run": told.run})
        details = {
            "where": told.where,
            "expected_bytes": told.expected_bytes,
            "measured_bytes": told.measured_bytes,
        }
        self._history.add(
            EventKind.DEVIATION, model=told.name, run=told.run, message=told.text, details=details
        )

    def pressure(self, told: Warn | Over | Unload) -> None:
        """Strangers take memory that was counted on, or have given it back."""
        level = logging.INFO if isinstance(told, Over) else logging.WARNING
        log.log(level, "%s", told.text)
        details = {"card": told.card}
        self._history.add(EventKind.PRESSURE, message=told.text, details=details, actor=PRESSURE)

    def card(self, told: CardNews) -> None:
        """A card has reported an error, cannot be read, or is well again."""
        log.log(logging.ERROR if told.is_bad else logging.INFO, "%s", told.text)
        self._history.add(EventKind.CARD, message=told.text, details=dict(told.details), actor=DAEMON)

    def tier(self, told: TellTier) -> None:
        """Whether a cache is divided as planned."""
        level = logging.INFO if told.in_force else logging.ERROR
        log.log(level, "%s: %s", told.name, told.reason, extra={"model": told.name, "run": told.run})
        self._history.add(
            EventKind.TIER,
            model=told.name,
            run=told.run,
            message=told.reason,
            details={"in_force": told.in_force},
        )

    def progress(self, load: LoadProgress) -> None:
        """How far a load is."""
        self._history.add(
            EventKind.PROGRESS,
            model=load.instance.name,
            run=load.instance.run,
            actor=ENGINE,
            details={"resident_bytes": load.resident_bytes, "expected_bytes": load.expected_bytes},
        )

    def fenced(self, instance: Instance, ledger: Ledger, cards: Sequence[Card]) -> None:
        """Let the kernel limit what a unit takes of its cards, where it can, and tell where it does."""
        if not instance.control_group:
            return
        fences = fence(instance.control_group, ledger.of(instance.run), cards)
        if not fences:
            log.debug("no limit on device memory", extra={"model": instance.name, "run": instance.run})
            return
        shown = ", ".join(f"{mib_text(each.limit_bytes)} MiB of {each.card}" for each in fences)
        self._history.add(
            EventKind.LIMIT,
            model=instance.name,
            run=instance.run,
            message=f"the kernel limits it to {shown}",
            details={"limit_bytes": {each.card: each.limit_bytes for each in fences}},
        )
