"""The commands that tell what has happened: ``logs``, ``history``, ``events`` and ``requests``."""

from __future__ import annotations

import click

from lllm3090ctl import happenings
from lllm3090ctl import requests as asked
from lllm3090ctl.client import Client
from lllm3090ctl.command_parts import command_body, name_argument, optional_name_argument
from lllm3090ctl.exits import ExitStatus
from lllm3090ctl.output import Screen

MOST_LOG_LINES = 10_000
MOST_RUNS = 1000
USUAL_EVENTS = 100
USUAL_REQUESTS = 20


def add_to(group: click.Group) -> None:
    """Add the commands to the group of all commands."""
    for each in (logs, history, events, requests):
        group.add_command(each)


@click.command()
@name_argument
@click.option(
    "-f", "--follow", is_flag=True, help="Go on with new lines until the model is unloaded, or Ctrl-C."
)
@click.option(
    "-n",
    "--lines",
    type=click.IntRange(0, MOST_LOG_LINES),
    default=100,
    show_default=True,
    metavar="LINES",
    help="How many of the last lines to begin with.",
)
@click.option(
    "--since",
    callback=happenings.log_moment,
    metavar="TIME",
    help=f"Only lines from then on: {happenings.HOW}.",
)
@command_body(streaming=True)
def logs(client: Client, screen: Screen, *, name: str, follow: bool, lines: int, since: str | None) -> int:
    """Show what a model's engine wrote.

    Of a model that is not loaded, what that of its last run wrote.

    \b
    Examples:
      lllm3090ctl logs smollm2 -n 20
      lllm3090ctl logs smollm2 --since 10m
      lllm3090ctl logs smollm2 --follow
    """
    with client.logs(name, lines, follow, since) as stream:
        for line in stream:
            screen.line(line.members, happenings.log_line(line))
    return ExitStatus.OK


@click.command()
@name_argument
@click.option(
    "-n",
    "--runs",
    type=click.IntRange(1, MOST_RUNS),
    default=20,
    show_default=True,
    metavar="RUNS",
    help="How many of the last launches to show.",
)
@command_body()
def history(client: Client, screen: Screen, name: str, runs: int) -> int:
    """Show the last launches of a model, and why each ended.

    When and by whom each was asked for, how long it took to load and served, and of one that failed the last lines of
    its engine. The model may be gone meanwhile.

    \b
    Examples:
      lllm3090ctl history smollm2
      lllm3090ctl history smollm2 -n 3 --json
    """
    view = client.history(name, runs)
    screen.result(view.members, happenings.runs(view))
    return ExitStatus.OK


@click.command()
@click.option(
    "--since",
    callback=happenings.event_start,
    metavar="SEQ|TIME",
    help=f"Only events after this number, or from then on: {happenings.HOW}.",
)
@click.option(
    "-f", "--follow", is_flag=True, help="Go on with new events until the daemon stops, or Ctrl-C."
)
@click.option(
    "-n",
    "--lines",
    type=click.IntRange(0, MOST_LOG_LINES),
    metavar="LINES",
    help="How many of the last events to begin with. Default: 100; with --since all.",
)
@command_body(streaming=True)
def events(client: Client, screen: Screen, since: str | None, follow: bool, lines: int | None) -> int:
    """Show what happened, and who caused it.

    Changes of state, loads that were refused, models that made room, and more.

    \b
    Examples:
      lllm3090ctl events
      lllm3090ctl events --since 2h
      lllm3090ctl events --since 120 --follow --json
    """
    if lines is None and since is None:
        lines = USUAL_EVENTS
    with client.events(since or "0", follow, lines) as stream:
        for line in stream:
            screen.line(line.members, happenings.event(line))
    if follow:
        raise client.ended()
    return ExitStatus.OK


@click.command()
@optional_name_argument
@click.option(
    "--since",
    callback=happenings.log_moment,
    metavar="TIME",
    help=f"Only requests that ended from then on: {happenings.HOW}.",
)
@click.option(
    "-f", "--follow", is_flag=True, help="Go on with others as they end, until the daemon stops, or Ctrl-C."
)
@click.option(
    "-n",
    "--lines",
    type=click.IntRange(0, MOST_LOG_LINES),
    metavar="LINES",
    help="How many of the last requests to begin with. Default: 20; with --since as many as there are, up to"
    f" {MOST_LOG_LINES}.",
)
@command_body(streaming=True)
def requests(
    client: Client,
    screen: Screen,
    *,
    name: str | None,
    since: str | None,
    follow: bool,
    lines: int | None,
) -> int:
    """Show what clients asked models through the gateway, and how long it took.

    When each ended, how, its tokens, and for how long it waited: for its model to be loaded (LOAD), for a slot (LINE),
    and in all until the first byte of the answer (FIRST). Nothing of what was asked or answered is kept.

    \b
    Examples:
      lllm3090ctl requests
      lllm3090ctl requests smollm2 -n 5
      lllm3090ctl requests --since 1h --json
      lllm3090ctl requests --follow
    """
    if lines is None:
        lines = USUAL_REQUESTS if since is None else MOST_LOG_LINES
    with client.requests(name, since, lines, follow) as stream:
        if screen.as_json or follow:
            for line in stream:
                screen.line(line.members, asked.text(line))
        else:
            screen.result({}, asked.table(stream))
    if follow:
        raise client.ended()
    return ExitStatus.OK
