"""What a model's unit may not do is refused, what an engine needs is not, and the figures of the page are true."""

from __future__ import annotations

import errno
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from lllm3090d.bus import properties, unit_errors
from lllm3090d.bus.properties import Property, PropertyValue
from lllm3090d.serving.hardening import HARDENING
from tests.fakes.engine import install_fake_engine
from tests.fakes.gguf_files import write_llama
from tests.system.harness import DAEMON_UNIT, Service, running, systemctl
from tests.system.scenes import SLEEP, Scene, play, strings, told
from tests.unit.test_hardening_docs import rows

pytestmark = pytest.mark.system

# Tries what is forbidden and what is needed, and writes down the errors; 0 where there was none.
PROBE = """
import ctypes, json, mmap, os, resource, socket, sys
libc = ctypes.CDLL(None, use_errno=True)

def call(function, *arguments):
    ctypes.set_errno(0)
    return ctypes.get_errno() if function(*arguments) == -1 else 0

def attempt(function):
    try:
        function()
    except OSError as error:
        return error.errno
    return 0

directory = sys.argv[1]
made = os.path.join(directory, "made")
os.close(os.open(made, os.O_CREAT | os.O_WRONLY, 0o777))
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
found = {
    "namespace": call(libc.unshare, 0x10000000),
    "packet socket": attempt(lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW)),
    "personality": call(libc.personality, 0x0040000),
    "real time": attempt(lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))),
    "set-user-id file": attempt(lambda: os.chmod(made, 0o4700)),
    "mount": call(libc.mount, b"none", directory.encode(), b"tmpfs", 0, None),
    "ptrace": call(libc.ptrace, 0, 0, 0, 0),
    "core": resource.getrlimit(resource.RLIMIT_CORE)[1],
    "mode": os.stat(made).st_mode & 0o777,
    "no new privileges": int(status["NoNewPrivs"]),
    "filtered": int(status["Seccomp"]),
    "unix socket": attempt(lambda: socket.socket(socket.AF_UNIX).close()),
    "netlink socket": attempt(lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW).close()),
    "internet socket": attempt(lambda: socket.socket(socket.AF_INET).close()),
    "writable code": attempt(lambda: mmap.mmap(-1, 4096, prot=7).close()),
    "affinity": attempt(lambda: os.sched_setaffinity(0, os.sched_getaffinity(0))),
}
with open(os.path.join(directory, "found.new"), "w") as file:
    json.dump(found, file)
os.rename(os.path.join(directory, "found.new"), os.path.join(directory, "found"))
"""
EXPECTED = {
    "namespace": errno.EPERM,
    "packet socket": errno.EAFNOSUPPORT,
    "personality": errno.EPERM,
    "real time": errno.EPERM,
    "set-user-id file": errno.EPERM,
    "mount": errno.EPERM,
    "ptrace": errno.EPERM,
    "core": 0,
    "mode": 0o700,
    "no new privileges": 1,
    "filtered": 2,
    "unix socket": 0,
    "netlink socket": 0,
    "internet socket": 0,
    "writable code": 0,
    "affinity": 0,
}


def test_what_is_forbidden_is_refused_and_what_an_engine_needs_is_not(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> Mapping[str, int]:
        command = (sys.executable, "-c", PROBE.replace("$", "$$"), str(tmp_path))
        await scene.manager.start(scene.name(), {**scene.properties(command), **HARDENING})
        await scene.gone()
        found: Mapping[str, int] = json.loads((tmp_path / "found").read_text())
        return found

    assert play(scenario) == EXPECTED


def test_a_systemd_that_does_not_know_a_directive_starts_the_unit_without_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As one that is built without seccomp; what is needed and unknown is refused all the same."""
    table = {
        **properties.PROPERTIES,
        "RestrictMoonlight": Property("b", optional=True),
        "Moonlight": Property("b"),
    }
    for module in (properties, unit_errors):
        monkeypatch.setattr(module, "PROPERTIES", MappingProxyType(table))
    more: dict[str, PropertyValue] = {"RestrictMoonlight": True, "NoNewPrivileges": True}

    async def scenario(scene: Scene) -> None:
        for part in ("a", "b"):
            assert await scene.manager.start(scene.name(part), {**scene.properties(), **more}) == "done"
        with pytest.raises(Exception, match="Moonlight"):
            await scene.start("c", SLEEP, Moonlight=True)
        await told("stop", scene.name("a"), scene.name("b"))

    with caplog.at_level("WARNING"):
        play(scenario)
    assert sum("does not know RestrictMoonlight" in each.getMessage() for each in caplog.records) == 2


def exposure(unit: str) -> float:
    """What systemd-analyze says of a unit that is loaded."""
    command = ["systemd-analyze", "--user", "--no-pager", "security", unit]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.search(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)
    assert found is not None, done.stderr
    return float(found[1])


def test_the_figures_of_the_page_and_no_secret_in_a_models_unit(tmp_path: Path) -> None:
    """Real engines load under the same directives in every other test that has one."""
    engine = install_fake_engine(tmp_path / "engine")
    made = Service(tmp_path, {"llama_dir": str(engine), "verify_after_load": "off"})
    write_llama(made.models_dir / "tiny" / "tiny.gguf", head_count=2, kv_head_count=1)
    with running(made):
        # As a session that begins later.
        systemctl("set-environment", "LATE_API_TOKEN=xyzzy", "LLLM3090_LATE=xyzzy", "HARMLESS=yes")
        try:
            last = made.load("tiny")[-1]
        finally:
            systemctl("unset-environment", "LATE_API_TOKEN", "LLLM3090_LATE", "HARMLESS")
        assert last["kind"] == "ready", last
        environment = strings(last["instance"]["main_pid"], "environ")
        assert b"HARMLESS=yes" in environment
        assert not any(b"xyzzy" in each for each in environment)
        assert "xyzzy" not in systemctl("show", last["instance"]["unit"])
        measured = {DAEMON_UNIT: exposure(DAEMON_UNIT), "a model's unit": exposure(last["instance"]["unit"])}
        version = made.request("GET", "/v1/status").json()["systemd_version"]
    now = {unit: float(figure) for unit, _, figure, _ in rows("Exposure")}
    if version.startswith("252"):
        assert measured == now
    assert all(figure < 7 for figure in measured.values()), measured
