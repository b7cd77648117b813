"""The largest context by the engine's own dry run beside the plan's; see :mod:`bench.planning_truth`.

Only weights and context count on both sides, for those the engine states exactly; the rest is in other tables. The
planner's side is its own search by its own quote, of which only those items are summed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench._support import table
from bench.dry_run import DryRun, Request
from lllm3090d.checkpoints.facts import CheckpointFacts, read_facts
from lllm3090d.engines.capabilities import Backend
from lllm3090d.planning.cache import CELL_PADDING_TOKENS, CacheType
from lllm3090d.planning.launch import Draft, Launch
from lllm3090d.planning.quote import Place
from lllm3090d.planning.request import Room
from lllm3090d.planning.search import Variant
from lllm3090d.planning.units import MIB
from tests.fakes.model_files import published, write
from tests.unit.engine_truth import POLICY

# Full attention, experts, sliding windows, shared layers, latent attention, linear attention, Mamba, drafting.
MODELS = (
    "llama-3.1-8b",
    "qwen3-30b-a3b",
    "gemma-3-27b",
    "gemma-4-26b-a4b",
    "gpt-oss-20b",
    "muse-glimmer-30b",
    "glm-4.5-air",
    "deepseek-v2-lite",
    "qwen3-next-80b-a3b",
    "qwen3.5-27b-mtp",
    "nemotron-nano-9b-v2",
    "granite-4.0-h-tiny",
    "falcon-h1-7b",
    "lfm2-1.2b",
)
LEAST_WINDOW_TOKENS = 65_536
# Budgets are so far between what the engine needs for that window and for the longest, in percent of the way.
SHARES = (10, 45, 80)
CASES = ((Backend.CUDA, 1), (Backend.VULKAN, 3))  # kind of card, and slots
COUNTED = frozenset({"weights", "kv cache", "recurrent state", "draft cache"})
LEAST_PERCENT = 98


@dataclass(frozen=True, slots=True)
class Question:
    """A model, a number of slots and a budget of the card."""

    model: str
    backend: Backend
    slots: int
    budget_bytes: int


@dataclass(frozen=True, slots=True)
class Finding:
    """Both answers: tokens of one slot."""

    question: Question
    engine_tokens: int
    planned_tokens: int

    @property
    def share(self) -> float:
        """Of what the engine could hold."""
        return self.planned_tokens / self.engine_tokens

    @property
    def holds(self) -> bool:
        """At least 98 %, and never above."""
        return self.planned_tokens <= self.engine_tokens and self.share * 100 >= LEAST_PERCENT


class _Counted(Variant):
    """The planner's search, with the items of the quote that the engine states exactly and no others."""

    __slots__ = ()

    def excess_bytes(self, launch: Launch) -> int:
        items = self.price(launch).items
        counted = sum(item.bytes for item in items if item.place is Place.CARD and item.name in COUNTED)
        return counted - self.room.card


@dataclass(frozen=True, slots=True)
class _Subject:
    """A model in a file, asked on one kind of card."""

    engine: DryRun
    file: Path
    facts: CheckpointFacts
    backend: Backend

    def template(self) -> Launch:
        """A launch with its context and slots left open; models that draft for themselves do."""
        draft = Draft(POLICY.draft_tokens, CacheType.Q8_0, CacheType.Q8_0) if self.facts.has_mtp else None
        return Launch(
            context_tokens=0,
            parallel=1,
            cache_type_k=CacheType.Q8_0,
            cache_type_v=CacheType.Q8_0,
            batch_tokens=POLICY.batch_tokens,
            micro_batch_tokens=POLICY.micro_batch_tokens,
            context_checkpoints=0,
            prompt_cache_mib=0,
            draft=draft,
        )

    def engine_bytes(self, window_tokens: int, slots: int) -> int:
        """Weights and contexts on the card, as the engine reports them."""
        launch = self.template()
        request = Request(
            model=self.file,
            context_tokens=window_tokens * slots,
            parallel=slots,
            batch_tokens=launch.batch_tokens,
            micro_batch_tokens=launch.micro_batch_tokens,
            cache_type_k=launch.cache_type_k,
            cache_type_v=launch.cache_type_v,
            device=self.backend,
        )
        if launch.draft is None:
            card = self.engine.ask(request).card
            return card.weights + card.context
        with_draft = replace(request, with_mtp=True, rollback_tokens=launch.draft.tokens)
        main = self.engine.ask(with_draft).card
        draft = self.engine.ask(
            replace(
                request,
                with_mtp=True,
                draft_context=True,
                cache_type_k=launch.draft.cache_type_k,
                cache_type_v=launch.draft.cache_type_v,
            )
        ).card
        return main.weights + main.context + draft.context

    def largest_of_engine(self, question: Question) -> int:
        """By bisection, over the numbers of cells that the engine makes of any number of tokens."""
        trained = self.facts.trained_context_tokens

        def fits(padded: int) -> bool:
            window = min(padded * CELL_PADDING_TOKENS, trained)
            return self.engine_bytes(window, question.slots) <= question.budget_bytes

        padded = _last(LEAST_WINDOW_TOKENS // CELL_PADDING_TOKENS, -(-trained // CELL_PADDING_TOKENS), fits)
        return min(padded * CELL_PADDING_TOKENS, trained)

    def largest_of_plan(self, question: Question) -> int:
        """By the planner's search."""
        variant = _Counted(
            facts=self.facts,
            template=self.template(),
            policy=POLICY,
            backend=self.backend,
            room=Room(question.budget_bytes),
            limit_tokens=self.facts.trained_context_tokens,
        )
        return variant.largest_window(question.slots) or 0


def _last(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The greatest number for which a predicate that turns false once holds; it holds for the lowest."""
    if holds(high):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def findings(engine: DryRun, *, models: Sequence[str] = MODELS) -> Iterator[Finding]:
    """Ask both, for every model, every case and three budgets."""
    with tempfile.TemporaryDirectory() as folder:
        for name in models:
            file = write(Path(folder) / f"{name}.gguf", published()[name])
            facts = read_facts([file])
            for backend, slots in CASES:
                subject = _Subject(engine, file, facts, backend)
                windows = (LEAST_WINDOW_TOKENS, facts.trained_context_tokens)
                low, high = (subject.engine_bytes(window, slots) for window in windows)
                for share in SHARES:
                    question = Question(name, backend, slots, low + (high - low) * share // 100)
                    yield Finding(
                        question, subject.largest_of_engine(question), subject.largest_of_plan(question)
                    )


def context_table(found: Iterable[Finding]) -> str:
    """A line for each model and case, with the answers to all its budgets."""
    lines: dict[tuple[str, str, str], list[Finding]] = {}
    for each in found:
        asked = each.question
        lines.setdefault((asked.model, str(asked.backend), str(asked.slots)), []).append(each)
    rows = []
    for key, answers in lines.items():
        cells = list(key)
        for each in answers:
            cells += [
                f"{each.question.budget_bytes / MIB:,.0f}",
                f"{each.engine_tokens:,}",
                f"{each.planned_tokens:,}",
            ]
        lowest = min(each.share for each in answers)
        cells += [f"{lowest:.1%}", "" if all(each.holds for each in answers) else "OUTSIDE"]
        rows.append(cells)
    heads = ["model", "card", "slots", *("MiB", "engine", "plan") * len(SHARES), "lowest", ""]
    return table(heads, rows)
