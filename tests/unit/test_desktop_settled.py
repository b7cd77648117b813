"""When a desktop has settled: what is waited for, in which order, how long, over every history of its memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lllm3090d.bus.seats import SeatScene
from lllm3090d.planning.units import MIB
from lllm3090d.serving.desktop_settled import (
    GRACE_S,
    LEAST_SAMPLES,
    STEADY_S,
    TARGET_S,
    TOLERANCE_BYTES,
    Ending,
    Over,
    Seen,
    Settling,
    Target,
    Waiting,
)
from lllm3090d.wire_wanted import Awaited

pytestmark = pytest.mark.unit

LIMIT_S = 60.0
CARD, OTHER = "GPU-1", "GPU-2"
OWN, GREETER, CONSOLE = SeatScene(own_desktop=True), SeatScene(in_front=True), SeatScene(own_console=True)
# The daemon is started long after a login without a target, or on a machine at which nobody has logged in.
OLD = SeatScene(own_desktop=True, desktop_since_s=-3600.0)
IDLE = SeatScene(display_manager=True, chance_since_s=-3600.0)
STILL = {CARD: 300 * MIB}
NOTHING = Seen(Target.ABSENT, SeatScene(), STILL)
DESKTOP = Seen(Target.ACTIVE, OWN, STILL)


def looks(seen: Iterable[Seen], limit_s: float = LIMIT_S) -> Iterator[tuple[float, Waiting | Over]]:
    """Looked at once a second, until it is over."""
    settling = Settling(0.0)
    for second, each in enumerate(seen):
        found = settling.look(float(second), each, limit_s)
        yield second, found
        if isinstance(found, Over):
            return


def end(seen: Iterable[Seen], limit_s: float = LIMIT_S) -> tuple[float, Over]:
    *_, (when_s, last) = looks(seen, limit_s)
    assert isinstance(last, Over), last
    return when_s, last


def awaited(seen: Iterable[Seen]) -> list[tuple[Awaited, float]]:
    """What was waited for, and from when on."""
    found: list[tuple[Awaited, float]] = []
    for when_s, each in looks(seen):
        if isinstance(each, Waiting) and (not found or found[-1][0] is not each.awaited):
            found.append((each.awaited, when_s))
    return found


def for_s(seconds: float, seen: Seen) -> list[Seen]:
    return [seen] * int(seconds)


def test_without_any_desktop_nothing_is_waited_for() -> None:
    for seats in (SeatScene(), None):
        when_s, over = end([replace(NOTHING, seats=seats)])
        assert (when_s, over.ending) == (0, Ending.NO_DESKTOP)


def test_a_desktop_that_stands_still_is_waited_for_as_long_as_that_takes_to_be_seen() -> None:
    when_s, over = end(for_s(20, DESKTOP))
    assert (when_s, over.ending) == (STEADY_S, Ending.SETTLED)
    assert "300.0 MiB" in over.why


def test_a_login_on_the_desktop_first_its_target_then_its_memory() -> None:
    coming = Seen(Target.ABSENT, OWN, STILL)
    growing = [replace(DESKTOP, foreign_bytes={CARD: (300 + 200 * each) * MIB}) for each in range(6)]
    settled = replace(DESKTOP, foreign_bytes={CARD: 1300 * MIB})
    history = [*for_s(8, coming), *growing, *for_s(20, settled)]
    assert awaited(history) == [(Awaited.TARGET, 0), (Awaited.MEMORY, 8)]
    when_s, over = end(history)
    assert over.ending is Ending.SETTLED and "1,300.0 MiB" in over.why
    assert when_s == 8 + 5 + STEADY_S  # the last growth is the fifth second of it


def test_a_desktop_without_a_target_goes_by_its_memory_alone() -> None:
    when_s, over = end(for_s(60, Seen(Target.ABSENT, OWN, STILL)))
    assert (when_s, over.ending) == (TARGET_S + STEADY_S, Ending.SETTLED)


@pytest.mark.parametrize(
    ("began_s", "when_s"),
    [
        (-3600.0, STEADY_S),  # the daemon is started hours after the login
        (-12.0, TARGET_S - 12 + STEADY_S),
        (0.0, TARGET_S + STEADY_S),
        (1000.0, STEADY_S + TARGET_S + 1000),  # a clock that is not ours; never longer than the limit
    ],
)
def test_a_target_is_waited_for_from_the_beginning_of_the_session(began_s: float, when_s: float) -> None:
    seen = Seen(Target.ABSENT, replace(OWN, desktop_since_s=began_s), STILL)
    found_s, over = end(for_s(100, seen))
    assert found_s == min(when_s, LIMIT_S)
    assert over.ending is (Ending.SETTLED if when_s < LIMIT_S else Ending.LIMIT)


@pytest.mark.parametrize(("began_s", "when_s"), [(-3600.0, 0), (-5.0, GRACE_S - 5)])
@pytest.mark.parametrize("seats", [CONSOLE, SeatScene(display_manager=True)])
def test_what_no_desktop_has_come_of_for_long_is_not_waited_for(
    seats: SeatScene, began_s: float, when_s: float
) -> None:
    seen = Seen(Target.ABSENT, replace(seats, chance_since_s=began_s), STILL)
    found_s, over = end(for_s(100, seen))
    assert (found_s, over.ending) == (when_s, Ending.NO_DESKTOP)


def test_a_greeter_that_goes_makes_room_for_a_desktop() -> None:
    """With linger, and somebody else logs in: between both, nothing is in front."""
    greeter = Seen(Target.ABSENT, GREETER, {CARD: 500 * MIB})
    between = Seen(Target.ABSENT, SeatScene(display_manager=True, chance_since_s=-3600.0), {CARD: 0})
    growing = [replace(greeter, foreign_bytes={CARD: each * 300 * MIB}) for each in range(4)]
    history = [*for_s(3, greeter), *for_s(2, between), *growing, *for_s(20, growing[-1])]
    assert awaited(history) == [(Awaited.MEMORY, 0), (Awaited.SESSION, 3), (Awaited.MEMORY, 5)]
    when_s, over = end(history)
    assert (when_s, over.ending) == (8 + STEADY_S, Ending.SETTLED) and "900.0 MiB" in over.why
    # And where none comes, that has an end.
    when_s, over = end([*for_s(3, greeter), *for_s(60, between)])
    assert (when_s, over.ending) == (2 + GRACE_S, Ending.NO_DESKTOP)


def test_a_target_that_comes_to_nothing_is_not_waited_for_without_end() -> None:
    """A desktop whose session fails: its target is on its way, then it is not, and the session is there still."""
    coming, failed = Seen(Target.COMING, OWN, STILL), Seen(Target.ABSENT, OWN, STILL)
    assert end([*for_s(6, coming), *for_s(60, failed)])[0] == TARGET_S + STEADY_S
    # One that was there, and stops again.
    assert awaited([*for_s(3, DESKTOP), *for_s(60, failed)]) == [
        (Awaited.MEMORY, 0),
        (Awaited.TARGET, 3),
        (Awaited.MEMORY, TARGET_S),
    ]


def test_a_target_that_is_on_its_way_is_waited_for_until_the_limit_and_no_longer() -> None:
    history = for_s(100, Seen(Target.COMING, OWN, STILL))
    assert awaited(history) == [(Awaited.TARGET, 0)]
    when_s, over = end(history)
    assert (when_s, over.ending) == (LIMIT_S, Ending.LIMIT)
    assert over.why == "graphical-session.target is not active yet"


def test_the_greeter_counts_as_the_desktop_and_nobody_has_to_log_in() -> None:
    """With linger the manager starts with the machine, and a person may come much later, or never."""
    starting = Seen(Target.ABSENT, SeatScene(display_manager=True), STILL)
    greeter = Seen(Target.ABSENT, GREETER, {CARD: 500 * MIB})
    history = [*for_s(4, starting), *for_s(60, greeter)]
    assert awaited(history) == [(Awaited.SESSION, 0), (Awaited.MEMORY, 4)]
    assert end(history)[1].ending is Ending.SETTLED
    # Somebody logs in while it is waited for: then it is that desktop which has to settle.
    history = [*for_s(4, starting), *for_s(3, greeter), *for_s(4, Seen(Target.ABSENT, OWN, STILL))]
    history += for_s(20, DESKTOP)
    assert awaited(history) == [
        (Awaited.SESSION, 0),
        (Awaited.MEMORY, 4),
        (Awaited.TARGET, 7),
        (Awaited.MEMORY, 11),
    ]


@pytest.mark.parametrize("seats", [CONSOLE, SeatScene(display_manager=True)])
def test_a_desktop_that_may_come_and_does_not_is_waited_for_shortly(seats: SeatScene) -> None:
    history = for_s(60, Seen(Target.ABSENT, seats, STILL))
    assert awaited(history) == [(Awaited.SESSION, 0)]
    when_s, over = end(history)
    assert (when_s, over.ending) == (GRACE_S, Ending.NO_DESKTOP)


def test_a_desktop_that_the_settings_know_of_goes_by_its_memory_where_nobody_tells_of_it() -> None:
    when_s, over = end(for_s(60, Seen(Target.ABSENT, None, STILL, is_certain=True)))
    assert (when_s, over.ending) == (GRACE_S + STEADY_S, Ending.SETTLED)


def test_a_desktop_that_goes_again_is_not_waited_for() -> None:
    when_s, over = end([*for_s(3, DESKTOP), *for_s(9, NOTHING)])
    assert (when_s, over.ending) == (3, Ending.NO_DESKTOP)


@pytest.mark.parametrize(
    ("foreign", "ending", "when_s", "why"),
    [
        # A card that cannot be read, or that comes and goes, tells nothing of the time before.
        (lambda _: {}, Ending.LIMIT, LIMIT_S, "no card can be read"),
        (lambda second: STILL if second % 5 else {}, Ending.LIMIT, LIMIT_S, "no card can be read"),
        (lambda second: STILL if second > 10 else {}, Ending.SETTLED, 11 + STEADY_S, "300.0 MiB"),
        (
            lambda second: STILL if second < 3 else {**STILL, OTHER: 0},
            Ending.SETTLED,
            3 + STEADY_S,
            "300.0 MiB",
        ),
        # The other card moves although the sum does not.
        (
            lambda second: {CARD: second % 2 * 100 * MIB, OTHER: (second + 1) % 2 * 100 * MIB},
            Ending.LIMIT,
            LIMIT_S,
            "has changed by 100.0 MiB within 5 s",
        ),
        # Flicker below the tolerance is none; just above, it is.
        (
            lambda second: {CARD: second % 2 * TOLERANCE_BYTES},
            Ending.SETTLED,
            STEADY_S,
            "other programs hold 64.0 MiB",
        ),
        (
            lambda second: {CARD: second % 2 * (TOLERANCE_BYTES + 1)},
            Ending.LIMIT,
            LIMIT_S,
            "has changed by 64.1 MiB",
        ),
    ],
)
def test_what_counts_as_standing_still(foreign: object, ending: Ending, when_s: float, why: str) -> None:
    assert callable(foreign)
    found_s, over = end(replace(DESKTOP, foreign_bytes=foreign(second)) for second in range(100))
    assert (found_s, over.ending) == (when_s, ending)
    assert why in over.why


def test_few_looks_within_the_time_tell_nothing() -> None:
    """A machine that is too busy to look is too busy to have settled."""
    settling = Settling(0.0)
    for when_s in (0.0, 6.0, 12.0, 18.0):
        assert isinstance(settling.look(when_s, DESKTOP, LIMIT_S), Waiting)


def test_a_limit_that_is_changed_meanwhile_counts() -> None:
    settling = Settling(100.0)
    moving = replace(DESKTOP, foreign_bytes={CARD: 0}), replace(DESKTOP, foreign_bytes={CARD: 900 * MIB})
    first = settling.look(100.0, moving[0], LIMIT_S)
    assert isinstance(first, Waiting) and first.remaining_s == LIMIT_S
    assert first.why == "what other programs hold of the card has to stand still for 5 s"
    assert isinstance(settling.look(101.0, moving[1], 10.0), Waiting)
    assert isinstance(settling.look(102.0, moving[0], 2.0), Over)


# --- every history ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Look:
    """After so many seconds this is seen."""

    after_s: float
    seen: Seen


MEMORY = st.dictionaries(
    st.sampled_from([CARD, OTHER]),
    st.sampled_from([0, 40, 64, 65, 130, 2000]).map(lambda mib: mib * MIB),
    max_size=2,
)
SEEN = st.builds(
    Seen,
    st.sampled_from([Target.ACTIVE, Target.ACTIVE, *Target]),
    st.sampled_from([OWN, OLD, GREETER, CONSOLE, SeatScene(), SeatScene(display_manager=True), IDLE, None]),
    MEMORY,
    st.booleans(),
)
PIECES = st.lists(
    st.tuples(SEEN, st.lists(st.sampled_from([0.5, 1.0, 1.0, 1.0, 2.0, 7.0]), min_size=1, max_size=12)),
    min_size=1,
    max_size=8,
).map(lambda pieces: [Look(after_s, seen) for seen, steps in pieces for after_s in steps])


def steady(samples: Sequence[tuple[float, Mapping[str, int]]]) -> bool:
    """By the rule, without any memory of what came before: looked at often, long enough, nothing has moved."""
    now_s, cards = samples[-1][0], samples[-1][1].keys()
    old = [at for at, (when_s, _) in enumerate(samples) if now_s - when_s >= STEADY_S]
    window = samples[old[-1] :] if old else ()
    return (
        len(window) >= LEAST_SAMPLES
        and bool(cards)
        and all(held.keys() == cards for _, held in window)
        and all(
            max(held[card] for _, held in window) - min(held[card] for _, held in window) <= TOLERANCE_BYTES
            for card in cards
        )
    )


@given(PIECES, st.sampled_from([0.5, 5.0, 20.0, 60.0]))
def test_it_ends_in_time_and_settled_only_where_nothing_has_moved(
    history: Sequence[Look], limit_s: float
) -> None:
    settling, now_s = Settling(0.0), 0.0
    since_memory: list[tuple[float, Mapping[str, int]]] = []
    for look in history:
        now_s += look.after_s
        found = settling.look(now_s, look.seen, limit_s)
        is_memory = isinstance(found, Waiting) and found.awaited is Awaited.MEMORY
        is_late = isinstance(found, Over) and found.ending is Ending.LIMIT
        if is_memory or is_late or (isinstance(found, Over) and found.ending is Ending.SETTLED):
            since_memory.append((now_s, look.seen.foreign_bytes))
        else:
            since_memory.clear()
        match found:
            case Waiting():
                assert now_s < limit_s and 0 < found.remaining_s <= limit_s
                assert not (is_memory and steady(since_memory))
            case Over(ending=Ending.SETTLED):
                assert steady(since_memory)
                return
            case Over(ending=Ending.LIMIT):
                assert now_s >= limit_s
                return
            case Over():
                assert found.ending is Ending.NO_DESKTOP
                assert look.seen.target is Target.ABSENT and not look.seen.is_certain
                seats = look.seen.seats or SeatScene()
                assert not seats.own_desktop and not seats.in_front
                assert not seats.may_come or now_s >= GRACE_S or seats is IDLE
                return


@given(SEEN.filter(lambda seen: bool(seen.foreign_bytes)), st.integers(0, 20))
def test_what_does_not_change_any_more_settles_or_is_none_long_before_the_limit(
    seen: Seen, moves_s: int
) -> None:
    moving = [replace(seen, foreign_bytes={CARD: each * 100 * MIB}) for each in range(moves_s)]
    still = for_s(2000, seen if seen.target is not Target.COMING else replace(seen, target=Target.ACTIVE))
    when_s, over = end([*moving, *still], limit_s=1000.0)
    assert over.ending in {Ending.SETTLED, Ending.NO_DESKTOP}
    assert when_s <= moves_s + max(GRACE_S, TARGET_S) + STEADY_S
