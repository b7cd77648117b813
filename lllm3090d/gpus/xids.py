"""Xid errors of NVIDIA's driver: what each means for the card and for what computes on it. Pure.

Sources: NVIDIA, "Xid Errors" (docs.nvidia.com/deploy/xid-errors: the catalogue with its resolution buckets), "GPU
Memory Error Management" (what 48, 63, 64, 94 and 95 leave behind, and the recovery action that the driver asks for)
and "NVML API" (``nvmlEventTypeXidCriticalError``, ``NVML_FI_DEV_GET_GPU_RECOVERY_ACTION``).

What is not in the table is worth a line in the history and nothing more: most numbers concern data-centre cards, and
a card whose driver asks for nothing is not taken from a person on a guess.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Protocol, runtime_checkable

from lllm3090d.gpus.readings import normal_pci_address


class XidClass(enum.StrEnum):
    """Whom an Xid concerns."""

    PROCESS = "process"  # what one process did, or was hit by; others go on
    CARD = "card"  # the card or its memory: whatever computes on it may be wrong or stuck
    NOTE = "note"  # worth knowing


class Until(enum.StrEnum):
    """When a card is trusted again after an Xid of class CARD; in each case it must be readable."""

    RESET = "reset"  # it has been reset, or the driver has asked for nothing for a while
    QUIET = "quiet"  # the same, or no other Xid has come for a while where the driver does not tell
    WORD = "word"  # the driver asks for nothing any more


@dataclass(frozen=True, slots=True)
class XidKind:
    """One number.

    Attributes:
        meaning: for a person.
        concerns: whom.
        until: of one that concerns the card, when that is over.
    """

    meaning: str
    concerns: XidClass
    until: Until = Until.RESET


_P, _C, _N = XidClass.PROCESS, XidClass.CARD, XidClass.NOTE
KINDS: Mapping[int, XidKind] = MappingProxyType(
    {
        # The driver ends the channel of the process; its memory and the card are as before (bucket: restart the app).
        8: XidKind("a process was stopped on the card: it took too long", _P),
        11: XidKind("a process sent commands that the card does not understand", _P),
        13: XidKind("a computation failed: it went out of bounds or used a bad instruction", _P),
        31: XidKind("a process used memory of the card that is not its own", _P),
        32: XidKind("the commands of a process arrived damaged", _P),
        43: XidKind("a process was stopped on the card after a fault of its own", _P),
        68: XidKind("the video decoder failed", _P),
        69: XidKind("a process sent commands of the wrong kind", _P),
        # Contained: only what used that memory is hit, and new processes may start (GPU Memory Error Management).
        94: XidKind("memory of the card failed, and the fault was kept to the process that used it", _P),
        # Written down and remapped at the next reset; until then everything may go on (the same).
        63: XidKind("bad memory of the card was written down and is replaced at the next reset", _N),
        # What was left of a process that ended: follows from its end, and is never the reason of it.
        45: XidKind("what a process had on the card was cleaned up", _N),
        92: XidKind("memory of the card needed many corrections", _N),
        # An error that could not be corrected. Newer cards say with 94 or 95 how far it went; older ones take the
        # page out of use. Whoever had the page is ended.
        48: XidKind("memory of the card failed beyond correction", _C, Until.QUIET),
        # The context switch of one process timed out; the driver tries to recover the engine by itself.
        109: XidKind("the card did not switch to another process in time", _C, Until.QUIET),
        # Internal controllers that have stopped do not start again without a reset.
        61: XidKind("a controller in the card has stopped at a breakpoint", _C),
        62: XidKind("a controller in the card has halted", _C),
        # The table of bad memory could not be written: the same memory is given out again.
        64: XidKind("bad memory of the card could not be written down", _C),
        74: XidKind("the link to another card failed", _C),
        79: XidKind("the card has fallen off the bus", _C),
        # Not contained: whatever was computed since may be wrong, of every process.
        95: XidKind("memory of the card failed, and the fault may have spread to every process", _C),
        110: XidKind("the card has reported a security fault", _C),
        # The processor on the card that the driver works through does not answer: nothing can be started or freed.
        119: XidKind("the card's own processor (GSP) does not answer", _C),
        120: XidKind("the card's own processor (GSP) has failed", _C),
        140: XidKind("memory of the card failed beyond correction", _C),
        143: XidKind("the card could not be set up", _C),
        # Tells that the driver asks for something else than before, which may be nothing at all.
        154: XidKind("the driver asks for something else to recover the card", _C, Until.WORD),
    }
)
_UNKNOWN = XidKind("an error of the driver", _N)

# NVML's words for what the driver asks for (nvmlDeviceGpuRecoveryAction_t); 0 is nothing.
ACTIONS: Mapping[int, str] = MappingProxyType(
    {
        1: "a reset of the card",
        2: "a restart of the machine",
        3: "that everything on the card ends",
        4: "that everything on the card ends, then a reset of it",
        6: "a reset of the card's bus",
        7: "a restart of the machine",
    }
)


@dataclass(frozen=True, slots=True)
class Xid:
    """One error that the driver has reported.

    Attributes:
        number: of the error.
        pid: the process that it names; None where it names none, or the source does not tell.
        text: the driver's own line, where there is one.
    """

    number: int
    pid: int | None = None
    text: str = ""

    @property
    def kind(self) -> XidKind:
        """What it means."""
        return KINDS.get(self.number, _UNKNOWN)

    @property
    def title(self) -> str:
        """For a person."""
        return f"Xid {self.number}: {self.kind.meaning}"


@dataclass(frozen=True, slots=True)
class CardErrors:
    """What the driver of a card has reported.

    Attributes:
        xids: since it was asked last, oldest first.
        action: what it asks for to recover the card (:data:`ACTIONS`), 0 for nothing; None where it does not tell.
        returns: how often the card has come back after its driver had lost it, or was not there.
        source: who tells of errors, for a person; empty where nobody does.
    """

    xids: tuple[Xid, ...] = ()
    action: int | None = None
    returns: int = 0
    source: str = ""

    def then(self, later: CardErrors) -> CardErrors:
        """Both together, of which the later one knows what is true now."""
        return replace(later, xids=self.xids + later.xids)


@runtime_checkable
class TellsErrors(Protocol):
    """A reader of a card whose driver reports errors."""

    def errors(self) -> CardErrors:
        """What was reported up to the last reading, and not told yet; to be asked after a reading. Never waits."""
        ...


# "NVRM: Xid (PCI:0000:01:00): 79, pid=1234, name=llama-server, GPU has fallen off the bus."; older drivers leave the
# word PCI, the process or both out.
_LINE = re.compile(
    r"NVRM: Xid \((?:PCI:)?(?P<pci>[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2})(?:\.[0-7])?\): (?P<number>\d{1,4})\b"
    r"(?P<rest>[^\n]*)",
    re.IGNORECASE,
)
_PID = re.compile(r"\bpid='?(\d{1,10})\b")
LONGEST_TEXT = 300


def xids_in(text: str) -> tuple[tuple[str, Xid], ...]:
    """The Xid errors in messages of the kernel: each with the PCI address of its card, in order."""
    found = []
    for match in _LINE.finditer(text):
        address = normal_pci_address(match["pci"] + ".0")
        pid = _PID.search(match["rest"])
        number = int(match["number"])
        found.append((address, Xid(number, int(pid[1]) if pid else None, match[0].rstrip()[:LONGEST_TEXT])))
    return tuple(found)
