"""What a launch needs beside weights and cache: one function for each term. Pure.

The graph formulas are those of llama.cpp b11434 with flash attention on, found in its source and held
against its dry runs: within 3 % for the architectures served here, and never short once the margin is added.

T is the number of tokens of the graph, U = 4 T bytes one f32 value for each of them, E the embedding length.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from lllm3090d.checkpoints.facts import CheckpointFacts
from lllm3090d.engines.capabilities import Backend
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.planning.cache import CacheShape, CacheType, value_length
from lllm3090d.planning.units import MIB, round_up

F32_BYTES = 4
F16_BYTES = 2
DRAFT_TOKENS = 0  # no speculative decoding yet; the server asks for this many more outputs per slot
RESIDUAL_COPIES = 4  # tensors of E values per token alive on both sides of the split between host and card
CPU_RESIDUAL_COPIES = 5  # the same when everything is computed in one place
ROTATION_LEAST_VALUES = 64  # a quantised cache is rotated when this divides the head size
V_ROTATION_VALUES = 64  # side of the matrix that rotates V
MARGIN_PERCENT = 5  # with one E x U more, covers every dry run of the engine for these architectures

# Memory of a process that no graph shows: device context, BLAS workspace, pools, recorded graphs.
# Vulkan: 0.4 GiB measured on a Radeon RX 7900 XTX. CUDA: Vulkan's and the 230 MiB by which it was larger on
# an RTX 3090.
RUNTIME_BYTES: Mapping[Backend, int] = MappingProxyType(
    {Backend.CPU: 0, Backend.VULKAN: 410 * MIB, Backend.CUDA: 640 * MIB}
)
SLACK_BYTES = 128 * MIB  # judgement: what nobody has accounted for
LONG_CONTEXT_SLACK_BYTES = 512 * MIB  # judgement: the same, where every error is multiplied by many tokens
LONG_CONTEXT_TOKENS = 65_536
PROCESS_BYTES = 300 * MIB  # host memory of a llama-server: code, heap, vocabulary, threads, HTTP; judgement


def weights_on_card_bytes(facts: CheckpointFacts) -> int:
    """Weights on a real card with all layers on it.

    The token embedding stays in host memory; where the output is tied to it, a copy goes to the card.
    """
    tied_copy = facts.token_embedding_bytes if facts.output_is_tied else 0
    return facts.weight_bytes - facts.token_embedding_bytes + tied_copy


def graph_tokens(shape: CacheShape) -> int:
    """T: tokens of the largest graph, the same number for every slot."""
    return round_up(min(shape.context_tokens, shape.micro_batch_tokens), shape.streams)


def mask_bytes(facts: CheckpointFacts, shape: CacheShape, type_k: CacheType, type_v: CacheType) -> int:
    """Inputs of attention for each kind of cache: an f16 mask and, where it is quantised, rotation matrices.

    A stream sees its share of the tokens, so the masks of all streams together have cells x T values.
    """
    kinds = {layer.kind for layer in facts.layers}
    masks = sum(shape.cells(kind) for kind in kinds) * graph_tokens(shape) * F16_BYTES
    rotations = 0
    if type_k.is_quantised:
        # The greatest power of two that divides every head: the lowest bit that is set in any of them.
        side = min(layer.key_length & -layer.key_length for layer in facts.layers)
        rotations += side * side * F32_BYTES if side >= ROTATION_LEAST_VALUES else 0
    if type_v.is_quantised and all(value_length(layer) % V_ROTATION_VALUES == 0 for layer in facts.layers):
        rotations += V_ROTATION_VALUES**2 * F32_BYTES
    return masks + rotations * len(kinds)


def _residual_bytes(facts: CheckpointFacts, shape: CacheShape, copies: int) -> int:
    return copies * facts.embedding_length * F32_BYTES * graph_tokens(shape)


def _feed_forward_bytes(facts: CheckpointFacts, shape: CacheShape) -> int:
    """Gate, up and their product of the widest gated feed-forward network."""
    widest = max(layer.feed_forward_length for layer in facts.layers)
    return 3 * widest * F32_BYTES * graph_tokens(shape)


def _attention_bytes(facts: CheckpointFacts, shape: CacheShape) -> int:
    """Widest queries; twice where they are wider than the embedding and get their own tensor."""
    queries = max(layer.head_count * layer.key_length for layer in facts.layers)
    tensors = 1 if queries <= facts.embedding_length else 2
    return tensors * queries * F32_BYTES * graph_tokens(shape)


def logits_bytes(facts: CheckpointFacts, parallel: int) -> int:
    """One f32 for each word of the vocabulary and each output; the server asks for one output per slot.

    ``llama-fit-params`` assumes a whole micro batch of outputs instead and reports far more.
    """
    return parallel * (1 + DRAFT_TOKENS) * facts.vocabulary_size * F32_BYTES


def f16_copies_bytes(
    facts: CheckpointFacts, shape: CacheShape, type_k: CacheType, type_v: CacheType, backend: Backend
) -> int:
    """CUDA only: f16 copies of K and V of the largest layer, for each side of the cache that is not f16."""
    if backend is not Backend.CUDA:
        return 0

    def values(k_values: int, v_values: int) -> int:
        return (k_values if type_k is not CacheType.F16 else 0) + (
            v_values if type_v is not CacheType.F16 else 0
        )

    return max(
        shape.cells(layer.kind) * shape.streams * F16_BYTES * values(layer.k_values, layer.v_values)
        for layer in facts.layers
    )


def card_compute_bytes(
    facts: CheckpointFacts, shape: CacheShape, type_k: CacheType, type_v: CacheType, backend: Backend
) -> int:
    """Compute buffer on a real card with all layers on it.

    M + 4 E U + max(feed-forward, attention + f16 copies, logits), with M of :func:`mask_bytes`.
    """
    return (
        mask_bytes(facts, shape, type_k, type_v)
        + _residual_bytes(facts, shape, RESIDUAL_COPIES)
        + max(
            _feed_forward_bytes(facts, shape),
            _attention_bytes(facts, shape) + f16_copies_bytes(facts, shape, type_k, type_v, backend),
            logits_bytes(facts, shape.streams),
        )
    )


def host_compute_bytes(
    facts: CheckpointFacts, shape: CacheShape, type_k: CacheType, type_v: CacheType
) -> int:
    """Compute buffer in pinned host memory beside a real card: M + 4 E U."""
    return mask_bytes(facts, shape, type_k, type_v) + _residual_bytes(facts, shape, RESIDUAL_COPIES)


def cpu_compute_bytes(
    facts: CheckpointFacts, shape: CacheShape, type_k: CacheType, type_v: CacheType
) -> int:
    """Compute buffer without a card: M + 5 E U + max(feed-forward, attention, logits)."""
    return (
        mask_bytes(facts, shape, type_k, type_v)
        + _residual_bytes(facts, shape, CPU_RESIDUAL_COPIES)
        + max(
            _feed_forward_bytes(facts, shape),
            _attention_bytes(facts, shape),
            logits_bytes(facts, shape.streams),
        )
    )


def compute_margin_bytes(facts: CheckpointFacts, shape: CacheShape, compute_bytes: int) -> int:
    """What the graph formulas may be short of: E x U and 5 %."""
    return _residual_bytes(facts, shape, 1) + compute_bytes * MARGIN_PERCENT // 100


def output_buffer_bytes(facts: CheckpointFacts, parallel: int) -> int:
    """Host copy of the logits the server samples from: 4 V for each slot."""
    return F32_BYTES * facts.vocabulary_size * parallel


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


def slack_bytes(context_tokens: int) -> int:
    """128 MiB; 512 MiB from 65,536 tokens of context. A floor, not added to another pad."""
    return SLACK_BYTES if context_tokens < LONG_CONTEXT_TOKENS else LONG_CONTEXT_SLACK_BYTES


def workspace_missing_bytes(used_bytes: int, workspace_reserve_mib: int) -> int:
    """What compute buffer and runtime together fall short of the least workspace on a real card."""
    return max(0, workspace_reserve_mib * MIB - used_bytes)
