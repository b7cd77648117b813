"""A running model's price beside what its engine says and what was measured, line by line. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from lllm3090d.engines.memory_log import VERBOSITY, EnginePart, MemoryLog
from lllm3090d.planning.calibration import Calibration
from lllm3090d.planning.quote import LineItem, Place
from lllm3090d.serving.ledger import Ledger, Reservation, ReservationState
from lllm3090d.serving.observation import HOST, Observation
from lllm3090d.serving.plan_views import weakest
from lllm3090d.serving.running import Instance
from lllm3090d.wire_cards import (
    CalibrationView,
    EngineBufferView,
    ExplainedItemView,
    ExplainedMemoryView,
    ExplainedPartView,
    ExplainView,
)

# Lines of a price, and the engine's figure that each is a part of. Others (runtime, slack, process, caches that are
# filled later) are in no figure of an engine.
PART_OF: Mapping[str, EnginePart] = MappingProxyType(
    {
        "weights": EnginePart.MODEL,
        "host weights": EnginePart.MODEL,
        "token embedding": EnginePart.MODEL,
        "draft blocks": EnginePart.MODEL,
        "draft weights": EnginePart.MODEL,
        "draft embedding": EnginePart.MODEL,
        "kv cache": EnginePart.CONTEXT,
        "host cache": EnginePart.CONTEXT,
        "recurrent state": EnginePart.CONTEXT,
        "rollback states": EnginePart.CONTEXT,
        "context": EnginePart.CONTEXT,
        "draft cache": EnginePart.CONTEXT,
        "compute": EnginePart.COMPUTE,
        "host compute": EnginePart.COMPUTE,
        "draft compute": EnginePart.COMPUTE,
        "draft host compute": EnginePart.COMPUTE,
        "output buffer": EnginePart.OUTPUT,
        "draft output buffer": EnginePart.OUTPUT,
        "projector": EnginePart.PROJECTOR,
        "projector graph": EnginePart.PROJECTOR_GRAPH,
    }
)
# Host memory that is taken with conversations: a measurement after the load has none of it.
TAKEN_LATER = frozenset({"prompt cache", "context checkpoints", "draft checkpoint"})
SILENT = (
    f"Its engine did not say in its log what it takes: it does where it is started with {VERBOSITY}, such as"
    " lllm3090ctl load NAME -- " + VERBOSITY
)
SUMMARY = "The engine's figures are whole MiB, rounded down, and leave out its outputs."
SEVERAL_CARDS = "Of a model on several cards nothing tells which of the engine's devices is which card."
TIERED = "Of a divided cache the log has lines of its own, which are not counted here."


@dataclass(frozen=True, slots=True)
class Learnt:
    """What this machine knows of such launches.

    Attributes:
        calibration: of this checkpoint, build and card; None where nothing can be known.
        launch: the text of this launch, to find it by.
        note: why nothing is known; empty where something is.
    """

    calibration: Calibration | None
    launch: str = ""
    note: str = ""


def explain_view(
    instance: Instance,
    ledger: Ledger,
    observation: Observation,
    log: MemoryLog,
    learnt: Learnt,
    *,
    log_note: str = "",
    limits: Mapping[str, int] = MappingProxyType({}),
    config_notes: tuple[str, ...] = (),
) -> ExplainView:
    """What a model was priced at, what its engine says of it, and what was measured.

    Args:
        instance: the model.
        ledger: what it was promised; of one that has ended its plan is told instead.
        observation: the cards now.
        log: what its engine wrote.
        learnt: what is known of earlier launches.
        log_note: why the log could not be read; empty where it could.
        limits: that the kernel keeps its unit to, bytes by UUID of the card.
        config_notes: what is to be said of its section of the settings.
    """
    shares = [each for each in ledger.of(instance.run) if each.items] or _as_planned(instance, observation)
    cards = [share for share in shares if share.where != HOST or observation.on_host]
    divided = len(cards) > 1
    return ExplainView(
        name=instance.name,
        run=instance.run,
        state=instance.state,
        engine_version=instance.record.engine_version,
        reconstructed=instance.reconstructed or None,
        file_note=instance.file_note or None,
        config_notes=config_notes,
        evidence=weakest(instance.plan.quote) if instance.plan.quote.items else None,
        memories=tuple(
            _memory(share, observation, log if not divided or share.where == HOST else MemoryLog(), limits)
            for share in shares
        ),
        engine=tuple(
            EngineBufferView(device=each.device, part=each.part, bytes=each.bytes) for each in log.buffers
        ),
        engine_note=log_note or _note(instance, log, divided=divided),
        calibration=_calibration(learnt),
        calibration_note=learnt.note,
    )


def _as_planned(instance: Instance, observation: Observation) -> list[Reservation]:
    """Of one that holds nothing any more: its price by place, on the card with the most memory."""
    state = ReservationState.RELEASING
    made = []
    for place, where in ((Place.CARD, observation.card.uuid), (Place.HOST, HOST)):
        items = tuple(item for item in instance.plan.quote.items if item.place is place)
        if items:
            size = sum(item.bytes for item in items)
            made.append(Reservation(instance.run, instance.name, where, items, size, None, state))
    return made


def _memory(
    share: Reservation, observation: Observation, log: MemoryLog, limits: Mapping[str, int]
) -> ExplainedMemoryView:
    state = observation.of(share.where)
    measured = share.measured_bytes
    comparable = share.reserved_bytes - sum(i.bytes for i in share.items if i.name in TAKEN_LATER)
    on_card = None if observation.on_host else share.where != HOST
    if state is not None and state.reading is not None and state.attributed:
        held: int | None = state.resident.get(share.run, 0)
    else:
        held = observation.host_in_use.get(share.run) if share.where == HOST else None
    return ExplainedMemoryView(
        where=share.where,
        name=state.card.name if state else "host memory",
        items=tuple(map(_item, share.items)),
        parts=_parts(share.items, log, on_card),
        reserved_bytes=share.reserved_bytes,
        measured_bytes=measured,
        charged_bytes=share.charged_bytes,
        held_bytes=held,
        limit_bytes=limits.get(share.where),
        comparable_bytes=comparable,
        deviation_bytes=None if measured is None else measured - comparable,
        deviation=round(measured / comparable - 1, 4) if measured is not None and comparable > 0 else None,
    )


def _item(item: LineItem) -> ExplainedItemView:
    part = PART_OF.get(item.name)
    return ExplainedItemView(
        name=item.name, bytes=item.bytes, evidence=item.evidence, formula=item.formula, part=part
    )


def _parts(items: Iterable[LineItem], log: MemoryLog, on_card: bool | None) -> tuple[ExplainedPartView, ...]:
    """The engine's figures for one memory, where it told any, and what of the price foresaw each."""
    if not log.buffers:
        return ()
    quoted: dict[EnginePart, int] = {}
    for item in items:
        part = PART_OF.get(item.name)
        if part is not None:
            quoted[part] = quoted.get(part, 0) + item.bytes
    views = []
    for part in EnginePart:
        told = log.total_bytes(part, on_card=on_card)
        if part in quoted or told:
            views.append(ExplainedPartView(part=part, quoted_bytes=quoted.get(part, 0), engine_bytes=told))
    return tuple(views)


def _note(instance: Instance, log: MemoryLog, *, divided: bool) -> str:
    if not log.buffers:
        return SILENT.replace("NAME", shlex.quote(instance.name))
    notes = [
        note
        for note, applies in (
            (SUMMARY, log.is_summary),
            (SEVERAL_CARDS, divided),
            (TIERED, instance.plan.tier is not None),
        )
        if applies
    ]
    return " ".join(notes)


def _calibration(learnt: Learnt) -> CalibrationView | None:
    known = learnt.calibration
    if known is None or not (known.seen or known.excess_bytes):
        return None
    seen = known.of(learnt.launch)
    return CalibrationView(
        peak_bytes=seen.peak_bytes if seen and seen.peak_bytes else None,
        excess_bytes=known.excess_bytes,
        launches=len(known.seen),
    )
