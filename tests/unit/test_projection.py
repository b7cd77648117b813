"""What a projection means: whether it may be made, the correction of its outputs, the comparison, its prices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from lllm3090d.engines.capabilities import Backend
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.planning.cache import CacheType
from lllm3090d.planning.engine_quote import PROJECTED, engine_quote, unruled_quote
from lllm3090d.planning.launch import Draft, Launch
from lllm3090d.planning.placement import Placement
from lllm3090d.planning.projection import (
    Figures,
    Projection,
    Where,
    compare,
    corrected,
    expected,
    judge,
    may_run,
)
from lllm3090d.planning.quote import Evidence, Place, price
from lllm3090d.planning.units import MIB
from tests.unit.engine_truth import (
    PARTIAL_CACHE_TYPES,
    POLICY,
    PartialRow,
    TruthRow,
    facts_of,
    partial_rows,
    priced_models,
    truth_rows,
)

pytestmark = pytest.mark.unit

GIB = 1 << 30


def launch_of(row: TruthRow) -> Launch:
    return Launch(
        context_tokens=row.context,
        parallel=row.parallel,
        cache_type_k=row.cache_type_k,
        cache_type_v=row.cache_type_v,
        batch_tokens=row.batch,
        micro_batch_tokens=row.micro_batch,
        context_checkpoints=8,
        prompt_cache_mib=1024,
        unified=row.unified,
        swa_full=row.swa_full,
    )


def projection_of(row: TruthRow, *, floored: bool = False) -> Projection:
    """The recorded dry run as the engine's program would report it."""

    def figure(size_bytes: int) -> int:
        return size_bytes // MIB * MIB if floored else size_bytes

    rounding = MIB - 1 if floored else 0
    host = Figures(figure(row.weights_host_bytes), 0, figure(row.compute_host_bytes))
    if row.backend is Backend.CPU:
        host = replace(host, context_bytes=figure(row.context_bytes))
        return Projection((), host, Where.HOST, rounding)
    card = Figures(*map(figure, (row.weights_card_bytes, row.context_bytes, row.compute_card_bytes)))
    return Projection((("FAKE0", card),), host, Where.DEVICE, rounding)


def main_rows() -> Iterator[TruthRow]:
    """Dry runs of the main context of models that are priced, as the program makes them."""
    priced = set(priced_models())
    for row in truth_rows():
        plain = not (row.refused or row.embeddings or row.draft_context or row.mtp or row.rollback_tokens)
        if plain and row.flash_attention and row.model in priced:
            yield row


# --- whether it may be made ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "card_free", "host_available", "state", "expectation"),
    [
        (Backend.CPU, None, 4 * GIB, 0, (Where.HOST, "")),
        (Backend.CPU, None, 600 * MIB, 0, (Where.NOWHERE, "host memory has 600 MiB")),
        (Backend.CPU, None, GIB, GIB, (Where.NOWHERE, "may need 1664")),
        (Backend.CPU, None, 2 * GIB, None, (Where.NOWHERE, "may need 2688")),
        (Backend.CUDA, 768 * MIB, 4 * GIB, 0, (Where.DEVICE, "")),
        (Backend.CUDA, 768 * MIB - 1, 4 * GIB, 0, (Where.HOST, "the card needs 768 MiB for it and 767 MiB")),
        (Backend.CUDA, 768 * MIB, 4 * GIB, 1, (Where.HOST, "the card needs 769 MiB")),
        (Backend.CUDA, None, 4 * GIB, 0, (Where.HOST, "nobody knows what is free")),
        (Backend.CUDA, 24 * GIB, 4 * GIB, None, (Where.HOST, "unknown size")),
        (Backend.CUDA, 24 * GIB, GIB, None, (Where.NOWHERE, "host memory")),
        (Backend.VULKAN, 384 * MIB, 4 * GIB, 0, (Where.DEVICE, "")),
        (Backend.VULKAN, 0, 4 * GIB, 0, (Where.HOST, "the card needs 384 MiB")),
        (Backend.METAL, 24 * GIB, 4 * GIB, 0, (Where.HOST, "nobody knows what backend metal takes")),
        (Backend.UNKNOWN, 24 * GIB, 4 * GIB, 0, (Where.HOST, "nobody knows what backend unknown takes")),
    ],
)
def test_a_dry_run_never_touches_a_card_without_room(
    backend: Backend,
    card_free: int | None,
    host_available: int,
    state: int | None,
    expectation: tuple[Where, str],
) -> None:
    where, reason = expectation
    allowed = may_run(
        backend, card_free_bytes=card_free, host_available_bytes=host_available, state_bytes=state
    )
    assert allowed.where is where
    assert reason in allowed.reason
    assert bool(allowed.reason) == bool(reason)
    if where is Where.HOST and reason:
        assert "no shares of card and host" in allowed.reason  # the consequence


