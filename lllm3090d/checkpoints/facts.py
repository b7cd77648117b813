"""CheckpointFacts: what planning needs to know of a checkpoint, from its metadata and tensor infos."""

from __future__ import annotations

import enum
import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lllm3090d.checkpoints.cursor import printable
from lllm3090d.checkpoints.gguf_format import gguf_format
from lllm3090d.checkpoints.header import GgufHeader, TensorInfo, read_header
from lllm3090d.checkpoints.metadata import Keys
from lllm3090d.checkpoints.shards import check_split, complete_shards
from lllm3090d.errors import ErrorCode, LlmError

MAX_LAYERS = 512  # LLAMA_MAX_LAYERS of the engine
# Period of the sliding-window pattern where the file has none: the last layer of each period is dense. The
# other architectures ignore attention.sliding_window, as the engine does.
SLIDING_PERIODS: Mapping[str, int] = {"gemma3": 6}
SUPPORTED_ARCHITECTURES = ("gemma3", "llama", "qwen2", "qwen3")
CACHED_CHECKPOINTS = 256

_BLOCK = re.compile(r"blk\.(\d{1,9})\.", re.ASCII)


class LayerKind(enum.StrEnum):
    """How a layer keeps its context."""

    FULL = "full"  # attention over the whole context
    SLIDING = "sliding"  # attention over a window


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """One transformer block.

    Attributes:
        kind: how it keeps its context.
        head_count: query heads.
        key_length: values per key head.
        k_values: values of one K row of the cache, KV heads times key length.
        v_values: values of one V row of the cache.
        feed_forward_length: width of the gated feed-forward network, values.
        weight_bytes: bytes of all tensors of the block.
    """

    kind: LayerKind
    head_count: int
    key_length: int
    k_values: int
    v_values: int
    feed_forward_length: int
    weight_bytes: int


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
        layers: the blocks in order.
        token_embedding_bytes: bytes of ``token_embd.weight``.
        output_bytes: bytes of ``output.weight``, 0 where it is tied to the token embedding.
        other_bytes: every other tensor outside the blocks (norms, RoPE factors).
        file_bytes: size of all shards on disk.
        has_chat_template: a template is embedded.
    """

    architecture: str
    title: str | None
    quantisation: str
    trained_context_tokens: int
    embedding_length: int
    vocabulary_size: int
    sliding_window_tokens: int
    layers: tuple[LayerFacts, ...]
    token_embedding_bytes: int
    output_bytes: int
    other_bytes: int
    file_bytes: int
    has_chat_template: bool

    @property
    def output_is_tied(self) -> bool:
        """The output matrix is the token embedding."""
        return self.output_bytes == 0

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors."""
        blocks = sum(layer.weight_bytes for layer in self.layers)
        return blocks + self.token_embedding_bytes + self.output_bytes + self.other_bytes


def read_facts(shards: Sequence[Path]) -> CheckpointFacts:
    """Read the facts of a checkpoint from the headers of all its shards; blocks for milliseconds.

    Args:
        shards: its files; of a split checkpoint one suffices, the others are found by name.

    Raises:
        LlmError: BAD_CHECKPOINT naming the file and the key or offset; INCOMPLETE_CHECKPOINT naming the
            missing files; UNSUPPORTED_ARCHITECTURE naming the known ones.
    """
    headers = [read_header(shard) for shard in complete_shards(shards)]
    check_split(headers)
    keys = Keys(headers[0])
    architecture = keys.text("general.architecture")
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise _unsupported(headers[0], architecture, f"has the architecture {printable(architecture)}")
    if keys.number(f"{architecture}.expert_count", 0) > 0:
        raise _unsupported(
            headers[0], architecture, f"is a mixture of experts of the architecture {architecture}"
        )
    weights = _Weights(headers, keys, architecture)
    embedding_length = keys.number(f"{architecture}.embedding_length", least=1)
    layers = _layers(keys, architecture, embedding_length, weights)
    sliding = any(layer.kind is LayerKind.SLIDING for layer in layers)
    return CheckpointFacts(
        architecture=architecture,
        title=printable(keys.text("general.name", "")) or None,
        quantisation=_quantisation(headers, keys),
        trained_context_tokens=keys.number(f"{architecture}.context_length", least=1),
        embedding_length=embedding_length,
        vocabulary_size=weights.vocabulary_size(embedding_length),
        sliding_window_tokens=keys.number(f"{architecture}.attention.sliding_window") if sliding else 0,
        layers=layers,
        token_embedding_bytes=weights.token_embedding.size_bytes,
        output_bytes=weights.output_bytes,
        other_bytes=weights.other_bytes,
        file_bytes=sum(header.file_bytes for header in headers),
        has_chat_template=keys.value("tokenizer.chat_template") not in (None, ""),
    )


