"""Our figures beside the engine's.

    python -m bench.accuracy
        every recorded dry run (tests/data/engine_truth.json.gz): the largest differences by architecture
    python -m bench.accuracy --random 200 --partial
        made-up files with dimensions and arguments drawn at random, and files with published dimensions shared out
        between a card and the host, against the installed engine: exact bytes, from bench/dry_run
    python -m bench.accuracy --fit-params PATH/TO/llama-fit-params MODEL.gguf [MODEL.gguf ...]
        real files against the installed engine's own program, in MiB

Exit status 1 when weights or context differ. ``llama-fit-params`` reports whole MiB (rounded down) and assumes as
many outputs as the micro batch has tokens, where the server has one for each slot; compute is shown both ways.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lllm3090d.checkpoints.facts import read_facts
from lllm3090d.engines.capabilities import Backend
from lllm3090d.errors import LlmError
from lllm3090d.planning import cache, compute, placement
from lllm3090d.planning.cache import CacheType
from lllm3090d.planning.quote import MIB

CONTEXTS = (2048, 4096, 8192)
CACHE_TYPES = (CacheType.F16, CacheType.Q8_0)
BATCH_TOKENS = 2048  # the engine's default, which llama-fit-params is run with
MICRO_BATCH_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Figures:
    """MiB, rounded down."""

    weights: int
    context: int
    compute: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """One line of the table."""

    model: str
    context_tokens: int
    cache_type: CacheType
    engine: Figures
    ours: Figures  # compute with the outputs that llama-fit-params assumes
    server_compute: int  # MiB, compute with the outputs of the server

    @property
    def equal(self) -> bool:
        """Weights and context agree to the MiB."""
        return (self.engine.weights, self.engine.context) == (self.ours.weights, self.ours.context)


def ask_engine(
    fit_params: Path,
    model: Path,
    context_tokens: int,
    type_k: CacheType,
    type_v: CacheType,
    *,
    parallel: int = 1,
    micro_batch_tokens: int = MICRO_BATCH_TOKENS,
    swa_full: bool = False,
) -> Figures:
    """Let the engine lay the model out without allocating it. Raises RuntimeError with its last lines."""
    command = [str(fit_params), "-m", str(model), "-c", str(context_tokens), "-fa", "on"]
    command += ["-ctk", type_k, "-ctv", type_v, "-fitp", "on", "-nr", "-np", str(parallel)]
    command += ["-b", str(BATCH_TOKENS), "-ub", str(micro_batch_tokens)]
    command += ["--swa-full"] if swa_full else []
    libraries = os.pathsep.join(filter(None, (str(fit_params.parent), os.environ.get("LD_LIBRARY_PATH"))))
    environment = os.environ | {
        "LD_LIBRARY_PATH": libraries,
        "GGML_NO_BACKTRACE": "1",  # a failure must not start a debugger
    }
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=60, env=environment, errors="replace"
    )
    for line in done.stdout.splitlines():
        words = line.split()
        if len(words) == 4 and words[0] == "Host":
            return Figures(*map(int, words[1:]))
    raise RuntimeError(
        f"{fit_params.name} ended with {done.returncode}: {(done.stderr or done.stdout)[-1000:]}"
    )


def compare(fit_params: Path, model: Path, context_tokens: int, cache_type: CacheType) -> Comparison:
    """Price a context on the CPU and ask the engine for the same."""
    facts = read_facts([model])
    shape = cache.cache_shape(
        facts,
        context_tokens=context_tokens,
        parallel=1,
        batch_tokens=BATCH_TOKENS,
        micro_batch_tokens=MICRO_BATCH_TOKENS,
    )
    types = (cache_type, cache_type)

    def compute_mib(outputs: int) -> int:
        return compute.cpu_compute_bytes(facts, shape, *types, outputs=outputs) // MIB

    return Comparison(
        model=facts.title or model.name,
        context_tokens=shape.context_tokens,
        cache_type=cache_type,
        engine=ask_engine(fit_params, model, context_tokens, *types),
        ours=Figures(
            weights=placement.weights(facts, placement.EVERYTHING, Backend.CPU).card // MIB,
            context=cache.context_bytes(facts, shape, *types) // MIB,
            compute=compute_mib(shape.micro_batch_tokens),
        ),
        server_compute=compute_mib(compute.server_outputs(shape)),
    )


def comparisons(fit_params: Path, models: Sequence[Path]) -> Iterator[Comparison]:
    """The whole table, line by line."""
    for model in models:
        for cache_type in CACHE_TYPES:
            for context_tokens in CONTEXTS:
                yield compare(fit_params, model, context_tokens, cache_type)


def print_comparisons(fit_params: Path, models: Sequence[Path]) -> bool:
    """Print our figures beside the engine's for real files; whether weights and context are equal."""
    titles = ("weights", "", "context", "", "compute", "", "compute", "")
    print(f"{'model':26} {'tokens':>7} {'cache':>6}" + "".join(f" {title:>8}" for title in titles))
    sides = ("engine", "ours", "engine", "ours", "engine", "ours", "server", "equal")
    print(" " * 41 + "".join(f" {side:>8}" for side in sides))
    equal = True
    for row in comparisons(fit_params, models):
        engine, ours = row.engine, row.ours
        figures: tuple[int, ...] = (engine.weights, ours.weights, engine.context, ours.context)
        figures += (engine.compute, ours.compute, row.server_compute)
        line = f"{row.model[:26]:26} {row.context_tokens:>7} {row.cache_type:>6}"
        print(line + "".join(f" {figure:>8}" for figure in figures) + f" {'yes' if row.equal else 'NO':>8}")
        equal = equal and row.equal
    return equal


