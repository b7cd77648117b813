"""The command line: the group of all commands, and what holds for each of them."""

from __future__ import annotations

import math

import click

from lllm3090ctl import (
    chat,
    client_commands,
    config_commands,
    engine_commands,
    installation_commands,
    key_commands,
    model_commands,
    record_commands,
    setup_commands,
    view_commands,
)
from lllm3090ctl.client import Client, default_socket_path
from lllm3090ctl.edge import Edge
from lllm3090ctl.installation_commands import DISTRIBUTION
from lllm3090ctl.text import shell_word


@click.group("lllm3090ctl", cls=Edge, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--socket",
    "socket_path",
    metavar="PATH",
    help="The daemon's control socket. Default: control.sock in $LLLM3090_RUNTIME_DIR,"
    " else in lllm3090d in $XDG_RUNTIME_DIR.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0, min_open=True, max=86400),
    metavar="SECONDS",
    help="How long to wait for an answer. Default: 30; models, plan, load and engine 120;"
    " unload and release 300."
    " What follows in a stream may take any time.",
)
@click.version_option(package_name=DISTRIBUTION, prog_name="lllm3090ctl", message="%(prog)s %(version)s")
@click.pass_context
def cli(context: click.Context, socket_path: str | None, timeout_s: float | None) -> None:
    """Load and unload models on this computer's graphics card, through the daemon lllm3090d.

    NAME is a model's name, its alias, or any parts of its name that fit only one model: "qwen-27b" finds
    "Qwen3.8-27B".

    \b
    A first session:
      lllm3090ctl models          what is on disk
      lllm3090ctl plan smollm2    what it would take, line by line
      lllm3090ctl load smollm2    load it
      lllm3090ctl ps              what runs, and how much memory it holds
      lllm3090ctl unload smollm2  give the memory back
    """
    if socket_path == "":
        raise click.BadParameter("a path cannot be empty.", param_hint="--socket")
    if timeout_s is not None and math.isnan(timeout_s):  # within every range, for click
        raise click.BadParameter("nan is not a number of seconds.", param_hint="--timeout")
    command = "lllm3090ctl"
    if socket_path is not None:
        command += f" --socket {shell_word(socket_path)}"
    context.obj = Client(socket_path or default_socket_path(), timeout_s, command)


model_commands.add_to(cli)
view_commands.add_to(cli)
key_commands.add_to(cli)
engine_commands.add_to(cli)
record_commands.add_to(cli)
chat.add_to(cli)
client_commands.add_to(cli)
config_commands.add_to(cli)
setup_commands.add_to(cli)
installation_commands.add_to(cli)
