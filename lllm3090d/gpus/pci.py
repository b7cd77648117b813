"""What sysfs and the table of PCI identifiers say of a device on the PCI bus."""

from __future__ import annotations

import re
from pathlib import Path

from lllm3090d.gpus.readings import PcieLink, normal_pci_address

# Where distributions keep the names of devices.
PCI_IDS = (Path("/usr/share/misc/pci.ids"), Path("/usr/share/hwdata/pci.ids"))
# Transfers per second of a lane, by generation (PCI-SIG); sysfs writes "16.0 GT/s PCIe".
_GENERATIONS = {"2.5": 1, "5.0": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}
_SPEED = re.compile(r"(?P<rate>\d+\.\d) GT/s.*")
# A person has given a device with such a driver to a virtual machine, or wants none of it.
SET_ASIDE = frozenset({"vfio-pci", "pci-stub"})


def text_of(file: Path) -> str:
    """Its text without blanks around it; empty where there is none or it may not be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def is_set_aside(address: str, sys: Path) -> bool:
    """A person has given the device at a PCI address to a virtual machine. Args: sys: where sysfs is mounted."""
    return bool(address) and (sys / "bus/pci/devices" / address / "driver").resolve().name in SET_ASIDE


def link_of(device: Path) -> PcieLink | None:
    """The narrowest part of the way from a device up to the host; None where sysfs does not say.

    Cards have switches of their own, whose inner links are of no interest: so every bridge on the way is looked at.

    Args:
        device: its directory below ``/sys/devices``, links resolved.
    """
    generations, widths = [], []
    for place in (device, *device.parents):
        if not normal_pci_address(place.name):
            break
        # The highest speed, for idle links are slow; the lanes in use, for the slot may have fewer.
        speed = _SPEED.fullmatch(text_of(place / "max_link_speed"))
        width = text_of(place / "current_link_width")
        if speed and speed["rate"] in _GENERATIONS and width.isdecimal() and int(width) > 0:
            generations.append(_GENERATIONS[speed["rate"]])
            widths.append(int(width))
    return PcieLink(min(generations), min(widths)) if generations else None


def product_name(vendor: str, device: str, tables: tuple[Path, ...] = PCI_IDS) -> str:
    """What a device is sold as; empty where no table knows it.

    Args:
        vendor: four hexadecimal digits.
        device: the same, of the vendor.
        tables: the first one that can be read is used.
    """
    for table in tables:
        try:
            lines = table.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue
        inside = False
        for line in lines:
            if line[:1] not in ("", "\t", "#"):
                inside = line.startswith(f"{vendor} ")
            elif inside and line.startswith(f"\t{device} "):
                name = line[1:].partition("  ")[2].strip()
                # "Navi 31 [Radeon RX 7900 XT]": the chip, and in brackets what is written on the box.
                sold_as = re.search(r"\[(.+)\]$", name)
                return sold_as[1] if sold_as else name
        return ""
    return ""
