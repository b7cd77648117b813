"""CheckpointFacts: what planning needs to know of a checkpoint, from its metadata and tensor infos."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lllm3090d.checkpoints.architectures import (
    ARCHITECTURES,
    DRAFTERS,
    Architecture,
    Graph,
    Mtp,
    Recurrence,
    why_without_rule,
)
from lllm3090d.checkpoints.chat_template import reasoning_words
from lllm3090d.checkpoints.contents import Tensors
from lllm3090d.checkpoints.cursor import printable
from lllm3090d.checkpoints.engine_rules import ENGINE_RULES
from lllm3090d.checkpoints.gguf_format import gguf_format
from lllm3090d.checkpoints.header import GgufHeader, read_header
from lllm3090d.checkpoints.layers import (
    LayerFacts,
    LayerKind,
    StateSpace,
    is_latent,
    read_layers,
    state_space,
    window_tokens,
)
from lllm3090d.checkpoints.metadata import Keys
from lllm3090d.checkpoints.projector import ProjectorFacts, VisionFacts
from lllm3090d.checkpoints.purpose import Pooling, Purpose, purpose_of
from lllm3090d.checkpoints.required_keys import check_keys
from lllm3090d.checkpoints.shards import check_split, complete_shards
from lllm3090d.checkpoints.tensor_shapes import check_tables
from lllm3090d.checkpoints.weights import (
    NOTHING,
    BlockWeights,
    Memory,
    TableWeights,
    WeightBytes,
    aligned,
    row_padding_bytes,
    total,
)
from lllm3090d.errors import ErrorCode, LlmError

# Planning looks at a checkpoint through this module alone.
__all__ = [
    "NOTHING",
    "SUPPORTED_ARCHITECTURES",
    "Architecture",
    "BlockWeights",
    "CheckpointFacts",
    "DrafterFacts",
    "FactsCache",
    "Graph",
    "LatentFacts",
    "LayerFacts",
    "LayerKind",
    "Memory",
    "Pooling",
    "ProjectorFacts",
    "Purpose",
    "RopeFacts",
    "StateSpace",
    "TableWeights",
    "VisionFacts",
    "WeightBytes",
    "aligned",
    "read_drafter_facts",
    "read_facts",
    "row_padding_bytes",
    "total",
]

SUPPORTED_ARCHITECTURES = tuple(sorted(ARCHITECTURES))
# More than a library has: a list of the models asks for all of them in order, so with one too few none is found.
CACHED_CHECKPOINTS = 2048
DEFAULT_ROPE_BASE = 10_000.0
GEMMA3N_PER_LAYER_VALUES = 256  # a constant of the engine


@dataclass(frozen=True, slots=True)
class RopeFacts:
    """Rotary position embedding.

    Attributes:
        base: frequency base.
        dimensions: rotated values of a head.
        scaling: ``none``, ``linear``, ``yarn`` or what else the file says.
        factor: how far positions are stretched, 1 where they are not.
        original_context_tokens: context before stretching.
    """

    base: float
    dimensions: int
    scaling: str
    factor: float
    original_context_tokens: int


@dataclass(frozen=True, slots=True)
class LatentFacts:
    """Multi-head latent attention.

    Attributes:
        rank: values of the compressed row.
        query_length: values of a query head before compression, the rotated ones included.
        rotated_length: the rotated ones.
    """

    rank: int
    query_length: int
    rotated_length: int


@dataclass(frozen=True, slots=True)
class DrafterFacts:
    """What a drafter in a file of its own takes from its model.

    Attributes:
        feature_length: values of the model's hidden states that it reads for each token, those of several layers
            together.
        reduced_vocabulary: it knows fewer words than its model, and maps them.
    """

    feature_length: int
    reduced_vocabulary: bool = False


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """A checkpoint as planning sees it; all sizes of all shards together.

    Attributes:
        architecture: ``general.architecture``.
        title: ``general.name``, or None.
        quantisation: label of the file type, e.g. ``Q4_1``.
        trained_context_tokens: ``context_length``.
        embedding_length: values.
        vocabulary_size: rows of the token embedding.
        sliding_window_tokens: 0 without sliding layers.
        layers: the blocks in order, those for multi-token prediction last.
        tables: bytes of the tensors outside the blocks.
        file_bytes: size of all shards on disk.
        has_chat_template: a template is embedded.
        reasoning: words about reasoning that the template reads, as ``reasoning_effort=low``; see
            :func:`lllm3090d.checkpoints.chat_template.reasoning_words`.
        has_mtp: it can draft for itself: its file has the blocks for that and the engine loads them.
        expert_count: experts of a layer, 0 for a dense model.
        widest_v_values: the widest V row of any layer, which all have without flash attention.
        per_layer_embedding_values: values of one layer's own token embedding, 0 without.
        state_space: widths of the state-space layers, None without.
        latent: None without latent attention.
        rope: None where the file says nothing of positions.
        drafter: of a file that only drafts for a model; None for a model.
        purpose: what it was made for.
        pooling: how the vectors of its tokens become one, as its file says; None where it does not.
    """

    architecture: str
    title: str | None
    quantisation: str
    trained_context_tokens: int
    embedding_length: int
    vocabulary_size: int
    sliding_window_tokens: int
    layers: tuple[LayerFacts, ...]
    tables: TableWeights
    file_bytes: int
    has_chat_template: bool
    has_mtp: bool = False
    expert_count: int = 0
    widest_v_values: int = 0
    per_layer_embedding_values: int = 0
    state_space: StateSpace | None = None
    latent: LatentFacts | None = None
    rope: RopeFacts | None = None
    reasoning: tuple[str, ...] = ()
    drafter: DrafterFacts | None = None
    purpose: Purpose = Purpose.CHAT
    pooling: Pooling | None = None

    def __hash__(self) -> int:
        """Of a few fields that tell checkpoints apart: prices look facts up by the hundred."""
        names = (self.architecture, self.title, self.quantisation)
        return hash((names, self.file_bytes, self.vocabulary_size, len(self.layers)))

    @property
    def rule(self) -> Architecture:
        """What the engine does with this architecture."""
        return ARCHITECTURES.get(self.architecture) or DRAFTERS[self.architecture]

    @property
    def trunk(self) -> tuple[LayerFacts, ...]:
        """The blocks without those for multi-token prediction."""
        return tuple(layer for layer in self.layers if not layer.is_mtp)

    @property
    def mtp_layers(self) -> tuple[LayerFacts, ...]:
        """The blocks for multi-token prediction."""
        return tuple(layer for layer in self.layers if layer.is_mtp)

    @property
    def context_layers(self) -> tuple[LayerFacts, ...]:
        """The blocks with a place in the main context: the trunk, and with some hybrids more."""
        return tuple(layer for layer in self.layers if layer.in_main_context)

    @property
    def keeps_context(self) -> bool:
        """It has a cache or a state; encoders have neither."""
        return self.rule.has_memory

    @property
    def keeps_state(self) -> bool:
        """Some of its layers keep a recurrent state, so its context cannot be cut at any token."""
        return any(layer.keeps_state for layer in self.layers)

    @property
    def rolls_back(self) -> bool:
        """Its state can be taken back by a few tokens, with copies of it."""
        return self.rule.rolls_back and self.keeps_state

    @property
    def token_embedding_bytes(self) -> int:
        """Bytes of ``token_embd.weight``."""
        return self.tables.token_embedding.stored

    @property
    def output_bytes(self) -> int:
        """Bytes of ``output.weight``, 0 where it is tied to the token embedding."""
        return self.tables.output.stored

    @property
    def output_is_tied(self) -> bool:
        """The output matrix is the token embedding."""
        return self.output_bytes == 0 and self.rule.embedding_is_output

    @property
    def output_is_copied(self) -> bool:
        """That matrix is allocated once more where the output is on a card."""
        return self.output_is_tied and self.rule.copies_tied

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(layer.weight_bytes for layer in self.layers) + self.tables.all.stored


def read_facts(shards: Sequence[Path], read: Callable[[Path], GgufHeader] = read_header) -> CheckpointFacts:
    """Read the facts of a checkpoint from the headers of all its shards; blocks for milliseconds.

    Args:
        shards: its files; of a split checkpoint one suffices, the others are found by name.
        read: where the headers come from.

    Raises:
        LlmError: BAD_CHECKPOINT naming the file and the key or offset; INCOMPLETE_CHECKPOINT naming the
            missing files, or one that contradicts the others; UNSUPPORTED_ARCHITECTURE with the reason.
    """
    headers = [read(shard) for shard in complete_shards(shards)]
    check_split(headers)
    return facts_of_headers(headers)


def read_drafter_facts(
    shards: Sequence[Path], read: Callable[[Path], GgufHeader] = read_header
) -> CheckpointFacts:
    """The facts of a file that drafts for a model: EAGLE-3, DFlash or DSpark, or blocks for multi-token prediction.

    A whole model that drafts for a larger one has the facts of a model, see :func:`read_facts`.

    Args:
        shards: as of :func:`read_facts`.
        read: where the headers come from.

    Raises:
        LlmError: as :func:`read_facts`; UNSUPPORTED_ARCHITECTURE also for a drafter whose memory nobody has compared
            with the engine's.
    """
    headers = [read(shard) for shard in complete_shards(shards)]
    check_split(headers)
    return facts_of_headers(headers, is_drafter=True)


def facts_of_headers(headers: Sequence[GgufHeader], *, is_drafter: bool = False) -> CheckpointFacts:
    """The facts of a complete set of headers in order; raises as :func:`read_facts`."""
    keys = Keys(headers[0])
    architecture = keys.text("general.architecture")
    rule = ARCHITECTURES.get(architecture) or (DRAFTERS.get(architecture) if is_drafter else None)
    # DSpark drafters for DeepSeek-V4 have blocks of its own kind.
    if rule is None or (is_drafter and keys.number(f"{architecture}.hyper_connection_count", 0)):
        raise _unsupported(headers[0], architecture)
    engine = ENGINE_RULES.get(architecture)  # none of drafters
    if engine is not None:
        check_keys(keys, architecture, engine)
    tensors = Tensors(headers, keys, architecture, rule, is_drafter=is_drafter)
    embedding_length = keys.number(f"{architecture}.embedding_length", least=1)
    per_layer = _per_layer_embedding(keys, architecture, rule)
    layers, widest = read_layers(
        keys, architecture, rule, tensors, embedding_length, per_layer_values=per_layer
    )
    vocabulary_size = _vocabulary_size(tensors, keys, architecture, embedding_length, is_drafter=is_drafter)
    if engine is not None and not is_drafter:
        check_tables(
            keys,
            architecture,
            engine,
            tensors,
            embedding=embedding_length,
            rows=vocabulary_size,
            per_layer=per_layer,
        )
    trained = keys.number(f"{architecture}.context_length", least=1)
    template = keys.value("tokenizer.chat_template")
    sliding = any(layer.kind is LayerKind.SLIDING for layer in layers)
    purpose, pooling = purpose_of(headers[0])
    return CheckpointFacts(
        purpose=purpose,
        pooling=pooling,
        architecture=architecture,
        title=printable(keys.text("general.name", "")) or None,
        quantisation=quantisation_of(headers, keys),
        trained_context_tokens=trained,
        embedding_length=embedding_length,
        vocabulary_size=vocabulary_size,
        sliding_window_tokens=window_tokens(keys, architecture, rule.sliding, tensors.trunk_count)
        if sliding
        else 0,
        layers=layers,
        tables=tensors.table_weights(),
        file_bytes=sum(header.file_bytes for header in headers),
        has_chat_template=template not in (None, ""),
        has_mtp=tensors.has_mtp and rule.mtp in (Mtp.LOADED, Mtp.OPTIONAL),
        expert_count=keys.number(f"{architecture}.expert_count", 0),
        widest_v_values=widest,
        per_layer_embedding_values=per_layer,
        state_space=state_space(keys, architecture, rule),
        latent=_latent(keys, architecture) if rule.may_be_latent else None,
        rope=_rope(keys, architecture, layers, trained) if rule.recurrence is not Recurrence.ALL else None,
        reasoning=reasoning_words(template) if isinstance(template, str) else (),
        drafter=_drafter(tensors, keys, architecture, embedding_length) if is_drafter else None,
    )


def _vocabulary_size(
    tensors: Tensors, keys: Keys, architecture: str, embedding_length: int, *, is_drafter: bool
) -> int:
    """Rows of the token embedding; without one, of the output, or what the file says; 0 where that is the model's."""
    if not is_drafter or tensors.outside_shape("token_embd.weight") is not None:
        return tensors.vocabulary_size(embedding_length)
    output = tensors.outside_shape("output.weight")
    return output[1] if output and len(output) > 1 else keys.number(f"{architecture}.vocab_size", 0)


