"""What each memory can give, also were some runs gone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.readings import CardProcess, MemoryReading
from lllm3090d.planning.quote import Evidence, LineItem, Place
from lllm3090d.planning.reserves import ReservePolicy, host_reserve_bytes
from lllm3090d.planning.tier_conditions import HostMemory
from lllm3090d.serving.admission import foreign_bytes, held_now, rooms, unlisted_bytes
from lllm3090d.serving.ledger import Ledger, Share
from lllm3090d.serving.observation import HOST, CardState, Observation
from tests.fakes.scheduler_world import CARD, DRIVER_BYTES, GIB, MIB, SECOND

pytestmark = pytest.mark.unit

TOTAL = 24 * GIB
RESERVES = ReservePolicy(512, 2400)
HOST_TOTAL = 64 * GIB


def share(where: str, size: int) -> Share:
    return Share(where, (LineItem("weights", Place.CARD, size, Evidence.HEADER, ""),))


def state(
    held: Mapping[str, int], *, foreign: int = 0, unlisted: int = 0, attributed: bool = True
) -> CardState:
    """The first card: runs hold so much, strangers so much, and somebody who is not listed."""
    used = sum(held.values()) + foreign + unlisted
    sizes = [*held.values(), *([foreign] if foreign else [])] if attributed else []
    reading = MemoryReading(
        0.0,
        TOTAL,
        DRIVER_BYTES,
        used,
        TOTAL - DRIVER_BYTES - used,
        tuple(CardProcess(number, size) for number, size in enumerate(sizes, 100)),
        processes_known=attributed,
    )
    told = held if attributed else {}
    return CardState(CARD, reading, None, told, told, attributed=attributed)


def seen(
    first: CardState,
    *,
    host_available: int | None = None,
    host_in_use: Mapping[str, int] | None = None,
    desktop: bool = False,
) -> Observation:
    host = None if host_available is None else HostMemory(host_available, HOST_TOTAL)
    return Observation((first,), desktop, host, host_in_use or {})


def card_room(observation: Observation, ledger: Ledger, *gone: str) -> int:
    return rooms(observation, ledger, RESERVES, frozenset(gone)).cards[CARD.uuid].grantable_bytes


def holding(**sizes: int) -> Ledger:
    ledger = Ledger()
    for run, size in sizes.items():
        ledger.hold(run, run, [share(CARD.uuid, size)])
    return ledger


# --- one card ------------------------------------------------------------------------------------------------


def test_an_empty_card_gives_all_but_the_drivers_part() -> None:
    assert card_room(seen(state({})), Ledger()) == TOTAL - DRIVER_BYTES


def test_what_was_promised_is_not_given_twice() -> None:
    """A loading engine that has taken a part of it is charged the whole, and the part is not foreign."""
    ledger = holding(a=8 * GIB)
    left = TOTAL - DRIVER_BYTES - 8 * GIB
    assert card_room(seen(state({})), ledger) == left
    assert card_room(seen(state({"a": 3 * GIB})), ledger) == left
    assert card_room(seen(state({"a": 8 * GIB})), ledger) == left


def test_an_engine_that_takes_more_is_charged_that() -> None:
    """Even before anybody has told the ledger."""
    left = TOTAL - DRIVER_BYTES - 9 * GIB
    assert card_room(seen(state({"a": 9 * GIB})), holding(a=8 * GIB)) == left


def test_strangers_and_the_desktop_are_counted_once() -> None:
    ledger = holding(a=8 * GIB)
    left = TOTAL - DRIVER_BYTES - 8 * GIB
    little, much = (state({"a": 8 * GIB}, foreign=size) for size in (GIB, 3 * GIB))
    assert card_room(seen(little), ledger) == left - GIB
    assert card_room(seen(little, desktop=True), ledger) == left - 2400 * MIB
    assert card_room(seen(much, desktop=True), ledger) == left - 3 * GIB


@pytest.mark.parametrize("attributed", [True, False])
def test_those_that_are_thought_away_take_their_promise_and_their_part_of_the_reading(
    attributed: bool,
) -> None:
    """A run that is measured holds what it is charged, where the driver does not say who holds how much."""
    ledger = holding(a=8 * GIB, b=5 * GIB)
    for run, size in (("a", 8 * GIB), ("b", 5 * GIB)):
        ledger.confirm(run, {CARD.uuid: size})
    now = seen(state({"a": 8 * GIB, "b": 5 * GIB}, foreign=2 * GIB, attributed=attributed))
    left = TOTAL - DRIVER_BYTES - 2 * GIB
    assert card_room(now, ledger) == left - 13 * GIB
    assert card_room(now, ledger, "a") == left - 5 * GIB
    assert card_room(now, ledger, "b") == left - 8 * GIB
    assert card_room(now, ledger, "a", "b") == left
    assert card_room(now, ledger, "never-was") == left - 13 * GIB


def test_one_that_has_taken_less_than_its_price_frees_the_whole_promise() -> None:
    ledger = holding(a=8 * GIB)
    now = seen(state({"a": GIB}))
    assert card_room(now, ledger, "a") == TOTAL - DRIVER_BYTES


def test_what_a_loading_engine_has_not_taken_yet_is_not_free_either() -> None:
    """Where less is free than the promises leave: the card keeps something that neither side can name."""
    ledger, kept = holding(a=8 * GIB, b=2 * GIB), GIB
    ledger.confirm("b", {CARD.uuid: 2 * GIB})
    now = state({"a": 3 * GIB, "b": 2 * GIB})
    assert now.reading is not None
    now = replace(now, reading=replace(now.reading, free_bytes=now.reading.free_bytes - kept))
    budget = rooms(seen(now), ledger, RESERVES).cards[CARD.uuid]
    assert {line.name: line.bytes for line in budget.live_lines}["loading models"] == -5 * GIB
    assert budget.grantable_bytes == TOTAL - DRIVER_BYTES - 10 * GIB - kept < budget.available_bytes
    assert card_room(seen(now), ledger, "a") == TOTAL - DRIVER_BYTES - 2 * GIB - kept
    # Where nobody tells what it has taken, all of its promise is still to come.
    untold = replace(now, resident={}, in_use={}, attributed=False)
    budget = rooms(seen(untold), ledger, RESERVES).cards[CARD.uuid]
    assert {line.name: line.bytes for line in budget.live_lines}["loading models"] == -8 * GIB


def test_what_is_not_told_apart_and_still_loads_counts_as_foreign() -> None:
    """Twice rather than not at all: nobody can tell it from a stranger."""
    ledger = holding(a=8 * GIB)
    now = seen(state({"a": 3 * GIB}, attributed=False))
    assert card_room(now, ledger) == TOTAL - DRIVER_BYTES - 8 * GIB - 3 * GIB
    assert held_now(now.main, ledger) == {}
    assert foreign_bytes(now.main, ledger) == 3 * GIB


def test_a_run_that_holds_memory_without_a_promise_is_no_room() -> None:
    """An engine that has opened another card than its own."""
    now = seen(state({"a": GIB}))
    ledger = Ledger()
    ledger.hold("a", "a", [share(SECOND.uuid, 8 * GIB)])
    for gone, left in (
        (frozenset[str](), TOTAL - DRIVER_BYTES - GIB),
        (frozenset({"a"}), TOTAL - DRIVER_BYTES),
    ):
        budget = rooms(now, ledger, RESERVES, gone).cards[CARD.uuid]
        assert (budget.available_bytes, budget.live_bytes) == (left, left)


# --- memory on its way back ------------------------------------------------------------------------------------


def test_memory_of_an_ended_engine_is_not_counted_twice() -> None:
    """It is off the list and the driver still counts its memory as used: it is charged, so it is not foreign too."""
    ledger = holding(a=8 * GIB)
    ledger.confirm("a", {CARD.uuid: 8 * GIB})
    ledger.releasing("a")
    left = TOTAL - DRIVER_BYTES - 8 * GIB
    for unlisted in (8 * GIB, 3 * GIB, 0):
        now = seen(state({}, unlisted=unlisted))
        assert card_room(now, ledger) == left
        assert held_now(now.main, ledger) == {"a": unlisted}
        assert card_room(now, ledger, "a") == TOTAL - DRIVER_BYTES


def test_what_nobody_is_listed_with_beyond_that_is_foreign() -> None:
    ledger = holding(a=2 * GIB)
    ledger.releasing("a")
    now = seen(state({}, unlisted=3 * GIB))
    assert unlisted_bytes(now.main) == 3 * GIB
    assert held_now(now.main, ledger) == {"a": 2 * GIB}
    assert card_room(now, ledger) == TOTAL - DRIVER_BYTES - 3 * GIB


def test_two_ended_engines_share_what_nobody_is_listed_with() -> None:
    ledger = holding(a=2 * GIB, b=2 * GIB)
    ledger.releasing("a")
    ledger.releasing("b")
    held = held_now(state({}, unlisted=3 * GIB), ledger)
    assert sum(held.values()) == 3 * GIB
    assert max(held.values()) == 2 * GIB


def test_quarantine_is_charged_and_not_foreign_too() -> None:
    ledger = holding(a=8 * GIB)
    ledger.releasing("a")
    ledger.settle("a", {CARD.uuid: 3 * GIB})
    now = seen(state({}, unlisted=3 * GIB, foreign=GIB))
    left = TOTAL - DRIVER_BYTES - GIB
    assert card_room(now, ledger) == left - 3 * GIB
    assert card_room(now, ledger, "a") == left
    budget = rooms(now, ledger, RESERVES).cards[CARD.uuid]
    assert {line.name: line.bytes for line in budget.lines}["quarantine"] == -3 * GIB
    assert budget.foreign_bytes == GIB


# --- cards in error ----------------------------------------------------------------------------------------------


def test_a_card_in_error_has_no_room() -> None:
    error = LlmError(ErrorCode.CARD_UNREADABLE, "it has fallen off the bus")
    now = Observation((state({}), CardState(SECOND, None, error)), False)
    assert set(rooms(now, Ledger(), RESERVES).cards) == {CARD.uuid}


def test_an_absurd_reading_is_an_error_and_no_number() -> None:
    absurd = MemoryReading(0.0, TOTAL, DRIVER_BYTES, TOTAL + 1, 0, ())
    with pytest.raises(LlmError, match="cannot be") as caught:
        rooms(seen(CardState(CARD, absurd)), Ledger(), RESERVES)
    assert caught.value.code is ErrorCode.CARD_UNREADABLE


# --- the host beside the cards -----------------------------------------------------------------------------------


def host_room(observation: Observation, ledger: Ledger, *gone: str) -> int | None:
    return rooms(observation, ledger, RESERVES, frozenset(gone)).host_bytes


def test_of_a_host_that_is_the_card_nothing_is_beside_it() -> None:
    assert host_room(seen(state({})), Ledger()) is None


def test_the_host_gives_what_is_available_but_its_reserve_and_what_is_still_to_be_taken() -> None:
    ledger = Ledger()
    for run in ("a", "b"):
        ledger.hold(run, run, [share(CARD.uuid, GIB), share(HOST, 4 * GIB)])
        ledger.confirm(run, {})
    room = 32 * GIB - host_reserve_bytes(HOST_TOTAL)

    def left(*gone: str) -> int | None:
        taken = {"a": 3 * GIB}  # and so no longer available
        return host_room(seen(state({}), host_available=32 * GIB, host_in_use=taken), ledger, *gone)

    assert left() == room - GIB - 4 * GIB
    assert left("b") == room - GIB
    # What it has taken comes back, and what it was still to take is no longer to come.
    assert left("a") == room + 3 * GIB - 4 * GIB
    assert left("a", "b") == room + 3 * GIB
    ledger.releasing("b")
    assert left() == room - GIB
    assert left("b") == room - GIB


def test_a_host_without_room_gives_nothing() -> None:
    assert host_room(seen(state({}), host_available=GIB), Ledger()) == 0
