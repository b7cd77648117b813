"""A chat completion as a stream: over the gateway, or over the engine's own socket where there is no gateway."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import NamedTuple

from lllm3090ctl.client import CONNECTION_LOST, UnixConnection
from lllm3090ctl.documents import Document, excerpt, parse
from lllm3090ctl.exits import ExitStatus
from lllm3090ctl.failures import Failure, bad_answer, own_failure
from lllm3090ctl.reach import Gateway, failed, refused

TARGET = "/v1/chat/completions"
LARGEST_EVENT_BYTES = 8 << 20
CONNECT_TIMEOUT_S = 30.0
DONE = b"[DONE]"
ANSWER_BROKE_OFF = "answer_broke_off"  # code of a failure


class Figures(NamedTuple):
    """What an answer told of itself at its end; None for what it did not."""

    prompt_tokens: int | None = None
    generated_tokens: int | None = None
    tokens_per_s: float | None = None

    @classmethod
    def of(cls, chunk: Document, before: Figures) -> Figures:
        """Those of a chunk, over those of an earlier one."""
        usage, timings = chunk.maybe_child("usage"), chunk.maybe_child("timings")
        found = before
        if usage is not None:
            found = found._replace(
                prompt_tokens=usage.maybe_whole("prompt_tokens"),
                generated_tokens=usage.maybe_whole("completion_tokens"),
            )
        if timings is not None and timings.has("predicted_per_second"):
            found = found._replace(tokens_per_s=timings.real("predicted_per_second"))
        return found


class Stream:
    """The chunks of one answer, each as it arrives. Iterate once, inside ``with``; leaving it stops the engine.

    Args:
        where: the gateway, or the path of an engine's socket.
        body: of the request; what makes it a stream is added.
    """

    def __init__(self, where: Gateway | str, body: Mapping[str, object]) -> None:
        self._where = where
        self._body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        self._connection: http.client.HTTPConnection
        if isinstance(where, Gateway):
            self._connection = http.client.HTTPConnection(where.host, where.port, timeout=CONNECT_TIMEOUT_S)
        else:
            self._connection = UnixConnection(where, CONNECT_TIMEOUT_S)

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()

    def __iter__(self) -> Iterator[Document]:
        """Each chunk.

        Raises:
            Failure: what the gateway or the engine reports, ``answer_broke_off``, ``bad_answer``.
        """
        try:
            response = self._asked()
            ended = False
            for data in _events(response):
                if data == DONE:
                    ended = True
                    break
                chunk = parse(data)
                error = chunk.maybe_child("error")
                if error is not None:
                    raise failed(error, http.client.INTERNAL_SERVER_ERROR)
                yield chunk
            if not ended:
                raise _broke_off("it ended too early")
        except CONNECTION_LOST as error:
            raise _broke_off(str(error) or type(error).__name__) from error
        except http.client.HTTPException as error:
            raise bad_answer(f"The answer breaks the rules of HTTP ({type(error).__name__}).") from error
        except OSError as error:
            raise _broke_off(error.strerror or str(error)) from error

    def _asked(self) -> http.client.HTTPResponse:
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        if isinstance(self._where, Gateway):
            headers["Authorization"] = f"Bearer {self._where.key}"
        self._connection.connect()
        # When an answer begins is the model's affair: it may have to wait, and to read a long prompt.
        self._connection.sock.settimeout(None)
        self._connection.request("POST", TARGET, json.dumps(self._body).encode(), headers)
        response = self._connection.getresponse()
        if response.status != http.client.OK:
            raise refused(response)
        return response


def messages(system: str | None, turns: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
    """The conversation so far, as a request has it."""
    before = [{"role": "system", "content": system}] if system else []
    return before + [{"role": role, "content": text} for role, text in turns]


def text_of(chunk: Document, member: str) -> str:
    """What a chunk adds to the answer; ``reasoning_content`` for what the model thinks."""
    choices = chunk.children("choices") if chunk.has("choices") else ()
    delta = choices[0].maybe_child("delta") if choices else None
    return (delta.maybe_text(member) if delta is not None else None) or ""


def finish_of(chunk: Document) -> str | None:
    """Why the answer ended, where this chunk is its end."""
    choices = chunk.children("choices") if chunk.has("choices") else ()
    return choices[0].maybe_text("finish_reason") if choices else None


def _events(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """The data of each server-sent event."""
    lines: list[bytes] = []
    while line := response.readline(LARGEST_EVENT_BYTES + 1):
        if len(line) > LARGEST_EVENT_BYTES:
            raise bad_answer("An event of the answer does not end.")
        text = line.rstrip(b"\r\n")
        if text.startswith(b"data:"):
            lines.append(text[5:].removeprefix(b" "))
        elif not text and lines:
            yield b"\n".join(lines)
            lines.clear()
        elif text and not text.startswith((b":", b"event:", b"id:", b"retry:")):
            raise bad_answer(f"The answer is no stream of events; it has {excerpt(text)}.")
    if lines:
        yield b"\n".join(lines)


def _broke_off(why: str) -> Failure:
    return own_failure(
        ANSWER_BROKE_OFF,
        "The answer broke off",
        f"The answer did not come to its end: {why}.",
        exit_status=ExitStatus.ENGINE,
        hint="See what runs: lllm3090ctl ps. See what happened: lllm3090ctl events -n 20",
    )
