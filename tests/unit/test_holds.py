"""Holds outlive the daemon, are in force at once, and say so where they cannot be kept."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.serving.holds import Holds
from lllm3090d.store import Store

pytestmark = pytest.mark.unit


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.db"


@pytest.fixture
def opened(path: Path) -> Iterator[Callable[[], Store]]:
    """Open the state file as another life of the daemon would."""
    stores: list[Store] = []

    def opening() -> Store:
        for store in stores:
            store.close()
        stores.append(Store(path))
        return stores[-1]

    yield opening
    for store in stores:
        store.close()


def holds(store: Store) -> Holds:
    return Holds(lambda: store)


def by_another_program(path: Path, statement: str) -> None:
    connection = sqlite3.connect(path)
    connection.execute(statement)
    connection.commit()
    connection.close()


def test_nothing_is_held_at_first(opened: Callable[[], Store]) -> None:
    fresh = holds(opened())
    assert fresh.released() is False
    assert fresh.pinned_runs() == frozenset()


def test_the_store_is_not_opened_before_it_is_needed() -> None:
    def opening() -> Store:
        raise AssertionError("too early")

    Holds(opening)


def test_what_is_held_outlives_the_daemon(opened: Callable[[], Store]) -> None:
    first = holds(opened())
    first.set_released(True)
    first.set_pinned("a", True)
    first.set_pinned("b", True)
    first.set_pinned("b", True)
    assert (first.released(), first.pinned_runs()) == (True, frozenset({"a", "b"}))
    second = holds(opened())
    assert (second.released(), second.pinned_runs()) == (True, frozenset({"a", "b"}))
    second.set_released(False)
    second.set_pinned("a", False)
    second.set_pinned("never", False)
    third = holds(opened())
    assert (third.released(), third.pinned_runs()) == (False, frozenset({"b"}))


def test_runs_that_ended_are_forgotten(opened: Callable[[], Store]) -> None:
    first = holds(opened())
    first.set_released(True)
    for run in ("a", "b", "c"):
        first.set_pinned(run, True)
    first.forget("a")
    first.forget("a")
    assert first.pinned_runs() == {"b", "c"}
    first.forget_all_but(["c", "d"])
    assert holds(opened()).pinned_runs() == {"c"}
    first = holds(opened())
    first.forget_all_but([])
    assert (first.released(), first.pinned_runs()) == (True, frozenset())


@pytest.mark.parametrize("name", ["released", "", "run'; DROP TABLE holds; --"])
def test_a_run_may_have_any_name(opened: Callable[[], Store], name: str) -> None:
    holds(opened()).set_pinned(name, True)
    again = holds(opened())
    assert (again.released(), again.pinned_runs()) == (False, frozenset({name}))


def test_a_file_that_cannot_be_made_is_told_and_the_hold_is_in_force(tmp_path: Path) -> None:
    (tmp_path / "blocked").write_text("no directory")
    store = Store(tmp_path / "blocked" / "state.db")
    held = holds(store)
    with pytest.raises(LlmError, match="not kept beyond the daemon's life") as caught:
        held.set_released(True)
    assert caught.value.code is ErrorCode.STATE_UNUSABLE
    assert caught.value.hint
    assert held.released() is True
    with pytest.raises(LlmError):
        held.set_pinned("a", True)
    assert held.pinned_runs() == {"a"}
    store.close()


def test_a_file_that_cannot_be_read_is_not_taken_for_an_empty_one(
    path: Path, opened: Callable[[], Store]
) -> None:
    holds(opened()).set_pinned("a", True)
    store = opened()
    held = holds(store)
    by_another_program(path, "ALTER TABLE holds RENAME TO away")
    for question in (held.released, held.pinned_runs, lambda: held.set_released(False)):
        with pytest.raises(LlmError, match="cannot be read") as caught:
            question()
        assert caught.value.code is ErrorCode.STATE_UNUSABLE
    by_another_program(path, "ALTER TABLE away RENAME TO holds")
    assert held.pinned_runs() == {"a"}


def test_what_could_not_be_written_is_written_the_next_time(path: Path, opened: Callable[[], Store]) -> None:
    held = holds(opened())
    held.set_pinned("a", True)
    by_another_program(path, "ALTER TABLE holds RENAME TO away")
    with pytest.raises(LlmError, match="not kept"):
        held.set_released(True)
    assert held.released()
    by_another_program(path, "ALTER TABLE away RENAME TO holds")
    held.set_released(True)  # once more
    again = holds(opened())
    assert (again.released(), again.pinned_runs()) == (True, frozenset({"a"}))


def test_a_store_that_is_closed(opened: Callable[[], Store]) -> None:
    store = opened()
    held = holds(store)
    store.close()
    with pytest.raises(LlmError, match="closed") as caught:
        held.released()
    assert caught.value.hint
    with pytest.raises(LlmError, match="closed"):
        held.set_pinned("a", True)
