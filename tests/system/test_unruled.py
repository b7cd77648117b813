"""A model without a rule, with real parts only: planned by the engine's dry run, loaded, asked, adopted, unloaded."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.fakes.engine import install_fake_engine
from tests.fakes.gated import Gate
from tests.fakes.renamed_model import write_renamed
from tests.system.harness import (
    DAEMON_UNIT,
    SOCKET_UNIT,
    Service,
    ask,
    eventually,
    http_request,
    is_there,
    model_units,
    properties,
    running,
    systemctl,
)

pytestmark = pytest.mark.system

NAME = "Looped"
STOP_S = 15.0  # as in test_hung_engines


@pytest.fixture
def service(tmp_path: Path, llama_server: Path, smollm2_path: Path) -> Iterator[Service]:
    """The real engine, and a model of an architecture that it knows and no rule here does."""
    made = Service(tmp_path, {"llama_dir": str(llama_server.parent)})
    write_renamed(smollm2_path, made.models_dir / NAME / "m.gguf", "nanbeige", {"num_loops": 2})
    with running(made) as started:
        yield started


def test_from_a_plan_to_an_adoption(service: Service) -> None:
    listed = service.ctl("models").stdout
    assert "dry-run" in listed
    assert "no rule prices it" in listed
    assert "runs through its blocks several times" in service.ctl("inspect", NAME).stdout
    shown = service.ctl("plan", NAME, "--context", "4000", "--explain").stdout
    assert "priced by a dry run of this engine alone" in " ".join(shown.split())
    lines = service.load(NAME, context_tokens=4000)
    assert lines[0]["kind"] == "admitted"
    assert lines[0]["plan"]["evidence"] == "engine"
    assert lines[-1]["kind"] == "ready", lines
    instance = lines[-1]["instance"]
    assert instance["context_tokens"] == 4096
    assert 50 << 20 < instance["measured_bytes"] <= instance["reserved_bytes"]
    assert http_request(instance["endpoint"], "GET", "/health").status == 200
    assert ask(instance["endpoint"], "What is the capital of France?")["choices"]

    pid, (unit,) = service.main_pid(), model_units()
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: service.main_pid() not in {0, pid}, what="the daemon is back")
    adopted = eventually(lambda: service.instances().get(NAME), what="it is adopted")
    assert (adopted["state"], adopted["adopted"], adopted["unit"]) == ("ready", True, unit)
    assert adopted["reserved_bytes"] == instance["reserved_bytes"]
    assert [line["kind"] for line in service.load(NAME, context_tokens=4000)] == ["ready"]
    other = service.request("POST", "/v1/load", {"model": NAME, "context_tokens": 2048})
    assert other.json()["code"] == "loaded_differently"
    service.ctl("unload", NAME)
    assert model_units() == {}


def test_what_a_dry_run_does_not_tell_is_refused(service: Service) -> None:
    answer = service.request("POST", "/v1/load", {"model": NAME, "drafting": "on"})
    assert (answer.status, answer.json()["code"]) == (422, "unsupported_combination")
    answer = service.request("POST", "/v1/load", {"model": NAME, "context_tokens": 1 << 20})
    assert answer.json()["code"] == "unsupported_combination"
    assert "trained for 8,192" in answer.json()["detail"]
    assert model_units() == {}


def test_a_load_whose_dry_run_hangs_can_be_cancelled_and_holds_up_no_stop(
    tmp_path: Path, smollm2_path: Path
) -> None:
    engine = install_fake_engine(tmp_path / "engine")
    made = Service(tmp_path, {"llama_dir": str(engine)})
    write_renamed(smollm2_path, made.models_dir / NAME / "m.gguf", "nanbeige")
    options = ("-c", "-np", "-ctk", "-ctv", "-b", "-ub", "-fa", "-nr", "-dev", "-ngl")
    usage = "".join(f"echo '{option} X    an option'; " for option in ("-fitp, --fit-print", *options))
    gate = Gate(
        engine / "llama-fit-params",
        ":",
        first=f'[ "$1" = --help ] && {{ {usage} exit; }}\necho $$ > "$0.pid"',
    )
    with running(made) as service, ThreadPoolExecutor(2) as clients:
        body = {"model": NAME, "token": "first-one"}
        first = clients.submit(service.request, "POST", "/v1/load", body)
        gate.wait_for_one()
        cancelled = service.request("POST", "/v1/cancel", {"token": "first-one"})
        assert cancelled.status == 200
        assert first.result(timeout=60).json()["code"] == "load_cancelled"

        noted = Path(f"{gate.program}.pid")
        children = {int(noted.read_text())}
        second = clients.submit(service.request, "POST", "/v1/load", {"model": NAME, "context_tokens": 2048})
        began_s = time.monotonic()
        systemctl("stop", SOCKET_UNIT, DAEMON_UNIT)
        assert time.monotonic() - began_s < STOP_S
        assert properties(DAEMON_UNIT, "Result") == {"Result": "success"}
        children.add(int(noted.read_text()))  # of the second, where it has come so far
        eventually(lambda: not any(map(is_there, children)), what="the dry runs have ended")
        assert second.exception(timeout=60) or second.result().json()["code"] == "shutting_down"
