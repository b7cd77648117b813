"""Models that are sound and that this version cannot plan: what they are, why not, and what to do instead. Pure."""

from __future__ import annotations

import shlex
from pathlib import Path

from lllm3090d.checkpoints.classify import Kind
from lllm3090d.checkpoints.cursor import printable
from lllm3090d.checkpoints.facts import CheckpointFacts
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.planning.costs import unpriced

_IS = {
    Kind.EMBEDDING: "an embedding model, which turns text into vectors",
    Kind.RERANK: "a rerank model, which scores how well texts answer a question",
}
# What makes llama-server (b11434) serve a model of this kind.
_SWITCH = {Kind.EMBEDDING: "--embeddings ", Kind.RERANK: "--reranking "}


def unplanned(path: Path, kind: Kind, facts: CheckpointFacts) -> LlmError | None:
    """Why no plan can be made for this model, whatever is asked; None where one can.

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
