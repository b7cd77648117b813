"""What the doctor says of driver, device nodes, engine, Vulkan and suspend."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from lllm3090d.doctor import card_checks, vulkan_check
from lllm3090d.doctor.findings import Level
from lllm3090d.doctor.surroundings import CardsFound, EngineFound
from lllm3090d.engines.capabilities import AddressedDevice, Backend, Capabilities, ListedDevice
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.nvml import driver_problem
from lllm3090d.gpus.readings import Card
from lllm3090d.planning.units import MIB
from lllm3090d.settings import CardChoice, SuspendPolicy
from tests.fakes.doctor_scene import (
    AMD_CARD,
    BUILD,
    CPU,
    CUDA,
    HOST,
    NVIDIA_CARD,
    VULKAN,
    Scene,
    capabilities,
)

pytestmark = pytest.mark.unit

OK, WARN, FAIL = Level.OK, Level.WARN, Level.FAIL
SOFTWARE = capabilities(
    Backend.VULKAN, ListedDevice("Vulkan0", "llvmpipe (LLVM 19.1, 256 bits)", 24105 * MIB)
)
AT_ITS_ADDRESS = dataclasses.replace(
    capabilities(Backend.VULKAN, ListedDevice("Vulkan0", "AMD Radeon Graphics (RADV)", 24560 * MIB)),
    addressed=(AddressedDevice(1, AMD_CARD.pci_address, "AMD Radeon Graphics (RADV)", 24560 * MIB),),
)
ROCM = capabilities(Backend.ROCM, ListedDevice("ROCm0", "AMD Radeon RX 7900 XTX", 24560 * MIB))
LOADER = {"/usr/lib/x86_64-linux-gnu/libvulkan.so.1": ""}


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def pci(address: str, vendor: str, kind: str = "0x030000") -> dict[str, str]:
    place = f"/sys/bus/pci/devices/{address}"
    return {f"{place}/class": f"{kind}\n", f"{place}/vendor": f"{vendor}\n"}


# --- driver -----------------------------------------------------------------------------------------------------


def test_a_driver_that_answers(scene: Scene) -> None:
    found = card_checks.driver(scene.world, scene.facts)
    assert found.level is OK
    assert "RTX 3090, 24576 MiB, driver 580.95.05" in found.message


def test_an_old_driver(scene: Scene) -> None:
    old = dataclasses.replace(NVIDIA_CARD, driver_version="535.1", driver_problem=driver_problem("535.1"))
    scene.change(cards=CardsFound((old,)))
    found = card_checks.driver(scene.world, scene.facts)
    assert found.level is WARN
    assert "older than 550" in found.message


def test_a_driver_that_hangs(scene: Scene) -> None:
    scene.change(cards=None)
    assert card_checks.driver(scene.world, scene.facts).level is FAIL


@pytest.mark.parametrize(
    ("message", "hint"),
    [("NVML says: Driver/library version mismatch.", "Reboot."), ("The card is lost.", "See nvidia-smi.")],
)
def test_a_driver_in_trouble(scene: Scene, message: str, hint: str) -> None:
    scene.put({"/sys/module/nvidia/version": "570.1\n"})
    scene.change(
        cards=CardsFound(problem=LlmError(ErrorCode.CARD_UNREADABLE, message, hint="See nvidia-smi."))
    )
    found = card_checks.driver(scene.world, scene.facts)
    assert (found.level, found.hint) == (FAIL, hint)
    assert ("570.1" in found.message) is (hint == "Reboot.")


@pytest.mark.parametrize(
    ("address", "vendor", "kind", "bound", "level"),
    [
        (None, "", "", "", OK),
        ("0000:01:00.0", "0x10de", "0x030000", "nouveau", WARN),
        ("0000:01:00.0", "0x10de", "0x030200", "", WARN),
        ("0000:01:00.0", "0x10de", "0x030000", "vfio-pci", OK),  # given to a virtual machine
        ("0000:01:00.1", "0x10de", "0x040300", "snd_hda_intel", OK),  # its sound
        ("0000:03:00.0", "0x1002", "0x030000", "", WARN),
        ("0000:03:00.0", "0x1002", "0x030000", "amdgpu", OK),  # an APU: too small to be managed
        ("0000:00:02.0", "0x8086", "0x030000", "i915", OK),
    ],
)
def test_no_card_is_managed(
    scene: Scene, *, address: str | None, vendor: str, kind: str, bound: str, level: Level
) -> None:
    scene.change(cards=CardsFound((HOST,)))
    if address:
        scene.put(pci(address, vendor, kind))
        if bound:
            scene.link(f"/sys/bus/pci/devices/{address}/driver", f"../../../../bus/pci/drivers/{bound}")
    assert card_checks.driver(scene.world, scene.facts).level is level


def test_one_of_several_cards_is_lost(scene: Scene) -> None:
    lost = LlmError(
        ErrorCode.CARD_UNREADABLE, "RTX 3090, which was managed before, is gone.", hint="Reseat it."
    )
    scene.change(cards=CardsFound((NVIDIA_CARD,), lost=lost))
    found = card_checks.driver(scene.world, scene.facts)
    assert found.level is FAIL and found.hint == "Reseat it."
    assert found.message.startswith(NVIDIA_CARD.name) and found.message.endswith("is gone.")


def test_nobody_knows_whether_there_was_a_card(scene: Scene) -> None:
    """Said where no card is seen on the bus either, for that says more."""
    unknown = LlmError(ErrorCode.STATE_UNUSABLE, "The record cannot be used.", hint="See nvidia-smi.")
    scene.change(cards=CardsFound((HOST,), unknown=unknown))
    found = card_checks.driver(scene.world, scene.facts)
    assert (found.level, found.message, found.hint) == (
        WARN,
        "The record cannot be used.",
        "See nvidia-smi.",
    )
    scene.put(pci("0000:01:00.0", "0x10de", "0x030000"))
    assert "There is an NVIDIA card at" in card_checks.driver(scene.world, scene.facts).message


def test_a_card_that_is_not_wanted_is_not_missed(scene: Scene) -> None:
    scene.put(pci("0000:01:00.0", "0x10de"))
    settings = scene.settings.model_copy(update={"card": CardChoice.CPU})
    scene.change(cards=CardsFound((HOST,)), settings=settings)
    assert card_checks.driver(scene.world, scene.facts).level is OK


# --- device nodes -----------------------------------------------------------------------------------------------

NVIDIA_NODES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/nvidia-uvm")


@pytest.mark.parametrize(
    ("card", "engine", "nodes", "forbidden", "level", "word"),
    [
        (HOST, CPU, (), "", OK, "None"),
        (NVIDIA_CARD, CUDA, NVIDIA_NODES, "", OK, "may be opened"),
        (NVIDIA_CARD, CUDA, NVIDIA_NODES[:2], "", FAIL, "/dev/nvidia-uvm"),
        (NVIDIA_CARD, VULKAN, NVIDIA_NODES[:2], "", OK, "may be opened"),  # CUDA's alone
        (NVIDIA_CARD, CUDA, (), "", FAIL, "/dev/nvidiactl, /dev/nvidia0"),
        (NVIDIA_CARD, CUDA, NVIDIA_NODES, "nvidia0", FAIL, "usermod"),
        (AMD_CARD, VULKAN, ("/dev/dri/renderD128",), "", OK, "may be opened"),
        (AMD_CARD, VULKAN, (), "", FAIL, "/dev/dri/renderD128"),
        (AMD_CARD, VULKAN, ("/dev/dri/renderD129",), "renderD129", FAIL, "render,video ada"),
        (AMD_CARD, ROCM, ("/dev/dri/renderD128",), "", FAIL, "/dev/kfd"),
        (AMD_CARD, ROCM, ("/dev/dri/renderD128", "/dev/kfd"), "kfd", FAIL, "/dev/kfd"),
        (AMD_CARD, ROCM, ("/dev/dri/renderD128", "/dev/kfd"), "", OK, "may be opened"),
    ],
)
def test_device_nodes(
    scene: Scene,
    *,
    card: Card,
    engine: Capabilities,
    nodes: tuple[str, ...],
    forbidden: str,
    level: Level,
    word: str,
) -> None:
    scene.change(cards=CardsFound((card,)), engine=EngineFound(BUILD, engine))
    scene.put(dict.fromkeys(nodes, ""))
    scene.forbidden = {forbidden}
    found = card_checks.devices(scene.world, scene.facts)
    assert found.level is level
    assert word in f"{found.message} {found.hint}"


def test_only_the_render_node_of_the_card_counts(scene: Scene) -> None:
    """Another card's may be closed to this user."""
    scene.change(cards=CardsFound((AMD_CARD,)), engine=EngineFound(BUILD, VULKAN))
    scene.put({"/dev/dri/renderD128": "", "/dev/dri/renderD129": ""})
    scene.put({"/sys/bus/pci/devices/0000:03:00.0/drm/renderD129/": ""})
    scene.forbidden = {"renderD128"}
    assert card_checks.devices(scene.world, scene.facts).level is OK
    scene.forbidden = {"renderD129"}
    assert card_checks.devices(scene.world, scene.facts).level is FAIL


