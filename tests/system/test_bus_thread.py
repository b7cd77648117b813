"""The bus thread against a real bus of its own, which may hang, die and come back."""

import asyncio
import threading

import pytest
from gi.repository import GLib

from lllm3090d.bus import thread
from lllm3090d.bus.messages import Match, RemoteError, Signal, Target
from lllm3090d.bus.thread import BusState, BusThread
from lllm3090d.errors import ErrorCode, LlmError
from tests.system.scenes import BUS, EVENT_TIMEOUT_S, PrivateBus, on

pytestmark = pytest.mark.system


@pytest.mark.parametrize(
    "address", ["unix:path=/nonexistent/bus", "nonsense", "unix:nonsense", "tcp:host=x;"]
)
def test_no_bus_is_said_at_once_and_leaves_no_thread(address: str) -> None:
    async def scenario() -> None:
        bus = BusThread(address)
        with pytest.raises(LlmError, match=f"No D-Bus at {address}: .+") as caught:
            await bus.start()
        assert caught.value.code is ErrorCode.BUS_UNAVAILABLE
        assert "bus" not in {one.name for one in threading.enumerate()}
        with pytest.raises(LlmError, match="closed"):
            await bus.ping()

    asyncio.run(scenario())


def test_a_bus_that_hangs_is_given_up(private_bus: PrivateBus, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        private_bus.start()
        private_bus.pause(paused=True)
        try:
            with pytest.raises(LlmError, match=r"no answer within 0\.2 s"):
                await BusThread(private_bus.address).start()
        finally:
            private_bus.pause(paused=False)

    monkeypatch.setattr(thread, "CONNECT_TIMEOUT_S", 0.2)
    asyncio.run(scenario())


def test_functions_run_on_the_thread_and_their_errors_come_back(private_bus: PrivateBus) -> None:
    async def scenario(bus: BusThread) -> None:
        assert await bus.call(lambda _: threading.current_thread().name) == "bus"
        assert str(await bus.call(lambda it: it.con.get_unique_name())).startswith(":")
        with pytest.raises(ZeroDivisionError):
            await bus.call(lambda _: 1 // 0)
        assert 0 <= await bus.ping(EVENT_TIMEOUT_S) < EVENT_TIMEOUT_S

    on(private_bus, scenario)


def test_exit_on_close_is_off(private_bus: PrivateBus) -> None:
    async def scenario(bus: BusThread) -> bool:
        return await bus.call(lambda it: bool(it.con.get_exit_on_close()))

    assert on(private_bus, scenario) is False


def test_methods_answer_refuse_or_are_not_there(private_bus: PrivateBus) -> None:
    async def scenario(bus: BusThread) -> None:
        (names,) = await bus.method(BUS, "ListNames")
        assert "org.freedesktop.DBus" in names
        with pytest.raises(RemoteError) as refused:
            await bus.method(BUS, "NoSuchMethod")
        assert refused.value.name == "org.freedesktop.DBus.Error.UnknownMethod"
        assert "GDBus.Error" not in refused.value.message
        with pytest.raises(LlmError) as nobody:
            await bus.method(Target("org.example.Nobody", "/", "org.example"), "Hello")
        assert nobody.value.code is ErrorCode.BUS_UNAVAILABLE
        with pytest.raises(TypeError, match="the arguments of GetNameOwner are s, not a tuple"):
            await bus.method(BUS, "GetNameOwner", GLib.Variant("s", "org.example.Nobody"))

    on(private_bus, scenario)


def test_calls_do_not_block_each_other_and_time_out_alone(private_bus: PrivateBus) -> None:
    async def scenario(bus: BusThread) -> None:
        private_bus.pause(paused=True)
        try:
            hanging = asyncio.create_task(bus.method(BUS, "ListNames", timeout_s=0.3))
            await bus.ping(EVENT_TIMEOUT_S)  # the thread is free while the bus hangs
            with pytest.raises(LlmError, match=r"ListNames was not answered within 0\.3 s"):
                await hanging
        finally:
            private_bus.pause(paused=False)
        assert (await bus.method(BUS, "GetId"))[0]

    on(private_bus, scenario)


def test_a_blocked_thread_does_not_answer_a_ping(private_bus: PrivateBus) -> None:
    async def scenario(bus: BusThread) -> None:
        release = threading.Event()
        blocking = asyncio.create_task(bus.call(lambda _: release.wait(EVENT_TIMEOUT_S)))
        await asyncio.sleep(0)  # lets the task hand its function over
        with pytest.raises(LlmError, match="did not answer within"):
            await bus.ping(timeout_s=0.1)
        release.set()
        assert await blocking
        await bus.ping(EVENT_TIMEOUT_S)

    on(private_bus, scenario)


def test_a_cancelled_call_harms_nobody(private_bus: PrivateBus) -> None:
    async def scenario(bus: BusThread) -> None:
        task = asyncio.create_task(bus.method(BUS, "ListNames"))
        await asyncio.sleep(0)  # lets the task make its call
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await bus.method(BUS, "GetId"))[0]

    on(private_bus, scenario)


def test_closing_answers_what_still_waits(private_bus: PrivateBus) -> None:
    async def scenario(bus: BusThread) -> None:
        private_bus.pause(paused=True)
        try:
            hanging = asyncio.create_task(bus.method(BUS, "ListNames", timeout_s=60))
            await bus.ping(EVENT_TIMEOUT_S)  # the call is under way
            await bus.close()
            with pytest.raises(LlmError) as caught:
                await hanging
            assert caught.value.code is ErrorCode.BUS_UNAVAILABLE
            await bus.close()  # twice is fine
        finally:
            private_bus.pause(paused=False)

    on(private_bus, scenario)


def test_a_lost_bus_is_noticed_found_again_and_its_signals_with_it(private_bus: PrivateBus) -> None:
    async def scenario(bus: BusThread) -> None:
        states: asyncio.Queue[BusState] = asyncio.Queue()
        bus.add_state_handler(states.put_nowait)
        signals: asyncio.Queue[Signal] = asyncio.Queue()
        match = Match(
            "org.freedesktop.DBus", "org.freedesktop.DBus", "NameOwnerChanged", arg0="org.example.A"
        )
        await bus.subscribe(match, signals.put_nowait)

        async def own_and_hear() -> None:
            await bus.method(BUS, "RequestName", GLib.Variant("(su)", ("org.example.A", 4)))
            arrived = await asyncio.wait_for(signals.get(), EVENT_TIMEOUT_S)
            assert arrived.arguments[:2] == ("org.example.A", "")

        await own_and_hear()
        hanging = asyncio.create_task(bus.method(BUS, "Unanswered", timeout_s=60))
        private_bus.kill()
        assert await asyncio.wait_for(states.get(), EVENT_TIMEOUT_S) is BusState.LOST
        with pytest.raises((LlmError, RemoteError)):
            await hanging
        for attempt in (bus.call(lambda _: None), bus.method(BUS, "GetId")):
            with pytest.raises(LlmError, match="is lost") as caught:
                await attempt
            assert caught.value.code is ErrorCode.BUS_UNAVAILABLE
        await bus.ping(EVENT_TIMEOUT_S)
        private_bus.start()
        assert await asyncio.wait_for(states.get(), EVENT_TIMEOUT_S) is BusState.BACK
        await own_and_hear()

    on(private_bus, scenario)
