"""The commands on the installation itself: ``doctor`` and ``version``."""

from __future__ import annotations

from collections.abc import Mapping

import click

from lllm3090ctl import render
from lllm3090ctl.client import Client
from lllm3090ctl.command_parts import command_body
from lllm3090ctl.exits import ExitStatus
from lllm3090ctl.failures import Failure
from lllm3090ctl.output import Screen

DISTRIBUTION = "lllm3090"


def add_to(group: click.Group) -> None:
    """Add the commands to the group of all commands."""
    for each in (doctor, version):
        group.add_command(each)


@click.command()
@command_body()
def doctor(client: Client, screen: Screen) -> int:
    """Look at this machine: is everything as the daemon needs it?

    One line for each thing: ok, warn or fail, with what to do. It needs no daemon, changes nothing, and takes a few
    seconds, at most a minute and a half where something hangs. The exit status is 10 where the worst is a warning, 11
    where something fails.

    \b
    Examples:
      lllm3090ctl doctor
      lllm3090ctl doctor --json
    """
    from lllm3090ctl import doctor as examination  # noqa: PLC0415 - only needed here

    report = examination.examine(client)
    screen.result(report.document(), examination.shown(report))
    return report.exit_status


@click.command()
@command_body()
def version(client: Client, screen: Screen) -> int:
    """Show the versions of this program and of the daemon.

    \b
    Example:
      lllm3090ctl version
    """
    from importlib.metadata import version as installed_version  # noqa: PLC0415 - slow, and only needed here

    own = installed_version(DISTRIBUTION)
    document: dict[str, Mapping[str, object] | None] = {"lllm3090ctl": {"version": own}, "lllm3090d": None}
    try:
        daemon = client.version()
    except Failure as failure:
        if screen.as_json:
            document["problem"] = failure.problem
            screen.result(document, [])
            return failure.exit_status
        screen.result(document, render.version(own, None))
        raise
    document["lllm3090d"] = daemon.members
    screen.result(document, render.version(own, daemon))
    return ExitStatus.OK
