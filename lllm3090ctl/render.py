"""Documents of the wire as text for a person: lines and tables. Pure; :mod:`output` writes them."""

from __future__ import annotations

from collections.abc import Sequence

from lllm3090ctl import comebacks, refusal, stalls, suspend, units, wanted
from lllm3090ctl.documents import Document
from lllm3090ctl.failures import Failure
from lllm3090ctl.text import (
    Block,
    Column,
    Prose,
    Style,
    Table,
    clean,
    count,
    duration,
    mib,
    mib_up,
    pairs,
    prose_pairs,
)

ON_CARD = "card"
HOST_KIND = "cpu"
MOST_LISTED = 40
CARD_RELEASED = "The card is released: loads are refused until: lllm3090ctl resume"
ENGINE_FAILED = "engine_failed"
USUAL_PURPOSE = "chat"
FOR_PROGRAMS = "fields"  # members of the request that were refused; the message names the options instead


def instances(listing: Document) -> list[Block]:
    """What ``ps`` shows."""
    views = listing.children("instances")
    waiting = [*pending(listing), *wanted.lines(listing), *units.foreign_units(listing)]
    if not views:
        return [
            *card_released(listing),
            Prose(
                "No model is loaded. See what there is: lllm3090ctl models; load one: lllm3090ctl load NAME"
            ),
            *waiting,
        ]
    return [*card_released(listing), _instance_table(views), *_instance_failures(views), *waiting]


def card_released(view: Document) -> list[Block]:
    """That loads are refused, where they are."""
    return (
        [Prose(CARD_RELEASED, style=Style.DOUBTFUL)]
        if view.has("released") and view.truth("released")
        else []
    )


PENDING_COLUMNS = (
    Column("WAITING"),
    Column("FOR", right=True),
    Column("AT MOST", right=True),
    Column("WHY", least=20),
)


def pending(listing: Document) -> list[Block]:
    """Loads that wait for room, the next one first; nothing where there are none."""
    waiting = listing.children("pending") if listing.has("pending") else ()
    if not waiting:
        return []
    rows = tuple(
        (
            clean(each.text("name")),
            duration(each.real("waiting_s")),
            duration(each.real("waiting_s") + each.real("remaining_s")),
            clean(each.text("why")),
        )
        for each in waiting
    )
    return ["", Table(PENDING_COLUMNS, rows)]


def status(view: Document, socket_path: str) -> list[Block]:
    """What ``status`` shows."""
    card = view.child("card")
    sleep = view.maybe_child("suspend") if view.has("suspend") else None
    rows = [
        (
            "daemon",
            clean(f"{view.text('version')}, pid {view.whole('pid')}, since {view.text('started')}")
            + clean(f", systemd {view.text('systemd_version')}"),
        ),
        ("socket", clean(socket_path)),
        ("settings", clean(view.text("config_file"))),
        ("models in", clean(view.text("models_dir"))),
        ("card", _card_name(card)),
        ("memory", _card_memory(card)),
        ("engine", _engine(view)),
        ("gateway", _gateway(view)),
    ]
    lines: list[Block] = [*prose_pairs([row for row in rows if row[1]])]
    for owner, problem in (
        ("card", card.maybe_child("problem")),
        ("cards", view.maybe_child("cards_problem") if view.has("cards_problem") else None),
        ("engine", view.maybe_child("engine_problem")),
        ("engine", _engine_problem(view)),
        ("engine", view.maybe_child("engine_choice_problem")),
        ("state", view.maybe_child("state_problem")),
        ("models", view.maybe_child("watch_problem")),
        ("systemd", view.maybe_child("bus_problem")),
        ("D-Bus", view.maybe_child("dbus_problem")),
        ("logs", view.maybe_child("journal_problem")),
        ("history", view.maybe_child("history_problem")),
        ("gateway", _gateway_problem(view, "problem")),
        ("requests", _gateway_problem(view, "records_problem")),
        *(suspend.problems(sleep) if sleep else ()),
    ):
        if problem:
            lines += problem_blocks(problem, owner)
    views = view.children("instances")
    if view.has("running_engines"):
        lines += other_engines(view.children("running_engines"))
    lines.append("")
    lines.append(_instance_table(views) if views else "No model is loaded.")
    lines += [*_instance_failures(views), *pending(view), *wanted.waits(view), *wanted.lines(view)]
    lines += [*units.foreign_units(view), *card_released(view)]
    return [*lines, *(suspend.lines(sleep) if sleep else ())]


