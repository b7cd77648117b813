"""What a file on disk is and what its context costs, as clients see it; blocks for the disk."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import unquote_to_bytes

from lllm3090d.checkpoints.badges import Badge, model_badges, projector_badges
from lllm3090d.checkpoints.classify import Digest, Kind, digest
from lllm3090d.checkpoints.cursor import printable
from lllm3090d.checkpoints.facts import CheckpointFacts, LayerFacts
from lllm3090d.checkpoints.header import GgufHeader
from lllm3090d.checkpoints.library import Checkpoint, Companion, problem_of
from lllm3090d.checkpoints.projector import ProjectorFacts, projector_of_header
from lllm3090d.checkpoints.shards import complete_shards
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.planning.cache import CacheType
from lllm3090d.planning.costs import context_cost, state_bytes_per_slot, weights_by_place
from lllm3090d.planning.verdict import Verdict
from lllm3090d.serving.lookup import Lookup
from lllm3090d.serving.running import Instance
from lllm3090d.serving.unplanned import Described
from lllm3090d.serving.views import model_view, path_text
from lllm3090d.settings import Settings
from lllm3090d.wire import (
    ContextCostView,
    InspectBody,
    InspectView,
    LayerView,
    ModelView,
    ProjectorView,
    RopeView,
    WeightView,
)

PATH_MAX_BYTES = 4096  # limits.h, with the final NUL
_URI = "file://"
NOTHING_KNOWN = Described(None)
SHOWN_CACHE_TYPES = (CacheType.Q8_0, CacheType.F16)


def inspect(lookup: Lookup, body: InspectBody) -> InspectView:
    """Everything the headers of a model or of a file tell.

    Raises:
        LlmError: INVALID_REQUEST for a path that is not absolute; UNKNOWN_MODEL, AMBIGUOUS_MODEL,
            NO_MODELS, MODELS_DIR_UNREADABLE for a name; NO_SUCH_FILE for a path;
            BAD_CHECKPOINT where not even a header can be read.
    """
    if body.model is not None:
        checkpoint = lookup.resolve(body.model)
        return _view(lookup, checkpoint.path, checkpoint)
    path = _absolute(body.path or "")
    if _is_missing(path):
        raise LlmError(
            ErrorCode.NO_SUCH_FILE,
            f"{printable(path)} is not there.",
            hint="Correct the path; `lllm3090ctl models` lists the models there are.",
            path=printable(path),
        )
    return _view(lookup, path, _owner(lookup, path))


def listed(
    lookup: Lookup, settings: Settings, checkpoint: Checkpoint, instance: Instance | None
) -> ModelView:
    """One line of the list of models; what cannot be read or planned says why."""
    known, problem = NOTHING_KNOWN, checkpoint.problem
    if problem is None:
        try:
            known = lookup.described(checkpoint.shards, checkpoint.kind, checkpoint.name)
        except LlmError as error:
            problem = error
    facts = known.facts
    badges = _badges(lookup, facts, checkpoint) if facts else ()
    view = model_view(
        checkpoint,
        settings.aliases,
        facts or known.unruled,
        problem or known.problem,
        instance,
        badges=badges,
        cache_type=settings.cache_type,
    )
    return view.model_copy(update={"verdict": Verdict.DRY_RUN}) if known.unruled else view


def _absolute(text: str) -> Path:
    """The path that is meant by an absolute path, or by a ``file:`` URI of this host (RFC 8089)."""
    path = text
    if text.startswith(_URI):
        path = os.fsdecode(unquote_to_bytes(text.removeprefix(_URI).removeprefix("localhost")))
    if not path.startswith("/") or "\0" in path:
        raise LlmError(
            ErrorCode.INVALID_REQUEST,
            f"{printable(text)} is not an absolute path.",
            hint="Give the whole path, beginning with /, or its file: URI.",
        )
    length = len(os.fsencode(path))
    if length >= PATH_MAX_BYTES:
        raise LlmError(
            ErrorCode.INVALID_REQUEST,
            f"The path has {length} bytes; one has at most {PATH_MAX_BYTES - 1}.",
            hint="Move the file to where its path is shorter.",
        )
    return Path(path)


def _is_missing(path: Path) -> bool:
    """Nothing is there; what cannot be looked at is left to the reading of the header."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def _owner(lookup: Lookup, path: Path) -> Checkpoint | None:
    """The model whose file this is. A file may be looked at without a library, so it may lack."""
    try:
        checkpoints = lookup.library().scan()
    except LlmError as error:
        if error.code is not ErrorCode.MODELS_DIR_UNREADABLE:
            raise
        return None
    # Unlike Path.resolve() this never fails, not even for links in a circle; reading the file will say what is wrong.
    real = os.path.realpath(path)
    return next((found for found in checkpoints if real in map(os.path.realpath, found.shards)), None)


