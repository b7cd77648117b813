"""What a process holds of a card whose driver is in the kernel: the DRM client statistics in ``/proc/PID/fdinfo``.

Each open file of a DRM device tells its driver's figures as ``key: value`` lines (kernel documentation, "DRM client
usage stats"). Files that share one ``drm-client-id`` tell the same figures, so a client counts once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from lllm3090d.gpus.readings import CardProcess, normal_pci_address

PROC = Path("/proc")
DEVICES = "/dev/dri/"
_ROW = re.compile(r"^(?P<key>drm-[a-z0-9-]+):\s*(?P<value>.*?)\s*$", re.MULTILINE)
_AMOUNT = re.compile(r"(?P<number>\d{1,20})(?: (?P<unit>KiB|MiB|GiB))?")
_UNITS = {None: 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
# What is in video memory now, in the words of newer and older kernels. The total of the last one includes what was
# moved out, so it comes last.
_PREFIXES = ("drm-resident-", "drm-memory-", "drm-total-")
_REGION = re.compile(r"vram\d*")


def card_use(pid: int, pci_address: str, proc: Path = PROC) -> CardProcess | None:
    """What a process holds of a card.

    Args:
        pid: of the process.
        pci_address: of the card, in the form of sysfs.
        proc: where proc is mounted.

    Returns:
        Its memory in bytes, None bytes where its files may not be read or do not tell; None where it has nothing
        open on the card or is gone.
    """
    place = proc / str(pid)
    clients: dict[str, int | None] = {}
    try:
        with os.scandir(place / "fd") as entries:
            files = [entry.name for entry in entries if _leads_to_drm(entry.path)]
        for number in files:
            told = _told(place / "fdinfo" / number)
            if normal_pci_address(told.get("drm-pdev", "")) == pci_address:
                # Without a client's number every file is one of its own: rather too much than too little.
                client = told.get("drm-client-id", f"file {number}")
                clients[client] = _video_memory(told)
    except PermissionError:
        return CardProcess(pid, None)
    except (FileNotFoundError, ProcessLookupError):
        return None
    if not clients:
        return None
    sizes = [size for size in clients.values() if size is not None]
    return CardProcess(pid, sum(sizes) if len(sizes) == len(clients) else None)


def own_processes(proc: Path = PROC) -> tuple[int, ...]:
    """All processes of this user, the only ones whose files may be read."""
    user = os.geteuid()
    found = []
    with os.scandir(proc) as entries:
        for entry in entries:
            if not entry.name.isdecimal():
                continue
            try:
                if entry.stat(follow_symlinks=False).st_uid == user:
                    found.append(int(entry.name))
            except (FileNotFoundError, ProcessLookupError):
                continue  # ended meanwhile
    return tuple(found)


def _leads_to_drm(file: str) -> bool:
    try:
        # Of thousands of files: a Path for each takes several times as long.
        return os.readlink(file).startswith(DEVICES)  # noqa: PTH115
    except (FileNotFoundError, ProcessLookupError):
        return False  # closed meanwhile


def _told(file: Path) -> Mapping[str, str]:
    try:
        text = file.read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return {}  # closed meanwhile
    return {match["key"]: match["value"] for match in _ROW.finditer(text)}


def _video_memory(told: Mapping[str, str]) -> int | None:
    """Bytes in all regions of video memory; None where no line tells."""
    for prefix in _PREFIXES:
        regions = [
            value
            for key, value in told.items()
            if key.startswith(prefix) and _REGION.fullmatch(key.removeprefix(prefix))
        ]
        sizes = [_bytes(value) for value in regions]
        if sizes:
            known = [size for size in sizes if size is not None]
            return sum(known) if len(known) == len(sizes) else None
    return None


def _bytes(text: str) -> int | None:
    found = _AMOUNT.fullmatch(text)
    return int(found["number"]) * _UNITS[found["unit"]] if found else None
