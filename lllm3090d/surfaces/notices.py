"""What of all that happens a person is notified of, and in which words. Pure.

A notice is for what somebody would not see otherwise. Who loads a model with ``lllm3090ctl`` is told by it how that
ended, so nothing is said twice; a request to the gateway, a program on D-Bus, a login or a restart has nobody who
reads its answer. Notices of one model have one key: a later one takes the place of the one before.
"""

from __future__ import annotations

import enum
import shlex
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from lllm3090d.errors import ErrorCode
from lllm3090d.serving.commands import CTL
from lllm3090d.serving.freeings import RemedyKind
from lllm3090d.serving.instance import InstanceState
from lllm3090d.settings import NoticeTopic
from lllm3090d.wire import Actor, ActorKind, Event, EventKind

S, T = InstanceState, NoticeTopic
NOTIFICATION = "notification"  # the program of an actor who has pressed a button
# Their own output says how a load ended, or a notice does.
TOLD_ELSEWHERE = frozenset({CTL, NOTIFICATION})
# What somebody has wanted is no news.
_WANTED = frozenset({ErrorCode.LOAD_CANCELLED, ErrorCode.SHUTTING_DOWN, ErrorCode.CARD_RELEASED})
RESUME_KEY = "resume"
REMEMBERED = 500  # runs and models
ENDS_WINDOW_S = 1800.0  # in which ends of a model are counted
MOST_REMEDIES = 2  # that a notice names
_SMALLER = {
    RemedyKind.CONTEXT: "smaller context",
    RemedyKind.SLOTS: "fewer slots",
    RemedyKind.CACHE_TYPE: "smaller cache",
    RemedyKind.DRAFTING: "without drafting",
    RemedyKind.PROJECTOR: "projector in host memory",
    RemedyKind.OFFLOAD: "partly in host memory",
}
V = TypeVar("V")


class Act(enum.StrEnum):
    """What a button does."""

    LOGS = "logs"  # opens the log of the run
    RETRY = "retry"  # loads with the smaller plan
    RESET = "reset"  # starts a model again that stays down


@dataclass(frozen=True, slots=True)
class Button:
    """One of a notice.

    Attributes:
        act: what it does.
        label: what is on it.
        command: what does the same in a terminal; empty where nothing does.
    """

    act: Act
    label: str
    command: str


@dataclass(frozen=True, slots=True)
class Notice:
    """What a person is to be told.

    Attributes:
        key: a later notice of the same key takes the place of this one.
        topic: what it is about, as the setting ``notifications`` has it.
        summary, body: plain text, of any length and with anything that a name may contain.
        gist: two notices of one key and gist say the same, whatever their figures are.
        model, run: that it is about, if any.
        buttons: what can be done about it.
        retry: what stands beside ``model`` in the body of a load, for the button ``retry``.
        lasting: shown until somebody has seen it.
        is_good: nothing is wrong.
    """

    key: str
    topic: NoticeTopic
    summary: str
    body: str
    gist: str = ""
    model: str = ""
    run: str = ""
    buttons: tuple[Button, ...] = ()
    retry: Mapping[str, Any] | None = None
    lasting: bool = False
    is_good: bool = False


@dataclass(frozen=True, slots=True)
class Withdrawal:
    """A notice of this key is no longer true."""

    key: str


@dataclass(slots=True)
class _Run:
    is_shown: bool  # whoever asked for it sees how it goes
    served: bool = False


