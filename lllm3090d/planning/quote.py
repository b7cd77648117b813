"""The quote, what a launch costs as a ledger of line items, and the one function that prices a launch."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from lllm3090d.checkpoints.facts import CheckpointFacts, LayerKind, ProjectorFacts
from lllm3090d.engines.capabilities import Backend
from lllm3090d.planning import cache, compute, placement
from lllm3090d.planning.cache import CacheShape, CacheType
from lllm3090d.planning.placement import EVERYTHING, Placement
from lllm3090d.planning.projector import projector_graph_bytes, projector_weights
from lllm3090d.planning.units import MIB

__all__ = [
    "MIB",
    "Draft",
    "Evidence",
    "Launch",
    "LineItem",
    "Place",
    "Placement",
    "PlanPolicy",
    "Quote",
    "price",
]


class Evidence(enum.StrEnum):
    """Where a number comes from, best first; clients must treat an unknown value as the weakest."""

    MEASURED = "measured"  # the peak this machine saw for the same key
    ENGINE = "engine"  # a dry run of this engine build
    HEADER = "header"  # exact layout arithmetic from the GGUF header
    CATALOGUE = "catalogue"  # linear per-token pricing of a model not downloaded yet


class Place(enum.StrEnum):
    """Which memory a line item occupies."""

    CARD = "card"  # memory of the card; host memory where the card is the host (backend cpu)
    HOST = "host"  # memory of the process beside a real card


@dataclass(frozen=True, slots=True)
class LineItem:
    """One term of a quote.

    Attributes:
        name: short and stable, e.g. ``weights`` or ``kv cache``.
        place: which memory.
        bytes: the price; never negative.
        evidence: where the number comes from.
        formula: the arithmetic or constant behind it with its figures, for a person.
    """

    name: str
    place: Place
    bytes: int
    evidence: Evidence
    formula: str


@dataclass(frozen=True, slots=True)
class Quote:
    """The price of one launch, line by line. Preview, admission, launch and display all use this object."""

    items: tuple[LineItem, ...]

    def total_bytes(self, place: Place) -> int:
        """Sum of the items in one place, in bytes."""
        return sum(item.bytes for item in self.items if item.place is place)

    def item(self, name: str) -> LineItem:
        """The item of that name; KeyError when there is none."""
        for item in self.items:
            if item.name == name:
                return item
        raise KeyError(name)


@dataclass(frozen=True, slots=True)
class PlanPolicy:
    """What the settings decide about every launch.

    Attributes:
        cache_type: of K and V, where nobody asks for another.
        batch_tokens, micro_batch_tokens: ``-b`` and ``-ub``.
        context_checkpoints: of one slot, ``--ctx-checkpoints``.
        prompt_cache_mib: ``--cache-ram``.
        workspace_reserve_mib: least MiB for compute buffer and runtime on a real card.
    """

    cache_type: CacheType
    batch_tokens: int
    micro_batch_tokens: int
    context_checkpoints: int
    prompt_cache_mib: int
    workspace_reserve_mib: int


@dataclass(frozen=True, slots=True)
class Draft:
    """A model drafts for itself with its blocks for multi-token prediction, ``--spec-type draft-mtp``.

    Attributes:
        tokens: of a draft, ``--spec-draft-n-max``.
        cache_type_k, cache_type_v: ``-ctkd`` and ``-ctvd``.
        window_tokens: of each slot that its context keeps, for engines with ``--spec-draft-window``; 0 for
            all of them.
    """

    tokens: int
    cache_type_k: CacheType = CacheType.F16
    cache_type_v: CacheType = CacheType.F16
    window_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Launch:
    """The resolved values of one launch that have a price; the same ones reach the command line.

    Attributes:
        context_tokens: ``-c``, all slots together.
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

    @property
    def cache_types(self) -> tuple[CacheType, CacheType]:
        """Of K and V."""
        return self.cache_type_k, self.cache_type_v

    @property
    def placement(self) -> Placement:
        """What is on the card, the draft's blocks included."""
        return replace(self.layers, with_mtp=self.draft is not None)

    def shape(self, facts: CheckpointFacts) -> CacheShape:
        """What the engine makes of it; raises like :func:`lllm3090d.planning.cache.cache_shape`."""
        return cache.cache_shape(
            facts,
            context_tokens=self.context_tokens,
            parallel=self.parallel,
            batch_tokens=self.batch_tokens,
            micro_batch_tokens=self.micro_batch_tokens,
            unified=self.unified,
            swa_full=self.swa_full,
            rollback_tokens=0 if self.draft is None else self.draft.tokens,
        )


