"""Pressure: other programs take memory of a card while models are loaded. Pure; time is given.

What counts is growth. Other programs may hold what they held when a model was last loaded or unloaded, because that
was counted then, or what is kept for a desktop, whichever is more; beyond that they take what models were promised. No
reserve is asked for here, only of loads: with one on both sides, a model that admission lets in would be thrown out
again. For the same reason a model that made room and is loaded again is left alone until they take still more.
"""

from __future__ import annotations

from dataclasses import dataclass

from lllm3090d.planning.units import MIB, mib_text
from lllm3090d.settings import PressurePolicy

# Growth that is nothing to talk about: windows that are opened and closed.
SLACK_BYTES = 512 * MIB
LEAST_COOLDOWN_S = 60.0
COOLDOWN_GRACES = 2
# A stranger who comes back to what it held within this time has not grown, however often it comes and goes.
RECALL_S = 1800.0


@dataclass(frozen=True, slots=True)
class ModelOnCard:
    """The part of a loaded model on one card.

    Attributes:
        run: identity of the launch.
        name: model.
        charged_bytes: what it was promised there, or was seen to take.
        in_use_bytes: what the card's list shows for it.
        idle: it serves, and nothing is in flight.
        pinned: it is never unloaded for anybody.
        starting: it is being loaded, so it may hold nothing yet.
    """

    run: str
    name: str
    charged_bytes: int
    in_use_bytes: int
    idle: bool
    pinned: bool = False
    starting: bool = False

    @property
    def may_go(self) -> bool:
        """It is idle, and nobody wants it to stay."""
        return self.idle and not self.pinned and not self.starting

    @property
    def untaken_bytes(self) -> int:
        """What it is still to take."""
        return max(0, self.charged_bytes - self.in_use_bytes)


@dataclass(frozen=True, slots=True)
class PressureReading:
    """One card at one moment.

    Attributes:
        now_s: when, on a monotonic clock.
        card: its UUID.
        foreign_bytes: held by processes that are not ours; None where the driver does not tell.
        free_bytes: nobody holds it.
        desktop_reserve_bytes: kept for a desktop; 0 where there is none.
        models: those loaded on the card, or being loaded.
    """

    now_s: float
    card: str
    foreign_bytes: int | None
    free_bytes: int
    desktop_reserve_bytes: int
    models: tuple[ModelOnCard, ...]

    @property
    def is_trusted(self) -> bool:
        """The driver's list is complete: of an engine that is missing there, the memory would count as foreign."""
        return self.foreign_bytes is not None and all(
            model.in_use_bytes > 0 or model.starting or model.charged_bytes == 0 for model in self.models
        )


@dataclass(frozen=True, slots=True)
class Nothing:
    """There is nothing to do."""


@dataclass(frozen=True, slots=True)
class Warn:
    """Other programs have grown; told once for each episode.

    Attributes:
        card: UUID.
        text: for a person, with figures.
        foreign_bytes: what they hold.
        excess_bytes: how much of it is beyond what was counted.
        free_bytes: nobody holds it.
    """

    card: str
    text: str
    foreign_bytes: int
    excess_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Unload:
    """These models are to go.

    Attributes:
        card: UUID.
        runs: largest first; never one that is pinned, busy or being loaded.
        text: for a person, with figures.
        foreign_bytes: what other programs hold.
        excess_bytes: how much of it is beyond what was counted.
        free_bytes: nobody holds it.
    """

    card: str
    runs: tuple[str, ...]
    text: str
    foreign_bytes: int
    excess_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Over:
    """An episode that was told has ended.

    Attributes:
        card: UUID.
        text: for a person.
    """

    card: str
    text: str


Decision = Nothing | Warn | Unload | Over


