"""Keys without which the engine does not load a file, and values that it refuses.

What is optional for the engine is optional here. All functions raise LlmError: BAD_CHECKPOINT naming the key.
"""

from __future__ import annotations

from lllm3090d.checkpoints.block_plan import BlockPlan
from lllm3090d.checkpoints.engine_rules import SECTION_COUNT, SECTIONS, EngineRule, Mixer, Rotation
from lllm3090d.checkpoints.key_types import Form, check_type, check_types
from lllm3090d.checkpoints.metadata import Keys

MAX_EXPERTS = 1024  # LLAMA_MAX_EXPERTS of the engine
ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")
GATINGS = range(1, 5)  # softmax, sigmoid, softmax of the weights, square root of softplus
_ALWAYS = ("context_length", "embedding_length", "block_count")
_QUERY_RANK = "attention.q_lora_rank"
# Of these deepseek2 the engine takes the queries as they are, whatever the file says of their rank.
_LITE_BLOCKS = (26, 27)
_KANANA_BLOCKS, _KANANA_VOCABULARY = 48, 128_256


def check_keys(keys: Keys, architecture: str, engine: EngineRule) -> None:
    """All that the engine demands of this architecture, and values that it knows."""
    for name in (*_ALWAYS, *engine.keys):
        if keys.value(f"{architecture}.{name}") is None:
            keys.fail(f"{architecture}.{name}", "is missing")
    if engine.one_of and all(keys.value(f"{architecture}.{name}") is None for name in engine.one_of):
        keys.fail(f"{architecture}.{engine.one_of[0]}", "is missing")
    sections = f"{architecture}.{SECTIONS}"
    if SECTIONS in engine.keys and isinstance(keys.value(sections), tuple):
        keys.array(sections, SECTION_COUNT)
    scaling = f"{architecture}.rope.scaling.type"
    if keys.text(scaling, "none") not in ROPE_SCALINGS:
        keys.fail(scaling, f"is none of {', '.join(ROPE_SCALINGS)}")
    gating = f"{architecture}.expert_gating_func"
    if engine.gating and keys.number(gating) not in GATINGS:
        keys.fail(gating, f"is none of {GATINGS[0]} to {GATINGS[-1]}")
    _check_groups(keys, architecture, engine)
    check_types(keys, architecture, engine)


def expert_count(keys: Keys, architecture: str, engine: EngineRule) -> int:
    """Experts of a layer as the engine takes them."""
    count = keys.number(f"{architecture}.expert_count", 0, most=MAX_EXPERTS)
    return 0 if engine.one_expert_is_none and count <= 1 else count


def query_rank(keys: Keys, architecture: str, engine: EngineRule, blocks: int) -> int:
    """Values of a compressed query, 0 where queries are not compressed."""
    key = f"{architecture}.{_QUERY_RANK}"
    if engine.rank_unless_lite:
        if blocks in _LITE_BLOCKS or (
            blocks == _KANANA_BLOCKS and vocabulary(keys, architecture) == _KANANA_VOCABULARY
        ):
            return 0
        check_type(keys, key, Form.U32)
        return keys.number(key)
    reads_it = _QUERY_RANK in engine.keys or engine.mixer is Mixer.KDA
    return keys.number(key, 0) if reads_it else 0


def vocabulary(keys: Keys, architecture: str) -> int | None:
    """Tokens of the tokenizer; None where the file does not say."""
    if keys.value("tokenizer.ggml.model") in ("none", "no_vocab"):
        check_type(keys, f"{architecture}.vocab_size", Form.U32)
        return keys.number(f"{architecture}.vocab_size", 0)
    return keys.length("tokenizer.ggml.tokens")


def check_lengths(keys: Keys, architecture: str, engine: EngineRule, plan: BlockPlan, rotated: int) -> None:
    """Lengths of heads that the engine's graphs insist on."""
    key_length, value_length = plan.head_lengths(0)
    prefix = f"{architecture}."
    if engine.equal_heads and key_length != value_length:
        keys.fail(f"{prefix}attention.value_length", f"is {value_length}, keys have {key_length}")
    if engine.shared_v:
        for suffix, lengths in (("", plan.lengths), ("_swa", plan.sliding_lengths)):
            if lengths[0] != lengths[1]:
                key = f"{prefix}attention.value_length{suffix}"
                keys.fail(key, f"is {lengths[1]}, keys have {lengths[0]}")
    turned = f"{prefix}rope.dimension_count"
    if engine.rotates_keys and plan.heads[0] and keys.number(turned, plan.lengths[0]) != plan.lengths[0]:
        keys.fail(turned, f"is not the {plan.lengths[0]} of a key")
    if engine.rotation is Rotation.KEY and keys.number(turned, plan.lengths[0]) // 2 > plan.lengths[0] // 2:
        keys.fail(turned, f"is more than the {plan.lengths[0]} of a key")
    if engine.rotates_values and rotated != value_length:
        keys.fail(turned, f"is {rotated}, values have {value_length}")


def check_inner(keys: Keys, architecture: str, engine: EngineRule, embedding_length: int) -> None:
    """Inner sizes of a state that the engine insists on."""
    key = f"{architecture}.ssm.inner_size"
    if engine.inner_is_double and keys.number(key) != 2 * embedding_length:
        keys.fail(key, f"is not twice the embedding of {embedding_length}")
    if engine.inner_is_heads:
        state, heads = (
            keys.number(f"{architecture}.ssm.{name}") for name in ("state_size", "time_step_rank")
        )
        if keys.number(key) != state * heads:
            keys.fail(key, f"is not {heads} heads of {state}")


def _check_groups(keys: Keys, architecture: str, engine: EngineRule) -> None:
    """Groups of experts divide all of them evenly, and fewer are used than there are."""
    key, used_key = (f"{architecture}.expert_group_{name}" for name in ("count", "used_count"))
    groups, used = keys.number(key, 0), keys.number(used_key, 0)
    experts = expert_count(keys, architecture, engine)
    if groups and groups >= experts:
        keys.fail(key, f"is {groups} of {experts} experts")
    if groups > 1 and experts % groups:
        keys.fail(key, f"is {groups}, which does not divide {experts} experts")
    if groups > 1 and not 0 < used < groups:
        keys.fail(used_key, f"is {used} of {groups}")
