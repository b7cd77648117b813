"""Which ended models are wanted, when each is due, and what a refused start means. On a made-up clock."""

from __future__ import annotations

from typing import Any

import pytest

from lllm3090d.engines.crash_causes import KINDS, CrashCause, Retry
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.planning.request import PlanRequest
from lllm3090d.serving.comebacks import CARD_PAUSE_S, PASSING, Comebacks, cause_of
from lllm3090d.serving.instance import InstanceState
from lllm3090d.serving.restarts import Latch, RestartPolicy
from lllm3090d.serving.running import Evicted, Instance
from tests.fakes.scheduler_world import World

pytestmark = pytest.mark.unit

POLICY = RestartPolicy(base_s=2.0, factor=3.0, cap_s=60.0, most_ends=3, window_s=1000.0, healthy_s=100.0)


def died(cause: str = CrashCause.ENGINE_FAULT) -> LlmError:
    return LlmError(ErrorCode.ENGINE_FAILED, "it died", cause=cause)


class Scene:
    """Comebacks, their clock, and models that have failed."""

    def __init__(self, policy: RestartPolicy | None = POLICY) -> None:
        self.now_s = 50.0
        self.runs = 0
        self.policy = policy
        self.comebacks = Comebacks(lambda: self.policy, lambda: self.now_s)

    def instance(self, name: str = "a", **changes: Any) -> Instance:
        """One that served a moment ago."""
        made = World().bring_up(name)
        self.runs += 1
        made.record = made.record.model_copy(update={"run": f"{self.runs:08x}"})
        made.state, made.failure = InstanceState.FAILED, died()
        made.ready_since_s = self.now_s - 1.0
        for key, value in changes.items():
            setattr(made, key, value)
        return made


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, True),
        ({"ready_since_s": None}, False),  # told to whoever asked for it
        ({"ready_since_s": None, "attempt": 1}, True),
        ({"ready_since_s": None, "adopted": True}, True),
        # The daemon before had begun to load it in the place of another, which comes back now.
        ({"ready_since_s": None, "adopted": True, "evicted": [Evicted("b", PlanRequest(), ())]}, False),
        ({"failure": None}, False),
    ],
)
def test_who_is_wanted(changes: dict[str, Any], wanted: bool) -> None:
    scene = Scene()
    instance = scene.instance(**changes)
    assert scene.comebacks.ended(instance) is None
    assert (instance.retry_at_s, instance.next_attempt) == ((52.0, 1) if wanted else (None, 0))


def test_nobody_is_wanted_whose_wish_is_not_known() -> None:
    """Of a record of an older release."""
    scene = Scene()
    instance = scene.instance()
    instance.record = instance.record.model_copy(update={"launch": None})
    assert scene.comebacks.ended(instance) is None
    assert instance.retry_at_s is None


def test_without_a_policy_nothing_is_started_again() -> None:
    scene = Scene(None)
    instance = scene.instance()
    assert scene.comebacks.ended(instance) is None
    assert scene.comebacks.refused(instance, died()) is None
    assert instance.retry_at_s is None


def test_a_policy_that_is_taken_away_keeps_back_what_was_due() -> None:
    scene = Scene()
    instance = scene.instance()
    scene.comebacks.ended(instance)
    scene.policy, scene.now_s = None, 100.0
    assert scene.comebacks.due([instance]) == ()
    assert scene.comebacks.next_s([instance]) is None
    scene.policy = POLICY
    assert scene.comebacks.due([instance]) == (instance,)


def test_each_further_end_waits_longer_until_it_is_left_down() -> None:
    scene = Scene()
    pauses, latch = [], None
    for attempt in range(POLICY.most_ends):
        instance = scene.instance(attempt=attempt)
        latch = scene.comebacks.ended(instance)
        if instance.retry_at_s is not None:
            pauses.append(instance.retry_at_s - scene.now_s)
            assert instance.next_attempt == attempt + 1
    assert pauses == [2.0, 6.0]
    assert isinstance(latch, Latch) and "ended 3 times" in latch.reason
    assert instance.retry_at_s is None


def test_models_do_not_count_for_each_other() -> None:
    scene = Scene()
    for name in ("a", "b", "c", "d"):
        instance = scene.instance(name)
        assert scene.comebacks.ended(instance) is None and instance.next_attempt == 1


