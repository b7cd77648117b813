"""A launch as data: the transient unit's name, properties, argv, environment, and the record it carries.

The record is how a daemon that was killed finds its models again, so it travels in the unit's environment
(which systemd keeps byte-exact) with a schema version, and is never trusted over what systemd says.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from lllm3090d.checkpoints.library import Checkpoint
from lllm3090d.checkpoints.purpose import Pooling, Purpose
from lllm3090d.engines.arguments import Launch as EngineLaunch
from lllm3090d.engines.confidential import confidential
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.readings import CardKind
from lllm3090d.planning.cache import MAX_SLOTS
from lllm3090d.planning.launch import DEFAULT_CHECKPOINT_STEP_TOKENS, Draft, Launch
from lllm3090d.planning.placement import EVERYTHING, Placement
from lllm3090d.planning.planner import CacheType, CappedBy, Plan
from lllm3090d.planning.quote import MIB, Evidence, LineItem, Place, Quote
from lllm3090d.planning.request import PlanRequest
from lllm3090d.planning.stretch import Stretch
from lllm3090d.planning.tier import Tier
from lllm3090d.serving.hardening import HARDENING
from lllm3090d.serving.ledger import Share
from lllm3090d.serving.log_files import log_file
from lllm3090d.serving.observation import HOST
from lllm3090d.serving.plausible import MOST, oddity

if TYPE_CHECKING:  # the table of signatures needs GLib; what is said here does not
    from lllm3090d.bus.properties import PropertyValue

UNIT_PREFIX = "lllm3090-"
UNIT_PATTERN = UNIT_PREFIX + "*.service"
SLICE = "lllm3090.slice"
RECORD_VARIABLE = "LLLM3090_RECORD"
RUN_VARIABLE = "LLLM3090_RUN"
RECORD_SCHEMA: Literal[1] = 1
# Raised with every field that is added: a fixture of each is in tests/data/records. What is added must have a default
# that stands for what there was before, so that every release of a schema reads the records of all others.
RECORD_MINOR = 5
LOG_FILE_PROPERTY = "StandardOutputFileToAppend"
# `struct sockaddr_un.sun_path` holds 108 bytes with the terminating zero.
SUN_PATH_BYTES = 107
# Room above the host price for what no estimate sees (allocator arenas, thread stacks, transient copies), so
# that the limit stops a runaway engine and never a healthy one.
MEMORY_MAX_SLACK_BYTES = 512 * MIB
MEMORY_MAX_SLACK_FRACTION = 0.10


# A record is what a stranger may have written: figures that no launch has must not become a reservation or an error.
MOST_BYTES = MOST
MOST_TOKENS = (1 << 31) - 1
# As the API takes them, and as names of files are.
MOST_NAME_CHARACTERS = 255
MOST_PATH_BYTES = 4095
Tokens = Annotated[int, Field(ge=0, le=MOST_TOKENS)]
PositiveTokens = Annotated[int, Field(ge=1, le=MOST_TOKENS)]


def _whole(path: Path) -> Path:
    """A path that means the same wherever it is used."""
    if not path.is_absolute() or len(os.fsencode(path)) > MOST_PATH_BYTES:
        raise ValueError("it is no absolute path of a file")
    return path


WholePath = Annotated[Path, AfterValidator(_whole)]


class RecordItem(BaseModel):
    """A line of the quote inside the record."""

    model_config = ConfigDict(frozen=True)
    name: str
    place: Place
    bytes: int = Field(ge=0, le=MOST_BYTES)
    evidence: Evidence
    formula: str


class ShareRecord(BaseModel):
    """What a launch takes of one memory."""

    model_config = ConfigDict(frozen=True)
    where: str = Field(min_length=1, max_length=200)
    items: tuple[RecordItem, ...]


class LaunchRecord(BaseModel):
    """The part of a launch that the first records did not have; the defaults are what they stood for."""

    model_config = ConfigDict(frozen=True)
    unified: bool = False
    swa_full: bool = False
    layers: Placement = EVERYTHING
    draft: Draft | None = None
    projector_on_card: bool = True
    image_max_tokens: Tokens = 0
    slot_tokens: Tokens = 0
    checkpoint_min_step_tokens: Tokens = DEFAULT_CHECKPOINT_STEP_TOKENS
    line_tokens: Tokens = 0
    tail_draft_tokens: Tokens = 0
    purpose: Purpose = Purpose.CHAT
    pooling: Pooling | None = None
    with_projector: bool = False
    rope: Stretch | None = None
    tier: Tier | None = None
    notes: tuple[str, ...] = ()
    asked: PlanRequest | None = None  # by the load alone; None in records of older releases
    shares: tuple[
        ShareRecord, ...
    ] = ()  # of each memory; empty in records of older releases: all on one card

    @model_validator(mode="after")
    def _holds_each_memory_once(self) -> LaunchRecord:
        if len({each.where for each in self.shares}) < len(self.shares):
            raise ValueError("two shares of one memory")
        return self

    @classmethod
    def of(cls, plan: Plan, asked: PlanRequest | None = None, shares: Sequence[Share] = ()) -> LaunchRecord:
        """Of a plan, of what the load asked for, and of what it takes of each memory."""
        sizes = plan.launch
        return cls(
            unified=sizes.unified,
            swa_full=sizes.swa_full,
            layers=sizes.layers,
            draft=sizes.draft,
            projector_on_card=sizes.projector_on_card,
            image_max_tokens=sizes.image_max_tokens,
            slot_tokens=sizes.slot_tokens,
            checkpoint_min_step_tokens=sizes.checkpoint_min_step_tokens,
            line_tokens=sizes.line_tokens,
            tail_draft_tokens=sizes.tail_draft_tokens,
            purpose=sizes.purpose,
            pooling=sizes.pooling,
            with_projector=plan.with_projector,
            rope=plan.rope,
            tier=plan.tier,
            notes=plan.notes,
            asked=asked,
            shares=tuple(ShareRecord(where=each.where, items=_recorded(each.items)) for each in shares),
        )


class Record(BaseModel):
    """What a unit says of itself. Fields are added, never changed, within one schema version.

    Of a later minor version unknown fields are passed over; a record of a later schema is not read at all.
    """

    model_config = ConfigDict(frozen=True)
    schema_version: Literal[1] = RECORD_SCHEMA
    minor: int = Field(default=0, ge=0)  # 0 in records of releases that did not write it
    run: str = Field(min_length=1, max_length=64, pattern=r"^[0-9A-Za-z_-]+$")
    name: str = Field(min_length=1, max_length=MOST_NAME_CHARACTERS)
    path: WholePath
    shards: tuple[WholePath, ...]
    size_bytes: int = Field(ge=0, le=MOST_BYTES)
    socket: WholePath
    context_tokens: PositiveTokens
    parallel: int = Field(ge=1, le=MAX_SLOTS)
    window_tokens: Tokens
    cache_type_k: CacheType
    cache_type_v: CacheType
    batch_tokens: PositiveTokens
    micro_batch_tokens: PositiveTokens
    on_card: bool
    context_checkpoints: Tokens
    prompt_cache_mib: Tokens
    capped_by: CappedBy
    items: tuple[RecordItem, ...]
    engine_version: str
    engine_server: str | None = None  # path of the executable; None in records of older releases
    launch: LaunchRecord | None = None  # what the fields above leave out; None in records of older releases
    arguments: tuple[str, ...] = ()  # further ones of a person that were handed to the engine

    @model_validator(mode="after")
    def _holds_nothing_odd(self) -> Record:
        if odd := oddity(self):
            raise ValueError(f"it holds {odd}")
        return self

    @classmethod
    def of(
        cls,
        *,
        run: str,
        checkpoint: Checkpoint,
        plan: Plan,
        socket: Path,
        engine_version: str,
        engine_server: Path | None = None,
        arguments: tuple[str, ...] = (),
        asked: PlanRequest | None = None,
        shares: Sequence[Share] = (),
    ) -> Record:
        """The record of a launch."""
        return cls(
            minor=RECORD_MINOR,
            run=run,
            name=checkpoint.name,
            path=checkpoint.path,
            shards=checkpoint.shards,
            size_bytes=checkpoint.size_bytes,
            socket=socket,
            context_tokens=plan.context_tokens,
            parallel=plan.parallel,
            window_tokens=plan.window_tokens,
            cache_type_k=plan.cache_type_k,
            cache_type_v=plan.cache_type_v,
            batch_tokens=plan.launch.batch_tokens,
            micro_batch_tokens=plan.launch.micro_batch_tokens,
            on_card=plan.on_card,
            context_checkpoints=plan.launch.context_checkpoints,
            prompt_cache_mib=plan.launch.prompt_cache_mib,
            capped_by=plan.capped_by,
            items=_recorded(plan.quote.items),
            engine_version=engine_version,
            engine_server=str(engine_server) if engine_server else None,
            launch=LaunchRecord.of(plan, asked, shares),
            arguments=arguments,
        )

    @property
    def asked(self) -> PlanRequest | None:
        """What the load asked for; None where nobody wrote it down."""
        return None if self.launch is None else self.launch.asked

    def checkpoint(self) -> Checkpoint:
        """The checkpoint that was launched."""
        return Checkpoint(name=self.name, path=self.path, shards=self.shards, size_bytes=self.size_bytes)

    def plan(self) -> Plan:
        """The plan it was launched with; the facts of a drafter are not in a record."""
        more = self.launch or LaunchRecord()
        return Plan(
            launch=Launch(
                context_tokens=self.context_tokens,
                parallel=self.parallel,
                cache_type_k=self.cache_type_k,
                cache_type_v=self.cache_type_v,
                batch_tokens=self.batch_tokens,
                micro_batch_tokens=self.micro_batch_tokens,
                context_checkpoints=self.context_checkpoints,
                prompt_cache_mib=self.prompt_cache_mib,
                unified=more.unified,
                swa_full=more.swa_full,
                layers=more.layers,
                draft=more.draft,
                projector_on_card=more.projector_on_card,
                image_max_tokens=more.image_max_tokens,
                slot_tokens=more.slot_tokens,
                checkpoint_min_step_tokens=more.checkpoint_min_step_tokens,
                line_tokens=more.line_tokens,
                tail_draft_tokens=more.tail_draft_tokens,
                purpose=more.purpose,
                pooling=more.pooling,
            ),
            window_tokens=self.window_tokens,
            on_card=self.on_card,
            capped_by=self.capped_by,
            quote=Quote(_items(self.items)),
            with_projector=more.with_projector,
            rope=more.rope,
            tier=more.tier,
            notes=more.notes,
        )

    def shares(self, card: str) -> tuple[Share, ...]:
        """What it was promised of each memory.

        Args:
            card: UUID of the card that records of older releases mean; the host's name where that is the card.
        """
        told = self.launch.shares if self.launch is not None else ()
        if told:
            return tuple(Share(each.where, _items(each.items)) for each in told)
        items = _items(self.items)
        on_card = Share(card, tuple(item for item in items if item.place is Place.CARD))
        beside = tuple(item for item in items if item.place is Place.HOST)
        return (on_card, Share(HOST, beside)) if beside and card != HOST else (on_card,)


def _recorded(items: Iterable[LineItem]) -> tuple[RecordItem, ...]:
    return tuple(
        RecordItem(name=i.name, place=i.place, bytes=i.bytes, evidence=i.evidence, formula=i.formula)
        for i in items
    )


def _items(recorded: Iterable[RecordItem]) -> tuple[LineItem, ...]:
    return tuple(LineItem(i.name, i.place, i.bytes, i.evidence, i.formula) for i in recorded)


def read_record(environment: Iterable[str]) -> Record | None:
    """The record in a unit's environment; None when there is none or it cannot be understood."""
    prefix = RECORD_VARIABLE + "="
    for item in environment:
        if item.startswith(prefix):
            try:
                return Record.model_validate_json(item.removeprefix(prefix))
            except ValidationError:
                return None
    return None


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """Name and properties of a transient unit, as Python values; ``bus.properties`` knows the signatures."""

    name: str
    properties: Mapping[str, PropertyValue]


