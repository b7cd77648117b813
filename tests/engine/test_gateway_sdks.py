"""The SDKs of OpenAI and Anthropic, as they are installed, against the gateway and real engines."""

from __future__ import annotations

import base64
import contextlib
import json
import struct
from collections.abc import Callable, Iterable, Iterator
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
TRIES = 6
# SmolLM2's own knows no tools.
TEMPLATE = Path(__file__).parents[1] / "data" / "gateway" / "tools.jinja"
QUESTION: Any = [{"role": "user", "content": "Say hello."}]
CITIES = {"Graz", "Linz", "Vienna"}
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": sorted(CITIES)}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def world(
    llama_server: Path, smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealWorld]:
    pooled = ("--embeddings", "--pooling", "mean", "-b", "512", "-ub", "512")
    models = {
        CHAT: RealModel(smollm2_path, SLOTS * WINDOW_TOKENS, SLOTS, ("--chat-template-file", str(TEMPLATE))),
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


def whole(ask: Callable[[], Iterable[Any]], begins: Callable[[Any], bool]) -> list[Any]:
    """A stream with its first event: b11434 loses that now and then, whoever asks it."""
    for _ in range(TRIES):
        events = list(ask())
        if begins(events[0]):
            return events
    raise AssertionError(f"no stream of {TRIES} has its first event")


def begins_chat(chunk: Any) -> bool:
    return bool(chunk.choices) and chunk.choices[0].delta.role == "assistant"


def long_prompt() -> str:
    return "word " * (2 * WINDOW_TOKENS)


# --- OpenAI ------------------------------------------------------------------------------------------------


def test_openai_chat_loads_the_model(world: RealWorld, oai: Any) -> None:
    answer = oai.chat.completions.create(model=CHAT, messages=QUESTION, max_tokens=8, temperature=0)
    assert answer.choices[0].message.content and answer.usage.completion_tokens <= 8
    assert answer._request_id.startswith("req_")
    record = world.last()
    assert (record.model, record.status, record.outcome) == (CHAT, 200, Outcome.SERVED)
    assert (record.prompt_tokens, record.generated_tokens) == (
        answer.usage.prompt_tokens,
        answer.usage.completion_tokens,
    )
    speed = record.tokens_per_s()
    assert record.load_s > 0 and speed is not None and speed > 0


def test_openai_stream(world: RealWorld, oai: Any) -> None:
    options = {"include_usage": True}
    asked: Any = {"model": CHAT, "messages": QUESTION, "max_tokens": 8, "temperature": 0, "stream": True}
    chunks = whole(lambda: oai.chat.completions.create(**asked, stream_options=options), begins_chat)
    assert "".join(each.choices[0].delta.content or "" for each in chunks if each.choices)
    assert chunks[-1].usage.completion_tokens <= 8
    record = world.last()
    assert record.streamed and record.generated_tokens == chunks[-1].usage.completion_tokens
    assert record.first_byte_s is not None and 0 < record.first_byte_s < record.total_s


def test_openai_tools(oai: Any) -> None:
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Linz"}'},
    }
    # So small a model calls nothing unless it has seen how.
    messages = [
        {"role": "user", "content": "Weather in Linz?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
        {"role": "user", "content": "Weather in Graz?"},
    ]
    tool = {
        "type": "function",
        "function": {"name": "weather", "description": "Of a city", "parameters": WEATHER},
    }
    asked: Any = {"model": CHAT, "messages": messages, "tools": [tool], "tool_choice": "required"}
    answer = oai.chat.completions.create(**asked, max_tokens=64, temperature=0)
    (made,) = answer.choices[0].message.tool_calls
    assert made.function.name == "weather" and json.loads(made.function.arguments)["city"] in CITIES
    assert answer.choices[0].finish_reason == "tool_calls"
    asked |= {"max_tokens": 64, "temperature": 0, "stream": True}
    chunks = whole(lambda: oai.chat.completions.create(**asked), begins_chat)
    parts = [part for each in chunks if each.choices for part in each.choices[0].delta.tool_calls or ()]
    streamed = "".join(each.function.arguments or "" for each in parts)
    assert parts[0].function.name == "weather" and json.loads(streamed)["city"] in CITIES


def test_openai_responses(world: RealWorld, oai: Any) -> None:
    answer = oai.responses.create(model=CHAT, input="Say hello.", max_output_tokens=8, temperature=0)
    assert answer.output_text and answer.usage is not None
    assert world.last().generated_tokens == answer.usage.output_tokens
    # The engine's events carry no output_index, which responses.stream() of the SDK wants; this reads them as they are.
    asked: Any = {"model": CHAT, "input": "Say hello.", "max_output_tokens": 8, "stream": True}
    events = whole(lambda: oai.responses.create(**asked), lambda first: first.type == "response.created")
    kinds = [event.type for event in events]
    assert kinds[-1] == "response.completed"
    assert "response.output_text.delta" in kinds


def test_openai_completions(oai: Any) -> None:
    answer = oai.completions.create(model=CHAT, prompt="Once upon a time", max_tokens=4, temperature=0)
    assert answer.choices[0].text


def test_openai_embeddings(world: RealWorld, oai: Any) -> None:
    texts = ["a cat sits", "a cat is sitting", "share prices fell"]
    answer = oai.embeddings.create(model=VECTORS, input=texts)  # the SDK asks for base64 and decodes it
    cat, sitting, prices = (each.embedding for each in answer.data)
    assert len(cat) == 576 and _dot(cat, sitting) > _dot(cat, prices)
    assert world.last().prompt_tokens == answer.usage.prompt_tokens
    (one,) = oai.embeddings.create(model=VECTORS, input=texts[0], encoding_format="float").data
    assert one.embedding == pytest.approx(cat, abs=1e-2)
    coded = oai.embeddings.create(model=VECTORS, input=texts[0], encoding_format="base64").data[0].embedding
    assert struct.unpack(f"<{len(cat)}f", base64.b64decode(coded)) == pytest.approx(one.embedding, abs=1e-2)


def test_a_text_longer_than_what_is_computed_at_once(oai: Any) -> None:
    """The engine says so with a 500, which the SDK would try again."""
    with pytest.raises(openai.BadRequestError) as caught:
        oai.embeddings.create(model=VECTORS, input=["short", long_prompt()])
    body: Any = caught.value.body
    assert body["code"] == ErrorCode.CONTEXT_LENGTH_EXCEEDED
    assert body["details"]["context_tokens"] == 512 < body["details"]["prompt_tokens"]


def test_a_model_of_another_purpose_is_not_asked(world: RealWorld, oai: Any, claude: Any) -> None:
    """Nor loaded: the refusal says what the model serves, and where."""
    asked: tuple[tuple[str, Callable[[], Any]], ...] = (
        (HUGE, lambda: oai.embeddings.create(model=HUGE, input="a")),
        (VECTORS, lambda: oai.chat.completions.create(model=VECTORS, messages=QUESTION)),
        (VECTORS, lambda: oai.post("/rerank", body={"model": VECTORS, "query": "a"}, cast_to=object)),
    )
    for model, ask in asked:
        with pytest.raises(openai.BadRequestError) as caught:
            ask()
        body: Any = caught.value.body
        assert (body["code"], body["details"]["model"]) == (ErrorCode.WRONG_PURPOSE, model)
        assert world.last().outcome is Outcome.REFUSED
    with pytest.raises(anthropic.BadRequestError, match="/v1/embeddings"):
        claude.messages.create(model=VECTORS, messages=QUESTION, max_tokens=4)
    assert HUGE not in world.house.serving_names()


def test_openai_models(oai: Any) -> None:
    listed = {each.id: each for each in oai.models.list()}
    assert set(listed) == {CHAT, VECTORS, HUGE}
    assert (listed[CHAT].context_length, listed[CHAT].slots) == (WINDOW_TOKENS, SLOTS)
    assert oai.models.retrieve("SmolLM2").id == CHAT
    with pytest.raises(openai.NotFoundError):
        oai.models.retrieve("nobody")


def test_openai_unknown_model(oai: Any) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        oai.chat.completions.create(model="smolm2-135m", messages=QUESTION)
    assert caught.value.code == "unknown_model" and CHAT in caught.value.message
    assert caught.value.param == "model" and str(caught.value.request_id).startswith("req_")


@pytest.mark.parametrize("stream", [False, True])
def test_openai_prompt_that_is_too_long(oai: Any, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        oai.chat.completions.create(
            model=CHAT, messages=[{"role": "user", "content": long_prompt()}], stream=stream
        )
    assert caught.value.code == "context_length_exceeded"
    body: Any = caught.value.body
    details = body["details"]
    assert details["context_tokens"] == WINDOW_TOKENS < details["prompt_tokens"]
    assert (
        str(WINDOW_TOKENS) in caught.value.message and str(details["prompt_tokens"]) in caught.value.message
    )


def test_openai_does_not_try_again_what_does_not_fit(world: RealWorld, oai: Any) -> None:
    before = world.ended_requests()
    with pytest.raises(openai.InternalServerError) as caught:
        oai.chat.completions.create(model=HUGE, messages=QUESTION)
    assert caught.value.status_code == 507 and caught.value.code == "insufficient_vram"
    assert "Unload qwen-27b." in caught.value.message
    assert world.ended_requests() == before + 1


def test_openai_too_many_requests(world: RealWorld, oai: Any) -> None:
    patient, impatient, before = oai, oai.with_options(max_retries=0), world.ended_requests()
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
    assert world.last().outcome is Outcome.SERVED
    left = [each.outcome for each in world.records[before:] if each.outcome is Outcome.CLIENT_CLOSED]
    assert len(left) == SLOTS


# --- Anthropic ---------------------------------------------------------------------------------------------


def test_anthropic_message_and_count(world: RealWorld, claude: Any) -> None:
    answer = claude.messages.create(model=CHAT, messages=QUESTION, max_tokens=8)
    assert answer.content[0].text and answer.usage.output_tokens <= 8
    record = world.last()
    assert record.generated_tokens == answer.usage.output_tokens
    counted = claude.messages.count_tokens(model=CHAT, messages=QUESTION)
    cached = answer.usage.cache_read_input_tokens or 0
    assert counted.input_tokens == answer.usage.input_tokens + cached == record.prompt_tokens


def test_anthropic_stream(claude: Any, world: RealWorld) -> None:
    for _ in range(TRIES):
        with (
            contextlib.suppress(RuntimeError, AssertionError),  # what the SDK says of one that begins later
            claude.messages.stream(model=CHAT, messages=QUESTION, max_tokens=8) as stream,
        ):
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
            break
    assert text and final.stop_reason in {"max_tokens", "end_turn"}
    record = world.last()
    assert record.streamed and record.generated_tokens == final.usage.output_tokens
    assert record.prompt_tokens == final.usage.input_tokens + (final.usage.cache_read_input_tokens or 0)


def test_anthropic_tools(claude: Any) -> None:
    tool: Any = {"name": "weather", "description": "Of a city", "input_schema": WEATHER}
    use: Any = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Linz"}}
    result: Any = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "rain"}
    messages: Any = [
        {"role": "user", "content": "Weather in Linz?"},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
        {"role": "user", "content": "Weather in Graz?"},
    ]
    answer = claude.messages.create(
        model=CHAT,
        messages=messages,
        tools=[tool],
        tool_choice={"type": "any"},
        max_tokens=64,
        extra_body={"temperature": 0},  # what is drawn may be no call within so few tokens
    )
    (made,) = [each for each in answer.content if each.type == "tool_use"]
    assert made.name == "weather" and made.input["city"] in CITIES
    assert answer.stop_reason == "tool_use"


def test_anthropic_models(claude: Any) -> None:
    assert {each.id for each in claude.models.list()} == {CHAT, VECTORS, HUGE}
    model = claude.models.retrieve(CHAT)
    assert (model.id, model.type, model.display_name) == (CHAT, "model", CHAT)
    with pytest.raises(anthropic.NotFoundError):
        claude.models.retrieve("nobody")


def test_anthropic_errors(world: RealWorld, claude: Any) -> None:
    with pytest.raises(anthropic.NotFoundError) as unknown:
        claude.messages.create(model="smolm2-135m", messages=QUESTION, max_tokens=4)
    assert CHAT in unknown.value.message and unknown.value.type == "not_found_error"
    with pytest.raises(anthropic.BadRequestError) as long:
        claude.messages.create(
            model=CHAT, messages=[{"role": "user", "content": long_prompt()}], max_tokens=4
        )
    assert "prompt is too long" in long.value.message and str(WINDOW_TOKENS) in long.value.message
    before = world.ended_requests()
    with pytest.raises(anthropic.APIStatusError) as huge:
        claude.messages.create(model=HUGE, messages=QUESTION, max_tokens=4)
    assert huge.value.status_code == 507 and "Unload qwen-27b." in huge.value.message
    assert world.ended_requests() == before + 1


def _dot(one: list[float], other: list[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))
