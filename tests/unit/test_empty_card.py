"""Cards with nothing on them: what may be asked for, what is assumed, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lllm3090d.engines.capabilities import Backend
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.readings import Card, CardKind, MemoryReading
from lllm3090d.planning.reserves import ReservePolicy
from lllm3090d.planning.units import MIB
from lllm3090d.serving.empty_card import EmptyCard, Machine, emptied, is_hypothetical, wished
from lllm3090d.wire import PlanBody

pytestmark = pytest.mark.unit

RESERVES = ReservePolicy(driver_reserve_mib=512, desktop_reserve_mib=2400)
TOTAL = 24576 * MIB
HOST_TOTAL = 64 << 30
RTX_3090 = Machine(
    card=Card(CardKind.NVIDIA, "GPU-1", "NVIDIA GeForce RTX 3090", "580.95"),
    reading=MemoryReading(1.0, TOTAL, 451 * MIB, 20_000 * MIB, TOTAL - 20_451 * MIB, ()),
    desktop_active=False,
    backend=Backend.CUDA,
)
NO_CARD = Machine(
    card=Card(CardKind.CPU, "host", "host memory (x86_64)", None),
    reading=MemoryReading(1.0, HOST_TOTAL, 0, 8 << 30, HOST_TOTAL - (8 << 30), (), processes_known=False),
    desktop_active=False,
    backend=Backend.CPU,
)


def card(machine: Machine = RTX_3090, **asked: object) -> EmptyCard:
    return wished(PlanBody.model_validate({"model": "m"} | asked), machine, HOST_TOTAL, RESERVES)


def refusal(asked: dict[str, object]) -> LlmError:
    with pytest.raises(LlmError) as caught:
        card(RTX_3090, **asked)
    assert caught.value.code is ErrorCode.INVALID_REQUEST
    assert caught.value.hint
    return caught.value


def lines(made: EmptyCard) -> dict[str, int]:
    return {line.name: line.bytes // MIB for line in made.budget.deciding_lines}


def test_a_card_of_this_machine_is_emptied() -> None:
    """What runs on it now does not count, what its driver keeps does, and the desktop as it is."""
    made = emptied(RTX_3090, RESERVES)
    assert (made.profile.id, made.present, made.backend) == ("rtx-3090", True, Backend.CUDA)
    assert lines(made) == {"total": 24576, "driver": -451}
    assert made.budget.grantable_bytes == TOTAL - 451 * MIB
    assert made.kept_mib == 451


@pytest.mark.parametrize(
    ("capability", "expected"), [("8.6", "rtx-3090"), (None, "rtx-3090"), ("8.9", "detected")]
)
def test_a_known_card_is_told_by_its_live_compute_capability_too(
    capability: str | None, expected: str
) -> None:
    here = replace(RTX_3090, card=replace(RTX_3090.card, compute_capability=capability))
    assert here.profile.id == expected
    assert here.profile.measured is (expected == "rtx-3090")


def test_without_a_card_the_profile_says_so() -> None:
    assert (NO_CARD.profile.id, NO_CARD.profile.present) == ("no-gpu", False)


def test_host_memory_is_emptied() -> None:
    """The machine keeps its tenth; nothing counts as measured on it."""
    made = emptied(NO_CARD, RESERVES)
    assert (made.kind, made.backend, made.profile.present) == (CardKind.CPU, Backend.CPU, False)
    assert lines(made) == {"total": 65536, "own reserve": -6554}
    assert made.kept_mib == 6554


def test_without_an_engine_the_usual_one_is_assumed() -> None:
    machine = Machine(RTX_3090.card, RTX_3090.reading, None, None)
    made = emptied(machine, RESERVES)
    assert made.backend is Backend.VULKAN
    assert lines(made)["desktop reserve"] == -2400  # nobody knows of one, which counts as one


def test_a_known_card_brings_its_memory_and_nothing_else() -> None:
    """Its driver is not here to be asked; desktop and backend are those of this machine."""
    made = card(card="RTX 4090")
    assert (made.profile.id, made.present, made.desktop_active) == ("rtx-4090", False, False)
    assert made.backend is Backend.CUDA
    assert lines(made) == {"total": 24576, "driver": -512}
    assert [line.origin for line in made.budget.lines] == [
        "NVIDIA GeForce RTX 4090",
        "setting driver_reserve_mib, the card does not tell",
    ]
    assert made.profile.compute_capability == "8.9"


@pytest.mark.parametrize(
    ("text", "mib"), [("12GiB", 12288), ("11.5 GiB", 11776), ("12288MiB", 12288), ("0.5TiB", 1 << 19)]
)
def test_any_card_goes_by_its_memory(text: str, mib: int) -> None:
    made = card(vram=text)
    assert made.total_bytes == mib * MIB
    assert made.profile.id == "synthetic"
    assert made.profile.compute_capability is None


def test_a_desktop_is_on_it_or_not() -> None:
    assert lines(card(vram="12GiB", desktop=True))["desktop reserve"] == -2400
    assert "desktop reserve" not in lines(card(vram="12GiB", desktop=False))
    own = card(desktop=True)
    assert own.present
    assert lines(own) == {"total": 24576, "driver": -451, "desktop reserve": -2400}


@pytest.mark.parametrize("asked", [{"card": "rtx-5090"}, {"vram": "8GiB"}])
def test_where_there_is_no_card_a_desktop_and_the_usual_engine_are_assumed(asked: dict[str, object]) -> None:
    made = card(NO_CARD, **asked)
    assert (made.kind, made.backend, made.desktop_active) == (CardKind.NVIDIA, Backend.VULKAN, None)
    assert lines(made)["desktop reserve"] == -2400


@pytest.mark.parametrize("asked", [{"desktop": False}, {"backend": "cuda"}])
def test_where_there_is_no_card_the_reference_lends_its_capacity(asked: dict[str, object]) -> None:
    made = card(NO_CARD, **asked)
    assert made.total_bytes == TOTAL
    assert not made.profile.present  # so no speed counts as measured on it
    assert not made.present


def test_the_backend_that_is_asked_for_decides() -> None:
    assert card(backend="vulkan").backend is Backend.VULKAN
    host = card(backend="cpu")
    assert (host.kind, host.total_bytes, host.present) == (CardKind.CPU, HOST_TOTAL, False)
    assert card(NO_CARD, backend="cpu").present


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"card": "rtx-3080"}, "'rtx-3080'"),
        ({"card": "rtx4099"}, "'rtx4099'"),
        ({"vram": "0"}, "'0'"),
        ({"vram": "0GiB"}, "'0GiB'"),
        ({"vram": "12"}, "'12'"),
        ({"vram": "-12GiB"}, "'-12GiB'"),
        ({"vram": "12GB"}, "'12GB'"),
        ({"vram": "1e3GiB"}, "'1e3GiB'"),
        ({"vram": "9999TiB"}, "'9999TiB'"),
        ({"vram": "NaN GiB"}, "'NaN GiB'"),
        ({"card": "rtx-4090", "vram": "12GiB"}, "a card has its own"),
        ({"card": "rtx-4090", "backend": "cpu"}, "card means a card"),
        ({"vram": "12GiB", "desktop": True, "backend": "cpu"}, "--vram and --desktop mean a card"),
    ],
)
def test_what_cannot_be_is_refused(asked: dict[str, object], said: str) -> None:
    assert said in refusal(asked).message


def test_gigabytes_are_refused_with_what_is_meant() -> None:
    assert "12 GB has 12 GiB" in (refusal({"vram": "12GB"}).hint or "")


def test_a_misspelt_card_is_guessed() -> None:
    assert "rtx-4090" in (refusal({"card": "rtx-409"}).hint or "")


def test_a_card_smaller_than_its_reserves_gives_nothing() -> None:
    made = card(vram="1GiB", desktop=True)
    assert made.budget.grantable_bytes == 0
    assert made.budget.available_bytes < 0


@pytest.mark.parametrize(
    ("asked", "other"),
    [
        ({}, False),
        ({"context_tokens": 4096, "tiered": True}, False),
        ({"card": "x"}, True),
        ({"vram": "x"}, True),
        ({"desktop": False}, True),
        ({"backend": "cpu"}, True),
    ],
)
def test_only_what_concerns_the_card_asks_for_another(asked: dict[str, object], other: bool) -> None:
    assert is_hypothetical(PlanBody.model_validate({"model": "m"} | asked)) is other
