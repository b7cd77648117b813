"""A request that waits too long for room is let pass.

A busy model is never unloaded for another one. Where its requests never end, whoever waits for its room would wait for
ever. So after a while new requests of other models stand back until the waiting load is decided: what is in work goes
on to its end, and what waited before that in a model's line is served first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class Claim:
    """A load's claim on the room of others, once it has waited long enough; see :meth:`StandBack.waiting`."""

    def __init__(self, book: StandBack, name: str, token: str, after_s: float) -> None:
        self._book = book
        self._name = name
        self._token = token
        self._after_s = after_s
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """It waits for room from now on; nothing where it does already."""
        if self._after_s > 0 and self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._after_s, self._book.starves, self._token, self._name)

    def end(self) -> None:
        """It waits for something else, which room would not bring about."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._book.has_ended(self._token)


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
    def waiting(self, name: str, token: str, after_s: float) -> Iterator[Claim]:
        """A load waits for as long as this lasts.

        Args:
            name: of its model.
            token: of the load.
            after_s: after which others stand back; 0 for never.
        """
        claim = Claim(self, name, token, after_s)
        claim.begin()
        try:
            yield claim
        finally:
            claim.end()

    def starves(self, token: str, name: str) -> None:
        """A load has waited for too long."""
        self._starving[token] = name

    def has_ended(self, token: str) -> None:
        """It no longer waits."""
        if self._starving.pop(token, None) is not None:
            self._changed.set()
            self._changed = asyncio.Event()

    async def enter(self, name: str) -> None:
        """Wait while a load of another model has waited for too long."""
        while self._starving and name not in self._starving.values():
            await self._changed.wait()
