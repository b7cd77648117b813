"""The refusal for lack of memory: why a launch does not fit, who holds what, and what would help. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.readings import CardKind
from lllm3090d.planning.planner import Planner
from lllm3090d.planning.quote import Place
from lllm3090d.planning.request import Room as GivenRoom
from lllm3090d.planning.reserves import Budget
from lllm3090d.planning.smallest_card import SmallestCard
from lllm3090d.planning.units import mib_text
from lllm3090d.planning.verdict import Verdict
from lllm3090d.serving.combined_remedies import SLOWER, Roomier, combined_remedies
from lllm3090d.serving.commands import NOBODY, Wish
from lllm3090d.serving.freeings import (
    EASE,
    Scene,
    all_freeings,
    foreign_units,
    state_text,
    unlisted_bytes,
    who,
)
from lllm3090d.serving.launch_remedies import Changes, larger_card, launch_remedies, nothing_helps
from lllm3090d.serving.ledger import Reservation, ReservationState
from lllm3090d.serving.observation import CardState
from lllm3090d.serving.remedies import Cause, Holder, Remedy, RemedyKind, Room, cause_of, freeing_remedies
from lllm3090d.serving.unruled import OfferedPlan

MOST_NAMED = 4  # in a sentence; the tables have all


def _as_priced(changes: Changes) -> bool:
    """What the planner has found by the price is a plan."""
    return True


def refuse(
    error: LlmError,
    *,
    budget: Budget,
    card: CardState,
    reservations: Iterable[Reservation],
    instances: Iterable[Holder],
    fits: Callable[[int], bool],
    verdict: Verdict = Verdict.TOO_BIG,
    serves: Callable[[Changes], bool] = _as_priced,
    asked: Wish = NOBODY,
    held: Mapping[str, int] | None = None,
    now_s: float | None = None,
    host: Budget | None = None,
    smallest: SmallestCard | None = None,
    more: Iterable[Remedy] = (),
    roomier: Roomier | None = None,
) -> LlmError:
    """A refusal for lack of memory: why it does not fit, who holds what, and what would help, each proven.

    Args:
        error: the planner's refusal.
        budget: what the card can give.
        card: the card as it was read.
        reservations: on that card.
        instances: our models that run, on any card.
        fits: whether the launch would fit with so many bytes more on the card; more never fits less. See
            :func:`fits_with_more`.
        verdict: on the model.
        serves: whether the planner has a plan for the same request with some changes, see :func:`serves_changed`;
            without it what the planner has found by the price alone is taken to be one.
        asked: what was asked for, for commands that ask again.
        held: bytes each run holds by the reading, see :func:`lllm3090d.serving.admission.held_now`; without it as the
            driver tells.
        now_s: on the scheduler's clock; without it no ages are told.
        host: what host memory beside the card can give, for a launch that lacks that.
        smallest: card on which the model serves an agent; told where this one is smaller.
        more: further remedies.
        roomier: the launch with more room, for what only helps together, see :func:`in_more_room`; without it such
            remedies are not looked for.

    Returns:
        INSUFFICIENT_VRAM where a card is too small, INSUFFICIENT_MEMORY where host memory is.
    """
    scene = Scene(
        kind=card.card.kind,
        budget=budget,
        reservations=tuple(reservations),
        holders={each.run: each for each in instances},
        strangers=card.strangers,
        held=card.in_use if held is None else held,
        resident=card.resident,
        now_s=now_s,
        host=host,
    )
    return _refusal(
        error,
        scene,
        fits,
        verdict,
        serves=serves,
        asked=asked,
        more=(*more, *_larger_card(budget, smallest)),
        roomier=roomier,
    )


def with_budget(
    error: LlmError,
    budget: Budget,
    card_kind: CardKind,
    reservations: Iterable[Reservation],
    verdict: Verdict = Verdict.TOO_BIG,
    *,
    fits: Callable[[int], bool] | None = None,
    serves: Callable[[Changes], bool] = _as_priced,
    asked: Wish = NOBODY,
    smallest: SmallestCard | None = None,
    more: Iterable[Remedy] = (),
) -> LlmError:
    """The same for a card of which nothing more was read, such as one that is only thought of.

    Without ``fits`` it would fit with what is missing. Our models are taken to hold what they are charged, but for
    those that are loading.
    """
    missing = error.details.get("missing_bytes")

    def has_enough(extra_bytes: int) -> bool:
        return isinstance(missing, int) and extra_bytes >= missing

    ours = tuple(reservations)
    held = {each.run: each.charged_bytes for each in ours if each.state is not ReservationState.HELD}
    scene = Scene(card_kind, budget, ours, held=held)
    return _refusal(
        error,
        scene,
        fits or has_enough,
        verdict,
        serves=serves,
        asked=asked,
        more=(*more, *_larger_card(budget, smallest)),
    )


def fits_with_more(planner: Planner | OfferedPlan, device: str | None = None) -> Callable[[int], bool]:
    """Whether a question to the planner would have a plan with so many bytes more on the card.

    Args:
        planner: the question, or the plan that stands in its place.
        device: the card that gets more, by the engine's name for it, where there are several; the first without it.
    """

    def fits(extra_bytes: int) -> bool:
        try:
            more = _more_room(planner.room, extra_bytes, device)
            replace(planner, room=more, explains=False).plan()
        except LlmError:
            return False  # for want of memory, or of something that more memory would not give either
        return True

    return fits


def _more_room(room: GivenRoom, extra_bytes: int, device: str | None = None) -> GivenRoom:
    """The same with so many bytes more on one card, the first one unless another is named."""
    name = device or (room.cards[0].name if room.cards else "")
    cards = tuple(
        replace(each, free_bytes=each.free_bytes + extra_bytes) if each.name == name else each
        for each in room.cards
    )
    return replace(room, card=room.card + extra_bytes, cards=cards)


def in_more_room(planner: Planner | OfferedPlan) -> Roomier | None:
    """A question to the planner with more room on its card; None for a plan that stands in the place of one."""
    if isinstance(planner, OfferedPlan):
        return None

    def refusal(extra_bytes: int) -> LlmError | None:
        try:
            replace(planner, room=_more_room(planner.room, extra_bytes), explains=True).plan()
        except LlmError as error:
            return error
        return None

    def serves(changes: Changes, extra_bytes: int) -> bool:
        return serves_changed(replace(planner, room=_more_room(planner.room, extra_bytes)))(changes)

    return Roomier(refusal, serves)


def serves_changed(planner: Planner | OfferedPlan) -> Callable[[Changes], bool]:
    """Whether a question to the planner would have a plan with some fields of its request changed.

    A plan that stands in the place of a question cannot be changed.
    """

    def serves(changes: Changes) -> bool:
        if isinstance(planner, OfferedPlan):
            return False
        try:
            replace(planner, request=replace(planner.request, **changes), explains=False).plan()
        except LlmError:
            return False  # as for more room
        return True

    return serves


def _refusal(
    error: LlmError,
    scene: Scene,
    fits: Callable[[int], bool],
    verdict: Verdict,
    *,
    serves: Callable[[Changes], bool],
    asked: Wish,
    more: tuple[Remedy, ...],
    roomier: Roomier | None = None,
) -> LlmError:
    on_host = scene.kind is CardKind.CPU
    freeings, room = all_freeings(scene), Room(scene.budget, fits)
    beside = not on_host and error.details.get("place") == Place.HOST
    cause = Cause.HOST if beside else cause_of(scene, freeings, room)
    may_leave = () if cause in {Cause.HOST, Cause.CARD} else freeing_remedies(scene, freeings, room)
    if any(each.kind is RemedyKind.HEADLESS for each in more):  # the desktop is only thought of
        may_leave = tuple(each for each in may_leave if each.kind is not RemedyKind.END_DESKTOP)
    found = (*launch_remedies(error.details, asked, serves), *may_leave, *more)
    alone = {each.kind for each in found if each.verified}
    is_easy = any(EASE[kind] < EASE[RemedyKind.COMBINED] for kind in alone - SLOWER)
    if roomier is not None and cause is not Cause.HOST and not is_easy:
        found += combined_remedies(scene, freeings, roomier, asked, alone)
    remedies = sorted(found, key=lambda each: EASE[each.kind])
    summary = first_sentence(cause, scene, asked.name)
    return LlmError(
        ErrorCode.INSUFFICIENT_MEMORY if on_host or beside else ErrorCode.INSUFFICIENT_VRAM,
        f"{summary} {error.message}",
        hint=_hint(error, remedies),
        **(dict(error.details) | _facts(error, scene, beside=beside)),
        cause=str(cause),
        summary=summary,
        verdict=str(verdict),
        remedies=[asdict(each) | {"kind": str(each.kind)} for each in remedies],
    )


def _larger_card(budget: Budget, smallest: SmallestCard | None) -> tuple[Remedy, ...]:
    """Advice on a card, where this one is too small for an agent whoever leaves it."""
    total = sum(line.bytes for line in budget.lines if line.name == "total")
    return () if smallest is None or smallest.total_bytes <= total else (larger_card(smallest),)


def first_sentence(cause: Cause, scene: Scene, name: str) -> str:
    """Why it does not fit, in one sentence."""
    what, where = name or "The model", "in memory" if scene.kind is CardKind.CPU else "on the card"
    match cause:
        case Cause.CARD:
            memory = "this machine" if scene.kind is CardKind.CPU else "the card"
            return f"{what} is too big for {memory} as asked, even with nothing else on it."
        case Cause.STRANGERS:
            return (
                f"{what} does not fit {where} now because of other programs{_told(_strangers_text(scene))}."
            )
        case Cause.OURS:
            return f"{what} does not fit {where} now because of models that are loaded{_told(_ours_text(scene))}."
        case Cause.BOTH:
            told = _told([*_strangers_text(scene), *_ours_text(scene)])
            return f"{what} does not fit {where} now because of other programs and of models that are loaded{told}."
        case Cause.DESKTOP:
            return f"{what} does not fit {where} beside a desktop."
        case Cause.HOST:
            return f"{what} does not fit: the host memory that it needs beside the card is not free."


def _told(parts: list[str]) -> str:
    """The largest of a list, and how many more there are."""
    if not parts:
        return ""
    rest = len(parts) - MOST_NAMED
    named = parts[:MOST_NAMED] + ([f"{rest} more"] if rest > 0 else [])
    return ": " + (named[0] if len(named) == 1 else f"{', '.join(named[:-1])} and {named[-1]}")


def _strangers_text(scene: Scene) -> list[str]:
    holders = sorted(scene.strangers, key=lambda each: -(each.used_bytes or 0))
    units = [
        f"the foreign unit {name} holds {mib_text(size)} MiB" for name, size in foreign_units(scene).items()
    ]
    return [
        *units,
        *(
            f"{who(each)} holds {mib_text(each.used_bytes)} MiB" if each.used_bytes else who(each)
            for each in holders
        ),
    ]


def _ours_text(scene: Scene) -> list[str]:
    held = sorted(scene.reservations, key=lambda each: -each.charged_bytes)
    return [
        f"{each.name} ({', '.join(filter(None, (mib_text(each.charged_bytes) + ' MiB', state_text(scene, each))))})"
        for each in held
    ]


def _facts(error: LlmError, scene: Scene, *, beside: bool) -> dict[str, Any]:
    """What a program may want to know of the memory, and who holds it."""
    place = Place.HOST if beside else Place.CARD
    items = error.details.get("items", ())
    budget = scene.host if beside and scene.host is not None else scene.budget
    return {
        "needed": [
            {"name": each["name"], "bytes": each["bytes"]} for each in items if each["place"] == str(place)
        ],
        "budget": [{"name": b.name, "bytes": b.bytes, "origin": b.origin} for b in budget.deciding_lines],
        "card_kind": str(scene.kind),
        "ours": [_held(scene, each) for each in scene.reservations if not _is_quarantined(each)],
        "quarantine": [_held(scene, each) for each in scene.reservations if _is_quarantined(each)],
        "strangers": [
            {
                "name": each.name,
                "pid": each.pid,
                "user": each.user,
                "bytes": each.used_bytes,
                "model": each.model,
                "unseen": each.unseen,
            }
            for each in scene.strangers
        ],
        "foreign_units": [{"name": name, "bytes": size} for name, size in foreign_units(scene).items()],
        "unlisted_bytes": 0 if scene.kind is CardKind.CPU else unlisted_bytes(scene),
    }


def _held(scene: Scene, reservation: Reservation) -> dict[str, Any]:
    holder = scene.holders.get(reservation.run)
    return {
        "name": reservation.name,
        "run": reservation.run,
        "bytes": reservation.charged_bytes,
        "state": str(reservation.state),
        "idle_s": holder.idle_s if holder else None,
        "busy": holder is not None and holder.idle_s is None and not holder.is_ending,
        "pinned": holder is not None and holder.pinned,
        "doing": state_text(scene, reservation),
    }


def _is_quarantined(reservation: Reservation) -> bool:
    return reservation.state is ReservationState.QUARANTINED


def _hint(error: LlmError, remedies: Sequence[Remedy]) -> str:
    """All remedies in sentences; the planner's own words where it had others."""
    told = [f"{each.text}: {each.command}." if each.command else f"{each.text}." for each in remedies]
    if error.hint and "largest_context_tokens" not in error.details:
        told.insert(0, error.hint)
    elif not any(each.verified for each in remedies):
        told.insert(0, nothing_helps(error.details))
    return " ".join(told)
