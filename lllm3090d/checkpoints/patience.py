"""Work that reads a disk, done on a thread of its own and waited for as long as it gets on.

A network mount whose server has gone answers no question about a file, for minutes or for ever, and nothing can take
the question back. So one thread asks it, and everybody else is told that it does not answer: those who wait, and at
once those who come while it is still being asked. A slow disk that gets on is waited for.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

T = TypeVar("T")

# Without any progress. One directory is listed, or a few headers are read, in milliseconds on a disk, and in some
# seconds by one that first has to wake up.
LIMIT_S = 10.0
POLL_S = 0.5


class HangsError(TimeoutError):
    """The disk has not answered; an OSError as any other failure of one."""


class Patience(Generic[T]):
    """One thing at a time.

    Args:
        limit_s: how long to wait without progress.
    """

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self._limit_s = limit_s
        self._turn = threading.Lock()
        self._open: Future[T] | None = None
        self._got_on_s = 0.0

    def do(
        self, work: Callable[[Callable[[], None]], T], on_late: Callable[[T], None] = lambda _: None
    ) -> T:
        """Do it and wait for it.

        Args:
            work: is handed what it calls whenever it has got on.
            on_late: takes what comes after nobody waits any more.

        Raises:
            HangsError: it does not get on, or an earlier one does not.
            Exception: whatever the work raises.
        """
        began_s = time.monotonic()
        while not self._turn.acquire(timeout=POLL_S):  # somebody else's goes on
            if time.monotonic() - max(began_s, self._got_on_s) > self._limit_s:
                raise self._hangs()
        try:
            if self._open is not None and not self._open.done():
                raise self._hangs()
            return self._wait(self._begin(work), on_late)
        finally:
            self._turn.release()

    def _begin(self, work: Callable[[Callable[[], None]], T]) -> Future[T]:
        answer: Future[T] = Future()
        self._open = answer
        self._got_on_s = time.monotonic()

        def get_on() -> None:
            self._got_on_s = time.monotonic()

        def run() -> None:
            try:
                answer.set_result(work(get_on))
            except BaseException as error:  # noqa: BLE001 - handed to whoever waits
                answer.set_exception(error)

        # Not of a pool: its threads are waited for when the program ends, and this one may never come back.
        threading.Thread(target=run, name="disk", daemon=True).start()
        return answer

    def _wait(self, answer: Future[T], on_late: Callable[[T], None]) -> T:
        while True:
            left_s = self._got_on_s + self._limit_s - time.monotonic()
            try:
                return answer.result(max(0.0, left_s))
            except TimeoutError:
                if answer.done():
                    raise  # its own, of the file system
                if time.monotonic() - self._got_on_s >= self._limit_s:
                    answer.add_done_callback(lambda late: _pass_on(late, on_late))
                    raise self._hangs() from None

    def _hangs(self) -> HangsError:
        waited_s = time.monotonic() - self._got_on_s
        return HangsError(errno.ETIMEDOUT, f"it has not answered for {waited_s:.0f} s")


def _pass_on(late: Future[T], on_late: Callable[[T], None]) -> None:
    if late.exception() is None:
        on_late(late.result())
