"""The private ``systemd --user`` that the other system tests stand on behaves like a real one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
USER_MANAGER = ROOT / "packaging" / "dev" / "user-manager"
TIMEOUT_S = 110

pytestmark = pytest.mark.system

as_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="looks at the private manager from outside, which needs root"
)


def run(*command: str, options: Sequence[str] = ("--private",)) -> subprocess.CompletedProcess[str]:
    """Run a command under a private manager of its own."""
    return subprocess.run(
        [str(USER_MANAGER), *options, "--", *command],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def shell(script: str, options: Sequence[str] = ("--private",)) -> str:
    """Run a shell script under a private manager; returns what it wrote."""
    done = run("bash", "-euc", script, options=options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def memory_is_limited_here() -> bool:
    """Whether units get a memory controller: v1 beside the others, or v2 handed down to us."""
    if Path("/sys/fs/cgroup/memory").is_dir():
        return os.geteuid() == 0
    own = Path("/proc/self/cgroup").read_text(encoding="ascii").strip().rpartition("::")[2]
    controllers = Path("/sys/fs/cgroup") / own.lstrip("/") / "cgroup.controllers"
    return controllers.exists() and "memory" in controllers.read_text(encoding="ascii").split()


def eventually(holds: Callable[[], bool], timeout_s: float = 60.0) -> bool:
    """Whether a condition outside our control comes true in time."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def box_cgroups(supervisor_pid: int) -> list[Path]:
    """The cgroups of a private manager, in whatever hierarchies there are."""
    return list(Path("/sys/fs/cgroup").rglob(f"lllm3090-um-{supervisor_pid}"))


def test_manager_runs_without_failed_units() -> None:
    assert shell("systemctl --user is-system-running").strip() == "running"


def test_control_group_has_the_shape_of_a_real_machine() -> None:
    out = shell(
        """
        systemd-run --user --quiet --unit=probe sleep 60
        systemctl --user show -p ControlGroup --value probe
        """
    )
    if os.geteuid() == 0:
        assert out.strip() == "/user.slice/user-0.slice/user@0.service/app.slice/probe.service"
    else:
        assert out.strip().endswith("/app.slice/probe.service")


def test_memory_max_kills_what_takes_more() -> None:
    if not memory_is_limited_here():
        pytest.skip("no memory controller reaches the private manager here")
    python = sys.executable
    out = shell(
        f"""
        limited="systemd-run --user --quiet --wait -p MemoryMax=50M -p MemorySwapMax=0"
        $limited --unit=small {python} -c 'bytearray(8 << 20)' && echo small lived
        $limited --unit=large {python} -c 'bytearray(200 << 20)' || true
        systemctl --user show large -p Result -p ExecMainCode -p ExecMainStatus
        """
    )
    assert "small lived" in out
    shown = dict(line.split("=", 1) for line in out.splitlines() if "=" in line)
    assert shown["Result"] in {"oom-kill", "signal"}  # v1 tells systemd only of the signal
    assert (shown["ExecMainCode"], shown["ExecMainStatus"]) == ("2", str(int(signal.SIGKILL)))


def test_memory_current_counts() -> None:
    if not memory_is_limited_here():
        pytest.skip("no memory controller reaches the private manager here")
    out = shell(
        f"""
        systemd-run --user --quiet --unit=eater -p Type=notify -p NotifyAccess=all {sys.executable} -c '
import subprocess, time
held = bytearray(64 << 20)
subprocess.run(["systemd-notify", "--ready"], check=True)
time.sleep(60)'
        systemctl --user show eater -p MemoryCurrent --value
        """
    )
    assert int(out) >= 64 << 20


def test_journal_of_a_unit_is_found_by_its_fields() -> None:
    out = shell(
        """
        # It lives on: of a process that is gone already journald could not tell the unit.
        systemd-run --user --quiet --unit=teller -p SyslogIdentifier=lllm3090-test sh -c 'echo told so; sleep 60'
        for attempt in $(seq 600); do
          found=$(journalctl --quiet --no-pager -o json SYSLOG_IDENTIFIER=lllm3090-test MESSAGE='told so')
          [ -n "$found" ] && break
          sleep 0.05
        done
        echo "$found"
        """,
    )
    entry = json.loads(out.splitlines()[-1])
    assert entry["_UID"] == str(os.geteuid())
    if os.geteuid() == 0:
        assert entry["_SYSTEMD_USER_UNIT"] == "teller.service"


def test_session_bus_reaches_the_manager() -> None:
    out = shell(
        "busctl --user get-property org.freedesktop.systemd1 /org/freedesktop/systemd1 "
        "org.freedesktop.systemd1.Manager Version"
    )
    assert out.startswith('s "')


def test_home_and_scratch_are_private() -> None:
    home, scratch, runtime = shell('echo "$HOME"; echo "$TMPDIR"; echo "$XDG_RUNTIME_DIR"').split()
    assert Path(home) != Path.home()
    assert not Path(home).exists()
    assert not Path(scratch).exists()
    assert runtime.startswith("/run/user/")


