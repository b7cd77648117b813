"""What is on disk: settings, models, what was learnt, the room that is left, how fast the disk is; and the clock."""

from __future__ import annotations

import datetime
import os
import re
import sqlite3
import time
from collections.abc import Mapping
from pathlib import Path

from lllm3090d.checkpoints.classify import Digest, digest
from lllm3090d.checkpoints.cursor import FileStamp
from lllm3090d.checkpoints.header import read_header
from lllm3090d.checkpoints.library import Library, Survey
from lllm3090d.checkpoints.walk import walk
from lllm3090d.doctor.findings import Check, Finding, fail, ok, warn
from lllm3090d.doctor.surroundings import Facts, World
from lllm3090d.errors import LlmError
from lllm3090d.planning.units import MIB
from lllm3090d.settings import Settings
from lllm3090d.state_schema import schema_of
from lllm3090d.store import APPLICATION_ID, FILE_NAME, LEAST_ROOM_BYTES, SCHEMA_VERSION

GIB = 1 << 30  # bytes
# For headers of models: what is not read by then is left to `lllm3090ctl models`.
HEADERS_LIMIT_S = 5.0
# Below this a state file that grows, or a disk that everything else fills too, soon meets the bottom.
LITTLE_ROOM_BYTES = 256 * MIB
CLOCK_SLACK_S = 86400.0  # time zones of packages, and clocks that nobody sets
BUSY_LIMIT_S = 1.0
MOST_NAMED = 3
NETWORK_FILE_SYSTEMS = re.compile(r"nfs\d?|cifs|smb3|9p|ceph|fuse\.(sshfs|rclone|glusterfs)")
VIRTUAL_VENDORS = re.compile(r"QEMU|VMware|VBOX|Msft|Google|Virtual", re.I)
VIRTUAL_DISKS = re.compile(r"(vd|xvd)[a-z]+")
ROTATING = "a rotating disk"


class _TooSlowError(Exception):
    """Reading the headers takes longer than a check may."""


class _HurriedHeaders:
    """Reads each header, until the time is up."""

    def __init__(self, limit_s: float) -> None:
        self._until_s = time.monotonic() + limit_s

    def digests(self, files: Mapping[Path, FileStamp]) -> Mapping[Path, Digest | LlmError]:
        """As of a library's headers. Raises _TooSlowError."""
        found: dict[Path, Digest | LlmError] = {}
        for path in files:
            if time.monotonic() > self._until_s:
                raise _TooSlowError
            try:
                found[path] = digest(read_header(path))
            except LlmError as error:
                found[path] = error
        return found

    def prune(self, root: Path, present: Mapping[Path, FileStamp]) -> None:
        """Nothing is kept."""


def settings(_world: World, facts: Facts) -> Finding:
    """The settings are valid."""
    problem = facts.settings_problem
    if problem is not None:
        return fail(
            Check.SETTINGS,
            f"{problem.message.rstrip('.')}. The lines below go by the defaults.",
            problem.hint or "See: man lllm3090-config",
        )
    if facts.config_file.exists():
        return ok(Check.SETTINGS, f"{facts.config_file} is valid.")
    return ok(Check.SETTINGS, f"There is no {facts.config_file}: the defaults apply.")


def models(world: World, facts: Facts, limit_s: float = HEADERS_LIMIT_S) -> Finding:
    """The models directory can be read, has models, and they can be loaded."""
    place = facts.settings.models_dir
    if not os.path.lexists(place):
        return warn(
            Check.MODELS,
            f"There is no {place}.",
            f"mkdir -p {place}, with one directory for each model in it; or set models_dir in config.toml.",
        )
    if place.is_dir() and not world.may(place, os.R_OK | os.X_OK):
        return fail(Check.MODELS, f"You may not read {place}.", f"See: ls -ld {place}")
    library = Library(place, facts.settings.aliases, _HurriedHeaders(limit_s))
    try:
        survey = library.survey()
    except _TooSlowError:
        files = sum(len(folder.files) for folder in walk(place).folders)
        return ok(
            Check.MODELS,
            f"{place} holds {files} model files. Reading all their headers takes more than {limit_s:g} s, so they were"
            " not looked into; lllm3090ctl models does.",
        )
    except LlmError as error:
        return fail(Check.MODELS, error.message, error.hint or f"See: ls -ld {place}")
    return _survey_finding(place, survey, _named(facts.settings))


