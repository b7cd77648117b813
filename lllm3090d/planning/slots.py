"""How many conversations share the card, and how long each may be: the slot rule. Pure.

The rule knows nothing of prices. It is given a callable that says what window each of n slots would get, and asks it
as seldom as it can, each number at most once: behind it may be a division (a model of the catalogue) or a bisection
by the quote (a model on disk).

A window is in whole pages of 1024 tokens, or all that the model can serve; 0 says that n slots do not fit.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.planning.units import PAGE_TOKENS

# Slots. Upper limit of the automatic plan, not of a request: some compute buffers grow with each, and a fifth
# conversation on one card is speculative. Judgement of lllm3090.
MAX_AUTO_PARALLEL = 4
# Factor on the total context: smallest gain that justifies another slot. Larger favours one long conversation.
# Judgement of lllm3090, not measured.
SLOT_SPLIT_GAIN = 1.5
# Slots: an agent and one subagent resident together; with one slot they take turns, and the subagent evicts the
# parent's prefix. Not used by the automatic plan, only where a total was asked for without a number of slots.
DEFAULT_PARALLEL = 2

WindowOf = Callable[[int], int]


class SlotPolicy(enum.StrEnum):
    """How slots are chosen where nobody gives their number."""

    BALANCED = "balanced"  # one long window first; more slots where they raise the total by half
    WINDOW = "window"  # every slot holds the longest window there is


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """Slots of equal windows, or none.

    Attributes:
        slots: ``--parallel``; 0 where nothing fits.
        window_tokens: what one slot can hold; 0 where nothing fits.
        limit_tokens: the longest window there can be, by what the model was trained for.
        one_slot_window_tokens: what a single slot would get instead; None where the plan has no more than one.
        unused_tokens: what the card could hold beside the plan; None where nobody said how much that is.
    """

    slots: int
    window_tokens: int
    limit_tokens: int
    one_slot_window_tokens: int | None = None
    unused_tokens: int | None = None

    @property
    def fits(self) -> bool:
        """There is at least one slot."""
        return self.slots > 0

    @property
    def total_tokens(self) -> int:
        """Context of all slots together."""
        return self.slots * self.window_tokens

    @property
    def is_limited_by_model(self) -> bool:
        """The window is as long as the model allows, so more memory would not lengthen it."""
        return self.fits and self.window_tokens >= self.limit_tokens


def automatic_slots(
    policy: SlotPolicy,
    window: WindowOf,
    limit_tokens: int,
    *,
    holds_limit: Callable[[int], bool] | None = None,
    pool: WindowOf | None = None,
) -> SlotPlan:
    """Choose slots by a policy.

    ``balanced``: one window first. A second slot, if both together hold at least :data:`SLOT_SPLIT_GAIN` times what
    one would; further ones while the total gains a greater factor than the window loses. A window may be
    shorter on a card with more memory; the total is not.

    ``window``: the longest window that fits in one slot; further slots only where each holds the longest
    window there can be. Neither window nor total falls as memory grows.

    Both have at most :data:`MAX_AUTO_PARALLEL` slots.

    Args:
        policy: which rule.
        window: tokens that each of n slots would get; 0 where n slots do not fit.
        limit_tokens: the longest window there can be.
        holds_limit: whether n slots fit with that window each, where that is quicker to say than ``window``.
        pool: tokens that n slots could hold together, were the model without a limit; asked once, for
            :attr:`SlotPlan.unused_tokens`.

    Raises:
        ValueError: a limit that is not positive.
    """
    if limit_tokens < 1:
        raise ValueError(f"the longest window is positive, not {limit_tokens}")
    ask = cache(window)
    if ask(1) <= 0:
        return SlotPlan(0, 0, limit_tokens)
    balanced = policy is SlotPolicy.BALANCED
    slots = _balanced(ask) if balanced else _whole_windows(ask, limit_tokens, holds_limit)
    # Where only whole windows were asked about, the window of many slots is known without asking again.
    each = ask(slots) if balanced or slots == 1 else limit_tokens
    return _plan(slots, each, limit_tokens, ask, pool)


def requested_slots(
    count: int,
    window: WindowOf,
    limit_tokens: int,
    *,
    fits: Callable[[int], bool] | None = None,
    pool: WindowOf | None = None,
) -> SlotPlan:
    """Exactly so many slots, or a refusal; never fewer in silence, and without an upper limit of its own.

    Args:
        count: slots that were asked for.
        window: as for :func:`automatic_slots`.
        limit_tokens: the longest window there can be.
        fits: whether n slots fit at all, where that is quicker to say than ``window``.
        pool: as for :func:`automatic_slots`.

    Raises:
        LlmError: INVALID_REQUEST for a number below 1; INSUFFICIENT_MEMORY, naming the largest number that
            fits, where so many do not.
        ValueError: a limit that is not positive.
    """
    if limit_tokens < 1:
        raise ValueError(f"the longest window is positive, not {limit_tokens}")
    check_count(count)
    ask = cache(window)
    if ask(count) <= 0:
        raise _too_many(count, most_slots(count - 1, fits or (lambda n: ask(n) > 0)))
    return _plan(count, ask(count), limit_tokens, ask, pool)


def check_count(count: int) -> None:
    """Refuse a number of slots below 1; 0 does not mean "unset".

    Raises:
        LlmError: INVALID_REQUEST.
    """
    if count < 1:
        raise LlmError(
            ErrorCode.INVALID_REQUEST,
            f"parallel must be at least 1, not {count}.",
            hint="Leave --parallel out to let the planner choose.",
            parallel=count,
        )


def most_slots(limit: int, fits: Callable[[int], bool]) -> int:
    """The greatest number of slots that fits, up to a limit; 0 where none does. More slots never need less."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


