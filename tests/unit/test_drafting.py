"""Drafting: the second context of a launch, whatever file its weights are in, against the engine's dry runs."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lllm3090d.checkpoints.facts import CheckpointFacts, LayerKind, read_drafter_facts
from lllm3090d.engines.capabilities import Backend
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.planning import compute
from lllm3090d.planning.cache import CacheType
from lllm3090d.planning.drafting import DraftContext, draft_context
from lllm3090d.planning.launch import Draft, Launch, SpecType
from lllm3090d.planning.placement import memory_of
from lllm3090d.planning.quote import Place, Quote, price
from lllm3090d.planning.units import MIB
from tests.fakes.drafter_files import DRAFTERS, SIDECARS, write_drafter
from tests.unit.engine_truth import POLICY, facts_of

pytestmark = pytest.mark.unit

DATA = Path(__file__).parents[1] / "data" / "drafters.json"
BACKENDS = [Backend.CPU, Backend.CUDA, Backend.VULKAN]
Q8_0 = CacheType.Q8_0


@cache
def drafter_of(name: str, *, whole: bool = True) -> CheckpointFacts:
    """The facts of a drafter, read from a file with its dimensions."""
    with tempfile.TemporaryDirectory() as folder:
        return read_drafter_facts([write_drafter(Path(folder) / f"{name}.gguf", name, whole=whole)])


def model_for(drafter: CheckpointFacts) -> CheckpointFacts:
    """A model that the drafter could be made for: of a width that divides what it reads."""
    read = 0 if drafter.drafter is None else drafter.drafter.feature_length
    base = facts_of("llama-3.1-8b")
    width = {24_576: 8192}.get(read, drafter.embedding_length)
    return replace(base, embedding_length=width, vocabulary_size=drafter.vocabulary_size)


def spec_type_of(name: str) -> SpecType:
    if name in SIDECARS:
        return SpecType.MTP
    return SpecType.EAGLE3 if name.startswith("eagle3") else SpecType.DFLASH


def context_of(facts: CheckpointFacts, launch: Launch) -> DraftContext:
    made = draft_context(facts, launch, launch.shape(facts))
    assert made is not None
    return made


def launch_of(context: int = 8192, parallel: int = 1, **more: Any) -> Launch:
    return Launch(context, parallel, Q8_0, Q8_0, 2048, 512, 8, 0, **more)


@dataclass(frozen=True)
class Row:
    """One dry run of a drafter."""

    drafter: str
    backend: Backend
    launch: Launch
    weights: tuple[int, int]
    context_bytes: int
    compute: tuple[int, int]

    def context(self) -> DraftContext:
        """Ours."""
        facts = drafter_of(self.drafter)
        return context_of(model_for(facts), replace(self.launch, drafter=facts))


@cache
def rows() -> tuple[Row, ...]:
    document = json.loads(DATA.read_text(encoding="utf-8"))
    made = []
    for values in document["rows"]:
        row = dict(zip(document["columns"], values, strict=True))
        types = (CacheType(row["type_k"]), CacheType(row["type_v"]))
        launch = replace(
            launch_of(row["context"], row["parallel"]),
            micro_batch_tokens=row["micro_batch"],
            unified=row["unified"],
            swa_full=row["swa_full"],
            draft=Draft(3, *types, spec_type=spec_type_of(row["drafter"])),
        )
        made.append(
            Row(
                row["drafter"],
                Backend(row["backend"]),
                launch,
                (row["weights_card_bytes"], row["weights_host_bytes"]),
                row["context_bytes"],
                (row["compute_card_bytes"], row["compute_host_bytes"]),
            )
        )
    return tuple(made)


def test_there_are_rows_of_every_drafter() -> None:
    assert len(rows()) == 120
    assert {row.drafter for row in rows()} == {*DRAFTERS, *SIDECARS}
    assert {row.backend for row in rows()} == set(BACKENDS)


@pytest.mark.parametrize("name", [*DRAFTERS, *SIDECARS])
def test_weights_and_context_are_the_engines(name: str) -> None:
    """To the byte, in every place."""
    for row in (row for row in rows() if row.drafter == name):
        context = row.context()
        split = context.weights(row.backend)
        assert (split.card, split.host) == row.weights, str(row)
        assert context.cache_bytes(memory_of(row.backend)) == row.context_bytes, str(row)


@pytest.mark.parametrize("name", [*DRAFTERS, *SIDECARS])
def test_the_graph_is_bounded(name: str) -> None:
    """Never short; at most three times what the engine's dry run has, which omits the reading of hidden states."""
    for row in (row for row in rows() if row.drafter == name):
        bound, card = row.context().compute_bytes(row.backend), row.compute[0]
        assert card <= bound <= 3 * card, f"{row}: {bound} for {card}"
        if row.backend is not Backend.CPU:
            assert row.compute[1] <= row.context().host_bytes() * 1.0005, str(row)


