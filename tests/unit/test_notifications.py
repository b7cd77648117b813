"""Showing notices and doing what their buttons say, with a service and a bus that do as they are told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pytest

from lllm3090d.bus import notifications as transport
from lllm3090d.bus.messages import RemoteError, Signal, unavailable
from lllm3090d.bus.notifications import NAME, PATH, Message, NotificationService
from lllm3090d.bus.thread import BusState, BusThread
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.serving.actors import CALLER
from lllm3090d.serving.history import History
from lllm3090d.serving.instance import InstanceState
from lllm3090d.settings import Settings
from lllm3090d.surfaces.control import ControlApi
from lllm3090d.surfaces.notifications import MOST_WAITING, WAIT_S, Notifications
from lllm3090d.wire import Actor, ActorKind, EventKind, LoadBody, LoadLine, LoadLineKind
from tests.fakes.dbus_world import instance

pytestmark = pytest.mark.unit

T = TypeVar("T")
DAEMON = Actor(kind=ActorKind.DAEMON)
REMEDY = {"kind": "context", "text": "4,096 tokens fit", "command": "c", "verified": True}
OPTIONS = {"options": {"context_tokens": 4096}}


class Service:
    """Shows notices, or does not; a call waits while it is held."""

    def __init__(self) -> None:
        self.capabilities = frozenset({"body", "actions"})
        self.is_there = self.has_asked = True
        self.held = asyncio.Event()
        self.held.set()
        self.shown: list[tuple[Message, int]] = []
        self.withdrawn: list[int] = []
        self.on_change: Callable[[], None] = lambda: None
        self.on_action: Callable[[int, str], None] = lambda _, __: None
        self.on_closed: Callable[[int], None] = lambda _: None

    async def start(self) -> None:
        """It is there."""

    def end(self) -> None:
        """Nobody listens any more."""

    async def ready(self) -> bool:
        return self.is_there

    async def show(self, message: Message, replaces: int = 0) -> int | None:
        self.shown.append((message, replaces))
        number = replaces or len(self.shown)
        await self.held.wait()
        return number

    async def withdraw(self, number: int) -> None:
        self.withdrawn.append(number)


class World:
    """The surface between both."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.history = History()
        self.service = Service()
        self.asked: list[tuple[Actor | None, LoadBody]] = []
        self.reset: list[str] = []
        self.answer: LlmError | list[LoadLine] = []
        self.going = asyncio.Event()
        self.going.set()
        daemon = SimpleNamespace(
            history=self.history, settings=Settings(), started="2026-11-30T12:00:00.000Z", reset=self._reset
        )
        self.daemon = daemon
        api = SimpleNamespace(daemon=daemon, loading=self._loading)
        self.surface = Notifications(
            cast(ControlApi, api), cast(NotificationService, self.service), lambda: self.now_s, settle_s=0.0
        )

    async def _loading(self, body: LoadBody) -> AsyncGenerator[LoadLine]:
        self.asked.append((CALLER.get(), body))
        await self.going.wait()
        if isinstance(self.answer, LlmError):
            raise self.answer
        return self._lines(self.answer)

    async def _lines(self, lines: list[LoadLine]) -> AsyncGenerator[LoadLine]:
        for line in lines:
            yield line

    async def _reset(self, name: str) -> None:
        self.reset.append(name)
        if isinstance(self.answer, LlmError):
            raise self.answer

    def refuse(self, model: str = "a") -> None:
        error = LlmError(ErrorCode.INSUFFICIENT_VRAM, "no room", remedies=[REMEDY | OPTIONS])
        self.history.add(
            EventKind.REFUSED, model=model, message="no room", details=error.problem(), actor=DAEMON
        )

    def fall(self, state: InstanceState, run: str = "r") -> None:
        self.history.add(EventKind.STATE, model="a", run=run, state=state, message="gone", actor=DAEMON)

    async def until_shown(self, number: int) -> list[str]:
        await until(lambda: len(self.service.shown) >= number)
        return [message.summary for message, _ in self.service.shown]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  # any step of any task may make it true
            await asyncio.sleep(0)


