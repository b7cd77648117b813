"""Statuses, events and job results from what systemd says, without systemd."""

import asyncio
import signal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lllm3090d.bus.jobs import FINISHED_JOBS_KEPT, Job, JobWaits
from lllm3090d.bus.messages import Match
from lllm3090d.bus.unit_status import (
    DUMPED,
    EXITED,
    KILLED,
    NO_DATA,
    UNIT_PATH_PREFIX,
    UnitStatus,
    explain_exit,
    unit_name,
    unit_path_element,
)
from lllm3090d.bus.unit_watch import Event, Relist, UnitChanged, UnitGone, UnitWatch

pytestmark = pytest.mark.unit
NAME = "lllm3090-a.service"


def status(unit: dict[str, Any] | None = None, **service: Any) -> UnitStatus:
    return UnitStatus.from_properties(NAME, unit or {"ActiveState": "failed", "Job": (0, "/")}, service)


# --- UnitStatus ---


def test_properties_of_both_interfaces_become_one_status() -> None:
    read = UnitStatus.from_properties(
        NAME,
        {
            "Description": "d",
            "LoadState": "bad-setting",
            "ActiveState": "active",
            "SubState": "running",
            "InvocationID": list(range(16)),
            "Job": (7, "/job/7"),
            "Transient": True,
            "SomethingNew": 1,
        },
        {
            "Result": "success",
            "MainPID": 42,
            "ExecMainStartTimestampMonotonic": 1_500_000,
            "ControlGroup": "/x",
            "Environment": ["A=1", "B=x=y"],
            "ExecStart": [("/bin/true", ["true", "-v"], False, 0, 0, 0, 0, 0, 0, 0)],
            "MemoryCurrent": 4096,
        },
    )
    assert read.invocation_id == "000102030405060708090a0b0c0d0e0f"
    assert (read.argv, dict(read.variables)) == (("true", "-v"), {"A": "1", "B": "x=y"})
    assert (read.exec_main_start_monotonic_s, read.memory_current_bytes) == (1.5, 4096)
    assert (read.is_active, read.job_pending, read.transient) == (True, True, True)


def test_nothing_known_is_a_status_too() -> None:
    read = UnitStatus.from_properties(NAME, {}, {"MemoryCurrent": NO_DATA})
    assert (read.is_active, read.is_failed, read.is_gone) == (False, False, False)
    assert (read.invocation_id, read.argv, read.memory_current_bytes) == ("", (), None)


@pytest.mark.parametrize(
    ("active_state", "job", "expected"),
    [
        ("active", 0, (True, False, False)),
        ("reloading", 0, (True, False, False)),
        ("activating", 1, (False, False, False)),
        ("deactivating", 0, (False, False, False)),
        ("failed", 0, (False, True, False)),
        ("failed", 1, (False, False, False)),
        ("inactive", 0, (False, False, True)),
        ("inactive", 1, (False, False, False)),
        ("a-state-of-2031", 0, (False, False, False)),
    ],
)
def test_states_that_are_final(active_state: str, job: int, expected: tuple[bool, bool, bool]) -> None:
    read = status({"ActiveState": active_state, "Job": (job, "/")})
    assert (read.is_active, read.is_failed, read.is_gone) == expected


@pytest.mark.parametrize(
    ("service", "expected"),
    [
        ({"Result": "exit-code", "ExecMainCode": EXITED, "ExecMainStatus": 1}, "exited with status 1"),
        (
            {"Result": "exit-code", "ExecMainCode": EXITED, "ExecMainStatus": 203},
            "never ran: the file could not be executed (203/EXEC)",
        ),
        ({"Result": "signal", "ExecMainCode": KILLED, "ExecMainStatus": 11}, "was killed by SIGSEGV"),
        (
            {"Result": "core-dump", "ExecMainCode": DUMPED, "ExecMainStatus": 6},
            "was killed by SIGABRT and dumped core",
        ),
        ({"Result": "signal", "ExecMainCode": KILLED, "ExecMainStatus": 63}, "was killed by signal 63"),
        (
            {"Result": "oom-kill", "ExecMainCode": KILLED, "ExecMainStatus": signal.SIGKILL},
            "was killed because memory ran out (killed by SIGKILL)",
        ),
        (
            {"Result": "timeout", "ExecMainCode": KILLED, "ExecMainStatus": signal.SIGKILL},
            "ran into a time limit of systemd (killed by SIGKILL)",
        ),
        ({"Result": "resources"}, "could not be set up by systemd for lack of resources"),
        ({"Result": "a-result-of-2031"}, "never ran: systemd says a-result-of-2031"),
        ({"Result": "success"}, "never ran"),
    ],
)
def test_an_end_is_explained(service: dict[str, Any], expected: str) -> None:
    assert explain_exit(status(**service)) == expected


