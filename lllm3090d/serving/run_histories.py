"""The runs of a model, put together from its events. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from lllm3090d.serving.instance import ENDED, InstanceState
from lllm3090d.serving.moments import seconds_between
from lllm3090d.wire import Actor, EngineMemory, Event, EventKind, RunView

S = InstanceState
LOST = "Its end was not seen: it ended while no daemon ran, or the record has a gap."
# What says why a run ends, where it was told to: later steps only say that it does.
_TOLD_TO = frozenset({S.STOPPING})


@dataclass(slots=True)
class _Run:
    run: str
    state: InstanceState
    asked_by: Actor | None = None
    requested_at: str | None = None
    ready_at: str | None = None
    load_s: float | None = None
    ended_at: str | None = None
    end: Event | None = None  # that says why it ended
    launch: dict[str, Any] = field(default_factory=dict)
    measured_bytes: int | None = None
    problem: dict[str, Any] | None = None
    memory: EngineMemory | None = None

    def take(self, event: Event) -> None:
        if event.kind is EventKind.MEMORY:
            self.memory = _memory(event.details)
        elif event.kind is EventKind.STATE and event.state is not None:
            self.state = event.state
            self._change(event, event.state)

    def _change(self, event: Event, state: InstanceState) -> None:
        if state is S.RESERVED:
            self.requested_at, self.asked_by, self.launch = event.at, event.actor, event.details
        elif state is S.READY and self.ready_at is None:
            self.ready_at = event.at
            self.load_s = _number(event.details, "load_s")
            measured = _number(event.details, "measured_bytes")
            self.measured_bytes = None if measured is None else int(measured)
        elif state in _TOLD_TO or (state is S.RELEASING and self.end is None):
            self.end = event
        elif state is S.FAILED:
            self.end, self.problem = event, event.details or None
        if state is S.RELEASING or (state in ENDED and self.ended_at is None):
            self.ended_at = event.at

    def view(self, is_live: bool) -> RunView:
        launch, problem = self.launch, self.problem
        lines = ((problem or {}).get("details") or {}).get("last_lines")
        is_lost = not is_live and self.ended_at is None
        return RunView(
            run=self.run,
            # A daemon that ended while it waited for the memory could not say the last word.
            state=S.GONE if self.state is S.RELEASING and not is_live else self.state,
            is_live=is_live,
            unit=launch.get("unit"),
            asked_by=self.asked_by,
            requested_at=self.requested_at,
            ready_at=self.ready_at,
            load_s=self.load_s,
            served_s=self._served_s(),
            ended_at=self.ended_at,
            ended_by=self.end.actor if self.end is not None else None,
            why=LOST if is_lost else self.end.message if self.end is not None else "",
            context_tokens=launch.get("context_tokens"),
            parallel=launch.get("parallel"),
            reserved_bytes=launch.get("reserved_bytes"),
            measured_bytes=self.measured_bytes,
            engine=launch.get("engine"),
            problem=problem,
            last_lines=tuple(lines) if isinstance(lines, list) else (),
            memory=self.memory,
        )

    def _served_s(self) -> float | None:
        if self.ready_at is None or self.ended_at is None:
            return None
        return max(0.0, seconds_between(self.ready_at, self.ended_at))


def run_histories(events: Iterable[Event], live: Collection[str] = ()) -> tuple[RunView, ...]:
    """The runs that the events of a model tell of, the last one first.

    Args:
        events: in order; anything may be among them.
        live: runs that the daemon has now.
    """
    runs: dict[str, _Run] = {}
    for event in events:
        if event.run is not None and event.kind in {EventKind.STATE, EventKind.MEMORY}:
            if event.run not in runs:
                runs[event.run] = _Run(event.run, event.state or S.GONE)
            runs[event.run].take(event)
    return tuple(each.view(each.run in live) for each in reversed(runs.values()))


def _memory(details: dict[str, Any]) -> EngineMemory | None:
    try:
        return EngineMemory.model_validate(details)
    except ValidationError:  # of another release
        return None


def _number(details: dict[str, Any], key: str) -> float | None:
    value = details.get(key)
    return value if isinstance(value, int | float) else None
