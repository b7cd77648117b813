"""Who could make room: worked out from the budget, proven by the planner, the easiest first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lllm3090d.gpus.readings import CardKind
from lllm3090d.planning.reserves import host_budget
from lllm3090d.planning.units import MIB
from lllm3090d.serving.freeings import (
    END_DESKTOP,
    Freeing,
    Scene,
    all_freeings,
    duration_text,
    gain_bytes,
    size_text,
    state_text,
)
from lllm3090d.serving.ledger import ReservationState
from lllm3090d.serving.observation import Stranger
from lllm3090d.serving.remedies import MOST_OF_A_KIND, Cause, Remedy, Room, cause_of, freeing_remedies
from tests.unit.refusal_scenes import NOW_S, RESERVES, Desk, Ours

pytestmark = pytest.mark.unit

STEAM = Stranger(1234, "steam", "", 1946 * MIB)
BLENDER = Stranger(77, "blender", "anna", 9216 * MIB)
SHELL = Stranger(901, "gnome-shell", "", 420 * MIB)
S = ReservationState


def scene_of(desk: Desk) -> Scene:
    """What a refusal on that card is made of."""
    return Scene(
        CardKind.NVIDIA,
        desk.budget,
        desk.reservations,
        {each.run: each for each in desk.holders},
        desk.strangers,
        desk.held,
        desk.state.resident,
        NOW_S,
    )


def needing(mib: int) -> Callable[[int], bool]:
    """A load that lacks so many MiB."""
    return lambda extra: extra >= mib * MIB


def offered(desk: Desk, missing_mib: int) -> tuple[Cause, tuple[Remedy, ...]]:
    """For whom it does not fit, and who could make room."""
    scene = scene_of(desk)
    freeings, room = all_freeings(scene), Room(desk.budget, needing(missing_mib))
    return cause_of(scene, freeings, room), freeing_remedies(scene, freeings, room)


def texts(desk: Desk, missing_mib: int) -> list[str]:
    return [each.text for each in offered(desk, missing_mib)[1]]


# --- what is offered, in a table -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("desk", "missing_mib", "cause", "expected"),
    [
        (Desk(), 1, Cause.CARD, []),
        (Desk(desktop=True), 2400, Cause.DESKTOP, [("end-desktop", END_DESKTOP)]),
        (Desk(desktop=True), 2401, Cause.CARD, []),
        (Desk(strangers=(STEAM,)), 1946, Cause.STRANGERS, [("close", "kill 1234")]),
        (Desk(strangers=(STEAM,)), 1947, Cause.CARD, []),
        # Of what the desktop reserve covers anyway, closing a program gives nothing.
        (Desk(strangers=(STEAM,), desktop=True), 1, Cause.DESKTOP, [("end-desktop", END_DESKTOP)]),
        # The part above the reserve is all that closing gives: 9,216 + 1,946 - 2,400.
        (Desk(strangers=(STEAM, BLENDER), desktop=True), 1946, Cause.STRANGERS, [("close", "kill 1234")]),
        (Desk(strangers=(STEAM, BLENDER), desktop=True), 1947, Cause.STRANGERS, [("others", "")]),
        (Desk(strangers=(STEAM, BLENDER), desktop=True), 8762, Cause.STRANGERS, [("others", "")]),
        (Desk(strangers=(STEAM, BLENDER), desktop=True), 8763, Cause.DESKTOP, [("combined", END_DESKTOP)]),
        # A desktop's own programs are closed with the session, never by themselves.
        (Desk(strangers=(SHELL,)), 420, Cause.DESKTOP, [("end-desktop", END_DESKTOP)]),
        (Desk(unlisted_mib=5000), 5000, Cause.STRANGERS, [("others", "nvidia-smi")]),
        (Desk(ours=(Ours("a", 6000),)), 6000, Cause.OURS, [("unload", "lllm3090ctl unload a")]),
        (
            Desk(ours=(Ours("a", 6000, pinned=True),)),
            1,
            Cause.OURS,
            [("unload-pinned", "lllm3090ctl unload a")],
        ),
        (
            Desk(ours=(Ours("a", 6000, idle_s=None),)),
            1,
            Cause.OURS,
            [("unload-busy", "lllm3090ctl unload a")],
        ),
        (
            Desk(ours=(Ours("a", 6000, idle_s=None, state=S.HELD, taken_mib=10),)),
            6000,
            Cause.OURS,
            [("unload-busy", "lllm3090ctl unload a")],
        ),
        (Desk(ours=(Ours("a", 6000, state=S.RELEASING),)), 6000, Cause.OURS, [("wait", "")]),
        (Desk(ours=(Ours("a", 3000, state=S.QUARANTINED),)), 3000, Cause.OURS, [("quarantine", "")]),
        # Only what suffices alone; what is easier comes first; a busy one is left in peace.
        (
            Desk(
                ours=(
                    Ours("small", 500),
                    Ours("pinned", 4000, pinned=True),
                    Ours("idle", 4000),
                    Ours("busy", 4000, idle_s=None),
                ),
                strangers=(STEAM,),
            ),
            1000,
            Cause.OURS,
            [
                ("unload", "lllm3090ctl unload idle"),
                ("close", "kill 1234"),
                ("unload-pinned", "lllm3090ctl unload pinned"),
            ],
        ),
        # Nobody alone: as few as can be, and of those the easiest.
        (
            Desk(ours=(Ours("a", 1000), Ours("b", 2000), Ours("c", 3000))),
            5000,
            Cause.OURS,
            [("unload", "lllm3090ctl unload b && lllm3090ctl unload c")],
        ),
        (
            Desk(ours=(Ours("a", 1000), Ours("b", 2000, pinned=True)), strangers=(STEAM,)),
            2900,
            Cause.OURS,
            [("combined", "lllm3090ctl unload a && kill 1234")],
        ),
        (
            Desk(ours=(Ours("a", 1000),), strangers=(STEAM,)),
            2946,
            Cause.BOTH,
            [("combined", "lllm3090ctl unload a && kill 1234")],
        ),
    ],
)
def test_who_could_make_room(
    desk: Desk, missing_mib: int, cause: Cause, expected: list[tuple[str, str]]
) -> None:
    found, remedies = offered(desk, missing_mib)
    assert found is cause
    assert [(str(each.kind), each.command) for each in remedies] == expected
    assert all(each.verified and each.gain_bytes >= missing_mib * MIB for each in remedies)


def test_texts_name_who_and_how_much() -> None:
    assert texts(Desk(ours=(Ours("a", 6349),)), 1) == ["Unload a (6.2 GiB, idle 14 min)"]
    assert texts(Desk(ours=(Ours("a", 700, pinned=True),)), 1) == [
        "Unload a (700.0 MiB, pinned, idle 14 min)"
    ]
    assert texts(Desk(ours=(Ours("a", 700, idle_s=None),)), 1) == ["Unload a (700.0 MiB, busy)"]
    loading = Ours("a", 700, idle_s=None, state=S.HELD, taken_mib=0)
    assert texts(Desk(ours=(loading,)), 1) == ["Unload a (700.0 MiB, loading)"]
    late = Ours("a", 3072, state=S.QUARANTINED)
    assert texts(Desk(ours=(late,)), 1) == ["Wait for the 3.0 GiB of a that have not come back for 40 s"]
    assert texts(Desk(ours=(replace(late, state=S.RELEASING),)), 1) == ["Wait until a is unloaded (3.0 GiB)"]
    assert texts(Desk(strangers=(STEAM,)), 1) == ["Close steam (1.9 GiB, pid 1234)"]
    assert texts(Desk(strangers=(BLENDER,)), 1) == ["Ask anna to close blender (9.0 GiB, pid 77)"]
    nameless = Stranger(5, "", "", 2 * MIB)
    assert texts(Desk(strangers=(nameless,)), 1) == ["Close the process (2.0 MiB, pid 5)"]
    three = Desk(ours=(Ours("a", 100), Ours("b", 100), Ours("c", 100)))
    assert texts(three, 300) == [
        "Unload a (100.0 MiB, idle 14 min), unload b (100.0 MiB, idle 14 min) and unload c (100.0 MiB, idle 14 min)"
    ]


def test_a_process_whose_memory_is_unknown_is_no_remedy() -> None:
    """The driver may name a process and not tell what it holds; the sum is then somebody's."""
    desk = Desk(strangers=(Stranger(5, "game", "", None),), unlisted_mib=4000)
    cause, remedies = offered(desk, 4000)
    assert cause is Cause.STRANGERS
    assert [str(each.kind) for each in remedies] == ["others"]


