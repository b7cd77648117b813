"""Activity: what an engine is doing now, and how much it has ever done, by its own word.

An engine answers between two batches, so one that is deep in a long prompt does not answer in time: that is busy.
``/metrics`` tells what happened between two looks as well; where a build lacks it, ``/slots`` tells of the moment. One
that is busy is asked for ``/slots`` too, for only there a prompt is seen to progress (:mod:`lllm3090d.serving.hangs`).
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from lllm3090d.serving.events import Activity
from lllm3090d.serving.hangs import EngineWork, slots_of
from lllm3090d.serving.readiness import peer_belongs_to
from lllm3090d.serving.running import Instance

ACTIVITY_TIMEOUT_S = 0.5
MOST_AT_ONCE = 16
MOST_REMEMBERED = 1024
LARGEST_ANSWER_BYTES = 1 << 20
OK = 200
NOT_OFFERED = frozenset({404, 501})  # unknown to the build, or switched off
UNKNOWN = Activity(None, None)
NO_ANSWER = Activity(busy=True, served_tokens=None, work=EngineWork())

PREFIX = "llamacpp:"
COUNTERS = ("prompt_tokens_total", "prompt_tokens_cached_total", "tokens_predicted_total")
IN_FLIGHT = ("requests_processing", "requests_deferred")
# Averages since anybody asked last: not 0 where anything was computed since.
SINCE_LAST = ("prompt_tokens_seconds", "predicted_tokens_seconds")
# What was computed and generated since the start of the engine, and the seconds that it took.
PROMPTS = ("prompt_tokens_total", "prompt_seconds_total")
ANSWERS = ("tokens_predicted_total", "tokens_predicted_seconds_total")


@dataclass(frozen=True, slots=True)
class EngineSocket:
    """Where an engine is asked.

    Attributes:
        run: identity of the launch.
        path: its socket.
        control_group: of its unit; whoever else listens there is not believed.
    """

    run: str
    path: Path
    control_group: str


@dataclass(frozen=True, slots=True)
class _Metrics:
    """What ``/metrics`` says."""

    busy: bool
    served_tokens: int
    computed_since: bool
    in_flight: int
    work: EngineWork | None  # with no slots until these have been asked for


@dataclass(slots=True)
class _Seen:
    """What an engine said last, and how often it had been at work although its counters showed nothing."""

    served_tokens: int
    unseen: int = 0


class ActivityWatch:
    """Asks engines, and remembers what they said: a request that came and went between two looks is noticed.

    The engine writes its counters with six digits, so beyond a million tokens a short request does not move them. Its
    averages since the last look show it all the same; then a token is counted for it here.
    """

    def __init__(self) -> None:
        self._seen: OrderedDict[str, _Seen] = OrderedDict()  # the one asked last is last

    async def of(self, instances: Iterable[Instance]) -> Mapping[str, Activity]:
        """What the engine of each instance is doing, by run; asked at once, and no longer than the usual time."""
        return await self.look(
            EngineSocket(each.run, each.record.socket, each.control_group or "") for each in instances
        )

    async def look(
        self, engines: Iterable[EngineSocket], timeout_s: float = ACTIVITY_TIMEOUT_S
    ) -> Mapping[str, Activity]:
        """What each engine is doing, by run.

        Args:
            engines: those that serve.
            timeout_s: after which one counts as busy; for all questions to it.
        """
        room = asyncio.Semaphore(MOST_AT_ONCE)

        async def one(engine: EngineSocket) -> tuple[str, Activity]:
            async with room:
                return engine.run, self._judge(engine.run, await _asked(engine, timeout_s))

        return dict(await asyncio.gather(*(one(engine) for engine in engines)))

    def _judge(self, run: str, said: _Metrics | Activity) -> Activity:
        if isinstance(said, Activity):
            return said
        seen = self._seen.pop(run, None)
        if seen is None:
            seen = _Seen(said.served_tokens)
        elif said.computed_since and said.served_tokens == seen.served_tokens:
            seen.unseen += 1
        seen.served_tokens = said.served_tokens
        self._seen[run] = seen
        if len(self._seen) > MOST_REMEMBERED:
            self._seen.popitem(last=False)
        return Activity(said.busy, said.served_tokens + seen.unseen, said.work)


async def in_flight(engine: EngineSocket, timeout_s: float = ACTIVITY_TIMEOUT_S) -> int | None:
    """How many requests an engine has, waiting ones included; None where it does not tell in time."""
    said = await _asked(engine, timeout_s)
    if isinstance(said, _Metrics):
        return said.in_flight
    if said.busy is False:
        return 0
    return None if said.work is None else said.work.in_flight


async def _asked(engine: EngineSocket, timeout_s: float) -> _Metrics | Activity:
    metrics = None
    try:
        async with asyncio.timeout(timeout_s):
            status, body = await _get(engine, "/metrics")
            if status == OK:
                metrics = _metrics(body)
                return UNKNOWN if metrics is None else await _with_slots(engine, metrics)
            if status in NOT_OFFERED:
                status, body = await _get(engine, "/slots")
                if status == OK:
                    return _slots(body) or UNKNOWN
    except (OSError, EOFError, TimeoutError):
        return metrics or NO_ANSWER
    except _StrangerError:
        return UNKNOWN
    except ValueError:  # it says something, but not in HTTP
        return UNKNOWN
    # It is loading, or overwhelmed.
    return UNKNOWN if status in NOT_OFFERED else NO_ANSWER


async def _with_slots(engine: EngineSocket, metrics: _Metrics) -> _Metrics:
    """With what its slots say, where it is busy; raises as :func:`_get`."""
    if metrics.work is None:
        return metrics
    if not metrics.busy:
        return replace(metrics, work=replace(metrics.work, slots=()))
    status, body = await _get(engine, "/slots")
    slots = slots_of(body) if status == OK else None
    # It has answered: without slots there is nothing to judge it by.
    return replace(metrics, work=None if slots is None else replace(metrics.work, slots=slots))


class _StrangerError(Exception):
    """Somebody else listens on the engine's socket."""


