"""The tier after a start: proved by the engine's log, or not in force."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lllm3090d.planning.tier import DEVICE_PAGE_BYTES, Tier, TierLayout, TierSizes
from lllm3090d.planning.units import MIB
from lllm3090d.serving.tier_check import check_tier

pytestmark = pytest.mark.unit

WINDOW, LINE = 262_144, 113_152
LAYOUT = TierLayout(WINDOW, ((1088, 16),))
TIER = Tier(LINE, WINDOW, LAYOUT.sizes(LINE), draft_window_tokens=16_384, draft_context_tokens=20_736)
ANNOUNCED = f"llama_kv_cache: tiered KV: cells [0, {LINE}) in VRAM, [{LINE}, {WINDOW}) in host memory"
DRAFT = "common_speculative_init_result: draft context sized to 20736 tokens (spec-draft-window 16384, target 262144)"


def layer_line(layer: int, sizes: TierSizes, cache: str = "0x55d0c0ffee10") -> str:
    """In the format of the fork's source."""
    card, host = sizes.head_bytes / sizes.layers / MIB, sizes.host_bytes / sizes.layers / MIB
    name = f"CUDA0_tier_kv{cache}_l{layer}_{int(LINE / WINDOW * 1e6)}_2"
    sides = f"{card:.2f} MiB VRAM + {host:.2f} MiB host (4 runs, 2 parts)"
    return f"ggml_backend_cuda_tier_alloc: {name} 544.00 MiB: {sides}"


def staging_lines(sizes: TierSizes, key: str = "") -> list[str]:
    each = sizes.staging_bytes / 2 / MIB
    return [
        f"ggml_cuda_tier_staging_handle: staging buffer {key}{slot}: {each:.2f} MiB VRAM" for slot in (0, 1)
    ]


def good(sizes: TierSizes = TIER.sizes, layers: int = 16) -> list[str]:
    split = [layer_line(3 + 4 * number, sizes) for number in range(layers)]
    return ["load_model: loading model", ANNOUNCED, split[0], *staging_lines(sizes), *split[1:], DRAFT]


def test_a_tier_in_force_is_proved_with_its_bytes() -> None:
    verdict = check_tier(TIER, good())
    assert verdict.in_force, verdict.reason
    assert verdict.differences == ()
    assert verdict.found == verdict.expected == TIER.sizes
    assert verdict.draft_context_tokens == 20_736
    assert "All 16 layers are split" in verdict.reason
    assert "3776 MiB in VRAM and 4928 MiB in host memory" in verdict.reason


@pytest.mark.parametrize("prefix", ["0.00.123.456 I ", "I ", "12.34.567.890 "])
def test_timestamps_and_severities_may_stand_before(prefix: str) -> None:
    verdict = check_tier(TIER, [f"{prefix}{line}\r\n" for line in good()])
    assert verdict.in_force and verdict.differences == ()


def test_staging_of_later_builds_has_the_cache_in_its_name() -> None:
    lines = [line for line in good() if "staging" not in line]
    verdict = check_tier(TIER, [*lines, *staging_lines(TIER.sizes, "kv0x55d0c0ffee10/")])
    assert verdict.in_force and verdict.found.staging_bytes == TIER.sizes.staging_bytes


def test_what_the_engine_announces_proves_nothing() -> None:
    verdict = check_tier(TIER, [ANNOUNCED, DRAFT])
    assert not verdict.in_force
    assert f"announced a line at {LINE} cells and then split no layer" in verdict.reason
    assert verdict.found == TierSizes(0, 0, 0, 0)


def test_silence_is_not_in_force() -> None:
    for lines in ([], ["", "srv  init: ready"]):
        verdict = check_tier(TIER, lines)
        assert not verdict.in_force and "no line about one" in verdict.reason


def test_a_device_without_virtual_memory() -> None:
    device = "  Device 0: NVIDIA GeForce RTX 3090, compute capability 8.6, VMM: no"
    verdict = check_tier(TIER, [device, ANNOUNCED])
    assert not verdict.in_force and "no virtual memory" in verdict.reason


def test_some_layers_are_not_all() -> None:
    verdict = check_tier(TIER, good(layers=15))
    assert not verdict.in_force and "15 of 16 layers" in verdict.reason
    # The same layer twice is not two.
    again = check_tier(TIER, [*good(layers=15), layer_line(3, TIER.sizes)])
    assert not again.in_force


def test_a_layer_with_nothing_in_host_memory_is_not_split() -> None:
    lines = [*good(layers=15), layer_line(63, TierSizes(544 * MIB, 0, 0, 1))]
    verdict = check_tier(TIER, lines)
    assert not verdict.in_force and "15 of 16" in verdict.reason


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "cuMemCreate(host, 308.0 MiB) failed: out of memory",
            "cuMemCreate(host, 308.0 MiB) failed: out of",
        ),
        ("cuMemCreate(vram, 236.0 MiB) failed: out of memory", "cuMemCreate(vram"),
        ("cuMemAddressReserve(544.0 MiB) failed: 2", "cuMemAddressReserve(544.0 MiB) failed: 2"),
        ("cuMemMap failed: 1", "cuMemMap failed: 1"),
        ("tiered buffers need CUDA VMM (build without GGML_CUDA_NO_VMM)", "no virtual memory"),
    ],
)
def test_a_failure_is_the_reason(line: str, words: str) -> None:
    lines = [ANNOUNCED, layer_line(3, TIER.sizes), f"ggml_backend_cuda_tier_alloc: {line}"]
    verdict = check_tier(TIER, lines)
    assert not verdict.in_force and words in verdict.reason


