"""How fast the client answers, beside an interpreter that only imports what any such client needs.

    packaging/dev/user-manager --private -- .venv/bin/python -m bench.client

Wall times of ``lllm3090ctl status`` and of ``python -c "import click, http.client, json"``, in pairs whose
order alternates, with nothing and with a model loaded. Standard output is a pseudo-terminal, as for a person.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence

from bench import _support as support
from tests.system.harness import BIN

RATIO_LIMIT = 1.5
MS_PER_S = 1000.0
STATUS = (str(BIN / "lllm3090ctl"), "status")
BARE = (sys.executable, "-c", "import click, http.client, json")


@contextlib.contextmanager
def terminal() -> Iterator[int]:
    """A pseudo-terminal to write to; what is shown is read and dropped."""
    master, written = os.openpty()
    reader = threading.Thread(target=_drain, args=(master,))
    reader.start()
    try:
        yield written
    finally:
        os.close(written)
        reader.join()
        os.close(master)


def _drain(master: int) -> None:
    # Linux reports the end of a pseudo-terminal as EIO.
    with contextlib.suppress(OSError):
        while os.read(master, 1 << 16):
            pass


def wall_ms(command: Sequence[str], output: int) -> float:
    """How long a command takes, milliseconds. Raises CalledProcessError."""
    began = time.monotonic()
    subprocess.run(command, check=True, stdout=output)
    return (time.monotonic() - began) * MS_PER_S


def pairs(count: int) -> tuple[list[float], list[float]]:
    """Wall times of the client and of the bare interpreter, milliseconds."""
    ours: list[float] = []
    bare: list[float] = []
    sides = [(STATUS, ours), (BARE, bare)]
    with terminal() as output:
        for command, _ in sides:
            wall_ms(command, output)  # the first one reads the files from disk
        for _ in range(count):
            for command, times in sides:
                times.append(wall_ms(command, output))
            sides.reverse()
    return ours, bare


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="wall time of lllm3090ctl status")
    parser.add_argument("--pairs", type=int, default=20, help="pairs of runs (default: 20)")
    count = parser.parse_args().pairs
    with support.daemon() as service:
        measured = {"nothing loaded": pairs(count)}
        support.load(service)
        measured["a model loaded"] = pairs(count)
        support.unload(service)
    print(f"{count} pairs each; bare: python -c '{BARE[-1]}'")
    rows: list[tuple[str, ...]] = []
    targets = []
    for name, (ours, bare) in measured.items():
        sides = {f"lllm3090ctl status, {name}": ours, "  bare": bare}
        rows += support.spread_rows("ms", sides)
        ratio = statistics.median(ours) / statistics.median(bare)
        targets.append(support.Target(f"medians, status to bare, {name}", ratio, RATIO_LIMIT, ""))
    print(support.table(support.SPREAD_HEADS, rows))
    return support.report_targets(targets)


if __name__ == "__main__":
    sys.exit(main())
