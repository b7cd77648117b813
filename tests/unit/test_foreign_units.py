"""Units that are left alone: what is shown of them, and that what they hold is counted once and never promised."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lllm3090d.gpus.readings import Card, CardKind, CardProcess, MemoryReading
from lllm3090d.gpus.sysfs import Roots
from lllm3090d.planning.reserves import ReservePolicy
from lllm3090d.serving.admission import held_now, rooms
from lllm3090d.serving.adoption import Unadopted
from lllm3090d.serving.card_views import Scene, gpus_view
from lllm3090d.serving.foreign_units import ForeignUnits
from lllm3090d.serving.freeings import RemedyKind, all_freeings, gain_bytes
from lllm3090d.serving.freeings import Scene as Memory
from lllm3090d.serving.ledger import Ledger, Share
from lllm3090d.serving.measure import observe
from lllm3090d.serving.observation import HOST, RunProcesses
from lllm3090d.wire_cards import PartKind
from tests.unit.test_adoption import unit

pytestmark = pytest.mark.unit

MIB, GIB = 1 << 20, 1 << 30
CARD = Card(CardKind.NVIDIA, "GPU-1", "NVIDIA GeForce RTX 3090", "580.95", 24 * GIB)
TOTAL, DRIVER = 24 * GIB, 451 * MIB
RESERVES = ReservePolicy(512, 2400)
UNIT = unit("a").name
GROUP = "/user.slice/lllm3090.slice/" + UNIT
OUR_PID, UNIT_PID, CHILD_PID, STRANGER_PID = 100, 200, 201, 300


class Reader:
    """A card whose driver lists processes."""

    card = CARD

    def __init__(self, *held: tuple[int, int | None]) -> None:
        self.held = held

    def read(self) -> MemoryReading:
        used = sum(size or 0 for _, size in self.held)
        processes = tuple(CardProcess(pid, size) for pid, size in self.held)
        return MemoryReading(0.0, TOTAL, DRIVER, used, TOTAL - DRIVER - used, processes)

    def close(self) -> None:
        """Nothing is open."""


@pytest.fixture
def roots(tmp_path: Path) -> Roots:
    """Four processes: one of ours, two of the foreign unit, a stranger; each with 3 MiB of host memory."""
    groups = {
        OUR_PID: "/x/ours.service",
        UNIT_PID: GROUP,
        CHILD_PID: GROUP + "/child",
        STRANGER_PID: "/other",
    }
    proc = tmp_path / "proc"
    for pid, group in groups.items():
        (proc / str(pid)).mkdir(parents=True)
        (proc / str(pid) / "cgroup").write_text(f"0::{group}\n")
        (proc / str(pid) / "comm").write_text(f"p{pid}\n")
        (proc / str(pid) / "status").write_text("VmRSS:\t3072 kB\nRssAnon:\t2048 kB\nRssShmem:\t0 kB\n")
    (proc / "meminfo").write_text("MemTotal: 67108864 kB\nMemFree: 60000000 kB\nMemAvailable: 60000000 kB\n")
    return Roots(sys=tmp_path / "sys", proc=proc, cgroup=tmp_path / "cgroup")


def registry(*ours: str) -> ForeignUnits:
    units = ForeignUnits(lambda name: name in ours)
    assert units.found(Unadopted(unit_with(UNIT_PID), "it carries no record"), "today")
    return units


def unit_with(pid: int, state: str = "active") -> Any:
    return replace(
        unit("a", state), main_pid=pid, control_group=GROUP, argv=("/bin/thing", "--x=/run/t.sock")
    )


def test_it_is_shown_until_it_ends() -> None:
    units = registry()
    assert units.names == (UNIT,)
    # The same again is no news; another reason is.
    assert not units.found(Unadopted(unit_with(UNIT_PID), "it carries no record"), "tomorrow")
    assert units.found(Unadopted(unit_with(UNIT_PID), "its record is damaged"), "tomorrow")
    (each,) = units.all
    assert (each.since, each.why) == ("today", "its record is damaged")
    # A signal leaves out what does not change.
    bare = replace(unit_with(UNIT_PID, "deactivating"), argv=(), environment=(), control_group="")
    assert not units.seen(bare)
    (each,) = units.all
    assert (each.status.active_state, each.processes) == ("deactivating", RunProcesses(UNIT_PID, GROUP))
    assert each.sockets == {Path("/run/t.sock")}
    assert units.seen(unit_with(0, "failed"))
    assert units.all == () and UNIT not in units
    assert not units.seen(unit_with(UNIT_PID))
    assert not units.gone(UNIT)


def test_what_has_ended_is_never_shown_and_what_is_not_listed_has() -> None:
    units = ForeignUnits(lambda _: False)
    assert not units.found(Unadopted(unit_with(0, "failed"), "why"), "today")
    assert units.all == ()
    units = registry()
    assert units.keep_only(frozenset({UNIT})) == ()
    assert units.keep_only(frozenset()) == (UNIT,)
    assert units.all == ()


def test_what_becomes_an_instance_is_no_foreign_unit_any_more() -> None:
    units = registry(UNIT)
    assert not units.seen(unit_with(UNIT_PID, "deactivating"))
    assert (units.all, units.names, units.processes) == ((), (), {})
    assert (
        UNIT not in units
    )  # so that its end is told as that of the instance, and nothing is left to be shown then
    dying = registry(UNIT)
    assert not dying.seen(unit_with(0, "failed")) and UNIT not in dying


def test_what_it_holds_is_measured_by_its_control_group(roots: Roots) -> None:
    units = registry()
    reader = Reader((OUR_PID, 5 * GIB), (UNIT_PID, GIB), (CHILD_PID, GIB), (STRANGER_PID, 300 * MIB))
    ours = {"run": RunProcesses(OUR_PID, "/x/ours.service")}
    seen = observe([reader], ours, False, roots, foreign=units.processes)
    (state,) = seen.cards
    assert state.in_use == {"run": 5 * GIB, UNIT: 2 * GIB}
    assert [each.pid for each in state.strangers] == [STRANGER_PID]
    assert seen.host_in_use == {"run": 2 * MIB, UNIT: 2 * MIB}
    (view,) = units.views(seen)
    assert [(each.where, each.bytes) for each in view.held] == [("GPU-1", 2 * GIB), (HOST, 2 * MIB)]
    assert (view.unit, view.command, view.main_pid) == (UNIT, "/bin/thing", UNIT_PID)
    (unread,) = units.views(None)
    assert unread.held == ()


def test_a_unit_without_any_memory_of_the_card_casts_no_doubt_on_the_list(roots: Roots) -> None:
    """Only an engine of ours that is missing on the list does."""
    reader = Reader((STRANGER_PID + 1, 5 * GIB))
    units = registry()
    assert observe([reader], {}, False, roots, foreign=units.processes).cards[0].attributed
    ours = {"run": RunProcesses(OUR_PID, "/x/ours.service")}
    assert not observe([reader], ours, False, roots, foreign=units.processes).cards[0].attributed


@pytest.mark.parametrize("desktop", [False, True])
def test_it_is_charged_once_beside_models_and_the_desktop(roots: Roots, desktop: bool) -> None:
    """What it holds is no part of what the desktop's reserve covers, and no part of other programs."""
    ledger = Ledger()
    ledger.hold("run", "qwen", [Share("GPU-1", ())])
    ledger.confirm("run", {"GPU-1": 5 * GIB})
    ours = {"run": RunProcesses(OUR_PID, "/x/ours.service")}
    held = [(OUR_PID, 5 * GIB), (UNIT_PID, 2 * GIB), (STRANGER_PID, 300 * MIB)]
    units = registry()
    with_unit = observe([Reader(*held)], ours, desktop, roots, foreign=units.processes)
    without = observe([Reader(held[0], held[2])], ours, desktop, roots)
    budgets = [rooms(each, ledger, RESERVES).cards["GPU-1"] for each in (with_unit, without)]
    assert budgets[1].grantable_bytes - budgets[0].grantable_bytes == 2 * GIB
    assert budgets[1].available_bytes - budgets[0].available_bytes == 2 * GIB
    assert [each.foreign_bytes for each in budgets] == [300 * MIB, 300 * MIB]
    line = next(each for each in budgets[0].lines if each.name == "foreign units")
    assert line.bytes == -2 * GIB
    # As a stranger it would disappear in the desktop's reserve.
    as_stranger = rooms(observe([Reader(*held)], ours, desktop, roots), ledger, RESERVES).cards["GPU-1"]
    if desktop:
        assert as_stranger.available_bytes > budgets[0].available_bytes


