"""The systemd manager starts, stops and describes units of a real ``systemd --user``."""

import asyncio
import os
import signal
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from pathlib import Path

import pytest

from lllm3090d.bus.messages import Target
from lllm3090d.bus.properties import INFINITY, PROPERTIES, PropertyValue
from lllm3090d.bus.systemd import explain_exit
from lllm3090d.errors import ErrorCode, LlmError
from tests.system.scenes import SLEEP, Scene, play, proc, strings, told

pytestmark = pytest.mark.system
# Ignores SIGTERM, and says so by opening the pipe it is given.
STUBBORN = """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(sys.argv[1], "w").close()
time.sleep(300)
"""


# --- starting and stopping ---


def test_a_hundred_starts_and_stops_lose_no_job() -> None:
    async def scenario(scene: Scene) -> None:
        for number in range(100):
            assert (
                await scene.manager.start(scene.name(str(number)), scene.properties(), timeout_s=20)
                == "done"
            )
            left = await scene.manager.stop(scene.name(str(number)), timeout_s=20)
            assert left is None or left.is_gone
        for number in range(100):
            last = await scene.gone(str(number))
            assert last is not None and last.exec_main_status == signal.SIGTERM

    play(scenario)


def test_a_started_unit_is_described_in_full() -> None:
    async def scenario(scene: Scene) -> None:
        assert await scene.start(Environment=["LLLM3090_RUN=1"], WorkingDirectory="/") == "done"
        status = await scene.status()
        assert (status.load_state, status.active_state, status.sub_state) == ("loaded", "active", "running")
        assert (status.is_active, status.transient, status.job_pending) == (True, True, False)
        assert (status.description, status.argv) == ("test of lllm3090d", SLEEP)
        assert status.environment == ("LLLM3090_RUN=1",)
        assert proc(status.main_pid, "comm") == b"sleep\n"
        assert len(bytes.fromhex(status.invocation_id)) == 16
        assert status.control_group.endswith(f"/lllm3090.slice/{scene.name()}")
        cgroups = proc(status.main_pid, "cgroup").decode().splitlines()
        assert any(line.endswith(status.control_group) for line in cgroups)
        assert 0 < status.exec_main_start_monotonic_s <= time.clock_gettime(time.CLOCK_MONOTONIC)
        assert explain_exit(status) == "has not ended"
        (listed,) = await scene.manager.list()
        assert listed.invocation_id == status.invocation_id

    play(scenario)


def test_a_missing_binary_fails_the_job_and_is_explained() -> None:
    async def scenario(scene: Scene) -> None:
        assert await scene.start(argv=("/nonexistent/llama-server",)) == "failed"
        status = await scene.failed()
        assert explain_exit(status) == "never ran: the file could not be executed (203/EXEC)"
        assert (await scene.status()).is_failed
        await scene.manager.reset_failed(scene.name())
        await scene.gone()
        assert await scene.manager.status(scene.name()) is None
        await scene.manager.reset_failed(scene.name())  # nothing there any more is no error

    play(scenario)


def test_a_crash_at_once_is_seen_with_its_status() -> None:
    async def scenario(scene: Scene) -> None:
        assert await scene.start(argv=("/bin/sh", "-c", "exit 7")) in {"done", "failed"}
        assert explain_exit(await scene.failed()) == "exited with status 7"

    play(scenario)


def test_a_crash_by_signal_is_explained() -> None:
    async def scenario(scene: Scene) -> None:
        await scene.start(LimitCORE=0)
        await scene.manager.kill(scene.name(), signal.SIGSEGV, whom="main")
        assert explain_exit(await scene.failed()) == "was killed by SIGSEGV"
        await scene.manager.kill(scene.name(), signal.SIGKILL)  # nothing left to kill is no error
        await scene.manager.kill(scene.name("never"), signal.SIGKILL)

    play(scenario)


def test_a_good_end_is_told_although_the_unit_is_unloaded_at_once() -> None:
    async def scenario(scene: Scene) -> None:
        assert await scene.start(argv=("/bin/true",)) == "done"
        last = await scene.gone()
        assert last is not None
        assert (last.active_state, last.result, last.exec_main_status) == ("inactive", "success", 0)
        assert last.argv == ("/bin/true",)
        assert explain_exit(last) == "exited with status 0"
        assert await scene.manager.status(scene.name()) is None
        assert await scene.manager.stop(scene.name(), timeout_s=5) is None

    play(scenario)


