"""Ask which Vulkan device of a build is at which PCI address, and see that the build takes it so. Blocking.

``--list-devices`` has no addresses. The loader has, so a helper process asks it
(:mod:`lllm3090d.engines.vulkan_devices`), in the environment of the engine; then the engine lists the devices once more
with these indices, and must agree in number, names and sizes. Equal cards agree in any order: that the index is the
loader's is what the source of ggml-vulkan says, and the list shows that this build still counts so.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from lllm3090d.engines.capabilities import AddressedDevice, Backend, Build, Capabilities, ListedDevice
from lllm3090d.engines.help_text import parse_listed
from lllm3090d.engines.probe import TIME_LIMIT_S, ask_devices
from lllm3090d.engines.process import clean_environment, run_program
from lllm3090d.engines.visibility import DEVICE_PREFIXES, VULKAN_INDICES
from lllm3090d.engines.vulkan_listing import (
    ListingError,
    VulkanDevice,
    addressed,
    agree,
    chosen_devices,
    parse_document,
    permitted,
)
from lllm3090d.errors import ErrorCode, LlmError

HELPER = ("-P", "-m", "lllm3090d.engines.vulkan_devices")
HELPER_LIMIT_S = 10.0  # an instance with every driver of a desktop takes a quarter of a second


def wants_addresses(capabilities: Capabilities, inherited: Mapping[str, str]) -> bool:
    """A build has several Vulkan devices, or one of several that a variable of the session has left."""
    least = 1 if VULKAN_INDICES in inherited else 2
    return capabilities.backend is Backend.VULKAN and len(_vulkan(capabilities.listed)) >= least


def with_addresses(
    build: Build,
    capabilities: Capabilities,
    *,
    inherited: Mapping[str, str] | None = None,
    helper_limit_s: float = HELPER_LIMIT_S,
    time_limit_s: float = TIME_LIMIT_S,
) -> Capabilities:
    """The same with the PCI addresses of its devices, or with why they are not known, where they are of use.

    Args:
        build: the build.
        capabilities: its answers.
        inherited: environment to start from, cleaned; None for the process's own.
        helper_limit_s: seconds for the helper process.
        time_limit_s: seconds for the build's list.

    Raises:
        LlmError: SHUTTING_DOWN.
    """
    around = os.environ if inherited is None else inherited
    if not wants_addresses(capabilities, around):
        return capabilities
    try:
        found = _devices(build, around, helper_limit_s, time_limit_s)
    except ListingError as error:
        return replace(capabilities, unaddressed_because=str(error))
    return replace(capabilities, addressed=found)


def _devices(
    build: Build, around: Mapping[str, str], helper_limit_s: float, time_limit_s: float
) -> tuple[AddressedDevice, ...]:
    listed = parse_document(_run_helper(build, around, helper_limit_s))
    chosen = permitted(chosen_devices(listed), around.get(VULKAN_INDICES))
    if not chosen:
        raise ListingError("no Vulkan driver tells the PCI address of a card")
    shown = _shown(build, around, chosen, time_limit_s)
    if not agree(chosen, shown):
        named = ", ".join(f"{each.name} ({each.description})" for each in shown) or "none"
        wanted = ", ".join(device.name for device in chosen)
        raise ListingError(f"with the indices of {wanted} the engine lists {named}")
    return addressed(chosen)


def _run_helper(build: Build, around: Mapping[str, str], time_limit_s: float) -> str:
    """What the helper says, with the libraries and variables that the engine is run with."""
    environment = clean_environment(build, around)
    try:
        answer = run_program(build, Path(sys.executable), HELPER, environment, time_limit_s)
    except LlmError as error:
        raise _as_reason(error) from error
    if not answer.succeeded:
        lines = answer.last_lines
        said = f" ({lines[-1]})" if lines else ""
        how = answer.how("a question for its devices", time_limit_s)
        raise ListingError(f"Vulkan {how}{said}")
    return answer.stdout


def _shown(
    build: Build, around: Mapping[str, str], devices: tuple[VulkanDevice, ...], time_limit_s: float
) -> tuple[ListedDevice, ...]:
    """What the build lists when it is shown these devices."""
    indices = ",".join(str(device.index) for device in devices)
    try:
        text = ask_devices(build, inherited={**around, VULKAN_INDICES: indices}, time_limit_s=time_limit_s)
    except LlmError as error:
        raise _as_reason(error) from error
    if text is None:
        raise ListingError(f"the engine fails to list its devices with {VULKAN_INDICES}={indices}")
    return _vulkan(parse_listed(text))


def _as_reason(error: LlmError) -> Exception:
    """A program that cannot be run is a reason; a daemon that stops is none."""
    return error if error.code is ErrorCode.SHUTTING_DOWN else ListingError(error.message.rstrip("."))


def _vulkan(listed: tuple[ListedDevice, ...]) -> tuple[ListedDevice, ...]:
    return tuple(
        device for device in listed if device.name.rstrip("0123456789") == DEVICE_PREFIXES[Backend.VULKAN]
    )
