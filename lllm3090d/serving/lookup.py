"""What a plan needs and takes time to find: the checkpoint, its facts, the engine and what it can do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from lllm3090d.checkpoints.facts import CheckpointFacts, FactsCache
from lllm3090d.checkpoints.library import Checkpoint, Library
from lllm3090d.engines.builds import find_build
from lllm3090d.engines.capabilities import Build, Capabilities
from lllm3090d.engines.probe import ProbeCache
from lllm3090d.settings import Settings


@dataclass(frozen=True, slots=True)
class LookedUp:
    """Everything slow that a plan needs."""

    checkpoint: Checkpoint
    facts: CheckpointFacts
    build: Build
    capabilities: Capabilities


class Lookup:
    """Looks things up by the present settings; what was read once is remembered while the files are the same."""

    def __init__(self, settings: Callable[[], Settings]) -> None:
        self._settings = settings
        self.facts = FactsCache()
        self._probes = ProbeCache()

    async def find(self, name: str) -> LookedUp:
        """Everything about a model by its name, off the loop.

        Raises:
            LlmError: UNKNOWN_MODEL, AMBIGUOUS_MODEL, ..._CHECKPOINT, UNSUPPORTED_ARCHITECTURE, ENGINE_...
        """
        return await asyncio.to_thread(self._find, name)

    def _find(self, name: str) -> LookedUp:
        checkpoint = self.library().resolve(name)
        facts = self.facts.get(checkpoint.shards)
        build, capabilities = self.engine()
        return LookedUp(checkpoint, facts, build, capabilities)

    def library(self) -> Library:
        """The models on disk."""
        settings = self._settings()
        return Library(settings.models_dir, settings.aliases)

    def engine(self) -> tuple[Build, Capabilities]:
        """The engine the next load uses; blocking. Raises LlmError ENGINE_..."""
        build = find_build(self._settings())
        return build, self._probes.get(build)
