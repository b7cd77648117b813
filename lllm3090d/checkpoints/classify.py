"""What kind of thing a GGUF file is, by its content; by its name only where the content does not tell.

The tensor and key names are those of llama.cpp: ``src/llama-arch.cpp`` for models and drafters,
``tools/mtmd/clip-impl.h`` for projectors, ``general.type`` of ``gguf-py`` for the rest. Pure.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from lllm3090d.checkpoints.cursor import ByteOrder
from lllm3090d.checkpoints.gguf_format import gguf_format
from lllm3090d.checkpoints.header import GgufHeader, TensorInfo, Value


class Kind(enum.StrEnum):
    """What a file, or a set of shards, is good for."""

    MODEL = "model"  # generates text
    EMBEDDING = "embedding"  # turns text into a vector
    RERANK = "rerank"  # scores a text for a question
    PROJECTOR = "projector"  # lets a model see or hear (``--mmproj``)
    DRAFTER = "drafter"  # guesses tokens for one model (``--model-draft``)
    ADAPTER = "adapter"  # changes a model (LoRA, control vector)
    OTHER = "other"  # no engine loads it, e.g. an importance matrix


class DraftMethod(enum.StrEnum):
    """How a drafter guesses; the engine's ``--spec-type`` is ``draft-`` and this."""

    MTP = "mtp"
    EAGLE3 = "eagle3"
    DFLASH = "dflash"
    DSPARK = "dspark"


LOADABLE = frozenset({Kind.MODEL, Kind.EMBEDDING, Kind.RERANK})

_POOLING_NONE, _POOLING_RANK = 0, 4  # enum llama_pooling_type
_TYPES = {"mmproj": Kind.PROJECTOR, "adapter": Kind.ADAPTER, "imatrix": Kind.OTHER}
# They attend in both directions and have no output matrix, whatever their metadata say of pooling.
ENCODER_ARCHITECTURES = frozenset(
    {
        "bert",
        "eurobert",
        "gemma-embedding",
        "jina-bert-v2",
        "jina-bert-v3",
        "llama-embed",
        "modern-bert",
        "neo-bert",
        "nomic-bert",
        "nomic-bert-moe",
        "t5encoder",
    }
)
_DRAFTER_ARCHITECTURES = {
    "eagle3": DraftMethod.EAGLE3,
    "dflash": DraftMethod.DFLASH,
    "gemma4-assistant": DraftMethod.MTP,
}
_PROJECTOR_ARCHITECTURE = "clip"
# In a lower-case file name -> kind and method; as llama.cpp looks for companions of a download, but that whole
# models have "-mtp-" in their names.
_NAMES: tuple[tuple[re.Pattern[str], Kind, DraftMethod | None], ...] = (
    (re.compile(r"mmproj"), Kind.PROJECTOR, None),
    (re.compile(r"^mtp-"), Kind.DRAFTER, DraftMethod.MTP),
    (re.compile(r"eagle3-"), Kind.DRAFTER, DraftMethod.EAGLE3),
    (re.compile(r"dflash-"), Kind.DRAFTER, DraftMethod.DFLASH),
    (re.compile(r"dspark-"), Kind.DRAFTER, DraftMethod.DSPARK),
    (re.compile(r"imatrix"), Kind.OTHER, None),
)
_BLOCK = re.compile(r"blk\.(\d{1,9})\.", re.ASCII)
_CLASSIFIER_TENSORS = frozenset({"cls.weight", "cls.output.weight"})
_LORA_SUFFIXES = (".lora_a", ".lora_b")
# The last matrix or bias of a projector by tensor name: its rows are the embedding of the model it is for.
_PROJECTOR_OUTPUTS = (
    "mm.model.fc.weight",
    "mm.model.mlp.3.weight",
    "mm.3.weight",
    "mm.2.weight",
    "mm.1.weight",
    "mm.input_projection.weight",
)
_TRANSPOSED_OUTPUT = "mm.input_projection.weight"  # gemma3 keeps it the other way round


