"""What is shipped and made from the program: up to date, understood by shells and man, and right."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from shipped import roff
from shipped.tree import Command, Option, Source, tree, valued

from lllm3090ctl.cli import cli
from lllm3090ctl.setup_files import Places, wanted
from lllm3090d import wire
from lllm3090d.bus.service_contract import contract
from lllm3090d.settings import SETTING_KEYS
from tests.fakes.control_server import ControlServer

pytestmark = pytest.mark.unit

PROJECT = Path(__file__).parents[2]
PACKAGING = PROJECT / "packaging"
COMPLETIONS = PACKAGING / "completions"
PAGES = sorted((PACKAGING / "man").iterdir())
NAMES = wire.Names(names=("SmolLM2-135M", "my model's (1)", "qwen:27b", "qwen:9b", 'a$b`c"d'))
ROOT = tree()
# Prints what would be offered for a line, whose words readline has split, one to a line.
BASH = """
source "$1"; shift
COMP_LINE=$1 COMP_POINT=${#1}; shift
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
_lllm3090ctl lllm3090ctl "${COMP_WORDS[COMP_CWORD]}" ""
((${#COMPREPLY[@]} == 0)) || printf '%s\\n' "${COMPREPLY[@]}"
"""


def shell(name: str) -> str:
    """The program, or the test is skipped."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def environment(directory: Path) -> Mapping[str, str]:
    """One in which ``lllm3090ctl`` is that of this tree."""
    program = directory / "bin" / "lllm3090ctl"
    program.parent.mkdir(exist_ok=True)
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m lllm3090ctl "$@"\n')
    program.chmod(0o755)
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("LLLM3090_")}
    return inherited | {
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "HOME": str(directory),
        "XDG_RUNTIME_DIR": str(directory),
        "PYTHONPATH": str(PROJECT),
        "LC_ALL": "C.UTF-8",
        "TERM": "dumb",
    }


def in_bash(directory: Path, line: str) -> list[str]:
    """What bash offers for a line; its words are split at blanks, and at = and : as readline does."""
    words = [part for word in line.split(" ") for part in re.split("([=:])", word) if part or not word]
    done = subprocess.run(
        ["bash", "--norc", "-c", BASH, "bash", str(COMPLETIONS / "lllm3090ctl.bash"), line, *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        cwd=directory,
        env=environment(directory),
    )
    assert done.stderr == ""
    return done.stdout.splitlines()


def in_fish(directory: Path, line: str) -> list[str]:
    """What fish offers, without the descriptions."""
    done = subprocess.run(
        [
            shell("fish"),
            "--no-config",
            "-c",
            f"source {COMPLETIONS}/lllm3090ctl.fish; complete -C $argv[1]",
            line,
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        cwd=directory,
        env=environment(directory),
    )
    assert done.stderr == ""
    return [offered.partition("\t")[0] for offered in done.stdout.splitlines()]


# --- up to date ----------------------------------------------------------------------------------------------


def test_all_files_are_up_to_date(tmp_path: Path) -> None:
    """Whoever changes a command, a setting or the contract runs: make generated."""
    done = subprocess.run(
        [sys.executable, "-m", "shipped", "--check"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{PACKAGING / 'dev'}:{PROJECT}", "XDG_CONFIG_HOME": "/elsewhere"},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_other_words_are_refused() -> None:
    from shipped import __main__ as generator

    assert generator.main(["--chek"]) == 2


def test_setup_installs_every_file() -> None:
    home = Places(Path("/h"), Path("/h/.config"), Path("/h/.local/share"))
    contents = {file.content for file in wanted(home, Path("/venv/bin/lllm3090d"))}
    for path in (*COMPLETIONS.iterdir(), *PAGES):
        assert path.read_bytes() in contents, path


# --- the tree ------------------------------------------------------------------------------------------------


def every(key: str) -> Command:
    return next(each for each in ROOT.every() if each.key == key)


def test_the_tree_is_that_of_the_commands() -> None:
    assert {each.path[0] for each in ROOT.every() if each.path} == set(cli.commands)
    assert [each.key for each in every("engine").commands] == ["engine list", "engine select", "engine show"]
    option = next(option for option in every("load").options if "--cache-type" in option.names)
    assert option.values.choices[:2] == ("f32", "f16")
    # Whether -h is among them depends on who asked click first in this process.
    without = [each.path for each in ROOT.every() if "--help" not in each.options[-1].names]
    assert without == []


@pytest.mark.parametrize(
    ("command", "sources"),
    [
        ("load", (Source.MODELS,)),
        ("unload", (Source.INSTANCES,)),
        ("inspect", (Source.MODELS, Source.FILES)),
        ("engine select", (Source.ENGINES,)),
        ("key remove", (Source.KEYS,)),
        ("key add", ()),
        ("logs", (Source.MODELS,)),
    ],
)
def test_names_are_those_that_the_command_takes(command: str, sources: tuple[Source, ...]) -> None:
    assert every(command).arguments[0].values.sources == sources


def test_one_spelling_cannot_take_a_value_here_and_none_there() -> None:
    """Shells skip the values of options without knowing the command."""
    load = every("load")
    clash = Command(("x",), "", (Option(("--json",), "", "N"),), (), (), False, load.command)
    with pytest.raises(ValueError, match="with and without a value: --json"):
        valued(Command((), "", (), (), (load, clash), False, cli))


# --- completing ----------------------------------------------------------------------------------------------

CASES = [
    ("lllm3090ctl un", ["unload", "unpin"]),
    ("lllm3090ctl engine s", ["select", "show"]),
    ("lllm3090ctl --timeout 3 engine s", ["select", "show"]),
    ("lllm3090ctl load x --evi", ["--evict"]),
    ("lllm3090ctl load --slot-policy w", ["window"]),
    ("lllm3090ctl --socket SOCKET load Sm", ["SmolLM2-135M"]),
    ("lllm3090ctl --socket=SOCKET unload sm", ["SmolLM2-135M"]),
    ("lllm3090ctl --socket SOCKET load --context 4096 Sm", ["SmolLM2-135M"]),
    ("lllm3090ctl --socket SOCKET claude --model Sm", ["SmolLM2-135M"]),
    ("lllm3090ctl --socket SOCKET load x Sm", []),
    ("lllm3090ctl --socket SOCKET ps Sm", []),
    ("lllm3090ctl --socket SOCKET load x -- a-f", ["a-file"]),
    ("lllm3090ctl --socket a-f", ["a-file"]),
    ("lllm3090ctl --socket SOCKET inspect a-f", ["a-file"]),
    ("lllm3090ctl config get drain", ["drain_s"]),
    ("lllm3090ctl load --context 4", []),
    ("lllm3090ctl nonsense Sm", []),
    ("lllm3090ctl --socket SOCKET.none load Sm", []),
    ("lllm3090ctl load ", []),
]


@pytest.mark.parametrize(("line", "offered"), CASES)
def test_bash_completes(tmp_path: Path, line: str, offered: list[str]) -> None:
    (tmp_path / "a-file").touch()
    with ControlServer(names=NAMES) as server:
        assert in_bash(tmp_path, line.replace("SOCKET", str(server.path))) == offered


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ('load "a$', [r"a\$b\`c\"d"]),
        ("load qwen:2", ["27b"]),  # only what stands behind the colon is replaced
        ("load my", [r"my\ model\'s\ \(1\)"]),
        ("load 'my", [r"my model'\''s (1)"]),
        ('load "my', ["my model's (1)"]),
        ("load --slot-policy=w", ["window"]),
        ("load --slot-policy=", ["balanced", "window"]),
        ("engine ", ["list", "select", "show"]),
        ("run x -- lllm3090ct", ["lllm3090ctl"]),
        ("run x lllm3090ct", []),
    ],
)
def test_bash_completes_what_it_splits_and_quotes(tmp_path: Path, typed: str, offered: list[str]) -> None:
    with ControlServer(names=NAMES) as server:
        found = in_bash(tmp_path, f"lllm3090ctl --socket {server.path} {typed}")
    assert sorted(set(found)) == offered


def test_fish_completes(tmp_path: Path) -> None:
    shell("fish")
    (tmp_path / "a-file").touch()
    with ControlServer(names=NAMES) as server:
        for line, offered in CASES:
            found = in_fish(tmp_path, line.replace("SOCKET", str(server.path)))
            assert sorted(found) == offered, line


def test_zsh_understands_its_file() -> None:
    done = subprocess.run(
        [shell("zsh"), "-f", "-n", COMPLETIONS / "_lllm3090ctl"], capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")


ZSH = r"""
zmodload zsh/zpty
setopt extended_glob
zpty -b shell "zsh -f -i"
read_to() { local piece text=; repeat 200; do
  if zpty -rt shell piece; then text+=$piece; else zselect -t 10; fi
  [[ $text != ${~1} ]] || break
done; REPLY=$text }
zmodload zsh/zselect
zpty -w shell "unsetopt beep zle_bracketed_paste; PS1=; fpath=($1 \$fpath)"
zpty -w shell "autoload -Uz compinit; compinit -u -D; print DO''NE"
read_to '*DONE*'
# ^U has the line printed in quotes instead of run.
zpty -w shell "show() { zle -I; print -r -- \"<<\$BUFFER>>\"; BUFFER= }; zle -N show; bindkey '^U' show; print DO''NE"
read_to '*DONE*'
for line in "${@:2}"; do
  zpty -w -n shell "$line"$'\t\025'
  read_to '*<<*>>*'
  print -r -- "${${REPLY##*<<}%%>>*}"
done
zpty -d shell
"""


def test_zsh_completes(tmp_path: Path) -> None:
    """What is the only possibility is put into the line."""
    zsh = shell("zsh")
    (tmp_path / "a-file").touch()
    lines = {
        "lllm3090ctl unl": "unload ",
        "lllm3090ctl engine sh": "show ",
        "lllm3090ctl load x --evi": "--evict ",
        "lllm3090ctl load --slot-policy=w": "--slot-policy=window ",
        "lllm3090ctl --socket SOCKET load Sm": "SmolLM2-135M ",
        "lllm3090ctl --socket=SOCKET unload sm": "SmolLM2-135M ",
        "lllm3090ctl --socket SOCKET load x -- a-f": "a-file ",
        "lllm3090ctl --socket SOCKET inspect Sm": "SmolLM2-135M ",
        "lllm3090ctl run x -- lllm3090ct": "lllm3090ctl ",
        "lllm3090ctl --socket SOCKET.none load Sm": "Sm",
    }
    with ControlServer(names=NAMES) as server:
        done = subprocess.run(
            [
                zsh,
                "-f",
                "-c",
                ZSH,
                "zsh",
                COMPLETIONS,
                *(each.replace("SOCKET", str(server.path)) for each in lines),
            ],
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
            cwd=tmp_path,
            env=environment(tmp_path),
        )
    found = [re.sub(r"\s*\r?\n", "", line) for line in done.stdout.splitlines()]
    assert len(found) == len(lines), done.stdout + done.stderr
    for (line, end), shown in zip(lines.items(), found, strict=True):
        assert shown.endswith(" " + end), line


# --- manual pages --------------------------------------------------------------------------------------------


def text_of(name: str) -> str:
    return (PACKAGING / "man" / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_man_renders_without_a_warning(page: Path) -> None:
    for command in (["groff", "-ww", "-man", "-z"], ["man", "--warnings=w", "-l"]):
        done = subprocess.run(
            [shell(command[0]), *command[1:], page],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
            env={**os.environ, "LC_ALL": "C.UTF-8", "MANWIDTH": "80"},
        )
        assert (done.returncode, done.stderr) == (0, "")


def test_every_command_option_setting_and_member_has_its_place() -> None:
    commands, settings, bus = map(text_of, ("lllm3090ctl.1", "lllm3090-config.5", "org.lllm3090.Manager1.5"))
    for each in ROOT.every():
        assert not each.path or f'.SS "{roff.escaped(each.key)}"' in commands
        for option in each.options:
            assert all(f"\\fB{roff.escaped(name)}\\fP" in commands for name in option.names)
    for key in SETTING_KEYS:
        assert f"\\fB{key}\\fP = " in settings
    for interface in contract().values():
        for member in (*interface.methods, *interface.properties, *interface.signals):
            assert f"\\fB{member}\\fP" in bus


def test_no_page_tells_of_the_home_where_it_was_made() -> None:
    for page in PAGES:
        assert not re.search(r"/(home|root|run/user)/", page.read_text(encoding="utf-8")), page


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("a-b", r"a\-b"),
        (r"\n", r"\en"),
        ("it's `x`", r"it\(aqs \(gax\(ga"),
        ("~/x^2", r"\(ti/x\(ha2"),
    ],
)
def test_text_means_itself(text: str, written: str) -> None:
    assert roff.escaped(text) == written


def test_no_line_is_taken_for_a_request() -> None:
    page = roff.Page("X", 1, "x", "x")
    page.paragraph(".SH no heading")
    page.literal([".so /etc/passwd", "'br", ""])
    page.term("**.x**", "'tis")
    requests = [line for line in page.text().splitlines() if line.startswith((".", "'"))]
    assert {line.split()[0] for line in requests} == {
        '.\\"',
        ".TH",
        ".nh",
        ".ad",
        ".PP",
        ".RS",
        ".nf",
        ".fi",
        ".RE",
        ".TP",
    }
