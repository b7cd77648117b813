"""What the daemon says against what is true, at one moment. Pure.

Each difference has a key, so that whoever looks again and again can tell for how long it has been there: what is on its
way is untrue for a moment, and only what stays so is a fault.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tests.chaos.told import Instance, Told
from tests.chaos.truth import Card, Truth, Unit

SERVING = frozenset({"ready", "busy", "stalled", "draining"})
ENDED = frozenset({"failed", "latched"})
RUNS = frozenset({"active", "activating", "deactivating", "reloading"})
CARD_PROBLEM = "card problem"
# Drivers and views round.
ROUNDING_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Difference:
    """Something that is not so.

    Attributes:
        kind: untrue state, untrue memory, orphan, lost model, over-commit, silence.
        about: what it is about; with kind the identity of the difference.
        text: for a person.
    """

    kind: str
    about: str
    text: str


def compare(
    truth: Truth, told: Told, healthy: Mapping[int, bool], wanted: Mapping[str, str]
) -> Iterator[Difference]:
    """All differences now.

    Args:
        truth: the machine.
        told: the daemon.
        healthy: by process of an engine, whether it answers that it serves.
        wanted: models that were loaded and that nobody has unloaded since, and why they are.
    """
    if truth.units is None:
        return
    for instance in told.instances:
        text = untrue(instance, truth.units.get(instance.unit), truth, healthy)
        if text:
            about = f"{instance.name} {instance.run} {instance.state}"
            yield Difference("untrue state", about, f"{instance.name} is told {instance.state}, but {text}")
    yield from _orphans(truth, told)
    yield from _lost(told, wanted)
    yield from _memory(truth.card, truth, told)


def untrue(instance: Instance, unit: Unit | None, truth: Truth, healthy: Mapping[int, bool]) -> str | None:
    """Why the state of an instance is not true; None where it may be."""
    active = unit.active if unit is not None else "not there"
    engine = truth.engines.get(unit.main_pid) if unit is not None else None
    up = engine is not None and active in RUNS
    state = instance.state
    why = None
    if state in SERVING | {"loading"}:
        if not up or engine is None:
            why = f"its unit is {active}, and its main process {'runs' if engine else 'does not run'}"
        elif instance.main_pid != engine.pid:
            why = f"its main process is {engine.pid} and not {instance.main_pid}"
        elif unit is not None and instance.invocation != unit.invocation:
            why = f"its invocation is {unit.invocation} and not {instance.invocation}"
        elif state == "loading" and healthy.get(engine.pid):
            why = "its engine answers that it serves"
    elif state == "starting" and (active == "failed" or (up and engine and healthy.get(engine.pid))):
        why = f"its unit is {active}" + (", and its engine serves" if up else "")
    elif state == "stopping" and active not in RUNS:
        why = f"its unit is {active}"
    elif state == "releasing":
        if up:
            why = "its engine runs"
        elif truth.card.readable and not truth.card.late:
            why = "the card shows all memory back"
    elif state in ENDED and up:
        why = f"its engine runs as process {unit.main_pid if unit else 0}"
    return why


def _orphans(truth: Truth, told: Told) -> Iterator[Difference]:
    units = truth.units or {}
    known = {each.unit for each in told.instances if each.state not in ENDED}
    for engine in truth.engines.values():
        unit = units.get(engine.unit)
        if unit is None or unit.main_pid != engine.pid:
            text = f"process {engine.pid} is an engine of {engine.model} in {engine.unit}, of which it is not the main"
            yield Difference("orphan", f"process {engine.pid}", f"{text} process")
        elif engine.unit not in known:
            text = f"{engine.unit} runs as process {engine.pid}, and the daemon does not know it"
            yield Difference("orphan", engine.unit, text)
    all_known = {each.unit for each in told.instances}
    for unit in units.values():
        if unit.active == "failed" and unit.name not in all_known:
            yield Difference("orphan", unit.name, f"the failed unit {unit.name} is left behind")


def _lost(told: Told, wanted: Mapping[str, str]) -> Iterator[Difference]:
    by_name = {each.name: each for each in told.instances}
    for name, why in wanted.items():
        instance = by_name.get(name)
        if instance is None and name not in told.pending:
            yield Difference("lost model", name, f"{name} ({why}) is not told at all")
        elif instance is not None and instance.state == "failed" and not instance.retries:
            text = f"{name} ({why}) has failed ({instance.cause or 'no cause'}) and is not started again"
            yield Difference("lost model", name, text)


def _memory(card: Card, truth: Truth, told: Told) -> Iterator[Difference]:
    if card.used + card.reserved > card.total:
        text = f"{card.used} bytes are used and {card.reserved} kept by the driver of {card.total}"
        yield Difference("over-commit", "card", text)
    promised = sum(each.charged for each in told.reservations)
    if promised > card.total - card.reserved:
        text = f"{promised} bytes are promised of {card.total - card.reserved}"
        yield Difference("over-commit", "promises", text)
    if not card.readable:
        if told.card_problem is None:
            yield Difference(
                "untrue memory", CARD_PROBLEM, "the card cannot be read, and the daemon tells none"
            )
        return
    if told.card_problem is not None:
        text = f"the card can be read, and the daemon tells {told.card_problem}"
        yield Difference("untrue memory", CARD_PROBLEM, text)
        return
    yield from _figures(card, truth, told)
    yield from _promises(card, truth, told)


def _figures(card: Card, truth: Truth, told: Told) -> Iterator[Difference]:
    if told.used is None or abs(told.used - card.used) > ROUNDING_BYTES:
        text = f"{card.used} bytes of the card are used, and the daemon tells {told.used}"
        yield Difference("untrue memory", "used", text)
    foreign = card.used - card.of(truth.engines)
    # Memory that comes back late is a model's still, or a stranger's for a daemon that has started since.
    if not card.late and (told.foreign is None or abs(told.foreign - foreign) > ROUNDING_BYTES):
        text = f"others hold {foreign} bytes, and the daemon tells {told.foreign}"
        yield Difference("untrue memory", "foreign", text)
    if not card.late and told.quarantined:
        text = f"{told.quarantined} bytes are in quarantine, and the card shows all memory back"
        yield Difference("untrue memory", "quarantine", text)


def _promises(card: Card, truth: Truth, told: Told) -> Iterator[Difference]:
    by_run = {each.run: each for each in told.instances}
    promised = {each.run: each for each in told.reservations}
    for each in told.reservations:
        holder = by_run.get(each.run)
        if (holder is None or holder.state in ENDED) and not card.late:
            what = f"{each.charged} bytes are promised to {each.model} {each.run} ({each.state})"
            yield Difference("untrue memory", f"promise {each.run}", f"{what}, of which nothing is left")
    by_unit = {each.unit: each for each in told.instances}
    for engine in truth.engines.values():
        instance = by_unit.get(engine.unit)
        held = card.of([engine.pid])
        promise = promised.get(instance.run) if instance is not None else None
        if instance is not None and held > (promise.charged if promise else 0):
            text = f"{instance.name} holds {held} bytes and is promised {promise.charged if promise else 0}"
            yield Difference("over-commit", f"{instance.run} holds more", text)
