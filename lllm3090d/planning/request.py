"""What may be asked of a plan, and what an engine build lets it answer. Plain data."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from lllm3090d.checkpoints.facts import Purpose
from lllm3090d.engines.capabilities import Backend
from lllm3090d.planning.cache import CacheType
from lllm3090d.planning.devices import DeviceRoom
from lllm3090d.planning.rope import RopeScaling
from lllm3090d.planning.slots import SlotPolicy
from lllm3090d.planning.tier import TierOffer
from lllm3090d.planning.tier_conditions import HostMemory, TierMachine
from lllm3090d.planning.tier_speed import LinkSpeed, MeasuredSteps

__all__ = [
    "Drafting",
    "Features",
    "Offload",
    "PlanRequest",
    "ProjectorPlace",
    "Room",
    "RopeScaling",
    "SlotPolicy",
    "TierRoom",
    "option_of",
]


class Offload(enum.StrEnum):
    """Whether layers may be left in host memory."""

    RESIDENT = "resident"  # everything that can be on the card is there, or the model does not fit
    ALLOWED = "allowed"  # for a useful window, layers or experts may be left in host memory


class Drafting(enum.StrEnum):
    """Whether a model with blocks for multi-token prediction drafts for itself."""

    AUTO = "auto"  # where the engine offers it and leaves the window that an agent needs
    ON = "on"
    OFF = "off"


class ProjectorPlace(enum.StrEnum):
    """Where the projector of a model that sees or hears is."""

    AUTO = "auto"  # on the card, unless that costs too much of the window
    CARD = "card"
    HOST = "host"
    OFF = "off"  # text alone


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What a person asked for; None leaves the choice to the planner and the settings.

    Attributes:
        context_tokens: total context of all slots (``-c``).
        parallel: slots.
        cache_type_k, cache_type_v: type of the cache.
        slot_policy: how slots are chosen where nobody gives their number.
        offload: whether layers may be left in host memory.
        gpu_layers: exactly so many layers on the card, the output counting as one (``-ngl``).
        cpu_experts: the experts of exactly so many layers in host memory (``--n-cpu-moe``).
        cache_on_host: the cache in host memory (``--no-kv-offload``).
        drafting: whether the model drafts for itself.
        draft_tokens: longest draft.
        projector: where the projector is.
        unified: all slots share one pool (``--kv-unified``).
        swa_full: sliding layers keep the whole context (``--swa-full``).
        batch_tokens, micro_batch_tokens: ``-b`` and ``-ub``.
        rope_scaling: how positions are stretched for a window beyond the trained one.
        tiered: a part of the cache in pinned host memory, where the engine offers that.
        purpose: what it is to serve; None for what it was made for.
    """

    context_tokens: int | None = None
    parallel: int | None = None
    cache_type_k: CacheType | None = None
    cache_type_v: CacheType | None = None
    slot_policy: SlotPolicy | None = None
    offload: Offload | None = None
    gpu_layers: int | None = None
    cpu_experts: int | None = None
    cache_on_host: bool = False
    drafting: Drafting | None = None
    draft_tokens: int | None = None
    projector: ProjectorPlace | None = None
    unified: bool = False
    swa_full: bool = False
    batch_tokens: int | None = None
    micro_batch_tokens: int | None = None
    rope_scaling: RopeScaling | None = None
    tiered: bool = False
    purpose: Purpose | None = None

    @property
    def places_by_hand(self) -> bool:
        """The placement is given, not chosen."""
        return self.gpu_layers is not None or self.cpu_experts is not None or self.cache_on_host


_OPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "context_tokens": "--context",
        "drafting": "--draft",
        "batch_tokens": "--batch",
        "micro_batch_tokens": "--micro-batch",
        "tiered": "--tier",
        "cache_type_k": "--cache-type",
        "cache_type_v": "--cache-type",
        "desktop": "--desktop",
        "arguments": "arguments for the engine",
    }
)


def option_of(field_name: str) -> str:
    """What a person writes for a field of a request; a test holds it against the client's options."""
    return _OPTIONS.get(field_name, "--" + field_name.replace("_", "-"))


@dataclass(frozen=True, slots=True)
class TierRoom:
    """What a tier needs to know of the machine.

    Attributes:
        machine: engine and card.
        offer: what of a tier the engine offers.
        host: memory of the machine.
        link: between host and card; None where unknown.
        steps: what was measured of the model within VRAM.
    """

    machine: TierMachine
    offer: TierOffer
    host: HostMemory
    link: LinkSpeed | None = None
    steps: MeasuredSteps = field(default_factory=MeasuredSteps)


@dataclass(frozen=True, slots=True)
class Features:
    """What an engine build offers a plan; see :func:`lllm3090d.engines.arguments.features`.

    Attributes:
        backend: what it computes on.
        drafts_itself: ``--spec-type draft-mtp``.
        drafts_from: kinds of drafters in a file of their own that it loads (``-md`` with ``--spec-type``).
        places_experts: ``--n-cpu-moe``.
        keeps_cache_on_host: ``--no-kv-offload``.
        projects: ``--mmproj``.
        shares_pool: ``--kv-unified``.
        stretches: ``--rope-scaling`` and what goes with it.
        tier: for a tiered cache, what engine, card and host allow; None where the engine offers none.
        purposes: what it serves beside text (``--embeddings``, ``--reranking``).
    """

    backend: Backend
    drafts_itself: bool = True
    drafts_from: frozenset[str] = frozenset()
    places_experts: bool = True
    keeps_cache_on_host: bool = True
    projects: bool = True
    shares_pool: bool = True
    stretches: bool = True
    tier: TierRoom | None = None
    purposes: frozenset[str] = frozenset({Purpose.EMBEDDING.value, Purpose.RERANK.value})


@dataclass(frozen=True, slots=True)
class Room:
    """Memory that a plan may take, bytes.

    Attributes:
        card: of the card, or of the host in its place.
        host: beside a card; None where nobody limits it.
        cards: each card of a machine with several, in the order of the engine's names; ``card`` is then without
            effect. One is like none: there is nothing to choose.
        giver: a card that is only thought of, for a person; empty for what this machine has now.
    """

    card: int
    host: int | None = field(default=None)
    cards: tuple[DeviceRoom, ...] = ()
    giver: str = ""
