"""Our figures beside those of the engine's own dry run, for real checkpoints.

    python bench/accuracy.py --fit-params PATH/TO/llama-fit-params MODEL.gguf [MODEL.gguf ...]

Prints weights, context and compute in MiB at several contexts and cache types. Exit status 1 when weights
or context differ. ``llama-fit-params`` reports whole MiB (rounded down) and assumes as many outputs as the
micro batch has tokens, where the server has one for each slot; compute is shown both ways.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lllm3090d.checkpoints.facts import CheckpointFacts, read_facts
from lllm3090d.planning import cache, compute
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


def ask_engine(fit_params: Path, model: Path, context_tokens: int, cache_type: CacheType) -> Figures:
    """Let the engine lay the model out without allocating it. Raises RuntimeError with its last lines."""
    command = [str(fit_params), "-m", str(model), "-c", str(context_tokens), "-fa", "on"]
    command += ["-ctk", cache_type, "-ctv", cache_type, "-fitp", "on", "-nr"]
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
    kv_bytes = cache.kv_cache_bytes(facts, shape, cache_type, cache_type)
    # All outputs of a micro batch are computed as if the vocabulary were that many times as large.
    wordy = replace(facts, vocabulary_size=facts.vocabulary_size * shape.micro_batch_tokens)

    def compute_mib(priced: CheckpointFacts) -> int:
        return compute.cpu_compute_bytes(priced, shape, cache_type, cache_type) // MIB

    return Comparison(
        model=facts.title or model.name,
        context_tokens=shape.context_tokens,
        cache_type=cache_type,
        engine=ask_engine(fit_params, model, context_tokens, cache_type),
        ours=Figures(facts.weight_bytes // MIB, kv_bytes // MIB, compute_mib(wordy)),
        server_compute=compute_mib(facts),
    )


def comparisons(fit_params: Path, models: Sequence[Path]) -> Iterator[Comparison]:
    """The whole table, line by line."""
    for model in models:
        for cache_type in CACHE_TYPES:
            for context_tokens in CONTEXTS:
                yield compare(fit_params, model, context_tokens, cache_type)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description="compare our memory figures with the engine's dry run, in MiB"
    )
    parser.add_argument("--fit-params", type=Path, required=True, help="path of llama-fit-params")
    parser.add_argument("models", type=Path, nargs="+", metavar="MODEL", help="a GGUF file")
    options = parser.parse_args(arguments)
    titles = ("weights", "", "context", "", "compute", "", "compute", "")
    print(f"{'model':26} {'tokens':>7} {'cache':>6}" + "".join(f" {title:>8}" for title in titles))
    sides = ("engine", "ours", "engine", "ours", "engine", "ours", "server", "equal")
    print(" " * 41 + "".join(f" {side:>8}" for side in sides))
    differing = 0
    for row in comparisons(options.fit_params, options.models):
        engine, ours = row.engine, row.ours
        figures: tuple[int, ...] = (engine.weights, ours.weights, engine.context, ours.context)
        figures += (engine.compute, ours.compute, row.server_compute)
        line = f"{row.model[:26]:26} {row.context_tokens:>7} {row.cache_type:>6}"
        print(line + "".join(f" {figure:>8}" for figure in figures) + f" {'yes' if row.equal else 'NO':>8}")
        differing += not row.equal
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
