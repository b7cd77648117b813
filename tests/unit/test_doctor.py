"""The doctor as a whole: nothing hangs, whose environment counts, and what is written."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lllm3090d.doctor import examination
from lllm3090d.doctor.examination import CHECKS, daemon_environment, examine, find_engine
from lllm3090d.doctor.findings import Check, Finding, Level, ok, worst
from lllm3090d.doctor.surroundings import (
    CardsFound,
    EngineFound,
    Facts,
    Said,
    UnansweredError,
    Units,
    World,
    ask,
)
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.serving import journal_access
from lllm3090d.serving.journal_access import JournalAccess
from lllm3090d.settings import Settings
from tests.fakes.doctor_scene import BUILD, CPU, HOST, NOW_S, Answers, Scene

pytestmark = pytest.mark.unit


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


@pytest.fixture
def stuck() -> Iterator[threading.Event]:
    """Never set while a test runs, and set after it, so that no thread is left behind."""
    event = threading.Event()
    yield event
    event.set()


def examined(scene: Scene, **options: object) -> examination.Report:
    defaults = {
        "cards": lambda _: CardsFound((HOST,)),
        "engine": lambda _: EngineFound(BUILD, CPU),
    }
    return examine(
        scene.world,
        lambda: (scene.settings, scene.facts.config_file, None),
        scene.facts.units,
        "",
        **(defaults | options),  # type: ignore[arg-type]  # by name, in tests only
    )


def test_every_check_has_one_line_in_its_order(scene: Scene) -> None:
    assert tuple(CHECKS) == tuple(Check)
    report = examined(scene)
    assert [finding.check for finding in report.findings] == list(Check)
    assert not report.is_stuck


def test_every_line_but_good_ones_says_what_to_do(scene: Scene) -> None:
    report = examined(scene)
    levels = {finding.level for finding in report.findings}
    assert Level.WARN in levels  # there are no models
    for finding in report.findings:
        assert bool(finding.hint) is (finding.level is not Level.OK), finding
        assert finding.message.endswith("."), finding


def test_a_check_that_hangs_is_a_failure_and_holds_up_nothing(scene: Scene, stuck: threading.Event) -> None:
    def hangs(_world: World, _facts: Facts) -> Finding:
        stuck.wait()
        return ok(Check.CLOCK, "late")

    def works(_world: World, _facts: Facts) -> Finding:
        return ok(Check.MODELS, "done")

    began_s = time.monotonic()
    report = examined(scene, checks={Check.CLOCK: hangs, Check.MODELS: works}, check_limit_s=1.0)
    assert time.monotonic() - began_s < 10
    assert report.is_stuck
    hung, good = report.findings
    assert (hung.level, hung.message) == (Level.FAIL, "This check has not ended within 1 s.")
    assert good == ok(Check.MODELS, "done")


@pytest.mark.parametrize("which", ["cards", "engine"])
def test_a_driver_or_engine_that_hangs_is_one_failure(
    scene: Scene, stuck: threading.Event, which: str
) -> None:
    def hangs(_settings: Settings) -> None:
        stuck.wait()

    report = examined(scene, facts_limit_s=1.0, **{which: hangs})
    assert report.is_stuck
    failed = [finding.check for finding in report.findings if finding.level is Level.FAIL]
    assert failed == [{"cards": Check.DRIVER, "engine": Check.ENGINE}[which]]


@pytest.mark.parametrize(
    "error", [UnansweredError("systemctl has not answered"), OSError(5, "Input/output error")]
)
def test_a_check_that_cannot_look_is_a_failure(scene: Scene, error: Exception) -> None:
    def breaks(_world: World, _facts: Facts) -> Finding:
        raise error

    (found,) = examined(scene, checks={Check.LINGER: breaks}).findings
    assert found.level is Level.FAIL
    assert str(error) in found.message


def test_a_program_that_hangs_is_killed() -> None:
    began_s = time.monotonic()
    with pytest.raises(UnansweredError, match=r"has not answered within 0.3 s"):
        ask(sys.executable, "-c", "import signal; signal.pause()", limit_s=0.3)
    assert time.monotonic() - began_s < 10


def test_a_program_that_is_not_there() -> None:
    with pytest.raises(UnansweredError, match="nowhere-to-be-found cannot be run"):
        ask("nowhere-to-be-found")


def test_what_a_program_says() -> None:
    assert ask("sh", "-c", "echo out; echo err >&2; exit 3") == Said(3, "out\n", "err\n")


# --- whose environment ------------------------------------------------------------------------------------------

OWN = {"PATH": "/home/ada/bin:/usr/bin", "XDG_RUNTIME_DIR": "/run/user/1000", "LLLM3090_CARD": "cpu"}


def units(pid: str) -> Units:
    return Units("252", "/", {"MainPID": pid}, {})


def test_environment_of_a_daemon_that_runs(tmp_path: Path) -> None:
    (tmp_path / "77").mkdir()
    (tmp_path / "77" / "environ").write_bytes(
        b"PATH=/usr/bin\0NOTIFY_SOCKET=/n\0LLLM3090_STATE_DIR=/x=y\0\0"
    )
    environment, origin = daemon_environment(Answers(), OWN, units("77"), tmp_path)
    assert origin == "daemon"
    # The shell's settings are not the daemon's; where its bus is, only the session may know.
    assert environment == {
        "PATH": "/usr/bin",
        "LLLM3090_STATE_DIR": "/x=y",
        "XDG_RUNTIME_DIR": "/run/user/1000",
    }


class Bus(Answers):
    """busctl: the environment of the manager, then that of the unit."""

    def __call__(self, *argv: str) -> Said:
        entries = (
            ["LLLM3090_CARD=amd"] if argv[-2].endswith("Service") else ["PATH=/bin", "LLLM3090_CARD=intel"]
        )
        return Said(0, json.dumps({"type": "as", "data": entries}))


def test_environment_that_the_daemon_would_have(tmp_path: Path) -> None:
    environment, origin = daemon_environment(Bus(), OWN, units("0"), tmp_path)
    assert origin == "manager"
    assert environment == {"PATH": "/bin", "LLLM3090_CARD": "amd", "XDG_RUNTIME_DIR": "/run/user/1000"}


@pytest.mark.parametrize(
    ("known", "said"),
    [
        (units("0"), "busctl cannot be run"),
        (units("0"), Said(1, "", "no")),
        (units("0"), Said(0, "{}")),
        (units("0"), Said(0, "no JSON")),
        (units("x"), "busctl cannot be run"),
        (None, Said(0, "")),
    ],
)
def test_without_a_manager_the_shell_is_all_there_is(
    tmp_path: Path, known: Units | None, said: Said | str
) -> None:
    assert daemon_environment(Answers(busctl=said), OWN, known, tmp_path) == (OWN, "shell")


# --- the real finders -------------------------------------------------------------------------------------------


def test_engine_that_hangs_is_a_problem_within_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = tmp_path / "llama-server"
    server.write_text("#!/bin/sh\nexec sleep 1000\n")
    server.chmod(0o755)
    monkeypatch.setattr(examination, "ENGINE_LIMIT_S", 0.3)
    found = find_engine(
        Settings(llama_dir=tmp_path, state_dir=tmp_path / "state", engines_dir=tmp_path / "none")
    )
    assert found.problem is not None
    assert "did not answer --version within 0.3 s" in found.problem.message


def test_engine_that_is_not_there(tmp_path: Path) -> None:
    found = find_engine(Settings(llama_dir=tmp_path, llama_dir_from_env=True, state_dir=tmp_path / "state"))
    assert found.build is None
    assert found.problem is not None and found.problem.code is ErrorCode.ENGINE_NOT_FOUND


def test_journal_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hangs() -> JournalAccess:
        await asyncio.Event().wait()
        return JournalAccess()

    monkeypatch.setattr(journal_access, "probe_journal", hangs)
    monkeypatch.setattr(examination, "JOURNAL_LIMIT_S", 0.1)
    with pytest.raises(UnansweredError, match=r"journalctl has not answered within 0.1 s"):
        examination.journal_problem()


def test_settings_that_are_not_valid(scene: Scene) -> None:
    problem = LlmError(ErrorCode.SETTINGS_INVALID, "bad.", hint="Correct it.")
    report = examine(
        scene.world,
        lambda: (scene.settings, scene.facts.config_file, problem),
        scene.facts.units,
        "",
        cards=lambda _: CardsFound((HOST,)),
        engine=lambda _: EngineFound(BUILD, CPU),
    )
    first = report.findings[0]
    assert (first.check, first.level) == (Check.SETTINGS, Level.FAIL)
    assert len(report.findings) == len(Check)


def test_worst() -> None:
    assert worst([]) is Level.OK
    assert worst([Level.WARN, Level.FAIL, Level.OK]) is Level.FAIL
    assert worst([Level.OK, Level.WARN]) is Level.WARN


def test_document_of_a_line() -> None:
    assert ok(Check.CLOCK, f"{NOW_S}.").document() == {
        "check": "clock",
        "level": "ok",
        "message": f"{NOW_S}.",
        "hint": None,
    }
