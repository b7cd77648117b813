"""The wire models of memory: who holds what of a card or of the host, and how a price compares with what was seen.

The rules of :mod:`lllm3090d.wire` hold.
"""

from __future__ import annotations

import enum
from typing import Any, Literal

from pydantic import Field

from lllm3090d.gpus.readings import CardKind
from lllm3090d.planning.quote import Evidence
from lllm3090d.serving.instance import InstanceState
from lllm3090d.serving.ledger import ReservationState
from lllm3090d.wire_plans import BudgetLineView, LineItemView
from lllm3090d.wire_types import Response


class PartKind(enum.StrEnum):
    """Whose a part of a memory is; clients must show kinds they do not know by their name."""

    DRIVER = "driver"  # kept by the driver and firmware
    PROCESS = "process"  # used by a process that is none of ours
    FOREIGN_UNIT = "foreign-unit"  # used by a unit with our prefix that is not understood, and left alone
    OTHERS = "others"  # used, and nobody is listed with it
    MODEL = "model"  # used by one of our models
    PROMISED = "promised"  # reserved for one of our models, and not taken yet
    QUARANTINE = "quarantine"  # of a model that ended, not seen free again
    RESERVE = "reserve"  # kept for the desktop, or for the machine itself
    FREE = "free"


class MemoryPartView(Response):
    """A part of a memory; all parts of a memory add up to its total."""

    kind: PartKind
    name: str = Field(description="of the owner, for a person")
    bytes: int
    run: str | None = Field(default=None, description="of the model")
    pid: int | None = Field(default=None, description="of the process")
    user: str | None = Field(default=None, description="who owns the process, where that is another user")
    model: str | None = Field(
        default=None, description="of that user, where the process is an engine of their own daemon"
    )
    unseen: str | None = Field(
        default=None,
        description="why nobody can tell whose process it is, as the end of a sentence; null where it is known",
    )
    age_s: float | None = Field(default=None, description="of a quarantine")


class HeldView(Response):
    """What is held of one memory."""

    where: str = Field(description="UUID of the card, or host")
    name: str = Field(description="of the memory, for a person")
    bytes: int


class ForeignUnitView(Response):
    """A unit with our prefix that is not understood: counted at what it holds, and left alone."""

    unit: str
    why: str = Field(description="why it is no instance, as the end of a sentence about it")
    since: str = Field(description="when it was found")
    active_state: str = Field(description="by systemd")
    main_pid: int | None = None
    command: str | None = Field(default=None, description="the program that it runs")
    held: tuple[HeldView, ...] = Field(
        default=(), description="of each memory now; a card is missing where its driver does not tell"
    )


class ReservationView(Response):
    """What one model was promised of one memory, and what it was seen to take."""

    model: str
    run: str
    where: str = Field(description="UUID of the card, or host")
    state: ReservationState
    instance_state: InstanceState | None = Field(
        default=None, description="null where nothing but this is left of it"
    )
    age_s: float = Field(description="in this state")
    reserved_bytes: int = Field(description="the price, the sum of the items")
    measured_bytes: int | None = Field(
        default=None, description="the most it was seen to take; null not measured"
    )
    charged_bytes: int = Field(description="the greater of both")
    held_bytes: int | None = Field(
        default=None, description="what it holds now; null where nobody can tell, or nothing was read"
    )
    limit_bytes: int | None = Field(
        default=None, description="of host memory: what its unit may take (MemoryMax)"
    )
    evidence: Evidence | None = Field(
        default=None, description="the weakest of the items; null without items"
    )
    items: tuple[LineItemView, ...] = ()


class ReadingView(Response):
    """A memory as its driver or the kernel told it."""

    age_s: float = Field(description="since it was read")
    total_bytes: int
    reserved_by_driver_bytes: int | None = Field(
        default=None, description="null where it is a part of used_bytes and nobody tells how large"
    )
    used_bytes: int
    free_bytes: int


class ForeignProcessView(Response):
    """A process on a card that is none of ours."""

    pid: int
    name: str
    user: str | None = Field(default=None, description="who owns it, where that is another user")
    model: str | None = Field(
        default=None,
        description="of that user, where it is an engine of their own daemon: as its unit is named",
    )
    unseen: str | None = Field(
        default=None,
        description="why nobody can tell whose it is, as the end of a sentence; null where it is known",
    )
    used_bytes: int | None = Field(default=None, description="null where the driver does not tell")


class PcieView(Response):
    """What connects a card to the host."""

    generation: int
    width: int = Field(description="lanes in use")


