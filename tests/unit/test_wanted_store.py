"""The wanted set and the marks of autoload in the state file: as they were, in order, and a full disk is told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.planning.request import PlanRequest
from lllm3090d.serving.wanted import Life, Lot, Want, failure_of
from lllm3090d.serving.wanted_store import Mark, Remembered, WantedStore
from lllm3090d.store import FILE_NAME, Store
from tests.unit.test_adoption import record

pytestmark = pytest.mark.unit

LIFE = Life("boot-1", "manager-1")
WISH = PlanRequest(context_tokens=4096)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path / FILE_NAME)
    yield made
    made.close()


@pytest.fixture
def kept(store: Store) -> WantedStore:
    return WantedStore(lambda: store)


def full(store: Store) -> None:
    """From now on SQLite fails as on a full disk."""
    ((pages,),) = store.rows("PRAGMA page_count")
    store.rows(f"PRAGMA max_page_count = {pages}")


def wants(*names: str) -> tuple[Want, ...]:
    return tuple(Want(name=each, lot=Lot.UP, request=WISH, arguments=("x" * 5000,)) for each in names)


def test_nothing_was_kept(kept: WantedStore) -> None:
    assert kept.remembered() == Remembered(None, ()) and kept.marks() == ()


def test_it_is_found_as_it_was_and_in_order(kept: WantedStore, store: Store, tmp_path: Path) -> None:
    assert kept.keep(wants("c", "a", "b"), LIFE) is None
    assert kept.keep(wants("c", "b")) is None  # the life stays
    store.close()
    again = Store(tmp_path / FILE_NAME)
    assert WantedStore(lambda: again).remembered() == Remembered(LIFE, wants("c", "b"))
    assert WantedStore(lambda: again).live(Life("boot-1", "manager-2", ended=True)) is None
    assert WantedStore(lambda: again).remembered().life == Life("boot-1", "manager-2", ended=True)
    again.close()


def test_what_another_release_wrote_is_left_out(
    kept: WantedStore, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    kept.keep(wants("a", "b"), LIFE)
    kept.mark(Mark(name="a"))
    store.change(lambda connection: connection.execute("UPDATE wanted SET body = '{}' WHERE name = 'a'"))
    store.change(lambda connection: connection.execute("UPDATE autoload SET body = '7'"))
    assert [each.name for each in kept.remembered().wants] == ["b"]
    assert kept.marks() == ()
    assert "not understood" in caplog.text


def test_marks_keep_their_age(kept: WantedStore) -> None:
    for name in ("b", "a", "c"):
        kept.mark(Mark(name=name))
    kept.mark(Mark(name="b", request=WISH, pinned=True, arguments=("-np", "1"), card="GPU-1"))
    kept.unmark("a")
    kept.unmark("never was")
    first, second = kept.marks()
    assert (first.name, second.name) == ("b", "c")
    want = first.want()
    assert (want.lot, want.request, want.pinned, want.arguments, want.card) == (
        Lot.COMING,
        WISH,
        True,
        ("-np", "1"),
        "GPU-1",
    )
    kept.mark(Mark(name="a"))  # a new mark is the youngest
    assert [each.name for each in kept.marks()] == ["b", "c", "a"]


def test_a_full_disk_is_told_and_changes_nothing(kept: WantedStore, store: Store) -> None:
    kept.keep(wants("a"), LIFE)
    kept.mark(Mark(name="a"))
    full(store)
    problem = kept.keep(wants("a", "b", "c", "d"))
    assert problem is not None and problem.code is ErrorCode.STATE_UNUSABLE
    assert "Which models are wanted is not kept beyond the daemon's life" in problem.message and problem.hint
    with pytest.raises(LlmError, match="That b is loaded at every login is not kept"):
        kept.mark(Mark(name="b", arguments=("x" * 50_000,)))
    assert kept.remembered() == Remembered(LIFE, wants("a"))
    assert [each.name for each in kept.marks()] == ["a"]


def test_memory_in_place_of_the_file_is_not_beyond_the_daemons_life(tmp_path: Path) -> None:
    (tmp_path / "no-directory").write_text("")
    store = Store(tmp_path / "no-directory" / FILE_NAME)
    kept = WantedStore(lambda: store)
    problem = kept.keep(wants("a"))
    assert problem is not None and "forgotten when the daemon ends" in problem.message
    assert [each.name for each in kept.remembered().wants] == ["a"]
    store.close()
    closed = kept.keep(wants("a"))
    assert closed is not None and closed.hint


ODD = "odd"
RECORD = json.loads(record("a", "r1").model_dump_json())


def row(**changes: Any) -> str:
    return json.dumps({"name": ODD, "lot": "coming", **changes})


@pytest.mark.parametrize(
    "body",
    [
        "null",
        5,
        b"\xff\xfe",
        "[" * 50_000,
        row(name="beta"),
        row(name=""),
        row(name="x" * 256),
        row(lot="latched", record=RECORD, run="r1"),
        row(next_attempt=-5),
        row(next_attempt=10**30),
        row(retry_at_s=1e308),
        row(retry_at_s=float("nan")),
        row(least_context_tokens=-3),
        row(request={"context_tokens": 10**30}),
        row(arguments=["--host", "\0"]),
        row(problem={"code": "engine_failed", "details": {"x": 10**30}}),
    ],
)
def test_a_row_that_nobody_wrote_is_left_out_and_told(
    kept: WantedStore, store: Store, body: object, caplog: pytest.LogCaptureFixture
) -> None:
    kept.keep(wants("a"), LIFE)
    kept.mark(Mark(name="a"))
    store.change(lambda connection: connection.execute("INSERT INTO wanted VALUES (-1, ?, ?)", (ODD, body)))
    store.change(
        lambda connection: connection.execute(
            "INSERT INTO autoload (name, body) VALUES (?, ?)",
            (ODD, body if body in {"null", 5} else '{"name": "beta"}'),
        )
    )
    assert [each.name for each in kept.remembered().wants] == ["a"]
    assert [each.name for each in kept.marks()] == ["a"]
    assert "a wanted model is not understood" in caplog.text and "a mark of autoload is not" in caplog.text


def test_two_rows_of_one_launch_are_one(kept: WantedStore, store: Store) -> None:
    first = json.dumps({"name": "a", "lot": "latched", "run": "r1", "record": RECORD})
    again = json.dumps({"name": "b", "lot": "up", "run": "r1"})
    rows = [(0, "a", first), (1, "a2", first), (2, "b", again)]
    store.change(lambda connection: connection.executemany("INSERT INTO wanted VALUES (?, ?, ?)", rows))
    (want,) = kept.remembered().wants
    assert want.name == "a" and want.record is not None and want.record.run == "r1"


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (None, None),
        ({}, None),
        ({"code": []}, None),
        ({"code": {}}, None),
        ({"code": "nonsense"}, None),
        ({"code": "engine_failed", "hint": 5, "details": [1], "detail": {}}, "{}"),
        (
            {
                "code": "engine_failed",
                "detail": "x",
                "details": {"code": 1, "message": 2, "hint": 3, "self": 4, "cause": "killed"},
            },
            "x",
        ),
    ],
)
def test_why_it_failed_is_understood_or_unknown(problem: dict[str, Any] | None, message: str | None) -> None:
    error = failure_of(Want(name="a", lot=Lot.FAILED, problem=problem))
    assert (error.message if error else None) == message
    if message == "x" and error is not None:
        assert error.details == {"cause": "killed"}
