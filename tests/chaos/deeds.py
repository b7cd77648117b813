"""What the driver does on purpose, with times: the log of a run, and the excuse of every end that is seen."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

# What is done to a daemon that has not said READY, or to none.
STARTING = "starting"


@dataclass(slots=True)
class Deed:
    """Something that was done.

    Attributes:
        kind: what.
        at_s: CLOCK_MONOTONIC at its beginning.
        wall_s: the same by the wall clock.
        model: whom it is about, "" for all or none.
        pid: whom it is about.
        until_s: its end; None while it lasts.
        detail: for a person.
    """

    kind: str
    at_s: float
    wall_s: float
    model: str = ""
    pid: int = 0
    until_s: float | None = None
    detail: str = ""

    def touches(self, begin_s: float, end_s: float) -> bool:
        """It was going on at some moment between these."""
        return self.at_s <= end_s and (self.until_s is None or self.until_s >= begin_s)


@dataclass(frozen=True, slots=True)
class Death:
    """An engine that was seen no more.

    Attributes:
        model: what it served or loaded.
        pid: the process.
        run: its launch, as the daemon told it last; "" where it never did.
        served: it was seen to answer.
        born_s: when it was seen first, CLOCK_MONOTONIC.
        after_s: when it was seen last.
        before_s: when it was missing.
        watched: a daemon that had said READY could see it.
    """

    model: str
    pid: int
    run: str
    served: bool
    born_s: float
    after_s: float
    before_s: float
    watched: bool = True


@dataclass(slots=True)
class Violation:
    """Something that must never be."""

    kind: str
    text: str
    at_s: float


@dataclass
class Deeds:
    """Everything that was done, and the log; many threads write."""

    began_s: float = field(default_factory=time.monotonic)
    lines: list[str] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    _all: list[Deed] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    quiet: bool = False

    def log(self, text: str) -> None:
        """A line with the time since the beginning."""
        line = f"{time.monotonic() - self.began_s:8.3f}  {text}"
        with self._lock:
            self.lines.append(line)
            if not self.quiet:
                print(line, flush=True)  # noqa: T201  # the log of the run

    def did(
        self, kind: str, model: str = "", pid: int = 0, detail: str = "", *, lasts: bool = False
    ) -> Deed:
        """Write down what is about to be done; with ``lasts`` it goes on until :meth:`over`."""
        now = time.monotonic()
        deed = Deed(kind, now, time.time(), model, pid, None if lasts else now, detail)
        with self._lock:
            self._all.append(deed)
        return deed

    @staticmethod
    def over(deed: Deed) -> None:
        """It has ended."""
        deed.until_s = time.monotonic()

    def of(self, *kinds: str) -> Iterator[Deed]:
        """Deeds of these kinds, in the order of their beginning."""
        with self._lock:
            found = [deed for deed in self._all if deed.kind in kinds]
        return iter(found)

    def going_on(self, kind: str) -> bool:
        """One of this kind lasts still."""
        return any(deed.until_s is None for deed in self.of(kind))

    def violated(self, kind: str, text: str) -> None:
        """A fault of the product, or of this test."""
        now = time.monotonic()
        with self._lock:
            self.violations.append(Violation(kind, text, now - self.began_s))
        self.log(f"VIOLATION  {kind}: {text}")