class GpuView(Response):
    """A card, or host memory in the place of one: what it is, who holds what of it, and what it can give."""

    number: int = Field(description="what it may be named by in a request, beside uuid and pci_address")
    uuid: str
    name: str
    kind: CardKind
    pci_address: str | None = None
    pcie: PcieView | None = None
    compute_capability: str | None = None
    driver_version: str | None = None
    driver_problem: str | None = Field(default=None, description="what to know of the driver")
    profile: Literal["known", "detected", "no-gpu"]
    profile_id: str | None = Field(default=None, description="of a known card, such as rtx-3090")
    reading: ReadingView | None = None
    problem: dict[str, Any] | None = Field(default=None, description="why it could not be read")
    attributed: bool = Field(description="the driver tells which process holds how much")
    parts: tuple[MemoryPartView, ...] = Field(default=(), description="they add up to the total exactly")
    rounding_bytes: int = Field(
        default=0,
        description="total_bytes less all other figures of the reading: the driver rounds each, and this is in `free`",
    )
    processes: tuple[ForeignProcessView, ...] = ()
    reservations: tuple[ReservationView, ...] = ()
    foreign_bytes: int | None = Field(
        default=None, description="used, and neither by our models nor by foreign units"
    )
    charged_bytes: int = Field(description="reserved or measured for our models, without quarantine")
    still_to_come_bytes: int = Field(
        default=0, description="promised to models that load, and not taken yet"
    )
    quarantined_bytes: int = 0
    grantable_bytes: int | None = Field(default=None, description="what a new model may take")
    budget: tuple[BudgetLineView, ...] = Field(default=(), description="the arithmetic of grantable_bytes")


class HostView(Response):
    """Host memory beside the cards, and what our models hold of it."""

    total_bytes: int
    available_bytes: int = Field(description="by the kernel (MemAvailable)")
    parts: tuple[MemoryPartView, ...]
    reservations: tuple[ReservationView, ...]
    charged_bytes: int
    in_use_bytes: int = Field(description="of our models, that the kernel cannot drop")
    grantable_bytes: int | None = None
    budget: tuple[BudgetLineView, ...] = ()


class Gpus(Response):
    """Answer of ``GET /v1/gpus``."""

    gpus: tuple[GpuView, ...] = Field(description="the one with the most memory first")
    host: HostView | None = Field(
        default=None, description="null where host memory takes the place of a card"
    )
    desktop_active: bool | None = Field(
        default=None, description="a desktop session is there; null unknown, which counts as one"
    )
    released: bool = Field(default=False, description="the card is released: loads are refused until resume")


class ExplainedItemView(Response):
    """A line of a price, beside what the engine says of it."""

    name: str
    bytes: int
    evidence: Evidence
    formula: str
    part: str | None = Field(
        default=None, description="which figure of the engine it belongs to: model, context, compute, output"
    )


class ExplainedPartView(Response):
    """One figure of the engine, and the lines of the price that foresaw it."""

    part: str
    quoted_bytes: int
    engine_bytes: int | None = Field(default=None, description="null where the engine did not tell")


class ExplainedMemoryView(Response):
    """One memory that a model takes a part of."""

    where: str = Field(description="UUID of the card, or host")
    name: str
    items: tuple[ExplainedItemView, ...]
    parts: tuple[ExplainedPartView, ...] = Field(
        default=(), description="empty where the engine told nothing that can be put beside the items"
    )
    reserved_bytes: int
    measured_bytes: int | None = None
    charged_bytes: int
    held_bytes: int | None = Field(default=None, description="now")
    limit_bytes: int | None = Field(
        default=None, description="that the kernel keeps its unit to (device_memory_limit); null without one"
    )
    comparable_bytes: int = Field(
        description="reserved without what is taken only with conversations: prompts that are kept, checkpoints"
    )
    deviation_bytes: int | None = Field(default=None, description="measured less comparable_bytes")
    deviation: float | None = Field(default=None, description="measured over comparable_bytes, less 1")


class EngineBufferView(Response):
    """A buffer, as the engine tells it in its log."""

    device: str = Field(description="as the engine names it, such as CUDA0 or CPU_Mapped")
    part: str = Field(description="model, context, compute, output")
    bytes: int = Field(description="the engine rounds to 0.01 MiB, or to whole MiB in its summary")


class CalibrationView(Response):
    """What this machine has learnt of such launches."""

    peak_bytes: int | None = Field(default=None, description="the most that this very launch ever took")
    excess_bytes: int = Field(description="charged to every launch that was not measured")
    launches: int = Field(description="of this checkpoint, build and card that something is known of")


class ExplainView(Response):
    """Answer of ``GET /v1/models/{name}/explain``: the price, what the engine says, and what was measured."""

    name: str
    run: str
    state: InstanceState
    engine_version: str
    reconstructed: str | None = Field(
        default=None,
        description="why its launch was read back from its command line; null where its record tells",
    )
    file_note: str | None = Field(
        default=None,
        description="how its files differ from those that it was loaded from; null where they do not",
    )
    config_notes: tuple[str, ...] = Field(
        default=(),
        description="what it has from its section of the settings, and what its next load would take",
    )
    evidence: Evidence | None = Field(default=None, description="the weakest of the items on the card")
    memories: tuple[ExplainedMemoryView, ...]
    engine: tuple[EngineBufferView, ...] = Field(default=(), description="every buffer that the log has")
    engine_note: str = Field(default="", description="why the engine's figures are missing or are not all")
    calibration: CalibrationView | None = Field(default=None, description="null where nothing is known")
    calibration_note: str = Field(default="", description="why nothing is known")
