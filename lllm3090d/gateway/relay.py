"""An engine's answer on its way to the client: what of its head goes on, and its body as it comes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from http import HTTPStatus

from aiohttp import HttpVersion10, hdrs, web
from multidict import CIMultiDict

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gateway.dialects import too_long
from lllm3090d.gateway.record import Record
from lllm3090d.gateway.tokens import Tail
from lllm3090d.gateway.upstream import Exchange, Head, Headers

EVENTS = "text/event-stream"
JSON = "application/json"
# About the connection, not about what is sent over it.
HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
# Ours: an engine has no key, and it is we who decide which page may read what.
OURS = frozenset(
    {
        "host",
        "authorization",
        "x-api-key",
        "expect",
        "origin",
        "cookie",
        "forwarded",
        "x-priority",
        "x-keep-alive",
    }
)
# We write the length ourselves, or none.
NOT_SENT_ON = HOP_BY_HOP | OURS | {"content-length"}
LARGEST_ERROR_BYTES = 1 << 16
TOO_LONG = "exceed_context_size_error"
# Of a text that is not computed in parts, and is longer than a micro batch; the engine (b11434) says so with a 500.
TOO_LONG_AT_ONCE = re.compile(
    r"input \((\d+) tokens\) is too large to process\. increase the physical batch size \(current batch size: (\d+)\)"
)
FAILURES_THAT_TELL = frozenset({HTTPStatus.BAD_REQUEST, HTTPStatus.INTERNAL_SERVER_ERROR})


def request_headers(headers: Iterable[tuple[bytes, bytes]], length_bytes: int | None) -> Headers:
    """What an engine is told of a request's head.

    Args:
        headers: as they came.
        length_bytes: of the body; None where it is not known before its end.
    """
    pairs = [(name.decode("latin-1").lower(), name, value) for name, value in headers]
    dropped = NOT_SENT_ON | _named_by_connection(
        value.decode("latin-1") for low, _, value in pairs if low == "connection"
    )
    kept = [
        (name.lower(), value)
        for low, name, value in pairs
        if low not in dropped and not low.startswith(("x-forwarded-", "sec-", "access-control-"))
    ]
    if length_bytes is not None:
        kept.append((b"content-length", str(length_bytes).encode()))
    return kept


def answer_headers(headers: Headers) -> CIMultiDict[str]:
    """What a client is told of the head of an engine's answer."""
    pairs = [(_text(name), _text(value)) for name, value in headers]
    dropped = HOP_BY_HOP | _named_by_connection(
        value for name, value in pairs if name.lower() == "connection"
    )
    return CIMultiDict(
        (name, value)
        for name, value in pairs
        if (low := name.lower()) not in dropped and not low.startswith("access-control-")
    )


def media_type(headers: Mapping[str, str]) -> str:
    """The type of a body without its parameters, in lower case."""
    return headers.get(hdrs.CONTENT_TYPE, "").partition(";")[0].strip().lower()


async def relay(
    request: web.BaseRequest, exchange: Exchange, head: Head, extra: Mapping[str, str], record: Record
) -> web.StreamResponse:
    """Send an engine's answer on, byte for byte.

    Args:
        request: that it answers.
        exchange: where the body comes from.
        head: of the answer.
        extra: headers of ours.
        record: told what was sent.

    Raises:
        LlmError: CONTEXT_LENGTH_EXCEEDED where the engine says so, before anything was sent; ENGINE_FAILED where its
            answer breaks off. Then the client's connection must be closed, or it takes a part for the whole.
    """
    headers = answer_headers(head.headers)
    pieces = exchange.body()
    first: list[bytes] = []
    if head.status in FAILURES_THAT_TELL and media_type(headers) == JSON:
        first = [await _beginning(pieces)]
        raise_if_too_long(first[0])
    response = web.StreamResponse(status=head.status, headers=headers)
    response.headers.update(extra)
    length = headers.get(hdrs.CONTENT_LENGTH)
    if length is None and request.version > HttpVersion10 and has_body(request.method, head.status):
        response.enable_chunked_encoding()
    record.status = head.status
    record.streamed, record.begun = media_type(headers) == EVENTS, True
    await response.prepare(request)
    with _counted(record, can_be_read=not headers.get(hdrs.CONTENT_ENCODING)) as tail:
        for piece in first:
            await _pass(response, piece, record, tail)
        async for piece in pieces:
            await _pass(response, piece, record, tail)
        await response.write_eof()
    return response


