"""Checkpoints of real dimensions for many architectures, as sparse files of a few kilobytes.

A :class:`ModelSpec` is what a converter would know: metadata without the architecture's prefix, the vocabulary,
the quantisation. From it follow the tensors that the engine insists on. The dimensions of some forty published
models are in ``tests/data/model_dimensions.json``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tests.fakes.gguf_files import TENSOR_TYPES, Tensor, write_gguf

DIMENSIONS = Path(__file__).parents[1] / "data" / "model_dimensions.json"
GEMMA3N_ALTUP, GEMMA3N_LAUREL, GEMMA3N_EACH = 4, 64, 256

# Kind of tensor -> type; "few/more" gives some layers the larger one, as llama-quantize does.
QUANTISATIONS: Mapping[str, Mapping[str, str]] = {
    "Q4_K_M": {
        "": "Q4_K", "output": "Q6_K", "tied": "Q6_K", "attn_v": "Q4_K/Q6_K", "ffn_down": "Q4_K/Q6_K",
        "ffn_down_exps": "Q4_K/Q6_K", "attn_qkv": "Q5_K",
    },
    "Q4_K_S": {"": "Q4_K", "output": "Q6_K", "tied": "Q6_K"},
    "IQ4_XS": {"": "IQ4_XS", "output": "Q6_K", "tied": "Q6_K", "attn_v": "Q5_K"},
    "Q4_1": {"": "Q4_1", "output": "Q6_K", "tied": "Q8_0"},
    "Q8_0": {"": "Q8_0"},
    "F16": {"": "F16"},
    "MXFP4": {"": "Q8_0", "ffn_gate_exps": "MXFP4", "ffn_up_exps": "MXFP4", "ffn_down_exps": "MXFP4"},
}  # fmt: skip
# Where a row is no whole number of blocks.
_SMALLER_BLOCKS = {"IQ4_XS": "IQ4_NL", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}


@dataclass(frozen=True)
class ModelSpec:
    """A model to write.

    Attributes:
        name: its title.
        architecture: as in the file.
        vocabulary: tokens.
        keys: metadata without prefix.
        quantisation: key of :data:`QUANTISATIONS`.
        tied: there is no output matrix.
        options: of the recipe of the architecture.
    """

    name: str
    architecture: str
    vocabulary: int
    keys: Mapping[str, Any]
    quantisation: str = "Q4_K_M"
    tied: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


@cache
def published() -> Mapping[str, ModelSpec]:
    """Models with the dimensions of published ones, by name."""
    rows = json.loads(DIMENSIONS.read_text(encoding="utf-8"))["models"]
    return {name: ModelSpec(name, **row) for name, row in rows.items()}


def write(path: Path, spec: ModelSpec) -> Path:
    """Write a model; the tokenizer is ``none``, for which the engine invents a vocabulary."""
    prefix = spec.architecture
    metadata: dict[str, Any] = {
        "general.architecture": prefix,
        "general.name": spec.name,
        **{f"{prefix}.{key}": value for key, value in spec.keys.items()},
        f"{prefix}.vocab_size": spec.vocabulary,
        "tokenizer.ggml.model": "none",
    }
    if prefix in ("bert", "nomic-bert"):
        metadata["tokenizer.ggml.token_type_count"] = 2
    return write_gguf(path, metadata, tensors_of(spec))


def tensors_of(spec: ModelSpec) -> list[Tensor]:
    """All tensors of a model, quantised."""
    sheet = Sheet(spec)
    RECIPES[spec.architecture](sheet)
    return [Tensor(name, shape, _type(spec, sheet, name, shape)) for name, shape in sheet.shapes.items()]


def _type(spec: ModelSpec, sheet: Sheet, name: str, shape: tuple[int, ...]) -> str:
    if name in sheet.plain:
        return "F32"
    types = QUANTISATIONS[spec.quantisation]
    match = re.match(r"blk\.(\d+)\.", name)
    kind = name.removeprefix(match[0] if match else "").removesuffix(".weight")
    choice = types.get("tied" if spec.tied and kind == "token_embd" else kind, types[""])
    if "/" in choice:
        block, eighth = int(match[1]) if match else 0, sheet.trunk // 8
        generous = not eighth <= block < 7 * sheet.trunk // 8 or (block - eighth) % 3 == 2
        choice = choice.split("/")[generous]
    while shape[0] % TENSOR_TYPES[choice][1]:
        choice = _SMALLER_BLOCKS.get(choice, "F16")
    return choice


class Sheet:
    """The tensors of one model while its recipe adds them."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.keys = spec.keys
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.plain: set[str] = set()  # kept in F32
        self.width: int = spec.keys["embedding_length"]
        self.blocks: int = spec.keys["block_count"]
        self.trunk: int = self.blocks - spec.keys.get("nextn_predict_layers", 0)

    def key(self, name: str, block: int = 0, default: Any = 0) -> Any:
        """A metadata value, that of one block where it is an array."""
        value = self.keys.get(name, default)
        return value[block] if isinstance(value, list) else value

    def matrices(self, block: int | None, **shapes: tuple[int, ...]) -> None:
        """Quantised weights; ``__`` in a name stands for a dot."""
        for name, shape in shapes.items():
            self._add(block, f"{name.replace('__', '.')}.weight", shape)

    def vectors(self, block: int | None, **shapes: int | tuple[int, ...]) -> None:
        """Weights that stay F32."""
        for name, shape in shapes.items():
            self.vector(block, f"{name.replace('__', '.')}.weight", shape)

    def vector(self, block: int | None, name: str, shape: int | tuple[int, ...]) -> None:
        """An F32 tensor by its full name."""
        self.plain.add(self._add(block, name, (shape,) if isinstance(shape, int) else shape))

    def _add(self, block: int | None, name: str, shape: tuple[int, ...]) -> str:
        full = name if block is None else f"blk.{block}.{name}"
        assert full not in self.shapes and min(shape) > 0, f"{full} {shape}"
        self.shapes[full] = shape
        return full

    def heads(self, block: int, *, slides: bool = False) -> tuple[int, int, int]:
        """Values of all query heads, of all K heads and of all V heads."""
        heads = self.key("attention.head_count", block)
        kv_heads = self.key("attention.head_count_kv", block, heads)
        lengths = []
        for side in ("key", "value"):
            default = self.keys.get(f"attention.{side}_length") or self.width // heads
            swa = self.keys.get(f"attention.{side}_length_swa", default)
            lengths.append(swa if slides else default)
        return heads * lengths[0], kv_heads * lengths[0], kv_heads * lengths[1]

    def tables(self, norm: str = "output_norm") -> None:
        """Embedding, final norm, output."""
        self.matrices(None, token_embd=(self.width, self.spec.vocabulary))
        self.vectors(None, **{norm: self.width})
        if not self.spec.tied:
            self.matrices(None, output=(self.width, self.spec.vocabulary))

    def norms(self, block: int, *names: str) -> None:
        """Norms as wide as the embedding."""
        self.vectors(block, **dict.fromkeys(names, self.width))

    def attention(
        self, block: int, *, biases: str = "", qk_norm: bool = False, queries: int = 0, slides: bool = False
    ) -> None:
        """Four projections; ``biases`` for some of q, k, v and o; ``queries`` where more come out."""
        q, k, v = self.heads(block, slides=slides)
        self.matrices(
            block,
            attn_q=(self.width, queries or q),
            attn_k=(self.width, k),
            attn_v=(self.width, v),
            attn_output=(q, self.width),
        )
        rows = {"q": ("attn_q", q), "k": ("attn_k", k), "v": ("attn_v", v), "o": ("attn_output", self.width)}
        for letter in biases:
            name, length = rows[letter]
            self.vector(block, f"{name}.bias", length)
        if qk_norm:
            length = q // self.key("attention.head_count", block)
            self.vectors(block, attn_q_norm=length, attn_k_norm=length)

    def dense(self, block: int, length: int, *, gate: bool = True) -> None:
        """A feed-forward network."""
        if gate:
            self.matrices(block, ffn_gate=(self.width, length))
        self.matrices(block, ffn_up=(self.width, length), ffn_down=(length, self.width))

    def experts(
        self, block: int, length: int, *, gate: bool = True, shared: int = 0, router: str = ""
    ) -> None:
        """Experts, a shared one, and the router; ``router`` is "bias" for one that corrects loads."""
        count = self.keys["expert_count"]
        self.vectors(block, ffn_gate_inp=(self.width, count))
        if gate:
            self.matrices(block, ffn_gate_exps=(self.width, length, count))
        self.matrices(
            block, ffn_up_exps=(self.width, length, count), ffn_down_exps=(length, self.width, count)
        )
        if router == "bias":
            self.vector(block, "exp_probs_b.bias", count)
        if shared:
            if gate:
                self.matrices(block, ffn_gate_shexp=(self.width, shared))
            self.matrices(block, ffn_up_shexp=(self.width, shared), ffn_down_shexp=(shared, self.width))

    def mamba(self, block: int, *, extra_norms: bool = False) -> None:
        """Mamba-1, or Mamba-2 where there are groups."""
        inner, state, rank = (
            self.keys[f"ssm.{name}"] for name in ("inner_size", "state_size", "time_step_rank")
        )
        groups, kernel = self.keys.get("ssm.group_count"), self.keys["ssm.conv_kernel"]
        if groups is None:
            self.matrices(block, ssm_in=(self.width, 2 * inner), ssm_x=(inner, rank + 2 * state))
            self.vectors(block, ssm_conv1d=(kernel, inner), ssm_dt=(rank, inner))
            for name, shape in (("conv1d.bias", inner), ("dt.bias", inner), ("d", inner)):
                self.vector(block, f"ssm_{name}", shape)
            self.vector(block, "ssm_a", (state, inner))
            if extra_norms:
                self.vectors(block, ssm_dt_norm=rank, ssm_b_norm=state, ssm_c_norm=state)
        else:
            channels = inner + 2 * groups * state
            self.matrices(block, ssm_in=(self.width, inner + channels + rank))
            self.vectors(block, ssm_conv1d=(kernel, channels), ssm_norm=(inner // groups, groups))
            self.vector(block, "ssm_conv1d.bias", channels)
            self.vector(block, "ssm_dt.bias", rank)
            self.vector(block, "ssm_a", (1, rank))
            self.vector(block, "ssm_d", (1, rank))
        self.matrices(block, ssm_out=(inner, self.width))

    def delta_net(self, block: int, *, joined: bool) -> None:
        """GatedDeltaNet; ``joined``: beta and alpha in one projection."""
        head, values = self.keys["ssm.state_size"], self.keys["ssm.time_step_rank"]
        inner = head * values
        channels = 2 * head * self.keys["ssm.group_count"] + inner
        self.matrices(block, attn_qkv=(self.width, channels), attn_gate=(self.width, inner))
        self.matrices(block, ssm_out=(inner, self.width))
        self.vectors(block, ssm_conv1d=(self.keys["ssm.conv_kernel"], channels), ssm_norm=head)
        self.vector(block, "ssm_dt.bias", values)
        self.vector(block, "ssm_a", values)
        if joined:
            self.matrices(block, ssm_ba=(self.width, 2 * values))
        else:
            self.matrices(block, ssm_beta=(self.width, values), ssm_alpha=(self.width, values))

    def next_token(self, block: int) -> None:
        """What fuses a block for multi-token prediction with the trunk; nothing for other blocks."""
        if block >= self.trunk:
            self.matrices(block, nextn__eh_proj=(2 * self.width, self.width))
            self.norms(block, "nextn__enorm", "nextn__hnorm", "nextn__shared_head_norm")


Recipe = Callable[[Sheet], None]
RECIPES: dict[str, Recipe] = {}


def recipe(*architectures: str) -> Callable[[Recipe], Recipe]:
    """Register the recipe of some architectures."""

    def register(function: Recipe) -> Recipe:
        RECIPES.update(dict.fromkeys(architectures, function))
        return function

    return register


def each(sheet: Sheet, *norms: str) -> Iterator[int]:
    """The blocks, after their norms have been added."""
    for block in range(sheet.blocks):
        sheet.norms(block, *norms)
        yield block


@recipe("llama", "mistral3", "smollm3", "granite", "smallthinker", "qwen2", "qwen3", "qwen3moe")
def _transformers(sheet: Sheet) -> None:
    architecture = sheet.spec.architecture
    sheet.tables()
    if sheet.spec.options.get("rope_freqs"):
        sheet.vectors(None, rope_freqs=sheet.heads(0)[0] // sheet.key("attention.head_count") // 2)
    for block in each(sheet, "attn_norm", "ffn_norm"):
        biases = "qkv" if architecture == "qwen2" else ""
        sheet.attention(block, biases=biases, qk_norm=architecture.startswith("qwen3"))
        if sheet.key("expert_count"):
            sheet.experts(block, sheet.key("expert_feed_forward_length"))
        else:
            sheet.dense(block, sheet.key("feed_forward_length", block))


@recipe("phi3")
def _phi3(sheet: Sheet) -> None:
    sheet.tables()
    half = sheet.heads(0)[0] // sheet.key("attention.head_count") // 2
    sheet.vectors(None, rope_factors_long=half, rope_factors_short=half)
    for block in each(sheet, "attn_norm", "ffn_norm"):
        (q, k, v), ff = sheet.heads(block), sheet.key("feed_forward_length", block)
        sheet.matrices(block, attn_qkv=(sheet.width, q + k + v), attn_output=(q, sheet.width))
        sheet.matrices(block, ffn_up=(sheet.width, 2 * ff), ffn_down=(ff, sheet.width))  # gate and up in one


_GEMMA_NORMS = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")


@recipe("gemma2", "gemma3", "gemma-embedding")
def _gemma3(sheet: Sheet) -> None:
    sheet.tables()
    for block in each(sheet, *_GEMMA_NORMS):
        sheet.attention(block, qk_norm=sheet.spec.architecture != "gemma2")
        sheet.dense(block, sheet.key("feed_forward_length", block))


def _per_layer_embeddings(sheet: Sheet, length: int) -> None:
    sheet.matrices(
        None,
        per_layer_token_embd=(length * sheet.blocks, sheet.spec.vocabulary),
        per_layer_model_proj=(sheet.width, length * sheet.blocks),
    )
    sheet.vectors(None, per_layer_proj_norm=length)
    for block in each(sheet, "post_norm"):
        sheet.matrices(block, inp_gate=(sheet.width, length), proj=(length, sheet.width))


@recipe("gemma3n")
def _gemma3n(sheet: Sheet) -> None:
    width, n = sheet.width, GEMMA3N_ALTUP
    sheet.tables()
    sheet.matrices(None, altup_proj=(width, width, n - 1), altup_unembd_proj=(width, width, n - 1))
    _per_layer_embeddings(sheet, GEMMA3N_EACH)
    for block in each(sheet, *_GEMMA_NORMS, "altup_correct_scale", "altup_router_norm", "laurel_post_norm"):
        sheet.attention(block, qk_norm=True)
        sheet.dense(block, sheet.key("feed_forward_length", block))
        sheet.vectors(
            block, altup_correct_coef=(n, n), altup_predict_coef=(n, n * n), altup_router=(width, n)
        )
        sheet.matrices(block, laurel_l=(width, GEMMA3N_LAUREL), laurel_r=(GEMMA3N_LAUREL, width))


@recipe("gemma4")
def _gemma4(sheet: Sheet) -> None:
    width, keys = sheet.width, sheet.keys
    sheet.tables()
    sheet.vectors(None, rope_freqs=keys["attention.key_length"] // 2)
    if keys["embedding_length_per_layer_input"]:
        _per_layer_embeddings(sheet, keys["embedding_length_per_layer_input"])
    owners = sheet.blocks - keys.get("attention.shared_kv_layers", 0)
    for block in each(sheet, *_GEMMA_NORMS):
        slides = keys["attention.sliding_window_pattern"][block]
        q, k, v = sheet.heads(block, slides=slides)
        length = q // sheet.key("attention.head_count", block)
        sheet.matrices(block, attn_q=(width, q), attn_output=(q, width))
        sheet.vectors(block, attn_q_norm=length, layer_output_scale=1)
        if block < owners:
            sheet.matrices(block, attn_k=(width, k))
            sheet.vectors(block, attn_k_norm=length)
            if slides or not sheet.spec.options.get("k_eq_v"):
                sheet.matrices(block, attn_v=(width, v))
        sheet.dense(block, sheet.key("feed_forward_length", block))
        if sheet.key("expert_count"):
            count, ff = keys["expert_count"], keys["expert_feed_forward_length"]
            sheet.norms(block, "pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2")
            sheet.vectors(block, ffn_gate_inp=(width, count))
            sheet.vector(block, "ffn_gate_inp.scale", width)
            sheet.vector(block, "ffn_down_exps.scale", count)
            sheet.matrices(block, ffn_gate_up_exps=(width, 2 * ff, count), ffn_down_exps=(ff, width, count))


@recipe("muse-glimmer")
def _muse_glimmer(sheet: Sheet) -> None:
    sheet.tables()
    for block in each(sheet, *_GEMMA_NORMS):
        sheet.attention(block, qk_norm=True)
        sheet.matrices(block, attn_gate=(sheet.width, sheet.heads(block)[0]))
        sheet.dense(block, sheet.key("feed_forward_length", block))


@recipe("gpt-oss")
def _gpt_oss(sheet: Sheet) -> None:
    count, ff = sheet.keys["expert_count"], sheet.keys["expert_feed_forward_length"]
    sheet.tables()
    for block in each(sheet, "attn_norm", "post_attention_norm"):
        sheet.attention(block, biases="qkvo")
        sheet.vectors(block, attn_sinks=sheet.key("attention.head_count", block))
        sheet.experts(block, ff)
        sheet.vector(block, "ffn_gate_inp.bias", count)
        for name, length in (("gate", ff), ("up", ff), ("down", sheet.width)):
            sheet.vector(block, f"ffn_{name}_exps.bias", (length, count))


@recipe("glm4moe")
def _glm4moe(sheet: Sheet) -> None:
    keys = sheet.keys
    ff = keys["expert_feed_forward_length"]
    sheet.tables()
    for block in each(sheet, "attn_norm", "post_attention_norm"):
        sheet.attention(block, biases="qkv")
        if block < keys.get("leading_dense_block_count", 0):
            sheet.dense(block, sheet.key("feed_forward_length", block))
        else:
            sheet.experts(block, ff, shared=ff * keys["expert_shared_count"], router="bias")
        sheet.next_token(block)


@recipe("deepseek2")
def _deepseek2(sheet: Sheet) -> None:
    """Latent attention in its absorbed form."""
    keys, width, heads = sheet.keys, sheet.width, sheet.key("attention.head_count")
    rank, rotated = keys["attention.kv_lora_rank"], keys["rope.dimension_count"]
    k, v = keys["attention.key_length_mla"], keys["attention.value_length_mla"]
    q_rank, ff = keys.get("attention.q_lora_rank", 0), keys["expert_feed_forward_length"]
    sheet.tables()
    for block in each(sheet, "attn_norm", "ffn_norm"):
        if q_rank:
            sheet.vectors(block, attn_q_a_norm=q_rank)
            sheet.matrices(block, attn_q_a=(width, q_rank), attn_q_b=(q_rank, heads * k))
        else:
            sheet.matrices(block, attn_q=(width, heads * k))
        sheet.vectors(block, attn_kv_a_norm=rank)
        sheet.matrices(
            block,
            attn_kv_a_mqa=(width, rank + rotated),
            attn_k_b=(k - rotated, rank, heads),
            attn_v_b=(rank, v, heads),
            attn_output=(heads * v, width),
        )
        if block < keys.get("leading_dense_block_count", 0):
            sheet.dense(block, sheet.key("feed_forward_length", block))
        else:
            router = "bias" if sheet.spec.options.get("probs_bias") else ""
            sheet.experts(block, ff, shared=ff * keys["expert_shared_count"], router=router)


@recipe("qwen35", "qwen35moe", "qwen3next")
def _qwen_hybrids(sheet: Sheet) -> None:
    keys, architecture = sheet.keys, sheet.spec.architecture
    sheet.tables()
    for block in each(sheet, "attn_norm", "post_attention_norm"):
        if block >= sheet.trunk or (block + 1) % keys["full_attention_interval"] == 0:
            sheet.attention(block, qk_norm=True, queries=2 * sheet.heads(block)[0])
        else:
            sheet.delta_net(block, joined=architecture == "qwen3next")
        if architecture == "qwen35":
            sheet.dense(block, sheet.key("feed_forward_length", block))
        else:
            shared = keys["expert_shared_feed_forward_length"]
            sheet.experts(block, keys["expert_feed_forward_length"], shared=shared)
            sheet.vectors(block, ffn_gate_inp_shexp=sheet.width)
        sheet.next_token(block)


@recipe("mamba", "mamba2")
def _mamba(sheet: Sheet) -> None:
    sheet.tables()
    for block in each(sheet, "attn_norm"):
        sheet.mamba(block)


@recipe("jamba")
def _jamba(sheet: Sheet) -> None:
    sheet.tables()
    for block in each(sheet, "attn_norm", "ffn_norm"):
        if sheet.key("attention.head_count_kv", block):
            sheet.attention(block)
        else:
            sheet.mamba(block, extra_norms=True)
        if sheet.key("expert_count") and block % 2:
            sheet.experts(block, sheet.key("feed_forward_length", block))
        else:
            sheet.dense(block, sheet.key("feed_forward_length", block))


@recipe("granitehybrid")
def _granite_hybrid(sheet: Sheet) -> None:
    sheet.tables()
    for block in each(sheet, "attn_norm", "ffn_norm"):
        if sheet.key("attention.head_count_kv", block):
            sheet.attention(block)
        else:
            sheet.mamba(block)
        ff = sheet.key("feed_forward_length", block)
        if sheet.key("expert_count"):
            sheet.experts(block, ff, shared=sheet.keys["expert_shared_feed_forward_length"])
        else:
            sheet.dense(block, ff)


@recipe("nemotron_h", "nemotron_h_moe")
def _nemotron_h(sheet: Sheet) -> None:
    """One mixer in each block."""
    keys = sheet.keys
    sheet.tables()
    for block in each(sheet, "attn_norm"):
        ff = sheet.key("feed_forward_length", block)
        if block >= sheet.trunk:  # attention and experts in one
            sheet.next_token(block)
            sheet.norms(block, "post_attention_norm")
            sheet.attention(block)
        if (ff or block >= sheet.trunk) and sheet.spec.architecture == "nemotron_h_moe":
            shared = keys["expert_shared_feed_forward_length"]
            sheet.experts(
                block, keys["expert_feed_forward_length"], gate=False, shared=shared, router="bias"
            )
        elif ff:
            sheet.dense(block, ff, gate=False)
        elif sheet.key("attention.head_count_kv", block):
            sheet.attention(block)
        else:
            sheet.mamba(block)


@recipe("falcon-h1")
def _falcon_h1(sheet: Sheet) -> None:
    sheet.tables()
    for block in each(sheet, "attn_norm"):
        sheet.attention(block)
        sheet.mamba(block)
        sheet.vector(block, "ffn_norm", sheet.width)  # without the usual ending
        sheet.dense(block, sheet.key("feed_forward_length", block))


@recipe("lfm2")
def _lfm2(sheet: Sheet) -> None:
    width = sheet.width
    sheet.tables("token_embd_norm")
    for block in each(sheet, "attn_norm", "ffn_norm"):
        if sheet.key("attention.head_count_kv", block):
            sheet.attention(block, qk_norm=True)
        else:
            sheet.vectors(block, shortconv__conv=(sheet.keys["shortconv.l_cache"], width))
            sheet.matrices(block, shortconv__in_proj=(width, 3 * width), shortconv__out_proj=(width, width))
        sheet.dense(block, sheet.key("feed_forward_length", block))


@recipe("bert", "nomic-bert")
def _encoders(sheet: Sheet) -> None:
    width, bert = sheet.width, sheet.spec.architecture == "bert"
    sheet.matrices(None, token_embd=(width, sheet.spec.vocabulary))
    sheet.vectors(None, token_types=(width, 2), token_embd_norm=width)
    sheet.vector(None, "token_embd_norm.bias", width)
    if bert:
        sheet.vectors(None, position_embd=(width, sheet.keys["context_length"]))
    for block in each(sheet, "attn_output_norm", "layer_output_norm"):
        ff = sheet.key("feed_forward_length", block)
        sheet.vector(block, "attn_output_norm.bias", width)
        sheet.vector(block, "layer_output_norm.bias", width)
        sheet.dense(block, ff, gate=not bert)
        if bert:
            sheet.attention(block, biases="qkvo")
            sheet.vector(block, "ffn_up.bias", ff)
            sheet.vector(block, "ffn_down.bias", width)
        else:
            sheet.matrices(block, attn_qkv=(width, 3 * width), attn_output=(width, width))


@recipe("cohere2")
def _cohere2(sheet: Sheet) -> None:
    sheet.tables()
    for block in each(sheet, "attn_norm"):
        sheet.attention(block)
        sheet.dense(block, sheet.key("feed_forward_length", block))


@recipe("olmo2", "exaone4")
def _norms_behind(sheet: Sheet) -> None:
    """Norms behind attention and feed-forward; olmo2 also norms all heads together."""
    sheet.tables()
    olmo2 = sheet.spec.architecture == "olmo2"
    for block in each(sheet, "post_attention_norm", "post_ffw_norm"):
        sheet.attention(block, qk_norm=not olmo2)
        if olmo2:
            q, k, _ = sheet.heads(block)
            sheet.vectors(block, attn_q_norm=q, attn_k_norm=k)
        sheet.dense(block, sheet.key("feed_forward_length", block))
        sheet.next_token(block)


@recipe("glm4")
def _glm4(sheet: Sheet) -> None:
    sheet.tables()
    for block in each(sheet, *_GEMMA_NORMS):
        ff = sheet.key("feed_forward_length", block)
        sheet.attention(block)
        sheet.matrices(block, ffn_up=(sheet.width, 2 * ff), ffn_down=(ff, sheet.width))  # gate and up in one
        sheet.next_token(block)


@recipe("mimo2")
def _mimo2(sheet: Sheet) -> None:
    """Keys and values of different lengths, experts behind the first blocks."""
    sheet.tables()
    for block in each(sheet, "attn_norm", "ffn_norm"):
        q, k, v = sheet.heads(block)
        heads, kv_heads = sheet.key("attention.head_count"), sheet.key("attention.head_count_kv")
        if block < sheet.trunk:
            sheet.matrices(block, attn_q=(sheet.width, q), attn_k=(sheet.width, k), attn_v=(sheet.width, v))
        else:  # to draft, the engine insists on one matrix for the three
            sheet.matrices(block, attn_qkv=(sheet.width, q + k + v))
        sheet.matrices(block, attn_output=(v // kv_heads * heads, sheet.width))
        if block < sheet.trunk and block >= sheet.keys["leading_dense_block_count"]:
            sheet.experts(block, sheet.keys["expert_feed_forward_length"], router="bias")
        else:
            sheet.dense(block, sheet.key("feed_forward_length", block))
        sheet.next_token(block)
