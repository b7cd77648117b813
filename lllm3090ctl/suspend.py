"""What the machine's sleep does to models, for a person. Pure."""

from __future__ import annotations

from lllm3090ctl.documents import Document
from lllm3090ctl.text import Block, clean

GOING = frozenset({"going", "asleep"})
OWNER = "suspend"


def problems(view: Document) -> list[tuple[str, Document | None]]:
    """What is wrong with it; that nobody tells of sleep is of no consequence where nothing would be done."""
    lacking = None if view.text("policy") == "keep" else view.maybe_child("logind_problem")
    return [(OWNER, view.maybe_child("problem")), (OWNER, lacking)]


def lines(view: Document) -> list[Block]:
    """What is under way; nothing where nothing is."""
    models = clean(", ".join(view.texts("restoring")))
    phase = view.text("phase")
    if phase in GOING:
        return ["The machine goes to sleep, or sleeps: loads wait for its return."]
    if phase == "blocked":
        return [f"Not loaded again after a sleep, for the card is in error: {models}"]
    return [f"Loaded again after a sleep, one after the other: {models}"] if models else []
