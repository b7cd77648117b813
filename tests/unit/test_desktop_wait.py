"""Waiting for a desktop at a login, in simulated time: what is asked, what ends it at once, what is told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest

from lllm3090d.bus.seats import SeatScene
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.readings import CardKind
from lllm3090d.planning.units import MIB
from lllm3090d.serving.desktop import SESSION_TARGET
from lllm3090d.serving.desktop_settled import GRACE_S, STEADY_S, TARGET_S, Ending, Over
from lllm3090d.serving.desktop_wait import ASK_LIMIT_S, EARLIER_TARGET, DesktopWait, no_wait
from lllm3090d.serving.history import History
from lllm3090d.settings import Desktop, Settings
from lllm3090d.wire import EventKind
from lllm3090d.wire_wanted import Awaited
from tests.fakes.scheduler_world import World
from tests.fakes.simulated_loop import simulate

pytestmark = pytest.mark.unit

OWN = SeatScene(own_desktop=True)
CARD = "GPU-1"


class Machine:
    """A user's systemd, logind and a card, as they are at each second of the simulated clock."""

    def __init__(self, **settings: Any) -> None:
        loop = asyncio.get_running_loop()
        self.settings = Settings(**settings)
        self.kind = CardKind.NVIDIA
        self.states: Callable[[float], Mapping[str, str]] = lambda _: {SESSION_TARGET: "active"}
        self.scene: Callable[[float], SeatScene | None] = lambda _: OWN
        self.foreign: Callable[[float], dict[str, int]] = lambda _: {CARD: 300 * MIB}
        self.hangs = self.is_lost = False
        self.silent_until_s = 0.0  # logind
        self.asked: list[str] = []
        self.jobs: frozenset[float] = frozenset()  # when the target has one
        self.excuse: Over | None = None
        self.history = History()
        self.clock = loop.time
        self.wait = DesktopWait(
            settings=lambda: self.settings,
            card_kind=lambda: self.kind,
            units=self,
            seats=self,
            foreign_bytes=lambda: self.foreign(loop.time()),
            excuse=lambda: self.excuse,
            history=self.history,
            clock=loop.time,
        )

    async def unit_active_state(self, name: str) -> str | None:
        self.asked.append(name)
        if self.is_lost:
            raise LlmError(ErrorCode.BUS_UNAVAILABLE, "the bus is lost")
        if self.hangs:
            await asyncio.Event().wait()
        return self.states(self.clock()).get(name)

    async def unit_has_job(self, name: str) -> bool:
        assert name == SESSION_TARGET
        return self.clock() in self.jobs

    async def seats(self) -> SeatScene | None:
        if self.clock() < self.silent_until_s:
            raise LlmError(ErrorCode.BUS_UNAVAILABLE, "logind was not answered")
        return self.scene(self.clock())

    def change(self, **settings: Any) -> None:
        self.settings = Settings(**settings)

    async def settled(self) -> float:
        """When it has settled."""
        await self.wait.settled()
        assert self.wait.view() is None and self.wait.why == ""
        return self.clock()

    def told(self) -> list[tuple[str, str]]:
        """How waits ended, and what the history says."""
        events = [each for each in self.history._events if each.kind is EventKind.RESTORE]
        return [(each.details.get("ending", "begins"), each.message) for each in events]


def on(scenario: Callable[[Machine], Awaitable[None]], **settings: Any) -> None:
    async def run() -> None:
        await scenario(Machine(**settings))

    simulate(run())


async def later(machine: Machine, seconds: float) -> None:
    """When the wait has come so far."""
    await asyncio.sleep(seconds - machine.clock())


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"autoload_wait_s": 0}, CardKind.NVIDIA),
        ({"desktop": Desktop.INACTIVE}, CardKind.NVIDIA),
        ({}, CardKind.CPU),
    ],
)
def test_where_no_desktop_is_to_be_waited_for_nobody_is_asked(
    settings: dict[str, Any], kind: CardKind
) -> None:
    async def test(machine: Machine) -> None:
        machine.kind = kind
        assert await machine.settled() == 0
        assert machine.asked == [] and machine.told() == []

    on(test, **settings)


