"""Tensors that the metadata promise: the engine refuses a file whose tensors are others, and so do the facts.

Every width that is compared here follows from keys by which something is priced, so that no contradiction between
keys and tensors can change a price.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from lllm3090d.checkpoints.block_plan import BlockPlan
from lllm3090d.checkpoints.contents import Tensors, trimmed
from lllm3090d.checkpoints.engine_rules import (
    EngineRule,
    ExpertLength,
    Experts,
    Mixer,
    Rotation,
    Rows,
    SharedLength,
)
from lllm3090d.checkpoints.metadata import Keys
from lllm3090d.checkpoints.required_keys import expert_count, query_rank, vocabulary
from lllm3090d.checkpoints.state_shapes import STATE_TENSORS, Shape, StateWidths, state_shapes
from lllm3090d.checkpoints.tensor_infos import TensorInfo
from lllm3090d.checkpoints.tensor_names import TensorNames, check_block, check_outside, tensor_names

_ROPE_TABLES = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
# The key that tells most of the shape, where it is one.
_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "attn_q.weight": "attention.head_count",
        "attn_output.weight": "attention.head_count",
        "attn_k.weight": "attention.head_count_kv",
        "attn_v.weight": "attention.head_count_kv",
        "attn_qkv.weight": "attention.head_count_kv",
        "ffn_up.weight": "feed_forward_length",
        "ffn_gate.weight": "feed_forward_length",
        "ffn_down.weight": "feed_forward_length",
    }
)
_STATE_PREFIXES = ("ssm_", "shortconv.")


@dataclass(frozen=True, slots=True)
class Role:
    """What a block is for, as the facts see it.

    Attributes:
        attends: it has attention.
        owns_kv: with keys and values of its own.
        keeps_state: it has a recurrent state.
        in_trunk: it does not only predict further tokens.
    """

    attends: bool
    owns_kv: bool
    keeps_state: bool
    in_trunk: bool


@dataclass(frozen=True, slots=True)
class _Widths:
    """Widths of one block; blocks with the same have the same shapes."""

    heads: int
    kv_heads: int
    query_lengths: tuple[int, int]
    kv_lengths: tuple[int, int]
    feed_forward: int
    expert_length: int
    attends: bool
    keeps_state: bool


class ShapeCheck:
    """Compares the tensors of each block with what the metadata promise.

    Args:
        keys: the metadata.
        architecture: prefix of their names.
        engine: what the engine demands of it.
        tensors: of all shards.
        plan: of all blocks.
        embedding_length: values.
        per_layer_values: of the embedding that each layer has of its own, 0 without.
        mla: attention is multi-head latent attention in its absorbed form.
    """

    def __init__(
        self,
        keys: Keys,
        architecture: str,
        engine: EngineRule,
        tensors: Tensors,
        plan: BlockPlan,
        *,
        embedding_length: int,
        per_layer_values: int,
        mla: bool,
    ) -> None:
        """Read the widths. Raises LlmError: BAD_CHECKPOINT naming the key."""
        self._engine = engine
        self._tensors = tensors
        self._plan = plan
        self._embedding = embedding_length
        self._per_layer = per_layer_values
        self._known: dict[_Widths, Mapping[str, Shape]] = {}
        self._known_demands: dict[frozenset[str], frozenset[str]] = {}
        self._keys = keys
        self._prefix = architecture
        count = tensors.layer_count
        self._experts = expert_count(keys, architecture, engine)
        self._used = keys.per_layer(f"{architecture}.expert_used_count", count, (0,) * count, least=0)
        own = f"{architecture}.expert_feed_forward_length"
        unread = engine.expert_length is ExpertLength.DENSE
        self._own_expert = (0,) * count if unread else keys.per_layer(own, count, (0,) * count, least=0)
        self._shared_key = self._number("expert_shared_feed_forward_length")
        self._shared_count = self._number("expert_shared_count")
        self._names = tensor_names(architecture)
        of_leading = engine.experts is Experts.BEHIND_DENSE or (
            self._names is not None and self._names.tells_leading
        )
        self._leading_dense = self._number("leading_dense_block_count") if of_leading else 0
        self._expert_input = embedding_length
        if engine.narrow_experts:
            self._expert_input = self._number("moe_latent_size") or embedding_length
        self._rotated = rotated_values(keys, architecture, plan)
        self._mla_lengths = plan.head_lengths(0)
        if mla:
            self._mla_lengths = (
                self._number("attention.key_length_mla"),
                self._number("attention.value_length_mla"),
            )
        self._kv_rank = self._number("attention.kv_lora_rank")
        self._query_rank = query_rank(keys, architecture, engine, tensors.trunk_count)
        self._mla = mla
        # Of a file without a trunk the engine demands no tensor of it; by this norm it tells one.
        may_lack_it = (
            tensors.trunk_count < tensors.layer_count and self._names is not None and self._names.mtp_alone
        )
        self._has_trunk = not may_lack_it or "attn_norm.weight" in tensors.block(0)

    def check(self, index: int, role: Role) -> None:
        """Refuse a block that lacks a tensor, has one too many or one of another shape.

        Raises:
            LlmError: BAD_CHECKPOINT naming the tensor.
        """
        found = self._tensors.block(index)
        if not found:  # only of blocks that need not be there
            return
        self._check_surplus(index, role, found)
        expected = self._expected(index, role)
        for name, promised in expected.items():
            tensor = found.get(name)
            if tensor is None or tensor.shape == promised or trimmed(tensor.shape) == trimmed(promised):
                continue
            shape = list(tensor.shape)
            raise self._tensors.bad(
                f"blk.{index}.{name} has the shape {shape}, its metadata promise {list(promised)}",
                f"{self._prefix}.{_KEYS[name]}" if name in _KEYS else None,
            )
        if role.in_trunk:
            self._check_presence(index, role, found)
        if self._names is not None:
            self._check_names(index, role, found, self._names)

    def _number(self, name: str) -> int:
        return self._keys.number(f"{self._prefix}.{name}", 0)

    def _check_surplus(self, index: int, role: Role, found: Collection[str]) -> None:
        """The engine refuses tensors that it does not load; these show that the kind of a block is wrong."""
        if not role.keeps_state and any(name.startswith(_STATE_PREFIXES) for name in found):
            raise self._tensors.bad(f"block {index} has the tensors of a state, its metadata promise none")
        if not role.attends and self._engine.mixer is not Mixer.KDA and "attn_k.weight" in found:
            raise self._tensors.bad(f"block {index} has attn_k.weight, its metadata promise no attention")

    def _check_presence(self, index: int, role: Role, found: Collection[str]) -> None:
        needed: list[str] = []
        if role.attends and self._engine.latent:
            needed.append("attn_kv_a_mqa.weight")
            if self._query_rank and self._engine.mixer is not Mixer.KDA:
                needed += ("attn_q_a.weight", "attn_q_b.weight")
        elif role.attends and "attn_qkv.weight" not in found:
            needed.append("attn_q.weight")
            if role.owns_kv:
                needed.append("attn_k.weight")
                if not self._engine.shared_v:
                    needed.append("attn_v.weight")
        if role.keeps_state:
            needed += STATE_TENSORS[self._engine.mixer]
        match self._engine.experts:
            case Experts.BEHIND_DENSE:
                experts = index >= self._leading_dense
                needed.append("ffn_down_exps.weight" if experts else "ffn_down.weight")
            case Experts.IF_COUNTED:
                needed.append("ffn_down_exps.weight" if self._experts else "ffn_down.weight")
            case Experts.ANY:
                pass
        if self._per_layer:
            needed += ("inp_gate.weight", "proj.weight")
        for name in needed:
            if name not in found:
                raise self._tensors.bad(f"the metadata promise blk.{index}.{name}, which is missing")

    def _check_names(
        self, index: int, role: Role, found: Mapping[str, TensorInfo], names: TensorNames
    ) -> None:
        if role.in_trunk:
            demanded = self._demanded(index, role, names)
        else:
            demanded = names.mtp if self._tensors.has_mtp else frozenset()
        lengths = ((names.embedding, self._embedding), (names.key_length, self._plan.head_lengths(0)[0]))
        check_block(names, self._tensors, index, found, demanded=demanded, lengths=lengths)

    def _demanded(self, index: int, role: Role, names: TensorNames) -> frozenset[str]:
        if not self._has_trunk:
            return frozenset()
        conditions = self._conditions(index, role)
        known = self._known_demands.get(conditions)
        if known is None:
            known = self._known_demands[conditions] = names.demanded(conditions)
        return known

    def _conditions(self, index: int, role: Role) -> frozenset[str]:
        """By the names that the table of demanded tensors has for them."""
        dense = index < self._leading_dense
        holds = {
            "experts": self._experts > 0,
            "state": role.keeps_state,
            "attends": role.attends,
            "shared": self._shared_key > 0,
            "shared count": self._shared_count > 0,
            "mla": self._mla,
            "query rank": self._query_rank > 0,
        }
        named = {name if held else f"no {name}" for name, held in holds.items()}
        return frozenset(named | {"leading" if dense else "behind"})

    def _expected(self, index: int, role: Role) -> Mapping[str, Shape]:
        engine, plan = self._engine, self._plan
        of_heads = index if engine.heads_by_block else 0
        widths = _Widths(
            heads=plan.heads[of_heads],
            kv_heads=plan.kv_heads[of_heads],
            query_lengths=plan.head_lengths(index if engine.query_lengths_by_block else 0),
            kv_lengths=plan.head_lengths(index if engine.kv_lengths_by_block else 0),
            feed_forward=plan.feed_forward[index if engine.ffn_by_block else 0],
            expert_length=self._expert_length(index, role),
            attends=role.attends,
            keeps_state=role.keeps_state,
        )
        known = self._known.get(widths)
        if known is None:
            known = self._known[widths] = self._shapes(widths)
        return known

    def _shapes(self, widths: _Widths) -> Mapping[str, Shape]:
        shapes: dict[str, Shape] = {}
        if widths.attends:
            shapes |= self._latent(widths) if self._engine.latent else self._attention(widths)
        if widths.keeps_state:
            shapes |= self._state(widths)
        shapes |= self._feed_forward(widths)
        if self._per_layer:
            all_layers = self._per_layer * self._tensors.trunk_count
            shapes["per_layer_model_proj.weight"] = (self._embedding, all_layers)
            shapes["inp_gate.weight"] = (self._embedding, self._per_layer)
            shapes["proj.weight"] = (self._per_layer, self._embedding)
        return shapes

    def _rows(self, rows: Rows, widths: _Widths) -> int | None:
        match rows:
            case Rows.KEYS:
                return widths.heads * widths.query_lengths[0]
            case Rows.GATED:
                return 2 * widths.heads * widths.query_lengths[0]
            case Rows.VALUES:
                return widths.heads * widths.query_lengths[1]
            case Rows.EMBEDDING:
                return self._embedding
            case Rows.ROTATED:
                return widths.heads * self._rotated
            case Rows.ANY:
                return None

    def _attention(self, widths: _Widths) -> dict[str, Shape]:
        width = self._embedding
        k, v = (widths.kv_heads * length for length in widths.kv_lengths)
        shapes: dict[str, Shape] = {
            "attn_k.weight": (width, k),
            "attn_k.bias": (k,),
            "attn_v.weight": (width, v),
            "attn_v.bias": (v,),
        }
        queries = self._rows(self._engine.queries, widths)
        if queries is not None:
            shapes["attn_q.weight"] = (width, queries)
            shapes["attn_q.bias"] = (queries,)
            shapes["attn_qkv.weight"] = (width, queries + k + v)
            shapes["attn_qkv.bias"] = (queries + k + v,)
        outputs = self._rows(
            Rows.KEYS if self._engine.outputs is Rows.GATED else self._engine.outputs, widths
        )
        if outputs is not None:
            shapes["attn_output.weight"] = (outputs, width)
        return shapes

    def _latent(self, widths: _Widths) -> dict[str, Shape]:
        heads, rank, rotated = widths.heads, self._kv_rank, self._rotated
        k, v = self._mla_lengths
        return {
            "attn_q.weight": (self._embedding, heads * k),
            "attn_q_a.weight": (self._embedding, self._query_rank),
            "attn_q_b.weight": (self._query_rank, heads * k),
            "attn_kv_a_mqa.weight": (self._embedding, rank + rotated),
            "attn_k_b.weight": (k - rotated, rank, heads),
            "attn_v_b.weight": (rank, v, heads),
            "attn_kv_b.weight": (rank, heads * (k - rotated + v)),
            "attn_output.weight": (heads * v, self._embedding),
        }

    def _feed_forward(self, widths: _Widths) -> dict[str, Shape]:
        engine, width = self._engine, self._embedding
        dense = width if engine.square_ffn else widths.feed_forward
        shapes: dict[str, Shape] = {}
        if engine.up is not None:
            shapes["ffn_up.weight"] = (width, dense * engine.up // 2)
        if engine.gate is not None:
            shapes["ffn_gate.weight"] = (width, dense * engine.gate // 2)
            # Where up and gate are half as wide, so is what comes of them.
            shapes["ffn_down.weight"] = (dense * min(engine.gate, 2) // 2, width)
        expert, count, inputs = widths.expert_length, self._experts, self._expert_input
        shared = self._shared_length(widths)
        return shapes | {
            "ffn_gate_inp.weight": (width, count),
            "ffn_gate_exps.weight": (inputs, expert, count),
            "ffn_up_exps.weight": (inputs, expert, count),
            "ffn_gate_up_exps.weight": (inputs, 2 * expert, count),
            "ffn_down_exps.weight": (expert, inputs, count),
            "ffn_gate_shexp.weight": (width, shared),
            "ffn_up_shexp.weight": (width, engine.shared_up * shared),
            "ffn_down_shexp.weight": (shared, width),
        }

    def _expert_length(self, index: int, role: Role) -> int:
        engine = self._engine
        of = index if engine.expert_by_block else 0
        own, used = self._own_expert[of], self._used[of]
        dense = self._plan.feed_forward[of if role.in_trunk else 0]
        match engine.expert_length:
            case ExpertLength.OWN:
                return own
            case ExpertLength.OWN_OR_SHARE:
                return own or dense // max(used, 1)
            case ExpertLength.OWN_OR_DENSE:
                return own or dense
            case ExpertLength.DENSE:
                return dense

    def _shared_length(self, widths: _Widths) -> int:
        key, count, expert = self._shared_key, self._shared_count, widths.expert_length
        lengths = {
            SharedLength.KEY: key,
            SharedLength.COUNT: expert * count,
            SharedLength.AT_LEAST_ONE: expert * max(count, 1),
            SharedLength.EXPERT: expert,
            SharedLength.KEY_OR_COUNT: key or expert * count,
            SharedLength.KEY_OR_AT_LEAST_ONE: key or expert * max(count, 1),
            SharedLength.KEY_OR_EXPERT: key or expert,
            SharedLength.KEY_OR_DENSE: key or widths.feed_forward,
            SharedLength.KEY_OR_EXPERT_FOR_EACH: (key or expert) * count,
        }
        return lengths[self._engine.shared_length]

    def _state(self, widths: _Widths) -> Mapping[str, Shape]:
        return state_shapes(
            self._engine.mixer,
            StateWidths(
                embedding=self._embedding,
                kernel=self._number("ssm.conv_kernel"),
                inner=self._number("ssm.inner_size"),
                state=self._number("ssm.state_size"),
                groups=self._number("ssm.group_count"),
                rank=self._number("ssm.time_step_rank"),
                taps=self._number("shortconv.l_cache"),
                delta_heads=widths.heads,
                delta_length=self._number("kda.head_dim"),
            ),
        )


def check_tables(
    keys: Keys,
    architecture: str,
    engine: EngineRule,
    tensors: Tensors,
    *,
    embedding: int,
    rows: int,
    per_layer: int,
) -> None:
    """Compare the tables of tokens and of positions with the tokenizer and the widths.

    Args:
        keys: the metadata.
        architecture: prefix of their names.
        engine: what the engine demands.
        tensors: of all shards.
        embedding: its length.
        rows: of the token embedding.
        per_layer: values of the embedding that each layer has of its own, 0 without.

    Raises:
        LlmError: BAD_CHECKPOINT naming the tensor.
    """
    names = tensor_names(architecture)
    if names is not None:
        check_outside(names, tensors, embedding)
    tokens = vocabulary(keys, architecture)
    if tokens is not None and tokens != rows:
        raise tensors.bad(f"token_embd.weight has {rows} rows for {tokens} tokens")
    if engine.output_is_vocabulary:
        tensors.check_table("output.weight", (embedding, rows))
    tensors.check_table("position_embd.weight", (embedding, keys.number(f"{architecture}.context_length")))
    tensors.check_table(
        "per_layer_token_embd.weight", (per_layer * tensors.trunk_count, rows), required=per_layer > 0
    )


def check_rope_tables(engine: EngineRule, tensors: Tensors, plan: BlockPlan, rotated: int) -> None:
    """Compare the tables of RoPE factors with the values that are rotated.

    Raises:
        LlmError: BAD_CHECKPOINT naming the tensor.
    """
    if engine.rotation is Rotation.ROTATED:
        for name in _ROPE_TABLES:
            tensors.check_table(name, (rotated // 2,))
    elif engine.rotation is Rotation.KEY:
        tensors.check_table(_ROPE_TABLES[0], (plan.lengths[0] // 2,), required=not all(plan.slides))


def rotated_values(keys: Keys, architecture: str, plan: BlockPlan) -> int:
    """Values of a head that the engine rotates in the first block; 0 without heads."""
    if not plan.heads[0]:
        return 0
    rotated = keys.number(f"{architecture}.rope.dimension_count", plan.lengths[0])
    if plan.slides[0]:
        return keys.number(f"{architecture}.rope.dimension_count_swa", rotated)
    return rotated
