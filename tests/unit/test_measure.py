"""What the kernel says of a process, and which part of a reading is ours."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lllm3090d.gpus.host import HostMemoryReader
from lllm3090d.gpus.readings import Card, CardKind, CardProcess, MemoryReading
from lllm3090d.serving.measure import KIB, ProcessMemory, observe, process_memory

pytestmark = pytest.mark.unit

MIB = 1024 * KIB
# A process that holds this much more than an idle interpreter, and says when it does.
HOLD_BYTES = 64 * MIB
HOLDER = f"import sys; held = bytearray(b'x') * {HOLD_BYTES}; print('held', flush=True); sys.stdin.read(); del held"
IDLER = "import sys; print('held', flush=True); sys.stdin.read()"


def started(code: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-I", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


@pytest.fixture
def holder() -> Iterator[subprocess.Popen[str]]:
    with started(HOLDER) as process:
        yield process
        process.kill()


@pytest.fixture
def idler() -> Iterator[subprocess.Popen[str]]:
    with started(IDLER) as process:
        yield process
        process.kill()


def memory_of(process: subprocess.Popen[str]) -> ProcessMemory:
    memory = process_memory(process.pid)
    assert memory is not None
    return memory


def test_what_a_process_holds_is_seen(holder: subprocess.Popen[str], idler: subprocess.Popen[str]) -> None:
    more, less = memory_of(holder), memory_of(idler)
    for grown in (
        more.resident_bytes - less.resident_bytes,
        more.anonymous_bytes - less.anonymous_bytes,
    ):
        # Two interpreters differ by less than this.
        assert abs(grown - HOLD_BYTES) < 4 * MIB
    assert less.anonymous_bytes < less.resident_bytes  # the interpreter's own files are mapped


def test_a_process_that_is_gone_holds_nothing_that_is_known(idler: subprocess.Popen[str]) -> None:
    idler.kill()
    idler.wait()
    assert process_memory(idler.pid) is None


def test_a_zombie_holds_nothing(idler: subprocess.Popen[str]) -> None:
    idler.kill()
    os.waitid(os.P_PID, idler.pid, os.WEXITED | os.WNOWAIT)
    assert process_memory(idler.pid) == ProcessMemory(0, 0)


def test_mapped_files_are_resident_but_not_anonymous(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "status").write_text(
        "Name:\tllama: server\nVmRSS:\t    1000 kB\nRssAnon:\t     100 kB\nRssFile:\t     880 kB\n"
        "RssShmem:\t      20 kB\n"
    )
    assert process_memory(7, tmp_path) == ProcessMemory(1000 * KIB, 120 * KIB)


class PreparedReader:
    """A card whose reading was made by the test."""

    def __init__(self, *processes: CardProcess) -> None:
        self.card = Card(CardKind.NVIDIA, "GPU-1", "a card", "580.95.05")
        self.reading = MemoryReading(1.0, 24 * MIB, MIB, 10 * MIB, 13 * MIB, processes)

    def read(self) -> MemoryReading:
        return self.reading

    def close(self) -> None:
        """Nothing is held."""


def test_on_a_card_the_drivers_list_says_what_is_ours() -> None:
    reader = PreparedReader(CardProcess(10, 3 * MIB), CardProcess(11, 5 * MIB), CardProcess(12, None))
    seen = observe(reader, {"a": 10, "b": 99, "c": 12}, desktop_active=True)
    assert seen.resident == seen.in_use == {"a": 3 * MIB}
    assert seen.reading is reader.reading
    assert seen.card is reader.card
    assert seen.desktop_active is True


def test_a_process_on_the_card_that_holds_nothing_yet_is_told_from_an_absent_one() -> None:
    seen = observe(PreparedReader(CardProcess(10, 0)), {"a": 10, "b": 11}, None)
    assert seen.resident == {"a": 0}


def test_in_host_memory_the_kernel_says_what_is_ours(
    holder: subprocess.Popen[str], idler: subprocess.Popen[str]
) -> None:
    idler.kill()
    idler.wait()
    seen = observe(HostMemoryReader(), {"a": holder.pid, "gone": idler.pid}, None)
    assert seen.card.kind is CardKind.CPU
    assert seen.resident.keys() == seen.in_use.keys() == {"a"}
    assert HOLD_BYTES < seen.in_use["a"] < seen.resident["a"]
    assert seen.desktop_active is None
