"""Log lines on stderr, for a person and for the journal: message, then fields, with priorities."""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import Any

# sd-daemon(3): a line that begins with <N> is logged with priority N.
PRIORITIES = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}
PLAIN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class StructuredFormatter(logging.Formatter):
    """``message key=value ...``; values with spaces are quoted as JSON strings.

    One record is one line, unless it carries a traceback.
    """

    def __init__(self, *, journal: bool) -> None:
        super().__init__()
        self.journal = journal

    def format(self, record: logging.LogRecord) -> str:
        """Render one record."""
        fields = {key: value for key, value in vars(record).items() if key not in PLAIN}
        text = " ".join(
            [_one_line(record.getMessage()), *(f"{key}={_value(value)}" for key, value in fields.items())]
        )
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        if not self.journal:
            return f"{self.formatTime(record)} {record.levelname.lower()} {text}"
        priority = PRIORITIES.get(record.levelno, 6)
        return "\n".join(f"<{priority}>{line}" for line in text.splitlines())


def _one_line(text: str) -> str:
    """The text with whatever could end a line or steer a terminal escaped."""
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


def _value(value: Any) -> str:
    text = str(value)
    return text if text and all(c.isprintable() and c not in ' "=' for c in text) else json.dumps(text)


def to_journal() -> bool:
    """stderr is connected to the journal (``JOURNAL_STREAM`` names its device and inode)."""
    stream = os.environ.get("JOURNAL_STREAM", "")
    stat = os.fstat(sys.stderr.fileno())
    return stream == f"{stat.st_dev}:{stat.st_ino}"


def set_up(level: str) -> None:
    """Send every record of this level and above to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(StructuredFormatter(journal=to_journal()))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