def price(
    facts: CheckpointFacts,
    launch: Launch,
    backend: Backend,
    policy: PlanPolicy,
    projector: ProjectorFacts | None = None,
) -> Quote:
    """Price one launch at evidence ``header``. Nothing else in the daemon prices anything.

    With backend cpu the host is the card, so every item lies on the card. With a real card, what the
    placement leaves in host memory is priced there, as is the rest of the process. Terms that do not apply
    have no item.

    Args:
        facts: the checkpoint.
        launch: the resolved values.
        backend: what the engine computes on: cpu, cuda or vulkan.
        policy: for the workspace reserve.
        projector: loaded beside it (``--mmproj``); None for text alone.

    Raises:
        LlmError: UNSUPPORTED_COMBINATION, BAD_CHECKPOINT or ENGINE_UNUSABLE where the engine would refuse or
            nothing is known of it; UNSUPPORTED_ARCHITECTURE where a term has no formula.
    """
    cache.check_cache_types(facts, *launch.cache_types)
    if launch.draft is not None:
        cache.check_cache_types(facts, launch.draft.cache_type_k, launch.draft.cache_type_v)
    order = _Order(facts, launch, backend, policy, launch.shape(facts))
    if backend is Backend.CPU:
        items = [*order.weights(), *order.context(), order.compute(), order.slack()]
        return Quote((*items, *order.draft(), *order.process(Place.CARD), *order.projector(projector)))
    graph = order.compute()
    draft = order.draft()
    card = [*order.weights(), *order.context(), graph, *draft, *order.runtime(graph, draft)]
    return Quote((*card, order.pinned(), *order.process(Place.HOST), *order.projector(projector)))


