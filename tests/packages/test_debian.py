"""The Debian package's life: built, looked at by lintian, installed, used, upgraded under a model, removed, purged."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path

import pytest

from lllm3090d.version import VERSION
from tests.packages import roots
from tests.packages.machine import USER, Machine, booted
from tests.packages.newer import calls_itself_newer

pytestmark = [pytest.mark.packages, pytest.mark.timeout(1500)]

RELEASES = ("bookworm", "trixie")
NEWER = f"{VERSION}+1"
MODEL = "SmolLM2-135M-Instruct"
PROGRAMS = ("mmdebstrap", "systemd-nspawn", "nsenter")
# Elsewhere they are in the root of that release.
PROGRAMS_TO_BUILD_HERE = ("dpkg-buildpackage", "dh", "lintian")
LEFT = {
    f"home/{USER}/.local",
    f"home/{USER}/.local/state",
    f"home/{USER}/.local/state/lllm3090",
}
ASK = f"""python3 - <<'END'
import json, urllib.request
body = {{"model": "{MODEL}", "max_tokens": 8, "messages": [{{"role": "user", "content": "Hello"}}]}}
asked = urllib.request.Request("http://127.0.0.1:1919/v1/chat/completions", json.dumps(body).encode(),
                               {{"Content-Type": "application/json"}})