def _drafter(tensors: Tensors, keys: Keys, architecture: str, embedding_length: int) -> DrafterFacts:
    """Raises LlmError: BAD_CHECKPOINT for a file that cannot draft."""
    if architecture not in DRAFTERS:
        if not tensors.has_mtp:
            keys.fail(f"{architecture}.nextn_predict_layers", "names no block that predicts further tokens")
        return DrafterFacts(feature_length=embedding_length)
    fusion = tensors.outside_shape("fc.weight")
    if fusion is None:
        raise tensors.bad("the tensor fc.weight, which reads the model's hidden states, is missing")
    return DrafterFacts(fusion[0], reduced_vocabulary=tensors.outside_shape("d2t") is not None)


class FactsCache:
    """Facts of the checkpoints that were read last, in memory; thread-safe.

    An entry is valid while path, size, modification time and inode of every shard are what they were.

    Args:
        capacity: checkpoints that are remembered.
        read: where the headers come from.
        drafters: the files are drafters, see :func:`read_drafter_facts`.
    """

    def __init__(
        self,
        capacity: int = CACHED_CHECKPOINTS,
        read: Callable[[Path], GgufHeader] = read_header,
        *,
        drafters: bool = False,
    ) -> None:
        self._read = read
        self._facts_of = read_drafter_facts if drafters else read_facts
        self._capacity = capacity
        self._lock = threading.Lock()
        self._entries: OrderedDict[tuple[tuple[Path, int, int, int], ...], CheckpointFacts] = OrderedDict()

    def get(self, shards: Sequence[Path]) -> CheckpointFacts:
        """The facts, read when they are not known; blocks and raises as :func:`read_facts`."""
        files = complete_shards(shards)
        stamp = _stamp(files)
        with self._lock:
            if stamp in self._entries:
                self._entries.move_to_end(stamp)
                return self._entries[stamp]
        facts = self._facts_of(
            files, self._read
        )  # outside the lock: a slow disk must not hold up other checkpoints
        if _stamp(files) == stamp:
            with self._lock:
                self._entries[stamp] = facts
                while len(self._entries) > self._capacity:
                    self._entries.popitem(last=False)
        return facts


