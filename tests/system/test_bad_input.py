"""What people and machines get wrong, through the real client and API: a clear error, and nothing left behind."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.engine import install_fake_engine, set_behaviour
from tests.fakes.gguf_files import write_llama, write_split
from tests.system.harness import (
    BIN,
    DAEMON_UNIT,
    Service,
    eventually,
    http_request,
    model_units,
    properties,
    running,
    systemctl,
    until_no_units,
)

pytestmark = pytest.mark.system
GIB = 1 << 30


def tiny(path: Path) -> Path:
    """A model whose heads, of 32 values, can have a quantised cache."""
    return write_llama(path, head_count=2, kv_head_count=1)


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[Service]:
    """A daemon with a fake engine that behaves, and one small model."""
    engine = install_fake_engine(tmp_path / "engine")
    made = Service(tmp_path, {"llama_dir": str(engine)})
    tiny(made.models_dir / "tiny" / "tiny.gguf")
    with running(made) as started:
        yield started


def behave(service: Service, **behaviour: Any) -> None:
    set_behaviour(service.directory / "engine", **behaviour)


def refused(service: Service, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Run the client with --json; its exit status and the problem document. Nothing may be left behind."""
    done = service.ctl(*arguments, "--json", check=False)
    assert "Traceback" not in done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    eventually(lambda: model_units() == {}, what="no unit")
    problem: dict[str, Any] = last.get("problem") or last
    return done.returncode, problem


# --- names and files ------------------------------------------------------------------------------------------------


def test_unknown_name(fake: Service) -> None:
    status, problem = refused(fake, "load", "tyni")
    assert (status, problem["code"]) == (4, "unknown_model")
    assert "tiny" in problem["detail"] + problem["hint"]


def test_ambiguous_name_lists_candidates(fake: Service) -> None:
    for name in ("Qwen3.8-27B", "Qwen3-8B"):
        tiny(fake.models_dir / name / "model.gguf")
    status, problem = refused(fake, "load", "qwen")
    assert (status, problem["code"]) == (4, "ambiguous_model")
    assert problem["details"]["candidates"] == ["Qwen3-8B", "Qwen3.8-27B"]
    assert fake.request("POST", "/v1/plan", {"model": "qwen-27b"}).json()["model"] == "Qwen3.8-27B"


def html(path: Path) -> None:
    path.write_text("<!DOCTYPE html><html><body>404 Not Found</body></html>")


def short_header(path: Path) -> None:
    data = write_llama(path).read_bytes()
    path.write_bytes(data[:100])


def short_data(path: Path) -> None:
    size = write_llama(path).stat().st_size
    os.truncate(path, size - 1000)


def fifo(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("damage", "word"),
    [(html, "HTML"), (short_header, "at byte"), (short_data, "incomplete"), (fifo, "file")],
)
def test_damaged_files(fake: Service, damage: Any, word: str) -> None:
    directory = fake.models_dir / "broken"
    directory.mkdir()
    damage(directory / "broken.gguf")
    status, problem = refused(fake, "load", "broken")
    if damage is fifo:  # no file, so no model
        assert (status, problem["code"]) == (4, "unknown_model")
        return
    assert (status, problem["code"]) == (7, "bad_checkpoint")
    assert word.lower() in (problem["detail"] + problem.get("hint", "")).lower()
    # It stands in the list with the reason, and the good one is still there.
    models = {model["name"]: model for model in fake.request("GET", "/v1/models").json()["models"]}
    assert models["broken"]["problem"]["code"] == "bad_checkpoint"
    assert models["tiny"]["problem"] is None


def test_missing_shard(fake: Service) -> None:
    shards = write_split(fake.models_dir / "split", "split")
    shards[1].unlink()
    status, problem = refused(fake, "load", "split")
    assert (status, problem["code"]) == (7, "incomplete_checkpoint")
    assert "00002-of-00003" in problem["detail"]


def test_inspect_shows_any_file(fake: Service, tmp_path: Path) -> None:
    """By name and by path, in the library and elsewhere, whole or not; and what it says of anything else."""
    by_name = json.loads(fake.ctl("inspect", "tiny", "--json").stdout)
    assert (by_name["name"], by_name["kind"], by_name["badges"]) == ("tiny", "model", ["dense"])
    assert fake.request("POST", "/v1/inspect", {"path": by_name["path"]}).json() == by_name
    elsewhere = write_split(tmp_path / "elsewhere", "m")
    elsewhere[2].unlink()
    half = fake.ctl("inspect", str(elsewhere[0]))
    assert "00003-of-00003" in half.stdout
    assert "architecture  llama" in half.stdout
    html(tmp_path / "page.gguf")
    page = fake.ctl("inspect", str(tmp_path / "page.gguf"), "--json", check=False)
    assert (page.returncode, json.loads(page.stdout)["code"]) == (7, "bad_checkpoint")
    assert fake.request("POST", "/v1/inspect", {"path": "m.gguf"}).json()["code"] == "invalid_request"
    assert fake.request("POST", "/v1/inspect", {}).json()["code"] == "invalid_request"


