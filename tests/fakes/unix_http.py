"""HTTP over a Unix socket with the standard library."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from pathlib import Path
from typing import Any


class UnixConnection(http.client.HTTPConnection):
    """A connection to a socket's path."""

    def __init__(self, path: Path, timeout_s: float = 60) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        """As the base class, on the other kind of socket."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        try:
            self.sock.connect(str(self._path))
        except OSError:
            self.close()
            raise


def call(path: Path, method: str, target: str, body: Any = None, timeout_s: float = 60) -> tuple[int, bytes]:
    """Status and body of one request; ``body`` is sent as JSON."""
    with contextlib.closing(UnixConnection(path, timeout_s)) as connection:
        data = None if body is None else json.dumps(body)
        connection.request(method, target, data, {"Content-Type": "application/json"})
        with connection.getresponse() as answer:
            return answer.status, answer.read()


def health(path: Path) -> int | None:
    """Status of /health; None while nobody listens."""
    try:
        return call(path, "GET", "/health")[0]
    except (FileNotFoundError, ConnectionRefusedError):
        return None
