"""Watching the models directory by inotify, so that a survey is kept for as long as nothing changes.

inotify tells of changes in directories, not below them, so each directory is watched, those that links lead to as
well; and the directories above, which tell that the models directory appears, goes or is replaced. While something
changes all the time, as during a download, events are looked at a few times a second only.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path

from inotify_simple import INotify, flags

from lllm3090d.checkpoints.cursor import printable
from lllm3090d.checkpoints.walk import walk
from lllm3090d.errors import LlmError

log = logging.getLogger(__name__)

QUIET_S = 0.5  # without a change, after which what changed is reported
PATIENCE_S = 5.0  # after which it is reported although it still changes
_BELOW = (
    flags.CREATE
    | flags.DELETE
    | flags.MOVED_FROM
    | flags.MOVED_TO
    | flags.MODIFY
    | flags.CLOSE_WRITE
    | flags.ATTRIB
    | flags.DELETE_SELF
    | flags.MOVE_SELF
    | flags.ONLYDIR
)
_ABOVE = (
    flags.CREATE
    | flags.DELETE
    | flags.MOVED_FROM
    | flags.MOVED_TO
    | flags.DELETE_SELF
    | flags.MOVE_SELF
    | flags.ONLYDIR
    | flags.MASK_ADD
)
_LIMITS = {
    errno.ENOSPC: "fs.inotify.max_user_watches",
    errno.EMFILE: "fs.inotify.max_user_instances",
    errno.ENFILE: "fs.file-max",
}


class _Watching:
    """One inotify instance with the watches of one moment."""

    def __init__(self) -> None:
        self.inotify = INotify(nonblocking=True)
        self.below: set[int] = set()
        self.above: dict[int, set[str]] = {}
        self.failure: OSError | None = None

    def watch_below(self, path: Path) -> None:
        """Watch a directory for everything; a limit is noted, for the walk goes on without."""
        if self.failure is not None:
            return
        try:
            self.below.add(self.inotify.add_watch(path, _BELOW))
        except OSError as error:
            # What cannot be watched for another reason cannot be listed either, and is found changed by its state.
            if error.errno in _LIMITS:
                self.failure = error

    def watch_above(self, path: Path, name: str) -> None:
        """Watch a directory for one entry of it; the home directory changes all the time."""
        self.above.setdefault(self.inotify.add_watch(path, _ABOVE), set()).add(name)

    def concerned(self) -> bool:
        """Take what has been reported; something of it concerns the models."""
        concerned = False
        for event in self.inotify.read(timeout=0):
            if event.mask & flags.Q_OVERFLOW or event.wd in self.below:
                concerned = True
            elif event.wd in self.above:
                itself = event.mask & (flags.DELETE_SELF | flags.MOVE_SELF | flags.IGNORED)
                concerned = concerned or bool(itself) or event.name in self.above[event.wd]
        return concerned


class LibraryWatch:
    """Watches one directory for the event loop it was started in.

    Args:
        models_dir: what is watched; it may be missing and appear later.
        on_change: called in the loop some time after something has changed.
    """

    def __init__(self, models_dir: Path, on_change: Callable[[], None] = lambda: None) -> None:
        self.models_dir = models_dir
        self._on_change = on_change
        self._watching: _Watching | None = None
        self._generation = 0
        self._settled = False
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._vouches = asyncio.Event()
        self._said: str | None = None

    def generation(self) -> int | None:
        """Another number after each change; None while changes go on or nobody can watch. From any thread."""
        return self._generation if self._settled else None

    async def settled(self) -> int:
        """Wait until there is a generation; returns it."""
        while (generation := self.generation()) is None:
            self._vouches.clear()
            await self._vouches.wait()
        return generation

    def start(self) -> None:
        """Begin to watch; returns at once."""
        self._task = asyncio.create_task(self._run(), name="library watch")

    def stop(self) -> None:
        """Stop watching soon; nothing is known any more from now on."""
        self._settled = False
        if self._task is not None:
            self._task.cancel()

    async def close(self) -> None:
        """Stop watching."""
        self.stop()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while (watching := await self._set_up()) is not None:
                self._watching = watching
                again = self._generation > 0
                self._generation += 1
                self._settled = True
                self._changed.clear()
                loop.add_reader(watching.inotify.fileno(), self._readable, watching)
                self._vouches.set()
                if again:
                    self._on_change()
                await self._changed.wait()
                await self._quiet(watching)
                self._tear_down()
        finally:
            self._tear_down()

    def _readable(self, watching: _Watching) -> None:
        """Something was reported: what is known is out of date from this moment on."""
        if watching.concerned():
            self._settled = False
            # The kernel keeps what comes until it is asked for again.
            asyncio.get_running_loop().remove_reader(watching.inotify.fileno())
            self._changed.set()

    async def _quiet(self, watching: _Watching) -> None:
        """Wait until nothing has changed for a moment, or for long enough."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + PATIENCE_S
        while loop.time() < deadline:
            await asyncio.sleep(QUIET_S)
            if not watching.concerned():
                return

    def _tear_down(self) -> None:
        self._settled = False
        if self._watching is not None:
            asyncio.get_running_loop().remove_reader(self._watching.inotify.fileno())
            self._watching.inotify.close()
            self._watching = None

    async def _set_up(self) -> _Watching | None:
        """Watch, off the loop; what a cancelled call still sets up is taken down."""
        setting_up = asyncio.create_task(asyncio.to_thread(self._watch_all))
        try:
            return await asyncio.shield(setting_up)
        except asyncio.CancelledError:
            watching = await setting_up
            if watching is not None:
                watching.inotify.close()
            raise

    def _watch_all(self) -> _Watching | None:
        """Watch every directory; None when that is not possible, which is said once."""
        watching = None
        try:
            watching = _Watching()
            self._watch_above(watching)
            try:
                walk(self.models_dir, watching.watch_below)
            except LlmError as error:
                log.debug("nothing to watch yet", extra={"reason": error.message})
            if watching.failure is not None:
                raise watching.failure
        except OSError as error:
            if watching is not None:
                watching.inotify.close()
            self._say(error)
            return None
        return watching

    def _watch_above(self, watching: _Watching) -> None:
        """Watch for the path itself, and for what it leads to where it is a link."""
        for path in dict.fromkeys((self.models_dir, Path(os.path.realpath(self.models_dir)))):
            for entry, above in zip((path, *path.parents), path.parents, strict=False):
                try:
                    watching.watch_above(above, entry.name)
                except OSError as error:
                    if error.errno in _LIMITS:
                        raise
                else:
                    break  # the nearest that exists

    def _say(self, error: OSError) -> None:
        limit = _LIMITS.get(error.errno or 0)
        reason = f"the limit {limit} is reached" if limit else str(error.strerror)
        if reason != self._said:
            self._said = reason
            log.warning(
                "%s is not watched: %s; it is searched at each request instead",
                printable(self.models_dir),
                reason,
                extra={"hint": f"Raise it: sudo sysctl {limit}=524288" if limit else "Restart the daemon."},
            )
