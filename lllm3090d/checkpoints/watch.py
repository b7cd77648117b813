"""Watching the models directory by inotify, so that a survey is kept for as long as nothing changes.

inotify tells of changes in directories, not below them, so each directory is watched, those that links lead to as
well; and the directories above, which tell that the models directory appears, goes or is replaced. While something
changes all the time, as during a download, events are looked at a few times a second only.

Where a limit of the kernel forbids to watch, that is said, and tried again when somebody asks for the models, at
growing intervals.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from inotify_simple import INotify, flags

from lllm3090d.checkpoints.cursor import printable
from lllm3090d.checkpoints.patience import Patience
from lllm3090d.checkpoints.walk import walk
from lllm3090d.errors import ErrorCode, LlmError

log = logging.getLogger(__name__)

QUIET_S = 0.5  # without a change, after which what changed is reported
PATIENCE_S = 5.0  # after which it is reported although it still changes
RETRY_S = 2.0  # after a failure, at the earliest; doubled with each
RETRY_MOST_S = 300.0
CLOSE_S = 2.0
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


class _Limit(NamedTuple):
    """A limit of the kernel, and the command that raises it."""

    name: str
    remedy: str


_LIMITS = {
    errno.ENOSPC: _Limit(
        "fs.inotify.max_user_watches", "Raise it: sudo sysctl fs.inotify.max_user_watches=524288."
    ),
    # Both end in the same error.
    errno.EMFILE: _Limit(
        "fs.inotify.max_user_instances, or that of open files,",
        "Raise it: sudo sysctl fs.inotify.max_user_instances=1024.",
    ),
    errno.ENFILE: _Limit("fs.file-max", "End programs that hold many files open."),
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


def _take_down(setting_up: asyncio.Task[_Watching]) -> None:
    """Of a watch that nobody wants any more, as soon as it is there."""
    if not setting_up.cancelled() and setting_up.exception() is None:
        setting_up.result().inotify.close()


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
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wanted = asyncio.Event()
        self._problem: LlmError | None = None
        self._patience: Patience[_Watching] = Patience()

    def generation(self) -> int | None:
        """Another number after each change; None while changes go on or nobody can watch. From any thread."""
        if self._settled:
            return self._generation
        self._try_again()
        return None

    def problem(self) -> LlmError | None:
        """Why the directory could not be watched when that was last tried; None where it is. From any thread."""
        self._try_again()
        return self._problem

    async def settled(self) -> int:
        """Wait until there is a generation; returns it."""
        while (generation := self.generation()) is None:
            self._vouches.clear()
            await self._vouches.wait()
        return generation

    def start(self) -> None:
        """Begin to watch; returns at once."""
        self._loop = asyncio.get_running_loop()
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

    def _try_again(self) -> None:
        """Somebody needs what nobody watches: try as soon as the last failure is long enough ago."""
        if self._problem is not None and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and the watch with it
                self._loop.call_soon_threadsafe(self._wanted.set)

    async def _run(self) -> None:
        retry_s = RETRY_S
        try:
            while True:
                self._wanted.clear()
                try:
                    watching = await self._set_up()
                except OSError as error:
                    self._fails(error)
                    await asyncio.sleep(retry_s)
                    await self._wanted.wait()
                    retry_s = min(2 * retry_s, RETRY_MOST_S)
                    continue
                retry_s = RETRY_S
                await self._until_changed(watching)
        finally:
            self._tear_down()

    async def _until_changed(self, watching: _Watching) -> None:
        """Vouch for what is there until something of it has changed and is quiet again."""
        self._watching = watching
        self._works()
        again = self._generation > 0
        self._generation += 1
        self._settled = True
        self._changed.clear()
        asyncio.get_running_loop().add_reader(watching.inotify.fileno(), self._readable, watching)
        self._vouches.set()
        if again:
            self._on_change()
        await self._changed.wait()
        await self._quiet(watching)
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

    async def _set_up(self) -> _Watching:
        """Watch, off the loop; what a cancelled call still sets up is taken down. Raises OSError."""
        setting_up = asyncio.create_task(
            asyncio.to_thread(self._patience.do, self._watch_all, lambda late: late.inotify.close())
        )
        try:
            return await asyncio.shield(setting_up)
        except asyncio.CancelledError:
            # Not waited for long: a disk that hangs must not keep the daemon from ending.
            await asyncio.wait({setting_up}, timeout=CLOSE_S)
            setting_up.add_done_callback(_take_down)
            raise

    def _watch_all(self, get_on: Callable[[], None]) -> _Watching:
        """Watch every directory. Raises OSError where that is not possible."""
        watching = _Watching()

        def enter(path: Path) -> None:
            get_on()
            watching.watch_below(path)

        try:
            self._watch_above(watching)
            try:
                walk(self.models_dir, enter)
            except LlmError as error:
                log.debug("nothing to watch yet", extra={"reason": error.message})
            if watching.failure is not None:
                raise watching.failure
        except OSError:
            watching.inotify.close()
            raise
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

    def _fails(self, error: OSError) -> None:
        """Remember why, and log it unless it is what was logged before."""
        limit = _LIMITS.get(error.errno or 0)
        reason = f"the limit {limit.name} is reached" if limit else str(error.strerror)
        again = "It is tried again when the models are asked for."
        problem = LlmError(
            ErrorCode.LIBRARY_UNWATCHED,
            f"{printable(self.models_dir)} is not watched: {reason}; it is searched at each request instead.",
            hint=f"{limit.remedy} {again}" if limit else again,
            path=printable(self.models_dir),
        )
        if self._problem is None or self._problem.message != problem.message:
            log.warning(problem.message, extra={"hint": problem.hint})
        self._problem = problem

    def _works(self) -> None:
        if self._problem is not None:
            log.info("%s is watched again", printable(self.models_dir))
        self._problem = None
