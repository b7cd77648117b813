"""The checker: looks four times a second, and tells what has been untrue for too long."""

from __future__ import annotations

import http.client
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos import told as daemon
from tests.chaos import truth as machine
from tests.chaos.compare import CARD_PROBLEM, SERVING, Difference, compare
from tests.chaos.deeds import Death, Deeds
from tests.chaos.excuses import LOST_EVICTION, excuse
from tests.chaos.told import Told
from tests.chaos.truth import Engine, Truth

PERIOD_S = 0.25
UNTRUE_LIMIT_S = 2.0
# A driver that has lost its card is initialised anew at most every 5 s: until then nothing is admitted, which is safe.
LIMITS_S = {CARD_PROBLEM: 5.0 + UNTRUE_LIMIT_S}
# What ended is looked into again for so long: what explains it may come, or be read, after it.
EXPLAINED_WITHIN_S = 2.0
# A checker that could not look for so long (others had the processors) counts no more than this.
MOST_OF_A_GAP_S = 0.75


@dataclass
class _Life:
    engine: Engine
    born_s: float
    seen_s: float
    run: str = ""
    served: bool = False


@dataclass
class Findings:
    """What was seen in all looks."""

    looks: int = 0
    compared: int = 0
    longest_s: dict[str, float] = field(
        default_factory=dict
    )  # by kind of difference, of those that went away
    states: Counter[str] = field(default_factory=Counter)
    deaths: list[Death] = field(default_factory=list)
    events: dict[int, dict[str, Any]] = field(default_factory=dict)
    most_used: int = 0
    most_promised: int = 0


