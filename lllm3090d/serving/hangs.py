"""Engines that are at work and get nowhere. Pure: looks go in, verdicts come out.

``/health`` is answered by a thread of its own, so an engine whose computation hangs looks well there. What tells is
``/slots``: the tokens of its prompt that a slot has computed, and those that it has generated. The counters of
``/metrics`` do not, they move only when a prompt or an answer is complete. An engine answers both between two batches,
so no answer is no news: it may compute, or it may hang, and the time since the last progress decides.

That time is not fixed. One step, from one progress to the next, is expected to take what a whole batch takes at the
slowest speed that is known: measured earlier, or seen in the last steps, which grow as a prompt gets longer. An engine
is stalled when a step takes :data:`MARGIN` times that, and never below :data:`LEAST_S`. So a prompt that progresses
however slowly is left alone, unless one step takes ten times as long as those before it, and one that has frozen is
found within a time that is known at each moment (:attr:`Verdict.patience_s`).

An engine counts as a whole: it computes all slots in one batch, and stopping it would end what gets on. A new request
counts as progress, since a short one may begin and end between two looks.
"""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass, replace
from typing import TypeGuard

MARGIN = 10.0
# Work without tokens has its time in here: shaders that are compiled, prompts that are saved, images that are encoded.
LEAST_S = 120.0
# Of an engine of which no speed was ever measured: a batch of 2048 tokens at 2 tokens a second, and no margin. It and
# the bound of a kernel that spins follow LEAST_S where that is set otherwise.
LEAST_UNMEASURED_S = 1024.0
# Of the steps before, so many tell what the next one may take.
RECENT_STEPS = 16
# A kernel that spins ends in a lost device: then this share of the patience is enough.
SPINNING_SHARE = 0.25
SPINNING_LEAST_S = 60.0
# Between two looks at most so much counts: nobody knows what happened while the daemon or the machine slept.
MOST_BETWEEN_LOOKS_S = 30.0
# Stalled for so many times its patience, it is drained and restarted; before, only reported.
RESTART_AT = 2.0


@dataclass(frozen=True, slots=True)
class SlotLook:
    """A slot of an engine.

    Attributes:
        slot: its number.
        task: of the request that it works on, or worked on last; None before the first.
        busy: it is processing.
        prompt_tokens: in its cache now; rises while a prompt is computed, ahead of the next, and with each token after.
        computed_tokens: of the prompt, without those that were cached.
        generated_tokens: of the answer.
    """

    slot: int
    task: int | None
    busy: bool
    prompt_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EngineWork:
    """What an engine says of its work.

    Attributes:
        slots: those of a busy engine, none of one that is idle; None where it did not answer in time.
        waiting: requests that wait for a slot.
        in_flight: requests, waiting ones included; None where it did not answer in time.
        prompt_tokens_per_s: since its start, by its own measurement; None before it has computed anything.
        token_s: seconds for one generated token, likewise.
    """

    slots: tuple[SlotLook, ...] | None = None
    waiting: int = 0
    in_flight: int | None = None
    prompt_tokens_per_s: float | None = None
    token_s: float | None = None


@dataclass(frozen=True, slots=True)
class CardLook:
    """What NVML says of the card that the engine computes on, percent of the last sampling period."""

    busy_percent: int
    memory_percent: int

    @property
    def spins(self) -> bool:
        """It computes without touching its memory, which no model can."""
        return self.busy_percent >= 100 and self.memory_percent == 0


@dataclass(frozen=True, slots=True)
class Look:
    """An engine at one moment.

    Attributes:
        at_s: on a monotonic clock.
        slots: None where it did not answer in time.
        waiting: requests that wait for a slot, where that is known.
        card: None where nobody tells, or where other programs compute on it too.
    """

    at_s: float
    slots: tuple[SlotLook, ...] | None
    waiting: int = 0
    card: CardLook | None = None

    @property
    def at_work(self) -> bool:
        """It has something to do, or does not say that it has not."""
        return self.slots is None or self.waiting > 0 or any(each.busy for each in self.slots)


