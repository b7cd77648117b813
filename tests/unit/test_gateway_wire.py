"""What goes through the gateway, byte for byte: answers, bodies, heads, ends and broken ends."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from yarl import URL

from lllm3090d.gateway.record import Outcome
from tests.fakes.gateway_world import Asked, GatewayWorld, Respond, gateway_world

pytestmark = pytest.mark.unit

LIMIT_S = 60.0
CHAT = "/v1/chat/completions"
ASK = {"model": "small", "messages": []}
Story = Callable[[GatewayWorld, aiohttp.ClientSession], Awaitable[Any]]


def play(tmp_path: Path, respond: Respond, story: Story, **world: Any) -> Any:
    async def run() -> Any:
        async with (
            asyncio.timeout(LIMIT_S),
            gateway_world(tmp_path, respond, **world) as made,
            aiohttp.ClientSession(auto_decompress=False) as session,
        ):
            return await story(made, session)

    return asyncio.run(run())


def whole(body: bytes, *fields: str, status: str = "200 OK") -> bytes:
    head = "".join(f"{each}\r\n" for each in (*fields, f"Content-Length: {len(body)}"))
    return f"HTTP/1.1 {status}\r\n{head}\r\n".encode() + body


def answering(answer: bytes) -> Respond:
    async def respond(_: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)

    return respond


def chunked(*pieces: bytes, kind: str = "text/event-stream", trailer: bytes = b"") -> bytes:
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    return (
        head
        + b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in pieces)
        + b"0\r\n"
        + trailer
        + b"\r\n"
    )


async def post(world: GatewayWorld, session: aiohttp.ClientSession, **more: Any) -> tuple[int, Any, bytes]:
    """Ask, and wait until the gateway is done with the request, which may be a moment after its answer is here."""
    async with session.post(world.address + more.pop("path", CHAT), **({"json": ASK} | more)) as answer:
        got = answer.status, answer.headers, await answer.read()
    while answer.headers.get("x-request-id") in world.gateway.in_flight:  # noqa: ASYNC110  # it has no event
        await asyncio.sleep(0)
    return got


# --- answers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (whole(b'{"a": 1}', "Content-Type: application/json"), b'{"a": 1}'),
        (whole(b"", "Content-Type: text/plain"), b""),
        (chunked(b"data: 1\n\n", b"da", b"ta: [DONE]\n\n"), b"data: 1\n\ndata: [DONE]\n\n"),
        (chunked(b"x" * 300_000, kind="audio/wav"), b"x" * 300_000),
        (chunked(b"data: 1\n\n", trailer=b"X-Checksum: 7\r\n"), b"data: 1\n\n"),
        (whole(gzip.compress(b"squeezed" * 999, mtime=0), "Content-Encoding: gzip"), None),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nuntil the end", b"until the end"),
        (whole(b'{"error": {"code": 500}}', status="500 Oh"), b'{"error": {"code": 500}}'),
        (whole(b'{"error": {"code": 400}}', "Content-Type: application/json", status="400 Bad"), None),
        (whole(b"\xff\x00\r\n\r\n", "X-Odd: \xe9"), b"\xff\x00\r\n\r\n"),
    ],
)
def test_the_body_and_the_status_are_the_engines(tmp_path: Path, answer: bytes, body: bytes | None) -> None:
    status, headers, got = play(tmp_path, answering(answer), post)
    assert status == int(answer.split()[1])
    assert got == (answer.partition(b"\r\n\r\n")[2] if body is None else body)
    assert headers["x-request-id"].startswith("req_")
    encoded = b"Content-Encoding: gzip" in answer
    assert headers.get("Content-Encoding") == ("gzip" if encoded else None)


def test_random_answers_in_random_pieces(tmp_path: Path) -> None:
    chance = random.Random(7)  # noqa: S311  # to be the same each time
    sent: list[bytes] = []

    async def respond(_: Asked, writer: asyncio.StreamWriter) -> None:
        body = chance.randbytes(chance.choice([0, 1, 100, 70_000, 1_000_000]))
        sent.append(body)
        cuts = sorted(chance.randrange(len(body) + 1) for _ in range(chance.randrange(6)))
        pieces = [body[a:b] for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True) if b > a]
        answer = chunked(*pieces) if chance.random() < 0.5 else whole(body, "Content-Type: application/json")
        for at in range(0, len(answer), 50_021):
            writer.write(answer[at : at + 50_021])
            await writer.drain()

    async def story(world: GatewayWorld, session: aiohttp.ClientSession) -> None:
        for number in range(60):
            _, _, got = await post(world, session)
            assert got == sent[number]

    play(tmp_path, respond, story)


def test_each_event_is_sent_on_before_the_next_exists(tmp_path: Path) -> None:
    seen = asyncio.Event()

    async def respond(_: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(chunked(b"data: 1\n\n").removesuffix(b"0\r\n\r\n"))
        await seen.wait()
        writer.write(b"9\r\ndata: 2\n\n\r\n0\r\n\r\n")

    async def story(world: GatewayWorld, session: aiohttp.ClientSession) -> None:
        async with session.post(world.address + CHAT, json=ASK) as answer:
            assert await answer.content.readany() == b"data: 1\n\n"
            seen.set()
            assert await answer.content.read() == b"data: 2\n\n"

    play(tmp_path, respond, story)


@pytest.mark.parametrize(
    "answer",
    [
        whole(b"0123456789")[:-3],
        whole(b"0123456789")[:-10],
        chunked(b"data: 1\n\n")[:-5],
        chunked(b"data: 1\n\n").replace(b"0\r\n\r\n", b"zz\r\n"),
    ],
)
def test_half_an_answer_is_not_taken_for_the_whole(tmp_path: Path, answer: bytes) -> None:
    async def story(world: GatewayWorld, session: aiohttp.ClientSession) -> GatewayWorld:
        with pytest.raises(aiohttp.ClientError):
            await post(world, session)
        return world

    world = play(tmp_path, answering(answer), story)
    assert [each.outcome for each in world.records] == [Outcome.ENGINE_ERROR]


@pytest.mark.parametrize(
    "answer", [b"", b"SSH-2.0-x\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n"]
)
def test_an_engine_that_does_not_answer_is_a_502_in_the_callers_words(tmp_path: Path, answer: bytes) -> None:
    status, headers, body = play(tmp_path, answering(answer), post)
    assert (status, headers["Content-Type"]) == (502, "application/json")
    assert json.loads(body)["error"]["code"] == "engine_failed"


def test_head_has_a_head_and_no_body(tmp_path: Path) -> None:
    async def story(world: GatewayWorld, session: aiohttp.ClientSession) -> tuple[int, str, bytes]:
        async with session.head(world.address + "/props?model=small") as answer:
            return answer.status, answer.headers["Content-Length"], await answer.read()

    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 77\r\n\r\n"
    assert play(tmp_path, answering(answer), story) == (200, "77", b"")


def test_head_of_the_gateways_own_health(tmp_path: Path) -> None:
    async def story(world: GatewayWorld, session: aiohttp.ClientSession) -> tuple[int, bytes]:
        async with session.head(world.address + "/health") as answer:
            return answer.status, await answer.read()

    assert play(tmp_path, answering(b""), story) == (200, b"")


# --- requests ---------------------------------------------------------------------------------------------------


def asked_of(tmp_path: Path, story: Story, **world: Any) -> Asked:
    async def outer(made: GatewayWorld, session: aiohttp.ClientSession) -> Asked:
        await story(made, session)
        (asked,) = made.house.engines["small"].asked
        return asked

    found: Asked = play(tmp_path, answering(whole(b"{}")), outer, **world)
    return found


@pytest.mark.parametrize("length", [True, False])
@pytest.mark.parametrize("last", [True, False])
def test_a_large_body_arrives_as_it_was(tmp_path: Path, last: bool, length: bool) -> None:
    image = {"messages": [{"image": "A" * 5_000_000}]}
    document = image | {"model": "small"} if last else {"model": "small"} | image
    text = json.dumps(document).encode()

    async def pieces() -> Any:
        for at in range(0, len(text), 99_991):
            yield text[at : at + 99_991]

    async def story(world: GatewayWorld, session: aiohttp.ClientSession) -> None:
        status, _, _ = await post(world, session, json=None, data=io.BytesIO(text) if length else pieces())
        assert status == 200

    asked = asked_of(tmp_path, story)
    assert asked.body == text
    framing = dict(asked.headers)
    assert (b"content-length" in framing) is length and (b"transfer-encoding" in framing) is not length


def test_a_form_names_its_model_after_the_file(tmp_path: Path) -> None:
    form = aiohttp.FormData()
    form.add_field(
        "file", io.BytesIO(b'\r\n--x\r\nname="model"\r\n\r\nnot me\r\n' * 50_000), filename="a.wav"
    )
    form.add_field("model", "small")

    async def story(world: GatewayWorld, session: aiohttp.ClientSession) -> None:
        status, _, body = await post(world, session, json=None, data=form, path="/v1/audio/transcriptions")
        assert status == 200, body

    assert b"not me" in asked_of(tmp_path, story).body


def test_what_is_about_the_connection_or_ours_is_not_passed_on(tmp_path: Path) -> None:
    sent = {
        "Authorization": "Bearer secret",
        "x-api-key": "secret",
        "Cookie": "secret",
        "Connection": "keep-alive, X-Hop",
        "X-Hop": "secret",
        "Proxy-Authorization": "secret",
        "Forwarded": "for=secret",
        "X-Forwarded-For": "secret",
        "X-Kept": "yes",
        "Accept-Encoding": "identity",
    }

    async def story(world: GatewayWorld, session: aiohttp.ClientSession) -> None:
        await post(world, session, headers=sent)

    asked = asked_of(tmp_path, story)
    assert b"secret" not in repr(asked.headers).encode()
    assert (b"x-kept", b"yes") in asked.headers
    assert (b"host", b"engine") in asked.headers
    assert asked.target == CHAT


def test_the_engines_word_on_origins_is_not_passed_on(tmp_path: Path) -> None:
    answer = whole(b"{}", "Access-Control-Allow-Origin: *", "Keep-Alive: timeout=5", "X-Kept: yes")
    _, headers, _ = play(tmp_path, answering(answer), post)
    assert "Access-Control-Allow-Origin" not in headers and "Keep-Alive" not in headers
    assert headers["X-Kept"] == "yes"


@pytest.mark.parametrize(
    ("more", "status", "code"),
    [
        ({"json": {"model": "nobody"}}, 404, "unknown_model"),
        ({"json": {"messages": []}}, 422, "invalid_request"),
        ({"json": {"model": 7}}, 422, "invalid_request"),
        ({"json": {"model": "x" * 600}}, 422, "invalid_request"),
        ({"json": [1]}, 400, "not_json"),
        ({"json": None, "data": b"model=small"}, 400, "not_json"),
        (
            {"json": None, "data": gzip.compress(b"{}"), "headers": {"Content-Encoding": "gzip"}},
            415,
            "unsupported_media",
        ),
        (
            {"json": None, "data": b"x", "headers": {"Content-Type": "multipart/form-data"}},
            415,
            "unsupported_media",
        ),
        ({"path": "/v1/nothing"}, 404, "no_such_route"),
        ({"path": "/props"}, 405, "no_such_route"),
        ({"json": None, "headers": {"Content-Length": "1048577"}, "data": b"{}"}, 413, "body_too_large"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
def test_bad_requests_are_refused_in_the_callers_words(
    tmp_path: Path, more: dict[str, Any], status: int, code: str, path: str
) -> None:
    async def story(world: GatewayWorld, session: aiohttp.ClientSession) -> GatewayWorld:
        got, _, body = await post(world, session, **({"path": path} | more))
        document = json.loads(body)
        assert (got, document["error"]["code"]) == (status, code)
        if more.get("path", path) == "/v1/messages":
            assert document["type"] == "error" and document["request_id"] == world.records[0].request_id
        return world

    world = play(tmp_path, answering(whole(b"{}")), story, gateway_body_mib=1)
    assert [each.outcome for each in world.records] == [Outcome.REFUSED]
    assert not world.house.leases


def test_a_body_without_a_length_is_too_large_when_it_is(tmp_path: Path) -> None:
    async def pieces() -> Any:
        yield b'{"model": "small", "x": "'
        for _ in range(100):
            yield b"y" * 65536

    async def story(world: GatewayWorld, session: aiohttp.ClientSession) -> None:
        status, _, body = await post(world, session, json=None, data=pieces())
        assert (status, json.loads(body)["error"]["code"]) == (413, "body_too_large")

    play(tmp_path, answering(b""), story, gateway_body_mib=1)


def test_a_prompt_without_room_is_told_with_both_numbers(tmp_path: Path) -> None:
    said = {
        "code": 400,
        "type": "exceed_context_size_error",
        "n_prompt_tokens": 5000,
        "n_ctx": 4096,
        "message": "no",
    }
    answer = whole(
        json.dumps({"error": said}).encode(), "Content-Type: application/json", status="400 Bad Request"
    )

    async def story(world: GatewayWorld, session: aiohttp.ClientSession) -> list[Any]:
        return [json.loads((await post(world, session, path=path))[2]) for path in (CHAT, "/v1/messages")]

    openai, anthropic = play(tmp_path, answering(answer), story)
    assert openai["error"]["code"] == "context_length_exceeded"
    assert "5000 tokens > 4096" in openai["error"]["message"]
    assert anthropic["error"]["type"] == "invalid_request_error"
    assert anthropic["error"]["message"].startswith("prompt is too long: 5000 tokens > 4096 maximum")


# --- /upstream --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "target"),
    [
        ("/upstream/small/props?x=1", "/props?x=1"),
        ("/upstream/small/", "/"),
        ("/upstream/small/a%20b", "/a%20b"),
    ],
)
def test_upstream_passes_any_path_of_an_engine(tmp_path: Path, path: str, target: str) -> None:
    async def story(world: GatewayWorld, session: aiohttp.ClientSession) -> None:
        async with session.get(URL(world.address + path, encoded=True)) as answer:
            assert answer.status == 200

    assert asked_of(tmp_path, story).target == target


@pytest.mark.parametrize(
    "path",
    [
        "/upstream/small",
        "/upstream//props",
        "/upstream/small/../x",
        "/upstream/small/%2e%2e/x",
        "/upstream/small/a%0d%0aX: y",
        "/upstream/small/cors-proxy?url=http://a",
        "/upstream/small/tools",
        "/upstream/nobody/props",
    ],
)
def test_upstream_reaches_nothing_else(tmp_path: Path, path: str) -> None:
    async def story(world: GatewayWorld, _: aiohttp.ClientSession) -> tuple[bytes, list[Asked]]:
        host, port = world.address.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        answer = await reader.read()
        writer.close()
        return answer, world.house.engines["small"].asked

    answer, asked = play(tmp_path, answering(whole(b"{}")), story)
    assert not asked
    assert answer.split()[1] in {b"404", b"400"}
