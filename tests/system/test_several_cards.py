"""Cards that are not there, and a real daemon: where models land, how they are shared out, what is lost with one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.engine import install_fake_engine, set_behaviour
from tests.fakes.gguf_files import write_llama
from tests.fakes.nvml import FakeCard, FakeNvml
from tests.fakes.vulkan import FakeVulkan, FakeVulkanDevice
from tests.system.harness import DAEMON_UNIT, Service, eventually, model_units, running, systemctl
from tests.system.scenes import strings

pytestmark = pytest.mark.system
MIB = 1 << 20
NAME = "NVIDIA GeForce RTX 2060"
FIRST, SECOND, THIRD = (
    f"GPU-{number}0000000-1111-2222-3333-444444444444" for number in (1, 2, 3)
)  # the order of their numbers for --gpu
TOTALS = {FIRST: 6144 * MIB, SECOND: 5120 * MIB, THIRD: 4096 * MIB}
CONTEXT = {"context_tokens": 4096}
SHAPE: dict[str, Any] = {
    "embedding_length": 2048,
    "head_count": 16,
    "kv_head_count": 4,
    "feed_forward_length": 8192,
}


@dataclass
class Rig:
    """The daemon, its cards, and its engine."""

    service: Service
    nvml: FakeNvml

    def behave(self, backend: str = "CUDA", **behaviour: Any) -> None:
        cards = range(len(self.totals()))
        devices = tuple(f"{backend}{index}: {NAME} (6144 MiB, 5800 MiB free)" for index in cards)
        set_behaviour(
            self.service.directory / "engine",
            **{"devices": devices, "nvml_state": str(self.nvml.state), "vram_mib": 1000, **behaviour},
        )

    def totals(self) -> dict[str, int]:
        return {
            line.split()[1]: 0 for line in self.nvml.state.read_text().splitlines() if "uuid" in line.split()
        }

    def load(self, model: str, **options: Any) -> dict[str, Any]:
        last = self.service.load(model, **CONTEXT, **options)[-1]
        assert last.get("kind") == "ready", last
        instance: dict[str, Any] = last["instance"]
        return instance

    def promised(self) -> dict[str, dict[str, dict[str, Any]]]:
        """What each model was promised of each card, by UUID and name."""
        cards = self.service.request("GET", "/v1/gpus").json()["gpus"]
        return {
            card["uuid"]: {
                each["model"]: each for each in card["reservations"] if each["where"] == card["uuid"]
            }
            for card in cards
        }


def _rig(directory: Path, *cards: str, totals: Mapping[str, int] = TOTALS) -> Rig:
    nvml = FakeNvml(directory / "card")
    nvml.write(
        *(
            FakeCard(NAME, uuid, f"00000000:0{number}:00", totals[uuid], 256 * MIB, capability="7.5")
            for number, uuid in enumerate(cards, 1)
        )
    )
    install_fake_engine(directory / "engine")
    service = Service(
        directory, {"llama_dir": str(directory / "engine"), "desktop": "inactive"}, nvml.environment
    )
    for name, blocks in (("one", 8), ("two", 8), ("large", 120)):
        write_llama(service.models_dir / name / "model.gguf", blocks=blocks, **SHAPE)
    made = Rig(service, nvml)
    made.behave()
    return made


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """Two cards; in the driver's list the smaller one comes first."""
    made = _rig(tmp_path, SECOND, FIRST)
    with running(made.service):
        yield made


@pytest.fixture
def twins(tmp_path: Path) -> Iterator[Rig]:
    """Two equal cards."""
    made = _rig(tmp_path, SECOND, FIRST, totals=dict.fromkeys((FIRST, SECOND), TOTALS[FIRST]))
    with running(made.service):
        yield made


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Rig]:
    """Three cards."""
    made = _rig(tmp_path, THIRD, FIRST, SECOND)
    with running(made.service):
        yield made


def _environment(pid: int) -> dict[str, str]:
    return dict(item.decode().split("=", 1) for item in strings(pid, "environ"))


def _option(pid: int, *names: str) -> str | None:
    line = [item.decode() for item in strings(pid, "cmdline")]
    return next((line[line.index(name) + 1] for name in names if name in line), None)


def test_two_models_land_on_two_cards(rig: Rig) -> None:
    rig.behave(vram_mib=2500)
    one = rig.load("one", batch_tokens=2048, micro_batch_tokens=2048)
    two = rig.load("two", gpu="0")
    assert set(rig.promised()[SECOND]) == {"one"}  # the tightest fit
    assert set(rig.promised()[FIRST]) == {"two"}
    for instance, uuid in ((one, SECOND), (two, FIRST)):
        environment = _environment(instance["main_pid"])
        assert environment["CUDA_VISIBLE_DEVICES"] == uuid
        assert environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
        assert _option(instance["main_pid"], "--device", "-dev") == "CUDA0"
        assert _option(instance["main_pid"], "--tensor-split", "-ts") is None
        assert rig.promised()[uuid][instance["name"]]["measured_bytes"] == 2500 * MIB