class FactsCache:
    """Facts of the checkpoints that were read last, in memory; thread-safe.

    An entry is valid while path, size, modification time and inode of every shard are what they were.
    """

    def __init__(self, capacity: int = CACHED_CHECKPOINTS) -> None:
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
        facts = read_facts(files)  # outside the lock: a slow disk must not hold up other checkpoints
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


class _Weights:
    """The tensors of all shards, by place."""

    def __init__(self, headers: Sequence[GgufHeader], keys: Keys, architecture: str) -> None:
        self._headers = headers
        self._keys = keys
        self.layer_count = keys.number(f"{architecture}.block_count", least=1, most=MAX_LAYERS)
        self.layer_bytes = [0] * self.layer_count
        self.output_bytes = 0
        self.other_bytes = 0
        self._tensors: dict[str, TensorInfo] = {}
        for header in headers:
            for tensor in header.tensors:
                if tensor.name in self._tensors:
                    raise self.bad(f"the tensor {printable(tensor.name)} occurs in two of its files")
                self._tensors[tensor.name] = tensor
                self._add(tensor)
        self.token_embedding = self._required("token_embd.weight")
        for index, size in enumerate(self.layer_bytes):
            if size == 0:
                raise self.bad(f"block {index} of {self.layer_count} has no tensors")

    def bad(self, reason: str) -> LlmError:
        """BAD_CHECKPOINT for the whole checkpoint."""
        path = printable(self._headers[0].path)
        return LlmError(
            ErrorCode.BAD_CHECKPOINT,
            f"{path} is not a usable model file: {reason}.",
            hint="Fetch another conversion of the model.",
            path=path,
        )

    def _required(self, name: str) -> TensorInfo:
        if name not in self._tensors:
            raise self.bad(f"the tensor {name} is missing")
        return self._tensors[name]

    def _add(self, tensor: TensorInfo) -> None:
        block = _BLOCK.match(tensor.name)
        if block is not None:
            index = int(block[1])
            if index >= self.layer_count:
                name = printable(tensor.name)
                raise self.bad(f"the tensor {name} lies beyond the block_count of {self.layer_count}")
            self.layer_bytes[index] += tensor.size_bytes
        elif tensor.name == "output.weight":
            self.output_bytes = tensor.size_bytes
        elif tensor.name != "token_embd.weight":
            self.other_bytes += tensor.size_bytes

    def vocabulary_size(self, embedding_length: int) -> int:
        """Rows of the token embedding."""
        shape = self.token_embedding.shape
        if len(shape) < 2 or shape[0] != embedding_length:
            raise self.bad(
                f"token_embd.weight has the shape {list(shape)} for embeddings of {embedding_length}"
            )
        return shape[1]

    def check_rows(self, index: int, name: str, rows: int) -> None:
        """A K or V projection on its own must have the rows that the metadata promise."""
        tensor = self._tensors.get(f"blk.{index}.{name}.weight")
        if tensor is not None and tensor.shape[1:] != (rows,):
            raise self.bad(
                f"{tensor.name} has the shape {list(tensor.shape)}, its metadata promise {rows} rows"
            )


