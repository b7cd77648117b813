"""The slow half against a systemd that does not always answer: what it says must not be guessed."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lllm3090d.bus.unit_status import UnitStatus
from lllm3090d.checkpoints.facts import Purpose
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.readings import Card, CardKind, CardProcess, MemoryReading
from lllm3090d.planning.quote import Evidence, LineItem, Place
from lllm3090d.planning.tier import Tier, TierSizes
from lllm3090d.serving import effects as module
from lllm3090d.serving.drains import doors
from lllm3090d.serving.effects import Effects, LoadProgress
from lllm3090d.serving.engine_logs import EngineLogs
from lllm3090d.serving.events import (
    Activity,
    CheckIdle,
    EngineReady,
    Event,
    ForgetUnit,
    IdleChecked,
    LoadStalled,
    MemoryReleased,
    PostMortemRead,
    ReadPostMortem,
    StartFinished,
    StartUnit,
    StopFinished,
    StopUnit,
    TakesMore,
    TierChecked,
    UnitSeen,
    Verified,
    Verify,
)
from lllm3090d.serving.journal import LINES_MAX, JournalLine
from lllm3090d.serving.ledger import Ledger, Share
from lllm3090d.serving.load_watch import LoadCounters, LoadLimits, LoadVerdict, load_cap_s
from lllm3090d.serving.observation import HOST, CardState, Observation
from lllm3090d.serving.probe import Probe, Probed
from lllm3090d.serving.readiness import Progress
from lllm3090d.serving.running import Instance
from lllm3090d.serving.unit_spec import UnitSpec
from lllm3090d.settings import VerifyAfterLoad

pytestmark = pytest.mark.unit

UNIT = "lllm3090-a-00000001.service"
RUN = "00000001"
LOST = LlmError(ErrorCode.BUS_UNAVAILABLE, "nobody answers")


def running(name: str) -> UnitStatus:
    return UnitStatus.from_properties(name, {"ActiveState": "active"}, {"MainPID": 7})


class LostManager:
    """A systemd whose first answers are lost; it may have done what it was asked all the same."""

    def __init__(self, *, lost_answers: int, started: bool) -> None:
        self.lost_answers = lost_answers
        self.started = started
        self.stops = 0
        self.kills = 0

    def _answer(self) -> None:
        if self.lost_answers > 0:
            self.lost_answers -= 1
            raise LOST

    async def start(self, _name: str, _properties: Mapping[str, Any]) -> str:
        self._answer()
        return "done"

    async def status(self, name: str) -> UnitStatus | None:
        self._answer()
        return running(name) if self.started else None

    async def stop(self, _name: str, _timeout_s: float) -> None:
        self.stops += 1
        self._answer()

    async def kill(self, _name: str, number: int) -> None:
        assert (number, self.stops) == (signal.SIGKILL, 0)  # before it is asked to stop
        self._answer()
        self.kills += 1


def unobserved() -> Observation:
    raise AssertionError("nobody needs the cards here")


async def unasked(_: Sequence[Instance]) -> Mapping[str, Activity]:
    raise AssertionError("nobody needs the engines here")


def effects(
    manager: LostManager | None,
    told: list[Event],
    sockets_dir: Path = Path("/"),
    *,
    scheduler: object = None,
    observe: Callable[[], Observation] = unobserved,
    ask: Callable[[Sequence[Instance]], Awaitable[Mapping[str, Activity]]] = unasked,
    on_progress: Callable[[LoadProgress], None] = lambda _: None,
    **settings: Any,
) -> Effects:
    usual = {"stop_timeout_s": 1.0, "engine_sockets_dir": sockets_dir, "device_memory_limit": False}
    values = usual | settings
    return Effects(
        manager=cast("Any", manager),
        scheduler=cast("Any", scheduler),
        settings=cast("Any", lambda: SimpleNamespace(**values)),
        observe=observe,
        ask=ask,
        submit=told.append,
        on_progress=on_progress,
    )


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BUS_POLL_S", 0.0)


def start(manager: LostManager, sockets_dir: Path = Path("/")) -> list[Event]:
    told: list[Event] = []
    asyncio.run(effects(manager, told, sockets_dir).start_unit(StartUnit(RUN, UnitSpec(UNIT, {}))))
    return told


def test_a_start_without_an_answer_is_not_taken_for_a_failure() -> None:
    """The unit runs, so its memory must stay charged."""
    assert start(LostManager(lost_answers=3, started=True)) == [UnitSeen(running(UNIT))]


def test_a_start_that_never_arrived_has_failed() -> None:
    assert start(LostManager(lost_answers=2, started=False)) == [StartFinished(RUN, LOST)]


def test_a_stop_without_an_answer_is_asked_for_again() -> None:
    told: list[Event] = []
    manager = LostManager(lost_answers=2, started=True)
    asyncio.run(effects(manager, told).stop_unit(StopUnit(RUN, UNIT)))
    assert told == [StopFinished(RUN, None)]
    assert manager.stops == 3


def test_what_is_to_be_killed_is_killed_and_then_stopped() -> None:
    told: list[Event] = []
    manager = LostManager(lost_answers=2, started=True)
    asyncio.run(effects(manager, told).stop_unit(StopUnit(RUN, UNIT, kill=True)))
    assert told == [StopFinished(RUN, None)]
    assert (manager.kills, manager.stops) == (1, 1)


def test_what_cannot_be_killed_is_stopped_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def refuse(_: LostManager, name: str, number: int) -> None:
        raise LlmError(ErrorCode.UNIT_REFUSED, f"systemd refused {name} {number}")

    monkeypatch.setattr(LostManager, "kill", refuse)
    told: list[Event] = []
    manager = LostManager(lost_answers=0, started=True)
    asyncio.run(effects(manager, told).stop_unit(StopUnit(RUN, UNIT, kill=True)))
    assert told == [StopFinished(RUN, None)]
    assert manager.stops == 1
    assert "could not be killed" in caplog.text


class Forgets(LostManager):
    """One that remembers what it has reset."""

    def __init__(self, *, lost_answers: int, started: bool) -> None:
        super().__init__(lost_answers=lost_answers, started=started)
        self.reset: list[str] = []

    async def reset_failed(self, name: str) -> None:
        self._answer()
        self.reset.append(name)


def test_nothing_of_a_run_is_left_behind(tmp_path: Path) -> None:
    """Whatever the name of its socket was, and though the bus does not answer at first."""
    path = tmp_path / "x.sock"
    for door in doors(path):
        bound(door)
    manager = Forgets(lost_answers=2, started=True)
    forgetting = effects(manager, [], sockets_dir=tmp_path)
    asyncio.run(forgetting.forget(ForgetUnit(RUN, UNIT, path)))
    assert list(tmp_path.iterdir()) == []
    assert manager.reset == [UNIT]


def test_what_a_unit_of_somebody_names_is_not_removed(tmp_path: Path) -> None:
    """No socket, and one that is not in our directory: a unit that was made by hand may name any path."""
    ours = tmp_path / "engines"
    ours.mkdir()
    file, control = ours / "file.sock", tmp_path / "control.sock"
    file.write_text("precious")
    bound(control)
    forgetting = effects(Forgets(lost_answers=0, started=True), [], sockets_dir=ours)
    for named in (file, control):
        asyncio.run(forgetting.forget(ForgetUnit(RUN, UNIT, named)))
    assert file.read_text() == "precious" and control.is_socket()


def bound(path: Path) -> None:
    """A socket that nobody listens on any more."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))


