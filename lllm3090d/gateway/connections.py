"""Connections to the gateway's port: how many there are, how long each may take, and what is told of bad ones.

aiohttp bounds lines, the number of headers and of requests sent ahead, and ends connections that idle. What it lets a
client do for ever is to send a body by the byte and to take nothing of an answer; what it says of a bad request quotes
it, in the answer and in the journal, keys included.

One look at all connections each second is cheaper than a timer for each request.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from aiohttp import StreamReader, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import RawRequestMessage

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gateway import dialects
from lllm3090d.gateway.form import LARGEST_HEAD_BYTES, fault
from lllm3090d.gateway.routes import dialect_of

log = logging.getLogger(__name__)

LARGEST_LINE_BYTES = 1 << 15
MOST_HEADERS = 128
KEEPALIVE_TIMEOUT_S = 75.0
# Each request has a file for its engine beside its own; the rest of the daemon must not go without.
FILES_OF_A_CONNECTION = 2
FILES_OF_OTHERS = 384
MOST_CONNECTIONS = 8192
NOT_HTTP = LlmError(
    ErrorCode.INVALID_REQUEST,
    "What was sent is no HTTP/1.1 request that is understood here, or its head is too large.",
    hint="Use a client of HTTP, without TLS.",
)
Handle = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a client may take.

    Attributes:
        head_s: from the first byte of a request's head to its last; a connection without one is ended after that too.
        body_s: for a body, beside what its size takes; only while we read.
        body_bytes_per_s: the least rate of a body.
        answer_s: without taking a byte of its answer.
        linger_s: for the rest of a body that was refused, so that the refusal is read.
        look_s: how often that is looked at.
    """

    head_s: float = 30.0
    body_s: float = 30.0
    body_bytes_per_s: float = 1024.0
    answer_s: float = 600.0
    linger_s: float = 5.0
    look_s: float = 1.0


def most_connections() -> int:
    """As many as there are files for."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return max(16, min(MOST_CONNECTIONS, (files - FILES_OF_OTHERS) // FILES_OF_A_CONNECTION))


class Connection(web.RequestHandler):
    """One client."""

    __slots__ = (
        "_clients",
        "_head_began_s",
        "_head_bytes",
        "_made_s",
        "_request",
        "_rest",
        "_sending_s",
        "_stuck_s",
        "_unsent_bytes",
        "_was_asked",
    )

    def __init__(self, clients: Clients, **options: Any) -> None:
        super().__init__(clients, **options)
        self._clients = clients
        self._made_s = 0.0
        self._was_asked = False
        self._request: web.BaseRequest | None = None
        # What was not read of the body of the last request.
        self._rest: StreamReader | None = None
        self._head_bytes = 0
        self._head_began_s: float | None = None
        self._sending_s = 0.0
        self._stuck_s = 0.0
        self._unsent_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take a client, or send it away."""
        if not self._clients.admit(self):
            if isinstance(transport, asyncio.Transport):
                error = LlmError(
                    ErrorCode.TOO_MANY_REQUESTS,
                    "The gateway has as many connections as it has files for.",
                    hint="Try again later, or raise LimitNOFILE of lllm3090d.service.",
                )
                transport.write(_bare(HTTPStatus.TOO_MANY_REQUESTS, error))
            transport.close()
            return
        self._made_s = self._clients.now_s()
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Forget it."""
        self._clients.forget(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """What has come; a head that goes on and on is given up."""
        if self._request is None and data and (self._rest is None or self._rest.is_eof()):
            if self._head_bytes > LARGEST_HEAD_BYTES and self.transport is not None:
                self.transport.write(_bare(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, NOT_HTTP))
                self.force_close()
                return
            if self._head_began_s is None:
                self._head_began_s = self._clients.now_s()
            self._head_bytes += len(data)
        super().data_received(data)

    def begin(self, request: web.BaseRequest) -> None:
        """A head is complete."""
        self._request, self._rest, self._was_asked = request, None, True
        self._head_began_s, self._head_bytes = None, 0
        self._sending_s = self._stuck_s = 0.0

    def end(self) -> None:
        """A request has been answered."""
        if self._request is not None:
            self._rest, self._request = self._request.content, None

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Tell of what is no request, or of a mistake of ours, without quoting what was sent."""
        error = NOT_HTTP
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            log.error("a request failed unexpectedly", exc_info=exc)
            error = LlmError(ErrorCode.INTERNAL, "The gateway made a mistake.", hint="Please report it.")
        else:
            log.debug("what came is no request", extra={"kind": type(exc).__name__})
        if request.writer.output_size > 0:
            raise ConnectionError("a part of the answer was sent")
        return refusal(request, error, status)

    def look(self, now_s: float, patience: Patience) -> None:
        """End it where it takes too long."""
        transport, request = self.transport, self._request
        if transport is None:
            return
        if request is None:
            since_s = self._head_began_s
            if since_s is None and not self._was_asked:
                since_s = self._made_s
            if since_s is not None and now_s - since_s > patience.head_s:
                self.force_close()
            return
        unsent_bytes = transport.get_write_buffer_size()
        self._stuck_s = (
            self._stuck_s + patience.look_s if unsent_bytes and unsent_bytes == self._unsent_bytes else 0.0
        )
        self._unsent_bytes = unsent_bytes
        content = request.content
        if not content.is_eof() and transport.is_reading():
            self._sending_s += patience.look_s
        allowed_s = patience.body_s + content.total_bytes / patience.body_bytes_per_s
        if self._sending_s > allowed_s or self._stuck_s > patience.answer_s:
            log.debug(
                "a client took too long", extra={"sending_s": self._sending_s, "stuck_s": self._stuck_s}
            )
            transport.abort()