@dataclass(slots=True)
class Differences:
    """The largest differences of an architecture; bytes, and for compute the extremes of ours / engine."""

    rows: int = 0
    refused: int = 0
    shape: int = 0
    context_bytes: int = 0
    weights_bytes: int = 0
    least_charge: float = 0.0  # the graph with its margin over the engine's, its least value
    worst: str = ""  # the row of it
    farthest_bytes: int = -1  # the larger of both differences of a row
    farthest: str = ""  # that row


def recorded_differences() -> dict[str, Differences]:
    """Compare every recorded dry run with our figures, by architecture."""
    from tests.unit.engine_truth import TruthRow, priced_models, truth_rows

    def add(row: TruthRow, found: Differences) -> None:
        facts, shape, types = row.facts, row.shape, row.cache_types
        found.shape += (shape.context_tokens, shape.stream_cells) != (row.n_ctx, row.n_ctx_seq)
        make = cache.draft_context_bytes if row.draft_context else cache.context_bytes
        memory = placement.memory_of(row.backend)
        ours = make(facts, shape, *types, memory=memory, flash_attention=row.flash_attention)
        found.context_bytes = max(found.context_bytes, abs(ours - row.context_bytes))
        split = placement.weights(facts, row.placement, row.backend)
        host = split.card if row.backend is Backend.CPU else split.host
        card = 0 if row.backend is Backend.CPU else split.card
        differences = (abs(host - row.weights_host_bytes), abs(card - row.weights_card_bytes))
        found.weights_bytes = max(found.weights_bytes, *differences)
        apart = max(abs(ours - row.context_bytes), *differences)
        if apart > found.farthest_bytes:
            found.farthest_bytes, found.farthest = apart, str(row)
        if row.draft_context or row.embeddings or not row.flash_attention or row.model not in priced:
            return
        if row.backend is Backend.CPU:
            graph = compute.cpu_compute_bytes(facts, shape, *types, outputs=row.graph_outputs)
            engine = row.compute_host_bytes
        else:
            graph = compute.card_compute_bytes(facts, shape, *types, row.backend, outputs=row.graph_outputs)
            engine = row.compute_card_bytes
        charge = (graph + compute.compute_margin_bytes(facts, shape, graph)) / engine
        if not found.worst or charge < found.least_charge:
            found.least_charge, found.worst = charge, str(row)

    priced = set(priced_models())
    table: dict[str, Differences] = defaultdict(Differences)
    for row in truth_rows():
        found = table[row.facts.architecture]
        found.rows += 1
        if not row.refused:
            add(row, found)
            continue
        try:
            cache.check_cache_types(row.facts, *row.cache_types, flash_attention=row.flash_attention)
            found.shape += 1  # we would have accepted what the engine refuses
        except LlmError:
            found.refused += 1
    return table


