"""What is said beside a plan: its limit, the smallest card, alternatives that can be asked for as they are told."""

from __future__ import annotations

import re
import shlex
from dataclasses import fields, replace
from pathlib import Path

import click
import pytest

import lllm3090d
from lllm3090ctl.cli import cli
from lllm3090ctl.plan_options import CARD_OPTIONS, CHECK_OPTION, PLAN_OPTIONS, plan_body
from lllm3090d.checkpoints.facts import ProjectorFacts
from lllm3090d.checkpoints.header import read_header
from lllm3090d.checkpoints.projector import projector_of_header
from lllm3090d.engines.capabilities import Backend
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.readings import CardKind
from lllm3090d.planning.alternatives import alternatives
from lllm3090d.planning.cache import CacheType
from lllm3090d.planning.limits import limit
from lllm3090d.planning.planner import CappedBy, Features, Planner, PlanRequest, Room
from lllm3090d.planning.quote import Place
from lllm3090d.planning.request import Drafting, Offload, RopeScaling, option_of
from lllm3090d.planning.reserves import BudgetLine
from lllm3090d.planning.smallest_card import agent_window_tokens, smallest_card
from lllm3090d.planning.units import MIB
from lllm3090d.serving.plan_requests import plan_request
from lllm3090d.wire import PlanBody, PlanOptions
from tests.fakes.gguf_files import write_projector
from tests.unit.engine_truth import POLICY, facts_of

pytestmark = pytest.mark.unit

GIB = 1 << 30
SOURCES = Path(lllm3090d.__file__).parent


@pytest.fixture
def projector(tmp_path: Path) -> ProjectorFacts:
    return projector_of_header(read_header(write_projector(tmp_path / "mmproj.gguf")))


def planner(
    model: str,
    gib: float,
    request: PlanRequest | None = None,
    projector: ProjectorFacts | None = None,
    kind: CardKind = CardKind.NVIDIA,
) -> Planner:
    backend = Backend.CPU if kind is CardKind.CPU else Backend.VULKAN
    return Planner(
        facts_of(model),
        request or PlanRequest(),
        POLICY,
        Features(backend),
        kind,
        Room(int(gib * GIB), None),
        projector,
    )


def parsed(text: str) -> PlanRequest:
    """The request that options of the client make."""
    plan = cli.commands["plan"]
    context = plan.make_context("plan", ["model", *shlex.split(text)])
    options = {
        key: value for key, value in context.params.items() if key not in {"name", "explain", "as_json"}
    }
    return plan_request(PlanBody.model_validate(plan_body("model", options)))


# --- alternatives ----------------------------------------------------------------------------------------------------


CASES = [
    ("qwen3-8b", 8.0, PlanRequest()),
    ("qwen3-8b", 12.0, PlanRequest(context_tokens=8192)),
    ("qwen3.5-27b-mtp", 24.0, PlanRequest()),
    ("qwen3.5-27b-mtp", 24.0, PlanRequest(drafting=Drafting.OFF)),
    ("qwen3.5-35b-a3b-mtp", 24.0, PlanRequest()),
    ("qwen3.5-27b-mtp", 16.0, PlanRequest()),
    ("qwen3-30b-a3b", 20.0, PlanRequest(cache_type_k=CacheType.F16, cache_type_v=CacheType.F16)),
    ("llama-3.1-8b", 21.0, PlanRequest()),
    ("llama-3.1-8b", 24.0, PlanRequest(parallel=3)),
    ("gemma-3-27b", 20.0, PlanRequest()),
]


@pytest.mark.parametrize(("model", "gib", "request_"), CASES)
def test_asking_for_an_alternative_gives_it(
    model: str, gib: float, request_: PlanRequest, projector: ProjectorFacts
) -> None:
    """Its options, parsed by the client beside what was asked before, give the plan that was promised."""
    question = planner(model, gib, request_, projector if model == "gemma-3-27b" else None)
    plan = question.plan()
    found = alternatives(question, plan)
    assert found
    for other in found:
        asked = parsed(other.ask)
        changes = {
            field.name: getattr(asked, field.name)
            for field in fields(asked)
            if getattr(asked, field.name) != field.default
        }
        assert changes
        again = replace(question, request=replace(request_, **changes)).plan()
        assert (again.window_tokens, again.parallel) == (other.window_tokens, other.slots)
        assert again.quote.total_bytes(Place.CARD) == other.card_bytes
        assert other.gain


