"""Two users of one card: what another user's processes and models are shown as, by a real daemon and real processes."""

from __future__ import annotations

import contextlib
import os
import pwd
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from lllm3090d.bus.service_contract import JOB
from lllm3090d.serving.unit_spec import SLICE
from tests.fakes.nvml import FakeProcess
from tests.system.dbus_scene import Client
from tests.system.harness import BIN, Service
from tests.system.rig import GIB, Rig, rigged

pytestmark = pytest.mark.system

OTHER, THIRD = "nobody", "daemon"


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    if os.geteuid() != 0:
        pytest.skip("needs root, to run processes of two other users")
    with rigged(tmp_path, {"alpha": 1.0}) as made:
        made.add_model("big", 15.0)
        yield made


def hierarchies() -> list[Path]:
    """Where the control groups are that systemd, and so the daemon, goes by."""
    names = {"": ("", "unified"), "name=systemd": ("systemd",)}
    told = [line.split(":", 2)[1] for line in Path("/proc/self/cgroup").read_text().splitlines()]
    roots = [Path("/sys/fs/cgroup", name) for each in told for name in names.get(each, ())]
    return [root for root in roots if (root / "cgroup.procs").exists()]


@contextlib.contextmanager
def holder(user: str, group: str | None = None) -> Iterator[int]:
    """A process of a user, in a control group as a user manager of theirs would make it."""
    made: list[Path] = []
    with subprocess.Popen(["sleep", "infinity"], user=user) as process:
        try:
            for root in hierarchies() if group else ():
                place = root
                for part in (group or "").split("/"):
                    place = place / part
                    if not place.exists():
                        place.mkdir()
                        made.append(place)
                (place / "cgroup.procs").write_text(str(process.pid))
            yield process.pid
        finally:
            process.kill()
            process.wait()
            for place in reversed(made):
                place.rmdir()


def page(service: Service, *arguments: str) -> str:
    """What the client shows."""
    command = [str(BIN / "lllm3090ctl"), "--socket", str(service.control_socket), *arguments]
    environment = {**os.environ, "COLUMNS": "200"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=environment)
    return done.stdout + done.stderr


def test_another_users_model_is_theirs_by_name_and_nobody_is_told_to_end_it(rig: Rig) -> None:
    ours = rig.load_ready("alpha")
    before = rig.check_books()
    uid = pwd.getpwnam(OTHER).pw_uid
    # The very unit that our model runs in, but of another user's manager.
    group = f"user.slice/user-{uid}.slice/user@{uid}.service/{SLICE}/{ours['unit']}"
    with subprocess.Popen(["true"]) as ended:
        pass
    with holder(OTHER, group) as model, holder(THIRD) as program:
        rig.nvml.add_process(FakeProcess(model, 8 * GIB))
        rig.nvml.add_process(FakeProcess(program, 3 * GIB))
        rig.nvml.add_process(FakeProcess(ended.pid, GIB))
        gpu = rig.check_books()
        assert gpu.charged_bytes == before.charged_bytes
        assert gpu.reservations[0].held_bytes == before.reservations[0].held_bytes
        assert gpu.foreign_bytes == 12 * GIB
        assert [(each.pid, each.user, each.model, each.used_bytes) for each in gpu.processes] == [
            (model, OTHER, "alpha", 8 * GIB),
            (program, THIRD, None, 3 * GIB),
            (ended.pid, None, None, GIB),
        ]
        assert [each.name for each in gpu.processes] == ["sleep", "sleep", ""]
        assert [each.unseen is None for each in gpu.processes] == [True, True, False]
        shown = page(rig.service, "gpu")
        for words in (
            f"the model alpha of {OTHER}",
            f"another program of {THIRD}",
            "of an unknown owner: it has",
        ):
            assert words in shown, shown

        refused = page(rig.service, "load", "big")
        assert f"the model alpha of {OTHER} (pid {model}) holds 8,192.0 MiB" in refused, refused
        assert f"Ask {OTHER} to unload the model alpha (8.0 GiB, pid {model})" in refused, refused
        assert "kill" not in refused
        told = rig.load("big")["details"]["strangers"]
        assert [(each["user"], each["model"]) for each in told] == [(OTHER, "alpha"), (THIRD, ""), ("", "")]

        client = Client()
        others = [each[1:] for each in client.get("Others")]
        assert others == [
            (model, "sleep", OTHER, "alpha", 8 * GIB),
            (program, "sleep", THIRD, "", 3 * GIB),
            (ended.pid, "", "?", "", GIB),
        ]
        _, interface, name, (_, message) = client.end_of(client.call("Load", "sa{sv}", "big", {}))
        assert (interface, name) == (JOB, "Failed")
        assert f"Ask {OTHER} to unload the model alpha" in message
        client.close()
        for pid in (model, program, ended.pid):
            rig.nvml.remove_process(pid)
    assert rig.unload("alpha")["released_bytes"] > 0
    assert rig.gpu().charged_bytes == 0
