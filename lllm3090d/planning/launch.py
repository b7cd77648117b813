"""A launch as data: the resolved values that have a price and reach the command line. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from lllm3090d.checkpoints.facts import CheckpointFacts, Pooling, Purpose
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.planning import cache
from lllm3090d.planning.cache import CacheShape, CacheType
from lllm3090d.planning.compute import DEFAULT_MARGINS, Margins
from lllm3090d.planning.placement import EVERYTHING, Placement
from lllm3090d.planning.request import Drafting, Offload, PlanRequest, ProjectorPlace
from lllm3090d.planning.slots import SlotPolicy

DEFAULT_CHECKPOINT_STEP_TOKENS = 8192  # the engine's own default
DEFAULT_DRAFT_TOKENS = 3  # the engine's own default
LEAST_BATCH_TOKENS = 2  # the engine tries its context with two tokens before it serves


class SpecType(enum.StrEnum):
    """How drafts are made; the engine's names for ``--spec-type``."""

    SIMPLE = "draft-simple"  # a smaller model
    MTP = "draft-mtp"  # the model's blocks for multi-token prediction, its own or in a file of their own
    EAGLE3 = "draft-eagle3"
    DFLASH = "draft-dflash"
    DSPARK = "draft-dspark"  # DFlash with a Markov head

    @property
    def reads_hidden_states(self) -> bool:
        """The model hands its hidden states over; for these it also keeps copies of its states for going back."""
        return self is not SpecType.SIMPLE


@dataclass(frozen=True, slots=True)
class PlanPolicy:
    """What the settings decide about every launch.

    Attributes:
        cache_type: of K and V, where nobody asks for another.
        batch_tokens, micro_batch_tokens: ``-b`` and ``-ub``.
        context_checkpoints: of one slot, ``--ctx-checkpoints``.
        prompt_cache_mib: ``--cache-ram``.
        workspace_reserve_mib: least MiB for compute buffer and runtime on a real card.
        checkpoint_min_step_tokens: least distance of checkpoints, ``--checkpoint-min-step``.
        slot_policy: how slots are chosen.
        offload: whether layers may be left in host memory.
        drafting: whether a model drafts for itself.
        draft_tokens: longest draft, ``--spec-draft-n-max``.
        projector: where the projector is.
        image_max_tokens: of one image, ``--image-max-tokens``; 0 for what its file says.
        margins: what is charged beside what is known.
    """

    cache_type: CacheType
    batch_tokens: int
    micro_batch_tokens: int
    context_checkpoints: int
    prompt_cache_mib: int
    workspace_reserve_mib: int
    checkpoint_min_step_tokens: int = DEFAULT_CHECKPOINT_STEP_TOKENS
    slot_policy: SlotPolicy = SlotPolicy.BALANCED
    offload: Offload = Offload.RESIDENT
    drafting: Drafting = Drafting.AUTO
    draft_tokens: int = DEFAULT_DRAFT_TOKENS
    projector: ProjectorPlace = ProjectorPlace.AUTO
    image_max_tokens: int = 0
    margins: Margins = DEFAULT_MARGINS


@dataclass(frozen=True, slots=True)
class Draft:
    """Drafts are made: by the model itself with its blocks for multi-token prediction, or by :attr:`Launch.drafter`.

    Attributes:
        tokens: of a draft, ``--spec-draft-n-max``.
        cache_type_k, cache_type_v: ``-ctkd`` and ``-ctvd``.
        window_tokens: of each slot that its context keeps, for engines with ``--spec-draft-window``; 0 for
            all of them.
        spec_type: how they are made.
    """

    tokens: int
    cache_type_k: CacheType = CacheType.F16
    cache_type_v: CacheType = CacheType.F16
    window_tokens: int = 0
    spec_type: SpecType = SpecType.MTP


@dataclass(frozen=True, slots=True)
class Drafter:
    """A file beside a model that drafts for it.

    Attributes:
        facts: of the file; see :func:`lllm3090d.checkpoints.facts.read_drafter_facts`.
        spec_type: how it drafts.
    """

    facts: CheckpointFacts
    spec_type: SpecType


