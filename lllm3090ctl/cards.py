"""Cards and prices explained, as text for a person. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lllm3090ctl import units
from lllm3090ctl.documents import Document
from lllm3090ctl.render import card_released, problem_blocks
from lllm3090ctl.text import (
    MIB,
    Bar,
    Block,
    Column,
    Prose,
    Segment,
    Table,
    clean,
    duration,
    mib,
    pairs,
    size,
)

HOST = "host"
MODEL, PROMISED, FREE = "model", "promised", "free"
# Kind of part -> its character in the bar, its colour, and what it is. Models have letters instead.
MARKS = {
    "driver": ("#", "bright_black", "kept by the driver"),
    "process": ("x", "yellow", "another program"),
    "foreign-unit": ("u", "yellow", "a unit that is left alone"),
    "others": ("?", "yellow", "used, and nobody is listed with it"),
    MODEL: ("", "", "held by the model"),
    PROMISED: ("", "", "reserved for the model, not taken yet"),
    "quarantine": ("!", "red", "of a model that ended, not back yet"),
    "reserve": ("-", "bright_black", "kept free"),
    FREE: (".", "", ""),
}
UNKNOWN = ("~", "magenta", "")
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
COLOURS = ("cyan", "green", "blue", "magenta")
PART_COLUMNS = (Column(""), Column("OWNER"), Column("MIB", right=True), Column("WHAT", least=20))
HELD_COLUMNS = (
    Column("MODEL"),
    Column("ITEM", least=20),
    Column("MIB", right=True),
    Column("EVIDENCE"),
)
EXPLAINED_COLUMNS = (
    Column("ITEM"),
    Column("RESERVED", right=True),
    Column("ENGINE", right=True),
    Column("EVIDENCE"),
    Column("FORMULA", least=20),
)
UNATTRIBUTED = (
    "The driver does not tell who holds how much: ready models are shown with what they are charged."
)
ROUNDED = "Each figure is rounded to 0.1 MiB, so together they may differ from the total by as little."


def gpus(listing: Document) -> list[Block]:
    """What ``gpu`` shows: each card with a bar and a table by owner, then what each model was promised of it."""
    blocks: list[Block] = []
    if told := card_released(listing):
        blocks += [*told, ""]
    for gpu in listing.children("gpus"):
        blocks += [*_card(gpu), ""]
    host = listing.maybe_child("host")
    if host:
        blocks += [f"Host memory, {size(host.whole('total_bytes'))}", *_memory(host), ""]
    return blocks[:-1]


def explanation(view: Document) -> list[Block]:
    """What ``explain`` shows: the price line by line, what the engine says of it, and what was measured."""
    rows = [
        ("model", view.text("name")),
        ("state", view.text("state")),
        ("engine", view.text("engine_version")),
        ("evidence", view.maybe_text("evidence") or ""),
    ]
    blocks: list[Block] = [pairs([(label, clean(value)) for label, value in rows if value])]
    blocks += list(units.note(view))
    notes = view.texts("config_notes") if view.has("config_notes") else ()
    blocks += [Prose(clean(f"{note}.")) for note in notes]
    for memory in view.children("memories"):
        blocks += ["", clean(f"{memory.text('name')}, in MiB"), *_explained(memory)]
    blocks.append("")
    note = view.text("engine_note")
    if note:
        blocks.append(Prose(clean(note)))
    blocks += list(_learnt(view))
    return blocks


# --- cards ------------------------------------------------------------------------------------------------


def _card(gpu: Document) -> Iterator[Block]:
    bus = [gpu.maybe_text("pci_address") or ""]
    pcie = gpu.maybe_child("pcie")
    if pcie:
        bus.append(f"PCIe {pcie.whole('generation')} x{pcie.whole('width')}")
    capability = gpu.maybe_text("compute_capability")
    driver = [
        gpu.maybe_text("driver_version") or "",
        f"compute capability {capability}" if capability else "",
    ]
    reading, profile = gpu.maybe_child("reading"), gpu.maybe_text("profile_id")
    name = gpu.text("name") + (f", {size(reading.whole('total_bytes'))}" if reading else "")
    rows = [
        ("card", f"{gpu.whole('number')}: {name}"),
        ("uuid", "" if gpu.text("uuid") == HOST else gpu.text("uuid")),
        ("bus", ", ".join(filter(None, bus))),
        ("driver", ", ".join(filter(None, driver))),
        ("profile", gpu.text("profile") + (f": {profile}" if profile else "")),
        ("read", f"{reading.real('age_s'):.1f} s ago" if reading else ""),
    ]
    yield pairs([(label, clean(value)) for label, value in rows if value])
    driver_problem = gpu.maybe_text("driver_problem")
    if driver_problem:
        yield Prose(clean(driver_problem))
    problem = gpu.maybe_child("problem")
    if problem:
        yield from problem_blocks(problem)
    yield from _memory(gpu)
    if reading and not gpu.truth("attributed"):
        yield Prose(UNATTRIBUTED)
    silent = [each for each in gpu.children("processes") if not each.has("used_bytes")]
    if silent:
        names = ", ".join(map(_silent, silent))
        yield Prose(clean(f"Of these it is not told how much they hold: {names}."))
    rounding = gpu.whole("rounding_bytes")
    if abs(rounding) >= MIB:
        much = f"{mib(abs(rounding))} MiB {'less' if rounding > 0 else 'more'}"
        yield Prose(
            f"The driver's own figures add up to {much} than the total; the difference is counted as free."
        )


def _memory(memory: Document) -> Iterator[Block]:
    """Bar, parts, what can be given, and the promises of one memory."""
    parts = memory.children("parts")
    reservations = memory.children("reservations")
    if parts:
        letters = _letters(parts)
        marks = [_mark(part, letters) for part in parts]
        yield Bar(
            tuple(
                Segment(mark, part.whole("bytes"), colour)
                for part, (mark, colour, _) in zip(parts, marks, strict=True)
            )
        )
        rows = [
            (mark, _owner(part), mib(part.whole("bytes")), _what(part, what))
            for part, (mark, _, what) in zip(parts, marks, strict=True)
        ]
        total = sum(part.whole("bytes") for part in parts)
        yield Table(PART_COLUMNS, (*rows, ("", "total", mib(total), "")))
        if sum(_tenths(part.whole("bytes")) for part in parts) != _tenths(total):
            yield Prose(ROUNDED)
    grantable = memory.maybe_whole("grantable_bytes")
    if grantable is not None:
        yield f"A new model may take {mib(grantable)} MiB."
    if reservations:
        yield ""
        yield Table(HELD_COLUMNS, tuple(row for each in reservations for row in _held(each)))


def _letters(parts: Sequence[Document]) -> dict[str, int]:
    """A number for each of our models, by run, in the order of the bar."""
    runs = [part.maybe_text("run") or "" for part in parts if part.text("kind") in {MODEL, PROMISED}]
    return {run: number for number, run in enumerate(dict.fromkeys(runs))}


def _mark(part: Document, letters: dict[str, int]) -> tuple[str, str, str]:
    kind = part.text("kind")
    mark, colour, what = MARKS.get(kind, UNKNOWN)
    if kind in {MODEL, PROMISED}:
        number = letters[part.maybe_text("run") or ""]
        letter = LETTERS[min(number, len(LETTERS) - 1)]
        mark = letter if kind == MODEL else letter.lower()
        colour = COLOURS[number % len(COLOURS)]
    return mark, colour, what


def _owner(part: Document) -> str:
    pid = part.maybe_whole("pid")
    return clean(part.text("name") + (f" (pid {pid})" if pid is not None else ""))


def _silent(process: Document) -> str:
    """A process of which it is not told what it holds."""
    model, user = process.maybe_text("model"), process.maybe_text("user")
    name = f"the model {model}" if model else process.text("name") or "a process"
    return f"{name}{f' of {user}' if user else ''} (pid {process.whole('pid')})"


def _what(part: Document, what: str) -> str:
    user, model, unseen = (part.maybe_text(key) for key in ("user", "model", "unseen"))
    if unseen:
        return clean(f"{what} of an unknown owner: {unseen}")
    if user and model:
        return clean(f"the model {model} of {user}")
    if user:
        return clean(f"{what} of {user}")
    return f"{what}, for {duration(part.real('age_s'))}" if part.has("age_s") else what


def _held(reservation: Document) -> Iterator[tuple[str, ...]]:
    """The lines of a promise, then its sums."""
    name = clean(reservation.text("model"))
    for item in reservation.children("items"):
        yield name, clean(item.text("name")), mib(item.whole("bytes")), clean(item.text("evidence"))
    measured, held = reservation.maybe_whole("measured_bytes"), reservation.maybe_whole("held_bytes")
    limit = reservation.maybe_whole("limit_bytes")
    state = clean(reservation.text("state"))
    evidence = clean(reservation.maybe_text("evidence") or "")
    yield name, f"= reserved ({state})", mib(reservation.whole("reserved_bytes")), evidence
    yield name, "= measured at most", mib(measured) if measured is not None else "-", ""
    yield name, "= charged", mib(reservation.whole("charged_bytes")), ""
    yield name, "= held now", mib(held) if held is not None else "-", ""
    if limit is not None:
        yield name, "= limit of its unit", mib(limit), ""


def _tenths(size_bytes: int) -> int:
    return round(size_bytes / MIB * 10)


# --- a price explained ------------------------------------------------------------------------------------


def _explained(memory: Document) -> Iterator[Block]:
    engine = {part.text("part"): part.maybe_whole("engine_bytes") for part in memory.children("parts")}
    shown: set[str] = set()
    rows = []
    for item in memory.children("items"):
        part = item.maybe_text("part") or ""
        figure = engine.get(part)
        told = "-"
        if figure is not None:
            told = "above" if part in shown else mib(figure)
            shown.add(part)
        rows.append(
            (
                clean(item.text("name")),
                mib(item.whole("bytes")),
                told,
                clean(item.text("evidence")),
                clean(item.text("formula")),
            )
        )
    rows += [
        (clean(part), "-", mib(figure), "", "not foreseen by name")
        for part, figure in engine.items()
        if figure and part not in shown
    ]
    figures = [figure for figure in engine.values() if figure is not None]
    reserved = memory.whole("reserved_bytes")
    rows.append(("sum", mib(reserved), mib(sum(figures)) if figures else "-", "", ""))
    yield Table(EXPLAINED_COLUMNS, tuple(rows))
    measured, held = memory.maybe_whole("measured_bytes"), memory.maybe_whole("held_bytes")
    sums = [
        ("reserved", mib(reserved)),
        ("measured", mib(measured) if measured is not None else "nothing yet"),
        ("held now", mib(held) if held is not None else "nobody tells"),
        ("charged", mib(memory.whole("charged_bytes"))),
    ]
    if memory.has("limit_bytes"):
        sums.append(("limit", f"{mib(memory.whole('limit_bytes'))}, by the kernel"))
    if memory.has("deviation_bytes"):
        sums.append(("deviation", _deviation(memory)))
        if memory.whole("comparable_bytes") != reserved:
            sums.append(("", "without prompts that are kept and checkpoints, which are taken later"))
    yield ""
    yield pairs(sums)


def _deviation(memory: Document) -> str:
    difference = memory.whole("deviation_bytes")
    text = f"{difference / MIB:+,.1f}"
    return f"{text} ({memory.real('deviation'):+.1%})" if memory.has("deviation") else text


def _learnt(view: Document) -> Iterator[Block]:
    known = view.maybe_child("calibration")
    if known:
        peak, excess = known.maybe_whole("peak_bytes"), known.whole("excess_bytes")
        if peak is not None:
            yield Prose(f"Learnt: this very launch took {mib(peak)} MiB at most.")
        if excess:
            yield Prose(
                f"Learnt: launches of it that were not measured are charged {mib(excess)} MiB more than the quote."
            )
        if peak is None and not excess:
            yield Prose("Learnt: other launches of it were measured, and took no more than their quotes.")
    note = view.text("calibration_note")
    if note:
        yield Prose(clean(note))
