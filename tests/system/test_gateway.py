"""The gateway in front of real units: loads on demand, keeps what is used, makes room for what is asked for."""

from __future__ import annotations

import http.client
import json
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.system.harness import SOCKET_UNIT, Answer, eventually, model_units, systemctl
from tests.system.rig import Rig, rigged

pytestmark = pytest.mark.system

# Two of them have room beside each other, three have not.
MODELS = {"aster": 9.0, "birch": 9.0, "cedar": 9.0}
RULES = '{"aster": {"efforts": "low", "fallback": "low", "floor_tokens": 50}}'


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    settings = {
        "gateway_models": '{"claude-*": "aster"}',
        "gateway_reasoning": RULES,
        "restart_failed": "true",
    }
    with rigged(tmp_path_factory.mktemp("rig"), MODELS, settings) as made:
        yield made


def port(rig: Rig) -> int:
    view = rig.service.request("GET", "/v1/status").json()["gateway"]
    assert view["problem"] is None
    return int(view["address"].rpartition(":")[2])


def call(number: int, method: str, target: str, document: Any = None, **headers: str) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", number, timeout=60)
    try:
        body = None if document is None else json.dumps(document)
        connection.request(method, target, body, {"Content-Type": "application/json"} | headers)
        response = connection.getresponse()
        return Answer(response.status, response.headers.get_content_type(), response.read())
    finally:
        connection.close()


def chat(rig: Rig, model: str, **more: Any) -> Answer:
    return call(
        port(rig), "POST", "/v1/chat/completions", {"model": model, "messages": [], "max_tokens": 2} | more
    )


def test_a_model_is_loaded_by_being_asked(rig: Rig) -> None:
    answer = chat(rig, "claude-opus-9")
    assert answer.status == 200 and answer.json()["choices"]
    assert set(rig.states()) == {"aster"}
    (instance,) = rig.service.instances().values()
    eventually(lambda: rig.service.instances()["aster"]["leases"] == 0, what="the lease is returned")
    assert instance["pinned"] is False
    streamed = chat(rig, "aster", stream=True)
    assert streamed.content_type == "text/event-stream" and streamed.body.endswith(b"data: [DONE]\n\n")
    assert len(model_units()) == 1


def test_the_list_has_each_models_real_context(rig: Rig) -> None:
    listed = call(port(rig), "GET", "/v1/models").json()
    entries = {each["id"]: each for each in listed["data"]}
    assert set(entries) == set(MODELS)
    instance = rig.service.instances()["aster"]
    assert entries["aster"]["loaded"] and entries["aster"]["context_length"] == instance["window_tokens"]
    assert entries["birch"]["context_length"] > 0 and not entries["birch"]["loaded"]
    assert call(port(rig), "GET", "/v1/models/aster").json()["slots"] == instance["parallel"]


def test_who_is_idle_makes_room_and_who_works_does_not(rig: Rig) -> None:
    rig.until("aster", "ready")  # a look that finds it idle counts as the end of its use
    assert chat(rig, "birch").status == 200
    assert set(rig.states()) == {"aster", "birch"}
    rig.until("aster", "ready")
    rig.until("birch", "ready")
    assert chat(rig, "cedar").status == 200
    assert set(rig.states()) == {"birch", "cedar"}  # aster was used least recently
    unknown = chat(rig, "ceder")
    assert unknown.status == 404 and "cedar" in unknown.json()["error"]["message"]


def test_people_and_programs_reach_a_model_by_one_command(rig: Rig) -> None:
    ctl = rig.service.ctl
    asked = ctl("chat", "birch", "Hello?", "-v")
    assert asked.stdout == "Hello from the fake engine.\n" and "tokens/s" in asked.stderr
    instance = rig.service.instances()["birch"]
    known = rig.service.ctl_json("env", "birch")
    assert (known["basis"], known["window_tokens"]) == ("loaded", instance["window_tokens"])
    assert known["environment"]["OPENAI_BASE_URL"] == f"http://127.0.0.1:{port(rig)}/v1"
    program = "import os; print(os.environ['ANTHROPIC_MODEL'], os.environ['ANTHROPIC_BASE_URL'])"
    ran = ctl("run", "bir", "--", sys.executable, "-c", program)
    assert ran.stdout == f"birch http://127.0.0.1:{port(rig)}\n"
    missing = ctl("chat", "birhc", "Hello?", check=False)
    assert missing.returncode == 4 and "birch" in missing.stderr