def test_a_model_too_large_for_one_card_is_shared_out(rig: Rig) -> None:
    rig.behave(vram_mib=8000)
    pid = rig.load("large")["main_pid"]
    environment = _environment(pid)
    assert environment["CUDA_VISIBLE_DEVICES"] == f"{SECOND},{FIRST}"  # the main card last
    assert _option(pid, "--device", "-dev") == "CUDA0,CUDA1"
    assert _option(pid, "--split-mode", "-sm") == "layer"
    assert _option(pid, "--main-gpu", "-mg") == "1"
    shares = [int(share) for share in (_option(pid, "--tensor-split", "-ts") or "").split(",")]
    assert sum(shares) == 121  # with the output
    assert 0 < shares[0] < shares[1]
    promised = rig.promised()
    for uuid, share in zip((SECOND, FIRST), shares, strict=True):
        its = promised[uuid]["large"]
        assert 0 < its["reserved_bytes"] < TOTALS[uuid] - 256 * MIB
        assert its["measured_bytes"] == 8000 * MIB * share // 121
        assert {"weights", "kv cache", "compute", "runtime"} <= {item["name"] for item in its["items"]}


def test_a_third_card_stays_out_of_it(three: Rig) -> None:
    three.behave(vram_mib=8000)
    pid = three.load("large")["main_pid"]
    assert _environment(pid)["CUDA_VISIBLE_DEVICES"] == f"{SECOND},{FIRST}"
    assert not three.promised()[THIRD]
    three.behave()
    assert three.load("one")["main_pid"]
    assert set(three.promised()[THIRD]) == {"one"}


def test_a_card_can_be_chosen(rig: Rig) -> None:
    by_address = rig.load("one", gpu="0000:02:00.0")
    assert _environment(by_address["main_pid"])["CUDA_VISIBLE_DEVICES"] == FIRST
    by_uuid = rig.load("two", gpu=FIRST)
    assert _environment(by_uuid["main_pid"])["CUDA_VISIBLE_DEVICES"] == FIRST
    assert not rig.promised()[SECOND]
    problem = rig.service.request("POST", "/v1/load", {"model": "large", "gpu": "7"}).json()
    assert problem["code"] == "invalid_request"
    refused = rig.service.request(
        "POST", "/v1/load", {"model": "large", "gpu": "1", "offload": "resident", **CONTEXT}
    )
    assert refused.json()["code"] == "insufficient_vram"


def test_a_split_is_adopted_with_its_shares(rig: Rig) -> None:
    rig.behave(vram_mib=8000)
    pid = rig.load("large")["main_pid"]
    before = rig.promised()
    systemctl("kill", "--signal=KILL", "--kill-whom=main", DAEMON_UNIT)
    eventually(lambda: rig.service.control_socket.exists() and rig.service.state("large") == "ready")
    after = rig.promised()
    for uuid in (FIRST, SECOND):
        for figure in ("reserved_bytes", "measured_bytes", "charged_bytes"):
            assert after[uuid]["large"][figure] == before[uuid]["large"][figure], figure
    assert rig.service.instances()["large"]["main_pid"] == pid
    rig.service.ctl("unload", "large")
    assert rig.promised() == {FIRST: {}, SECOND: {}}


def test_a_lost_card_does_not_stop_the_other_one(rig: Rig) -> None:
    on_the_small_one = rig.load("one")
    assert set(rig.promised()[SECOND]) == {"one"}
    rig.nvml.lose(SECOND)
    two = rig.load("two")
    assert _environment(two["main_pid"])["CUDA_VISIBLE_DEVICES"] == FIRST
    assert rig.service.instances()["one"]["main_pid"] == on_the_small_one["main_pid"]
    problem = rig.service.request("POST", "/v1/load", {"model": "large", "gpu": "1", **CONTEXT}).json()
    assert problem["code"] == "card_unreadable"


