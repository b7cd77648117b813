"""Who causes what happens: the client of a request, systemd, an engine, other programs, or the daemon itself."""

from __future__ import annotations

from collections import OrderedDict
from contextvars import ContextVar
from pathlib import Path

from lllm3090d.errors import ErrorCode
from lllm3090d.serving.events import (
    Announce,
    EngineReady,
    Event,
    LoadRequested,
    PostMortemRead,
    StartFinished,
    StopFinished,
    TakesMore,
    TierChecked,
    UnitSeen,
    UnitVanished,
    Verified,
    YieldWanted,
)
from lllm3090d.serving.idle import CAUSE as IDLE
from lllm3090d.serving.instance import SERVING, InstanceState
from lllm3090d.wire import Actor, ActorKind

S = InstanceState
DAEMON = Actor(kind=ActorKind.DAEMON)
ENGINE = Actor(kind=ActorKind.ENGINE)
SYSTEMD = Actor(kind=ActorKind.SYSTEMD)
PRESSURE = Actor(kind=ActorKind.PRESSURE)
REMEMBERED = 1000  # requests and runs
_ASKED_FOR = frozenset({S.QUEUED, S.RESERVED, S.STARTING})
_BY_SYSTEMD = (UnitVanished, StartFinished, StopFinished)
_BY_ENGINE = (EngineReady, TierChecked, Verified, TakesMore, PostMortemRead)

# The client whose request is being handled; None in everything that the daemon does by itself.
CALLER: ContextVar[Actor | None] = ContextVar("caller", default=None)


def client(uid: int, pid: int) -> Actor:
    """A client by the credentials of its connection (SO_PEERCRED)."""
    try:
        program = Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:  # it has left, or is in another namespace
        program = ""
    # A connection that was handed on has the process that opened it; pid 0 lies outside our namespace.
    return Actor(kind=ActorKind.CLIENT, uid=uid, pid=pid or None, program=program or None)


class Actors:
    """Remembers who asked for what, to tell who causes what follows from it much later."""

    def __init__(self) -> None:
        self._by_token: OrderedDict[str, Actor] = OrderedDict()
        self._by_run: OrderedDict[str, Actor] = OrderedDict()

    def asked(self, event: Event) -> None:
        """An event is handed to the writer; where a request does so, its client has asked for what follows."""
        caller, token = CALLER.get(), getattr(event, "token", None)
        if caller is None or not isinstance(token, str):
            return
        _remember(self._by_token, token, caller)
        if isinstance(event, LoadRequested):
            _remember(self._by_run, event.run, caller)

    def of_token(self, token: str) -> Actor | None:
        """Who put a request; None where it was the daemon, or is forgotten."""
        return self._by_token.get(token)

    def cause_of(self, event: Event) -> Actor:
        """Who causes what follows from an event."""
        asker = self.of_token(getattr(event, "token", ""))
        if asker is not None:
            return asker
        match event:
            case UnitSeen():
                return ENGINE if event.status.is_failed else SYSTEMD
            case YieldWanted():
                return DAEMON if event.cause == IDLE else PRESSURE
        if isinstance(event, _BY_SYSTEMD):
            return SYSTEMD
        return ENGINE if isinstance(event, _BY_ENGINE) else DAEMON

    def of_change(self, change: Announce, cause: Actor) -> Actor:
        """Who causes a change of state.

        Args:
            change: the change.
            cause: who caused the event that it follows from.
        """
        if change.state in _ASKED_FOR:
            return self._by_run.get(change.run, cause)
        if {change.previous, change.state} <= SERVING:
            return ENGINE
        if cause is ENGINE and change.previous in {S.STOPPING, S.STUCK}:
            return SYSTEMD  # it was told to, and its exit status is no matter
        if change.failure is not None and change.failure.code is ErrorCode.ENGINE_FAILED:
            return ENGINE
        return cause


def _remember(known: OrderedDict[str, Actor], key: str, actor: Actor) -> None:
    known[key] = actor
    while len(known) > REMEMBERED:
        known.popitem(last=False)
