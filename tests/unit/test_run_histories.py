"""The runs of a model from its events: complete ones, failed ones, and those that nobody saw end."""

from __future__ import annotations

from typing import Any

import pytest

from lllm3090d.engines.memory_log import EnginePart
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.serving.instance import InstanceState
from lllm3090d.serving.run_histories import LOST, run_histories
from lllm3090d.wire import Actor, ActorKind, Event, EventKind, RunView

pytestmark = pytest.mark.unit

S = InstanceState
CLIENT = Actor(kind=ActorKind.CLIENT, uid=1000, pid=42, program="lllm3090ctl")
ENGINE = Actor(kind=ActorKind.ENGINE)
SYSTEMD = Actor(kind=ActorKind.SYSTEMD)
LAUNCH = {
    "unit": "lllm3090-m-r.service",
    "engine": "b1",
    "context_tokens": 4096,
    "parallel": 2,
    "reserved_bytes": 900,
}
FAILURE = LlmError(ErrorCode.ENGINE_FAILED, "it broke", last_lines=["one", "two"]).problem()


class Tape:
    """Events, a second apart."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def add(self, kind: EventKind = EventKind.STATE, **values: Any) -> Tape:
        seq = len(self.events) + 1
        values.setdefault("run", "r")
        event = Event(seq=seq, at=f"2026-11-30T11:00:{seq:02}.000Z", kind=kind, model="m", **values)
        self.events.append(event)
        return self

    def state(self, state: InstanceState, message: str = "", actor: Actor = ENGINE, **values: Any) -> Tape:
        return self.add(state=state, message=message, actor=actor, **values)

    def launch(self, run: str = "r") -> Tape:
        self.state(S.RESERVED, "admitted", CLIENT, details=LAUNCH, run=run)
        self.state(S.STARTING, run=run).state(S.LOADING, run=run)
        return self.state(S.READY, details={"load_s": 8.4, "measured_bytes": 950}, run=run)

    def only(self, *live: str) -> RunView:
        (view,) = run_histories(self.events, live)
        return view


def test_a_run_from_its_load_to_its_unload() -> None:
    tape = Tape().launch().state(S.BUSY).state(S.READY)
    live = tape.only("r")
    assert (live.is_live, live.state, live.why, live.ended_at, live.served_s) == (
        True,
        S.READY,
        "",
        None,
        None,
    )
    tape.state(S.STOPPING, "unloaded", CLIENT).state(S.RELEASING, "unit ended", SYSTEMD).state(
        S.GONE, "nothing"
    )
    view = tape.only()
    assert view == RunView(
        run="r",
        state=S.GONE,
        is_live=False,
        unit="lllm3090-m-r.service",
        asked_by=CLIENT,
        requested_at="2026-11-30T11:00:01.000Z",
        ready_at="2026-11-30T11:00:04.000Z",
        load_s=8.4,
        served_s=4.0,
        ended_at="2026-11-30T11:00:08.000Z",
        ended_by=CLIENT,
        why="unloaded",
        context_tokens=4096,
        parallel=2,
        reserved_bytes=900,
        measured_bytes=950,
        engine="b1",
    )


def test_a_crash_has_its_reason_and_the_last_lines() -> None:
    tape = Tape().launch().state(S.RELEASING, "unit ended").state(S.FAILED, "it broke", details=FAILURE)
    view = tape.only()
    assert (view.state, view.why, view.ended_by) == (S.FAILED, "it broke", ENGINE)
    assert view.problem == FAILURE
    assert view.last_lines == ("one", "two")


def test_what_the_engine_said_of_its_memory_goes_with_its_run() -> None:
    buffers = [{"device": "CUDA0", "part": "model", "bytes": 7}]
    tape = Tape().launch("a").launch("b")
    tape.add(EventKind.MEMORY, run="a", details={"buffers": buffers, "is_summary": False})
    tape.add(EventKind.MEMORY, run="b", details={"of": "another release"})
    second, first = run_histories(tape.events)
    assert second.memory is None
    assert first.memory is not None
    assert [(each.device, each.part, each.bytes) for each in first.memory.buffers] == [
        ("CUDA0", EnginePart.MODEL, 7)
    ]


def test_the_last_run_comes_first_and_others_are_no_matter() -> None:
    tape = Tape().launch("a").launch("b").add(EventKind.REFUSED, run=None).add(EventKind.DEVIATION, run="c")
    assert [view.run for view in run_histories(tape.events)] == ["b", "a"]
    assert run_histories([]) == ()


def test_an_end_that_nobody_saw_is_told_as_that() -> None:
    view = Tape().launch().only()
    assert (view.is_live, view.state, view.why, view.ended_at) == (False, S.READY, LOST, None)


def test_an_end_whose_memory_nobody_saw_come_back_is_over_all_the_same() -> None:
    """The daemon that waited for it was ended, and the next one finds nothing of the run."""
    tape = Tape().launch().state(S.STOPPING, "makes room for b", CLIENT).state(S.RELEASING, "unit ended")
    assert tape.only("r").state is S.RELEASING
    view = tape.only()
    assert (view.state, view.why, view.ended_at) == (S.GONE, "makes room for b", "2026-11-30T11:00:06.000Z")


def test_a_run_that_was_adopted_keeps_its_beginning() -> None:
    tape = Tape().launch().state(S.READY, "found running", previous=S.STARTING)
    view = tape.only("r")
    assert (view.ready_at, view.load_s) == ("2026-11-30T11:00:04.000Z", 8.4)


def test_the_beginning_may_be_forgotten() -> None:
    view = Tape().state(S.STOPPING, "unloaded", CLIENT).state(S.RELEASING).state(S.GONE).only()
    assert (view.requested_at, view.served_s, view.why, view.unit) == (None, None, "unloaded", None)


def test_a_load_that_never_came_up_has_not_served() -> None:
    tape = (
        Tape().state(S.RESERVED, "admitted", CLIENT, details=LAUNCH).state(S.FAILED, "no", details=FAILURE)
    )
    view = tape.only()
    assert (view.ready_at, view.load_s, view.served_s) == (None, None, None)
    assert view.ended_at == "2026-11-30T11:00:02.000Z"


def test_a_clock_that_was_set_back_gives_no_negative_time() -> None:
    tape = Tape().launch()
    early = tape.events[0].model_copy(
        update={"seq": 9, "at": "2026-11-30T10:00:00.000Z", "state": S.RELEASING, "details": {}}
    )
    tape.events.append(early)
    assert tape.only().served_s == 0.0
