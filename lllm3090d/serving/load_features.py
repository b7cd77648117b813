"""What a load may ask of its engine on this machine's cards. Pure."""

from __future__ import annotations

from lllm3090d.engines.arguments import features
from lllm3090d.gpus.profiles import profile_of
from lllm3090d.planning.request import Features
from lllm3090d.planning.speeds import predicting
from lllm3090d.planning.units import MIB
from lllm3090d.serving.events import LoadRequested, Observation


def load_features(event: LoadRequested, observation: Observation) -> Features:
    """What the engine of a load offers, with speeds of the very file on the main card.

    Args:
        event: the load.
        observation: the cards; the main one need not be readable.
    """
    card, reading = observation.card, observation.main.reading
    offered = features(event.capabilities, card, observation.host)
    if offered.tier is None:  # speeds are for a tier alone
        return offered
    total_bytes = card.total_bytes if reading is None else reading.total_bytes
    return predicting(
        offered, event.speeds, profile_of(card.name, total_bytes // MIB, card.compute_capability)
    )
