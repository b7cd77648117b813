"""What happened, beyond the daemon's life: who caused it, what a full disk leaves out, and logs without a journal."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from lllm3090d.serving.journal_access import probe_journal
from lllm3090d.serving.recorder import WAITING_MOST
from tests.fakes.engine import install_fake_engine, set_behaviour
from tests.fakes.gguf_files import write_llama
from tests.system.harness import BIN, DAEMON_UNIT, Service, eventually, properties, running, systemctl

pytestmark = pytest.mark.system

CLOSED = "No journal files were opened due to insufficient permissions."
Events = list[dict[str, Any]]


def prepared(directory: Path, **environment: str) -> Service:
    """A daemon with a fake engine, and one small model."""
    engine = install_fake_engine(directory / "engine")
    settings = {"llama_dir": str(engine), "stop_timeout_s": "5"}
    made = Service(directory, settings, environment=dict(environment))
    write_llama(made.models_dir / "tiny" / "tiny.gguf", head_count=2, kv_head_count=1)
    return made


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[Service]:
    with running(prepared(tmp_path)) as started:
        yield started


@pytest.fixture
def without_journal(tmp_path: Path) -> Iterator[Service]:
    """The same where journalctl may read nothing."""
    programs = tmp_path / "bin"
    programs.mkdir()
    journalctl = programs / "journalctl"
    journalctl.write_text(f"#!/bin/sh\necho '{CLOSED}' >&2\nexit 1\n")
    journalctl.chmod(0o755)
    with running(prepared(tmp_path, PATH=f"{programs}:{os.environ['PATH']}")) as started:
        yield started


def events(service: Service, query: str = "") -> Events:
    answer = service.request("GET", f"/v1/events{query}")
    assert answer.status == 200, answer.body
    return [json.loads(line) for line in answer.body.splitlines()]


def changes(service: Service, run: str) -> dict[str, dict[str, Any]]:
    """The events of a run by the state they tell of."""
    return {each["state"]: each for each in events(service) if each.get("run") == run and "state" in each}


def runs(service: Service) -> Events:
    found: Events = service.request("GET", "/v1/models/tiny/history").json()["runs"]
    return found


def kill_daemon(service: Service) -> None:
    old = service.main_pid()
    os.kill(old, signal.SIGKILL)
    eventually(lambda: service.main_pid() not in {0, old}, what="the daemon is back")
    eventually(lambda: systemctl("is-active", DAEMON_UNIT, check=False).strip() == "active")


def test_every_change_has_its_cause(fake: Service) -> None:
    fake.ctl("load", "tiny")
    run = fake.instances()["tiny"]["run"]
    fake.ctl("unload", "tiny")
    told = changes(fake, run)
    for state in ("reserved", "starting", "stopping"):
        actor = told[state]["actor"]
        assert (actor["kind"], actor["uid"], actor["program"]) == ("client", os.getuid(), "lllm3090ctl")
        assert actor["pid"] > 0
    assert told["reserved"]["actor"]["pid"] != told["stopping"]["actor"]["pid"]
    assert told["loading"]["actor"] == {"kind": "systemd"}
    assert told["ready"]["actor"] == {"kind": "engine"}
    assert told["releasing"]["actor"] == {"kind": "systemd"}
    assert told["gone"]["actor"] == {"kind": "daemon"}
    (view,) = runs(fake)
    assert (view["run"], view["state"], view["is_live"]) == (run, "gone", False)
    assert view["asked_by"]["program"] == view["ended_by"]["program"] == "lllm3090ctl"
    assert 0 < view["load_s"] < 60
    assert view["requested_at"] < view["ready_at"] < view["ended_at"]
    shown = fake.ctl("history", "tiny").stdout
    assert run in shown and "lllm3090ctl" in shown


def test_a_unit_that_somebody_stops_is_systemds_doing(fake: Service) -> None:
    fake.load("tiny")
    instance = fake.instances()["tiny"]
    systemctl("stop", instance["unit"])
    eventually(lambda: fake.state("tiny") is None, what="it is gone")
    (view,) = runs(fake)
    assert view["ended_by"] == {"kind": "systemd", "uid": None, "pid": None, "program": None}


def test_a_follower_goes_on_after_a_kill_and_a_restart(fake: Service) -> None:
    fake.load("tiny")
    seen = [each["seq"] for each in events(fake)]
    assert seen == sorted(set(seen))
    settled = len(events(fake))
    eventually(lambda: recorded(fake, settled), what="all is recorded")
    kill_daemon(fake)
    after = events(fake, f"?since={seen[-1]}")
    assert [each["seq"] for each in after] == sorted({each["seq"] for each in after})
    assert after[0]["seq"] > seen[-1]
    started = next(each for each in after if each["kind"] == "daemon")
    assert "killed or crashed" in started["message"]
    assert started["details"]["from"] <= started["details"]["to"]
    everything = events(fake)
    assert [each["seq"] for each in everything][: len(seen)] == seen
    # An orderly stop leaves no doubt, and no numbers unused.
    last = everything[-1]["seq"]
    systemctl("restart", DAEMON_UNIT)
    began = events(fake, f"?since={last}")
    assert [each["message"].split(",")[0] for each in began if each["kind"] == "daemon"] == [
        "is stopped",
        "started",
    ]
    assert [each["seq"] for each in began][:2] == [last + 1, last + 2]
    # A life in which the state file could not be used leaves a gap, and no number of it is given once more.
    state = fake.directory / "state"
    fake.stop()
    for path in state.glob("lllm3090.db*"):
        path.rename(state / f"aside-{path.name}")
    (state / "lllm3090.db").mkdir()
    fake.start()
    last = events(fake)[-1]["seq"]
    fake.stop()
    (state / "lllm3090.db").rmdir()
    for path in state.glob("aside-*"):
        path.rename(state / path.name.removeprefix("aside-"))
    fake.start()
    began = next(each for each in events(fake, f"?since={last}") if each["kind"] == "daemon")
    assert "could not record what happened" in began["message"]
    assert set(began["details"]) == {"from", "to"}
    fake.request("POST", "/v1/unload", {"model": "tiny"})
    (view,) = runs(fake)
    assert view["ready_at"] is not None and view["state"] == "gone"


def recorded(service: Service, count: int) -> bool:
    """Whether so many events are in the file, asked of SQLite itself."""
    path = service.directory / "state" / "lllm3090.db"
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        return bool(connection.execute("SELECT count(*) FROM events").fetchone()[0] >= count)


def test_why_an_engine_died_is_known_after_the_daemon_too(fake: Service) -> None:
    said = [f"line {n}" for n in range(60)]
    set_behaviour(fake.directory / "engine", crash_during_load={"exit": 3, "lines": said})
    fake.load("tiny")
    for _ in range(2):
        (view,) = runs(fake)
        assert view["state"] == "failed"
        assert view["ended_by"]["kind"] == "engine"
        assert len(view["last_lines"]) == 40
        assert view["last_lines"][-1] == "line 59"
        assert view["problem"]["code"] == "engine_failed"
        systemctl("restart", DAEMON_UNIT)
    fake.request("POST", "/v1/unload", {"model": "tiny"})
    # Its log is there still, though it is not loaded.
    assert "line 59" in fake.ctl("logs", "tiny").stdout


def test_what_the_engine_said_of_its_memory_outlives_it(fake: Service) -> None:
    line = "llama_kv_cache:        CPU KV buffer size =    12.50 MiB"
    set_behaviour(fake.directory / "engine", crash_during_load={"exit": 3, "lines": [line]})
    fake.load("tiny")
    memory = eventually(lambda: runs(fake)[0]["memory"], what="it is kept")
    assert memory["buffers"] == [{"device": "CPU", "part": "context", "bytes": int(12.5 * (1 << 20))}]


def file_size_limit(pid: int, limit: str) -> None:
    """What a process may write to files from now on: with 0 it fares as on a full disk."""
    subprocess.run(["prlimit", f"--pid={pid}", f"--fsize={limit}:unlimited"], check=True)


def test_a_disk_that_takes_nothing_stops_nothing_and_its_gap_is_told(fake: Service) -> None:
    fake.load("tiny")
    pid = fake.main_pid()
    before = events(fake)[-1]["seq"]
    file_size_limit(pid, "0")
    fake.request("POST", "/v1/unload", {"model": "tiny"})
    assert fake.load("tiny")[-1]["kind"] == "ready"
    problem = eventually(lambda: fake.request("GET", "/v1/status").json()["history_problem"])
    assert "not recorded" in problem["detail"]
    assert "not recorded" in fake.ctl("status").stdout
    for n in range(WAITING_MOST + 20):
        fake.request("POST", "/v1/models/tiny/pin", {"pinned": n % 2 == 0})
    lost = fake.request("GET", "/v1/status").json()["history_problem"]["details"]["lost"]
    assert lost > 0
    file_size_limit(pid, "unlimited")

    def gap() -> dict[str, Any] | None:
        return next((each for each in events(fake, f"?since={before}") if each["kind"] == "gap"), None)

    told = eventually(gap, within_s=60, what="the gap is told")
    count = told["details"]["count"]
    assert count >= lost  # there may be more since it was asked
    assert told["message"].startswith(f"{count} events were not recorded from ")
    assert fake.main_pid() == pid
    eventually(lambda: fake.request("GET", "/v1/status").json()["history_problem"] is None)
    systemctl("restart", DAEMON_UNIT)
    kept = [each["seq"] for each in events(fake)]
    first, last = told["details"]["first_seq"], told["details"]["last_seq"]
    assert [seq for seq in kept if first <= seq <= last] == []
    assert told["seq"] in kept
    assert len([seq for seq in kept if seq > last]) >= WAITING_MOST


def test_logs_from_a_moment_on(fake: Service) -> None:
    fake.load("tiny")
    now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    # Its last words, which journald may have a moment later.
    old = eventually(lambda: "listening" in (text := fake.ctl("logs", "tiny").stdout) and text)
    assert fake.ctl("logs", "tiny", "--since", "1h").stdout == old
    assert fake.ctl("logs", "tiny", "--since", "2099-01-01").stdout == ""
    assert fake.request("GET", f"/v1/instances/tiny/logs?since={now}").status == 200
    assert fake.request("GET", "/v1/instances/tiny/logs?since=now").json()["code"] == "invalid_request"


def test_following_a_log_ends_when_the_model_is_unloaded(fake: Service) -> None:
    fake.load("tiny")
    follows_until_the_unload(fake)


def follows_until_the_unload(service: Service) -> None:
    with subprocess.Popen(
        [str(BIN / "lllm3090ctl"), "logs", "tiny", "-f"], stdout=subprocess.PIPE, text=True
    ) as follower:
        assert follower.stdout is not None
        first = follower.stdout.readline()
        assert first
        service.request("POST", "/v1/unload", {"model": "tiny"})
        killer = threading.Timer(90, follower.kill)
        killer.start()
        rest = follower.stdout.read()
        assert follower.wait() == 0, rest
        killer.cancel()


def test_the_journal_is_probed() -> None:
    access = asyncio.run(probe_journal(timeout_s=60.0))
    assert access.is_readable, access.problem


def test_a_journal_that_cannot_be_read_is_found_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for script, reason, limit_s in (
        (f"echo '{CLOSED}' >&2\nexit 1", CLOSED, 60.0),
        ("exec sleep 60", "does not show", 1.0),
    ):
        (tmp_path / "journalctl").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "journalctl").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        access = asyncio.run(probe_journal(timeout_s=limit_s))
        assert not access.is_readable
        assert access.problem is not None
        assert reason in access.problem.message
        assert "systemd-journal" in (access.problem.hint or "")


def test_without_a_journal_each_run_has_a_file(without_journal: Service) -> None:
    service = without_journal
    service.load("tiny")
    instance = service.instances()["tiny"]
    (file,) = (service.directory / "state" / "logs").glob("*.log")
    assert file.stem == instance["unit"].removesuffix(".service")
    assert file.stat().st_mode & 0o777 == 0o600
    shown = service.ctl("logs", "tiny").stdout
    assert "listening" in shown
    assert properties(instance["unit"], "StandardOutput")["StandardOutput"].startswith("append")
    status = service.request("GET", "/v1/status").json()
    assert CLOSED in status["journal_problem"]["detail"]
    assert CLOSED in service.ctl("status").stdout
    refused = service.ctl("logs", "tiny", "--since", "1h", check=False)
    assert refused.returncode != 0
    assert "no times" in refused.stderr
    # The log goes on where the daemon does not.
    kill_daemon(service)
    assert service.ctl("logs", "tiny").stdout == shown
    follows_until_the_unload(service)
    assert service.ctl("logs", "tiny").stdout.startswith(shown)


def test_without_a_journal_the_last_words_come_from_the_file(without_journal: Service) -> None:
    service = without_journal
    said = [f"line {n}" for n in range(60)]
    set_behaviour(service.directory / "engine", crash_during_load={"exit": 3, "lines": said})
    service.load("tiny")
    (view,) = runs(service)
    assert view["last_lines"] == said[-40:]
