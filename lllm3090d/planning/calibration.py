"""Calibration: what this machine saw launches take, and what the next quote makes of it. Pure.

Two things are learnt of a checkpoint with one build, backend and card. A launch that was measured after a whole batch
of a prompt is charged its own peak and a slack. By how much any launch took more than its quote is charged to all
others as well: as a constant, so that a price never falls as a launch grows and the search stays what it is.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

from lllm3090d.checkpoints.facts import CheckpointFacts, ProjectorFacts
from lllm3090d.engines.capabilities import Backend
from lllm3090d.planning.launch import Launch, PlanPolicy
from lllm3090d.planning.quote import Evidence, LineItem, Place, Quote
from lllm3090d.planning.units import MIB, mib_text

# Kept beside a peak: max(128 MiB, 1 %).
SLACK_LEAST_BYTES = 128 * MIB
SLACK_PERCENT = 1
# Peak and quote further apart than max(256 MiB, 2 %) are told.
DEVIATION_LEAST_BYTES = 256 * MIB
DEVIATION_PERCENT = 2
# Judgement: an engine that ran out of memory does not say how much was missing. The least that would have been told
# as a deviation is added each time, so that a few attempts find it, up to a share at which the quote is not the cause.
MOST_SHORT_PERCENT = 25
# Judgement: what took the memory may have been a stranger that nobody saw, so this is not believed for ever.
SHORT_KEPT_S = 30 * 86400.0

EXCESS = "measured excess"
PEAK = "measured peak"
SLACK = "slack"
_FLOOR = "workspace floor"
# What host memory holds of an engine only after conversations; a card has none of them.
TAKEN_LATER = frozenset({"prompt cache", "context checkpoints", "draft checkpoint"})
_FOR_LATER = frozenset({"prompt_cache_mib", "context_checkpoints", "checkpoint_min_step_tokens"})
_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class CalibrationScope:
    """What measurements of different launches have in common where they say something of each other.

    Attributes:
        checkpoint: its fingerprint, see :mod:`lllm3090d.checkpoints.fingerprint`.
        engine: digest of the build's binaries.
        backend: what it computes on.
        card: UUID of the card; ``host`` where host memory takes its place.
    """

    checkpoint: str
    engine: str
    backend: Backend
    card: str


@dataclass(frozen=True, slots=True)
class CalibrationKey:
    """One launch of it; ``launch`` is :func:`launch_text`."""

    scope: CalibrationScope
    launch: str


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one run was seen to take, bytes.

    Attributes:
        key: the launch.
        peak_bytes: the most of all, while it loaded and after.
        load_peak_bytes: the most until it was ready.
        probe_tokens: of the prompt that was computed before the last look; 0 where there was none, and buffers that
            are made with the first prompt may be missing.
        measured_s: when, seconds since 1970.
    """

    key: CalibrationKey
    peak_bytes: int
    load_peak_bytes: int
    probe_tokens: int
    measured_s: float


@dataclass(frozen=True, slots=True)
class Seen:
    """What is remembered of one launch.

    Attributes:
        launch: :func:`launch_text`.
        quoted_bytes: its quote then, by :func:`comparable_bytes`.
        peak_bytes: the most that any run of it took; 0 where none was measured.
        load_peak_bytes: the same until it was ready.
        probe_tokens: of the longest prompt computed before a look; 0 for none.
        short_bytes: missing beyond what was reserved, by out-of-memory after admission; 0 for none.
        seen_s: when it was measured last, seconds since 1970.
        short_s: when it ran out of memory last.
    """

    launch: str
    quoted_bytes: int
    peak_bytes: int = 0
    load_peak_bytes: int = 0
    probe_tokens: int = 0
    short_bytes: int = 0
    seen_s: float = 0.0
    short_s: float = 0.0

    @property
    def charge_bytes(self) -> int:
        """What the launch is charged by its peak; 0 where none was measured."""
        return self.peak_bytes + slack_bytes(self.peak_bytes) + self.short_bytes if self.peak_bytes else 0

    @property
    def excess_bytes(self) -> int:
        """By how much it took more than its quote."""
        return max(0, self.charge_bytes - self.quoted_bytes, self.short_bytes)

    @property
    def is_whole(self) -> bool:
        """A prompt was computed, so the peak may stand for the price; else it can only raise it."""
        return self.peak_bytes > 0 and self.probe_tokens > 0