def test_few_of_a_kind_are_enough() -> None:
    desk = Desk(ours=tuple(Ours(f"m{i}", 1000 + i) for i in range(10)))
    assert [each.command for each in offered(desk, 1000)[1]] == [
        f"lllm3090ctl unload m{i}" for i in range(MOST_OF_A_KIND)
    ]


def test_host_memory_in_place_of_a_card_asks_nobody_to_close_the_machine() -> None:
    desk = Desk(strangers=(STEAM,))
    scene = replace(scene_of(desk), kind=CardKind.CPU)
    room = Room(scene.budget, needing(100))
    assert freeing_remedies(scene, all_freeings(scene), room) == ()
    assert cause_of(scene, all_freeings(scene), room) is Cause.STRANGERS


def test_where_more_of_the_card_does_not_help_nobody_has_to_go() -> None:
    asked: list[int] = []

    def never(extra: int) -> bool:
        asked.append(extra)
        return False

    scene = scene_of(Desk(ours=tuple(Ours(f"m{i}", 500) for i in range(20)), strangers=(STEAM,)))
    room = Room(scene.budget, never)
    freeings = all_freeings(scene)
    assert cause_of(scene, freeings, room) is Cause.CARD
    assert freeing_remedies(scene, freeings, room) == ()
    assert len(asked) == 1  # all of them together: nothing less can help


