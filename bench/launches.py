"""Random plans on small made-up checkpoints, started with a real llama-server: does it take every command line, and are
the buffers in its log those of the ledger?

    python -m bench.launches --count 100                      the installed engine, on the CPU
    python -m bench.launches --count 60 --root DIRECTORY      as root: an engine in a chroot, on its (software) card

Each plan is written as arguments, read back (the same launch, the same price), started, asked for /health, /props and
/slots, and stopped. Caches and states must be equal, compute buffers at most what the ledger has; the exit status is 1
where they are not. Prompts are not computed, so a software card takes a second or two for each start.

For a card without a card: ``debootstrap --variant=minbase sid DIRECTORY``, in it ``apt-get install
--no-install-recommends llama.cpp-tools libggml0-backend-vulkan mesa-vulkan-drivers``, and ``/proc`` mounted there. Run
it with ``nice -n 19``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from bench._support import engine_dir, table
from bench.engine_log import MIB, EngineLog, read_log
from lllm3090d.checkpoints.facts import CheckpointFacts, Graph, read_facts
from lllm3090d.checkpoints.projector import read_projector
from lllm3090d.checkpoints.purpose import Purpose
from lllm3090d.engines.arguments import features
from lllm3090d.engines.arguments import launch as engine_launch
from lllm3090d.engines.capabilities import Backend, Build, Capabilities
from lllm3090d.engines.command_line import read_command_line
from lllm3090d.engines.probe import probe
from lllm3090d.errors import LlmError
from lllm3090d.planning.compute import largest_layer_cache_bytes
from lllm3090d.planning.planner import Plan
from lllm3090d.planning.quote import Place, Quote, price
from tests.fakes.model_files import ModelSpec, write
from tests.fakes.projector_files import write_projector
from tests.fakes.random_models import ARCHITECTURES, random_cases
from tests.fakes.random_plans import RandomQuestion, random_questions
from tests.fakes.unix_http import call, health

SEED = 20_261_130
# Their graphs have no formula, so nothing is planned for them.
NOT_PLANNED = frozenset({"bert", "nomic-bert", "gemma-embedding"})
PLANNED = tuple(name for name in ARCHITECTURES if name not in NOT_PLANNED)
DRAWS = 16  # of which the last that is not refused is started
SOFTWARE_TENSOR_LIMIT_BYTES = 128 << 20  # what a tensor may have on Mesa's software card
LOAD_LIMIT_S = 120
POLL_S = 0.02
ROUNDING_MIB = 0.005  # of one line of the log
# Formulas of graphs were found for the dimensions of published models; made-up ones are small and odd.
COMPUTE_TOLERANCE_MIB = 16.0
# Of this kind there are two published models, whose graphs the formula fits; small ones with narrow feed-forward
# networks are dominated by the embeddings of all layers, which are then alive three or four times.
COMPUTE_NOT_COMPARED = frozenset({Graph.ALTUP})


# Everything in a ledger that stands for a buffer of a context, and what is charged for the unknown.
BUFFERS = (
    "kv cache", "recurrent state", "host cache", "compute", "host compute", "output buffer", "draft cache",
    "draft compute", "draft host compute", "draft output buffer", "slack", "workspace floor",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Engine:
    """A build to start, and how its files are seen by it.

    Attributes:
        build: the program; in a chroot a script that enters it.
        capabilities: its answers.
        folder: where files go.
        root: of its file system.
        extra: further arguments.
    """

    build: Build
    capabilities: Capabilities
    folder: Path
    root: Path | None = None
    extra: tuple[str, ...] = ("-lv", "4")

    def seen(self, path: Path) -> Path:
        """The path as the engine has it."""
        return path if self.root is None else Path("/") / path.relative_to(self.root)


@dataclass(frozen=True, slots=True)
class Line:
    """A size in the log beside that in the ledger, MiB."""

    name: str
    engine: float
    ledger: float
    at_most: bool = False
    tolerance: float = 0.0

    @property
    def holds(self) -> bool:
        """Equal, or at most."""
        if self.at_most:
            return self.engine <= self.ledger + self.tolerance
        return abs(self.engine - self.ledger) <= self.tolerance


@dataclass(slots=True)
class Started:
    """One plan, and what became of it.

    Attributes:
        architecture: of the model.
        plan: the plan.
        argv: its command line.
        lines: sizes of the log and of the ledger.
        faults: everything that is not as it should be.
    """

    architecture: str
    plan: Plan
    argv: Sequence[str]
    lines: list[Line] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


# ---- What is drawn -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Case:
    """A model, its facts, the plan, and the projector where the plan has one."""

    architecture: str
    model: Path
    facts: CheckpointFacts
    plan: Plan
    question: RandomQuestion
    projector: Path | None = None


def random_plans(
    engine: Engine, count: int, random_seed: int, architectures: Sequence[str] = PLANNED
) -> Iterator[Case]:
    """So many plans, of each architecture in turn; the same ones for the same seed. What is refused is drawn anew."""
    backend = engine.capabilities.backend
    for number in range(count):
        architecture = architectures[number % len(architectures)]
        case = _random_plan(engine, backend, architecture, f"{random_seed} {number} {architecture}")
        if case is not None:
            yield case


def _random_plan(engine: Engine, backend: Backend, architecture: str, key: str) -> Case | None:
    offered = replace(features(engine.capabilities), backend=backend)
    model, eye = engine.folder / "model.gguf", engine.folder / "projector.gguf"
    found: list[tuple[ModelSpec, RandomQuestion, bool]] = []

    def ask(spec: ModelSpec, question: RandomQuestion, *, sees: bool) -> Case | None:
        """None for what is refused, or could not be started here."""
        facts = read_facts([write(model, spec)])
        if _lacks_attention(facts):
            return None
        projector = read_projector(write_projector(eye, facts.embedding_length)) if sees else None
        try:
            plan = question.plan(facts, offered, projector)
        except LlmError:  # many a question is refused
            return None
        if engine.root is not None and _largest_tensor_bytes(facts, plan) > SOFTWARE_TENSOR_LIMIT_BYTES:
            return None
        return Case(architecture, model, facts, plan, question, eye if plan.with_projector else None)

    def draw(data: st.DataObject) -> None:
        spec, sees = data.draw(random_cases(architecture)).spec, data.draw(st.booleans())
        facts = read_facts([write(model, spec)])
        question = data.draw(random_questions(facts, backend, projects=sees))
        if ask(spec, question, sees=sees) is not None:
            found.append((spec, question, sees))

    test = settings(
        max_examples=DRAWS,
        deadline=None,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )(given(st.data())(draw))
    seed(key)(test)()
    if not found:
        return None
    spec, question, sees = found[-1]  # the first ones are the simplest
    return ask(spec, question, sees=sees)


def _lacks_attention(facts: CheckpointFacts) -> bool:
    """A hybrid so short that no layer attends: nobody publishes one, and the engine fails an assertion on it."""
    is_hybrid = facts.state_space is not None and facts.rule.graph is Graph.GATED_ATTENTION
    return is_hybrid and not any(layer.owns_kv for layer in facts.trunk)


def _largest_tensor_bytes(facts: CheckpointFacts, plan: Plan) -> int:
    """Of the cache."""
    shape, types = plan.launch.shape(facts), plan.launch.cache_types
    return max(
        shape.cells(layer.kind) * shape.streams * kind.row_bytes(values)
        for layer in facts.layers
        for kind, values in zip(types, (layer.k_values, layer.v_values), strict=True)
    )


# ---- What is compared --------------------------------------------------------------------------------------------


def start(engine: Engine, case: Case) -> Started:
    """Carry out a plan with a real engine and compare."""
    plan, socket = case.plan, engine.folder / "engine.sock"
    line = engine_launch(
        engine.build,
        engine.capabilities,
        engine.seen(case.model),
        plan,
        engine.seen(socket),
        "made-up",
        projector_path=None if case.projector is None else engine.seen(case.projector),
        inherited={},
    )
    started = Started(case.architecture, plan, line.argv[1:])
    started.faults += _read_back(engine, case, line.argv[1:], dict(line.environment))
    log = _run(engine, (*line.argv, *engine.extra), dict(line.environment), socket, started)
    if log is not None:
        skipped = case.facts.rule.graph in COMPUTE_NOT_COMPARED
        started.lines = [
            line
            for line in compare(log, plan.quote, _software_spare_mib(engine, case))
            if not (skipped and line.name.startswith("compute"))
        ]
        started.faults += [
            f"{each.name}: the engine has {each.engine:.2f} MiB, the ledger {each.ledger:.2f}"
            for each in started.lines
            if not each.holds
        ]
    return started


def _read_back(
    engine: Engine, case: Case, arguments: Sequence[str], environment: Mapping[str, str]
) -> Iterator[str]:
    plan = case.plan
    found = read_command_line(arguments, engine.capabilities, case.facts, environment=environment)
    if found.unpriced or found.fits_itself:
        yield f"read back: {found}"
    if found.launch != plan.launch:
        yield f"read back as {found.launch}, and it is {plan.launch}"
    backend = engine.capabilities.backend if plan.on_card else Backend.CPU
    projector = None if case.projector is None else read_projector(case.projector)
    if price(case.facts, found.launch, backend, case.question.policy, projector) != plan.quote:
        yield "read back, it has another price"


def _run(
    engine: Engine, argv: Sequence[str], environment: Mapping[str, str], socket: Path, started: Started
) -> EngineLog | None:
    socket.unlink(missing_ok=True)
    outside = {"PATH": os.environ["PATH"], **environment}
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        with subprocess.Popen(argv, env=outside, stdout=output, stderr=subprocess.STDOUT) as process:
            try:
                ready = _wait(process, socket)
                if ready:
                    started.faults += _answers(socket, started.plan)
            finally:
                process.terminate()
                process.wait(timeout=60)
        output.seek(0)
        text = output.read()
    if ready:
        return read_log(text)
    started.faults.append("the engine did not start: " + " | ".join(text.splitlines()[-4:]))
    return None


def _wait(process: subprocess.Popen[bytes], socket: Path) -> bool:
    limit = time.monotonic() + LOAD_LIMIT_S
    while process.poll() is None and time.monotonic() < limit:
        with contextlib.suppress(ConnectionError):  # it dies while it answers
            if health(socket) == 200:
                return True
        time.sleep(POLL_S)
    return False


def _answers(socket: Path, plan: Plan) -> Iterator[str]:
    props = json.loads(call(socket, "GET", "/props")[1])
    slots = json.loads(call(socket, "GET", "/slots")[1])
    if (props["total_slots"], len(slots)) != (plan.parallel, plan.parallel):
        yield f"{props['total_slots']} slots in /props, {len(slots)} in /slots, {plan.parallel} in the plan"
    windows = {props["default_generation_settings"]["n_ctx"], *(slot["n_ctx"] for slot in slots)}
    # Where a text is computed at once, the plan's window is a micro batch, and the engine tells that of the context.
    at_once = plan.launch.purpose is not Purpose.CHAT
    if windows != {plan.window_tokens} and not (at_once and min(windows) >= plan.window_tokens):
        yield f"windows of {windows} tokens, {plan.window_tokens} in the plan"


def _software_spare_mib(engine: Engine, case: Case) -> float:
    """Mesa's software card has no kernel of attention for some lengths of heads, for which K and V go to the host."""
    if engine.root is None:
        return 0.0
    launch, facts = case.plan.launch, case.facts
    return largest_layer_cache_bytes(facts, launch.shape(facts), *launch.cache_types) / MIB


