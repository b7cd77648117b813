"""Whom to evict: the least recently used that make room, and of those none that could stay."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lllm3090d.serving.admission import Rooms
from lllm3090d.serving.room_table import Point, RoomTable
from lllm3090d.serving.victims import Victim, fewest_victims

pytestmark = pytest.mark.unit


def table_of(sizes: Mapping[str, int]) -> RoomTable:
    """One card that gives nothing but what these runs free."""
    return RoomTable(
        ("card",), Rooms({}, None), (0,) * 4, {run: (size, size, 0, 0) for run, size in sizes.items()}
    )


def victims(*figures: tuple[str, float, int]) -> list[Victim]:
    return [Victim(run, run, used_s, size) for run, used_s, size in figures]


def chosen_of(given: Sequence[Victim], need: int) -> list[str]:
    table = table_of({each.run: each.moved_bytes for each in given})
    return [each.run for each in fewest_victims(given, table, lambda point: point[0] >= need)]


@pytest.mark.parametrize(
    ("need", "chosen"),
    [
        (1, ["old"]),
        (4, ["old"]),
        (5, ["old", "middle"]),
        (7, ["old", "middle"]),
        (8, ["middle", "new"]),  # the oldest could stay: without it there was room as well
        (10, ["middle", "new"]),
        (11, ["old", "new"]),
        (12, ["old", "middle", "new"]),
        (14, ["old", "middle", "new"]),
        (15, []),
    ],
)
def test_the_least_recently_used_go_and_none_that_could_stay(need: int, chosen: list[str]) -> None:
    assert chosen_of(victims(("new", 30.0, 7), ("old", 10.0, 4), ("middle", 20.0, 3)), need) == chosen


def test_of_those_that_could_stay_the_largest_does() -> None:
    assert chosen_of(victims(("a", 1.0, 3), ("b", 2.0, 5), ("c", 3.0, 9)), 10) == ["a", "c"]


def test_nobody_goes_where_that_does_not_help() -> None:
    asked: list[Point] = []

    def never(point: Point) -> bool:
        asked.append(point)
        return False

    table = table_of({"a": 3, "b": 5})
    assert fewest_victims(victims(("a", 1.0, 3), ("b", 2.0, 5)), table, never) == ()
    assert asked == [(8, 0)]
    assert fewest_victims((), table, never) == ()


Figures = list[tuple[int, int, int]]
figures = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9), st.integers(0, 9)), max_size=12)


def plainly(given: Sequence[Victim], makes_room: Callable[[frozenset[str]], bool]) -> list[str]:
    """By its definition: the shortest beginning, and then without each that is not missed, the largest first."""
    ordered = sorted(given, key=lambda each: (each.last_used_s, each.name))
    beginnings = (ordered[:count] for count in range(1, len(ordered) + 1))
    chosen = next((each for each in beginnings if makes_room(frozenset(v.run for v in each))), [])
    for each in sorted(chosen[:-1], key=lambda victim: -victim.moved_bytes):
        rest = [other for other in chosen if other is not each]
        chosen = rest if makes_room(frozenset(v.run for v in rest)) else chosen
    return [each.run for each in chosen]


@given(figures, st.integers(0, 60), st.integers(0, 60))
def test_whoever_goes_is_needed_on_each_of_two_cards(given: Figures, need: int, other_need: int) -> None:
    models = [Victim(str(n), str(n), float(used), one + two) for n, (used, one, two) in enumerate(given)]
    sizes = {str(n): (one, two) for n, (_, one, two) in enumerate(given)}
    table = RoomTable(
        ("one", "two"),
        Rooms({}, None),
        (0,) * 6,
        {run: (one, one, two, two, 0, 0) for run, (one, two) in sizes.items()},
    )

    def makes_room(gone: frozenset[str]) -> bool:
        return (
            sum(sizes[run][0] for run in gone) >= need and sum(sizes[run][1] for run in gone) >= other_need
        )

    chosen = fewest_victims(models, table, lambda point: point[0] >= need and point[1] >= other_need)
    gone = frozenset(each.run for each in chosen)
    assert [each.run for each in chosen] == plainly(models, makes_room)
    if not chosen:
        assert not models or not makes_room(frozenset(sizes))
        return
    assert makes_room(gone)
    if len(gone) > 1 and (need or other_need):
        assert all(not makes_room(gone - {run}) for run in gone)
    assert [each.last_used_s for each in chosen] == sorted(each.last_used_s for each in chosen)
