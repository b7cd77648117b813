"""Where neither room nor another launch alone is enough: who is to leave, and what fits then."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import Any

import pytest

from lllm3090d.planning.cache import CacheType
from lllm3090d.planning.request import Offload, PlanRequest
from lllm3090d.planning.units import MIB
from lllm3090d.serving import refusals
from lllm3090d.serving.observation import Stranger
from tests.unit.plans import planner_of
from tests.unit.refusal_scenes import Desk, Ours
from tests.unit.test_refusal_page import commands_of, request_of

pytestmark = pytest.mark.unit

F16 = {"cache_type_k": CacheType.F16, "cache_type_v": CacheType.F16}


def asking(context_tokens: int, **more: Any) -> PlanRequest:
    return PlanRequest(context_tokens, 4, offload=Offload.RESIDENT, **(F16 | more))


IDLE = (Ours("gemma", 12_000), Ours("phi", 10_000))
ONE_BUSY = (Ours("gemma", 12_000), Ours("phi", 10_000, idle_s=None))
GAME = Stranger(5, "game", "anna", 20_000 * MIB)


def combined(desk: Desk) -> list[dict[str, Any]]:
    return [each for each in desk.refusal().details["remedies"] if each["kind"] == "combined"]


@pytest.mark.parametrize(
    ("desk", "texts"),
    [
        (  # too big for the empty card as asked, and nothing at all fits in what is left of it now
            Desk(ours=IDLE, request=asking(131_072)),
            [
                "Unload phi (9.8 GiB, idle 14 min) and unload gemma (11.7 GiB, idle 14 min); then a q8_0 cache instead"
                " of f16 fits as asked (--cache-type q8_0)",
                "Unload phi (9.8 GiB, idle 14 min) and unload gemma (11.7 GiB, idle 14 min); then a context of 126,976"
                " tokens instead of 131,072 fits (--context 126976)",
            ],
        ),
        (  # the busy one is left in peace
            Desk(ours=ONE_BUSY, request=asking(160_000)),
            [
                "Unload gemma (11.7 GiB, idle 14 min); then a q8_0 cache instead of f16 fits 106,496 tokens of context"
                " (--cache-type q8_0 --context 106496)",
                "Unload gemma (11.7 GiB, idle 14 min); then a context of 57,344 tokens instead of 160,768 fits"
                " (--context 57344)",
            ],
        ),
    ],
)
def test_carried_out_it_fits_and_no_one_has_left_for_nothing(desk: Desk, texts: list[str]) -> None:
    error, found = desk.refusal(), combined(desk)
    assert [each["text"] for each in found] == texts
    assert "Choose a smaller model" not in (error.hint or "")
    for remedy in found:
        assert remedy["verified"] and remedy["options"] is None
        *unloads, load = remedy["command"].split(" && ")
        names = [shlex.split(each)[-1] for each in unloads]
        changed = replace(desk, request=replace(request_of(shlex.split(load)), offload=Offload.RESIDENT))
        assert changed.without(names).fits
        for name in names:
            assert not changed.without(set(names) - {name}).fits
        gain = sum(each.mib * MIB for each in desk.ours if each.name in names)
        assert remedy["gain_bytes"] == gain
    assert all(words[0] == "lllm3090ctl" for words in commands_of(error))


def test_what_is_easier_is_offered_alone() -> None:
    """Who leaves makes room for what was asked for; or a smaller launch fits without anybody leaving."""
    assert combined(Desk(ours=IDLE, request=asking(40_960))) == []
    fits_smaller = Desk(ours=(Ours("phi", 10_000),), request=asking(131_072))
    assert {each["kind"] for each in fits_smaller.refusal().details["remedies"]} >= {"context", "cache-type"}
    assert combined(fits_smaller) == []


def test_where_others_suffice_nobody_costly_is_asked_to_leave_for_less() -> None:
    """A program of another user makes room for all of it; for a part of it nobody but idle models would go."""
    desk = Desk(strangers=(GAME,), ours=(Ours("phi", 1000, idle_s=None),), request=asking(40_960))
    assert [each["kind"] for each in desk.refusal().details["remedies"]] == ["offload", "others"]
    alone = Desk(strangers=(GAME,), request=asking(131_072))
    (first, _) = combined(alone)  # nothing else is to be had
    assert first["text"].startswith("Ask anna to close game (19.5 GiB, pid 5); then a q8_0 cache")
    assert first["command"] == shlex.join(shlex.split(first["command"]))
    assert first["command"].startswith("lllm3090ctl load qwen3-8b ")


def test_a_model_that_fits_on_no_card_is_refused_without_guesses() -> None:
    desk = Desk(ours=(Ours("gemma", 12_000),), model="glm-4.5-air", request=asking(8192))
    assert {each["kind"] for each in desk.refusal().details["remedies"]} <= {"offload", "larger-card"}


def test_more_room_is_asked_of_the_planner_itself() -> None:
    planner = planner_of("qwen3-8b", asking(131_072), room=2000 * MIB)
    roomier = refusals.in_more_room(planner)
    assert roomier is not None
    refused = roomier.refusal(20_000 * MIB)
    assert refused is not None and refused.details["fits_with_q8_0"] is True
    assert roomier.serves({"cache_type_k": CacheType.Q8_0, "cache_type_v": CacheType.Q8_0}, 20_000 * MIB)
    assert not roomier.serves({}, 20_000 * MIB)
    assert roomier.refusal(40_000 * MIB) is None
