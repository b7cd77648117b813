"""What Xid errors mean, and finding them in what the kernel says."""

from __future__ import annotations

from pathlib import Path

import pytest

from lllm3090d.gpus.kernel_messages import KernelMessages
from lllm3090d.gpus.xids import KINDS, Until, Xid, XidClass, xids_in

pytestmark = pytest.mark.unit
CARD = "0000:01:00.0"


def test_a_fault_of_one_process_is_none_of_the_card() -> None:
    for number in (8, 13, 31, 32, 43, 94):
        assert Xid(number).kind.concerns is XidClass.PROCESS
    for number in (48, 61, 62, 64, 74, 79, 95, 119, 120, 140, 143, 154):
        assert Xid(number).kind.concerns is XidClass.CARD
    # 63: replaced at the next reset, "new workloads can be launched"; 45 follows from an end; what is unknown is noted.
    for number in (45, 63, 92, 9999):
        assert Xid(number).kind.concerns is XidClass.NOTE


def test_only_what_concerns_the_card_has_an_end() -> None:
    assert {n for n, kind in KINDS.items() if kind.until is not Until.RESET} == {48, 109, 154}
    assert all(kind.meaning and not kind.meaning.endswith(".") for kind in KINDS.values())


@pytest.mark.parametrize(
    ("line", "number", "pid"),
    [
        (
            "NVRM: Xid (PCI:0000:01:00): 79, pid=1234, name=llama-server, GPU has fallen off the bus.",
            79,
            1234,
        ),
        ("NVRM: Xid (PCI:0000:01:00): 31, Ch 00000008, intr 10000000. MMU Fault: ENGINE GRAPHICS", 31, None),
        ("NVRM: Xid (0000:01:00): 13, 0005 00000000 0000502d", 13, None),
        ("NVRM: Xid (PCI:0000:01:00): 64, pid='<unknown>', name=<unknown>, Row Remapper failed", 64, None),
        ("NVRM: Xid (PCI:00000000:01:00): 119, pid='77', Timeout after 6s of waiting for RPC", 119, 77),
        ("NVRM: Xid (PCI:0000:01:00.0): 154, GPU recovery action changed from 0x0 (None) to 0x1", 154, None),
    ],
)
def test_a_line_of_the_kernel(line: str, number: int, pid: int | None) -> None:
    record = f"3,1044,812345678,-;{line}\n SUBSYSTEM=pci\n"
    assert xids_in(record) == ((CARD, Xid(number, pid, line)),)


@pytest.mark.parametrize(
    "line",
    [
        "NVRM: GPU at PCI:0000:01:00: GPU-bc0fa0b9",
        "NVRM: Xid (PCI:nonsense): 79, pid=1",
        "NVRM: Xid (PCI:0000:01:00): x",
        "usb 1-1: Xid (PCI:0000:01:00): 79",
        "NVRM: Xid (PCI:0000:01:00): 12345, no such number has so many digits",
    ],
)
def test_other_lines_are_none(line: str) -> None:
    assert xids_in(line) == ()


def test_the_kernel_s_messages_are_read_on_from_where_they_were(tmp_path: Path) -> None:
    device = tmp_path / "kmsg"
    device.write_text("4,1,1,-;NVRM: Xid (PCI:0000:01:00): 62, of before\n")
    messages = KernelMessages(device)
    assert messages.new() == ""
    with device.open("a") as kernel:
        kernel.write("4,2,2,-;NVRM: Xid (PCI:0000:02:00): 13, pid=7, name=x\n4,3,3,-;something else\n")
    assert [(where, xid.number) for where, xid in xids_in(messages.new())] == [("0000:02:00.0", 13)]
    assert messages.new() == ""
    messages.close()
    assert messages.new() == ""


def test_messages_that_nobody_may_read(tmp_path: Path) -> None:
    messages = KernelMessages(tmp_path / "none")
    assert "cannot be read: No such file" in messages.problem
    assert messages.new() == ""
    messages.close()


def test_the_table_in_the_reference_is_that_of_the_code() -> None:
    text = (Path(__file__).parents[2] / "docs" / "reference" / "events.md").read_text()
    section = text.partition("## Errors of a card")[2].partition("\n## ")[0]
    rows = [tuple(cell.strip() for cell in line.split("|")[1:-1]) for line in section.splitlines()]
    told = {row[0]: row[1:] for row in rows if len(row) == 4 and row[0].isdecimal()}
    assert told == {
        str(number): (
            f"`{kind.concerns}`",
            kind.meaning,
            str(kind.until) if kind.concerns is XidClass.CARD else "",
        )
        for number, kind in KINDS.items()
    }
