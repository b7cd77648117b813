"""The reference of the client and its help say what the program does."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from lllm3090ctl.cli import cli
from lllm3090ctl.plan_options import CACHE_TYPES
from lllm3090d import wire
from lllm3090d.errors import ExitStatus
from tests.fakes.card_scenes import Desk, explained
from tests.fakes.control_server import (
    ENGINE,
    ENGINES,
    INSPECTED,
    INSTANCE,
    MODELS,
    PLAN,
    READY,
    REQUEST,
    STATUS,
    ControlServer,
    Stream,
    ctl,
    event,
)

pytestmark = pytest.mark.unit

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
CLI = (REFERENCE / "cli.md").read_text(encoding="utf-8")
COMMANDS = sorted(cli.commands)


def section(command: str) -> str:
    """The part of the reference about one command."""
    return CLI.split(f"\n## {command}\n", 1)[1].split("\n## ", 1)[0]


def options(command: click.Command) -> Iterator[str]:
    """Every way to spell an option of the command, and of those below it."""
    for below in (
        command.commands.values() if isinstance(command, click.Group) and command is not cli else ()
    ):
        yield from options(below)
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            yield from (*parameter.opts, *parameter.secondary_opts)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_and_option_is_in_the_reference(name: str) -> None:
    """``load`` refers to ``plan`` for what they share, and ``--json`` is told once for all."""
    told = section(name) + (section("plan") if name == "load" else "") + section("Options of every command")
    assert f"lllm3090ctl {name}" in section(name)
    for option in options(cli.commands[name]):
        assert re.search(rf"`{option}[ `]", told), option


def test_every_global_option_is_in_the_reference() -> None:
    """Those that stand before the command."""
    for option in (*options(cli), "--help", "-h"):
        assert re.search(rf"`{option}[ `]", section("Options of every command")), option


def test_every_cache_type_is_in_the_reference() -> None:
    """The list is complete."""
    for each in CACHE_TYPES:
        assert f"`{each}`" in section("plan")


def test_reference_names_no_option_that_is_not_there() -> None:
    """What was removed is removed from the reference too. What stands behind a double dash is the engine's."""
    known = {option for command in (cli, *cli.commands.values()) for option in options(command)} | {"--help"}
    ours = (re.split(r"(?<=[ `])-- ", line)[0] for line in CLI.splitlines() if not line.startswith("| `-- "))
    named = {option for line in ours for option in re.findall(r"(?<![\w-])--[a-z][a-z-]*", line)}
    assert named - known - {"--unix-socket", "--settings", "--names"} == set()


def test_every_exit_status_is_in_its_reference() -> None:
    """Number and name, in one row, and no others."""
    rows = re.findall(
        r"^\| (\d+) \| `(\w+)` \|", (REFERENCE / "exit-statuses.md").read_text(encoding="utf-8"), re.M
    )
    assert [(int(number), name) for number, name in rows] == [(int(s), s.name) for s in ExitStatus]


def test_every_code_of_the_client_is_in_the_reference() -> None:
    """Codes are found in the source, so that a new one cannot be forgotten."""
    sources = "".join(path.read_text() for path in (REFERENCE.parents[1] / "lllm3090ctl").glob("*.py"))
    codes = set(re.findall(r'own_failure\(\s*"(\w+)"', sources))
    assert len(codes) >= 7
    for code in codes:
        assert f"| `{code}` |" in CLI
    for reason in re.findall(r'Diagnosis\(\s*"(\w+)"', sources):
        assert f"`{reason}`" in CLI


def examples() -> list[str]:
    """Every command line in the reference and in the helps, up to a pipe or a comment."""
    context = click.Context(cli)
    texts = [CLI, cli.get_help(context)]
    texts += [command.get_help(click.Context(command)) for command in cli.commands.values()]
    texts += [
        below.get_help(click.Context(below))
        for command in cli.commands.values()
        if isinstance(command, click.Group)
        for below in command.commands.values()
    ]
    lines = {
        re.split(r" \||  ", line.strip())[0]
        for text in texts
        for line in text.splitlines()
        if re.match(r"\s*lllm3090ctl [a-z]", line)
    }
    return sorted(lines)