# --- engine -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cards", "engine", "level", "word"),
    [
        ((HOST,), EngineFound(BUILD, CPU), OK, "computes on cpu"),
        ((NVIDIA_CARD,), EngineFound(BUILD, CUDA), OK, "lists NVIDIA GeForce RTX 3090"),
        ((NVIDIA_CARD,), EngineFound(BUILD, CPU), FAIL, "lists no card"),
        ((NVIDIA_CARD,), EngineFound(BUILD, SOFTWARE), FAIL, "in software"),
        ((HOST,), EngineFound(BUILD, capabilities(Backend.UNKNOWN)), FAIL, "--list-devices"),
        ((HOST,), None, FAIL, "not answered"),
        (
            (HOST,),
            EngineFound(
                None, None, LlmError(ErrorCode.ENGINE_NOT_FOUND, "None was found.", hint="Install one.")
            ),
            FAIL,
            "Install one.",
        ),
        (
            (NVIDIA_CARD, dataclasses.replace(NVIDIA_CARD, uuid="GPU-2")),
            EngineFound(BUILD, VULKAN),
            FAIL,
            "nothing tells",
        ),
        (
            (NVIDIA_CARD, dataclasses.replace(NVIDIA_CARD, uuid="GPU-2")),
            EngineFound(BUILD, dataclasses.replace(VULKAN, unaddressed_because="the loader is old")),
            FAIL,
            "(their PCI addresses are not known: the loader is old).",
        ),
        ((HOST,), EngineFound(dataclasses.replace(BUILD, tag="b9999"), CPU), OK, "knows b11434 best"),
    ],
)
def test_engine(
    scene: Scene, cards: tuple[Card, ...], engine: EngineFound | None, level: Level, word: str
) -> None:
    scene.change(cards=CardsFound(cards), engine=engine)
    found = card_checks.engine(scene.world, scene.facts)
    assert found.level is level
    assert word in f"{found.message} {found.hint}"


