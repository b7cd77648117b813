"""Pressure: who is told, who goes, and that it never loops. Time is simulated."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lllm3090d.planning.units import MIB
from lllm3090d.serving.pressure import (
    LEAST_COOLDOWN_S,
    RECALL_S,
    SLACK_BYTES,
    Decision,
    ModelOnCard,
    Nothing,
    Over,
    PressureReading,
    PressureWatch,
    Unload,
    Warn,
)
from lllm3090d.settings import PressurePolicy

pytestmark = pytest.mark.unit

GIB = 1 << 30
TOTAL = 24 * GIB
RESERVE = 2400 * MIB
GRACE_S = 30.0
STEP_S = 5.0
WARN, YIELD, IGNORE = PressurePolicy.WARN, PressurePolicy.YIELD, PressurePolicy.IGNORE


def model(name: str, size_bytes: int, *, idle: bool = True, pinned: bool = False) -> ModelOnCard:
    return ModelOnCard(name, name, size_bytes, size_bytes, idle, pinned)


class Card:
    """A card with models on it and strangers beside them; looked at every few seconds."""

    def __init__(self, *models: ModelOnCard, policy: PressurePolicy = YIELD, foreign: int = GIB) -> None:
        self.watch = PressureWatch()
        self.models = {each.run: each for each in models}
        self.foreign = foreign
        self.policy = policy
        self.now_s = 0.0
        self.attributed = True

    @property
    def free(self) -> int:
        return max(0, TOTAL - self.foreign - sum(each.in_use_bytes for each in self.models.values()))

    def reading(self) -> PressureReading:
        return PressureReading(
            self.now_s,
            "GPU-1",
            self.foreign if self.attributed else None,
            self.free,
            RESERVE,
            tuple(self.models.values()),
        )

    def look(self, step_s: float = STEP_S) -> Decision:
        self.now_s += step_s
        return self.watch.look(self.reading(), self.policy, GRACE_S)

    def pass_time(self, length_s: float) -> list[Decision]:
        """What was decided meanwhile; what is to go is gone at once."""
        decided: list[Decision] = []
        for _ in range(round(length_s / STEP_S)):
            decision = self.look()
            if isinstance(decision, Unload):
                for run in decision.runs:
                    del self.models[run]
            if not isinstance(decision, Nothing):
                decided.append(decision)
        return decided


# --- what is pressure --------------------------------------------------------------------------------------


def test_a_full_card_without_growth_is_healthy() -> None:
    card = Card(model("a", 23 * GIB))
    assert card.free == 0
    assert card.pass_time(600) == []


def test_what_is_kept_for_the_desktop_may_be_taken() -> None:
    card = Card(model("a", 21 * GIB), foreign=100 * MIB)
    card.look()
    card.foreign = RESERVE
    assert card.pass_time(600) == []


def test_what_strangers_held_at_the_load_was_counted() -> None:
    card = Card(model("a", 12 * GIB), foreign=12 * GIB)
    assert card.free == 0
    assert card.pass_time(600) == []


@pytest.mark.parametrize(("growth", "is_told"), [(SLACK_BYTES - 1, False), (SLACK_BYTES, True)])
def test_growth_is_told_from_the_slack_on(growth: int, is_told: bool) -> None:
    card = Card(model("a", 12 * GIB), foreign=5 * GIB, policy=WARN)
    card.look()
    card.foreign += growth
    assert bool(card.pass_time(600)) is is_told


def test_a_warning_has_the_figures_and_comes_once() -> None:
    card = Card(model("a", 12 * GIB), policy=WARN)
    card.look()
    card.foreign = RESERVE + 3 * GIB
    (warning,) = card.pass_time(3600)
    assert isinstance(warning, Warn)
    assert (warning.foreign_bytes, warning.excess_bytes) == (RESERVE + 3 * GIB, 3 * GIB)
    assert warning.free_bytes == card.free
    for figure in ("5,472.0 MiB", "3,072.0 MiB", "2,400.0 MiB"):
        assert figure in warning.text


def test_growth_must_last_for_the_grace_time() -> None:
    card = Card(model("a", 20 * GIB))
    card.look()
    card.foreign = 4 * GIB
    decisions = [card.look() for _ in range(7)]
    assert decisions[:6] == [Nothing()] * 6
    assert isinstance(decisions[6], Unload)


def test_growth_that_breaks_off_begins_anew() -> None:
    card = Card(model("a", 20 * GIB))
    for _ in range(20):
        card.foreign = 4 * GIB
        assert card.pass_time(GRACE_S) == []
        card.foreign = GIB
        card.look()


def test_the_episode_ends_once_it_has_been_calm_for_a_while() -> None:
    card = Card(model("a", 12 * GIB), policy=WARN)
    card.look()
    card.foreign = 8 * GIB
    assert [type(each) for each in card.pass_time(60)] == [Warn]
    card.foreign = GIB
    assert card.pass_time(LEAST_COOLDOWN_S) == []
    assert [type(each) for each in card.pass_time(60)] == [Over]
    card.foreign = 8 * GIB
    assert [type(each) for each in card.pass_time(60)] == [Warn]


def test_the_episode_ends_with_the_last_model() -> None:
    card = Card(model("a", 12 * GIB), policy=WARN)
    card.look()
    card.foreign = 8 * GIB
    card.pass_time(60)
    card.models.clear()
    (over,) = card.pass_time(60)
    assert isinstance(over, Over)
    assert over.card == "GPU-1"


def test_a_card_without_models_is_not_watched() -> None:
    card = Card()
    card.look()
    card.foreign = 20 * GIB
    assert card.pass_time(600) == []


def test_ignore_ignores_and_closes_what_was_told() -> None:
    card = Card(model("a", 20 * GIB), policy=IGNORE)
    card.look()
    card.foreign = 4 * GIB
    assert card.pass_time(600) == []
    card.policy = WARN
    assert [type(each) for each in card.pass_time(60)] == [Warn]
    card.policy = IGNORE
    assert [type(each) for each in card.pass_time(60)] == [Over]


def test_cards_are_told_apart() -> None:
    watch, busy = PressureWatch(), (model("a", 16 * GIB, idle=False),)
    told = [
        (
            card,
            type(
                watch.look(PressureReading(step * STEP_S, card, foreign, 0, RESERVE, busy), YIELD, GRACE_S)
            ),
        )
        for step in range(20)
        for card, foreign in (("GPU-1", GIB), ("GPU-2", GIB if step == 0 else 8 * GIB))
    ]
    assert [each for each in told if each[1] is not Nothing] == [("GPU-2", Warn)]
    watch.forget("GPU-2")  # so that its clock may begin anew
    assert watch.look(PressureReading(0.0, "GPU-2", GIB, 0, RESERVE, ()), YIELD, GRACE_S) == Nothing()


def test_time_does_not_run_backwards() -> None:
    card = Card(model("a", GIB))
    card.look()
    with pytest.raises(ValueError, match="came after"):
        card.look(-1.0)


# --- readings that are not trusted -------------------------------------------------------------------------


def test_without_attribution_nothing_is_done() -> None:
    card = Card(model("a", 20 * GIB))
    card.look()
    card.foreign, card.attributed = 4 * GIB, False
    assert card.pass_time(600) == []


def test_a_reading_without_an_engine_of_ours_is_not_trusted() -> None:
    card = Card(model("a", 12 * GIB), model("b", 6 * GIB))
    card.look()
    # The driver's list lacks b, so its memory counts as foreign.
    card.models["b"] = replace(card.models["b"], in_use_bytes=0)
    card.foreign = 7 * GIB
    assert card.pass_time(600) == []


def test_a_model_that_starts_may_hold_nothing_yet() -> None:
    starting = replace(model("b", 6 * GIB, idle=False), in_use_bytes=0, starting=True)
    card = Card(model("a", 12 * GIB), starting)
    card.look()
    card.foreign = 8 * GIB
    (decision,) = card.pass_time(60)
    assert isinstance(decision, Unload)
    assert decision.runs == ("a",)


def test_a_gap_in_what_is_trusted_begins_the_grace_time_anew() -> None:
    card = Card(model("a", 20 * GIB))
    card.look()
    card.foreign = 4 * GIB
    for _ in range(10):
        assert card.pass_time(GRACE_S) == []
        card.attributed = False
        card.look()
        card.attributed = True


# --- who goes ----------------------------------------------------------------------------------------------


def test_the_largest_idle_ones_go_and_no_more_than_needed() -> None:
    card = Card(model("s", 2 * GIB), model("l", 8 * GIB), model("m", 5 * GIB), model("x", 4 * GIB))
    card.look()
    card.foreign = RESERVE + 2 * GIB
    card.models["z"] = replace(model("z", 600 * MIB), idle=False)
    card.look()
    card.foreign = RESERVE + 2 * GIB + SLACK_BYTES
    for each in ("s", "l", "m", "x"):
        assert card.models[each].may_go
    (decision,) = card.pass_time(60)
    assert isinstance(decision, Unload)
    assert decision.runs == ("l",)
    assert "l (8,192.0 MiB)" in decision.text
    assert "s (" not in decision.text


def test_several_go_where_one_is_not_enough() -> None:
    card = Card(model("a", 3 * GIB), model("b", 3 * GIB), model("c", 3 * GIB), foreign=RESERVE)
    card.look()
    card.foreign = 14 * GIB  # 11.7 GiB beyond, 1 GiB free: all must go
    decision, *_ = card.pass_time(60)
    assert isinstance(decision, Unload)
    assert decision.runs == ("a", "b", "c")


def test_nothing_goes_where_enough_is_free() -> None:
    card = Card(model("a", 4 * GIB))
    card.look()
    card.foreign = RESERVE + 5 * GIB
    assert card.free > 5 * GIB
    assert [type(each) for each in card.pass_time(600)] == [Warn]


def test_what_models_are_still_to_take_is_not_free() -> None:
    growing = replace(model("a", 12 * GIB, idle=False), in_use_bytes=5 * GIB)
    card = Card(growing, model("b", 2 * GIB))
    card.look()
    card.foreign = RESERVE + 5 * GIB
    (decision,) = card.pass_time(60)
    assert isinstance(decision, Unload)
    assert decision.runs == ("b",)


@pytest.mark.parametrize(
    "kept",
    [
        lambda each: replace(each, idle=False),
        lambda each: replace(each, pinned=True),
        lambda each: replace(each, starting=True),
    ],
    ids=["busy", "pinned", "starting"],
)
def test_who_must_stay_stays_and_a_person_is_told(kept: Callable[[ModelOnCard], ModelOnCard]) -> None:
    card = Card(kept(model("a", 20 * GIB)))
    card.look()
    card.foreign = 4 * GIB
    (decision,) = card.pass_time(3600)
    assert isinstance(decision, Warn)
    assert "No idle model" in decision.text


def test_one_that_becomes_idle_later_goes_then() -> None:
    card = Card(model("a", 20 * GIB, idle=False))
    card.look()
    card.foreign = 4 * GIB
    assert [type(each) for each in card.pass_time(300)] == [Warn]
    card.models["a"] = model("a", 20 * GIB)
    assert [type(each) for each in card.pass_time(STEP_S)] == [Unload]


def test_after_an_unload_there_is_a_pause() -> None:
    card = Card(model("a", 10 * GIB), model("b", 9 * GIB))
    card.look()
    card.foreign = 5 * GIB
    decided = []
    while card.models and card.now_s < 3600:
        decision = card.look()
        if isinstance(decision, Unload):
            decided.append(card.now_s)
            for run in decision.runs:
                del card.models[run]
        if decided:
            card.foreign = min(TOTAL, card.foreign + GIB)  # the stranger goes on growing
    assert len(decided) == 2
    assert decided[1] - decided[0] >= LEAST_COOLDOWN_S


# --- no loops ----------------------------------------------------------------------------------------------


def test_one_that_is_loaded_again_stays_unless_strangers_grow_again() -> None:
    card = Card(model("a", 18 * GIB))
    card.look()
    card.foreign = 6 * GIB
    assert [type(each) for each in card.pass_time(60)] == [Unload, Over]
    card.models["a2"] = model("a2", 18 * GIB)
    assert not any(isinstance(each, Unload) for each in card.pass_time(3600))
    card.models["a2"] = model("a2", 17 * GIB)  # which cannot be: but room for the stranger to grow into
    card.foreign += GIB
    assert [type(each) for each in card.pass_time(60)] == [Unload, Over]


@pytest.mark.parametrize("high_s", [40.0, 120.0, 600.0])
@pytest.mark.parametrize("low_s", [10.0, 120.0, 600.0])
def test_a_stranger_that_comes_and_goes_drives_nobody_out_twice(high_s: float, low_s: float) -> None:
    """Somebody loads the model again as soon as it is gone and there is room for it."""
    card = Card(model("a0", 18 * GIB))
    card.look()
    unloads, turns = 0, itertools.count(1)
    for _ in range(30):
        for foreign, length_s in ((6 * GIB, high_s), (GIB, low_s)):
            card.foreign = foreign
            for _ in range(round(length_s / STEP_S)):
                unloads += sum(isinstance(each, Unload) for each in card.pass_time(STEP_S))
                if not card.models and card.free >= 18 * GIB:
                    name = f"a{next(turns)}"
                    card.models[name] = model(name, 18 * GIB)
    assert unloads == 1


def test_a_stranger_that_was_away_for_long_is_made_room_for_again() -> None:
    card = Card(model("a", 18 * GIB))
    card.look()
    card.foreign = 6 * GIB
    assert [type(each) for each in card.pass_time(60)] == [Unload, Over]
    card.foreign = GIB
    card.models["b"] = model("b", 18 * GIB)
    card.pass_time(RECALL_S + 60)
    card.foreign = 6 * GIB
    assert [type(each) for each in card.pass_time(60)] == [Unload, Over]


class Pressure(RuleBasedStateMachine):
    """Models come and go, work and rest; strangers take what is free and give it back; readings fail."""

    def __init__(self) -> None:
        super().__init__()
        self.card = Card()
        self.names = itertools.count()
        self.unload_times: list[float] = []
        self.unload_foreign: list[int] = []
        self.told = False
        self.most_foreign = 0

    @rule(size=st.integers(1, 20), idle=st.booleans(), pinned=st.booleans())
    def load(self, size: int, idle: bool, pinned: bool) -> None:
        """By the rule of admission: strangers or the reserve, whichever is more."""
        held = sum(each.in_use_bytes for each in self.card.models.values())
        if size * GIB <= TOTAL - held - max(RESERVE, self.card.foreign):
            name = f"m{next(self.names)}"
            self.card.models[name] = model(name, size * GIB, idle=idle, pinned=pinned)

    @precondition(lambda self: self.card.models)
    @rule(data=st.data(), idle=st.booleans(), pinned=st.booleans())
    def change(self, data: st.DataObject, idle: bool, pinned: bool) -> None:
        run = data.draw(st.sampled_from(sorted(self.card.models)))
        self.card.models[run] = replace(self.card.models[run], idle=idle, pinned=pinned)

    @precondition(lambda self: self.card.models)
    @rule(data=st.data())
    def unload(self, data: st.DataObject) -> None:
        del self.card.models[data.draw(st.sampled_from(sorted(self.card.models)))]

    @rule(wanted=st.integers(0, TOTAL))
    def strangers(self, wanted: int) -> None:
        """They get what is free at most."""
        self.card.foreign = min(wanted, self.card.foreign + self.card.free)

    @rule(attributed=st.booleans())
    def driver(self, attributed: bool) -> None:
        self.card.attributed = attributed

    @rule(policy=st.sampled_from(PressurePolicy))
    def policy(self, policy: PressurePolicy) -> None:
        self.card.policy = policy

    @rule(steps=st.integers(1, 60), step_s=st.sampled_from([1.0, 5.0, 29.0]))
    def time(self, steps: int, step_s: float) -> None:
        for _ in range(steps):
            decision = self.card.look(step_s)
            if isinstance(decision, Nothing):
                continue
            assert decision.card == "GPU-1"
            assert decision.text
            if isinstance(decision, Over):
                assert self.told
                self.told = False
                continue
            assert self.card.attributed
            assert self.card.policy is not IGNORE
            assert decision.excess_bytes >= SLACK_BYTES
            assert decision.foreign_bytes == self.card.foreign
            if isinstance(decision, Warn):
                assert not self.told
            else:
                self._unload(decision)
            self.told = True

    def _unload(self, decision: Unload) -> None:
        assert self.card.policy is YIELD
        going = [self.card.models.pop(run) for run in decision.runs]
        assert going
        assert all(each.idle and not each.pinned for each in going)
        sizes = [each.in_use_bytes for each in going]
        assert sizes == sorted(sizes, reverse=True)
        # Without the last of them it would not have been enough.
        assert decision.free_bytes + sum(sizes[:-1]) < decision.excess_bytes
        now_s = self.card.now_s
        if self.unload_times:
            assert now_s - self.unload_times[-1] >= LEAST_COOLDOWN_S
        # Within the time of memory, only for strangers that have grown since.
        for before_s, foreign in zip(self.unload_times, self.unload_foreign, strict=True):
            if now_s - before_s < RECALL_S:
                assert decision.foreign_bytes >= foreign + SLACK_BYTES
        self.unload_times.append(now_s)
        self.unload_foreign.append(decision.foreign_bytes)

    @invariant()
    def bounded(self) -> None:
        """However it goes: so many unloads as there are steps of growth on the card in each time of memory."""
        recent = [each for each in self.unload_times if self.card.now_s - each < RECALL_S]
        assert len(recent) <= TOTAL // SLACK_BYTES


TestPressure = pytest.mark.unit(Pressure.TestCase)
TestPressure.settings = hypothesis_settings(max_examples=60, stateful_step_count=60, deadline=None)
