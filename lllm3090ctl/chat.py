"""A conversation with a model in the terminal."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import time
from collections.abc import Callable
from typing import Any

import click

from lllm3090ctl import clients, reach
from lllm3090ctl.client import Client
from lllm3090ctl.client_commands import key_option, load_option
from lllm3090ctl.command_parts import command_body, name_argument
from lllm3090ctl.completions import ANSWER_BROKE_OFF, Figures, Stream, finish_of, messages, text_of
from lllm3090ctl.exits import ExitStatus
from lllm3090ctl.failures import Failure
from lllm3090ctl.output import Screen, is_terminal
from lllm3090ctl.text import clean, count, named

# Kept beside line feeds and tabs: what joins the parts of an emoji.
KEPT = "\n\t\u200d"
PROMPT = "> "
HELP = "/clear forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C stops an answer."
MOST_TOKENS = 1 << 24

_Function = Callable[..., Any]


def add_to(group: click.Group) -> None:
    """Add the command to the group of all commands."""
    group.command("chat")(name_argument(_options(command_body(streaming=True)(_chat))))


def _options(function: _Function) -> _Function:
    options = (
        click.argument("prompt", required=False),
        click.option("-s", "--system", metavar="TEXT", help="System prompt: how the model is to answer."),
        click.option(
            "--max-tokens",
            type=click.IntRange(1, MOST_TOKENS),
            metavar="N",
            help="Longest answer. Default: until the model ends it, or the window is full.",
        ),
        click.option(
            "--thinking/--no-thinking",
            default=None,
            help="Whether what the model thinks is shown, on stderr. Default: on a terminal.",
        ),
        click.option(
            "-v", "--verbose", is_flag=True, help="Tell tokens and speed of each answer, on stderr."
        ),
        load_option,
        key_option,
    )
    for option in reversed(options):
        function = option(function)
    return function


def _chat(
    client: Client,
    screen: Screen,
    *,
    name: str,
    prompt: str | None,
    system: str | None,
    max_tokens: int | None,
    thinking: bool | None,
    verbose: bool,
    no_load: bool,
    key_file: str | None,
) -> int:
    """Ask a model something, or talk to it.

    The model is loaded first. With PROMPT, or with text from a pipe, it answers once; what comes through a pipe stands
    below PROMPT. Without either it is a conversation: Ctrl-C stops an answer, Ctrl-D ends it, /clear forgets
    it. Nothing of it is kept.

    \b
    Examples:
      lllm3090ctl chat smollm2 "Why is the sky blue?"
      git diff | lllm3090ctl chat qwen-27b "Review this change."
      lllm3090ctl chat qwen-27b --system "Answer in one sentence." -v
    """
    text = _asked(prompt)
    if text is None and screen.as_json:
        raise click.UsageError("--json needs PROMPT, or text from a pipe.")
    gateway = reach.gateway(client, reach.key(key_file))
    instance = clients.ensure_loaded(client, name, screen, may_load=not no_load)
    model = instance.text("name")
    show_thinking = is_terminal(sys.stdout) and is_terminal(sys.stderr) if thinking is None else thinking

    def ask(turns: list[tuple[str, str]]) -> _Turn:
        body: dict[str, object] = {"model": model, "messages": messages(system, turns)}
        body |= {"max_tokens": max_tokens} if max_tokens is not None else {}
        turn = _Turn(screen, show_thinking, verbose)
        try:
            with Stream(gateway or instance.text("endpoint"), body) as stream:
                turn.run(stream)
        except Failure as failure:
            if turn.answer:
                raise _explained(client, model, failure) from failure
            raise
        return turn

    if text is None:
        return _converse(screen, model, ask)
    return ExitStatus.INTERRUPTED if ask([("user", text)]).interrupted else ExitStatus.OK


def _explained(client: Client, model: str, failure: Failure) -> Failure:
    """Why an answer broke off, where the daemon knows that the model's launch was ended; else the failure as it is."""
    if failure.problem.get("code") != ANSWER_BROKE_OFF:
        return failure
    try:
        last = next(iter(client.history(model, 1).children("runs")), None)
    except Failure:  # the daemon is gone, or another one: the answer broke off all the same
        return failure
    why = last.members.get("why") if last is not None else None
    if not isinstance(why, str) or not why:
        return failure
    return Failure(
        {**failure.problem, "detail": f"{model} ended in the middle of its answer: {why}."},
        failure.exit_status,
    )