def _gateway(view: Document) -> str:
    gateway = view.maybe_child("gateway") if view.has("gateway") else None
    if gateway is None:
        return ""
    address = gateway.maybe_text("address")
    return clean(f"{address}/v1") if address else "off"


def _gateway_problem(view: Document, key: str) -> Document | None:
    gateway = view.maybe_child("gateway") if view.has("gateway") else None
    return gateway.maybe_child(key) if gateway is not None and gateway.has(key) else None


def version(client_version: str, daemon: Document | None) -> list[Block]:
    """What ``version`` shows; the daemon's line is missing when it does not answer."""
    rows = [("lllm3090ctl", clean(client_version))]
    if daemon:
        rows.append(("lllm3090d", clean(f"{daemon.text('version')} (api {daemon.text('api')})")))
    return [pairs(rows)]


def unloaded(answer: Document) -> list[Block]:
    """What ``unload`` shows."""
    name = clean(answer.text("name"))
    if answer.has("waited") and answer.truth("waited"):
        return [Prose(f"The waiting load of {name} was cancelled."), *_not_kept(answer)]
    return [
        Prose(
            f"{name} is unloaded: {mib(answer.whole('released_bytes'))} MiB released"
            f" in {answer.real('elapsed_s'):.1f} s" + stalls.cut_off(answer)
        ),
        *_not_kept(answer),
    ]


def _not_kept(answer: Document) -> list[Block]:
    """That what was asked for does not outlive the daemon, where it does not."""
    problem = answer.maybe_child("problem") if answer.has("problem") else None
    return problem_blocks(problem, "state") if problem else []


def released(answer: Document, command: str) -> list[Block]:
    """What ``release`` shows.

    Args:
        answer: the daemon's.
        command: how this client was called.
    """
    names = answer.texts("names")
    lines: list[Block] = (
        [
            Prose(
                f"{clean(', '.join(names))}: unloaded, {mib(answer.whole('released_bytes'))} MiB released"
                f" in {answer.real('elapsed_s'):.1f} s"
            )
        ]
        if names
        else ["No model was loaded."]
    )
    was_released = answer.has("was_released") and answer.truth("was_released")
    if was_released:
        lines.append(f"The card was released already. Loads stay refused until: {command} resume")
    elif answer.truth("until_resume"):
        lines.append(f"The card is released. Loads are refused until: {command} resume")
    return [*lines, *units.left_alone(answer), *_not_kept(answer)]


def resumed(answer: Document) -> list[Block]:
    """What ``resume`` shows."""
    if answer.truth("was_released"):
        return [
            "The card is no longer released: models can be loaded again, and those that were loaded come back."
        ]
    return ["The card was not released: models could be loaded all the time."]


def pinned(answer: Document) -> list[Block]:
    """What ``pin`` and ``unpin`` show."""
    how = "is pinned until it is unloaded" if answer.truth("pinned") else "is not pinned"
    return [f"{clean(answer.text('name'))} {how}"]


def loaded(line: Document, already: bool = False, pin: bool = False) -> list[Block]:
    """The last line of a successful load.

    Args:
        line: of the stream.
        already: the model was loaded before; nothing was started.
        pin: it was asked for with a pin.
    """
    view = line.child("instance")
    measured = view.maybe_whole("measured_bytes")
    how = "is loaded already" if already else f"is ready after {line.real('elapsed_s'):.1f} s"
    if pin and _is_pinned(view):
        how += ", and is pinned now"
    return [
        Prose(
            f"{clean(view.text('name'))} {how}:"
            f" context {context_text(view)};"
            f" reserved {mib(view.whole('reserved_bytes'))} MiB,"
            f" measured {f'{mib(measured)} MiB' if measured is not None else 'nothing yet'};"
            f" endpoint {clean(view.text('endpoint'))}"
        )
    ]