class SlowManager(LostManager):
    """One that takes its time with a start, and writes down what it was asked in which order."""

    def __init__(self) -> None:
        super().__init__(lost_answers=0, started=True)
        self.asked: list[str] = []
        self.answers = asyncio.Event()

    async def start(self, name: str, properties: Mapping[str, Any]) -> str:
        await self.answers.wait()
        self.asked.append("start")
        return await super().start(name, properties)

    async def stop(self, name: str, timeout_s: float) -> None:
        self.asked.append("stop")
        await super().stop(name, timeout_s)


def test_a_stop_waits_for_the_start_it_is_to_undo(tmp_path: Path) -> None:
    """Else there is nothing to stop yet, and a moment later an engine that nobody knows."""

    async def both() -> list[str]:
        manager = SlowManager()
        slow = effects(manager, [], sockets_dir=tmp_path)
        starting = asyncio.create_task(slow.start_unit(StartUnit(RUN, UnitSpec(UNIT, {}))))
        stopping = asyncio.create_task(slow.stop_unit(StopUnit(RUN, UNIT)))
        done, _ = await asyncio.wait({starting, stopping}, timeout=0.05)
        assert not done
        manager.answers.set()
        await asyncio.gather(starting, stopping)
        return manager.asked

    assert asyncio.run(both()) == ["start", "stop"]


