"""Copy a build's output from stdin to a log file and show how far it is: ``build_progress.py LOG``.

``[ 37%]``, as CMake and Ninja print it, is the measure. On a terminal one line is kept up to date,
elsewhere each tenth is a line.
"""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

PERCENT = re.compile(r"^\s*\[\s*(\d{1,3})%\]")


def main(log_path: Path) -> None:
    """Read stdin to its end."""
    begin = time.monotonic()
    live = sys.stdout.isatty()
    shown = -1
    with log_path.open("w", encoding="utf-8", errors="replace") as log:
        for line in sys.stdin:
            log.write(line)
            log.flush()
            found = PERCENT.match(line)
            if not found:
                continue
            percent = int(found.group(1))
            if percent <= shown or (not live and percent // 10 <= shown // 10 and shown >= 0):
                continue
            shown = percent
            _show(percent, time.monotonic() - begin, live)
    if live and shown >= 0:
        print()


def _show(percent: int, elapsed_s: float, live: bool) -> None:
    text = f"setup: compiling llama.cpp {percent:3d} %, {_clock(elapsed_s)} so far"
    if percent >= 5:
        text += f", about {_clock(elapsed_s * (100 - percent) / percent)} to go"
    print(f"\r{text:<72}" if live else text, end="" if live else "\n", flush=True)


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
