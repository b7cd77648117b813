"""The commands of ``lllm3090ctl`` as plain data: what can be typed where. Pure."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import click

from lllm3090ctl.cli import cli
from lllm3090ctl.names import KINDS
from lllm3090d.settings import SETTING_KEYS

SUMMARY_CHARACTERS = 200


class Source(enum.StrEnum):
    """Where the words come from that can stand somewhere; those of the daemon are :data:`KINDS`."""

    MODELS = "models"
    INSTANCES = "instances"
    ENGINES = "engines"
    KEYS = "keys"
    FILES = "files"
    PROGRAM = "program"  # a command line of its own


NAMES = frozenset(Source(kind) for kind in KINDS)
# By the metavar of an option or argument; what is not here is completed by nothing.
_BY_METAVAR: Mapping[str, tuple[Source, ...]] = {
    "PATH": (Source.FILES,),
    "FILE": (Source.FILES,),
    "FILE_OR_NAME": (Source.MODELS, Source.FILES),
    "NAME": (Source.MODELS,),
    "-- COMMAND...": (Source.PROGRAM,),
    "[-- ENGINE_ARGUMENT...]": (Source.FILES,),
    "[CLAUDE_ARGUMENT...]": (Source.FILES,),
}
# NAME of these commands is no model on disk.
_OTHER_NAMES: Mapping[tuple[str, ...], tuple[Source, ...]] = {
    ("unload",): (Source.INSTANCES,),
    ("pin",): (Source.INSTANCES,),
    ("unpin",): (Source.INSTANCES,),
    ("reset",): (Source.INSTANCES,),
    ("explain",): (Source.INSTANCES,),
    ("engine", "show"): (Source.ENGINES,),
    ("engine", "select"): (Source.ENGINES,),
    ("key", "add"): (),
    ("key", "remove"): (Source.KEYS,),
}


@dataclass(frozen=True)
class Values:
    """What can be typed for an option or an argument: fixed words, or words from somewhere."""

    choices: tuple[str, ...] = ()
    sources: tuple[Source, ...] = ()


@dataclass(frozen=True)
class Option:
    """An option.

    Attributes:
        names: all ways to spell it.
        summary: its help, in one line.
        metavar: of its value; None for a switch.
        values: of its value.
    """

    names: tuple[str, ...]
    summary: str
    metavar: str | None = None
    values: Values = field(default_factory=Values)


@dataclass(frozen=True)
class Argument:
    """An argument; ``many`` is the last one and takes all that follows."""

    metavar: str
    values: Values
    many: bool

    @property
    def dashed(self) -> bool:
        """It stands behind a double dash."""
        return self.metavar.removeprefix("[").startswith("-- ")


@dataclass(frozen=True)
class Command:
    """A command.

    Attributes:
        path: its words, without the program's name.
        summary: the first sentence of its help.
        options: in the order of its help.
        arguments: in order.
        commands: below it.
        passes_on: everything behind its first argument is that argument's.
        command: of click.
    """

    path: tuple[str, ...]
    summary: str
    options: tuple[Option, ...]
    arguments: tuple[Argument, ...]
    commands: tuple[Command, ...]
    passes_on: bool
    command: click.Command = field(repr=False, compare=False)

    @property
    def key(self) -> str:
        """Its words with blanks between them."""
        return " ".join(self.path)

    def every(self) -> Iterator[Command]:
        """It and all below it."""
        yield self
        for below in self.commands:
            yield from below.every()


def tree() -> Command:
    """All commands as they are."""
    return _command(cli, (), None)


def valued(root: Command) -> tuple[str, ...]:
    """All options that take a value, whatever the command.

    Raises:
        ValueError: one spelling takes a value with one command and none with another.
    """
    with_value = {name for each in root.every() for o in each.options if o.metavar for name in o.names}
    without = {name for each in root.every() for o in each.options if not o.metavar for name in o.names}
    if both := with_value & without:
        raise ValueError(f"with and without a value: {', '.join(sorted(both))}")
    return tuple(sorted(with_value))


def _command(command: click.Command, path: tuple[str, ...], parent: click.Context | None) -> Command:
    context = click.Context(
        command, parent=parent, info_name=path[-1] if path else command.name, **command.context_settings
    )
    below = command.commands if isinstance(command, click.Group) else {}
    parameters = command.get_params(context)
    return Command(
        path=path,
        summary=command.get_short_help_str(SUMMARY_CHARACTERS).rstrip("."),
        options=tuple(_option(each) for each in parameters if isinstance(each, click.Option)),
        arguments=tuple(_argument(each, path) for each in parameters if isinstance(each, click.Argument)),
        commands=tuple(_command(each, (*path, name), context) for name, each in sorted(below.items())),
        passes_on=not command.context_settings.get("allow_interspersed_args", True)
        and not isinstance(command, click.Group),
        command=command,
    )


def _option(option: click.Option) -> Option:
    names = (*option.opts, *option.secondary_opts)
    summary = " ".join((option.help or "").split())
    if option.is_flag or option.count:
        return Option(names, summary)
    # click's own make_metavar() has other parameters in other releases.
    metavar = option.metavar or (
        "|".join(map(str, option.type.choices)) if isinstance(option.type, click.Choice) else "VALUE"
    )
    return Option(names, summary, metavar, _values(option, metavar))


def _argument(argument: click.Argument, path: tuple[str, ...]) -> Argument:
    metavar = argument.metavar or (argument.name or "").upper()
    if not argument.required and not metavar.startswith("["):
        metavar = f"[{metavar}]"
    if argument.name == "name" and path in _OTHER_NAMES:
        values = Values(sources=_OTHER_NAMES[path])
    else:
        values = _values(argument, "NAME" if argument.name == "name" else metavar)
    return Argument(metavar, values, argument.nargs == -1)


def _values(parameter: click.Parameter, metavar: str) -> Values:
    if isinstance(parameter.type, click.Choice):
        return Values(choices=tuple(str(choice) for choice in parameter.type.choices))
    if metavar.strip("[]") == "KEY":
        return Values(choices=SETTING_KEYS)
    return Values(sources=_BY_METAVAR.get(metavar) or _BY_METAVAR.get(metavar.strip("[]"), ()))
