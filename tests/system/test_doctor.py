"""``lllm3090ctl doctor`` on a real machine: the daemon up, down and hung, an engine and a systemctl that hang."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.system.dbus_scene import activatable
from tests.system.harness import BIN, DAEMON_UNIT, SOCKET_UNIT, Service, systemctl

pytestmark = pytest.mark.system

# What must be right wherever the tests run; the rest depends on the machine.
SOUND = {
    "version",
    "settings",
    "manager",
    "service",
    "socket",
    "dbus",
    "models",
    "state",
    "state-disk",
    "clock",
}
HANGS = "#!/bin/sh\nexec sleep 1000\n"


@pytest.fixture
def enabled(service: Service) -> Iterator[Service]:
    """A daemon whose socket is enabled, as after ``make install``."""
    systemctl("enable", "--runtime", SOCKET_UNIT)
    with activatable():
        yield service
    systemctl("disable", "--runtime", SOCKET_UNIT)


def doctor(
    service: Service, *arguments: str, path: str | None = None
) -> tuple[int, dict[str, dict[str, Any]]]:
    """Exit status, and lines by their check, with ``environment`` and ``level`` of the whole as lines too."""
    environment = dict(os.environ) | ({"PATH": path} if path else {})
    done = subprocess.run(
        [str(BIN / "lllm3090ctl"), *arguments, "doctor", "--json"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    document = json.loads(done.stdout)
    assert done.returncode == {"ok": 0, "warn": 10, "fail": 11}[document["level"]], done.stderr
    lines = {each["check"]: each for each in document["checks"]}
    return done.returncode, lines | {"environment": {"message": document["environment"]}}


def levels(lines: dict[str, dict[str, Any]], level: str) -> set[str]:
    return {check for check, line in lines.items() if line.get("level") == level}


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_a_daemon_that_runs(enabled: Service) -> None:
    """Nothing is made up: where there is no card, no line complains of one."""
    status, lines = doctor(enabled)
    assert lines["environment"]["message"] == "daemon"
    assert levels(lines, "ok") >= SOUND | {"daemon"}, lines
    if "host memory takes its place" in lines["driver"]["message"]:
        assert levels(lines, "ok") >= {"driver", "devices", "engine", "vulkan", "suspend"}, lines
        assert "computes on cpu" in lines["engine"]["message"]
        assert status in {0, 10}, lines
    assert "holds 1 model" in lines["models"]["message"]


def test_text_for_a_person(enabled: Service) -> None:
    done = enabled.ctl("doctor", check=False)
    assert "ok    daemon " in done.stdout
    assert done.stderr == ""
    assert done.stdout.rstrip().endswith(("well.", "warning.", "warnings.", "failure.", "failures."))


def test_a_daemon_that_does_not_run(enabled: Service) -> None:
    """The engine is found all the same: its place is in the environment of the unit, not of this shell."""
    enabled.stop()
    status, lines = doctor(enabled)
    assert status == 11
    assert lines["environment"]["message"] == "manager"
    assert lines["daemon"]["level"] == "fail"
    assert "systemctl --user start lllm3090d" in lines["daemon"]["hint"]
    assert levels(lines, "ok") >= SOUND - {"version", "socket"}, lines
    assert lines["socket"]["level"] == "warn"
    assert enabled.settings["llama_dir"] in lines["engine"]["message"]
    assert not (Path(os.environ["XDG_RUNTIME_DIR"]) / "lllm3090d" / "control.sock").exists()


def test_the_socket_starts_the_daemon(enabled: Service) -> None:
    systemctl("stop", DAEMON_UNIT)
    _, lines = doctor(enabled)
    assert levels(lines, "ok") >= SOUND | {"daemon"}, lines


def test_a_daemon_that_hangs(enabled: Service) -> None:
    """It is told within the time-out, and the machine is looked at."""
    pid = enabled.main_pid()
    os.kill(pid, signal.SIGSTOP)
    try:
        status, lines = doctor(enabled, "--timeout", "2")
    finally:
        os.kill(pid, signal.SIGCONT)
    assert status == 11
    assert "did not answer within 2 s" in lines["daemon"]["message"]
    assert levels(lines, "ok") >= SOUND - {"version"}, lines


def test_an_engine_that_hangs(enabled: Service, tmp_path: Path) -> None:
    server = executable(tmp_path / "hung" / "llama-server", HANGS)
    enabled.configure(llama_dir=str(server.parent))
    systemctl("restart", DAEMON_UNIT)
    status, lines = doctor(enabled)  # which has a limit itself
    assert status == 11
    assert lines["engine"]["level"] == "fail"
    assert "did not answer --version" in lines["engine"]["message"]
    assert lines["daemon"]["level"] == "warn"  # its status waits for that engine too
    assert levels(lines, "ok") >= SOUND, lines


def test_a_systemctl_that_hangs(enabled: Service, tmp_path: Path) -> None:
    executable(tmp_path / "bin" / "systemctl", HANGS)
    status, lines = doctor(enabled, path=f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert status == 11
    assert lines["manager"]["level"] == "fail"
    assert "has not answered within 5 s" in lines["manager"]["message"]
    assert lines["daemon"]["level"] == "ok"


def test_settings_that_are_not_valid(enabled: Service) -> None:
    """The daemon goes on with the old ones; its next start would fail."""
    enabled.config_file.write_text('card = "matrox"\n')
    status, lines = doctor(enabled)
    assert status == 11
    assert lines["settings"]["level"] == "fail"
    assert "matrox" in lines["settings"]["message"]
    assert lines["daemon"]["level"] == "ok"


def test_damaged_models_and_state(enabled: Service) -> None:
    (enabled.models_dir / "broken").mkdir()
    (enabled.models_dir / "broken" / "broken.gguf").write_bytes(b"<html>not found</html>")
    enabled.stop()
    state = enabled.directory / "state" / "lllm3090.db"
    state.write_bytes(b"no database " * 1000)
    for journal in state.parent.glob("lllm3090.db-*"):
        journal.unlink()
    _, lines = doctor(enabled)
    assert lines["models"]["level"] == "warn"
    assert "broken cannot be loaded" in lines["models"]["message"]
    assert (lines["state"]["level"], "damaged" in lines["state"]["message"]) == ("warn", True)
    assert state.read_bytes().startswith(b"no database")  # left to the daemon
