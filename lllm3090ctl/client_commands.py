"""The commands by which other programs use a model: ``env``, ``run`` and ``claude``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from lllm3090ctl import clients, environment, reach
from lllm3090ctl.client import Client
from lllm3090ctl.command_parts import command_body, name_argument
from lllm3090ctl.exits import ExitStatus
from lllm3090ctl.output import Screen
from lllm3090ctl.text import named

_Function = Callable[..., Any]

key_option = click.option(
    "--key-file",
    "key_file",
    metavar="PATH",
    help="File with the gateway's key, where it asks for one. Default: the variable LLLM3090_API_KEY; else none.",
)
load_option = click.option(
    "--no-load", "no_load", is_flag=True, help="Fail where the model is not loaded, instead of loading it."
)


def add_to(group: click.Group) -> None:
    """Add the commands to the group of all commands."""
    group.command("env")(name_argument(_env_options(command_body()(_env))))
    passing_on = {"ignore_unknown_options": True, "allow_interspersed_args": False}
    group.command("run")(name_argument(_run_options(command_body()(_run))))
    group.command("claude", context_settings=passing_on)(_claude_options(command_body()(_claude)))


def _env_options(function: _Function) -> _Function:
    shell = click.option(
        "--shell",
        type=click.Choice(environment.SHELLS),
        default="sh",
        show_default=True,
        help="For whom: sh is also bash and zsh, csh also tcsh; json is an object, null where a variable is unset.",
    )
    return shell(key_option(function))


def _env(client: Client, screen: Screen, *, name: str, shell: str, key_file: str | None) -> int:
    """Print the environment that other programs need to use a model.

    Address, key and model for OpenAI's and Anthropic's libraries and for Claude Code, and the context, the longest
    answer and the subagents that the model really has: as it is loaded, else as it would be. Of an embedding or rerank
    model, address and key for OpenAI's libraries alone. It loads nothing; the first request does.

    \b
    Examples:
      lllm3090ctl env qwen-27b
      eval "$(lllm3090ctl env qwen-27b)"
      lllm3090ctl env qwen-27b --shell fish | source
      lllm3090ctl env qwen-27b --json
    """
    known = clients.facts(client, name)
    where = reach.required(client, reach.key(key_file))
    values = environment.variables(known, where.url, where.key)
    document = {
        "model": known.model,
        "basis": known.basis,
        "window_tokens": known.window_tokens,
        "output_tokens": known.output_tokens if known.chats else None,
        "slots": known.slots,
        "subagents": known.subagents if known.chats else None,
        "purpose": known.purpose,
        "environment": values,
        "unset": list(environment.unset(values)),
    }
    screen.result(document, [environment.commands(values, shell)])
    return ExitStatus.OK


def _run_options(function: _Function) -> _Function:
    arguments = click.argument(
        "program", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND..."
    )
    return arguments(load_option(key_option(function)))


def _run(
    client: Client,
    screen: Screen,
    *,
    name: str,
    program: tuple[str, ...],
    no_load: bool,
    key_file: str | None,
) -> int:
    """Run a program with the environment that it needs to use a model.

    The model is loaded first. The variables are those of env; nothing is written anywhere.

    \b
    Examples:
      lllm3090ctl run qwen-27b -- opencode
      lllm3090ctl run qwen-27b -- python3 script.py
    """
    where = reach.required(client, reach.key(key_file))
    known = clients.of_instance(clients.ensure_loaded(client, name, screen, may_load=not no_load))
    values = environment.variables(known, where.url, where.key)
    clients.execute(program[0], program[1:], values, "Name a program that is in PATH, or its path.")


def _claude_options(function: _Function) -> _Function:
    options = (
        click.option(
            "--model", "name", metavar="NAME", help="The model to use. Default: the only one that is loaded."
        ),
        click.option(
            "--anyway", is_flag=True, help="Also with a window below the 40,960 tokens that an agent needs."
        ),
        load_option,
        key_option,
        click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[CLAUDE_ARGUMENT...]"),
    )
    for option in reversed(options):
        function = option(function)
    return function


def _claude(
    client: Client,
    screen: Screen,
    *,
    name: str | None,
    anyway: bool,
    no_load: bool,
    key_file: str | None,
    arguments: tuple[str, ...],
) -> int:
    """Run Claude Code with a model of this computer.

    The model is loaded first, with its progress, and Claude Code is told its address, its real context and how many
    subagents have a slot. It is refused where its window is too small for an agent. Nothing is written to your own
    settings of Claude Code, which hold otherwise. Arguments behind these options are for Claude Code.

    \b
    Examples:
      lllm3090ctl claude
      lllm3090ctl claude --model qwen-27b
      lllm3090ctl claude --model qwen-27b -- -p "What does this repository do?"
    """
    where = reach.required(client, reach.key(key_file))
    name = clients.default_model(client) if name is None else named(name)
    if not anyway:  # before it is loaded for nothing
        clients.require_agent(client, clients.facts(client, name))
    known = clients.of_instance(clients.ensure_loaded(client, name, screen, may_load=not no_load))
    clients.require_chat(client, known)
    if not anyway:
        clients.require_agent(client, known)
    values = environment.variables(known, where.url, where.key)
    own = () if "--settings" in arguments else ("--settings", clients.settings(values))
    hint = f"Install it: {clients.HOW_TO_INSTALL_CLAUDE}"
    clients.execute(clients.CLAUDE, [*own, *arguments], values, hint)
