"""How fast headers are read and a library is searched, beside ``gguf.GGUFReader`` and ``find``.

    .venv/bin/python -m bench.library

One header: Gemma-3-270M (262,144 tokens), ours and the reference in turn in one run, processor time of both. The
library: 200 sparse checkpoints of real dimensions, 20 of them with a gpt2-like tokenizer of 50,000 tokens and as many
merges, searched cold (nothing cached) and again by a process that has only the state file, and once more while the
directories are watched; each in processes of their own. Then every model is planned for a card of 24 GiB, as the list
of models does, and looked up again once its plan is known. ``find -name '*.gguf' -size +0`` is the yardstick.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import _support as support
from lllm3090d.checkpoints.header import read_header
from tests.fakes.gguf_files import Typed, model_metadata, model_tensors, write_gguf
from tests.system.harness import REPOSITORY

CHECKPOINTS = 200
WITH_TOKENIZER = 20
TOKENS = 50_000
HEADER_RATIO = 100.0
COLD_LIMIT_S = 3.0
CACHED_LIMIT_S = 0.1
PLANNED_LIMIT_S = 3.0
PLANS_KNOWN_LIMIT_S = 0.1
MEMORY_LIMIT_MIB = 100.0
MS_PER_S = 1000.0
KIB_PER_MIB = 1024
# Blocks, embedding, heads, KV heads, feed-forward, vocabulary: from 0.5 to 70 thousand million parameters.
SIZES = (
    (24, 896, 14, 2, 4864, 151936),
    (28, 3584, 28, 4, 18944, 152064),
    (32, 4096, 32, 8, 14336, 128256),
    (36, 4096, 32, 8, 12288, 151936),
    (64, 5120, 40, 8, 27648, 152064),
    (80, 8192, 64, 8, 28672, 128256),
)

# Run in a fresh process: models directory, state file or "", "facts" or "".
SCAN = """
import json, sys, time
from pathlib import Path

def peak_kib():
    # Not ru_maxrss, which begins with that of the parent.
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])

before = peak_kib()
from lllm3090d.checkpoints.facts import read_facts
from lllm3090d.checkpoints.header_cache import HeaderCache
from lllm3090d.checkpoints.library import Library
from lllm3090d.store import Store
models, state = Path(sys.argv[1]), Path(sys.argv[2])
imported = peak_kib()
wall, cpu = time.perf_counter(), time.process_time()
store = Store(state)
cache = HeaderCache(store)
generation = 1
library = Library(models, {}, cache, lambda: generation)
survey = library.survey()
wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
again = time.perf_counter()
assert library.survey() is survey
again = time.perf_counter() - again
peak = peak_kib()
facts = time.perf_counter()
for checkpoint in survey.checkpoints:
    cache.header(checkpoint.path)
headers = time.perf_counter() - facts
facts = time.perf_counter()
known = [read_facts(checkpoint.shards, cache.header) for checkpoint in survey.checkpoints]
facts = time.perf_counter() - facts
store.close()
from lllm3090d.engines.capabilities import Backend
from lllm3090d.gpus.readings import CardKind
from lllm3090d.planning.planner import Features, Room
from lllm3090d.serving.listings import ModelPlans, Terms
from lllm3090d.serving.policy import policy_of
from lllm3090d.settings import Settings
terms = Terms(policy_of(Settings(), {}).plan, Features(Backend.VULKAN), CardKind.NVIDIA, Room(24 << 30))
plans, listed = ModelPlans(), []
for _ in range(2):
    began = time.perf_counter()
    for each in known:
        plans.get(each, None, terms)
    listed.append(time.perf_counter() - began)
print(json.dumps({"wall": wall, "cpu": cpu, "again": again, "facts": facts, "headers": headers,
                  "planned": listed[0], "plans_known": listed[1],
                  "found": len(survey.checkpoints), "peak_kib": peak - before, "imports_kib": imported - before,
                  "problem": str(store.problem or "")}))
