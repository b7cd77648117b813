"""A card as it would be with nothing on it but a desktop: this machine's, or one that is not there. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lllm3090d.engines.capabilities import Backend
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.profiles import (
    ANY_CARD,
    CardProfile,
    absent_profile,
    capacity_profile,
    named_profile,
    parse_vram,
    profile_of,
    without_card,
)
from lllm3090d.gpus.readings import Card, CardKind, MemoryReading
from lllm3090d.planning.request import option_of
from lllm3090d.planning.reserves import (
    Budget,
    BudgetLine,
    Claims,
    ReservePolicy,
    budget,
    host_reserve_bytes,
)
from lllm3090d.planning.speeds import REFERENCE_BACKEND
from lllm3090d.planning.units import MIB, mib_ceil
from lllm3090d.wire import PlanBody

# What a plan for a card can be priced for; any other backend of this machine's engine is left aside.
CARD_BACKENDS = frozenset({Backend.CUDA, Backend.VULKAN})


@dataclass(frozen=True, slots=True)
class EmptyCard:
    """A card with nothing on it but what is kept for a desktop, or host memory in its place.

    Attributes:
        profile: which card.
        kind: whose memory it is.
        backend: what the engine computes on.
        present: it is this machine's.
        total_bytes: of its memory.
        reserved_bytes: what the driver keeps; None where nobody tells.
        desktop_active: a desktop is on it; None (unknown) counts as active.
        budget: what it can give.
    """

    profile: CardProfile
    kind: CardKind
    backend: Backend
    present: bool
    total_bytes: int
    reserved_bytes: int | None
    desktop_active: bool | None
    budget: Budget

    @property
    def kept_mib(self) -> int | None:
        """What the driver keeps, or the machine for itself where host memory is the card; MiB rounded up."""
        if self.kind is CardKind.CPU:
            return mib_ceil(host_reserve_bytes(self.total_bytes))
        return None if self.reserved_bytes is None else mib_ceil(self.reserved_bytes)


@dataclass(frozen=True, slots=True)
class Machine:
    """What is known of this machine's card.

    Attributes:
        card: the card, or host memory.
        reading: its memory.
        desktop_active: a desktop is on it; None unknown.
        backend: of the engine that is used next; None where there is none.
    """

    card: Card
    reading: MemoryReading
    desktop_active: bool | None
    backend: Backend | None

    @property
    def profile(self) -> CardProfile:
        """Of the card that is there; host memory is none, so nothing counts as measured on it."""
        known = profile_of(self.card.name, self.reading.total_bytes // MIB, self.card.compute_capability)
        return without_card(known) if self.card.kind is CardKind.CPU else known


def is_hypothetical(body: PlanBody) -> bool:
    """The plan is for another card than this machine's, or for that one as it is not."""
    return (body.card, body.vram, body.desktop, body.backend) != (None, None, None, None)


def emptied(machine: Machine, policy: ReservePolicy) -> EmptyCard:
    """This machine's card without anything on it."""
    on_host = machine.card.kind is CardKind.CPU
    backend = Backend.CPU if on_host else machine.backend or REFERENCE_BACKEND
    return _made(
        machine.profile,
        machine.card.kind,
        backend,
        machine.reading.total_bytes,
        machine.reading.reserved_bytes,
        machine.desktop_active,
        policy,
        present=True,
    )


