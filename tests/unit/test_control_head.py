"""HEAD on the control API: the head of the answer, no body, and an end, also where GET would go on for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from aiohttp import ClientSession, UnixConnector, web

from lllm3090d.serving.daemon import Daemon
from lllm3090d.serving.history import History
from lllm3090d.surfaces.control import NDJSON, ControlApi
from lllm3090d.wire import EventKind

pytestmark = pytest.mark.unit

DEADLINE_S = 60.0


def serve(directory: Path, history: History, test: Callable[[ClientSession], Awaitable[None]]) -> None:
    """Run a test against the application on a real socket; of the daemon only its history is needed."""

    async def main() -> None:
        api = ControlApi(cast(Daemon, SimpleNamespace(history=history)), "252")
        runner = web.AppRunner(api.application(), access_log=None)
        await runner.setup()
        try:
            await web.UnixSite(runner, str(directory / "s")).start()
            async with asyncio.timeout(DEADLINE_S):
                async with ClientSession(connector=UnixConnector(str(directory / "s"))) as session:
                    await test(session)
        finally:
            history.close()
            await runner.cleanup()

    asyncio.run(main())


@pytest.mark.parametrize("query", ["", "?follow=0", "?follow=1", "?since=1&follow=1"])
def test_events_have_a_head_alone(tmp_path: Path, query: str) -> None:
    history = History()
    history.add(EventKind.SETTINGS, message="read again")

    async def test(session: ClientSession) -> None:
        async with session.head(f"http://d/v1/events{query}") as answer:
            assert answer.status == 200
            assert answer.content_type == NDJSON
            assert await answer.read() == b""
        async with session.get("http://d/v1/events") as answer:  # the same connection is usable
            assert b"read again" in await answer.read()
        assert history._subscribers == set()

    serve(tmp_path, history, test)


def test_nothing_comes_behind_the_head(tmp_path: Path) -> None:
    """Byte for byte: not even the end of a chunked body."""
    history = History()
    history.add(EventKind.SETTINGS, message="read again")

    async def test(_: ClientSession) -> None:
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "s"))
        writer.write(b"HEAD /v1/events?follow=1 HTTP/1.1\r\nHost: d\r\nConnection: close\r\n\r\n")
        head, separator, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        assert head.startswith(b"HTTP/1.1 200 ")
        assert (separator, body) == (b"\r\n\r\n", b"")

    serve(tmp_path, history, test)


def test_mistakes_are_told_by_their_status(tmp_path: Path) -> None:
    async def test(session: ClientSession) -> None:
        for target, status in (("version", 200), ("events?follow=2", 422), ("nowhere", 404), ("load", 404)):
            async with session.head(f"http://d/v1/{target}") as answer:
                assert (answer.status, await answer.read()) == (status, b"")

    serve(tmp_path, History(), test)
