"""A load that the scheduler refuses: who holds memory, what they do, and how to ask again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.readings import CardKind
from lllm3090d.planning.request import PlanRequest
from lllm3090d.planning.units import MIB
from lllm3090d.serving.events import EngineReady, Failed, LoadRequested, StartFinished
from lllm3090d.serving.explaining import holders, wish_for
from lllm3090d.serving.instance import InstanceState
from lllm3090d.serving.lookup import FoundModel
from lllm3090d.serving.observation import Stranger
from tests.fakes.model_files import published, write
from tests.fakes.plan_desk import HOST, Desk

pytestmark = pytest.mark.unit

GIB = 1 << 30
MODELS = ("gemma-3-27b", "llama-3.1-8b", "qwen3-8b")


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path, catalogue_file=tmp_path / "catalogue.json")
    (tmp_path / "catalogue.json").write_text('{"schema": 1, "models": []}')
    for name in MODELS:
        write(made.settings.models_dir / name / "model.gguf", published()[name])
    yield made
    asyncio.run(made.lookup.close())


def event_of(desk: Desk, name: str, request: PlanRequest | None = None, **asked: Any) -> LoadRequested:
    """A load of a model by name."""
    model = desk.lookup.model(name)
    assert isinstance(model, FoundModel)
    build, capabilities = desk.lookup.engine()
    return LoadRequested(
        token=f"token-{name}",
        run=f"run{name[:5]}",
        checkpoint=model.checkpoint,
        facts=model.facts,
        request=request or PlanRequest(8192, 1),
        build=build,
        capabilities=capabilities,
        **asked,
    )


def refused(desk: Desk, event: LoadRequested) -> LlmError:
    """Why the scheduler does not take it."""
    (effect,) = desk.scheduler.handle(event, desk.observe())
    assert isinstance(effect, Failed)
    json.dumps(effect.error.problem())
    return effect.error


def bring_up(desk: Desk, event: LoadRequested) -> None:
    """Load a model, as far as the scheduler sees."""
    desk.scheduler.handle(event, desk.observe())
    desk.scheduler.handle(StartFinished(event.run, None))
    measured = {each.where: each.reserved_bytes for each in desk.scheduler.ledger.of(event.run)}
    desk.scheduler.handle(EngineReady(event.run, measured), desk.observe())
    instance = desk.scheduler.instance(event.checkpoint.name)
    assert instance is not None and instance.state is InstanceState.READY


def test_a_load_is_refused_with_everything_that_is_known(desk: Desk) -> None:
    bring_up(desk, event_of(desk, "llama-3.1-8b", PlanRequest(65_536, 1), pinned=True))
    error = refused(desk, event_of(desk, "gemma-3-27b"))
    assert (error.code, error.details["cause"]) == (ErrorCode.INSUFFICIENT_VRAM, "ours")
    assert error.details["summary"].startswith(
        "gemma-3-27b does not fit on the card now because of models that are loaded: llama-3.1-8b ("
    )
    (ours,) = error.details["ours"]
    assert (ours["name"], ours["pinned"], ours["busy"]) == ("llama-3.1-8b", True, False)
    assert ours["idle_s"] >= 0
    kinds = {remedy["kind"]: remedy["command"] for remedy in error.details["remedies"]}
    assert kinds["unload-pinned"] == "lllm3090ctl unload llama-3.1-8b"
    # What it names really makes room.
    desk.scheduler.ledger.settle("runllama", {})
    assert not any(
        isinstance(each, Failed)
        for each in desk.scheduler.handle(event_of(desk, "gemma-3-27b"), desk.observe())
    )


def test_a_load_beside_a_stranger_names_them(desk: Desk) -> None:
    desk.foreign_bytes = 20 * GIB
    desk.strangers = (Stranger(4242, "train.py", "anna", 20 * GIB),)
    error = refused(desk, event_of(desk, "gemma-3-27b"))
    assert (error.code, error.details["cause"]) == (ErrorCode.INSUFFICIENT_VRAM, "strangers")
    assert "train.py of anna (pid 4242) holds 20,480.0 MiB" in error.message
    assert "Ask anna to close train.py (20.0 GiB, pid 4242)" in (error.hint or "")


def test_a_load_into_host_memory_keeps_its_code(desk: Desk) -> None:
    desk.card, desk.total_bytes, desk.reserved_bytes = HOST, 8 * GIB, None
    error = refused(desk, event_of(desk, "gemma-3-27b"))
    assert error.code is ErrorCode.INSUFFICIENT_MEMORY
    assert error.details["card_kind"] == str(CardKind.CPU)


@pytest.mark.parametrize(
    ("changes", "idle_s", "doing"),
    [
        ({}, 90.0, "idle"),
        ({"last_used_s": None, "ready_since_s": 40.0}, 60.0, "idle"),
        ({"last_used_s": None, "ready_since_s": None}, 0.0, "idle"),
        ({"last_used_s": 200.0}, 0.0, "idle"),
        ({"busy": True}, None, "busy"),
        ({"leases": {"lease"}}, None, "busy"),
        ({"state": InstanceState.LOADING}, None, "busy"),
        ({"state": InstanceState.STOPPING}, None, "ending"),
        ({"state": InstanceState.FAILED}, None, "nothing"),
    ],
)
def test_what_our_models_do(desk: Desk, changes: dict[str, Any], idle_s: float | None, doing: str) -> None:
    bring_up(desk, event_of(desk, "qwen3-8b"))
    (instance,) = desk.scheduler.instances
    instance.last_used_s = 10.0
    found = holders([replace(instance, **changes)], 100.0)
    if doing == "nothing":
        assert found == ()
        return
    (holder,) = found
    assert (holder.name, holder.run, holder.pinned) == ("qwen3-8b", instance.run, False)
    assert (holder.idle_s, holder.is_ending) == (idle_s, doing == "ending")


def test_a_load_is_asked_again_with_all_that_it_said(desk: Desk) -> None:
    event = event_of(
        desk,
        "qwen3-8b",
        PlanRequest(parallel=2),
        arguments=("-c", "8192"),
        card="GPU-1",
        pinned=True,
        may_evict=False,
        may_wait=False,
    )
    wish = wish_for(event)
    assert (wish.name, wish.request, wish.arguments) == ("qwen3-8b", PlanRequest(parallel=2), ("-c", "8192"))
    assert wish.stated == {"context_tokens"}
    assert wish.more == ("--gpu", "GPU-1", "--pin", "--no-evict", "--no-wait")
    assert wish_for(event_of(desk, "qwen3-8b")).more == ()


def test_the_smallest_launch_is_told_where_nothing_helps(desk: Desk) -> None:
    desk.total_bytes = 1024 * MIB
    error = refused(desk, event_of(desk, "gemma-3-27b", PlanRequest(1024, 1, gpu_layers=20)))
    assert error.details["cause"] == "card"
    assert "Choose a smaller model." in (error.hint or "")
