"""Checkpoints as text for a person: the list of models, and one file layer by layer. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from lllm3090ctl.documents import Document
from lllm3090ctl.plans import backend_title, card_line, card_title, differences
from lllm3090ctl.render import problem_blocks, serves
from lllm3090ctl.text import Block, Column, Prose, Table, clean, mib, pairs, size

MAP_COLUMNS = 32
INCOMPLETE = "incomplete_checkpoint"
DRY_RUN = "dry-run"  # verdict
MODEL = "model"
# Kind of layer -> its character in the map. A layer with attention and a state is BOTH; MTP is lower case.
CHARACTERS = {"full": "F", "sliding": "S", "latent": "L", "recurrent": "R", "shared": "=", "none": "-"}
BOTH = "B"
UNKNOWN = "?"
LEGEND = {
    "F": "full attention",
    "S": "sliding window",
    "L": "latent attention",
    "R": "recurrent state",
    BOTH: "attention and recurrent state",
    "=": "shares an earlier layer's cache",
    "-": "keeps no context",
    UNKNOWN: "of a kind this client does not know",
}
MODEL_COLUMNS = (
    Column("NAME"),
    Column("KIND"),
    Column("SIZE", right=True, drop=7),
    Column("ARCH", drop=4),
    Column("QUANT"),
    Column("CONTEXT", right=True, drop=6),
    Column("B/TOKEN", right=True, drop=3),
    Column("SLOT", right=True, drop=2),
    Column("VERDICT"),
    Column("PLAN", right=True, drop=8),
    Column("TOKENS/S", drop=5),
    Column("EVIDENCE", drop=1),
    Column("STATE"),
)


def models(listing: Document) -> list[Block]:
    """What ``models`` shows: the checkpoints, what accompanies them, and why some cannot be loaded."""
    directory = clean(listing.text("models_dir"))
    views = listing.children("models")
    if not views:
        return [
            f"There are no models in {directory}.",
            "Put each model into a directory of its own there: " + f"{directory}/NAME/NAME.gguf",
            *_troubles(listing),
        ]
    blocks: list[Block] = [Table(MODEL_COLUMNS, tuple(map(_model_row, views)))]
    for view in views:
        name = clean(view.text("name"))
        companions = [
            f"{role} {clean(path.rsplit('/', 1)[-1])}"
            for role in ("projector", "drafter")
            if (path := view.maybe_text(role))
        ]
        if companions:
            blocks.append(Prose(f"{name}: with {', '.join(companions)}"))
        download = view.maybe_child("download")
        if download:
            files = [download.text("file"), download.maybe_text("projector_file") or ""]
            where = f"{download.text('repository')}, {', '.join(filter(None, files))}"
            blocks.append(Prose(f"{name}: to be had from {clean(where)}"))
        if view.maybe_text("verdict") == DRY_RUN:
            blocks.append(
                Prose(f"{name}: no rule prices it; `lllm3090ctl plan` asks the engine, by a dry run")
            )
        for key in ("problem", "plan_problem"):
            problem = view.maybe_child(key)
            if problem:
                blocks += problem_blocks(problem, view.text("name"))
    speeds = [speed for view in views if (speed := view.maybe_child("speed"))]
    if speeds:
        places = dict.fromkeys(map(_measured_on, speeds))
        blocks.append(Prose(f"TOKENS/S were measured on {', or on '.join(places)}, and are never scaled."))
    card = listing.maybe_child("planned_for")
    if card:
        blocks.append(Prose(f"VERDICT and PLAN are for {card_line(card)}; loaded models are not counted."))
    return [*blocks, *_troubles(listing)]


def _troubles(listing: Document) -> list[Block]:
    """What is wrong with the list as a whole."""
    problems = (listing.maybe_child(key) for key in ("plan_problem", "catalogue_problem", "watch_problem"))
    return [block for problem in problems if problem for block in problem_blocks(problem)]


def inspection(view: Document) -> list[Block]:
    """What ``inspect`` shows: facts, bytes by place, price of the context, map of the layers."""
    files = view.whole("shards")
    rows = [
        ("file", clean(view.text("path"))),
        ("model", clean(view.maybe_text("name") or "")),
        ("title", clean(view.maybe_text("title") or "")),
        ("kind", clean(_kind(view, whole=True))),
        ("architecture", clean(view.maybe_text("architecture") or "unknown")),
        ("quantisation", clean(view.maybe_text("quantisation") or "unknown")),
        ("size", size(view.whole("size_bytes")) + (_of_files(view, files) if files > 1 else "")),
        ("tensors", f"{view.whole('tensor_count'):,}, {size(view.whole('weight_bytes'))}"),
        ("reasoning", clean(", ".join(view.texts("reasoning") if view.has("reasoning") else ()))),
        ("trained for", _number(view, "trained_context_tokens", " tokens")),
        ("rope", clean(_rope(view.maybe_child("rope")))),
        ("vocabulary", _number(view, "vocabulary_size", " tokens")),
        ("embedding", _number(view, "embedding_length", " values")),
        ("layers", _number(view, "block_count")),
        ("experts", _experts(view)),
        ("window", _number(view, "sliding_window_tokens", " tokens in sliding layers")),
        *(("heads", line) for line in _heads(view.children("layers"))),
        ("projector", clean(view.maybe_text("projector") or "")),
        *((label, clean(line)) for label, line in _senses(view.maybe_child("projector_facts"))),
        ("drafter", clean(view.maybe_text("drafter") or "")),
    ]
    blocks: list[Block] = [pairs([row for row in rows if row[1]])]
    weights = [weight for weight in view.children("weights") if weight.whole("bytes")]
    if weights:
        blocks += ["", Table(WEIGHT_COLUMNS, tuple(_weight_rows(view, weights)))]
    costs = _costs(view)
    if costs:
        blocks += ["", pairs(costs)]
    layers = view.children("layers")
    if layers:
        blocks += ["", *_map(layers)]
    problem = view.maybe_child("problem")
    if problem:
        blocks += ["", *problem_blocks(problem, "It cannot be planned")]
    reason = view.maybe_text("dry_run_reason")
    if reason:
        told = f"No rule prices it ({clean(reason)}): plan and load ask the engine, by a dry run."
        blocks += ["", told]
    return blocks


WEIGHT_COLUMNS = (Column("WEIGHTS"), Column("MIB", right=True))


def _model_row(view: Document) -> tuple[str, ...]:
    slot_bytes = view.maybe_whole("state_bytes_per_slot")
    return (
        clean(view.text("name")),
        clean(_kind(view)) or "-",
        size(view.whole("size_bytes")),
        clean(view.maybe_text("architecture") or "-"),
        clean(view.maybe_text("quantisation") or "-"),
        f"{view.maybe_whole('trained_context_tokens') or 0:,}"
        if view.has("trained_context_tokens")
        else "-",
        _price(view, "kv_bytes_per_token"),
        f"{mib(slot_bytes)} MiB" if slot_bytes else "-",
        clean(view.maybe_text("verdict") or "-"),
        _plan(view),
        _speed(view),
        clean(view.maybe_text("evidence") or "-"),
        _state(view),
    )


def _plan(view: Document) -> str:
    """Slots x window."""
    slots, window = view.maybe_whole("parallel"), view.maybe_whole("window_tokens")
    return f"{slots} x {window:,}" if slots and window else "-"


def _speed(view: Document) -> str:
    """A measured speed with what differs most here; it is never shown without. The backend stands below the table."""
    speed = view.maybe_child("speed")
    if speed is None:
        return "-"
    differs = differences(speed)
    return clean(f"{speed.real('tokens_per_s'):g} ({f'other {differs[0]}' if differs else 'measured'})")


def _measured_on(speed: Document) -> str:
    return clean(f"{card_title(speed.text('card'))} with {backend_title(speed.text('backend'))}")


def _of_files(view: Document, files: int) -> str:
    """Where some are missing, the size is that of the file that was asked for."""
    problem = view.maybe_child("problem")
    details = problem.maybe_child("details") if problem else None
    return f", one of {files} files" if details and details.has("missing") else f" in {files} files"


def _state(view: Document) -> str:
    if view.has("on_disk") and not view.truth("on_disk"):
        return "download"
    problem = view.maybe_child("problem")
    if not problem:
        return clean(view.maybe_text("state") or "-") + serves(view)
    unusable = "incomplete" if problem.members.get("code") == INCOMPLETE else "unusable"
    return clean(view.maybe_text("state") or unusable)


def _kind(view: Document, whole: bool = False) -> str:
    """Kind and badges; a model's kind goes without saying among models."""
    kind, method = view.maybe_text("kind") or "", view.maybe_text("draft_method")
    badges = view.texts("badges") if view.has("badges") else ()
    words = [kind] if whole or kind != MODEL else []
    if method:
        words.append(f"({method})")
    return " ".join((*words, *badges))


