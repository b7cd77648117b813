"""A launch over several cards: which layers each of them gets, and what each then takes. Pure.

As llama.cpp b11434 does it with ``--split-mode layer`` (``load_tensors``, and the constructor of its context): layers
follow ``--tensor-split`` in the order of ``--device``, the output being one more layer at the end; caches and states
follow their layer. What a layer or the output owns is priced to the byte. What a card computes is an upper bound: each
is charged the widest part of the whole graph, whichever layers it has (:mod:`lllm3090d.planning.split_compute`).
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import NamedTuple

from lllm3090d.checkpoints.facts import (
    CheckpointFacts,
    LayerFacts,
    LayerKind,
    ProjectorFacts,
    Purpose,
    total,
)
from lllm3090d.engines.capabilities import Backend
from lllm3090d.planning import cache, compute, placement
from lllm3090d.planning.cache import CacheShape
from lllm3090d.planning.drafting import DraftContext, draft_context
from lllm3090d.planning.launch import Launch, PlanPolicy
from lllm3090d.planning.placement import REMEMBERED, Placement
from lllm3090d.planning.quote import Evidence, LineItem, Place, Quote, price
from lllm3090d.planning.split_compute import SplitGraph, overlaps
from lllm3090d.planning.units import MIB

REMEMBERED_DIVISIONS = 32
MAX_DEVICES = 15  # that one --tensor-split may name; a constant of the engine

# Items of a quote that every card has in full, and those that are worked out here; the others are of the main card.
_OF_EVERY_CARD = frozenset({"slack"})
_WORKED_OUT = frozenset(
    {"weights", "kv cache", "recurrent state", "compute", "runtime", "workspace floor", "draft compute"}
)
_WIDE_FACTORS = frozenset({"gemma4"})  # RoPE factors are for blocks that see the whole context only


@dataclass(frozen=True, slots=True)
class DeviceSplit:
    """A launch on named cards.

    Attributes:
        devices: names for ``--device``, in its order. The last is the main one: it has the output, what drafts from a
            file of its own, and the projector.
        shares: layers of each, the output counting as one, for ``--tensor-split``; exact for the engine.
        ledgers: what each takes of its card.
        host: what the launch takes beside them.
    """

    devices: tuple[str, ...]
    shares: tuple[int, ...]
    ledgers: tuple[Quote, ...]
    host: Quote

    @property
    def main(self) -> str:
        """Name of the main card."""
        return self.devices[-1]

    @property
    def needs_bytes(self) -> tuple[int, ...]:
        """Of each card."""
        return tuple(ledger.total_bytes(Place.CARD) for ledger in self.ledgers)

    @property
    def quote(self) -> Quote:
        """All cards together, item by item, and the host."""
        names = dict.fromkeys(item.name for ledger in self.ledgers for item in ledger.items)
        return Quote((*map(self._together, names), *self.host.items))

    def _together(self, name: str) -> LineItem:
        pairs = zip(self.devices, self.ledgers, strict=True)
        found = [(device, item) for device, ledger in pairs for item in ledger.items if item.name == name]
        if len(self.devices) == 1:
            return found[0][1]
        sizes = ", ".join(f"{device} {item.bytes / MIB:.0f} MiB" for device, item in found)
        whole = sum(item.bytes for _, item in found)
        return replace(found[-1][1], bytes=whole, formula=f"{sizes}; {found[-1][1].formula}")


def on_one_card(device: str, quote: Quote) -> DeviceSplit:
    """The same for a launch on a single one of several cards."""
    card, host = (
        Quote(tuple(item for item in quote.items if item.place is place))
        for place in (Place.CARD, Place.HOST)
    )
    return DeviceSplit((device,), (1,), (card,), host)


# ---- Which layers ------------------------------------------------------------------------------------------------


def assigned_layers(layers: int, shares: Sequence[float]) -> tuple[int, ...]:
    """How many of so many layers each card gets for any ``--tensor-split``, as the engine's 32-bit floats have it.

    Of whole numbers that add up to the layers, each card gets its number.

    Args:
        layers: on all cards together, the output counting as one.
        shares: in the order of the cards.

    Raises:
        ValueError: a share is negative, all are 0, or there are none.
    """
    if not shares or min(shares) < 0 or not any(shares):
        raise ValueError("shares are not negative, and one of them is not 0")
    sums = list(accumulate(map(_f32, shares), lambda left, right: _f32(left + right)))
    ends = [_f32(end / sums[-1]) for end in sums]
    counts = [0] * len(shares)
    for layer in range(layers):
        counts[bisect_right(ends, _f32(layer / layers))] += 1
    return tuple(counts)


def _f32(value: float) -> float:
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


def layers_on_cards(facts: CheckpointFacts, where: Placement) -> int:
    """How many layers there are to share out, the output counting as one."""
    return max(0, len(facts.layers) + 1 - where.first_on_card(facts))


def last_cut(facts: CheckpointFacts) -> int:
    """The last block at which a card may begin without copies of caches: blocks that share one stay with its owners.

    Those are the two blocks before the first that shares, one that slides and one that does not.
    """
    shared = (index for index, layer in enumerate(facts.layers) if layer.kind is LayerKind.SHARED)
    first = next(shared, None)
    return len(facts.layers) if first is None else max(0, first - compute.SHARED_CACHE_OWNERS)


# ---- What they cost ----------------------------------------------------------------------------------------------


class _Position(NamedTuple):
    """What of a card's place decides what it takes beside its layers' own."""

    first: bool
    last: bool
    drafts: bool  # it computes a part of the draft
    behind: int  # its first layer, where it begins behind blocks whose caches its own share; 0 elsewhere


@dataclass(frozen=True)
class Division:
    """One launch to be divided among any number of cards.

    Layers are counted from the first that is on a card; the output is the last.

    Attributes:
        facts, launch, backend, policy, projector: as for :func:`lllm3090d.planning.quote.price`; a launch that is not
            divided between card and host by a line.
    """

    facts: CheckpointFacts
    launch: Launch
    backend: Backend
    policy: PlanPolicy
    projector: ProjectorFacts | None = None
    _known: dict[_Position, tuple[LineItem, ...]] = field(default_factory=dict, compare=False, repr=False)
    _sums: dict[_Position, int] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Raises ValueError for what is on one card, or none."""
        if self.launch.line_tokens or self.backend is Backend.CPU:
            raise ValueError("a cache with a line is on one card, and the host is one memory")

    @cached_property
    def where(self) -> Placement:
        """What of the model is on cards."""
        return self.launch.placement(self.facts)

    @cached_property
    def layers(self) -> int:
        """How many there are, the output counting as one."""
        return layers_on_cards(self.facts, self.where)

    @cached_property
    def last_cut(self) -> int:
        """The last layer at which a card may begin; see :func:`last_cut`. 0 where only one card can have any."""
        return max(0, min(self.layers - 1, last_cut(self.facts) - self.where.first_on_card(self.facts)))

    @cached_property
    def single(self) -> Quote:
        """The launch on one card, whose items are shared out here."""
        return price(self.facts, self.launch, self.backend, self.policy, self.projector)

    # ---- what layers own

    @cached_property
    def columns(self) -> dict[str, tuple[int, ...]]:
        """Bytes of each kind of the first 0, 1, 2 .. layers together, without RoPE factors."""
        facts, shape, memory = self.facts, self._shape, placement.memory_of(self.backend)
        types, own = self.launch.cache_types, self._own_draft
        kept: dict[str, Callable[[LayerFacts], int]] = {}
        if not self.where.cache_on_host:
            kept["kv cache"] = lambda layer: (
                cache.layer_kv_bytes(facts, layer, shape, types, memory=memory)
                if layer.in_main_context
                else 0
            )
            kept["recurrent state"] = lambda layer: (
                0 if layer.is_mtp else cache.layer_state_bytes(layer, shape, memory=memory)
            )
        if own is not None:
            kept["draft cache"] = lambda layer: (
                cache.layer_kv_bytes(facts, layer, own.shape, own.types, memory=memory)
                if layer.is_mtp
                else 0
            )
        blocks = facts.layers[self.where.first_on_card(facts) :]
        columns = {"weights": _layer_weights(facts, self.where, self.backend)}
        columns |= {name: (*_each(blocks, size), 0) for name, size in kept.items() if self.layers}
        return {name: tuple(accumulate(sizes, initial=0)) for name, sizes in columns.items()}

    @cached_property
    def _owned(self) -> tuple[int, ...]:
        """All columns together."""
        return tuple(map(sum, zip(*self.columns.values(), strict=True)))

    @cached_property
    def _rotated(self) -> tuple[int, ...]:
        """How many of the first 0, 1, 2 .. layers read RoPE factors from their card."""
        blocks = self.facts.layers[self.where.first_on_card(self.facts) :]
        reads = [
            (self.where.with_mtp or not layer.is_mtp)
            and (layer.kind is not LayerKind.SLIDING or self.facts.architecture not in _WIDE_FACTORS)
            for layer in blocks
        ]
        return tuple(accumulate([*reads, False][: self.layers], initial=0))

    def _rope_bytes(self, begin: int, end: int) -> int:
        """A copy of the factors on every card with a block that reads them."""
        if self._rotated[end] == self._rotated[begin]:
            return 0
        return self.facts.tables.rope.in_memory(placement.memory_of(self.backend))

    # ---- a card

    def need_bytes(self, begin: int, end: int) -> int:
        """What a card with the layers begin .. end - 1 takes; never less with more of them."""
        owned = self._owned[end] - self._owned[begin] + self._rope_bytes(begin, end)
        return owned + self._beside_bytes(begin, end)

    def ledger(self, begin: int, end: int) -> Quote:
        """The same, item by item."""
        which = f"layers {begin + 1} to {end} of {self.layers} on cards, the output being the last"
        items = []
        for name, sums in self.columns.items():
            size = sums[end] - sums[begin] + (self._rope_bytes(begin, end) if name == "weights" else 0)
            if size:
                items.append(LineItem(name, Place.CARD, size, Evidence.HEADER, which))
        return Quote((*items, *self._beside(begin, end)))

    def host(self) -> Quote:
        """What the launch takes beside the cards."""
        items = (item for item in self.single.items if item.place is Place.HOST)
        more = self._graph.host_inputs_bytes()
        if self._draft_graph is not None:
            more += self._draft_graph.host_inputs_bytes()
        return Quote(
            tuple(
                replace(item, bytes=item.bytes + more, formula=f"{item.formula}; {more} B for several cards")
                if item.name == "host compute" and more
                else item
                for item in items
            )
        )

    def split(self, devices: Sequence[str], shares: Sequence[int]) -> DeviceSplit:
        """With so many layers on each of these cards; raises ValueError where they are not all layers together."""
        if sum(shares) != self.layers or len(shares) != len(devices) or min(shares) < 0:
            raise ValueError(f"{tuple(shares)} on {len(devices)} cards are not {self.layers} layers")
        cuts = tuple(accumulate(shares, initial=0))
        ledgers = tuple(map(self.ledger, cuts, cuts[1:]))
        return DeviceSplit(tuple(devices), tuple(shares), ledgers, self.host())

    # ---- beside what layers own

    @cached_property
    def _shape(self) -> CacheShape:
        return self.launch.shape(self.facts)

    @cached_property
    def _drafting(self) -> DraftContext | None:
        return draft_context(self.facts, self.launch, self._shape)

    @cached_property
    def _own_draft(self) -> DraftContext | None:
        """The draft's context where its blocks are among the model's layers, and so where those are."""
        drafting = self._drafting
        return None if drafting is None or drafting.is_own_file else drafting

    @cached_property
    def _graph(self) -> SplitGraph:
        where = self.where
        types = self.launch.cache_types
        return SplitGraph(
            self.facts, self._shape, types, self.backend, overlaps(where), states_on_host=where.cache_on_host
        )

    @cached_property
    def _draft_graph(self) -> SplitGraph | None:
        own = self._own_draft
        return None if own is None else replace(self._graph, shape=own.shape, types=own.types)

    def _beside(self, begin: int, end: int) -> tuple[LineItem, ...]:
        where = self._position(begin, end)
        if where not in self._known:
            self._known[where] = tuple(self._items(where))
        return self._known[where]

    def _beside_bytes(self, begin: int, end: int) -> int:
        where = self._position(begin, end)
        if where not in self._sums:
            self._sums[where] = sum(item.bytes for item in self._beside(begin, end))
        return self._sums[where]

    def _position(self, begin: int, end: int) -> _Position:
        drafted = self.columns.get("draft cache")
        has_block = drafted is not None and drafted[end] > drafted[begin]
        last = end == self.layers
        drafts = has_block or (last and self._drafting is not None)
        return _Position(begin == 0, last, drafts, behind=begin if begin > self.last_cut else 0)

    def _items(self, where: _Position) -> Iterator[LineItem]:
        graph = self._compute(where)
        yield graph
        if where.drafts:
            yield self._draft_compute()
        runtime = self._runtime(where)
        yield runtime
        reserve = self.policy.workspace_reserve_mib
        missing = compute.workspace_missing_bytes(graph.bytes + runtime.bytes, reserve)
        if missing:
            formula = (
                f"compute and runtime raised to {reserve} MiB on every card, until this build is measured"
            )
            yield _item("workspace floor", missing, formula)
        for item in self.single.items:
            if item.place is not Place.CARD or item.name in _WORKED_OUT or item.name in self.columns:
                continue
            if item.name in _OF_EVERY_CARD or where.last:
                yield item

    def _compute(self, where: _Position) -> LineItem:
        """An upper bound, with its margin."""
        launch, graph = self.launch, self._graph
        vectors = launch.purpose is not Purpose.CHAT
        outputs = compute.server_outputs(self._shape, launch.longest_draft, every_token=vectors)
        size = graph.bytes(outputs if where.last else 0)
        inputs = graph.inputs_bytes(first=where.first, last=where.last)
        more = compute.compute_margin_bytes(self.facts, self._shape, size, self.policy.margins)
        more += compute.HOST_TENSOR_COPIES * placement.largest_host_tensor_bytes(self.facts, self.where)
        read = compute.host_cache_copy_bytes(
            self.facts,
            self._shape,
            launch.cache_types,
            first_on_card=self.where.first_on_card(self.facts) + where.behind,
            cache_on_host=self.where.cache_on_host,
        )
        inputs += read * (2 if self.where.cache_on_host else graph.copies)
        formula = (
            f"at most {size} B as on a single card, + {inputs} B for copies of its inputs, + {more} B margin"
        )
        return _item("compute", size + inputs + more, formula)

    def _draft_compute(self) -> LineItem:
        single = self.single.item("draft compute")
        more = 0 if self._draft_graph is None else self._draft_graph.draft_inputs_bytes()
        return replace(single, bytes=single.bytes + more)

    def _runtime(self, where: _Position) -> LineItem:
        """Of every card, and for the second context where that is."""
        second = self._own_draft is not None or (where.last and self._drafting is not None)
        size = compute.runtime_bytes(self.backend) + (compute.SECOND_CONTEXT_BYTES if second else 0)
        return _item("runtime", size, f"context, BLAS and pools of {self.backend} on every card")


