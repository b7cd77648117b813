"""A launch over several cards: whose layers, what each takes, beside the engine's own dry runs; and the best shares."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations_with_replacement, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.splits import cases, differences, draft_figures, figures, recorded
from lllm3090d.engines.capabilities import Backend
from lllm3090d.planning.cache import CacheType
from lllm3090d.planning.devices import LEAST_CARD_BYTES, DeviceRoom
from lllm3090d.planning.launch import Draft, SpecType
from lllm3090d.planning.placement import Placement, memory_of
from lllm3090d.planning.quote import Place, Quote, price
from lllm3090d.planning.split import (
    Division,
    assigned_layers,
    last_cut,
    layers_on_cards,
    on_one_card,
)
from lllm3090d.planning.split_search import TwoCards, best_excess_bytes, best_shares, best_split, card_sets
from lllm3090d.planning.units import MIB
from tests.unit.engine_truth import POLICY, facts_of
from tests.unit.plans import (
    CARDS,
    DRAFTING,
    DRAFTING_MIXTURE,
    GEMMA_27B,
    LLAMA_8B,
    MIXTURE,
    SMOLLM2,
    launch_of,
    projector_of,
)

pytestmark = pytest.mark.unit

SHARING = "gemma-4-e2b"  # 35 layers, of which 20 share the caches of two others
GIB = 1 << 30
DIVISIBLE = ("kv cache", "recurrent state", "draft cache")


def _division(model: str, *, backend: Backend = Backend.CUDA, **changes: object) -> Division:
    launch = replace(launch_of(32_768), **changes)  # type: ignore[arg-type]  # the fields of a launch
    return Division(facts_of(model), launch, backend, POLICY)


def _bytes(quote: Quote, name: str) -> int:
    return sum(item.bytes for item in quote.items if item.name == name)


def _cards(*rooms_gib: float) -> list[DeviceRoom]:
    return [DeviceRoom(int(room * GIB), int(room * GIB), f"CUDA{i}") for i, room in enumerate(rooms_gib)]


# ---- The engine's own figures ------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", sorted({case.model for case in cases()}))
def test_every_card_has_what_the_engine_puts_there(model: str) -> None:
    """Weights and context to the byte, compute buffers within our bound, on two and three cards."""
    rows = [case for case in recorded() if case.model == model]
    assert [text for case in rows for text in differences(case, facts_of(model), POLICY)] == []
    assert all(len(case.cards) == len(case.shares) for case in rows)


def test_there_are_rows_enough() -> None:
    rows = recorded()
    assert len({facts_of(case.model).architecture for case in rows}) >= 8
    assert {len(case.cards) for case in rows} == {2, 3}
    assert {case.backend for case in rows} == set(CARDS)
    assert any(case.layers_on_card for case in rows) and any(case.expert_layers_on_host for case in rows)
    assert [replace(case, cards=(), drafts=(), host_compute=0) for case in rows] == list(cases())
    assert all(bool(case.drafts) is case.mtp for case in rows) and any(case.mtp for case in rows)


def test_the_bound_of_compute_is_no_waste() -> None:
    """Within a quarter and 128 MiB, on stand-ins that read the cache as we charge it."""
    for case in recorded():
        if case.backend is Backend.VULKAN and facts_of(case.model).state_space is None:
            split = case.split(facts_of(case.model), POLICY)
            for ledger, card in zip(split.ledgers, case.cards, strict=True):
                assert figures(ledger)[2] <= card[2] * 5 // 4 + 128 * MIB, str(case)


def test_a_difference_shows() -> None:
    """One byte more on one side, one less on the other, a card less."""
    case = next(case for case in recorded() if case.mtp)
    facts, (first, *others) = facts_of(case.model), case.cards
    assert differences(case, facts, POLICY) == []

    def wrong(**changes: object) -> list[str]:
        return differences(replace(case, **changes), facts, POLICY)  # type: ignore[arg-type]  # fields of a case

    assert wrong(cards=((first[0] + 1, *first[1:]), *others))
    assert wrong(cards=((first[0], first[1] - 1, first[2]), *others))
    assert wrong(cards=((*first[:2], first[2] + GIB), *others))
    assert wrong(cards=tuple(others))
    assert wrong(host_compute=GIB)
    assert wrong(drafts=((1, 0), *case.drafts[1:]))


# ---- Which layers ------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 200), min_size=1, max_size=8).filter(any))
def test_whole_layers_are_what_each_card_gets(counts: list[int]) -> None:
    """For any numbers of layers the engine's floats find exactly these again."""
    assert assigned_layers(sum(counts), counts) == tuple(counts)


