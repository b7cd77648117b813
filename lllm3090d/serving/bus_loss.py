"""While the user's systemd cannot be reached: what is said of that, and the end of the daemon where it lasts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.serving.history import History
from lllm3090d.serving.moments import now_text
from lllm3090d.wire import EventKind

log = logging.getLogger(__name__)

# A bus that is restarted is back within a second. Without one nothing can be started, stopped or known of its end.
LIMIT_S = 60.0
HINT = "See: systemctl --user status dbus.socket dbus.service"


class BusLoss:
    """Tells of the loss and of the return, and calls ``fail`` where that takes too long.

    Args:
        history: of what happened.
        fail: ends the daemon. Models go on.
        limit_s: how long to wait for the return.
    """

    def __init__(self, history: History, fail: Callable[[LlmError], None], limit_s: float = LIMIT_S) -> None:
        self._history = history
        self._fail = fail
        self._limit_s = limit_s
        self._since: str | None = None
        self._since_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def problem(self) -> LlmError | None:
        """That states may be old; None where they are not."""
        if self._since is None:
            return None
        return LlmError(
            ErrorCode.BUS_UNAVAILABLE,
            f"There has been no answer over D-Bus since {self._since}: states of models are those of then, loads and"
            " unloads wait. Models go on; it is tried again until systemd is back.",
            hint=HINT,
        )

    def lost(self) -> None:
        """Neither signals nor answers come any more."""
        if self._since is not None:
            return
        loop = asyncio.get_running_loop()
        self._since, self._since_s = now_text(), loop.time()
        self._timer = loop.call_later(self._limit_s, self._stays_lost)
        log.error("the user's systemd cannot be reached over D-Bus; models go on")
        self._history.add(
            EventKind.BUS, message="the user's systemd cannot be reached over D-Bus; models go on"
        )

    def back(self) -> None:
        """It answers again; whoever calls this reads all states anew."""
        if self._timer is not None:
            self._timer.cancel()
        if self._since is None:
            return
        away_s = asyncio.get_running_loop().time() - self._since_s
        self._since = None
        text = f"the user's systemd is reached again, after {away_s:.1f} s"
        log.info("%s", text)
        self._history.add(EventKind.BUS, message=text, details={"away_s": round(away_s, 3)})

    def _stays_lost(self) -> None:
        self._fail(
            LlmError(
                ErrorCode.BUS_UNAVAILABLE,
                f"the user's systemd could not be reached over D-Bus for {self._limit_s:g} s",
                hint=HINT,
            )
        )
