"""A daemon that is stopped while a program of an engine hangs: it ends at once, and well."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import islice
from pathlib import Path

import pytest

from lllm3090d.engines.dry_run_queue import MOST_WAITING
from tests.fakes.engine import install_fake_engine
from tests.fakes.gated import Gate
from tests.fakes.gguf_files import write_llama
from tests.system.harness import (
    DAEMON_UNIT,
    SOCKET_UNIT,
    Service,
    eventually,
    is_there,
    properties,
    running,
    systemctl,
)

pytestmark = pytest.mark.system

CLIENTS = 40
STOP_S = 15.0  # it takes 0.3 s; without an end to its helpers it is killed after 20 s


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    engine = install_fake_engine(tmp_path / "engine")
    made = Service(tmp_path, {"llama_dir": str(engine)})
    write_llama(made.models_dir / "tiny" / "tiny.gguf", head_count=2, kv_head_count=1)
    with running(made) as started:
        yield started


def ends_well(gate: Gate) -> None:
    """Stop the daemon while somebody waits for the program."""
    child = int(Path(f"{gate.program}.pid").read_text())
    began_s = time.monotonic()
    systemctl("stop", SOCKET_UNIT, DAEMON_UNIT)
    took_s = time.monotonic() - began_s
    assert took_s < STOP_S
    assert properties(DAEMON_UNIT, "ActiveState", "Result") == {
        "ActiveState": "inactive",
        "Result": "success",
    }
    # What is left of it is collected by whoever is its parent now.
    eventually(lambda: not is_there(child), what="the program has ended")


def test_a_dry_run_that_hangs_holds_up_no_stop(service: Service, tmp_path: Path) -> None:
    options = ("-c", "-np", "-ctk", "-ctv", "-b", "-ub", "-fa", "-nr", "-dev", "-ngl")
    usage = "".join(f"echo '{option} X    an option'; " for option in ("-fitp, --fit-print", *options))
    gate = Gate(
        tmp_path / "engine" / "llama-fit-params",
        ":",
        first=f'[ "$1" = --help ] && {{ {usage} exit; }}\necho $$ > "$0.pid"',
    )
    body = {"model": "tiny", "check": True}
    with ThreadPoolExecutor(CLIENTS) as clients:
        asked = [clients.submit(service.request, "POST", "/v1/plan", body) for _ in range(CLIENTS)]
        gate.wait_for_one()
        for each in islice(as_completed(asked), CLIENTS - MOST_WAITING - 1):
            assert each.result().json()["engine_check"]["text"] == "not asked: other dry runs are waiting"
        answers = [
            service.request("GET", "/v1/status"),
            service.request("POST", "/v1/plan", {"model": "tiny"}),
        ]
        assert [answer.status for answer in answers] == [200, 200]  # nobody else waits
        ends_well(gate)
        for each in asked:
            each.exception(60)  # answered, or its connection is closed


def test_a_build_that_hangs_holds_up_no_stop(service: Service, tmp_path: Path) -> None:
    server = tmp_path / "engine" / "llama-server"
    server.unlink()
    gate = Gate(server, ":", first='[ "$1" = --version ] || exit 3\necho $$ > "$0.pid"')
    with ThreadPoolExecutor() as clients:
        asked = [clients.submit(service.request, "GET", "/v1/engines") for _ in range(3)]
        asked += [clients.submit(service.request, "GET", "/v1/status") for _ in range(3)]
        gate.wait_for_one()
        ends_well(gate)
        for each in asked:
            each.exception(60)
