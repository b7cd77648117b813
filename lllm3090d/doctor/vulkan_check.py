"""Vulkan, as far as files tell: the loader, and the manifests by which it finds drivers."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from lllm3090d.doctor.findings import Check, Finding, fail, ok, warn
from lllm3090d.doctor.surroundings import Facts, World
from lllm3090d.engines.capabilities import Backend
from lllm3090d.engines.visibility import addressed, identified
from lllm3090d.gpus.readings import CardKind

LIBRARY_PLACES = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/lib",
    "/lib/x86_64-linux-gnu",
    "/lib64",
    "/lib",
)
LOADER = "libvulkan.so.1"
# By names of manifests: the loader itself tells no vendor.
SOFTWARE = re.compile(r"lvp|llvmpipe|swiftshader")
ICDS_OF = {
    CardKind.NVIDIA: re.compile(r"nvidia|nouveau"),
    CardKind.AMD: re.compile(r"radeon|amd"),
    CardKind.INTEL: re.compile(r"intel"),
}
VULKAN_PACKAGES = {
    CardKind.NVIDIA: "the driver's package for OpenGL and Vulkan (Debian: nvidia-driver-libs, nvidia-vulkan-icd;"
    " Ubuntu: libnvidia-gl-VERSION)",
    CardKind.AMD: "mesa-vulkan-drivers",
    CardKind.INTEL: "mesa-vulkan-drivers",
}


def vulkan(world: World, facts: Facts) -> Finding:
    """Where the engine needs Vulkan: the loader and a driver for the card are installed."""
    cards, backend = facts.managed, facts.backend
    if backend not in {Backend.VULKAN, Backend.UNKNOWN, Backend.CPU} or not cards:
        why = f"the engine computes on {backend}" if cards else "no card is managed"
        return ok(Check.VULKAN, f"Not needed: {why}.")
    told = facts.engine.capabilities if facts.engine else None
    if (
        told
        and backend is Backend.VULKAN
        and all(addressed(told, cards, card) or identified(told, cards, card) for card in cards)
    ):
        return ok(Check.VULKAN, "The engine finds the card through Vulkan.")
    severe = fail if backend is Backend.VULKAN else warn
    if not _library(world, facts, LOADER):
        return severe(
            Check.VULKAN,
            f"The Vulkan loader ({LOADER}) is not installed: an engine built for Vulkan sees no card.",
            "sudo apt-get install libvulkan1",
        )
    broken, usable = [], []
    for manifest in _manifests(world):
        problem = _manifest_problem(world, facts, manifest)
        if problem:
            broken.append(f"{manifest} {problem}")
        else:
            usable.append(manifest)
    kinds = dict.fromkeys(card.kind for card in cards)
    without = [kind for kind in kinds if not any(ICDS_OF[kind].search(icd.name.lower()) for icd in usable)]
    if without:
        there = ", ".join(icd.name for icd in usable) or "none"
        software = " (which compute in software)" if usable and all(map(_is_software, usable)) else ""
        faults = f" Broken: {'; '.join(broken)}." if broken else ""
        return severe(
            Check.VULKAN,
            f"No Vulkan driver for {', '.join(without)} is installed; there are: {there}{software}.{faults}",
            f"Install {VULKAN_PACKAGES[without[0]]}.",
        )
    names = ", ".join(icd.name for icd in usable)
    return ok(Check.VULKAN, f"The loader and drivers ({names}) are installed.")


def _manifests(world: World) -> tuple[Path, ...]:
    """Manifests of Vulkan drivers as the loader finds them; engines are run without XDG_CONFIG_HOME."""
    for variable in ("VK_DRIVER_FILES", "VK_ICD_FILENAMES"):
        named = [each for each in world.environment.get(variable, "").split(":") if each]
        if named:
            return tuple(map(Path, named))
    added = [Path(each) for each in world.environment.get("VK_ADD_DRIVER_FILES", "").split(":") if each]
    data = world.environment.get("XDG_DATA_HOME") or str(world.home / ".local/share")
    shared = (world.environment.get("XDG_DATA_DIRS") or "/usr/local/share:/usr/share").split(":")
    places = ["/etc/xdg", "/etc", data, *shared]
    return (
        *added,
        *(file for place in places for file in world.names(Path(place) / "vulkan/icd.d", "*.json")),
    )


def _manifest_problem(world: World, facts: Facts, manifest: Path) -> str | None:
    """Why the loader would skip a manifest; None where nothing is wrong with it."""
    text = world.text(manifest)
    if text is None:
        return "cannot be read"
    try:
        named = json.loads(text)["ICD"]["library_path"]
    except (ValueError, KeyError, TypeError):
        return "names no library"
    if not isinstance(named, str):
        return "names no library"
    # An absolute path stays what it is.
    beside = os.path.lexists(world.at(manifest.parent / named))
    there = beside if "/" in named else _library(world, facts, named)
    return None if there else f"names {named}, which is not there"


def _library(world: World, facts: Facts, name: str) -> bool:
    """Whether the engine's loader finds a library, as far as files tell."""
    configured = (world.text(file) or "" for file in world.names("/etc/ld.so.conf.d", "*.conf"))
    places = [line for text in configured for line in text.splitlines() if line.startswith("/")]
    places += [each for each in world.environment.get("LD_LIBRARY_PATH", "").split(":") if each]
    if facts.engine and facts.engine.build:
        places += map(str, facts.engine.build.library_path)
    return any(os.path.lexists(world.at(place) / name) for place in (*LIBRARY_PLACES, *places))


def _is_software(manifest: Path) -> bool:
    return SOFTWARE.search(manifest.name.lower()) is not None
