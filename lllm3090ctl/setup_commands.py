"""``setup``: units, and what goes with them, for an installation that no package has made; ``autostart``: a login."""

from __future__ import annotations

import click

from lllm3090ctl.client import Client
from lllm3090ctl.command_parts import command_body
from lllm3090ctl.exits import ExitStatus
from lllm3090ctl.output import Screen
from lllm3090ctl.text import Prose


def add_to(group: click.Group) -> None:
    """Add the commands to the group of all commands."""
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
    function = command_body()(_setup)
    for option in reversed(options):
        function = option(function)
    group.command("setup")(function)
    group.command("autostart")(command_body()(_autostart))


def _setup(
    _client: Client, screen: Screen, *, dry_run: bool, remove: bool, no_enable: bool, take_over: bool
) -> int:
    """Set up the daemon of this installation for you: units, D-Bus, autostart, completions, manual pages.

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


def _autostart(_client: Client, screen: Screen) -> int:
    """Start the daemon at a login, as the desktop's autostart entry does.

    Only where it is enabled (systemctl --user enable lllm3090d.service) and systemd does not start it itself: nothing
    is done where your user manager has started its default.target, or the daemon runs.

    \b
    Examples:
      lllm3090ctl autostart
    """
    from lllm3090ctl import autostart  # noqa: PLC0415 - only needed here

    done = autostart.start()
    document = {"started": done is autostart.Verdict.START, "verdict": done.value}
    screen.result(document, [Prose(autostart.TOLD[done])])
    return ExitStatus.OK
