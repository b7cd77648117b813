"""The wanted set as clients see it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from lllm3090d.serving.scheduler import Scheduler
from lllm3090d.serving.wanted_set import Marked, WantedSet
from lllm3090d.serving.wanted_store import Mark
from lllm3090d.wire_wanted import Autoload, MarkOrigin, MarkView, WantedView

AT_LOGIN = "it is loaded at the next login"


async def wanted_views(wanted: WantedSet, scheduler: Scheduler) -> tuple[WantedView, ...]:
    """What is wanted, or loaded at every login, and has no instance: that tells by itself what becomes of it."""
    marked = {each.mark.name: each for each in await wanted.marked()}
    views = []
    for want in wanted.wants:
        if scheduler.instance(want.name) is None:
            problem = wanted.problem_of(want.name)
            views.append(
                WantedView(
                    name=want.name,
                    wanted=True,
                    autoload=want.name in marked,
                    why=wanted.why_down(want),
                    problem=problem.problem() if problem is not None else None,
                )
            )
    names = {each.name for each in wanted.wants}
    for name, each in marked.items():
        if name not in names and scheduler.instance(name) is None:
            views.append(
                WantedView(
                    name=name,
                    wanted=False,
                    autoload=True,
                    why=_why_not(each),
                    problem=each.problem.problem() if each.problem is not None else None,
                )
            )
    return tuple(views)


async def autoload_view(wanted: WantedSet, scheduler: Scheduler) -> Autoload:
    """What is loaded at every login, in order."""
    wants = {each.name: each for each in wanted.wants}
    views = []
    for each in await wanted.marked():
        mark = each.mark
        instance, want = scheduler.instance(mark.name), wants.get(mark.name)
        why = ""
        if instance is None:
            why = wanted.why_down(want) if want is not None else _why_not(each)
        views.append(
            MarkView(
                name=mark.name,
                origin=MarkOrigin.SETTING if each.by_setting else MarkOrigin.COMMAND,
                options=_options(mark),
                state=instance.state if instance is not None else None,
                why=why,
            )
        )
    return Autoload(models=tuple(views))


def _why_not(marked: Marked) -> str:
    return AT_LOGIN if marked.problem is None else marked.problem.message


def _options(mark: Mark) -> dict[str, Any]:
    """What a load of it would be asked for beside its name, by the members of ``POST /v1/load``."""
    given = asdict(mark.request).items()
    asked = {key: value for key, value in given if value is not None and value is not False}
    if asked.get("cache_type_k") == asked.get("cache_type_v") and "cache_type_k" in asked:
        asked["cache_type"] = asked.pop("cache_type_k")
        del asked["cache_type_v"]
    more = {"arguments": list(mark.arguments), "gpu": mark.card, "pin": mark.pinned}
    return asked | {key: value for key, value in more.items() if value}