def slug(name: str, limit: int) -> str:
    """A name reduced to characters that are safe in unit names and file names."""
    safe = re.sub(r"[^A-Za-z0-9_.]+", "-", name).strip("-.")
    return safe[:limit].rstrip("-.") or "model"[:limit]


def unit_name(name: str, run: str) -> str:
    """``lllm3090-<name>-<run>.service``: a name for each launch, so that no corpse blocks the next."""
    return f"{UNIT_PREFIX}{slug(name, 100)}-{run}.service"


def identifier(unit: str) -> str:
    """What the unit's lines carry as SYSLOG_IDENTIFIER in the journal."""
    return unit.removesuffix(".service")


def socket_path(directory: Path, name: str, run: str) -> Path:
    """Where the engine listens; as much of the name as fits ``sun_path``.

    Raises:
        LlmError: SOCKET_PATH_TOO_LONG when not even the run fits.
    """
    shortest = directory / f"{run}.sock"
    length = len(os.fsencode(shortest))
    room = SUN_PATH_BYTES - length - 1
    if room < -1:
        raise LlmError(
            ErrorCode.SOCKET_PATH_TOO_LONG,
            f"{shortest} is {length} bytes long; a Unix socket's path holds {SUN_PATH_BYTES}",
            hint="Choose a shorter runtime_dir (LLLM3090_RUNTIME_DIR).",
            path=str(shortest),
            limit_bytes=SUN_PATH_BYTES,
        )
    return shortest if room < 1 else directory / f"{slug(name, min(room, 40))}-{run}.sock"


