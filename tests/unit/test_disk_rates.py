"""What loads have seen of disks, remembered by where these are mounted."""

from __future__ import annotations

from pathlib import Path

import pytest

from lllm3090d.serving.disk_rates import DiskRates, mount_of
from lllm3090d.store import FILE_NAME, Store

pytestmark = pytest.mark.unit


def test_a_slower_one_counts_at_once_and_a_faster_one_by_half(tmp_path: Path) -> None:
    store = Store(tmp_path / FILE_NAME)
    rates, model = DiskRates(lambda: store), tmp_path / "m.gguf"
    assert rates.of(model) is None
    for seen, kept in ((100e6, 100e6), (20e6, 20e6), (100e6, 60e6), (0.0, 60e6), (-5.0, 60e6)):
        rates.saw(model, seen)
        assert rates.of(model) == kept
    store.close()
    again = Store(tmp_path / FILE_NAME)
    assert DiskRates(lambda: again).of(tmp_path / "another.gguf") == 60e6  # on the same disk
    assert DiskRates(lambda: again).of(Path("/proc/version")) is None
    again.close()


def test_a_disk_is_known_by_its_mount(tmp_path: Path) -> None:
    assert mount_of(Path("/proc/self/status")) == Path("/proc")
    assert mount_of(Path("/")) == Path("/")
    link = tmp_path / "link"
    link.symlink_to("/proc/version")
    assert mount_of(link) == Path("/proc")
    assert mount_of(tmp_path / "gone" / "x") == mount_of(tmp_path)


def test_a_state_file_that_cannot_be_used_costs_nothing(tmp_path: Path) -> None:
    place = tmp_path / FILE_NAME
    place.mkdir()
    store = Store(place)
    rates = DiskRates(lambda: store)
    rates.saw(tmp_path, 1e6)
    assert rates.of(tmp_path) == 1e6  # until the daemon ends
    store.close()
    assert rates.of(tmp_path) is None
