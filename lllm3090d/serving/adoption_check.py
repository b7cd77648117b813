"""What is to become an instance is looked through before: what is wrong with a unit is found here, not later. Pure."""

from __future__ import annotations

from lllm3090d.serving.events import UnitAdopted
from lllm3090d.serving.load_watch import load_cap_s
from lllm3090d.serving.plausible import MOST, oddity, round_trip


def check(event: UnitAdopted) -> None:
    """Raises ValueError, or what arithmetic raises, where an adoption could not be carried out."""
    shares = event.shares
    if not shares:
        raise ValueError("it has no share of any memory")
    if len({each.where for each in shares}) < len(shares):
        raise ValueError("it has two shares of one memory")
    for what in (event.record, shares, event.measured, event.drain):
        if odd := oddity(what):
            raise ValueError(f"it holds {odd}")
    sizes = [item.bytes for each in shares for item in each.items]
    if min((*sizes, *event.measured.values()), default=0) < 0 or sum(sizes) > MOST:
        raise ValueError("its price is none that a machine can hold")
    round_trip(event.record)
    event.record.plan()
    load_cap_s(event.record.size_bytes)