def test_a_start_makes_the_directory_of_the_sockets_again(tmp_path: Path) -> None:
    manager = LostManager(lost_answers=0, started=True)
    missing = tmp_path / "lllm3090d" / "engines"
    assert start(manager, missing)[-1] == StartFinished(RUN, None)
    assert missing.is_dir()
    missing.rmdir()
    missing.touch()
    (finished,) = start(manager, missing)
    assert isinstance(finished, StartFinished)
    assert finished.error is not None
    assert finished.error.code is ErrorCode.RUNTIME_DIR_UNUSABLE


MIB = 1 << 20
TIER = Tier(256, 1024, TierSizes(4 * MIB, 2 * MIB, 12 * MIB, layers=1))
SPLIT = (
    "ggml_backend_cuda_tier_alloc: CUDA0_tier_kv_l0_256_1024 16.00 MiB: 4.00 MiB VRAM + 12.00 MiB host"
    " (4 runs, 2 parts)"
)


def watched(
    monkeypatch: pytest.MonkeyPatch, tier: Tier | None, log: tuple[str, ...] | LlmError
) -> list[Event]:
    """What comes of a look at an engine's log that says that."""

    async def tail(_identifier: str, _lines: int) -> tuple[JournalLine, ...]:
        if isinstance(log, LlmError):
            raise log
        return tuple(JournalLine(0, line) for line in log)

    monkeypatch.setattr("lllm3090d.serving.journal.tail", tail)
    told: list[Event] = []
    instance = SimpleNamespace(run=RUN, unit=UNIT, plan=SimpleNamespace(tier=tier))
    made = effects(None, told, scheduler=SimpleNamespace(by_run=lambda _: instance))
    asyncio.run(made.check_tier(RUN))
    return told


def test_a_divided_cache_is_looked_for_in_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    (checked,) = watched(monkeypatch, TIER, ("loading", SPLIT))
    assert isinstance(checked, TierChecked) and checked.in_force
    assert "All 1 layers are split" in checked.reason
    (checked,) = watched(
        monkeypatch, TIER, ("tiered KV: cells [0, 256) in VRAM, [256, 1024) in host memory",)
    )
    assert isinstance(checked, TierChecked) and not checked.in_force


def test_without_a_tier_or_a_log_nothing_is_said_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert watched(monkeypatch, None, (SPLIT,)) == []
    unreadable = LlmError(ErrorCode.LOGS_UNAVAILABLE, "closed")
    assert watched(monkeypatch, TIER, unreadable) == []


def test_a_log_whose_beginning_is_out_of_reach_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An adopted engine may have said much since its start."""
    assert watched(monkeypatch, TIER, ("a request",) * LINES_MAX) == []


# --- the cards and the engines -------------------------------------------------------------------------------

CARD, OTHER = "GPU-1", "GPU-2"
TOTAL = 24_000 * MIB


def seen(
    resident: Mapping[str, int], *, unlisted: int = 0, host: Mapping[str, int] | None = None
) -> Observation:
    """The first of two cards, with what runs hold of it, and what nobody is listed with."""
    used = sum(resident.values()) + unlisted
    processes = tuple(CardProcess(number, size) for number, size in enumerate(resident.values(), 100))
    reading = MemoryReading(0.0, TOTAL, 0, used, TOTAL - used, processes)
    empty = MemoryReading(0.0, TOTAL, 0, 0, TOTAL, ())
    first, second = (Card(CardKind.NVIDIA, uuid, "a card", "580.95") for uuid in (CARD, OTHER))
    return Observation(
        (CardState(first, reading, None, resident, resident), CardState(second, empty)),
        desktop_active=False,
        host_in_use=host or {},
    )


def ledger_with(*shares: Share, name: str = "a") -> Ledger:
    ledger = Ledger()
    ledger.hold(RUN, name, shares)
    return ledger


def share(where: str, size: int) -> Share:
    return Share(where, (LineItem("weights", Place.CARD, size, Evidence.HEADER, ""),))


class Waits:
    """A run of which something is missing for a while, and a clock that a sleep moves on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, looks: Sequence[Observation]) -> None:
        self.now_s = 0.0
        self.naps: list[float] = []
        self.looks = list(looks)
        self.told: list[Event] = []
        self.events_at: list[int] = []
        monkeypatch.setattr("lllm3090d.serving.effects.time.monotonic", lambda: self.now_s)
        monkeypatch.setattr("lllm3090d.serving.effects.asyncio.sleep", self.sleep)

    async def sleep(self, delay_s: float) -> None:
        self.naps.append(delay_s)
        self.now_s += delay_s

    def observe(self) -> Observation:
        return self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]

    def wait(self, before: Observation | None, ledger: Ledger, timeout_s: float = 10.0) -> list[Event]:
        made = effects(
            None,
            self.told,
            scheduler=SimpleNamespace(ledger=ledger),
            observe=self.observe,
            release_timeout_s=timeout_s,
        )
        asyncio.run(made.wait_for_memory(RUN, before))
        assert made._releasing == {}
        return self.told


