"""What ``setup`` does. Imported when it is given: it is slow."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lllm3090ctl import setup_disk, setup_files, setup_plan
from lllm3090ctl import setup_systemd as systemd
from lllm3090ctl.exits import ExitStatus
from lllm3090ctl.failures import own_failure
from lllm3090ctl.output import Screen
from lllm3090ctl.setup_files import Places
from lllm3090ctl.setup_plan import Action, Manifest, Step
from lllm3090ctl.text import Block, Prose, Style, clean

WORDS: Mapping[Action, tuple[str, str]] = {
    Action.CREATE: ("created", "would be created"),
    Action.REPLACE: ("replaced", "would be replaced"),
    Action.SAVE: ("replaced", "would be replaced"),
    Action.KEEP: ("kept", "would be kept"),
    Action.REMOVE: ("removed", "would be removed"),
}
NO_ANSWER = "Your systemd user manager does not answer here"
NO_MANAGER = f"{NO_ANSWER}, so nothing was enabled or started. After a login, repeat: lllm3090ctl setup"
NOT_STOPPED = f"{NO_ANSWER}: what runs of lllm3090 goes on until you log out."
PORT_TAKEN = (
    "The gateway's port is taken: see who has it with ss -ltnp 'sport = :1919', or set another gateway_port."
)
KEPT = "It was changed since setup wrote it. To have the shipped one, delete it and repeat lllm3090ctl setup. Changes"
KEPT += " belong beside a unit: systemctl --user edit"
KEPT_ENTRY = "It is not the one of setup, and stays as it is. To have the shipped one, delete it and repeat lllm3090ctl"
KEPT_ENTRY += " setup."
STAYS = "It was changed since setup wrote it, or was not written by setup. Delete it if you do not want it."


@dataclass(slots=True)
class Done:
    """What has been done, or would be."""

    program: str
    dry_run: bool
    steps: tuple[Step, ...] = ()
    saved: Mapping[Path, Path] = field(default_factory=dict)
    systemd: list[str] = field(default_factory=list)
    models: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)

    @property
    def changes(self) -> bool:
        """Whether anything is another thing than before."""
        return bool(self.systemd) or any(step.changes for step in self.steps)

    def document(self) -> Mapping[str, object]:
        """As JSON."""
        return {
            "program": self.program,
            "dry_run": self.dry_run,
            "changed": self.changes and not self.dry_run,
            "files": [
                {
                    "path": os.fsdecode(step.path),
                    "action": step.action.value,
                    "saved": str(self.saved[step.path]) if step.path in self.saved else None,
                }
                for step in self.steps
            ],
            "systemd": self.systemd,
            "stopped_models": list(self.models),
            "notes": self.notes,
        }


def install(screen: Screen, *, dry_run: bool, enable: bool, take_over: bool) -> int:
    """What ``setup`` does without ``--remove``."""
    where, daemon = setup_files.places(os.environ), setup_files.program()
    package = systemd.system_units()
    if package is not None and str(daemon) == setup_files.USUAL_PROGRAM:
        raise own_failure(
            "of_a_package",
            "A package has done this",
            f"This is the lllm3090ctl of a package, which has its units in {package}.",
            exit_status=ExitStatus.REFUSED,
            hint=f"systemctl --user enable --now {' '.join(systemd.SOCKETS)}",
        )
    with _Files():
        before = _before(where)
        _require_own(before, daemon, take_over)
        files = setup_files.wanted(where, daemon)
        steps = setup_plan.installing(files, _found(files, before), before)
    done = Done(str(daemon), dry_run, steps)
    build = setup_files.build()
    is_new = (
        before is None
        or before.program != str(daemon)
        or before.build != build
        or any(step.changes and step.path.parent == where.units for step in steps)
    )
    if not dry_run:
        with _Files():
            # Also what is as it should be, and was not known: it is taken away again with the rest.
            hashes = {**setup_plan.adopted(steps, files), **setup_plan.written(steps, before)}
            done.saved, made = setup_disk.carry_out(steps, where.own / setup_disk.SAVED)
            _record(where, before, Manifest(str(daemon), build, hashes, tuple(map(str, made))))
    if systemd.answers():
        _start(done, is_new=is_new, enable=enable)
    elif not dry_run:
        done.notes.append(NO_MANAGER)
    if package is not None:
        done.notes.append(
            f"A package has units of the same names in {package}. Yours count until lllm3090ctl setup --remove."
        )
    screen.result(done.document(), list(_shown(done, removing=False)))
    return ExitStatus.OK


def remove(screen: Screen, *, dry_run: bool, take_over: bool) -> int:
    """What ``setup --remove`` does."""
    where = setup_files.places(os.environ)
    daemon = setup_files.program()
    with _Files():
        before = _before(where)
        _require_own(before, daemon, take_over)
        files = setup_files.wanted(where, daemon)
        steps = setup_plan.removing(files, _found(files, before), before)
    done = Done(str(daemon), dry_run, steps)
    is_there = any(step.changes for step in steps)
    # Also those that are kept: without the daemon they start nothing.
    units = [step.path.name for step in steps if is_there and step.path.parent == where.units]
    if units and systemd.answers():
        _stop(done, units)
    elif units:
        done.notes.append(NOT_STOPPED)
    if not dry_run:
        with _Files():
            setup_disk.carry_out(steps, where.own / setup_disk.SAVED)
            if is_there:
                _take_links(where, [file.path.name for file in files if file.path.parent == where.units])
            if before is not None:
                (where.own / setup_disk.MANIFEST).unlink(missing_ok=True)
                setup_disk.take_directories([*before.directories, where.own / setup_disk.SAVED, where.own])
        if units and systemd.answers():
            systemd.do("daemon-reload")
            systemd.attempt("reset-failed", systemd.SERVICE, systemd.MODELS)
            systemd.read_bus_services_again()
    screen.result(done.document(), list(_shown(done, removing=True)))
    return ExitStatus.OK


class _Files:
    """What cannot be read or written becomes a failure."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            raise own_failure(
                "files_unusable",
                "A file cannot be read or written",
                f"{error.filename or 'A file'}: {error.strerror or error}",
                exit_status=ExitStatus.CONFIG,
                hint="Correct what is there, then repeat lllm3090ctl setup: it goes on where it stopped.",
            ) from error