def test_it_has_a_part_of_its_own_in_the_view_of_the_card(roots: Roots) -> None:
    ledger, units = Ledger(), registry()
    reader = Reader((UNIT_PID, 2 * GIB), (STRANGER_PID, 300 * MIB))
    seen = observe([reader], {}, False, roots, foreign=units.processes)
    given = rooms(seen, ledger, RESERVES)
    view = gpus_view(Scene(seen, ledger, given.cards, given.host, {}, 0.0))
    (gpu,) = view.gpus
    parts = {part.kind: (part.name, part.bytes) for part in gpu.parts}
    assert parts[PartKind.FOREIGN_UNIT] == (UNIT, 2 * GIB)
    assert parts[PartKind.PROCESS] == (f"p{STRANGER_PID}", 300 * MIB)
    assert PartKind.MODEL not in parts
    assert sum(part.bytes for part in gpu.parts) == TOTAL
    assert (gpu.foreign_bytes, gpu.charged_bytes) == (300 * MIB, 0)
    assert view.host is not None
    assert view.host.in_use_bytes == 0
    assert (UNIT, 2 * MIB) in [(part.name, part.bytes) for part in view.host.parts]


def test_a_refusal_says_how_a_person_ends_it(roots: Roots) -> None:
    ledger, units = Ledger(), registry()
    seen = observe([Reader((UNIT_PID, 20 * GIB))], {}, False, roots, foreign=units.processes)
    (state,) = seen.cards
    given = rooms(seen, ledger, RESERVES).cards["GPU-1"]
    (only,) = all_freeings(Memory(CardKind.NVIDIA, given, held=held_now(state, ledger)))
    assert (only.kind, only.is_ours) == (RemedyKind.CLOSE, False)
    assert only.command == f"systemctl --user stop {UNIT}"
    assert UNIT in only.phrase
    assert gain_bytes(given, [only]) == 20 * GIB


def test_numbers_of_processes_that_are_used_anew_are_not_its_own(roots: Roots) -> None:
    """A process with the main number of the unit in another control group is a stranger."""
    (roots.proc / str(UNIT_PID) / "cgroup").write_text("0::/elsewhere\n")
    seen = observe([Reader((UNIT_PID, GIB))], {}, False, roots, foreign=registry().processes)
    assert seen.cards[0].in_use == {} and len(seen.cards[0].strangers) == 1
