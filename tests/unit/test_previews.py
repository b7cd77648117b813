"""Plans without loading: now, for another card, and of models that are not on disk."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from lllm3090d.engines.capabilities import Backend, DryRunAbility
from lllm3090d.engines.dry_run_queue import MOST_WAITING
from lllm3090d.engines.help_text import parse_help
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.readings import CardKind
from lllm3090d.planning.planner import CappedBy
from lllm3090d.planning.quote import Evidence, LineItem, Place
from lllm3090d.planning.request import PlanRequest, ProjectorPlace, RopeScaling, option_of
from lllm3090d.planning.units import MIB
from lllm3090d.planning.verdict import AGENT_PROMPT_FLOOR_TOKENS, Verdict
from lllm3090d.serving.events import LoadRequested
from lllm3090d.serving.ledger import Share
from lllm3090d.serving.lookup import FoundModel
from lllm3090d.serving.observation import Stranger
from lllm3090d.serving.previews import Previews
from lllm3090d.wire import PlanBody, PlanView
from tests.fakes.gated import Gate
from tests.fakes.gguf_files import write_gemma3, write_projector
from tests.fakes.model_files import published, write
from tests.fakes.plan_desk import HOST, Desk
from tests.unit.engine_captures import answers

pytestmark = pytest.mark.unit

GIB = 1 << 30
QWEN = "qwen3-8b"
NO_ENGINE = LlmError(ErrorCode.ENGINE_NOT_FOUND, "There is none.", hint="Build one.")


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path, catalogue_file=tmp_path / "catalogue.json")
    (tmp_path / "catalogue.json").write_text('{"schema": 1, "models": []}')
    yield made
    asyncio.run(made.lookup.close())


def put(desk: Desk, model: str, name: str | None = None, file: str = "model.gguf") -> None:
    """A checkpoint of the dimensions of a published model."""
    write(desk.settings.models_dir / (name or model) / file, published()[model])


def plan(desk: Desk, model: str = QWEN, **asked: Any) -> PlanView:
    """Through JSON, as a client has it."""
    view = asyncio.run(Previews(desk.daemon).plan(PlanBody.model_validate({"model": model} | asked)))
    return PlanView.model_validate_json(view.model_dump_json())


def refusal(desk: Desk, model: str = QWEN, **asked: Any) -> LlmError:
    with pytest.raises(LlmError) as caught:
        plan(desk, model, **asked)
    json.dumps(caught.value.problem())  # a surface can say it
    return caught.value


def budget(view: PlanView) -> dict[str, int]:
    return {line.name: line.bytes // MIB for line in view.budget}


# --- now ---


def test_a_plan_says_what_it_gives(desk: Desk) -> None:
    put(desk, QWEN)
    view = plan(desk)
    assert view.fits
    assert (view.verdict, view.capped_by) == (Verdict.OK, CappedBy.MODEL)
    assert view.limit is not None
    assert view.limit.text.startswith("the model: it is trained for")
    assert view.evidence is Evidence.HEADER
    assert view.card is not None
    assert (view.card.id, view.card.present, view.card.empty) == ("rtx-3090", True, False)
    assert view.card.compute_capability == "8.6"
    assert view.agent is not None and view.agent.ready
    assert view.smallest_card is not None and view.smallest_card.window_tokens == 40_960
    assert view.placement is not None and view.placement.layers_on_card is None
    assert (view.draft, view.projector, view.rope, view.tier, view.download) == (None,) * 5
    assert view.argv[0].endswith("llama-server")


@pytest.mark.parametrize(
    ("model", "asked"), [("bge-large-en", {}), ("smollm2-135m", {"purpose": "embedding"})]
)
def test_nothing_is_said_of_agents_where_no_text_is_generated(
    desk: Desk, model: str, asked: dict[str, str]
) -> None:
    assert not isinstance(desk.lookup.next_engine, LlmError)
    build, engine = desk.lookup.next_engine
    desk.lookup.next_engine = build, replace(engine, flags=engine.flags | {"--embeddings", "--pooling"})
    put(desk, model)
    view = plan(desk, model, **asked)
    assert view.window_tokens < AGENT_PROMPT_FLOOR_TOKENS
    assert (view.verdict, view.agent, view.smallest_card) == (Verdict.OK, None, None)


def test_a_short_window_is_tight_and_no_card_helps(desk: Desk) -> None:
    put(desk, "smollm2-135m")
    view = plan(desk, "smollm2-135m")
    assert (view.verdict, view.smallest_card) == (Verdict.TIGHT, None)
    assert view.agent is not None and not view.agent.ready
    assert view.agent.remarks


def test_what_runs_counts_now_and_not_on_an_empty_card(desk: Desk) -> None:
    put(desk, "llama-3.1-8b")
    desk.foreign_bytes = 12 * GIB
    now = plan(desk, "llama-3.1-8b")
    assert now.limit is not None and now.limit.line is not None
    assert now.limit.line.name == "other processes"
    assert budget(now)["other processes"] == -12 * 1024
    empty = plan(desk, "llama-3.1-8b", desktop=False)
    assert empty.card is not None and empty.card.empty and empty.card.present
    assert budget(empty) == {"total": 24576, "driver": -451}
    assert empty.context_tokens > now.context_tokens
    assert empty.argv  # its engine is here
    assert empty.smallest_card is not None and empty.smallest_card.gib < 24


def test_alternatives_come_with_the_plan(desk: Desk) -> None:
    put(desk, "llama-3.1-8b")
    desk.foreign_bytes = 12 * GIB
    view = plan(desk, "llama-3.1-8b")
    asks = {other.ask: other for other in view.alternatives}
    assert asks["--cache-type q4_0"].window_tokens > view.window_tokens
    assert asks["--parallel 2"].parallel == 2


def test_a_plan_that_does_not_fit_is_an_error_with_ledger_and_verdict(desk: Desk) -> None:
    put(desk, "llama-3.1-8b")
    desk.foreign_bytes = 23 * GIB
    error = refusal(desk, "llama-3.1-8b")
    assert error.code is ErrorCode.INSUFFICIENT_VRAM
    assert error.details["verdict"] == "too-big"
    assert error.details["items"] and error.details["budget"]
    assert error.details["card"]["id"] == "rtx-3090"
    assert 0 < error.details["smallest_card_gib"] < 24
    assert error.details["cause"] == "strangers"
    assert "For an agent it needs a card" not in (error.hint or "")  # this one is large enough
    assert "nothing on it" not in error.message


def test_a_refusal_names_who_is_in_the_way(desk: Desk) -> None:
    """A plan for now has the facts of a load: programs, models, and commands that load."""
    put(desk, "llama-3.1-8b")
    desk.foreign_bytes = 3 * GIB
    desk.strangers = (Stranger(1234, "steam", "", 3 * GIB),)
    weights = LineItem("weights", Place.CARD, 15 * GIB, Evidence.HEADER, "")
    desk.scheduler.ledger.hold("run-1", "gemma", [Share(desk.card.uuid, (weights,))])
    desk.scheduler.ledger.confirm("run-1", {desk.card.uuid: 15 * GIB})
    error = refusal(desk, "llama-3.1-8b", context_tokens=32_768, parallel=1)
    assert (error.code, error.details["cause"]) == (ErrorCode.INSUFFICIENT_VRAM, "ours")
    assert [each["name"] for each in error.details["strangers"]] == ["steam"]
    assert [(each["name"], each["bytes"]) for each in error.details["ours"]] == [("gemma", 15 * GIB)]
    commands = [remedy["command"] for remedy in error.details["remedies"]]
    assert "lllm3090ctl unload gemma" in commands
    assert any(
        each.startswith("lllm3090ctl load llama-3.1-8b --context ") and "--parallel 1" in each
        for each in commands
    )


def load(desk: Desk, model: str = QWEN, run: str = "cafe0001", **asked: Any) -> None:
    """It is admitted, and is on its way up."""
    found, engine = desk.lookup.model(model), desk.lookup.next_engine
    assert isinstance(found, FoundModel) and not isinstance(engine, LlmError)
    event = LoadRequested("t", run, found.checkpoint, found.facts, PlanRequest(**asked), *engine)
    desk.scheduler.handle(event, desk.observe())
    assert desk.scheduler.instance(found.checkpoint.name) is not None


def test_a_model_that_is_loaded_gives_its_memory_back_first(desk: Desk) -> None:
    """Its plan is what it would get if it were loaded anew, and says so; what else runs counts as ever."""
    put(desk, "llama-3.1-8b")
    put(desk, QWEN)
    load(desk, QWEN, "cafe0002", context_tokens=16_384, parallel=1)
    before = plan(desk, "llama-3.1-8b")
    assert before.given_back_bytes is None
    load(desk, "llama-3.1-8b")
    (share,) = (each for each in desk.scheduler.ledger.of("cafe0001") if each.where == desk.card.uuid)
    after = plan(desk, "llama-3.1-8b")
    assert after.given_back_bytes == share.charged_bytes > 0
    assert [note for note in after.notes if "count as given back" in note and "loaded anew" in note]
    same = ("context_tokens", "parallel", "available_bytes", "budget", "items", "argv", "limit")
    assert [getattr(after, name) for name in same] == [getattr(before, name) for name in same]
    other = plan(desk, "llama-3.1-8b", desktop=False)
    assert other.given_back_bytes is None and not any("given back" in note for note in other.notes)


def test_the_refusal_of_a_model_that_is_loaded_counts_it_as_gone(desk: Desk) -> None:
    put(desk, "llama-3.1-8b")
    desk.foreign_bytes = 6 * GIB
    load(desk, "llama-3.1-8b", context_tokens=16_384, parallel=1)
    error = refusal(desk, "llama-3.1-8b", context_tokens=1 << 17, parallel=4, cache_type="f16")
    assert error.details["cause"] == "strangers" and error.details["ours"] == []
    assert error.details["given_back_bytes"] == sum(
        each.charged_bytes for each in desk.scheduler.ledger.of("cafe0001") if each.where == desk.card.uuid
    )
    assert "counted as given back" in error.message
    commands = [each["command"] for each in error.details["remedies"] if " load " in each["command"]]
    assert commands
    for each in commands:  # a load of what runs already would be answered by that
        assert each.startswith("lllm3090ctl unload llama-3.1-8b && lllm3090ctl load llama-3.1-8b ")
    assert all(each["options"] is None for each in error.details["remedies"])


def test_a_plan_for_another_card_is_asked_again_as_a_plan(desk: Desk) -> None:
    put(desk, "llama-3.1-8b")
    error = refusal(desk, "llama-3.1-8b", vram="8GiB", desktop=False, context_tokens=65_536)
    commands = [remedy["command"] for remedy in error.details["remedies"] if remedy["command"]]
    assert commands
    for each in commands:
        assert each.startswith("lllm3090ctl plan llama-3.1-8b --vram 8GiB --headless --context ")


def test_without_an_engine_there_is_no_plan_for_now(desk: Desk) -> None:
    put(desk, QWEN)
    desk.lookup.next_engine = NO_ENGINE
    assert refusal(desk) is NO_ENGINE


def test_options_reach_the_planner(desk: Desk) -> None:
    put(desk, "llama-3.1-8b")
    view = plan(
        desk,
        "llama-3.1-8b",
        context_tokens=262_144,
        parallel=1,
        rope_scaling=RopeScaling.YARN,
        cache_type="q4_0",
        batch_tokens=4096,
        micro_batch_tokens=256,
    )
    assert view.rope is not None
    assert (view.rope.scaling, view.rope.factor) == (RopeScaling.YARN, 2.0)
    assert (view.batch_tokens, view.micro_batch_tokens) == (4096, 256)
    assert (view.capped_by, view.window_tokens) == (CappedBy.REQUEST, 262_144)
    assert "--yarn-orig-ctx" in view.argv


def test_layers_and_experts_are_placed_as_asked(desk: Desk) -> None:
    put(desk, "qwen3-30b-a3b")
    view = plan(desk, "qwen3-30b-a3b", cpu_experts=12)
    assert view.placement is not None
    assert view.placement.expert_layers_on_host == 12
    assert view.host_bytes > 4 * GIB
    layers = plan(desk, "qwen3-30b-a3b", gpu_layers=20)
    assert layers.placement is not None and layers.placement.layers_on_card == 20


def test_a_projector_is_where_it_is_said(desk: Desk) -> None:
    folder = desk.settings.models_dir / "gemma"
    write_gemma3(folder / "gemma.gguf")
    write_projector(folder / "mmproj-gemma.gguf")
    assert plan(desk, "gemma").projector is ProjectorPlace.CARD
    assert plan(desk, "gemma", projector="host").projector is ProjectorPlace.HOST
    assert plan(desk, "gemma", projector="off").projector is ProjectorPlace.OFF


def test_a_draft_is_told(desk: Desk) -> None:
    put(desk, "qwen3.5-27b-mtp")
    drafted = plan(desk, "qwen3.5-27b-mtp", drafting="on", draft_tokens=5)
    assert drafted.draft is not None and drafted.draft.tokens == 5
    assert plan(desk, "qwen3.5-27b-mtp", drafting="off").draft is None


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        ({"cpu_experts": 4}, ErrorCode.UNSUPPORTED_COMBINATION),  # a dense model
        ({"cpu_experts": 4, "gpu_layers": 4}, ErrorCode.UNSUPPORTED_COMBINATION),
        ({"drafting": "on"}, ErrorCode.UNSUPPORTED_COMBINATION),
        ({"projector": "card"}, ErrorCode.UNSUPPORTED_COMBINATION),
        ({"rope_scaling": "linear", "context_tokens": 1 << 20}, ErrorCode.UNSUPPORTED_COMBINATION),
        ({"tiered": True}, ErrorCode.UNSUPPORTED_COMBINATION),
        ({"context_tokens": 1 << 20}, ErrorCode.UNSUPPORTED_COMBINATION),
        ({"card": "rtx-9999"}, ErrorCode.INVALID_REQUEST),
        ({"vram": "12GB"}, ErrorCode.INVALID_REQUEST),
        ({"vram": "0GiB"}, ErrorCode.INVALID_REQUEST),
        ({"card": "rtx-4090", "vram": "24GiB"}, ErrorCode.INVALID_REQUEST),
    ],
)
def test_what_cannot_be_is_refused(desk: Desk, asked: dict[str, Any], code: ErrorCode) -> None:
    put(desk, QWEN)
    error = refusal(desk, **asked)
    assert error.code is code
    assert error.hint


# --- another card ---


def test_a_card_that_is_not_there(desk: Desk) -> None:
    put(desk, "llama-3.1-8b")
    desk.foreign_bytes = 23 * GIB
    view = plan(desk, "llama-3.1-8b", card="rtx-5080", desktop=True)
    assert view.card is not None
    assert (view.card.id, view.card.present, view.card.empty) == ("rtx-5080", False, True)
    assert (view.card.desktop, view.card.backend) == (True, Backend.VULKAN)
    assert budget(view) == {"total": 16384, "driver": -512, "desktop reserve": -2400}
    assert view.argv
    assert view.available_bytes == (16384 - 512 - 2400) * MIB


def test_more_memory_never_gives_less(desk: Desk) -> None:
    put(desk, "llama-3.1-8b")
    contexts = [
        plan(desk, "llama-3.1-8b", vram=f"{gib}GiB", desktop=False).context_tokens
        for gib in (8, 10, 12, 16, 24, 48)
    ]
    assert contexts == sorted(contexts)
    assert contexts[0] < contexts[-1]


def test_another_backend_is_priced_and_has_no_command_line_here(desk: Desk) -> None:
    put(desk, QWEN)
    view = plan(desk, backend="cuda")
    assert view.card is not None and view.card.backend is Backend.CUDA
    assert view.argv == ()
    assert any("computes on vulkan" in note for note in view.notes)
    own = plan(desk, backend="vulkan")
    assert own.argv
    runtime = {line.name: line.bytes for line in view.items}["runtime"]
    assert runtime > {line.name: line.bytes for line in own.items}["runtime"]


def test_host_memory_in_place_of_a_card(desk: Desk) -> None:
    put(desk, "smollm2-135m")
    view = plan(desk, "smollm2-135m", backend="cpu")
    assert view.card_kind is CardKind.CPU
    assert "own reserve" in budget(view)
    assert view.host_bytes == 0
    assert view.smallest_card is None


def test_another_card_needs_no_engine(desk: Desk) -> None:
    put(desk, QWEN)
    desk.lookup.next_engine = NO_ENGINE
    view = plan(desk, card="rtx-4090")
    assert view.fits and view.argv == ()
    assert any("no engine can be asked" in note for note in view.notes)


def test_a_machine_without_a_card_borrows_one(desk: Desk) -> None:
    put(desk, QWEN)
    desk.card, desk.total_bytes, desk.reserved_bytes = HOST, 64 * GIB, 0
    desk.lookup.computes_on(Backend.CPU)
    assert plan(desk).card_kind is CardKind.CPU
    view = plan(desk, desktop=False)
    assert view.card_kind is CardKind.NVIDIA
    assert budget(view) == {"total": 24576, "driver": -512}
    assert view.argv == ()
    assumed = "this machine has no card: NVIDIA GeForce RTX 3090 is assumed"
    assert assumed in view.notes
    assert assumed in plan(desk, "qwen3.8-27b", backend="cuda").notes
    named = plan(desk, card="rtx-4090")
    assert not any("no card" in note for note in named.notes)
    assert any(
        "a build for vulkan is assumed" in note for note in plan(desk, "qwen3.8-27b", card="rtx-4090").notes
    )


def test_a_refusal_for_another_card_says_so(desk: Desk) -> None:
    put(desk, "gemma-3-27b")
    error = refusal(desk, "gemma-3-27b", vram="8GiB")
    assert " a card with 8 GiB can give " in error.message
    assert error.details["verdict"] == "too-big"
    assert error.details["ours"] == []
    assert error.details["card"]["present"] is False


def test_a_desktop_that_is_in_the_way_is_named(desk: Desk) -> None:
    put(desk, "llama-3.1-8b")
    error = refusal(desk, "llama-3.1-8b", vram="7.5GiB", desktop=True)
    assert error.details["fits_headless"] is True
    assert " a card with 7.5 GiB and a desktop can give " in error.message
    assert (error.hint or "").startswith("Without a desktop (--headless) it would fit as asked. ")
    assert plan(desk, "llama-3.1-8b", vram="7.5GiB", desktop=False).fits
    assert "fits_headless" not in refusal(desk, "llama-3.1-8b", vram="2GiB", desktop=True).details


def test_a_card_without_room_for_its_reserves_refuses(desk: Desk) -> None:
    put(desk, QWEN)
    error = refusal(desk, vram="1MiB", desktop=True)
    assert error.code is ErrorCode.INSUFFICIENT_VRAM
    assert error.details["grantable_bytes"] == 0


# --- the catalogue ---


def own_entry(desk: Desk, **changes: Any) -> None:
    """A person's own catalogue with one model."""
    entry = {
        "id": "tiny",
        "name": "Tiny-1B",
        "repository": "somebody/Tiny-1B-GGUF",
        "file": "tiny-Q8_0.gguf",
        "quantisation": "Q8_0",
        "file_bytes": 1 << 30,
        "kind": "dense",
        "total_parameters_b": 1,
        "active_parameters_b": 1,
        "trained_context_tokens": 131_072,
        "block_count": 16,
        "full_attention": {"layers": 16, "kv_heads": 8, "head_length": 64},
        "speeds": [{"tokens_per_s": 210, "card": "rtx-3090", "backend": "vulkan", "speculation": "none"}],
    } | changes
    desk.settings.catalogue_file.write_text(json.dumps({"schema": 1, "models": [entry]}))


