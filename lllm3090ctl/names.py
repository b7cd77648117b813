"""Names for a shell that completes a word: ``lllm3090ctl --names models [SOCKET]``. One to a line, or nothing at all.

It runs at each press of a key, so it imports next to nothing, waits for a moment only, and never starts the daemon:
where systemd listens for it, it is asked only if it runs.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time

KINDS = ("models", "instances", "engines", "keys")
WAIT_S = 0.5  # in all; somebody sits and waits
LARGEST_ANSWER_BYTES = 1 << 20
READ_BYTES = 1 << 16
LARGEST_PID_BYTES = 32
NOTHING = 1
USAGE = 2


def main(arguments: list[str]) -> int:
    """Write the names; 1 where nobody tells them.

    Args:
        arguments: what is named, one of :data:`KINDS`, and the control socket where it is not the usual one.
    """
    if not 1 <= len(arguments) <= 2 or arguments[0] not in KINDS:
        sys.stderr.write(f"usage: lllm3090ctl --names {'|'.join(KINDS)} [SOCKET]\n")
        return USAGE
    usual = os.path.join(_runtime_base(), "lllm3090d", "control.sock")  # noqa: PTH118 - no pathlib, for speed
    path = arguments[1] if arguments[1:] and arguments[1] else _chosen() or usual
    if _same(path, usual) and not runs(f"{usual[: -len('control.sock')]}daemon.lock"):
        return NOTHING
    try:
        found = parsed(ask(path, arguments[0]))
    except (OSError, ValueError):  # no daemon, or none that we know: a shell has nobody to tell that
        return NOTHING
    sys.stdout.buffer.write("".join(f"{name}\n" for name in found).encode())
    return 0


def runs(lock: str) -> bool:
    """Whether the daemon whose lock this is runs.

    The lock itself is not tried: a daemon that starts at that moment would find it held, and give up. The file has the
    PID of its last holder.
    """
    try:
        with open(lock, "rb") as file:  # noqa: PTH123 - no pathlib, for speed
            pid = file.read(LARGEST_PID_BYTES).decode("ascii").strip()
        if not pid.isdecimal():
            return False
        with open(f"/proc/{pid}/cmdline", "rb") as file:  # noqa: PTH123
            return b"lllm3090d" in file.read()
    except (OSError, UnicodeDecodeError):
        return False


def ask(path: str, kind: str) -> bytes:
    """The whole answer, head and body; raises OSError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        end_s = time.monotonic() + WAIT_S
        connection.settimeout(WAIT_S)
        connection.connect(path)
        request = f"GET /v1/names?of={kind} HTTP/1.0\r\nHost: localhost\r\nAccept: application/json\r\n\r\n"
        connection.sendall(request.encode())
        answer = b""
        while piece := connection.recv(READ_BYTES):
            answer += piece
            left_s = end_s - time.monotonic()
            if left_s <= 0 or len(answer) > LARGEST_ANSWER_BYTES:
                raise OSError("an answer without an end")
            connection.settimeout(left_s)
    return answer


def parsed(answer: bytes) -> list[str]:
    """The names of an answer that a shell can be offered: none with a line's end in it. Raises ValueError."""
    head, _, body = answer.partition(b"\r\n\r\n")
    if head.split(None, 2)[1:2] != [b"200"]:
        raise ValueError("a problem")
    document = json.loads(body)
    names = document.get("names") if isinstance(document, dict) else None
    if not isinstance(names, list):
        raise ValueError("no names")
    return [name for name in names if isinstance(name, str) and name.isprintable() and name]


def _runtime_base() -> str:
    return os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}"


def _chosen() -> str | None:
    directory = os.environ.get("LLLM3090_RUNTIME_DIR")
    return f"{os.path.expanduser(directory)}/control.sock" if directory else None  # noqa: PTH111


def _same(path: str, usual: str) -> bool:
    return os.path.realpath(path) == os.path.realpath(usual)
