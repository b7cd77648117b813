"""Who holds what, through the real API: of a stand-in card, and of host memory with a real engine."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from lllm3090d.planning.units import MIB
from lllm3090d.wire_cards import ExplainView, Gpus, PartKind
from tests.fakes.engine import install_fake_engine, set_behaviour
from tests.fakes.gguf_files import write_llama
from tests.fakes.nvml import FakeNvml
from tests.system.harness import BIN, Service, eventually, running

pytestmark = pytest.mark.system

SMOLLM2 = "SmolLM2-135M-Instruct"
DEVICE = "Vulkan0: NVIDIA GeForce RTX 3090 (24576 MiB, 24125 MiB free)"


@pytest.fixture
def carded(tmp_path: Path) -> Iterator[Service]:
    """A daemon on a stand-in RTX 3090 with a model of about a gibibyte."""
    nvml = FakeNvml(tmp_path / "card")
    install_fake_engine(tmp_path / "engine")
    made = Service(
        tmp_path, {"llama_dir": str(tmp_path / "engine"), "desktop": "inactive"}, nvml.environment
    )
    write_llama(
        made.models_dir / "one" / "model.gguf",
        blocks=8,
        embedding_length=2048,
        head_count=16,
        kv_head_count=16,
        feed_forward_length=8192,
    )
    set_behaviour(tmp_path / "engine", devices=(DEVICE,), nvml_state=str(nvml.state), vram_mib=1200)
    with running(made):
        yield made


def gpus(service: Service) -> Gpus:
    return Gpus.model_validate_json(service.request("GET", "/v1/gpus").body)


def metrics(service: Service) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    text = service.request("GET", "/metrics").body.decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def page(service: Service, *arguments: str) -> str:
    done = subprocess.run(
        [str(BIN / "lllm3090ctl"), "--socket", str(service.control_socket), *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout


def test_a_card_before_while_and_after_a_model_is_on_it(carded: Service) -> None:
    (before,) = gpus(carded).gpus
    assert (before.profile_id, before.reservations) == ("rtx-3090", ())
    assert before.grantable_bytes == (24576 - 451) * MIB
    carded.load("one")
    view = gpus(carded)
    (card,) = view.gpus
    assert card.reading is not None and card.reading.age_s < 30
    assert sum(part.bytes for part in card.parts) == card.reading.total_bytes == 24576 * MIB
    (held,) = card.reservations
    assert (held.model, held.state, held.held_bytes) == ("one", "confirmed", 1200 * MIB)
    assert sum(item.bytes for item in held.items) == held.reserved_bytes
    shown = {part.kind: part.bytes for part in card.parts}
    assert shown[PartKind.MODEL] == 1200 * MIB
    assert shown[PartKind.FREE] == card.grantable_bytes
    assert view.host is not None and view.host.reservations[0].model == "one"
    text = page(carded, "gpu")
    assert "A  one" in text and "AAA" in text
    told = metrics(carded)
    labels = frozenset({("card", card.uuid), ("name", card.name)})
    assert told["lllm3090_card_total_bytes", labels] == 24576 * MIB
    assert told["lllm3090_loads_total", frozenset({("outcome", "ready")})] == 1
    carded.request("POST", "/v1/unload", {"model": "one"})
    (after,) = gpus(carded).gpus
    assert (after.parts, after.grantable_bytes) == (before.parts, before.grantable_bytes)


def test_a_refusal_is_counted_by_its_code(carded: Service) -> None:
    refused = carded.request("POST", "/v1/load", {"model": "one", "context_tokens": 1 << 27, "parallel": 1})
    code = refused.json()["code"]
    assert metrics(carded)["lllm3090_refusals_total", frozenset({("code", code)})] == 1


def test_a_real_engine_tells_what_was_foreseen(service: Service) -> None:
    """Its figures for model and cache are those of the price, to the rounding of its log."""
    service.load(SMOLLM2, context_tokens=4096, parallel=2, arguments=["-lv", "4"])

    def explained() -> ExplainView | None:
        answer = service.request("GET", f"/v1/models/{SMOLLM2}/explain")
        view = ExplainView.model_validate_json(answer.body)
        (memory,) = view.memories
        told = {part.part for part in memory.parts if part.engine_bytes is not None}
        return view if told >= {"model", "context", "output", "compute"} else None

    view = eventually(explained, what="journald has what the engine says of its memory")
    (memory,) = view.memories
    parts = {part.part: part for part in memory.parts}
    for name in ("model", "context", "output"):
        told = parts[name].engine_bytes
        assert told is not None
        assert told == pytest.approx(parts[name].quoted_bytes, abs=MIB / 10), name
    compute = parts["compute"].engine_bytes
    assert compute is not None and 0 < compute <= parts["compute"].quoted_bytes
    assert memory.measured_bytes is not None
    assert view.engine_note == ""
    text = page(service, "explain", SMOLLM2)
    assert "deviation" in text


def test_a_silent_engine_says_how_to_make_it_speak(service: Service) -> None:
    service.load(SMOLLM2, context_tokens=2048)
    text = page(service, "explain", SMOLLM2)
    assert f"lllm3090ctl load {SMOLLM2} -- -lv 4" in text
    seen = [SMOLLM2, "ready", "idle"]  # once it has been looked at
    eventually(lambda: page(service, "ps").splitlines()[1].split()[:3] == seen, what=str(seen))
    (host,) = gpus(service).gpus
    assert host.profile == "no-gpu"
    assert sum(part.bytes for part in host.parts) == (host.reading and host.reading.total_bytes)
