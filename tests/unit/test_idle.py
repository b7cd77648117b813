"""For how long a model may stay without use."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace
from typing import Any

import pytest

from lllm3090d.serving.events import Activity
from lllm3090d.serving.idle import expired, keep_alive_s
from lllm3090d.serving.instance import InstanceState
from tests.fakes.scheduler_world import World

pytestmark = pytest.mark.unit


def instance(**more: Any) -> Any:
    known = {
        "name": "a",
        "run": "r",
        "state": InstanceState.READY,
        "busy": False,
        "leases": set(),
        "pinned": False,
        "last_used_s": 100.0,
        "ready_since_s": 50.0,
        "keep_alive_s": None,
    }
    return SimpleNamespace(**(known | more))


def goes(each: Any, now_s: float = 160.0, usual_s: float = 60.0, **named: float) -> bool:
    return bool(expired([each], now_s, usual_s, named))


def test_after_its_time_without_use_it_goes_and_says_why() -> None:
    (wanted,) = expired([instance()], 160.0, 60.0, {})
    assert (wanted.runs, wanted.reason, wanted.cause) == (("r",), "not used for 60 s", "idle")
    assert not goes(instance(), now_s=159.9)


@pytest.mark.parametrize(
    "more",
    [
        {"pinned": True},
        {"leases": {"x"}},
        {"busy": True},
        {"busy": None},
        {"state": InstanceState.STALLED},
        {"state": InstanceState.LOADING},
        {"state": InstanceState.STOPPING},
        {"keep_alive_s": math.inf},
        {"keep_alive_s": 61.0},
        {"last_used_s": None, "ready_since_s": None},
        {"last_used_s": None, "ready_since_s": 101.0},
    ],
)
def test_what_keeps_it(more: dict[str, Any]) -> None:
    assert not goes(instance(**more))


def test_whose_word_counts() -> None:
    assert not goes(instance(), usual_s=0)
    assert goes(instance(), usual_s=0, a=60)
    assert not goes(instance(), usual_s=60, a=0)
    assert goes(instance(keep_alive_s=0.0), usual_s=0)
    assert goes(instance(keep_alive_s=10.0), usual_s=0, a=1000)
    assert goes(instance(last_used_s=None), now_s=110.0)


@pytest.mark.parametrize("used", [True, False])
def test_what_the_look_itself_tells_counts(*, used: bool) -> None:
    """An engine that somebody asks directly: that it was used shows in the same look that finds its time over."""
    world = World()
    world.bring_up("a")
    world.look({"a": Activity(False, 100)}, after_s=1.0)
    world.now_s += 60.0
    (wanted,) = expired(world.scheduler.instances, world.now_s, 60.0, {})
    world.look({"a": Activity(False, 107 if used else 100)})
    world.do(wanted)
    assert world.get("a").state is (InstanceState.READY if used else InstanceState.STOPPING)


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        (300, 300.0),
        (1.5, 1.5),
        (0, 0.0),
        ("0", 0.0),
        ("5m", 300.0),
        (10**401, math.inf),
        (-(10**401), math.inf),
        ("1h30m", 5400.0),
        ("1.5h", 5400.0),
        ("250ms", 0.25),
        (" 10S ", 10.0),
        ("600", 600.0),
        (-1, math.inf),
        ("-1", math.inf),
        ("-1m", math.inf),
        (1e300, math.inf),
        ("inf", math.inf),
        ("nan", None),
        (True, None),
        (None, None),
        ("", None),
        ("soon", None),
        ("5 m", None),
        ("5mx", None),
        ("1m30s", 90.0),
        ("1m30", None),
        ([], None),
    ],
)
def test_what_clients_say(said: object, seconds: float | None) -> None:
    assert keep_alive_s(said) == seconds


def test_a_long_text_of_a_client_takes_no_time() -> None:
    """It may be a header of 32 KiB; a search with ways back took 20 s for one, and nobody else was answered."""
    began_s = time.process_time()
    for text in ("1" * 32_000 + "x", "1." * 16_000, "1m" * 16_000 + "x"):
        assert keep_alive_s(text) is None
    assert keep_alive_s("1" * 32_000 + "h") == math.inf
    assert time.process_time() - began_s < 2.0
