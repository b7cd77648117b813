"""A real model through D-Bus and nothing else: loaded, seen and unloaded, with every signal that belongs to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from gi.repository import GLib

from lllm3090d.bus.service_contract import JOB, MANAGER, MODEL, ROOT, path_of_model
from tests.system.dbus_scene import Client
from tests.system.harness import Service, http_request

pytestmark = pytest.mark.system

SMOLLM2 = "SmolLM2-135M-Instruct"


@pytest.fixture
def client(service: Service) -> Iterator[Client]:
    made = Client()
    yield made
    made.close()


def test_a_real_model_is_loaded_and_unloaded_with_its_signals(client: Client) -> None:
    model = path_of_model(SMOLLM2)
    job = client.call("Load", "sa{sv}", SMOLLM2, {"context_tokens": GLib.Variant("u", 2048)})
    _, interface, name, (result,) = client.end_of(job)
    assert (interface, name, result["object"], result["state"]) == (JOB, "Completed", model, "ready")
    assert result["context_tokens"] == 2048
    told = client.until("JobCompleted", lambda each: each[3][0] == job)
    assert (told[:2], told[3][1:3]) == ((ROOT, MANAGER), ("load", SMOLLM2))
    seen = client.get_all(model, MODEL)
    assert (seen["Name"], seen["State"], seen["Purpose"]) == (SMOLLM2, "ready", "chat")
    run = (model, SMOLLM2, seen["Run"])
    assert [each[3] for each in client.told if each[2] == "InstanceAdded"] == [run]
    states = [each[3] for each in client.told if each[2] == "InstanceStateChanged"]
    assert [each[3] for each in states] == ["reserved", "starting", "loading", "ready"]
    assert {each[:3] for each in states} == {run}
    # It is a real engine: it answers where the object says.
    assert http_request(seen["Endpoint"], "GET", "/health").status == 200

    going = client.call("Unload", "sa{sv}", SMOLLM2, {})
    _, _, name, (result,) = client.end_of(going)
    assert name == "Completed" and result["released_bytes"] > 0
    client.until("InstanceRemoved", lambda each: each[3] == run)
    client.until("InstanceStateChanged", lambda each: each[3][:4] == (*run, "gone"))
    assert (client.get("Instances"), client.get("State")) == ([], "idle")
