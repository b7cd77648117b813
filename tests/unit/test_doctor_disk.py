"""What the doctor says of settings, models, disks, what was learnt, and the clock."""

from __future__ import annotations

import dataclasses
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from lllm3090d.doctor import disk_checks
from lllm3090d.doctor.findings import Level
from lllm3090d.doctor.surroundings import Room
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.model_settings import ModelSettings
from lllm3090d.store import FILE_NAME, SCHEMA_VERSION, Store
from tests.fakes.doctor_scene import GIB, NOW_S, Scene
from tests.fakes.gguf_files import write_llama

pytestmark = pytest.mark.unit

OK, WARN, FAIL = Level.OK, Level.WARN, Level.FAIL


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def model_file(path: Path) -> None:
    path.parent.mkdir(parents=True)
    write_llama(path)


# --- settings ---------------------------------------------------------------------------------------------------


def test_settings(scene: Scene) -> None:
    assert "the defaults apply" in disk_checks.settings(scene.world, scene.facts).message
    scene.facts.config_file.write_text("")
    assert "is valid" in disk_checks.settings(scene.world, scene.facts).message
    scene.change(
        settings_problem=LlmError(ErrorCode.SETTINGS_INVALID, "card = 3 is not valid.", hint="Correct it.")
    )
    found = disk_checks.settings(scene.world, scene.facts)
    assert (found.level, found.hint) == (FAIL, "Correct it.")
    assert found.message == "card = 3 is not valid. The lines below go by the defaults."


# --- models -----------------------------------------------------------------------------------------------------


def test_no_models_directory(scene: Scene) -> None:
    found = disk_checks.models(scene.world, scene.facts)
    assert found.level is WARN
    assert f"mkdir -p {scene.settings.models_dir}" in (found.hint or "")


def test_models_directory_without_models(scene: Scene) -> None:
    scene.settings.models_dir.mkdir()
    found = disk_checks.models(scene.world, scene.facts)
    assert (found.level, "holds no model" in found.message) == (WARN, True)


def test_models_directory_that_may_not_be_read(scene: Scene) -> None:
    scene.settings.models_dir.mkdir()
    scene.forbidden = {"models"}
    assert disk_checks.models(scene.world, scene.facts).level is FAIL


def test_models_directory_that_is_a_file(scene: Scene) -> None:
    scene.settings.models_dir.write_text("")
    assert disk_checks.models(scene.world, scene.facts).level is FAIL


def test_sound_models(scene: Scene) -> None:
    for name in ("a", "b"):
        model_file(scene.settings.models_dir / name / f"{name}.gguf")
    found = disk_checks.models(scene.world, scene.facts)
    assert (found.level, "holds 2 models" in found.message) == (OK, True)


def test_damaged_models_are_named(scene: Scene) -> None:
    model_file(scene.settings.models_dir / "good" / "good.gguf")
    (scene.settings.models_dir / "bad").mkdir()
    (scene.settings.models_dir / "bad" / "bad.gguf").write_bytes(b"<html>")
    found = disk_checks.models(scene.world, scene.facts)
    assert (found.level, "bad cannot be loaded" in found.message) == (WARN, True)
    assert "lllm3090ctl models" in (found.hint or "")


def test_models_that_only_the_settings_know_are_named(scene: Scene) -> None:
    """A section whose name is misspelt does nothing, and nothing else would say so."""
    model_file(scene.settings.models_dir / "good" / "good.gguf")
    known = {"models": {"good": ModelSettings(pin=True)}, "extra_arguments": {"*": ("-v",), "good": ("-v",)}}
    scene.change(settings=scene.settings.model_copy(update=known))
    assert disk_checks.models(scene.world, scene.facts).level is OK
    unknown = {"models": {"goof": ModelSettings(pin=True)}, "idle_ttl_of": {"gone": 5.0}}
    scene.change(settings=scene.settings.model_copy(update=unknown))
    found = disk_checks.models(scene.world, scene.facts)
    assert (found.level, "about gone, goof too" in found.message) == (WARN, True)


def test_headers_that_take_too_long_are_left_out(scene: Scene) -> None:
    """A large library on a slow disk is no fault."""
    model_file(scene.settings.models_dir / "a" / "a.gguf")
    found = disk_checks.models(scene.world, scene.facts, limit_s=-1.0)
    assert (found.level, "1 model files" in found.message) == (OK, True)


# --- disks ------------------------------------------------------------------------------------------------------


def device_of(path: Path) -> str:
    number = path.stat().st_dev
    return f"{os.major(number)}:{os.minor(number)}"


def disk(name: str, rotational: str, vendor: str = "ATA") -> dict[str, str]:
    place = f"/sys/devices/pci/block/{name}"
    return {f"{place}/queue/rotational": f"{rotational}\n", f"{place}/device/vendor": f"{vendor}\n"}


PARTITION = {"/sys/devices/pci/block/nvme0n1/nvme0n1p2/partition": "2"}


@pytest.mark.parametrize(
    ("files", "name", "kind"),
    [
        (disk("nvme0n1", "0"), "nvme0n1", "an NVMe disk"),
        (
            disk("nvme0n1", "0") | {"/sys/devices/pci/block/nvme0n1/nvme0n1p2/partition": "2"},
            "nvme0n1/nvme0n1p2",
            "an NVMe disk",
        ),
        (disk("sda", "0"), "sda", "a solid-state disk"),
        (disk("sda", "1"), "sda", "a rotating disk"),
        (disk("sda", "1", "QEMU"), "sda", "a virtual disk of unknown speed"),
        (disk("vda", "1"), "vda", "a virtual disk of unknown speed"),
        ({}, "sda", "a disk of unknown speed"),
    ],
)
def test_kind_of_a_disk(
    scene: Scene, tmp_path: Path, *, files: dict[str, str], name: str, kind: str
) -> None:
    if device_of(tmp_path).startswith("0:"):
        pytest.skip("the temporary directory is on no device of its own")
    scene.put(files)
    scene.link(f"/sys/dev/block/{device_of(tmp_path)}", f"../../devices/pci/block/{name}")
    assert disk_checks.disk_kind(scene.world, tmp_path) == kind