def test_memory_is_back_when_the_card_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before = seen({RUN: 5000 * MIB}, unlisted=300 * MIB)
    waits = Waits(monkeypatch, [before, seen({}, unlisted=5300 * MIB), seen({}, unlisted=300 * MIB)])
    assert waits.wait(before, ledger_with(share(CARD, 4000 * MIB))) == [MemoryReleased(RUN, {})]
    assert waits.naps == [module.MEMORY_POLL_S] * 2


def test_memory_that_comes_late_is_told_as_missing_until_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was seen counts where it is more than the price, and less than all may come back first."""
    before = seen({RUN: 5000 * MIB})
    late = [seen({}, unlisted=5000 * MIB)] * 2 + [seen({}, unlisted=900 * MIB), seen({})]
    waits = Waits(monkeypatch, late)
    told = waits.wait(before, ledger_with(share(CARD, 4000 * MIB)), timeout_s=module.MEMORY_POLL_S / 2)
    assert told == [
        MemoryReleased(RUN, {CARD: 5000 * MIB}),
        MemoryReleased(RUN, {CARD: 900 * MIB}),
        MemoryReleased(RUN, {}),
    ]
    assert waits.naps == [module.MEMORY_POLL_S, *[module.QUARANTINE_POLL_S] * 2]


def test_a_measurement_is_waited_for_where_nobody_looked_later(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = ledger_with(share(CARD, 4000 * MIB))
    ledger.confirm(RUN, {CARD: 4400 * MIB})
    before = seen({RUN: 1000 * MIB})
    waits = Waits(monkeypatch, [seen({}, unlisted=9000 * MIB), seen({})])
    told = waits.wait(before, ledger, timeout_s=-1.0)
    assert told == [MemoryReleased(RUN, {CARD: 4400 * MIB}), MemoryReleased(RUN, {})]


def test_what_never_held_anything_is_back_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has ever seen it on the card: it died before."""
    waits = Waits(monkeypatch, [seen({})])
    assert waits.wait(None, ledger_with(share(CARD, 4000 * MIB))) == [MemoryReleased(RUN, {})]
    assert waits.naps == []


