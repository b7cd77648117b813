"""Hostile requests, byte by byte: what an engine's socket sees of them, and what their sender is told."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lllm3090d.gateway.connections import (
    FILES_OF_A_CONNECTION,
    FILES_OF_OTHERS,
    KEEPALIVE_TIMEOUT_S,
    LARGEST_LINE_BYTES,
    MOST_CONNECTIONS,
    MOST_HEADERS,
    Patience,
    most_connections,
)
from lllm3090d.gateway.form import LARGEST_HEAD_BYTES, fault
from lllm3090d.gateway.record import Outcome
from lllm3090d.gateway.routes import CLOSED
from tests.fakes.gateway_world import Asked, GatewayWorld, gateway_world
from tests.unit.test_gateway_wire import CHAT, LIMIT_S, answering, chunked, whole

pytestmark = pytest.mark.unit

HOST = b"Host: localhost\r\n"
DOCUMENT = b'{"model":"small"}'
POST = b"POST " + CHAT.encode() + b" HTTP/1.1\r\n" + HOST
CLOSE = b"Connection: close\r\n\r\n"
GET = b"GET /upstream/small/props HTTP/1.1\r\n" + HOST
CHUNKED = b"\r\n11\r\n" + DOCUMENT + b"\r\n0\r\n\r\n"
HIDDEN = b"GET /upstream/small/hidden HTTP/1.1\r\n" + HOST + b"\r\n"
# None of these is HTTP that is read in one way only.
REFUSED = {
    "a length and chunks": POST + b"Content-Length: 17\r\nTransfer-Encoding: chunked\r\n" + CHUNKED,
    "chunks and a length": POST + b"Transfer-Encoding: chunked\r\nContent-Length: 17\r\n" + CHUNKED,
    "the same length twice": POST + b"Content-Length: 17\r\nContent-Length: 17\r\n\r\n" + DOCUMENT,
    "two lengths": POST + b"Content-Length: 17\r\nContent-Length: 5\r\n\r\n" + DOCUMENT,
    "a list of lengths": POST + b"Content-Length: 17, 17\r\n\r\n" + DOCUMENT,
    "a length with a sign": POST + b"Content-Length: +17\r\n\r\n" + DOCUMENT,
    "a length below nothing": POST + b"Content-Length: -1\r\n\r\n" + DOCUMENT,
    "a length as Python has it": POST + b"Content-Length: 1_7\r\n\r\n" + DOCUMENT,
    "a space before the colon": POST + b"Content-Length : 17\r\n\r\n" + DOCUMENT,
    "line feeds alone": POST.replace(b"\r\n", b"\n") + b"Content-Length: 17\n\n" + DOCUMENT,
    "a line feed in a header": POST + b"X: a\nContent-Length: 17\r\n\r\n" + DOCUMENT,
    "a carriage return in a header": POST + b"X: a\rY: b\r\nContent-Length: 17\r\n\r\n" + DOCUMENT,
    "a NUL in a header": POST + b"X: a\0b\r\nContent-Length: 17\r\n\r\n" + DOCUMENT,
    "a folded header": POST + b"X: a\r\n b\r\nContent-Length: 17\r\n\r\n" + DOCUMENT,
    "another coding": POST + b"Transfer-Encoding: xchunked\r\n" + CHUNKED,
    "chunks and then another coding": POST + b"Transfer-Encoding: chunked, identity\r\n" + CHUNKED,
    "another coding and then chunks": POST + b"Transfer-Encoding: gzip, chunked\r\n" + CHUNKED,
    "chunks twice": POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n" + CHUNKED,
    "a coding behind a tab": POST + b"Transfer-Encoding: \x0bchunked\r\n" + CHUNKED,
    "chunks in HTTP/1.0": POST.replace(b"1.1", b"1.0") + b"Transfer-Encoding: chunked\r\n" + CHUNKED,
    "HTTP/1.2": GET.replace(b"1.1", b"1.2") + b"\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"a" * 60 + b"\r\n\r\n",
    "another server's address": b"GET http://evil/health HTTP/1.1\r\n" + HOST + b"\r\n",
    "an address and ours": b"GET http://localhost/upstream/small/props HTTP/1.1\r\n" + HOST + b"\r\n",
    "a tunnel, and what is sent into it": b"CONNECT a:1 HTTP/1.1\r\n" + HOST + b"\r\n" + HIDDEN,
    "TRACE": GET.replace(b"GET", b"TRACE") + b"\r\n",
    "a method of nobody": GET.replace(b"GET", b"G3T\x01") + b"\r\n",
    "two hosts": GET + b"Host: evil.example\r\n\r\n",
    "no host": GET.replace(HOST, b"") + b"\r\n",
    "two origins": GET + b"Origin: http://localhost\r\nOrigin: http://evil.example\r\n\r\n",
    "two keys": GET + b"x-api-key: a\r\nX-Api-Key: b\r\n\r\n",
    "a fragment": GET.replace(b"/props", b"/cors-proxy#x") + b"\r\n",
    "an escape of cpp-httplib": GET.replace(b"/props", b"/%u0063ors-proxy") + b"\r\n",
    "half an escape": GET.replace(b"/props", b"/%2") + b"\r\n",
    "bytes that are no ASCII": GET.replace(b"/props", b"/\xc3\xa9") + b"\r\n",
    "bytes that are no UTF-8": GET.replace(b"/props", b"/\xff") + b"\r\n",
    "the same in a query": GET.replace(b"/props", b"/props?\xff") + b"\r\n",
    "a tab": GET.replace(b"/props", b"/a\tb") + b"\r\n",
    "a backslash": GET.replace(b"/props", b"/a\\..\\b") + b"\r\n",
    "a header without a colon": GET + b"lllm3090_secret\r\n\r\n",
    "a header without a name": GET + b": lllm3090_secret\r\n\r\n",
    "a name with a space": GET + b"a b: c\r\n\r\n",
    "a space before the first header": GET.replace(HOST, b" " + HOST) + b"\r\n",
    "five hundred headers": GET + b"".join(b"a%d: b\r\n" % number for number in range(500)) + b"\r\n",
    "a line of 100 kB": GET + b"X: " + b"y" * 100_000 + b"\r\n\r\n",
}
# What follows the head is refused before it is passed on as a whole.
BROKEN_BODIES = {
    "a chunk's line feed alone": b"11\n" + DOCUMENT + b"\r\n0\r\n\r\n",
    "a line feed in an extension": b"11;a\nb\r\n" + DOCUMENT + b"\r\n0\r\n\r\n",
    "a size with a prefix": b"0x11\r\n" + DOCUMENT + b"\r\n0\r\n\r\n",
    "more than the size": b"10\r\n" + DOCUMENT + b"\r\n0\r\n\r\n",
}

IMPATIENT = Patience(head_s=0.05, body_s=0.1, body_bytes_per_s=1e6, answer_s=0.2, linger_s=0.05, look_s=0.01)
# Where a head is to be read: it comes at once, which on a machine with other work is not within 50 ms.
READS_HEADS = replace(IMPATIENT, head_s=2.0)


def over_the_wire(tmp_path: Path, story: Callable[[GatewayWorld], Awaitable[Any]], **world: Any) -> Any:
    async def run() -> Any:
        async with (
            asyncio.timeout(LIMIT_S),
            gateway_world(tmp_path, answering(whole(b"{}")), **world) as made,
        ):
            return await story(made)

    return asyncio.run(run())


async def until(question: Callable[[], object]) -> None:
    """Let others run until the answer is true; the limit of the test is the deadline."""
    while True:
        if question():
            return
        await asyncio.sleep(0.001)


async def connect(world: GatewayWorld) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = world.address.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


async def say(world: GatewayWorld, *pieces: bytes) -> bytes:
    """Send, and read until the gateway closes."""
    reader, writer = await connect(world)
    answer = bytearray()
    try:
        for piece in pieces:
            writer.write(piece)
        while data := await reader.read(65536):
            answer += data
    except ConnectionError:
        pass  # it closed before it had read everything
    finally:
        writer.close()
    return bytes(answer)


def document(answer: bytes) -> Any:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"Content-Type: application/json" in head, answer
    return json.loads(body)["error"]


@pytest.mark.parametrize("name", REFUSED)
def test_what_could_be_read_in_two_ways_is_refused(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)

    async def story(world: GatewayWorld) -> tuple[bytes, list[Asked]]:
        # The connection is closed by the gateway: nothing behind such a request is read as another one.
        return await say(world, REFUSED[name], HIDDEN), world.house.engines["small"].asked

    answer, asked = over_the_wire(tmp_path, story)
    assert not asked
    assert answer.split(b" ", 2)[1] == b"400" and len(re.findall(rb"HTTP/1\.\d \d{3} ", answer)) == 1
    error = document(answer)
    assert error["code"] == "invalid_request" and error["hint"]
    # Neither sender nor journal is told what was sent, which may be a key.
    assert b"lllm3090_secret" not in answer and b"yyyy" not in answer
    told = [(each.getMessage(), each.exc_info) for each in caplog.records if each.name != "asyncio"]
    assert not any("secret" in text or trace for text, trace in told)


@pytest.mark.parametrize("name", BROKEN_BODIES)
@pytest.mark.parametrize("late", [False, True])
def test_a_body_that_breaks_its_form_is_no_request_to_an_engine(
    tmp_path: Path, name: str, late: bool
) -> None:
    async def story(world: GatewayWorld) -> list[Asked]:
        reader, writer = await connect(world)
        writer.write(POST + b"Transfer-Encoding: chunked\r\n\r\n")
        if late:
            await until(lambda: world.gateway.in_flight)
        writer.write(BROKEN_BODIES[name] + HIDDEN)
        assert b" 200 " not in await reader.read()
        writer.close()
        return world.house.engines["small"].asked

    assert not over_the_wire(tmp_path, story, patience=READS_HEADS)


def test_an_upgrade_is_an_ordinary_request(tmp_path: Path) -> None:
    upgrade = b"Connection: Upgrade, close\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x\r\n"

    async def story(world: GatewayWorld) -> list[Asked]:
        answer = await say(world, GET + upgrade + b"\r\n")
        assert answer.startswith(b"HTTP/1.1 200")
        posted = await say(world, POST + upgrade + b"Content-Length: 17\r\n\r\n" + DOCUMENT)
        assert posted.startswith(b"HTTP/1.1 200")
        foreign = await say(world, GET + upgrade + b"Origin: http://evil.example\r\n\r\n")
        assert foreign.startswith(b"HTTP/1.1 403")
        return world.house.engines["small"].asked

    asked = over_the_wire(tmp_path, story)
    assert [each.body for each in asked] == [b"", DOCUMENT]
    assert not {b"upgrade", b"sec-websocket-key"} & {name for each in asked for name, _ in each.headers}


def test_requests_sent_ahead_are_answered_one_by_one(tmp_path: Path) -> None:
    async def story(world: GatewayWorld) -> int:
        answer = await say(world, GET + b"\r\n", GET + b"\r\n", GET + CLOSE)
        assert answer.count(b"HTTP/1.1 200") == 3
        return len(world.house.engines["small"].asked)

    assert over_the_wire(tmp_path, story) == 3


# --- /upstream --------------------------------------------------------------------------------------------------

# Spellings of what is closed, of what is above, and of what only looks like it.
PLACES = st.lists(
    st.sampled_from(
        [
            *(
                "/",
                "//",
                "..",
                ".",
                "%2e",
                "%2E%2e",
                "%252e%252e",
                "%2f",
                "%252f",
                ";",
                ";/",
                "?",
                "%3f",
                "#",
            ),
            *(
                "%23",
                "\\",
                "%5c",
                "%00",
                "%0d%0a",
                "%u002e",
                "@",
                ":80",
                "http://evil",
                "props",
                "cors-proxy",
            ),
            *(
                "%63ors-proxy",
                "tools",
                "TOOLS",
                "small",
                "upstream",
                "\r\n",
                " ",
                "\xe9",
                "%e9",
                "%",
                "~",
                "*",
            ),
        ]
    ),
    max_size=6,
).map("".join)
HEADERS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                *(
                    "Host",
                    "Cookie",
                    "Authorization",
                    "x-api-key",
                    "X-Forwarded-Host",
                    "Forwarded",
                    "Connection",
                ),
                *(
                    "Transfer-Encoding",
                    "Content-Length",
                    "Upgrade",
                    "TE",
                    "Trailer",
                    "X-Kept",
                    "Expect",
                    "host ",
                ),
            ]
        ),
        st.sampled_from(
            [
                *(
                    "secret",
                    "evil.example",
                    "chunked",
                    "5",
                    "5\r\nHost: evil.example",
                    "5\nX: y",
                    "close",
                    "",
                ),
                *("keep-alive, Host", "websocket", "\x00", "\xff", "trailers", " 5", "5 "),
            ]
        ),
    ),
    max_size=4,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(["GET", "POST", "HEAD", "PUT", "CONNECT", "OPTIONS"]),
    PLACES,
    HEADERS,
    st.sampled_from(["", "hello", '{"model":"small"}', "0\r\n\r\nGET /upstream/small/hidden HTTP/1.1\r\n"]),
)
def test_an_engine_is_sent_one_request_that_is_ours(
    tmp_path_factory: pytest.TempPathFactory, method: str, place: str, more: list[tuple[str, str]], body: str
) -> None:
    lines = [
        f"{method} /upstream/small/{place} HTTP/1.1",
        "Host: localhost",
        "x-api-key: secret",
        "Connection: close",
    ]
    lines += [f"{name}: {value}" for name, value in more]
    raw = ("\r\n".join(lines) + "\r\n\r\n" + body).encode("latin-1")

    async def story(world: GatewayWorld) -> list[Asked]:
        await say(world, raw)
        await until(lambda: not world.gateway.in_flight)
        return world.house.engines["small"].asked

    directory = tmp_path_factory.mktemp("e", numbered=True)
    # The engine of these tests reads one request from each connection, with another parser than the gateway's own.
    for asked in over_the_wire(directory, story, patience=IMPATIENT):
        names = [name for name, _ in asked.headers]
        assert names.count(b"host") == 1 and (b"host", b"engine") in asked.headers
        assert not {b"cookie", b"authorization", b"x-api-key", b"forwarded", b"x-forwarded-host"} & set(
            names
        )
        assert names.count(b"content-length") + names.count(b"transfer-encoding") <= 1
        path = asked.target.partition("?")[0]
        assert path.startswith("/") and "#" not in path and "%u" not in path
        assert path.split("/")[1] not in CLOSED and ".." not in path.split("/")


@pytest.mark.parametrize(
    ("target", "good"),
    [
        *[(each, True) for each in ("/", "/v1/models?a=b&c=%20", "/a;b=c", "/a:b@c", "/a+b~c", "/a|b{c}")],
        *[
            (each, False)
            for each in ("", "*", "a", "http://a/", "/a b", "/a#b", "/%", "/%4", "/%zz", "/%u0041")
        ],
        *[(each, False) for each in ("/a\\b", "/é", "/\udcff", "/a\x7f")],
    ],
)
def test_targets(target: str, good: bool) -> None:
    assert (fault("GET", target, (1, 1), []) is None) is good


@pytest.mark.parametrize("version", [(0, 9), (1, 2), (2, 0), (3, 0)])
def test_other_versions(version: tuple[int, int]) -> None:
    assert fault("GET", "/", (1, 0), []) is None
    assert "version" in (fault("GET", "/", version, []) or "")


# --- time and room ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pieces", [[], [b"G"], [b"GET / HTTP/1.1\r\nHost: localhost\r\nX: "]])
def test_who_sends_no_head_is_not_waited_for(tmp_path: Path, pieces: list[bytes]) -> None:
    async def story(world: GatewayWorld) -> bytes:
        return await say(world, *pieces)

    assert over_the_wire(tmp_path, story, patience=IMPATIENT) == b""


def test_a_head_by_the_byte_is_not_waited_for(tmp_path: Path) -> None:
    async def story(world: GatewayWorld) -> None:
        reader, writer = await connect(world)
        # However often something comes: the time counts from its first byte.
        reading = asyncio.create_task(reader.read())
        for byte in b"GET /health HTTP/1.1\r\nX: " + b"y" * 20_000:
            if reading.done():
                break
            writer.write(bytes([byte]))
            await asyncio.wait({reading}, timeout=0.002)
        assert reading.done()
        writer.close()

    over_the_wire(tmp_path, story, patience=IMPATIENT)


def test_a_connection_that_was_used_may_idle(tmp_path: Path) -> None:
    patience = replace(IMPATIENT, head_s=0.3)

    async def story(world: GatewayWorld) -> None:
        reader, writer = await connect(world)
        for _ in range(2):
            writer.write(GET + b"\r\n")
            assert (await reader.readuntil(b"{}")).startswith(b"HTTP/1.1 200")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(patience.head_s * 3):
                    await reader.read(1)
        writer.close()

    over_the_wire(tmp_path, story, patience=patience)


def test_a_body_that_does_not_come_frees_its_place(tmp_path: Path) -> None:
    async def story(world: GatewayWorld) -> GatewayWorld:
        head = POST + b"Content-Length: 100\r\n\r\n"
        assert await say(world, head + DOCUMENT[:-1] + b',"a":"') == b""
        await until(lambda: not world.gateway.in_flight)
        return world

    world = over_the_wire(tmp_path, story, patience=READS_HEADS)
    assert [each.outcome for each in world.records] == [Outcome.CLIENT_CLOSED]
    assert not world.house.leases


def test_a_body_that_is_kept_waiting_has_its_time(tmp_path: Path) -> None:
    """While its model is loaded the gateway reads little of it: that is not the client's fault."""
    text = b'{"model":"small","a":"' + b"y" * 3_000_000 + b'"}'

    async def story(world: GatewayWorld) -> bytes:
        world.house.may_load.clear()
        reader, writer = await connect(world)
        writer.write(POST + b"Content-Length: %d\r\n\r\n" % len(text) + text)
        await until(lambda: world.house.loads)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(IMPATIENT.body_s * 5):
                await reader.read(1)
        world.house.may_load.set()
        answer = await reader.readuntil(b"{}")
        writer.close()
        return answer

    patience = Patience(head_s=5, body_s=0.1, body_bytes_per_s=1e7, answer_s=5, look_s=0.01)
    assert over_the_wire(tmp_path, story, patience=patience, loaded=False).startswith(b"HTTP/1.1 200")


