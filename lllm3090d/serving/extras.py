"""Further arguments of a load and of the settings, together. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, replace

from lllm3090d.engines.extra_arguments import (
    ExtraArguments,
    check_asked_once,
    chosen_for,
    extra_arguments,
    merged,
)
from lllm3090d.engines.options import canonical
from lllm3090d.errors import LlmError
from lllm3090d.model_settings import ModelSettings, told
from lllm3090d.planning.planner import Plan
from lllm3090d.planning.request import PlanRequest, option_of
from lllm3090d.serving.events import LoadRequested
from lllm3090d.serving.running import HOST_CACHE, ONE_POOL, mismatch, shown

FROM_SETTINGS = "It is from the settings: lllm3090ctl config show extra_arguments"


def extra_of(event: LoadRequested, table: Mapping[str, Sequence[str]]) -> ExtraArguments:
    """All that a launch gets: those for every model, those for this one, those of this load.

    Args:
        event: the load.
        table: of the settings.

    Raises:
        LlmError: INVALID_REQUEST for arguments that cannot be, or that contradict what else was asked for.
    """
    check_asked_once(event.request, _own(event))
    set_ones = chosen_for(event.checkpoint.name, table)
    try:
        return extra_arguments((*set_ones, *event.arguments), event.capabilities, event.ruled)
    except LlmError as error:  # not of this load's own: those were sound just now
        hint = "\n".join(filter(None, (error.hint, FROM_SETTINGS)))
        raise LlmError(error.code, error.message, hint=hint, **error.details) from error


def asked_of(
    event: LoadRequested, extra: ExtraArguments, models: Mapping[str, ModelSettings]
) -> PlanRequest:
    """The question to the planner: what was asked for, else what arguments say, else the model's section.

    Args:
        event: the load.
        extra: all its arguments.
        models: sections of the settings.
    """
    return with_section(
        merged(event.request, extra.request), models.get(event.checkpoint.name), extra.stated
    )


def with_section(
    request: PlanRequest, section: ModelSettings | None, stated: Collection[str] = ()
) -> PlanRequest:
    """A request in which a model's section of the settings fills what is open.

    Who places layers by hand has said enough: there ``offload`` of the section is left out.

    Args:
        request: of a load and its arguments.
        section: of the model; None where it has none.
        stated: fields that arguments name although they say what is usual.
    """
    if section is None:
        return request
    filled = merged(request, section.request)
    kept = {each.name: getattr(request, each.name) for each in fields(PlanRequest) if each.name in stated}
    if request.places_by_hand:
        kept["offload"] = request.offload
    return replace(filled, **kept)


def section_note(
    event: LoadRequested, extra: ExtraArguments, models: Mapping[str, ModelSettings]
) -> tuple[str, ...]:
    """What of a load comes from its model's section of the settings: one sentence, or none."""
    name = event.checkpoint.name
    if name not in models:
        return ()
    text = told(name, models[name], merged(event.request, extra.request), asked_of(event, extra, models))
    return () if text is None else (text,)


def running_notes(
    name: str, plan: Plan, asked: PlanRequest | None, section: ModelSettings | None
) -> tuple[str, ...]:
    """What a model that runs has from its section of the settings, and what its next load would take from there.

    Context, slots and type of the cache alone: of the rest a running plan does not tell what was chosen.

    Args:
        name: of the model.
        plan: that it runs with.
        asked: what its load asked for by itself; None where nobody knows.
        section: of the model as it is now; None where it has none.
    """
    if section is None:
        return ()
    had, later = list[str](), list[str]()
    padding = 256 * max(1, plan.parallel)  # the engine rounds the window of each slot up
    for field_name, has in (
        ("context_tokens", plan.context_tokens),
        ("parallel", plan.parallel),
        ("cache_type_k", plan.cache_type_k),
    ):
        want = getattr(section.request, field_name)
        if want is None or getattr(asked or PlanRequest(), field_name) is not None:
            continue
        is_same = want <= has < want + padding if field_name == "context_tokens" else want == has
        text = f"{option_of(field_name)} {want}"
        (had if is_same else later).append(text if is_same else f"{text} (it has {shown(has)})")
    where = f'[models."{name}"]'
    return (
        *((f"config: {', '.join(had)} from {where}",) if had else ()),
        *((f"config: its next load takes {', '.join(later)} from {where}",) if later else ()),
    )


def wish_of(event: LoadRequested) -> PlanRequest:
    """What a load itself asks for, its arguments included; the settings ask for nothing here.

    Raises:
        LlmError: as :func:`extra_of`.
    """
    return merged(event.request, _own(event).request)


def lacking(
    plan: Plan, given: Sequence[str], event: LoadRequested, *, asked: PlanRequest | None = None
) -> str | None:
    """How a running launch differs from a load, beginning with "with" or "without"; None where it has all.

    The settings ask for nothing here.

    Args:
        plan: of what runs.
        given: its further arguments, as :attr:`ExtraArguments.shown`; another spelling of an option is the same.
        event: the load.
        asked: what it was launched for, by :func:`wish_of`; None where nobody knows.

    Raises:
        LlmError: as :func:`extra_of`.
    """
    own = _own(event)
    check_asked_once(event.request, own)
    wish = replace(event, request=merged(event.request, own.request))
    differences = mismatch(plan, wish, asked=asked)
    settings = {
        "context checkpoints": (own.context_checkpoints, plan.launch.context_checkpoints),
        "step of checkpoints": (own.checkpoint_min_step_tokens, plan.launch.checkpoint_min_step_tokens),
        "prompt cache": (own.prompt_cache_mib, plan.launch.prompt_cache_mib),
        "tokens of an image": (
            own.image_max_tokens if plan.with_projector else None,  # without one there are no images
            plan.launch.image_max_tokens,
        ),
    }
    other = [*differences.other, *_denied(plan, own)]
    other += [
        f"{what} {shown(has)} instead of {shown(want)}"
        for what, (want, has) in settings.items()
        if want not in {None, has}
    ]
    has_given = {canonical(text, event.capabilities) for text in given}
    missing = list(differences.missing)
    missing += [f"`{text}`" for text in own.shown if canonical(text, event.capabilities) not in has_given]
    parts = [
        f"{word} {', '.join(texts)}" for word, texts in (("with", other), ("without", missing)) if texts
    ]
    return " and ".join(parts) or None


def _denied(plan: Plan, own: ExtraArguments) -> list[str]:
    """What a running launch has and the arguments say no to."""
    switches = (
        ("unified", ONE_POOL, plan.launch.unified),
        ("cache_on_host", HOST_CACHE, plan.launch.layers.cache_on_host),
    )
    return [
        what for name, what, has in switches if has and name in own.stated and not getattr(own.request, name)
    ]


def _own(event: LoadRequested) -> ExtraArguments:
    return extra_arguments(event.arguments, event.capabilities, event.ruled)
