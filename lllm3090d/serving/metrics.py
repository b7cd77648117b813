"""The daemon's figures in the text format of Prometheus. Made anew for each scrape; nothing is kept or global.

Figures of the cards come from the same views as ``GET /v1/gpus``, so both say the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from lllm3090d.serving.instance import InstanceState
from lllm3090d.serving.observation import HOST
from lllm3090d.serving.statistics import Histogram, LoadOutcome, QueueOutcome, Statistics
from lllm3090d.version import VERSION
from lllm3090d.wire_cards import Gpus, GpuView, MemoryPartView, PartKind, ReservationView

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Labels = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Figures:
    """What a scrape tells.

    Attributes:
        gpus: the cards and the host.
        statistics: what happened.
        states: of all instances.
        waiting: loads that wait for room.
    """

    gpus: Gpus
    statistics: Statistics
    states: tuple[InstanceState, ...]
    waiting: int


def exposition(figures: Figures, more: Iterable[Metric] = ()) -> bytes:
    """The text of a scrape.

    Args:
        figures: ours.
        more: those of other parts.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Figures(figures, tuple(more)))
    return generate_latest(registry)


class _Figures(Collector):
    def __init__(self, figures: Figures, more: tuple[Metric, ...]) -> None:
        self._figures = figures
        self._more = more

    def collect(self) -> Iterator[Metric]:
        figures = self._figures
        yield InfoMetricFamily("lllm3090_build", "Version of the daemon.", {"version": VERSION})
        started = figures.statistics.started_s
        yield GaugeMetricFamily(
            "lllm3090_start_time_seconds", "When the daemon started, since 1970.", value=started
        )
        yield gauge(
            "lllm3090_released", "1 while the cards are released.", (), [((), figures.gpus.released)]
        )
        yield from _cards(figures.gpus.gpus)
        yield from _memories(figures.gpus)
        yield from _reservations(figures.gpus)
        counts = {(state,): figures.states.count(state) for state in InstanceState}
        yield gauge("lllm3090_instances", "Models by state.", ("state",), counts.items())
        yield from _statistics(figures.statistics)
        yield gauge("lllm3090_queue_length", "Loads that wait for room.", (), [((), figures.waiting)])
        yield from self._more


def _cards(gpus: Iterable[GpuView]) -> Iterator[Metric]:
    """What the drivers told; a card that could not be read has no figures, and never a 0 in place of one."""
    names = ("card", "name")
    readable = {(gpu.uuid, gpu.name): gpu.reading is not None for gpu in gpus}
    yield gauge(
        "lllm3090_card_readable", "1 where the card's memory could be read.", names, readable.items()
    )
    read = [(gpu, gpu.reading) for gpu in gpus if gpu.reading is not None]
    told = (
        ("total", "Nameplate memory.", [(gpu, reading.total_bytes) for gpu, reading in read]),
        ("used", "Used by processes, as the driver tells it.", [(gpu, r.used_bytes) for gpu, r in read]),
        ("free", "Free, as the driver tells it.", [(gpu, reading.free_bytes) for gpu, reading in read]),
        ("driver", "Kept by the driver.", [(gpu, r.reserved_by_driver_bytes) for gpu, r in read]),
        ("foreign", "Used, and not by our models.", [(gpu, gpu.foreign_bytes) for gpu, _ in read]),
        ("charged", "Reserved or measured for our models.", [(gpu, gpu.charged_bytes) for gpu in gpus]),
        ("to_come", "Promised to loading models.", [(gpu, gpu.still_to_come_bytes) for gpu in gpus]),
        ("quarantined", "Of ended models, not back.", [(gpu, gpu.quarantined_bytes) for gpu in gpus]),
        ("grantable", "What a new model may take.", [(gpu, gpu.grantable_bytes) for gpu, _ in read]),
    )
    for word, text, rows in told:
        values = {(gpu.uuid, gpu.name): size for gpu, size in rows if size is not None}
        yield gauge(f"lllm3090_card_{word}_bytes", text, names, values.items())


