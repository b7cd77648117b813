"""Ends of the real engine, brought about on purpose, and the causes that are made of them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from lllm3090d.engines.crash_causes import CrashCause, Ending, Finding, classify
from tests.fakes.unix_http import call

pytestmark = pytest.mark.engine

LIMIT_S = 60.0


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory whose sockets have short paths."""
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory)


def find(log: Path, status: int) -> Finding:
    ending = (
        Ending("signal", signal_number=-status) if status < 0 else Ending("exit-code", exit_status=status)
    )
    return classify(ending, log.read_text(encoding="utf-8", errors="replace").splitlines())


def limited(limits: str, argv: Sequence[str | Path]) -> list[str | Path]:
    """With limits of a shell's ``ulimit``."""
    return ["/bin/sh", "-c", f'ulimit {limits} && exec "$@"', "sh", *argv]


def end_of(argv: Sequence[str | Path], place: Path) -> Finding:
    """Run it to its end."""
    log = place / "log"
    with log.open("wb") as file:
        status = subprocess.run(argv, stderr=file, stdout=file, timeout=LIMIT_S, check=False).returncode
    return find(log, status)


def edited(model: Path, place: Path, old: bytes, new: bytes) -> Path:
    """A copy whose header says something else of the same length."""
    copy = place / "edited.gguf"
    data = model.read_bytes()
    assert len(old) == len(new)
    assert data.count(old, 0, 4096)
    copy.write_bytes(data.replace(old, new, 1))
    return copy


def test_a_file_that_is_cut_off(llama_server: Path, smollm2_path: Path, place: Path) -> None:
    copy = place / "cut.gguf"
    with smollm2_path.open("rb") as file:
        copy.write_bytes(file.read(40_000_000))
    found = end_of([llama_server, "-m", copy, "--host", place / "e.sock"], place)
    assert found.cause is CrashCause.BAD_FILE
    assert found.line is not None
    assert "not within the file bounds" in found.line


def test_an_architecture_that_nobody_knows(llama_server: Path, smollm2_path: Path, place: Path) -> None:
    length = (5).to_bytes(8, "little")
    copy = edited(smollm2_path, place, length + b"llama", length + b"qqqqq")
    assert end_of([llama_server, "-m", copy, "--host", place / "e.sock"], place).cause is CrashCause.BAD_FILE


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (("--no-such-option",), CrashCause.UNKNOWN_FLAG),
        (("-c", "many"), CrashCause.UNKNOWN_FLAG),
        (("-ctk", "q9_9"), CrashCause.UNKNOWN_FLAG),
        (("-ctv", "q4_0", "-fa", "off"), CrashCause.UNKNOWN_FLAG),
        (("--device", "CUDA7"), CrashCause.DEVICE_LOST),
        (("--host", "/no/such/directory/e.sock"), CrashCause.SOCKET_TROUBLE),
    ],
)
def test_arguments_that_it_cannot_use(
    llama_server: Path, smollm2_path: Path, place: Path, arguments: tuple[str, ...], cause: CrashCause
) -> None:
    argv: list[str | Path] = [llama_server, "-m", smollm2_path, "--host", place / "e.sock", *arguments]
    assert end_of(argv, place).cause is cause


def test_a_model_that_is_not_there(llama_server: Path, place: Path) -> None:
    found = end_of([llama_server, "-m", place / "none.gguf", "--host", place / "e.sock"], place)
    assert found.cause is CrashCause.FILE_UNREADABLE


def test_too_little_host_memory(llama_server: Path, smollm2_path: Path, place: Path) -> None:
    argv: list[str | Path] = [
        llama_server,
        "-m",
        smollm2_path,
        "--host",
        place / "e.sock",
        "-c",
        "2000000",
        "-np",
        "1",
    ]
    found = end_of(limited("-v 2097152", [*argv, "--fit", "off", "--no-warmup"]), place)
    assert found.cause is CrashCause.OUT_OF_HOST_MEMORY


def test_a_library_that_is_missing(llama_server: Path, place: Path) -> None:
    alone = place / "llama-server"
    shutil.copy(llama_server.resolve(), alone)
    found = end_of([alone, "--version"], place)
    if found.cause is CrashCause.UNKNOWN:
        pytest.skip("this build needs no library of its own")
    assert found.cause is CrashCause.MISSING_LIBRARY


@pytest.mark.parametrize(
    ("number", "cause"),
    [
        (signal.SIGTERM, CrashCause.KILLED),
        (signal.SIGKILL, CrashCause.KILLED),
        (signal.SIGILL, CrashCause.ILLEGAL_INSTRUCTION),
        (signal.SIGSEGV, CrashCause.ENGINE_FAULT),
    ],
)
def test_a_signal_while_it_serves(
    llama_server: Path, smollm2_path: Path, place: Path, number: int, cause: CrashCause
) -> None:
    argv: list[str | Path] = [
        llama_server,
        "-m",
        smollm2_path,
        "--host",
        place / "e.sock",
        "-c",
        "512",
        "--no-warmup",
    ]
    log = place / "log"
    with (
        log.open("wb") as file,
        subprocess.Popen(limited("-c 0", argv), stderr=subprocess.PIPE) as process,
    ):
        assert process.stderr is not None
        try:
            for line in process.stderr:
                file.write(line)
                if b"listening on" in line:
                    # It says so before its loop begins, and a SIGTERM in between is forgotten by it.
                    call(place / "e.sock", "POST", "/completion", {"prompt": "a", "n_predict": 1})
                    os.kill(process.pid, number)
        finally:
            process.kill()
    assert find(log, process.returncode).cause is cause
