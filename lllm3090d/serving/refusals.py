"""The refusals of the scheduler, each with its way out. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.readings import CardKind
from lllm3090d.planning.quote import MIB
from lllm3090d.planning.reserves import Budget
from lllm3090d.planning.verdict import Verdict
from lllm3090d.serving.ledger import Reservation, ReservationState


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


def stopping() -> LlmError:
    """What everybody is told once the daemon has been asked to stop."""
    return LlmError(
        ErrorCode.SHUTTING_DOWN,
        "the daemon is stopping; models that run go on, and loads that were begun go on too",
        hint="Start it again: systemctl --user start lllm3090d",
    )


def with_budget(
    error: LlmError,
    budget: Budget,
    card_kind: CardKind,
    reservations: Iterable[Reservation],
    verdict: Verdict = Verdict.TOO_BIG,
) -> LlmError:
    """A refusal for lack of memory, with what the card can give, who of ours holds the rest, and the verdict."""
    lines = [{"name": b.name, "bytes": b.bytes, "origin": b.origin} for b in budget.deciding_lines]
    held = [r for r in reservations if r.state is not ReservationState.QUARANTINED]
    ours = [{"name": r.name, "bytes": r.charged_bytes} for r in held]
    unload = [f"Unload {r.name} ({r.charged_bytes // MIB} MiB): lllm3090ctl unload '{r.name}'" for r in held]
    hint = ". ".join([text.rstrip(".") for text in (error.hint, *unload) if text]) + "."
    more = {"budget": lines, "card_kind": str(card_kind), "ours": ours, "verdict": str(verdict)}
    return LlmError(error.code, error.message, hint=hint, **(dict(error.details) | more))
