"""Launches over several cards beside the installed engine's own dry run on stand-ins for them.

    python -m bench.splits [MODEL...]
        weights and context of each card, which have to be equal, and compute buffers, which may not be larger than
        ours; of all models without names
    python -m bench.splits --write
        also write what the engine said to tests/data/splits.json

The table has, for each model, how far our bound of a card's compute buffer is above the engine's, least and most, in
MiB. On a stand-in for CUDA a quantised cache is read without the f16 copies that we charge. Exit status 1 when a row is
outside its limits.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from bench._support import engine_dir, table
from bench.dry_run import DryRun, DryRunUnavailableError, Request, dry_run
from lllm3090d.checkpoints.facts import CheckpointFacts, read_facts
from lllm3090d.engines.capabilities import Backend
from lllm3090d.planning.cache import CacheType
from lllm3090d.planning.launch import Draft, Launch, PlanPolicy
from lllm3090d.planning.placement import Placement
from lllm3090d.planning.quote import Quote
from lllm3090d.planning.split import DeviceSplit, Division, assigned_layers
from lllm3090d.planning.units import MIB
from tests.fakes.model_files import published, write

RECORDED = Path(__file__).parents[1] / "tests" / "data" / "splits.json"
ABOUT = (
    "What llama.cpp b11434 projects of --tensor-split over stand-ins for cards (bench.splits): bytes of each card, and"
    " of its compute buffer in host memory; -b 2048, one output for each slot and token of a draft."
)
DRAFT_TOKENS = 3
BATCH_TOKENS = 2048
SIZES = ((8192, 1, 512, CacheType.F16), (65_536, 4, 1024, CacheType.Q8_0))
SHARES = ((1, 1), (3, 2, 2), (1, 4))
# Dense, tied, sliding, a mixture, latent attention, linear attention with and without drafting, Mamba, both side by
# side, convolutions, a shared cache; of the last, shares that leave it whole.
MODELS = (
    "smollm2-135m",
    "llama-3.1-8b",
    "gemma-3-27b",
    "gemma-4-26b-a4b",
    "gpt-oss-20b",
    "qwen3-30b-a3b",
    "glm-4.7-flash",
    "qwen3.5-27b-mtp",
    "qwen3.5-35b-a3b-mtp",
    "nemotron-nano-9b-v2",
    "falcon-h1-7b",
    "lfm2-1.2b",
)
SHARED = ("gemma-4-e2b", "gemma-3n-e4b")
SHARED_SHARES = ((1, 2), (1, 5))
PARTIAL = ("llama-3.1-8b", 20), ("qwen3-30b-a3b", 0)


@dataclass(frozen=True, slots=True)
class Case:
    """A launch and what the engine said of it.

    Attributes:
        model, backend, shares, context, parallel, micro_batch, cache_type, mtp: the launch; ``mtp`` for a draft by the
            model's own blocks.
        layers_on_card, expert_layers_on_host: as of a placement.
        cards: weights, context and compute of each card, bytes.
        host_compute: of the compute buffer in host memory.
        drafts: context and compute of the draft on each card; empty without.
    """

    model: str
    backend: Backend
    shares: tuple[int, ...]
    context: int
    parallel: int
    micro_batch: int
    cache_type: CacheType
    mtp: bool = False
    layers_on_card: int | None = None
    expert_layers_on_host: int = 0
    cards: tuple[tuple[int, int, int], ...] = ()
    host_compute: int = 0
    drafts: tuple[tuple[int, int], ...] = ()

    @property
    def launch(self) -> Launch:
        """The same for our arithmetic."""
        draft = Draft(DRAFT_TOKENS, self.cache_type, self.cache_type) if self.mtp else None
        return Launch(
            self.context,
            self.parallel,
            self.cache_type,
            self.cache_type,
            BATCH_TOKENS,
            self.micro_batch,
            8,
            0,
            layers=Placement(self.layers_on_card, self.expert_layers_on_host),
            draft=draft,
        )

    def request(self, model: Path) -> Request:
        """The same for the engine."""
        drafted = DRAFT_TOKENS if self.mtp else 0
        return Request(
            model,
            self.context,
            self.parallel,
            BATCH_TOKENS,
            self.micro_batch,
            self.cache_type,
            self.cache_type,
            outputs=self.parallel * (1 + drafted),
            rollback_tokens=drafted,
            with_mtp=self.mtp,
            device=self.backend,
            layers_on_card=self.layers_on_card,
            expert_layers_on_host=self.expert_layers_on_host,
            shares=self.shares,
        )

    def split(self, facts: CheckpointFacts, policy: PlanPolicy) -> DeviceSplit:
        """Our figures."""
        division = Division(facts, self.launch, self.backend, policy)
        names = [f"card {index}" for index in range(len(self.shares))]
        return division.split(names, assigned_layers(division.layers, self.shares))

    def __str__(self) -> str:
        words = [self.model, str(self.backend), ",".join(map(str, self.shares)), f"-c {self.context}"]
        words += [f"-np {self.parallel} -ub {self.micro_batch} {self.cache_type}", "mtp" if self.mtp else ""]
        words += [] if self.layers_on_card is None else [f"-ngl {self.layers_on_card}"]
        words += [f"-ncmoe {self.expert_layers_on_host}"] if self.expert_layers_on_host else []
        return " ".join(filter(None, words))


def cases() -> Iterator[Case]:
    """What is asked."""
    for model in (*MODELS, *SHARED):
        for index, shares in enumerate(SHARED_SHARES if model in SHARED else SHARES):
            backend = (Backend.VULKAN, Backend.CUDA)[index % 2]
            mtp = model.endswith("-mtp") and index != 1
            for size in SIZES:
                yield Case(model, backend, shares, *size, mtp=mtp)
    for model, layers in PARTIAL:
        yield Case(
            model,
            Backend.CUDA,
            (2, 3),
            *SIZES[1],
            layers_on_card=layers or None,
            expert_layers_on_host=0 if layers else 12,
        )


def asked(engine: DryRun, chosen: Iterable[Case]) -> Iterator[tuple[Case, CheckpointFacts]]:
    """The cases with the engine's answers, and the facts of their models."""
    with tempfile.TemporaryDirectory() as folder:
        for case in chosen:
            model = Path(folder) / f"{case.model}.gguf"
            if not model.exists():
                write(model, published()[case.model])
            request = case.request(model)
            answer = engine.ask(request)
            drafts: tuple[tuple[int, int], ...] = ()
            if case.mtp:
                # The server asks one output of it for each slot, and it keeps no copies of states.
                draft = replace(request, draft_context=True, rollback_tokens=0, outputs=case.parallel)
                drafts = tuple((card.context, card.compute) for card in engine.ask(draft).cards)
            yield (
                replace(
                    case,
                    cards=tuple((card.weights, card.context, card.compute) for card in answer.cards),
                    host_compute=answer.host.compute,
                    drafts=drafts,
                ),
                read_facts([model]),
            )


