"""A card that is not there: the real nvidia-ml-py on a stand-in driver library, and a stand-in engine that fills it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.engine import install_fake_engine, set_behaviour
from tests.fakes.gguf_files import write_llama
from tests.fakes.nvml import FakeCard, FakeNvml, FakeProcess
from tests.system.harness import DAEMON_UNIT, Service, eventually, model_units, running, systemctl

pytestmark = pytest.mark.system
MIB = 1 << 20
GIB = 1 << 30
DEVICE = "Vulkan0: NVIDIA GeForce RTX 3090 (24576 MiB, 24125 MiB free)"


@dataclass
class Rig:
    """The daemon, its card, and its engine."""

    service: Service
    nvml: FakeNvml

    def behave(self, **behaviour: Any) -> None:
        set_behaviour(
            self.service.directory / "engine",
            **{"devices": (DEVICE,), "nvml_state": str(self.nvml.state), "vram_mib": 1200, **behaviour},
        )

    def card(self) -> dict[str, Any]:
        card: dict[str, Any] = self.service.request("GET", "/v1/status").json()["card"]
        return card


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """A daemon on a stand-in RTX 3090 with a model of about a gibibyte."""
    nvml = FakeNvml(tmp_path / "card")
    install_fake_engine(tmp_path / "engine")
    service = Service(
        tmp_path, {"llama_dir": str(tmp_path / "engine"), "desktop": "inactive"}, nvml.environment
    )
    for name in ("one", "two"):
        write_llama(
            service.models_dir / name / "model.gguf",
            blocks=8,
            embedding_length=2048,
            head_count=16,
            kv_head_count=16,
            feed_forward_length=8192,
        )
    made = Rig(service, nvml)
    made.behave()
    with running(service):
        yield made


def test_the_card_and_its_ledger(rig: Rig) -> None:
    card = rig.card()
    assert card["kind"] == "nvidia"
    assert card["name"] == "NVIDIA GeForce RTX 3090"
    assert card["driver_version"] == "580.95.05"
    assert card["total_bytes"] == 24576 * MIB
    assert card["reserved_by_driver_bytes"] == 451 * MIB
    plan = rig.service.request("POST", "/v1/plan", {"model": "one"}).json()
    budget = {line["name"]: line["bytes"] for line in plan["budget"]}
    assert budget == {"total": 24576 * MIB, "driver": -451 * MIB}
    assert plan["card_bytes"] <= plan["available_bytes"] == sum(budget.values())
    assert {item["place"] for item in plan["items"]} == {"card", "host"}
    assert "999" in plan["argv"]


def test_the_daemon_opens_no_device(rig: Rig) -> None:
    maps = Path(f"/proc/{rig.service.main_pid()}/maps").read_text()
    assert "libnvidia-ml" in maps
    assert "libcuda" not in maps
    assert "vulkan" not in maps


def test_measured_memory_is_compared_with_the_quote(rig: Rig) -> None:
    instance = rig.service.load("one")[-1]["instance"]
    assert instance["measured_bytes"] == 1200 * MIB
    rig.behave(vram_mib=9000)
    greedy = rig.service.load("two", context_tokens=1024)[-1]["instance"]
    assert greedy["measured_bytes"] == 9000 * MIB > greedy["reserved_bytes"]
    # The greater figure is charged from then on.
    assert rig.card()["reserved_by_us_bytes"] == instance["reserved_bytes"] + 9000 * MIB


def test_a_stranger_on_the_card_is_counted(rig: Rig) -> None:
    rig.nvml.add_process(FakeProcess(os.getpid(), 23 * GIB, "g"))
    problem = rig.service.request("POST", "/v1/load", {"model": "one"}).json()
    assert problem["code"] == "insufficient_vram"
    assert problem["details"]["cause"] == "strangers"
    assert model_units() == {}
    rig.nvml.remove_process(os.getpid())
    assert rig.service.load("one")[-1]["kind"] == "ready"


def test_memory_is_released_only_when_the_card_shows_it(rig: Rig) -> None:
    rig.behave(hold_after_exit_s=1.5)
    instance = rig.service.load("one")[-1]["instance"]
    answer = rig.service.request("POST", "/v1/unload", {"model": "one"}).json()
    assert answer["elapsed_s"] >= 1.4
    assert answer["released_bytes"] == max(instance["reserved_bytes"], instance["measured_bytes"])
    assert rig.card()["reserved_by_us_bytes"] == 0


def test_memory_that_does_not_come_back_is_quarantined(rig: Rig) -> None:
    rig.service.configure(release_timeout_s="0.5")
    systemctl("restart", DAEMON_UNIT)
    rig.behave(hold_after_exit_s=600)
    instance = rig.service.load("one")[-1]["instance"]
    rig.service.ctl("unload", "one")
    # What it held is missing still; what it was promised beyond that is not.
    assert rig.card()["available_bytes"] < (24576 - 451) * MIB - GIB
    rig.nvml.remove_process(instance["main_pid"])
    eventually(lambda: rig.card()["available_bytes"] == (24576 - 451) * MIB, what="the memory to be back")


def test_an_engine_that_runs_out_of_memory_says_so(rig: Rig) -> None:
    rig.behave(oom=True)
    last = rig.service.load("one")[-1]
    assert last["kind"] == "failed"
    text = " ".join(last["problem"]["details"]["last_lines"])
    assert "out of memory" in text.lower()
    assert rig.card()["reserved_by_us_bytes"] == 0


def test_a_card_that_cannot_be_read_admits_nothing(rig: Rig) -> None:
    instance = rig.service.load("one")[-1]["instance"]
    rig.nvml.fail("nvmlDeviceGetMemoryInfo_v2", 15)  # GPU is lost
    problem = rig.service.request("POST", "/v1/load", {"model": "two"}).json()
    assert problem["code"] == "card_unreadable"
    card = rig.card()
    assert card["problem"]["code"] == "card_unreadable"
    assert card["available_bytes"] is None
    assert rig.service.instances()["one"]["main_pid"] == instance["main_pid"]
    rig.nvml.recover()
    assert rig.service.load("two")[-1]["kind"] == "ready"


def test_adoption_accounts_for_what_runs(rig: Rig) -> None:
    rig.service.load("one")
    before = rig.card()
    systemctl("kill", "--signal=KILL", "--kill-whom=main", DAEMON_UNIT)
    eventually(lambda: rig.service.control_socket.exists() and rig.service.state("one") == "ready")
    after = rig.card()
    assert after["reserved_by_us_bytes"] == before["reserved_by_us_bytes"]
    assert after["available_bytes"] == before["available_bytes"]


def test_a_build_for_the_processor_is_refused_on_a_card(rig: Rig) -> None:
    rig.behave(devices=())
    (rig.service.directory / "engine" / "llama-server").touch()
    problem = rig.service.request("POST", "/v1/load", {"model": "one"}).json()
    assert problem["code"] == "engine_unusable"


def test_a_broken_driver_is_no_reason_to_use_the_processor(rig: Rig) -> None:
    rig.service.stop()
    rig.nvml.write(FakeCard(), failures={"nvmlInit": 18})  # driver/library version mismatch
    systemctl("start", DAEMON_UNIT, check=False)
    eventually(lambda: "mismatch" in rig.service.journal().lower(), what="the reason in the journal")
    # It is known from before, so it stands there as what it is: a card that cannot be read.
    problem = rig.service.request("POST", "/v1/load", {"model": "one"}).json()
    assert problem["code"] == "card_unreadable" and "mismatch" in problem["detail"]
    rig.service.stop()
    next(rig.service.directory.rglob("cards.json")).unlink()
    systemctl("start", DAEMON_UNIT, check=False)
    # A first start has nothing to go by.
    assert rig.service.main_pid() == 0 or rig.service.ctl("status", check=False).returncode != 0
