"""Plans by the real client and daemon: other cards, models that are not on disk, and bad questions."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.engine import install_fake_engine
from tests.fakes.model_files import published, write
from tests.system.harness import Service, model_units, running

pytestmark = pytest.mark.system
MIB = 1 << 20
LLAMA = "llama-3.1-8b"
LIBRARY = 200


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    """A daemon with a fake engine, host memory for a card, and models of real dimensions as sparse files."""
    made = Service(tmp_path, {"llama_dir": str(install_fake_engine(tmp_path / "engine")), "card": "cpu"})
    for model in (LLAMA, "qwen3-30b-a3b"):
        write(made.models_dir / model / "model.gguf", published()[model])
    write(made.models_dir / "Qwen3-8B" / "Qwen3-8B-Q4_K_M.gguf", published()["qwen3-8b"])
    with running(made) as started:
        yield started


def plan(service: Service, *arguments: str) -> dict[str, Any]:
    view: dict[str, Any] = service.ctl_json("plan", *arguments)
    return view


def refused(service: Service, *arguments: str) -> tuple[int, dict[str, Any]]:
    done = service.ctl("plan", *arguments, "--json", check=False)
    problem: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, problem


def test_plans_for_cards_that_are_not_there(service: Service) -> None:
    """Nothing is started or held by any of them."""
    named = plan(service, LLAMA, "--card", "rtx-4090", "--headless")
    assert named["card"]["id"] == "rtx-4090"
    assert not named["card"]["present"]
    assert {line["name"]: line["bytes"] // MIB for line in named["budget"]} == {
        "total": 24576,
        "driver": -512,
    }
    desktop = plan(service, LLAMA, "--card", "rtx-4090", "--desktop")
    assert desktop["available_bytes"] == named["available_bytes"] - 2400 * MIB
    sized = plan(service, LLAMA, "--vram", "24GiB", "--headless")
    assert (sized["context_tokens"], sized["items"]) == (named["context_tokens"], named["items"])
    small = plan(service, LLAMA, "--vram", "8GiB", "--headless")
    assert small["context_tokens"] < named["context_tokens"]
    assert small["verdict"] == "tight"
    borrowed = plan(service, LLAMA, "--headless")  # there is no card here
    assert borrowed["card"]["id"] == "no-gpu"
    assert (borrowed["card"]["total_bytes"], borrowed["card"]["present"]) == (24576 * MIB, False)
    assert plan(service, LLAMA, "--backend", "cuda")["card"]["backend"] == "cuda"
    host = plan(service, LLAMA, "--backend", "cpu")
    assert (host["card_kind"], host["card"]["present"]) == ("cpu", True)
    assert host["argv"]
    assert model_units() == {}
    assert service.ctl_json("status")["card"]["reserved_by_us_bytes"] == 0


def test_what_is_asked_for_reaches_the_plan(service: Service) -> None:
    card = ("--vram", "24GiB", "--headless")
    asked = plan(service, LLAMA, *card, "--ctx", "65536", "--parallel", "2", "--cache-type", "q4_0")
    assert (asked["context_tokens"], asked["parallel"], asked["cache_type_k"]) == (65536, 2, "q4_0")
    assert asked["capped_by"] == "request"
    experts = plan(service, "qwen3-30b", *card, "--cpu-experts", "20", "--micro-batch", "1024")
    assert experts["placement"]["expert_layers_on_host"] == 20
    assert experts["micro_batch_tokens"] == 1024
    for other in asked["alternatives"]:
        # An alternative is asked for beside what was asked before.
        again = plan(service, LLAMA, *card, "--ctx", "65536", "--parallel", "2", *other["ask"].split())
        assert again["card_bytes"] == other["card_bytes"]


def test_a_plan_explains_itself(service: Service) -> None:
    text = service.ctl("plan", LLAMA, "--card", "rtx-3090", "--headless", "--explain").stdout
    assert "FORMULA" in text and "ORIGIN" in text
    assert "Smallest card for an agent:" in text
    assert "--cache-type q4_0" in text
    short = service.ctl("plan", LLAMA, "--card", "rtx-3090", "--headless").stdout
    assert "FORMULA" not in short and "--cache-type q4_0" not in short


def test_a_model_that_is_not_on_disk_gets_a_preview(service: Service) -> None:
    view = plan(service, "qwen3.8-27b", "--card", "rtx-3090", "--headless")
    assert view["evidence"] == "catalogue"
    assert view["download"]["file"] == "Qwen3.8-27B-UD-Q4_K_S.gguf"
    assert view["speed"]["qualifier"] == "measured"
    text = service.ctl("plan", "qwen3.8-27b", "--card", "rtx-3090").stdout
    assert text.startswith("A preview: this model is not on disk.")
    status, problem = refused(service, "qwen3.8-27b", "--vram", "8GiB")
    assert (status, problem["code"], problem["details"]["verdict"]) == (5, "insufficient_vram", "too-big")


def test_models_with_their_plans(service: Service) -> None:
    listed = {view["name"]: view for view in service.ctl_json("models")["models"]}
    assert set(listed) == {LLAMA, "qwen3-30b-a3b", "Qwen3-8B"}
    assert all(view["verdict"] for view in listed.values())
    assert listed["Qwen3-8B"]["speed"]["qualifier"].startswith("other card")
    everything = service.ctl_json("models", "--catalogue")
    assert not {view["name"]: view for view in everything["models"]}["Qwen3.8-27B"]["on_disk"]
    assert everything["planned_for"]["empty"]
    text = service.ctl("models", "--catalogue").stdout
    assert "loaded models are not counted" in text
    assert "Qwen3.8-27B: to be had from" in text


def test_a_large_library_is_listed_quickly_once_it_is_known(service: Service) -> None:
    """Two hundred models: their plans are remembered."""
    for number in range(LIBRARY):
        write(service.models_dir / f"model-{number:03}" / "m.gguf", published()[LLAMA])
    began = time.monotonic()
    first = service.request("GET", "/v1/models").json()
    first_s = time.monotonic() - began
    assert len(first["models"]) == LIBRARY + 3
    times = []
    for _ in range(3):
        began = time.monotonic()
        again = service.request("GET", "/v1/models").json()
        times.append(time.monotonic() - began)
        assert again == first
    # On a machine that others use either may take its time, so each bound alone would be none.
    assert min(times) < max(1.0, first_s / 2), (first_s, times)


BAD_QUESTIONS = (
    (("--card", "rtx-4099"), 2, "invalid_request", "rtx-4090"),
    (("--card", ""), 2, "invalid_request", "card"),
    (("--vram", "0"), 2, "invalid_request", "GiB"),
    (("--vram", "12GB"), 2, "invalid_request", "12 GiB"),
    (("--vram=-12GiB",), 2, "invalid_request", "GiB"),
    (("--card", "rtx-4090", "--vram", "24GiB"), 2, "invalid_request", "one of card"),
    (("--card", "rtx-4090", "--backend", "cpu"), 2, "invalid_request", "backend"),
    (("--card", "rtx-4090", "--cpu-experts", "4"), 5, "unsupported_combination", "experts"),
    (("--card", "rtx-4090", "--tier"), 5, "unsupported_combination", "tier"),
    (("--card", "rtx-4090", "--draft", "on"), 5, "unsupported_combination", "draft"),
    (
        ("--card", "rtx-4090", "--rope-scaling", "yarn", "--ctx", "99999999"),
        5,
        "unsupported_combination",
        "8",
    ),
    (("--vram", "2GiB"), 5, "insufficient_vram", "smaller"),
)
BAD_BODIES: tuple[dict[str, Any], ...] = (
    {"card": 4090},
    {"vram": 12},
    {"desktop": "yes"},
    {"backend": "rocm"},
    {"gpu_layers": -1},
    {"tiered": 1},
    {"offload": "maybe"},
    {"drafting": True},
    {"micro_batch_tokens": 31},
    {"card": "x" * 101},
)


def test_bad_questions(service: Service) -> None:
    """Each has its code, its exit status, and a word that leads on; by the client and by hand."""
    for arguments, status, code, word in BAD_QUESTIONS:
        found, problem = refused(service, LLAMA, *arguments)
        assert (found, problem["code"]) == (status, code), (arguments, problem)
        assert word in problem["detail"] + problem["hint"], (arguments, problem)
    for body in BAD_BODIES:
        answer = service.request("POST", "/v1/plan", {"model": LLAMA} | body)
        assert (answer.status, answer.json()["code"]) == (422, "invalid_request"), body
        assert next(iter(body)) in answer.json()["detail"]


def test_a_load_takes_no_other_card(service: Service) -> None:
    answer = service.request("POST", "/v1/load", {"model": LLAMA, "card": "rtx-4090"})
    assert (answer.status, answer.json()["code"]) == (422, "invalid_request")
    assert model_units() == {}
