"""What a plan needs and takes time to find: the checkpoint, its facts, the engine and what it can do."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lllm3090d.checkpoints.catalogue import MeasuredSpeed
from lllm3090d.checkpoints.classify import Kind
from lllm3090d.checkpoints.cursor import printable
from lllm3090d.checkpoints.facts import CheckpointFacts, FactsCache, ProjectorFacts
from lllm3090d.checkpoints.header import GgufHeader
from lllm3090d.checkpoints.header_cache import HeaderCache
from lllm3090d.checkpoints.library import Checkpoint, Library
from lllm3090d.checkpoints.projector import projector_of_header
from lllm3090d.checkpoints.unruled import UnruledModel, read_unruled
from lllm3090d.checkpoints.watch import LibraryWatch
from lllm3090d.engines.capabilities import Build, Capabilities
from lllm3090d.engines.dry_run import DryRuns
from lllm3090d.engines.dry_run_queue import DryRunQueue
from lllm3090d.errors import LlmError
from lllm3090d.planning.launch import Drafter, SpecType
from lllm3090d.serving.catalogues import NOT_ON_DISK, known_models, not_on_disk
from lllm3090d.serving.engines import Engines
from lllm3090d.serving.learning import Learning
from lllm3090d.serving.unplanned import Described, described
from lllm3090d.settings import Settings
from lllm3090d.store import FILE_NAME, Store

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model on disk that can be planned."""

    checkpoint: Checkpoint
    facts: CheckpointFacts
    projector: ProjectorFacts | None
    drafter: Drafter | None = None


@dataclass(frozen=True, slots=True)
class FoundUnruled:
    """A model on disk that the engine's dry run alone prices."""

    checkpoint: Checkpoint
    unruled: UnruledModel


@dataclass(frozen=True, slots=True)
class LookedUp:
    """Everything slow that a plan needs; ``speeds`` were measured with this very file."""

    checkpoint: Checkpoint
    facts: CheckpointFacts | UnruledModel
    build: Build
    capabilities: Capabilities
    projector: ProjectorFacts | None = None
    drafter: Drafter | None = None
    speeds: tuple[MeasuredSpeed, ...] = ()


