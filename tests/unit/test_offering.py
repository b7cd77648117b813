"""Models without a rule, from a file to a plan, a list and an admission, with a scripted dry run for an engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lllm3090d.checkpoints.unruled import UnruledModel
from lllm3090d.engines.capabilities import Backend, DryRunAbility
from lllm3090d.engines.dry_run_queue import MOST_WAITING
from lllm3090d.engines.help_text import parse_help
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.readings import CardKind
from lllm3090d.planning.cache import CacheType
from lllm3090d.planning.planner import CappedBy
from lllm3090d.planning.quote import Evidence
from lllm3090d.planning.request import Drafting, PlanRequest, Room
from lllm3090d.planning.units import MIB
from lllm3090d.planning.verdict import Verdict
from lllm3090d.serving.events import (
    Admitted,
    CheckIdle,
    Effect,
    EngineReady,
    Failed,
    LoadRequested,
    Queued,
    StartFinished,
    StartUnit,
)
from lllm3090d.serving.extras import lacking, wish_of
from lllm3090d.serving.inspection import inspect
from lllm3090d.serving.instance import SERVING
from lllm3090d.serving.listings import Listings
from lllm3090d.serving.lookup import FoundUnruled
from lllm3090d.serving.offering import Offers
from lllm3090d.serving.previews import Previews
from lllm3090d.serving.running import mismatch
from lllm3090d.serving.unruled import OfferedPlan
from lllm3090d.wire import InspectBody, ModelView, PlanBody, PlanView
from tests.fakes.gated import Gate
from tests.fakes.gguf_files import Tensor, Typed, write_gguf
from tests.fakes.plan_desk import HOST, Desk
from tests.unit.engine_captures import answers
from tests.unit.engine_truth import facts_of
from tests.unit.plans import DRAFTING

pytestmark = pytest.mark.unit

GIB = 1 << 30
NAME = "kimi"
FLAGS = parse_help(answers("b11434")["fit-help"].stdout)[0]
# 4 GiB of weights, 64 KiB for a token with a cache of f16 and half of that with any other, 300 MiB of compute.
PROJECT = (
    "#!/bin/sh\n"
    'echo "$@" >> "$0.log"\n'
    'while [ $# -gt 0 ]; do case "$1" in -c) c=$2;; -ctk) k=$2;; esac; shift; done\n'
    'per=32; [ "$k" = f16 ] && per=64\n'
    'echo "Host 4096 $((c * per / 1024)) 300"\n'
)


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path, catalogue_file=tmp_path / "catalogue.json")
    (tmp_path / "catalogue.json").write_text('{"schema": 1, "models": []}')
    metadata = {
        "general.architecture": "kimi-k3",
        "kimi-k3.context_length": Typed("u32", 1 << 20),
        "general.file_type": Typed("u32", 7),
    }
    table = Tensor("token_embd.weight", (64, 32_000), "Q8_0")
    write_gguf(made.settings.models_dir / NAME / "kimi.gguf", metadata, [table])
    projects_with(made, PROJECT)
    yield made
    asyncio.run(made.lookup.close())


def projects_with(desk: Desk, script: str) -> None:
    assert not isinstance(desk.lookup.next_engine, LlmError)
    build, capabilities = desk.lookup.next_engine
    program = build.server.parent / "llama-fit-params"
    program.write_text(script, encoding="utf-8")
    program.chmod(0o755)
    desk.lookup.next_engine = build, replace(capabilities, dry_run=DryRunAbility(program, FLAGS))


def runs(desk: Desk) -> list[str]:
    log = desk.settings.models_dir.parent / "llama-fit-params.log"
    return log.read_text().splitlines() if log.exists() else []


def plan(desk: Desk, **asked: Any) -> PlanView:
    view = asyncio.run(Previews(desk.daemon).plan(PlanBody.model_validate({"model": NAME} | asked)))
    return PlanView.model_validate_json(view.model_dump_json())


def refusal(desk: Desk, **asked: Any) -> LlmError:
    with pytest.raises(LlmError) as caught:
        plan(desk, **asked)
    json.dumps(caught.value.problem())
    return caught.value


# --- plans ---------------------------------------------------------------------------------------------------------


def test_the_largest_context_that_fits(desk: Desk) -> None:
    view = plan(desk)
    assert (view.architecture, view.quantisation, view.trained_context_tokens) == (
        "kimi-k3",
        "Q8_0",
        1 << 20,
    )
    assert (view.capped_by, view.parallel, view.fits) == (CappedBy.MEMORY, 1, True)
    assert (view.evidence, view.verdict) == (Evidence.ENGINE, Verdict.OK)
    assert "priced by a dry run of this engine alone" in view.notes[0]
    assert view.available_bytes - view.card_bytes < 200 * MIB
    assert f"-c {view.context_tokens}" in " ".join(view.argv)
    made = len(runs(desk))
    assert 2 < made <= 8
    assert all("-dev none" in line for line in runs(desk))
    # The same again makes no dry run, and all of it is remembered.
    assert plan(desk) == view
    assert len(runs(desk)) == made


def test_a_context_that_was_asked_for_takes_one_run(desk: Desk) -> None:
    view = plan(desk, context_tokens=10_000, parallel=2)
    assert (view.context_tokens, view.window_tokens) == (10_240, 5120)
    assert len(runs(desk)) == 1
    assert "-c 10240 -np 2 -ctk q8_0 -ctv q8_0" in runs(desk)[0]
    assert view.limit is not None
    assert view.limit.by is CappedBy.REQUEST


def test_what_does_not_fit_is_refused_with_the_budget(desk: Desk) -> None:
    error = refusal(desk, context_tokens=1 << 20)
    assert error.code is ErrorCode.INSUFFICIENT_VRAM
    assert "kimi with 1,048,576 tokens of context in 1 slot needs 3" in error.message
    assert {line["name"] for line in error.details["budget"]} == {"total", "driver"}
    assert error.details["card"]["present"]
    assert error.details["verdict"] == "too-big"
    assert error.hint is not None
    assert "lllm3090ctl plan 'kimi'" in error.hint


def test_other_cards(desk: Desk) -> None:
    view = plan(desk, vram="12GiB", desktop=False)
    assert view.card is not None
    assert view.card.empty
    assert (view.cache_type_k, view.evidence) == (CacheType.Q8_0, Evidence.ENGINE)
    assert view.window_tokens < plan(desk, vram="16GiB", desktop=False).window_tokens
    assert "can give" in refusal(desk, vram="4GiB", context_tokens=4096).message


def test_a_card_for_another_backend_needs_what_that_backend_needs(desk: Desk) -> None:
    """A dry run without a card is good for any; but CUDA adds something to other types than f16."""
    view = plan(desk, card="rtx-4090", backend="cuda", context_tokens=8192)
    assert view.cache_type_k is CacheType.F16
    assert view.argv == ()
    assert any("cache type f16 instead of q8_0" in note for note in view.notes)
    assert refusal(desk, card="rtx-4090", backend="cuda", cache_type="q8_0").code is (
        ErrorCode.UNSUPPORTED_COMBINATION
    )
    host = plan(desk, backend="cpu", context_tokens=8192)
    assert (host.card_kind, host.cache_type_k, host.host_bytes) == (CardKind.CPU, CacheType.Q8_0, 0)


def test_further_arguments_of_the_engine(desk: Desk) -> None:
    asked = plan(desk, arguments=["-c", "4096"])
    assert (asked.context_tokens, asked.capped_by) == (4096, CappedBy.REQUEST)
    assert plan(desk, context_tokens=4096).context_tokens == 4096
    error = refusal(desk, arguments=["--spec-type", "draft-mtp"])
    assert (error.code, "--draft" in error.message) == (ErrorCode.UNSUPPORTED_COMBINATION, True)


def test_nothing_is_compared_where_there_is_nothing_of_ours(desk: Desk) -> None:
    check = plan(desk, context_tokens=4096, check=True).engine_check
    assert check is not None
    assert check.agrees is None
    assert "nothing to hold against it" in check.text


# --- what goes wrong -----------------------------------------------------------------------------------------------


def test_a_build_that_makes_no_dry_runs(desk: Desk) -> None:
    assert not isinstance(desk.lookup.next_engine, LlmError)
    build, capabilities = desk.lookup.next_engine
    desk.lookup.next_engine = build, replace(capabilities, dry_run=None)
    error = refusal(desk)
    assert error.code is ErrorCode.ENGINE_UNUSABLE
    assert "brings no llama-fit-params" in error.message
    (row,) = listed(desk)
    assert row.verdict is None
    assert row.plan_problem is not None
    assert "brings no llama-fit-params" in row.plan_problem["detail"]


@pytest.mark.parametrize(
    ("script", "code", "text"),
    [
        (
            "#!/bin/sh\necho \"unknown model architecture: 'kimi-k3'\" >&2; exit 1\n",
            "ENGINE_FAILED",
            "'kimi-k3'",
        ),
        ("#!/bin/sh\nkill -9 $$\n", "ENGINE_FAILED", "SIGKILL"),
        ("#!/bin/sh\necho all is well\n", "ENGINE_UNUSABLE", "in a form that is not known"),
    ],
)
def test_a_dry_run_that_fails(desk: Desk, script: str, code: str, text: str) -> None:
    projects_with(desk, script)
    error = refusal(desk)
    assert error.code is ErrorCode[code]
    assert text in error.message


def test_without_an_engine_there_is_no_plan_anywhere(desk: Desk) -> None:
    desk.lookup.next_engine = LlmError(ErrorCode.ENGINE_NOT_FOUND, "There is none.", hint="Build one.")
    assert refusal(desk, card="rtx-4090").code is ErrorCode.ENGINE_NOT_FOUND


def test_a_machine_without_room_for_a_dry_run(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        free_bytes = GIB
        total_bytes = 64 * GIB

    monkeypatch.setattr("lllm3090d.serving.offering.HostMemoryReader.read", lambda self: Full())
    error = refusal(desk, context_tokens=4096)
    assert error.code is ErrorCode.INSUFFICIENT_MEMORY
    assert "host memory has 1024 MiB, a dry run may need 2688" in error.message
    assert runs(desk) == []


def test_too_many_who_wait_are_told_and_who_leaves_makes_room(desk: Desk) -> None:
    gate = gated(desk)
    previews = Previews(desk.daemon)

    async def main() -> None:
        asked = [
            asyncio.create_task(
                previews.plan(
                    PlanBody.model_validate({"model": NAME, "context_tokens": 4096 + 256 * number})
                )
            )
            for number in range(MOST_WAITING + 3)
        ]
        done, waiting = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        while len(done) < 2:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            done |= {each for each in asked if each.done()}
        for each in done:
            error = each.exception()
            assert isinstance(error, LlmError)
            assert "other dry runs are waiting" in error.message
        await asyncio.to_thread(gate.wait_for_one)
        left = [each for each in asked if not each.done()]
        assert len(left) == MOST_WAITING + 1
        for each in left:
            each.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await asyncio.to_thread(gate.let_go)

    asyncio.run(main())
    assert gate.passed() == 1


def gated(desk: Desk) -> Gate:
    assert not isinstance(desk.lookup.next_engine, LlmError)
    build, capabilities = desk.lookup.next_engine
    gate = Gate(build.server.parent / "gate" / "llama-fit-params", "echo Host 4096 100 300")
    desk.lookup.next_engine = build, replace(capabilities, dry_run=DryRunAbility(gate.program, FLAGS))
    return gate


# --- lists -----------------------------------------------------------------------------------------------------------


def listed(desk: Desk) -> tuple[ModelView, ...]:
    return asyncio.run(Listings(desk.daemon).models(with_catalogue=False)).models


def test_a_list_makes_no_dry_run_and_calls_the_model_sound(desk: Desk) -> None:
    (row,) = listed(desk)
    assert (row.verdict, row.problem, row.plan_problem) == (Verdict.DRY_RUN, None, None)
    assert (row.architecture, row.quantisation, row.trained_context_tokens) == ("kimi-k3", "Q8_0", 1 << 20)
    assert (row.window_tokens, row.evidence, row.kv_bytes_per_token) == (None, None, None)
    assert runs(desk) == []


def test_what_is_known_of_it_is_shown(desk: Desk) -> None:
    view = inspect(desk.lookup, InspectBody(model=NAME))
    assert (view.problem, view.architecture) == (None, "kimi-k3")
    assert view.dry_run_reason == "it keeps a recurrent state of its own kind"


# --- loads -----------------------------------------------------------------------------------------------------------


def requested(
    desk: Desk, request: PlanRequest | None = None, token: str = "t1", name: str = NAME, **fields: Any
) -> LoadRequested:
    found = desk.lookup.model(name)
    assert isinstance(found, FoundUnruled)
    assert not isinstance(desk.lookup.next_engine, LlmError)
    build, capabilities = desk.lookup.next_engine
    return LoadRequested(
        token=token,
        run=f"run{token}",
        checkpoint=found.checkpoint,
        facts=found.unruled,
        request=request or PlanRequest(),
        build=build,
        capabilities=capabilities,
        **fields,
    )


def offered(desk: Desk, event: LoadRequested) -> LoadRequested:
    return asyncio.run(Offers(desk.lookup).offered(event, desk.scheduler, desk.observe))


def load(desk: Desk, event: LoadRequested) -> list[Effect]:
    return desk.scheduler.handle(offered(desk, event), desk.observe())


def error_of(effects: list[Effect]) -> LlmError:
    (failed,) = [each for each in effects if isinstance(each, Failed)]
    return failed.error


def test_a_load_gets_what_the_plan_said(desk: Desk) -> None:
    view = plan(desk)
    effects = load(desk, requested(desk))
    (admitted,) = [each for each in effects if isinstance(each, Admitted)]
    assert isinstance(admitted.facts, UnruledModel)
    (instance,) = desk.scheduler.instances
    assert instance.plan.context_tokens == view.context_tokens
    assert f"-c {view.context_tokens}" in " ".join(admitted.argv)
    assert any(isinstance(each, StartUnit) for each in effects)


def test_room_that_has_gone_since_the_offer_is_a_refusal_with_the_budget(desk: Desk) -> None:
    event = offered(desk, requested(desk))
    desk.foreign_bytes = 16 * GIB
    error = error_of(desk.scheduler.handle(event, desk.observe()))
    assert error.code is ErrorCode.INSUFFICIENT_VRAM
    assert error.details["budget"]
    assert error.hint is not None
    assert "There was more room when it was planned" in error.hint
    assert desk.scheduler.instances == ()


def other_model(desk: Desk, context: int) -> str:
    """Another model that serves and is idle; its run."""
    name = "other"
    source = desk.settings.models_dir / NAME / "kimi.gguf"
    target = desk.settings.models_dir / name / "other.gguf"
    target.parent.mkdir()
    target.write_bytes(source.read_bytes())
    event = requested(desk, PlanRequest(context_tokens=context), token="t0", name=name)
    load(desk, event)
    for news in (StartFinished(event.run, None), EngineReady(event.run, {})):
        desk.scheduler.handle(news)
    assert desk.scheduler.instances[0].state in SERVING
    return event.run


def test_where_others_are_in_the_way_the_offer_is_for_the_room_that_they_would_leave(desk: Desk) -> None:
    desk.scheduler.policy = replace(desk.scheduler.policy, least_residency_s=0.0, least_idle_s=0.0)
    alone = plan(desk)
    run = other_model(desk, 400_000)
    event = offered(desk, requested(desk))
    assert event.offer is not None
    assert event.offer.context_tokens == alone.context_tokens
    (asked,) = [each for each in desk.scheduler.handle(event, desk.observe()) if isinstance(each, CheckIdle)]
    assert asked.runs == (run,)


def test_a_smaller_context_where_the_load_says_that_it_would_do(desk: Desk) -> None:
    wish = PlanRequest(context_tokens=900_000)
    event = offered(desk, requested(desk, wish, least_context_tokens=100_000))
    assert event.offer is not None
    assert 100_000 <= event.offer.context_tokens < 900_000
    assert any(isinstance(each, Admitted) for each in desk.scheduler.handle(event, desk.observe()))


def test_the_least_that_would_do_does_not_fit_either(desk: Desk) -> None:
    wish = PlanRequest(context_tokens=900_000)
    event = offered(desk, requested(desk, wish, least_context_tokens=899_000))
    assert event.offer is not None
    assert event.offer.context_tokens >= 900_000
    assert error_of(desk.scheduler.handle(event, desk.observe())).code is ErrorCode.INSUFFICIENT_VRAM


def test_who_may_not_evict_gets_what_there_is(desk: Desk) -> None:
    alone = plan(desk)
    other_model(desk, 200_000)
    event = offered(desk, requested(desk, may_evict=False))
    assert event.offer is not None
    assert event.offer.context_tokens < alone.context_tokens
    effects = desk.scheduler.handle(event, desk.observe())
    assert any(isinstance(each, Admitted) for each in effects)


def test_who_waits_for_a_busy_model_gets_the_room_that_it_will_leave(desk: Desk) -> None:
    alone = plan(desk)
    other_model(desk, 430_000)
    desk.scheduler.instances[0].busy = True
    event = offered(desk, requested(desk))
    assert event.offer is not None
    assert event.offer.context_tokens == alone.context_tokens
    (queued,) = [each for each in desk.scheduler.handle(event, desk.observe()) if isinstance(each, Queued)]
    assert "other, which is busy" in queued.why
    unwilling = offered(desk, requested(desk, token="t2", may_wait=False))
    assert unwilling.offer is not None
    assert unwilling.offer.window_tokens == 1024


def test_what_runs_is_asked_nothing_and_compared(desk: Desk) -> None:
    load(desk, requested(desk, PlanRequest(context_tokens=8192)))
    made = len(runs(desk))
    for request, missing in (
        (PlanRequest(), None),
        (PlanRequest(context_tokens=8192), None),
        (PlanRequest(context_tokens=8100), None),  # padded it is the same
        (PlanRequest(context_tokens=9000), "context 8,192 instead of 9,216"),
        (PlanRequest(parallel=2), "slots 1 instead of 2"),
        (PlanRequest(cache_type_k=CacheType.F16), "K cache q8_0 instead of f16"),
        (PlanRequest(drafting=Drafting.ON), "drafting off instead of on"),
        (PlanRequest(gpu_layers=3), "layers on the card all instead of 3"),
        (PlanRequest(unified=True), "without a pool that its slots share"),
    ):
        event = offered(desk, requested(desk, request, token="t2"))
        assert event.offer is None
        (instance,) = desk.scheduler.instances
        told = lacking(instance.plan, (), event)
        assert (told is None) is (missing is None), told
        assert missing is None or missing in str(told)
        effects = desk.scheduler.handle(event, desk.observe())
        if missing is not None:
            assert error_of(effects).code is ErrorCode.LOADED_DIFFERENTLY
    assert len(runs(desk)) == made


def test_the_same_wish_again_is_satisfied(desk: Desk) -> None:
    event = offered(desk, requested(desk, PlanRequest(context_tokens=8192, draft_tokens=4)))
    assert event.offer is not None
    assert not mismatch(event.offer, event, asked=wish_of(event)).other
    assert not mismatch(event.offer, event).other


def test_a_model_that_was_gone_before_it_could_be_compared_is_told(desk: Desk) -> None:
    event = requested(desk)
    model = event.facts
    assert isinstance(model, UnruledModel)
    with pytest.raises(LlmError) as caught:
        OfferedPlan(None, model, CardKind.CPU, Room(GIB)).plan()
    assert caught.value.code is ErrorCode.LOAD_CANCELLED
    assert error_of(desk.scheduler.handle(event, desk.observe())).code is ErrorCode.LOAD_CANCELLED


def test_a_load_that_is_withdrawn_waits_for_no_dry_run(desk: Desk) -> None:
    gate = gated(desk)
    offers = Offers(desk.lookup)

    async def main() -> None:
        asked = asyncio.create_task(offers.offered(requested(desk), desk.scheduler, desk.observe))
        await asyncio.to_thread(gate.wait_for_one)
        offers.withdraw("another")
        offers.withdraw("t1")
        with pytest.raises(LlmError) as caught:
            await asked
        assert caught.value.code is ErrorCode.LOAD_CANCELLED
        left = asyncio.create_task(offers.offered(requested(desk), desk.scheduler, desk.observe))
        await asyncio.sleep(0)
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        await asyncio.to_thread(gate.let_go)

    asyncio.run(main())


def test_host_memory_in_the_place_of_a_card(desk: Desk) -> None:
    desk.card, desk.total_bytes, desk.reserved_bytes = HOST, 24 * GIB, None
    desk.lookup.computes_on(Backend.CPU)
    effects = load(desk, requested(desk, PlanRequest(context_tokens=8192)))
    (instance,) = desk.scheduler.instances
    assert not instance.plan.on_card
    (admitted,) = [each for each in effects if isinstance(each, Admitted)]
    assert "--device none" in " ".join(admitted.argv)


def test_on_cuda_an_f16_cache_is_loaded_unless_another_was_asked_for(desk: Desk) -> None:
    desk.lookup.computes_on(Backend.CUDA)
    with pytest.raises(LlmError) as caught:
        offered(desk, requested(desk, PlanRequest(cache_type_k=CacheType.Q8_0)))
    assert caught.value.code is ErrorCode.UNSUPPORTED_COMBINATION
    assert runs(desk) == []
    load(desk, requested(desk))
    (instance,) = desk.scheduler.instances
    assert instance.plan.cache_type_k is CacheType.F16


def test_a_model_with_a_rule_is_planned_when_it_is_admitted(desk: Desk) -> None:
    event = replace(requested(desk), facts=facts_of(DRAFTING))
    assert offered(desk, event) is event
    assert runs(desk) == []
