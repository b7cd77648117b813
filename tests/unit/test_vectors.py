"""Models that turn text into vectors or score it: how they are told, planned, priced and launched."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lllm3090d.checkpoints.facts import CheckpointFacts, read_facts
from lllm3090d.checkpoints.purpose import Pooling, Purpose
from lllm3090d.engines.capabilities import Backend
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.planning import compute
from lllm3090d.planning.planner import Plan
from lllm3090d.planning.quote import Place
from lllm3090d.planning.request import Drafting, Features, PlanRequest
from lllm3090d.planning.vectors import splits_texts
from tests.fakes.model_files import published, write
from tests.unit.engine_truth import facts_of
from tests.unit.plans import plan_of

pytestmark = pytest.mark.unit

SMOLLM2, BGE, NOMIC = "smollm2-135m", "bge-large-en", "nomic-embed-text-v1.5"
EMBED = PlanRequest(purpose=Purpose.EMBEDDING)


def with_pooling(tmp_path: Path, pooling: int) -> CheckpointFacts:
    spec = published()[SMOLLM2]
    return read_facts(
        [write(tmp_path / "m.gguf", replace(spec, keys={**spec.keys, "pooling_type": pooling}))]
    )


@pytest.mark.parametrize(
    ("pooling", "purpose", "known"),
    [
        (0, Purpose.CHAT, Pooling.NONE),
        (1, Purpose.EMBEDDING, Pooling.MEAN),
        (2, Purpose.EMBEDDING, Pooling.CLS),
        (3, Purpose.EMBEDDING, Pooling.LAST),
        (4, Purpose.RERANK, Pooling.RANK),
        (99, Purpose.EMBEDDING, None),
    ],
)
def test_the_header_tells_the_purpose(
    tmp_path: Path, pooling: int, purpose: Purpose, known: Pooling | None
) -> None:
    facts = with_pooling(tmp_path, pooling)
    assert (facts.purpose, facts.pooling) == (purpose, known)


def test_a_model_that_says_nothing_generates_text() -> None:
    assert (facts_of(SMOLLM2).purpose, facts_of(SMOLLM2).pooling) == (Purpose.CHAT, None)
    assert plan_of(SMOLLM2).launch.purpose is Purpose.CHAT


def check_nothing_is_generated(made: Plan) -> None:
    sizes = made.launch
    assert sizes.batch_tokens == sizes.micro_batch_tokens
    assert (sizes.draft, sizes.context_checkpoints, sizes.prompt_cache_mib) == (None, 0, 0)
    assert {"prompt cache", "context checkpoints"}.isdisjoint(item.name for item in made.quote.items)


@pytest.mark.parametrize("backend", [Backend.CPU, Backend.CUDA])
def test_an_encoder_computes_the_longest_text_at_once(backend: Backend) -> None:
    for name, tokens in ((BGE, 512), (NOMIC, 2048)):
        made = plan_of(name, PlanRequest(), backend=backend)
        check_nothing_is_generated(made)
        assert (made.launch.purpose, made.launch.pooling) == (Purpose.EMBEDDING, None)
        assert made.launch.micro_batch_tokens == made.window_tokens == tokens
        assert "kv cache" not in {item.name for item in made.quote.items}


def test_a_text_that_is_not_computed_in_parts_is_a_micro_batch_long() -> None:
    made = plan_of(SMOLLM2, EMBED)
    check_nothing_is_generated(made)
    assert made.launch.pooling is Pooling.MEAN  # its file names none
    assert made.window_tokens == made.launch.micro_batch_tokens == 2048
    smaller = plan_of(SMOLLM2, replace(EMBED, micro_batch_tokens=256))
    assert smaller.window_tokens == smaller.launch.batch_tokens == 256


def test_what_reads_the_last_token_computes_texts_in_parts(tmp_path: Path) -> None:
    last, rank = with_pooling(tmp_path, 3), with_pooling(tmp_path, 4)
    for facts in (last, rank):
        made = plan_of(facts, PlanRequest())
        check_nothing_is_generated(made)
        assert splits_texts(facts, made.launch)
        assert (made.launch.micro_batch_tokens, made.launch.pooling) == (512, None)
        assert made.window_tokens == facts.trained_context_tokens


@pytest.mark.parametrize("backend", [Backend.CPU, Backend.CUDA])
def test_every_token_is_an_output(backend: Backend) -> None:
    made, facts = (
        plan_of(SMOLLM2, replace(EMBED, micro_batch_tokens=512), backend=backend),
        facts_of(SMOLLM2),
    )
    buffer = made.quote.item("output buffer")
    assert buffer.bytes == 4 * 512 * (facts.vocabulary_size + facts.embedding_length)
    assert buffer.place is (Place.CARD if backend is Backend.CPU else Place.HOST)
    assert "512 tokens" in buffer.formula
    chat = plan_of(SMOLLM2, backend=backend).quote.item("compute").bytes
    assert made.quote.item("compute").bytes >= compute.logits_bytes(facts, 512) > chat


@pytest.mark.parametrize(
    ("model", "request_", "part"),
    [
        (BGE, PlanRequest(purpose=Purpose.CHAT), "generates no text"),
        (BGE, PlanRequest(purpose=Purpose.RERANK), "scores no texts"),
        (SMOLLM2, PlanRequest(purpose=Purpose.RERANK), "scores no texts"),
        (BGE, PlanRequest(drafting=Drafting.ON), "cannot draft"),
    ],
)
def test_what_a_model_cannot_serve_is_refused(model: str, request_: PlanRequest, part: str) -> None:
    with pytest.raises(LlmError, match=part) as caught:
        plan_of(model, request_)
    assert caught.value.code is ErrorCode.UNSUPPORTED_COMBINATION and caught.value.hint


def test_a_build_without_the_option_is_refused() -> None:
    old = Features(Backend.CUDA, purposes=frozenset({Purpose.RERANK.value}))
    with pytest.raises(LlmError, match="no option for embedding models"):
        plan_of(SMOLLM2, EMBED, features=old)
