"""Run all checks side by side, none for longer than its time, and write what they found as one line of JSON.

Runs as a process of its own (``lllm3090d --doctor``): it works without a daemon, and what hangs in the kernel hangs
here. It takes on the environment that the daemon has, or would have, as settings and ``PATH`` come from there and not
from the shell of whoever asks.
"""

from __future__ import annotations

import asyncio
import json
import os
import pwd
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from lllm3090d import version
from lllm3090d.doctor import card_checks, desktop_checks, disk_checks, systemd_checks, vulkan_check
from lllm3090d.doctor.findings import Check, Finding, fail, worst
from lllm3090d.doctor.surroundings import (
    Ask,
    CardsFound,
    EngineFound,
    Facts,
    UnansweredError,
    Units,
    World,
    ask,
)
from lllm3090d.engines.builds import select
from lllm3090d.engines.probe import probe
from lllm3090d.engines.vulkan_probe import with_addresses
from lllm3090d.errors import LlmError
from lllm3090d.gpus.detect import open_cards, unknown_problem
from lllm3090d.gpus.known_cards import recall_cards
from lllm3090d.gpus.lost_cards import is_lost
from lllm3090d.gpus.readings import Card, CardKind, CardReader
from lllm3090d.gpus.xids import TellsErrors
from lllm3090d.serving import journal_access
from lllm3090d.serving.sleep_set import kernel_boot_id
from lllm3090d.settings import Settings, default_config_file, load_settings

T = TypeVar("T")
CheckFunction = Callable[[World, Facts], Finding]

ENGINE_LIMIT_S = 8.0  # each question to the engine; a CUDA build answers in about a second
VULKAN_LIMIT_S = 3.0  # for the addresses of its devices, where it has several by Vulkan
FACTS_LIMIT_S = 12.0  # cards and engine together; a driver that is in trouble may never answer
CHECK_LIMIT_S = 10.0
JOURNAL_LIMIT_S = 5.0
STUCK_HINT = "Something it looks at hangs (a disk, a network mount, a driver). See: journalctl -k -n 50"

CHECKS: Mapping[Check, CheckFunction] = {
    Check.SETTINGS: disk_checks.settings,
    Check.MANAGER: systemd_checks.manager,
    Check.SERVICE: systemd_checks.service,
    Check.SOCKET: systemd_checks.socket,
    Check.DBUS: systemd_checks.dbus,
    Check.NOTIFICATIONS: desktop_checks.notifications,
    Check.DELEGATION: systemd_checks.delegation,
    Check.LINGER: systemd_checks.linger,
    Check.JOURNAL: systemd_checks.journal,
    Check.DRIVER: card_checks.driver,
    Check.DEVICES: card_checks.devices,
    Check.ENGINE: card_checks.engine,
    Check.VULKAN: vulkan_check.vulkan,
    Check.SUSPEND: card_checks.suspend,
    Check.MODELS: disk_checks.models,
    Check.MODELS_DISK: disk_checks.models_disk,
    Check.STATE: disk_checks.state,
    Check.STATE_DISK: disk_checks.state_disk,
    Check.CLOCK: disk_checks.clock,
}
# Of the session that asks, where the daemon's environment lacks them: without them systemd cannot be asked.
OF_THE_SESSION = ("XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS", "HOME", "PATH")
# What systemd tells one process and no other.
OF_THE_PROCESS = (
    "NOTIFY_SOCKET",
    "WATCHDOG_PID",
    "WATCHDOG_USEC",
    "LISTEN_PID",
    "LISTEN_FDS",
    "LISTEN_FDNAMES",
)


@dataclass(frozen=True, slots=True)
class Report:
    """What was found, in order.

    Attributes:
        findings: one for each check.
        is_stuck: something hangs, and this process with it unless it is ended at once.
    """

    findings: tuple[Finding, ...]
    is_stuck: bool