def admitted(line: Document, name: str) -> str:
    """The line that a load was admitted, with what it will hold."""
    plan_view, instance = line.maybe_child("plan"), line.maybe_child("instance")
    if plan_view:
        return (
            f"{clean(plan_view.text('model'))}: admitted, context {context_text(plan_view)};"
            f" {mib(plan_view.whole('card_bytes'))} of {mib(plan_view.whole('available_bytes'))} MiB"
        )
    if instance:
        return (
            f"{clean(instance.text('name'))}: admitted, context {context_text(instance)};"
            f" reserved {mib(instance.whole('reserved_bytes'))} MiB"
        )
    return f"{clean(name)}: admitted"


def failure(problem: Document) -> list[Block]:
    """A failure: what and why, the arithmetic if it is about memory, what else is known, what to do next.

    Never fails itself: parts that are misshapen are left out.
    """
    blocks: list[Block] = _sentences(_problem_text(problem))
    try:
        details = problem.maybe_child("details")
        if details and refusal.is_refusal(details):
            return refusal.page(problem, details)
        if details:
            told = " ".join(str(problem.members.get(key)) for key in ("detail", "hint"))
            blocks += _ledger(details) + _listings(details, told)
    except Failure:
        # The daemon is of another version; what can be read without the details is still worth showing.
        blocks = _sentences(_problem_text(problem))
    hint = problem.members.get("hint")
    if isinstance(hint, str):
        blocks += [""] if any(not isinstance(block, Prose) for block in blocks) else []
        blocks += _hint(hint)
    return blocks


def _sentences(text: str, lead: str = "") -> list[Block]:
    return [Prose(line, "" if i else lead) for i, line in enumerate(text.split("\n"))]


def _hint(text: str, indent: str = "") -> list[Block]:
    lead = f"{indent}Hint: "
    return [Prose(clean(line), " " * len(lead) if i else lead) for i, line in enumerate(text.splitlines())]


ITEM_COLUMNS = (
    Column("ITEM"),
    Column("MIB", right=True),
    Column("PLACE"),
    Column("EVIDENCE"),
    Column("FORMULA", least=24),
)
BUDGET_COLUMNS = (Column("BUDGET"), Column("MIB", right=True), Column("ORIGIN", least=24))


def sum_row(size_bytes: int, on_host: bool) -> tuple[str, ...]:
    """The last row of a quote."""
    return ("sum" if on_host else "sum on the card", mib(size_bytes), "", "", "")


def item_rows(items: Sequence[Document], on_host: bool) -> list[tuple[str, ...]]:
    """Rows of a quote; where host memory takes the card's place, nothing is said to be on a card."""
    return [
        (
            clean(item.text("name")),
            mib(item.whole("bytes")),
            "memory" if on_host else clean(item.text("place")),
            clean(item.text("evidence")),
            clean(item.text("formula")),
        )
        for item in items
    ]


def budget_rows(lines: Sequence[Document], available_bytes: int) -> list[tuple[str, ...]]:
    """Rows of a budget, with what is left."""
    rows = [
        (clean(line.text("name")), _signed(line.whole("bytes")), clean(line.text("origin")))
        for line in lines
    ]
    return [*rows, ("available", mib(available_bytes), "")]


def _signed(size_bytes: int) -> str:
    return f"+{mib(size_bytes)}" if size_bytes > 0 else mib(size_bytes)


def _ledger(details: Document) -> list[Block]:
    """Needed, available and missing, when the details carry the items or the budget of a plan."""
    if not details.has("items") and not details.has("budget"):
        return []
    blocks: list[Block] = []
    needed = details.maybe_whole("card_bytes")
    if details.has("items"):
        items = details.children("items")
        needed = sum(item.whole("bytes") for item in items if item.text("place") == ON_CARD)
        on_host = details.maybe_text("card_kind") == HOST_KIND
        needs = (*item_rows(items, on_host), sum_row(needed, on_host))
        blocks += ["", Table(ITEM_COLUMNS, needs)]
    available = details.maybe_whole("available_bytes")
    if available is None:
        available = details.maybe_whole("grantable_bytes")
    if details.has("budget"):
        budget = details.children("budget")
        if available is None:
            available = sum(line.whole("bytes") for line in budget)
        blocks += ["", Table(BUDGET_COLUMNS, tuple(budget_rows(budget, available)))]
    if needed is not None and available is not None:
        rows = [("needed", mib(needed)), ("available", mib(available))]
        if needed > available:
            rows.append(("missing", mib_up(needed - available)))
        width = max(len(figure) for _, figure in rows)
        blocks += ["", pairs([(label, f"{figure.rjust(width)} MiB") for label, figure in rows])]
    return blocks