def test_empty_and_missing_models_directory(fake: Service) -> None:
    for path in (fake.models_dir / "tiny").iterdir():
        path.unlink()
    status, problem = refused(fake, "load", "tiny")
    assert (status, problem["code"]) == (4, "no_models")
    assert str(fake.models_dir) in problem["detail"] + problem["hint"]
    assert fake.ctl("models").returncode == 0
    (fake.models_dir / "tiny").rmdir()
    fake.models_dir.rmdir()
    status, problem = refused(fake, "load", "tiny")
    assert (status, problem["code"]) == (78, "models_dir_unreadable")
    assert fake.ctl("status").returncode == 0


@pytest.mark.skipif(
    os.getuid() == 0, reason="root may read everything; the run as an ordinary user tests this"
)
def test_unreadable_models_directory(fake: Service) -> None:
    fake.models_dir.chmod(0)
    try:
        status, problem = refused(fake, "load", "tiny")
    finally:
        fake.models_dir.chmod(0o700)
    assert (status, problem["code"]) == (78, "models_dir_unreadable")


def test_twice_the_memory_of_the_machine(fake: Service) -> None:
    total = fake.request("GET", "/v1/status").json()["card"]["total_bytes"]
    layer = 3 * 8192 * 28672 * 34 // 32 + 4 * 8192 * 8192 * 34 // 32
    write_llama(
        fake.models_dir / "huge" / "huge.gguf",
        blocks=2 * total // layer + 1,
        embedding_length=8192,
        head_count=64,
        kv_head_count=64,
        feed_forward_length=28672,
    )
    status, problem = refused(fake, "load", "huge")
    assert (status, problem["code"]) == (5, "insufficient_memory")
    details = problem["details"]
    assert details["needed_bytes"] > 2 * total
    assert details["needed_bytes"] - details["grantable_bytes"] == details["missing_bytes"] > 0
    assert details["needed_bytes"] == sum(item["bytes"] for item in details["items"])
    shown = fake.ctl("load", "huge", check=False)
    assert shown.returncode == 5
    assert "weights" in shown.stdout + shown.stderr
    events = [json.loads(line) for line in fake.request("GET", "/v1/events").body.splitlines()]
    assert [event["kind"] for event in events if event.get("model") == "huge"] == ["refused", "refused"]


# --- engines --------------------------------------------------------------------------------------------------------


def test_engine_missing(fake: Service) -> None:
    (fake.directory / "engine" / "llama-server").unlink()
    status, problem = refused(fake, "load", "tiny")
    assert (status, problem["code"]) == (6, "engine_not_found")
    assert str(fake.directory / "engine") in problem["detail"]
    assert fake.request("GET", "/v1/status").json()["engine_problem"]["code"] == "engine_not_found"


def test_engine_not_executable(fake: Service) -> None:
    (fake.directory / "engine" / "llama-server").chmod(0o644)
    status, problem = refused(fake, "load", "tiny")
    assert (status, problem["code"]) == (6, "engine_not_executable")
    assert "chmod" in problem["hint"]


def test_engine_without_a_needed_flag(fake: Service) -> None:
    behave(fake, missing_flags=("--parallel", "-np"))
    (fake.directory / "engine" / "llama-server").touch()  # the probe is remembered by size and time
    status, problem = refused(fake, "load", "tiny")
    assert (status, problem["code"]) == (6, "engine_unusable")
    assert "--parallel" in problem["detail"]


@pytest.mark.parametrize("ending", [{"exit": 3}, {"signal": "SIGSEGV"}, {"exit": 0}])
def test_engine_dies_while_loading(fake: Service, ending: dict[str, Any]) -> None:
    lines = ["llama_model_load: loading", "error: the dog ate the tensors"]
    behave(fake, load_s=0.2, crash_during_load={**ending, "lines": lines})
    status, problem = refused(fake, "load", "tiny")
    assert (status, problem["code"]) == (6, "engine_failed")
    assert problem["details"]["last_lines"][-1] == lines[-1]
    assert ("SIGSEGV" if "signal" in ending else f"status {ending['exit']}") in problem["detail"]
    assert fake.state("tiny") == "failed"
    # The next one is admitted as if nothing had been.
    behave(fake)
    assert fake.load("tiny")[-1]["kind"] == "ready"


