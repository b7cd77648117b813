"""The gateway as a part of the daemon: its port, its keys, its models."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Mapping

from lllm3090d.errors import LlmError
from lllm3090d.gateway.daemon_house import DaemonHouse
from lllm3090d.gateway.door import Door
from lllm3090d.gateway.figures import GatewayFigures
from lllm3090d.gateway.gateway import Gateway
from lllm3090d.gateway.guard import Rules
from lllm3090d.gateway.keys import Key, Keys
from lllm3090d.gateway.models_list import ModelsList
from lllm3090d.gateway.port import Address
from lllm3090d.gateway.record import Record
from lllm3090d.gateway.request_log import RequestLog
from lllm3090d.gateway.request_table import Ended, Kept, RequestTable, view_of
from lllm3090d.gateway.turns import Turns
from lllm3090d.serving.daemon import Daemon
from lllm3090d.serving.listings import Listings
from lllm3090d.serving.moments import now_us
from lllm3090d.settings import Settings
from lllm3090d.wire import EventKind, GatewayView

log = logging.getLogger(__name__)
access_log = logging.getLogger("lllm3090d.gateway.access")


class GatewayService:
    """Listens by the present settings. A port that cannot be had is said, and keeps nothing else from working.

    Args:
        daemon: loads the models.
        listings: the models on disk, each with what it would get.
        passed: socket of systemd, where it holds the port.
    """

    def __init__(self, daemon: Daemon, listings: Listings, passed: socket.socket | None = None) -> None:
        self._daemon = daemon
        self.keys = Keys(daemon.settings.state_dir)
        house = DaemonHouse(daemon)
        models = ModelsList(house, listings, lambda: daemon.scheduler.instances)
        self.gateway = Gateway(house, self.rules, models.answer, self._ended)
        self.requests = RequestLog(RequestTable(daemon.lookup.store, self._kept))
        self.figures = GatewayFigures()
        self._door = Door(self.gateway, passed)
        self._restart: asyncio.Task[None] | None = None
        self._rules: tuple[Settings, tuple[str, ...], bool, Rules] | None = None

    @property
    def address(self) -> Address | None:
        """Where it listens; None while it does not."""
        return self._door.address

    @property
    def problem(self) -> LlmError | None:
        """Why it does not listen, though it should, or not where it should."""
        return self._door.problem

    async def start(self) -> None:
        """Listen, as settings and keys have it; again after they have changed."""
        await asyncio.to_thread(self.keys.read)
        await self._set_door()

    async def _set_door(self) -> None:
        settings = self._daemon.settings
        wanted = Address(settings.gateway_address, settings.gateway_port) if settings.gateway else None
        await self._door.set(wanted, has_keys=bool(self.keys.digests), unknown=self.keys.problem)

    async def add_key(self, name: str) -> tuple[Key, str]:
        """Make a key, which is asked for from now on; what is kept of it, and the key. Raises as :meth:`Keys.add`."""
        made = await asyncio.to_thread(self.keys.add, name)
        self._tell_key(f"the gateway's key {name} was made")
        await self._set_door()
        return made

    async def remove_key(self, name: str) -> None:
        """Forget a key, which no request is let in with from now on. Raises as :meth:`Keys.remove`."""
        await asyncio.to_thread(self.keys.remove, name)
        self._tell_key(f"the gateway's key {name} was removed")
        await self._set_door()

    def _tell_key(self, text: str) -> None:
        log.info("%s", text)
        self._daemon.history.add(EventKind.DAEMON, message=text)

    def settings_changed(self) -> None:
        """Listen elsewhere, where the settings have it so; returns at once."""
        self._restart = asyncio.create_task(self.start())

    def view(self) -> GatewayView:
        """What ``status`` tells of it."""
        return GatewayView(
            address=f"http://{self.address}" if self.address is not None else None,
            problem=self.problem.problem() if self.problem is not None else None,
            in_flight=len(self.gateway.in_flight),
            waiting=sum(each.waiting for each in self.gateway.seating.lines().values()),
            records_problem=problem.problem() if (problem := self.requests.problem()) else None,
        )

    def figures_now(self) -> tuple[GatewayFigures, Mapping[str, Turns], int]:
        """What happened, the lines of all models, and how many requests have not ended."""
        return self.figures, self.gateway.seating.lines(), len(self.gateway.in_flight)

    async def close(self) -> None:
        """Listen no more."""
        await self._door.close()

    async def end(self) -> None:
        """Listen no more, and record what is not yet recorded."""
        await self.close()
        await self.requests.close()

    def rules(self) -> Rules:
        """Who may ask now."""
        settings, digests, address = self._daemon.settings, self.keys.digests, self._door.address
        # What has lost its last key is shut in a moment; until then nobody is let in.
        needs_key = self.keys.problem is not None or not (address is None or address.is_loopback)
        known = self._rules
        if known is None or known[0] is not settings or known[1] is not digests or known[2] is not needs_key:
            rules = _rules(settings, digests, needs_key=needs_key)
            known = self._rules = (settings, digests, needs_key, rules)
        return known[3]

    def _ended(self, record: Record) -> None:
        self.figures.ended(record)
        self.requests.take(record)
        if self._daemon.settings.gateway_access_log:
            view = view_of(Ended(now_us(), record))
            access_log.info("a request has ended", extra=view.model_dump(exclude_none=True, exclude={"at"}))

    def _kept(self) -> Kept:
        settings = self._daemon.settings
        return Kept(settings.requests_days, settings.requests_kept)


def _rules(settings: Settings, keys: tuple[str, ...], *, needs_key: bool) -> Rules:
    return Rules(
        hosts=_words(settings.gateway_hosts),
        origins=_words(settings.gateway_origins),
        key_digests=keys,
        needs_key=needs_key,
    )


def _words(text: str) -> frozenset[str]:
    return frozenset(word.strip().lower() for word in text.split(",") if word.strip())