@dataclass(frozen=True, slots=True)
class Pace:
    """What is known of the speed of a launch.

    Attributes:
        batch_tokens: computed between two answers at most (``-b``).
        prompt_tokens_per_s: measured; None unknown.
        token_s: seconds for one generated token, measured; None unknown.
        extra_s: allowed on top for work that has no tokens, such as an image that is encoded in host memory.
        least_s: patience at least, where a speed is known; the other bounds are in proportion to it.
    """

    batch_tokens: int
    prompt_tokens_per_s: float | None = None
    token_s: float | None = None
    extra_s: float = 0.0
    least_s: float = LEAST_S

    @property
    def step_s(self) -> float | None:
        """Seconds that a step may take by what was measured; None where nothing was."""
        if not self.prompt_tokens_per_s:
            return None
        return max(self.batch_tokens / self.prompt_tokens_per_s, self.token_s or 0.0)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is to be thought of an engine.

    Attributes:
        stalled: it is at work and has not progressed for longer than it may.
        idle_s: seconds at work without progress, as far as somebody looked.
        patience_s: how long it may be.
        reason: for a person; empty where it is not stalled.
    """

    stalled: bool
    idle_s: float
    patience_s: float
    reason: str = ""


class Step(enum.StrEnum):
    """What to do about an engine."""

    NOTHING = "nothing"
    REPORT = "report"  # say that it is stalled, and touch nothing
    RESTART = "restart"  # drain it, stop it and load it again, unless that was done before


@dataclass(frozen=True, slots=True)
class HangTrack:
    """How a stretch of work went until now; a new one for each launch, fed with every look.

    Attributes:
        last: the last look; None before the first.
        marks: progress of its slots when they were last seen.
        idle_s: seconds at work since the last progress, as far as somebody looked.
        steps_s: how long the last steps of this stretch took, from one progress to the next.
        spins: the card computed without touching its memory at every look since the last progress.
    """

    last: Look | None = None
    marks: tuple[SlotLook, ...] = ()
    idle_s: float = 0.0
    steps_s: tuple[float, ...] = ()
    spins: bool = False

    def after(self, look: Look) -> HangTrack:
        """With one more look.

        Raises:
            ValueError: it is from before the last one.
        """
        if self.last is not None and look.at_s < self.last.at_s:
            raise ValueError(f"a look at {look.at_s} s after one at {self.last.at_s} s")
        marks = self.marks if look.slots is None else look.slots
        if not look.at_work:
            return HangTrack(look, marks)
        if self.last is None or not self.last.at_work:
            # From here on it is watched; what it did before nobody knows.
            return HangTrack(look, marks, spins=_spins(look))
        idle_s = self.idle_s + min(look.at_s - self.last.at_s, MOST_BETWEEN_LOOKS_S)
        if look.slots is not None and look.slots != self.marks:
            steps_s = (*self.steps_s, idle_s)[-RECENT_STEPS:]
            return HangTrack(look, marks, steps_s=steps_s, spins=_spins(look))
        return replace(self, last=look, idle_s=idle_s, spins=self.spins and _spins(look))

    def patience_s(self, pace: Pace) -> float:
        """Seconds at work without progress after which it is stalled."""
        measured, scale = pace.step_s, pace.least_s / LEAST_S
        # Without a measurement a few quick tokens say nothing of the time that a whole batch takes.
        least = LEAST_UNMEASURED_S * scale if measured is None else pace.least_s
        patience = max(least, MARGIN * max((measured or 0.0, *self.steps_s))) + pace.extra_s
        return max(SPINNING_LEAST_S * scale, patience * SPINNING_SHARE) if self.spins else patience

    def verdict(self, pace: Pace) -> Verdict:
        """Of the last look."""
        patience = self.patience_s(pace)
        if self.last is None or not self.last.at_work or self.idle_s <= patience:
            return Verdict(False, self.idle_s, patience)
        what = "it does not answer" if self.last.slots is None else "no slot computes or generates"
        if self.last.slots is not None and not any(each.busy for each in self.last.slots):
            what = f"{self.last.waiting} requests wait and no slot takes them"
        card = ", the card is at 100 % without touching its memory" if self.spins else ""
        return Verdict(
            True,
            self.idle_s,
            patience,
            f"for {self.idle_s:.0f} s {what}{card}; at its speed {patience:.0f} s are enough",
        )


def next_step(verdict: Verdict, *, reported: bool) -> Step:
    """What to do: report, then restart.

    Args:
        verdict: of the last look.
        reported: this stall has been reported.
    """
    if not verdict.stalled:
        return Step.NOTHING
    if not reported:
        return Step.REPORT
    return Step.RESTART if verdict.idle_s > RESTART_AT * verdict.patience_s else Step.NOTHING


def _spins(look: Look) -> bool:
    return look.card is not None and look.card.spins


def slots_of(body: bytes) -> tuple[SlotLook, ...] | None:
    """The document of ``/slots``; None where it is none, or where it tells nothing of progress (some forks)."""
    try:
        slots = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(slots, list) or not slots:
        return None
    looks = [_slot(each) for each in slots]
    return tuple(each for each in looks if each is not None) if None not in looks else None


def _slot(slot: object) -> SlotLook | None:
    if not isinstance(slot, dict) or not isinstance(slot.get("is_processing"), bool):
        return None
    busy = slot["is_processing"]
    if busy and not ("n_prompt_tokens_processed" in slot and "next_token" in slot):
        return None
    following = slot.get("next_token") or ()
    # Older builds have an object where newer ones have a list with one.
    first = following[0] if isinstance(following, list) and following else following or {}
    if not isinstance(first, dict):
        return None
    task = slot.get("id_task")
    number, cached, computed, generated = (
        slot.get("id"),
        slot.get("n_prompt_tokens", 0),
        slot.get("n_prompt_tokens_processed", 0),
        first.get("n_decoded", 0),
    )
    if not (_is_count(number) and _is_count(cached) and _is_count(computed) and _is_count(generated)):
        return None
    return SlotLook(number, task if _is_count(task) else None, busy, cached, computed, generated)


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