def _before(where: Places) -> Manifest | None:
    known = setup_disk.manifest(where.own)
    return known.within(where.roots) if known is not None else None


def _found(files: Sequence[setup_files.File], before: Manifest | None) -> Mapping[Path, setup_plan.Found]:
    known = before.files if before is not None else {}
    return setup_disk.found({*(file.path for file in files), *map(Path, known)})


def _require_own(before: Manifest | None, daemon: Path, take_over: bool) -> None:
    """Nothing of another installation that is still there is touched unasked.

    Raises:
        Failure: ``set_up_by_another``.
    """
    if (
        before is None
        or before.program == str(daemon)
        or take_over
        or not os.access(before.program, os.X_OK)
    ):
        return
    theirs = Path(before.program).with_name("lllm3090ctl")
    raise own_failure(
        "set_up_by_another",
        "Another installation is set up",
        f"The units start {before.program}; this installation has {daemon}.",
        exit_status=ExitStatus.REFUSED,
        hint=f"Take that one away first: {theirs} setup --remove (models are stopped); or let this one take its place,"
        " while models go on: lllm3090ctl setup --take-over",
        details={"program": before.program},
    )


def _record(where: Places, before: Manifest | None, new: Manifest) -> None:
    """Write the manifest, unless it would say the same."""
    made = {*(before.directories if before is not None else ()), *new.directories}
    if not where.own.exists():
        made.add(str(where.own))
    new = Manifest(new.program, new.build, new.files, tuple(sorted(made)))
    if before is None or before.text() != new.text():
        setup_disk.put_manifest(where.own, new)


