"""Which cards an engine may see, and by which names it then knows them. Pure.

CUDA and ROCm take cards by UUID, hide all others, and number those that are left in the order given: the launch is on
its cards or does not start. Vulkan takes the loader's indices in the same way; which of them is at a card's PCI address
is known where :mod:`lllm3090d.engines.vulkan_probe` has found it. Elsewhere, and with SYCL, a launch is kept to the
devices that it names with ``--device``: ``--list-devices`` prints neither indices (its own list leaves out what is no
graphics card) nor addresses, so which device is which card must follow from name and size of its memory. Where two
cards are equal it does not, and nothing is guessed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from lllm3090d.engines.capabilities import AddressedDevice, Backend, Capabilities, ListedDevice
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.readings import Card, CardKind
from lllm3090d.planning.units import MIB

# By which engines name the devices of a backend, before their number.
DEVICE_PREFIXES = {
    Backend.CUDA: "CUDA",
    Backend.ROCM: "ROCm",
    Backend.VULKAN: "Vulkan",
    Backend.SYCL: "SYCL",
}
VULKAN_INDICES = "GGML_VK_VISIBLE_DEVICES"
# Variables by which drivers, loaders and backends hide, choose or order devices.
DEVICE_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    VULKAN_INDICES,
    "VK_DRIVER_FILES",
    "VK_ICD_FILENAMES",
    "VK_ADD_DRIVER_FILES",
    "VK_LOADER_DRIVERS_SELECT",
    "VK_LOADER_DRIVERS_DISABLE",
    "VK_LOADER_DISABLE_SELECT",
    "DRI_PRIME",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ONEAPI_DEVICE_SELECTOR",
    "ZE_AFFINITY_MASK",
)
# A backend may leave out what a driver keeps for itself, or add a window of host memory.
SIZE_TOLERANCE = 0.1
_ROCM_UUID = re.compile(r"GPU-[0-9a-f]{16}")
_WORD = re.compile(r"[a-z0-9]+")
# Words of a product's name that one driver writes and another one leaves out.
_MAKERS = frozenset({"nvidia", "amd", "intel", "r", "tm", "corporation", "graphics", "geforce"})


@dataclass(frozen=True, slots=True)
class Sight:
    """How a launch is kept to its cards.

    Attributes:
        devices: the engine's names of the cards, in their order.
        environment: variables, name and value, by which all others are hidden; where names do that, those with which
            the build listed them. Other :data:`DEVICE_VARIABLES` must not reach the engine.
    """

    devices: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()


def sight(capabilities: Capabilities, cards: Sequence[Card], chosen: Sequence[Card]) -> Sight | None:
    """How a launch is kept to some of a machine's cards; None where there is nothing else to be kept from.

    Args:
        capabilities: of the build, as it answered on this machine.
        cards: all that are managed.
        chosen: those of the launch, in the order of its devices.

    Raises:
        LlmError: ENGINE_UNUSABLE where the build lists fewer devices than that, or where nothing tells which of them
            is which card.
        ValueError: no card is chosen.
    """
    if not chosen:
        raise ValueError("a launch on no card needs no sight")
    prefix = DEVICE_PREFIXES.get(capabilities.backend)
    if prefix is None or chosen[0].kind is CardKind.CPU:
        return None
    listed = _of_backend(capabilities, prefix)
    if len(cards) == 1 and len(listed) <= 1:
        return None
    variables = _by_uuid(capabilities.backend, chosen)
    if variables:
        if len(listed) < len(chosen):
            raise _too_few(listed, chosen)
        return Sight(_numbered(prefix, chosen), variables)
    at = [addressed(capabilities, cards, card) for card in chosen]
    indices = [device.index for device in at if device is not None]
    if len(indices) == len(chosen):
        return Sight(_numbered(prefix, chosen), _by_index(capabilities, indices))
    found = [identified(capabilities, cards, card) for card in chosen]
    names = tuple(device.name for device in found if device is not None)
    if len(names) == len(chosen):
        # Names mean the same only where the same is hidden as when they were listed.
        return Sight(names, capabilities.device_environment)
    if len(cards) == 1:
        return None  # the others are none of ours, and the engine leaves out what is no card of its own
    raise _unknown(capabilities, listed, chosen[found.index(None)])


def variables(seen: Sight | None) -> tuple[str, ...]:
    """The variables of a sight as ``NAME=value``."""
    return () if seen is None else tuple(f"{name}={value}" for name, value in seen.environment)


def can_be_kept_to(capabilities: Capabilities, cards: Sequence[Card], card: Card) -> bool:
    """A launch can be kept to this one of several cards."""
    try:
        sight(capabilities, cards, (card,))
    except LlmError:
        return False
    return True


def addressed(capabilities: Capabilities, cards: Sequence[Card], card: Card) -> AddressedDevice | None:
    """The device at the card's PCI address; None where none is known, or where what is there has another size."""
    if not card.pci_address or sum(other.pci_address == card.pci_address for other in cards) > 1:
        return None
    at = [device for device in capabilities.addressed if device.pci_address == card.pci_address]
    return at[0] if len(at) == 1 and _is_as_large(at[0].total_bytes, card) else None