def _view(lookup: Lookup, path: Path, checkpoint: Checkpoint | None) -> InspectView:
    shards: tuple[Path, ...] = (path,)
    known = NOTHING_KNOWN
    problem = checkpoint.problem if checkpoint else None
    try:
        shards = complete_shards((path,))
    except LlmError as error:  # what is there is shown
        problem = error
    headers = [lookup.header(shard) for shard in shards]
    digests = [digest(header) for header in headers]
    first, problem = digests[0], problem or problem_of(shards, digests)
    if problem is None:
        try:
            known = lookup.described(shards, first.kind, checkpoint.name if checkpoint else shards[0].stem)
            problem = known.problem
        except LlmError as error:
            problem = error
    facts, projector = known.facts, None
    try:
        projector = _projector(lookup, headers[0], first.kind, checkpoint)
    except LlmError as error:
        problem = error if first.kind is Kind.PROJECTOR else problem
    view = _header_view(headers, first, checkpoint, problem)
    if projector is not None:
        view = view.model_copy(update={"projector_facts": _projector_view(projector)})
    if facts is not None:
        more = {"badges": _badges(lookup, facts, checkpoint), "rope": _rope(headers[0], facts)}
        view = view.model_copy(update=_facts_fields(facts) | more)
    if known.unruled is not None:
        view = view.model_copy(update={"dry_run_reason": known.unruled.reason})
    return view


def _projector(
    lookup: Lookup, header: GgufHeader, kind: Kind, checkpoint: Checkpoint | None
) -> ProjectorFacts | None:
    """Of the file itself, or of the one that goes with the model. Raises LlmError BAD_CHECKPOINT."""
    if kind is Kind.PROJECTOR:
        return projector_of_header(header)
    if checkpoint is None or checkpoint.projector is None:
        return None
    return projector_of_header(lookup.header(checkpoint.projector.path))


def _header_view(
    headers: list[GgufHeader], first: Digest, checkpoint: Checkpoint | None, problem: LlmError | None
) -> InspectView:
    """What the file says by itself, whether or not a rule is known for it."""
    title = headers[0].metadata.get("general.name")
    context = headers[0].metadata.get(f"{first.architecture}.context_length")
    return InspectView(
        path=path_text(headers[0].path),
        name=checkpoint.name if checkpoint else None,
        kind=first.kind,
        draft_method=first.method,
        architecture=printable(first.architecture) or None,
        title=printable(title) if isinstance(title, str) and title else None,
        quantisation=first.file_type or None,
        size_bytes=sum(header.file_bytes for header in headers),
        shards=first.split_count,
        tensor_count=sum(len(header.tensors) for header in headers),
        badges=projector_badges(headers[0]) if first.kind is Kind.PROJECTOR else (),
        trained_context_tokens=context if isinstance(context, int) else None,
        vocabulary_size=first.vocabulary_size or None,
        embedding_length=first.embedding_length or None,
        block_count=first.block_count or None,
        weight_bytes=sum(tensor.size_bytes for header in headers for tensor in header.tensors),
        projector=_file(checkpoint.projector if checkpoint else None),
        drafter=_file(checkpoint.drafter if checkpoint else None),
        problem=problem.problem() if problem else None,
    )


