"""``key``: keys of the gateway."""

from __future__ import annotations

import click

from lllm3090ctl import keys
from lllm3090ctl.client import Client
from lllm3090ctl.command_parts import command_body
from lllm3090ctl.exits import ExitStatus
from lllm3090ctl.output import Screen


def add_to(group: click.Group) -> None:
    """Add the group ``key`` to the group of all commands."""
    group.add_command(key)


@click.group()
def key() -> None:
    """Make, list and remove keys of the gateway.

    As long as there is none, none is asked for, and other computers cannot be let in. With one, every client needs one,
    on this computer too. What changes takes effect at once.

    \b
    Examples:
      lllm3090ctl key add laptop
      lllm3090ctl key list
      lllm3090ctl key remove laptop
    """


@key.command("add")
@click.argument("name")
@command_body()
def key_add(client: Client, screen: Screen, name: str) -> int:
    """Make a key, and show it this once.

    NAME is for you to know it by: up to 64 letters, digits, dots, dashes and underscores.

    \b
    Example:
      lllm3090ctl key add laptop
    """
    answer = client.add_key(name)
    screen.result(answer.members, keys.made(answer))
    return ExitStatus.OK


@key.command("list")
@command_body()
def key_list(client: Client, screen: Screen) -> int:
    """List the names of the keys, and when each was made.

    \b
    Example:
      lllm3090ctl key list
    """
    listing = client.keys()
    screen.result(listing.members, keys.listed(listing))
    return ExitStatus.OK


@key.command("remove")
@click.argument("name")
@command_body()
def key_remove(client: Client, screen: Screen, name: str) -> int:
    """Let nobody in with a key any more.

    What is being answered goes on. With the last key gone none is asked for; a gateway that other computers reach stops
    listening then.

    \b
    Example:
      lllm3090ctl key remove laptop
    """
    listing = client.remove_key(name)
    screen.result(listing.members, keys.removed(listing, name))
    return ExitStatus.OK