def test_the_second_context_is_as_long_as_the_first() -> None:
    """As padded, with its slots and pool; its micro batch is limited by the padded length."""
    facts = facts_of("qwen3.5-27b-mtp")
    launch = launch_of(300, 2, draft=Draft(3))
    main = launch.shape(facts)
    shape = context_of(facts, launch).shape
    assert (main.context_tokens, main.micro_batch_tokens) == (512, 300)
    assert (shape.context_tokens, shape.slots, shape.micro_batch_tokens) == (512, 2, 512)
    unified = context_of(facts, replace(launch, unified=True)).shape
    assert (unified.streams, unified.context_tokens) == (1, 512)


@pytest.mark.parametrize(
    ("spec_type", "drafter", "planes"),
    [
        (SpecType.MTP, None, 4),
        (SpecType.MTP, "qwen3.5-27b-mtp", 4),
        (SpecType.EAGLE3, "eagle3-8b", 4),
        (SpecType.DFLASH, "dflash-8b", 4),
        (SpecType.DSPARK, "dflash-8b", 4),
        (SpecType.SIMPLE, "smollm2-135m", 1),
    ],
)
def test_only_drafts_from_hidden_states_cost_copies_of_the_state(
    spec_type: SpecType, drafter: str | None, planes: int
) -> None:
    facts = facts_of("qwen3.5-27b-mtp")
    file = None
    if drafter is not None:
        file = facts_of(drafter) if spec_type is SpecType.SIMPLE else drafter_of(drafter)
    launch = launch_of(draft=Draft(3, spec_type=spec_type), drafter=file)
    assert launch.shape(facts).state_planes == planes
    # The engine loads a model's own blocks for that kind of drafting only, then even beside a sidecar.
    assert launch.placement(facts).with_mtp is (spec_type is SpecType.MTP)


def test_a_model_without_such_blocks_can_have_a_sidecar() -> None:
    facts = facts_of("qwen3.5-27b")
    launch = launch_of(draft=Draft(3), drafter=drafter_of("qwen3.5-27b-mtp"))
    assert not launch.placement(facts).with_mtp
    quote = price(facts, launch, Backend.CUDA, POLICY)
    assert (
        quote.item("weights").bytes == price(facts, launch_of(), Backend.CUDA, POLICY).item("weights").bytes
    )
    assert quote.item("draft weights").bytes == drafter_of("qwen3.5-27b-mtp").weight_bytes - (
        quote.item("draft embedding").bytes
    )


def test_a_drafter_without_tables_takes_those_of_its_model() -> None:
    """It weighs less, and its guesses are as wide as the vocabulary of the model."""
    with_tables, without = drafter_of("eagle3-8b"), drafter_of("eagle3-8b", whole=False)
    assert without.vocabulary_size == 128_256  # the file says so
    assert not without.token_embedding_bytes and not without.output_bytes and not without.output_is_tied
    silent = replace(without, vocabulary_size=0)
    model = model_for(with_tables)
    draft = Draft(3, spec_type=SpecType.EAGLE3)
    made = [context_of(model, launch_of(draft=draft, drafter=each)) for each in (with_tables, silent)]
    assert made[1].compute_bytes(Backend.CUDA) == made[0].compute_bytes(Backend.CUDA)
    assert made[1].output_bytes() == made[0].output_bytes() == 128_256 * 4
    tables = 2 * 128_256 * 4096 // 32 * 34
    assert made[0].weights(Backend.CPU).card - made[1].weights(Backend.CPU).card == tables


@pytest.mark.parametrize(("name", "guesses"), [("eagle3-8b", 1), ("dflash-8b", 6)])
def test_a_block_is_guessed_at_once(name: str, guesses: int) -> None:
    """DFlash has the logits of a whole draft and its first token for every slot."""
    drafter = drafter_of(name)
    launch = launch_of(8192, 2, draft=Draft(5, spec_type=spec_type_of(name)), drafter=drafter)
    assert context_of(model_for(drafter), launch).output_bytes() == 2 * guesses * drafter.vocabulary_size * 4


