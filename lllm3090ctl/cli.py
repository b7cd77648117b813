"""The commands. Each asks the daemon, builds a result, and hands it to the one place that writes."""

from __future__ import annotations

import functools
import io
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import click

from lllm3090ctl import (
    cards,
    chat,
    checkpoints,
    client_commands,
    comebacks,
    config_commands,
    engines,
    happenings,
    keys,
    loading,
    plans,
    render,
    setup_commands,
    wanted,
)
from lllm3090ctl import requests as asked
from lllm3090ctl.client import Client, default_socket_path
from lllm3090ctl.exits import ExitStatus
from lllm3090ctl.failures import Failure, as_failure
from lllm3090ctl.output import Screen
from lllm3090ctl.plan_options import card_options, load_options, plan_body, plan_options
from lllm3090ctl.progress import display
from lllm3090ctl.text import clean, named, shell_word

DISTRIBUTION = "lllm3090"
MOST_LOG_LINES = 10_000
MOST_RUNS = 1000
MOST_DRAIN_S = 86400
USUAL_EVENTS = 100
USUAL_REQUESTS = 20

_Function = Callable[..., Any]


class Edge(click.Group):
    """The group of all commands, and the edge of the program: here every ending becomes an exit status."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command line and leave the process, with a status of ``docs/reference/exit-statuses.md``."""
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, standalone_mode, **extra)
        try:
            status = super().main(args, prog_name or "lllm3090ctl", complete_var, False, **extra)
        except click.exceptions.Abort:
            status = ExitStatus.INTERRUPTED
        except click.ClickException as error:
            text = io.StringIO()
            error.show(text)
            if isinstance(error, click.NoSuchOption):
                text.write(_engine_option_hint(error))
            click.echo(
                clean(text.getvalue(), keep="\n"), nl=False, err=True
            )  # it may quote the command line
            status = error.exit_code
        except OSError as error:
            # The client turns its own into failures, so this is the output: a full disk, a closed terminal.
            # (click itself ends the process quietly with status 1 when a pipe's reader has gone.)
            _discard_output()
            click.echo(f"lllm3090ctl: The output cannot be written: {error.strerror or error}", err=True)
            status = ExitStatus.FAILURE
        sys.exit(status)


def _engine_option_hint(error: click.NoSuchOption) -> str:
    """How an option of the engine is given, for an option that ``load`` or ``plan`` does not have; else nothing."""
    context = error.ctx
    if context is None or not any(parameter.name == "arguments" for parameter in context.command.params):
        return ""
    return f"If it is for the engine: {context.command_path} NAME -- {error.option_name} ...\n"


def _discard_output() -> None:
    """Let the interpreter's last flush of stdout succeed, else it complains and changes the exit status."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def _command(*, streaming: bool = False) -> Callable[[_Function], _Function]:
    """Make a function a command's body: add ``--json``, hand it client and screen, write its failures.

    Args:
        streaming: the JSON of this command is NDJSON.
    """
    form = "one JSON document per line (NDJSON)" if streaming else "one JSON document"

    def decorate(function: _Function) -> _Function:
        @click.option("--json", "as_json", is_flag=True, help=f"Write {form} instead of text.")
        @click.pass_obj
        @functools.wraps(function)
        def run(client: Client, /, *, as_json: bool, **options: Any) -> int:
            screen = Screen(as_json)
            try:
                return int(function(client, screen, **options))
            except Failure as failure:
                screen.failure(failure, streaming)
                return failure.exit_status

        return run

    return decorate


def _checked_name(_context: click.Context, _parameter: click.Parameter, name: str) -> str:
    """A name as the daemon has it; models whose directory is no UTF-8 are listed with escapes."""
    if not name:
        raise click.BadParameter("a name cannot be empty.")
    return named(name)


def _checked_optional_name(
    context: click.Context, parameter: click.Parameter, name: str | None
) -> str | None:
    return None if name is None else _checked_name(context, parameter, name)


_name_argument = click.argument("name", callback=_checked_name)


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


@cli.command()
@_name_argument
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
@_command(streaming=True)
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


@cli.command()
@_name_argument
@click.option(
    "--drain",
    "drain_s",
    type=click.FloatRange(min=0, max=MOST_DRAIN_S),
    metavar="SECONDS",
    help="How long requests in flight may take to end; 0 stops it at once. Default: the daemon's setting drain_s.",
)
@click.option("--force", is_flag=True, help="Kill it at once (SIGKILL), whatever it does.")
@_command()
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


@cli.command()
@click.option(
    "--until-resume",
    is_flag=True,
    help="Also refuse every load until: lllm3090ctl resume. A restart of the daemon does not change that.",
)
@_command()
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


@cli.command()
@_command()
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


@cli.command()
@_name_argument
@_command()
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


@cli.command()
@_name_argument
@_command()
def unpin(client: Client, screen: Screen, name: str) -> int:
    """Take the pin of a model away.

    \b
    Example:
      lllm3090ctl unpin smollm2
    """
    answer = client.pin(name, pinned=False)
    screen.result(answer.members, render.pinned(answer))
    return ExitStatus.OK


@cli.command()
@_name_argument
@_command()
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


@cli.command()
@click.argument("name", required=False, callback=_checked_optional_name)
@click.option("--off", is_flag=True, help="No longer load it.")
@_command()
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


@cli.command()
@_command()
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


@cli.command()
@click.option(
    "--catalogue", is_flag=True, help="Also models that are not on disk, and where they are to be had."
)
@_command()
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
    name = _checked_name(context, parameter, given)
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


@cli.command()
@click.argument("body", metavar="FILE_OR_NAME", callback=_inspect_body)
@_command()
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


@cli.command()
@_name_argument
@plan_options
@card_options
@click.option(
    "--explain", is_flag=True, help="Show the formula and origin of each line, and what else could be had."
)
@_command()
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


@cli.command()
@_command()
def status(client: Client, screen: Screen) -> int:
    """Show the daemon, the card, the engine, and what runs.

    \b
    Example:
      lllm3090ctl status
    """
    view = client.status()
    screen.result(view.members, render.status(view, client.shown_path))
    return ExitStatus.OK


@cli.command()
@_command()
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


@cli.command()
@_name_argument
@_command()
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


@cli.group()
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
@_command()
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
@_command()
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
@_command()
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


@cli.group()
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
@_command()
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
@click.argument("name", required=False, callback=_checked_optional_name)
@_command()
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
@click.argument("name", required=False, callback=_checked_optional_name)
@click.option("--automatic", is_flag=True, help="Forget the choice: the best build by its place is used.")
@_command()
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


@cli.command()
@_name_argument
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
@_command(streaming=True)
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


@cli.command()
@_name_argument
@click.option(
    "-n",
    "--runs",
    type=click.IntRange(1, MOST_RUNS),
    default=20,
    show_default=True,
    metavar="RUNS",
    help="How many of the last launches to show.",
)
@_command()
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


@cli.command()
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
@_command(streaming=True)
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


@cli.command()
@click.argument("name", required=False, callback=_checked_optional_name)
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
@_command(streaming=True)
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


chat.add_to(cli, _command, _name_argument)
client_commands.add_to(cli, _command, _name_argument)
config_commands.add_to(cli, _command)
setup_commands.add_to(cli, _command)


@cli.command()
@_command()
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


@cli.command()
@_command()
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
