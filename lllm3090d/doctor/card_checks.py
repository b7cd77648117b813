"""The card: driver, device nodes, the engine that should compute on it, and what suspend does to it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lllm3090d.doctor.findings import Check, Finding, fail, ok, warn
from lllm3090d.doctor.surroundings import CardsFound, Facts, World
from lllm3090d.doctor.vulkan_check import SOFTWARE
from lllm3090d.engines.capabilities import Backend
from lllm3090d.engines.visibility import can_be_kept_to
from lllm3090d.errors import LlmError
from lllm3090d.gpus.pci import SET_ASIDE
from lllm3090d.gpus.readings import Card, CardKind
from lllm3090d.planning.units import MIB
from lllm3090d.serving.engines import is_stale, release_tag
from lllm3090d.settings import PINNED_ENGINE, CardChoice, SuspendPolicy

NVIDIA, AMD = "0x10de", "0x1002"
DISPLAY_CLASS = "0x03"
SUSPEND_UNITS = ("nvidia-suspend.service", "nvidia-resume.service")
PRESERVE = "NVreg_PreserveVideoMemoryAllocations"


@dataclass(frozen=True, slots=True)
class _PciCard:
    """A graphics card on the bus: where, whose, and which kernel driver has it (empty for none)."""

    address: str
    vendor: str
    driver: str


def driver(world: World, facts: Facts) -> Finding:
    """The driver answers and is new enough."""
    found = facts.cards
    if found is None:
        return fail(
            Check.DRIVER,
            "The driver of the card does not answer.",
            "See: journalctl -k --grep 'NVRM|Xid|amdgpu|xe '; a reboot often helps.",
        )
    if found.problem is not None:
        return _driver_problem(world, found.problem.message, found.problem.hint)
    managed = [card for card in found.cards if card.kind is not CardKind.CPU]
    if managed:
        return _managed(managed, found)
    if facts.settings.card is CardChoice.CPU:
        return ok(Check.DRIVER, 'Host memory is managed, as the setting card = "cpu" asks.')
    return _unmanaged(world, found.unknown)


def _managed(managed: list[Card], found: CardsFound) -> Finding:
    """There are cards; one of several may be missing, or the driver of one have its faults."""
    named = ", ".join(_named(card) for card in managed)
    if found.lost is not None:
        return fail(
            Check.DRIVER, f"{named}. But {found.lost.message}", found.lost.hint or "Check nvidia-smi"
        )
    problems = dict.fromkeys(card.driver_problem for card in managed if card.driver_problem)
    if problems:
        return warn(Check.DRIVER, f"{named}. {' '.join(problems)}", "Install a newer driver, then reboot.")
    return ok(Check.DRIVER, f"{named}.{_errors_told(found.xid_source)}")


def _errors_told(source: str | None) -> str:
    """Who tells the daemon of errors of the card (Xid)."""
    if source is None:
        return ""
    if source:
        return f" Errors of it (Xid) are told by {source}."
    return " Nobody tells of errors of it (Xid) as they happen; the journal is asked when an engine ends."


def _unmanaged(world: World, unknown: LlmError | None) -> Finding:
    """No card is managed, and nobody asked for that: is there one all the same, or was there one before?"""
    for card in _on_the_bus(world):
        if card.driver in SET_ASIDE:
            continue
        if card.vendor == NVIDIA:
            has = f"the kernel's driver {card.driver} has it" if card.driver else "no kernel driver has it"
            return warn(
                Check.DRIVER,
                f"There is an NVIDIA card at {card.address}, but NVIDIA's driver does not answer ({has}): models are"
                " loaded into host memory.",
                "Install NVIDIA's driver, reboot, and check nvidia-smi. If the card is not to be used, set"
                ' card = "cpu" in config.toml.',
            )
        if card.vendor == AMD and not card.driver:
            return warn(
                Check.DRIVER,
                f"There is an AMD card at {card.address} without a kernel driver: models are loaded into host memory.",
                "Check that amdgpu and its firmware are installed: lspci -k; journalctl -k --grep amdgpu",
            )
    if unknown is not None:
        return warn(Check.DRIVER, unknown.message, unknown.hint or "Check nvidia-smi")
    return ok(Check.DRIVER, "There is no card that can be managed: host memory takes its place.")


def devices(world: World, facts: Facts) -> Finding:
    """The device nodes that engines open are there, and this user may open them."""
    cards = facts.managed
    if not cards:
        return ok(Check.DEVICES, "None is needed: no card is managed.")
    backend = facts.backend
    missing, forbidden = [], []
    for path, is_needed in _nodes(world, cards, backend):
        if not os.path.lexists(world.at(path)):
            if is_needed:
                missing.append(str(path))
        elif not world.may(world.at(path), os.R_OK | os.W_OK):
            forbidden.append(str(path))
    if missing:
        make = (
            "sudo nvidia-modprobe -c 0 -u; for good: sudo systemctl enable --now nvidia-persistenced"
            if any("nvidia" in path for path in missing)
            else "Check that the kernel's driver has the card: lspci -k"
        )
        return fail(Check.DEVICES, f"Not there: {', '.join(missing)}. Engines cannot open the card.", make)
    if forbidden:
        return fail(
            Check.DEVICES,
            f"You may not open {', '.join(forbidden)}, so engines cannot use the card.",
            f"Join the groups of these files (ls -l), then log in anew: sudo usermod -aG render,video {world.user}",
        )
    return ok(Check.DEVICES, "The device nodes of the card are there and may be opened.")


def engine(_world: World, facts: Facts) -> Finding:  # noqa: PLR0911  # one for each way to be wrong
    """The engine that the next start uses runs here and lists the card."""
    found = facts.engine
    if found is None:
        return fail(
            Check.ENGINE,
            "The engine has not answered what it can do.",
            "Try by hand: llama-server --list-devices",
        )
    if found.build is None or found.capabilities is None:
        problem = found.problem
        message = problem.message if problem else "There is no engine."
        return fail(Check.ENGINE, message, (problem and problem.hint) or "See: lllm3090ctl engine list")
    capabilities, cards = found.capabilities, facts.managed
    tag = release_tag(found.build.tag, capabilities)
    release = f"release {tag}" if tag else "of an unknown release"
    if is_stale(tag, PINNED_ENGINE):
        release += f" (the daemon knows {PINNED_ENGINE} best)"
    told = f"{found.build.server}, {release}, computes on {capabilities.backend}"
    if capabilities.backend is Backend.UNKNOWN:
        return fail(
            Check.ENGINE,
            f"{found.build.server} runs, but fails when it is to list its devices.",
            f"See why: {found.build.server} --list-devices",
        )
    if not cards:
        return ok(Check.ENGINE, f"{told}.")
    if capabilities.backend is Backend.CPU:
        return fail(
            Check.ENGINE,
            f"{told} and lists no card: {cards[0].name} would not be used.",
            "Use a build for CUDA or Vulkan (lllm3090ctl engine list; lllm3090ctl engine select --help). If it is one,"
            " the lines devices and vulkan may tell why it sees no card.",
        )
    unseen = [card.name for card in cards if not can_be_kept_to(capabilities, cards, card)]
    listed = ", ".join(device.description or device.name for device in capabilities.listed) or ", ".join(
        capabilities.devices
    )
    devices = [device.description.lower() for device in capabilities.listed]
    if devices and all(map(SOFTWARE.search, devices)):
        return fail(
            Check.ENGINE,
            f"{told}, but lists only {listed}, which computes in software: {cards[0].name} would not be used.",
            "See the line: vulkan",
        )
    if unseen:
        why = capabilities.unaddressed_because
        return fail(
            Check.ENGINE,
            f"{told} and lists {listed}; nothing tells which of them is {', '.join(unseen)}"
            f"{f' (their PCI addresses are not known: {why})' if why else ''}.",
            "Look for variables that hide cards from it, such as CUDA_VISIBLE_DEVICES, or use a build for CUDA or ROCm,"
            " which takes cards by UUID.",
        )
    return ok(Check.ENGINE, f"{told} and lists {listed}.")


def suspend(world: World, facts: Facts) -> Finding:
    """An NVIDIA card keeps what is on it when the machine is suspended."""
    if not any(card.kind is CardKind.NVIDIA for card in facts.managed):
        return ok(Check.SUSPEND, "Nothing to set up: no NVIDIA card is managed.")
    if "mem" not in (world.text("/sys/power/state") or "").split():
        return ok(Check.SUSPEND, "This machine cannot be suspended.")
    return _saved_by_driver(world, facts)


def _saved_by_driver(world: World, facts: Facts) -> Finding:
    values = dict(
        line.split(": ", 1)
        for line in (world.text("/proc/driver/nvidia/params") or "").splitlines()
        if ": " in line
    )
    if values.get("UseKernelSuspendNotifiers") == "1":
        return ok(
            Check.SUSPEND, "The driver saves the card's memory by itself when the machine is suspended."
        )
    places = ("/etc/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system")
    disabled = [
        unit
        for unit in SUSPEND_UNITS
        if not any(
            world.names(place, f"systemd-*.service.{how}/{unit}")
            for place in places
            for how in ("requires", "wants")
        )
    ]
    enable = f"sudo systemctl enable {' '.join(SUSPEND_UNITS)} nvidia-hibernate.service"
    if values.get("PreserveVideoMemoryAllocations") != "1":
        if facts.settings.suspend is not SuspendPolicy.KEEP:  # auto is unload on NVIDIA's cards
            return ok(
                Check.SUSPEND,
                "Models are unloaded before the machine is suspended; what other programs hold on the card the driver"
                f" does not save ({PRESERVE} is not 1).",
            )
        return warn(
            Check.SUSPEND,
            'The setting suspend = "keep" leaves models loaded, but the driver does not save the card\'s memory when'
            " the machine is suspended: they are lost, and the card may need a reboot.",
            f"echo 'options nvidia {PRESERVE}=1' | sudo tee /etc/modprobe.d/nvidia-suspend.conf; {enable}; then reboot."
            ' Or set suspend = "unload".',
        )
    if disabled:
        return warn(
            Check.SUSPEND,
            f"{PRESERVE} is 1, but {', '.join(disabled)} is not enabled: suspend fails or loses what is on the card.",
            enable,
        )
    return ok(Check.SUSPEND, "The driver saves the card's memory when the machine is suspended.")


def _driver_problem(world: World, message: str, hint: str | None) -> Finding:
    """A driver that is there and does not answer; the commonest cause is told where it can be seen."""
    loaded = world.text("/sys/module/nvidia/version")
    if "mismatch" in message.lower():
        of = f" ({loaded})" if loaded else ""
        return fail(
            Check.DRIVER,
            f"{message} The kernel still runs the driver{of} from before an upgrade.",
            "Reboot.",
        )
    return fail(Check.DRIVER, message, hint or "Check nvidia-smi")


def _named(card: Card) -> str:
    version = f", driver {card.driver_version}" if card.driver_version else ""
    size = f", {card.total_bytes // MIB} MiB" if card.total_bytes else ""
    return f"{card.name}{size}{version}"


def _on_the_bus(world: World) -> Iterator[_PciCard]:
    for place in world.names("/sys/bus/pci/devices", "*"):
        if (world.text(place / "class") or "").startswith(DISPLAY_CLASS):
            link = world.at(place / "driver")
            name = link.readlink().name if link.is_symlink() else ""
            yield _PciCard(place.name, world.text(place / "vendor") or "", name)


def _nodes(world: World, cards: list[Card], backend: Backend) -> Iterator[tuple[Path, bool]]:
    """The device nodes, and whether engines cannot do without; of the others only those that are there count."""
    kinds = {card.kind for card in cards}
    if CardKind.NVIDIA in kinds:
        yield Path("/dev/nvidiactl"), True
        numbered = world.names("/dev", "nvidia[0-9]*")
        yield from ((path, True) for path in numbered or (Path("/dev/nvidia0"),))
        yield Path("/dev/nvidia-uvm"), backend is Backend.CUDA
    if kinds & {CardKind.AMD, CardKind.INTEL}:
        for card in cards:
            if card.kind is not CardKind.NVIDIA:
                yield from ((path, True) for path in _render_nodes(world, card))
    if CardKind.AMD in kinds and backend is Backend.ROCM:
        yield Path("/dev/kfd"), True


def _render_nodes(world: World, card: Card) -> tuple[Path, ...]:
    """Those of the card where its address tells them, else all there are."""
    of_card = (
        world.names(f"/sys/bus/pci/devices/{card.pci_address}/drm", "renderD*") if card.pci_address else ()
    )
    found = tuple(Path("/dev/dri") / node.name for node in of_card) or world.names("/dev/dri", "renderD*")
    return found or (Path("/dev/dri/renderD128"),)
