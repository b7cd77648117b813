"""Plans drawn at random: a small model of any architecture, anything that may be asked, settings, memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from lllm3090d.checkpoints.facts import CheckpointFacts, ProjectorFacts
from lllm3090d.engines.capabilities import Backend
from lllm3090d.gpus.readings import CardKind
from lllm3090d.planning.cache import CacheType
from lllm3090d.planning.placement import EVERYTHING, weights
from lllm3090d.planning.planner import Plan, PlanPolicy, PlanRequest, plan
from lllm3090d.planning.request import Drafting, Features, Offload, ProjectorPlace, Room, RopeScaling
from lllm3090d.planning.slots import SlotPolicy
from lllm3090d.planning.units import MIB

Draw = Callable[[st.SearchStrategy[Any]], Any]
PLENTY = 1 << 40


@dataclass(frozen=True)
class RandomQuestion:
    """What the planner is asked about a model, whatever the model."""

    request: PlanRequest
    policy: PlanPolicy
    room: Room

    def plan(
        self, facts: CheckpointFacts, features: Features, projector: ProjectorFacts | None = None
    ) -> Plan:
        """The planner's answer. Raises LlmError where it refuses."""
        card_kind = CardKind.CPU if features.backend is Backend.CPU else CardKind.NVIDIA
        return plan(
            facts,
            self.request,
            self.policy,
            features=features,
            card_kind=card_kind,
            room=self.room,
            projector=projector,
        )


def _maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(st.none(), strategy)


@st.composite
def random_policies(draw: Draw) -> PlanPolicy:
    """Settings, all of them."""
    return PlanPolicy(
        cache_type=draw(st.sampled_from(CacheType)),
        batch_tokens=draw(st.sampled_from((512, 2048))),
        micro_batch_tokens=draw(st.sampled_from((64, 512))),
        context_checkpoints=draw(st.sampled_from((0, 3, 8, 32))),
        prompt_cache_mib=draw(st.sampled_from((0, 64, 1024))),
        workspace_reserve_mib=1024,
        checkpoint_min_step_tokens=draw(st.sampled_from((0, 256, 8192))),
        slot_policy=draw(st.sampled_from(SlotPolicy)),
        offload=draw(st.sampled_from(Offload)),
        drafting=draw(st.sampled_from(Drafting)),
        draft_tokens=draw(st.integers(1, 8)),
        projector=draw(st.sampled_from(ProjectorPlace)),
        image_max_tokens=draw(st.sampled_from((0, 64, 1024))),
    )


@st.composite
def random_questions(  # a branch for each field that excludes another
    draw: Draw,
    facts: CheckpointFacts,
    backend: Backend,
    *,
    most_tokens: int = 16_384,
    projects: bool = False,
) -> RandomQuestion:
    """Anything that the planner may be asked about a model; much of it is refused.

    Args:
        draw: of hypothesis.
        facts: the model.
        backend: what the engine computes on; with cpu there is no placement.
        most_tokens: largest context that is asked for.
        projects: there is a projector.
    """
    policy = draw(random_policies())
    if facts.embedding_length % 32 or any(layer.k_values % 32 for layer in facts.layers):
        policy = replace(policy, cache_type=CacheType.F16)
    elif policy.drafting is Drafting.ON and not facts.has_mtp:
        policy = replace(policy, drafting=Drafting.AUTO)
    if not projects:
        policy = replace(policy, projector=ProjectorPlace.AUTO)
    parallel = draw(_maybe(st.integers(1, 6)))
    context = draw(st.integers(1024, most_tokens)) * draw(st.sampled_from((1, 1, parallel or 1)))
    cache_type = draw(_maybe(st.sampled_from(CacheType)))
    is_open = draw(st.sampled_from((False, False, False, True)))
    fields: dict[str, Any] = {
        "context_tokens": None if is_open else min(context, most_tokens),
        "parallel": parallel,
        "cache_type_k": cache_type,
        "cache_type_v": draw(st.sampled_from((cache_type, cache_type, CacheType.F16))),
        "unified": draw(st.booleans()),
        "swa_full": draw(st.booleans()),
        "batch_tokens": draw(_maybe(st.sampled_from((300, 1024)))),
        "micro_batch_tokens": draw(_maybe(st.sampled_from((100, 256, 1024)))),
        "draft_tokens": draw(_maybe(st.integers(1, 6))),
        "rope_scaling": draw(st.sampled_from((None, None, RopeScaling.YARN))) if facts.rope else None,
    }
    if facts.has_mtp:
        fields["drafting"] = draw(st.sampled_from((Drafting.ON, Drafting.ON, None, Drafting.OFF)))
    if projects:
        fields["projector"] = draw(_maybe(st.sampled_from(ProjectorPlace)))
    if backend is not Backend.CPU:
        fields |= draw(_placements(facts))
    # Where the context is left open, memory must bound it.
    needed = weights(facts, EVERYTHING, backend).card + policy.prompt_cache_mib * MIB
    tight = needed + draw(st.integers(600, 2000)) * MIB
    host = None if backend is Backend.CPU else PLENTY
    room = Room(tight if is_open else draw(st.sampled_from((PLENTY, PLENTY, tight))), host)
    return RandomQuestion(PlanRequest(**fields), policy, room)


@st.composite
def _placements(draw: Draw, facts: CheckpointFacts) -> dict[str, Any]:
    kind = draw(st.sampled_from(("open", "layers", "experts", "cache", "layers and cache")))
    found: dict[str, Any] = {}
    if "layers" in kind:
        found["gpu_layers"] = draw(st.integers(0, len(facts.layers) + 1))
    if kind == "experts" and facts.expert_count:
        found["cpu_experts"] = draw(st.integers(0, len(facts.trunk)))
    if "cache" in kind:
        found["cache_on_host"] = True
    if kind == "open":
        found["offload"] = draw(_maybe(st.sampled_from(Offload)))
    return found
