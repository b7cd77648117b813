"""The tensors of all shards of a checkpoint, checked against its metadata and weighed by place."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from lllm3090d.checkpoints.architectures import Architecture, Mtp, State
from lllm3090d.checkpoints.cursor import printable
from lllm3090d.checkpoints.gguf_format import gguf_format
from lllm3090d.checkpoints.header import GgufHeader, TensorInfo
from lllm3090d.checkpoints.metadata import Keys
from lllm3090d.checkpoints.weights import (
    BlockWeights,
    TableWeights,
    WeightBytes,
    block_of,
    place_in_block,
    place_outside,
    weigh,
)
from lllm3090d.errors import ErrorCode, LlmError

MAX_LAYERS = 512  # LLAMA_MAX_LAYERS of the engine
_EMBEDDING, _OUTPUT = "token_embd.weight", "output.weight"
_FUSION = "nextn.eh_proj.weight"  # by this tensor the engine knows a block for multi-token prediction


def trimmed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Without the ones at its end, which mean nothing."""
    while shape and shape[-1] == 1:
        shape = shape[:-1]
    return shape


class Tensors:
    """The tensors of all shards.

    Attributes:
        layer_count: all blocks.
        trunk_count: blocks without those for multi-token prediction.
        has_mtp: there are such blocks and they have the tensors that make them one.
    """

    def __init__(
        self,
        headers: Sequence[GgufHeader],
        keys: Keys,
        architecture: str,
        rule: Architecture,
        *,
        is_drafter: bool = False,
    ) -> None:
        """Sort them. Raises LlmError: BAD_CHECKPOINT naming the key or the tensor.

        A drafter may lack the trunk and the token embedding, which its model has.
        """
        self._path = headers[0].path
        self._embedding_norm_is_final = rule.state is State.SHORT_CONVOLUTION
        self._count_key = f"{architecture}.block_count"
        self.layer_count = keys.number(self._count_key, least=1, most=MAX_LAYERS)
        mtp_key = f"{architecture}.nextn_predict_layers"
        mtp_count = keys.number(mtp_key, 0, most=self.layer_count - 1)
        self.trunk_count = self.layer_count - mtp_count
        self.has_mtp = False
        self._blocks: list[dict[str, TensorInfo]] = [{} for _ in range(self.layer_count)]
        self._outside: dict[str, TensorInfo] = {}
        self._weighed: dict[tuple[int, tuple[int, ...], str], WeightBytes] = {}
        # CUDA pads rows of a quantised type, so values and bytes of its blocks are needed.
        self._types = {
            kind.name: (kind.block_values, kind.block_bytes) for kind in gguf_format().tensor_types.values()
        }
        for header in headers:
            for tensor in header.tensors:
                self._add(tensor, mtp_key)
        if rule.mtp is Mtp.NONE and any(self._blocks[self.trunk_count :]):
            keys.fail(mtp_key, f"is {mtp_count}; the engine knows no such blocks of {architecture}")
        may_lack_them = rule.mtp in (Mtp.OPTIONAL, Mtp.NONE)
        needed = self.trunk_count if may_lack_them else self.layer_count
        first = self.trunk_count if is_drafter and mtp_count else 0
        for index, block in enumerate(self._blocks[first:needed], first):
            if not block:
                raise self.bad(
                    f"block {index} of {self.layer_count} has no tensors; {self.layer_count} blocks are promised",
                    self._count_key,
                )
        self._embedding_name = _EMBEDDING
        if rule.output_is_embedding and _EMBEDDING not in self._outside:
            self._embedding_name = _OUTPUT
        if not is_drafter:
            self._required(self._embedding_name)
        if mtp_count:
            self.has_mtp = _FUSION in self._blocks[self.trunk_count]
            # Where the first may lack it and does, none of them is looked at.
            for index in range(self.trunk_count, self.layer_count):
                if (self.has_mtp or not may_lack_them) and _FUSION not in self._blocks[index]:
                    raise self.bad(f"{mtp_key} is {mtp_count}, yet blk.{index}.{_FUSION} is missing")

    def bad(self, reason: str, key: str | None = None) -> LlmError:
        """BAD_CHECKPOINT for the whole checkpoint; ``key`` is the metadata key that the tensors contradict."""
        path = printable(self._path)
        promised = "" if key is None else f" by the metadata key {printable(key)}"
        return LlmError(
            ErrorCode.BAD_CHECKPOINT,
            f"{path} is not a usable model file: {reason}{promised}.",
            hint="Fetch another conversion of the model.",
            path=path,
            **({} if key is None else {"key": printable(key)}),
        )

    def shape(self, block: int, name: str) -> tuple[int, ...] | None:
        """Shape of a tensor of a block, its rows' length first; None where it is missing."""
        tensor = self._blocks[block].get(name)
        return None if tensor is None else tensor.shape

    def outside_shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of a tensor outside the blocks; None where it is missing."""
        tensor = self._outside.get(name)
        return None if tensor is None else tensor.shape

    @property
    def outside_names(self) -> Collection[str]:
        """Names of the tensors outside the blocks."""
        return self._outside.keys()

    def block(self, index: int) -> Mapping[str, TensorInfo]:
        """All tensors of a block by their names in it."""
        return self._blocks[index]

    def check_table(self, name: str, shape: tuple[int, ...], *, required: bool = False) -> None:
        """A tensor outside the blocks must have this shape where it is there."""
        tensor = self._required(name) if required else self._outside.get(name)
        if tensor is not None and trimmed(tensor.shape) != trimmed(shape):
            raise self.bad(f"{name} has the shape {list(tensor.shape)}, its metadata promise {list(shape)}")

    def check_rows(self, block: int, name: str, rows: int, key: str) -> None:
        """A projection on its own must have the rows that the metadata promise, by ``key`` among them."""
        tensor = self._blocks[block].get(f"{name}.weight")
        if tensor is not None and trimmed(tensor.shape)[1:] != trimmed((0, rows))[1:]:
            raise self.bad(
                f"{tensor.name} has the shape {list(tensor.shape)}, its metadata promise {rows} rows",
                key,
            )

    def vocabulary_size(self, embedding_length: int) -> int:
        """Rows of the token embedding."""
        tensor = self._required(self._embedding_name)
        shape = trimmed(tensor.shape)
        if len(shape) > 2 or not shape or shape[0] != embedding_length:
            raise self.bad(
                f"{tensor.name} has the shape {list(tensor.shape)} for embeddings of {embedding_length}"
            )
        return shape[1] if len(shape) > 1 else 1

    def block_weights(self, block: int, *, recurrent: bool) -> BlockWeights:
        """Bytes of a block by use; see :func:`place_in_block` for ``recurrent``."""
        places: dict[str, Any] = {}
        for name, tensor in self._blocks[block].items():
            place = place_in_block(name, recurrent)
            places[place] = places.get(place, WeightBytes()) + self._weigh(tensor)
        return BlockWeights(**places)

    def table_weights(self) -> TableWeights:
        """Bytes of everything outside the blocks."""
        places: dict[str, Any] = {}
        for name, tensor in self._outside.items():
            place = place_outside(name)
            places[place] = places.get(place, WeightBytes()) + self._weigh(tensor)
        if self._embedding_name == _OUTPUT:  # the engine allocates it a second time, and where the output is
            places["output"] += self._weigh(self._outside[_OUTPUT])
        return TableWeights(**places)

    def _weigh(self, tensor: TensorInfo) -> WeightBytes:
        """Most tensors weigh as much as those of the other blocks."""
        kind = (tensor.size_bytes, tensor.shape[:1], tensor.type_name)
        known = self._weighed.get(kind)
        if known is None:
            known = self._weighed[kind] = weigh(tensor, self._types.get(tensor.type_name))
        return known

    def _required(self, name: str) -> TensorInfo:
        if name not in self._outside:
            raise self.bad(f"the tensor {name} is missing")
        return self._outside[name]

    def _add(self, tensor: TensorInfo, mtp_key: str) -> None:
        place = block_of(tensor.name, embedding_norm_is_final=self._embedding_norm_is_final)
        name = tensor.name if place is None else place[1]
        if place is not None and place[0] >= self.layer_count:
            raise self.bad(
                f"the tensor {printable(tensor.name)} lies beyond the block_count of {self.layer_count}"
                " that is given",
                self._count_key,
            )
        found = self._outside if place is None else self._blocks[place[0]]
        if name in found:
            raise self.bad(f"the tensor {printable(tensor.name)} occurs in two of its files")
        found[name] = tensor
        if place is not None and name.startswith("nextn.") and place[0] < self.trunk_count:
            raise self.bad(
                f"the tensor {printable(tensor.name)} predicts a further token,"
                f" yet {mtp_key} leaves block {place[0]} in the trunk"
            )