def _stamp(files: Sequence[Path]) -> tuple[tuple[Path, int, int, int], ...]:
    stamps: list[tuple[Path, int, int, int]] = []
    for path in files:
        try:
            status = path.stat()
        except OSError as error:
            raise LlmError(
                ErrorCode.BAD_CHECKPOINT,
                f"{printable(path)} cannot be examined: {error.strerror}.",
                hint="Check that the file exists and that its permissions allow reading.",
                path=printable(path),
            ) from error
        stamps.append((path, status.st_size, status.st_mtime_ns, status.st_ino))
    return tuple(stamps)


def _per_layer_embedding(keys: Keys, architecture: str, rule: Architecture) -> int:
    if rule.graph is Graph.ALTUP:
        return GEMMA3N_PER_LAYER_VALUES
    if rule.graph is Graph.PER_LAYER_EMBEDDINGS:
        return keys.number(f"{architecture}.embedding_length_per_layer_input")
    return 0


def _latent(keys: Keys, architecture: str) -> LatentFacts | None:
    if not is_latent(keys, architecture):
        return None
    return LatentFacts(
        rank=keys.number(f"{architecture}.attention.kv_lora_rank", least=1),
        query_length=keys.number(f"{architecture}.attention.key_length_mla", least=1),
        rotated_length=keys.number(f"{architecture}.rope.dimension_count", 0),
    )


