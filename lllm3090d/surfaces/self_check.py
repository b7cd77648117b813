"""Whether a server of ours answers: asked over its own socket, as a client would."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from pathlib import Path

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.watchdog import CannotAskError

REQUEST = b"GET /v1/version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
ANSWER = b"HTTP/1."
PAUSE_S = 0.05  # before another attempt where the queue of the socket is full
RENEWAL = "systemctl --user restart lllm3090d.socket"
LOOKS = 4  # within the limit, for whether there is a reason for an answer that does not come
OUT_OF_FILES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})
NO_FILES = (
    "the daemon has no file descriptor left; clients wait until others have left. See: ls /proc/{pid}/fd"
)


async def answers(address: Path | tuple[str, int], limit_s: float) -> None:
    """Return once the server at an address has answered; any answer is a sign of life.

    Args:
        address: path of a Unix socket, or numeric IP address and port, that this process listens on.
        limit_s: seconds to wait.

    Raises:
        CannotAskError: nobody listens there any more, or this process has no file descriptor left: clients cannot come
            either, and a new daemon would not change that, as the socket is systemd's and the clients return.
        LlmError: INTERNAL when there is no answer.
    """
    try:
        async with asyncio.timeout(limit_s):
            # Nothing tells that a queue has room.
            while not await _answered(address, limit_s / LOOKS):  # noqa: ASYNC110
                await asyncio.sleep(PAUSE_S)
    except TimeoutError:
        raise LlmError(
            ErrorCode.INTERNAL, f"no answer on {_text(address)} within {limit_s:g} s", address=_text(address)
        ) from None


async def _answered(address: Path | tuple[str, int], look_s: float) -> bool:
    """One attempt; False where another one may do better."""
    loop = asyncio.get_running_loop()
    try:
        with socket.socket(_family(address), socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as sock:
            if isinstance(address, Path):
                # By hand: asyncio takes a socket whose queue is full (EAGAIN) for one that is being connected.
                sock.connect(os.fspath(address))
            else:
                await loop.sock_connect(sock, address)
            await loop.sock_sendall(sock, REQUEST)
            while True:
                try:
                    async with asyncio.timeout(look_s):
                        return (await loop.sock_recv(sock, len(ANSWER))) == ANSWER
                except TimeoutError:
                    _raise_if_out_of_files()  # ours may be the last one
    except (FileNotFoundError, ConnectionRefusedError, PermissionError) as error:
        hint = f"; make it anew with: {RENEWAL}" if isinstance(address, Path) else ""
        raise CannotAskError(f"{_text(address)}: {os.strerror(error.errno or 0)}{hint}") from error
    except OSError as error:  # a full queue, a connection that was closed
        if error.errno in OUT_OF_FILES:
            raise CannotAskError(NO_FILES.format(pid=os.getpid())) from error
        return False


def _family(address: Path | tuple[str, int]) -> socket.AddressFamily:
    if isinstance(address, Path):
        return socket.AF_UNIX
    return socket.AF_INET6 if ":" in address[0] else socket.AF_INET


def _text(address: Path | tuple[str, int]) -> str:
    return str(address) if isinstance(address, Path) else f"{address[0]} port {address[1]}"


def _raise_if_out_of_files() -> None:
    """Without a descriptor nobody is let in, though everything lives. Raises CannotAskError."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        if error.errno in OUT_OF_FILES:
            raise CannotAskError(NO_FILES.format(pid=os.getpid())) from error
        raise
