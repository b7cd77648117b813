"""A record made out of a unit's own command, for a unit whose record is missing or cannot be used. Pure.

The command says which model is served, how, where it listens and on which cards; planning prices that again. Nothing of
a command says who loaded the model, or what was left open then: it counts as asked for as it runs, and as not pinned.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lllm3090d.bus.unit_status import UnitStatus
from lllm3090d.checkpoints.facts import CheckpointFacts, ProjectorFacts
from lllm3090d.checkpoints.library import Checkpoint
from lllm3090d.checkpoints.purpose import Purpose
from lllm3090d.engines.capabilities import Backend, Capabilities
from lllm3090d.engines.command_line import FlashAttention, Reading, RopeArguments
from lllm3090d.engines.option_kinds import FREE
from lllm3090d.engines.options import OptionLine, read_options
from lllm3090d.engines.places import SERVER_NAME
from lllm3090d.engines.visibility import identified
from lllm3090d.errors import LlmError
from lllm3090d.gpus.readings import Card, CardKind
from lllm3090d.planning.launch import PlanPolicy
from lllm3090d.planning.planner import CappedBy, Plan
from lllm3090d.planning.quote import Place, Quote, price
from lllm3090d.planning.request import Drafting, PlanRequest, ProjectorPlace
from lllm3090d.planning.rope import RopeScaling
from lllm3090d.planning.split import Division, assigned_layers
from lllm3090d.planning.stretch import Stretch
from lllm3090d.serving.launching import shares_of
from lllm3090d.serving.ledger import Share
from lllm3090d.serving.observation import HOST
from lllm3090d.serving.unit_spec import MOST_NAME_CHARACTERS, RUN_VARIABLE, UNIT_PREFIX, Record, unit_name

SOCKET_SUFFIX = ".sock"
# By which the two drivers that take UUIDs are kept to cards.
CARD_VARIABLES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
# Options without a price that the daemon writes itself: they are no person's further arguments.
OWN_OPTIONS = (
    "--jinja", "--no-ui", "--no-webui", "--load-mode", "--mmap", "--no-mmap",
    "--reasoning-effort-allow", "--reasoning-effort-fallback", "--reasoning-max-tokens-floor",
)  # fmt: skip
MOST_FACTOR = 1_000_000.0
NOTE = "read back from its command line"


class NotUnderstoodError(Exception):
    """A unit's command does not tell what it would have to; the message is the end of a sentence about the unit."""


@dataclass(frozen=True, slots=True)
class Command:
    """What a unit's command says by itself.

    Attributes:
        server: the program.
        line: its options.
        socket: where it listens.
        model: the first file of the model.
        alias: by which the engine answers.
        drafter, projector: files beside the model; None where there is none.
    """

    server: Path
    line: OptionLine
    socket: Path
    model: Path
    alias: str
    drafter: Path | None
    projector: Path | None


@dataclass(frozen=True, slots=True)
class Served:
    """What lies on the disk of what a command names.

    Attributes:
        shards: all files of the model.
        size_bytes: of all of them.
        facts: of the model.
        projector: of its projector; None without.
    """

    shards: tuple[Path, ...]
    size_bytes: int
    facts: CheckpointFacts
    projector: ProjectorFacts | None = None


def server_of(status: UnitStatus) -> Path:
    """The llama-server that a unit runs. Raises NotUnderstoodError where it runs something else."""
    if not status.argv:
        raise NotUnderstoodError("systemd tells no command of it")
    server = Path(status.argv[0])
    if server.name != SERVER_NAME or not server.is_absolute():
        raise NotUnderstoodError(f"it runs {status.argv[0]}, which is no {SERVER_NAME}")
    return server


def command_of(status: UnitStatus, capabilities: Capabilities) -> Command:
    """What a unit's command says.

    Args:
        status: of the unit.
        capabilities: of its engine, or of another build for the spelling of options.

    Raises:
        NotUnderstoodError: it is no command of a server with a model of its own behind a Unix socket.
    """
    server = server_of(status)
    try:
        line = read_options(status.argv[1:], capabilities, status.variables)
    except LlmError as error:
        raise NotUnderstoodError(f"its command line cannot be read: {error.message}") from error
    model, host = line.text("--model"), line.text("--host")
    if model is None or not model.startswith("/"):
        raise NotUnderstoodError("its command line names no model file by a whole path")
    if host is None or not host.startswith("/") or not host.endswith(SOCKET_SUFFIX):
        raise NotUnderstoodError("it does not listen on a Unix socket")
    alias = (line.text("--alias") or "").split(",")[0].strip() or Path(model).stem
    if len(alias) > MOST_NAME_CHARACTERS:
        raise NotUnderstoodError(f"its model's name has more than {MOST_NAME_CHARACTERS} characters")
    drafter, projector = line.text("--model-draft", "--spec-draft-model"), line.text("--mmproj")
    return Command(
        server=server,
        line=line,
        socket=Path(host),
        model=Path(model),
        alias=alias,
        drafter=Path(drafter) if drafter else None,
        projector=Path(projector) if projector else None,
    )