def print_recorded() -> bool:
    """Print the differences to all recorded dry runs; whether weights and context are equal."""
    table = recorded_differences()
    print(
        f"{'architecture':16} {'rows':>5} {'refused':>8} {'n_ctx':>6} {'context':>8} {'weights':>8}"
        f" {'graph':>6}  row with the least charge for the graph"
    )
    for architecture, found in sorted(table.items()):
        charge = f"{found.least_charge:6.3f}" if found.worst else f"{'-':>6}"
        print(
            f"{architecture:16} {found.rows:>5} {found.refused:>8} {found.shape:>6} {found.context_bytes:>8}"
            f" {found.weights_bytes:>8} {charge}  {found.worst}"
        )
    print(
        "n_ctx: rows with another context or split; context and weights: largest difference in bytes;\n"
        "graph: least of our charge, margin included, over the engine's compute buffer."
    )
    farthest = max(table.values(), key=lambda found: found.farthest_bytes)
    print(f"worst row by context and weights: {farthest.farthest}, {farthest.farthest_bytes} B apart")
    return not any(found.shape or found.context_bytes or found.weights_bytes for found in table.values())


def print_live(count: int, random_seed: int | None, *, partial: bool) -> bool:
    """Print the tables of made-up launches and of partial placements; whether all is equal."""
    from bench._support import engine_dir
    from bench.accuracy_live import partial_comparisons, random_comparisons, table_of
    from bench.dry_run import DryRunUnavailableError, dry_run

    tables = []
    try:
        with dry_run(engine_dir()) as engine:
            if count:
                tables.append(random_comparisons(engine, count, random_seed=random_seed))
            if partial:
                tables.append(partial_comparisons(engine))
    except DryRunUnavailableError as error:
        print(f"The installed engine cannot be asked for bytes: {error}")
        return False
    for comparisons in tables:
        print(f"{table_of(comparisons)}\n")
    print(
        "refused: by the engine; differ: rows with any difference, a refusal by one side only included;\n"
        "n_ctx (in tokens), context and weights (in bytes): largest difference, on a card or in host memory."
    )
    differing = [row for comparisons in tables for row in comparisons if not row.equal]
    for row in differing:
        print(f"\n{row}\n{row.launch.spec}")
    return not differing


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(description="compare our memory figures with the engine's")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="made-up launches to compare")
    parser.add_argument("--seed", type=int, metavar="S", help="draw the same ones again")
    parser.add_argument("--partial", action="store_true", help="compare partial placements")
    parser.add_argument("--fit-params", type=Path, help="path of llama-fit-params")
    parser.add_argument("models", type=Path, nargs="*", metavar="MODEL", help="a GGUF file")
    options = parser.parse_args(arguments)
    if options.random < 0:
        parser.error("a number of launches is not negative")
    if (options.fit_params is None) is not (not options.models):
        parser.error("--fit-params and files go together")
    live = bool(options.random or options.partial)
    if not live and not options.models:
        return 0 if print_recorded() else 1
    equal = not options.models or print_comparisons(options.fit_params, options.models)
    if live:
        equal = print_live(options.random, options.seed, partial=options.partial) and equal
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