def compare(log: EngineLog, quote: Quote, spare_mib: float = 0.0) -> list[Line]:
    """Sizes of the log beside those of the ledger.

    Without a card everything is in host memory, which the ledger has in the card's place.

    Args:
        log: of the engine.
        quote: the ledger.
        spare_mib: that computing may take beside a card and beyond the ledger.
    """

    def ledger(place: Place, *names: str) -> float:
        return sum(item.bytes for item in quote.items if item.name in names and item.place is place) / MIB

    main = log.contexts[0]
    has_card = any(item.place is Place.HOST for item in quote.items)
    lines = []
    for place in (Place.CARD, Place.HOST) if has_card else (Place.CARD,):
        on_card = has_card and place is Place.CARD
        where = "card" if on_card else "host"
        memory = ledger(place, "kv cache", "recurrent state", "host cache")
        graph = ledger(place, "compute", "host compute")
        rounding = ROUNDING_MIB * main.memory.lines + 1e-6
        beyond = COMPUTE_TOLERANCE_MIB + (spare_mib if has_card and not on_card else 0.0)
        lines += [
            Line(f"context, {where}", main.memory.total(card=on_card), memory, tolerance=rounding),
            Line(f"compute, {where}", main.compute.total(card=on_card), graph, True, beyond),
        ]
        if not on_card:
            held = main.output.total(card=False)
            lines.append(Line("output", held, ledger(place, "output buffer"), True, ROUNDING_MIB))
        for second in log.contexts[1:]:
            kept, used = second.memory.total(card=on_card), second.compute.total(card=on_card)
            rounding = ROUNDING_MIB * second.memory.lines + 1e-6
            lines += [
                Line(f"draft context, {where}", kept, ledger(place, "draft cache"), tolerance=rounding),
                Line(
                    f"draft compute, {where}",
                    used,
                    ledger(place, "draft compute", "draft host compute"),
                    True,
                    COMPUTE_TOLERANCE_MIB,
                ),
            ]
        used = sum(
            sizes.total(card=on_card)
            for context in log.contexts
            for sizes in (context.memory, context.compute, context.output)
        )
        lines += _projector_lines(log, on_card=on_card, where=where, ledger=partial(ledger, place))
        # In the card's place slack is charged, beside a card nothing is.
        spare = beyond if has_card and not on_card else 0.0
        lines.append(Line(f"all buffers, {where}", used, ledger(place, *BUFFERS), True, spare))
    return lines


