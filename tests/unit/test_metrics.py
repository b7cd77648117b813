"""Statistics and what Prometheus is told: parsed by its own library, and equal to the views."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from lllm3090d.errors import ErrorCode
from lllm3090d.gateway.figures import GatewayFigures
from lllm3090d.gateway.metrics import families
from lllm3090d.planning.units import MIB
from lllm3090d.serving.instance import InstanceState
from lllm3090d.serving.metrics import CONTENT_TYPE, Figures, exposition
from lllm3090d.serving.statistics import Histogram, QueueOutcome, Statistics
from lllm3090d.version import VERSION
from lllm3090d.wire_cards import PartKind
from tests.fakes.card_scenes import LOST, Desk, on_host

pytestmark = pytest.mark.unit

REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def statistics() -> Statistics:
    made = Statistics(1234.5)
    made.refused(ErrorCode.INSUFFICIENT_MEMORY)
    made.refused(ErrorCode.INSUFFICIENT_MEMORY)
    made.loaded("Qwen", 4.0)
    made.loaded("Qwen", 1000.0)
    made.failed()
    made.evicted("SmolLM2", "load")
    made.queued()
    made.queued()
    made.dequeued(0.7, QueueOutcome.SERVED)
    made.measured("Qwen", 1000, 1100)
    return made


def samples(desk: Desk | None = None, counted: Statistics | None = None) -> Samples:
    figures = Figures(
        (desk or Desk()).view,
        counted or statistics(),
        (InstanceState.READY, InstanceState.READY, InstanceState.LOADING),
        3,
    )
    text = exposition(figures).decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def one(found: Samples, metric: str, /, **labels: str) -> float:
    return found[metric, frozenset(labels.items())]


def test_the_card_is_told_as_in_its_view() -> None:
    found = samples()
    card = {"card": "GPU-1", "name": "NVIDIA GeForce RTX 3090"}
    mib = {
        word: one(found, f"lllm3090_card_{word}_bytes", **card) / MIB
        for word in (
            "total",
            "driver",
            "used",
            "free",
            "foreign",
            "charged",
            "to_come",
            "quarantined",
            "grantable",
        )
    }
    assert mib == {
        "total": 24576,
        "driver": 451,
        "used": 14021,
        "free": 10104,
        "foreign": 1901,
        "charged": 12400,
        "to_come": 380,
        "quarantined": 300,
        "grantable": 9377,
    }
    assert one(found, "lllm3090_card_readable", **card) == 1


def test_owners_add_up_to_each_memory() -> None:
    found = samples()
    for memory, total in (("GPU-1", 24576 * MIB), ("host", 64 << 30)):
        owned = [one(found, "lllm3090_memory_bytes", memory=memory, owner=kind) for kind in PartKind]
        assert sum(owned) == total
    assert one(found, "lllm3090_host_total_bytes") == 64 << 30


def test_reservations_by_model_and_memory() -> None:
    found = samples()
    qwen = {"model": "Qwen3.8-27B", "run": "q1"}
    assert one(found, "lllm3090_reserved_bytes", memory="GPU-1", **qwen) == 11868 * MIB
    assert one(found, "lllm3090_measured_bytes", memory="host", **qwen) == 650 * MIB
    measured = {key for key in found if key[0] == "lllm3090_measured_bytes"}
    assert len(measured) == 2  # what was not measured is not told as 0


def test_what_happened() -> None:
    found = samples()
    assert one(found, "lllm3090_build_info", version=VERSION) == 1
    assert one(found, "lllm3090_start_time_seconds") == 1234.5
    assert one(found, "lllm3090_refusals_total", code="insufficient_memory") == 2
    assert one(found, "lllm3090_loads_total", outcome="ready") == 2
    assert one(found, "lllm3090_loads_total", outcome="failed") == 1
    assert one(found, "lllm3090_evictions_total", model="SmolLM2", cause="load") == 1
    assert one(found, "lllm3090_queue_length") == 3
    assert one(found, "lllm3090_queue_wait_seconds_bucket", outcome="served", le="1.0") == 1
    assert one(found, "lllm3090_queue_wait_seconds_bucket", outcome="served", le="0.5") == 0
    assert one(found, "lllm3090_load_seconds_count", model="Qwen") == 2
    assert one(found, "lllm3090_load_seconds_sum", model="Qwen") == 1004
    assert one(found, "lllm3090_load_seconds_bucket", model="Qwen", le="300.0") == 1
    assert one(found, "lllm3090_load_seconds_bucket", model="Qwen", le="+Inf") == 2
    assert one(found, "lllm3090_estimate_error_ratio", model="Qwen") == pytest.approx(0.1)
    assert one(found, "lllm3090_instances", state="ready") == 2
    assert one(found, "lllm3090_instances", state="stuck") == 0
    assert one(found, "lllm3090_released") == 0


def test_a_card_that_cannot_be_read_has_no_figures_and_none_is_0() -> None:
    found = samples(Desk(problem=LOST))
    card = {"card": "GPU-1", "name": "NVIDIA GeForce RTX 3090"}
    assert one(found, "lllm3090_card_readable", **card) == 0
    told = {name for name, labels in found if ("card", "GPU-1") in labels}
    assert told == {
        "lllm3090_card_readable",
        "lllm3090_card_charged_bytes",
        "lllm3090_card_to_come_bytes",
        "lllm3090_card_quarantined_bytes",
    }
    assert not any(
        ("memory", "GPU-1") in labels for name, labels in found if name == "lllm3090_memory_bytes"
    )


def test_host_memory_as_the_card_is_told_once() -> None:
    found = samples(on_host())
    assert one(found, "lllm3090_card_total_bytes", card="host", name="host memory (x86_64)") == 32768 * MIB
    assert ("lllm3090_host_total_bytes", frozenset()) not in found


def test_names_of_models_cannot_break_the_text() -> None:
    counted = Statistics()
    for name in ('a"b', "a\\b", "a\nb"):
        counted.evicted(name, "load")
    found = samples(counted=counted)
    for name in ('a"b', "a\\b", "a\nb"):
        assert one(found, "lllm3090_evictions_total", model=name, cause="load") == 1


def test_nothing_global_is_kept() -> None:
    """A second scrape is no addition to the first, and the library's own registry knows nothing of ours."""
    assert samples() == samples()
    assert not any(family.name.startswith("lllm3090") for family in REGISTRY.collect())
    assert CONTENT_TYPE.startswith("text/plain; version=0.0.4")


