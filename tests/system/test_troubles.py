"""Trouble around the daemon: a bus that does not answer, a systemd that begins anew, hands on the units themselves."""

from __future__ import annotations

import json
import os
import resource
import shlex
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.engine import install_fake_engine, set_behaviour
from tests.fakes.gated import Gate
from tests.fakes.gguf_files import write_llama
from tests.system.harness import (
    BIN,
    DAEMON_UNIT,
    Service,
    UnixConnection,
    eventually,
    model_units,
    properties,
    running,
    systemctl,
    until_no_units,
)

pytestmark = pytest.mark.system
BUS_UNIT = "dbus.service"


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[Service]:
    """A daemon with a fake engine that behaves, and one small model."""
    engine = install_fake_engine(tmp_path / "engine")
    made = Service(tmp_path, {"llama_dir": str(engine), "stop_timeout_s": "2"})
    write_llama(made.models_dir / "tiny" / "tiny.gguf", head_count=2, kv_head_count=1)
    with running(made) as started:
        yield started


def status_of(service: Service) -> dict[str, Any]:
    status: dict[str, Any] = service.request("GET", "/v1/status").json()
    return status


def charged_bytes(service: Service) -> int:
    charged: int = service.request("GET", "/v1/status").json()["card"]["reserved_by_us_bytes"]
    return charged