def _named(settings: Settings) -> set[str]:
    """Names of models in the settings that have to be the whole name; of others parts will do."""
    return {*settings.models, *settings.extra_arguments, *settings.idle_ttl_of} - {"*"}


def _survey_finding(place: Path, survey: Survey, named: set[str]) -> Finding:
    loadable = [each.name for each in survey.checkpoints if each.problem is None]
    broken = [each.name for each in survey.checkpoints if each.problem is not None]
    told = f"{place} holds {len(survey.checkpoints)} model{'' if len(survey.checkpoints) == 1 else 's'}"
    troubles = [f"{_some(broken)} cannot be loaded"] if broken else []
    troubles += [f"{_some([str(each.path) for each in survey.skipped])} left out"] if survey.skipped else []
    if troubles:
        return warn(Check.MODELS, f"{told}; {'; '.join(troubles)}.", "See why: lllm3090ctl models")
    absent = sorted(named - {each.name for each in survey.checkpoints})
    if absent and loadable:
        return warn(
            Check.MODELS,
            f"{told}; the settings are about {_some(absent)} too, and no model has that name.",
            "Names stand there as lllm3090ctl models shows them: lllm3090ctl config edit",
        )
    if not loadable:
        return warn(
            Check.MODELS,
            f"{place} holds no model.",
            "Put a GGUF file into a directory of its own there; lllm3090ctl models --catalogue tells where some are to"
            " be had.",
        )
    return ok(Check.MODELS, f"{told}; every header is sound.")


def models_disk(world: World, facts: Facts) -> Finding:
    """How much room and what kind of disk the models have."""
    place = _nearest(facts.settings.models_dir)
    room, kind = world.room(place), disk_kind(world, place)
    told = f"{_size(room.free_bytes)} free at {facts.settings.models_dir}, on {kind}"
    if kind == ROTATING:
        return warn(
            Check.MODELS_DISK,
            f"{told}: loading a model of 17 GiB takes about two minutes.",
            "Move the models to a solid-state disk and set models_dir, or load rarely and keep loaded.",
        )
    return ok(Check.MODELS_DISK, f"{told}.")


def state_disk(world: World, facts: Facts) -> Finding:
    """There is room for what is learnt."""
    directory = facts.settings.state_dir
    place = _nearest(directory)
    room = world.room(place)
    told = f"{_size(room.free_bytes)} free at {directory}, on {disk_kind(world, place)}"
    choose = "Make room on that disk, or set state_dir (LLLM3090_STATE_DIR)."
    if room.read_only:
        return fail(Check.STATE_DISK, f"{directory} is on a file system that is read-only.", choose)
    if room.free_bytes < LEAST_ROOM_BYTES or room.free_files == 0:
        why = "no more files fit on it" if room.free_files == 0 else told
        return fail(Check.STATE_DISK, f"The disk of {directory} is full ({why}): nothing is learnt.", choose)
    if room.free_bytes < LITTLE_ROOM_BYTES:
        return warn(Check.STATE_DISK, f"{told}: that is little.", choose)
    return ok(Check.STATE_DISK, f"{told}.")


def state(world: World, facts: Facts) -> Finding:
    """What was learnt can be read and written. Nothing is changed by looking."""
    directory = facts.settings.state_dir
    place = _nearest(directory)
    if not place.is_dir() or not world.may(place, os.W_OK | os.X_OK):
        return fail(
            Check.STATE,
            f"{directory} cannot be written: what is learnt, and what is set with lllm3090ctl release, is forgotten.",
            f"See: ls -ld {place}; or set state_dir (LLLM3090_STATE_DIR).",
        )
    file = directory / FILE_NAME
    if not file.exists():
        return ok(Check.STATE, f"{file} is made when the daemon first starts.")
    if not world.may(file, os.R_OK | os.W_OK):
        return fail(Check.STATE, f"{file} may not be read and written.", f"See: ls -l {file}")
    return _database(file)


