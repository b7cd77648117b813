"""No daemon, another's daemon, or something else on the socket: each a clear message, never a traceback."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from lllm3090ctl import diagnosis
from lllm3090ctl.client import SUN_PATH_BYTES, default_socket_path
from lllm3090d import wire
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.settings import load_settings
from tests.fakes.control_server import ADMITTED, ControlServer, Cut, RawServer, Stream, ctl, event

pytestmark = pytest.mark.unit

NOT_RUNNING = {"LoadState": "loaded", "ActiveState": "inactive", "SubState": "dead", "Result": "success"}


def fake_systemctl(directory: Path, script: str) -> Mapping[str, str]:
    """A systemctl that is a script and notes its arguments in ``asked``; returns the environment for it."""
    program = directory / "systemctl"
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > "{directory}/asked"\n{script}\n')
    program.chmod(0o755)
    return {"PATH": f"{directory}:{os.environ['PATH']}"}


def properties(values: Mapping[str, str]) -> str:
    """Shell that prints properties as ``systemctl show`` does."""
    return "\n".join(f"echo '{name}={value}'" for name, value in values.items())


@pytest.mark.parametrize(
    ("unit", "reason", "says"),
    [
        ({"LoadState": "not-found", "ActiveState": "inactive"}, "not_installed", "lllm3090ctl setup"),
        ({"LoadState": "masked", "ActiveState": "inactive"}, "masked", "unmask"),
        (NOT_RUNNING, "not_running", "systemctl --user start lllm3090d"),
        (
            NOT_RUNNING | {"ActiveState": "failed", "Result": "exit-code"},
            "failed",
            "journalctl --user-unit lllm3090d -n 20",
        ),
        (NOT_RUNNING | {"ActiveState": "activating", "SubState": "start"}, "starting", "Try again"),
        (NOT_RUNNING | {"ActiveState": "active", "SubState": "running"}, "elsewhere", "--socket"),
        (NOT_RUNNING | {"ActiveState": "of-the-future"}, "not_running", "start"),
        ({}, "unknown", "systemctl --user start lllm3090d"),
    ],
)
def test_no_daemon_says_why_and_what_to_do(
    tmp_path: Path, unit: Mapping[str, str], reason: str, says: str
) -> None:
    """systemd is asked; its answer decides the hint."""
    env = fake_systemctl(tmp_path, properties(unit))
    done = ctl(tmp_path / "none.sock", "ps", env=env)
    assert done.exit_code == 3
    assert says in done.stderr
    assert str(tmp_path / "none.sock") in done.stderr
    asked = (tmp_path / "asked").read_text().split()
    assert asked == ["--user", "show", "lllm3090d.service", "lllm3090d.socket", "-p", diagnosis.PROPERTIES]
    problem = json.loads(ctl(tmp_path / "none.sock", "ps", "--json", env=env).stdout)
    assert problem["details"]["reason"] == reason
    assert problem["exit_status"] == 3


@pytest.mark.parametrize(
    "script", ["echo 'Failed to connect to bus' >&2; exit 1", "printf '\\377no equals sign'"]
)
def test_systemd_that_cannot_be_asked_is_tolerated(tmp_path: Path, script: str) -> None:
    """No user manager, or nonsense."""
    done = ctl(tmp_path / "none.sock", "status", env=fake_systemctl(tmp_path, script))
    assert done.exit_code == 3
    assert "packaging/dev/user-manager --private -- bash" in done.stderr


def test_systemctl_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is short, and the answer is then the same as without systemd."""
    monkeypatch.setattr(diagnosis, "ASK_TIMEOUT_S", 0.2)
    done = ctl(tmp_path / "none.sock", "status", env=fake_systemctl(tmp_path, "exec sleep 60"))
    assert done.exit_code == 3
    assert "systemd cannot be asked" in done.stderr