def test_engine_dies_while_serving(fake: Service) -> None:
    instance = fake.load("tiny")[-1]["instance"]
    behave(fake, crash_after_tokens=1)
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "stream": True}).encode()
    # However much of the answer arrives, the engine is gone behind it.
    with contextlib.suppress(OSError, http.client.HTTPException):
        http_request(instance["endpoint"], "POST", "/v1/chat/completions", body)
    eventually(lambda: fake.state("tiny") == "failed", what="the failure")
    failure = fake.instances()["tiny"]["failure"]
    assert failure["code"] == "engine_failed"
    assert fake.ctl("ps").returncode == 0
    # A failure can be forgotten.
    fake.ctl("unload", "tiny")
    assert fake.instances() == {}
    until_no_units()


def test_engine_that_ignores_sigterm(fake: Service) -> None:
    fake.configure(stop_timeout_s="1")
    systemctl("restart", DAEMON_UNIT)
    behave(fake, ignore_sigterm=True)
    assert fake.load("tiny")[-1]["kind"] == "ready"
    fake.ctl("unload", "tiny")
    assert fake.instances() == {}
    until_no_units()  # it has failed, for it had to be killed


def test_load_without_progress_is_given_up(fake: Service) -> None:
    fake.configure(load_timeout_s="1")
    systemctl("restart", DAEMON_UNIT)
    behave(fake, load_s=600)
    status, problem = refused(fake, "load", "tiny")
    assert (status, problem["code"]) == (8, "load_timed_out")


def test_memory_max_ends_an_engine_that_takes_more(fake: Service) -> None:
    instance = fake.load("tiny")[-1]["instance"]
    limit = int(properties(instance["unit"], "MemoryMax")["MemoryMax"])
    counted = properties(instance["unit"], "MemoryCurrent")["MemoryCurrent"]
    fake.ctl("unload", "tiny")
    if not counted.isdecimal():
        pytest.skip("no memory controller reaches this user manager; systemd cannot enforce MemoryMax here")
    behave(fake, load_s=0.5, host_mib=(limit >> 20) + 300)
    status, problem = refused(fake, "load", "tiny")
    assert (status, problem["code"]) == (6, "engine_failed")
    assert "memory" in problem["detail"]


# --- requests -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["/v1/load", "/v1/plan", "/v1/unload", "/v1/cancel"])
def test_bodies_that_are_not_what_is_asked(fake: Service, target: str) -> None:
    for body, code, http_status in [
        (b"model=tiny", "not_json", 400),
        (b"\xff\xfe", "not_json", 400),
        (b"", "not_json", 400),
        (b"[]", "invalid_request", 422),
        (b'{"model": "tiny", "modle": 1, "token": "12345678"}', "invalid_request", 422),
        (b'{"model": 7}', "invalid_request", 422),
        (b'{"model": ""}', "invalid_request", 422),
    ]:
        answer = fake.request("POST", target, body)
        assert (answer.status, answer.json()["code"]) == (http_status, code), body
        assert answer.content_type == "application/problem+json"
        assert {"type", "title", "status", "detail", "exit_status"} <= answer.json().keys()
    deep = fake.request("POST", target, b"[" * 100_000)
    assert deep.json()["code"] in {"not_json", "invalid_request"}
    large = fake.request("POST", target, b'{"model": "' + b"a" * (2 << 20) + b'"}')
    assert large.json()["code"] == "invalid_request"


@pytest.mark.parametrize(
    "options",
    [
        {"context_tokens": 0},
        {"context_tokens": -1},
        {"context_tokens": 1 << 40},
        {"parallel": 0},
        {"parallel": 1000},
        {"cache_type": "q9_9"},
        {"context_tokens": 1 << 20},
        {"context_tokens": 2048, "parallel": 64},
    ],
)
def test_sizes_that_cannot_be(fake: Service, options: dict[str, Any]) -> None:
    answer = fake.request("POST", "/v1/load", {"model": "tiny", **options})
    assert answer.status == 422
    assert answer.json()["code"] in {"invalid_request", "unsupported_combination"}
    assert model_units() == {}


def test_addresses_that_are_not_there(fake: Service) -> None:
    assert fake.request("GET", "/v1/nothing").json()["code"] == "no_such_route"
    assert fake.request("GET", "/v1/load").json()["code"] == "no_such_route"
    assert fake.request("GET", "/v1/instances/tiny/logs").json()["code"] == "not_loaded"
    assert fake.request("GET", "/v1/events?since=x").json()["code"] == "invalid_request"
    assert fake.request("POST", "/v1/unload", {"model": "tiny"}).json()["code"] == "not_loaded"
    token = {"token": "no-such-token"}
    assert fake.request("POST", "/v1/cancel", token).json()["code"] == "no_such_load"


