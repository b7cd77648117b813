"""Why a launch does not fit: the arithmetic, and the cheapest changes with which it would. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lllm3090d.checkpoints.facts import CheckpointFacts
from lllm3090d.engines.capabilities import Backend
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.readings import CardKind
from lllm3090d.planning import cache, offload
from lllm3090d.planning.cache import CacheType
from lllm3090d.planning.quote import Launch, Place, Quote
from lllm3090d.planning.search import Variant, last_within
from lllm3090d.planning.slots import most_slots
from lllm3090d.planning.split import DeviceSplit
from lllm3090d.planning.units import MIB, PAGE_TOKENS, mib_tenths, mib_text, tenths_text


def too_large(
    variant: Variant,
    launch: Launch,
    card_kind: CardKind,
    *,
    may_offload: bool = True,
    keeps_host_caches: bool = False,
    asked_tokens: int | None = None,
) -> LlmError:
    """The refusal of a launch that does not fit: INSUFFICIENT_MEMORY with its ledger and remedies.

    Args:
        variant: what was to be launched, and the room for it.
        launch: the launch that is refused.
        card_kind: whose memory is too small.
        may_offload: nobody gave the placement, so that it can be left to the planner.
        keeps_host_caches: sizes of what is kept in host memory were asked for, so that they are not made smaller.
        asked_tokens: context of all slots that was asked for; None where it was open.
    """
    facts, quote = variant.facts, variant.price(launch)
    beside = card_kind is not CardKind.CPU and variant.fits_card(launch)
    place, room = (Place.HOST, variant.room.host or 0) if beside else (Place.CARD, variant.room.card)
    where = "host memory" if beside or card_kind is CardKind.CPU else "the card"
    gives = f"{where} can give {{}} MiB now"
    if variant.room.giver and not beside:
        gives = f"{variant.room.giver} can give {{}} MiB"
    needed = quote.total_bytes(place)
    smallest = variant.price(variant.launch(variant.least_window(), launch.parallel)).total_bytes(place)
    bench = _Bench(variant, keeps_host_caches)
    remedies, details = _remedies(bench, launch, asked_tokens, may_offload=may_offload)
    split = None if beside else variant.split(launch)
    missing = needed - room
    asked = (
        f"{facts.title or facts.architecture} with {launch.context_tokens:,} tokens of context in"
        f" {slots_text(launch.parallel)}"
    )
    if split is None:
        need, grant = mib_tenths(needed), room * 10 // MIB
        message = (
            f"{asked} needs {tenths_text(need)} MiB ({sum_in_mib(quote, place)});"
            f" {gives.format(tenths_text(grant))}, so {tenths_text(need - grant)} MiB are missing."
        )
    else:
        rooms = {card.name: card.free_bytes for card in variant.room.cards}
        message = f"{asked} does not fit: {_cards_text(split, rooms)}."
        missing = max(
            needs - rooms[name] for name, needs in zip(split.devices, split.needs_bytes, strict=True)
        )
        details["cards"] = _cards(split, rooms)
    return LlmError(
        ErrorCode.INSUFFICIENT_MEMORY,
        message,
        hint=" ".join(remedies),
        items=item_details(quote),
        place=str(place),
        context_tokens=launch.context_tokens,
        parallel=launch.parallel,
        cache_type_k=str(launch.cache_type_k),
        cache_type_v=str(launch.cache_type_v),
        needed_bytes=needed,
        grantable_bytes=room,
        missing_bytes=missing,
        smallest_bytes=smallest,
        **details,
    )


def host_too_small(facts: CheckpointFacts, launch: Launch, quote: Quote, room_bytes: int) -> LlmError:
    """The refusal of a launch that fits on its card, and not beside it.

    Args:
        facts: the checkpoint.
        launch: the launch that is refused.
        quote: its price.
        room_bytes: what host memory can give.
    """
    needed = quote.total_bytes(Place.HOST)
    need, grant = mib_tenths(needed), room_bytes * 10 // MIB
    return LlmError(
        ErrorCode.INSUFFICIENT_MEMORY,
        f"{facts.title or facts.architecture} with {launch.context_tokens:,} tokens of context in"
        f" {slots_text(launch.parallel)} needs {tenths_text(need)} MiB of host memory beside the card"
        f" ({sum_in_mib(quote, Place.HOST)}); host memory can give {tenths_text(grant)} MiB now, so"
        f" {tenths_text(need - grant)} MiB are missing.",
        hint="Close programs that hold memory, or ask for less: fewer slots (--parallel), a shorter context"
        " (--context), a smaller prompt cache (setting prompt_cache_mib).",
        items=item_details(quote),
        context_tokens=launch.context_tokens,
        parallel=launch.parallel,
        place=str(Place.HOST),
        needed_bytes=needed,
        grantable_bytes=room_bytes,
        missing_bytes=needed - room_bytes,
    )


def item_details(quote: Quote) -> list[dict[str, Any]]:
    """The ledger for a program."""
    return [
        {
            "name": item.name,
            "place": str(item.place),
            "bytes": item.bytes,
            "evidence": str(item.evidence),
            "formula": item.formula,
        }
        for item in quote.items
    ]


def _cards_text(split: DeviceSplit, rooms: Mapping[str, int]) -> str:
    """What each card would take with the best shares, and can give."""
    return "; ".join(
        f"{name} would take {mib_text(ledger.total_bytes(Place.CARD))} MiB"
        f" ({sum_in_mib(ledger, Place.CARD)}) and can give {tenths_text(max(0, rooms[name]) * 10 // MIB)} MiB"
        for name, ledger in zip(split.devices, split.ledgers, strict=True)
    )


def _cards(split: DeviceSplit, rooms: Mapping[str, int]) -> list[dict[str, Any]]:
    """The same for a program, with the ledger of each card."""
    return [
        {
            "name": name,
            "layers": share,
            "needed_bytes": ledger.total_bytes(Place.CARD),
            "grantable_bytes": rooms[name],
            "items": item_details(ledger),
        }
        for name, share, ledger in zip(split.devices, split.shares, split.ledgers, strict=True)
    ]


def slots_text(count: int) -> str:
    """A number of slots in words."""
    return "1 slot" if count == 1 else f"{count} slots"


def sum_in_mib(quote: Quote, place: Place) -> str:
    """The items in one place in MiB, rounded so that they add up to the rounded total."""
    parts: list[str] = []
    so_far = 0
    for item in quote.items:
        if item.place is place:
            shown = mib_tenths(so_far + item.bytes) - mib_tenths(so_far)
            so_far += item.bytes
            if shown:
                parts.append(f"{item.name} {tenths_text(shown)}")
    return " + ".join(parts)


@dataclass(frozen=True, slots=True)
class _Bench:
    """Where remedies are tried: what is recommended must be granted when it is asked for, beside the card too.

    Attributes:
        variant: what was to be launched.
        keeps_host_caches: what is kept in host memory only to be quick is not given up where that is short.
    """

    variant: Variant
    keeps_host_caches: bool

    def changed(self, template: Launch) -> _Bench:
        """The same with another template."""
        return replace(self, variant=self.variant.changed(template=template))

    def fits(self, launch: Launch) -> bool:
        """It fits on the card and beside it."""
        return self.variant.fits(launch) and self._excess_beside_bytes(launch) <= 0

    def largest_window(self, slots: int) -> int | None:
        """As :meth:`Variant.largest_window`, beside the card too."""
        variant = self.variant
        window = variant.largest_window(slots)
        if window is None or self._excess_beside_bytes(variant.launch(window, slots)) <= 0:
            return window
        pages = last_within(
            window // PAGE_TOKENS,
            lambda n: self._excess_beside_bytes(variant.launch(n * PAGE_TOKENS, slots)),
        )
        return pages * PAGE_TOKENS or None

    def _excess_beside_bytes(self, launch: Launch) -> int:
        """By how much host memory is too small for it, without what can be given up there; 0 or less where it fits."""
        room = self.variant.room.host
        if room is None or self.variant.backend is Backend.CPU:
            return 0
        if not self.keeps_host_caches:
            launch = replace(launch, prompt_cache_mib=0, context_checkpoints=0)
        return self.variant.price(launch).total_bytes(Place.HOST) - room


def _remedies(
    bench: _Bench, launch: Launch, asked_tokens: int | None, *, may_offload: bool
) -> tuple[list[str], dict[str, Any]]:
    """Sentences for a person and figures for a program; a figure is None where nothing fits."""
    variant = bench.variant
    sentences: list[str] = []
    details: dict[str, Any] = {"largest_context_tokens": None, "largest_parallel": None}
    window = bench.largest_window(launch.parallel)
    if window is not None:
        largest = variant.launch(window, launch.parallel).context_tokens
        details["largest_context_tokens"] = largest
        sentences.append(
            f"{largest:,} tokens of context would fit in {slots_text(launch.parallel)} (--context {largest})."
        )
    elif asked_tokens is None or not _add_fewer_slots(bench, launch, asked_tokens, sentences, details):
        _add_least_slots(bench, launch, asked_tokens, sentences, details)
    if _q8_0_is_smaller(launch):
        _add_q8_0(bench, launch, window, sentences, details)
    _add_lighter(bench, launch, sentences, details)
    if may_offload and variant.backend is not Backend.CPU:
        _add_offload(variant, launch, sentences, details)
    if not sentences:
        sentences.append(_nothing_fits(bench, details, may_offload=may_offload))
    return sentences, details


def _add_fewer_slots(
    bench: _Bench, launch: Launch, asked_tokens: int, sentences: list[str], details: dict[str, Any]
) -> bool:
    """Say how many slots would do for the context that was asked for; whether any would."""
    variant = bench.variant
    slots = most_slots(launch.parallel - 1, lambda n: bench.fits(variant.with_context(asked_tokens, n)))
    if slots * variant.limit_tokens < max(1, asked_tokens):
        return False
    details["largest_parallel"] = slots
    sentences.append(f"{slots_text(slots)} would fit (--parallel {slots}).")
    return True


def _add_least_slots(
    bench: _Bench,
    launch: Launch,
    asked_tokens: int | None,
    sentences: list[str],
    details: dict[str, Any],
) -> None:
    """Say how many slots of the least window would do, with less context than was asked for."""
    variant = bench.variant
    least = variant.least_window()
    slots = most_slots(launch.parallel - 1, lambda n: bench.fits(variant.launch(least, n)))
    if not slots:
        return
    details["largest_parallel"] = slots
    how = f"--parallel {slots}"
    if asked_tokens is not None:
        largest = variant.launch(least, slots).context_tokens
        details["context_tokens_with_largest_parallel"] = largest
        how += f" --context {largest}"
    sentences.append(f"{slots_text(slots)} would fit ({how}).")


def _add_lighter(bench: _Bench, launch: Launch, sentences: list[str], details: dict[str, Any]) -> None:
    """What may be given up beside context: drafting, the projector's place, the prompt cache."""
    variant = bench.variant
    plain = bench.changed(replace(variant.template, draft=None))
    if launch.draft is not None and plain.fits(replace(launch, draft=None)):
        details["fits_without_drafting"] = True
        sentences.append("Without drafting (--draft off) it would fit as asked.")
    if variant.projector is not None and launch.projector_on_card and variant.backend is not Backend.CPU:
        beside = replace(launch, projector_on_card=False)
        if bench.fits(beside):
            details["fits_with_projector_on_host"] = True
            sentences.append("With the projector in host memory (--projector host) it would fit as asked.")
    may_be_smaller = variant.backend is Backend.CPU and not bench.keeps_host_caches
    if may_be_smaller and variant.fits(replace(launch, prompt_cache_mib=0)):
        details["fits_without_prompt_cache"] = True
        sentences.append("Without a prompt cache (setting prompt_cache_mib = 0) it would fit as asked.")