def _projector_lines(
    log: EngineLog, *, on_card: bool, where: str, ledger: Callable[[str], float]
) -> Iterator[Line]:
    """Of a projector, in the place that it is in."""
    if not log.projector_weights.lines:
        return
    held, used = log.projector_weights.total(card=on_card), log.projector.total(card=on_card)
    yield Line(f"projector, {where}", held, ledger("projector"), tolerance=ROUNDING_MIB)
    # On a card a part of its graph is pinned in host memory.
    yield Line(f"projector graph, {where}", used, ledger("projector graph"), True, COMPUTE_TOLERANCE_MIB)


# ---- Programs ----------------------------------------------------------------------------------------------------


def installed(folder: Path) -> Engine:
    """The engine that set-up has chosen."""
    directory = engine_dir()
    build = Build(directory / "llama-server", (directory,), "bench", locked=False)
    return Engine(build, probe(build), folder)


def in_chroot(root: Path, folder: Path) -> Engine:
    """The engine of a chroot; needs root, and ``/proc`` mounted there."""
    script = folder / "llama-server"
    # llama.cpp hides software cards unless one is chosen.
    script.write_text(
        f'#!/bin/sh\nexport GGML_VK_VISIBLE_DEVICES=0 HOME=/root\nexec chroot {root} llama-server "$@"\n',
        encoding="utf-8",
    )
    script.chmod(0o700)
    build = Build(script, (), "bench", locked=False)
    return Engine(build, probe(build), folder, root, ("-lv", "4", "--no-warmup"))


