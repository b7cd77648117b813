"""Who of those that serve is stalled: each look at engines and cards in, verdicts out. Pure.

Between the looks of :mod:`lllm3090d.serving.watching` and the judgement of :mod:`lllm3090d.serving.hangs`: it keeps a
track for each launch, and knows what a launch may take.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from lllm3090d.serving.events import Activity
from lllm3090d.serving.hangs import LEAST_S, CardLook, HangTrack, Look, Pace, Verdict
from lllm3090d.serving.observation import Observation
from lllm3090d.serving.running import Instance

# An image is encoded between two answers of the engine, by processor cores where the projector is in host memory.
IMAGE_ON_HOST_S = 300.0


@dataclass(frozen=True, slots=True)
class _Known:
    """Of one launch."""

    track: HangTrack = field(default_factory=HangTrack)
    prompt_tokens_per_s: float | None = None
    token_s: float | None = None


class StallWatch:
    """Remembers how the work of each launch went; one that does not serve any more is forgotten."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}

    def look(
        self,
        now_s: float,
        serving: Iterable[Instance],
        activity: Mapping[str, Activity],
        observation: Observation | None,
        *,
        least_s: float = LEAST_S,
    ) -> Mapping[str, Verdict]:
        """Take what engines have said; the verdict on each that can be judged, by run.

        Args:
            now_s: on a monotonic clock.
            serving: launches that serve.
            activity: what their engines said, by run; one that was not asked is not judged.
            observation: the cards at the same time; None where they could not be read.
            least_s: patience at least (:attr:`Pace.least_s`).
        """
        verdicts: dict[str, Verdict] = {}
        kept: dict[str, _Known] = {}
        for each in serving:
            known = self._known.get(each.run, _Known())
            seen = activity.get(each.run)
            if seen is None:  # nobody looked
                kept[each.run] = known
                continue
            if seen.work is None:  # it answers, and does not tell how it gets on
                continue
            work = seen.work
            card = None if observation is None else card_look(observation, each.run)
            known = _Known(
                known.track.after(Look(now_s, work.slots, work.waiting, card)),
                work.prompt_tokens_per_s or known.prompt_tokens_per_s,
                work.token_s or known.token_s,
            )
            kept[each.run] = known
            verdicts[each.run] = known.track.verdict(_pace(each, known, least_s))
        self._known = kept
        return verdicts


def _pace(instance: Instance, known: _Known, least_s: float) -> Pace:
    plan = instance.plan
    on_host = plan.with_projector and not (plan.on_card and plan.launch.projector_on_card)
    return Pace(
        batch_tokens=plan.launch.batch_tokens,
        prompt_tokens_per_s=known.prompt_tokens_per_s,
        token_s=known.token_s,
        # In proportion, as the other bounds: who is less patient is so with images too.
        extra_s=IMAGE_ON_HOST_S * least_s / LEAST_S if on_host else 0.0,
        least_s=least_s,
    )


def card_look(observation: Observation, run: str) -> CardLook | None:
    """How busy the card of a launch is; None where nobody tells, or where it is not alone on one card."""
    cards = [state for state in observation.cards if run in state.resident]
    if len(cards) != 1:
        return None
    (state,) = cards
    reading = state.reading
    if reading is None or state.strangers or set(state.resident) != {run}:
        return None
    if reading.busy_percent is None or reading.memory_busy_percent is None:
        return None
    return CardLook(reading.busy_percent, reading.memory_busy_percent)
