"""What a person says of models that are to be loaded at every login."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from lllm3090d.checkpoints.library import Checkpoint, resolve
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.serving.lookup import Lookup
from lllm3090d.serving.wanted_set import WantedSet
from lllm3090d.settings import Settings


class Autoload:
    """Marks models, by any of their names.

    Args:
        lookup: of models on disk.
        wanted: keeps the marks.
        settings: the present settings.
        config_file: where they are from, for a person.
    """

    def __init__(
        self, lookup: Lookup, wanted: WantedSet, settings: Callable[[], Settings], config_file: Path
    ) -> None:
        self._lookup = lookup
        self._wanted = wanted
        self._settings = settings
        self._config_file = config_file

    async def mark(self, name: str) -> None:
        """Load a model at every login, as it is loaded now where it is.

        Raises:
            LlmError: UNKNOWN_MODEL, AMBIGUOUS_MODEL, STATE_UNUSABLE.
        """
        found = await asyncio.to_thread(self._lookup.resolve, name)
        await self._wanted.mark(self._wanted.mark_of(found.name))

    async def unmark(self, name: str) -> None:
        """No longer; also of a model that is not on disk any more.

        Raises:
            LlmError: UNKNOWN_MODEL, AMBIGUOUS_MODEL; INVALID_REQUEST where the settings say so; STATE_UNUSABLE.
        """
        by_name = {each.mark.name: each for each in await self._wanted.marked()}
        known = tuple(Checkpoint(each, Path(each), (), 0) for each in by_name)
        try:
            found = resolve(name, known, self._settings().aliases)
        except LlmError as error:
            if error.code is ErrorCode.AMBIGUOUS_MODEL:
                raise
            await asyncio.to_thread(self._lookup.resolve, name)  # unknown, or only not marked
            return
        await self._wanted.unmark(found.name)
        if by_name[found.name].by_setting:
            raise LlmError(
                ErrorCode.INVALID_REQUEST,
                f"{found.name} is loaded at every login because the setting autoload names it",
                hint=f"Take it out of autoload in {self._config_file} (or LLLM3090_AUTOLOAD).",
            )
