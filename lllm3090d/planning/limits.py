"""Why the window of a plan is not larger, in a line. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from lllm3090d.planning.planner import CappedBy
from lllm3090d.planning.reserves import BudgetLine
from lllm3090d.planning.units import MIB


@dataclass(frozen=True, slots=True)
class Limit:
    """What a larger window fails at.

    Attributes:
        by: model, memory or request.
        line: of memory: the largest deduction, or all there is where nothing is deducted; else None.
        text: the same for a person.
    """

    by: CappedBy
    line: BudgetLine | None
    text: str


def limit(
    by: CappedBy, lines: tuple[BudgetLine, ...], grantable_bytes: int, limit_tokens: int, *, stretched: bool
) -> Limit:
    """What limits a plan.

    Args:
        by: as the planner says.
        lines: of the budget that decides.
        grantable_bytes: their sum, never negative.
        limit_tokens: the longest window that the model can serve.
        stretched: its positions are stretched for that.
    """
    if by is CappedBy.REQUEST:
        return Limit(by, None, "the request: this size was asked for")
    if by is CappedBy.MODEL:
        how = "stretched to" if stretched else "trained for"
        return Limit(by, None, f"the model: it is {how} {limit_tokens:,} tokens")
    given = f"the memory: {grantable_bytes // MIB:,} MiB can be given"
    deductions = [line for line in lines if line.bytes < 0]
    if not deductions:
        return Limit(by, lines[0] if lines else None, given)
    largest = min(deductions, key=lambda line: line.bytes)
    text = f"{given}; the largest deduction is {largest.name}, {-largest.bytes // MIB:,} MiB"
    return Limit(by, largest, text)
