"""The parts of a daemon that plans and lists ask: a real library and scheduler, with a card and engine of the test."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from lllm3090d.engines.capabilities import Backend, Build, Capabilities, Option
from lllm3090d.errors import LlmError
from lllm3090d.gpus.readings import Card, CardKind, MemoryReading
from lllm3090d.planning.tier_conditions import HostMemory
from lllm3090d.planning.units import MIB
from lllm3090d.serving.daemon import Daemon
from lllm3090d.serving.lookup import Lookup
from lllm3090d.serving.observation import HOST as HOST_UUID
from lllm3090d.serving.observation import CardState, Observation, Stranger
from lllm3090d.serving.policy import policy_of
from lllm3090d.serving.scheduler import Scheduler
from lllm3090d.settings import Settings

TOTAL_BYTES = 24576 * MIB
DRIVER_BYTES = 451 * MIB
HOST_MEMORY = HostMemory(48 << 30, 64 << 30)
RTX_3090 = Card(CardKind.NVIDIA, "GPU-1", "NVIDIA GeForce RTX 3090", "580.95")
HOST = Card(CardKind.CPU, "host", "host memory (x86_64)", None)
FLAGS = frozenset(
    {
        "--host", "-m", "--alias", "-c", "--parallel", "-ctk", "-ctv", "-b", "-ub", "-fa", "-ngl", "--fit",
        "--n-cpu-moe", "--no-kv-offload", "--mmproj", "--no-mmproj-offload", "--kv-unified", "--swa-full",
        "--rope-scaling", "--rope-scale", "--yarn-orig-ctx", "--spec-type", "--spec-draft-n-max", "-ctkd", "-ctvd",
        "--device", "--ctx-checkpoints", "--checkpoint-min-step", "--cache-ram",
    }
)  # fmt: skip
CAPABILITIES = Capabilities(
    version="11434",
    flags=FLAGS,
    backend=Backend.VULKAN,
    devices=("Vulkan0",),
    options=(
        Option(("--spec-type",), "TYPE", allowed=("none", "draft-mtp")),
        Option(("-c", "--ctx-size"), "N"),
        Option(("--parallel", "-np"), "N"),
    ),
)


class DeskLookup(Lookup):
    """Looks up models as ever; the engine is the test's."""

    def __init__(self, settings: Settings, server: Path) -> None:
        super().__init__(lambda: settings)
        self.next_engine: tuple[Build, Capabilities] | LlmError = (
            Build(server, (), "test", False),
            CAPABILITIES,
        )

    def engine(self) -> tuple[Build, Capabilities]:
        """What the test says."""
        if isinstance(self.next_engine, LlmError):
            raise self.next_engine
        return self.next_engine

    def computes_on(self, backend: Backend) -> None:
        """The same engine, built for something else."""
        assert not isinstance(self.next_engine, LlmError)
        build, capabilities = self.next_engine
        self.next_engine = (build, replace(capabilities, backend=backend))


class Desk:
    """A card of 24 GiB of which others hold ``foreign_bytes``, a library below ``folder``, an engine for Vulkan."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        (folder / "models").mkdir(exist_ok=True)
        server = folder / "llama-server"
        server.write_text("#!/bin/sh\n")
        server.chmod(0o755)
        self.settings = Settings(models_dir=folder / "models", state_dir=folder / "state", **settings)
        self.lookup = DeskLookup(self.settings, server)
        self.scheduler = Scheduler(policy_of(self.settings, {}))
        self.card = RTX_3090
        self.total_bytes = TOTAL_BYTES
        self.reserved_bytes: int | None = DRIVER_BYTES
        self.foreign_bytes = 0
        self.desktop_active: bool | None = False
        self.card_problem: LlmError | None = None
        self.strangers: tuple[Stranger, ...] = ()  # who holds the foreign bytes

    @property
    def daemon(self) -> Daemon:
        """Itself, for those who ask a daemon no more than this has."""
        return cast(Daemon, self)

    async def look_for_desktop(self) -> None:
        """Nothing to look for."""

    def observe(self) -> Observation:
        """The card now; a problem of the test is why it could not be read."""
        where, ledger = self.card.uuid, self.scheduler.ledger
        used = self.foreign_bytes + ledger.charged_bytes(where)
        free = self.total_bytes - (self.reserved_bytes or 0) - used
        reading = MemoryReading(1.0, self.total_bytes, self.reserved_bytes, used, free, ())
        held = {each.run: each.charged_bytes for each in ledger.on(where)}
        state = CardState(
            self.card,
            None if self.card_problem else reading,
            self.card_problem,
            resident=held,
            in_use=held,
            strangers=self.strangers,
        )
        on_host = self.card.kind is CardKind.CPU
        beside = {each.run: each.charged_bytes for each in ledger.on(HOST_UUID)}
        return Observation(
            (state,), self.desktop_active, None if on_host else HOST_MEMORY, {} if on_host else beside
        )
