"""What a model that is not on disk yet would take of a card: the linear price at evidence ``catalogue``. Pure.

It is the published arithmetic of lllm3090, with its known flaws corrected. Its factors are averages of measured
cards and stand for terms that the quote computes one by one once there is a header: never charge both. Sizes are whole
bytes and prices are exact fractions, so nothing here depends on the rounding of floating-point numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType

from lllm3090d.checkpoints.catalogue import AttentionShape, CatalogueEntry
from lllm3090d.engines.capabilities import Backend
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.profiles import CardProfile
from lllm3090d.planning.cache import MAX_SLOTS
from lllm3090d.planning.quote import Evidence, LineItem, Place, Quote
from lllm3090d.planning.refusal import item_details
from lllm3090d.planning.reserves import BudgetLine
from lllm3090d.planning.slots import (
    DEFAULT_PARALLEL,
    SlotPlan,
    SlotPolicy,
    automatic_slots,
    check_count,
    requested_slots,
)
from lllm3090d.planning.units import MIB, PAGE_TOKENS, mib_ceil, mib_text, round_up, tenths_text
from lllm3090d.planning.verdict import AGENT_PROMPT_FLOOR_TOKENS, Verdict, verdict

# MiB. What the driver keeps before any process allocates, for a card that does not tell; measured: 451 on an RTX 3090
# with a text console.
DRIVER_RESERVE_MIB = 512
# MiB. Compositor and browser of a person at the machine; typical value, no measurement recorded.
DESKTOP_RESERVE_MIB = 2400
# MiB. Compute buffers, graphs and fragmentation; no measurement recorded.
WORKSPACE_RESERVE_MIB = 1024
# MiB. Buffers of an image encoder beside the file: a projector of 1.19 GB occupied 1376 MiB on an RTX 3090 while it
# rested, and with a full pool every request failed.
VISION_WORKSPACE_RESERVE_MIB = 1024
# MiB. Flat cost of a backend beyond Vulkan's: of the 697 MiB by which a card under CUDA had less, about so many.
BACKEND_FIXED_MIB: Mapping[Backend, int] = MappingProxyType({Backend.CUDA: 230})
# f16 bytes = 1. A q8_0 value: 34 bytes for 32 values, over 2 bytes each.
Q8_0_RATIO = Fraction(34, 64)
# Factor. Bookkeeping of each cell and of the whole pool: two pools of Gemma-4-26B-A4B on an RTX 3090 that differed by
# 344k tokens differed by 11.2 KiB a token; their tensors alone are 10.625.
ALLOCATOR_OVERHEAD = Fraction("11.2") / Fraction("10.625")
# Factor on one layer with full attention. A head for multi-token prediction has such a layer of its own; measured on
# two models: 1.20 and 1.23.
MTP_LAYER_OVERHEAD = Fraction("1.25")
# Factor. Price of a token relative to Vulkan: 1.100 to 1.136 on two models; the upper end, because it shrinks a budget.
BACKEND_KV_FACTOR: Mapping[Backend, Fraction] = MappingProxyType({Backend.CUDA: Fraction("1.136")})


@dataclass(frozen=True, slots=True)
class PreviewCard:
    """A card, whether it is there or not, and what is kept of it.

    Attributes:
        profile: which card.
        backend: what the engine would compute on.
        driver_reserve_mib: kept by the driver, live; None where the card does not tell or is not there, which
            counts as :data:`DRIVER_RESERVE_MIB` and never as 0.
        desktop_active: a desktop is on the card; None (unknown) counts as active.
        foreign_bytes: what other processes hold now; 0 for a card that is not there.
        desktop_reserve_mib, workspace_reserve_mib: as the settings have them.
    """

    profile: CardProfile
    backend: Backend
    driver_reserve_mib: int | None = None
    desktop_active: bool | None = None
    foreign_bytes: int = 0
    desktop_reserve_mib: int = DESKTOP_RESERVE_MIB
    workspace_reserve_mib: int = WORKSPACE_RESERVE_MIB

    @property
    def lines(self) -> tuple[BudgetLine, ...]:
        """What it can give, line by line."""
        reported = self.driver_reserve_mib is not None
        driver = DRIVER_RESERVE_MIB if self.driver_reserve_mib is None else self.driver_reserve_mib
        lines = [
            BudgetLine("total", self.profile.vram_mib * MIB, self.profile.name),
            BudgetLine(
                "driver", -driver * MIB, "reading" if reported else "assumed, the card does not tell"
            ),
        ]
        desktop = 0 if self.desktop_active is False else self.desktop_reserve_mib * MIB
        if self.foreign_bytes > desktop:
            lines.append(BudgetLine("other processes", -self.foreign_bytes, "used now, without our models"))
        elif desktop:
            known = "a desktop is active" if self.desktop_active else "a desktop is assumed"
            lines.append(BudgetLine("desktop reserve", -desktop, known))
        return tuple(line for line in lines if line.bytes)

    @property
    def grantable_bytes(self) -> int:
        """What a launch may cost: the sum of the lines; negative where the reserves exceed the card."""
        return sum(line.bytes for line in self.lines)


@dataclass(frozen=True, slots=True)
class Preview:
    """What a model of the catalogue would get on a card.

    Attributes:
        entry: the model.
        card: the card.
        verdict: in a word.
        slots: the plan; without slots where nothing fits.
        quote: the price of that plan at evidence ``catalogue``, or of the least one where nothing fits.
        spare_bytes: left for the context of one slot, or of as many as were asked for; may be negative.
        pool_tokens: whole pages that fit there at q8_0, not limited by the model.
        pool_f16_tokens: the same at f16, for comparison; nothing is served at f16 here.
        least_vram_mib: smallest card on which an agent could work, with this backend and these reserves; None
            where the model's window is too short for an agent on any card.
    """

    entry: CatalogueEntry
    card: PreviewCard
    verdict: Verdict
    slots: SlotPlan
    quote: Quote
    spare_bytes: int
    pool_tokens: int
    pool_f16_tokens: int
    least_vram_mib: int | None

    @property
    def spare_mib(self) -> int:
        """For display: :attr:`spare_bytes` in MiB, truncated toward zero."""
        return math.trunc(Fraction(self.spare_bytes, MIB))

    @property
    def advice(self) -> str | None:
        """What card an agent would need; None where this one suffices."""
        if self.verdict is Verdict.OK:
            return None
        if self.least_vram_mib is None:
            return (
                f"No card helps: the model's window of {self.entry.trained_context_tokens:,} tokens is not above the"
                f" {AGENT_PROMPT_FLOOR_TOKENS:,} that an agent sends."
            )
        if self.verdict is Verdict.CAPABILITY:
            return f"It needs a card of compute capability {self.entry.least_compute_capability}."
        return f"For an agent it needs a card of {advised_gib(self.least_vram_mib)} GiB."


def token_bytes(entry: CatalogueEntry, backend: Backend) -> Fraction:
    """Bytes of one token of context at q8_0.

    (k x Q8_0_RATIO + h) x ALLOCATOR_OVERHEAD x BACKEND_KV_FACTOR, with k the f16 bytes of the layers with full
    attention and, with a head for multi-token prediction, h = one such layer x Q8_0_RATIO x MTP_LAYER_OVERHEAD.
    Linear attention, states and sliding windows cost nothing for a token.

    Raises:
        LlmError: UNSUPPORTED_ARCHITECTURE for latent attention and for a model whose cache does not grow.
    """
    shape = _full_attention(entry)
    f16 = Fraction(shape.f16_bytes_per_token)
    head = f16 / shape.layers * MTP_LAYER_OVERHEAD if entry.drafts_itself else Fraction(0)
    return (f16 + head) * Q8_0_RATIO * ALLOCATOR_OVERHEAD * BACKEND_KV_FACTOR.get(backend, Fraction(1))


def fixed_bytes(entry: CatalogueEntry, card: PreviewCard) -> int:
    """What a process takes beside weights and context: workspace, backend, and buffers of a projector."""
    vision = VISION_WORKSPACE_RESERVE_MIB if entry.has_projector else 0
    return (card.workspace_reserve_mib + BACKEND_FIXED_MIB.get(card.backend, 0) + vision) * MIB


def spare_bytes(entry: CatalogueEntry, card: PreviewCard, slots: int, state_bytes: int = 0) -> int:
    """What is left for the context of so many slots, their states paid; may be negative.

    Args:
        entry: the model.
        card: the card.
        slots: number of slots.
        state_bytes: states and sliding windows of one slot; 0 at evidence ``catalogue``.
    """
    return card.grantable_bytes - fixed_bytes(entry, card) - entry.weight_bytes - slots * state_bytes


def pool_tokens(spare: int, each: Fraction) -> int:
    """Tokens that fit into so many spare bytes at such a price, in whole pages; not limited by the model."""
    return max(0, int(spare / each)) // PAGE_TOKENS * PAGE_TOKENS


def load_need_bytes(
    entry: CatalogueEntry, backend: Backend, total_tokens: int, slots: int, state_bytes: int = 0
) -> int:
    """Weights and context of a plan, rounded up to a byte."""
    return entry.weight_bytes + math.ceil(total_tokens * token_bytes(entry, backend)) + slots * state_bytes


def startup_need_bytes(
    entry: CatalogueEntry, card: PreviewCard, total_tokens: int, slots: int, state_bytes: int = 0
) -> int:
    """What a start takes: :func:`load_need_bytes` and the fixed costs. The desktop is no part of it."""
    return load_need_bytes(entry, card.backend, total_tokens, slots, state_bytes) + fixed_bytes(entry, card)


def least_vram_mib(entry: CatalogueEntry, card: PreviewCard, state_bytes: int = 0) -> int | None:
    """Memory of the smallest card on which an agent can work, MiB rounded up; None where no card helps.

    A card of just that size holds the least page above the agent's prompt in one slot, with the backend and the
    reserves of ``card``; other processes are not counted, for it is another card.
    """
    if entry.trained_context_tokens <= AGENT_PROMPT_FLOOR_TOKENS:
        return None
    window = round_up(AGENT_PROMPT_FLOOR_TOKENS + 1, PAGE_TOKENS)
    driver = DRIVER_RESERVE_MIB if card.driver_reserve_mib is None else card.driver_reserve_mib
    desktop = 0 if card.desktop_active is False else card.desktop_reserve_mib
    return mib_ceil(startup_need_bytes(entry, card, window, 1, state_bytes)) + driver + desktop


def advised_gib(vram_mib: int) -> int:
    """Advice on a card, GiB rounded up: a card that is a little too small is no advice."""
    return -(-vram_mib // 1024)


def preview(
    entry: CatalogueEntry,
    card: PreviewCard,
    policy: SlotPolicy,
    *,
    parallel: int | None = None,
    context_tokens: int | None = None,
    limit_tokens: int | None = None,
    state_bytes: int = 0,
) -> Preview:
    """Plan a model that is not on disk.

    Args:
        entry: the model.
        card: the card.
        policy: how slots are chosen where nobody gives their number.
        parallel: slots that were asked for.
        context_tokens: total context that was asked for; two slots where their number was not.
        limit_tokens: longest window, where positions are to be stretched; None for the trained context.
        state_bytes: of one slot. Nothing is charged at evidence ``catalogue``, so that a preview gives the
            published figures; :attr:`RecurrentShape.state_bytes` knows it where somebody wants it.

    Raises:
        LlmError: UNSUPPORTED_ARCHITECTURE where there is no linear price; INVALID_REQUEST and
            UNSUPPORTED_COMBINATION for sizes that cannot be; INSUFFICIENT_MEMORY where what was asked for does
            not fit.
    """
    limit = entry.trained_context_tokens if limit_tokens is None else limit_tokens
    order = _Order(entry, card, token_bytes(entry, card.backend), state_bytes, limit)
    if parallel is not None:
        _check_parallel(parallel)
    if context_tokens is not None:
        slots = order.of_total(context_tokens, DEFAULT_PARALLEL if parallel is None else parallel)
    elif parallel is not None:
        slots = requested_slots(parallel, order.window, limit, pool=order.pool)
    else:
        slots = automatic_slots(policy, order.window, limit, pool=order.pool)
    counted = parallel or 1
    spare = spare_bytes(entry, card, counted, state_bytes)
    return Preview(
        entry=entry,
        card=card,
        verdict=verdict(
            slots.window_tokens, card_can_compute=card.profile.can_compute(entry.least_compute_capability)
        ),
        slots=slots,
        quote=order.quote(slots),
        spare_bytes=spare,
        pool_tokens=order.pool(counted),
        pool_f16_tokens=pool_tokens(spare, order.each / Q8_0_RATIO),
        least_vram_mib=least_vram_mib(entry, card, state_bytes),
    )


@dataclass(frozen=True, slots=True)
class _Order:
    """One model on one card, with the price of a token."""

    entry: CatalogueEntry
    card: PreviewCard
    each: Fraction
    state_bytes: int
    limit_tokens: int

    def pool(self, slots: int) -> int:
        """Tokens that so many slots can hold together."""
        return pool_tokens(spare_bytes(self.entry, self.card, slots, self.state_bytes), self.each)

    def window(self, slots: int) -> int:
        """Tokens that each of so many slots can hold: whole pages, or all that the model can serve; 0 for none."""
        share = self.pool(slots) // slots
        return self.limit_tokens if share >= self.limit_tokens else share // PAGE_TOKENS * PAGE_TOKENS

    def of_total(self, total: int, slots: int) -> SlotPlan:
        """A plan of exactly this total, if it fits."""
        limit, share = self.limit_tokens, total // slots
        if not PAGE_TOKENS <= share <= limit:
            raise LlmError(
                ErrorCode.UNSUPPORTED_COMBINATION,
                f"{total:,} tokens of context in {_slots(slots)} are {share:,} in each; a slot of {self.entry.name} has"
                f" {PAGE_TOKENS:,} to {limit:,}.",
                hint=f"Ask for --context {PAGE_TOKENS * slots} to {limit * slots}, or for another --parallel.",
                context_tokens=total,
                parallel=slots,
            )
        need = startup_need_bytes(self.entry, self.card, total, slots, self.state_bytes)
        if need > self.card.grantable_bytes:
            pool = self.pool(slots)
            largest = min(pool, limit * slots) if pool >= PAGE_TOKENS * slots else 0
            grant = tenths_text(max(0, self.card.grantable_bytes) * 10 // MIB)
            fitting = (
                f"{largest:,} tokens would fit (--context {largest} --parallel {slots})"
                if largest
                else "not even a page would fit"
            )
            raise LlmError(
                ErrorCode.INSUFFICIENT_MEMORY,
                f"{self.entry.name} with {total:,} tokens of context needs about {mib_text(need)} MiB;"
                f" {self.card.profile.name} can give {grant} MiB.",
                hint=f"In {_slots(slots)} {fitting}.",
                items=item_details(self.quote(SlotPlan(slots, share, limit))),
                needed_bytes=need,
                grantable_bytes=self.card.grantable_bytes,
                largest_context_tokens=largest or None,
            )
        return SlotPlan(
            slots=slots,
            window_tokens=share,
            limit_tokens=limit,
            one_slot_window_tokens=self.window(1) if slots > 1 else None,
            unused_tokens=max(0, self.pool(slots) - slots * share),
        )

    def quote(self, plan: SlotPlan) -> Quote:
        """The price of a plan, line by line; of one page in one slot where nothing fits."""
        entry, backend = self.entry, self.card.backend
        slots = plan.slots or 1
        total = plan.total_tokens or PAGE_TOKENS
        context = math.ceil(total * self.each)
        fixed = BACKEND_FIXED_MIB.get(backend, 0)
        items = [
            _item("weights", entry.file_bytes, f"whole file {entry.file}"),
            _item(
                "kv cache", context, f"{total} tokens x {float(self.each) / 1024:.3f} KiB, q8_0 on {backend}"
            ),
            _item("recurrent state", slots * self.state_bytes, f"{_slots(slots)} x {self.state_bytes} B"),
            _item("workspace", self.card.workspace_reserve_mib * MIB, "compute buffers and graphs, assumed"),
            _item("backend", fixed * MIB, f"what {backend} takes more than Vulkan: {fixed} MiB"),
            _item("projector", entry.projector_bytes, f"whole file {entry.projector_file}"),
        ]
        if entry.has_projector:
            vision = VISION_WORKSPACE_RESERVE_MIB
            items.append(
                _item("projector graph", vision * MIB, f"buffers of its encoder, assumed: {vision} MiB")
            )
        return Quote(tuple(item for item in items if item.bytes))


def _item(name: str, size_bytes: int, formula: str) -> LineItem:
    return LineItem(name, Place.CARD, size_bytes, Evidence.CATALOGUE, formula)


def _slots(count: int) -> str:
    return "1 slot" if count == 1 else f"{count} slots"


def _full_attention(entry: CatalogueEntry) -> AttentionShape:
    if entry.latent or entry.full_attention is None:
        why = "its attention is latent" if entry.latent else "no layer's cache grows with the context"
        raise LlmError(
            ErrorCode.UNSUPPORTED_ARCHITECTURE,
            f"{entry.name} cannot be priced before it is on disk: {why}, and there is no linear price for that.",
            hint="Download it: its header has what an exact price needs.",
            model=entry.id,
        )
    return entry.full_attention


def _check_parallel(parallel: int) -> None:
    check_count(parallel)
    if parallel > MAX_SLOTS:
        raise LlmError(
            ErrorCode.UNSUPPORTED_COMBINATION,
            f"{parallel} slots were asked for; the engine serves at most {MAX_SLOTS}.",
            hint=f"Ask for {MAX_SLOTS} slots or fewer.",
            parallel=parallel,
            largest_parallel=MAX_SLOTS,
        )
