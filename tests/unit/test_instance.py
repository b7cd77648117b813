"""The life of a model as a graph: total, reachable, and with groups of states that do not overlap."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path

import pytest

from lllm3090d.serving import instance
from lllm3090d.serving.instance import (
    ENDED,
    ON_THE_WAY_DOWN,
    ON_THE_WAY_UP,
    SERVING,
    TRANSITIONS,
    InstanceState,
)
from lllm3090d.wire import EventKind, LoadLineKind

pytestmark = pytest.mark.unit

S = InstanceState
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "events.md"
every_state = pytest.mark.parametrize("state", list(S))


def reachable(state: InstanceState) -> set[InstanceState]:
    seen, todo = {state}, [state]
    while todo:
        for following in TRANSITIONS[todo.pop()] - seen:
            seen.add(following)
            todo.append(following)
    return seen


def test_every_state_has_its_transitions() -> None:
    assert set(TRANSITIONS) == set(S)
    assert all(following <= set(S) for following in TRANSITIONS.values())


@every_state
def test_no_state_follows_itself(state: InstanceState) -> None:
    assert state not in TRANSITIONS[state]


def test_every_state_is_reached_from_planned() -> None:
    assert reachable(S.PLANNED) == set(S)


@every_state
def test_every_life_can_end(state: InstanceState) -> None:
    assert S.GONE in reachable(state)


def test_gone_is_the_only_end() -> None:
    assert [state for state in S if not TRANSITIONS[state]] == [S.GONE]


def test_the_table_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        TRANSITIONS[S.GONE] = frozenset({S.READY})  # type: ignore[index]  # the point of the test


def test_the_groups_do_not_overlap_and_leave_out_only_what_waits() -> None:
    groups = (SERVING, ON_THE_WAY_UP, ON_THE_WAY_DOWN, ENDED)
    assert all(one.isdisjoint(other) for one, other in combinations(groups, 2))
    assert set(S) - frozenset().union(*groups) == {S.PLANNED, S.QUEUED}


def test_what_has_ended_never_runs_again() -> None:
    for state in ENDED:
        assert reachable(state) <= ENDED


def test_what_is_on_its_way_down_never_serves_again() -> None:
    for state in ON_THE_WAY_DOWN:
        assert reachable(state).isdisjoint(SERVING | ON_THE_WAY_UP)


def test_nothing_serves_without_a_reservation() -> None:
    without = {state: following - {S.RESERVED} for state, following in TRANSITIONS.items()}
    seen, todo = {S.PLANNED}, [S.PLANNED]
    while todo:
        for following in without[todo.pop()] - seen:
            seen.add(following)
            todo.append(following)
    assert seen.isdisjoint(SERVING | {S.STARTING, S.LOADING})


@pytest.mark.parametrize("state", sorted(SERVING | ON_THE_WAY_UP - {S.RESERVED}))
def test_whatever_has_a_unit_can_be_stopped_and_can_die(state: InstanceState) -> None:
    assert {S.STOPPING, S.RELEASING} <= TRANSITIONS[state]


@pytest.mark.parametrize("state", sorted(set(S) - {S.FAILED, S.GONE, S.LATCHED}))
def test_whatever_lives_can_fail(state: InstanceState) -> None:
    assert S.FAILED in TRANSITIONS[state]


# --- the reference -----------------------------------------------------------------------------------------


def first_cells(heading: str) -> list[str]:
    """What stands in backquotes in the first column of the tables below a heading of the reference."""
    section = PAGE.read_text().split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)


def test_the_reference_lists_every_state_with_the_meaning_of_the_code() -> None:
    source = Path(instance.__file__).read_text()
    page = PAGE.read_text()
    assert first_cells("States") == [state.value for state in S]
    for state in S:
        comment = re.search(rf'^    {state.name} = "{state.value}"  # (.+)$', source, re.MULTILINE)
        assert comment, state
        assert f"| `{state.value}` | {comment[1]}" in page


def test_the_reference_tells_what_may_follow_each_state() -> None:
    section = PAGE.read_text().split("\n## States\n", 1)[1].split("\n## ", 1)[0]
    for state in S:
        row = next(line for line in section.splitlines() if line.startswith(f"| `{state.value}` |"))
        following = row.rstrip(" |").rsplit("|", 1)[1]
        assert set(following.replace(",", " ").split()) - {"-"} == {str(s) for s in TRANSITIONS[state]}


def test_the_reference_lists_every_kind_of_event() -> None:
    assert first_cells("Kinds") == [kind.value for kind in EventKind]


def test_the_reference_lists_every_kind_of_line_of_a_load() -> None:
    api = PAGE.with_name("http-api.md").read_text()
    section = api.split("\n### `POST /v1/load`", 1)[1].split("\n### ", 1)[0]
    assert re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE) == [kind.value for kind in LoadLineKind]
