"""Plans as text for a person: the answer, its ledger, and what else could be had. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from lllm3090ctl.documents import Document
from lllm3090ctl.render import (
    BUDGET_COLUMNS,
    HOST_KIND,
    ITEM_COLUMNS,
    budget_rows,
    context_text,
    item_rows,
    sum_row,
)
from lllm3090ctl.text import Block, Column, Table, clean, count, mib, mib_up, pairs, size

SHORT_ITEM_COLUMNS = ITEM_COLUMNS[:-1]
SHORT_BUDGET_COLUMNS = BUDGET_COLUMNS[:-1]
PART_COLUMNS = (
    Column("CARD"),
    Column("NAME", least=16),
    Column("LAYERS", right=True),
    Column("MIB", right=True),
)
MEASURED = "measured"
OTHER_CARD = "other card"
BACKENDS = {
    "vulkan": "Vulkan",
    "cuda": "CUDA",
    "rocm": "ROCm",
    "sycl": "SYCL",
    "metal": "Metal",
    "cpu": "CPU",
}
# How the daemon names the run of a plan, which never starts.
NO_RUN = "-00000000."
# What goes without saying (chat) is left out.
PURPOSES = {"embedding": "vectors (/v1/embeddings)", "rerank": "scores of texts (/v1/rerank)"}
MODEL = "model"
CAPABILITY = "capability"
VERDICTS = {
    "ok": "an agent can work in its window",
    "tight": "too small a window for an agent",
    "too-big": "it does not fit",
    CAPABILITY: "the card cannot compute it",
}


def plan(view: Document, explain: bool = False) -> list[Block]:
    """The ledger of a plan: what it gives, price, budget, whether it fits, command line.

    Args:
        view: the answer of the daemon.
        explain: with the formula and origin of each line, and the alternatives.
    """
    card_bytes, available_bytes = view.whole("card_bytes"), view.whole("available_bytes")
    on_host = view.maybe_text("card_kind") == HOST_KIND
    price = [*item_rows(view.children("items"), on_host), sum_row(card_bytes, on_host)]
    host_bytes = view.whole("host_bytes")
    if host_bytes and not on_host:
        price.append(("sum in host memory", mib(host_bytes), "", "", ""))
    budget = budget_rows(view.children("budget"), available_bytes)
    items_table = (
        Table(ITEM_COLUMNS, tuple(price))
        if explain
        else Table(SHORT_ITEM_COLUMNS, tuple(row[:-1] for row in price))
    )
    budget_table = (
        Table(BUDGET_COLUMNS, tuple(budget))
        if explain
        else Table(SHORT_BUDGET_COLUMNS, tuple(row[:-1] for row in budget))
    )
    blocks: list[Block] = []
    if view.has("download"):
        blocks += ["A preview: this model is not on disk.", ""]
    blocks += [
        pairs([(label, clean(value)) for label, value in _head(view) if value]),
        "",
        items_table,
        "",
        budget_table,
        "",
        *_on_cards(view),
        _outcome(view, card_bytes, available_bytes),
    ]
    notes = view.texts("notes") if view.has("notes") else ()
    blocks += [clean(f"Note: {note.rstrip('.')}.") for note in notes]
    blocks += list(_advice(view, explain))
    if explain:
        blocks += list(_alternatives(view, on_host))
        blocks += list(_ways(view))
    checked = view.maybe_child("engine_check")
    if checked:
        blocks += ["", "The engine's dry run, for the main context: " + clean(checked.text("text")) + "."]
        for name, lines in (("ours", checked.texts("ours")), ("the engine's", checked.texts("engine"))):
            blocks += [f"  {name}: {clean(line)}" for line in lines]
    argv = view.texts("argv")
    if argv:
        blocks += ["", "The engine's command line:", clean(shlex.join([*_variables(view), *argv]))]
        if any(NO_RUN in argument for argument in argv):
            blocks.append(
                "(The zeros in the name of the socket stand for the run: each start gets a number of its own.)"
            )
    return blocks


def _variables(view: Document) -> tuple[str, ...]:
    """What keeps the engine to its cards."""
    return tuple(view.texts("environment")) if view.has("environment") else ()


def _on_cards(view: Document) -> list[Block]:
    """On which of several cards it is, the layers and bytes of each."""
    parts = view.children("cards") if view.has("cards") else ()
    rows = []
    for part in parts:
        layers = part.maybe_whole("layers")
        rows.append(
            (
                part.text("name"),
                clean(part.text("card")),
                "all" if layers is None else str(layers),
                mib(part.whole("bytes")),
            )
        )
    return [Table(PART_COLUMNS, tuple(rows)), ""] if rows else []


def succeeds(view: Document) -> bool:
    """A load would succeed: it fits, and the card can compute it."""
    return view.truth("fits") and view.maybe_text("verdict") != CAPABILITY


def card_line(card: Document) -> str:
    """The card that plans are made for, in a line."""
    name, backend, memory = card.text("name"), card.text("backend"), size(card.whole("total_bytes"))
    what = [name, backend] if "GiB" in name else [name, memory, backend]  # some are named by their memory
    if card.truth("empty"):
        what.append("with nothing on it" + _desktop(card, backend))
    return clean(", ".join(what))


def _desktop(card: Document, backend: str) -> str:
    if card.has("desktop"):
        return " but a desktop" if card.truth("desktop") else " and no desktop"
    return "" if backend == HOST_KIND else " but a desktop, which is assumed"


def card_title(card_id: str) -> str:
    """A card of the catalogue as a person writes it: ``RTX 3090``."""
    return card_id.replace("-", " ").upper()


def backend_title(backend: str) -> str:
    """A backend as it writes itself."""
    return BACKENDS.get(backend, backend)


def differences(speed: Document) -> tuple[str, ...]:
    """What differs here from where a speed was measured: ``card``, ``backend``, both, or nothing."""
    parts = speed.text("qualifier").split(", ")
    known = {OTHER_CARD: "card", f"{MEASURED} on {speed.text('backend')}": "backend", MEASURED: ""}
    return tuple(told for part in parts if (told := known.get(part, part)))


def speed_text(view: Document) -> str:
    """A speed with what differs here, and where it was measured; empty where none was."""
    speed = view.maybe_child("speed")
    if speed is None:
        return ""
    differs, drafting = differences(speed), speed.text("speculation")
    where = [
        card_title(speed.text("card")),
        backend_title(speed.text("backend")),
        "no drafting" if drafting == "none" else f"drafting ({drafting})",
        *(part for part in (speed.maybe_text("workload"), speed.maybe_text("build")) if part),
    ]
    figure = f"{speed.real('tokens_per_s'):g} tokens/s" + (
        f" (other {' and '.join(differs)})" if differs else ""
    )
    return f"{figure}; measured: {', '.join(where)}"


def _head(view: Document) -> Iterator[tuple[str, str]]:
    """What the plan is and gives; empty values are left out."""
    yield "model", view.text("model")
    badges = " ".join(view.texts("badges") if view.has("badges") else ())
    kind = (view.maybe_text("architecture"), badges, view.maybe_text("quantisation"))
    yield "kind", ", ".join(part for part in kind if part)
    yield "file", view.maybe_text("path") or ""
    download = view.maybe_child("download")
    if download:
        files = [f"{download.text('file')} ({size(download.whole('file_bytes'))})"]
        if download.has("projector_file"):
            files.append(f"{download.text('projector_file')} ({size(download.whole('projector_bytes'))})")
        yield "download", f"{download.text('repository')}: {', '.join(files)}"
    card = view.maybe_child("card")
    yield "card", card_line(card) if card else ""
    verdict = view.maybe_text("verdict") or ""
    known = VERDICTS | ({"ok": "it fits"} if view.maybe_text("purpose") in PURPOSES else {})
    yield "verdict", f"{verdict}: {known[verdict]}" if verdict in known else verdict
    yield "context", context_text(view)
    limit = view.maybe_child("limit")
    yield "limited by", limit.text("text") if limit else view.text("capped_by")
    yield from _launch(view)
    agent = view.maybe_child("agent")
    if agent and agent.truth("ready") and view.whole("parallel") > 1:
        yield "subagents", f"{agent.whole('concurrent_subagents')} at a time"
    yield "speed", speed_text(view)
    yield "evidence", view.maybe_text("evidence") or ""


def _launch(view: Document) -> Iterator[tuple[str, str]]:
    """What of the launch is not as usual."""
    placement = view.maybe_child("placement")
    if placement:
        parts = []
        if placement.has("layers_on_card"):
            parts.append(_layers(placement.whole("layers_on_card")))
        if placement.whole("expert_layers_on_host"):
            parts.append(
                f"experts of {count(placement.whole('expert_layers_on_host'), 'layer')} in host memory"
            )
        if placement.truth("cache_on_host"):
            parts.append("cache in host memory")
        yield "placement", ", ".join(parts)
    tier = view.maybe_child("tier")
    if tier:
        yield (
            "tier",
            f"{tier.whole('card_tokens'):,} tokens on the card,"
            f" the others in {mib(tier.whole('host_bytes'))} MiB of pinned host memory",
        )
        yield "tier speed", _tier_speed(tier)
    draft = view.maybe_child("draft")
    if draft:
        key, value = draft.text("cache_type_k"), draft.text("cache_type_v")
        cache = key if key == value else f"{key}/{value}"
        yield "drafting", f"{draft.text('spec_type')}, {draft.whole('tokens')} tokens, {cache} cache"
    purpose = view.maybe_text("purpose")
    if purpose in PURPOSES:
        yield "serves", PURPOSES[purpose]
    projector = view.maybe_text("projector")
    yield (
        "projector",
        {"card": "on the card", "host": "in host memory"}.get(projector or "", projector or ""),
    )
    rope = view.maybe_child("rope")
    if rope:
        stretched = f"from {rope.whole('original_tokens'):,} to {rope.whole('window_tokens'):,} tokens"
        yield "rope", f"{rope.text('scaling')} x {rope.real('factor'):g}, {stretched}"


def _tier_speed(tier: Document) -> str:
    """What is predicted beyond the line, and from what; why nothing is."""
    rests_on = (tier.maybe_text("speed") if tier.has("speed") else None) or ""
    if not tier.has("end_tokens_per_s"):
        return rests_on
    figures = f"{tier.real('end_tokens_per_s'):.1f} tokens/s with the whole context in use"
    if tier.has("half_tokens_per_s"):
        figures += f", {tier.real('half_tokens_per_s'):.1f} with half of it"
    return f"{figures}. {rests_on}" if rests_on else figures


def _layers(on_card: int) -> str:
    """What is on the card of as many layers, of which the output counts as one and is the first to be there."""
    if on_card <= 1:
        return "the output on the card" if on_card else "no layers on the card"
    return f"{count(on_card - 1, 'layer')} and the output on the card"


def _outcome(view: Document, card_bytes: int, available_bytes: int) -> str:
    if not view.truth("fits"):
        if card_bytes > available_bytes:
            return f"It does not fit: {mib_up(card_bytes - available_bytes)} MiB are missing."
        return "It does not fit."
    spare = f"It fits, with {mib(available_bytes - card_bytes)} MiB to spare"
    return f"{spare}, but the card cannot compute it." if not succeeds(view) else f"{spare}."


def _advice(view: Document, explain: bool) -> Iterator[Block]:
    """What an agent needs, where this plan does not give it, or soon will not."""
    agent = view.maybe_child("agent")
    if agent:
        yield from (clean(remark) for remark in agent.texts("remarks"))
    smallest = view.maybe_child("smallest_card")
    if smallest and agent and not agent.truth("ready") and not explain:
        window = count(smallest.whole("window_tokens"), "token")
        yield f"For an agent it needs a card of {smallest.whole('gib')} GiB, which holds {window} in one slot."


def _alternatives(view: Document, on_host: bool) -> Iterator[Block]:
    smallest, agent, limit = (view.maybe_child(key) for key in ("smallest_card", "agent", "limit"))
    if smallest:
        yield (
            f"Smallest card for an agent: {smallest.whole('gib')} GiB ({mib(smallest.whole('total_bytes'))} MiB"
            f" for {count(smallest.whole('window_tokens'), 'token')} in one slot, evidence"
            f" {clean(smallest.text('evidence'))})."
        )
    elif agent and not agent.truth("ready") and limit and limit.text("by") == MODEL:
        trained = count(view.whole("trained_context_tokens"), "token")
        yield f"Smallest card for an agent: no card helps, as the model is trained for {trained}."
    others = view.children("alternatives") if view.has("alternatives") else ()
    if others:
        yield ""
        columns = (
            Column("ASK"),
            Column("PLAN"),
            Column("IN MEMORY" if on_host else "ON THE CARD", right=True),
            Column("DIFFERENCE", least=24),
        )
        yield Table(columns, tuple(map(_alternative_row, others)))


def _ways(view: Document) -> Iterator[Block]:
    """The ways to have a context that does not fit on the card, the best first."""
    tier = view.maybe_child("tier")
    ways = tier.children("ways") if tier and tier.has("ways") else ()
    if not ways:
        return
    yield ""
    columns = (
        Column("WAY"),
        Column("CONTEXT", right=True),
        Column("ON THE CARD", right=True),
        Column("TOKENS/S AT ITS END", right=True),
        Column("WHY", least=24),
    )
    yield Table(columns, tuple(map(_way_row, ways)))


def _way_row(way: Document) -> tuple[str, ...]:
    end = f"{way.real('end_tokens_per_s'):.1f}" if way.has("end_tokens_per_s") else "not predicted"
    context = way.whole("context_tokens")
    return (
        clean(f"{way.text('way')}, {way.text('cache_type')}"),
        f"{context:,}",
        f"{way.whole('card_tokens') or context:,}" if way.truth("fits") else "-",
        end if way.truth("fits") else "cannot be had",
        clean(" ".join(way.texts("reasons"))),
    )


def _alternative_row(other: Document) -> tuple[str, ...]:
    return (
        clean(other.text("ask")),
        f"{other.whole('parallel')} x {other.whole('window_tokens'):,}",
        f"{mib(other.whole('card_bytes'))} MiB",
        clean(other.text("gain")),
    )