def memory_max_bytes(plan: Plan, card_kind: CardKind) -> int:
    """The unit's ``MemoryMax``: the price of its host memory and room for what no estimate sees, bytes.

    With backend cpu everything it takes is host memory. Pages of the mapped model file count against the
    limit but are reclaimed first, so they need no room of their own.
    """
    place = Place.CARD if card_kind is CardKind.CPU else Place.HOST
    price = plan.quote.total_bytes(place)
    return with_slack(price)


def with_slack(price: int) -> int:
    """A limit for what is priced at so many bytes."""
    return price + max(MEMORY_MAX_SLACK_BYTES, int(price * MEMORY_MAX_SLACK_FRACTION))


def unit_spec(
    *,
    record: Record,
    launch: EngineLaunch,
    memory_max: int,
    stop_timeout_s: float,
    inherited: Mapping[str, str],
    log_files_dir: Path | None = None,
) -> UnitSpec:
    """The transient unit of a launch.

    Args:
        record: what the unit says of itself.
        launch: argv and environment of the engine.
        memory_max: ``MemoryMax`` in bytes.
        stop_timeout_s: from SIGTERM to SIGKILL.
        inherited: the user manager's own environment; our own settings and secrets in it are no business of the engine.
        log_files_dir: where its log goes; None for the journal.
    """
    name = unit_name(record.name, record.run)
    ours = {RUN_VARIABLE, RECORD_VARIABLE}
    # UnsetEnvironment takes no wildcard, and it would remove our own assignments too.
    ours |= {key for key, _ in launch.environment}
    unset = ({key for key in inherited if key.startswith("LLLM3090_")} | confidential(inherited)) - ours
    environment = [f"{key}={value}" for key, value in launch.environment]
    environment += [f"{RUN_VARIABLE}={record.run}", f"{RECORD_VARIABLE}={record.model_dump_json()}"]
    properties: dict[str, PropertyValue] = {
        "Description": f"{record.name} on llama-server (lllm3090)",
        "Slice": SLICE,
        "Type": "exec",
        "ExecStart": ((launch.argv[0], launch.argv, False),),
        "Environment": tuple(environment),
        "UnsetEnvironment": tuple(sorted(unset | set(launch.unset))),
        # The daemon relaunches, under a new name and after the memory is back.
        "Restart": "no",
        "TimeoutStopUSec": int(stop_timeout_s * 1_000_000),
        "KillMode": "mixed",
        "OOMPolicy": "stop",
        # Above the daemon and the desktop: when memory runs out the model goes first.
        "OOMScoreAdjust": 300,
        "MemoryMax": memory_max,
        "SyslogIdentifier": identifier(name),
        **HARDENING,
    }
    if log_files_dir is not None:
        # Appending, so that the file can be bounded while it is written.
        path = str(log_file(log_files_dir, identifier(name)))
        properties |= {LOG_FILE_PROPERTY: path, "StandardErrorFileToAppend": path}
    return UnitSpec(name, properties)