def test_who_ignores_sigterm_is_killed_and_seen_to_have_failed(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await start_stubborn(scene, tmp_path, stop_after_us=300_000)
        left = await scene.manager.stop(scene.name(), timeout_s=20)
        assert left is not None and left.is_failed
        assert (left.result, left.exec_main_status) == ("timeout", signal.SIGKILL)
        assert explain_exit(left) == "ran into a time limit of systemd (killed by SIGKILL)"

    play(scenario)


def test_a_stop_is_waited_for_no_longer_than_asked(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await start_stubborn(scene, tmp_path, stop_after_us=60_000_000)
        with pytest.raises(LlmError, match="was not stopped: it is deactivating") as caught:
            await scene.manager.stop(scene.name(), timeout_s=0.2)
        assert caught.value.code is ErrorCode.STOP_FAILED
        assert caught.value.details["job_result"] == "timeout"
        await scene.manager.kill(scene.name(), signal.SIGKILL)
        assert explain_exit(await scene.failed()) == "was killed by SIGKILL"

    play(scenario)


async def start_stubborn(scene: Scene, tmp_path: Path, stop_after_us: int) -> None:
    """A unit that ignores SIGTERM by now."""
    deaf = tmp_path / "deaf"
    os.mkfifo(deaf)
    argv = (sys.executable, "-c", STUBBORN, str(deaf))
    assert await scene.start(argv=argv, TimeoutStopUSec=stop_after_us) == "done"
    assert await asyncio.to_thread(deaf.read_bytes) == b""  # open() returns when the unit opens it too


# --- what is refused ---


def test_a_name_in_use_is_refused_and_the_unit_untouched() -> None:
    async def scenario(scene: Scene) -> None:
        await scene.start()
        before = await scene.status()
        with pytest.raises(LlmError, match="already loaded") as caught:
            await scene.start()
        assert caught.value.code is ErrorCode.UNIT_REFUSED
        assert caught.value.details["dbus_error"] == "org.freedesktop.systemd1.UnitExists"
        assert caught.value.hint is not None and f"reset-failed {scene.name()}" in caught.value.hint
        assert (await scene.status()).invocation_id == before.invocation_id

    play(scenario)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"Restart": "never"}, "Invalid Restart setting"),
        ({"Slice": "lllm3090"}, "Invalid unit name"),
        ({"ExecStart": []}, "bad unit file setting"),
        ({"Environment": ["no equals sign"]}, "Invalid environment"),
    ],
)
def test_a_refusal_says_what_systemd_said_and_leaves_nothing(
    wrong: dict[str, PropertyValue], message: str
) -> None:
    async def scenario(scene: Scene) -> None:
        with pytest.raises(LlmError, match=message) as caught:
            await scene.manager.start(scene.name(), {**scene.properties(), **wrong})
        assert caught.value.code is ErrorCode.UNIT_REFUSED
        assert caught.value.hint
        assert await scene.manager.status(scene.name()) is None
        assert await scene.start() == "done"  # the name is free

    play(scenario)


def test_wrong_properties_never_reach_systemd() -> None:
    async def scenario(scene: Scene) -> None:
        with pytest.raises(ValueError, match="RestartSec is not in the table"):
            await scene.start(RestartSec=1)
        with pytest.raises(TypeError, match="MemoryMax"):
            await scene.start(MemoryMax="1G")
        assert scene.events == []

    play(scenario)


# --- the table, against this systemd ---

