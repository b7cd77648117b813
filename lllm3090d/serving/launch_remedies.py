"""How a launch could be changed so that it fits: the planner's own findings, with the commands for them. Pure.

Each was found by pricing the changed launch (:func:`lllm3090d.planning.refusal.too_large`). Before it is offered the
planner is asked for exactly that, which also looks at what else there is to a plan, such as host memory beside a card.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lllm3090d.planning.cache import CacheType
from lllm3090d.planning.refusal import slots_text
from lllm3090d.planning.request import Drafting, Offload, ProjectorPlace
from lllm3090d.planning.smallest_card import SmallestCard
from lllm3090d.planning.units import mib_text
from lllm3090d.serving.commands import Wish, asking_again, options_again
from lllm3090d.serving.remedies import Remedy, RemedyKind

_Q8_0 = {"cache_type_k": CacheType.Q8_0, "cache_type_v": CacheType.Q8_0}


Changes = Mapping[str, Any]  # new values by field of a request
_Candidate = tuple[RemedyKind, str, Changes]


def changed_launches(details: Mapping[str, Any]) -> tuple[_Candidate, ...]:
    """Kind, sentence and changes of each launch that fits by the price. Args: details: of the planner's refusal."""
    candidates = (
        _cache_type(details),
        _context(details),
        _slots(details),
        *_lighter(details),
        _offload(details),
    )
    return tuple(filter(None, candidates))


def launch_remedies(
    details: Mapping[str, Any], asked: Wish, serves: Callable[[Changes], bool]
) -> tuple[Remedy, ...]:
    """What else could be launched.

    Args:
        details: of the planner's refusal.
        asked: what was asked for.
        serves: whether the planner has a plan for the same request with such changes.
    """
    found = [
        Remedy(
            kind,
            text,
            asking_again(asked, changes),
            0,
            verified=True,
            options=options_again(asked, changes),
        )
        for kind, text, changes in changed_launches(details)
        if serves(changes)
    ]
    if details.get("fits_without_prompt_cache"):
        text = "Without a prompt cache (setting prompt_cache_mib = 0) it fits as asked"
        found.append(Remedy(RemedyKind.PROMPT_CACHE, text, "", 0, verified=True))
    return tuple(found)


def _lighter(details: Mapping[str, Any]) -> Iterator[_Candidate]:
    """Without what can be given up."""
    if details.get("fits_without_drafting"):
        yield RemedyKind.DRAFTING, "Without drafting it fits as asked", {"drafting": Drafting.OFF}
    if details.get("fits_with_projector_on_host"):
        text = "With the projector in host memory it fits as asked"
        yield RemedyKind.PROJECTOR, text, {"projector": ProjectorPlace.HOST}


def headless() -> Remedy:
    """For a card that is only thought of: without the desktop on it."""
    return Remedy(
        RemedyKind.HEADLESS, "Without a desktop (--headless) it would fit as asked", "", 0, verified=True
    )


def larger_card(smallest: SmallestCard) -> Remedy:
    """The smallest card on which the model serves an agent."""
    return Remedy(
        RemedyKind.LARGER_CARD, f"For an agent it needs a card of {smallest.gib} GiB", "", 0, verified=False
    )


def nothing_helps(details: Mapping[str, Any]) -> str:
    """What to say where there is no remedy."""
    least = details.get("smallest_bytes")
    if not isinstance(least, int):
        return "Nothing that could be changed here would make it fit: choose a smaller model."
    return (
        "Nothing that could be changed here would make it fit: even the smallest launch needs"
        f" {mib_text(least)} MiB. Choose a smaller model."
    )


def _context(details: Mapping[str, Any]) -> _Candidate | None:
    largest, tokens = details.get("largest_context_tokens"), details.get("context_tokens")
    if not largest:
        return None
    instead = f" instead of {tokens:,}" if tokens else ""
    text = f"A context of {largest:,} tokens{instead} fits (--context {largest})"
    return RemedyKind.CONTEXT, text, {"context_tokens": largest}


def _slots(details: Mapping[str, Any]) -> _Candidate | None:
    slots, context = details.get("largest_parallel"), details.get("context_tokens_with_largest_parallel")
    if not slots:
        return None
    fits, changes, option = "fits" if slots == 1 else "fit", {"parallel": slots}, f"--parallel {slots}"
    instead = f" instead of {details['parallel']}" if details.get("parallel") else ""
    beside = ""
    if context:
        changes["context_tokens"] = context
        option += f" --context {context}"
        beside = f" with {context:,} tokens of context"
    return RemedyKind.SLOTS, f"{slots_text(slots)}{instead} {fits}{beside} ({option})", changes


def _cache_type(details: Mapping[str, Any]) -> _Candidate | None:
    now = " and ".join(dict.fromkeys((details.get("cache_type_k", ""), details.get("cache_type_v", ""))))
    cache = f"A {CacheType.Q8_0} cache instead of {now}"
    if details.get("fits_with_q8_0"):
        return RemedyKind.CACHE_TYPE, f"{cache} fits as asked (--cache-type {CacheType.Q8_0})", _Q8_0
    tokens = details.get("largest_context_tokens_with_q8_0")
    if not tokens:
        return None
    text = f"{cache} fits {tokens:,} tokens of context (--cache-type {CacheType.Q8_0} --context {tokens})"
    return RemedyKind.CACHE_TYPE, text, _Q8_0 | {"context_tokens": tokens}


def _offload(details: Mapping[str, Any]) -> _Candidate | None:
    text = "With a part of the model in host memory, slower, it fits"
    if details.get("fits_with_offload"):
        return RemedyKind.OFFLOAD, f"{text} as asked", {"offload": Offload.ALLOWED}
    window = details.get("context_tokens_with_offload")
    if not window:
        return None
    changes = {"offload": Offload.ALLOWED, "context_tokens": window, "parallel": 1}
    return RemedyKind.OFFLOAD, f"{text} with {window:,} tokens of context in 1 slot", changes
