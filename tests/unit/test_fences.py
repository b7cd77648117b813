"""Limits of device memory on a unit: for each of its cards, above the price, and only where they take effect."""

from __future__ import annotations

from pathlib import Path

import pytest

from lllm3090d.gpus.readings import Card, CardKind
from lllm3090d.planning.quote import Evidence, LineItem, Place
from lllm3090d.serving.fences import Fence, fence, limits
from lllm3090d.serving.ledger import Ledger, Share
from lllm3090d.serving.observation import HOST

pytestmark = pytest.mark.unit

GIB, MIB = 1 << 30, 1 << 20
GROUP = "/user.slice/lllm3090-a.service"
FIRST = Card(CardKind.AMD, "GPU-a", "a card", None, 24 * GIB, pci_address="0000:03:00.0")
SECOND = Card(CardKind.AMD, "GPU-b", "a card", None, 16 * GIB, pci_address="0000:04:00.0")
GREEN = Card(CardKind.NVIDIA, "GPU-c", "a card", None, 16 * GIB, pci_address="0000:05:00.0")
CARDS = (FIRST, SECOND, GREEN)


def _ledger(**sizes: int) -> Ledger:
    ledger = Ledger()
    ledger.hold(
        "run",
        "a",
        [
            Share(where, (LineItem("weights", Place.CARD, size, Evidence.HEADER, ""),))
            for where, size in sizes.items()
        ],
    )
    return ledger


@pytest.fixture
def cgroup(tmp_path: Path) -> Path:
    """A kernel with the controller, and a file that keeps what is written."""
    (tmp_path / "dmem.capacity").write_text(
        f"drm/0000:03:00.0/vram {24 * GIB}\ndrm/0000:04:00.0/vram {16 * GIB}\n"
    )
    unit = tmp_path / GROUP.lstrip("/")
    unit.mkdir(parents=True)
    (unit / "dmem.max").write_text("")
    return tmp_path


def test_the_share_of_a_card_and_a_margin(cgroup: Path) -> None:
    held = _ledger(**{FIRST.uuid: 10 * GIB, HOST: GIB}).of("run")
    wanted = 10 * GIB + GIB  # a tenth
    assert fence(GROUP, held, CARDS, cgroup) == (Fence(FIRST.uuid, wanted),)
    assert limits(GROUP, CARDS, cgroup) == {FIRST.uuid: wanted}


def test_small_shares_have_the_least_margin(cgroup: Path) -> None:
    assert fence(GROUP, _ledger(**{SECOND.uuid: GIB}).of("run"), CARDS, cgroup) == (
        Fence(SECOND.uuid, GIB + 512 * MIB),
    )


def test_what_was_seen_to_be_taken_is_allowed(cgroup: Path) -> None:
    ledger = _ledger(**{FIRST.uuid: 10 * GIB})
    ledger.confirm("run", {FIRST.uuid: 20 * GIB})
    assert fence(GROUP, ledger.of("run"), CARDS, cgroup)[0].limit_bytes == 22 * GIB


@pytest.mark.parametrize("shares", [{GREEN.uuid: GIB}, {HOST: GIB}, {"GPU-gone": GIB}, {FIRST.uuid: 0}])
def test_no_limit_where_there_is_none_to_set(cgroup: Path, shares: dict[str, int]) -> None:
    assert fence(GROUP, _ledger(**shares).of("run"), CARDS, cgroup) == ()
    assert limits(GROUP, CARDS, cgroup) == {}


def test_a_group_that_may_not_be_written_to(cgroup: Path) -> None:
    held = _ledger(**{FIRST.uuid: GIB}).of("run")
    assert fence("/user.slice/other.service", held, CARDS, cgroup) == ()
    assert limits("/user.slice/other.service", CARDS, cgroup) == {}
    assert limits(None, CARDS, cgroup) == {}
