"""The engine's own projection of a launch: what it means, whether it may be made, prices out of it. Pure.

:mod:`lllm3090d.engines.dry_run` lets ``llama-fit-params`` make one. It reports whole MiB, rounded down, of the main
context alone: no draft, no projector, one copy of recurrent states. It assumes an output for every token of a micro
batch, where the server has one for each slot and token of a draft.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from lllm3090d.checkpoints.facts import CheckpointFacts, Purpose
from lllm3090d.engines.capabilities import Backend
from lllm3090d.planning import compute, placement
from lllm3090d.planning.launch import Launch
from lllm3090d.planning.placement import EVERYTHING
from lllm3090d.planning.units import MIB, mib_ceil

TOLERANCE = 0.01  # of a place's total: what differs by more is reported
ROUNDING_BYTES = MIB - 1  # a figure in whole MiB may stand for so much more

# Memory of the device that a dry run takes as long as it runs, whatever the model; judgement. CUDA makes a context as
# soon as its memory is asked for, Vulkan a logical device.
DEVICE_BYTES: Mapping[Backend, int] = MappingProxyType(
    {
        Backend.CUDA: 512 * MIB,
        Backend.ROCM: 512 * MIB,
        Backend.SYCL: 512 * MIB,
        Backend.VULKAN: 128 * MIB,
    }
)
DEVICE_MARGIN_BYTES = 256 * MIB  # that stays free on the card beside it; judgement
HOST_BYTES = 128 * MIB  # of its process; measured 31 to 72 MiB, vocabulary of 262,144 words included
HOST_MARGIN_BYTES = 512 * MIB  # that stays free in host memory beside it; judgement
# Recurrent states are really allocated; the largest seen, of a 7B Mamba-2 in four slots, were 1.07 GB.
UNKNOWN_STATE_BYTES = 2048 * MIB


class Where(enum.StrEnum):
    """On what a dry run is made."""

    DEVICE = "device"  # as the launch would be, so that the shares of device and host are known
    HOST = "host"  # kept off every device: all is reported as host memory, nothing of what only devices need
    NOWHERE = "nowhere"


@dataclass(frozen=True, slots=True)
class Permission:
    """Whether a dry run may be made, and what follows.

    Attributes:
        where: on what.
        reason: why not on the device, and what that means for the result; empty where nothing is missing.
    """

    where: Where
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Figures:
    """What one place holds, bytes."""

    weights_bytes: int
    context_bytes: int
    compute_bytes: int

    @property
    def total_bytes(self) -> int:
        """All three."""
        return self.weights_bytes + self.context_bytes + self.compute_bytes


@dataclass(frozen=True, slots=True)
class Projection:
    """What a launch takes, by place.

    Attributes:
        devices: name and figures of each, in the engine's order; the output is on the last.
        host: figures of host memory.
        where: on what it was made; HOST has no devices.
        rounding_bytes: what each figure may be short of.
    """

    devices: tuple[tuple[str, Figures], ...]
    host: Figures
    where: Where
    rounding_bytes: int = ROUNDING_BYTES

    @property
    def device(self) -> Figures:
        """The sum of all devices."""
        each = [figures for _, figures in self.devices]
        return Figures(
            sum(figures.weights_bytes for figures in each),
            sum(figures.context_bytes for figures in each),
            sum(figures.compute_bytes for figures in each),
        )

    def rounding_of(self, count: int) -> int:
        """What the sum of so many figures of each device may be short of; 1 device where all is on the host."""
        return self.rounding_bytes * count * max(1, len(self.devices))

    def lines(self) -> tuple[str, ...]:
        """The ledger for a person, one line for each place, in MiB."""
        places = [*self.devices, ("Host", self.host)]
        return tuple(
            f"{name}: weights {_mib(each.weights_bytes)}, context {_mib(each.context_bytes)},"
            f" compute {_mib(each.compute_bytes)} MiB"
            for name, each in places
        )


@dataclass(frozen=True, slots=True)
class Difference:
    """One place whose totals differ.

    Attributes:
        place: ``device`` or ``host``.
        ours_bytes, engine_bytes: the totals; the engine's at the end of its rounding that is nearer to ours.
    """

    place: str
    ours_bytes: int
    engine_bytes: int

    @property
    def fraction(self) -> float:
        """Ours over the engine's, less 1."""
        return self.ours_bytes / max(1, self.engine_bytes) - 1


