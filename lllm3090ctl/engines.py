"""Engines as text for a person: the list of builds, one build with its options, a choice. Pure."""

from __future__ import annotations

from lllm3090ctl.documents import Document
from lllm3090ctl.render import other_engines, problem_blocks
from lllm3090ctl.text import Block, Column, Table, clean, pairs

COLUMNS = (
    Column("NAME"),
    Column("VERSION", drop=1),
    Column("RELEASE"),
    Column("BACKEND"),
    Column("USE"),
)
OPTION_COLUMNS = (
    Column("OPTION", least=24),
    Column("VALUE", least=18),
    Column("DEFAULT", least=8),
    Column("ALLOWED", least=12),
)
NEVER = "never"
CODE_FITS = {
    NEVER: "no code for a card of this machine, so loads on it are refused",
    "maybe": "it runs on a card of this machine only if it holds PTX, which its name does not tell",
}
LOCKED = "LLLM3090_LLAMA_DIR is set in the daemon's environment: it decides on the engine, and nothing can be chosen."


def engines(listing: Document) -> list[Block]:
    """What ``engine list`` shows: the builds, the choice, what runs with another one, and what is wrong."""
    views = listing.children("engines")
    blocks: list[Block] = [Table(COLUMNS, tuple(_row(view) for view in views))] if views else []
    blocks += [clean(f"{view.text('name')}: {view.text('server')}") for view in views]
    blocks += _situation(listing)
    blocks += [
        clean(f"{view.text('name')} was compiled for {_compiled_for(view)}.")
        for view in views
        if view.has("code_fit") and view.text("code_fit") in CODE_FITS
    ]
    for view in views:
        if problem := _problem(view):
            blocks += problem_blocks(problem, view.text("name"))
    return blocks


def selected(listing: Document) -> list[Block]:
    """What ``engine select`` shows."""
    return _situation(listing)


def details(view: Document) -> list[Block]:
    """What ``engine show`` shows."""
    engine = view.child("engine")
    digest_problem = view.maybe_child("digest_problem")
    rows = [
        ("name", engine.text("name")),
        ("use", _use(engine)),
        ("server", engine.text("server")),
        ("found by", engine.text("source")),
        ("version", engine.maybe_text("version") or "unknown"),
        ("release", _release(engine)),
        ("compiled for", _compiled_for(engine)),
        ("backend", engine.maybe_text("backend") or "unknown"),
        ("devices", ", ".join(engine.texts("devices")) or "none"),
        ("libraries", ", ".join(view.texts("library_path"))),
        ("digest", view.maybe_text("digest") or ""),
        ("dry runs", view.maybe_text("dry_run_program") if engine.truth("dry_run") else "no"),
    ]
    blocks: list[Block] = [pairs([(label, clean(value)) for label, value in rows if value])]
    for problem in (_problem(engine), digest_problem):
        if problem:
            blocks += problem_blocks(problem)
    options = view.children("options")
    if options:
        blocks += ["", Table(OPTION_COLUMNS, tuple(_option(option) for option in options))]
    return blocks


def _situation(listing: Document) -> list[Block]:
    following = listing.maybe_text("next")
    choice = listing.maybe_text("choice")
    locked = listing.truth("locked")
    blocks: list[Block] = []
    if locked:
        blocks.append(LOCKED)
    elif listing.has("choice_problem"):
        blocks += problem_blocks(listing.child("choice_problem"))
    if following is None:
        problem = listing.maybe_child("next_problem")
        blocks += problem_blocks(problem) if problem else ["No engine can be used."]
    else:
        how = "locked" if locked else "chosen" if choice == following else "automatic"
        blocks.append(clean(f"The next start uses {following} ({how})."))
    blocks += other_engines(listing.children("running"))
    return blocks


def _row(view: Document) -> tuple[str, ...]:
    return tuple(
        clean(cell)
        for cell in (
            view.text("name"),
            view.maybe_text("version") or "-",
            _release(view),
            view.maybe_text("backend") or "unknown",
            _use(view),
        )
    )


def _release(view: Document) -> str:
    tag = view.maybe_text("tag")
    if tag is None:
        return "-"
    return f"{tag}, stale" if view.has("stale") and view.truth("stale") else tag


def _compiled_for(view: Document) -> str:
    """The architecture in its name, and what that means here."""
    architecture = view.maybe_text("gpu_architecture") or ""
    said = CODE_FITS.get((view.maybe_text("code_fit") if view.has("code_fit") else None) or "")
    return f"{architecture}: {said}" if architecture and said else architecture


def _use(view: Document) -> str:
    if view.has("problem"):
        return "unusable"
    if view.has("code_fit") and view.text("code_fit") == NEVER:
        return "next, cannot run here" if view.truth("next") else "cannot run here"
    if view.truth("next"):
        return "next"
    return "offered" if view.truth("offered") else "not offered"


def _option(option: Document) -> tuple[str, ...]:
    return (
        clean(", ".join(option.texts("names"))),
        clean(option.maybe_text("value") or ""),
        clean(option.maybe_text("default") or ""),
        clean(", ".join(option.texts("allowed"))),
    )


def _problem(view: Document) -> Document | None:
    return view.maybe_child("problem")