# --- against recorded dry runs -------------------------------------------------------------------------------------


def test_recorded_dry_runs_agree_with_our_arithmetic() -> None:
    """Rows with a whole micro batch of outputs are what the program reports; whole MiB change nothing."""
    rows = [
        row for row in main_rows() if row.graph_outputs == row.shape.micro_batch_tokens and not row.unified
    ]
    assert len(rows) > 100
    assert {row.backend for row in rows} == {Backend.CPU, Backend.CUDA, Backend.VULKAN}
    for row in rows:
        found = judge(row.facts, launch_of(row), row.backend, projection_of(row, floored=True))
        assert found.agrees, (str(row), found.report())


def test_the_correction_gives_what_the_server_would_have() -> None:
    """Recorded twice, with all outputs and with the server's: the former corrected is the latter."""

    def key(row: TruthRow) -> TruthRow:
        bare = replace(
            row, outputs=0, source="", context_bytes=0, weights_card_bytes=0, weights_host_bytes=0
        )
        return replace(bare, compute_card_bytes=0, compute_host_bytes=0)

    served = {key(row): row for row in main_rows() if row.outputs == row.parallel}
    pairs = [(row, served[key(row)]) for row in main_rows() if not row.outputs and key(row) in served]
    assert len(pairs) >= 200
    lowered = 0
    ratios: dict[str, list[float]] = {}
    for assumed, real in pairs:
        before, truth = projection_of(assumed), projection_of(real)
        after = corrected(before, assumed.facts, launch_of(assumed), assumed.backend)
        graphs = [
            (each.device if each.devices else each.host).compute_bytes for each in (before, after, truth)
        ]
        ratios.setdefault(assumed.model, []).append(graphs[1] / graphs[2])
        lowered += graphs[1] < graphs[0]
    assert lowered
    assert min(map(min, ratios.values())) * 1.05 > 1  # a quote adds this margin
    # Falcon-H1 runs both mixers side by side, for which our formula is the most generous.
    assert max(ratios.pop("falcon-h1-7b")) < 1.3
    assert max(map(max, ratios.values())) < 1.12


@pytest.mark.parametrize(
    "row",
    [row for row in partial_rows() if not row.mtp][::9],  # a dry run knows no draft
    ids=str,
)
def test_partial_offload_is_compared_too(row: PartialRow) -> None:
    launch = Launch(
        8192, 2, *PARTIAL_CACHE_TYPES, 2048, 512, 0, 0,
        layers=Placement(row.layers_on_card, row.expert_layers_on_host),
    )  # fmt: skip
    ours = expected(row.facts, launch, row.backend, Where.DEVICE)
    assert ours.device.weights_bytes == row.weights_card_bytes
    assert ours.device.context_bytes == row.context_card_bytes
    assert (ours.host.weights_bytes, ours.host.context_bytes) == (
        row.weights_host_bytes,
        row.context_host_bytes,
    )


# --- comparison ----------------------------------------------------------------------------------------------------

OURS = Projection((("device", Figures(10 * GIB, GIB, GIB)),), Figures(GIB, 0, 20 * MIB), Where.DEVICE, 0)


def test_what_differs_is_told_with_both_ledgers() -> None:
    engine = Projection((("CUDA0", Figures(11 * GIB, GIB, GIB)),), Figures(GIB, 0, 40 * MIB), Where.DEVICE)
    found = compare(OURS, engine)
    (difference,) = found.differences
    assert not found.agrees
    assert (difference.place, difference.ours_bytes) == ("device", 12 * GIB)
    assert difference.engine_bytes == 13 * GIB
    assert difference.fraction == pytest.approx(-1 / 13)
    report = found.report()
    assert "device -7.7 % (12,288.0 against 13,312.0 MiB)" in report
    assert "CUDA0: weights 11,264.0, context 1,024.0, compute 1,024.0 MiB" in report
    assert "device: weights 10,240.0" in report
    assert report.count("Host: ") == 2


