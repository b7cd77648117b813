"""When the engine would really split a cache, and whether the host has room for its part. Pure.

Where one of these does not hold the engine says nothing and allocates the whole cache in VRAM, so a plan that
counted on the tier would over-commit the card. Each is a condition of the fork's source or a measured failure.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from dataclasses import dataclass

from lllm3090d.checkpoints.facts import CheckpointFacts, LayerKind
from lllm3090d.engines.capabilities import Backend
from lllm3090d.planning.cache import CacheShape, CacheType
from lllm3090d.planning.placement import Placement
from lllm3090d.planning.units import MIB, mib_ceil

TIER_TYPES = (CacheType.Q8_0, CacheType.Q4_0, CacheType.F16)
# Class of drivers of CUDA 13, the first whose documentation allows memory of the host in a range of the device.
# Published successes: 591.86 and 610.43.
LEAST_DRIVER = 580
DRIVER_MAJOR = re.compile(r"\A([0-9]{1,6})(?:\.[0-9]+)*\Z")
# Of the host, beside everything the launch takes there. Published advice is 2 to 4 GiB.
HOST_HEADROOM_BYTES = 3072 * MIB
PINNED_PERCENT = 50  # of all memory: pinned pages can be neither swapped nor reclaimed


class Condition(enum.StrEnum):
    """What a tier needs."""

    OFFERED = "offered"
    ONE_CUDA_DEVICE = "one-cuda-device"
    ALL_LAYERS = "all-layers-on-card"
    CACHE_ON_CARD = "cache-on-card"
    VIRTUAL_MEMORY = "virtual-memory"
    DRIVER = "driver"
    FLASH_ATTENTION = "flash-attention"
    CACHE_TYPES = "cache-types"
    KIND_OF_CACHE = "kind-of-cache"
    EQUAL_WIDTHS = "equal-widths"
    ONE_STREAM = "one-stream"
    HOST_MEMORY = "host-memory"
    PINNED_SHARE = "pinned-share"
    MEMORY_LIMIT = "memory-limit"


@dataclass(frozen=True, slots=True)
class Unmet:
    """A condition that does not hold, and why, in a sentence for a person."""

    condition: Condition
    reason: str


@dataclass(frozen=True, slots=True)
class TierMachine:
    """What is known of engine and card.

    Attributes:
        offered: the build offers ``--kv-vram-cells``.
        backend: what it computes on.
        cards: on which the launch would be.
        virtual_memory: the device reports ``VMM: yes``; None where nobody has asked.
        driver_version: e.g. ``580.95.05``; None where unknown.
    """

    offered: bool
    backend: Backend
    cards: int = 1
    virtual_memory: bool | None = None
    driver_version: str | None = None


def unmet_conditions(
    facts: CheckpointFacts,
    machine: TierMachine,
    placement: Placement,
    shape: CacheShape,
    types: tuple[CacheType, CacheType],
    *,
    flash_attention: bool = True,
) -> tuple[Unmet, ...]:
    """Everything that keeps a launch from having a tier; empty where it can have one.

    Args:
        facts: the checkpoint.
        machine: engine and card.
        placement: of the layers.
        shape: of the main context.
        types: of K and V.
        flash_attention: as every launch has it.
    """
    return tuple(
        (
            *_of_machine(machine),
            *_of_launch(placement, shape, types, flash_attention=flash_attention),
            *_of_model(facts),
        )
    )


def _of_machine(machine: TierMachine) -> Iterator[Unmet]:
    if not machine.offered:
        yield Unmet(
            Condition.OFFERED, "This engine has no tiered cache: its --help does not offer --kv-vram-cells."
        )
    if machine.backend is not Backend.CUDA or machine.cards != 1:
        where = "no card" if machine.cards < 1 else f"{machine.cards} devices of backend {machine.backend}"
        yield Unmet(Condition.ONE_CUDA_DEVICE, f"A tier needs one CUDA device, and this launch has {where}.")
    if machine.virtual_memory is not True:
        said = "reports none" if machine.virtual_memory is False else "has not said whether it has it"
        yield Unmet(Condition.VIRTUAL_MEMORY, f"A tier needs virtual memory of the device; this one {said}.")
    version = machine.driver_version
    found = DRIVER_MAJOR.match(version) if version else None
    if found is None or int(found[1]) < LEAST_DRIVER:
        has = f"this one is {version!a}" if version else "nobody knows which this is"
        yield Unmet(Condition.DRIVER, f"A tier needs NVIDIA's driver {LEAST_DRIVER} or later; {has}.")


def _of_launch(
    placement: Placement, shape: CacheShape, types: tuple[CacheType, CacheType], *, flash_attention: bool
) -> Iterator[Unmet]:
    if placement.layers_on_card is not None or placement.expert_layers_on_host:
        yield Unmet(
            Condition.ALL_LAYERS, "A tier needs all layers on the card; some would be in host memory."
        )
    if placement.cache_on_host:
        yield Unmet(
            Condition.CACHE_ON_CARD, "The whole cache would be in host memory, so nothing can be split."
        )
    if not flash_attention:
        yield Unmet(Condition.FLASH_ATTENTION, "A tier needs flash attention, which reads the staged cells.")
    if types[0] is not types[1] or types[0] not in TIER_TYPES:
        known = ", ".join(TIER_TYPES)
        reason = (
            f"A tier needs one type for K and V out of {known}; here they are {types[0]} and {types[1]}."
        )
        yield Unmet(Condition.CACHE_TYPES, reason)
    if shape.streams != 1:
        reason = f"A tier needs one pool: a single slot, or a unified cache. Here are {shape.streams} pools."
        yield Unmet(Condition.ONE_STREAM, reason)


def _of_model(facts: CheckpointFacts) -> Iterator[Unmet]:
    name = facts.title or facts.architecture
    layers = facts.context_layers
    reason = None
    if any(layer.kind is LayerKind.SLIDING for layer in layers):
        reason = "has layers with a sliding window"
    elif facts.latent is not None or any(layer.kind is LayerKind.LATENT for layer in layers):
        reason = "has latent attention"
    elif any(layer.index_values for layer in layers):
        reason = "keeps an index beside its cache"
    elif any(layer.kind is LayerKind.SHARED for layer in layers):
        reason = "has layers that read the cache of others"
    elif not any(layer.kind is LayerKind.FULL for layer in layers):
        reason = "has no attention cache"
    if reason is not None:
        yield Unmet(Condition.KIND_OF_CACHE, f"{name} {reason}; only a plain or hybrid cache can be split.")
    elif any(layer.k_values != layer.v_values for layer in layers):
        reason = (
            f"Keys and values of {name} differ in width; the engine splits only layers where they are equal."
        )
        yield Unmet(Condition.EQUAL_WIDTHS, reason)


def shared_line_caution(shape: CacheShape) -> str | None:
    """What to expect of a tier with several slots; None with one."""
    if shape.slots == 1:
        return None
    return (
        f"{shape.slots} slots share one line: as soon as cells beyond it are used, whoever owns them, all slots wait"
        " for host memory (published: 9 instead of 64 tokens/s beside an idle long conversation)."
    )


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Memory of the machine, bytes.

    Attributes:
        available_bytes: MemAvailable.
        total_bytes: MemTotal.
        limit_bytes: of the engine's cgroup; None without. Whether pinned pages count there is documented
            nowhere, so they are taken to count.
    """

    available_bytes: int
    total_bytes: int
    limit_bytes: int | None = None