@dataclass(frozen=True, slots=True)
class Comparison:
    """Our arithmetic beside the engine's."""

    ours: Projection
    engine: Projection
    differences: tuple[Difference, ...]

    @property
    def agrees(self) -> bool:
        """Nothing differs by more than :data:`TOLERANCE`."""
        return not self.differences

    def report(self) -> str:
        """What differs, with both ledgers; one line where nothing does."""
        if self.agrees:
            return f"the totals agree within {TOLERANCE * 100:.0f} %"
        found = ", ".join(
            f"{each.place} {each.fraction * 100:+.1f} % ({_mib(each.ours_bytes)} against {_mib(each.engine_bytes)} MiB)"
            for each in self.differences
        )
        ours = "; ".join(self.ours.lines())
        engine = "; ".join(self.engine.lines())
        return f"our totals differ from the engine's: {found}. Ours: {ours}. The engine's: {engine}"


def may_run(
    backend: Backend,
    *,
    card_free_bytes: int | None,
    host_available_bytes: int,
    state_bytes: int | None,
) -> Permission:
    """Whether a dry run may be made now, and on what.

    It allocates neither weights nor cache, but a device context, and the recurrent states for real. A card without
    room for both is left alone: the run would fail, or take what a loading model is about to need.

    Args:
        backend: of the build.
        card_free_bytes: free on the card, less what loading models will still take; None where nobody knows.
        host_available_bytes: of host memory.
        state_bytes: recurrent states of all slots; None where nobody knows, as without a rule for the architecture.
    """
    on_host = HOST_BYTES + HOST_MARGIN_BYTES + (UNKNOWN_STATE_BYTES if state_bytes is None else state_bytes)
    if host_available_bytes < on_host:
        return Permission(
            Where.NOWHERE,
            f"host memory has {host_available_bytes // MIB} MiB, a dry run may need {mib_ceil(on_host)}",
        )
    if backend is Backend.CPU:
        return Permission(Where.HOST)
    without = "made without the card, it tells no shares of card and host, and nothing that only cards need"
    needed = DEVICE_BYTES.get(backend)
    if needed is None:
        return Permission(Where.HOST, f"nobody knows what backend {backend} takes of the card; {without}")
    if state_bytes is None:
        return Permission(Where.HOST, f"recurrent states of unknown size may be allocated; {without}")
    needed += state_bytes + DEVICE_MARGIN_BYTES
    if card_free_bytes is None or card_free_bytes < needed:
        has = (
            "nobody knows what is free"
            if card_free_bytes is None
            else f"{card_free_bytes // MIB} MiB are free"
        )
        return Permission(Where.HOST, f"the card needs {mib_ceil(needed)} MiB for it and {has}; {without}")
    return Permission(Where.DEVICE)


def main_context(launch: Launch) -> Launch:
    """The launch without drafting: all that a dry run knows of it."""
    return replace(launch, draft=None, drafter=None)


