"""The commands that look and change nothing: models, plans, the daemon, the cards."""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import quote

import click

from lllm3090ctl import cards, checkpoints, plans, render
from lllm3090ctl.client import Client
from lllm3090ctl.command_parts import checked_name, command_body, name_argument
from lllm3090ctl.exits import ExitStatus
from lllm3090ctl.output import Screen
from lllm3090ctl.plan_options import card_options, plan_body, plan_options


def add_to(group: click.Group) -> None:
    """Add the commands to the group of all commands."""
    for each in (ps, models, inspect, plan, status, gpu, explain):
        group.add_command(each)


@click.command()
@command_body()
def ps(client: Client, screen: Screen) -> int:
    """List the models that run, with the memory they hold.

    RESERVED is what the plan set aside for a model, MEASURED what it was seen to take. USE tells whether it works, and
    else for how long it has not. Loads that wait for room stand below, with the reason.

    \b
    Example:
      lllm3090ctl ps
    """
    listing = client.instances()
    screen.result(listing.members, render.instances(listing))
    return ExitStatus.OK


@click.command()
@click.option(
    "--catalogue", is_flag=True, help="Also models that are not on disk, and where they are to be had."
)
@command_body()
def models(client: Client, screen: Screen, catalogue: bool) -> int:
    """List the models on disk, and what each would get.

    Why one cannot be loaded stands below the table.

    CONTEXT is the number of tokens a model was trained for, B/TOKEN what the cache takes for one of them, in
    bytes, and SLOT what its recurrent states take for each conversation. VERDICT and PLAN (slots x window) are for
    the card as if nothing were loaded. Projectors and drafters that go with a model stand there
    too. A narrow terminal shows fewer columns.

    \b
    Examples:
      lllm3090ctl models
      lllm3090ctl models --catalogue
    """
    listing = client.models(catalogue)
    screen.result(listing.members, checkpoints.models(listing))
    return ExitStatus.OK


def _inspect_body(context: click.Context, parameter: click.Parameter, given: str) -> dict[str, object]:
    """The request: a path where it looks like one or such a file is there, else a model's name."""
    name = checked_name(context, parameter, given)
    # No pathlib, for speed.
    is_file = os.path.lexists(given) and not os.path.isdir(given)  # noqa: PTH112
    if not (is_file or given.startswith(("/", "./", "../"))):
        return {"model": name}
    try:
        path = os.path.join(os.getcwd(), given)  # noqa: PTH109, PTH118
    except OSError as error:
        raise click.BadParameter(f"the working directory of {name!r} cannot be named: {error}") from None
    raw = os.fsencode(path)
    try:
        return {"path": raw.decode()}
    except UnicodeDecodeError:  # a file: URI names any bytes
        return {"path": f"file://{quote(raw)}"}


@click.command()
@click.argument("body", metavar="FILE_OR_NAME", callback=_inspect_body)
@command_body()
def inspect(client: Client, screen: Screen, body: dict[str, object]) -> int:
    """Show what a model or any GGUF file is, layer by layer.

    With it comes what its context costs.

    FILE_OR_NAME is a file if there is one or if it begins with / or ./, else the name of a model. A file that
    cannot be planned shows what its header says, and the reason.

    \b
    Examples:
      lllm3090ctl inspect smollm2
      lllm3090ctl inspect ./qwen-27b.gguf
    """
    view = client.inspect(body)
    screen.result(view.members, checkpoints.inspection(view))
    return ExitStatus.OK


@click.command()
@name_argument
@plan_options
@card_options
@click.option(
    "--explain", is_flag=True, help="Show the formula and origin of each line, and what else could be had."
)
@command_body()
def plan(client: Client, screen: Screen, *, name: str, explain: bool, **options: Any) -> int:
    """Show what loading a model would take, without loading it.

    The price line by line, what the card can give, whether it fits (exit status 5 if not), and the command
    line of the engine. With --card, --vram, --desktop, --headless or --backend the plan is for a card with nothing on
    it. A model that is not on disk but in the catalogue gets a preview, which takes --context, --parallel and
    --slot-policy.

    ENGINE_ARGUMENT, after a double dash, is an argument for llama-server itself. Those with a price change the plan.

    \b
    Examples:
      lllm3090ctl plan smollm2
      lllm3090ctl plan smollm2 --context 4096 --parallel 2 --cache-type q4_0
      lllm3090ctl plan smollm2 --vram 16GiB --headless --explain
      lllm3090ctl plan smollm2 -- --threads 4
    """
    view = client.plan(plan_body(name, options))
    screen.result(view.members, plans.plan(view, explain))
    return ExitStatus.OK if plans.succeeds(view) else ExitStatus.REFUSED


@click.command()
@command_body()
def status(client: Client, screen: Screen) -> int:
    """Show the daemon, the card, the engine, and what runs.

    \b
    Example:
      lllm3090ctl status
    """
    view = client.status()
    screen.result(view.members, render.status(view, client.shown_path))
    return ExitStatus.OK


@click.command()
@command_body()
def gpu(client: Client, screen: Screen) -> int:
    """Show who holds the memory of each card, and what is left.

    A bar of the card by owner with its table: the driver, other programs, each model with what is still to come of
    it, what is kept for the desktop, what did not come back, and what is free. Below stands what each model was
    promised, line by line. Host memory follows.

    \b
    Example:
      lllm3090ctl gpu
    """
    listing = client.gpus()
    screen.result(listing.members, cards.gpus(listing))
    return ExitStatus.OK


@click.command()
@name_argument
@command_body()
def explain(client: Client, screen: Screen, name: str) -> int:
    """Show what a loaded model was priced at, and what it takes.

    Each line of the price with its evidence, beside the engine's own figures where its log has them (it does when
    the model is loaded with -- -lv 4), and what was measured. Of a model that failed or stays down: what was planned.

    \b
    Example:
      lllm3090ctl explain smollm2
    """
    view = client.explain(name)
    screen.result(view.members, cards.explanation(view))
    return ExitStatus.OK
