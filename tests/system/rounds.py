"""The same again and again, for what goes wrong once in a hundred times: races of two loads, and cycles of eviction."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass, field
from typing import Any

from tests.system.harness import UnixConnection, eventually, model_units
from tests.system.rig import ROOM_MIB, Follower, Lines, Rig

RIVALS = {"alpha": 13.0, "beta": 12.0}  # GiB; each fits, both do not
# How both ask, and how their streams end.
SERVED, REFUSED, NOT_NOW = "ready", "insufficient_vram", "queue_timed_out"
# In this one the later of both must meet the other on its way up: one that was ready would make room.
HASTY = "neither waits"
KINDS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, int]]] = {
    "both wait": ({}, {SERVED: 2}),
    HASTY: ({"wait": False}, {SERVED: 1, NOT_NOW: 1}),
    "both pinned": ({"pin": True}, {SERVED: 1, REFUSED: 1}),
}
JITTER_S = 0.004  # the later of two may be so much later


@dataclass
class Tally:
    """What came of all rounds.

    Attributes:
        rounds: how many.
        endings: how streams ended, by kind of round.
        most_reserved_mib: of the card at any moment, by the events of the daemon and the prices that were told before.
        seconds: of each round.
    """

    rounds: int = 0
    endings: dict[str, Counter[str]] = field(default_factory=dict)
    most_reserved_mib: int = 0
    seconds: list[float] = field(default_factory=list)


class Books:
    """What is reserved, by the events of the daemon and the prices that were told before: no figure of its ledger."""

    def __init__(self, prices: Mapping[str, int]) -> None:
        self._prices = prices
        self._held: dict[str, int] = {}
        self._read = 0
        self.most_mib = 0

    def read(self, events: Lines) -> None:
        """Take what has happened since."""
        for event in events[self._read :]:
            if event["kind"] != "state":
                continue
            if event["state"] == "reserved":
                self._held[event["run"]] = self._prices[event["model"]]
                self.most_mib = max(self.most_mib, sum(self._held.values()))
            elif event["state"] in {"gone", "failed"}:
                self._held.pop(event["run"], None)
        self._read = len(events)


def race(rig: Rig, rounds: int, seed: int = 1) -> Tally:
    """Two clients load different models at the same instant, each time from an empty card.

    Raises:
        AssertionError: more was reserved than there is, somebody was not answered as he should be, or there is a rest.
    """
    prices = rig.price(*RIVALS)
    assert max(prices.values()) <= ROOM_MIB < sum(prices.values())
    chance = random.Random(seed)  # noqa: S311  # a race
    tally, books = Tally(), Books(prices)
    follower = Follower(rig.service)
    try:
        for number in range(rounds):
            began = time.monotonic()
            kind = tuple(KINDS)[number % len(KINDS)]
            endings = _one_race(rig, KINDS[kind][0], chance, held=kind == HASTY)
            assert endings == KINDS[kind][1], (number, kind, endings)
            tally.endings.setdefault(kind, Counter()).update(endings)
            _empty(rig)
            books.read(follower.events)
            assert books.most_mib <= ROOM_MIB
            tally.seconds.append(time.monotonic() - began)
            tally.rounds += 1
    finally:
        follower.close()
    tally.most_reserved_mib = books.most_mib
    return tally


def _one_race(rig: Rig, options: Mapping[str, Any], chance: random.Random, *, held: bool) -> Counter[str]:
    """How both ended. Held: the load that is admitted goes on when the other one is answered."""
    if held:
        rig.behave(load_held=True)
    start = threading.Barrier(len(RIVALS))
    names = list(RIVALS)
    chance.shuffle(names)
    delays = (0.0, chance.choice([0.0, chance.uniform(0, JITTER_S)]))
    racing = [
        rig.clients.submit(_ask, rig, name, options, start, delay)
        for name, delay in zip(names, delays, strict=True)
    ]
    if held:
        wait(racing, 60, FIRST_COMPLETED)
        rig.behave(load_held=False)
    endings = Counter(each.result(60) for each in racing)
    serving = [name for name, state in rig.states().items() if state in {"ready", "busy"}]
    assert len(serving) == 1  # of two that were served in turn the first has gone
    return endings


def _ask(rig: Rig, model: str, options: Mapping[str, Any], start: threading.Barrier, delay_s: float) -> str:
    """Connect, wait for the other, ask; how it ended."""
    connection = UnixConnection(rig.service.control_socket)
    try:
        connection.connect()
        start.wait(30)
        if delay_s:
            time.sleep(delay_s)  # not to wait for anything: to hit another moment
        body = json.dumps({"model": model, **options})
        connection.request("POST", "/v1/load", body, {"Content-Type": "application/json"})
        lines = [json.loads(line) for line in connection.getresponse().read().splitlines()]
    finally:
        connection.close()
    last = lines[-1]
    problem = last.get("problem") or last
    return str(SERVED if last.get("kind") == "ready" else problem["code"])


def _empty(rig: Rig) -> None:
    """Give the whole card back; nothing is left."""
    answer = rig.service.request("POST", "/v1/release", {})
    assert answer.status == 200, answer.body
    for name in rig.states():  # the memory of a failure
        rig.unload(name)
    eventually(lambda: model_units() == {}, what="no unit is left")
    gpu = rig.gpu()
    assert gpu.reservations == ()
    assert gpu.grantable_bytes == ROOM_MIB << 20
    assert rig.on_card() == {}


def cycles(rig: Rig, count: int) -> list[float]:
    """Each load evicts the model that the one before it has loaded; afterwards ledger and card agree.

    Returns:
        seconds of each cycle.

    Raises:
        AssertionError: they do not.
    """
    names = list(RIVALS)
    rig.load_ready(names[-1])
    before = rig.gpu().reading
    assert before is not None
    seconds = []
    for number in range(count):
        began = time.monotonic()
        for name in names:
            rig.load_ready(name)
        seconds.append(time.monotonic() - began)
        gpu = rig.check_books()
        (held,) = gpu.reservations
        assert (held.model, held.state) == (names[-1], "confirmed")
        assert gpu.reading is not None
        assert gpu.reading.used_bytes == before.used_bytes, number  # nothing has crept in
        assert gpu.foreign_bytes == 0
        assert gpu.grantable_bytes == (ROOM_MIB << 20) - held.charged_bytes
    assert len([e for e in rig.events("eviction")][-2:]) == 2
    return seconds