def main(config_file: Path | None) -> None:
    """Look at this machine, write the report, and end the process with status 0."""
    units, problem = read_units()
    environment, origin = daemon_environment(ask, os.environ, units)
    os.environ.clear()
    os.environ.update(environment)
    report = examine(_this_machine(), lambda: _settings(config_file), units, problem)
    document = {
        "level": str(worst(finding.level for finding in report.findings)),
        "environment": origin,
        "checks": [finding.document() for finding in report.findings],
    }
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()
    if report.is_stuck:
        os._exit(0)  # to wait for the threads that hang would be to hang


def examine(
    world: World,
    settings: Callable[[], tuple[Settings, Path, LlmError | None]],
    units: Units | None,
    units_problem: str,
    *,
    cards: Callable[[Settings], CardsFound] | None = None,
    engine: Callable[[Settings], EngineFound] | None = None,
    checks: Mapping[Check, CheckFunction] = CHECKS,
    facts_limit_s: float = FACTS_LIMIT_S,
    check_limit_s: float = CHECK_LIMIT_S,
) -> Report:
    """Ask for what several checks need, then run the checks.

    Args:
        world: the machine.
        settings: reads the settings: these or the defaults, their file, and what is wrong with them.
        units: what the user's systemd says; None where it says nothing.
        units_problem: why it says nothing.
        cards, engine: find what the daemon would use; None for the real ones.
        checks: those to run.
        facts_limit_s, check_limit_s: seconds for all of each kind together.
    """
    pool = ThreadPoolExecutor(len(checks) + 2, "doctor")
    read, config_file, settings_problem = settings()
    everything: list[Future[Any]] = []
    asked_cards = pool.submit(cards or find_cards, read)
    asked_engine = pool.submit(engine or find_engine, read)
    everything += asked_cards, asked_engine
    wait(everything, timeout=facts_limit_s)
    facts = Facts(
        settings=read,
        config_file=config_file,
        settings_problem=settings_problem,
        units=units,
        units_problem=units_problem,
        cards=_done(asked_cards),
        engine=_done(asked_engine),
    )
    running = {check: pool.submit(function, world, facts) for check, function in checks.items()}
    everything += running.values()
    wait(running.values(), timeout=check_limit_s)
    findings = tuple(_finding(check, answer, check_limit_s) for check, answer in running.items())
    is_stuck = not all(each.done() for each in everything)
    pool.shutdown(wait=not is_stuck, cancel_futures=True)
    return Report(findings, is_stuck)


def daemon_environment(
    ask_program: Ask, own: Mapping[str, str], units: Units | None, proc: Path = Path("/proc")
) -> tuple[dict[str, str], str]:
    """The environment of the daemon, and where it is from: ``daemon`` (it runs), ``manager``, or ``shell``.

    Args:
        ask_program: runs a program for its answer.
        own: the environment of this process.
        units: what the user's systemd says.
        proc: where processes are.
    """
    pid = (units.service.get("MainPID") if units else None) or "0"
    taken, origin = _of_process(proc, pid), "daemon"
    if not taken and units is not None:
        taken, origin = _of_manager(ask_program), "manager"
    if not taken:
        return dict(own), "shell"
    session = {name: own[name] for name in OF_THE_SESSION if name in own}
    merged = session | taken
    return {name: value for name, value in merged.items() if name not in OF_THE_PROCESS}, origin


def find_cards(settings: Settings) -> CardsFound:
    """The cards that the daemon would manage. Opens no compute context."""
    try:
        known = recall_cards(settings.state_dir)
        readers = open_cards(settings.card, known=known, boot_id=kernel_boot_id())
    except LlmError as error:
        return CardsFound(problem=error)
    found: list[Card] = []
    source: str | None = None
    lost: LlmError | None = None
    for reader in readers:
        problem = _not_there(reader)
        if problem is None:
            found.append(reader.card)
        lost = lost or problem
        if isinstance(reader, TellsErrors) and reader.card.kind is CardKind.NVIDIA:
            source = source or reader.errors().source
        reader.close()
    if not found:
        return CardsFound(problem=lost)
    return CardsFound(
        tuple(found),
        xid_source=source,
        lost=lost,
        unknown=unknown_problem(readers, known, settings.card),
    )


