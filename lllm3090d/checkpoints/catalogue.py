"""The catalogue: models that are worth downloading, with what a preview needs to know before they are on disk.

The entries come with the package (``catalogue.json``); a person's own file adds further ones, or replaces those with
the same id. Both have the same form and pass the same checks. See ``docs/reference/catalogue.md``.
"""

from __future__ import annotations

import enum
import functools
import stat
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from lllm3090d.checkpoints.badges import Badge
from lllm3090d.errors import ErrorCode, LlmError

SCHEMA = 1
MAX_FILE_BYTES = 1 << 20  # the packaged file has some 15 KiB
MAX_MODELS = 500
MAX_SPEEDS = 200
MAX_LAYERS = 10_000
SHOWN_PROBLEMS = 5  # of a file: the others are much the same
F16_BYTES = 2
STATE_VALUE_BYTES = 4  # states are f32, whatever the type of the cache

_Slug = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9.+_-]{0,79}$")]
_Line = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f]{1,200}$")]
# Below a directory, and neither hidden nor "..".
_FileName = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f/\\.][^\x00-\x1f\x7f/\\]{0,199}$")]
_Repository = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}$")
]
_FileBytes = Annotated[int, Field(ge=1, le=1 << 44)]
_Layers = Annotated[int, Field(ge=0, le=MAX_LAYERS)]
_Width = Annotated[int, Field(ge=1, le=1 << 20)]
_Parameters = Annotated[float, Field(gt=0, le=100_000, allow_inf_nan=False)]


class ModelKind(enum.StrEnum):
    """Whether all weights compute a token, or some experts."""

    DENSE = "dense"
    MOE = "moe"


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class AttentionShape(_Part):
    """Layers with attention of one geometry; of a model with several, each has its own.

    Attributes:
        layers: how many.
        kv_heads: heads of K and V.
        head_length: values of a head.
        window_tokens: of sliding layers; None for the whole context.
    """

    layers: Annotated[int, Field(ge=1, le=MAX_LAYERS)]
    kv_heads: _Width
    head_length: _Width
    window_tokens: Annotated[int, Field(ge=1, le=1 << 30)] | None = None

    @property
    def f16_bytes_per_token(self) -> int:
        """K and V of a token in all of these layers at f16."""
        return self.layers * 2 * self.kv_heads * self.head_length * F16_BYTES


class RecurrentShape(_Part):
    """Layers with a recurrent state: a gated delta net or a state-space layer.

    Attributes:
        layers: how many.
        inner, state, groups, convolution: widths as in the ``ssm`` keys of the file.
    """

    layers: Annotated[int, Field(ge=1, le=MAX_LAYERS)]
    inner: _Width
    state: _Width
    groups: Annotated[int, Field(ge=0, le=1 << 20)]
    convolution: _Width

    @property
    def state_bytes(self) -> int:
        """One plane of one sequence, f32."""
        moving = (self.convolution - 1) * (self.inner + 2 * self.groups * self.state)
        return self.layers * (moving + self.inner * self.state) * STATE_VALUE_BYTES


class MeasuredSpeed(_Part):
    """Decoding speed as it was measured; it holds for this card, this backend and this speculation only.

    Attributes:
        tokens_per_s: of one conversation.
        card: id of the card's profile.
        backend: of the engine.
        speculation: ``none``, ``mtp`` or what else drafted.
        workload: what was generated; None where nobody noted it.
        build: of the engine; None where nobody noted it.
        tokens_per_step: that a step yielded on average, its own and the accepted drafts; None where nobody noted it.
    """

    tokens_per_s: Annotated[float, Field(gt=0, le=100_000, allow_inf_nan=False)]
    card: _Slug
    backend: _Slug
    speculation: _Line
    workload: _Line | None = None
    build: _Line | None = None
    tokens_per_step: Annotated[float, Field(ge=1, le=100, allow_inf_nan=False)] | None = None


