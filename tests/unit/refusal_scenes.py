"""Cards with something on them, and loads that do not fit there: real budgets, real questions to the planner."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import pytest

from lllm3090d.errors import LlmError
from lllm3090d.gpus.readings import Card, CardKind, MemoryReading
from lllm3090d.planning.cache import CacheType
from lllm3090d.planning.quote import Evidence, LineItem, Place
from lllm3090d.planning.request import PlanRequest
from lllm3090d.planning.reserves import Budget, Claims, ReservePolicy, budget
from lllm3090d.planning.smallest_card import smallest_card
from lllm3090d.planning.units import MIB
from lllm3090d.serving import refusals
from lllm3090d.serving.commands import Wish
from lllm3090d.serving.freeings import Holder
from lllm3090d.serving.ledger import Reservation, ReservationState
from lllm3090d.serving.observation import CardState, Stranger
from tests.unit.plans import planner_of

TOTAL_MIB, DRIVER_MIB = 24_576, 451
RTX_3090 = Card(CardKind.NVIDIA, "GPU-3090", "NVIDIA GeForce RTX 3090", "580.95.05")
RESERVES = ReservePolicy(driver_reserve_mib=512, desktop_reserve_mib=2400)
NOW_S = 10_000.0
ENDING = frozenset({ReservationState.RELEASING, ReservationState.QUARANTINED})


@dataclass(frozen=True)
class Ours:
    """One of our models: idle for so long, or busy, or on its way."""

    name: str
    mib: int
    idle_s: float | None = 840.0
    pinned: bool = False
    state: ReservationState = ReservationState.CONFIRMED
    taken_mib: int | None = None
    age_s: float = 40.0

    @property
    def reservation(self) -> Reservation:
        """What it holds in the ledger."""
        item = LineItem("weights", Place.CARD, self.mib * MIB, Evidence.HEADER, "")
        return Reservation(
            f"run-{self.name}",
            self.name,
            RTX_3090.uuid,
            (item,),
            self.mib * MIB,
            None,
            self.state,
            NOW_S - self.age_s,
        )

    @property
    def taken_bytes(self) -> int:
        """What its process holds."""
        return (self.mib if self.taken_mib is None else self.taken_mib) * MIB


@dataclass(frozen=True)
class Desk:
    """A card of 24 GiB and a load that is asked for.

    Attributes:
        strangers: other processes on it.
        unlisted_mib: used, and nobody is named.
        ours: our models on it.
        desktop: a desktop is active.
    """

    strangers: tuple[Stranger, ...] = ()
    unlisted_mib: int = 0
    ours: tuple[Ours, ...] = ()
    desktop: bool = False
    model: str = "qwen3-8b"
    request: PlanRequest = field(default_factory=lambda: PlanRequest(32_768, 1))

    @property
    def foreign_bytes(self) -> int:
        """What others hold."""
        return sum(each.used_bytes or 0 for each in self.strangers) + self.unlisted_mib * MIB

    @property
    def reservations(self) -> tuple[Reservation, ...]:
        """Of our models."""
        return tuple(each.reservation for each in self.ours)

    @property
    def held(self) -> dict[str, int]:
        """What each of our runs holds of the card."""
        return {each.reservation.run: each.taken_bytes for each in self.ours}

    @property
    def reading(self) -> MemoryReading:
        """The card's memory."""
        used = self.foreign_bytes + sum(self.held.values())
        total, driver = TOTAL_MIB * MIB, DRIVER_MIB * MIB
        return MemoryReading(1.0, total, driver, used, max(0, total - driver - used), ())

    @property
    def budget(self) -> Budget:
        """What it can give."""
        quarantined = [each for each in self.ours if each.state is ReservationState.QUARANTINED]
        loading = [each for each in self.ours if each.state is ReservationState.HELD]
        claims = Claims(
            charged_bytes=sum(each.mib * MIB for each in self.ours if each not in quarantined),
            still_to_come_bytes=sum(max(0, each.mib * MIB - each.taken_bytes) for each in loading),
            held_bytes=sum(self.held.values()),
            quarantined_bytes=sum(each.mib * MIB for each in quarantined),
        )
        return budget(RTX_3090, self.reading, claims, self.desktop, RESERVES)

    @property
    def state(self) -> CardState:
        """The card as it was read; ended runs have no process that the driver could list."""
        listed = {each.reservation.run: each.taken_bytes for each in self.ours if each.state not in ENDING}
        return CardState(RTX_3090, self.reading, resident=listed, in_use=listed, strangers=self.strangers)

    @property
    def holders(self) -> tuple[Holder, ...]:
        """Our models that run."""
        return tuple(
            Holder(each.name, each.reservation.run, each.idle_s, each.pinned)
            for each in self.ours
            if each.state not in ENDING
        )

    def without(self, names: Iterable[str]) -> Desk:
        """The same, with these programs and models gone."""
        gone = frozenset(names)
        return replace(
            self,
            strangers=tuple(each for each in self.strangers if each.name not in gone),
            ours=tuple(each for each in self.ours if each.name not in gone),
        )

    @property
    def fits(self) -> bool:
        """The load fits."""
        return refusals.fits_with_more(
            planner_of(self.model, self.request, room=self.budget.grantable_bytes)
        )(0)

    def refusal(self) -> LlmError:
        """Why it is refused."""
        planner = planner_of(self.model, self.request, room=self.budget.grantable_bytes)
        with pytest.raises(LlmError) as caught:
            planner.plan()
        smallest = smallest_card(planner, driver_bytes=DRIVER_MIB * MIB, desktop_bytes=0)
        return refusals.refuse(
            caught.value,
            budget=self.budget,
            card=self.state,
            reservations=self.reservations,
            instances=self.holders,
            fits=refusals.fits_with_more(planner),
            serves=refusals.serves_changed(planner),
            asked=Wish(self.model, self.request),
            held=self.held,
            now_s=NOW_S,
            smallest=smallest,
            roomier=refusals.in_more_room(planner),
        )


TOO_BIG = Desk(
    model="gemma-3-27b",
    request=PlanRequest(131_072, 2, cache_type_k=CacheType.F16, cache_type_v=CacheType.F16),
)
BESIDE_STRANGERS = Desk(
    strangers=(
        Stranger(77, "blender", "anna", 3072 * MIB),
        Stranger(1234, "steam", "", 1946 * MIB),
        Stranger(901, "gnome-shell", "", 420 * MIB),
    ),
    ours=(Ours("smollm2-135m", 800),),
    desktop=True,
    model="gemma-3-27b",
    request=PlanRequest(32_768, 1),
)
BESIDE_PINNED = Desk(
    ours=(
        Ours("llama-3.1-8b", 11_900, pinned=True),
        Ours("qwen2.5-7b", 6350, idle_s=None),
        Ours("phi-3.5-mini", 1100, state=ReservationState.QUARANTINED),
    ),
    request=PlanRequest(32_768, 1),
)
