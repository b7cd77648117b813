"""Many at once, and what an engine has really said: bytes, streams, clients that leave wherever they stand."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.gateway_answers import Recorded, generated, recorded
from lllm3090d.gateway.engine_connection import MOST_WAITING_BYTES, READ_BYTES, EngineConnection, connect
from lllm3090d.gateway.members import MemberScan, NotAnObjectError, members_of
from lllm3090d.gateway.record import Outcome
from lllm3090d.gateway.tokens import KEPT_BYTES, Tail
from lllm3090d.gateway.upstream import only_chunk
from tests.fakes.gateway_world import Asked, GatewayWorld, Respond, gateway_world

pytestmark = pytest.mark.unit

LIMIT_S = 60.0
CHAT = "/v1/chat/completions"
Story = Callable[[GatewayWorld, aiohttp.ClientSession], Awaitable[Any]]
EVENT = b'data: {"x": 1}\n\n'
BEGIN = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
PIECE = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
END = b"0\r\n\r\n"


def play(tmp_path: Path, respond: Respond, story: Story, **world: Any) -> Any:
    async def run() -> Any:
        async with (
            asyncio.timeout(LIMIT_S),
            gateway_world(tmp_path, respond, **world) as made,
            aiohttp.ClientSession(auto_decompress=False, connector=aiohttp.TCPConnector(limit=0)) as session,
        ):
            return await story(made, session)

    return asyncio.run(run())


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110  # what is awaited has no event; bounded by the time around each story
        await asyncio.sleep(0.002)


# --- bytes ------------------------------------------------------------------------------------------------------


def test_two_hundred_answers_are_the_engines_to_the_byte(tmp_path: Path) -> None:
    said = recorded()
    assert len(said) > 20, "recorded by: python -m bench.gateway_answers"
    answers = [*said, *generated(200 - len(said), seed=3)]
    assert max(len(each.wire) for each in answers) > 20_000_000
    now: list[Recorded] = []

    async def respond(_: Asked, writer: asyncio.StreamWriter) -> None:
        wire = now[0].wire
        for at in range(0, len(wire), 65_521):
            writer.write(wire[at : at + 65_521])
            await writer.drain()

    async def story(world: GatewayWorld, session: aiohttp.ClientSession) -> None:
        for each in answers:
            now[:] = [each]
            path = CHAT if each.method == "POST" else "/upstream/small/x"
            asked = session.request(
                each.method, world.address + path, data=b'{"model": "small"}' if path == CHAT else None
            )
            async with asked as answer:
                got = (answer.status, await answer.read())
                kind, encoding = answer.headers.get("Content-Type"), answer.headers.get("Content-Encoding")
            assert got == each.read(), each.name
            head = each.wire.partition(b"\r\n\r\n")[0].decode()
            assert kind is None or f"Content-Type: {kind}" in head, each.name
            assert (encoding == "gzip") is ("Content-Encoding: gzip" in head), each.name

    play(tmp_path, respond, story)


@pytest.mark.parametrize(
    ("data", "content"),
    [
        (b"3\r\nabc\r\n", b"abc"),
        (b"00a\r\n0123456789\r\n", b"0123456789"),
        (b"2\r\n\r\n\r\n", b"\r\n"),
        (b"0\r\n\r\n", None),
        (b"3;x=1\r\nabc\r\n", None),
        (b"+3\r\nabc\r\n", None),
        (b"0x3\r\nabc\r\n", None),
        (b" 3\r\nabc\r\n", None),
        (b"3\nabc\r\n", None),
        (b"3\r\nabc\r\n1\r\nd\r\n", None),
        (b"3\r\nabc\r\n1", None),
        (b"3\r\nabc\r", None),
        (b"3\r\nabc\n\n", None),
        (b"\r\n3\r\nabc\r\n", None),
        (b"111111111\r\nabc\r\n", None),
        (b"", None),
    ],
)
def test_a_chunk_that_comes_alone_is_known(data: bytes, content: bytes | None) -> None:
    assert only_chunk(data) == content


@pytest.mark.parametrize("cuts", [1, 2, 3, 5, 50])
def test_chunks_in_lockstep_whatever_their_pieces(tmp_path: Path, cuts: int) -> None:
    """Each write of the engine is one read of ours, for it waits until we want one."""
    contents = [b"a", b"data: 1\n\n", b"\r\n", b"0\r\n\r\n", b"z" * 300, b"b"]
    wire = b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in contents) + END
    size = -(-len(wire) // cuts)
    writes = [wire[at : at + size] for at in range(0, len(wire), size)]
    if cuts == 1:  # each chunk alone
        writes = [*(b"%x\r\n%b\r\n" % (len(each), each) for each in contents), END]
    taken = asyncio.Semaphore(0)

    async def respond(_: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(BEGIN)
        for each in writes:
            await taken.acquire()
            writer.write(each)

    async def story(world: GatewayWorld, session: aiohttp.ClientSession) -> bytes:
        engine = EngineConnection.read

        async def read(self: EngineConnection) -> bytes:
            taken.release()
            return await engine(self)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(EngineConnection, "read", read)
            async with session.post(world.address + CHAT, json={"model": "small"}) as answer:
                return await answer.read()

    assert play(tmp_path, respond, story) == b"".join(contents)


@given(
    st.text(max_size=12).map(lambda text: json.dumps({"model": text}))
    | st.text(alphabet='{}[]",:\\ modelstrau1.e-', max_size=40)
    | st.sampled_from(
        [
            '{"model": "a", "model": ["b"]}',
            '{"model": ["b"], "model": "a"}',
            '{"model": 1' + "0" * 5000 + "}",
            '{"model": "' + "x" * 5000 + '"}',
            '{"model": "' + "\\ud83d\\ude00" * 342 + '"}',
            '{"stream": true, "model": null} ',
            '{"model": "a"} trailing',
            '\ufeff{"model": "a"}',
            "[" * 100_000,
            "",
        ]
    )
)
def test_a_whole_document_is_read_as_the_scan_reads_it(text: str) -> None:
    found = members_of(text.encode(), ("model", "stream"))
    scan = MemberScan(("model", "stream"))
    try:
        scan.feed(text.encode())
    except NotAnObjectError:
        assert found is None
    else:
        assert found is None or found == scan.found


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-16-le"])
def test_only_utf_8_is_read(encoding: str) -> None:
    assert members_of('{"model": "a"}'.encode(encoding), ("model",)) is None


@pytest.mark.parametrize("size", [1, 7, 1000, KEPT_BYTES, 10**6])
def test_the_end_of_an_answer_is_kept_whatever_its_pieces(size: int) -> None:
    text = b"x" * (3 * KEPT_BYTES) + b'{"prompt_tokens": 12345, "completion_tokens": 678}'
    tail = Tail()
    for at in range(0, len(text), size):
        tail.feed(text[at : at + size])
    assert tail.tokens() == (12345, 678)


# --- many -------------------------------------------------------------------------------------------------------


def test_two_hundred_slow_streams_at_once_lose_nothing(tmp_path: Path) -> None:
    begun, go = list[Asked](), asyncio.Event()

    async def respond(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(BEGIN + PIECE)
        begun.append(asked)
        await go.wait()
        for _ in range(5):
            writer.write(PIECE)
            await writer.drain()
        writer.write(END)

    async def story(world: GatewayWorld, session: aiohttp.ClientSession) -> None:
        async def ask() -> bytes:
            async with session.post(world.address + CHAT, json={"model": "small"}) as answer:
                return await answer.read()

        asks = [asyncio.create_task(ask()) for _ in range(200)]
        await until(lambda: len(begun) == 200)
        assert len(world.gateway.in_flight) == 200
        go.set()
        assert set(await asyncio.gather(*asks)) == {EVENT * 6}
        await until(lambda: not world.gateway.in_flight)
        assert not world.house.leases

    play(tmp_path, respond, story, slots=200)


def test_a_reader_that_stops_holds_up_the_engine_and_nobody_else(tmp_path: Path) -> None:
    large = b"%x\r\n%b\r\n" % (1 << 16, b"x" * (1 << 16))
    written = [0]

    async def respond(asked: Asked, writer: asyncio.StreamWriter) -> None:
        if b"quick" in asked.body:
            writer.write(BEGIN + PIECE + END)
            return
        writer.write(BEGIN)
        for _ in range(1600):
            writer.write(large)
            await writer.drain()
            written[0] += len(large)
        writer.write(END)

    async def story(world: GatewayWorld, session: aiohttp.ClientSession) -> None:
        async with session.post(world.address + CHAT, json={"model": "small"}) as slow:
            before = -1
            while before != written[0]:  # until nothing moves any more
                before = written[0]
                for _ in range(20):
                    async with session.post(
                        world.address + CHAT, json={"model": "small", "x": "quick"}
                    ) as answer:
                        assert await answer.read() == EVENT
            assert written[0] < 20_000_000  # buffers of the sockets, of us and of the client
            assert len(await slow.read()) == 1600 << 16

    play(tmp_path, respond, story, slots=4)


def test_clients_that_leave_wherever_they_stand_leave_nothing_behind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chance = random.Random(11)  # noqa: S311  # to be the same each time
    count = 120

    async def respond(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(BEGIN)
        while not asked.left.is_set():  # it goes on until it is told to stop
            writer.write(PIECE)
            await writer.drain()
            await asyncio.sleep(0.005)

    async def story(world: GatewayWorld, _: aiohttp.ClientSession) -> None:
        host, port = world.address.removeprefix("http://").split(":")
        body = json.dumps({"stream": True, "messages": ["x" * 3000], "model": "small"}).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()

        async def leave() -> None:
            await asyncio.sleep(chance.random() * 0.3)
            _, writer = await asyncio.open_connection(host, int(port))
            whole = head + body
            writer.write(whole if chance.random() < 0.6 else whole[: chance.randrange(len(whole))])
            await asyncio.sleep(chance.choice([0, 0.01, 0.2]) * chance.random())
            if chance.random() < 0.5:
                writer.transport.abort()
            else:
                writer.close()

        await asyncio.gather(*(leave() for _ in range(count)))
        engine, line = world.house.engines["small"], world.gateway.seating.lines()["small"]
        await until(lambda: not world.gateway.in_flight and not engine.open)
        assert (line.in_work, line.waiting, world.house.leases) == (0, 0, set())
        assert len(world.records) >= count // 4  # one that is reset at once is never heard of
        assert {each.outcome for each in world.records} == {Outcome.CLIENT_CLOSED}
        assert 200 not in {each.status for each in world.records if not each.begun}

    play(tmp_path, respond, story, slots=8, gateway_queue=count)
    assert [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING] == []


def test_a_client_that_leaves_while_it_is_written_to_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def gone(*_: object) -> None:
        raise ConnectionResetError("Cannot write to closing transport")

    async def respond(_: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(BEGIN + PIECE + END)

    async def story(world: GatewayWorld, session: aiohttp.ClientSession) -> None:
        with pytest.raises(aiohttp.ServerDisconnectedError):
            await session.post(world.address + CHAT, json={"model": "small"})
        await until(lambda: world.records)
        assert world.records[0].outcome is Outcome.CLIENT_CLOSED

    monkeypatch.setattr("lllm3090d.gateway.gateway.relay", gone)
    play(tmp_path, respond, story)
    assert [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING] == []


# --- one connection ---------------------------------------------------------------------------------------------


def joined(story: Callable[[EngineConnection, socket.socket], Awaitable[None]]) -> None:
    async def run() -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setblocking(False)
        with contextlib.closing(EngineConnection(ours)) as connection, theirs:
            await asyncio.wait_for(story(connection, theirs), 10)

    asyncio.run(run())


def test_what_was_said_before_the_other_side_closed_is_read_though_it_takes_no_more() -> None:
    async def story(connection: EngineConnection, theirs: socket.socket) -> None:
        theirs.sendall(b"413, and that is it")
        theirs.close()
        assert not await connection.write(b"x" * 1000)
        assert not await connection.write(b"x" * 1000)
        assert await connection.read() == b"413, and that is it"
        assert await connection.read() == b""

    joined(story)


def test_a_connection_that_breaks_off_is_no_end() -> None:
    async def story(connection: EngineConnection, theirs: socket.socket) -> None:
        assert await connection.write(b"never read")
        theirs.close()  # with something unread, which resets the connection
        with pytest.raises(ConnectionResetError):
            await connection.read()

    joined(story)


def test_who_writes_waits_for_the_other_side_and_loses_nothing() -> None:
    sent = random.Random(1).randbytes(3_000_000)  # noqa: S311  # to be the same each time

    async def story(connection: EngineConnection, theirs: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        writing, got = asyncio.create_task(connection.write(sent)), bytearray()
        assert not (await asyncio.wait({writing}, timeout=0.02))[0]
        while len(got) < len(sent):
            got += await loop.sock_recv(theirs, 10_007)
        assert got == sent
        assert await writing

    joined(story)


def test_what_nobody_reads_stays_with_the_other_side() -> None:
    async def story(connection: EngineConnection, theirs: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        theirs.send(b"a")
        assert await connection.read() == b"a"
        sending = asyncio.create_task(loop.sock_sendall(theirs, b"b" * 5_000_000))
        assert not (await asyncio.wait({sending}, timeout=0.02))[0]
        got = len(first := await connection.read())
        assert len(first) <= MOST_WAITING_BYTES + READ_BYTES
        while got < 5_000_000:
            got += len(await connection.read())
        await sending

    joined(story)


@pytest.mark.parametrize("reads", [True, False])
def test_the_end_of_a_connection_wakes_who_waits_for_it(reads: bool) -> None:
    async def story(connection: EngineConnection, _: socket.socket) -> None:
        waits: asyncio.Task[Any] = asyncio.create_task(
            connection.read() if reads else connection.write(b"x" * 5_000_000)
        )
        assert not (await asyncio.wait({waits}, timeout=0.02))[0]
        connection.close()
        assert await waits == (b"" if reads else False)

    joined(story)


def test_a_listener_without_room_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "s"

    async def run() -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen(0)
            first = await connect(path)
            second = asyncio.create_task(connect(path))
            assert not (await asyncio.wait({second}, timeout=0.02))[0]
            listener.accept()[0].close()
            (await asyncio.wait_for(second, 10)).close()
            first.close()
        with pytest.raises(ConnectionRefusedError):
            await connect(path)

    asyncio.run(run())
