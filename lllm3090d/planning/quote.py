"""The quote, what a launch costs as a ledger of line items, and the one function that prices a launch."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import lru_cache

from lllm3090d.checkpoints.facts import CheckpointFacts, LayerKind, ProjectorFacts, Purpose
from lllm3090d.engines.capabilities import Backend
from lllm3090d.planning import cache, compute, placement, tier
from lllm3090d.planning.cache import CacheShape
from lllm3090d.planning.cache_types import has_fast_kernel
from lllm3090d.planning.context_checkpoints import checkpoints_of_slot, context_checkpoint_bytes
from lllm3090d.planning.drafting import DraftContext, draft_context
from lllm3090d.planning.launch import Draft, Launch, PlanPolicy, SpecType
from lllm3090d.planning.layer_groups import context_groups, trunk_groups
from lllm3090d.planning.placement import Placement
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
    "SpecType",
    "draft_need_bytes",
    "price",
]

# The launches that one decision asks for again and again, in one room after the other.
REMEMBERED_PRICES = 128


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
    return _priced(facts, launch, backend, policy, projector)


@lru_cache(maxsize=REMEMBERED_PRICES)
def _priced(
    facts: CheckpointFacts,
    launch: Launch,
    backend: Backend,
    policy: PlanPolicy,
    projector: ProjectorFacts | None,
) -> Quote:
    cache.check_cache_types(facts, *launch.cache_types)
    shape = launch.shape(facts)
    drafting = draft_context(facts, launch, shape)
    order = _Order(facts, launch, backend, policy, shape, drafting)
    if backend is Backend.CPU:
        items = [*order.weights(), *order.context(), order.compute(), order.slack()]
        items += [*order.draft(), *order.process(Place.CARD), *order.draft_process(Place.CARD)]
        return Quote((*items, *order.projector(projector)))
    graph = order.compute()
    draft = order.draft()
    card = [*order.weights(), *order.context(), graph, *draft, *order.runtime(graph)]
    host = [order.pinned(), *order.process(Place.HOST), *order.draft_process(Place.HOST)]
    return Quote((*card, *host, *order.projector(projector)))


def draft_need_bytes(facts: CheckpointFacts, launch: Launch, backend: Backend, policy: PlanPolicy) -> int:
    """The items of :func:`price` on the card that the cache types of a draft change, together; raises as it does.

    By this the types are chosen: whole prices would differ by the same, and take longer.
    """
    shape = launch.shape(facts)
    order = _Order(facts, launch, backend, policy, shape, draft_context(facts, launch, shape))
    items = order.draft()
    if backend is Backend.CPU:
        items += order.checkpoints(Place.CARD)
    return Quote(tuple(items)).total_bytes(Place.CARD)


@dataclass(frozen=True, slots=True)
class _Order:
    """One launch to be priced, with its shape."""

    facts: CheckpointFacts
    launch: Launch
    backend: Backend
    policy: PlanPolicy
    shape: CacheShape
    drafting: DraftContext | None

    @property
    def where(self) -> Placement:
        """What of the model is on the card."""
        return self.launch.placement(self.facts)

    @property
    def _gives_vectors(self) -> bool:
        return self.launch.purpose is not Purpose.CHAT

    def weights(self) -> list[LineItem]:
        """All tensors, by place."""
        facts, where = self.facts, self.where
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
        if facts.output_is_copied:
            formula += ", and its copy as output"
        return [
            _item("weights", Place.CARD, split.card, formula),
            _item("token embedding", Place.HOST, split.host, "stays in host memory"),
        ]

    def context(self) -> list[LineItem]:
        """Cache and states."""
        facts, shape = self.facts, self.shape
        memory = placement.memory_of(self.backend)
        states = cache.state_bytes(facts, shape, memory=memory)
        if self.launch.line_tokens:
            return [*self.divided(), *self.states(states)]
        split = placement.context(facts, self.where, self.backend, shape, self.launch.cache_types)
        if self.where.is_full:
            kv_bytes, host_bytes = split.card - states, 0
        else:
            kv_bytes, states, host_bytes = split.card, 0, split.host
        items = []
        if kv_bytes:
            items.append(_item("kv cache", Place.CARD, kv_bytes, self._cells()))
        items += self.states(states)
        if host_bytes:
            items.append(_item("host cache", Place.HOST, host_bytes, "of the layers beside the card"))
        return items

    def states(self, size_bytes: int) -> list[LineItem]:
        """Recurrent states of all slots."""
        if not size_bytes:
            return []
        count = sum(group.count for group in trunk_groups(self.facts) if group.layer.keeps_state)
        formula = f"{count} layers x {self.shape.slots} slots x {self.shape.state_planes} planes, f32"
        return [_item("recurrent state", Place.CARD, size_bytes, formula)]

    def divided(self) -> list[LineItem]:
        """A cache with a line: its first cells and the staging on the card, the others pinned in host memory."""
        line, shape = self.launch.line_tokens, self.shape
        sizes = tier.tier_sizes(tier.tier_layouts(self.facts, shape, self.launch.cache_type_k), line)
        head = f"{line} of {shape.context_tokens} cells of {sizes.layers} layers, whole pages of 2 MiB"
        return [
            _item("kv cache", Place.CARD, sizes.head_bytes, head),
            _item("kv staging", Place.CARD, sizes.staging_bytes, "what one layer has beyond the line"),
            _item("pinned cache", Place.HOST, sizes.host_bytes, "cells beyond the line, not swappable"),
        ]

    def _cells(self) -> str:
        shape, parts = self.shape, []
        for kind in (LayerKind.FULL, LayerKind.LATENT, LayerKind.SLIDING):
            count = sum(g.count for g in context_groups(self.facts) if g.layer.kind is kind)
            if count:
                parts.append(f"{count} layers x {shape.streams} x {shape.cells(kind)} cells")
        return f"{' + '.join(parts)}, K {self.launch.cache_type_k}, V {self.launch.cache_type_v}"

    def compute(self) -> LineItem:
        """Compute buffer with its margin."""
        facts, shape, types = self.facts, self.shape, self.launch.cache_types
        draft_tokens = self.launch.longest_draft
        outputs = compute.server_outputs(shape, draft_tokens, every_token=self._gives_vectors)
        if self.backend is Backend.CPU:
            graph = compute.cpu_compute_bytes(facts, shape, *types, outputs=outputs)
            formula = "masks + 5 E U + widest of body, attention, logits"
        else:
            graph = compute.card_compute_bytes(facts, shape, *types, self.backend, outputs=outputs)
            formula = "masks + 4 E U + widest of body, attention with f16 copies, logits"
        margin = compute.compute_margin_bytes(facts, shape, graph, self.policy.margins)
        tokens = compute.graph_tokens(shape)
        text = f"{formula}, {tokens} tokens: {graph} B; {self._margin_text}"
        copied = compute.HOST_TENSOR_COPIES * placement.largest_host_tensor_bytes(facts, self.where)
        if self.backend is not Backend.CPU and copied:
            text += f"; {copied} B for tensors that large batches copy from host memory"
            margin += copied
        where, read = self.where, 0
        if self.backend is not Backend.CPU and not where.is_full:
            first = where.first_on_card(facts)
            read = compute.host_cache_copy_bytes(
                facts, shape, types, first_on_card=first, cache_on_host=where.cache_on_host
            )
        if read:
            text += f"; {read} B for caches that are read from host memory"
            margin += read
        return _item("compute", Place.CARD, graph + margin, text)

    @property
    def _margin_text(self) -> str:
        margins = self.policy.margins
        text = f"+ {margins.compute_residuals} E U + {margins.compute_percent} % margin"
        factor = margins.compute_buffer_factor
        return text if factor == 1 else f"{text}, times {factor:g} (setting compute_buffer_factor)"

    def slack(self) -> LineItem:
        """What nobody has accounted for."""
        size = compute.slack_bytes(self.shape.context_tokens, self.policy.margins)
        formula = f"unaccounted for, at {self.shape.context_tokens} tokens: {size // MIB} MiB"
        return _item("slack", Place.CARD, size, formula)

    def draft(self) -> list[LineItem]:
        """The second context, and its weights where they are in a file of their own."""
        drafting = self.drafting
        if drafting is None:
            return []
        split, shape, types = drafting.weights(self.backend), drafting.shape, drafting.types
        items = []
        if split.card:
            formula = "all tensors of its file"
            if self.backend is not Backend.CPU:
                formula += " but the token embedding"
            items.append(_item("draft weights", Place.CARD, split.card, formula))
        kept, pinned = drafting.cache_bytes(placement.memory_of(self.backend)), 0
        divided = drafting.divided(self.launch.line_tokens)
        if divided is not None:
            kept, pinned = divided.card_bytes, divided.host_bytes
        formula = f"{len(drafting.layers)} layers, {shape.context_tokens} cells, K {types[0]}, V {types[1]}"
        graph = drafting.compute_bytes(self.backend)
        place, how = self._draft_place(drafting), "masks + 4 E U + widest of body, attention, logits"
        if place is Place.HOST:  # attention on the card copies a layer of it
            read = -(-kept // max(1, len(drafting.layers)))
            graph, how = graph + read, f"{how}; {read} B of its cache that are read from host memory"
        items += [
            _item("draft cache", place, kept, formula),
            _item("draft compute", Place.CARD, graph, how),
        ]
        if pinned:
            items.append(_item("pinned draft cache", Place.HOST, pinned, "cells beyond the line"))
        return items

    def _draft_place(self, drafting: DraftContext) -> Place:
        """Where the cache of the second context is: beside the last layers, or with all caches in host memory."""
        where = self.where
        beside = where.cache_on_host or (
            not drafting.is_own_file and where.first_on_card(self.facts) >= len(self.facts.layers)
        )
        return Place.HOST if beside and self.backend is not Backend.CPU else Place.CARD

    def draft_process(self, place: Place) -> list[LineItem]:
        """What the second context adds to the process in host memory."""
        drafting = self.drafting
        if drafting is None:
            return []
        saved = drafting.speculative_checkpoint_bytes()
        handed = drafting.hidden_state_bytes(self.launch.batch_tokens)
        formula = f"2 x {self.launch.batch_tokens} tokens of a batch, f32"
        items = [_item("draft output buffer", place, drafting.output_bytes(), "logits of its guesses x 4 B")]
        if handed:
            items.append(_item("hidden states", place, handed, formula))
        if saved:
            items.append(_item("draft checkpoint", place, saved, "states before each draft, of every slot"))
        if place is Place.HOST:
            items.append(_item("draft host compute", place, drafting.host_bytes(), "masks + 4 E U, pinned"))
            embedding = drafting.weights(self.backend).host
            if embedding:
                items.append(_item("draft embedding", place, embedding, "stays in host memory"))
        return items

    def runtime(self, graph: LineItem) -> list[LineItem]:
        """What the process holds of a real card beside its buffers, the slack, and the least workspace."""
        size = compute.runtime_bytes(self.backend)
        formula = f"context, BLAS and pools of {self.backend}: {size // MIB} MiB"
        if self.drafting is not None:
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
        if self.where.is_full:
            size = compute.host_compute_bytes(facts, shape, *types)
            formula = "masks + 4 E U, pinned"
        else:
            size = compute.cpu_compute_bytes(facts, shape, *types)
            formula = "at most what the CPU needs alone"
        if not has_fast_kernel(*types):
            read = compute.largest_layer_cache_bytes(facts, shape, *types)
            formula += f"; {read} B for attention that the CPU may compute: K {types[0]}, V {types[1]}"
            size += read
        return _item("host compute", Place.HOST, size, formula)

    def checkpoints(self, place: Place) -> list[LineItem]:
        """Context checkpoints, as many as all slots may hold; none of a model that can be cut anywhere."""
        facts, shape, launch = self.facts, self.shape, self.launch
        each = context_checkpoint_bytes(facts, shape, *launch.cache_types, swa_full=launch.swa_full)
        count = checkpoints_of_slot(launch.context_checkpoints, shape)
        if not each or not count:
            return []
        saved = "recurrent state" if facts.keeps_state else "sliding window"
        formula = f"slots {shape.slots} x {count} checkpoints x {each} B of {saved}"
        drafted = 0 if self.drafting is None else self.drafting.checkpoint_copy_bytes()
        if drafted:
            formula += f", and {count} x {drafted} B of the draft's context"
        return [_item("context checkpoints", place, count * (shape.slots * each + drafted), formula)]

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
        slots = f"{shape.slots} {'slot' if shape.slots == 1 else 'slots'}"
        size = compute.output_buffer_bytes(facts, shape.slots)
        formula = f"{slots} x {facts.vocabulary_size:,} vocabulary x 4 B"
        if self._gives_vectors:
            size = compute.vector_buffer_bytes(facts, launch.batch_tokens)
            formula = f"{launch.batch_tokens:,} tokens x ({facts.vocabulary_size:,} vocabulary"
            formula += f" + {facts.embedding_length:,}) x 4 B"
        items = [_item("output buffer", place, size, formula)]
        items += self.checkpoints(place)
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
