"""The SDKs of OpenAI and Anthropic, as they are installed, against the gateway and real engines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from lllm3090d.checkpoints.classify import Kind
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gateway.record import Outcome
from tests.fakes.real_engines import RealModel, RealWorld, real_world

pytestmark = pytest.mark.engine

CHAT, VECTORS, HUGE = "smollm2-135m", "vectors", "huge-70b"
SLOTS, WINDOW_TOKENS = 2, 1024
LIMIT_S = 60.0
QUESTION = [{"role": "user", "content": "Say hello."}]
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Vienna", "Graz"]}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def world(
    llama_server: Path, smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealWorld]:
    pooled = ("--embeddings", "--pooling", "mean", "-b", "512", "-ub", "512")
    models = {
        CHAT: RealModel(smollm2_path, SLOTS * WINDOW_TOKENS, SLOTS),
        VECTORS: RealModel(smollm2_path, 512, 1, pooled, Kind.EMBEDDING),
        HUGE: RealModel(smollm2_path, 512, 1),
    }
    with real_world(tmp_path_factory.mktemp("e"), llama_server, models) as made:
        made.house.refused[HUGE] = LlmError(
            ErrorCode.INSUFFICIENT_VRAM,
            "huge-70b needs 40.2 GiB, and 21.3 GiB can be given.",
            hint="Unload qwen-27b.",
            missing_bytes=18 << 30,
        )
        yield made


@pytest.fixture(scope="module")
def oai(world: RealWorld) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{world.address}/v1", api_key="none", timeout=LIMIT_S) as client:
        yield client


@pytest.fixture(scope="module")
def claude(world: RealWorld) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=world.address, api_key="none", timeout=LIMIT_S) as client:
        yield client


@contextmanager
def settings(world: RealWorld, **changes: Any) -> Iterator[None]:
    before = world.house.settings
    world.house.settings = before.model_copy(update=changes)
    try:
        yield
    finally:
        world.house.settings = before


def long_prompt() -> str:
    return "word " * (2 * WINDOW_TOKENS)


# --- OpenAI ------------------------------------------------------------------------------------------------


def test_openai_chat_loads_the_model(world: RealWorld, oai: openai.OpenAI) -> None:
    answer = oai.chat.completions.create(model=CHAT, messages=QUESTION, max_tokens=8, temperature=0)  # type: ignore[call-overload]  # as a person writes it
    assert answer.choices[0].message.content and answer.usage.completion_tokens <= 8
    assert answer._request_id.startswith("req_")
    record = world.records[-1]
    assert (record.model, record.status, record.outcome) == (CHAT, 200, Outcome.SERVED)
    assert (record.prompt_tokens, record.generated_tokens) == (
        answer.usage.prompt_tokens,
        answer.usage.completion_tokens,
    )
    speed = record.tokens_per_s()
    assert record.load_s > 0 and speed is not None and speed > 1


def test_openai_stream(world: RealWorld, oai: openai.OpenAI) -> None:
    options = {"include_usage": True}
    stream = oai.chat.completions.create(  # type: ignore[call-overload]
        model=CHAT, messages=QUESTION, max_tokens=8, temperature=0, stream=True, stream_options=options
    )
    chunks = list(stream)
    assert "".join(each.choices[0].delta.content or "" for each in chunks if each.choices)
    assert chunks[-1].usage.completion_tokens <= 8
    record = world.records[-1]
    assert record.streamed and record.generated_tokens == chunks[-1].usage.completion_tokens
    assert record.first_byte_s is not None and 0 < record.first_byte_s < record.total_s


def test_openai_tools(oai: openai.OpenAI) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}
    question = [{"role": "user", "content": "What is the weather in Graz?"}]
    answer = oai.chat.completions.create(  # type: ignore[call-overload]
        model=CHAT, messages=question, tools=[tool], tool_choice="required", max_tokens=64, temperature=0
    )
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in {"Vienna", "Graz"}
    assert answer.choices[0].finish_reason == "tool_calls"


def test_openai_responses(world: RealWorld, oai: openai.OpenAI) -> None:
    answer = oai.responses.create(model=CHAT, input="Say hello.", max_output_tokens=8, temperature=0)
    assert answer.output_text and answer.usage is not None
    assert world.records[-1].generated_tokens == answer.usage.output_tokens
    with oai.responses.stream(model=CHAT, input="Say hello.", max_output_tokens=8, temperature=0) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_text
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    assert "response.output_text.delta" in kinds


def test_openai_completions(oai: openai.OpenAI) -> None:
    answer = oai.completions.create(model=CHAT, prompt="Once upon a time", max_tokens=4, temperature=0)
    assert answer.choices[0].text


def test_openai_embeddings(world: RealWorld, oai: openai.OpenAI) -> None:
    texts = ["a cat sits", "a cat is sitting", "share prices fell"]
    answer = oai.embeddings.create(model=VECTORS, input=texts)  # the SDK asks for base64 and decodes it
    cat, sitting, prices = (each.embedding for each in answer.data)
    assert len(cat) == 576 and _dot(cat, sitting) > _dot(cat, prices)
    assert world.records[-1].prompt_tokens == answer.usage.prompt_tokens
    (one,) = oai.embeddings.create(model=VECTORS, input=texts[0], encoding_format="float").data
    assert one.embedding == pytest.approx(cat, abs=1e-2)
    with pytest.raises(openai.APIStatusError):  # a model that generates text is none that embeds
        oai.with_options(max_retries=0).embeddings.create(model=CHAT, input=texts)
    assert world.records[-1].outcome is Outcome.ENGINE_ERROR


def test_openai_models(oai: openai.OpenAI) -> None:
    listed = {each.id: each for each in oai.models.list()}
    assert set(listed) == {CHAT, VECTORS, HUGE}
    assert (listed[CHAT].context_length, listed[CHAT].slots) == (WINDOW_TOKENS, SLOTS)  # type: ignore[attr-defined]  # ours
    assert oai.models.retrieve("SmolLM2").id == CHAT
    with pytest.raises(openai.NotFoundError):
        oai.models.retrieve("nobody")


def test_openai_unknown_model(oai: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        oai.chat.completions.create(model="smolm2-135m", messages=QUESTION)  # type: ignore[call-overload]
    assert caught.value.code == "unknown_model" and CHAT in caught.value.message
    assert caught.value.param == "model" and caught.value.request_id.startswith("req_")  # type: ignore[union-attr]


@pytest.mark.parametrize("stream", [False, True])
def test_openai_prompt_that_is_too_long(oai: openai.OpenAI, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        oai.chat.completions.create(  # type: ignore[call-overload]
            model=CHAT, messages=[{"role": "user", "content": long_prompt()}], stream=stream
        )
    assert caught.value.code == "context_length_exceeded"
    details = caught.value.body["details"]  # type: ignore[index]
    assert details["context_tokens"] == WINDOW_TOKENS < details["prompt_tokens"]
    assert str(WINDOW_TOKENS) in caught.value.message and str(details["prompt_tokens"]) in caught.value.message


def test_openai_does_not_try_again_what_does_not_fit(world: RealWorld, oai: openai.OpenAI) -> None:
    before = len(world.records)
    with pytest.raises(openai.InternalServerError) as caught:
        oai.chat.completions.create(model=HUGE, messages=QUESTION)  # type: ignore[call-overload]
    assert caught.value.status_code == 507 and caught.value.code == "insufficient_vram"
    assert "Unload qwen-27b." in caught.value.message
    assert len(world.records) == before + 1


def test_openai_too_many_requests(world: RealWorld, oai: openai.OpenAI) -> None:
    patient, impatient = oai, oai.with_options(max_retries=0)
    held = [
        patient.completions.create(model=CHAT, prompt="One, two, three,", max_tokens=900, stream=True)
        for _ in range(SLOTS)
    ]
    try:
        with settings(world, gateway_queue=0), pytest.raises(openai.RateLimitError) as caught:
            impatient.completions.create(model=CHAT, prompt="Hello", max_tokens=1)
    finally:
        for stream in held:
            stream.close()
    assert caught.value.code == "too_many_requests"
    assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60
    # Both have left: their slots are free, and who comes next is answered.
    assert patient.completions.create(model=CHAT, prompt="Hello", max_tokens=1).choices
    left = [each.outcome for each in world.records if each.outcome is Outcome.CLIENT_CLOSED]
    assert len(left) == SLOTS


# --- Anthropic ---------------------------------------------------------------------------------------------


def test_anthropic_message_and_count(world: RealWorld, claude: anthropic.Anthropic) -> None:
    answer = claude.messages.create(model=CHAT, messages=QUESTION, max_tokens=8, temperature=0)  # type: ignore[arg-type]
    assert answer.content[0].text and answer.usage.output_tokens <= 8  # type: ignore[union-attr]
    record = world.records[-1]
    assert record.generated_tokens == answer.usage.output_tokens
    counted = claude.messages.count_tokens(model=CHAT, messages=QUESTION)  # type: ignore[arg-type]
    cached = answer.usage.cache_read_input_tokens or 0
    assert counted.input_tokens == answer.usage.input_tokens + cached == record.prompt_tokens


def test_anthropic_stream(claude: anthropic.Anthropic, world: RealWorld) -> None:
    with claude.messages.stream(model=CHAT, messages=QUESTION, max_tokens=8, temperature=0) as stream:  # type: ignore[arg-type]
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text and final.stop_reason in {"max_tokens", "end_turn"}
    record = world.records[-1]
    assert record.streamed and record.generated_tokens == final.usage.output_tokens
    assert record.prompt_tokens == final.usage.input_tokens + (final.usage.cache_read_input_tokens or 0)


def test_anthropic_tools(claude: anthropic.Anthropic) -> None:
    tool: Any = {"name": "weather", "description": "of a city", "input_schema": WEATHER}
    question: Any = [{"role": "user", "content": "What is the weather in Graz?"}]
    answer = claude.messages.create(
        model=CHAT, messages=question, tools=[tool], tool_choice={"type": "any"}, max_tokens=64, temperature=0
    )
    (use,) = [each for each in answer.content if each.type == "tool_use"]
    assert use.name == "weather" and use.input["city"] in {"Vienna", "Graz"}
    assert answer.stop_reason == "tool_use"


def test_anthropic_models(claude: anthropic.Anthropic) -> None:
    assert {each.id for each in claude.models.list()} == {CHAT, VECTORS, HUGE}
    model = claude.models.retrieve(CHAT)
    assert (model.id, model.type, model.display_name) == (CHAT, "model", CHAT)
    with pytest.raises(anthropic.NotFoundError):
        claude.models.retrieve("nobody")


def test_anthropic_errors(world: RealWorld, claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as unknown:
        claude.messages.create(model="smolm2-135m", messages=QUESTION, max_tokens=4)  # type: ignore[arg-type]
    assert CHAT in unknown.value.message and unknown.value.type == "not_found_error"
    with pytest.raises(anthropic.BadRequestError) as long:
        claude.messages.create(
            model=CHAT, messages=[{"role": "user", "content": long_prompt()}], max_tokens=4
        )
    assert "prompt is too long" in long.value.message and str(WINDOW_TOKENS) in long.value.message
    before = len(world.records)
    with pytest.raises(anthropic.APIStatusError) as huge:
        claude.messages.create(model=HUGE, messages=QUESTION, max_tokens=4)  # type: ignore[arg-type]
    assert huge.value.status_code == 507 and "Unload qwen-27b." in huge.value.message
    assert len(world.records) == before + 1


def _dot(one: list[float], other: list[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))
