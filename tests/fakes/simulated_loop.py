"""An event loop whose time passes only while nobody has anything to do, and then at once."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Selector(selectors.DefaultSelector):
    """Never waits: what would have been waited for has passed when it returns."""

    passed_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """What is ready now; with a timeout, the time passes."""
        ready = super().select(0)
        if not ready and timeout is None:
            raise RuntimeError("everybody waits for something that never comes")
        if not ready and timeout:
            self.passed_s += timeout
        return ready


class SimulatedLoop(asyncio.SelectorEventLoop):
    """See the module. Nothing that runs on it may use threads or wait for files."""

    def __init__(self) -> None:
        self._time = _Selector()
        super().__init__(self._time)

    def time(self) -> float:
        """Seconds since its beginning."""
        return self._time.passed_s


def simulate(scenario: Coroutine[Any, Any, T]) -> T:
    """Run a scenario to its end in simulated time."""
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(scenario)
