"""A window beyond the trained context: what the engine must be told. Pure.

llama.cpp caps every slot at the trained context. Only YaRN raises that cap (it sets it to the original context times
the factor), so linear stretching could be computed but never served, and is refused.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from lllm3090d.checkpoints.facts import CheckpointFacts
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.planning.rope import (
    FACTOR_STEPS,
    MAX_ROPE_FACTOR,
    RopeScaling,
    context_ceiling,
    rope_factor,
)


@dataclass(frozen=True, slots=True)
class Stretch:
    """How positions are stretched.

    Attributes:
        scaling: ``--rope-scaling``.
        factor: ``--rope-scale``, relative to the original context.
        original_tokens: context before any stretching (``--yarn-orig-ctx``).
        window_tokens: the longest window with it.
    """

    scaling: RopeScaling
    factor: float
    original_tokens: int
    window_tokens: int


def stretch(facts: CheckpointFacts, scaling: RopeScaling, window_tokens: int | None) -> Stretch | None:
    """What a window needs; None where it is within the trained context, or nobody named one.

    Args:
        facts: the checkpoint.
        scaling: what was asked for.
        window_tokens: of one slot; None where it was not asked for, so that nothing is stretched.

    Raises:
        LlmError: UNSUPPORTED_COMBINATION for linear stretching, a model without rotary positions, and a
            window beyond eight times the trained context.
    """
    trained = facts.trained_context_tokens
    if scaling is RopeScaling.NONE or window_tokens is None or window_tokens <= trained:
        return None
    name = facts.title or facts.architecture
    if scaling is RopeScaling.LINEAR:
        raise _refused(
            f"{name} cannot serve a window of {window_tokens:,} tokens with linear scaling: the engine caps every"
            f" slot at the trained {trained:,} tokens unless positions are scaled by YaRN",
            "Ask for YaRN (--rope-scaling yarn).",
        )
    if facts.rope is None:
        raise _refused(
            f"{name} has no rotary positions that could be stretched", "Ask for a smaller context."
        )
    ceiling = context_ceiling(trained, scaling, window_tokens)
    if window_tokens > ceiling:
        raise _refused(
            f"a window of {window_tokens:,} tokens is more than {MAX_ROPE_FACTOR} times the trained {trained:,}",
            f"Ask for at most {ceiling:,} tokens in each slot.",
        )
    # A file that claims a longer context before any stretching than it was trained for is not believed.
    original = min(facts.rope.original_context_tokens, trained)
    factor = rope_factor(original, window_tokens)
    if reached_tokens(original, factor) < window_tokens and factor < MAX_ROPE_FACTOR:
        factor += 1 / FACTOR_STEPS  # the engine's own rounding fell a token short
    reached = reached_tokens(original, factor)
    if reached < window_tokens:
        raise _refused(
            f"a window of {window_tokens:,} tokens is more than {MAX_ROPE_FACTOR} times the {original:,} that {name}"
            " had before any stretching",
            f"Ask for at most {max(trained, reached):,} tokens in each slot.",
        )
    return Stretch(scaling, factor, original, reached)


def reached_tokens(original_tokens: int, factor: float) -> int:
    """The longest window that the engine serves with YaRN: the original context over the inverse of the factor.

    Both quotients are of 32 bits there, so that of 2048 tokens and 3.5 it is 7167.
    """
    return int(_f32(original_tokens / _f32(1 / _f32(factor))))


def _f32(value: float) -> float:
    """Rounded to 32 bits."""
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


def _refused(what: str, hint: str) -> LlmError:
    return LlmError(ErrorCode.UNSUPPORTED_COMBINATION, f"{what[0].upper()}{what[1:]}.", hint=hint)
