"""What the engine does with each architecture's context: rules as data, read in the source of llama.cpp b11434.

An architecture without a rule, and one whose cache is of a kind that nothing here computes, has no facts: if it
generates text, the engine's dry run alone prices it (:mod:`lllm3090d.checkpoints.unruled`). A rule is only ever added
from the engine's source and held against its dry run.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType


class Periods(enum.Enum):
    """Which layer of a period attends to everything, unless the file has an array."""

    DENSE_LAST = "dense last"
    DENSE_FIRST = "dense first"
    ARRAY = "array"  # the file must say it layer by layer
    ALL = "all"  # every attention layer slides


@dataclass(frozen=True, slots=True)
class Sliding:
    """Sliding-window attention of an architecture.

    Attributes:
        layers: how the sliding layers are found.
        period: layers of a period; 0 where there is none.
        required: the file must name a window; otherwise a missing one, or 0, means dense layers.
        default_tokens: window where the file names none.
        fixed_tokens: window whatever the file says.
        trunk_blocks: only models with so many blocks slide; None for all.
    """

    layers: Periods
    period: int = 0
    required: bool = False
    default_tokens: int | None = None
    fixed_tokens: int | None = None
    trunk_blocks: int | None = None


class Recurrence(enum.Enum):
    """Which layers keep a state instead of an attention cache, and how the others are found."""

    ALL = "all"
    BESIDE_ATTENTION = "beside attention"  # every layer has both
    NO_KV_HEADS = "no kv heads"  # head_count_kv is 0
    NO_KV_HEADS_NO_FFN = "no kv heads, no ffn"  # one mixer per layer: state, attention or feed-forward
    INTERVAL = "interval"  # all but every full_attention_interval-th layer


class State(enum.Enum):
    """What a state consists of."""

    MAMBA = "mamba"  # convolution and state-space state, without groups
    MAMBA_GROUPS = "mamba groups"  # the same with groups; GatedDeltaNet has the same layout
    SHORT_CONVOLUTION = "short convolution"
    WKV = "wkv"  # RWKV: token shift and one matrix per head
    DELTA = "delta"  # Kimi delta attention: three convolutions and one matrix per head


class Mtp(enum.Enum):
    """What becomes of the blocks for multi-token prediction that a file may have behind the trunk."""

    NONE = "none"  # the architecture has none
    SKIPPED = "skipped"  # the engine never loads them
    LOADED = "loaded"  # loaded when drafting is asked for
    OPTIONAL = "optional"  # the same, and a file may lack their tensors though it counts the blocks


class Graph(enum.Enum):
    """How the compute buffer of an architecture is found."""

    NONE = "none"  # nobody has found a formula: not priced
    PLAIN = "plain"
    GATED_ATTENTION = "gated attention"  # queries come with a gate
    THREE_QUERIES = "three queries"
    TWO_QUERIES = "two queries"
    PER_LAYER_EMBEDDINGS = "per-layer embeddings"
    ALTUP = "altup"  # per-layer embeddings and one residual more
    ENCODER = "encoder"  # attends to a whole micro batch at once


@dataclass(frozen=True, slots=True)
class Architecture:
    """The rule of one architecture.

    Attributes:
        sliding: None where the engine ignores ``attention.sliding_window``.
        recurrence: None where no layer keeps a state.
        state: form of the state.
        may_be_latent: multi-head latent attention where the file has ``attention.key_length_mla``.
        indexer: every layer also caches the keys of a sparse-attention indexer.
        kv_layers: so many layers from the first own a cache, the others share it; None for all.
        shares_kv: the file may say how many of the last layers share (``attention.shared_kv_layers``).
        blank_layers: layers may have no attention at all.
        has_memory: False for encoders and diffusion models, which keep no context.
        mtp: what becomes of blocks for multi-token prediction.
        mtp_in_context: those blocks have a cache in the main context too, though nothing uses it. The engine leaves
            them out of the context of all models but those with a recurrent state, and of these of qwen3next, qwen35
            and qwen35moe.
        rolls_back: a state can be taken back by a few tokens, which costs copies when drafting.
        doubles_tied: without a card the matrix shared by input and output is allocated twice.
        copies_tied: with a card it gets a copy of that matrix; otherwise the graph multiplies by the input's own.
        output_is_embedding: a missing token embedding means the output matrix, which then is allocated twice.
        embedding_is_output: a missing output matrix means the token embedding.
        graph: form of the compute buffer.
    """

    sliding: Sliding | None = None
    recurrence: Recurrence | None = None
    state: State | None = None
    may_be_latent: bool = False
    indexer: bool = False
    kv_layers: int | None = None
    shares_kv: bool = False
    blank_layers: bool = False
    has_memory: bool = True
    mtp: Mtp = Mtp.NONE
    mtp_in_context: bool = False
    rolls_back: bool = False
    doubles_tied: bool = False
    copies_tied: bool = True
    output_is_embedding: bool = False
    embedding_is_output: bool = True
    graph: Graph = Graph.PLAIN


_PLAIN = (
    "apertus", "arcee", "arctic", "baichuan", "bailingmoe", "bloom", "chameleon", "chatglm",
    "cogvlm", "command-r", "dbrx", "deepseek", "deepseek2-ocr", "dots1", "ernie4_5",
    "ernie4_5-moe", "exaone", "falcon", "gemma", "gpt2", "gptneox", "granite", "granitemoe", "grovemoe",
    "hunyuan-dense", "hunyuan-moe", "hunyuan_vl", "internlm2", "jais", "jais2", "llama", "llama-embed",
    "maincoder", "minicpm", "minicpm3", "minimax-m2", "mistral3", "mpt", "nemotron", "olmo", "olmoe",
    "openelm", "orion", "paddleocr", "pangu-embedded", "phi2", "phi3", "phimoe", "plamo", "plm", "qwen",
    "qwen2", "qwen2moe", "qwen2vl", "qwen3", "qwen3moe", "qwen3vl", "qwen3vlmoe", "refact", "seed_oss",
    "smollm3", "stablelm", "starcoder", "starcoder2", "talkie", "xverse",
)  # fmt: skip
_ENCODERS = (
    "bert", "dream", "eurobert", "jina-bert-v2", "jina-bert-v3", "llada", "llada-moe", "modern-bert",
    "neo-bert", "nomic-bert", "nomic-bert-moe", "rnd1",
)  # fmt: skip
_DIFFUSION = ("dream", "llada", "rnd1")  # these do have an output
_PRICED_ENCODERS = ("bert", "nomic-bert")

_LAST = Periods.DENSE_LAST
_FIRST = Periods.DENSE_FIRST
_SLIDING = {
    "gemma2": Sliding(_LAST, 2, default_tokens=4096),
    "gemma3": Sliding(_LAST, 6),
    "cohere2": Sliding(_LAST, 4, required=True),
    "gpt-oss": Sliding(_LAST, 2, required=True),
    "muse-glimmer": Sliding(_LAST, 4, required=True),
    "olmo2": Sliding(_LAST, 4),
    "afmoe": Sliding(_LAST, 4),
    "mellum": Sliding(_LAST, 4),
    "llama4": Sliding(_LAST, 4, default_tokens=8192, fixed_tokens=8192),
    "plamo3": Sliding(_LAST, 8),
    "smallthinker": Sliding(_FIRST, 4, fixed_tokens=4096),
    "laguna": Sliding(_FIRST, 4),
    "granite_swa": Sliding(Periods.ARRAY, required=True),
    "maple": Sliding(Periods.ARRAY, required=True),
    "spark2_5": Sliding(Periods.ARRAY, required=True),
}
_SLIDING_WITH_MTP = {
    "exaone4": (Sliding(_LAST, 4, default_tokens=4096, trunk_blocks=64), Mtp.SKIPPED),
    "exaone-moe": (Sliding(_LAST, 4, required=True), Mtp.SKIPPED),
    "cohere2moe": (Sliding(_FIRST, 4, required=True), Mtp.OPTIONAL),
    "mimo2": (Sliding(Periods.ARRAY, required=True), Mtp.OPTIONAL),
    "step35": (Sliding(Periods.ARRAY, required=True), Mtp.OPTIONAL),
}
_NO_KV_HEADS = Recurrence.NO_KV_HEADS
_LFM2 = Architecture(
    sliding=Sliding(Periods.ALL),
    recurrence=_NO_KV_HEADS,
    state=State.SHORT_CONVOLUTION,
    rolls_back=True,
    mtp_in_context=True,
)
_NEMOTRON_H = Architecture(
    recurrence=Recurrence.NO_KV_HEADS_NO_FFN,
    state=State.MAMBA_GROUPS,
    rolls_back=True,
    mtp=Mtp.LOADED,
    mtp_in_context=True,
    graph=Graph.THREE_QUERIES,
)
_QWEN_HYBRID = Architecture(
    recurrence=Recurrence.INTERVAL,
    state=State.MAMBA_GROUPS,
    rolls_back=True,
    mtp=Mtp.LOADED,
    graph=Graph.GATED_ATTENTION,
)
_RWKV = Architecture(recurrence=Recurrence.ALL, state=State.WKV, embedding_is_output=False, graph=Graph.NONE)
_INDEXED = Architecture(may_be_latent=True, indexer=True, mtp=Mtp.OPTIONAL, graph=Graph.NONE)

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        **dict.fromkeys(_PLAIN, Architecture()),
        **{name: Architecture(sliding=sliding) for name, sliding in _SLIDING.items()},
        **{
            name: Architecture(sliding=sliding, mtp=mtp)
            for name, (sliding, mtp) in _SLIDING_WITH_MTP.items()
        },
        **{
            name: Architecture(
                has_memory=False,
                embedding_is_output=name in _DIFFUSION,
                graph=Graph.ENCODER if name in _PRICED_ENCODERS else Graph.NONE,
            )
            for name in _ENCODERS
        },
        # The window changes nothing here but which lengths the heads of a layer have.
        "gemma-embedding": Architecture(has_memory=False, sliding=Sliding(_LAST, 6), graph=Graph.ENCODER),
        "gemma3n": Architecture(
            sliding=Sliding(_LAST, 5, required=True), kv_layers=20, doubles_tied=True, graph=Graph.ALTUP
        ),
        "gemma4": Architecture(
            sliding=Sliding(Periods.ARRAY, required=True),
            shares_kv=True,
            doubles_tied=True,
            graph=Graph.PER_LAYER_EMBEDDINGS,
        ),
        "deci": Architecture(blank_layers=True),
        "bitnet": Architecture(copies_tied=False),
        "codeshell": Architecture(output_is_embedding=True),
        "bailingmoe2": Architecture(mtp=Mtp.SKIPPED),
        "glm4": Architecture(mtp=Mtp.SKIPPED),
        "glm4moe": Architecture(mtp=Mtp.OPTIONAL),
        "hy_v3": Architecture(mtp=Mtp.OPTIONAL),
        "deepseek2": Architecture(may_be_latent=True, mtp=Mtp.OPTIONAL),
        "mistral4": Architecture(may_be_latent=True, mtp=Mtp.OPTIONAL),
        "deepseek32": _INDEXED,
        "glm-dsa": _INDEXED,
        "qwen3next": Architecture(
            recurrence=Recurrence.INTERVAL,
            state=State.MAMBA_GROUPS,
            mtp=Mtp.LOADED,
            graph=Graph.GATED_ATTENTION,
        ),
        "qwen35": _QWEN_HYBRID,
        "qwen35moe": _QWEN_HYBRID,
        "jamba": Architecture(
            recurrence=_NO_KV_HEADS, state=State.MAMBA, mtp_in_context=True, graph=Graph.TWO_QUERIES
        ),
        "granitehybrid": Architecture(
            recurrence=_NO_KV_HEADS, state=State.MAMBA_GROUPS, mtp_in_context=True
        ),
        "plamo2": Architecture(
            recurrence=_NO_KV_HEADS, state=State.MAMBA_GROUPS, mtp_in_context=True, graph=Graph.NONE
        ),
        "kimi-linear": Architecture(
            recurrence=_NO_KV_HEADS,
            state=State.DELTA,
            may_be_latent=True,
            mtp_in_context=True,
            embedding_is_output=False,
            graph=Graph.NONE,
        ),
        "bailingmoe3": Architecture(
            recurrence=_NO_KV_HEADS,
            state=State.DELTA,
            may_be_latent=True,
            rolls_back=True,
            mtp=Mtp.OPTIONAL,
            mtp_in_context=True,
            graph=Graph.NONE,
        ),
        "nemotron_h": _NEMOTRON_H,
        "nemotron_h_moe": _NEMOTRON_H,
        "falcon-h1": Architecture(
            recurrence=Recurrence.BESIDE_ATTENTION, state=State.MAMBA_GROUPS, mtp_in_context=True
        ),
        "lfm2": _LFM2,
        "lfm2moe": replace(_LFM2, sliding=None),
        "mamba": Architecture(recurrence=Recurrence.ALL, state=State.MAMBA),
        "mamba2": Architecture(recurrence=Recurrence.ALL, state=State.MAMBA_GROUPS),
        **dict.fromkeys(("rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"), _RWKV),
    }
)

# Drafters in files of their own: no model, so nothing loads them alone. What their file lacks they take from the model.
DRAFTERS: Mapping[str, Architecture] = MappingProxyType(
    {
        "eagle3": Architecture(embedding_is_output=False),
        "dflash": Architecture(sliding=Sliding(Periods.ARRAY)),
    }
)

# Known to the engine and generating text, but their context is of a kind of its own: only the engine's dry run prices
# them.
UNRULED: Mapping[str, str] = MappingProxyType(
    {
        "deepseek4": "it compresses its context in a cache of its own kind",
        "dots3note": "its sparse attention keeps an indexer cache beside a sliding window",
        "glm5-next": "its sparse attention keeps an indexer cache beside a recurrent state",
        "graniteswitch": "it keeps the choice of its adapters in an additional layer",
        "grok": "the engine turns flash attention off for it",
        "hrm_text": "it runs through its blocks several times",
        "hy_v4": "its sparse attention keeps an indexer cache",
        "kimi-k3": "it keeps a recurrent state of its own kind",
        "minimax-01": "its linear attention keeps a state that nobody has compared with the engine",
        "minimax-m3": "its sparse attention keeps an indexer cache",
        "nanbeige": "it runs through its blocks several times",
        "qwen4exp": "its sparse attention keeps an indexer cache beside a recurrent state",
    }
)

# Known to the engine, but nothing that generates text by itself.
REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "clef": "it reads whole documents with a hybrid that keeps no context",
        "clip": "it is a projector that accompanies a model, not a model",
        "dflash": "it is a drafter and shares the context of its model",
        "eagle3": "it is a drafter and shares the context of its model",
        "gemma4-assistant": "it is a drafter and shares the context of its model",
        "pockettts": "it makes speech",
        "qwen3tts": "it makes speech",
        "t5": "it consists of an encoder and a decoder",
        "t5encoder": "it is the encoder half of a model",
        "wavtokenizer-dec": "it makes speech",
    }
)


def why_without_rule(architecture: str) -> str:
    """Why an architecture has no rule, as the end of a sentence."""
    reason = UNRULED.get(architecture) or REFUSED.get(architecture)
    return reason or "no rule says how the engine keeps its context"