@dataclass(frozen=True)
class Calibration:
    """What is known of a checkpoint with one build, backend and card.

    Attributes:
        scope: of whom.
        seen: its launches.
        has_measured_build: some checkpoint was measured after a prompt with this build and backend on this card, so
            nothing needs a floor under its workspace.
        arguments: further ones that the next launch gets; a part of what is looked up, see :func:`launch_text`.
        least_excess_bytes: an excess that is charged whatever was seen.
    """

    scope: CalibrationScope
    seen: tuple[Seen, ...] = ()
    has_measured_build: bool = False
    arguments: tuple[str, ...] = ()
    least_excess_bytes: int = 0

    @cached_property
    def excess_bytes(self) -> int:
        """The most by which a launch took more than its quote; charged to every launch that was not measured."""
        return max((self.least_excess_bytes, *(each.excess_bytes for each in self.seen)))

    def of(self, launch: str) -> Seen | None:
        """What is known of that launch, by its text."""
        return next((each for each in self.seen if each.launch == launch), None)

    @cached_property
    def excess_item(self) -> LineItem | None:
        """The line that every launch is charged that was not measured; None where nothing was ever missing."""
        size = self.excess_bytes
        if not size:
            return None
        worst = max(self.seen, key=lambda each: each.excess_bytes, default=None)
        if worst is None or worst.excess_bytes < size:
            why = "launches of this model took so much more than their quotes here"
        elif worst.charge_bytes - worst.quoted_bytes >= size:
            why = (
                f"a launch of this model took {mib_text(worst.peak_bytes)} MiB here"
                f" ({_date(worst.seen_s)}), with its slack so much more than its quote"
            )
        else:
            why = (
                f"a launch of this model ran out of memory here ({_date(worst.short_s)}) within its quote of"
                f" {mib_text(worst.quoted_bytes)} MiB"
            )
        return LineItem(EXCESS, Place.CARD, size, Evidence.MEASURED, why)

    def measured(self, measurement: Measurement, quoted_bytes: int) -> Calibration:
        """With one measurement more; peaks never fall.

        Of a launch that never got this far, having run out of memory says nothing more; of one that ran out of it after
        an earlier measurement, another one just as early does not take that back.

        Args:
            measurement: of this scope.
            quoted_bytes: the quote of that launch by :func:`comparable_bytes`.

        Raises:
            ValueError: it is of another scope, or not of this world.
        """
        if measurement.key.scope != self.scope:
            raise ValueError("a measurement of another checkpoint, build, backend or card")
        if measurement.peak_bytes <= 0 or quoted_bytes < 0:
            raise ValueError(f"nothing takes {measurement.peak_bytes} bytes of {quoted_bytes} quoted")
        before = self.of(measurement.key.launch) or Seen(measurement.key.launch, quoted_bytes)
        return self._with(
            Seen(
                launch=measurement.key.launch,
                quoted_bytes=quoted_bytes,
                peak_bytes=max(before.peak_bytes, measurement.peak_bytes),
                load_peak_bytes=max(before.load_peak_bytes, measurement.load_peak_bytes),
                probe_tokens=max(before.probe_tokens, measurement.probe_tokens),
                short_bytes=before.short_bytes if before.peak_bytes else 0,
                seen_s=measurement.measured_s,
                short_s=before.short_s if before.peak_bytes else 0.0,
            )
        )

    def out_of_memory(self, launch: str, quoted_bytes: int, now_s: float) -> Calibration:
        """After an engine died for want of memory that it had been given by its quote.

        Every launch of the scope is charged a step more than it was: max(256 MiB, 2 %), 25 % of the quote together.

        Args:
            launch: :func:`launch_text` of the one that died.
            quoted_bytes: its quote by :func:`comparable_bytes`, which leaves out what was charged beyond it.
            now_s: seconds since 1970.
        """
        step = deviation_limit_bytes(quoted_bytes)
        most = max(step, quoted_bytes * MOST_SHORT_PERCENT // 100)
        before = self.of(launch) or Seen(launch, quoted_bytes)
        short = min(self.excess_bytes + step, most)
        if before.peak_bytes:
            # Its charge is the peak: what is missing is missing beyond that.
            short = min(before.short_bytes + step, most)
        return self._with(replace(before, quoted_bytes=quoted_bytes, short_bytes=short, short_s=now_s))

    def at(self, now_s: float) -> Calibration:
        """Without what is no longer believed at that time."""
        kept = (
            replace(each, short_bytes=0) if now_s - each.short_s > SHORT_KEPT_S else each
            for each in self.seen
        )
        return replace(self, seen=tuple(each for each in kept if each.peak_bytes or each.short_bytes))

    def for_several_cards(self) -> Calibration:
        """What holds where a launch may be shared out: no peak of one card, but the excess, on each of them."""
        return replace(self, seen=(), least_excess_bytes=self.excess_bytes)

    def _with(self, seen: Seen) -> Calibration:
        others = tuple(each for each in self.seen if each.launch != seen.launch)
        whole = self.has_measured_build or seen.is_whole
        return replace(self, seen=(*others, seen), has_measured_build=whole)


@dataclass(frozen=True, slots=True)
class Deviation:
    """A peak that is far from its quote.

    Attributes:
        quoted_bytes: what was expected at that moment.
        measured_bytes: the peak.
        text: both, for a person.
    """

    quoted_bytes: int
    measured_bytes: int
    text: str

    @property
    def difference_bytes(self) -> int:
        """Above 0 where more was taken than expected."""
        return self.measured_bytes - self.quoted_bytes


def slack_bytes(peak_bytes: int) -> int:
    """Kept beside a peak: max(128 MiB, 1 %)."""
    return max(SLACK_LEAST_BYTES, peak_bytes * SLACK_PERCENT // 100)


def deviation_limit_bytes(quoted_bytes: int) -> int:
    """How far a peak may be from its quote untold: max(256 MiB, 2 %)."""
    return max(DEVIATION_LEAST_BYTES, quoted_bytes * DEVIATION_PERCENT // 100)


def comparable_bytes(quote: Quote, backend: Backend) -> int:
    """What of a quote a peak is held against: on the card, without the floor, what was learnt, and what comes later.

    Where host memory takes the card's place, prompt cache and checkpoints fill up only in conversations.

    Args:
        quote: as it was before :func:`calibrated`; of a measured one nothing is left to compare with.
        backend: what the launch computes on.
    """
    left_out = {EXCESS, PEAK, _FLOOR} | (TAKEN_LATER if backend is Backend.CPU else frozenset())
    return sum(item.bytes for item in _on_card(quote) if item.name not in left_out)


def calibrated(quote: Quote, launch: str, calibration: Calibration) -> Quote:
    """The quote with what was seen: of this very launch its peak, else what launches of the model took beyond theirs.

    Host memory in a card's place shows pages only once they were used, so there a peak never lowers a price. The host
    part beside a card stays as it was.

    Args:
        quote: from the header or the engine.
        launch: its :func:`launch_text`.
        calibration: of checkpoint, build, backend and card.
    """
    seen = calibration.of(launch)
    if seen is None or not seen.is_whole or calibration.scope.backend is Backend.CPU:
        return with_excess(quote, calibration)
    quoted = sum(item.bytes for item in _on_card(quote))
    formula = (
        f"the most that this very launch took here, last seen {_date(seen.seen_s)}, after a prompt of"
        f" {seen.probe_tokens:,} tokens; its quote was {mib_text(quoted)} MiB"
    )
    slack = slack_bytes(seen.peak_bytes)
    items = [
        LineItem(PEAK, Place.CARD, seen.peak_bytes, Evidence.MEASURED, formula),
        LineItem(SLACK, Place.CARD, slack, Evidence.MEASURED, f"max(128 MiB, {SLACK_PERCENT} %) of a peak"),
    ]
    if seen.short_bytes:
        why = f"it ran out of memory ({_date(seen.short_s)}) within what it had been given"
        items.append(LineItem(EXCESS, Place.CARD, seen.short_bytes, Evidence.MEASURED, why))
    return Quote((*items, *(item for item in quote.items if item.place is Place.HOST)))


def with_excess(quote: Quote, calibration: Calibration | None) -> Quote:
    """The quote with the line that every launch is charged that was not measured."""
    item = calibration.excess_item if calibration is not None else None
    return quote if item is None else Quote((*quote.items, item))


def calibrated_policy(policy: PlanPolicy, calibration: Calibration | None) -> PlanPolicy:
    """The policy without a floor under the workspace, once this build was measured on this card."""
    if calibration is None or not calibration.has_measured_build:
        return policy
    return replace(policy, workspace_reserve_mib=0)


def deviation(quote: Quote, measurement: Measurement) -> Deviation | None:
    """What is to be told of a peak: further from what the quote leaves open than max(256 MiB, 2 %); None for nothing.

    What is only kept ready (slack, and a floor under the workspace) may be used or not, so neither is a deviation. A
    peak without a prompt, or in host memory, shows less than will be used, so it is held against the quote from above
    alone.

    Args:
        quote: before :func:`calibrated`.
        measurement: of that launch.
    """
    backend, peak = measurement.key.scope.backend, measurement.peak_bytes
    most = comparable_bytes(quote, backend)
    kept_ready = sum(item.bytes for item in _on_card(quote) if item.name == SLACK)
    limit = deviation_limit_bytes(most)
    if peak > most + limit:
        expected, how = most, "more"
    elif peak < most - kept_ready - limit and measurement.probe_tokens and backend is not Backend.CPU:
        expected, how = most - kept_ready, "less"
    else:
        return None
    text = (
        f"took {mib_text(peak)} MiB at most, {mib_text(abs(peak - expected))} MiB {how} than the"
        f" {mib_text(expected)} MiB of its quote; more than {mib_text(limit)} MiB apart is told."
        " Its next launch is charged by this peak."
    )
    if backend is Backend.CPU or not measurement.probe_tokens:
        text = text.replace("Its next launch is", "Launches of the model are")
    return Deviation(expected, peak, text)


# --- the text of a launch -----------------------------------------------------------------------------------------


def launch_text(
    launch: Launch, projector: ProjectorFacts | None = None, arguments: tuple[str, ...] = ()
) -> str:
    """A launch as text: the same for the same, and another one for whatever may change what a peak is held against.

    Every field of :class:`Launch` is in it but those that only say what host memory may hold later; the planner
    changes them with what the host has left. A field that is added makes old texts unknown, which is safe.

    Args:
        launch: the resolved values; of a drafter a digest of its facts is taken.
        projector: loaded beside it; None without.
        arguments: further ones for the engine, as they are given, in their order.
    """
    parts = {
        each.name: _plain(getattr(launch, each.name))
        for each in dataclasses.fields(launch)
        if each.name != "drafter" and each.name not in _FOR_LATER
    }
    parts["drafter"] = _digest(launch.drafter)
    parts["projector"] = _digest(projector)
    parts["arguments"] = list(arguments)
    return json.dumps(parts, sort_keys=True, separators=(",", ":"))


def _digest(facts: CheckpointFacts | ProjectorFacts | None) -> str | None:
    if facts is None:
        return None
    text = json.dumps(_plain(facts), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()


def _plain(value: object) -> Any:
    """A value as JSON has it; raises TypeError for what has no order or no meaning there."""
    if isinstance(value, enum.Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: _plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{type(value).__name__} has no place in the text of a launch")


def _on_card(quote: Quote) -> tuple[LineItem, ...]:
    return tuple(item for item in quote.items if item.place is Place.CARD)


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).date().isoformat()
