"""How far positions can be stretched beyond the trained context: ceilings and scale factors. Pure."""

from __future__ import annotations

import enum

MAX_ROPE_FACTOR = 8  # times the trained context; beyond it quality is gone: judgement, not measured
UNKNOWN_TRAINED_TOKENS = 32_768  # ceiling where a file does not say what it was trained for
FACTOR_STEPS = 2  # steps of a factor of 1: it is rounded up to halves


class RopeScaling(enum.StrEnum):
    """How positions are stretched (``--rope-scaling``)."""

    NONE = "none"
    LINEAR = "linear"
    YARN = "yarn"


def context_ceiling(trained_tokens: int, scaling: RopeScaling, requested_tokens: int = 0) -> int:
    """The longest window a slot can be given, tokens.

    Without scaling that is the trained context. With it, a request beyond the trained context is the ceiling,
    at most :data:`MAX_ROPE_FACTOR` times that context: nothing is stretched that nobody asked for, because
    stretched positions cost quality at every length.

    Args:
        trained_tokens: ``context_length`` of the file; 0 where it does not say.
        scaling: how positions are stretched.
        requested_tokens: window that was asked for; 0 where none was.

    Raises:
        ValueError: a negative number.
    """
    _check(trained_tokens, requested_tokens)
    trained = trained_tokens or UNKNOWN_TRAINED_TOKENS
    if scaling is RopeScaling.NONE:
        return trained
    return max(trained, min(requested_tokens, MAX_ROPE_FACTOR * trained))


def rope_factor(trained_tokens: int, window_tokens: int, explicit: float | None = None) -> float:
    """The factor for a window (``--rope-scale``); 0 where nothing is stretched and no flag is needed.

    It is the ratio of window to trained context, rounded up to a half, so that it never falls short, and at
    most :data:`MAX_ROPE_FACTOR`.

    Args:
        trained_tokens: ``context_length`` of the file; 0 where it does not say.
        window_tokens: of one slot.
        explicit: a factor that was asked for; it wins.

    Raises:
        ValueError: a negative number, or an explicit factor that is not positive.
    """
    _check(trained_tokens, window_tokens)
    if explicit is not None:
        if not explicit > 0:  # NaN is not greater than anything
            raise ValueError(f"a factor is positive, not {explicit}")
        return explicit
    trained = trained_tokens or UNKNOWN_TRAINED_TOKENS
    if window_tokens <= trained:
        return 0.0
    steps = -(-window_tokens * FACTOR_STEPS // trained)
    return min(steps, MAX_ROPE_FACTOR * FACTOR_STEPS) / FACTOR_STEPS


def _check(trained_tokens: int, other_tokens: int) -> None:
    if min(trained_tokens, other_tokens) < 0:
        raise ValueError("numbers of tokens are not negative")
