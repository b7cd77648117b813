"""Drains: a model that goes takes no new requests and may finish those in flight, for a while.

Clients talk to an engine's socket directly. The door is shut by renaming that socket: who connects by its name is
refused, connections that are open go on, and we ask by the new name how much is left. A client that keeps a connection
open can still send requests on it; the limit of the drain ends these too.

The new name says what the drain is for, and the time of the last change of the file when it ends at the latest, on the
monotonic clock, which counts from the boot as the runtime directory does. So a daemon that comes after this one finds
the drain: one for an unload goes on, one for a restart is undone.
"""

from __future__ import annotations

import contextlib
import enum
import os
import stat
from dataclasses import dataclass
from pathlib import Path

LONGEST_S = 86400.0


class Purpose(enum.StrEnum):
    """What for; the suffix of the shut door, no longer than ``.sock``, since paths of sockets are short."""

    UNLOAD = ".shut"
    RESTART = ".hung"


@dataclass(frozen=True, slots=True)
class Drain:
    """Of one model.

    Attributes:
        limit_s: how long its requests may take, as it was asked for.
        deadline_s: when that is over, on the scheduler's clock.
        purpose: what for.
        in_flight: requests that have not ended; None where the engine did not tell yet.
        is_told: the world knows that there are some.
    """

    limit_s: float
    deadline_s: float
    purpose: Purpose = Purpose.UNLOAD
    in_flight: int | None = None
    is_told: bool = False


def doors(socket: Path) -> tuple[Path, ...]:
    """All names that the socket of a run may have."""
    return (socket, *(_door(socket, each) for each in Purpose))


def _door(socket: Path, purpose: Purpose) -> Path:
    return Path(str(socket).removesuffix(".sock") + purpose)


def way_in(socket: Path) -> Path:
    """Where an engine listens now, for those whom a drain waits for: requests with a lease and no connection yet."""
    return next((door for door in doors(socket) if door.exists()), socket)


def remove(socket: Path) -> None:
    """Remove the socket of a run that has ended, under whatever name; what is no socket stays. Raises OSError."""
    for door in doors(socket):
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISSOCK(door.lstat().st_mode):
                door.unlink()


def shut(socket: Path, drain: Drain) -> Path:
    """Rename the socket of a run, whatever its name is now, and note the end of the drain on it.

    Returns:
        Where it is now; its usual name where it is not there at all.

    Raises:
        OSError: it cannot be renamed.
    """
    wanted = _door(socket, drain.purpose)
    for door in doors(socket):
        try:
            if not stat.S_ISSOCK(door.lstat().st_mode):
                continue
            # First the end: a daemon that dies between the two leaves an open door, and no drain without an end.
            os.utime(door, (drain.deadline_s, drain.deadline_s))
            door.rename(wanted)
        except FileNotFoundError:
            continue
        return wanted
    return socket


def reopen(socket: Path) -> bool:
    """Undo a drain; whether there was one. Raises OSError."""
    for purpose in Purpose:
        try:
            _door(socket, purpose).rename(socket)
        except FileNotFoundError:
            continue
        return True
    return False


def taken_up(socket: Path, now_s: float) -> Drain | None:
    """The drain for an unload that a daemon before this one has left; one for a restart is undone. Raises OSError."""
    drain = found(socket, now_s)
    if drain is None or drain.purpose is Purpose.UNLOAD:
        return drain
    reopen(socket)
    return None


def found(socket: Path, now_s: float) -> Drain | None:
    """The drain that a daemon before this one has left; None where there is none. Raises OSError.

    Args:
        socket: of the run, by its usual name.
        now_s: on the monotonic clock.
    """
    for purpose in Purpose:
        try:
            deadline_s = _door(socket, purpose).stat().st_mtime
        except FileNotFoundError:
            continue
        left_s = min(LONGEST_S, max(0.0, deadline_s - now_s))
        return Drain(left_s, now_s + left_s, purpose)
    return None