# --- vulkan -----------------------------------------------------------------------------------------------------


def icd(name: str, library: str, place: str = "/usr/share/vulkan/icd.d") -> dict[str, str]:
    return {
        f"{place}/{name}": json.dumps({"file_format_version": "1.0.0", "ICD": {"library_path": library}})
    }


NVIDIA_ICD = icd("nvidia_icd.json", "libGLX_nvidia.so.0")
NVIDIA_LIBRARY = {"/usr/lib/x86_64-linux-gnu/libGLX_nvidia.so.0": ""}
LAVAPIPE = icd("lvp_icd.x86_64.json", "/usr/lib/libvulkan_lvp.so") | {"/usr/lib/libvulkan_lvp.so": ""}


@pytest.mark.parametrize(
    ("card", "engine", "files", "level", "word"),
    [
        (HOST, CPU, {}, OK, "no card is managed"),
        (NVIDIA_CARD, CUDA, {}, OK, "computes on cuda"),
        (NVIDIA_CARD, VULKAN, {}, OK, "finds the card"),  # wherever its files are
        (AMD_CARD, VULKAN, {}, FAIL, "libvulkan1"),  # it finds another one
        (AMD_CARD, AT_ITS_ADDRESS, {}, OK, "finds the card"),  # whatever its driver calls it
        (NVIDIA_CARD, SOFTWARE, {}, FAIL, "libvulkan1"),
        (NVIDIA_CARD, CPU, {}, WARN, "libvulkan1"),  # it may be a Vulkan build that sees nothing
        (NVIDIA_CARD, SOFTWARE, LOADER, FAIL, "there are: none"),
        (NVIDIA_CARD, SOFTWARE, LOADER | LAVAPIPE, FAIL, "in software"),
        (NVIDIA_CARD, SOFTWARE, LOADER | NVIDIA_ICD, FAIL, "names libGLX_nvidia.so.0, which is not there"),
        (NVIDIA_CARD, SOFTWARE, LOADER | NVIDIA_ICD | NVIDIA_LIBRARY, OK, "nvidia_icd.json"),
        (
            NVIDIA_CARD,
            SOFTWARE,
            LOADER | NVIDIA_LIBRARY | icd("nvidia_icd.json", "libGLX_nvidia.so.0", "/etc/vulkan/icd.d"),
            OK,
            "nvidia_icd.json",
        ),
        (
            NVIDIA_CARD,
            SOFTWARE,
            LOADER | {"/usr/share/vulkan/icd.d/nvidia_icd.json": "{"},
            FAIL,
            "names no library",
        ),
        (
            AMD_CARD,
            SOFTWARE,
            LOADER
            | icd("radeon_icd.json", "../../../lib/libvulkan_radeon.so")
            | {"/usr/lib/libvulkan_radeon.so": ""},
            OK,
            "radeon_icd.json",
        ),
        (
            NVIDIA_CARD,
            SOFTWARE,
            LOADER
            | NVIDIA_ICD
            | {"/etc/ld.so.conf.d/nvidia.conf": "# by hand\n/opt/nv\n", "/opt/nv/libGLX_nvidia.so.0": ""},
            OK,
            "nvidia_icd.json",
        ),
        (AMD_CARD, SOFTWARE, LOADER | NVIDIA_ICD | NVIDIA_LIBRARY, FAIL, "mesa-vulkan-drivers"),
    ],
)
def test_vulkan(
    scene: Scene, *, card: Card, engine: Capabilities, files: dict[str, str], level: Level, word: str
) -> None:
    scene.change(cards=CardsFound((card,)), engine=EngineFound(BUILD, engine))
    scene.put(files)
    scene.put({"/usr/lib/": "", "/usr/share/vulkan/icd.d/": ""})
    found = vulkan_check.vulkan(scene.world, scene.facts)
    assert found.level is level
    assert word in f"{found.message} {found.hint}"


