"""A scheduler in a world of cards whose memory is what the ledger says, and shorthand for events and answers."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from lllm3090d.bus.unit_status import UnitStatus
from lllm3090d.checkpoints.library import Checkpoint
from lllm3090d.engines.capabilities import Backend, Build, Capabilities, ListedDevice
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.readings import Card, CardKind, CardProcess, MemoryReading
from lllm3090d.planning.planner import CacheType, PlanPolicy, PlanRequest
from lllm3090d.planning.quote import MIB
from lllm3090d.planning.reserves import ReservePolicy
from lllm3090d.planning.tier_conditions import HostMemory
from lllm3090d.serving.events import (
    Activity,
    Announce,
    Effect,
    EngineReady,
    Event,
    Failed,
    LoadRequested,
    Looked,
    MemoryReleased,
    Observation,
    StartFinished,
    StopFinished,
    UnitSeen,
)
from lllm3090d.serving.instance import InstanceState
from lllm3090d.serving.observation import HOST, CardState
from lllm3090d.serving.policy import Policy
from lllm3090d.serving.running import Instance
from lllm3090d.serving.scheduler import Scheduler
from lllm3090d.serving.unit_spec import RECORD_VARIABLE
from tests.fakes.simulated_machine import CAPABILITIES, FLAGS, model_facts

E = TypeVar("E")

GIB = 1 << 30
DRIVER_BYTES = 451 * MIB
CARD = Card(CardKind.NVIDIA, "GPU-1", "NVIDIA GeForce RTX 3090", "580.95", 24 * GIB, "0000:01:00.0")
SECOND = replace(CARD, uuid="GPU-2", pci_address="0000:02:00.0")
CARDS = (CARD,)
TWO_CARDS = (CARD, SECOND)
# Sees both of them; CUDA takes cards by UUID.
CUDA = Capabilities(
    "11434",
    FLAGS | {"--device", "-ts", "-sm", "--main-gpu"},
    Backend.CUDA,
    ("CUDA0", "CUDA1"),
    listed=tuple(ListedDevice(f"CUDA{number}", CARD.name, CARD.total_bytes) for number in range(2)),
)


def status(instance: Instance, **changes: Any) -> UnitStatus:
    """What systemd says of the unit of a run that is well."""
    values: dict[str, Any] = {
        "name": instance.unit,
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
        "control_group": f"/x/{instance.unit}",
        "environment": (f"{RECORD_VARIABLE}={instance.record.model_dump_json()}",),
        "argv": ("llama-server",),
        "job_pending": False,
        "transient": True,
        "memory_current_bytes": None,
    }
    return UnitStatus(**(values | changes))


class World:
    """A scheduler, cards of 24 GiB, and shorthand for events.

    Attributes:
        now_s: the scheduler's clock.
        foreign_bytes: of strangers, on the first card.
        foreign: of strangers on the others, by UUID.
        host_available_bytes: ``MemAvailable``; None where nobody looks at host memory.
        failed_cards: UUIDs of those that cannot be read.
    """

    server = Path(sys.executable)  # any program will do
    capabilities = CAPABILITIES

    def __init__(self, cards: Sequence[Card] = CARDS, **policy: Any) -> None:
        made = Policy(
            plan=PlanPolicy(CacheType.Q8_0, 2048, 512, 8, 1024, 1024),
            reserves=ReservePolicy(512, 2400),
            stop_timeout_s=15,
            engine_sockets_dir=Path("/run/user/1000/lllm3090d/engines"),
            inherited_environment={"LLAMA_ARG_CTX_SIZE": "7", "PATH": "/bin"},
        )
        self.now_s = 1000.0
        self.scheduler = Scheduler(replace(made, **policy), lambda: self.now_s)
        self.cards = tuple(cards)
        self.foreign_bytes = 0
        self.foreign: dict[str, int] = {}
        self.host_available_bytes: int | None = None
        self.failed_cards: set[str] = set()
        self.runs = 0

    # --- what is seen -------------------------------------------------------------------------------------------

    @property
    def charged_bytes(self) -> int:
        """Of the first card, without quarantine."""
        return self.scheduler.ledger.charged_bytes(CARD.uuid)

    def observation(self) -> Observation:
        """Every run holds what it is charged; of the host nothing yet."""
        host = None
        if self.host_available_bytes is not None:
            host = HostMemory(self.host_available_bytes, 64 * GIB)
        return Observation(tuple(self._state(card) for card in self.cards), False, host)

    def _state(self, card: Card) -> CardState:
        if card.uuid in self.failed_cards:
            error = LlmError(ErrorCode.CARD_UNREADABLE, "the card has fallen off the bus")
            return CardState(card, None, error)
        held = {each.run: each.charged_bytes for each in self.scheduler.ledger.on(card.uuid)}
        foreign = self.foreign_bytes if card is self.cards[0] else self.foreign.get(card.uuid, 0)
        used = sum(held.values()) + foreign
        reading = MemoryReading(
            0.0,
            24 * GIB,
            DRIVER_BYTES,
            used,
            max(0, 24 * GIB - DRIVER_BYTES - used),
            tuple(CardProcess(number, size) for number, size in enumerate(held.values(), 100)),
        )
        return CardState(card, reading, None, held, held)

    # --- events -------------------------------------------------------------------------------------------------

    def request(
        self,
        name: str,
        token: str,
        gib: float = 8.0,
        request: PlanRequest | None = None,
        **wishes: Any,
    ) -> LoadRequested:
        """A load of a model of so many GiB."""
        self.runs += 1
        path = Path(f"/models/{name}/model.gguf")
        values: dict[str, Any] = {
            "token": token,
            "run": f"{self.runs:08x}",
            "checkpoint": Checkpoint(name, path, (path,), int(gib * GIB)),
            "facts": model_facts(gib),
            "request": request or PlanRequest(context_tokens=8192),
            "build": Build(self.server, (), "test", False),
            "capabilities": self.capabilities,
        }
        return LoadRequested(**(values | wishes))

    def do(self, event: Event) -> list[Effect]:
        """What comes of an event."""
        needs_reading = isinstance(event, LoadRequested | Looked)
        return self.scheduler.handle(event, self.observation() if needs_reading else None)

    def load(
        self,
        name: str,
        token: str,
        gib: float = 8.0,
        request: PlanRequest | None = None,
        **wishes: Any,
    ) -> list[Effect]:
        """Ask for a model."""
        return self.do(self.request(name, token, gib, request, **wishes))

    def look(self, activity: Mapping[str, Activity] | None = None, after_s: float = 0.0) -> list[Effect]:
        """Read the cards, after so many seconds, and see what engines, by model, are doing."""
        self.now_s += after_s
        seen = {self.get(name).run: each for name, each in (activity or {}).items()}
        return self.do(Looked(seen))

    # --- what runs ----------------------------------------------------------------------------------------------

    def get(self, name: str) -> Instance:
        """The instance of a model that has one."""
        instance = self.scheduler.instance(name)
        assert instance is not None, f"{name} is not there"
        return instance

    def bring_up(self, name: str, token: str = "t-up", gib: float = 8.0, **wishes: Any) -> Instance:
        """Load a model to its end."""
        self.load(name, token, gib, **wishes)
        return self.finish_load(name)

    def finish_load(self, name: str) -> Instance:
        """Everything that an admitted load still needs."""
        instance = self.get(name)
        self.do(UnitSeen(status(instance)))
        self.do(StartFinished(instance.run, None))
        self.do(EngineReady(instance.run, {CARD.uuid: 5 * GIB}))
        assert instance.state is InstanceState.READY
        return instance

    def bring_down(self, instance: Instance) -> list[Effect]:
        """The unit that was asked to stop has ended, and its memory is back."""
        return [*self.do(StopFinished(instance.run, None)), *self.do(MemoryReleased(instance.run, {}))]

    def rest(self, seconds: float = 60.0) -> None:
        """Time in which nobody asks for anything, and engines say that they are idle."""
        self.now_s += seconds
        serving = [each for each in self.scheduler.instances if each.state is InstanceState.READY]
        self.do(Looked({each.run: Activity(False, each.served_tokens or 0) for each in serving}))


def kinds(effects: Sequence[Effect]) -> list[type]:
    """What was to be done, without what was only told."""
    return [type(effect) for effect in effects if not isinstance(effect, Announce)]


def of_kind(effects: Sequence[Effect], kind: type[E]) -> list[E]:
    """The effects of one kind."""
    return [effect for effect in effects if isinstance(effect, kind)]


def the(effects: Sequence[Effect], kind: type[E]) -> E:
    """The one effect of a kind."""
    (found,) = of_kind(effects, kind)
    return found


def error_of(effects: Sequence[Effect], token: str) -> LlmError:
    """Why a request failed."""
    (failed,) = [each for each in of_kind(effects, Failed) if each.token == token]
    return failed.error


__all__ = [
    "CARD",
    "CARDS",
    "CUDA",
    "DRIVER_BYTES",
    "GIB",
    "HOST",
    "MIB",
    "SECOND",
    "TWO_CARDS",
    "World",
    "error_of",
    "kinds",
    "of_kind",
    "status",
    "the",
]
