"""The link between host and card, from the reading to the plan of a tiered cache."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lllm3090d.engines.arguments import features
from lllm3090d.engines.capabilities import Backend, Capabilities
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.readings import Card, CardKind, PcieLink
from lllm3090d.planning.request import PlanRequest
from lllm3090d.planning.tier_conditions import HostMemory
from lllm3090d.planning.tier_speed import DecodeStep, LinkSpeed
from lllm3090d.serving.events import LoadRequested, Observation
from lllm3090d.serving.load_features import load_features
from lllm3090d.serving.previews import Previews
from lllm3090d.wire import PlanBody, PlanView
from tests.fakes.model_files import published, write
from tests.fakes.plan_desk import Desk

pytestmark = pytest.mark.unit

FORK = Capabilities("11434 (0000000)", frozenset({"-c", "--kv-vram-cells"}), Backend.CUDA, ("CUDA0",))
HOST = HostMemory(48 << 30, 64 << 30)


@pytest.mark.parametrize(
    ("link", "expected"),
    [
        (PcieLink(4, 16), LinkSpeed(23_700_000_000, "measured on PCIe 4.0 x16")),
        (PcieLink(3, 4), LinkSpeed(2_953_800_000, "derived: 75 % of PCIe 3.0 x4, not measured")),
        (PcieLink(9, 16), None),
        (None, None),
    ],
)
def test_the_link_of_the_card_is_what_a_tier_is_predicted_with(
    link: PcieLink | None, expected: LinkSpeed | None
) -> None:
    card = Card(CardKind.NVIDIA, "GPU-1", "NVIDIA GeForce RTX 3090", "580.95.05", link=link)
    room = features(FORK, card, HOST).tier
    assert room is not None
    assert room.link == expected


# --- and to what a person is told ---


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    """The shipped catalogue's 27B on its reference card, with an engine of the fork."""
    made = Desk(tmp_path)
    model = made.settings.models_dir / "Qwen3.8-27B" / "Qwen3.8-27B-UD-Q4_K_S.gguf"
    write(model, published()["qwen3.5-27b-mtp"])
    made.card = replace(made.card, compute_capability="8.6", link=PcieLink(3, 16))
    assert not isinstance(made.lookup.next_engine, LlmError)
    build, capabilities = made.lookup.next_engine
    fork = replace(
        capabilities,
        backend=Backend.CUDA,
        devices=("CUDA0",),
        flags=capabilities.flags | {"--kv-vram-cells"},
        virtual_memory=True,
    )
    made.lookup.next_engine = (build, fork)
    made.foreign_bytes = 3 << 30
    yield made
    asyncio.run(made.lookup.close())


ASKED = {"model": "Qwen3.8-27B", "tiered": True, "drafting": "off", "context_tokens": 262_144, "parallel": 1}


def told(desk: Desk, **asked: object) -> PlanView:
    return asyncio.run(Previews(desk.daemon).plan(PlanBody.model_validate(ASKED | asked)))


def test_a_tiered_plan_tells_the_speed_at_its_end(desk: Desk) -> None:
    """43.2 tokens/s without drafts on an RTX 3090 with CUDA are in the catalogue; 12.5 GB/s over PCIe 3.0 x16."""
    view = told(desk)
    assert view.tier is not None
    beyond_bytes = (262_144 - view.tier.card_tokens) * 34_816
    assert view.tier.end_tokens_per_s == pytest.approx(1 / (1 / 43.2 + beyond_bytes / 12.5e9))
    assert view.tier.speed == (
        "Speed predicted from 43.2 tokens/s measured (rtx-3090, cuda, no speculation, prose);"
        " bus 12.5 GB/s, measured on PCIe 3.0 x16."
    )


@pytest.mark.parametrize(
    ("asked", "link", "why"),
    [
        ({"drafting": "on"}, PcieLink(3, 16), "nobody has noted how many tokens a step yielded"),
        ({}, None, "the link between host and card is not known"),
        ({"card": "rtx-4090"}, PcieLink(3, 16), None),
    ],
)
def test_what_is_not_known_is_not_predicted(
    desk: Desk, asked: dict[str, object], link: PcieLink | None, why: str | None
) -> None:
    desk.card = replace(desk.card, link=link)
    if why is None:  # of a card that is not there nobody knows driver and link, so there is no tier
        with pytest.raises(LlmError) as caught:
            told(desk, **asked)
        assert caught.value.code is ErrorCode.UNSUPPORTED_COMBINATION
        return
    view = told(desk, **asked)
    assert view.tier is not None and view.tier.end_tokens_per_s is None
    assert view.tier.speed is not None and view.tier.speed.startswith("Speed not predicted: ")
    assert why in view.tier.speed and view.tier.speed in view.notes


def test_a_load_knows_the_same_speeds(desk: Desk) -> None:
    found = asyncio.run(desk.lookup.find("Qwen3.8-27B"))
    event = LoadRequested(
        "t",
        "0" * 8,
        found.checkpoint,
        found.facts,
        PlanRequest(tiered=True),
        found.build,
        found.capabilities,
        speeds=found.speeds,
    )
    for seen, is_known in (
        (desk.observe(), True),
        (without_capability(desk), True),
        (other_card(desk), False),
    ):
        offered = load_features(event, seen).tier
        assert offered is not None
        assert isinstance(offered.steps.of("none"), DecodeStep) is is_known
    unknown = replace(event, speeds=())
    offered = load_features(unknown, desk.observe()).tier
    assert offered is not None and isinstance(offered.steps.of("none"), str)


def without_capability(desk: Desk) -> Observation:
    desk.card = replace(desk.card, compute_capability=None)
    return desk.observe()


def other_card(desk: Desk) -> Observation:
    desk.card = replace(desk.card, name="NVIDIA GeForce RTX 3090 Ti")
    return desk.observe()
