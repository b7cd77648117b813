"""What a plan is good for: whether it fits, and whether an agent can work in its window. Pure."""

from __future__ import annotations

import enum

from lllm3090d.checkpoints.facts import Purpose

# Tokens: system prompt and tool definitions that an agent harness sends with every turn, about so many observed with
# Claude Code by lllm3090. A window that is not above it cannot serve an agent.
AGENT_PROMPT_FLOOR_TOKENS = 40_000
# Tokens: below this an agent works, but soon has to forget. Judgement of lllm3090.
AGENT_COMFORT_TOKENS = 60_000


class Verdict(enum.StrEnum):
    """What becomes of a model on a card; the first that applies, in the order of :func:`verdict`, but for the last."""

    CAPABILITY = "capability"  # the card cannot compute it
    TOO_BIG = "too-big"  # it does not fit
    TIGHT = "tight"  # it fits, but no agent can work in its window
    OK = "ok"
    DRY_RUN = (
        "dry-run"  # no rule prices it: only a dry run of the engine tells, which a plan or a load makes
    )


def verdict(
    window_tokens: int, *, purpose: Purpose = Purpose.CHAT, card_can_compute: bool = True
) -> Verdict:
    """The verdict on a plan.

    Args:
        window_tokens: of one slot; 0 where nothing fits.
        purpose: what it serves; no agent works with vectors or scores, so there to fit is enough.
        card_can_compute: its compute capability is not below the model's minimum, or nobody knows.
    """
    if not card_can_compute:
        return Verdict.CAPABILITY
    if window_tokens <= 0:
        return Verdict.TOO_BIG
    return Verdict.OK if purpose is not Purpose.CHAT or agent_ready(window_tokens) else Verdict.TIGHT


def agent_ready(window_tokens: int) -> bool:
    """An agent's prompt fits into the window and leaves something."""
    return window_tokens > AGENT_PROMPT_FLOOR_TOKENS


def concurrent_subagents(slots: int) -> int:
    """Subagents that can work beside their parent without evicting its prefix: a slot each, but at least one."""
    return max(1, slots - 1)


def agent_remarks(window_tokens: int, slots: int) -> tuple[str, ...]:
    """What a person who starts an agent on this plan should know; empty where there is nothing to say.

    Args:
        window_tokens: of one slot of the *running* engine, not of its total and not of a new plan.
        slots: of that engine.
    """
    remarks = []
    if not agent_ready(window_tokens):
        remarks.append(
            f"The window of {window_tokens:,} tokens is not above the {AGENT_PROMPT_FLOOR_TOKENS:,} that an agent"
            " sends with every turn."
        )
    elif window_tokens < AGENT_COMFORT_TOKENS:
        remarks.append(
            f"The window of {window_tokens:,} tokens is below {AGENT_COMFORT_TOKENS:,}: an agent soon has to"
            " summarise and forget."
        )
    if slots == 1:
        remarks.append("There is one slot: a subagent waits for its parent and evicts what it had read.")
    return tuple(remarks)
