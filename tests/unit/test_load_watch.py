"""How long a load may take: on made-up clocks, and on the counters of real processes."""

from __future__ import annotations

import asyncio
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lllm3090d.gpus.sysfs import Roots
from lllm3090d.serving import readiness
from lllm3090d.serving.load_watch import (
    ASSUMED_DISK_BYTES_PER_S,
    LEAST_CAP_S,
    SLOWEST_DISK_BYTES_PER_S,
    LoadCounters,
    LoadLimits,
    LoadTrack,
    LoadVerdict,
    load_cap_s,
)
from lllm3090d.serving.observation import RunProcesses
from lllm3090d.serving.processes import load_counters_of, process_io
from tests.fakes.engine import install_fake_engine

pytestmark = pytest.mark.unit

NAMES = ("read_bytes", "disk_bytes", "written_bytes", "resident_bytes", "device_bytes")
STALL_S = 600.0


@pytest.fixture
def short_directory() -> Iterator[Path]:
    """One whose sockets have short paths wherever the tests run."""
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory)


@pytest.mark.parametrize("name", NAMES)
def test_each_counter_is_progress(name: str) -> None:
    track = LoadTrack.start(0.0).after(1.0, LoadCounters(**{name: 5}))
    assert track.idle_s == 0
    still = track.after(STALL_S, LoadCounters(**{name: 5}))
    assert still.idle_s == STALL_S - 1
    assert still.verdict(LoadLimits(STALL_S)) is LoadVerdict.GOES_ON
    assert (
        still.after(STALL_S + 1.1, LoadCounters(**{name: 5})).verdict(LoadLimits(STALL_S))
        is LoadVerdict.STALLED
    )
    assert still.after(STALL_S + 1.1, LoadCounters(**{name: 6})).idle_s == 0


def test_what_nobody_can_read_is_no_progress_and_no_end_of_it() -> None:
    track = LoadTrack.start(0.0).after(1.0, LoadCounters(read_bytes=9))
    track = track.after(2.0, LoadCounters()).after(3.0, LoadCounters(read_bytes=9))
    assert track.idle_s == 2.0
    assert track.after(4.0, LoadCounters(read_bytes=10)).idle_s == 0


def test_the_bound_is_for_loads_that_get_on() -> None:
    limits, track = LoadLimits(10.0, 100.0), LoadTrack.start(0.0)
    for second in range(1, 101):
        track = track.after(second, LoadCounters(read_bytes=second))
        assert track.verdict(limits) is LoadVerdict.GOES_ON
    assert track.after(100.5, LoadCounters(read_bytes=101)).verdict(limits) is LoadVerdict.TOO_LONG


def test_the_rate_of_the_disk_is_what_came_from_the_disk() -> None:
    track = LoadTrack.start(10.0)
    assert track.disk_bytes_per_s is None
    track = track.after(20.0, LoadCounters(read_bytes=10**9, disk_bytes=10**8))
    assert track.disk_bytes_per_s == 10**7
    # Shaders that are compiled afterwards say nothing of the disk, nor does the little that starts a program.
    assert track.after(90.0, LoadCounters(read_bytes=10**9, disk_bytes=10**8)).disk_bytes_per_s == 10**7
    assert LoadTrack.start(0.0).after(1.0, LoadCounters(disk_bytes=10**6)).disk_bytes_per_s is None
    assert LoadTrack.start(0.0).after(1.0, LoadCounters(read_bytes=5)).disk_bytes_per_s is None


def test_the_bound_follows_from_size_and_disk() -> None:
    assert load_cap_s(0) == LEAST_CAP_S
    assert load_cap_s(ASSUMED_DISK_BYTES_PER_S * 100) == LEAST_CAP_S + 800
    # A slow disk is waited for, a quick one (or a warm cache) promises nothing.
    assert load_cap_s(17 * 10**9, 5e6) > load_cap_s(17 * 10**9) == load_cap_s(17 * 10**9, 5e9)
    assert load_cap_s(17 * 10**9, 5e6, setting_s=60.0) == 60.0
    assert load_cap_s(10**9, 1.0) == load_cap_s(10**9, SLOWEST_DISK_BYTES_PER_S)  # no disk is that slow


def test_a_disk_that_turns_out_slow_is_waited_for() -> None:
    """17 GB at 1 MB/s, of which nobody knew: longer than the bound for an unknown disk, and it arrives."""
    size = 17 * 10**9
    limits, track = LoadLimits(60.0, load_cap_s(size), size), LoadTrack.start(0.0)
    chosen, hurried = LoadLimits(60.0, load_cap_s(size)), set()
    for second in range(10, 17_001, 10):
        track = track.after(second, LoadCounters(read_bytes=second * 10**6, disk_bytes=second * 10**6))
        assert track.verdict(limits) is LoadVerdict.GOES_ON
        hurried.add(track.verdict(chosen))
    assert LoadVerdict.TOO_LONG in hurried
    # One that goes on and on is given up all the same.
    track = track.after(17_000 + track.cap_s(limits), LoadCounters(read_bytes=10**12))
    assert track.verdict(LoadLimits(1e9, limits.cap_s, size)) is LoadVerdict.TOO_LONG


