"""Engines that hang and engines that are slow: what the real one said, and any course of work on a made-up clock."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lllm3090d.serving.hangs import (
    LEAST_S,
    LEAST_UNMEASURED_S,
    MARGIN,
    MOST_BETWEEN_LOOKS_S,
    SPINNING_LEAST_S,
    CardLook,
    HangTrack,
    Look,
    Pace,
    SlotLook,
    Step,
    Verdict,
    next_step,
    slots_of,
)

pytestmark = pytest.mark.unit

REAL: dict[str, Any] = json.loads(
    (Path(__file__).parent.parent / "data" / "slots_b11434.json").read_text(encoding="utf-8")
)
BATCH = 2048
QUICK = Pace(BATCH, prompt_tokens_per_s=1000.0, token_s=0.02)
SLOW = Pace(BATCH, prompt_tokens_per_s=20.0, token_s=0.5)
UNMEASURED = Pace(BATCH)
SPINS, WORKS = CardLook(100, 0), CardLook(100, 45)


def body(document: object) -> bytes:
    return json.dumps(document).encode()


def prompt(computed: int, *, task: int = 1, generated: int = 0) -> tuple[SlotLook, ...]:
    return (SlotLook(0, task, True, computed + BATCH, computed, generated), SlotLook(1, None, False))


IDLE = (SlotLook(0, 1, False), SlotLook(1, None, False))


def watch(*looks: Look) -> HangTrack:
    track = HangTrack()
    for look in looks:
        track = track.after(look)
    return track


def frozen(seconds: int, *, slots: tuple[SlotLook, ...] | None, card: CardLook | None = None) -> list[Look]:
    """Looks once a second at an engine that shows the same."""
    return [Look(float(at), slots, card=card) for at in range(seconds + 1)]


# --- what the real engine says -----------------------------------------------------------------------------


@pytest.mark.parametrize("work", ["long_prompt", "long_completion"])
def test_a_real_engine_at_work_is_seen_to_progress(work: str) -> None:
    looks = []
    for each in REAL[work]:
        slots = slots_of(body(each["slots"]))
        assert slots is not None
        looks.append(Look(each["at_s"], slots))
    busy = [look for look in looks if look.at_work]
    assert len(busy) > 8
    track = watch(*busy)
    assert len(track.steps_s) >= 8
    assert not track.verdict(Pace(512, 60.0, 0.03)).stalled
    # What had been computed and generated never falls while it works on one request.
    for before, after in itertools.pairwise(busy):
        assert before.slots is not None
        assert after.slots is not None
        for old, new in zip(before.slots, after.slots, strict=True):
            if old.task == new.task and old.busy and new.busy:
                assert (old.computed_tokens, old.generated_tokens) <= (
                    new.computed_tokens,
                    new.generated_tokens,
                )


def test_the_counters_of_a_real_engine_stand_still_during_a_prompt() -> None:
    """Why ``/metrics`` is not enough to tell a hang."""
    during = [
        each["metrics"]["prompt_tokens_total"]
        for each in REAL["long_prompt"]
        if any(slot["is_processing"] and not slot["next_token"][0]["n_decoded"] for slot in each["slots"])
    ]
    assert len(during) > 10
    assert set(during) == {0.0}


def test_real_slots_at_rest() -> None:
    assert slots_of(body(REAL["fresh"])) == (SlotLook(0, None, False), SlotLook(1, None, False))
    after = slots_of(body(REAL["after"]))
    assert after is not None
    assert not Look(0.0, after).at_work


BUSY = {
    "id": 0,
    "id_task": 3,
    "is_processing": True,
    "n_prompt_tokens_processed": 5,
    "next_token": [{"n_decoded": 2}],
}


@pytest.mark.parametrize(
    ("document", "looks"),
    [
        ([BUSY], (SlotLook(0, 3, True, 0, 5, 2),)),
        ([BUSY | {"next_token": {"n_decoded": 2}}], (SlotLook(0, 3, True, 0, 5, 2),)),
        ([BUSY | {"next_token": []}], (SlotLook(0, 3, True, 0, 5, 0),)),
        # A build that tells nothing of progress cannot be judged while it works.
        ([{"id": 0, "is_processing": True}], None),
        ([{key: BUSY[key] for key in BUSY if key != "n_prompt_tokens_processed"}], None),
        ([{"id": 0, "is_processing": False}], (SlotLook(0, None, False),)),
        ([BUSY, {"id": 1}], None),
        ([BUSY | {"id": "0"}], None),
        ([BUSY | {"id": True}], None),
        ([BUSY | {"next_token": [7]}], None),
        ([BUSY | {"next_token": [{"n_decoded": -1}]}], None),
        ([BUSY | {"n_prompt_tokens_processed": "5"}], None),
        ([BUSY | {"n_prompt_tokens_processed": 1.5}], None),
        ([], None),
        ({}, None),
        ([7], None),
    ],
)
def test_what_slots_say(document: object, looks: tuple[SlotLook, ...] | None) -> None:
    assert slots_of(body(document)) == looks


@pytest.mark.parametrize("text", [b"", b"{", b"\xff", b"[" * 100_000])
def test_an_answer_that_is_no_document(text: bytes) -> None:
    assert slots_of(text) is None


# --- verdicts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [prompt(4096), prompt(100, generated=7), None])
def test_a_frozen_engine_is_found_at_its_patience(slots: tuple[SlotLook, ...] | None) -> None:
    assert not watch(*frozen(int(LEAST_S), slots=slots)).verdict(QUICK).stalled
    verdict = watch(*frozen(int(LEAST_S) + 1, slots=slots)).verdict(QUICK)
    assert verdict == Verdict(True, LEAST_S + 1, LEAST_S, verdict.reason)
    assert ("does not answer" in verdict.reason) is (slots is None)


def test_a_slow_engine_has_more_patience() -> None:
    patience = MARGIN * BATCH / 20.0
    assert HangTrack().patience_s(SLOW) == patience
    looks = frozen(int(patience) + 1, slots=prompt(0))
    assert not watch(*looks[:-1]).verdict(SLOW).stalled
    assert watch(*looks).verdict(SLOW).stalled
    assert not watch(*looks).verdict(replace(SLOW, extra_s=60.0)).stalled
    assert HangTrack().patience_s(UNMEASURED) == LEAST_UNMEASURED_S
    assert HangTrack().patience_s(replace(QUICK, extra_s=60.0)) == LEAST_S + 60.0


def test_an_idle_engine_may_rest() -> None:
    assert not watch(*frozen(5000, slots=IDLE)).verdict(QUICK).stalled
    resumed = watch(*frozen(5000, slots=IDLE), Look(5001.0, prompt(0)), Look(5002.0, prompt(0)))
    assert resumed.verdict(QUICK).idle_s == 1.0


def test_requests_that_no_slot_takes() -> None:
    looks = [Look(float(at), IDLE, waiting=2) for at in range(130)]
    verdict = watch(*looks).verdict(QUICK)
    assert verdict.stalled
    assert "2 requests wait" in verdict.reason
    assert not watch(*looks, Look(130.0, IDLE)).verdict(QUICK).stalled


def test_a_new_request_is_progress_and_a_slot_elsewhere_too() -> None:
    looks = frozen(100, slots=prompt(0))
    assert watch(*looks, Look(101.0, prompt(0, task=2))).idle_s == 0
    other = (prompt(0)[0], SlotLook(1, 9, True, 1, 1, 1))
    assert watch(*looks, Look(101.0, other)).idle_s == 0
    assert watch(*looks, Look(101.0, None), Look(102.0, prompt(0))).idle_s == 102.0


def test_a_card_that_spins_shortens_it_and_one_that_works_does_not() -> None:
    seconds = int(SPINNING_LEAST_S) + 1
    assert not watch(*frozen(seconds, slots=prompt(0), card=WORKS)).verdict(QUICK).stalled
    verdict = watch(*frozen(seconds, slots=prompt(0), card=SPINS)).verdict(QUICK)
    assert verdict.stalled
    assert "without touching its memory" in verdict.reason
    # One look at which it did touch it is enough to doubt that.
    looks = frozen(seconds, slots=prompt(0), card=SPINS)
    looks[7] = replace(looks[7], card=WORKS)
    assert not watch(*looks).verdict(QUICK).stalled
    looks[7] = replace(looks[7], card=None)
    assert not watch(*looks).verdict(QUICK).stalled


def test_time_that_nobody_saw_hardly_counts() -> None:
    """The daemon was stopped, or the machine slept on a clock that goes on."""
    track = watch(Look(0.0, prompt(0)), Look(50_000.0, prompt(0)))
    assert track.idle_s == MOST_BETWEEN_LOOKS_S
    assert not track.verdict(QUICK).stalled


def test_the_clock_of_looks_goes_forward() -> None:
    with pytest.raises(ValueError, match="after one"):
        watch(Look(2.0, IDLE), Look(1.0, IDLE))


def test_a_long_step_is_forgotten_after_quick_ones() -> None:
    track = HangTrack().after(Look(0.0, prompt(0)))
    for at in range(20, 501, 20):  # steps of 100 s
        track = track.after(Look(float(at), prompt(at // 100)))
    assert track.patience_s(QUICK) == MARGIN * 100.0
    for token in range(1, 17):
        track = track.after(Look(500.0 + token, prompt(5, generated=token)))
    assert track.patience_s(QUICK) == LEAST_S


def test_first_it_is_reported_then_restarted() -> None:
    fine, stalled = Verdict(False, 5.0, 120.0), Verdict(True, 121.0, 120.0)
    assert next_step(fine, reported=True) is Step.NOTHING
    assert next_step(stalled, reported=False) is Step.REPORT
    assert next_step(stalled, reported=True) is Step.NOTHING
    lasting = replace(stalled, idle_s=241.0)
    assert next_step(lasting, reported=False) is Step.REPORT
    assert next_step(lasting, reported=True) is Step.RESTART


# --- any course of work ------------------------------------------------------------------------------------

PACES = st.builds(
    Pace,
    batch_tokens=st.integers(32, 8192),
    prompt_tokens_per_s=st.none() | st.floats(10.0, 5000.0),
    token_s=st.none() | st.floats(0.001, 10.0),
    extra_s=st.floats(0.0, 300.0),
)
CARDS = st.none() | st.builds(CardLook, st.integers(0, 100), st.integers(0, 100)) | st.just(SPINS)


@settings(deadline=None, max_examples=50)
@given(PACES, st.lists(st.tuples(st.floats(0.01, 1.0), st.integers(1, 500), CARDS), max_size=25), st.data())
def test_a_prompt_that_progresses_however_slowly_is_never_stalled(
    pace: Pace, steps: list[tuple[float, int, CardLook | None]], data: st.DataObject
) -> None:
    """Each step takes a share of what patience there is then, and brings as little as one token."""
    now, computed = 0.0, 0
    track = HangTrack().after(Look(now, prompt(0)))
    for share, gain, card in steps:
        until = now + share * track.patience_s(pace)
        while now < until:
            now = min(until, now + data.draw(st.sampled_from([5.0, 20.0, MOST_BETWEEN_LOOKS_S])))
            arrived = now >= until
            # Between two batches it answers, else perhaps not.
            slots = (
                prompt(computed + gain) if arrived else data.draw(st.sampled_from([None, prompt(computed)]))
            )
            track = track.after(Look(now, slots, card=card))
            assert not track.verdict(pace).stalled
        computed += gain


@settings(deadline=None, max_examples=50)
@given(
    PACES,
    st.lists(st.floats(0.1, 30.0), max_size=20),
    st.lists(st.floats(2.0, MOST_BETWEEN_LOOKS_S), min_size=1, max_size=10),
    st.booleans(),
)
def test_one_that_freezes_is_found_within_the_bound(
    pace: Pace, earlier: list[float], rhythm: list[float], answers: bool
) -> None:
    now, computed = 0.0, 0
    track = HangTrack().after(Look(now, prompt(0)))
    for pause in earlier:
        now, computed = now + pause, computed + 1
        track = track.after(Look(now, prompt(computed)))
    frozen_at_s, bound_s = now, track.patience_s(pace)
    expected_s = MARGIN * max([pace.step_s or 0.0, *earlier])
    assert bound_s <= max(LEAST_UNMEASURED_S, expected_s) + pace.extra_s
    found = None
    for number in range(1_000_000):
        now += rhythm[number % len(rhythm)]
        track = track.after(Look(now, prompt(computed) if answers else None))
        if track.verdict(pace).stalled:
            found = now
            break
    assert found is not None
    assert bound_s < found - frozen_at_s <= bound_s + 2 * max(rhythm)


def test_a_prompt_of_100_000_tokens_on_a_slow_machine_is_left_alone() -> None:
    """Batches of 2048 tokens that take from 100 s to 900 s, at a speed that was measured on short prompts."""
    pace, now, track = Pace(BATCH, prompt_tokens_per_s=20.0, token_s=0.3), 0.0, HangTrack()
    for number in range(49):
        for _ in range(int(10 + 80 * number / 48)):
            now += 10.0
            track = track.after(Look(now, None))
            assert not track.verdict(pace).stalled
        now += 1.0
        track = track.after(Look(now, prompt(BATCH * (number + 1))))
    assert now > 20_000
