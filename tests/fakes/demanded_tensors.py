"""What a small model of any architecture needs beside the tensors of a llama, for tests of other matters."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from lllm3090d.checkpoints.tensor_names import OR, TensorNames, tensor_names
from tests.fakes.gguf_files import Tensor

_BLOCK = re.compile(r"blk\.(\d+)\.")


def fitted(
    metadata: Mapping[str, Any], tensors: Sequence[Tensor], *, states: Collection[int] = ()
) -> list[Tensor]:
    """The tensors without those that the engine does not know, and with those that it demands.

    Norms have the lengths of the metadata; of what nothing compares, any.

    Args:
        metadata: with ``general.architecture``.
        tensors: to begin with.
        states: blocks that keep a state instead of attention.
    """
    architecture = metadata["general.architecture"]
    names = tensor_names(architecture)
    assert names is not None
    found = {t.name: t for t in tensors if names.knows(_BLOCK.sub("", t.name))}
    key = {name.removeprefix(f"{architecture}."): value for name, value in metadata.items()}
    for name in names.outside:
        found.setdefault(name, Tensor(name, _shape(name, names, key)))
    trunk = key["block_count"] - key.get("nextn_predict_layers", 0)
    for block in range(key["block_count"]):
        leading = block < key.get("leading_dense_block_count", 0)
        conditions = {
            "leading" if leading else "behind",
            "experts" if key.get("expert_count") else "no experts",
            "state" if block in states else "no state",
            "no attends" if block in states else "attends",
            "shared" if key.get("expert_shared_feed_forward_length") else "no shared",
            "shared count" if key.get("expert_shared_count") else "no shared count",
        }
        needed = names.demanded(frozenset(conditions)) if block < trunk else names.mtp
        for name in needed:
            if not any(f"blk.{block}.{either}" in found for either in name.split(OR)):
                full = f"blk.{block}.{name.split(OR)[0]}"
                found[full] = Tensor(full, _shape(name.split(OR)[0], names, key))
    return list(found.values())


def _shape(name: str, names: TensorNames, key: Mapping[str, Any]) -> tuple[int, ...]:
    width, heads = key["embedding_length"], key["attention.head_count"]
    head = key.get("attention.key_length", width // heads)
    if name in names.embedding:
        return (width,)
    if name in names.key_length:
        return (head,)
    expert, count = key.get("expert_feed_forward_length", 0), key.get("expert_count", 0)
    shapes: dict[str, tuple[int, ...]] = {
        "output": (width, key.get("vocab_size", 64)),
        "attn_qkv": (width, (heads + 2 * key.get("attention.head_count_kv", heads)) * head)
        if isinstance(heads, int) and isinstance(key.get("attention.head_count_kv", heads), int)
        else (width,),
        "ssm_norm": (key.get("kda.head_dim", 32),),
        "ffn_gate_inp": (width, count),
        "ffn_up_exps": (width, expert, count),
        "ffn_gate_exps": (width, expert, count),
        "ffn_down_exps": (expert, width, count),
    }
    return shapes.get(name.removesuffix(".weight"), (32,))
