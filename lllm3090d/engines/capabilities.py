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


@dataclass(frozen=True, slots=True)
class Build:
    """A llama-server on disk.

    Attributes:
        server: absolute path of the executable.
        library_path: directories to prepend to ``LD_LIBRARY_PATH``; usually the executable's own.
        source: how it was found, for a person, e.g. ``LLLM3090_LLAMA_DIR``.
        locked: the choice comes from the environment and cannot be changed by a client.
    """

    server: Path
    library_path: tuple[Path, ...]
    source: str
    locked: bool


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
    """

    version: str
    flags: frozenset[str]
    backend: Backend
    devices: tuple[str, ...]
    valued_flags: frozenset[str] = frozenset()
    variables: frozenset[str] = frozenset()
