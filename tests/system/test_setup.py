"""An installation from a wheel, as pipx makes it, in the home of an ordinary user: set up, used, upgraded, removed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from lllm3090ctl.setup_files import with_program
from lllm3090d.store import SCHEMA_VERSION
from tests.system.harness import (
    DAEMON_UNIT,
    GATEWAY_UNIT,
    REPOSITORY,
    SOCKET_UNIT,
    eventually,
    free_port,
    model_units,
    properties,
    systemctl,
)

pytestmark = pytest.mark.system

MODEL = "SmolLM2-135M"
# All that a wheel is built from.
SOURCES = (
    "lllm3090d",
    "lllm3090ctl",
    "systemd",
    "packaging/completions",
    "packaging/man",
    "packaging/dbus",
    "packaging/login",
)
TEXTS = ("pyproject.toml", "README.md", "LICENSE")
NEXT = "99.0.0"


def build(directory: Path, version: str | None = None) -> Path:
    """A wheel of this tree, or of the next release, which is the same but for its version."""
    source = directory / "source"
    for name in SOURCES:
        shutil.copytree(
            REPOSITORY / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in TEXTS:
        shutil.copyfile(REPOSITORY / name, source / name)
    if version is not None:
        file = source / "lllm3090d" / "version.py"
        file.write_text(f'"""The next release."""\n\nVERSION = "{version}"\n')
    command = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(directory),
        str(source),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    shutil.rmtree(source)
    (wheel,) = directory.glob("*.whl")
    return wheel


class Installation:
    """A virtual environment as pipx has one, with the libraries of this one, and the home it serves."""

    def __init__(self, home: Path) -> None:
        self.home = home
        # Blanks and percent signs mean something to systemd.
        self.venv = home / "pipx venvs" / "100% lllm3090"
        command = [sys.executable, "-m", "venv", "--without-pip", str(self.venv)]
        if "include-system-site-packages = true" in (Path(sys.prefix) / "pyvenv.cfg").read_text():
            command.insert(-1, "--system-site-packages")
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        (libraries,) = self.venv.glob("lib/python*/site-packages")
        # Compiling PyGObject would take a minute. Links and packages of other directories are not followed from here.
        (libraries / "libraries.pth").write_text(sysconfig.get_path("platlib") + "\n")

    def install(self, wheel: Path) -> None:
        """Install, or upgrade."""
        command = [sys.executable, "-m", "pip", "--python", str(self.venv / "bin" / "python"), "install"]
        options = ["--quiet", "--no-index", "--no-deps", "--no-cache-dir", "--disable-pip-version-check"]
        done = subprocess.run([*command, *options, str(wheel)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    def ctl(self, *arguments: str, status: int = 0) -> str:
        """Its client; what it has written."""
        done = subprocess.run(
            [self.venv / "bin" / "lllm3090ctl", *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=110,
            cwd=self.home,
        )
        assert done.returncode == status, f"{arguments}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def setup(self, *arguments: str) -> Mapping[str, Any]:
        """``setup --json``."""
        document: Mapping[str, Any] = json.loads(self.ctl("setup", *arguments, "--json"))
        return document

    def files(self) -> set[str]:
        """All below the home, but for the environment itself."""
        return {
            str(path.relative_to(self.home))
            for path in self.home.rglob("*")
            if not path.is_relative_to(self.venv.parent)
        }


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """This release and the next."""
    return build(tmp_path_factory.mktemp("now")), build(tmp_path_factory.mktemp("next"), NEXT)


@contextlib.contextmanager
def gone_in_the_end(installation: Installation) -> Iterator[None]:
    """Other tests have the same home: nothing may stay, whatever happens."""
    before = installation.files()
    try:
        yield
    finally:
        systemctl("stop", SOCKET_UNIT, GATEWAY_UNIT, DAEMON_UNIT, check=False)
        systemctl("stop", "lllm3090-*.service", check=False)
        for name in sorted(installation.files() - before, reverse=True):
            path = installation.home / name
            if path.is_dir() and not path.is_symlink():
                path.rmdir()
            else:
                path.unlink(missing_ok=True)
        shutil.rmtree(installation.venv.parent)
        systemctl("daemon-reload")
        systemctl("reset-failed", check=False)


def test_installed_used_upgraded_downgraded_and_removed(
    wheels: tuple[Path, Path], llama_server: Path, smollm2_path: Path
) -> None:
    now, following = wheels
    home = Path(os.environ["HOME"])
    installation = Installation(home)
    with gone_in_the_end(installation):
        config = home / ".config"
        drop_in = config / "systemd" / "user" / f"{GATEWAY_UNIT}.d" / "own.conf"
        port = free_port()
        own = {
            config / "lllm3090" / "config.toml": (
                f'llama_dir = "{llama_server.parent}"\ngateway_port = {port}\ndesktop = "inactive"\n'
            ),
            drop_in: f"[Socket]\nListenStream=\nListenStream=127.0.0.1:{port}\n",
        }
        for path, text in own.items():
            path.parent.mkdir(parents=True)
            path.write_text(text)
        model = home / "models" / MODEL / "model.gguf"
        model.parent.mkdir(parents=True)
        model.symlink_to(smollm2_path)
        installation.install(now)
        persons = installation.files()

        # Set up: told first, then done, and a second time nothing.
        assert not installation.setup("--dry-run")["changed"] and installation.files() == persons
        done = installation.setup()
        assert done["changed"] and done["notes"] == []
        assert not installation.setup()["changed"]
        assert properties(SOCKET_UNIT, "UnitFileState", "ActiveState") == {
            "UnitFileState": "enabled",
            "ActiveState": "active",
        }

        # Used.
        installation.ctl("load", MODEL, "--context", "2048")
        (before,) = json.loads(installation.ctl("ps", "--json"))["instances"]
        assert before["state"] == "ready"
        executable = Path(f"/proc/{before['main_pid']}/exe").resolve()
        assert executable == llama_server.resolve()
        version = json.loads(installation.ctl("version", "--json"))
        assert version["lllm3090ctl"]["version"] == version["lllm3090d"]["version"] != NEXT
        busctl = ["busctl", "--user", "get-property", "org.lllm3090.Manager1", "/org/lllm3090/Manager1"]
        told = subprocess.check_output([*busctl, "org.lllm3090.Manager1", "State"], text=True, timeout=30)
        assert told.startswith("s ")

        # Upgraded while it runs: the same engine, another daemon.
        installation.install(following)
        done = installation.setup()
        assert done["changed"] and any(command.startswith("restart ") for command in done["systemd"])
        version = json.loads(installation.ctl("version", "--json"))
        assert version["lllm3090ctl"]["version"] == version["lllm3090d"]["version"] == NEXT
        (after,) = json.loads(installation.ctl("ps", "--json"))["instances"]
        assert (after["main_pid"], after["run"], after["state"]) == (
            before["main_pid"],
            before["run"],
            "ready",
        )
        assert not installation.setup()["changed"]

        # Downgraded: the newer release has another schema, so the older one does not start, and changes nothing.
        systemctl("stop", SOCKET_UNIT, GATEWAY_UNIT, DAEMON_UNIT)
        database = home / ".local" / "state" / "lllm3090" / "lllm3090.db"
        with contextlib.closing(sqlite3.connect(database)) as connection, connection:
            connection.execute("INSERT INTO migrations VALUES (?, 0)", (SCHEMA_VERSION + 1,))
        content = database.read_bytes()
        systemctl("start", DAEMON_UNIT, check=False)
        failed = properties(DAEMON_UNIT, "ActiveState", "ExecMainStatus", "NRestarts")
        assert failed == {"ActiveState": "failed", "ExecMainStatus": "78", "NRestarts": "0"}
        program = subprocess.run(
            [installation.venv / "bin" / "lllm3090d"],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert program.returncode == 78
        assert f"{database} was written by a newer release" in program.stderr
        assert "Install the newer release again" in program.stderr
        assert database.read_bytes() == content and Path(f"/proc/{before['main_pid']}").exists()
        with contextlib.closing(sqlite3.connect(database)) as connection, connection:
            connection.execute("DELETE FROM migrations WHERE version > ?", (SCHEMA_VERSION,))
        systemctl("stop", SOCKET_UNIT, check=False)
        systemctl("reset-failed", SOCKET_UNIT, DAEMON_UNIT, check=False)
        systemctl("start", SOCKET_UNIT)
        (again,) = json.loads(installation.ctl("ps", "--json"))["instances"]
        assert again["main_pid"] == before["main_pid"]

        # Removed: the model is stopped, for nothing would manage it, and what a person has stays.
        done = installation.setup("--remove")
        assert done["stopped_models"] == [before["unit"]]
        assert not model_units()
        eventually(lambda: not Path(f"/proc/{before['main_pid']}").exists(), what="the engine has gone")
        assert properties(DAEMON_UNIT, "LoadState")["LoadState"] == "not-found"
        left = installation.files() - persons
        assert {name for name in left if not name.startswith(".local/state/lllm3090/")} <= {
            ".local",
            ".local/state",
            ".local/state/lllm3090",
        }
        assert persons <= installation.files()
        assert {path: path.read_text() for path in own} == own
        assert not installation.setup("--remove")["changed"]


def test_systemd_starts_programs_at_odd_places(tmp_path: Path) -> None:
    """What the unit says is what is executed, whatever its path has in it."""
    units = Path(os.environ["XDG_RUNTIME_DIR"]) / "systemd" / "user"
    units.mkdir(parents=True, exist_ok=True)
    odd = dict(enumerate(["a b", "100%", "%h", "$HOME", "${HOME}x", "semi;colon", "ä", "#", "[*]"]))
    names = {number: f"odd-place-{number}.service" for number in odd}
    for number, name in odd.items():
        program = tmp_path / name / "lllm3090d"
        program.parent.mkdir()
        program.write_text(f"#!/bin/sh\nexec touch {tmp_path}/done-{number}\n")
        program.chmod(0o755)
        text = with_program("[Service]\nType=oneshot\nExecStart=/usr/bin/lllm3090d\n", program)
        (units / names[number]).write_text(text)
    try:
        systemctl("daemon-reload")
        systemctl("start", *names.values())
        assert [name for number, name in odd.items() if not (tmp_path / f"done-{number}").exists()] == []
    finally:
        for name in names.values():
            (units / name).unlink()
        systemctl("daemon-reload")
        systemctl("reset-failed", *names.values(), check=False)