def _price(view: Document, key: str) -> str:
    """Bytes of a token of context; behind the plus those of the sliding layers, in their window."""
    growing, window = view.maybe_whole(key), view.maybe_whole("window_bytes_per_token")
    if growing is None:
        return "-"
    return f"{growing:,}" + (f" +{window:,}w" if window else "")


def _number(view: Document, key: str, unit: str = "") -> str:
    value = view.maybe_whole(key)
    return f"{value:,}{unit}" if value else ""


def _rope(rope: Document | None) -> str:
    """Rotary position embedding in one line; what is usual is left out."""
    if rope is None:
        return ""
    sections = tuple(rope.wholes("sections") if rope.has("sections") else ())
    while sections and not sections[-1]:
        sections = sections[:-1]
    sliding = f" ({rope.real('sliding_base'):,.10g} in sliding layers)" if rope.has("sliding_base") else ""
    parts = [f"base {rope.real('base'):,.10g}{sliding}", f"{rope.whole('dimensions')} values of a head"]
    if sections:
        parts.append(f"sections of {', '.join(map(str, sections))}")
    if rope.text("scaling") != "none" or rope.real("factor") != 1:
        original = rope.maybe_whole("original_context_tokens")
        stretched = f" from {original:,} tokens" if original else ""
        parts.append(f"{rope.text('scaling')} x {rope.real('factor'):g}{stretched}")
    if rope.truth("own_factors"):
        parts.append("factors of its own")
    return ", ".join(parts)