def _database(file: Path) -> Finding:
    try:
        owner, version = schema_of(file)
    except (sqlite3.Error, UnicodeDecodeError) as error:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}:
            return ok(Check.STATE, f"{file} is in use just now.")
        return warn(
            Check.STATE,
            f"{file} is damaged ({error}).",
            "The daemon moves it aside and begins anew: systemctl --user restart lllm3090d",
        )
    if owner != APPLICATION_ID:
        return warn(
            Check.STATE,
            f"{file} is the database of another program.",
            "The daemon moves it aside when it starts; to keep it there, set state_dir.",
        )
    if version > SCHEMA_VERSION:
        return fail(
            Check.STATE,
            f"{file} was written by a newer release: it is left alone, and this daemon does not start with it.",
            "Install the newer release again, or move the file away to begin anew.",
        )
    return ok(Check.STATE, f"{file} can be used.")


def clock(world: World, _facts: Facts) -> Finding:
    """The clock is not before what is known to be past."""
    now = datetime.datetime.fromtimestamp(world.now_s(), datetime.UTC)
    if world.now_s() < world.installed_s - CLOCK_SLACK_S:
        made = datetime.datetime.fromtimestamp(world.installed_s, datetime.UTC)
        return fail(
            Check.CLOCK,
            f"The clock says {now:%Y-%m-%d %H:%M} UTC, which is before this program was made ({made:%Y-%m-%d}): times"
            " in logs and of what was learnt are wrong.",
            "sudo timedatectl set-ntp true",
        )
    return ok(Check.CLOCK, f"The clock says {now:%Y-%m-%d %H:%M} UTC.")


def disk_kind(world: World, path: Path) -> str:
    """What a path lies on, for a person. Nothing is measured; what is not known is said to be so, not to be slow."""
    device = path.stat().st_dev
    source, file_system = _mount(world, path)
    if file_system in {"tmpfs", "ramfs"}:
        return "memory (gone after a reboot)"
    if NETWORK_FILE_SYSTEMS.fullmatch(file_system):
        return f"the network ({file_system})"
    place = world.at(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    if os.major(device) == 0:  # btrfs, ZFS and overlays have no device of their own
        place = world.at("/sys/class/block") / Path(source).name
    return _block_kind(world, Path(os.path.realpath(place)))


def _block_kind(world: World, place: Path) -> str:
    """Of a block device or a part of one; of volumes that lie on others, of the first of those."""
    for _ in range(8):  # layers: encryption, volumes, RAID
        below = sorted((place / "slaves").glob("*"))
        if not below:
            break
        place = Path(os.path.realpath(below[0]))
    disk = place if (place / "queue").is_dir() else place.parent
    rotational = _line(disk / "queue/rotational")
    if VIRTUAL_DISKS.fullmatch(disk.name) or VIRTUAL_VENDORS.search(_line(disk / "device/vendor")):
        return "a virtual disk of unknown speed"  # whatever it says of itself
    if disk.name.startswith("nvme"):
        return "an NVMe disk"
    return {"0": "a solid-state disk", "1": ROTATING}.get(rotational, "a disk of unknown speed")


def _mount(world: World, path: Path) -> tuple[str, str]:
    """Source and file system of the innermost mount that holds a path; empty where unknown."""
    real, best, found = os.path.realpath(path), -1, ("", "")
    for line in (world.text("/proc/self/mountinfo") or "").splitlines():
        mounted, _, told = line.partition(" - ")
        fields, what = mounted.split(), told.split()
        if len(fields) < 5 or len(what) < 2:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4])
        if (
            os.path.commonpath((real, point)) == point and len(point) >= best
        ):  # later ones lie over earlier ones
            best, found = len(point), (what[1], what[0])
    return found


def _nearest(path: Path) -> Path:
    """The path, or the nearest directory above it that is there."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _line(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def _some(names: list[str]) -> str:
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _size(size_bytes: int) -> str:
    return f"{size_bytes / GIB:,.1f} GiB" if size_bytes >= GIB else f"{size_bytes / MIB:,.1f} MiB"
