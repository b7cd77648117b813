"""When a model is started again: the rules one by one, and any history on a made-up clock."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lllm3090d.engines.crash_causes import KINDS, CrashCause, Retry
from lllm3090d.serving.restarts import Again, End, Latch, RestartPolicy

pytestmark = pytest.mark.unit

FAULT, OOM = CrashCause.ENGINE_FAULT, CrashCause.OUT_OF_DEVICE_MEMORY
POLICY = RestartPolicy(base_s=2.0, factor=2.0, cap_s=60.0, most_ends=5, window_s=1800.0, healthy_s=600.0)


def run(policy: RestartPolicy, *ends: End) -> Again | Latch:
    return policy.after("qwen", ends[:-1], ends[-1])


def test_the_delay_grows_to_its_longest() -> None:
    ends = [End(float(10 * number), FAULT, served_s=1.0) for number in range(8)]
    patient = replace(POLICY, most_ends=100)
    delays = [run(patient, *ends[: count + 1]) for count in range(8)]
    assert [each.delay_s for each in delays if isinstance(each, Again)] == [2, 4, 8, 16, 32, 60, 60, 60]
    assert [each.attempt for each in delays if isinstance(each, Again)] == list(range(1, 9))


def test_so_many_ends_within_the_window_latch() -> None:
    ends = [End(float(100 * number), FAULT, served_s=1.0) for number in range(5)]
    assert isinstance(run(POLICY, *ends[:4]), Again)
    latch = run(POLICY, *ends)
    assert isinstance(latch, Latch)
    assert "ended 5 times" in latch.reason
    assert "lllm3090ctl reset qwen" in latch.way_out


def test_ends_that_are_far_apart_do_not_latch() -> None:
    ends = [End(500.0 * number, FAULT, served_s=100.0) for number in range(20)]
    assert isinstance(run(POLICY, *ends), Again)


def test_starts_that_never_serve_latch_however_slow_they_are() -> None:
    ends = [End(3000.0 * number, CrashCause.UNKNOWN) for number in range(5)]
    assert isinstance(run(POLICY, *ends[:4]), Again)
    assert isinstance(run(POLICY, *ends), Latch)


def test_a_run_that_served_for_long_begins_a_new_row() -> None:
    crashes = [End(float(number), FAULT) for number in range(4)]
    again = run(POLICY, *crashes, End(700.0, FAULT, served_s=600.0))
    assert again == Again(2.0, 1)
    assert run(POLICY, *crashes, End(700.0, FAULT, served_s=600.0), End(701.0, FAULT)) == Again(4.0, 2)
    assert isinstance(run(POLICY, *crashes, End(700.0, FAULT, served_s=599.0)), Latch)


@pytest.mark.parametrize("cause", [each for each in CrashCause if KINDS[each].retry is Retry.NEVER])
def test_what_cannot_be_helped_latches_at_once(cause: CrashCause) -> None:
    latch = run(POLICY, End(0.0, cause, served_s=10_000.0))
    assert isinstance(latch, Latch)
    assert KINDS[cause].title in latch.reason
    assert KINDS[cause].advice in latch.way_out


def test_out_of_device_memory_is_tried_once_with_less() -> None:
    first = run(POLICY, End(0.0, OOM))
    assert first == Again(2.0, 1, smaller=True)
    assert isinstance(run(POLICY, End(0.0, OOM), End(50.0, OOM)), Latch)
    # Also with another end between; not after a run that served for long.
    assert isinstance(run(POLICY, End(0.0, OOM), End(1.0, FAULT), End(50.0, OOM)), Latch)
    assert run(POLICY, End(0.0, OOM), End(900.0, FAULT, served_s=800.0), End(950.0, OOM)) == Again(
        4.0, 2, smaller=True
    )


def test_a_name_that_a_shell_would_take_apart_is_quoted() -> None:
    latch = POLICY.after("my model; rm", [], End(0.0, CrashCause.BAD_FILE))
    assert isinstance(latch, Latch)
    assert latch.way_out.endswith("lllm3090ctl reset 'my model; rm'")


@pytest.mark.parametrize(
    "bad",
    [
        {"base_s": 0.0},
        {"base_s": 61.0},
        {"factor": 0.5},
        {"cap_s": float("inf")},
        {"cap_s": float("nan")},
        {"most_ends": 0},
        {"window_s": 0.0},
        {"healthy_s": 0.0},
    ],
)
def test_a_policy_that_never_waits_or_never_ends_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must"):
        replace(POLICY, **bad)


CAUSES = st.sampled_from(CrashCause)
RUNS = st.lists(
    st.tuples(CAUSES, st.floats(0.1, 5000.0), st.just(0.0) | st.floats(0.0, 2000.0)), min_size=1, max_size=40
)
POLICIES = st.builds(
    RestartPolicy,
    base_s=st.floats(0.1, 10.0),
    factor=st.floats(1.0, 8.0),
    cap_s=st.floats(10.0, 1000.0),
    most_ends=st.integers(1, 8),
    window_s=st.floats(10.0, 5000.0),
    healthy_s=st.floats(1.0, 1500.0),
)


def live(
    policy: RestartPolicy, runs: list[tuple[CrashCause, float, float]]
) -> list[tuple[End, Again | Latch]]:
    """Runs one after the other, each started when the policy says so, until it latches."""
    now, told = 0.0, []
    history: list[End] = []
    for cause, load_s, served_s in runs:
        now += load_s + served_s
        end = End(now, cause, served_s)
        decision = policy.after("m", history, end)
        told.append((end, decision))
        history.append(end)
        if isinstance(decision, Latch):
            break
        now += decision.delay_s
    return told


@given(POLICIES, RUNS)
def test_any_history(policy: RestartPolicy, runs: list[tuple[CrashCause, float, float]]) -> None:
    told = live(policy, runs)
    for end, decision in told:
        if isinstance(decision, Latch):
            assert "reset m" in decision.way_out
            continue
        assert policy.base_s <= decision.delay_s <= policy.cap_s
        assert decision.smaller is (end.cause is OOM)
        assert KINDS[end.cause].is_transient
        # Never more ends within a window than were allowed.
        recent = [
            each
            for each, _ in told
            if end.at_s - policy.window_s < each.at_s <= end.at_s and each.cause is not OOM
        ]
        since_healthy = [each for each in recent if each.served_s < policy.healthy_s]
        if end.cause is not OOM and all(each.served_s < policy.healthy_s for each, _ in told):
            assert len(since_healthy) < policy.most_ends


@given(POLICIES, st.lists(CAUSES, min_size=50, max_size=50), st.floats(0.1, 5000.0))
def test_an_engine_that_never_serves_is_latched_in_the_end(
    policy: RestartPolicy, causes: list[CrashCause], load_s: float
) -> None:
    told = live(policy, [(cause, load_s, 0.0) for cause in causes])
    assert isinstance(told[-1][1], Latch)
    # The one start with a smaller plan may come on top.
    assert len(told) <= policy.most_ends + 1


@given(POLICIES, st.integers(1, 60))
def test_an_engine_that_always_serves_for_long_is_always_started_again_at_once(
    policy: RestartPolicy, count: int
) -> None:
    assume(policy.most_ends > 1)  # else one end is enough
    told = live(policy, [(FAULT, 1.0, policy.healthy_s)] * count)
    assert [decision for _, decision in told] == [Again(policy.base_s, 1)] * count


@given(POLICIES, RUNS)
def test_within_a_row_no_delay_is_shorter_than_the_one_before(
    policy: RestartPolicy, runs: list[tuple[CrashCause, float, float]]
) -> None:
    told = live(policy, runs)
    for (_, before), (end, after) in itertools.pairwise(told):
        if isinstance(before, Again) and isinstance(after, Again) and end.served_s < policy.healthy_s:
            assert after.delay_s >= before.delay_s
            assert after.attempt == before.attempt + 1
