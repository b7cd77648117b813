"""A state file of a newer release: no start, a message that says what to do, and not a byte changed."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lllm3090d.errors import ErrorCode, ExitStatus, LlmError
from lllm3090d.state_schema import require_known_schema, schema_of
from lllm3090d.store import APPLICATION_ID, FILE_NAME, SCHEMA_VERSION, Store

pytestmark = pytest.mark.unit

NEWER = SCHEMA_VERSION + 1


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Of this release."""
    path = tmp_path / "it's" / FILE_NAME
    Store(path).close()
    return path


def make_newer(file: Path) -> None:
    with sqlite3.connect(file) as connection:
        connection.execute("INSERT INTO migrations VALUES (?, 0)", (NEWER,))
        connection.execute("CREATE TABLE theirs (x)")
    connection.close()


def contents(file: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in file.parent.iterdir()}


def test_it_is_refused_and_stays_as_it_is(file: Path) -> None:
    require_known_schema(file)
    make_newer(file)
    before = contents(file)
    with pytest.raises(LlmError) as caught:
        require_known_schema(file)
    assert contents(file) == before
    error = caught.value
    assert (error.code, error.kind.exit_status) == (ErrorCode.STATE_NEWER, ExitStatus.CONFIG)
    assert error.details == {"path": str(file), "schema": NEWER, "known_schema": SCHEMA_VERSION}
    for told in (str(file), f"schema is {NEWER}", f"knows {SCHEMA_VERSION}", "models that run go on"):
        assert told in error.message


def test_what_the_hint_says_works(file: Path) -> None:
    make_newer(file)
    with pytest.raises(LlmError) as caught:
        require_known_schema(file)
    assert caught.value.hint is not None
    command = caught.value.hint.partition("begins anew: ")[2]
    subprocess.run(["sh", "-c", command], check=True)
    require_known_schema(file)
    Store(file).close()
    assert schema_of(file) == (APPLICATION_ID, SCHEMA_VERSION)
    assert schema_of(file.parent / "newer" / FILE_NAME) == (APPLICATION_ID, NEWER)


def test_what_stands_in_the_journal_counts(file: Path) -> None:
    """The newer daemon was killed: its last changes are not in the file itself."""
    store = Store(file)
    store.change(lambda connection: connection.execute("INSERT INTO migrations VALUES (?, 0)", (NEWER,)))
    assert file.with_name(f"{FILE_NAME}-wal").stat().st_size > 0
    with pytest.raises(LlmError):
        require_known_schema(file)
    store.close()


def damage(file: Path) -> None:
    file.write_bytes(b"no database at all" * 400)


def replace(file: Path) -> None:
    file.unlink()
    with sqlite3.connect(file) as connection:
        connection.execute("CREATE TABLE t (x)")
    connection.close()


@pytest.mark.parametrize(
    "spoil", [lambda _: None, Path.unlink, damage, replace, lambda file: file.write_bytes(b"")]
)
def test_everything_else_is_the_stores_to_deal_with(file: Path, spoil: Callable[[Path], object]) -> None:
    spoil(file)
    require_known_schema(file)
    store = Store(file)
    assert store.path == file
    store.close()


def test_the_daemon_does_not_start_with_it(file: Path, tmp_path: Path) -> None:
    make_newer(file)
    before = contents(file)
    done = subprocess.run(
        [sys.executable, "-m", "lllm3090d"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={
            **os.environ,
            "HOME": str(tmp_path),
            "XDG_RUNTIME_DIR": str(tmp_path),
            "LLLM3090_STATE_DIR": str(file.parent),
            "LLLM3090_CONFIG": str(tmp_path / "none.toml"),
        },
    )
    assert (done.returncode, done.stdout) == (ExitStatus.CONFIG, "")
    assert (
        "was written by a newer release" in done.stderr and "Install the newer release again" in done.stderr
    )
    assert contents(file) == before


def test_systemd_does_not_try_again() -> None:
    unit = (Path(__file__).parents[2] / "systemd" / "lllm3090d.service").read_text(encoding="utf-8")
    (line,) = (line for line in unit.splitlines() if line.startswith("RestartPreventExitStatus="))
    assert str(int(ExitStatus.CONFIG)) in line.partition("=")[2].split()
