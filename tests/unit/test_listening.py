"""The control socket against real files, real sockets, and other processes that were there first."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from lllm3090d.errors import ErrorCode, ExitStatus, LlmError
from lllm3090d.serving.unit_spec import SUN_PATH_BYTES
from lllm3090d.surfaces.listening import check_length, listen, prepare_runtime_dir

pytestmark = pytest.mark.unit

TIMEOUT_S = 60.0
# Listens, says so, ends with its stdin.
OTHER_DAEMON = """
import sys
from pathlib import Path
from lllm3090d.surfaces.listening import listen
listening = listen(Path(sys.argv[1]))
print("listening", flush=True)
sys.stdin.read()
listening.close()
"""
# What systemd does before it executes a service: descriptor 3 and three variables.
ACTIVATED_DAEMON = """
import fcntl, json, os, sys
from pathlib import Path
from lllm3090d.errors import LlmError
from lllm3090d.surfaces.listening import listen
path, passed, count, pid, second = sys.argv[1:]
given = [fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in (passed, second) if fd]
for number, fd in enumerate(given):
    os.dup2(fd, 3 + number)
os.environ.update(LISTEN_PID=pid or str(os.getpid()), LISTEN_FDS=count, LISTEN_FDNAMES="control")
try:
    listening = listen(Path(path))
except LlmError as error:
    print(json.dumps(error.problem()))
else:
    print(json.dumps({
        "activated": listening.activated,
        "path": str(listening.path),
        "gateway": listening.gateway.getsockname()[1] if listening.gateway else None,
        "inheritable": os.get_inheritable(listening.sock.fileno()),
        "variables": sorted(name for name in os.environ if name.startswith("LISTEN_")),
    }))
    if listening.activated and not second:
        connection, _ = listening.sock.accept()
        connection.sendall(b"hello")
        connection.close()
    listening.close()
"""


@pytest.fixture(autouse=True)
def not_activated(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def base() -> Iterator[Path]:
    """A directory whose path leaves room for a socket, wherever the tests run."""
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory)


@pytest.fixture
def path(base: Path) -> Path:
    return base / "run" / "control.sock"


def refusal(path: Path, code: ErrorCode, *, systemd_listens: bool = False) -> LlmError:
    with pytest.raises(LlmError) as caught:
        listen(path, systemd_listens=systemd_listens)
    assert caught.value.code is code
    assert caught.value.hint
    json.dumps(caught.value.problem())
    return caught.value


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def check_that_it_serves(path: Path, server: socket.socket) -> None:
    """A client of the path reaches this server and no other."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(TIMEOUT_S)
        client.connect(str(path))
        connection, _ = server.accept()
        with connection:
            connection.sendall(b"me")
        assert client.recv(8) == b"me"


# --- files and modes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_directories_and_socket_are_private_whatever_the_umask(path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        listening = listen(path)
        assert os.umask(umask) == umask
    finally:
        os.umask(before)
    try:
        assert mode(path.parent) == mode(path.parent / "engines") == 0o700
        assert mode(path) == mode(path.parent / "daemon.lock") == 0o600
        assert not listening.activated
        assert not os.get_inheritable(listening.sock.fileno())
        assert not os.get_inheritable(listening.lock_fd)
        check_that_it_serves(path, listening.sock)
    finally:
        listening.close()


@pytest.mark.parametrize("loose", [0o755, 0o770, 0o701])
def test_a_directory_that_others_could_enter_is_closed_to_them(path: Path, loose: int) -> None:
    (path.parent / "engines").mkdir(parents=True)
    path.parent.chmod(loose)
    (path.parent / "engines").chmod(loose)
    prepare_runtime_dir(path.parent)
    assert mode(path.parent) == mode(path.parent / "engines") == 0o700


def test_what_engines_left_in_their_directory_stays(path: Path) -> None:
    engine = path.parent / "engines" / "qwen.sock"
    engine.parent.mkdir(parents=True)
    engine.write_text("x")
    listen(path).close()
    assert engine.read_text() == "x"


def test_closing_removes_the_socket_and_frees_the_lock(path: Path) -> None:
    for _ in range(2):
        listening = listen(path)
        listening.close()
        assert not path.exists()


def test_the_lock_names_its_holder(path: Path) -> None:
    (path.parent).mkdir()
    (path.parent / "daemon.lock").write_text("1234567890")
    listening = listen(path)
    try:
        assert (path.parent / "daemon.lock").read_text() == str(os.getpid())
    finally:
        listening.close()


@pytest.mark.parametrize("below", ["", "engines"])
def test_a_file_in_the_place_of_a_directory_is_refused(path: Path, below: str) -> None:
    wrong = path.parent / below
    wrong.parent.mkdir(exist_ok=True)
    wrong.write_text("x")
    error = refusal(path, ErrorCode.RUNTIME_DIR_UNUSABLE)
    assert str(wrong) in error.message
    assert error.kind.exit_status is ExitStatus.CONFIG
    assert wrong.read_text() == "x"