@pytest.mark.parametrize("scene", [SeatScene(), None])
def test_a_machine_without_a_desktop_is_looked_at_once(scene: SeatScene | None) -> None:
    async def test(machine: Machine) -> None:
        machine.states, machine.scene = lambda _: {}, lambda _: scene
        assert await machine.settled() == 0
        assert machine.asked == [SESSION_TARGET, EARLIER_TARGET] and machine.told() == []

    on(test)


def test_the_desktop_begins_after_the_daemon_and_takes_its_memory_step_by_step() -> None:
    """As a login goes: the manager, its default target and the daemon in it, the session, its target, its programs."""

    async def test(machine: Machine) -> None:
        machine.states = lambda now_s: (
            {SESSION_TARGET: "active"} if now_s >= 7 else {EARLIER_TARGET: "active"} if now_s >= 3 else {}
        )
        machine.foreign = lambda now_s: {CARD: round(min(now_s, 15) * 100) * MIB}
        waiting = asyncio.ensure_future(machine.settled())
        views = []
        for second in (2.5, 5.5, 9.5):
            await later(machine, second)
            view = machine.wait.view()
            assert view is not None and view.waiting_s == second
            assert view.remaining_s == 60 - second and view.why == machine.wait.why
            views.append(view)
        assert [each.awaited for each in views] == [Awaited.TARGET, Awaited.TARGET, Awaited.MEMORY]
        assert len({each.since for each in views}) == 1
        assert "has changed by 200.0 MiB within 2 s" in views[-1].why
        assert await waiting == 15 + STEADY_S
        (begins, first), (ending, last) = machine.told()
        assert (begins, ending) == ("begins", Ending.SETTLED)
        assert "waits for the desktop to settle, for 60 s at most: graphical-session.target is not" in first
        assert last.startswith("the desktop has settled after 20.0 s: other programs hold 1,500.0 MiB")

    on(test)


def test_after_the_limit_it_goes_on_all_the_same_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    async def test(machine: Machine) -> None:
        machine.foreign = lambda now_s: {CARD: int(now_s) % 2 * 1000 * MIB}
        assert await machine.settled() == 12.5
        ending, text = machine.told()[-1]
        assert ending == Ending.LIMIT
        assert text.startswith(
            "loaded although the desktop has not settled within 12 s: what other programs"
        )

    on(test, autoload_wait_s=12.5)
    assert [each.levelname for each in caplog.records if "has not settled" in each.message] == ["WARNING"]


@pytest.mark.parametrize(
    ("settings", "why"), [({"autoload_wait_s": 0}, "is 0"), ({"desktop": Desktop.INACTIVE}, '"inactive"')]
)
def test_a_setting_that_is_changed_meanwhile_ends_it(settings: dict[str, Any], why: str) -> None:
    async def test(machine: Machine) -> None:
        machine.states = lambda _: {}
        waiting = asyncio.ensure_future(machine.settled())
        await later(machine, 4.5)
        machine.change(**settings)
        assert await waiting == 5
        ending, text = machine.told()[-1]
        assert ending == Ending.OFF and text.endswith(why)

    on(test)


def test_what_ends_it_ends_it_at_once() -> None:
    async def test(machine: Machine) -> None:
        waiting = asyncio.ensure_future(machine.settled())
        await later(machine, 2.25)
        asked = len(machine.asked)
        machine.wait.nudge()  # of no meaning: nothing is asked for it
        await later(machine, 2.5)
        assert not waiting.done() and len(machine.asked) == asked
        machine.excuse = Over(Ending.SLEEP, "the machine goes to sleep")
        machine.wait.nudge()
        assert await waiting == 2.5
        assert machine.told()[-1] == (
            Ending.SLEEP,
            "the desktop is not waited for any longer, after 2.5 s: the machine goes to sleep",
        )
        # There from the beginning, it is no matter for the history.
        count = len(machine.told())
        assert await machine.settled() == 2.5 and len(machine.told()) == count

    on(test)


def test_an_end_that_nobody_tells_of_is_seen_with_the_next_look() -> None:
    async def test(machine: Machine) -> None:
        waiting = asyncio.ensure_future(machine.settled())
        await later(machine, 2.5)
        machine.excuse = Over(Ending.DONE, "nothing is left")
        assert await waiting == 3
        assert machine.told()[-1][0] == Ending.DONE

    on(test)


