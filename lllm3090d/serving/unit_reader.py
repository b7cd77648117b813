"""Units read back: from a unit's own command to the record that it lacks, by the files and the engine that it names."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lllm3090d.bus.unit_status import UnitStatus
from lllm3090d.checkpoints.classify import Kind
from lllm3090d.checkpoints.facts import CheckpointFacts
from lllm3090d.checkpoints.projector import projector_of_header
from lllm3090d.checkpoints.shards import complete_shards
from lllm3090d.engines.capabilities import Capabilities
from lllm3090d.engines.command_line import read_command_line
from lllm3090d.errors import LlmError
from lllm3090d.gpus.readings import Card
from lllm3090d.planning.launch import PlanPolicy
from lllm3090d.serving.adoption import Rebuilt, lacking
from lllm3090d.serving.lookup import Lookup
from lllm3090d.serving.plausible import NOT_UNDERSTOOD, bounded, why
from lllm3090d.serving.reconstruction import (
    Command,
    NotUnderstoodError,
    Served,
    command_of,
    rebuilt_record,
    server_of,
)
from lllm3090d.serving.unit_spec import Record

log = logging.getLogger(__name__)

# An engine that is asked for the first time needs a second or two; a dead network mount never answers.
READING_TIME_S = 10.0
MOST_AT_ONCE = 4
TOO_SLOW = f"what it runs could not be read within {READING_TIME_S:g} s"


class UnitReader:
    """Reconstructs records. Nothing is started, and nothing of a unit is changed.

    Args:
        lookup: of engines and headers.
        cards: of the machine, the one with the most memory first.
        policy: the present settings of launches.
    """

    def __init__(
        self, lookup: Lookup, cards: Callable[[], Sequence[Card]], policy: Callable[[], PlanPolicy]
    ) -> None:
        self._lookup = lookup
        self._cards = cards
        self._policy = policy

    async def rebuild(self, statuses: Iterable[UnitStatus]) -> Mapping[str, Rebuilt]:
        """What can be made out of those that cannot be adopted by their own record, by unit; within a bounded time."""
        units = [status for status in statuses if lacking(status)]
        if not units:
            return {}
        # Threads of their own: engines that hang must not hold up what else needs a thread, and few at once, since
        # each asks an engine with processes of its own.
        pool = ThreadPoolExecutor(MOST_AT_ONCE, "units")
        loop = asyncio.get_running_loop()
        work = {loop.run_in_executor(pool, self.read, status): status.name for status in units}
        try:
            done, _ = await asyncio.wait(work, timeout=READING_TIME_S)
        finally:
            # A thread that hangs on a disk cannot be ended; nobody waits for it.
            pool.shutdown(wait=False, cancel_futures=True)
        return {
            name: task.result() if task in done else Rebuilt(None, TOO_SLOW) for task, name in work.items()
        }

    def read(self, status: UnitStatus) -> Rebuilt:
        """One unit; blocking."""
        try:
            return Rebuilt(self._record(status))
        except NotUnderstoodError as error:
            return Rebuilt(None, bounded(str(error)))
        except LlmError as error:
            return Rebuilt(None, why(error))
        except NOT_UNDERSTOOD as error:
            log.warning("a unit is not understood", extra={"unit": status.name}, exc_info=error)
            return Rebuilt(None, f"its command line cannot be taken: {why(error)}")

    def _record(self, status: UnitStatus) -> Record:
        capabilities = self._capabilities(server_of(status))
        command = command_of(status, capabilities)
        served, drafter = self._served(command)
        reading = read_command_line(
            status.argv[1:], capabilities, served.facts, environment=status.variables, drafter=drafter
        )
        return rebuilt_record(
            status,
            command=command,
            reading=reading,
            served=served,
            capabilities=capabilities,
            cards=self._cards(),
            policy=self._policy(),
        )

    def _capabilities(self, server: Path) -> Capabilities:
        """Of the unit's engine; where that has been removed since, those of the one that comes next."""
        try:
            return self._lookup.engines.of_server(server)[1]
        except LlmError as error:
            log.info("a unit's engine cannot be asked", extra={"path": str(server), "reason": error.message})
            return self._lookup.engine()[1]

    def _served(self, command: Command) -> tuple[Served, CheckpointFacts | None]:
        """The model, with its projector, and the facts of a drafter."""
        shards = complete_shards((command.model,))
        size_bytes = _size_of(shards)
        known = self._lookup.described(shards, Kind.MODEL, command.alias)
        if known.problem is not None:
            raise known.problem
        if known.facts is None or known.unruled is not None:
            raise NotUnderstoodError(f"no rule tells the price of {command.model.name}")
        projector = None
        if command.projector is not None:
            _size_of((command.projector,))
            projector = projector_of_header(self._lookup.header(command.projector))
        drafter = None
        if command.drafter is not None:
            files = complete_shards((command.drafter,))
            _size_of(files)
            drafter = self._lookup.drafter_facts(files)
        return Served(shards, size_bytes, known.facts, projector), drafter


def _size_of(files: Iterable[Path]) -> int:
    total = 0
    for file in files:
        try:
            total += file.stat().st_size
        except OSError as error:
            raise NotUnderstoodError(f"its file {file} cannot be read: {error.strerror}") from error
    return total
