"""Keeping what a person holds: told to the history, and written beside the writer; the slow half of :mod:`holds`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Coroutine
from typing import Any

from lllm3090d.errors import LlmError
from lllm3090d.serving.chronicle import Chronicle
from lllm3090d.serving.events import KeepPin, KeepReleased
from lllm3090d.serving.holds import Holds

log = logging.getLogger(__name__)


class Holding:
    """Reads and writes holds; a state file that fails keeps nobody from anything.

    Args:
        holds: what is held, and where that is written.
        chronicle: tells of it.
    """

    def __init__(self, holds: Holds, chronicle: Chronicle) -> None:
        self._holds = holds
        self._chronicle = chronicle

    async def remembered(self) -> tuple[bool, frozenset[str]]:
        """Whether the cards are released, and runs that are pinned. Without the state file: nothing."""
        return await asyncio.to_thread(self._read)

    def _read(self) -> tuple[bool, frozenset[str]]:
        try:
            return self._holds.released(), self._holds.pinned_runs()
        except LlmError as error:
            log.error("what was released or pinned is not known", extra={"reason": error.message})
            return False, frozenset()

    def keep(self, effect: KeepPin | KeepReleased) -> Coroutine[Any, Any, None]:
        """Tell of a hold at once; what is returned writes it."""
        self._chronicle.hold(effect)
        return self._keep(effect)

    async def _keep(self, effect: KeepPin | KeepReleased) -> None:
        try:
            if isinstance(effect, KeepPin):
                await asyncio.to_thread(self._holds.set_pinned, effect.run, effect.pinned)
            else:
                await asyncio.to_thread(self._holds.set_released, effect.released)
        except LlmError as error:
            log.error("it is forgotten with the daemon's end", extra={"reason": error.message})

    async def keep_only(self, runs: Collection[str]) -> None:
        """Pins of what has ended while nobody looked are no longer remembered."""
        try:
            await asyncio.to_thread(self._holds.forget_all_but, runs)
        except LlmError as error:
            log.warning("old pins stay remembered", extra={"reason": error.message})

    async def keep_released(self) -> LlmError | None:
        """Remember first that the card is given away; why that does not outlive the daemon, None where it does."""
        try:
            await asyncio.to_thread(self._holds.set_released, True)
        except LlmError as error:
            return error
        return None