def _memories(gpus: Gpus) -> Iterator[Metric]:
    """All memories divided by owner, and host memory as a whole."""
    values: dict[Labels, float] = {}
    memories: list[tuple[str, tuple[MemoryPartView, ...]]] = [(gpu.uuid, gpu.parts) for gpu in gpus.gpus]
    if gpus.host:
        memories.append((HOST, gpus.host.parts))
    for where, parts in memories:
        for kind in PartKind if parts else ():
            values[where, kind] = sum(part.bytes for part in parts if part.kind is kind)
    yield gauge(
        "lllm3090_memory_bytes", "A memory by owner; all of it adds up.", ("memory", "owner"), values.items()
    )
    if gpus.host:
        for word, size in (("total", gpus.host.total_bytes), ("available", gpus.host.available_bytes)):
            yield gauge(f"lllm3090_host_{word}_bytes", "Host memory beside the cards.", (), [((), size)])


def _reservations(gpus: Gpus) -> Iterator[Metric]:
    rows: list[tuple[tuple[str, str, str], ReservationView]] = []
    for where, reservations in (
        *((gpu.uuid, gpu.reservations) for gpu in gpus.gpus),
        *(((HOST, gpus.host.reservations),) if gpus.host else ()),
    ):
        rows += [((each.model, each.run, where), each) for each in reservations]
    names = ("model", "run", "memory")
    reserved = {key: each.reserved_bytes for key, each in rows}
    measured = {key: each.measured_bytes for key, each in rows if each.measured_bytes is not None}
    yield gauge("lllm3090_reserved_bytes", "The price a model was admitted at.", names, reserved.items())
    yield gauge("lllm3090_measured_bytes", "The most a model was seen to take.", names, measured.items())


def _statistics(statistics: Statistics) -> Iterator[Metric]:
    loads = {(outcome,): statistics.loads[outcome] for outcome in LoadOutcome}
    yield counter("lllm3090_loads", "Admitted loads by outcome.", ("outcome",), loads.items())
    refusals = {(code,): count for code, count in statistics.refusals.items()}
    yield counter("lllm3090_refusals", "Refused loads by code.", ("code",), refusals.items())
    yield counter(
        "lllm3090_evictions", "Models that were evicted.", ("model", "cause"), statistics.evictions.items()
    )
    waits = {
        (outcome,): statistics.waits[outcome] for outcome in QueueOutcome if outcome in statistics.waits
    }
    yield histogram(
        "lllm3090_queue_wait_seconds", "How long loads waited for room.", ("outcome",), waits.items()
    )
    seconds = {(name,): each for name, each in statistics.load_seconds.items()}
    yield histogram("lllm3090_load_seconds", "From admission to ready.", ("model",), seconds.items())
    errors = {(name,): error for name, error in statistics.estimate_errors.items()}
    yield gauge("lllm3090_estimate_error_ratio", "Measured over quoted, less 1.", ("model",), errors.items())


def gauge(
    name: str, text: str, labels: tuple[str, ...], rows: Iterable[tuple[Labels, float]]
) -> GaugeMetricFamily:
    """A family of gauges: values by the values of their labels."""
    family = GaugeMetricFamily(name, text, labels=labels)
    for key, value in rows:
        family.add_metric(list(key), value)
    return family


def counter(
    name: str, text: str, labels: tuple[str, ...], rows: Iterable[tuple[Labels, int]]
) -> CounterMetricFamily:
    """The same of counters; ``_total`` is put behind the name."""
    family = CounterMetricFamily(name, text, labels=labels)
    for key, value in rows:
        family.add_metric(list(key), value)
    return family


def histogram(
    name: str, text: str, labels: tuple[str, ...], rows: Iterable[tuple[Labels, Histogram]]
) -> HistogramMetricFamily:
    """The same of histograms."""
    family = HistogramMetricFamily(name, text, labels=labels)
    for key, each in rows:
        family.add_metric(list(key), each.cumulative(), each.sum_s)
    return family
