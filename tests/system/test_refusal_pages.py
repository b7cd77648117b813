"""The refusal's page as a person sees it: in a terminal of 80 columns, by the real client of a real daemon."""

from __future__ import annotations

import os
import re
import struct
import subprocess
import termios
from collections.abc import Iterator
from fcntl import ioctl
from pathlib import Path

import pytest

from tests.fakes.nvml import FakeProcess
from tests.system.harness import BIN
from tests.system.rig import GIB, Rig, rigged
from tests.system.rounds import RIVALS

pytestmark = pytest.mark.system

PAGES = Path(__file__).parents[1] / "data" / "refusals_seen"
COLUMNS, LINES = 80, 24
REFUSED = 5
ERASED = "\x1b[2K"


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with rigged(tmp_path, RIVALS) as made:
        yield made


def seen(*arguments: str) -> str:
    """What the client writes to a terminal, without colours; process ids and idle times are masked."""
    terminal, end = os.openpty()
    ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    environment = {key: value for key, value in os.environ.items() if key not in {"COLUMNS", "LINES"}}
    environment |= {"NO_COLOR": "1", "TERM": "xterm"}
    with subprocess.Popen(
        [str(BIN / "lllm3090ctl"), *arguments], stdout=end, stderr=end, stdin=end, env=environment
    ) as client:
        os.close(end)
        chunks = []
        while chunk := _read(terminal):
            chunks.append(chunk)
    os.close(terminal)
    assert client.returncode == REFUSED
    written = b"".join(chunks).decode().replace("\r\n", "\n")
    text = written.rpartition(ERASED)[2]  # before it the progress of the load
    assert [line for line in text.splitlines() if len(line) > COLUMNS] == []
    return re.sub(r"idle \d+ s", "idle N s", re.sub(r"(pid|kill) \d+", r"\1 N", text))


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # the last one has closed its end
        return b""


def check(name: str, page: str) -> None:
    file = PAGES / f"{name}.txt"
    if os.environ.get("WRITE_PAGES"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(page, encoding="utf-8")
    assert page == file.read_text(encoding="utf-8")


def test_too_big_for_the_card(rig: Rig) -> None:
    rig.add_model("huge", 30.0)
    check("card", seen("load", "huge"))


def test_too_big_now_because_of_a_stranger(rig: Rig) -> None:
    # A name of its own: how many digits its number has moves no line, because they are masked only afterwards.
    with subprocess.Popen(["sleep", "infinity"]) as stranger:
        rig.nvml.add_process(FakeProcess(stranger.pid, 20 * GIB, "g"))
        try:
            page = seen("load", "alpha")
        finally:
            stranger.kill()
    check("strangers", page)


def test_too_big_because_of_our_own_pinned_model(rig: Rig) -> None:
    rig.load_ready("alpha", pin=True)
    check("pinned", seen("load", "beta"))