def names(quote: Quote) -> set[str]:
    return {item.name for item in quote.items}


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_term_of_a_drafter_is_charged(backend: Backend) -> None:
    drafter = drafter_of("eagle3-8b")
    facts = facts_of("llama-3.1-8b")
    launch = launch_of(32_768, 2)
    plain = price(facts, launch, backend, POLICY)
    draft = Draft(3, spec_type=SpecType.EAGLE3)
    drafting = price(facts, replace(launch, draft=draft, drafter=drafter), backend, POLICY)
    more = {"draft weights", "draft cache", "draft compute", "draft output buffer", "hidden states"}
    if backend is not Backend.CPU:
        more |= {"draft embedding", "draft host compute"}
        gap = drafting.item("runtime").bytes - plain.item("runtime").bytes
        assert gap == compute.SECOND_CONTEXT_BYTES == 154 * MIB
    assert names(drafting) - names(plain) == more
    assert drafting.item("draft cache").bytes == 32_768 * 2 * 1024 * 2
    assert drafting.item("hidden states").bytes == 2 * 4 * 2048 * 3 * 4096
    assert drafting.item("hidden states").place is (Place.CARD if backend is Backend.CPU else Place.HOST)
    assert drafting.item("weights") == plain.item("weights")
    weighed = sum(item.bytes for item in drafting.items if item.name in ("draft weights", "draft embedding"))
    assert weighed == pytest.approx(drafter.weight_bytes, abs=4096)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_smaller_model_drafts(backend: Backend) -> None:
    """It is priced as any model, its cache in the draft's types; it reads no hidden states."""
    small, facts = facts_of("smollm2-135m"), facts_of("llama-3.1-8b")
    draft = Draft(4, Q8_0, Q8_0, spec_type=SpecType.SIMPLE)
    launch = launch_of(8192, 1, draft=draft, drafter=small)
    quote = price(facts, launch, backend, POLICY)
    alone = price(small, replace(launch_of(8192), context_checkpoints=0), backend, POLICY)
    assert "hidden states" not in names(quote)
    assert quote.item("draft cache").bytes == alone.item("kv cache").bytes
    assert quote.item("draft compute").bytes == alone.item("compute").bytes
    assert quote.item("draft weights").bytes == alone.item("weights").bytes


def test_states_that_cannot_be_taken_back_are_saved_before_each_draft() -> None:
    """Of a hybrid whose drafts come from a smaller model, of a hybrid that never can, and of a drafting hybrid."""
    hybrid, never, plain = facts_of("qwen3.5-27b"), facts_of("qwen3-next-80b-a3b"), facts_of("llama-3.1-8b")
    small, small_hybrid = facts_of("smollm2-135m"), facts_of("lfm2-1.2b")
    draft = Draft(3, spec_type=SpecType.SIMPLE)

    def saved(facts: CheckpointFacts, drafter: CheckpointFacts, *, slots: int = 1) -> int:
        launch = launch_of(8192, slots, draft=draft, drafter=drafter)
        items = price(facts, launch, Backend.CUDA, POLICY).items
        return sum(item.bytes for item in items if item.name == "draft checkpoint")

    def states(facts: CheckpointFacts) -> int:
        return price(facts, launch_of(), Backend.CPU, POLICY).item("recurrent state").bytes

    assert saved(hybrid, small, slots=2) == 2 * states(hybrid)
    assert saved(never, small) == states(never)
    assert saved(plain, small) == 0
    assert saved(plain, small_hybrid) == pytest.approx(states(small_hybrid), rel=0.01)
    sidecar = launch_of(draft=Draft(3), drafter=drafter_of("qwen3.5-27b-mtp"))
    assert "draft checkpoint" not in names(price(hybrid, sidecar, Backend.CUDA, POLICY))


