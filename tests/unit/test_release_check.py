"""Release check: what has come back of a run, whatever others do meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.readings import Card, CardKind, CardProcess, MemoryReading
from lllm3090d.planning.units import MIB
from lllm3090d.serving.observation import HOST, CardState, Observation, Stranger
from lllm3090d.serving.release_check import TOLERANCE_BYTES, ReleaseCheck, missing_of

pytestmark = pytest.mark.unit

GIB = 1 << 30
TOTAL = 24 * GIB
A, B = 6 * GIB, 10 * GIB
OVERHEAD = 300 * MIB  # what a driver uses and lists for nobody
CARD = Card(CardKind.NVIDIA, "GPU-1", "RTX 3090", "580")
SECOND = Card(CardKind.NVIDIA, "GPU-2", "RTX 3090", "580")
MEMORY = Card(CardKind.CPU, HOST, "host memory", None)


def state(
    runs: Mapping[str, int] | None = None,
    *,
    stranger: int = GIB,
    lost: int = 0,
    attributed: bool = True,
    card: Card = CARD,
) -> CardState:
    """A card: what our runs hold, what a stranger holds, what nobody on the list holds."""
    held = dict(runs or {})
    used = sum(held.values()) + stranger + lost + OVERHEAD
    processes = tuple(
        CardProcess(100 + i, size) for i, size in enumerate((*held.values(), stranger)) if size
    )
    reading = MemoryReading(
        0.0, TOTAL, 451 * MIB, used, TOTAL - used, processes if attributed else (), attributed
    )
    strangers = (Stranger(1, "game", "", stranger),) if attributed and stranger else ()
    listed = held if attributed else {}
    return CardState(card, reading, None, listed, listed, strangers, attributed)


def seen(*states: CardState, host_in_use: Mapping[str, int] | None = None) -> Observation:
    return Observation(states, None, None, dict(host_in_use or {}))


def failed() -> CardState:
    return CardState(CARD, None, LlmError(ErrorCode.CARD_UNREADABLE, "GPU is lost"))


def check(before: CardState, run: str = "a", size: int = A) -> ReleaseCheck:
    return ReleaseCheck(seen(before), run, {CARD.uuid: size})


# --- one run, a driver that tells --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (state(), 0),
        (state(lost=A), A),
        (state(lost=A // 2), A // 2),
        (state({"a": A}), A),
        (state({"a": GIB}, lost=A - GIB), A),
        (state({"a": GIB}), GIB),
        (state({"a": A + GIB}), A + GIB),
        # A stranger takes or gives memory meanwhile.
        (state(stranger=20 * GIB), 0),
        (state(stranger=0), 0),
        (state(stranger=10 * GIB, lost=A), A),
        (state(stranger=0, lost=A), A),
        # More is missing than it had: the rest is not its own.
        (state(lost=A + GIB), A),
        # Another model of ours grows meanwhile.
        (state({"b": B}), 0),
        (state({"b": B}, lost=2 * GIB), 2 * GIB),
        # A driver's bookkeeping.
        (state(lost=TOLERANCE_BYTES), 0),
        (state(lost=TOLERANCE_BYTES + 1), TOLERANCE_BYTES + 1),
        (failed(), A),
        (state(card=SECOND), A),
    ],
)
def test_what_is_missing(now: CardState, expected: int) -> None:
    missing = check(state({"a": A})).missing(seen(now))
    assert missing == ({CARD.uuid: expected} if expected else {})


def test_memory_that_returns_late() -> None:
    stopped = check(state({"a": A}))
    story = [state({"a": A}), state(lost=A), state(lost=A, stranger=3 * GIB), state(lost=2 * GIB), state()]
    assert [stopped.missing(seen(each)).get(CARD.uuid, 0) for each in story] == [A, A, A, 2 * GIB, 0]


def test_of_a_small_engine_little_is_missed() -> None:
    small = 32 * MIB
    stopped = ReleaseCheck(seen(state({"a": small})), "a", {CARD.uuid: small})
    assert stopped.missing(seen(state(lost=small))) == {CARD.uuid: small}
    assert stopped.missing(seen(state(lost=small // 8))) == {}


def test_what_nobody_measured_is_missing_as_long_as_it_is_listed() -> None:
    stopped = ReleaseCheck(seen(state({"a": A})), "a")
    assert stopped.missing(seen(state({"a": A}))) == {CARD.uuid: A}
    assert stopped.missing(seen(state(lost=A))) == {}


def test_a_stranger_of_whom_the_driver_does_not_tell_how_much_is_nobody() -> None:
    def with_unknown(runs: Mapping[str, int], lost: int) -> CardState:
        known = state(runs, lost=lost)
        reading = known.read()
        more = (*reading.processes, CardProcess(2, None))
        strangers = (*known.strangers, Stranger(2, "compositor", "", None))
        return replace(known, reading=replace(reading, processes=more), strangers=strangers)

    before = with_unknown({"a": A}, 50 * MIB)
    assert check(before).missing(seen(with_unknown({}, 50 * MIB))) == {}
    assert check(before).missing(seen(with_unknown({}, A))) == {CARD.uuid: A - 50 * MIB}


def test_a_card_that_was_in_error_at_the_stop() -> None:
    stopped = check(failed())
    assert stopped.missing(seen(failed())) == {CARD.uuid: A}
    assert stopped.missing(seen(state({"a": GIB}))) == {CARD.uuid: GIB}
    assert stopped.missing(seen(state())) == {}
    assert stopped.missing(seen(state(attributed=False))) == {}


def test_one_that_nobody_has_seen_is_back_once_it_is_off_the_list() -> None:
    unseen = ReleaseCheck(None, "a", {CARD.uuid: A})
    assert unseen.missing(seen(state({"a": A}))) == {CARD.uuid: A}
    assert unseen.missing(seen(state())) == unseen.missing(seen(state(attributed=False))) == {}
    assert unseen.missing(seen(failed())) == {CARD.uuid: A}


def test_a_split_model_is_looked_at_card_by_card() -> None:
    before = seen(state({"a": A}), state({"a": B}, card=SECOND))
    stopped = ReleaseCheck(before, "a", {CARD.uuid: A, SECOND.uuid: B})
    now = seen(state(), state(lost=GIB, card=SECOND))
    assert stopped.missing(now) == {SECOND.uuid: GIB}
    assert stopped.missing(seen(state(lost=A), replace(failed(), card=SECOND))) == {
        CARD.uuid: A,
        SECOND.uuid: B,
    }


# --- a driver that does not tell ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (state(attributed=False), 0),
        (state(lost=A, attributed=False), A),
        (state(lost=GIB, attributed=False), GIB),
        # A stranger takes memory: that it came back is not to be seen; he gives: that it did not.
        (state(stranger=3 * GIB, attributed=False), 2 * GIB),
        (state(stranger=0, lost=A, attributed=False), A - GIB),
        (state(stranger=20 * GIB, attributed=False), A),
        (failed(), A),
    ],
)
def test_by_the_sum_alone(now: CardState, expected: int) -> None:
    missing = check(state({"a": A}, attributed=False)).missing(seen(now))
    assert missing == ({CARD.uuid: expected} if expected else {})


def test_what_our_own_take_meanwhile_is_no_strangers() -> None:
    stopped = check(state({"a": A}, attributed=False))
    now = seen(state({"b": B}, attributed=False))
    assert stopped.missing(now) == {CARD.uuid: A}
    assert stopped.missing(now, {CARD.uuid: B}) == {}


def test_a_driver_that_stops_telling() -> None:
    assert check(state({"a": A})).missing(seen(state(lost=GIB, attributed=False))) == {CARD.uuid: GIB}
    assert check(state({"a": A}, attributed=False)).missing(seen(state())) == {}


# --- host memory -------------------------------------------------------------------------------------------


def test_host_memory_is_back_with_the_processes() -> None:
    stopped = ReleaseCheck(seen(state({"a": A}), host_in_use={"a": GIB}), "a", {CARD.uuid: A, HOST: GIB})
    assert stopped.missing(seen(state(), host_in_use={"a": 5})) == {HOST: 5}
    assert stopped.missing(seen(state(), host_in_use={"b": GIB})) == {}


def test_host_memory_in_place_of_a_card() -> None:
    before = state({"a": A}, card=MEMORY)
    stopped = ReleaseCheck(seen(before), "a", {HOST: A})
    assert stopped.missing(seen(state({"a": GIB}, card=MEMORY))) == {HOST: GIB}
    # The kernel's own figures may be anything.
    assert stopped.missing(seen(state({}, lost=5 * GIB, card=MEMORY))) == {}


# --- several runs ------------------------------------------------------------------------------------------


def both(attributed: bool = True) -> tuple[ReleaseCheck, ReleaseCheck]:
    before = state({"a": A, "b": B}, attributed=attributed)
    return check(before), check(before, "b", B)


def total(checks: tuple[ReleaseCheck, ...], now: CardState) -> int:
    return sum(each.get(CARD.uuid, 0) for each in missing_of(checks, seen(now)).values())


@pytest.mark.parametrize("attributed", [True, False])
@pytest.mark.parametrize("lost", [0, GIB, A, B, A + GIB, A + B])
def test_two_that_stop_at_once_miss_it_once(attributed: bool, lost: int) -> None:
    assert total(both(attributed), state(lost=lost, attributed=attributed)) == lost


def test_of_two_the_one_that_is_listed_still_is_missing_its_own() -> None:
    found = missing_of(both(), seen(state({"b": B})))
    assert found == {"a": {}, "b": {CARD.uuid: B}}
    found = missing_of(both(), seen(state({"b": B}, lost=A)))
    assert found == {"a": {CARD.uuid: A}, "b": {CARD.uuid: B}}


@pytest.mark.parametrize("attributed", [True, False])
def test_one_that_stops_while_another_is_missing(attributed: bool) -> None:
    first = check(state({"a": A, "b": B}, attributed=attributed))
    second = check(state({"b": B}, lost=A, attributed=attributed), "b", B)
    pair = (first, second)
    for lost in (A + B, A, B, GIB, 0):
        assert total(pair, state(lost=lost, attributed=attributed)) == lost
    # b is back, a never will be.
    found = missing_of(pair, seen(state(lost=A, attributed=True)))
    if attributed:
        assert found == {"a": {CARD.uuid: A}, "b": {}}


@given(
    a=st.integers(0, A),
    b=st.integers(0, B),
    strangers=st.tuples(st.integers(0, 4 * GIB), st.integers(0, 4 * GIB)),
    third=st.integers(0, 2 * GIB),
    together=st.booleans(),
    listed=st.booleans(),
)
def test_whatever_others_do_the_sum_is_what_is_lost(
    *, a: int, b: int, strangers: tuple[int, int], third: int, together: bool, listed: bool
) -> None:
    """Of a and b so much is lost; a stranger and a third model of ours take and give as they like."""
    before, now = strangers
    at_stop = state({"a": A, "b": B, "c": GIB}, stranger=before)
    later = at_stop if together else state({"b": B, "c": third}, stranger=now, lost=A)
    pair = (check(at_stop), check(later, "b", B))
    runs = {"c": third, **({"b": B} if listed else {})}
    lost = a if listed else a + b
    found = total(pair, state(runs, stranger=now, lost=lost))
    expected = lost + (B if listed else 0)
    assert found == expected or (lost <= TOLERANCE_BYTES and found == expected - lost)
