"""Our figures beside those of the installed engine, in exact bytes; see :mod:`bench.accuracy` for how to call it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from bench._support import table
from bench.dry_run import Answer, DryRun, EngineRefusalError, Request
from lllm3090d.checkpoints.facts import CheckpointFacts, read_facts
from lllm3090d.engines.capabilities import Backend
from lllm3090d.errors import LlmError
from lllm3090d.planning import cache, placement
from lllm3090d.planning.cache import CacheShape, CacheType
from lllm3090d.planning.placement import Placement
from tests.fakes.model_files import ModelSpec, published, write
from tests.fakes.random_models import ARCHITECTURES, random_cases

CARDS = (Backend.CUDA, Backend.VULKAN)


@dataclass(frozen=True, slots=True)
class Launch:
    """A made-up model and what is asked for it; the path of the request is filled in when the file is written."""

    spec: ModelSpec
    request: Request

    def __str__(self) -> str:
        asked = self.request
        words = [self.spec.name, f"-c {asked.context_tokens} -np {asked.parallel}"]
        words += [
            f"-ub {asked.micro_batch_tokens} {asked.cache_type_k}/{asked.cache_type_v}",
            str(asked.device),
        ]
        words += [f"-ngl {asked.layers_on_card}"] if asked.layers_on_card is not None else []
        words += [f"-ncmoe {asked.expert_layers_on_host}"] if asked.expert_layers_on_host else []
        words += [f"rollback {asked.rollback_tokens}"] if asked.rollback_tokens else []
        flags = ("unified", "swa_full", "with_mtp", "draft_context")
        return " ".join(words + [name for name in flags if getattr(asked, name)])


@dataclass(frozen=True, slots=True)
class Figures:
    """Tokens and bytes that have to be equal."""

    context_tokens: int
    stream_cells: int
    weights_card: int
    weights_host: int
    context_card: int
    context_host: int

    @property
    def context_bytes(self) -> int:
        """Wherever it is."""
        return self.context_card + self.context_host


@dataclass(frozen=True, slots=True)
class Comparison:
    """One launch: what we say and what the engine says; None for a refusal, with the reason beside it."""

    architecture: str
    launch: Launch
    ours: Figures | None
    engine: Figures | None
    reason: str = ""

    @property
    def equal(self) -> bool:
        """All figures are, or both refuse."""
        return self.ours == self.engine

    @property
    def differences(self) -> tuple[int, int, int]:
        """Tokens, bytes of context and bytes of weights; 0 where one refuses."""
        if self.ours is None or self.engine is None:
            return 0, 0, 0

        ours, engine = self.ours, self.engine
        return (
            max(
                abs(ours.context_tokens - engine.context_tokens),
                abs(ours.stream_cells - engine.stream_cells),
            ),
            max(abs(ours.context_card - engine.context_card), abs(ours.context_host - engine.context_host)),
            max(abs(ours.weights_card - engine.weights_card), abs(ours.weights_host - engine.weights_host)),
        )

    def __str__(self) -> str:
        return f"{self.launch}: ours {self.ours}, engine {self.engine} {self.reason}".rstrip()


# ---- Launches ----------------------------------------------------------------------------------------------------


@st.composite
def launches(draw: Callable[[st.SearchStrategy[Any]], Any], architecture: str) -> Launch:
    """Any dimensions and any arguments, on the host, a stand-in for a card or both."""
    case = draw(random_cases(architecture))
    mtp = draw(st.booleans())
    draft = mtp and draw(st.booleans())
    device = draw(st.sampled_from((Backend.CPU, *CARDS)))
    is_split = device is not Backend.CPU and not draft and draw(st.booleans())
    types_v = (
        case.cache_type_v,
        case.cache_type_v,
        CacheType.F16,
    )  # latent attention has one for both, or is refused
    return Launch(
        spec=case.spec,
        request=Request(
            model=Path(),
            # Small ones too, down to one token a slot.
            context_tokens=draw(st.one_of(st.integers(case.parallel, 1024), st.just(case.context_tokens))),
            parallel=case.parallel,
            batch_tokens=case.batch_tokens,
            micro_batch_tokens=case.micro_batch_tokens,
            cache_type_k=case.cache_type_k,
            cache_type_v=draw(st.sampled_from(types_v)),
            unified=draw(st.booleans()),
            swa_full=case.swa_full,
            rollback_tokens=draw(st.sampled_from((0, 0, 1, 3))),
            with_mtp=mtp,
            draft_context=draft,
            device=device,
            layers_on_card=draw(st.integers(0, 14)) if is_split else None,
            expert_layers_on_host=(
                draw(st.integers(0, 8)) if is_split and case.spec.keys.get("expert_count") else 0
            ),
        ),
    )


# Layers on the card and expert layers in host memory, each with each, for published dimensions.
_PARTIAL: dict[str, tuple[tuple[int | None, ...], tuple[int, ...]]] = {
    "llama-3.1-8b": ((0, 1, 2, 20, 33), (0,)),
    "qwen3-30b-a3b": ((None, 30), (0, 10, 48)),
    "gpt-oss-20b": ((None, 13), (0, 5, 24)),
    "gemma-4-26b-a4b": ((None, 15, 1), (0, 7)),
    "qwen3.5-35b-a3b-mtp": ((None, 20, 41), (0, 12)),
    "glm-4.5-air": ((None, 24), (0, 20)),
    "lfm2-1.2b": ((0, 8), (0,)),
}


def partial_launches() -> Iterator[Launch]:
    """Placements of published models between a card and the host."""
    for name, (on_card, on_host) in _PARTIAL.items():
        spec = published()[name]
        for layers in on_card:
            for experts in on_host:
                for device in CARDS:
                    for mtp in (False, True) if name.endswith("-mtp") else (False,):
                        yield Launch(
                            spec,
                            Request(
                                model=Path(),
                                context_tokens=20_000,
                                parallel=2,
                                cache_type_k=CacheType.Q8_0,
                                cache_type_v=CacheType.Q8_0,
                                device=device,
                                layers_on_card=layers,
                                expert_layers_on_host=experts,
                                with_mtp=mtp,
                            ),
                        )


# ---- Comparisons -------------------------------------------------------------------------------------------------


def compare(engine: DryRun, launch: Launch, folder: Path) -> Comparison:
    """Write the model below ``folder``, price the launch and ask the engine for the same."""
    model = write(folder / "model.gguf", launch.spec)
    facts = read_facts([model])
    asked = launch.request
    if asked.with_mtp and not facts.has_mtp:  # made up without such blocks: there is nothing to load
        asked = replace(asked, with_mtp=False, draft_context=False)
    launch = replace(launch, request=asked)
    reason = ""
    try:
        ours = _ours(facts, asked)
    except LlmError as error:
        ours, reason = None, f"(we refuse: {error})"
    try:
        found = _figures(engine.ask(replace(asked, model=model)))
    except EngineRefusalError as error:
        # That it cannot read the file says nothing about the launch.
        if error.stage == "model":
            raise
        found, reason = None, f"{reason} (the engine: {error})"
    if found is not None and asked.draft_context:
        found = replace(found, weights_card=0, weights_host=0)
    return Comparison(launch.spec.architecture, launch, ours, found, reason)


def _figures(answer: Answer) -> Figures:
    return Figures(
        answer.context_tokens,
        answer.stream_cells,
        weights_card=answer.card.weights,
        weights_host=answer.host.weights,
        context_card=answer.card.context,
        context_host=answer.host.context,
    )


def _ours(facts: CheckpointFacts, asked: Request) -> Figures:
    """Our figures in the engine's terms: without a card everything is in host memory."""
    types = (asked.cache_type_k, asked.cache_type_v)
    cache.check_cache_types(facts, *types)
    shape = cache.cache_shape(
        facts,
        context_tokens=asked.context_tokens,
        parallel=asked.parallel,
        batch_tokens=asked.batch_tokens,
        micro_batch_tokens=asked.micro_batch_tokens,
        unified=asked.unified,
        swa_full=asked.swa_full,
        rollback_tokens=asked.rollback_tokens,
    )
    if asked.draft_context:
        return _draft(facts, shape, types, asked.device)
    where = Placement(
        layers_on_card=asked.layers_on_card,
        expert_layers_on_host=asked.expert_layers_on_host,
        with_mtp=asked.with_mtp,
    )
    weights = placement.weights(facts, where, asked.device)
    context = placement.context(facts, where, asked.device, shape, types)
    figures = (weights.card, weights.host, context.card, context.host)
    if asked.device is Backend.CPU:
        figures = (0, weights.card, 0, context.card)
    return Figures(shape.context_tokens, shape.stream_cells, *figures)


