"""How long a full plan takes once the header of its checkpoint is known.

    python -m bench.planning [--samples N]

Every architecture with a price is planned for a card (CUDA) on which a tenth, half or all of its trained window fits:
with 1 to 8 slots asked for, with automatic slots under both policies, and with offload allowed; and for a card that can
give nothing, which is refused with remedies. Nothing is read from disk, as in the daemon after the first plan. A ratio
to a fixed piece of work in the same process, ``json.loads`` of a fixed document, tells the program from the machine.

Exit status 1 when the median is above its target.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from bench import _support as support
from lllm3090d.checkpoints.facts import CheckpointFacts
from lllm3090d.engines.capabilities import Backend
from lllm3090d.errors import LlmError
from lllm3090d.gpus.readings import CardKind
from lllm3090d.planning.planner import Features, PlanRequest, Room, plan
from lllm3090d.planning.quote import Place
from lllm3090d.planning.request import Offload
from lllm3090d.planning.slots import SlotPolicy
from tests.system.harness import REPOSITORY
from tests.unit.engine_truth import POLICY, facts_of, priced_models

MEDIAN_LIMIT_MS = 5.0
NS_PER_MS = 1_000_000
REFERENCE = REPOSITORY / "tests" / "data" / "model_dimensions.json"
FEATURES = Features(Backend.CUDA)
PLENTY = Room(1 << 50)
SHARES = (10, 50, 100)  # percent of what a whole trained window takes beside the smallest launch

AUTOMATIC, REFUSED = f"automatic, {SlotPolicy.BALANCED}", "refused"
QUESTIONS: Mapping[str, PlanRequest] = {
    **{f"{count} slot{'s' if count > 1 else ''}": PlanRequest(parallel=count) for count in range(1, 9)},
    **{f"automatic, {policy}": PlanRequest(slot_policy=policy) for policy in SlotPolicy},
    "automatic, offload allowed": PlanRequest(offload=Offload.ALLOWED),
    REFUSED: PlanRequest(),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One plan to be timed."""

    model: str
    question: str
    room: Room

    def make(self) -> None:
        """Plan it, or be refused where there is no room."""
        with contextlib.nullcontext() if self.room.card else contextlib.suppress(LlmError):
            _plan(facts_of(self.model), QUESTIONS[self.question], self.room)


def _plan(facts: CheckpointFacts, request: PlanRequest, room: Room) -> int:
    """What the plan takes of the card, bytes."""
    made = plan(facts, request, POLICY, features=FEATURES, card_kind=CardKind.NVIDIA, room=room)
    return made.quote.total_bytes(Place.CARD)


def cases() -> Iterator[Case]:
    """Every model, question and room."""
    for model in priced_models():
        facts = facts_of(model)
        for name, request in QUESTIONS.items():
            slots = request.parallel or 1
            ends = (
                PlanRequest(min(1024, facts.trained_context_tokens) * slots, slots),
                PlanRequest(None, slots),
            )
            least, most = (_plan(facts, end, PLENTY) for end in ends)
            rooms = [least + (most - least) * share // 100 for share in SHARES]
            for room in [0] if name == REFUSED else rooms:
                yield Case(model, name, Room(room))


def timed_ms(work: Callable[[], object]) -> float:
    """Wall time of one call."""
    began = time.perf_counter_ns()
    work()
    return (time.perf_counter_ns() - began) / NS_PER_MS


def p95(values: Sequence[float]) -> float:
    """The value that 95 % do not exceed."""
    return statistics.quantiles(values, n=20, method="inclusive")[-1]


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="the time of a plan")
    parser.add_argument("--samples", type=int, default=9, help="plans of each kind (default: 9)")
    count = parser.parse_args().samples
    print(support.machine_line() + "\n")
    document = REFERENCE.read_text(encoding="utf-8")
    times: dict[Case, list[float]] = {case: [] for case in cases()}
    reference: list[float] = []
    for _ in range(count):  # by turns, so that a neighbour of this machine disturbs all alike
        for case, values in times.items():
            values.append(timed_ms(case.make))
            reference.append(timed_ms(lambda: json.loads(document)))
    unit_ms = statistics.median(reference)
    print(f"reference: json.loads of {len(document.encode())} bytes, median {unit_ms:.3f} ms\n")

    def row(name: str, layers: str, chosen: Iterator[Case]) -> tuple[str, ...]:
        values = [value for case in chosen for value in times[case]]
        median = statistics.median(values)
        figures = (f"{median:.2f}", f"{p95(values):.2f}", f"{max(values):.2f}", f"{median / unit_ms:.1f}")
        return name, layers, *figures

    heads = ("", "layers", "median ms", "p95", "highest", "median / reference")
    models = [
        row(
            name,
            str(len(facts_of(name).layers)),
            (case for case in times if (case.model, case.question) == (name, AUTOMATIC)),
        )
        for name in priced_models()
    ]
    print(f"by model, slots {AUTOMATIC}\n{support.table(heads, models)}\n")
    questions = [row(name, "", (case for case in times if case.question == name)) for name in QUESTIONS]
    print(f"by slots, all models\n{support.table(heads, questions)}")
    everything = statistics.median(value for values in times.values() for value in values)
    return support.report_targets((support.Target("median plan", everything, MEDIAN_LIMIT_MS, "ms"),))


if __name__ == "__main__":
    sys.exit(main())
