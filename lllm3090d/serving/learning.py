"""What this machine has learnt of a checkpoint with a build on its cards, and what it learns. Blocking, for threads."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from lllm3090d.checkpoints.cursor import FileStamp
from lllm3090d.checkpoints.fingerprint import fingerprint
from lllm3090d.checkpoints.header import GgufHeader
from lllm3090d.engines.capabilities import Build, Capabilities
from lllm3090d.errors import LlmError
from lllm3090d.gpus.readings import Card
from lllm3090d.planning.calibration import Calibration, CalibrationKey, CalibrationScope, Measurement
from lllm3090d.serving.calibrations import Calibrations
from lllm3090d.serving.engines import Engines
from lllm3090d.serving.events import LoadRequested
from lllm3090d.serving.extras import extra_of
from lllm3090d.serving.observation import Observation
from lllm3090d.serving.policy import Policy
from lllm3090d.store import Store

log = logging.getLogger(__name__)
KEPT_FINGERPRINTS = 2000


class Learning:
    """Looks up and learns; what fails costs a better price, never a load.

    Args:
        store: where it is kept.
        header: reads a header that is not known.
        engines: for digests of builds.
    """

    def __init__(
        self, store: Callable[[], Store], header: Callable[[Path], GgufHeader], engines: Engines
    ) -> None:
        self._store = store
        self._header = header
        self._engines = engines
        self._calibrations = Calibrations(store)

    def known(
        self,
        shards: Sequence[Path],
        build: Build,
        capabilities: Capabilities,
        cards: Sequence[Card],
        arguments: tuple[str, ...] = (),
    ) -> Mapping[str, Calibration]:
        """What is known of a checkpoint with a build, by UUID of the card; empty where that cannot be looked up.

        Args:
            shards: the checkpoint's files.
            build, capabilities: the engine.
            cards: of the machine.
            arguments: further ones for the engine, as they are shown in its record.
        """
        try:
            checkpoint, engine = self._fingerprint(shards), self._engines.digest(build)
        except LlmError as error:
            log.warning("nothing is looked up of earlier launches", extra={"reason": error.message})
            return {}
        return {
            card.uuid: self._calibrations.of(
                CalibrationScope(checkpoint, engine, capabilities.backend, card.uuid), arguments
            )
            for card in cards
        }

    def of_build(self, build: Build, capabilities: Capabilities, card: str) -> CalibrationScope | None:
        """Whose measurements a list of models is to look for; None where nothing was ever measured, or nobody can tell.

        Args:
            build, capabilities: the engine.
            card: UUID of the card, or the host's name.
        """
        if not self._store().rows("SELECT 1 FROM calibrations LIMIT 1", ()):
            return None
        try:
            return CalibrationScope("", self._engines.digest(build), capabilities.backend, card)
        except LlmError as error:
            log.warning("nothing is looked up of earlier launches", extra={"reason": error.message})
            return None

    def of_listed(
        self, shards: Sequence[Path], scope: CalibrationScope, arguments: tuple[str, ...]
    ) -> Calibration:
        """What is known of one model of a list; of files that were never loaded, only what holds for the build.

        Args:
            shards: the checkpoint's files.
            scope: of the list.
            arguments: further ones for the engine, as they would be shown in its record.
        """
        found = self._remembered(_stamps(shards))
        return self._calibrations.of(replace(scope, checkpoint=found or ""), arguments)

    def learn(self, measurement: Measurement, quoted_bytes: int) -> None:
        """Remember what a launch took, now."""
        now = replace(measurement, measured_s=time.time())
        self._report(self._calibrations.add(now, quoted_bytes))

    def learn_out_of_memory(self, key: CalibrationKey, quoted_bytes: int) -> None:
        """Remember that a launch died for want of memory that it had been given."""
        self._report(self._calibrations.out_of_memory(key, quoted_bytes))

    @staticmethod
    def _report(error: LlmError | None) -> None:
        if error is not None:
            log.warning("what a launch took is forgotten", extra={"reason": error.message})

    # --- fingerprints -------------------------------------------------------------------------------------------

    def _fingerprint(self, shards: Sequence[Path]) -> str:
        """Of the files as they are now; read once for each state of them. Raises LlmError BAD_CHECKPOINT."""
        stamps = _stamps(shards)
        found = self._remembered(stamps)
        if found is None:
            found = fingerprint(tuple(shards), self._header)
            self._remember(stamps, found)
        return found

    def _remembered(self, stamps: str | None) -> str | None:
        if stamps is None:
            return None
        rows = self._store().rows("SELECT fingerprint FROM fingerprints WHERE stamps = ?", (stamps,))
        return str(rows[0][0]) if rows else None

    def _remember(self, stamps: str | None, found: str) -> None:
        if stamps is None:
            return

        def write(connection: sqlite3.Connection) -> None:
            connection.execute(
                "INSERT OR REPLACE INTO fingerprints (stamps, fingerprint) VALUES (?, ?)", (stamps, found)
            )
            connection.execute(
                "DELETE FROM fingerprints WHERE id <= (SELECT max(id) FROM fingerprints) - ?",
                (KEPT_FINGERPRINTS,),
            )

        self._store().change(write)


def _stamps(shards: Sequence[Path]) -> str | None:
    """The state of some files as text; None where one cannot be seen."""
    try:
        found = [(os.fsencode(path).hex(), FileStamp.of(path.stat())) for path in shards]
    except OSError:
        return None
    return json.dumps([[path, each.size_bytes, each.mtime_ns, each.inode] for path, each in found])


async def learnt(
    event: LoadRequested, learning: Learning, policy: Policy, observation: Observation
) -> LoadRequested:
    """A load with what was learnt of earlier ones of the model; for callers on the loop.

    Raises:
        LlmError: INVALID_REQUEST for its arguments.
    """
    shown = extra_of(event, policy.extra_arguments).shown
    cards = tuple(state.card for state in observation.cards)
    known = await asyncio.to_thread(
        learning.known, event.checkpoint.shards, event.build, event.capabilities, cards, shown
    )
    return replace(event, calibrations=known)
