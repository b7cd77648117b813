"""Who else is on a card: another user's processes and models, as far as proc tells, and what a person reads of them."""

from __future__ import annotations

import io
import os
import pwd
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from lllm3090ctl import cards, output
from lllm3090ctl.documents import Document
from lllm3090ctl.render import failure
from lllm3090d.bus.service_contract import MANAGER, contract
from lllm3090d.bus.service_values import variant
from lllm3090d.gpus.readings import CardKind, CardProcess
from lllm3090d.gpus.sysfs import open_amd
from lllm3090d.planning.units import MIB
from lllm3090d.serving import processes
from lllm3090d.serving.freeings import GIB, RemedyKind, all_freeings, unlisted_bytes, who
from lllm3090d.serving.measure import observe
from lllm3090d.serving.observation import RunProcesses, Stranger
from lllm3090d.serving.strangers import (
    HIDDEN,
    NOT_HERE,
    engines_of_others,
    is_person,
    model_of,
    stranger_of,
    why_unseen,
)
from lllm3090d.serving.unit_spec import SLICE, unit_name
from lllm3090d.surfaces.dbus_views import others_of
from tests.fakes.card_scenes import Desk as GpuDesk
from tests.fakes.kernel import FakeKernel
from tests.unit.refusal_scenes import Desk
from tests.unit.test_measure import PreparedReader
from tests.unit.test_remedies import scene_of

pytestmark = pytest.mark.unit

ME = os.geteuid()  # who owns the files of the stand-in for proc
NAME = pwd.getpwuid(ME).pw_name
PERSON = is_person(ME)
SOMEBODY_ELSE = 54_321  # without a name


def group(uid: int, unit: str = unit_name("qwen-27b", "0a1b2c3d")) -> str:
    """The control group of a unit of a user."""
    return f"/user.slice/user-{uid}.slice/user@{uid}.service/{SLICE}/{unit}"


@pytest.fixture
def kernel(tmp_path: Path) -> FakeKernel:
    return FakeKernel(tmp_path / "kernel")


@pytest.fixture
def as_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """We are somebody else than the owner of the processes."""
    monkeypatch.setattr("os.geteuid", lambda: SOMEBODY_ELSE)


# --- who it is --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("as_another")
def test_a_model_of_another_user_is_named_with_its_owner(kernel: FakeKernel) -> None:
    kernel.process(10, group(ME))
    kernel.process(11, "/user.slice/game.scope", "game")
    kernel.process(12, group(ME, "lllm3090d.service"), "lllm3090d")  # their daemon is no model
    found = [stranger_of(CardProcess(pid, GIB), kernel.roots.proc) for pid in (10, 11, 12)]
    assert found == [
        Stranger(10, "llama-server", NAME, GIB, "qwen-27b", is_persons=PERSON),
        Stranger(11, "game", NAME, GIB, is_persons=PERSON),
        Stranger(12, "lllm3090d", NAME, GIB, is_persons=PERSON),
    ]
    assert [who(each) for each in found[:2]] == [
        f"the model qwen-27b of {NAME} (pid 10)",
        f"game of {NAME} (pid 11)",
    ]


