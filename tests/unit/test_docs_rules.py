"""Commands of the manual that no test runs are read: by the shell, by make, and against what there is."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess

import pytest
from manual.blocks import Command
from manual.rules import REPOSITORY, RULES, all_commands, placed, rule_of

pytestmark = pytest.mark.unit

COMMANDS = all_commands()
NOT_RUN = tuple(command for command in COMMANDS if (rule := rule_of(command)) is not None and rule.skip)
MODULE = re.compile(r"python -m ((?:bench|tests)\.\w+)(.*)")


def wrong_with(command: Command) -> str:
    """What is wrong with a command that is not run; empty if nothing is seen."""
    read = subprocess.run(["bash", "-n", "-c", command.text], capture_output=True, text=True, check=False)
    if read.returncode != 0:
        return read.stderr
    words = shlex.split(command.text, comments=True)
    if words[0] == "make":
        dry = subprocess.run(
            ["make", "-n", *words[1:]], capture_output=True, text=True, check=False, cwd=REPOSITORY
        )
        return "" if dry.returncode == 0 else dry.stderr
    if module := MODULE.search(command.text):
        spec = importlib.util.find_spec(module[1])
        if spec is None or spec.origin is None:
            return f"there is no {module[1]}"
        source = spec.origin.replace("__init__.py", "__main__.py")
        with open(source, encoding="utf-8") as file:  # noqa: PTH123 - a path of the import system is a string
            text = file.read()
        unknown = [option for option in re.findall(r"--[\w-]+", module[2]) if f'"{option}"' not in text]
        return f"{module[1]} has no {unknown[0]}" if unknown else ""
    return ""


@pytest.mark.parametrize("command", NOT_RUN, ids=str)
def test_what_is_not_run_can_be_read(command: Command) -> None:
    """Syntax, targets of make, modules and their options."""
    assert wrong_with(command) == ""


@pytest.mark.parametrize(
    "text",
    [
        "make no-such-target",
        "sudo sh -c 'x' && (",
        ".venv/bin/python -m bench.no_such",
        ".venv/bin/python -m bench.accuracy --no-such",
    ],
)
def test_what_is_wrong_is_found(text: str) -> None:
    """The reading can fail."""
    assert wrong_with(Command("planted.md", 1, text)) != ""


def test_every_rule_speaks_of_something_and_has_a_reason() -> None:
    """The list cannot rot."""
    used = {rule_of(command) for command in COMMANDS}
    assert [rule.pattern for rule in RULES if rule not in used or not rule.why] == []


def test_what_stands_for_something_else() -> None:
    """Only what is named, with what the test knows."""
    text = placed("curl http://127.0.0.1:1919/v1/models /data/x", port=7, home="/h")
    assert text == "curl http://127.0.0.1:7/v1/models /h/data/x"
