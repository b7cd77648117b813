"""What cannot be planned, whatever the memory: refused with the reason and what to ask for instead. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from lllm3090d.checkpoints.facts import CheckpointFacts, ProjectorFacts
from lllm3090d.checkpoints.unruled import UnruledModel
from lllm3090d.engines.capabilities import Backend
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.readings import CardKind
from lllm3090d.planning import cache
from lllm3090d.planning.launch import Drafter, SpecType
from lllm3090d.planning.refusal import slots_text
from lllm3090d.planning.request import Drafting, Features, PlanRequest, ProjectorPlace, option_of
from lllm3090d.planning.units import PAGE_TOKENS
from lllm3090d.planning.vectors import unserved

# Of what may be asked, whoever asks: the API, the client, or further arguments of the engine. Slots have a limit of the
# engine's own.
RANGES: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "context_tokens": (1, 1 << 28),
        "parallel": (1, 1 << 31),
        "batch_tokens": (32, 65_536),
        "micro_batch_tokens": (32, 8192),
        "draft_tokens": (1, 64),
        "gpu_layers": (0, 10_000),
        "cpu_experts": (0, 10_000),
    }
)


def check_request(
    facts: CheckpointFacts,
    request: PlanRequest,
    features: Features,
    card_kind: CardKind,
    *,
    projector: ProjectorFacts | None,
    drafter: Drafter | None = None,
) -> None:
    """Refuse what contradicts itself, the model or the engine.

    Raises:
        LlmError: INVALID_REQUEST for numbers out of range; UNSUPPORTED_COMBINATION for what this model or
            engine cannot do; ENGINE_UNUSABLE for an engine that cannot use the card.
    """
    check_engine(features.backend, card_kind)
    check_numbers(request)
    reason = _impossible(facts, request, features, card_kind, projector=projector, drafter=drafter)
    if reason is not None:
        what, hint = reason
        name = facts.title or facts.architecture
        sentence = what if what.startswith(name) else f"{what[0].upper()}{what[1:]}"
        raise LlmError(ErrorCode.UNSUPPORTED_COMBINATION, f"{sentence}.", hint=hint)


def check_numbers(request: PlanRequest) -> None:
    """Refuse numbers that nothing can have.

    Raises:
        LlmError: INVALID_REQUEST; UNSUPPORTED_COMBINATION for more slots than the engine has.
    """
    for field, (least, most) in RANGES.items():
        value = getattr(request, field)
        if value is not None and not least <= value <= most:
            raise _invalid(field, value, least, most)
    if request.parallel is not None:
        cache.check_slots(request.parallel)


def check_context(
    context_tokens: int,
    parallel: int,
    limit_tokens: int,
    facts: CheckpointFacts | UnruledModel,
    *,
    was_asked: bool = True,
) -> None:
    """Refuse a context whose share for one slot is beyond the model or below a page.

    Args:
        context_tokens: of all slots.
        parallel: slots.
        limit_tokens: the longest window: trained, or stretched on request.
        facts: the checkpoint.
        was_asked: somebody gave the number of slots.

    Raises:
        LlmError: UNSUPPORTED_COMBINATION with the sizes that would do.
    """
    least, share = min(PAGE_TOKENS, limit_tokens), context_tokens // parallel
    number = (
        slots_text(parallel)
        if was_asked or parallel == 1
        else f"{parallel} slots, as no number was asked for,"
    )
    what = f"{context_tokens:,} tokens of context in {number} are {share:,} in each"
    if share > limit_tokens:
        slots = -(-context_tokens // limit_tokens)
        trained = facts.trained_context_tokens
        stretched = "" if limit_tokens == trained else f" and stretched to {limit_tokens:,}"
        raise LlmError(
            ErrorCode.UNSUPPORTED_COMBINATION,
            f"{what}; the model was trained for {trained:,}{stretched}.",
            hint=f"Ask for at most --context {limit_tokens * parallel}, or for --parallel {slots}.",
            context_tokens=context_tokens,
            parallel=parallel,
            trained_context_tokens=trained,
            largest_context_tokens=limit_tokens * parallel,
        )
    if share < least:
        slots = context_tokens // least
        fewer = f", or for at most --parallel {slots}" if slots else ""
        raise LlmError(
            ErrorCode.UNSUPPORTED_COMBINATION,
            f"{what}; a slot needs {least:,} at least.",
            hint=f"Ask for at least --context {least * parallel}{fewer}.",
            context_tokens=context_tokens,
            parallel=parallel,
            smallest_context_tokens=least * parallel,
        )


def check_engine(backend: Backend, card_kind: CardKind) -> None:
    """Refuse an engine that cannot use the card. Raises LlmError ENGINE_UNUSABLE."""
    if backend is Backend.CPU and card_kind is not CardKind.CPU:
        raise LlmError(
            ErrorCode.ENGINE_UNUSABLE,
            "This llama-server computes on the CPU only and cannot use the card.",
            hint='Use a llama-server built for CUDA or Vulkan, or set card = "cpu" for host memory.',
            backend=str(backend),
            card_kind=str(card_kind),
        )


def _invalid(field: str, value: int, least: int, most: int) -> LlmError:
    return LlmError(
        ErrorCode.INVALID_REQUEST,
        f"{option_of(field)} must be {least} to {most}, not {value}.",
        hint=f"Leave {option_of(field)} out to let the planner choose.",
        **{field: value},
    )


def _missing_spec_type(
    facts: CheckpointFacts, features: Features, drafter: Drafter | None
) -> SpecType | None:
    """The way of drafting that there would be, and that the engine does not offer; None where it offers one."""
    if facts.has_mtp and features.drafts_itself:
        return None
    if drafter is not None:
        return None if drafter.spec_type in features.drafts_from else drafter.spec_type
    return SpecType.MTP if facts.has_mtp else None


def _impossible(
    facts: CheckpointFacts,
    request: PlanRequest,
    features: Features,
    card_kind: CardKind,
    *,
    projector: ProjectorFacts | None,
    drafter: Drafter | None,
) -> tuple[str, str] | None:
    """The reason and the way out; None where nothing is wrong."""
    name = facts.title or facts.architecture
    blocks = len(facts.trunk)
    everything = (
        len(facts.layers) + 1
    )  # as -ngl counts: blocks for multi-token prediction too, and the output
    newer = "Use a newer llama.cpp, or leave it out."
    wants_projector = request.projector in {ProjectorPlace.CARD, ProjectorPlace.HOST}
    wants_draft = request.drafting is Drafting.ON
    missing = _missing_spec_type(facts, features, drafter)
    experts = request.cpu_experts or 0
    batch, micro_batch = request.batch_tokens or 0, request.micro_batch_tokens or 0
    reasons = (
        (
            0 < batch < micro_batch,
            f"--micro-batch {micro_batch} is above --batch {batch}, and a micro batch is a part of a batch",
            f"Ask for at most --micro-batch {batch}, or for a larger batch.",
        ),
        (
            request.places_by_hand and card_kind is CardKind.CPU,
            "a placement was given, and without a card there is nothing to place",
            "Leave --gpu-layers, --cpu-experts and --cache-on-host out.",
        ),
        (
            request.gpu_layers is not None and experts > 0,
            "both layers and experts were placed by hand",
            "Give one of --gpu-layers and --cpu-experts.",
        ),
        (
            experts > 0 and not facts.expert_count,
            f"{name} has no experts to keep in host memory",
            "Leave --cpu-experts out.",
        ),
        (
            experts > blocks,
            f"{name} has {blocks} layers, and so many with experts at most",
            f"Ask for --cpu-experts {blocks}.",
        ),
        (
            (request.gpu_layers or 0) > everything,
            f"--gpu-layers {request.gpu_layers} is more than the {everything} layers of {name}, the output counting as"
            " one",
            f"Ask for at most --gpu-layers {everything}.",
        ),
        (
            experts > 0 and not features.places_experts,
            "this engine cannot place experts (--n-cpu-moe)",
            newer,
        ),
        (
            request.cache_on_host and not features.keeps_cache_on_host,
            "this engine cannot keep its cache in host memory",
            newer,
        ),
        (
            wants_draft and not facts.has_mtp and drafter is None,
            f"{name} cannot draft for itself: its file has no blocks for multi-token prediction, and no drafter"
            " lies beside it",
            "Leave drafting off, choose a file with such blocks, or put its drafter into the same directory.",
        ),
        (
            wants_draft and missing is not None,
            f"this engine has no --spec-type {missing}",
            newer,
        ),
        (
            wants_projector and projector is None,
            f"no projector was found beside {name}",
            "Put its mmproj file into the same directory.",
        ),
        (
            wants_projector and not features.projects,
            "this engine takes no projector (--mmproj)",
            newer,
        ),
        (
            request.unified and not features.shares_pool,
            "this engine has no unified pool (--kv-unified)",
            newer,
        ),
        (
            request.rope_scaling is not None and not features.stretches,
            "this engine cannot stretch positions (--rope-scaling)",
            newer,
        ),
        (
            request.tiered and features.tier is None,
            "this engine keeps its cache in one memory: its --help does not offer --kv-vram-cells",
            "Leave the tier out, or use a build that offers it.",
        ),
    )
    found = next(((what, hint) for wrong, what, hint in reasons if wrong), None)
    return found or unserved(facts, request, features)