@pytest.mark.parametrize("below", ["", "engines"])
def test_a_link_in_the_place_of_a_directory_is_refused(base: Path, path: Path, below: str) -> None:
    (base / "elsewhere").mkdir()
    link = path.parent / below
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(base / "elsewhere")
    assert str(link) in refusal(path, ErrorCode.RUNTIME_DIR_UNUSABLE).message
    assert not list((base / "elsewhere").iterdir())


def test_a_directory_below_a_file_is_refused(base: Path) -> None:
    (base / "file").write_text("x")
    refusal(base / "file" / "run" / "control.sock", ErrorCode.RUNTIME_DIR_UNUSABLE)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_somebody_else_is_refused(path: Path) -> None:
    path.parent.mkdir()
    os.chown(path.parent, 65534, 65534)
    assert f"uid {os.getuid()}" in refusal(path, ErrorCode.RUNTIME_DIR_UNUSABLE).message


@pytest.mark.skipif(os.getuid() == 0, reason="root may write to a directory that is closed to others")
def test_a_directory_that_cannot_be_written_is_refused(path: Path) -> None:
    (path.parent / "engines").mkdir(parents=True)
    path.parent.chmod(0o500)
    refusal(path, ErrorCode.RUNTIME_DIR_UNUSABLE)


def test_a_lock_that_is_a_directory_is_refused(path: Path) -> None:
    (path.parent / "daemon.lock").mkdir(parents=True)
    assert "daemon.lock" in refusal(path, ErrorCode.RUNTIME_DIR_UNUSABLE).message


def test_a_directory_in_the_place_of_the_socket_is_refused_and_the_lock_given_back(path: Path) -> None:
    path.mkdir(parents=True)
    assert str(path) in refusal(path, ErrorCode.RUNTIME_DIR_UNUSABLE).message
    path.rmdir()
    listen(path).close()


@pytest.mark.parametrize(("length", "fits"), [(SUN_PATH_BYTES, True), (SUN_PATH_BYTES + 1, False)])
def test_a_path_must_fit_the_socket_address(base: Path, length: int, fits: bool) -> None:
    padding = length - len(str(base)) - len("//control.sock")
    path = base / ("d" * padding) / "control.sock"
    assert len(os.fsencode(path)) == length
    if fits:
        listen(path).close()  # what we allow, the kernel takes
    else:
        error = refusal(path, ErrorCode.SOCKET_PATH_TOO_LONG)
        assert error.details["limit_bytes"] == SUN_PATH_BYTES
        assert not path.parent.exists()
        with socket.socket(socket.AF_UNIX) as sock, pytest.raises(OSError, match="too long"):
            sock.bind(str(path))


def test_the_length_is_that_of_the_bytes() -> None:
    check_length(Path("/" + "ü" * 53))
    with pytest.raises(LlmError):
        check_length(Path("/" + "ü" * 54))


# --- others who were there first ---------------------------------------------------------------------------


@pytest.fixture
def other_daemon(path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", OTHER_DAEMON, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "listening\n"
        yield process
        process.kill()


def test_a_second_daemon_is_refused_and_the_first_goes_on(
    path: Path, other_daemon: subprocess.Popen[str]
) -> None:
    inode = path.stat().st_ino
    error = refusal(path, ErrorCode.ALREADY_RUNNING)
    assert f"PID {other_daemon.pid}" in error.message
    assert str(path.parent) in error.message
    assert error.kind.exit_status is ExitStatus.ALREADY_RUNNING
    assert path.stat().st_ino == inode
    assert other_daemon.poll() is None
    assert (path.parent / "daemon.lock").read_text() == str(other_daemon.pid)


def test_what_a_killed_daemon_left_is_replaced(path: Path, other_daemon: subprocess.Popen[str]) -> None:
    other_daemon.kill()
    other_daemon.wait(TIMEOUT_S)
    assert path.is_socket()
    listening = listen(path)
    try:
        check_that_it_serves(path, listening.sock)
    finally:
        listening.close()


def test_a_daemon_that_ended_makes_room(path: Path, other_daemon: subprocess.Popen[str]) -> None:
    other_daemon.communicate(timeout=TIMEOUT_S)
    assert other_daemon.returncode == 0
    assert not path.exists()
    listen(path).close()


def test_a_plain_file_in_the_place_of_the_socket_is_replaced(path: Path) -> None:
    path.parent.mkdir()
    path.write_text("left by somebody")
    listening = listen(path)
    try:
        check_that_it_serves(path, listening.sock)
    finally:
        listening.close()


@pytest.fixture
def systemds(path: Path) -> Iterator[socket.socket]:
    """The socket as systemd holds it for a socket unit."""
    path.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))
        sock.listen()
        sock.settimeout(TIMEOUT_S)
        yield sock


