"""The ledger: every byte of the card that is promised, by whom and since when. Pure."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from lllm3090d.planning.quote import Place, Quote


class ReservationState(enum.StrEnum):
    """States of a reservation."""

    HELD = "held"  # granted; the engine is still taking it
    CONFIRMED = "confirmed"  # the engine is ready and was measured
    RELEASING = "releasing"  # the unit is gone, the card does not show the memory back yet
    QUARANTINED = "quarantined"  # the memory did not come back in time


@dataclass(frozen=True, slots=True)
class Reservation:
    """Bytes of the card held for one run.

    Attributes:
        run: identity of the launch.
        name: model.
        quote: the price it was granted at.
        reserved_bytes: the price on the card.
        measured_bytes: what the engine was seen to hold, or None.
        state: see :class:`ReservationState`.
    """

    run: str
    name: str
    quote: Quote
    reserved_bytes: int
    measured_bytes: int | None
    state: ReservationState

    @property
    def charged_bytes(self) -> int:
        """What the card is charged: the greater of price and measurement."""
        return max(self.reserved_bytes, self.measured_bytes or 0)


class Ledger:
    """The reservations of one card. A reservation is held once and released exactly once."""

    def __init__(self) -> None:
        self._by_run: dict[str, Reservation] = {}

    def __iter__(self) -> Iterator[Reservation]:
        return iter(tuple(self._by_run.values()))

    def get(self, run: str) -> Reservation | None:
        """The reservation of a run, if it has one."""
        return self._by_run.get(run)

    def hold(self, run: str, name: str, quote: Quote) -> Reservation:
        """Promise the quote's bytes on the card to a run. ValueError when the run holds some already."""
        if run in self._by_run:
            raise ValueError(f"run {run} holds a reservation already")
        held = Reservation(run, name, quote, quote.total_bytes(Place.CARD), None, ReservationState.HELD)
        self._by_run[run] = held
        return held

    def confirm(self, run: str, measured_bytes: int | None) -> Reservation:
        """The engine is ready and holds this much; charges the greater figure from now on."""
        return self._update(run, measured_bytes=measured_bytes, state=ReservationState.CONFIRMED)

    def releasing(self, run: str) -> Reservation:
        """The unit is gone; the bytes stay charged until the card shows them."""
        return self._update(run, state=ReservationState.RELEASING)

    def quarantine(self, run: str, missing_bytes: int) -> Reservation:
        """The card did not show these bytes in time: they are charged until it does."""
        return self._update(
            run, reserved_bytes=missing_bytes, measured_bytes=None, state=ReservationState.QUARANTINED
        )

    def release(self, run: str) -> Reservation:
        """Give the bytes back. KeyError when the run holds none: released twice."""
        return self._by_run.pop(run)

    def charged_bytes(self) -> int:
        """Bytes charged for everything but quarantine."""
        return sum(r.charged_bytes for r in self if r.state is not ReservationState.QUARANTINED)

    def quarantined_bytes(self) -> int:
        """Bytes that did not come back."""
        return sum(r.charged_bytes for r in self if r.state is ReservationState.QUARANTINED)

    def still_to_come_bytes(self, resident: Mapping[str, int]) -> int:
        """Bytes that loading engines were promised and have not taken yet.

        Args:
            resident: bytes each run holds now, by run; a run that is missing holds none.
        """
        return sum(
            max(0, r.reserved_bytes - resident.get(r.run, 0))
            for r in self
            if r.state is ReservationState.HELD
        )

    def _update(self, run: str, **changes: object) -> Reservation:
        changed = replace(self._by_run[run], **changes)  # type: ignore[arg-type]  # checked by the dataclass's fields
        self._by_run[run] = changed
        return changed
