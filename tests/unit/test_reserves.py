"""What a card can give, line by line."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.readings import Card, CardKind, MemoryReading
from lllm3090d.planning.reserves import Budget, BudgetLine, Claims, ReservePolicy, budget, host_reserve_bytes
from lllm3090d.planning.units import MIB

pytestmark = pytest.mark.unit

RTX_3090 = Card(CardKind.NVIDIA, "GPU-3090", "NVIDIA GeForce RTX 3090", "580.95.05")
HOST = Card(CardKind.CPU, "host", "host memory", None)
POLICY = ReservePolicy(driver_reserve_mib=512, desktop_reserve_mib=2400)
NO_CLAIMS = Claims()
TOTAL_MIB = 24_576
RESERVED_MIB = 451  # measured on an RTX 3090


def reading(
    used_mib: int = 0, reserved_mib: int | None = RESERVED_MIB, total_mib: int = TOTAL_MIB
) -> MemoryReading:
    """A card's reading: free is the driver's own figure, without what it keeps for itself."""
    return MemoryReading(
        taken_monotonic_s=1.0,
        total_bytes=total_mib * MIB,
        reserved_bytes=None if reserved_mib is None else reserved_mib * MIB,
        used_bytes=used_mib * MIB,
        free_bytes=(total_mib - (reserved_mib or 0) - used_mib) * MIB,
        processes=(),
    )


def host_reading(total_mib: int, used_mib: int) -> MemoryReading:
    return replace(reading(used_mib, None, total_mib), reserved_bytes=None)


def line(lines: tuple[BudgetLine, ...], name: str) -> int:
    """MiB of a line; 0 where there is none."""
    return sum(item.bytes for item in lines if item.name == name) // MIB


def names(lines: tuple[BudgetLine, ...]) -> list[str]:
    return [item.name for item in lines]


def test_an_empty_headless_card() -> None:
    given_now = budget(RTX_3090, reading(), NO_CLAIMS, False, POLICY)
    assert given_now.available_bytes == given_now.live_bytes == (TOTAL_MIB - RESERVED_MIB) * MIB
    assert given_now.grantable_bytes == 24_125 * MIB
    assert names(given_now.lines) == ["total", "driver"]


def test_the_drivers_live_figure_replaces_the_setting() -> None:
    told = budget(RTX_3090, reading(), NO_CLAIMS, False, POLICY)
    silent = budget(RTX_3090, reading(reserved_mib=None), NO_CLAIMS, False, POLICY)
    assert line(told.lines, "driver") == -451
    assert line(silent.lines, "driver") == -512
    zero = budget(RTX_3090, reading(reserved_mib=0), NO_CLAIMS, False, POLICY)
    assert line(zero.lines, "driver") == 0


@pytest.mark.parametrize("active", [True, None])
def test_a_desktop_is_reserved_for_even_where_it_is_unknown(active: bool | None) -> None:
    """An idle desktop uses 300 MiB now and may take 2100 more."""
    given_now = budget(RTX_3090, reading(used_mib=300), NO_CLAIMS, active, POLICY)
    assert line(given_now.lines, "desktop reserve") == -2400
    assert line(given_now.live_lines, "desktop reserve") == -2100
    assert given_now.available_bytes == given_now.live_bytes == (TOTAL_MIB - RESERVED_MIB - 2400) * MIB
    origin = next(item.origin for item in given_now.lines if item.name == "desktop reserve")
    assert ("unknown" in origin) is (active is None)


def test_a_desktop_that_takes_more_than_its_reserve_is_charged_as_it_is() -> None:
    given_now = budget(RTX_3090, reading(used_mib=5000), NO_CLAIMS, True, POLICY)
    assert line(given_now.lines, "other processes") == -5000
    assert "desktop reserve" not in names(given_now.lines)
    assert line(given_now.live_lines, "desktop reserve") == 0
    assert given_now.grantable_bytes == (TOTAL_MIB - RESERVED_MIB - 5000) * MIB


def test_our_own_models_are_not_foreign() -> None:
    """8000 MiB are used, 7000 of them by our engine that was granted 7500."""
    claims = Claims(charged_bytes=7500 * MIB, held_bytes=7000 * MIB)
    given_now = budget(RTX_3090, reading(used_mib=8000), claims, False, POLICY)
    assert line(given_now.lines, "other processes") == -1000
    assert line(given_now.lines, "our models") == -7500
    assert given_now.available_bytes == (24_125 - 1000 - 7500) * MIB
    assert given_now.live_bytes == (24_125 - 8000) * MIB
    assert given_now.grantable_bytes == given_now.available_bytes
    assert given_now.deciding_lines == given_now.lines


def test_a_loading_model_is_not_granted_twice() -> None:
    """Free memory still shows what a loading engine was promised."""
    claims = Claims(charged_bytes=10_000 * MIB, still_to_come_bytes=9000 * MIB, held_bytes=1000 * MIB)
    given_now = budget(RTX_3090, reading(used_mib=1000), claims, False, POLICY)
    assert given_now.live_bytes == given_now.available_bytes == (24_125 - 10_000) * MIB


def test_memory_that_disappeared_is_seen_by_the_live_side() -> None:
    """Free is less than the promises explain: the smaller side decides and explains itself."""
    strange = replace(reading(), free_bytes=1000 * MIB)
    given_now = budget(RTX_3090, strange, NO_CLAIMS, False, POLICY)
    assert given_now.grantable_bytes == 1000 * MIB
    assert given_now.deciding_lines == given_now.live_lines


def test_quarantine_is_charged() -> None:
    claims = Claims(quarantined_bytes=3000 * MIB)
    given_now = budget(RTX_3090, reading(), claims, False, POLICY)
    assert given_now.grantable_bytes == (24_125 - 3000) * MIB
    assert line(given_now.lines, "quarantine") == -3000


def test_more_promised_than_there_is_grants_nothing() -> None:
    given_now = budget(RTX_3090, reading(), Claims(charged_bytes=30_000 * MIB), False, POLICY)
    assert given_now.available_bytes < 0
    assert given_now.grantable_bytes == 0


def test_processes_that_hold_more_than_the_card_shows_make_no_memory() -> None:
    given_now = budget(RTX_3090, reading(used_mib=100), Claims(held_bytes=500 * MIB), False, POLICY)
    assert given_now.available_bytes == (TOTAL_MIB - RESERVED_MIB) * MIB


@pytest.mark.parametrize(("total_mib", "reserve_mib"), [(8192, 2048), (20_480, 2048), (65_536, 6553.6)])
def test_the_machine_keeps_its_share(total_mib: int, reserve_mib: float) -> None:
    assert host_reserve_bytes(total_mib * MIB) == int(reserve_mib * MIB)


@pytest.mark.parametrize("active", [True, False, None])
def test_host_memory_has_neither_driver_nor_desktop(active: bool | None) -> None:
    """16 GiB, 4 GiB used of which our engine holds 1: the machine keeps 2 GiB on both sides."""
    claims = Claims(charged_bytes=1500 * MIB, held_bytes=1024 * MIB)
    given_now = budget(HOST, host_reading(16_384, 4096), claims, active, POLICY)
    assert names(given_now.lines) == ["total", "own reserve", "other processes", "our models"]
    assert names(given_now.live_lines) == ["free", "own reserve"]
    assert given_now.available_bytes == (16_384 - 2048 - 3072 - 1500) * MIB
    assert given_now.live_bytes == (12_288 - 2048) * MIB


def test_a_machine_smaller_than_its_reserve_gives_nothing() -> None:
    assert budget(HOST, host_reading(1024, 500), NO_CLAIMS, False, POLICY).grantable_bytes == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"used_bytes": -1}, "used_bytes is -1"),
        ({"free_bytes": -1}, "free_bytes is -1"),
        ({"reserved_bytes": -1}, "reserved_bytes is -1"),
        ({"total_bytes": -1}, "total_bytes is -1"),
        ({"total_bytes": 0}, "total_bytes is 0"),
        ({"used_bytes": (TOTAL_MIB + 1) * MIB}, "used_bytes"),
        ({"free_bytes": (TOTAL_MIB + 1) * MIB}, "free_bytes"),
        ({"reserved_bytes": (TOTAL_MIB + 1) * MIB}, "reserved_bytes"),
    ],
)
@pytest.mark.parametrize("card", [RTX_3090, HOST])
def test_a_reading_that_cannot_be_is_refused(card: Card, changes: dict[str, int], words: str) -> None:
    absurd = replace(reading(), **changes)  # type: ignore[arg-type]  # figures only, by the table above
    with pytest.raises(LlmError, match=words) as caught:
        budget(card, absurd, NO_CLAIMS, False, POLICY)
    assert caught.value.code is ErrorCode.CARD_UNREADABLE
    assert caught.value.hint is not None


@pytest.mark.parametrize(
    "field", ["charged_bytes", "still_to_come_bytes", "held_bytes", "quarantined_bytes"]
)
def test_negative_claims_are_a_mistake_of_the_caller(field: str) -> None:
    with pytest.raises(ValueError, match="negative"):
        Claims(**{field: -1})


sizes_mib = st.integers(0, 60_000)
claims_of_any_size = st.builds(Claims, *[sizes_mib.map(lambda mib: mib * MIB)] * 4)


@given(
    card=st.sampled_from([RTX_3090, HOST]),
    used_mib=st.integers(0, TOTAL_MIB - RESERVED_MIB),
    claims=claims_of_any_size,
    active=st.sampled_from([True, False, None]),
    more_mib=st.integers(1, 5000),
)
def test_what_is_taken_never_makes_more(
    *, card: Card, used_mib: int, claims: Claims, active: bool | None, more_mib: int
) -> None:
    """Every claim and a desktop lower what can be granted or leave it; nothing exceeds what is free."""

    def grantable(claims: Claims, active: bool | None) -> Budget:
        return budget(card, reading(used_mib), claims, active, POLICY)

    base = grantable(claims, active)
    assert base.available_bytes == sum(item.bytes for item in base.lines)
    assert base.live_bytes == sum(item.bytes for item in base.live_lines)
    assert 0 <= base.grantable_bytes <= max(0, reading(used_mib).free_bytes)
    for field in ("charged_bytes", "still_to_come_bytes", "quarantined_bytes"):
        larger = replace(claims, **{field: getattr(claims, field) + more_mib * MIB})
        assert grantable(larger, active).grantable_bytes <= base.grantable_bytes
    assert base.grantable_bytes <= grantable(claims, False).grantable_bytes