def report(done: Sequence[Started]) -> str:
    """A table of the compared sizes, and every fault."""
    names = list(dict.fromkeys(line.name for each in done for line in each.lines))
    rows = []
    for name in names:
        lines = [line for each in done for line in each.lines if line.name == name]
        over = max(line.engine - line.ledger for line in lines)
        under = max(line.ledger - line.engine for line in lines)
        wanted = "at most" if lines[0].at_most else "equal"
        largest = max(line.engine for line in lines)
        failed = sum(not line.holds for line in lines)
        rows.append(
            (name, wanted, *map(str, (len(lines), failed)), f"{largest:.2f}", f"{over:.2f}", f"{under:.2f}")
        )
    heads = ("MiB", "wanted", "launches", "differ", "largest", "engine above", "ledger above")
    parts = [table(heads, rows)]
    for each in done:
        if each.faults:
            parts.append(f"{each.architecture}: {' '.join(each.argv)}")
            parts += [f"    {fault}" for fault in each.faults]
    return "\n".join(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Start so many plans; 1 where anything differs."""
    parser = argparse.ArgumentParser(prog="python -m bench.launches", description=__doc__.split("\n\n")[0])
    parser.add_argument("--count", type=int, default=100, help="plans to start")
    parser.add_argument("--seed", type=int, default=SEED, help="the same plans for the same number")
    parser.add_argument("--root", type=Path, help="an engine in a chroot, on its card")
    options = parser.parse_args(arguments)
    inside = None if options.root is None else options.root / "tmp"
    with tempfile.TemporaryDirectory(prefix="launches-", dir=inside) as name:
        folder = Path(name)
        engine = installed(folder) if options.root is None else in_chroot(options.root, folder)
        backend = engine.capabilities.backend
        print(f"llama-server {engine.capabilities.version}, {backend}")
        done = []
        for case in random_plans(engine, options.count, options.seed):
            done.append(start(engine, case))
            if done[-1].faults:
                print(f"{case.architecture}: {' '.join(done[-1].argv)}\n    {done[-1].faults}", flush=True)
    print(report(done))
    counts = Counter(bool(each.faults) for each in done)
    print(f"\n{len(done)} plans started, {counts[True]} with a fault")
    return 1 if counts[True] else 0


if __name__ == "__main__":
    sys.exit(main())
