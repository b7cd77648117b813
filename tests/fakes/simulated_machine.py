"""A machine in simulated time: one card, a systemd that mostly obeys, engines that mostly load, strangers, clients.

It drives the real scheduler with its own clock and keeps its own books, which share no code with the ledger: what is
really on the card, who was promised what, who waits for an answer. Nothing sleeps; every run of a seed is the same.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lllm3090d.bus.unit_status import UnitStatus
from lllm3090d.checkpoints.facts import (
    BlockWeights,
    CheckpointFacts,
    LayerFacts,
    LayerKind,
    TableWeights,
    WeightBytes,
)
from lllm3090d.checkpoints.library import Checkpoint
from lllm3090d.engines.capabilities import Backend, Build, Capabilities
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.readings import Card, CardKind, CardProcess, MemoryReading
from lllm3090d.planning.planner import CacheType, PlanPolicy, PlanRequest
from lllm3090d.planning.reserves import ReservePolicy
from lllm3090d.serving.events import (
    Activity,
    Admitted,
    Announce,
    CancelRequested,
    CheckIdle,
    DrainEnded,
    DrainSeen,
    DrainUnit,
    Effect,
    EngineReady,
    Event,
    Failed,
    HoldLoads,
    IdleChecked,
    LeaseAsked,
    LeaseReturned,
    LoadDone,
    LoadRequested,
    LookAgain,
    Looked,
    MemoryReleased,
    PinRequested,
    PostMortemRead,
    ReadPostMortem,
    ReleaseRequested,
    Reply,
    Restore,
    Resubmit,
    ResumeRequested,
    StartFinished,
    StartUnit,
    StopFinished,
    StopUnit,
    TakesMore,
    TellEviction,
    UnitSeen,
    UnloadRequested,
    Verified,
    Verify,
    WaitForMemory,
    WatchLoading,
)
from lllm3090d.serving.hangs import Verdict
from lllm3090d.serving.instance import ENDED, SERVING, InstanceState
from lllm3090d.serving.observation import CardState, Observation
from lllm3090d.serving.policy import Policy
from lllm3090d.serving.restarts import RestartPolicy
from lllm3090d.serving.scheduler import Scheduler

GIB, MIB = 1 << 30, 1 << 20
CARD = Card(CardKind.NVIDIA, "GPU-1", "NVIDIA GeForce RTX 3090", "580.95")
TOTAL_BYTES, DRIVER_BYTES, DESKTOP_BYTES = 24 * GIB, 451 * MIB, 2400 * MIB
FLAGS = frozenset(
    {
        "--host",
        "-m",
        "--alias",
        "-c",
        "--parallel",
        "-ctk",
        "-ctv",
        "-b",
        "-ub",
        "-fa",
        "-ngl",
        "--fit",
        "--ctx-checkpoints",
        "--cache-ram",
    }
)
CAPABILITIES = Capabilities("11434", FLAGS, Backend.VULKAN, ("Vulkan0",))
MODELS = {"tiny": 1.0, "small": 3.0, "middle": 7.0, "large": 13.0, "huge": 19.0, "monster": 40.0}
QUEUE_TIMEOUT_S, RESIDENCY_S, IDLE_S = 60.0, 5.0, 1.0
DRAIN_S, PATIENCE_S = 10.0, 8.0


class BrokenInvariantError(AssertionError):
    """The scheduler has done what it must never do."""


def weighing(size_bytes: int) -> WeightBytes:
    """Weights of that size on whatever backend."""
    return WeightBytes(size_bytes, size_bytes, size_bytes, size_bytes, size_bytes)


def model_facts(size_gib: float) -> CheckpointFacts:
    """A model of 32 layers."""
    weights = BlockWeights(feed_forward=weighing(int(size_gib * GIB) // 32))
    layer = LayerFacts(LayerKind.FULL, 32, 128, 128, 1024, 1024, weights, feed_forward_length=14336)
    return CheckpointFacts(
        architecture="llama",
        title=None,
        quantisation="Q4_K_M",
        trained_context_tokens=32768,
        embedding_length=4096,
        vocabulary_size=128256,
        sliding_window_tokens=0,
        layers=(layer,) * 32,
        tables=TableWeights(output=weighing(100 * MIB)),
        file_bytes=int(size_gib * GIB),
        has_chat_template=True,
    )


def request_of(
    name: str, token: str, run: str, request: PlanRequest, server: Path, **wishes: Any
) -> LoadRequested:
    """A load of one of the models, everything about it looked up."""
    path = Path(f"/models/{name}/model.gguf")
    return LoadRequested(
        token=token,
        run=run,
        checkpoint=Checkpoint(name, path, (path,), int(MODELS[name] * GIB)),
        facts=model_facts(MODELS[name]),
        request=request,
        build=Build(server, (), "test", False),
        capabilities=CAPABILITIES,
        **wishes,
    )


@dataclass(slots=True)
class Process:
    """What is really there of one launch."""

    run: str
    name: str
    unit: str
    promised_bytes: int
    wants_bytes: int  # what it takes once it is loaded
    held_bytes: int = 0
    is_alive: bool = True
    is_busy: bool = False
    frozen_s: float | None = None  # since when it gets nowhere
    served_tokens: int = 0
    is_listed: bool = True  # the driver's list shows it
    status: dict[str, Any] = field(default_factory=dict)


class Machine:
    """See the module. ``step`` does one thing; ``check`` is done after each.

    Args:
        seed: of everything that is random.
        server: an executable, for the builds.
        make: makes the scheduler; a test may plant a bug there.
        sleeps: it goes to sleep now and then.
    """

    def __init__(
        self,
        seed: int,
        server: Path,
        make: Callable[[Policy, Callable[[], float]], Scheduler] = Scheduler,
        *,
        sleeps: bool = False,
    ) -> None:
        self.random = random.Random(seed)  # noqa: S311  # a simulation
        self.now_s = 0.0
        self.server = server
        policy = Policy(
            plan=PlanPolicy(CacheType.Q8_0, 2048, 512, 8, 1024, 1024),
            reserves=ReservePolicy(512, 2400),
            stop_timeout_s=15,
            engine_sockets_dir=Path("/run/user/1000/lllm3090d/engines"),
            inherited_environment={},
            queue_timeout_s=QUEUE_TIMEOUT_S,
            least_residency_s=RESIDENCY_S,
            least_idle_s=IDLE_S,
            restarts=RestartPolicy(healthy_s=60.0),
            drain_s=DRAIN_S,
            restart_hung=True,
        )
        self.scheduler = make(policy, lambda: self.now_s)
        self.processes: dict[str, Process] = {}
        self.foreign_bytes = 800 * MIB
        self.desktop_active = True
        self.card_error = False
        self.open: dict[str, tuple[str, float]] = {}  # token -> kind of request, since when
        self.pins: set[str] = set()
        self.ready_s: dict[str, float] = {}
        self.leases: dict[str, str] = {}  # lease -> run
        self.released = False
        self.sleeps, self.asleep = sleeps, False
        self.granted: list[str] = []
        self.evictions = 0
        self.drained = 0  # whose requests came to their end
        self.stalled: set[str] = set()  # runs that are shown so
        self.hung = 0  # that were restarted for it
        self.stale: Observation | None = None  # a reading of a moment ago
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count(1)

    # --- what is seen ---------------------------------------------------------------------------------------------

    @property
    def used_bytes(self) -> int:
        """By everybody, really."""
        return min(
            TOTAL_BYTES - DRIVER_BYTES,
            self.foreign_bytes + sum(p.held_bytes for p in self.processes.values()),
        )

    def observe(self) -> Observation:
        """The card as the driver tells it."""
        if self.card_error:
            error = LlmError(ErrorCode.CARD_UNREADABLE, "the card has fallen off the bus")
            return Observation((CardState(CARD, None, error),), self.desktop_active)
        used = self.used_bytes
        listed = [p for p in self.processes.values() if p.is_listed and p.held_bytes]
        reading = MemoryReading(
            self.now_s,
            TOTAL_BYTES,
            DRIVER_BYTES,
            used,
            TOTAL_BYTES - DRIVER_BYTES - used,
            tuple(CardProcess(number, p.held_bytes) for number, p in enumerate(listed, 100)),
        )
        held = {p.run: p.held_bytes for p in listed}
        return Observation((CardState(CARD, reading, None, held, held),), self.desktop_active)

    # --- feeding the scheduler ------------------------------------------------------------------------------------

    def feed(self, event: Event) -> None:
        """Hand the scheduler an event and carry out what it answers."""
        needs_reading = isinstance(event, LoadRequested | Looked)
        effects = self.scheduler.handle(event, self.observe() if needs_reading else None)
        for effect in effects:
            self._perform(effect)

    def later(self, delay_s: float, work: Callable[[], None]) -> None:
        """Do something after a while."""
        heapq.heappush(self._later, (self.now_s + delay_s, next(self._numbers), work))

    def pass_time(self) -> None:
        """Go on to the next thing that is due; a second where nothing is."""
        due = self.scheduler.next_attention_s()
        if self._later and (due is None or self._later[0][0] <= due):
            at, _, work = heapq.heappop(self._later)
            self.now_s = max(self.now_s, at)
            work()
        else:
            self.now_s = max(self.now_s, due if due is not None else self.now_s + 1.0)
            self.look()

    def look(self) -> None:
        """What the daemon does every few seconds."""
        seen = {
            p.run: Activity(p.is_busy, p.served_tokens)
            for p in self.processes.values()
            if p.is_alive and self._state(p.run) in SERVING
        }
        self.feed(Looked(seen, {run: self._verdict(self.processes[run]) for run in seen}))

    def _verdict(self, process: Process) -> Verdict:
        idle_s = 0.0 if process.frozen_s is None else self.now_s - process.frozen_s
        return Verdict(idle_s > PATIENCE_S, idle_s, PATIENCE_S, "it gets nowhere")

    def _state(self, run: str) -> InstanceState | None:
        instance = self.scheduler.by_run(run)
        return None if instance is None else instance.state

    # --- effects --------------------------------------------------------------------------------------------------

    def _perform(self, effect: Effect) -> None:
        """What is true at once, then what takes time."""
        match effect:
            case Admitted():
                self._was_admitted(effect)
            case TellEviction():
                self._was_evicted(effect)
            case Announce():
                self._has_moved(effect)
        if isinstance(effect, Reply):
            self._was_answered(effect)
        elif not self._perform_on_unit(effect):
            self._perform_later(effect)

    def _has_moved(self, change: Announce) -> None:
        if change.state is InstanceState.READY and change.previous is InstanceState.LOADING:
            self.ready_s[change.run] = self.now_s
        if change.state is InstanceState.STALLED:
            self.stalled.add(change.run)
            if self.processes[change.run].frozen_s is None:
                raise BrokenInvariantError(f"{change.name} is said to be stalled, and gets on")
        elif change.previous is InstanceState.STALLED:
            self.stalled.discard(change.run)
            self.hung += change.reason == "stalled for too long"

    def _perform_on_unit(self, effect: Effect) -> bool:
        """What systemd and the card are asked for; whether it was that."""
        match effect:
            case StartUnit():
                self._start(effect)
            case WatchLoading():
                self._load(self.processes[effect.run])
            case StopUnit():
                self._stop(effect)
            case DrainUnit():
                self._drain(effect.run)
            case WaitForMemory():
                self._wait_for_memory(effect.run)
            case _:
                return False
        return True

    def _perform_later(self, effect: Effect) -> None:
        """What comes back to the scheduler as an event."""
        match effect:
            case ReadPostMortem():
                error = LlmError(ErrorCode.ENGINE_FAILED, "it died")
                self.later(0.1, lambda: self.feed(PostMortemRead(effect.run, error)))
            case LookAgain():
                self.later(0.0, lambda: self.feed(Looked()))
            case CheckIdle():
                self.later(self.random.uniform(0.0, 0.5), lambda: self._check_idle(effect))
            case Verify():
                self.later(1.0, lambda: self._verify(effect.run))
            case Resubmit():
                self.later(0.0, lambda: self.feed(effect.event))
            case Restore():
                self.later(0.0, lambda: self._restore(effect))

    def _was_admitted(self, effect: Admitted) -> None:
        if self.card_error:
            raise BrokenInvariantError("admitted on a card in error")
        if self.released:
            raise BrokenInvariantError("admitted on a card that was given away")
        if self.asleep:
            raise BrokenInvariantError("admitted while the machine goes to sleep")
        instance = self.scheduler.by_run(effect.run)
        assert instance is not None
        promised = sum(item.bytes for item in instance.plan.quote.items if item.place == "card")
        # The dead take nothing more.
        others = sum(
            max(p.promised_bytes, p.held_bytes) if p.is_alive else p.held_bytes
            for p in self.processes.values()
            if p.run != effect.run
        )
        strangers = max(self.foreign_bytes, DESKTOP_BYTES if self.desktop_active else 0)
        if promised + others + strangers + DRIVER_BYTES > TOTAL_BYTES:
            raise BrokenInvariantError(
                f"over-committed at {self.now_s}: {promised} + {others} + {strangers} + {DRIVER_BYTES}"
            )
        if any(p.name == instance.name and p.is_alive for p in self.processes.values()):
            raise BrokenInvariantError(f"{instance.name} runs twice")
        self.granted.append(effect.token)
        self.processes[effect.run] = Process(
            effect.run,
            instance.name,
            instance.unit,
            promised,
            int(promised * self.random.choice([0.7, 0.9, 0.97, 1.0, 1.05])),
        )

    def _was_evicted(self, effect: TellEviction) -> None:
        self.evictions += 1
        process = self.processes[effect.run]
        if process.is_busy:
            raise BrokenInvariantError(f"{effect.name} was evicted while it was busy")
        if effect.run in self.stalled:
            raise BrokenInvariantError(f"{effect.name} was evicted while it was stalled")
        if effect.run in self.pins:
            raise BrokenInvariantError(f"{effect.name} was evicted while it was pinned")
        if effect.run in self.leases.values():
            raise BrokenInvariantError(f"{effect.name} was evicted while somebody had a lease")
        if self.now_s - self.ready_s.get(effect.run, self.now_s) < RESIDENCY_S:
            raise BrokenInvariantError(f"{effect.name} was evicted as soon as it was there")

    def _was_answered(self, effect: Any) -> None:
        last = isinstance(effect, LoadDone | Failed) or type(effect).__name__.endswith("Done")
        last = last or type(effect).__name__ in {"LeaseGiven", "LoadsHeld"}
        if not last:
            return
        if effect.token not in self.open:
            raise BrokenInvariantError(f"{effect.token} was answered twice, with {effect}")
        del self.open[effect.token]

    def _start(self, effect: StartUnit) -> None:
        process = self.processes[effect.run]
        if self.random.random() < 0.05:
            process.is_alive = False
            error = LlmError(ErrorCode.UNIT_REFUSED, "no")
            self.later(0.1, lambda: self.feed(StartFinished(effect.run, error)))
        else:
            self.later(0.1, lambda: self.feed(StartFinished(effect.run, None)))

    def _load(self, process: Process) -> None:
        steps = self.random.randint(1, 5)
        for number in range(1, steps + 1):
            self.later(number * 0.5, lambda n=number: self._take(process, process.wants_bytes * n // steps))  # type: ignore[misc]
        if self.random.random() < 0.1:
            self.later(steps * 0.5, lambda: self.die(process))
        else:
            self.later(steps * 0.5 + 0.1, lambda: self._ready(process))

    def _take(self, process: Process, size: int) -> None:
        if process.is_alive:
            process.held_bytes = size
            if size > process.promised_bytes:
                self.feed(TakesMore(process.run, {CARD.uuid: size}))

    def _ready(self, process: Process) -> None:
        if process.is_alive:
            self.feed(EngineReady(process.run, {CARD.uuid: process.held_bytes}))

    def _verify(self, run: str) -> None:
        process = self.processes.get(run)
        if process is not None and process.is_alive:
            process.held_bytes += self.random.choice([0, 0, 200 * MIB])
            self.feed(Verified(run, {CARD.uuid: process.held_bytes}, 512))

    def _drain(self, run: str) -> None:
        """Look at its requests once a second, until somebody has put an end to that."""
        instance, process = self.scheduler.by_run(run), self.processes.get(run)
        if instance is None or instance.drain is None or process is None:
            return
        if process.is_busy and process.frozen_s is None and self.random.random() < 0.3:
            process.is_busy = False
        if process.is_busy and self.now_s < instance.drain.deadline_s:
            self.feed(DrainSeen(run, 1))
            self.later(1.0, lambda: self._drain(run))
            return
        self.drained += not process.is_busy
        self.feed(DrainEnded(run))

    def _stop(self, effect: StopUnit) -> None:
        process = self.processes.get(effect.run)
        luck = self.random.random()
        if effect.kill and luck > 0.03:
            luck = 1.0  # it does not ignore that
        if luck < 0.03:
            error = LlmError(ErrorCode.STOP_FAILED, "it did not die")
            self.later(20.0, lambda: self.feed(StopFinished(effect.run, error)))
            # Somebody reboots the driver, or the kernel lets it go after all.
            self.later(60.0, lambda: self._end(process))
            self.later(60.5, lambda: self.feed(StopFinished(effect.run, None)))
            return
        delay = 15.0 if luck < 0.1 else self.random.uniform(0.1, 2.0)  # one that ignores SIGTERM
        self.later(delay, lambda: self._end(process))
        self.later(delay, lambda: self.feed(StopFinished(effect.run, None)))

    def _end(self, process: Process | None) -> None:
        """It is dead; its memory comes back now or later."""
        if process is None or not process.is_alive:
            return
        process.is_alive = process.is_busy = False
        process.frozen_s = None
        process.is_listed = False
        for lease in [lease for lease, run in self.leases.items() if run == process.run]:
            del self.leases[lease]
        late = self.random.choice([0.0, 0.0, 0.0, 1.0, 20.0])
        self.later(late, lambda: self._give_back(process))

    @staticmethod
    def _give_back(process: Process) -> None:
        process.held_bytes = 0

    def die(self, process: Process) -> None:
        """The engine ends by itself."""
        if process.is_alive:
            self._end(process)
            self.feed(UnitSeen(self._status(process, active_state="failed", result="signal", main_pid=0)))

    def _wait_for_memory(self, run: str, waited_s: float = 0.0) -> None:
        process = self.processes.get(run)
        missing = 0 if process is None else process.held_bytes
        if missing == 0:
            self.processes.pop(run, None)
            self.feed(MemoryReleased(run, {}))
            return
        if waited_s >= 10.0:
            self.feed(MemoryReleased(run, {CARD.uuid: missing}))
        self.later(1.0, lambda: self._wait_for_memory(run, waited_s + 1.0))

    def _check_idle(self, effect: CheckIdle) -> None:
        busy = frozenset(run for run in effect.runs if run in self.processes and self.processes[run].is_busy)
        self.feed(IdleChecked(effect.token, busy))

    def _restore(self, effect: Restore) -> None:
        self.load(effect.name, effect.request, may_evict=False, pinned=effect.pinned, attempt=effect.attempt)

    def _status(self, process: Process, **changes: Any) -> UnitStatus:
        values: dict[str, Any] = {
            "name": process.unit,
            "description": "",
            "load_state": "loaded",
            "active_state": "active",
            "sub_state": "running",
            "result": "success",
            "main_pid": 100,
            "exec_main_code": 0,
            "exec_main_status": 0,
            "exec_main_start_monotonic_s": 1.0,
            "invocation_id": "ab" * 16,
            "control_group": f"/x/{process.unit}",
            "environment": (),
            "argv": ("llama-server",),
            "job_pending": False,
            "transient": True,
            "memory_current_bytes": None,
        }
        return UnitStatus(**(values | changes))

    # --- clients and troubles -------------------------------------------------------------------------------------

    def token(self, kind: str) -> str:
        """Of a new request."""
        token = f"{kind}-{next(self._numbers)}"
        self.open[token] = (kind, self.now_s)
        return token

    def load(self, name: str, request: PlanRequest, **wishes: Any) -> str:
        """A client asks for a model; returns the token."""
        token, run = self.token("load"), f"{next(self._numbers):08x}"
        self.feed(request_of(name, token, run, request, self.server, **wishes))
        return token

    def step(self) -> None:
        """One thing happens."""
        self.random.choices(
            [
                self.pass_time,
                self._some_load,
                self._some_unload,
                self._some_cancel,
                self._some_stranger,
                self._some_use,
                self._some_freeze,
                self._some_death,
                self._some_pin,
                self._some_lease,
                self._some_release,
                self._some_card_trouble,
                self._some_sleep,
            ],
            weights=[60, 14, 3, 3, 5, 12, 2, 1, 2, 3, 1, 1, 1 if self.sleeps else 0],
        )[0]()

    def _some_load(self) -> None:
        request = PlanRequest(context_tokens=self.random.choice([None, 4096, 8192, 32768]))
        least = 2048 if request.context_tokens and self.random.random() < 0.2 else None
        self.load(
            self.random.choice(sorted(MODELS)),
            request,
            least_context_tokens=least,
            pinned=False,
            may_evict=self.random.random() < 0.9,
            may_wait=self.random.random() < 0.9,
        )

    def _some_unload(self) -> None:
        name, force = self.random.choice(sorted(MODELS)), self.random.random() < 0.1
        drain_s = None if force else self.random.choice([None, None, 0.0, 3.0, 40.0])
        self.feed(UnloadRequested(self.token("unload"), name, drain_s, force))

    def _some_cancel(self) -> None:
        loads = [token for token, (kind, _) in self.open.items() if kind == "load"]
        self.feed(CancelRequested(self.token("cancel"), self.random.choice([*loads, "never-was"])))

    def _some_stranger(self) -> None:
        room = TOTAL_BYTES - DRIVER_BYTES - sum(p.held_bytes for p in self.processes.values())
        self.foreign_bytes = min(room, self.random.choice([300, 800, 800, 2000, 2000, 5000, 20_000]) * MIB)

    def _serving(self) -> list[Process]:
        return [p for p in self.processes.values() if p.is_alive and self._state(p.run) in SERVING]

    def _some_use(self) -> None:
        for process in self.random.sample(self._serving(), k=min(1, len(self._serving()))):
            if process.frozen_s is not None:
                return
            process.is_busy = not process.is_busy
            process.served_tokens += self.random.randint(1, 1000)

    def _some_freeze(self) -> None:
        for process in self.random.sample(self._serving(), k=min(1, len(self._serving()))):
            if process.frozen_s is None:
                process.is_busy, process.frozen_s = True, self.now_s
                self._thaw_later(process, self.random.choice([5.0, 30.0, 600.0]))

    def _thaw_later(self, process: Process, delay_s: float) -> None:
        def thaw() -> None:
            process.frozen_s = None

        self.later(delay_s, thaw)

    def _some_death(self) -> None:
        for process in self.random.sample(self._serving(), k=min(1, len(self._serving()))):
            self.die(process)

    def _some_pin(self) -> None:
        for process in self.random.sample(self._serving(), k=min(1, len(self._serving()))):
            pinned = process.run not in self.pins and self.random.random() < 0.4
            self.feed(PinRequested(self.token("pin"), process.name, pinned))
            (self.pins.add if pinned else self.pins.discard)(process.run)

    def _some_lease(self) -> None:
        if self.leases and self.random.random() < 0.6:
            lease = self.random.choice(sorted(self.leases))
            del self.leases[lease]
            self.feed(LeaseReturned(lease))
            return
        for process in self.random.sample(self._serving(), k=min(1, len(self._serving()))):
            lease = f"lease-{next(self._numbers)}"
            self.feed(LeaseAsked(self.token("lease"), process.name, lease))
            self.leases[lease] = process.run

    def _some_release(self) -> None:
        if self.released:
            self.released = False
            self.feed(ResumeRequested(self.token("resume")))
        elif self.random.random() < 0.3:
            self.released = self.random.random() < 0.5
            self.feed(ReleaseRequested(self.token("release"), self.released))

    def _some_card_trouble(self) -> None:
        self.card_error = not self.card_error and self.random.random() < 0.5

    def _some_sleep(self) -> None:
        if not self.asleep:
            self.asleep = True
            self.feed(HoldLoads(self.token("hold"), held=True))
            self.feed(ReleaseRequested(self.token("sleep"), until_resume=False, for_sleep=True))
            self.later(self.random.uniform(0.1, 20.0), self._wake_up)

    def _wake_up(self) -> None:
        self.asleep = False
        self.feed(HoldLoads(self.token("free"), held=False))

    # --- what must always be true ---------------------------------------------------------------------------------

    def check(self) -> None:
        """After each step."""
        held = {r.run for r in self.scheduler.ledger}
        for process in self.processes.values():
            if (process.is_alive or process.held_bytes) and process.run not in held:
                raise BrokenInvariantError(f"{process.name} holds memory that nobody is charged for")
        for run in held:
            if run not in self.processes:
                raise BrokenInvariantError(f"{run} is charged, and nothing of it is left")
        for entry in self.scheduler.pending:
            if self.now_s > entry.deadline_s + 5 and not self.asleep:
                raise BrokenInvariantError(f"{entry.token} was left in the queue")
        for token, (kind, since_s) in self.open.items():
            # Waiting for room, loading, and waiting for one that would not stop, one after the other.
            if self.now_s - since_s > 4 * QUEUE_TIMEOUT_S + 120:
                raise BrokenInvariantError(f"{token} ({kind}) was never answered")

    def wind_down(self) -> None:
        """Everything calms down: strangers leave, nobody asks for more; everybody must then be answered."""
        self.card_error = False
        self.foreign_bytes = 0
        for process in self.processes.values():
            process.is_busy, process.frozen_s = False, None
        for _ in range(2000):
            if not self.open and not self._later:
                break
            self.pass_time()
            self.check()
        if self.open:
            raise BrokenInvariantError(f"never answered: {self.open}")
        for instance in self.scheduler.instances:
            if instance.state not in ENDED | SERVING:
                raise BrokenInvariantError(f"{instance.name} is {instance.state} for ever")


def run(machine: Machine, steps: int) -> Machine:
    """So many steps, each checked, and then everything to its end."""
    for _ in range(steps):
        machine.step()
        machine.check()
    machine.wind_down()
    return machine
