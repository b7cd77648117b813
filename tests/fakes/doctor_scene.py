"""A machine for the doctor: a tree of files, scripted answers of programs, and facts; sound unless told otherwise."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from lllm3090d.doctor.surroundings import (
    CardsFound,
    EngineFound,
    Facts,
    Room,
    Said,
    UnansweredError,
    Units,
    World,
)
from lllm3090d.engines.capabilities import Backend, Build, Capabilities, ListedDevice
from lllm3090d.gpus.readings import Card, CardKind
from lllm3090d.planning.units import MIB
from lllm3090d.settings import Settings

GIB = 1 << 30
NOW_S = 1_800_000_000.0
SERVICE = {
    "Id": "lllm3090d.service",
    "LoadState": "loaded",
    "ActiveState": "active",
    "SubState": "running",
    "UnitFileState": "disabled",
    "NeedDaemonReload": "no",
    "MainPID": "77",
}
SOCKET = {
    "Id": "lllm3090d.socket",
    "LoadState": "loaded",
    "ActiveState": "active",
    "SubState": "running",
    "UnitFileState": "enabled",
}
GROUP = "/user.slice/user-1000.slice/user@1000.service"
NVIDIA_CARD = Card(
    CardKind.NVIDIA,
    "GPU-1",
    "NVIDIA GeForce RTX 3090",
    "580.95.05",
    24576 * MIB,
    "0000:01:00.0",
    "8.6",
)
AMD_CARD = Card(
    CardKind.AMD, "pci-0000:03:00.0", "AMD Radeon RX 7900 XTX", "6.12", 24576 * MIB, "0000:03:00.0"
)
HOST = Card(CardKind.CPU, "host", "host memory", None)
BUILD = Build(Path("/opt/llama/llama-server"), (), "llama_dir", False, "managed", tag="b11434")


def capabilities(backend: Backend, *listed: ListedDevice) -> Capabilities:
    """Of a build that lists these devices."""
    return Capabilities(
        "version: 11434", frozenset({"--model"}), backend, tuple(each.name for each in listed), listed=listed
    )


CUDA = capabilities(Backend.CUDA, ListedDevice("CUDA0", "NVIDIA GeForce RTX 3090", 24124 * MIB))
VULKAN = capabilities(Backend.VULKAN, ListedDevice("Vulkan0", "NVIDIA GeForce RTX 3090", 24576 * MIB))
CPU = capabilities(Backend.CPU)


class Answers:
    """What programs say: the first words of a command line, and its output or why there is none."""

    def __init__(self, **said: Said | str) -> None:
        self.said: dict[str, Said | str] = dict(said)
        self.asked: list[tuple[str, ...]] = []

    def __call__(self, *argv: str) -> Said:
        """As :class:`Ask`; a string is the reason for no answer."""
        self.asked.append(argv)
        answer = self.said.get(argv[0], Said(0, ""))
        if isinstance(answer, str):
            raise UnansweredError(answer)
        return answer


class Scene:
    """A machine below a directory, with an RTX 3090 and a build for CUDA, or as changed by a test."""

    def __init__(self, directory: Path) -> None:
        self.root = directory / "root"
        self.root.mkdir()
        self.settings = Settings(
            models_dir=directory / "models", state_dir=directory / "state", llama_dir=directory / "llama"
        )
        self.answers = Answers()
        self.forbidden: set[str] = set()
        self.room = Room(40 * GIB, 1_000_000, False)
        self.world = World(
            root=self.root,
            environment={},
            home=Path("/home/ada"),
            user="ada",
            user_id=1000,
            ask=self.answers,
            may=lambda path, _: path.name not in self.forbidden,
            room=lambda _: self.room,
            now_s=lambda: NOW_S,
            installed_s=NOW_S - 86400 * 30,
        )
        self.facts = Facts(
            settings=self.settings,
            config_file=directory / "config.toml",
            units=Units("252.39-1~deb12u2", GROUP, SERVICE, SOCKET),
            cards=CardsFound((NVIDIA_CARD,)),
            engine=EngineFound(BUILD, CUDA),
        )

    def put(self, contents: Mapping[str, str]) -> None:
        """Write files of the machine by their absolute paths; those that end in a slash are directories."""
        for name, text in contents.items():
            path = self.root / name.lstrip("/")
            if name.endswith("/"):
                path.mkdir(parents=True, exist_ok=True)
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def link(self, name: str, target: str) -> None:
        """Make a symbolic link of the machine."""
        path = self.root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(target)

    def change(self, **facts: object) -> None:
        """Replace facts."""
        self.facts = dataclasses.replace(self.facts, **facts)  # type: ignore[arg-type]  # by name, in tests only

    def units(
        self, service: Mapping[str, str] | None = None, socket: Mapping[str, str] | None = None, **of: str
    ) -> None:
        """Change what systemd says: properties of the two units, version, control_group."""
        units = self.facts.units
        assert units is not None
        self.change(
            units=dataclasses.replace(
                units,
                service=dict(units.service) | dict(service or {}),
                socket=dict(units.socket) | dict(socket or {}),
                **of,  # type: ignore[arg-type]  # by name, in tests only
            )
        )
