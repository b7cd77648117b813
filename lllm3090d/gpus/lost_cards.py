"""Cards that were lost before the daemon started: known from before, read as soon as they are back."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.readings import Card, CardReader, MemoryReading, NoCardError
from lllm3090d.gpus.xids import CardErrors, TellsErrors

log = logging.getLogger(__name__)

# Between two attempts to open the driver: with a lost card each may take long.
ATTEMPT_PAUSE_S = 5.0
WAY_OUT = 'If it was taken out: set card = "cpu" (or "amd", "intel") and restart lllm3090d.'


def is_lost(error: LlmError) -> bool:
    """Whether a card could not be read because it has not been there since the start."""
    return error.details.get("lost") is True


class LostCards:
    """Tries to open the driver until the known cards are there, and hands their readers out.

    Args:
        opener: of all cards of the driver; raises NoCardError, LlmError.
        known: the cards as they were.
        error: why they could not be opened.
        clock: monotonic seconds.
        pause_s: least seconds between two attempts.
    """

    def __init__(
        self,
        opener: Callable[[], Sequence[CardReader]],
        known: Sequence[Card],
        error: Exception,
        *,
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
        self._found: dict[str, CardReader] | None = None

    def readers(self) -> tuple[LostReader, ...]:
        """One for each known card, in their order."""
        return tuple(LostReader(self, card) for card in self._known)

    def reader_of(self, card: Card) -> CardReader:
        """The reader of a card that is there again. Raises LlmError CARD_UNREADABLE while it is not."""
        with self._lock:
            if self._found is None and self._clock() >= self._next_s:
                self._attempt()
                self._next_s = self._clock() + self._pause_s
            if self._found is None:
                raise self._lost(card)
            reader = self._found.get(card.uuid)
            if reader is None:
                raise LlmError(
                    ErrorCode.CARD_UNREADABLE,
                    f"{card.name} is not among the cards that its driver lists now.",
                    hint=f"Is it seated and powered? {WAY_OUT} Other cards are taken at the next start.",
                    card=card.uuid,
                    lost=True,
                )
            return reader

    def _attempt(self) -> None:
        try:
            opened = {each.card.uuid: each for each in self._opener()}
        except (LlmError, NoCardError) as error:
            self._error = error
            return
        if not any(card.uuid in opened for card in self._known):
            self._error = LlmError(
                ErrorCode.CARD_UNREADABLE,
                "the driver lists other cards than before",
                hint="If that is right, have these taken: systemctl --user restart lllm3090d.",
            )
            for reader in opened.values():
                reader.close()
            return
        for uuid in opened.keys() - {card.uuid for card in self._known}:
            log.warning("%s was not there before: it is taken at the next start", opened[uuid].card.name)
            opened.pop(uuid).close()
        self._found = opened

    def _lost(self, card: Card) -> LlmError:
        why, hint = str(self._error), "See what nvidia-smi says, and journalctl -k --grep 'NVRM|Xid'."
        details: dict[str, object] = {}
        if isinstance(self._error, LlmError):
            why, hint = self._error.message, self._error.hint or hint
            details = dict(self._error.details)
        return LlmError(
            ErrorCode.CARD_UNREADABLE,
            f"{card.name}, which was managed before, cannot be opened: {why.rstrip('.')}.",
            hint=f"{hint.rstrip('.')}. {WAY_OUT}",
            **(details | {"card": card.uuid, "lost": True}),
        )


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
