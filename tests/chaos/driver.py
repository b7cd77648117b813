"""Carries out steps: what people, programs and accidents do."""

from __future__ import annotations

import contextlib
import heapq
import http.client
import itertools
import json
import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from tests.chaos.deeds import STARTING, Deed, Deeds
from tests.chaos.excuses import NO_WORD
from tests.chaos.plan import MODELS, Step
from tests.chaos.scene import CONTEXT_TOKENS, MIB, Scene
from tests.chaos.told import UnixHttp
from tests.chaos.truth import MEMORY_CALL, Engine, Unit, find_engines, read_card, read_units, runs
from tests.chaos.watch import Watch, until
from tests.fakes.nvml import DRIVER_NOT_LOADED, FakeCard, FakeProcess
from tests.system.harness import DAEMON_UNIT, SOCKET_UNIT

UUID = FakeCard().uuid
ANSWER_S = 90.0  # for what may wait for room, and for a daemon that starts meanwhile
STREAM_S = 60.0
# Most loads are over soon; some outlast a restart of the daemon, which must find them loading.
QUICK_LOAD_S, LONG_LOAD_S = 0.4, 3.0
SETTLE_S = 45.0
# Until there is somebody to hit.
SOMEBODY_S = 3.0
# A start that is further away is one for which there was no room.
NO_START_S = 20.0
UNKNOWN_ERROR = 999
MEMORY_CALLS = (MEMORY_CALL, "nvmlDeviceGetMemoryInfo")
# How a load may end that the daemon answers; others are mistakes of the product.
REFUSALS = frozenset(
    {
        "insufficient_vram",
        "insufficient_memory",
        "queue_timed_out",
        "load_cancelled",
        "shutting_down",
        "card_unreadable",
        "card_in_error",
        "card_blocked",
        "bus_unavailable",
        "stop_failed",
        "not_loaded",
    }
)
# Of an engine that could not come up because of what the driver does.
EXCUSES_A_FAILED_LOAD = ("kill-engine", "segv-engine", "stop-unit", "bad-starts", "stranger")
LOUD_EXIT = {"exit": 3, "lines": ["E srv  chaos: this build cannot start today"]}
NO_ANSWER = (OSError, http.client.HTTPException)


