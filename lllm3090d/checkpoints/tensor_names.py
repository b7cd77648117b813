"""Names of the tensors that the engine loads, by architecture: which it demands, and which it knows at all.

A file with a tensor that the engine does not ask for is refused by it as well as one that lacks a tensor. The table in
``engine_tensors.json`` was read from the declarations in the source of llama.cpp b11434. A tensor is listed as demanded
only under conditions that are decided by the metadata; where the engine decides otherwise, nothing is demanded.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from types import MappingProxyType
from typing import Any

from lllm3090d.checkpoints.contents import Tensors, trimmed
from lllm3090d.checkpoints.cursor import printable
from lllm3090d.checkpoints.tensor_infos import TensorInfo

# Quantisations with scales outside their blocks have one or two more for a matrix, of any architecture.
_SCALES = (".scale", ".input_scale")
_JOIN = "+"
OR = "/"  # between names of which one is enough


@dataclass(frozen=True, slots=True)
class TensorNames:
    """The tensors of one architecture.

    Attributes:
        outside: demanded outside the blocks.
        blocks: demanded in blocks of the trunk, by the conditions that must hold, such as ``behind``: see
            :meth:`demanded`.
        mtp: demanded in blocks for multi-token prediction.
        embedding: those that have one value for each of the embedding.
        key_length: those that have one for each of a key head.
        known: all that the engine may ask for; None where that is not known.
        mtp_alone: a file may have nothing but blocks for multi-token prediction.
    """

    outside: frozenset[str]
    blocks: Mapping[frozenset[str], frozenset[str]]
    mtp: frozenset[str]
    embedding: frozenset[str]
    key_length: frozenset[str]
    known: frozenset[str] | None
    mtp_alone: bool

    @property
    def tells_leading(self) -> bool:
        """What is demanded depends on ``leading_dense_block_count``."""
        return any("leading" in when or "behind" in when for when in self.blocks)

    def demanded(self, conditions: frozenset[str]) -> frozenset[str]:
        """In a block of the trunk for which exactly these conditions hold; alternatives joined by ``OR``."""
        return frozenset[str]().union(*(names for when, names in self.blocks.items() if when <= conditions))

    def knows(self, name: str) -> bool:
        """Whether the engine may ask for a tensor of this name, without the number of the block."""
        if self.known is None or name in self.known:
            return True
        return any(
            name.endswith(scale) and f"{name.removesuffix(scale)}.weight" in self.known for scale in _SCALES
        )


def tensor_names(architecture: str) -> TensorNames | None:
    """The tensors of an architecture; None where nothing is known of it."""
    return _all().get(architecture)


def check_block(
    names: TensorNames,
    tensors: Tensors,
    index: int,
    found: Mapping[str, TensorInfo],
    *,
    demanded: frozenset[str],
    lengths: Iterable[tuple[frozenset[str], int]],
) -> None:
    """Refuse a block with a tensor that is not known or has another length, or without one that is demanded.

    Args:
        names: of the architecture.
        tensors: of all shards.
        index: of the block.
        found: its tensors by their names in it.
        demanded: names, of alternatives joined by ``OR`` one.
        lengths: names, and how long tensors of these names are.

    Raises:
        LlmError: BAD_CHECKPOINT naming the tensor.
    """
    for name, tensor in found.items():
        if not names.knows(name):
            raise tensors.bad(
                f"llama.cpp b11434 knows no tensor {printable(tensor.name)} in this architecture"
            )
        for of_that_length, length in lengths:
            if name in of_that_length and trimmed(tensor.shape) != trimmed((length,)):
                raise tensors.bad(
                    f"{tensor.name} has the shape {list(tensor.shape)}, its metadata promise {[length]}"
                )
    for name in sorted(demanded.difference(found)):
        if not any(either in found for either in name.split(OR)):
            raise tensors.bad(f"blk.{index}.{name.split(OR)[0]} is missing")


def check_outside(names: TensorNames, tensors: Tensors, embedding: int) -> None:
    """The same for the tensors outside the blocks; raises as :func:`check_block`."""
    for name in tensors.outside_names:
        if not names.knows(name):
            raise tensors.bad(f"llama.cpp b11434 knows no tensor {printable(name)} in this architecture")
        if name in names.embedding:
            tensors.check_table(name, (embedding,))
    # Some of them count as tensors of the first block.
    missing = names.outside.difference(tensors.outside_names, tensors.block(0))
    if missing:
        raise tensors.bad(f"the tensor {min(missing)} is missing")


@functools.cache
def _all() -> Mapping[str, TensorNames]:
    text = resources.files("lllm3090d.checkpoints").joinpath("engine_tensors.json").read_text("utf-8")
    found: dict[str, TensorNames] = {}
    for row in json.loads(text)["rules"]:
        found |= dict.fromkeys(row["architectures"], _names(row))
    return MappingProxyType(found)


def _names(row: Mapping[str, Any]) -> TensorNames:
    outside, mtp, embedding, key_length, optional = (
        frozenset(row[name].split()) for name in ("outside", "mtp", "embedding", "key_length", "optional")
    )
    blocks = {
        frozenset(when.split(_JOIN) if when else ()): frozenset(names.split())
        for when, names in row["blocks"].items()
    }
    either = frozenset(name for names in blocks.values() for each in names for name in each.split(OR))
    known = frozenset[str]().union(outside, mtp, optional, either)
    return TensorNames(
        outside=outside,
        blocks=MappingProxyType(blocks),
        mtp=mtp,
        embedding=embedding,
        key_length=key_length,
        known=known if row["complete"] else None,
        mtp_alone=row["mtp_alone"],
    )
