"""Who causes what: clients of requests and of all that follows from them, and who else there is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lllm3090d.bus.unit_status import UnitStatus
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.serving import actors as module
from lllm3090d.serving.actors import CALLER, DAEMON, ENGINE, PRESSURE, SYSTEMD, Actors, client
from lllm3090d.serving.events import (
    Announce,
    EngineReady,
    IdleChecked,
    LoadRequested,
    LoadStalled,
    Looked,
    MemoryReleased,
    StartFinished,
    StopFinished,
    UnitSeen,
    UnitVanished,
    UnloadRequested,
    YieldWanted,
)
from lllm3090d.serving.instance import InstanceState
from lllm3090d.wire import Actor, ActorKind

pytestmark = pytest.mark.unit

S = InstanceState
SOMEBODY = Actor(kind=ActorKind.CLIENT, uid=1000, pid=42, program="lllm3090ctl")
BROKEN = LlmError(ErrorCode.ENGINE_FAILED, "it broke")


@pytest.fixture
def asked_by_somebody() -> Iterator[None]:
    token = CALLER.set(SOMEBODY)
    yield
    CALLER.reset(token)


def a_load(token: str = "t", run: str = "r") -> LoadRequested:
    nothing: Any = None
    return LoadRequested(token, run, nothing, nothing, nothing, nothing, nothing)


def status(**values: Any) -> UnitStatus:
    return cast(UnitStatus, SimpleNamespace(name="u", **values))


def change(previous: InstanceState, state: InstanceState) -> Announce:
    return Announce("m", "r", previous, state, "")


def test_a_client_is_told_by_its_process() -> None:
    me = client(os.getuid(), os.getpid())
    assert (me.kind, me.uid, me.pid) == (ActorKind.CLIENT, os.getuid(), os.getpid())
    assert me.program
    gone = client(7, 1 << 30)
    assert (gone.uid, gone.pid, gone.program) == (7, 1 << 30, None)


@pytest.mark.usefixtures("asked_by_somebody")
def test_all_that_follows_from_a_request_is_its_clients_doing() -> None:
    known = Actors()
    known.asked(a_load())
    known.asked(UnloadRequested("u", "m"))
    assert known.cause_of(a_load()) == SOMEBODY
    assert known.cause_of(UnloadRequested("u", "m")) == SOMEBODY
    assert known.cause_of(IdleChecked("t", frozenset())) == SOMEBODY  # the eviction for it
    assert known.of_token("t") == SOMEBODY
    assert known.of_token("of nobody") is None
    # Admitted much later, when there was room.
    for state in (S.RESERVED, S.STARTING):
        assert known.of_change(change(S.PLANNED, state), DAEMON) == SOMEBODY


def test_what_the_daemon_asks_of_itself_is_its_own_doing() -> None:
    known = Actors()
    known.asked(a_load())
    assert known.cause_of(a_load()) == DAEMON
    assert known.of_change(change(S.PLANNED, S.RESERVED), DAEMON) == DAEMON


@pytest.mark.parametrize(
    ("event", "cause"),
    [
        (UnitSeen(status(is_failed=True)), ENGINE),
        (UnitSeen(status(is_failed=False)), SYSTEMD),
        (UnitVanished("u", None), SYSTEMD),
        (StartFinished("r", None), SYSTEMD),
        (StopFinished("r", None), SYSTEMD),
        (EngineReady("r", {}), ENGINE),
        (YieldWanted(("r",), "games"), PRESSURE),
        (YieldWanted(("r",), "not used for 60 s", "idle", 1.0), DAEMON),
        (LoadStalled("r", BROKEN), DAEMON),
        (MemoryReleased("r", {}), DAEMON),
        (Looked(), DAEMON),
    ],
)
def test_news_have_their_own_cause(event: Any, cause: Actor) -> None:
    assert Actors().cause_of(event) == cause


def test_some_changes_tell_more_than_the_news_they_follow_from() -> None:
    known = Actors()
    assert known.of_change(change(S.READY, S.BUSY), DAEMON) == ENGINE
    assert known.of_change(change(S.BUSY, S.READY), DAEMON) == ENGINE
    assert known.of_change(change(S.BUSY, S.STALLED), DAEMON) == ENGINE
    assert known.of_change(change(S.STALLED, S.STOPPING), DAEMON) == DAEMON
    # It ends with an error after SIGTERM: that is no failure of its own.
    assert known.of_change(change(S.STOPPING, S.RELEASING), ENGINE) == SYSTEMD
    assert known.of_change(change(S.READY, S.RELEASING), ENGINE) == ENGINE
    failed = change(S.RELEASING, S.FAILED)
    assert known.of_change(replace(failed, failure=BROKEN), DAEMON) == ENGINE
    slow = LlmError(ErrorCode.LOAD_TIMED_OUT, "slow")
    assert known.of_change(replace(failed, failure=slow), DAEMON) == DAEMON


@pytest.mark.usefixtures("asked_by_somebody")
def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REMEMBERED", 3)
    known = Actors()
    for n in range(10):
        known.asked(a_load(f"t{n}", f"r{n}"))
    assert [n for n in range(10) if known.of_token(f"t{n}")] == [7, 8, 9]