@dataclass(slots=True)
class Notices:
    """Turns events, in their order, into notices."""

    _runs: OrderedDict[str, _Run] = field(default_factory=OrderedDict)
    _ends: OrderedDict[str, deque[float]] = field(default_factory=OrderedDict)
    _told: OrderedDict[str, NoticeTopic] = field(default_factory=OrderedDict)
    _returning: set[str] = field(default_factory=set)
    _returned: list[str] = field(default_factory=list)

    def of(self, event: Event, now_s: float) -> Notice | Withdrawal | None:
        """What follows from an event; None where nobody needs to know.

        Args:
            event: the next one.
            now_s: on a monotonic clock.
        """
        match event.kind:
            case EventKind.STATE:
                made = self._of_state(event, now_s)
            case EventKind.REFUSED:
                made = _refused(event)
            case EventKind.EVICTION if event.details.get("cause") == "pressure":
                made = _unloaded(event)
            case EventKind.RESTORE if _problem(event.details) is not None:
                made = _not_restored(event)
            case EventKind.RESUME:
                made = self._of_resume(event)
            case _:
                return None
        if isinstance(made, Notice):
            _keep(self._told, made.key, made.topic)
        return made

    def _of_state(self, event: Event, now_s: float) -> Notice | Withdrawal | None:
        run, model = event.run or "", event.model or ""
        match event.state:
            case S.RESERVED:
                _keep(self._runs, run, _Run(is_told_elsewhere(event.actor)))
            case S.READY:
                if run in self._runs:
                    self._runs[run].served = True
                # What could not be loaded, or stayed down, is there now.
                if self._told.get(model) in {T.REFUSED, T.LATCHED}:
                    del self._told[model]
                    return Withdrawal(model)
            case S.FAILED:
                known = self._runs.pop(run, None)
                if known is None or known.served or not known.is_shown:
                    return self._failed(event, served=known is None or known.served, now_s=now_s)
            case S.LATCHED:
                return _latched(event)
            case S.GONE:
                self._runs.pop(run, None)
        return None

    def _failed(self, event: Event, *, served: bool, now_s: float) -> Notice:
        model = event.model or ""
        ends = self._ends.get(model, deque(maxlen=99))
        ends.append(now_s)
        while ends[0] < now_s - ENDS_WINDOW_S:
            ends.popleft()
        _keep(self._ends, model, ends)
        body = _sentence(str(event.details.get("detail") or event.message), model)
        if len(ends) > 1:
            body += f" It has ended {len(ends)} times within {round(ENDS_WINDOW_S / 60)} minutes."
        return Notice(
            key=model,
            topic=T.FAILED,
            summary=f"{model} has ended unexpectedly" if served else f"{model} could not be started",
            body=body,
            gist=event.run or "",
            model=model,
            run=event.run or "",
            buttons=(_logs(model),),
        )

    def _of_resume(self, event: Event) -> Notice | None:
        models = [str(each) for each in _items(event.details.get("models"))]
        problem = _problem(event.details)
        if problem is not None:
            self._returning.discard(event.model or "")
            return replace(_not_restored(event), topic=T.RESTORED)
        loaded = [str(each) for each in _items(event.details.get("loaded"))]
        if not loaded:
            self._returning, self._returned = set(models), []
            return None
        self._returning.difference_update(loaded)
        self._returned += loaded
        if self._returning:  # one notice when all are there
            return None
        names = ", ".join(self._returned)
        return Notice(
            key=RESUME_KEY,
            topic=T.RESTORED,
            summary="Loaded again after the sleep",
            body=names,
            gist=str(event.seq),
            is_good=True,
        )


def is_told_elsewhere(actor: Actor | None) -> bool:
    """Whoever caused it is shown what came of it."""
    return actor is not None and actor.kind is ActorKind.CLIENT and actor.program in TOLD_ELSEWHERE