class Clients(web.Server):
    """The HTTP server of a port: hands requests that are in order to whoever answers.

    Args:
        handle: answers.
        patience: how long clients may take.
        most: connections at a time.
    """

    def __init__(self, handle: Handle, patience: Patience, most: int) -> None:
        super().__init__(self._answer, request_factory=self._begin, handler_cancellation=True)
        self._handle = handle
        self._patience = patience
        self._most = most
        self._open: dict[Connection, None] = {}
        # Those without a request, the one that has been so for longest first.
        self._idle: dict[Connection, None] = {}
        self._event_loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self.now_s = self._event_loop.time

    def __call__(self) -> Connection:
        """A connection to be."""
        return Connection(
            self,
            loop=self._event_loop,
            auto_decompress=False,
            access_log=None,
            keepalive_timeout=KEEPALIVE_TIMEOUT_S,
            max_line_size=LARGEST_LINE_BYTES,
            max_field_size=LARGEST_LINE_BYTES,
            max_headers=MOST_HEADERS,
            lingering_time=self._patience.linger_s,
        )

    def admit(self, connection: Connection) -> bool:
        """Whether there is room for one more; one that asks nothing makes room."""
        if len(self._open) >= self._most:
            idlest = next(iter(self._idle), None)
            if idlest is None:
                return False
            self.forget(idlest)
            idlest.force_close()
        self._open[connection] = self._idle[connection] = None
        if self._timer is None:
            self._timer = self._event_loop.call_later(self._patience.look_s, self._look)
        return True

    def forget(self, connection: Connection) -> None:
        """It has ended."""
        self._open.pop(connection, None)
        self._idle.pop(connection, None)

    def _look(self) -> None:
        now_s = self.now_s()
        for connection in tuple(self._open):
            connection.look(now_s, self._patience)
        # Without clients no timer runs.
        self._timer = self._event_loop.call_later(self._patience.look_s, self._look) if self._open else None

    def _begin(
        self,
        message: RawRequestMessage,
        payload: StreamReader,
        protocol: web.RequestHandler,
        writer: AbstractStreamWriter,
        task: asyncio.Task[None],
    ) -> web.BaseRequest:
        request = web.BaseRequest(message, payload, protocol, writer, task, self._event_loop)
        if isinstance(protocol, Connection):
            self._idle.pop(protocol, None)
            protocol.begin(request)
        return request

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = request.protocol
        try:
            version = (request.version.major, request.version.minor)
            wrong = fault(request.method, request.raw_path, version, request.raw_headers)
            if wrong is None:
                return await self._handle(request)
            error = LlmError(
                ErrorCode.INVALID_REQUEST, f"The request is refused: {wrong}.", hint="Use a client of HTTP."
            )
            return refusal(request, error, HTTPStatus.BAD_REQUEST)
        finally:
            if isinstance(connection, Connection):
                connection.end()
                if connection in self._open:
                    self._idle[connection] = None


def refusal(request: web.BaseRequest, error: LlmError, status: int) -> web.Response:
    """A failure in the caller's words; the connection ends with it, for nobody knows what comes next."""
    response = web.Response(
        status=status,
        body=dialects.body(error, dialect_of(request.raw_path), ""),
        content_type="application/json",
        headers=dialects.headers(error),
    )
    response.force_close()
    return response


def _bare(status: HTTPStatus, error: LlmError) -> bytes:
    """The same for a connection that has no request."""
    body = dialects.body(error, dialect_of("/"), "")
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode("ascii") + body