def test_any_shares_are_understood() -> None:
    assert assigned_layers(33, (0.5, 0.5)) == (17, 16)  # the middle one begins in the first half
    assert assigned_layers(33, (3, 1)) == assigned_layers(33, (0.75, 0.25)) == (25, 8)
    assert assigned_layers(3, (1, 1, 1, 1)) == (1, 1, 1, 0)
    assert assigned_layers(33, (1, 0)) == (33, 0)
    assert assigned_layers(33, (0, 1)) == (0, 33)


@pytest.mark.parametrize("shares", [(), (0, 0), (-1, 2)])
def test_shares_that_are_none(shares: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="shares"):
        assigned_layers(33, shares)


def test_layers_on_cards_count_the_output() -> None:
    facts = facts_of(LLAMA_8B)
    assert layers_on_cards(facts, Placement()) == 33
    assert layers_on_cards(facts, Placement(layers_on_card=20)) == 20
    assert layers_on_cards(facts, Placement(layers_on_card=0)) == 0


def test_no_card_begins_behind_a_cache_that_it_shares() -> None:
    facts = facts_of(SHARING)
    assert (len(facts.layers), last_cut(facts)) == (35, 13)
    assert last_cut(facts_of(LLAMA_8B)) == 32


# ---- What they cost ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", CARDS)
@pytest.mark.parametrize("model", [SMOLLM2, LLAMA_8B, GEMMA_27B, MIXTURE, DRAFTING, SHARING, "gemma-3n-e4b"])
def test_what_can_be_divided_adds_up_to_one_card(model: str, backend: Backend) -> None:
    facts = facts_of(model)
    draft = Draft(3, CacheType.Q8_0, CacheType.Q8_0) if facts.has_mtp else None
    division = _division(model, backend=backend, draft=draft)
    single = price(facts, division.launch, backend, POLICY)
    third = division.layers // 3
    split = division.split(["a", "b", "c"], [third, third, division.layers - 2 * third])
    for name in DIVISIBLE:
        assert sum(_bytes(ledger, name) for ledger in split.ledgers) == _bytes(single, name), name
    copies = 2 * facts.tables.rope.in_memory(memory_of(backend))  # RoPE factors, on each card
    weights = sum(_bytes(ledger, "weights") for ledger in split.ledgers)
    assert 0 <= weights - _bytes(single, "weights") <= copies
    assert split.quote.total_bytes(Place.CARD) == sum(split.needs_bytes)
    ours, theirs = (
        [item.name for item in quote.items if item.place is Place.HOST] for quote in (split.quote, single)
    )
    assert ours == theirs


@pytest.mark.parametrize("backend", CARDS)
def test_every_card_pays_what_a_process_takes(backend: Backend) -> None:
    division = _division(LLAMA_8B, backend=backend)
    split = division.split(["a", "b"], [16, 17])
    for ledger in split.ledgers:
        for name in ("runtime", "slack"):
            assert _bytes(ledger, name) == _bytes(division.single, name)
        assert sum(_bytes(ledger, name) for name in ("compute", "runtime", "workspace floor")) >= 1024 * MIB
    assert split.quote.item("runtime").bytes == 2 * division.single.item("runtime").bytes
    assert "a " in split.quote.item("runtime").formula


def test_output_projector_and_drafter_are_on_the_main_card() -> None:
    draft = Draft(3, spec_type=SpecType.SIMPLE)
    launch = replace(launch_of(8192), draft=draft, drafter=facts_of(SMOLLM2))
    division = Division(facts_of(LLAMA_8B), launch, Backend.CUDA, POLICY, projector_of(900))
    other, main = division.split(["CUDA1", "CUDA0"], [16, 17]).ledgers
    for name in ("draft weights", "draft cache", "draft compute", "projector", "projector graph"):
        assert _bytes(main, name) == _bytes(division.single, name) > 0, name
        assert _bytes(other, name) == 0, name
    # A second context costs where it is.
    assert _bytes(main, "runtime") - _bytes(other, "runtime") == 154 * MIB
    # The output is the last layer.
    facts, last = division.facts, division.ledger(division.layers - 1, division.layers)
    assert _bytes(last, "weights") == (facts.tables.output + facts.tables.output_other).cuda