def _add_offload(variant: Variant, launch: Launch, sentences: list[str], details: dict[str, Any]) -> None:
    """Say whether it would fit with a part of it in host memory."""
    window = -(-launch.context_tokens // launch.parallel)
    if offload.least_offload(variant, window, launch.parallel, launch.micro_batch_tokens) is not None:
        details["fits_with_offload"] = True
        sentences.append(
            "With a part of the model in host memory (--offload allowed), slower, it would fit as asked."
        )


def _q8_0_is_smaller(launch: Launch) -> bool:
    types = (launch.cache_type_k, launch.cache_type_v)
    return all(cache_type.row_bytes(32) >= CacheType.Q8_0.row_bytes(32) for cache_type in types) and any(
        cache_type is not CacheType.Q8_0 for cache_type in types
    )


def _add_q8_0(
    bench: _Bench, launch: Launch, window: int | None, sentences: list[str], details: dict[str, Any]
) -> None:
    """Say what a q8_0 cache would change, where the model can have one and it changes something."""
    variant = bench.variant
    q8_0 = replace(variant.template, cache_type_k=CacheType.Q8_0, cache_type_v=CacheType.Q8_0)
    try:
        cache.check_cache_types(variant.facts, q8_0.cache_type_k, q8_0.cache_type_v)
    except LlmError:
        return  # no remedy: this model cannot have such a cache
    smaller = bench.changed(q8_0)
    if smaller.fits(
        replace(q8_0, context_tokens=launch.context_tokens, parallel=launch.parallel, draft=launch.draft)
    ):
        details["fits_with_q8_0"] = True
        sentences.append(
            f"With cache type {CacheType.Q8_0} (--cache-type {CacheType.Q8_0}) it would fit as asked."
        )
        return
    details["fits_with_q8_0"] = False
    largest = smaller.largest_window(launch.parallel)
    if largest is not None and largest > (window or 0):
        tokens = smaller.variant.launch(largest, launch.parallel).context_tokens
        details["largest_context_tokens_with_q8_0"] = tokens
        sentences.append(
            f"With --cache-type {CacheType.Q8_0} {tokens:,} tokens would fit (--context {tokens})."
        )


def _nothing_fits(bench: _Bench, details: dict[str, Any], *, may_offload: bool) -> str:
    variant = bench.variant
    window = variant.least_window()
    smallest = variant.launch(window, 1)
    if variant.fits_card(smallest) and not bench.fits(smallest):
        return (
            "Even for the smallest launch host memory is too small beside the card: close programs that hold some, or"
            " choose a smaller model."
        )
    least = mib_text(variant.need_bytes(smallest))
    if may_offload and variant.backend is not Backend.CPU:
        offloaded = offload.least_offload(variant, window, 1, variant.template.micro_batch_tokens)
        if offloaded is not None:
            details["context_tokens_with_offload"] = window
            return (
                f"Even the smallest launch needs {least} MiB; with a part of the model in host memory"
                f" (--offload allowed --context {window} --parallel 1) it would fit."
            )
    return f"Even the smallest launch needs {least} MiB: choose a smaller model."
