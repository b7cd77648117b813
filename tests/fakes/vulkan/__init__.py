"""Graphics cards that are not there, by Vulkan: a fake ``libvulkan.so.1`` and the state file that it answers from."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("vulkan.c")
LIBRARY = "libvulkan.so.1"
STATE = "vulkan.state"

# VkPhysicalDeviceType
OTHER, INTEGRATED, DISCRETE, VIRTUAL, CPU = range(5)
# VkDriverId
AMD_PROPRIETARY, AMDVLK, RADV, NVIDIA, _, MESA_INTEL = range(1, 7)
LLVMPIPE, DOZEN, NVK = 13, 23, 24
# Numbers of makers on the PCI bus.
NVIDIA_VENDOR, AMD_VENDOR, INTEL_VENDOR, MESA_VENDOR = 0x10DE, 0x1002, 0x8086, 0x10005


@dataclass(frozen=True)
class FakeVulkanDevice:
    """By default an RTX 3090 as NVIDIA's driver lists it, but for its place; ``heaps`` are bytes and flags."""

    name: str = "NVIDIA GeForce RTX 3090"
    pci: str | None = "0000:01:00.0"
    type: int = DISCRETE
    vendor: int = NVIDIA_VENDOR
    driver: int = NVIDIA
    uuid: str = "00" * 16
    heaps: tuple[tuple[int, int], ...] = ((24576 << 20, 1), (32 << 30, 0), (246 << 20, 1))
    api: tuple[int, int] = (1, 3)

    def lines(self) -> list[str]:
        """Its part of the state file."""
        rows = ["device", f"  name {self.name}", f"  type {self.type}", f"  vendor {self.vendor}"]
        rows += [f"  driver {self.driver}", f"  uuid {self.uuid}", f"  api {self.api[0]} {self.api[1]}"]
        rows += [] if self.pci is None else [f"  pci {self.pci}"]
        return rows + [f"  heap {size} {flags}" for size, flags in self.heaps]


class FakeVulkan:
    """The library and its state file in one directory; who has it first on ``LD_LIBRARY_PATH`` sees these devices."""

    def __init__(self, directory: Path, *devices: FakeVulkanDevice) -> None:
        """Build the library with gcc. Args: directory: made if missing; devices: in the loader's order."""
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        command = ["gcc", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror"]
        command += [f"-Wl,-soname,{LIBRARY}", "-o", str(directory / LIBRARY), str(SOURCE), "-ldl"]
        subprocess.run(command, check=True)
        self.write(*devices)

    def write(self, *devices: FakeVulkanDevice, first: tuple[str, ...] = ()) -> None:
        """Replace the state. Args: devices: in the loader's order; first: lines before them, as ``hang``."""
        lines = [*first, *(line for device in devices for line in device.lines())]
        fresh = self.directory / f".{STATE}.new"
        fresh.write_text("\n".join(lines) + "\n", encoding="utf-8")
        fresh.rename(self.directory / STATE)