def _not_there(reader: CardReader) -> LlmError | None:
    """Why a card is lost; None for one that is there: if it cannot be read, it has a line of its own."""
    if not isinstance(reader, TellsErrors):
        return None
    try:
        reader.read()
    except LlmError as error:
        return error if is_lost(error) else None
    return None


def find_engine(settings: Settings) -> EngineFound:
    """The engine that the next start would use, asked anew."""
    build = None
    try:
        build = select(settings).use()
        capabilities = probe(build, time_limit_s=ENGINE_LIMIT_S)
        return EngineFound(
            build,
            with_addresses(build, capabilities, helper_limit_s=VULKAN_LIMIT_S, time_limit_s=ENGINE_LIMIT_S),
        )
    except LlmError as error:
        return EngineFound(build, None, error)


def journal_problem() -> LlmError | None:
    """Why the journal cannot be read; writes one line of the least severity to it, and looks for that."""

    async def probe_it() -> LlmError | None:
        async with asyncio.timeout(JOURNAL_LIMIT_S):
            return (await journal_access.probe_journal()).problem

    try:
        return asyncio.run(probe_it())
    except TimeoutError:
        raise UnansweredError(f"journalctl has not answered within {JOURNAL_LIMIT_S:g} s") from None


def _done(answer: Future[T]) -> T | None:
    """None where it hangs."""
    return answer.result() if answer.done() else None


def _finding(check: Check, answer: Future[Finding], limit_s: float) -> Finding:
    if not answer.done():
        return fail(check, f"This check has not ended within {limit_s:g} s.", STUCK_HINT)
    try:
        return answer.result()
    except (UnansweredError, OSError) as error:
        return fail(check, f"This cannot be looked at: {error}.", STUCK_HINT)


def read_units() -> tuple[Units | None, str]:
    """What the user's systemd says of the daemon's units, else why it says nothing."""
    try:
        return systemd_checks.read_units(ask), ""
    except UnansweredError as error:
        return None, str(error)


def _settings(config_file: Path | None) -> tuple[Settings, Path, LlmError | None]:
    file = Path("config.toml")
    try:
        file = config_file or default_config_file()
        return load_settings(file), file, None
    except LlmError as error:
        return Settings(), file, error


def _this_machine() -> World:
    user = pwd.getpwuid(os.getuid())
    return World(
        root=Path("/"),
        environment=dict(os.environ),
        home=Path(os.environ.get("HOME") or user.pw_dir),
        user=user.pw_name,
        user_id=user.pw_uid,
        journal_problem=journal_problem,
        installed_s=Path(version.__file__).stat().st_mtime,
    )


def _of_process(proc: Path, pid: str) -> dict[str, str]:
    """The environment that a process was started with; empty where that cannot be read."""
    if not pid.isdecimal() or pid == "0":
        return {}
    try:
        raw = (proc / pid / "environ").read_bytes()
    except OSError:
        return {}
    return _pairs([os.fsdecode(entry) for entry in raw.split(b"\0")])


def _of_manager(ask_program: Ask) -> dict[str, str]:
    """What the manager would start the daemon with; empty where it does not tell."""
    where = ("org.freedesktop.systemd1", "/org/freedesktop/systemd1")
    entries: list[str] = []
    for path, interface in (
        (where[1], "Manager"),
        (f"{where[1]}/unit/lllm3090d_2eservice", "Service"),  # its own come last and win
    ):
        try:
            said = ask_program(
                "busctl",
                "--user",
                "--json=short",
                "get-property",
                where[0],
                path,
                f"{where[0]}.{interface}",
                "Environment",
            )
        except UnansweredError:
            return {}
        if said.status != 0:
            break
        try:
            entries += [str(entry) for entry in json.loads(said.stdout)["data"]]
        except (ValueError, KeyError, TypeError):
            return {}
    return _pairs(entries)


def _pairs(entries: list[str]) -> dict[str, str]:
    pairs = (entry.partition("=") for entry in entries)
    return {name: value for name, separator, value in pairs if separator}
