"""The card given away and taken back, for a person's game and for other programs that grow."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lllm3090d.settings import NoticeTopic
from tests.fakes.engine import edited_state
from tests.fakes.nvml import FakeProcess
from tests.system.harness import eventually, model_units
from tests.system.rig import MIB, ROOM_MIB, Rig, rigged
from tests.system.rounds import RIVALS

pytestmark = pytest.mark.system

MODELS = {**RIVALS, "small": 1.0}
GRACE_S = "0.1"
LOOKS_S = 60.0  # three looks at the card, each 5 s after the one before


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with rigged(tmp_path, MODELS, {"pressure_grace_s": GRACE_S}) as made:
        yield made


def test_release_frees_everything_whatever_it_does(rig: Rig) -> None:
    rig.load_ready("small", pin=True)
    rig.behave(load_held=True)
    load = rig.load_later("alpha")
    rig.until("alpha", "loading")
    waiting = rig.load_later("beta")
    rig.until_waits("beta")
    done = rig.service.ctl("release")
    assert "small" in done.stdout and "alpha" in done.stdout
    for each in (load, waiting):
        assert (each.result(60)[-1].get("problem") or each.result()[-1])["code"] == "load_cancelled"
    assert model_units() == {}
    assert rig.gpu().grantable_bytes == ROOM_MIB * MIB
    rig.behave(load_held=False)
    rig.load_ready("beta")  # loads are welcome again
    rig.check_books()


def test_a_release_until_resume_outlives_the_daemon(rig: Rig) -> None:
    rig.load_ready("alpha")
    rig.service.ctl("release", "--until-resume")
    assert model_units() == {}
    disturbances: tuple[Callable[[], None], ...] = (lambda: None, rig.restart, rig.kill_daemon)
    for disturb in disturbances:
        disturb()
        refused = rig.service.ctl("load", "small", check=False)
        assert refused.returncode == 5
        assert "lllm3090ctl resume" in refused.stderr
        assert rig.load("small")["code"] == "card_released"
        assert rig.service.request("GET", "/v1/gpus").json()["released"] is True
    rig.service.ctl("resume")
    rig.load_ready("small")
    rig.restart()
    rig.load_ready("beta")
    rig.check_books()


def until_looked_at(rig: Rig, model: str) -> None:
    """What other programs hold before is no growth."""
    eventually(lambda: rig.service.instances()[model]["busy"] is False, what="the daemon has looked")


def others(rig: Rig, mib: int) -> None:
    """So much of the card is used by other programs now."""
    rig.nvml.add_process(FakeProcess(os.getpid(), mib * MIB, "g"))


def test_pressure_is_told_and_nothing_is_unloaded_for_it(rig: Rig) -> None:
    rig.load_ready("alpha")
    until_looked_at(rig, "alpha")
    with edited_state(rig.nvml.state) as lines:  # used by nobody in particular, as by a desktop
        lines[:] = [f"  other {3000 * MIB}" if line.strip() == "other 0" else line for line in lines]
    (event,) = eventually(lambda: rig.events("pressure"), LOOKS_S, "the pressure is told")
    assert "Other programs hold 3,000.0 MiB of the card" in event["message"]
    assert rig.states() == {"alpha": "ready"}
    assert rig.events("eviction") == []
    rig.check_books()


def test_pressure_unloads_what_is_idle(rig: Rig) -> None:
    rig.restart(pressure_policy="yield")
    rig.load_ready("alpha")
    until_looked_at(rig, "alpha")
    free_mib = ROOM_MIB - sum(rig.on_card().values()) // MIB
    others(rig, free_mib - 10)  # less is left than alpha was promised beside what it holds
    (event,) = eventually(lambda: rig.events("eviction"), LOOKS_S, "a model makes room")
    assert event["model"] == "alpha"
    rig.until_gone("alpha")
    assert "Unloaded for them: alpha" in rig.events("pressure")[0]["message"]
    (notice,) = rig.notices()
    assert (notice.topic, notice.key) == (NoticeTopic.PRESSURE, "alpha")
    rig.check_books()
