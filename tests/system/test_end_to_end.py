"""From nothing to an answer with real parts only: real systemd, real D-Bus, real llama-server, real checkpoints."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.system.conftest import put_model
from tests.system.harness import (
    BIN,
    DAEMON_UNIT,
    Service,
    ask,
    eventually,
    http_request,
    model_units,
    properties,
    systemctl,
)

pytestmark = pytest.mark.system
NAME = "SmolLM2-135M-Instruct"


def load_small(service: Service, name: str = "smollm2", context: int = 2048) -> dict[str, Any]:
    lines = service.load(name, context_tokens=context)
    assert lines[-1]["kind"] == "ready", lines
    instance: dict[str, Any] = lines[-1]["instance"]
    return instance


def test_load_answer_unload(service: Service) -> None:
    """The main trip, by the client, with one transient unit in our slice."""
    shown = service.ctl("load", "smollm2", "--context", "2048")
    assert NAME in shown.stdout + shown.stderr
    (unit,) = model_units()
    facts = properties(
        unit, "Slice", "Transient", "Type", "Restart", "OOMPolicy", "ControlGroup", "MemoryMax"
    )
    assert facts["Slice"] == "lllm3090.slice"
    assert facts["Transient"] == "yes"
    assert facts["Type"] == "exec"
    assert facts["Restart"] == "no"
    assert facts["OOMPolicy"] == "stop"
    assert facts["MemoryMax"].isdecimal()
    instance = service.instances()[NAME]
    assert instance["state"] == "ready"
    assert instance["unit"] == unit
    assert instance["context_tokens"] == 2048
    reply = ask(instance["endpoint"], "What is the capital of France?")
    assert reply["choices"][0]["message"]["content"]
    assert reply["model"] == NAME
    asked = service.ctl("chat", "smollm2", "What is the capital of France?", "--max-tokens", "12", "-v")
    assert asked.stdout.strip() and "of answer" in asked.stderr and "tokens/s" in asked.stderr
    assert NAME in service.ctl("ps").stdout
    service.ctl("unload", "smollm2")
    assert service.instances() == {}
    assert model_units() == {}
    assert not Path(instance["endpoint"]).exists()


def test_stream_of_a_load(service: Service) -> None:
    lines = service.load("smollm2", context_tokens=2048)
    kinds = [line["kind"] for line in lines]
    assert kinds[0] == "admitted"
    assert kinds[-1] == "ready"
    states = [line["state"] for line in lines if line["kind"] == "state"]
    assert "loading" in states
    instance = lines[-1]["instance"]
    assert instance["measured_bytes"] > 50 << 20
    assert instance["measured_bytes"] <= instance["reserved_bytes"]
    # Loading what is loaded is answered at once, with the same engine.
    again = service.load("smollm2")
    assert [line["kind"] for line in again] == ["ready"]
    assert again[0]["instance"]["main_pid"] == instance["main_pid"]


def test_kill_9_of_the_daemon_disturbs_nobody(service: Service) -> None:
    instance = load_small(service)
    failures: list[str] = []
    asked = 0
    done = threading.Event()

    def poll() -> None:
        nonlocal asked
        while not done.is_set():
            try:
                answer = http_request(instance["endpoint"], "GET", "/health")
                if answer.status != 200:
                    failures.append(f"status {answer.status}")
            except OSError as error:
                failures.append(repr(error))
            asked += 1
            done.wait(0.05)

    poller = threading.Thread(target=poll)
    poller.start()
    try:
        old = service.main_pid()
        for _ in range(3):
            os.kill(old, signal.SIGKILL)
            new = eventually(lambda old=old: (pid := service.main_pid()) != old and pid, what="a new daemon")
            eventually(lambda: properties(DAEMON_UNIT, "ActiveState")["ActiveState"] == "active")
            adopted = service.instances()[NAME]
            assert adopted["state"] in {"ready", "busy"}  # what it was asked a moment ago may not be over
            assert adopted["adopted"] is True
            assert adopted["main_pid"] == instance["main_pid"]
            assert adopted["invocation_id"] == instance["invocation_id"]
            assert adopted["reserved_bytes"] == instance["reserved_bytes"]
            old = new
        eventually(lambda: asked > 10, what="it was asked often")
    finally:
        done.set()
        poller.join()
    assert failures == []
    assert len(model_units()) == 1
    service.ctl("unload", NAME)
    assert model_units() == {}


def test_a_graceful_stop_leaves_models_running(service: Service) -> None:
    instance = load_small(service)
    service.stop()
    assert http_request(instance["endpoint"], "GET", "/health").status == 200
    service.start()
    assert service.instances()[NAME]["main_pid"] == instance["main_pid"]


def test_a_stop_takes_the_models_along_when_told_so(service: Service) -> None:
    service.config_file.write_text("stop_models_on_exit = true\n")
    service.reload()
    load_small(service)
    service.stop()
    assert model_units() == {}


def test_two_models_side_by_side(service: Service, gemma3_path: Path) -> None:
    put_model(service, "gemma-3-270m", gemma3_path)
    first = load_small(service)
    second = load_small(service, "gemma")
    assert second["name"] == "gemma-3-270m"
    for instance in (first, second):
        assert ask(instance["endpoint"], "Say hello.")["choices"][0]["message"]["content"]
    service.ctl("unload", "gemma")
    assert ask(first["endpoint"], "Say hello.")["choices"]
    assert set(service.instances()) == {NAME}


def test_simultaneous_loads_share_one_engine(service: Service) -> None:
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: service.load("smollm2", context_tokens=2048), range(4)))
    assert {lines[-1]["kind"] for lines in answers} == {"ready"}
    assert len({lines[-1]["instance"]["main_pid"] for lines in answers}) == 1
    assert len(model_units()) == 1


def test_socket_activation(service: Service) -> None:
    service.stop()
    systemctl("start", "lllm3090d.socket")
    socket_file = service.control_socket
    assert socket_file.stat().st_mode & 0o777 == 0o600
    assert socket_file.parent.stat().st_mode & 0o777 == 0o700
    # A shell that completes a word asks for names, and starts nothing by that.
    silent = service.ctl("--names", "models", check=False)
    assert (silent.returncode, silent.stdout, silent.stderr) == (1, "", "")
    assert service.main_pid() == 0
    assert service.ctl_json("status")["pid"] == service.main_pid() > 0
    models = [each["name"] for each in service.ctl_json("models")["models"]]
    assert service.ctl("--names", "models").stdout.splitlines() == sorted(models)


def test_a_second_daemon_is_refused(service: Service) -> None:
    environment = os.environ | {"LLLM3090_MODELS_DIR": str(service.models_dir)}
    second = subprocess.run(
        [str(BIN / "lllm3090d")], capture_output=True, text=True, check=False, env=environment, timeout=30
    )
    assert second.returncode == 69
    assert "another lllm3090d" in second.stderr
    assert service.request("GET", "/v1/version").status == 200


def test_systemd_is_told_what_goes_on(service: Service) -> None:
    told = properties(DAEMON_UNIT, "StatusText", "Type", "WatchdogUSec", "NotifyAccess")
    assert told["Type"] == "notify"
    assert told["StatusText"] == "no models loaded"
    assert told["WatchdogUSec"] != "0"
    load_small(service)
    eventually(lambda: f"{NAME} ready" in properties(DAEMON_UNIT, "StatusText")["StatusText"])


def test_reload_applies_good_settings_and_survives_bad_ones(service: Service) -> None:
    service.config_file.write_text('[aliases]\ntiny = "SmolLM2-135M-Instruct"\n')
    service.reload()
    assert service.request("POST", "/v1/plan", {"model": "tiny"}).status == 200
    service.config_file.write_text("modles_dir = '/nowhere'\n")
    systemctl("reload", DAEMON_UNIT, check=False)
    eventually(lambda: "old ones stay" in properties(DAEMON_UNIT, "StatusText")["StatusText"])
    assert service.request("POST", "/v1/plan", {"model": "tiny"}).status == 200
    events = [json.loads(line) for line in service.request("GET", "/v1/events").body.splitlines()]
    (bad,) = [e for e in events if e["kind"] == "settings" and e["message"].startswith("kept")]
    assert "modles_dir" in bad["message"]
    assert str(service.config_file) in bad["message"]


def test_bad_settings_at_start_are_explained(service: Service) -> None:
    service.stop()
    service.config_file.write_text("cache_type = 'q9_9'\n")
    systemctl("start", DAEMON_UNIT, check=False)
    facts = properties(DAEMON_UNIT, "ActiveState", "ExecMainStatus")
    assert facts == {"ActiveState": "failed", "ExecMainStatus": "78"}
    words = ("cache_type", "q8_0")  # what is wrong, and what there is
    eventually(lambda: all(word in service.journal() for word in words), what=f"{words} in the journal")
    service.config_file.unlink()


def test_logs_of_an_engine(service: Service) -> None:
    load_small(service)

    def tells() -> bool:
        lines = service.request("GET", f"/v1/instances/{NAME}/logs?lines=500").body.splitlines()
        texts = [json.loads(line)["message"] for line in lines]
        return any("llama" in text or "srv" in text for text in texts)

    eventually(tells, what="journald has its lines")
    assert service.request("GET", f"/v1/instances/{NAME}/logs?lines=0").body == b""
    assert service.ctl("logs", NAME, "-n", "5").stdout


def test_an_unload_by_systemctl_is_seen(service: Service) -> None:
    instance = load_small(service)
    systemctl("stop", instance["unit"])
    eventually(lambda: service.instances() == {}, what="the instance to go")
    assert load_small(service)["run"] != instance["run"]


def test_reload_of_systemd_disturbs_nobody(service: Service) -> None:
    instance = load_small(service)
    systemctl("daemon-reload")
    systemctl("daemon-reexec")
    events = eventually(
        lambda: [
            line
            for line in service.request("GET", "/v1/events").body.splitlines()
            if json.loads(line)["kind"] == "reconciled"
        ]
    )
    assert events
    assert service.state(NAME) in {"ready", "busy"}
    assert service.instances()[NAME]["main_pid"] == instance["main_pid"]
    service.ctl("unload", NAME)
    assert model_units() == {}


@contextlib.contextmanager
def caught_loading(service: Service, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A client whose load of gemma is under way, and does not come to its end before this does."""
    command = [str(BIN / "lllm3090ctl"), "load", "gemma", "--context", "1024", *options]
    while True:
        client = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        (unit,) = eventually(lambda: list(model_units()), what="the unit")
        pid = eventually(lambda: int(properties(unit, "MainPID")["MainPID"]), what="its process")  # noqa: B023
        os.kill(pid, signal.SIGSTOP)
        if service.state("gemma-3-270m") in {"starting", "loading"}:
            break
        os.kill(pid, signal.SIGCONT)  # it was quicker
        client.communicate(timeout=60)
        service.ctl("unload", "gemma")
    try:
        yield client
    finally:
        with contextlib.suppress(ProcessLookupError):  # it was unloaded
            os.kill(pid, signal.SIGCONT)
        client.kill()
        client.communicate()


