"""Launches that turn text into vectors or score it: what of a launch is different then. Pure.

The engine (b11434) computes a text whose tokens see each other at once, so the longest text is one micro batch, and a
batch is never larger than that (``-b`` = ``-ub``). Only a model that attends backwards and whose pooling reads the last
token may compute a text in parts. Nothing is generated: no drafts, no finished prompts to keep, no checkpoints.
"""

from __future__ import annotations

from dataclasses import replace

from lllm3090d.checkpoints.facts import CheckpointFacts, Pooling, Purpose
from lllm3090d.planning.cache import CacheType
from lllm3090d.planning.launch import Launch
from lllm3090d.planning.request import Features, PlanRequest

# Judgement: longer texts need a --micro-batch, for the memory of a batch grows with its tokens and the vocabulary.
LONGEST_TEXT_TOKENS = 2048
MOST_MICRO_BATCH_TOKENS = 8192  # what may be asked for


def purpose_of_request(facts: CheckpointFacts, request: PlanRequest) -> Purpose:
    """What the launch is for: as asked, else as the file was made."""
    return request.purpose or facts.purpose


def splits_texts(facts: CheckpointFacts, launch: Launch) -> bool:
    """A text may be computed in several micro batches."""
    if launch.purpose is Purpose.CHAT:
        return True
    pooling = launch.pooling or facts.pooling
    return facts.keeps_context and (launch.purpose is Purpose.RERANK or pooling is Pooling.LAST)


def longest_text_tokens(facts: CheckpointFacts, launch: Launch, window_tokens: int) -> int:
    """What one request may be long: the window, or a micro batch where a text is not computed in parts."""
    return window_tokens if splits_texts(facts, launch) else min(window_tokens, launch.micro_batch_tokens)


def for_vectors(facts: CheckpointFacts, request: PlanRequest, template: Launch) -> Launch:
    """The launch for its purpose; itself where text is generated.

    Args:
        facts: the checkpoint.
        request: what a person asked for.
        template: as for a model that generates text.
    """
    purpose = purpose_of_request(facts, request)
    if purpose is Purpose.CHAT:
        return template
    # Without pooling the engine gives a vector for each token, which no client of /v1/embeddings reads.
    silent = facts.pooling in {None, Pooling.NONE, Pooling.RANK}
    pooling = Pooling.MEAN if purpose is Purpose.EMBEDDING and silent else None
    made = replace(
        template,
        purpose=purpose,
        pooling=pooling,
        context_checkpoints=0,
        prompt_cache_mib=0,
    )
    if not facts.keeps_context:
        made = replace(made, cache_type_k=CacheType.F16, cache_type_v=CacheType.F16)
    micro_batch = request.micro_batch_tokens or request.batch_tokens
    if micro_batch is None and splits_texts(facts, made):
        micro_batch = template.micro_batch_tokens
    elif micro_batch is None:
        longest = MOST_MICRO_BATCH_TOKENS if not facts.keeps_context else LONGEST_TEXT_TOKENS
        micro_batch = min(longest, facts.trained_context_tokens)
    return replace(made, batch_tokens=micro_batch, micro_batch_tokens=micro_batch)


def unserved(facts: CheckpointFacts, request: PlanRequest, features: Features) -> tuple[str, str] | None:
    """Why the launch cannot be for this purpose, and the way out; None where it can."""
    purpose, name = purpose_of_request(facts, request), facts.title or facts.architecture
    if purpose is Purpose.CHAT:
        if facts.keeps_context:
            return None
        return (
            f"{name} generates no text: it is an encoder ({facts.architecture})",
            "Leave --purpose out, and purpose in the settings of this model, and ask it"
            f" {'for scores at /v1/rerank' if facts.purpose is Purpose.RERANK else 'for vectors at /v1/embeddings'},"
            " or choose another model.",
        )
    if purpose is Purpose.RERANK and facts.purpose is not Purpose.RERANK:
        return (
            f"{name} scores no texts: its file has neither a classifier nor pooling of that kind",
            "Leave --purpose out, or choose a rerank model.",
        )
    if purpose.value not in features.purposes:
        return (
            f"this engine has no option for {purpose} models",
            "Use a newer llama.cpp, or choose another model.",
        )
    if request.tiered:
        return (f"a tiered cache is of no use for {purpose}: nothing is generated", "Leave the tier out.")
    return None
