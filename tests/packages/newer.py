"""A package that is there already, made to call itself newer: for an upgrade to it."""

from __future__ import annotations

import re
from pathlib import Path

from lllm3090d.version import VERSION
from tests.packages import roots


def calls_itself_newer(package: Path, version: str, place: Path) -> Path:
    """What a build of a tree with another version would differ in: the version that dpkg, pip and the program tell.

    Args:
        package: a ``.deb`` of this tree.
        version: which it is to have.
        place: a directory to work in.

    Returns:
        The new package, which is alone in its directory.
    """
    tree = place / "tree"
    done = roots.contained(["dpkg-deb", "--raw-extract", str(package), str(tree)])
    assert done.returncode == 0, done.stdout
    _replace(tree / "DEBIAN" / "control", rf"^Version: {re.escape(VERSION)}-", f"Version: {version}-")
    (modules,) = tree.glob("usr/lib/lllm3090/lib/python3*/site-packages")
    _replace(modules / "lllm3090d" / "version.py", r"^VERSION = .*$", f'VERSION = "{version}"')
    installed = modules / f"lllm3090-{VERSION}.dist-info"
    _replace(installed / "METADATA", rf"^Version: {re.escape(VERSION)}$", f"Version: {version}")
    installed.rename(modules / f"lllm3090-{version}.dist-info")
    # Without sums in a package dpkg takes its own.
    (tree / "DEBIAN" / "md5sums").unlink()
    newer = place / "newer" / f"lllm3090_{version}.deb"
    newer.parent.mkdir()
    done = roots.contained(
        ["dpkg-deb", "--root-owner-group", "-Zgzip", "-z1", "--build", str(tree), str(newer)]
    )
    assert done.returncode == 0, done.stdout
    return newer


def _replace(file: Path, pattern: str, with_this: str) -> None:
    """In the one place where it is."""
    text, times = re.subn(pattern, with_this, file.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert times == 1, f"{file}: {pattern}"
    file.write_text(text, encoding="utf-8")
