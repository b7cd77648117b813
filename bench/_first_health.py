"""Tell when an engine first says it is ready; a process of its own, so that it waits for nobody's lock.

    python -m bench._first_health DIRECTORY

For each line on standard input: wait for a socket to appear in DIRECTORY, ask it for ``/health`` every
millisecond, and print the CLOCK_MONOTONIC seconds at which the first 200 arrived.
"""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path

INTERVAL_S = 0.001
ANSWER_TIMEOUT_S = 2.0
LIMIT_S = 60.0
REQUEST = b"GET /health HTTP/1.1\r\nHost: engine\r\nConnection: close\r\n\r\n"
READY = b"HTTP/1.1 200"


def healthy(path: Path) -> bool:
    """Ask once, on a connection of its own."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(ANSWER_TIMEOUT_S)
        try:
            connection.connect(str(path))
            connection.sendall(REQUEST)
            answer = b""
            while len(answer) < len(READY) and (piece := connection.recv(256)):
                answer += piece
        except OSError:  # nobody listens yet
            return False
    return answer.startswith(READY)


def first_ready_s(directory: Path) -> float:
    """When the engine whose socket appears in ``directory`` was first ready. Raises TimeoutError."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        for path in directory.glob("*.sock"):
            if healthy(path):
                return time.monotonic()
        time.sleep(INTERVAL_S)
    raise TimeoutError(f"no engine was ready in {directory} within {LIMIT_S:g} s")


def main() -> None:
    """Serve until standard input ends."""
    directory = Path(sys.argv[1])
    for _ in sys.stdin:
        print(repr(first_ready_s(directory)), flush=True)


if __name__ == "__main__":
    main()