def wished(body: PlanBody, machine: Machine, host_total_bytes: int, policy: ReservePolicy) -> EmptyCard:
    """The card that somebody asks about.

    Of what is left out, this machine decides. Where it has no card, the capacity of the reference is borrowed.

    Args:
        body: the request.
        machine: this machine.
        host_total_bytes: its memory beside a card.
        policy: what is kept free.

    Raises:
        LlmError: INVALID_REQUEST for an unknown card, no amount of memory, or what contradicts itself.
    """
    _check(body)
    if body.backend == "cpu":
        host = capacity_profile(max(1, host_total_bytes // MIB))
        profile = host.model_copy(update={"name": "host memory", "present": False})
        on_host = machine.card.kind is CardKind.CPU
        return _made(profile, CardKind.CPU, Backend.CPU, host_total_bytes, 0, False, policy, present=on_host)
    has_card = machine.card.kind is not CardKind.CPU
    desktop = body.desktop if body.desktop is not None or not has_card else machine.desktop_active
    backend = Backend(body.backend) if body.backend else machine.backend
    if backend not in CARD_BACKENDS:
        backend = REFERENCE_BACKEND
    if has_card and body.card is None and body.vram is None:
        reading = machine.reading
        return _made(
            machine.profile,
            machine.card.kind,
            backend,
            reading.total_bytes,
            reading.reserved_bytes,
            desktop,
            policy,
            present=True,
        )
    if body.card is not None:
        profile = named_profile(body.card)
    elif body.vram is not None:
        profile = capacity_profile(parse_vram(body.vram))
    else:
        profile = absent_profile()
    return _made(
        profile, CardKind.NVIDIA, backend, profile.vram_mib * MIB, None, desktop, policy, present=False
    )


def assumed_card(body: PlanBody, card: EmptyCard, here: Card) -> tuple[str, ...]:
    """A note where a card was borrowed, as this machine has none and nobody named one."""
    if here.kind is not CardKind.CPU or card.kind is CardKind.CPU or body.card or body.vram:
        return ()
    return (f"this machine has no card: {card.profile.name} is assumed",)


def assumed_build(card: EmptyCard, backend: Backend) -> tuple[str, ...]:
    """A note where the engine that is here computes on something else than the plan counts on."""
    if backend is card.backend or card.kind is CardKind.CPU:
        return ()
    return (f"the engine of this machine computes on {backend}: a build for {card.backend} is assumed",)


def giver_text(card: EmptyCard) -> str:
    """A card with nothing on it but a desktop, as the subject of a sentence; empty for host memory."""
    if card.kind is CardKind.CPU:
        return ""
    name, desktop = card.profile.name, card.desktop_active is not False
    if name.startswith(ANY_CARD):
        return f"a card{name.removeprefix(ANY_CARD)}{' and a desktop' if desktop else ''}"
    return f"{name} with {'nothing but a desktop' if desktop else 'nothing'} on it"


def _check(body: PlanBody) -> None:
    if body.card is not None and body.vram is not None:
        raise LlmError(
            ErrorCode.INVALID_REQUEST,
            f"The card {body.card!r} and an amount of memory, {body.vram!r}, were given: a card has its own.",
            hint="Give one of card (--card) and vram (--vram).",
            card=body.card,
            vram=body.vram,
        )
    if body.backend != "cpu":
        return
    given = {"card": body.card, "vram": body.vram, "desktop": body.desktop or None}
    excess = [name for name, value in given.items() if value is not None]
    if excess:
        named = " and ".join(map(option_of, excess))
        mean = "means" if len(excess) == 1 else "mean"
        raise LlmError(
            ErrorCode.INVALID_REQUEST,
            f"With backend cpu host memory takes the card's place, and {named} {mean} a card.",
            hint=f"Leave out {named}, or ask for --backend cuda or vulkan.",
            fields=excess,
        )


def _made(  # noqa: PLR0917  # what a card is made of, in the order of its fields
    profile: CardProfile,
    kind: CardKind,
    backend: Backend,
    total_bytes: int,
    reserved_bytes: int | None,
    desktop_active: bool | None,
    policy: ReservePolicy,
    *,
    present: bool,
) -> EmptyCard:
    card = Card(kind, profile.id, profile.name, None)
    free = max(0, total_bytes - (reserved_bytes or 0))
    if reserved_bytes is None:
        free = max(0, total_bytes - policy.driver_reserve_mib * MIB)
    reading = MemoryReading(0.0, total_bytes, reserved_bytes, 0, free, ())
    made = budget(card, reading, Claims(), desktop_active, policy)
    return EmptyCard(
        profile=profile,
        kind=kind,
        backend=backend,
        present=present,
        total_bytes=total_bytes,
        reserved_bytes=reserved_bytes,
        desktop_active=desktop_active,
        budget=made if present else _as_assumed(made, profile),
    )


def _as_assumed(made: Budget, profile: CardProfile) -> Budget:
    """Nothing of it was read: the capacity is the profile's."""

    def told(lines: tuple[BudgetLine, ...]) -> tuple[BudgetLine, ...]:
        return tuple(
            replace(line, origin=profile.name) if line.origin == "reading" else line for line in lines
        )

    return replace(made, lines=told(made.lines), live_lines=told(made.live_lines))
