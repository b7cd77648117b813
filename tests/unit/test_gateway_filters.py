"""What the gateway changes of requests where an engine does not keep to rules for reasoning itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from lllm3090d.engines.tier_flags import ReasoningRules
from lllm3090d.errors import LlmError
from lllm3090d.gateway import filters
from lllm3090d.gateway.filters import CHANGED, ReasoningFilter, ReasoningOf, filtered, left_to_do, rules_of
from lllm3090d.gateway.reasoning import Reasoning
from lllm3090d.settings import Settings
from tests.fakes.gateway_world import Asked, FakeHouse, gateway_world

pytestmark = pytest.mark.unit

RULES = ReasoningRules(("low", "medium", "xhigh"), "medium", 24576)
EVERYTHING = ReasoningFilter(RULES)
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


def changed(path: str, document: Mapping[str, Any], wanted: ReasoningFilter = EVERYTHING) -> tuple[Any, str]:
    body = json.dumps(document).encode()
    done = filtered(body, path, wanted)
    assert done.changes or done.body is body  # what is not changed is not written anew
    return json.loads(done.body), ", ".join(done.changes)


@pytest.mark.parametrize(
    ("path", "sent", "goes_on", "told"),
    [
        (CHAT, {"reasoning_effort": "high"}, {"reasoning_effort": "medium"}, "reasoning_effort=high->medium"),
        (CHAT, {"reasoning_effort": "low"}, {"reasoning_effort": "low"}, ""),
        (CHAT, {"reasoning_effort": "High"}, {"reasoning_effort": "medium"}, "reasoning_effort=High->medium"),
        (CHAT, {"reasoning_effort": "none", "max_tokens": 9}, {"reasoning_effort": "none", "max_tokens": 9}, ""),
        (CHAT, {"reasoning_effort": None}, {"reasoning_effort": None}, ""),
        (CHAT, {"reasoning_effort": 3}, {"reasoning_effort": 3}, ""),
        (
            CHAT,
            {"chat_template_kwargs": {"reasoning_effort": "high", "x": 1}},
            {"chat_template_kwargs": {"reasoning_effort": "medium", "x": 1}},
            "chat_template_kwargs.reasoning_effort=high->medium",
        ),
        (CHAT, {"chat_template_kwargs": ["reasoning_effort"]}, {"chat_template_kwargs": ["reasoning_effort"]}, ""),
        (RESPONSES, {"reasoning": {"effort": "max"}}, {"reasoning": {"effort": "medium"}},
         "reasoning.effort=max->medium"),
        (RESPONSES, {"max_output_tokens": 300}, {"max_output_tokens": 24576}, "max_output_tokens=300->24576"),
        (RESPONSES, {"reasoning": {"effort": "none"}, "max_output_tokens": 9},
         {"reasoning": {"effort": "none"}, "max_output_tokens": 9}, ""),
        # The engine takes no effort from these members of Anthropic's API.
        (MESSAGES, {"output_config": {"effort": "high"}}, {"output_config": {"effort": "high"}}, ""),
        (MESSAGES, {"reasoning_effort": "high"}, {"reasoning_effort": "high"}, ""),
        (MESSAGES, {"max_tokens": 1024}, {"max_tokens": 24576}, "max_tokens=1024->24576"),
        (CHAT, {"max_completion_tokens": 1}, {"max_completion_tokens": 24576}, "max_completion_tokens=1->24576"),
        (CHAT, {"max_tokens": 24576}, {"max_tokens": 24576}, ""),
        (CHAT, {"max_tokens": -1, "n_predict": 0}, {"max_tokens": -1, "n_predict": 0}, ""),
        (CHAT, {"max_tokens": True}, {"max_tokens": True}, ""),
        (CHAT, {"max_tokens": "300"}, {"max_tokens": "300"}, ""),
        (CHAT, {"max_tokens": 9, "chat_template_kwargs": {"enable_thinking": False}},
         {"max_tokens": 9, "chat_template_kwargs": {"enable_thinking": False}}, ""),
        (CHAT, {"max_tokens": 9, "reasoning_budget_tokens": 0}, {"max_tokens": 9, "reasoning_budget_tokens": 0}, ""),
        ("/apply-template", {"reasoning_effort": "high", "max_tokens": 9},
         {"reasoning_effort": "medium", "max_tokens": 9}, "reasoning_effort=high->medium"),
    ],
)  # fmt: skip
def test_words_and_limits(path: str, sent: dict[str, Any], goes_on: dict[str, Any], told: str) -> None:
    assert changed(path, {"model": "m"} | sent) == ({"model": "m"} | goes_on, told)


def test_what_else_is_in_a_request_stays_as_it_is() -> None:
    sent = {
        "messages": [{"role": "user", "content": 'é\U0001f600 \\ " \n'}],
        "temperature": 0.1,
        "seed": 2**60,
    }
    goes_on, told = changed(CHAT, sent | {"reasoning_effort": "high"})
    assert goes_on == sent | {"reasoning_effort": "medium"} and told


def test_a_word_of_a_client_reaches_no_header_unless_it_is_one() -> None:
    _, told = changed(CHAT, {"reasoning_effort": "x\r\nset-cookie: a=b"})
    assert told == "reasoning_effort=?->medium"


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"null", b"\xff", b"[" * 100_000])
def test_what_is_no_object_goes_on_as_it_came(body: bytes) -> None:
    assert filtered(body, CHAT, EVERYTHING).body is body


def test_a_model_that_does_not_think_by_itself_keeps_its_limits() -> None:
    quiet = ReasoningFilter(RULES, thinks=False)
    assert changed(CHAT, {"max_tokens": 9}, quiet)[1] == ""
    asked = {"max_tokens": 9, "chat_template_kwargs": {"enable_thinking": True}}
    assert changed(CHAT, asked, quiet)[1] == "max_tokens=9->24576"


# --- never in both places --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "environment", "efforts", "floor"),
    [
        (("llama-server", "-m", "x"), {}, True, True),
        (("llama-server", "--reasoning-effort-allow", "low", "--reasoning-effort-fallback", "low"), {}, False, True),
        (("llama-server", "--reasoning-max-tokens-floor", "100"), {}, True, False),
        (("llama-server", "--reasoning-max-tokens-floor=100"), {}, True, False),
        (("llama-server",), {"LLAMA_ARG_REASONING_EFFORT_ALLOW": "low"}, False, True),
        (("llama-server",), {"LLAMA_ARG_REASONING_MAX_TOKENS_FLOOR": "1"}, True, False),
    ],
)  # fmt: skip
def test_what_the_engine_does_is_not_done_again(
    argv: tuple[str, ...], environment: dict[str, str], efforts: bool, floor: bool
) -> None:
    left = left_to_do(RULES, argv, environment)
    assert bool(left.rules.allowed_efforts) is efforts and bool(left.rules.tokens_floor) is floor
    document = {"reasoning_effort": "high", "max_tokens": 5}
    told = changed(CHAT, document, left)[1]
    assert ("reasoning_effort" in told, "max_tokens" in told) == (efforts, floor)


@pytest.mark.parametrize("words", [("--reasoning", "off"), ("-rea", "off"), ("--reasoning-budget", "0")])
def test_an_engine_that_is_told_not_to_think_does_not(words: tuple[str, str]) -> None:
    assert not left_to_do(RULES, ("llama-server", *words), {}).thinks
    assert left_to_do(RULES, ("llama-server", words[0], "on"), {}).thinks


def test_a_launch_is_asked_by_its_process(tmp_path: Path) -> None:
    settings = Settings.model_validate(
        {"gateway_reasoning": {"big": {"efforts": "low, medium", "fallback": "low", "floor_tokens": 100}}}
    )
    process = tmp_path / "7"
    process.mkdir()
    (process / "cmdline").write_bytes(b"llama-server\0--reasoning-max-tokens-floor\x0050\0")
    (process / "environ").write_bytes(b"HOME=/\0LANG=C\0")
    reasoning = Reasoning(tmp_path)
    wanted = reasoning.wanted(settings, "big", "r1", 7)
    assert wanted == ReasoningFilter(ReasoningRules(("low", "medium"), "low", 0))
    assert reasoning.wanted(settings, "other", "r1", 7) is None  # off unless a model is named
    assert reasoning.wanted(settings, "big", "r2", None) is None
    assert reasoning.wanted(settings, "big", "r3", 8) is None  # nobody knows what it does
    (process / "cmdline").write_bytes(b"")
    assert reasoning.wanted(settings, "big", "r4", 7) is None  # a process that has ended
    assert reasoning.wanted(settings, "big", "r1", 7) == wanted  # read once


def test_rules_of_a_model_go_before_those_for_all() -> None:
    general = ReasoningRules(("low", "high"), "high", 10)
    assert rules_of(general, ReasoningOf()) == general
    assert rules_of(general, ReasoningOf(floor_tokens=0)) == ReasoningRules(("low", "high"), "high", 0)
    assert rules_of(general, ReasoningOf(efforts="")) == ReasoningRules((), None, 10)
    own = ReasoningOf(efforts="low,medium,xhigh", fallback="medium")
    assert rules_of(general, own) == ReasoningRules(("low", "medium", "xhigh"), "medium", 10)
    with pytest.raises(LlmError, match="not among those allowed"):
        rules_of(general, ReasoningOf(efforts="medium"))


# --- through the gateway ---------------------------------------------------------------------------------------------


async def answer(asked: Asked, writer: Any) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}")


def keep_to_rules(house: FakeHouse, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the house say so of what it serves."""
    plain = house.lease

    async def lease(name: str, token: str) -> Any:
        return replace(await plain(name, token), reasoning=EVERYTHING)

    monkeypatch.setattr(house, "lease", lease)


