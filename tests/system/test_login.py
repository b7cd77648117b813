"""Logins: a fresh user with a user manager that is started as for a session, log-outs, and the autostart entry.

A session's manager is a real ``systemd --user`` in a unit of the tests' own manager, as logind has it in
``user@.service``: started with its default target, ended by SIGTERM. Its home and its runtime directory are its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from private_manager import box

from tests.system.harness import (
    BIN,
    DAEMON_UNIT,
    GATEWAY_UNIT,
    SOCKET_UNIT,
    Answer,
    eventually,
    http_request,
    properties,
    systemctl,
)

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

SESSION_UNIT = "lllm3090-test-login.service"
MARKED, UNMARKED = "SmolLM2", "Another"
# As a desktop starts an entry: its Exec line is taken apart by the library that desktops do it with.
LAUNCH = """
import sys
from gi.repository import Gio
sys.exit(not Gio.DesktopAppInfo.new_from_filename(sys.argv[1]).launch([], None))
"""


class Session:
    """A person's home, and the user manager of their sessions."""

    def __init__(self, directory: Path, config: str) -> None:
        self.home = directory / "home"
        self.runtime = Path(os.environ["XDG_RUNTIME_DIR"]) / "login"
        self.config = self.home / ".config"
        (self.config / "lllm3090").mkdir(parents=True)
        (self.config / "lllm3090" / "config.toml").write_text(config)

    @property
    def environment(self) -> dict[str, str]:
        """What a login sets, and no more."""
        kept = {
            key: value
            for key, value in os.environ.items()
            if key in {"PATH", "LANG", "USER", "LOGNAME"} or key.startswith("COVERAGE_")
        }
        # What the manager around it has of these is another bus.
        bus = {"DBUS_SESSION_BUS_ADDRESS": f"unix:path={self.runtime}/bus"}
        return kept | bus | {"HOME": str(self.home), "XDG_RUNTIME_DIR": str(self.runtime)}

    @property
    def entry(self) -> Path:
        """What desktops start at login."""
        return self.config / "autostart" / "lllm3090d.desktop"

    def begin(self, *options: str) -> None:
        """The first session of this user: the manager is started, with what is enabled."""
        program = box.systemd_program("systemd")
        assert program is not None
        self.runtime.mkdir(mode=0o700)
        command = ["systemd-run", "--user", "--quiet", f"--unit={SESSION_UNIT}"]
        command += [f"--setenv={key}={value}" for key, value in self.environment.items()]
        command += [f"--property={each}" for each in ("Type=notify", "Delegate=yes", "KillMode=mixed")]
        subprocess.run([*command, program, "--user", *options], check=True, timeout=60)

    def end(self) -> None:
        """The last session ends, and the manager with it; logind then removes the runtime directory."""
        systemctl("stop", SESSION_UNIT)
        # One that was killed, or failed, would stay.
        assert properties(SESSION_UNIT, "LoadState")["LoadState"] == "not-found"
        self.take_runtime()

    def take_runtime(self) -> None:
        """Systemd has directories there that nobody may enter, which is nothing to root."""
        for directory in self.runtime.rglob("inaccessible/dir"):
            directory.chmod(0o700)
        shutil.rmtree(self.runtime)

    def run(
        self, *command: str, status: int | None = 0, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """A command of a session."""
        done = subprocess.run(
            command,
            env=self.environment | environment,
            cwd=self.home,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
        )
        if status is not None:
            assert done.returncode == status, f"{command}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done

    def ctl(self, *arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        """Its client."""
        return self.run(str(BIN / "lllm3090ctl"), *arguments, status=status)

    def systemctl(self, *arguments: str, status: int | None = 0) -> str:
        """Of its manager."""
        return self.run("systemctl", "--user", *arguments, status=status).stdout

    def shown(self, unit: str, *names: str) -> dict[str, str]:
        """Properties of a unit."""
        text = self.systemctl("show", unit, *(f"--property={name}" for name in names))
        return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)

    def daemon(self) -> tuple[str, int]:
        """The state of its unit, and its process."""
        told = self.shown(DAEMON_UNIT, "ActiveState", "MainPID")
        return told["ActiveState"], int(told["MainPID"])

    def autostart(self, status: int = 0) -> str:
        """What the entry's command says of what it has done."""
        told: dict[str, Any] = json.loads(self.ctl("autostart", "--json", status=status).stdout)
        assert told["started"] is (told["verdict"] == "start")
        verdict: str = told["verdict"]
        return verdict

    def launch_entry(self) -> None:
        """As a desktop does at login. It does not wait for what it has started."""
        self.run(sys.executable, "-W", "ignore", "-c", LAUNCH, str(self.entry))

    def request(self, target: str, method: str = "GET", body: bytes | None = None) -> Answer:
        """One to the daemon's socket."""
        return http_request(self.runtime / "lllm3090d" / "control.sock", method, target, body)

    def instances(self) -> dict[str, Any]:
        """What runs, by name."""
        listed = self.request("/v1/instances").json()
        assert {each["name"] for each in listed["wanted"]} <= {MARKED}
        return {each["name"]: each for each in listed["instances"]}

    def without_a_command(self) -> dict[str, Any]:
        """What there is after a login at which nobody types anything: the daemon is up, and the model ready."""
        eventually(lambda: self.daemon()[0] == "active", 120.0, "the daemon is up")  # asks systemd alone
        eventually(
            lambda: self.instances().get(MARKED, {}).get("state") == "ready", 120.0, f"{MARKED} is ready"
        )
        return self.instances()

    def processes(self) -> set[int]:
        """All in the units of its manager."""
        group = properties(SESSION_UNIT, "ControlGroup")["ControlGroup"].lstrip("/")
        (own,) = [
            path
            for base in (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/systemd"))
            if (path := base / group).is_dir()
        ][:1]
        return {
            int(pid)
            for file in own.rglob("cgroup.procs")
            for pid in file.read_text(encoding="ascii").split()
        }


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextlib.contextmanager
def fresh_user(directory: Path, config: str) -> Iterator[Session]:
    """Somebody who has never logged in, and for whom the daemon has been set up."""
    if not box.has_bus_unit():
        pytest.skip("the user manager starts no session bus here: dbus-user-session is not installed")
    port = free_port()
    session = Session(directory, f'gateway_port = {port}\ndesktop = "inactive"\n{config}')
    drop_in = session.config / "systemd" / "user" / f"{GATEWAY_UNIT}.d" / "own.conf"
    drop_in.parent.mkdir(parents=True)
    drop_in.write_text(f"[Socket]\nListenStream=\nListenStream=127.0.0.1:{port}\n")
    assert "Your systemd user manager does not answer here" in session.ctl("setup").stdout
    try:
        yield session
    except BaseException:
        command = ["journalctl", "--no-pager", "-o", "cat", "-n", "100", f"_UID={os.getuid()}"]
        sys.stderr.write(subprocess.run(command, capture_output=True, text=True, check=False).stdout)
        raise
    finally:
        systemctl("stop", SESSION_UNIT, check=False)
        systemctl("reset-failed", SESSION_UNIT, check=False)
        if session.runtime.exists():
            session.take_runtime()


def test_a_fresh_user_logs_in_out_and_in_again(
    tmp_path: Path, llama_server: Path, smollm2_path: Path
) -> None:
    """No command is typed but those that are named; the model that is marked is there after each login."""
    config = (
        f'llama_dir = "{llama_server.parent}"\n'
        f'models = {{ "{MARKED}" = {{ context_tokens = 2048, parallel = 1, autoload = true }} }}\n'
    )
    with fresh_user(tmp_path, config) as session:
        for name in (MARKED, UNMARKED):
            model = session.home / "models" / name / "model.gguf"
            model.parent.mkdir(parents=True)
            model.symlink_to(smollm2_path)
        # As an image of a machine is made: there is no manager yet.
        session.run("systemctl", "--user", "enable", DAEMON_UNIT, SYSTEMD_OFFLINE="1")

        session.begin()
        (first,) = session.without_a_command().values()
        daemon = session.daemon()
        for unit in (DAEMON_UNIT, SOCKET_UNIT, GATEWAY_UNIT):
            assert session.shown(unit, "UnitFileState", "ActiveState") == {
                "UnitFileState": "enabled",
                "ActiveState": "active",
            }

        # Another session of the same user has the same manager. Its desktop starts the entry, which does nothing.
        systemctl("start", SESSION_UNIT)
        assert session.autostart() == "runs"
        session.launch_entry()
        session.ctl("load", UNMARKED, "--context", "2048", "--parallel", "1")
        there = session.instances()
        assert set(there) == {MARKED, UNMARKED} and session.daemon() == daemon
        assert (there[MARKED]["run"], there[MARKED]["main_pid"]) == (first["run"], first["main_pid"])

        # Everything ends with the last session, in order.
        processes = session.processes()
        assert {daemon[1], *(each["main_pid"] for each in there.values())} <= processes
        session.end()
        # Their remains are collected by whoever is their parent now.
        eventually(
            lambda: not any(Path(f"/proc/{pid}").exists() for pid in processes), what="all have ended"
        )
        state = session.home / ".local" / "state" / "lllm3090" / "lllm3090.db"
        with contextlib.closing(sqlite3.connect(state)) as connection:
            assert connection.execute("SELECT ended FROM wanted_life").fetchall() == [(1,)]

        # The next login: what was marked, and only that.
        session.begin()
        (second,) = session.without_a_command().values()
        assert second["name"] == MARKED and second["run"] != first["run"]
        # What the person stops stays so, whatever a desktop starts; the model outlives that, but not the log-out.
        session.systemctl("stop", SOCKET_UNIT, GATEWAY_UNIT, DAEMON_UNIT)
        assert session.autostart() == "systemd_starts_it"
        assert session.daemon() == ("inactive", 0)
        assert Path(f"/proc/{second['main_pid']}").exists()
        session.end()
        eventually(lambda: not Path(f"/proc/{second['main_pid']}").exists(), what="the engine has gone")


def test_the_autostart_entry_where_systemd_starts_nothing(tmp_path: Path) -> None:
    """It starts what is enabled, and only that."""
    with fresh_user(tmp_path, "") as session:
        nobody = session.ctl("autostart", status=3)
        assert "no systemd user manager" in nobody.stderr and nobody.stdout == ""

        session.begin("--unit=basic.target")
        assert session.shown("default.target", "ActiveState")["ActiveState"] == "inactive"
        assert session.autostart() == "not_enabled"
        session.systemctl("enable", "--quiet", SOCKET_UNIT)  # as a package does for everybody
        assert session.autostart() == "not_enabled"
        session.systemctl("enable", "--quiet", DAEMON_UNIT)
        assert session.daemon() == ("inactive", 0)

        session.launch_entry()
        eventually(lambda: session.daemon()[0] == "active", 120.0, "the entry has started the daemon")
        daemon = session.daemon()
        assert session.autostart() == "runs" and session.daemon() == daemon

        session.systemctl("stop", SOCKET_UNIT, DAEMON_UNIT)
        broken = session.config / "lllm3090" / "config.toml"
        text = broken.read_text()
        broken.write_text("gateway_port = -1\n")
        failed = session.ctl("autostart", status=1)
        assert session.shown(DAEMON_UNIT, "ActiveState", "ExecMainStatus") == {
            "ActiveState": "failed",
            "ExecMainStatus": "78",
        }
        assert "could not be started" in failed.stderr, failed.stderr
        assert "journalctl --user -u lllm3090d" in failed.stderr
        broken.write_text(text)
        session.systemctl("reset-failed")
        session.systemctl("stop", SOCKET_UNIT)
        unit = session.config / "systemd" / "user" / DAEMON_UNIT
        kept = unit.read_text()
        unit.unlink()
        session.systemctl("mask", "--quiet", DAEMON_UNIT)
        assert session.autostart() == "masked"
        session.systemctl("unmask", "--quiet", DAEMON_UNIT)
        assert session.autostart() == "not_installed"
        unit.write_text(kept)
        session.systemctl("enable", "--quiet", DAEMON_UNIT)  # unmasking takes the links away, too
        assert session.autostart() == "start"
        assert session.daemon()[0] == "active"
        processes = session.processes()
        session.end()
        # Their remains are collected by whoever is their parent now.
        eventually(
            lambda: not any(Path(f"/proc/{pid}").exists() for pid in processes), what="all have ended"
        )