def test_of_host_memory_nothing_is_measured_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel frees it with its processes: what counts is that they are gone."""
    held = {RUN: 700 * MIB}
    waits = Waits(monkeypatch, [seen({}, host=held), seen({})])
    told = waits.wait(seen({}, host=held), ledger_with(share(HOST, 900 * MIB)), timeout_s=-1.0)
    assert told == [MemoryReleased(RUN, {HOST: 700 * MIB}), MemoryReleased(RUN, {})]


@pytest.mark.parametrize(
    ("answers", "busy", "silent"),
    [
        ({"1": Activity(False, 5), "2": Activity(False, None)}, set(), set()),
        ({"1": Activity(True, 5), "2": Activity(False, 9)}, {"1"}, set()),
        ({"1": Activity(None, 5), "2": Activity(False, 9)}, {"1"}, {"1"}),
        ({"2": Activity(False, 9)}, {"1"}, {"1"}),
        ({}, {"1", "2"}, {"1", "2"}),
    ],
)
def test_an_engine_that_does_not_say_that_it_is_idle_is_busy(
    answers: Mapping[str, Activity], busy: set[str], silent: set[str]
) -> None:
    """Nobody is unloaded on a guess. What has ended meanwhile is neither asked nor busy."""
    instances = {run: SimpleNamespace(run=run) for run in ("1", "2")}
    asked: list[str] = []

    async def ask(those: Sequence[Instance]) -> Mapping[str, Activity]:
        asked.extend(each.run for each in those)
        return answers

    told: list[Event] = []
    made = effects(None, told, scheduler=SimpleNamespace(by_run=instances.get), ask=ask)
    asyncio.run(made.check_idle(CheckIdle("t", ("1", "gone", "2"))))
    assert asked == ["1", "2"]
    assert told == [IdleChecked("t", frozenset(busy), frozenset(silent))]


# --- loading and verifying -------------------------------------------------------------------------------------


def loading(ledger: Ledger) -> SimpleNamespace:
    """A scheduler in which one run loads."""
    instance = SimpleNamespace(
        run=RUN,
        name="a",
        unit=UNIT,
        main_pid=None,
        control_group=f"/x/{UNIT}",
        record=SimpleNamespace(socket=Path("/run/a.sock"), size_bytes=1000, path=Path("/m.gguf")),
        plan=SimpleNamespace(
            launch=SimpleNamespace(batch_tokens=2048, draft=SimpleNamespace(tokens=3), purpose=Purpose.CHAT),
            window_tokens=8192,
        ),
    )
    return SimpleNamespace(ledger=ledger, by_run={RUN: instance}.get)


def watch_a_load(
    monkeypatch: pytest.MonkeyPatch,
    sizes: Sequence[Mapping[str, int]],
    *,
    given_up: LoadVerdict | None = None,
) -> tuple[list[Event], list[LoadProgress]]:
    """A load during which the run holds these sizes, of the first card and of the host, one after the other."""
    looks = [seen({RUN: each[CARD]}, host={RUN: each[HOST]}) for each in sizes]
    told: list[Event] = []
    shown: list[LoadProgress] = []

    async def wait(
        _socket: Path,
        _group: Callable[[], str],
        resident: Callable[[], int],
        tell: Callable[[Progress], None],
        *,
        limits: LoadLimits,
        counters: Callable[[], LoadCounters],
    ) -> LoadVerdict | None:
        assert limits == LoadLimits(60.0, 7200.0)
        assert counters() == LoadCounters()  # no such group, and no process is known
        for _ in sizes[:-1]:
            tell(Progress(resident(), 0.1, 0.0))
        return given_up

    def observe() -> Observation:
        return looks.pop(0) if len(looks) > 1 else looks[0]

    monkeypatch.setattr(module, "wait_until_ready", wait)
    made = effects(
        None,
        told,
        scheduler=loading(ledger_with(share(CARD, 1000), share(HOST, 100))),
        observe=observe,
        on_progress=shown.append,
        load_timeout_s=60.0,
        load_cap_s=7200.0,
    )
    asyncio.run(made.watch(RUN))
    return told, shown


def test_a_load_is_watched_on_its_cards_and_measured_at_its_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    told, shown = watch_a_load(
        monkeypatch, [{CARD: 300, HOST: 10}, {CARD: 900, HOST: 80}, {CARD: 700, HOST: 20}]
    )
    assert told == [EngineReady(RUN, {CARD: 900, HOST: 80})]
    assert [(each.resident_bytes, each.expected_bytes) for each in shown] == [(300, 1000), (900, 1000)]


@pytest.mark.parametrize("size", [{CARD: 1001, HOST: 1}, {CARD: 1, HOST: 101}])
def test_an_engine_that_takes_more_than_planned_is_told_before_it_is_ready(
    monkeypatch: pytest.MonkeyPatch, size: Mapping[str, int]
) -> None:
    told, _ = watch_a_load(monkeypatch, [size, {CARD: 5, HOST: 5}])
    assert told[0] == TakesMore(RUN, size)
    assert told[-1] == EngineReady(RUN, {where: max(5, held) for where, held in size.items()})
    # To take as much as was promised is no news.
    exact, _ = watch_a_load(monkeypatch, [{CARD: 1000, HOST: 100}, {CARD: 5, HOST: 5}])
    assert [type(each) for each in exact] == [EngineReady]


@pytest.mark.parametrize(
    ("verdict", "why", "setting"),
    [
        (LoadVerdict.STALLED, "made no progress for 60 s", "load_timeout_s"),
        (LoadVerdict.TOO_LONG, "was not ready after 7200 s, although it got on", "load_cap_s"),
    ],
)
def test_a_load_that_is_given_up_says_why(
    monkeypatch: pytest.MonkeyPatch, verdict: LoadVerdict, why: str, setting: str
) -> None:
    told, _ = watch_a_load(monkeypatch, [{CARD: 77, HOST: 1}], given_up=verdict)
    (stalled,) = told
    assert isinstance(stalled, LoadStalled)
    assert stalled.error.code is ErrorCode.LOAD_TIMED_OUT
    assert why in stalled.error.message
    assert "it held 77 bytes" in stalled.error.message
    assert stalled.error.hint is not None
    assert setting in stalled.error.hint


@pytest.mark.parametrize(
    ("properties", "lines", "on_card", "cause", "told"),
    [
        ({"Result": "exit-code", "ExecMainCode": 1, "ExecMainStatus": 1}, ["E CUDA error: out of memory"], True,
         "out_of_device_memory", "the engine ran out of device memory; it exited with status 1; it said: E CUDA error"),
        ({"Result": "exit-code", "ExecMainCode": 1, "ExecMainStatus": 1},
         ["E init: failed to allocate buffer for kv cache"], False, "out_of_host_memory",
         "the engine ran out of host memory; it exited with status 1; it said: E init: failed"),
        ({"Result": "oom-kill", "ExecMainCode": 2, "ExecMainStatus": 9}, [], True, "out_of_host_memory",
         "the engine was killed because memory ran out (killed by SIGKILL)"),
        ({"Result": "core-dump", "ExecMainCode": 3, "ExecMainStatus": 4}, [], True, "illegal_instruction",
         "the engine uses instructions that this processor does not have; it was killed by SIGILL and dumped core"),
        ({"Result": "exit-code", "ExecMainCode": 1, "ExecMainStatus": 3}, ["I all is well"], True, "unknown",
         "exited with status 3; its last line: I all is well"),
        (None, [], True, "unknown", "keeps no record"),
    ],
)  # fmt: skip
def test_a_post_mortem_names_the_cause(  # noqa: PLR0917  # parameters of the table
    monkeypatch: pytest.MonkeyPatch,
    properties: Mapping[str, Any] | None,
    lines: list[str],
    on_card: bool,
    cause: str,
    told: str,
) -> None:
    async def last_lines(*_: object) -> tuple[JournalLine, ...]:
        return tuple(JournalLine(number, text) for number, text in enumerate(lines))

    monkeypatch.setattr(EngineLogs, "last_words", last_lines)
    status = properties and UnitStatus.from_properties(UNIT, {"ActiveState": "failed"}, properties)
    instance = SimpleNamespace(plan=SimpleNamespace(on_card=on_card))
    heard: list[Event] = []
    made = effects(None, heard, scheduler=SimpleNamespace(by_run={RUN: instance}.get))
    asyncio.run(made.post_mortem(ReadPostMortem(RUN, UNIT, status or None)))
    (read,) = heard
    assert isinstance(read, PostMortemRead)
    assert read.error.details["cause"] == cause
    assert read.error.details["advice"]
    assert told in read.error.message


def verify(
    monkeypatch: pytest.MonkeyPatch, setting: VerifyAfterLoad, *, computes: bool = True
) -> tuple[list[Event], list[Probe]]:
    """A look at a run that holds 500 bytes, and 800 while it computes."""
    held = {CARD: 500}
    told: list[Event] = []
    probed: list[Probe] = []

    async def compute(what: Probe, look: Callable[[], int]) -> Probed:
        probed.append(what)
        held[CARD] = 800
        assert look() == 800
        held[CARD] = 600
        return Probed(prompt_tokens=2048, peak_bytes=800)

    monkeypatch.setattr(module, "probe", compute)
    made = effects(
        None,
        told,
        scheduler=loading(Ledger()),
        observe=lambda: seen({RUN: held[CARD]}),
        verify_after_load=setting,
    )
    asyncio.run(made.verify(Verify(RUN, computes)))
    return told, probed


def test_a_model_is_used_to_the_full_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told, (what,) = verify(monkeypatch, VerifyAfterLoad.PROBE)
    assert told == [Verified(RUN, {CARD: 800}, 2048)]
    assert (what.batch_tokens, what.window_tokens, what.predict_tokens) == (2048, 8192, 4)
    assert what.control_group == f"/x/{UNIT}"


@pytest.mark.parametrize(
    ("setting", "computes"), [(VerifyAfterLoad.PEAK, True), (VerifyAfterLoad.PROBE, False)]
)
def test_a_peak_needs_no_prompt(
    monkeypatch: pytest.MonkeyPatch, setting: VerifyAfterLoad, computes: bool
) -> None:
    assert verify(monkeypatch, setting, computes=computes) == ([Verified(RUN, {CARD: 500}, 0)], [])


def test_nothing_is_verified_where_that_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert verify(monkeypatch, VerifyAfterLoad.OFF) == ([], [])


def test_what_has_ended_is_neither_watched_nor_verified() -> None:
    told: list[Event] = []
    made = effects(
        None,
        told,
        scheduler=SimpleNamespace(by_run=lambda _: None),
        verify_after_load=VerifyAfterLoad.PROBE,
    )
    asyncio.run(made.watch(RUN))
    asyncio.run(made.verify(Verify(RUN, True)))
    assert told == []


class Disk:
    """What was seen of the disk, without a state file."""

    def __init__(self) -> None:
        self.saw_it: list[tuple[Path, float]] = []

    def of(self, path: Path) -> float:
        assert path == Path("/m.gguf")
        return 2e6

    def saw(self, path: Path, bytes_per_s: float) -> None:
        self.saw_it.append((path, bytes_per_s))


@pytest.mark.parametrize("chosen_s", [0.0, 60.0])
def test_a_load_goes_by_its_disk_and_tells_of_it(monkeypatch: pytest.MonkeyPatch, chosen_s: float) -> None:
    told: list[Event] = []
    asked: list[LoadLimits] = []

    async def wait(*arguments: Any, limits: LoadLimits, **_: Any) -> LoadVerdict | None:
        asked.append(limits)
        arguments[3](Progress(1, 10.0, 0.0, 5e6, 9000.0))
        return LoadVerdict.TOO_LONG

    monkeypatch.setattr(module, "wait_until_ready", wait)
    disk = Disk()
    made = Effects(
        manager=cast("Any", None),
        scheduler=cast("Any", loading(ledger_with(share(CARD, 1000)))),
        settings=cast(
            "Any",
            lambda: SimpleNamespace(load_cap_s=chosen_s, load_timeout_s=9.0, device_memory_limit=False),
        ),
        observe=lambda: seen({RUN: 5}),
        ask=unasked,
        submit=told.append,
        on_progress=lambda _: None,
        disk_rates=cast("Any", disk),
    )
    asyncio.run(made.watch(RUN))
    assert disk.saw_it == [(Path("/m.gguf"), 5e6)]
    (stalled,) = told
    assert isinstance(stalled, LoadStalled)
    assert "(its disk gave 5.0 MB/s)" in stalled.error.message
    if chosen_s:  # a person's choice is taken as it is
        assert asked == [LoadLimits(9.0, 60.0, None)]
        assert "not ready after 60 s" in stalled.error.message
    else:
        assert asked == [LoadLimits(9.0, load_cap_s(1000, 2e6), 1000)]
        assert "not ready after 9000 s" in stalled.error.message


def test_a_moment_without_file_descriptors_ends_no_load_and_loses_no_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shortage = [LlmError(ErrorCode.FILES_EXHAUSTED, "none left", hint="Wait.")]

    def observe() -> Observation:
        if shortage:
            raise shortage.pop()
        return seen({})

    async def wait(*arguments: Any, **_: Any) -> LoadVerdict | None:
        assert arguments[2]() == 0  # nobody can tell what it holds
        shortage.append(LlmError(ErrorCode.FILES_EXHAUSTED, "none left", hint="Wait."))
        return None

    monkeypatch.setattr(module, "wait_until_ready", wait)
    monkeypatch.setattr(module, "QUARANTINE_POLL_S", 0.0)
    told: list[Event] = []
    made = effects(
        None,
        told,
        scheduler=loading(ledger_with(share(CARD, 1000))),
        observe=observe,
        load_timeout_s=60.0,
        load_cap_s=7200.0,
        release_timeout_s=10.0,
    )
    asyncio.run(made.watch(RUN))
    assert told == [EngineReady(RUN, {})]
    shortage.append(LlmError(ErrorCode.FILES_EXHAUSTED, "none left", hint="Wait."))
    asyncio.run(made.wait_for_memory(RUN, None))
    assert told[1:] == [MemoryReleased(RUN, {})]
