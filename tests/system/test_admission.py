"""Admission with the real API, a real systemd and a stand-in card: who gets in, for whom others go, who waits for what.

Nothing here waits for time to pass: each test waits until something is so.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.nvml import FakeProcess
from tests.system.harness import eventually, model_units, systemctl
from tests.system.rig import GIB, MIB, ROOM_MIB, Rig, rigged
from tests.system.rounds import RIVALS, cycles, race

pytestmark = pytest.mark.system

MODELS = {**RIVALS, "small": 1.0}  # GiB: alpha and beta exclude each other, small goes with both
STUBBORN_S = "300"  # for an engine that is to be stopping until the test itself ends it
RACES, CYCLES = 20, 10  # python -m bench.race makes 200 and 100


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with rigged(tmp_path, MODELS) as made:
        yield made


# --- two at once ------------------------------------------------------------------------------------------------------


def test_race(rig: Rig) -> None:
    tally = race(rig, RACES)
    assert tally.rounds == RACES
    assert 0 < tally.most_reserved_mib <= ROOM_MIB


def test_an_eviction_and_reload_cycle_leaves_ledger_and_card_equal(rig: Rig) -> None:
    assert len(cycles(rig, CYCLES)) == CYCLES


# --- victims ----------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_one_goes_and_only_if_that_makes_room(rig: Rig) -> None:
    rig.load_ready("small")
    rig.load_ready("alpha")
    rig.load_ready("beta")
    assert rig.states() == {"small": "ready", "beta": "ready"}  # small would not have made room
    (event,) = rig.events("eviction")
    assert (event["model"], event["message"]) == ("alpha", "makes room for beta")
    rig.check_books()
    problem = rig.load("alpha", evict=False)
    assert problem["code"] == "insufficient_vram"
    assert set(rig.states()) == {"small", "beta"}


def test_a_plan_says_what_its_load_would_unload(rig: Rig) -> None:
    """What a load would get is what a plan shows: it is not refused for models that would make room."""
    rig.load_ready("alpha")
    plan = rig.service.request("POST", "/v1/plan", {"model": "beta"}).json()
    assert plan["fits"]
    assert "a load unloads alpha first, idle now, to make room" in plan["notes"]
    assert rig.states() == {"alpha": "ready"}
    assert rig.load_ready("beta")["context_tokens"] == plan["context_tokens"]
    rig.service.request("POST", "/v1/models/beta/pin", {"pinned": True})
    assert rig.service.request("POST", "/v1/plan", {"model": "alpha"}).json()["code"] == "insufficient_vram"
    again = rig.service.request("POST", "/v1/plan", {"model": "beta"}).json()
    # As it would be loaded anew, with what it holds now given back first.
    assert again["fits"]
    assert again["given_back_bytes"] > 0
    assert (
        rig.service.request("POST", "/v1/load", {"model": "alpha", "least_context_tokens": 1024}).json()[
            "code"
        ]
        == "invalid_request"
    )


def test_a_victim_that_ignores_sigterm_is_killed(rig: Rig) -> None:
    rig.restart(stop_timeout_s="0.5")
    rig.behave(ignore_sigterm=True)
    stubborn = rig.load_ready("alpha")
    rig.behave(ignore_sigterm=False)
    rig.load_ready("beta")
    assert not Path(f"/proc/{stubborn['main_pid']}").exists()
    rig.check_books()


def test_a_busy_victim_is_waited_for(rig: Rig) -> None:
    alpha = rig.load_ready("alpha")
    rig.behave(held=True)
    asked = rig.ask_later(alpha)
    load = rig.load_later("beta")
    eventually(lambda: "alpha, which is busy" in rig.until_waits("beta")["why"], what="that is told")
    assert rig.states().keys() == {"alpha"}
    rig.behave(held=False)
    assert asked.result(60).status == 200  # nobody was cut off
    lines = load.result(60)
    assert lines[0]["state"] == "queued"
    assert lines[-1]["kind"] == "ready"
    assert rig.states() == {"beta": "ready"}
    rig.check_books()


def test_a_victim_that_stays_busy_outlasts_the_queue(rig: Rig) -> None:
    rig.restart(queue_timeout_s="1.5")
    alpha = rig.load_ready("alpha")
    rig.behave(held=True)
    asked = rig.ask_later(alpha)
    problem = rig.load("beta")["problem"]
    assert problem["code"] == "queue_timed_out"
    assert "alpha, which is busy" in problem["detail"]
    assert rig.states() == {"alpha": "busy"}
    rig.behave(held=False)
    assert asked.result(60).status == 200
    rig.check_books()


def test_those_who_wait_are_served_in_the_order_of_their_coming(rig: Rig) -> None:
    alpha = rig.load_ready("alpha")
    rig.behave(held=True)
    asked = rig.ask_later(alpha)
    first = rig.load_later("beta")
    rig.until_waits("beta")
    second = rig.load_later("small")
    assert "its turn, after beta" in rig.until_waits("small")["why"]  # though it would fit now
    assert [each["name"] for each in rig.pending()] == ["beta", "small"]
    rig.behave(held=False)
    assert asked.result(60).status == 200
    assert [load.result(60)[-1]["kind"] for load in (first, second)] == ["ready", "ready"]
    assert rig.states() == {"beta": "ready", "small": "ready"}
    rig.check_books()


def test_a_model_that_has_just_come_stays_for_a_while(rig: Rig) -> None:
    rig.restart(least_residency_s="300")
    rig.load_ready("alpha")
    problem = rig.load("beta", wait=False)
    assert problem["code"] == "queue_timed_out"
    assert "alpha, which has been loaded for less than 300 s" in problem["detail"]
    assert rig.states() == {"alpha": "ready"}


def test_a_pinned_model_is_in_the_way_until_it_is_unpinned(rig: Rig) -> None:
    rig.load_ready("alpha", pin=True)
    refused = rig.service.ctl("load", "beta", check=False)
    assert refused.returncode == 5
    assert re.search(r"alpha .*pinned", refused.stderr)
    assert "lllm3090ctl unload alpha" in refused.stderr
    rig.kill_daemon()
    assert rig.service.instances()["alpha"]["pinned"] is True  # it outlives the daemon
    assert rig.load("beta")["code"] == "insufficient_vram"
    rig.service.ctl("unpin", "alpha")
    rig.load_ready("beta")
    assert rig.states() == {"beta": "ready"}
    rig.check_books()


# --- those who change their mind --------------------------------------------------------------------------------------


def cancelled(rig: Rig, token: str) -> dict[str, Any]:
    answer = rig.service.request("POST", "/v1/cancel", {"token": token})
    assert answer.status == 200, answer.body
    document: dict[str, Any] = answer.json()
    return document


def test_cancelled_while_queued(rig: Rig) -> None:
    alpha = rig.load_ready("alpha")
    rig.behave(held=True)
    asked = rig.ask_later(alpha)
    load = rig.load_later("beta", token="beta-load-1")
    rig.until_waits("beta")
    cancelled(rig, "beta-load-1")
    assert load.result(60)[-1]["problem"]["code"] == "load_cancelled"
    assert rig.pending() == []
    rig.behave(held=False)
    assert asked.result(60).status == 200
    assert rig.service.instances()["alpha"]["main_pid"] == alpha["main_pid"]
    rig.check_books()


def test_cancelled_while_its_victim_is_stopping(rig: Rig) -> None:
    rig.restart(stop_timeout_s=STUBBORN_S)
    rig.behave(ignore_sigterm=True)
    alpha = rig.load_ready("alpha", context_tokens=2048, parallel=1)
    rig.behave(ignore_sigterm=False)
    load = rig.load_later("beta", token="beta-load-1")
    rig.until("alpha", "stopping")
    cancelled(rig, "beta-load-1")
    rig.kill_engine(alpha)
    assert load.result(60)[-1]["problem"]["code"] == "load_cancelled"
    rig.until("alpha", "ready")  # what was evicted for nothing comes back as it was
    restored = rig.service.instances()["alpha"]
    assert restored["run"] != alpha["run"]
    assert (restored["context_tokens"], restored["parallel"]) == (2048, 1)
    rig.check_books()


def test_cancelled_while_loading(rig: Rig) -> None:
    rig.load_ready("alpha")
    rig.behave(load_held=True)
    load = rig.load_later("beta", token="beta-load-1")
    rig.until("beta", "loading")
    rig.behave(load_held=False, vram_mib_of={"alpha": rig.engine["vram_mib_of"]["alpha"], "beta": 0})
    rig.behave(load_held=True)
    assert cancelled(rig, "beta-load-1")["stopped"] is True
    rig.behave(load_held=False)
    assert load.result(60)[-1]["problem"]["code"] == "load_cancelled"
    rig.until("alpha", "ready")
    assert rig.states() == {"alpha": "ready"}
    rig.check_books()


def test_unload_during_load(rig: Rig) -> None:
    rig.behave(load_held=True)
    load = rig.load_later("alpha")
    rig.until("alpha", "loading")
    assert rig.unload("alpha")["name"] == "alpha"
    assert load.result(60)[-1]["problem"]["code"] == "load_cancelled"
    assert rig.states() == {}
    rig.behave(load_held=False)
    rig.check_books()
    rig.load_ready("alpha")


def test_load_during_unload(rig: Rig) -> None:
    rig.restart(stop_timeout_s=STUBBORN_S)
    rig.behave(ignore_sigterm=True)
    first = rig.load_ready("alpha")
    rig.behave(ignore_sigterm=False)
    unload = rig.clients.submit(rig.unload, "alpha")
    rig.until("alpha", "stopping")
    load = rig.load_later("alpha")
    other = rig.load_later("beta")  # does not fit until alpha is gone, and alpha was first
    rig.until_waits("beta")
    rig.kill_engine(first)
    assert unload.result(60)["run"] == first["run"]
    assert load.result(60)[-1]["kind"] == other.result(60)[-1]["kind"] == "ready"
    assert rig.states().keys() in ({"alpha"}, {"beta"})
    rig.check_books()


# --- strangers, and engines that are not what they said ---------------------------------------------------------------


def test_a_stranger_takes_20_gb_between_reading_and_load(rig: Rig) -> None:
    assert rig.service.request("POST", "/v1/plan", {"model": "alpha"}).json()["fits"] is True
    rig.nvml.add_process(FakeProcess(os.getpid(), 20 * GIB, "g"))
    problem = rig.load("alpha")
    assert (problem["code"], problem["details"]["cause"]) == ("insufficient_vram", "strangers")
    assert model_units() == {}
    rig.load_ready("small")  # what fits beside the stranger is welcome
    rig.check_books()


def test_a_stranger_takes_20_gb_while_a_model_loads(rig: Rig) -> None:
    rig.behave(load_held=True)
    load = rig.load_later("alpha")
    rig.until("alpha", "loading")
    rig.nvml.add_process(FakeProcess(os.getpid(), ROOM_MIB * MIB - 12 * GIB, "g"))
    rig.behave(load_held=False)
    problem = load.result(60)[-1]["problem"]
    assert problem["code"] == "engine_failed"
    assert "out of memory" in " ".join(problem["details"]["last_lines"])
    assert rig.states() == {"alpha": "failed"}
    gpu = rig.check_books()
    assert gpu.reservations == ()
    assert gpu.foreign_bytes == ROOM_MIB * MIB - 12 * GIB


def test_an_engine_that_takes_more_than_planned_is_charged_what_it_takes(rig: Rig) -> None:
    rig.restart(verify_after_load="peak")
    (price,) = rig.price("alpha").values()
    rig.behave(vram_mib_of={"alpha": price + 3000})
    rig.load_ready("alpha")
    (event,) = eventually(lambda: rig.events("deviation"), what="the deviation is told")
    assert event["details"]["measured_bytes"] == (price + 3000) * MIB
    assert 0 < event["details"]["expected_bytes"] <= (price + 1) * MIB
    gpu = rig.check_books()
    assert gpu.charged_bytes == (price + 3000) * MIB
    assert gpu.grantable_bytes == (ROOM_MIB - price - 3000) * MIB


def test_what_an_engine_takes_with_its_first_prompt_is_charged_too(rig: Rig) -> None:
    rig.restart(verify_after_load="probe")
    (price,) = rig.price("alpha").values()
    rig.behave(vram_mib_of={"alpha": price - 100}, prompt_vram_mib=1000)
    rig.load_ready("alpha")
    (event,) = eventually(lambda: rig.events("deviation"), what="the deviation is told")
    assert event["details"]["measured_bytes"] == (price + 900) * MIB
    assert rig.check_books().charged_bytes == (price + 900) * MIB


def test_out_of_memory_after_admission(rig: Rig) -> None:
    rig.behave(oom=True)
    problem = rig.load("alpha")["problem"]
    assert problem["code"] == "engine_failed"
    lines = problem["details"]["last_lines"]
    assert any("cudaMalloc failed: out of memory" in line for line in lines)
    failure = rig.service.instances()["alpha"]["failure"]
    assert failure["detail"] == problem["detail"]
    assert rig.check_books().reservations == ()
    rig.behave(oom=False)
    rig.load_ready("alpha")
    rig.check_books()


def test_what_died_of_memory_gives_its_victim_back(rig: Rig) -> None:
    rig.load_ready("alpha")
    rig.behave(load_held=True)
    load = rig.load_later("beta")
    rig.until("beta", "loading")
    pid = rig.service.instances()["beta"]["main_pid"]
    rig.behave(load_held=False, vram_mib_of={"alpha": 14_000, "beta": ROOM_MIB + 1})
    os.kill(pid, 9)
    assert load.result(60)[-1]["problem"]["code"] == "engine_failed"
    eventually(lambda: rig.states() == {"alpha": "ready", "beta": "failed"}, what="alpha is back")


# --- memory that comes back late --------------------------------------------------------------------------------------


def test_memory_that_returns_late_is_waited_for(rig: Rig) -> None:
    rig.behave(hold_after_exit_s=600.0)
    alpha = rig.load_ready("alpha")
    load = rig.load_later("beta")
    rig.until("alpha", "releasing")
    assert [each["name"] for each in rig.pending()] == ["beta"]
    rig.give_back(alpha)
    assert load.result(60)[-1]["kind"] == "ready"
    rig.check_books()


def test_memory_that_returns_too_late_is_quarantined_and_counted(rig: Rig) -> None:
    rig.restart(release_timeout_s="0.3")
    rig.behave(hold_after_exit_s=600.0)
    alpha = rig.load_ready("alpha")
    held = rig.engine["vram_mib_of"]["alpha"] * MIB
    assert rig.unload("alpha")["released_bytes"] < GIB
    gpu = rig.gpu()
    assert gpu.quarantined_bytes == held
    (quarantine,) = [part for part in gpu.parts if part.kind == "quarantine"]
    assert (quarantine.bytes, quarantine.name) == (held, "alpha")
    assert quarantine.age_s is not None
    assert gpu.grantable_bytes == ROOM_MIB * MIB - held
    problem = rig.load("beta")
    assert problem["code"] == "insufficient_vram"
    assert "quarantine" in str(problem["details"]["budget"])
    assert rig.load_ready("small")
    rig.give_back(alpha)
    eventually(lambda: rig.gpu().quarantined_bytes == 0, what="the memory is back")
    rig.load_ready("beta")
    rig.check_books()


# --- a daemon that dies -----------------------------------------------------------------------------------------------


def test_a_daemon_killed_during_an_eviction_leaves_no_orphan(rig: Rig) -> None:
    rig.restart(stop_timeout_s="4")  # within which its daemon must have been killed
    rig.behave(ignore_sigterm=True)
    rig.load_ready("alpha")
    rig.load_ready("small")
    rig.behave(ignore_sigterm=False)
    load = rig.load_later("beta")
    rig.until("alpha", "stopping")
    rig.kill_daemon()
    assert load.exception(60) is not None  # its stream broke off
    # It went for nothing, and comes back; that its stop ran into its limit is no failure.
    rig.until("alpha", "ready")
    assert rig.states() == {"alpha": "ready", "small": "ready"}
    rig.check_books()  # which waits until nothing is left of failed units
    assert systemctl("list-units", "--state=failed", "--no-legend", "lllm3090-*").strip() == ""
    rig.load_ready("beta")
    rig.check_books()


def test_a_daemon_killed_while_a_model_loads_finds_it_again(rig: Rig) -> None:
    rig.behave(load_held=True)
    load = rig.load_later("alpha")
    rig.until("alpha", "loading")
    charged = rig.gpu().charged_bytes
    rig.kill_daemon()
    load.exception(60)
    assert rig.states() == {"alpha": "loading"}
    assert rig.gpu().charged_bytes == charged
    problem = rig.load("beta", wait=False)  # the promise is kept
    assert problem["code"] == "queue_timed_out"
    rig.behave(load_held=False)
    rig.until("alpha", "ready")
    rig.check_books()
