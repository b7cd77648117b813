"""Carrying out what takes time: each effect becomes a coroutine that ends by submitting an event.

None of these changes state. They run beside the writer, so that no model's trouble blocks another's request.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from lllm3090d.bus.systemd import SystemdManager
from lllm3090d.bus.unit_status import EXITED, UnitStatus, explain_exit
from lllm3090d.engines.crash_causes import LINES_OF_INTEREST, CrashCause, Ending, Finding, classify
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.serving.disk_rates import DiskRates
from lllm3090d.serving.drains import remove
from lllm3090d.serving.engine_logs import EngineLogs, with_log_file
from lllm3090d.serving.events import (
    Activity,
    CheckIdle,
    EngineReady,
    Event,
    ForgetUnit,
    IdleChecked,
    LoadStalled,
    MemoryReleased,
    PostMortemRead,
    ReadPostMortem,
    StartFinished,
    StartUnit,
    StopFinished,
    StopUnit,
    TakesMore,
    TierChecked,
    UnitSeen,
    Verified,
    Verify,
)
from lllm3090d.serving.journal import LINES_MAX
from lllm3090d.serving.load_watch import LoadCounters, LoadLimits, LoadVerdict, load_cap_s
from lllm3090d.serving.observation import HOST, Observation, RunProcesses
from lllm3090d.serving.peaks import Peaks
from lllm3090d.serving.probe import Probe, probe, wants_probe
from lllm3090d.serving.processes import load_counters_of
from lllm3090d.serving.readiness import Progress, wait_until_ready
from lllm3090d.serving.release_check import ReleaseCheck, missing_of
from lllm3090d.serving.running import Instance
from lllm3090d.serving.scheduler import Scheduler
from lllm3090d.serving.tier_check import check_tier
from lllm3090d.serving.unit_spec import identifier
from lllm3090d.settings import Settings, VerifyAfterLoad

log = logging.getLogger(__name__)
T = TypeVar("T")

# Beyond TimeoutStopUSec systemd has sent SIGKILL; what is not dead then is in the kernel's hands.
STOP_MARGIN_S = 5.0
POST_MORTEM_LINES = LINES_OF_INTEREST
MEMORY_POLL_S = 0.05
QUARANTINE_POLL_S = 1.0
BUS_POLL_S = 0.5
DISK_PATIENCE_S = 2.0  # a network mount that hangs must not keep a load from being watched


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """How far the load of an instance is, bytes."""

    instance: Instance
    resident_bytes: int
    expected_bytes: int


class Effects:
    """The slow half of the daemon.

    Args:
        manager: the user's systemd.
        scheduler: read, never changed.
        settings: the present settings.
        observe: reads the cards.
        ask: asks engines what they are doing, by run.
        submit: hands an event to the writer.
        on_progress: told how far a load is.
        fence: limits what an instance may take of its cards, whose unit runs and has a control group.
        logs: of engines; None for the journal alone.
        card_evidence: what a card has reported that may have ended an instance; None where nobody tells.
        disk_rates: how fast disks are; None where nobody remembers.
    """

    def __init__(
        self,
        *,
        manager: SystemdManager,
        scheduler: Scheduler,
        settings: Callable[[], Settings],
        observe: Callable[[], Observation],
        ask: Callable[[Sequence[Instance]], Awaitable[Mapping[str, Activity]]],
        submit: Callable[[Event], None],
        on_progress: Callable[[LoadProgress], None],
        fence: Callable[[Instance], None] = lambda _: None,
        logs: EngineLogs | None = None,
        card_evidence: Callable[[Instance], Awaitable[str | None]] | None = None,
        disk_rates: DiskRates | None = None,
    ) -> None:
        self._manager = manager
        self._scheduler = scheduler
        self._settings = settings
        self._observe = observe
        self._ask = ask
        self._peaks: dict[str, Peaks] = {}  # of runs that are ready and not looked at since
        self._submit = submit
        self._on_progress = on_progress
        self._fence = fence
        self._logs = logs or EngineLogs()
        self._card_evidence = card_evidence
        self._disk_rates = disk_rates
        self._releasing: dict[str, ReleaseCheck] = {}  # in the order in which they ended
        self._starting: dict[str, asyncio.Event] = {}  # set when systemd has answered; a stop waits for that

    async def start_unit(self, effect: StartUnit) -> None:
        """Start the unit; ends in StartFinished, or in the news of a unit that has failed."""
        started = self._starting[effect.run] = asyncio.Event()
        try:
            await self._start(effect)
        finally:
            started.set()
            del self._starting[effect.run]

    async def _start(self, effect: StartUnit) -> None:
        unit = effect.spec.name
        result: str | None = None
        unanswered: LlmError | None = None
        try:
            self._make_sockets_dir()
            try:
                properties = await asyncio.to_thread(with_log_file, effect.spec)
                result = await self._manager.start(unit, properties)
            except LlmError as error:
                if error.code is not ErrorCode.BUS_UNAVAILABLE:
                    raise
                unanswered = error
            status = await _once_the_bus_answers(lambda: self._manager.status(unit))
        except LlmError as error:
            self._submit(StartFinished(effect.run, error))
            return
        if status is not None:
            # First the facts (PID, cgroup), then the news: who waits for the engine needs them.
            self._submit(UnitSeen(status))
        if unanswered is not None:
            # systemd may have carried it out all the same: what is there says so, and its signals say what follows.
            if status is None:
                self._submit(StartFinished(effect.run, unanswered))
            return
        if result in {"done", "skipped"}:
            self._submit(StartFinished(effect.run, None))
        elif status is None or not status.is_failed:
            failure = LlmError(
                ErrorCode.ENGINE_FAILED,
                f"the unit {unit} could not be started: systemd's job ended with {result}",
                hint=f"See: journalctl --user-unit {unit}",
                unit=unit,
            )
            self._submit(StartFinished(effect.run, failure))

    def _make_sockets_dir(self) -> None:
        """Somebody may have removed it since the daemon's start, and the engine makes no directories."""
        directory = self._settings().engine_sockets_dir
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise LlmError(
                ErrorCode.RUNTIME_DIR_UNUSABLE,
                f"the directory of the engines' sockets, {directory}, cannot be made: {error.strerror}",
                hint="Remove what is in its place.",
                path=str(directory),
            ) from error

    async def watch(self, run: str) -> None:
        """Wait for the engine; ends in EngineReady or LoadStalled."""
        instance = self._scheduler.by_run(run)
        if instance is None:
            return
        if instance.control_group is None:
            await self._look_at(instance.unit)
        held = self._scheduler.ledger.of(run)
        on_cards = [each for each in held if each.where != HOST] or held
        expected_bytes = sum(each.at_ready_bytes for each in on_cards)
        promised = {each.where: each.reserved_bytes for each in held}
        self._fence(instance)
        peaks = Peaks(run)

        def resident() -> int:
            return self._held_now(peaks)

        latest = Progress(0, 0.0, 0.0)

        def tell(progress: Progress) -> None:
            nonlocal latest
            latest = progress
            if any(size > promised.get(where, size) for where, size in peaks.highest.items()):
                self._submit(TakesMore(run, dict(peaks.highest)))
            self._on_progress(LoadProgress(instance, progress.resident_bytes, expected_bytes))

        def counters() -> LoadCounters:
            try:
                return load_counters_of(RunProcesses(instance.main_pid, instance.control_group))
            except OSError as error:  # no file descriptors, for a moment
                log.warning("how far a load is cannot be read", extra={"reason": error.strerror})
                return LoadCounters()

        settings = self._settings()
        size_bytes, chosen_s = instance.record.size_bytes, settings.load_cap_s
        cap_s = load_cap_s(size_bytes, await self._disk_rate(instance.record.path), chosen_s)
        limits = LoadLimits(settings.load_timeout_s, cap_s, None if chosen_s else size_bytes)
        given_up = await wait_until_ready(
            instance.record.socket,
            lambda: instance.control_group or "",
            resident,
            tell,
            limits=limits,
            counters=counters,
        )
        if given_up is None:
            resident()
            self._peaks[run] = peaks
            self._submit(EngineReady(run, dict(peaks.highest)))
        else:
            self._submit(LoadStalled(run, _given_up(instance, given_up, limits, resident(), latest)))
        if latest.disk_bytes_per_s is not None and self._disk_rates is not None:
            # Last, for nobody is to wait for the disk; once it has begun, nothing that ends this task ends it.
            await asyncio.to_thread(self._disk_rates.saw, instance.record.path, latest.disk_bytes_per_s)

    def _look(self) -> Observation | None:
        """The cards now; None where nothing can be read, which passes."""
        try:
            return self._observe()
        except LlmError as error:
            log.warning("the cards cannot be looked at", extra={"reason": error.message})
            return None

    def _held_now(self, peaks: Peaks) -> int:
        """What a run holds of all cards; 0 where that is not known."""
        seen = self._look()
        return 0 if seen is None else peaks.look(seen)

    async def _disk_rate(self, path: Path) -> float | None:
        """What was seen of the disk that a file is on; None where nothing was, or the disk does not answer."""
        if self._disk_rates is None:
            return None
        try:
            async with asyncio.timeout(DISK_PATIENCE_S):
                return await asyncio.to_thread(self._disk_rates.of, path)
        except TimeoutError:
            return None

    async def check_tier(self, run: str) -> None:
        """Where a cache was to be divided, find out from the log whether it is: the engine does not say so else."""
        instance = self._scheduler.by_run(run)
        tier = instance.plan.tier if instance is not None else None
        if instance is None or tier is None:
            return
        try:
            lines = await self._logs.tail(instance.unit, LINES_MAX)
        except LlmError as error:
            log.warning(
                "whether the cache is divided cannot be read",
                extra={"unit": instance.unit, "reason": error.message},
            )
            return
        verdict = check_tier(tier, (line.message for line in lines))
        if not verdict.in_force and len(lines) == LINES_MAX:
            # Of an engine that has said much since, the lines of its start lie further back.
            log.info("whether the cache is divided is no longer in the log", extra={"unit": instance.unit})
            return
        self._submit(
            TierChecked(instance.run, verdict.in_force, " ".join((verdict.reason, *verdict.differences)))
        )

    async def _look_at(self, unit: str) -> None:
        """Signals do not carry the cgroup, without which nobody knows whose socket it is: ask for it."""
        try:
            status = await self._manager.status(unit)
        except LlmError as error:
            log.warning("a unit cannot be read", extra={"unit": unit, "reason": error.message})
        else:
            if status is not None:
                self._submit(UnitSeen(status))

    async def stop_unit(self, effect: StopUnit) -> None:
        """Stop the unit, and kill it where it is not to end by itself; ends in StopFinished.

        Not before systemd has answered to its start: else there may be nothing to stop yet, and an engine that nobody
        knows a moment later.
        """
        started = self._starting.get(effect.run)
        if started is not None:
            await started.wait()

        def stop() -> Awaitable[object]:
            return self._manager.stop(effect.unit, self._settings().stop_timeout_s + STOP_MARGIN_S)

        try:
            if effect.kill:
                await self._kill(effect.unit)
            await _once_the_bus_answers(stop)
        except LlmError as error:
            self._submit(StopFinished(effect.run, error))
        else:
            self._submit(StopFinished(effect.run, None))

    async def _kill(self, unit: str) -> None:
        """What cannot be killed is stopped as any other."""
        try:
            await _once_the_bus_answers(lambda: self._manager.kill(unit, signal.SIGKILL))
        except LlmError as error:
            log.warning("a unit could not be killed", extra={"unit": unit, "reason": error.message})

    async def post_mortem(self, effect: ReadPostMortem) -> None:
        """Find out why the unit ended; ends in PostMortemRead."""
        ending = explain_exit(effect.status) if effect.status else "ended; systemd keeps no record of how"
        try:
            lines = await self._logs.last_words(effect.unit, POST_MORTEM_LINES)
        except LlmError as error:
            lines = ()
            log.warning(
                "the engine's last lines cannot be read",
                extra={"unit": effect.unit, "reason": error.message},
            )
        texts = [line.message for line in lines]
        instance = self._scheduler.by_run(effect.run)
        on_card = instance is None or instance.plan.on_card
        reported = None
        if self._card_evidence is not None and instance is not None and on_card:
            reported = await self._card_evidence(instance)
        found = classify(_ending_of(effect.status, on_card), texts, reported)
        if found.cause is not CrashCause.UNKNOWN:
            ending = _told_once(found, ending, effect.status)
        told = f"; its last line: {texts[-1]}" if texts and texts[-1] != found.line else ""
        self._submit(
            PostMortemRead(
                effect.run,
                LlmError(
                    ErrorCode.ENGINE_FAILED,
                    f"the engine {ending}{told}",
                    hint=f"{found.kind.advice} See: journalctl --user SYSLOG_IDENTIFIER={identifier(effect.unit)}",
                    unit=effect.unit,
                    last_lines=texts,
                    cause=str(found.cause),
                    advice=found.kind.advice,
                ),
            )
        )

    async def wait_for_memory(self, run: str, seen: Observation | None) -> None:
        """Until the cards show the memory of a run as free; said once more when that takes longer than allowed.

        Args:
            run: what has ended.
            seen: the cards when it was last seen to hold something; None where it never was.
        """
        self._peaks.pop(run, None)
        measured = {
            each.where: max(each.measured_bytes or 0, _held(seen, each.where, run))
            for each in self._scheduler.ledger.of(run)
            if each.where != HOST
        }
        # With all that are missing something still: what is missing is missing once.
        self._releasing[run] = ReleaseCheck(seen, run, measured)
        began = time.monotonic()
        late = False
        while True:
            seen_now = self._look()
            if seen_now is None:
                await asyncio.sleep(QUARANTINE_POLL_S)
                continue
            missing = missing_of(self._releasing.values(), seen_now)[run]
            if not missing:
                del self._releasing[run]
                self._submit(MemoryReleased(run, {}))
                return
            if late or time.monotonic() - began > self._settings().release_timeout_s:
                late = True
                self._submit(MemoryReleased(run, missing))
            await asyncio.sleep(QUARANTINE_POLL_S if late else MEMORY_POLL_S)

    async def check_idle(self, effect: CheckIdle) -> None:
        """Ask engines that are to go once more whether they are idle; one that does not say so is not."""
        asked = [each for each in map(self._scheduler.by_run, effect.runs) if each is not None]
        activity = await self._ask(asked)
        idle = {run for run, seen in activity.items() if seen.busy is False}
        busy = frozenset(each.run for each in asked if each.run not in idle)
        silent = busy - {run for run, seen in activity.items() if seen.busy}
        self._submit(IdleChecked(effect.token, busy, silent))

    async def verify(self, effect: Verify) -> None:
        """See what a model holds after its load, and have it compute one batch where that is wanted; ends in Verified.

        Nothing is looked at where the settings say so.
        """
        run = effect.run
        peaks = self._peaks.pop(run, None) or Peaks(run)
        instance, setting = self._scheduler.by_run(run), self._settings().verify_after_load
        if instance is None or setting is VerifyAfterLoad.OFF:
            return
        seen = self._look()
        if seen is None:
            return
        peaks.look(seen)
        tokens = 0
        if effect.computes and wants_probe(setting, seen.card.kind):
            tokens = await self._compute(instance, peaks)
        self._submit(Verified(run, peaks.highest, tokens))

    async def _compute(self, instance: Instance, peaks: Peaks) -> int:
        """Have it compute one batch; returns its tokens, 0 where nothing came of it."""
        draft = instance.plan.launch.draft
        what = Probe(
            socket=instance.record.socket,
            control_group=instance.control_group or "",
            batch_tokens=instance.plan.launch.batch_tokens,
            window_tokens=instance.plan.window_tokens,
            predict_tokens=1 if draft is None else draft.tokens + 1,
            purpose=instance.plan.launch.purpose,
        )
        found = await probe(what, lambda: self._held_now(peaks))
        if found.skipped:
            log.info("a model was not verified", extra={"model": instance.name, "reason": found.skipped})
        return found.prompt_tokens

    async def forget(self, effect: ForgetUnit) -> None:
        """Leave nothing of a dead unit behind; what cannot be removed is only logged."""
        try:
            # A unit that somebody made by hand may name any path: only in our own directory anything is removed.
            if effect.socket.parent == self._settings().engine_sockets_dir:
                remove(effect.socket)
        except OSError as error:
            log.warning("a socket could not be removed", extra={"path": effect.socket, "reason": str(error)})
        try:
            await _once_the_bus_answers(lambda: self._manager.reset_failed(effect.unit))
        except LlmError as error:
            log.warning(
                "a dead unit could not be reset", extra={"unit": effect.unit, "reason": error.message}
            )


