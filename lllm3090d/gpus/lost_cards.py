"""Cards that were lost before the daemon started: known from before, read as soon as they are back.

Where a driver does not answer at all, or may be asked twice (sysfs), :class:`LostCards` opens it anew. NVIDIA's library
must not be opened twice: where it works for other cards, the missing one has a reader of the same session, which looks
for it anew by itself, and :class:`MissingReader` says what is the case until then.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Protocol, runtime_checkable

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.readings import Card, CardReader, MemoryReading, NoCardError, WatchesProcesses
from lllm3090d.gpus.xids import CardErrors, TellsErrors

log = logging.getLogger(__name__)

# Between two attempts to open the driver: with a lost card each may take long.
ATTEMPT_PAUSE_S = 5.0
WAY_OUT = 'If it was taken out: set card = "cpu" (or "amd", "intel") and restart lllm3090d.'
# Of a card that is missing while its driver works: in the next boot it counts as taken out.
REBOOT = "If it was taken out: it is forgotten with the next boot of the computer."


@runtime_checkable
class StandsIn(Protocol):
    """A reader that may stand for a card that is not there."""

    @property
    def is_missing(self) -> bool:
        """Its card has not been there since the start."""
        ...


def is_missing(reader: CardReader) -> bool:
    """Whether it stands for a card that has not been there since the start."""
    return isinstance(reader, StandsIn) and reader.is_missing


def is_lost(error: LlmError) -> bool:
    """Whether a card could not be read because it has not been there since the start."""
    return error.details.get("lost") is True


class LostCards:
    """Tries to open the driver until the known cards are there, and hands their readers out.

    Args:
        opener: of all cards of the driver; raises NoCardError, LlmError.
        known: the cards as they were.
        error: why they could not be opened.
        beside: UUIDs of cards of the driver that are managed already.
        way_out: what to do where they were taken out.
        clock: monotonic seconds.
        pause_s: least seconds between two attempts.
    """

    def __init__(
        self,
        opener: Callable[[], Sequence[CardReader]],
        known: Sequence[Card],
        error: Exception,
        *,
        beside: Collection[str] = (),
        way_out: str = WAY_OUT,
        clock: Callable[[], float] = time.monotonic,
        pause_s: float = ATTEMPT_PAUSE_S,
    ) -> None:
        self._opener = opener
        self._known = tuple(known)
        self._error = error
        self._clock = clock
        self._pause_s = pause_s
        self._lock = threading.Lock()  # each reader asks from a thread of its own
        self._next_s = clock() + pause_s
        self._way_out = way_out
        self._familiar = {*beside, *(card.uuid for card in known)}
        self._found: dict[str, CardReader] = {}

    def readers(self) -> tuple[LostReader, ...]:
        """One for each known card, in their order."""
        return tuple(LostReader(self, card) for card in self._known)

    def reader_of(self, card: Card) -> CardReader:
        """The reader of a card that is there again. Raises LlmError CARD_UNREADABLE while it is not."""
        with self._lock:
            if card.uuid not in self._found and self._clock() >= self._next_s:
                self._attempt()
                self._next_s = self._clock() + self._pause_s
            if card.uuid not in self._found:
                raise _still_lost(card, self._error, self._way_out)
            return self._found[card.uuid]

    def _attempt(self) -> None:
        try:
            opened = self._opener()
        except (LlmError, NoCardError) as error:
            self._error = error
            return
        known = {card.uuid for card in self._known}
        for reader in opened:
            uuid = reader.card.uuid
            if uuid in known - self._found.keys():
                self._found[uuid] = reader
                continue
            if uuid not in self._familiar:
                log.warning("%s was not there before: it is taken at the next start", reader.card.name)
                self._familiar.add(uuid)
            reader.close()
        self._error = LlmError(
            ErrorCode.CARD_UNREADABLE,
            "it is not among the cards that its driver lists now",
            hint="Is it seated and powered? Other cards are taken at the next start.",
        )


def _still_lost(card: Card, error: Exception, way_out: str) -> LlmError:
    """What is told of a card that is not there."""
    why, hint = str(error), "See what nvidia-smi says, and journalctl -k --grep 'NVRM|Xid|amdgpu|xe '."
    details: dict[str, object] = {}
    if isinstance(error, LlmError):
        why, hint = error.message, error.hint or hint
        details = dict(error.details)
    return LlmError(
        ErrorCode.CARD_UNREADABLE,
        f"{card.name}, which was managed before, cannot be opened: {why.rstrip('.')}.",
        hint=f"{hint.rstrip('.')}. {way_out}",
        **(details | {"card": card.uuid, "lost": True}),
    )


class MissingReader:
    """A card that its driver has not listed at the start, while it lists others.

    Args:
        reader: looks for the card anew by itself, with each reading as far as it is due.
    """

    def __init__(self, reader: CardReader) -> None:
        self._reader = reader
        self._is_missing = True

    @property
    def card(self) -> Card:
        """The card, as it was until it is there again."""
        return self._reader.card

    @property
    def is_missing(self) -> bool:
        """It has not been there since the start."""
        return self._is_missing

    def read(self) -> MemoryReading:
        """Its memory now. Raises LlmError CARD_UNREADABLE while it is missing."""
        try:
            reading = self._reader.read()
        except LlmError as error:
            if not self._is_missing or "nvml_error" not in error.details:
                raise
            raise _still_lost(self.card, error, REBOOT) from error
        self._is_missing = False
        return reading

    def errors(self) -> CardErrors:
        """What its driver has reported since the last call."""
        return self._reader.errors() if isinstance(self._reader, TellsErrors) else CardErrors()

    def close(self) -> None:
        """Release the driver's library. Raises LlmError CARD_UNREADABLE."""
        self._reader.close()