@dataclass(frozen=True, slots=True)
class _Order:
    """One launch to be priced, with its shape."""

    facts: CheckpointFacts
    launch: Launch
    backend: Backend
    policy: PlanPolicy
    shape: CacheShape

    def weights(self) -> list[LineItem]:
        """All tensors, by place."""
        facts, where = self.facts, self.launch.placement
        split = placement.weights(facts, where, self.backend)
        if self.backend is Backend.CPU:
            formula = "all tensors of the file"
            if facts.has_mtp and not where.with_mtp:
                formula = "all tensors but those for drafting"
            if facts.output_is_tied and facts.rule.doubles_tied:
                formula += ", and a copy of the embedding as output"
            return [_item("weights", Place.CARD, split.card, formula)]
        if not where.is_full:
            return [
                _item("weights", Place.CARD, split.card, f"tensors of {_placed(facts, where)}"),
                _item(
                    "host weights", Place.HOST, split.host, "token embedding and the layers beside the card"
                ),
            ]
        formula = "all tensors but the token embedding"
        if facts.output_is_tied:
            formula += ", and its copy as output"
        return [
            _item("weights", Place.CARD, split.card, formula),
            _item("token embedding", Place.HOST, split.host, "stays in host memory"),
        ]

    def context(self) -> list[LineItem]:
        """Cache and states."""
        facts, shape = self.facts, self.shape
        split = placement.context(facts, self.launch.placement, self.backend, shape, self.launch.cache_types)
        memory = placement.memory_of(self.backend)
        states = cache.state_bytes(facts, shape, memory=memory)
        if self.launch.placement.is_full:
            kv_bytes, host_bytes = split.card - states, 0
        else:
            kv_bytes, states, host_bytes = split.card, 0, split.host
        items = []
        if kv_bytes:
            items.append(_item("kv cache", Place.CARD, kv_bytes, self._cells()))
        if states:
            count = sum(layer.keeps_state for layer in facts.trunk)
            formula = f"{count} layers x {shape.slots} slots x {shape.state_planes} planes, f32"
            items.append(_item("recurrent state", Place.CARD, states, formula))
        if host_bytes:
            items.append(_item("host cache", Place.HOST, host_bytes, "of the layers beside the card"))
        return items

    def _cells(self) -> str:
        shape, parts = self.shape, []
        for kind in (LayerKind.FULL, LayerKind.LATENT, LayerKind.SLIDING):
            count = sum(layer.kind is kind for layer in self.facts.context_layers)
            if count:
                parts.append(f"{count} layers x {shape.streams} x {shape.cells(kind)} cells")
        return f"{' + '.join(parts)}, K {self.launch.cache_type_k}, V {self.launch.cache_type_v}"

    def compute(self) -> LineItem:
        """Compute buffer with its margin."""
        facts, shape, types = self.facts, self.shape, self.launch.cache_types
        draft_tokens = 0 if self.launch.draft is None else self.launch.draft.tokens
        outputs = compute.server_outputs(shape, draft_tokens)
        if self.backend is Backend.CPU:
            graph = compute.cpu_compute_bytes(facts, shape, *types, outputs=outputs)
            formula = "masks + 5 E U + widest of body, attention, logits"
        else:
            graph = compute.card_compute_bytes(facts, shape, *types, self.backend, outputs=outputs)
            formula = "masks + 4 E U + widest of body, attention with f16 copies, logits"
        margin = compute.compute_margin_bytes(facts, shape, graph)
        tokens = compute.graph_tokens(shape)
        text = f"{formula}, {tokens} tokens: {graph} B; + E U + {compute.MARGIN_PERCENT} % margin"
        copied = compute.HOST_TENSOR_COPIES * placement.largest_host_tensor_bytes(
            facts, self.launch.placement
        )
        if self.backend is not Backend.CPU and copied:
            text += f"; {copied} B for tensors that large batches copy from host memory"
            margin += copied
        return _item("compute", Place.CARD, graph + margin, text)

    def slack(self) -> LineItem:
        """What nobody has accounted for."""
        size = compute.slack_bytes(self.shape.context_tokens)
        formula = f"unaccounted for, at {self.shape.context_tokens} tokens: {size // MIB} MiB"
        return _item("slack", Place.CARD, size, formula)

    def draft(self) -> list[LineItem]:
        """The second context of a model that drafts for itself; its weights are among the others."""
        draft = self.launch.draft
        if draft is None:
            return []
        types = (draft.cache_type_k, draft.cache_type_v)
        memory = placement.memory_of(self.backend)
        shape = cache.draft_shape(
            self.shape, window_tokens=draft.window_tokens, batch_tokens=self.launch.batch_tokens
        )
        kv_bytes = cache.draft_context_bytes(self.facts, shape, *types, memory=memory)
        graph = compute.draft_compute_bytes(self.facts, shape, *types, self.backend)
        count = len(self.facts.mtp_layers)
        formula = f"{count} layers, {shape.context_tokens} cells, K {types[0]}, V {types[1]}"
        return [
            _item("draft cache", Place.CARD, kv_bytes, formula),
            _item("draft compute", Place.CARD, graph, "masks + 4 E U + widest of body, attention, logits"),
        ]

    def runtime(self, graph: LineItem, draft: list[LineItem]) -> list[LineItem]:
        """What the process holds of a real card beside its buffers, the slack, and the least workspace."""
        size = compute.runtime_bytes(self.backend)
        formula = f"context, BLAS and pools of {self.backend}: {size // MIB} MiB"
        if draft:
            size += compute.SECOND_CONTEXT_BYTES
            formula += f", and {compute.SECOND_CONTEXT_BYTES // MIB} MiB for a second context"
        items = [_item("runtime", Place.CARD, size, formula), self.slack()]
        reserve = self.policy.workspace_reserve_mib
        missing = compute.workspace_missing_bytes(graph.bytes + size, reserve)
        if missing:
            formula = f"compute and runtime raised to {reserve} MiB, until this build is measured"
            items.append(_item("workspace floor", Place.CARD, missing, formula))
        return items

    def pinned(self) -> LineItem:
        """Compute buffer in host memory beside a real card."""
        facts, shape, types = self.facts, self.shape, self.launch.cache_types
        if self.launch.placement.is_full:
            size = compute.host_compute_bytes(facts, shape, *types)
            return _item("host compute", Place.HOST, size, "masks + 4 E U, pinned")
        size = compute.cpu_compute_bytes(facts, shape, *types)
        return _item("host compute", Place.HOST, size, "at most what the CPU needs alone")

    def projector(self, facts: ProjectorFacts | None) -> list[LineItem]:
        """Tensors and graph of a projector, both in one place."""
        if facts is None:
            return []
        split = projector_weights(facts, self.backend, on_card=self.launch.projector_on_card)
        place = Place.CARD if split.card else Place.HOST
        graph = projector_graph_bytes(facts, self.launch.image_max_tokens)
        kind = facts.projector_type or "unknown type"
        formula = "1.3 x 4 B x (heads x patches^2 + patches x (feed-forward + embedding))"
        return [
            _item("projector", place, split.card + split.host, f"all tensors of the file, {kind}"),
            _item("projector graph", place, graph, f"{formula}; 1024 MiB where dimensions are missing"),
        ]

    def process(self, place: Place) -> list[LineItem]:
        """The rest of the process, in host memory."""
        facts, shape, launch = self.facts, self.shape, self.launch
        items = [
            _item(
                "output buffer",
                place,
                compute.output_buffer_bytes(facts, shape.slots),
                f"{shape.slots} x {facts.vocabulary_size} words x 4 B",
            )
        ]
        each = cache.context_checkpoint_bytes(facts, shape, *launch.cache_types, swa_full=launch.swa_full)
        checkpoints = each * launch.context_checkpoints * shape.slots
        if checkpoints:
            saved = "recurrent state" if facts.keeps_state else "sliding window"
            formula = f"slots {shape.slots} x {launch.context_checkpoints} checkpoints x {each} B of {saved}"
            items.append(_item("context checkpoints", place, checkpoints, formula))
        if launch.prompt_cache_mib:
            formula = f"limit of finished prompts: {launch.prompt_cache_mib} MiB"
            items.append(_item("prompt cache", place, launch.prompt_cache_mib * MIB, formula))
        formula = f"code, heap, vocabulary, threads: {compute.PROCESS_BYTES // MIB} MiB"
        items.append(_item("process", place, compute.PROCESS_BYTES, formula))
        return items


def _item(name: str, place: Place, size_bytes: int, formula: str) -> LineItem:
    return LineItem(name, place, size_bytes, Evidence.HEADER, formula)


def _placed(facts: CheckpointFacts, where: Placement) -> str:
    parts = []
    if where.layers_on_card is not None:
        parts.append(f"the last {min(where.layers_on_card, len(facts.layers) + 1)} layers")
    if where.expert_layers_on_host:
        parts.append(f"all but the experts of the first {where.expert_layers_on_host}")
    return ", ".join(parts) or "all layers"