def test_the_socket_that_systemd_listens_on_is_not_stolen(path: Path, systemds: socket.socket) -> None:
    error = refusal(path, ErrorCode.ALREADY_RUNNING, systemd_listens=True)
    assert str(path) in error.message
    assert "systemctl --user stop lllm3090d.socket" in str(error.hint)
    # It was not even connected to: that would have started the daemon.
    systemds.setblocking(False)
    with pytest.raises(BlockingIOError):
        systemds.accept()
    systemds.settimeout(TIMEOUT_S)
    check_that_it_serves(path, systemds)


def test_after_a_refusal_the_lock_is_free(path: Path, systemds: socket.socket) -> None:
    refusal(path, ErrorCode.ALREADY_RUNNING, systemd_listens=True)
    systemds.close()
    listen(path).close()


# --- a socket from systemd ---------------------------------------------------------------------------------


def activated(
    path: Path, passed: socket.socket | int, count: str = "1", pid: str = "", second: int | None = None
) -> dict[str, object]:
    """What a daemon says that was given descriptors; its one client is served meanwhile, if there is one only."""
    number = passed if isinstance(passed, int) else passed.fileno()
    other = "" if second is None else str(second)
    process = subprocess.run(
        [sys.executable, "-c", ACTIVATED_DAEMON, str(path), str(number), count, pid, other],
        pass_fds=(number,) if second is None else (number, second),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=TIMEOUT_S,
    )
    answer: dict[str, object] = json.loads(process.stdout)
    return answer


def test_a_passed_socket_is_used_and_left_to_systemd(
    base: Path, path: Path, systemds: socket.socket
) -> None:
    received: list[bytes] = []

    def client() -> None:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(TIMEOUT_S)
            sock.connect(str(path))  # waits in the backlog until the daemon accepts
            received.append(sock.recv(16))

    thread = threading.Thread(target=client)
    thread.start()
    # The daemon's own settings may name another path: systemd's counts.
    answer = activated(base / "other" / "control.sock", systemds)
    thread.join(TIMEOUT_S)
    assert answer == {
        "activated": True,
        "path": str(path),
        "gateway": None,
        "inheritable": False,
        "variables": [],
    }
    assert received == [b"hello"]
    assert not (base / "other" / "control.sock").exists()
    check_that_it_serves(path, systemds)  # the daemon is gone, the socket is not


def test_a_socket_meant_for_another_process_is_not_taken(
    base: Path, path: Path, systemds: socket.socket
) -> None:
    own = base / "other" / "control.sock"
    answer = activated(own, systemds, pid="1")
    assert (answer["activated"], answer["path"], answer["variables"]) == (False, str(own), [])
    check_that_it_serves(path, systemds)


@pytest.mark.parametrize(("count", "why"), [("3", "3 sockets"), ("x", "x sockets"), ("2", "not a socket")])
def test_more_sockets_than_are_meant_are_refused(
    path: Path, systemds: socket.socket, count: str, why: str
) -> None:
    answer = activated(path, systemds, count=count)
    assert answer["code"] == ErrorCode.RUNTIME_DIR_UNUSABLE
    assert why in str(answer["detail"])


def test_the_gateways_socket_is_told_from_the_control_socket_whatever_their_order(
    path: Path, systemds: socket.socket
) -> None:
    with socket.socket() as gateway:
        gateway.bind(("127.0.0.1", 0))
        gateway.listen()
        for order in ((systemds, gateway), (gateway, systemds)):
            first, second = (each.fileno() for each in order)
            answer = activated(path, first, count="2", second=second)
            assert answer["activated"] and answer["path"] == str(path)
            assert answer["gateway"] == gateway.getsockname()[1]
        answer = activated(path, systemds.fileno(), count="2", second=systemds.fileno())
        assert "at most one may be a Unix socket" in str(answer["detail"])


def test_a_passed_file_is_refused(base: Path, path: Path) -> None:
    with (base / "file").open("w") as file:
        answer = activated(path, file.fileno())
    assert answer["code"] == ErrorCode.RUNTIME_DIR_UNUSABLE
    assert "not a socket" in str(answer["detail"])


@pytest.mark.parametrize("family", [socket.AF_UNIX, socket.AF_INET])
def test_a_passed_socket_that_does_not_listen_is_refused(path: Path, family: socket.AddressFamily) -> None:
    with socket.socket(family) as sock:
        answer = activated(path, sock)
    assert answer["code"] == ErrorCode.RUNTIME_DIR_UNUSABLE
    assert "not a listening Unix or TCP socket" in str(answer["detail"])


def test_a_gateways_socket_alone_leaves_the_control_socket_to_us(path: Path) -> None:
    with socket.socket() as gateway:
        gateway.bind(("127.0.0.1", 0))
        gateway.listen()
        answer = activated(path, gateway)
    assert answer["activated"] is False and answer["gateway"]