def run_of(unit: str, name: str, told: str = "") -> str:
    """Identity of the launch: the end of the unit's name where we have given it, else made from the whole name.

    Args:
        unit: name of the unit.
        name: of the model.
        told: what the unit's environment says (:data:`lllm3090d.serving.unit_spec.RUN_VARIABLE`); empty where nothing.
    """
    found = re.fullmatch(re.escape(UNIT_PREFIX) + r".+-([0-9a-f]{8})\.service", unit)
    if found and (found[1] == told or unit_name(name, found[1]) == unit):
        return found[1]
    return hashlib.sha256(unit.encode()).hexdigest()[:8]


def cards_of_unit(
    variables: Mapping[str, str],
    devices: Sequence[str],
    capabilities: Capabilities,
    cards: Sequence[Card],
) -> tuple[str, ...]:
    """UUIDs of the cards that an engine is on, in the order of its devices.

    Args:
        variables: of its environment.
        devices: that it names; () for all that it sees.
        capabilities: of its build.
        cards: of the machine.

    Raises:
        NotUnderstoodError: a card is named that is not here, or nothing tells which one it is.
    """
    if len(cards) == 1:
        return (cards[0].uuid,)
    by_bus = sorted(cards, key=lambda card: card.pci_address)
    seen = by_bus
    for name in CARD_VARIABLES:
        if variables.get(name):
            seen = [_card_of(word.strip(), by_bus) for word in variables[name].split(",")]
    if not devices:
        return tuple(card.uuid for card in seen)
    if capabilities.backend in {Backend.CUDA, Backend.ROCM}:
        numbers = [int(found[0]) if (found := re.search(r"\d+\Z", each)) else -1 for each in devices]
        if any(not 0 <= number < len(seen) for number in numbers):
            raise NotUnderstoodError(f"it is on {', '.join(devices)}, and sees {len(seen)} cards")
        return tuple(seen[number].uuid for number in numbers)
    known = {
        device.name: card for card in cards if (device := identified(capabilities, cards, card)) is not None
    }
    if not set(devices) <= known.keys():
        raise NotUnderstoodError(f"nothing tells which cards {', '.join(devices)} are")
    return tuple(known[each].uuid for each in devices)


def _card_of(word: str, by_bus: Sequence[Card]) -> Card:
    fitting = [card for card in by_bus if word and card.uuid.startswith(word)]
    if word.isdigit() and int(word) < len(by_bus):
        fitting = [by_bus[int(word)]]
    if len(fitting) != 1:
        raise NotUnderstoodError(f"it is on the card {word or 'of no name'}, which is none of this machine")
    return fitting[0]


def rebuilt_record(
    status: UnitStatus,
    *,
    command: Command,
    reading: Reading,
    served: Served,
    capabilities: Capabilities,
    cards: Sequence[Card],
    policy: PlanPolicy,
) -> Record:
    """The record that a unit would carry.

    Args:
        status: of the unit.
        command: what its command says.
        reading: the values of it that have a price.
        served: the files.
        capabilities: of its build.
        cards: of the machine, or the host in the place of one.
        policy: for what a price rests on beside the launch.

    Raises:
        NotUnderstoodError: it is on cards that nobody knows.
        LlmError: as :func:`lllm3090d.planning.quote.price`.
    """
    kind = cards[0].kind
    launch = reading.launch
    if not launch.context_tokens:
        launch = replace(launch, context_tokens=served.facts.trained_context_tokens)
    shape = launch.shape(served.facts)
    backend = capabilities.backend if reading.on_card and kind is not CardKind.CPU else Backend.CPU
    rope = _stretch(reading.rope, served.facts, shape.stream_cells)
    uuids: tuple[str, ...] = (cards[0].uuid,)
    if backend is not Backend.CPU:
        uuids = cards_of_unit(status.variables, reading.devices, capabilities, cards)
    plan = Plan(
        launch=launch,
        window_tokens=min(shape.stream_cells, rope.window_tokens) if rope else shape.window_tokens,
        on_card=reading.on_card,
        capped_by=CappedBy.REQUEST,
        quote=price(served.facts, launch, backend, policy, served.projector),
        with_projector=reading.with_projector,
        rope=rope,
        notes=(NOTE, *_doubts(reading)),
    )
    if len(uuids) > 1:
        divided = Division(served.facts, launch, backend, policy, served.projector)
        shares = assigned_layers(divided.layers, reading.shares or _sizes(uuids, cards))
        split = divided.split(uuids, shares)
        plan = replace(plan, split=split, quote=split.quote)
    taken = shares_of(plan, uuids, kind)
    if backend is Backend.CPU and kind is not CardKind.CPU:
        plan, taken = _beside_the_card(plan)
    name = command.alias
    return Record.of(
        run=run_of(status.name, name, status.variables.get(RUN_VARIABLE, "")),
        checkpoint=Checkpoint(name, command.model, served.shards, served.size_bytes),
        plan=plan,
        socket=command.socket,
        engine_version=capabilities.version,
        engine_server=command.server,
        arguments=further(command.line, status.argv[1:]),
        asked=asked(plan),
        shares=taken,
    )


