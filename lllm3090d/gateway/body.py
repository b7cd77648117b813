"""The body of a request: read as far as it takes to know its model, then passed on piece by piece.

What was read on the way is kept, in memory up to a bound and beyond that in a file without a name, and is the first of
what is passed on. The rest stays with the client until the engine takes it.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import AsyncIterator, Mapping
from typing import Protocol

from aiohttp import hdrs, web

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gateway.members import MemberScan, NotAnObjectError, Scalar, members_of
from lllm3090d.planning.units import MIB

KEPT_IN_MEMORY_BYTES = MIB
READ_BYTES = 1 << 16
WANTED = ("model", "stream", "keep_alive")
FORM = "multipart/form-data"
# Of a form: headers of a part, the value of one that is a name, and both.
LONGEST_PART_HEAD_BYTES, LONGEST_FIELD_BYTES = 4096, 1024
LONGEST_PART_BYTES = LONGEST_PART_HEAD_BYTES + LONGEST_FIELD_BYTES + 8
_FIELD = re.compile(rb'(?i:^content-disposition):.*[; ]name=(?:"(model|stream)"|(model|stream)(?=[ ;]|$))')


class Scan(Protocol):
    """What looks for members while a body comes in."""

    @property
    def found(self) -> Mapping[str, Scalar]:
        """Members seen so far."""
        ...

    def feed(self, piece: bytes) -> None:
        """Look at the next piece."""
        ...


class Body:
    """The body of one request.

    Args:
        request: whose body it is.
        largest_bytes: beyond which it is refused.
    """

    def __init__(self, request: web.BaseRequest, largest_bytes: int) -> None:
        self._content = request.content
        self._largest_bytes = largest_bytes
        self._scan = _scan(request)
        self._known: Mapping[str, Scalar] | None = None  # of a document that came in one piece
        self._read_bytes = 0
        self.was_sent = request.can_read_body  # even where it is empty
        self._ended = not self.was_sent
        self.length_bytes = request.content_length
        # What was wrong with it, once it is being passed on.
        self.problem: LlmError | None = None
        if (self.length_bytes or 0) > largest_bytes:
            raise self._too_large()
        encoding = request.headers.get(hdrs.CONTENT_ENCODING, "identity").strip().lower()
        if not self._ended and encoding not in {"identity", ""}:
            raise LlmError(
                ErrorCode.UNSUPPORTED_MEDIA,
                f"The body is encoded as {encoding[:40]}, which engines do not read.",
                hint="Send it without Content-Encoding.",
            )
        self._kept = tempfile.SpooledTemporaryFile(max_size=KEPT_IN_MEMORY_BYTES)  # noqa: SIM115  # see close()

    async def member(self, name: str) -> Scalar:
        """A member of the document, or a field of the form, read as far as it takes; None where it has none.

        Raises:
            LlmError: NOT_JSON for something else, BODY_TOO_LARGE.
            OSError: the client has left.
        """
        while name not in self.seen and not self._ended:
            await self._more()
        return self.seen.get(name)

    @property
    def seen(self) -> Mapping[str, Scalar]:
        """Members that were met on the way."""
        return self._scan.found if self._known is None else self._known

    async def whole(self) -> bytes:
        """All of it; for those that are changed on the way. Raises as :meth:`member`."""
        while not self._ended:
            await self._more()
        self._kept.seek(0)
        return self._kept.read()

    async def within(self, most_bytes: int) -> bytes | None:
        """All of it where it is no larger; else None, and it is passed on in pieces. Raises as :meth:`member`."""
        if (self.length_bytes or 0) > most_bytes:
            return None
        while not self._ended and self._read_bytes <= most_bytes:
            await self._more()
        return await self.whole() if self._read_bytes <= most_bytes else None

    async def small(self) -> bytes | None:
        """All of it where it has come already or comes in one piece more, so that it goes out in one; else None."""
        to_come = 0 if self._ended else self.length_bytes
        if to_come is None or to_come > READ_BYTES or self._read_bytes > KEPT_IN_MEMORY_BYTES:
            return None
        return await self.whole()

    async def pieces(self) -> AsyncIterator[bytes]:
        """All of it, piece by piece. Raises as :meth:`member`, which :attr:`problem` then tells too."""
        self._kept.seek(0)
        while kept := self._kept.read(READ_BYTES):
            yield kept
        while not self._ended:
            try:
                piece = await self._next()
            except LlmError as error:
                self.problem = error
                raise
            if piece:
                self._scan.feed(piece)  # what else there is to know, such as keep_alive
                yield piece

    def close(self) -> None:
        """Give back what was kept."""
        self._kept.close()

    async def _more(self) -> None:
        piece = await self._next()
        if (
            len(piece) == self.length_bytes
            and len(piece) <= READ_BYTES
            and isinstance(self._scan, MemberScan)
        ):
            self._known = members_of(piece, WANTED)
        if self._known is not None:
            self._ended = True
        else:
            try:
                self._scan.feed(piece)
            except NotAnObjectError as error:
                raise _no_object() from error
        self._kept.write(piece)

    async def _next(self) -> bytes:
        try:
            piece = await self._content.readany()
        except (web.RequestPayloadError, web.PayloadAccessError) as error:
            raise ConnectionResetError("the body broke off") from error
        self._read_bytes += len(piece)
        if self._read_bytes > self._largest_bytes:
            raise self._too_large()
        if not piece and self._content.at_eof():
            self._ended = True
        return piece

    def _too_large(self) -> LlmError:
        return LlmError(
            ErrorCode.BODY_TOO_LARGE,
            f"The body is larger than {self._largest_bytes // MIB} MiB.",
            hint="Send less, or raise gateway_body_mib.",
            limit_bytes=self._largest_bytes,
        )


class FormScan:
    """Finds the values of the fields ``model`` and ``stream`` of a form; files are passed over.

    Every byte is looked at a bounded number of times, whatever a client sends: all other requests wait meanwhile.

    Args:
        boundary: of the form's parts.
    """

    def __init__(self, boundary: bytes) -> None:
        # A file may hold anything, but never the boundary.
        self._begin = b"--" + boundary + b"\r\n"
        self._tail = b""
        self.found: dict[str, Scalar] = {}

    def feed(self, piece: bytes) -> None:
        """Look at the next piece."""
        text = self._tail + piece
        start = text.find(self._begin)
        while start >= 0:
            head = start + len(self._begin)
            following = text.find(self._begin, head)
            self._part(text, head, len(text) if following < 0 else following + 2)
            start = following
        self._tail = text[-LONGEST_PART_BYTES - len(self._begin) :]

    def _part(self, text: bytes, head: int, end: int) -> None:
        """A part whose head begins here; nothing where it is too long, or not complete yet."""
        head_end = text.find(b"\r\n\r\n", head - 2, min(end, head + LONGEST_PART_HEAD_BYTES))
        if head_end < 0:
            return
        name = next(filter(None, map(_FIELD.search, text[head:head_end].split(b"\r\n"))), None)
        value = head_end + 4
        value_end = text.find(b"\r\n", value, min(end, value + LONGEST_FIELD_BYTES) + 2)
        if name is not None and value_end >= 0 and text[value_end + 2 : value_end + 4] == b"--":
            self.found[(name[1] or name[2]).decode()] = text[value:value_end].decode("utf-8", "replace")


def _scan(request: web.BaseRequest) -> Scan:
    if request.content_type == FORM:
        boundary = re.search(r'boundary="?([^";,\s]{1,200})', request.headers.get(hdrs.CONTENT_TYPE, ""))
        if boundary is None:
            raise LlmError(
                ErrorCode.UNSUPPORTED_MEDIA,
                "The form does not tell its boundary.",
                hint="Have your client's library write the Content-Type.",
            )
        return FormScan(boundary[1].encode())
    return MemberScan(WANTED)


def _no_object() -> LlmError:
    return LlmError(
        ErrorCode.NOT_JSON,
        "The body is no JSON object.",
        hint='Send one, such as {"model": "qwen-27b", "messages": [...]}.',
    )
