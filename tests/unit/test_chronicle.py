"""What is told of the writer's work: with its cause, with what belongs to the change, and nothing twice."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.serving import log_files
from lllm3090d.serving.actors import CALLER, DAEMON, ENGINE
from lllm3090d.serving.chronicle import Chronicle
from lllm3090d.serving.drains import Drain
from lllm3090d.serving.engine_logs import EngineLogs
from lllm3090d.serving.event_table import Numbers
from lllm3090d.serving.events import Announce, EngineReady, KeepPin, KeepReleased, Looked, UnloadRequested
from lllm3090d.serving.hangs import Verdict
from lllm3090d.serving.history import History
from lllm3090d.serving.instance import InstanceState
from lllm3090d.serving.observation import HOST
from lllm3090d.serving.unit_spec import identifier, unit_name
from lllm3090d.wire import Actor, ActorKind, Event, EventKind

pytestmark = pytest.mark.unit

S = InstanceState
SOMEBODY = Actor(kind=ActorKind.CLIENT, uid=1000, pid=42, program="lllm3090ctl")


class Scene:
    """A chronicle over one instance."""

    def __init__(self, directory: Any = None) -> None:
        self.now_s = 100.0
        self.history = History()
        self.held = [
            SimpleNamespace(where="GPU-1", reserved_bytes=900, measured_bytes=950),
            SimpleNamespace(where=HOST, reserved_bytes=50, measured_bytes=60),
        ]
        self.instance = SimpleNamespace(
            name="m",
            run="r",
            unit=unit_name("m", "r"),
            state=S.READY,
            failure=None,
            record=SimpleNamespace(engine_version="b1"),
            plan=SimpleNamespace(context_tokens=4096, parallel=2),
        )
        scheduler = SimpleNamespace(
            by_run=lambda run: self.instance if run == "r" else None,
            ledger=SimpleNamespace(of=lambda _: self.held),
        )
        logs = EngineLogs(lambda: directory)
        self.told = Chronicle(self.history, cast(Any, scheduler), logs, lambda: self.now_s)

    def change(
        self,
        previous: InstanceState,
        state: InstanceState,
        reason: str = "",
        failure: LlmError | None = None,
    ) -> Event:
        self.told.change(Announce("m", "r", previous, state, reason, failure))
        return self.last

    @property
    def last(self) -> Event:
        return self.history.since(0)[-1]


def test_what_belongs_to_a_change_is_told_with_it() -> None:
    scene = Scene()
    assert scene.change(S.PLANNED, S.RESERVED, "admitted").details == {
        "unit": unit_name("m", "r"),
        "engine": "b1",
        "context_tokens": 4096,
        "parallel": 2,
        "reserved_bytes": 900,
    }
    scene.now_s += 8.4
    with scene.told.caused_by(EngineReady("r", {})):
        ready = scene.change(S.LOADING, S.READY)
    assert (ready.details, ready.actor) == ({"measured_bytes": 950, "load_s": 8.4}, ENGINE)
    assert scene.change(S.READY, S.BUSY).details == {}
    assert scene.change(S.BUSY, S.READY).details == {}


def test_a_failure_is_told_whole_also_of_what_is_gone_by_then() -> None:
    scene = Scene()
    failure = LlmError(ErrorCode.ENGINE_FAILED, "x", last_lines=["a"])
    for scheduler in (scene.told._scheduler, SimpleNamespace(by_run=lambda run: None)):
        scene.told._scheduler = cast(Any, scheduler)
        failed = scene.change(S.RELEASING, S.FAILED, failure=failure)
        assert failed.details["details"]["last_lines"] == ["a"]
        assert failed.actor == ENGINE


def test_a_stall_and_a_drain_are_told_with_their_times() -> None:
    scene = Scene()
    scene.instance.stall, scene.instance.drain = Verdict(True, 130.25, 120.0, "why"), None
    scene.instance.state = S.STALLED
    stalled = scene.change(S.BUSY, S.STALLED, "why")
    assert stalled.details == {"stalled_s": 130.25, "patience_s": 120.0}
    assert stalled.actor == ENGINE
    scene.instance.state = S.STOPPING
    assert scene.change(S.STALLED, S.STOPPING).details == {}
    scene.instance.drain = Drain(10.0, 110.0)
    assert scene.change(S.READY, S.STOPPING).details == {"drain_s": 10.0}


def test_an_adopted_model_has_no_time_of_load() -> None:
    scene = Scene()
    assert scene.change(S.STARTING, S.READY, "found running").details == {"measured_bytes": 950}


def test_an_answer_is_about_its_own_request() -> None:
    """A refusal while others are served is that of the client that waited."""
    scene = Scene()
    token = CALLER.set(SOMEBODY)
    scene.told.actors.asked(UnloadRequested("mine", "m"))
    CALLER.reset(token)
    with scene.told.caused_by(Looked()):
        with scene.told.answering("mine"):
            assert scene.history.add(EventKind.REFUSED).actor == SOMEBODY
        with scene.told.answering("of nobody"):
            assert scene.history.add(EventKind.REFUSED).actor == DAEMON


def test_holds_are_told_while_there_is_something_to_hold() -> None:
    scene = Scene()
    scene.told.hold(KeepPin("r", pinned=True))
    assert (scene.last.kind, scene.last.model, scene.last.message) == (EventKind.HOLD, "m", "pinned")
    scene.told.hold(KeepPin("r", pinned=False))
    assert scene.last.message == "no longer pinned"
    scene.told.hold(KeepReleased(released=True))
    scene.told.hold(KeepReleased(released=False))
    assert [each.message for each in scene.history.since(2)] == [
        "the cards are released",
        "the cards are no longer released",
    ]
    scene.instance.state = S.GONE  # its pin ends with it
    scene.told.hold(KeepPin("r", pinned=False))
    scene.told.hold(KeepPin("of another", pinned=False))
    assert len(scene.history.since(0)) == 4


@pytest.mark.parametrize(
    ("numbers", "doubt"),
    [
        (None, True),
        (Numbers(7, ended=False, last_at=None), True),
        (Numbers(7, ended=True, last_at="2026-11-30T11:00:00.000Z"), False),
        (Numbers(1, ended=True, last_at=None), False),
        (Numbers(7, ended=False, last_at="2026-11-30T11:00:00.000Z"), True),
        (Numbers(7, ended=False, last_at="2026-11-30T11:00:00.000Z", is_behind=True), True),
    ],
)
def test_a_daemon_that_was_killed_leaves_doubt(numbers: Numbers | None, doubt: bool) -> None:
    scene = Scene()
    scene.told.started(numbers)
    assert scene.last.kind is EventKind.DAEMON
    assert ("may be missing" in scene.last.message) is doubt
    is_behind = numbers is not None and numbers.is_behind
    assert ("could not record" in scene.last.message) is is_behind
    known = {"to"} if numbers is None or numbers.last_at is None else {"from", "to"}
    assert set(scene.last.details) == (known if doubt else set())


@pytest.mark.parametrize("said", [True, False])
def test_an_engines_word_on_its_memory_is_kept_where_there_is_one(tmp_path: Any, said: bool) -> None:
    scene = Scene(tmp_path)
    path = log_files.log_file(tmp_path, identifier(unit_name("m", "r")))
    line = "llama_kv_cache:      CUDA0 KV buffer size =     2.00 MiB\n" if said else "listening\n"
    path.write_text(line)
    asyncio.run(scene.told.keep_memory("m", "r"))
    kept = [each.details for each in scene.history.since(0)]
    buffer = {"device": "CUDA0", "part": "context", "bytes": 2 << 20}
    assert kept == ([{"buffers": [buffer], "is_summary": False}] if said else [])


def test_a_log_that_cannot_be_read_is_no_failure(tmp_path: Any) -> None:
    scene = Scene(tmp_path)
    log_files.log_file(tmp_path, identifier(unit_name("m", "r"))).mkdir()
    asyncio.run(scene.told.keep_memory("m", "r"))
    assert scene.history.since(0) == ()
