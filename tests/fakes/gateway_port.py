"""A stand-in for the gateway on a TCP port, for tests of the client: it says what it is given."""

from __future__ import annotations

import http.server
import json
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

Step = str | bytes | dict[str, Any] | threading.Event


@dataclass
class Asked:
    """A request as it arrived."""

    path: str
    headers: dict[str, str]
    document: Any


@dataclass
class GatewayPort:
    """Answers each completion with its script; the last repeats.

    Attributes:
        scripts: of each completion: text that is a delta, a chunk, bytes as they are, or an event to wait for.
        key: without which nobody is let through.
        status: of completions; another than 200 answers with the first step as a whole.
    """

    scripts: Sequence[Sequence[Step]] = ()
    key: str | None = None
    status: int = 200
    asked: list[Asked] = field(default_factory=list)
    # Set when a client has left before its answer was complete.
    left: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Self:
        outer: GatewayPort = self

        class Handler(_Handler):
            port = outer

        self._server = _Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away is part of the tests."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]  # as it was handed here


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    port: GatewayPort

    def log_message(self, format: str, *args: object) -> None:
        """Keep quiet."""

    def do_GET(self) -> None:
        """Whether it lets through."""
        self._whole(200, {"status": "ok"}) if self._has_key() else self._forbidden()

    def do_POST(self) -> None:
        """A completion."""
        gateway = self.port
        body = self.rfile.read(int(self.headers["Content-Length"]))
        gateway.asked.append(Asked(self.path, dict(self.headers), json.loads(body)))
        if not self._has_key():
            self._forbidden()
            return
        script = gateway.scripts[min(len(gateway.asked), len(gateway.scripts)) - 1]
        if gateway.status != 200:
            self._whole(gateway.status, script[0])
            return
        self.close_connection = True
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        try:
            for step in script:
                self._say(step)
        except (BrokenPipeError, ConnectionResetError):
            self.port.left.set()

    def _say(self, step: Step) -> None:
        if isinstance(step, threading.Event):
            while not step.wait(0.02):  # writing shows whether somebody is there
                self.wfile.write(b": waiting\n\n")
                self.wfile.flush()
            return
        if isinstance(step, str):
            step = {"choices": [{"index": 0, "delta": {"content": step}, "finish_reason": None}]}
        data = step if isinstance(step, bytes) else f"data: {json.dumps(step)}\n\n".encode()
        self.wfile.write(data)
        self.wfile.flush()

    def _has_key(self) -> bool:
        wanted = self.port.key
        return wanted is None or self.headers.get("Authorization") == f"Bearer {wanted}"

    def _forbidden(self) -> None:
        hint = "Send it as Authorization: Bearer KEY."
        error = {"message": f"The gateway asks for a key. {hint}", "code": "api_key_wrong", "hint": hint}
        self._whole(401, {"error": error})

    def _whole(self, status: int, document: Any) -> None:
        body = document if isinstance(document, bytes) else json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