def test_rules_for_reasoning_hold_where_the_engine_has_none(rig: Rig) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port(rig), timeout=60)
    changed = {}
    for model in ("aster", "birch"):
        document: dict[str, Any] = {"model": model, "messages": []}
        document |= {"reasoning_effort": "high", "max_tokens": 2}
        connection.request("POST", "/v1/chat/completions", json.dumps(document))
        response = connection.getresponse()
        assert response.status == 200 and response.read()
        changed[model] = response.headers["x-lllm3090-changed"]
    connection.close()
    assert changed == {"aster": "reasoning_effort=high->low, max_tokens=2->50", "birch": None}


def test_status_tells_where_it_is(rig: Rig) -> None:
    assert f"http://127.0.0.1:{port(rig)}/v1" in rig.service.ctl("status").stdout


def test_what_was_asked_is_told(rig: Rig) -> None:
    """By the client and in the metrics, beyond the daemon's end, without a word of it."""

    def asked(*more: str) -> list[dict[str, Any]]:
        return [
            json.loads(line)
            for line in rig.service.ctl("requests", "birch", "--json", *more).stdout.splitlines()
        ]

    before = asked("-n", "1")

    def another() -> list[dict[str, Any]] | None:
        return now if (now := asked("-n", "1")) != before else None

    assert chat(rig, "nobody").status == 404
    assert chat(rig, "birch", messages=[{"role": "user", "content": "a secret"}]).status == 200
    # A client has its answer before it is written down.
    last = eventually(another, what="it is told")[0]
    assert (last["model"], last["status"], last["outcome"]) == ("birch", 200, "served")
    assert 0 < last["first_byte_s"] <= last["total_s"]
    assert any(each["load_s"] > 0 for each in asked())
    table = rig.service.ctl("requests", "-n", "50").stdout
    assert last["request_id"] in table
    eventually(lambda: "404 unknown_model" in rig.service.ctl("requests", "-n", "50").stdout)
    scraped = rig.service.request("GET", "/metrics").body.decode()
    assert 'lllm3090_gateway_requests_total{model="birch",outcome="served"}' in scraped
    assert 'lllm3090_gateway_refusals_total{code="unknown_model"}' in scraped
    rig.restart()
    assert asked("-n", "1") == [last]
    assert not any(
        b"a secret" in path.read_bytes()
        for path in (rig.service.directory / "state").rglob("*")
        if path.is_file()
    )


def test_a_page_of_another_origin_cannot_load_anything(rig: Rig) -> None:
    before = set(rig.states())
    number = port(rig)
    for headers in ({"Origin": "https://evil.example"}, {"Host": "evil.example"}):
        answer = call(number, "POST", "/v1/chat/completions", {"model": "aster", "messages": []}, **headers)
        assert answer.status == 403
    assert set(rig.states()) == before


def test_a_request_after_a_crash_gets_the_launch_that_was_asked_for(rig: Rig) -> None:
    for model in rig.states():
        rig.unload(model)
    asked = rig.load_ready("cedar", context_tokens=2048, pin=True)
    os.kill(asked["main_pid"], signal.SIGKILL)
    eventually(
        lambda: rig.service.instances()["cedar"]["main_pid"] != asked["main_pid"], what="it is noticed"
    )
    assert chat(rig, "cedar").status == 200
    now = rig.service.instances()["cedar"]
    assert now["run"] != asked["run"]
    assert (now["context_tokens"], now["pinned"]) == (asked["context_tokens"], True)
    assert asked["context_tokens"] == 2048
    rig.unload("cedar")


def test_the_gateway_goes_on_with_the_next_daemon(rig: Rig) -> None:
    assert chat(rig, "birch").status == 200
    rig.kill_daemon()
    assert chat(rig, "birch").status == 200
    assert systemctl("is-active", SOCKET_UNIT, check=False)
