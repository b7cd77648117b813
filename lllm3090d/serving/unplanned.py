"""What a checkpoint can be planned by: rules, the engine's dry run alone, or nothing; then why not, and what to do."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lllm3090d.checkpoints.classify import Kind
from lllm3090d.checkpoints.cursor import printable
from lllm3090d.checkpoints.facts import CheckpointFacts
from lllm3090d.checkpoints.unruled import UnruledModel, generates_text, without_formula
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.planning.costs import state_bytes_per_slot, unpriced

_IS = {
    Kind.EMBEDDING: "an embedding model, which turns text into vectors",
    Kind.RERANK: "a rerank model, which scores how well texts answer a question",
}
# What makes llama-server (b11434) serve a model of this kind.
_SWITCH = {Kind.EMBEDDING: "--embeddings ", Kind.RERANK: "--reranking "}


@dataclass(frozen=True, slots=True)
class Described:
    """What is known of a checkpoint.

    Attributes:
        facts: None where there is no rule for its architecture.
        unruled: set where the engine's dry run alone prices it.
        problem: why it cannot be planned at all; None where it can.
    """

    facts: CheckpointFacts | None
    unruled: UnruledModel | None = None
    problem: LlmError | None = None


def described(
    shards: Sequence[Path],
    kind: Kind,
    title: str,
    facts_of: Callable[[Sequence[Path]], CheckpointFacts],
    unruled_of: Callable[[Sequence[Path], str], UnruledModel],
) -> Described:
    """Find out by what a checkpoint can be planned; blocks for the readers.

    Args:
        shards: its files.
        kind: what it is good for.
        title: what a person calls it.
        facts_of, unruled_of: read what a rule tells, and what the header tells without one.

    Raises:
        LlmError: as the readers; UNSUPPORTED_ARCHITECTURE only as a problem.
    """
    try:
        facts = facts_of(shards)
    except LlmError as error:
        architecture = error.details.get("architecture")
        if error.code is not ErrorCode.UNSUPPORTED_ARCHITECTURE:
            raise
        if kind is not Kind.MODEL or not generates_text(str(architecture)):
            return Described(None, problem=error)
        return Described(None, unruled_of(shards, title))
    problem = unplanned(shards[0], kind, facts)
    if problem is None or problem.code is not ErrorCode.UNSUPPORTED_ARCHITECTURE:
        return Described(facts, problem=problem)
    if kind is not Kind.MODEL or not facts.keeps_context:
        return Described(facts, problem=problem)
    return Described(facts, without_formula(facts, title, state_bytes_per_slot(facts)))


def unplanned(path: Path, kind: Kind, facts: CheckpointFacts) -> LlmError | None:
    """Why no rule here plans this model, whatever is asked; None where one does.

    Args:
        path: its first file, for the command that runs it by hand.
        kind: what it is good for.
        facts: the checkpoint.
    """
    error = unpriced(facts)
    if error is None or error.code is not ErrorCode.UNSUPPORTED_ARCHITECTURE:
        return error
    architecture = printable(facts.architecture)
    what = _IS.get(kind, "a model that generates text")
    if kind not in _IS and not facts.keeps_context:
        what = "an encoder or a diffusion model"
    return LlmError(
        error.code,
        f"{printable(path)} is {what} (architecture {architecture}). This version does not run it: it cannot"
        " tell beforehand how much memory its computation takes, and starts nothing that might not fit.",
        hint=_hint(path, kind, facts),
        path=printable(path),
        kind=str(kind),
        architecture=architecture,
    )


def _hint(path: Path, kind: Kind, facts: CheckpointFacts) -> str:
    if kind not in _IS and not facts.keeps_context:
        return "Choose a model of another architecture."
    command = f"llama-server {_SWITCH.get(kind, '')}-m {shlex.quote(printable(path))}"
    return f"Run it by hand: {command} (its memory then counts as taken by others). Or choose another model."
