"""What happens (events in) and what is to be done about it (effects out): plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from lllm3090d.bus.unit_status import UnitStatus
from lllm3090d.checkpoints.catalogue import MeasuredSpeed
from lllm3090d.checkpoints.facts import CheckpointFacts, ProjectorFacts
from lllm3090d.checkpoints.library import Checkpoint
from lllm3090d.checkpoints.unruled import UnruledModel
from lllm3090d.engines.capabilities import Build, Capabilities
from lllm3090d.errors import LlmError
from lllm3090d.planning.calibration import Calibration, CalibrationKey, Measurement
from lllm3090d.planning.launch import Drafter
from lllm3090d.planning.planner import Plan, PlanRequest
from lllm3090d.planning.reserves import Budget
from lllm3090d.serving.drains import Drain
from lllm3090d.serving.hangs import EngineWork, Verdict
from lllm3090d.serving.instance import InstanceState
from lllm3090d.serving.ledger import Share
from lllm3090d.serving.observation import Observation
from lllm3090d.serving.restarts import End
from lllm3090d.serving.unit_spec import Record, UnitSpec

if TYPE_CHECKING:  # which is made of these events
    from lllm3090d.serving.running import Evicted

__all__ = ["Observation"]  # beside what is defined here: what most events are decided on


# --- events -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LoadRequested:
    """Somebody wants a model; everything slow (header, engine probe) has been looked up before.

    Attributes:
        token: of the request; the answers carry it.
        run: identity of the launch, should one come of it.
        arguments: further ones for the engine, as they were given.
        calibrations: what was learnt of launches of the model with this build, by UUID of the card.
        card: UUID of the only card that it may be on; None leaves the choice.
        least_context_tokens: with a context, what will do where that does not fit.
        lease: keeps the model from being evicted, by the request's token, until LeaseReturned.
        pinned: never a victim of an eviction.
        may_evict: idle models may be unloaded for it.
        may_wait: it may wait for room.
        idle_s: how long it had not been used when it was unloaded, of a model that is loaded again.
        offer: the plan of a model without a rule, which the engine has priced before; None of any other.
        speeds: measured with this very file.
        restart_until_s: of a load by a program: until when it can wait for the start of a model that has ended by
            itself, on the scheduler's clock. None of a person's, which takes its place.
    """

    token: str
    run: str
    checkpoint: Checkpoint
    facts: CheckpointFacts | UnruledModel
    request: PlanRequest
    build: Build
    capabilities: Capabilities
    projector: ProjectorFacts | None = None
    drafter: Drafter | None = None
    arguments: tuple[str, ...] = ()
    calibrations: Mapping[str, Calibration] = field(default_factory=dict)
    card: str | None = None
    least_context_tokens: int | None = None
    lease: bool = False
    pinned: bool = False
    may_evict: bool = True
    may_wait: bool = True
    attempt: int = 0
    idle_s: float = 0.0
    offer: Plan | None = None
    speeds: tuple[MeasuredSpeed, ...] = ()
    restart_until_s: float | None = None

    @property
    def ruled(self) -> CheckpointFacts | None:
        """The facts; None of a model without a rule."""
        return self.facts if isinstance(self.facts, CheckpointFacts) else None


@dataclass(frozen=True, slots=True)
class UnloadRequested:
    """Somebody wants a model gone.

    Attributes:
        drain_s: how long its requests may go on; None as the policy says.
        force: kill it at once, whatever it does.
    """

    token: str
    name: str
    drain_s: float | None = None
    force: bool = False


@dataclass(frozen=True, slots=True)
class CancelRequested:
    """Somebody no longer wants the load of this token."""

    token: str
    load_token: str


@dataclass(frozen=True, slots=True)
class LeaseAsked:
    """Somebody is about to use a model that serves; ends in LeaseGiven or Failed."""

    token: str
    name: str
    lease: str


@dataclass(frozen=True, slots=True)
class LeaseReturned:
    """The use of a lease has ended; an unknown one is no fault: its model may have died.

    Attributes:
        keep_alive_s: for how long the model may stay without use from now on; None for as long as before.
    """

    lease: str
    keep_alive_s: float | None = None


@dataclass(frozen=True, slots=True)
class PinRequested:
    """Somebody wants a model never to be evicted, or no longer so."""

    token: str
    name: str
    pinned: bool


@dataclass(frozen=True, slots=True)
class ResetRequested:
    """Somebody wants a model that failed started again, and what happened to it forgotten."""

    token: str
    name: str


@dataclass(frozen=True, slots=True)
class ComebackRefused:
    """A model that failed could not be started again."""

    name: str
    error: LlmError


@dataclass(frozen=True, slots=True)
class FailureRecalled:
    """What the daemon before this one knew of a model that had ended by itself.

    Attributes:
        name: of the model.
        ends: since the last reset, oldest first.
        record: of its last launch; None where only the ends are to be recalled.
        failure: why it ended last.
        retry_at_s: when it is started again, on the scheduler's clock; None of one that stays down.
        next_attempt: as which attempt.
        latch_reason, way_out: of one that stays down.
    """

    name: str
    ends: tuple[End, ...]
    record: Record | None = None
    arguments: tuple[str, ...] = ()
    card: str | None = None
    pinned: bool = False
    failure: LlmError | None = None
    retry_at_s: float | None = None
    next_attempt: int = 0
    latch_reason: str = ""
    way_out: str = ""


@dataclass(frozen=True, slots=True)
class EndWasAsked:
    """A unit that was found dead was ended by the daemon before this one, however it looks; that is no failure."""

    run: str
    wanted: bool  # it is to be loaded again


@dataclass(frozen=True, slots=True)
class VictimsOwed:
    """A launch that was found on its way up: these went for it, and are loaded again should it not come up."""

    run: str
    evicted: tuple[Evicted, ...]


@dataclass(frozen=True, slots=True)
class ReleaseRequested:
    """Somebody wants the whole card, at once; for a sleep those who wait for room go on waiting."""

    token: str
    until_resume: bool
    for_sleep: bool = False


@dataclass(frozen=True, slots=True)
class ResumeRequested:
    """Loads are welcome again."""

    token: str


@dataclass(frozen=True, slots=True)
class HoldLoads:
    """The machine goes to sleep: loads are to wait from now on; or it is awake, and they need not any more."""

    token: str
    held: bool


@dataclass(frozen=True, slots=True)
class Activity:
    """What an engine was seen doing.

    Attributes:
        busy: a request is in flight; None where the engine does not tell.
        served_tokens: ever read and written; None where it does not tell. One that has grown was in use meanwhile.
        work: what its progress is told by; None where it answers and does not tell.
    """

    busy: bool | None
    served_tokens: int | None
    work: EngineWork | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Looked:
    """The cards were read anew, and perhaps engines were asked what they are doing and whether they get on, by run."""

    activity: Mapping[str, Activity] = field(default_factory=dict)
    verdicts: Mapping[str, Verdict] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class IdleChecked:
    """Those that were to be evicted have been asked once more.

    Attributes:
        busy: those that are not idle, as far as anybody can tell.
        silent: those of them that did not tell.
    """

    token: str
    busy: frozenset[str]
    silent: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class YieldWanted:
    """Strangers need memory, or nobody uses them: these runs are to go, where they are idle still.

    Attributes:
        idle_since_s: on the scheduler's clock, where it was decided by how long nobody had used them: one that was used
            later stays.
    """

    runs: tuple[str, ...]
    reason: str
    cause: str = "pressure"
    idle_since_s: float | None = None


@dataclass(frozen=True, slots=True)
class TakesMore:
    """An engine holds more than it was promised, by memory, before it is ready."""

    run: str
    held: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Verified:
    """A model was used to the full after its load: what it held at most, by memory, and the length of the prompt."""

    run: str
    peak: Mapping[str, int]
    prompt_tokens: int = 0


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
    """The engine of a run answers; measured is what it held at most so far, by memory."""

    run: str
    measured: Mapping[str, int]


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
class DrainSeen:
    """So many requests are still in flight of a run that is drained; None where its engine does not tell."""

    run: str
    in_flight: int | None


@dataclass(frozen=True, slots=True)
class DrainEnded:
    """The requests of a run that is drained have ended, or their time is over."""

    run: str


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
    """The cards show the memory of a run as free, but for what is missing, by memory."""

    run: str
    missing: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class UnitAdopted:
    """A unit of ours was found at start; healthy is True when its engine answered, shares are what it was promised."""

    status: UnitStatus
    record: Record
    healthy: bool
    shares: tuple[Share, ...]
    measured: Mapping[str, int] = field(default_factory=dict)
    pinned: bool = False
    drain: Drain | None = None  # it was being drained for an unload when the daemon before ended
    reconstructed: str = ""  # why its own record was not used; empty where it was
    file_note: str = ""  # how its files differ from those that it was loaded from; empty where they do not
    is_known: bool = True  # somebody loaded it here: its own record says so, or its launch is remembered


Event = (
    LoadRequested
    | UnloadRequested
    | CancelRequested
    | LeaseAsked
    | LeaseReturned
    | PinRequested
    | ResetRequested
    | ComebackRefused
    | FailureRecalled
    | EndWasAsked
    | VictimsOwed
    | ReleaseRequested
    | ResumeRequested
    | HoldLoads
    | Looked
    | IdleChecked
    | YieldWanted
    | TakesMore
    | Verified
    | StartFinished
    | UnitSeen
    | UnitVanished
    | EngineReady
    | LoadStalled
    | TierChecked
    | DrainSeen
    | DrainEnded
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
    """Ask systemd to stop the unit of a run; to kill it first where it is not to end by itself."""

    run: str
    unit: str
    kill: bool = False


@dataclass(frozen=True, slots=True)
class DrainUnit:
    """Refuse new requests to a run and wait for those in flight; ends in DrainEnded, unless somebody was faster."""

    run: str


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
class LookAgain:
    """Read the cards: something has changed that those who wait may profit from; ends in Looked."""


@dataclass(frozen=True, slots=True)
class CheckIdle:
    """Ask these runs once more whether they are idle, before they are stopped for somebody; ends in IdleChecked."""

    token: str
    runs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Verify:
    """See what a model holds after its load, and where nobody has yet use it to the full; ends in Verified.

    Attributes:
        computes: have it compute a prompt; else what was seen until now is all there is.
    """

    run: str
    computes: bool


@dataclass(frozen=True, slots=True)
class Restore:
    """Load a model again: it was unloaded for another one that did not come up, or it failed (attempt above 0)."""

    name: str
    request: PlanRequest
    arguments: tuple[str, ...]
    pinned: bool
    card: str | None
    reason: str
    attempt: int = 0
    tries: int = 0  # so many came before that were refused for what passes
    least_context_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class TellEviction:
    """Tell the world that a model goes, for whom or what; cause is one short stable word."""

    name: str
    run: str
    cause: str
    reason: str


@dataclass(frozen=True, slots=True)
class TellDrain:
    """Tell the world that a model that goes has requests in flight, and what became of them."""

    name: str
    run: str
    in_flight: int | None
    limit_s: float
    text: str


@dataclass(frozen=True, slots=True)
class TellDeviation:
    """Tell the world that a model takes more or less than it was priced at."""

    name: str
    run: str
    where: str
    expected_bytes: int
    measured_bytes: int
    text: str


@dataclass(frozen=True, slots=True)
class Learn:
    """Remember what a launch took."""

    name: str
    measurement: Measurement
    quoted_bytes: int


@dataclass(frozen=True, slots=True)
class LearnOutOfMemory:
    """Remember that a launch died for want of memory it had been given, where no stranger has taken it meanwhile.

    Attributes:
        name: of the model.
        key: the launch.
        quoted_bytes: what it was priced at.
        foreign_bytes: what strangers held of its card when it was admitted.
    """

    name: str
    key: CalibrationKey
    quoted_bytes: int
    foreign_bytes: int


@dataclass(frozen=True, slots=True)
class KeepPin:
    """Remember, beyond the daemon's life, whether a run is pinned."""

    run: str
    pinned: bool


