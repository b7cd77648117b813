"""The NVIDIA card through the real binding, against a library that is not NVIDIA's.

The library is found through LD_LIBRARY_PATH, which the loader reads when a process starts; so each case asks
a process of its own, or one that lives as long as the test.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.nvml import (
    DRIVER_NOT_LOADED,
    FUNCTION_NOT_FOUND,
    GPU_IS_LOST,
    LIB_RM_VERSION_MISMATCH,
    LIBRARY,
    NOT_SUPPORTED,
    UNINITIALIZED,
    FakeCard,
    FakeNvml,
    FakeProcess,
)

pytestmark = pytest.mark.unit

MIB = 1 << 20
UUID = FakeCard().uuid
# Answers each line with one line of JSON: "open CHOICE", "patience SECONDS" (opens NVIDIA's, with that pause between
# two initialisations of the library), "again" (as a start that knows the cards that were open), "cards", "read [UUID]",
# "errors [UUID]", "close [UUID]".
ASKED = """
import dataclasses, json, sys
from lllm3090d.errors import LlmError
from lllm3090d.gpus.detect import open_cards
from lllm3090d.gpus.lost_cards import LostCards
from lllm3090d.gpus.nvml import open_nvidia
from lllm3090d.gpus.readings import NoCardError
from lllm3090d.settings import CardChoice
readers = ()
for line in sys.stdin:
    command, *rest = line.split()
    try:
        if command in ("open", "patience"):
            readers = open_cards(CardChoice(rest[0])) if command == "open" else open_nvidia(float(rest[0]))
            answer = dataclasses.asdict(readers[0].card)
        elif command == "again":
            known = [reader.card for reader in readers]
            [reader.close() for reader in readers]
            try:
                readers = open_nvidia(0.0, known)
            except (LlmError, NoCardError) as error:
                readers = LostCards(open_nvidia, known, error, pause_s=0.0).readers()
            answer = {"reader": " ".join(type(reader).__name__ for reader in readers)}
        elif command == "cards":
            answer = {"cards": [dataclasses.asdict(reader.card) for reader in readers]}
        else:
            chosen = [reader for reader in readers if not rest or reader.card.uuid == rest[0]][0]
            if command == "errors":
                answer = dataclasses.asdict(chosen.errors())
                answer["xids"] = [xid["number"] for xid in answer["xids"]]
            else:
                answer = dataclasses.asdict(chosen.read()) if command == "read" else (chosen.close() or {})
    except LlmError as error:
        answer = error.problem()
    print(json.dumps(answer), flush=True)