@dataclass(frozen=True, slots=True)
class Digest:
    """What a scan needs to know of one file; small, so that a whole library's are read at once.

    Attributes:
        architecture: ``general.architecture``; empty where there is none.
        kind: by content.
        method: how a drafter drafts, else None.
        big_endian: the file is for machines of the other byte order.
        title: ``general.name``, ``basename`` and ``size_label`` together.
        file_type: label such as ``Q4_K_M``; empty where the file does not say.
        embedding_length: values; 0 unknown.
        block_count: layers; 0 unknown.
        vocabulary_size: tokens; 0 unknown.
        target_lengths: what a projector or drafter expects as ``embedding_length`` of its model; empty unknown.
        last_target_layer: the highest layer of its model that a drafter listens to; -1 unknown.
        projector_type: ``clip.projector_type`` or that of vision or audio; empty where there is none.
        tensor_count: in this file.
        split_number, split_count, split_tensors: ``split.*``, from 0; the count is 1 for a file of its own, and
            -1 stands for a number that is missing.
    """

    architecture: str
    kind: Kind
    method: DraftMethod | None
    big_endian: bool
    title: str
    file_type: str
    embedding_length: int
    block_count: int
    vocabulary_size: int
    target_lengths: tuple[int, ...]
    last_target_layer: int
    projector_type: str
    tensor_count: int
    split_number: int
    split_count: int
    split_tensors: int

    def to_json(self) -> str:
        """As text for :meth:`from_json`."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Digest:
        """What :meth:`to_json` wrote. Raises ValueError, TypeError or KeyError for anything else."""
        values = json.loads(text)
        if not isinstance(values, dict) or set(values) != _FIELDS:
            raise ValueError("not a digest")
        values["kind"] = Kind(values["kind"])
        values["method"] = DraftMethod(values["method"]) if values["method"] else None
        values["target_lengths"] = tuple(values["target_lengths"])
        return cls(**values)


_FIELDS = {field.name for field in fields(Digest)}


def digest(header: GgufHeader) -> Digest:
    """Look at a header; never fails, for what is contradictory is found when the facts are read."""
    metadata = header.metadata
    architecture = _text(metadata, "general.architecture")
    tensors = {tensor.name: tensor for tensor in header.tensors}
    kind, method = _kind(metadata, architecture, tensors)
    embedding_length = _number(metadata, f"{architecture}.embedding_length")
    targets = _number_tuple(metadata, f"{architecture}.target_layers")
    return Digest(
        architecture=architecture,
        kind=kind,
        method=method,
        big_endian=header.byte_order is ByteOrder.BIG,
        title=" ".join(
            filter(None, (_text(metadata, f"general.{key}") for key in ("name", "basename", "size_label")))
        ),
        file_type=gguf_format().file_types.get(_number(metadata, "general.file_type", -1), ""),
        embedding_length=embedding_length,
        block_count=_number(metadata, f"{architecture}.block_count"),
        vocabulary_size=_vocabulary(metadata, architecture, tensors),
        target_lengths=_target_lengths(metadata, architecture, kind, method, tensors),
        last_target_layer=max(targets, default=-1),
        projector_type=next(
            filter(
                None, (_text(metadata, f"clip.{part}projector_type") for part in ("", "vision.", "audio."))
            ),
            "",
        ),
        tensor_count=len(tensors),
        split_number=_number(metadata, "split.no", -1),
        split_count=max(1, _number(metadata, "split.count", 1)),
        split_tensors=_number(metadata, "split.tensors.count", -1),
    )


def kind_by_name(file_name: str) -> tuple[Kind, DraftMethod | None]:
    """What a file is meant to be that cannot be read; a model unless its name says otherwise."""
    lower = file_name.lower()
    for pattern, kind, method in _NAMES:
        if pattern.search(lower):
            return kind, method
    return Kind.MODEL, None


def _kind(
    metadata: Mapping[str, Value], architecture: str, tensors: Mapping[str, TensorInfo]
) -> tuple[Kind, DraftMethod | None]:
    declared = _TYPES.get(_text(metadata, "general.type"))
    method = _draft_method(metadata, architecture, tensors)
    pooling = _number(metadata, f"{architecture}.pooling_type", _POOLING_NONE)
    if architecture == _PROJECTOR_ARCHITECTURE:
        kind = Kind.PROJECTOR
    elif declared is not None:
        kind = declared
    elif any(name.endswith(_LORA_SUFFIXES) for name in tensors) or "adapter.type" in metadata:
        kind = Kind.ADAPTER
    elif "imatrix.datasets" in metadata:
        kind = Kind.OTHER
    elif method is not None:
        return Kind.DRAFTER, method
    elif pooling == _POOLING_RANK or not _CLASSIFIER_TENSORS.isdisjoint(tensors):
        kind = Kind.RERANK
    elif architecture in ENCODER_ARCHITECTURES or pooling != _POOLING_NONE:
        kind = Kind.EMBEDDING
    else:
        kind = Kind.MODEL
    return kind, None


def _draft_method(
    metadata: Mapping[str, Value], architecture: str, tensors: Mapping[str, TensorInfo]
) -> DraftMethod | None:
    method = _DRAFTER_ARCHITECTURES.get(architecture)
    if method is DraftMethod.DFLASH and "markov_w1.weight" in tensors:
        return DraftMethod.DSPARK
    if method is not None:
        return method
    if "fc.weight" in tensors and f"{architecture}.target_layers" in metadata:
        return DraftMethod.EAGLE3
    # A file with only the blocks that predict further tokens: the engine looks for the first block's norm too.
    blocks = {int(match[1]) for name in tensors if (match := _BLOCK.match(name))}
    heads = {int(match[1]) for name in tensors if ".nextn." in name and (match := _BLOCK.match(name))}
    if heads and min(blocks) == min(heads) and min(heads) > 0:
        return DraftMethod.MTP
    return None


def _vocabulary(metadata: Mapping[str, Value], architecture: str, tensors: Mapping[str, TensorInfo]) -> int:
    for name in ("token_embd.weight", "output.weight"):
        tensor = tensors.get(name)
        if tensor is not None and len(tensor.shape) > 1:
            return tensor.shape[1]
    return _number(metadata, f"{architecture}.vocab_size")


def _target_lengths(
    metadata: Mapping[str, Value],
    architecture: str,
    kind: Kind,
    method: DraftMethod | None,
    tensors: Mapping[str, TensorInfo],
) -> tuple[int, ...]:
    if kind is Kind.PROJECTOR:
        keys = [f"clip.{part}.projection_dim" for part in ("vision", "audio")]
        lengths = [_number(metadata, key) for key in keys]
        for name in _PROJECTOR_OUTPUTS:
            shape: tuple[int, ...] = tensors[name].shape if name in tensors else ()
            if len(shape) == 2:
                lengths.append(shape[0] if name == _TRANSPOSED_OUTPUT else shape[1])
                break
        return tuple(sorted({length for length in lengths if length}))
    if kind is not Kind.DRAFTER:
        return ()
    keys = [f"{architecture}.target_hidden_size"]
    if method is DraftMethod.MTP:
        keys.append(f"{architecture}.embedding_length_out")
    found = [_number(metadata, key) for key in keys]
    # The others think in the embedding of their model.
    own = [] if any(found) else [_number(metadata, f"{architecture}.embedding_length")]
    return tuple(sorted({length for length in found + own if length}))


def _text(metadata: Mapping[str, Value], key: str) -> str:
    value = metadata.get(key)
    return value if isinstance(value, str) else ""


def _number(metadata: Mapping[str, Value], key: str, default: int = 0) -> int:
    value = metadata.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def _number_tuple(metadata: Mapping[str, Value], key: str) -> tuple[int, ...]:
    value = metadata.get(key)
    return tuple(item for item in value if isinstance(item, int)) if isinstance(value, tuple) else ()