@pytest.mark.parametrize(
    ("command", "status"),
    [
        (("sh", "-c", "exit 7"), 7),
        (("sh", "-c", "kill -9 $$"), 128 + signal.SIGKILL),
        (("no-such-program-at-all",), 127),
        (("/etc/passwd",), 126),
    ],
)
def test_status_of_the_command_is_ours(command: tuple[str, ...], status: int) -> None:
    assert run(*command).returncode == status


@pytest.mark.parametrize("arguments", [[], ["--private"], ["--private", "--"], ["--unknown", "--", "true"]])
def test_wrong_usage(arguments: list[str]) -> None:
    done = subprocess.run([str(USER_MANAGER), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 64
    assert "usage" in done.stderr


@as_root
def test_somebody_without_a_manager_is_told_the_remedy() -> None:
    nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    python = "/usr/bin/python3"  # ours may lie where nobody may look
    if not os.access(python, os.X_OK) or shutil.which("setpriv") is None:
        pytest.skip("needs /usr/bin/python3 and setpriv to become somebody without a manager")
    with tempfile.TemporaryDirectory(dir="/tmp") as reachable:
        Path(reachable).chmod(0o755)
        copy = Path(reachable) / "packaging" / "dev"
        shutil.copytree(USER_MANAGER.parent, copy)
        command = [*nobody, python, str(copy / "user-manager"), "--", "true"]
        environment = {"PATH": "/usr/bin:/bin"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 69
    assert "enable-linger" in done.stderr


@pytest.mark.skipif(
    os.geteuid() == 0, reason="checks that --as-user is refused to an ordinary user; root may use it"
)
def test_as_user_is_for_root() -> None:
    done = run("true", options=("--private", "--as-user"))
    assert done.returncode == 64
    assert "for root" in done.stderr


@as_root
def test_as_user_is_an_ordinary_user_with_a_journal_of_its_own() -> None:
    out = shell(
        """
        id -u; id -un
        systemd-run --user --quiet --unit=teller sh -c 'echo from an ordinary user; sleep 60'
        for attempt in $(seq 600); do
          found=$(journalctl --user --quiet --no-pager -o cat --user-unit=teller MESSAGE='from an ordinary user')
          [ -n "$found" ] && break
          sleep 0.05
        done
        echo "$found"
        ls /root 2>&1 | head -1
        """,
        options=("--as-user",),
    )
    uid, name, found, root_listing = out.splitlines()
    assert int(uid) >= 1000
    assert name == "lllm3090-user"
    assert found == "from an ordinary user"
    assert "denied" in root_listing
    assert name not in Path("/etc/passwd").read_text(encoding="utf-8")


@pytest.fixture
def standing() -> Iterator[subprocess.Popen[str]]:
    """A private manager with a unit that runs; it has said so."""
    script = "systemd-run --user --quiet --unit=stays sleep 600; echo up; exec sleep 600"
    process = subprocess.Popen(
        [str(USER_MANAGER), "--private", "--", "bash", "-c", script], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    yield process
    if process.poll() is None:
        process.kill()
    process.wait(TIMEOUT_S)
    process.stdout.close()


@as_root
def test_terminate_reaches_the_command_and_nothing_is_left(standing: subprocess.Popen[str]) -> None:
    cgroups = box_cgroups(standing.pid)
    assert cgroups
    standing.terminate()
    assert standing.wait(TIMEOUT_S) == 128 + signal.SIGTERM
    assert not [path for path in cgroups if path.exists()]


@as_root
def test_killed_supervisor_leaves_nothing_either(standing: subprocess.Popen[str]) -> None:
    cgroups = box_cgroups(standing.pid)
    pids = {
        int(pid)
        for cgroup in cgroups
        for procs in cgroup.rglob("cgroup.procs")
        for pid in procs.read_text(encoding="ascii").split()
    }
    assert len(pids) >= 4  # journald, the manager, the unit, the command
    standing.kill()
    standing.wait(TIMEOUT_S)
    assert eventually(lambda: not [path for path in cgroups if path.exists()])
    # Their remains are collected by whoever is their parent now.
    assert eventually(lambda: not [pid for pid in pids if Path(f"/proc/{pid}").exists()])


def test_a_second_manager_beside_the_first_leaves_it_alone() -> None:
    before = subprocess.run(
        ["systemctl", "--user", "list-units", "--plain", "--no-legend", "--type=service"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    inside = shell(
        "systemd-run --user --quiet --unit=elsewhere sleep 60; systemctl --user is-active elsewhere"
    )
    assert inside.strip() == "active"
    assert "elsewhere" not in before
    after = subprocess.run(
        ["systemctl", "--user", "is-active", "elsewhere"], capture_output=True, text=True, check=False
    )
    assert after.stdout.strip() == "inactive"
