"""Running out of file descriptors: told apart, and told once."""

from __future__ import annotations

import asyncio
import errno
from typing import Any

import pytest

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.files import exhausted, is_exhaustion
from lllm3090d.surfaces.accepting import SAY_EVERY_S, Accepting

pytestmark = pytest.mark.unit


def caused(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_whatever_failed_for_want_of_files_says_so(number: int) -> None:
    plain = OSError(number, "Too many open files")
    wrapped = caused(
        LlmError(ErrorCode.BAD_CHECKPOINT, "m.gguf cannot be read", hint="Fetch it again"), plain
    )
    for error in (plain, wrapped, caused(ValueError("x"), wrapped)):
        told = exhausted(error)
        assert told is not None
        assert told.code is ErrorCode.FILES_EXHAUSTED
        assert "no file descriptors left" in told.message
    assert "m.gguf cannot be read" in str(exhausted(wrapped))


def test_other_failures_stay_what_they_are() -> None:
    for error in (
        OSError(errno.ENOENT, "No such file or directory"),
        caused(LlmError(ErrorCode.BAD_CHECKPOINT, "x", hint="y"), OSError(errno.EIO, "Input/output error")),
        ValueError("Too many open files"),
    ):
        assert not is_exhaustion(error)
        assert exhausted(error) is None


def test_a_failure_that_is_its_own_cause_is_looked_at_once() -> None:
    """As after ``raise error from error``."""
    error = ValueError("x")
    error.__cause__ = error
    assert not is_exhaustion(error)


def test_clients_that_cannot_be_taken_are_told_once_a_while() -> None:
    now = [0.0]
    told: list[str] = []
    others: list[dict[str, Any]] = []
    accepting = Accepting(told.append, lambda: now[0])
    loop = asyncio.new_event_loop()
    loop.default_exception_handler = others.append  # type: ignore[assignment]  # it would log
    shortage: dict[str, Any] = {
        "message": "socket.accept() out of system resource",
        "exception": OSError(errno.EMFILE, "Too many open files"),
        "socket": object(),
    }
    for _ in range(200):
        accepting(loop, shortage)
        now[0] += 1.0
    assert told == ["no client can be taken until others have left: Too many open files; models go on"]
    now[0] += SAY_EVERY_S + 1
    accepting(loop, shortage)
    assert len(told) == 2
    for context in (
        {"message": "a task's", "exception": OSError(errno.EMFILE, "Too many open files")},
        {"message": "a socket's", "exception": OSError(errno.EPIPE, "Broken pipe"), "socket": object()},
        {"message": "no exception", "socket": object()},
    ):
        accepting(loop, context)
    assert [context["message"] for context in others] == ["a task's", "a socket's", "no exception"]
    loop.close()
