"""Context bytes never fall as anything that asks for more grows, from the smallest context on, whatever the model."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from functools import cache as remembered
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lllm3090d.checkpoints.facts import CheckpointFacts, Memory, read_facts
from lllm3090d.planning import cache
from lllm3090d.planning.cache import CacheShape, CacheType
from tests.fakes.model_files import write
from tests.fakes.random_models import ARCHITECTURES, RandomCase, random_cases
from tests.unit.engine_truth import facts_of, model_names

pytestmark = pytest.mark.unit

WINDOWED = "gemma-3-27b"
HYBRID = "qwen3.5-27b"
MOST_TOKENS = 1 << 20
MORE = st.one_of(st.integers(0, 600), st.integers(0, MOST_TOKENS))


@dataclass(frozen=True, slots=True)
class Asked:
    """Arguments that the engine takes: a token of the context and of a batch for each slot at least."""

    context: int
    slots: int
    batch: int
    micro_batch: int
    unified: bool
    swa_full: bool
    rollback: int
    types: tuple[CacheType, CacheType]
    memory: Memory

    def shape(self, facts: CheckpointFacts) -> CacheShape:
        return cache.cache_shape(
            facts,
            context_tokens=self.context,
            parallel=self.slots,
            batch_tokens=self.batch,
            micro_batch_tokens=self.micro_batch,
            unified=self.unified,
            swa_full=self.swa_full,
            rollback_tokens=self.rollback,
        )

    def bytes(self, facts: CheckpointFacts) -> int:
        return cache.context_bytes(facts, self.shape(facts), *self.types, memory=self.memory)


@st.composite
def asked(draw: st.DrawFn) -> Asked:
    """Any arguments; the smallest contexts as often as all others."""
    slots = draw(st.integers(1, 16))
    each = draw(st.one_of(st.integers(1, 600), st.integers(1, MOST_TOKENS)))
    return Asked(
        context=draw(st.sampled_from((slots, each + slots - 1, each * slots))),
        slots=slots,
        batch=draw(st.integers(17, 4096)),  # for one slot more, too
        micro_batch=draw(st.integers(1, 4096)),
        unified=draw(st.booleans()),
        swa_full=draw(st.booleans()),
        rollback=draw(st.integers(0, 4)),
        types=(draw(st.sampled_from(CacheType)), draw(st.sampled_from(CacheType))),
        memory=draw(st.sampled_from(Memory)),
    )


def never_falls(facts: CheckpointFacts, here: Asked, more: int) -> None:
    """More of one thing, all else the same."""
    least = here.bytes(facts)
    assert least >= 0
    assert (least == 0) is not facts.keeps_context
    assert here.shape(facts).context_tokens >= here.context
    grown = {
        "context": replace(here, context=here.context + more),
        "micro batch": replace(here, micro_batch=here.micro_batch + more % 4096),
        "batch": replace(here, batch=here.batch + more % 4096),
        "rollback": replace(here, rollback=here.rollback + more % 5),
        "all of the window": replace(here, swa_full=True),
    }
    for what, larger in grown.items():
        assert least <= larger.bytes(facts), what
    # A slot more that is to have what the others have.
    window = -(-here.context // here.slots)
    even = replace(here, context=window * here.slots)
    another = replace(here, context=window * (here.slots + 1), slots=here.slots + 1)
    assert even.bytes(facts) <= another.bytes(facts)
    if facts.sliding_window_tokens:
        wider = replace(facts, sliding_window_tokens=facts.sliding_window_tokens + more)
        assert least <= here.bytes(wider)


@given(model=st.sampled_from(model_names()), here=asked(), more=MORE)
def test_published_models_never_cost_less(model: str, here: Asked, more: int) -> None:
    never_falls(facts_of(model), here, more)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_models_of_any_dimensions_never_cost_less(architecture: str) -> None:
    @settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(case=random_cases(architecture), here=asked(), more=MORE)
    def run(case: RandomCase, here: Asked, more: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            facts = read_facts([write(Path(folder) / "m.gguf", case.spec)])
        never_falls(facts, here, more)

    run()


@remembered
def every_small_context(model: str, slots: int, *, unified: bool) -> tuple[int, ...]:
    """Bytes at each context from the least that is valid to beyond three paddings of every slot."""
    least = Asked(slots, slots, 2048, 512, unified, False, 0, (CacheType.Q8_0, CacheType.F16), Memory.CUDA)
    facts = facts_of(model)
    return tuple(replace(least, context=context).bytes(facts) for context in range(slots, 800 * slots))


@pytest.mark.parametrize("unified", [False, True])
@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("model", [WINDOWED, HYBRID])
def test_each_token_from_the_first(model: str, slots: int, *, unified: bool) -> None:
    """It never falls from one token to the next, and it does grow: by whole paddings."""
    sizes = every_small_context(model, slots, unified=unified)
    assert all(before <= after for before, after in pairwise(sizes))
    steps = sum(before < after for before, after in pairwise(sizes))
    assert 2 <= steps <= 4 * slots


@pytest.mark.parametrize("slots", [2, 3])
def test_as_many_tokens_as_slots_is_the_least(slots: int) -> None:
    """It costs a padding for each slot, or one for all; with less the dry run of the engine ends in an assertion."""
    facts = facts_of("llama-3.1-8b")
    for unified in (False, True):
        asked_for = Asked(slots, slots, 512, 512, unified, False, 0, (CacheType.F16,) * 2, Memory.HOST)
        streams = 1 if unified else slots
        assert asked_for.bytes(facts) == streams * cache.CELL_PADDING_TOKENS * 131_072