@dataclass(frozen=True, slots=True)
class KeepReleased:
    """Remember, beyond the daemon's life, whether the card was given away."""

    released: bool


@dataclass(frozen=True, slots=True)
class Announce:
    """Tell the world that an instance changed its state.

    Attributes:
        failure: why it failed; here, for the instance may be gone before this is told (unloaded as it ended).
    """

    name: str
    run: str
    previous: InstanceState
    state: InstanceState
    reason: str
    failure: LlmError | None = None


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
    facts: CheckpointFacts | UnruledModel
    budget: Budget
    argv: tuple[str, ...]
    environment: tuple[str, ...] = ()  # by which it is kept to its cards, where there are several


@dataclass(frozen=True, slots=True)
class Joined:
    """Answer to a load: another one of the same model is under way."""

    token: str
    run: str


@dataclass(frozen=True, slots=True)
class Queued:
    """Answer to a load: it waits, for its previous instance to be gone, for its start after an end, or for room.

    Attributes:
        why: for a person.
        is_restart: for its start after an end.
    """

    token: str
    name: str
    why: str = ""
    is_restart: bool = False


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
    waited: bool = False  # nothing ran: a load that waited for room was cancelled
    unfinished: int | None = None  # requests that were cut off after a drain; None where nobody counted
    problem: LlmError | None = None  # why that it is not wanted any more does not outlive the daemon