def _given_up(
    instance: Instance, verdict: LoadVerdict, limits: LoadLimits, held_bytes: int, latest: Progress
) -> LlmError:
    if verdict is LoadVerdict.TOO_LONG:
        cap_s = max(limits.cap_s, 0.0 if limits.file_bytes is None else latest.cap_s)
        why, setting = f"was not ready after {cap_s:.0f} s, although it got on", "load_cap_s"
        if latest.disk_bytes_per_s is not None:
            why += f" (its disk gave {latest.disk_bytes_per_s / 1e6:.1f} MB/s)"
    else:
        why, setting = f"made no progress for {limits.stall_s:g} s", "load_timeout_s"
    return LlmError(
        ErrorCode.LOAD_TIMED_OUT,
        f"{instance.name} {why} (it held {held_bytes} bytes), and was stopped",
        hint=f"See: lllm3090ctl logs '{instance.name}'; the limit is the setting {setting}.",
        unit=instance.unit,
        verdict=str(verdict),
    )


def _ending_of(status: UnitStatus | None, on_card: bool) -> Ending:
    """What systemd says of an end that nobody here asked for."""
    if status is None or status.exec_main_code == 0:
        return Ending(result="" if status is None else status.result, on_card=on_card)
    if status.exec_main_code == EXITED:
        return Ending(status.result, exit_status=status.exec_main_status, on_card=on_card)
    return Ending(status.result, signal_number=status.exec_main_status, on_card=on_card)


def _told_once(found: Finding, ending: str, status: UnitStatus | None) -> str:
    """The cause, what systemd says unless that is the same, and the line that tells the cause."""
    title = found.kind.title
    is_same = ending.startswith(title) or (status is not None and status.result == "oom-kill")
    told = ending if is_same else f"{title}; it {ending}"
    told += f"; the card reported {found.reported}" if found.reported else ""
    return told + (f"; it said: {found.line}" if found.line else "")


def _held(seen: Observation | None, where: str, run: str) -> int:
    state = seen.of(where) if seen is not None else None
    return state.in_use.get(run, 0) if state is not None else 0


async def _once_the_bus_answers(ask: Callable[[], Awaitable[T]]) -> T:
    """Ask again for as long as the bus does not answer; the daemon itself ends when that lasts."""
    while True:
        try:
            return await ask()
        except LlmError as error:
            if error.code is not ErrorCode.BUS_UNAVAILABLE:
                raise
            log.info("systemd does not answer; it is asked again", extra={"reason": error.message})
        await asyncio.sleep(BUS_POLL_S)
