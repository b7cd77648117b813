"""``setup``: the units, and what goes with them, for an installation that no package has made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from lllm3090ctl.client import Client
from lllm3090ctl.output import Screen

_Function = Callable[..., Any]
_Command = Callable[..., Callable[[_Function], _Function]]


def add_to(group: click.Group, command: _Command) -> None:
    """Add the command to the group of all commands; ``command`` makes a function a command's body."""
    options = (
        click.option(
            "--dry-run", "dry_run", is_flag=True, help="Say what would be done, and change nothing."
        ),
        click.option(
            "--remove",
            is_flag=True,
            help="Take it all away again: the daemon and the models that run are stopped; models on disk, settings and"
            " what was learnt stay.",
        ),
        click.option(
            "--no-enable",
            "no_enable",
            is_flag=True,
            help="Write the files, but enable and start nothing. A daemon that runs is started anew all the same.",
        ),
        click.option(
            "--take-over",
            "take_over",
            is_flag=True,
            help="In place of another installation of lllm3090 that is set up. Models go on.",
        ),
    )
    function = command()(_setup)
    for option in reversed(options):
        function = option(function)
    group.command("setup")(function)


def _setup(
    _client: Client, screen: Screen, *, dry_run: bool, remove: bool, no_enable: bool, take_over: bool
) -> int:
    """Set up the daemon of this installation for you: units, D-Bus, completions, manual pages.

    For pipx, uv and other virtual environments; a package of a distribution needs none of it. It enables the two
    sockets, so the daemon starts with its first use. Repeat it after each upgrade: it replaces what has changed and
    starts the daemon anew, while models go on. A second time it changes nothing. A file that you have changed is kept.

    \b
    Examples:
      lllm3090ctl setup --dry-run
      lllm3090ctl setup
      lllm3090ctl setup --remove
    """
    from lllm3090ctl import setup_actions  # noqa: PLC0415 - slow, and only needed here

    if remove:
        if no_enable:
            raise click.UsageError("--no-enable does not go with --remove.")
        return setup_actions.remove(screen, dry_run=dry_run, take_over=take_over)
    return setup_actions.install(screen, dry_run=dry_run, enable=not no_enable, take_over=take_over)
