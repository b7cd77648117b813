"""A load before it is with the writer: which card it names, and what becomes of it when it is given up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.readings import Card, CardKind
from lllm3090d.serving.load_lookup import LoadLookup, card_named
from lllm3090d.serving.plan_requests import LoadWish
from tests.fakes.scheduler_world import World
from tests.fakes.simulated_loop import simulate

pytestmark = pytest.mark.unit

CARDS = (
    Card(CardKind.NVIDIA, "GPU-AB12", "RTX 3090", "580.95.05", 24 << 30, pci_address="0000:01:00.0"),
    Card(CardKind.NVIDIA, "GPU-CD34", "RTX 3060", "580.95.05", 12 << 30, pci_address="0000:0a:00.0"),
)


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (None, None),
        ("0", "GPU-AB12"),
        ("1", "GPU-CD34"),
        ("gpu-cd34", "GPU-CD34"),
        ("GPU-AB12", "GPU-AB12"),
        ("0000:0a:00.0", "GPU-CD34"),
        ("00000000:0A:00.0", "GPU-CD34"),
    ],
)
def test_a_card_by_its_uuid_address_or_number(wanted: str | None, found: str | None) -> None:
    assert card_named(wanted, CARDS) == found


@pytest.mark.parametrize("wanted", ["2", "-1", "", "GPU-EF56", "GPU-AB1", "0000:0b:00.0"])
def test_one_that_is_not_there_is_refused(wanted: str) -> None:
    with pytest.raises(LlmError) as refused:
        card_named(wanted, CARDS)
    assert refused.value.code is ErrorCode.INVALID_REQUEST


class Desk:
    """A look-up that lasts until it is let go, and then finds nothing."""

    def __init__(self) -> None:
        self.goes_on = asyncio.Event()
        self.withdrawn: list[str] = []
        self.lookup = LoadLookup(
            lookup=cast(Any, SimpleNamespace(find=self.find)),
            offers=cast(Any, SimpleNamespace(withdraw=self.withdrawn.append)),
            scheduler=World().scheduler,
            observer=cast(Any, None),
            log_keeper=cast(Any, None),
            environment=cast(Any, None),
            settings=cast(Any, None),
        )

    async def find(self, name: str) -> None:
        await self.goes_on.wait()
        raise LlmError(ErrorCode.UNKNOWN_MODEL, f"there is no {name}")


@pytest.mark.parametrize(
    ("give_up", "withdrawn"),
    [
        (lambda lookup: lookup.withdraw("t"), ["t"]),
        (lambda lookup: lookup.withdraw("another"), []),
        (lambda lookup: lookup.refuse_all(), []),
    ],
    ids=["withdrawn", "another one withdrawn", "all refused"],
)
def test_it_is_known_while_it_is_looked_up_and_its_own_failure_goes_before(
    give_up: Callable[[LoadLookup], None], withdrawn: list[str]
) -> None:
    async def scenario() -> None:
        desk = Desk()
        assert "t" not in desk.lookup
        looking = asyncio.ensure_future(desk.lookup.event("t", "alpha", LoadWish()))
        await asyncio.sleep(0)
        assert "t" in desk.lookup
        give_up(desk.lookup)
        assert desk.withdrawn == withdrawn
        desk.goes_on.set()
        with pytest.raises(LlmError) as failed:
            await looking
        assert failed.value.code is ErrorCode.UNKNOWN_MODEL
        assert "t" not in desk.lookup

    simulate(scenario())
