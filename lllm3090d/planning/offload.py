"""What is left in host memory so that a useful window fits: the least that suffices. Pure.

Experts go first: they are most of a mixture's bytes and few of them are read for a token. Once more than half of the
layers would leave their experts, one boundary between whole layers costs less than a trip to the host in every
layer, so whole layers stay behind instead; decided here and nowhere else.
"""

from __future__ import annotations

from dataclasses import replace

from lllm3090d.planning.placement import Placement
from lllm3090d.planning.search import Variant, first_true

USEFUL_DENSE_TOKENS = 32_768  # window for which a dense model may leave layers in host memory; judgement
USEFUL_MIXTURE_TOKENS = 65_536  # the same for experts, whose layers cost less speed; judgement
CROSSOVER_PERCENT = 50  # of the layers: with more experts in host memory, whole layers are left there
# Large batches of experts in host memory are copied to the card: 380 tokens/s with 512, 647 with 1024, measured by
# others on an 8 GB card.
MIXTURE_MICRO_BATCH_TOKENS = 1024


def useful_window(variant: Variant) -> int:
    """For how long a window something may be left in host memory."""
    useful = USEFUL_MIXTURE_TOKENS if variant.facts.expert_count else USEFUL_DENSE_TOKENS
    return min(variant.limit_tokens, useful)


def least_offload(
    variant: Variant, window_tokens: int, slots: int, micro_batch: int | None
) -> Variant | None:
    """The variant with the least in host memory that gives such a window; None where nothing suffices.

    Args:
        variant: with everything on the card.
        window_tokens: of each slot.
        slots: their number.
        micro_batch: what was asked for; None lets experts in host memory have a larger one.
    """
    found = _experts(variant, window_tokens, slots, micro_batch) if variant.facts.expert_count else None
    found = found or _layers(variant, window_tokens, slots)
    # The host's side is asked last: the more is left there, the less fits, so it is no part of the bisection.
    return found if found is not None and found.fits(found.launch(window_tokens, slots)) else None


def _experts(variant: Variant, window: int, slots: int, micro_batch: int | None) -> Variant | None:
    blocks = len(variant.facts.trunk)
    larger = None
    if micro_batch is None:
        larger = max(variant.template.micro_batch_tokens, MIXTURE_MICRO_BATCH_TOKENS)

    def with_experts(count: int) -> Variant:
        return variant.placed(
            replace(variant.template.layers, expert_layers_on_host=count), larger if count else None
        )

    count = first_true(blocks, lambda n: with_experts(n).fits_card(with_experts(n).launch(window, slots)))
    if count is None or count * 100 > blocks * CROSSOVER_PERCENT:
        return None
    return with_experts(count)


def _layers(variant: Variant, window: int, slots: int) -> Variant | None:
    blocks = len(variant.facts.layers) + 1  # the output counts as one

    def without(count: int) -> Variant:
        where = Placement(layers_on_card=blocks - count) if count else variant.template.layers
        return variant.placed(where)

    count = first_true(blocks, lambda n: without(n).fits_card(without(n).launch(window, slots)))
    return None if count is None else without(count)