def test_adoption_while_loading(service: Service, gemma3_path: Path) -> None:
    """The daemon dies as soon as the unit exists; its successor waits for the engine and reports it ready."""
    put_model(service, "gemma-3-270m", gemma3_path)
    with caught_loading(service) as loading:
        old = service.main_pid()
        os.kill(old, signal.SIGKILL)
        loading.communicate(timeout=60)
        assert loading.returncode != 0
        eventually(lambda: service.main_pid() not in {0, old}, what="the daemon is back")
        eventually(lambda: properties(DAEMON_UNIT, "ActiveState")["ActiveState"] == "active")
        assert service.state("gemma-3-270m") in {"starting", "loading"}
    eventually(lambda: service.state("gemma-3-270m") == "ready", what="gemma to be ready")
    assert len(model_units()) == 1


@pytest.mark.parametrize("name", ["with space", 'it\'s "quoted"', "$HOME;ls", "ünicôde", "semi;colon"])
def test_paths_with_every_nasty_character(service: Service, smollm2_path: Path, name: str) -> None:
    put_model(service, name, smollm2_path)
    instance = load_small(service, name)
    assert instance["name"] == name
    assert ask(instance["endpoint"], "Hi")["choices"]
    # A reload makes systemd read the unit from its own file again: it must still be the same unit.
    systemctl("daemon-reload")
    assert service.state(name) in {"ready", "busy"}  # the daemon may not have looked since the answer
    service.ctl("unload", name)
    assert model_units() == {}