def _senses(facts: Document | None) -> Iterator[tuple[str, str]]:
    """What a projector adds, a line for each sense."""
    if facts is None:
        return
    kind = facts.maybe_text("type") or "of an unknown type"
    length = facts.maybe_whole("projection_length")
    into = f", into {length:,} values" if length else ""
    if facts.truth("sees"):
        yield "sees", kind + "".join(_images(facts)) + into
    if facts.truth("hears"):
        yield "hears", "yes" if facts.truth("sees") else kind + into


def _images(facts: Document) -> Iterator[str]:
    size, tokens = facts.maybe_whole("image_size"), facts.maybe_whole("image_tokens")
    patch, merge = facts.maybe_whole("patch_size"), facts.maybe_whole("merge_size")
    most = facts.maybe_whole("image_max_pixels")
    if size and tokens:
        yield f", images of {size} x {size} pixels, {tokens} tokens each"
    elif size:
        yield f", usual image {size} x {size} pixels"
    if patch and not tokens:
        yield f", patches of {patch} x {patch} pixels"
        if merge:
            yield f", {merge * merge} to a token"
    if most:
        yield f", at most {most:,} pixels"


def _experts(view: Document) -> str:
    count = view.maybe_whole("expert_count")
    if not count:
        return ""
    used = sorted({layer.whole("experts_used") for layer in view.children("layers")} - {0})
    return f"{count}, of which {' or '.join(map(str, used))} compute a token" if used else str(count)


def _heads(layers: Sequence[Document]) -> Iterator[str]:
    """One line for each shape of attention."""
    attending = [layer for layer in layers if layer.text("kind") not in ("recurrent", "none")]
    shapes = Counter(
        (
            clean(layer.text("kind")),
            *(layer.whole(key) for key in ("head_count", "kv_head_count", "key_length", "value_length")),
        )
        for layer in attending
    )
    for (kind, heads, kv_heads, key_length, value_length), count in shapes.items():
        lengths = (
            str(key_length) if key_length == value_length else f"{key_length} (K) and {value_length} (V)"
        )
        if kind == "latent":
            own = f"one row of {key_length}"
        else:
            own = f"{kv_heads} of K and V, of {lengths}" if kv_heads else f"none of K and V, of {lengths}"
        yield f"{count} {kind}: {heads} of Q, {own}"


def _weight_rows(view: Document, weights: Sequence[Document]) -> Iterator[tuple[str, str]]:
    for weight in weights:
        yield clean(weight.text("place")), mib(weight.whole("bytes"))
        if (
            weight.text("place") == "token embedding"
            and view.has("output_tied")
            and view.truth("output_tied")
        ):
            yield "output", "tied"
    yield "sum", mib(view.whole("weight_bytes"))


def _costs(view: Document) -> list[tuple[str, str]]:
    rows = []
    for cost in view.children("context_costs"):
        label = f"a token at {clean(cost.text('cache_type'))}"
        growing, window = cost.maybe_whole("bytes_per_token"), cost.maybe_whole("window_bytes_per_token")
        if growing is None:
            rows.append((label, "not possible with heads of this length"))
            continue
        in_window = f", and {window:,} for each in the window" if window else ""
        rows.append((label, f"{growing:,} bytes{in_window}"))
    state = view.maybe_whole("state_bytes_per_slot")
    if state:
        rows.append(("state of a slot", f"{state:,} bytes ({mib(state)} MiB)"))
    return rows


def _map(layers: Sequence[Document]) -> Iterator[str]:
    """The layers in rows, one character each, and what the characters mean."""
    picture = "".join(map(_character, layers))
    for start in range(0, len(picture), MAP_COLUMNS):
        yield f"{start:>4}  {picture[start : start + MAP_COLUMNS]}"
    used = [f"{char} {LEGEND[char]}" for char in LEGEND if char in picture.upper()]
    if any(layer.truth("is_mtp") for layer in layers):
        used.append("lower case: predicts a further token")
    yield "      " + ", ".join(used)


def _character(layer: Document) -> str:
    character = CHARACTERS.get(layer.text("kind"), UNKNOWN)
    if layer.truth("keeps_state") and character not in ("R", "-"):
        character = BOTH
    return character.lower() if layer.truth("is_mtp") else character
