"""What a set of runs frees, added up, is what the budgets say were they gone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lllm3090d.gpus.readings import CardProcess, MemoryReading
from lllm3090d.planning.quote import Evidence, LineItem, Place
from lllm3090d.planning.reserves import ReservePolicy
from lllm3090d.planning.tier_conditions import HostMemory
from lllm3090d.serving.admission import Rooms, rooms
from lllm3090d.serving.ledger import Ledger, Share
from lllm3090d.serving.observation import HOST, CardState, Observation
from lllm3090d.serving.room_table import Point, room_table
from tests.fakes.scheduler_world import CARD, DRIVER_BYTES, MIB, SECOND

pytestmark = pytest.mark.unit

RESERVES = ReservePolicy(512, 2400)
RUNS = tuple("abcde")
TOTAL_MIB, FOREIGN_UNIT = 24_576, "lllm3090-other.service"

sizes = st.integers(0, 6000)
steps: tuple[Callable[[Ledger, str, int], object], ...] = (
    lambda ledger, run, size: None,
    lambda ledger, run, size: ledger.confirm(run, {CARD.uuid: size * MIB}),
    lambda ledger, run, size: ledger.releasing(run),
    lambda ledger, run, size: ledger.settle(run, {CARD.uuid: size * MIB, HOST: size * MIB // 2}),
)


def promised(where: str, mib: int) -> Share:
    return Share(where, (LineItem("weights", Place.CARD, mib * MIB, Evidence.HEADER, ""),))


def point_of(given: Rooms) -> Point:
    return (*(budget.grantable_bytes for budget in given.cards.values()), given.host_bytes or 0)


@st.composite
def ledgers(draw: st.DrawFn) -> Ledger:
    """Some runs hold, were measured, have ended or are quarantined, on the cards and the host."""
    made = Ledger()
    for run in draw(st.sets(st.sampled_from(RUNS))):
        where = draw(st.lists(st.sampled_from([CARD.uuid, SECOND.uuid, HOST]), min_size=1, unique=True))
        made.hold(run, run, [promised(each, draw(sizes)) for each in where])
        draw(st.sampled_from(steps))(made, run, draw(sizes))
    return made


@st.composite
def states(draw: st.DrawFn, number: int) -> CardState:
    """A card on which runs, a unit that is left alone and strangers hold something."""
    card = (CARD, SECOND)[number]
    held = draw(st.dictionaries(st.sampled_from((*RUNS, FOREIGN_UNIT)), sizes, max_size=3))
    strangers, unlisted, kept = draw(sizes), draw(sizes), draw(st.integers(0, 500))
    used = min(TOTAL_MIB - 451 - kept, sum(held.values()) + strangers + unlisted)
    attributed = draw(st.booleans())
    reading = MemoryReading(
        0.0,
        TOTAL_MIB * MIB,
        DRIVER_BYTES,
        used * MIB,
        (TOTAL_MIB - 451 - kept - used) * MIB,
        tuple(CardProcess(pid, mib * MIB) for pid, mib in enumerate((*held.values(), strangers), 100)),
    )
    told = {run: mib * MIB for run, mib in held.items()} if attributed else {}
    return CardState(card, reading, None, told, told, attributed=attributed)


@given(
    ledger=ledgers(),
    cards=st.one_of(st.tuples(states(0)), st.tuples(states(0), states(1))),
    desktop=st.sampled_from([True, False, None]),
    host_mib=st.one_of(st.none(), st.integers(0, 65_536)),
    host_held=st.dictionaries(st.sampled_from(RUNS), sizes, max_size=3),
    gone=st.lists(st.sets(st.sampled_from(RUNS)), max_size=4),
)
def test_a_sum_is_what_the_budgets_say(
    *,
    ledger: Ledger,
    cards: tuple[CardState, ...],
    desktop: bool | None,
    host_mib: int | None,
    host_held: dict[str, int],
    gone: list[set[str]],
) -> None:
    host = None if host_mib is None else HostMemory(host_mib * MIB, 65_536 * MIB)
    now = Observation(cards, desktop, host, {run: mib * MIB for run, mib in host_held.items()})
    table = room_table(now, ledger, RESERVES)
    assert table.cards == tuple(state.card.uuid for state in cards)
    assert table.now == point_of(table.given) == point_of(rooms(now, ledger, RESERVES))
    for each in gone:
        assert table.without(each) == point_of(rooms(now, ledger, RESERVES, frozenset(each)))
