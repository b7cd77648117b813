"""The wire models of what happened: who caused it, and the runs of a model."""

from __future__ import annotations

import enum
from typing import Any

from pydantic import Field

from lllm3090d.engines.memory_log import EnginePart
from lllm3090d.serving.instance import InstanceState
from lllm3090d.wire_types import Response


class ActorKind(enum.StrEnum):
    """Who caused an event; clients must treat an unknown value as "somebody"."""

    CLIENT = "client"  # a request on the control socket
    DAEMON = "daemon"  # the daemon itself, by its rules and settings
    SYSTEMD = "systemd"  # the user manager, or somebody through it (systemctl)
    ENGINE = "engine"  # the engine's process
    PRESSURE = "pressure"  # other programs on the card


class Actor(Response):
    """Who caused an event; of a client, the process that had opened the connection."""

    kind: ActorKind
    uid: int | None = None
    pid: int | None = None
    program: str | None = Field(default=None, description="the name of its process")


class EngineBufferView(Response):
    """All buffers of an engine for one purpose on one device, as its log tells."""

    device: str
    part: EnginePart
    bytes: int


class EngineMemory(Response):
    """What an engine said of its memory; also the details of an event of kind ``memory``."""

    buffers: tuple[EngineBufferView, ...]
    is_summary: bool = Field(
        description="from the table at its end, in whole MiB rounded down, not from the lines of each buffer"
    )


class RunView(Response):
    """One launch of a model, as far as it is remembered."""

    run: str
    state: InstanceState = Field(description="the last one that is remembered")
    is_live: bool = Field(
        description="the daemon has it now; one that neither is nor has ended was lost sight of"
    )
    unit: str | None = None
    asked_by: Actor | None = Field(default=None, description="who wanted it loaded")
    requested_at: str | None = Field(default=None, description="null where that is no longer remembered")
    ready_at: str | None = None
    load_s: float | None = Field(default=None, description="from admission to ready")
    served_s: float | None = Field(default=None, description="from ready to the end, by the wall clock")
    ended_at: str | None = None
    ended_by: Actor | None = Field(default=None, description="who caused the end")
    why: str = Field(default="", description="why it ended, for a person")
    context_tokens: int | None = None
    parallel: int | None = None
    reserved_bytes: int | None = Field(default=None, description="on all cards, at its admission")
    measured_bytes: int | None = Field(default=None, description="there, when it was ready")
    engine: str | None = Field(default=None, description="version of its engine")
    problem: dict[str, Any] | None = Field(default=None, description="problem document of a failure")
    last_lines: tuple[str, ...] = Field(default=(), description="of the log of an engine that failed")
    memory: EngineMemory | None = Field(
        default=None, description="what its engine said of its memory; null where it said nothing"
    )


class RunHistory(Response):
    """Answer of ``GET /v1/models/{name}/history``."""

    name: str
    runs: tuple[RunView, ...] = Field(description="the last one first")
