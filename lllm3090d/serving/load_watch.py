"""How long a load may take: as long as it gets on, within a bound that its size and the disk give. Pure.

A fixed time kills slow loads, and none leaves a load that hangs for ever. So there are two clocks: one that any
progress resets, and an absolute one for an engine that seems to get on without ever arriving (it reads the same pages
again and again, or logs in a loop). Progress is any counter above its highest yet:

- bytes read, through the page cache (``rchar`` of proc_pid_io(5)) and from the disk (``read_bytes``). A file that is in
  the cache grows the first only, one that is mapped into memory the second only;
- bytes written (``wchar``): log lines. What an engine says on its socket is not among them: asking is no progress;
- memory of the cards and of the host that it holds.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

# Before the first load that read from a disk nobody knows it: what a slow hard disk or a network file system gives.
ASSUMED_DISK_BYTES_PER_S = 30_000_000
# Reading is hardly ever all: weights are copied to a card, repacked, and shaders are compiled.
CAP_MARGIN = 8.0
LEAST_CAP_S = 1800.0
# What is slower is no disk, but an engine that reads a little now and then: else such a one would never be given up.
SLOWEST_DISK_BYTES_PER_S = 500_000
# Below this the rate of a disk says more of its start-up and of the page cache than of the disk.
LEAST_MEASURED_BYTES = 64 << 20


class LoadVerdict(enum.StrEnum):
    """What is to be done about a load."""

    GOES_ON = "goes_on"
    STALLED = "stalled"  # no counter has grown for too long
    TOO_LONG = "too_long"  # it got on, and has not arrived within the absolute bound


@dataclass(frozen=True, slots=True)
class LoadCounters:
    """What a load has done so far; None where that cannot be read.

    Attributes:
        read_bytes: through the page cache or not.
        disk_bytes: from the disk.
        written_bytes: to files and to the log.
        resident_bytes: host memory that it holds, mapped files included.
        device_bytes: of all cards.
    """

    read_bytes: int | None = None
    disk_bytes: int | None = None
    written_bytes: int | None = None
    resident_bytes: int | None = None
    device_bytes: int | None = None

    def known(self) -> Mapping[str, int]:
        """Those that could be read, by name."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True)
class LoadLimits:
    """When a load is given up.

    Attributes:
        stall_s: seconds without progress.
        cap_s: seconds altogether; see :func:`load_cap_s`.
        file_bytes: of what is read; with it a disk that turns out slower than was known makes the cap longer. None
            where the cap is a person's choice.
    """

    stall_s: float
    cap_s: float = float("inf")
    file_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class LoadTrack:
    """How a load went until now.

    Attributes:
        began_s: when the watch began, on the clock of all times here.
        progressed_s: when a counter last grew.
        seen_s: the last look.
        highest: of each counter.
        disk_s: when something last came from the disk; None where nothing ever did.
    """

    began_s: float
    progressed_s: float
    seen_s: float
    highest: Mapping[str, int] = field(default_factory=dict)
    disk_s: float | None = None

    @classmethod
    def start(cls, now_s: float) -> LoadTrack:
        """Of a load that begins, or is found under way."""
        return cls(now_s, now_s, now_s)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the watch began."""
        return self.seen_s - self.began_s

    @property
    def idle_s(self) -> float:
        """Seconds without progress."""
        return self.seen_s - self.progressed_s

    def after(self, now_s: float, counters: LoadCounters) -> LoadTrack:
        """With one more look. A counter that is seen for the first time is progress unless it is 0."""
        known = counters.known()
        grown = any(value > self.highest.get(name, 0) for name, value in known.items())
        highest = {**self.highest, **{n: max(v, self.highest.get(n, 0)) for n, v in known.items()}}
        read = known.get("disk_bytes", 0) > self.highest.get("disk_bytes", 0)
        return replace(
            self,
            seen_s=now_s,
            progressed_s=now_s if grown else self.progressed_s,
            highest=highest,
            disk_s=now_s if read else self.disk_s,
        )

    def verdict(self, limits: LoadLimits) -> LoadVerdict:
        """Of the last look."""
        if self.idle_s > limits.stall_s:
            return LoadVerdict.STALLED
        return LoadVerdict.TOO_LONG if self.elapsed_s > self.cap_s(limits) else LoadVerdict.GOES_ON

    def cap_s(self, limits: LoadLimits) -> float:
        """Seconds altogether, with what this load has shown of the disk."""
        if limits.file_bytes is None:
            return limits.cap_s
        return max(limits.cap_s, load_cap_s(limits.file_bytes, self.disk_bytes_per_s))

    @property
    def disk_bytes_per_s(self) -> float | None:
        """What the disk gave on average while something came from it; None where too little did to tell."""
        size, until_s = self.highest.get("disk_bytes", 0), self.disk_s
        if size < LEAST_MEASURED_BYTES or until_s is None or until_s <= self.began_s:
            return None
        return size / (until_s - self.began_s)


def load_cap_s(file_bytes: int, disk_bytes_per_s: float | None = None, setting_s: float = 0.0) -> float:
    """Seconds after which a load is given up although it gets on.

    Args:
        file_bytes: of everything that is read: shards, projector, drafter.
        disk_bytes_per_s: as measured (:mod:`lllm3090d.serving.disk_rates`); None unknown. A measured rate only
            lengthens the time: what came from the page cache yesterday may come from a sleeping disk today.
        setting_s: a person's choice, which is taken as it is; 0 for none.
    """
    if setting_s > 0:
        return setting_s
    rate = min(disk_bytes_per_s or ASSUMED_DISK_BYTES_PER_S, ASSUMED_DISK_BYTES_PER_S)
    rate = max(rate, SLOWEST_DISK_BYTES_PER_S)
    return LEAST_CAP_S + CAP_MARGIN * file_bytes / rate
