"""The command line of a plan on several cards, read back: the same cards, the same layers, the same price on each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lllm3090d.engines.arguments import Launch, launch
from lllm3090d.engines.capabilities import Backend, Build, Capabilities
from lllm3090d.engines.command_line import read_command_line
from lllm3090d.engines.probe import Texts, capabilities_of
from lllm3090d.engines.visibility import Sight
from lllm3090d.errors import LlmError
from lllm3090d.planning.devices import DeviceRoom
from lllm3090d.planning.planner import Plan
from lllm3090d.planning.request import Offload, PlanRequest, Room
from lllm3090d.planning.split import Division
from tests.unit.engine_captures import answers
from tests.unit.engine_truth import POLICY, facts_of
from tests.unit.plans import DRAFTING, GEMMA_27B, LLAMA_8B, MIXTURE, planner_of

pytestmark = pytest.mark.unit

GIB = 1 << 30
# The file is looked at, and any program will do.
BUILD = Build(Path("/usr/bin/env"), (), "test", locked=False)
NAMES = ("CUDA0", "CUDA1", "CUDA2", "CUDA3")


def _capabilities() -> Capabilities:
    said = answers("b11434")
    known = capabilities_of(BUILD, Texts(said["version"].text, said["help"].text), None)
    return replace(known, backend=Backend.CUDA, devices=NAMES)


CAPABILITIES = _capabilities()


def _written(plan: Plan, sight: Sight) -> Launch:
    return launch(
        BUILD,
        CAPABILITIES,
        Path("/models/m.gguf"),
        plan,
        Path("/run/e.sock"),
        "m",
        inherited={},
        sight=sight,
    )


@settings(deadline=None, max_examples=60)
@given(
    model=st.sampled_from([LLAMA_8B, GEMMA_27B, MIXTURE, DRAFTING]),
    cards=st.lists(st.integers(3, 24), min_size=2, max_size=4),
    context=st.sampled_from([4096, 16384, None]),
    parallel=st.sampled_from([None, 1, 3]),
    allowed=st.sampled_from(Offload),
)
def test_a_plan_is_read_back_to_its_price(
    model: str, cards: list[int], context: int | None, parallel: int | None, allowed: Offload
) -> None:
    rooms = tuple(DeviceRoom(size * GIB, size * GIB, f"GPU{number}") for number, size in enumerate(cards))
    request = PlanRequest(context_tokens=context, parallel=parallel, offload=allowed)
    planner = planner_of(model, request, room=Room(0, 64 * GIB, rooms), backend=Backend.CUDA)
    try:
        plan = planner.plan()
    except LlmError:
        return
    assert plan.split is not None
    names = NAMES[: len(plan.split.devices)]
    line = _written(plan, Sight(names, (("CUDA_VISIBLE_DEVICES", "a,b"),)))
    assert dict(line.environment)["CUDA_VISIBLE_DEVICES"] == "a,b"
    found = read_command_line(
        line.argv[1:], CAPABILITIES, facts_of(model), environment=dict(line.environment)
    )
    assert found.devices == names
    assert found.launch == plan.launch
    assert found.unpriced == ()
    if len(names) > 1:
        assert found.shares == plan.split.shares
        division = Division(facts_of(model), found.launch, Backend.CUDA, POLICY)
        again = division.split(found.devices, [int(share) for share in found.shares])
        assert again.needs_bytes == plan.split.needs_bytes
        assert again.host == plan.split.host


def test_the_engine_names_the_cards_that_it_sees() -> None:
    """Numbered anew, in the order of the plan; a plan without names is on the only one."""
    rooms = (DeviceRoom(24 * GIB, 10 * GIB, "GPU2"), DeviceRoom(24 * GIB, 12 * GIB, "GPU3"))
    plan = planner_of(GEMMA_27B, room=Room(0, 64 * GIB, rooms), backend=Backend.CUDA).plan()
    assert plan.split is not None and plan.split.devices == ("GPU2", "GPU3")
    argv = _written(plan, Sight(("CUDA0", "CUDA1"))).argv
    assert argv[argv.index("--device") + 1] == "CUDA0,CUDA1"
    alone = replace(plan, split=None)
    argv = _written(alone, Sight(("CUDA0",))).argv
    assert argv[argv.index("--device") + 1] == "CUDA0"
    assert "--tensor-split" not in argv
    with pytest.raises(ValueError, match="2 devices"):
        _written(alone, Sight(("CUDA0", "CUDA1")))


def test_nothing_else_chooses_cards() -> None:
    """What the session's environment says of them is not what the names were listed with."""
    session = {"GGML_VK_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "1", "LANG": "C"}
    plan = planner_of(LLAMA_8B, backend=Backend.CUDA, room=Room(24 * GIB, 64 * GIB)).plan()

    def line(sight: Sight | None) -> Launch:
        socket = Path("/run/e.sock")
        return launch(
            BUILD, CAPABILITIES, Path("/m.gguf"), plan, socket, "m", inherited=session, sight=sight
        )

    kept = line(Sight(("CUDA0",), (("CUDA_VISIBLE_DEVICES", "GPU-1"),)))
    assert dict(kept.environment)["CUDA_VISIBLE_DEVICES"] == "GPU-1"
    assert "GGML_VK_VISIBLE_DEVICES" in kept.unset
    assert not {"CUDA_VISIBLE_DEVICES", "LANG"} & {*kept.unset}
    assert not {*session} & {*line(None).unset}