"""


class Asker:
    """A process that reads the card on demand."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", ASKED],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, line: str) -> dict[str, Any]:
        """One question, one answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def end(self) -> None:
        """End it; nothing may have gone wrong inside."""
        self._process.communicate(timeout=20)
        assert self._process.returncode == 0


@pytest.fixture(scope="module")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> FakeNvml:
    return FakeNvml(tmp_path_factory.mktemp("card"))


@pytest.fixture(scope="module")
def asker(nvml: FakeNvml) -> Iterator[Asker]:
    process = Asker(nvml.environment)
    yield process
    process.end()


@pytest.fixture(autouse=True)
def _fresh_card(nvml: FakeNvml) -> None:
    nvml.write(FakeCard())


def test_memory_is_told_apart(nvml: FakeNvml, asker: Asker) -> None:
    nvml.write(
        FakeCard(other_bytes=700 * MIB, processes=(FakeProcess(4001, 300 * MIB),)), driver="580.95.05"
    )

    card = asker.ask("open auto")
    reading = asker.ask("read")

    assert card == {
        "kind": "nvidia",
        "uuid": FakeCard().uuid,
        "name": "NVIDIA GeForce RTX 3090",
        "driver_version": "580.95.05",
        "total_bytes": 24576 * MIB,
        "pci_address": "0000:01:00.0",
        "compute_capability": "8.6",
        "link": {"generation": 4, "width": 16},
        "driver_problem": "",
    }
    assert reading["total_bytes"] == 24576 * MIB
    assert reading["reserved_bytes"] == 451 * MIB
    assert reading["used_bytes"] == 1000 * MIB
    assert reading["free_bytes"] == (24576 - 451 - 1000) * MIB


def test_readings_follow_the_card(nvml: FakeNvml, asker: Asker) -> None:
    asker.ask("open nvidia")
    before = asker.ask("read")
    nvml.add_process(FakeProcess(4001, 5000 * MIB))
    after = asker.ask("read")
    nvml.remove_process(4001)

    assert before["free_bytes"] - after["free_bytes"] == 5000 * MIB
    assert after["processes"] == [{"pid": 4001, "used_bytes": 5000 * MIB}]
    assert asker.ask("read")["free_bytes"] == before["free_bytes"]


def test_how_busy_a_card_is_comes_with_each_reading(nvml: FakeNvml, asker: Asker) -> None:
    asker.ask("open nvidia")
    nvml.load(100, 0)
    read = asker.ask("read")
    assert (read["busy_percent"], read["memory_busy_percent"]) == (100, 0)
    nvml.fail("nvmlDeviceGetUtilizationRates", NOT_SUPPORTED)
    read = asker.ask("read")
    assert (read["busy_percent"], read["memory_busy_percent"]) == (None, None)
    assert read["free_bytes"] > 0  # which is read all the same


def test_processes_of_both_kinds_are_one_row_each(nvml: FakeNvml, asker: Asker) -> None:
    rows = (
        FakeProcess(30, 100 * MIB),
        FakeProcess(30, 120 * MIB, "g"),
        FakeProcess(20, None, "g"),
        FakeProcess(10, None),
        FakeProcess(10, 50 * MIB, "g"),
    )
    nvml.write(FakeCard(processes=rows))

    asker.ask("open auto")
    reading = asker.ask("read")

    assert [(row["pid"], row["used_bytes"]) for row in reading["processes"]] == [
        (10, 50 * MIB),
        (20, None),
        (30, 120 * MIB),
    ]
    assert reading["processes_known"]


def test_silent_process_list_is_no_failure_but_said(nvml: FakeNvml, asker: Asker) -> None:
    nvml.write(FakeCard(failures={"nvmlDeviceGetComputeRunningProcesses_v3": NOT_SUPPORTED}))
    asker.ask("open auto")
    reading = asker.ask("read")
    assert (reading["processes"], reading["processes_known"]) == ([], False)


@pytest.mark.parametrize("code", [FUNCTION_NOT_FOUND, NOT_SUPPORTED])
def test_old_driver_does_not_tell_its_reserve(nvml: FakeNvml, asker: Asker, code: int) -> None:
    nvml.write(FakeCard(other_bytes=100 * MIB, failures={"nvmlDeviceGetMemoryInfo_v2": code}))
    asker.ask("open auto")
    reading = asker.ask("read")

    assert reading["reserved_bytes"] is None
    assert reading["used_bytes"] == 551 * MIB
    assert reading["free_bytes"] == (24576 - 551) * MIB


def test_all_cards_are_opened_the_largest_first(nvml: FakeNvml, asker: Asker) -> None:
    nvml.write(
        FakeCard(name="NVIDIA GeForce RTX 3060", uuid="GPU-a", total_bytes=12288 * MIB),
        FakeCard(uuid="GPU-b"),
        FakeCard(uuid="GPU-c", pci="00000001:C1:00"),
    )
    asker.ask("open auto")
    cards = asker.ask("cards")["cards"]
    assert [card["uuid"] for card in cards] == ["GPU-b", "GPU-c", "GPU-a"]
    assert cards[1]["pci_address"] == "0001:c1:00.0"
    nvml.add_process(FakeProcess(4001, 100 * MIB), "GPU-a")
    assert [asker.ask(f"read {uuid}")["used_bytes"] // MIB for uuid in ("GPU-a", "GPU-b", "GPU-c")] == [
        100,
        0,
        0,
    ]


def test_a_small_card_is_left_out(nvml: FakeNvml, asker: Asker) -> None:
    small = FakeCard(name="NVIDIA T400", uuid="GPU-a", total_bytes=2048 * MIB)
    nvml.write(small, FakeCard(uuid="GPU-b", total_bytes=3072 * MIB))
    assert asker.ask("open auto")["uuid"] == "GPU-b"
    assert len(asker.ask("cards")["cards"]) == 1
    nvml.write(small)
    assert asker.ask("open auto")["kind"] != "nvidia"
    assert "NVIDIA T400 has 2048 MiB" in asker.ask("open nvidia")["detail"]


def test_lost_card_is_an_error_and_comes_back(nvml: FakeNvml, asker: Asker) -> None:
    asker.ask("open auto")
    nvml.fail("nvmlDeviceGetMemoryInfo_v2", GPU_IS_LOST)
    problem = asker.ask("read")

    assert problem["code"] == "card_unreadable"
    assert "GPU is lost" in problem["detail"]
    assert problem["details"]["nvml_error"] == GPU_IS_LOST
    assert problem["hint"]

    nvml.recover()
    assert asker.ask("read")["total_bytes"] == 24576 * MIB


def test_a_card_that_fell_off_the_bus_needs_the_library_again(nvml: FakeNvml) -> None:
    nvml.write(FakeCard(uuid="GPU-a"), FakeCard(uuid="GPU-b"))
    process = Asker(nvml.environment)
    process.ask("patience 0")
    for lost, other in (("GPU-a", "GPU-b"), ("GPU-b", "GPU-a"), ("GPU-b", "GPU-a")):
        nvml.lose(lost)
        for _ in range(3):
            assert "GPU is lost" in process.ask(f"read {lost}")["detail"]
            assert process.ask(f"read {other}")["free_bytes"] > 0  # the other one is none the worse
        nvml.find_again(lost)
        assert process.ask(f"read {lost}")["free_bytes"] > 0
        assert process.ask(f"read {other}")["free_bytes"] > 0
    process.end()


def test_a_lost_card_does_not_make_the_library_start_again_and_again(nvml: FakeNvml) -> None:
    process = Asker(nvml.environment)
    process.ask("patience 3600")
    nvml.lose(UUID)
    assert "GPU is lost" in process.ask("read")["detail"]
    assert "GPU is lost" in process.ask("read")["detail"]  # the library was started again, in vain
    nvml.find_again(UUID)
    assert "GPU is lost" in process.ask("read")["detail"]  # and is not so soon after
    process.end()


def test_a_library_that_cannot_start_again_is_tried_later(nvml: FakeNvml) -> None:
    process = Asker(nvml.environment)
    process.ask("patience 0")
    nvml.lose(UUID)
    assert "GPU is lost" in process.ask("read")["detail"]
    nvml.find_again(UUID)
    nvml.fail("nvmlInit", LIB_RM_VERSION_MISMATCH)
    problem = process.ask("read")
    assert problem["details"]["nvml_error"] == LIB_RM_VERSION_MISMATCH
    assert "restart lllm3090d" in problem["hint"]
    nvml.recover()
    # Everything said so far was true once: nothing of it stays.
    assert process.ask("read")["total_bytes"] == 24576 * MIB
    process.end()


@pytest.mark.parametrize("code", [DRIVER_NOT_LOADED, LIB_RM_VERSION_MISMATCH, GPU_IS_LOST, None])
def test_a_start_while_the_card_is_lost(nvml: FakeNvml, code: int | None) -> None:
    """The library fails as it is initialised, or gives no handle of the card; then it is as if nothing had been."""
    process = Asker(nvml.environment)
    process.ask("open auto")
    if code is None:
        nvml.lose(UUID)
    else:
        nvml.fail("nvmlInit", code)
    assert process.ask("again") == {"reader": "LostReader"}
    for _ in range(2):
        problem = process.ask("read")
        assert problem["code"] == "card_unreadable" and "managed before" in problem["detail"]
        assert problem["details"]["card"] == UUID
    if code is None:
        nvml.find_again(UUID)
    nvml.recover()
    assert process.ask("read")["total_bytes"] == 24576 * MIB
    assert process.ask("errors")["returns"] == 1
    process.ask("close")
    process.end()


@pytest.mark.parametrize("is_listed", [True, False])
def test_a_start_while_one_of_two_cards_is_lost(nvml: FakeNvml, is_listed: bool) -> None:
    """The driver gives no handle of it, or does not even list it; the other one is read all the while."""
    other = FakeCard(
        uuid="GPU-00000002-1111-2222-3333-444444444444", pci="00000000:02:00", total_bytes=12288 * MIB
    )
    nvml.write(FakeCard(), other)
    process = Asker(nvml.environment)
    process.ask("open auto")
    if is_listed:
        nvml.lose(UUID)
    else:
        nvml.write(other)
    assert process.ask("again") == {"reader": "MissingReader NvmlReader"}
    for _ in range(3):
        problem = process.ask(f"read {UUID}")
        assert problem["code"] == "card_unreadable" and "managed before" in problem["detail"]
        assert problem["details"]["card"] == UUID and problem["details"]["lost"] is True
        assert process.ask(f"read {other.uuid}")["total_bytes"] == 12288 * MIB
    nvml.write(FakeCard(), other)
    assert process.ask(f"read {UUID}")["total_bytes"] == 24576 * MIB
    assert process.ask(f"errors {UUID}")["returns"] == 1
    assert process.ask(f"read {other.uuid}")["total_bytes"] == 12288 * MIB
    nvml.lose(UUID)
    assert (
        "managed before" not in process.ask(f"read {UUID}")["detail"]
    )  # lost while it was managed, as any card
    process.ask(f"close {other.uuid}")
    process.ask(f"close {UUID}")
    process.end()
    nvml.write(FakeCard())


def test_an_uninitialised_library_is_initialised_again(nvml: FakeNvml, asker: Asker) -> None:
    asker.ask("patience 0")
    nvml.fail("nvmlDeviceGetMemoryInfo_v2", UNINITIALIZED)
    assert asker.ask("read")["details"]["nvml_error"] == UNINITIALIZED
    nvml.recover()
    assert asker.ask("read")["free_bytes"] > 0


def test_another_total_than_before_is_an_error_and_no_number(nvml: FakeNvml, asker: Asker) -> None:
    asker.ask("open auto")
    before = asker.ask("read")
    nvml.write(FakeCard(total_bytes=24564 * MIB))
    problem = asker.ask("read")
    assert problem["code"] == "card_unreadable"
    assert f"its total was {24576 * MIB} bytes and is now {24564 * MIB}" in problem["detail"]
    nvml.write(FakeCard())
    assert asker.ask("read")["total_bytes"] == before["total_bytes"]


def test_a_card_that_cannot_be_read_when_it_is_opened_is_there_all_the_same(
    nvml: FakeNvml, asker: Asker
) -> None:
    nvml.fail("nvmlDeviceGetMemoryInfo", 999)
    nvml.fail("nvmlDeviceGetMemoryInfo_v2", 999)
    assert asker.ask("open auto")["total_bytes"] == 0
    assert asker.ask("read")["code"] == "card_unreadable"
    nvml.recover()
    assert asker.ask("read")["total_bytes"] == 24576 * MIB
    assert asker.ask("cards")["cards"][0]["total_bytes"] == 24576 * MIB
    nvml.write(FakeCard(total_bytes=20000 * MIB))
    assert asker.ask("read")["code"] == "card_unreadable"


def test_a_card_that_cannot_be_identified_does_not_hide_the_others(nvml: FakeNvml, asker: Asker) -> None:
    nvml.write(FakeCard(uuid="GPU-a", failures={"nvmlDeviceGetUUID": 999}), FakeCard(uuid="GPU-b"))
    assert asker.ask("open auto")["uuid"] == "GPU-b"
    assert len(asker.ask("cards")["cards"]) == 1


def test_a_divided_card_is_an_error(nvml: FakeNvml, asker: Asker) -> None:
    nvml.write(FakeCard(name="NVIDIA A100-SXM4-40GB", mig=True))
    asker.ask("open auto")
    problem = asker.ask("read")
    assert problem["code"] == "card_unreadable"
    assert "(MIG)" in problem["detail"]
    assert f"-i {UUID} -mig 0" in problem["hint"]
    nvml.write(FakeCard(name="NVIDIA A100-SXM4-40GB", mig=False))
    assert asker.ask("read")["free_bytes"] > 0


@pytest.mark.parametrize(
    ("driver", "said"),
    [
        ("580.95.05", ""),
        ("550.54", ""),
        ("549.99.1", "older than 550"),
        ("470.256.02", "older than 550"),
        ("", ""),
    ],
)
def test_an_old_driver_is_told(nvml: FakeNvml, asker: Asker, driver: str, said: str) -> None:
    nvml.write(FakeCard(), driver=driver)
    problem = asker.ask("open auto")["driver_problem"]
    assert said in problem if said else problem == ""
    assert asker.ask("read")["free_bytes"] > 0  # a warning, no refusal


def test_what_the_driver_does_not_tell_of_a_card_stays_unknown(nvml: FakeNvml, asker: Asker) -> None:
    silent = (
        "nvmlDeviceGetPciInfo_v3",
        "nvmlDeviceGetCudaComputeCapability",
        "nvmlDeviceGetMaxPcieLinkGeneration",
    )
    nvml.write(FakeCard(failures=dict.fromkeys(silent, NOT_SUPPORTED)))
    card = asker.ask("open auto")
    assert (card["pci_address"], card["compute_capability"], card["link"]) == ("", None, None)
    assert asker.ask("read")["free_bytes"] > 0


def test_the_lanes_in_use_count_and_the_highest_generation(nvml: FakeNvml, asker: Asker) -> None:
    nvml.write(FakeCard(link=(5, 16, 1, 8)))
    assert asker.ask("open auto")["link"] == {"generation": 5, "width": 8}


def test_a_process_that_holds_more_than_there_is_makes_the_reading_absurd(
    nvml: FakeNvml, asker: Asker
) -> None:
    nvml.write(FakeCard(used_bytes=MIB, processes=(FakeProcess(30, 1 << 50),)))
    asker.ask("open auto")
    assert "process 30" in asker.ask("read")["detail"]


@pytest.mark.parametrize(
    "card",
    [
        FakeCard(total_bytes=0, reserved_bytes=0),
        FakeCard(used_bytes=30000 * MIB),
        FakeCard(free_bytes=24577 * MIB),
        FakeCard(reserved_bytes=25000 * MIB),
        FakeCard(used_bytes=12000 * MIB, free_bytes=13000 * MIB),
        FakeCard(free_bytes=(1 << 64) - 1),
    ],
)
def test_absurd_figures_are_refused(nvml: FakeNvml, asker: Asker, card: FakeCard) -> None:
    nvml.write(card)
    asker.ask("open auto")
    problem = asker.ask("read")
    assert problem["code"] == "card_unreadable"
    assert "cannot be true" in problem["detail"]


def test_no_device_falls_back_only_under_auto(nvml: FakeNvml, asker: Asker) -> None:
    nvml.write()
    assert asker.ask("open auto")["kind"] != "nvidia"
    assert "no device" in asker.ask("open nvidia")["detail"]


def test_driver_that_is_not_loaded_falls_back_only_under_auto(nvml: FakeNvml, asker: Asker) -> None:
    nvml.fail("nvmlInit", DRIVER_NOT_LOADED)
    assert asker.ask("open auto")["kind"] != "nvidia"

    problem = asker.ask("open nvidia")
    assert problem["code"] == "card_unreadable"
    assert "Driver Not Loaded" in problem["detail"]


def test_mismatched_driver_is_an_error_also_under_auto(nvml: FakeNvml, asker: Asker) -> None:
    nvml.fail("nvmlInit", LIB_RM_VERSION_MISMATCH)
    for choice in ("auto", "nvidia"):
        problem = asker.ask(f"open {choice}")
        assert problem["code"] == "card_unreadable"
        assert "mismatch" in problem["detail"]
        assert "restart" in problem["hint"]
    assert asker.ask("open cpu")["kind"] == "cpu"


@pytest.mark.parametrize(
    "function", ["nvmlDeviceGetCount_v2", "nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetUUID"]
)
def test_failure_while_choosing_is_an_error(nvml: FakeNvml, asker: Asker, function: str) -> None:
    nvml.fail(function, 999)
    assert asker.ask("open auto")["code"] == "card_unreadable"


def test_close_may_be_repeated_and_ends_reading(nvml: FakeNvml) -> None:
    process = Asker(nvml.environment)
    assert process.ask("open auto")["kind"] == "nvidia"
    assert process.ask("close") == {}
    assert process.ask("close") == {}
    assert "is closed" in process.ask("read")["detail"]
    assert process.ask("open auto")["kind"] == "nvidia"
    process.end()


def test_missing_library_falls_back_only_under_auto(tmp_path: Path) -> None:
    process = Asker({"LD_LIBRARY_PATH": str(tmp_path)})
    if process.ask("open auto")["kind"] == "nvidia":
        process.end()
        pytest.skip("this machine has a real NVIDIA driver")
    problem = process.ask("open nvidia")
    assert problem["code"] == "card_unreadable"
    assert problem["hint"]
    process.end()


def test_damaged_library_is_an_error_also_under_auto(tmp_path: Path) -> None:
    (tmp_path / LIBRARY).write_bytes(b"not a library")
    process = Asker({"LD_LIBRARY_PATH": str(tmp_path)})
    problem = process.ask("open auto")
    process.end()
    assert problem["code"] == "card_unreadable"
    assert LIBRARY in problem["detail"]


def test_memory_of_a_process_that_ended_is_free_again(nvml: FakeNvml, asker: Asker) -> None:
    """The fake's own promise: a claim marked alive lasts as long as its process, as with a real driver."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as holder:
        text = nvml.state.read_text(encoding="utf-8")
        nvml.state.write_text(text + f"process c {holder.pid} {1000 * MIB} alive\n", encoding="utf-8")
        asker.ask("open auto")
        held = asker.ask("read")["used_bytes"]
        holder.communicate()
    assert (held, asker.ask("read")["used_bytes"]) == (1000 * MIB, 0)


