"""Host memory in the place of a card."""

from __future__ import annotations

from pathlib import Path

import pytest

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.detect import open_cards
from lllm3090d.gpus.host import HostMemoryReader
from lllm3090d.gpus.readings import CardKind
from lllm3090d.settings import CardChoice

pytestmark = pytest.mark.unit

MEMINFO = """\
MemTotal:       32768000 kB
MemFree:          100000 kB
MemAvailable:   20000000 kB
HugePages_Total:       0
SwapTotal:       8000000 kB
"""


def _reader(tmp_path: Path, text: str) -> HostMemoryReader:
    file = tmp_path / "meminfo"
    file.write_text(text, encoding="utf-8")
    return HostMemoryReader(file)


def test_available_counts_as_free(tmp_path: Path) -> None:
    reader = _reader(tmp_path, MEMINFO)
    reading = reader.read()

    assert (reading.total_bytes, reading.free_bytes) == (32768000 * 1024, 20000000 * 1024)
    assert reading.used_bytes == 12768000 * 1024
    assert reading.reserved_bytes == 0
    assert not reading.processes_known
    assert (reader.card.kind, reader.card.uuid, reader.card.driver_version) == (CardKind.CPU, "host", None)
    reader.close()


def test_each_reading_is_fresh(tmp_path: Path) -> None:
    reader = _reader(tmp_path, MEMINFO)
    first = reader.read()
    _reader(tmp_path, MEMINFO.replace("20000000", "10000000"))
    second = reader.read()

    assert second.free_bytes == 10000000 * 1024
    assert second.taken_monotonic_s >= first.taken_monotonic_s


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no MemTotal and no MemAvailable"),
        ("MemTotal: 1000 kB\n", "no MemAvailable"),
        ("MemTotal: many kB\nMemAvailable: 10 kB\n", "no MemTotal"),
        ("MemTotal: 1000 MB\nMemAvailable: 10 kB\n", "no MemTotal"),
        ("MemTotal: 0 kB\nMemAvailable: 0 kB\n", "cannot be true"),
        ("MemTotal: 1000 kB\nMemAvailable: 1001 kB\n", "cannot be true"),
        ("MemTotal: 1000 kB\nMemAvailable: 10 kB\nx: ü\n", "cannot be read"),
    ],
)
def test_damaged_figures_are_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(LlmError) as caught:
        _reader(tmp_path, text).read()
    assert caught.value.code is ErrorCode.CARD_UNREADABLE
    assert said in caught.value.message


def test_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LlmError) as caught:
        HostMemoryReader(tmp_path / "none").read()
    assert caught.value.code is ErrorCode.CARD_UNREADABLE


def test_this_machine() -> None:
    (reader,) = open_cards(CardChoice.CPU)
    reading = reader.read()
    assert 0 < reading.free_bytes <= reading.total_bytes