def test_every_metric_is_in_the_reference_and_no_other() -> None:
    figures = Figures(Desk().view, statistics(), (), 0)
    text = exposition(figures, families(GatewayFigures(), {}, 0)).decode()
    told = set(re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE))
    assert set(re.findall(r"`(lllm3090_\w+)`", REFERENCE.read_text(encoding="utf-8"))) == told


# --- statistics ---


def test_an_error_needs_a_quote() -> None:
    made = Statistics()
    made.measured("x", 0, 100)
    assert made.estimate_errors == {}
    made.measured("x", 100, 50)
    made.measured("x", 100, 98)
    assert made.estimate_errors == {"x": pytest.approx(-0.02)}


def test_nobody_waits_less_than_nobody() -> None:
    made = Statistics()
    made.dequeued(1.0, QueueOutcome.CANCELLED)
    assert made.waiting == 0
    made.queued()
    assert made.waiting == 1


@given(st.lists(st.floats(-1, 1000), max_size=50))
def test_a_histogram_counts_each_once(seconds: list[float]) -> None:
    made = Histogram((1.0, 10.0, 100.0))
    for each in seconds:
        made.add(each)
    rows = made.cumulative()
    assert made.count == len(seconds) == rows[-1][1]
    assert made.sum_s == pytest.approx(sum(max(0.0, each) for each in seconds))
    assert [bound for bound, _ in rows] == ["1.0", "10.0", "100.0", "+Inf"]
    for bound, reached in rows:
        assert reached == sum(max(0.0, each) <= float(bound) for each in seconds)