def _facts_fields(facts: CheckpointFacts) -> dict[str, object]:
    """What only a rule for the architecture tells."""
    return {
        "title": facts.title,
        "quantisation": facts.quantisation,
        "trained_context_tokens": facts.trained_context_tokens,
        "vocabulary_size": facts.vocabulary_size,
        "embedding_length": facts.embedding_length,
        "block_count": len(facts.layers),
        "expert_count": facts.expert_count,
        "reasoning": tuple(map(printable, facts.reasoning)),
        "sliding_window_tokens": facts.sliding_window_tokens,
        "layers": tuple(map(_layer, facts.layers)),
        "output_tied": facts.output_is_tied,
        "weights": tuple(
            WeightView(place=place, bytes=size) for place, size in weights_by_place(facts).items()
        ),
        "context_costs": tuple(_cost(facts, each) for each in SHOWN_CACHE_TYPES)
        if facts.keeps_context
        else (),
        "state_bytes_per_slot": state_bytes_per_slot(facts),
    }


def _rope(header: GgufHeader, facts: CheckpointFacts) -> RopeView | None:
    """What the file says of positions; None where it says nothing, for then the model may have others."""
    prefix = f"{facts.architecture}.rope."
    if facts.rope is None or not any(key.startswith(prefix) for key in header.metadata):
        return None
    sections = header.metadata.get(prefix + "dimension_sections")
    sliding_base = header.metadata.get(prefix + "freq_base_swa")
    says_original = prefix + "scaling.original_context_length" in header.metadata
    return RopeView(
        base=facts.rope.base,
        sliding_base=float(sliding_base) if isinstance(sliding_base, int | float) else None,
        dimensions=facts.rope.dimensions,
        sections=tuple(each for each in sections if isinstance(each, int))
        if isinstance(sections, tuple)
        else (),
        scaling=facts.rope.scaling,
        factor=facts.rope.factor,
        original_context_tokens=facts.rope.original_context_tokens if says_original else None,
        own_factors=facts.tables.rope.stored > 0,
    )


def _projector_view(facts: ProjectorFacts) -> ProjectorView:
    vision = facts.vision
    return ProjectorView(
        type=facts.projector_type or None,
        sees=vision is not None,
        hears=facts.hears,
        projection_length=facts.projection_length or None,
        image_size=vision.image_size or None if vision else None,
        image_max_pixels=vision.image_max_pixels or None if vision else None,
        patch_size=vision.patch_size or None if vision else None,
        merge_size=facts.merge_size or None,
        image_tokens=facts.image_tokens or None,
        embedding_length=vision.embedding_length or None if vision else None,
        block_count=vision.block_count or None if vision else None,
    )


def _layer(layer: LayerFacts) -> LayerView:
    return LayerView(
        kind=layer.kind,
        keeps_state=layer.keeps_state,
        is_mtp=layer.is_mtp,
        head_count=layer.head_count,
        kv_head_count=layer.k_values // layer.key_length if layer.key_length else 0,
        key_length=layer.key_length,
        value_length=layer.value_length,
        experts_used=layer.experts_used,
        weight_bytes=layer.weight_bytes,
    )


def _cost(facts: CheckpointFacts, cache_type: CacheType) -> ContextCostView:
    try:
        cost = context_cost(facts, cache_type)
    except LlmError:  # the engine refuses this type for this model; null says that
        return ContextCostView(cache_type=cache_type, bytes_per_token=None, window_bytes_per_token=None)
    return ContextCostView(
        cache_type=cache_type,
        bytes_per_token=cost.bytes_per_token,
        window_bytes_per_token=cost.window_bytes_per_token,
    )


def _badges(lookup: Lookup, facts: CheckpointFacts, checkpoint: Checkpoint | None) -> tuple[Badge, ...]:
    projector = checkpoint.projector if checkpoint else None
    if projector is None:
        return model_badges(facts)
    try:
        return model_badges(facts, lookup.header(projector.path))
    except LlmError:  # it went or changed after the scan that paired it; the next scan tells
        return model_badges(facts)


def _file(companion: Companion | None) -> str | None:
    return path_text(companion.path) if companion else None