def refusal(model: str, problem: Mapping[str, Any], *, summary: str = "", lead: str = "") -> Notice:
    """A load that was refused.

    Args:
        model: its name.
        problem: the problem document.
        summary: in place of the usual one.
        lead: before the document's own words.
    """
    details = problem.get("details")
    remedies = _items(details.get("remedies")) if isinstance(details, Mapping) else []
    proven = [each for each in remedies if isinstance(each, Mapping) and each.get("verified") is True]
    told = [_sentence(str(each.get("text", ""))) for each in proven[:MOST_REMEDIES]]
    if not told and problem.get("hint"):
        told = [str(problem["hint"])]
    found = next((each for each in proven if _is_smaller(each)), None)
    buttons = []
    if found is not None:
        label = f"Retry smaller ({_SMALLER[RemedyKind(found['kind'])]})"
        buttons.append(Button(Act.RETRY, label, str(found.get("command", ""))))
    text = _sentence(str(problem.get("detail") or ""), model)
    return Notice(
        key=model,
        topic=T.REFUSED,
        summary=summary or f"{model} was not loaded",
        body=" ".join(filter(None, (lead, text, *told))),
        gist=f"refused {problem.get('code')}",
        model=model,
        buttons=tuple(buttons),
        retry=dict(found["options"]) if found is not None else None,
    )


def loaded(model: str, context_tokens: int) -> Notice:
    """What somebody has asked for by a button has come true."""
    return Notice(
        key=model,
        topic=T.REFUSED,
        summary=f"{model} is loaded",
        body=f"With a context of {context_tokens:,} tokens.",
        model=model,
        is_good=True,
    )


def log_is_at(model: str, run: str, path: str) -> Notice:
    """No program here shows a file."""
    command = shlex.join([CTL, "logs", model])
    return Notice(
        key=f"logs {model}",
        topic=T.FAILED,
        summary=f"The log of {model} could not be opened",
        body=f"No program here opens it. It is in {path}, and in a terminal: {command}",
        model=model,
        run=run,
    )


def _refused(event: Event) -> Notice | None:
    code = event.details.get("code")
    if is_told_elsewhere(event.actor) or code in _WANTED:
        return None
    return refusal(event.model or "", {"detail": event.message, **event.details})


def _not_restored(event: Event) -> Notice:
    problem = _problem(event.details) or {}
    if event.model is None:  # it concerns all of them
        return Notice(
            key=RESUME_KEY,
            topic=T.REFUSED,
            summary="Models are not loaded again",
            body=_sentence(event.message),
            gist=f"again {problem.get('code')}",
        )
    made = refusal(event.model, problem, summary=f"{event.model} was not loaded again")
    return replace(made, gist=f"again {problem.get('code')}")


def _unloaded(event: Event) -> Notice:
    model = event.model or ""
    return Notice(
        key=model,
        topic=T.PRESSURE,
        summary=f"{model} was unloaded for other programs",
        body=_sentence(event.message, model),
        gist=f"unloaded {event.run}",
        model=model,
        run=event.run or "",
    )


def _latched(event: Event) -> Notice:
    model = event.model or ""
    reset = Button(Act.RESET, "Start again", shlex.join([CTL, "reset", model]))
    return Notice(
        key=model,
        topic=T.LATCHED,
        summary=f"{model} stays down",
        body=f"{_sentence(event.message, model)} It is not started again by itself.",
        gist=f"latched {event.run}",
        model=model,
        run=event.run or "",
        buttons=(_logs(model), reset),
        lasting=True,
    )


def _logs(model: str) -> Button:
    return Button(Act.LOGS, "Open log", shlex.join([CTL, "logs", model]))


def _is_smaller(remedy: Mapping[str, Any]) -> bool:
    kind = remedy.get("kind")
    return isinstance(remedy.get("options"), Mapping) and kind in {str(each) for each in _SMALLER}


def _problem(details: Mapping[str, Any]) -> Mapping[str, Any] | None:
    found = details.get("problem")
    return found if isinstance(found, Mapping) else None


def _items(value: object) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()


def _sentence(text: str, model: str = "") -> str:
    """With a capital, unless it begins with the model's name, and a full stop."""
    text = text.strip()
    if not text:
        return ""
    first = text[0] if model and text.startswith(model) else text[0].upper()
    return first + text[1:] + ("" if text[-1] in ".!?" else ".")


def _keep(table: OrderedDict[str, V], key: str, value: V) -> None:
    table[key] = value
    table.move_to_end(key)
    while len(table) > REMEMBERED:
        table.popitem(last=False)
