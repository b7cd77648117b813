"""Observation: every card at one moment, and our part in it. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.readings import Card, CardKind, MemoryReading
from lllm3090d.planning.reserves import host_reserve_bytes
from lllm3090d.planning.tier_conditions import HostMemory

HOST = "host"  # in place of a card's UUID: memory of the machine
# What a foreign unit holds stands under its name, in the place of a run, which has no dot.
FOREIGN_SUFFIX = ".service"


def is_foreign_unit(run: str) -> bool:
    """It is no launch of ours but a unit that is left alone (:mod:`lllm3090d.serving.foreign_units`)."""
    return run.endswith(FOREIGN_SUFFIX)


@dataclass(frozen=True, slots=True)
class RunProcesses:
    """What tells the processes of a run: everything in its unit's control group is its own.

    Attributes:
        main_pid: its main process; None before there is one.
        control_group: of its unit, as systemd says it; None unknown.
    """

    main_pid: int | None
    control_group: str | None


@dataclass(frozen=True, slots=True)
class Stranger:
    """A process on a card that is none of ours.

    Attributes:
        pid: process id.
        name: its command, as a person knows it; empty where nobody may look.
        user: who owns it, where that is another user; empty for our own user.
        used_bytes: what it holds; None where the driver does not tell.
        model: of another user, that it serves, as its unit is named; empty where it is no engine of a daemon like this.
        unseen: why nobody can tell who it is, as the end of a sentence; empty where that is known.
        is_persons: the other user is a person, and no account of the system such as root or that of a login screen.
    """

    pid: int
    name: str
    user: str
    used_bytes: int | None
    model: str = ""
    unseen: str = ""
    is_persons: bool = False


@dataclass(frozen=True, slots=True)
class CardState:
    """One card at one moment.

    Attributes:
        card: the card.
        reading: its memory; None where it could not be read.
        error: why not; None where it was.
        resident: bytes each run holds of it, by run; what progress and calibration go by.
        in_use: bytes of each run that the reading counts as used, by run. On a card the same as resident; in host
            memory without the pages of mapped files, which the kernel counts as available.
        strangers: who else holds memory, largest first, where the driver tells.
        attributed: the driver tells who holds how much; else resident and in_use are empty.
        fault: why nothing is to be put on it although it can be read; None where it is sound.
    """

    card: Card
    reading: MemoryReading | None
    error: LlmError | None = None
    resident: Mapping[str, int] = field(default_factory=dict)
    in_use: Mapping[str, int] = field(default_factory=dict)
    strangers: tuple[Stranger, ...] = ()
    attributed: bool = True
    fault: LlmError | None = None

    @property
    def problem(self) -> LlmError | None:
        """Why it gives nothing; None where it does."""
        return self.error or self.fault

    def usable(self) -> MemoryReading:
        """The reading of a card that something may be put on. Raises LlmError CARD_UNREADABLE, CARD_AT_RISK."""
        reading = self.read()
        if self.fault is not None:
            raise self.fault
        return reading

    def read(self) -> MemoryReading:
        """The reading. Raises LlmError CARD_UNREADABLE where there is none."""
        if self.reading is None:
            raise self.error or LlmError(
                ErrorCode.CARD_UNREADABLE,
                f"The memory of {self.card.name} was not read.",
                hint="Try again.",
                card=self.card.uuid,
            )
        return self.reading


@dataclass(frozen=True, slots=True)
class Observation:
    """All cards at one moment.

    Attributes:
        cards: the cards, the one with the most memory first; never empty.
        desktop_active: a desktop session is on the machine; None when that cannot be told.
        host: memory beside the cards; None where the host is the card.
        host_in_use: what each run holds of it that the kernel cannot drop, bytes, by run.
    """

    cards: tuple[CardState, ...]
    desktop_active: bool | None
    host: HostMemory | None = None
    host_in_use: Mapping[str, int] = field(default_factory=dict)

    @property
    def main(self) -> CardState:
        """The card with the most memory."""
        return self.cards[0]

    @property
    def card(self) -> Card:
        """The card with the most memory."""
        return self.main.card

    @property
    def reading(self) -> MemoryReading:
        """Of the card with the most memory. Raises LlmError CARD_UNREADABLE."""
        return self.main.read()

    @property
    def on_host(self) -> bool:
        """Host memory takes the card's place."""
        return self.card.kind is CardKind.CPU

    def of(self, uuid: str) -> CardState | None:
        """The card of a UUID."""
        return next((state for state in self.cards if state.card.uuid == uuid), None)

    @property
    def host_room_bytes(self) -> int | None:
        """What the host can give: available now, less what the machine keeps for itself."""
        if self.host is None:
            return None
        return max(0, self.host.available_bytes - host_reserve_bytes(self.host.total_bytes))
