"""Limits of device memory by control group, where the kernel has them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lllm3090d.gpus.dmem import capacities, limit, limit_of, region_of, unified_root, used_bytes
from lllm3090d.gpus.readings import Card, CardKind

pytestmark = pytest.mark.unit

CARD = Card(CardKind.AMD, "GPU-1", "a card", None, pci_address="0000:03:00.0")
REGION = "drm/0000:03:00.0/vram"
UNIT = "/user.slice/user-1000.slice/lllm3090-a.service"
SIZE = 8 << 30


@pytest.fixture
def cgroup(tmp_path: Path) -> Path:
    (tmp_path / "dmem.capacity").write_text(f"{REGION} 25753026560\ndrm/0000:04:00.0/vram0 8514437120\n")
    (tmp_path / "dmem.current").write_text(f"{REGION} 1048576\ndrm/0000:04:00.0/vram0 0\n")
    (tmp_path / UNIT.lstrip("/")).mkdir(parents=True)
    return tmp_path


def limits_file(cgroup: Path) -> Path:
    return cgroup / UNIT.lstrip("/") / "dmem.max"


def test_the_region_of_a_card(cgroup: Path) -> None:
    assert capacities("0000:03:00.0", cgroup) == {REGION: 25753026560}
    assert region_of(CARD, cgroup) == REGION
    assert used_bytes({REGION: 1}, cgroup) == 1048576


@pytest.mark.parametrize(
    "card",
    [
        Card(
            CardKind.NVIDIA, "GPU-1", "a card", None, pci_address="0000:01:00.0"
        ),  # its driver has no region
        Card(CardKind.NVIDIA, "GPU-1", "a card", None),
        Card(CardKind.CPU, "host", "host memory", None),
    ],
)
def test_a_card_without_a_region(cgroup: Path, card: Card) -> None:
    assert region_of(card, cgroup) is None


def test_two_regions_cannot_share_one_limit(cgroup: Path) -> None:
    (cgroup / "dmem.capacity").write_text("drm/0000:03:00.0/vram0 1\ndrm/0000:03:00.0/vram1 1\n")
    assert region_of(CARD, cgroup) is None


def test_a_kernel_without_the_controller(tmp_path: Path) -> None:
    assert capacities("0000:03:00.0", tmp_path) == {}
    assert region_of(CARD, tmp_path) is None
    assert used_bytes({REGION: 1}, tmp_path) is None
    assert used_bytes({}, tmp_path) is None
    assert not limit(UNIT, REGION, SIZE, tmp_path)


def test_use_is_unknown_where_one_region_is_not_told(cgroup: Path) -> None:
    assert used_bytes({REGION: 1, "drm/0000:05:00.0/vram0": 1}, cgroup) is None


def test_damaged_lines_are_no_regions(cgroup: Path) -> None:
    (cgroup / "dmem.capacity").write_text(f"{REGION}\n{REGION} many\n{REGION} -1\n\n{REGION}extra 12\n")
    assert capacities("0000:03:00.0", cgroup) == {}


def test_a_limit_is_written_and_read_back(cgroup: Path) -> None:
    limits_file(cgroup).write_text(f"{REGION} max\n")
    assert limit_of(UNIT, REGION, cgroup) is None
    assert limit(UNIT, REGION, SIZE, cgroup)
    assert limits_file(cgroup).read_text() == f"{REGION} {SIZE}\n"
    assert limit_of(UNIT, REGION, cgroup) == SIZE


def test_the_hybrid_layout_has_it_one_level_below(cgroup: Path) -> None:
    (cgroup / "unified").mkdir()
    (cgroup / "unified" / "cgroup.controllers").write_text("dmem\n")
    assert unified_root(cgroup) == cgroup / "unified"
    assert region_of(CARD, cgroup) is None


def test_a_unit_without_the_file_gets_no_limit_and_no_file(cgroup: Path) -> None:
    assert not limit(UNIT, REGION, SIZE, cgroup)
    assert not limits_file(cgroup).exists()
    assert not limit("/gone.service", REGION, SIZE, cgroup)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everything")
def test_a_file_that_may_not_be_written_to_gives_no_limit(cgroup: Path) -> None:
    limits_file(cgroup).write_text(f"{REGION} max\n")
    limits_file(cgroup).chmod(0o444)
    assert not limit(UNIT, REGION, SIZE, cgroup)
    assert limit_of(UNIT, REGION, cgroup) is None


def test_a_kernel_that_keeps_another_value_has_no_limit_in_force(cgroup: Path) -> None:
    limits_file(cgroup).symlink_to("/dev/null")
    assert not limit(UNIT, REGION, SIZE, cgroup)


@pytest.mark.parametrize("size", [0, -1])
def test_no_limit_at_which_nothing_runs(cgroup: Path, size: int) -> None:
    with pytest.raises(ValueError, match="no such limit"):
        limit(UNIT, REGION, size, cgroup)
