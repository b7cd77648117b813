"""The ledger: every byte that is promised, of which memory, to whom and since when. Pure.

A launch reserves in each memory that it takes a part of: on every card it is placed on, and on the host for what it
keeps there. Where host memory takes a card's place, the host is the one memory there is.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from lllm3090d.planning.calibration import TAKEN_LATER
from lllm3090d.planning.quote import LineItem
from lllm3090d.serving.observation import HOST


class ReservationState(enum.StrEnum):
    """States of a reservation."""

    HELD = "held"  # granted; the engine is still taking it
    CONFIRMED = "confirmed"  # the engine is ready and was measured
    RELEASING = "releasing"  # the unit is gone, the card does not show the memory back yet
    QUARANTINED = "quarantined"  # the memory did not come back in time


@dataclass(frozen=True, slots=True)
class Share:
    """What a launch takes of one memory.

    Attributes:
        where: UUID of the card, or :data:`lllm3090d.serving.observation.HOST`.
        items: the lines of its quote there.
    """

    where: str
    items: tuple[LineItem, ...]

    @property
    def bytes(self) -> int:
        """The sum of its lines."""
        return sum(item.bytes for item in self.items)


@dataclass(frozen=True, slots=True)
class Reservation:
    """Bytes of one memory held for one run.

    Attributes:
        run: identity of the launch.
        name: model.
        where: UUID of the card, or the host.
        items: the lines of the price it was granted at.
        reserved_bytes: the price.
        measured_bytes: what the engine was seen to hold at most, or None.
        state: see :class:`ReservationState`.
        since_s: when it came into this state, on the scheduler's clock.
    """

    run: str
    name: str
    where: str
    items: tuple[LineItem, ...]
    reserved_bytes: int
    measured_bytes: int | None
    state: ReservationState
    since_s: float = 0.0

    @property
    def charged_bytes(self) -> int:
        """What the memory is charged: the greater of price and measurement."""
        return max(self.reserved_bytes, self.measured_bytes or 0)

    @property
    def estimate_bytes(self) -> int:
        """The price without its margins: what the engine is expected to take."""
        return self.reserved_bytes - sum(item.bytes for item in self.items if item.name in MARGINS)

    @property
    def at_ready_bytes(self) -> int:
        """What the engine is expected to hold once it is ready: of host memory without what conversations fill."""
        later = TAKEN_LATER if self.where == HOST else frozenset[str]()
        return self.estimate_bytes - sum(item.bytes for item in self.items if item.name in later)


_LIVE = frozenset({ReservationState.HELD, ReservationState.CONFIRMED})
# Lines of a quote that are no estimate but a margin above it.
MARGINS = frozenset({"slack", "workspace floor"})


class Ledger:
    """The reservations of all memories. What is held is held once and released exactly once."""

    def __init__(self) -> None:
        self._by_run: dict[str, dict[str, Reservation]] = {}

    def __iter__(self) -> Iterator[Reservation]:
        return iter([each for shares in self._by_run.values() for each in shares.values()])

    def of(self, run: str) -> tuple[Reservation, ...]:
        """The reservations of a run."""
        return tuple(self._by_run.get(run, {}).values())

    def get(self, run: str, where: str) -> Reservation | None:
        """The reservation of a run in one memory, if it has one."""
        return self._by_run.get(run, {}).get(where)

    def on(self, where: str) -> tuple[Reservation, ...]:
        """All reservations in one memory."""
        return tuple(each for each in self if each.where == where)

    def hold(self, run: str, name: str, shares: Iterable[Share], now_s: float = 0.0) -> None:
        """Promise a run its shares.

        Raises:
            ValueError: the run holds some already, or names one memory twice.
        """
        if run in self._by_run:
            raise ValueError(f"run {run} holds a reservation already")
        held: dict[str, Reservation] = {}
        for share in shares:
            if share.where in held:
                raise ValueError(f"run {run} would hold {share.where} twice")
            held[share.where] = Reservation(
                run, name, share.where, share.items, share.bytes, None, ReservationState.HELD, now_s
            )
        self._by_run[run] = held

    def confirm(self, run: str, measured: Mapping[str, int], now_s: float = 0.0) -> None:
        """The engine is ready and holds this much, by memory; the greater figure is charged from now on.

        What was measured before is never forgotten for a smaller figure.
        """
        for each in self.of(run):
            seen = [size for size in (each.measured_bytes, measured.get(each.where)) if size is not None]
            self._update(
                each, now_s, measured_bytes=max(seen, default=None), state=ReservationState.CONFIRMED
            )

    def saw(self, run: str, held: Mapping[str, int]) -> None:
        """A run holds this much now, by memory; more than was ever seen is charged from now on."""
        for each in self.of(run):
            if held.get(each.where, 0) > each.charged_bytes and each.state in _LIVE:
                self._update(each, each.since_s, measured_bytes=held[each.where])

    def releasing(self, run: str, now_s: float = 0.0) -> None:
        """The unit is gone; the bytes stay charged until the card shows them."""
        for each in self.of(run):
            self._update(each, now_s, state=ReservationState.RELEASING)

    def settle(self, run: str, missing: Mapping[str, int], now_s: float = 0.0) -> None:
        """The card has shown the bytes back but for these, by memory: those are charged until it does.

        Raises:
            KeyError: the run holds nothing: released twice.
        """
        shares = self._by_run[run]
        for where, each in tuple(shares.items()):
            bytes_missing = missing.get(where, 0)
            if bytes_missing <= 0:
                del shares[where]
            elif each.state is not ReservationState.QUARANTINED or each.reserved_bytes != bytes_missing:
                since = each.since_s if each.state is ReservationState.QUARANTINED else now_s
                self._update(
                    each,
                    since,
                    items=(),
                    reserved_bytes=bytes_missing,
                    measured_bytes=None,
                    state=ReservationState.QUARANTINED,
                )
        if not shares:
            del self._by_run[run]

    def charged_bytes(self, where: str) -> int:
        """Bytes charged in one memory for everything but quarantine."""
        return sum(r.charged_bytes for r in self.on(where) if r.state is not ReservationState.QUARANTINED)

    def quarantined_bytes(self, where: str) -> int:
        """Bytes of one memory that did not come back."""
        return sum(r.charged_bytes for r in self.on(where) if r.state is ReservationState.QUARANTINED)

    def still_to_come_bytes(self, where: str, resident: Mapping[str, int]) -> int:
        """Bytes that loading engines were promised in one memory and have not taken yet.

        Args:
            where: the memory.
            resident: bytes each run holds of it now, by run; a run that is missing holds none.
        """
        return sum(
            max(0, r.reserved_bytes - resident.get(r.run, 0))
            for r in self.on(where)
            if r.state is ReservationState.HELD
        )

    def untaken_bytes(self, where: str, in_use: Mapping[str, int]) -> int:
        """Bytes promised in one memory to engines that run or load, and not taken yet; host memory is taken slowly."""
        return sum(
            max(0, r.charged_bytes - in_use.get(r.run, 0))
            for r in self.on(where)
            if r.state in {ReservationState.HELD, ReservationState.CONFIRMED}
        )

    def _update(self, old: Reservation, since_s: float, **changes: object) -> None:
        changed = replace(old, since_s=since_s, **changes)  # type: ignore[arg-type]  # checked by the dataclass's fields
        self._by_run[old.run][old.where] = changed
