"""What the engine insists on before it loads a file: the keys it demands, and how wide each tensor has to be.

Facts read in the source of llama.cpp b11434, one rule per architecture, as data. A key that is optional there is
never demanded here, and a width is stated only where the engine compares it: refusing a model that would load
is worse than missing one that would not.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

_RMS, _NORM = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
_EXPERT, _SHARED = "expert_feed_forward_length", "expert_shared_count"
_GATING, _LEADING = "expert_gating_func", "leading_dense_block_count"
_WINDOW, _PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
_LOGITS = "logit_scale"
_RANK, _QUERY_RANK = "attention.kv_lora_rank", "attention.q_lora_rank"
_MLA = ("attention.key_length_mla", "attention.value_length_mla")
_INDEXER = ("attention.indexer.head_count", "attention.indexer.key_length", "attention.indexer.top_k")
SECTIONS = "rope.dimension_sections"
SECTION_COUNT = 4


class Rows(enum.Enum):
    """Width of what goes into or comes out of attention."""

    KEYS = "key length of all heads"
    GATED = "twice that: half of it is a gate"
    VALUES = "value length of all heads"
    EMBEDDING = "embedding"
    ROTATED = "rotated values of all heads"
    ANY = "not compared"


class ExpertLength(enum.Enum):
    """Width of an expert; OWN is ``expert_feed_forward_length``, DENSE ``feed_forward_length``."""

    OWN = "own"
    OWN_OR_SHARE = "own, else the dense one over the experts used"
    OWN_OR_DENSE = "own, else the dense one"
    DENSE = "dense"


class SharedLength(enum.Enum):
    """Width of the experts that see every token; KEY is ``expert_shared_feed_forward_length``."""

    KEY = "key"
    COUNT = "expert length for each"
    AT_LEAST_ONE = "expert length for each, for one where the file counts none"
    EXPERT = "expert length"
    KEY_OR_COUNT = "key, else COUNT"
    KEY_OR_AT_LEAST_ONE = "key, else AT_LEAST_ONE"
    KEY_OR_EXPERT = "key, else expert length"
    KEY_OR_DENSE = "key, else feed-forward length"
    KEY_OR_EXPERT_FOR_EACH = "key, else expert length; for each"


class Rotation(enum.Enum):
    """Values of a head that tables of RoPE factors are made for."""

    ROTATED = "rope.dimension_count"
    KEY = "key length without a window, of which no more may be rotated"
    ANY = "not compared"


class Mixer(enum.Enum):
    """Tensors of a block that keeps a state."""

    MAMBA = "mamba"
    MAMBA2 = "mamba2"
    PLAMO2 = "plamo2"
    DELTA_NET = "gated delta net"
    SHORT_CONVOLUTION = "short convolution"
    KDA = "kimi delta attention"
    ANY = "not compared"


class Experts(enum.Enum):
    """Which blocks have experts, as far as the engine decides that by keys."""

    ANY = "not decided by keys"
    BEHIND_DENSE = "those behind leading_dense_block_count"
    IF_COUNTED = "all where expert_count is not 0, else none"


@dataclass(frozen=True, slots=True)
class EngineRule:
    """What the engine demands of the files of one architecture.

    Attributes:
        keys: without prefix; all architectures need ``context_length``, ``embedding_length`` and
            ``block_count`` as well.
        one_of: one of these keys is enough.
        queries: rows of the query projection.
        outputs: row length of the projection behind attention.
        heads_by_block: head counts are taken block by block; otherwise those of the first hold for all.
        query_lengths_by_block, kv_lengths_by_block: the same for the lengths of heads.
        ffn_by_block: the same for the feed-forward length.
        expert_by_block: the same for the width of experts.
        narrow_experts: they work on ``moe_latent_size`` values where the file has that.
        gating: ``expert_gating_func`` must name one.
        up, gate: rows of the dense ``ffn_up`` and ``ffn_gate`` in halves of the feed-forward length; None where not
            compared.
        square_ffn: the dense network is as wide as the embedding.
        experts: which blocks have experts.
        expert_length, shared_length: widths of experts.
        shared_up: rows of ``ffn_up_shexp`` for each value of the shared length.
        latent: keys and values come out of one compressed row, MLA or not.
        shared_v: ``attn_v`` may be missing, values then are the keys.
        mixer: tensors of the blocks that keep a state.
        inner_is_double: the inner size of a state must be twice the embedding.
        inner_is_heads: it must be that of all heads together.
        one_expert_is_none: a file with a single expert is dense.
        rank_unless_lite: ``attention.q_lora_rank`` is demanded, except of the small models that have none.
        equal_heads: key and value length of the first block must be equal.
        rotates_keys: ``rope.dimension_count`` must be the key length.
        rotates_values: ``rope.dimension_count`` must be the value length.
        rotation: values that the tables of RoPE factors are for, two for each factor.
        output_is_vocabulary: ``output.weight`` has a row for each token.
        ignores_cache: its graph does not use the cache that is allocated, whose rows so may have any width.
    """

    keys: tuple[str, ...] = (_RMS,)
    one_of: tuple[str, ...] = ()
    queries: Rows = Rows.KEYS
    outputs: Rows = Rows.KEYS
    heads_by_block: bool = False
    query_lengths_by_block: bool = False
    kv_lengths_by_block: bool = False
    ffn_by_block: bool = False
    expert_by_block: bool = False
    narrow_experts: bool = False
    gating: bool = False
    up: int | None = 2
    gate: int | None = 2
    square_ffn: bool = False
    experts: Experts = Experts.ANY
    expert_length: ExpertLength = ExpertLength.OWN
    shared_length: SharedLength = SharedLength.KEY
    shared_up: int = 1
    latent: bool = False
    shared_v: bool = False
    mixer: Mixer = Mixer.ANY
    inner_is_double: bool = False
    inner_is_heads: bool = False
    one_expert_is_none: bool = False
    rank_unless_lite: bool = False
    equal_heads: bool = False
    rotates_keys: bool = False
    rotates_values: bool = False
    rotation: Rotation = Rotation.ANY
    output_is_vocabulary: bool = True
    ignores_cache: bool = False


_SSM = tuple(f"ssm.{name}" for name in ("conv_kernel", "inner_size", "state_size", "time_step_rank"))
_SSM_GROUPS = (*_SSM, "ssm.group_count")
_PLAIN = EngineRule()
_WIDE = EngineRule(
    queries=Rows.EMBEDDING, outputs=Rows.EMBEDDING
)  # all heads together have the embedding's width
_COUNTED = EngineRule(experts=Experts.IF_COUNTED, expert_length=ExpertLength.DENSE)
_OWN_OR_SHARE = EngineRule(expert_length=ExpertLength.OWN_OR_SHARE)
_COUNTED_BEHIND_DENSE = EngineRule(
    keys=(_RMS, _EXPERT, _SHARED), experts=Experts.BEHIND_DENSE, shared_length=SharedLength.COUNT
)
_LATENT = replace(
    _COUNTED_BEHIND_DENSE, keys=(_RMS, _RANK, _EXPERT, _SHARED), outputs=Rows.VALUES, latent=True
)
_INDEXED = replace(_LATENT, keys=(*_LATENT.keys, _QUERY_RANK, *_INDEXER))
_DELTA = EngineRule(
    keys=(_RMS, *_SSM_GROUPS),
    queries=Rows.GATED,
    expert_length=ExpertLength.OWN_OR_SHARE,
    shared_length=SharedLength.KEY_OR_DENSE,
    mixer=Mixer.DELTA_NET,
    inner_is_heads=True,
)
_DELTA_SECTIONS = replace(_DELTA, keys=(*_DELTA.keys, SECTIONS))
_NEMOTRON_H = EngineRule(
    keys=(_NORM, *_SSM_GROUPS),
    heads_by_block=True,
    ffn_by_block=True,
    expert_length=ExpertLength.OWN_OR_SHARE,
    expert_by_block=True,
    narrow_experts=True,
    mixer=Mixer.MAMBA2,
)
_ROTATED = EngineRule(queries=Rows.ROTATED, outputs=Rows.ROTATED)
_EACH = EngineRule(
    heads_by_block=True, query_lengths_by_block=True, kv_lengths_by_block=True, ffn_by_block=True
)
_MIMO = EngineRule(
    keys=(_RMS, _EXPERT, _WINDOW, _PATTERN),
    outputs=Rows.VALUES,
    heads_by_block=True,
    kv_lengths_by_block=True,
)
_SHORT_CONVOLUTION = EngineRule(
    keys=(_RMS, "shortconv.l_cache"),
    queries=Rows.EMBEDDING,
    outputs=Rows.EMBEDDING,
    heads_by_block=True,
    kv_lengths_by_block=True,
    mixer=Mixer.SHORT_CONVOLUTION,
)
_KDA = EngineRule(
    keys=(_RMS, *_MLA, _RANK, "ssm.conv_kernel", "kda.head_dim", _EXPERT, _SHARED, _GATING),
    outputs=Rows.VALUES,
    experts=Experts.BEHIND_DENSE,
    shared_length=SharedLength.AT_LEAST_ONE,
    latent=True,
    mixer=Mixer.KDA,
)
_RWKV7 = EngineRule(
    keys=(
        "wkv.head_size",
        "attention.decay_lora_rank",
        "attention.iclr_lora_rank",
        "attention.value_residual_mix_lora_rank",
    )
)
_RWKV6 = EngineRule(keys=("wkv.head_size", "time_mix_extra_dim", "time_decay_extra_dim"))
_LAYER_NORM = replace(_PLAIN, keys=(_NORM,))
_WIDE_LAYER_NORM = replace(_WIDE, keys=(_NORM,))


def _same(names: str, rule: EngineRule) -> dict[str, EngineRule]:
    return dict.fromkeys(names.split(), rule)


_RULES: dict[str, EngineRule] = {
    **_same(
        "arcee ernie4_5 exaone gemma maincoder paddleocr pangu-embedded qwen3"
        " seed_oss smollm3 gemma2 gemma3 llada",
        _PLAIN,
    ),
    **_same("baichuan chameleon internlm2 qwen2 xverse olmo2 dream eurobert", _WIDE),
    **_same(
        "bloom codeshell command-r falcon gpt2 jais mpt nemotron olmo orion phi2 stablelm starcoder starcoder2 bert"
        " jina-bert-v3 nomic-bert",
        _WIDE_LAYER_NORM,
    ),
    **_same("llama minicpm mistral3 refact", _COUNTED),
    "llama-embed": replace(_COUNTED, ignores_cache=True),
    **_same("granite granitemoe", replace(_COUNTED, keys=(_RMS, _LOGITS))),
    **_same("qwen3moe rnd1", _OWN_OR_SHARE),
    **_same("deepseek2 mistral4", replace(_LATENT, rank_unless_lite=True)),
    **_same("hunyuan-dense hunyuan_vl", replace(_PLAIN, one_expert_is_none=True)),
    **_same("qwen35 qwen35moe", _DELTA_SECTIONS),
    **_same("nemotron_h nemotron_h_moe", _NEMOTRON_H),
    **_same("rwkv6 rwkv6qwen2", _RWKV6),
    **_same("rwkv7 arwkv7", _RWKV7),
    "apertus": replace(
        _PLAIN, keys=(_RMS, *(f"xielu.{name}" for name in ("alpha_n", "alpha_p", "beta", "eps")))
    ),
    "arctic": replace(_WIDE, expert_length=ExpertLength.DENSE, square_ffn=True),
    **_same("afmoe dots1", _COUNTED_BEHIND_DENSE),
    "bailingmoe": replace(_ROTATED, keys=(_RMS, _EXPERT, _SHARED), shared_length=SharedLength.COUNT),
    "bailingmoe2": replace(
        _COUNTED_BEHIND_DENSE,
        keys=(_RMS, _EXPERT, _SHARED, _GATING),
        queries=Rows.EMBEDDING,
        shared_length=SharedLength.KEY_OR_EXPERT_FOR_EACH,
    ),
    "bailingmoe3": replace(
        _KDA,
        keys=(*_KDA.keys, "kda.gate_lower_bound", _LEADING),
        shared_length=SharedLength.KEY_OR_AT_LEAST_ONE,
    ),
    "bitnet": _WIDE,
    "chatglm": replace(_PLAIN, outputs=Rows.EMBEDDING, up=4),
    "cogvlm": replace(_PLAIN, queries=Rows.ANY),
    "cohere2": replace(_WIDE, keys=(_WINDOW, _LOGITS, _NORM)),
    "cohere2moe": replace(
        _PLAIN,
        keys=(_WINDOW, _LOGITS, _LEADING, _EXPERT),
        one_of=(_NORM, _RMS),
        experts=Experts.BEHIND_DENSE,
        expert_length=ExpertLength.OWN_OR_DENSE,
        shared_length=SharedLength.KEY_OR_COUNT,
    ),
    "dbrx": replace(_WIDE, keys=(_NORM, "attention.clamp_kqv"), expert_length=ExpertLength.DENSE),
    "deci": replace(_PLAIN, outputs=Rows.ANY, heads_by_block=True, ffn_by_block=True),
    **_same(
        "deepseek deepseek2-ocr",
        replace(_COUNTED_BEHIND_DENSE, queries=Rows.EMBEDDING, outputs=Rows.EMBEDDING),
    ),
    "deepseek32": replace(_INDEXED, keys=(*_INDEXED.keys, _GATING)),
    "ernie4_5-moe": EngineRule(
        keys=(_RMS, _EXPERT, "interleave_moe_layer_step"), experts=Experts.BEHIND_DENSE
    ),
    "exaone-moe": EngineRule(
        keys=(_WINDOW, _RMS, _EXPERT, _GATING),
        experts=Experts.BEHIND_DENSE,
        shared_length=SharedLength.KEY_OR_EXPERT,
    ),
    "exaone4": replace(_PLAIN, outputs=Rows.EMBEDDING),
    "falcon-h1": replace(_PLAIN, keys=(_RMS, *_SSM_GROUPS), mixer=Mixer.MAMBA2),
    "gemma-embedding": replace(_PLAIN, keys=(_WINDOW, _RMS)),
    "gemma3n": replace(_PLAIN, keys=(_WINDOW, _RMS)),
    "gemma4": replace(
        _EACH,
        keys=(
            _PATTERN,
            _WINDOW,
            _RMS,
            "embedding_length_per_layer_input",
            "attention.key_length_swa",
            "attention.value_length_swa",
        ),
        shared_v=True,
        rotation=Rotation.KEY,
    ),
    "glm-dsa": _INDEXED,
    "glm4": replace(_PLAIN, up=4),
    "glm4moe": replace(_COUNTED_BEHIND_DENSE, expert_length=ExpertLength.OWN_OR_SHARE),
    "gpt-oss": replace(_ROTATED, keys=(_RMS, _EXPERT, _WINDOW)),
    "gptneox": replace(_WIDE_LAYER_NORM, keys=(_NORM, "use_parallel_residual")),
    "granite_swa": replace(_COUNTED, keys=(_RMS, _LOGITS, _PATTERN, _WINDOW), shared_up=2),
    "granitehybrid": replace(
        _COUNTED,
        keys=(_RMS, *_SSM_GROUPS),
        heads_by_block=True,
        mixer=Mixer.MAMBA2,
        inner_is_double=True,
    ),
    "grovemoe": replace(_OWN_OR_SHARE, keys=(_RMS, _EXPERT, "expert_group_scale", "experts_per_group")),
    "hunyuan-moe": EngineRule(
        keys=(_RMS, _EXPERT),
        ffn_by_block=True,
        expert_length=ExpertLength.DENSE,
        shared_length=SharedLength.KEY_OR_DENSE,
    ),
    "hy_v3": EngineRule(
        keys=(_RMS, _EXPERT),
        expert_length=ExpertLength.OWN_OR_SHARE,
        shared_length=SharedLength.KEY_OR_EXPERT,
    ),
    "jais2": _LAYER_NORM,
    "jamba": EngineRule(
        keys=(_RMS, *_SSM),
        queries=Rows.EMBEDDING,
        outputs=Rows.EMBEDDING,
        heads_by_block=True,
        kv_lengths_by_block=True,
        expert_length=ExpertLength.DENSE,
        mixer=Mixer.MAMBA,
        inner_is_double=True,
    ),
    "jina-bert-v2": replace(_WIDE_LAYER_NORM, up=None),
    "kimi-linear": _KDA,
    "laguna": EngineRule(keys=(_RMS, _LEADING, _EXPERT), heads_by_block=True, experts=Experts.BEHIND_DENSE),
    "lfm2": _SHORT_CONVOLUTION,
    "lfm2moe": replace(_SHORT_CONVOLUTION, keys=(*_SHORT_CONVOLUTION.keys, _EXPERT, _GATING)),
    "llada-moe": replace(_WIDE, expert_length=ExpertLength.OWN_OR_SHARE),
    "llama4": EngineRule(
        keys=(_RMS, _EXPERT, "interleave_moe_layer_step"), shared_length=SharedLength.EXPERT
    ),
    "mamba": EngineRule(keys=(_RMS, *_SSM), mixer=Mixer.MAMBA, inner_is_double=True),
    "mamba2": EngineRule(keys=(_RMS, *_SSM_GROUPS), mixer=Mixer.MAMBA2),
    "maple": EngineRule(keys=(_RMS, _WINDOW, _EXPERT, _PATTERN, "swiglu_clamp_exp")),
    "mellum": replace(_OWN_OR_SHARE, keys=(_RMS, _EXPERT)),
    "mimo2": _MIMO,
    "minicpm3": EngineRule(keys=(_RMS, _QUERY_RANK, _RANK), outputs=Rows.VALUES, latent=True),
    "minimax-m2": EngineRule(keys=(_RMS, _EXPERT), expert_length=ExpertLength.DENSE),
    # The blocks behind its trunk, which decide, have another form.
    "modern-bert": replace(_WIDE_LAYER_NORM, queries=Rows.ANY, up=None, gate=None),
    "muse-glimmer": replace(_PLAIN, keys=(_RMS, _WINDOW, _LOGITS)),
    "neo-bert": replace(_WIDE, up=4),
    "nomic-bert-moe": replace(_WIDE_LAYER_NORM, expert_length=ExpertLength.DENSE),
    "olmoe": replace(_WIDE, expert_length=ExpertLength.DENSE),
    "openelm": replace(_PLAIN, heads_by_block=True, ffn_by_block=True),
    "phi3": replace(_WIDE, up=4),
    "phimoe": replace(_WIDE, expert_length=ExpertLength.DENSE),
    "plamo": _WIDE,
    "plamo2": EngineRule(
        keys=(_RMS, *_SSM_GROUPS), outputs=Rows.VALUES, heads_by_block=True, up=4, mixer=Mixer.PLAMO2
    ),
    "plamo3": EngineRule(outputs=Rows.VALUES, heads_by_block=True, ffn_by_block=True, up=4),
    "plm": EngineRule(keys=(_RMS, _RANK), outputs=Rows.VALUES, latent=True),
    "qwen": replace(_WIDE, queries=Rows.ANY, up=1, gate=1),
    "qwen2moe": replace(
        _WIDE, expert_length=ExpertLength.OWN_OR_SHARE, shared_length=SharedLength.KEY_OR_DENSE
    ),
    "qwen2vl": replace(_WIDE, keys=(SECTIONS,)),
    "qwen3next": replace(_DELTA, ffn_by_block=True),
    "qwen3vl": replace(_PLAIN, keys=(_RMS, SECTIONS), output_is_vocabulary=False),
    "qwen3vlmoe": replace(_OWN_OR_SHARE, keys=(_RMS, SECTIONS)),
    "smallthinker": _PLAIN,
    "spark2_5": replace(_EACH, keys=(_RMS, _WINDOW, _PATTERN), ffn_by_block=False),
    "step35": _MIMO,
    "talkie": replace(_PLAIN, keys=(_RMS, _LOGITS)),
}

_EQUAL_HEADS = frozenset(
    (
        "apertus", "arcee", "arctic", "baichuan", "bitnet", "bloom", "chameleon", "chatglm", "codeshell",
        "cogvlm", "command-r", "dbrx", "deepseek", "dots1", "ernie4_5", "ernie4_5-moe", "exaone", "falcon",
        "gpt2", "gptneox", "granite", "grovemoe", "hunyuan-moe", "hunyuan_vl", "internlm2", "jais", "jais2",
        "llama", "maincoder", "minimax-m2", "mistral3", "mpt", "nemotron", "olmo", "olmoe", "openelm",
        "orion", "paddleocr", "pangu-embedded", "phi2", "phi3", "plamo", "qwen", "qwen2", "qwen2moe",
        "qwen2vl", "qwen3", "qwen3moe", "qwen3vl", "qwen3vlmoe", "refact", "seed_oss", "smollm3",
        "stablelm", "starcoder", "starcoder2", "xverse", "cohere2", "muse-glimmer", "olmo2", "afmoe",
        "mellum", "llama4", "smallthinker", "laguna", "granite_swa", "spark2_5", "cohere2moe", "bert",
        "dream", "eurobert", "llada", "llada-moe", "modern-bert", "neo-bert", "rnd1", "deci", "bailingmoe2",
        "glm4", "glm4moe", "hy_v3", "qwen3next", "qwen35", "qwen35moe", "granitehybrid", "nemotron_h",
        "nemotron_h_moe",
    )
)  # fmt: skip
_ROTATES_VALUES = frozenset(
    (
        "apertus", "arcee", "arctic", "baichuan", "chameleon", "codeshell", "cogvlm", "dbrx", "deepseek",
        "dots1", "ernie4_5", "ernie4_5-moe", "exaone", "falcon", "granite", "grovemoe", "hunyuan-moe",
        "hunyuan_vl", "internlm2", "jais2", "llama", "maincoder", "mistral3", "olmo", "olmoe", "orion",
        "paddleocr", "pangu-embedded", "plamo", "qwen2", "qwen2moe", "qwen2vl", "qwen3", "qwen3moe",
        "qwen3vl", "qwen3vlmoe", "seed_oss", "smollm3", "starcoder2", "talkie", "xverse", "olmo2", "mellum",
        "llama4", "smallthinker", "granite_swa", "exaone4", "exaone-moe", "cohere2moe", "dream", "llada",
        "llada-moe", "rnd1", "deci", "hy_v3",
    )
)  # fmt: skip
_TABLES_ARE_ROTATED = frozenset(
    (
        "apertus", "arcee", "cogvlm", "deci", "exaone", "exaone-moe", "exaone4", "falcon-h1", "granite", "granite_swa",
        "granitehybrid", "granitemoe", "llada", "llama", "llama-embed", "llama4", "minicpm", "minicpm3", "mistral3",
        "pangu-embedded", "phi3", "refact",
    )
)  # fmt: skip
_GATING_IS_NAMED = frozenset(
    (
        "bailingmoe2", "bailingmoe3", "deepseek32", "dots1", "exaone-moe", "kimi-linear", "lfm2moe", "minimax-m2",
        "smallthinker",
    )
)  # fmt: skip
_ROTATES_KEYS = frozenset(("llama", "deci", "falcon", "llama-embed"))

ENGINE_RULES: Mapping[str, EngineRule] = MappingProxyType(
    {
        name: replace(
            rule,
            equal_heads=name in _EQUAL_HEADS,
            rotates_keys=name in _ROTATES_KEYS,
            rotates_values=name in _ROTATES_VALUES,
            rotation=Rotation.ROTATED if name in _TABLES_ARE_ROTATED else rule.rotation,
            gating=name in _GATING_IS_NAMED,
        )
        for name, rule in _RULES.items()
    }
)
