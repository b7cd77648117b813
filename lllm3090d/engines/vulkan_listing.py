"""What :mod:`lllm3090d.engines.vulkan_devices` says, and which of two drivers a card is used through. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lllm3090d.engines.capabilities import AddressedDevice, ListedDevice
from lllm3090d.gpus.readings import normal_pci_address
from lllm3090d.planning.units import MIB

# VkPhysicalDeviceType: what ggml-vulkan takes of its own accord.
INTEGRATED, DISCRETE = 1, 2
# VkDriverId, by vendor, the best first: ggml-vulkan's choice where two drivers list one card.
_NVIDIA, _AMD, _INTEL = 0x10DE, 0x1002, 0x8086
_PREFERRED_DRIVERS = {
    _AMD: (3, 2, 1),  # RADV, AMDVLK, AMD's proprietary one
    _INTEL: (6,),  # Mesa's
    _NVIDIA: (4, 24),  # NVIDIA's own, NVK
}
_DOZEN = 23  # Vulkan over Direct3D, the last choice but one
_Count = Annotated[int, Field(ge=0, lt=1 << 63)]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class _Heap(_Part):
    bytes: _Count
    local: bool


class _Device(_Part):
    name: str
    type: _Count
    vendor: _Count
    heaps: list[_Heap]
    uuid: str | None
    driver: _Count | None
    pci: str | None


class _Document(_Part):
    devices: list[_Device] | None = None
    problem: str | None = None


class ListingError(Exception):
    """Why there is no list, in words for a person."""


@dataclass(frozen=True, slots=True)
class VulkanDevice:
    """A device as the loader lists it.

    Attributes:
        index: its place in the loader's list.
        name: the product's, or of what computes in its place.
        kind: VkPhysicalDeviceType.
        vendor: its PCI number.
        driver: VkDriverId; None where the driver does not tell.
        uuid: hexadecimal, the same for one card whatever the driver; None where the driver does not tell.
        pci_address: such as ``0000:01:00.0``; empty where the driver does not tell.
        heaps: bytes of each heap of memory, and whether it is the device's own.
    """

    index: int
    name: str
    kind: int
    vendor: int
    driver: int | None
    uuid: str | None
    pci_address: str
    heaps: tuple[tuple[int, bool], ...]

    @property
    def total_bytes(self) -> int:
        """Of its memory; what is integrated has the host's."""
        return sum(size for size, is_local in self.heaps if is_local or self.kind == INTEGRATED)


def parse_document(text: str) -> tuple[VulkanDevice, ...]:
    """The devices that the document, the last line of ``text``, lists.

    Raises:
        ListingError: it is none, or says itself why it has none.
    """
    lines = text.splitlines()
    try:
        document = _Document.model_validate(json.loads(lines[-1] if lines else ""))
    except (ValueError, ValidationError, RecursionError) as error:
        raise ListingError("the list of Vulkan devices is no document that is understood") from error
    if document.devices is None:
        raise ListingError(
            document.problem or "the list of Vulkan devices is no document that is understood"
        )
    return tuple(
        VulkanDevice(
            index=index,
            name=each.name,
            kind=each.type,
            vendor=each.vendor,
            driver=each.driver,
            uuid=each.uuid,
            pci_address=normal_pci_address(each.pci or ""),
            heaps=tuple((heap.bytes, heap.local) for heap in each.heaps),
        )
        for index, each in enumerate(document.devices)
    )


def chosen_devices(devices: Iterable[VulkanDevice]) -> tuple[VulkanDevice, ...]:
    """Of each card on the bus the device by which it is used, in the loader's order.

    Of two drivers for one card the one that the engine would take. Where that driver lists it twice it may be any, and
    is the first; where it lists two devices at one address (parts of a card, each with a UUID of its own) that address
    tells nothing and is left out, and so is what computes in software.
    """
    at: dict[str, list[VulkanDevice]] = {}
    for device in devices:
        if device.kind in {INTEGRATED, DISCRETE} and device.pci_address:
            at.setdefault(device.pci_address, []).append(device)
    found = []
    for together in at.values():
        best = min(together, key=_rank)
        if all(each.uuid == best.uuid for each in together if each.driver == best.driver):
            found.append(best)
    return tuple(sorted(found, key=lambda device: device.index))


def permitted(devices: Iterable[VulkanDevice], visible: str | None) -> tuple[VulkanDevice, ...]:
    """Those that a ``GGML_VK_VISIBLE_DEVICES`` of the session leaves; all where it says nothing.

    The engine reads numbers up to the first word that is none, and separates them by commas or blanks.
    """
    if visible is None:
        return tuple(devices)
    numbers: set[int] = set()
    for word in visible.replace(",", " ").split():
        if not (word.isascii() and word.isdigit()):
            break
        numbers.add(int(word))
    return tuple(device for device in devices if device.index in numbers)


def agree(devices: Sequence[VulkanDevice], listed: Sequence[ListedDevice]) -> bool:
    """An engine that was shown these devices, in this order, lists them so.

    Engines count all heaps of a device's own memory, older ones the first.
    """
    return len(devices) == len(listed) and all(
        seen.name == f"Vulkan{place}"
        and seen.description.strip() == device.name.strip()
        and seen.total_bytes // MIB in _sizes_mib(device)
        for place, (device, seen) in enumerate(zip(devices, listed, strict=True))
    )


def addressed(devices: Iterable[VulkanDevice]) -> tuple[AddressedDevice, ...]:
    """What is kept of them."""
    return tuple(
        AddressedDevice(each.index, each.pci_address, each.name, each.total_bytes) for each in devices
    )


def _sizes_mib(device: VulkanDevice) -> set[int]:
    own = [size for size, is_local in device.heaps if is_local]
    return {size // MIB for size in (*own, sum(own), device.total_bytes)}


def _rank(device: VulkanDevice) -> tuple[int, int]:
    preferred = _PREFERRED_DRIVERS.get(device.vendor, ())
    unknown = len(preferred) + 1
    if device.driver in preferred:
        return preferred.index(device.driver), device.index
    return (unknown - 1 if device.driver == _DOZEN else unknown), device.index
