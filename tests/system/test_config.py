"""``lllm3090ctl config`` beside a real daemon: what is set counts at once, and models that run are left alone."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.system.harness import DAEMON_UNIT, Service, eventually, properties, systemctl

pytestmark = pytest.mark.system

NAME = "SmolLM2-135M-Instruct"


def show(service: Service, key: str) -> dict[str, Any]:
    told = service.ctl_json("config", "show", key)
    assert (told["environment"], told["used_file"]) == ("daemon", str(service.config_file))
    (found,) = told["settings"]
    return dict(found)


def test_settings_are_changed_while_a_model_runs(service: Service) -> None:
    service.config_file.write_text("# mine\ndrain_s = 2  # short\n")
    assert service.load(NAME, context_tokens=2048, parallel=1)[-1]["kind"] == "ready"
    before = service.instances()[NAME]

    set_alias = service.ctl_json("config", "set", "aliases.tiny", NAME)
    assert set_alias["applied"] == "reloaded"
    assert eventually(lambda: service.request("POST", "/v1/plan", {"model": "tiny"}).status == 200)
    for key, value in (("context_tokens", "4096"), ("parallel", "2"), ("pin", "true")):
        told = service.ctl("config", "set", f"models.{NAME}.{key}", value).stdout
        assert "counts from the next load of a model" in told
    assert "systemctl --user restart" in service.ctl("config", "set", "card", "cpu").stdout
    text = service.config_file.read_text()
    assert text.startswith("# mine\ndrain_s = 2  # short\n")

    refused = service.ctl("config", "set", "drain_s", "--", "-1", check=False)
    assert (refused.returncode, "drain_s = -1 is not valid" in refused.stderr) == (78, True)
    assert service.config_file.read_text() == text
    assert show(service, "drain_s")["value"] == 2.0
    assert show(service, "models_dir")["origin"] == "environment"  # as the tests' unit has it

    after = service.instances()[NAME]
    assert {key: after[key] for key in ("run", "main_pid", "context_tokens") if key in before} == {
        key: before[key] for key in ("run", "main_pid", "context_tokens") if key in before
    }
    service.ctl("unload", NAME)
    notes = service.request("POST", "/v1/plan", {"model": "tiny"}).json()["notes"]
    assert f'config: --context 4096, --parallel 2 from [models."{NAME}"]' in notes
    assert service.load("tiny")[-1]["kind"] == "ready"
    now = service.instances()[NAME]
    assert (now["context_tokens"], now["parallel"], now["pinned"]) == (4096, 2, True)

    service.ctl("config", "set", f"models.{NAME}.parallel", "1")
    told = str(eventually(lambda: "its next load" in (text := service.ctl("explain", NAME).stdout) and text))
    lines = told.splitlines()
    assert f'config: --context 4096 from [models."{NAME}"].' in lines
    assert f'config: its next load takes --parallel 1 (it has 2) from [models."{NAME}"].' in lines

    systemctl("stop", DAEMON_UNIT)
    assert service.ctl_json("config", "unset", "card")["applied"] == "not_running"
    told = json.loads(service.ctl("config", "check", "--json").stdout)
    assert told == {
        "file": str(service.config_file),
        "exists": True,
        "environment": "manager",
        "problems": [],
    }
    assert properties(DAEMON_UNIT, "ActiveState") == {"ActiveState": "inactive"}
