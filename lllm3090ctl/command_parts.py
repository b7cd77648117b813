"""What commands have in common: a body that is given client and screen, ``--json``, and the argument NAME."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click

from lllm3090ctl.client import Client
from lllm3090ctl.failures import Failure
from lllm3090ctl.output import Screen
from lllm3090ctl.text import named

_Function = Callable[..., Any]


def command_body(*, streaming: bool = False) -> Callable[[_Function], _Function]:
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


def checked_name(_context: click.Context, _parameter: click.Parameter, name: str) -> str:
    """A name as the daemon has it; models whose directory is no UTF-8 are listed with escapes."""
    if not name:
        raise click.BadParameter("a name cannot be empty.")
    return named(name)


def _checked_optional_name(
    context: click.Context, parameter: click.Parameter, name: str | None
) -> str | None:
    return None if name is None else checked_name(context, parameter, name)


name_argument = click.argument("name", callback=checked_name)
optional_name_argument = click.argument("name", required=False, callback=_checked_optional_name)