def recorded() -> list[Case]:
    """What was written with ``--write``."""
    document = json.loads(RECORDED.read_text(encoding="utf-8"))
    return [_read(dict(zip(document["columns"], row, strict=True))) for row in document["rows"]]


def _read(row: dict[str, Any]) -> Case:
    row["backend"], row["cache_type"] = Backend(row["backend"]), CacheType(row["cache_type"])
    row["shares"] = tuple(row["shares"])
    row["cards"], row["drafts"] = tuple(map(tuple, row["cards"])), tuple(map(tuple, row["drafts"]))
    return Case(**row)


def write_recorded(rows: Sequence[Case]) -> None:
    """Write the file of the tests: a line for each case."""
    columns = [field.name for field in fields(Case)]
    lines = ",\n".join(json.dumps([getattr(row, name) for name in columns]) for row in rows)
    head = f'{{"about": {json.dumps(ABOUT)},\n"columns": {json.dumps(columns)},\n'
    RECORDED.write_text(f'{head}"rows": [\n{lines}\n]}}\n', encoding="utf-8")


# ---- Comparisons -------------------------------------------------------------------------------------------------


def figures(ledger: Quote) -> tuple[int, int, int]:
    """Weights, context and compute of a card, in the engine's terms."""
    sizes = {item.name: item.bytes for item in ledger.items}
    context = sizes.get("kv cache", 0) + sizes.get("recurrent state", 0)
    return sizes.get("weights", 0), context, sizes["compute"]


