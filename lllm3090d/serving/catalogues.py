"""The catalogue beside the library: which entry a model on disk is, and which models are not on disk. Blocks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lllm3090d.checkpoints.catalogue import Catalogue, CatalogueEntry, load_catalogue, packaged_catalogue
from lllm3090d.checkpoints.cursor import printable
from lllm3090d.checkpoints.library import Checkpoint, resolve
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.settings import Settings

NOT_ON_DISK = frozenset({ErrorCode.UNKNOWN_MODEL, ErrorCode.NO_MODELS})


@dataclass(frozen=True, slots=True)
class KnownModels:
    """The catalogue as it can be had.

    Attributes:
        catalogue: with a person's own entries, or without them where their file cannot be used.
        problem: why it cannot.
    """

    catalogue: Catalogue
    problem: LlmError | None

    def entry_of(self, checkpoint: Checkpoint) -> CatalogueEntry | None:
        """The entry of which this is the very file: directory and file have its names; None where none is."""
        entry = self.catalogue.find(checkpoint.path.parent.name)
        return entry if entry is not None and checkpoint.path.name == entry.file else None

    def named(self, name: str) -> CatalogueEntry | None:
        """The entry that is meant, by the rules for models on disk; None where there is none.

        Raises:
            LlmError: AMBIGUOUS_MODEL.
        """
        exact = self.catalogue.find(name)
        if exact is not None:
            return exact
        entries = [
            Checkpoint(entry.name, Path(entry.file), (), entry.weight_bytes)
            for entry in self.catalogue.entries
        ]
        try:
            return self.catalogue.find(resolve(name, entries, {}).name)
        except LlmError as error:
            if error.code is ErrorCode.AMBIGUOUS_MODEL:
                raise
            return None

    def not_on_disk(self, checkpoints: Iterable[Checkpoint]) -> tuple[CatalogueEntry, ...]:
        """The entries whose directory is not in the library, in the order of the catalogue."""
        there = {checkpoint.path.parent.name.casefold() for checkpoint in checkpoints}
        return tuple(entry for entry in self.catalogue.entries if entry.name.casefold() not in there)


def not_on_disk(name: str, known: KnownModels, models_dir: Path, error: LlmError) -> LlmError:
    """The error for a model that is in the catalogue alone; the one that was found where it is not even there."""
    try:
        entry = known.named(name)
    except LlmError:
        entry = None  # it fits several of the catalogue: that says less than what is on disk
    if entry is None:
        return error
    files = entry.file if entry.projector_file is None else f"{entry.file} and {entry.projector_file}"
    place = printable(models_dir / entry.name)
    return LlmError(
        ErrorCode.UNKNOWN_MODEL,
        f"{entry.name} is not on disk; it is to be had from {entry.repository}.",
        hint=f"Put {files} into {place}/.",
        name=entry.name,
        repository=entry.repository,
        files=[each for each in (entry.file, entry.projector_file) if each is not None],
    )


def known_models(settings: Settings) -> KnownModels:
    """The catalogue by the present settings; a file that cannot be used is said and left out."""
    named_by_hand = "catalogue_file" in settings.model_fields_set
    try:
        return KnownModels(load_catalogue(settings.catalogue_file, must_exist=named_by_hand), None)
    except LlmError as error:
        return KnownModels(packaged_catalogue(), error)