@dataclass(frozen=True, slots=True)
class Launch:
    """The resolved values of one launch that have a price; the same ones reach the command line.

    Attributes:
        context_tokens: ``-c``, all slots together; 0 for the trained length.
        parallel: ``--parallel``.
        cache_type_k, cache_type_v: ``-ctk`` and ``-ctv``.
        batch_tokens, micro_batch_tokens: ``-b`` and ``-ub``.
        context_checkpoints: of one slot, ``--ctx-checkpoints``.
        prompt_cache_mib: ``--cache-ram``.
        unified: all slots share one pool, ``--kv-unified``.
        swa_full: sliding layers keep the whole context, ``--swa-full``.
        layers: what is on the card, without the draft's blocks, which :attr:`draft` decides.
        draft: None without drafting.
        projector_on_card: False for ``--no-mmproj-offload``; without effect without a projector.
        image_max_tokens: ``--image-max-tokens``; 0 where it is not given.
        slot_tokens: longest window of a slot, ``--kv-unified-per-slot``; 0 where it is not given. Without ``-c`` the
            engine would make the pool as large as all slots need; a launch states that product.
        checkpoint_min_step_tokens: ``--checkpoint-min-step``; it moves checkpoints, and never lowers their number.
        line_tokens: cells of the pool that are on the card, the others in pinned host memory
            (``--kv-vram-cells``); 0 for all of them.
        tail_draft_tokens: longest draft beyond that line (``--spec-draft-n-max-tail``); 0 for the same everywhere.
        drafter: the file that drafts (``-md``); None where the model drafts for itself, or nobody does.
        purpose: what it serves (``--embeddings``, ``--reranking``).
        pooling: ``--pooling``; None where it is not given.
    """

    context_tokens: int
    parallel: int
    cache_type_k: CacheType
    cache_type_v: CacheType
    batch_tokens: int
    micro_batch_tokens: int
    context_checkpoints: int
    prompt_cache_mib: int
    unified: bool = False
    swa_full: bool = False
    layers: Placement = EVERYTHING
    draft: Draft | None = None
    projector_on_card: bool = True
    image_max_tokens: int = 0
    slot_tokens: int = 0
    checkpoint_min_step_tokens: int = DEFAULT_CHECKPOINT_STEP_TOKENS
    line_tokens: int = 0
    tail_draft_tokens: int = 0
    drafter: CheckpointFacts | None = None
    purpose: Purpose = Purpose.CHAT
    pooling: Pooling | None = None

    @property
    def cache_types(self) -> tuple[CacheType, CacheType]:
        """Of K and V."""
        return self.cache_type_k, self.cache_type_v

    @property
    def longest_draft(self) -> int:
        """Tokens of the longest draft, below the line and beyond it; 0 without drafting."""
        return 0 if self.draft is None else max(self.draft.tokens, self.tail_draft_tokens)

    def placement(self, facts: CheckpointFacts) -> Placement:
        """What of the model is on the card, the blocks for multi-token prediction included.

        The engine loads those for drafting of that kind only, then also beside a drafter in a file of its own.
        """
        loaded = self.draft is not None and self.draft.spec_type is SpecType.MTP
        with_mtp = loaded and (self.drafter is None or facts.has_mtp)
        return self.layers if with_mtp is self.layers.with_mtp else replace(self.layers, with_mtp=with_mtp)

    def shape(self, facts: CheckpointFacts) -> CacheShape:
        """What the engine makes of it.

        Raises:
            LlmError: as :func:`lllm3090d.planning.cache.cache_shape`; UNSUPPORTED_COMBINATION also for a context or
                batch of a single token.
        """
        draft = self.draft
        shape = cache.cache_shape(
            facts,
            context_tokens=self.context_tokens,
            parallel=self.parallel,
            batch_tokens=self.batch_tokens,
            micro_batch_tokens=self.micro_batch_tokens,
            unified=self.unified,
            swa_full=self.swa_full,
            rollback_tokens=self.longest_draft
            if draft is not None and draft.spec_type.reads_hidden_states
            else 0,
            slot_tokens=self.slot_tokens,
        )
        context = self.context_tokens or facts.trained_context_tokens
        if min(context, self.batch_tokens) < LEAST_BATCH_TOKENS and facts.keeps_context:
            raise LlmError(
                ErrorCode.UNSUPPORTED_COMBINATION,
                f"A context of {context} tokens with batches of {self.batch_tokens} is too small: the engine"
                f" computes {LEAST_BATCH_TOKENS} tokens at once when it starts, and aborts.",
                hint=f"Ask for a context and a batch of at least {LEAST_BATCH_TOKENS} tokens.",
                context_tokens=context,
                batch_tokens=self.batch_tokens,
            )
        return shape


def batches(request: PlanRequest, policy: PlanPolicy) -> tuple[int, int]:
    """Batch and micro batch, tokens: as asked; of one that was left open as the other one allows."""
    batch = request.batch_tokens or policy.batch_tokens
    micro_batch = request.micro_batch_tokens or policy.micro_batch_tokens
    if request.batch_tokens is None:
        batch = max(batch, micro_batch)
    elif request.micro_batch_tokens is None:
        micro_batch = min(batch, micro_batch)
    return batch, micro_batch