class Watch:
    """Looks again and again in a thread of its own.

    Args:
        control_socket: of the daemon.
        engine: the executable that counts as an engine.
        card_state: state file of the fake card.
        prices: bytes by model, as they were told on an empty card before anything ran.
        deeds: what the driver does.
    """

    def __init__(
        self,
        *,
        control_socket: Path,
        engine: Path,
        card_state: Path,
        prices: Mapping[str, int],
        deeds: Deeds,
    ) -> None:
        self._socket, self._engine, self._card_state = control_socket, engine, card_state
        self._evicted_s: dict[str, float] = {}  # when the last eviction of a model was read
        self._asked_s: dict[str, float] = {}  # when the load of what is wanted was asked for
        self._unexplained: list[Death] = []  # of the last seconds
        self._prices, self._deeds = prices, deeds
        self.findings = Findings()
        self.wanted: dict[str, str] = {}
        self._wanted_lock = threading.Lock()
        self._ages: dict[tuple[str, str], float] = {}
        self._reported: set[tuple[str, str]] = set()
        self._last: Truth | None = None
        self._told: Told | None = None
        self._differences: tuple[Difference, ...] = ()
        self._lives: dict[int, _Life] = {}
        self._strangers: list[tuple[float, int]] = []
        self._seq = 0
        self._counted_of = 0  # the daemon whose numbers were seen to go on
        self._looked = threading.Condition()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="checker", daemon=True)

    # --- what the driver asks --------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """Look no more."""
        self._stop.set()
        self._thread.join(30)

    def want(self, model: str, why: str, asked_s: float) -> None:
        """From now on it must be there, unless its eviction was told before its client could say that it is."""
        with self._wanted_lock:
            if self._evicted_s.get(model, 0.0) < asked_s:
                self.wanted[model] = why
                self._asked_s[model] = asked_s

    def unwant(self, *models: str) -> None:
        """It may go; without names all."""
        with self._wanted_lock:
            for model in models or tuple(self.wanted):
                self.wanted.pop(model, None)

    def next_look(self) -> tuple[Truth | None, Told | None, tuple[Difference, ...]]:
        """Wait for a whole look that begins from now on; what came of it."""
        with self._looked:
            count = self.findings.looks
            self._looked.wait_for(lambda: self.findings.looks >= count + 2 or self._stop.is_set(), 30)
            return self._last, self._told, self._differences

    @property
    def engines(self) -> tuple[Engine, ...]:
        """Engines that serve, by the last look."""
        return tuple(life.engine for life in self._lives.values() if life.served)

    # --- looking ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                self.look()
            except (
                OSError,
                ValueError,
                KeyError,
                TypeError,
            ) as error:  # an answer of another form than promised
                self._deeds.violated("unreadable", f"{type(error).__name__}: {error}")
                self._stop.wait(1)
            self._stop.wait(max(0.0, PERIOD_S - (time.monotonic() - began)))

    def look(self) -> None:
        """One look: the machine, the daemon, the machine once more."""
        before = machine.look(self._engine, self._card_state)
        told, silence = None, None
        if before.daemon.active == "active" and not before.daemon_frozen:
            try:
                told = daemon.ask(self._socket)
                self._read_events(before.daemon.main_pid)
            except (OSError, http.client.HTTPException) as error:
                silence = f"{type(error).__name__}: {error}"
        healthy = {
            pid: daemon.answers(each.socket) for pid, each in before.engines.items() if not each.stopped
        }
        after = machine.look(self._engine, self._card_state)
        # What a new engine is judged by is what this look has seen, too: a stranger may have gone since the last one.
        self._weigh(after, told)
        self._follow(after, told, healthy)
        found: tuple[Difference, ...] = ()
        comparable = (
            before.daemon.main_pid == after.daemon.main_pid != 0
            and after.daemon.active == before.daemon.active == "active"
            and not after.daemon_frozen
            and not before.daemon_frozen
        )
        if comparable and told is not None:
            asked = {deed.model for deed in self._deeds.of("load") if deed.until_s is None}
            with self._wanted_lock:
                # One that is being loaded again is its load's affair.
                wanted = {name: why for name, why in self.wanted.items() if name not in asked}
            # Before and after: what has changed while the daemon was asked is no difference.
            twice = {(each.kind, each.about) for each in compare(before, told, healthy, wanted)}
            found = tuple(
                each for each in compare(after, told, healthy, wanted) if (each.kind, each.about) in twice
            )
        elif comparable and silence is not None:
            found = (Difference("silence", "control socket", f"the daemon does not answer: {silence}"),)
        if comparable:
            self._age(found, after.at_s)
        else:
            self._ages.clear()
        with self._looked:
            self._last, self._told, self._differences = after, told, found
            self.findings.looks += 1
            self.findings.compared += comparable and told is not None
            self._looked.notify_all()

    def _read_events(self, pid: int) -> None:
        if pid != self._counted_of:
            newest = daemon.newest_event(self._socket)  # what it has told of its start is above all before
            if newest < self._seq:
                text = f"the daemon {pid} counts from {newest}, and {self._seq} was told before: followers miss it"
                self._deeds.violated("history", text)
            self._counted_of = pid
        for event in daemon.events_since(self._socket, self._seq):
            self._seq = max(self._seq, event["seq"])
            self.findings.events[event["seq"]] = event
            if event["kind"] == "eviction" and event.get("model"):
                with self._wanted_lock:
                    self._evicted_s[event["model"]] = time.monotonic()
                self.unwant(event["model"])

    def _age(self, found: tuple[Difference, ...], now_s: float) -> None:
        step = min(MOST_OF_A_GAP_S, now_s - (self._last.at_s if self._last else now_s))
        ages = {
            (each.kind, each.about): self._ages.get((each.kind, each.about), -step) + step for each in found
        }
        for key, age in self._ages.items():
            if key not in ages:
                longest = self.findings.longest_s
                longest[key[0]] = max(longest.get(key[0], 0.0), age)
        self._ages = ages
        for each in found:
            key = (each.kind, each.about)
            if ages[key] > LIMITS_S.get(each.about, UNTRUE_LIMIT_S) and key not in self._reported:
                self._reported.add(key)
                self._deeds.violated(each.kind, f"for {ages[key]:.1f} s: {each.text}")

    def _follow(self, truth: Truth, told: Told | None, healthy: Mapping[int, bool]) -> None:
        """Births and deaths of engines."""
        for pid, engine in truth.engines.items():
            life = self._lives.get(pid)
            if life is None:
                life = self._lives[pid] = _Life(engine, _born_s(truth, engine), truth.at_s)
                self._admitted(truth, engine)
            life.seen_s = truth.at_s
            life.served = life.served or healthy.get(pid, False)
        for instance in told.instances if told else ():
            life = self._lives.get(instance.main_pid)
            if life is not None:
                life.run = instance.run
                life.served = life.served or instance.state in SERVING
            self.findings.states[instance.state] += 1
        watched = told is not None and truth.daemon.active == "active" and bool(self._told)
        for pid in self._lives.keys() - truth.engines.keys():
            life = self._lives.pop(pid)
            death = Death(
                life.engine.model,
                pid,
                life.run,
                life.served,
                life.born_s,
                life.seen_s,
                time.monotonic(),
                watched,
            )
            self.findings.deaths.append(death)
            self._unexplained.append(death)
        self._explain()

    def _explain(self) -> None:
        """The daemon may be killed a moment after it has unloaded a model, before anybody could be told."""
        now_s, events = time.monotonic(), tuple(self.findings.events.values())
        left = []
        for death in self._unexplained:
            if excuse(death, self._deeds, events) == LOST_EVICTION:
                if self._asked_s.get(death.model, 0.0) < death.before_s:
                    self.unwant(death.model)
            elif now_s - death.before_s < EXPLAINED_WITHIN_S:
                left.append(death)
        self._unexplained = left

    def _admitted(self, truth: Truth, engine: Engine) -> None:
        """A new engine: with it and all others at their prices, and strangers, the card was not over-committed."""
        prices = sum(self._prices.get(each.model, 0) for each in truth.engines.values())
        strangers = min((size for at_s, size in self._strangers if at_s > truth.at_s - 5), default=0)
        room = truth.card.total - truth.card.reserved
        if prices + strangers > room:
            names = ", ".join(sorted(each.model for each in truth.engines.values()))
            text = f"{engine.model} was started: {names} cost {prices} bytes, and others hold {strangers}, of {room}"
            self._deeds.violated("over-commit", text)

    def _weigh(self, truth: Truth, told: Told | None) -> None:
        self.findings.most_used = max(self.findings.most_used, truth.card.used + truth.card.reserved)
        promised = sum(each.charged for each in told.reservations) if told else 0
        self.findings.most_promised = max(self.findings.most_promised, promised)
        engines = truth.card.of(truth.engines)
        self._strangers.append((truth.at_s, truth.card.used - engines))
        del self._strangers[:-60]


def _born_s(truth: Truth, engine: Engine) -> float:
    """By systemd: on a busy machine the first look at it may be seconds later."""
    unit = (truth.units or {}).get(engine.unit)
    return min(truth.at_s, unit.active_since_s or truth.at_s) if unit is not None else truth.at_s


def until(question: Callable[[], bool], within_s: float) -> bool:
    """Ask until the answer is true; whether it was in time."""
    deadline = time.monotonic() + within_s
    while not question():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
