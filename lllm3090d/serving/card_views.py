"""Who holds what of each memory, as clients see it. Pure.

The parts of a memory add up to its total exactly. What a driver tells does not: it rounds each figure by itself, and
lists its processes a moment after it counted. So the driver's own part and what is used are taken as they were read,
the owners share what is used in order (our models, then other processes, then nobody), and all that is left is free.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from lllm3090d.gpus.profiles import DETECTED_ID, profile_of
from lllm3090d.gpus.readings import Card, CardKind
from lllm3090d.planning.quote import Quote
from lllm3090d.planning.reserves import Budget
from lllm3090d.planning.units import MIB
from lllm3090d.serving.admission import held_now
from lllm3090d.serving.ledger import Ledger, Reservation, ReservationState
from lllm3090d.serving.observation import HOST, CardState, Observation, Stranger, is_foreign_unit
from lllm3090d.serving.plan_views import budget_views, item_views, weakest
from lllm3090d.serving.running import Instance
from lllm3090d.serving.unit_spec import memory_max_bytes
from lllm3090d.wire_cards import (
    ForeignProcessView,
    Gpus,
    GpuView,
    HostView,
    MemoryPartView,
    PartKind,
    PcieView,
    ReadingView,
    ReservationView,
)

Profile = Literal["known", "detected", "no-gpu"]
# Lines of a budget that are kept of what is free, and for whom.
RESERVES: Mapping[str, str] = {"desktop reserve": "the desktop", "own reserve": "the machine itself"}
DRIVER = "driver"


@dataclass(frozen=True, slots=True)
class Scene:
    """All that is told of memory, at one moment.

    Attributes:
        observation: the cards and the host.
        ledger: what is promised.
        budgets: what each card can give, by UUID; one that could not be read is missing.
        host_budget: what the host can give beside the cards; None where it is the card, or nobody knows.
        instances: by run.
        now_s: on the clock of readings and of the ledger.
        released: the cards were given away.
    """

    observation: Observation
    ledger: Ledger
    budgets: Mapping[str, Budget]
    host_budget: Budget | None
    instances: Mapping[str, Instance]
    now_s: float
    released: bool = False


def gpus_view(scene: Scene) -> Gpus:
    """Every card, and host memory beside them."""
    observation = scene.observation
    return Gpus(
        gpus=tuple(gpu_view(number, state, scene) for number, state in enumerate(observation.cards)),
        host=host_view(scene),
        desktop_active=observation.desktop_active,
        released=scene.released,
    )


def gpu_view(number: int, state: CardState, scene: Scene) -> GpuView:
    """One card; one that could not be read shows what it is and what is promised of it.

    Args:
        number: among the cards, by which it may be named.
        state: the card.
        scene: everything.
    """
    card, where, ledger = state.card, state.card.uuid, scene.ledger
    budget = scene.budgets.get(where)
    profile, profile_id = _profile(card, state)
    reading = state.reading
    held = held_now(state, ledger) if reading is not None else {}
    on_host = card.kind is CardKind.CPU
    known = held if state.attributed and reading is not None else None
    return GpuView(
        number=number,
        uuid=card.uuid,
        name=card.name,
        kind=card.kind,
        pci_address=card.pci_address or None,
        pcie=PcieView(generation=card.link.generation, width=card.link.width) if card.link else None,
        compute_capability=card.compute_capability,
        driver_version=card.driver_version,
        driver_problem=card.driver_problem or None,
        profile=profile,
        profile_id=profile_id,
        reading=ReadingView(
            age_s=_age(scene.now_s, reading.taken_monotonic_s),
            total_bytes=reading.total_bytes,
            reserved_by_driver_bytes=reading.reserved_bytes,
            used_bytes=reading.used_bytes,
            free_bytes=reading.free_bytes,
        )
        if reading
        else None,
        problem=state.problem.problem() if state.problem else None,
        attributed=state.attributed,
        parts=_parts(
            _Memory(
                reading.total_bytes,
                reading.reserved_bytes,
                reading.used_bytes,
                held,
                ledger.on(where),
                state.strangers,
                budget,
            ),
            scene,
        )
        if reading
        else (),
        rounding_bytes=reading.total_bytes
        - (reading.reserved_bytes or 0)
        - reading.used_bytes
        - reading.free_bytes
        if reading
        else 0,
        processes=tuple(map(_process_view, state.strangers)),
        reservations=reservation_views(where, scene, known, limited=on_host),
        foreign_bytes=max(0, reading.used_bytes - sum(held.values())) if reading else None,
        charged_bytes=ledger.charged_bytes(where),
        still_to_come_bytes=ledger.still_to_come_bytes(where, state.resident if state.attributed else {}),
        quarantined_bytes=ledger.quarantined_bytes(where),
        grantable_bytes=budget.grantable_bytes if budget else None,
        budget=budget_views(budget) if budget else (),
    )


def host_view(scene: Scene) -> HostView | None:
    """Host memory beside the cards; None where it takes a card's place and is among them."""
    host, ledger, budget = scene.observation.host, scene.ledger, scene.host_budget
    if host is None:
        return None
    held = scene.observation.host_in_use
    used = host.total_bytes - host.available_bytes
    memory = _Memory(host.total_bytes, 0, used, held, ledger.on(HOST), (), budget)
    return HostView(
        total_bytes=host.total_bytes,
        available_bytes=host.available_bytes,
        parts=_parts(memory, scene),
        reservations=reservation_views(HOST, scene, held, limited=True),
        charged_bytes=ledger.charged_bytes(HOST),
        in_use_bytes=sum(size for run, size in held.items() if not is_foreign_unit(run)),
        grantable_bytes=budget.grantable_bytes if budget else None,
        budget=budget_views(budget) if budget else (),
    )