class Lookup:
    """Looks things up by the present settings; what was read once is remembered while the files are the same."""

    def __init__(self, settings: Callable[[], Settings]) -> None:
        self._settings = settings
        self._lock = threading.Lock()  # over what is made when it is first needed
        self._store: Store | None = None
        self._headers: HeaderCache | None = None
        self._library: Library | None = None
        self._watch: LibraryWatch | None = None
        self.facts = FactsCache(read=self._header)
        self._drafters = FactsCache(read=self._header, drafters=True)
        self.engines = Engines(settings, self.store)
        self.learning = Learning(self.store, self._header, self.engines)
        self.dry_runs = DryRuns(self.store)
        self.dry_run_queue = DryRunQueue(self.dry_runs)

    def watch(self) -> None:
        """Watch the models directory of the present settings; returns at once, needs a running loop."""
        models_dir = self._settings().models_dir
        if self._watch is not None and self._watch.models_dir == models_dir:
            return
        if self._watch is not None:
            self._watch.stop()
        self._watch = LibraryWatch(models_dir)
        self._watch.start()

    async def close(self) -> None:
        """Stop watching and give the state file back; what is looked up later is read anew."""
        watch, self._watch = self._watch, None
        if watch is not None:
            await watch.close()
        with self._lock:
            store, self._store = self._store, None
            self._headers = self._library = None
        if store is not None:
            await asyncio.to_thread(store.close)

    async def find(self, name: str) -> LookedUp:
        """Everything about a model by its name, off the loop.

        Raises:
            LlmError: UNKNOWN_MODEL, AMBIGUOUS_MODEL, ..._CHECKPOINT, UNSUPPORTED_ARCHITECTURE, ENGINE_...
        """
        return await asyncio.to_thread(self._find, name)

    def library(self) -> Library:
        """The models on disk; blocking."""
        settings = self._settings()
        with self._lock:
            known = self._library
            if known is None or (known.models_dir, known.aliases) != (settings.models_dir, settings.aliases):
                self._library = known = Library(
                    settings.models_dir, settings.aliases, self._cache(), self._changes
                )
            return known

    def engine(self) -> tuple[Build, Capabilities]:
        """The engine the next load uses; blocking. Raises LlmError ENGINE_..."""
        return self.engines.next()

    def store(self) -> Store:
        """Where the daemon keeps what it has learnt; opened when it is first needed."""
        with self._lock:
            return self._opened()

    def state_problem(self) -> LlmError | None:
        """What is wrong with the state file now, None when all is well; blocking."""
        with self._lock:
            self._cache()
            store = self._store
        return store.check() if store else None

    def watch_problem(self) -> LlmError | None:
        """Why the models directory is searched anew at each request; None where it is watched, or soon will be."""
        watch = self._watch
        if watch is None or watch.models_dir != self._settings().models_dir:
            return None
        return watch.problem()

    def header(self, path: Path) -> GgufHeader:
        """The header of any file, read when it is not known; blocks and raises as ``read_header``."""
        return self._header(path)

    def resolve(self, name: str) -> Checkpoint:
        """A model on disk by its name; blocking.

        Raises:
            LlmError: as :meth:`Library.resolve`; UNKNOWN_MODEL also says where a model of the catalogue can be had.
        """
        try:
            return self.library().resolve(name)
        except LlmError as error:
            if error.code not in NOT_ON_DISK:
                raise
            raise not_on_disk(
                name, known_models(self._settings()), self._settings().models_dir, error
            ) from error

    def model(self, name: str) -> FoundModel | FoundUnruled:
        """A model by its name, whatever engine there is; blocking. Raises as :meth:`find`, but for ENGINE_..."""
        checkpoint = self.resolve(name)
        if checkpoint.problem is not None:
            raise checkpoint.problem
        known = self.described(checkpoint.shards, checkpoint.kind, checkpoint.name)
        if known.problem is not None:
            raise known.problem
        if known.unruled is not None:
            return FoundUnruled(checkpoint, known.unruled)
        if known.facts is None:
            raise ValueError(f"nothing is known of {checkpoint.name}, and nothing is wrong with it")
        facts = replace(known.facts, title=printable(checkpoint.name))  # a person knows the model by that
        return FoundModel(checkpoint, facts, self.projector(checkpoint), self.drafter(checkpoint))

    def described(self, shards: Sequence[Path], kind: Kind, name: str) -> Described:
        """By what a checkpoint can be planned; blocking. Raises as :func:`lllm3090d.serving.unplanned.described`."""
        return described(
            shards,
            kind,
            printable(name),
            self.facts.get,
            lambda files, title: read_unruled(files, title, self._header),
        )

    def drafter(self, checkpoint: Checkpoint) -> Drafter | None:
        """The file that drafts for a model; None where there is none that could be planned. Blocking.

        One that is damaged or unknown keeps nobody from the model: it is a help, not a part of it.
        """
        companion = checkpoint.drafter
        if companion is None or companion.problem is not None or companion.method is None:
            return None
        try:
            return Drafter(self._drafters.get(companion.shards), SpecType(f"draft-{companion.method.value}"))
        except LlmError as error:
            log.info("a drafter is left aside", extra={"path": str(companion.path), "reason": error.message})
            return None

    def drafter_facts(self, shards: Sequence[Path]) -> CheckpointFacts:
        """Of a file that drafts, whatever model it drafts for; blocks and raises as ``read_drafter_facts``."""
        return self._drafters.get(shards)

    def projector(self, checkpoint: Checkpoint) -> ProjectorFacts | None:
        """Of the file that goes with a model; blocking. Raises what is wrong with it."""
        if checkpoint.projector is None:
            return None
        if checkpoint.projector.problem is not None:
            raise checkpoint.projector.problem
        return projector_of_header(self._header(checkpoint.projector.path))

    def _find(self, name: str) -> LookedUp:
        found = self.model(name)
        build, capabilities = self.engine()
        if isinstance(found, FoundUnruled):
            return LookedUp(found.checkpoint, found.unruled, build, capabilities)
        entry = known_models(self._settings()).entry_of(found.checkpoint)
        return LookedUp(
            found.checkpoint,
            found.facts,
            build,
            capabilities,
            found.projector,
            found.drafter,
            entry.speeds if entry is not None else (),
        )

    def _header(self, path: Path) -> GgufHeader:
        with self._lock:
            cache = self._cache()
        return cache.header(path)

    def _cache(self) -> HeaderCache:
        if self._headers is None:
            self._headers = HeaderCache(self._opened())
        return self._headers

    def _opened(self) -> Store:
        if self._store is None:
            self._store = Store(self._settings().state_dir / FILE_NAME)
        return self._store

    def _changes(self) -> int | None:
        watch = self._watch
        if watch is None or watch.models_dir != self._settings().models_dir:
            return None
        return watch.generation()
