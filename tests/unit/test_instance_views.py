"""Instances and waiting loads as clients see them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from lllm3090d.planning.units import MIB
from lllm3090d.serving.drains import Drain
from lllm3090d.serving.hangs import Verdict
from lllm3090d.serving.instance import InstanceState
from lllm3090d.serving.ledger import Ledger, Share
from lllm3090d.serving.observation import HOST
from lllm3090d.serving.views import instance_view, pending_view
from lllm3090d.serving.waiting import Waiting
from tests.fakes.card_scenes import NOW_S, QWEN, Desk, instance, item

pytestmark = pytest.mark.unit

SINCE = "2026-11-30T11:20:00Z"


def test_what_it_holds_of_each_memory() -> None:
    desk = Desk()
    view = instance_view(desk.instances["q1"], desk.ledger, SINCE, NOW_S)
    assert (view.reserved_bytes, view.measured_bytes) == (11868 * MIB, 11900 * MIB)
    assert [(each.where, each.reserved_bytes // MIB, each.age_s) for each in view.reservations] == [
        ("GPU-1", 11868, 870.0),
        ("host", 2648, 870.0),
    ]
    assert all(each.items == () for each in view.reservations)


def test_a_model_on_several_cards_is_told_by_their_sum() -> None:
    ledger, made = Ledger(), instance("divided", "d1", QWEN)
    ledger.hold(
        "d1", "divided", [Share("GPU-1", (item("weights", 5),)), Share("GPU-2", (item("weights", 7),))]
    )
    assert instance_view(made, ledger, SINCE, NOW_S).measured_bytes is None
    ledger.confirm("d1", {"GPU-2": 9 * MIB})
    view = instance_view(made, ledger, SINCE, NOW_S)
    assert (view.reserved_bytes, view.measured_bytes) == (12 * MIB, 9 * MIB)


def test_where_host_memory_is_the_card_it_is_the_reservation() -> None:
    ledger, made = Ledger(), instance("small", "h1", QWEN)
    ledger.hold("h1", "small", [Share(HOST, (item("weights", 5),))])
    assert instance_view(made, ledger, SINCE, NOW_S).reserved_bytes == 5 * MIB


def test_one_that_has_ended_holds_nothing() -> None:
    view = instance_view(instance("dead", "x", QWEN, InstanceState.FAILED), Ledger(), SINCE, NOW_S)
    assert (view.reserved_bytes, view.measured_bytes, view.reservations, view.idle_s) == (0, None, (), None)


@pytest.mark.parametrize(
    ("changes", "idle_s"),
    [
        ({}, None),  # never ready
        ({"ready_since_s": NOW_S - 60}, 60.0),
        ({"ready_since_s": NOW_S - 60, "last_used_s": NOW_S - 5}, 5.0),
        ({"last_used_s": NOW_S - 5, "busy": True}, None),
        ({"last_used_s": NOW_S - 5, "busy": False}, 5.0),
        ({"last_used_s": NOW_S - 5, "leases": {"a"}}, None),
        ({"last_used_s": NOW_S - 5, "state": InstanceState.STOPPING}, None),
        ({"last_used_s": NOW_S + 5}, 0.0),  # the clock is read a moment later elsewhere
    ],
)
def test_since_when_it_is_idle(changes: dict[str, object], idle_s: float | None) -> None:
    made = instance("x", "x", QWEN)
    for name, value in changes.items():
        setattr(made, name, value)
    view = instance_view(made, Ledger(), SINCE, NOW_S)
    assert view.idle_s == idle_s
    assert view.busy == changes.get("busy")


def test_pins_and_leases() -> None:
    made = instance("x", "x", QWEN)
    made.pinned, made.leases = True, {"a", "b"}
    view = instance_view(made, Ledger(), SINCE, NOW_S)
    assert (view.pinned, view.leases) == (True, 2)


@pytest.mark.parametrize(
    ("state", "changes", "told"),
    [
        (InstanceState.READY, {}, (0, None, None, None)),
        (InstanceState.READY, {"attempt": 2}, (2, None, None, None)),
        (InstanceState.FAILED, {}, (0, None, None, None)),  # nobody starts it again
        (
            InstanceState.FAILED,
            {"attempt": 1, "next_attempt": 2, "retry_at_s": NOW_S + 4.25},
            (2, 4.25, None, None),
        ),
        (
            InstanceState.FAILED,
            {"next_attempt": 1, "retry_at_s": NOW_S - 1},
            (1, 0.0, None, None),
        ),  # kept back
        (InstanceState.FAILED, {"next_attempt": 1}, (1, None, None, None)),  # its start waits for room
        (
            InstanceState.LATCHED,
            {"attempt": 4, "latch_reason": "too often", "way_out": "reset it"},
            (4, None, "too often", "reset it"),
        ),
    ],
)
def test_what_becomes_of_one_that_failed(
    state: InstanceState, changes: dict[str, object], told: tuple[object, ...]
) -> None:
    made = instance("a", "a1", QWEN, state)
    for key, value in changes.items():
        setattr(made, key, value)
    view = instance_view(made, Ledger(), SINCE, NOW_S)
    assert (view.attempt, view.retry_in_s, view.latch_reason, view.way_out) == told


def test_who_waits() -> None:
    waiting = cast(
        Waiting,
        SimpleNamespace(
            name="Gemma", token="a-token-of-test", why="room", since_s=NOW_S - 3, deadline_s=NOW_S + 7
        ),
    )
    view = pending_view(waiting, NOW_S)
    assert (view.name, view.why, view.waiting_s, view.remaining_s) == ("Gemma", "room", 3.0, 7.0)
    assert pending_view(waiting, NOW_S + 100).remaining_s == 0.0


@pytest.mark.parametrize(
    "state", [InstanceState.FAILED, InstanceState.LATCHED, InstanceState.GONE, InstanceState.RELEASING]
)
def test_one_without_a_process_has_no_pid_and_is_not_busy(state: InstanceState) -> None:
    made = instance("dead", "x", QWEN, state)
    made.main_pid, made.busy = 4711, True
    view = instance_view(made, Ledger(), SINCE, NOW_S)
    assert (view.main_pid, view.busy) == (None, None)
    made.state = InstanceState.STOPPING
    view = instance_view(made, Ledger(), SINCE, NOW_S)
    assert (view.main_pid, view.busy) == (4711, True)


def test_one_that_drains_tells_how_long_it_may() -> None:
    made = instance("going", "g1", QWEN, InstanceState.STOPPING)
    made.drain = Drain(10.0, NOW_S + 4.0, in_flight=2)
    drain = instance_view(made, Ledger(), SINCE, NOW_S).drain
    assert drain is not None
    assert (drain.in_flight, drain.limit_s, drain.remaining_s) == (2, 10.0, 4.0)
    late = instance_view(made, Ledger(), SINCE, NOW_S + 60).drain
    assert late is not None
    assert late.remaining_s == 0


@pytest.mark.parametrize(("restarts", "left_s"), [(True, 110.0), (False, None)])
def test_one_that_is_stalled_tells_why_and_what_comes_of_it(restarts: bool, left_s: float | None) -> None:
    made = instance("hangs", "h1", QWEN, InstanceState.STALLED)
    made.stall = Verdict(True, 130.0, 120.0, "no slot computes")
    stall = instance_view(made, Ledger(), SINCE, NOW_S, restarts_hung=restarts).stall
    assert stall is not None
    assert (stall.reason, stall.stalled_s, stall.patience_s) == ("no slot computes", 130.0, 120.0)
    assert stall.restart_in_s == left_s
    made.state = InstanceState.STOPPING
    assert instance_view(made, Ledger(), SINCE, NOW_S).stall is None