@pytest.mark.parametrize(
    ("spec_type", "drafter", "reason"),
    [
        (SpecType.EAGLE3, None, "needs a drafter in a file of its own"),
        (SpecType.SIMPLE, None, "needs a drafter in a file of its own"),
        (SpecType.EAGLE3, "dflash-8b", "needs eagle3"),
        (SpecType.DFLASH, "eagle3-8b", "needs dflash"),
        (SpecType.SIMPLE, "eagle3-8b", "reads the hidden states"),
        (SpecType.MTP, "eagle3-8b", "no blocks for multi-token prediction"),
        (SpecType.EAGLE3, "eagle3-70b", "reads 24576 values for each token, no multiple of the 5120"),
    ],
)
def test_what_cannot_draft_is_refused(spec_type: SpecType, drafter: str | None, reason: str) -> None:
    file = None if drafter is None else drafter_of(drafter)
    launch = launch_of(draft=Draft(3, spec_type=spec_type), drafter=file)
    facts = facts_of("mistral-small-24b")
    with pytest.raises(LlmError, match=reason) as caught:
        price(facts, launch, Backend.CUDA, POLICY)
    assert caught.value.code is ErrorCode.UNSUPPORTED_COMBINATION
    assert caught.value.hint


def test_a_cache_type_that_the_drafter_cannot_have_is_refused() -> None:
    drafter = drafter_of("dflash-8b")
    odd = tuple(replace(layer, key_length=80) for layer in drafter.layers)
    draft = Draft(3, Q8_0, Q8_0, spec_type=SpecType.DFLASH)
    launch = launch_of(draft=draft, drafter=replace(drafter, layers=odd))
    with pytest.raises(LlmError, match="The K cache cannot be q8_0"):
        price(facts_of("qwen3-8b"), launch, Backend.CUDA, POLICY)


@pytest.mark.parametrize(
    "wrong",
    [
        {"drafter": facts_of("smollm2-135m")},
        {"draft": Draft(0)},
    ],
)
def test_a_draft_that_makes_no_sense_is_a_mistake_of_the_caller(wrong: dict[str, Any]) -> None:
    facts = facts_of("qwen3.5-27b-mtp")
    with pytest.raises(ValueError, match="draft"):
        price(facts, launch_of(**wrong), Backend.CUDA, POLICY)


@given(
    name=st.sampled_from([*DRAFTERS, *SIDECARS]),
    window=st.integers(1, 1 << 18),
    more=st.integers(0, 1 << 18),
    slots=st.integers(1, 16),
    unified=st.booleans(),
    backend=st.sampled_from(BACKENDS),
)
def test_the_price_of_a_draft_never_falls(
    *, name: str, window: int, more: int, slots: int, unified: bool, backend: Backend
) -> None:
    """As windows or slots grow, item by item and in whole."""
    drafter = drafter_of(name)
    facts = model_for(drafter)
    draft = Draft(3, spec_type=spec_type_of(name))

    def quote(each: int, parallel: int) -> Quote:
        launch = launch_of(max(2, each * parallel), parallel, unified=unified, draft=draft, drafter=drafter)
        return price(facts, launch, backend, POLICY)

    here, longer, wider = quote(window, slots), quote(window + more, slots), quote(window, slots + 1)
    for place in Place:
        assert here.total_bytes(place) <= longer.total_bytes(place)
    assert here.item("draft cache").bytes <= longer.item("draft cache").bytes
    assert here.item("draft cache").bytes <= wider.item("draft cache").bytes


def test_windows_of_a_drafter_are_its_own() -> None:
    facts = drafter_of("dflash-windows")
    kinds = [layer.kind for layer in facts.layers]
    assert kinds == [LayerKind.SLIDING] * 4 + [LayerKind.FULL]
    assert facts.sliding_window_tokens == 2048


@pytest.mark.parametrize(
    ("model", "tokens", "refused"),
    [("nemotron-nano-9b-v2", 12, False), ("nemotron-nano-9b-v2", 13, True), ("qwen3.5-27b-mtp", 64, False)],
)
def test_more_copies_of_states_than_a_graph_of_the_engine_holds(
    model: str, tokens: int, refused: bool
) -> None:
    """It aborted from 15 on with the first, and never with the last."""
    facts = facts_of(model)
    itself = facts.has_mtp
    drafter = None if itself else drafter_of("eagle3-8b")
    if drafter is not None:
        facts = replace(facts, embedding_length=4096)
    spec_type = SpecType.MTP if itself else SpecType.EAGLE3
    launch = launch_of(draft=Draft(tokens, spec_type=spec_type), drafter=drafter)
    if not refused:
        assert context_of(facts, launch).tokens == tokens
        return
    with pytest.raises(LlmError, match=r"at most|too long") as caught:
        context_of(facts, launch)
    assert caught.value.code is ErrorCode.UNSUPPORTED_COMBINATION
    assert caught.value.hint == "Ask for drafts of at most 12 tokens."