def draft_figures(ledger: Quote) -> tuple[int, int]:
    """Context and compute of the draft on a card."""
    sizes = {item.name: item.bytes for item in ledger.items}
    return sizes.get("draft cache", 0), sizes.get("draft compute", 0)


def differences(case: Case, facts: CheckpointFacts, policy: PlanPolicy) -> list[str]:
    """Where we and the engine differ; empty where nothing is wrong."""
    split = case.split(facts, policy)
    wrong = []
    if len(case.cards) != len(split.ledgers):
        wrong.append(f"{len(case.cards)} cards instead of {len(split.ledgers)}")
    for name, ledger, card in zip(split.devices, split.ledgers, case.cards, strict=False):
        ours = figures(ledger)
        if ours[:2] != card[:2]:
            wrong.append(f"{name}: weights and context {ours[:2]}, the engine {card[:2]}")
        if ours[2] < card[2]:
            wrong.append(f"{name}: compute at most {ours[2]}, the engine {card[2]}")
    for name, ledger, draft in zip(split.devices, split.ledgers, case.drafts, strict=False):
        ours_of_draft = draft_figures(ledger)
        if ours_of_draft[0] != draft[0] or ours_of_draft[1] < draft[1]:
            wrong.append(
                f"{name}: cache of the draft, and at most compute {ours_of_draft}, the engine {draft}"
            )
    if split.host.item("host compute").bytes < case.host_compute:
        wrong.append(
            f"host: compute at most {split.host.item('host compute').bytes}, the engine {case.host_compute}"
        )
    return [f"{case}: {text}" for text in wrong]


def above_mib(case: Case, facts: CheckpointFacts, policy: PlanPolicy) -> list[float]:
    """How far our bound of each card's compute buffer is above the engine's."""
    pairs = zip(case.split(facts, policy).ledgers, case.cards, strict=True)
    return [(figures(ledger)[2] - card[2]) / MIB for ledger, card in pairs]


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare and print; 1 where something is wrong."""
    parser = argparse.ArgumentParser(prog="python -m bench.splits", description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write tests/data/splits.json")
    parser.add_argument(
        "models", nargs="*", choices=[[], *MODELS, *SHARED], metavar="MODEL", help="all without"
    )
    options = parser.parse_args(arguments)
    if options.write and options.models:
        parser.error("the file has all models")
    chosen = (case for case in cases() if not options.models or case.model in options.models)
    policy = PlanPolicy(CacheType.Q8_0, BATCH_TOKENS, 512, 8, 0, 1024)
    try:
        with dry_run(engine_dir()) as engine:
            answered = list(asked(engine, chosen))
    except DryRunUnavailableError as error:
        print(f"no dry run: {error}", file=sys.stderr)
        return 2
    rows: dict[str, list[float]] = {}
    wrong = []
    for case, facts in answered:
        rows.setdefault(case.model, []).extend(above_mib(case, facts, policy))
        wrong += differences(case, facts, policy)
    lines = [(name, str(len(row)), f"{min(row):.1f}", f"{max(row):.1f}") for name, row in rows.items()]
    print(table(("compute, MiB above the engine", "cards", "least", "most"), lines))
    print(*wrong, sep="\n")
    if options.write:
        write_recorded([case for case, _ in answered])
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