@dataclass(slots=True)
class _Watched:
    """What is remembered of a card. Each time since when something has held is None while it does not."""

    seen_s: float
    runs: frozenset[str] = frozenset()
    floor_bytes: int | None = None  # lowest that strangers held since runs last changed
    grown_since_s: float | None = None
    short_since_s: float | None = None
    told_limit_bytes: int | None = None  # of the episode that was told
    calm_since_s: float | None = None
    quiet_until_s: float | None = None  # no model has to go before
    peak_bytes: int | None = None  # what strangers held when models last made room for them
    below_peak_since_s: float | None = None


class PressureWatch:
    """Looks at readings and says what is to be done. One for all cards."""

    def __init__(self) -> None:
        self._cards: dict[str, _Watched] = {}

    def forget(self, card: str) -> None:
        """A card is gone, or no longer looked at."""
        self._cards.pop(card, None)

    def look(self, reading: PressureReading, policy: PressurePolicy, grace_s: float) -> Decision:
        """What a reading of a card asks for.

        Args:
            reading: the card now; one that is not trusted is ignored.
            policy: what a person wants done.
            grace_s: seconds for which growth must last before anything is done.

        Raises:
            ValueError: the reading is older than the one before.
        """
        watched = self._cards.setdefault(reading.card, _Watched(reading.now_s))
        if reading.now_s < watched.seen_s:
            raise ValueError(f"a reading of {reading.now_s} s came after one of {watched.seen_s} s")
        watched.seen_s = reading.now_s
        foreign = reading.foreign_bytes
        if foreign is None or not reading.is_trusted:
            # Nobody knows what was in between, so what has to last begins anew.
            watched.grown_since_s = watched.short_since_s = watched.calm_since_s = None
            return Nothing()
        _note(watched, reading, foreign)
        if policy is PressurePolicy.IGNORE or not reading.models:
            return _leave(watched, reading, policy)
        cooldown_s = max(LEAST_COOLDOWN_S, COOLDOWN_GRACES * grace_s)
        return _judge(watched, _Growth(reading, foreign, watched.floor_bytes), policy, grace_s, cooldown_s)


class _Growth:
    """How far other programs are beyond what was counted.

    Attributes:
        limit_bytes: what they may hold.
        excess_bytes: what they hold beyond; negative below.
        short_bytes: room that is missing if they are to grow as much again and the models are to take what is theirs.
    """

    def __init__(self, reading: PressureReading, foreign_bytes: int, floor_bytes: int | None) -> None:
        self.reading = reading
        self.foreign_bytes = foreign_bytes
        self.limit_bytes = max(floor_bytes or 0, reading.desktop_reserve_bytes)
        self.excess_bytes = foreign_bytes - self.limit_bytes
        untaken = sum(model.untaken_bytes for model in reading.models)
        self.short_bytes = untaken + self.excess_bytes - reading.free_bytes

    def victims(self) -> tuple[ModelOnCard, ...]:
        """The largest idle models, no more than give the room that is short."""
        room = 0
        victims = []
        idle = [model for model in self.reading.models if model.may_go and model.in_use_bytes > 0]
        for model in sorted(idle, key=lambda each: (-each.in_use_bytes, each.name, each.run)):
            if room >= self.short_bytes:
                break
            victims.append(model)
            room += model.in_use_bytes
        return tuple(victims)

    def text(self, what: str) -> str:
        """The figures, and what is done."""
        held, excess, limit = (
            mib_text(size) for size in (self.foreign_bytes, self.excess_bytes, self.limit_bytes)
        )
        return (
            f"Other programs hold {held} MiB of the card, {excess} MiB more than the {limit} MiB that were counted;"
            f" {mib_text(self.reading.free_bytes)} MiB are free. {what}"
        )


