"""Prices at evidence ``engine``: the engine's projection in place of our arithmetic, and where we have none. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lllm3090d.checkpoints.facts import CheckpointFacts, ProjectorFacts
from lllm3090d.engines.capabilities import Backend
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.planning import cache, compute, placement
from lllm3090d.planning.launch import Launch, PlanPolicy
from lllm3090d.planning.projection import Figures, Projection, Where, corrected, main_context
from lllm3090d.planning.quote import Evidence, LineItem, Place, Quote, price
from lllm3090d.planning.units import MIB

# Items of a quote that a projection tells better.
PROJECTED_ON_CARD = frozenset({"weights", "kv cache", "recurrent state", "compute"})
PROJECTED_ON_HOST = frozenset({"token embedding", "host weights", "host cache", "host compute"})
PROJECTED = PROJECTED_ON_CARD | PROJECTED_ON_HOST


def engine_quote(  # noqa: PLR0917  # what a price is made of, as everywhere
    facts: CheckpointFacts,
    launch: Launch,
    backend: Backend,
    policy: PlanPolicy,
    projection: Projection,
    projector: ProjectorFacts | None = None,
) -> Quote:
    """The price of a launch whose weights, context and graphs the engine itself projected.

    What a dry run does not know (draft, projector, process, runtime) is priced from the header. Its outputs are
    corrected to the server's, each figure is rounded up, and the graph gets the margin of 5 %.

    Raises:
        LlmError: as :func:`price`; UNSUPPORTED_COMBINATION where the projection was made without the card.
    """
    base = price(facts, launch, backend, policy, projector)
    if backend is not Backend.CPU and projection.where is not Where.DEVICE:
        raise no_shares(backend)
    known = corrected(projection, facts, launch, backend)
    others = [item for item in base.items if item.name not in PROJECTED | {"workspace floor"}]
    items = [*_main_items(known, backend), *_beside_main_context(facts, launch, backend), *others]
    if backend is not Backend.CPU:
        items += _floor(items, policy)
    return Quote(tuple(items))


def unruled_quote(
    projection: Projection,
    launch: Launch,
    backend: Backend,
    policy: PlanPolicy,
    vocabulary_size: int,
) -> Quote:
    """The price of a launch of an architecture that no rule of ours describes: the engine's word alone.

    Its outputs are left as they are, a whole micro batch, for nothing tells what else the graph needs; so compute is
    an upper bound. A context checkpoint is charged like the whole context of a slot; plan such a model without.

    Args:
        projection: of this very launch.
        launch: the resolved values, without a draft.
        backend: what the engine computes on.
        policy: for the workspace reserve.
        vocabulary_size: words, from the header.

    Raises:
        LlmError: UNSUPPORTED_COMBINATION for drafting, and where the projection was made without the card and the
            card needs what the host does not (f16 copies of a quantised cache on CUDA); ENGINE_UNUSABLE for a
            backend whose runtime nobody knows.
    """
    if launch.draft is not None:
        raise LlmError(
            ErrorCode.UNSUPPORTED_COMBINATION,
            "Drafting cannot be priced for an architecture without a rule: a dry run does not know of it.",
            hint="Load the model without drafting.",
        )
    if backend is Backend.CPU:
        items = [
            *_main_items(projection, backend),
            _slack(launch),
            *_process(projection, launch, vocabulary_size),
        ]
        return Quote(tuple(items))
    known = projection
    if projection.where is not Where.DEVICE:
        if backend is Backend.CUDA and not all(kind is cache.CacheType.F16 for kind in launch.cache_types):
            raise no_shares(backend)
        # On a card the same tensors and no larger graph; nothing says what stays on the host, so all is charged.
        known = replace(projection, devices=(("card", projection.host),), host=Figures(0, 0, 0))
    size = compute.runtime_bytes(backend)
    formula = f"context, BLAS and pools of {backend}: {size // MIB} MiB"
    items = [
        *_main_items(known, backend),
        LineItem("runtime", Place.CARD, size, Evidence.HEADER, formula),
        _slack(launch),
    ]
    items += _floor(items, policy)
    process = _process(projection, launch, vocabulary_size)
    return Quote((*items, *(replace(item, place=Place.HOST) for item in process)))


def _main_items(projection: Projection, backend: Backend) -> Iterator[LineItem]:
    """Weights, context and compute of both places; the host is the card where there is none."""
    on_card = projection.host if backend is Backend.CPU else projection.device
    count = max(1, len(projection.devices))
    up = projection.rounding_of(1)
    rounded = f", rounded up on {count} device{'s' if count > 1 else ''}" if up else ""
    yield _engine("weights", Place.CARD, on_card.weights_bytes + up, f"the engine's model figure{rounded}")
    if on_card.context_bytes or up:
        size = on_card.context_bytes + up
        yield _engine("context", Place.CARD, size, f"the engine's figure for cache and states{rounded}")
    graph = on_card.compute_bytes + up
    margin = graph * compute.DEFAULT_MARGINS.compute_percent // 100
    formula = f"the engine's compute figure {graph} B{rounded}; + {compute.DEFAULT_MARGINS.compute_percent} % margin"
    yield _engine("compute", Place.CARD, graph + margin, formula)
    if backend is Backend.CPU:
        return
    host, each = projection.host, projection.rounding_bytes
    for name, size in (
        ("host weights", host.weights_bytes),
        ("host cache", host.context_bytes),
        ("host compute", host.compute_bytes),
    ):
        if size:
            yield _engine(name, Place.HOST, size + each, "the engine's figure for the host")


def _beside_main_context(facts: CheckpointFacts, launch: Launch, backend: Backend) -> Iterator[LineItem]:
    """What a launch with drafting adds to weights and states that a dry run, which knows none, leaves out."""
    if launch.draft is None:
        return
    main = main_context(launch)
    with_draft = placement.weights(facts, launch.placement(facts), backend)
    without = placement.weights(facts, main.placement(facts), backend)
    blocks = with_draft.card - without.card
    if blocks:
        yield LineItem(
            "draft blocks", Place.CARD, blocks, Evidence.HEADER, "tensors for multi-token prediction"
        )
    memory = placement.memory_of(backend)
    states = cache.state_bytes(facts, launch.shape(facts), memory=memory)
    copies = states - cache.state_bytes(facts, main.shape(facts), memory=memory)
    if copies:
        formula = "copies of the recurrent states for drafts that are taken back"
        yield LineItem("rollback states", Place.CARD, copies, Evidence.HEADER, formula)


def _floor(items: list[LineItem], policy: PlanPolicy) -> list[LineItem]:
    used = sum(
        item.bytes for item in items if item.name in ("compute", "runtime") and item.place is Place.CARD
    )
    missing = compute.workspace_missing_bytes(used, policy.workspace_reserve_mib)
    if not missing:
        return []
    formula = (
        f"compute and runtime raised to {policy.workspace_reserve_mib} MiB, until this build is measured"
    )
    return [LineItem("workspace floor", Place.CARD, missing, Evidence.HEADER, formula)]


def _slack(launch: Launch) -> LineItem:
    size = compute.slack_bytes(launch.context_tokens)
    formula = f"unaccounted for, at {launch.context_tokens} tokens: {size // MIB} MiB"
    return LineItem("slack", Place.CARD, size, Evidence.HEADER, formula)


def _process(projection: Projection, launch: Launch, vocabulary_size: int) -> Iterator[LineItem]:
    """The rest of the process, at place card."""
    size = compute.F32_BYTES * vocabulary_size * launch.parallel
    formula = f"{launch.parallel} {'slot' if launch.parallel == 1 else 'slots'} x {vocabulary_size:,} vocabulary x 4 B"
    yield LineItem("output buffer", Place.CARD, size, Evidence.HEADER, formula)
    context = projection.host.context_bytes + projection.device.context_bytes + projection.rounding_of(1)
    if launch.context_checkpoints:
        size = context * launch.context_checkpoints
        formula = f"{launch.context_checkpoints} checkpoints of all slots, at most the whole context each"
        yield _engine("context checkpoints", Place.CARD, size, formula)
    if launch.prompt_cache_mib:
        formula = f"limit of finished prompts: {launch.prompt_cache_mib} MiB"
        size = launch.prompt_cache_mib * MIB
        yield LineItem("prompt cache", Place.CARD, size, Evidence.HEADER, formula)
    formula = f"code, heap, vocabulary, threads: {compute.PROCESS_BYTES // MIB} MiB"
    yield LineItem("process", Place.CARD, compute.PROCESS_BYTES, Evidence.HEADER, formula)


def _engine(name: str, place: Place, size_bytes: int, formula: str) -> LineItem:
    return LineItem(name, place, size_bytes, Evidence.ENGINE, formula)


def no_shares(backend: Backend) -> LlmError:
    """The refusal of a price from a dry run that was made without the card, and does not tell what the card needs."""
    return LlmError(
        ErrorCode.UNSUPPORTED_COMBINATION,
        f"The dry run was made without the card, so nothing tells what {backend} needs on it.",
        hint="Unload a model so that the card has room for the dry run, or choose --cache-type f16.",
        backend=str(backend),
    )
