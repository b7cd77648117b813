"""What a launch is seen to take: charged, told, remembered, and what the next one makes of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from lllm3090d.engines.capabilities import Backend
from lllm3090d.engines.crash_causes import OUT_OF_DEVICE_MEMORY, ran_out_of_device_memory
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.planning.calibration import Calibration, CalibrationScope, Measurement, comparable_bytes
from lllm3090d.planning.planner import PlanRequest
from lllm3090d.planning.quote import Evidence
from lllm3090d.serving.events import (
    Effect,
    EngineReady,
    Event,
    Learn,
    LearnOutOfMemory,
    LoadRequested,
    MemoryReleased,
    PostMortemRead,
    StartFinished,
    TakesMore,
    TellDeviation,
    UnitVanished,
    Verified,
    Verify,
)
from lllm3090d.serving.running import Instance
from tests.fakes.simulated_machine import CARD, GIB, MIB, Machine, request_of

pytestmark = pytest.mark.unit

SCOPE = CalibrationScope("s1-x", "digest", Backend.VULKAN, CARD.uuid)
REQUEST = PlanRequest(context_tokens=8192)


class Bench:
    """A scheduler that is handed events one by one."""

    def __init__(self, tmp_path: Path) -> None:
        server = tmp_path / "llama-server"
        server.write_text("#!/bin/sh\n")
        server.chmod(0o755)
        self.machine = Machine(0, server)
        self.scheduler = self.machine.scheduler
        self.count = 0

    def feed(self, event: Event) -> list[Effect]:
        needs = isinstance(event, LoadRequested)
        return self.scheduler.handle(event, self.machine.observe() if needs else None)

    def load(self, known: Calibration | None, request: PlanRequest = REQUEST) -> Instance:
        """Begin a load of "small" with what is known of it."""
        self.count += 1
        wishes = {} if known is None else {"calibrations": {CARD.uuid: known}}
        self.feed(
            request_of(
                "small", f"t{self.count}", f"{self.count:08x}", request, self.machine.server, **wishes
            )
        )
        instance = self.scheduler.instance("small")
        assert instance is not None
        return instance

    def up(self, known: Calibration | None, holds: int = 3 * GIB) -> tuple[Instance, list[Effect]]:
        """Load it; what follows from its being ready."""
        instance = self.load(known)
        self.feed(StartFinished(instance.run, None))
        return instance, self.feed(EngineReady(instance.run, {CARD.uuid: holds}))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """A fresh one."""
    return Bench(tmp_path)


def charged(bench: Bench) -> int:
    return bench.scheduler.ledger.charged_bytes(CARD.uuid)


def test_a_peak_is_charged_told_and_remembered(bench: Bench) -> None:
    instance, effects = bench.up(Calibration(SCOPE))
    assert Verify(instance.run, computes=True) in effects
    price = instance.plan.quote.total_bytes(instance.plan.quote.items[0].place)
    peak = price + GIB
    told = bench.feed(Verified(instance.run, {CARD.uuid: peak}, 2048))
    assert charged(bench) == peak
    (learn,) = [each for each in told if isinstance(each, Learn)]
    assert learn.measurement == Measurement(learn.measurement.key, peak, 3 * GIB, 2048, 0.0)
    assert learn.measurement.key.scope == SCOPE
    (deviation,) = [each for each in told if isinstance(each, TellDeviation)]
    assert deviation.measured_bytes == peak
    assert "more than" in deviation.text


def test_what_is_near_its_quote_is_remembered_and_not_told(bench: Bench) -> None:
    instance, _ = bench.up(Calibration(SCOPE))
    quoted = comparable_bytes(instance.plan.first_quote, Backend.VULKAN)
    told = bench.feed(Verified(instance.run, {CARD.uuid: quoted}, 2048))
    assert [type(each) for each in told] == [Learn]


def test_a_launch_that_was_measured_is_charged_its_peak_and_computes_nothing(bench: Bench) -> None:
    instance, _ = bench.up(Calibration(SCOPE))
    peak = comparable_bytes(instance.plan.first_quote, Backend.VULKAN) - 300 * MIB
    (learn,) = [
        each
        for each in bench.feed(Verified(instance.run, {CARD.uuid: peak}, 2048))
        if isinstance(each, Learn)
    ]
    known = Calibration(SCOPE).measured(learn.measurement, learn.quoted_bytes)
    bench.feed(UnitVanished(instance.unit, None))
    bench.feed(MemoryReleased(instance.run, {}))
    again, effects = bench.up(known)
    assert Verify(again.run, computes=False) in effects
    on_card = [item for item in again.plan.quote.items if item.place == "card"]
    assert {item.evidence for item in on_card} == {Evidence.MEASURED}
    assert sum(item.bytes for item in on_card) == peak + max(128 * MIB, peak // 100)


def test_running_out_of_memory_makes_the_next_plan_dearer(bench: Bench) -> None:
    instance = bench.load(Calibration(SCOPE))
    before = charged(bench)
    bench.feed(StartFinished(instance.run, None))
    bench.feed(UnitVanished(instance.unit, None))
    bench.feed(MemoryReleased(instance.run, {}))
    error = LlmError(ErrorCode.ENGINE_FAILED, "it died", cause=OUT_OF_DEVICE_MEMORY)
    (learn,) = [
        each
        for each in bench.feed(PostMortemRead(instance.run, error))
        if isinstance(each, LearnOutOfMemory)
    ]
    assert learn.foreign_bytes == bench.machine.foreign_bytes
    known = Calibration(SCOPE).out_of_memory(learn.key.launch, learn.quoted_bytes, 1e9)
    bench.load(known)
    assert charged(bench) == before + max(256 * MIB, learn.quoted_bytes // 50)


def test_an_end_for_another_reason_teaches_nothing(bench: Bench) -> None:
    instance = bench.load(Calibration(SCOPE))
    bench.feed(StartFinished(instance.run, None))
    bench.feed(UnitVanished(instance.unit, None))
    bench.feed(MemoryReleased(instance.run, {}))
    effects = bench.feed(PostMortemRead(instance.run, LlmError(ErrorCode.ENGINE_FAILED, "it died")))
    assert not [each for each in effects if isinstance(each, LearnOutOfMemory)]


def test_without_a_key_nothing_is_remembered_and_much_more_is_told(bench: Bench) -> None:
    instance, _ = bench.up(None)
    price = charged(bench)
    assert bench.feed(Verified(instance.run, {CARD.uuid: price}, 0)) == []
    told = bench.feed(Verified(instance.run, {CARD.uuid: price + GIB}, 0))
    assert [type(each) for each in told] == [TellDeviation]


def test_more_than_was_promised_is_charged_while_it_loads(bench: Bench) -> None:
    instance = bench.load(None)
    price = charged(bench)
    bench.feed(TakesMore(instance.run, {CARD.uuid: price + 7}))
    assert charged(bench) == price + 7
    bench.feed(TakesMore(instance.run, {CARD.uuid: price}))
    assert charged(bench) == price + 7


@pytest.mark.parametrize(
    ("line", "says_so"),
    [
        ("alloc_buffer: allocating 12.00 MiB on device 0: cudaMalloc failed: out of memory", True),
        ("CUDA error: out of memory", True),
        ("ggml_vulkan: Device memory allocation of size 1073741824 failed.", True),
        ("ggml_vulkan: vk::Device::allocateMemory: ErrorOutOfDeviceMemory", True),
        ("alloc_tensor_range: failed to allocate CUDA0 buffer of size 3221225472", True),
        ("ggml_gallocr_reserve_n_impl: failed to allocate Vulkan0 buffer of size 314572800", True),
        ("llama_model_load: error loading model: unable to allocate CUDA0 buffer", True),
        ("llama_init_from_model: failed to initialize the context: failed to allocate compute pp buffers", True),
        ("llama_init_from_model: failed to initialize the context: failed to allocate buffer for kv cache", True),
        ("ggml_backend_cpu_buffer_type_alloc_buffer: failed to allocate buffer of size 99999", False),
        ("alloc_tensor_range: failed to allocate CPU buffer of size 3221225472", False),
        ("srv  alloc: failed to allocate memory for prompt cache state: std::bad_alloc", False),
        ("main: server is listening on unix socket", False),
    ],
)  # fmt: skip
def test_the_lines_of_an_engine_without_device_memory(line: str, says_so: bool) -> None:
    assert (ran_out_of_device_memory(("loading", line, "exiting")) == line) is says_so