class LostReader:
    """Reads a card that was not there at the start; made by :class:`LostCards`."""

    def __init__(self, cards: LostCards, card: Card) -> None:
        self._cards = cards
        self._card = card
        self._reader: CardReader | None = None
        self._returns = 0  # to be counted once, beside those that the reader counts
        self._closed = False

    @property
    def card(self) -> Card:
        """The card, as it was until it is there again."""
        return self._card if self._reader is None else self._reader.card

    @property
    def is_missing(self) -> bool:
        """It has not been there since the start."""
        return self._reader is None or is_missing(self._reader)

    def watch(self, pids: Collection[int]) -> None:
        """These processes are looked at in every reading, where its reader is told of them."""
        if self._reader is not None and isinstance(self._reader, WatchesProcesses):
            self._reader.watch(pids)

    def read(self) -> MemoryReading:
        """Its memory now. Raises LlmError CARD_UNREADABLE while it is lost."""
        if self._reader is not None:
            return self._reader.read()
        if self._closed:
            raise self._refused("its reader is closed", "Open the card again.")
        reader = self._cards.reader_of(self._card)
        reading = reader.read()
        if self._card.total_bytes not in (0, reading.total_bytes):
            raise self._refused(
                f"its total was {self._card.total_bytes} bytes and is now {reading.total_bytes}, which cannot be the"
                " same card",
                "If that is right: systemctl --user restart lllm3090d",
            )
        self._reader, self._returns = reader, 1
        return reading

    def errors(self) -> CardErrors:
        """What its driver has reported since the last call."""
        told = self._reader.errors() if isinstance(self._reader, TellsErrors) else CardErrors()
        return CardErrors(told.xids, told.action, told.returns + self._returns, told.source)

    def close(self) -> None:
        """Release the driver's library. Raises LlmError CARD_UNREADABLE."""
        self._closed = True
        if self._reader is not None:
            self._reader.close()

    def _refused(self, why: str, hint: str) -> LlmError:
        return LlmError(
            ErrorCode.CARD_UNREADABLE,
            f"{self._card.name} could not be read: {why}.",
            hint=hint,
            card=self._card.uuid,
        )