async def idle() -> None:
    """All tasks have come to where they wait."""
    for _ in range(200):
        await asyncio.sleep(0)


def play(scenario: Callable[[World], Awaitable[T]]) -> T:
    async def run() -> T:
        world = World()
        await world.surface.start()
        await idle()
        try:
            return await scenario(world)
        finally:
            await world.surface.end()

    return asyncio.run(run())


def ready_line() -> LoadLine:
    return LoadLine(
        kind=LoadLineKind.READY, elapsed_s=1, token="token-12", instance=instance("a")
    )  # no secret


def test_the_smaller_plan_is_loaded_once_by_a_person_and_the_result_told() -> None:
    async def scenario(world: World) -> None:
        world.answer = [ready_line()]
        world.going.clear()
        world.refuse()
        await world.until_shown(1)
        await idle()
        for word in ("retry", "retry", "logs", "", "default"):
            world.service.on_action(1, word)
        world.service.on_action(77, "retry")
        await until(lambda: bool(world.asked))
        world.going.set()
        assert (await world.until_shown(2))[1] == "a is loaded"
        ((caller, body),) = world.asked
        assert caller is not None and (caller.kind, caller.program) == (ActorKind.CLIENT, "notification")
        assert (body.model, body.context_tokens) == ("a", 4096)
        assert world.service.shown[1][1] == 1  # in place of the refusal

    play(scenario)


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (LlmError(ErrorCode.UNKNOWN_MODEL, "there is no model a"), "There is no model a."),
        (
            LlmError(ErrorCode.INSUFFICIENT_VRAM, "no room either"),
            "What fits has changed meanwhile. No room either.",
        ),
        (
            [
                LoadLine(
                    kind=LoadLineKind.FAILED,
                    elapsed_s=1,
                    token="token-12",  # no secret
                    problem=LlmError(ErrorCode.ENGINE_FAILED, "it crashed").problem(),
                )
            ],
            "It crashed.",
        ),
    ],
)
def test_a_retry_in_vain_says_so(answer: Any, body: str) -> None:
    async def scenario(world: World) -> None:
        world.answer = answer
        world.refuse()
        await world.until_shown(1)
        await idle()
        world.service.on_action(1, "retry")
        await world.until_shown(2)
        message, replaces = world.service.shown[1]
        assert (message.summary, message.body, replaces) == ("a was not loaded", body, 1)

    play(scenario)


def test_a_button_that_is_pressed_before_its_number_is_known_counts() -> None:
    async def scenario(world: World) -> None:
        world.service.held.clear()
        world.fall(InstanceState.LATCHED)
        await world.until_shown(1)
        world.service.on_action(1, "reset")
        world.service.held.set()
        await until(lambda: world.reset == ["a"])
        # Put away before its number was known: the next one does not replace it.
        world.service.held.clear()
        world.refuse("b")
        await world.until_shown(2)
        world.service.on_closed(2)
        world.service.held.set()
        await idle()
        world.history.add(EventKind.STATE, model="b", run="r", state=InstanceState.FAILED, actor=DAEMON)
        await world.until_shown(3)
        assert [replaces for _, replaces in world.service.shown] == [0, 0, 0]

    play(scenario)


def test_a_reset_in_vain_says_so_and_one_that_helps_takes_the_notice_away() -> None:
    async def scenario(world: World) -> None:
        world.answer = LlmError(ErrorCode.NOT_LOADED, "a has failed")
        world.fall(InstanceState.LATCHED)
        await world.until_shown(1)
        await idle()
        world.service.on_action(1, "reset")
        assert (await world.until_shown(2))[1] == "a was not started again"
        world.fall(InstanceState.READY, "r2")
        await until(lambda: world.service.withdrawn == [1])

    play(scenario)