def test_an_interrupted_client_leaves_the_load_to_the_daemon(service: Service, gemma3_path: Path) -> None:
    put_model(service, "gemma-3-270m", gemma3_path)
    with caught_loading(service) as client:
        client.send_signal(signal.SIGINT)
        out, err = client.communicate(timeout=60)
        assert client.returncode == 130
        assert "goes on" in out + err
    eventually(lambda: service.state("gemma-3-270m") == "ready")


def test_an_interrupted_client_can_take_the_load_along(service: Service, gemma3_path: Path) -> None:
    put_model(service, "gemma-3-270m", gemma3_path)
    with caught_loading(service, "--cancel-on-interrupt") as client:
        client.send_signal(signal.SIGINT)
        client.communicate(timeout=60)
        assert client.returncode == 130
        eventually(lambda: model_units() == {}, what="the unit to go")
        eventually(lambda: service.instances() == {}, what="the daemon to have seen it")


def test_idle_daemon_is_small(service: Service) -> None:
    """At most 90 MiB resident (bench.idle aims at 80); gguf and numpy are not imported at start."""
    pid = service.main_pid()
    status = Path(f"/proc/{pid}/status").read_text()
    resident_kib = int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])
    if not any(key.startswith("COVERAGE_") for key in os.environ):
        assert resident_kib <= 90 * 1024
    maps = Path(f"/proc/{pid}/maps").read_text()
    assert "numpy" not in maps


def test_events_can_be_followed(service: Service) -> None:
    command = [str(BIN / "lllm3090ctl"), "events", "-f", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as follower:
        load_small(service)
        seen: list[str] = []
        assert follower.stdout is not None
        while "ready" not in seen:
            event = json.loads(follower.stdout.readline())
            if event["kind"] == "state":
                seen.append(event["state"])
        follower.terminate()
    assert seen[:2] == ["reserved", "starting"]


def test_curl_is_enough(service: Service) -> None:
    document = service.request("GET", "/v1/openapi.json").json()
    assert "/v1/load" in document["paths"]
    status = service.request("GET", "/v1/status").json()
    assert status["card"]["kind"] == "cpu"
    assert status["engine"]["backend"] == "cpu"
    models = service.request("GET", "/v1/models").json()["models"]
    assert [model["name"] for model in models] == [NAME]
    plan = service.request("POST", "/v1/plan", {"model": "smollm2"}).json()
    assert plan["fits"] is True
    assert plan["window_tokens"] == 8192
    assert plan["context_tokens"] == plan["parallel"] * 8192
    assert plan["card_bytes"] == sum(item["bytes"] for item in plan["items"] if item["place"] == "card")
    assert plan["available_bytes"] == sum(line["bytes"] for line in plan["budget"])
