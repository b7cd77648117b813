"""Whether what ended had a reason that is the driver's, and whether each fault can be found in the history. Pure."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from tests.chaos.deeds import STARTING, Death, Deed, Deeds, Violation

# After the daemon has answered, or died, an engine that was told to end may take so long: to its SIGKILL.
ENDING_S = 4.0
# Where the daemon ended before it could answer, the next one goes on: it lets requests end first.
CUT_OFF_ENDING_S = 25.0
# A request that comes between the last look at an engine and its end is nobody's fault: it came past the daemon.
FRESH_S = 1.5
# Between a deed and what is told of it.
TELLING_S = 20.0
# A card that cannot be read for less need not be noticed; a daemon that has just come back has had no time to.
NOTICED_S = 3.0
# How long memory may be on its way back: a card is lost for 4.5 s, and its driver is initialised at most every 5 s.
RELEASING_S = 12.0
# A daemon that is killed may lose this much of what it had told.
BATCH_S = 0.5
LOST_EVICTION = "eviction, of which a killed daemon could tell nothing"
LOST_IN_A_GAP = "what a killed daemon could not write on a full disk: the gap is recorded"
# Of a stream that had not begun: it was refused, or the machine was too busy for its engine to see it.
NO_WORD = "no answer had begun"
Events = Sequence[Mapping[str, Any]]


def moment_s(text: str) -> float:
    """Seconds since 1970."""
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def excuse(death: Death, deeds: Deeds, events: Events) -> str | None:
    """Why an engine has ended; None where nobody wanted that."""
    model, pid = death.model, death.pid
    begin, end = death.after_s, death.before_s
    for deed in deeds.of("kill-engine", "segv-engine", "stop-unit"):
        if deed.pid == pid and deed.at_s <= end:
            return deed.kind
    asked = sorted(deeds.of("unload", "release", "late-memory"), key=lambda deed: deed.model == "")
    for deed in asked:
        ending_s = ENDING_S if deed.detail == "done" else CUT_OFF_ENDING_S
        until_s = None if deed.until_s is None else deed.until_s + ending_s
        if deed.model in {"", model} and replace(deed, until_s=until_s).touches(begin, end):
            return deed.kind
    if any(event["kind"] == "eviction" and event.get("run") == death.run for event in events):
        return "eviction"
    others = [deed for deed in deeds.of("load") if deed.model != model and deed.touches(begin - 3, end)]
    killed = [deed for deed in deeds.of("kill-daemon") if begin - 3 <= deed.at_s <= end + BATCH_S]
    if others and killed:
        return LOST_EVICTION
    # Loads that nobody asks for just then (a reset, a start after a failure) make room too; on a full disk a daemon
    # that is killed next takes what it told of that along, and the next one records the gap.
    wall_s = time.time() - time.monotonic()
    just_killed = any(begin - 3 <= deed.at_s <= end + BATCH_S for deed in deeds.of("kill-daemon"))
    if just_killed and any(start <= end + wall_s <= stop for start, stop in _gaps(events)):
        return LOST_IN_A_GAP
    if not death.served:
        for deed in deeds.of("bad-starts"):
            if deed.touches(death.born_s - 1, end):
                return deed.kind
        for deed in deeds.of("stranger"):
            if death.born_s - 5 <= deed.at_s <= end:
                return deed.kind
    return None


def taken_from_the_busy(deeds: Deeds, events: Events) -> Iterator[Violation]:
    """Streams that were cut off because their engine was unloaded for another model."""
    evictions = [each for each in events if each["kind"] == "eviction"]
    for stream in deeds.of("stream"):
        if stream.detail in {"", NO_WORD} or stream.until_s is None:
            continue
        end_wall_s = stream.wall_s + stream.until_s - stream.at_s
        for each in evictions:
            at_s = moment_s(each["at"])
            if each.get("model") == stream.model and stream.wall_s + FRESH_S < at_s <= end_wall_s + 1:
                text = f"{stream.model} was unloaded ({each['message']}) in the middle of an answer: {stream.detail}"
                yield Violation("busy model evicted", text, stream.at_s - deeds.began_s)


def untold(deaths: Iterable[Death], deeds: Deeds, events: Events) -> Iterator[Violation]:
    """Engines that ended, of which the history tells no end, and that no recorded gap covers."""
    ended = {
        each.get("run") for each in events if each["kind"] == "state" and each["state"] in {"failed", "gone"}
    }
    gaps = list(_gaps(events))
    wall_s = time.time() - time.monotonic()
    downs = list(deeds.of("kill-daemon", "term-daemon", "stop-daemon", "restart-daemon"))
    stopping, releasing = (
        {
            each.get("run"): moment_s(each["at"]) - wall_s
            for each in events
            if each["kind"] == "state" and each["state"] == state
        }
        for state in ("stopping", "releasing")
    )
    for death in deaths:
        at_s = death.before_s + wall_s
        # Its stop was told, with who asked; the daemon that would have told its end had been ended meanwhile.
        told_s = stopping.get(death.run)
        if told_s is not None and any(told_s - 2 <= each.at_s <= death.before_s + 1 for each in downs):
            continue
        # That its unit has ended was told; the daemon that waited for its memory (on a lost card) ended before it.
        told_s = releasing.get(death.run)
        if told_s is not None and any(told_s - 1 <= each.at_s <= told_s + RELEASING_S for each in downs):
            continue
        # What follows from an end may be told, and lost, a little later.
        covered = any(begin <= at_s + slack <= end for begin, end in gaps for slack in (0, 2, 4))
        # One that ended well while no daemon ran leaves nothing that the next one could find.
        if death.watched and death.run and death.run not in ended and not covered:
            told = [each for each in events if each["kind"] == "state" and each.get("run") == death.run][-1:]
            last = "".join(f"; the last of it, at {each['at']}: {each['state']}" for each in told)
            text = f"{death.model} (process {death.pid}, run {death.run}) has ended, and no event tells it{last}"
            yield Violation("history", text, death.before_s - deeds.began_s)


def unseen(deeds: Deeds, events: Events) -> Iterator[Violation]:
    """Faults that the history does not tell of with their cause, and that no recorded gap covers."""
    gaps = list(_gaps(events))

    def covered(begin_wall_s: float, end_wall_s: float) -> bool:
        """The history itself says that what happened then may be missing: of a full disk, after which a kill came."""
        return any(begin <= begin_wall_s and end_wall_s <= end for begin, end in gaps)

    for deed in deeds.of("kill-engine", "segv-engine", "kill-daemon", "stop-daemon", "term-daemon"):
        text = _told_of(deed, deeds, events)
        if text and not any(begin <= deed.wall_s + slack <= end for begin, end in gaps for slack in (0, 2)):
            yield Violation("history", text, deed.at_s - deeds.began_s)
    ends = list(deeds.of("kill-daemon", "stop-daemon", "term-daemon", "restart-daemon", "freeze-daemon"))
    for deed in deeds.of("fail-nvml", "lose-card"):
        over_s = deed.until_s if deed.until_s is not None else deed.at_s
        is_short = over_s - deed.at_s < NOTICED_S
        disturbed = any(each.touches(deed.at_s - NOTICED_S, over_s) for each in ends)
        # A card that could not be read before is not told again.
        faults = deeds.of("fail-nvml", "lose-card")
        disturbed = disturbed or any(
            each is not deed and each.touches(deed.at_s - NOTICED_S, deed.at_s) for each in faults
        )
        last = deed.wall_s + over_s - deed.at_s + 1
        found = [each for each in events if each["kind"] == "card"]
        is_told = any(deed.wall_s <= moment_s(each["at"]) <= last for each in found)
        if not (is_short or disturbed or is_told or covered(deed.wall_s, last - 1)):
            text = f"{deed.kind} at {deed.at_s - deeds.began_s:.1f} s: no event tells that the card cannot be read"
            yield Violation("history", text, deed.at_s - deeds.began_s)
    for deed in deeds.of("reload-manager", "reexec-manager", "restart-bus"):
        last = deed.wall_s + TELLING_S
        found = [each for each in events if each["kind"] in {"reconciled", "daemon", "bus"}]
        is_told = any(deed.wall_s - 1 <= moment_s(each["at"]) <= last for each in found)
        if not (is_told or covered(deed.wall_s, deed.wall_s)):
            text = (
                f"{deed.kind} at {deed.at_s - deeds.began_s:.1f} s: no event tells that units were compared"
            )
            yield Violation("history", text, deed.at_s - deeds.began_s)


def _told_of(deed: Deed, deeds: Deeds, events: Events) -> str | None:
    """Why a fault is not told as it should be; None where it is."""
    at = f"{deed.kind} {deed.model} {deed.pid or ''} at {deed.at_s - deeds.began_s:.1f} s"
    after = [each for each in events if deed.wall_s - 1 <= moment_s(each["at"]) <= deed.wall_s + TELLING_S]
    if deed.detail == STARTING:
        return None
    if deed.kind in {"kill-engine", "segv-engine"}:
        right = "killed" if deed.kind == "kill-engine" else "engine_fault"
        ends = [each for each in after if each["kind"] == "state" and each.get("run") == deed.detail]
        failed = [each for each in ends if each["state"] == "failed"]
        causes = {_cause(each) for each in failed}
        if right in causes or any(each["state"] == "gone" for each in ends):
            return None  # gone: it was on its way down already
        return f"{at}: told as {', '.join(causes) or 'nothing'} instead of {right}"
    told = [str(each.get("message")) for each in after if each["kind"] == "daemon"]
    word = "killed" if deed.kind == "kill-daemon" else "stopped"
    if any(word in text for text in told):
        return None
    if deed.kind != "kill-daemon" and any("killed" in text for text in told):
        return None  # killed while it stopped
    return f"{at}: told as {'; '.join(told) or 'nothing'}"


def _cause(event: Mapping[str, Any]) -> str:
    """Of an end, from its problem document."""
    problem: Mapping[str, Any] = event.get("details") or {}
    details: Mapping[str, Any] = problem.get("details") or problem
    return str(details.get("cause"))


def _gaps(events: Events) -> Iterator[tuple[float, float]]:
    """From when to when something may be missing, by the history itself."""
    last = "1970-01-01T00:00:00Z"
    for event in sorted(events, key=lambda each: str(each["at"])):
        details = event.get("details") or {}
        # Without a beginning: from the last event that is kept.
        begin, end = details.get("from", last), details.get("to")
        last = event["at"]
        if event["kind"] in {"gap", "daemon"} and end:
            yield moment_s(begin) - BATCH_S, moment_s(end) + BATCH_S


def missing(live: Iterable[Mapping[str, Any]], kept: Events) -> Iterator[Mapping[str, Any]]:
    """Events that were told when they happened, are not kept, and are in no recorded gap."""
    numbers = {event["seq"] for event in kept}
    gaps = list(_gaps(kept))
    for event in live:
        if event["seq"] in numbers or event["kind"] == "progress":
            continue
        if not any(begin <= moment_s(event["at"]) <= end for begin, end in gaps):
            yield event