def test_the_daemons_end_ends_it_and_tells_nothing() -> None:
    async def test(machine: Machine) -> None:
        waiting = asyncio.ensure_future(machine.settled())
        await later(machine, 2.5)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert machine.clock() == 2.5 and machine.wait.view() is None
        assert [ending for ending, _ in machine.told()] == ["begins"]

    on(test)


@pytest.mark.parametrize("trouble", ["hangs", "is_lost"])
def test_a_systemd_that_does_not_answer_is_not_waited_for_without_end(trouble: str) -> None:
    async def test(machine: Machine) -> None:
        waiting = asyncio.ensure_future(machine.settled())
        await later(machine, 1.5)
        setattr(machine, trouble, True)  # what was known last counts: the target is active
        ended_s = await waiting
        assert machine.told()[-1][0] == Ending.SETTLED
        assert ended_s < 20

    on(test)


def test_a_systemd_that_never_answers_is_given_as_long_as_a_desktop_that_may_come() -> None:
    async def test(machine: Machine) -> None:
        machine.hangs = True
        assert GRACE_S <= await machine.settled() <= GRACE_S + ASK_LIMIT_S
        assert machine.told()[-1][0] == Ending.NO_DESKTOP  # nobody knows of any

    on(test)


def test_a_logind_that_is_slow_to_answer_may_have_a_desktop_to_tell_of() -> None:
    """As on a machine that is just starting. What is said is what is known."""

    async def test(machine: Machine) -> None:
        machine.states, machine.silent_until_s = lambda _: {}, 4.0
        waiting = asyncio.ensure_future(machine.settled())
        await later(machine, 3.5)
        view = machine.wait.view()
        assert view is not None and view.awaited is Awaited.SESSION
        assert await waiting == 4 + TARGET_S + STEADY_S
        assert machine.told()[-1][0] == Ending.SETTLED

    on(test)


def test_a_card_that_is_lost_meanwhile_is_waited_for_and_then_it_goes_on() -> None:
    async def test(machine: Machine) -> None:
        machine.foreign = lambda now_s: {} if 2 <= now_s < 20 else {CARD: 300 * MIB}
        waiting = asyncio.ensure_future(machine.settled())
        await later(machine, 10.5)
        assert machine.wait.why == "no card can be read"
        assert await waiting == 20 + STEADY_S

    on(test)


def test_a_card_that_cannot_be_read_is_given_the_limit() -> None:
    async def test(machine: Machine) -> None:
        machine.foreign = lambda _: {}
        assert await machine.settled() == 60
        assert machine.told()[-1][1].endswith("no card can be read")

    on(test)


def test_a_target_that_has_been_asked_for_is_waited_for_as_long_as_that_takes() -> None:
    async def test(machine: Machine) -> None:
        machine.jobs = frozenset(range(40))
        machine.states = lambda now_s: {SESSION_TARGET: "active" if now_s >= 40 else "inactive"}
        assert await machine.settled() == 40 + STEADY_S

    on(test)


def test_desktops_without_a_target_and_consoles_without_a_desktop() -> None:
    async def test(machine: Machine) -> None:
        machine.states = lambda _: {SESSION_TARGET: "inactive"}
        assert await machine.settled() == TARGET_S + STEADY_S
        began_s = machine.clock()
        machine.scene = lambda _: SeatScene(own_console=True)
        assert await machine.settled() == began_s + GRACE_S
        assert machine.told()[-1][0] == Ending.NO_DESKTOP

    on(test)


def test_without_logind_the_target_alone_counts_unless_the_settings_know_better() -> None:
    async def test(machine: Machine) -> None:
        machine.states, machine.scene = lambda _: {}, lambda _: None
        assert await machine.settled() == 0
        machine.change(desktop=Desktop.ACTIVE)
        assert await machine.settled() == GRACE_S + STEADY_S
        began_s = machine.clock()
        machine.change()
        machine.states = lambda _: {SESSION_TARGET: "active"}
        assert await machine.settled() == began_s + STEADY_S

    on(test)


def test_why_there_is_no_reason_to_wait() -> None:
    scheduler = World().scheduler

    def ending(*, is_owed: bool = True) -> Ending | None:
        over = no_wait(scheduler, is_owed=is_owed)
        return None if over is None else over.ending

    assert ending() is None
    assert ending(is_owed=False) is Ending.DONE
    scheduler.asleep = True
    assert ending() is Ending.SLEEP
    scheduler.released = True
    assert ending() is Ending.RELEASED
