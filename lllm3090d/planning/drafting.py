"""The second context of a launch that drafts: what it is made of, and its bytes. Pure.

It has the length, slots and micro batch of the main one, whatever file its weights are in (llama.cpp b11434,
``common_speculative_init_result``), cache types of its own, and no copies of states for going back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from lllm3090d.checkpoints.facts import CheckpointFacts, Graph, LayerFacts, Memory
from lllm3090d.engines.capabilities import Backend
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.planning import cache, compute, placement
from lllm3090d.planning.cache import CacheShape, CacheType
from lllm3090d.planning.context_checkpoints import draft_copy_bytes, sequence_state_bytes
from lllm3090d.planning.launch import Launch, SpecType
from lllm3090d.planning.placement import Placement, Split
from lllm3090d.planning.tier import TierSizes, tier_layout

# Copies of the states of models with Mamba-2 or short convolutions that a graph of the engine holds: it aborted from 15
# on (Nemotron Nano 9B), with others from 24; GatedDeltaNet was fine with 64.
LONGEST_ROLLBACK_TOKENS = 12
# Architectures of the drafters that no other way of drafting can use.
_ARCHITECTURES = {SpecType.EAGLE3: "eagle3", SpecType.DFLASH: "dflash", SpecType.DSPARK: "dflash"}


@dataclass(frozen=True, slots=True)
class DraftContext:
    """The second context.

    Attributes:
        model: the model that is drafted for.
        facts: of what drafts: another file, or the model.
        is_own_file: it is in a file of its own, so its weights are charged beside the model's.
        spec_type: how it drafts.
        tokens: of a draft.
        main: shape of the main context.
        shape: its own.
        types: of its K and V.
    """

    model: CheckpointFacts
    facts: CheckpointFacts
    is_own_file: bool
    spec_type: SpecType
    tokens: int
    main: CacheShape
    shape: CacheShape
    types: tuple[CacheType, CacheType]

    @property
    def layers(self) -> tuple[LayerFacts, ...]:
        """The blocks with a place in this context."""
        return self.facts.mtp_layers if self.spec_type is SpecType.MTP else self.facts.context_layers

    def weights(self, backend: Backend) -> Split:
        """Bytes of its own file, all of it on the card but the tables; nothing where the model drafts for itself."""
        if not self.is_own_file:
            return Split(0, 0)
        return placement.weights(self.facts, Placement(with_mtp=self.spec_type is SpecType.MTP), backend)

    def cache_bytes(self, memory: Memory) -> int:
        """Cache and, of a small hybrid, its states."""
        if self.spec_type is SpecType.MTP:
            return cache.draft_context_bytes(self.facts, self.shape, *self.types, memory=memory)
        return cache.context_bytes(self.facts, self.shape, *self.types, memory=memory)

    def divided(self, line_tokens: int) -> TierSizes | None:
        """Its cache where the line of the main one divides it too; None where it lies on the card whole.

        A windowed context, or one of two types, is not divided (see :func:`lllm3090d.planning.tier.tier_layouts`).
        """
        whole = self.shape.context_tokens == self.main.context_tokens
        if not line_tokens or not whole or self.types[0] is not self.types[1]:
            return None
        return tier_layout(self.layers, self.shape.context_tokens, self.types[0]).sizes(line_tokens)

    def compute_bytes(self, backend: Backend) -> int:
        """Upper bound of its compute buffer; of a smaller model the formula of any model with its margin."""
        facts, shape, types = self.facts, self.shape, self.types
        if self.spec_type is SpecType.MTP:
            return compute.draft_compute_bytes(facts, shape, *types, backend)
        if self.spec_type is not SpecType.SIMPLE:
            return compute.drafter_compute_bytes(facts, shape, *types, backend, self._vocabulary_size)
        if backend is Backend.CPU:
            graph = compute.cpu_compute_bytes(facts, shape, *types)
        else:
            graph = compute.card_compute_bytes(facts, shape, *types, backend)
        return graph + compute.compute_margin_bytes(facts, shape, graph)

    def host_bytes(self) -> int:
        """Host memory beside a real card: the pinned part of its graph."""
        return compute.host_compute_bytes(self.facts, self.shape, *self.types)

    def output_bytes(self) -> int:
        """Host copy of its logits: of one token for each slot, or of a whole block."""
        guesses = 1 + self.tokens if self.spec_type in (SpecType.DFLASH, SpecType.DSPARK) else 1
        return compute.F32_BYTES * self.shape.slots * guesses * self._vocabulary_size

    def hidden_state_bytes(self, batch_tokens: int) -> int:
        """Host memory for what the model hands over; nothing for a drafter that reads tokens alone."""
        if not self.spec_type.reads_hidden_states:
            return 0
        length = self.facts.drafter.feature_length if self.facts.drafter is not None else 0
        return compute.hidden_state_bytes(self.model, length, min(batch_tokens, self.main.context_tokens))

    def checkpoint_copy_bytes(self) -> int:
        """What it adds to one context checkpoint of every slot, all slots together."""
        return draft_copy_bytes(self.facts, self.layers, self.main, self.shape, self.types)

    def speculative_checkpoint_bytes(self) -> int:
        """Host memory for going back when a draft is rejected, of all slots; 0 where the contexts can be cut.

        States without copies for going back are saved before each draft: those of the model where it keeps none, and
        those of a drafter that is a hybrid.
        """
        saved = 0
        if self.main.state_planes == 1:
            saved += sequence_state_bytes(self.model)
        if any(layer.keeps_state for layer in self.layers):
            saved += sequence_state_bytes(self.facts)
        return self.main.slots * saved

    @property
    def _vocabulary_size(self) -> int:
        return max(self.facts.vocabulary_size, self.model.vocabulary_size)


def draft_context(facts: CheckpointFacts, launch: Launch, main: CacheShape) -> DraftContext | None:
    """The second context of a launch; None where nobody drafts.

    Args:
        facts: the model.
        launch: with its draft, and the drafter where that is another file.
        main: shape of the main context.

    Raises:
        ValueError: a draft without a token, or a drafter without a draft.
        LlmError: UNSUPPORTED_COMBINATION where the drafter is none of that kind or none for this model, and for cache
            types it cannot have.
    """
    draft, drafter = launch.draft, launch.drafter
    if draft is None:
        if drafter is not None:
            raise ValueError("a drafter is given, and no draft")
        return None
    if draft.tokens < 1:
        raise ValueError("a draft has one token at least")
    own = facts if drafter is None else drafter
    _check_drafter(facts, drafter, draft.spec_type)
    _check_rollback(facts, launch)
    types = (draft.cache_type_k, draft.cache_type_v)
    cache.check_cache_types(own, *types)
    whole = cache.cache_shape(
        own,
        context_tokens=main.context_tokens,
        parallel=launch.parallel,
        batch_tokens=launch.batch_tokens,
        micro_batch_tokens=launch.micro_batch_tokens,
        unified=launch.unified,
        swa_full=launch.swa_full,
    )
    return DraftContext(
        model=facts,
        facts=own,
        is_own_file=drafter is not None,
        spec_type=draft.spec_type,
        tokens=draft.tokens,
        main=main,
        shape=cache.draft_shape(whole, window_tokens=draft.window_tokens, batch_tokens=launch.batch_tokens),
        types=types,
    )


def _check_rollback(facts: CheckpointFacts, launch: Launch) -> None:
    """Refuse drafts with so many copies of the states that the engine's graph outgrows its memory."""
    draft, longest = launch.draft, launch.longest_draft
    if draft is None or not draft.spec_type.reads_hidden_states or not facts.rolls_back:
        return
    if facts.rule.graph is not Graph.GATED_ATTENTION and longest > LONGEST_ROLLBACK_TOKENS:
        raise LlmError(
            ErrorCode.UNSUPPORTED_COMBINATION,
            f"Drafts of {longest} tokens are too long for {facts.title or facts.architecture}: llama.cpp b11434 aborts"
            " when it builds its graph with so many copies of the states.",
            hint=f"Ask for drafts of at most {LONGEST_ROLLBACK_TOKENS} tokens.",
            draft_tokens=longest,
        )


