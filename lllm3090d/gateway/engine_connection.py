"""A connection to an engine's Unix socket, as it is: bytes that come, bytes that go, and back-pressure both ways.

What asyncio's transports do, without the turns of the loop that they take to begin and to end: a connection lives for
one request, and those turns were a fifth of what the gateway added to it. Unlike a transport it reads to the end what
the other side has said before it closed, also where the last write to it failed.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from pathlib import Path

READ_BYTES = 1 << 16
# Of an answer, waiting to be taken; beyond it the engine is not read from.
MOST_WAITING_BYTES = 1 << 18
# Of a body, waiting to be sent; beyond it the client is not read from.
MOST_UNSENT_BYTES = 1 << 16
SHORTEST_CONNECT_WAIT_S, LONGEST_CONNECT_WAIT_S = 0.001, 0.05


async def connect(path: Path) -> EngineConnection:
    """A connection to a listener, once it has room for one more; the caller bounds the time.

    A Unix socket says EAGAIN where the backlog is full, and never when there is room again. asyncio takes that for a
    connection that is on its way, and has then one that is none.

    Raises:
        OSError: nobody listens there.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        wait_s = SHORTEST_CONNECT_WAIT_S
        while True:
            try:
                sock.connect(str(path))
            except BlockingIOError:
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, LONGEST_CONNECT_WAIT_S)
            else:
                return EngineConnection(sock)
    except BaseException:
        sock.close()
        raise


class EngineConnection:
    """Both directions of a connected socket that does not block.

    Args:
        sock: closed by :meth:`close`.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._loop = asyncio.get_running_loop()
        self._pieces: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._is_reading = False
        self._has_ended = False  # nothing more comes
        self._failure: OSError | None = None  # why
        self._unsent = bytearray()
        self._takes_more = True
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None

    async def read(self) -> bytes:
        """What has come since; empty at the end.

        Raises:
            OSError: the connection broke off.
        """
        while not self._pieces:
            if self._failure is not None:
                raise self._failure
            if self._has_ended:
                return b""
            if not self._is_reading:
                self._is_reading = True
                self._loop.add_reader(self.sock, self._readable)
            self._reader = self._loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self._waiting_bytes = 0
        return data

    def put(self, data: bytes) -> None:
        """Send, however long it takes; that the other side takes no more is the reader's news."""
        if not self._takes_more or not data:
            return
        sent = 0
        if not self._unsent:
            sent = self._send(data)
            if sent == len(data) or not self._takes_more:
                return
            self._loop.add_writer(self.sock, self._writable)
        self._unsent += memoryview(data)[sent:]

    async def write(self, data: bytes) -> bool:
        """Send, and wait while much is unsent; False when the other side takes no more."""
        self.put(data)
        while len(self._unsent) > MOST_UNSENT_BYTES:
            self._writer = self._loop.create_future()
            try:
                await self._writer
            finally:
                self._writer = None
        return self._takes_more

    def close(self) -> None:
        """End it, whatever was still to come or to be sent; what has come can be read."""
        self._stop_reading()
        self._stop_writing()
        self._has_ended = True
        _wake(self._reader)
        self.sock.close()

    def _readable(self) -> None:
        try:
            data = self.sock.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._failure, data = error, b""
        if data:
            self._pieces.append(data)
            self._waiting_bytes += len(data)
        else:
            self._has_ended = True
        if not data or self._waiting_bytes > MOST_WAITING_BYTES:
            self._stop_reading()
        _wake(self._reader)

    def _writable(self) -> None:
        del self._unsent[: self._send(self._unsent)]
        if not self._unsent:
            self._loop.remove_writer(self.sock)
        if len(self._unsent) <= MOST_UNSENT_BYTES:
            _wake(self._writer)

    def _send(self, data: bytes | bytearray) -> int:
        try:
            return self.sock.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            self._stop_writing()
            return 0

    def _stop_reading(self) -> None:
        if self._is_reading:
            self._is_reading = False
            self._loop.remove_reader(self.sock)

    def _stop_writing(self) -> None:
        self._takes_more = False
        if self._unsent:
            self._unsent.clear()
            self._loop.remove_writer(self.sock)
        _wake(self._writer)


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
