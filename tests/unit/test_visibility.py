"""Which device of an engine is which card: by UUID, or by what a device says of itself, and never by a guess."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lllm3090d.engines.capabilities import Backend, Capabilities, ListedDevice
from lllm3090d.engines.help_text import parse_listed
from lllm3090d.engines.visibility import Sight, can_be_kept_to, identified, sight, variables
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.readings import Card, CardKind
from tests.unit.engine_captures import answers

pytestmark = pytest.mark.unit

MIB = 1 << 20
GIB = 1 << 30


def _nvidia(number: int, name: str = "NVIDIA GeForce RTX 3090", gib: int = 24) -> Card:
    return Card(
        CardKind.NVIDIA, f"GPU-{number}", name, "580.95", gib * GIB, pci_address=f"0000:0{number}:00.0"
    )


def _amd(unique: str, name: str, gib: int) -> Card:
    return Card(CardKind.AMD, unique, name, "6.12", gib * GIB, pci_address="0000:03:00.0")


def _build(backend: Backend, *lines: str) -> Capabilities:
    listed = parse_listed("Available devices:\n" + "".join(f"  {line}\n" for line in lines))
    return Capabilities("11434", frozenset(), backend, tuple(each.name for each in listed), listed=listed)


CUDA = _build(
    Backend.CUDA,
    "CUDA0: NVIDIA GeForce RTX 3090 (24124 MiB, 23800 MiB free)",
    "CUDA1: NVIDIA GeForce RTX 3090 (24124 MiB, 23800 MiB free)",
)
TWINS = (_nvidia(1), _nvidia(2))
ADA, TURING = _nvidia(1, "NVIDIA GeForce RTX 4090"), _nvidia(2, "NVIDIA GeForce RTX 2080 Ti", 11)
VULKAN = _build(
    Backend.VULKAN,
    "Vulkan0: NVIDIA GeForce RTX 2080 Ti (11264 MiB, 11000 MiB free)",
    "Vulkan1: NVIDIA GeForce RTX 4090 (24564 MiB, 24000 MiB free)",
    "Vulkan2: Intel(R) UHD Graphics 770 (ADL-S GT1) (48000 MiB, 40000 MiB free)",
)


def test_what_a_real_build_lists() -> None:
    said = answers("debian-11669-llvmpipe")["list-devices"]
    assert parse_listed(f"{said.stderr}\n{said.stdout}") == (
        ListedDevice("Vulkan0", "llvmpipe (LLVM 22.1.8, 256 bits)", 24105 * MIB),
    )
    for build in ("b10068", "b10092", "b10434", "b11434", "debian-11669"):
        assert parse_listed(answers(build)["list-devices"].stdout) == ()
    assert parse_listed("no list at all: (1 MiB, 1 MiB free)") == ()


def test_cuda_takes_cards_by_uuid_in_the_order_of_the_plan() -> None:
    seen = sight(CUDA, TWINS, (TWINS[1], TWINS[0]))
    assert seen == Sight(
        ("CUDA0", "CUDA1"), (("CUDA_DEVICE_ORDER", "PCI_BUS_ID"), ("CUDA_VISIBLE_DEVICES", "GPU-2,GPU-1"))
    )
    assert sight(CUDA, TWINS, TWINS[1:]) == Sight(
        ("CUDA0",), (("CUDA_DEVICE_ORDER", "PCI_BUS_ID"), ("CUDA_VISIBLE_DEVICES", "GPU-2"))
    )
    assert variables(seen) == ("CUDA_DEVICE_ORDER=PCI_BUS_ID", "CUDA_VISIBLE_DEVICES=GPU-2,GPU-1")
    assert variables(None) == ()


def test_a_card_that_is_not_managed_is_hidden_too() -> None:
    """One that is too small, for the driver of the engine would use it."""
    assert sight(CUDA, TWINS[:1], TWINS[:1]) == Sight(
        ("CUDA0",), (("CUDA_DEVICE_ORDER", "PCI_BUS_ID"), ("CUDA_VISIBLE_DEVICES", "GPU-1"))
    )


def test_more_cards_than_the_engine_lists() -> None:
    with pytest.raises(LlmError, match="CUDA0") as refused:
        sight(replace(CUDA, listed=CUDA.listed[:1]), TWINS, TWINS)
    assert refused.value.code is ErrorCode.ENGINE_UNUSABLE
    assert "CUDA_VISIBLE_DEVICES" in (refused.value.hint or "")


def test_rocm_takes_cards_by_uuid_where_they_have_one() -> None:
    cards = (
        _amd("GPU-0123456789abcdef", "Radeon RX 7900 XTX", 24),
        _amd("GPU-fedcba9876543210", "Radeon VII", 16),
    )
    build = _build(
        Backend.ROCM,
        "ROCm0: AMD Radeon RX 7900 XTX (24560 MiB, 24500 MiB free)",
        "ROCm1: AMD Radeon VII (16368 MiB, 16300 MiB free)",
    )
    seen = sight(build, cards, (cards[1], cards[0]))
    assert seen is not None and seen.devices == ("ROCm0", "ROCm1")
    assert dict(seen.environment) == {
        "ROCR_VISIBLE_DEVICES": "GPU-fedcba9876543210,GPU-0123456789abcdef",
        "HIP_VISIBLE_DEVICES": "0,1",
    }
    nameless = (replace(cards[0], uuid="pci-0000:03:00.0"), cards[1])
    assert sight(build, nameless, nameless[:1]) == Sight(("ROCm0",))
    assert sight(build, nameless, nameless) == Sight(("ROCm0", "ROCm1"))


def test_vulkan_devices_are_found_by_name_and_size() -> None:
    """By position the two would be swapped."""
    cards = (ADA, TURING)
    assert sight(VULKAN, cards, (ADA,)) == Sight(("Vulkan1",))
    assert sight(VULKAN, cards, (TURING, ADA)) == Sight(("Vulkan0", "Vulkan1"))
    assert all(can_be_kept_to(VULKAN, cards, card) for card in cards)


def test_names_hold_with_the_variables_they_were_listed_with() -> None:
    asked = replace(VULKAN, device_environment=(("GGML_VK_VISIBLE_DEVICES", "1,2,3"),))
    seen = sight(asked, (ADA, TURING), (ADA,))
    assert seen == Sight(("Vulkan1",), (("GGML_VK_VISIBLE_DEVICES", "1,2,3"),))
    # By UUID nothing else counts.
    by_uuid = sight(replace(CUDA, device_environment=(("CUDA_VISIBLE_DEVICES", "1"),)), TWINS, TWINS[:1])
    assert by_uuid is not None and dict(by_uuid.environment)["CUDA_VISIBLE_DEVICES"] == "GPU-1"


def test_a_driver_may_add_the_chip_and_leave_out_the_maker() -> None:
    card = _amd("GPU-0123456789abcdef", "Radeon RX 7900 XT/7900 XTX/7900 GRE/7900M", 24)
    other = _amd("GPU-fedcba9876543210", "Radeon RX 6800/6800 XT / 6900 XT", 16)
    build = _build(
        Backend.VULKAN,
        "Vulkan0: AMD Radeon RX 6800 XT (RADV NAVI21) (16368 MiB, 16000 MiB free)",
        "Vulkan1: AMD Radeon RX 7900 XTX (RADV NAVI31) (24560 MiB, 24000 MiB free)",
    )
    assert sight(build, (card, other), (card, other)) == Sight(("Vulkan1", "Vulkan0"))


def test_equal_cards_are_not_guessed() -> None:
    build = _build(
        Backend.VULKAN,
        "Vulkan0: NVIDIA GeForce RTX 3090 (24576 MiB, 24000 MiB free)",
        "Vulkan1: NVIDIA GeForce RTX 3090 (24576 MiB, 24000 MiB free)",
    )
    for chosen in (TWINS[:1], TWINS[1:], TWINS):
        with pytest.raises(LlmError, match="which of the engine's devices") as refused:
            sight(build, TWINS, chosen)
        assert refused.value.code is ErrorCode.ENGINE_UNUSABLE
        assert "CUDA" in (refused.value.hint or "")
    hidden = replace(build, listed=build.listed[:1])  # by a variable of the session: it may be either
    assert not can_be_kept_to(hidden, TWINS, TWINS[0])
    # With a third one that is unlike them, that one is known.
    odd = replace(
        build, listed=(*build.listed, ListedDevice("Vulkan2", "NVIDIA GeForce RTX 2080 Ti", 11 * GIB))
    )
    assert sight(odd, (*TWINS, TURING), (TURING,)) == Sight(("Vulkan2",))
    assert not can_be_kept_to(odd, (*TWINS, TURING), TWINS[0])


@pytest.mark.parametrize(
    ("name", "gib"),
    [("NVIDIA GeForce RTX 3060", 8), ("NVIDIA GeForce RTX 4090", 24), ("", 11), ("NVIDIA", 11)],
)
def test_another_name_or_size_is_another_card(name: str, gib: int) -> None:
    card = _nvidia(1, name, gib)
    device = ListedDevice("Vulkan0", "NVIDIA GeForce RTX 3060", 12 * GIB)
    build = Capabilities("1", frozenset(), Backend.VULKAN, ("Vulkan0",), listed=(device,))
    assert identified(build, (card, TURING), card) is None


def test_one_driver_that_lists_a_card_twice() -> None:
    twice = ListedDevice("Vulkan3", "NVIDIA GeForce RTX 4090", 24 * GIB)
    assert identified(replace(VULKAN, listed=(*VULKAN.listed, twice)), (ADA, TURING), ADA) is None


def test_nothing_to_be_kept_from() -> None:
    one = replace(CUDA, listed=CUDA.listed[:1])
    assert sight(one, TWINS[:1], TWINS[:1]) is None
    host = Card(CardKind.CPU, "host", "host memory", None, 64 * GIB)
    assert sight(_build(Backend.CPU), (host,), (host,)) is None
    assert sight(CUDA, (host,), (host,)) is None
    assert sight(_build(Backend.UNKNOWN), TWINS, TWINS[:1]) is None


def test_one_card_beside_devices_that_are_no_cards_of_ours() -> None:
    assert sight(VULKAN, (ADA,), (ADA,)) == Sight(("Vulkan1",))
    unlike = _nvidia(1, "NVIDIA GeForce GTX 1080", 8)
    assert sight(VULKAN, (unlike,), (unlike,)) is None


def test_no_card_at_all() -> None:
    with pytest.raises(ValueError, match="no card"):
        sight(CUDA, TWINS, ())


@given(
    st.lists(
        st.sampled_from([("3090", 24), ("4090", 24), ("2080 Ti", 11), ("3060", 12)]), min_size=2, max_size=5
    ),
    st.randoms(),
)
def test_who_is_found_is_the_right_one(kinds: list[tuple[str, int]], random: object) -> None:
    """Whatever the order in which an engine lists them; and all that are unlike all others are found."""
    cards = [_nvidia(number, f"NVIDIA GeForce RTX {name}", gib) for number, (name, gib) in enumerate(kinds)]
    order = list(range(len(cards)))
    random.shuffle(order)  # type: ignore[attr-defined]  # hypothesis' Random
    listed = tuple(
        ListedDevice(f"Vulkan{place}", cards[number].name, cards[number].total_bytes)
        for place, number in enumerate(order)
    )
    build = Capabilities("1", frozenset(), Backend.VULKAN, (), listed=listed)
    for number, card in enumerate(cards):
        found = identified(build, cards, card)
        assert (found is not None) is (kinds.count(kinds[number]) == 1)
        assert found is None or found.name == f"Vulkan{order.index(number)}"
