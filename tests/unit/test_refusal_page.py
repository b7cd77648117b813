"""Refusals for lack of memory: code, facts, sentences and commands."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lllm3090ctl.cli import cli
from lllm3090ctl.plan_options import plan_body
from lllm3090d.checkpoints.facts import Purpose
from lllm3090d.engines.capabilities import Backend
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.readings import CardKind
from lllm3090d.planning.cache import CacheType
from lllm3090d.planning.devices import DeviceRoom
from lllm3090d.planning.request import (
    Drafting,
    Offload,
    PlanRequest,
    ProjectorPlace,
    Room,
    RopeScaling,
    SlotPolicy,
)
from lllm3090d.planning.reserves import host_budget
from lllm3090d.planning.smallest_card import SmallestCard
from lllm3090d.planning.units import MIB
from lllm3090d.serving import refusals
from lllm3090d.serving.commands import NOBODY, Wish, asking_again
from lllm3090d.serving.launch_remedies import headless, launch_remedies, nothing_helps
from lllm3090d.serving.ledger import ReservationState
from lllm3090d.serving.observation import Stranger
from lllm3090d.serving.plan_requests import plan_request
from lllm3090d.wire import PlanOptions
from tests.unit.plans import LLAMA_8B, QWEN3_8B, need_of, planner_of, refusal
from tests.unit.refusal_scenes import BESIDE_PINNED, BESIDE_STRANGERS, TOO_BIG, Desk, Ours

pytestmark = pytest.mark.unit

REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "errors.md"
SITUATIONS = (TOO_BIG, BESIDE_STRANGERS, BESIDE_PINNED)
every_situation = pytest.mark.parametrize("desk", SITUATIONS, ids=("card", "strangers", "ours"))


def commands_of(error: LlmError) -> list[list[str]]:
    """All commands, as words."""
    return [
        shlex.split(part)
        for remedy in error.details["remedies"]
        for part in remedy["command"].split(" && ")
        if part
    ]


def request_of(words: list[str]) -> PlanRequest:
    """What the client makes of a command, as the daemon then has it."""
    assert words[0] == "lllm3090ctl"
    command = cli.commands[words[1]]
    given_options = command.make_context(words[1], words[2:]).params
    options = {key: value for key, value in given_options.items() if key in PlanOptions.model_fields}
    return plan_request(PlanOptions.model_validate(plan_body("m", options)))


def never(extra_bytes: int) -> bool:
    """No room is enough."""
    return False


# --- the three situations --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("desk", "cause", "first"),
    [
        (TOO_BIG, "card", "gemma-3-27b is too big for the card as asked, even with nothing else on it."),
        (
            BESIDE_STRANGERS,
            "strangers",
            "gemma-3-27b does not fit on the card now because of other programs: blender of anna (pid 77) holds"
            " 3,072.0 MiB, steam (pid 1234) holds 1,946.0 MiB and gnome-shell (pid 901) holds 420.0 MiB.",
        ),
        (
            BESIDE_PINNED,
            "ours",
            "qwen3-8b does not fit on the card now because of models that are loaded: llama-3.1-8b (11,900.0 MiB,"
            " pinned, idle 14 min), qwen2.5-7b (6,350.0 MiB, busy) and phi-3.5-mini (1,100.0 MiB, not given back"
            " for 40 s).",
        ),
        (Desk(desktop=True, model="gemma-3-27b", request=PlanRequest(114_688, 1)), "desktop", None),
        (
            Desk(strangers=(Stranger(5, "game", "", 10_000 * MIB),), ours=(Ours("a", 10_000),)),
            "strangers",
            None,
        ),
        (
            Desk(
                strangers=(Stranger(5, "game", "", 4000 * MIB),),
                ours=(Ours("a", 4000, pinned=True),),
                model="gemma-3-27b",
                request=PlanRequest(100_000, 1),
            ),
            "both",
            None,
        ),
    ],
)
def test_the_situations_are_told_apart(desk: Desk, cause: str, first: str | None) -> None:
    error = desk.refusal()
    assert error.code is ErrorCode.INSUFFICIENT_VRAM
    assert error.details["cause"] == cause
    assert error.message.startswith(error.details["summary"] + " ")
    assert first is None or error.details["summary"] == first
    # The arithmetic of the planner follows.
    assert " needs " in error.message and " MiB are missing." in error.message


@every_situation
def test_what_a_program_finds(desk: Desk) -> None:
    details = json.loads(json.dumps(desk.refusal().problem()))["details"]
    assert sum(line["bytes"] for line in details["needed"]) == details["needed_bytes"]
    assert sum(line["bytes"] for line in details["budget"]) == details["grantable_bytes"]
    assert details["needed_bytes"] - details["grantable_bytes"] == details["missing_bytes"] > 0
    assert [each["pid"] for each in details["strangers"]] == [each.pid for each in desk.strangers]
    assert [each["bytes"] for each in details["strangers"]] == [each.used_bytes for each in desk.strangers]
    held = {each["name"]: each for each in details["ours"] + details["quarantine"]}
    assert held.keys() == {each.name for each in desk.ours}
    for each in desk.ours:
        assert held[each.name]["bytes"] == each.mib * MIB
        if each.state is ReservationState.CONFIRMED:
            told = held[each.name]
            assert (told["idle_s"], told["pinned"]) == (each.idle_s, each.pinned)
            assert told["busy"] is (each.idle_s is None)
    assert [each["name"] for each in details["quarantine"]] == [
        each.name for each in desk.ours if each.state is ReservationState.QUARANTINED
    ]
    assert (details["card_kind"], details["verdict"]) == ("nvidia", "too-big")


@every_situation
def test_every_remedy_really_makes_it_fit(desk: Desk) -> None:
    """Carried out: who is to go is gone, and what is to be asked is asked of the same card."""
    error = desk.refusal()
    assert error.details["remedies"]
    for remedy in error.details["remedies"]:
        if not remedy["verified"]:
            assert remedy["kind"] == "larger-card"
        elif remedy["gain_bytes"]:
            everybody = [stranger.name for stranger in desk.strangers] + [model.name for model in desk.ours]
            names = {name for name in everybody if name in remedy["text"]}
            assert not desk.fits
            assert desk.without(names).fits
        else:
            changed = request_of(shlex.split(remedy["command"]))
            assert replace(desk, request=changed).fits


@every_situation
def test_the_hint_has_all_remedies(desk: Desk) -> None:
    error = desk.refusal()
    for remedy in error.details["remedies"]:
        assert remedy["text"] in (error.hint or "")
        assert remedy["command"] in (error.hint or "")


@every_situation
def test_commands_are_commands_of_the_client(desk: Desk) -> None:
    commands = commands_of(desk.refusal())
    assert commands
    for words in commands:
        if words[0] == "lllm3090ctl":
            try:
                cli.commands[words[1]].make_context(words[1], words[2:])
            except click.ClickException as error:
                pytest.fail(f"{shlex.join(words)}: {error.message}")
        else:
            assert words[0] in {"kill", "nvidia-smi", "systemctl"}


# --- which memory ----------------------------------------------------------------------------------------------------


def test_host_memory_beside_a_card_has_the_code_of_host_memory() -> None:
    """And closing programs on the card is no remedy for it."""
    asked = PlanRequest(8192, 1, gpu_layers=10)
    room = Room(20_000 * MIB, 100 * MIB)
    planner = planner_of(LLAMA_8B, asked, room=room)
    error = refusal(LLAMA_8B, asked, room=room)
    assert error.details["place"] == "host"
    desk = Desk(strangers=(Stranger(5, "game", "", 4000 * MIB),), ours=(Ours("a", 100),))
    host = host_budget(1 << 33, 1 << 31, 0)
    told = refusals.refuse(
        error,
        budget=desk.budget,
        card=desk.state,
        reservations=desk.reservations,
        instances=desk.holders,
        fits=refusals.fits_with_more(planner),
        asked=Wish(LLAMA_8B, asked),
        host=host,
    )
    assert told.code is ErrorCode.INSUFFICIENT_MEMORY
    assert told.details["cause"] == "host"
    assert told.details["summary"] == (
        "llama-3.1-8b does not fit: the host memory that it needs beside the card is not free."
    )
    assert [line["name"] for line in told.details["budget"]] == [line.name for line in host.lines]
    assert sum(line["bytes"] for line in told.details["needed"]) == error.details["needed_bytes"]
    assert not {"close", "unload"} & {remedy["kind"] for remedy in told.details["remedies"]}


def test_host_memory_in_place_of_a_card_keeps_its_code() -> None:
    error = refusal(QWEN3_8B, PlanRequest(8192, 1), room=1000 * MIB, backend=Backend.CPU)
    told = refusals.with_budget(error, Desk().budget, CardKind.CPU, (), fits=never)
    assert told.code is ErrorCode.INSUFFICIENT_MEMORY
    assert told.details["summary"] == (
        "The model is too big for this machine as asked, even with nothing else on it."
    )


@pytest.mark.parametrize("kind", [kind for kind in CardKind if kind is not CardKind.CPU])
def test_every_kind_of_card_has_the_code_of_a_card(kind: CardKind) -> None:
    error = refusal(QWEN3_8B, PlanRequest(8192, 1), room=1000 * MIB)
    assert refusals.with_budget(error, Desk().budget, kind, ()).code is ErrorCode.INSUFFICIENT_VRAM


def test_both_codes_are_one_kind_of_failure() -> None:
    vram, memory = (
        LlmError(code, "").kind for code in (ErrorCode.INSUFFICIENT_VRAM, ErrorCode.INSUFFICIENT_MEMORY)
    )
    assert (vram.http_status, vram.exit_status) == (memory.http_status, memory.exit_status) == (507, 5)


def test_more_room_on_one_of_several_cards() -> None:
    """The first, where nobody names one; the other is as it was."""
    asked = PlanRequest(8192, 1)
    need = need_of(QWEN3_8B, asked)
    cards = (DeviceRoom(need, need - MIB, "CUDA0"), DeviceRoom(need, 0, "CUDA1"))
    planner = planner_of(QWEN3_8B, asked, room=Room(need - MIB, cards=cards), backend=Backend.CUDA)
    for device, extra, fits in ((None, MIB, True), ("CUDA0", MIB, True), ("CUDA1", MIB, False)):
        assert refusals.fits_with_more(planner, device)(extra) is fits
    assert not refusals.fits_with_more(planner)(0)


def test_what_no_memory_helps_does_not_fit() -> None:
    impossible = planner_of(QWEN3_8B, PlanRequest(1 << 20, 1), room=1)
    assert not refusals.fits_with_more(impossible)(1 << 40)


# --- no remedy, or other words ---------------------------------------------------------------------------------------


def test_where_nothing_helps_it_says_so() -> None:
    error = refusal(QWEN3_8B, PlanRequest(1024, 1), room=Room(500 * MIB, 500 * MIB))
    told = refusals.with_budget(error, Desk().budget, CardKind.NVIDIA, (), fits=never)
    assert told.details["remedies"] == []
    assert told.hint == nothing_helps(error.details)
    assert (
        "Choose a smaller model." in told.hint and f"{error.details['smallest_bytes'] // MIB:,}" in told.hint
    )
    smallest = SmallestCard(40_960, 30 << 30, 0)
    advised = refusals.with_budget(error, Desk().budget, CardKind.NVIDIA, (), fits=never, smallest=smallest)
    assert advised.hint == f"{told.hint} For an agent it needs a card of 30 GiB."
    assert (
        nothing_helps({}) == "Nothing that could be changed here would make it fit: choose a smaller model."
    )


def test_without_a_planner_what_is_missing_would_be_enough() -> None:
    """As for a plan that cannot be changed."""
    desk = Desk(strangers=(Stranger(5, "game", "", 4000 * MIB),), ours=(Ours("a", 2000),))
    for missing_mib, cause in ((1500, "strangers"), (4000, "strangers"), (6000, "both"), (6001, "card")):
        error = LlmError(ErrorCode.INSUFFICIENT_MEMORY, "No.", missing_bytes=missing_mib * MIB)
        told = refusals.with_budget(error, desk.budget, CardKind.NVIDIA, desk.reservations)
        assert told.details["cause"] == cause


def test_a_refusal_that_knows_no_sizes_keeps_its_hint() -> None:
    error = LlmError(
        ErrorCode.INSUFFICIENT_MEMORY, "6 slots do not fit.", hint="At most 2 slots fit: --parallel 2."
    )
    told = refusals.with_budget(error, Desk().budget, CardKind.NVIDIA, ())
    assert told.hint == "At most 2 slots fit: --parallel 2."
    assert told.details["needed"] == []


def test_a_desktop_that_is_only_thought_of_is_not_ended() -> None:
    desk = Desk(desktop=True)
    error = refusal(QWEN3_8B, PlanRequest(1024, 1), room=500 * MIB)
    told = refusals.with_budget(
        error, desk.budget, CardKind.NVIDIA, (), fits=lambda extra: extra >= MIB, more=[headless()]
    )
    assert told.details["cause"] == "desktop"
    assert (told.hint or "").startswith("Without a desktop (--headless) it would fit as asked.")
    assert "end-desktop" not in [remedy["kind"] for remedy in told.details["remedies"]]


def test_advice_on_a_card_only_where_this_one_is_too_small() -> None:
    kinds = {remedy["kind"] for remedy in BESIDE_STRANGERS.refusal().details["remedies"]}
    assert "larger-card" not in kinds
    huge = replace(TOO_BIG, model="glm-4.5-air", request=PlanRequest(8192, 1))
    assert huge.refusal().details["remedies"][-1]["kind"] == "larger-card"
    assert "For an agent it needs a card of" in (huge.refusal().hint or "")


# --- changes of the launch -------------------------------------------------------------------------------------------

ASKED = Wish("a model", PlanRequest(160_000, 4))


@pytest.mark.parametrize(
    ("details", "text", "command"),
    [
        (
            {"largest_context_tokens": 98_304, "context_tokens": 160_000},
            "A context of 98,304 tokens instead of 160,000 fits (--context 98304)",
            "lllm3090ctl load 'a model' --context 98304 --parallel 4",
        ),
        (
            {"largest_parallel": 1, "parallel": 4},
            "1 slot instead of 4 fits (--parallel 1)",
            "lllm3090ctl load 'a model' --context 160000 --parallel 1",
        ),
        (
            {"largest_parallel": 2, "parallel": 4, "context_tokens_with_largest_parallel": 2048},
            "2 slots instead of 4 fit with 2,048 tokens of context (--parallel 2 --context 2048)",
            "lllm3090ctl load 'a model' --context 2048 --parallel 2",
        ),
        (
            {"fits_with_q8_0": True, "cache_type_k": "f16", "cache_type_v": "f16"},
            "A q8_0 cache instead of f16 fits as asked (--cache-type q8_0)",
            "lllm3090ctl load 'a model' --context 160000 --parallel 4 --cache-type q8_0",
        ),
        (
            {
                "fits_with_q8_0": False,
                "largest_context_tokens_with_q8_0": 4096,
                "cache_type_k": "f16",
                "cache_type_v": "q8_0",
            },
            "A q8_0 cache instead of f16 and q8_0 fits 4,096 tokens of context (--cache-type q8_0 --context 4096)",
            "lllm3090ctl load 'a model' --context 4096 --parallel 4 --cache-type q8_0",
        ),
        (
            {"fits_without_drafting": True},
            "Without drafting it fits as asked",
            "lllm3090ctl load 'a model' --context 160000 --parallel 4 --draft off",
        ),
        (
            {"fits_with_projector_on_host": True},
            "With the projector in host memory it fits as asked",
            "lllm3090ctl load 'a model' --context 160000 --parallel 4 --projector host",
        ),
        (
            {"fits_without_prompt_cache": True},
            "Without a prompt cache (setting prompt_cache_mib = 0) it fits as asked",
            "",
        ),
        (
            {"fits_with_offload": True},
            "With a part of the model in host memory, slower, it fits as asked",
            "lllm3090ctl load 'a model' --context 160000 --parallel 4 --offload allowed",
        ),
        (
            {"context_tokens_with_offload": 1024},
            "With a part of the model in host memory, slower, it fits with 1,024 tokens of context in 1 slot",
            "lllm3090ctl load 'a model' --context 1024 --parallel 1 --offload allowed",
        ),
    ],
)
def test_changes_of_the_launch_and_their_commands(details: dict[str, Any], text: str, command: str) -> None:
    (remedy,) = launch_remedies(details, ASKED, lambda changes: True)
    assert (remedy.text, remedy.command, remedy.gain_bytes, remedy.verified) == (text, command, 0, True)


def test_a_change_is_offered_only_where_the_planner_has_a_plan_for_it() -> None:
    """Of two changes that fit by the price, the one that serves."""
    details = {"largest_context_tokens": 1024, "fits_without_drafting": True}
    asked: list[Mapping[str, Any]] = []

    def serves(changes: Mapping[str, Any]) -> bool:
        asked.append(changes)
        return "drafting" in changes

    (remedy,) = launch_remedies(details, ASKED, serves)
    assert str(remedy.kind) == "drafting"
    assert asked == [{"context_tokens": 1024}, {"drafting": Drafting.OFF}]
    planner = planner_of(QWEN3_8B, PlanRequest(32_768, 1), room=8000 * MIB)
    serves_now = refusals.serves_changed(planner)
    assert serves_now({"context_tokens": 8192})
    assert not serves_now({})
    assert not serves_now({"context_tokens": 1 << 20})


def test_what_a_planner_offers_of_the_smallest_launch_is_told() -> None:
    """A launch that fits only in part on the card has its sizes in the details, not in the sentence alone."""
    error = refusal(QWEN3_8B, PlanRequest(40_960, 1), room=Room(1500 * MIB, 1 << 35))
    kinds = {str(each.kind) for each in launch_remedies(error.details, NOBODY, lambda changes: True)}
    assert "offload" in kinds


def test_there_is_no_command_for_what_cannot_be_asked_again() -> None:
    change = {"context_tokens": 1024}
    assert asking_again(NOBODY, change) == ""
    by_arguments = replace(ASKED, arguments=("-c", "160000"), stated=frozenset({"context_tokens"}))
    assert asking_again(by_arguments, change) == ""
    assert asking_again(by_arguments, {"parallel": 1}) == (
        "lllm3090ctl load 'a model' --context 160000 --parallel 1 -- -c 160000"
    )
    assert asking_again(ASKED, {"cache_type_k": CacheType.F16}) == ""  # one option stands for both
    elsewhere = replace(ASKED, verb="plan", more=("--vram", "8GiB"))
    assert asking_again(elsewhere, change) == (
        "lllm3090ctl plan 'a model' --vram 8GiB --context 1024 --parallel 4"
    )


def choices(values: type) -> st.SearchStrategy[Any]:
    """One of an enumeration, or nothing asked."""
    return st.none() | st.sampled_from(list(values))  # type: ignore[call-overload]  # only enumerations are given


FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "context_tokens": st.none() | st.integers(1, 1 << 28),
    "parallel": st.none() | st.integers(1, 256),
    "slot_policy": choices(SlotPolicy),
    "offload": choices(Offload),
    "gpu_layers": st.none() | st.integers(0, 10_000),
    "cpu_experts": st.none() | st.integers(0, 10_000),
    "cache_on_host": st.booleans(),
    "drafting": choices(Drafting),
    "draft_tokens": st.none() | st.integers(1, 64),
    "projector": choices(ProjectorPlace),
    "unified": st.booleans(),
    "swa_full": st.booleans(),
    "batch_tokens": st.none() | st.integers(32, 65_536),
    "micro_batch_tokens": st.none() | st.integers(32, 8192),
    "rope_scaling": choices(RopeScaling),
    "tiered": st.booleans(),
    "purpose": choices(Purpose),
}
REQUESTS = st.builds(PlanRequest, **FIELDS)


@given(REQUESTS, choices(CacheType), st.sampled_from(["load", "plan"]))
def test_a_command_asks_for_the_same_again(request: PlanRequest, cache: CacheType | None, verb: str) -> None:
    """Written and read back by the client, a request is what it was, whatever was asked for."""
    asked = replace(request, cache_type_k=cache, cache_type_v=cache)
    words = shlex.split(asking_again(Wish("m", asked, verb=verb), {}))
    assert words[:3] == ["lllm3090ctl", verb, "m"]
    assert request_of(words) == asked


def test_every_field_of_a_request_is_tried() -> None:
    assert FIELDS.keys() | {"cache_type_k", "cache_type_v"} == {each.name for each in fields(PlanRequest)}


# --- the reference ---------------------------------------------------------------------------------------------------


def test_the_reference_has_the_details() -> None:
    """Every member that a refusal has beside the planner's own."""
    page = REFERENCE.read_text(encoding="utf-8").split("## A refusal for lack of memory", 1)[1]
    details = BESIDE_PINNED.refusal().details
    for name in (
        "cause",
        "summary",
        "needed",
        "budget",
        "ours",
        "quarantine",
        "strangers",
        "unlisted_bytes",
        "remedies",
    ):
        assert name in details
        assert f"| {name} |" in page
    for remedy in details["remedies"]:
        for name in remedy:
            assert f"`{name}`" in page
