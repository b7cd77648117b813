"""The machine goes to sleep and comes back: a stand-in logind on a private system bus, a stand-in card and engine."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lllm3090d.settings import NoticeTopic
from lllm3090d.wire_sleep import SuspendView
from tests.fakes.logind import FakeLogind, Lock
from tests.fakes.nvml import GPU_IS_LOST
from tests.system.harness import DAEMON_UNIT, eventually, model_units, properties, systemctl
from tests.system.rig import Lines, Rig, now_s, rigged
from tests.system.scenes import PrivateBus

pytestmark = pytest.mark.system
MODELS = {"first": 5.0, "second": 4.0}
MEMORY_LATE_S = 0.7
READING = "nvmlDeviceGetMemoryInfo_v2"
LIMIT_S = 60.0
# What logind gives where the time is not what is tested: enough for a machine that stands still for a while.
DELAY_S = 30.0


class Night:
    """The rig, and logind."""

    def __init__(self, rig: Rig, logind: FakeLogind) -> None:
        self.rig = rig
        self.logind = logind

    def view(self) -> SuspendView:
        return SuspendView.model_validate(self.rig.service.request("GET", "/v1/status").json()["suspend"])

    def fall_asleep(self, number: int = 1) -> Lock:
        """Tell it, and wait for the lock to be released."""
        lock = self.logind.lock(number)
        assert not lock.is_closed()
        self.logind.sleep()
        assert lock.is_closed(LIMIT_S), "the lock was never released"
        return lock

    def until_ready(self, *names: str) -> None:
        eventually(
            lambda: all(self.rig.states().get(name) == "ready" for name in names),
            what=f"{names} are ready: {self.rig.states()}",
        )
        eventually(lambda: not self.view().restoring, what="nothing is left to be loaded again")

    def told(self, kind: str) -> list[str]:
        return [each["message"] for each in self.rig.events(kind)]


@pytest.fixture
def night(private_bus: PrivateBus, tmp_path: Path) -> Iterator[Callable[..., Night]]:
    """Makes a daemon that hears of sleep."""
    with ExitStackOfNights(private_bus, tmp_path) as make:
        yield make


class ExitStackOfNights:
    """Makes one night, and ends it."""

    def __init__(self, bus: PrivateBus, directory: Path) -> None:
        self._bus = bus
        self._directory = directory
        self._ends: list[Callable[[], object]] = []

    def __call__(self, delay_s: float = DELAY_S, **settings: str) -> Night:
        self._bus.start()
        logind = FakeLogind(self._bus.address, delay_s)
        self._ends.append(logind.close)
        environment = {"DBUS_SYSTEM_BUS_ADDRESS": self._bus.address}
        context = rigged(self._directory, MODELS, settings, environment)
        rig = context.__enter__()
        self._ends.append(lambda: context.__exit__(None, None, None))
        return Night(rig, logind)

    def __enter__(self) -> ExitStackOfNights:
        return self

    def __exit__(self, *_: object) -> None:
        for end in reversed(self._ends):
            end()


@dataclass(frozen=True)
class AtRelease:
    """What there was at the very moment at which the lock was released."""

    engines: dict[int, int]
    units: dict[str, str]
    used_bytes: int  # of the card, as its driver says
    after_s: float


NOTHING: tuple[dict[int, int], dict[str, str], int] = ({}, {}, 0)


def seen_at_release(night: Night) -> Future[AtRelease]:
    """To be asked for before the machine goes to sleep."""
    lock, began_s = night.logind.lock(), now_s()
    found: Future[AtRelease] = Future()

    def wait() -> None:
        if not lock.is_closed(LIMIT_S):
            found.set_exception(AssertionError("the lock was never released"))
            return
        after_s = now_s() - began_s
        card = night.rig.service.request("GET", "/v1/status").json()["card"]
        found.set_result(AtRelease(night.rig.on_card(), model_units(), card["used_bytes"], after_s))

    threading.Thread(target=wait, daemon=True).start()
    return found


def test_the_unload_is_complete_before_the_lock_is_released_and_after_the_return_all_is_ready(
    night: Callable[..., Night],
) -> None:
    it = night()
    rig = it.rig
    rig.behave(hold_after_exit_s=MEMORY_LATE_S)
    rig.load_ready("first", pin=True)
    rig.load_ready("second")
    view = it.view()
    assert (view.policy, view.phase, view.delays, view.delay_s) == ("unload", "awake", True, DELAY_S)
    assert rig.on_card() and model_units()

    at_release = seen_at_release(it)
    it.logind.sleep()
    seen = at_release.result(LIMIT_S)
    assert (seen.engines, seen.units, seen.used_bytes) == NOTHING
    assert MEMORY_LATE_S < seen.after_s < it.logind.delay_s
    asleep = it.view()
    assert (asleep.phase, asleep.delays) == ("asleep", False)
    assert asleep.restoring == ("second", "first")  # what was used last comes first
    assert rig.states() == {}
    assert "unloaded before the sleep: second, first" in it.told("suspend")[-1]

    it.logind.wake()
    it.until_ready("second", "first")
    instances = rig.service.instances()
    assert instances["first"]["pinned"] and not instances["second"]["pinned"]
    loaded = [each["model"] for each in rig.events("state") if each["state"] == "ready"][2:]
    assert loaded == ["second", "first"]
    # Told when it is written down that nothing is left.
    told = ["loaded again: second", "loaded again: first"]
    eventually(lambda: it.told("resume")[-2:] == told, what=f"{told} is told: {it.told('resume')}")
    (notice,) = rig.notices()
    assert (notice.topic, notice.body) == (NoticeTopic.RESTORED, "second, first")
    assert not it.logind.lock(2).is_closed()  # for the next night
    rig.check_books()


def test_loads_wait_for_the_return(night: Callable[..., Night]) -> None:
    it = night()
    it.fall_asleep()
    waiting = it.rig.load_later("first")
    assert it.rig.until_waits("first")["why"] == "the machine to wake up"
    hasty: Lines = it.rig.service.load("second", wait=False)
    assert hasty[-1]["code"] == "queue_timed_out" and "wake up" in hasty[-1]["detail"]
    assert model_units() == {}
    it.logind.wake()
    assert waiting.result(LIMIT_S)[-1]["kind"] == "ready"


def test_a_load_under_way_is_stopped_and_loaded_again(night: Callable[..., Night]) -> None:
    it = night()
    it.rig.behave(load_held=True)
    under_way = it.rig.load_later("first")
    it.rig.until("first", "loading")
    it.fall_asleep()
    last = under_way.result(LIMIT_S)[-1]
    assert last["kind"] == "failed" and "goes to sleep" in last["problem"]["detail"]
    assert it.rig.on_card() == {}
    it.rig.behave(load_held=False)
    it.logind.wake()
    it.until_ready("first")


def test_busy_and_pinned_models_go_too(night: Callable[..., Night]) -> None:
    it = night()
    instance = it.rig.load_ready("first", pin=True)
    it.rig.behave(held=True)
    asked = it.rig.ask_later(instance)
    it.fall_asleep()
    assert it.rig.on_card() == {} and model_units() == {}
    assert asked.exception(LIMIT_S) is not None or asked.result().status != 200
    it.rig.behave(held=False)
    it.logind.wake()
    it.until_ready("first")
    assert it.rig.service.instances()["first"]["pinned"]


def test_with_the_card_in_error_nothing_is_loaded_until_it_can_be_read(night: Callable[..., Night]) -> None:
    it = night()
    it.rig.load_ready("first")
    it.fall_asleep()
    it.rig.nvml.fail(READING, GPU_IS_LOST)
    it.logind.wake()
    view = eventually(lambda: view if (view := it.view()).phase == "blocked" else None)
    assert view.problem is not None and view.problem["code"] == "card_unreadable"
    assert view.restoring == ("first",)
    text = it.rig.service.ctl("status").stdout
    assert "Not loaded again after a sleep, for the card is in error: first" in " ".join(text.split())
    assert f"suspend: {view.problem['title']}" in text
    assert model_units() == {}
    assert any("nothing is loaded again" in each for each in it.told("resume"))
    it.rig.nvml.recover()
    it.until_ready("first")
    assert it.view().phase == "awake" and it.view().problem is None
    assert "the card can be read again" in it.told("resume")


def test_keep_leaves_everything_as_it_is(night: Callable[..., Night]) -> None:
    it = night(suspend="keep")
    before = it.rig.load_ready("first")
    assert it.logind.locks == [] and not it.view().delays
    it.logind.sleep()
    eventually(lambda: it.view().phase == "asleep")
    it.logind.wake()
    eventually(lambda: it.view().phase == "awake")
    assert it.rig.service.instances()["first"]["run"] == before["run"]
    assert "stay loaded: first" in it.told("suspend")[0]


def test_stop_unloads_and_loads_nothing(night: Callable[..., Night]) -> None:
    it = night(suspend="stop")
    it.rig.load_ready("first")
    it.fall_asleep()
    assert it.rig.on_card() == {} and it.view().restoring == ()
    it.logind.wake()
    it.logind.lock(2)
    assert it.told("resume") == ["the machine is awake"]
    assert it.rig.states() == {}
    it.rig.load_ready("first")


def test_an_engine_that_ignores_sigterm_is_killed_in_time(night: Callable[..., Night]) -> None:
    """After half of what logind gives, long before systemd would do it."""
    it = night(delay_s=8.0, stop_timeout_s="300")
    it.rig.behave(ignore_sigterm=True)
    it.rig.load_ready("first")
    at_release = seen_at_release(it)
    it.logind.sleep()
    seen = at_release.result(LIMIT_S)
    assert (seen.engines, seen.units, seen.used_bytes) == NOTHING
    it.rig.behave(ignore_sigterm=False)
    it.logind.wake()
    it.until_ready("first")


def test_memory_that_does_not_come_back_in_time_is_said(night: Callable[..., Night]) -> None:
    it = night(delay_s=1.5)
    it.rig.behave(hold_after_exit_s=600.0)
    first = it.rig.load_ready("first")
    it.fall_asleep()
    text = it.told("suspend")[-1]
    assert text.startswith("not all is unloaded before the sleep") and "MiB are not back" in text
    details: dict[str, Any] = it.rig.events("suspend")[-1]["details"]
    assert details["complete"] is False and details["left_bytes"] > 0
    it.logind.wake()
    it.rig.behave(hold_after_exit_s=0.0)
    it.rig.give_back(first)
    it.until_ready("first")


def kill_for_good(rig: Rig) -> None:
    """As a crash that nobody repairs before the next start."""
    pid = rig.service.main_pid()
    drop_in = rig.service.units_dir / f"{DAEMON_UNIT}.d" / "once.conf"
    drop_in.write_text("[Service]\nRestart=no\n")
    systemctl("daemon-reload")
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: properties(DAEMON_UNIT, "ActiveState")["ActiveState"] == "failed")
    drop_in.unlink()
    systemctl("daemon-reload")
    systemctl("reset-failed", DAEMON_UNIT)


def test_a_daemon_that_is_killed_while_asleep_loads_again_after_the_return(
    night: Callable[..., Night],
) -> None:
    it = night()
    it.rig.load_ready("first", pin=True, context_tokens=4096)
    it.rig.load_ready("second")
    it.fall_asleep()
    it.rig.kill_daemon()
    assert it.view().restoring == ("second", "first")
    eventually(lambda: it.view().phase == "asleep")
    assert it.rig.states() == {}
    it.logind.wake()
    it.until_ready("second", "first")
    first = it.rig.service.instances()["first"]
    assert first["pinned"] and first["context_tokens"] == 4096


def test_a_return_that_the_daemon_did_not_live_to_see(night: Callable[..., Night]) -> None:
    it = night()
    it.rig.load_ready("first")
    it.fall_asleep()
    kill_for_good(it.rig)
    it.logind.wake()
    it.rig.service.start()
    it.until_ready("first")
    eventually(lambda: "loaded again: first" in it.told("resume"), what="it is written down")
    # Loaded again once, and not once more by the next start.
    it.rig.unload("first")
    it.rig.kill_daemon()
    assert it.view().restoring == () and it.rig.states() == {}


def test_what_a_person_unloads_meanwhile_is_not_loaded_again(night: Callable[..., Night]) -> None:
    it = night()
    it.rig.load_ready("first")
    it.rig.load_ready("second")
    it.fall_asleep()
    it.rig.nvml.fail(READING, GPU_IS_LOST)
    it.logind.wake()
    eventually(lambda: it.view().phase == "blocked")
    assert it.rig.unload("first")["name"] == "first"
    assert it.rig.unload("first")["code"] == "not_loaded"
    it.rig.nvml.recover()
    it.until_ready("second")
    assert set(it.rig.states()) == {"second"}


def test_two_nights_and_a_sleep_that_did_not_happen(night: Callable[..., Night]) -> None:
    it = night()
    it.rig.load_ready("first")
    it.logind.lock(1)
    it.logind.sleep()
    it.logind.wake()  # another program forbade it
    it.logind.lock(2)
    it.until_ready("first")
    it.fall_asleep(2)
    assert it.rig.on_card() == {}
    it.logind.wake()
    it.until_ready("first")
    it.rig.check_books()


def test_a_failed_model_is_not_started_again_before_the_return(night: Callable[..., Night]) -> None:
    it = night(restart_failed="true", restart_pause_s="3")
    dead = it.rig.load_ready("first")
    os.kill(dead["main_pid"], signal.SIGKILL)
    it.rig.until("first", "failed")
    it.fall_asleep()

    def is_due() -> bool:
        now = it.rig.service.instances()["first"]
        return bool(now["state"] == "failed" and now["retry_in_s"] == 0.0)

    eventually(is_due, what="its start is due")
    assert it.rig.on_card() == {}
    it.logind.wake()
    it.until_ready("first")
    assert it.rig.service.instances()["first"]["attempt"] == 1


def logged_by(pid: int) -> str:
    command = ["journalctl", "--no-pager", "-o", "cat", f"_PID={pid}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_without_a_system_bus_the_daemon_works_and_says_so_once(tmp_path: Path) -> None:
    nowhere = {"DBUS_SYSTEM_BUS_ADDRESS": f"unix:path={tmp_path}/none"}
    with rigged(tmp_path, {"first": 5.0}, None, nowhere) as rig:
        rig.load_ready("first")
        view = Night.view(Night(rig, None))  # type: ignore[arg-type]  # there is none, which is the point
        assert view.logind_problem is not None and view.logind_problem["code"] == "logind_unavailable"
        words, pid = "nobody tells when this machine goes to sleep", rig.service.main_pid()
        eventually(lambda: words in logged_by(pid), what="journald has it")
        assert logged_by(pid).count(words) == 1
        assert "suspend: " in rig.service.ctl("status").stdout
