"""A record made out of a unit's own command: what we launch comes back whole, and what is not ours is told apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lllm3090d.bus.unit_status import UnitStatus
from lllm3090d.checkpoints.facts import RopeFacts
from lllm3090d.engines.capabilities import Backend, Capabilities, ListedDevice
from lllm3090d.engines.command_line import read_command_line
from lllm3090d.gpus.readings import CardKind
from lllm3090d.planning.planner import CacheType, PlanRequest
from lllm3090d.planning.quote import Place
from lllm3090d.planning.request import RopeScaling
from lllm3090d.serving.events import StartUnit
from lllm3090d.serving.observation import HOST
from lllm3090d.serving.reconstruction import (
    NOTE,
    NotUnderstoodError,
    Served,
    cards_of_unit,
    command_of,
    rebuilt_record,
    run_of,
)
from lllm3090d.serving.unit_spec import RECORD_VARIABLE, Record
from tests.fakes.scheduler_world import CARD, CARDS, CUDA, SECOND, TWO_CARDS, World, status, the
from tests.fakes.simulated_machine import model_facts
from tests.unit.test_command_line import build_named

pytestmark = pytest.mark.unit

GIB = 8.0
SERVER = Path("/opt/llama.cpp/llama-server")
FACTS = replace(model_facts(GIB), rope=RopeFacts(10_000.0, 128, "none", 1.0, 32_768))
LISTED = tuple(ListedDevice(f"CUDA{number}", CARD.name, CARD.total_bytes) for number in range(2))


def engine(cards: int = 1) -> Capabilities:
    """The real options of a build, with so many cards in sight."""
    devices = LISTED[:cards]
    return replace(build_named("b11434"), devices=tuple(each.name for each in devices), listed=devices)


def launched(request: PlanRequest, cards: Any = CARDS, **wishes: Any) -> tuple[UnitStatus, Record, World]:
    """A unit as we start it, without its record; and the record."""
    world = World(cards)
    world.server, world.capabilities = SERVER, engine(len(cards))
    spec = the(world.load("qwen 3, 8B", "t", GIB, request, facts=FACTS, **wishes), StartUnit).spec
    instance = world.get("qwen 3, 8B")
    command: Any = spec.properties["ExecStart"]
    environment: Any = spec.properties["Environment"]
    kept = tuple(each for each in environment if not each.startswith(RECORD_VARIABLE + "="))
    return status(instance, argv=tuple(command[0][1]), environment=kept), instance.record, world


def rebuilt(
    unit: UnitStatus, world: World, capabilities: Capabilities | None = None, **changes: Any
) -> Record:
    capabilities = capabilities or world.capabilities
    command = command_of(unit, capabilities)
    facts = FACTS
    reading = read_command_line(unit.argv[1:], capabilities, facts, environment=unit.variables)
    values: dict[str, Any] = {
        "command": command,
        "reading": reading,
        "served": Served((command.model,), int(GIB * (1 << 30)), facts),
        "capabilities": capabilities,
        "cards": world.cards,
        "policy": world.scheduler.policy.plan,
    }
    return rebuilt_record(unit, **(values | changes))


@pytest.mark.parametrize(
    "request_",
    [
        PlanRequest(),
        PlanRequest(context_tokens=8192),
        PlanRequest(
            context_tokens=16_384, parallel=3, cache_type_k=CacheType.F16, cache_type_v=CacheType.Q4_0
        ),
        PlanRequest(context_tokens=65_536, rope_scaling=RopeScaling.YARN),
        PlanRequest(context_tokens=8192, gpu_layers=9, cache_on_host=True, unified=True, batch_tokens=512),
    ],
)
def test_what_we_launch_comes_back_as_it_was_priced(request_: PlanRequest) -> None:
    unit, record, world = launched(request_)
    made = rebuilt(unit, world)
    plan, known = made.plan(), record.plan()
    assert plan.launch == known.launch
    assert (plan.window_tokens, plan.on_card, plan.with_projector) == (known.window_tokens, True, False)
    assert plan.rope == known.rope
    assert plan.quote == known.quote
    assert made.shares(CARD.uuid) == record.shares(CARD.uuid)
    same = ("run", "path", "shards", "size_bytes", "socket", "engine_version", "engine_server", "arguments")
    assert {key: getattr(made, key) for key in same} == {key: getattr(record, key) for key in same}
    assert made.name == "qwen 3_ 8B"  # the engine would take a comma for the end of the name
    assert NOTE in plan.notes
    # What came of it is what a load would have to ask for, so that it is started again as it was.
    assert made.asked is not None
    assert made.asked.context_tokens == known.context_tokens
    assert made.asked.gpu_layers == known.launch.layers.layers_on_card
    again = launched(made.asked)[1].plan()
    assert (again.launch, again.quote) == (known.launch, known.quote)


def test_further_arguments_of_a_person_are_told_apart_from_ours() -> None:
    unit, record, world = launched(
        PlanRequest(context_tokens=8192), arguments=("--threads", "3", "--verbose")
    )
    assert record.arguments == ("--threads 3", "--verbose")
    assert rebuilt(unit, world).arguments == record.arguments


def test_a_model_over_two_cards_is_divided_again() -> None:
    unit, record, world = launched(PlanRequest(context_tokens=8192), TWO_CARDS, card=SECOND.uuid)
    assert rebuilt(unit, world).shares(CARD.uuid) == record.shares(CARD.uuid)
    big, whole, world = _over_both()
    made = rebuilt(big, world, served=Served((Path("/m"),), 1, model_facts(30.0)))
    assert {each.where for each in made.shares("")} >= {CARD.uuid, SECOND.uuid}
    assert [(each.where, each.bytes) for each in made.shares("")] == [
        (each.where, each.bytes) for each in whole.shares("")
    ]


def _over_both() -> tuple[UnitStatus, Record, World]:
    world = World(TWO_CARDS)
    world.server, world.capabilities = SERVER, engine(2)
    spec = the(world.load("big", "t", 30.0, PlanRequest(context_tokens=8192)), StartUnit).spec
    command: Any = spec.properties["ExecStart"]
    environment: Any = spec.properties["Environment"]
    instance = world.get("big")
    return (
        status(instance, argv=tuple(command[0][1]), environment=tuple(environment)),
        instance.record,
        world,
    )


def test_an_engine_that_computes_in_host_memory_beside_a_card_takes_nothing_of_the_card() -> None:
    unit, _, world = launched(PlanRequest(context_tokens=8192))
    made = rebuilt(replace(unit, argv=(*unit.argv, "--device", "none")), world)
    assert {each.where for each in made.shares(CARD.uuid)} == {HOST}
    assert {item.place for item in made.plan().quote.items} == {Place.HOST}
    host = replace(CARD, kind=CardKind.CPU, uuid=HOST)
    alone = rebuilt(unit, world, cards=(host,))
    assert {each.where for each in alone.shares(HOST)} == {HOST}


def test_a_command_of_somebody_else_is_priced_by_the_engines_own_defaults() -> None:
    """Four slots in one pool, the trained context, f16, and all that is unsure about it said."""
    unit, _, world = launched(PlanRequest())
    server = unit.argv[0]
    made = rebuilt(
        replace(
            unit,
            name="lllm3090-mine.service",
            argv=(server, "-m", "/models/x/y.gguf", "--host", "/run/x.sock", "--lora", "/l.gguf"),
            environment=("LLAMA_ARG_CTX_SIZE=4096",),
        ),
        world,
    )
    plan = made.plan()
    assert (made.name, plan.context_tokens, plan.parallel) == ("y", 4096, 4)
    assert plan.cache_type_k is CacheType.F16
    assert "nobody knows the price of --lora" in plan.notes
    assert len(plan.notes) == 4
    assert made.run == run_of("lllm3090-mine.service", "y")
    whole = rebuilt(
        replace(unit, argv=(server, "-m", "/x.gguf", "--host", "/x.sock"), environment=()), world
    )
    assert whole.context_tokens == model_facts(GIB).trained_context_tokens


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"argv": ()}, "systemd tells no command of it"),
        ({"argv": ("/bin/sleep", "300")}, "it runs /bin/sleep, which is no llama-server"),
        ({"argv": ("llama-server", "-m", "/x")}, "it runs llama-server, which is no llama-server"),
        ({"argv": ("/e/llama-server", "--nonsense")}, "its command line cannot be read: "),
        ({"argv": ("/e/llama-server", "-m")}, "its command line cannot be read: "),
        ({"argv": ("/e/llama-server", "--host", "/x.sock")}, "its command line names no model file"),
        (
            {"argv": ("/e/llama-server", "-m", "x", "--host", "/x.sock")},
            "its command line names no model file",
        ),
        ({"argv": ("/e/llama-server", "-m", "/x")}, "it does not listen on a Unix socket"),
        (
            {"argv": ("/e/llama-server", "-m", "/x", "--host", "127.0.0.1")},
            "it does not listen on a Unix socket",
        ),
    ],
)
def test_what_is_no_server_of_a_model_behind_a_socket_is_not_understood(
    change: Mapping[str, Any], why: str
) -> None:
    unit, _, _ = launched(PlanRequest())
    with pytest.raises(NotUnderstoodError) as caught:
        command_of(replace(unit, environment=(), **change), engine())
    assert str(caught.value).startswith(why)


def test_a_model_whose_path_went_through_the_environment_is_found() -> None:
    unit, _, _ = launched(PlanRequest())
    line = ("/e/llama-server", "--host", "/x.sock")
    found = command_of(replace(unit, argv=line, environment=("LLAMA_ARG_MODEL=/m/a$b;c.gguf",)), engine())
    assert (found.model, found.alias) == (Path("/m/a$b;c.gguf"), "a$b;c")


@pytest.mark.parametrize(
    ("unit", "name", "run"),
    [
        ("lllm3090-qwen-0a1b2c3d.service", "qwen", "0a1b2c3d"),
        ("lllm3090-qwen-27b-0a1b2c3d.service", "qwen 27b", "0a1b2c3d"),
        ("lllm3090-qwen-0a1b2c3d.service", "gemma", None),
        ("lllm3090-qwen.service", "qwen", None),
        ("lllm3090-0a1b2c3d.service", "0a1b2c3d", None),
        ("lllm3090-qwen-0A1B2C3D.service", "qwen", None),
    ],
)
def test_the_run_is_the_one_of_the_unit_or_one_of_its_own(unit: str, name: str, run: str | None) -> None:
    found = run_of(unit, name)
    assert len(found) == 8
    assert found == run_of(unit, name)
    assert (found == run) if run else not unit.endswith(f"-{found}.service")
    assert run_of(unit + "x", name) != found


def test_the_run_that_its_environment_tells_is_believed_where_the_name_agrees() -> None:
    assert run_of("lllm3090-qwen-0a1b2c3d.service", "gemma", "0a1b2c3d") == "0a1b2c3d"
    assert run_of("lllm3090-qwen-0a1b2c3d.service", "gemma", "00000000") not in {"0a1b2c3d", "00000000"}


BY_NAME = (replace(CARD, name="NVIDIA GeForce RTX 3090"), replace(SECOND, name="NVIDIA RTX A4000"))


@pytest.mark.parametrize(
    ("variables", "devices", "expected"),
    [
        ({}, (), ("GPU-1", "GPU-2")),
        ({"CUDA_VISIBLE_DEVICES": "GPU-2"}, (), ("GPU-2",)),
        ({"CUDA_VISIBLE_DEVICES": "GPU-2"}, ("CUDA0",), ("GPU-2",)),
        ({"CUDA_VISIBLE_DEVICES": "GPU-2,GPU-1"}, ("CUDA1", "CUDA0"), ("GPU-1", "GPU-2")),
        ({"CUDA_VISIBLE_DEVICES": "1"}, (), ("GPU-2",)),
        ({}, ("CUDA1",), ("GPU-2",)),
        ({"CUDA_VISIBLE_DEVICES": "GPU-3"}, (), "it is on the card GPU-3, which is none of this machine"),
        ({"CUDA_VISIBLE_DEVICES": "7"}, (), "it is on the card 7, which is none of this machine"),
        ({"CUDA_VISIBLE_DEVICES": ","}, (), "it is on the card of no name, which is none of this machine"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-"}, (), "it is on the card GPU-, which is none of this machine"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-2"}, ("CUDA1",), "it is on CUDA1, and sees 1 cards"),
    ],
)
def test_cards_are_known_by_uuid_number_or_name(
    variables: dict[str, str], devices: tuple[str, ...], expected: tuple[str, ...] | str
) -> None:
    if isinstance(expected, str):
        with pytest.raises(NotUnderstoodError) as caught:
            cards_of_unit(variables, devices, CUDA, TWO_CARDS)
        assert str(caught.value) == expected
    else:
        assert cards_of_unit(variables, devices, CUDA, TWO_CARDS) == expected
    assert cards_of_unit(variables, devices, CUDA, CARDS) == (CARD.uuid,)


def test_cards_of_vulkan_are_known_by_name_alone() -> None:
    listed = tuple(
        ListedDevice(f"Vulkan{number}", card.name, card.total_bytes) for number, card in enumerate(BY_NAME)
    )
    vulkan = replace(CUDA, backend=Backend.VULKAN, devices=("Vulkan0", "Vulkan1"), listed=listed)
    assert cards_of_unit({}, ("Vulkan1",), vulkan, BY_NAME) == ("GPU-2",)
    with pytest.raises(NotUnderstoodError, match="nothing tells which cards Vulkan7 are"):
        cards_of_unit({}, ("Vulkan7",), vulkan, BY_NAME)
