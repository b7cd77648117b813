"""Versions, options and devices out of the texts of real builds, through the real probe."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lllm3090d.engines.capabilities import Backend, Build, Capabilities
from lllm3090d.engines.help_text import (
    build_number,
    commit,
    parse_devices,
    parse_help,
    parse_options,
    parse_version,
)
from lllm3090d.engines.probe import probe
from lllm3090d.serving.engines import is_stale, release_tag
from tests.unit.engine_captures import BUILDS, WITH_DRY_RUN, Said, answers, write_program

pytestmark = pytest.mark.unit

CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
COMMANDS = ("version", "help", "list-devices")
NO_DEVICE: tuple[str, ...] = ()


def install(directory: Path, name: str, **changes: Said) -> Build:
    """A build whose programs answer as the captured ones did."""
    said = answers(name)
    if "fit-help" in said:
        write_program(directory / "llama-fit-params", {"--help": said["fit-help"]})
    commands = {command: changes.get(command.replace("-", "_"), said[command]) for command in COMMANDS}
    server = write_program(
        directory / "llama-server", {f"--{command}": answer for command, answer in commands.items()}
    )
    return Build(server, (), "test", locked=False, name=name)


@pytest.mark.parametrize("name", BUILDS)
def test_real_builds_are_understood_whole(name: str, tmp_path: Path) -> None:
    capabilities = probe(install(tmp_path, name))

    needed = {"--host", "-m", "-c", "-np", "-ctk", "-ctv", "-b", "-ub", "-fa", "-ngl", "--fit", "-ctxcp"}
    assert needed | {"--no-kv-unified", "-cram", "--checkpoint-min-step", "-ctkd"} <= capabilities.flags
    assert {"LLAMA_ARG_MODEL", "LLAMA_ARG_HOST", "LLAMA_ARG_ALIAS"} <= capabilities.variables
    assert (capabilities.dry_run is not None) == (name in WITH_DRY_RUN)
    # Every line that begins with a dash is an option, but for those that say that they were removed.
    text = answers(name)["help"].stdout
    lines = [line for line in text.splitlines() if re.match(r"-{1,2}[A-Za-z]", line)]
    removed = text.count("the argument has been removed")
    assert len(capabilities.options) == len(lines) - removed > 200
    names = [name for option in capabilities.options for name in option.names]
    assert len(names) == len(set(names)) == len(capabilities.flags)
    assert all(re.fullmatch(r"--?[A-Za-z][\w.-]*", name) for name in names)


@pytest.mark.parametrize("name", BUILDS)
def test_values_defaults_and_aliases(name: str) -> None:
    capabilities = Capabilities(
        "", frozenset(), Backend.CPU, (), options=parse_options(answers(name)["help"].stdout)
    )

    def told(flag: str) -> tuple[str, tuple[str, ...], str | None]:
        option = capabilities.option(flag)
        assert option is not None, flag
        return option.value, option.allowed, option.default

    assert told("-ctk") == told("--cache-type-v") == told("-ctkd") == ("TYPE", CACHE_TYPES, "f16")
    assert told("--flash-attn") == ("[on|off|auto]", ("on", "off", "auto"), "auto")
    assert told("--fit") == ("[on|off]", ("on", "off"), "on")
    assert told("--cpu-strict") == ("<0|1>", ("0", "1"), "0")
    assert told("--poll") == ("<0...100>", (), "50")
    assert told("-ub") == ("N", (), "512")
    assert told("--fit-ctx") == ("N", (), "4096")  # without brackets
    assert told("--tensor-split") == ("N0,N1,N2,...", (), None)
    assert told("--device") == ("<dev1,dev2,..>", (), None)
    assert told("--override-tensor")[:2] == ("<tensor name pattern>=<buffer type>,...", ())
    assert told("-ctxcp") == ("N", (), "32")
    assert told("-cms") == ("N", (), "8192")
    assert told("--yarn-orig-ctx") == ("N", (), "0")  # "0 = model training context size"
    assert told("--cpu-mask") == ("M", (), "")  # an empty default is one
    assert told("--samplers")[2] == "penalties;dry;top_n_sigma;top_k;typ_p;top_p;min_p;xtc;temperature"
    assert told("--numa")[1] == ("distribute", "isolate", "numactl")
    assert told("--split-mode") == (
        "{none,layer,row,tensor}",
        ("none", "layer", "row", "tensor"),
        "layer",
    )
    spec = told("--spec-type")
    assert {"none", "draft-mtp"} <= set(spec[1]) and spec[2] == "none"
    assert told("--reasoning-format")[1:] == (("none", "deepseek", "deepseek-legacy", "auto"), "auto")
    assert told("-kvu") == ("", (), "enabled if number of slots is auto")
    assert told("--version") == ("", (), None)
    pool = capabilities.option("--no-kv-unified")
    assert pool is not None
    assert pool.names == ("-kvu", "--kv-unified", "-no-kvu", "--no-kv-unified")
    assert pool.variables == ("LLAMA_ARG_KV_UNIFIED",)
    assert capabilities.option("--no-such-option") is None


@pytest.mark.parametrize("name", BUILDS)
def test_valued_flags_follow_from_the_options(name: str) -> None:
    flags, valued, variables = parse_help(answers(name)["help"].stdout)
    assert {"-c", "--model", "-fa", "--spec-type", "-ot"} <= valued < flags
    assert not {"--metrics", "--jinja", "-kvu", "--no-host", "--list-devices"} & valued
    assert "LLAMA_API_KEY" in variables


def test_builds_differ_and_that_is_seen() -> None:
    flags = {name: parse_help(answers(name)["help"].stdout)[0] for name in BUILDS}
    assert "--kv-unified-per-slot" in flags["debian-11669"]
    assert "--kv-unified-per-slot" not in flags["b10092"]
    assert "--moe-cache-mib" in flags["debian-11669"] - flags["b11434"]
    assert flags["b10068"] == flags["b10092"] != flags["b10434"]


@pytest.mark.parametrize(
    ("name", "version", "number", "known_commit"),
    [
        ("b10068", "1 (571d0d5)", None, "571d0d5"),
        ("b10092", "1 (3ce7da2)", None, "3ce7da2"),
        ("b10434", "0.1.0-dev (build 1, commit 7e4c0a9)", None, "7e4c0a9"),
        ("b11434", "0.6.0-dev (build 0, commit unknown)", None, None),
        ("debian-11669", "0.7.0 (build 11669, commit Debian)", 11669, "Debian"),
    ],
)
def test_versions_of_both_formats(
    name: str, version: str, number: int | None, known_commit: str | None
) -> None:
    assert parse_version(answers(name)["version"].text) == version
    assert (build_number(version), commit(version)) == (number, known_commit)


@pytest.mark.parametrize(
    ("version", "number", "known_commit"),
    [
        ("4321 (abcdef)", 4321, "abcdef"),
        ("0.7.0", None, None),
        ("unknown", None, None),
        ("12 (abc)", None, "abc"),
        ("build 99999999999 of ours", 99999999999, None),
    ],
)
def test_versions_that_were_not_captured(version: str, number: int | None, known_commit: str | None) -> None:
    assert (build_number(version), commit(version)) == (number, known_commit)


@pytest.mark.parametrize(
    ("tag", "version", "release", "stale"),
    [
        ("b11434", "1 (abc)", "b11434", False),
        (None, "0.7.0 (build 11669, commit Debian)", "b11669", True),
        (None, "11434 (abc)", "b11434", False),
        ("b10434", "11434 (abc)", "b10434", True),  # what its directory says counts
        (None, "1 (3ce7da2)", None, None),
        (None, None, None, None),
    ],
)
def test_release_and_whether_it_is_another_than_the_pin(
    tag: str | None, version: str | None, release: str | None, stale: bool | None
) -> None:
    capabilities = Capabilities(version, frozenset(), Backend.CPU, ()) if version else None
    assert release_tag(tag, capabilities) == release
    assert is_stale(release, "b11434") is is_stale(release, "11434") is stale


@pytest.mark.parametrize(
    ("name", "devices", "backend"),
    [
        ("b10092", NO_DEVICE, Backend.CPU),  # an empty list
        ("b11434", NO_DEVICE, Backend.CPU),  # "(none)"
        ("debian-11669", NO_DEVICE, Backend.CPU),  # with a driver's complaint beside it
        ("debian-11669-llvmpipe", ("Vulkan0",), Backend.VULKAN),
    ],
)
def test_devices(name: str, devices: tuple[str, ...], backend: Backend, tmp_path: Path) -> None:
    assert parse_devices(answers(name)["list-devices"].stdout) == (devices, backend)
    capabilities = probe(install(tmp_path, name))
    assert (capabilities.devices, capabilities.backend) == (devices, backend)


def test_a_list_of_devices_that_fails_is_unknown_and_not_cpu(tmp_path: Path) -> None:
    build = install(tmp_path, "b11434", list_devices=Said(1, "", ""))
    assert probe(build).backend is Backend.UNKNOWN


@pytest.mark.parametrize("name", WITH_DRY_RUN)
def test_dry_runs_are_offered_where_they_print(name: str, tmp_path: Path) -> None:
    ability = probe(install(tmp_path, name)).dry_run
    assert ability is not None
    assert ability.program == tmp_path / "llama-fit-params"
    assert ability.can_project
    assert {"-fitp", "-ctk", "-np", "-ncmoe", "-nkvo", "-nr", "--swa-full", "-dev"} <= ability.flags
    # What it does not take, as the server does.
    assert not {"-kvu", "--kv-unified", "--spec-type", "-ctxcp", "--mmproj"} & ability.flags


def test_a_text_without_options_has_none() -> None:
    assert parse_options("") == parse_options("hello\n  --indented N  is none\n") == ()
    assert parse_options("--x") == parse_options("--x\n")


def test_an_option_that_was_removed_is_none() -> None:
    text = "--gone N                                the argument has been removed\n--here N      stays\n"
    assert [option.names for option in parse_options(text)] == [("--here",)]
