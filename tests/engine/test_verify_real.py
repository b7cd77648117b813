"""A real llama-server is probed: its answers stay what they were, and its memory is held against its quote."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lllm3090d.checkpoints.facts import read_facts
from lllm3090d.engines.arguments import features, launch
from lllm3090d.engines.builds import find_build
from lllm3090d.engines.capabilities import Backend, Build, Capabilities
from lllm3090d.engines.probe import probe as ask_build
from lllm3090d.gpus.readings import CardKind
from lllm3090d.planning.calibration import (
    Calibration,
    CalibrationKey,
    CalibrationScope,
    Measurement,
    calibrated,
    comparable_bytes,
    deviation,
    launch_text,
)
from lllm3090d.planning.planner import Plan, plan
from lllm3090d.planning.quote import Place
from lllm3090d.planning.request import PlanRequest, Room
from lllm3090d.planning.units import MIB
from lllm3090d.serving.load_watch import LoadLimits
from lllm3090d.serving.probe import PeakWatch, Probe, Probed, probe
from lllm3090d.serving.processes import process_memory
from lllm3090d.serving.readiness import cgroups_of, wait_until_ready
from lllm3090d.settings import load_settings
from tests.fakes.unix_http import call
from tests.unit.engine_truth import POLICY

pytestmark = pytest.mark.engine

LIMIT_S = 180.0
PROMPTS = ("Once upon a time there was a river that", "measure 7 rivers, 12 tools and 305 letters; gold")


@dataclass(frozen=True)
class Answer:
    """Of one request."""

    text: str
    computed_tokens: int


@dataclass(frozen=True)
class Engine:
    """A running one, with what was seen while it loaded."""

    socket: Path
    pid: int
    load_s: float
    load_peak_bytes: int

    def held_bytes(self) -> int | None:
        memory = process_memory(self.pid)
        return None if memory is None else memory.resident_bytes

    def probe(self, made: Plan, batch_tokens: int) -> Probed:
        what = Probe(
            self.socket,
            min(cgroups_of(self.pid)),
            batch_tokens=batch_tokens,
            window_tokens=made.window_tokens,
            timeout_s=LIMIT_S,
        )
        return asyncio.run(probe(what, self.held_bytes))

    def complete(self, prompt: str) -> Answer:
        request = {"prompt": prompt, "n_predict": 16, "temperature": 0}
        status, body = call(self.socket, "POST", "/completion", request, LIMIT_S)
        assert status == 200, body
        document = json.loads(body)
        return Answer(document["content"], document["timings"]["prompt_n"])

    def get(self, target: str) -> Any:
        return json.loads(call(self.socket, "GET", target, timeout_s=LIMIT_S)[1])


@pytest.fixture(scope="module")
def build(llama_server: Path) -> Build:
    settings = load_settings(Path("/nonexistent"), {"LLLM3090_LLAMA_DIR": str(llama_server.parent)})
    return find_build(settings)


@pytest.fixture(scope="module")
def capabilities(build: Build) -> Capabilities:
    found = ask_build(build)
    if found.backend is not Backend.CPU:
        pytest.skip("this test is for a build that computes in host memory")
    return found


@contextmanager
def running(build: Build, capabilities: Capabilities, model: Path, made: Plan) -> Iterator[Engine]:
    """The engine as a unit would start it."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "e.sock")
        line = launch(build, capabilities, model, made, path, "model", inherited={})
        environment = {"PATH": os.environ["PATH"], **dict(line.environment)}
        began = time.monotonic()
        with subprocess.Popen(
            line.argv, env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        ) as process:

            def resident() -> int | None:
                memory = process_memory(process.pid)
                return None if memory is None else memory.resident_bytes

            watch = PeakWatch(resident)
            group = min(cgroups_of(process.pid))
            try:
                ready = wait_until_ready(
                    path, lambda: group, watch, lambda _: None, limits=LoadLimits(LIMIT_S)
                )
                assert asyncio.run(ready) is None
                loaded_s = time.monotonic() - began
                watch()
                yield Engine(path, process.pid, loaded_s, watch.peak_bytes)
            finally:
                process.terminate()
                process.wait(20)


def plan_for(capabilities: Capabilities, model: Path, context: int, slots: int) -> Plan:
    return plan(
        read_facts([model]),
        PlanRequest(context, slots),
        POLICY,
        features=features(capabilities),
        card_kind=CardKind.CPU,
        room=Room(64 << 30),
    )


@pytest.mark.parametrize("slots", [1, 2])
def test_answers_after_a_probe_are_those_without(
    build: Build, capabilities: Capabilities, smollm2_path: Path, slots: int
) -> None:
    """Also of a prompt that begins with the probe's own words: nothing of them is left to be found."""
    made = plan_for(capabilities, smollm2_path, 2048 * slots, slots)
    with running(build, capabilities, smollm2_path, made) as engine:
        without = [engine.complete(prompt) for prompt in PROMPTS]
    with running(build, capabilities, smollm2_path, made) as engine:
        found = engine.probe(made, batch_tokens=256)
        assert (found.prompt_tokens, found.skipped) == (256, "")
        kept = [slot.get("n_prompt_tokens", 0) for slot in engine.get("/slots")]
        assert max(kept) <= 2
        assert [engine.complete(prompt) for prompt in PROMPTS] == without


@pytest.mark.parametrize("sizes", [(2048, 1), (8192, 2)], ids=str)
def test_the_peak_is_within_the_quote(
    build: Build,
    capabilities: Capabilities,
    smollm2_path: Path,
    capsys: pytest.CaptureFixture[str],
    sizes: tuple[int, int],
) -> None:
    context, slots = sizes
    made = plan_for(capabilities, smollm2_path, context, slots)
    with running(build, capabilities, smollm2_path, made) as engine:
        found = engine.probe(made, batch_tokens=256)
        again = engine.probe(made, batch_tokens=256)
    assert found.skipped == again.skipped == ""
    scope = CalibrationScope("s1-x", "digest", Backend.CPU, "host")
    text = launch_text(made.launch)
    peak = max(engine.load_peak_bytes, found.peak_bytes)
    seen = Measurement(
        CalibrationKey(scope, text), peak, engine.load_peak_bytes, found.prompt_tokens, time.time()
    )
    quoted = comparable_bytes(made.quote, Backend.CPU)
    quoted_mib, load_mib, peak_mib = (size // MIB for size in (quoted, seen.load_peak_bytes, peak))
    with capsys.disabled():
        print(  # noqa: T201  # the figures are what this test is for
            f"\n  {context} tokens, {slots} slots: quoted {quoted_mib} MiB, loading {load_mib}, after"
            f" {found.prompt_tokens} tokens {peak_mib}; load {engine.load_s:.2f} s, probe {found.seconds:.2f} s"
        )
    assert engine.load_peak_bytes <= found.peak_bytes
    assert peak <= quoted
    assert deviation(made.quote, seen) is None
    # A second batch takes nothing more: what the first showed is the peak.
    assert again.peak_bytes - found.peak_bytes < 8 * MIB
    known = Calibration(scope).measured(seen, quoted)
    assert calibrated(made.quote, text, known).total_bytes(Place.CARD) >= peak
