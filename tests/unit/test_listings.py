"""The list of models: what each would get on an empty card, remembered while nothing changes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from lllm3090d.engines.capabilities import Backend
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.planning.planner import Planner
from lllm3090d.planning.quote import Evidence
from lllm3090d.planning.verdict import Verdict
from lllm3090d.serving.listings import Listings
from lllm3090d.serving.previews import Previews
from lllm3090d.wire import Models, ModelView, PlanBody
from tests.fakes.gguf_files import write_gemma3, write_projector
from tests.fakes.model_files import published, write
from tests.fakes.plan_desk import HOST, Desk

pytestmark = pytest.mark.unit

GIB = 1 << 30


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path, catalogue_file=tmp_path / "catalogue.json")
    (tmp_path / "catalogue.json").write_text('{"schema": 1, "models": []}')
    yield made
    asyncio.run(made.lookup.close())


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The architectures of all plans that are made, in order."""
    made: list[str] = []
    original = Planner.plan

    def counted(self: Planner) -> object:
        made.append(self.facts.architecture)
        return original(self)

    monkeypatch.setattr(Planner, "plan", counted)
    return made


def put(desk: Desk, model: str, name: str | None = None, file: str = "model.gguf") -> Path:
    return write(desk.settings.models_dir / (name or model) / file, published()[model])


def models(desk: Desk, listings: Listings | None = None, *, with_catalogue: bool = False) -> Models:
    answer = asyncio.run((listings or Listings(desk.daemon)).models(with_catalogue=with_catalogue))
    return Models.model_validate_json(answer.model_dump_json())


def rows(answer: Models) -> dict[str, ModelView]:
    return {view.name: view for view in answer.models}


def test_each_model_has_the_plan_of_an_empty_card(desk: Desk) -> None:
    """The same as ``plan`` gives for it, whatever others hold."""
    for model in ("llama-3.1-8b", "smollm2-135m", "glm-4.5-air", "bge-large-en"):
        put(desk, model)
    desk.foreign_bytes = 20 * GIB
    answer = models(desk)
    found = rows(answer)
    assert found["llama-3.1-8b"].verdict is Verdict.OK
    assert found["smollm2-135m"].verdict is Verdict.TIGHT
    assert found["glm-4.5-air"].verdict is Verdict.TOO_BIG
    assert (found["glm-4.5-air"].parallel, found["glm-4.5-air"].window_tokens) == (None, None)
    assert found["bge-large-en"].verdict is None  # its problem says why
    view = asyncio.run(
        Previews(desk.daemon).plan(PlanBody(model="llama-3.1-8b", desktop=desk.desktop_active))
    )
    row = found["llama-3.1-8b"]
    assert (row.parallel, row.window_tokens, row.evidence) == (
        view.parallel,
        view.window_tokens,
        Evidence.HEADER,
    )
    assert answer.planned_for is not None
    assert (answer.planned_for.id, answer.planned_for.empty) == ("rtx-3090", True)
    assert answer.plan_problem is None and answer.catalogue_problem is None


def test_plans_are_made_once_while_nothing_changes(desk: Desk, planned: list[str]) -> None:
    """They are made anew for another file, card, engine or setting, and only then."""
    for model in ("llama-3.1-8b", "gemma-3-270m"):
        put(desk, model)
    listings = Listings(desk.daemon)
    first = models(desk, listings)
    assert sorted(planned) == ["gemma3", "llama"]
    desk.foreign_bytes = 4 * GIB  # what runs is not counted
    assert models(desk, listings) == first
    assert len(planned) == 2
    path = put(desk, "qwen3-8b", "llama-3.1-8b")
    os.utime(path, ns=(1, 1))
    models(desk, listings)
    assert planned[2:] == ["qwen3"]
    desk.desktop_active = True
    models(desk, listings)
    assert sorted(planned[3:]) == ["gemma3", "qwen3"]
    desk.lookup.computes_on(Backend.CUDA)
    models(desk, listings)
    assert len(planned) == 7


def test_further_arguments_of_the_settings_change_the_plan(tmp_path: Path) -> None:
    """As they change what a load gets; wrong ones are said of the model that has them."""
    desk = Desk(
        tmp_path, extra_arguments={"qwen3-8b": ("-c", "8192", "--parallel", "1"), "bad": ("-c", "x")}
    )
    put(desk, "qwen3-8b")
    put(desk, "qwen3-8b", "bad")
    put(desk, "qwen3-8b", "plain")
    found = rows(models(desk))
    asyncio.run(desk.lookup.close())
    assert (found["qwen3-8b"].parallel, found["qwen3-8b"].window_tokens) == (1, 8192)
    assert found["plain"].window_tokens == 40_960
    problem = found["bad"].plan_problem
    assert problem is not None and problem["code"] == "invalid_request"