@dataclass(frozen=True, slots=True)
class CancelDone:
    """Answer to a cancellation."""

    token: str
    load_token: str
    stopped: bool


@dataclass(frozen=True, slots=True)
class LeaseGiven:
    """Answer to a wish for a lease."""

    token: str
    run: str


@dataclass(frozen=True, slots=True)
class PinDone:
    """Answer to a wish for a pin."""

    token: str
    run: str


@dataclass(frozen=True, slots=True)
class ResetDone:
    """Answer to a wish for a reset; the start itself follows where it does not run (starts)."""

    token: str
    name: str
    run: str
    starts: bool


@dataclass(frozen=True, slots=True)
class ReleaseDone:
    """Answer to a release: what was unloaded."""

    token: str
    names: tuple[str, ...]
    released_bytes: int
    problem: LlmError | None = None  # why it does not outlive the daemon


@dataclass(frozen=True, slots=True)
class ResumeDone:
    """Answer to a resumption."""

    token: str
    was_released: bool


@dataclass(frozen=True, slots=True)
class LoadsHeld:
    """Answer to HoldLoads."""

    token: str


@dataclass(frozen=True, slots=True)
class Failed:
    """Last answer to a request that failed."""

    token: str
    error: LlmError


# What somebody who asked is told; each carries the token of the question.
Reply = (
    Admitted
    | Joined
    | Queued
    | LoadDone
    | UnloadDone
    | CancelDone
    | LeaseGiven
    | PinDone
    | ResetDone
    | ReleaseDone
    | ResumeDone
    | LoadsHeld
    | Failed
)

Effect = (
    StartUnit
    | WatchLoading
    | StopUnit
    | DrainUnit
    | ReadPostMortem
    | WaitForMemory
    | ForgetUnit
    | Resubmit
    | LookAgain
    | CheckIdle
    | Verify
    | Restore
    | TellEviction
    | TellDrain
    | TellDeviation
    | Learn
    | LearnOutOfMemory
    | KeepPin
    | KeepReleased
    | Announce
    | CheckTier
    | TellTier
    | Reply
)
