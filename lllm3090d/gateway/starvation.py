"""A request that waits too long for room is let pass.

A busy model is never unloaded for another one. Where its requests never end, whoever waits for its room would wait for
ever. So after a while new requests of other models stand back until the waiting load is decided: what is in work goes
on to its end, and what waited before that in a model's line is served first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class StandBack:
    """Who waits for room for too long, and who stands back for that."""

    def __init__(self) -> None:
        self._starving: dict[str, str] = {}  # token of a load -> its model
        self._changed = asyncio.Event()

    @property
    def starving(self) -> frozenset[str]:
        """Models whose turn has been awaited for too long."""
        return frozenset(self._starving.values())

    @contextmanager
    def waiting(self, name: str, token: str, after_s: float) -> Iterator[None]:
        """A load waits for as long as this lasts.

        Args:
            name: of its model.
            token: of the load.
            after_s: after which others stand back; 0 for never.
        """
        timer = None
        if after_s > 0:
            timer = asyncio.get_running_loop().call_later(after_s, self._starving.__setitem__, token, name)
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()
            if self._starving.pop(token, None) is not None:
                self._changed.set()
                self._changed = asyncio.Event()

    async def enter(self, name: str) -> None:
        """Wait while a load of another model has waited for too long."""
        while self._starving and name not in self._starving.values():
            await self._changed.wait()