def _rope(keys: Keys, architecture: str, layers: Sequence[LayerFacts], trained: int) -> RopeFacts:
    prefix = f"{architecture}.rope."
    old = keys.real(prefix + "scale_linear", 1.0)
    return RopeFacts(
        base=keys.real(prefix + "freq_base", DEFAULT_ROPE_BASE),
        dimensions=keys.number(prefix + "dimension_count", layers[0].key_length),
        scaling=printable(keys.text(prefix + "scaling.type", "linear" if old > 1 else "none")),
        factor=keys.real(prefix + "scaling.factor", old) or 1.0,
        original_context_tokens=keys.number(prefix + "scaling.original_context_length", trained),
    )


def quantisation_of(headers: Sequence[GgufHeader], keys: Keys) -> str:
    """Label of ``general.file_type``; where it is missing or unknown, the type that most bytes have."""
    label = gguf_format().file_types.get(keys.number("general.file_type", -1))
    if label is not None:
        return label
    sizes: Counter[str] = Counter()
    for header in headers:
        for tensor in header.tensors:
            sizes[tensor.type_name] += tensor.size_bytes
    return sizes.most_common(1)[0][0] if sizes else "unknown"


def _unsupported(header: GgufHeader, architecture: str) -> LlmError:
    path, name = printable(header.path), printable(architecture)
    reason = why_without_rule(architecture)
    return LlmError(
        ErrorCode.UNSUPPORTED_ARCHITECTURE,
        f"{path} has the architecture {name}, whose memory cannot be computed: {reason}.",
        hint="Choose a model of another architecture, such as llama, qwen3, gemma3 or qwen35;"
        f" {len(SUPPORTED_ARCHITECTURES)} are known.",
        path=path,
        architecture=name,
        known=list(SUPPORTED_ARCHITECTURES),
    )