@pytest.mark.parametrize("name", ["qwen3.8-27b", "QWEN-27b", "Qwen3.8-27B"])
def test_a_model_of_the_catalogue_gets_a_preview(desk: Desk, name: str) -> None:
    put(desk, "llama-3.1-8b")
    view = plan(desk, name)
    assert (view.model, view.path, view.architecture) == ("Qwen3.8-27B", None, None)
    assert view.evidence is Evidence.CATALOGUE
    assert {item.evidence for item in view.items} == {Evidence.CATALOGUE}
    assert view.download is not None
    assert view.download.file == "Qwen3.8-27B-UD-Q4_K_S.gguf"
    assert view.card is not None and view.card.empty
    assert any("not on disk" in note for note in view.notes)
    assert view.speed is not None
    assert (view.speed.tokens_per_s, view.speed.qualifier) == (54.8, "measured")
    assert view.fits and view.card_bytes <= view.available_bytes
    assert view.smallest_card is not None and view.smallest_card.evidence is Evidence.CATALOGUE
    assert view.argv == ()


def test_published_advice_on_the_smallest_card(desk: Desk) -> None:
    """As in the reference: 20,131 MiB with a desktop, 17,731 without, with the driver's usual 512 MiB."""
    for desktop, mib in ((True, 20_131), (False, 17_731)):
        view = plan(desk, "qwen3.8-27b", card="rtx-4090", desktop=desktop)
        assert view.smallest_card is not None
        assert view.smallest_card.total_bytes == mib * MIB
        assert view.smallest_card.gib == -(-mib // 1024)


def test_a_speed_is_never_scaled(desk: Desk) -> None:
    assert (there := plan(desk, "gpt-oss-20b", card="rtx-5090").speed) is not None
    assert (here := plan(desk, "gpt-oss-20b").speed) is not None
    assert there.tokens_per_s == here.tokens_per_s
    assert (there.qualifier, here.qualifier) == ("other card", "measured")


def test_a_preview_is_for_the_size_that_was_asked_for(desk: Desk) -> None:
    view = plan(desk, "qwen3.8-27b", context_tokens=65_536, parallel=2)
    assert (view.context_tokens, view.parallel, view.window_tokens) == (65_536, 2, 32_768)
    assert view.capped_by is CappedBy.REQUEST


def test_what_is_on_disk_is_no_preview(desk: Desk) -> None:
    put(desk, QWEN, "Qwen3-8B", "Qwen3-8B-Q4_K_M.gguf")
    view = plan(desk, "qwen3-8b")
    assert view.evidence is Evidence.HEADER
    assert view.download is None
    assert view.speed is not None  # of this very file
    put(desk, QWEN, "Qwen3.8-27B", "another.gguf")
    assert plan(desk, "qwen3.8-27b").speed is None


@pytest.mark.parametrize(
    "asked",
    [
        {"cpu_experts": 2}, {"cache_type": "f16"}, {"tiered": True}, {"drafting": "on"}, {"rope_scaling": "yarn"},
        {"batch_tokens": 64}, {"unified": True}, {"gpu_layers": 0},
    ],
)  # fmt: skip
def test_a_preview_ignores_nothing_that_was_asked_for(desk: Desk, asked: dict[str, Any]) -> None:
    error = refusal(desk, "qwen3.8-27b", **asked)
    assert error.code is ErrorCode.UNSUPPORTED_COMBINATION
    assert error.details["fields"] == list(asked)
    assert all(option_of(field) in error.message for field in asked)
    assert "Qwen3.8-27B-UD-Q4_K_S.gguf" in (error.hint or "")


def test_a_preview_that_does_not_fit_has_ledger_verdict_and_download(desk: Desk) -> None:
    error = refusal(desk, "qwen3.8-27b", vram="8GiB")
    assert error.code is ErrorCode.INSUFFICIENT_VRAM
    assert error.details["verdict"] == "too-big"
    assert error.details["download"]["file"] == "Qwen3.8-27B-UD-Q4_K_S.gguf"
    assert error.details["items"] and error.details["budget"]
    # The desktop is assumed as on this machine: none; so 17,731 MiB, as in the reference.
    assert "18 GiB" in (error.hint or "")
    large = refusal(desk, "qwen3.8-27b", context_tokens=262_144, parallel=1, vram="20GiB")
    assert (large.code, large.details["verdict"]) == (ErrorCode.INSUFFICIENT_VRAM, "too-big")
    assert sum(item["bytes"] for item in large.details["items"]) == pytest.approx(
        large.details["needed_bytes"], abs=16
    )
    assert large.hint is not None
    fitting = re.search(r"--context (\d+) --parallel 1", large.hint)
    assert fitting is not None
    assert plan(desk, "qwen3.8-27b", context_tokens=int(fitting[1]), parallel=1, vram="20GiB").fits


def test_a_card_that_cannot_compute_a_model_is_told_first(desk: Desk) -> None:
    own_entry(desk, least_compute_capability="9.0")
    assert plan(desk, "tiny", card="rtx-4090").verdict is Verdict.CAPABILITY
    assert plan(desk, "tiny", card="rtx-5090").verdict is Verdict.OK
    assert plan(desk, "tiny", vram="24GiB").verdict is Verdict.OK  # nobody knows
    assert refusal(desk, "tiny", card="rtx-4090", context_tokens=131_072 * 64, parallel=64).details[
        "verdict"
    ] == ("capability")
    put(desk, "llama-3.1-8b", "Tiny-1B", "tiny-Q8_0.gguf")
    assert plan(desk, "tiny-1b").verdict is Verdict.CAPABILITY
    assert plan(desk, "tiny-1b", card="rtx-5090").verdict is Verdict.OK


def test_only_a_plan_is_made_of_a_model_that_is_not_on_disk(desk: Desk) -> None:
    for there in (False, True):
        if there:
            put(desk, QWEN)
        with pytest.raises(LlmError) as caught:
            desk.lookup.model("qwen3.8-27b")
        error = caught.value
        assert error.code is ErrorCode.UNKNOWN_MODEL
        assert error.message == "Qwen3.8-27B is not on disk; it is to be had from unsloth/Qwen3.8-27B-GGUF."
        assert "Qwen3.8-27B-UD-Q4_K_S.gguf" in (error.hint or "")
        assert str(desk.settings.models_dir / "Qwen3.8-27B") in (error.hint or "")


def test_a_refusal_names_the_model_as_the_library_does(desk: Desk) -> None:
    put(desk, QWEN, "My-Model")
    error = refusal(desk, "my-model", vram="2GiB")
    assert (
        error.message.startswith("My-Model is too big for the card ") and " My-Model with " in error.message
    )


def test_a_model_nobody_knows_is_unknown(desk: Desk) -> None:
    assert refusal(desk, "llama-9000").code is ErrorCode.NO_MODELS
    put(desk, QWEN)
    assert refusal(desk, "llama-9000").code is ErrorCode.UNKNOWN_MODEL
    assert refusal(desk, "qwen3.6-35b").code is ErrorCode.AMBIGUOUS_MODEL


def test_a_catalogue_that_cannot_be_read_stops_no_plan(desk: Desk) -> None:
    put(desk, QWEN)
    desk.settings.catalogue_file.write_text("{")
    view = plan(desk)
    assert any("catalogue" in note for note in view.notes)
    assert plan(desk, "gpt-oss-20b").evidence is Evidence.CATALOGUE  # the packaged one


def test_host_memory_can_be_asked_for_a_model_that_is_not_on_disk(desk: Desk) -> None:
    desk.card, desk.total_bytes, desk.reserved_bytes = HOST, 64 * GIB, 0
    desk.lookup.computes_on(Backend.CPU)
    view = plan(desk, "gpt-oss-20b")
    assert view.card_kind is CardKind.CPU
    assert budget(view) == {"total": 65_536, "own reserve": -6554}
    assert view.smallest_card is None
    assert view.speed is not None and view.speed.qualifier == "other card, measured on vulkan"


# --- the engine's own word ---


def test_an_engine_without_a_dry_run_says_why(desk: Desk) -> None:
    put(desk, QWEN)
    found = plan(desk, check=True).engine_check
    assert found is not None
    assert found.agrees is None and not found.engine
    assert found.text.startswith("not known: ") and "llama-fit-params" in found.text


def test_without_an_engine_nothing_can_be_compared(desk: Desk) -> None:
    put(desk, QWEN)
    desk.lookup.next_engine = NO_ENGINE
    assert refusal(desk, check=True, card="rtx-4090").code is ErrorCode.ENGINE_NOT_FOUND


def test_a_dry_run_that_hangs_keeps_nobody_from_planning(desk: Desk) -> None:
    """Of many that ask for one some wait, the rest is told so at once; who leaves makes room."""
    put(desk, QWEN)
    assert not isinstance(desk.lookup.next_engine, LlmError)
    build, capabilities = desk.lookup.next_engine
    gate = Gate(build.server.parent / "llama-fit-params", "echo Host 1 2 3")
    flags = parse_help(answers("b11434")["fit-help"].stdout)[0]
    ability = DryRunAbility(gate.program, flags)
    desk.lookup.next_engine = build, replace(capabilities, dry_run=ability)
    previews = Previews(desk.daemon)

    async def ask(number: int, *, check: bool = True) -> PlanView:
        body = {"model": QWEN, "context_tokens": 4096 + 256 * number, "parallel": 1, "check": check}
        return await previews.plan(PlanBody.model_validate(body))

    async def main() -> None:
        asked = {asyncio.create_task(ask(number)) for number in range(40)}
        turned_away = 40 - MOST_WAITING - 1
        for answer in islice(asyncio.as_completed(asked), turned_away):
            check = (await answer).engine_check
            assert check is not None and check.agrees is None
            assert check.text == "not asked: other dry runs are waiting"
        await asyncio.to_thread(gate.wait_for_one)
        assert (await ask(0, check=False)).engine_check is None

        waiting = [each for each in asked if not each.done()]
        assert len(waiting) == MOST_WAITING + 1
        for each in waiting:
            each.cancel()
        assert len(await asyncio.gather(*waiting, return_exceptions=True)) == len(waiting)
        late = asyncio.create_task(ask(99))
        await asyncio.to_thread(gate.let_go)  # the one that was made, for nobody now
        await asyncio.to_thread(gate.wait_for_one)
        await asyncio.to_thread(gate.let_go)
        check = (await late).engine_check
        assert check is not None and check.engine
        assert gate.passed() == 2

    async def in_time() -> None:
        async with asyncio.timeout(100):
            await main()

    asyncio.run(in_time())
