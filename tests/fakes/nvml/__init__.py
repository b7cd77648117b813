"""A graphics card that is not there: a fake ``libnvidia-ml.so.1`` and the state file it answers from."""

from __future__ import annotations

import functools
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.fakes.engine import edited_state

SOURCE = Path(__file__).with_name("nvml.c")
LIBRARY = "libnvidia-ml.so.1"

# Return codes of NVML.
UNINITIALIZED = 1
NOT_SUPPORTED = 3
DRIVER_NOT_LOADED = 9
FUNCTION_NOT_FOUND = 13
GPU_IS_LOST = 15
LIB_RM_VERSION_MISMATCH = 18


@dataclass(frozen=True)
class FakeProcess:
    """A process on the card: kind ``c`` or ``g``; used_bytes None where the driver does not tell."""

    pid: int
    used_bytes: int | None
    kind: str = "c"


@dataclass(frozen=True)
class FakeCard:
    """By default an RTX 3090 as its driver reports it; used_bytes and free_bytes replace the sums."""

    name: str = "NVIDIA GeForce RTX 3090"
    uuid: str = "GPU-00000000-1111-2222-3333-444444444444"
    pci: str = "00000000:01:00"
    total_bytes: int = 24576 << 20
    reserved_bytes: int = 451 << 20
    other_bytes: int = 0
    used_bytes: int | None = None
    free_bytes: int | None = None
    processes: tuple[FakeProcess, ...] = ()
    capability: str = "8.6"
    link: tuple[int, int, int, int] = (
        4,
        16,
        1,
        16,
    )  # most and current generation and width, as of an idle card
    mig: bool | None = None  # divided; None where the card cannot be
    lost: bool = False
    failures: Mapping[str, int] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """Its part of the state file."""
        rows = [
            "device",
            f"  name {self.name}",
            f"  uuid {self.uuid}",
            f"  pci {self.pci}",
            f"  capability {self.capability.replace('.', ' ')}",
            f"  link {' '.join(map(str, self.link))}",
            f"  total {self.total_bytes}",
            f"  reserved {self.reserved_bytes}",
            f"  other {self.other_bytes}",
            "  utilisation 3 1",
            "  temperature 41",
            "  power 22000",
        ]
        rows += [] if self.mig is None else [f"  mig {int(self.mig)} {int(self.mig)}"]
        rows += ["  lost"] if self.lost else []
        rows += [f"  used {self.used_bytes}"] if self.used_bytes is not None else []
        rows += [f"  free {self.free_bytes}"] if self.free_bytes is not None else []
        for process in self.processes:
            used = "na" if process.used_bytes is None else process.used_bytes
            rows.append(f"  process {process.kind} {process.pid} {used}")
        return rows + [f"  fail {function} {code}" for function, code in self.failures.items()]


@functools.cache
def _built_library() -> bytes:
    """The library, by gcc; once in a process, for a run of tests wants it a hundred times."""
    with tempfile.TemporaryDirectory() as directory:
        made = Path(directory) / LIBRARY
        command = ["gcc", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread"]
        subprocess.run([*command, f"-Wl,-soname,{LIBRARY}", "-o", str(made), str(SOURCE)], check=True)
        return made.read_bytes()


class FakeNvml:
    """The library in a directory of its own, and its state file."""

    def __init__(self, directory: Path) -> None:
        """Put the library there. Args: directory: made if missing."""
        self.library_dir = directory / "nvml"
        self.library_dir.mkdir(parents=True, exist_ok=True)
        self.state = directory / "nvml.state"
        (self.library_dir / LIBRARY).write_bytes(_built_library())
        self.write(FakeCard())

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to see this card instead of a real one."""
        return {"LD_LIBRARY_PATH": str(self.library_dir), "FAKE_NVML_STATE": str(self.state)}

    def write(
        self, *cards: FakeCard, driver: str = "580.95.05", failures: Mapping[str, int] | None = None
    ) -> None:
        """Replace the whole state, claims of running fake engines included."""
        lines = [f"driver {driver}", *(f"fail {name} {code}" for name, code in (failures or {}).items())]
        for card in cards:
            lines += card.lines()
        self.state.touch()
        with edited_state(self.state) as state:
            state[:] = lines

    def grow(self, step_bytes: int) -> None:
        """Let others take more and more of the first card, and begin anew, without end."""
        self.settle(0)
        with edited_state(self.state) as state:
            state.insert(1 + state.index("device"), f"  growing {step_bytes}")

    def settle(self, other_bytes: int) -> None:
        """Let others hold so much of the first card, and stand still."""
        with edited_state(self.state) as state:
            state[:] = [line for line in state if line.split()[:1] != ["growing"]]
            at = next(at for at, line in enumerate(state) if line.split()[:1] == ["other"])
            state[at] = f"  other {other_bytes}"

    def fail(self, function: str, code: int) -> None:
        """Let a function return an error from now on, for all cards."""
        with edited_state(self.state) as state:
            state.insert(0, f"fail {function} {code}")

    def recover(self) -> None:
        """Take all demanded errors back."""
        with edited_state(self.state) as state:
            state[:] = [line for line in state if line.split()[:1] != ["fail"]]

    def lose(self, uuid: str) -> None:
        """Let a card fall off the bus."""
        with edited_state(self.state) as state:
            state.insert(_after(state, uuid), "  lost")

    def find_again(self, uuid: str) -> None:
        """Let it come back; who has seen it lost must initialise the library again."""
        with edited_state(self.state) as state:
            at = _after(state, uuid)
            del state[state.index("  lost", at)]

    def report(self, xid: int, uuid: str | None = None) -> None:
        """Let the driver report an error of a card; by default of the first one."""
        with edited_state(self.state) as state:
            serials = [int(line.split()[2]) for line in state if line.split()[:1] == ["xid"]]
            at = 1 + (
                _after(state, uuid) - 1 if uuid else [line.split()[:1] for line in state].index(["uuid"])
            )
            while state[at].split()[:1] == ["xid"]:  # behind those that happened before
                at += 1
            state.insert(at, f"  xid {xid} {max(serials, default=0) + 1}")

    def ask_for(self, action: int | None, uuid: str | None = None) -> None:
        """Let the driver ask for something to recover a card, 0 for nothing; None: it does not tell."""
        with edited_state(self.state) as state:
            state[:] = [line for line in state if line.split()[:1] != ["recovery"]]
            at = _after(state, uuid) if uuid else 1 + state.index("device")
            if action is not None:
                state.insert(at, f"  recovery {action}")

    def load(self, busy_percent: int, memory_busy_percent: int) -> None:
        """Let all cards be so busy from now on."""
        with edited_state(self.state) as state:
            state[:] = [
                f"  utilisation {busy_percent} {memory_busy_percent}"
                if line.split()[:1] == ["utilisation"]
                else line
                for line in state
            ]

    def add_process(self, process: FakeProcess, uuid: str | None = None) -> None:
        """Let another program take memory of a card; by default of the last one."""
        used = "na" if process.used_bytes is None else process.used_bytes
        with edited_state(self.state) as state:
            at = len(state) if uuid is None else _after(state, uuid)
            state.insert(at, f"  process {process.kind} {process.pid} {used}")

    def remove_process(self, pid: int) -> None:
        """Let a program give its memory back."""
        with edited_state(self.state) as state:
            state[:] = [
                line for line in state if line.split()[:1] != ["process"] or line.split()[2] != str(pid)
            ]


def _after(state: list[str], uuid: str) -> int:
    """The place in the state file behind the line of this card's UUID."""
    return [line.strip() for line in state].index(f"uuid {uuid}") + 1