def test_what_else_is_wrong_is_said_of_the_model(desk: Desk) -> None:
    """A damaged projector, and an engine that cannot use the card, are no lack of memory."""
    folder = desk.settings.models_dir / "gemma"
    write_gemma3(folder / "gemma.gguf")
    write_projector(folder / "mmproj-gemma.gguf")
    assert rows(models(desk))["gemma"].verdict is not None
    desk.lookup.computes_on(Backend.CPU)
    (row,) = models(desk).models
    assert row.verdict is None
    assert row.plan_problem is not None and row.plan_problem["code"] == "engine_unusable"


@pytest.mark.parametrize(
    "problem",
    [
        LlmError(ErrorCode.ENGINE_NOT_FOUND, "There is none.", hint="Build one."),
        LlmError(ErrorCode.CARD_UNREADABLE, "NVML says no.", hint="Reboot."),
    ],
)
def test_without_engine_or_card_the_list_is_there_without_plans(desk: Desk, problem: LlmError) -> None:
    put(desk, "qwen3-8b")
    if problem.code is ErrorCode.CARD_UNREADABLE:
        desk.card_problem = problem
    else:
        desk.lookup.next_engine = problem
    answer = models(desk)
    (row,) = answer.models
    assert (row.verdict, row.plan_problem, row.architecture) == (None, None, "qwen3")
    assert answer.plan_problem == problem.problem()


def test_the_catalogue_is_added_on_request(desk: Desk) -> None:
    put(desk, "qwen3-8b", "Qwen3-8B")
    assert [view.name for view in models(desk).models] == ["Qwen3-8B"]
    found = rows(models(desk, with_catalogue=True))
    assert found["Qwen3-8B"].on_disk
    row = found["Qwen3.8-27B"]
    assert (row.on_disk, row.path, row.aliases) == (False, None, ("qwen3.8-27b",))
    assert (row.verdict, row.evidence) == (Verdict.OK, Evidence.CATALOGUE)
    assert row.download is not None and row.download.file == "Qwen3.8-27B-UD-Q4_K_S.gguf"
    assert row.speed is not None and row.speed.qualifier == "measured"
    assert next(iter(found)) == "Qwen3-8B"  # what is on disk stands first
    desk.total_bytes = 8 * GIB
    assert rows(models(desk, with_catalogue=True))["Qwen3.8-27B"].verdict is Verdict.TOO_BIG


def test_a_speed_is_for_the_very_file(desk: Desk) -> None:
    """Directory and file have the entry's names; another quantisation has no measured speed."""
    put(desk, "qwen3-8b", "Qwen3-8B", "Qwen3-8B-Q4_K_M.gguf")
    put(desk, "gpt-oss-20b", "gpt-oss-20b", "gpt-oss-20b-Q8_0.gguf")
    found = rows(models(desk))
    assert found["Qwen3-8B"].speed is not None
    assert found["gpt-oss-20b"].speed is None
    desk.lookup.computes_on(Backend.CUDA)
    speed = rows(models(desk))["Qwen3-8B"].speed
    assert speed is not None and speed.qualifier == "measured on vulkan"


def test_a_catalogue_that_cannot_be_used_is_said(desk: Desk) -> None:
    desk.settings.catalogue_file.unlink()
    answer = models(desk, with_catalogue=True)
    assert answer.catalogue_problem is not None
    assert answer.catalogue_problem["code"] == "settings_invalid"
    assert len(answer.models) > 5  # the packaged ones are there


def test_latent_attention_has_no_price_before_it_is_on_disk(desk: Desk) -> None:
    desk.settings.catalogue_file.write_text(
        '{"schema": 1, "models": [{"id": "mla", "name": "MLA", "repository": "a/b", "file": "m.gguf",'
        '"quantisation": "Q4", "file_bytes": 1000, "kind": "dense", "total_parameters_b": 1, "latent": true,'
        '"active_parameters_b": 1, "trained_context_tokens": 4096, "block_count": 1}]}'
    )
    row = rows(models(desk, with_catalogue=True))["MLA"]
    assert row.plan_problem is not None
    assert row.plan_problem["code"] == "unsupported_architecture"
    assert row.verdict is None


def test_host_memory_stands_in_for_a_card(desk: Desk) -> None:
    put(desk, "smollm2-135m")
    desk.card, desk.total_bytes, desk.reserved_bytes = HOST, 64 * GIB, 0
    desk.lookup.computes_on(Backend.CPU)
    answer = models(desk, with_catalogue=True)
    found = rows(answer)
    assert found["smollm2-135m"].verdict is Verdict.TIGHT
    assert found["gpt-oss-20b"].verdict is Verdict.OK
    assert answer.planned_for is not None
    assert answer.planned_for.backend is Backend.CPU
    speed = found["gpt-oss-20b"].speed
    assert speed is not None and speed.qualifier == "other card, measured on vulkan"