def test_who_takes_nothing_of_an_answer_is_given_up(tmp_path: Path) -> None:
    async def respond(_: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(chunked(b"x" * 30_000_000))
        await writer.drain()

    async def run() -> GatewayWorld:
        async with asyncio.timeout(LIMIT_S), gateway_world(tmp_path, respond, patience=READS_HEADS) as world:
            _, writer = await connect(world)
            writer.write(GET + b"\r\n")
            await until(lambda: world.records)
            writer.close()
            return world

    world = asyncio.run(run())
    assert [each.outcome for each in world.records] == [Outcome.CLIENT_CLOSED]


def test_a_head_of_many_long_lines_is_too_large(tmp_path: Path) -> None:
    async def story(world: GatewayWorld) -> bytes:
        reader, writer = await connect(world)
        for number in range(100):
            writer.write((GET if number == 0 else b"") + b"a%d: " % number + b"b" * 30_000 + b"\r\n")
            try:
                await writer.drain()
            except ConnectionError:
                break
            if reader.at_eof():
                break
            await asyncio.sleep(0)
        answer = await reader.read()
        writer.close()
        return answer

    try:
        answer = over_the_wire(tmp_path, story)
    except ConnectionError:
        return  # the end came before its reason
    assert answer.startswith(b"HTTP/1.1 431") and document(answer)["code"] == "invalid_request"


def test_who_asks_nothing_makes_room_for_who_does(tmp_path: Path) -> None:
    async def story(world: GatewayWorld) -> None:
        idle = [await connect(world) for _ in range(3)]
        assert (await say(world, GET + CLOSE)).startswith(b"HTTP/1.1 200")
        assert await idle[0][0].read() == b""  # the one that has idled for longest
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await idle[1][0].read()
        for _, writer in idle:
            writer.close()

    over_the_wire(tmp_path, story, most_connections=3)


def test_with_all_at_work_one_more_is_sent_away(tmp_path: Path) -> None:
    async def respond(_: Asked, writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    async def run() -> bytes:
        async with (
            asyncio.timeout(LIMIT_S),
            gateway_world(tmp_path, respond, most_connections=2) as world,
        ):
            busy = [await connect(world) for _ in range(2)]
            for _, writer in busy:
                writer.write(GET + b"\r\n")
            await until(lambda: len(world.house.engines["small"].asked) == 2)
            answer = await say(world, GET + CLOSE)
            for _, writer in busy:
                writer.close()
            await until(lambda: not world.gateway.in_flight)
            return answer

    answer = asyncio.run(run())
    assert answer.startswith(b"HTTP/1.1 429") and document(answer)["code"] == "too_many_requests"


def test_without_clients_no_timer_runs(tmp_path: Path) -> None:
    async def story(world: GatewayWorld) -> None:
        loop = asyncio.get_running_loop()
        await say(world, GET + CLOSE)

        def timers() -> list[str]:
            scheduled = getattr(loop, "_scheduled", [])
            return [repr(each) for each in scheduled if "Clients" in repr(each) and not each.cancelled()]

        await until(lambda: not timers())

    over_the_wire(tmp_path, story, patience=IMPATIENT)


def test_the_limits_are_those_of_the_how_to() -> None:
    told = (Path(__file__).parents[2] / "docs" / "how-to" / "secure-the-gateway.md").read_text(
        encoding="utf-8"
    )
    usual = Patience()
    files = MOST_CONNECTIONS * FILES_OF_A_CONNECTION + FILES_OF_OTHERS
    assert f"a connection without one | {usual.head_s:.0f} s |" in told
    assert f"| {usual.body_s:.0f} s, and 1 s more for each KiB |" in told and usual.body_bytes_per_s == 1024
    assert f"between requests | {KEEPALIVE_TIMEOUT_S:.0f} s |" in told
    assert f"nothing is taken | {usual.answer_s / 60:.0f} min |" in told
    assert f"| {MOST_CONNECTIONS}, fewer where `LimitNOFILE` is below {files:,};" in told
    assert (
        f"{MOST_HEADERS} headers and lines of {LARGEST_LINE_BYTES >> 10} KiB, {LARGEST_HEAD_BYTES >> 10} KiB"
        in told
    )


@pytest.mark.parametrize(("files", "most"), [(1024, 320), (65536, MOST_CONNECTIONS), (64, 16)])
def test_there_are_files_for_all_connections(monkeypatch: pytest.MonkeyPatch, files: int, most: int) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (files, files))
    assert most_connections() == most
