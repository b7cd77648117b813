"""Host memory in the place of a card, for machines without one (backend ``cpu``)."""

from __future__ import annotations

import platform
import re
import time
from pathlib import Path

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.readings import Card, CardKind, MemoryReading

MEMINFO = Path("/proc/meminfo")
ROW = re.compile(r"^(?P<key>\w+):\s+(?P<kib>\d+) kB$", re.MULTILINE)


class HostMemoryReader:
    """Reads ``MemTotal`` and ``MemAvailable`` of ``/proc/meminfo``.

    Free is MemAvailable: what can be had without swapping, reclaimable page cache included. Used is the
    rest. There is no driver, so reserved is 0 bytes, and no list of processes.
    """

    def __init__(self, meminfo: Path = MEMINFO) -> None:
        """Args: meminfo: the file to read."""
        self._meminfo = meminfo
        self._card = Card(CardKind.CPU, "host", f"host memory ({platform.machine()})", None)

    @property
    def card(self) -> Card:
        """Host memory as a card."""
        return self._card

    def read(self) -> MemoryReading:
        """The host's memory now, bytes. Raises LlmError CARD_UNREADABLE."""
        try:
            text = self._meminfo.read_text(encoding="ascii")
        except (OSError, UnicodeDecodeError) as error:
            raise self._unreadable(f"it cannot be read: {error}") from error
        rows = {match["key"]: int(match["kib"]) * 1024 for match in ROW.finditer(text)}
        missing = [key for key in ("MemTotal", "MemAvailable") if key not in rows]
        if missing:
            raise self._unreadable(f"it has no {' and no '.join(missing)}")
        total, available = rows["MemTotal"], rows["MemAvailable"]
        if total == 0 or available > total:
            raise self._unreadable(
                f"its figures cannot be true: MemTotal {total}, MemAvailable {available} bytes"
            )
        return MemoryReading(
            taken_monotonic_s=time.monotonic(),
            total_bytes=total,
            reserved_bytes=0,
            used_bytes=total - available,
            free_bytes=available,
            processes=(),
            processes_known=False,
        )

    def close(self) -> None:
        """Nothing is held."""

    def _unreadable(self, why: str) -> LlmError:
        return LlmError(
            ErrorCode.CARD_UNREADABLE,
            f"Host memory stands in for the card, but {self._meminfo}: {why}.",
            hint="Check that /proc is mounted.",
            path=str(self._meminfo),
        )
