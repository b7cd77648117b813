"""A clean system that boots: systemd as process 1, and an ordinary user with a manager of their own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.packages import roots

BOOT_DEADLINE_S = 120.0
STOP_DEADLINE_S = 60.0
USER = "ada"
UID = 1000
RUNTIME = f"/run/user/{UID}"
# What a running system writes by itself, and where the tests put things.
NOT_LOOKED_AT = (
    "dev",
    "proc",
    "run",
    "sys",
    "tmp",
    "mnt",
    "opt",
    "root",
    "var/lib/dpkg",
    "var/cache",
    "var/log",
    "var/tmp",
    "var/lib/systemd/random-seed",
    "var/lib/systemd/timers",
    "var/lib/systemd/timesync",
    "var/lib/systemd/catalog",
    "var/lib/private",
)


class Machine:
    """A booted root.

    Attributes:
        root: its files, as seen from outside.
    """

    def __init__(self, root: Path, nspawn: subprocess.Popen[bytes]) -> None:
        self.root = root
        self._nspawn = nspawn
        self._leader = 0

    def _command(self, user: str, command: str) -> list[str]:
        as_user = ["bash", "-c", command] if user == "root" else ["runuser", "-l", user, "-c", command]
        plain = [
            "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "LANG=C.UTF-8",
            "HOME=/root",
        ]
        return ["nsenter", "-t", str(self._leader), "-a", "env", "-i", *plain, *as_user]

    def run(self, user: str, command: str) -> subprocess.CompletedProcess[str]:
        """A shell command of a user; root is one. Output and errors are apart."""
        if user != "root":
            command = f"export XDG_RUNTIME_DIR={RUNTIME}; {command}"
        return subprocess.run(
            self._command(user, command),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )

    def done(self, user: str, command: str) -> str:
        """The same, which has to succeed; returns its output."""
        result = self.run(user, command)
        assert result.returncode == 0, f"{command}: {result.returncode}\n{result.stdout}\n{result.stderr}"
        return result.stdout

    def json(self, user: str, command: str) -> Any:
        """The same, its output read."""
        return json.loads(self.done(user, command))

    def wait_until_up(self) -> str:
        """Wait for process 1 and the user's manager to have started everything; says why not, if they have not."""
        until_s = time.monotonic() + BOOT_DEADLINE_S
        children = Path(f"/proc/{self._nspawn.pid}/task/{self._nspawn.pid}/children")
        why = "no process"
        while time.monotonic() < until_s:
            if self._nspawn.poll() is not None:
                return f"systemd-nspawn has ended with {self._nspawn.returncode}"
            if (found := children.read_text(encoding="ascii").split()) and not self._leader:
                self._leader = int(found[0])
            if self._leader:
                answer = self.run("root", f"systemctl is-active user@{UID}.service && test -S {RUNTIME}/bus")
                if answer.returncode == 0:
                    return ""
                why = answer.stdout + answer.stderr
            time.sleep(0.2)
        return f"after {BOOT_DEADLINE_S:.0f} s: {why.strip()}"

    def files(self) -> set[str]:
        """Every file, link and directory that is there, without what a running system writes by itself."""
        seen: set[str] = set()
        for at, directories, names in os.walk(self.root):
            below = Path(at).relative_to(self.root)
            directories[:] = [name for name in directories if str(below / name) not in NOT_LOOKED_AT]
            seen.update(
                str(below / name)
                for name in (*directories, *names)
                if str(below / name) not in NOT_LOOKED_AT
            )
        return seen

    def close(self) -> None:
        """Pull the plug: every process of it ends with process 1, and then systemd-nspawn does."""
        if self._nspawn.poll() is None:
            os.kill(self._leader or self._nspawn.pid, signal.SIGKILL)
        self._nspawn.wait(STOP_DEADLINE_S)


@contextlib.contextmanager
def booted(codename: str, binds: Mapping[Path, str], models: Mapping[str, Path]) -> Iterator[Machine]:
    """A machine with what the package depends on, but without it.

    Args:
        codename: of the release.
        binds: directories of this machine that are to be seen there, read-only.
        models: checkpoints that the user has, by name.
    """
    with roots.workplace("machine") as place:
        root = place / "root"
        roots.unpack(codename, [*roots.OF_A_MACHINE, *roots.dependencies(codename)], root)
        tried = roots.inside(root, "true")
        if tried.returncode != 0:
            pytest.skip(f"systemd-nspawn runs nothing here: {' '.join(tried.stdout.split())}")
        # useradd of the root itself: another release's might write other files.
        subprocess.run(
            ["chroot", str(root), "useradd", "-m", "-s", "/bin/bash", "-u", str(UID), USER], check=True
        )
        (root / "etc" / "hostname").write_text("clean\n", encoding="ascii")
        linger = root / "var" / "lib" / "systemd" / "linger"
        linger.mkdir(parents=True, exist_ok=True)
        (linger / USER).touch()
        for name, checkpoint in models.items():
            directory = root / "home" / USER / "models" / name
            directory.mkdir(parents=True)
            shutil.copyfile(checkpoint, directory / f"{name}.gguf")
        subprocess.run(["chown", "-R", f"{UID}:{UID}", str(root / "home" / USER)], check=True)
        seen = [f"--bind-ro={outside}:{within}" for outside, within in binds.items()]
        with (place / "console").open("wb") as console:
            nspawn = subprocess.Popen(
                roots.nspawn(root, "--private-network", "--boot", "--console=pipe", *seen),
                env=dict(os.environ) | {"SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1"},
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        machine = Machine(root, nspawn)
        try:
            # The package is not in it yet: what keeps it from coming up is this machine's.
            if why := machine.wait_until_up():
                told = (place / "console").read_text(encoding="utf-8", errors="replace").split("\n")
                last = next((line.strip() for line in reversed(told) if line.strip()), "nothing")
                pytest.skip(f"a clean Debian {codename} does not boot here: {why}; its console says: {last}")
            yield machine
        finally:
            machine.close()