def _converse(screen: Screen, model: str, ask: Callable[[list[tuple[str, str]]], _Turn]) -> int:
    """One question after the other."""
    with contextlib.suppress(ImportError):  # editing of lines; what is typed is remembered in memory alone
        import readline  # noqa: PLC0415 - only needed here

        readline.set_auto_history(True)
        readline.parse_and_bind("tab: self-insert")
    click.echo(f"{clean(model)}. {HELP}", err=True)
    turns: list[tuple[str, str]] = []
    while True:
        try:
            line = input(PROMPT).strip()
        except EOFError:
            click.echo()
            return ExitStatus.OK
        except KeyboardInterrupt:
            click.echo()
            continue
        if line == "/exit":
            return ExitStatus.OK
        if line == "/clear":
            turns.clear()
        elif line.startswith("/") and " " not in line:
            click.echo(HELP, err=True)
        elif line:
            turns.append(("user", line.encode("utf-8", "replace").decode()))
            try:
                answer = ask(turns).answer
            except Failure as failure:
                answer = ""
                screen.failure(failure, streaming=True)
            if answer:
                turns.append(("assistant", answer))
            else:  # it was not answered, so it may be asked again
                turns.pop()


class _Turn:
    """One answer on its way to the terminal.

    Attributes:
        answer: what has come of it.
        interrupted: it was stopped by Ctrl-C.
    """

    def __init__(self, screen: Screen, thinking: bool, verbose: bool) -> None:
        self._screen = screen
        self._thinking = thinking
        self._verbose = verbose
        self._is_plain = not is_terminal(sys.stdout)
        self._line_is_open = False  # on stdout
        self._thought_is_open = False  # on stderr
        self.answer = ""
        self.interrupted = False

    def run(self, stream: Stream) -> None:
        """Write it as it comes.

        Raises:
            Failure: why it does not come to its end; what came is written.
        """
        asked_s = time.monotonic()
        began_s, figures, finish = None, Figures(), None
        try:
            for chunk in stream:
                if self._screen.as_json:
                    self._screen.line(chunk.members, "")
                thought, text = text_of(chunk, "reasoning_content"), text_of(chunk, "content")
                if began_s is None and (thought or text):
                    began_s = time.monotonic()
                self._write_thought(thought)
                self._write(text)
                figures = Figures.of(chunk, figures)
                finish = finish_of(chunk) or finish
        except KeyboardInterrupt:
            self.interrupted = True
        finally:
            self._end()
        if finish == "length":
            click.echo("(The answer was cut: it reached its limit, or the window is full.)", err=True)
        if self._verbose:
            click.echo(_told(figures, asked_s, began_s, time.monotonic()), err=True)

    def _write(self, text: str) -> None:
        if not text:
            return
        self._close_thought()
        self.answer += text
        if self._screen.as_json:
            return
        self._line_is_open = not text.endswith("\n")  # first: an interrupt may come in between
        if self._is_plain:
            shown = text.encode("utf-8", "backslashreplace").decode()
            click.echo(shown, nl=False, color=True)  # whatever it is: nothing is taken out
        else:
            click.echo(clean(text, KEPT), nl=False)

    def _write_thought(self, text: str) -> None:
        if text and self._thinking and not self._screen.as_json:
            shown = clean(text, KEPT)
            click.echo(
                click.style(shown, dim=True) if is_terminal(sys.stderr) else shown, nl=False, err=True
            )
            self._thought_is_open = True

    def _close_thought(self) -> None:
        if self._thought_is_open:
            click.echo("\n", err=True)
            self._thought_is_open = False

    def _end(self) -> None:
        self._close_thought()
        if self._line_is_open:
            click.echo()


def _told(figures: Figures, asked_s: float, began_s: float | None, ended_s: float) -> str:
    """Tokens and speed: the engine's own, else by the clock of this client."""
    speed = figures.tokens_per_s
    if speed is None and figures.generated_tokens and began_s is not None and ended_s > began_s:
        speed = figures.generated_tokens / (ended_s - began_s)
    parts = []
    if figures.prompt_tokens is not None:
        parts.append(f"{count(figures.prompt_tokens, 'token')} of prompt")
    if figures.generated_tokens is not None:
        parts.append(f"{count(figures.generated_tokens, 'token')} of answer")
    if speed is not None:
        parts.append(f"{speed:.1f} tokens/s")
    if began_s is not None:
        parts.append(f"first after {began_s - asked_s:.2f} s")
    return f"({', '.join([*parts, f'{ended_s - asked_s:.2f} s in all'])})"


def _asked(prompt: str | None) -> str | None:
    """The question: the argument, what comes through a pipe, or both; None for a conversation.

    Raises:
        click.UsageError: it is empty.
    """
    piped = _piped()
    if prompt is None and piped is None:
        return None
    given = [named(prompt)] if prompt is not None else []
    text = "\n\n".join([*given, *([piped] if piped else [])])
    if not text.strip():
        raise click.UsageError("The question is empty.")
    return text


def _piped() -> str | None:
    """What stands in standard input where that is a pipe or a file; None where it is a terminal, or nothing."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):  # there is none
        return None
    if not (stat.S_ISFIFO(mode) or stat.S_ISREG(mode)):
        return None
    return sys.stdin.buffer.read().decode("utf-8", "replace").strip()
