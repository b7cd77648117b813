"""What is done, from a seed alone: the same seed gives the same steps, whatever comes of them. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

# How many of each are in a deck. All decks hold every kind, so that even a short run has a chance of each.
WORK: Mapping[str, int] = {
    "load": 14,
    "stream": 9,
    "unload": 5,
    "plan": 1,
    "pin": 1,
    "unpin": 1,
    "reset": 2,
    "release": 1,
}
FAULTS: Mapping[str, int] = {
    "kill-daemon": 3,
    "kill-in-load": 2,
    "term-daemon": 1,
    "restart-daemon": 1,
    "stop-daemon": 1,
    "freeze-daemon": 1,
    "kill-engine": 2,
    "segv-engine": 1,
    "freeze-engine": 1,
    "stop-unit": 1,
    "restart-bus": 1,
    "reload-manager": 1,
    "reexec-manager": 1,
    "fill-disk": 1,
    "fail-nvml": 1,
    "lose-card": 1,
    "stranger": 2,
    "bad-starts": 1,
    "deaf-engines": 1,
    "late-memory": 1,
}
# Those that are large do not all fit beside each other, GiB.
MODELS: Mapping[str, float] = {"alpha": 12.0, "beta": 10.0, "gamma": 5.0, "delta": 2.0, "tiny": 0.5}
LONGEST_PAUSE_S = 1.4
AT_ONCE = 0.35  # share of steps that follow the one before without a pause
SETTLE_EVERY = 20  # steps, after which everything is let come to rest and compared strictly


@dataclass(frozen=True, slots=True)
class Step:
    """One step.

    Attributes:
        number: from 1.
        kind: of :data:`WORK`, :data:`FAULTS`, or ``settle``.
        model: whom it is about where it needs one.
        share: from 0 to below 1; which of those that are there, how large, in which way.
        lasts_s: how long it is so, of what lasts.
        pause_s: before the next one.
    """

    number: int
    kind: str
    model: str
    share: float
    lasts_s: float
    pause_s: float


def steps(seed: int) -> Iterator[Step]:
    """All steps of a seed, without an end."""
    chance = random.Random(seed)  # noqa: S311  # no secret
    number = 0
    # Something to disturb comes first.
    deck = ["load", "load", "stream"]
    while True:
        for kind in deck:
            number += 1
            yield Step(
                number=number,
                kind=kind,
                model=chance.choice(tuple(MODELS)),
                share=int(chance.random() * 10_000) / 10_000,  # rounding would make a 1 of some
                lasts_s=round(chance.uniform(0.3, 3.0), 3),
                pause_s=0.0
                if chance.random() < AT_ONCE
                else round(chance.uniform(0.02, LONGEST_PAUSE_S), 3),
            )
            if number % SETTLE_EVERY == 0:
                number += 1
                yield Step(number, "settle", "", 0.0, 0.0, 0.0)
        deck = [kind for each in (WORK, FAULTS) for kind, count in each.items() for _ in range(count)]
        chance.shuffle(deck)
