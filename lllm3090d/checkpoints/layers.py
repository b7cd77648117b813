"""The blocks of a checkpoint: how each keeps its context, how wide it is, and what it weighs."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from lllm3090d.checkpoints.architectures import Architecture, Periods, Recurrence, Sliding, State
from lllm3090d.checkpoints.block_plan import BlockPlan
from lllm3090d.checkpoints.contents import MAX_LAYERS, Tensors
from lllm3090d.checkpoints.engine_rules import ENGINE_RULES
from lllm3090d.checkpoints.key_types import Form, check_type
from lllm3090d.checkpoints.metadata import Keys
from lllm3090d.checkpoints.required_keys import check_inner, check_lengths
from lllm3090d.checkpoints.tensor_shapes import Role, ShapeCheck, check_rope_tables, rotated_values
from lllm3090d.checkpoints.weights import NO_WEIGHTS, BlockWeights

DEFAULT_FULL_ATTENTION_INTERVAL = 4
DEFAULT_TOKEN_SHIFTS = 2
LEAST_KV_OWNERS = 2
SIGN = 1 << 31
DEFAULT_CONVOLUTIONS = 3  # of delta attention, where the file does not say


class LayerKind(enum.StrEnum):
    """How a layer keeps its context."""

    FULL = "full"  # attention over the whole context
    SLIDING = "sliding"  # attention over a window
    LATENT = "latent"  # multi-head latent attention: one compressed row, no values
    SHARED = "shared"  # attention over the cache of an earlier layer
    RECURRENT = "recurrent"  # a state of fixed size
    NONE = "none"  # nothing: a feed-forward layer, or a model without memory


KV_OWNERS = frozenset({LayerKind.FULL, LayerKind.SLIDING, LayerKind.LATENT})


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """One block.

    Attributes:
        kind: how it keeps its context.
        head_count: query heads.
        key_length, value_length: values per head.
        k_values: values of one K row of its cache, KV heads times key length; 0 without a cache of its own.
        v_values: values of one V row of its cache.
        weights: bytes of its tensors by use.
        index_values: values of the row that a sparse-attention indexer caches beside it.
        conv_values, state_values: f32 values that it keeps for each sequence, whatever the context.
        feed_forward_length: width of its dense feed-forward network, 0 without one.
        feed_forward_gated: that network has a gate.
        experts_used: experts that compute a token, 0 without experts.
        expert_length: width of one expert.
        experts_gated: the experts have a gate.
        is_mtp: it predicts a further token and belongs to no trunk.
        in_main_context: its cache is in the main context; of a block for multi-token prediction it is so only
            with some hybrids, where nothing uses it there.
    """

    kind: LayerKind
    head_count: int
    key_length: int
    value_length: int
    k_values: int
    v_values: int
    weights: BlockWeights = NO_WEIGHTS
    index_values: int = 0
    conv_values: int = 0
    state_values: int = 0
    feed_forward_length: int = 0
    feed_forward_gated: bool = True
    experts_used: int = 0
    expert_length: int = 0
    experts_gated: bool = False
    is_mtp: bool = False
    in_main_context: bool = True

    @property
    def owns_kv(self) -> bool:
        """It has an attention cache of its own."""
        return self.kind in KV_OWNERS

    @property
    def keeps_state(self) -> bool:
        """It has a recurrent state."""
        return self.conv_values + self.state_values > 0

    @property
    def weight_bytes(self) -> int:
        """Bytes of all its tensors in the file."""
        return self.weights.all.stored


@dataclass(frozen=True, slots=True)
class StateSpace:
    """Widths of a state-space or linear-attention layer: values, and heads."""

    inner: int
    state: int
    groups: int
    heads: int


def read_layers(
    keys: Keys,
    architecture: str,
    rule: Architecture,
    tensors: Tensors,
    embedding_length: int,
    *,
    per_layer_values: int = 0,
) -> tuple[tuple[LayerFacts, ...], int]:
    """All blocks, those for multi-token prediction last, and the widest V row of any of them.

    The second is the width of every V row without flash attention. ``per_layer_values`` are those of the embedding
    that each layer has of its own.

    Raises:
        LlmError: BAD_CHECKPOINT naming the key or the tensor.
    """
    count, trunk = tensors.layer_count, tensors.trunk_count
    plan = _plan(keys, architecture, rule, tensors, embedding_length)
    engine = ENGINE_RULES.get(architecture)  # none of drafters
    experts = keys.number(f"{architecture}.expert_count", 0)
    used_key = f"{architecture}.expert_used_count"
    used = keys.per_layer(used_key, count, (0,) * count, least=0)
    if engine is not None and engine.one_expert_is_none and experts <= 1:
        experts, used = 0, (0,) * count
    if max(used) > experts or (experts and not max(used)):
        keys.fail(used_key, f"is {max(used)} of {experts} experts")
    conv, state = _state_values(keys, architecture, rule, plan.heads, embedding_length)
    latent = rule.may_be_latent and is_latent(keys, architecture)
    indexed = _indexed(keys, architecture, rule, trunk, count)
    owners = _kv_owners(keys, architecture, rule, count, plan.slides)
    shapes = None
    if engine is not None:
        check_lengths(keys, architecture, engine, plan, rotated_values(keys, architecture, plan))
        check_inner(keys, architecture, engine, embedding_length)
        check_rope_tables(engine, tensors, plan, rotated_values(keys, architecture, plan))
        shapes = ShapeCheck(
            keys,
            architecture,
            engine,
            tensors,
            plan,
            embedding_length=embedding_length,
            per_layer_values=per_layer_values,
            mla=latent,
        )
    layers: list[LayerFacts] = []
    kv_key = f"{architecture}.attention.head_count_kv"
    for i in range(count):
        k_length, v_length = plan.head_lengths(i)
        kind = _kind(rule, plan, i, latent=latent, owner=i < owners, trunk=i < trunk)
        owns = kind in KV_OWNERS
        keeps_state = i < trunk and plan.recurrent[i]
        if owns and k_length == 0:
            keys.fail(f"{architecture}.attention.head_count", f"is 0, yet block {i} has attention")
        down, experts_down = tensors.shape(i, "ffn_down.weight"), tensors.shape(i, "ffn_down_exps.weight")
        width = down[0] if down else 0
        if width and not plan.feed_forward[i if engine is None or engine.ffn_by_block else 0]:
            keys.fail(f"{architecture}.feed_forward_length", f"is 0, yet block {i} has {width} values")
        if shapes is not None:
            attends = owns or kind is LayerKind.SHARED or (not rule.has_memory and plan.kv_heads[i] > 0)
            shapes.check(i, Role(attends, owns or not rule.has_memory, keeps_state, i < trunk))
        # The rows that are cached are those that come out of the projections, whichever block gave their width.
        if engine is not None and engine.ignores_cache:
            pass
        elif owns and latent:
            tensors.check_rows(i, "attn_kv_a_mqa", plan.kv_heads[i] * k_length, kv_key)
        elif owns:
            tensors.check_rows(i, "attn_k", plan.kv_heads[i] * k_length, kv_key)
            tensors.check_rows(i, "attn_v", plan.kv_heads[i] * v_length, kv_key)
        up = tensors.shape(i, "ffn_up.weight")
        layers.append(
            LayerFacts(
                kind=kind,
                head_count=plan.heads[i],
                key_length=k_length,
                value_length=v_length,
                k_values=plan.kv_heads[i] * k_length if owns else 0,
                v_values=plan.kv_heads[i] * v_length if owns and not latent else 0,
                weights=tensors.block_weights(i, recurrent=keeps_state and not owns),
                index_values=indexed[i],
                conv_values=conv if keeps_state else 0,
                state_values=state if keeps_state else 0,
                feed_forward_length=width,
                feed_forward_gated=tensors.shape(i, "ffn_gate.weight") is not None
                or (up is not None and len(up) > 1 and up[1] == 2 * width),
                experts_used=used[i] if experts_down else 0,
                expert_length=experts_down[0] if experts_down else 0,
                experts_gated=any(
                    tensors.shape(i, f"ffn_{gate}_exps.weight") for gate in ("gate", "gate_up")
                ),
                is_mtp=i >= trunk,
                in_main_context=i < trunk or _mtp_in_context(rule, plan, i),
            )
        )
    widest = max(plan.kv_heads[i] * plan.head_lengths(i)[1] for i in range(count))
    once: dict[LayerFacts, LayerFacts] = {}  # most are equal; the facts of a whole library are kept
    return tuple(once.setdefault(layer, layer) for layer in layers), widest


def is_latent(keys: Keys, architecture: str) -> bool:
    """The file has multi-head latent attention in its absorbed form; both lengths or neither."""
    names = [f"{architecture}.attention.{side}_length_mla" for side in ("key", "value")]
    lengths = [keys.number(name, 0) for name in names]
    if (lengths[0] == 0) is not (lengths[1] == 0):
        keys.fail(names[lengths.index(0)], "is missing, its counterpart is not")
    return lengths[0] > 0


def state_space(keys: Keys, architecture: str, rule: Architecture) -> StateSpace | None:
    """Widths of the state-space layers; None where there are none."""
    has_states = rule.state in (State.MAMBA, State.MAMBA_GROUPS)
    return _state_space(keys, architecture, rule) if has_states else None


def _state_space(keys: Keys, architecture: str, rule: Architecture) -> StateSpace:
    prefix = f"{architecture}.ssm."
    return StateSpace(
        inner=keys.number(prefix + "inner_size", least=1),
        state=keys.number(prefix + "state_size", least=1),
        groups=keys.number(prefix + "group_count") if rule.state is State.MAMBA_GROUPS else 0,
        heads=keys.number(prefix + "time_step_rank", least=1),
    )


def _plan(
    keys: Keys, architecture: str, rule: Architecture, tensors: Tensors, embedding_length: int
) -> BlockPlan:
    count = tensors.layer_count
    prefix = f"{architecture}.attention."
    all_recurrent = rule.recurrence is Recurrence.ALL
    may_lack_heads = rule.recurrence is not None or rule.blank_layers
    least = 0 if may_lack_heads else 1
    no_heads = (0,) * count if all_recurrent else None
    heads = keys.per_layer(prefix + "head_count", count, no_heads, least=least)
    kv_heads = keys.per_layer(prefix + "head_count_kv", count, heads, least=least)
    # The engine's defaults: the embedding shared out over the heads of the first layer.
    default_length = embedding_length // heads[0] if heads[0] else 0
    if default_length == 0 and heads[0] and not all_recurrent:
        keys.fail(prefix + "head_count", f"is {heads[0]}, more than the embedding length {embedding_length}")
    lengths = (
        (
            keys.number(prefix + "key_length", default_length, least=1),
            # Latent attention caches no values.
            keys.number(prefix + "value_length", default_length, least=0 if rule.may_be_latent else 1),
        )
        if heads[0]
        else (0, 0)
    )
    return BlockPlan(
        heads=heads,
        kv_heads=kv_heads,
        feed_forward=keys.per_layer(f"{architecture}.feed_forward_length", count, (0,) * count, least=0),
        slides=_sliding(keys, architecture, rule, tensors, kv_heads),
        recurrent=_recurrent(keys, architecture, rule, tensors, kv_heads),
        lengths=lengths,
        sliding_lengths=(
            keys.number(prefix + "key_length_swa", lengths[0], least=1),
            keys.number(prefix + "value_length_swa", lengths[1], least=1),
        )
        if rule.sliding
        else lengths,
    )


def window_tokens(keys: Keys, architecture: str, sliding: Sliding | None, trunk: int) -> int:
    """Window of the sliding layers; 0 where there are none."""
    if sliding is None or (sliding.trunk_blocks is not None and trunk != sliding.trunk_blocks):
        return 0
    key = f"{architecture}.attention.sliding_window"
    window = keys.number(key, None if sliding.required else sliding.default_tokens or 0)
    if sliding.required and window == 0:
        keys.fail(key, "is 0, yet the architecture has sliding layers")
    return sliding.fixed_tokens if window and sliding.fixed_tokens else window


def _sliding(
    keys: Keys, architecture: str, rule: Architecture, tensors: Tensors, kv_heads: Sequence[int]
) -> tuple[bool, ...]:
    """Which layers slide: by the array in the file, else the period in the file, else the engine's period.

    A period of n leaves every n-th layer dense, and 0 none.
    """
    count, trunk, sliding = tensors.layer_count, tensors.trunk_count, rule.sliding
    dense = (False,) * count
    if sliding is None or window_tokens(keys, architecture, sliding, trunk) == 0:
        return dense
    if sliding.layers is Periods.ALL:
        return tuple(i < trunk and kv_heads[i] > 0 for i in range(count))
    pattern = f"{architecture}.attention.sliding_window_pattern"
    if sliding.layers is not Periods.ARRAY:
        check_type(keys, pattern, Form.U32_EACH)
    single = isinstance(keys.value(pattern), int | float | str | None)
    if single and sliding.layers is not Periods.ARRAY:
        period = keys.number(pattern, sliding.period)
        dense_at = 0 if sliding.layers is Periods.DENSE_FIRST else period - 1
        slides = tuple(i < trunk and (period == 0 or i % period != dense_at) for i in range(count))
    else:
        if keys.value(pattern) is None:
            keys.fail(pattern, "is missing")
        # Some converters leave the blocks behind the trunk out; the engine takes any length.
        found = keys.some_flags(pattern, MAX_LAYERS)[:count]
        slides = found + (False,) * (count - len(found))
    if not any(slides):
        keys.fail(pattern, "leaves no layer with the sliding window; the engine aborts on such a file")
    return slides


def _recurrent(
    keys: Keys, architecture: str, rule: Architecture, tensors: Tensors, kv_heads: Sequence[int]
) -> tuple[bool, ...]:
    count, trunk = tensors.layer_count, tensors.trunk_count
    match rule.recurrence:
        case None:
            return (False,) * count
        case Recurrence.ALL | Recurrence.BESIDE_ATTENTION:
            return (True,) * count
        case Recurrence.NO_KV_HEADS:
            return tuple(i < trunk and kv_heads[i] == 0 for i in range(count))
        case Recurrence.NO_KV_HEADS_NO_FFN:
            wide = keys.per_layer(f"{architecture}.feed_forward_length", count, (0,) * count, least=0)
            return tuple(i < trunk and kv_heads[i] == 0 and wide[i] == 0 for i in range(count))
        case Recurrence.INTERVAL:
            named = f"{architecture}.attention.recurrent_layers"
            if keys.value(named) is not None:
                return keys.flags(named, (count,))
            key = f"{architecture}.full_attention_interval"
            check_type(keys, key, Form.U32)
            interval = keys.number(key, DEFAULT_FULL_ATTENTION_INTERVAL, least=1)
            return tuple(i < trunk and (i + 1) % interval != 0 for i in range(count))


def _state_values(
    keys: Keys, architecture: str, rule: Architecture, heads: Sequence[int], embedding_length: int
) -> tuple[int, int]:
    """f32 values of convolution and state that one recurrent layer keeps for one sequence."""
    match rule.state:
        case None:
            return 0, 0
        case State.MAMBA | State.MAMBA_GROUPS:
            widths = _state_space(keys, architecture, rule)
            kernel = keys.number(f"{architecture}.ssm.conv_kernel", least=1)
            channels = widths.inner + 2 * widths.groups * widths.state
            return (kernel - 1) * channels, widths.state * widths.inner
        case State.SHORT_CONVOLUTION:
            kernel = keys.number(f"{architecture}.shortconv.l_cache", least=1)
            return embedding_length * (kernel - 1), 0
        case State.WKV:
            shifts = keys.number(f"{architecture}.token_shift_count", DEFAULT_TOKEN_SHIFTS)
            head = keys.number(f"{architecture}.wkv.head_size", least=1)
            return shifts * embedding_length, embedding_length * head
        case State.DELTA:
            head = keys.number(f"{architecture}.kda.head_dim", least=1)
            kernel = keys.number(f"{architecture}.ssm.conv_kernel")
            taps = kernel - 1 if kernel else DEFAULT_CONVOLUTIONS
            return 3 * taps * heads[0] * head, head * head * heads[0]


def _kind(
    rule: Architecture, plan: BlockPlan, index: int, *, latent: bool, owner: bool, trunk: bool
) -> LayerKind:
    if not rule.has_memory:
        return LayerKind.NONE
    attends = plan.kv_heads[index] > 0 and rule.recurrence is not Recurrence.ALL
    if rule.recurrence is Recurrence.NO_KV_HEADS_NO_FFN and trunk:
        attends = not plan.recurrent[index] and plan.feed_forward[index] == 0
    elif rule.recurrence in (Recurrence.NO_KV_HEADS, Recurrence.NO_KV_HEADS_NO_FFN, Recurrence.INTERVAL):
        attends = not (trunk and plan.recurrent[index])
    if not attends:
        return LayerKind.RECURRENT if trunk and plan.recurrent[index] else LayerKind.NONE
    if not owner:
        return LayerKind.SHARED
    if latent:
        return LayerKind.LATENT
    return LayerKind.SLIDING if plan.slides[index] else LayerKind.FULL


def _mtp_in_context(rule: Architecture, plan: BlockPlan, index: int) -> bool:
    one_mixer = rule.recurrence is Recurrence.NO_KV_HEADS_NO_FFN
    return rule.mtp_in_context and not (one_mixer and plan.feed_forward[index])


def _kv_owners(keys: Keys, architecture: str, rule: Architecture, count: int, slides: Sequence[bool]) -> int:
    """So many layers from the first have a cache of their own.

    Of the last two of them, the others share the first if they slide and the second if they do not.
    """
    key = f"{architecture}.attention.shared_kv_layers"
    owners = count if rule.kv_layers is None else min(rule.kv_layers, count)
    if rule.shares_kv:
        shared = keys.number(key, 0)
        if shared <= SIGN:  # the engine takes larger ones for negative: then none is shared
            owners = count - keys.number(key, 0, most=max(count - LEAST_KV_OWNERS, 0))
    for i in range(owners, count):
        source = owners - 2 if slides[i] else owners - 1
        if slides[source] is not slides[i]:
            keys.fail(key, f"lets block {i} share the cache of block {source}, which is of the other kind")
    return owners


def _indexed(keys: Keys, architecture: str, rule: Architecture, trunk: int, count: int) -> tuple[int, ...]:
    """Values that the indexer of each layer caches."""
    if not rule.indexer:
        return (0,) * count
    values = keys.number(f"{architecture}.attention.indexer.key_length", least=1)
    full = (True,) * trunk
    if architecture == "glm-dsa":  # only its full indexers have a cache
        full = keys.flags(f"{architecture}.attention.indexer.types", (trunk,))
    return tuple(values if i < trunk and full[i] else 0 for i in range(count))
