"""Clean systems of Debian's releases, made by mmdebstrap and kept as archives in ``build/deb/roots``."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
BUILD = REPOSITORY / "build" / "deb"
PACKAGING = REPOSITORY / "packaging" / "debian"
# A user manager and a session bus as every installation has them, and what the engine is linked with.
OF_A_MACHINE = ("systemd", "systemd-sysv", "dbus-user-session", "libpam-systemd", "libgomp1")
FOR_BUILDING = ("build-essential", "dpkg-dev", "debhelper", "python3-pip", "lintian")


def dependencies(codename: str) -> list[str]:
    """Names of the packages that the package for a release depends on, beside those of every machine."""
    lines = (PACKAGING / "bundle" / f"{codename}.depends").read_text(encoding="ascii").splitlines()
    return [line.split()[0] for line in lines]


@contextlib.contextmanager
def workplace(what: str) -> Iterator[Path]:
    """A directory in ``build/deb`` that is gone afterwards; those of runs that were killed go at the next call."""
    BUILD.mkdir(parents=True, exist_ok=True)
    for left in BUILD.glob(f"{what}-*-*"):
        if not Path(f"/proc/{left.name.split('-')[1]}").exists():
            shutil.rmtree(left)
    place = Path(tempfile.mkdtemp(prefix=f"{what}-{os.getpid()}-", dir=BUILD))
    try:
        place.chmod(0o755)
        yield place
    finally:
        shutil.rmtree(place)


def contained(
    command: Sequence[str], *, directory: Path = REPOSITORY, variables: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program here. Whatever it has started ends with it, and it ends with whoever waits for it."""
    alone = ("setpriv", "--pdeathsig", "KILL", "unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
    return subprocess.run(
        [*alone, *command],
        cwd=directory,
        env=dict(os.environ) | (variables or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def unpack(codename: str, packages: Sequence[str], place: Path) -> None:
    """A root with these packages, as if it had just been installed.

    Skips the test where the release's packages cannot be fetched.
    """
    wanted = ",".join(sorted(packages))
    name = f"{codename}-{hashlib.sha256(wanted.encode('ascii')).hexdigest()[:12]}.tar"
    archive = BUILD / "roots" / name
    if not archive.exists():
        archive.parent.mkdir(parents=True, exist_ok=True)
        with workplace("making") as making:
            part = making / name
            # A root that a crash of this machine spoils is made anew: dpkg need not wait for the disk.
            options = ("--variant=minbase", "--dpkgopt=force-unsafe-io", '--aptopt=Acquire::Retries "3"')
            made = contained(
                ["mmdebstrap", *options, f"--include={wanted}", codename, str(part)],
                variables={"TMPDIR": str(making)},
            )
            unreachable = re.search(r"^E: Failed to fetch .*", made.stdout, re.MULTILINE)
            if made.returncode != 0 and unreachable:
                pytest.skip(f"no clean Debian {codename} can be made here: {unreachable[0]}")
            assert made.returncode == 0, made.stdout
            part.rename(archive)
    place.mkdir(parents=True)
    subprocess.run(["tar", "-xpf", str(archive), "--xattrs", "-C", str(place)], check=True)


def nspawn(place: Path, *options: str) -> list[str]:
    """The beginning of a command in a root. It ends with whoever starts it.

    Where systemd is process 1 it gives each of these a scope; elsewhere they stay in the cgroup of whoever starts them.
    """
    alone = () if Path("/run/systemd/private").exists() else ("--register=no", "--keep-unit")
    return [
        *("setpriv", "--pdeathsig", "KILL", "systemd-nspawn", "--quiet", *alone),
        *("-D", str(place), *options),
    ]


def inside(place: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a root that is not booted, with the working tree at /src; it has the network."""
    options = [f"--bind={REPOSITORY}:/src"]
    # Where a machine's pip needs a certificate of its own, that one's does too.
    certificates = Path("/etc/ssl/certs")
    if "PIP_CERT" in os.environ and certificates.is_dir():
        options += [f"--bind-ro={certificates}", f"--setenv=PIP_CERT={os.environ['PIP_CERT']}"]
    return subprocess.run(
        nspawn(place, "--pipe", *options, *command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
