"""The planner: the largest useful context that fits, and its quote."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from lllm3090d.checkpoints.facts import CheckpointFacts
from lllm3090d.engines.capabilities import Backend
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.readings import CardKind
from lllm3090d.planning import cache
from lllm3090d.planning.cache import CacheType
from lllm3090d.planning.quote import Launch, Place, PlanPolicy, Quote, price
from lllm3090d.planning.units import MIB, PAGE_TOKENS, mib_ceil, round_up

__all__ = ["CacheType", "CappedBy", "Plan", "PlanPolicy", "PlanRequest", "plan"]


class CappedBy(enum.StrEnum):
    """Why the window is not larger."""

    MODEL = "model"  # the trained context
    MEMORY = "memory"  # what the card can give
    REQUEST = "request"  # somebody asked for this size


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What a person asked for; None leaves the choice to the planner.

    Attributes:
        context_tokens: total context of all slots (``-c``).
        parallel: slots.
        cache_type_k, cache_type_v: type of the cache.
    """

    context_tokens: int | None = None
    parallel: int | None = None
    cache_type_k: CacheType | None = None
    cache_type_v: CacheType | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """How to launch a checkpoint, and what it costs.

    Attributes:
        context_tokens: total context, a multiple of parallel (``-c``).
        parallel: slots (``--parallel``).
        window_tokens: what one slot can hold.
        cache_type_k, cache_type_v: type of the cache.
        batch_tokens, micro_batch_tokens: ``-b`` and ``-ub``.
        on_card: all layers on a real card (``-ngl`` all); False for backend cpu.
        context_checkpoints: ``--ctx-checkpoints``.
        prompt_cache_mib: ``--cache-ram``.
        capped_by: why the window is not larger.
        quote: the price.
    """

    context_tokens: int
    parallel: int
    window_tokens: int
    cache_type_k: CacheType
    cache_type_v: CacheType
    batch_tokens: int
    micro_batch_tokens: int
    on_card: bool
    context_checkpoints: int
    prompt_cache_mib: int
    capped_by: CappedBy
    quote: Quote


