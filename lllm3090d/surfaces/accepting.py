"""What the event loop reports of clients that it cannot take for want of files.

asyncio itself stops listening for a second then and tries again, so nothing spins; but it reports every client that
waits, each second, with a traceback. One line for a while is enough.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)

SAY_EVERY_S = 60.0
# What asyncio takes for a passing shortage when it accepts.
SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
TEXT = "no client can be taken until others have left: {reason}; models go on"


class Accepting:
    """Handles what the loop reports; to be set with ``loop.set_exception_handler``.

    Args:
        tell: told once for each shortage, with the text for a person.
        clock: monotonic, seconds.
    """

    def __init__(self, tell: Callable[[str], None], clock: Callable[[], float]) -> None:
        self._tell = tell
        self._clock = clock
        self._said_s: float | None = None

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Say a shortage once for a while, and leave everything else to asyncio."""
        error = context.get("exception")
        if "socket" not in context or not isinstance(error, OSError) or error.errno not in SHORTAGES:
            loop.default_exception_handler(context)
            return
        now, before = self._clock(), self._said_s
        self._said_s = now  # a shortage lasts for as long as it is reported
        if before is None or now - before > SAY_EVERY_S:
            text = TEXT.format(reason=error.strerror)
            log.error("%s", text, extra={"hint": "Raise LimitNOFILE of lllm3090d.service."})
            self._tell(text)
