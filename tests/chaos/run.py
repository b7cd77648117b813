"""One run: the scene, the checker, the steps of a seed, the end, and what came of it."""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.chaos import truth as machine
from tests.chaos.deeds import Deeds, Violation
from tests.chaos.driver import Driver
from tests.chaos.excuses import excuse, missing, taken_from_the_busy, unseen, untold
from tests.chaos.plan import FAULTS, WORK, steps
from tests.chaos.scene import Scene, set_up
from tests.chaos.told import events_since
from tests.chaos.watch import UNTRUE_LIMIT_S, Findings, Watch, until

LAST_LINES = 50
EMPTY_S = 60.0
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a run."""

    seed: int
    seconds: float
    deeds: Deeds
    findings: Findings
    summary: str

    @property
    def violations(self) -> tuple[Violation, ...]:
        """All faults of the product that were seen."""
        return tuple(self.deeds.violations)

    def report(self) -> str:
        """For a person: the figures, and each violation with what went before."""
        lines = [self.summary]
        if self.violations:
            lines += ["", f"{len(self.violations)} violations:"]
            lines += [f"  {each.at_s:8.3f}  {each.kind}: {each.text}" for each in self.violations]
            lines += ["", f"the last {LAST_LINES} lines of the log:", *self.deeds.lines[-LAST_LINES:]]
            lines += ["", f"again: python -m tests.chaos --seed {self.seed} --seconds {self.seconds:.0f}"]
        return "\n".join(lines)


def chaos(
    directory: Path,
    seed: int,
    seconds: float,
    *,
    program: Path | None = None,
    quiet: bool = False,
    stop_early: bool = False,
) -> Outcome:
    """Do as the seed says for so long, and see what is untrue.

    Args:
        directory: empty; everything is put there.
        seed: of the steps.
        seconds: for which steps are begun; what is under way then is let come to its end.
        program: the daemon, in the place of the installed one.
        quiet: no log while it goes on.
        stop_early: end with the first violation.
    """
    deeds = Deeds(quiet=quiet)
    with set_up(directory, program) as scene:
        watch = Watch(
            control_socket=scene.service.control_socket,
            engine=scene.engine,
            card_state=scene.nvml.state,
            prices=scene.prices,
            deeds=deeds,
        )
        driver = Driver(scene, watch, deeds)
        deeds.began_s = time.monotonic()
        disk = "a small disk" if scene.mounted else "no disk of its own"
        deeds.log(f"seed {seed}, {seconds:.0f} s, {disk}, prices {scene.prices}")
        watch.start()
        try:
            for step in steps(seed):
                if time.monotonic() - deeds.began_s > seconds or (stop_early and deeds.violations):
                    break
                driver.do(step)
            if not (stop_early and deeds.violations):
                _end(scene, watch, driver, deeds)
        finally:
            driver.close()
            watch.stop()
        if deeds.violations and not quiet:
            sys.stderr.write(_journal())
    return Outcome(seed, seconds, deeds, watch.findings, _summary(seed, deeds, watch.findings, driver))


def _end(scene: Scene, watch: Watch, driver: Driver, deeds: Deeds) -> None:
    """Everything rests, everything is unloaded, nothing is left, and the history is whole."""
    driver.settle("at the end")
    deeds.log("the end: everything is unloaded")
    driver.empty()
    left: list[str] = []

    def nothing_is_left() -> bool:
        left[:] = list(_left(scene, watch))
        return not left

    if not until(nothing_is_left, EMPTY_S):
        deeds.violated("rest", f"after everything was unloaded: {'; '.join(left)}")
    for death in watch.findings.deaths:
        why = excuse(death, deeds, tuple(watch.findings.events.values()))
        deeds.counts[f"engines ended: {why or 'LOST'}"] += 1
        if why is None:
            at_s = death.before_s - deeds.began_s
            deeds.violated(
                "lost model",
                f"{death.model} (process {death.pid}, run {death.run}) was gone at {at_s:.2f} s",
            )
    try:
        kept = events_since(scene.service.control_socket, 0)
    except (OSError, http.client.HTTPException) as error:
        deeds.violated("history", f"it cannot be read: {error}")
        return
    for fault in unseen(deeds, kept):
        deeds.violated(fault.kind, fault.text)
    for fault in untold(watch.findings.deaths, deeds, kept):
        deeds.violated(fault.kind, fault.text)
    for fault in taken_from_the_busy(deeds, kept):
        deeds.violated(fault.kind, fault.text)
    for event in missing(watch.findings.events.values(), kept):
        deeds.violated("history", f"an event that was told is not kept, and no gap covers it: {event}")


def _journal() -> str:
    """The last lines of daemon, engines and systemd, with their times."""
    command = ["journalctl", "--no-pager", "-o", "short-precise", "-n", "300", f"_UID={os.getuid()}"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def _left(scene: Scene, watch: Watch) -> Iterator[str]:
    truth, told, _ = watch.next_look()
    if truth is None or told is None:
        yield "the daemon does not answer"
        return
    for engine in truth.engines.values():
        yield f"process {engine.pid} of {engine.model}"
    for name, unit in (truth.units or {}).items():
        yield f"{name} is {unit.active}"
    for instance in told.instances:
        yield f"{instance.name} is told {instance.state}"
    if truth.card.used:
        yield f"{truth.card.used} bytes of the card are used"
    if told.charged or told.quarantined or told.reservations:
        yield f"{told.charged} bytes are charged, {told.quarantined} in quarantine"
    slices = scene_slice()
    for pid in machine.processes_below(slices):
        yield f"process {pid} in {slices}"


def scene_slice() -> str:
    """Control group of all models."""
    import os

    own = machine.cgroup_of(Path("/proc/self/cgroup").read_text(encoding="utf-8"))
    base = own.partition(f"user@{os.getuid()}.service")
    return f"{base[0]}{base[1]}/lllm3090.slice"


def _summary(seed: int, deeds: Deeds, findings: Findings, driver: Driver) -> str:
    took_s = time.monotonic() - deeds.began_s
    counts = deeds.counts

    def row(kind: str) -> str:
        idle = counts[f"{kind}: nothing to do"]
        return f"  {kind:<16}{counts[kind]:5d}" + (f"   ({idle} had nothing to do)" if idle else "")

    endings = sorted(key for key in counts if " ended: " in key)
    longest = ", ".join(f"{kind} {age:.2f} s" for kind, age in sorted(findings.longest_s.items())) or "none"
    kinds: dict[str, int] = {}
    for each in deeds.violations:
        kinds[each.kind] = kinds.get(each.kind, 0) + 1
    lines = [
        f"chaos, seed {seed}: {took_s:.0f} s",
        "",
        "steps",
        *(row(kind) for kind in (*WORK, "settle") if counts[kind]),
        "faults",
        *(row(kind) for kind in FAULTS if counts[kind]),
        "endings",
        *(f"  {key:<56}{counts[key]:5d}" for key in endings),
        f"  {'streams to their end':<56}{driver.streams_whole:5d}",
        f"  {'streams cut off with their engine':<56}{driver.streams_cut:5d}",
        "checker",
        f"  {findings.looks} looks, {findings.compared} of them at a daemon that had said READY",
        f"  states seen: {', '.join(f'{state} {count}' for state, count in findings.states.most_common())}",
        f"  untrue for the longest time (limit {UNTRUE_LIMIT_S:g} s): {longest}",
        f"  most of the card used {findings.most_used // MIB} MiB, most promised {findings.most_promised // MIB} MiB",
        f"  engines that ended: {len(findings.deaths)}; events: {len(findings.events)}",
        f"violations: {', '.join(f'{kind} {count}' for kind, count in sorted(kinds.items())) or 'none'}",
    ]
    return "\n".join(lines)
