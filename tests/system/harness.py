"""A real daemon under a real ``systemd --user``, as a person would have it: its units, its client, its socket."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
# Never set: keeps a question that is asked again and again from eating a core.
PAUSE = threading.Event()

REPOSITORY = Path(__file__).resolve().parents[2]
BIN = Path(sys.prefix) / "bin"
DAEMON_UNIT = "lllm3090d.service"
SOCKET_UNIT = "lllm3090d.socket"
# Only started by tests that are about it.
GATEWAY_UNIT = "lllm3090-gateway.socket"
UNITS = (DAEMON_UNIT, SOCKET_UNIT, GATEWAY_UNIT, "lllm3090.slice")
# What a test kills is to stay down, so that it can be looked at; tests of restarts say otherwise.
# The usual port is taken by one daemon only, and several are tested at a time.
SETTINGS = {"restart_failed": "false", "gateway_port": "0"}
# For what takes a moment where nothing else is done: a machine that others use may stand still for seconds.
PATIENCE_S = 60.0
# For an answer: the threads of a real engine wait for each other at every step, and take minutes beside other programs.
ANSWER_S = 240.0


def eventually(question: Callable[[], T | None], within_s: float = PATIENCE_S, what: str = "") -> T:
    """Ask until the answer is true; the deadline is an error."""
    deadline = time.monotonic() + within_s
    while True:
        answer = question()
        if answer:
            return answer
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within_s} s: {what or question}")
        PAUSE.wait(0.01)


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path | str, timeout: float = ANSWER_S) -> None:
        super().__init__("localhost", timeout=timeout)
        self.path = path

    def connect(self) -> None:
        """Connect to the socket."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(str(self.path))  # waits where many others do; with a timeout it would fail at once
        self.sock.settimeout(self.timeout)


@dataclass(frozen=True)
class Answer:
    """A response."""

    status: int
    content_type: str
    body: bytes

    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)


def http_request(
    path: Path | str, method: str, target: str, body: bytes | None = None, timeout: float = ANSWER_S
) -> Answer:
    """One request on a Unix socket."""
    connection = UnixConnection(path, timeout)
    try:
        connection.request(method, target, body, {"Content-Type": "application/json"} if body else {})
        response = connection.getresponse()
        return Answer(response.status, response.headers.get_content_type(), response.read())
    finally:
        connection.close()


def systemctl(*arguments: str, check: bool = True) -> str:
    """``systemctl --user``; its standard output."""
    done = subprocess.run(["systemctl", "--user", *arguments], capture_output=True, text=True, check=False)
    if check and done.returncode != 0:
        raise AssertionError(f"systemctl --user {' '.join(arguments)}: {done.stderr}{done.stdout}")
    return done.stdout


def properties(unit: str, *names: str) -> dict[str, str]:
    """Properties of a unit."""
    text = systemctl("show", unit, *(f"--property={name}" for name in names))
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


def model_units() -> dict[str, str]:
    """Loaded units of models and their ActiveState."""
    text = systemctl("list-units", "--all", "--plain", "--no-legend", "--type=service", "lllm3090-*.service")
    return {line.split()[0]: line.split()[2] for line in text.splitlines() if line.strip()}


def is_there(pid: int) -> bool:
    """Whether a process exists, its remains included that nobody has collected yet."""
    return Path(f"/proc/{pid}").exists()


def until_no_units() -> None:
    """Wait until no unit of a model is loaded: one that has failed is reset beside the answer to its client."""
    eventually(lambda: model_units() == {}, what="no unit of a model is left")


def free_port() -> int:
    """One that nobody listens on, and that the kernel gives to no connection meanwhile."""
    with contextlib.closing(socket.socket()) as sock:
        while True:
            port = random.randrange(20_000, 30_000)  # noqa: S311  # below those of connections
            with contextlib.suppress(OSError):
                sock.bind(("127.0.0.1", port))
                return port


