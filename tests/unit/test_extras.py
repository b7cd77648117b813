"""Further arguments in the scheduler: they change the plan, are handed on, and a model that runs is asked for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from lllm3090d.engines.capabilities import Backend
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.planning.planner import PlanRequest
from lllm3090d.serving.events import Admitted, Effect, Failed, Joined, StartUnit
from lllm3090d.serving.extras import FROM_SETTINGS
from lllm3090d.serving.scheduler import Scheduler
from lllm3090d.serving.unit_spec import Record
from tests.fakes.scheduler_world import World
from tests.unit.test_command_line import build_named

pytestmark = pytest.mark.unit

OPEN = PlanRequest()


@pytest.fixture
def world(tmp_path: Path) -> World:
    server = tmp_path / "llama-server"
    server.write_text("#!/bin/sh\n")
    server.chmod(0o755)
    made = World()
    made.server = server
    return made


def settings(world: World, table: Mapping[str, tuple[str, ...]]) -> World:
    world.scheduler = Scheduler(replace(world.scheduler.policy, extra_arguments=table))
    return world


def load(world: World, line: str = "", request: PlanRequest = OPEN, token: str = "t1") -> list[Effect]:
    event = world.request("m", token, request=request)
    capabilities = replace(build_named("b11434", Backend.VULKAN), devices=("Vulkan0",))
    return world.do(replace(event, capabilities=capabilities, arguments=tuple(line.split())))


def argv(effects: list[Effect]) -> tuple[str, ...]:
    return next(effect.argv for effect in effects if isinstance(effect, Admitted))


def failure(effects: list[Effect]) -> LlmError:
    (failed,) = [effect for effect in effects if isinstance(effect, Failed)]
    return failed.error


def test_they_change_the_plan_and_reach_the_engine(world: World) -> None:
    plain = argv(load(World()))
    line = argv(load(world, "-c 8192 -np 2 --cache-ram 64 --threads 4"))
    assert line[-2:] == ("--threads", "4")
    assert line[line.index("-c") + 1] == "8192"
    assert line.count("-c") == 1
    plan = world.get("m").plan
    assert (plan.context_tokens, plan.parallel, plan.launch.prompt_cache_mib) == (8192, 2, 64)
    assert "--threads" not in plain


def test_those_of_the_settings_come_first(world: World) -> None:
    settings(world, {"*": ("--threads", "8", "-np", "3"), "m": ("-np", "2"), "other": ("-np", "1")})
    line = argv(load(world, "--threads 4", PlanRequest(context_tokens=8192)))
    assert line[-4:] == ("--threads", "8", "--threads", "4")
    assert world.get("m").plan.parallel == 2


def test_what_is_asked_for_outranks_the_settings(world: World) -> None:
    settings(world, {"*": ("-c", "16384", "-np", "2")})
    load(world, request=PlanRequest(context_tokens=8192))
    plan = world.get("m").plan
    assert (plan.context_tokens, plan.parallel) == (8192, 2)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("-c 4096", "asked for twice"),
        ("--no-such", "has no option"),
        ("--lora /x.gguf", "no price"),
        ("--host 0.0.0.0", "socket of its own"),
    ],
)
def test_a_load_is_refused_before_anything_starts(world: World, line: str, words: str) -> None:
    error = failure(load(world, line, PlanRequest(context_tokens=8192)))
    assert error.code is ErrorCode.INVALID_REQUEST
    assert words in error.message
    assert world.scheduler.instances == ()


def test_bad_ones_of_the_settings_refuse_every_load(world: World) -> None:
    settings(world, {"m": ("--port", "80")})
    refused = failure(load(world))
    assert "--port" in refused.message and FROM_SETTINGS in (refused.hint or "")
    own = failure(load(World(), "--port 80"))
    assert FROM_SETTINGS not in (own.hint or "")


def test_the_record_keeps_them(world: World) -> None:
    effects = load(world, "--threads 4 -c 8192")
    (start,) = [effect for effect in effects if isinstance(effect, StartUnit)]
    record = world.get("m").record
    assert record.arguments == ("--threads 4",)
    assert Record.model_validate_json(record.model_dump_json()) == record
    assert start.run == record.run


def test_a_model_that_runs_has_what_was_asked_for(world: World) -> None:
    settings(world, {"*": ("--seed", "1")})
    load(world, "-c 8192 --threads 4")
    for line in ("", "--threads 4", "-t 4", "-c 8192", "--seed 1 -c 8000"):  # padded, it is the same context
        assert any(isinstance(effect, Joined) for effect in load(world, line, token="t2")), line


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--threads 8", "m runs without `--threads 8`; "),
        ("-c 4096", "with context 8,192 instead of 4,096"),
        ("--cache-ram 7", "prompt cache 1,024 instead of 7"),
        ("--kv-unified", "m runs without a pool that its slots share; "),
        ("-np 3 -t 3", "m runs with slots 2 instead of 3 and without `-t 3`; "),
        ("--ctx-checkpoints 0", "context checkpoints 8 instead of 0"),
    ],
)
def test_a_model_that_runs_without_them_is_loaded_differently(world: World, line: str, words: str) -> None:
    load(world, "-c 8192 --threads 4")
    error = failure(load(world, line, token="t2"))
    assert error.code is ErrorCode.LOADED_DIFFERENTLY
    assert words in error.message


def test_bad_ones_for_a_model_that_runs(world: World) -> None:
    load(world)
    assert failure(load(world, "--no-such", token="t2")).code is ErrorCode.INVALID_REQUEST
    twice = load(world, "-c 4096", PlanRequest(context_tokens=8192), token="t3")
    assert "asked for twice" in failure(twice).message
