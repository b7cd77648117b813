"""What a llama-server build can do: version, flags, backend, devices."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path


class Backend(enum.StrEnum):
    """What a build computes on. UNKNOWN (could not be asked) is not CPU (asked, none found)."""

    CUDA = "cuda"
    VULKAN = "vulkan"
    ROCM = "rocm"
    SYCL = "sycl"
    METAL = "metal"
    CPU = "cpu"
    UNKNOWN = "unknown"


class BuildKind(enum.StrEnum):
    """Where a build comes from."""

    ENVIRONMENT = "environment"  # named by LLLM3090_LLAMA_DIR
    MANAGED = "managed"  # in llama_dir
    COMPILED = "compiled"  # below engines_dir, its name says for what
    PATH = "path"
    DISTRIBUTION = "distribution"  # where distributions put theirs
    PYTHON = "python"  # shipped in a Python package
    CANDIDATE = "candidate"  # below engines_dir under any other name: for comparison


@dataclass(frozen=True, slots=True)
class Build:
    """A llama-server on disk.

    Attributes:
        server: absolute path of the executable.
        library_path: directories to prepend to ``LD_LIBRARY_PATH``; usually the executable's own.
        source: how it was found, for a person, e.g. ``LLLM3090_LLAMA_DIR``.
        locked: the choice comes from the environment and cannot be changed by a client.
        name: what a client chooses it by; unique among the builds of a machine.
        kind: where it comes from.
        tag: upstream release that its name or package tells, e.g. ``b11434``; None where nothing does.
        gpu_architecture: that its name says it was compiled for, e.g. ``sm86``; None for any.
    """

    server: Path
    library_path: tuple[Path, ...]
    source: str
    locked: bool
    name: str = ""
    kind: BuildKind = BuildKind.MANAGED
    tag: str | None = None
    gpu_architecture: str | None = None


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a ``--help``.

    Attributes:
        names: every spelling, with dashes, in the order of the text; a switch and its negation are one option.
        value: placeholder of its value, e.g. ``N`` or ``[on|off]``; empty for a switch.
        allowed: values that the text lists; empty where it lists none.
        default: that the text names, unquoted; None where it names none.
        variables: of the environment that set it.
    """

    names: tuple[str, ...]
    value: str = ""
    allowed: tuple[str, ...] = ()
    default: str | None = None
    variables: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DryRunAbility:
    """A ``llama-fit-params`` beside the server.

    Attributes:
        program: its absolute path.
        flags: options that its ``--help`` offers.
    """

    program: Path
    flags: frozenset[str]

    @property
    def can_project(self) -> bool:
        """It prints what a launch would take; older ones only fit arguments to the card."""
        return "--fit-print" in self.flags


@dataclass(frozen=True, slots=True)
class ListedDevice:
    """A line of ``--list-devices``.

    Attributes:
        name: by which options name it, e.g. ``CUDA0``.
        description: usually the product's name.
        total_bytes: of its memory, in whole MiB.
    """

    name: str
    description: str
    total_bytes: int


@dataclass(frozen=True, slots=True)
class AddressedDevice:
    """A device that is told by its place on the PCI bus.

    Attributes:
        index: by which a variable of the backend chooses it (``GGML_VK_VISIBLE_DEVICES``).
        pci_address: such as ``0000:01:00.0``.
        name: the product's.
        total_bytes: of its memory.
    """

    index: int
    pci_address: str
    name: str
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The answers of a build.

    Attributes:
        version: its version line, whatever the format.
        flags: every option its ``--help`` offers, with dashes.
        backend: what it computes on.
        devices: names as ``--list-devices`` prints them, e.g. ``CUDA0``.
        valued_flags: those of ``flags`` that take a value (``-fa`` took none in old builds).
        variables: environment variables that its ``--help`` says it reads, e.g. ``LLAMA_ARG_MODEL``.
        options: the options of its ``--help`` with values, defaults and aliases.
        dry_run: the program that projects memory; None where there is none beside the server.
        virtual_memory: its CUDA devices have virtual memory; None where it did not say.
        listed: the devices with what is said of them.
        device_environment: variables that hide or choose devices, name and value, with which they were listed.
        addressed: the devices by PCI address, as this build was seen to take their indices; of Vulkan only.
        unaddressed_because: why there are none though they were looked for; empty where they were not, or are there.
    """

    version: str
    flags: frozenset[str]
    backend: Backend
    devices: tuple[str, ...]
    valued_flags: frozenset[str] = frozenset()
    variables: frozenset[str] = frozenset()
    options: tuple[Option, ...] = ()
    dry_run: DryRunAbility | None = None
    virtual_memory: bool | None = None
    listed: tuple[ListedDevice, ...] = ()
    device_environment: tuple[tuple[str, str], ...] = ()
    addressed: tuple[AddressedDevice, ...] = ()
    unaddressed_because: str = ""

    def option(self, name: str) -> Option | None:
        """The option with that spelling; None where the build has none."""
        return next((option for option in self.options if name in option.names), None)