def test_a_daemon_that_starts_while_one_of_its_cards_is_lost(rig: Rig) -> None:
    """Adopted units keep their charge on it, nothing is put there, the other one works; it is taken when it is back."""
    pid, before = rig.load("one")["main_pid"], rig.promised()
    assert set(before[SECOND]) == {"one"}
    rig.service.stop()
    rig.nvml.lose(SECOND)
    rig.service.start()
    after = rig.promised()
    assert set(after) == {FIRST, SECOND} and not after[FIRST]
    assert after[SECOND]["one"]["charged_bytes"] == before[SECOND]["one"]["charged_bytes"]
    assert rig.service.instances()["one"]["main_pid"] == pid
    status = rig.service.ctl_json("status")
    assert status["card"]["uuid"] == FIRST and status["card"]["problem"] is None
    assert status["cards_problem"]["code"] == "card_unreadable"
    assert "which was managed before" in status["cards_problem"]["detail"]
    problem = rig.service.request("POST", "/v1/load", {"model": "two", "gpu": SECOND, **CONTEXT}).json()
    assert problem["code"] == "card_unreadable" and "next boot" in problem["hint"]
    assert _environment(rig.load("two")["main_pid"])["CUDA_VISIBLE_DEVICES"] == FIRST
    rig.nvml.find_again(SECOND)
    eventually(
        lambda: rig.service.ctl_json("status")["cards_problem"] is None, what="the card is read again"
    )
    rig.service.ctl("unload", "one")
    rig.service.ctl("unload", "two")
    assert rig.promised() == {FIRST: {}, SECOND: {}}


def test_equal_cards_of_a_vulkan_build_by_address(twins: Rig) -> None:
    """Without a Vulkan loader nothing is guessed; with one both are used, each by its index and alone."""
    twins.behave("Vulkan", vulkan_cards=(1, 0))
    problem = twins.service.request("POST", "/v1/load", {"model": "one", **CONTEXT}).json()
    assert problem["code"] == "engine_unusable"
    assert "which of the engine's devices" in problem["detail"]
    assert "libvulkan.so.1" in problem["detail"]
    assert "CUDA" in problem["hint"]
    assert model_units() == {}

    # The loader's order is not that of NVIDIA's driver.
    heaps = ((TOTALS[FIRST], 1),)
    devices = (FakeVulkanDevice(NAME, f"0000:0{bus}:00.0", heaps=heaps) for bus in (2, 1))
    FakeVulkan(twins.nvml.library_dir, *devices)
    (twins.service.directory / "engine" / "llama-server").touch()
    for model, index, uuid in (("one", "1", SECOND), ("two", "0", FIRST)):
        pid = twins.load(model, gpu=uuid)["main_pid"]
        assert _environment(pid)["GGML_VK_VISIBLE_DEVICES"] == index
        assert _option(pid, "--device", "-dev") == "Vulkan0"
        promised = twins.promised()[uuid]
        assert set(promised) == {model}
        assert promised[model]["measured_bytes"] == 1000 * MIB  # the engine is on that card
    for model in ("one", "two"):
        twins.service.ctl("unload", model)
    twins.behave("Vulkan", vulkan_cards=(1, 0), vram_mib=8000)
    pid = twins.load("large")["main_pid"]
    assert _option(pid, "--device", "-dev") == "Vulkan0,Vulkan1"
    shares = [int(share) for share in (_option(pid, "--tensor-split", "-ts") or "").split(",")]
    at = {"0": FIRST, "1": SECOND}
    order = [at[index] for index in _environment(pid)["GGML_VK_VISIBLE_DEVICES"].split(",")]
    for uuid, share in zip(order, shares, strict=True):
        assert twins.promised()[uuid]["large"]["measured_bytes"] == 8000 * MIB * share // sum(shares)


def test_a_plan_says_which_cards(rig: Rig) -> None:
    plan = rig.service.request("POST", "/v1/plan", {"model": "large", **CONTEXT}).json()
    assert [card["uuid"] for card in plan["cards"]] == [SECOND, FIRST]
    assert sum(card["layers"] for card in plan["cards"]) == 121
    assert sum(card["bytes"] for card in plan["cards"]) == plan["card_bytes"]
    assert f"CUDA_VISIBLE_DEVICES={SECOND},{FIRST}" in plan["environment"]
    alone = rig.service.request("POST", "/v1/plan", {"model": "one", **CONTEXT}).json()
    assert [card["uuid"] for card in alone["cards"]] == [SECOND]
    shown = rig.service.ctl("plan", "large", "--context", "4096").stdout
    assert "GPU1" in shown and "CUDA_VISIBLE_DEVICES" in shown
    # Loaded, it has the same plan: what it holds of both cards counts as given back.
    rig.behave(vram_mib=8000)
    rig.load("large")
    again = rig.service.request("POST", "/v1/plan", {"model": "large", **CONTEXT}).json()
    charged = [each["charged_bytes"] for card in rig.promised().values() for each in card.values()]
    assert plan["given_back_bytes"] is None and again["given_back_bytes"] == sum(charged)
    for member in ("cards", "environment", "available_bytes", "budget"):
        assert again[member] == plan[member], member