def expected(
    facts: CheckpointFacts, launch: Launch, backend: Backend, where: Where, *, outputs: int | None = None
) -> Projection:
    """What our arithmetic says a dry run reports.

    Args:
        facts: the checkpoint.
        launch: to be projected; drafting is left out.
        backend: of the build.
        where: on what the run is made; a run on the host has neither card nor placement.
        outputs: of a micro batch; None for what the dry run assumes.

    Raises:
        LlmError: as :func:`lllm3090d.planning.quote.price`.
    """
    main = main_context(launch)
    shape, types = main.shape(facts), launch.cache_types
    outputs = compute.graph_tokens(shape) if outputs is None else outputs
    if where is not Where.DEVICE or backend is Backend.CPU:
        host = Figures(
            placement.weights(facts, EVERYTHING, Backend.CPU).card,
            placement.context(facts, EVERYTHING, Backend.CPU, shape, types).card,
            compute.cpu_compute_bytes(facts, shape, *types, outputs=outputs),
        )
        return Projection((), host, Where.HOST, rounding_bytes=0)
    plan = main.placement(facts)
    weights = placement.weights(facts, plan, backend)
    context = placement.context(facts, plan, backend, shape, types)
    graph = compute.card_compute_bytes(facts, shape, *types, backend, outputs=outputs)
    beside = compute.host_compute_bytes if plan.is_full else compute.cpu_compute_bytes
    return Projection(
        (("device", Figures(weights.card, context.card, graph)),),
        Figures(weights.host, context.host, beside(facts, shape, *types)),
        Where.DEVICE,
        rounding_bytes=0,
    )


def corrected(
    projection: Projection, facts: CheckpointFacts, launch: Launch, backend: Backend
) -> Projection:
    """The projection with the server's outputs in place of a whole micro batch of them.

    The logits are only part of a graph's peak, so what our formula says they add to it is taken off, not their size;
    and never so much that less is left than our formula has for the server's outputs, for it may add them up where
    the engine puts them into memory that is free again.
    """
    assumed = expected(facts, launch, backend, projection.where)
    served = expected(facts, launch, backend, projection.where, outputs=server_outputs(facts, launch))
    if not projection.devices:
        host = _with_outputs(projection.host, assumed.host, served.host)
        return replace(projection, host=host)
    *others, (name, last) = projection.devices
    return replace(projection, devices=(*others, (name, _with_outputs(last, assumed.device, served.device))))


def server_outputs(facts: CheckpointFacts, launch: Launch) -> int:
    """Outputs of a micro batch that the server asks for, those of drafts included."""
    shape = launch.shape(facts)
    draft_tokens = 0 if launch.draft is None else launch.draft.tokens
    vectors = launch.purpose is not Purpose.CHAT
    outputs = compute.server_outputs(shape, draft_tokens, every_token=vectors)
    return min(outputs, compute.graph_tokens(shape))


def judge(facts: CheckpointFacts, launch: Launch, backend: Backend, projection: Projection) -> Comparison:
    """Hold our arithmetic for the server against a dry run, its outputs corrected."""
    ours = expected(facts, launch, backend, projection.where, outputs=server_outputs(facts, launch))
    return compare(ours, corrected(projection, facts, launch, backend))


def compare(ours: Projection, engine: Projection) -> Comparison:
    """Hold our arithmetic against the engine's: totals by place, more than :data:`TOLERANCE` apart are told.

    Both must be for the same place and the same outputs. What host memory computes beside a card is not judged:
    where layers are left there, ours is an upper bound.
    """
    if ours.where is not engine.where:
        raise ValueError("projections on the device and on the host cannot be compared")
    if not engine.devices:
        pairs = [("host", ours.host.total_bytes, engine.host.total_bytes, 3)]
    else:
        pairs = [
            ("device", ours.device.total_bytes, engine.device.total_bytes, 3 * len(engine.devices)),
            ("host", _kept(ours.host), _kept(engine.host), 2),
        ]
    found = []
    for place, our_bytes, least_bytes, figures in pairs:
        most_bytes = least_bytes + figures * engine.rounding_bytes
        nearest = min(max(our_bytes, least_bytes), most_bytes)
        if abs(our_bytes - nearest) > TOLERANCE * nearest:
            found.append(Difference(place, our_bytes, nearest))
    return Comparison(ours, engine, tuple(found))


def _kept(figures: Figures) -> int:
    return figures.weights_bytes + figures.context_bytes


def _with_outputs(engine: Figures, assumed: Figures, served: Figures) -> Figures:
    surplus = assumed.compute_bytes - served.compute_bytes
    least = min(engine.compute_bytes, served.compute_bytes)
    return replace(engine, compute_bytes=max(engine.compute_bytes - surplus, least))


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / MIB:,.1f}"
