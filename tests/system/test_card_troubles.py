"""Cards that are lost and come back, that do not tell who holds what, or are not there; with and without a desktop."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.nvml import DRIVER_NOT_LOADED, NOT_SUPPORTED, FakeCard, FakeProcess
from tests.system.harness import eventually, model_units
from tests.system.rig import MIB, ROOM_MIB, Rig, rigged
from tests.system.rounds import RIVALS

pytestmark = pytest.mark.system

MODELS = {**RIVALS, "small": 1.0}
LISTS = ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetGraphicsRunningProcesses_v3")
DESKTOP_MIB = 2400
UUID = FakeCard().uuid


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with rigged(tmp_path, MODELS) as made:
        yield made


def test_a_card_falls_off_the_bus_and_comes_back(rig: Rig) -> None:
    small = rig.load_ready("small")
    rig.nvml.lose(UUID)
    assert rig.load("alpha")["code"] == "card_unreadable"
    gpu = rig.gpu()
    assert gpu.problem is not None and gpu.problem["code"] == "card_unreadable"
    assert (gpu.reading, gpu.grantable_bytes) == (None, None)
    assert [each.model for each in gpu.reservations] == ["small"]  # what was promised is not forgotten
    assert rig.service.instances()["small"]["main_pid"] == small["main_pid"]
    rig.nvml.find_again(UUID)
    eventually(lambda: rig.gpu().problem is None, what="the card is read again")
    rig.load_ready("alpha")
    rig.check_books()


def test_a_daemon_that_starts_while_its_card_is_lost(rig: Rig) -> None:
    """It comes up, keeps what runs and what is wanted, admits nothing anywhere, and takes the card when it is back."""
    rig.restart(restart_failed="true")
    small, _ = rig.load_ready("small"), rig.load_ready("alpha")
    rig.service.stop()
    rig.nvml.fail("nvmlInit", DRIVER_NOT_LOADED)
    os.kill(small["main_pid"], signal.SIGSEGV)
    rig.service.start()
    gpu = rig.gpu()
    assert (gpu.name, gpu.uuid) == (FakeCard().name, UUID)
    assert gpu.problem is not None and gpu.problem["code"] == "card_unreadable"
    assert gpu.grantable_bytes is None
    assert rig.load("beta")["code"] == "card_unreadable"
    assert rig.states()["alpha"] == "ready"
    assert "alpha" in {each.model for each in gpu.reservations}
    rig.nvml.recover()
    eventually(lambda: rig.gpu().problem is None, what="the card is read again")
    eventually(lambda: rig.states().get("small") == "ready", what="what was wanted is loaded again")
    rig.unload("small")
    rig.unload("alpha")
    assert rig.gpu().grantable_bytes == ROOM_MIB * MIB
    rig.load_ready("beta")
    rig.check_books()


def test_a_model_unloaded_from_a_lost_card_stays_charged_until_it_is_back(rig: Rig) -> None:
    rig.restart(release_timeout_s="0.3")
    rig.load_ready("small")
    rig.nvml.lose(UUID)
    rig.unload("small")
    assert model_units() == {}
    assert rig.gpu().quarantined_bytes > 0  # nobody can tell that it came back
    rig.nvml.find_again(UUID)
    eventually(lambda: rig.gpu().problem is None and rig.gpu().quarantined_bytes == 0)
    assert rig.check_books().grantable_bytes == ROOM_MIB * MIB


def test_without_numbers_of_processes(rig: Rig) -> None:
    for function in LISTS:
        rig.nvml.fail(function, NOT_SUPPORTED)
    price = rig.price("small", "alpha", "beta")
    rig.load_ready("small")
    gpu = rig.gpu()
    assert not gpu.attributed
    assert gpu.grantable_bytes is not None
    assert gpu.grantable_bytes <= (ROOM_MIB - price["small"] + 1) * MIB
    rig.load_ready("alpha")
    rig.load_ready("beta")  # alpha goes: its memory is seen to come back in the sum
    assert rig.states() == {"small": "ready", "beta": "ready"}
    for name in ("small", "beta"):
        rig.unload(name)
    assert rig.gpu().grantable_bytes == ROOM_MIB * MIB


def test_a_desktop_is_counted_once(rig: Rig) -> None:
    assert rig.gpu().grantable_bytes == ROOM_MIB * MIB
    rig.restart(desktop="active")
    assert rig.gpu().grantable_bytes == (ROOM_MIB - DESKTOP_MIB) * MIB
    rig.nvml.add_process(FakeProcess(os.getpid(), 900 * MIB, "g"))
    assert rig.gpu().grantable_bytes == (ROOM_MIB - DESKTOP_MIB) * MIB  # it may be the desktop's
    rig.nvml.add_process(FakeProcess(os.getppid(), 2000 * MIB, "g"))
    assert rig.gpu().grantable_bytes == (ROOM_MIB - 2900) * MIB  # the greater of both, never their sum
    rig.restart(desktop="inactive")
    assert rig.gpu().grantable_bytes == (ROOM_MIB - 2900) * MIB
    rig.nvml.write(FakeCard(reserved_bytes=0))


def test_without_nvml_host_memory_takes_the_place_of_the_card(tmp_path: Path) -> None:
    with rigged(tmp_path, {}, environment={"LD_LIBRARY_PATH": str(tmp_path)}) as rig:
        rig.behave(devices=(), nvml_state=None)
        rig.add_model("tiny", 0.3)
        gpu = rig.gpu()
        assert (gpu.kind, gpu.profile) == ("cpu", "no-gpu")
        instance = rig.load_ready("tiny", context_tokens=1024)
        (held,) = rig.gpu().reservations
        assert (held.where, held.run) == ("host", instance["run"])
        rig.unload("tiny")
        assert rig.gpu().reservations == ()
