"""Sections of models in the settings: what they may say, what they change, and that they demand nothing."""

from __future__ import annotations

import asyncio
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from lllm3090d.engines.capabilities import Backend
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.model_settings import ModelSettings, is_pinned
from lllm3090d.planning.cache import CacheType
from lllm3090d.planning.planner import PlanPolicy, PlanRequest
from lllm3090d.planning.request import Offload
from lllm3090d.serving.events import Admitted, Failed, Joined
from lllm3090d.serving.extras import running_notes, with_section
from lllm3090d.serving.listings import Listings
from lllm3090d.serving.previews import Previews
from lllm3090d.serving.scheduler import Scheduler
from lllm3090d.setting_table import NEEDS_RESTART, TAKES_EFFECT, TakesEffect, shape
from lllm3090d.settings import SETTING_KEYS, load_settings
from lllm3090d.wire import PlanBody
from tests.fakes.plan_desk import Desk
from tests.fakes.scheduler_world import World
from tests.unit.test_command_line import build_named
from tests.unit.test_previews import NO_ENGINE, put

pytestmark = pytest.mark.unit

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "settings.md").read_text()
SECTION = """
[models."Q-3.8"]
aliases = ["q", "big"]
context_tokens = 8192
parallel = 2
cache_type = "f16"
pin = true
idle_ttl_s = 60
autoload = true
chat_template_file = "/t.jinja"
extra_arguments = ["--threads", "8"]
"""


def load(tmp_path: Path, text: str) -> Any:
    file = tmp_path / "config.toml"
    file.write_text(text)
    return load_settings(file, {})


def refusal(tmp_path: Path, text: str) -> str:
    with pytest.raises(LlmError) as caught:
        load(tmp_path, text)
    assert caught.value.code is ErrorCode.SETTINGS_INVALID
    return caught.value.message


# --- what they may say ---------------------------------------------------------------------------------------


def test_a_section_is_in_the_tables_of_all_models(tmp_path: Path) -> None:
    before = 'autoload = "other"\naliases = {o = "other"}\nidle_ttl_of = {other = 5}\n'
    settings = load(tmp_path, before + SECTION)
    assert settings.aliases == {"o": "other", "q": "Q-3.8", "big": "Q-3.8"}
    assert settings.idle_ttl_of == {"other": 5.0, "Q-3.8": 60.0}
    assert settings.autoload_names == ("other", "Q-3.8")
    assert settings.extra_arguments == {
        "Q-3.8": ("--chat-template-file", "/t.jinja", "--threads", "8"),
    }
    assert is_pinned(settings.models, "Q-3.8") and not is_pinned(settings.models, "other")
    assert load(tmp_path, 'autoload = "Q-3.8, other"\n' + SECTION).autoload_names == ("Q-3.8", "other")


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("context = 1", "models.m.context is not a setting; did you mean context_tokens?"),
        ("zzz = 1", "models.m.zzz is not a setting; known are aliases, context_tokens, parallel, "),
        ("context_tokens = 0", "models.m.context_tokens = 0 is not valid"),
        ("context_tokens = true", "context_tokens = true is not valid: true and false are for flags only"),
        ("parallel = 257", "less than or equal to 256"),
        ('cache_type = "q9"', "'q8_0'"),
        ('pin = "perhaps"', "valid boolean"),
        ("idle_ttl_s = -1", "greater than or equal to 0"),
        ('chat_template_file = "t.jinja"', "absolute path"),
        ('chat_template_file = "~nosuchuser-xyz/t"', "no home directory"),
        ('extra_arguments = "--threads 8"', "valid tuple"),
        ('aliases = [""]', "at least 1 character"),
        ('aliases = ["a"]', "models is not valid: m: the alias a belongs to other"),
        ('aliases = ["b"]', "the alias b belongs to"),
        ('extra_arguments = ["-v"]', "stand in extra_arguments too"),
        ('chat_template_file = "/t"', "stand in extra_arguments too"),
        ("idle_ttl_s = 1", "stands in idle_ttl_of too"),
    ],
)
def test_bad_sections_are_named(tmp_path: Path, lines: str, said: str) -> None:
    others = 'aliases = {a = "other"}\nidle_ttl_of = {m = 5}\nextra_arguments = {m = ["-s", "1"]}\n'
    text = f'{others}[models.n]\naliases = ["b"]\n[models.m]\n{lines}\n'
    assert said in refusal(tmp_path, text)


# --- what they change ----------------------------------------------------------------------------------------


def world_with(tmp_path: Path, **section: Any) -> World:
    server = tmp_path / "llama-server"
    server.write_text("#!/bin/sh\n")
    server.chmod(0o755)
    world = World()
    world.server = server
    models = {"m": ModelSettings(**section), "other": ModelSettings(parallel=7)}
    world.scheduler = Scheduler(replace(world.scheduler.policy, models=models))
    return world


def ask(world: World, line: str = "", token: str = "t1", **request: Any) -> list[Any]:
    event = world.request("m", token, request=PlanRequest(**request))
    capabilities = replace(build_named("b11434", Backend.VULKAN), devices=("Vulkan0",))
    return list(world.do(replace(event, capabilities=capabilities, arguments=tuple(line.split()))))


def test_a_section_fills_what_is_open(tmp_path: Path) -> None:
    world = world_with(tmp_path, context_tokens=8192, parallel=2, cache_type="f16")
    effects = ask(world)
    plan = world.get("m").plan
    assert (plan.context_tokens, plan.parallel) == (8192, 2)
    (line,) = [effect.argv for effect in effects if isinstance(effect, Admitted)]
    assert line[line.index("-ctk") + 1] == "f16"


