"""Drafters in files of their own: which are automatic, which have to be asked for, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lllm3090d.checkpoints.facts import FactsCache, read_drafter_facts
from lllm3090d.engines.capabilities import Backend
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.planning.alternatives import alternatives
from lllm3090d.planning.cache import CacheType
from lllm3090d.planning.launch import Drafter, SpecType
from lllm3090d.planning.planner import Planner
from lllm3090d.planning.request import Drafting, Features, PlanRequest
from tests.fakes.drafter_files import write_drafter
from tests.unit.engine_truth import facts_of
from tests.unit.plans import LLAMA_8B, SMOLLM2, planner_of

pytestmark = pytest.mark.unit

GIB = 1 << 30
ALL = frozenset(kind.value for kind in SpecType)
OFFERED = Features(Backend.VULKAN, drafts_from=ALL)
PLAIN_27B = "qwen3.5-27b"


def question(
    tmp_path: Path,
    model: str,
    drafter: str,
    spec_type: SpecType,
    *,
    drafting: Drafting | None = None,
    features: Features = OFFERED,
    room: int = 40 * GIB,
) -> Planner:
    facts = read_drafter_facts((write_drafter(tmp_path / "drafter.gguf", drafter),))
    asked = planner_of(model, PlanRequest(drafting=drafting), room=room, features=features)
    return replace(asked, drafter=Drafter(facts, spec_type))


def test_blocks_for_prediction_in_a_file_beside_the_model_are_used(tmp_path: Path) -> None:
    asked = question(tmp_path, PLAIN_27B, "qwen3.5-27b-mtp", SpecType.MTP)
    made, alone = asked.plan(), replace(asked, drafter=None).plan()
    assert made.launch.draft is not None
    assert made.launch.draft.spec_type is SpecType.MTP
    assert asked.drafter is not None and made.launch.drafter is asked.drafter.facts
    assert alone.launch.draft is None
    names = {item.name for item in made.quote.items} - {item.name for item in alone.quote.items}
    assert {"draft weights", "draft cache", "draft compute"} <= names
    assert made.quote.item("draft weights").bytes > 0
    assert made.launch.draft.cache_type_k in {CacheType.Q8_0, CacheType.F16}


def test_other_drafters_have_to_be_asked_for(tmp_path: Path) -> None:
    asked = question(tmp_path, LLAMA_8B, "eagle3-8b", SpecType.EAGLE3)
    assert asked.plan().launch.draft is None
    named = question(tmp_path, LLAMA_8B, "eagle3-8b", SpecType.EAGLE3, drafting=Drafting.ON).plan()
    assert named.launch.draft is not None and named.launch.draft.spec_type is SpecType.EAGLE3
    found = {each.ask for each in alternatives(asked, asked.plan())}
    assert "--draft on" in found or named.window_tokens == asked.plan().window_tokens


def test_one_that_was_made_for_another_model_is_left_aside_or_refused_when_asked_for(tmp_path: Path) -> None:
    """It reads states of another length."""
    asked = question(tmp_path, SMOLLM2, "eagle3-8b", SpecType.EAGLE3, drafting=Drafting.ON)
    with pytest.raises(LlmError, match="no multiple") as caught:
        asked.plan()
    assert caught.value.code is ErrorCode.UNSUPPORTED_COMBINATION
    sidecar = question(tmp_path, LLAMA_8B, "eagle3-8b", SpecType.MTP)
    assert sidecar.plan().launch.draft is None


def test_an_engine_without_that_way_of_drafting(tmp_path: Path) -> None:
    old = Features(Backend.VULKAN, drafts_from=ALL - {"draft-eagle3"})
    asked = question(tmp_path, LLAMA_8B, "eagle3-8b", SpecType.EAGLE3, drafting=Drafting.ON, features=old)
    with pytest.raises(LlmError, match="--spec-type draft-eagle3"):
        asked.plan()
    assert replace(asked, request=PlanRequest()).plan().launch.draft is None


def test_a_model_that_drafts_for_itself_needs_no_file(tmp_path: Path) -> None:
    made = question(tmp_path, "qwen3.5-27b-mtp", "qwen3.5-27b-mtp", SpecType.MTP).plan()
    assert made.launch.draft is not None and made.launch.drafter is None


def test_facts_of_drafters_are_remembered(tmp_path: Path) -> None:
    path = write_drafter(tmp_path / "drafter.gguf", "eagle3-8b")
    cache = FactsCache(drafters=True)
    assert cache.get((path,)) is cache.get((path,))
    with pytest.raises(LlmError):
        FactsCache().get((path,))
    assert facts_of(LLAMA_8B).drafter is None
