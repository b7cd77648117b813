"""What a command sees: environment, home, and the directories an ordinary user must be able to reach."""

from __future__ import annotations

import os
import pwd
import stat
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from private_manager.processes import Account

ORDINARY_NAME = "lllm3090-user"
MARK = "PRIVATE_USER_MANAGER"  # tells the command that no person's units are at stake
FIRST_UID = 4242  # above SYSTEM_UID_MAX, so journald keeps a journal of its own for it

PASSED = frozenset(
    {
        "PATH",
        "SHELL",
        "TERM",
        "COLORTERM",
        "NO_COLOR",
        "FORCE_COLOR",
        "COLUMNS",
        "LINES",
        "LANG",
        "LANGUAGE",
        "TZ",
    }
    | {
        "CI",
        "VIRTUAL_ENV",
        "TMPDIR",
        "SSL_CERT_FILE",
        "SSL_CERT_DIR",
        "REQUESTS_CA_BUNDLE",
        "CURL_CA_BUNDLE",
    }
    | {
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "NO_PROXY",
        "http_proxy",
        "https_proxy",
        "no_proxy",
        "GGML_VK_VISIBLE_DEVICES",
    }
)
PASSED_PREFIXES = ("LC_", "LLLM3090_", "PIP", "PY", "COVERAGE_", "COV_", "HYPOTHESIS_", "CUDA_", "NVIDIA_")
MANAGER_KEEPS = frozenset({"PATH", "LANG", "TZ", "SHELL"})


def passed_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The caller's variables that reach the command; the rest belongs to the caller's own session."""
    return {
        name: value
        for name, value in environment.items()
        if name in PASSED or name.startswith(PASSED_PREFIXES)
    }


def session_environment(account: Account, runtime: Path) -> dict[str, str]:
    """Variables that a login would have set."""
    return {
        "HOME": str(account.home),
        "USER": account.name,
        "LOGNAME": account.name,
        "XDG_RUNTIME_DIR": str(runtime),
        "DBUS_SESSION_BUS_ADDRESS": f"unix:path={runtime}/bus",
    }


def command_environment(account: Account, runtime: Path, scratch: Path | None) -> dict[str, str]:
    """The whole environment of the command."""
    environment = passed_environment(os.environ) | session_environment(account, runtime)
    environment[MARK] = "1"
    if scratch is not None:
        environment["TMPDIR"] = str(scratch)
    return environment


def manager_environment(account: Account, runtime: Path) -> dict[str, str]:
    """The whole environment of the manager, and so of every unit: as small as that of a real one."""
    kept = {
        name: value for name, value in os.environ.items() if name in MANAGER_KEEPS or name.startswith("LC_")
    }
    return kept | session_environment(account, runtime)


def myself(home: Path | None) -> Account:
    """The account that calls, with another home if one is given."""
    entry = pwd.getpwuid(os.getuid())
    return Account(
        entry.pw_name, entry.pw_uid, entry.pw_gid, home or Path(os.environ.get("HOME", entry.pw_dir))
    )


def invent_account(home: Path, keep_in: Path) -> Account:
    """An ordinary user that exists in this mount namespace only."""
    taken = {entry.pw_uid for entry in pwd.getpwall()}
    uid = next(number for number in range(FIRST_UID, FIRST_UID + 10000) if number not in taken)
    lines = {
        "passwd": f"{ORDINARY_NAME}:x:{uid}:{uid}:exists in a test only:{home}:/bin/bash\n",
        "group": f"{ORDINARY_NAME}:x:{uid}:\n",
    }
    for database, line in lines.items():
        original = Path("/etc") / database
        copy = keep_in / database
        copy.write_bytes(original.read_bytes().rstrip(b"\n") + b"\n" + line.encode("ascii"))
        copy.chmod(0o644)
        subprocess.run(["mount", "--bind", str(copy), str(original)], check=True)
    return Account(ORDINARY_NAME, uid, uid, home)


def wanted_paths(repository: Path) -> list[Path]:
    """What an ordinary user needs of the caller's files: working tree, interpreters, named settings."""
    wanted = [Path.cwd(), repository, Path(sys.base_prefix)]
    for python in (repository / ".venv/bin/python", repository / ".engine/bin/python"):
        if python.exists():
            wanted.append(python.resolve().parent.parent)
    wanted += [Path(entry) for entry in os.environ.get("PATH", "").split(":") if entry.startswith("/")]
    wanted += [
        Path(value)
        for name, value in os.environ.items()
        if name.startswith(("LLLM3090_", "COVERAGE_")) and value.startswith("/")
    ]
    return [path for path in wanted if path.exists()]


def _closed_ancestor(path: Path) -> Path | None:
    """The topmost directory on the way that others may not pass."""
    for directory in reversed(path.parents):
        if not directory.stat().st_mode & stat.S_IXOTH:
            return directory
    return None


def open_up(paths: Iterable[Path]) -> None:
    """Make `paths` reachable for everybody, in this mount namespace only.

    A closed directory on the way (such as /root) is covered, so that nothing but `paths` is seen in it.
    """
    below: dict[Path, list[Path]] = {}
    for path in sorted({path.resolve() for path in paths}):
        closed = _closed_ancestor(path)
        if closed is not None and not any(known in path.parents for known in below.get(closed, [])):
            below.setdefault(closed, []).append(path)
    for closed, needed in below.items():
        handles = [(path, os.open(path, os.O_PATH)) for path in needed]
        subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=711,size=1m", "tmpfs", str(closed)], check=True)
        for path, handle in handles:
            if path.is_dir() or stat.S_ISDIR(os.fstat(handle).st_mode):
                path.mkdir(parents=True, exist_ok=True)
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch()
            source = f"/proc/self/fd/{handle}"
            subprocess.run(
                ["mount", "--no-canonicalize", "--bind", source, str(path)], check=True, pass_fds=[handle]
            )
            os.close(handle)
