"""Recording: in batches beside the loop, bounded by age and size, with a gap that is told and never hidden."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

from lllm3090d.serving import recorder as module
from lllm3090d.serving.event_table import DAY_US, Bounds, EventTable, Row, row_of
from lllm3090d.serving.instance import InstanceState
from lllm3090d.serving.moments import now_us, time_text
from lllm3090d.serving.recorder import WAITING_MOST, Gap, Recorder
from lllm3090d.serving.unrecorded import FILE_NAME, Unrecorded
from lllm3090d.store import Store
from lllm3090d.wire import Event, EventKind

pytestmark = pytest.mark.unit

TIMEOUT_S = 60.0
NOW_US = now_us()
T = TypeVar("T")
GENEROUS = Bounds(90, 16 << 20)


def run(work: Awaitable[T]) -> T:
    return asyncio.run(asyncio.wait_for(work, TIMEOUT_S))


def an_event(
    seq: int,
    state: InstanceState = InstanceState.GONE,
    previous: InstanceState = InstanceState.RELEASING,
    model: str = "m",
    message: str = "",
) -> Event:
    return Event(
        seq=seq,
        at=time_text(NOW_US),
        kind=EventKind.STATE,
        model=model,
        run="r",
        state=state,
        previous=previous,
        message=message,
    )


def rows(numbers: Sequence[int], at_us: int = NOW_US, message: str = "") -> list[Row]:
    return [row_of(an_event(number, message=message), at_us) for number in numbers]


def busy(seq: int) -> Row:
    return row_of(an_event(seq, InstanceState.BUSY, InstanceState.READY), NOW_US)


def table_at(path: Path, bounds: Bounds = GENEROUS) -> tuple[Store, EventTable]:
    store = Store(path / "state.db")
    return store, EventTable(lambda: store, lambda: bounds)


def seqs(table: EventTable) -> list[int]:
    return [event.seq for event in table.newest(100_000)]


def stop_growing(store: Store) -> None:
    """SQLite then fails as on a full disk."""
    pages = store.rows("PRAGMA page_count")[0][0]
    store.rows(f"PRAGMA max_page_count = {pages}")


def remove(directory: Path) -> None:
    for path in directory.glob("state.db*"):
        path.unlink()


def grow_again(store: Store) -> None:
    store.rows("PRAGMA max_page_count = 1000000")


# --- the table ---------------------------------------------------------------------------------------------


def test_what_was_written_is_read_in_order(tmp_path: Path) -> None:
    store, table = table_at(tmp_path)
    assert table.write(rows([3, 1, 2]), 10, ended=False)
    assert seqs(table) == [1, 2, 3]
    assert [event.seq for event in table.after(1, 3, 0, 9)] == [2]
    assert [event.seq for event in table.after(0, 9, 0, 2)] == [1, 2]
    assert table.after(0, 9, NOW_US + 1, 9) == ()
    assert [event.seq for event in table.of_model("m", 2)] == [2, 3]
    assert table.of_model("other", 9) == ()
    assert table.models() == ("m",)
    assert table.newest(1)[0] == an_event(3)
    store.close()


def test_writing_the_same_twice_is_writing_it_once(tmp_path: Path) -> None:
    store, table = table_at(tmp_path)
    for _ in range(2):
        assert table.write(rows([1, 2]), 3, ended=True)
    assert seqs(table) == [1, 2]
    store.close()


@pytest.mark.parametrize("ended", [True, False])
def test_the_next_daemon_knows_where_to_begin(tmp_path: Path, ended: bool) -> None:
    store, table = table_at(tmp_path)
    numbers = table.numbers()
    assert numbers is not None
    assert (numbers.next, numbers.ended, numbers.last_at) == (1, True, None)
    table.write(rows([1, 2]), 1002, ended=ended)
    numbers = table.numbers()
    assert numbers is not None
    assert (numbers.next, numbers.ended, numbers.last_at) == (1002, ended, time_text(NOW_US))
    store.close()


def test_old_ones_go(tmp_path: Path) -> None:
    store, table = table_at(tmp_path, Bounds(2, 16 << 20))
    table.write(rows([1, 2], at_us=NOW_US - 3 * DAY_US) + rows([3]), 4, ended=False)
    table.prune(NOW_US)
    assert seqs(table) == [1, 2, 3]  # so little is not worth reading the sizes of all
    table.prune(NOW_US, at_once=True)
    assert seqs(table) == [3]
    store.close()


def test_a_clock_that_is_set_forward_does_not_empty_the_history(tmp_path: Path) -> None:
    store, table = table_at(tmp_path, Bounds(90, 16 << 20))
    for day in range(30):
        table.write(rows([day + 1], at_us=NOW_US - (30 - day) * DAY_US), day + 2, ended=False)
    years_later = NOW_US + 10 * 365 * DAY_US
    table.prune(years_later, at_once=True)
    assert seqs(table) == list(range(3, 31))  # what happened in two days, and not all
    table.prune(NOW_US, at_once=True)
    table.prune(0, at_once=True)  # or back to 1970
    assert seqs(table) == list(range(3, 31))
    # In order they are by their numbers, whatever their times say.
    table.write(rows([31], at_us=NOW_US - 300 * DAY_US), 32, ended=False)
    assert [event.seq for event in table.newest(2)] == [30, 31]
    store.close()


def test_the_oldest_go_when_there_are_too_many(tmp_path: Path) -> None:
    bounds = Bounds(90, 100_000)
    store, table = table_at(tmp_path, bounds)
    for first in range(1, 2001, 100):
        table.write(rows(range(first, first + 100), message="x" * 100), first + 100, ended=False)
        table.prune(NOW_US)
        size = store.rows("SELECT sum(size_bytes) FROM events")[0][0]
        assert size <= bounds.size_bytes * 1.5  # and a batch more
    found = seqs(table)
    assert found == list(range(found[0], 2001))
    assert 100 < len(found) < 1000
    store.close()


def test_requests_do_not_push_out_why_a_model_failed(tmp_path: Path) -> None:
    store, table = table_at(tmp_path, Bounds(90, 100_000))
    table.write(rows([1], message="why it failed"), 2, ended=False)
    for first in range(2, 5002, 500):
        table.write([busy(seq) for seq in range(first, first + 500)], first + 500, ended=False)
        table.prune(NOW_US)
    found = seqs(table)
    assert found[0] == 1
    assert found[1] > 2
    assert found[-1] == 5001
    assert [event.seq for event in table.of_model("m", 9)] == [1]
    store.close()


def test_an_event_of_another_release_is_left_out(tmp_path: Path) -> None:
    store, table = table_at(tmp_path)
    unknown = Row(1, NOW_US, "m", False, '{"seq": 1, "at": "t", "kind": "of tomorrow"}')
    table.write([unknown, *rows([2])], 3, ended=False)
    assert seqs(table) == [2]
    store.close()


# --- the recorder ------------------------------------------------------------------------------------------


def test_events_are_written_soon_and_in_one_go(tmp_path: Path) -> None:
    async def scenario() -> None:
        store, table = table_at(tmp_path)
        told: list[Gap] = []
        recorder = Recorder(table, told.append)
        await recorder.open()
        written = asyncio.Event()
        loop = asyncio.get_running_loop()
        batches: list[int] = []
        real = table.write

        def write(batch: Sequence[Row], next_number: int, *, ended: bool) -> bool:
            batches.append(len(batch))
            done = real(batch, next_number, ended=ended)
            loop.call_soon_threadsafe(written.set)
            return done

        table.write = write  # type: ignore[method-assign,assignment]  # to see what it is asked for
        for row in rows(range(1, 51)):
            recorder.take(row)
        await written.wait()
        assert batches == [50]
        assert seqs(table) == list(range(1, 51))
        await recorder.close()
        assert told == []
        assert recorder.problem() is None
        numbers = table.numbers()
        assert numbers is not None
        assert (numbers.next, numbers.ended) == (51, True)
        store.close()

    run(scenario())


def test_the_loop_does_not_wait_for_a_disk_that_hangs(tmp_path: Path) -> None:
    async def scenario() -> None:
        store, table = table_at(tmp_path)
        recorder = Recorder(table, lambda _: None)
        await recorder.open()
        hung, begun = threading.Event(), threading.Event()
        real = table.write

        def write(batch: Sequence[Row], next_number: int, *, ended: bool) -> bool:
            begun.set()
            assert hung.wait(TIMEOUT_S)
            return real(batch, next_number, ended=ended)

        table.write = write  # type: ignore[method-assign,assignment]  # a disk that does not answer
        recorder.take(rows([1])[0])
        writing = asyncio.create_task(recorder.flush())
        assert await asyncio.to_thread(begun.wait, TIMEOUT_S)
        for row in rows(range(2, 100)):
            recorder.take(row)
        assert not writing.done()
        hung.set()
        await writing
        await recorder.close()
        assert seqs(table) == list(range(1, 100))
        store.close()

    run(scenario())


def test_what_waited_for_a_full_disk_is_written_and_what_was_lost_is_told(tmp_path: Path) -> None:
    async def scenario() -> None:
        store, table = table_at(tmp_path)
        told: list[Gap] = []
        recorder = Recorder(table, told.append)
        await recorder.open()
        stop_growing(store)
        for n, row in enumerate(rows(range(1, WAITING_MOST + 11), message="x" * 50)):
            recorder.take(Row(row.seq, NOW_US + n, row.model, row.is_routine, row.body))
        await recorder.flush()
        assert seqs(table) == []
        problem = recorder.problem()
        assert problem is not None
        assert "not recorded" in problem.message
        assert "full" in problem.message
        assert f"{WAITING_MOST} events wait" in problem.message
        assert problem.details["lost"] == 10
        assert told == []
        grow_again(store)
        await recorder.flush()
        assert told == [Gap(10, 1, 10, NOW_US, NOW_US + 9)]
        assert told[0].text == (
            f"10 events were not recorded from {time_text(NOW_US)} to {time_text(NOW_US + 9)}"
        )
        assert seqs(table) == list(range(11, WAITING_MOST + 11))
        assert recorder.problem() is None
        await recorder.close()
        store.close()

    run(scenario())


def test_few_large_events_are_bounded_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        store, table = table_at(tmp_path)
        recorder = Recorder(table, lambda _: None)
        monkeypatch.setattr(module, "WAITING_MOST_BYTES", 10_000)
        await recorder.open()
        stop_growing(store)
        for row in rows(range(1, 20), message="x" * 2000):
            recorder.take(row)
        await recorder.flush()
        assert recorder.problem() is not None
        assert len(recorder._waiting) == 4
        grow_again(store)
        await recorder.close()
        assert seqs(table) == [16, 17, 18, 19]
        store.close()

    run(scenario())


def test_writing_is_tried_again_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_RETRY_S", 0.01)

    async def scenario() -> None:
        store, table = table_at(tmp_path)
        recorder = Recorder(table, lambda _: None)
        await recorder.open()
        stop_growing(store)
        for row in rows(range(1, 200), message="x" * 100):
            recorder.take(row)
        await recorder.flush()
        assert recorder.problem() is not None
        written = asyncio.Event()
        loop, real = asyncio.get_running_loop(), table.write

        def write(batch: Sequence[Row], next_number: int, *, ended: bool) -> bool:
            done = real(batch, next_number, ended=ended)
            if done:
                loop.call_soon_threadsafe(written.set)
            return done

        table.write = write  # type: ignore[method-assign,assignment]  # to see that it is asked again
        grow_again(store)
        await written.wait()
        await recorder.flush()
        assert recorder.problem() is None
        assert len(seqs(table)) == 199
        await recorder.close()
        store.close()

    run(scenario())


def test_the_state_file_may_be_removed_under_us(tmp_path: Path) -> None:
    """What comes then is kept, and numbers go on."""

    async def scenario() -> None:
        store, table = table_at(tmp_path)
        recorder = Recorder(table, lambda _: None)
        await recorder.open()
        for row in rows([1, 2]):
            recorder.take(row)
        await recorder.flush()
        remove(tmp_path)
        recorder.take(rows([3])[0])
        await recorder.flush()
        assert seqs(table) == [3]
        numbers = table.numbers()
        assert numbers is not None
        assert numbers.next > 3
        await recorder.close()
        store.close()

    run(scenario())


def test_numbers_are_set_aside_before_they_are_used(tmp_path: Path) -> None:
    """Progress is told and not kept, and its numbers are taken all the same."""

    async def scenario() -> None:
        store, table = table_at(tmp_path)
        recorder = Recorder(table, lambda _: None)
        await recorder.open()
        for seq in range(1, 3000):
            recorder.numbered(seq)
        assert recorder._wake.is_set()
        await recorder.flush()
        numbers = table.numbers()
        assert numbers is not None
        assert numbers.next >= 3000
        await recorder.close()
        store.close()

    run(scenario())


def test_a_mistake_of_the_recorder_ends_the_recording_and_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        store, table = table_at(tmp_path)
        recorder = Recorder(table, lambda _: None)
        await recorder.open()
        real = table.write

        def write(*_arguments: object, **_named: object) -> bool:
            raise ZeroDivisionError("one by nothing")

        table.write = write  # type: ignore[method-assign]  # a defect
        recorder.take(rows([1])[0])
        assert recorder._task is not None
        await asyncio.wait({recorder._task})
        problem = recorder.problem()
        assert problem is not None
        assert "one by nothing" in problem.message
        assert "no longer recorded" in caplog.text
        table.write = real  # type: ignore[method-assign]
        await recorder.close()  # what waited is not lost
        assert seqs(table) == [1]
        store.close()

    run(scenario())


# --- what the file cannot carry ----------------------------------------------------------------------------


async def die(recorder: Recorder) -> None:
    """As with SIGKILL: nothing more is written."""
    assert recorder._task is not None
    recorder._task.cancel()
    await asyncio.wait({recorder._task})


def test_a_life_whose_file_could_not_be_used_is_known_to_the_next(tmp_path: Path) -> None:
    """Its numbers are not given again, and what happened then is a gap."""
    word = Unrecorded(tmp_path)

    async def recorded() -> None:
        store, table = table_at(tmp_path)
        recorder = Recorder(table, lambda _: None, word)
        await recorder.open()
        for row in rows([1, 2, 3]):
            recorder.take(row)
        await recorder.close()
        store.close()
        assert word.read() is None

    async def unrecorded() -> int:
        """A file that cannot be used, and a daemon that is killed before it can be again; its last number."""
        store, table = table_at(tmp_path)
        recorder = Recorder(table, lambda _: None, word)
        numbers = await recorder.open()
        assert numbers.last_at is None and not numbers.ended
        last = numbers.next + 40
        recorder.take(rows([last])[0])
        await recorder.flush()
        await die(recorder)
        store.close()
        return last

    async def next_one(told: int) -> None:
        store, table = table_at(tmp_path)
        recorder = Recorder(table, lambda _: None, word)
        numbers = await recorder.open()
        assert numbers.next > told
        assert not numbers.ended and numbers.is_behind
        assert numbers.last_at == time_text(NOW_US)  # of what was recorded last
        assert word.read() is None  # the file knows it all now
        await die(recorder)
        assert seqs(table) == [1, 2, 3]
        after = table.numbers()
        assert after is not None and after.next > told and not after.is_behind
        store.close()

    run(recorded())
    for path in tmp_path.glob("state.db*"):
        path.rename(tmp_path / f"aside-{path.name}")
    (tmp_path / "state.db").mkdir()
    told = run(unrecorded())
    (tmp_path / "state.db").rmdir()
    for path in tmp_path.glob("aside-*"):
        path.rename(tmp_path / path.name.removeprefix("aside-"))
    assert (word.read() or 0) > told
    run(next_one(told))


def test_numbers_of_a_full_disk_are_told_to_the_next(tmp_path: Path) -> None:
    """More events than numbers were set aside for; the word is taken back once they are written."""
    word = Unrecorded(tmp_path)

    async def scenario() -> None:
        store, table = table_at(tmp_path)
        recorder = Recorder(table, lambda _: None, word)
        await recorder.open()
        stop_growing(store)
        told = 2 * module.NUMBERS_AHEAD
        for row in rows(range(1, told + 1), message="x" * 200):
            recorder.take(row)
        await recorder.flush()
        kept = table.numbers()
        assert kept is not None and kept.next <= told
        assert (word.read() or 0) > told
        grow_again(store)
        await recorder.flush()
        kept = table.numbers()
        assert kept is not None and kept.next > told
        assert word.read() is None
        await recorder.close()
        store.close()

    run(scenario())


@pytest.mark.parametrize("text", ["", "-5", "many", "9" * 30, "1.5", "0x10"])
def test_a_word_that_is_no_number_is_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    word = Unrecorded(tmp_path)
    assert word.read() is None and not caplog.text
    (tmp_path / FILE_NAME).write_text(text)
    assert word.read() is None
    assert "ignored" in caplog.text
    assert word.write(7) and word.read() == 7
    word.remove()
    word.remove()
    assert word.read() is None


def test_a_word_that_cannot_be_given_is_told_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert not Unrecorded(tmp_path / "nowhere").write(7)
    assert "cannot be written" in caplog.text
    (tmp_path / FILE_NAME).mkdir()
    word = Unrecorded(tmp_path)
    assert word.read() is None and not word.write(7)
    word.remove()
    assert "cannot be removed" in caplog.text
