"""Where the gateway listens, and why it does not: by settings, keys, and what systemd holds."""

from __future__ import annotations

import asyncio
import logging
import socket

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gateway.port import Address, Answers, Port, Shut, address_of, bind, check_open

log = logging.getLogger(__name__)

SOCKET_UNIT = "lllm3090-gateway.socket"


class Door:
    """Opens and shuts the port.

    Args:
        gateway: whoever answers while it is open.
        passed: socket of systemd, where it holds the port. What comes there is answered even while the door is shut.
    """

    def __init__(self, gateway: Answers, passed: socket.socket | None = None) -> None:
        self._gateway = gateway
        self._passed = passed
        self._port: Port | None = None
        self._shown: tuple[Address | None, str | None] | None = None
        self._is_open = False
        self._lock = asyncio.Lock()
        # What is wrong with it, whether or not it is open.
        self.problem: LlmError | None = None

    @property
    def address(self) -> Address | None:
        """Where the gateway answers; None while it does not."""
        return self._port.address if self._port is not None and self._is_open else None

    async def set(self, wanted: Address | None, *, has_keys: bool, unknown: LlmError | None = None) -> None:
        """Be as settings and keys have it now; nothing is cut where that is as it was.

        Args:
            wanted: where to listen; None for nowhere.
            has_keys: clients are asked for a key.
            unknown: why it is not known whether they are.
        """
        async with self._lock:
            refused = unknown or self._refusal(wanted, has_keys=has_keys)
            shown = (wanted, refused.message if refused is not None else None)
            if shown == self._shown and (self._port is not None or refused is not None or wanted is None):
                return
            await self._close()
            self._shown = shown
            self.problem = refused
            if refused is None and wanted is not None:
                await self._open(wanted, has_keys=has_keys)
            if self.problem is not None and not self._is_open:
                log.error("the gateway does not listen: %s", self.problem.message)
            if not self._is_open and self._passed is not None:
                self._port = Port(Shut(self.problem or _off()), self._passed.dup())
                await self._port.start()

    async def close(self) -> None:
        """Listen no more."""
        async with self._lock:
            await self._close()

    async def _close(self) -> None:
        port, self._port = self._port, None
        self._is_open, self._shown = False, None
        if port is not None:
            await port.close()

    def _refusal(self, wanted: Address | None, *, has_keys: bool) -> LlmError | None:
        if wanted is None:
            return None
        try:
            check_open(wanted if self._passed is None else address_of(self._passed), has_keys=has_keys)
        except LlmError as error:
            return error
        return None

    async def _open(self, wanted: Address, *, has_keys: bool) -> None:
        if self._passed is not None:
            sock, self.problem = self._passed.dup(), _elsewhere(wanted, address_of(self._passed))
        else:
            try:
                sock = bind(wanted, has_keys=has_keys)
            except LlmError as error:
                self.problem = error
                return
        self._port = Port(self._gateway, sock)
        await self._port.start()
        self._is_open = True


def _off() -> LlmError:
    return LlmError(
        ErrorCode.GATEWAY_UNAVAILABLE,
        "The gateway is switched off by the setting gateway.",
        hint=f"Switch it on, or give the port up: systemctl --user disable --now {SOCKET_UNIT}",
    )


def _elsewhere(wanted: Address, held: Address) -> LlmError | None:
    """What is to be said where systemd holds another port than the settings name; 0 is any."""
    if held == wanted or (wanted.port == 0 and held.host == wanted.host):
        return None
    return LlmError(
        ErrorCode.GATEWAY_UNAVAILABLE,
        f"The settings say {wanted}, and systemd holds {held} for the gateway, which is used.",
        hint=f"Change ListenStream= with systemctl --user edit {SOCKET_UNIT}, or give it up: systemctl --user"
        f" disable --now {SOCKET_UNIT}",
        address=str(held),
    )
