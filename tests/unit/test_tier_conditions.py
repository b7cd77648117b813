"""When a cache can be split, how fast it is then, and whether the host has room."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lllm3090d.checkpoints.facts import CheckpointFacts
from lllm3090d.engines.capabilities import Backend
from lllm3090d.gpus.readings import LANE_BYTES_PER_S
from lllm3090d.planning import cache
from lllm3090d.planning.cache import CacheShape, CacheType
from lllm3090d.planning.placement import EVERYTHING, Placement
from lllm3090d.planning.tier import DEVICE_PAGE_BYTES, LEAST_LINE_TOKENS, LONG_LINE_TOKENS
from lllm3090d.planning.tier_choice import SHORT_LINE_TOKENS, WORKING_DEPTH_TOKENS
from lllm3090d.planning.tier_conditions import (
    HOST_HEADROOM_BYTES,
    LEAST_DRIVER,
    PINNED_PERCENT,
    TIER_TYPES,
    Condition,
    HostMemory,
    TierMachine,
    host_conditions,
    shared_line_caution,
    unmet_conditions,
)
from lllm3090d.planning.tier_speed import (
    GB,
    LINK_PERCENT,
    MEASURED_LINKS,
    WIDTHS,
    DecodeStep,
    LinkSpeed,
    link_speed,
    tokens_per_s,
)
from lllm3090d.planning.units import MIB
from tests.unit.engine_truth import facts_of

pytestmark = pytest.mark.unit

HYBRID = facts_of("qwen3.5-27b-mtp")
GIB = 1024 * MIB
GOOD = TierMachine(
    offered=True, backend=Backend.CUDA, cards=1, virtual_memory=True, driver_version="580.95.05"
)
Q8_0 = (CacheType.Q8_0, CacheType.Q8_0)


def shape_of(facts: CheckpointFacts, parallel: int = 1, *, unified: bool = False) -> CacheShape:
    return cache.cache_shape(
        facts,
        context_tokens=32_768,
        parallel=parallel,
        batch_tokens=2048,
        micro_batch_tokens=512,
        unified=unified,
    )


def unmet(  # noqa: PLR0917  # one argument for each thing that is varied
    machine: TierMachine = GOOD,
    placement: Placement = EVERYTHING,
    types: tuple[CacheType, CacheType] = Q8_0,
    facts: CheckpointFacts = HYBRID,
    shape: CacheShape | None = None,
    flash_attention: bool = True,
) -> dict[Condition, str]:
    found = unmet_conditions(
        facts, machine, placement, shape or shape_of(facts), types, flash_attention=flash_attention
    )
    assert all(each.reason.endswith(".") for each in found)
    return {each.condition: each.reason for each in found}


def test_nothing_is_missing_where_all_holds() -> None:
    assert unmet() == {}
    for each in TIER_TYPES:
        assert unmet(types=(each, each)) == {}
    assert unmet(facts=facts_of("qwen3-8b")) == {}
    assert unmet(shape=shape_of(HYBRID, 3, unified=True)) == {}


@pytest.mark.parametrize(
    ("machine", "condition", "words"),
    [
        (replace(GOOD, offered=False), Condition.OFFERED, "--kv-vram-cells"),
        (replace(GOOD, backend=Backend.ROCM), Condition.ONE_CUDA_DEVICE, "rocm"),
        (replace(GOOD, backend=Backend.VULKAN), Condition.ONE_CUDA_DEVICE, "vulkan"),
        (replace(GOOD, backend=Backend.UNKNOWN), Condition.ONE_CUDA_DEVICE, "unknown"),
        (replace(GOOD, cards=2), Condition.ONE_CUDA_DEVICE, "2 devices"),
        (replace(GOOD, cards=0), Condition.ONE_CUDA_DEVICE, "no card"),
        (replace(GOOD, virtual_memory=False), Condition.VIRTUAL_MEMORY, "reports none"),
        (replace(GOOD, virtual_memory=None), Condition.VIRTUAL_MEMORY, "has not said"),
        (replace(GOOD, driver_version="579.99"), Condition.DRIVER, "579.99"),
        (replace(GOOD, driver_version="570.195.03"), Condition.DRIVER, "570.195.03"),
        (replace(GOOD, driver_version=None), Condition.DRIVER, "nobody knows"),
        (replace(GOOD, driver_version=""), Condition.DRIVER, "nobody knows"),
        (replace(GOOD, driver_version="580\n600"), Condition.DRIVER, "580\\n600"),
        (replace(GOOD, driver_version="9" * 400), Condition.DRIVER, "999"),
        (replace(GOOD, driver_version="-600.1"), Condition.DRIVER, "-600.1"),
    ],
)
def test_each_condition_of_the_machine(machine: TierMachine, condition: Condition, words: str) -> None:
    found = unmet(machine)
    assert set(found) == {condition}
    assert words in found[condition]


@pytest.mark.parametrize("version", ["580", "580.0", "591.86", "610.43.02"])
def test_drivers_that_are_new_enough(version: str) -> None:
    assert unmet(replace(GOOD, driver_version=version)) == {}


def test_each_condition_of_the_launch() -> None:
    assert set(unmet(placement=Placement(layers_on_card=20))) == {Condition.ALL_LAYERS}
    assert set(unmet(placement=Placement(expert_layers_on_host=3))) == {Condition.ALL_LAYERS}
    assert set(unmet(placement=Placement(cache_on_host=True))) == {Condition.CACHE_ON_CARD}
    assert set(unmet(flash_attention=False)) == {Condition.FLASH_ATTENTION}
    assert set(unmet(shape=shape_of(HYBRID, 3))) == {Condition.ONE_STREAM}
    for types in ((CacheType.Q8_0, CacheType.Q4_0), (CacheType.F16, CacheType.Q8_0)):
        assert set(unmet(types=types)) == {Condition.CACHE_TYPES}
    for each in set(CacheType) - set(TIER_TYPES):
        assert str(each) in unmet(types=(each, each))[Condition.CACHE_TYPES]


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("gemma-3-27b", "sliding window"),
        ("gpt-oss-20b", "sliding window"),
        ("gemma-3n-e4b", "sliding window"),
        ("deepseek-v2-lite", "latent attention"),
        ("mamba-2.8b", "no attention cache"),
    ],
)
def test_models_whose_cache_cannot_be_split(model: str, words: str) -> None:
    found = unmet(facts=facts_of(model))
    assert set(found) == {Condition.KIND_OF_CACHE}
    assert words in found[Condition.KIND_OF_CACHE]


def test_keys_and_values_of_different_width() -> None:
    layers = (replace(HYBRID.layers[3], v_values=512), *HYBRID.layers)
    found = unmet(facts=replace(HYBRID, layers=layers))
    assert set(found) == {Condition.EQUAL_WIDTHS}


def test_an_index_beside_the_cache() -> None:
    layers = (replace(HYBRID.layers[3], index_values=128), *HYBRID.layers)
    assert set(unmet(facts=replace(HYBRID, layers=layers))) == {Condition.KIND_OF_CACHE}


def test_all_reasons_are_given_at_once() -> None:
    nothing = TierMachine(offered=False, backend=Backend.CPU, cards=0)
    found = unmet(nothing, types=(CacheType.Q5_1, CacheType.Q8_0), shape=shape_of(HYBRID, 2))
    assert len(found) == 6


def test_several_slots_share_a_line() -> None:
    assert shared_line_caution(shape_of(HYBRID)) is None
    caution = shared_line_caution(shape_of(HYBRID, 3, unified=True))
    assert caution is not None and "3 slots share one line" in caution


# --- the host ---


def test_the_host_has_room_or_says_what_it_lacks() -> None:
    pinned, other = 5 * GIB, 7 * GIB
    roomy = HostMemory(available_bytes=40 * GIB, total_bytes=64 * GIB)
    assert host_conditions(pinned, other, roomy) == ()
    exact = replace(roomy, available_bytes=pinned + other + HOST_HEADROOM_BYTES)
    assert host_conditions(pinned, other, exact) == ()
    (short,) = host_conditions(pinned, other, replace(exact, available_bytes=exact.available_bytes - 1))
    assert short.condition is Condition.HOST_MEMORY
    assert "5120 MiB pinned, 7168 MiB for the rest" in short.reason
    (half,) = host_conditions(pinned, 0, HostMemory(9 * GIB, 10 * GIB - 1))
    assert half.condition is Condition.PINNED_SHARE
    (limit,) = host_conditions(pinned, other, replace(roomy, limit_bytes=12 * GIB - 1))
    assert limit.condition is Condition.MEMORY_LIMIT
    assert host_conditions(pinned, other, replace(roomy, limit_bytes=12 * GIB)) == ()
    assert len(host_conditions(pinned, other, HostMemory(0, 0, 0))) == 3


@given(
    pinned=st.integers(0, 1 << 40),
    other=st.integers(0, 1 << 40),
    available=st.integers(0, 1 << 41),
    more=st.integers(0, 1 << 40),
)
def test_more_host_memory_never_takes_a_tier_away(
    pinned: int, other: int, available: int, more: int
) -> None:
    before = host_conditions(pinned, other, HostMemory(available, 2 * available))
    after = host_conditions(pinned, other, HostMemory(available + more, 2 * (available + more)))
    assert {each.condition for each in after} <= {each.condition for each in before}


# --- speed ---

X16_4 = LinkSpeed(MEASURED_LINKS[4, 16], "measured on PCIe 4.0 x16")
X16_3 = LinkSpeed(MEASURED_LINKS[3, 16], "measured on PCIe 3.0 x16")
Q8_CELL, Q4_CELL = 34_816, 18_432


@pytest.mark.parametrize(
    ("step", "link", "line", "cell", "rows"),
    [
        # Depth, published prediction, measured. Published depths count in thousands.
        (
            DecodeStep(2.45, 0.036, "Mirai S, RTX 4070"),
            X16_4,
            57_856,
            Q8_CELL,
            ((60_000, 62.6, 61.7), (120_000, 19.2, 19.5), (180_000, 11.4, 11.4)),
        ),
        (
            DecodeStep(2.40, 0.036, "Mirai S, RTX 3090"),
            X16_3,
            44_000,
            Q8_CELL,
            ((60_000, 29.7, 27.9), (120_000, 9.7, 9.5), (180_000, 5.8, 5.8)),
        ),
        (
            DecodeStep(1.78, 0.034, "Bonsai 2, RTX 2060 SUPER"),
            LinkSpeed(13 * GB, "measured there"),
            59_904,
            Q4_CELL,
            ((96_000, 20.9, 20.1), (128_000, 13.6, 14.2), (160_000, 10.1, 10.4), (250_000, 5.9, 5.7)),
        ),
    ],
    ids=["4070", "3090", "2060s"],
)
def test_predictions_are_the_published_ones_and_near_what_was_measured(
    step: DecodeStep, link: LinkSpeed, line: int, cell: int, rows: tuple[tuple[int, float, float], ...]
) -> None:
    for depth, published, measured in rows:
        found = tokens_per_s(step, link, depth_tokens=depth, line_tokens=line, cell_bytes=cell)
        assert found == pytest.approx(published, rel=0.01)
        assert found == pytest.approx(measured, rel=0.07)


def test_longer_drafts_beyond_the_line_are_predicted_within_a_fifth() -> None:
    """70 tokens/s just within the line, 3.15 tokens a step beyond it."""
    step = DecodeStep.from_speed(70, 3.15, "Bonsai 2, RTX 4070, drafts of 4")
    assert step.seconds == pytest.approx(0.045)
    for depth, published, measured in ((131_000, 43, 41), (180_000, 22, 27), (258_000, 12, 14.7)):
        found = tokens_per_s(step, X16_4, depth_tokens=depth, line_tokens=112_896, cell_bytes=Q8_CELL)
        assert found == pytest.approx(published, rel=0.03)
        assert found == pytest.approx(measured, rel=0.2)


def test_within_vram_it_is_the_speed_of_a_step() -> None:
    step = DecodeStep(2.4, 0.036, "a test")
    for depth in (0, 1000, 57_856):
        found = tokens_per_s(step, X16_4, depth_tokens=depth, line_tokens=57_856, cell_bytes=Q8_CELL)
        assert found == step.tokens_per_s == pytest.approx(66.7, abs=0.1)


@given(
    depth=st.integers(0, 1 << 20),
    deeper=st.integers(0, 1 << 20),
    line=st.integers(256, 1 << 20),
    higher=st.integers(0, 1 << 20),
)
def test_deeper_is_never_faster_and_a_higher_line_never_slower(
    depth: int, deeper: int, line: int, higher: int
) -> None:
    step = DecodeStep(2.0, 0.04, "a test")

    def speed(depth_tokens: int, line_tokens: int) -> float:
        return tokens_per_s(
            step, X16_3, depth_tokens=depth_tokens, line_tokens=line_tokens, cell_bytes=Q8_CELL
        )

    assert speed(depth + deeper, line) <= speed(depth, line) <= speed(depth, line + higher)
    assert speed(depth + deeper, line) > 0


def test_links_say_whether_they_were_measured() -> None:
    for generation, width in MEASURED_LINKS:
        link = link_speed(generation, width)
        assert link is not None and link.evidence.startswith("measured")
        assert link.bytes_per_s == MEASURED_LINKS[generation, width]
        nominal = LANE_BYTES_PER_S[generation] * width
        assert 0.74 <= link.bytes_per_s / nominal <= 0.8
    derived = link_speed(5, 8)
    assert derived is not None and derived.evidence.startswith("derived")
    assert derived.bytes_per_s == pytest.approx(23.6e9, rel=0.01)


def test_a_wider_or_newer_link_is_never_slower() -> None:
    def rate(generation: int, width: int) -> int:
        link = link_speed(generation, width)
        assert link is not None
        return link.bytes_per_s

    for generation in LANE_BYTES_PER_S:
        rates = [rate(generation, width) for width in WIDTHS]
        assert rates == sorted(rates)
    for width in WIDTHS:
        rates = [rate(generation, width) for generation in LANE_BYTES_PER_S]
        assert rates == sorted(rates)


@pytest.mark.parametrize("link", [(0, 16), (7, 16), (4, 0), (4, 3), (-4, -16), (4, 64)])
def test_an_unknown_link_has_no_speed(link: tuple[int, int]) -> None:
    assert link_speed(*link) is None


@pytest.mark.parametrize(
    ("tokens", "seconds"), [(0.5, 0.04), (2, 0), (2, -1), (float("nan"), 1), (2, float("nan"))]
)
def test_no_such_step(tokens: float, seconds: float) -> None:
    with pytest.raises(ValueError, match="no such step"):
        DecodeStep(tokens, seconds, "nobody")


@pytest.mark.parametrize("speed", [0, -1, float("nan")])
def test_no_such_speed(speed: float) -> None:
    with pytest.raises(ValueError, match="positive"):
        DecodeStep.from_speed(speed, 1, "nobody")


# --- the page about it ---


def test_the_page_says_what_the_code_does() -> None:
    page = Path(__file__).parents[2] / "docs" / "explanation" / "tiered-cache.md"
    text = " ".join(page.read_text(encoding="utf-8").split())
    for (generation, width), rate in MEASURED_LINKS.items():
        assert f"| PCIe {generation}.0 x{width} | {rate / GB:.1f} | measured |" in text
    for words in (
        f"| any other | {LINK_PERCENT} % of the nominal rate | derived |",
        f"the driver is {LEAST_DRIVER} or later",
        "one type, " + ", ".join(f"`{each}`" for each in TIER_TYPES[:-1]) + f" or `{TIER_TYPES[-1]}`",
        f"leave {HOST_HEADROOM_BYTES // MIB} MiB available, and it is at most {PINNED_PERCENT} % of all memory",
        f"A line below {LEAST_LINE_TOKENS:,} cells is not offered",
        f"whole pages of {DEVICE_PAGE_BYTES // MIB} MiB",
        f"where the line is at {LONG_LINE_TOKENS:,} cells or more",
        f"({WORKING_DEPTH_TOKENS:,} tokens; there is no",
        f"where it would be below {SHORT_LINE_TOKENS:,}",
    ):
        assert words in text
