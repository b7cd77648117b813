"""A plan for some of several cards on the command line: by the names of the build, and only where there are several."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lllm3090d.engines.arguments import Launch, launch
from lllm3090d.engines.capabilities import Backend, Build, Capabilities
from lllm3090d.engines.help_text import parse_help, parse_options
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.planning.devices import DeviceRoom
from lllm3090d.planning.launch import Draft, SpecType
from lllm3090d.planning.planner import Plan
from lllm3090d.planning.request import PlanRequest, ProjectorPlace, Room
from tests.unit.engine_captures import BUILDS, answers
from tests.unit.engine_truth import facts_of
from tests.unit.plans import GEMMA_27B, LLAMA_8B, SMOLLM2, plan_of, projector_of

pytestmark = pytest.mark.unit

BUILD = Build(Path("/opt/llama.cpp/bin/llama-server"), (), "test", locked=False)
MODEL = Path("/models/model.gguf")
SOCKET = Path("/run/user/1000/lllm3090d/engines/model-1.sock")
GIB = 1 << 30
NEWEST = "b11434"


def _capabilities(
    name: str = NEWEST,
    devices: tuple[str, ...] = ("CUDA0", "CUDA1"),
    backend: Backend = Backend.CUDA,
    missing: tuple[str, ...] = (),
) -> Capabilities:
    text = answers(name)["help"].text
    flags, valued, variables = parse_help(text)
    kept = flags - set(missing)
    return Capabilities("version", kept, backend, devices, valued, variables, parse_options(text))


def _plan(
    model: str = GEMMA_27B,
    cards: tuple[float, ...] = (12, 12),
    request: PlanRequest | None = None,
    kind: str = "CUDA",
    *,
    projector: bool = False,
) -> Plan:
    rooms = tuple(
        DeviceRoom(int(size * GIB), int(size * GIB), f"{kind}{index}") for index, size in enumerate(cards)
    )
    return plan_of(
        model,
        request,
        room=Room(int(cards[0] * GIB), 64 * GIB, rooms),
        backend=Backend.CUDA if kind == "CUDA" else Backend.VULKAN,
        projector=projector_of(600) if projector else None,
    )


def _line(
    plan: Plan,
    capabilities: Capabilities | None = None,
    *,
    drafter: Path | None = None,
    projector: bool = False,
) -> Launch:
    return launch(
        BUILD,
        capabilities or _capabilities(),
        MODEL,
        plan,
        SOCKET,
        "model",
        drafter_path=drafter,
        projector_path=Path("/models/mmproj.gguf") if projector else None,
        inherited={},
    )


def _value(line: Launch, flag: str) -> str:
    return line.argv[line.argv.index(flag) + 1]


@pytest.mark.parametrize("build", BUILDS)
def test_several_cards_are_named_with_their_shares(build: str) -> None:
    plan = _plan()
    line = _line(plan, _capabilities(build))
    assert plan.split is not None
    assert _value(line, "--device") == "CUDA1,CUDA0"
    assert _value(line, "-sm") == "layer"
    assert _value(line, "--main-gpu") == "1"
    assert _value(line, "--tensor-split") == ",".join(map(str, plan.split.shares))
    assert _value(line, "-ngl") == "999"
    assert dict(line.environment)["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_a_plan_for_one_of_several_cards_names_it() -> None:
    line = _line(_plan(LLAMA_8B, (12, 24)))
    assert _value(line, "--device") == "CUDA1"
    assert not {"-sm", "--split-mode", "--main-gpu", "--tensor-split"} & set(line.argv)
    assert dict(line.environment)["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_on_a_machine_with_one_card_nothing_is_named() -> None:
    line = _line(_plan(LLAMA_8B, (24,)), _capabilities(devices=("CUDA0",)))
    named = {"--device", "-sm", "--split-mode", "--main-gpu", "--tensor-split", "-devd", "-mmdev"}
    assert not named & set(line.argv)
    assert "CUDA_DEVICE_ORDER" not in dict(line.environment)


def test_vulkan_has_names_of_its_own() -> None:
    plan = _plan(kind="Vulkan")
    line = _line(plan, _capabilities(devices=("Vulkan0", "Vulkan1"), backend=Backend.VULKAN))
    assert _value(line, "--device") == "Vulkan1,Vulkan0"
    assert "CUDA_DEVICE_ORDER" not in dict(line.environment)


def test_a_drafter_is_on_the_main_card() -> None:
    """It would be shared out like the model."""
    plan = _plan()
    drafting = replace(
        plan,
        launch=replace(plan.launch, draft=Draft(3, spec_type=SpecType.SIMPLE), drafter=facts_of(SMOLLM2)),
    )
    line = _line(drafting, drafter=Path("/models/drafter.gguf"))
    assert _value(line, "-devd") == "CUDA0"
    with pytest.raises(LlmError) as caught:
        _line(
            drafting,
            _capabilities(missing=("-devd", "--spec-draft-device", "--device-draft")),
            drafter=Path("/models/drafter.gguf"),
        )
    assert caught.value.code is ErrorCode.ENGINE_UNUSABLE
    one = _plan(LLAMA_8B, (12, 24))
    alone = replace(one, launch=drafting.launch)
    assert "-devd" not in _line(alone, drafter=Path("/models/drafter.gguf")).argv  # it follows --device


def test_a_projector_is_on_the_main_card() -> None:
    request = PlanRequest(projector=ProjectorPlace.CARD, context_tokens=8192)
    plan = _plan(cards=(13, 13), request=request, projector=True)
    assert plan.split is not None and len(plan.split.devices) == 2
    newest = _line(plan, projector=True)
    assert _value(newest, "-mmdev") == "CUDA0"
    assert "MTMD_BACKEND_DEVICE" not in dict(newest.environment)
    older = _line(plan, _capabilities("b10068"), projector=True)
    assert "-mmdev" not in older.argv
    assert dict(older.environment)["MTMD_BACKEND_DEVICE"] == "CUDA0"
    assert "MTMD_BACKEND_DEVICE" not in older.unset

    beside = _plan(
        cards=(13, 13),
        request=replace(request, projector=ProjectorPlace.HOST),
        projector=True,
    )
    line = _line(beside, _capabilities("b10068"), projector=True)
    assert "--no-mmproj-offload" in line.argv
    assert "MTMD_BACKEND_DEVICE" not in dict(line.environment)


@pytest.mark.parametrize(
    "missing", [("--tensor-split", "-ts"), ("-sm", "--split-mode"), ("--device", "-dev")]
)
def test_a_build_that_cannot_share_out_is_refused(missing: tuple[str, ...]) -> None:
    with pytest.raises(LlmError) as caught:
        _line(_plan(), _capabilities(missing=missing))
    assert caught.value.code is ErrorCode.ENGINE_UNUSABLE
    assert missing[0] in caught.value.message


def test_a_card_that_the_build_does_not_see_is_refused() -> None:
    with pytest.raises(LlmError) as caught:
        _line(_plan(), _capabilities(devices=("CUDA0",)))
    assert caught.value.code is ErrorCode.ENGINE_UNUSABLE
    assert "CUDA1" in caught.value.message and caught.value.details["devices"] == ["CUDA1"]
