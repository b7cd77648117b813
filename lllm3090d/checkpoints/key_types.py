"""Types of the metadata values that the engine reads: of another type it refuses a file.

Read in the source of llama.cpp b11434, as data. A key is listed for an architecture only where the engine reads it
whatever else the file says, so no file is refused for a value that nothing looks at.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType

from lllm3090d.checkpoints.engine_rules import EngineRule
from lllm3090d.checkpoints.metadata import Keys


class Form(enum.Enum):
    """How the engine reads a value."""

    U32 = "u32"
    F32 = "f32"
    BOOL = "bool"
    TEXT = "str"
    U32_EACH = "u32, or an array with a whole number for each layer"
    F32_EACH = "f32, or an array with one for each layer"
    I32_EACH = "i32, or an array of whole numbers"
    LIST = "an array of whole numbers"


# As the engine calls them; an array by the type of its elements.
_WHOLE = frozenset(("[u32]", "[i32]", "[bool]"))
_TYPES: Mapping[Form, frozenset[str]] = MappingProxyType(
    {
        Form.U32: frozenset(("u32",)),
        Form.F32: frozenset(("f32",)),
        Form.BOOL: frozenset(("bool",)),
        Form.TEXT: frozenset(("str",)),
        Form.U32_EACH: _WHOLE | {"u32"},
        Form.F32_EACH: frozenset(("f32", "[f32]")),
        Form.I32_EACH: _WHOLE | {"i32"},
    }
)

_KEYS: Mapping[Form, str] = MappingProxyType(
    {
        Form.LIST: ("attention.rope_pattern attention.sliding_window_pattern deepstack_mapping"),
        Form.BOOL: (
            "attention.causal expert_weights_norm kda.safe_gate rope.scaling.finetuned ssm.dt_b_c_rms "
            "swin_norm use_parallel_residual"
        ),
        Form.F32: (
            "attention.clamp_kqv attention.layer_norm_epsilon attention.layer_norm_rms_epsilon "
            "attention.max_alibi_bias attention.scale attention.temperature_scale attention.value_scale "
            "attn_logit_softcapping embedding_scale expert_group_scale expert_weights_scale "
            "final_logit_softcapping kda.gate_lower_bound logit_scale residual_scale rope.freq_base "
            "rope.freq_base_swa rope.scaling.alpha rope.scaling.attn_factor rope.scaling.factor "
            "rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow rope.scaling.yarn_log_multiplier"
        ),
        Form.F32_EACH: (
            "swiglu_clamp_exp swiglu_clamp_shexp xielu.alpha_n xielu.alpha_p xielu.beta xielu.eps"
        ),
        Form.I32_EACH: ("rope.dimension_sections"),
        Form.TEXT: ("hidden_activation rope.scaling.type"),
        Form.U32: (
            "attention.decay_lora_rank attention.gate_lora_rank attention.iclr_lora_rank "
            "attention.indexer.head_count attention.indexer.key_length attention.indexer.top_k "
            "attention.key_length attention.key_length_mla attention.key_length_swa attention.kv_lora_rank "
            "attention.q_lora_rank attention.shared_kv_layers attention.sliding_window "
            "attention.temperature_length attention.value_length attention.value_length_mla "
            "attention.value_length_swa attention.value_residual_mix_lora_rank block_count "
            "classifier.pooling_type context_length decision.block_count dense_2_feat_in dense_2_feat_out "
            "dense_3_feat_in dense_3_feat_out embedding_length embedding_length_out "
            "embedding_length_per_layer_input expert_chunk_feed_forward_length expert_count "
            "expert_gating_func expert_group_count expert_group_used_count expert_shared_count "
            "expert_shared_feed_forward_length experts_per_group interleave_moe_layer_step kda.head_dim "
            "leading_dense_block_count moe_every_n_layers moe_latent_size n_deepstack_layers "
            "nextn_predict_layers pooling_type rescale_every_n_layers rope.dimension_count "
            "rope.dimension_count_swa rope.scaling.original_context_length shortconv.l_cache ssm.conv_kernel "
            "ssm.group_count ssm.inner_size ssm.state_size ssm.time_step_rank time_decay_extra_dim "
            "time_mix_extra_dim token_shift_count wkv.head_size"
        ),
        Form.U32_EACH: (
            "attention.head_count attention.head_count_kv attention.indexer.types attention.recurrent_layers "
            "expert_feed_forward_length expert_used_count feed_forward_length"
        ),
    }
)
_ALWAYS_READ = (
    "context_length embedding_length embedding_length_out attention.causal pooling_type "
    "classifier.pooling_type block_count nextn_predict_layers expert_count expert_used_count "
    "expert_group_count expert_group_used_count feed_forward_length attention.head_count "
    "attention.head_count_kv rope.scaling.finetuned rope.scaling.original_context_length rope.freq_base "
    "rope.scaling.type rope.scaling.factor rope.scaling.attn_factor rope.scaling.alpha "
    "attention.key_length_swa attention.value_length_swa rope.dimension_count_swa"
)
_ALSO_READ: Mapping[str, str] = MappingProxyType(
    {
        "attention.clamp_kqv": "mpt olmo",
        "attention.gate_lora_rank": "arwkv7 rwkv7",
        "attention.indexer.types": "glm-dsa",
        "attention.key_length": "plamo2",
        "attention.key_length_mla": "deepseek2 deepseek32 glm-dsa mistral4",
        "attention.layer_norm_epsilon": "arwkv7 rwkv6 rwkv6qwen2 rwkv7",
        "attention.layer_norm_rms_epsilon": "arwkv7 nemotron_h nemotron_h_moe rwkv6 rwkv6qwen2 rwkv7",
        "attention.max_alibi_bias": "jais mpt",
        "attention.q_lora_rank": "bailingmoe3",
        "attention.recurrent_layers": "qwen35 qwen35moe qwen3next",
        "attention.rope_pattern": "granite_swa",
        "attention.scale": "granite granite_swa granitehybrid granitemoe",
        "attention.shared_kv_layers": "gemma4",
        "attention.sliding_window": (
            "afmoe exaone4 gemma2 gemma3 laguna lfm2 llama4 mellum modern-bert olmo2 phi3 plamo3 smallthinker"
        ),
        "attention.temperature_length": "deepseek2 mistral4",
        "attention.temperature_scale": "deepseek2 mistral3 mistral4",
        "attention.value_length": "plamo2",
        "attention.value_length_mla": "deepseek2 deepseek32 glm-dsa mistral4",
        "attention.value_scale": "mimo2",
        "attn_logit_softcapping": "gemma2",
        "decision.block_count": "modern-bert",
        "deepstack_mapping": "granite granite_swa",
        "dense_2_feat_in": "gemma-embedding",
        "dense_2_feat_out": "gemma-embedding",
        "dense_3_feat_in": "gemma-embedding",
        "dense_3_feat_out": "gemma-embedding",
        "embedding_scale": "granite granite_swa granitehybrid granitemoe minicpm",
        "expert_chunk_feed_forward_length": "grovemoe",
        "expert_feed_forward_length": (
            "gemma4 llada-moe nemotron_h nemotron_h_moe qwen2moe qwen35moe qwen3moe qwen3next qwen3vlmoe rnd1 "
            "smallthinker"
        ),
        "expert_gating_func": (
            "afmoe cohere2moe deepseek2 deepseek2-ocr dots1 glm-dsa glm4moe hy_v3 laguna minimax-m2 mistral4 "
            "smallthinker step35"
        ),
        "expert_shared_count": "cohere2moe exaone-moe laguna nemotron_h nemotron_h_moe",
        "expert_shared_feed_forward_length": (
            "bailingmoe2 bailingmoe3 cohere2moe exaone-moe granite granite_swa granitehybrid granitemoe "
            "hunyuan-moe hy_v3 laguna nemotron_h nemotron_h_moe qwen2moe qwen35moe qwen3next step35"
        ),
        "expert_weights_norm": (
            "afmoe bailingmoe bailingmoe2 bailingmoe3 cohere2moe deepseek2 deepseek2-ocr deepseek32 dots1 "
            "exaone-moe glm-dsa glm4moe hy_v3 laguna mistral4 nemotron_h nemotron_h_moe step35"
        ),
        "expert_weights_scale": (
            "afmoe bailingmoe bailingmoe2 bailingmoe3 cohere2moe deepseek deepseek2 deepseek2-ocr deepseek32 "
            "dots1 exaone-moe glm-dsa glm4moe hy_v3 kimi-linear laguna mistral4 nemotron_h nemotron_h_moe "
            "step35"
        ),
        "final_logit_softcapping": "gemma2 gemma3 gemma4 muse-glimmer",
        "hidden_activation": "modern-bert",
        "kda.safe_gate": "bailingmoe3",
        "leading_dense_block_count": (
            "afmoe bailingmoe bailingmoe2 deepseek deepseek2 deepseek2-ocr deepseek32 dots1 exaone-moe "
            "glm-dsa glm4moe kimi-linear lfm2moe mistral4"
        ),
        "logit_scale": "command-r granitehybrid minicpm",
        "moe_every_n_layers": "nomic-bert-moe",
        "moe_latent_size": "nemotron_h nemotron_h_moe",
        "n_deepstack_layers": "qwen3vl qwen3vlmoe",
        "rescale_every_n_layers": "rwkv6 rwkv6qwen2",
        "residual_scale": "granite granite_swa granitehybrid granitemoe minicpm",
        "rope.dimension_sections": (
            "bailingmoe3 deepseek32 ernie4_5 ernie4_5-moe glm-dsa glm4 glm4moe hunyuan-dense hunyuan_vl "
            "paddleocr"
        ),
        "rope.freq_base_swa": (
            "cohere2 cohere2moe exaone-moe gemma-embedding gemma2 gemma3n gemma4 gpt-oss maple mimo2 "
            "muse-glimmer spark2_5 step35"
        ),
        "rope.scaling.yarn_beta_fast": "mistral3",
        "rope.scaling.yarn_beta_slow": "mistral3",
        "rope.scaling.yarn_log_multiplier": "deepseek2 deepseek32 mistral3 mistral4",
        "ssm.dt_b_c_rms": "mamba",
        "swiglu_clamp_exp": "bailingmoe3 step35",
        "swiglu_clamp_shexp": "bailingmoe3 step35",
        "swin_norm": "chameleon",
        "token_shift_count": "arwkv7 rwkv6 rwkv6qwen2 rwkv7",
    }
)

_FORMS: Mapping[str, Form] = MappingProxyType(
    {key: form for form, keys in _KEYS.items() for key in keys.split()}
)
_ALSO: Mapping[str, frozenset[str]] = MappingProxyType(
    {key: frozenset(architectures.split()) for key, architectures in _ALSO_READ.items()}
)
# Read only where there are heads that they could be the lengths of.
_OF_HEADS = ("attention.key_length", "attention.value_length", "rope.dimension_count")


def check_types(keys: Keys, architecture: str, engine: EngineRule) -> None:
    """Compare the types of all values that the engine reads.

    Raises:
        LlmError: BAD_CHECKPOINT naming the key and its type.
    """
    also = [name for name, architectures in _ALSO.items() if architecture in architectures]
    counts = keys.value(f"{architecture}.attention.head_count")
    first = counts[0] if isinstance(counts, tuple) and counts else counts
    heads = _OF_HEADS if isinstance(first, int) and first > 0 else ()
    for name in (*_ALWAYS_READ.split(), *engine.keys, *engine.one_of, *also, *heads):
        check_type(keys, f"{architecture}.{name}", _FORMS[name])


def check_type(keys: Keys, key: str, form: Form) -> None:
    """The same for one value, which the engine reads only of some models."""
    found = keys.type_name(key)
    if found is not None and not _fits(found, form):
        keys.fail(key, f"has the type {found}; llama.cpp takes {form.value}")


def _fits(found: str, form: Form) -> bool:
    if form is Form.LIST:
        return not found.startswith("[") or found in _WHOLE  # what is no array is not looked at
    return found in _TYPES[form]
