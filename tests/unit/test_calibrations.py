"""Calibrations in the store: kept, bounded, apart from each other, and no hindrance where the disk fails."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lllm3090d.engines.capabilities import Backend
from lllm3090d.errors import ErrorCode
from lllm3090d.planning.calibration import (
    SHORT_KEPT_S,
    CalibrationKey,
    CalibrationScope,
    Measurement,
    Seen,
)
from lllm3090d.serving import calibrations as module
from lllm3090d.serving.calibrations import Calibrations
from lllm3090d.store import Store

pytestmark = pytest.mark.unit

MIB = 1 << 20
NOW_S = 1_800_000_000.0
SCOPE = CalibrationScope("s1-abc", "digest", Backend.VULKAN, "GPU-1")


def measurement(
    launch: str = "a", peak_mib: int = 4000, probe: int = 2048, scope: CalibrationScope = SCOPE
) -> Measurement:
    return Measurement(CalibrationKey(scope, launch), peak_mib * MIB, (peak_mib - 1) * MIB, probe, NOW_S)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lllm3090.db"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    made = Store(path)
    yield made
    made.close()


@pytest.fixture
def known(store: Store) -> Calibrations:
    return Calibrations(lambda: store, lambda: NOW_S)


def test_what_was_seen_survives_the_daemon(known: Calibrations, store: Store, path: Path) -> None:
    assert known.of(SCOPE).seen == ()
    assert known.add(measurement(), 3000 * MIB) is None
    assert known.out_of_memory(CalibrationKey(SCOPE, "b"), 6000 * MIB) is None
    before = known.of(SCOPE, ("--threads", "8"))
    assert before.arguments == ("--threads", "8")
    assert before.seen[0] == Seen("a", 3000 * MIB, 4000 * MIB, 3999 * MIB, 2048, 0, NOW_S)
    assert before.excess_bytes == (1000 + 128 + 256) * MIB
    assert before.has_measured_build
    store.close()
    again = Store(path)
    assert Calibrations(lambda: again, lambda: NOW_S).of(SCOPE, ("--threads", "8")) == before
    again.close()


def test_a_second_measurement_takes_the_place_of_the_first(known: Calibrations, store: Store) -> None:
    known.add(measurement(peak_mib=4000), 3000 * MIB)
    known.add(measurement(peak_mib=3500), 3100 * MIB)
    (seen,) = known.of(SCOPE).seen
    assert (seen.peak_bytes, seen.quoted_bytes) == (4000 * MIB, 3100 * MIB)
    assert store.rows("SELECT count(*) FROM calibrations") == [(1,)]


@pytest.mark.parametrize(
    "change", [{"checkpoint": "s1-x"}, {"engine": "other"}, {"backend": Backend.CUDA}, {"card": "GPU-2"}]
)
def test_scopes_are_apart(known: Calibrations, change: dict[str, str]) -> None:
    known.add(measurement(), 3000 * MIB)
    other = known.of(replace(SCOPE, **change))  # type: ignore[arg-type]  # one field, of its own type
    assert other.seen == ()
    # The floor falls for the build on the card, whatever the checkpoint.
    assert other.has_measured_build is ("checkpoint" in change)


def test_a_measurement_without_a_prompt_measures_no_build(known: Calibrations) -> None:
    known.add(measurement(probe=0), 3000 * MIB)
    known.out_of_memory(CalibrationKey(SCOPE, "b"), 5000 * MIB)
    assert not known.of(SCOPE).has_measured_build


def test_out_of_memory_is_not_believed_for_ever(store: Store) -> None:
    now = [NOW_S]
    known = Calibrations(lambda: store, lambda: now[0])
    known.out_of_memory(CalibrationKey(SCOPE, "b"), 5000 * MIB)
    now[0] += SHORT_KEPT_S + 1
    assert known.of(SCOPE).excess_bytes == 0


def test_forgetting(known: Calibrations) -> None:
    other = replace(SCOPE, checkpoint="s1-x")
    known.add(measurement(), 3000 * MIB)
    known.add(measurement(scope=other), 3000 * MIB)
    assert known.forget(SCOPE) is None
    assert known.of(SCOPE).seen == ()
    assert known.of(other).seen
    assert known.forget() is None
    assert known.of(other).seen == ()


def test_the_number_of_rows_is_bounded(
    known: Calibrations, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEPT_OF_A_SCOPE", 3)
    monkeypatch.setattr(module, "KEPT_LAUNCHES", 5)
    for index in range(5):
        known.add(measurement(f"launch {index}"), 3000 * MIB)
    assert [seen.launch for seen in known.of(SCOPE).seen] == ["launch 2", "launch 3", "launch 4"]
    for index in range(7):
        known.add(measurement(scope=replace(SCOPE, checkpoint=f"s1-{index}")), 3000 * MIB)
    assert store.rows("SELECT count(*) FROM calibrations") == [(5,)]
    assert known.of(replace(SCOPE, checkpoint="s1-6")).seen


@pytest.mark.parametrize(
    "column", ["launch", "quoted_bytes", "peak_bytes", "short_bytes", "seen_s", "short_s"]
)
def test_a_row_that_cannot_be_is_passed_over(known: Calibrations, store: Store, column: str) -> None:
    known.add(measurement("a"), 3000 * MIB)
    known.add(measurement("b"), 3000 * MIB)
    value = "x'00'" if column == "launch" else "'many'"
    statement = f"UPDATE calibrations SET {column} = {value} WHERE id = 1"  # noqa: S608  # columns of this test
    store.change(lambda connection: connection.execute(statement))
    assert [seen.launch for seen in known.of(SCOPE).seen] == ["b"]


def test_negative_bytes_are_passed_over(known: Calibrations, store: Store) -> None:
    known.add(measurement("a"), 3000 * MIB)
    store.change(lambda connection: connection.execute("UPDATE calibrations SET peak_bytes = -1"))
    assert known.of(SCOPE).seen == ()


def test_where_nothing_can_be_written_it_is_said_and_nothing_breaks(
    known: Calibrations, store: Store, path: Path
) -> None:
    known.add(measurement("a"), 3000 * MIB)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")  # as a full disk: nobody else can write
    try:
        store._connection.execute("PRAGMA busy_timeout = 0")
        for problem in (
            known.add(measurement("b"), 3000 * MIB),
            known.out_of_memory(CalibrationKey(SCOPE, "b"), 3000 * MIB),
            known.forget(),
        ):
            assert problem is not None
            assert problem.code is ErrorCode.STATE_UNUSABLE
    finally:
        other.close()
    assert [seen.launch for seen in known.of(SCOPE).seen] == ["a"]
    assert known.add(measurement("b"), 3000 * MIB) is None


def test_a_store_that_cannot_be_used_learns_in_memory(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    store = Store(blocked / "lllm3090.db")
    known = Calibrations(lambda: store, lambda: NOW_S)
    assert known.add(measurement(), 3000 * MIB) is None
    assert known.of(SCOPE).seen
    store.close()
    assert known.of(SCOPE).seen == ()
    known.add(measurement(), 3000 * MIB)
