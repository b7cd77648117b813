"""The PKGBUILD: well-formed, in step with the project, and its steps do what they are for."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from lllm3090ctl.setup_files import COMPLETIONS, UNIT_SUFFIXES
from lllm3090d.version import VERSION

pytestmark = pytest.mark.unit

PROJECT = Path(__file__).parents[2]
ARCH = PROJECT / "packaging" / "arch"
FILES = ("PKGBUILD", "lllm3090.install", "dry-run")
# Where Arch has another name than python- and that of PyPI.
NAMES = {
    "inotify_simple": "python-inotify-simple",
    "prometheus_client": "python-prometheus_client",
    "PyGObject": "python-gobject",
}


def told(variable: str) -> list[str]:
    """An array of the PKGBUILD, or its one value."""
    script = f'source "$1"; printf "%s\\n" "${{{variable}[@]}}"'
    done = subprocess.run(
        ["bash", "-c", script, "bash", ARCH / "PKGBUILD"], capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


@pytest.mark.parametrize("name", FILES)
def test_bash_and_shellcheck_accept_it(name: str) -> None:
    subprocess.run(["bash", "-n", ARCH / name], check=True)
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run(["shellcheck", name], capture_output=True, text=True, check=False, cwd=ARCH)
    assert (done.returncode, done.stdout) == (0, "")


def test_version_and_dependencies_are_those_of_the_project() -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert told("pkgver") == [VERSION]
    assert told("license") == [project["license"]]
    assert told("pkgdesc") == [project["description"]]
    needed = set()
    for dependency in project["dependencies"]:
        found = re.match(r"([\w-]+)>=([\d.]+)", dependency)
        assert found is not None, dependency
        needed.add(f"{NAMES.get(found[1], 'python-' + found[1])}>={found[2]}")
    python = project["requires-python"].removeprefix(">=")
    assert set(told("depends")) == needed | {f"python>={python}", "dbus", "systemd>=252"}


def test_nobody_is_made_to_enable_or_stop_anything() -> None:
    """pacman runs hooks as root, for whom units of users are not."""
    for step in ("post_install", "post_upgrade", "post_remove"):
        # Whatever it called, but for cat, would not be found.
        script = f'PATH=/nonexistent; cat() {{ while read -r l; do echo "$l"; done; }}; . "$1"; {step}'
        command = ["bash", "-c", script, "bash", ARCH / "lllm3090.install"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0 and done.stderr == "" and done.stdout != ""


@pytest.mark.timeout(600)  # it builds a wheel
def test_its_steps_install_every_file(tmp_path: Path) -> None:
    done = subprocess.run(
        [ARCH / "dry-run", tmp_path], capture_output=True, text=True, check=False, timeout=500
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    package = tmp_path / "pkg"
    installed = {str(path.relative_to(package)) for path in package.rglob("*") if path.is_file()}
    units = {path.name for path in (PROJECT / "systemd").iterdir() if path.suffix in UNIT_SUFFIXES}
    expected = {
        "usr/bin/lllm3090d",
        "usr/bin/lllm3090ctl",
        *(f"usr/lib/systemd/user/{name}" for name in units),
        "usr/lib/systemd/user-preset/90-lllm3090.preset",
        "etc/xdg/autostart/lllm3090d.desktop",
        "usr/share/dbus-1/services/org.lllm3090.Manager1.service",
        "usr/share/dbus-1/interfaces/org.lllm3090.Manager1.xml",
        *(f"usr/share/{place}" for place in COMPLETIONS.values()),
        *(
            f"usr/share/man/man{page.suffix[1:]}/{page.name}"
            for page in (PROJECT / "packaging" / "man").iterdir()
        ),
        "usr/share/licenses/lllm3090/LICENSE",
    }
    assert expected <= installed
    outside = {name for name in installed - expected if "/site-packages/lllm3090" not in name}
    assert outside == {
        f"usr/share/doc/lllm3090/{name}" for name in ("README.md", "CHANGELOG.md", "config.example.toml")
    }
    service = (package / "usr/lib/systemd/user/lllm3090d.service").read_text(encoding="utf-8")
    assert "ExecStart=/usr/bin/lllm3090d\n" in service
    # What `setup` would need is in every wheel.
    shipped = {name.rpartition("/shipped/")[2] for name in installed if "/lllm3090ctl/shipped/" in name}
    assert {f"systemd/{name}" for name in units} <= shipped
    assert {f"man/{page.name}" for page in (PROJECT / "packaging" / "man").iterdir()} <= shipped
    assert {f"completions/{name}" for name in COMPLETIONS} <= shipped
    assert "login/lllm3090d.desktop" in shipped
