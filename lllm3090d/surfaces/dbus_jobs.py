"""Loads, unloads and releases as objects on the bus: a client gets one at once, and is told by it how that ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lllm3090d.bus.service import BusService
from lllm3090d.bus.service_contract import JOB, MANAGER, ROOT, path_of_job, path_of_model
from lllm3090d.bus.service_values import ObjectPath
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.surfaces.dbus_views import UNKNOWN, details, error_of
from lllm3090d.wire import LoadLine, LoadLineKind, Released, Unloaded

log = logging.getLogger(__name__)

KEPT_S = 60.0  # for clients that look after the end
MOST_ENDED = 256  # objects of jobs that have ended
MOST_RUNNING = 256
Ended = Mapping[str, Any]


@dataclass(slots=True)
class Job:
    """What was asked for, and what came of it."""

    kind: str
    model: str
    token: str
    state: str = "running"
    progress: tuple[str, int, int] = ("", UNKNOWN, UNKNOWN)
    result: Ended = field(default_factory=dict)
    error: tuple[str, str] = ("", "")

    @property
    def path(self) -> str:
        """Its object."""
        return path_of_job(self.token)

    def properties(self) -> dict[str, Any]:
        """Those of its object."""
        return {
            "Kind": self.kind,
            "Model": self.model,
            "Token": self.token,
            "State": self.state,
            "Progress": self.progress,
            "Result": self.result,
            "Error": self.error,
        }


class Jobs:
    """All jobs that run, or have ended a moment ago.

    Args:
        service: on which they are objects.
        kept_s: how long one can be read after its end.
    """

    def __init__(self, service: BusService, kept_s: float = KEPT_S) -> None:
        self._service = service
        self._kept_s = kept_s
        self._jobs: dict[str, Job] = {}  # by path
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._removals: dict[str, asyncio.TimerHandle] = {}  # in the order of their ends

    def of(self, path: str) -> Job:
        """The job of an object. Raises LlmError NO_SUCH_LOAD."""
        found = self._jobs.get(path)
        if found is None:
            raise LlmError(ErrorCode.NO_SUCH_LOAD, f"there is no job {path} any more")
        return found

    def load(self, model: str, token: str, lines: Awaitable[AsyncGenerator[LoadLine]]) -> str:
        """A load begins; its object. Raises LlmError INVALID_REQUEST, TOO_MANY_REQUESTS."""
        job = Job("load", model, token)
        return self._begin(job, self._load(job, lines))

    def other(self, kind: str, model: str, token: str, work: Awaitable[Unloaded | Released]) -> str:
        """An unload or a release begins; its object. Raises LlmError as :meth:`load`."""
        job = Job(kind, model, token)
        return self._begin(job, self._other(work))

    def check(self, token: str) -> None:
        """Raise what :meth:`load` would."""
        if path_of_job(token) in self._jobs:
            raise LlmError(
                ErrorCode.INVALID_REQUEST,
                f"the token {token} belongs to another job",
                hint="Choose a token of its own for every job.",
            )
        if len(self._tasks) >= MOST_RUNNING:
            raise LlmError(
                ErrorCode.TOO_MANY_REQUESTS,
                f"{MOST_RUNNING} jobs have not ended",
                hint="Wait for one of them, or cancel one.",
            )

    async def end(self) -> None:
        """The daemon stops: what has not ended fails, models go on."""
        for removal in self._removals.values():
            removal.cancel()
        await asyncio.sleep(0)  # one that is cancelled before it has begun could tell nobody
        tasks = tuple(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, job: Job, work: Awaitable[Ended]) -> str:
        self._jobs[job.path] = job
        self._service.publish(job.path, (JOB,))
        self._service.added(job.path, {JOB: job.properties()})
        # It begins with the next turn of the loop, so that the answer with its path is out before its first signal.
        task = asyncio.get_running_loop().create_task(self._follow(job, work), name=f"job {job.token}")
        self._tasks[job.path] = task
        return job.path

    async def _follow(self, job: Job, work: Awaitable[Ended]) -> None:
        try:
            job.result = await work
        except LlmError as error:
            self._failed(job, error)
        except asyncio.CancelledError:
            self._failed(job, LlmError(ErrorCode.SHUTTING_DOWN, "the daemon is stopping; models go on"))
            raise
        except Exception as error:  # the edge: the client is told, the journal gets the traceback
            log.error("a job failed unexpectedly", exc_info=error, extra={"kind": job.kind})
            text = f"the daemon made a mistake: {type(error).__name__}: {error}"
            self._failed(job, LlmError(ErrorCode.INTERNAL, text))
        else:
            self._completed(job)
        finally:
            del self._tasks[job.path]
            self._keep_a_while(job)

    async def _load(self, job: Job, lines: Awaitable[AsyncGenerator[LoadLine]]) -> Ended:
        async with contextlib.aclosing(await lines) as answers:
            async for line in answers:
                if line.kind is LoadLineKind.READY:
                    told = details(line.instance) if line.instance is not None else {}
                    name = told.get("name", job.model)
                    return {**told, "object": ObjectPath(path_of_model(name))}
                if line.problem is not None:
                    raise _ProblemError(line.problem)
                self._progress(job, line)
        raise LlmError(ErrorCode.LOAD_CANCELLED, f"the load of {job.model} came to no end")

    async def _other(self, work: Awaitable[Unloaded | Released]) -> Ended:
        return details(await work)

    def _progress(self, job: Job, line: LoadLine) -> None:
        resident, expected = line.resident_bytes, line.expected_bytes
        state = str(line.state) if line.state is not None else job.progress[0]
        told = (
            state,
            job.progress[1] if resident is None else resident,
            job.progress[2] if expected is None else expected,
        )
        if told != job.progress:
            job.progress = told
            self._service.changed(job.path, JOB, {"Progress": told})

    def _completed(self, job: Job) -> None:
        job.state = "completed"
        self._service.changed(job.path, JOB, {"State": job.state, "Result": job.result})
        self._service.emit(job.path, JOB, "Completed", job.result)
        self._service.emit(ROOT, MANAGER, "JobCompleted", job.path, job.kind, job.model, job.result)

    def _failed(self, job: Job, error: LlmError) -> None:
        problem = error.document if isinstance(error, _ProblemError) else error.problem()
        job.state, job.error = "failed", error_of(problem)
        self._service.changed(job.path, JOB, {"State": job.state, "Error": job.error})
        self._service.emit(job.path, JOB, "Failed", *job.error)
        self._service.emit(ROOT, MANAGER, "JobFailed", job.path, job.kind, job.model, *job.error)

    def _keep_a_while(self, job: Job) -> None:
        loop = asyncio.get_running_loop()
        self._removals[job.path] = loop.call_later(self._kept_s, self._remove, job.path)
        while len(self._removals) > MOST_ENDED:
            self._remove(next(iter(self._removals)))

    def _remove(self, path: str) -> None:
        self._removals.pop(path).cancel()
        del self._jobs[path]
        self._service.withdraw(path)
        self._service.removed(path, (JOB,))
        self._service.emit(ROOT, MANAGER, "JobRemoved", path)


class _ProblemError(LlmError):
    """A failure that was told as its document."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        super().__init__(ErrorCode(document["code"]), document["detail"])
        self.document = document
