"""What the measurements share: a daemon of their own, the machine in a line, aligned tables, targets."""

from __future__ import annotations

import compileall
import contextlib
import os
import platform
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.system.harness import REPOSITORY, Service, properties, running, systemctl

ENGINE = REPOSITORY / ".engine"
MODEL_NAME = "SmolLM2-135M-Instruct"
PACKAGES = ("lllm3090d", "lllm3090ctl")
BUSY_LOAD_PER_CORE = (
    0.75  # beyond it figures tell of the neighbours; the measurements themselves make about 1
)
US_PER_S = 1_000_000


@dataclass(frozen=True, slots=True)
class Target:
    """A figure and its upper limit, in the same unit."""

    name: str
    value: float
    limit: float
    unit: str

    @property
    def met(self) -> bool:
        """The figure is within its limit."""
        return self.value <= self.limit


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows under heads: the first column to the left, the others to the right."""
    lines = [tuple(heads), *map(tuple, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def spread_rows(unit: str, samples: Mapping[str, Sequence[float]], digits: int = 1) -> list[tuple[str, ...]]:
    """Name, median, lowest, highest and unit of each list of samples."""
    return [
        (
            name,
            f"{statistics.median(values):.{digits}f}",
            f"{min(values):.{digits}f}",
            f"{max(values):.{digits}f}",
            unit,
        )
        for name, values in samples.items()
    ]


SPREAD_HEADS = ("", "median", "lowest", "highest", "unit")


def report_targets(targets: Sequence[Target]) -> int:
    """Print each target beside its figure; the exit status, 1 when one is missed."""
    rows = [
        (t.name, f"{t.value:.4g} {t.unit}", f"{t.limit:.4g} {t.unit}", "met" if t.met else "MISSED")
        for t in targets
    ]
    print("\n" + table(("target", "figure", "at most", ""), rows))
    return 0 if all(target.met for target in targets) else 1


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def machine_line() -> str:
    """The machine a figure was measured on, and how busy it was."""
    load = os.getloadavg()[0]
    cores = len(os.sched_getaffinity(0))
    systemd = systemctl("--version").split()[1]
    busy = "  BUSY: do not trust the figures" if load > BUSY_LOAD_PER_CORE * cores else ""
    return (
        f"machine: {_processor()}, {cores} cores, Linux {platform.release()}, systemd {systemd}, "
        f"Python {platform.python_version()}; load average {load:.2f}{busy}"
    )


def engine_dir() -> Path:
    """Where ``llama-server`` is: the named build, else the one that set-up chose, else in PATH."""
    named = os.environ.get("LLLM3090_LLAMA_DIR")
    places = [Path(named) / below for below in ("", "bin", "build/bin")] if named else [ENGINE / "llama"]
    for place in places:
        if os.access(place / "llama-server", os.X_OK):
            return place
    found = None if named else shutil.which("llama-server")
    if found is None:
        sys.exit(f"no llama-server in {', '.join(map(str, places))}; run: packaging/dev/setup.sh demo")
    return Path(found).parent


def checkpoint(name: str) -> Path:
    """A checkpoint that set-up has fetched."""
    path = ENGINE / "models" / name
    if not path.is_file():
        sys.exit(f"{path} is not there; run: packaging/dev/setup.sh test")
    return path


def compile_bytecode() -> None:
    """As an installer does; where ``PYTHONDONTWRITEBYTECODE`` is set, each start would compile anew."""
    for package in PACKAGES:
        if not compileall.compile_dir(REPOSITORY / package, quiet=1):
            sys.exit(f"{package} does not compile")


@contextlib.contextmanager
def daemon() -> Iterator[Service]:
    """A daemon with the real engine and SmolLM2, under a private user manager, removed in the end."""
    if os.environ.get("PRIVATE_USER_MANAGER") != "1":
        sys.exit("needs a user manager of its own; run: packaging/dev/user-manager --private -- COMMAND")
    compile_bytecode()
    print(machine_line() + "\n")
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        service = Service(Path(directory), {"llama_dir": str(engine_dir())})
        home = service.models_dir / MODEL_NAME
        home.mkdir(parents=True)
        (home / "model.gguf").symlink_to(checkpoint("smollm2.gguf"))
        with running(service) as started:
            yield started


def load(service: Service) -> dict[str, Any]:
    """Load SmolLM2 with its planned context; the instance."""
    last = service.load(MODEL_NAME)[-1]
    if last["kind"] != "ready":
        raise RuntimeError(f"the load failed: {last}")
    instance: dict[str, Any] = last["instance"]
    return instance


def unload(service: Service) -> None:
    """Unload it; returns when its memory is back."""
    answer = service.request("POST", "/v1/unload", {"model": MODEL_NAME})
    if answer.status != 200:
        raise RuntimeError(f"the unload failed: {answer.body!r}")


def exec_time_s(unit: str) -> float:
    """When systemd started the main process of a unit, seconds of CLOCK_MONOTONIC."""
    name = "ExecMainStartTimestampMonotonic"
    return int(properties(unit, name)[name]) / US_PER_S
