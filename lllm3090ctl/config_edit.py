"""A copy of the settings file in a person's editor, again and again until it is valid or given up."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import click

from lllm3090ctl.config_check import Checked
from lllm3090ctl.exits import ExitStatus
from lllm3090ctl.failures import Failure, own_failure

USUAL_EDITORS = ("sensible-editor", "editor", "nano", "vi")


class Edited(NamedTuple):
    """What a person made of a file, and what the daemon's rules say of it: it is valid."""

    raw: bytes
    checked: Checked


def editor(environment: Mapping[str, str]) -> list[str]:
    """The editor's command line: ``$VISUAL``, else ``$EDITOR``, else one that is usually there.

    Raises:
        Failure: ``editor_failed``.
    """
    chosen = environment.get("VISUAL") or environment.get("EDITOR") or ""
    try:
        words = shlex.split(chosen)
    except ValueError as error:
        raise _failed(f"{chosen!r} is no command line ({error})") from error
    words = words or [name for name in USUAL_EDITORS if shutil.which(name)][:1]
    if not words:
        raise _failed("there is none")
    return words


def edit(
    raw: bytes,
    check: Callable[[bytes], Checked],
    tell: Callable[[Checked], None],
    apply: Callable[[Edited], None],
    environment: Mapping[str, str] = os.environ,
) -> bool:
    """Open a copy, check it, and offer to edit it again where it is not valid; whether anything was changed.

    The copy goes when this returns or raises, unless it could not be applied: then the failure says where it is.

    Args:
        raw: what the copy holds at first.
        check: by the daemon's rules.
        tell: what is wrong with it.
        apply: puts it in place.
        environment: for the editor.

    Raises:
        Failure: ``editor_failed``; ``config_discarded``; what ``apply`` raises.
    """
    command = editor(environment)
    directory = Path(tempfile.mkdtemp(prefix="lllm3090-config-"))
    copy = directory / "config.toml"
    is_kept = False
    try:
        copy.write_bytes(raw)
        while True:
            _open(command, copy)
            now = copy.read_bytes()
            if now == raw:
                return False
            checked = check(now)
            if not checked.problems:
                break
            tell(checked)
            if not _again():
                raise own_failure(
                    "config_discarded",
                    "The changes were given up",
                    "What you wrote is not valid and was given up; the file is as it was.",
                    exit_status=ExitStatus.CONFIG,
                )
        try:
            apply(Edited(now, checked))
        except Failure as failure:
            if failure.problem.get("code") == "reload_failed":  # it is in its place
                raise
            is_kept = True
            hint = f"{failure.problem.get('hint', '')}\nWhat you wrote is kept: {copy}"
            raise Failure({**failure.problem, "hint": hint.strip()}, failure.exit_status) from failure
        return True
    finally:
        if not is_kept:
            shutil.rmtree(directory)


def _open(command: list[str], copy: Path) -> None:
    try:
        status = subprocess.run([*command, str(copy)], check=False).returncode
    except OSError as error:
        raise _failed(f"{command[0]} cannot be run: {error.strerror or error}") from error
    if status != 0:
        raise _failed(f"{command[0]} ended with status {status}")
    if not copy.is_file():
        raise _failed(f"{command[0]} has left no file")


def _again() -> bool:
    """Whether a person wants to edit again; who gives no answer does not."""
    try:
        return click.confirm("Edit it again? Otherwise it is given up.", default=True, err=True)
    except click.Abort:
        return False


def _failed(why: str) -> Failure:
    return own_failure(
        "editor_failed",
        "The editor could not be used",
        f"The editor could not be used: {why}. Nothing was changed.",
        exit_status=ExitStatus.FAILURE,
        hint="Name another one: EDITOR=nano lllm3090ctl config edit",
    )
