"""What the kernel says of a process, and which part of a reading is ours."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.host import HostMemoryReader
from lllm3090d.gpus.readings import Card, CardKind, CardProcess, CardReader, MemoryReading
from lllm3090d.gpus.sysfs import Roots, open_amd
from lllm3090d.serving.measure import observe
from lllm3090d.serving.observation import RunProcesses, Stranger
from lllm3090d.serving.processes import (
    KIB,
    Identity,
    ProcessMemory,
    host_memory_of,
    identity_of,
    owner_of,
    pids_of,
    process_memory,
)
from lllm3090d.serving.readiness import cgroups_of
from lllm3090d.serving.strangers import NOT_HERE
from tests.fakes.kernel import FakeKernel

pytestmark = pytest.mark.unit


def held_bytes(readers: Sequence[CardReader], processes: RunProcesses, roots: Roots) -> int:
    """What one run holds of these cards together; raises where one of them cannot be read."""
    states = observe(readers, {"": processes}, None, roots).cards
    return sum(state.resident.get("", 0) for state in states if state.read())


MIB = 1024 * KIB
GIB = 1024 * MIB
SLICE = "/user.slice/user-1000.slice/user@1000.service/lllm3090.slice"
# A process that holds this much more than an idle interpreter, and says when it does.
HOLD_BYTES = 64 * MIB
HOLDER = f"import sys; held = bytearray(b'x') * {HOLD_BYTES}; print('held', flush=True); sys.stdin.read(); del held"
IDLER = "import sys; print('held', flush=True); sys.stdin.read()"


def started(code: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-I", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


@pytest.fixture
def holder() -> Iterator[subprocess.Popen[str]]:
    with started(HOLDER) as process:
        yield process
        process.kill()


@pytest.fixture
def idler() -> Iterator[subprocess.Popen[str]]:
    with started(IDLER) as process:
        yield process
        process.kill()


def memory_of(process: subprocess.Popen[str]) -> ProcessMemory:
    memory = process_memory(process.pid)
    assert memory is not None
    return memory


def test_what_a_process_holds_is_seen(holder: subprocess.Popen[str], idler: subprocess.Popen[str]) -> None:
    more, less = memory_of(holder), memory_of(idler)
    for grown in (
        more.resident_bytes - less.resident_bytes,
        more.anonymous_bytes - less.anonymous_bytes,
    ):
        # Two interpreters differ by less than this.
        assert abs(grown - HOLD_BYTES) < 4 * MIB
    assert less.anonymous_bytes < less.resident_bytes  # the interpreter's own files are mapped


def test_a_process_that_is_gone_holds_nothing_that_is_known(idler: subprocess.Popen[str]) -> None:
    idler.kill()
    idler.wait()
    assert process_memory(idler.pid) is None


def test_a_zombie_holds_nothing(idler: subprocess.Popen[str]) -> None:
    idler.kill()
    os.waitid(os.P_PID, idler.pid, os.WEXITED | os.WNOWAIT)
    assert process_memory(idler.pid) == ProcessMemory(0, 0)


def test_mapped_files_are_resident_but_not_anonymous(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "status").write_text(
        "Name:\tllama: server\nVmRSS:\t    1000 kB\nRssAnon:\t     100 kB\nRssFile:\t     880 kB\n"
        "RssShmem:\t      20 kB\n"
    )
    assert process_memory(7, tmp_path) == ProcessMemory(1000 * KIB, 120 * KIB)


class PreparedReader:
    """A card whose reading was made by the test; None for one that cannot be read."""

    def __init__(
        self, *processes: CardProcess, used: int = 10 * MIB, known: bool = True, uuid: str = "GPU-1"
    ) -> None:
        self.card = Card(CardKind.NVIDIA, uuid, "a card", "580.95.05")
        self.reading: MemoryReading | None = MemoryReading(
            1.0, 24 * GIB, MIB, used, 24 * GIB - MIB - used, processes, known
        )

    def read(self) -> MemoryReading:
        if self.reading is None:
            raise LlmError(ErrorCode.CARD_UNREADABLE, "it fell off the bus")
        return self.reading

    def close(self) -> None:
        """Nothing is held."""


def unit(name: str, main_pid: int | None) -> RunProcesses:
    return RunProcesses(main_pid, f"{SLICE}/lllm3090-{name}.service")


@pytest.fixture
def kernel(tmp_path: Path) -> FakeKernel:
    return FakeKernel(tmp_path / "kernel")


def test_what_is_ours_is_told_by_control_group(kernel: FakeKernel) -> None:
    for pid, group in ((10, "a"), (11, "a"), (12, "b")):
        kernel.process(pid, f"{SLICE}/lllm3090-{group}.service")
    kernel.process(13, f"{SLICE}/lllm3090-a.service/below")
    kernel.process(14, f"{SLICE}/lllm3090-a.service.other", "other")
    reader = PreparedReader(*(CardProcess(pid, pid * MIB) for pid in range(10, 15)), used=70 * MIB)
    seen = observe([reader], {"a": unit("a", 10), "b": unit("b", 12)}, True, kernel.roots)
    assert seen.main.resident == seen.main.in_use == {"a": (10 + 11 + 13) * MIB, "b": 12 * MIB}
    assert seen.main.strangers == (Stranger(14, "other", "", 14 * MIB),)
    assert seen.main.attributed
    assert seen.reading is reader.reading
    assert seen.desktop_active is True


def test_the_main_process_counts_where_no_group_is_known(kernel: FakeKernel) -> None:
    # 10 has ended and is still listed; the unit of 11 has not been told yet.
    kernel.process(11, f"{SLICE}/lllm3090-b.service")
    reader = PreparedReader(CardProcess(10, MIB), CardProcess(11, 2 * MIB))
    runs = {"a": unit("a", 10), "b": RunProcesses(11, None), "c": RunProcesses(None, None)}
    assert observe([reader], runs, None, kernel.roots).main.resident == {"a": MIB, "b": 2 * MIB}


def test_a_number_that_another_process_got_is_a_stranger(kernel: FakeKernel) -> None:
    kernel.process(10, "/user.slice/app.slice/game.scope", "game")
    seen = observe([PreparedReader(CardProcess(10, MIB))], {"a": unit("a", 10)}, None, kernel.roots)
    assert seen.main.resident == {}
    assert [stranger.name for stranger in seen.main.strangers] == ["game"]


def test_a_unit_that_was_removed_under_its_process(kernel: FakeKernel) -> None:
    place = kernel.process(10)
    (place / "cgroup").write_text(f"0::{SLICE}/lllm3090-a.service (deleted)\n")
    seen = observe([PreparedReader(CardProcess(10, MIB))], {"a": unit("a", 10)}, None, kernel.roots)
    assert seen.main.resident == {"a": MIB}


def test_the_hybrid_layout_is_understood(kernel: FakeKernel) -> None:
    place = kernel.process(10)
    (place / "cgroup").write_text(f"9:memory:/\n1:name=systemd:{SLICE}/lllm3090-a.service\n0::/\n")
    seen = observe([PreparedReader(CardProcess(10, MIB))], {"a": unit("a", 10)}, None, kernel.roots)
    assert seen.main.resident == {"a": MIB}


def test_strangers_have_names_and_owners_and_the_largest_comes_first(
    kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel.process(20, comm="Xorg")
    long = kernel.process(21, comm="a-very-long-com")
    (long / "exe").symlink_to("/usr/bin/a-very-long-command")
    other = kernel.process(22, comm="a-very-long-com")
    (other / "exe").symlink_to("/usr/bin/python3.13")
    rows = (CardProcess(20, MIB), CardProcess(21, 3 * MIB), CardProcess(22, None), CardProcess(23, 2 * MIB))
    seen = observe([PreparedReader(*rows)], {}, None, kernel.roots)
    assert seen.main.strangers == (
        Stranger(21, "a-very-long-command", "", 3 * MIB),
        Stranger(23, "", "", 2 * MIB, unseen=NOT_HERE),  # of a container with numbers of its own
        Stranger(20, "Xorg", "", MIB),
        Stranger(22, "a-very-long-com", "", None),
    )
    assert seen.main.attributed  # what is ours is known all the same
    owner = pwd.getpwuid(os.geteuid()).pw_name
    monkeypatch.setattr("os.geteuid", lambda: 54321)  # as another user sees the same processes
    seen = observe([PreparedReader(*rows)], {}, None, kernel.roots)
    assert [stranger.user for stranger in seen.main.strangers] == [owner, "", owner, owner]


def test_a_process_on_the_card_that_holds_nothing_yet_is_told_from_an_absent_one(kernel: FakeKernel) -> None:
    reader = PreparedReader(CardProcess(10, 0))
    seen = observe([reader], {"a": unit("a", 10), "b": unit("b", 11)}, None, kernel.roots)
    assert seen.main.resident == {"a": 0}


@pytest.mark.parametrize(
    ("reader", "attributed"),
    [
        (PreparedReader(CardProcess(10, None)), False),  # ours is listed, without its memory
        (PreparedReader(CardProcess(10, MIB), known=False), False),
        (PreparedReader(used=6 * GIB), False),  # nobody is listed, and somebody holds it
        (PreparedReader(CardProcess(4711, 6 * GIB), used=6 * GIB), False),  # by a number of the host
        (PreparedReader(CardProcess(20, 6 * GIB), used=6 * GIB), True),  # a stranger that is known here
        (PreparedReader(used=300 * MIB), True),  # a console, and an engine that has only been started
        (PreparedReader(CardProcess(10, MIB), used=6 * GIB), True),  # ours is listed, so all of it are
    ],
)
def test_memory_that_may_be_ours_is_not_attributed(
    kernel: FakeKernel, reader: PreparedReader, *, attributed: bool
) -> None:
    kernel.process(10, f"{SLICE}/lllm3090-a.service")
    kernel.process(20, comm="game")
    state = observe([reader], {"a": unit("a", 10)}, None, kernel.roots).main
    assert state.attributed is attributed
    assert attributed or state.resident == state.in_use == {}


def test_without_engines_there_is_nothing_to_attribute(kernel: FakeKernel) -> None:
    state = observe([PreparedReader(used=6 * GIB)], {"a": unit("a", None)}, None, kernel.roots).main
    assert state.attributed


def test_a_card_that_cannot_be_read_leaves_the_others_readable(kernel: FakeKernel) -> None:
    kernel.process(10, f"{SLICE}/lllm3090-a.service")
    lost, well = PreparedReader(), PreparedReader(CardProcess(10, MIB), uuid="GPU-2")
    lost.reading = None
    seen = observe([lost, well], {"a": unit("a", 10)}, None, kernel.roots)
    first, second = seen.cards
    assert (first.reading, first.card.uuid) == (None, "GPU-1")
    assert first.error is not None
    with pytest.raises(LlmError, match="it fell off the bus"):
        first.read()
    assert second.read().used_bytes == 10 * MIB
    assert second.resident == {"a": MIB}
    with pytest.raises(LlmError, match="it fell off the bus"):
        held_bytes([well, lost], unit("a", 10), kernel.roots)
    assert held_bytes([well], unit("a", 10), kernel.roots) == MIB


def test_what_a_run_holds_is_added_over_cards(kernel: FakeKernel) -> None:
    kernel.process(10, f"{SLICE}/lllm3090-a.service")
    readers = [PreparedReader(CardProcess(10, size * MIB)) for size in (1, 2)]
    assert held_bytes(readers, unit("a", 10), kernel.roots) == 3 * MIB
    assert held_bytes(readers, unit("b", 11), kernel.roots) == 0


def test_host_memory_beside_the_card(kernel: FakeKernel) -> None:
    for pid in (10, 11):
        kernel.process(pid, f"{SLICE}/lllm3090-a.service")
        kernel.memory(pid, 900 * MIB, 100 * MIB)
    seen = observe([PreparedReader()], {"a": unit("a", 10), "b": unit("b", 12)}, None, kernel.roots)
    assert seen.host_in_use == {"a": 200 * MIB}
    assert seen.host is not None
    assert (seen.host.available_bytes, seen.host.total_bytes) == (20 * GIB, 32 * GIB)


def test_in_host_memory_all_processes_of_a_unit_count(kernel: FakeKernel) -> None:
    for pid in (10, 11):
        kernel.process(pid, f"{SLICE}/lllm3090-a.service")
        kernel.memory(pid, 900 * MIB, 100 * MIB)
    reader = HostMemoryReader(kernel.root / "proc" / "meminfo")
    seen = observe([reader], {"a": unit("a", 10), "gone": unit("b", 12)}, None, kernel.roots)
    assert seen.main.resident == {"a": 1800 * MIB}
    assert seen.main.in_use == {"a": 200 * MIB}
    assert (seen.host, seen.host_in_use, seen.on_host) == (None, {}, True)
    assert held_bytes([reader], unit("a", 10), kernel.roots) == 1800 * MIB


def test_a_zombie_in_the_group_holds_nothing(kernel: FakeKernel) -> None:
    kernel.process(10, f"{SLICE}/lllm3090-a.service")
    (kernel.root / "proc/10/status").write_text("Name:\tx\nState:\tZ (zombie)\n")
    assert host_memory_of(unit("a", 10), kernel.roots) == ProcessMemory(0, 0)


def test_processes_of_a_unit_in_each_layout(kernel: FakeKernel) -> None:
    run = unit("a", 10)
    for hierarchy in ("systemd", "unified", ""):
        group = kernel.root / "cgroup" / hierarchy / SLICE.lstrip("/") / "lllm3090-a.service"
        group.mkdir(parents=True)
        (group / "cgroup.procs").write_text("10\n11\n")
        assert pids_of(run, kernel.roots) == {10, 11}
        (group / "cgroup.procs").unlink()
    assert pids_of(run, kernel.roots) == {10}  # none of them: the main process, which nobody knows otherwise
    kernel.process(10, "/user.slice/app.slice/game.scope")
    assert pids_of(run, kernel.roots) == set()  # the number belongs to another now
    assert pids_of(RunProcesses(None, None), kernel.roots) == set()


def test_an_amd_card_is_asked_for_our_processes_in_every_reading(kernel: FakeKernel) -> None:
    kernel.amd()
    (reader,) = open_amd(kernel.roots)
    assert observe([reader], {}, None, kernel.roots).main.strangers == ()
    kernel.process(10, f"{SLICE}/lllm3090-a.service")
    kernel.uses(10, 5, client=1, kib=1024)
    kernel.process(11, f"{SLICE}/lllm3090-a.service")
    kernel.uses(11, 5, client=2, kib=2048)
    kernel.process(20, comm="game")
    kernel.uses(20, 5, client=3, kib=4096)
    state = observe([reader], {"a": unit("a", 10)}, None, kernel.roots).main
    assert state.resident == {"a": 3 * MIB}
    assert state.attributed
    # Others are found by a search that is made every few seconds only, but are in the used figure at once.
    assert state.strangers == ()
    assert state.read().used_bytes == GIB


def test_this_machine(holder: subprocess.Popen[str], idler: subprocess.Popen[str]) -> None:
    idler.kill()
    idler.wait()
    runs = {"a": RunProcesses(holder.pid, None), "gone": RunProcesses(idler.pid, None)}
    seen = observe([HostMemoryReader()], runs, None)
    assert seen.card.kind is CardKind.CPU
    assert seen.main.resident.keys() == seen.main.in_use.keys() == {"a"}
    assert HOLD_BYTES < seen.main.in_use["a"] < seen.main.resident["a"]
    assert seen.desktop_active is None
    me = os.getpid()
    assert identity_of(me) == Identity(Path("/proc/self/comm").read_text().strip(), "", os.geteuid())
    group = next(iter(cgroups_of(me)))
    assert owner_of(me, {"b": RunProcesses(1, "/nowhere"), "a": RunProcesses(None, group)}) == "a"
