"""Who holds what of a card: the parts add up, and say the same as the budget that loads are admitted by."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lllm3090d.gpus.readings import CardKind
from lllm3090d.planning.units import MIB
from lllm3090d.serving.card_views import gpus_view
from lllm3090d.serving.ledger import Ledger, ReservationState, Share
from lllm3090d.serving.observation import HOST, Stranger
from lllm3090d.wire_cards import Gpus, GpuView, PartKind
from tests.fakes.card_scenes import CARD, LOST, NOW_S, Desk, item, on_host

pytestmark = pytest.mark.unit


def parts(view: GpuView) -> dict[tuple[str, str], int]:
    """MiB by kind and owner."""
    return {(str(part.kind), part.name): part.bytes // MIB for part in view.parts}


def by_kind(view: GpuView, kind: PartKind) -> int:
    return sum(part.bytes for part in view.parts if part.kind is kind)


def test_every_byte_has_an_owner() -> None:
    (card,) = Desk().view.gpus
    assert parts(card) == {
        ("driver", "driver"): 451,
        ("process", "steam"): 1900,
        ("others", "other memory in use"): 1,
        ("model", "Qwen3.8-27B"): 11700,
        ("promised", "Qwen3.8-27B"): 200,
        ("model", "SmolLM2-135M"): 120,
        ("promised", "SmolLM2-135M"): 380,
        ("quarantine", "old"): 300,
        ("reserve", "the desktop"): 2048 - 1901,
        ("free", "free"): 9377,
    }
    assert sum(part.bytes for part in card.parts) == 24576 * MIB
    assert (card.foreign_bytes, card.still_to_come_bytes) == (1901 * MIB, 380 * MIB)
    assert (card.charged_bytes, card.quarantined_bytes) == (12400 * MIB, 300 * MIB)
    assert card.grantable_bytes == by_kind(card, PartKind.FREE)
    lost = next(part for part in card.parts if part.kind is PartKind.QUARANTINE)
    assert (lost.run, lost.age_s) == ("o1", 90.0)


def test_a_card_says_what_it_is() -> None:
    (card,) = Desk().view.gpus
    assert (card.number, card.uuid, card.pci_address) == (0, "GPU-1", "0000:01:00.0")
    assert (card.profile, card.profile_id, card.compute_capability) == ("known", "rtx-3090", "8.6")
    assert card.pcie is not None and (card.pcie.generation, card.pcie.width) == (4, 16)
    assert card.reading is not None
    assert (card.reading.age_s, card.reading.reserved_by_driver_bytes) == (0.25, 451 * MIB)
    assert card.rounding_bytes == 0
    assert [(each.name, each.user, each.used_bytes) for each in card.processes] == [
        ("steam", None, 1900 * MIB),
        ("Xorg", "anna", None),
    ]
    (other,) = Desk(card=replace(CARD, name="Some Card", pci_address="", link=None)).view.gpus
    assert (other.profile, other.profile_id, other.pci_address, other.pcie) == ("detected", None, None, None)


def test_what_each_model_was_promised_stands_line_by_line() -> None:
    (card,) = Desk().view.gpus
    qwen, smol, old = card.reservations
    assert [each.name for each in qwen.items] == ["weights", "kv cache", "compute", "runtime", "slack"]
    assert sum(each.bytes for each in qwen.items) == qwen.reserved_bytes == 11868 * MIB
    assert (qwen.measured_bytes, qwen.charged_bytes, qwen.held_bytes) == (
        11900 * MIB,
        11900 * MIB,
        11700 * MIB,
    )
    assert (qwen.state, qwen.age_s, qwen.evidence, qwen.limit_bytes) == ("confirmed", 870.0, "header", None)
    assert (smol.state, smol.instance_state, smol.measured_bytes) == ("held", "loading", None)
    assert (old.state, old.instance_state, old.items, old.evidence) == ("quarantined", None, (), None)


def test_host_memory_beside_the_card_is_told_too() -> None:
    host = Desk().view.host
    assert host is not None
    assert sum(part.bytes for part in host.parts) == host.total_bytes == 64 << 30
    assert (host.charged_bytes, host.in_use_bytes) == ((2648 + 300) * MIB, 400 * MIB)
    free = sum(part.bytes for part in host.parts if part.kind is PartKind.FREE)
    assert host.grantable_bytes == free
    qwen = host.reservations[0]
    assert qwen.limit_bytes is not None and qwen.limit_bytes > qwen.reserved_bytes


def test_host_memory_in_the_place_of_a_card() -> None:
    view = on_host().view
    (card,) = view.gpus
    assert (card.uuid, card.kind, card.profile, view.host) == (HOST, CardKind.CPU, "no-gpu", None)
    assert sum(part.bytes for part in card.parts) == 32768 * MIB
    assert parts(card)["reserve", "the machine itself"] == 3276
    assert card.reservations[0].limit_bytes is not None


def test_a_card_that_cannot_be_read_has_no_figures_of_its_own() -> None:
    (card,) = Desk(problem=LOST).view.gpus
    assert card.problem is not None and card.problem["code"] == "card_unreadable"
    assert (card.reading, card.parts, card.foreign_bytes, card.grantable_bytes) == (None, (), None, None)
    assert card.charged_bytes == 12400 * MIB
    assert [each.held_bytes for each in card.reservations] == [None, None, None]
    assert card.profile == "known"  # by what was known of it before


def test_without_attribution_ready_models_stand_with_their_charge() -> None:
    (card,) = Desk(attributed=False).view.gpus
    assert not card.attributed
    shown = parts(card)
    assert shown["model", "Qwen3.8-27B"] == 11900
    assert shown["promised", "SmolLM2-135M"] == 500  # what it holds nobody knows
    assert card.reservations[0].held_bytes is None
    assert sum(part.bytes for part in card.parts) == 24576 * MIB


def test_a_budget_that_could_not_be_made_grants_nothing() -> None:
    scene = replace(Desk().scene, budgets={}, host_budget=None)
    view = gpus_view(scene)
    assert (view.gpus[0].grantable_bytes, view.gpus[0].budget) == (None, ())
    assert sum(part.bytes for part in view.gpus[0].parts) == 24576 * MIB


def test_a_run_without_a_reservation_is_shown_by_its_model_or_its_run() -> None:
    desk = Desk(in_use={"q1": 11700 * MIB, "zz": 50 * MIB})
    assert parts(desk.view.gpus[0])["model", "zz"] == 50


def test_several_cards_in_order() -> None:
    scene = Desk().scene
    (state,) = scene.observation.cards
    second = replace(state, card=replace(CARD, uuid="GPU-2"), resident={}, in_use={}, strangers=())
    view = gpus_view(replace(scene, observation=replace(scene.observation, cards=(state, second))))
    assert [(each.number, each.uuid, len(each.reservations)) for each in view.gpus] == [
        (0, "GPU-1", 3),
        (1, "GPU-2", 0),
    ]
    assert view.gpus[1].grantable_bytes is None  # no budget of it in this scene


# --- whatever happens ---

sizes = st.integers(0, 30000).map(lambda mib: mib * MIB)


@st.composite
def desks(draw: st.DrawFn) -> Desk:
    """Any figures, also such as no driver should tell."""
    desk = Desk(
        driver_bytes=draw(st.none() | st.integers(0, 1000 * MIB)),
        foreign_bytes=draw(sizes),
        unlisted_return_bytes=draw(sizes),
        attributed=draw(st.booleans()),
        desktop_active=draw(st.sampled_from([True, False, None])),
        strangers=tuple(
            Stranger(pid, f"p{pid}", "", draw(st.none() | sizes)) for pid in range(draw(st.integers(0, 4)))
        ),
    )
    desk.in_use = {run: draw(sizes) for run in draw(st.sets(st.sampled_from(["q1", "s1", "o1", "zz"])))}
    desk.ledger = Ledger()
    for run in draw(st.sets(st.sampled_from(["q1", "s1", "o1"]))):
        price = draw(st.integers(0, 12000))
        desk.ledger.hold(run, run, [Share(CARD.uuid, (item("weights", price),))], draw(st.floats(0, NOW_S)))
        state = draw(st.sampled_from(list(ReservationState)))
        if state is not ReservationState.HELD:
            desk.ledger.confirm(run, {CARD.uuid: draw(sizes)}, NOW_S)
        if state in {ReservationState.RELEASING, ReservationState.QUARANTINED}:
            desk.ledger.releasing(run, NOW_S)
        if state is ReservationState.QUARANTINED:
            desk.ledger.settle(run, {CARD.uuid: draw(sizes)}, NOW_S)
    return desk


def told(desk: Desk) -> Gpus:
    """Without a budget where the arithmetic refuses the reading, as the API does."""
    used = sum(desk.in_use.values()) + desk.foreign_bytes + desk.unlisted_return_bytes
    if used > desk.total_bytes - (desk.driver_bytes or 0):
        desk.total_bytes = used + (desk.driver_bytes or 0)
    return desk.view


@given(desks())
def test_parts_add_up_to_the_total_whatever_is_read(desk: Desk) -> None:
    for card in told(desk).gpus:
        assert card.reading is not None
        assert sum(part.bytes for part in card.parts) == card.reading.total_bytes
        assert all(part.bytes >= 0 for part in card.parts)
        assert card.parts[-1].kind is PartKind.FREE
    json = desk.view.model_dump_json()
    assert Gpus.model_validate_json(json) == desk.view


@given(desks())
def test_what_is_free_is_what_can_be_granted(desk: Desk) -> None:
    """Where nobody holds more than it is charged and all figures are of one moment; else no more is shown as free."""
    (card,) = told(desk).gpus
    free = by_kind(card, PartKind.FREE)
    assert card.grantable_bytes is not None
    held = {each.run: each for each in card.reservations}
    listed = sum(each.used_bytes or 0 for each in card.processes)
    orderly = desk.attributed and listed <= (card.foreign_bytes or 0)
    modest = all(
        size <= held[run].charged_bytes if run in held else not size for run, size in desk.in_use.items()
    )
    if orderly and modest:
        assert free == card.grantable_bytes
    else:
        assert free <= max(card.grantable_bytes, 0) or not orderly


def test_the_property_can_fail() -> None:
    """A part that is forgotten is missed."""
    (card,) = Desk().view.gpus
    assert sum(part.bytes for part in card.parts[1:]) != 24576 * MIB