def host_conditions(pinned_bytes: int, other_bytes: int, host: HostMemory) -> tuple[Unmet, ...]:
    """What keeps the host's part from being pinned; empty where there is room.

    Args:
        pinned_bytes: the host's part of the cache.
        other_bytes: the launch's other host memory: embedding, checkpoints, prompt cache, process.
        host: the machine.
    """
    unmet = []
    pinned, other = mib_ceil(pinned_bytes), mib_ceil(other_bytes)
    if pinned_bytes + other_bytes + HOST_HEADROOM_BYTES > host.available_bytes:
        reason = (
            f"{pinned} MiB pinned, {other} MiB for the rest of the launch and {HOST_HEADROOM_BYTES // MIB} MiB of"
            f" headroom are more than the {host.available_bytes // MIB} MiB of host memory that are available."
        )
        unmet.append(Unmet(Condition.HOST_MEMORY, reason))
    if pinned_bytes * 100 > host.total_bytes * PINNED_PERCENT:
        reason = (
            f"{pinned} MiB pinned are more than {PINNED_PERCENT} % of the {host.total_bytes // MIB} MiB of this"
            " machine, and pinned memory cannot be swapped."
        )
        unmet.append(Unmet(Condition.PINNED_SHARE, reason))
    if host.limit_bytes is not None and pinned_bytes + other_bytes > host.limit_bytes:
        reason = (
            f"{pinned} MiB pinned and {other} MiB for the rest of the launch are more than the"
            f" {host.limit_bytes // MIB} MiB that its control group may have."
        )
        unmet.append(Unmet(Condition.MEMORY_LIMIT, reason))
    return tuple(unmet)
