"""The edge of the program: here every ending becomes an exit status."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from lllm3090ctl.exits import ExitStatus
from lllm3090ctl.text import clean


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
