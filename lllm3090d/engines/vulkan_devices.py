"""The Vulkan devices of this machine, with their PCI addresses, as one JSON document: ``python -m`` this, and it ends.

A process of its own: the loader and every driver that is installed are loaded into it, and those may hang or crash. It
sets up what ``ggml-vulkan`` sets up (an instance of the loader's own version, without layers and extensions), since the
loader orders devices by what it is asked for: the place of a device in this list is then the number that
``GGML_VK_VISIBLE_DEVICES`` takes.

The document is the last line of stdout: ``{"devices": [...]}``, or ``{"problem": "..."}`` in words for a person.
Layouts and numbers are those of the Vulkan 1.3 specification, for 64 bits.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from ctypes import CDLL, POINTER, Structure, byref, c_char, c_char_p, c_uint8, c_uint32, c_uint64, c_void_p
from typing import Any

LIBRARY = "libvulkan.so.1"
# By these ggml-vulkan says who it is; settings of drivers go by it.
APPLICATION = b"ggml-vulkan"
APPLICATION_VERSION = 1
LEAST_VERSION = 1 << 22 | 1 << 12  # 1.1: since then properties have chains
DRIVER_PROPERTIES_SINCE = 1 << 22 | 2 << 12  # 1.2
PCI_EXTENSION = b"VK_EXT_pci_bus_info"
DRIVER_EXTENSION = b"VK_KHR_driver_properties"
SUCCESS, INCOMPLETE = 0, 5
DEVICE_LOCAL = 1
MOST_DEVICES = 64
MOST_EXTENSIONS = 4096

# VkStructureType
APPLICATION_INFO = 0
INSTANCE_CREATE_INFO = 1
PROPERTIES_2 = 1_000_059_001
ID_PROPERTIES = 1_000_071_004
DRIVER_PROPERTIES = 1_000_196_000
PCI_BUS_INFO = 1_000_212_000


class ApplicationInfo(Structure):
    """VkApplicationInfo."""

    _fields_ = (
        ("kind", c_uint32),
        ("next", c_void_p),
        ("name", c_char_p),
        ("version", c_uint32),
        ("engine_name", c_char_p),
        ("engine_version", c_uint32),
        ("api_version", c_uint32),
    )


class InstanceCreateInfo(Structure):
    """VkInstanceCreateInfo."""

    _fields_ = (
        ("kind", c_uint32),
        ("next", c_void_p),
        ("flags", c_uint32),
        ("application", POINTER(ApplicationInfo)),
        ("layer_count", c_uint32),
        ("layers", c_void_p),
        ("extension_count", c_uint32),
        ("extensions", c_void_p),
    )


class ExtensionProperties(Structure):
    """VkExtensionProperties."""

    _fields_ = (("name", c_char * 256), ("version", c_uint32))


class DeviceProperties(Structure):
    """VkPhysicalDeviceProperties; what follows the name is of no use here, and takes its 548 bytes."""

    _fields_ = (
        ("api_version", c_uint32),
        ("driver_version", c_uint32),
        ("vendor", c_uint32),
        ("device", c_uint32),
        ("type", c_uint32),
        ("name", c_char * 256),
        ("pipeline_cache_uuid", c_uint8 * 16),
        ("limits", c_uint64 * 63),
        ("sparse", c_uint32 * 5),
    )


class DeviceProperties2(Structure):
    """VkPhysicalDeviceProperties2."""

    _fields_ = (("kind", c_uint32), ("next", c_void_p), ("properties", DeviceProperties))


class IdProperties(Structure):
    """VkPhysicalDeviceIDProperties."""

    _fields_ = (
        ("kind", c_uint32),
        ("next", c_void_p),
        ("device_uuid", c_uint8 * 16),
        ("driver_uuid", c_uint8 * 16),
        ("luid", c_uint8 * 8),
        ("node_mask", c_uint32),
        ("luid_valid", c_uint32),
    )


class DriverProperties(Structure):
    """VkPhysicalDeviceDriverProperties."""

    _fields_ = (
        ("kind", c_uint32),
        ("next", c_void_p),
        ("id", c_uint32),
        ("name", c_char * 256),
        ("info", c_char * 256),
        ("conformance", c_uint8 * 4),
    )


class PciBusInfo(Structure):
    """VkPhysicalDevicePCIBusInfoPropertiesEXT."""

    _fields_ = (
        ("kind", c_uint32),
        ("next", c_void_p),
        ("domain", c_uint32),
        ("bus", c_uint32),
        ("device", c_uint32),
        ("function", c_uint32),
    )


class MemoryType(Structure):
    """VkMemoryType."""

    _fields_ = (("flags", c_uint32), ("heap", c_uint32))


class MemoryHeap(Structure):
    """VkMemoryHeap."""

    _fields_ = (("size", c_uint64), ("flags", c_uint32))


class MemoryProperties(Structure):
    """VkPhysicalDeviceMemoryProperties."""

    _fields_ = (
        ("type_count", c_uint32),
        ("types", MemoryType * 32),
        ("heap_count", c_uint32),
        ("heaps", MemoryHeap * 16),
    )


class VulkanError(Exception):
    """Why there is no list, in words for a person."""


class Vulkan:
    """The loader, with one instance.

    Raises:
        VulkanError: there is no loader here, an old one, or none of its drivers can be used.
    """

    def __init__(self) -> None:
        try:
            self._library = CDLL(LIBRARY)
        except OSError as error:
            raise VulkanError(f"the Vulkan loader cannot be loaded ({error})") from error
        try:
            self._get_version = self._function("vkEnumerateInstanceVersion", c_void_p)
            self._get_properties = self._function("vkGetPhysicalDeviceProperties2", c_void_p, c_void_p)
        except VulkanError as error:
            raise VulkanError("the Vulkan loader is older than 1.1") from error
        version = c_uint32()
        self._check("vkEnumerateInstanceVersion", self._get_version(byref(version)))
        if version.value < LEAST_VERSION:
            raise VulkanError("the Vulkan loader is older than 1.1")
        application = ApplicationInfo(
            kind=APPLICATION_INFO,
            name=APPLICATION,
            version=APPLICATION_VERSION,
            api_version=version.value,
        )
        wanted = InstanceCreateInfo(kind=INSTANCE_CREATE_INFO, application=ctypes.pointer(application))
        create = self._function("vkCreateInstance", c_void_p, c_void_p, c_void_p)
        self._instance = c_void_p()
        self._check("vkCreateInstance", create(byref(wanted), None, byref(self._instance)))

    def devices(self) -> list[dict[str, Any]]:
        """All devices, in the loader's order."""
        enumerate_devices = self._function("vkEnumeratePhysicalDevices", c_void_p, c_void_p, c_void_p)
        count = c_uint32(MOST_DEVICES)
        handles = (c_void_p * MOST_DEVICES)()
        status = enumerate_devices(self._instance, byref(count), handles)
        self._check("vkEnumeratePhysicalDevices", status)
        return [self._device(c_void_p(handles[index])) for index in range(count.value)]

    def _device(self, handle: c_void_p) -> dict[str, Any]:
        plain = DeviceProperties()
        self._function("vkGetPhysicalDeviceProperties", c_void_p, c_void_p)(handle, byref(plain))
        told: dict[str, Any] = {
            "name": plain.name.decode("utf-8", "replace"),
            "type": plain.type,
            "vendor": plain.vendor,
            "heaps": self._heaps(handle),
            "uuid": None,
            "driver": None,
            "pci": None,
        }
        if plain.api_version < LEAST_VERSION:
            return told
        extensions = self._extensions(handle)
        identity = IdProperties(kind=ID_PROPERTIES)
        driver = DriverProperties(kind=DRIVER_PROPERTIES)
        pci = PciBusInfo(kind=PCI_BUS_INFO)
        has_driver = plain.api_version >= DRIVER_PROPERTIES_SINCE or DRIVER_EXTENSION in extensions
        has_pci = PCI_EXTENSION in extensions
        # What a driver does not know must not be in its chain.
        last: IdProperties | DriverProperties = identity
        if has_driver:
            last.next = ctypes.addressof(driver)
            last = driver
        if has_pci:
            last.next = ctypes.addressof(pci)
        asked = DeviceProperties2(kind=PROPERTIES_2, next=ctypes.addressof(identity))
        self._get_properties(handle, byref(asked))
        told["uuid"] = bytes(identity.device_uuid).hex()
        told["driver"] = driver.id if has_driver else None
        if has_pci:
            told["pci"] = f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.{pci.function:x}"
        return told

    def _heaps(self, handle: c_void_p) -> list[dict[str, Any]]:
        memory = MemoryProperties()
        self._function("vkGetPhysicalDeviceMemoryProperties", c_void_p, c_void_p)(handle, byref(memory))
        heaps = memory.heaps[: memory.heap_count]
        return [{"bytes": heap.size, "local": bool(heap.flags & DEVICE_LOCAL)} for heap in heaps]

    def _extensions(self, handle: c_void_p) -> set[bytes]:
        ask = self._function("vkEnumerateDeviceExtensionProperties", c_void_p, c_char_p, c_void_p, c_void_p)
        count = c_uint32()
        self._check("vkEnumerateDeviceExtensionProperties", ask(handle, None, byref(count), None))
        count = c_uint32(min(count.value, MOST_EXTENSIONS))
        found = (ExtensionProperties * count.value)()
        self._check("vkEnumerateDeviceExtensionProperties", ask(handle, None, byref(count), found))
        return {each.name for each in found[: count.value]}

    def _function(self, name: str, *arguments: Any) -> Any:
        try:
            function = getattr(self._library, name)
        except AttributeError as error:
            raise VulkanError(f"the Vulkan loader has no {name}") from error
        function.argtypes = arguments
        function.restype = ctypes.c_int
        return function

    @staticmethod
    def _check(name: str, status: int) -> None:
        if status not in {SUCCESS, INCOMPLETE}:
            raise VulkanError(f"{name} fails with {status}")


def main() -> None:
    """Print the document; the process ends at once, for what drivers do at its end is of no use."""
    # What drivers and layers print on stdout goes to stderr.
    answer = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    document: dict[str, Any]
    try:
        document = {"devices": Vulkan().devices()}
    except VulkanError as error:
        document = {"problem": str(error)}
    with os.fdopen(answer, "w", encoding="utf-8") as stream:
        stream.write(json.dumps(document) + "\n")
    os._exit(0)


if __name__ == "__main__":
    main()