def _note(watched: _Watched, reading: PressureReading, foreign: int) -> None:
    """Bring what is remembered up to date."""
    runs = frozenset(model.run for model in reading.models)
    if runs != watched.runs or watched.floor_bytes is None:
        # What others hold now was counted when a model was loaded, or sees the room that one has left.
        watched.runs, watched.floor_bytes = runs, foreign
        watched.grown_since_s = watched.short_since_s = None
    watched.floor_bytes = min(watched.floor_bytes, foreign)
    if watched.peak_bytes is not None:
        is_below = foreign < watched.peak_bytes - SLACK_BYTES
        watched.below_peak_since_s = _since(watched.below_peak_since_s, is_below, reading.now_s)
        if _lasts(watched.below_peak_since_s, reading.now_s, RECALL_S):
            watched.peak_bytes = watched.below_peak_since_s = None


def _leave(watched: _Watched, reading: PressureReading, policy: PressurePolicy) -> Decision:
    """Nothing is to be watched; an episode that was told ends."""
    watched.grown_since_s = watched.short_since_s = watched.calm_since_s = None
    told, watched.told_limit_bytes = watched.told_limit_bytes, None
    if told is None:
        return Nothing()
    why = "they are not watched any more" if policy is PressurePolicy.IGNORE else "no model is loaded there"
    return Over(reading.card, f"Other programs take nothing from models on the card: {why}.")


def _judge(
    watched: _Watched, growth: _Growth, policy: PressurePolicy, grace_s: float, cooldown_s: float
) -> Decision:
    now_s, reading = growth.reading.now_s, growth.reading
    has_grown = growth.excess_bytes >= SLACK_BYTES
    watched.grown_since_s = _since(watched.grown_since_s, has_grown, now_s)
    # Not again for what they held when models made room for them before.
    is_new = growth.foreign_bytes >= (watched.peak_bytes or 0) + SLACK_BYTES
    is_short = has_grown and is_new and growth.short_bytes > 0
    watched.short_since_s = _since(watched.short_since_s, is_short, now_s)

    is_quiet = watched.quiet_until_s is not None and now_s < watched.quiet_until_s
    if policy is PressurePolicy.YIELD and not is_quiet and _lasts(watched.short_since_s, now_s, grace_s):
        victims = growth.victims()
        if victims:
            watched.quiet_until_s = now_s + cooldown_s
            watched.peak_bytes, watched.below_peak_since_s = growth.foreign_bytes, None
            _open(watched, growth)
            names = ", ".join(f"{model.name} ({mib_text(model.in_use_bytes)} MiB)" for model in victims)
            return Unload(
                reading.card,
                tuple(model.run for model in victims),
                growth.text(f"Unloaded for them: {names}."),
                growth.foreign_bytes,
                growth.excess_bytes,
                reading.free_bytes,
            )
    if watched.told_limit_bytes is None:
        if not _lasts(watched.grown_since_s, now_s, grace_s):
            return Nothing()
        _open(watched, growth)
        what = "No idle model can make room." if is_short and policy is PressurePolicy.YIELD else ""
        return Warn(
            reading.card,
            growth.text(what or "The next load gets so much less."),
            growth.foreign_bytes,
            growth.excess_bytes,
            reading.free_bytes,
        )
    is_calm = growth.foreign_bytes < watched.told_limit_bytes + SLACK_BYTES
    watched.calm_since_s = _since(watched.calm_since_s, is_calm, now_s)
    if not _lasts(watched.calm_since_s, now_s, cooldown_s):
        return Nothing()
    watched.told_limit_bytes = watched.calm_since_s = None
    return Over(
        reading.card,
        f"Other programs are back to {mib_text(growth.foreign_bytes)} MiB of the card;"
        f" {mib_text(reading.free_bytes)} MiB are free.",
    )


def _open(watched: _Watched, growth: _Growth) -> None:
    """An episode begins, or goes on."""
    watched.calm_since_s = None
    if watched.told_limit_bytes is None:
        watched.told_limit_bytes = growth.limit_bytes


def _since(since_s: float | None, holds: bool, now_s: float) -> float | None:
    """Since when something has held without a break."""
    if not holds:
        return None
    return now_s if since_s is None else since_s


def _lasts(since_s: float | None, now_s: float, length_s: float) -> bool:
    return since_s is not None and now_s - since_s >= length_s