@pytest.mark.parametrize("is_shown", [False, True])
def test_that_it_is_loaded_is_not_taken_away_by_its_serving(is_shown: bool) -> None:
    """The answer to the button may come before the event."""

    async def scenario(world: World) -> None:
        world.answer = [ready_line()]
        world.refuse()
        await world.until_shown(1)
        await idle()
        world.service.is_there = is_shown
        world.service.on_action(1, "retry")
        await until(lambda: bool(world.asked))
        await idle()
        world.fall(InstanceState.READY)
        await idle()
        world.service.is_there = True
        world.service.on_change()
        assert (await world.until_shown(2))[1] == "a is loaded"
        await idle()
        assert world.service.withdrawn == []

    play(scenario)


def test_notices_wait_for_a_service_that_comes_soon_and_not_for_ever() -> None:
    async def scenario(world: World) -> None:
        world.service.is_there = False
        world.refuse("old")
        await idle()
        world.now_s = WAIT_S - 1
        for number in range(MOST_WAITING + 10):
            world.fall(InstanceState.LATCHED, f"r{number}")  # one key, whatever comes
        world.refuse("new")
        await idle()
        assert world.service.shown == []
        world.now_s = WAIT_S + 1
        world.service.is_there = True
        world.service.on_change()
        assert sorted(await world.until_shown(2)) == ["a stays down", "new was not loaded"]
        await idle()
        assert len(world.service.shown) == 2

    play(scenario)


def test_another_service_does_not_know_the_numbers_of_the_one_before() -> None:
    async def scenario(world: World) -> None:
        world.fall(InstanceState.LATCHED)
        await world.until_shown(1)
        await idle()
        world.service.has_asked = False
        world.service.on_change()
        world.service.on_action(1, "reset")
        world.fall(InstanceState.LATCHED, "r2")
        await world.until_shown(2)
        assert world.service.shown[1][1] == 0 and world.reset == []

    play(scenario)


def test_what_is_switched_off_is_not_shown() -> None:
    async def scenario(world: World) -> None:
        world.daemon.settings = Settings(notifications="latched")
        world.refuse()
        world.fall(InstanceState.FAILED)
        world.fall(InstanceState.LATCHED)
        assert await world.until_shown(1) == ["a stays down"]
        await idle()
        assert len(world.service.shown) == 1

    play(scenario)


# --- the transport ------------------------------------------------------------------------------------------------