SAMPLES: Mapping[str, PropertyValue] = {
    "Documentation": ["https://example.org/"],
    "SourcePath": "/models/model.gguf",
    "CollectMode": "inactive",
    "Restart": "no",
    "TimeoutStartUSec": INFINITY,
    "TimeoutStopUSec": 15_000_000,
    "SuccessExitStatus": ((143,), ()),
    "OOMPolicy": "stop",
    "Environment": ["A=1"],
    "UnsetEnvironment": ["LLAMA_ARG_MODEL"],
    "WorkingDirectory": "/",
    "UMask": 0o077,
    "OOMScoreAdjust": 500,
    "Nice": 5,
    "StandardInput": "null",
    "StandardOutput": "journal",
    "StandardError": "journal",
    "StandardOutputFileToAppend": "/dev/null",
    "StandardErrorFileToAppend": "/dev/null",
    "SyslogIdentifier": "lllm3090-test",
    "LogExtraFields": [b"LLLM3090_RUN=1"],
    "LimitCORE": 0,
    "LimitNOFILE": 1024,
    "LimitMEMLOCK": 1 << 16,
    "NoNewPrivileges": True,
    "LockPersonality": True,
    "RestrictRealtime": True,
    "RestrictSUIDSGID": True,
    "RestrictNamespaces": 0,
    "RestrictAddressFamilies": (True, ["AF_UNIX", "AF_INET", "AF_INET6", "AF_NETLINK"]),
    "SystemCallArchitectures": ["native"],
    "SystemCallFilter": (True, ["@system-service"]),
    "SystemCallErrorNumber": 1,
    "MemoryAccounting": True,
    "MemoryHigh": INFINITY,
    "MemoryMax": 1 << 30,
    "MemorySwapMax": INFINITY,
    "MemoryZSwapMax": INFINITY,
    "KillMode": "mixed",
    "KillSignal": signal.SIGTERM,
    "SendSIGKILL": True,
}


def test_every_property_of_the_table_is_accepted_together() -> None:
    async def scenario(scene: Scene) -> None:
        sent = {**scene.properties(), **SAMPLES}
        assert sent.keys() == PROPERTIES.keys()
        assert await scene.manager.start(scene.name(), sent) == "done"
        assert await scene.manager.stop(scene.name(), timeout_s=20) is None

    play(scenario)


def test_the_table_agrees_with_what_systemd_says_of_itself() -> None:
    async def scenario(scene: Scene) -> None:
        await scene.start()
        unit = Target(
            "org.freedesktop.systemd1",
            "/org/freedesktop/systemd1/unit/" + scene.name().replace("-", "_2d").replace(".", "_2e"),
            "org.freedesktop.DBus.Introspectable",
        )
        (xml,) = await scene.bus.method(unit, "Introspect")
        getters = {
            str(row.get("name")): str(row.get("type"))
            for interface in ET.fromstring(xml).iter("interface")  # noqa: S314 - systemd wrote it
            if interface.get("name") in {"org.freedesktop.systemd1.Unit", "org.freedesktop.systemd1.Service"}
            for row in interface.iter("property")
        }
        # The getter of ExecStart tells times and statuses besides.
        getters["ExecStart"] = getters["ExecStart"].replace("ttttuii", "")
        known = {
            name: row.signature
            for name, row in PROPERTIES.items()
            if row.since <= scene.manager.version_number
        }
        # What only a setter knows: the getters of standard streams tell it in words.
        known = {name: row for name, row in known.items() if not name.endswith("FileToAppend")}
        assert {name: getters.get(name) for name in known} == known

    play(scenario)


NASTY = (
    "with space",
    "'single'",
    '"double"',
    "back\\slash",
    "tab\tnewline\n",
    "naïve 模型 🦙",
    "%h %% 100%",
    '{"json": [1, 2]}',
    "-@:!+",
    "*~?",
    "",
    "=",
)


def test_arguments_arrive_byte_for_byte_and_survive_a_reload() -> None:
    async def scenario(scene: Scene) -> None:
        argv = (sys.executable, "-c", "import time\ntime.sleep(300)", *NASTY)
        assert await scene.start(argv=argv) == "done"
        status = await scene.status()
        assert status.argv == argv
        assert strings(status.main_pid, "cmdline") == [item.encode() for item in argv]
        await told("daemon-reload")
        assert (await scene.status()).argv == argv

    play(scenario)


def test_the_environment_arrives_byte_for_byte_and_survives_a_reload() -> None:
    async def scenario(scene: Scene) -> None:
        values = (*NASTY, "$HOME ${HOME} $$", "a; b & c | d", "`id` $(id)")
        environment = tuple(f"LLLM3090_TEST_{number}={value}" for number, value in enumerate(values))
        assert await scene.start(Environment=environment, UnsetEnvironment=["LANG"]) == "done"
        status = await scene.status()
        assert status.environment == environment
        got = strings(status.main_pid, "environ")
        assert [item for item in got if item.startswith(b"LLLM3090_TEST_")] == [
            item.encode() for item in environment
        ]
        assert not [item for item in got if item.startswith(b"LANG=")]
        await told("daemon-reload")
        assert (await scene.status()).environment == environment

    play(scenario)