def identified(capabilities: Capabilities, cards: Sequence[Card], card: Card) -> ListedDevice | None:
    """The device that is this card; None where none is, or where another card could be it, or another device."""
    prefix = DEVICE_PREFIXES.get(capabilities.backend)
    listed = () if prefix is None else _of_backend(capabilities, prefix)
    fitting = [device for device in listed if _could_be(device, card)]
    if len(fitting) != 1:
        return None
    others = (other for other in cards if other.uuid != card.uuid)
    return None if any(_could_be(fitting[0], other) for other in others) else fitting[0]


def _of_backend(capabilities: Capabilities, prefix: str) -> tuple[ListedDevice, ...]:
    return tuple(device for device in capabilities.listed if device.name.rstrip("0123456789") == prefix)


def _numbered(prefix: str, chosen: Sequence[Card]) -> tuple[str, ...]:
    """The names of cards that are all an engine may see."""
    return tuple(f"{prefix}{index}" for index in range(len(chosen)))


def _by_index(capabilities: Capabilities, indices: Sequence[int]) -> tuple[tuple[str, str], ...]:
    """Variables that show an engine the devices with these indices alone."""
    # Indices mean the same only among the drivers that the loader found when they were asked for.
    others = [each for each in capabilities.device_environment if each[0] != VULKAN_INDICES]
    return tuple(sorted([*others, (VULKAN_INDICES, ",".join(map(str, indices)))]))


def _by_uuid(backend: Backend, chosen: Sequence[Card]) -> tuple[tuple[str, str], ...]:
    """Variables that show an engine these cards alone; none where the backend does not take their UUIDs."""
    uuids = ",".join(card.uuid for card in chosen)
    if backend is Backend.CUDA:
        # The order is without effect on cards by UUID; it is that of the numbers in the engine's and driver's logs.
        return (("CUDA_DEVICE_ORDER", "PCI_BUS_ID"), ("CUDA_VISIBLE_DEVICES", uuids))
    if backend is Backend.ROCM and all(_ROCM_UUID.fullmatch(card.uuid) for card in chosen):
        # HIP counts among those that the runtime below it shows; a variable of the session would hide some of them.
        numbers = ",".join(str(index) for index in range(len(chosen)))
        return (("HIP_VISIBLE_DEVICES", numbers), ("ROCR_VISIBLE_DEVICES", uuids))
    return ()


def _could_be(device: ListedDevice, card: Card) -> bool:
    """Name and size speak for it. Rather too often than too seldom: what could be two cards is taken for neither."""
    words, wanted = _words(device.description), _words(card.name)
    numbers = {word for word in wanted if not word.isalpha()}
    alike = bool(numbers & words) if numbers else bool(wanted) and wanted <= words
    return alike and _is_as_large(device.total_bytes, card)


def _is_as_large(total_bytes: int, card: Card) -> bool:
    apart = abs(total_bytes - card.total_bytes)
    return card.total_bytes == 0 or apart <= SIZE_TOLERANCE * card.total_bytes


def _words(name: str) -> frozenset[str]:
    return frozenset(_WORD.findall(name.lower())) - _MAKERS


def _too_few(listed: Sequence[ListedDevice], chosen: Sequence[Card]) -> LlmError:
    seen = ", ".join(device.name for device in listed) or "none"
    return LlmError(
        ErrorCode.ENGINE_UNUSABLE,
        f"A launch on {len(chosen)} cards needs a device for each, and the engine lists {seen}.",
        hint="Look at lllm3090ctl doctor and at variables such as CUDA_VISIBLE_DEVICES, which hide cards from it.",
        devices=[device.name for device in listed],
        cards=[card.uuid for card in chosen],
    )


def _unknown(capabilities: Capabilities, listed: Sequence[ListedDevice], card: Card) -> LlmError:
    seen = ", ".join(
        f"{device.name} ({device.description}, {device.total_bytes // MIB} MiB)" for device in listed
    )
    by_uuid = "ROCm" if card.kind is CardKind.AMD else "CUDA"
    remedy = (
        f"Use a build of llama.cpp for {by_uuid}, which takes cards by UUID (lllm3090ctl engine)."
        if card.kind in {CardKind.AMD, CardKind.NVIDIA}
        else "Use a build that lists each card under a name of its own."
    )
    where = f" at {card.pci_address}" if card.pci_address else ""
    reason = capabilities.unaddressed_because
    if reason:
        why = f" Their PCI addresses are not known: {reason}."
    elif capabilities.addressed:
        there = ", ".join(device.pci_address for device in capabilities.addressed)
        why = f" Those it can use are at {there}."
    else:
        why = ""
    return LlmError(
        ErrorCode.ENGINE_UNUSABLE,
        f"Nothing tells which of the engine's devices is the {card.name}{where}: it lists {seen or 'none'}."
        f"{why} A launch on a guess could fill another card.",
        hint=remedy,
        devices=[device.name for device in listed],
        card=card.uuid,
    )
