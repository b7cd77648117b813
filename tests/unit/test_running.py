"""A load of a model that runs: the same wish again is satisfied, another one is not taken for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from lllm3090d.checkpoints.classify import Kind
from lllm3090d.checkpoints.library import Companion
from lllm3090d.engines.capabilities import Backend
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.readings import Card, CardKind
from lllm3090d.planning.cache import CacheType
from lllm3090d.planning.planner import Plan
from lllm3090d.planning.request import Drafting, Offload, PlanRequest, ProjectorPlace
from lllm3090d.planning.rope import RopeScaling
from lllm3090d.planning.stretch import Stretch
from lllm3090d.serving.events import Admitted, Effect, Failed, Joined, LoadRequested, Observation
from lllm3090d.serving.extras import lacking, wish_of
from lllm3090d.serving.running import Mismatch, mismatch
from lllm3090d.serving.unit_spec import Record, read_record
from tests.fakes.scheduler_world import CARD, GIB, World
from tests.unit.engine_truth import facts_of
from tests.unit.plans import DRAFTING, MIXTURE, SMOLLM2, projector_of
from tests.unit.test_command_line import build_named

pytestmark = pytest.mark.unit

BUILD = replace(build_named("b11434", Backend.VULKAN), devices=("Vulkan0",))


class Bench(World):
    """A world whose models are real ones."""

    card_kind = CardKind.NVIDIA

    def observation(self) -> Observation:
        seen = super().observation()
        return replace(seen, cards=(replace(seen.main, card=Card(self.card_kind, CARD.uuid, "x", None)),))

    def event(
        self,
        request: PlanRequest,
        line: str = "",
        *,
        model: str = SMOLLM2,
        token: str = "t1",
        has_projector: bool = False,
    ) -> LoadRequested:
        made = self.request("m", token, request=request)
        checkpoint = made.checkpoint
        if has_projector:
            path = Path("/models/m/mmproj.gguf")
            checkpoint = replace(checkpoint, projector=Companion(path, (path,), 300 << 20, Kind.PROJECTOR))
        return replace(
            made,
            checkpoint=checkpoint,
            facts=facts_of(model),
            capabilities=BUILD,
            arguments=tuple(line.split()),
            projector=projector_of(300) if has_projector else None,
        )

    @property
    def plan(self) -> Plan:
        return self.get("m").plan


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    server = tmp_path / "llama-server"
    server.write_text("#!/bin/sh\n")
    server.chmod(0o755)
    made = Bench()
    made.server = server
    yield made


def is_admitted(effects: list[Effect]) -> bool:
    return any(isinstance(effect, Admitted) for effect in effects)


def refused(effects: list[Effect]) -> LlmError:
    (failed,) = [effect for effect in effects if isinstance(effect, Failed)]
    return failed.error


@dataclass(frozen=True)
class Wish:
    """A load, and what stands in the way of its wish."""

    request: PlanRequest = field(default_factory=PlanRequest)
    line: str = ""
    model: str = SMOLLM2
    kind: CardKind = CardKind.NVIDIA
    has_projector: bool = False
    foreign_gib: float = 0


WITHOUT_EFFECT = {
    "a model that cannot draft": Wish(PlanRequest(draft_tokens=5)),
    "drafting is off": Wish(PlanRequest(drafting=Drafting.OFF, draft_tokens=9), model=DRAFTING),
    "drafting is given up": Wish(PlanRequest(draft_tokens=64), model=DRAFTING, foreign_gib=6),
    "an argument for drafts": Wish(line="--spec-draft-n-max 7"),
    "an argument for images": Wish(line="--image-max-tokens 7"),
    "a place without a card": Wish(
        PlanRequest(projector=ProjectorPlace.HOST), kind=CardKind.CPU, has_projector=True
    ),
    "the card without a card": Wish(
        PlanRequest(projector=ProjectorPlace.CARD), kind=CardKind.CPU, has_projector=True
    ),
    "the smallest batch": Wish(PlanRequest(batch_tokens=32)),
    "the largest micro batch": Wish(PlanRequest(micro_batch_tokens=4096)),
    "stretched for nothing": Wish(PlanRequest(rope_scaling=RopeScaling.YARN)),
    "stretched for a short window": Wish(PlanRequest(4096, 1, rope_scaling=RopeScaling.YARN)),
    "linear for a short window": Wish(PlanRequest(4096, 1, rope_scaling=RopeScaling.LINEAR)),
    "a padded context": Wish(PlanRequest(4000, 3)),
    "all layers": Wish(PlanRequest(gpu_layers=31)),
    "all layers as an argument": Wish(line="-ngl all"),
    "what is usual, said": Wish(line="-no-kvu -kvo"),
    "offload that nobody needs": Wish(PlanRequest(offload=Offload.ALLOWED)),
}


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_the_same_load_again_joins_the_first(bench: Bench, name: str) -> None:
    """Also for a launch of an older release, whose record does not tell what was asked for."""
    wish = WITHOUT_EFFECT[name]
    bench.card_kind, bench.foreign_bytes = wish.kind, int(wish.foreign_gib * GIB)

    def event(token: str) -> LoadRequested:
        return bench.event(
            wish.request, wish.line, model=wish.model, token=token, has_projector=wish.has_projector
        )

    assert is_admitted(bench.do(event("t1")))
    assert bench.plan.launch.draft is None or wish.model is not DRAFTING
    assert any(isinstance(effect, Joined) for effect in bench.do(event("t2")))
    assert lacking(bench.plan, bench.get("m").record.arguments, event("t3")) is None


def test_a_tier_that_nothing_needed_is_no_lack_of_one(bench: Bench) -> None:
    """The planner leaves it out where the whole cache fits, and says so."""
    request = PlanRequest(8192, 2, tiered=True)
    plain = replace(request, tiered=False)
    bench.do(bench.event(plain))
    event = bench.event(request)
    assert mismatch(bench.plan, event).missing == ("a tiered cache",)
    assert mismatch(bench.plan, event, asked=request) == Mismatch()
    open_slots = bench.event(replace(request, parallel=None))
    assert mismatch(bench.plan, open_slots, asked=request) == Mismatch()
    assert mismatch(bench.plan, open_slots, asked=plain).missing == ("a tiered cache",)


def test_a_record_tells_what_was_asked_for(bench: Bench) -> None:
    """Of the load and its arguments; what a daemon finds again after its end is asked the same."""
    request = PlanRequest(8192, drafting=Drafting.OFF, draft_tokens=9, cache_type_k=CacheType.F16)
    event = bench.event(request, "-np 2 --threads 4")
    bench.do(event)
    record = bench.get("m").record
    assert record.asked == wish_of(event) == replace(request, parallel=2)
    found = read_record([f"LLLM3090_RECORD={record.model_dump_json()}"])
    assert found is not None and found.asked == record.asked
    assert found == record
    old = Record.model_validate(record.model_dump(mode="json") | {"launch": None})
    assert old.asked is None


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (Wish(PlanRequest(8192)), Wish(PlanRequest(8192, 3)), "slots 2 instead of 3"),
        (
            Wish(PlanRequest(draft_tokens=4), model=DRAFTING),
            Wish(PlanRequest(draft_tokens=5), model=DRAFTING),
            "draft tokens 4 instead of 5",
        ),
        (
            Wish(PlanRequest(drafting=Drafting.OFF), model=DRAFTING),
            Wish(PlanRequest(drafting=Drafting.ON, draft_tokens=5), model=DRAFTING),
            "with drafting off instead of on;",
        ),
        (
            Wish(PlanRequest(projector=ProjectorPlace.HOST), has_projector=True),
            Wish(PlanRequest(projector=ProjectorPlace.CARD), has_projector=True),
            "projector host instead of card",
        ),
        (
            Wish(PlanRequest(projector=ProjectorPlace.OFF), kind=CardKind.CPU, has_projector=True),
            Wish(PlanRequest(projector=ProjectorPlace.CARD), kind=CardKind.CPU, has_projector=True),
            "projector off instead of card",
        ),
        (
            Wish(has_projector=True),
            Wish(line="--image-max-tokens 7", has_projector=True),
            "tokens of an image 0 instead of 7",
        ),
        (
            Wish(PlanRequest(gpu_layers=3)),
            Wish(PlanRequest(gpu_layers=31)),
            "layers on the card 3 instead of 31",
        ),
        (
            Wish(PlanRequest(gpu_layers=3)),
            Wish(line="-ngl all"),
            "layers on the card 3 instead of 31",
        ),
        (Wish(), Wish(PlanRequest(gpu_layers=10_000)), "layers on the card 31 instead of 10,000"),
        (
            Wish(PlanRequest(cpu_experts=3), model=MIXTURE),
            Wish(PlanRequest(gpu_layers=49), model=MIXTURE),
            "experts in host memory 3 instead of 0",
        ),
        (Wish(PlanRequest(unified=True)), Wish(line="-no-kvu"), "m runs with a pool that its slots share;"),
        (Wish(PlanRequest(cache_on_host=True)), Wish(line="-kvo"), "m runs with its cache in host memory;"),
        # Stretched positions.
        (
            Wish(PlanRequest(16_384, 1, rope_scaling=RopeScaling.YARN)),
            Wish(PlanRequest(16_384, rope_scaling=RopeScaling.NONE)),
            "scaling of positions yarn to 16,384 tokens instead of none",
        ),
        (
            Wish(PlanRequest(16_384, 1, rope_scaling=RopeScaling.YARN)),
            Wish(PlanRequest(rope_scaling=RopeScaling.LINEAR)),
            "scaling of positions yarn to 16,384 tokens instead of none",
        ),
        (
            Wish(PlanRequest(16_384)),  # in two slots
            Wish(PlanRequest(16_384, rope_scaling=RopeScaling.YARN)),  # in one
            "scaling of positions none instead of yarn to 16,384 tokens",
        ),
        (
            Wish(PlanRequest(16_384, 1, rope_scaling=RopeScaling.YARN)),
            Wish(PlanRequest(32_768, 1, rope_scaling=RopeScaling.YARN)),
            "scaling of positions yarn to 16,384 tokens instead of yarn to 32,768 tokens",
        ),
    ],
)
def test_another_wish_is_loaded_differently(bench: Bench, first: Wish, second: Wish, words: str) -> None:
    bench.card_kind = first.kind
    for token, wish in (("t1", first), ("t2", second)):
        effects = bench.do(
            bench.event(
                wish.request, wish.line, model=wish.model, token=token, has_projector=wish.has_projector
            )
        )
        assert is_admitted(effects) is (wish is first)
    error = refused(effects)
    assert error.code is ErrorCode.LOADED_DIFFERENTLY
    assert words in error.message


def test_a_stretched_window_serves_who_asked_for_it(bench: Bench) -> None:
    bench.do(bench.event(PlanRequest(16_384, 1, rope_scaling=RopeScaling.YARN)))
    assert bench.plan.rope == Stretch(RopeScaling.YARN, 2.0, 8192, 16_384)
    for request in (
        PlanRequest(),
        PlanRequest(16_384, rope_scaling=RopeScaling.YARN),
        PlanRequest(16_300, 1, rope_scaling=RopeScaling.YARN),
        PlanRequest(rope_scaling=RopeScaling.YARN),
    ):
        effects = bench.do(bench.event(request, token="t2"))
        assert any(isinstance(effect, Joined) for effect in effects), request


def test_a_window_that_cannot_be_is_refused_as_a_load_would_be(bench: Bench) -> None:
    wish = PlanRequest(16_384, 1, rope_scaling=RopeScaling.LINEAR)
    fresh = refused(bench.do(bench.event(wish)))
    bench.do(bench.event(PlanRequest(8192)))
    assert refused(bench.do(bench.event(wish, token="t2"))).message == fresh.message
