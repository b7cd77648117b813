"""What happens (events in) and what is to be done about it (effects out): plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lllm3090d.bus.unit_status import UnitStatus
from lllm3090d.checkpoints.facts import CheckpointFacts, ProjectorFacts
from lllm3090d.checkpoints.library import Checkpoint
from lllm3090d.engines.capabilities import Build, Capabilities
from lllm3090d.errors import LlmError
from lllm3090d.gpus.readings import Card, MemoryReading
from lllm3090d.planning.launch import Drafter
from lllm3090d.planning.planner import PlanRequest
from lllm3090d.planning.reserves import Budget, host_reserve_bytes
from lllm3090d.planning.tier_conditions import HostMemory
from lllm3090d.serving.instance import InstanceState
from lllm3090d.serving.unit_spec import Record, UnitSpec


@dataclass(frozen=True, slots=True)
class Observation:
    """The card at one moment, and our part in it.

    Attributes:
        card: the card.
        reading: its memory.
        resident: bytes each run holds, by run; what progress and calibration go by.
        in_use: bytes of each run that the reading counts as used, by run. On a card the same as resident; in host
            memory without the pages of mapped files, which the kernel counts as available.
        desktop_active: a desktop session is on the card; None when that cannot be told.
        host: memory beside a card; None where the host is the card.
    """

    card: Card
    reading: MemoryReading
    resident: Mapping[str, int]
    in_use: Mapping[str, int]
    desktop_active: bool | None
    host: HostMemory | None = None

    @property
    def host_room_bytes(self) -> int | None:
        """What the host can give: available now, less what the machine keeps for itself."""
        if self.host is None:
            return None
        return max(0, self.host.available_bytes - host_reserve_bytes(self.host.total_bytes))


# --- events -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LoadRequested:
    """Somebody wants a model; everything slow (header, engine probe) has been looked up before."""

    token: str
    run: str  # identity of the launch, should one come of it
    checkpoint: Checkpoint
    facts: CheckpointFacts
    request: PlanRequest
    build: Build
    capabilities: Capabilities
    projector: ProjectorFacts | None = None
    drafter: Drafter | None = None
    arguments: tuple[str, ...] = ()  # further ones for the engine, as they were given


@dataclass(frozen=True, slots=True)
class UnloadRequested:
    """Somebody wants a model gone."""

    token: str
    name: str


@dataclass(frozen=True, slots=True)
class CancelRequested:
    """Somebody no longer wants the load of this token."""

    token: str
    load_token: str


@dataclass(frozen=True, slots=True)
class StartFinished:
    """systemd's start job ended; error is None when the engine's program was executed."""

    run: str
    error: LlmError | None


@dataclass(frozen=True, slots=True)
class UnitSeen:
    """What systemd says of a unit now."""

    status: UnitStatus


@dataclass(frozen=True, slots=True)
class UnitVanished:
    """systemd has unloaded a unit; last is the latest status that was seen."""

    unit: str
    last: UnitStatus | None


@dataclass(frozen=True, slots=True)
class EngineReady:
    """The engine of a run answers; measured_bytes is what it holds."""

    run: str
    measured_bytes: int | None


@dataclass(frozen=True, slots=True)
class TierChecked:
    """The log of a model with a divided cache was read after its start."""

    run: str
    in_force: bool
    reason: str


@dataclass(frozen=True, slots=True)
class LoadStalled:
    """A load has made no progress for too long."""

    run: str
    error: LlmError


@dataclass(frozen=True, slots=True)
class StopFinished:
    """The stop job of a run ended; error is None when the unit is gone or dead."""

    run: str
    error: LlmError | None


@dataclass(frozen=True, slots=True)
class PostMortemRead:
    """Why a unit ended by itself, with its last lines."""

    run: str
    error: LlmError


@dataclass(frozen=True, slots=True)
class MemoryReleased:
    """The card shows the memory of a run as free, but for missing_bytes."""

    run: str
    missing_bytes: int


@dataclass(frozen=True, slots=True)
class UnitAdopted:
    """A unit of ours was found at start; healthy is True when its engine answered."""

    status: UnitStatus
    record: Record
    healthy: bool
    measured_bytes: int | None


Event = (
    LoadRequested
    | UnloadRequested
    | CancelRequested
    | StartFinished
    | UnitSeen
    | UnitVanished
    | EngineReady
    | LoadStalled
    | TierChecked
    | StopFinished
    | PostMortemRead
    | MemoryReleased
    | UnitAdopted
)


# --- effects ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartUnit:
    """Ask systemd to start the unit of a run."""

    run: str
    spec: UnitSpec


@dataclass(frozen=True, slots=True)
class WatchLoading:
    """Wait until the engine of a run answers, or until its load stalls."""

    run: str


@dataclass(frozen=True, slots=True)
class StopUnit:
    """Ask systemd to stop the unit of a run."""

    run: str
    unit: str


@dataclass(frozen=True, slots=True)
class ReadPostMortem:
    """Find out why the unit of a run ended."""

    run: str
    unit: str
    status: UnitStatus | None


@dataclass(frozen=True, slots=True)
class WaitForMemory:
    """Wait until the card shows the memory of a run as free."""

    run: str


@dataclass(frozen=True, slots=True)
class ForgetUnit:
    """Reset a failed unit and remove its socket: nothing of the run is left behind."""

    run: str
    unit: str
    socket: Path


@dataclass(frozen=True, slots=True)
class Resubmit:
    """Decide a waiting load again, with a fresh reading."""

    event: LoadRequested


@dataclass(frozen=True, slots=True)
class Announce:
    """Tell the world that an instance changed its state."""

    name: str
    run: str
    previous: InstanceState
    state: InstanceState
    reason: str


@dataclass(frozen=True, slots=True)
class CheckTier:
    """Find out from a model's log whether its cache is divided; ends in TierChecked."""

    run: str


@dataclass(frozen=True, slots=True)
class TellTier:
    """Tell the world whether the cache of a model is divided as planned."""

    name: str
    run: str
    in_force: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Admitted:
    """Answer to a load: memory is held and the unit is being started; with the arithmetic of the admission."""

    token: str
    run: str
    facts: CheckpointFacts
    budget: Budget
    argv: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Joined:
    """Answer to a load: another one of the same model is under way."""

    token: str
    run: str


@dataclass(frozen=True, slots=True)
class Queued:
    """Answer to a load: it waits until the model's previous instance is gone."""

    token: str
    name: str


@dataclass(frozen=True, slots=True)
class LoadDone:
    """Last answer to a load: the model is ready."""

    token: str
    run: str


@dataclass(frozen=True, slots=True)
class UnloadDone:
    """Last answer to an unload."""

    token: str
    name: str
    run: str
    released_bytes: int


@dataclass(frozen=True, slots=True)
class CancelDone:
    """Answer to a cancellation."""

    token: str
    load_token: str
    stopped: bool


@dataclass(frozen=True, slots=True)
class Failed:
    """Last answer to a request that failed."""

    token: str
    error: LlmError


Effect = (
    StartUnit
    | WatchLoading
    | StopUnit
    | ReadPostMortem
    | WaitForMemory
    | ForgetUnit
    | Resubmit
    | Announce
    | CheckTier
    | TellTier
    | Admitted
    | Joined
    | Queued
    | LoadDone
    | UnloadDone
    | CancelDone
    | Failed
)
