"""The gateway's TCP port: systemd's socket where it holds one, else one of our own."""

from __future__ import annotations

import ipaddress
import logging
import socket
from dataclasses import dataclass
from typing import Protocol

from aiohttp import web

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gateway.connections import Clients, Patience, most_connections, refusal

log = logging.getLogger(__name__)

BACKLOG = 1024
SHUTDOWN_TIMEOUT_S = 2.0


class Answers(Protocol):
    """What answers requests."""

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one."""
        ...


@dataclass(frozen=True, slots=True)
class Address:
    """Where to listen."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """Only programs of this machine reach it."""
        return ipaddress.ip_address(self.host).is_loopback

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def check_open(address: Address, *, has_keys: bool) -> None:
    """Let nobody listen for others without a key. Raises LlmError GATEWAY_UNAVAILABLE."""
    if not address.is_loopback and not has_keys:
        raise LlmError(
            ErrorCode.GATEWAY_UNAVAILABLE,
            f"{address} can be reached by other machines, and no key is asked for.",
            hint="Make one: lllm3090ctl key add NAME. Or set gateway_address to 127.0.0.1.",
            address=str(address),
        )


def bind(address: Address, *, has_keys: bool) -> socket.socket:
    """A socket that listens there.

    Raises:
        LlmError: GATEWAY_UNAVAILABLE where it is taken, is no address of this machine, or is open to others without
            a key.
    """
    check_open(address, has_keys=has_keys)
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address.host, address.port))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise LlmError(
            ErrorCode.GATEWAY_UNAVAILABLE,
            f"{address} cannot be listened on: {error.strerror or error}",
            hint=f"See who does: ss -ltnp 'sport = :{address.port}'. If it is systemd (lllm3090-gateway.socket), start"
            " the daemon with: systemctl --user start lllm3090d. Else set another gateway_port.",
            address=str(address),
        ) from error
    return sock


class Shut:
    """Answers that there is no gateway, on a socket that systemd holds: else clients would wait for ever.

    Args:
        error: why there is none.
    """

    def __init__(self, error: LlmError) -> None:
        self._error = error

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Say so."""
        return refusal(request, self._error, self._error.kind.http_status)


class Port:
    """Serves the gateway on a socket.

    Args:
        answers: whoever answers.
        sock: that listens; closed by :meth:`close`.
        patience: how long clients may take.
        most: connections at a time; None for as many as there are files for.
    """

    def __init__(
        self,
        answers: Answers,
        sock: socket.socket,
        patience: Patience = Patience(),  # noqa: B008  # frozen
        most: int | None = None,
    ) -> None:
        self._answers = answers
        self._sock = sock
        self._patience = patience
        self._most = most
        self._runner: web.ServerRunner | None = None

    @property
    def address(self) -> Address:
        """Where it listens."""
        return address_of(self._sock)

    async def start(self) -> None:
        """Begin to answer."""
        most = most_connections() if self._most is None else self._most
        server = Clients(self._answers.handle, self._patience, most)
        self._runner = web.ServerRunner(server, shutdown_timeout=SHUTDOWN_TIMEOUT_S)
        await self._runner.setup()
        await web.SockSite(self._runner, self._sock, backlog=BACKLOG).start()
        log.info("the gateway listens on %s", self.address)

    async def close(self) -> None:
        """End; answers that are still being sent are cut."""
        if self._runner is not None:
            await self._runner.cleanup()
        self._sock.close()


def address_of(sock: socket.socket) -> Address:
    """Where a socket listens."""
    host, port, *_ = sock.getsockname()
    return Address(host, port)
