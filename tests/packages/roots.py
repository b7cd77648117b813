"""Clean systems of Debian's releases, made by mmdebstrap and kept as archives in ``build/deb/roots``."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

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


def unpack(codename: str, packages: Sequence[str], place: Path) -> None:
    """A root with these packages, as if it had just been installed."""
    wanted = ",".join(sorted(packages))
    name = f"{codename}-{hashlib.sha256(wanted.encode('ascii')).hexdigest()[:12]}.tar"
    archive = BUILD / "roots" / name
    if not archive.exists():
        archive.parent.mkdir(parents=True, exist_ok=True)
        part = archive.with_suffix(".part.tar")
        part.unlink(missing_ok=True)
        subprocess.run(
            ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={wanted}", codename, str(part)],
            check=True,
        )
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
