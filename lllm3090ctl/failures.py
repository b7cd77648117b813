"""Failures as the client knows them: a problem document of the daemon, or its own in the same shape."""

from __future__ import annotations

from collections.abc import Mapping

from lllm3090ctl.exits import ExitStatus

PROBLEM_TYPE_PREFIX = "urn:lllm3090:error:"


class Failure(Exception):
    """A failure with everything a person or a program needs to know.

    Attributes:
        problem: the RFC 9457 problem document, as received or as made here.
        exit_status: what the process ends with; one of :class:`ExitStatus`, or what a newer daemon named.
    """

    def __init__(self, problem: Mapping[str, object], exit_status: int) -> None:
        super().__init__(str(problem.get("detail", "")))
        self.problem = problem
        self.exit_status = exit_status


def own_failure(
    code: str,
    title: str,
    detail: str,
    *,
    exit_status: ExitStatus,
    hint: str | None = None,
    details: Mapping[str, object] | None = None,
) -> Failure:
    """A failure found by the client itself, shaped like the daemon's.

    Args:
        code: stable code, see ``docs/reference/cli.md``.
        title: the kind of failure, the same for every occurrence.
        detail: what happened and why.
        exit_status: what the process ends with.
        hint: what to do next, preferably commands.
        details: structured facts.
    """
    problem: dict[str, object] = {
        "type": PROBLEM_TYPE_PREFIX + code,
        "title": title,
        "detail": detail,
        "code": code,
        "exit_status": int(exit_status),
    }
    if hint is not None:
        problem["hint"] = hint
    if details:
        problem["details"] = dict(details)
    return Failure(problem, exit_status)


def bad_answer(detail: str) -> Failure:
    """What answered is not our daemon, or one of another version."""
    return own_failure(
        "bad_answer",
        "The answer makes no sense",
        detail,
        exit_status=ExitStatus.FAILURE,
        hint="Compare the versions with 'lllm3090ctl version', then restart the daemon:"
        " systemctl --user restart lllm3090d",
    )


def as_failure(problem: Mapping[str, object]) -> Failure:
    """The failure that a problem document describes.

    A status that a process cannot end with, or that would mean success, becomes FAILURE.

    Raises:
        Failure: ``bad_answer``, when the document says neither ``title`` nor ``detail``.
    """
    if not any(isinstance(problem.get(key), str) for key in ("title", "detail")):
        raise bad_answer("The daemon reports a failure but not which one.")
    status = problem.get("exit_status")
    usable = isinstance(status, int) and not isinstance(status, bool) and 0 < status < 256
    return Failure(problem, int(status) if usable and isinstance(status, int) else ExitStatus.FAILURE)
