"""Disks that are slow, and disks that do not answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lllm3090d.checkpoints import library as library_module
from lllm3090d.checkpoints.library import Library
from lllm3090d.checkpoints.patience import HangsError, Patience
from lllm3090d.checkpoints.walk import Walk, walk
from lllm3090d.errors import ErrorCode, LlmError
from tests.fakes.gguf_files import write_llama

pytestmark = pytest.mark.unit
# Long enough for whatever does not hang, on a machine that has other work too.
LIMIT_S = 1.0


def test_what_work_returns_and_raises() -> None:
    patience: Patience[int] = Patience(LIMIT_S)
    assert patience.do(lambda _: 7) == 7

    def fails(_: Callable[[], None]) -> int:
        raise OSError(5, "Input/output error")

    with pytest.raises(OSError, match="Input/output"):
        patience.do(fails)

    def times_out(_: Callable[[], None]) -> int:
        raise TimeoutError(110, "the server's own words")

    with pytest.raises(TimeoutError, match="the server's own words"):
        patience.do(times_out)
    assert patience.do(lambda _: 8) == 8


def test_a_slow_disk_that_gets_on_is_waited_for() -> None:
    patience: Patience[str] = Patience(LIMIT_S)
    pause = threading.Event()

    def slow(get_on: Callable[[], None]) -> str:
        for _ in range(9):
            pause.wait(LIMIT_S / 4)
            get_on()
        return "done"

    began = time.monotonic()
    assert patience.do(slow) == "done"
    assert time.monotonic() - began > 2 * LIMIT_S


def test_a_disk_that_hangs_costs_one_thread_and_one_wait() -> None:
    patience: Patience[str] = Patience(LIMIT_S)
    goes_on, late = threading.Event(), []
    asked = []

    def hangs(_: Callable[[], None]) -> str:
        asked.append(1)
        goes_on.wait()
        return "at last"

    taken = threading.Event()

    def take(text: str) -> None:
        late.append(text)
        taken.set()

    with pytest.raises(HangsError, match="has not answered for 1 s"):
        patience.do(hangs, take)
    with ThreadPoolExecutor(8) as pool:
        began = time.monotonic()
        others = [pool.submit(patience.do, hangs) for _ in range(8)]
        for other in others:
            with pytest.raises(HangsError):
                other.result(10)
        assert time.monotonic() - began < LIMIT_S  # nobody asks again, or waits
    assert asked == [1]
    goes_on.set()
    assert taken.wait(10)
    assert late == ["at last"]
    assert patience.do(lambda _: "again") == "again"


def test_a_models_directory_that_hangs_and_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_llama(tmp_path / "a" / "m.gguf")
    server = threading.Event()

    def mount(models_dir: Path, enter: Callable[[Path], None] = lambda _: None) -> Walk:
        server.wait()
        return walk(models_dir, enter)

    monkeypatch.setattr(library_module, "walk", mount)
    library = Library(tmp_path, {}, limit_s=LIMIT_S)
    for _ in range(3):
        with pytest.raises(LlmError) as raised:
            library.scan()
        assert raised.value.code is ErrorCode.MODELS_DIR_UNREADABLE
        assert "has not answered" in raised.value.message
    server.set()
    deadline = time.monotonic() + 10
    found: list[str] = []
    while not found and time.monotonic() < deadline:
        try:
            found = [each.name for each in library.scan()]
        except LlmError as error:
            assert "has not answered" in error.message  # the old question is answered just now
    assert found == ["a"]
