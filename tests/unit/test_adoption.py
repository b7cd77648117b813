"""What becomes of each unit that is found: tables of units as systemd would list them."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest

from lllm3090d.bus.unit_status import UnitStatus
from lllm3090d.planning.planner import CacheType, CappedBy
from lllm3090d.planning.quote import Evidence, Place
from lllm3090d.serving.adoption import (
    ANOTHERS_RECORD,
    DAMAGED_RECORD,
    NO_RECORD,
    OTHER_COMMAND,
    Findings,
    Rebuilt,
    lacking,
    sort_units,
)
from lllm3090d.serving.unit_spec import RECORD_VARIABLE, Record, RecordItem, unit_name

pytestmark = pytest.mark.unit


def record(name: str, run: str) -> Record:
    return Record(
        run=run,
        name=name,
        path=Path("/m/x.gguf"),
        shards=(Path("/m/x.gguf"),),
        size_bytes=7,
        socket=Path(f"/run/{run}.sock"),
        context_tokens=4096,
        parallel=1,
        window_tokens=4096,
        cache_type_k=CacheType.Q8_0,
        cache_type_v=CacheType.Q8_0,
        batch_tokens=2048,
        micro_batch_tokens=512,
        on_card=False,
        context_checkpoints=8,
        prompt_cache_mib=0,
        capped_by=CappedBy.MODEL,
        items=(
            RecordItem(name="weights", place=Place.CARD, bytes=7, evidence=Evidence.HEADER, formula="all"),
        ),
        engine_version="1",
    )


def command(run: str) -> tuple[str, ...]:
    """Of the unit that carries such a record."""
    return ("/e/llama-server", "--host", f"/run/{run}.sock", "-m", "/m/x.gguf")


def unit(
    run: str,
    state: str = "active",
    *,
    name: str = "qwen",
    started_s: float = 100.0,
    job: bool = False,
    text: str | None = None,
) -> UnitStatus:
    """A unit as systemd describes it; text replaces its record."""
    written = record(name, run).model_dump_json() if text is None else text
    return UnitStatus(
        name=unit_name(name, run),
        description="",
        load_state="loaded",
        active_state=state,
        sub_state="running" if state == "active" else state,
        result="success",
        main_pid=1 if state == "active" else 0,
        exec_main_code=0,
        exec_main_status=0,
        exec_main_start_monotonic_s=started_s,
        invocation_id="0" * 32,
        control_group="/x",
        environment=("PATH=/bin", f"{RECORD_VARIABLE}={written}") if written else ("PATH=/bin",),
        argv=command(run) if written else (),
        job_pending=job,
        transient=True,
        memory_current_bytes=None,
    )


def runs(findings: Findings) -> tuple[set[str], set[str], set[str]]:
    """Runs to adopt, to forget and to leave alone."""
    return (
        {found.record.run for found in findings.adopt},
        {found.record.run for found in findings.forget},
        {each.status.name.removesuffix(".service").rsplit("-", 1)[1] for each in findings.strangers},
    )


CASES = [
    pytest.param([], set(), set(), set(), id="nothing"),
    pytest.param([unit("a")], {"a"}, set(), set(), id="one live"),
    pytest.param([unit("a", "failed")], {"a"}, set(), set(), id="a failure alone is kept as the news"),
    pytest.param([unit("a"), unit("b", name="gemma")], {"a", "b"}, set(), set(), id="two models"),
    pytest.param(
        [unit("a", "failed", started_s=200), unit("b", started_s=100)],
        {"b"},
        {"a"},
        set(),
        id="the live one, though older",
    ),
    pytest.param(
        [
            unit("a", "failed", started_s=100),
            unit("b", "failed", started_s=200),
            unit("c", "inactive", started_s=50),
        ],
        {"b"},
        {"a", "c"},
        set(),
        id="the latest of the dead",
    ),
    pytest.param(
        [unit("a", started_s=100), unit("b", started_s=200)],
        {"b"},
        set(),
        {"a"},
        id="a second live one is left alone",
    ),
    pytest.param(
        [unit("a", "activating", started_s=0), unit("b", "failed", started_s=9)],
        {"a"},
        {"b"},
        set(),
        id="starting is live",
    ),
    pytest.param(
        [unit("a", "deactivating"), unit("b", "failed", started_s=200)],
        {"a"},
        {"b"},
        set(),
        id="stopping is live",
    ),
    pytest.param(
        [unit("a", "inactive", job=True), unit("b", "failed", started_s=200)],
        {"a"},
        {"b"},
        set(),
        id="a job is pending",
    ),
    pytest.param([unit("a", text="")], set(), set(), {"a"}, id="no record"),
    pytest.param(
        [unit("a", text="garbage"), unit("b")], {"b"}, set(), {"a"}, id="garbage beside a good one"
    ),
    pytest.param(
        [unit("a", text='{"schema_version": 2, "name": "qwen"}')],
        set(),
        set(),
        {"a"},
        id="a schema of the future",
    ),
    pytest.param(
        [unit("a", "failed", text="garbage")],
        set(),
        set(),
        {"a"},
        id="a dead one without a record is not touched",
    ),
    pytest.param(
        # The same run in both would be held twice, and a stop of one would be a stop of nothing.
        [unit("a"), unit("b", text=record("gemma", "a").model_dump_json())],
        {"a"},
        set(),
        {"b"},
        id="a record that was written for another unit",
    ),
    pytest.param(
        [unit("a", text=record("qwen", "a").model_dump_json().replace('"bytes":7', '"bytes":-7'))],
        set(),
        set(),
        {"a"},
        id="a price below zero",
    ),
]


@pytest.mark.parametrize(("statuses", "adopt", "forget", "strangers"), CASES)
def test_units_are_sorted_whatever_their_order(
    statuses: list[UnitStatus], adopt: set[str], forget: set[str], strangers: set[str]
) -> None:
    for order in permutations(statuses):
        assert runs(sort_units(order)) == (adopt, forget, strangers)


def test_equal_starts_are_decided_by_name_not_by_order() -> None:
    statuses = [unit("b"), unit("a")]
    assert runs(sort_units(statuses)) == runs(sort_units(reversed(statuses))) == ({"a"}, set(), {"b"})


def test_what_is_adopted_comes_with_its_record_and_status() -> None:
    status = unit("a")
    (found,) = sort_units([status]).adopt
    assert found.status is status
    assert found.record == record("qwen", "a")


# --- records that cannot be used ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, ""),
        ("", NO_RECORD),
        ("garbage", DAMAGED_RECORD),
        ("[" * 100_000, DAMAGED_RECORD),
        ("[]", DAMAGED_RECORD),
        ('{"schema_version": 1}', DAMAGED_RECORD),
        ('{"schema_version": "2"}', DAMAGED_RECORD),
        ('{"schema_version": 2}', "its record is of schema 2, and this release reads 1"),
        (record("gemma", "a").model_dump_json(), ANOTHERS_RECORD),
    ],
)
def test_it_is_told_why_a_record_is_not_used(text: str | None, why: str) -> None:
    assert lacking(unit("a", text=text)) == why


def test_what_was_reconstructed_takes_the_place_of_a_record() -> None:
    made = {unit("a").name: Rebuilt(record("qwen", "a"))}
    (found,) = sort_units([unit("a", text="")], made).adopt
    assert (found.record.run, found.reconstructed, found.is_known) == ("a", NO_RECORD, False)
    (dead,) = sort_units([unit("a", "failed", text="garbage")], made).adopt
    assert dead.reconstructed == DAMAGED_RECORD


def test_what_was_loaded_here_is_never_displaced_by_a_later_twin() -> None:
    """A copy without a record, with one of its own, and one that names itself after the launch: all started later."""
    mine = unit("a", started_s=1)
    bare, copy = unit("b", text="", started_s=300), unit("c", started_s=200)
    named = replace(unit("x", text="", started_s=400), name="lllm3090-zz-a.service")
    made = {bare.name: Rebuilt(record("qwen", "b")), named.name: Rebuilt(record("qwen", "a"))}
    for order in permutations([mine, bare, copy, named]):
        findings = sort_units(order, made, frozenset({"a"}))
        assert [each.status.name for each in findings.adopt] == [mine.name]
        assert {each.behind for each in findings.strangers} == {mine.name}
    # Without a memory of it a record is worth more than none, and of records the latest.
    for order in permutations([mine, bare, copy, named]):
        assert [each.status.name for each in sort_units(order, made).adopt] == [copy.name]
    # A launch of ours whose record was damaged is still ours.
    hurt = unit("a", text="garbage", started_s=1)
    made[hurt.name] = Rebuilt(record("qwen", "a"))
    for order in permutations([hurt, bare, copy, named]):
        (found,) = sort_units(order, made, frozenset({"a"})).adopt
        assert (found.status.name, found.is_known) == (hurt.name, True)


@pytest.mark.parametrize(
    "argv",
    [
        (),
        ("/bin/sleep", "600"),
        ("/bin/sh", *command("a")),
        command("b"),
        ("/e/llama-server", "--host", "/run/a.sock", "-m", "/m/other.gguf"),
        ("/e/llama-server", "--host", "/run/a.sock"),
        (*command("a"), "--host", "/run/b.sock"),
    ],
)
def test_a_record_counts_only_beside_the_command_that_it_was_written_for(argv: tuple[str, ...]) -> None:
    told = replace(unit("a"), argv=argv)
    assert lacking(told) == OTHER_COMMAND
    assert lacking(replace(told, argv=command("a"))) == ""
    (left,) = sort_units([told], {told.name: Rebuilt(None, "it is no engine")}).strangers
    assert left.why == f"{OTHER_COMMAND}, and it is no engine"
    other = record("qwen", "a").model_copy(update={"engine_server": "/f/llama-server"}).model_dump_json()
    assert lacking(unit("a", text=other)) == OTHER_COMMAND
    # Of what has ended systemd may tell nothing more.
    assert lacking(replace(unit("a", "failed"), argv=())) == ""


def test_a_record_of_its_own_is_used_whatever_was_reconstructed() -> None:
    made = {unit("a").name: Rebuilt(record("another", "a"))}
    (found,) = sort_units([unit("a")], made).adopt
    assert (found.record.name, found.reconstructed) == ("qwen", "")


def test_why_nothing_could_be_reconstructed_is_told_too() -> None:
    made = {unit("a").name: Rebuilt(None, "it runs /bin/sleep, which is no llama-server")}
    (left,) = sort_units([unit("a", text="")], made).strangers
    assert left.why == "it carries no record, and it runs /bin/sleep, which is no llama-server"


def test_one_launch_is_never_held_twice() -> None:
    """Two units of different models that claim the same run: the ledger knows runs, not names."""
    first, second = unit("a", started_s=200), unit("a", name="gemma", started_s=100)
    for order in permutations([first, second]):
        findings = sort_units(order)
        assert [each.record.name for each in findings.adopt] == ["qwen"]
        assert [each.why for each in findings.strangers] == ["another unit is the launch a too"]