class Driver:
    """Does what a plan says.

    Args:
        scene: where.
        watch: the checker, which is told what is wanted.
        deeds: where it is written down.
    """

    def __init__(self, scene: Scene, watch: Watch, deeds: Deeds) -> None:
        self._scene, self._watch, self._deeds = scene, watch, deeds
        self._clients = ThreadPoolExecutor(32, "client")
        self._asked: list[Future[None]] = []
        self._due: list[tuple[float, int, str, Callable[[], None]]] = []
        self._order = itertools.count()
        self._strangers: list[subprocess.Popen[bytes]] = []
        self.streams_whole = 0
        self.streams_cut = 0

    # --- the run -------------------------------------------------------------------------------------------

    def do(self, step: Step) -> None:
        """One step, and the pause after it."""
        self._deeds.counts[step.kind] += 1
        action: Callable[[Step], str | None] = getattr(self, "_" + step.kind.replace("-", "_"))
        head = f"step {step.number:3d}  {step.kind}"
        began = time.monotonic()
        told = action(step)
        if told is None:
            self._deeds.counts[f"{step.kind}: nothing to do"] += 1
            told = "nothing to do"
        took_s = time.monotonic() - began
        self._deeds.log(f"{head}  {told}" + (f"  ({took_s:.1f} s)" if took_s > 1 else ""))
        self._wait(step.pause_s)

    def _wait(self, pause_s: float) -> None:
        end = time.monotonic() + pause_s
        while True:
            now = time.monotonic()
            while self._due and self._due[0][0] <= now:
                _, _, name, action = heapq.heappop(self._due)
                action()
                self._deeds.log(f"          over: {name}")
            if now >= end:
                break
            next_due = self._due[0][0] if self._due else end
            time.sleep(max(0.0, min(end, next_due) - now))
        self._scene.sweep_card()

    def _later(self, after_s: float, name: str, action: Callable[[], None]) -> None:
        heapq.heappush(self._due, (time.monotonic() + after_s, next(self._order), name, action))

    def heal(self) -> None:
        """Nothing that lasts is so any more."""
        while self._due:
            _, _, name, action = heapq.heappop(self._due)
            action()
            self._deeds.log(f"          over: {name}")
        self._scene.sweep_card()

    def close(self) -> None:
        """Leave nothing of the driver behind."""
        self.heal()
        self._clients.shutdown(wait=False, cancel_futures=True)
        for stranger in self._strangers:
            stranger.kill()
            stranger.wait()

    # --- people and programs -------------------------------------------------------------------------------

    def _load(self, step: Step) -> str:
        options = {"evict": step.share < 0.7, "wait": step.share < 0.85, "pin": step.share > 0.95}
        number = step.number
        # The behaviour is read at an engine's start.
        self._scene.behave(load_s=LONG_LOAD_S if step.share % 0.1 > 0.07 else QUICK_LOAD_S)
        self._ask(lambda: self._carry_load(number, step.model, options))
        return f"{step.model} {' '.join(name for name, given in options.items() if given)}"

    def _ask(self, work: Callable[[], None]) -> None:
        self._asked = [each for each in self._asked if not each.done()]
        self._asked.append(self._clients.submit(self._guarded, work))

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001  # of a thread nobody would hear
            self._deeds.violated("test", f"a client failed: {type(error).__name__}: {error}")

    def _carry_load(self, number: int, model: str, options: dict[str, Any]) -> None:
        deed = self._deeds.did("load", model, lasts=True)
        body = {"model": model, "context_tokens": CONTEXT_TOKENS, **options}
        code, text = self._post("/v1/load", body)
        if code == "ready":
            # Before the deed is over: from now on it is missed.
            if not self._gone_since(model, deed):
                self._watch.want(model, f"loaded by step {number}", deed.at_s)
        else:
            self._watch.unwant(model)
        self._deeds.over(deed)
        self._deeds.counts[f"load ended: {code}"] += 1
        self._deeds.log(f"          load of step {number} ({model}): {code}")
        if code == "engine_failed":
            done = list(self._deeds.of(*EXCUSES_A_FAILED_LOAD))
            if not any(each.touches(deed.at_s - 10, time.monotonic()) for each in done):
                self._deeds.violated("refusal", f"the load of {model} by step {number}: {text}")
        elif code not in REFUSALS | {"ready", "cut off"}:
            self._deeds.violated(
                "refusal", f"the load of {model} by step {number} ended with {code}: {text}"
            )

    def _gone_since(self, model: str, load: Deed) -> bool:
        """Somebody has unloaded it while it was loaded."""
        ends = self._deeds.of("unload", "release", "stop-unit", "late-memory")
        return any(each.model in {"", model} and each.touches(load.at_s, time.monotonic()) for each in ends)

    def _unload(self, step: Step) -> str:
        self._ask(lambda: self._carry("unload", "/v1/unload", {"model": step.model}, step.model))
        return step.model

    def _release(self, _: Step) -> str:
        self._ask(lambda: self._carry("release", "/v1/release", {}, ""))
        return "everything"

    def _carry(self, kind: str, target: str, body: dict[str, Any], model: str) -> None:
        """Something that ends models."""
        deed = self._deeds.did(kind, model, lasts=True)
        self._watch.unwant(*([model] if model else []))
        code, text = self._post(target, body)
        self._watch.unwant(*([model] if model else []))
        deed.detail = code
        self._deeds.over(deed)
        self._deeds.counts[f"{kind} ended: {code}"] += 1
        self._deeds.log(f"          {kind} {model}: {code}")
        if code not in {"done", "not_loaded", "shutting_down", "cut off", "stop_failed", "ambiguous_model"}:
            self._deeds.violated("refusal", f"{kind} {model} ended with {code}: {text}")

    def _plan(self, step: Step) -> str:
        body = {"model": step.model, "context_tokens": CONTEXT_TOKENS}
        self._ask(lambda: self._expect("plan", "/v1/plan", body))
        return step.model

    def _pin(self, step: Step) -> str:
        self._ask(lambda: self._expect("pin", f"/v1/models/{step.model}/pin", {"pinned": True}))
        return step.model

    def _unpin(self, step: Step) -> str:
        self._ask(lambda: self._expect("unpin", f"/v1/models/{step.model}/pin", {"pinned": False}))
        return step.model

    def _reset(self, step: Step) -> str:
        self._ask(lambda: self._expect("reset", f"/v1/models/{step.model}/reset", {}))
        return step.model

    def _expect(self, kind: str, target: str, body: dict[str, Any]) -> None:
        code, text = self._post(target, body)
        self._deeds.counts[f"{kind} ended: {code}"] += 1
        if code not in REFUSALS | {"done", "cut off", "engine_failed"}:
            self._deeds.violated("refusal", f"{kind} ended with {code}: {text}")

    def _post(self, target: str, body: dict[str, Any]) -> tuple[str, str]:
        """How a request ended, as a code, and the last line of its answer."""
        connection = UnixHttp(self._scene.service.control_socket, ANSWER_S)
        try:
            connection.request("POST", target, json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            lines = answer.read().splitlines()
            last = json.loads(lines[-1]) if lines else {}
        except NO_ANSWER as error:
            self._cut_off(target, error)
            return "cut off", str(error)
        finally:
            connection.close()
        # What was done has a problem too where it may be forgotten: the disk was full.
        is_done = answer.status == 200 and "released_bytes" in last
        problem = None if is_done else last.get("problem") or (last if "code" in last else None)
        text = json.dumps(last)[:600]
        if problem is not None:
            return str(problem["code"]), text
        if target == "/v1/load":
            return ("ready" if last.get("kind") == "ready" else "cut off"), text
        return ("done" if answer.status == 200 else f"status {answer.status}"), text

    def _cut_off(self, target: str, error: Exception) -> None:
        """Only a daemon that was ended leaves a request without an answer."""
        now = time.monotonic()
        ends = self._deeds.of("kill-daemon", "term-daemon", "restart-daemon", "stop-daemon")
        if not any(each.touches(now - 15, now) for each in ends):
            self._deeds.violated("silence", f"{target} was not answered: {type(error).__name__}: {error}")

    def _stream(self, step: Step) -> str | None:
        engine = self._engine(step)
        if engine is None:
            return None
        self._ask(lambda: self._carry_stream(engine))
        return f"{engine.model} {engine.pid}"

    def _carry_stream(self, engine: Engine) -> None:
        deed = self._deeds.did("stream", engine.model, engine.pid, lasts=True)
        whole, words, why = False, 0, "it ended early"
        connection = UnixHttp(engine.socket, STREAM_S)
        try:
            body = json.dumps({"messages": [], "stream": True})
            connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            for line in answer:
                words += b'"content": "word' in line
                whole = whole or line.startswith(b"data: [DONE]")
        except NO_ANSWER as error:
            why = f"{type(error).__name__}: {error}"
        finally:
            connection.close()
        self._deeds.over(deed)
        if whole:
            self.streams_whole += 1
            return
        self.streams_cut += 1
        deed.detail = why if words else NO_WORD
        # The kernel closes its sockets before it is gone from /proc.
        if words and not until(lambda: not runs(engine.pid), 5):
            text = f"a stream from {engine.model} ({engine.pid}) broke after {words} words: {why}; its engine runs on"
            self._deeds.violated("stream", text)

    # --- accidents: the daemon -----------------------------------------------------------------------------

    def _daemon_pid(self) -> int:
        """Its process; where it has just ended, the next one."""
        until(lambda: self._deeds.going_on("stop-daemon") or self._daemon().main_pid != 0, SOMEBODY_S)
        return self._daemon().main_pid

    @staticmethod
    def _daemon() -> Unit:
        """Its unit; as if it were down where systemd does not answer."""
        return (read_units() or {}).get(DAEMON_UNIT, Unit(DAEMON_UNIT))

    def _kill_daemon(self, _: Step) -> str | None:
        pid = self._daemon_pid()
        self._forget_unwritten()
        return self._signal("kill-daemon", pid, signal.SIGKILL, run=self._phase()) if pid else None

    def _forget_unwritten(self) -> None:
        """On a full disk no wish can be written down: a daemon that is killed then takes along what was evicted.

        What runs must run on all the same, which the checker sees by the processes.
        """
        if self._deeds.going_on("fill-disk"):
            self._watch.unwant()
            self._deeds.counts["killed on a full disk: wishes that may be lost"] += 1

    def _kill_in_load(self, step: Step) -> str | None:
        """While an engine loads for longer than the next daemon takes to come."""
        there = {each.model for each in find_engines(self._scene.engine).values()}
        free = [name for name in MODELS if name not in there]
        if not free:
            return None
        model = free[int(step.share * len(free))]
        self._scene.behave(load_s=LONG_LOAD_S)
        self._forget_unwritten()
        self._ask(lambda: self._carry_load(step.number, model, {}))

        def begun() -> bool:
            return any(each.model == model for each in find_engines(self._scene.engine).values())

        if not until(begun, SOMEBODY_S):
            return None
        told = self._signal("kill-daemon", self._daemon_pid(), signal.SIGKILL, run=self._phase())
        return None if told is None else f"{model}, daemon {told}"

    def _term_daemon(self, _: Step) -> str | None:
        pid = self._daemon_pid()
        return self._signal("term-daemon", pid, signal.SIGTERM, run=self._phase()) if pid else None

    def _phase(self) -> str:
        """Whether the daemon has said READY: before it has, it has nothing to tell."""
        return "" if self._daemon().active == "active" else STARTING

    def _signal(
        self, kind: str, pid: int, number: signal.Signals, model: str = "", run: str = ""
    ) -> str | None:
        if pid <= 0:  # 0 would be all of us
            return None
        deed = self._deeds.did(kind, model, pid, run)
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            deed.kind = f"{kind}: too late"
            return None
        return f"{model} {pid}".strip()

    def _restart_daemon(self, _: Step) -> str:
        deed = self._deeds.did("restart-daemon", lasts=True)
        self._systemctl("restart", DAEMON_UNIT)
        self._deeds.over(deed)
        return ""

    def _stop_daemon(self, step: Step) -> str:
        if self._deeds.going_on("stop-daemon"):
            return "stopped already"
        deed = self._deeds.did("stop-daemon", detail=self._phase(), lasts=True)
        self._systemctl("stop", SOCKET_UNIT, DAEMON_UNIT)

        def start() -> None:
            self._systemctl("start", SOCKET_UNIT, DAEMON_UNIT)
            self._deeds.over(deed)

        self._later(step.lasts_s, "the daemon is stopped", start)
        return f"for {step.lasts_s} s"

    def _freeze_daemon(self, step: Step) -> str | None:
        pid = self._daemon_pid()
        return self._freeze("freeze-daemon", pid, step.lasts_s * 0.8) if pid else None

    def _freeze(self, kind: str, pid: int, lasts_s: float, model: str = "") -> str | None:
        deed = self._deeds.did(kind, model, pid, lasts=True)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)

        def thaw() -> None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
            self._deeds.over(deed)

        self._later(lasts_s, f"{kind} {pid}", thaw)
        return f"{model} {pid} for {lasts_s:.1f} s".strip()

    def _systemctl(self, *words: str) -> None:
        command = ["systemctl", "--user", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=90)
        if done.returncode:
            self._deeds.log(f"          {' '.join(words)}: {done.stderr.strip()}")

    # --- accidents: engines --------------------------------------------------------------------------------

    def _engine(self, step: Step) -> Engine | None:
        """One of those that serve; where none does, one is loaded, so that a fault has somebody to hit."""
        if not self._alive():
            self._ask(lambda: self._carry_load(step.number, step.model, {}))
            until(lambda: bool(self._alive()), SOMEBODY_S)
        found = self._alive()
        return found[int(step.share * len(found))] if found else None

    def _alive(self) -> list[Engine]:
        """Engines that serve and have not been killed since the last look."""
        killed = {deed.pid for deed in self._deeds.of("kill-engine", "segv-engine")}
        found = [each for each in self._watch.engines if each.pid not in killed and runs(each.pid)]
        return sorted(found, key=lambda each: each.model)

    def _kill_engine(self, step: Step) -> str | None:
        return self._end_engine("kill-engine", step, signal.SIGKILL)

    def _segv_engine(self, step: Step) -> str | None:
        return self._end_engine("segv-engine", step, signal.SIGSEGV)

    def _end_engine(self, kind: str, step: Step, number: signal.Signals) -> str | None:
        engine = self._engine(step)
        if engine is None:
            return None
        with contextlib.suppress(ProcessLookupError):  # no core files
            resource.prlimit(engine.pid, resource.RLIMIT_CORE, (0, 0))
        run = engine.unit.removesuffix(".service").rpartition("-")[2]
        return self._signal(kind, engine.pid, number, engine.model, run)

    def _freeze_engine(self, step: Step) -> str | None:
        engine = self._engine(step)
        if engine is None:
            return None
        return self._freeze("freeze-engine", engine.pid, step.lasts_s, engine.model)

    def _stop_unit(self, step: Step) -> str | None:
        engine = self._engine(step)
        if engine is None:
            return None
        self._deeds.did("stop-unit", engine.model, engine.pid)
        self._watch.unwant(engine.model)
        self._ask(lambda: self._systemctl("stop", engine.unit))
        return engine.unit

    def _bad_starts(self, step: Step) -> str:
        deed = self._deeds.did("bad-starts", lasts=True)
        self._scene.behave(crash_during_load=LOUD_EXIT)

        def good() -> None:
            self._scene.behave(crash_during_load=None)
            self._deeds.over(deed)

        self._later(step.lasts_s * 2, "engines exit at their start", good)
        return f"for {step.lasts_s * 2:.1f} s"

    def _deaf_engines(self, step: Step) -> str:
        self._scene.behave(ignore_sigterm=True)
        self._later(
            step.lasts_s * 2, "engines ignore SIGTERM", lambda: self._scene.behave(ignore_sigterm=None)
        )
        return f"that start within {step.lasts_s * 2:.1f} s"

    def _late_memory(self, step: Step) -> str | None:
        engine = self._engine(step)
        if engine is None or not self._scene.keep_late(engine.pid):
            return None
        self._ask(lambda: self._carry("late-memory", "/v1/unload", {"model": engine.model}, engine.model))
        self._later(
            step.lasts_s * 1.5, f"memory of {engine.pid} is late", lambda: self._scene.give_back(engine.pid)
        )
        return f"{engine.model} {engine.pid} for {step.lasts_s * 1.5:.1f} s"

    # --- accidents: the machine ----------------------------------------------------------------------------

    def _restart_bus(self, _: Step) -> str:
        self._deeds.did("restart-bus")
        self._systemctl("restart", "dbus.service")
        return ""

    def _reload_manager(self, _: Step) -> str:
        self._deeds.did("reload-manager")
        self._systemctl("daemon-reload")
        return ""

    def _reexec_manager(self, _: Step) -> str:
        self._deeds.did("reexec-manager")
        self._systemctl("daemon-reexec")
        return ""

    def _fill_disk(self, step: Step) -> str | None:
        if self._deeds.going_on("fill-disk"):
            return None
        deed = self._deeds.did("fill-disk", lasts=True)
        told = self._scene.fill_disk()

        def free() -> None:
            self._scene.free_disk()
            self._deeds.over(deed)

        self._later(step.lasts_s * 2, "the disk is full", free)
        return f"{told} for {step.lasts_s * 2:.1f} s"

    def _fail_nvml(self, step: Step) -> str | None:
        if self._deeds.going_on("fail-nvml"):
            return None
        deed = self._deeds.did("fail-nvml", lasts=True)
        code = UNKNOWN_ERROR if step.share < 0.5 else DRIVER_NOT_LOADED
        for call in MEMORY_CALLS:
            self._scene.nvml.fail(call, code)

        def recover() -> None:
            self._scene.nvml.recover()
            self._deeds.over(deed)

        self._later(step.lasts_s * 1.5, "NVML fails", recover)
        return f"with {code} for {step.lasts_s * 1.5:.1f} s"

    def _lose_card(self, step: Step) -> str | None:
        if self._deeds.going_on("lose-card"):
            return None
        deed = self._deeds.did("lose-card", lasts=True)
        self._scene.nvml.lose(UUID)

        def find() -> None:
            self._scene.nvml.find_again(UUID)
            self._deeds.over(deed)

        self._later(step.lasts_s * 1.5, "the card is lost", find)
        return f"for {step.lasts_s * 1.5:.1f} s"

    def _stranger(self, step: Step) -> str | None:
        card = read_card(self._scene.nvml.state.read_text(encoding="utf-8"))
        # What a model that loads has not taken yet would be taken from under it; no daemon keeps programs from that.
        coming = {deed.model for deed in self._deeds.of("load") if deed.until_s is None}
        engines = self._watch.engines
        promised = sum(self._scene.prices[name] for name in coming | {each.model for each in engines})
        yet_to_come = max(0, promised - card.of([each.pid for each in engines]))
        size = int((card.total - card.reserved - card.used - yet_to_come) * step.share)
        if size < MIB:
            return None
        deed = self._deeds.did("stranger", lasts=True)
        stranger = subprocess.Popen(["sleep", "1000"])
        self._strangers.append(stranger)
        self._scene.nvml.add_process(FakeProcess(stranger.pid, size))

        def leave() -> None:
            self._scene.nvml.remove_process(stranger.pid)
            stranger.kill()
            stranger.wait()
            self._deeds.over(deed)

        self._later(step.lasts_s * 2, f"a stranger ({stranger.pid}) is there", leave)
        return f"{stranger.pid} takes {size // MIB} MiB for {step.lasts_s * 2:.1f} s"

    # --- rest ----------------------------------------------------------------------------------------------

    def _settle(self, _: Step) -> str:
        self.settle("now and then")
        return "everything rests, and all figures agree"

    def settle(self, when: str) -> None:
        """Heal everything, wait until nothing is on its way, and see that nothing differs then."""
        self.heal()
        # A daemon that ended well comes back when it is asked, and the checker asks none that is down.
        self._ask(lambda: self._expect("resume", "/v1/resume", {}))
        reasons: list[str] = []

        def rests() -> bool:
            reasons[:] = list(self._unrest())
            return not reasons

        if not until(rests, SETTLE_S):
            self._deeds.violated("unrest", f"after {SETTLE_S:.0f} s of rest ({when}): {'; '.join(reasons)}")

    def _unrest(self) -> Iterator[str]:
        asked = sum(not each.done() for each in self._asked)
        if asked:
            yield f"{asked} requests are not answered"
        _, told, differences = self._watch.next_look()
        if told is None:
            # One that was ending well when it was asked last comes back with the next who asks.
            self._ask(lambda: self._expect("resume", "/v1/resume", {}))
            yield "the daemon does not answer"
            return
        for difference in differences:
            yield difference.text
        rest = {"ready", "latched", "failed"}
        for instance in told.instances:
            if instance.state not in rest:
                yield f"{instance.name} is {instance.state}"
            elif instance.state == "failed" and (instance.retry_in_s or NO_START_S) < NO_START_S:
                yield f"{instance.name} starts again in {instance.retry_in_s} s"
        if told.pending:
            yield f"{', '.join(told.pending)} wait for room"

    def empty(self) -> None:
        """Unload everything that is there."""
        _, told, _ = self._watch.next_look()
        for name in sorted({each.name for each in told.instances} if told else ()):
            self._carry("unload", "/v1/unload", {"model": name}, name)


def nobody_waits(threads: str = "client") -> bool:
    """No client is at work any more."""
    return not any(each.name.startswith(threads) and each.is_alive() for each in threading.enumerate())
