"""One HTTP request to an engine on its Unix socket, sent only when the listener belongs to the engine's unit."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lllm3090d.serving.readiness import peer_belongs_to

LARGEST_BODY_BYTES = 16 << 20
LARGEST_HEAD_BYTES = 64 << 10


class EngineTalkError(Exception):
    """There is no usable answer; its text says why."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Status and body of an answer."""

    status: int
    body: bytes

    def document(self) -> Any:
        """The body as JSON. Raises EngineTalkError where it is none."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise EngineTalkError(f"its answer is no JSON: {error}") from error


async def ask(path: Path, control_group: str, method: str, target: str, document: Any = None) -> Reply:
    """Ask once and read the whole answer; without a time limit, and the connection is closed when cancelled.

    Args:
        path: the engine's socket.
        control_group: ``ControlGroup`` of its unit; a listener elsewhere is asked nothing.
        method: of HTTP.
        target: path of the request.
        document: sent as JSON; None for no body.

    Raises:
        EngineTalkError: nobody listens, a stranger does, or the answer is not HTTP.
    """
    try:
        reader, writer = await asyncio.open_unix_connection(path, limit=LARGEST_HEAD_BYTES)
    except OSError as error:
        raise EngineTalkError(f"nobody answers on its socket: {error.strerror or error}") from error
    try:
        if not peer_belongs_to(writer, control_group):
            raise EngineTalkError("the process that answers on its socket is not in its unit")
        body = b"" if document is None else json.dumps(document).encode()
        head = (
            f"{method} {target} HTTP/1.1\r\nHost: engine\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        await writer.drain()
        return await _reply(reader)
    except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
        raise EngineTalkError(f"its answer cannot be read: {error}") from error
    finally:
        writer.close()


async def _reply(reader: asyncio.StreamReader) -> Reply:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    status_line, *lines = head.split("\r\n")
    version, _, rest = status_line.partition(" ")
    if not version.startswith("HTTP/1.") or not rest[:3].isdecimal():
        raise ValueError(f"it begins with {status_line[:40]!r}")
    fields = {
        name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
    }
    if fields.get("transfer-encoding", "").lower() == "chunked":
        body = await _chunks(reader)
    elif "content-length" in fields:
        body = await reader.readexactly(_bounded(int(fields["content-length"])))
    else:
        body = await _until_end(reader)
    return Reply(int(rest[:3]), body)


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    body = b""
    while True:
        size = int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16)
        if not size:
            return body
        body += await reader.readexactly(_bounded(size, len(body)))
        await reader.readexactly(2)


async def _until_end(reader: asyncio.StreamReader) -> bytes:
    body = b""
    while piece := await reader.read(LARGEST_HEAD_BYTES):
        _bounded(len(piece), len(body))
        body += piece
    return body


def _bounded(size: int, before: int = 0) -> int:
    if not 0 <= size <= LARGEST_BODY_BYTES - before:
        raise ValueError(f"a body of {before + size} bytes")
    return size