def _listings(details: Document, said: str) -> list[Block]:
    """Details that are lists of strings, such as the engine's last lines, unless message and hint say them all."""
    blocks: list[Block] = []
    for key, value in details.members.items():
        if (
            key == FOR_PROGRAMS
            or not isinstance(value, list)
            or not all(isinstance(each, str) for each in value)
        ):
            continue
        if not all(each in said for each in value):
            blocks.append(f"{clean(key).replace('_', ' ')}:")
            blocks += [f"  {clean(each, keep=chr(9))}" for each in value[-MOST_LISTED:]]
    return blocks


def _problem_text(problem: Document) -> str:
    """Title and detail; the title is left out where the detail says all of it already."""
    title, detail = (
        value if isinstance(value := problem.members.get(key), str) else "" for key in ("title", "detail")
    )
    # How an engine ended says that it did.
    is_ending = problem.members.get("code") == ENGINE_FAILED and detail.startswith("the engine ")
    is_told = is_ending or set(_words(title)) <= set(_words(detail))
    parts = [detail] if is_told else [part for part in (title, detail) if part]
    return clean(": ".join(parts), keep="\n") or "unknown failure"


def _words(text: str) -> list[str]:
    return [word.strip(".,:;!") for word in text.lower().split()]


def problem_blocks(problem: Document, owner: str = "", *, told: str = "") -> list[Block]:
    """What happened, and the hint below it, for a failure among others.

    Args:
        problem: any.
        owner: what it is of.
        told: what is advised elsewhere, and not said again.
    """
    blocks: list[Block] = [Prose(clean((f"{owner}: " if owner else "") + _problem_text(problem)))]
    hint, details = problem.members.get("hint"), problem.members.get("details")
    if isinstance(hint, str):
        advice = details.get("advice") if isinstance(details, dict) else None
        if isinstance(advice, str) and advice and advice in told:
            hint = hint.replace(advice, "").strip()
        blocks += _hint(hint, "  ")
    return blocks


def context_text(view: Document) -> str:
    """Context, slots and cache of a plan or an instance."""
    context_tokens, window_tokens = view.whole("context_tokens"), view.whole("window_tokens")
    slots = view.whole("parallel")
    # An instance does not tell that its slots share one pool, but then each may have all of it.
    shared = view.truth("unified") if view.has("unified") else context_tokens == window_tokens
    if slots == 1:
        shape = "1 slot"
    elif not shared:
        shape = f"{slots} slots of {window_tokens:,}"
    elif context_tokens == window_tokens:
        shape = f"{slots} slots sharing {context_tokens:,}"
    else:
        shape = f"{slots} slots sharing {context_tokens:,} with at most {window_tokens:,} each"
    key, value = view.text("cache_type_k"), view.text("cache_type_v")
    cache = key if key == value else f"{key}/{value}"
    trained = view.maybe_whole("trained_context_tokens")
    suffix = f", trained for {trained:,}" if trained is not None else ""
    return clean(f"{count(context_tokens, 'token')} ({shape}, {cache} cache{suffix})")