def test_kind_of_an_encrypted_disk_is_that_below(scene: Scene, tmp_path: Path) -> None:
    if device_of(tmp_path).startswith("0:"):
        pytest.skip("the temporary directory is on no device of its own")
    scene.put(disk("nvme0n1", "0") | {"/sys/devices/virtual/block/dm-0/queue/rotational": "0"})
    scene.link("/sys/devices/virtual/block/dm-0/slaves/nvme0n1", "../../../../pci/block/nvme0n1")
    scene.link(f"/sys/dev/block/{device_of(tmp_path)}", "../../devices/virtual/block/dm-0")
    assert disk_checks.disk_kind(scene.world, tmp_path) == "an NVMe disk"


@pytest.mark.parametrize(
    ("file_system", "kind"),
    [
        ("tmpfs", "memory (gone after a reboot)"),
        ("nfs4", "the network (nfs4)"),
        ("fuse.sshfs", "the network (fuse.sshfs)"),
    ],
)
def test_kind_by_file_system(scene: Scene, tmp_path: Path, file_system: str, kind: str) -> None:
    mounts = [
        "22 1 8:1 / / rw - ext4 /dev/sda1 rw",
        f"23 22 0:50 / {tmp_path} rw,relatime - {file_system} server rw",
        "24 22 0:51 / /somewhere\\040else rw - xfs /dev/sdb1 rw",
    ]
    scene.put({"/proc/self/mountinfo": "\n".join(mounts) + "\n"})
    assert disk_checks.disk_kind(scene.world, tmp_path) == kind


def test_rotating_disk_of_models_is_told(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_checks, "disk_kind", lambda *_: disk_checks.ROTATING)
    found = disk_checks.models_disk(scene.world, scene.facts)
    assert (found.level, "rotating" in found.message) == (WARN, True)
    # What is learnt is small.
    assert disk_checks.state_disk(scene.world, scene.facts).level is OK


@pytest.mark.parametrize(
    ("room", "level", "word"),
    [
        (Room(40 * GIB, 1000, False), OK, "40.0 GiB free"),
        (Room(100 << 20, 1000, False), WARN, "that is little"),
        (Room(1 << 20, 1000, False), FAIL, "full"),
        (Room(40 * GIB, 0, False), FAIL, "no more files"),
        (Room(40 * GIB, None, False), OK, "free"),
        (Room(40 * GIB, 1000, True), FAIL, "read-only"),
    ],
)
def test_room_for_what_is_learnt(scene: Scene, room: Room, level: Level, word: str) -> None:
    scene.room = room
    found = disk_checks.state_disk(scene.world, scene.facts)
    assert (found.level, word in found.message) == (level, True)


# --- what was learnt --------------------------------------------------------------------------------------------


def made(scene: Scene) -> Path:
    scene.settings.state_dir.mkdir()
    file = scene.settings.state_dir / FILE_NAME
    Store(file).close()
    return file


def newer(file: Path) -> None:
    with sqlite3.connect(file) as connection:
        connection.execute("INSERT INTO migrations VALUES (?, 0)", (SCHEMA_VERSION + 1,))
    connection.close()


def foreign(file: Path) -> None:
    file.unlink()
    with sqlite3.connect(file) as connection:
        connection.execute("CREATE TABLE t (x)")
    connection.close()


def damaged(file: Path) -> None:
    file.write_bytes(b"no database at all " * 400)


@pytest.mark.parametrize(
    ("spoil", "level", "word"),
    [
        (lambda _: None, OK, "can be used"),
        (lambda file: file.unlink(), OK, "first starts"),
        (newer, FAIL, "newer release"),
        (foreign, WARN, "another program"),
        (damaged, WARN, "damaged"),
    ],
)
def test_state_file(scene: Scene, spoil: Callable[[Path], None], level: Level, word: str) -> None:
    spoil(made(scene))
    before = {path.name: path.stat().st_mtime_ns for path in scene.settings.state_dir.iterdir()}
    found = disk_checks.state(scene.world, scene.facts)
    assert (found.level, word in found.message) == (level, True)
    assert {path.name: path.stat().st_mtime_ns for path in scene.settings.state_dir.iterdir()} == before


def test_state_file_that_the_daemon_has_open(scene: Scene) -> None:
    scene.settings.state_dir.mkdir()
    store = Store(scene.settings.state_dir / FILE_NAME)
    try:
        assert disk_checks.state(scene.world, scene.facts).level is OK
    finally:
        store.close()


@pytest.mark.parametrize("forbidden", ["state", FILE_NAME])
def test_state_that_may_not_be_written(scene: Scene, forbidden: str) -> None:
    made(scene)
    scene.forbidden = {forbidden}
    assert disk_checks.state(scene.world, scene.facts).level is FAIL


# --- clock ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("now_s", "level"), [(NOW_S, OK), (NOW_S - 86400 * 30, OK), (NOW_S - 86400 * 32, FAIL), (0.0, FAIL)]
)
def test_clock(scene: Scene, now_s: float, level: Level) -> None:
    world = dataclasses.replace(scene.world, now_s=lambda: now_s)
    assert disk_checks.clock(world, scene.facts).level is level