class Bus:
    """Answers as told."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {
            "GetNameOwner": RemoteError("org.freedesktop.DBus.Error.NameHasNoOwner", "nobody"),
            "ListActivatableNames": ([],),
            "GetCapabilities": (["body"],),
            "Notify": (5,),
            "CloseNotification": (),
            "StartServiceByName": (1,),
        }
        self.asked: list[tuple[str, str]] = []
        self.handlers: dict[str, Callable[[Signal], None]] = {}
        self.state: Callable[[BusState], None] = lambda _: None

    async def subscribe(self, match: Any, handler: Callable[[Signal], None]) -> None:
        self.handlers[match.member] = handler

    def add_state_handler(self, handler: Callable[[BusState], None]) -> None:
        self.state = handler

    async def method(self, target: Any, member: str, *_: Any, **__: Any) -> tuple[Any, ...]:
        self.asked.append((target.destination, member))
        answer = self.answers[member]
        if isinstance(answer, Exception):
            raise answer
        return cast(tuple[Any, ...], answer)

    def owned_by(self, owner: str, sender: str = "org.freedesktop.DBus") -> None:
        told = ("org.freedesktop.DBus", "NameOwnerChanged", (NAME, "", owner))
        self.handlers["NameOwnerChanged"](Signal("/org/freedesktop/DBus", *told, sender))

    def signal(self, member: str, *arguments: Any, sender: str = ":1.5") -> None:
        self.handlers[member](Signal(PATH, NAME, member, arguments, sender))


def talk(scenario: Callable[[Bus, NotificationService, list[float]], Awaitable[None]]) -> None:
    async def run() -> None:
        bus, now = Bus(), [0.0]
        service = NotificationService(cast(BusThread, bus), lambda: now[0])
        await service.start()
        try:
            await scenario(bus, service, now)
        finally:
            service.end()

    asyncio.run(run())


def test_calls_go_to_the_owner_and_only_its_signals_count() -> None:
    async def scenario(bus: Bus, service: NotificationService, _: list[float]) -> None:
        heard: list[Any] = []
        service.on_action = lambda number, key: heard.append((number, key))
        service.on_closed = heard.append
        bus.signal("ActionInvoked", 5, "retry", sender="")  # nobody is there yet
        bus.owned_by(":1.9", sender=":1.66")  # a stranger's word
        assert not await service.ready()
        bus.owned_by(":1.5")
        assert await service.ready() and service.capabilities == {"body"}
        assert await service.show(Message("s", actions={"retry": "Retry"})) == 5
        await service.withdraw(5)
        calls = [(who, what) for who, what in bus.asked if who.startswith(":")]
        assert calls == [(":1.5", each) for each in ("GetCapabilities", "Notify", "CloseNotification")]
        for sender in (":1.66", "", NAME):
            bus.signal("ActionInvoked", 5, "retry", sender=sender)
        bus.signal("ActionInvoked", "5", "retry")
        bus.signal("NotificationClosed", 5)
        assert heard == []
        bus.signal("ActionInvoked", 5, "retry")
        bus.signal("NotificationClosed", 5, 2)
        assert heard == [(5, "retry"), 5]

    talk(scenario)


def test_capabilities_are_read_anew_of_each_owner_and_of_a_bus_that_is_back() -> None:
    async def scenario(bus: Bus, service: NotificationService, _: list[float]) -> None:
        changes: list[bool] = []
        service.on_change = lambda: changes.append(service.has_asked)
        for owner, words in ((":1.5", ["body"]), (":1.6", ["actions", 7]), (":1.7", "nonsense")):
            bus.answers["GetCapabilities"] = (words,)
            bus.owned_by(owner)
            assert await service.ready() and await service.ready()
            assert service.capabilities == (
                {str(each) for each in words} if isinstance(words, list) else set()
            )
        assert changes == [False, False, False]
        assert [what for _, what in bus.asked].count("GetCapabilities") == 3
        bus.state(BusState.LOST)
        assert not service.has_asked
        bus.answers["GetNameOwner"] = (":1.8",)
        bus.state(BusState.BACK)
        await idle()
        assert await service.ready()

    talk(scenario)


def test_one_that_can_be_started_is_and_one_that_does_not_come_up_is_let_alone() -> None:
    async def scenario(bus: Bus, service: NotificationService, now: list[float]) -> None:
        assert not await service.ready()
        bus.answers["ListActivatableNames"] = ([NAME],)
        bus.answers["StartServiceByName"] = RemoteError(
            "org.freedesktop.DBus.Error.Spawn.ChildExited", "no display"
        )
        assert not await service.ready()
        assert not await service.ready()
        assert [what for _, what in bus.asked].count("StartServiceByName") == 1
        now[0] = transport.START_AGAIN_S
        bus.answers |= {"StartServiceByName": (1,), "GetNameOwner": (":1.5",)}
        assert await service.ready()

    talk(scenario)


def test_one_that_hangs_is_let_alone_for_a_while() -> None:
    async def scenario(bus: Bus, service: NotificationService, now: list[float]) -> None:
        bus.owned_by(":1.5")
        assert await service.ready()
        bus.answers["Notify"] = unavailable("not answered", timed_out=True)
        assert await service.show(Message("s")) is None
        before = len(bus.asked)
        assert not await service.ready() and len(bus.asked) == before
        now[0] = transport.SILENT_S
        assert await service.ready()
        bus.answers["Notify"] = RemoteError(
            "org.freedesktop.Notifications.Error.ExcessNotifications", "too many"
        )
        assert await service.show(Message("s")) is None
        assert await service.ready()
        for reply in ((), ("five",)):
            bus.answers["Notify"] = reply
            assert await service.show(Message("s")) is None

    talk(scenario)