def test_rounding_and_one_percent_are_tolerated() -> None:
    total = 12 * GIB
    for shift, agrees in ((0, True), (total // 101, True), (total // 98, False), (-total // 102, True)):
        engine = Projection(
            (("CUDA0", Figures(10 * GIB + shift, GIB, GIB)),), Figures(GIB, 0, 0), Where.DEVICE, 0
        )
        assert compare(OURS, engine).agrees is agrees, shift
    assert "the totals agree within 1 %" in compare(OURS, OURS).report()
    # Three figures rounded down by almost a MiB each are no difference, however small the model.
    tiny = Projection((), Figures(3 * MIB - 1, MIB - 1, MIB - 1), Where.HOST, 0)
    assert compare(tiny, Projection((), Figures(2 * MIB, 0, 0), Where.HOST)).agrees
    assert not compare(tiny, Projection((), Figures(MIB, 0, 0), Where.HOST)).agrees


def test_figures_of_several_devices_are_summed() -> None:
    engine = Projection(
        (("CUDA0", Figures(5 * GIB, GIB // 2, 0)), ("CUDA1", Figures(5 * GIB, GIB // 2, GIB))),
        Figures(GIB, 0, 0),
        Where.DEVICE,
    )
    assert compare(OURS, engine).agrees
    assert len(engine.lines()) == 3


def test_projections_of_other_places_are_not_compared() -> None:
    with pytest.raises(ValueError, match="cannot be compared"):
        compare(OURS, Projection((), Figures(1, 1, 1), Where.HOST))


# --- prices --------------------------------------------------------------------------------------------------------

LAUNCH = Launch(16384, 2, CacheType.Q8_0, CacheType.Q8_0, 2048, 512, 8, 1024)
RULED = ("qwen3-8b", "qwen3.5-27b", "gemma-3-27b")


@pytest.mark.parametrize("backend", [Backend.CPU, Backend.CUDA, Backend.VULKAN])
@pytest.mark.parametrize("model", RULED)
def test_the_engines_word_replaces_ours_and_nothing_else(model: str, backend: Backend) -> None:
    facts = facts_of(model)
    where = Where.HOST if backend is Backend.CPU else Where.DEVICE
    projection = expected(facts, LAUNCH, backend, where)  # what the engine would say, to the byte
    base = price(facts, LAUNCH, backend, POLICY)
    quote = engine_quote(facts, LAUNCH, backend, POLICY, projection)
    names = {item.name for item in quote.items if item.evidence is Evidence.ENGINE}
    assert {"weights", "context", "compute"} <= names
    assert not {item.name for item in quote.items if item.evidence is Evidence.HEADER} & PROJECTED
    for item in base.items:
        if item.name not in PROJECTED | {"workspace floor"}:
            assert quote.item(item.name) == item
    for place in Place:
        theirs, ours = quote.total_bytes(place), base.total_bytes(place)
        # Our own margin has E x U more; nothing else differs.
        assert theirs <= ours
        assert theirs > 0.98 * ours - 16 * MIB


def test_whole_mib_are_rounded_up() -> None:
    facts = facts_of("qwen3-8b")
    exact = expected(facts, LAUNCH, Backend.CPU, Where.HOST)
    held = exact.host
    sizes = (held.weights_bytes, held.context_bytes, held.compute_bytes)
    reported = replace(
        exact,
        host=Figures(*(size // MIB * MIB for size in sizes)),
        rounding_bytes=MIB - 1,
    )
    least = engine_quote(facts, LAUNCH, Backend.CPU, POLICY, exact).total_bytes(Place.CARD)
    most = engine_quote(facts, LAUNCH, Backend.CPU, POLICY, reported).total_bytes(Place.CARD)
    assert least <= most <= least + 3 * MIB + MIB // 10


def test_drafting_is_priced_beside_what_the_engine_projected() -> None:
    facts = facts_of("qwen3.5-27b-mtp")
    launch = replace(LAUNCH, draft=Draft(3, CacheType.F16, CacheType.F16))
    projection = expected(facts, launch, Backend.CUDA, Where.DEVICE)
    quote = engine_quote(facts, launch, Backend.CUDA, POLICY, projection)
    base = price(facts, launch, Backend.CUDA, POLICY)
    assert quote.item("draft blocks").bytes > 100 * MIB
    assert quote.item("rollback states").bytes > 100 * MIB
    total = quote.total_bytes(Place.CARD)
    assert 0.99 * base.total_bytes(Place.CARD) < total <= base.total_bytes(Place.CARD)


def test_without_the_card_nothing_is_known_of_a_card() -> None:
    facts = facts_of("qwen3-8b")
    projection = expected(facts, LAUNCH, Backend.CUDA, Where.HOST)
    with pytest.raises(LlmError) as caught:
        engine_quote(facts, LAUNCH, Backend.CUDA, POLICY, projection)
    assert caught.value.code is ErrorCode.UNSUPPORTED_COMBINATION


PLAIN = replace(LAUNCH, context_checkpoints=0)


@pytest.mark.parametrize("backend", [Backend.CPU, Backend.CUDA, Backend.VULKAN])
@pytest.mark.parametrize("model", [*RULED, "mamba-codestral-7b", "deepseek-v2-lite"])
def test_an_architecture_without_a_rule_is_never_priced_below_what_a_rule_says(
    model: str, backend: Backend
) -> None:
    """Judged on models that have a rule, as if they had none."""
    facts = facts_of(model)
    where = Where.HOST if backend is Backend.CPU else Where.DEVICE
    projection = expected(facts, PLAIN, backend, where)
    quote = unruled_quote(projection, PLAIN, backend, POLICY, facts.vocabulary_size)
    truth = price(facts, PLAIN, backend, POLICY)
    for place in Place:
        margin = 4 * PLAIN.micro_batch_tokens * facts.embedding_length  # that only a rule gives
        assert quote.total_bytes(place) >= truth.total_bytes(place) - margin
        # Too dear by the logits of a whole micro batch at most.
        logits = 4 * PLAIN.micro_batch_tokens * facts.vocabulary_size * 21 // 20
        assert quote.total_bytes(place) <= truth.total_bytes(place) + logits
    assert quote.item("weights").evidence is quote.item("compute").evidence is Evidence.ENGINE


@pytest.mark.parametrize("model", RULED)
def test_without_card_and_rule_all_is_charged_to_the_card(model: str) -> None:
    facts, launch = facts_of(model), replace(PLAIN, cache_type_k=CacheType.F16, cache_type_v=CacheType.F16)
    projection = expected(facts, launch, Backend.CUDA, Where.HOST)
    quote = unruled_quote(projection, launch, Backend.CUDA, POLICY, facts.vocabulary_size)
    truth = price(facts, launch, Backend.CUDA, POLICY)
    assert quote.total_bytes(Place.CARD) >= truth.total_bytes(Place.CARD) - 16 * MIB
    with pytest.raises(LlmError) as caught:  # f16 copies of a quantised cache are not in it
        unruled_quote(projection, PLAIN, Backend.CUDA, POLICY, facts.vocabulary_size)
    assert caught.value.code is ErrorCode.UNSUPPORTED_COMBINATION
    assert unruled_quote(projection, PLAIN, Backend.VULKAN, POLICY, facts.vocabulary_size).items


def test_what_cannot_be_priced_without_a_rule() -> None:
    projection = Projection((), Figures(GIB, GIB, GIB), Where.HOST)
    with pytest.raises(LlmError, match="Drafting"):
        unruled_quote(projection, replace(PLAIN, draft=Draft(3)), Backend.CPU, POLICY, 1000)
    with pytest.raises(LlmError) as caught:
        f16 = replace(PLAIN, cache_type_k=CacheType.F16, cache_type_v=CacheType.F16)
        unruled_quote(projection, f16, Backend.SYCL, POLICY, 1000)
    assert caught.value.code is ErrorCode.ENGINE_UNUSABLE
    dear = unruled_quote(projection, LAUNCH, Backend.CPU, POLICY, 1000).item("context checkpoints")
    assert dear.bytes >= 8 * GIB