def _instance_table(views: Sequence[Document]) -> Table:
    columns = (
        Column("NAME"),
        Column("STATE"),
        Column("USE", drop=5),
        Column("CONTEXT", right=True, drop=6),
        Column("SLOTS", right=True, drop=3),
        Column("RESERVED", right=True),
        Column("MEASURED", right=True, drop=4),
        Column("PID", right=True, drop=2),
        Column("UNIT", drop=1),
    )
    rows = []
    for view in views:
        measured = view.maybe_whole("measured_bytes")
        rows.append(
            (
                clean(view.text("name")),
                clean(view.text("state"))
                + serves(view)
                + (", pinned" if _is_pinned(view) else "")
                + (", at risk" if view.has("at_risk") else "")
                + (", reconstructed" if view.has("reconstructed") else ""),
                _use(view),
                f"{view.whole('context_tokens'):,}",
                str(view.whole("parallel")),
                f"{mib(view.whole('reserved_bytes'))} MiB",
                f"{mib(measured)} MiB" if measured is not None else "-",
                str(view.maybe_whole("main_pid") or "-"),
                clean(view.text("unit")),
            )
        )
    return Table(columns, tuple(rows))


def serves(view: Document) -> str:
    """What a model serves where that is not the usual: text."""
    purpose = view.maybe_text("purpose")
    return "" if purpose in {None, USUAL_PURPOSE} else f", {clean(str(purpose))}"


def _is_pinned(view: Document) -> bool:
    return view.has("pinned") and view.truth("pinned")


def _use(view: Document) -> str:
    """Whether a model is at work, and else since when it has not been; a dash where nobody tells."""
    doing = stalls.use(view)
    if doing:
        return doing
    if view.has("busy") and view.truth("busy"):
        return "busy"
    return f"idle {duration(view.real('idle_s'))}" if view.has("idle_s") else "-"


def _instance_failures(views: Sequence[Document]) -> list[Block]:
    lines: list[Block] = [*units.notes(views)]
    for view in views:
        problem = view.maybe_child("failure")
        if problem:
            told = (view.maybe_text("way_out") or "") if view.text("state") == "latched" else ""
            lines += problem_blocks(problem, view.text("name"), told=told)
        if view.has("at_risk"):
            lines.append(Prose(clean(f"{view.text('name')} is at risk: {view.text('at_risk')}")))
        lines += comebacks.lines(view)
        lines += stalls.lines(view)
    return lines


def _card_name(card: Document) -> str:
    driver = card.maybe_text("driver_version")
    return clean(card.text("name") + (f" (driver {driver})" if driver else ""))


def _card_memory(card: Document) -> str:
    """The figures in MiB; what the driver does not tell is left out, never shown as 0."""
    driver_keeps = None if card.text("kind") == HOST_KIND else card.maybe_whole("reserved_by_driver_bytes")
    figures = (
        ("total", card.maybe_whole("total_bytes")),
        ("used", card.maybe_whole("used_bytes")),
        ("free", card.maybe_whole("free_bytes")),
        ("kept by the driver", driver_keeps),
        ("reserved for models", card.whole("reserved_by_us_bytes")),
        ("available", card.maybe_whole("available_bytes")),
    )
    return "MiB: " + ", ".join(f"{label} {mib(figure)}" for label, figure in figures if figure is not None)


def _engine(view: Document) -> str:
    engine = view.maybe_child("engine")
    if engine is None:
        return "none"
    facts = [
        engine.maybe_text("version") or "version unknown",
        engine.maybe_text("backend") or "backend unknown",
    ]
    facts += engine.texts("devices")
    if engine.has("stale") and engine.truth("stale"):
        facts.append(f"stale: {engine.text('tag')}")
    how = ", locked" if engine.truth("locked") else ""
    if not how and engine.has("name") and view.maybe_text("engine_choice") == engine.text("name"):
        how = ", chosen"
    facts.append(f"from {engine.text('source')}{how}")
    return clean(f"{engine.text('server')} ({'; '.join(facts)})")


def other_engines(running: Sequence[Document]) -> list[Block]:
    """Models that run with another engine than the next start would use."""
    return [
        Prose(
            clean(
                f"{each.text('model')} runs with another engine,"
                f" {each.maybe_text('server') or 'of an older release'} ({each.text('version')}),"
                " until it is loaded again."
            )
        )
        for each in running
        if not each.truth("is_next")
    ]


def _engine_problem(view: Document) -> Document | None:
    engine = view.maybe_child("engine")
    return engine.maybe_child("problem") if engine else None
