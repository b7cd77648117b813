"""Which Vulkan device is at which PCI address: the real helper process, with a library that lists what a test says."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from lllm3090d.engines import probe_cache
from lllm3090d.engines.capabilities import AddressedDevice, Backend, Build, Capabilities, ListedDevice
from lllm3090d.engines.help_text import parse_listed
from lllm3090d.engines.probe import probe
from lllm3090d.engines.probe_cache import ProbeCache, pack_addressed, unpack_addressed
from lllm3090d.engines.process import Helpers, run_program
from lllm3090d.engines.visibility import Sight, can_be_kept_to, sight
from lllm3090d.engines.vulkan_listing import (
    ListingError,
    VulkanDevice,
    agree,
    chosen_devices,
    parse_document,
    permitted,
)
from lllm3090d.engines.vulkan_probe import wants_addresses, with_addresses
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.readings import Card, CardKind
from lllm3090d.store import FILE_NAME, Store
from tests.fakes import vulkan as fakes
from tests.fakes.engine import install_fake_engine, set_behaviour
from tests.fakes.vulkan import FakeVulkan, FakeVulkanDevice

pytestmark = pytest.mark.unit

MIB = 1 << 20
FIRST, SECOND = "0000:01:00.0", "0000:41:00.0"
NAME = "NVIDIA GeForce RTX 3090"
TWINS = tuple(
    Card(CardKind.NVIDIA, uuid, NAME, "580.95", 24576 * MIB, pci_address=address)
    for uuid, address in (("GPU-1", FIRST), ("GPU-2", SECOND))
)
# As the loader lists them here: the second card first, and in between what computes in software.
AT_SECOND = FakeVulkanDevice(pci=SECOND, uuid="02" * 16)
AT_FIRST = FakeVulkanDevice(pci=FIRST, uuid="01" * 16)
SOFTWARE = FakeVulkanDevice(
    "llvmpipe (LLVM 22.1.8, 256 bits)",
    None,
    fakes.CPU,
    fakes.MESA_VENDOR,
    fakes.LLVMPIPE,
    heaps=((24105 << 20, 1),),
)
LISTED = (AT_SECOND, SOFTWARE, AT_FIRST)
TOTAL_BYTES = (24576 + 246) * MIB  # an engine counts the window into it as well


def line(device: FakeVulkanDevice, number: int) -> str:
    """What a real engine lists of it."""
    total = sum(size for size, flags in device.heaps if flags & 1) // MIB
    return f"Vulkan{number}: {device.name} ({total} MiB, {total - 200} MiB free)"


class Bench:
    """A Vulkan build and the loader that it brings with it."""

    def __init__(self, directory: Path, *devices: FakeVulkanDevice) -> None:
        self.directory = install_fake_engine(directory / "engine")
        self.build = Build(self.directory / "llama-server", (self.directory,), "test", locked=False)
        self.vulkan = FakeVulkan(self.directory)
        self.environment = {"PATH": "/usr/bin:/bin"}
        self.show(*devices)

    def show(self, *devices: FakeVulkanDevice, first: tuple[str, ...] = ()) -> None:
        """Let library and engine have these devices."""
        self.vulkan.write(*devices, first=first)
        set_behaviour(self.directory, devices=[line(each, number) for number, each in enumerate(devices)])

    def ask(self, **variables: str) -> Capabilities:
        """What the doctor does."""
        environment = self.environment | variables
        return with_addresses(
            self.build, probe(self.build, inherited=environment), inherited=environment, helper_limit_s=30.0
        )


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("vulkan"), *LISTED)


def _device(index: int, **changes: object) -> VulkanDevice:
    device = VulkanDevice(
        index,
        NAME,
        fakes.DISCRETE,
        fakes.NVIDIA_VENDOR,
        fakes.NVIDIA,
        "01" * 16,
        FIRST,
        ((24576 * MIB, True),),
    )
    return replace(device, **changes)  # type: ignore[arg-type]  # each test names fields of it


# --- the helper and the build -----------------------------------------------------------------------------------


def test_equal_cards_are_told_apart_by_address(bench: Bench) -> None:
    bench.show(*LISTED)
    found = bench.ask()
    assert found.unaddressed_because == ""
    assert found.addressed == (
        AddressedDevice(0, SECOND, NAME, TOTAL_BYTES),
        AddressedDevice(2, FIRST, NAME, TOTAL_BYTES),
    )
    assert all(can_be_kept_to(found, TWINS, card) for card in TWINS)
    assert sight(found, TWINS, TWINS[:1]) == Sight(("Vulkan0",), (("GGML_VK_VISIBLE_DEVICES", "2"),))
    assert sight(found, TWINS, TWINS[1:]) == Sight(("Vulkan0",), (("GGML_VK_VISIBLE_DEVICES", "0"),))
    both = sight(found, TWINS, TWINS)
    assert both == Sight(("Vulkan0", "Vulkan1"), (("GGML_VK_VISIBLE_DEVICES", "2,0"),))


def test_what_a_person_has_hidden_stays_hidden(bench: Bench) -> None:
    bench.show(*LISTED)
    found = bench.ask(GGML_VK_VISIBLE_DEVICES="2")
    assert [device.pci_address for device in found.addressed] == [FIRST]
    assert can_be_kept_to(found, TWINS, TWINS[0])
    with pytest.raises(LlmError, match=f"{SECOND}.*Those it can use are at {FIRST}"):
        sight(found, TWINS, TWINS[1:])


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (("version 1 0",), "the Vulkan loader is older than 1.1"),
        (("fail vkCreateInstance -9",), "vkCreateInstance fails with -9"),
        (("fail vkEnumeratePhysicalDevices -3",), "vkEnumeratePhysicalDevices fails with -3"),
        (
            ("fail vkEnumerateDeviceExtensionProperties -1",),
            "vkEnumerateDeviceExtensionProperties fails with -1",
        ),
        (("abort",), r"SIGABRT .*\(fake vulkan: the driver gives up\)"),
    ],
)
def test_a_library_that_fails(bench: Bench, first: tuple[str, ...], reason: str) -> None:
    bench.show(AT_SECOND, AT_FIRST, first=first)
    with pytest.raises(LlmError, match=f"which of the engine's devices.*not known: .*{reason}") as refused:
        sight(bench.ask(), TWINS, TWINS[:1])
    assert refused.value.code is ErrorCode.ENGINE_UNUSABLE


def test_a_library_that_hangs_takes_its_time_and_no_more(bench: Bench) -> None:
    bench.show(AT_SECOND, AT_FIRST, first=("hang",))
    known = probe(bench.build, inherited=bench.environment)
    began_s = time.monotonic()
    found = with_addresses(bench.build, known, inherited=bench.environment, helper_limit_s=0.5)
    assert time.monotonic() - began_s < 20
    assert found.unaddressed_because == "Vulkan did not answer a question for its devices within 0.5 s"
    assert found.addressed == ()


def test_no_library_at_all(tmp_path: Path) -> None:
    bench = Bench(tmp_path, AT_SECOND, AT_FIRST)
    library = bench.directory / fakes.LIBRARY
    library.write_bytes(b"no library")
    found = bench.ask()
    assert found.unaddressed_because.startswith("the Vulkan loader cannot be loaded (")
    assert "file too short" in found.unaddressed_because or "ELF" in found.unaddressed_because


def test_what_a_layer_prints_is_no_answer(bench: Bench) -> None:
    bench.show(*LISTED, first=('noise {"devices": []}',))
    assert [device.index for device in bench.ask().addressed] == [0, 2]


def test_devices_without_addresses_are_left_out(bench: Bench) -> None:
    old = replace(AT_FIRST, api=(1, 0), pci=None)  # of version 1.0: it is not even asked for more
    bench.show(AT_SECOND, old)
    found = bench.ask()
    assert [device.pci_address for device in found.addressed] == [SECOND]
    assert not can_be_kept_to(found, TWINS, TWINS[0])
    bench.show(replace(AT_SECOND, pci=None), replace(AT_FIRST, pci=None))
    assert bench.ask().unaddressed_because == "no Vulkan driver tells the PCI address of a card"


def test_an_engine_that_counts_otherwise_is_not_believed(bench: Bench) -> None:
    """It lists other devices than the loader when it is shown these indices."""
    bench.show(*LISTED)
    set_behaviour(bench.directory, devices=[line(AT_SECOND, 0), line(AT_FIRST, 1), line(SOFTWARE, 2)])
    found = bench.ask()
    assert found.addressed == ()
    assert (
        "the engine lists Vulkan0 (NVIDIA GeForce RTX 3090), Vulkan1 (llvmpipe" in found.unaddressed_because
    )
    set_behaviour(bench.directory, devices=[line(AT_SECOND, 0), line(AT_FIRST, 1)])
    assert "the engine lists none" in bench.ask().unaddressed_because


def test_by_name_where_addresses_are_not_known(bench: Bench) -> None:
    other = replace(AT_FIRST, name="NVIDIA GeForce RTX 4090", pci=None)
    bench.show(replace(AT_SECOND, pci=None), other)
    cards = (replace(TWINS[0], name="NVIDIA GeForce RTX 4090"), TWINS[1])
    assert sight(bench.ask(), cards, cards) == Sight(("Vulkan1", "Vulkan0"))


def test_it_is_asked_only_where_it_is_of_use() -> None:
    one = Capabilities("1", frozenset(), Backend.VULKAN, ("Vulkan0",))
    listed = parse_listed_of(SOFTWARE, AT_FIRST)
    assert not wants_addresses(one, {})
    assert not wants_addresses(replace(one, listed=listed[:1]), {})
    assert wants_addresses(replace(one, listed=listed[:1]), {"GGML_VK_VISIBLE_DEVICES": "1"})
    assert wants_addresses(replace(one, listed=listed), {})
    assert not wants_addresses(replace(one, listed=listed, backend=Backend.CUDA), {})


def parse_listed_of(*devices: FakeVulkanDevice) -> tuple[ListedDevice, ...]:
    """The same through the parser of real lists."""
    lines = (f"  {line(device, number)}\n" for number, device in enumerate(devices))
    return parse_listed("Available devices:\n" + "".join(lines))


def test_a_daemon_that_stops_asks_nothing_more(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.show(AT_SECOND, AT_FIRST)
    known = probe(bench.build, inherited=bench.environment)
    helpers = Helpers()
    helpers.stop()
    defaults = run_program.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "helpers", helpers)
    with pytest.raises(LlmError) as stopped:
        with_addresses(bench.build, known, inherited=bench.environment)
    assert stopped.value.code is ErrorCode.SHUTTING_DOWN


# --- what is remembered -----------------------------------------------------------------------------------------


def test_addresses_outlive_the_daemon_and_failures_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GGML_VK_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(probe_cache, "DRM_CLASS", tmp_path / "drm")
    bench = Bench(tmp_path, *LISTED)
    bench.vulkan.write(*LISTED, first=("fail vkCreateInstance -9",))
    ahead_s = 0.0
    store = Store(tmp_path / "state" / FILE_NAME)
    cache = ProbeCache(store=lambda: store, clock=lambda: time.monotonic() + ahead_s)
    assert "vkCreateInstance" in cache.get(bench.build).unaddressed_because
    bench.vulkan.write(*LISTED)
    assert "vkCreateInstance" in cache.get(bench.build).unaddressed_because  # not at every load
    assert ProbeCache(store=lambda: store).get(bench.build).addressed
    ahead_s = probe_cache.ADDRESS_RETRY_S
    known = cache.get(bench.build)
    assert [device.index for device in known.addressed] == [0, 2]

    bench.vulkan.write(first=("abort",))  # whoever asks now learns nothing
    assert ProbeCache(store=lambda: store).get(bench.build).addressed == known.addressed
    # A card that is plugged in moves the others.
    (tmp_path / "drm" / "card1").mkdir(parents=True)
    assert "SIGABRT" in cache.get(bench.build).unaddressed_because
    store.close()


@pytest.mark.parametrize("body", [None, "", "{", "7", "[[1]]", '[["x", "a", "b", 1]]', "null", '{"a": 1}'])
def test_a_damaged_row_is_asked_again(body: str | None) -> None:
    assert unpack_addressed(body) == ()


def test_rows_are_what_was_packed() -> None:
    devices = (AddressedDevice(0, SECOND, "ü", 7), AddressedDevice(2, FIRST, NAME, TOTAL_BYTES))
    assert unpack_addressed(pack_addressed(devices)) == devices
    assert pack_addressed(()) is None


# --- pure -------------------------------------------------------------------------------------------------------

GOOD = {
    "name": NAME,
    "type": 2,
    "vendor": 0x10DE,
    "heaps": [{"bytes": 24576 * MIB, "local": True}],
    "uuid": "01" * 16,
    "driver": 4,
    "pci": "00000000:01:00.0",
}


def test_a_document() -> None:
    text = (
        "a line of a driver\n" + json.dumps({"devices": [GOOD, GOOD | {"pci": None, "driver": None}]}) + "\n"
    )
    assert parse_document(text) == (_device(0), _device(1, pci_address="", driver=None))
    with pytest.raises(ListingError, match="no such thing"):
        parse_document(json.dumps({"problem": "no such thing"}))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n",
        "{",
        "[" * 100_000,
        "null",
        "[]",
        "{}",
        '{"devices": {}}',
        '{"devices": [7]}',
        json.dumps({"devices": [GOOD], "more": 1}),
        *(json.dumps({"devices": [GOOD | {key: value}]}) for key, value in (
            ("name", None),
            ("type", "2"),
            ("type", -1),
            ("vendor", 1.5),
            ("heaps", None),
            ("heaps", [{"bytes": 1 << 64, "local": True}]),
            ("heaps", [{"bytes": 1}]),
            ("uuid", 7),
            ("pci", ["0000:01:00.0"]),
        )),
        json.dumps({"devices": [{key: value for key, value in GOOD.items() if key != "pci"}]}),
    ],
)  # fmt: skip
def test_what_is_no_document(text: str) -> None:
    with pytest.raises(ListingError, match="no document that is understood"):
        parse_document(text)


def test_an_address_that_is_none() -> None:
    for wrong in ("", "01:00.0", "0000:01:00.8", "0000:01:00.0\n0000:02:00.0"):
        (device,) = parse_document(json.dumps({"devices": [GOOD | {"pci": wrong}]}))
        assert device.pci_address == ""
        assert chosen_devices([device]) == ()


@pytest.mark.parametrize(
    ("vendor", "drivers", "taken"),
    [
        (fakes.AMD_VENDOR, (fakes.AMDVLK, fakes.RADV), 1),
        (fakes.AMD_VENDOR, (fakes.RADV, fakes.AMDVLK), 0),
        (fakes.AMD_VENDOR, (fakes.AMD_PROPRIETARY, fakes.AMDVLK), 1),
        (fakes.NVIDIA_VENDOR, (fakes.NVK, fakes.NVIDIA), 1),
        (fakes.INTEL_VENDOR, (fakes.DOZEN, fakes.MESA_INTEL), 1),
        (fakes.INTEL_VENDOR, (99, fakes.DOZEN), 1),
        (0x1234, (99, 98), 0),
        (0x1234, (99, None), 0),
        (0x1234, (None, fakes.DOZEN), 1),
    ],
)
def test_of_two_drivers_the_one_that_the_engine_takes(
    vendor: int, drivers: tuple[int | None, int | None], taken: int
) -> None:
    listed = [_device(index, vendor=vendor, driver=driver) for index, driver in enumerate(drivers)]
    assert chosen_devices(listed) == (listed[taken],)
    # Also where they do not agree on the card's UUID: the address is the same.
    listed[0] = replace(listed[0], uuid=None)
    assert chosen_devices(listed) == (listed[taken],)


def test_one_driver_with_two_devices_at_one_address() -> None:
    twice = (_device(0), _device(1))  # its manifest is installed twice
    assert chosen_devices(twice) == twice[:1]
    parts = (_device(0), _device(1, uuid="02" * 16))
    assert chosen_devices((*parts, _device(2, pci_address=SECOND))) == (_device(2, pci_address=SECOND),)


def test_what_is_no_card_is_left_out() -> None:
    kinds = (fakes.OTHER, fakes.CPU, fakes.VIRTUAL, fakes.INTEGRATED, fakes.DISCRETE)
    listed = [
        _device(index, kind=kind, pci_address=f"0000:0{index}:00.0") for index, kind in enumerate(kinds)
    ]
    assert [device.index for device in chosen_devices(listed)] == [3, 4]


@pytest.mark.parametrize(
    ("visible", "left"),
    [
        (None, [0, 1, 2]),
        ("2,0", [0, 2]),
        (" 1 ", [1]),
        ("", []),
        ("0,x,1", [0]),
        ("-1", []),
        ("7", []),
        ("\u0661", []),
    ],
)
def test_what_a_variable_leaves(visible: str | None, left: list[int]) -> None:
    assert [device.index for device in permitted([_device(0), _device(1), _device(2)], visible)] == left


def test_whether_a_list_is_of_these_devices() -> None:
    discrete = _device(0, heaps=((256 * MIB, True), (24000 * MIB, True), (9 * MIB, False)))
    integrated = _device(
        1, name="Radeon 780M", kind=fakes.INTEGRATED, heaps=((512 * MIB, True), (8000 * MIB, False))
    )

    def listed(*what: tuple[str, int]) -> tuple[ListedDevice, ...]:
        return tuple(
            ListedDevice(f"Vulkan{place}", name, mib * MIB) for place, (name, mib) in enumerate(what)
        )

    for total in (24256, 256, 24000):  # all heaps, or one, as older engines count
        assert agree((discrete, integrated), listed((NAME, total), ("Radeon 780M", 8512)))
    assert not agree((discrete,), listed((NAME, 24265)))
    assert not agree((discrete, integrated), listed(("Radeon 780M", 8512), (NAME, 24256)))
    assert not agree((discrete,), listed((NAME, 24256), (NAME, 24256)))
    assert not agree((discrete,), ())
    assert not agree((discrete,), (ListedDevice("Vulkan1", NAME, 24256 * MIB),))


def test_cards_that_no_address_tells_apart() -> None:
    known = Capabilities(
        "1",
        frozenset(),
        Backend.VULKAN,
        ("Vulkan0", "Vulkan1"),
        listed=parse_listed_of(AT_SECOND, AT_FIRST),
        addressed=(
            AddressedDevice(0, SECOND, NAME, TOTAL_BYTES),
            AddressedDevice(1, FIRST, NAME, TOTAL_BYTES),
        ),
    )
    assert all(can_be_kept_to(known, TWINS, card) for card in TWINS)
    nowhere = tuple(replace(card, pci_address="") for card in TWINS)
    doubled = tuple(replace(card, pci_address=FIRST) for card in TWINS)
    # Numbers of another world, as in some virtual machines: the size says so.
    smaller = tuple(replace(card, total_bytes=12 << 30) for card in TWINS)
    for cards in (nowhere, doubled, smaller):
        assert not any(can_be_kept_to(known, cards, card) for card in cards)
    twice = replace(known, addressed=(*known.addressed, AddressedDevice(2, FIRST, NAME, TOTAL_BYTES)))
    assert not can_be_kept_to(twice, TWINS, TWINS[0])
    # Not yet read: there is no size to compare.
    unread = (replace(TWINS[0], total_bytes=0), TWINS[1])
    assert can_be_kept_to(known, unread, unread[0])


def test_variables_with_which_they_were_listed_come_along() -> None:
    known = Capabilities(
        "1",
        frozenset(),
        Backend.VULKAN,
        ("Vulkan0", "Vulkan1"),
        listed=parse_listed_of(AT_SECOND, AT_FIRST),
        device_environment=(("GGML_VK_VISIBLE_DEVICES", "4,3"), ("VK_DRIVER_FILES", "/x.json")),
        addressed=(AddressedDevice(3, FIRST, NAME, TOTAL_BYTES),),
    )
    assert sight(known, TWINS, TWINS[:1]) == Sight(
        ("Vulkan0",), (("GGML_VK_VISIBLE_DEVICES", "3"), ("VK_DRIVER_FILES", "/x.json"))
    )
    # One card of several devices: the others, which are none of ours, are hidden too.
    assert sight(known, TWINS[:1], TWINS[:1]) == sight(known, TWINS, TWINS[:1])
