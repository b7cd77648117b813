"""Names for shells: what is asked, that nobody is woken for it, silence where nobody answers, and what it costs."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from lllm3090ctl import names
from lllm3090d import wire
from lllm3090d.errors import ErrorCode, LlmError
from tests.fakes.control_server import ControlServer, RawServer

pytestmark = pytest.mark.unit

MODELS = wire.Names(names=("SmolLM2-135M", "my model's (1)", "qwen:27b", "größe"))
DAEMON = "import sys, time; print(flush=True); sys.stdin.read()  # lllm3090d"


def run(*arguments: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """As a shell runs it."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("LLLM3090_")} | dict(env or {})
    return subprocess.run(
        [sys.executable, "-m", "lllm3090ctl", "--names", *arguments],
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=20,
        check=False,
        env=environment,
    )


def test_every_kind_of_the_daemon_can_be_asked_for() -> None:
    assert tuple(wire.NamesOf) == names.KINDS


@pytest.mark.parametrize("kind", names.KINDS)
def test_each_name_is_a_line(kind: str) -> None:
    with ControlServer(names=MODELS) as server:
        done = run(kind, str(server.path), env={"LC_ALL": "C", "PYTHONIOENCODING": "ascii"})
        assert server.next_request().target == f"/v1/names?of={kind}"
    assert (done.returncode, done.stdout.splitlines(), done.stderr) == (0, list(MODELS.names), "")


def test_the_runtime_directory_that_was_chosen_is_asked() -> None:
    with ControlServer(names=MODELS) as server:
        done = run("models", env={"LLLM3090_RUNTIME_DIR": str(server.path.parent)})
    assert done.stdout.splitlines() == list(MODELS.names)


def test_nothing_is_said_where_nobody_listens(tmp_path: Path) -> None:
    for socket_path in (tmp_path / "none.sock", tmp_path, tmp_path / ("x" * 200)):
        done = run("models", str(socket_path))
        assert (done.returncode, done.stdout, done.stderr) == (1, "", "")


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.0 200 OK\r\n",
        b"HTTP/1.0 200 OK\r\n\r\n{",
        b"HTTP/1.0 200 OK\r\n\r\n[]",
        b'HTTP/1.0 200 OK\r\n\r\n{"names": 1}',
        b"HTTP/1.0 200 OK\r\n\r\n\xff\xfe\xfd",
        b'HTTP/1.0 500 Oh\r\n\r\n{"names": ["a"]}',
        b"SSH-2.0-OpenSSH\r\n\r\n",
    ],
)
def test_nothing_is_said_of_an_answer_that_is_none(answer: bytes) -> None:
    with RawServer(answer) as server:
        done = run("models", str(server.path))
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")


def test_a_problem_is_not_for_a_shell() -> None:
    with ControlServer(names=LlmError(ErrorCode.MODELS_DIR_UNREADABLE, "It is gone.")) as server:
        done = run("models", str(server.path))
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")


def test_what_would_be_two_lines_is_no_name() -> None:
    body = b'{"names": ["a", "b\\nc", "", "\\u001b[2J", "\\ud800", 1, "d e"]}'
    assert names.parsed(b"HTTP/1.0 200 OK\r\n\r\n" + body) == ["a", "d e"]


def test_a_daemon_that_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "WAIT_S", 0.05)
    hold = threading.Event()
    with RawServer(b"HTTP/1.0 200 OK\r\n", hold) as server:
        with pytest.raises(OSError, match=r"timed out|without an end"):
            names.ask(str(server.path), "models")
        hold.set()


def test_an_answer_without_an_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "LARGEST_ANSWER_BYTES", 1000)
    with RawServer(b"x" * 5000) as server, pytest.raises(OSError, match="without an end"):
        names.ask(str(server.path), "models")


@pytest.mark.parametrize("arguments", [(), ("plans",), ("models", "a", "b")])
def test_other_words_are_refused(arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("usage: ")


# --- nobody is woken -----------------------------------------------------------------------------------------


@pytest.fixture
def runtime(tmp_path: Path) -> Path:
    """A runtime directory with systemd's socket in it: whoever connects there starts the daemon."""
    directory = tmp_path / "lllm3090d"
    directory.mkdir()
    return directory


def connections(runtime: Path, *, lock: str | None) -> int:
    """How many come while names are asked for there."""
    if lock is not None:
        (runtime / "daemon.lock").write_text(lock)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(runtime / "control.sock"))
        listener.listen()
        done = run("models", env={"XDG_RUNTIME_DIR": str(runtime.parent)})
        assert (done.returncode, done.stdout, done.stderr) == (1, "", "")
        listener.setblocking(False)
        try:
            listener.accept()[0].close()
        except BlockingIOError:
            return 0
    return 1


def test_the_daemon_is_not_started(runtime: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert connections(runtime, lock=None) == 0
    (runtime / "control.sock").unlink()
    for lock in (f"{ended.pid}", f"{os.getppid()}0000000000", "", "no number", "½"):
        assert connections(runtime, lock=lock) == 0, lock
        (runtime / "control.sock").unlink()


def test_a_process_that_has_got_its_number_is_another_one(runtime: Path) -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as stranger:
        assert connections(runtime, lock=str(stranger.pid)) == 0


def test_the_daemon_is_asked_where_it_runs(runtime: Path) -> None:
    """The same socket, and a process that is one of ours."""
    with subprocess.Popen(
        [sys.executable, "-c", DAEMON], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert connections(runtime, lock=str(process.pid)) == 1


# --- how much it costs: bench/completion.py measures it ------------------------------------------------------


def imported(program: str, *arguments: str) -> set[str]:
    """The packages that are imported by the end of a program."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; {program}; print(*sys.modules, file=sys.stderr)", *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=20,
    )
    return {name.partition(".")[0] for name in done.stderr.split()}


def test_nothing_is_imported_but_what_a_question_takes() -> None:
    bare = imported("import json, os, socket, time, io")
    ours = "sys.argv[1:1] = ['--names', 'models']; from lllm3090ctl.__main__ import main; status = main()"
    with ControlServer(names=MODELS) as server:
        assert imported(ours, str(server.path)) - bare == {"lllm3090ctl"}
        assert server.next_request().target == "/v1/names?of=models"
    assert imported(ours, "/nowhere/control.sock") - bare == {"lllm3090ctl"}
    assert not bare & {"aiohttp", "asyncio", "click", "http", "pydantic", "rich", "subprocess"}
