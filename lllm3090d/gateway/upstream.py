"""One request to an engine on its Unix socket, passed through in both directions as it comes.

Each request has a connection of its own: an engine closes those that idle, and a request that is sent into one that is
being closed could not be told from one that the engine has begun to work on. A connection to a Unix socket costs some
ten microseconds. To close it is how an engine learns that nobody waits for an answer any more.

h11 reads the engine's answers and writes our requests: framing is not what this project is about.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import h11

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gateway.engine_connection import EngineConnection, connect
from lllm3090d.serving.drains import way_in
from lllm3090d.serving.readiness import peer_belongs_to

LARGEST_HEAD_BYTES = 1 << 17
CONNECT_TIMEOUT_S = 5.0
# RFC 9112, 7.1, without extensions.
_CHUNK_HEAD = re.compile(rb"([0-9A-Fa-f]{1,8})\r\n")

Headers = Sequence[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Engine:
    """Where an engine listens.

    Attributes:
        name: of its model.
        socket: its path.
        control_group: of its unit; whoever else listens there is sent nothing.
    """

    name: str
    socket: Path
    control_group: str


@dataclass(frozen=True, slots=True)
class Head:
    """The head of an answer."""

    status: int
    headers: Headers


class Exchange:
    """A request on its way and its answer; leaving the context closes the connection, whatever was still to come.

    Args:
        engine: whom to ask.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._protocol = h11.Connection(h11.CLIENT, max_incomplete_event_size=LARGEST_HEAD_BYTES)
        self._connection: EngineConnection | None = None
        self._sending: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Connect.

        Raises:
            LlmError: ENGINE_FAILED where nobody listens, or somebody who is not in the unit.
        """
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                # Who has a lease may come in although the model is being drained.
                connection = await self._connect()
        except (OSError, TimeoutError) as error:
            raise _gone(
                self._engine, f"nobody answers on its socket: {error or 'no answer in time'}"
            ) from error
        if not peer_belongs_to(connection.sock, self._engine.control_group):
            connection.close()
            raise _gone(self._engine, "the process that answers on its socket is not in its unit")
        self._connection = connection
        return self

    async def _connect(self) -> EngineConnection:
        try:
            return await connect(self._engine.socket)
        except FileNotFoundError:
            # Who has a lease may come in although the model is being drained.
            return await connect(way_in(self._engine.socket))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; an answer that was not read to its end is thus cancelled in the engine."""
        if self._sending is not None:
            self._sending.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sending
        if self._connection is not None:
            self._connection.close()

    async def send(
        self, method: str, target: str, headers: Headers, body: AsyncIterator[bytes] | bytes
    ) -> Head:
        """Send a request and read the head of its answer; the body is sent beside that.

        Args:
            method: of HTTP.
            target: path and query.
            headers: end-to-end ones, ``Content-Length`` among them where the length is known.
            body: pieces, or the whole.

        Raises:
            LlmError: ENGINE_FAILED where the engine ends before it has answered.
        """
        lengths = [value for name, value in headers if name == b"content-length"]
        framing = [] if lengths or body == b"" else [(b"transfer-encoding", b"chunked")]
        request = h11.Request(
            method=method.encode("ascii"),
            target=target.encode("latin-1"),
            headers=[(b"host", b"engine"), (b"connection", b"close"), *headers, *framing],
        )
        connection = self._connected()
        head = self._protocol.send(request) or b""
        if isinstance(body, bytes):
            data = self._protocol.send(h11.Data(body)) if body else b""
            end = self._protocol.send(h11.EndOfMessage()) or b""
            connection.put(head + (data or b"") + end)
        else:
            self._sending = asyncio.create_task(self._send_body(connection, head, body))
        return await self._head()

    async def body(self) -> AsyncGenerator[bytes, None]:
        """The body of the answer, each piece as soon as it is there.

        Raises:
            LlmError: ENGINE_FAILED where it breaks off.
        """
        pieces: list[bytes] = []
        between = False  # two chunks, with nothing left over
        while True:
            event = self._next()
            if event is h11.NEED_DATA:
                if pieces:
                    yield b"".join(pieces)
                    pieces.clear()
                data = await self._take()
                if between and not self._protocol.trailing_data[0]:
                    # A token is a chunk and comes alone. The framing of such a one tells nothing of the next, so that
                    # the parser, which takes a fifth of what it takes to pass one on, need not see it.
                    while (piece := only_chunk(data)) is not None:
                        yield piece
                        data = await self._take()
                between = False
                self._feed(data)
            elif isinstance(event, h11.Data):
                pieces.append(bytes(event.data))
                between = event.chunk_end
            else:  # its end; trailers are not passed on
                if pieces:
                    yield b"".join(pieces)
                return

    async def _head(self) -> Head:
        while True:
            event = self._next()
            if event is h11.NEED_DATA:
                self._feed(await self._take())
            elif isinstance(event, h11.Response):
                return Head(event.status_code, event.headers.raw_items())
            elif not isinstance(event, h11.InformationalResponse):
                raise _gone(self._engine, "it closed the connection without an answer")

    def _next(self) -> object:
        try:
            return self._protocol.next_event()
        except h11.RemoteProtocolError as error:
            raise _gone(self._engine, f"its answer broke off: {error}") from error

    async def _take(self) -> bytes:
        try:
            return await self._connected().read()
        except OSError as error:
            raise _gone(self._engine, f"its answer broke off: {error}") from error

    def _feed(self, data: bytes) -> None:
        try:
            self._protocol.receive_data(data)
        except h11.RemoteProtocolError as error:
            raise _gone(self._engine, f"its answer broke off: {error}") from error

    async def _send_body(
        self, connection: EngineConnection, head: bytes, body: AsyncIterator[bytes]
    ) -> None:
        """An engine may answer before it has read everything, and close: what it says then counts."""
        try:
            takes_more = await connection.write(head)
            async for piece in body:
                if not takes_more:
                    return
                takes_more = await connection.write(self._protocol.send(h11.Data(piece)) or b"")
            await connection.write(self._protocol.send(h11.EndOfMessage()) or b"")
        except (OSError, h11.LocalProtocolError, LlmError):
            # A body that breaks off or is too large is the client's fault, which its source remembers: the engine must
            # not wait for the rest.
            connection.close()

    def _connected(self) -> EngineConnection:
        if self._connection is None:
            raise RuntimeError("not connected")
        return self._connection


def only_chunk(data: bytes) -> bytes | None:
    """The content of the one chunk that this is; None where it is anything else, or the last one."""
    head = _CHUNK_HEAD.match(data)
    if head is None or not (size := int(head[1], 16)):
        return None
    begin = head.end()
    return data[begin:-2] if len(data) == begin + size + 2 and data.endswith(b"\r\n") else None


def _gone(engine: Engine, why: str) -> LlmError:
    return LlmError(
        ErrorCode.ENGINE_FAILED,
        f"The engine of {engine.name} did not answer: {why}.",
        hint=f"See what it said: lllm3090ctl logs {engine.name}",
        model=engine.name,
    )