def test_differences_are_told_although_the_tier_is_in_force() -> None:
    def differences(lines: list[str], tier: Tier = TIER) -> str:
        verdict = check_tier(tier, lines)
        assert verdict.in_force, verdict.reason
        return " ".join(verdict.differences)

    other = [line.replace(str(LINE), "95488") for line in good(LAYOUT.sizes(95_488))]
    assert "at 95488 cells; planned were 113152" in differences(other)
    assert "MiB are in VRAM; planned were" in differences(other)
    unstaged = [line for line in good() if "staging" not in line]
    assert "without staging" in differences(unstaged)
    refused = (
        "ggml_backend_cuda_tier_alloc: no staging alias for CUDA0_tier_kv0x1_l3_1_2: its host tail is read"
    )
    assert "without staging" in differences([*good(), refused])
    twice = [*good(), *staging_lines(TIER.sizes, "kv0x2/")]
    assert "of VRAM are for staging" in differences(twice)
    assert "nothing of the draft's context" in differences(good()[:-1])
    whole = [*good()[:-1], DRAFT.replace("20736", "262144")]
    assert "has 262144 tokens" in differences(whole)
    assert differences(good()[:-1], replace(TIER, draft_context_tokens=0)) == ""


def test_other_pages_are_no_difference() -> None:
    small = TierLayout(WINDOW, LAYOUT.rows, DEVICE_PAGE_BYTES // 32).sizes(LINE)
    verdict = check_tier(TIER, good(small))
    assert verdict.in_force and verdict.differences == ()


def test_of_two_starts_the_later_counts() -> None:
    later = [layer_line(3 + 4 * number, TIER.sizes, "0x7f00") for number in range(16)]
    verdict = check_tier(TIER, [*good(LAYOUT.sizes(95_488)), ANNOUNCED, *staging_lines(TIER.sizes), *later])
    assert verdict.in_force and verdict.found == TIER.sizes


# --- hostile text ---

HOSTILE = [
    "print_info: general.name = " + layer_line(3, TIER.sizes),
    layer_line(3, TIER.sizes) + " and more",
    "x" * 10_000_000,
    "ggml_backend_cuda_tier_alloc: " + "cuMem" * 100_000 + " failed: x",
    "ggml_backend_cuda_tier_alloc: CUDA0_tier_kv0x1_l3_1_2 1.00 MiB: 1e999 MiB VRAM + nan MiB host (4 runs, 2 parts)",
    "ggml_backend_cuda_tier_alloc: CUDA0_tier_kv0x1_l3_1_2 1.00 MiB: "
    + "9" * 500
    + ".00 MiB VRAM + 1.00 MiB host",
    "ggml_backend_cuda_tier_alloc: CUDA0_tier_kv0x1_l3_1_2 1.00 MiB: \u0661.00 MiB VRAM"
    " + 1.00 MiB host (4 runs, 2 parts)",
    "llama_kv_cache: tiered KV: cells [0, " + "1" * 5000 + ") in VRAM, [1, 2) in host memory",
    "ggml_cuda_tier_staging_handle: staging buffer ../../etc: 1.00 MiB VRAM",
    "f: draft context sized to " + "1" * 5000 + " tokens",
    "\x00\x1b[31m\ud800",
]


@pytest.mark.parametrize("line", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_lines_are_no_evidence(line: str) -> None:
    verdict = check_tier(TIER, [line])
    assert not verdict.in_force
    assert verdict.found == TierSizes(0, 0, 0, 0)
    assert verdict.draft_context_tokens is None
    amid = check_tier(TIER, [line, *good(), line])
    assert amid.in_force and amid.found == TIER.sizes and amid.differences == ()


def test_an_error_text_is_shown_without_control_characters() -> None:
    verdict = check_tier(
        TIER, ["ggml_backend_cuda_tier_alloc: cuMemMap failed: \x1b[31m\x07red\u202e" + "y" * 900]
    )
    assert verdict.reason.isprintable() and len(verdict.reason) < 300


fragments = st.sampled_from(
    [ANNOUNCED, DRAFT, *good(), *HOSTILE[3:], "ggml_backend_cuda_tier_alloc: ", "CUDA0_tier_", " MiB", "\n"]
)


@given(
    lines=st.lists(
        st.one_of(st.text(max_size=200), st.lists(fragments, max_size=4).map("".join)), max_size=30
    )
)
def test_no_text_at_all_breaks_it(lines: list[str]) -> None:
    verdict = check_tier(TIER, lines)
    assert verdict.reason
    assert verdict.in_force == (verdict.found.layers >= 16 and verdict.found.host_bytes > 0)