@lru_cache(maxsize=REMEMBERED_DIVISIONS)
def division_of(
    facts: CheckpointFacts,
    launch: Launch,
    backend: Backend,
    policy: PlanPolicy,
    projector: ProjectorFacts | None,
) -> Division:
    """The division of a launch, with what was worked out of it so far: one decision asks again and again."""
    return Division(facts, launch, backend, policy, projector)


def _item(name: str, size_bytes: int, formula: str) -> LineItem:
    return LineItem(name, Place.CARD, size_bytes, Evidence.HEADER, formula)


def _each(layers: Iterable[LayerFacts], size: Callable[[LayerFacts], int]) -> Iterator[int]:
    """The size of each layer; of equal ones, which are one object, it is worked out once."""
    known: dict[int, int] = {}
    for layer in layers:
        if id(layer) not in known:
            known[id(layer)] = size(layer)
        yield known[id(layer)]


@lru_cache(maxsize=REMEMBERED)
def _layer_weights(facts: CheckpointFacts, where: Placement, backend: Backend) -> tuple[int, ...]:
    """Bytes of the weights of each layer on cards, the output last; raises as :func:`placement.check_placement`."""
    placement.check_placement(facts, where, backend)
    first, memory, tables = where.first_on_card(facts), placement.memory_of(backend), facts.tables
    if first > len(facts.layers):
        return ()
    sizes = []
    for index, layer in enumerate(facts.layers[first:], first):
        moved = index < where.expert_layers_on_host
        weights = layer.weights.without_experts if moved else layer.weights.all
        sizes.append(weights.in_memory(memory) if where.with_mtp or not layer.is_mtp else 0)
    output = total((tables.output, tables.output_other))
    if facts.output_is_copied:
        output += tables.token_embedding  # its own copy on the card
    return (*sizes, output.in_memory(memory))
