"""The commands that change what is loaded: ``load``, ``unload``, ``release``, ``pin``, ``autoload`` and the like."""

from __future__ import annotations

import math
from typing import Any

import click

from lllm3090ctl import comebacks, loading, render, wanted
from lllm3090ctl.client import Client
from lllm3090ctl.command_parts import command_body, name_argument, optional_name_argument
from lllm3090ctl.exits import ExitStatus
from lllm3090ctl.failures import as_failure
from lllm3090ctl.output import Screen
from lllm3090ctl.plan_options import load_options, plan_body, plan_options
from lllm3090ctl.progress import display

MOST_DRAIN_S = 86400


def add_to(group: click.Group) -> None:
    """Add the commands to the group of all commands."""
    for each in (load, unload, release, resume, pin, unpin, reset, autoload):
        group.add_command(each)


@click.command()
@name_argument
@plan_options
@load_options
@click.option(
    "--cancel-on-interrupt",
    is_flag=True,
    help="Ctrl-C (or SIGTERM) aborts the load. Without this the daemon goes on with it.",
)
@click.option(
    "-q", "--quiet", is_flag=True, help="Write nothing unless it fails; with --json only the last line."
)
@command_body(streaming=True)
def load(
    client: Client,
    screen: Screen,
    *,
    name: str,
    cancel_on_interrupt: bool,
    quiet: bool,
    **options: Any,
) -> int:
    """Load a model and wait until it answers.

    The daemon plans the largest context that fits, refuses what would not fit before anything starts, and
    shows the progress. The last line names the Unix socket on which the model answers. What is loaded already
    stays as it is. Where there is no room, idle models are unloaded for it, the least recently used first: none
    that is busy, pinned or just loaded, and none at all unless that makes room.

    ENGINE_ARGUMENT, after a double dash, is an argument for llama-server itself. Those with a price change the plan.

    \b
    Examples:
      lllm3090ctl load smollm2
      lllm3090ctl load smollm2 --context 8192 --parallel 2 --cache-type q8_0
      lllm3090ctl load smollm2 -- --threads 4
    """
    body = plan_body(name, options) | {"token": loading.new_token()}
    with display(name, screen, quiet) as shown:
        last, loaded_before = loading.load(client, body, shown, cancel_on_interrupt)
    if last.text("kind") == "failed":
        failure = as_failure(last.child("problem").members)
        if not screen.as_json:  # the stream's last line has said it
            raise failure
        return failure.exit_status
    if not (quiet or screen.as_json):
        screen.result(last.members, render.loaded(last, loaded_before, pin=bool(body.get("pin"))))
    return ExitStatus.OK


@click.command()
@name_argument
@click.option(
    "--drain",
    "drain_s",
    type=click.FloatRange(min=0, max=MOST_DRAIN_S),
    metavar="SECONDS",
    help="How long requests in flight may take to end; 0 stops it at once. Default: the daemon's setting drain_s.",
)
@click.option("--force", is_flag=True, help="Kill it at once (SIGKILL), whatever it does.")
@command_body()
def unload(client: Client, screen: Screen, *, name: str, drain_s: float | None, force: bool) -> int:
    """Stop a model and wait until its memory is free again.

    New requests are refused from the beginning; those in flight may end, for as long as --drain says, and ps shows how
    many there are. Then it is stopped, and killed where it does not stop (setting stop_timeout_s). A model that is
    stalled is not waited for without --drain. Ctrl-C ends the waiting, not the unload; another unload with a shorter
    --drain, or with --force, hurries it.

    \b
    Examples:
      lllm3090ctl unload smollm2
      lllm3090ctl unload smollm2 --drain 300
      lllm3090ctl unload smollm2 --force
    """
    if drain_s is not None and math.isnan(drain_s):  # within every range, for click
        raise click.BadParameter("nan is not a number of seconds.", param_hint="--drain")
    if force and drain_s is not None:
        raise click.UsageError("--force waits for nothing: leave out one of --force and --drain.")
    answer = client.unload(name, drain_s, force)
    screen.result(answer.members, render.unloaded(answer))
    return ExitStatus.OK


@click.command()
@click.option(
    "--until-resume",
    is_flag=True,
    help="Also refuse every load until: lllm3090ctl resume. A restart of the daemon does not change that.",
)
@command_body()
def release(client: Client, screen: Screen, until_resume: bool) -> int:
    """Free the whole card at once, such as for a game.

    Every model is stopped, those that are pinned, busy or being loaded too. It returns when their memory is free.

    \b
    Examples:
      lllm3090ctl release
      lllm3090ctl release --until-resume
    """
    answer = client.release(until_resume)
    screen.result(answer.members, render.released(answer, client.command))
    return ExitStatus.OK


@click.command()
@command_body()
def resume(client: Client, screen: Screen) -> int:
    """Take loads again after release --until-resume.

    Models that were loaded when the card was released are loaded again, and a failed one whose start fell due meanwhile
    is started now. It does not wait for them: see ps.

    \b
    Example:
      lllm3090ctl resume
    """
    answer = client.resume()
    screen.result(answer.members, render.resumed(answer))
    return ExitStatus.OK


@click.command()
@name_argument
@command_body()
def pin(client: Client, screen: Screen, name: str) -> int:
    """Keep a loaded model from being unloaded to make room.

    Neither a load of another model nor other programs on the card drive it out, however long it is idle. The pin ends
    when the model is unloaded.

    \b
    Example:
      lllm3090ctl pin smollm2
    """
    answer = client.pin(name, pinned=True)
    screen.result(answer.members, render.pinned(answer))
    return ExitStatus.OK


@click.command()
@name_argument
@command_body()
def unpin(client: Client, screen: Screen, name: str) -> int:
    """Take the pin of a model away.

    \b
    Example:
      lllm3090ctl unpin smollm2
    """
    answer = client.pin(name, pinned=False)
    screen.result(answer.members, render.pinned(answer))
    return ExitStatus.OK


@click.command()
@name_argument
@command_body()
def reset(client: Client, screen: Screen, name: str) -> int:
    """Start a model again that failed or stays down.

    What happened to it is forgotten, so that it is started again by itself as often as before. It does not wait for the
    start: see ps. A model that runs is left alone.

    \b
    Example:
      lllm3090ctl reset smollm2
    """
    answer = client.reset(name)
    screen.result(answer.members, comebacks.reset(answer))
    return ExitStatus.OK


@click.command()
@optional_name_argument
@click.option("--off", is_flag=True, help="No longer load it.")
@command_body()
def autoload(client: Client, screen: Screen, name: str | None, off: bool) -> int:
    """Load a model at every login, or list those that are.

    They are loaded when the daemon starts for the first time after a login or a boot: first those that the setting
    autoload names, then those marked here, the oldest mark first. Nothing is unloaded for them. A model that is loaded
    now is loaded as it is now; mark it again after a load with other options. --off unloads nothing.

    \b
    Examples:
      lllm3090ctl autoload
      lllm3090ctl autoload smollm2
      lllm3090ctl autoload smollm2 --off
    """
    if name is None:
        if off:
            raise click.UsageError("--off needs NAME.")
        listing = client.autoload()
        screen.result(listing.members, wanted.autoload(listing))
        return ExitStatus.OK
    listing = client.mark_autoload(name, not off)
    screen.result(listing.members, wanted.marked(listing, name, not off))
    return ExitStatus.OK
