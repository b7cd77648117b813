"""The engine's own projection of a launch, by ``llama-fit-params``: arguments, run, result, memory of results.

Whether one may be made is decided by :func:`lllm3090d.planning.projection.may_run`, before; nothing is loaded, but a
device context is made and recurrent states are really allocated. Blocking; callers use a thread.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sqlite3
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lllm3090d.engines.capabilities import Build, Capabilities, DryRunAbility
from lllm3090d.engines.process import Answer, clean_environment, run_program
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.planning.launch import Launch
from lllm3090d.planning.projection import Figures, Projection, Where
from lllm3090d.planning.units import MIB
from lllm3090d.store import Store

# Measured 0.1 to 3 s from memory. A cold disk gives the header with its vocabulary and the libraries of a CUDA build
# on top of that, about 1 GB: 5 s at 200 MB/s.
TIME_LIMIT_S = 20.0
ALL_LAYERS = "999"
KEPT_RESULTS = 1000
# llama.cpp logs from a thread of its own, and what that has not written when the program aborts is lost.
ASKED_AGAIN = 2
REASONS = ("error loading model:", " E ", "error:")
SCHEME = 1  # raised when arguments or results mean something else
HOST_NAME = "Host"
FIGURES_LINE = re.compile(
    r"(?P<name>\S(?:.*\S)?)\s+(?P<model>\d{1,9})\s+(?P<context>\d{1,9})\s+(?P<compute>\d{1,9})\s*"
)


@dataclass(frozen=True, slots=True)
class DryRun:
    """What to project.

    Attributes:
        build: the engine.
        capabilities: its answers.
        digest: of its binaries.
        checkpoint_path: the first or only shard.
        checkpoint: fingerprint of the checkpoint.
        launch: the resolved values.
        where: what :func:`may_run` allows; never NOWHERE.
    """

    build: Build
    capabilities: Capabilities
    digest: str
    checkpoint_path: Path
    checkpoint: str
    launch: Launch
    where: Where


class DryRuns:
    """Makes dry runs, one at a time, and remembers their results in the store. Thread-safe.

    Args:
        store: gives the place where results are kept.
        time_limit_s: for one run.
    """

    def __init__(self, store: Callable[[], Store], *, time_limit_s: float = TIME_LIMIT_S) -> None:
        self._store = store
        self._time_limit_s = time_limit_s
        self._lock = threading.Lock()

    def known(self, run: DryRun) -> Projection | None:
        """A projection that was made before; waits for nobody. Raises as :meth:`project`."""
        return self._known(
            result_key(run, dry_run_arguments(run.launch, _ability(run), run.where)), run.where
        )

    def project(self, run: DryRun, *, inherited: Mapping[str, str] | None = None) -> Projection:
        """The engine's projection, as it reports it: outputs are not corrected yet.

        A failure is not remembered.

        Args:
            run: what to project.
            inherited: environment to start from, cleaned; None for the process's own.

        Raises:
            LlmError: ENGINE_UNUSABLE where the build cannot project or says something unknown; ENGINE_FAILED where it
                gave up or did not answer in time, with its last lines; UNSUPPORTED_COMBINATION for what its arguments
                cannot express.
            ValueError: it is not allowed.
        """
        ability = _ability(run)
        arguments = dry_run_arguments(run.launch, ability, run.where)
        key = result_key(run, arguments)
        with self._lock:
            known = self._known(key, run.where)
            if known is not None:
                return known
            environment = clean_environment(run.build, os.environ if inherited is None else inherited)
            command = ("-m", str(run.checkpoint_path), *arguments)
            answer = run_program(run.build, ability.program, command, environment, self._time_limit_s)
            for _ in range(ASKED_AGAIN):
                if answer.succeeded or answer.timed_out or _tells_why(answer.last_lines):
                    break
                answer = run_program(run.build, ability.program, command, environment, self._time_limit_s)
            if not answer.succeeded:
                raise _failed(run, ability, answer, self._time_limit_s)
            projection = parse_projection(answer.stdout, run.where)
            if projection is None:
                raise _not_understood(ability, answer)
            self._keep(key, projection)
            return projection

    def _known(self, key: str, where: Where) -> Projection | None:
        rows = self._store().rows("SELECT body FROM dry_runs WHERE key = ?", (key,))
        return parse_projection(str(rows[0][0]), where) if rows else None

    def _keep(self, key: str, projection: Projection) -> None:
        body = "\n".join(
            f"{name} {each.weights_bytes // MIB} {each.context_bytes // MIB} {each.compute_bytes // MIB}"
            for name, each in (*projection.devices, (HOST_NAME, projection.host))
        )

        def write(connection: sqlite3.Connection) -> None:
            connection.execute("INSERT OR REPLACE INTO dry_runs (key, body) VALUES (?, ?)", (key, body))
            connection.execute(
                "DELETE FROM dry_runs WHERE id <= (SELECT max(id) FROM dry_runs) - ?", (KEPT_RESULTS,)
            )

        self._store().change(write)


def dry_run_arguments(launch: Launch, ability: DryRunAbility, where: Where) -> tuple[str, ...]:
    """The arguments of ``llama-fit-params`` for a launch, but for its model.

    It takes those of the common group only, so drafting is left out, and its slots never share a pool.

    Raises:
        LlmError: ENGINE_UNUSABLE where an option is missing; UNSUPPORTED_COMBINATION for a pool of several slots.
        ValueError: it may not be made at all.
    """
    if where is Where.NOWHERE:
        raise ValueError("this dry run is not allowed")
    if launch.unified and launch.parallel > 1:
        raise LlmError(
            ErrorCode.UNSUPPORTED_COMBINATION,
            f"The engine's dry run cannot project a pool that {launch.parallel} slots share.",
            hint="Plan it with a window of its own for each slot.",
        )
    line = _Arguments(ability)
    line.value("on", "-fitp", "--fit-print")
    line.value(str(launch.context_tokens), "-c", "--ctx-size")
    line.value(str(launch.parallel), "-np", "--parallel")
    line.value(launch.cache_type_k.value, "-ctk", "--cache-type-k")
    line.value(launch.cache_type_v.value, "-ctv", "--cache-type-v")
    line.value(str(launch.batch_tokens), "-b", "--batch-size")
    line.value(str(launch.micro_batch_tokens), "-ub", "--ubatch-size")
    line.value("on", "-fa", "--flash-attn")
    line.switch("-nr", "--no-repack")  # repacked weights are counted under another name in older builds
    if launch.swa_full:
        line.switch("--swa-full")
    if where is Where.HOST:
        line.value("none", "-dev", "--device")
        return line.found
    layers = launch.layers
    count = ALL_LAYERS if layers.layers_on_card is None else str(layers.layers_on_card)
    line.value(count, "-ngl", "--gpu-layers", "--n-gpu-layers")
    if layers.expert_layers_on_host:
        line.value(str(layers.expert_layers_on_host), "-ncmoe", "--n-cpu-moe")
    if layers.cache_on_host:
        line.switch("-nkvo", "--no-kv-offload")
    return line.found


class _Arguments:
    """Collects arguments in the first spelling that the program offers."""

    def __init__(self, ability: DryRunAbility) -> None:
        self._ability = ability
        self.found: tuple[str, ...] = ()

    def value(self, value: str, *spellings: str) -> None:
        self.found += (self._needed(spellings), value)

    def switch(self, *spellings: str) -> None:
        self.found += (self._needed(spellings),)

    def _needed(self, spellings: tuple[str, ...]) -> str:
        flag = next((spelling for spelling in spellings if spelling in self._ability.flags), None)
        if flag is None:
            raise LlmError(
                ErrorCode.ENGINE_UNUSABLE,
                f"{self._ability.program} does not offer {spellings[0]}, which a dry run needs.",
                hint="Install a newer llama.cpp.",
                path=str(self._ability.program),
                flag=spellings[0],
            )
        return flag


def parse_projection(text: str, where: Where) -> Projection | None:
    """Figures out of the output: a line for each device, the host last; None where that is not what it says.

    Other lines, such as remarks of drivers, are passed over.
    """
    rows = [match for line in text.splitlines() if (match := FIGURES_LINE.fullmatch(line.strip()))]
    names = [row["name"] for row in rows]
    if names.count(HOST_NAME) != 1 or names[-1] != HOST_NAME or len(set(names)) != len(names):
        return None
    if where is Where.HOST and len(rows) > 1:
        return None
    places = [
        (row["name"], Figures(*(int(row[part]) * MIB for part in ("model", "context", "compute"))))
        for row in rows
    ]
    # A build that sees no device puts everything on the host, whatever was asked.
    return Projection(tuple(places[:-1]), places[-1][1], where if len(places) > 1 else Where.HOST)


def result_key(run: DryRun, arguments: tuple[str, ...]) -> str:
    """What a result depends on: checkpoint, binaries, arguments, and the devices that are there."""
    devices = list(run.capabilities.devices) if run.where is Where.DEVICE else []
    parts = [SCHEME, run.checkpoint, run.digest, run.where, devices, list(arguments)]
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=20).hexdigest()


def _ability(run: DryRun) -> DryRunAbility:
    return dry_run_ability(run.capabilities, run.build.server)


def dry_run_ability(capabilities: Capabilities, server: Path | None = None) -> DryRunAbility:
    """What projects launches for a build.

    Args:
        capabilities: of the build.
        server: its server, for the message; None where it goes without saying.

    Raises:
        LlmError: ENGINE_UNUSABLE where the build cannot project.
    """
    ability = capabilities.dry_run
    if ability is None or not ability.can_project:
        why = (
            "brings no llama-fit-params"
            if ability is None
            else "brings a llama-fit-params that does not print"
        )
        raise LlmError(
            ErrorCode.ENGINE_UNUSABLE,
            f"{server or 'The engine'} (version {capabilities.version}) {why}, so it cannot project a launch.",
            hint="Use a build with llama-fit-params; distributions may have it in a package of extra tools.",
            **({"path": str(server)} if server else {}),
        )
    return ability


def _failed(run: DryRun, ability: DryRunAbility, answer: Answer, time_limit_s: float) -> LlmError:
    lines = answer.last_lines
    said = f" It said: {_cause(lines)}" if lines else ""
    return LlmError(
        ErrorCode.ENGINE_FAILED,
        f"The dry run of {run.checkpoint_path}: {ability.program} {answer.how('a dry run', time_limit_s)}.{said}",
        hint="Most likely this build cannot load the model; its last lines tell. Try another build or file.",
        path=str(ability.program),
        status=answer.status,
        timed_out=answer.timed_out,
        last_lines=lines,
    )


def _tells_why(lines: list[str]) -> bool:
    return any(mark in line for line in lines for mark in REASONS)


def _cause(lines: list[str]) -> str:
    """The line that tells most: why a file was not loaded, else the last error, else the last line."""
    for mark in (*REASONS, "what():"):
        for line in reversed(lines):
            if mark in line:
                return line
    return lines[-1]


def _not_understood(ability: DryRunAbility, answer: Answer) -> LlmError:
    return LlmError(
        ErrorCode.ENGINE_UNUSABLE,
        f"{ability.program} reports memory in a form that is not known.",
        hint="Please report it, with the version of the engine.",
        path=str(ability.program),
        last_lines=answer.last_lines,
    )
