"""Admission: what each memory can give now, and what it could give were some runs gone. Pure.

One inequality for each memory (:mod:`lllm3090d.planning.reserves`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lllm3090d.planning.reserves import Budget, Claims, ReservePolicy, budget, host_budget
from lllm3090d.serving.ledger import Ledger, Reservation, ReservationState
from lllm3090d.serving.observation import HOST, CardState, Observation, is_foreign_unit


@dataclass(frozen=True, slots=True)
class Rooms:
    """What each memory can give, had some runs gone.

    Attributes:
        cards: by UUID; without those in error.
        host: beside the cards; None where host memory is the card.
    """

    cards: Mapping[str, Budget]
    host: Budget | None

    @property
    def host_bytes(self) -> int | None:
        """What the host can give; None where it is the card."""
        return None if self.host is None else self.host.grantable_bytes


def rooms(
    observation: Observation, ledger: Ledger, reserves: ReservePolicy, gone: frozenset[str] = frozenset()
) -> Rooms:
    """What each memory can give.

    Args:
        observation: the cards now.
        ledger: what is promised.
        reserves: from the settings.
        gone: runs that are thought away, with what they hold.

    Raises:
        LlmError: CARD_UNREADABLE for a reading that cannot be true.
    """
    return holdings(observation, ledger).rooms(reserves, gone)


@dataclass(slots=True)
class _Holding:
    """What one run is charged and holds of one memory, bytes; see :class:`Claims`."""

    charged_bytes: int = 0
    still_to_come_bytes: int = 0
    quarantined_bytes: int = 0
    in_use_bytes: int = 0
    foreign_unit_bytes: int = 0

    @property
    def freed(self) -> tuple[int, int]:
        """What it adds to what is left by promises, and to what is free now, once it is thought away."""
        promised = self.charged_bytes + self.quarantined_bytes + self.foreign_unit_bytes
        return promised, self.still_to_come_bytes + self.in_use_bytes


@dataclass(frozen=True, slots=True)
class Holdings:
    """Every memory by its runs. Budgets are made of their sums alone, so a run thought away only leaves them.

    Attributes:
        observation: every memory now.
        cards: what each run has of each card that can be used, by UUID.
        host: the same of host memory beside them.
    """

    observation: Observation
    cards: Mapping[str, Mapping[str, _Holding]]
    host: Mapping[str, _Holding]

    def rooms(self, reserves: ReservePolicy, gone: frozenset[str] = frozenset()) -> Rooms:
        """As :func:`rooms`."""
        cards = {
            state.card.uuid: _card_budget(
                state, self.observation.desktop_active, self.cards[state.card.uuid], reserves, gone
            )
            for state in self.observation.cards
            if state.card.uuid in self.cards
        }
        if self.observation.host is None:
            return Rooms(cards, None)
        total, available = self.observation.host.total_bytes, self.observation.host.available_bytes
        freed = sum([self.host[run].in_use_bytes for run in gone if run in self.host])
        untaken = sum([each.still_to_come_bytes for run, each in self.host.items() if run not in gone])
        return Rooms(cards, host_budget(total, available + freed, untaken))

    def freed_on_card(self, uuid: str) -> Mapping[str, tuple[int, int]]:
        """What each run that is thought away adds to both sides of a card's budget, bytes."""
        return {run: each.freed for run, each in self.cards[uuid].items()}

    def freed_on_host(self) -> Mapping[str, tuple[int, int]]:
        """The same of host memory, whose sides are one."""
        sizes = {run: each.in_use_bytes + each.still_to_come_bytes for run, each in self.host.items()}
        return {run: (size, size) for run, size in sizes.items()}


def holdings(observation: Observation, ledger: Ledger) -> Holdings:
    """What all runs are charged and hold."""
    reserved: dict[str, list[Reservation]] = {}
    for each in ledger:
        reserved.setdefault(each.where, []).append(each)
    cards = {
        state.card.uuid: _on_card(state, reserved.get(state.card.uuid, ()))
        for state in observation.cards
        if state.reading is not None and state.fault is None
    }
    host = {} if observation.host is None else _on_host(observation, reserved.get(HOST, ()))
    return Holdings(observation, cards, host)


