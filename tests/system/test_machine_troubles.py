"""What happens to machines: a card that reports errors, no files left, models that are gone for a while."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.nvml import FakeCard
from tests.system.harness import PAUSE, UnixConnection, eventually
from tests.system.rig import Rig, rigged

pytestmark = pytest.mark.system
UUID = FakeCard().uuid
STATE_MIB = 48


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """One daemon for all cases, its state on a small disk; each leaves it without models and the card well."""
    place = tmp_path_factory.mktemp("troubles")
    with mounted(place / "state"), rigged(place, {"small": 2, "other": 2}) as made:
        yield made


@contextlib.contextmanager
def mounted(place: Path) -> Iterator[bool]:
    """A small file system of its own; whether it could be mounted, which takes root."""
    place.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={STATE_MIB}m,mode=700", "tmpfs", str(place)]
    done = subprocess.run(command, capture_output=True, check=False)
    try:
        yield done.returncode == 0
    finally:
        if done.returncode == 0:
            subprocess.run(["umount", "--lazy", str(place)], check=True)


def own_disk(place: Path) -> None:
    """Skip where it could not be mounted."""
    if not os.path.ismount(place):
        pytest.skip("a file system can be mounted by root only")


def messages(rig: Rig, kind: str) -> list[str]:
    """What was told of that kind, as a person reads it."""
    return [event["message"] for event in rig.events(kind)]


def told(rig: Rig) -> list[str]:
    """What was told of the card."""
    return messages(rig, "card")


def test_a_card_that_reports_errors(rig: Rig) -> None:
    small = rig.load_ready("small")

    # What one process did: noted, and no reason to distrust the card.
    rig.nvml.report(13)
    eventually(lambda: any("Xid 13" in text for text in told(rig)), what="Xid 13 is told")
    assert rig.gpu().problem is None

    # What concerns the card: nothing more is put on it, and what runs on it is at risk, and goes on.
    rig.nvml.report(79)
    (seen,) = rig.service.request("GET", "/v1/instances").json()["instances"]
    assert "Xid 79: the card has fallen off the bus" in seen["at_risk"]
    assert (seen["main_pid"], seen["state"]) == (small["main_pid"], "ready")
    assert "ready, at risk" in rig.service.ctl("ps").stdout
    problem = rig.gpu().problem
    assert problem is not None and problem["code"] == "card_at_risk"
    status = rig.service.ctl_json("status")
    assert status["card"]["problem"]["details"]["xid"] == 79
    assert status["card"]["available_bytes"] is None
    assert rig.load("other")["code"] == "card_at_risk"
    assert set(rig.states()) == {"small"}

    # The driver loses it, and has it again after a reset.
    rig.nvml.lose(UUID)
    eventually(lambda: rig.gpu().reading is None or None, what="the card is lost")
    rig.nvml.find_again(UUID)
    eventually(lambda: rig.gpu().problem is None or None, what="the card is well again")
    assert rig.service.instances()["small"]["at_risk"] is None
    assert told(rig)[-2:] == [
        "NVIDIA GeForce RTX 3090 can be read again",
        "NVIDIA GeForce RTX 3090 is well again; before, NVIDIA GeForce RTX 3090 reported"
        " Xid 79: the card has fallen off the bus",
    ]

    # An error of the card explains an end that would look like a fault of the engine's own.
    rig.nvml.report(31)
    os.kill(small["main_pid"], signal.SIGABRT)
    rig.until("small", "failed")
    failure = rig.service.instances()["small"]["failure"]
    assert failure["details"]["cause"] == "device_lost"
    assert "the card reported Xid 31" in failure["detail"]
    rig.unload("small")


def test_no_files_left(rig: Rig) -> None:
    """The daemon's limit of open files is what it has open already."""
    small = rig.load_ready("small")
    pid = rig.service.main_pid()
    open_already = UnixConnection(rig.service.control_socket)
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)

    def ask(method: str, target: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        open_already.request(method, target, json.dumps(body) if body else None)
        answer = open_already.getresponse()
        return answer.status, [json.loads(line) for line in answer.read().splitlines()]

    assert ask("GET", "/v1/version")[0] == 200
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, hard))
    try:
        waiting = rig.clients.submit(rig.service.request, "GET", "/v1/version")
        status, (problem,) = ask("POST", "/v1/load", {"model": "other"})
        assert (status, problem["code"]) == (503, "files_exhausted")
        before = cpu_ticks(pid)
        PAUSE.wait(2.0)  # in which a daemon that spins would use up 200
        assert cpu_ticks(pid) - before < 80
        status, answer = ask("GET", "/v1/instances")
        assert (status, answer[0]["instances"][0]["state"]) == (200, "ready")
        assert rig.service.main_pid() == pid
        assert not waiting.done()
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
        open_already.close()
    assert waiting.result(20).status == 200
    shortages = [text for text in messages(rig, "daemon") if text.startswith("no client can be taken")]
    assert shortages == ["no client can be taken until others have left: Too many open files; models go on"]
    assert rig.load_ready("other")["state"] == "ready"
    assert rig.service.instances()["small"]["main_pid"] == small["main_pid"]
    assert rig.service.main_pid() == pid
    for name in ("small", "other"):
        rig.unload(name)