def test_a_user_without_a_name_goes_by_the_number(
    kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel.process(10, group(ME))

    def nobody(number: int) -> pwd.struct_passwd:
        raise KeyError(number)

    monkeypatch.setattr(processes.pwd, "getpwuid", nobody)  # type: ignore[attr-defined]  # as it was imported there
    monkeypatch.setattr("os.geteuid", lambda: SOMEBODY_ELSE)
    assert stranger_of(CardProcess(10, None), kernel.roots.proc).user == f"user {ME}"


@pytest.mark.parametrize(
    ("path", "model"),
    [
        (group(7), "qwen-27b"),
        (group(7) + "/below", "qwen-27b"),
        (group(7) + " (deleted)", "qwen-27b"),
        ("/lxc/one" + group(7), "qwen-27b"),
        (group(7, "lllm3090-a-b-c-00112233.service"), "a-b-c"),
        (group(8), ""),  # a manager of somebody else than the owner of the process
        (group(7, "other-qwen-0a1b2c3d.service"), ""),
        (group(7, "lllm3090-qwen.scope"), ""),
        ("/user.slice/user-7.slice/session-2.scope/lllm3090-qwen-0a1b2c3d.service", ""),  # no user manager
        ("/", ""),
    ],
)
def test_the_model_is_read_from_the_unit_in_its_owners_manager(path: str, model: str) -> None:
    assert model_of(("/", path), 7) == model


def test_another_users_unit_of_our_units_name_is_not_ours(kernel: FakeKernel) -> None:
    """The same model and even the same run: the manager's control group differs."""
    unit = unit_name("qwen-27b", "0a1b2c3d")
    kernel.process(10, group(1000, unit))
    kernel.process(11, group(ME, unit))
    runs = {"0a1b2c3d": RunProcesses(10, group(1000, unit))}
    reader = PreparedReader(CardProcess(10, GIB), CardProcess(11, 2 * GIB), used=3 * GIB)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.geteuid", lambda: SOMEBODY_ELSE)
        state = observe([reader], runs, None, kernel.roots).main
    assert state.resident == {"0a1b2c3d": GIB}
    assert state.strangers == (Stranger(11, "llama-server", NAME, 2 * GIB, "qwen-27b", is_persons=PERSON),)
    # Nor by its number, when ours had it before.
    runs = {"0a1b2c3d": RunProcesses(11, group(1000, unit))}
    state = observe([reader], runs, None, kernel.roots).main
    assert state.resident == {"0a1b2c3d": GIB}
    assert [each.pid for each in state.strangers] == [11]


def test_who_cannot_be_seen_is_unknown_and_why_is_told(kernel: FakeKernel) -> None:
    proc = kernel.roots.proc
    assert stranger_of(CardProcess(99, GIB), proc) == Stranger(99, "", "", GIB, unseen=NOT_HERE)
    for options, why in (
        ("rw,nosuid,hidepid=invisible", HIDDEN),
        ("rw,hidepid=2,gid=5", HIDDEN),
        ("rw,hidepid=ptraceable", HIDDEN),
        ("rw,hidepid=noaccess", NOT_HERE),  # the directory can be seen all the same
        ("rw,relatime", NOT_HERE),
    ):
        (proc / "mounts").write_text(f"none /x tmpfs hidepid=2 0 0\nproc /proc proc {options} 0 0\n")
        assert why_unseen(proc) == why, options


@pytest.mark.usefixtures("as_another")
def test_an_owner_is_known_even_where_nobody_may_look_inside(kernel: FakeKernel) -> None:
    """``hidepid=1``: only the directory itself."""
    place = kernel.process(10, group(ME))
    for name in ("comm", "cgroup"):
        (place / name).unlink()
    found = stranger_of(CardProcess(10, GIB), kernel.roots.proc)
    assert found == Stranger(10, "", NAME, GIB, is_persons=PERSON)
    assert who(found) == f"a process of {NAME} (pid 10)"


# --- drivers that tell of a user's own processes only -----------------------------------------------------------------


def test_engines_of_others_are_found_where_the_driver_does_not_list_them(
    kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel.amd(used_bytes=9 * GIB)
    (reader,) = open_amd(kernel.roots)
    kernel.process(10, group(ME))
    kernel.process(9, group(ME))
    kernel.process(11, group(ME, "other.service"))
    ended = kernel.process(12, group(ME, unit_name("gone", "00000000")))
    shutil.rmtree(ended)
    # Its owner is asked for with the search for our own.
    assert observe([reader], {}, None, kernel.roots).main.strangers == ()
    monkeypatch.setattr("os.geteuid", lambda: SOMEBODY_ELSE)
    (theirs,) = engines_of_others(kernel.roots)
    assert theirs == Stranger(9, "llama-server", NAME, None, "qwen-27b", is_persons=PERSON)
    state = observe([reader], {}, None, kernel.roots).main
    assert state.strangers == engines_of_others(kernel.roots)
    # Where everything is accounted for, an engine that may be in host memory is not taken to be on the card.
    (kernel.root / "sys/devices/pci0000:00/0000:00:01.0/0000:03:00.0/mem_info_vram_used").write_text(
        f"{MIB}\n"
    )
    assert observe([reader], {}, None, kernel.roots).main.strangers == ()


# --- what a person is told --------------------------------------------------------------------------------------------

BOB = Stranger(123, "llama-server", "bob", 8200 * MIB, "qwen-27b")
UNSEEN = Stranger(124, "", "", 3000 * MIB, unseen=HIDDEN)


def test_nobody_is_told_to_end_what_is_not_theirs() -> None:
    scene = scene_of(Desk(strangers=(BOB, UNSEEN)))
    bob, unseen = sorted(all_freeings(scene), key=lambda each: -each.foreign_bytes)
    assert bob.phrase == "ask bob to unload the model qwen-27b (8.0 GiB, pid 123)"
    assert unseen.phrase == f"find out who owns process 124, which holds 2.9 GiB ({HIDDEN})"
    assert {each.kind for each in (bob, unseen)} == {RemedyKind.OTHERS}
    assert (bob.command, unseen.command) == ("", "")


def test_another_persons_desktop_is_theirs_to_end() -> None:
    theirs = Stranger(7, "gnome-shell", "bob", 900 * MIB, is_persons=True)
    server = Stranger(8, "Xorg", "root", 100 * MIB)
    found = all_freeings(scene_of(Desk(strangers=(theirs, replace(theirs, pid=9, name="Xwayland"), server))))
    assert [(each.kind, each.phrase, each.foreign_bytes) for each in found] == [
        (RemedyKind.OTHERS, "ask bob to log out (1.8 GiB)", 1800 * MIB),
        (RemedyKind.END_DESKTOP, "end the desktop session (100.0 MiB)", 100 * MIB),
    ]


def test_people_and_accounts_of_the_system() -> None:
    assert all(map(is_person, (1000, 60_001, 1_600_000_000)))
    assert not any(map(is_person, (0, 120, 999, 61_184, 65_519, 65_534, 65_535)))


def test_memory_that_only_shows_in_the_total_counts_and_has_a_possible_owner() -> None:
    silent = replace(BOB, used_bytes=None)
    scene = scene_of(Desk(strangers=(silent,), unlisted_mib=8200))
    assert unlisted_bytes(scene) == 8200 * MIB
    (found,) = all_freeings(scene)
    assert found.phrase == (
        "ask bob about the model qwen-27b (pid 123): the driver does not tell who holds 8.0 GiB"
    )
    assert (found.command, found.foreign_bytes) == ("", 8200 * MIB)
    # Of a program that is no model nobody can say that it holds much.
    other = replace(scene, strangers=(replace(silent, model=""),), kind=CardKind.NVIDIA)
    assert all_freeings(other)[0].command == "nvidia-smi"


def shown(blocks: object, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", "200")
    stream = io.StringIO()
    output.Screen(as_json=False)._blocks(blocks, stream)  # type: ignore[arg-type]  # blocks, however they were made
    return stream.getvalue()


def test_a_refusal_names_the_other_users_model(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(strangers=(replace(BOB, used_bytes=15_000 * MIB), UNSEEN), model="gemma-3-27b")
    problem = desk.refusal().problem()
    told = problem["details"]["strangers"]
    assert [(each["user"], each["model"], each["unseen"]) for each in told] == [
        ("bob", "qwen-27b", ""),
        ("", "", HIDDEN),
    ]
    assert "the model qwen-27b of bob (pid 123) holds 15,000.0 MiB" in problem["detail"]
    assert "a process of an unknown owner (pid 124) holds 3,000.0 MiB" in problem["detail"]
    assert "Ask bob to unload the model qwen-27b (14.6 GiB, pid 123)" in problem["hint"]
    page = shown(failure(Document(problem)), monkeypatch)
    assert "pid 123, the model qwen-27b of bob" in page
    assert f"pid 124, owner unknown: {HIDDEN}" in page
    assert "kill" not in page


def test_gpu_and_d_bus_show_whose_model_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = replace(BOB, pid=125, used_bytes=None)
    desk = GpuDesk(
        strangers=(replace(BOB, used_bytes=900 * MIB), replace(UNSEEN, used_bytes=800 * MIB), silent)
    )
    view = desk.view
    first, second, third = view.gpus[0].processes
    assert (first.user, first.model, first.unseen) == ("bob", "qwen-27b", None)
    assert (second.user, second.model, second.unseen) == (None, None, HIDDEN)
    assert third.used_bytes is None
    others = others_of(view)
    assert others == [
        ("GPU-1", 123, "llama-server", "bob", "qwen-27b", 900 * MIB),
        ("GPU-1", 124, "", "?", "", 800 * MIB),
        ("GPU-1", 125, "llama-server", "bob", "qwen-27b", -1),
    ]
    assert variant(contract()[MANAGER].properties["Others"].signature, others).n_children() == 3
    page = shown(cards.gpus(Document(view.model_dump(mode="json"))), monkeypatch)
    assert "llama-server (pid 123)" in page and "the model qwen-27b of bob" in page
    assert f"another program of an unknown owner: {HIDDEN}" in page
    assert "Of these it is not told how much they hold: the model qwen-27b of bob (pid 125)." in page
