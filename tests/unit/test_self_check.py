"""The daemon asks itself over its own socket: what counts as an answer, and what as nobody's fault."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.surfaces import self_check
from lllm3090d.surfaces.self_check import answers
from lllm3090d.watchdog import CannotAskError

pytestmark = pytest.mark.unit

LONG_S, SHORT_S = 10.0, 0.1


@contextmanager
def listening(directory: Path, backlog: int = 8) -> Iterator[tuple[Path, socket.socket]]:
    """A socket that nobody accepts from."""
    path = directory / "control.sock"
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))
        sock.listen(backlog)
        yield path, sock


@contextmanager
def no_files_left() -> Iterator[None]:
    """As many files are open as may be."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_any_answer_is_a_sign_of_life_and_none_is_not(tmp_path: Path) -> None:
    requests: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append(await reader.readuntil(b"\r\n\r\n"))
        if len(requests) > 1:  # the first is hung up on
            writer.write(b"HTTP/1.1 503 Service Unavailable\r\n\r\n")
        writer.close()

    async def scenario() -> None:
        path = tmp_path / "control.sock"
        async with await asyncio.start_unix_server(answer, path):
            await answers(path, LONG_S)

    asyncio.run(scenario())
    assert requests == [self_check.REQUEST] * 2


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_port_is_asked_as_well(host: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 401 Unauthorized\r\n\r\n")
        writer.close()

    async def scenario() -> None:
        server = await asyncio.start_server(answer, host, 0)
        port = int(server.sockets[0].getsockname()[1])
        async with server:
            await answers((host, port), LONG_S)
        with pytest.raises(CannotAskError, match=f"{host} port {port}: Connection refused"):
            await answers((host, port), LONG_S)

    asyncio.run(scenario())


def test_a_socket_that_nobody_accepts_from_is_stuck(tmp_path: Path) -> None:
    with listening(tmp_path) as (path, _), pytest.raises(LlmError) as caught:
        asyncio.run(answers(path, SHORT_S))
    assert caught.value.code is ErrorCode.INTERNAL
    assert caught.value.message == f"no answer on {path} within 0.1 s"


def test_a_full_queue_is_stuck_and_does_not_block_the_loop(tmp_path: Path) -> None:
    async def scenario(path: Path) -> int:
        turns = 0
        asking = asyncio.create_task(answers(path, 10 * SHORT_S))
        while not asking.done():
            turns += 1
            await asyncio.sleep(0.001)
        with pytest.raises(LlmError, match="no answer"):
            await asking
        return turns

    with listening(tmp_path, backlog=0) as (path, _), socket.socket(socket.AF_UNIX) as first:
        first.connect(str(path))
        with socket.socket(socket.AF_UNIX) as second:
            second.setblocking(False)
            with pytest.raises(BlockingIOError):
                second.connect(str(path))
        assert asyncio.run(scenario(path)) > 10


@pytest.mark.parametrize("lies_there", [False, True])
def test_a_socket_whose_file_is_gone_cannot_be_asked(tmp_path: Path, lies_there: bool) -> None:
    with listening(tmp_path) as (path, _):
        if not lies_there:
            path.unlink()
    with pytest.raises(CannotAskError, match=r"control\.sock: .*; make it anew with: systemctl"):
        asyncio.run(answers(path, LONG_S))


def test_without_a_file_descriptor_nobody_can_ask(tmp_path: Path) -> None:
    async def scenario(path: Path) -> None:
        with no_files_left(), pytest.raises(CannotAskError, match="no file descriptor left"):
            await answers(path, LONG_S)

    with listening(tmp_path) as (path, _):
        asyncio.run(scenario(path))


def test_the_last_file_descriptor_is_no_sign_of_a_stuck_server(tmp_path: Path) -> None:
    """We take it to ask, so that the server cannot let us in."""

    async def scenario(path: Path) -> None:
        spare = os.open(os.devnull, os.O_RDONLY)
        with no_files_left():
            os.close(spare)
            with pytest.raises(CannotAskError, match="no file descriptor left"):
                await answers(path, SHORT_S)

    with listening(tmp_path) as (path, _):
        asyncio.run(scenario(path))
