"""The command lines that a remedy names, to be copied by a person. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from lllm3090d.planning.request import PlanRequest, option_of

CTL = "lllm3090ctl"
_SAME_OPTION = frozenset({"cache_type_v"})  # one option stands for K and V
# Further words of a load, and what they stand for in its body.
_SWITCHES = {"--pin": ("pin", True), "--no-evict": ("evict", False), "--no-wait": ("wait", False)}


@dataclass(frozen=True, slots=True)
class Wish:
    """What somebody asked for, as it can be asked again with a change.

    Attributes:
        name: the model; empty where nobody knows, and then there is no command.
        request: its own options, without what the engine's arguments or the settings say.
        arguments: further ones for the engine.
        stated: fields of the request that those arguments decide: an option beside them would contradict them.
        verb: ``load`` or ``plan``.
        more: further words of the command, such as ``--card``.
        reloads: it is loaded, and has to be unloaded first.
    """

    name: str = ""
    request: PlanRequest = field(default_factory=PlanRequest)
    arguments: tuple[str, ...] = ()
    stated: frozenset[str] = frozenset()
    verb: str = "load"
    more: tuple[str, ...] = ()
    reloads: bool = False


NOBODY = Wish()


def asking_again(asked: Wish, changes: Mapping[str, Any]) -> str:
    """The command that asks for the same with some fields of the request changed; empty where none can.

    Args:
        asked: what was asked for.
        changes: new values by field of :class:`lllm3090d.planning.request.PlanRequest`.
    """
    request = replace(asked.request, **changes)
    if not asked.name or asked.stated & changes.keys() or request.cache_type_k is not request.cache_type_v:
        return ""
    if asked.name.startswith("-"):
        return ""  # where the engine's arguments begin could not be told
    words = [CTL, asked.verb, asked.name, *asked.more, *_options(request)]
    if asked.arguments:
        words += ["--", *asked.arguments]
    command = shlex.join(words)
    return f"{unloading((asked.name,))} && {command}" if asked.reloads else command


def options_again(asked: Wish, changes: Mapping[str, Any]) -> dict[str, Any] | None:
    """The same as :func:`asking_again`, as what stands beside ``model`` in the body of a load; None where none can.

    Args:
        asked: what was asked for.
        changes: new values by field of :class:`lllm3090d.planning.request.PlanRequest`.
    """
    if asked.verb != "load" or asked.reloads or not asking_again(asked, changes):
        return None
    request, usual, options = replace(asked.request, **changes), PlanRequest(), dict[str, Any]()
    for each in fields(PlanRequest):
        value = getattr(request, each.name)
        if each.name not in _SAME_OPTION and value != getattr(usual, each.name):
            options["cache_type" if each.name == "cache_type_k" else each.name] = value
    if asked.arguments:
        options["arguments"] = list(asked.arguments)
    words = iter(asked.more)
    for word in words:
        if word == "--gpu":
            options["gpu"] = next(words)
        elif word in _SWITCHES:
            name, is_on = _SWITCHES[word]
            options[name] = is_on
        else:
            return None
    return options


def unloading(names: tuple[str, ...]) -> str:
    """The commands that unload some models, in one line."""
    return " && ".join(shlex.join([CTL, "unload", *_named(name)]) for name in names)


def _named(name: str) -> tuple[str, ...]:
    """A name that is no option."""
    return ("--", name) if name.startswith("-") else (name,)


def _options(request: PlanRequest) -> list[str]:
    """A request as options of the client; what is as usual is left out."""
    usual = PlanRequest()
    words: list[str] = []
    for each in fields(PlanRequest):
        value = getattr(request, each.name)
        if each.name in _SAME_OPTION or value == getattr(usual, each.name):
            continue
        words.append(option_of(each.name))
        if value is not True:
            words.append(str(value))
    return words
