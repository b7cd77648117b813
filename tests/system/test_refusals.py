"""The three refusals for lack of card memory, in the terminal and for programs, and that their remedies are true."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.engine import install_fake_engine, set_behaviour
from tests.fakes.gguf_files import write_llama
from tests.fakes.nvml import FakeNvml, FakeProcess
from tests.system.harness import Service, model_units, running

pytestmark = pytest.mark.system

MIB, GIB = 1 << 20, 1 << 30
DEVICE = "Vulkan0: NVIDIA GeForce RTX 3090 (24576 MiB, 24125 MiB free)"
REFUSED = 5


@pytest.fixture
def nvml(tmp_path: Path) -> FakeNvml:
    """A stand-in RTX 3090."""
    return FakeNvml(tmp_path / "card")


@pytest.fixture
def service(tmp_path: Path, nvml: FakeNvml) -> Iterator[Service]:
    """A daemon on it, with two models of about a gibibyte and one that is larger than the card."""
    install_fake_engine(tmp_path / "engine")
    made = Service(
        tmp_path, {"llama_dir": str(tmp_path / "engine"), "desktop": "inactive"}, nvml.environment
    )
    for name, blocks, width in (("one", 8, 2048), ("two", 8, 2048), ("huge", 40, 8192)):
        write_llama(
            made.models_dir / name / "model.gguf",
            blocks=blocks,
            embedding_length=width,
            head_count=width // 128,
            kv_head_count=width // 128,
            feed_forward_length=4 * width,
        )
    fill(made, nvml, 1200)
    with running(made):
        yield made


def fill(service: Service, nvml: FakeNvml, mib: int) -> None:
    """Let the next engine take so much of the card."""
    set_behaviour(service.directory / "engine", devices=(DEVICE,), nvml_state=str(nvml.state), vram_mib=mib)


def refused(service: Service, *arguments: str) -> tuple[str, dict[str, Any]]:
    """The page and the document of a refused load."""
    before = model_units()
    shown = service.ctl(*arguments, check=False)
    assert (shown.returncode, shown.stdout) == (REFUSED, "")
    told = service.ctl(*arguments, "--json", check=False)
    assert told.returncode == REFUSED
    problem: dict[str, Any] = json.loads(told.stdout.splitlines()[-1])
    assert model_units() == before
    assert problem["code"] == "insufficient_vram"
    assert shown.stderr.startswith(f"lllm3090ctl: {problem['details']['summary']}\n")
    return shown.stderr, problem["details"]


def remedy(details: dict[str, Any], kind: str) -> dict[str, Any]:
    """The only one of a kind."""
    (found,) = [each for each in details["remedies"] if each["kind"] == kind]
    return dict(found)


def test_too_big_for_the_card(service: Service) -> None:
    page, details = refused(service, "load", "huge", "--context", "4096", "--offload", "resident")
    assert details["cause"] == "card"
    assert "huge is too big for the card as asked, even with nothing else on it." in page
    assert "MiB" in page and "driver" in page
    assert details["strangers"] == details["ours"] == []


def test_too_big_now_because_of_a_stranger(service: Service, nvml: FakeNvml) -> None:
    nvml.add_process(FakeProcess(os.getpid(), 23 * GIB, "g"))
    page, details = refused(service, "load", "one", "--context", "4096", "--offload", "resident")
    assert details["cause"] == "strangers"
    assert f"(pid {os.getpid()}) holds 23,552.0 MiB" in page
    assert remedy(details, "close")["command"] == f"kill {os.getpid()}"
    nvml.remove_process(os.getpid())  # what the remedy says, in a way that this test survives
    assert service.load("one", context_tokens=4096, offload="resident")[-1]["kind"] == "ready"


def test_too_big_now_because_of_our_own_pinned_model(service: Service, nvml: FakeNvml) -> None:
    fill(service, nvml, 23_500)
    service.ctl("load", "one", "--pin", "--context", "1024")
    fill(service, nvml, 1200)
    page, details = refused(service, "load", "two", "--context", "4096", "--offload", "resident")
    assert details["cause"] == "ours"
    assert "models that are loaded: one (23,500.0 MiB, pinned, " in page
    command = shlex.split(remedy(details, "unload-pinned")["command"])
    assert command == ["lllm3090ctl", "unload", "one"]
    service.ctl(*command[1:])
    assert service.load("two", context_tokens=4096, offload="resident")[-1]["kind"] == "ready"
