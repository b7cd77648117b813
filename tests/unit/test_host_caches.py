"""Caches in host memory beside a card: what attention copies of them, and where a draft's cache is.

The engine's figures are of dry runs of b11434 for files with these dimensions, and of starts on a Vulkan card.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from lllm3090d.engines.capabilities import Backend
from lllm3090d.planning import compute
from lllm3090d.planning.cache import CacheType, cache_shape
from lllm3090d.planning.launch import Draft, Launch
from lllm3090d.planning.placement import Placement
from lllm3090d.planning.quote import Place, Quote, price
from lllm3090d.planning.units import MIB
from tests.unit.engine_truth import POLICY, facts_of
from tests.unit.plans import DRAFTING, LLAMA_8B

pytestmark = pytest.mark.unit

ON_HOST = Placement(cache_on_host=True)
SHARING = "gemma-4-e2b"  # 20 of its 35 layers share the caches of earlier ones


def quote_of(
    model: str,
    layers: Placement,
    context: int = 131_072,
    cache_type: CacheType = CacheType.F16,
    *,
    draft: Draft | None = None,
    backend: Backend = Backend.VULKAN,
) -> Quote:
    launch = Launch(context, 1, cache_type, cache_type, 2048, 512, 8, 0, layers=layers, draft=draft)
    return price(facts_of(model), launch, backend, POLICY)


def compute_mib(
    model: str, layers: Placement, context: int = 131_072, cache_type: CacheType = CacheType.F16
) -> float:
    return quote_of(model, layers, context, cache_type).item("compute").bytes / MIB


@pytest.mark.parametrize(
    ("model", "cache_type", "context", "engine_mib"),
    [
        (LLAMA_8B, CacheType.F16, 32_768, 200.0),
        (LLAMA_8B, CacheType.F16, 65_536, 360.0),
        (LLAMA_8B, CacheType.Q8_0, 65_536, 232.1),
        (DRAFTING, CacheType.F16, 65_536, 408.0),
        ("gemma-3-27b", CacheType.F16, 65_536, 634.0),
        ("glm-4.7-flash", CacheType.F16, 65_536, 276.5),  # latent attention reads its rows twice
        ("glm-4.7-flash", CacheType.Q8_0, 65_536, 209.0),
        ("qwen3-30b-a3b", CacheType.F16, 65_536, 224.0),
        (SHARING, CacheType.F16, 131_072, 1461.5),
        (SHARING, CacheType.Q8_0, 131_072, 858.8),
    ],
)
def test_a_card_that_reads_a_cache_in_host_memory_copies_a_layer_of_it(
    model: str, cache_type: CacheType, context: int, engine_mib: float
) -> None:
    ours = compute_mib(model, ON_HOST, context, cache_type)
    assert engine_mib <= ours <= 1.6 * engine_mib
    assert ours > compute_mib(model, Placement(), context, cache_type)


@pytest.mark.parametrize(("layers", "engine_mib"), [(17, 1195.0), (2, 406.5)])
def test_layers_that_share_a_cache_beside_the_card_copy_it(layers: int, engine_mib: float) -> None:
    assert compute_mib(SHARING, Placement(layers_on_card=layers)) >= engine_mib


def test_layers_that_share_a_cache_on_the_card_copy_nothing() -> None:
    facts = facts_of(SHARING)
    shape = cache_shape(facts, context_tokens=8192, parallel=1, batch_tokens=2048, micro_batch_tokens=512)
    types = (CacheType.F16, CacheType.F16)

    def copied(first: int) -> int:
        return compute.host_cache_copy_bytes(facts, shape, types, first_on_card=first, cache_on_host=False)

    # The caches of layers 13 and 14 are read by all that follow.
    assert copied(0) == copied(13) == 0
    assert copied(14) > 0
    assert copied(30) < copied(14)
    assert copied(len(facts.layers)) == 0


def test_other_layers_beside_the_card_are_attended_to_there() -> None:
    facts = facts_of(LLAMA_8B)
    shape = cache_shape(facts, context_tokens=8192, parallel=1, batch_tokens=2048, micro_batch_tokens=512)
    size = compute.host_cache_copy_bytes(
        facts, shape, (CacheType.F16, CacheType.F16), first_on_card=20, cache_on_host=False
    )
    assert size == 0


# --- a draft's cache ---


@pytest.mark.parametrize(
    ("layers", "place"),
    [
        (Placement(), Place.CARD),
        (Placement(layers_on_card=2), Place.CARD),  # the block that drafts, and the output
        (Placement(layers_on_card=1), Place.HOST),  # the output alone
        (Placement(layers_on_card=0), Place.HOST),
        (ON_HOST, Place.HOST),
    ],
)
def test_a_drafts_cache_is_beside_its_layer(layers: Placement, place: Place) -> None:
    quote = quote_of(DRAFTING, layers, 8192, draft=Draft(3))
    assert quote.item("draft cache").place is place
    everything = quote_of(DRAFTING, Placement(), 8192, draft=Draft(3))
    read = quote.item("draft compute").bytes - everything.item("draft compute").bytes
    assert read == (quote.item("draft cache").bytes if place is Place.HOST else 0)


def test_without_a_card_there_is_one_place() -> None:
    quote = quote_of(DRAFTING, Placement(), 8192, draft=Draft(3), backend=Backend.CPU)
    assert {item.place for item in quote.items} == {Place.CARD}


# --- types without a fast kernel ---


def test_attention_that_the_cpu_may_compute_has_its_rows_in_host_memory() -> None:
    facts = facts_of(LLAMA_8B)
    launch = Launch(65_536, 1, CacheType.Q8_0, CacheType.Q8_0, 2048, 512, 8, 0)
    mixed = replace(launch, cache_type_v=CacheType.F16)
    slow = replace(launch, cache_type_k=CacheType.IQ4_NL, cache_type_v=CacheType.IQ4_NL)

    def host_compute(asked: Launch) -> int:
        return price(facts, asked, Backend.VULKAN, POLICY).item("host compute").bytes

    row = CacheType.Q8_0.row_bytes(1024) + CacheType.F16.row_bytes(1024)
    assert host_compute(mixed) - host_compute(launch) >= 65_536 * row - MIB
    assert host_compute(slow) > host_compute(launch)
