"""What a checkpoint has, in single words. Pure."""

from __future__ import annotations

import enum

from lllm3090d.checkpoints.facts import CheckpointFacts
from lllm3090d.checkpoints.header import GgufHeader


class Badge(enum.StrEnum):
    """One thing a checkpoint is or has."""

    DENSE = "dense"  # every weight computes every token
    MOE = "moe"  # some experts compute a token
    MTP = "mtp"  # it can draft for itself: blocks for multi-token prediction that the engine loads
    VISION = "vision"  # it sees, with the projector beside it
    AUDIO = "audio"  # it hears, with the projector beside it
    TEMPLATE = "template"  # its file has a chat template


def model_badges(facts: CheckpointFacts, projector: GgufHeader | None = None) -> tuple[Badge, ...]:
    """The badges of a model, in the order of :class:`Badge`; ``projector`` is that of its companion."""
    has_experts = any(layer.experts_used for layer in facts.layers)
    found = {Badge.MOE if has_experts else Badge.DENSE}
    if facts.has_mtp:
        found.add(Badge.MTP)
    if facts.has_chat_template:
        found.add(Badge.TEMPLATE)
    if projector is not None:
        found.update(projector_badges(projector))
    return tuple(badge for badge in Badge if badge in found)


def projector_badges(header: GgufHeader) -> tuple[Badge, ...]:
    """What a projector lets a model do. Older files, all of them for images, do not say."""
    sees, hears = (header.metadata.get(f"clip.has_{sense}_encoder") for sense in ("vision", "audio"))
    found = (Badge.VISION,) if sees or (sees is None and not hears) else ()
    return (*found, Badge.AUDIO) if hears else found
