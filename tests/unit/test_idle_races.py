"""Requests at the moment in which their model goes because nobody has used it: each is answered."""

from __future__ import annotations

import asyncio

import pytest

from tests.fakes.idle_world import IdleWorld
from tests.fakes.simulated_loop import simulate

pytestmark = pytest.mark.unit

ROUNDS = 1000
TTL_S = 5.0
# Two have room beside each other; of the third only what is idle makes room.
MODELS = {"aster": 9.0, "birch": 9.0, "cedar": 9.0}


async def rounds(world: IdleWorld, count: int) -> int:
    """Requests come within an unload, from the look that decides on it to the end of the next load; how many."""
    chance, asked = world.random, 0

    async def ask(name: str, after_s: float) -> None:
        if world.looking and chance.random() < 0.3:
            await world.end_of_look()
        else:
            await asyncio.sleep(after_s)
        keep_alive_s = chance.choice([None, None, 0.0, TTL_S])
        await world.request(name, chance.choice([0.0, 0.001, chance.uniform(0.0, 0.03), 1.0]), keep_alive_s)

    for _ in range(count):
        due = await world.until_due(3 * TTL_S)
        width_s = chance.choice([0.0, 0.01, 0.02, 0.05, 0.2])
        names = chance.choices([*due * 4, *sorted(MODELS)], k=chance.choice([1, 1, 2, 5]))
        async with asyncio.timeout(600), asyncio.TaskGroup() as group:
            for name in names:
                group.create_task(ask(name, chance.uniform(0.0, width_s)))
        asked += len(names)
    return asked


def test_a_thousand_unloads_are_met_by_requests_and_every_one_is_answered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> tuple[IdleWorld, int]:
        world = IdleWorld(MODELS, 7, TTL_S)
        try:
            asked = await rounds(world, ROUNDS)
            await asyncio.sleep(10 * TTL_S)  # then nobody asks any more
        finally:
            await world.close()
        return world, asked

    world, asked = simulate(scenario())
    assert sum(world.met.values()) == asked > ROUNDS
    assert world.evictions > ROUNDS / 2
    for state in (None, "looked at", "stopping", "releasing", "starting", "loading"):
        assert world.met[state] > ROUNDS / 50, world.met
    assert not world.scheduler.instances and not world.scheduler.pending
    assert not list(world.scheduler.ledger)
    assert [each.getMessage() for each in caplog.records] == []
