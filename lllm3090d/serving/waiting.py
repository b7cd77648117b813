"""Loads that wait for room, first come, first served. Plain data, changed by the scheduler alone."""

from __future__ import annotations

from dataclasses import dataclass, field

from lllm3090d.serving.events import LoadRequested
from lllm3090d.serving.running import Evicted


@dataclass(slots=True)
class Waiting:
    """A load that waits.

    Attributes:
        event: the load.
        since_s, deadline_s: on the scheduler's clock.
        why: what it waits for, for a person.
        asked: runs that are asked whether they are idle still, before they are stopped for it.
        evicting: runs that are being unloaded for it.
        evicted: what was unloaded for it so far.
        victims: their runs; memory of theirs that comes back late is waited for.
    """

    event: LoadRequested
    since_s: float
    deadline_s: float
    why: str
    asked: tuple[str, ...] = ()
    evicting: set[str] = field(default_factory=set)
    evicted: list[Evicted] = field(default_factory=list)
    victims: set[str] = field(default_factory=set)

    @property
    def token(self) -> str:
        """Of its request."""
        return self.event.token

    @property
    def name(self) -> str:
        """Of its model."""
        return self.event.checkpoint.name