# They ask the gateway too, or become another program: test_ctl_clients.py and test_ctl_chat.py run them.
THROUGH_THE_GATEWAY = frozenset({"chat", "claude", "env", "run"})


@pytest.mark.parametrize("line", [each for each in examples() if each.split()[1] in THROUGH_THE_GATEWAY])
def test_examples_through_the_gateway_are_understood(line: str) -> None:
    """Each has options and arguments that its command takes."""
    _, name, *arguments = shlex.split(line)
    with cli.commands[name].make_context(name, arguments) as context:
        assert context.params


CONFIGURING = [each for each in examples() if each.split()[1] == "config"]


@pytest.mark.timeout(600)  # a process for each
def test_examples_of_the_settings_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a file and in an environment of the test: no daemon of this machine is asked for its own."""
    for variable in ("DBUS_SESSION_BUS_ADDRESS", "LLLM3090_CONFIG"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("LLLM3090_CONFIG", str(tmp_path / "config.toml"))
    monkeypatch.setenv("VISUAL", "true")
    (tmp_path / "new.toml").write_text("")
    monkeypatch.chdir(tmp_path)
    order = ("set", "show", "get", "check", "schema", "edit", "unset")
    lines = sorted(
        {each.split(" > ")[0] for each in CONFIGURING}, key=lambda each: order.index(each.split()[2])
    )
    assert {each.split()[2] for each in lines} == set(order)
    for line in lines:
        done = ctl(tmp_path / "control.sock", *shlex.split(line)[1:])
        assert done.exit_code == 0, (line, done.output)
    assert "cache_type" not in (tmp_path / "config.toml").read_text()


@pytest.mark.parametrize(
    "line",
    [each for each in examples() if each.split()[1] not in THROUGH_THE_GATEWAY and each not in CONFIGURING],
)
def test_examples_work(line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each is run against a daemon that has what it asks for, in a home of its own without a user manager."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for variable in ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "DBUS_SESSION_BUS_ADDRESS"):
        monkeypatch.delenv(variable, raising=False)
    with ControlServer(
        version=wire.Version(version="0.1.0"),
        status=STATUS,
        models=MODELS,
        inspect=INSPECTED,
        engines=ENGINES,
        engine=ENGINE,
        select=ENGINES,
        instances=wire.Instances(instances=(INSTANCE,)),
        logs=Stream((wire.LogLine(at="t", message="m"),)),
        events=Stream((event(1),)),
        requests=Stream((REQUEST,)),
        plan=PLAN,
        load=Stream((READY,)),
        unload=wire.Unloaded(name="x", run="r", released_bytes=1, elapsed_s=0.1),
        release=wire.Released(names=("x",), released_bytes=1, until_resume=False, elapsed_s=0.1),
        resume=wire.Resumed(was_released=True),
        gpus=Desk().view,
        explain=explained(),
        pin=wire.Pinned(name="x", run="r", pinned=True),
        reset=wire.Reset(name="x", run="r", starts=True),
        history=wire.RunHistory(name="x", runs=()),
        autoload=wire.Autoload(models=()),
        keys=wire.KeysView(keys=()),
        add=wire.KeyMade(name="laptop", made="t", key="lllm3090_0"),
        remove=wire.KeysView(keys=()),
    ) as server:
        done = ctl(server, *shlex.split(line)[1:])
    # To follow ends with the daemon, and this one has said all. The doctor tells of the machine of the tests.
    follows = "--follow" in line and any(word in line for word in ("events", "requests"))
    without = follows or "autostart" in line
    expected = {3} if without else {0, 10, 11} if "doctor" in line else {0}
    assert done.exit_code in expected, done.output


@pytest.mark.parametrize("name", COMMANDS)
def test_every_help_has_an_example(name: str) -> None:
    """A newcomer copies it."""
    help_text = cli.commands[name].get_help(click.Context(cli.commands[name]))
    assert re.search(rf"Examples?:\n\s+lllm3090ctl {name}\b", help_text)
