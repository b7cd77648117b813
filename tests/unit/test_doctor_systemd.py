"""What the doctor says of systemd, the units, control groups, lingering and the journal."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from lllm3090d.doctor import systemd_checks
from lllm3090d.doctor.findings import Check, Level, warn
from lllm3090d.doctor.surroundings import Said, UnansweredError
from lllm3090d.errors import ErrorCode, LlmError
from tests.fakes.doctor_scene import GROUP, Answers, Scene

pytestmark = pytest.mark.unit

OK, WARN, FAIL = Level.OK, Level.WARN, Level.FAIL


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


@pytest.mark.parametrize(
    ("version", "level", "word"),
    [
        ("252.39-1~deb12u2", OK, "252.39"),
        ("259", OK, "259"),
        ("251.4", FAIL, "older than 252"),
        ("", WARN, "strange"),
    ],
)
def test_manager_by_version(scene: Scene, version: str, level: Level, word: str) -> None:
    scene.units(version=version)
    found = systemd_checks.manager(scene.world, scene.facts)
    assert (found.level, word in found.message) == (level, True)


def test_manager_that_does_not_answer_is_the_only_failure(scene: Scene) -> None:
    """The other lines that need it say so and do not repeat the failure."""
    scene.change(units=None, units_problem="Failed to connect to bus: No medium found")
    found = systemd_checks.manager(scene.world, scene.facts)
    assert found.level is FAIL
    assert "No medium found" in found.message
    for check in (
        systemd_checks.service,
        systemd_checks.socket,
        systemd_checks.delegation,
        systemd_checks.linger,
    ):
        assert check(scene.world, scene.facts).level is WARN


@pytest.mark.parametrize(
    ("changed", "level", "word"),
    [
        ({}, OK, "running"),
        ({"ActiveState": "inactive", "SubState": "dead"}, OK, "not running"),
        ({"LoadState": "not-found"}, FAIL, "lllm3090ctl setup"),
        ({"LoadState": "masked"}, FAIL, "unmask"),
        ({"LoadState": "bad-setting"}, FAIL, "bad-setting"),
        ({"ActiveState": "failed", "Result": "exit-code"}, FAIL, "exit-code"),
        ({"NeedDaemonReload": "yes"}, WARN, "daemon-reload"),
        ({"ActiveState": "activating", "SubState": "start", "NRestarts": "0"}, OK, "starting"),
        ({"ActiveState": "activating", "SubState": "auto-restart", "NRestarts": "3"}, FAIL, "anew 3 times"),
        ({"NRestarts": "3"}, OK, "running"),
    ],
)
def test_service(scene: Scene, changed: dict[str, str], level: Level, word: str) -> None:
    scene.units(service=changed)
    found = systemd_checks.service(scene.world, scene.facts)
    assert found.level is level
    assert word in f"{found.message} {found.hint}"


@pytest.mark.parametrize(
    ("socket", "service", "level", "word"),
    [
        ({}, {}, OK, "first use"),
        ({"UnitFileState": "disabled"}, {"UnitFileState": "enabled"}, OK, "first use"),
        ({"UnitFileState": "disabled"}, {}, WARN, "not enabled"),
        ({"ActiveState": "inactive"}, {}, WARN, "enable --now"),
        ({"ActiveState": "failed", "Result": "resources"}, {}, FAIL, "resources"),
        ({"LoadState": "masked"}, {}, FAIL, "unmask"),
        ({"LoadState": "not-found"}, {}, WARN, "not installed"),
        ({"LoadState": "not-found"}, {"LoadState": "not-found"}, FAIL, "lllm3090ctl setup"),
    ],
)
def test_socket(
    scene: Scene, socket: dict[str, str], service: dict[str, str], level: Level, word: str
) -> None:
    scene.units(service=service, socket=socket)
    found = systemd_checks.socket(scene.world, scene.facts)
    assert found.level is level
    assert word in f"{found.message} {found.hint}"


ACTIVATION = "[D-BUS Service]\nName=org.lllm3090.Manager1\nExec=/bin/false\nSystemdService=%s\n"


@pytest.mark.parametrize(
    ("place", "unit", "level"),
    [
        (None, "", WARN),
        ("/usr/share", "lllm3090d.service", OK),
        ("/home/ada/.local/share", "lllm3090d.service", OK),
        ("/home/ada/.local/share", "other.service", WARN),
    ],
)
def test_dbus_activation(scene: Scene, place: str | None, unit: str, level: Level) -> None:
    if place:
        scene.put({f"{place}/dbus-1/services/org.lllm3090.Manager1.service": ACTIVATION % unit})
    assert systemd_checks.dbus(scene.world, scene.facts).level is level


@pytest.mark.parametrize(
    ("files", "level", "word"),
    [
        (
            {
                "/sys/fs/cgroup/cgroup.controllers": "cpu memory",
                f"/sys/fs/cgroup{GROUP}/cgroup.controllers": "memory pids",
            },
            OK,
            "v2",
        ),
        (
            {
                "/sys/fs/cgroup/cgroup.controllers": "cpu memory",
                f"/sys/fs/cgroup{GROUP}/cgroup.controllers": "pids",
            },
            WARN,
            "Delegate=",
        ),
        ({"/sys/fs/cgroup/cgroup.controllers": "cpu memory"}, WARN, "Delegate="),
        ({"/sys/fs/cgroup/cgroup.controllers": "cpu pids"}, WARN, "cgroup_disable=memory"),
        ({f"/sys/fs/cgroup/memory{GROUP}/": ""}, OK, "v1"),
        ({"/sys/fs/cgroup/memory/": ""}, WARN, "unified"),
    ],
)
def test_delegation(scene: Scene, files: dict[str, str], level: Level, word: str) -> None:
    scene.put(files)
    found = systemd_checks.delegation(scene.world, scene.facts)
    assert found.level is level
    assert word in f"{found.message} {found.hint}"


@pytest.mark.parametrize(
    ("files", "desktop", "level"),
    [
        (("/var/lib/systemd/linger/ada", "/run/systemd/seats/"), "inactive", OK),
        (("/run/systemd/seats/",), "inactive", WARN),
        (("/run/systemd/seats/", "/var/lib/systemd/linger/bob"), "inactive", WARN),
        (("/run/systemd/seats/",), "active", OK),  # logging out of a desktop is a decision
        ((), "inactive", OK),  # no logind
    ],
)
def test_linger(scene: Scene, files: tuple[str, ...], desktop: str, level: Level) -> None:
    scene.put(dict.fromkeys(files, ""))
    scene.answers.said["systemctl"] = Said(0, f"{desktop}\n")
    assert systemd_checks.linger(scene.world, scene.facts).level is level


def test_journal_that_cannot_be_read_is_a_warning_with_what_to_do(scene: Scene) -> None:
    """Files take its place, so models can be run."""
    problem = LlmError(ErrorCode.LOGS_UNAVAILABLE, "The journal cannot be read: no", hint="Join.")
    found = systemd_checks.journal(
        dataclasses.replace(scene.world, journal_problem=lambda: problem), scene.facts
    )
    assert found == warn(Check.JOURNAL, "The journal cannot be read: no.", "Join.")


def test_journal_says_how_long_it_is_kept(scene: Scene) -> None:
    assert "until the next boot only" in systemd_checks.journal(scene.world, scene.facts).message
    scene.put({"/var/log/journal/": ""})
    assert "across boots" in systemd_checks.journal(scene.world, scene.facts).message


def test_units_are_read_in_the_order_they_were_asked_for() -> None:
    class Two(Answers):
        def __call__(self, *argv: str) -> Said:
            super().__call__(*argv)
            if "lllm3090d.service" in argv:
                return Said(
                    0, "MainPID=5\nId=lllm3090d.service\n\nId=lllm3090d.socket\nActiveState=active\n"
                )
            return Said(0, f"Version=257\nControlGroup={GROUP}\n")

    units = systemd_checks.read_units(Two())
    assert (units.version, units.control_group) == ("257", GROUP)
    assert units.service["MainPID"] == "5"
    assert units.socket == {"Id": "lllm3090d.socket", "ActiveState": "active"}


def test_units_of_a_bus_that_is_not_there() -> None:
    with pytest.raises(UnansweredError, match=r"No medium found$"):
        systemd_checks.read_units(
            Answers(systemctl=Said(1, "", "Failed to connect to bus: No medium found\n"))
        )
