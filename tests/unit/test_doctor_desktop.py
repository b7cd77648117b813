"""What the doctor says of the desktop's notifications."""

from __future__ import annotations

from pathlib import Path

import pytest

from lllm3090d.doctor.desktop_checks import NAME, notifications
from lllm3090d.doctor.findings import Level
from lllm3090d.doctor.surroundings import Said, UnansweredError
from lllm3090d.settings import Settings
from tests.fakes.doctor_scene import Scene

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("owned", "startable", "words"),
    [
        (Said(0, "b true\n"), "as 0\n", "service runs"),
        (Said(0, "b false\n"), f'as 2 "org.freedesktop.DBus" "{NAME}"\n', "D-Bus starts"),
        (Said(0, "b false\n"), f'as 1 "{NAME}.Other"\n', "There is no notification service"),
        (Said(1, "", "no bus"), "", "No session bus"),
        ("busctl cannot be run", "", "cannot be told: busctl cannot be run"),
    ],
)
def test_who_shows_notifications_is_told_and_never_a_fault(
    tmp_path: Path, owned: Said | str, startable: str, words: str
) -> None:
    scene = Scene(tmp_path)

    def answer(*argv: str) -> Said:
        if "NameHasOwner" not in argv:
            return Said(0, startable)
        if isinstance(owned, str):
            raise UnansweredError(owned)
        return owned

    object.__setattr__(scene.world, "ask", answer)
    found = notifications(scene.world, scene.facts)
    assert found.level is Level.OK and words in found.message
    scene.change(settings=Settings(notifications="none"))
    assert "switched off" in notifications(scene.world, scene.facts).message
