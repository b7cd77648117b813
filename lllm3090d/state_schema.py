"""Which release a state file is of, without a change to it; and that a daemon does not start with one of a newer."""

from __future__ import annotations

import contextlib
import shlex
import sqlite3
from pathlib import Path

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.store import APPLICATION_ID, SCHEMA_VERSION
from lllm3090d.version import VERSION

BUSY_LIMIT_S = 1.0


def schema_of(file: Path) -> tuple[int, int]:
    """Whose database it is (its application id), and its schema; 0 for that of another program.

    Raises:
        sqlite3.Error, UnicodeDecodeError: it is damaged, or in use just now.
        OSError: it cannot be looked at.
    """
    # A journal that is there has to be read too; else nothing beside the file is touched.
    journal = file.with_name(file.name + "-wal")
    is_alone = not journal.exists() or journal.stat().st_size == 0
    mode = "immutable=1" if is_alone else "mode=ro"
    address = f"{file.absolute().as_uri()}?{mode}"
    with contextlib.closing(sqlite3.connect(address, uri=True, timeout=BUSY_LIMIT_S)) as database:
        owner = int(database.execute("PRAGMA application_id").fetchone()[0])
        if owner != APPLICATION_ID:
            database.execute("SELECT count(*) FROM sqlite_schema").fetchone()
            return owner, 0
        return owner, int(database.execute("SELECT coalesce(max(version), 0) FROM migrations").fetchone()[0])


def require_known_schema(file: Path) -> None:
    """Refuse a state file of a newer release; whatever else may be wrong with it, the store deals with.

    Without it the daemon would not know what is wanted, pinned and released; as it is, it would misread that.

    Raises:
        LlmError: ``state_newer``.
    """
    try:
        _, version = schema_of(file)
    except (OSError, sqlite3.Error, UnicodeDecodeError):
        return
    if version > SCHEMA_VERSION:
        aside = shlex.quote(str(file.with_name("newer")))
        raise LlmError(
            ErrorCode.STATE_NEWER,
            f"The state file {file} was written by a newer release of lllm3090: its schema is {version}, and this"
            f" release ({VERSION}) knows {SCHEMA_VERSION}. The file is as it was, and models that run go on.",
            hint="Install the newer release again. To go back all the same, move the file away, and what was learnt"
            f" begins anew: mkdir {aside} && mv {shlex.quote(str(file))}* {aside}",
            path=str(file),
            schema=version,
            known_schema=SCHEMA_VERSION,
        )
