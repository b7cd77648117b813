"""The kernel's dmem controller: capacity, use and limits of device memory by control group (Linux 6.14 and later).

Files are lines of ``region value``: ``dmem.capacity`` (root only) has the size of each region in bytes,
``dmem.current`` what a group and those below it use, ``dmem.max`` their limit or ``max``. A region of a card is called
``drm/PCI-ADDRESS/vram`` (amdgpu) or ``.../vram0``, ``.../vram1`` (xe, one for each tile). NVIDIA's driver has none.

A limit is a second fence behind admission, never what admission rests on: it is used where the kernel has it, the
driver counts by it and the group may be written to, and nowhere required. What an engine takes beyond it the driver
moves out to host memory, or refuses.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from lllm3090d.gpus.readings import Card

CGROUP = Path("/sys/fs/cgroup")
UNIFIED = "unified"  # where the hybrid layout keeps version 2
_REGION_END = re.compile(r"vram\d*")
_LINE = re.compile(r"(?P<region>\S+)[ \t]+(?P<value>\d{1,20})")


def unified_root(cgroup: Path = CGROUP) -> Path:
    """The root of version 2, in the unified and in the hybrid layout."""
    hybrid = cgroup / UNIFIED
    return hybrid if (hybrid / "cgroup.controllers").is_file() else cgroup


def capacities(pci_address: str, cgroup: Path = CGROUP) -> Mapping[str, int]:
    """Size in bytes of each region of video memory of a card; empty where the kernel or driver has none."""
    return _of_card(pci_address, unified_root(cgroup) / "dmem.capacity")


def used_bytes(regions: Mapping[str, int], cgroup: Path = CGROUP) -> int | None:
    """What all processes use of these regions, by the root group; None where one of them is not told."""
    told = _lines(unified_root(cgroup) / "dmem.current")
    sizes = [told[region] for region in regions if region in told]
    return sum(sizes) if sizes and len(sizes) == len(regions) else None


def region_of(card: Card, cgroup: Path = CGROUP) -> str | None:
    """The region that a limit on this card would name; None where there is none, or several that share a limit."""
    regions = list(capacities(card.pci_address, cgroup)) if card.pci_address else []
    return regions[0] if len(regions) == 1 else None


def limit(control_group: str, region: str, size_bytes: int, cgroup: Path = CGROUP) -> bool:
    """Let a unit's processes hold no more than this of a region.

    Args:
        control_group: ``ControlGroup`` of the unit.
        region: of :func:`region_of`.
        size_bytes: the limit; the kernel may round it down to pages.
        cgroup: where control groups are mounted.

    Returns:
        The limit is in force. False where the group has no such file or may not be written to, as with a user
        manager to which the controller is not delegated.

    Raises:
        ValueError: the size is not positive: that would be a limit at which nothing runs.
    """
    if size_bytes <= 0:
        raise ValueError(f"no such limit: {size_bytes} bytes")
    file = unified_root(cgroup) / control_group.lstrip("/") / "dmem.max"
    try:
        # Not created where it is missing: a file that the kernel does not know limits nothing.
        opened = os.open(file, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
        try:
            os.write(opened, f"{region} {size_bytes}\n".encode("ascii"))
        finally:
            os.close(opened)
        return 0 < _lines(file).get(region, 0) <= size_bytes
    except OSError:
        return False


def limit_of(control_group: str, region: str, cgroup: Path = CGROUP) -> int | None:
    """The limit that is in force, bytes; None without one."""
    return _lines(unified_root(cgroup) / control_group.lstrip("/") / "dmem.max").get(region)


def _of_card(pci_address: str, file: Path) -> Mapping[str, int]:
    prefix = f"drm/{pci_address}/"
    return {
        region: size
        for region, size in _lines(file).items()
        if region.startswith(prefix) and _REGION_END.fullmatch(region.removeprefix(prefix))
    }


def _lines(file: Path) -> Mapping[str, int]:
    """Numbers by region; lines without one (``max``) are left out. Empty where there is no such file."""
    try:
        text = file.read_text(encoding="ascii", errors="replace")
    except OSError:
        return {}
    matches = (_LINE.fullmatch(line.strip()) for line in text.splitlines())
    return {match["region"]: int(match["value"]) for match in matches if match}