def reservation_views(
    where: str, scene: Scene, held: Mapping[str, int] | None, *, limited: bool
) -> tuple[ReservationView, ...]:
    """What is promised of one memory, the largest first.

    Args:
        where: UUID of the card, or the host.
        scene: everything.
        held: what each run holds of it now; None where nobody tells.
        limited: it is host memory, which a unit has a limit of.
    """
    ordered = sorted(scene.ledger.on(where), key=lambda each: (-each.charged_bytes, each.name))
    return tuple(_reservation_view(each, scene, held, limited=limited) for each in ordered)


def _reservation_view(
    reservation: Reservation, scene: Scene, held: Mapping[str, int] | None, *, limited: bool
) -> ReservationView:
    instance = scene.instances.get(reservation.run)
    kind = scene.observation.card.kind
    return ReservationView(
        model=reservation.name,
        run=reservation.run,
        where=reservation.where,
        state=reservation.state,
        instance_state=instance.state if instance else None,
        age_s=_age(scene.now_s, reservation.since_s),
        reserved_bytes=reservation.reserved_bytes,
        measured_bytes=reservation.measured_bytes,
        charged_bytes=reservation.charged_bytes,
        held_bytes=None if held is None else held.get(reservation.run, 0),
        limit_bytes=memory_max_bytes(instance.plan, kind) if limited and instance else None,
        evidence=weakest(Quote(reservation.items)) if reservation.items else None,
        items=item_views(Quote(reservation.items)),
    )


def _process_view(stranger: Stranger) -> ForeignProcessView:
    return ForeignProcessView(
        pid=stranger.pid,
        name=stranger.name,
        user=stranger.user or None,
        model=stranger.model or None,
        unseen=stranger.unseen or None,
        used_bytes=stranger.used_bytes,
    )


