"""Notifications of the desktop: follows what happens, shows what a person should know, and does what buttons say.

There is no logic of loads here: a button asks for what a client of the control API would ask for.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from lllm3090d.bus.notifications import NotificationService
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.serving.actors import CALLER
from lllm3090d.serving.history import Since
from lllm3090d.serving.moments import realtime_us
from lllm3090d.surfaces.bodies import validated
from lllm3090d.surfaces.control import ControlApi
from lllm3090d.surfaces.notice_logs import open_log
from lllm3090d.surfaces.notice_looks import looks
from lllm3090d.surfaces.notice_pace import NoticePace
from lllm3090d.surfaces.notices import (
    NOTIFICATION,
    Act,
    Notice,
    Notices,
    Withdrawal,
    loaded,
    log_is_at,
    refusal,
)
from lllm3090d.wire import Actor, ActorKind, Event, LoadBody, LoadLine, LoadLineKind

log = logging.getLogger(__name__)

SETTLE_S = 0.3  # for which a notice is held, since a better one of the same key often follows at once
WAIT_S = 120.0  # for which it waits for a service: at login the daemon may be up before the desktop
MOST_WAITING = 20
MOST_SHOWN = 100
LOG_COPIES = "notices"  # below runtime_dir
_NO_ROOM = frozenset({ErrorCode.INSUFFICIENT_VRAM, ErrorCode.INSUFFICIENT_MEMORY})


@dataclass(frozen=True, slots=True)
class _Waiting:
    told: Notice | Withdrawal
    since_s: float


@dataclass(frozen=True, slots=True)
class _Shown:
    number: int
    notice: Notice


class Notifications:
    """Shows notices, as far as the settings want any.

    Args:
        api: has the pieces that act.
        service: whoever shows them.
        clock: monotonic, seconds.
        settle_s: see :data:`SETTLE_S`.
    """

    def __init__(
        self,
        api: ControlApi,
        service: NotificationService,
        clock: Callable[[], float] = time.monotonic,
        settle_s: float = SETTLE_S,
    ) -> None:
        self._api = api
        self._daemon = api.daemon
        self._service = service
        self._clock = clock
        self._settle_s = settle_s
        self._notices = Notices()
        self._pace = NoticePace()
        self._waiting: OrderedDict[str, _Waiting] = OrderedDict()  # by key
        self._shown: OrderedDict[str, _Shown] = OrderedDict()  # by key
        self._is_showing = False
        self._early: list[tuple[int, str]] = []  # what was chosen before the number of the notice was known
        self._closed_early: set[int] = set()
        self._wake = asyncio.Event()
        self._acting: set[tuple[str, Act]] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Follow what happens from now on. Never raises; without a service nothing is shown."""
        self._service.on_change = self._changed
        self._service.on_action = self._chosen
        self._service.on_closed = self._closed
        self._spawn(self._follow())
        self._spawn(self._send())
        self._spawn(self._service.start())

    async def end(self) -> None:
        """Follow no more; what is shown stays, and its buttons do nothing."""
        self._service.end()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- what happens -------------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        """The events of this daemon's life."""
        async for event in self._daemon.history.follow_on(Since(from_us=realtime_us(self._daemon.started))):
            self._happened(event)

    def _happened(self, event: Event) -> None:
        now_s = self._clock()
        told = self._notices.of(event, now_s)
        if isinstance(told, Notice):
            if told.topic not in self._daemon.settings.notice_topics:
                return
            told = self._pace.passes(told, now_s)
        elif told is not None:
            self._pace.forget(told.key)
        if told is not None:
            self._tell(told)

    def _tell(self, told: Notice | Withdrawal) -> None:
        waiting = self._waiting.get(told.key)
        if isinstance(told, Withdrawal) and waiting is not None and _is_good(waiting.told):
            return  # that it is loaded was told before it was seen that it serves
        self._waiting.pop(told.key, None)
        self._waiting[told.key] = _Waiting(told, self._clock())
        while len(self._waiting) > MOST_WAITING:
            self._waiting.popitem(last=False)
        self._wake.set()

    # --- showing ------------------------------------------------------------------------------------------------------

    async def _send(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            await asyncio.sleep(self._settle_s)
            limit_s = self._clock() - WAIT_S
            for key, each in tuple(self._waiting.items()):
                if each.since_s < limit_s:
                    del self._waiting[key]
            while self._waiting and await self._service.ready():
                _, each = self._waiting.popitem(last=False)
                await self._show(each.told)

    async def _show(self, told: Notice | Withdrawal) -> None:
        before = self._shown.get(told.key)
        if isinstance(told, Withdrawal):
            if before is not None and not _is_good(before.notice):
                self._forget(told.key)
                await self._service.withdraw(before.number)
            return
        self._is_showing = True
        try:
            message = looks(told, self._service.capabilities)
            number = await self._service.show(message, before.number if before is not None else 0)
        finally:
            self._is_showing = False
        if number is not None and number not in self._closed_early:
            self._shown.pop(told.key, None)
            self._shown[told.key] = _Shown(number, told)
            while len(self._shown) > MOST_SHOWN:
                self._shown.popitem(last=False)
        early, self._early = self._early, []
        self._closed_early.clear()
        for each in early:
            self._chosen(*each)

    def _changed(self) -> None:
        """Another service does not know the numbers of the one before; or it may answer again."""
        if not self._service.has_asked:
            self._shown.clear()
        self._wake.set()

    def _forget(self, key: str) -> None:
        self._shown.pop(key, None)

    # --- what a person chooses ----------------------------------------------------------------------------------------

    def _find(self, number: int) -> _Shown | None:
        return next((each for each in self._shown.values() if each.number == number), None)

    def _closed(self, number: int) -> None:
        found = self._find(number)
        if found is not None:
            self._forget(found.notice.key)
        elif self._is_showing:
            self._closed_early.add(number)

    def _chosen(self, number: int, word: str) -> None:
        """A button was pressed; one of a notice that is not ours, or of an earlier daemon, does nothing."""
        found = self._find(number)
        if found is None:
            if self._is_showing and len(self._early) < MOST_WAITING:
                self._early.append((number, word))
            return
        notice = found.notice
        button = next((each for each in notice.buttons if each.act == word), None)
        if button is None or (notice.key, button.act) in self._acting:
            return
        self._acting.add((notice.key, button.act))
        self._spawn(self._act(notice, button.act))

    async def _act(self, notice: Notice, act: Act) -> None:
        CALLER.set(Actor(kind=ActorKind.CLIENT, uid=os.getuid(), program=NOTIFICATION))
        try:
            match act:
                case Act.LOGS:
                    await self._open_log(notice)
                case Act.RETRY:
                    await self._retry(notice)
                case Act.RESET:
                    await self._daemon.reset(notice.model)
        except LlmError as error:
            summary = {
                Act.LOGS: f"The log of {notice.model} could not be opened",
                Act.RETRY: "",
                Act.RESET: f"{notice.model} was not started again",
            }[act]
            # What fitted then may not fit now.
            lead = "What fits has changed meanwhile." if act is Act.RETRY and error.code in _NO_ROOM else ""
            self._tell(refusal(notice.model, error.problem(), summary=summary, lead=lead))
        finally:
            self._acting.discard((notice.key, act))

    async def _retry(self, notice: Notice) -> None:
        body = validated(json.dumps({**(notice.retry or {}), "model": notice.model}), LoadBody)
        async with contextlib.aclosing(await self._api.loading(body)) as lines:
            last: LoadLine | None = None
            async for line in lines:
                last = line
        if last is not None and last.kind is LoadLineKind.READY:
            tokens = last.instance.context_tokens if last.instance is not None else 0
            self._tell(loaded(notice.model, tokens))
        elif last is not None and last.problem is not None:
            self._tell(refusal(notice.model, last.problem))

    async def _open_log(self, notice: Notice) -> None:
        directory = self._daemon.settings.runtime_dir / LOG_COPIES
        try:
            path, is_open = await open_log(self._daemon, directory, notice.model, notice.run)
        except OSError as error:
            raise LlmError(
                ErrorCode.LOGS_UNAVAILABLE,
                f"the log cannot be copied to {directory}: {error.strerror}",
                hint=f"In a terminal: lllm3090ctl logs {notice.model}",
            ) from error
        if not is_open:
            self._tell(log_is_at(notice.model, notice.run, str(path)))

    # --- tasks --------------------------------------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work, name="notifications")
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a task of the notifications ended unexpectedly", exc_info=error)


def _is_good(told: Notice | Withdrawal) -> bool:
    """It tells what has come true, which a later success does not make untrue."""
    return isinstance(told, Notice) and told.is_good
