"""How fast the client answers, beside an interpreter that only imports what any such client needs.

    packaging/dev/user-manager --private -- .venv/bin/python -m bench.client

Wall times of ``lllm3090ctl status`` and of ``python -c "import click, http.client, json"``, in pairs whose
order alternates: with nothing loaded, with a model loaded, and with a model loaded on a terminal. Only the
last draws a table, with rich, whose import has its price; it has no target.
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
from collections.abc import Sequence

from bench import _support as support
from tests.system.harness import BIN

RATIO_LIMIT = 1.5
MS_PER_S = 1000.0
ON_TERMINAL = "a model loaded, on a terminal"
STATUS = (str(BIN / "lllm3090ctl"), "status")
BARE = (sys.executable, "-c", "import click, http.client, json")


def wall_ms(command: Sequence[str], output: int) -> float:
    """How long a command takes, milliseconds. Raises CalledProcessError."""
    began = time.monotonic()
    subprocess.run(command, check=True, stdout=output)
    return (time.monotonic() - began) * MS_PER_S


def pairs(count: int, output: int = subprocess.DEVNULL) -> tuple[list[float], list[float]]:
    """Wall times of the client and of the bare interpreter, milliseconds."""
    ours: list[float] = []
    bare: list[float] = []
    sides = [(STATUS, ours), (BARE, bare)]
    for command, _ in sides:
        wall_ms(command, output)  # the first one reads the files from disk
    for _ in range(count):
        for command, times in sides:
            times.append(wall_ms(command, output))
        sides.reverse()
    return ours, bare


def pairs_on_terminal(count: int) -> tuple[list[float], list[float]]:
    """The same with a pseudo-terminal as standard output."""
    master, terminal = os.openpty()
    reader = threading.Thread(target=drain, args=(master,))
    reader.start()
    try:
        return pairs(count, terminal)
    finally:
        os.close(terminal)
        reader.join()
        os.close(master)


def drain(master: int) -> None:
    """Read what is shown until the terminal is closed."""
    # Linux reports the end of a pseudo-terminal as EIO.
    with contextlib.suppress(OSError):
        while os.read(master, 1 << 16):
            pass


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="wall time of lllm3090ctl status")
    parser.add_argument("--pairs", type=int, default=20, help="pairs of runs (default: 20)")
    count = parser.parse_args().pairs
    measured = {}
    with support.daemon() as service:
        measured["nothing loaded"] = pairs(count)
        support.load(service)
        measured["a model loaded"] = pairs(count)
        measured[ON_TERMINAL] = pairs_on_terminal(count)
        support.unload(service)
    rows: list[tuple[str, ...]] = []
    ratios = {}
    for name, (ours, bare) in measured.items():
        ratios[name] = statistics.median(ours) / statistics.median(bare)
        sides = {f"lllm3090ctl status, {name}": ours, f"  {' '.join(BARE[1:])}": bare}
        first, second = support.spread_rows("ms", sides)
        rows += [(*first, f"{ratios[name]:.2f}"), (*second, "")]
    print(f"{count} pairs each")
    print(support.table((*support.SPREAD_HEADS, "ratio"), rows))
    targets = [
        support.Target(f"status to bare, {name}", ratio, RATIO_LIMIT, "")
        for name, ratio in ratios.items()
        if name != ON_TERMINAL
    ]
    return support.report_targets(targets)


if __name__ == "__main__":
    sys.exit(main())
