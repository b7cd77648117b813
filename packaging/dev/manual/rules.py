"""How the commands of the manual are tried: all are run and have to succeed, but for those named here. Data.

A rule that fits no command any more is an error of the test, so this list cannot rot.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from manual.blocks import Command, commands

REPOSITORY = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Rule:
    """How commands that match are treated.

    Attributes:
        pattern: regular expression that the whole command must match; ``.`` is any character, a new line too.
        why: the reason.
        page: regular expression of the page.
        skip: it is not run, only read: its syntax, and the options of programs of this repository.
        statuses: exit statuses that it may have.
        refused: code of the problem that the daemon must answer it with.
        before: what is done before, for what the page takes for granted there.
        terminal: it wants one.
        follows: it goes on until it is ended, which happens as soon as it has said something.
    """

    pattern: str
    why: str
    page: str = ".*"
    skip: bool = False
    statuses: tuple[int, ...] = (0,)
    refused: str = ""
    before: str = ""
    terminal: bool = False
    follows: bool = False

    def fits(self, command: Command) -> bool:
        """Does it speak of this command?"""
        return bool(
            re.fullmatch(self.page, command.page) and re.fullmatch(self.pattern, command.text, re.DOTALL)
        )


LOADED = "lllm3090ctl load qwen-27b --context 65536 --parallel 1 --quiet"
SMALL_LOADED = "lllm3090ctl load smollm2 --quiet"
CLI, CHANGE, ENGINES, HTTP = (
    rf"docs/{page}\.md"
    for page in ("reference/cli", "how-to/change-settings", "how-to/choose-an-engine", "reference/http-api")
)

RULES: tuple[Rule, ...] = (
    # --- not run ----------------------------------------------------------------------------------------------------
    Rule(
        r"make .*",
        "builds, installs or tests this checkout: CI runs demo and test, the others are read dry",
        skip=True,
    ),
    Rule(r"sudo .*", "changes the machine", skip=True),
    Rule(r"printf .*\| sudo tee .*", "changes the machine", skip=True),
    Rule(r'(eval "\$\()?ssh .*', "another machine", skip=True),
    Rule(
        r"(packaging/dev/user-manager .*)?\.venv/bin/python -m (bench|tests)\..*",
        "a measurement of minutes",
        skip=True,
    ),
    Rule(
        r"(pipx|uv|git archive) .*|\(cd packaging/arch .*",
        "installs a program, or makes a package: tests/system/test_setup.py, tests/unit/test_arch_package.py",
        "docs/how-to/install-pipx.md",
        skip=True,
    ),
    Rule(
        r"systemctl --user enable --now lllm3090d\.socket lllm3090-gateway\.socket",
        "nothing runs yet where it has just been installed",
        "docs/how-to/install-pipx.md",
        before="systemctl --user stop lllm3090d.socket lllm3090d.service",
    ),
    Rule(
        r"lllm3090ctl setup( --remove| --take-over)?",
        "the daemon of this test is not set up so: tests/system/test_setup.py does it",
        skip=True,
    ),
    Rule(r"loginctl .*", "a machine of tests has no logind", skip=True),
    # --- end otherwise ----------------------------------------------------------------------------------------------
    Rule(
        r"lllm3090ctl plan smollm2 --context 2000000 .*",
        "shows a refusal",
        "docs/tutorial/first-model.md",
        statuses=(5,),
    ),
    Rule(
        r"lllm3090ctl claude --model smollm2",
        "shows a refusal: its window is too small for an agent",
        statuses=(5,),
    ),
    Rule(
        r"lllm3090ctl doctor.*",
        "a machine of tests has no logind and no device files of a card",
        statuses=(0, 10, 11),
    ),
    Rule(
        r"lllm3090ctl engine show managed", "none was installed by `make install` here", CLI, statuses=(4,)
    ),
    Rule(
        r"curl .*/v1/engines/managed",
        "none was installed by `make install` here",
        HTTP,
        refused="unknown_engine",
    ),
    Rule(r"curl .*/v1/cancel .*", "that load has ended", HTTP, refused="no_such_load"),
    # --- taken for granted there ------------------------------------------------------------------------------------
    Rule(r"lllm3090ctl unload smollm2.*", "a page of reference", CLI, before=SMALL_LOADED),
    Rule(r"lllm3090ctl (un)?pin smollm2", "a page of reference", CLI, before=SMALL_LOADED),
    Rule(
        r"lllm3090ctl load smollm2 --context 8192 .*",
        "another way to load it",
        CLI,
        before="lllm3090ctl unload smollm2",
    ),
    Rule(r"lllm3090ctl claude", "with the one model that runs", CLI, before="lllm3090ctl unload smollm2"),
    Rule(
        r"lllm3090ctl unload qwen",
        "it tells of a model that runs",
        CHANGE,
        before="lllm3090ctl load qwen --quiet",
    ),
    Rule(
        r"lllm3090ctl plan Qwen3.8-27B",
        "what its next load gets",
        CHANGE,
        before="lllm3090ctl unload qwen-27b",
    ),
    Rule(r"lllm3090ctl unload qwen-27b && .*", "it tells of a model that runs", ENGINES, before=LOADED),
    Rule(
        r'curl .*"\$ENDPOINT" .*',
        "of a loaded model",
        HTTP,
        before=f"{LOADED}; ENDPOINT=$(lllm3090ctl ps --json | jq -r '.instances[0].endpoint')",
    ),
    Rule(r"curl .*/explain", "of a loaded model", HTTP, before=LOADED),
    Rule(r"curl .*/pin .*", "of a loaded model", HTTP, before=LOADED),
    # --- go on ------------------------------------------------------------------------------------------------------
    Rule(r"lllm3090ctl requests --follow", "follows", follows=True, before="lllm3090ctl chat smollm2 Hello"),
    Rule(r"lllm3090ctl .*--follow.*", "follows", follows=True),
    Rule(r"curl .*follow=1.*", "follows", follows=True),
    Rule(r"busctl --user monitor .*", "follows", follows=True),
    # --- want a terminal --------------------------------------------------------------------------------------------
    Rule(r"systemctl --user edit .*", "an editor needs a terminal", terminal=True),
)

# What stands for something of the reader's; in braces what the test knows.
STANDS_FOR: Mapping[str, str] = {
    "127.0.0.1:1919": "127.0.0.1:{port}",  # the usual port may be taken on the machine of the test
    "127.0.0.1:2000": "127.0.0.1:{port}",
    "/data/": "{home}/data/",
    "--shell fish | source": "--shell fish | grep -q '^set -gx '",  # the shell of the test is bash
    "--since 120 ": "--since 1 ",  # a young daemon has not counted so far
}


def pages() -> tuple[Path, ...]:
    """All pages, the README first: a reader begins there."""
    docs = REPOSITORY / "docs"
    order = {"tutorial": 1, "how-to": 2, "reference": 3, "explanation": 4}
    found = sorted(docs.rglob("*.md"), key=lambda path: (order.get(path.parent.name, 0), path))
    return (REPOSITORY / "README.md", *found)


def all_commands(files: Iterable[Path] | None = None) -> tuple[Command, ...]:
    """Every command of the manual, page by page.

    Raises:
        BadBlockError: a block says nothing clear.
    """
    return tuple(
        command
        for path in (pages() if files is None else files)
        for command in commands(str(path.relative_to(REPOSITORY)), path.read_text(encoding="utf-8"))
    )


def rule_of(command: Command) -> Rule | None:
    """The first that fits."""
    return next((rule for rule in RULES if rule.fits(command)), None)


def placed(text: str, **known: object) -> str:
    """A command with what is the test's in place of what is the reader's."""
    for theirs, ours in STANDS_FOR.items():
        text = text.replace(theirs, ours.format(**known))
    return text