def _on_card(state: CardState, reserved: Sequence[Reservation]) -> Mapping[str, _Holding]:
    resident = state.resident if state.attributed else {}
    # What a run holds without a promise, on a card that it was not meant for, is taken all the same.
    found = {
        run: _Holding(in_use_bytes=size, foreign_unit_bytes=size)
        if is_foreign_unit(run)
        else _Holding(in_use_bytes=size, charged_bytes=size)
        for run, size in _held(state, reserved).items()
    }
    for each in reserved:
        held = found.setdefault(each.run, _Holding())
        # An engine may hold more than it was priced at before anybody has measured it.
        charged = max(each.charged_bytes, resident.get(each.run, 0))
        if each.state is _QUARANTINED:
            held.charged_bytes, held.quarantined_bytes = 0, charged
        else:
            held.charged_bytes = charged
        if each.state is _HELD:
            held.still_to_come_bytes = max(0, each.reserved_bytes - resident.get(each.run, 0))
    return found


def _on_host(observation: Observation, reserved: Sequence[Reservation]) -> Mapping[str, _Holding]:
    """It is taken slowly, so what was promised and not taken is still to come for all that run."""
    found = {run: _Holding(in_use_bytes=size) for run, size in observation.host_in_use.items()}
    for each in reserved:
        if each.state in _LIVE:
            held = found.setdefault(each.run, _Holding())
            held.still_to_come_bytes = max(0, each.charged_bytes - held.in_use_bytes)
    return found


def _card_budget(
    state: CardState,
    desktop_active: bool | None,
    held: Mapping[str, _Holding],
    reserves: ReservePolicy,
    gone: frozenset[str],
) -> Budget:
    """One card's, as if what is thought away had been given back: it leaves the promises and the reading alike."""
    stays = [each for run, each in held.items() if run not in gone]
    claims = Claims(
        charged_bytes=sum([each.charged_bytes for each in stays]),
        still_to_come_bytes=sum([each.still_to_come_bytes for each in stays]),
        held_bytes=sum([each.in_use_bytes for each in held.values()]),
        quarantined_bytes=sum([each.quarantined_bytes for each in stays]),
        returning_bytes=sum([each.in_use_bytes for run, each in held.items() if run in gone]),
        foreign_unit_bytes=sum([each.foreign_unit_bytes for each in stays]),
    )
    return budget(state.card, state.read(), claims, desktop_active, reserves)


def held_now(state: CardState, ledger: Ledger) -> Mapping[str, int]:
    """What each of our runs holds of a card, as far as it can be told: the part of what is used that is not foreign.

    Memory of a run that has ended and is still used, though nobody is listed with it, is that run's: it is charged
    already. Where the driver does not tell who holds how much (inside some containers), those that are ready are taken
    to hold what they are charged; what a loading one holds is not known and counts as somebody else's until then.
    """
    return _held(state, ledger.on(state.card.uuid))


def _held(state: CardState, reserved: Sequence[Reservation]) -> Mapping[str, int]:
    left = unlisted_bytes(state)
    held = dict(state.in_use) if state.attributed else {}
    known = _ENDING if state.attributed else _ENDING | {ReservationState.CONFIRMED}
    for each in reserved:
        if each.state in known and each.run not in held:
            held[each.run] = min(left, each.charged_bytes)
            left -= held[each.run]
    return held


def foreign_bytes(state: CardState, ledger: Ledger) -> int:
    """What strangers hold of a card. Raises LlmError CARD_UNREADABLE."""
    return max(0, state.read().used_bytes - sum(held_now(state, ledger).values()))


def unlisted_bytes(state: CardState) -> int:
    """What is used of a card without anybody being listed with it."""
    listed = sum(process.used_bytes or 0 for process in state.read().processes) if state.attributed else 0
    return max(0, state.read().used_bytes - listed)


_HELD, _QUARANTINED = ReservationState.HELD, ReservationState.QUARANTINED
_LIVE = frozenset({ReservationState.HELD, ReservationState.CONFIRMED})
_ENDING = frozenset({ReservationState.RELEASING, ReservationState.QUARANTINED})
