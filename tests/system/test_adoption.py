"""Units that nobody here has started, or that another release has: real systemd, a stand-in engine and card."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.engine import edited_state
from tests.system.harness import DAEMON_UNIT, Service, ask, eventually, model_units, properties, systemctl
from tests.system.rig import GIB, MIB, Rig, rigged

pytestmark = pytest.mark.system

OLDEST = Path(__file__).parents[1] / "data" / "records" / "v1.0.json"
RECORD = "LLLM3090_RECORD"
HELD_MIB = 3000


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with rigged(tmp_path, {"lost": 3.0, "old": 2.0, "other": 1.0}, {"stop_timeout_s": "300"}) as made:
        yield made


def systemd_run(unit: str, argv: list[str], environment: Mapping[str, str], *options: str) -> None:
    """What anybody may do."""
    assignments = [f"--setenv={key}={value}" for key, value in environment.items()]
    command = ["systemd-run", "--user", "--quiet", f"--unit={unit}", "--slice=lllm3090.slice"]
    subprocess.run([*command, *assignments, *options, *argv], check=True, timeout=30)


def launched(service: Service, model: str) -> tuple[list[str], dict[str, str], dict[str, Any]]:
    """Command, environment and record of a launch of the daemon, which has been unloaded again."""
    last = service.load(model)[-1]
    assert last["kind"] == "ready", last
    place = Path(f"/proc/{last['instance']['main_pid']}")
    argv = place.joinpath("cmdline").read_bytes().decode().split("\0")[:-1]
    argv = argv[next(number for number, word in enumerate(argv) if word.endswith("llama-server")) :]
    text = place.joinpath("environ").read_bytes().decode()
    environment = {
        key: value for key, _, value in (item.partition("=") for item in text.split("\0") if item)
    }
    service.request("POST", "/v1/unload", {"model": model})
    eventually(lambda: model not in service.instances(), what="it is unloaded")
    kept: dict[str, str] = {
        key: environment[key] for key in ("LLLM3090_RUN", "LD_LIBRARY_PATH") if key in environment
    }
    return argv, kept, json.loads(environment[RECORD])


def again(argv: list[str], was: str, now: str) -> list[str]:
    """The same command on another socket."""
    return [word.replace(was, now) for word in argv]


def foreign(rig: Rig) -> dict[str, dict[str, Any]]:
    """Foreign units, by name."""
    listing = rig.service.request("GET", "/v1/instances").json()
    return {each["unit"]: each for each in listing["foreign_units"]}


def held_on_card(unit: Mapping[str, Any]) -> int:
    """What a foreign unit holds of the card."""
    return sum(each["bytes"] for each in unit["held"] if each["where"] != "host")


def test_units_that_turn_up_while_the_daemon_runs(rig: Rig) -> None:
    argv, environment, record = launched(rig.service, "lost")
    charged = sum(item["bytes"] for item in record["items"] if item["place"] == "card")
    before = rig.gpu()

    # Without a record, and under another name than ours: it is an instance, priced as it was.
    unit = "lllm3090-by-hand.service"
    systemd_run(unit, argv, {})
    rig.until("lost", "ready")
    instance = rig.service.instances()["lost"]
    assert (instance["unit"], instance["adopted"]) == (unit, True)
    assert instance["reconstructed"] == "it carries no record"
    assert instance["reserved_bytes"] == charged
    assert ask(instance["endpoint"], "Who are you?")["choices"]
    assert rig.check_books().charged_bytes >= charged
    assert foreign(rig) == {}
    text = rig.service.ctl("ps").stdout
    assert "ready, reconstructed" in text.replace("\n", " ") and "it carries no record" in text
    assert "reconstructed from its command line" in rig.service.ctl("explain", "lost").stdout
    # What it was loaded with is known well enough to serve another load of it.
    assert rig.load("lost")["instance"]["run"] == instance["run"]

    # A second one of the same model is left alone.
    twin = "lllm3090-lost-0badcafe.service"
    run = record["run"]
    systemd_run(twin, again(argv, run, "0badcafe"), {})
    left = eventually(lambda: foreign(rig).get(twin), what="it is left alone")
    eventually(lambda: "runs in" in foreign(rig)[twin]["why"], what="it is known why")
    assert left["active_state"] == "active"
    whole = rig.engine["vram_mib_of"]["lost"] * MIB
    eventually(
        lambda: held_on_card(foreign(rig)[twin]) == whole, what="it has loaded, and all of it is counted"
    )

    # So is what is no engine at all; what it holds is counted, once.
    thing = "lllm3090-thing.service"
    systemd_run(thing, ["/bin/sleep", "300"], environment)
    eventually(lambda: "no llama-server" in foreign(rig).get(thing, {"why": ""})["why"], what="it is found")
    empty = rig.gpu()
    pid = int(properties(thing, "MainPID")["MainPID"])
    with edited_state(rig.nvml.state) as lines:
        lines.append(f"process c {pid} {HELD_MIB * MIB} alive")
    full = rig.gpu()
    parts = {part.name: part.bytes for part in full.parts if part.kind == "foreign-unit"}
    assert parts[thing] == HELD_MIB * MIB and twin in parts
    assert empty.grantable_bytes is not None and full.grantable_bytes is not None
    assert empty.grantable_bytes - full.grantable_bytes == HELD_MIB * MIB
    assert full.foreign_bytes == empty.foreign_bytes == before.foreign_bytes
    assert pid not in {each.pid for each in full.processes}
    text = rig.service.ctl("ps").stdout
    assert thing in text and f"{HELD_MIB:,}" in text.replace("3000", "3,000")
    assert thing in rig.service.ctl("status").stdout and thing in rig.service.ctl("gpu").stdout

    # A release ends what is ours and says what it leaves alone.
    released = rig.service.request("POST", "/v1/release", {}).json()
    assert (released["names"], set(released["foreign_units"])) == (["lost"], {thing, twin})
    assert set(model_units()) == {thing, twin}

    # They are gone when they end, whoever ends them; the model's name was never theirs.
    systemctl("stop", twin)
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: foreign(rig) == {}, what="they are shown no longer")
    assert "foreign-unit" not in {part.kind for part in rig.gpu().parts}
    ready = rig.load_ready("lost")
    assert "reconstructed" not in ready and not ready["adopted"]
    messages = [event["message"] for event in rig.events("reconciled")]
    assert f"foreign unit {thing} has ended" in messages
    assert any(f"{unit} is adopted as lost, reconstructed" in each for each in messages)


def test_units_of_other_releases_and_in_every_state_are_found_at_start(rig: Rig) -> None:
    old_argv, _, old = launched(rig.service, "old")
    lost_argv, _, lost = launched(rig.service, "lost")
    other = rig.load_ready("other")
    (rig.service.models_dir / "other" / "model.gguf").unlink()
    systemctl("stop", DAEMON_UNIT, "lllm3090d.socket")

    # The first release wrote less; what it did not write means what it stood for then.
    values = json.loads(OLDEST.read_text(encoding="utf-8"))
    run = values["run"]
    values |= {key: old[key] for key in values.keys() & {"name", "path", "shards", "size_bytes", "items"}}
    values |= {key: old[key] for key in ("context_tokens", "parallel", "window_tokens", "cache_type_k")}
    values |= {"cache_type_v": old["cache_type_v"], "socket": old["socket"].replace(old["run"], run)}
    oldest = f"lllm3090-old-{run}.service"
    systemd_run(oldest, again(old_argv, old["run"], run), {RECORD: json.dumps(values), "LLLM3090_RUN": run})
    # A later one wrote what nobody here can read. It never says that it is up.
    newest = f"lllm3090-lost-{lost['run']}.service"
    systemd_run(
        newest,
        lost_argv,
        {RECORD: json.dumps(lost | {"schema_version": 9}), "LLLM3090_RUN": lost["run"]},
        "--no-block",
        "--property=Type=notify",
        "--property=TimeoutStartSec=300",
    )
    eventually(lambda: model_units().get(newest) == "activating", what="it is starting")
    rig.service.start()
    instances = rig.service.instances()
    assert (instances["old"]["unit"], instances["old"]["reconstructed"]) == (oldest, None)
    assert instances["old"]["reserved_bytes"] == sum(
        i["bytes"] for i in old["items"] if i["place"] == "card"
    )
    assert instances["other"]["main_pid"] == other["main_pid"]
    assert "cannot be read any more" in instances["other"]["file_note"]
    assert "cannot be read any more" in rig.service.ctl("ps").stdout
    assert (instances["lost"]["state"], instances["lost"]["run"]) == ("starting", lost["run"])
    assert instances["lost"]["reconstructed"] == "its record is of schema 9, and this release reads 1"
    rig.until("old", "ready")
    assert ask(instances["old"]["endpoint"], "Who are you?")["choices"]
    gpu = rig.gpu()
    assert {each.model for each in gpu.reservations} == {"old", "other", "lost"}

    # An engine that is being stopped, and does not care, while there is no daemon.
    rig.behave(ignore_sigterm=True)
    held = rig.service.instances()["lost"]
    rig.unload("lost")
    rig.until_gone("lost")
    stubborn = rig.load_ready("lost")
    rig.service.stop()
    systemctl("stop", "--no-block", stubborn["unit"])
    eventually(lambda: model_units().get(stubborn["unit"]) == "deactivating", what="it is being stopped")
    rig.service.start()
    assert rig.states()["lost"] == "stopping"
    assert {each.model for each in rig.gpu().reservations} == {"old", "other", "lost"}
    rig.kill_engine(stubborn)
    rig.until_gone("lost")
    assert rig.gpu().charged_bytes < gpu.charged_bytes
    assert held["run"] != stubborn["run"]
    eventually(lambda: set(model_units()) == {oldest, other["unit"]}, what="its failed unit is reset")
    assert gpu.reading is not None and gpu.reading.total_bytes == 24 * GIB


def test_a_real_engine_without_a_record(service: Service) -> None:
    """As after a write that went wrong: read back from the real command line, priced alike, asked, unloaded."""
    argv, environment, record = launched(service, "SmolLM2-135M-Instruct")
    unit = f"lllm3090-SmolLM2-135M-Instruct-{record['run']}.service"
    systemctl("stop", DAEMON_UNIT, "lllm3090d.socket")
    systemd_run(unit, argv, {**environment, RECORD: json.dumps(record)[:-1]})
    service.start()
    name = record["name"]
    eventually(lambda: service.state(name) == "ready", what="it is ready")
    instance = service.instances()[name]
    assert (instance["unit"], instance["run"]) == (unit, record["run"])
    assert instance["reconstructed"] == "its record is damaged"
    assert instance["reserved_bytes"] == sum(each["bytes"] for each in record["items"])
    for key in ("context_tokens", "parallel", "window_tokens", "cache_type_k", "cache_type_v"):
        assert instance[key] == record[key]
    assert ask(instance["endpoint"], "Say hello.")["choices"]
    service.ctl("unload", name)
    assert model_units() == {}
