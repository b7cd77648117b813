"""Exit statuses of ``lllm3090ctl``. The daemon's table is the original; a test keeps both equal."""

from __future__ import annotations

import enum


class ExitStatus(enum.IntEnum):
    """Documented in ``docs/reference/exit-statuses.md``."""

    OK = 0
    FAILURE = 1  # something went wrong inside; the message says what
    USAGE = 2  # the command line or the request is malformed
    UNREACHABLE = 3  # the daemon does not answer
    NOT_FOUND = 4  # no such model or instance, or the name is ambiguous
    REFUSED = 5  # it would not fit, or is in the way of something that runs
    ENGINE = 6  # the engine is missing, broken, or died
    BAD_CHECKPOINT = 7  # the model's files are damaged, incomplete or of an unknown kind
    TIMEOUT = 8
    FORBIDDEN = 9
    WARNED = 10  # doctor: something works less well than it could
    UNFIT = 11  # doctor: something does not work
    ALREADY_RUNNING = 69  # EX_UNAVAILABLE: another daemon holds the socket
    CONFIG = 78  # EX_CONFIG
    INTERRUPTED = 130
