"""The linear price: its invariants over all models and cards, what is refused, and what is said beside a plan."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lllm3090d.checkpoints.catalogue import (
    AttentionShape,
    CatalogueEntry,
    ModelKind,
    RecurrentShape,
    packaged_catalogue,
)
from lllm3090d.engines.capabilities import Backend
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.profiles import CardProfile, absent_profile, capacity_profile, named_profile
from lllm3090d.planning.catalogue_price import (
    ALLOCATOR_OVERHEAD,
    BACKEND_FIXED_MIB,
    BACKEND_KV_FACTOR,
    DESKTOP_RESERVE_MIB,
    DRIVER_RESERVE_MIB,
    MTP_LAYER_OVERHEAD,
    Q8_0_RATIO,
    VISION_WORKSPACE_RESERVE_MIB,
    WORKSPACE_RESERVE_MIB,
    Preview,
    PreviewCard,
    advised_gib,
    fixed_bytes,
    least_vram_mib,
    load_need_bytes,
    preview,
    startup_need_bytes,
    token_bytes,
)
from lllm3090d.planning.quote import Evidence, Place
from lllm3090d.planning.slots import SLOT_SPLIT_GAIN, SlotPolicy
from lllm3090d.planning.units import MIB, PAGE_TOKENS
from lllm3090d.planning.verdict import AGENT_PROMPT_FLOOR_TOKENS, Verdict, agent_ready

pytestmark = pytest.mark.unit

ENTRIES = packaged_catalogue().entries
BACKENDS = (Backend.VULKAN, Backend.CUDA)
DENSE_27B = packaged_catalogue().find("qwen3.8-27b")
assert DENSE_27B is not None

models = st.sampled_from(ENTRIES)
backends = st.sampled_from((*BACKENDS, Backend.ROCM, Backend.UNKNOWN))
policies = st.sampled_from(SlotPolicy)
capacities = st.integers(1, 128 * 1024)
states = st.one_of(st.just(0), st.integers(1, 1024 * MIB))


@st.composite
def made_up_models(draw: st.DrawFn) -> CatalogueEntry:
    """Models with nothing in common with those of the catalogue but their form."""
    layers = draw(st.integers(1, 100))
    projector = draw(st.sampled_from((0, 10**8, 2 * 10**9)))
    return CatalogueEntry(
        id="made-up",
        name="Made-Up",
        repository="nobody/nothing",
        file="model.gguf",
        quantisation="Q4_K_M",
        file_bytes=draw(st.integers(10**6, 80 * 10**9)),
        projector_file="mmproj.gguf" if projector else None,
        projector_bytes=projector,
        kind=ModelKind.DENSE,
        total_parameters_b=30,
        active_parameters_b=30,
        trained_context_tokens=draw(st.integers(1024, 1 << 20)),
        block_count=layers,
        full_attention=AttentionShape(
            layers=layers,
            kv_heads=draw(st.integers(1, 16)),
            head_length=draw(st.sampled_from((64, 128, 512))),
        ),
        drafts_itself=draw(st.booleans()),
    )


any_models = st.one_of(models, made_up_models())


def on(vram_mib: int, backend: Backend = Backend.VULKAN, **others: Any) -> PreviewCard:
    return PreviewCard(capacity_profile(vram_mib), backend, **{"desktop_active": False, **others})


def entry(word: str) -> CatalogueEntry:
    found = packaged_catalogue().find(word)
    assert found is not None
    return found


def auto(
    model: CatalogueEntry, card: PreviewCard, policy: SlotPolicy = SlotPolicy.BALANCED, state: int = 0
) -> Preview:
    return preview(model, card, policy, state_bytes=state)


# --- invariants --------------------------------------------------------------------------------------------


@given(any_models, capacities, backends, policies, states)
def test_a_plan_is_within_pool_model_and_card(
    model: CatalogueEntry, vram: int, backend: Backend, policy: SlotPolicy, state: int
) -> None:
    card = on(vram, backend)
    found = auto(model, card, policy, state)
    slots = found.slots
    assert slots.total_tokens == slots.window_tokens * slots.slots
    if not slots.fits:
        assert found.verdict is Verdict.TOO_BIG
        assert (slots.slots, slots.window_tokens, slots.total_tokens) == (0, 0, 0)
        assert startup_need_bytes(model, card, PAGE_TOKENS, 1, state) > card.grantable_bytes
        return
    assert 1024 <= slots.window_tokens <= model.trained_context_tokens
    assert startup_need_bytes(model, card, slots.total_tokens, slots.slots, state) <= card.grantable_bytes
    assert slots.unused_tokens is not None
    more = slots.total_tokens + slots.unused_tokens
    assert startup_need_bytes(model, card, more, slots.slots, state) <= card.grantable_bytes
    assert startup_need_bytes(model, card, more + PAGE_TOKENS, slots.slots, state) > card.grantable_bytes


@given(
    model=any_models,
    vram=capacities,
    more=st.integers(0, 64 * 1024),
    backend=backends,
    policy=policies,
    state=states,
)
def test_more_memory_never_serves_less(
    *, model: CatalogueEntry, vram: int, more: int, backend: Backend, policy: SlotPolicy, state: int
) -> None:
    small, large = (
        auto(model, on(vram, backend), policy, state),
        auto(model, on(vram + more, backend), policy, state),
    )
    check_growth(small, large, policy)


@pytest.mark.parametrize("policy", SlotPolicy)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("model", ENTRIES, ids=lambda model: model.id)
def test_a_fine_sweep_of_cards_never_falls(
    model: CatalogueEntry, backend: Backend, policy: SlotPolicy
) -> None:
    own_state = 0 if model.recurrent is None else model.recurrent.state_bytes
    for state in {0, own_state, 4 * own_state}:
        before = auto(model, on(8 * 1024, backend), policy, state)
        for vram in range(8 * 1024, 56 * 1024, 89):
            now = auto(model, on(vram, backend), policy, state)
            check_growth(before, now, policy)
            before = now


def check_growth(small: Preview, large: Preview, policy: SlotPolicy) -> None:
    before, after = small.slots, large.slots
    assert after.total_tokens >= before.total_tokens - PAGE_TOKENS * after.slots
    if policy is SlotPolicy.WINDOW:
        assert after.total_tokens >= before.total_tokens
        assert after.window_tokens >= before.window_tokens
    elif after.window_tokens < before.window_tokens:
        assert after.one_slot_window_tokens is not None
        assert after.total_tokens >= SLOT_SPLIT_GAIN * after.one_slot_window_tokens
        assert after.one_slot_window_tokens >= before.window_tokens


@given(
    model=any_models,
    vram=capacities,
    more=st.integers(0, 64 * 1024),
    backend=backends,
    count=st.integers(1, 40),
    state=states,
)
def test_a_fixed_number_of_slots_never_falls_either(
    *, model: CatalogueEntry, vram: int, more: int, backend: Backend, count: int, state: int
) -> None:
    def window(size: int) -> int:
        try:
            found = preview(model, on(size, backend), SlotPolicy.BALANCED, parallel=count, state_bytes=state)
        except LlmError as error:
            assert error.code is ErrorCode.INSUFFICIENT_MEMORY
            return 0
        assert found.slots.slots == count
        return found.slots.window_tokens

    assert window(vram + more) >= window(vram)


@given(any_models, capacities, backends, policies)
def test_without_a_desktop_nothing_is_less(
    model: CatalogueEntry, vram: int, backend: Backend, policy: SlotPolicy
) -> None:
    desktop = auto(model, on(vram, backend, desktop_active=True), policy)
    headless = auto(model, on(vram, backend), policy)
    assert headless.slots.total_tokens >= desktop.slots.total_tokens - PAGE_TOKENS * headless.slots.slots
    if policy is SlotPolicy.WINDOW:
        assert headless.slots.window_tokens >= desktop.slots.window_tokens
    unknown = auto(model, on(vram, backend, desktop_active=None), policy)
    assert unknown.slots == desktop.slots


@given(any_models, capacities, backends, st.integers(1, 256), states)
def test_an_explicit_number_of_slots_is_exact_or_refused(
    model: CatalogueEntry, vram: int, backend: Backend, count: int, state: int
) -> None:
    card = on(vram, backend)

    def asked(slots: int) -> Preview:
        return preview(model, card, SlotPolicy.BALANCED, parallel=slots, state_bytes=state)

    try:
        assert asked(count).slots.slots == count
    except LlmError as error:
        assert error.code is ErrorCode.INSUFFICIENT_MEMORY
        most = error.details["largest_parallel"]
        assert 0 <= most < count
        if most:
            assert asked(most).slots.slots == most
        with pytest.raises(LlmError):
            asked(most + 1)


@given(made_up_models(), capacities, backends)
def test_a_projector_never_enlarges_a_pool(model: CatalogueEntry, vram: int, backend: Backend) -> None:
    assume(model.has_projector)
    blind = model.model_copy(update={"projector_file": None, "projector_bytes": 0})
    card = on(vram, backend)
    assert auto(model, card).pool_tokens <= auto(blind, card).pool_tokens


@given(any_models, capacities)
def test_cuda_never_exceeds_vulkan(model: CatalogueEntry, vram: int) -> None:
    cuda, vulkan = auto(model, on(vram, Backend.CUDA)), auto(model, on(vram, Backend.VULKAN))
    assert cuda.pool_tokens <= vulkan.pool_tokens
    assert cuda.pool_f16_tokens <= vulkan.pool_f16_tokens


@given(any_models, backends, states, st.booleans())
def test_needs_differ_by_the_reserves(
    model: CatalogueEntry, backend: Backend, state: int, desktop: bool
) -> None:
    card = on(24576, backend, desktop_active=desktop)
    load = load_need_bytes(model, backend, 0, 1, state)
    assert load == model.file_bytes + model.projector_bytes + state
    reserves = WORKSPACE_RESERVE_MIB + BACKEND_FIXED_MIB.get(backend, 0)
    reserves += VISION_WORKSPACE_RESERVE_MIB if model.has_projector else 0
    assert startup_need_bytes(model, card, 0, 1, state) - load == reserves * MIB == fixed_bytes(model, card)


@given(any_models, backends, states, st.booleans())
def test_the_smallest_card_is_just_large_enough(
    model: CatalogueEntry, backend: Backend, state: int, desktop: bool
) -> None:
    def ready(vram: int) -> bool:
        found = auto(model, on(vram, backend, desktop_active=desktop), state=state)
        assert found.least_vram_mib == least
        # A second slot may halve the window; what counts is whether one conversation has room.
        alone = found.slots.one_slot_window_tokens or found.slots.window_tokens
        return agent_ready(alone)

    least = least_vram_mib(model, on(24576, backend, desktop_active=desktop), state)
    if least is None:
        assert model.trained_context_tokens <= AGENT_PROMPT_FLOOR_TOKENS
        assert not ready(128 * 1024)
        return
    assert ready(least)
    assert not ready(least - 1)
    assert not ready(max(1, least - 1024))


# --- figures -----------------------------------------------------------------------------------------------


def test_constants_are_the_published_ones() -> None:
    assert (DRIVER_RESERVE_MIB, DESKTOP_RESERVE_MIB, WORKSPACE_RESERVE_MIB) == (512, 2400, 1024)
    assert VISION_WORKSPACE_RESERVE_MIB == 1024
    assert dict(BACKEND_FIXED_MIB) == {Backend.CUDA: 230}
    assert float(Q8_0_RATIO) == 0.53125
    assert float(ALLOCATOR_OVERHEAD) == 1.0541176470588236
    assert Fraction("1.12") == Q8_0_RATIO * ALLOCATOR_OVERHEAD * 2
    assert float(MTP_LAYER_OVERHEAD) == 1.25
    assert {backend: float(factor) for backend, factor in BACKEND_KV_FACTOR.items()} == {Backend.CUDA: 1.136}


@pytest.mark.parametrize("model", ENTRIES, ids=lambda model: model.id)
def test_without_a_head_the_price_is_the_rule_of_thumb(model: CatalogueEntry) -> None:
    assert model.full_attention is not None
    k = Fraction(model.full_attention.f16_bytes_per_token)
    price = token_bytes(model, Backend.VULKAN)
    if model.drafts_itself:
        assert price > k / 2 * Fraction("1.12")
    else:
        assert price == k / 2 * Fraction("1.12")


def test_the_27b_is_within_its_measurements() -> None:
    """On an RTX 3090: a token took 37.73 KiB; more than 208,896 tokens (CUDA 172,032) never ran beside a desktop."""
    model = entry("qwen3.8-27b")
    price = float(token_bytes(model, Backend.VULKAN)) / 1024
    assert 37.73 <= price <= 39.62
    pools = {}
    for backend in BACKENDS:
        card = on(24576, backend, driver_reserve_mib=451, desktop_active=True)
        pools[backend] = auto(model, card).pool_tokens
    assert pools[Backend.VULKAN] <= 208_896
    assert pools[Backend.CUDA] <= 172_032
    assert 0.1 <= 1 - pools[Backend.CUDA] / pools[Backend.VULKAN] <= 0.2


def test_which_models_fit_which_card() -> None:
    assert all(auto(model, on(24576, desktop_active=True)).slots.fits for model in ENTRIES)
    small = PreviewCard(named_profile("rtx-5080"), Backend.VULKAN, desktop_active=True)
    fitting = {model.id for model in ENTRIES if auto(model, small).slots.fits}
    assert fitting == {"gpt-oss-20b", "qwen3-8b", "gemma-4-12b-qat"}


@pytest.mark.parametrize(
    ("card", "desktop", "headless"),
    [
        ("rtx-3090", 20640, 23040),
        ("rtx-4090", 20640, 23040),
        ("rtx-5090", 28832, 31232),
        ("rtx-5080", 12448, 14848),
        ("rtx-pro-6000-blackwell", 94368, 96768),
    ],
)
def test_what_the_known_cards_can_give(card: str, desktop: int, headless: int) -> None:
    """Usable MiB after the workspace, which is charged on the other side here."""
    for active, usable in ((True, desktop), (None, desktop), (False, headless)):
        place = PreviewCard(named_profile(card), Backend.VULKAN, desktop_active=active)
        assert place.grantable_bytes == (usable + WORKSPACE_RESERVE_MIB) * MIB
        assert sum(line.bytes for line in place.lines) == place.grantable_bytes


def test_a_live_driver_reserve_gives_another_window_than_the_assumed_one() -> None:
    model = entry("qwen3.8-27b")
    live = auto(model, on(24576, driver_reserve_mib=451, desktop_active=True))
    assumed = auto(model, on(24576, desktop_active=True))
    assert live.slots.window_tokens == 159_744
    assert assumed.slots.window_tokens < live.slots.window_tokens
    nothing_kept = on(24576, driver_reserve_mib=0, desktop_active=True)
    assert [line.name for line in nothing_kept.lines] == ["total", "desktop reserve"]
    assert nothing_kept.grantable_bytes == (24576 - 2400) * MIB


def test_of_desktop_and_other_processes_the_greater_counts() -> None:
    little, much = (
        on(24576, foreign_bytes=10 * MIB),
        on(24576, foreign_bytes=3000 * MIB, desktop_active=True),
    )
    assert little.grantable_bytes == (24576 - 512 - 10) * MIB
    assert much.grantable_bytes == (24576 - 512 - 3000) * MIB
    assert [line.name for line in much.lines] == ["total", "driver", "other processes"]
    both = on(24576, foreign_bytes=10 * MIB, desktop_active=True)
    assert both.grantable_bytes == (24576 - 512 - 2400) * MIB


def test_reserves_of_the_settings_are_used() -> None:
    model = entry("qwen3.8-27b")
    usual = auto(model, on(24576))
    less = auto(model, on(24576, workspace_reserve_mib=2048))
    assert less.spare_bytes == usual.spare_bytes - 1024 * MIB
    assert least_vram_mib(model, less.card) == least_vram_mib(model, usual.card, 1024 * MIB)
    desktop = on(24576, desktop_active=True, desktop_reserve_mib=100)
    assert auto(model, desktop).spare_bytes == usual.spare_bytes - 100 * MIB


def test_a_negative_spare_is_truncated_toward_zero_for_display() -> None:
    model = entry("gpt-oss-20b")
    need = startup_need_bytes(model, on(1), 0, 1)
    vram = -(-need // MIB) + 512 - 1  # a part of a MiB short
    found = auto(model, on(vram))
    assert -MIB < found.spare_bytes < 0
    assert found.spare_mib == 0
    assert (found.pool_tokens, found.slots.slots, found.verdict) == (0, 0, Verdict.TOO_BIG)


# --- the quote ---------------------------------------------------------------------------------------------


def test_every_line_of_the_quote_is_of_the_catalogue() -> None:
    found = auto(entry("gemma-4-26b-a4b"), on(24576, Backend.CUDA), state=5 * MIB)
    assert {item.evidence for item in found.quote.items} == {Evidence.CATALOGUE}
    assert [item.name for item in found.quote.items] == [
        "weights",
        "kv cache",
        "recurrent state",
        "workspace",
        "backend",
        "projector",
        "projector graph",
    ]
    assert found.quote.item("backend").bytes == 230 * MIB
    assert found.quote.item("recurrent state").bytes == found.slots.slots * 5 * MIB


def test_the_quote_of_what_does_not_fit_is_the_least_there_is() -> None:
    model = entry("qwen3.8-27b")
    found = auto(model, on(8192))
    need = startup_need_bytes(model, found.card, PAGE_TOKENS, 1)
    assert found.quote.total_bytes(Place.CARD) == need > found.card.grantable_bytes


# --- explicit contexts -------------------------------------------------------------------------------------


def test_a_total_is_cut_into_two_slots_and_priced() -> None:
    model, card = entry("qwen3.8-27b"), on(24576)
    found = preview(model, card, SlotPolicy.BALANCED, context_tokens=100_000)
    assert (found.slots.slots, found.slots.window_tokens) == (2, 50_000)
    alone = preview(model, card, SlotPolicy.BALANCED, context_tokens=100_000, parallel=1)
    assert (alone.slots.slots, alone.slots.window_tokens) == (1, 100_000)
    assert alone.slots.one_slot_window_tokens is None


def test_a_total_that_is_too_large_names_what_would_fit() -> None:
    model, card = entry("qwen3.8-27b"), on(24576, driver_reserve_mib=451)
    with pytest.raises(LlmError, match="needs about") as caught:
        preview(model, card, SlotPolicy.BALANCED, context_tokens=262_144, parallel=1)
    assert caught.value.code is ErrorCode.INSUFFICIENT_MEMORY
    largest = caught.value.details["largest_context_tokens"]
    assert largest == 223_232
    fitting = preview(model, card, SlotPolicy.BALANCED, context_tokens=largest, parallel=1)
    assert fitting.slots.total_tokens == largest
    for vram in (8192, 16_250):  # the latter holds one page, which is no page for each of two slots
        with pytest.raises(LlmError, match="needs about") as caught:
            preview(model, on(vram), SlotPolicy.BALANCED, context_tokens=4096)
        assert caught.value.details["largest_context_tokens"] is None
        assert caught.value.hint is not None
        assert "not even a page" in caught.value.hint
    assert auto(model, on(16_250)).pool_tokens == 1024


@pytest.mark.parametrize(
    ("total", "slots"), [(0, 1), (-5, 1), (1023, 1), (262_145, 1), (600_000, 2), (5000, 8)]
)
def test_a_total_of_impossible_windows_is_refused(total: int, slots: int) -> None:
    with pytest.raises(LlmError, match="1,024 to 262,144") as caught:
        preview(entry("qwen3.8-27b"), on(98304), SlotPolicy.BALANCED, context_tokens=total, parallel=slots)
    assert caught.value.code is ErrorCode.UNSUPPORTED_COMBINATION
    assert caught.value.hint


def test_stretched_positions_lengthen_the_window() -> None:
    model, card = entry("qwen3-8b"), on(24576)
    usual = preview(model, card, SlotPolicy.BALANCED, parallel=1)
    longer = preview(model, card, SlotPolicy.BALANCED, parallel=1, limit_tokens=65_536)
    assert usual.slots.window_tokens == 32_768
    assert longer.slots.window_tokens == 65_536


@pytest.mark.parametrize(
    ("parallel", "code"),
    [
        (0, ErrorCode.INVALID_REQUEST),
        (-1, ErrorCode.INVALID_REQUEST),
        (257, ErrorCode.UNSUPPORTED_COMBINATION),
        (1 << 40, ErrorCode.UNSUPPORTED_COMBINATION),
    ],
)
def test_impossible_numbers_of_slots_are_refused(parallel: int, code: ErrorCode) -> None:
    for context in (None, 4096):
        with pytest.raises(LlmError) as caught:
            preview(
                entry("qwen3-8b"), on(24576), SlotPolicy.BALANCED, parallel=parallel, context_tokens=context
            )
        assert caught.value.code is code
        assert caught.value.hint


# --- what cannot be priced, and advice ---------------------------------------------------------------------


def test_latent_attention_and_models_that_do_not_grow_are_refused() -> None:
    latent = entry("qwen3-8b").model_copy(update={"latent": True})
    states = RecurrentShape(layers=24, inner=1536, state=16, groups=0, convolution=4)
    recurrent = entry("qwen3-8b").model_copy(update={"full_attention": None, "recurrent": states})
    for model, word in ((latent, "latent"), (recurrent, "grows")):
        with pytest.raises(LlmError, match=word) as caught:
            auto(model, on(24576))
        assert caught.value.code is ErrorCode.UNSUPPORTED_ARCHITECTURE
        assert caught.value.hint


def test_states_are_those_that_the_engine_prints() -> None:
    found = {model.id: model.recurrent.state_bytes / MIB for model in ENTRIES if model.recurrent}
    assert found["qwen3.8-27b"] == 149.625
    assert found["qwen3.6-35b-a3b"] == pytest.approx(62.812, abs=0.001)


def test_verdicts_and_advice() -> None:
    dense = entry("qwen3.8-27b")
    assert auto(dense, on(24576)).verdict is Verdict.OK
    assert auto(dense, on(24576)).advice is None
    tight = auto(dense, on(17_000))
    assert tight.verdict is Verdict.TIGHT
    assert tight.advice == "For an agent it needs a card of 18 GiB."
    too_big = auto(dense, on(16_000, desktop_active=True))
    assert too_big.verdict is Verdict.TOO_BIG
    assert too_big.advice == "For an agent it needs a card of 20 GiB."
    short = auto(entry("qwen3-8b"), on(24576))
    assert short.verdict is Verdict.TIGHT
    assert short.advice is not None
    assert short.advice.startswith("No card helps")


def test_a_card_that_cannot_compute_it_comes_first() -> None:
    model = entry("qwen3-8b").model_copy(
        update={"least_compute_capability": "12.0", "trained_context_tokens": 65_536}
    )

    def on_card(profile: CardProfile) -> Preview:
        return auto(model, PreviewCard(profile, Backend.CUDA, desktop_active=True))

    old = on_card(named_profile("rtx-4090"))
    assert old.verdict is Verdict.CAPABILITY
    assert old.advice == "It needs a card of compute capability 12.0."
    assert on_card(named_profile("rtx-5090")).verdict is Verdict.OK
    assert on_card(capacity_profile(24576)).verdict is Verdict.OK
    assert on_card(absent_profile()).verdict is Verdict.CAPABILITY


@pytest.mark.parametrize(("mib", "gib"), [(24986, 25), (24576, 24), (24577, 25), (23655, 24), (1, 1)])
def test_advice_is_rounded_up(mib: int, gib: int) -> None:
    assert advised_gib(mib) == gib