def test_a_full_disk(rig: Rig) -> None:
    """The state file lies on it: nothing can be kept, and everything goes on."""
    state = rig.service.directory / "state"
    own_disk(state)
    filler = state / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
    small = rig.load_ready("small")
    assert rig.service.request("POST", "/v1/models/small/pin", b'{"pinned": true}').status == 200
    status = rig.service.ctl_json("status")
    assert "disk" in status["state_problem"]["detail"]
    eventually(
        lambda: (
            (rig.service.ctl_json("status").get("history_problem") or {}).get("code") == "state_unusable"
        ),
        what="what happens is said not to be recorded",
    )
    rig.kill_daemon()  # the next one begins with the full disk
    assert rig.service.instances()["small"]["main_pid"] == small["main_pid"]
    assert rig.load_ready("other")["state"] == "ready"
    filler.unlink()
    eventually(
        lambda: (
            not any(rig.service.ctl_json("status").get(key) for key in ("state_problem", "history_problem"))
        ),
        within_s=60,
        what="everything can be recorded again",
    )
    for name in ("small", "other"):
        rig.unload(name)
    rig.restart()
    states = [event.get("state") for event in rig.events("state") if event["model"] == "other"]
    assert states[-1] == "gone"
    assert "ready" in states  # it waited in memory, and was written


def cpu_ticks(pid: int) -> int:
    """User and system time of a process, in hundredths of a second (proc_pid_stat(5))."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def model_names(rig: Rig) -> list[str]:
    """Of the models that are listed."""
    return sorted(each["name"] for each in rig.service.request("GET", "/v1/models").json()["models"])


def test_models_that_are_gone_for_a_while(rig: Rig) -> None:
    small = rig.load_ready("small")
    models = rig.service.models_dir
    away = models.with_name("away")
    models.rename(away)
    try:
        answer = rig.service.request("GET", "/v1/models")
        assert answer.json().get("code") == "models_dir_unreadable"
        assert rig.load("other")["code"] == "models_dir_unreadable"
        assert rig.states() == {"small": "ready"}
        rig.kill_daemon()  # which adopts what it cannot find the files of
        assert rig.service.instances()["small"]["main_pid"] == small["main_pid"]
        assert rig.states() == {"small": "ready"}
    finally:
        away.rename(models)
    eventually(lambda: rig.load("other").get("kind") == "ready", what="the models are back")
    with mounted(models) as can_mount:  # another, empty file system in its place
        if can_mount:
            eventually(lambda: model_names(rig) == [], what="the models are gone")
            assert set(rig.states()) == {"small", "other"}
    eventually(lambda: model_names(rig) == ["other", "small"], what="the models are back")
    for name in ("small", "other"):
        rig.unload(name)