# --- what the driver reports ----------------------------------------------------------------------------------


@pytest.fixture
def fresh(nvml: FakeNvml) -> Iterator[Asker]:
    """A process of its own, so that the library is initialised once."""
    process = Asker(nvml.environment)
    yield process
    process.end()


def test_errors_are_taken_with_readings(nvml: FakeNvml, fresh: Asker) -> None:
    nvml.write(FakeCard(uuid="GPU-a"), FakeCard(uuid="GPU-b", pci="00000000:02:00"))
    nvml.report(13, "GPU-a")  # before anybody asked to be told
    fresh.ask("patience 0")
    for uuid in ("GPU-a", "GPU-b"):
        fresh.ask(f"read {uuid}")
    none = {"xids": [], "action": None, "returns": 0, "source": "NVML"}
    assert fresh.ask("errors GPU-a") == fresh.ask("errors GPU-b") == none
    nvml.report(31, "GPU-b")
    nvml.report(79, "GPU-b")
    nvml.ask_for(1, "GPU-b")
    assert fresh.ask("errors GPU-a")["xids"] == []
    assert fresh.ask("errors GPU-b") == {"xids": [31, 79], "action": 1, "returns": 0, "source": "NVML"}
    assert fresh.ask("errors GPU-b")["xids"] == []
    fresh.ask("close GPU-b")
    assert fresh.ask("errors GPU-b")["xids"] == []


