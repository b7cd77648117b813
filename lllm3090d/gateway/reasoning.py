"""What of the rules for reasoning the gateway applies for a launch: what its engine was not told to do itself.

The engine's own command line and environment tell, which hold for launches of any release and with any arguments of a
person; the settings may have changed since.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lllm3090d.gateway.filters import ReasoningFilter, left_to_do, rules_of
from lllm3090d.settings import Settings

log = logging.getLogger(__name__)

MOST_REMEMBERED = 256


@dataclass(frozen=True, slots=True)
class _Started:
    argv: tuple[str, ...]
    environment: Mapping[str, str]


class Reasoning:
    """Answers for each launch; what it was started with is read once.

    Args:
        proc: where the kernel tells of processes.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._started: dict[str, _Started] = {}

    def wanted(
        self, settings: Settings, name: str, run: str, main_pid: int | None
    ) -> ReasoningFilter | None:
        """What is to be changed of requests for a launch; None for nothing.

        Where nobody can tell what its engine does, nothing is changed, for it must not be done twice.

        Args:
            settings: the present ones.
            name: of the model.
            run: identity of the launch.
            main_pid: of its engine; None where nobody knows.
        """
        own = settings.gateway_reasoning.get(name)
        if own is None or main_pid is None:
            return None
        started = self._started.get(run)
        if started is None:
            try:
                started = self._read(main_pid)
            except OSError as error:
                log.warning(
                    "what an engine was started with cannot be read",
                    extra={"model": name, "reason": str(error)},
                )
                return None
            while len(self._started) >= MOST_REMEMBERED:
                del self._started[next(iter(self._started))]
            self._started[run] = started
        return left_to_do(rules_of(settings.reasoning, own), started.argv, started.environment)

    def _read(self, pid: int) -> _Started:
        argv, environment = (_words(self._proc / str(pid) / name) for name in ("cmdline", "environ"))
        if not argv:
            raise OSError("its command line is empty")
        return _Started(argv, dict(word.partition("=")[::2] for word in environment))


def _words(file: Path) -> tuple[str, ...]:
    text = file.read_bytes().decode("utf-8", "surrogateescape")
    return tuple(text.removesuffix("\0").split("\0")) if text else ()
