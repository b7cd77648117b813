"""What may be asked of a plan: the options of ``plan`` and ``load``, and the request they make.

Each option carries the name of its member of the request. What is left out is not sent: the daemon's settings and its
planner decide. The daemon's texts name these options; a test keeps all of them in step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click

CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
MOST_CONTEXT_TOKENS = 1 << 28
MOST_SLOTS = 256
MOST_LAYERS = 10_000
MOST_DRAFT_TOKENS = 64
LEAST_BATCH_TOKENS = 32
MOST_BATCH_TOKENS = 65_536
MOST_MICRO_BATCH_TOKENS = 8192
SETTING = " Default: the daemon's setting."

_Function = Callable[..., Any]

PLAN_OPTIONS = (
    click.option(
        "--context",
        "--ctx",
        "context_tokens",
        type=click.IntRange(1, MOST_CONTEXT_TOKENS),
        metavar="N",
        help="Context of all slots together, in tokens."
        " Default: the largest that fits and the model was trained for. Without --parallel it is shared by 2"
        " slots, or by 1 where it is small or stretched.",
    ),
    click.option(
        "--parallel",
        "parallel",
        type=click.IntRange(1, MOST_SLOTS),
        metavar="N",
        help="Slots: conversations served at the same time. They share the context evenly.",
    ),
    click.option(
        "--cache-type",
        "cache_type",
        type=click.Choice(CACHE_TYPES),
        help="Type of K and V in the KV cache. Smaller types hold more context." + SETTING,
    ),
    click.option(
        "--slot-policy",
        "slot_policy",
        type=click.Choice(("balanced", "window")),
        help="How slots are chosen without --parallel: for much context in all, or for the longest window."
        + SETTING,
    ),
    click.option(
        "--offload",
        "offload",
        type=click.Choice(("resident", "allowed")),
        help="Whether layers or experts may be left in host memory for a useful window." + SETTING,
    ),
    click.option(
        "--gpu-layers",
        "gpu_layers",
        type=click.IntRange(0, MOST_LAYERS),
        metavar="N",
        help="Exactly so many layers on the card, the output counting as one.",
    ),
    click.option(
        "--cpu-experts",
        "cpu_experts",
        type=click.IntRange(0, MOST_LAYERS),
        metavar="N",
        help="The experts of exactly the first N layers in host memory.",
    ),
    click.option(
        "--cache-on-host", "cache_on_host", is_flag=True, help="The cache in host memory, the layers not."
    ),
    click.option(
        "--draft",
        "drafting",
        type=click.Choice(("auto", "on", "off")),
        help="Whether a model that can drafts for itself (multi-token prediction)." + SETTING,
    ),
    click.option(
        "--draft-tokens",
        "draft_tokens",
        type=click.IntRange(1, MOST_DRAFT_TOKENS),
        metavar="N",
        help="Longest draft." + SETTING,
    ),
    click.option(
        "--projector",
        "projector",
        type=click.Choice(("auto", "card", "host", "off")),
        help="Where the projector of a model that sees or hears is; off for text alone." + SETTING,
    ),
    click.option(
        "--purpose",
        "purpose",
        type=click.Choice(("chat", "embedding", "rerank")),
        help="What it serves: text, vectors, or scores of texts. Default: what it was made for.",
    ),
    click.option("--unified", "unified", is_flag=True, help="All slots share one pool of context."),
    click.option("--swa-full", "swa_full", is_flag=True, help="Sliding layers keep the whole context."),
    click.option(
        "--batch",
        "batch_tokens",
        type=click.IntRange(LEAST_BATCH_TOKENS, MOST_BATCH_TOKENS),
        metavar="N",
        help="Tokens accepted at once." + SETTING,
    ),
    click.option(
        "--micro-batch",
        "micro_batch_tokens",
        type=click.IntRange(LEAST_BATCH_TOKENS, MOST_MICRO_BATCH_TOKENS),
        metavar="N",
        help="Tokens computed at once." + SETTING,
    ),
    click.option(
        "--rope-scaling",
        "rope_scaling",
        type=click.Choice(("none", "linear", "yarn")),
        help="How positions are stretched for a --context beyond the trained one; without one they are not, and only"
        " yarn gives more than the trained context. Default: not at all.",
    ),
    click.option(
        "--tier",
        "tiered",
        is_flag=True,
        help="A part of the cache in pinned host memory, where the engine offers that.",
    ),
)
ENGINE_ARGUMENTS = click.argument("arguments", nargs=-1, metavar="[-- ENGINE_ARGUMENT...]")
CARD_OPTIONS = (
    click.option(
        "--card", "card", metavar="CARD", help="Plan for this card instead, empty: such as rtx-4090."
    ),
    click.option(
        "--vram", "vram", metavar="SIZE", help="Plan for any card of this memory, empty: such as 12GiB."
    ),
    click.option(
        "--desktop/--headless",
        "desktop",
        default=None,
        help="Plan for an empty card with or without a desktop on it. Default: as on this computer."
        " Where there is no card, an RTX 3090 is assumed.",
    ),
    click.option(
        "--backend",
        "backend",
        type=click.Choice(("vulkan", "cuda", "cpu")),
        help="Plan for an empty card and this kind of engine; cpu for host memory in place of a card."
        " Where there is no card, an RTX 3090 is assumed.",
    ),
)
CHECK_OPTION = click.option(
    "--check", "check", is_flag=True, help="Also ask the engine what it would take (a dry run), and compare."
)
LOAD_OPTIONS = (
    click.option(
        "--least-context",
        "least_context_tokens",
        type=click.IntRange(1, MOST_CONTEXT_TOKENS),
        metavar="N",
        help="What will do where --context does not fit; needs --context. The largest that fits is taken.",
    ),
    click.option(
        "--gpu",
        "gpu",
        metavar="CARD",
        help="The only card it may be on, of several: number, UUID or PCI address, as `lllm3090ctl gpu` shows them.",
    ),
    click.option("--pin", "pin", is_flag=True, help="Never unload it for another model."),
    click.option(
        "--evict/--no-evict",
        "evict",
        default=None,
        help="Whether idle models may be unloaded for it. Default: they may. If not, and there is no room, then it is"
        " refused, or waits for memory on its way back.",
    ),
    click.option(
        "--wait/--no-wait",
        "wait",
        default=None,
        help="Whether it may wait for room, while models are busy or just loaded. Default: it may, for the setting"
        " queue_timeout_s (2 minutes unless set); then it fails with queue_timed_out. If not, it fails where it"
        " would have to.",
    ),
)
# Whose "no" is an answer, unlike that of a switch which is not set.
_EITHER_WAY = frozenset({"desktop", "evict", "wait"})


def plan_options(function: _Function) -> _Function:
    """The options that ``load`` and ``plan`` share, and what is for the engine itself."""
    return _with(function, (*PLAN_OPTIONS, ENGINE_ARGUMENTS))


def card_options(function: _Function) -> _Function:
    """The options by which ``plan`` asks for another card."""
    return _with(function, (*CARD_OPTIONS, CHECK_OPTION))


def load_options(function: _Function) -> _Function:
    """The options that only ``load`` has."""
    return _with(function, LOAD_OPTIONS)


def plan_body(name: str, options: Mapping[str, object]) -> dict[str, object]:
    """The request: what is left out is the planner's choice."""
    chosen = {
        key: value
        for key, value in options.items()
        if value not in {None, ()} and (value is not False or key in _EITHER_WAY)
    }
    return {"model": name} | chosen


def _with(function: _Function, options: tuple[Callable[[_Function], _Function], ...]) -> _Function:
    for option in reversed(options):  # the first one that is applied is shown last
        function = option(function)
    return function
