"""The tensors of all shards of a checkpoint, checked against its metadata and weighed by place."""

from __future__ import annotations

from collections.abc import Sequence
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
_FUSION = "nextn.eh_proj.weight"  # by this tensor the engine knows a block for multi-token prediction


class Tensors:
    """The tensors of all shards.

    Attributes:
        layer_count: all blocks.
        trunk_count: blocks without those for multi-token prediction.
        has_mtp: there are such blocks and they have the tensors that make them one.
    """

    def __init__(
        self, headers: Sequence[GgufHeader], keys: Keys, architecture: str, rule: Architecture
    ) -> None:
        """Sort them. Raises LlmError: BAD_CHECKPOINT naming the key or the tensor."""
        self._path = headers[0].path
        self._embedding_norm_is_final = rule.state is State.SHORT_CONVOLUTION
        self.layer_count = keys.number(f"{architecture}.block_count", least=1, most=MAX_LAYERS)
        mtp_key = f"{architecture}.nextn_predict_layers"
        mtp_count = keys.number(mtp_key, 0, most=self.layer_count - 1)
        if mtp_count and rule.mtp is Mtp.NONE:
            keys.fail(mtp_key, f"is {mtp_count}; the engine knows no such blocks of {architecture}")
        self.trunk_count = self.layer_count - mtp_count
        self.has_mtp = False
        self._blocks: list[dict[str, TensorInfo]] = [{} for _ in range(self.layer_count)]
        self._outside: dict[str, TensorInfo] = {}
        # CUDA pads rows of a quantised type, so values and bytes of its blocks are needed.
        self._types = {
            kind.name: (kind.block_values, kind.block_bytes) for kind in gguf_format().tensor_types.values()
        }
        for header in headers:
            for tensor in header.tensors:
                self._add(tensor, mtp_key)
        needed = self.trunk_count if rule.mtp is Mtp.OPTIONAL else self.layer_count
        for index, block in enumerate(self._blocks[:needed]):
            if not block:
                raise self.bad(f"block {index} of {self.layer_count} has no tensors")
        self._required("token_embd.weight")
        if mtp_count:
            self.has_mtp = _FUSION in self._blocks[self.trunk_count]
            if rule.mtp is Mtp.LOADED and not self.has_mtp:
                raise self.bad(f"{mtp_key} is {mtp_count}, yet blk.{self.trunk_count}.{_FUSION} is missing")

    def bad(self, reason: str) -> LlmError:
        """BAD_CHECKPOINT for the whole checkpoint."""
        path = printable(self._path)
        return LlmError(
            ErrorCode.BAD_CHECKPOINT,
            f"{path} is not a usable model file: {reason}.",
            hint="Fetch another conversion of the model.",
            path=path,
        )

    def shape(self, block: int, name: str) -> tuple[int, ...] | None:
        """Shape of a tensor of a block, its rows' length first; None where it is missing."""
        tensor = self._blocks[block].get(name)
        return None if tensor is None else tensor.shape

    def check_rows(self, block: int, name: str, rows: int) -> None:
        """A projection on its own must have the rows that the metadata promise."""
        tensor = self._blocks[block].get(f"{name}.weight")
        if tensor is not None and tensor.shape[1:] != (rows,):
            raise self.bad(
                f"{tensor.name} has the shape {list(tensor.shape)}, its metadata promise {rows} rows"
            )

    def vocabulary_size(self, embedding_length: int) -> int:
        """Rows of the token embedding."""
        shape = self._required("token_embd.weight").shape
        if len(shape) < 2 or shape[0] != embedding_length:
            raise self.bad(
                f"token_embd.weight has the shape {list(shape)} for embeddings of {embedding_length}"
            )
        return shape[1]

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
        return TableWeights(**places)

    def _weigh(self, tensor: TensorInfo) -> WeightBytes:
        return weigh(tensor, self._types.get(tensor.type_name))

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
