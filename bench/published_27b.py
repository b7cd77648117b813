"""What one model took of one real card, as published, beside the quote; see :mod:`bench.planning_truth`.

A quote knows nothing of what other programs hold of the card. That is fitted once, with the first published figure;
all the others are predicted.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from pathlib import Path

from lllm3090d.checkpoints.facts import CheckpointFacts, WeightBytes
from lllm3090d.engines.capabilities import Backend
from lllm3090d.gpus.profiles import named_profile
from lllm3090d.planning.cache import CacheType
from lllm3090d.planning.compute import Margins
from lllm3090d.planning.launch import Draft, Launch, PlanPolicy
from lllm3090d.planning.quote import Place, price
from lllm3090d.planning.request import Room
from lllm3090d.planning.search import Variant
from lllm3090d.planning.units import MIB
from tests.system.harness import REPOSITORY
from tests.unit.engine_truth import POLICY, facts_of

DATA: Path = REPOSITORY / "tests" / "data" / "published_27b.json"
# As it was measured: everything known, and nothing beside it.
NO_MARGINS = Margins(compute_percent=0, compute_residuals=0, slack_mib=0, long_context_slack_mib=0)
WITHOUT_MARGINS: PlanPolicy = replace(POLICY, workspace_reserve_mib=0, margins=NO_MARGINS)
WITH_MARGINS: PlanPolicy = POLICY
# A prediction may be off by the larger of both.
USE_BYTES, USE_PERCENT = 256 * MIB, 2
CEILING_PERCENT = 3


@dataclass(frozen=True, slots=True)
class Use:
    """Memory of the card in use with a context, all programs together."""

    backend: Backend
    draft_cache: CacheType
    context_tokens: int
    used_bytes: int


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The largest context that ran and the smallest that died."""

    backend: Backend
    draft_cache: CacheType
    largest_ran_tokens: int
    smallest_died_tokens: int

    def is_met(self, planned_tokens: int) -> bool:
        """Within 3 % of what ran, and below what died."""
        off = abs(planned_tokens - self.largest_ran_tokens)
        is_near = off * 100 <= self.largest_ran_tokens * CEILING_PERCENT
        return is_near and planned_tokens < self.smallest_died_tokens


@dataclass(frozen=True, slots=True)
class Published:
    """The document.

    Attributes:
        facts: of the model: published dimensions, and weights of the size of the file.
        total_bytes: of the card.
        driver_bytes: that the driver kept of it, in another session.
        fitted: the figure that foreign memory is fitted with.
        predicted: all the others.
        ceilings: where it died.
    """

    facts: CheckpointFacts
    total_bytes: int
    driver_bytes: int
    fitted: Use
    predicted: tuple[Use, ...]
    ceilings: tuple[Ceiling, ...]

    @property
    def foreign_bytes(self) -> int:
        """What other programs held, if the quote without margins is right for the first figure."""
        return self.fitted.used_bytes - self.quoted_bytes(self.fitted, WITHOUT_MARGINS)

    def quoted_bytes(self, use: Use, policy: PlanPolicy) -> int:
        """The card's part of the quote for the same launch."""
        launch = replace(template(policy, use.draft_cache), context_tokens=use.context_tokens)
        return price(self.facts, launch, use.backend, policy).total_bytes(Place.CARD)

    def predicted_bytes(self, use: Use) -> int:
        """Use of the card: the quote without margins, and the foreign memory."""
        return self.quoted_bytes(use, WITHOUT_MARGINS) + self.foreign_bytes

    def planned_tokens(self, ceiling: Ceiling, policy: PlanPolicy, driver_bytes: int) -> int:
        """The largest context of one slot that the planner's search finds beside that foreign memory."""
        room = Room(self.total_bytes - driver_bytes - self.foreign_bytes)
        variant = Variant(
            facts=self.facts,
            template=template(policy, ceiling.draft_cache),
            policy=policy,
            backend=ceiling.backend,
            room=room,
            limit_tokens=self.facts.trained_context_tokens,
        )
        return variant.largest_window(1) or 0


def is_close(predicted_bytes: int, used_bytes: int) -> bool:
    """Within 256 MiB or 2 %."""
    return abs(predicted_bytes - used_bytes) <= max(USE_BYTES, used_bytes * USE_PERCENT / 100)


def template(policy: PlanPolicy, draft_cache: CacheType) -> Launch:
    """A launch as it was measured, its context left open."""
    return Launch(
        context_tokens=0,
        parallel=1,
        cache_type_k=CacheType.Q8_0,
        cache_type_v=CacheType.Q8_0,
        batch_tokens=policy.batch_tokens,
        micro_batch_tokens=policy.micro_batch_tokens,
        context_checkpoints=policy.context_checkpoints,
        prompt_cache_mib=policy.prompt_cache_mib,
        draft=Draft(policy.draft_tokens, draft_cache, draft_cache),
    )


@cache
def published() -> Published:
    """The document of ``tests/data``."""
    document = json.loads(DATA.read_text(encoding="utf-8"))
    file, card = document["file"], document["card"]
    uses = [
        Use(
            Backend(row["backend"]),
            CacheType(row["draft_cache"]),
            row["context_tokens"],
            row["used_mib"] * MIB,
        )
        for row in document["uses"]
    ]
    fitted = uses.pop(document["fitted_with"])
    return Published(
        facts=_of_size(facts_of(file["dimensions"]), file["bytes"] - file["metadata_bytes"]),
        total_bytes=named_profile(card["profile"]).vram_mib * MIB,
        driver_bytes=card["driver_reserved_mib"] * MIB,
        fitted=fitted,
        predicted=tuple(uses),
        ceilings=tuple(
            Ceiling(
                Backend(row["backend"]),
                CacheType(row["draft_cache"]),
                row["largest_ran_tokens"],
                row["smallest_died_tokens"],
            )
            for row in document["ceilings"]
        ),
    )


def _of_size(facts: CheckpointFacts, weight_bytes: int) -> CheckpointFacts:
    """The same model in a file of another size, every dense feed-forward network larger or smaller by one factor."""
    dense = sum(layer.weights.feed_forward.stored for layer in facts.layers)
    factor = 1 + Fraction(weight_bytes - facts.weight_bytes, dense)
    layers = tuple(
        replace(
            layer,
            weights=replace(layer.weights, feed_forward=_scaled(layer.weights.feed_forward, factor)),
        )
        for layer in facts.layers
    )
    return replace(facts, layers=layers)


def _scaled(size: WeightBytes, factor: Fraction) -> WeightBytes:
    return WeightBytes(
        stored=round(size.stored * factor),
        host=round(size.host * factor),
        cuda=round(size.cuda * factor),
        vulkan=round(size.vulkan * factor),
        largest=round(size.largest * factor),
    )
