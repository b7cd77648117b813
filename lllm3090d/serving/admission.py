"""Admission: whether a load fits now, whom it would have to replace, or what it should wait for. Pure.

One inequality for each memory (:mod:`lllm3090d.planning.reserves`), one planner, one answer. Everything is decided
before anything is stopped: what would not make room is not evicted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from lllm3090d.planning.reserves import Budget, Claims, ReservePolicy, budget, host_budget
from lllm3090d.serving.ledger import Ledger, ReservationState
from lllm3090d.serving.observation import HOST, CardState, Observation


@dataclass(frozen=True, slots=True)
class Victim:
    """A model that could go for another one.

    Attributes:
        run, name: which.
        last_used_s: on the scheduler's clock; of one that was never used, when it became ready.
        moved_bytes: what unloading it frees, and loading it again would have to read: the sum of its charges.
    """

    run: str
    name: str
    last_used_s: float
    moved_bytes: int


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
    cards = {
        state.card.uuid: _card_budget(state, observation.desktop_active, ledger, reserves, gone)
        for state in observation.cards
        if state.reading is not None
    }
    host = None
    if observation.host is not None:
        freed = sum(size for run, size in observation.host_in_use.items() if run in gone)
        untaken = ledger.untaken_bytes(HOST, observation.host_in_use)
        untaken -= sum(
            max(0, each.charged_bytes - observation.host_in_use.get(each.run, 0))
            for each in ledger.on(HOST)
            if each.run in gone and each.state in {ReservationState.HELD, ReservationState.CONFIRMED}
        )
        host = host_budget(observation.host.total_bytes, observation.host.available_bytes + freed, untaken)
    return Rooms(cards, host)


def _card_budget(
    state: CardState,
    desktop_active: bool | None,
    ledger: Ledger,
    reserves: ReservePolicy,
    gone: frozenset[str],
) -> Budget:
    """One card's, as if what is thought away had been given back: it leaves the promises and the reading alike."""
    reading, where = state.read(), state.card.uuid
    in_use = held_now(state, ledger)
    stays = [each for each in ledger.on(where) if each.run not in gone]
    resident = state.resident if state.attributed else {}
    # An engine may hold more than it was priced at before anybody has measured it.
    charged = {each.run: max(each.charged_bytes, resident.get(each.run, 0)) for each in stays}
    # What a run holds without a promise, on a card that it was not meant for, is taken all the same.
    beyond = sum(size for run, size in in_use.items() if run not in gone and ledger.get(run, where) is None)
    claims = Claims(
        charged_bytes=beyond + sum(charged[each.run] for each in stays if each.state is not _QUARANTINED),
        still_to_come_bytes=sum(
            max(0, each.reserved_bytes - resident.get(each.run, 0)) for each in stays if each.state is _HELD
        ),
        held_bytes=sum(in_use.values()),
        quarantined_bytes=sum(charged[each.run] for each in stays if each.state is _QUARANTINED),
        returning_bytes=sum(size for run, size in in_use.items() if run in gone),
    )
    return budget(state.card, reading, claims, desktop_active, reserves)


def held_now(state: CardState, ledger: Ledger) -> Mapping[str, int]:
    """What each of our runs holds of a card, as far as it can be told: the part of what is used that is not foreign.

    Memory of a run that has ended and is still used, though nobody is listed with it, is that run's: it is charged
    already. Where the driver does not tell who holds how much (inside some containers), those that are ready are taken
    to hold what they are charged; what a loading one holds is not known and counts as somebody else's until then.
    """
    left = unlisted_bytes(state)
    held = dict(state.in_use) if state.attributed else {}
    known = _ENDING if state.attributed else _ENDING | {ReservationState.CONFIRMED}
    for each in ledger.on(state.card.uuid):
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
_ENDING = frozenset({ReservationState.RELEASING, ReservationState.QUARANTINED})


def fewest_victims(
    victims: Iterable[Victim], makes_room: Callable[[frozenset[str]], bool]
) -> tuple[Victim, ...]:
    """Whom to evict: the least recently used that make room, and of those none that could stay.

    Args:
        victims: all that could go.
        makes_room: whether a load would fit were these runs gone; going further never makes less.

    Returns:
        In order of their last use; empty where not even all of them make room.
    """
    ordered = sorted(victims, key=lambda each: (each.last_used_s, each.name))
    if not ordered or not makes_room(_runs(ordered)):
        return ()
    low, high = 1, len(ordered)
    while low < high:
        middle = (low + high) // 2
        if makes_room(_runs(ordered[:middle])):
            high = middle
        else:
            low = middle + 1
    chosen = ordered[:low]
    # The last one is needed: without it there was no room. Of the others the largest is spared first.
    for each in sorted(chosen[:-1], key=lambda victim: -victim.moved_bytes):
        rest = [other for other in chosen if other is not each]
        if makes_room(_runs(rest)):
            chosen = rest
    return tuple(chosen)


def _runs(victims: Sequence[Victim]) -> frozenset[str]:
    return frozenset(each.run for each in victims)