def test_an_engine_whose_start_was_not_answered_is_not_lost(fake: Service) -> None:
    """The bus hangs while the unit is asked for, and delivers the request later."""
    fake.request(
        "POST", "/v1/plan", {"model": "tiny"}
    )  # so that the engine is known and the start comes at once
    bus = int(properties(BUS_UNIT, "MainPID").get("MainPID", "0"))
    if bus == 0:
        pytest.skip(f"this session bus is not {BUS_UNIT}")
    os.kill(bus, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        try:
            load = pool.submit(fake.load, "tiny")
            problem = eventually(lambda: status_of(fake)["bus_problem"], what="it is said")
            assert problem["code"] == "bus_unavailable"
        finally:
            os.kill(bus, signal.SIGCONT)
        assert load.result(60)[-1]["kind"] == "ready"
    eventually(lambda: status_of(fake)["bus_problem"] is None, what="it is said no more")
    assert list(model_units()) == [fake.instances()["tiny"]["unit"]]
    assert charged_bytes(fake) > 0
    fake.ctl("unload", "tiny")
    assert model_units() == {}
    assert charged_bytes(fake) == 0


def test_what_happens_while_the_bus_is_gone_is_found_out_afterwards(fake: Service) -> None:
    bus = int(properties(BUS_UNIT, "MainPID").get("MainPID", "0"))
    if bus == 0:
        pytest.skip(f"this session bus is not {BUS_UNIT}")
    engine = fake.load("tiny")[-1]["instance"]["main_pid"]
    os.kill(bus, signal.SIGSTOP)  # so that nobody is told
    os.kill(engine, signal.SIGKILL)
    eventually(lambda: not Path(f"/proc/{engine}").exists(), what="the engine has ended")
    os.kill(bus, signal.SIGKILL)
    eventually(lambda: fake.state("tiny") == "failed", what="its end is found out")
    failure = fake.instances()["tiny"]["failure"]
    assert "SIGKILL" in json.dumps(failure), failure
    eventually(lambda: status_of(fake)["bus_problem"] is None, what="systemd is reached again")
    lines = fake.request("GET", "/v1/events").body.splitlines()
    told = [event["message"] for event in map(json.loads, lines) if event["kind"] == "bus"]
    assert "cannot be reached" in told[0] and "is reached again" in told[-1]
    fake.ctl("reset", "tiny")
    eventually(lambda: fake.state("tiny") == "ready", what="and all works again")


def test_an_unload_while_systemd_begins_anew(fake: Service) -> None:
    """`systemctl daemon-reexec`, as an upgrade does: requests meanwhile are lost, and repeated."""
    for _ in range(3):
        fake.load("tiny")
        with ThreadPoolExecutor(1) as pool:
            unload = pool.submit(fake.ctl, "unload", "tiny")
            for _ in range(3):
                systemctl("daemon-reexec", check=False)
            unload.result(100)
        assert model_units() == {}
        assert fake.instances() == {}


def test_a_restart_of_a_loading_unit_by_hand_leaves_nobody_waiting(fake: Service) -> None:
    set_behaviour(fake.directory / "engine", load_held=True)
    with ThreadPoolExecutor(1) as pool:
        load = pool.submit(fake.load, "tiny")
        (unit,) = eventually(lambda: list(model_units()))
        eventually(lambda: fake.state("tiny") == "loading")
        systemctl("restart", unit, check=False)  # the daemon's stop may be faster than the start
        assert load.result(60)[-1]["problem"]["code"] == "load_cancelled"
    eventually(lambda: fake.instances() == {} or None, what="the end of the instance")
    until_no_units()
    set_behaviour(fake.directory / "engine")
    assert fake.load("tiny")[-1]["kind"] == "ready"


def test_a_record_in_a_foreign_unit_does_not_keep_the_daemon_from_starting(fake: Service) -> None:
    """Somebody's unit with our prefix and a copy of our record, under another model's name."""
    ours = fake.load("tiny")[-1]["instance"]
    assignments = shlex.split(systemctl("show", ours["unit"], "--property=Environment", "--value"))
    record = next(item for item in assignments if item.startswith("LLLM3090_RECORD="))
    forged = json.loads(record.partition("=")[2]) | {"name": "another"}
    foreign = "lllm3090-x-y.service"
    command = ["systemd-run", "--user", f"--unit={foreign}", "-E", "LLLM3090_RECORD=" + json.dumps(forged)]
    subprocess.run([*command, "sleep", "1000"], check=True, capture_output=True)
    try:
        old = fake.main_pid()
        os.kill(old, signal.SIGKILL)
        eventually(lambda: fake.main_pid() not in {0, old})
        assert set(fake.instances()) == {"tiny"}
        assert fake.instances()["tiny"]["main_pid"] == ours["main_pid"]
        assert properties(foreign, "ActiveState") == {"ActiveState": "active"}
    finally:
        systemctl("stop", foreign)
    assert properties(DAEMON_UNIT, "ActiveState") == {"ActiveState": "active"}


def test_a_name_that_is_no_utf8_does_not_hide_the_other_models(fake: Service) -> None:
    directory = os.fsencode(fake.models_dir) + b"/caf\xe9"
    os.mkdir(directory)  # noqa: PTH102 - pathlib has no bytes
    os.link(fake.models_dir / "tiny" / "tiny.gguf", directory + b"/x.gguf")
    models = {model["name"] for model in fake.request("GET", "/v1/models").json()["models"]}
    assert models == {"tiny", "caf\\xe9"}
    answer = fake.request("POST", "/v1/load", {"model": "caf\\xe9"})
    assert 400 <= answer.status < 500
    assert "not valid UTF-8" in answer.json()["detail"]
    assert fake.ctl("models").returncode == 0


def test_a_body_that_is_not_what_its_encoding_says(fake: Service) -> None:
    connection = UnixConnection(fake.control_socket)
    connection.request("POST", "/v1/plan", b"hello", {"Content-Encoding": "gzip"})
    answer = connection.getresponse()
    assert (answer.status, json.loads(answer.read())["code"]) == (400, "not_json")
    connection.close()


def test_a_load_that_is_looked_up_is_answered_when_the_daemon_stops(fake: Service) -> None:
    server = fake.directory / "engine" / "llama-server"
    server.unlink()
    gate = Gate(server, "exit 3")
    with ThreadPoolExecutor(1) as pool:
        load = pool.submit(fake.load, "tiny")
        gate.wait_for_one()  # the engine is being asked what it can do
        fake.stop()
        assert load.result(60)[-1]["code"] == "shutting_down"
    assert model_units() == {}


def test_a_second_daemon_with_sockets_elsewhere_is_refused(fake: Service) -> None:
    """It would see the same units and the same card, and admit against a ledger of its own."""
    elsewhere = Path(os.environ["XDG_RUNTIME_DIR"]) / "elsewhere"
    done = subprocess.run(
        [str(BIN / "lllm3090d")],
        env=os.environ | {"LLLM3090_RUNTIME_DIR": str(elsewhere)},
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert done.returncode == 69
    assert str(fake.main_pid()) in done.stderr


def test_files_for_more_than_a_thousand_clients(fake: Service) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # ours; the daemon must see to its own
    clients = []
    try:
        for _ in range(1100):
            client = socket.socket(socket.AF_UNIX)
            clients.append(client)
            client.connect(str(fake.control_socket))
        assert fake.request("GET", "/v1/version").status == 200
    finally:
        for client in clients:
            client.close()


@pytest.mark.parametrize(
    "body", ['{"model": "tiny", "parallel": true}', '{"model": "tiny", "parallel": "2"}']
)
def test_numbers_are_numbers(fake: Service, body: str) -> None:
    answer = fake.request("POST", "/v1/plan", body.encode())
    assert (answer.status, answer.json()["code"]) == (422, "invalid_request")


def test_a_file_whose_path_is_no_utf8_is_inspected(fake: Service) -> None:
    folder = os.fsencode(fake.directory) + b"/caf\xe9 %"
    os.mkdir(folder)  # noqa: PTH102 - pathlib has no bytes
    os.link(fake.models_dir / "tiny" / "tiny.gguf", folder + b"/x\xff.gguf")
    view = fake.ctl_json("inspect", os.fsdecode(folder + b"/x\xff.gguf"))
    assert view["path"] == f"{fake.directory}/caf\\xe9 %/x\\xff.gguf"
    assert view["layers"] == fake.ctl_json("inspect", "tiny")["layers"]
    missing = fake.ctl("inspect", os.fsdecode(folder + b"/no\xfe"), check=False)
    assert missing.returncode == 4
    assert "no\\xfe is not there" in missing.stderr


@pytest.mark.parametrize("command", ["inspect", "plan", "load", "unload", "logs"])
def test_a_name_that_is_no_utf8_is_answered(fake: Service, command: str) -> None:
    done = fake.ctl(command, os.fsdecode(b"nobody\xff"), check=False)
    assert done.returncode == 4
    assert "nobody\\" in done.stderr
    assert "Hint: " in done.stderr


@pytest.mark.parametrize("target", ["/v1/events?follow=1", "/v1/instances/tiny/logs?follow=1"])
def test_the_head_of_a_stream_ends(fake: Service, target: str) -> None:
    fake.load("tiny")
    answer = fake.request("HEAD", target)
    assert (answer.status, answer.content_type, answer.body) == (200, "application/x-ndjson", b"")


def test_a_runtime_directory_that_is_deleted_can_be_made_anew(fake: Service) -> None:
    """The hint of the client works, and no model is disturbed."""
    fake.load("tiny")
    pid = fake.instances()["tiny"]["main_pid"]
    shutil.rmtree(fake.runtime_dir)
    lost = fake.ctl("ps", check=False)
    assert lost.returncode == 3
    (hint,) = [line for line in lost.stderr.splitlines() if line.startswith("Hint: ")]
    subprocess.run(shlex.split(hint.rpartition(": ")[2]), check=True, timeout=60)
    assert [item["main_pid"] for item in fake.ctl_json("ps")["instances"]] == [pid]
    assert fake.main_pid() > 0


def test_a_state_file_that_is_deleted_is_told_and_made_anew(fake: Service) -> None:
    assert "state_problem" not in {k for k, v in fake.ctl_json("status").items() if v}
    state = fake.directory / "state"
    shutil.rmtree(state)
    assert "removed or replaced" in fake.ctl_json("status")["state_problem"]["detail"]
    assert (state / "lllm3090.db").exists()