def asked(plan: Plan) -> PlanRequest:
    """What a load would have to ask for to come to the same launch."""
    launch, layers = plan.launch, plan.launch.layers
    projector = None
    if plan.with_projector:
        projector = ProjectorPlace.CARD if launch.projector_on_card else ProjectorPlace.HOST
    return PlanRequest(
        context_tokens=launch.context_tokens,
        parallel=launch.parallel,
        cache_type_k=launch.cache_type_k,
        cache_type_v=launch.cache_type_v,
        gpu_layers=layers.layers_on_card,
        cpu_experts=layers.expert_layers_on_host or None,
        cache_on_host=layers.cache_on_host,
        drafting=Drafting.OFF if launch.draft is None else Drafting.ON,
        draft_tokens=launch.draft.tokens if launch.draft else None,
        projector=projector,
        unified=launch.unified,
        swa_full=launch.swa_full,
        batch_tokens=launch.batch_tokens,
        micro_batch_tokens=launch.micro_batch_tokens,
        rope_scaling=plan.rope.scaling if plan.rope else None,
        tiered=launch.line_tokens > 0,
        purpose=None if launch.purpose is Purpose.CHAT else launch.purpose,
    )


def further(line: OptionLine, arguments: Iterable[str]) -> tuple[str, ...]:
    """Arguments without a price that the daemon does not write by itself, an option and its value in one text."""
    written = frozenset(arguments)
    free = tuple(FREE)
    return tuple(
        " ".join((each.written, *each.values))
        for each in line.given
        if each.written in written and each.names(*free) and not each.names(*OWN_OPTIONS)
    )


def _doubts(reading: Reading) -> Iterable[str]:
    if reading.fits_itself:
        yield "its engine may have taken less than it is charged, for it fits itself into what is free"
    if reading.flash_attention is not FlashAttention.ON:
        yield "priced as with flash attention, which its engine may have turned off"
    if reading.unpriced:
        yield f"nobody knows the price of {', '.join(reading.unpriced)}"


def _stretch(rope: RopeArguments | None, facts: CheckpointFacts, stream_cells: int) -> Stretch | None:
    if rope is None or rope.scaling is RopeScaling.NONE or not rope.factor:
        return None
    original = rope.original_tokens or facts.trained_context_tokens
    if not (0 < rope.factor <= MOST_FACTOR and original > 0):
        raise NotUnderstoodError(f"its positions are stretched by {rope.factor:g}, as nobody can")
    window = (
        int(original * rope.factor) if rope.scaling is RopeScaling.YARN else facts.trained_context_tokens
    )
    return Stretch(rope.scaling, rope.factor, original, min(window, stream_cells))


def _sizes(uuids: Sequence[str], cards: Sequence[Card]) -> tuple[float, ...]:
    """Without shares the engine divides a model by what is free on each card; by size is the nearest to that."""
    return tuple(
        float(max(1, next(card.total_bytes for card in cards if card.uuid == each))) for each in uuids
    )


def _beside_the_card(plan: Plan) -> tuple[Plan, tuple[Share, ...]]:
    """Of an engine that computes in host memory though there is a card: nothing of its price is on the card."""
    items = tuple(replace(item, place=Place.HOST) for item in plan.quote.items)
    return replace(plan, quote=Quote(items)), (Share(HOST, items),)