class CatalogueEntry(_Part):
    """A model that can be downloaded.

    Attributes:
        id: what it is asked for by.
        name: directory of the model, which identifies it on disk; file names do not, two entries share one.
        repository: on Hugging Face.
        file: of the weights, in that repository.
        quantisation: label.
        file_bytes: size of the weights.
        projector_file: what lets it see (``--mmproj``); None where it only reads.
        projector_bytes: size of that file; 0 without.
        kind: dense, or with experts.
        total_parameters_b, active_parameters_b: thousand millions of weights, and of those that compute a token.
        trained_context_tokens: longest window.
        block_count: layers, without those for multi-token prediction.
        full_attention: layers whose cache grows with the context. Of a model with a global and a local
            geometry, the global one; None where no layer grows.
        sliding_attention: layers with attention over a window; None without.
        recurrent: layers with a state; None without.
        latent: attention is latent (MLA), so no linear price can be given.
        drafts_itself: the file has a head for multi-token prediction.
        least_compute_capability: of a card that can compute it, such as ``8.0``; None where all can.
        speeds: measured; the first is the one that is shown.
        tags: words for a person.
        verified: whoever wrote the entry has served the model with these figures.
    """

    id: _Slug
    name: _FileName
    repository: _Repository
    file: _FileName
    quantisation: _Line
    file_bytes: _FileBytes
    projector_file: _FileName | None = None
    projector_bytes: Annotated[int, Field(ge=0, le=1 << 40)] = 0
    kind: ModelKind
    total_parameters_b: _Parameters
    active_parameters_b: _Parameters
    trained_context_tokens: Annotated[int, Field(ge=1024, le=1 << 30)]
    block_count: _Layers
    full_attention: AttentionShape | None = None
    sliding_attention: AttentionShape | None = None
    recurrent: RecurrentShape | None = None
    latent: bool = False
    drafts_itself: bool = False
    least_compute_capability: Annotated[str, StringConstraints(pattern=r"^\d{1,2}\.\d{1,2}$")] | None = None
    speeds: Annotated[tuple[MeasuredSpeed, ...], Field(max_length=MAX_SPEEDS)] = ()
    tags: Annotated[tuple[_Slug, ...], Field(max_length=20)] = ()
    verified: bool = False

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if (self.projector_file is None) != (self.projector_bytes == 0):
            raise ValueError("projector_file and projector_bytes are given together, or neither is")
        if self.active_parameters_b > self.total_parameters_b:
            raise ValueError("active_parameters_b is not above total_parameters_b")
        if self.full_attention is not None and self.full_attention.window_tokens is not None:
            raise ValueError("full_attention has no window_tokens")
        if self.sliding_attention is not None and self.sliding_attention.window_tokens is None:
            raise ValueError("sliding_attention needs window_tokens")
        parts = (self.full_attention, self.sliding_attention, self.recurrent)
        described = sum(part.layers for part in parts if part is not None)
        if described > self.block_count:
            raise ValueError(f"{described} layers are described, more than block_count {self.block_count}")
        if self.drafts_itself and self.full_attention is None:
            raise ValueError("drafts_itself needs full_attention: the head has a layer of that kind")
        return self

    @property
    def weight_bytes(self) -> int:
        """Of weights and projector together."""
        return self.file_bytes + self.projector_bytes

    @property
    def has_projector(self) -> bool:
        """It sees."""
        return self.projector_file is not None

    @property
    def badges(self) -> tuple[Badge, ...]:
        """What it is and has, as far as the catalogue knows, in the order of :class:`Badge`."""
        found = {Badge.MOE if self.kind is ModelKind.MOE else Badge.DENSE}
        if self.drafts_itself:
            found.add(Badge.MTP)
        if self.has_projector:
            found.add(Badge.VISION)
        return tuple(badge for badge in Badge if badge in found)


