"""The checker of the chaos run: it finds what is not true, excuses nothing else, and owes the product nothing."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.chaos import planted
from tests.chaos import told as told_module
from tests.chaos.compare import Difference, compare
from tests.chaos.deeds import Death, Deeds
from tests.chaos.excuses import (
    LOST_EVICTION,
    LOST_IN_A_GAP,
    excuse,
    missing,
    taken_from_the_busy,
    unseen,
    untold,
)
from tests.chaos.plan import FAULTS, SETTLE_EVERY, WORK, steps
from tests.chaos.told import Instance, Reservation, Told
from tests.chaos.truth import Card, Engine, Row, Truth, Unit, cgroup_of, read_card
from tests.chaos.watch import Watch
from tests.system.harness import REPOSITORY

pytestmark = pytest.mark.unit
GIB = 1 << 30
UNIT = "lllm3090-alpha-01.service"
ALPHA = Engine(pid=10, model="alpha", unit=UNIT, socket="/run/a.sock", stopped=False)
CARD = Card(total=24 * GIB, reserved=GIB, rows=(Row(10, 5 * GIB, counts=True, alive=True),))
UP = Unit(UNIT, "active", "running", 10, "inv")
TRUTH = Truth(0.0, Unit("lllm3090d.service", "active"), False, {UNIT: UP}, {10: ALPHA}, CARD)
READY = Instance("alpha", "01", "ready", UNIT, 10, "inv", "/run/a.sock", retries=False)
PROMISE = Reservation("01", "alpha", "card", "confirmed", 6 * GIB, 5 * GIB)
TOLD = Told((READY,), (PROMISE,), None, used=5 * GIB, foreign=0, charged=6 * GIB, quarantined=0)


def found(
    truth: Truth, told: Told, healthy: bool = True, wanted: Mapping[str, str] | None = None
) -> set[str]:
    return {each.kind for each in differences(truth, told, healthy, wanted)}


def differences(
    truth: Truth, told: Told, healthy: bool = True, wanted: Mapping[str, str] | None = None
) -> list[Difference]:
    return list(compare(truth, told, {10: healthy}, wanted or {}))


def test_what_is_so_is_no_difference() -> None:
    assert differences(TRUTH, TOLD, wanted={"alpha": "loaded"}) == []
    busy = replace(TOLD, instances=(replace(READY, state="busy"),))
    assert differences(TRUTH, busy) == []
    loading = replace(TOLD, instances=(replace(READY, state="loading"),))
    assert differences(TRUTH, loading, healthy=False) == []


DEAD = replace(
    TRUTH, units={UNIT: replace(UP, active="failed", main_pid=0)}, engines={}, card=replace(CARD, rows=())
)
FREE = replace(TOLD, used=0)


@pytest.mark.parametrize(
    ("truth", "told", "kind"),
    [
        (DEAD, FREE, "untrue state"),
        (replace(DEAD, units={}), FREE, "untrue state"),
        (DEAD, replace(FREE, instances=(replace(READY, state="stopping"),)), "untrue state"),
        (
            replace(DEAD, units={}),
            replace(FREE, instances=(replace(READY, state="releasing"),)),
            "untrue state",
        ),
        (TRUTH, replace(TOLD, instances=(replace(READY, main_pid=11),)), "untrue state"),
        (TRUTH, replace(TOLD, instances=(replace(READY, invocation="other"),)), "untrue state"),
        (TRUTH, replace(TOLD, instances=(replace(READY, state="loading"),)), "untrue state"),
        (TRUTH, replace(TOLD, instances=(replace(READY, state="starting"),)), "untrue state"),
        (TRUTH, replace(TOLD, instances=(replace(READY, state="failed"),)), "untrue state"),
        (TRUTH, replace(TOLD, instances=()), "orphan"),
        (replace(TRUTH, engines={10: replace(ALPHA, unit="session.scope")}), TOLD, "orphan"),
        (DEAD, replace(FREE, instances=(), reservations=(), charged=0), "orphan"),
        (TRUTH, replace(TOLD, reservations=()), "over-commit"),
        (TRUTH, replace(TOLD, reservations=(replace(PROMISE, charged=24 * GIB),)), "over-commit"),
        (replace(TRUTH, card=replace(CARD, other=20 * GIB)), TOLD, "over-commit"),
        (TRUTH, replace(TOLD, used=GIB), "untrue memory"),
        (TRUTH, replace(TOLD, foreign=GIB), "untrue memory"),
        (TRUTH, replace(TOLD, quarantined=GIB), "untrue memory"),
        (TRUTH, replace(TOLD, card_problem="card_unreadable"), "untrue memory"),
        (replace(TRUTH, card=replace(CARD, readable=False)), TOLD, "untrue memory"),
        (TRUTH, replace(TOLD, reservations=(PROMISE, replace(PROMISE, run="02"))), "untrue memory"),
    ],
)
def test_what_is_not_so_is_found(truth: Truth, told: Told, kind: str) -> None:
    assert kind in found(truth, told)


def test_memory_that_comes_back_late_is_no_lie() -> None:
    late = replace(CARD, rows=(Row(10, 5 * GIB, counts=True, alive=False),))
    gone = replace(DEAD, units={}, card=late)
    releasing = replace(TOLD, instances=(replace(READY, state="releasing"),), quarantined=GIB)
    assert differences(gone, releasing) == []


def test_a_model_that_is_wanted_must_be_told() -> None:
    nothing = replace(TOLD, instances=(), reservations=(), used=0, charged=0)
    empty = replace(DEAD, units={})
    wanted = {"alpha": "loaded by step 1"}
    assert found(empty, nothing, wanted=wanted) == {"lost model"}
    assert found(empty, replace(nothing, pending=("alpha",)), wanted=wanted) == set()
    failed = replace(READY, state="failed", main_pid=0)
    assert found(DEAD, replace(nothing, instances=(failed,)), wanted=wanted) == {"lost model"}
    assert found(DEAD, replace(nothing, instances=(replace(failed, retries=True),)), wanted=wanted) == set()
    assert (
        found(DEAD, replace(nothing, instances=(replace(failed, state="latched"),)), wanted=wanted) == set()
    )


def test_nothing_is_compared_where_systemd_does_not_answer() -> None:
    assert differences(replace(DEAD, units=None), TOLD) == []


def test_a_state_file_of_the_card() -> None:
    text = "driver 1\ndevice\n total 100\n reserved 10\n other 5\n process c 1 20\n process c 4194305 30 alive 0\n"
    card = read_card(text)
    assert (card.total, card.reserved, card.used, card.readable) == (100, 10, 25, True)
    assert not read_card(f"{text} lost\n").readable
    assert not read_card(f"fail nvmlDeviceGetMemoryInfo_v2 999\n{text}").readable
    assert read_card(f"fail nvmlDeviceGetTemperature 999\n{text}").readable


def test_the_control_group_of_a_process() -> None:
    assert cgroup_of("3:cpu:/a\n1:name=systemd:/b/x.service\n0::/c\n") == "/b/x.service"
    assert cgroup_of("0::/c/x.service\n") == "/c/x.service"


def test_the_same_seed_does_the_same() -> None:
    first = list(itertools.islice(steps(7), 300))
    assert first == list(itertools.islice(steps(7), 300))
    assert first != list(itertools.islice(steps(8), 300))
    assert {each.kind for each in first[:120]} == {*WORK, *FAULTS, "settle"}
    assert [each.number for each in first] == list(range(1, 301))
    assert max(
        b.number - a.number for a, b in itertools.pairwise(s for s in first if s.kind == "settle")
    ) <= (SETTLE_EVERY + 1)


# --- what has an excuse ---------------------------------------------------------------------------------------------


def death_now(deeds: Deeds, *, served: bool = True) -> Death:
    last = deeds.did("nothing").at_s
    return Death("alpha", 10, "01", served, last - 60, last, last + 0.1)


def test_an_end_that_nobody_wanted_has_no_excuse() -> None:
    deeds = Deeds(quiet=True)
    deeds.did("unload", "beta")
    deeds.did("kill-engine", "beta", 11)
    deeds.did("bad-starts", lasts=True)  # it served
    deeds.did("load", "beta", lasts=True)
    evictions = [{"kind": "eviction", "run": "99", "model": "beta"}]
    assert excuse(death_now(deeds), deeds, evictions) is None


@pytest.mark.parametrize(
    ("kind", "model", "pid"),
    [("unload", "alpha", 0), ("release", "", 0), ("kill-engine", "alpha", 10), ("stop-unit", "alpha", 10)],
)
def test_an_end_that_was_wanted_has_one(kind: str, model: str, pid: int) -> None:
    deeds = Deeds(quiet=True)
    deeds.did(kind, model, pid)
    assert excuse(death_now(deeds), deeds, []) == kind


def test_evictions_excuse_an_end_also_where_a_killed_daemon_could_not_tell() -> None:
    deeds = Deeds(quiet=True)
    assert excuse(death_now(deeds), deeds, [{"kind": "eviction", "run": "01"}]) == "eviction"
    deeds.did("load", "beta", lasts=True)
    assert excuse(death_now(deeds), deeds, []) is None
    deeds.did("kill-daemon", "", 5)
    assert excuse(death_now(deeds), deeds, []) == LOST_EVICTION


def test_engines_that_never_served_may_exit_when_they_are_made_to() -> None:
    deeds = Deeds(quiet=True)
    deeds.did("bad-starts", lasts=True)
    assert excuse(death_now(deeds, served=False), deeds, []) == "bad-starts"


# --- what the history tells -----------------------------------------------------------------------------------------


def event(kind: str, **more: Any) -> dict[str, Any]:
    return {"kind": kind, "at": datetime.now(UTC).isoformat(), "seq": 1, **more}


def failed(cause: str) -> dict[str, Any]:
    return event("state", run="01", state="failed", details={"details": {"cause": cause}})


def test_a_killed_engine_must_be_told_with_its_cause() -> None:
    deeds = Deeds(quiet=True)
    deeds.did("kill-engine", "alpha", 10, "01")
    assert [each.kind for each in unseen(deeds, [])] == ["history"]
    assert [each.kind for each in unseen(deeds, [failed("unknown")])] == ["history"]
    assert list(unseen(deeds, [failed("killed")])) == []


def test_a_recorded_gap_covers_what_is_not_told() -> None:
    deeds = Deeds(quiet=True)
    before = event("x")["at"]
    deeds.did("segv-engine", "alpha", 10, "01")
    gap = event("gap", details={"from": before, "to": event("x")["at"]})
    assert list(unseen(deeds, [gap])) == []
    lost = event("state", model="alpha") | {"seq": 77}
    assert list(missing([lost], [])) == [lost]
    assert list(missing([lost], [lost])) == []


def test_ends_of_the_daemon_and_upheavals_of_systemd_must_be_told() -> None:
    deeds = Deeds(quiet=True)
    deeds.did("kill-daemon")
    deeds.did("term-daemon")
    deeds.did("reload-manager")
    assert len(list(unseen(deeds, []))) == 3
    told = [
        event("daemon", message="is stopped"),
        event("daemon", message="the one before was killed"),
    ]
    assert list(unseen(deeds, [*told, event("reconciled")])) == []


def test_a_card_that_could_not_be_read_is_told_or_in_a_recorded_gap() -> None:
    deeds = Deeds(quiet=True)
    deed = deeds.did("fail-nvml", lasts=True)
    for at in ("at_s", "wall_s"):
        setattr(deed, at, getattr(deed, at) - 10)
    deed.until_s = deed.at_s + 5

    def moment(after_s: float) -> str:
        return datetime.fromtimestamp(deed.wall_s + after_s, UTC).isoformat()

    def gap(begin_s: float, end_s: float) -> dict[str, Any]:
        return event("gap", details={"from": moment(begin_s), "to": moment(end_s)})

    assert [each.kind for each in unseen(deeds, [])] == ["history"]
    assert list(unseen(deeds, [event("card") | {"at": moment(1)}])) == []
    assert list(unseen(deeds, [gap(-2, 7)])) == []
    for partly in (gap(-2, 3), gap(2, 7)):  # it could have been told while it lasted
        assert [each.kind for each in unseen(deeds, [partly])] == ["history"]


def test_every_end_must_be_told() -> None:
    deeds = Deeds(quiet=True)
    death = death_now(deeds)
    assert [each.kind for each in untold([death], deeds, [])] == ["history"]
    assert list(untold([death], deeds, [event("state", run="01", state="gone")])) == []
    assert list(untold([replace(death, run="")], deeds, [])) == []  # nobody had ever told of it


def test_a_stop_that_was_told_needs_no_end_where_the_daemon_was_ended_meanwhile() -> None:
    deeds = Deeds(quiet=True)
    told = event("state", run="01", state="stopping")
    death = death_now(deeds)
    assert [each.kind for each in untold([death], deeds, [told])] == ["history"]
    deeds.did("term-daemon", "", 5)
    assert list(untold([death_now(deeds)], deeds, [told])) == []


def test_an_end_whose_memory_was_waited_for_is_told_though_that_daemon_was_ended() -> None:
    """The card was lost: nobody could see the memory come back, and the next daemon finds nothing of the run."""
    deeds = Deeds(quiet=True)
    told = event("state", run="01", state="releasing")
    death = death_now(deeds)
    assert [each.kind for each in untold([death], deeds, [told])] == ["history"]
    assert [each.kind for each in untold([death], deeds, [event("state", run="02", state="releasing")])]
    deed = deeds.did("term-daemon", "", 5)
    deed.at_s += 3
    assert list(untold([death], deeds, [told])) == []
    deed.at_s += 30  # that one had time enough to tell the rest
    assert [each.kind for each in untold([death], deeds, [told])] == ["history"]


def test_what_a_killed_daemon_could_not_write_is_covered_by_its_gap() -> None:
    deeds = Deeds(quiet=True)
    before = event("x")["at"]
    deeds.did("kill-daemon", "", 5)
    death = death_now(deeds)
    gap = event("daemon", details={"from": before, "to": event("x")["at"]})
    assert excuse(death, deeds, []) is None
    assert excuse(death, deeds, [gap]) == LOST_IN_A_GAP


def test_a_busy_model_is_never_taken() -> None:
    deeds = Deeds(quiet=True)
    stream = deeds.did("stream", "alpha", 10)
    stream.wall_s -= 10
    stream.at_s -= 10
    taken = [event("eviction", model="alpha", message="for beta")]
    assert list(taken_from_the_busy(deeds, taken)) == []  # it came to its end
    stream.detail = "it ended early"
    assert [each.kind for each in taken_from_the_busy(deeds, taken)] == ["busy model evicted"]


def test_numbers_that_are_given_twice_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who follows asks for what is above the last number that was seen, and would miss everything else."""
    deeds = Deeds(quiet=True)
    watch = Watch(control_socket=tmp_path, engine=tmp_path, card_state=tmp_path, prices={}, deeds=deeds)
    kept = [{"seq": 40, "kind": "daemon"}]
    monkeypatch.setattr(told_module, "newest_event", lambda _: kept[-1]["seq"])
    monkeypatch.setattr(
        told_module, "events_since", lambda _, seq: [each for each in kept if each["seq"] > seq]
    )
    watch._read_events(1)
    kept.append({"seq": 41, "kind": "state"})
    watch._read_events(2)
    assert deeds.violations == [] and sorted(watch.findings.events) == [40, 41]
    kept[:] = [{"seq": 9, "kind": "daemon"}]
    for _ in range(2):
        watch._read_events(3)
    (violation,) = deeds.violations
    assert violation.kind == "history" and "counts from 9, and 41 was told before" in violation.text


# --- and the checker itself -----------------------------------------------------------------------------------------


def test_the_checker_imports_nothing_of_the_product() -> None:
    code = (
        "import sys\nimport tests.chaos.watch, tests.chaos.excuses, tests.chaos.run, tests.chaos.driver\n"
        "print([name for name in sys.modules if name.startswith('lllm3090')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.timeout(600)  # a process for each
def test_the_planted_bugs_can_be_planted() -> None:
    """What they replace is there still: else they would plant nothing, and nothing would be caught."""
    for bug in planted.BUGS:
        done = subprocess.run(
            [sys.executable, "-c", bug.code], cwd=REPOSITORY, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    from lllm3090d.serving.ledger import Ledger
    from lllm3090d.serving.lives import Lives

    assert {"settle"} <= vars(Ledger).keys() and {"_on_adopted", "_unit_ended"} <= vars(Lives).keys()
