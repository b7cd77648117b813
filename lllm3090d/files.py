"""Running out of file descriptors: telling it from other failures, and saying so.

Whatever was being done then failed in words of its own (a file that cannot be read, a program that cannot be run),
which would send a person to the wrong place. The way out is the same for all.
"""

from __future__ import annotations

import errno

from lllm3090d.errors import ErrorCode, LlmError

EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE})


def is_exhaustion(error: BaseException) -> bool:
    """Whether a failure, or what caused it, is that no file descriptor was left."""
    seen: BaseException | None = error
    known: set[int] = set()  # a failure may be its own cause
    while seen is not None and id(seen) not in known:
        if isinstance(seen, OSError) and seen.errno in EXHAUSTED:
            return True
        known.add(id(seen))
        seen = seen.__cause__ or seen.__context__
    return False


def exhausted(error: BaseException) -> LlmError | None:
    """The failure as it is told where it comes of that; None where it does not."""
    if not is_exhaustion(error):
        return None
    while_what = error.message if isinstance(error, LlmError) else str(error)
    return LlmError(
        ErrorCode.FILES_EXHAUSTED,
        f"The daemon has no file descriptors left, so this could not be done ({while_what}). Models go on.",
        hint="Try again when clients have left. Which they are: ls -l /proc/PID/fd with the daemon's PID (lllm3090ctl"
        " status); the limit is LimitNOFILE of lllm3090d.service.",
    )
