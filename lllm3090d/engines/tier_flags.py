"""Flags and variables of the tiered cache, its drafts and the reasoning rules of the same fork.

Like :mod:`lllm3090d.engines.arguments`, which calls it, and nowhere else: names of flags. Every one is used only
where this build's ``--help`` offers it, never by its version: parts of that fork are merged elsewhere one by one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from lllm3090d.engines.capabilities import Build, Capabilities
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.planning.tier import Tier, TierOffer

LINE = "--kv-vram-cells"
DRAFT_WINDOW = "--spec-draft-window"
DRAFT_TAIL = "--spec-draft-n-max-tail"
PACKED_MASK = "--kq-mask-packed"
# A build that has this flag also has the patch without which a shared pool gave wrong answers.
SAFE_POOL_MARK = "--checkpoint-every-nt"
EFFORT_ALLOW = "--reasoning-effort-allow"
EFFORT_FALLBACK = "--reasoning-effort-fallback"
TOKENS_FLOOR = "--reasoning-max-tokens-floor"
EFFORT_SWITCH = "reasoning_effort"  # what the engine looks at in a request

BATCH_INVARIANT = "GGML_CUDA_BATCH_INVARIANT"
SHARED_POOL = "GGML_CUDA_SHARED_POOL"
DRAFT_MICRO_BATCH = "LLAMA_MTP_DRAFT_UBATCH"
LEAST_DRAFT_MICRO_BATCH = 32
# Inherited, each of these would change where the cache lies, or how much of it is staged, behind the plan's back.
TIER_VARIABLES = (
    BATCH_INVARIANT,
    SHARED_POOL,
    DRAFT_MICRO_BATCH,
    "GGML_CUDA_KV_TIER_STAGING",
    "GGML_CUDA_KV_TIER_STAGING_FRAC",
    "GGML_CUDA_KV_TIER_STAGE_MIN_Q",
    "GGML_CUDA_KV_TIER_REDIRECT",
    "GGML_CUDA_KV_TIER_PREFETCH",
)
EFFORT_WORD = re.compile(r"\A[A-Za-z0-9][A-Za-z0-9_.-]{0,63}\Z")
VIRTUAL_MEMORY = re.compile(
    r"^[ \t]*Device (?P<device>\d{1,3}): [^\n]{0,400}?, VMM: (?P<answer>yes|no)(?:,|[ \t]*$)", re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class TierArguments:
    """A part of a command line.

    Attributes:
        arguments: flags and their values.
        environment: variables to set, name and value, sorted by name.
        unset: variables that must not reach the engine, sorted.
    """

    arguments: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()
    unset: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ReasoningRules:
    """What the engine does with what clients say about reasoning.

    Attributes:
        allowed_efforts: words that may reach the template; empty for all.
        fallback_effort: what stands in for any other word; one of those allowed.
        tokens_floor: least limit of generated tokens while the model thinks; 0 for none.

    Raises:
        LlmError: SETTINGS_INVALID for rules that cannot be.
    """

    allowed_efforts: tuple[str, ...] = ()
    fallback_effort: str | None = None
    tokens_floor: int = 0

    def __post_init__(self) -> None:
        """The engine checks none of this: it compares words exactly, and takes an empty list for an empty word."""
        reason = rules_fault(self.allowed_efforts, self.fallback_effort, self.tokens_floor)
        if reason is not None:
            raise LlmError(
                ErrorCode.SETTINGS_INVALID,
                f"The rules for reasoning cannot be: {reason}.",
                hint="Give words of letters, digits, '.', '_' and '-', such as low, medium and xhigh.",
            )


def rules_fault(allowed: Sequence[str], fallback: str | None, floor_tokens: int) -> str | None:
    """Why there can be no such rules; None where there can."""
    words = (*allowed, *((fallback,) if fallback is not None else ()))
    bad = next((word for word in words if not EFFORT_WORD.match(word)), None)
    if bad is not None:
        return f"{bad!a} is no word for an effort"
    if allowed and fallback is None:
        return "with a list of efforts one of them must stand in for all others"
    if fallback is not None and fallback not in allowed:
        return f"{fallback} stands in for other efforts and is not among those allowed"
    if floor_tokens < 0:
        return f"a least number of tokens is not negative, and {floor_tokens} is"
    return None


def tier_offer(capabilities: Capabilities) -> TierOffer:
    """What of a tier a build offers.

    The window of a draft counts only beside the tier: another fork has a flag of the same name whose sizes are
    not known.
    """
    flags = capabilities.flags
    tier = LINE in flags
    return TierOffer(
        tier=tier,
        draft_window=tier and DRAFT_WINDOW in flags,
        draft_tail=tier and DRAFT_TAIL in flags,
        packed_mask=PACKED_MASK in flags,
        shared_pool=tier and SAFE_POOL_MARK in flags,
        # The variable has no flag. The mark belongs to a later patch of the same series.
        draft_micro_batch=DRAFT_MICRO_BATCH in capabilities.variables or (tier and SAFE_POOL_MARK in flags),
    )


def tier_arguments(tier: Tier, build: Build, capabilities: Capabilities) -> TierArguments:
    """Flags and variables that carry out a tier.

    Args:
        tier: of the plan.
        build: for the message.
        capabilities: its answers.

    Raises:
        LlmError: ENGINE_UNUSABLE where the build lacks a flag that the plan counts on: without it the engine would
            allocate more than was priced, or nothing would be split at all.
    """
    offer = tier_offer(capabilities)
    line = [(LINE, str(tier.line_tokens), True, offer.tier)]
    draft_window, draft_tail = str(tier.draft_window_tokens), str(tier.draft_tail_tokens)
    line.append((DRAFT_WINDOW, draft_window, bool(tier.draft_window_tokens), offer.draft_window))
    line.append((DRAFT_TAIL, draft_tail, bool(tier.draft_tail_tokens), offer.draft_tail))
    line.append((PACKED_MASK, "", tier.packed_mask, offer.packed_mask))
    arguments: list[str] = []
    for flag, value, wanted, offered in line:
        if wanted and not offered:
            raise _missing(build, capabilities, flag)
        if wanted:
            arguments += [flag, value] if value else [flag]
    environment = {}
    if tier.batch_invariant:
        environment[BATCH_INVARIANT] = "1"
    if tier.shared_pool and offer.shared_pool:
        environment[SHARED_POOL] = "1"
    if tier.draft_micro_batch_tokens >= LEAST_DRAFT_MICRO_BATCH and offer.draft_micro_batch:
        environment[DRAFT_MICRO_BATCH] = str(tier.draft_micro_batch_tokens)
    return TierArguments(
        tuple(arguments),
        tuple(sorted(environment.items())),
        tuple(sorted(set(TIER_VARIABLES) - environment.keys())),
    )


def reasoning_arguments(
    rules: ReasoningRules, words: Sequence[str], capabilities: Capabilities
) -> TierArguments:
    """Flags that carry out the rules for reasoning, as far as the build offers them; none of them costs memory.

    A gateway that applies such rules itself must not do so here too.

    Args:
        rules: from the settings.
        words: about reasoning, that the model's chat template reads; see
            :func:`lllm3090d.checkpoints.chat_template.reasoning_words`. Without any there is nothing to rule, and
            efforts are ruled only where it reads ``reasoning_effort``.
        capabilities: of the build.
    """
    flags, arguments = capabilities.flags, []
    efforts = EFFORT_SWITCH in words and {EFFORT_ALLOW, EFFORT_FALLBACK} <= flags
    if efforts and rules.allowed_efforts and rules.fallback_effort:
        arguments += [EFFORT_ALLOW, ",".join(rules.allowed_efforts), EFFORT_FALLBACK, rules.fallback_effort]
    if words and rules.tokens_floor and TOKENS_FLOOR in flags:
        arguments += [TOKENS_FLOOR, str(rules.tokens_floor)]
    return TierArguments(tuple(arguments))


def reports_virtual_memory(text: str) -> bool | None:
    """Whether all CUDA devices that a build lists have virtual memory (``VMM: yes``); None where none says so.

    The text is what the engine prints about its devices, at a start or with ``--list-devices``.
    """
    answers = [found["answer"] == "yes" for found in VIRTUAL_MEMORY.finditer(text)]
    return all(answers) if answers else None


def _missing(build: Build, capabilities: Capabilities, flag: str) -> LlmError:
    return LlmError(
        ErrorCode.ENGINE_UNUSABLE,
        f"{build.server} (version {capabilities.version}) does not offer {flag}, which this plan counts on.",
        hint="Plan without a tier, or choose a build of the fork that offers it.",
        path=str(build.server),
        flag=flag,
    )