def _profile(card: Card, state: CardState) -> tuple[Profile, str | None]:
    if card.kind is CardKind.CPU:
        return "no-gpu", None
    total_bytes = state.reading.total_bytes if state.reading else card.total_bytes
    profile = profile_of(card.name, total_bytes // MIB, card.compute_capability)
    return ("detected", None) if profile.id == DETECTED_ID else ("known", profile.id)


def _age(now_s: float, then_s: float) -> float:
    return round(max(0.0, now_s - then_s), 3)


# --- who holds what -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Memory:
    """One memory to be divided; ``used_bytes`` is without ``driver_bytes``, or with them where those are None."""

    total_bytes: int
    driver_bytes: int | None
    used_bytes: int
    held: Mapping[str, int]
    reservations: tuple[Reservation, ...]
    strangers: tuple[Stranger, ...]
    budget: Budget | None


@dataclass(slots=True)
class _Pool:
    """Bytes that are given out and not more of them than there are."""

    left: int

    def take(self, wanted: int) -> int:
        taken = min(max(0, wanted), self.left)
        self.left -= taken
        return taken


@dataclass(slots=True)
class _Owner:
    """A model's parts of one memory."""

    name: str
    reservation: Reservation | None = None
    used: int = 0
    promised: int = 0


def _parts(memory: _Memory, scene: Scene) -> tuple[MemoryPartView, ...]:
    """In order: driver, strangers, our models with what they were promised, quarantine, reserve, free."""
    whole = _Pool(max(0, memory.total_bytes))
    driver = whole.take(memory.driver_bytes or 0)
    used = _Pool(whole.take(memory.used_bytes))
    free = whole
    owners = _owners(memory, scene)
    for run, owner in owners.items():
        owner.used = used.take(memory.held.get(run, 0))
    strangers = [(each, used.take(each.used_bytes or 0)) for each in memory.strangers]
    for owner in owners.values():
        if owner.reservation is not None:
            owner.promised = free.take(owner.reservation.charged_bytes - owner.used)
    parts = [MemoryPartView(kind=PartKind.DRIVER, name="driver", bytes=driver)]
    parts += [
        MemoryPartView(
            kind=PartKind.PROCESS,
            name=each.name or "a process",
            bytes=size,
            pid=each.pid,
            user=each.user or None,
            model=each.model or None,
            unseen=each.unseen or None,
        )
        for each, size in strangers
    ]
    parts.append(MemoryPartView(kind=PartKind.OTHERS, name="other memory in use", bytes=used.left))
    for run, owner in owners.items():
        parts += _owned(run, owner, scene.now_s)
    for name, size_bytes in _kept(memory):
        parts.append(MemoryPartView(kind=PartKind.RESERVE, name=name, bytes=free.take(size_bytes)))
    parts.append(MemoryPartView(kind=PartKind.FREE, name="free", bytes=free.left))
    return tuple(part for part in parts if part.bytes or part.kind is PartKind.FREE)


def _owners(memory: _Memory, scene: Scene) -> dict[str, _Owner]:
    """By run; those that are running first, the largest of them first."""
    owners = {
        each.run: _Owner(each.name, each)
        for each in sorted(
            memory.reservations, key=lambda each: (_is_lost(each), -each.charged_bytes, each.run)
        )
    }
    for run in memory.held:
        if run not in owners:  # its reservation has ended a moment ago
            instance = scene.instances.get(run)
            owners[run] = _Owner(instance.name if instance else run)
    return owners


def _owned(run: str, owner: _Owner, now_s: float) -> Iterator[MemoryPartView]:
    if is_foreign_unit(run):
        yield MemoryPartView(kind=PartKind.FOREIGN_UNIT, name=owner.name, bytes=owner.used)
        return
    if owner.reservation is not None and _is_lost(owner.reservation):
        yield MemoryPartView(
            kind=PartKind.QUARANTINE,
            name=owner.name,
            bytes=owner.used + owner.promised,
            run=run,
            age_s=_age(now_s, owner.reservation.since_s),
        )
        return
    yield MemoryPartView(kind=PartKind.MODEL, name=owner.name, bytes=owner.used, run=run)
    yield MemoryPartView(kind=PartKind.PROMISED, name=owner.name, bytes=owner.promised, run=run)


def _is_lost(reservation: Reservation) -> bool:
    return reservation.state is ReservationState.QUARANTINED


def _kept(memory: _Memory) -> Iterator[tuple[str, int]]:
    """For whom how much of what is free is kept.

    Where a card does not tell what its driver keeps, that is a part of what is used; a budget takes off the setting
    all the same where less is used than that.
    """
    if memory.budget is None:
        return
    if memory.driver_bytes is None:
        others = max(0, memory.used_bytes - sum(memory.held.values()))
        told = sum(-line.bytes for line in memory.budget.lines if line.name == DRIVER)
        if told > others:
            yield "the driver", told - others
    for line in memory.budget.live_lines:
        if line.name in RESERVES:
            yield RESERVES[line.name], -line.bytes
