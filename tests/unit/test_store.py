"""The state file: kept, migrated, and never a reason to stop."""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from lllm3090d import store as store_module
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.store import APPLICATION_ID, SCHEMA_VERSION, Store

pytestmark = pytest.mark.unit

INSERT = (
    "INSERT INTO headers (path, size_bytes, mtime_ns, inode, reader, digest) VALUES (?, 1, 2, 3, 'r', '{}')"
)
PATHS = "SELECT path FROM headers ORDER BY path"


def add(store: Store, path: bytes) -> bool:
    return store.change(lambda connection: connection.execute(INSERT, (path,)))


def problem(store: Store) -> LlmError | None:
    return store.problem


def works(store: Store) -> bool:
    """What is put into it can be got out of it."""
    return add(store, b"probe") and (b"probe",) in store.rows(PATHS)


def test_it_is_made_with_its_directory_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "new" / "state.db"
    store = Store(path)
    assert store.problem is None
    assert add(store, b"a")
    store.close()
    again = Store(path)
    assert again.rows(PATHS) == [(b"a",)]
    assert again.rows("PRAGMA journal_mode") == [("wal",)]
    assert again.rows("PRAGMA application_id") == [(APPLICATION_ID,)]
    assert again.rows("SELECT max(version) FROM migrations") == [(SCHEMA_VERSION,)]
    assert path.parent.stat().st_mode & 0o777 == 0o700
    again.close()