def test_vulkan_drivers_named_by_the_environment(scene: Scene) -> None:
    """A session that asks for software rendering hides the card from every engine."""
    scene.change(engine=EngineFound(BUILD, SOFTWARE))
    scene.put(LOADER | NVIDIA_ICD | NVIDIA_LIBRARY | LAVAPIPE)
    environment = {"VK_DRIVER_FILES": "/usr/share/vulkan/icd.d/lvp_icd.x86_64.json"}
    world = dataclasses.replace(scene.world, environment=environment)
    assert vulkan_check.vulkan(world, scene.facts).level is FAIL
    assert vulkan_check.vulkan(scene.world, scene.facts).level is OK


# --- suspend ----------------------------------------------------------------------------------------------------

CAN_SUSPEND = {"/sys/power/state": "freeze mem disk\n"}
PRESERVES = {
    "/proc/driver/nvidia/params": "ResmanDebugLevel: 4294967295\nPreserveVideoMemoryAllocations: 1\n"
}
ENABLED = {
    "/etc/systemd/system/systemd-suspend.service.requires/nvidia-suspend.service": "",
    "/etc/systemd/system/systemd-suspend.service.requires/nvidia-resume.service": "",
}
BY_WANTS = {
    "/usr/lib/systemd/system/systemd-suspend.service.wants/nvidia-suspend.service": "",
    "/usr/lib/systemd/system/systemd-suspend.service.wants/nvidia-resume.service": "",
}


@pytest.mark.parametrize(
    ("card", "files", "level", "word"),
    [
        (HOST, CAN_SUSPEND, OK, "no NVIDIA card"),
        (AMD_CARD, CAN_SUSPEND, OK, "no NVIDIA card"),
        (NVIDIA_CARD, {"/sys/power/state": "freeze"}, OK, "cannot be suspended"),
        (NVIDIA_CARD, {}, OK, "cannot be suspended"),
        (NVIDIA_CARD, CAN_SUSPEND, OK, "unloaded before"),
        (
            NVIDIA_CARD,
            CAN_SUSPEND | PRESERVES,
            WARN,
            "nvidia-suspend.service, nvidia-resume.service is not enabled",
        ),
        (NVIDIA_CARD, CAN_SUSPEND | PRESERVES | ENABLED, OK, "saves"),
        (NVIDIA_CARD, CAN_SUSPEND | PRESERVES | BY_WANTS, OK, "saves"),
        (
            NVIDIA_CARD,
            CAN_SUSPEND | {"/proc/driver/nvidia/params": "UseKernelSuspendNotifiers: 1\n"},
            OK,
            "by itself",
        ),
    ],
)
def test_suspend(scene: Scene, card: Card, files: dict[str, str], level: Level, word: str) -> None:
    scene.change(cards=CardsFound((card,)))
    scene.put(files)
    found = card_checks.suspend(scene.world, scene.facts)
    assert found.level is level
    assert word in f"{found.message} {found.hint}"


def test_models_that_are_kept_need_a_driver_that_saves_them(scene: Scene) -> None:
    scene.put(CAN_SUSPEND | ENABLED)
    scene.change(settings=scene.settings.model_copy(update={"suspend": SuspendPolicy.KEEP}))
    found = card_checks.suspend(scene.world, scene.facts)
    assert found.level is WARN
    assert "NVreg_PreserveVideoMemoryAllocations=1" in (found.hint or "")
    scene.put(PRESERVES)
    assert card_checks.suspend(scene.world, scene.facts).level is OK


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("NVML", "Errors of it (Xid) are told by NVML."),
        ("the kernel's messages", "are told by the kernel's messages."),
        ("", "the journal is asked when an engine ends."),
        (None, "driver 580.95.05."),
    ],
)
def test_who_tells_of_errors_of_the_card(scene: Scene, source: str | None, said: str) -> None:
    scene.change(cards=CardsFound((NVIDIA_CARD,), xid_source=source))
    found = card_checks.driver(scene.world, scene.facts)
    assert found.level is OK
    assert found.message.endswith(said)