def _draft(
    facts: CheckpointFacts, shape: CacheShape, types: tuple[CacheType, CacheType], device: Backend
) -> Figures:
    """The context that drafts; its weights are those of the main model."""
    size = cache.draft_context_bytes(facts, shape, *types, memory=placement.memory_of(device))
    on_card, in_host = (0, size) if device is Backend.CPU else (size, 0)
    return Figures(shape.context_tokens, shape.stream_cells, 0, 0, on_card, in_host)


def random_comparisons(engine: DryRun, count: int, *, random_seed: int | None = None) -> list[Comparison]:
    """So many made-up launches, shared out evenly among the architectures; the same ones for the same seed."""
    done: list[Comparison] = []
    for index, architecture in enumerate(ARCHITECTURES):
        share = (count + index) // len(ARCHITECTURES)
        if share:
            done += _random_of(engine, architecture, share, random_seed)
    return done


def _random_of(engine: DryRun, architecture: str, share: int, random_seed: int | None) -> list[Comparison]:
    done: list[Comparison] = []

    def one(launch: Launch) -> None:
        with tempfile.TemporaryDirectory() as folder:
            done.append(compare(engine, launch, Path(folder)))

    test = settings(
        max_examples=share,
        deadline=None,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )(given(launches(architecture))(one))
    if random_seed is not None:
        test = seed(f"{random_seed} {architecture}")(test)
    test()
    return done