def unasked_slots_note(slots: int) -> str:
    """That a total was asked for, and the number of slots is ours."""
    return f"{slots} slots, as no number was asked for"


def unused_note(unused_tokens: int) -> str:
    """What the policy ``window`` leaves."""
    return (
        f"{unused_tokens:,} more tokens of context would fit and are not used: every slot already has the longest"
        " window (--parallel N asks for more slots)"
    )


def _balanced(window: WindowOf) -> int:
    if 2 * window(2) < SLOT_SPLIT_GAIN * window(1):
        return 1
    slots = 2
    while slots < MAX_AUTO_PARALLEL:
        now, then = window(slots), window(slots + 1)
        # Stop where total gained, (n + 1) b / n a, does not exceed window lost, a / b; in whole numbers.
        if then <= PAGE_TOKENS or (slots + 1) * then * then <= slots * now * now:
            break
        slots += 1
    return slots


def _whole_windows(window: WindowOf, limit_tokens: int, holds_limit: Callable[[int], bool] | None) -> int:
    holds = holds_limit or (lambda n: window(n) >= limit_tokens)
    if window(1) < limit_tokens:
        return 1
    slots = 1
    for count in range(2, MAX_AUTO_PARALLEL + 1):
        if count < SLOT_SPLIT_GAIN:
            continue  # a gain of 3 allows no two slots, but may allow three
        if not holds(count):
            break
        slots = count
    return slots


def _plan(slots: int, each: int, limit_tokens: int, window: WindowOf, pool: WindowOf | None) -> SlotPlan:
    return SlotPlan(
        slots=slots,
        window_tokens=each,
        limit_tokens=limit_tokens,
        one_slot_window_tokens=window(1) if slots > 1 else None,
        unused_tokens=None if pool is None else max(0, pool(slots) - slots * each),
    )


def _too_many(count: int, most: int) -> LlmError:
    slots = "1 slot" if count == 1 else f"{count} slots"
    if most:
        fitting = "1 slot fits" if most == 1 else f"{most} slots fit"
        hint = f"At most {fitting}: --parallel {most}."
    else:
        hint = "Not even one slot fits: choose a smaller model."
    return LlmError(
        ErrorCode.INSUFFICIENT_MEMORY,
        f"{slots} of at least {PAGE_TOKENS:,} tokens each do not fit.",
        hint=hint,
        parallel=count,
        largest_parallel=most,
    )
