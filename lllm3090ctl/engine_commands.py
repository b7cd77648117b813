"""``engine``: the builds of llama-server, and which one is used."""

from __future__ import annotations

import click

from lllm3090ctl import engines
from lllm3090ctl.client import Client
from lllm3090ctl.command_parts import command_body, optional_name_argument
from lllm3090ctl.exits import ExitStatus
from lllm3090ctl.failures import as_failure
from lllm3090ctl.output import Screen


def add_to(group: click.Group) -> None:
    """Add the group ``engine`` to the group of all commands."""
    group.add_command(engine)


@click.group()
def engine() -> None:
    """Show the llama-server builds here, and choose one.

    Models are started with the one that is chosen.

    A choice takes effect at the next start of a model; what runs goes on with what it has.

    \b
    Examples:
      lllm3090ctl engine list
      lllm3090ctl engine show
      lllm3090ctl engine select b11434-cuda-sm86
    """


@engine.command("list")
@command_body()
def engine_list(client: Client, screen: Screen) -> int:
    """List the builds, best first.

    The line below the table says which one the next start uses. RELEASE is that of llama.cpp; "stale" is another one
    than the daemon expects. USE tells whether a build can be chosen.

    \b
    Example:
      lllm3090ctl engine list
    """
    listing = client.engines()
    screen.result(listing.members, engines.engines(listing))
    return ExitStatus.OK


@engine.command("show")
@optional_name_argument
@command_body()
def engine_show(client: Client, screen: Screen, name: str | None) -> int:
    """Show what a build is and what it can do.

    Its version, digest and devices, and every option. Without NAME, the build that the next start uses.

    \b
    Examples:
      lllm3090ctl engine show
      lllm3090ctl engine show managed --json
    """
    if name is None:
        listing = client.engines()
        name = listing.maybe_text("next")
        if name is None:
            raise as_failure(listing.child("next_problem").members)
    view = client.engine(name)
    screen.result(view.members, engines.details(view))
    return ExitStatus.OK


@engine.command("select")
@optional_name_argument
@click.option("--automatic", is_flag=True, help="Forget the choice: the best build by its place is used.")
@command_body()
def engine_select(client: Client, screen: Screen, name: str | None, automatic: bool) -> int:
    """Choose the build that models are started with from now on.

    \b
    Examples:
      lllm3090ctl engine select b11434-cuda-sm86
      lllm3090ctl engine select --automatic
    """
    if (name is None) is not automatic:
        raise click.UsageError("Give either NAME or --automatic.")
    listing = client.select_engine(name)
    screen.result(listing.members, engines.selected(listing))
    return ExitStatus.OK