def partial_comparisons(engine: DryRun) -> list[Comparison]:
    """All of :func:`partial_launches`."""
    with tempfile.TemporaryDirectory() as folder:
        return [compare(engine, launch, Path(folder)) for launch in partial_launches()]


# ---- Table -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Line:
    """An architecture in the table: largest differences, and the row that has most to say."""

    rows: int = 0
    refused: int = 0
    differing: int = 0
    differences: tuple[int, int, int] = (0, 0, 0)
    worst: Comparison | None = field(default=None)

    def add(self, found: Comparison) -> None:
        """Count a comparison."""
        self.rows += 1
        self.refused += found.engine is None
        self.differing += not found.equal
        pairs = zip(self.differences, found.differences, strict=True)
        tokens, context, weights = (max(pair) for pair in pairs)
        self.differences = (tokens, context, weights)
        if self.worst is None or _weight(found) > _weight(self.worst):
            self.worst = found


def _weight(found: Comparison) -> tuple[bool, int, int]:
    """What makes a row worse than another; among equal ones, the larger context."""
    context = found.engine.context_bytes if found.engine is not None else 0
    return not found.equal, sum(found.differences), context


def table_of(comparisons: Iterable[Comparison]) -> str:
    """By architecture: the largest differences, and the worst row; among equal rows, the one with most context."""
    comparisons = list(comparisons)
    lines: dict[str, Line] = {}
    for found in comparisons:
        lines.setdefault(found.architecture, Line()).add(found)
    everything = Line()
    rows: list[Sequence[str]] = []
    for architecture, line in sorted(lines.items()):
        rows.append(_row(architecture, line))
    for found in comparisons:
        everything.add(found)
    rows.append(_row("all", everything))
    heads = ("architecture", "rows", "refused", "differ", "n_ctx", "context", "weights", "bytes of context")
    figures = table(heads, [row[:-1] for row in rows]).splitlines()
    ends = ("of the worst row", *(row[-1] for row in rows))
    return "\n".join(f"{left}  {end}" for left, end in zip(figures, ends, strict=True))


def _row(name: str, line: Line) -> tuple[str, ...]:
    worst = line.worst
    size = 0 if worst is None or worst.engine is None else worst.engine.context_bytes
    counts = (line.rows, line.refused, line.differing, *line.differences, size)
    return (name, *(f"{count:,}" for count in counts), "-" if worst is None else str(worst.launch))
