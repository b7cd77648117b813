"""Models that get nowhere, and models that go and finish their requests, for a person. Pure."""

from __future__ import annotations

import math

from lllm3090ctl.documents import Document
from lllm3090ctl.text import Block, Prose, clean, duration, shell_word


def use(view: Document) -> str:
    """What such a model does, for a column; empty for any other."""
    drain = view.maybe_child("drain")
    if drain:
        number = drain.maybe_whole("in_flight")
        left = duration(math.ceil(drain.real("remaining_s")))
        return "draining" if number is None else f"drains {number}, {left} left"
    stall = view.maybe_child("stall")
    return f"stalled {duration(stall.real('stalled_s'))}" if stall else ""


def lines(view: Document) -> list[Block]:
    """Why a model is stalled, and what becomes of it; nothing where it is not."""
    stall = view.maybe_child("stall")
    if not stall:
        return []
    name = clean(view.text("name"))
    told: list[Block] = [Prose(clean(f"{view.text('name')}: stalled: {stall.text('reason')}."))]
    if stall.has("restart_in_s"):
        # Upwards: what is to come is never shown as over.
        in_s = duration(math.ceil(stall.real("restart_in_s")))
        return [*told, Prose(f"{name}: is restarted in {in_s}, unless it gets on", "  ")]
    return [*told, Prose(clean(f"Stop it: lllm3090ctl unload {shell_word(view.text('name'))}"), "  Hint: ")]


def cut_off(answer: Document) -> str:
    """What an unload has cut off, as the end of a line about it; nothing where nothing was."""
    number = answer.maybe_whole("unfinished")
    if not number:
        return ""
    return f"; {'1 request was' if number == 1 else f'{number} requests were'} cut off"
