"""Programs of engines that hang, say too much, or leave children behind; real processes throughout."""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from lllm3090d.engines.capabilities import Build
from lllm3090d.engines.process import LARGEST_OUTPUT_BYTES, Answer, Helpers, run_program
from lllm3090d.errors import ErrorCode, LlmError

pytestmark = pytest.mark.unit

LIMIT_S = 60.0  # far above what is to be noticed


def program(directory: Path, text: str) -> Build:
    server = directory / "llama-server"
    server.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    server.chmod(0o755)
    return Build(server, (), "test", locked=False)


def run(build: Build, time_limit_s: float = LIMIT_S, helpers: Helpers | None = None) -> Answer:
    return run_program(
        build, build.server, ("--help",), dict(os.environ), time_limit_s, helpers=helpers or Helpers()
    )


def is_gone(pid: int) -> bool:
    """It has ended, or does so now: a kill takes a moment to arrive."""
    try:
        end = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([end], [], [], LIMIT_S)[0])
    finally:
        os.close(end)


def written_pid(build: Build, suffix: str) -> int:
    return int(Path(f"{build.server}.{suffix}").read_text())


def test_both_streams_and_the_status_are_told(tmp_path: Path) -> None:
    answer = run(program(tmp_path, r"printf 'a\r\nb\rc\n\377'; echo err >&2; exit 3"))
    assert answer == Answer(3, "a\nb\nc\n\ufffd", "err\n")


@pytest.mark.parametrize("stream", [1, 2])
def test_a_program_that_says_too_much_is_killed(stream: int, tmp_path: Path) -> None:
    build = program(tmp_path, f'echo $$ > "$0.pid"; sleep 600 & echo $! > "$0.child"; yes >&{stream}')
    with pytest.raises(LlmError, match=r"says more than 4 MiB on --help") as caught:
        run(build)
    assert caught.value.code is ErrorCode.ENGINE_UNUSABLE
    assert is_gone(written_pid(build, "pid")) and is_gone(written_pid(build, "child"))


def test_a_long_answer_is_taken_whole(tmp_path: Path) -> None:
    text = f"head -c {LARGEST_OUTPUT_BYTES} /dev/zero | tr '\\0' x"
    assert run(program(tmp_path, text)) == Answer(0, "x" * LARGEST_OUTPUT_BYTES, "")
    with pytest.raises(LlmError, match="says more"):
        run(program(tmp_path, f"{text}; printf x"))


def test_children_of_a_program_that_has_ended_do_not_hold_up_its_answer(tmp_path: Path) -> None:
    build = program(tmp_path, 'sleep 600 & echo $! > "$0.child"; echo done')
    assert run(build) == Answer(0, "done\n", "")
    assert is_gone(written_pid(build, "child"))


def test_one_that_left_the_group_with_the_pipes_is_not_waited_for(tmp_path: Path) -> None:
    build = program(tmp_path, 'setsid sh -c \'echo $$ > "$0.far"; exec sleep 600\' "$0" & wait')
    try:
        answer = run(build, 1.0)
        assert answer.timed_out and not answer.succeeded
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.kill(written_pid(build, "far"), signal.SIGKILL)


def test_one_that_closes_its_pipes_and_hangs_is_killed(tmp_path: Path) -> None:
    build = program(tmp_path, 'echo $$ > "$0.pid"; exec >&- 2>&-; exec sleep 600')
    assert run(build, 2.0) == Answer(-signal.SIGKILL, "", "", timed_out=True)
    assert is_gone(written_pid(build, "pid"))


def test_all_that_runs_ends_with_the_helpers(tmp_path: Path) -> None:
    """And nothing is started after that."""
    build = program(tmp_path, 'sleep 600 & echo $! > "$0.child"; echo > "$0.ready"; wait')
    ready = Path(f"{build.server}.ready")
    os.mkfifo(ready)
    helpers, failures = Helpers(), list[LlmError]()

    def ask() -> None:
        with pytest.raises(LlmError) as caught:
            run(build, helpers=helpers)
        failures.append(caught.value)

    thread = threading.Thread(target=ask)
    thread.start()
    ready.read_text()
    began_s = time.monotonic()
    helpers.stop()
    thread.join()
    assert time.monotonic() - began_s < LIMIT_S / 2
    assert failures[0].code is ErrorCode.SHUTTING_DOWN
    assert is_gone(written_pid(build, "child"))
    Path(f"{build.server}.child").unlink()
    with pytest.raises(LlmError, match="stopping"):
        run(build, helpers=helpers)
    assert not Path(f"{build.server}.child").exists()


def test_one_that_started_while_the_helpers_were_stopped_ends_too() -> None:
    helpers = Helpers()
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as process:
        helpers.stop()
        with helpers.holding(process.pid):
            assert process.wait(LIMIT_S) == -signal.SIGKILL


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    build = program(tmp_path, "echo done")
    run(build)
    gc.collect()  # what other tests have left is not closed meanwhile
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        run(build)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
