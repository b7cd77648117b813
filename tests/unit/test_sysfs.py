"""Cards whose drivers are in the kernel: AMD's and Intel's, and which vendor is taken."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.detect import open_cards
from lllm3090d.gpus.fdinfo import card_use, own_processes
from lllm3090d.gpus.pci import link_of, product_name
from lllm3090d.gpus.readings import (
    CardKind,
    CardProcess,
    NoCardError,
    PcieLink,
    normal_pci_address,
)
from lllm3090d.gpus.sysfs import SEARCH_PAUSE_S, SysfsReader, open_amd, open_intel
from lllm3090d.settings import CardChoice
from tests.fakes.kernel import FakeKernel

pytestmark = pytest.mark.unit

MIB = 1 << 20
GIB = 1 << 30
ADDRESS = "0000:03:00.0"
NAMES = """\
# a table of names
1002  Advanced Micro Devices, Inc. [AMD/ATI]
\t744c  Navi 31 [Radeon RX 7900 XT/7900 XTX]
\t\t1002 0e3b  Reference board
\t7480  Navi 33
8086  Intel Corporation
\te20b  Battlemage G21 [Arc B580]
"""
XE = {f"drm/{ADDRESS}/vram0": 12 * GIB, f"drm/{ADDRESS}/stolen": 64 * MIB}


@pytest.fixture
def kernel(tmp_path: Path) -> FakeKernel:
    made = FakeKernel(tmp_path / "kernel")
    (made.root / "pci.ids").write_text(NAMES)
    return made


def opened(kernel: FakeKernel) -> SysfsReader:
    (reader,) = open_amd(kernel.roots)
    return reader


def test_an_amd_card(kernel: FakeKernel) -> None:
    kernel.amd(unique_id="a1b2c3d4e5f60718")
    reader = opened(kernel)
    card, reading = reader.card, reader.read()
    assert (card.kind, card.uuid, card.pci_address) == (CardKind.AMD, "GPU-a1b2c3d4e5f60718", ADDRESS)
    assert card.name == "AMD Radeon RX 7900 XT/7900 XTX"
    assert card.driver_version is not None
    assert card.driver_version.startswith("amdgpu of Linux ")
    assert (card.total_bytes, card.compute_capability, card.driver_problem) == (24 * GIB, None, "")
    assert (reading.total_bytes, reading.used_bytes, reading.free_bytes) == (24 * GIB, GIB, 23 * GIB)
    assert reading.reserved_bytes is None  # not told, which is not 0
    assert reading.processes_known


def test_readings_follow_the_card(kernel: FakeKernel) -> None:
    device = kernel.amd()
    reader = opened(kernel)
    (device / "mem_info_vram_used").write_text(f"{5 * GIB}\n")
    assert reader.read().free_bytes == 19 * GIB


def test_a_card_without_a_number_of_its_own_goes_by_its_address(kernel: FakeKernel) -> None:
    kernel.amd(device="0xffff", product_name="")
    card = opened(kernel).card
    assert (card.uuid, card.name) == (f"pci-{ADDRESS}", "AMD graphics ffff")


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("mem_info_vram_used", str(25 * GIB), "cannot be true"),
        ("mem_info_vram_used", "-1", "cannot be true"),
        ("mem_info_vram_total", "0", "cannot be true"),
        ("mem_info_vram_total", str(20 * GIB), "its total was"),
        ("mem_info_vram_used", "", "invalid literal"),
        ("mem_info_vram_used", "0x10", "invalid literal"),
        ("mem_info_vram_used", None, "No such file"),
    ],
)
def test_absurd_or_missing_figures_are_an_error_and_no_number(
    kernel: FakeKernel, name: str, text: str | None, said: str
) -> None:
    device = kernel.amd()
    reader = opened(kernel)
    if text is None:
        (device / name).unlink()
    else:
        (device / name).write_text(text)
    with pytest.raises(LlmError) as caught:
        reader.read()
    assert caught.value.code is ErrorCode.CARD_UNREADABLE
    assert said in caught.value.message
    (device / "mem_info_vram_total").write_text(str(24 * GIB))
    (device / "mem_info_vram_used").write_text("0")
    assert reader.read().free_bytes == 24 * GIB  # a card that comes back is read again


def test_the_largest_card_comes_first(kernel: FakeKernel) -> None:
    kernel.amd(0, 8 * GIB, address="0000:03:00.0")
    kernel.amd(1, 24 * GIB, address="0000:0a:00.0")
    kernel.amd(10, 16 * GIB, address="0000:0b:00.0")
    assert [r.card.total_bytes // GIB for r in open_amd(kernel.roots)] == [24, 16, 8]


def test_other_drivers_and_other_vendors_are_no_amd_cards(kernel: FakeKernel) -> None:
    kernel.card(0, "0x1002", "radeon", "0000:01:00.0")
    kernel.card(1, "0x10de", "nouveau", "0000:02:00.0", mem_info_vram_total="1", mem_info_vram_used="1")
    kernel.card(2, "0x1002", "amdgpu", "vkms", mem_info_vram_total="1", mem_info_vram_used="1")
    with pytest.raises(NoCardError, match=r"0000:01:00\.0: its driver tells no use of video memory"):
        open_amd(kernel.roots)


def test_without_drm_there_is_no_card(tmp_path: Path) -> None:
    kernel = FakeKernel(tmp_path / "kernel")
    (kernel.root / "sys/class/drm").rmdir()
    with pytest.raises(NoCardError, match="the kernel lists no card of AMD"):
        open_amd(kernel.roots)


def test_a_card_that_cannot_be_read_when_it_is_opened_is_there_all_the_same(kernel: FakeKernel) -> None:
    device = kernel.amd()
    (device / "mem_info_vram_total").write_text("soon")
    reader = opened(kernel)
    assert reader.card.total_bytes == 0
    with pytest.raises(LlmError):
        reader.read()
    (device / "mem_info_vram_total").write_text(str(24 * GIB))
    assert reader.read().total_bytes == 24 * GIB


# --- Intel ------------------------------------------------------------------------------------------------------------


def test_an_intel_card_is_read_through_dmem(kernel: FakeKernel) -> None:
    kernel.card(0, "0x8086", "xe", device="0xe20b")
    kernel.regions(XE, {f"drm/{ADDRESS}/vram0": 2 * GIB, f"drm/{ADDRESS}/stolen": MIB})
    (reader,) = open_intel(kernel.roots)
    reading = reader.read()
    assert (reader.card.kind, reader.card.name) == (CardKind.INTEL, "Intel Arc B580")
    assert (reading.total_bytes, reading.used_bytes, reading.reserved_bytes) == (12 * GIB, 2 * GIB, None)
    assert reader.card.link is None


def test_the_tiles_of_an_intel_card_are_added(kernel: FakeKernel) -> None:
    kernel.card(0, "0x8086", "xe")
    regions = {
        f"drm/{ADDRESS}/vram0": 64 * GIB,
        f"drm/{ADDRESS}/vram1": 64 * GIB,
        "drm/0000:04:00.0/vram0": GIB,
    }
    kernel.regions(regions, dict.fromkeys(regions, GIB))
    (reader,) = open_intel(kernel.roots)
    assert (reader.read().total_bytes, reader.read().used_bytes) == (128 * GIB, 2 * GIB)


@pytest.mark.parametrize("capacities", [{}, {f"drm/{ADDRESS}/stolen": MIB}, {"drm/0000:04:00.0/vram0": GIB}])
def test_an_intel_card_without_told_memory_is_not_offered(
    kernel: FakeKernel, capacities: dict[str, int]
) -> None:
    kernel.card(0, "0x8086", "i915")
    kernel.regions(capacities, {})
    with pytest.raises(NoCardError, match="driver i915 tells no video memory"):
        open_intel(kernel.roots)


def test_an_intel_card_of_which_no_use_is_told_is_unreadable_not_empty(kernel: FakeKernel) -> None:
    kernel.card(0, "0x8086", "xe")
    kernel.regions(XE, {})
    (reader,) = open_intel(kernel.roots)
    with pytest.raises(LlmError, match="does not tell its memory"):
        reader.read()


# --- processes --------------------------------------------------------------------------------------------------------


def test_a_client_counts_once_whatever_the_number_of_its_files(kernel: FakeKernel) -> None:
    kernel.process(10)
    kernel.uses(10, 5, client=1, kib=1024)
    kernel.uses(10, 6, client=1, kib=1024)
    kernel.uses(10, 7, client=2, kib=2048)
    kernel.uses(10, 8, client=3, kib=4096, address="0000:04:00.0")  # another card
    kernel.opens(10, 9, "drm-pdev:\t0000:03:00.0\ndrm-memory-vram:\t8 MiB\n", target="/dev/null")
    assert card_use(10, ADDRESS, kernel.roots.proc) == CardProcess(10, 3 * MIB)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("drm-memory-vram:\t12 MiB\n", 12 * MIB),
        ("drm-memory-vram:\t4096\n", 4096),
        ("drm-total-vram0:\t9 MiB\ndrm-resident-vram0:\t8 MiB\ndrm-shared-vram0:\t1 MiB\n", 8 * MIB),
        ("drm-total-vram0:\t9 MiB\n", 9 * MIB),
        ("drm-resident-vram0:\t1 MiB\ndrm-resident-vram1:\t2 MiB\ndrm-resident-system:\t9 MiB\n", 3 * MIB),
        ("drm-memory-vram:\t0\n", 0),
        ("drm-memory-gtt:\t9 MiB\n", None),
        ("drm-memory-vram:\tmany KiB\n", None),
        ("", None),
    ],
)
def test_how_drivers_tell_video_memory(kernel: FakeKernel, lines: str, expected: int | None) -> None:
    kernel.process(10)
    kernel.opens(10, 5, f"drm-pdev:\t{ADDRESS}\ndrm-client-id:\t1\n{lines}")
    assert card_use(10, ADDRESS, kernel.roots.proc) == CardProcess(10, expected)


def test_one_client_that_does_not_tell_makes_the_sum_unknown(kernel: FakeKernel) -> None:
    kernel.process(10)
    kernel.uses(10, 5, client=1, kib=1024)
    kernel.opens(10, 6, f"drm-pdev:\t{ADDRESS}\ndrm-client-id:\t2\n")
    assert card_use(10, ADDRESS, kernel.roots.proc) == CardProcess(10, None)


def test_who_has_nothing_open_or_is_gone_holds_nothing(kernel: FakeKernel) -> None:
    kernel.process(10)
    kernel.uses(10, 5, client=1, kib=1, address="0000:04:00.0")
    assert card_use(10, ADDRESS, kernel.roots.proc) is None
    assert card_use(11, ADDRESS, kernel.roots.proc) is None


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_files_that_may_not_be_read_are_unknown_and_not_nothing(kernel: FakeKernel) -> None:
    place = kernel.process(10)
    (place / "fd").chmod(0)
    assert card_use(10, ADDRESS, kernel.roots.proc) == CardProcess(10, None)
    (place / "fd").chmod(stat.S_IRWXU)


def test_processes_of_the_reading_are_found_late_and_watched_ones_at_once(kernel: FakeKernel) -> None:
    now_s = 100.0
    device = kernel.amd()
    card = opened(kernel).card
    files = device / "mem_info_vram_total", device / "mem_info_vram_used"
    reader = SysfsReader(
        card,
        lambda: (int(files[0].read_text()), int(files[1].read_text())),
        kernel.roots.proc,
        lambda: now_s,
    )
    kernel.process(10)
    kernel.uses(10, 5, client=1, kib=1024)
    assert reader.read().processes == (CardProcess(10, MIB),)
    kernel.process(11)
    kernel.uses(11, 5, client=2, kib=2048)
    assert reader.read().processes == (CardProcess(10, MIB),)
    reader.watch({11, 12})
    assert reader.read().processes == (CardProcess(10, MIB), CardProcess(11, 2 * MIB))
    reader.watch(())
    now_s += SEARCH_PAUSE_S
    assert [process.pid for process in reader.read().processes] == [10, 11]


def test_this_process_is_one_of_ours() -> None:
    assert os.getpid() in own_processes()
    assert card_use(os.getpid(), ADDRESS) is None


# --- links and names --------------------------------------------------------------------------------------------------


def write_link(place: Path, speed: str, width: str) -> None:
    place.mkdir(parents=True, exist_ok=True)
    (place / "max_link_speed").write_text(f"{speed}\n")
    (place / "current_link_width").write_text(f"{width}\n")


def test_the_narrowest_part_of_the_way_counts(tmp_path: Path) -> None:
    root = tmp_path / "pci0000:00/0000:00:01.1"
    write_link(root, "16.0 GT/s PCIe", "8")
    write_link(root / "0000:01:00.0", "32.0 GT/s PCIe", "8")
    write_link(root / "0000:01:00.0/0000:02:00.0", "16.0 GT/s PCIe", "16")
    card = root / "0000:01:00.0/0000:02:00.0/0000:03:00.0"
    write_link(card, "16.0 GT/s PCIe", "16")
    assert link_of(card) == PcieLink(4, 8)
    write_link(card, "Unknown", "0")
    assert link_of(card) == PcieLink(4, 8)


def test_a_device_that_says_nothing_of_its_link(tmp_path: Path) -> None:
    (tmp_path / ADDRESS).mkdir()
    assert link_of(tmp_path / ADDRESS) is None


@pytest.mark.parametrize(
    ("link", "expected"),
    [
        (PcieLink(3, 16), 15_753_600_000),
        (PcieLink(4, 16), 31_507_200_000),
        (PcieLink(5, 8), 31_508_000_000),
        (PcieLink(1, 1), 250_000_000),
        (PcieLink(9, 16), None),
    ],
)
def test_what_a_link_carries_by_the_standard(link: PcieLink, expected: int | None) -> None:
    assert link.bytes_per_s == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("00000000:01:00.0", "0000:01:00.0"),
        ("0000:C1:00.0", "0000:c1:00.0"),
        ("00010000:0A:1F.7", "10000:0a:1f.7"),
        ("0000:03:00.0\n", "0000:03:00.0"),
        ("03:00.0", ""),
        ("pci0000:00", ""),
        ("", ""),
    ],
)
def test_addresses_in_one_form(text: str, expected: str) -> None:
    assert normal_pci_address(text) == expected


def test_names_of_devices(tmp_path: Path) -> None:
    table = tmp_path / "pci.ids"
    table.write_text(NAMES)
    tables = (tmp_path / "none", table)
    assert product_name("1002", "744c", tables) == "Radeon RX 7900 XT/7900 XTX"
    assert product_name("1002", "7480", tables) == "Navi 33"
    assert product_name("8086", "744c", tables) == ""
    assert product_name("1002", "0e3b", tables) == ""  # a board, no device
    assert product_name("1002", "744c", (tmp_path / "none",)) == ""


# --- which vendor -----------------------------------------------------------------------------------------------------


def test_asked_for_by_name(kernel: FakeKernel) -> None:
    kernel.amd(0)
    kernel.card(1, "0x8086", "xe", "0000:04:00.0")
    kernel.regions({"drm/0000:04:00.0/vram0": 12 * GIB}, {"drm/0000:04:00.0/vram0": 0})
    assert [reader.card.kind for reader in open_cards(CardChoice.AMD, kernel.roots)] == [CardKind.AMD]
    assert [reader.card.kind for reader in open_cards(CardChoice.INTEL, kernel.roots)] == [CardKind.INTEL]


@pytest.mark.parametrize("choice", [CardChoice.AMD, CardChoice.INTEL])
def test_asked_for_and_absent_is_an_error(kernel: FakeKernel, choice: CardChoice) -> None:
    with pytest.raises(LlmError, match=f'card = "{choice}" asks for') as caught:
        open_cards(choice, kernel.roots)
    assert caught.value.code is ErrorCode.CARD_UNREADABLE
    assert "lspci" in (caught.value.hint or "")


def test_the_shared_memory_of_a_processor_is_no_card(kernel: FakeKernel) -> None:
    kernel.amd(0, 512 * MIB, 100 * MIB)
    with pytest.raises(LlmError, match="has 512 MiB of video memory, less than 3072"):
        open_cards(CardChoice.AMD, kernel.roots)
    kernel.amd(1, 3 * GIB, 0, address="0000:04:00.0")
    (reader,) = open_cards(CardChoice.AMD, kernel.roots)
    assert reader.card.total_bytes == 3 * GIB