async def relay_events(
    response: web.StreamResponse, request: web.BaseRequest, exchange: Exchange, head: Head, record: Record
) -> None:
    """The same where a stream of events has begun before the engine was asked: only its body is sent.

    Raises:
        LlmError: ENGINE_FAILED with what the engine says where it does not answer with such a stream.
    """
    pieces = exchange.body()
    kind = media_type(answer_headers(head.headers))
    if head.status != HTTPStatus.OK or kind != EVENTS:
        said = await _beginning(pieces)
        raise_if_too_long(said)
        raise LlmError(
            ErrorCode.ENGINE_FAILED,
            f"The engine answered with {head.status}: {_message(said)}",
            hint="The status was sent before: the model had to be loaded first.",
            status=head.status,
        )
    with _counted(record) as tail:
        async for piece in pieces:
            await _pass(response, piece, record, tail)


@contextlib.contextmanager
def _counted(record: Record, *, can_be_read: bool = True) -> Iterator[Tail]:
    """What an answer tells of its tokens is noted, also where its client leaves with the last event."""
    tail, is_whole = Tail(), False
    try:
        yield tail
        is_whole = True
    finally:
        if can_be_read and (is_whole or tail.has_ended):
            record.prompt_tokens, record.generated_tokens = tail.tokens()
            record.generation_s = tail.generation_s()


def raise_if_too_long(body: bytes) -> None:
    """Raise CONTEXT_LENGTH_EXCEEDED where an engine says that a prompt has no room, with both numbers."""
    if found := TOO_LONG_AT_ONCE.search(_message(body)):
        raise too_long(int(found[1]), int(found[2]))
    if TOO_LONG.encode() not in body:
        return
    try:
        error = json.loads(body)["error"]
        prompt, context = error["n_prompt_tokens"], error["n_ctx"]
    except (ValueError, KeyError, TypeError):
        return
    if error.get("type") == TOO_LONG and isinstance(prompt, int) and isinstance(context, int):
        raise too_long(prompt, context)


def has_body(method: str, status: int) -> bool:
    """An answer of this status to this method has a body."""
    return method != hdrs.METH_HEAD and status >= HTTPStatus.OK and status not in {204, 304}


async def _pass(response: web.StreamResponse, piece: bytes, record: Record, tail: Tail) -> None:
    if record.first_byte_s is None:
        record.first_byte_s = asyncio.get_running_loop().time() - record.began_s
    record.sent_bytes += len(piece)
    tail.feed(piece)
    await response.write(piece)


async def _beginning(pieces: AsyncGenerator[bytes, None]) -> bytes:
    """A body as far as a failure's is long, usually the whole; what is left stays with the generator."""
    body = b""
    async for piece in pieces:
        body += piece
        if len(body) > LARGEST_ERROR_BYTES:
            break
    return body


def _message(body: bytes) -> str:
    """What an engine says of a failure."""
    try:
        document = json.loads(body)
    except ValueError:
        document = None
    error = document.get("error") if isinstance(document, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return str(message if message is not None else body.decode("utf-8", "replace"))[:1000]


def _named_by_connection(values: Iterable[str]) -> frozenset[str]:
    """Headers that a Connection header makes hop-by-hop."""
    return frozenset(name.strip().lower() for value in values for name in value.split(","))


def _text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw.decode("latin-1")
