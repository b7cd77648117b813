"""Which projector and which drafter belong to a model: by directory, architecture and dimensions. Pure.

A companion may lie beside its model or in a directory above it, the models directory itself included; nearer ones go
first. One whose dimensions contradict the model is never taken. Beside models of another family, in one heap of
files, dimensions alone prove little, so there the names must agree too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from lllm3090d.checkpoints.classify import Digest, DraftMethod, Kind
from lllm3090d.checkpoints.names import fold

# Projector types of one family of models -> beginnings of its architectures. Others fit any by their dimensions.
PROJECTOR_FAMILIES = {
    "cogvlm": ("cogvlm",),
    "gemma3": ("gemma3",),
    "gemma3na": ("gemma3n",),
    "gemma3nv": ("gemma3n",),
    "gemma4a": ("gemma4",),
    "gemma4ua": ("gemma4",),
    "gemma4uv": ("gemma4",),
    "gemma4v": ("gemma4",),
    "hunyuanvl": ("hunyuan",),
    "kimik25": ("deepseek2", "kimi"),
    "kimivl": ("deepseek2",),
    "lfm2": ("lfm2",),
    "lfm2a": ("lfm2",),
    "llama4": ("llama4",),
    "minimax_m3": ("minimax",),
    "muse-glimmer": ("muse-glimmer",),
    "paddleocr": ("paddleocr", "ernie"),
    "qwen2.5vl_merger": ("qwen2",),
    "qwen2vl_merger": ("qwen2",),
    "qwen3vl_merger": ("qwen3",),
}
# Quality first, and no more than the engine computes with.
_PROJECTOR_TYPES = ("F16", "BF16", "Q8_0", "F32")
# What several files of one publisher have in common says nothing of which belongs to which.
_COMMON_WORDS = frozenset(
    {"gguf", "model", "of", "main", "imat", "ud", "it", "instruct", "chat"}
    | {"mmproj", "projector", "vision", "draft", "drafter", "assistant", "mtp", "eagle3", "dflash", "dspark"}
    | {"f16", "bf16", "f32", "fp16", "k", "xs", "s", "m", "l", "xl"}
)
_WORD = re.compile(r"[^\W_]+(?:\.\d+)*")
_QUANT = re.compile(r"i?q\d.*|\d{5}|mxfp4|nvfp4", re.ASCII)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A checkpoint or a companion as pairing sees it.

    Attributes:
        folder: below the models directory.
        stem: of its first file.
        digest: of its first file.
        size_bytes: of all its files.
    """

    folder: tuple[str, ...]
    stem: str
    digest: Digest
    size_bytes: int


class Pairing:
    """Finds companions.

    Args:
        models: all loadable checkpoints, which tell whether a directory is one model's or a heap.
    """

    def __init__(self, models: Sequence[Candidate]) -> None:
        self._models = models
        self._heaps: dict[tuple[str, ...], bool] = {}

    def best(self, model: Candidate, companions: Sequence[Candidate]) -> Candidate | None:
        """The companion to start the model with, out of those of one kind; None when none fits."""
        fitting = [
            (_rank(model, companion), companion)
            for companion in companions
            if _reaches(companion, model)
            and _fits(companion.digest, model.digest)
            and (not self._is_heap(companion.folder) or _affinity(companion, model) > 0)
        ]
        return min(fitting, key=lambda pair: pair[0])[1] if fitting else None

    def _is_heap(self, folder: tuple[str, ...]) -> bool:
        """Companions there can reach models of different dimensions or architectures."""
        if folder not in self._heaps:
            shapes = {
                (model.digest.architecture, model.digest.embedding_length, model.digest.block_count)
                for model in self._models
                if model.folder[: len(folder)] == folder
            }
            self._heaps[folder] = len(shapes) > 1
        return self._heaps[folder]


def _reaches(companion: Candidate, model: Candidate) -> bool:
    return companion.folder == model.folder[: len(companion.folder)]


def _fits(companion: Digest, model: Digest) -> bool:
    """Nothing in the headers speaks against it, and for a drafter something speaks for it."""
    if model.kind is not Kind.MODEL:
        return False
    lengths = companion.target_lengths
    if lengths and model.embedding_length and model.embedding_length not in lengths:
        return False
    if companion.kind is Kind.PROJECTOR:
        family = PROJECTOR_FAMILIES.get(companion.projector_type)
        return family is None or model.architecture.startswith(family)
    if companion.last_target_layer >= model.block_count > 0:
        return False
    if companion.method is DraftMethod.MTP:
        base = companion.architecture.removesuffix("-assistant")
        same_words = companion.vocabulary_size in (0, model.vocabulary_size)
        return model.architecture == base and same_words and bool(lengths)
    return bool(lengths)


def _affinity(companion: Candidate, model: Candidate) -> int:
    """How many telling words their names share."""
    return len(_words(companion) & _words(model))


def _words(candidate: Candidate) -> frozenset[str]:
    text = fold(f"{candidate.stem} {candidate.digest.title}")
    return frozenset(
        word for word in _WORD.findall(text) if word not in _COMMON_WORDS and not _QUANT.fullmatch(word)
    )


def _rank(model: Candidate, companion: Candidate) -> tuple[int, int, int, int, str]:
    """Nearer, then better named, then of the better type, then smaller; the name makes it certain."""
    kind = companion.digest.file_type
    quality = _PROJECTOR_TYPES.index(kind) if kind in _PROJECTOR_TYPES else len(_PROJECTOR_TYPES)
    if companion.digest.kind is Kind.DRAFTER:
        quality = 0
    return (
        len(model.folder) - len(companion.folder),
        -_affinity(companion, model),
        quality,
        companion.size_bytes,
        companion.stem,
    )