@pytest.mark.parametrize("active", ["active", "inactive"])
@pytest.mark.parametrize("listens", ["here", "elsewhere", os.fsdecode(b"caf\xe9")])
def test_socket_of_systemd_that_was_removed(tmp_path: Path, active: str, listens: str) -> None:
    """To start the daemon would not help, whether or not it runs: only systemd can make its socket anew."""
    (tmp_path / "elsewhere").mkdir()
    here = tmp_path / (listens if listens != "elsewhere" else "here") / "control.sock"
    listener = {"LoadState": "loaded", "ActiveState": active}
    listener["Listen"] = f"{tmp_path / listens / 'control.sock'} (Stream)"
    script = f"{properties(NOT_RUNNING)}\necho\n{properties(listener)}"
    (tmp_path / "systemctl").write_bytes(os.fsencode("#!/bin/sh\n" + script))
    (tmp_path / "systemctl").chmod(0o755)
    done = ctl(here, "ps", "--json", env={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert done.exit_code == 3
    problem = json.loads(done.stdout.encode())
    removed = active == "active" and listens != "elsewhere"
    assert problem["details"]["reason"] == ("socket_removed" if removed else "not_running")
    assert ("systemctl --user restart lllm3090d.socket" in problem["hint"]) is removed
    json.dumps(problem, ensure_ascii=False).encode()  # no lone surrogates


def test_without_systemctl(tmp_path: Path) -> None:
    """A computer without systemd is told how to do without."""
    done = ctl(tmp_path / "none.sock", "status", env={"PATH": str(tmp_path)})
    assert done.exit_code == 3
    assert "systemd cannot be asked" in done.stderr


def test_socket_that_nobody_listens_on(tmp_path: Path) -> None:
    """What a daemon that was killed leaves behind."""
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(tmp_path / "s"))
    stale.close()
    done = ctl(tmp_path / "s", "status", env=fake_systemctl(tmp_path, properties(NOT_RUNNING)))
    assert done.exit_code == 3
    assert "Connection refused" in done.stderr
    assert "Start it: systemctl --user start lllm3090d" in done.stderr


@pytest.mark.parametrize("kind", ["file", "directory", "below a file"])
def test_path_that_is_no_socket(tmp_path: Path, kind: str) -> None:
    """Told as such, where there is something at the path."""
    (tmp_path / "file").write_text("x")
    path = {"file": tmp_path / "file", "directory": tmp_path, "below a file": tmp_path / "file" / "x"}[kind]
    done = ctl(path, "status", env=fake_systemctl(tmp_path, properties(NOT_RUNNING)))
    assert done.exit_code == 3
    assert ("not a socket" in done.stderr) == (kind != "below a file")


def test_path_too_long_for_a_socket(tmp_path: Path) -> None:
    """One byte less is a path like any other."""
    longest = "/" + "x" * (SUN_PATH_BYTES - 2)
    done = ctl(Path(longest + "y"), "status")
    assert done.exit_code == 78
    assert f"has {SUN_PATH_BYTES} bytes" in done.stderr
    assert "LLLM3090_RUNTIME_DIR" in done.stderr
    assert ctl(Path(longest), "status", env=fake_systemctl(tmp_path, "exit 1")).exit_code == 3


def test_socket_of_another_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The kernel refuses; it never refuses root, so its error is raised where it would be."""

    def refused(_socket: socket.socket, _address: object) -> None:
        raise PermissionError(13, "Permission denied")

    class Refusing(socket.socket):
        connect = refused

    monkeypatch.setattr(socket, "socket", Refusing)
    done = ctl(tmp_path / "s", "status")
    assert done.exit_code == 9
    assert "belongs to another user" in done.stderr


def test_peer_that_the_daemon_refuses() -> None:
    """The daemon's own word, with its status."""
    error = LlmError(
        ErrorCode.FORBIDDEN_PEER, "You are uid 33, the daemon serves uid 1000.", hint="Start your own."
    )
    with ControlServer(status=error) as server:
        done = ctl(server, "status")
    assert done.exit_code == 9
    assert "You are uid 33" in done.stderr


HTML = b"<html><body>nginx \x1b[31m</body></html>"


def answer(head: str, body: bytes) -> bytes:
    """An HTTP answer with these lines of head."""
    return head.replace("\n", "\r\n").encode() + b"\r\n\r\n" + body


@pytest.mark.parametrize("command", [["status"], ["load", "x"], ["events"]])
@pytest.mark.parametrize(
    ("raw", "status", "says"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", 1, "does not speak HTTP"),
        (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 200 + b"\r\n", 1, "does not speak HTTP"),
        (
            answer(f"HTTP/1.1 200 OK\nContent-Type: text/html\nContent-Length: {len(HTML)}", HTML),
            1,
            "<html>",
        ),
        (answer("HTTP/1.1 502 Bad Gateway\nContent-Type: text/html", HTML), 1, "HTTP status 502"),
        (answer("HTTP/1.1 500 Oops\nContent-Type: application/json", b"[]"), 1, "not a JSON object"),
        (answer("HTTP/1.1 500 Oops\nContent-Type: application/problem+json", b"{}"), 1, "not which one"),
        (answer("HTTP/1.1 302 Found\nLocation: /", b""), 1, "HTTP status 302"),
        (answer("HTTP/1.1 200 OK\nContent-Length: 10", b'{"a":'), 3, "went away"),
        (answer("HTTP/1.1 200 OK\nTransfer-Encoding: chunked", b'5\r\n{"a":'), 3, "went away"),
        (answer("HTTP/1.1 200 OK\nTransfer-Encoding: chunked", b'9\r\n{"a":'), 3, "went away"),
        (answer("HTTP/1.1 200 OK\nTransfer-Encoding: chunked", b"zz\r\n"), 3, "went away"),
        (answer("HTTP/1.1 500 Oops\nContent-Length: 10", b"{"), 3, "went away"),
        (b"", 3, "went away"),
        (b"HTTP/1.1 200 OK\r\nContent-Ty", 1, ""),
    ],
)
def test_answers_that_are_none(command: list[str], raw: bytes, status: int, says: str) -> None:
    """A short sentence, a hint, the right status; what is quoted cannot steer the terminal."""
    with RawServer(raw) as server:
        done = ctl(server, *command)
    assert done.exit_code == status
    assert says in done.stderr
    assert "Hint: " in done.stderr
    assert "\x1b" not in done.output
    assert isinstance(done.exception, SystemExit)


@pytest.mark.parametrize(
    ("arguments", "document"),
    [
        (["status"], {}),
        (["status"], {"version": 3}),
        (["ps"], {"instances": [{"name": "x"}]}),
        (["models"], {"models_dir": "/m", "models": "none"}),
        (["plan", "x"], {"fits": True}),
        (["unload", "x"], {"name": "x", "released_bytes": "much", "elapsed_s": 1}),
        (["version"], {"version": None}),
        (["load", "x"], {"kind": "ready", "elapsed_s": 1.0}),
        (["load", "x"], {"kind": 1}),
        (["load", "x"], {"kind": "failed"}),
        (["logs", "x"], {"at": 1, "message": "m"}),
        (["events"], {"seq": "1"}),
    ],
)
def test_documents_of_another_shape(arguments: list[str], document: dict[str, object]) -> None:
    """Told as a difference of versions."""
    body = json.dumps(document).encode() + b"\n"
    with RawServer(answer(f"HTTP/1.1 200 OK\nContent-Length: {len(body)}", body)) as server:
        done = ctl(server, *arguments)
    assert done.exit_code == 1
    assert "The answer makes no sense" in done.stderr
    assert "lllm3090ctl version" in done.stderr


@pytest.fixture
def held() -> Iterator[threading.Event]:
    """An event that keeps a server's connection open until the test is over."""
    event = threading.Event()
    yield event
    event.set()


@pytest.mark.parametrize(
    "raw", [b"", b"HTTP/1.1 200 OK\r\n", answer("HTTP/1.1 200 OK\nContent-Length: 9", b"{")]
)
def test_daemon_that_falls_silent(raw: bytes, held: threading.Event) -> None:
    """Whether it says nothing or stops in the middle."""
    with RawServer(raw, held) as server:
        done = ctl(server, "--timeout", "0.2", "status")
        held.set()
    assert done.exit_code == 3
    assert "The daemon does not answer" in done.stderr
    assert "--timeout" in done.stderr


def test_backlog_that_is_full(tmp_path: Path) -> None:
    """A daemon that accepts nobody is waited for, with a limit."""
    with socket.socket(socket.AF_UNIX) as listening, socket.socket(socket.AF_UNIX) as first:
        listening.bind(str(tmp_path / "s"))
        listening.listen(0)
        first.connect(str(tmp_path / "s"))
        done = ctl(tmp_path / "s", "--timeout", "0.2", "status")
    assert done.exit_code == 3
    assert "did not answer within 0.2 s" in done.stderr


def test_stream_may_pause_longer_than_the_timeout() -> None:
    """The limit is for the head of the answer, not for the lines."""
    later = threading.Event()
    timer = threading.Timer(2.5, later.set)
    with ControlServer(events=Stream((event(1), later, event(2)))) as server:
        timer.start()
        done = ctl(server, "--timeout", "1", "events")
        timer.join()
    assert done.exit_code == 0
    assert len(done.stdout.splitlines()) == 2


@pytest.mark.parametrize(
    ("steps", "status", "says"),
    [
        ((ADMITTED, Cut.CONNECTION), 3, "went away"),
        ((ADMITTED,), 3, "The engine may go on without the daemon. See what runs: lllm3090ctl"),
        ((b"",), 1, "said nothing about it"),
        ((ADMITTED, b'{"kind": "rea', Cut.CONNECTION), 3, "went away"),
        ((ADMITTED, b"garbage\n"), 1, "not JSON"),
        ((ADMITTED, b'{"kind": "ready"'), 1, "not JSON"),
    ],
)
def test_load_whose_stream_breaks_off(
    steps: tuple[wire.LoadLine | Cut | bytes, ...], status: int, says: str
) -> None:
    """Without a last line nobody claims that the model is ready."""
    with ControlServer(load=Stream(steps)) as server:
        done = ctl(server, "load", "x")
    assert done.exit_code == status
    assert says in done.stderr
    assert done.stdout == ""


def test_line_that_does_not_end() -> None:
    """Memory of the client is bounded."""
    body = b"x" * (9 << 20)
    with RawServer(answer(f"HTTP/1.1 200 OK\nContent-Length: {len(body)}", body)) as server:
        done = ctl(server, "events")
    assert done.exit_code == 1
    assert "does not end" in done.stderr


@pytest.mark.parametrize(
    "environment",
    [
        {"LLLM3090_RUNTIME_DIR": "/a/b"},
        {"LLLM3090_RUNTIME_DIR": "~/r"},
        {"LLLM3090_RUNTIME_DIR": "", "XDG_RUNTIME_DIR": "/run/x"},
        {"XDG_RUNTIME_DIR": "/run/x"},
        {"XDG_RUNTIME_DIR": ""},
        {},
    ],
)
def test_the_client_looks_where_the_daemon_listens(
    environment: Mapping[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The default is computed twice, and both agree."""
    for variable in ("LLLM3090_RUNTIME_DIR", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    settings = load_settings(tmp_path / "none.toml")
    assert default_socket_path() == str(settings.control_socket)