def test_the_planner_is_asked_seldom() -> None:
    """Fifty models and as many programs: a refusal must not take as many plans."""
    asked: list[int] = []

    def fits(extra: int) -> bool:
        asked.append(extra)
        return extra >= 3000 * MIB

    desk = Desk(
        ours=tuple(Ours(f"m{i}", 100 + i) for i in range(50)),
        strangers=tuple(Stranger(i, f"p{i}", "", (50 + i) * MIB) for i in range(50)),
    )
    scene = scene_of(desk)
    room, freeings = Room(scene.budget, fits), all_freeings(scene)
    cause_of(scene, freeings, room)
    (together,) = freeing_remedies(scene, freeings, room)
    assert together.gain_bytes >= 3000 * MIB
    assert len(asked) < 25


def test_states_and_sizes_for_a_person() -> None:
    assert [duration_text(each) for each in (0.9, 119, 120, 7199, 7200, 90_000)] == [
        "0 s", "119 s", "2 min", "119 min", "2 h", "25 h",
    ]  # fmt: skip
    assert [size_text(each) for each in (1, 1023 * MIB, 1024 * MIB, 1100 * MIB)] == [
        "0.1 MiB", "1,023.0 MiB", "1.0 GiB", "1.1 GiB",
    ]  # fmt: skip
    nobody = replace(scene_of(Desk(ours=(Ours("a", 1),))), holders={}, now_s=None)
    assert state_text(nobody, nobody.reservations[0]) == ""
    late = Desk(ours=(Ours("a", 1, state=S.QUARANTINED),))
    assert state_text(replace(scene_of(late), now_s=None), late.reservations[0]) == "not given back"


# --- what is offered is true -----------------------------------------------------------------------------------------

SIZES = st.integers(1, 2500)  # nine of them and what nobody names are less than the card


