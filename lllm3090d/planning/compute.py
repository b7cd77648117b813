"""What a launch needs beside weights and cache: one function for each term. Pure.

The graph formulas are those of llama.cpp b11434 with flash attention on, found in its source and held
against its dry runs: within 3 % for the architectures served here, and never short once the margin is added.

T is the number of tokens of the graph, U = 4 T bytes one f32 value for each of them, E the embedding length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType

from lllm3090d.checkpoints.facts import CheckpointFacts, Graph, LayerFacts, LayerKind
from lllm3090d.engines.capabilities import Backend
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.planning import encoder_compute
from lllm3090d.planning.cache import CacheShape, CacheType, layer_row_bytes
from lllm3090d.planning.layer_groups import REMEMBERED_CHECKPOINTS, trunk_groups
from lllm3090d.planning.units import MIB, round_up

F32_BYTES = 4
F16_BYTES = 2
RESIDUAL_COPIES = 4  # tensors of E values per token alive on both sides of the split between host and card
CPU_RESIDUAL_COPIES = 5  # the same when everything is computed in one place
ROTATION_LEAST_VALUES = 64  # a quantised cache is rotated when this divides the head size
V_ROTATION_VALUES = 64  # side of the matrix that rotates V
# Tensors as wide as the queries that are alive at once, where the plain rule does not hold; found in the graphs.
QUERY_COPIES: Mapping[Graph, int] = MappingProxyType(
    {Graph.GATED_ATTENTION: 5, Graph.THREE_QUERIES: 3, Graph.TWO_QUERIES: 2}
)
# Residuals that per-layer embeddings need beside them.
PER_LAYER_RESIDUALS: Mapping[Graph, int] = MappingProxyType({Graph.PER_LAYER_EMBEDDINGS: 4, Graph.ALTUP: 5})
PARALLEL_MIXER_RESIDUALS = 4  # found with large batches, where the allocator packs two mixers worst
ALTUP_LOGITS_RESIDUALS = 6  # beside all logits on a card, where nothing else is alive then
CPU_STATE_SLOTS = 4  # up to here the CPU computes Mamba-2 with one copy of the states
F32_CACHE_COPIES = 3  # of one layer that are alive at once, where an f32 cache is converted to f16

# Memory of a process that no graph shows: device context, BLAS workspace, pools, recorded graphs.
# Vulkan: 0.4 GiB measured on a Radeon RX 7900 XTX. CUDA: Vulkan's and the 230 MiB by which it was larger on
# an RTX 3090.
RUNTIME_BYTES: Mapping[Backend, int] = MappingProxyType(
    {Backend.CPU: 0, Backend.VULKAN: 410 * MIB, Backend.CUDA: 640 * MIB}
)
SECOND_CONTEXT_BYTES = 154 * MIB  # of the device, for the context of a draft
# Host tensors that large batches copy to the card at once: found in dry runs with layers and experts there.
HOST_TENSOR_COPIES = 2
SHARED_CACHE_OWNERS = 2  # one that slides and one that does not
LONG_CONTEXT_TOKENS = 65_536
PROCESS_BYTES = 300 * MIB  # host memory of a llama-server: code, heap, vocabulary, threads, HTTP; judgement


@dataclass(frozen=True, slots=True)
class Margins:
    """What is charged beside what is known of a launch.

    Attributes:
        compute_buffer_factor: on the formulas of the graphs, for a card or build that needs more than they say.
        compute_percent: of a graph; with one E x U more it covers every dry run of the engine for these
            architectures.
        compute_residuals: times E x U.
        slack_mib: what nobody has accounted for; judgement.
        long_context_slack_mib: the same from 65,536 tokens on, where every error is multiplied by many; judgement.
    """

    compute_buffer_factor: float = 1.0
    compute_percent: int = 5
    compute_residuals: int = 1
    slack_mib: int = 128
    long_context_slack_mib: int = 512


DEFAULT_MARGINS = Margins()


def graph_tokens(shape: CacheShape) -> int:
    """T: tokens of the largest graph, the same number for every slot."""
    return round_up(min(shape.context_tokens, shape.micro_batch_tokens), shape.slots)


def _rotation_bytes(layers: Sequence[LayerFacts], type_k: CacheType, type_v: CacheType) -> int:
    """Matrices that rotate the rows of one quantised cache; heads of several lengths are not rotated."""
    keys = {layer.key_length for layer in layers}
    values = {layer.value_length for layer in layers if layer.v_values}
    rotations = 0
    if type_k.is_quantised and len(keys) == 1:
        length = keys.pop()
        side = length & -length  # the greatest power of two that divides it: the lowest bit that is set
        rotations += side * side * F32_BYTES if side >= ROTATION_LEAST_VALUES else 0
    if type_v.is_quantised and len(values) == 1 and values.pop() % V_ROTATION_VALUES == 0:
        rotations += V_ROTATION_VALUES**2 * F32_BYTES
    return rotations


def mask_bytes(facts: CheckpointFacts, shape: CacheShape, type_k: CacheType, type_v: CacheType) -> int:
    """Inputs of attention for each kind of cache: an f16 mask and, where it is quantised, rotation matrices.

    A stream sees its share of the tokens, so the masks of all streams together have cells x T values.
    """
    size = 0
    for kinds in ((LayerKind.FULL, LayerKind.LATENT), (LayerKind.SLIDING,)):
        layers = [group.layer for group in trunk_groups(facts) if group.layer.kind in kinds]
        if layers:
            size += shape.cells(kinds[0]) * graph_tokens(shape) * F16_BYTES
            size += _rotation_bytes(layers, type_k, type_v)
    return size


def _values_bytes(shape: CacheShape, values: int) -> int:
    """Bytes of so many f32 values for each token of the graph."""
    return values * F32_BYTES * graph_tokens(shape)


def _residual_bytes(facts: CheckpointFacts, shape: CacheShape, copies: int) -> int:
    return _values_bytes(shape, copies * facts.embedding_length)


def _feed_forward_values(facts: CheckpointFacts, layer: LayerFacts) -> int:
    """Values per token of a feed-forward network: gate, up and their product, and what experts give back."""
    dense = (3 if layer.feed_forward_gated else 2) * layer.feed_forward_length
    used, width, embedding = layer.experts_used, layer.expert_length, facts.embedding_length
    if not used:
        return dense
    if not layer.experts_gated:
        return max(dense, used * width + (used + 1) * embedding)
    # Where two expert rows are shorter than the embedding, the results do not fit into what they free.
    results = used * embedding if 2 * width < embedding else 0
    return max(dense, 3 * used * width + results)


def _state_values(facts: CheckpointFacts) -> int:
    """Values per token of a state-space or linear-attention layer, without the state itself."""
    widths = facts.state_space
    if widths is None:
        return 0
    if not widths.groups:  # Mamba-1
        return 4 * widths.inner + widths.heads + 2 * widths.state
    channels = widths.inner + 2 * widths.groups * widths.state
    if facts.rule.graph is Graph.GATED_ATTENTION:  # GatedDeltaNet
        return 2 * channels + 2 * widths.inner
    return widths.inner + channels + widths.heads + 2 * channels + widths.inner


def _body_bytes(facts: CheckpointFacts, shape: CacheShape, *, on_cpu: bool = False) -> int:
    """The widest feed-forward network or state-space part; the latter holds the states of all slots.

    On the CPU, Mamba-1 keeps another row of its inner width, and Mamba-2 copies the states of many slots.
    """
    widths = facts.state_space
    copies, more = 1, 0
    if on_cpu and widths is not None and facts.rule.graph is not Graph.GATED_ATTENTION:
        copies = 1 if shape.slots <= CPU_STATE_SLOTS or not widths.groups else 2
        more = 0 if widths.groups else widths.inner
    states = shape.slots * shape.state_planes * F32_BYTES * copies
    return max(
        max(
            _values_bytes(shape, _feed_forward_values(facts, group.layer)),
            _values_bytes(shape, _state_values(facts) + more) + states * group.layer.state_values
            if group.layer.keeps_state
            else 0,
        )
        for group in trunk_groups(facts)
    )


@lru_cache(maxsize=REMEMBERED_CHECKPOINTS)
def _attention_values(facts: CheckpointFacts) -> int:
    """Queries of the widest layer, as often as they are alive at once; latent attention widens them."""
    attending = [layer for layer in facts.trunk if layer.owns_kv or layer.kind is LayerKind.SHARED]
    if not attending:
        return 0
    widest = max(attending, key=lambda layer: layer.head_count * layer.key_length)
    queries = widest.head_count * widest.key_length
    if facts.latent is not None:
        compressed = facts.latent.rank + facts.latent.query_length - facts.latent.rotated_length
        return queries + widest.head_count * compressed
    copies = QUERY_COPIES.get(facts.rule.graph)
    if copies is None:
        # Queries wider than the embedding get a tensor of their own; far wider ones of Gemma 4, two.
        is_gemma4 = facts.rule.graph is Graph.PER_LAYER_EMBEDDINGS and not facts.per_layer_embedding_values
        is_far = is_gemma4 and queries > 2 * facts.embedding_length
        copies = 1 + (queries > facts.embedding_length) + is_far
    return copies * queries


def logits_bytes(facts: CheckpointFacts, outputs: int) -> int:
    """One f32 for each word of the vocabulary and each output; the server asks for one output per slot.

    ``llama-fit-params`` assumes a whole micro batch of outputs instead and reports far more.
    """
    return outputs * facts.vocabulary_size * F32_BYTES


def server_outputs(shape: CacheShape, draft_tokens: int = 0, *, every_token: bool = False) -> int:
    """Outputs of one micro batch: one for each slot, and one more for each token of a draft.

    For vectors every token is one (``server_output_limits`` of b11434).
    """
    if every_token:
        return graph_tokens(shape)
    return shape.slots * (1 + draft_tokens)


def f16_copies_bytes(
    facts: CheckpointFacts, shape: CacheShape, type_k: CacheType, type_v: CacheType, backend: Backend
) -> int:
    """f16 copies of K and V of the largest layer: of an f32 side everywhere, on CUDA of all that is not f16."""

    def copies(cache_type: CacheType) -> int:
        if cache_type is CacheType.F32:
            return F32_CACHE_COPIES
        return int(backend is Backend.CUDA and cache_type is not CacheType.F16)

    def values(layer: LayerFacts) -> int:
        # Latent attention reads V out of the K rows, and converts f32 ones again.
        latent_v = layer.value_length if facts.latent is not None and type_k is CacheType.F32 else 0
        return copies(type_k) * layer.k_values + copies(type_v) * (layer.v_values or latent_v)

    return max(
        (
            shape.cells(group.layer.kind) * shape.streams * F16_BYTES * values(group.layer)
            for group in trunk_groups(facts)
        ),
        default=0,
    )


def largest_layer_cache_bytes(
    facts: CheckpointFacts, shape: CacheShape, type_k: CacheType, type_v: CacheType
) -> int:
    """K and V of the largest layer: copied to where attention is computed, if that is not where they are."""
    return max(
        (
            shape.cells(group.layer.kind) * shape.streams * layer_row_bytes(group.layer, type_k, type_v)
            for group in trunk_groups(facts)
        ),
        default=0,
    )


def host_cache_copy_bytes(
    facts: CheckpointFacts,
    shape: CacheShape,
    types: tuple[CacheType, CacheType],
    *,
    first_on_card: int,
    cache_on_host: bool,
) -> int:
    """What attention on a card copies of caches in host memory; an upper bound, found in dry runs and on Vulkan.

    With ``--no-kv-offload`` that is K and V of one layer at a time, which latent attention reads twice. Layers that
    share the cache of an earlier one follow each other without a step in host memory between them, so the copies of all
    of them are alive together.

    Args:
        facts: the checkpoint.
        shape: of the context.
        types: of K and V.
        first_on_card: index of the first block on the card.
        cache_on_host: ``--no-kv-offload``.
    """

    def size(layer: LayerFacts) -> int:
        return shape.cells(layer.kind) * shape.streams * layer_row_bytes(layer, *types)

    reads = 2 if facts.latent is not None else 1
    copied = reads * largest_layer_cache_bytes(facts, shape, *types) if cache_on_host else 0
    shared = [index for index, layer in enumerate(facts.layers) if layer.kind is LayerKind.SHARED]
    # They read the caches of the two layers before the first of them.
    if not shared or not (cache_on_host or first_on_card > shared[0] - SHARED_CACHE_OWNERS):
        return copied
    owners = [layer for layer in facts.trunk if layer.owns_kv]
    sliding = max((size(layer) for layer in owners if layer.kind is LayerKind.SLIDING), default=0)
    whole = [size(layer) for layer in owners if layer.kind is not LayerKind.SLIDING]
    reading = sum(index >= first_on_card for index in shared)
    # As many of them as of the owners read a whole context, and at most one more.
    wide = min(reading, -(-reading * len(whole) // len(owners)) + 1) if whole else 0
    return copied + wide * max(whole, default=0) + reading * sliding


def _per_layer_embeddings_bytes(facts: CheckpointFacts, shape: CacheShape, residuals: int) -> int:
    """Embeddings of their own that the layers get: all of them at once, and some residuals more."""
    each = facts.per_layer_embedding_values
    if not each:
        return 0
    count = sum(group.count for group in trunk_groups(facts))
    return _values_bytes(shape, each * count + residuals * facts.embedding_length)


def _check_graph(facts: CheckpointFacts) -> None:
    if facts.rule.graph is Graph.NONE:
        raise LlmError(
            ErrorCode.UNSUPPORTED_ARCHITECTURE,
            f"What {facts.architecture} needs to compute cannot be priced:"
            " nobody has found a formula for its graph.",
            hint="Choose a model of another architecture.",
            architecture=facts.architecture,
        )


def _widest_bytes(
    facts: CheckpointFacts, shape: CacheShape, outputs: int, *, copies_bytes: int = 0, on_cpu: bool = False
) -> int:
    """The largest of body, attention and logits."""
    mixers = _mixers_bytes(facts, shape, copies_bytes=copies_bytes, on_cpu=on_cpu)
    return max(mixers, logits_bytes(facts, outputs))


def _mixers_bytes(
    facts: CheckpointFacts, shape: CacheShape, *, copies_bytes: int = 0, on_cpu: bool = False
) -> int:
    """The larger of body and attention; where both mixers run side by side, their sum.

    Side by side, what attention left behind is in the way of the other mixer: a card then needs as much as four
    residuals more, unless the f16 copies have already made that room.
    """
    body = _body_bytes(facts, shape, on_cpu=on_cpu)
    attention = _values_bytes(shape, _attention_values(facts)) + copies_bytes
    if _has_parallel_mixers(facts):
        in_the_way = 0 if on_cpu else _residual_bytes(facts, shape, PARALLEL_MIXER_RESIDUALS)
        return body + attention + max(0, in_the_way - copies_bytes)
    if facts.latent is not None:
        heads = max(group.layer.head_count for group in trunk_groups(facts))
        # What attention gives goes where the queries were, compressed or not. Where the copies behind it are longer
        # than the latter, it needs a place of its own.
        if copies_bytes > _values_bytes(shape, heads * facts.latent.query_length):
            widest = max(group.layer.head_count * group.layer.key_length for group in trunk_groups(facts))
            attention += _values_bytes(shape, widest)
    return max(body, attention)


def _has_parallel_mixers(facts: CheckpointFacts) -> bool:
    return any(group.layer.owns_kv and group.layer.keeps_state for group in trunk_groups(facts))


def card_compute_bytes(
    facts: CheckpointFacts,
    shape: CacheShape,
    type_k: CacheType,
    type_v: CacheType,
    backend: Backend,
    *,
    outputs: int | None = None,
) -> int:
    """Compute buffer on a real card with all layers on it.

    M + 4 E U + max(body, attention + f16 copies, logits), with M of :func:`mask_bytes`. Only with AltUp everything else
    is gone before the logits are computed.

    Args:
        facts: the checkpoint.
        shape: of the context.
        type_k, type_v: of the cache.
        backend: of the card.
        outputs: of a micro batch; None for what the server asks for without drafting.

    Raises:
        LlmError: UNSUPPORTED_ARCHITECTURE where there is no formula.
    """
    _check_graph(facts)
    if facts.rule.graph is Graph.ENCODER:
        return encoder_compute.card_bytes(facts, graph_tokens(shape), shape.slots)
    copies = f16_copies_bytes(facts, shape, type_k, type_v, backend)
    mixers = _mixers_bytes(facts, shape, copies_bytes=copies)
    words = logits_bytes(facts, server_outputs(shape) if outputs is None else outputs)
    layers = (
        mask_bytes(facts, shape, type_k, type_v)
        + _residual_bytes(facts, shape, RESIDUAL_COPIES)
        + _per_layer_embeddings_bytes(facts, shape, PER_LAYER_RESIDUALS.get(facts.rule.graph, 0))
    )
    if facts.rule.graph is Graph.ALTUP:
        return max(layers + mixers, words + _residual_bytes(facts, shape, ALTUP_LOGITS_RESIDUALS))
    return layers + max(mixers, words)


def host_compute_bytes(
    facts: CheckpointFacts, shape: CacheShape, type_k: CacheType, type_v: CacheType
) -> int:
    """Compute buffer in pinned host memory beside a real card: M + 4 E U; encoders see their own module."""
    if facts.rule.graph is Graph.ENCODER:
        return encoder_compute.host_bytes(facts, graph_tokens(shape), shape.slots)
    return (
        mask_bytes(facts, shape, type_k, type_v)
        + _residual_bytes(facts, shape, RESIDUAL_COPIES)
        + _per_layer_embeddings_bytes(facts, shape, 1)
    )


def cpu_compute_bytes(
    facts: CheckpointFacts,
    shape: CacheShape,
    type_k: CacheType,
    type_v: CacheType,
    *,
    outputs: int | None = None,
) -> int:
    """Compute buffer without a card: M + 5 E U + max(body, attention + f16 copies, logits); as on a card otherwise."""
    _check_graph(facts)
    if facts.rule.graph is Graph.ENCODER:
        return encoder_compute.cpu_bytes(facts, graph_tokens(shape), shape.slots)
    residuals = PER_LAYER_RESIDUALS.get(facts.rule.graph, 0)
    outputs = server_outputs(shape) if outputs is None else outputs
    copies = f16_copies_bytes(facts, shape, type_k, type_v, Backend.CPU)
    return (
        mask_bytes(facts, shape, type_k, type_v)
        + _residual_bytes(facts, shape, CPU_RESIDUAL_COPIES)
        + _per_layer_embeddings_bytes(facts, shape, residuals)
        + _widest_bytes(facts, shape, outputs, copies_bytes=copies, on_cpu=True)
    )


@lru_cache(maxsize=REMEMBERED_CHECKPOINTS)
def _draft_blocks(facts: CheckpointFacts) -> CheckpointFacts:
    """The blocks for multi-token prediction as if they were all of the model."""
    return replace(facts, layers=tuple(replace(layer, is_mtp=False) for layer in facts.mtp_layers))


def draft_compute_bytes(
    facts: CheckpointFacts, shape: CacheShape, type_k: CacheType, type_v: CacheType, backend: Backend
) -> int:
    """Upper bound of the compute buffer of a draft context: M + 4 E U + the widest of its own blocks."""
    _check_graph(facts)
    own = _draft_blocks(facts)
    residuals = CPU_RESIDUAL_COPIES if backend is Backend.CPU else RESIDUAL_COPIES
    copies = f16_copies_bytes(own, shape, type_k, type_v, backend)
    return (
        mask_bytes(own, shape, type_k, type_v)
        + _residual_bytes(facts, shape, residuals)
        + _widest_bytes(own, shape, shape.slots, copies_bytes=copies, on_cpu=backend is Backend.CPU)
    )


@lru_cache(maxsize=REMEMBERED_CHECKPOINTS)
def _with_words(facts: CheckpointFacts, vocabulary_size: int) -> CheckpointFacts:
    return replace(facts, vocabulary_size=vocabulary_size)


def drafter_compute_bytes(  # noqa: PLR0917  # a context, as everywhere here, and the words of its model
    facts: CheckpointFacts,
    shape: CacheShape,
    type_k: CacheType,
    type_v: CacheType,
    backend: Backend,
    vocabulary_size: int,
) -> int:
    """Upper bound of the compute buffer of an EAGLE-3 or DFlash drafter, which has two graphs.

    One guesses: M + 4 E U + the widest of body, attention and logits, the latter of every token of the graph. Where its
    own words are mapped to those of the model, the logits of the model are alive all the while. The other graph reads
    the model's hidden states, as they are and normed, and leaves rows of its own width.
    """
    _check_graph(facts)
    drafter = facts.drafter
    if drafter is None:
        raise ValueError("not the facts of a drafter")
    known = _with_words(facts, vocabulary_size)
    outputs = graph_tokens(shape)
    residuals = CPU_RESIDUAL_COPIES if backend is Backend.CPU else RESIDUAL_COPIES
    copies = f16_copies_bytes(facts, shape, type_k, type_v, backend)
    guess = _residual_bytes(facts, shape, residuals) + _widest_bytes(
        known, shape, outputs, copies_bytes=copies
    )
    if drafter.reduced_vocabulary:
        guess += logits_bytes(known, outputs)
    read = _values_bytes(shape, 2 * drafter.feature_length) + _residual_bytes(facts, shape, 2)
    return mask_bytes(facts, shape, type_k, type_v) + max(guess, read)


def hidden_state_bytes(facts: CheckpointFacts, feature_length: int, batch_tokens: int) -> int:
    """Host memory for the hidden states that a model hands to its drafter: of every token of a batch, twice.

    Once as the engine's output, once in the batch for the drafter.

    Args:
        facts: the model, whose last layer is read where ``feature_length`` is 0.
        feature_length: values that the drafter reads for each token.
        batch_tokens: of a whole batch.
    """
    return 2 * F32_BYTES * batch_tokens * (feature_length or facts.embedding_length)


def compute_margin_bytes(
    facts: CheckpointFacts, shape: CacheShape, compute_bytes: int, margins: Margins = DEFAULT_MARGINS
) -> int:
    """What the graph formulas may be short of: E x U and 5 %, and what the setting adds."""
    percent = compute_bytes * margins.compute_percent // 100
    added = round(compute_bytes * (margins.compute_buffer_factor - 1))
    return _residual_bytes(facts, shape, margins.compute_residuals) + percent + added


def output_buffer_bytes(facts: CheckpointFacts, parallel: int) -> int:
    """Host copy of the logits the server samples from: 4 V for each slot."""
    return F32_BYTES * facts.vocabulary_size * parallel


def vector_buffer_bytes(facts: CheckpointFacts, batch_tokens: int) -> int:
    """The same of an engine that gives vectors: 4 (V + E) for each token of a batch.

    Room for logits is made for models without an output matrix too (``output_reserve`` of b11434).
    """
    return F32_BYTES * (facts.vocabulary_size + facts.embedding_length) * batch_tokens


def runtime_bytes(backend: Backend) -> int:
    """Memory of the device that a process holds before and beside its buffers; see :data:`RUNTIME_BYTES`.

    Raises:
        LlmError: ENGINE_UNUSABLE for a backend whose runtime nobody has measured.
    """
    try:
        return RUNTIME_BYTES[backend]
    except KeyError:
        known = ", ".join(RUNTIME_BYTES)
        raise LlmError(
            ErrorCode.ENGINE_UNUSABLE,
            f"What a llama-server of backend {backend} needs is not known; known are {known}.",
            hint=f"Use a llama-server built for one of {known}.",
            backend=str(backend),
        ) from None


def slack_bytes(context_tokens: int, margins: Margins = DEFAULT_MARGINS) -> int:
    """128 MiB; 512 MiB from 65,536 tokens of context. A floor, not added to another pad."""
    long = context_tokens >= LONG_CONTEXT_TOKENS
    return (margins.long_context_slack_mib if long else margins.slack_mib) * MIB


def workspace_missing_bytes(used_bytes: int, workspace_reserve_mib: int) -> int:
    """What compute buffer and runtime together fall short of the least workspace on a real card."""
    return max(0, workspace_reserve_mib * MIB - used_bytes)
