"""``lllm3090ctl config``: real files, the daemon's real rules, no daemon; and what happens when others interfere."""

from __future__ import annotations

import json
import os
import stat
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from lllm3090ctl import config_check, config_views
from lllm3090ctl.config_apply import apply
from lllm3090ctl.config_edit import editor
from lllm3090ctl.config_file import NEW_SUFFIX, ConfigFile
from lllm3090ctl.failures import Failure
from lllm3090ctl.text import Prose
from lllm3090d.doctor.settings_report import report, schema, used_file
from lllm3090d.settings import SETTING_KEYS, load_settings
from tests.fakes.control_server import ctl

pytestmark = pytest.mark.unit

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
MINE = '# mine\nbatch_tokens = 64  # small\n\n# names\n[aliases]\nq = "Q"\n'


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The settings file of a machine without systemd, so that no daemon of a person is asked or told anything."""
    for name in list(os.environ):
        if name.startswith("LLLM3090_") or name == "DBUS_SESSION_BUS_ADDRESS":
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    made = tmp_path / "etc" / "config.toml"
    made.parent.mkdir()
    made.write_text(MINE)
    made.chmod(0o640)
    monkeypatch.setenv("LLLM3090_CONFIG", str(made))
    monkeypatch.setattr(config_check, "_output", output)
    return made


def output(command: Sequence[str], stdin: int = -1) -> bytes:
    """What the daemon's process would say, by the same rules, but in this one: a process takes a second.

    Real processes are run in test_ctl_docs.py, and below.
    """
    named = command[command.index("--config") + 1] if "--config" in command else None
    path = f"/proc/self/fd/{stdin}" if named == config_check.STDIN else named
    told = report(Path(path) if path else None, used_file(None), "shell").model_dump_json()
    return (told.replace(path, config_check.STDIN) if path and path != named else told).encode()


def config(file: Path, *arguments: str) -> Result:
    return ctl(file.parent / "control.sock", "config", *arguments)


def in_(directory: Path) -> list[str]:
    return sorted(each.name for each in directory.iterdir())


def problem(file: Path, *arguments: str) -> dict[str, Any]:
    """The problem of a command that fails, and leaves the file and its directory as they were."""
    before, beside = file.read_bytes() if file.exists() else None, in_(file.parent)
    done = config(file, *arguments, "--json")
    told: dict[str, Any] = json.loads(done.stdout)
    assert done.exit_code == told["exit_status"] != 0
    assert (file.read_bytes() if file.exists() else None) == before
    assert in_(file.parent) == beside
    return told


def test_set_get_and_unset(file: Path) -> None:
    told = json.loads(config(file, "set", "cache_type", "f16", "--json").stdout)
    assert told == {
        "file": str(file),
        "applied": "not_running",
        "changed": [{"key": "cache_type", "value": "f16", "origin": "file", "takes_effect": "next-load"}],
    }
    assert file.read_text() == MINE.replace("# small\n", '# small\ncache_type = "f16"\n')
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert load_settings(file, {}).cache_type == "f16"
    assert config(file, "get", "cache_type").stdout == "f16\n"
    assert config(file, "get", "aliases").stdout == '{"q": "Q"}\n'
    assert config(file, "unset", "cache_type").exit_code == 0
    assert file.read_text() == MINE
    again = config(file, "unset", "cache_type")
    assert (again.exit_code, "is as it was" in again.stdout) == (0, True)
    assert in_(file.parent) == [file.name]


def test_a_section_of_a_model_goes_as_a_whole(file: Path) -> None:
    for member, value in (("parallel", "2"), ("pin", "true")):
        assert config(file, "set", f"models.Qwen3.8-27B.{member}", value).exit_code == 0
    with_section = file.read_text()
    assert config(file, "unset", "models.Qwen3.8-27B.pin").exit_code == 0
    assert load_settings(file, {}).models["Qwen3.8-27B"].parallel == 2
    assert json.loads(config(file, "get", "models.Qwen3.8-27B").stdout)["parallel"] == 2
    assert config(file, "unset", "models.Qwen3.8-27B").exit_code == 0
    assert file.read_text().rstrip("\n") == MINE.rstrip("\n")
    file.write_text(with_section)
    for member in ("parallel", "pin"):
        assert config(file, "unset", f"models.Qwen3.8-27B.{member}").exit_code == 0
    assert "models" not in file.read_text()


def test_show_tells_where_values_are_from(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLLM3090_DRAIN_S", "3")
    told = json.loads(config(file, "show", "--json").stdout)
    assert (told["used_file"], told["exists"], told["environment"]) == (str(file), True, "shell")
    found = {each["key"]: each for each in told["settings"]}
    assert tuple(found) == SETTING_KEYS
    assert [found[key]["origin"] for key in ("drain_s", "batch_tokens", "card")] == [
        "environment",
        "file",
        "default",
    ]
    assert found["batch_tokens"] | {"description": ""} == {
        "key": "batch_tokens",
        "variable": "LLLM3090_BATCH_TOKENS",
        "kind": "whole number",
        "shape": {"kind": "whole number", "element": None, "members": {}},
        "unit": "tokens",
        "allowed": "32 to 65536",
        "default": 2048,
        "value": 64,
        "origin": "file",
        "takes_effect": "next-load",
        "description": "",
    }
    text = config(file, "show", "--changed").stdout
    assert all(key in text for key in ("drain_s", "batch_tokens", "aliases")) and "cache_type" not in text
    outranked = config(file, "set", "drain_s", "5")
    assert (
        "LLLM3090_DRAIN_S is set to 3.0 in the daemon's environment, and outranks the file"
        in outranked.stdout
    )
    assert "drain_s = 5" in file.read_text()


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("set", "batch_tokens", "many"), "config_invalid", "batch_tokens = 'many' is not valid"),
        (("set", "batch_tokens", "1"), "config_invalid", "greater than or equal to 32"),
        (("set", "batch_token", "64"), "unknown_setting", "batch_token"),
        (("set", "batch_tokens", "1", "2"), "config_unclear", "one value"),
        (("set", "aliases.", "x"), "config_unclear", "is no key"),
        (
            ("set", "models.q.context", "1"),
            "config_invalid",
            "models.q.context is not a setting; did you mean context_tokens?",
        ),
        (("unset", "nothing"), "unknown_setting", "nothing"),
        (("get", "aliases.x"), "not_set", "aliases"),
        (("get", "nothing"), "unknown_setting", "nothing"),
        (("check", "/dev/null"), "config_invalid", "no regular file"),
    ],
)
def test_what_is_refused_leaves_the_file_alone(
    file: Path, arguments: Sequence[str], code: str, said: str
) -> None:
    told = problem(file, *arguments)
    assert (told["code"], said in told["detail"]) == (code, True), told
    assert "/dev/stdin" not in told["detail"]


def test_what_a_variable_outranks_is_checked_all_the_same(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLLM3090_BATCH_TOKENS", "128")
    assert "batch_tokens = 1 " in problem(file, "set", "batch_tokens", "1")["detail"]


def test_a_file_that_is_wrong_already_can_be_mended(file: Path) -> None:
    file.write_text("old_setting = 1\nbatch_tokens = 64\n")
    assert problem(file, "show")["code"] == "config_invalid"
    assert "old_setting" in problem(file, "set", "batch_tokens", "128")["detail"]
    assert config(file, "unset", "old_setting").exit_code == 0
    assert file.read_text() == "batch_tokens = 64\n"


def test_a_link_is_followed_and_stays(file: Path, tmp_path: Path) -> None:
    target = tmp_path / "dotfiles" / "mine.toml"
    target.parent.mkdir()
    file.rename(target)
    file.symlink_to(os.path.relpath(target, file.parent))
    assert config(file, "set", "batch_tokens", "128").exit_code == 0
    assert file.is_symlink() and "batch_tokens = 128  # small" in target.read_text()
    assert in_(target.parent) == [target.name]


def test_a_new_file_is_ones_own(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = file.parent / "new" / "config.toml"
    monkeypatch.setenv("LLLM3090_CONFIG", str(made))
    assert config(file, "set", "batch_tokens", "128").exit_code == 0
    assert made.read_text() == "batch_tokens = 128\n"
    assert stat.S_IMODE(made.stat().st_mode) == 0o600
    assert stat.S_IMODE(made.parent.stat().st_mode) == 0o700


def test_changes_at_the_same_time_all_count(file: Path) -> None:
    """Each is a process of its own would be slow; threads hold the lock just as well, each by its own descriptor."""
    aliases = [f"a{number}" for number in range(3)]
    statuses: list[int] = []

    def change(alias: str) -> None:
        held = ConfigFile(str(file))
        with held.locked():
            raw = held.read() or b""
            held.replace(raw + f'{alias} = "Q"\n'.encode(), raw)
        statuses.append(0)

    threads = [threading.Thread(target=change, args=(alias,)) for alias in aliases]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert statuses == [0, 0, 0]
    assert set(load_settings(file, {}).aliases) == {"q", *aliases}


def test_a_change_by_somebody_else_is_not_overwritten(file: Path) -> None:
    held = ConfigFile(str(file))
    with held.locked():
        raw = held.read()
        file.write_text("batch_tokens = 32\n")
        with pytest.raises(Failure) as caught:
            held.replace(b"batch_tokens = 64\n", raw)
    assert caught.value.problem["code"] == "config_changed"
    assert file.read_text() == "batch_tokens = 32\n"
    assert in_(file.parent) == [file.name]


def test_what_a_killed_run_left_is_in_nobodys_way(file: Path) -> None:
    left = file.with_name(f".{file.name}{NEW_SUFFIX}")
    left.write_text("half")
    assert config(file, "set", "batch_tokens", "128").exit_code == 0
    assert not left.exists() and "half" not in file.read_text()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everything")
def test_a_file_that_may_not_be_written(file: Path) -> None:
    file.chmod(0o440)
    assert problem(file, "set", "batch_tokens", "128")["code"] == "config_unusable"


def test_a_place_that_cannot_be(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLLM3090_CONFIG", str(file / "below" / "config.toml"))
    done = config(file, "set", "batch_tokens", "128", "--json")
    assert done.exit_code == 78 and file.read_text() == MINE


# --- edit ----------------------------------------------------------------------------------------------------


def writes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *texts: str) -> Path:
    """An editor that writes these texts, one at each call; the file with the paths that it was given."""
    calls, script = tmp_path / "calls", tmp_path / "editor"
    for number, text in enumerate(texts):
        (tmp_path / f"text{number}").write_text(text)
    script.write_text(
        f'#!/bin/sh\nn=$(cat {calls} 2>/dev/null | wc -l)\necho "$1" >> {calls}\ncat {tmp_path}/text$n > "$1"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("VISUAL", str(script))
    return calls


def edits(file: Path, answers: str) -> Result:
    from click.testing import CliRunner

    from lllm3090ctl.cli import cli

    return CliRunner().invoke(cli, ["--socket", str(file.parent / "s"), "config", "edit"], input=answers)


def test_edit_again_until_it_is_valid(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = writes(monkeypatch, tmp_path, "batch_tokens = 1\n", "batch_tokens = 128 # mine\n")
    done = edits(file, "y\n")
    assert done.exit_code == 0, done.output
    assert "batch_tokens = 1 is not valid" in done.stderr and str(file) in done.stderr
    assert file.read_text() == "batch_tokens = 128 # mine\n"
    first, second = calls.read_text().split()
    assert first == second and not Path(first).parent.exists()


@pytest.mark.parametrize("answers", ["n\n", ""])
def test_edit_given_up(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: str) -> None:
    calls = writes(monkeypatch, tmp_path, "batch_tokens = 1\n")
    done = edits(file, answers)
    assert done.exit_code == 78 and "given up" in done.stderr
    assert file.read_text() == MINE and not Path(calls.read_text().strip()).parent.exists()


def test_edit_of_nothing_changes_nothing(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VISUAL", "true")
    before = file.stat().st_ino
    assert "is as it was" in edits(file, "").stdout
    assert file.stat().st_ino == before


def test_edit_of_a_file_that_was_changed_meanwhile_keeps_both(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "editor"
    script.write_text(f'#!/bin/sh\necho "gateway = false" > {file}\necho "batch_tokens = 128" > "$1"\n')
    script.chmod(0o755)
    monkeypatch.setenv("VISUAL", str(script))
    done = edits(file, "")
    assert done.exit_code == 5 and file.read_text() == "gateway = false\n"
    kept = Path(done.stderr.split("What you wrote is kept: ")[1].split()[0])
    assert kept.read_text() == "batch_tokens = 128\n"
    kept.unlink()
    kept.parent.rmdir()


@pytest.mark.parametrize("command", ["false", "/nonexistent/editor", "'unclosed"])
def test_an_editor_that_fails(file: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setenv("VISUAL", command)
    done = edits(file, "")
    assert done.exit_code == 1 and "editor could not be used" in done.stderr
    assert file.read_text() == MINE


def test_which_editor() -> None:
    assert editor({"VISUAL": "code --wait", "EDITOR": "vi"}) == ["code", "--wait"]
    assert editor({"EDITOR": "vi"}) == ["vi"]


def test_the_file_to_begin_with_is_valid_and_shows_every_default(file: Path) -> None:
    file.unlink()
    checked = config_check.check()
    text = config_views.template(checked.settings.values())
    file.write_text(text)
    assert load_settings(file, {}) == load_settings(file.with_name("missing"), {})
    bare = "\n".join(
        line.removeprefix("# ") for line in text.splitlines() if " = " in line and "(" not in line
    )
    file.write_text(bare)
    assert load_settings(file, {}).model_dump() == load_settings(file.with_name("missing"), {}).model_dump()


# --- the daemon ----------------------------------------------------------------------------------------------


def test_a_daemon_that_runs_is_told() -> None:
    asked: list[Sequence[str]] = []

    def run(arguments: Sequence[str]) -> tuple[int, str]:
        asked.append(arguments)
        return (0, "active") if arguments[0] == "is-active" else (0, "")

    assert apply(True, run) == "reloaded"
    assert [each[0] for each in asked] == ["is-active", "reload"]
    assert apply(False, run) == "left" and len(asked) == 2
    assert apply(True, lambda _: (3, "inactive")) == "not_running"
    assert apply(True, lambda _: (127, "systemctl cannot be run")) == "not_running"
    with pytest.raises(Failure, match="no such job") as caught:
        apply(True, lambda words: (0, "active") if words[0] == "is-active" else (1, "no such job"))
    assert caught.value.problem["code"] == "reload_failed"


def test_when_changes_count_is_told(file: Path) -> None:
    before = config_check.check()
    after = config_check.check_text(MINE.encode() + b"[models.x]\npin = true\n[idle_ttl_of]\na = 1\n")
    changed = config_views.changed(before.settings, after.settings)
    assert [each.key for each in changed] == ["idle_ttl_of", "models"]
    assert told_of(before, after) == [
        "idle_ttl_of counts from now.",
        f"models (pin) counts from the next load of a model. {config_views.ADVICE['next-load']}",
    ]


def told_of(before: config_check.Checked, after: config_check.Checked) -> list[str]:
    changed = config_views.changed(before.settings, after.settings)
    blocks = config_views.changes(after, changed, "reloaded", before.settings)
    return [each.text for each in blocks if isinstance(each, Prose)][: -len(config_views.whose(after))]


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ('aliases = ["m"]', ["aliases and models (aliases) count from now."]),
        ("idle_ttl_s = 60", ["idle_ttl_of and models (idle_ttl_s) count from now."]),
        (
            "autoload = true",
            [f"models (autoload) counts from the next login. {config_views.ADVICE['next-login']}"],
        ),
        (
            'extra_arguments = ["-v"]\nparallel = 2',
            [
                "extra_arguments, models (extra_arguments) and models (parallel) count from the next load of a model."
                f" {config_views.ADVICE['next-load']}"
            ],
        ),
    ],
)
def test_each_part_of_a_section_counts_from_a_time_of_its_own(
    file: Path, section: str, told: Sequence[str]
) -> None:
    before = config_check.check()
    after = config_check.check_text(MINE.encode() + f"[models.x]\n{section}\n".encode())
    assert told_of(before, after) == list(told)


def test_a_section_is_shown_as_it_was_written(file: Path) -> None:
    config(file, "set", "models.x.pin", "true")
    assert json.loads(config(file, "get", "models", "--json").stdout)["value"] == {"x": {"pin": True}}
    assert problem(file, "get", "models.x.parallel")["code"] == "not_set"


def test_a_real_process_says_the_same(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = b"batch_tokens = 1\n"
    expected = config_check.check(), config_check.check_text(bad)
    monkeypatch.undo()
    monkeypatch.setenv("LLLM3090_CONFIG", str(file))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(file.parent / "run"))
    monkeypatch.delenv("DBUS_SESSION_BUS_ADDRESS", raising=False)
    told = config_check.check(), config_check.check_text(bad)
    assert [each.problems for each in told] == [each.problems for each in expected]
    assert [(each.file, each.exists, each.environment) for each in told] == [(str(file), True, "shell")] * 2
    assert told[0].settings.keys() == expected[0].settings.keys()


@pytest.mark.parametrize(
    "program", [("false",), ("true",), ("/nonexistent/program",), ("echo", "{}"), ("echo", "no")]
)
def test_a_check_that_fails(program: Sequence[str]) -> None:
    with pytest.raises(Failure) as caught:
        config_check.check(daemon=program)
    assert caught.value.problem["code"] in {"check_failed", "bad_answer"}


# --- the schema ----------------------------------------------------------------------------------------------


def test_the_schema_of_the_reference_is_that_of_the_code() -> None:
    """To make it anew: python -m lllm3090d --schema > docs/reference/config.schema.json"""
    written = (REFERENCE / "config.schema.json").read_text()
    assert written == schema()
    told = json.loads(written)
    assert tuple(told["properties"]) == SETTING_KEYS and told["additionalProperties"] is False
    assert (REFERENCE / "config.example.toml").read_text().startswith("#:schema ./config.schema.json\n")
