"""Bytes of tensors by the place the engine gives them: tables, blocks, output; and within a block by use."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType

from lllm3090d.checkpoints.header import TensorInfo

# Buffers begin each tensor at a multiple of these bytes. Vulkan's is a property of the device (16 on NVIDIA).
HOST_ALIGNMENT_BYTES = 32
CUDA_ALIGNMENT_BYTES = 128
VULKAN_ALIGNMENT_BYTES = 16
CUDA_ROW_VALUES = 512  # CUDA lengthens the last row of a quantised tensor to a multiple of this

_BLOCK = re.compile(r"blk\.(\d{1,9})\.(.+)", re.ASCII)
# The same names that --cpu-moe and --n-cpu-moe move.
_EXPERTS = re.compile(r"ffn_(up|down|gate|gate_up)_(ch|)exps")
_RECURRENT = ("ssm_", "shortconv.", "time_mix_", "channel_mix_")
_ROPE_TABLES = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
# Tables that are only looked up: the engine keeps them in host memory.
_TABLES = ("position_embd.weight", "token_types.weight")
# Stored without a block number, yet tensors of the first block.
_OF_THE_FIRST_BLOCK = ("per_layer_model_proj.weight", "per_layer_proj_norm.weight")
_EMBEDDING_NORM = ("token_embd_norm.weight", "token_embd_norm.bias")


class Memory(enum.StrEnum):
    """Kinds of buffers, which differ in how they round tensors up."""

    HOST = "host"
    CUDA = "cuda"
    VULKAN = "vulkan"


_ALIGNMENT_BYTES: Mapping[Memory, int] = MappingProxyType(
    {
        Memory.HOST: HOST_ALIGNMENT_BYTES,
        Memory.CUDA: CUDA_ALIGNMENT_BYTES,
        Memory.VULKAN: VULKAN_ALIGNMENT_BYTES,
    }
)


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """The same tensors measured four ways; bytes.

    Attributes:
        stored: as in the file.
        host, cuda, vulkan: what they take in such a buffer, alignment and row padding included.
        largest: the largest of the tensors, stored.
    """

    stored: int = 0
    host: int = 0
    cuda: int = 0
    vulkan: int = 0
    largest: int = 0

    def __add__(self, other: WeightBytes) -> WeightBytes:
        return WeightBytes(
            self.stored + other.stored,
            self.host + other.host,
            self.cuda + other.cuda,
            self.vulkan + other.vulkan,
            max(self.largest, other.largest),
        )

    def in_memory(self, memory: Memory) -> int:
        """Bytes in a buffer of this kind."""
        return {Memory.HOST: self.host, Memory.CUDA: self.cuda, Memory.VULKAN: self.vulkan}[memory]


NOTHING = WeightBytes()


def total(parts: Iterable[WeightBytes]) -> WeightBytes:
    """Sum of the parts."""
    return sum(parts, NOTHING)


def aligned(size_bytes: int, memory: Memory) -> int:
    """Bytes a tensor takes in such a buffer, without row padding."""
    alignment = _ALIGNMENT_BYTES[memory]
    return -(-size_bytes // alignment) * alignment


def row_padding_bytes(row_values: int, block_values: int, block_bytes: int) -> int:
    """What CUDA adds to a quantised tensor whose rows have so many values; once per tensor."""
    missing = -row_values % CUDA_ROW_VALUES
    return missing // block_values * block_bytes if block_values > 1 else 0


def weigh(tensor: TensorInfo, block: tuple[int, int] | None) -> WeightBytes:
    """Measure one tensor; ``block`` are values and bytes of a block of its type, None where unknown."""
    size = tensor.size_bytes
    padding = row_padding_bytes(tensor.shape[0], *block) if block and tensor.shape else 0
    return WeightBytes(
        stored=size,
        host=aligned(size, Memory.HOST),
        cuda=aligned(size + padding, Memory.CUDA),
        vulkan=aligned(size, Memory.VULKAN),
        largest=size,
    )


@dataclass(frozen=True, slots=True)
class BlockWeights:
    """The tensors of one block.

    Attributes:
        attention: projections and biases of attention.
        feed_forward: of the dense feed-forward network, shared experts and router included.
        experts: what ``--n-cpu-moe`` moves.
        recurrent: of the state-space, linear-attention or convolution part.
        other: norms, scales, per-layer embedding projections, what fuses an MTP block with the trunk.
    """

    attention: WeightBytes = NOTHING
    feed_forward: WeightBytes = NOTHING
    experts: WeightBytes = NOTHING
    recurrent: WeightBytes = NOTHING
    other: WeightBytes = NOTHING

    @property
    def without_experts(self) -> WeightBytes:
        """Everything that stays with the layer when its experts are moved."""
        return self.attention + self.feed_forward + self.recurrent + self.other

    @property
    def all(self) -> WeightBytes:
        """All tensors of the block."""
        return self.without_experts + self.experts


NO_WEIGHTS = BlockWeights()


@dataclass(frozen=True, slots=True)
class TableWeights:
    """The tensors outside the blocks.

    Attributes:
        token_embedding: ``token_embd.weight``, always in host memory.
        per_layer_embeddings: ``per_layer_token_embd.weight``, always in host memory.
        input: other tables that are only looked up, in host memory.
        output: ``output.weight``; nothing where it is tied to the token embedding or absent.
        output_other: what goes with the output: its norm, the AltUp projections.
        rope: RoPE factors, one copy wherever a block is.
    """

    token_embedding: WeightBytes = NOTHING
    per_layer_embeddings: WeightBytes = NOTHING
    input: WeightBytes = NOTHING
    output: WeightBytes = NOTHING
    output_other: WeightBytes = NOTHING
    rope: WeightBytes = NOTHING

    @property
    def all(self) -> WeightBytes:
        """All of them, each once."""
        return total(getattr(self, field.name) for field in fields(self))


def block_of(name: str, *, embedding_norm_is_final: bool = False) -> tuple[int, str] | None:
    """Number of the block a tensor belongs to, and its name there; None outside the blocks.

    Args:
        name: in the file.
        embedding_norm_is_final: ``token_embd_norm`` is the norm before the output, as with lfm2; elsewhere it
            comes before the first block.
    """
    match = _BLOCK.match(name)
    if match is not None:
        return int(match[1]), match[2]
    first = name in _OF_THE_FIRST_BLOCK or (name in _EMBEDDING_NORM and not embedding_norm_is_final)
    return (0, name) if first else None


def place_in_block(name: str, recurrent: bool) -> str:
    """Field of :class:`BlockWeights` for a tensor's name in its block.

    Args:
        name: without ``blk.N.``.
        recurrent: the block keeps a state and no attention cache, so its attention tensors feed the state.
    """
    if _EXPERTS.match(name):
        return "experts"
    if name.startswith(_RECURRENT):
        return "recurrent"
    if "norm" in name:
        return "other"
    if name.startswith("attn_"):
        return "recurrent" if recurrent else "attention"
    if name.startswith(("ffn_", "exp_probs")):
        return "feed_forward"
    return "other"


def place_outside(name: str) -> str:
    """Field of :class:`TableWeights` for a tensor outside the blocks."""
    places: Mapping[str, str] = {
        "token_embd.weight": "token_embedding",
        "per_layer_token_embd.weight": "per_layer_embeddings",
        "output.weight": "output",
        **dict.fromkeys(_ROPE_TABLES, "rope"),
        **dict.fromkeys(_TABLES, "input"),
    }
    return places.get(name, "output_other")