def test_what_runs_has_not_ended() -> None:
    assert explain_exit(status({"ActiveState": "active"}, MainPID=1, Result="success")) == "has not ended"


# --- names in object paths ---


def test_a_unit_name_is_escaped_as_systemd_does() -> None:
    assert unit_path_element("lllm3090-a.b@ü_1.service") == "lllm3090_2da_2eb_40_c3_bc_5f1_2eservice"
    assert unit_path_element("3d.slice") == "_33d_2eslice"


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_unit_names_survive_object_paths(name: str) -> None:
    assert unit_name(UNIT_PATH_PREFIX + unit_path_element(name)) == name


# --- UnitWatch ---


class Watched:
    """A watch and what it told."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.watch = UnitWatch("lllm3090-*.service", self.events.append)

    def ran(self, active_state: str, *, result: str = "success", pid: int = 0, name: str = NAME) -> None:
        self.watch.service_changed(name, {"Result": result, "MainPID": pid})
        self.watch.unit_changed(name, {"ActiveState": active_state, "Job": (0, "/")})


def test_service_and_unit_signals_are_told_as_one_change() -> None:
    watched = Watched()
    watched.watch.expect(
        NAME, {"Description": "d", "Environment": ["A=1"], "ExecStart": [("/x", ["x"], False)]}
    )
    watched.ran("active", pid=5)
    watched.ran("active", pid=5)  # says nothing new
    (event,) = watched.events
    assert isinstance(event, UnitChanged)
    told = event.status
    assert (told.active_state, told.main_pid, told.description) == ("active", 5, "d")
    assert (told.argv, told.environment, told.transient) == (("x",), ("A=1",), True)


def test_the_last_status_comes_with_the_end() -> None:
    watched = Watched()
    watched.ran("inactive", result="success")
    watched.watch.unit_removed(NAME)
    gone = watched.events[-1]
    assert isinstance(gone, UnitGone) and gone.last is not None
    assert (gone.last.active_state, gone.last.result) == ("inactive", "success")
    assert watched.watch.known == frozenset()


def test_a_unit_that_was_only_listed_is_gone_with_what_was_read() -> None:
    watched = Watched()
    watched.watch.was_read(NAME, {"ActiveState": "active"}, {"MainPID": 9, "MemoryCurrent": 1})
    watched.watch.unit_removed(NAME)
    (gone,) = watched.events
    assert isinstance(gone, UnitGone) and gone.last is not None
    assert (gone.last.main_pid, gone.last.memory_current_bytes) == (9, None)


def test_removals_during_a_reload_mean_nothing() -> None:
    watched = Watched()
    watched.ran("active")
    watched.watch.reloading(True)
    watched.watch.unit_removed(NAME)
    watched.watch.reloading(False)
    assert [type(event) for event in watched.events] == [UnitChanged, Relist]
    watched.watch.unit_removed(NAME)
    assert isinstance(watched.events[-1], UnitGone)


def test_an_answer_that_signals_have_overtaken_does_not_bring_back_an_old_state() -> None:
    watched = Watched()
    watched.ran("failed", result="exit-code")
    watched.watch.was_read(NAME, {"ActiveState": "active"}, {"Result": "success", "ControlGroup": "/x"})
    watched.watch.unit_removed(NAME)
    gone = watched.events[-1]
    assert isinstance(gone, UnitGone) and gone.last is not None
    assert (gone.last.active_state, gone.last.result, gone.last.control_group) == (
        "failed",
        "exit-code",
        "/x",
    )


def test_after_missed_signals_states_are_read_anew_and_constants_kept() -> None:
    watched = Watched()
    watched.watch.expect(NAME, {"Environment": ["A=1"]})
    watched.watch.reloading(True)
    watched.ran("active", pid=5)
    watched.watch.doubt()
    watched.watch.was_read(NAME, {"ActiveState": "failed"}, {"Result": "signal"})
    watched.watch.unit_removed(NAME)  # the reload's end was missed with the rest
    gone = watched.events[-1]
    assert isinstance(gone, UnitGone) and gone.last is not None
    assert (gone.last.active_state, gone.last.result, gone.last.main_pid) == ("failed", "signal", 0)


def test_a_unit_of_which_nothing_is_known_is_gone_without_a_status() -> None:
    watched = Watched()
    watched.watch.expect(NAME, {})
    watched.watch.unit_removed(NAME)
    watched.watch.unit_removed("lllm3090-b.service")
    assert watched.events == [UnitGone(NAME, None), UnitGone("lllm3090-b.service", None)]


def test_other_units_are_not_watched() -> None:
    watched = Watched()
    watched.ran("active", name="lllm3090d.service")
    watched.watch.was_read("lllm3090d.service", {}, {})
    watched.watch.unit_removed("lllm3090d.service")
    assert not watched.watch.expect("lllm3090d.service", {})
    assert (watched.events, watched.watch.known) == ([], frozenset())


def test_an_expected_unit_that_is_known_stays_as_it_is() -> None:
    watched = Watched()
    assert watched.watch.expect(NAME, {"Description": "first"})
    assert not watched.watch.expect(NAME, {"Description": "second"})
    watched.watch.forget([NAME, "lllm3090-unknown.service"])
    assert watched.watch.known == frozenset()


# --- JobWaits ---

JOB = Job("/job/1", NAME, starts=True)


def test_a_job_that_ended_before_anybody_waited_is_not_lost() -> None:
    async def scenario() -> str | None:
        jobs = JobWaits()
        jobs.removed(JOB.path, "done")
        return await jobs.result(JOB, timeout_s=0.001)

    assert asyncio.run(scenario()) == "done"


def test_a_job_that_ends_later_is_waited_for() -> None:
    async def scenario() -> str | None:
        jobs = JobWaits()
        waiting = asyncio.create_task(jobs.result(JOB, timeout_s=10))
        await asyncio.sleep(0)  # lets the task begin to wait
        jobs.removed("/job/2", "failed")
        jobs.removed(JOB.path, "canceled")
        return await waiting

    assert asyncio.run(scenario()) == "canceled"


def test_waiting_is_bounded_and_leaves_nothing_behind() -> None:
    async def scenario() -> list[str | None]:
        jobs = JobWaits()
        first = await jobs.result(JOB, timeout_s=0.001)
        jobs.removed(JOB.path, "done")
        # systemd may name one job to two who ask for the same, and the second may ask when it has ended.
        return [first, await jobs.result(JOB, timeout_s=0.001), await jobs.result(JOB, timeout_s=0.001)]

    assert asyncio.run(scenario()) == [None, "done", "done"]


def test_two_may_wait_for_one_job() -> None:
    async def scenario() -> list[str | None]:
        jobs = JobWaits()
        waits = [asyncio.create_task(jobs.result(JOB, timeout_s=10)) for _ in range(2)]
        short = asyncio.create_task(jobs.result(JOB, timeout_s=0.001))
        assert await short is None
        jobs.removed(JOB.path, "done")
        return await asyncio.gather(*waits)

    assert asyncio.run(scenario()) == ["done", "done"]


def test_results_nobody_asks_for_are_dropped_in_the_end() -> None:
    async def scenario() -> list[str | None]:
        jobs = JobWaits()
        jobs.removed(JOB.path, "done")
        for number in range(FINISHED_JOBS_KEPT):
            jobs.removed(f"/other/{number}", "done")
        newest = Job(f"/other/{FINISHED_JOBS_KEPT - 1}", NAME, starts=True)
        return [await jobs.result(JOB, timeout_s=0.001), await jobs.result(newest, timeout_s=0.001)]

    assert asyncio.run(scenario()) == [None, "done"]


def test_after_a_loss_old_results_are_void_and_waits_are_settled_by_state() -> None:
    async def scenario() -> list[str | None]:
        jobs = JobWaits()
        jobs.removed(JOB.path, "done")
        jobs.doubt()
        pending = Job("/job/3", "lllm3090-b.service", starts=True)
        waits = [asyncio.create_task(jobs.result(*each)) for each in ((JOB, 10), (pending, 0.05))]
        await asyncio.sleep(0)  # lets the tasks begin to wait

        async def infer(job: Job) -> str | None:
            return "failed" if job is JOB else None

        await jobs.settle(infer)
        return await asyncio.gather(*waits)

    assert asyncio.run(scenario()) == ["failed", None]


# --- match rules ---


def test_a_match_is_written_as_a_rule() -> None:
    match = Match(
        "org.x", "org.x.I", "Changed", path_namespace="/org/x", path_prefix="/org/x/a_", arg0="org.y"
    )
    assert match.rule == (
        "type='signal',sender='org.x',interface='org.x.I',member='Changed',path_namespace='/org/x',arg0='org.y'"
    )


def test_a_quote_cannot_get_into_a_rule() -> None:
    with pytest.raises(ValueError, match="arg0"):
        Match("org.x", "org.x.I", "Changed", arg0="a',type='error")