def _layers(
    keys: Keys, architecture: str, embedding_length: int, weights: _Weights
) -> tuple[LayerFacts, ...]:
    """The blocks: K row = head_count_kv[i] * key_length, V row = head_count_kv[i] * value_length."""
    count = weights.layer_count
    prefix = f"{architecture}.attention."
    heads = keys.per_layer(prefix + "head_count", count)
    kv_heads = keys.per_layer(prefix + "head_count_kv", count, heads)
    # The engine's defaults: the embedding shared out over the heads of the first layer.
    default_length = embedding_length // heads[0]
    if default_length == 0:
        keys.fail(prefix + "head_count", f"is {heads[0]}, more than the embedding length {embedding_length}")
    key_length = keys.number(prefix + "key_length", default_length, least=1)
    value_length = keys.number(prefix + "value_length", default_length, least=1)
    feed_forward = keys.per_layer(f"{architecture}.feed_forward_length", count)
    slides = _sliding(keys, architecture, count)
    sliding_lengths = (
        keys.number(prefix + "key_length_swa", key_length, least=1),
        keys.number(prefix + "value_length_swa", value_length, least=1),
    )
    layers: list[LayerFacts] = []
    for i in range(count):
        k_length, v_length = sliding_lengths if slides[i] else (key_length, value_length)
        weights.check_rows(i, "attn_k", kv_heads[i] * k_length)
        weights.check_rows(i, "attn_v", kv_heads[i] * v_length)
        layers.append(
            LayerFacts(
                kind=LayerKind.SLIDING if slides[i] else LayerKind.FULL,
                head_count=heads[i],
                key_length=k_length,
                k_values=kv_heads[i] * k_length,
                v_values=kv_heads[i] * v_length,
                feed_forward_length=feed_forward[i],
                weight_bytes=weights.layer_bytes[i],
            )
        )
    return tuple(layers)


def _sliding(keys: Keys, architecture: str, count: int) -> tuple[bool, ...]:
    """Which layers slide: by the array in the file, else the period in the file, else the engine's period.

    A period of n leaves every n-th layer dense, and 0 none.
    """
    period = SLIDING_PERIODS.get(architecture)
    if period is None or keys.number(f"{architecture}.attention.sliding_window", 0) == 0:
        return (False,) * count
    pattern = f"{architecture}.attention.sliding_window_pattern"
    if isinstance(keys.value(pattern), int | float | str | None):
        period = keys.number(pattern, period)
        slides = tuple(period == 0 or i % period < period - 1 for i in range(count))
    else:
        flags = keys.array(pattern, count)
        if not all(isinstance(flag, int) and flag in (0, 1) for flag in flags):
            keys.fail(pattern, "is an array of something else than flags")
        slides = tuple(bool(flag) for flag in flags)
    if not any(slides):
        keys.fail(pattern, "leaves no layer with the sliding window; the engine aborts on such a file")
    return slides


def _quantisation(headers: Sequence[GgufHeader], keys: Keys) -> str:
    """Label of ``general.file_type``; where it is missing or unknown, the type that most bytes have."""
    label = gguf_format().file_types.get(keys.number("general.file_type", -1))
    if label is not None:
        return label
    sizes: Counter[str] = Counter()
    for header in headers:
        for tensor in header.tensors:
            sizes[tensor.type_name] += tensor.size_bytes
    return sizes.most_common(1)[0][0]


def _unsupported(header: GgufHeader, architecture: str, what: str) -> LlmError:
    path = printable(header.path)
    known = ", ".join(SUPPORTED_ARCHITECTURES)
    return LlmError(
        ErrorCode.UNSUPPORTED_ARCHITECTURE,
        f"{path} {what}, whose memory cannot be computed yet; known are dense models of {known}.",
        hint="The next release knows more architectures; until then choose a model of one of these.",
        path=path,
        architecture=printable(architecture),
        known=list(SUPPORTED_ARCHITECTURES),
    )