def _start(done: Done, *, is_new: bool, enable: bool) -> None:
    """Have systemd read the files, enable the sockets, and start what is to run, the daemon anew where it ran."""
    if any(step.changes for step in done.steps) and not done.dry_run:
        systemd.do("daemon-reload")
        systemd.read_bus_services_again()
    sockets = [unit for unit in systemd.SOCKETS if not systemd.is_masked(unit)]
    missing = [unit for unit in sockets if enable and not systemd.is_enabled(unit)]
    if missing:
        done.systemd.append(f"enable {' '.join(missing)}")
        if not done.dry_run:
            systemd.do("enable", "--quiet", *missing)
    ran = systemd.is_active(systemd.SERVICE)
    up = [unit for unit in sockets if systemd.is_active(unit)]
    wanted = [unit for unit in sockets if enable or unit in up]
    if not is_new:
        # systemd starts no socket of a service that runs.
        wanted = [] if ran else [unit for unit in wanted if unit not in up]
    if not wanted and not (is_new and ran):
        return
    if is_new and (ran or up):
        done.systemd.append(f"restart {' '.join([*up, *([systemd.SERVICE] if ran else [])])}")
    elif wanted:
        done.systemd.append(f"start {' '.join(wanted)}")
    if done.dry_run:
        return
    if is_new:
        systemd.do("stop", *systemd.SOCKETS, systemd.SERVICE)
    # Whoever asks on a socket starts the service, which starts its control socket; so the gateway's comes first.
    if systemd.GATEWAY_SOCKET in wanted and not systemd.attempt("start", systemd.GATEWAY_SOCKET):
        done.notes.append(PORT_TAKEN)
    if systemd.CONTROL_SOCKET in wanted:
        systemd.do("start", systemd.CONTROL_SOCKET)
    if ran and is_new:
        systemd.do("start", systemd.SERVICE)


def _stop(done: Done, units: Sequence[str]) -> None:
    """Stop and disable the daemon, and what it has loaded where nobody would manage that any more."""
    stays = systemd.system_units() is not None
    done.models = () if stays else systemd.running_models()
    # One that has neither a file nor runs cannot be named to systemd.
    there = [
        unit for unit in (*systemd.SOCKETS, systemd.SERVICE) if unit in units or systemd.is_active(unit)
    ]
    done.systemd.append(f"stop {' '.join([*there, *done.models])}")
    enabled = [
        unit for unit in (systemd.SERVICE, *systemd.SOCKETS) if unit in units and systemd.is_enabled(unit)
    ]
    if enabled:
        done.systemd.append(f"disable {' '.join(enabled)}")
    if stays:
        done.notes.append("Models go on: the package's daemon takes them over when it starts.")
    if done.dry_run:
        return
    if there:
        systemd.do("stop", *there)
    # Anew: a load may have come to its end meanwhile.
    done.models = () if stays else tuple(dict.fromkeys((*done.models, *systemd.running_models())))
    if done.models:
        systemd.do("stop", systemd.MODELS)
    if not stays:
        systemd.attempt("stop", systemd.SLICE)
    if enabled:
        systemd.do("disable", "--quiet", *enabled)


def _take_links(where: Places, units: Sequence[str]) -> None:
    """What enables units; systemd has taken it, where it was asked and their files were there."""
    for directory in where.units.glob("*.wants"):
        for link in (directory / unit for unit in units):
            if link.is_symlink():
                link.unlink()
                setup_disk.take_directories([directory])


def _shown(done: Done, *, removing: bool) -> Iterator[Block]:
    would = 1 if done.dry_run else 0
    for step in done.steps:
        if step.action is Action.SAME:
            continue
        line = f"{WORDS[step.action][would]}: {step.path}"
        if step.action is Action.KEEP:
            kept = KEPT_ENTRY if step.path.suffix == ".desktop" else KEPT
            yield Prose(clean(f"{line}. {STAYS if removing else kept}"), style=Style.DOUBTFUL)
        elif step.path in done.saved:
            yield Prose(
                clean(f"{line}. It was not written by setup; what was there: {done.saved[step.path]}")
            )
        elif step.action is Action.SAVE:
            yield Prose(clean(f"{line}. It was not written by setup, and would be saved first."))
        else:
            yield Prose(clean(line))
    for command in done.systemd:
        yield Prose(clean(f"{'would do' if would else 'done'}: systemctl --user {command}"))
    if any(each.startswith("restart ") for each in done.systemd):
        yield Prose("Models that run go on.")
    if done.models:
        told = "would be stopped" if would else "were stopped"
        yield Prose(clean(f"Models that ran {told}, for nothing would manage them any more."))
    for note in done.notes:
        yield Prose(clean(note), style=Style.DOUBTFUL)
    yield Prose(_end(done, removing=removing))


def _end(done: Done, *, removing: bool) -> str:
    if not done.changes:
        return "Nothing is set up." if removing else "Everything is as it should be: nothing was changed."
    if done.dry_run:
        return "Nothing was changed (--dry-run)."
    if removing:
        return "Removed. Models, ~/.config/lllm3090 and ~/.local/state/lllm3090 are as they were."
    if NO_MANAGER in done.notes:
        return "The files are written."
    return "Done. The daemon starts with its first use: lllm3090ctl status, or a request to http://127.0.0.1:1919/v1"