def test_what_is_forgotten_does_not_count() -> None:
    scene = Scene()
    scene.comebacks.ended(scene.instance())
    scene.comebacks.ended(scene.instance())
    scene.comebacks.forget("a")
    scene.comebacks.forget("never heard of")
    instance = scene.instance()
    assert scene.comebacks.ended(instance) is None
    assert (instance.retry_at_s, instance.next_attempt) == (52.0, 1)


def test_a_long_service_begins_anew() -> None:
    scene = Scene()
    scene.comebacks.ended(scene.instance())
    scene.comebacks.ended(scene.instance())
    instance = scene.instance(ready_since_s=scene.now_s - POLICY.healthy_s)
    assert scene.comebacks.ended(instance) is None
    assert instance.next_attempt == 1


@pytest.mark.parametrize("cause", [each for each in CrashCause if KINDS[each].retry is Retry.NEVER])
def test_where_a_start_cannot_help_it_is_left_down_at_once(cause: CrashCause) -> None:
    scene = Scene()
    instance = scene.instance(failure=died(cause))
    latch = scene.comebacks.ended(instance)
    assert latch is not None and KINDS[cause].advice in latch.way_out and "reset a" in latch.way_out
    assert instance.retry_at_s is None


def test_out_of_device_memory_is_tried_once_more() -> None:
    scene = Scene()
    instance = scene.instance(failure=died(CrashCause.OUT_OF_DEVICE_MEMORY))
    assert scene.comebacks.ended(instance) is None and instance.next_attempt == 1
    latch = scene.comebacks.ended(scene.instance(failure=died(CrashCause.OUT_OF_DEVICE_MEMORY)))
    assert latch is not None and "smaller plan" in latch.reason


@pytest.mark.parametrize("code", sorted(ErrorCode))
def test_a_refused_start_is_tried_again_where_that_can_pass(code: ErrorCode) -> None:
    scene = Scene()
    instance = scene.instance(next_attempt=4)
    latch = scene.comebacks.refused(instance, LlmError(code, "no", hint="do this"))
    if code not in PASSING:
        assert latch == Latch("it could not be started again: no", "do this")
        assert instance.retry_at_s is None
    else:
        pause_s = POLICY.cap_s
        if code is ErrorCode.CARD_RELEASED:
            pause_s = 0.0
        elif code in {ErrorCode.CARD_UNREADABLE, ErrorCode.CARD_AT_RISK}:
            pause_s = CARD_PAUSE_S
        assert (latch, instance.retry_at_s, instance.next_attempt) == (None, scene.now_s + pause_s, 4)


def test_a_lasting_refusal_without_a_hint() -> None:
    scene = Scene()
    latch = scene.comebacks.refused(scene.instance(), LlmError(ErrorCode.UNKNOWN_MODEL, "it is not there"))
    assert latch is not None and latch.way_out == ""


def test_each_is_due_once_and_not_before_its_time() -> None:
    scene = Scene()
    first, second, serving = scene.instance("a"), scene.instance("b"), scene.instance("c")
    scene.comebacks.ended(first)
    scene.now_s += 1.0
    scene.comebacks.ended(second)
    serving.state, serving.retry_at_s = InstanceState.READY, 0.0
    everyone = (first, second, serving)
    assert scene.comebacks.next_s(everyone) == 52.0
    assert scene.comebacks.due(everyone) == ()
    scene.now_s = 52.0
    assert scene.comebacks.due(everyone) == (first,)
    assert scene.comebacks.due(everyone) == ()
    assert scene.comebacks.next_s(everyone) == 53.0
    scene.now_s = 60.0
    assert scene.comebacks.due(everyone) == (second,)
    assert scene.comebacks.next_s(everyone) is None
    assert scene.comebacks.next_s(()) is None


@pytest.mark.parametrize(
    ("failure", "cause"),
    [
        (died(CrashCause.DEVICE_LOST), CrashCause.DEVICE_LOST),
        (died("of something newer"), CrashCause.UNKNOWN),
        (LlmError(ErrorCode.ENGINE_FAILED, "it died"), CrashCause.UNKNOWN),
        (LlmError(ErrorCode.ENGINE_FAILED, "it died", cause=7), CrashCause.UNKNOWN),
    ],
)
def test_the_cause_is_read_from_the_failure(failure: LlmError, cause: CrashCause) -> None:
    assert cause_of(failure) is cause