@st.composite
def desks(draw: st.DrawFn) -> Desk:
    """Any mix of programs and models, also more than the card has."""
    strangers = []
    for pid in range(draw(st.integers(0, 4))):
        name = draw(st.sampled_from(("Xorg", "gnome-shell", f"program-{pid}", f"program-{pid}")))
        user = draw(st.sampled_from(("", "anna")))
        strangers.append(Stranger(pid, f"{name}" if name[0] == "p" else name, user, draw(SIZES) * MIB))
    ours = []
    for number in range(draw(st.integers(0, 5))):
        taken, state = draw(SIZES), draw(st.sampled_from(list(S)))
        mib = taken + draw(st.integers(0, 9000)) if state is S.HELD else taken
        idle = None if state is S.HELD else draw(st.sampled_from((None, 30.0, 9000.0)))
        ours.append(
            Ours(f"model-{number}", mib, idle, pinned=draw(st.booleans()), state=state, taken_mib=taken)
        )
    return Desk(
        tuple(strangers), draw(st.sampled_from((0, 0, 700))), tuple(ours), desktop=draw(st.booleans())
    )


def room_bytes(desk: Desk) -> int:
    """By both sides of the budget, also below nothing."""
    return min(desk.budget.available_bytes, desk.budget.live_bytes)


@given(desks(), st.data())
def test_a_gain_is_what_the_budget_says_once_they_are_gone(desk: Desk, data: st.DataObject) -> None:
    """The same as making the budget anew from a reading without them."""
    models = [each for each in desk.ours if data.draw(st.booleans())]
    programs = [each for each in desk.strangers if each.name[0] == "p" and data.draw(st.booleans())]
    names = {model.name for model in models} | {program.name for program in programs}
    freed = [each for each in all_freeings(scene_of(desk)) if each.phrase and set(_words(each)) & names]
    after = desk.without(names)
    expected = max(0, room_bytes(after) - desk.budget.grantable_bytes)
    assert gain_bytes(desk.budget, freed) == expected


def _words(freeing: Freeing) -> list[str]:
    return freeing.phrase.replace("(", "").split()


@given(desks(), st.integers(1, 30_000))
def test_what_is_offered_makes_room(desk: Desk, missing_mib: int) -> None:
    fits = needing(missing_mib)
    cause, remedies = offered(desk, missing_mib)
    assert all(fits(each.gain_bytes) for each in remedies)
    assert (cause is Cause.CARD) <= (not remedies)
    everybody = all_freeings(scene_of(desk))
    # Whoever could be asked was: nothing is offered only where nothing helps.
    assert bool(remedies) == fits(gain_bytes(desk.budget, everybody))


@given(desks(), st.integers(1, 30_000))
def test_nobody_has_to_go_who_could_stay(desk: Desk, missing_mib: int) -> None:
    fits = needing(missing_mib)
    scene = scene_of(desk)
    for remedy in offered(desk, missing_mib)[1]:
        members = [each for each in all_freeings(scene) if each.phrase[1:] in remedy.text]
        for spared in members:
            rest = [each for each in members if each is not spared]
            assert not fits(gain_bytes(scene.budget, rest))


@given(desks(), st.sets(st.integers(1, 30_000)))
def test_nothing_is_offered_that_the_planner_did_not_agree_to(desk: Desk, agreed: set[int]) -> None:
    """Also of a planner that agrees here and there."""

    def fits(extra: int) -> bool:
        return extra // MIB % 7 == 3 or extra // MIB in agreed

    scene = scene_of(desk)
    room = Room(scene.budget, fits)
    freeings = all_freeings(scene)
    cause_of(scene, freeings, room)
    assert all(fits(each.gain_bytes) for each in freeing_remedies(scene, freeings, room))


def test_a_budget_without_desktop_and_strangers_has_neither() -> None:
    plain = host_budget(1 << 36, 1 << 35, 0)
    assert (plain.desktop_bytes, plain.foreign_bytes) == (0, 0)
    assert Desk(desktop=True, strangers=(STEAM,)).budget.desktop_bytes == RESERVES.desktop_reserve_mib * MIB
