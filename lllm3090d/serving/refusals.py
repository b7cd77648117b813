"""The refusals of the scheduler, each with its way out. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.readings import Card
from lllm3090d.serving.refusal_page import (
    fits_with_more,
    in_more_room,
    refuse,
    serves_changed,
    with_budget,
)

__all__ = [
    "fits_with_more",
    "in_more_room",
    "refuse",
    "serves_changed",
    "with_budget",
]  # for lack of memory, beside what is here


def not_loaded(name: str, loaded: Iterable[str]) -> LlmError:
    """The error for a model that does not run."""
    names = sorted(loaded)
    return LlmError(
        ErrorCode.NOT_LOADED,
        f"{name} is not loaded" + (f"; loaded: {', '.join(names)}" if names else "; no model is"),
        hint="See what runs: lllm3090ctl ps",
        name=name,
        loaded=names,
    )


def loaded_differently(name: str, lacking: str) -> LlmError:
    """The error for a model that runs, but not as asked for; see :func:`lllm3090d.serving.extras.lacking`."""
    return LlmError(
        ErrorCode.LOADED_DIFFERENTLY,
        f"{name} runs {lacking}; a running model is not changed without being asked",
        hint=f"Unload it first: lllm3090ctl unload '{name}'",
        name=name,
    )


def cancelled(name: str) -> LlmError:
    """What the client of a withdrawn load is told."""
    return LlmError(ErrorCode.LOAD_CANCELLED, f"the load of {name} was cancelled by its client", name=name)


def unloaded_while_loading(name: str) -> LlmError:
    """What the clients of a load are told when somebody unloads the model under way."""
    return LlmError(
        ErrorCode.LOAD_CANCELLED,
        f"{name} was unloaded before it was ready",
        hint="See who did: lllm3090ctl events",
        name=name,
    )


def stopped_by_somebody(name: str) -> LlmError:
    """What the clients of a load are told when systemd was asked to stop the unit."""
    return LlmError(
        ErrorCode.LOAD_CANCELLED,
        f"the unit of {name} was stopped from outside before it was ready",
        hint="Load it again, or see: lllm3090ctl events",
        name=name,
    )


def stuck(name: str, unit: str) -> LlmError:
    """The error for a load of a model whose previous engine could not be stopped."""
    return LlmError(
        ErrorCode.STOP_FAILED,
        f"the previous engine of {name} could not be stopped and still holds its memory",
        hint=f"Try again to stop it: lllm3090ctl unload '{name}'. Or see: systemctl --user status {unit}",
        name=name,
        unit=unit,
    )


def no_such_load(token: str) -> LlmError:
    """The error for a token that no load under way has."""
    return LlmError(
        ErrorCode.NO_SUCH_LOAD,
        f"no load with the token {token} is under way; it has ended or was never made",
        hint="See what runs: lllm3090ctl ps",
        token=token,
    )


def queue_timed_out(name: str, why: str, limit_s: float) -> LlmError:
    """What the client of a load is told that has waited too long for room."""
    return LlmError(
        ErrorCode.QUEUE_TIMED_OUT,
        f"{name} was not loaded: it waited {limit_s:g} s for {why}",
        hint="See what runs: lllm3090ctl ps. Unload what is not needed; the limit is the setting queue_timeout_s.",
        name=name,
        limit_s=limit_s,
    )


def no_room_now(name: str, why: str) -> LlmError:
    """What the client of a load is told that would have to wait for room and does not want to."""
    return LlmError(
        ErrorCode.QUEUE_TIMED_OUT,
        f"{name} was not loaded: it would have to wait for {why}, and it was not to wait",
        hint="Leave --no-wait out to let it wait, or see what runs: lllm3090ctl ps",
        name=name,
    )


def has_failed(name: str) -> LlmError:
    """The error for a wish about a model that does not run any more."""
    return LlmError(
        ErrorCode.NOT_LOADED,
        f"{name} has failed and does not run",
        hint=f"Start it again: lllm3090ctl reset {shlex.quote(name)}",
        name=name,
    )


def on_its_way_down(name: str) -> LlmError:
    """The error for a wish about a model that is being unloaded."""
    return LlmError(
        ErrorCode.NOT_LOADED,
        f"{name} is being unloaded, so it cannot be pinned or unpinned",
        hint=f"Load it again, pinned: lllm3090ctl load {shlex.quote(name)} --pin",
        name=name,
    )


def nothing_to_reset(name: str) -> LlmError:
    """The error for a reset of a model that did not fail, and does not run."""
    return LlmError(
        ErrorCode.NOT_LOADED,
        f"{name} is not among the models that run or have failed",
        hint=f"Load it: lllm3090ctl load {shlex.quote(name)}",
        name=name,
    )


def card_released() -> LlmError:
    """The error for a load while the card is given away."""
    return LlmError(
        ErrorCode.CARD_RELEASED,
        "the card was released for other programs, and loads are refused until it is resumed",
        hint="Take it back: lllm3090ctl resume",
    )


def released_meanwhile() -> LlmError:
    """What the client of a load is told that was under way when somebody wanted the whole card."""
    return LlmError(
        ErrorCode.LOAD_CANCELLED,
        "everything was unloaded before it was ready: somebody released the card",
        hint="Load it again. See who did: lllm3090ctl events",
    )


def asleep() -> LlmError:
    """What the client of a load is told that was under way when the machine went to sleep."""
    return LlmError(
        ErrorCode.LOAD_CANCELLED,
        "the machine goes to sleep, and everything was unloaded before it was ready",
        hint="It is loaded again after the return, unless the setting suspend is stop. See: lllm3090ctl status",
    )


def no_such_card(wanted: str, cards: Sequence[Card]) -> LlmError:
    """The error for a card that this machine does not have."""
    known = ", ".join(f"{card.uuid} ({card.name})" for card in cards)
    return LlmError(
        ErrorCode.INVALID_REQUEST,
        f"there is no card {wanted} here; there is {known}",
        hint="See the cards: lllm3090ctl gpu",
        card=wanted,
    )


def stopping() -> LlmError:
    """What everybody is told once the daemon has been asked to stop."""
    return LlmError(
        ErrorCode.SHUTTING_DOWN,
        "the daemon is stopping; models that run go on, and loads that were begun go on too",
        hint="Start it again: systemctl --user start lllm3090d",
    )
