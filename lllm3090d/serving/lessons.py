"""What is learnt of an engine that was measured, or that ran out of memory; the slow half of :mod:`learning`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from lllm3090d.errors import LlmError
from lllm3090d.planning.calibration import deviation_limit_bytes
from lllm3090d.serving.admission import foreign_bytes
from lllm3090d.serving.events import Learn, LearnOutOfMemory
from lllm3090d.serving.learning import Learning
from lllm3090d.serving.observation import Observation
from lllm3090d.serving.scheduler import Scheduler
from lllm3090d.serving.statistics import Statistics

log = logging.getLogger(__name__)


class Lessons:
    """Learns.

    Args:
        learning: remembers.
        statistics: counts.
        scheduler: read, never changed.
        observe: reads the cards.
    """

    def __init__(
        self,
        learning: Learning,
        statistics: Statistics,
        scheduler: Scheduler,
        observe: Callable[[], Observation],
    ) -> None:
        self._learning = learning
        self._statistics = statistics
        self._scheduler = scheduler
        self._observe = observe

    def measured(self, effect: Learn) -> Coroutine[Any, Any, None]:
        """Count a measurement at once; what is returned remembers it."""
        self._statistics.measured(effect.name, effect.quoted_bytes, effect.measurement.peak_bytes)
        return asyncio.to_thread(self._learning.learn, effect.measurement, effect.quoted_bytes)

    async def out_of_memory(self, effect: LearnOutOfMemory) -> None:
        """Nothing is learnt of an engine from whom a stranger took the memory."""
        try:
            state = self._observe().of(effect.key.scope.card)
        except LlmError:
            return  # nobody can tell who has the memory
        if state is None or state.reading is None:
            return
        grown = foreign_bytes(state, self._scheduler.ledger) - effect.foreign_bytes
        if grown > deviation_limit_bytes(effect.foreign_bytes):
            log.info(
                "an engine ran out of memory that others have taken",
                extra={"model": effect.name, "grown_bytes": grown},
            )
            return
        await asyncio.to_thread(self._learning.learn_out_of_memory, effect.key, effect.quoted_bytes)
