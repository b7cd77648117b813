"""What a person is notified of, how often, and what of it a notification service is given."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.planning.cache import CacheType
from lllm3090d.planning.request import PlanRequest
from lllm3090d.serving.commands import Wish, asking_again, options_again
from lllm3090d.serving.instance import InstanceState
from lllm3090d.serving.plan_requests import plan_request
from lllm3090d.settings import NoticeTopic, Settings
from lllm3090d.surfaces.bodies import validated
from lllm3090d.surfaces.notice_looks import LONGEST_BODY, LONGEST_SUMMARY, looks
from lllm3090d.surfaces.notice_pace import BURST, EVERY_S, MORE_EVERY_S, MORE_KEY, QUIET_S, NoticePace
from lllm3090d.surfaces.notices import Act, Notice, Notices, Withdrawal
from lllm3090d.wire import Actor, ActorKind, Event, EventKind, LoadBody

pytestmark = pytest.mark.unit

S, T = InstanceState, NoticeTopic
CLIENT = Actor(kind=ActorKind.CLIENT, uid=1000, pid=7, program="lllm3090ctl")
APPLET = Actor(kind=ActorKind.CLIENT, uid=1000, pid=8, program="gnome-shell")
DAEMON = Actor(kind=ActorKind.DAEMON)
ALL = frozenset({"body", "body-markup", "actions", "persistence"})
SMALLER = {
    "kind": "context",
    "text": "A context of 4,096 tokens fits",
    "command": "lllm3090ctl load a --context 4096",
}
REMEDY: dict[str, Any] = {**SMALLER, "gain_bytes": 0, "verified": True, "options": {"context_tokens": 4096}}


def event(kind: EventKind, **members: Any) -> Event:
    return Event.model_validate(
        {"seq": 1, "at": "2026-11-30T12:00:00.000Z", "kind": kind, "model": "a", "run": "r1"} | members
    )


def state(new: InstanceState, **members: Any) -> Event:
    return event(EventKind.STATE, **({"state": new, "actor": DAEMON} | members))


def refused(code: ErrorCode = ErrorCode.INSUFFICIENT_VRAM, actor: Actor = DAEMON, **details: Any) -> Event:
    error = LlmError(code, "a does not fit", hint="Wait.", **details)
    return event(EventKind.REFUSED, actor=actor, message=error.message, details=error.problem())


def notice(told: Notice | Withdrawal | None) -> Notice:
    assert isinstance(told, Notice), told
    return told


# --- which, and in which words ------------------------------------------------------------------------------


@pytest.mark.parametrize("actor", [DAEMON, APPLET])
def test_a_refusal_is_told_where_nobody_reads_the_answer(actor: Actor) -> None:
    told = notice(Notices().of(refused(actor=actor, remedies=[REMEDY]), 0))
    assert (told.key, told.topic, told.summary) == ("a", T.REFUSED, "a was not loaded")
    assert told.body == "a does not fit. A context of 4,096 tokens fits."
    (button,) = told.buttons
    assert (button.act, button.command) == (Act.RETRY, "lllm3090ctl load a --context 4096")
    assert told.retry == {"context_tokens": 4096}


def test_whoever_was_shown_it_is_not_told_again() -> None:
    assert Notices().of(refused(actor=CLIENT), 0) is None
    assert Notices().of(refused(actor=CLIENT.model_copy(update={"program": "notification"})), 0) is None


@pytest.mark.parametrize(
    "code", [ErrorCode.LOAD_CANCELLED, ErrorCode.CARD_RELEASED, ErrorCode.SHUTTING_DOWN]
)
def test_what_somebody_has_wanted_is_no_news(code: ErrorCode) -> None:
    assert Notices().of(refused(code), 0) is None


@pytest.mark.parametrize(
    "remedy",
    [
        {**REMEDY, "verified": False},
        {**REMEDY, "options": None},
        {**REMEDY, "kind": "unload"},
        {**REMEDY, "kind": "of a later release"},
        {"kind": ["context"]},
        "nonsense",
        None,
    ],
)
def test_nothing_is_offered_that_is_not_proven_and_smaller(remedy: Any) -> None:
    told = notice(Notices().of(refused(remedies=[remedy]), 0))
    assert (told.buttons, told.retry) == ((), None)
    assert "does not fit" in told.body


@pytest.mark.parametrize("details", [{}, {"left_out": ["details"]}, {"code": 7}, {"details": "?"}])
def test_a_refusal_that_has_lost_its_details_is_told(details: dict[str, Any]) -> None:
    told = notice(
        Notices().of(event(EventKind.REFUSED, actor=DAEMON, message="too big", details=details), 0)
    )
    assert told.body == "Too big."


@pytest.mark.parametrize(
    ("asker", "served", "summary"),
    [
        (CLIENT, False, None),
        (CLIENT, True, "a has ended unexpectedly"),
        (DAEMON, False, "a could not be started"),
        (APPLET, True, "a has ended unexpectedly"),
        (None, False, "a has ended unexpectedly"),  # found when the daemon came
    ],
)
def test_a_failure_is_told_unless_its_load_is_watched(
    asker: Actor | None, served: bool, summary: str | None
) -> None:
    notices = Notices()
    if asker is not None:
        assert notices.of(state(S.RESERVED, actor=asker), 0) is None
    if served:
        assert notices.of(state(S.READY), 1) is None
    told = notices.of(
        state(S.FAILED, message="the engine ended", details={"detail": "the engine crashed"}), 2
    )
    if summary is None:
        assert told is None
        return
    told = notice(told)
    assert (told.summary, told.body, told.run) == (summary, "The engine crashed.", "r1")
    assert [each.act for each in told.buttons] == [Act.LOGS]


def test_ten_crashes_are_one_notice_that_counts() -> None:
    notices, told = Notices(), []
    for number in range(10):
        told.append(notice(notices.of(state(S.FAILED, run=f"r{number}", message="it ended"), number * 60.0)))
    assert {each.key for each in told} == {"a"}
    assert "ended" not in told[0].body.removeprefix("It ended.")
    assert told[-1].body == "It ended. It has ended 10 times within 30 minutes."
    # Those of long ago do not count.
    last = notice(notices.of(state(S.FAILED, run="r11", message="it ended"), 540 + 1799.0))
    assert last.body.endswith("has ended 2 times within 30 minutes.")


def test_a_latched_model_waits_for_somebody_and_its_notice_goes_when_it_serves() -> None:
    notices = Notices()
    told = notice(notices.of(state(S.LATCHED, message="a crashed too often"), 0))
    assert told.lasting and told.summary == "a stays down"
    assert [each.act for each in told.buttons] == [Act.LOGS, Act.RESET]
    assert told.buttons[1].command == "lllm3090ctl reset a"
    assert notices.of(state(S.READY, run="r2"), 1) == Withdrawal("a")
    assert notices.of(state(S.READY, run="r3"), 2) is None
    # A crash is still true when the model is back.
    notices.of(state(S.FAILED, run="r3"), 3)
    assert notices.of(state(S.READY, run="r4"), 4) is None


def test_unloaded_for_others_is_told_and_for_want_of_use_is_not() -> None:
    told = notice(
        Notices().of(event(EventKind.EVICTION, message="others need room", details={"cause": "pressure"}), 0)
    )
    assert (told.topic, told.summary, told.body) == (
        T.PRESSURE,
        "a was unloaded for other programs",
        "Others need room.",
    )
    for cause in ("idle", "load", None):
        assert Notices().of(event(EventKind.EVICTION, details={"cause": cause}), 0) is None


def test_what_is_loaded_again_after_a_sleep_is_one_notice() -> None:
    notices = Notices()
    wake = event(EventKind.RESUME, model=None, run=None, details={"models": ["a", "b", "c"]})
    assert notices.of(wake, 0) is None

    def back(name: str) -> Event:
        return event(EventKind.RESUME, model=None, run=None, details={"models": [name], "loaded": [name]})

    assert notices.of(back("a"), 1) is None
    problem = LlmError(ErrorCode.INSUFFICIENT_VRAM, "b does not fit", remedies=[REMEDY]).problem()
    lost = notice(
        notices.of(event(EventKind.RESUME, model="b", details={"models": ["b"], "problem": problem}), 2)
    )
    assert (lost.key, lost.summary, lost.topic) == ("b", "b was not loaded again", T.RESTORED)
    assert [each.act for each in lost.buttons] == [Act.RETRY]
    told = notice(notices.of(back("c"), 3))
    assert (told.summary, told.body, told.is_good) == ("Loaded again after the sleep", "a, c", True)
    # The next sleep begins anew.
    notices.of(event(EventKind.RESUME, model=None, details={"models": ["c"]}), 4)
    assert notice(notices.of(back("c"), 5)).body == "c"


def test_a_wanted_model_that_cannot_be_loaded_is_told() -> None:
    problem = LlmError(ErrorCode.UNKNOWN_MODEL, "there is no model a").problem()
    told = notice(
        Notices().of(event(EventKind.RESTORE, message="not loaded again", details={"problem": problem}), 0)
    )
    assert (told.summary, told.body) == ("a was not loaded again", "There is no model a.")
    whole = event(EventKind.RESUME, model=None, message="the card is in error", details={"problem": problem})
    assert notice(Notices().of(whole, 0)).body == "The card is in error."
    assert Notices().of(event(EventKind.RESTORE, message="loaded again (a login)"), 0) is None


# --- how often ----------------------------------------------------------------------------------------------


def test_what_was_just_said_is_not_said_again() -> None:
    pace, told = NoticePace(), notice(Notices().of(refused(), 0))
    assert pace.passes(told, 0) is told
    assert pace.passes(replace(told, body="other figures"), QUIET_S - 1) is None
    assert pace.passes(told, QUIET_S) is told
    pace.forget("b")
    assert pace.passes(told, QUIET_S + 1) is None
    pace.forget("a")
    assert pace.passes(told, QUIET_S + 2) is told


def test_a_flood_is_one_notice_and_what_waits_for_somebody_passes() -> None:
    pace = NoticePace()
    found = [pace.passes(Notice(f"m{n}", T.REFUSED, "", "", "g"), 1.0) for n in range(1000)]
    passed = [each for each in found if each is not None]
    assert [each.key for each in passed] == [*(f"m{n}" for n in range(int(BURST))), MORE_KEY]
    latched = Notice("m999", T.LATCHED, "", "", "latched", lasting=True)
    assert pace.passes(latched, 1.0) is latched
    again = pace.passes(Notice("n", T.REFUSED, "", "", "g"), 1.0 + EVERY_S)
    assert again is not None and again.key == "n"
    more = pace.passes(Notice("n2", T.REFUSED, "", "", "g"), 1.0 + MORE_EVERY_S * 0.9)
    assert more is not None  # room has come again with time


# --- how it looks -------------------------------------------------------------------------------------------


@given(
    name=st.text(max_size=300),
    body=st.text(max_size=2000),
    capabilities=st.sets(st.sampled_from(sorted(ALL))),
)
def test_no_name_is_markup_or_control(name: str, body: str, capabilities: set[str]) -> None:
    told = notice(Notices().of(event(EventKind.STATE, state=S.LATCHED, model=name, message=body), 0))
    message = looks(told, capabilities)
    for text in (message.summary, message.body):
        assert all(each.isprintable() or each == "\n" for each in text)
        text.encode()
    assert len(message.summary) <= LONGEST_SUMMARY * 2
    if "body-markup" in capabilities:
        shown = ET.fromstring(f"<b>{message.body}</b>")  # noqa: S314  # what was just made
        assert len(shown) == 0 and len(shown.text or "") <= LONGEST_BODY
    else:
        assert len(message.body) <= LONGEST_BODY
    assert bool(message.actions) is ("actions" in capabilities)
    assert message.urgency < 2


def test_without_buttons_there_are_commands_and_without_a_body_a_longer_summary() -> None:
    told = notice(Notices().of(refused(remedies=[REMEDY]), 0))
    plain = looks(told, {"body"})
    assert plain.body.endswith("\nlllm3090ctl load a --context 4096") and not plain.actions
    short = looks(told, {"actions"})
    assert short.summary.startswith("a was not loaded: a does not fit.") and not short.body
    good = replace(told, is_good=True)
    assert looks(good, ALL).is_transient and looks(good, ALL).urgency == 0
    assert not looks(good, {"body"}).is_transient and not looks(told, ALL).is_transient


# --- the smaller plan, as a request -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "changes"),
    [
        (PlanRequest(65_536, 2), {"context_tokens": 4096}),
        (PlanRequest(), {"parallel": 2, "context_tokens": 8192}),
        (
            PlanRequest(cache_type_k=CacheType.F16, cache_type_v=CacheType.F16, tiered=True),
            {"cache_type_k": CacheType.Q8_0, "cache_type_v": CacheType.Q8_0},
        ),
    ],
)
def test_a_remedy_can_be_asked_for_by_a_program(request_: PlanRequest, changes: dict[str, Any]) -> None:
    more = ("--gpu", "GPU-7", "--pin", "--no-evict", "--no-wait")
    asked = Wish("a", request_, ("--temp", "0"), more=more)
    options = options_again(asked, changes)
    body = validated(json.dumps({"model": "a", **(options or {})}), LoadBody)
    assert plan_request(body) == replace(request_, **changes)
    assert (body.arguments, body.gpu) == (("--temp", "0"), "GPU-7")
    assert (body.pin, body.evict, body.wait) == (True, False, False)


@pytest.mark.parametrize(
    "asked",
    [
        Wish(),
        Wish("a", verb="plan"),
        Wish("-a"),
        Wish("a", stated=frozenset({"parallel"})),
        Wish("a", more=("--card",)),
    ],
)
def test_what_cannot_be_asked_for_is_not_offered(asked: Wish) -> None:
    assert options_again(asked, {"parallel": 1}) is None
    if asked.verb == "load" and not asked.more:
        assert asking_again(asked, {"parallel": 1}) == ""


# --- the setting --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "topics"),
    [
        ("all", frozenset(T)),
        (" all ", frozenset(T)),
        ("none", frozenset()),
        ("latched, failed", frozenset({T.FAILED, T.LATCHED})),
    ],
)
def test_the_setting_chooses(text: str, topics: frozenset[NoticeTopic]) -> None:
    assert Settings(notifications=text).notice_topics == topics


@pytest.mark.parametrize("text", ["", " ", "failed,none", "crashed", "all,failed", ","])
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="notifications"):
        Settings(notifications=text)