def _check_drafter(facts: CheckpointFacts, drafter: CheckpointFacts | None, spec_type: SpecType) -> None:
    """Refuse what cannot draft in this way for this model."""
    if drafter is None:
        if spec_type is not SpecType.MTP:
            _refuse(f"{spec_type} needs a drafter in a file of its own", spec_type)
        return
    name = drafter.title or drafter.architecture
    architecture = _ARCHITECTURES.get(spec_type)
    if architecture is not None and drafter.architecture != architecture:
        _refuse(
            f"{name} is of the architecture {drafter.architecture}, and {spec_type} needs {architecture}",
            spec_type,
        )
    if spec_type is SpecType.MTP and not drafter.has_mtp:
        _refuse(f"{name} has no blocks for multi-token prediction", spec_type)
    if spec_type is SpecType.SIMPLE and drafter.drafter is not None:
        _refuse(f"{name} reads the hidden states of a model, and {spec_type} hands none over", spec_type)
    read = 0 if drafter.drafter is None else drafter.drafter.feature_length
    if read % facts.embedding_length:
        _refuse(
            f"{name} reads {read} values for each token, no multiple of the {facts.embedding_length} that"
            f" {facts.title or facts.architecture} computes with",
            spec_type,
        )


def _refuse(reason: str, spec_type: SpecType) -> NoReturn:
    raise LlmError(
        ErrorCode.UNSUPPORTED_COMBINATION,
        f"This cannot draft: {reason}.",
        hint="Leave drafting off, or choose the drafter that was made for this model.",
        spec_type=str(spec_type),
    )
