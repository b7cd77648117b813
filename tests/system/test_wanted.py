"""What is wanted comes back: after a killed daemon, a dead user manager, a login, a resumption; nothing else does."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from typing import Any

import pytest

from tests.system.conftest import PRIVATE_MANAGER
from tests.system.harness import DAEMON_UNIT, SOCKET_UNIT, eventually, model_units, systemctl, until_no_units
from tests.system.rig import Rig, rigged
from tests.system.rounds import RIVALS
from tests.system.test_history import file_size_limit
from tests.system.test_suspend import kill_for_good

pytestmark = pytest.mark.system

MODELS = {**RIVALS, "small": 1.0, "tiny": 1.0}
STOP_S = 3.0  # an engine that does not end is killed then
FAULT = {"exit": 1, "lines": ["GGML_ASSERT(n_tokens > 0) failed"]}
KEPT = ("context_tokens", "parallel", "cache_type_k", "pinned")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """One daemon for all tests. It is made before the fixture that skips them outside a private manager."""
    if os.environ.get(PRIVATE_MANAGER) != "1":
        pytest.skip("needs a private user manager; run: make test-system")
    settings = {
        "restart_failed": "true",
        "restart_pause_s": "0.01",
        "stop_timeout_s": str(STOP_S),
        "drain_s": "0",
    }
    with rigged(tmp_path_factory.mktemp("rig"), MODELS, settings) as made:
        yield made


@pytest.fixture
def rig(shared: Rig) -> Iterator[Rig]:
    yield shared
    shared.behave(ignore_sigterm=False, load_held=False, crash_during_load=None)
    shared.service.ctl("resume")
    shared.service.ctl("release")
    shared.service.config_file.write_text("")
    shared.service.reload()
    for each in shared.service.ctl_json("autoload")["models"]:
        shared.service.ctl("autoload", each["name"], "--off")
    for name in shared.states():
        shared.unload(name)
    until_no_units()  # one that had to be killed has failed
    assert wanted(shared) == {}


def wanted(rig: Rig) -> dict[str, Any]:
    """What is wanted, or marked, and has no instance."""
    listed = rig.service.request("GET", "/v1/instances").json()["wanted"]
    return {each["name"]: each for each in listed}


def restored(rig: Rig, *names: str) -> dict[str, Any]:
    """Wait until these serve; their instances."""
    eventually(
        lambda: all(rig.states().get(name) == "ready" for name in names),
        what=f"{names} are back: {rig.states()}, {wanted(rig)}",
    )
    return rig.service.instances()


def restores(rig: Rig) -> str:
    """What was told of models that are loaded again."""
    return " | ".join(f"{each.get('model')}: {each['message']}" for each in rig.events("restore"))


def state_file(rig: Rig) -> sqlite3.Connection:
    return sqlite3.connect(rig.service.directory / "state" / "lllm3090.db", isolation_level=None)


def kept(rig: Rig) -> dict[str, str]:
    """What is written down of each model that is wanted."""
    with contextlib.closing(state_file(rig)) as file:
        return dict(file.execute("SELECT name, body FROM wanted").fetchall())


def anew(rig: Rig, **life: str | int) -> None:
    """The daemon and all units end, something is changed in the life that it remembers, and it starts again."""
    systemctl("stop", SOCKET_UNIT, DAEMON_UNIT)
    units = model_units()
    if units:
        systemctl("stop", *units)
    file = state_file(rig)
    for query, key in (
        ("UPDATE wanted_life SET boot = ?", "boot"),
        ("UPDATE wanted_life SET session = ?", "session"),
        ("UPDATE wanted_life SET ended = ?", "ended"),
    ):
        if key in life:
            file.execute(query, (life[key],))
    file.close()
    rig.service.start()


def test_what_was_evicted_survives_a_daemon_that_is_killed_before_the_load(rig: Rig) -> None:
    rig.behave(ignore_sigterm=True)
    first = rig.load_ready("alpha", context_tokens=8192, parallel=2, cache_type="f16")
    lost = rig.load_later("beta")
    rig.until("alpha", "stopping")
    kill_for_good(rig)
    assert lost.exception(60) or lost.result()[-1].get("kind") != "ready"
    eventually(lambda: model_units().get(first["unit"]) != "deactivating", what="it has been killed")
    rig.service.start()
    second = restored(rig, "alpha")["alpha"]
    assert second["run"] != first["run"]
    assert {key: second[key] for key in KEPT} == {key: first[key] for key in KEPT}
    told = rig.events("restore")
    assert told[-1]["model"] == "alpha" and told[-1]["message"].startswith("loaded again")
    assert told[-1]["actor"] == {"kind": "daemon"}
    assert "beta" not in rig.states()
    rig.behave(ignore_sigterm=False)
    rig.check_books()


def test_what_went_for_a_load_that_is_adopted_is_decided_by_that(rig: Rig) -> None:
    rig.load_ready("alpha", context_tokens=8192)
    rig.behave(load_held=True)
    load = rig.load_later("beta")
    rig.until("beta", "loading")
    assert wanted(rig)["alpha"]["why"].startswith("it made room for a load")
    rig.kill_daemon()
    assert load.exception(30) or load.result()
    assert rig.states() == {"beta": "loading"} and "alpha" in wanted(rig)
    # It does not come up: the other is loaded again.
    os.kill(rig.service.instances()["beta"]["main_pid"], 9)
    rig.behave(load_held=False)
    restored(rig, "alpha")
    # It comes up: the other is gone for good.
    rig.unload("beta")
    rig.behave(load_held=True)
    load = rig.load_later("beta")
    rig.until("beta", "loading")
    rig.kill_daemon()
    rig.behave(load_held=False)
    restored(rig, "beta")
    eventually(lambda: wanted(rig) == {}, what="alpha is gone for good")
    rig.kill_daemon()
    assert rig.states() == {"beta": "ready"} and wanted(rig) == {}


def test_latches_and_the_count_of_attempts_outlive_the_daemon(rig: Rig) -> None:
    first = rig.load_ready("small", context_tokens=8192)
    os.kill(first["main_pid"], 9)
    eventually(lambda: rig.service.instances()["small"]["attempt"] == 1 and rig.states()["small"] == "ready")
    rig.kill_daemon()
    rig.behave(crash_during_load=FAULT)
    os.kill(rig.service.instances()["small"]["main_pid"], 9)
    rig.until("small", "latched")
    eventually(lambda: '"lot":"latched"' in kept(rig).get("small", ""), what="that is written down")
    before = rig.service.instances()["small"]
    assert (
        "the engine ended 5 times" in before["latch_reason"]
    )  # one of them in the life of the daemon before
    for _ in range(2):
        rig.kill_daemon()
        after = rig.service.instances()["small"]
        for key in ("state", "latch_reason", "way_out", "failure", "run", "context_tokens"):
            assert after[key] == before[key], key
    assert "lllm3090ctl reset small" in rig.service.ctl("ps").stdout
    rig.behave(crash_during_load=None)
    rig.service.ctl("reset", "small")
    assert restored(rig, "small")["small"]["context_tokens"] == 8192
    rig.kill_daemon()
    assert rig.states() == {"small": "ready"}


def test_a_dead_user_manager_and_a_login_are_told_apart(rig: Rig) -> None:
    first = rig.load_ready("small", context_tokens=8192, pin=True)
    rig.service.ctl("autoload", "small")
    rig.service.ctl("autoload", "tiny")
    rig.load_ready("alpha")
    session = systemctl("show", "--property=UserspaceTimestampMonotonic", "--value").strip()
    systemctl("daemon-reexec")
    assert systemctl("show", "--property=UserspaceTimestampMonotonic", "--value").strip() == session
    # Somebody has stopped the units while no daemon was there.
    anew(rig)
    assert rig.states() == {}
    assert {name: each["wanted"] for name, each in wanted(rig).items()} == {"small": False, "tiny": False}
    assert (
        "small: autoload, and does not run: it is loaded at the next login" in rig.service.ctl("ps").stdout
    )
    rig.load_ready("small", context_tokens=8192, pin=True)
    rig.load_ready("alpha")
    # The user manager was killed, with everything: the whole set comes back.
    systemctl("stop", SOCKET_UNIT, DAEMON_UNIT)
    file = state_file(rig)
    kept = file.execute("SELECT name, body FROM wanted ORDER BY position").fetchall()
    assert [name for name, _ in kept] == ["small", "alpha"] and all('"lot":"up"' in body for _, body in kept)
    systemctl("stop", *model_units())
    file.execute("UPDATE wanted_life SET session = 'another', ended = 0")
    file.close()
    rig.service.start()
    back = restored(rig, "small", "alpha")
    assert set(back) == {"small", "alpha"}
    assert {key: back["small"][key] for key in KEPT} == {key: first[key] for key in KEPT}
    assert "the user manager died" in rig.events("restore")[-1]["message"]
    # Another login: what is marked, as it was loaded when it was marked, and nothing else.
    for change in ({"session": "another", "ended": 1}, {"boot": "another"}):
        anew(rig, **change)
        back = restored(rig, "small", "tiny")
        assert set(back) == {"small", "tiny"}
        assert {key: back["small"][key] for key in KEPT} == {key: first[key] for key in KEPT}
        starts = [each["model"] for each in rig.events("state") if each["state"] == "reserved"]
        assert starts[-2:] == ["small", "tiny"]
    # What is unloaded stays so within the login.
    rig.unload("tiny")
    rig.kill_daemon()
    assert rig.states() == {"small": "ready"}
    listed = rig.service.ctl("autoload").stdout
    assert "context_tokens 8192, parallel" not in listed and "context_tokens 8192" in listed
    rig.service.ctl("autoload", "small", "--off")
    rig.service.ctl("autoload", "tiny", "--off")
    asked = rig.service.ctl("autoload", "no-such-model", check=False)
    assert asked.returncode == 4, (asked.stderr, rig.service.journal())


def test_a_login_loads_what_it_can(rig: Rig) -> None:
    """One that is gone, one that does not fit and one that fails keep no other from being loaded."""
    rig.service.config_file.write_text('autoload = "no-such-model, alpha"\n')
    for name in ("beta", "tiny"):
        rig.service.ctl("autoload", name)
    anew(rig, boot="another")
    assert set(restored(rig, "alpha", "tiny")) == {"alpha", "tiny"}
    for words in (
        "no-such-model: not loaded (loaded at every login)",
        "beta: not loaded again (loaded at every login)",
    ):
        eventually(lambda words=words: words in restores(rig), what=f"{words}: {restores(rig)}")  # type: ignore[misc]
    down = wanted(rig)
    assert down["beta"]["wanted"] and down["beta"]["problem"]["code"] == "insufficient_vram"
    assert not down["no-such-model"]["wanted"]
    refused = rig.service.ctl("autoload", "alpha", "--off", check=False)
    assert refused.returncode == 2 and "setting autoload" in refused.stderr
    assert rig.unload("beta")["waited"]
    assert "beta" not in wanted(rig) or not wanted(rig)["beta"]["wanted"]


def test_a_release_until_resume_keeps_what_is_wanted(rig: Rig) -> None:
    first = rig.load_ready("alpha", context_tokens=8192)
    rig.load_ready("small")
    rig.load_ready("tiny")
    rig.service.ctl("release", "--until-resume")
    rig.kill_daemon()
    assert rig.states() == {}
    assert {name: each["wanted"] for name, each in wanted(rig).items()} == dict.fromkeys(
        ("alpha", "small", "tiny"), True
    )
    assert "the card is released" in rig.service.ctl("status").stdout
    assert rig.unload("small")["released_bytes"] == 0
    rig.service.ctl("resume")
    back = restored(rig, "alpha", "tiny")
    assert set(back) == {"alpha", "tiny"} and back["alpha"]["context_tokens"] == first["context_tokens"]
    # On a disk that takes nothing it is told what is not kept.
    file_size_limit(rig.service.main_pid(), "0")
    told = rig.service.ctl("release", "--until-resume").stdout
    assert "The card is released." in told and "not kept beyond the daemon's life" in " ".join(told.split())
    assert rig.unload("tiny")["problem"]["code"] == "state_unusable"
    file_size_limit(rig.service.main_pid(), "unlimited")
    rig.service.ctl("resume")
    assert set(restored(rig, "alpha")) == {"alpha"}
    # Without: everything is unloaded, and stays so.
    rig.service.ctl("release")
    rig.kill_daemon()
    assert rig.states() == {} and wanted(rig) == {}