def test_what_is_asked_for_and_arguments_outrank_it(tmp_path: Path) -> None:
    world = world_with(tmp_path, context_tokens=8192, parallel=2)
    ask(world, "-np 4", context_tokens=4096)
    plan = world.get("m").plan
    assert (plan.context_tokens, plan.parallel) == (4096, 4)


def test_a_section_demands_nothing_of_what_runs(tmp_path: Path) -> None:
    """A model that runs otherwise is what an open load gets; one that asks for more by itself is refused."""
    world = world_with(tmp_path, context_tokens=8192, parallel=1)
    ask(world, context_tokens=4096)
    assert any(isinstance(each, Joined) for each in ask(world, token="t2"))
    (failed,) = [each for each in ask(world, token="t3", context_tokens=8192) if isinstance(each, Failed)]
    assert failed.error.code is ErrorCode.LOADED_DIFFERENTLY


def test_of_a_model_that_runs_it_is_told_what_it_has_and_what_is_to_come(tmp_path: Path) -> None:
    section = ModelSettings(context_tokens=8000, parallel=1, cache_type=CacheType.F16)
    world = world_with(tmp_path, context_tokens=8000, parallel=2, cache_type="f16")
    ask(world)
    record, plan = world.get("m").record, world.get("m").plan
    assert running_notes("m", plan, record.asked, section) == (
        'config: --context 8000, --cache-type f16 from [models."m"]',
        'config: its next load takes --parallel 1 (it has 2) from [models."m"]',
    )
    assert running_notes("m", plan, PlanRequest(8000, 2, CacheType.F16), section) == ()
    assert running_notes("m", plan, None, None) == ()


def test_who_places_layers_by_hand_is_not_offered_a_placement() -> None:
    section = ModelSettings(offload=Offload.ALLOWED, cache_type=CacheType.Q4_0)
    by_hand = with_section(PlanRequest(gpu_layers=3), section)
    assert (by_hand.offload, by_hand.cache_type_k, by_hand.gpu_layers) == (None, CacheType.Q4_0, 3)
    assert with_section(PlanRequest(), section).offload is Offload.ALLOWED
    assert with_section(PlanRequest(parallel=2), None) == PlanRequest(parallel=2)


def test_a_plan_and_the_list_of_models_have_it_and_the_plan_says_so(tmp_path: Path) -> None:
    model = "qwen3-8b"
    desk = Desk(
        tmp_path, models={model: ModelSettings(context_tokens=8192, parallel=2, cache_type=CacheType.F16)}
    )
    put(desk, model)

    def plan(**asked: Any) -> Any:
        return asyncio.run(Previews(desk.daemon).plan(PlanBody.model_validate({"model": model} | asked)))

    said = f'config: --context 8192, --parallel 2, --cache-type f16 from [models."{model}"]'
    for where in ({}, {"vram": "24 GiB"}):
        view = plan(**where)
        assert (view.context_tokens, view.parallel) == (8192, 2)
        assert said in view.notes
    engine, desk.lookup.next_engine = desk.lookup.next_engine, NO_ENGINE
    assert plan(vram="24 GiB").parallel == 2
    desk.lookup.next_engine = engine
    view = plan(context_tokens=4096, parallel=1)
    assert f'config: --cache-type f16 from [models."{model}"]' in view.notes
    view = plan(context_tokens=4096, parallel=1, cache_type="q8_0")
    assert not [note for note in view.notes if note.startswith("config:")]
    (row,) = asyncio.run(Listings(desk.daemon).models(with_catalogue=False)).models
    assert row.parallel == 2
    asyncio.run(desk.lookup.close())


# --- the tables ----------------------------------------------------------------------------------------------


def test_every_setting_says_when_it_counts() -> None:
    assert tuple(TAKES_EFFECT) == SETTING_KEYS
    assert NEEDS_RESTART == ("state_dir", "runtime_dir", "card")


def test_what_the_planner_is_told_counts_from_the_next_load() -> None:
    told = {each.name for each in fields(PlanPolicy)} & set(SETTING_KEYS)
    assert len(told) >= 10
    assert {TAKES_EFFECT[key] for key in told} == {TakesEffect.NEXT_LOAD}


def test_the_reference_says_when_changes_count() -> None:
    rows = PAGE.split("\n## When a change counts\n")[1].split("\n## ")[0].splitlines()
    found = [re.findall(r"`(\w+)`", row) for row in rows if row.startswith("| the next")]
    expected = [
        [key for key, when in TAKES_EFFECT.items() if when is each]
        for each in (TakesEffect.NEXT_LOAD, TakesEffect.NEXT_LOGIN, TakesEffect.NEXT_START)
    ]
    assert found == expected


def test_the_reference_describes_sections_as_they_are() -> None:
    part = PAGE.split("\n## Sections of models\n")[1].split("\n## ")[0]
    members = (shape("models").element or shape("models")).members
    expected = [
        f"| `{key}` | {members[key].kind.replace('|', chr(92) + '|')} | {each.description} |"
        for key, each in ModelSettings.model_fields.items()
    ]
    assert [line for line in part.splitlines() if line.startswith("| `")] == expected


def test_shapes() -> None:
    assert [shape(key).kind for key in ("cache_type", "autoload", "gateway", "drain_s", "models_dir")] == [
        "f32 | f16 | bf16 | q8_0 | q5_1 | q5_0 | q4_1 | q4_0 | iq4_nl",
        "text",
        "flag",
        "number",
        "path",
    ]
    arguments, reasoning = shape("extra_arguments").element, shape("gateway_reasoning").element
    assert arguments is not None and arguments.kind == "words"
    assert reasoning is not None and reasoning.members["floor_tokens"].kind == "whole number"