def test_other_sizes_than_those_that_run(fake: Service) -> None:
    assert fake.load("tiny", context_tokens=1024)[-1]["kind"] == "ready"
    answer = fake.request("POST", "/v1/load", {"model": "tiny", "context_tokens": 2048})
    assert answer.json()["code"] == "loaded_differently"
    assert len(model_units()) == 1


def test_one_of_two_waiters_withdraws(fake: Service) -> None:
    """The load goes on for the other; when that one leaves too, the engine is stopped."""
    behave(fake, load_s=600)
    clients = [
        subprocess.Popen(
            [str(BIN / "lllm3090ctl"), "load", "tiny", "--cancel-on-interrupt", "--json"],
            stdout=subprocess.PIPE,
        )
        for _ in range(2)
    ]
    try:
        for client in clients:
            assert client.stdout is not None
            assert client.stdout.readline()  # it is admitted, or has joined
        eventually(lambda: fake.state("tiny") == "loading")
        clients[0].terminate()
        clients[0].wait(60)
        assert fake.state("tiny") == "loading"
        clients[1].terminate()
        clients[1].wait(60)
        eventually(lambda: model_units() == {}, what="the engine to go")
    finally:
        for client in clients:
            client.kill()
            client.communicate()


def test_load_while_unloading(fake: Service) -> None:
    fake.configure(stop_timeout_s="300")  # the test itself ends the engine
    systemctl("restart", DAEMON_UNIT)
    behave(fake, ignore_sigterm=True)
    first = fake.load("tiny")[-1]["instance"]
    command = [str(BIN / "lllm3090ctl"), "unload", "tiny"]
    with ThreadPoolExecutor(1) as clients, subprocess.Popen(command, stdout=subprocess.PIPE) as unload:
        eventually(lambda: fake.state("tiny") == "stopping")
        behave(fake)
        load = clients.submit(fake.load, "tiny")
        # Looked up behind the load, so that one has come by then.
        assert fake.request("POST", "/v1/plan", {"model": "tiny"}).status == 200
        os.kill(first["main_pid"], signal.SIGKILL)
        lines = load.result(60)
        assert unload.wait(60) == 0
    assert lines[-1]["kind"] == "ready"
    assert lines[-1]["instance"]["run"] != first["run"]
    assert list(model_units()) == [lines[-1]["instance"]["unit"]]


# --- who may ask ----------------------------------------------------------------------------------------------------

STRANGER = textwrap.dedent(
    """
    import ctypes, os, socket, sys
    # Keep the power to open any path while the user id, which the kernel tells the daemon, is another.
    PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP = 28, 4
    assert ctypes.CDLL(None).prctl(PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP, 0, 0, 0) == 0
    os.setresuid(54321, 54321, 54321)
    client = socket.socket(socket.AF_UNIX)
    client.connect(sys.argv[1])
    client.sendall(b"GET /v1/status HTTP/1.1\\r\\nHost: x\\r\\nConnection: close\\r\\n\\r\\n")
    answer = b""
    while part := client.recv(65536):
        answer += part
    sys.stdout.buffer.write(answer)
    """
)


@pytest.mark.skipif(
    os.getuid() != 0, reason="only root can pass for another user; the run as root tests this"
)
def test_another_user_is_refused(fake: Service) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STRANGER, str(fake.control_socket)],
        capture_output=True,
        check=True,
        timeout=30,
    )
    head, _, body = done.stdout.partition(b"\r\n\r\n")
    assert b" 403 " in head.splitlines()[0]
    assert json.loads(body)["code"] == "forbidden_peer"


# --- start-up -------------------------------------------------------------------------------------------------------


def test_runtime_directory_too_long_for_sockets(fake: Service) -> None:
    fake.stop()
    long = Path(os.environ["XDG_RUNTIME_DIR"]) / ("d" * 100)
    done = subprocess.run(
        [str(BIN / "lllm3090d")],
        env=os.environ | {"LLLM3090_RUNTIME_DIR": str(long)},
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert done.returncode == 78
    assert "107" in done.stderr
    assert not long.exists()


def test_no_daemon(fake: Service) -> None:
    fake.stop()
    done = fake.ctl("ps", check=False)
    assert done.returncode == 3
    assert "systemctl --user start lllm3090d" in done.stderr