def test_a_change_is_told_and_its_length_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        async with gateway_world(tmp_path, answer) as world, aiohttp.ClientSession(world.address) as client:
            keep_to_rules(world.house, monkeypatch)
            document = {"model": "small", "reasoning_effort": "high", "max_tokens": 256}
            async with client.post(CHAT, json=document) as response:
                assert response.status == 200
                assert response.headers[CHANGED] == "reasoning_effort=high->medium, max_tokens=256->24576"
            (asked,) = world.house.engines["small"].asked
            assert json.loads(asked.body) == document | {"reasoning_effort": "medium", "max_tokens": 24576}
            assert dict(asked.headers)[b"content-length"] == str(len(asked.body)).encode()
            # Nothing to change, or an address that is passed on as it is: byte for byte.
            odd = b' {"model" : "small", "reasoning_effort":"low" }'
            for path, body in ((CHAT, odd), ("/v1/completions", odd.replace(b"low", b"high"))):
                async with client.post(path, data=body) as response:
                    assert CHANGED not in response.headers
                assert world.house.engines["small"].asked[-1].body == body

    asyncio.run(scene())


def test_a_body_that_is_too_large_goes_on_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        monkeypatch.setattr("lllm3090d.gateway.gateway.LARGEST_CHANGED_BYTES", 100_000)
        body = json.dumps({"model": "small", "reasoning_effort": "high", "pad": "x" * 200_000}).encode()

        async def pieces() -> Any:
            for start in range(0, len(body), 10_000):
                yield body[start : start + 10_000]

        async with gateway_world(tmp_path, answer) as world, aiohttp.ClientSession(world.address) as client:
            keep_to_rules(world.house, monkeypatch)
            for sent in (body, pieces()):  # with a length, and without
                async with client.post(CHAT, data=sent) as response:
                    assert response.headers[CHANGED] == filters.TOO_LARGE
                assert world.house.engines["small"].asked[-1].body == body

    asyncio.run(scene())


def test_a_stream_that_waited_is_told_in_a_comment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        async def events(asked: Asked, writer: Any) -> None:
            writer.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\ndata: [DONE]\n\n"
            )
            await writer.drain()
            writer.close()

        async with gateway_world(tmp_path, events, loaded=False, gateway_keepalive_s=0.01) as world:
            keep_to_rules(world.house, monkeypatch)
            world.house.may_load.clear()
            async with aiohttp.ClientSession(world.address) as client:
                document = {"model": "small", "stream": True, "max_tokens": 1}
                async with client.post(CHAT, json=document) as response:
                    first = await response.content.readuntil(b"\n\n")
                    assert first == b": waiting\n\n" and CHANGED not in response.headers
                    world.house.may_load.set()
                    rest = await response.content.read()
            assert f": {CHANGED}: max_tokens=1->24576\n\n".encode() in rest and rest.endswith(
                b"data: [DONE]\n\n"
            )

    asyncio.run(scene())
