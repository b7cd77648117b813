"""Known cards, which of them a card is, cards by name or by memory, and what is said beside a speed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from lllm3090d.checkpoints.catalogue import MeasuredSpeed, packaged_catalogue
from lllm3090d.engines.capabilities import Backend
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.profiles import (
    DETECTED_ID,
    NO_CARD_ID,
    REFERENCE_PROFILE,
    CardProfile,
    absent_profile,
    capacity_profile,
    known_profiles,
    named_profile,
    parse_vram,
    profile_of,
)
from lllm3090d.planning.request import Features
from lllm3090d.planning.speeds import REFERENCE_BACKEND, measured_steps, predicting, qualify, shown_speed
from lllm3090d.planning.tier_speed import DecodeStep, link_speed, tokens_per_s

pytestmark = pytest.mark.unit

REFERENCE = "NVIDIA GeForce RTX 3090"


def test_the_known_cards() -> None:
    assert {(card.id, card.vram_mib, card.compute_capability) for card in known_profiles()} == {
        ("rtx-3090", 24576, "8.6"),
        ("rtx-4090", 24576, "8.9"),
        ("rtx-5090", 32768, "12.0"),
        ("rtx-5080", 16384, "12.0"),
        ("rtx-pro-6000-blackwell", 98304, "12.0"),
    }
    assert [card.id for card in known_profiles() if card.measured] == [REFERENCE_PROFILE]
    assert all(card.present for card in known_profiles())


@pytest.mark.parametrize(
    ("name", "vram", "capability", "expected"),
    [
        (REFERENCE, 24576, "8.6", "rtx-3090"),
        ("nvidia geforce-rtx_3090", 24576, None, "rtx-3090"),
        (REFERENCE, 24576 + 512, "8.6", "rtx-3090"),
        (REFERENCE, 24576 - 512, "8.6", "rtx-3090"),
        (REFERENCE, 24576 + 513, "8.6", DETECTED_ID),
        (REFERENCE, 24576 - 513, "8.6", DETECTED_ID),
        (REFERENCE, 24576, "8.9", DETECTED_ID),
        ("NVIDIA GeForce RTX 3090 Ti", 24564, "8.6", DETECTED_ID),
        ("GeForce RTX 3090", 24576, "8.6", DETECTED_ID),
        ("NVIDIA GeForce RTX 5090", 32607, "12.0", "rtx-5090"),
        ("", 8192, None, DETECTED_ID),
    ],
)
def test_which_card_it_is(name: str, vram: int, capability: str | None, expected: str) -> None:
    found = profile_of(name, vram, capability)
    assert found.id == expected
    assert found.vram_mib == vram  # the live figure, whatever the table says
    assert found.measured is (expected == REFERENCE_PROFILE)
    assert found.present
    if expected == DETECTED_ID:
        assert found.name == (name or "unnamed card")
        assert found.compute_capability == capability


def test_without_a_card_a_capacity_is_borrowed_and_nothing_is_measured() -> None:
    found = absent_profile()
    assert (found.id, found.vram_mib, found.present, found.measured) == (NO_CARD_ID, 24576, False, False)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("rtx-4090", "rtx-4090"),
        ("RTX 4090", "rtx-4090"),
        ("rtx4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("RTX Pro 6000 Blackwell", "rtx-pro-6000-blackwell"),
    ],
)
def test_cards_by_name(name: str, expected: str) -> None:
    assert named_profile(name).id == expected


@pytest.mark.parametrize(("name", "hint"), [("rtx-4080", "Did you mean"), ("", "--vram"), ("☃", "--vram")])
def test_unknown_cards_are_refused_with_the_known_ones(name: str, hint: str) -> None:
    with pytest.raises(LlmError, match="rtx-5080") as caught:
        named_profile(name)
    assert caught.value.code is ErrorCode.INVALID_REQUEST
    assert caught.value.hint is not None
    assert hint in caught.value.hint


def test_compute_capabilities_are_compared_as_numbers() -> None:
    blackwell, ampere, unknown = named_profile("rtx-5090"), named_profile("rtx-3090"), capacity_profile(8192)
    assert blackwell.can_compute("9.0")  # 12 is more than 9
    assert ampere.can_compute("8.6")
    assert not ampere.can_compute("8.9")
    assert ampere.can_compute(None)
    assert unknown.can_compute("99.0")


@pytest.mark.parametrize(
    ("text", "mib"),
    [
        ("12GiB", 12288),
        (" 12 gib ", 12288),
        ("11.5GiB", 11776),
        ("12288MiB", 12288),
        ("0.5GiB", 512),
        ("1TiB", 1 << 20),
        ("1.9MiB", 1),
    ],
)
def test_amounts_of_memory(text: str, mib: int) -> None:
    assert parse_vram(text) == mib
    assert capacity_profile(mib).vram_mib == mib


@pytest.mark.parametrize(
    "text",
    ["", "12", "GiB", "12GB", "12G", "12 MB", "-12GiB", "0GiB", "0.0001MiB", "1e3GiB", "nanGiB", "12GiB8", "5TiB",
     "٣GiB x", "٣GiB", "1٣GiB", "9999999TiB", "1" * 5000 + "GiB", "12,5GiB"],
)  # fmt: skip
def test_what_is_no_amount_of_memory(text: str) -> None:
    with pytest.raises(LlmError, match="no amount") as caught:
        parse_vram(text)
    assert caught.value.code is ErrorCode.INVALID_REQUEST
    assert caught.value.hint is not None
    assert "12GiB" in caught.value.hint


@given(st.text(max_size=30))
def test_any_text_is_an_amount_or_refused(text: str) -> None:
    try:
        assert 1 <= parse_vram(text) <= 4 << 20
    except LlmError as error:
        assert error.code is ErrorCode.INVALID_REQUEST


def test_a_profile_is_checked() -> None:
    for wrong in ({"id": "RTX 3090"}, {"vram_mib": 0}, {"compute_capability": "sm_86"}, {"colour": "black"}):
        given_values = {"id": "x", "name": "x", "compute_capability": None, "vram_mib": 1} | wrong
        with pytest.raises(ValidationError):
            CardProfile.model_validate(given_values)


# --- speeds ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("card", "backend", "expected"),
    [
        (named_profile("rtx-3090"), Backend.VULKAN, "measured"),
        (named_profile("rtx-3090"), Backend.UNKNOWN, "measured"),
        (named_profile("rtx-3090"), Backend.ROCM, "measured on vulkan"),
        (named_profile("rtx-3090"), Backend.CPU, "measured on vulkan"),
        (named_profile("rtx-4090"), Backend.VULKAN, "other card"),
        (named_profile("rtx-4090"), Backend.UNKNOWN, "other card"),
        (named_profile("rtx-4090"), Backend.CUDA, "other card, measured on vulkan"),
        (profile_of("NVIDIA GeForce RTX 3090 Ti", 24564, "8.6"), Backend.VULKAN, "other card"),
        (capacity_profile(24576), Backend.VULKAN, "other card"),
        (absent_profile(), Backend.VULKAN, "other card"),
        (absent_profile(), Backend.CPU, "other card, measured on vulkan"),
    ],
)
def test_what_is_said_beside_a_speed(card: CardProfile, backend: Backend, expected: str) -> None:
    for entry in packaged_catalogue().entries:
        shown = shown_speed(entry.speeds, card, backend)
        assert shown is not None
        assert shown.qualifier == expected
        assert shown.speed == entry.speeds[0]  # never scaled


def test_the_same_measured_with_this_backend_is_shown_instead() -> None:
    speeds = named("qwen3.8-27b")
    here = named_profile("rtx-3090")
    cuda = shown_speed(speeds, here, Backend.CUDA)
    assert cuda is not None
    assert (cuda.speed.tokens_per_s, cuda.qualifier) == (84.9, "measured")
    assert cuda.circumstances == "rtx-3090, cuda, mtp, prose"
    # On another card no figure is better than the other.
    elsewhere = shown_speed(speeds, named_profile("rtx-4090"), Backend.CUDA)
    assert elsewhere is not None
    assert elsewhere.speed.tokens_per_s == 54.8
    # 35B-A3B was not measured on CUDA.
    other = shown_speed(named("qwen3.6-35b-a3b"), here, Backend.CUDA)
    assert other is not None
    assert (other.speed.tokens_per_s, other.qualifier) == (126, "measured on vulkan")


def named(word: str) -> tuple[MeasuredSpeed, ...]:
    found = packaged_catalogue().find(word)
    assert found is not None
    return found.speeds


def test_every_speed_shown_first_is_of_the_reference() -> None:
    for entry in packaged_catalogue().entries:
        first = entry.speeds[0]
        assert (first.card, first.backend) == (REFERENCE_PROFILE, REFERENCE_BACKEND)


def test_circumstances_name_what_was_noted() -> None:
    speed = MeasuredSpeed(tokens_per_s=1.0, card="rtx-3090", backend="cuda", speculation="none", build="b1")
    assert qualify(speed, named_profile("rtx-3090"), Backend.CUDA).circumstances == (
        "rtx-3090, cuda, no speculation, build b1"
    )
    assert shown_speed((), named_profile("rtx-3090"), Backend.CUDA) is None


# --- what a tier's speed is predicted from -------------------------------------------------------------------


def test_a_step_is_taken_only_from_this_card_and_backend() -> None:
    speeds, here = named("qwen3.8-27b"), named_profile("rtx-3090")
    plain = measured_steps(speeds, here, Backend.CUDA).of("none")
    assert isinstance(plain, DecodeStep)
    assert plain.tokens == 1
    assert plain.tokens_per_s == pytest.approx(43.2)  # the first of three workloads
    assert plain.evidence == "43.2 tokens/s measured (rtx-3090, cuda, no speculation, prose)"
    drafted = measured_steps(speeds, here, Backend.CUDA).of("mtp")
    assert drafted == (
        "84.9 tokens/s measured (rtx-3090, cuda, mtp, prose), and nobody has noted how many tokens a step yielded"
    )
    unknown = measured_steps(speeds, here, Backend.CUDA).of("dflash")
    assert isinstance(unknown, str) and unknown.endswith("3090 with cuda with this kind of drafts")
    for card, backend in ((named_profile("rtx-4090"), Backend.CUDA), (here, Backend.ROCM)):
        reason = measured_steps(speeds, card, backend).of("none")
        assert reason == f"nobody has noted a speed of this very file on {card.name} with {backend}"
    assert measured_steps(speeds, absent_profile(), Backend.CUDA).of("none") == (
        "nobody has noted a speed of this very file without a card"
    )
    assert measured_steps((), here, Backend.CUDA).of("none") == "nobody has noted a speed of this very file"
    # A build that could not be asked is not taken for the measured one.
    assert isinstance(measured_steps(speeds, here, Backend.UNKNOWN).of("none"), str)


def test_a_noted_step_gives_the_published_prediction() -> None:
    """Mirai S on an RTX 3090, PCIe 3.0 x16, the line at 44,000 cells: 2.40 tokens a step of 36 ms."""
    without = MeasuredSpeed(tokens_per_s=60, card="rtx-3090", backend="cuda", speculation="mtp")
    noted = without.model_copy(update={"tokens_per_s": 2.40 / 0.036, "tokens_per_step": 2.40})
    step = measured_steps((without, noted), named_profile("rtx-3090"), Backend.CUDA).of("mtp")
    link = link_speed(3, 16)
    assert isinstance(step, DecodeStep) and link is not None
    assert step.evidence.endswith("2.4 tokens a step")
    for depth, published, measured in ((60_000, 29.7, 27.9), (120_000, 9.7, 9.5), (180_000, 5.8, 5.8)):
        found = tokens_per_s(step, link, depth_tokens=depth, line_tokens=44_000, cell_bytes=34_816)
        assert found == pytest.approx(published, rel=0.01)
        assert found == pytest.approx(measured, rel=0.07)


@pytest.mark.parametrize("tokens", [0.5, 0, -1, 101, float("nan")])
def test_a_step_yields_at_least_its_own_token(tokens: float) -> None:
    with pytest.raises(ValidationError):
        MeasuredSpeed(
            tokens_per_s=60, card="rtx-3090", backend="cuda", speculation="mtp", tokens_per_step=tokens
        )


def test_without_a_tier_there_is_nothing_to_predict() -> None:
    plain = Features(Backend.CUDA)
    assert predicting(plain, named("qwen3.8-27b"), named_profile("rtx-3090")) == plain