@dataclass(frozen=True, slots=True)
class _Search:
    """Everything about a plan but its size, and the memory it must fit into."""

    facts: CheckpointFacts
    template: Launch
    policy: PlanPolicy
    backend: Backend
    grantable_bytes: int

    def launch(self, window_tokens: int, parallel: int) -> Launch:
        """A launch whose context is already what the engine will make of it."""
        stream = round_up(window_tokens, cache.CELL_PADDING_TOKENS)
        return replace(self.template, context_tokens=stream * parallel, parallel=parallel)

    def price(self, launch: Launch) -> Quote:
        return price(self.facts, launch, self.backend, self.policy)

    def need_bytes(self, launch: Launch) -> int:
        return self.price(launch).total_bytes(Place.CARD)

    def fits(self, launch: Launch) -> bool:
        return self.need_bytes(launch) <= self.grantable_bytes

    def largest_window(self, parallel: int) -> int | None:
        """The largest window of so many slots that fits, in whole pages or all that was trained; else None.

        The price never falls as the window grows, so bisection finds it.
        """
        trained = self.facts.trained_context_tokens
        pages = _last_true(
            -(-trained // PAGE_TOKENS),
            lambda n: self.fits(self.launch(min(n * PAGE_TOKENS, trained), parallel)),
        )
        return min(pages * PAGE_TOKENS, trained) if pages else None


def plan(
    facts: CheckpointFacts,
    request: PlanRequest,
    policy: PlanPolicy,
    *,
    backend: Backend,
    card_kind: CardKind,
    grantable_bytes: int,
) -> Plan:
    """Plan a launch: what was asked for exactly, and the largest window that fits for what was left open.

    The context of the plan is what the engine will report: a request is padded up to whole cache cells, 256
    for each slot, never down.

    Args:
        facts: the checkpoint.
        request: what a person asked for.
        policy: what the settings decide.
        backend: what the engine computes on.
        card_kind: whose memory is managed. With CPU the engine must be kept off any card.
        grantable_bytes: what that memory can give now.

    Raises:
        LlmError: INSUFFICIENT_MEMORY with the arithmetic and remedies; INVALID_REQUEST for numbers below 1;
            UNSUPPORTED_COMBINATION for sizes or cache types the engine or the model cannot serve;
            ENGINE_UNUSABLE for an engine that cannot use the card.
    """
    _check_engine(backend, card_kind)
    parallel = 1 if request.parallel is None else request.parallel
    _check_positive("parallel", parallel)
    type_k = request.cache_type_k or policy.cache_type
    type_v = request.cache_type_v or policy.cache_type
    cache.check_cache_types(facts, type_k, type_v)
    search = _Search(
        facts=facts,
        template=Launch(
            context_tokens=0,  # replaced by every launch of the search
            parallel=parallel,
            cache_type_k=type_k,
            cache_type_v=type_v,
            batch_tokens=policy.batch_tokens,
            micro_batch_tokens=policy.micro_batch_tokens,
            context_checkpoints=policy.context_checkpoints,
            prompt_cache_mib=policy.prompt_cache_mib,
        ),
        policy=policy,
        backend=Backend.CPU if card_kind is CardKind.CPU else backend,
        grantable_bytes=max(0, grantable_bytes),
    )
    if request.context_tokens is None:
        window = search.largest_window(parallel)
        if window is None:
            raise _too_large(search, search.launch(_least_window(facts), parallel), card_kind)
        capped_by = CappedBy.MODEL if window == facts.trained_context_tokens else CappedBy.MEMORY
        launch = search.launch(window, parallel)
    else:
        _check_context(facts, request.context_tokens, parallel)
        asked = replace(search.template, context_tokens=request.context_tokens)
        launch = replace(asked, context_tokens=asked.shape(facts).context_tokens)
        if not search.fits(launch):
            raise _too_large(search, launch, card_kind)
        capped_by = CappedBy.REQUEST
    return Plan(
        context_tokens=launch.context_tokens,
        parallel=parallel,
        window_tokens=launch.shape(facts).window_tokens,
        cache_type_k=type_k,
        cache_type_v=type_v,
        batch_tokens=launch.batch_tokens,
        micro_batch_tokens=launch.micro_batch_tokens,
        on_card=card_kind is not CardKind.CPU,
        context_checkpoints=launch.context_checkpoints,
        prompt_cache_mib=launch.prompt_cache_mib,
        capped_by=capped_by,
        quote=search.price(launch),
    )


def _last_true(last: int, holds: Callable[[int], bool]) -> int:
    """The greatest of 1 .. last for which a predicate that turns false once holds; 0 where it never does."""
    low, high = 0, last
    while low < high:
        middle = (low + high + 1) // 2
        if holds(middle):
            low = middle
        else:
            high = middle - 1
    return low


def _least_window(facts: CheckpointFacts) -> int:
    return min(PAGE_TOKENS, facts.trained_context_tokens)


def _check_engine(backend: Backend, card_kind: CardKind) -> None:
    if backend is Backend.CPU and card_kind is not CardKind.CPU:
        raise LlmError(
            ErrorCode.ENGINE_UNUSABLE,
            "This llama-server computes on the CPU only and cannot use the card.",
            hint='Use a llama-server built for CUDA or Vulkan, or set card = "cpu" for host memory.',
            backend=str(backend),
            card_kind=str(card_kind),
        )


def _check_positive(field: str, value: int) -> None:
    if value < 1:
        raise LlmError(
            ErrorCode.INVALID_REQUEST,
            f"{field} must be at least 1, not {value}.",
            hint=f"Leave {field} out to let the planner choose.",
            **{field: value},
        )


def _check_context(facts: CheckpointFacts, context_tokens: int, parallel: int) -> None:
    _check_positive("context_tokens", context_tokens)
    trained, least, share = facts.trained_context_tokens, _least_window(facts), context_tokens // parallel
    if share > trained:
        slots = -(-context_tokens // trained)
        raise LlmError(
            ErrorCode.UNSUPPORTED_COMBINATION,
            f"{context_tokens} tokens of context in {_slots(parallel)} are {share} in each;"
            f" the model was trained for {trained}.",
            hint=f"Ask for at most {trained * parallel} tokens, or for {slots} slots.",
            context_tokens=context_tokens,
            parallel=parallel,
            trained_context_tokens=trained,
            largest_context_tokens=trained * parallel,
        )
    if share < least:
        slots = context_tokens // least
        fewer = f", or for {_slots(slots)} at most" if slots else ""
        raise LlmError(
            ErrorCode.UNSUPPORTED_COMBINATION,
            f"{context_tokens} tokens of context in {_slots(parallel)} are {share} in each;"
            f" a slot needs {least} at least.",
            hint=f"Ask for at least {least * parallel} tokens{fewer}.",
            context_tokens=context_tokens,
            parallel=parallel,
            smallest_context_tokens=least * parallel,
        )


def _slots(count: int) -> str:
    return "1 slot" if count == 1 else f"{count} slots"


def _too_large(search: _Search, launch: Launch, card_kind: CardKind) -> LlmError:
    """The refusal: the arithmetic, and the cheapest changes that would fit."""
    facts, quote = search.facts, search.price(launch)
    needed = quote.total_bytes(Place.CARD)
    smallest = search.need_bytes(search.launch(_least_window(facts), launch.parallel))
    remedies, details = _remedies(search, launch)
    where = "host memory" if card_kind is CardKind.CPU else "the card"
    needed_mib, grantable_mib = mib_ceil(needed), search.grantable_bytes // MIB
    return LlmError(
        ErrorCode.INSUFFICIENT_MEMORY,
        f"{facts.title or facts.architecture} with {launch.context_tokens} tokens of context in"
        f" {_slots(launch.parallel)} needs {needed_mib} MiB ({_sum_in_mib(quote)});"
        f" {where} can give {grantable_mib} MiB now, so {needed_mib - grantable_mib} MiB are missing.",
        hint=" ".join(remedies),
        items=[
            {
                "name": item.name,
                "place": str(item.place),
                "bytes": item.bytes,
                "evidence": str(item.evidence),
                "formula": item.formula,
            }
            for item in quote.items
        ],
        context_tokens=launch.context_tokens,
        parallel=launch.parallel,
        cache_type_k=str(launch.cache_type_k),
        cache_type_v=str(launch.cache_type_v),
        needed_bytes=needed,
        grantable_bytes=search.grantable_bytes,
        missing_bytes=needed - search.grantable_bytes,
        smallest_bytes=smallest,
        **details,
    )


def _sum_in_mib(quote: Quote) -> str:
    """The items on the card in MiB, rounded so that they add up to the rounded total."""
    parts: list[str] = []
    so_far = 0
    for item in quote.items:
        if item.place is Place.CARD:
            shown = mib_ceil(so_far + item.bytes) - mib_ceil(so_far)
            so_far += item.bytes
            if shown:
                parts.append(f"{item.name} {shown}")
    return " + ".join(parts)


def _remedies(search: _Search, launch: Launch) -> tuple[list[str], dict[str, Any]]:
    """Sentences for a person and figures for a program; a figure is None where nothing fits."""
    sentences: list[str] = []
    details: dict[str, Any] = {"largest_context_tokens": None, "largest_parallel": None}
    window = search.largest_window(launch.parallel)
    if window is not None:
        largest = search.launch(window, launch.parallel).context_tokens
        details["largest_context_tokens"] = largest
        sentences.append(f"{largest} tokens of context would fit in {_slots(launch.parallel)}.")
    else:
        least = _least_window(search.facts)
        fewer = (n for n in range(launch.parallel - 1, 0, -1) if search.fits(search.launch(least, n)))
        slots = next(fewer, None)
        if slots is not None:
            details["largest_parallel"] = slots
            sentences.append(f"{_slots(slots)} would fit.")
    if _q8_0_is_smaller(launch):
        _add_q8_0(search, launch, window, sentences, details)
    if search.backend is Backend.CPU and search.fits(replace(launch, prompt_cache_mib=0)):
        details["fits_without_prompt_cache"] = True
        sentences.append("Without a prompt cache (setting prompt_cache_mib = 0) it would fit as asked.")
    if not sentences:
        sentences.append(_nothing_fits(search))
    return sentences, details


def _q8_0_is_smaller(launch: Launch) -> bool:
    types = (launch.cache_type_k, launch.cache_type_v)
    return all(cache_type.row_bytes(32) >= CacheType.Q8_0.row_bytes(32) for cache_type in types) and any(
        cache_type is not CacheType.Q8_0 for cache_type in types
    )


def _add_q8_0(
    search: _Search, launch: Launch, window: int | None, sentences: list[str], details: dict[str, Any]
) -> None:
    """Say what a q8_0 cache would change, where the model can have one and it changes something."""
    q8_0 = replace(search.template, cache_type_k=CacheType.Q8_0, cache_type_v=CacheType.Q8_0)
    try:
        cache.check_cache_types(search.facts, q8_0.cache_type_k, q8_0.cache_type_v)
    except LlmError:
        return  # no remedy: this model cannot have such a cache
    smaller = replace(search, template=q8_0)
    if smaller.fits(replace(q8_0, context_tokens=launch.context_tokens)):
        details["fits_with_q8_0"] = True
        sentences.append(f"With cache type {CacheType.Q8_0} it would fit as asked.")
        return
    details["fits_with_q8_0"] = False
    largest = smaller.largest_window(launch.parallel)
    if largest is not None and largest > (window or 0):
        tokens = smaller.launch(largest, launch.parallel).context_tokens
        details["largest_context_tokens_with_q8_0"] = tokens
        sentences.append(f"With cache type {CacheType.Q8_0}, {tokens} tokens would fit.")


def _nothing_fits(search: _Search) -> str:
    least = mib_ceil(search.need_bytes(search.launch(_least_window(search.facts), 1)))
    return f"Even the smallest launch needs {least} MiB: choose a smaller model."
