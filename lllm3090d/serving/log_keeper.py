"""Where engines write their logs: in the journal if this user can read it again, else in bounded files."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

from lllm3090d.errors import LlmError
from lllm3090d.serving import log_files
from lllm3090d.serving.journal_access import JournalAccess, probe_journal

log = logging.getLogger(__name__)

# An engine that says all it can writes about 1 MB/s, so the bound is overrun by its own size at most.
TEND_S = 10.0


class LogKeeper:
    """Probes the journal once, and bounds the files where there are any.

    Args:
        directory: of the files, as the settings are now.
        running: identifiers of the runs that have not ended.
        probe: finds out whether the journal can be read.
    """

    def __init__(
        self,
        directory: Callable[[], Path],
        running: Callable[[], frozenset[str]],
        probe: Callable[[], Awaitable[JournalAccess]] = probe_journal,
    ) -> None:
        self._directory = directory
        self._running = running
        self._probe = probe
        self._access: JournalAccess | None = None
        self._probed = asyncio.Event()

    def start(
        self, spawn: Callable[[Coroutine[Any, Any, None]], object], on_probed: Callable[[], None]
    ) -> None:
        """Begin; on_probed is called once it is known where logs go."""
        spawn(self._keep(on_probed))

    async def probed(self) -> None:
        """Return once it is known where logs go."""
        await self._probed.wait()

    @property
    def problem(self) -> LlmError | None:
        """Why the journal cannot be read; None where it can, or nobody knows yet."""
        return self._access.problem if self._access is not None else None

    @property
    def files_dir(self) -> Path | None:
        """Where the next engines write their logs; None for the journal."""
        return self._directory() if self.problem is not None else None

    async def _keep(self, on_probed: Callable[[], None]) -> None:
        try:
            self._access = await self._probe()
            if self._access.problem is not None:
                log.warning(
                    "engines write their logs to files", extra={"reason": self._access.problem.message}
                )
            on_probed()
        finally:
            self._probed.set()  # also when cancelled: nobody waits for ever
        # Without the journal the next launch makes a file; with it only runs of an earlier time have one.
        while await asyncio.to_thread(self._tend) or self.problem is not None:  # noqa: ASYNC110 - files tell nobody
            await asyncio.sleep(TEND_S)

    def _tend(self) -> bool:
        """Bound the files; whether one may still grow."""
        return log_files.tend(self._directory(), self._running())
