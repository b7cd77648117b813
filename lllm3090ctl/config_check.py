"""What the daemon's own rules say of a settings file: a process of its package is asked, so no daemon is needed.

That process (``lllm3090d --check --json``) is run with this interpreter, so that it is of the same installation. It
takes on the environment that the daemon has, or would have.
"""

from __future__ import annotations

import difflib
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lllm3090ctl.config_keys import Shape
from lllm3090ctl.documents import Document, parse
from lllm3090ctl.exits import ExitStatus
from lllm3090ctl.failures import Failure, own_failure

# With -P nothing in the working directory is taken for the daemon's package.
DAEMON = (sys.executable, "-P", "-m", "lllm3090d")
LIMIT_S = 60.0
STDIN = "/dev/stdin"


class Setting(NamedTuple):
    """One setting, as the daemon tells it; see its ``--check --json``."""

    key: str
    variable: str
    shape: Shape
    unit: str | None
    allowed: str
    default: object
    value: object
    origin: str | None
    takes_effect: str
    description: str

    @property
    def depth(self) -> int:
        """How many names may be below it."""
        depth, shape = 0, self.shape
        while shape.element is not None or shape.members:
            depth, shape = depth + 1, shape.element or Shape("text")
        return depth


class Checked(NamedTuple):
    """What a file comes to.

    Attributes:
        file: that the daemon reads.
        exists: whether what was checked is there.
        environment: whose variables counted: ``daemon``, ``manager`` or ``shell``.
        problems: what is not valid; none where all is.
        settings: all of them; without values where they are not valid.
        document: as it was told.
    """

    file: str
    exists: bool
    environment: str
    problems: tuple[str, ...]
    hint: str | None
    settings: Mapping[str, Setting]
    document: Mapping[str, object]

    def named(self, key: str) -> Setting:
        """A setting by its key.

        Raises:
            Failure: ``unknown_setting``.
        """
        if key in self.settings:
            return self.settings[key]
        close = difflib.get_close_matches(key, self.settings, n=3)
        raise own_failure(
            "unknown_setting",
            "There is no such setting",
            f"{key} is not a setting.",
            exit_status=ExitStatus.NOT_FOUND,
            hint=f"Did you mean {' or '.join(close)}?" if close else "All of them: lllm3090ctl config show",
        )

    def require_valid(self, file: str) -> None:
        """Raises Failure: ``config_invalid``, naming the file, where something is wrong."""
        if self.problems:
            raise invalid(self, file)


def invalid(checked: Checked, file: str, untouched: bool = False) -> Failure:
    """What is wrong with a file, by the daemon's rules.

    Args:
        checked: by them.
        file: that it is about.
        untouched: it was not written.
    """
    problems = [each.replace(STDIN, file) for each in checked.problems]
    said = "; ".join(problems)
    said += "" if said.endswith("?") else "."
    return own_failure(
        "config_invalid",
        "The settings are not valid",
        said + (" Nothing was changed." if untouched else ""),
        exit_status=ExitStatus.CONFIG,
        hint=checked.hint,
        details={"file": file, "problems": problems},
    )


def check(file: str | None = None, daemon: Sequence[str] = DAEMON) -> Checked:
    """Check a file as it is; None for the daemon's own.

    Raises:
        Failure: ``check_failed``, ``bad_answer``.
    """
    named = ("--config", file) if file is not None else ()
    return _checked(_output((*daemon, "--check", "--json", *named)))


def check_text(raw: bytes, daemon: Sequence[str] = DAEMON) -> Checked:
    """Check what is to become the file, before any of it is there. Raises as :func:`check`."""
    # A nameless file, which is gone whatever happens.
    with tempfile.TemporaryFile() as file:
        file.write(raw)
        file.flush()
        return _checked(_output((*daemon, "--check", "--json", "--config", STDIN), file.fileno()))


def schema(daemon: Sequence[str] = DAEMON) -> Document:
    """The JSON schema of the file. Raises as :func:`check`."""
    return parse(_output((*daemon, "--schema")))


def _checked(raw: bytes) -> Checked:
    told = parse(raw)
    settings = [_setting(each) for each in told.children("settings")]
    return Checked(
        file=told.text("used_file"),
        exists=told.truth("exists"),
        environment=told.text("environment"),
        problems=told.texts("problems"),
        hint=told.maybe_text("hint"),
        settings={each.key: each for each in settings},
        document=told.members,
    )


def _setting(told: Document) -> Setting:
    members: Mapping[str, Any] = told.members
    return Setting(
        key=told.text("key"),
        variable=told.text("variable"),
        shape=Shape.of(told.child("shape")),
        unit=told.maybe_text("unit"),
        allowed=told.text("allowed"),
        default=members.get("default"),
        value=members.get("value"),
        origin=told.maybe_text("origin"),
        takes_effect=told.text("takes_effect"),
        description=told.text("description"),
    )


def _output(command: Sequence[str], stdin: int = subprocess.DEVNULL) -> bytes:
    try:
        done = subprocess.run(command, stdin=stdin, capture_output=True, check=False, timeout=LIMIT_S)
    except subprocess.TimeoutExpired as error:
        raise _failed(f"it has not answered within {LIMIT_S:g} s") from error
    except OSError as error:
        raise _failed(error.strerror or str(error)) from error
    if done.returncode not in {ExitStatus.OK, ExitStatus.CONFIG} or not done.stdout:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise _failed(last[0] if last else f"it ended with status {done.returncode} and said nothing")
    return done.stdout


def _failed(why: str) -> Failure:
    return own_failure(
        "check_failed",
        "The settings cannot be checked",
        f"What checks the settings did not: {why}. Nothing was changed.",
        exit_status=ExitStatus.FAILURE,
        hint="Run it by hand: python -m lllm3090d --check\nIf it is not there, install again: make install",
    )