"""


def write_library(folder: Path) -> None:
    """200 checkpoints in directories of their own; takes some kB each, 2 MB with a tokenizer."""
    tokenizer = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [f"tok{number}" for number in range(TOKENS)],
        "tokenizer.ggml.token_type": Typed("i32", [1] * TOKENS),
        "tokenizer.ggml.merges": [f"to k{number}" for number in range(TOKENS)],
    }
    for number in range(CHECKPOINTS):
        blocks, width, heads, kv_heads, feed_forward, vocabulary = SIZES[number % len(SIZES)]
        metadata = model_metadata(
            "llama",
            blocks=blocks,
            embedding_length=width,
            head_count=heads,
            kv_head_count=kv_heads,
            feed_forward_length=feed_forward + 256 * number,  # no two alike: each needs a plan of its own
            # The engine insists on an embedding for each token.
            vocabulary=TOKENS if number < WITH_TOKENIZER else vocabulary,
            metadata=tokenizer if number < WITH_TOKENIZER else None,
        )
        write_gguf(folder / f"model-{number:03}" / "model-Q8_0.gguf", metadata, model_tensors(metadata))


def seconds(work: Callable[[], object], clock: Callable[[], float]) -> float:
    """How long something takes by a clock."""
    began = clock()
    work()
    return clock() - began


def compare_headers(path: Path, pairs: int) -> float:
    """Print times of both readers; how many times faster ours is."""
    from gguf import GGUFReader

    read_header(path)  # both read the file from the page cache
    ours: list[float] = []
    reference: list[float] = []
    for _ in range(pairs):
        ours += [seconds(lambda: read_header(path), time.process_time) for _ in range(5)]
        reference.append(seconds(lambda: GGUFReader(path), time.process_time))
    rows = support.spread_rows(
        "ms",
        {
            "lllm3090d": [value * MS_PER_S for value in ours],
            "gguf.GGUFReader": [value * MS_PER_S for value in reference],
        },
    )
    print(f"header of {path.name}, processor time, {pairs} pairs (ours 5 times each)")
    print(support.table(support.SPREAD_HEADS, rows))
    return statistics.median(reference) / statistics.median(ours)


def scan(models: Path, state: Path) -> dict[str, Any]:
    """Search the library in a fresh process."""
    command = [sys.executable, "-c", SCAN, str(models), str(state)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=REPOSITORY)
    result: dict[str, Any] = json.loads(done.stdout)
    assert result["found"] == CHECKPOINTS, result
    assert not result["problem"], result
    return result


def find(models: Path) -> float:
    """Wall time of the yardstick, seconds."""
    command = ["find", str(models), "-name", "*.gguf", "-size", "+0"]
    return seconds(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL), time.perf_counter)


def compare_library(rounds: int) -> list[support.Target]:
    """Print times of a search; the targets."""
    with tempfile.TemporaryDirectory(prefix="bench-library-") as directory:
        models, state = Path(directory) / "models", Path(directory) / "state.db"
        write_library(models)
        find(models)
        cold: list[dict[str, Any]] = []
        cached: list[dict[str, Any]] = []
        yardstick: list[float] = []
        for _ in range(rounds):
            for file in Path(directory).glob("state.db*"):
                file.unlink()
            yardstick.append(find(models))
            cold.append(scan(models, state))
            yardstick.append(find(models))
            cached.append(scan(models, state))
        state_mib = state.stat().st_size / KIB_PER_MIB**2
    samples = {
        "cold": [run["wall"] for run in cold],
        "  processor time": [run["cpu"] for run in cold],
        "cached": [run["wall"] for run in cached],
        "  headers of all": [run["headers"] for run in cached],
        "  facts of all, headers cached": [run["facts"] for run in cached],
        "  plans of all": [run["planned"] for run in cached],
        "  plans of all, known": [run["plans_known"] for run in cached],
        "watched, nothing changed": [run["again"] for run in cached],
        "find": yardstick,
    }
    milliseconds = {name: [value * MS_PER_S for value in values] for name, values in samples.items()}
    print(
        f"\n{CHECKPOINTS} checkpoints, {WITH_TOKENIZER} with a tokenizer, {rounds} rounds; state {state_mib:.1f} MiB"
    )
    print(support.table(support.SPREAD_HEADS, support.spread_rows("ms", milliseconds)))
    base = statistics.median(yardstick)
    medians = {name: statistics.median(values) for name, values in samples.items()}
    for name in ("cold", "cached", "watched, nothing changed"):
        print(f"{name}: {medians[name] / base:.2f} times find")
    peak = max(run["peak_kib"] for run in cold) / KIB_PER_MIB
    imports = max(run["imports_kib"] for run in cold) / KIB_PER_MIB
    print(f"peak memory of a cold search: {peak:.1f} MiB above the interpreter, {imports:.1f} of it imports")
    return [
        support.Target("cold search, median", medians["cold"], COLD_LIMIT_S, "s"),
        support.Target("cached search, median", medians["cached"], CACHED_LIMIT_S, "s"),
        support.Target("plans of all, median", medians["  plans of all"], PLANNED_LIMIT_S, "s"),
        support.Target(
            "plans of all when known, median", medians["  plans of all, known"], PLANS_KNOWN_LIMIT_S, "s"
        ),
        support.Target("peak memory of a cold search", peak, MEMORY_LIMIT_MIB, "MiB"),
    ]


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="times of header reading and library searches")
    parser.add_argument("--pairs", type=int, default=3, help="pairs of header readings (default: 3)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of library searches (default: 5)")
    options = parser.parse_args()
    support.compile_bytecode()
    print(support.machine_line() + "\n")
    ratio = compare_headers(support.checkpoint("gemma3.gguf"), options.pairs)
    print(f"{ratio:.0f} times faster")
    targets = compare_library(options.rounds)
    slowness = support.Target("header, ours to a hundredth of the reference", HEADER_RATIO / ratio, 1.0, "")
    return support.report_targets([slowness, *targets])


if __name__ == "__main__":
    sys.exit(main())