def test_every_kind_of_alternative_is_tried_above(projector: ProjectorFacts) -> None:
    asks = set()
    for model, gib, request_ in CASES:
        question = planner(model, gib, request_, projector if model == "gemma-3-27b" else None)
        asks |= {other.ask.split()[0] for other in alternatives(question, question.plan())}
    assert asks >= {"--parallel", "--slot-policy", "--cache-type", "--draft", "--projector", "--offload"}


def test_fields_are_told_as_the_clients_options() -> None:
    options = {each.name: {*each.opts, *each.secondary_opts} for each in cli.commands["plan"].params}
    for name in PlanBody.model_fields:
        if name not in {"model", "arguments"}:
            assert option_of(name) in options[name]


@pytest.mark.parametrize(
    "module", ["planning/refusal.py", "planning/alternatives.py", "planning/slots.py", "gpus/profiles.py"]
)
def test_texts_name_options_that_there_are(module: str) -> None:
    """With values that the client takes, so that a hint can be typed as it stands."""
    named = re.findall(r"(--[a-z][a-z-]+)(?: ([A-Za-z0-9_]+))?", (SOURCES / module).read_text())
    assert named
    parameters = {
        spelling: parameter
        for parameter in cli.commands["plan"].params
        for spelling in (*parameter.opts, *parameter.secondary_opts)
    }
    for option, value in named:
        assert option in parameters, option
        kind = parameters[option].type
        if isinstance(kind, click.Choice) and value:
            assert value in kind.choices, (option, value)


def test_every_wish_of_the_planner_can_be_asked_for() -> None:
    """No field of a request is out of reach of the wire, and none is dropped on the way."""
    body = PlanOptions.model_validate(
        {
            "model": "m",
            "context_tokens": 1,
            "parallel": 2,
            "cache_type": "f16",
            "slot_policy": "window",
            "offload": "allowed",
            "gpu_layers": 3,
            "cpu_experts": 4,
            "cache_on_host": True,
            "drafting": "on",
            "draft_tokens": 5,
            "projector": "off",
            "unified": True,
            "swa_full": True,
            "batch_tokens": 64,
            "micro_batch_tokens": 32,
            "rope_scaling": "yarn",
            "tiered": True,
            "purpose": "embedding",
            "arguments": ["--threads", "8"],  # which only an engine can tell the meaning of
        }
    )
    assert body.model_fields_set == set(PlanOptions.model_fields)
    asked = plan_request(body)
    for field in fields(asked):
        assert getattr(asked, field.name) != field.default, field.name
    assert asked.cache_type_k is asked.cache_type_v is CacheType.F16
    assert plan_request(PlanOptions(model="m")) == PlanRequest()
    spelt = {name for option in (*PLAN_OPTIONS, *CARD_OPTIONS, CHECK_OPTION) for name in _names(option)}
    assert spelt == set(PlanBody.model_fields) - {"model", "arguments"}


def _names(option: object) -> set[str]:
    """The member of the request that an option carries."""

    def body() -> None: ...

    assert callable(option)
    option(body)
    return {parameter.name for parameter in body.__click_params__}  # type: ignore[attr-defined]  # click's own


# --- the smallest card -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trained", "window"),
    [(8192, None), (40_000, None), (40_001, 40_001), (40_960, 40_960), (262_144, 40_960)],
)
def test_the_window_of_an_agent(trained: int, window: int | None) -> None:
    assert agent_window_tokens(trained) == window


@pytest.mark.parametrize("model", ["qwen3-8b", "qwen3.5-27b-mtp", "gemma-3-27b", "gpt-oss-20b"])
def test_the_smallest_card_just_suffices(model: str) -> None:
    """What it takes is enough, one byte less is not, whatever room there was for the question."""
    question = planner(model, 2.0)
    small = smallest_card(question, driver_bytes=512 * MIB, desktop_bytes=2400 * MIB)
    window = agent_window_tokens(question.facts.trained_context_tokens)
    if window is None:
        assert small is None
        return
    assert small is not None
    assert small.window_tokens == window
    assert small.reserve_bytes == 2912 * MIB
    asked = replace(question.request, context_tokens=window, parallel=1)
    enough = replace(question, request=asked, room=Room(small.launch_bytes, None))
    assert enough.plan().window_tokens >= window
    with pytest.raises(LlmError) as caught:
        replace(enough, room=Room(small.launch_bytes - 1, None)).plan()
    assert caught.value.code is ErrorCode.INSUFFICIENT_MEMORY
    assert (small.gib - 1) * GIB < small.total_bytes <= small.gib * GIB


