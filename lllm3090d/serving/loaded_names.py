"""Which of the models that run, or wait, a name means: by the same rules as for the models on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from lllm3090d.checkpoints.library import Checkpoint, resolve
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.serving.refusals import not_loaded
from lllm3090d.serving.running import Instance
from lllm3090d.serving.scheduler import Scheduler


class LoadedNames:
    """Resolves names.

    Args:
        scheduler: read, never changed.
        nowhere: names of what is to be loaded without being here: after a sleep, or because it is wanted.
        aliases: the present ones.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        nowhere: Callable[[], Iterable[str]],
        aliases: Callable[[], Mapping[str, str]],
    ) -> None:
        self._scheduler = scheduler
        self._nowhere = nowhere
        self._aliases = aliases

    def loaded(self, name: str) -> Instance:
        """The instance that a name means. Raises LlmError NOT_LOADED, AMBIGUOUS_MODEL."""
        instances = self._scheduler.instances
        chosen = self._named(name, tuple(each.record.checkpoint() for each in instances))
        found = self._scheduler.instance(chosen)
        if found is None:
            raise not_loaded(name, (each.name for each in instances))
        return found

    def loaded_or_waiting(self, name: str) -> str:
        """The same of what runs or waits for room, or to be loaded again after a sleep."""
        running = tuple(each.record.checkpoint() for each in self._scheduler.instances)
        names = {each.name for each in running}
        waiting = {each: Checkpoint(each, Path(each), (), 0) for each in self._nowhere()}
        waiting |= {each.name: each.event.checkpoint for each in self._scheduler.pending}
        return self._named(name, (*running, *(waiting[each] for each in waiting.keys() - names)))

    def _named(self, name: str, checkpoints: tuple[Checkpoint, ...]) -> str:
        if not checkpoints:
            raise not_loaded(name, ())
        try:
            return resolve(name, checkpoints, self._aliases()).name
        except LlmError as error:
            if error.code is ErrorCode.AMBIGUOUS_MODEL:
                raise
            raise not_loaded(name, (each.name for each in checkpoints)) from error