print(json.load(urllib.request.urlopen(asked, timeout=120))["usage"]["completion_tokens"])
END"""


@dataclass(frozen=True)
class Built:
    """Packages of one release.

    Attributes:
        codename: of the release.
        package: of this tree.
        newer: the same, which calls itself newer.
        told: all that lintian has to say.
    """

    codename: str
    package: Path
    newer: Path
    told: str


def own_codename() -> str:
    """Of the release that runs here; empty where it is not Debian."""
    release = Path("/etc/os-release").read_text(encoding="utf-8")
    found = re.search(r"^VERSION_CODENAME=(\w+)", release, re.MULTILINE)
    return found[1] if found and "ID=debian" in release else ""


def only(directory: Path, pattern: str) -> Path:
    """The one file of that name."""
    (found,) = directory.glob(pattern)
    return found


@pytest.fixture(scope="module", params=RELEASES)
def built(request: pytest.FixtureRequest) -> Iterator[Built]:
    """Both packages; on the release that runs here in place, else in a root of the other."""
    codename: str = request.param
    here = codename == own_codename()
    wanted = PROGRAMS + (PROGRAMS_TO_BUILD_HERE if here else ())
    missing = [name for name in wanted if shutil.which(name) is None]
    if os.geteuid() != 0 or missing:
        pytest.skip(f"needs root and {', '.join(missing) or 'nothing else'}: make test-packages")
    with roots.workplace("building") as place:
        output = place / "package"
        if not here:
            roots.unpack(codename, [*roots.FOR_BUILDING, *roots.dependencies(codename)], place / "root")

        def run(*command: str) -> str:
            if here:
                done = roots.contained(command)
            else:
                done = roots.inside(place / "root", "sh", "-c", 'cd /src && "$@"', "sh", *command)
            assert done.returncode == 0, f"{command}: {done.stdout}"
            return done.stdout

        # Not pressed as hard as what is handed out, which takes most of a build.
        build = ("packaging/dev/build-deb", "--output", str(output.relative_to(roots.REPOSITORY)))
        run("env", "DPKG_DEB_COMPRESSOR_LEVEL=1", *build)
        changes = only(output, "lllm3090_*.changes").relative_to(roots.REPOSITORY)
        everything = ("--tag-display-limit", "0", "--show-overrides", "--fail-on=none")
        told = run("lintian", "--allow-root", *everything, str(changes))
        package = only(output, "lllm3090_*.deb")
        newer = calls_itself_newer(package, NEWER, place)
        yield Built(codename, package, newer, told)


def test_lintian_has_neither_errors_nor_warnings(built: Built) -> None:
    assert not re.findall(r"^[EW]: .*$", built.told, re.MULTILINE)
    # It has looked at our package: what is overridden is told.
    assert re.findall(r"^O: lllm3090: ", built.told, re.MULTILINE)


def test_every_override_has_its_reason(built: Built) -> None:
    blocks: list[list[str]] = [[]]
    for line in (roots.PACKAGING / "lllm3090.lintian-overrides").read_text(encoding="utf-8").splitlines():
        if line.startswith("#") and blocks[-1] and not blocks[-1][-1].startswith("#"):
            blocks.append([])
        blocks[-1].append(line)
    assert all(block[0].startswith("# ") and not block[-1].startswith("#") for block in blocks)
    # None is there for nothing.
    assert "unused-override" not in built.told
    assert "mismatched-override" not in built.told


@pytest.fixture(scope="module")
def machine(built: Built, llama_server: Path, smollm2_path: Path) -> Iterator[Machine]:
    """A clean machine that has the packages, and an engine that is not yet where it is looked for."""
    binds = {
        built.package.parent: "/mnt/package",
        built.newer.parent: "/mnt/newer",
        llama_server.resolve().parent: "/mnt/engine",
    }
    with booted(built.codename, binds, {MODEL: smollm2_path}) as machine:
        yield machine


def engine_of(machine: Machine) -> tuple[int, str]:
    """The one engine that runs: its process, and when that started."""
    (one,) = machine.json(USER, "lllm3090ctl ps --json")["instances"]
    assert one["state"] in {"ready", "busy"}
    started = machine.done("root", f"cut -d' ' -f22 /proc/{one['main_pid']}/stat").strip()
    return one["main_pid"], started


def daemon_version(machine: Machine) -> str:
    """Of the daemon that answers."""
    told = machine.json(USER, "lllm3090ctl status --json")
    version: str = told["version"]
    return version


def test_its_life(machine: Machine, built: Built) -> None:
    before = machine.files()

    machine.done("root", "dpkg -i /mnt/package/*.deb")
    assert daemon_version(machine) == VERSION  # the user's socket was started, and starts the daemon
    for name in ("lllm3090d", "lllm3090ctl"):
        assert VERSION in machine.done(USER, f"{name} --version")
    assert machine.done(USER, "systemctl --user show -P FragmentPath lllm3090d.service").strip() == (
        "/usr/lib/systemd/user/lllm3090d.service"
    )
    assert machine.done(USER, "systemctl --user is-enabled lllm3090d.socket").strip() == "enabled"
    assert machine.run(USER, "systemctl --user is-enabled lllm3090d.service").stdout.strip() == "disabled"
    # The preset says the same, and systemd has made no unit of the desktops' entry, which starts nothing unasked.
    machine.done(USER, "systemctl --user preset lllm3090d.service")
    for unit, state in ((".service", "disabled"), (".socket", "enabled")):
        assert machine.run(USER, f"systemctl --user is-enabled lllm3090d{unit}").stdout.strip() == state
    assert (machine.root / "etc/xdg/autostart/lllm3090d.desktop").is_file()
    assert machine.run(USER, "systemctl --user list-unit-files --no-legend 'app-lllm3090d*'").stdout == ""
    # Nothing else of this machine's Python is looked into.
    paths = machine.done(USER, "/usr/lib/lllm3090/bin/python3 -I -c 'import sys; print(sys.path)'")
    assert "/usr/local" not in paths
    assert ".local" not in paths
    assert "lllm3090ctl" in machine.done(
        USER, "bash -c '. /usr/share/bash-completion/completions/lllm3090ctl; complete -p lllm3090ctl'"
    )

    refused = machine.run(USER, f"lllm3090ctl load {MODEL}")
    assert refused.returncode != 0
    assert "No llama-server was found" in refused.stderr
    assert "Hint: Install llama.cpp" in refused.stderr
    machine.done("root", "ln -s /mnt/engine /opt/llama.cpp")

    machine.done(USER, "systemctl --user stop lllm3090d.socket lllm3090d.service")
    assert machine.json(USER, "lllm3090ctl autostart --json") == {"started": False, "verdict": "not_enabled"}
    said = machine.done(
        USER,
        "busctl --user get-property org.lllm3090.Manager1 /org/lllm3090/Manager1 org.lllm3090.Manager1 Version",
    )
    assert said.strip() == f's "{VERSION}"'

    machine.done(USER, f"lllm3090ctl load {MODEL}")
    engine = engine_of(machine)
    assert int(machine.done(USER, ASK)) > 0

    was = machine.done(USER, "systemctl --user show -P MainPID lllm3090d.service")
    machine.done("root", "dpkg -i /mnt/newer/*.deb")
    assert daemon_version(machine) == NEWER
    assert machine.done(USER, "systemctl --user show -P MainPID lllm3090d.service") != was
    assert engine_of(machine) == engine
    assert int(machine.done(USER, ASK)) > 0
    assert engine_of(machine) == engine

    settings = conffiles(machine)
    machine.done("root", "dpkg -r lllm3090")
    assert_nothing_runs(machine, engine[0])
    assert_only_state_is_left(machine, before, settings)

    # It comes back as it was, and goes for good.
    machine.done("root", "dpkg -i /mnt/newer/*.deb")
    assert daemon_version(machine) == NEWER
    machine.done(USER, f"lllm3090ctl load {MODEL}")
    engine = engine_of(machine)
    machine.done("root", "dpkg -P lllm3090")
    assert_nothing_runs(machine, engine[0])
    assert_only_state_is_left(machine, before)
    assert machine.run("root", "dpkg -s lllm3090").returncode != 0


def assert_nothing_runs(machine: Machine, engine: int) -> None:
    """No unit, no engine and no program of ours; the manager may be a moment behind with what it forgets."""
    assert not (machine.root / "proc" / str(engine)).exists()
    until_s = time.monotonic() + 30.0
    while True:
        units = machine.done(USER, "systemctl --user list-units --all --plain --no-legend 'lllm3090*'")
        files = machine.run(USER, "systemctl --user list-unit-files --no-legend 'lllm3090*'").stdout
        processes = machine.done("root", "grep -alE 'llama-server|lllm3090' /proc/[0-9]*/cmdline || true")
        left = [units.strip(), files.strip(), *outlived(machine, processes)]
        if not any(left):
            return
        assert time.monotonic() < until_s, left
        time.sleep(0.2)


def outlived(machine: Machine, processes: str) -> list[str]:
    """Programs of ours among these, which are told by their files in /proc; the shell that looks is none."""
    commands = (machine.run("root", f"tr '\\0' ' ' <{file}").stdout for file in processes.split())
    return [
        command
        for command in commands
        if re.match(r"\S*(llama-server|lllm3090d|python3 .*lllm3090)", command)
    ]


def conffiles(machine: Machine) -> set[str]:
    """What stays in /etc until a purge: a person may have changed it. With the directories that it is in."""
    told = machine.done("root", "dpkg-query -W -f '${Conffiles}' lllm3090")
    files = [Path(line.split()[0]).relative_to("/") for line in told.splitlines() if line.strip()]
    return {str(path) for file in files for path in (file, *file.parents)} - {"."}


def assert_only_state_is_left(
    machine: Machine, before: set[str], settings: AbstractSet[str] = frozenset()
) -> None:
    """Files: none is missing, and none is new but what the daemon has learnt, and a package's settings."""
    after = machine.files()
    assert before - after == set()
    new = after - before
    left = LEFT | (settings - before)
    assert new >= left
    state = f"home/{USER}/.local/state/lllm3090/"
    assert {name for name in new if not name.startswith(state)} == left
    assert f"home/{USER}/models/{MODEL}/{MODEL}.gguf" in after