def test_a_change_is_whole_or_not_at_all(tmp_path: Path) -> None:
    store = Store(tmp_path / "state.db")

    def half(connection: sqlite3.Connection) -> None:
        connection.execute(INSERT, (b"a",))
        connection.execute(INSERT, (b"a",))  # not unique

    assert not store.change(half)
    assert store.rows(PATHS) == []
    with pytest.raises(ZeroDivisionError):
        store.change(lambda connection: (connection.execute(INSERT, (b"b",)), 1 // 0))
    assert store.rows(PATHS) == []
    assert add(store, b"c")
    store.close()


def test_later_migrations_are_applied_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state.db"
    first = Store(path)
    add(first, b"a")
    first.close()
    more = (*store_module.MIGRATIONS, ("ALTER TABLE headers ADD COLUMN extra TEXT DEFAULT 'x'",))
    monkeypatch.setattr(store_module, "MIGRATIONS", more)
    monkeypatch.setattr(store_module, "SCHEMA_VERSION", len(more))
    for _ in range(2):
        store = Store(path)
        assert store.problem is None
        assert store.rows("SELECT path, extra FROM headers") == [(b"a", "x")]
        assert store.rows("SELECT version FROM migrations") == [(n,) for n in range(1, len(more) + 1)]
        store.close()


def test_a_failed_migration_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state.db"
    Store(path).close()
    broken = (*store_module.MIGRATIONS, ("CREATE TABLE half (x)", "CREATE TABLE headers (x)"))
    with monkeypatch.context() as patched:
        patched.setattr(store_module, "MIGRATIONS", broken)
        patched.setattr(store_module, "SCHEMA_VERSION", len(broken))
        with pytest.raises(sqlite3.OperationalError):  # a defect of the release: memory has the same fault
            Store(path)
    store = Store(path)
    assert store.rows("SELECT name FROM sqlite_schema WHERE name = 'half'") == []
    store.close()


def test_a_file_of_a_newer_release_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "state.db"
    newer = Store(path)
    newer.change(lambda connection: connection.execute("INSERT INTO migrations VALUES (99, 0)"))
    add(newer, b"theirs")
    newer.close()
    with caplog.at_level(logging.WARNING):
        store = Store(path)
    assert store.problem is not None
    assert store.problem.code is ErrorCode.STATE_UNUSABLE
    assert "newer release" in store.problem.message
    assert "99" in store.problem.message
    assert "newer release" in caplog.text
    assert store.path is None
    assert works(store)  # in memory
    store.close()
    with sqlite3.connect(path) as connection:
        assert connection.execute(PATHS).fetchall() == [(b"theirs",)]
    connection.close()


@pytest.mark.parametrize(
    "content", [b"no database at all" * 100, b"SQLite format 3\0" + b"\xff" * 5000, b"\0" * 8192]
)
def test_a_damaged_file_is_moved_aside(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "state.db"
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        store = Store(path)
    assert store.problem is not None
    assert "damaged" in store.problem.message
    assert "begins anew" in caplog.text
    (aside,) = tmp_path.glob("state.db.damaged-*")
    assert aside.read_bytes() == content
    assert str(aside) in (store.problem.hint or "")
    assert works(store)
    store.close()
    again = Store(path)
    assert again.problem is None
    assert again.rows(PATHS) == [(b"probe",)]
    again.close()


def test_only_the_last_damaged_files_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    for number in range(store_module.KEPT_DAMAGED_FILES + 2):
        for file in tmp_path.glob("state.db*"):
            if "damaged" not in file.name:
                file.unlink()
        path.write_bytes(b"damaged %d" % number * 100)
        Store(path).close()
    assert len(list(tmp_path.glob("state.db.damaged-*"))) == store_module.KEPT_DAMAGED_FILES


def test_the_database_of_another_program_is_not_touched_up(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE theirs (x)")
    connection.close()
    store = Store(path)
    assert store.problem is not None
    assert "another program" in store.problem.message
    assert works(store)
    store.close()
    (aside,) = tmp_path.glob("state.db.damaged-*")
    with sqlite3.connect(aside) as connection:
        assert connection.execute("SELECT name FROM sqlite_schema").fetchall() == [("theirs",)]
    connection.close()


def damage_schema(path: Path) -> None:
    """Make a table's definition neither SQL nor UTF-8, which SQLite quotes in its message."""
    content = path.read_bytes()
    assert content.count(b"path BLOB NOT NULL") == 1
    path.write_bytes(content.replace(b"path BLOB NOT NULL", b"path BLOB NOT \x8fULL"))


def test_a_damaged_schema_is_got_over(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    Store(path).close()
    damage_schema(path)
    store = Store(path)
    assert store.problem is not None
    assert "damaged" in store.problem.message
    assert store.path == path
    assert works(store)
    store.close()


@pytest.mark.parametrize("reads", [True, False])
def test_a_schema_that_is_damaged_later_is_got_over(tmp_path: Path, reads: bool) -> None:
    path = tmp_path / "state.db"
    store = Store(path)
    store.rows("PRAGMA wal_checkpoint(TRUNCATE)")
    store.rows("PRAGMA writable_schema = ON")
    store.rows("UPDATE sqlite_schema SET sql = CAST(x'435245415445208f' AS TEXT) WHERE name = 'headers'")
    store.rows("PRAGMA writable_schema = RESET")
    assert store.rows(PATHS) == [] if reads else not add(store, b"a")
    assert store.problem is not None
    assert "damaged" in store.problem.message
    assert works(store)
    store.close()


def test_damage_that_shows_later_is_got_over(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    store = Store(path)
    store.change(lambda connection: [connection.execute(INSERT, (b"%d" % i * 200,)) for i in range(200)])
    store.change(lambda connection: connection.execute("SELECT 1"))
    store.rows("PRAGMA wal_checkpoint(TRUNCATE)")
    store.close()
    store = Store(path)
    size = path.stat().st_size
    with path.open("r+b") as file:  # all but the first page
        file.seek(4096)
        file.write(os.urandom(size - 4096))
    assert store.rows(PATHS) == []
    assert store.problem is not None
    assert "damaged" in store.problem.message
    assert works(store)
    assert store.path == path
    store.close()


@pytest.mark.parametrize("what", ["a file in place of the directory", "a directory in place of the file"])
def test_where_no_file_can_be_memory_takes_its_place(tmp_path: Path, what: str) -> None:
    if what.startswith("a file"):
        (tmp_path / "dir").write_text("")
        path = tmp_path / "dir" / "state.db"
    else:
        path = tmp_path / "state.db"
        path.mkdir()
    store = Store(path)
    assert store.problem is not None
    assert store.problem.code is ErrorCode.STATE_UNUSABLE
    assert "state_dir" in (store.problem.hint or "")
    assert store.path is None
    assert works(store)
    store.close()


def test_a_full_disk_passes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Store(tmp_path / "state.db")
    assert add(store, b"before")
    pages = store.rows("PRAGMA page_count")[0][0]
    store.rows(f"PRAGMA max_page_count = {pages}")  # SQLite then fails as on a full disk

    def much(connection: sqlite3.Connection) -> None:
        connection.executemany(INSERT, [(b"%05d" % i * 500,) for i in range(100)])

    with caplog.at_level(logging.INFO):
        assert not store.change(much)
        assert not store.change(much)
    assert store.problem is not None
    assert "full" in store.problem.message
    assert caplog.text.count("cannot be written") == 1
    assert store.rows(PATHS) == [(b"before",)]
    store.rows("PRAGMA max_page_count = 1000000")
    with caplog.at_level(logging.INFO):
        assert store.change(much)
    assert problem(store) is None
    assert "can be used again" in caplog.text
    store.close()


def test_a_locked_file_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state.db"
    monkeypatch.setattr(store_module, "BUSY_TIMEOUT_S", 0.05)
    store = Store(path)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    assert not add(store, b"a")
    assert store.problem is not None
    assert "locked" in store.problem.message
    assert store.rows("PRAGMA busy_timeout") == [(0,)]  # one wait is enough
    assert not add(store, b"a")
    other.execute("ROLLBACK")
    other.close()
    assert add(store, b"a")
    assert problem(store) is None
    assert store.rows("PRAGMA busy_timeout") == [(50,)]
    store.close()


# --- looked at again --------------------------------------------------------------------------------------


def checked(store: Store) -> str:
    """What is wrong by now, "" when nothing is."""
    error = store.check()
    assert error == store.problem
    return error.message if error else ""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with 12 MiB, to be filled."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ("mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(place))
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting is not allowed here")
    yield place
    subprocess.run(("umount", "--lazy", str(place)), check=True)


def test_a_sound_file_is_not_written_to_by_looking(tmp_path: Path) -> None:
    store = Store(tmp_path / "state.db")
    before = {file.name: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
    assert [checked(store) for _ in range(3)] == ["", "", ""]
    assert {file.name: file.stat().st_mtime_ns for file in tmp_path.iterdir()} == before
    store.close()
    assert store.check() is None


def test_a_disk_that_fills_is_told_before_anything_is_written_and_room_is_noticed(small_disk: Path) -> None:
    store = Store(small_disk / "state.db")
    assert checked(store) == ""
    ballast = small_disk / "ballast"
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 11 << 20)
    assert "KiB left" in checked(store)
    assert store.problem is not None
    assert store.problem.hint == "Check the space on its disk."
    assert add(store, b"small")  # what little there is left is used
    assert "KiB left" in checked(store)
    ballast.unlink()
    assert checked(store) == ""  # nothing was written since
    assert add(store, b"after")
    store.close()


def test_a_failed_write_to_a_full_disk_is_forgotten_once_there_is_room(small_disk: Path) -> None:
    store = Store(small_disk / "state.db")
    with (small_disk / "ballast").open("wb") as file:
        os.posix_fallocate(
            file.fileno(), 0, os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_bsize
        )
        assert not store.change(
            lambda connection: connection.executemany(INSERT, [(b"%05d" % i * 500,) for i in range(100)])
        )
        assert store.problem is not None
        assert "0 KiB left" in checked(store)
        os.truncate(file.fileno(), 0)
        assert checked(store) == ""
    assert works(store)
    store.close()


def test_a_lock_that_goes_is_noticed_without_a_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(store_module, "BUSY_TIMEOUT_S", 0.05)
    store = Store(tmp_path / "state.db")
    other = sqlite3.connect(tmp_path / "state.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with caplog.at_level(logging.INFO):
        assert not add(store, b"a")
        assert "locked" in checked(store)
        assert "locked" in checked(store)
        other.execute("ROLLBACK")
        other.close()
        assert checked(store) == ""
    assert caplog.text.count("locked") == 1
    assert caplog.text.count("can be used again") == 1
    store.close()


def test_a_file_is_used_as_soon_as_it_can_be(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("in the way")
    path = tmp_path / "state" / "state.db"
    store = Store(path)
    assert works(store)
    assert "forgotten when the daemon ends" in checked(store)
    assert (tmp_path / "state").read_text() == "in the way"
    (tmp_path / "state").unlink()
    assert checked(store) == ""
    assert store.path == path
    assert works(store)
    store.close()
    assert Store(path).rows(PATHS) == [(b"probe",)]


@pytest.mark.parametrize("what", ["removed", "replaced", "its directory"])
def test_a_file_that_is_taken_away_is_told_and_made_anew(tmp_path: Path, what: str) -> None:
    """SQLite would go on with the file that nobody can find any more."""
    path = tmp_path / "state" / "state.db"
    store = Store(path)
    assert add(store, b"a")
    if what == "its directory":
        shutil.rmtree(path.parent)
    else:
        path.unlink()
    if what == "replaced":
        Store(path).close()
    assert "removed or replaced" in checked(store)
    assert works(store)
    assert "removed or replaced" in checked(store)  # what was lost stays lost
    store.close()
    again = Store(path)
    assert again.rows(PATHS) == [(b"probe",)]
    again.close()


def test_a_present_trouble_goes_before_a_past_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "BUSY_TIMEOUT_S", 0.05)
    (tmp_path / "state.db").write_bytes(b"no database at all" * 100)
    store = Store(tmp_path / "state.db")
    assert "was damaged" in checked(store)
    other = sqlite3.connect(tmp_path / "state.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    assert not add(store, b"a")
    assert "locked" in checked(store)
    other.execute("ROLLBACK")
    other.close()
    assert "was damaged" in checked(store)
    store.close()


def test_from_many_threads(tmp_path: Path) -> None:
    store = Store(tmp_path / "state.db")
    failures: list[str] = []

    def work(number: int) -> None:
        for i in range(20):
            if not add(store, b"%d-%d" % (number, i)) or not store.rows(PATHS):
                failures.append(f"{number}-{i}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(store.rows(PATHS)) == 160
    store.close()


def test_a_closed_store_finds_and_keeps_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path / "state.db")
    store.close()
    assert store.rows(PATHS) == []
    assert not add(store, b"a")
    assert store.problem is None
