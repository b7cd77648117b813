"""Models that failed and are started again, or stay down, for a person. Pure."""

from __future__ import annotations

import math

from lllm3090ctl.documents import Document
from lllm3090ctl.text import Block, Prose, clean, duration


def reset(answer: Document) -> list[Block]:
    """What ``reset`` shows."""
    how = "is being started again" if answer.truth("starts") else "runs; what happened to it is forgotten"
    return [f"{clean(answer.text('name'))} {how}"]


def lines(view: Document) -> list[Prose]:
    """What becomes of an instance that has ended; nothing where it runs, or nobody starts it again."""
    name = clean(view.text("name"))
    if view.has("retry_in_s"):
        attempt = f" (attempt {view.whole('attempt')})" if view.has("attempt") else ""
        seconds = math.ceil(view.real("retry_in_s"))  # upwards: what is to come is never shown as over
        if seconds <= 0:  # the card is released, or the machine sleeps
            return [Prose(f"{name}: is to be started again{attempt}")]
        return [Prose(f"{name}: starts again in {duration(seconds)}{attempt}")]
    if view.text("state") != "latched":
        return []
    reason, way_out = view.maybe_text("latch_reason"), view.maybe_text("way_out")
    blocks = [Prose(clean(f"{name}: is not started again" + (f": {reason}." if reason else ".")))]
    return [*blocks, Prose(clean(way_out), "  Hint: ")] if way_out else blocks
