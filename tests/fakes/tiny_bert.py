"""A BERT of a few thousand weights that a real engine loads: for vectors, or with a classifier that scores."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

WIDTH, HEADS, FEED_FORWARD, BLOCKS, CONTEXT = 64, 2, 128, 2, 128
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
# The engine marks the beginning of a word, where the original marks what goes on.
WORDS = (*SPECIAL, *("\u2581" + letter for letter in LETTERS), *LETTERS, ".", "\u2581.")


def write_tiny_bert(path: Path, *, scores: bool) -> Path:
    """Write it with weights from a seed.

    Args:
        path: of the file.
        scores: with a classifier and pooling for it (a reranker).
    """
    random = np.random.default_rng(7)
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_name("tiny bert")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_block_count(BLOCKS)
    writer.add_head_count(HEADS)
    writer.add_layer_norm_eps(1e-12)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.RANK if scores else gguf.PoolingType.MEAN)
    writer.add_file_type(0)
    writer.add_tokenizer_model("bert")
    writer.add_token_list(list(WORDS))
    writer.add_token_types([3 if word in SPECIAL else 1 for word in WORDS])
    writer.add_token_type_count(2)
    for name, word in (("padding", "[PAD]"), ("unknown", "[UNK]"), ("cls", "[CLS]"), ("seperator", "[SEP]")):
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", WORDS.index(word))
    writer.add_bos_token_id(WORDS.index("[CLS]"))
    writer.add_eos_token_id(WORDS.index("[SEP]"))

    def add(name: str, *shape: int) -> None:
        writer.add_tensor(name, random.normal(0, 0.3, shape).astype(np.float32))

    add("token_embd.weight", len(WORDS), WIDTH)
    add("token_types.weight", 2, WIDTH)
    add("position_embd.weight", CONTEXT, WIDTH)
    for part in ("weight", "bias"):
        add(f"token_embd_norm.{part}", WIDTH)
    for block in range(BLOCKS):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"blk.{block}.{name}.weight", WIDTH, WIDTH)
            add(f"blk.{block}.{name}.bias", WIDTH)
        add(f"blk.{block}.ffn_up.weight", FEED_FORWARD, WIDTH)
        add(f"blk.{block}.ffn_up.bias", FEED_FORWARD)
        add(f"blk.{block}.ffn_down.weight", WIDTH, FEED_FORWARD)
        add(f"blk.{block}.ffn_down.bias", WIDTH)
        for name in ("attn_output_norm", "layer_output_norm"):
            for part in ("weight", "bias"):
                add(f"blk.{block}.{name}.{part}", WIDTH)
    if scores:
        add("cls.weight", WIDTH, WIDTH)
        add("cls.bias", WIDTH)
        add("cls.output.weight", 1, WIDTH)
        add("cls.output.bias", 1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