def test_drafting_is_no_reason_for_a_larger_card_unless_it_is_asked_for() -> None:
    """The planner gives it up where the window would not fit with it, so it is not in the price either."""
    found = {}
    for each in (None, *Drafting):
        card = smallest_card(
            planner("qwen3.5-27b-mtp", 2.0, PlanRequest(drafting=each)), driver_bytes=0, desktop_bytes=0
        )
        assert card is not None
        found[each] = card.launch_bytes
    assert found[None] == found[Drafting.AUTO] == found[Drafting.OFF] < found[Drafting.ON]
    question = planner("qwen3.5-27b-mtp", 2.0)
    insisting = replace(question, policy=replace(question.policy, drafting=Drafting.ON))
    card = smallest_card(insisting, driver_bytes=0, desktop_bytes=0)
    assert card is not None and card.launch_bytes == found[Drafting.ON]
    enough = replace(question, room=Room(found[None], None)).plan()
    assert enough.launch.draft is None and enough.window_tokens >= 40_960


def test_the_placement_that_was_asked_for_is_no_advice() -> None:
    """It is for a card that holds everything, and for the window an agent needs."""
    plain = smallest_card(planner("qwen3-30b-a3b", 24.0), driver_bytes=0, desktop_bytes=0)
    request = PlanRequest(
        cpu_experts=10,
        context_tokens=4096,
        parallel=4,
        offload=Offload.ALLOWED,
        rope_scaling=RopeScaling.YARN,
    )
    assert smallest_card(planner("qwen3-30b-a3b", 24.0, request), driver_bytes=0, desktop_bytes=0) == plain
    f16 = PlanRequest(cache_type_k=CacheType.F16, cache_type_v=CacheType.F16)
    larger = smallest_card(planner("qwen3-30b-a3b", 24.0, f16), driver_bytes=0, desktop_bytes=0)
    assert plain is not None and larger is not None
    assert larger.launch_bytes > plain.launch_bytes


def test_no_card_helps_where_there_is_none() -> None:
    assert (
        smallest_card(planner("qwen3-8b", 64.0, kind=CardKind.CPU), driver_bytes=0, desktop_bytes=0) is None
    )
    short = planner("smollm2-135m", 24.0)
    assert smallest_card(short, driver_bytes=0, desktop_bytes=0) is None


# --- the limit -------------------------------------------------------------------------------------------------------


LINES = (
    BudgetLine("total", 24 * GIB, "reading"),
    BudgetLine("driver", -451 * MIB, "reading"),
    BudgetLine("desktop reserve", -2400 * MIB, "setting"),
)


def test_memory_names_the_largest_deduction() -> None:
    found = limit(CappedBy.MEMORY, LINES, 21_725 * MIB, 32_768, stretched=False)
    assert found.line is LINES[2]
    assert found.text == (
        "the memory: 21,725 MiB can be given; the largest deduction is desktop reserve, 2,400 MiB"
    )


def test_memory_without_deductions_is_all_there_is() -> None:
    found = limit(CappedBy.MEMORY, LINES[:1], 24 * GIB, 32_768, stretched=False)
    assert found.line is LINES[0]
    assert found.text == "the memory: 24,576 MiB can be given"


@pytest.mark.parametrize(
    ("by", "stretched", "said"),
    [
        (CappedBy.MODEL, False, "the model: it is trained for 32,768 tokens"),
        (CappedBy.MODEL, True, "the model: it is stretched to 32,768 tokens"),
        (CappedBy.REQUEST, False, "the request: this size was asked for"),
    ],
)
def test_other_limits_have_no_line(by: CappedBy, stretched: bool, said: str) -> None:
    found = limit(by, LINES, 1, 32_768, stretched=stretched)
    assert (found.line, found.text) == (None, said)
