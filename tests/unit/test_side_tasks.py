"""Tasks beside the writer: when they begin, what becomes of those that fail, and how they are ended."""

from __future__ import annotations

import asyncio

import pytest

from lllm3090d.serving.side_tasks import SideTasks
from tests.fakes.simulated_loop import simulate

pytestmark = pytest.mark.unit


def test_what_is_spawned_begins_only_when_the_caller_lets_go() -> None:
    done: list[str] = []

    async def work() -> None:
        done.append("worked")

    async def scenario() -> None:
        task = SideTasks(lambda _: None).spawn(work())
        done.append("spawned")
        await task

    simulate(scenario())
    assert done == ["spawned", "worked"]


def test_each_failure_is_told_and_cancelling_is_none() -> None:
    failures: list[BaseException] = []
    unexpected = ValueError("nobody caught this")

    async def fail() -> None:
        raise unexpected

    async def scenario() -> None:
        tasks = SideTasks(failures.append)
        tasks.spawn(fail())
        tasks.spawn(asyncio.sleep(1.0))
        tasks.spawn(asyncio.sleep(1.0)).cancel()
        await tasks.ended()

    simulate(scenario())
    assert failures == [unexpected]


def test_all_are_cancelled_and_waited_for_however_they_end() -> None:
    ended: list[str] = []

    async def work(name: str, fails: bool) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(1.0)
            ended.append(name)
            if fails:
                raise ValueError(name)

    async def scenario() -> None:
        failures: list[BaseException] = []
        tasks = SideTasks(failures.append)
        tasks.spawn(work("a", False))
        tasks.spawn(work("b", True))
        await asyncio.sleep(0)
        tasks.cancel()
        await tasks.ended()
        assert [str(each) for each in failures] == ["b"]
        tasks.cancel()
        await tasks.ended()  # nobody is left

    simulate(scenario())
    assert ended == ["a", "b"]