def test_a_projector_in_host_memory_stays_there() -> None:
    launch = replace(launch_of(8192), projector_on_card=False)
    division = Division(facts_of(LLAMA_8B), launch, Backend.CUDA, POLICY, projector_of(900))
    split = division.split(["a", "b"], [16, 17])
    assert all(_bytes(ledger, "projector") == 0 for ledger in split.ledgers)
    assert split.host.item("projector").bytes == division.single.item("projector").bytes


def test_what_the_model_drafts_itself_is_where_its_blocks_are() -> None:
    """Of two blocks and the output, by the cut: together, apart, or with the blocks before."""
    division = _division(DRAFTING, draft=Draft(3))
    cache = division.single.item("draft cache").bytes
    together = division.split(["a", "b"], [division.layers - 2, 2])
    assert [_bytes(ledger, "draft cache") for ledger in together.ledgers] == [0, cache]
    assert _bytes(together.ledgers[0], "draft compute") == 0
    apart = division.split(["a", "b"], [division.layers - 1, 1])
    assert [_bytes(ledger, "draft cache") for ledger in apart.ledgers] == [cache, 0]
    assert all(
        _bytes(ledger, "draft compute") for ledger in apart.ledgers
    )  # its output is on the other card
    assert all(draft_figures(ledger)[1] for ledger in apart.ledgers)


def test_a_part_in_host_memory() -> None:
    """Fewer layers to share out, experts less, and micro batches one after the other."""
    whole, part = _division(MIXTURE), _division(MIXTURE, layers=Placement(layers_on_card=20))
    assert (whole.layers, part.layers) == (49, 20)
    experts = _division(MIXTURE, layers=Placement(expert_layers_on_host=10))
    assert experts.need_bytes(0, 10) < whole.need_bytes(0, 10)
    kept = _division(LLAMA_8B, layers=Placement(cache_on_host=True)).split(["a", "b"], [16, 17])
    assert all(_bytes(ledger, "kv cache") == 0 for ledger in kept.ledgers)
    assert kept.host.item("host cache").bytes
    none = _division(LLAMA_8B, layers=Placement(layers_on_card=0))
    assert none.split(["a"], [0]).shares == (0,)


def test_caches_that_are_copied_cost_more() -> None:
    """Shares by hand may part blocks that share a cache: it is then copied for each of them."""
    division = _division(SHARING)
    whole, parted = (division.split(["a", "b"], [cut, 36 - cut]) for cut in (13, 16))
    assert _bytes(parted.ledgers[1], "compute") > _bytes(whole.ledgers[1], "compute") + 64 * MIB
    assert _bytes(parted.ledgers[0], "compute") == _bytes(whole.ledgers[0], "compute")


@pytest.mark.parametrize("shares", [(16, 16), (33,), (11, 11, 11), (34, -1)])
def test_shares_must_be_all_layers(shares: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="are not 33 layers"):
        _division(LLAMA_8B).split(["a", "b"], shares)


def test_what_is_on_one_card_only() -> None:
    with pytest.raises(ValueError, match="one card"):
        _division(LLAMA_8B, line_tokens=4096)
    with pytest.raises(ValueError, match="one memory"):
        _division(LLAMA_8B, backend=Backend.CPU)


def test_a_launch_on_one_of_several_cards_is_its_quote() -> None:
    quote = price(facts_of(LLAMA_8B), launch_of(8192), Backend.CUDA, POLICY)
    split = on_one_card("CUDA1", quote)
    assert split.devices == ("CUDA1",) and split.main == "CUDA1"
    assert split.needs_bytes == (quote.total_bytes(Place.CARD),)
    assert split.quote.total_bytes(Place.HOST) == quote.total_bytes(Place.HOST)
    assert {item.name: item for item in split.quote.items} == {item.name: item for item in quote.items}


# ---- The best shares ---------------------------------------------------------------------------------------------


def test_the_main_card_is_last_and_the_fewest_come_first() -> None:
    one, two, three = card_sets(_cards(8, 24, 12))
    assert [card.name for card in one] == ["CUDA1"]
    assert [card.name for card in two] == ["CUDA2", "CUDA1"]
    assert [card.name for card in three] == ["CUDA0", "CUDA2", "CUDA1"]
    assert [card.name for card in card_sets(_cards(8, 8))[1]] == [
        "CUDA1",
        "CUDA0",
    ]  # the first of equal ones


def test_a_small_card_takes_no_part() -> None:
    small = DeviceRoom(LEAST_CARD_BYTES - 1, LEAST_CARD_BYTES - 1, "CUDA0")
    assert card_sets([small, *_cards(8)]) == (tuple(_cards(8)),)
    assert card_sets([small]) == ((small,),)
    assert card_sets([]) == ()


