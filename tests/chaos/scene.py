"""Where it happens: a daemon, a fake card, fake engines, models, and a small disk for what the daemon remembers."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.plan import MODELS
from tests.chaos.truth import runs
from tests.fakes.engine import edited_state, install_fake_engine, set_behaviour
from tests.fakes.gguf_files import write_llama
from tests.fakes.nvml import FakeNvml
from tests.system.harness import DAEMON_UNIT, Service, running

MIB = 1 << 20
DEVICE = "Vulkan0: NVIDIA GeForce RTX 3090 (24576 MiB, 24125 MiB free)"
CONTEXT_TOKENS = 8192
# What an engine takes of its price.
TAKEN = 0.95
DISK_MIB = 24
TOKENS = 20
TOKEN_S = 0.1
SETTINGS: Mapping[str, str] = {
    "desktop": "inactive",
    "least_residency_s": "0",
    "least_idle_s": "0",
    "verify_after_load": "off",
    "restart_failed": "true",
    "restart_pause_s": "0.2",
    "stop_timeout_s": "2",
    "release_timeout_s": "1.5",
    "queue_timeout_s": "8",
}
CALM: Mapping[str, Any] = {
    "devices": (DEVICE,),
    "load_s": 0.4,
    "tokens": ("word ",) * TOKENS,
    "token_s": TOKEN_S,
    # Its rows stay in the card's file, and count while it lives: what is late is made so by the driver.
    "hold_after_exit_s": 0.0005,
}


LAUNCHER = """import sys
sys.path.insert(0, {package!r})
{change}
from lllm3090d.__main__ import main
sys.exit(main())
"""


def launcher(directory: Path, package: Path, change: str = "") -> Path:
    """A program that runs the daemon of another copy of the package.

    Args:
        directory: where it is put.
        package: the directory that has ``lllm3090d`` in it.
        change: Python code that is run before, to plant a bug.
    """
    directory.mkdir(parents=True, exist_ok=True)
    program = directory / "daemon.py"
    program.write_text(LAUNCHER.format(package=str(package), change=change))
    return program


class PlantedService(Service):
    """A daemon with a bug that was put into it: its units run another program."""

    program: Path | None = None

    def configure(self, **settings: str) -> None:
        """With the program in the place of the installed one."""
        if self.program is not None:
            drop_in = self.units_dir / f"{DAEMON_UNIT}.d"
            drop_in.mkdir(parents=True, exist_ok=True)
            text = f"[Service]\nExecStart=\nExecStart={sys.executable} {self.program}\n"
            (drop_in / "program.conf").write_text(text)
        super().configure(**settings)


@dataclass
class Scene:
    """All of it.

    Attributes:
        service: the daemon as a unit.
        nvml: the card.
        mounted: the state directory is a disk of its own.
        prices: bytes of the card by model, on an empty one.
    """

    service: Service
    nvml: FakeNvml
    mounted: bool
    prices: dict[str, int] = field(default_factory=dict)
    _behaviour: dict[str, Any] = field(default_factory=dict)

    @property
    def engine(self) -> Path:
        """The executable of the engines."""
        return self.service.directory / "engine" / "llama-server"

    @property
    def state_dir(self) -> Path:
        """Where the daemon remembers."""
        return self.service.directory / "state"

    def behave(self, **behaviour: Any) -> None:
        """What engines do from now on; None takes a word back."""
        self._behaviour |= behaviour
        shown = {key: value for key, value in self._behaviour.items() if value is not None}
        set_behaviour(self.service.directory / "engine", **shown)

    def learn_prices(self) -> None:
        """Ask what each model costs, and let its engine take nearly as much."""
        for name in MODELS:
            body = {"model": name, "context_tokens": CONTEXT_TOKENS}
            plan = self.service.request("POST", "/v1/plan", body).json()
            if not plan["fits"]:
                raise RuntimeError(f"{name} would not fit on an empty card: {plan}")
            self.prices[name] = plan["card_bytes"]
        taken = {name: int(price * TAKEN) // MIB for name, price in self.prices.items()}
        self.behave(vram_mib_of=taken)

    # --- the disk ------------------------------------------------------------------------------------------------

    def fill_disk(self) -> str:
        """Nothing more can be written to the state directory; how that was done."""
        if not self.mounted:
            self._limit_files(0)
            return "files of the daemon may not grow (RLIMIT_FSIZE)"
        size = 0
        with (self.state_dir / "filler").open("wb", buffering=0) as file:
            block = bytes(64 * 1024)
            while True:
                try:
                    size += file.write(block)
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    if len(block) == 1:
                        break
                    block = block[: len(block) // 16] or bytes(1)
        return f"{size // 1024} KiB fill the disk"

    def free_disk(self) -> None:
        """It can be written to again."""
        if self.mounted:
            (self.state_dir / "filler").unlink(missing_ok=True)
        else:
            self._limit_files(resource.RLIM_INFINITY)

    def _limit_files(self, size: int) -> None:
        pid = self.service.main_pid()
        if pid:
            with contextlib.suppress(ProcessLookupError):
                _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (size if size >= 0 else hard, hard))

    # --- the card ------------------------------------------------------------------------------------------------

    def sweep_card(self) -> None:
        """Take rows of processes that have ended from the card's file, as the fake library has no room for many."""
        with edited_state(self.nvml.state) as lines:
            lines[:] = [
                line
                for line in lines
                if line.split()[:1] != ["process"]
                or line.split()[4:5] != ["alive"]
                or runs(int(line.split()[2]))
            ]

    def keep_late(self, pid: int) -> bool:
        """What this process holds counts also when it has ended; whether it holds something."""
        return self._mark(pid, late=True)

    def give_back(self, pid: int) -> None:
        """What it left behind is free now, and what it holds if it still runs is its own."""
        self._mark(pid, late=False)

    def _mark(self, pid: int, *, late: bool) -> bool:
        found = False
        with edited_state(self.nvml.state) as lines:
            for number, line in enumerate(lines):
                words = line.split()
                if words[:1] == ["process"] and words[2] == str(pid):
                    lines[number] = " ".join(words[:4] if late else [*words[:4], "alive", "0"])
                    found = True
        return found


@contextlib.contextmanager
def set_up(directory: Path, program: Path | None = None) -> Iterator[Scene]:
    """A daemon that runs on a fake card, with everything in its place.

    Args:
        directory: empty.
        program: Python program of the daemon, in the place of the installed one.
    """
    state = directory / "state"
    state.mkdir()
    mounted = _mount_small_disk(state)
    try:
        install_fake_engine(directory / "engine")
        nvml = FakeNvml(directory / "card")
        settings = {"llama_dir": str(directory / "engine"), **SETTINGS}
        service = PlantedService(directory, settings, dict(nvml.environment))
        service.program = program
        scene = Scene(service, nvml, mounted)
        for name, gib in MODELS.items():
            write_llama(
                service.models_dir / name / "model.gguf",
                blocks=max(1, round(gib * 1024 / 271)),  # MiB of a block of this width at Q8_0
                embedding_length=4096,
                head_count=32,
                kv_head_count=8,
                feed_forward_length=16384,
            )
        scene.behave(nvml_state=str(nvml.state), **CALM)
        with running(service):
            scene.learn_prices()
            yield scene
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(state)], check=False)


def _mount_small_disk(state: Path) -> bool:
    """Whether the directory is a disk of its own now; only root can, who has a mount namespace here."""
    if os.geteuid() != 0:
        return False
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m,mode=700", "chaos", str(state)]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0