def test_a_card_that_comes_back_is_followed_again(nvml: FakeNvml, fresh: Asker) -> None:
    fresh.ask("patience 0")
    fresh.ask("read")
    nvml.report(79)
    nvml.lose(UUID)
    assert fresh.ask("read")["code"] == "card_unreadable"
    assert fresh.ask("errors")["xids"] == [79]
    assert fresh.ask("read")["code"] == "card_unreadable"
    nvml.find_again(UUID)
    assert fresh.ask("read")["free_bytes"] > 0
    assert fresh.ask("errors") == {"xids": [], "action": None, "returns": 1, "source": "NVML"}
    nvml.report(13)
    assert fresh.ask("errors")["xids"] == [13]


@pytest.mark.parametrize(
    "function", ["nvmlEventSetCreate", "nvmlDeviceRegisterEvents", "nvmlEventSetWait_v2"]
)
def test_a_driver_that_does_not_tell_of_errors(nvml: FakeNvml, fresh: Asker, function: str) -> None:
    nvml.write(FakeCard(), failures={function: NOT_SUPPORTED})
    fresh.ask("patience 0")
    assert fresh.ask("read")["free_bytes"] > 0
    nvml.report(79)
    told = fresh.ask("errors")
    assert told["xids"] == []
    assert told["source"] in {"", "the kernel's messages"}  # by who runs this, and kernel.dmesg_restrict


@pytest.mark.parametrize("code", [UNINITIALIZED, GPU_IS_LOST, 999])
def test_events_that_fail_later_are_no_failure_of_the_card(nvml: FakeNvml, fresh: Asker, code: int) -> None:
    nvml.write(FakeCard(), failures={"nvmlEventSetWait_v2": code, "nvmlDeviceGetFieldValues": code})
    fresh.ask("patience 0")
    assert fresh.ask("read")["free_bytes"] > 0
    assert fresh.ask("errors") == {"xids": [], "action": None, "returns": 0, "source": "NVML"}