class _CatalogueFile(_Part):
    """The form of a file."""

    schema_: Annotated[Literal[1], Field(alias="schema")]
    models: Annotated[tuple[CatalogueEntry, ...], Field(max_length=MAX_MODELS)]

    @model_validator(mode="after")
    def _is_unambiguous(self) -> Self:
        for what, values in (
            ("id", [m.id for m in self.models]),
            ("name", [m.name.casefold() for m in self.models]),
        ):
            twice = sorted({value for value in values if values.count(value) > 1})
            if twice:
                raise ValueError(f"{what} {twice[0]} occurs twice")
        return self


class Catalogue:
    """Entries in order, found by id or name without regard to case."""

    def __init__(self, entries: Iterable[CatalogueEntry]) -> None:
        """An id counts more than the name of another entry; of equal names the last entry has it."""
        self._entries = tuple(entries)
        self._by_word: Mapping[str, CatalogueEntry] = {
            **{entry.name.casefold(): entry for entry in self._entries},
            **{entry.id: entry for entry in self._entries},
        }

    @property
    def entries(self) -> tuple[CatalogueEntry, ...]:
        """All of them: those of the package in its order, then a person's own."""
        return self._entries

    def find(self, word: str) -> CatalogueEntry | None:
        """The entry of this id or name; None where there is none."""
        return self._by_word.get(word.casefold())

    def with_entries(self, further: Iterable[CatalogueEntry]) -> Catalogue:
        """These entries and further ones, which replace those with the same id in their place."""
        merged = {entry.id: entry for entry in self._entries}
        merged.update((entry.id, entry) for entry in further)
        return Catalogue(merged.values())


@functools.cache
def packaged_catalogue() -> Catalogue:
    """The catalogue that comes with the package; read once."""
    file = resources.files("lllm3090d.checkpoints") / "catalogue.json"
    return Catalogue(_CatalogueFile.model_validate_json(file.read_bytes()).models)


def load_catalogue(user_file: Path | None, *, must_exist: bool = False) -> Catalogue:
    """The packaged catalogue with a person's own entries; blocks while the file is read.

    Args:
        user_file: their file (setting ``catalogue_file``); None for the packaged catalogue alone.
        must_exist: it was named by hand, so that a missing file is a mistake.

    Raises:
        LlmError: SETTINGS_INVALID, naming the file and what is wrong in it.
    """
    if user_file is None:
        return packaged_catalogue()
    data = _bytes_of(user_file, must_exist=must_exist)
    if data is None:
        return packaged_catalogue()
    try:
        own = _CatalogueFile.model_validate_json(data)
    except ValidationError as error:
        raise _unusable(user_file, _problems(error)) from error
    return packaged_catalogue().with_entries(own.models)


def _bytes_of(file: Path, *, must_exist: bool) -> bytes | None:
    try:
        # Reading a pipe or a device may never end.
        if not stat.S_ISREG(file.stat().st_mode):
            raise OSError("it is no regular file")
        with file.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError as error:
        if must_exist:
            raise _unusable(file, ["it does not exist"]) from error
        return None
    except OSError as error:
        raise _unusable(file, [error.strerror or str(error)]) from error
    if len(data) > MAX_FILE_BYTES:
        raise _unusable(file, [f"it is larger than {MAX_FILE_BYTES} bytes"])
    return data


def _problems(error: ValidationError) -> list[str]:
    found = []
    for item in error.errors(include_url=False, include_context=False):
        where = ".".join(map(str, item["loc"]))
        found.append(f"{where}: {item['msg']}" if where else item["msg"])
    return found


def _unusable(file: Path, problems: list[str]) -> LlmError:
    more = len(problems) - SHOWN_PROBLEMS
    shown = "; ".join(problems[:SHOWN_PROBLEMS]) + (f"; and {more} more" if more > 0 else "")
    return LlmError(
        ErrorCode.SETTINGS_INVALID,
        f"The catalogue {str(file)!r} cannot be used: {shown}.",
        hint="Correct the file or move it away; its form is told in the manual, in its page on the catalogue.",
        file=str(file),
        problems=problems[:SHOWN_PROBLEMS],
    )