@given(
    st.lists(
        st.tuples(st.floats(0.01, STALL_S), st.sampled_from(NAMES), st.integers(1, 1000)),
        min_size=1,
        max_size=40,
    )
)
def test_a_load_that_gets_on_within_each_limit_never_stalls(steps: list[tuple[float, str, int]]) -> None:
    now, counters, track = 0.0, dict.fromkeys(NAMES, 0), LoadTrack.start(0.0)
    for pause, name, gain in steps:
        now += pause
        counters[name] += gain
        track = track.after(now, LoadCounters(**counters))
        assert track.verdict(LoadLimits(STALL_S)) is LoadVerdict.GOES_ON


@given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=60), st.integers(0, 1000))
def test_a_load_that_stands_still_is_found_at_the_first_look_after_the_limit(
    pauses: list[float], figure: int
) -> None:
    now, track = 1.0, LoadTrack.start(0.0).after(1.0, LoadCounters(read_bytes=figure))
    frozen_s = track.progressed_s
    for pause in pauses:
        now += pause
        # Memory that comes and goes below its highest is no progress either.
        track = track.after(now, LoadCounters(read_bytes=figure - int(now) % 2))
        stalled = track.verdict(LoadLimits(60.0)) is LoadVerdict.STALLED
        assert stalled is (now - frozen_s > 60.0)


@given(st.integers(0, 1 << 45), st.floats(SLOWEST_DISK_BYTES_PER_S, 1e11) | st.none())
def test_the_bound_is_never_below_what_reading_takes(size: int, rate: float | None) -> None:
    cap = load_cap_s(size, rate)
    assert math.isfinite(cap)
    assert cap >= size / (rate or ASSUMED_DISK_BYTES_PER_S)


# --- real counters -----------------------------------------------------------------------------------------


def test_a_process_that_reads_a_file_is_seen_to_read(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(os.urandom(1 << 20))
    code = (
        "import sys\n"
        "for line in sys.stdin:\n"
        f"    open({str(file)!r}, 'rb').read(1 << 16) if line == 'read\\n' else None\n"
        "    print('done', flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        run = RunProcesses(child.pid, None)
        child.stdin.write("wait\n")
        child.stdin.flush()
        child.stdout.readline()
        before = load_counters_of(run)
        child.stdin.write("read\n")
        child.stdin.flush()
        child.stdout.readline()
        after = load_counters_of(run)
        child.stdin.close()
    assert before.read_bytes is not None
    assert after.read_bytes is not None
    assert after.read_bytes - before.read_bytes >= 1 << 16
    assert after.written_bytes is not None
    assert after.written_bytes > 0
    assert after.resident_bytes is not None
    assert after.resident_bytes > 0
    # It has ended, and took its counters with it.
    assert load_counters_of(run) == LoadCounters()


def test_a_process_whose_counters_nobody_may_see(tmp_path: Path) -> None:
    assert process_io(1, tmp_path) is None
    place = tmp_path / "7"
    place.mkdir()
    (place / "status").write_text("VmRSS:\t 4 kB\n")
    (place / "cgroup").write_text("0::/x/a.service\n")
    seen = load_counters_of(RunProcesses(7, "/x/a.service"), Roots(proc=tmp_path, cgroup=tmp_path / "none"))
    assert seen == LoadCounters(resident_bytes=4096)


def load_the_fake(directory: Path, monkeypatch: pytest.MonkeyPatch, **behaviour: Any) -> LoadVerdict | None:
    """Load the fake engine for some seconds; nobody can tell what memory it holds."""
    monkeypatch.setattr(readiness, "PROGRESS_INTERVAL_S", 0.02)
    server = install_fake_engine(directory, load_s=3.0, steps=60, **behaviour) / "llama-server"
    model, socket = directory / "m.gguf", directory / "e.sock"
    model.write_bytes(b"GGUF" + bytes(1 << 16))
    with subprocess.Popen(
        [server, "--model", model, "--host", socket], stderr=subprocess.DEVNULL
    ) as process:
        # Python itself reads its modules at first; from the socket on only the load goes on.
        while not socket.exists():
            assert process.poll() is None
        own = min(readiness.cgroups_of(process.pid))
        run = RunProcesses(process.pid, None)
        try:
            return asyncio.run(
                readiness.wait_until_ready(
                    socket,
                    lambda: own,
                    lambda: 0,
                    lambda _: None,
                    limits=LoadLimits(1.2),  # less than the load, and far more than a step
                    counters=lambda: replace(load_counters_of(run), resident_bytes=None),
                )
            )
        finally:
            process.kill()


def test_an_engine_that_only_reads_is_waited_for(
    short_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_the_fake(short_directory, monkeypatch, step_reads_kib=4) is None


def test_an_engine_that_does_nothing_is_given_up(
    short_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_the_fake(short_directory, monkeypatch) is LoadVerdict.STALLED
