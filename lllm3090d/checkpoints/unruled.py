"""Models that no rule describes: what their header says by itself, enough for the engine's dry run to price them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lllm3090d.checkpoints.architectures import REFUSED, why_without_rule
from lllm3090d.checkpoints.cursor import printable
from lllm3090d.checkpoints.facts import CheckpointFacts, quantisation_of
from lllm3090d.checkpoints.header import GgufHeader, read_header
from lllm3090d.checkpoints.metadata import Keys
from lllm3090d.checkpoints.shards import check_split, complete_shards
from lllm3090d.errors import ErrorCode, LlmError

WITHOUT_FORMULA = "its weights and context are known, but not what it takes to compute"


@dataclass(frozen=True, slots=True)
class UnruledModel:
    """A model that generates text and whose memory nothing here computes; the engine's dry run does.

    Attributes:
        architecture: ``general.architecture``.
        title: a name for a person.
        quantisation: label of the file type.
        trained_context_tokens: ``context_length``.
        vocabulary_size: words.
        file_bytes: size of all shards on disk.
        reason: why nothing here computes it, as the end of a sentence.
        state_bytes_per_slot: recurrent states of one slot, which a dry run really allocates; None where nobody knows.
    """

    architecture: str
    title: str
    quantisation: str
    trained_context_tokens: int
    vocabulary_size: int
    file_bytes: int
    reason: str
    state_bytes_per_slot: int | None = None


def generates_text(architecture: str) -> bool:
    """An architecture without a rule may be a model that generates text, as far as anybody knows."""
    return architecture not in REFUSED


def read_unruled(
    shards: Sequence[Path], title: str, read: Callable[[Path], GgufHeader] = read_header
) -> UnruledModel:
    """What the headers of a model without a rule say; blocks for milliseconds.

    Args:
        shards: its files; of a split checkpoint one suffices.
        title: what a person calls it.
        read: where the headers come from.

    Raises:
        LlmError: BAD_CHECKPOINT naming the key that is missing or wrong; INCOMPLETE_CHECKPOINT naming missing files, or
            one that contradicts the others.
    """
    headers = [read(shard) for shard in complete_shards(shards)]
    check_split(headers)
    keys = Keys(headers[0])
    architecture = keys.text("general.architecture")
    return UnruledModel(
        architecture=printable(architecture),
        title=title,
        quantisation=quantisation_of(headers, keys),
        trained_context_tokens=keys.number(f"{architecture}.context_length", least=1),
        vocabulary_size=_vocabulary_size(headers, keys, architecture),
        file_bytes=sum(header.file_bytes for header in headers),
        reason=why_without_rule(architecture),
    )


def without_formula(facts: CheckpointFacts, title: str, state_bytes_per_slot: int) -> UnruledModel:
    """A model whose facts are known, but for what it takes to compute."""
    return UnruledModel(
        architecture=printable(facts.architecture),
        title=title,
        quantisation=facts.quantisation,
        trained_context_tokens=facts.trained_context_tokens,
        vocabulary_size=facts.vocabulary_size,
        file_bytes=facts.file_bytes,
        reason=WITHOUT_FORMULA,
        state_bytes_per_slot=state_bytes_per_slot,
    )


def _vocabulary_size(headers: Sequence[GgufHeader], keys: Keys, architecture: str) -> int:
    """Rows of the largest table of words, tokens of the tokenizer, or what the file says: the most of these."""
    rows = [
        tensor.shape[1]
        for header in headers
        for tensor in header.tensors
        if tensor.name in {"token_embd.weight", "output.weight"} and len(tensor.shape) > 1
    ]
    tokens = keys.length("tokenizer.ggml.tokens") or 0
    size = max(*rows, tokens, keys.number(f"{architecture}.vocab_size", 0), 0)
    if not size:
        path = printable(headers[0].path)
        raise LlmError(
            ErrorCode.BAD_CHECKPOINT,
            f"{path} is not a usable model file: neither a tokenizer nor a table of words tells its vocabulary.",
            hint="Fetch another conversion of the model.",
            path=path,
            key="tokenizer.ggml.tokens",
        )
    return size
