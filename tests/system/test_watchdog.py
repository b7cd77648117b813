"""The daemon gets stuck, for real: systemd ends it, it says why before that, and its models notice nothing."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.engine import install_fake_engine
from tests.fakes.frozen_thread import frozen, main_loops
from tests.fakes.gguf_files import write_llama
from tests.system.conftest import PRIVATE_MANAGER
from tests.system.harness import DAEMON_UNIT, Service, eventually, properties, running, systemctl

pytestmark = pytest.mark.system

WATCHDOG_S = 5.0  # a daemon on a machine that stands still for a while is to be fed in it


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One daemon with a short limit and one model, for all tests."""
    if os.environ.get(PRIVATE_MANAGER) != "1":
        pytest.skip("needs a private user manager; run: make test-system")
    directory = tmp_path_factory.mktemp("watchdog")
    engine = install_fake_engine(directory / "engine")
    made = Service(directory, {"llama_dir": str(engine), "verify_after_load": "off"})
    write_llama(made.models_dir / "tiny" / "tiny.gguf", head_count=2, kv_head_count=1)
    made.install()
    (made.units_dir / f"{DAEMON_UNIT}.d" / "watchdog.conf").write_text(
        f"[Service]\nWatchdogSec={WATCHDOG_S}\n"
    )
    with running(made) as started:
        assert started.load("tiny")[-1]["kind"] == "ready"
        yield started


def told(pid: int | None = None) -> str:
    """What the daemon says of itself; of another process than this one nothing."""
    unit = properties(DAEMON_UNIT, "StatusText", "MainPID")
    return "" if pid is not None and unit["MainPID"] != str(pid) else unit.get("StatusText", "")


def fed_us() -> int:
    """When the watchdog was fed last, by the monotonic clock."""
    return int(properties(DAEMON_UNIT, "WatchdogTimestampMonotonic")["WatchdogTimestampMonotonic"])


def tiny(service: Service) -> dict[str, Any]:
    model: dict[str, Any] = service.instances()["tiny"]
    return model


def until_restarted(old: int) -> None:
    def is_new() -> bool:
        unit = properties(DAEMON_UNIT, "ActiveState", "MainPID")
        return unit["ActiveState"] == "active" and unit["MainPID"] not in {"0", str(old)}

    eventually(is_new, what="systemd has started it again")


def journal() -> str:
    command = ["journalctl", "--no-pager", "-o", "cat", "-n", "300", f"_UID={os.getuid()}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def bus_thread(pid: int) -> int:
    """That of the user's bus is started before that of the system bus; either may be at work now and then."""

    def both() -> list[int] | None:
        return found if len(found := main_loops(pid)) == 2 else None

    return eventually(both, what="both wait")[0]


@pytest.mark.parametrize(
    ("part", "thread"),
    [
        ("the thread of the user's bus is stuck (The bus thread did not answer within", bus_thread),
        ("the event loop is stuck (it has not turned for", lambda pid: pid),
    ],
    ids=["bus thread", "event loop"],
)
def test_a_stuck_part_is_named_before_systemd_ends_the_daemon_and_its_model_is_adopted(
    service: Service, part: str, thread: Callable[[int], int]
) -> None:
    before, pid = tiny(service), service.main_pid()
    with frozen(thread(pid)):
        eventually(lambda: part in told(pid), what=f"{part} is said while the daemon lives: {told()!r}")
        until_restarted(pid)
    assert part not in told()
    after = tiny(service)
    assert (after["state"], after["main_pid"], after["run"]) == ("ready", before["main_pid"], before["run"])
    # With what each thread was doing.
    for line in (part, "Failed with result 'watchdog'", "Fatal Python error: Aborted", "in _bus_main"):
        eventually(lambda line=line: line in journal(), what=f"{line} in the journal")  # type: ignore[misc]  # bound


def test_a_daemon_that_is_stopped_is_ended_and_started_again(service: Service) -> None:
    before, pid = tiny(service), service.main_pid()
    os.kill(pid, signal.SIGSTOP)
    until_restarted(pid)
    after = tiny(service)
    assert (after["state"], after["main_pid"]) == ("ready", before["main_pid"])
    # The one that got stuck before had time to write down why.
    lines = service.request("GET", "/v1/events").body.splitlines()
    messages = [event["message"] for event in map(json.loads, lines) if event["kind"] == "daemon"]
    assert any(text.startswith("the thread of the user's bus is stuck") for text in messages), messages


def test_a_daemon_without_file_descriptors_says_so_and_is_left_alone(service: Service) -> None:
    """A new one would meet the same clients, and the streams that pass through this one would be cut."""
    pid = service.main_pid()
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)

    def none_left() -> bool:
        taken = {int(path.name) for path in Path(f"/proc/{pid}/fd").iterdir()}
        lowest = next(number for number in range(len(taken) + 1) if number not in taken)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (lowest, limits[1]))
        return "the control API cannot be asked (the daemon has no file descriptor left" in told()

    try:
        eventually(none_left, what="it says so")
        for _ in range(4):  # rounds; the limit is three
            last = fed_us()
            eventually(lambda last=last: fed_us() > last, what="it is fed")  # type: ignore[misc]  # bound above
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
    eventually(lambda: told() == "tiny ready", what="all is well again")
    assert service.main_pid() == pid
    assert tiny(service)["state"] == "ready"
    assert systemctl("is-active", DAEMON_UNIT).strip() == "active"