async def _get(engine: EngineSocket, target: str) -> tuple[int, bytes]:
    """Status and body of one request.

    Raises:
        OSError: nobody listens, or the connection broke.
        EOFError: the answer broke off.
        ValueError: the answer is no HTTP, or too large.
        _StrangerError: the listener is no process of the unit.
    """
    reader, writer = await asyncio.open_unix_connection(engine.path, limit=LARGEST_ANSWER_BYTES)
    try:
        if not peer_belongs_to(writer, engine.control_group):
            raise _StrangerError
        writer.write(f"GET {target} HTTP/1.1\r\nHost: engine\r\nConnection: close\r\n\r\n".encode())
        await writer.drain()
        head = await reader.readuntil(b"\r\n\r\n")
        status_line, *lines = head.decode("latin-1").split("\r\n")
        version, status, *_ = status_line.split()
        if not version.startswith("HTTP/"):
            raise ValueError(f"no HTTP: {version}")
        fields = {
            name.strip().lower(): value.strip() for name, _, value in (x.partition(":") for x in lines)
        }
        size = int(fields.get("content-length", "-1"))
        if size > LARGEST_ANSWER_BYTES or "transfer-encoding" in fields:
            raise ValueError("an answer that no engine gives")
        body = await (reader.readexactly(size) if size >= 0 else reader.read(LARGEST_ANSWER_BYTES))
        return int(status), body
    except asyncio.LimitOverrunError as error:
        raise ValueError("the head of the answer does not end") from error
    finally:
        writer.close()


def _metrics(body: bytes) -> _Metrics | None:
    """The text of ``/metrics``, in the exposition format of Prometheus; None where what counts is not there."""
    values: dict[str, float] = {}
    for line in body.decode("utf-8", "replace").splitlines():
        name, _, text = line.partition(" ")
        if not name.startswith(PREFIX):
            continue  # a comment, or what somebody added
        try:
            value = float(text)
        except ValueError:
            return None
        if not 0 <= value < math.inf:
            return None
        values[name.removeprefix(PREFIX)] = value
    if IN_FLIGHT[0] not in values:
        return None
    in_flight = int(sum(values.get(name, 0) for name in IN_FLIGHT))
    generated_per_s = _rate(values, ANSWERS) or values.get(SINCE_LAST[1])
    return _Metrics(
        busy=in_flight > 0,
        served_tokens=int(sum(values.get(name, 0) for name in COUNTERS)),
        computed_since=any(values.get(name, 0) > 0 for name in SINCE_LAST),
        in_flight=in_flight,
        work=EngineWork(
            waiting=int(values.get(IN_FLIGHT[1], 0)),
            in_flight=in_flight,
            prompt_tokens_per_s=_rate(values, PROMPTS) or values.get(SINCE_LAST[0]) or None,
            token_s=1 / generated_per_s if generated_per_s else None,
        ),
    )


def _rate(values: Mapping[str, float], total: tuple[str, str]) -> float | None:
    """Tokens a second since the start; None where the build does not tell, or nothing was done yet."""
    tokens, seconds = (values.get(name, 0.0) for name in total)
    return tokens / seconds if tokens > 0 and seconds > 0 else None


def _slots(body: bytes) -> Activity | None:
    """The document of ``/slots``; None where it is none."""
    try:
        slots = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(slots, list) or not slots:
        return None
    states = [slot.get("is_processing") if isinstance(slot, dict) else None for slot in slots]
    if not all(isinstance(state, bool) for state in states):
        return None
    busy = states.count(True)
    looks = slots_of(body)
    return Activity(busy > 0, None, None if looks is None else EngineWork(looks, 0, busy))
