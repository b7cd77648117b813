"""The tiered cache: its layout, the published tables, and where the line goes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lllm3090d.planning import cache
from lllm3090d.planning.cache import CacheType
from lllm3090d.planning.tier import (
    LINE_STEP_TOKENS,
    LONG_LINE_TOKENS,
    Tier,
    TierLayout,
    TierSizes,
    largest_line,
    rollback_tokens,
    tail_tokens,
    tier_layouts,
    tier_sizes,
    unpaged_line,
)
from lllm3090d.planning.units import MIB
from tests.fakes import published_tier
from tests.fakes.published_tier import (
    COVERING_DRAFTING_RUNTIME_BYTES,
    COVERING_RUNTIME_BYTES,
    DRAFTING_RUNTIME_BYTES,
    RUNTIME_BYTES,
    PublishedLaunch,
    published_line,
    used_bytes,
)
from tests.unit.engine_truth import facts_of

pytestmark = pytest.mark.unit

# The dimensions of Bonsai 2 and Mirai S, the models of all published figures.
FACTS = facts_of("qwen3.5-27b-mtp")
WINDOW = 262_144
# Bonsai's file is given as 6.40 GB; the token embedding (265 MiB) stays in host memory. The blocks for drafting
# are 430 MiB of it.
BONSAI = 6_400_000_000 - 265 * MIB
DRAFTING_BLOCKS = 430 * MIB
MIRAI = 8227 * MIB
MIRAI_Q4_HEAD = 8023 * MIB


def layouts_of(cache_type: CacheType = CacheType.Q8_0, context: int = WINDOW) -> tuple[TierLayout, ...]:
    shape = cache.cache_shape(
        FACTS, context_tokens=context, parallel=1, batch_tokens=2048, micro_batch_tokens=512
    )
    return tier_layouts(FACTS, shape, cache_type)


@pytest.mark.parametrize(
    ("cache_type", "cell", "staging", "window_mib"),
    [
        (CacheType.Q8_0, 34_816, 2176, 8704),
        (CacheType.Q4_0, 18_432, 1152, 4608),
        (CacheType.F16, 65_536, 4096, 16_384),
    ],
)
def test_bytes_of_a_cell_are_the_published_ones(
    cache_type: CacheType, cell: int, staging: int, window_mib: int
) -> None:
    (layout,) = layouts_of(cache_type)
    assert (layout.layers, layout.cell_bytes, layout.staging_cell_bytes) == (16, cell, staging)
    assert layout.sizes(WINDOW) == TierSizes(window_mib * MIB, 0, 0, 0)


@pytest.mark.parametrize(
    ("line", "published_gb"),
    [
        (31_488, 8.03),
        (44_000, 7.59),
        (57_856, 7.11),
        (95_488, 5.80),
        (113_152, 5.19),
        (120_064, 4.95),
        (128_000, 4.67),
    ],
)
def test_pinned_host_memory_is_the_published_one(line: int, published_gb: float) -> None:
    """In pages it is never more than (n - N) c where a part is whole pages, as here."""
    sizes = tier_sizes(layouts_of(), line)
    assert sizes.host_bytes <= (WINDOW - line) * 34_816 < sizes.host_bytes + 64 * MIB
    assert round((WINDOW - line) * 34_816 / 1e9, 2) == published_gb


# The four columns with drafting state no micro batch of the draft but the second; with 512 in the first and 256 in
# the others every figure comes out.
COLUMNS = {
    "q8_0 d2/t4 f16": PublishedLaunch(BONSAI),
    "q8_0 d2/t4 packed": PublishedLaunch(BONSAI, packed_mask=True, draft_micro_batch_tokens=256),
    "q8_0 d2/t2 packed": PublishedLaunch(
        BONSAI, tail_tokens=2, packed_mask=True, draft_micro_batch_tokens=256
    ),
    "q8_0 no draft": PublishedLaunch(
        BONSAI - DRAFTING_BLOCKS, draft_tokens=0, runtime_bytes=COVERING_RUNTIME_BYTES
    ),
    "q4_0 d2/t2 packed": PublishedLaunch(
        BONSAI,
        cache_type=CacheType.Q4_0,
        tail_tokens=2,
        packed_mask=True,
        draft_micro_batch_tokens=256,
    ),
}
TABLE = {
    7733: (0, 0, 0, 22_272, 16_384),
    9900: (49_408, 59_648, 69_376, 91_904, 147_712),
    11_975: (116_224, 126_464, 135_936, 158_720, WINDOW),
    15_950: (243_712, 253_952, WINDOW, WINDOW, WINDOW),
}


@pytest.mark.parametrize("free_mib", TABLE)
def test_the_published_table_of_lines_is_ours(free_mib: int) -> None:
    found = tuple(published_line(FACTS, launch, free_mib * MIB) for launch in COLUMNS.values())
    assert found == TABLE[free_mib]


def test_the_published_q4_0_window_leaves_what_is_published() -> None:
    launch = COLUMNS["q4_0 d2/t2 packed"]
    left = 11_975 * MIB - published_tier.LINUX_RESERVE_BYTES - used_bytes(FACTS, launch, WINDOW)
    assert left // MIB == 192


@pytest.mark.parametrize("free_mib", TABLE)
@pytest.mark.parametrize("column", COLUMNS)
def test_whole_pages_cost_no_more_than_the_reserve_has_for_them(free_mib: int, column: str) -> None:
    """Our line is never above the published one, and below it by at most 64 MiB of cells."""
    launch = COLUMNS[column]
    layouts = layouts_of(launch.cache_type)
    budget = free_mib * MIB - published_tier.LINUX_RESERVE_BYTES - published_tier.fixed_bytes(FACTS, launch)
    line, published = largest_line(layouts, budget), published_line(FACTS, launch, free_mib * MIB)
    assert line <= published
    if 0 < line < WINDOW:
        assert (published - line) * layouts[0].cell_bytes <= 64 * MIB + LINE_STEP_TOKENS * 34_816


MIRAI_F16 = PublishedLaunch(MIRAI, tail_tokens=2, runtime_bytes=DRAFTING_RUNTIME_BYTES)
MIRAI_1024 = replace(MIRAI_F16, micro_batch_tokens=1024, draft_micro_batch_tokens=1024, packed_mask=True)
MIRAI_POOL = replace(MIRAI_1024, draft_micro_batch_tokens=256, shared_pool=True)
MIRAI_2048 = replace(MIRAI_1024, micro_batch_tokens=2048, draft_micro_batch_tokens=2048)
BONSAI_F16 = PublishedLaunch(BONSAI, runtime_bytes=DRAFTING_RUNTIME_BYTES)
IDLE_4070 = 26
# Name, launch, line, measured by nvidia-smi and the published difference of the model to it, MiB; held by others.
MEASURED = [
    ("bonsai draft 2 tail 4", BONSAI_F16, 110_592, 11_422, -7, IDLE_4070),
    (
        "bonsai pool",
        replace(BONSAI_F16, draft_micro_batch_tokens=256, shared_pool=True),
        110_592,
        11_348,
        -16,
        IDLE_4070,
    ),
    ("mirai C/T4", replace(MIRAI_F16, tail_tokens=4), 31_488, 11_319, 23, IDLE_4070),
    ("mirai T2", MIRAI_F16, 31_488, 11_024, 18, IDLE_4070),
    ("mirai M16", MIRAI_F16, 40_960, 11_324, 13, IDLE_4070),
    ("mirai base", MIRAI_1024, 40_960, 11_339, 13, IDLE_4070),
    ("mirai pool", MIRAI_POOL, 40_960, 11_151, 9, IDLE_4070),
    ("mirai pool q4", replace(MIRAI_POOL, weights_bytes=MIRAI_Q4_HEAD), 40_960, 10_947, 9, IDLE_4070),
    ("mirai ub 2048", MIRAI_2048, 31_600, 11_595, 15, IDLE_4070),
    ("mirai soak 800", MIRAI_F16, 45_824, 11_444, 45, IDLE_4070),
    ("mirai soak 600", MIRAI_F16, 52_224, 11_684, 4, IDLE_4070),
    ("mirai ub 1024", MIRAI_1024, 44_288, 11_428, 28, IDLE_4070),
    ("mirai q4 pool", replace(MIRAI_POOL, weights_bytes=MIRAI_Q4_HEAD), 57_856, 11_487, -6, IDLE_4070),
    (
        "mirai no draft, given as 10.1 GB",
        replace(
            MIRAI_F16, weights_bytes=MIRAI - DRAFTING_BLOCKS, draft_tokens=0, runtime_bytes=RUNTIME_BYTES
        ),
        31_488,
        10_097,
        -80,
        IDLE_4070,
    ),
    ("3090, over idle", MIRAI_1024, 44_000, 11_533, -112, 0),
]


@pytest.mark.parametrize(
    ("launch", "line", "measured_mib", "difference_mib", "idle_mib"),
    [row[1:] for row in MEASURED],
    ids=[row[0] for row in MEASURED],
)
def test_measured_launches_differ_by_what_is_published(
    launch: PublishedLaunch, line: int, measured_mib: int, difference_mib: int, idle_mib: int
) -> None:
    ours_mib = used_bytes(FACTS, launch, line) / MIB + idle_mib
    assert ours_mib - measured_mib == pytest.approx(difference_mib, abs=1.0)


def test_the_measured_8_gb_card_differs_by_no_more_than_is_published() -> None:
    """Its settings are not published whole; with the small head and a draft micro batch of 256 it is within 123."""
    launch = PublishedLaunch(
        BONSAI - 214 * MIB,
        cache_type=CacheType.Q4_0,
        context_tokens=131_072,
        draft_tokens=1,
        tail_tokens=1,
        draft_micro_batch_tokens=256,
        runtime_bytes=DRAFTING_RUNTIME_BYTES,
    )
    assert 0 < used_bytes(FACTS, launch, 50_176) / MIB - 7380 <= 123


def test_the_runtime_that_covers_other_hosts_covers_the_3090() -> None:
    launch = replace(MIRAI_1024, runtime_bytes=COVERING_DRAFTING_RUNTIME_BYTES)
    assert -5 <= used_bytes(FACTS, launch, 44_000) / MIB - 11_533 <= 5


def launcher_line(
    free_mib: float, margin_mib: int, fixed_mib: float, cell: int = 34_816, staged: int | None = None
) -> int:
    """The published launcher's own formula, for comparison only: its constants are not ours."""
    budget = (free_mib - margin_mib - fixed_mib) * MIB
    if staged is not None:
        line = (budget - staged * cell / 16) / cell
        if WINDOW - line > staged:
            return int(line // 256) * 256
    return int((budget - WINDOW * cell / 16) / (cell * 15 / 16) // 256) * 256


BONSAI_FIXED, POOL, PACKED = 6731, 42, 240
BONSAI_Q4_FIXED = BONSAI_FIXED - POOL - 20.25  # the draft's cells in q4_0
MIRAI_FIXED = 8220 + 150 * 2 + 664
MIRAI_Q4_FIXED = 8016 + 150 * 2 + 664 + 44 - 188


@pytest.mark.parametrize(
    ("line", "free_mib", "margin_mib", "fixed_mib"),
    [
        (112_896, 11_797, 1000, BONSAI_FIXED),
        (113_152, 11_798, 1000, BONSAI_FIXED),
        (95_488, 11_548, 1300, BONSAI_FIXED),
        # One free value for three launches of one day; the fourth needs 3 MiB more.
        (118_784, 11_978, 1000, BONSAI_FIXED),
        (120_064, 11_978, 1000, BONSAI_FIXED - POOL),
        (128_000, 11_978, 1000, BONSAI_FIXED - POOL - PACKED),
        (119_040, 11_981, 1000, BONSAI_FIXED),
        # The same for five of another day.
        (31_488, 11_958.5, 1000, 9434),
        (39_424, 11_958.5, 1000, MIRAI_FIXED),
        (45_824, 11_958.5, 800, MIRAI_FIXED),
        (52_224, 11_958.5, 600, MIRAI_FIXED),
        (44_288, 11_958.5, 800, MIRAI_FIXED + 44),
        (45_312, 11_986, 800, MIRAI_FIXED + 44),
        (57_856, 11_985, 800, MIRAI_Q4_FIXED),
        (57_600, 11_977, 800, MIRAI_Q4_FIXED),
    ],
)
def test_published_choices_follow_the_launchers_formula(
    line: int, free_mib: float, margin_mib: int, fixed_mib: float
) -> None:
    assert launcher_line(free_mib, margin_mib, fixed_mib) == line
    cells = unpaged_line(int((free_mib - margin_mib - fixed_mib) * MIB), WINDOW, 34_816, 2176)
    assert cells == line  # what differs from ours are its constants, not the arithmetic


@pytest.mark.parametrize(("line", "free_mib"), [(243_712, 11_975), (104_192, 11_975 - 2300)])
def test_published_q4_0_choices_follow_the_launchers_formula(line: int, free_mib: int) -> None:
    assert launcher_line(free_mib, 1000, BONSAI_Q4_FIXED, 18_432) == line


def test_published_8_gb_choices_follow_the_launchers_formula_within_two_steps() -> None:
    """Free memory was measured here: 7733 MiB. Published were 50,176 and 59,904, 59,392, 57,600."""
    free, margin, fixed = 7733, 225, 6531
    short = (free - margin - fixed) * MIB - 131_072 * 1152
    assert short // (18_432 - 1152) // 256 * 256 == 50_432 == 50_176 + 256
    packed = fixed + (16 - 128) - 48
    assert launcher_line(free, margin, packed, 18_432, staged=81_920) == 59_392 == 59_904 - 2 * 256


# --- properties ---


def pages_by_hand(row: int, context: int, line: int, page: int) -> tuple[int, int, list[int]]:
    """Pages of one layer in VRAM and in host memory, and the runs of the latter, looked at one by one."""
    part = context * row
    in_vram = []
    for number in range(-(-2 * part // page)):
        which = min(number * page // part, 1)
        in_vram.append(number * page - which * part < line * row)
    runs: list[int] = []
    previous = True
    for each in in_vram:
        if not each:
            runs = [*runs, 1] if previous else [*runs[:-1], runs[-1] + 1]
        previous = each
    return sum(in_vram), len(in_vram) - sum(in_vram), runs


rows = st.integers(1, 64).map(lambda blocks: blocks * 34)
steps = st.integers(2, 400)
pages = st.sampled_from([4096, 65_536, 2 * MIB])
layouts = st.builds(
    lambda n, kinds, page: TierLayout(n * 256, tuple(sorted(kinds.items())), page),
    steps,
    st.dictionaries(rows, st.integers(1, 40), min_size=1, max_size=3),
    pages,
)


@given(row=rows, context=steps, line=st.integers(1, 400), page=st.sampled_from([4096, 65_536]))
def test_pages_are_those_that_the_engine_counts_one_by_one(
    row: int, context: int, line: int, page: int
) -> None:
    context, line = context * 256, min(line, context - 1) * 256
    head, host, runs = pages_by_hand(row, context, line, page)
    sizes = TierLayout(context, ((row, 3),), page).sizes(line)
    assert (sizes.head_bytes, sizes.host_bytes) == (3 * head * page, 3 * host * page)
    # Where a part is shorter than a page there may be one run, and then one staging buffer, as long.
    assert sizes.staging_bytes == sum(runs) * page
    assert sizes.layers == 3


@given(layout=layouts, budget=st.integers(0, 1 << 34), more=st.integers(0, 1 << 30))
def test_the_line_never_falls_with_more_memory_and_never_costs_more_than_it(
    layout: TierLayout, budget: int, more: int
) -> None:
    line = largest_line((layout,), budget)
    assert line <= largest_line((layout,), budget + more)
    assert line == layout.context_tokens or line % LINE_STEP_TOKENS == 0
    if line:
        assert tier_sizes((layout,), line).card_bytes <= budget


@given(layout=layouts, budget=st.integers(0, 1 << 31))
def test_no_higher_line_would_fit(layout: TierLayout, budget: int) -> None:
    line = largest_line((layout,), budget)
    higher = range(line + LINE_STEP_TOKENS, layout.context_tokens, LINE_STEP_TOKENS)
    assert all(tier_sizes((layout,), each).card_bytes > budget for each in higher)
    if line < layout.context_tokens:
        assert layout.sizes(layout.context_tokens).card_bytes > budget


@given(budget=st.integers(0, 16_000), more=st.integers(0, 4000), drafted=st.booleans())
def test_the_line_of_a_real_model_never_falls(budget: int, more: int, drafted: bool) -> None:
    shape = cache.cache_shape(
        FACTS, context_tokens=WINDOW, parallel=1, batch_tokens=2048, micro_batch_tokens=512
    )
    whole = (CacheType.F16, CacheType.F16) if drafted else None
    found = tier_layouts(FACTS, shape, CacheType.Q8_0, whole_draft=whole)
    assert len(found) == 1 + drafted
    line = largest_line(found, budget * MIB)
    assert line <= largest_line(found, (budget + more) * MIB)
    if line:
        assert tier_sizes(found, line).card_bytes <= budget * MIB


def test_a_draft_without_a_window_is_divided_too_unless_its_types_differ() -> None:
    shape = cache.cache_shape(
        FACTS, context_tokens=WINDOW, parallel=1, batch_tokens=2048, micro_batch_tokens=512
    )
    same = tier_layouts(FACTS, shape, CacheType.Q8_0, whole_draft=(CacheType.Q8_0, CacheType.Q8_0))
    line = 113_152
    main, both = tier_sizes(same[:1], line), tier_sizes(same, line)
    assert both.layers == 17
    # The same row in one more layer, with staging of its own.
    assert both.host_bytes * 16 == main.host_bytes * 17
    assert both.staging_bytes == main.staging_bytes * 2
    mixed = tier_layouts(FACTS, shape, CacheType.Q8_0, whole_draft=(CacheType.Q8_0, CacheType.F16))
    assert mixed == same[:1]


def test_a_single_layer_gains_nothing_but_where_it_fits_whole() -> None:
    layout = TierLayout(65_536, ((1088, 1),))
    whole = 65_536 * 2176
    assert largest_line((layout,), whole) == 65_536
    assert largest_line((layout,), whole - 1) in range(0, 65_536, 256)
    assert unpaged_line(whole - 1, 65_536, 2176, 2176) == 0


@pytest.mark.parametrize("budget", [-1, 0, 1, 570_425_343])
def test_no_memory_is_no_line(budget: int) -> None:
    assert unpaged_line(budget, WINDOW, 34_816, 2176) == 0
    assert largest_line(layouts_of(), budget) == 0
    assert largest_line((), budget) == 0


def test_a_line_must_divide_something() -> None:
    sizes = TierSizes(1, 1, 1, 1)
    for line in (0, -256, WINDOW, WINDOW + 256):
        with pytest.raises(ValueError, match="divides nothing"):
            Tier(line, WINDOW, sizes)
    with pytest.raises(ValueError, match="negative"):
        Tier(256, WINDOW, sizes, draft_tail_tokens=-1)
    with pytest.raises(ValueError, match="at least one cell"):
        layouts_of()[0].sizes(0)


def test_expected_mib_are_rounded_up() -> None:
    assert Tier(256, 512, TierSizes(MIB + 1, MIB, 1, 1)).expected_mib == (2, 1, 1)


def test_longer_drafts_only_where_the_line_is_far() -> None:
    assert tail_tokens(LONG_LINE_TOKENS, 2) == 4
    assert tail_tokens(LONG_LINE_TOKENS - 256, 2) == 0
    assert tail_tokens(WINDOW, 0) == 0
    assert tail_tokens(WINDOW, 4) == 0
    assert rollback_tokens(2, 4) == 4
    assert rollback_tokens(3, 0) == 3
    # 149.6 MiB each, 449 with drafts of 2 and 748 with 4 beyond the line, as measured.
    shape = PublishedLaunch(BONSAI).shape(FACTS)
    assert round(cache.state_bytes(FACTS, shape) / MIB) == 748
    assert round(cache.state_bytes(FACTS, replace(shape, state_planes=3)) / MIB) == 449


def test_a_windowed_draft_has_the_published_cells() -> None:
    shape = PublishedLaunch(BONSAI).shape(FACTS)
    for batch, cells in ((2048, 20_736), (1024, 18_688)):
        draft = cache.draft_shape(shape, window_tokens=16_384, batch_tokens=batch)
        assert draft.context_tokens == cells
