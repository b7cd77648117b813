"""A reader that never takes longer than it may: a driver that hangs makes its card unreadable, and nothing else."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.lost_cards import is_missing
from lllm3090d.gpus.readings import Card, CardReader, MemoryReading
from lllm3090d.gpus.xids import CardErrors, TellsErrors

log = logging.getLogger(__name__)
T = TypeVar("T")

# A reading takes a tenth of a millisecond, a first one after a while of rest up to a second (the card wakes up).
READ_LIMIT_S = 2.0
# The driver's library and every card, the first time; a cold driver without its persistence daemon takes some seconds.
OPEN_LIMIT_S = 20.0


class BoundedReader:
    """Reads a card on a thread of its own.

    While a question is open no other one is asked, so a driver that hangs costs one thread and one wait; when it
    answers at last, the next reading is as good as any.

    Args:
        reader: the card.
        limit_s: how long a reading may take.
    """

    def __init__(self, reader: CardReader, limit_s: float = READ_LIMIT_S) -> None:
        self._reader = reader
        self._limit_s = limit_s
        self._executor = ThreadPoolExecutor(1, "card")
        self._open: Future[MemoryReading] | None = None
        self._asked_s = 0.0
        self._errors: deque[CardErrors] = deque()  # put in by the thread, taken out by whoever asks
        self._last_errors = CardErrors()
        self._is_closed = False

    @property
    def card(self) -> Card:
        """The card that is read."""
        return self._reader.card

    @property
    def is_missing(self) -> bool:
        """It stands for a card that has not been there since the start."""
        return is_missing(self._reader)

    def read(self) -> MemoryReading:
        """Read the memory now. Raises LlmError CARD_UNREADABLE, also where the driver does not answer in time."""
        if self._open is not None and not self._open.done():
            raise self._hangs()
        if self._is_closed:
            return self._reader.read()  # which says so
        self._asked_s = time.monotonic()
        self._open = self._executor.submit(self._ask)
        try:
            return self._open.result(self._limit_s)
        except TimeoutError:
            raise self._hangs() from None

    def errors(self) -> CardErrors:
        """What the driver had reported when it was read last, and nobody has asked for yet. Never waits."""
        told = replace(self._last_errors, xids=())
        while self._errors:
            told = told.then(self._errors.popleft())
        self._last_errors = told
        return told

    def _ask(self) -> MemoryReading:
        """On the thread: the reading, and with it, also with one that fails, what else the driver reports."""
        try:
            return self._reader.read()
        finally:
            if isinstance(self._reader, TellsErrors):
                self._errors.append(self._reader.errors())

    def close(self) -> None:
        """Release the driver's library; one that hangs is left as it is."""
        self._is_closed = True
        if self._open is None or self._open.done():
            self._reader.close()
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _hangs(self) -> LlmError:
        waited = time.monotonic() - self._asked_s
        return LlmError(
            ErrorCode.CARD_UNREADABLE,
            f"{self.card.name} could not be read: its driver has not answered for {waited:.0f} s.",
            hint="See what nvidia-smi says, and journalctl -k --grep 'NVRM|Xid'; restart the computer if it stays so.",
            card=self.card.uuid,
        )


def opened_in_time(
    opener: Callable[[], Sequence[CardReader]], limit_s: float = OPEN_LIMIT_S
) -> tuple[CardReader, ...]:
    """The cards that a driver has, each read with a limit.

    Raises:
        LlmError: CARD_UNREADABLE where it does not answer in time.
        Exception: whatever the opener raises.
    """
    executor = ThreadPoolExecutor(1, "open-cards")
    found = executor.submit(opener)
    try:
        return tuple(BoundedReader(reader) for reader in found.result(limit_s))
    except TimeoutError:
        raise LlmError(
            ErrorCode.CARD_UNREADABLE,
            f"The driver of the cards has not answered for {limit_s:g} s.",
            hint='See what nvidia-smi says; restart the computer, or set card = "cpu" to do without the card.',
        ) from None
    finally:
        executor.shutdown(wait=False)