@given(
    st.sampled_from([LLAMA_8B, DRAFTING_MIXTURE, SHARING, "nemotron-nano-9b-v2"]),
    st.lists(st.integers(-1, 40), min_size=1, max_size=3),
    st.sampled_from([None, 15]),
)
def test_no_other_shares_leave_more_room(model: str, rooms_gib: list[int], on_cards: int | None) -> None:
    """Beside every other cut."""
    division, rooms = _made(model, on_cards), [room * GIB for room in rooms_gib]
    shares = best_shares(division, rooms)
    assert sum(shares) == division.layers
    layers, most = division.layers, division.last_cut
    found = [_excess(division, rooms, cuts) for cuts in _cuts(len(rooms), most)]
    assert best_excess_bytes(division, rooms) == min(found)
    ends = [sum(shares[:index]) for index in range(1, len(shares))]
    assert _excess(division, rooms, tuple(ends)) == min(found)
    assert max(ends, default=0) <= most < max(1, layers)


@given(
    st.sampled_from([LLAMA_8B, DRAFTING_MIXTURE, SHARING, "nemotron-nano-9b-v2"]),
    st.lists(st.tuples(st.integers(-1, 40), st.integers(-1, 40)), min_size=1, max_size=6),
    st.sampled_from([None, 15]),
    st.integers(0, 2),
)
def test_two_cards_asked_about_many_times(
    model: str, rooms_gib: list[tuple[int, int]], on_cards: int | None, beside_gib: int
) -> None:
    """The same as the best shares say; and where it does not fit, a byte more of one card may be all it lacks."""
    division = _made(model, on_cards)
    launch, beside = TwoCards(division, beside_gib * GIB), beside_gib * GIB
    for first, last in [(one * GIB, other * GIB) for one, other in rooms_gib]:
        fits = best_excess_bytes(division, [first - beside, last - beside]) <= 0
        assert launch.fits(first, last) == fits
        if not fits:
            more = launch.just_too_little(first, last)
            assert more[0] >= first and more[1] >= last and not launch.fits(*more)
            assert launch.fits(more[0] + 1, 1 << 60) or launch.fits(1 << 60, more[1] + 1)


_MADE: dict[tuple[str, int | None], Division] = {}


def _made(model: str, on_cards: int | None) -> Division:
    if (model, on_cards) not in _MADE:
        draft = Draft(3) if facts_of(model).has_mtp else None
        _MADE[model, on_cards] = _division(model, draft=draft, layers=Placement(layers_on_card=on_cards))
    return _MADE[model, on_cards]


def _cuts(cards: int, most: int) -> list[tuple[int, ...]]:
    return list(combinations_with_replacement(range(most + 1), cards - 1))


def _excess(division: Division, rooms: list[int], cuts: tuple[int, ...]) -> int:
    ends = pairwise((0, *cuts, division.layers))
    return max(division.need_bytes(*end) - room for end, room in zip(ends, rooms, strict=True))


@given(st.integers(0, 65), st.integers(0, 65), st.integers(0, 65))
def test_more_layers_never_cost_less(first: int, second: int, third: int) -> None:
    division = _made(DRAFTING_MIXTURE, None)
    begin, middle, end = sorted(min(each, division.layers) for each in (first, second, third))
    assert division.need_bytes(begin, middle) <= division.need_bytes(begin, end)
    assert division.need_bytes(middle, end) <= division.need_bytes(begin, end)


def test_the_ledger_is_what_was_asked_for() -> None:
    division, cards = _division(MIXTURE), tuple(_cards(8, 10, 8))
    chosen = card_sets(cards)[-1]
    split = best_split(division, chosen)
    assert split.devices == ("CUDA0", "CUDA2", "CUDA1")
    rooms = [card.free_bytes for card in chosen]
    over = (needs - room for needs, room in zip(split.needs_bytes, rooms, strict=True))
    assert max(over) == best_excess_bytes(division, rooms)


def test_a_card_without_a_layer_is_left_out() -> None:
    """There are fewer layers than cards."""
    division = _division(LLAMA_8B, layers=Placement(layers_on_card=1))
    split = best_split(division, tuple(_cards(8, 8, 8)))
    assert (split.devices, split.shares) == (("CUDA2",), (1,))


def test_without_a_card_there_is_nothing_to_share_out() -> None:
    with pytest.raises(ValueError, match="without a card"):
        best_shares(_division(LLAMA_8B), [])
