"""systemd holds the gateway's port: the first request starts the daemon, and nobody who asks there waits for ever."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.harness import (
    DAEMON_UNIT,
    GATEWAY_UNIT,
    SOCKET_UNIT,
    Service,
    eventually,
    free_port,
    properties,
    running,
    systemctl,
)

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, int]]:
    """A daemon without an engine or models; its gateway's port is in the units."""
    port = free_port()
    service = Service(tmp_path_factory.mktemp("gateway"), {"gateway_port": str(port)})
    drop_in = service.units_dir / f"{GATEWAY_UNIT}.d"
    drop_in.mkdir(parents=True, exist_ok=True)
    (drop_in / "test.conf").write_text(f"[Socket]\nListenStream=\nListenStream=127.0.0.1:{port}\n")
    try:
        with running(service) as started:
            yield started, port
    finally:
        (drop_in / "test.conf").unlink()
        drop_in.rmdir()


def ask(port: int, path: str = "/health", **headers: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", path, headers=headers)
        return connection.getresponse().status
    finally:
        connection.close()


def start_over() -> None:
    """As install.sh does it: all down, the sockets up."""
    systemctl("stop", SOCKET_UNIT, GATEWAY_UNIT, DAEMON_UNIT)
    systemctl("start", GATEWAY_UNIT)
    systemctl("start", SOCKET_UNIT)


def gateway(service: Service) -> dict[str, object]:
    view: dict[str, object] = service.request("GET", "/v1/status").json()["gateway"]
    return view


def test_the_unit_cannot_begin_under_a_daemon_that_runs(made: tuple[Service, int]) -> None:
    """Which listens by itself then, and goes on with that."""
    service, port = made
    assert ask(port) == 200 and gateway(service)["address"] == f"http://127.0.0.1:{port}"
    systemctl("start", GATEWAY_UNIT, check=False)
    assert properties(GATEWAY_UNIT, "ActiveState")["ActiveState"] != "active"
    assert ask(port) == 200
    systemctl("reset-failed", GATEWAY_UNIT, check=False)


def test_the_first_request_starts_the_daemon(made: tuple[Service, int]) -> None:
    service, port = made
    start_over()
    assert service.main_pid() == 0
    assert ask(port) == 200
    assert service.main_pid() != 0
    assert gateway(service) | {"address": f"http://127.0.0.1:{port}", "problem": None} == gateway(service)


def test_requests_wait_while_the_daemon_starts_anew(made: tuple[Service, int]) -> None:
    service, port = made
    start_over()
    assert ask(port) == 200
    old = service.main_pid()
    systemctl("restart", "--no-block", DAEMON_UNIT)
    eventually(lambda: service.main_pid() != old, what="the daemon is another one")
    assert ask(port) == 200


def test_a_gateway_that_is_switched_off_says_so(made: tuple[Service, int]) -> None:
    service, port = made
    service.configure(gateway="false")
    start_over()
    try:
        assert ask(port) == 503
        view = gateway(service)
        assert view["address"] is None and view["problem"] is None
    finally:
        service.configure(gateway="true")
        start_over()
    assert ask(port) == 200


def test_keys_of_the_command_line(made: tuple[Service, int], tmp_path: Path) -> None:
    service, port = made
    key = service.ctl("key", "add", "laptop").stdout.splitlines()[0]
    assert ask(port) == 401 and ask(port, **{"x-api-key": key}) == 200
    assert ask(port, Authorization=f"Bearer {key}") == 200
    assert "laptop" in service.ctl("key", "list").stdout
    systemctl("restart", DAEMON_UNIT)
    assert ask(port) == 401 and ask(port, **{"x-api-key": key}) == 200
    told = service.journal() + service.ctl("events", "--json").stdout + service.ctl("key", "list").stdout
    assert "laptop" in told and key not in told
    service.ctl("key", "remove", "laptop")
    assert ask(port) == 200