@dataclass
class Service:
    """The daemon as a user unit, with settings of its own."""

    directory: Path
    settings: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)  # of the daemon, beside its settings

    @property
    def runtime_dir(self) -> Path:
        """Where its sockets are."""
        return Path(os.environ["XDG_RUNTIME_DIR"]) / "lllm3090d"

    @property
    def control_socket(self) -> Path:
        """Its control socket."""
        return self.runtime_dir / "control.sock"

    @property
    def models_dir(self) -> Path:
        """Its models."""
        return self.directory / "models"

    @property
    def config_file(self) -> Path:
        """Its settings file."""
        return self.directory / "config.toml"

    @property
    def units_dir(self) -> Path:
        """Where its volatile units are."""
        return Path(os.environ["XDG_RUNTIME_DIR"]) / "systemd" / "user"

    def install(self) -> None:
        """Write the shipped units, with this interpreter's daemon and these settings."""
        self.models_dir.mkdir(parents=True, exist_ok=True)
        self.units_dir.mkdir(parents=True, exist_ok=True)
        for unit in UNITS:
            text = (REPOSITORY / "systemd" / unit).read_text()
            (self.units_dir / unit).write_text(text.replace("/usr/bin/lllm3090d", str(BIN / "lllm3090d")))
        self.configure()

    def configure(self, **settings: str) -> None:
        """Change settings in the environment of the unit; takes effect at its next start."""
        self.settings = SETTINGS | self.settings | settings
        values = (
            {
                "LLLM3090_MODELS_DIR": str(self.models_dir),
                "LLLM3090_STATE_DIR": str(self.directory / "state"),
                "LLLM3090_CONFIG": str(self.config_file),
            }
            | {f"LLLM3090_{key.upper()}": value for key, value in self.settings.items()}
            | self.environment
        )
        drop_in = self.units_dir / f"{DAEMON_UNIT}.d"
        drop_in.mkdir(exist_ok=True)
        lines = [f'Environment="{key}={_quoted(value)}"' for key, value in values.items()]
        # Tests kill it more often than a person would see it die.
        text = "[Unit]\nStartLimitIntervalSec=0\n[Service]\n" + "\n".join(lines) + "\n"
        coverage = {key: value for key, value in os.environ.items() if key.startswith("COVERAGE_")}
        text += "".join(f'Environment="{key}={value}"\n' for key, value in coverage.items())
        (drop_in / "test.conf").write_text(text)
        systemctl("daemon-reload")

    def start(self) -> None:
        """Start it; returns when it has said READY=1."""
        systemctl("start", DAEMON_UNIT)

    def reload(self) -> None:
        """Have it read its settings again, and wait until it has: systemd only sends the signal."""

        def readings() -> int:
            lines = self.request("GET", "/v1/events").body.splitlines()
            return sum(json.loads(line)["kind"] == "settings" for line in lines)

        before = readings()
        systemctl("reload", DAEMON_UNIT)
        eventually(lambda: readings() > before, what="the settings are read again")

    def stop(self) -> None:
        """Stop it; models go on."""
        systemctl("stop", SOCKET_UNIT, GATEWAY_UNIT, DAEMON_UNIT)

    def main_pid(self) -> int:
        """Its process, 0 if none."""
        return int(properties(DAEMON_UNIT, "MainPID").get("MainPID", "0"))

    def remove(self) -> None:
        """Leave nothing behind."""
        self.stop()
        units = model_units()
        if units:
            systemctl("stop", *units, check=False)
            systemctl("reset-failed", *units, check=False)
        systemctl("reset-failed", DAEMON_UNIT, check=False)
        for unit in UNITS:
            (self.units_dir / unit).unlink(missing_ok=True)
        shutil.rmtree(self.units_dir / f"{DAEMON_UNIT}.d", ignore_errors=True)
        shutil.rmtree(self.runtime_dir, ignore_errors=True)
        systemctl("daemon-reload")

    def journal(self) -> str:
        """What it has logged; shown when a test fails."""
        command = ["journalctl", "--no-pager", "-o", "cat", "-n", "60", f"_UID={os.getuid()}"]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout

    # --- its clients --------------------------------------------------------------------------------------------

    def ctl(
        self, *arguments: str, check: bool = True, timeout: float = ANSWER_S
    ) -> subprocess.CompletedProcess[str]:
        """Run ``lllm3090ctl``."""
        done = subprocess.run(
            [str(BIN / "lllm3090ctl"), *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
        )
        if check and done.returncode != 0:
            raise AssertionError(
                f"lllm3090ctl {' '.join(arguments)}: {done.returncode}\n{done.stdout}{done.stderr}"
            )
        return done

    def ctl_json(self, *arguments: str) -> Any:
        """Run ``lllm3090ctl --json``; its only document."""
        return json.loads(self.ctl(*arguments, "--json").stdout)

    def request(self, method: str, target: str, body: Any = None, timeout: float = ANSWER_S) -> Answer:
        """One request to the control API; a body that is no bytes is sent as JSON."""
        raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        return http_request(self.control_socket, method, target, raw, timeout)

    def instances(self) -> dict[str, Any]:
        """Instances by model name."""
        return {item["name"]: item for item in self.request("GET", "/v1/instances").json()["instances"]}

    def load(self, model: str, **options: Any) -> list[dict[str, Any]]:
        """Load through the API; the lines of the stream, or the problem as the only one."""
        answer = self.request("POST", "/v1/load", {"model": model, **options})
        return [json.loads(line) for line in answer.body.splitlines()]

    def state(self, model: str) -> str | None:
        """State of a model's instance."""
        state: str | None = self.instances().get(model, {}).get("state")
        return state


def _quoted(value: str) -> str:
    """A value between the quotes of a unit file."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")


def ask(endpoint: str, question: str, tokens: int = 16) -> Any:
    """One question to an engine's own endpoint; the decoded answer."""
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": tokens, "temperature": 0}
    answer = http_request(endpoint, "POST", "/v1/chat/completions", json.dumps(body).encode())
    assert answer.status == 200, answer.body
    return answer.json()


@contextlib.contextmanager
def running(service: Service) -> Iterator[Service]:
    """A daemon that is installed, started, and removed in the end."""
    service.install()
    try:
        service.start()
        yield service
    except BaseException:
        sys.stderr.write(service.journal())
        raise
    finally:
        service.remove()
