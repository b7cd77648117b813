"""What a model is launched for: to generate text, to turn it into vectors, or to score it. Pure.

The header tells it: ``<architecture>.pooling_type``, a classifier's tensors (``cls.*``), or an architecture that only
encodes. A model that generates text can be launched for vectors too, where somebody asks for that.
"""

from __future__ import annotations

import enum

from lllm3090d.checkpoints.classify import Kind, digest
from lllm3090d.checkpoints.header import GgufHeader


class Purpose(enum.StrEnum):
    """What an instance serves."""

    CHAT = "chat"  # text: completions and conversations
    EMBEDDING = "embedding"  # vectors
    RERANK = "rerank"  # scores of texts for a question


class Pooling(enum.StrEnum):
    """How the vectors of a text's tokens become one; the engine's names for ``--pooling``."""

    NONE = "none"
    MEAN = "mean"
    CLS = "cls"
    LAST = "last"
    RANK = "rank"


# enum llama_pooling_type of llama.cpp, b11434.
_POOLINGS = dict(enumerate(Pooling))
_PURPOSES = {Kind.EMBEDDING: Purpose.EMBEDDING, Kind.RERANK: Purpose.RERANK}


def purpose_of_kind(kind: Kind) -> Purpose:
    """What a model of this kind is launched for where nobody asks for something else."""
    return _PURPOSES.get(kind, Purpose.CHAT)


def purpose_of(header: GgufHeader) -> tuple[Purpose, Pooling | None]:
    """What a model is made for, and the pooling that its file names; None where it names none.

    Args:
        header: of its first shard.
    """
    architecture = header.metadata.get("general.architecture")
    number = header.metadata.get(f"{architecture}.pooling_type")
    known = isinstance(number, int) and not isinstance(number, bool)
    return purpose_of_kind(digest(header).kind), _POOLINGS.get(number) if known else None  # type: ignore[arg-type]  # an int, as known says
