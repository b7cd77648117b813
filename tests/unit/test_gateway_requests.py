"""Requests that have ended: recorded beside the loop, bounded, told to followers, counted. Never a word of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pytest
from aiohttp import ClientSession, UnixConnector, web
from prometheus_client.parser import text_string_to_metric_families

from lllm3090d.checkpoints.library import resolve
from lllm3090d.errors import ErrorCode
from lllm3090d.gateway import request_log as module
from lllm3090d.gateway import request_table
from lllm3090d.gateway.figures import MOST_MODELS, OTHERS, GatewayFigures
from lllm3090d.gateway.metrics import families
from lllm3090d.gateway.record import Outcome, Record
from lllm3090d.gateway.request_log import RequestLog
from lllm3090d.gateway.request_table import DAY_US, Ended, Kept, RequestTable, Wanted, view_of
from lllm3090d.gateway.service import GatewayService
from lllm3090d.gateway.turns import Priority, Turns
from lllm3090d.serving.daemon import Daemon
from lllm3090d.serving.metrics import Figures, exposition
from lllm3090d.serving.moments import now_us, time_text
from lllm3090d.serving.statistics import Statistics
from lllm3090d.store import Store
from lllm3090d.surfaces.control import ControlApi
from lllm3090d.wire_requests import RequestView
from tests.fakes.card_scenes import Desk
from tests.fakes.gateway_world import Asked, gateway_world

pytestmark = pytest.mark.unit

TIMEOUT_S = 60.0
T = TypeVar("T")


def run(work: Awaitable[T]) -> T:
    async def main() -> T:
        return await asyncio.wait_for(work, TIMEOUT_S)

    return asyncio.run(main())


def record(number: int, model: str = "qwen", **more: Any) -> Record:
    return Record(f"req_{number}", "/v1/chat/completions", 0.0, model, **({"status": 200} | more))


USUAL = Kept(30, 1000)


def log_at(path: Path, kept: Kept = USUAL) -> tuple[Store, RequestTable, RequestLog]:
    store = Store(path / "state.db")
    table = RequestTable(lambda: store, lambda: kept)
    return store, table, RequestLog(table)


def stop_growing(store: Store) -> None:
    """SQLite then fails as on a full disk."""
    store.rows(f"PRAGMA max_page_count = {store.rows('PRAGMA page_count')[0][0]}")


def ids(views: tuple[RequestView, ...]) -> list[str]:
    return [view.request_id for view in views]


# --- what is told of one -----------------------------------------------------------------------------------


def test_a_client_that_left_has_no_status() -> None:
    view = view_of(Ended(0, record(1, outcome=Outcome.CLIENT_CLOSED, begun=True)))
    assert view.status is None and view.outcome == "client-closed"


def test_what_an_engine_answered_with_a_failure_was_not_served() -> None:
    for status, outcome in ((200, Outcome.SERVED), (400, Outcome.ENGINE_ERROR), (500, Outcome.ENGINE_ERROR)):
        ended = record(1, status=status)
        ended.settle()
        assert ended.outcome is outcome
    refused = record(1, status=404, outcome=Outcome.REFUSED)
    refused.settle()
    assert refused.outcome is Outcome.REFUSED


@pytest.mark.parametrize(
    ("facts", "speed"),
    [
        ({"generated_tokens": 30, "generation_s": 2.0, "total_s": 9.0}, 15.0),
        ({"generated_tokens": 30, "streamed": True, "first_byte_s": 1.0, "total_s": 4.0}, 10.0),
        ({"generated_tokens": 30, "first_byte_s": 1.0, "total_s": 4.0}, None),  # it came as a whole
        ({"streamed": True, "first_byte_s": 1.0, "total_s": 4.0}, None),
        ({"generated_tokens": 30, "streamed": True, "first_byte_s": 4.0, "total_s": 4.0}, None),
        ({"generated_tokens": 0, "generation_s": 1.0}, None),
        ({"generated_tokens": 1, "generation_s": 1e-6}, None),
    ],
)
def test_tokens_per_second(facts: dict[str, Any], speed: float | None) -> None:
    assert view_of(Ended(0, record(1, **facts))).tokens_per_s == speed


def test_an_address_that_is_no_text_can_be_told() -> None:
    ended = record(1)
    ended.path = "/v1/\udcff"
    assert json.loads(view_of(Ended(0, ended)).model_dump_json())["route"] == "/v1/\\udcff"


# --- the table ---------------------------------------------------------------------------------------------


def test_the_newest_of_a_model_or_since_a_moment(tmp_path: Path) -> None:
    store, table, _ = log_at(tmp_path)
    now = now_us()
    rows = [Ended(now - 10 + n, record(n, "even" if n % 2 == 0 else "odd")) for n in range(6)]
    assert table.write(rows)
    assert ids(table.newest(Wanted(last=2))) == ["req_4", "req_5"]
    assert ids(table.newest(Wanted("even"))) == ["req_0", "req_2", "req_4"]
    assert ids(table.newest(Wanted(from_us=now - 6))) == ["req_4", "req_5"]
    assert table.newest(Wanted("none")) == () and table.newest(Wanted(last=0)) == ()
    assert table.models() == ("even", "odd")
    assert table.newest(Wanted(last=1))[0] == view_of(rows[-1])
    store.close()


def test_writing_the_same_twice_is_writing_it_once(tmp_path: Path) -> None:
    store, table, _ = log_at(tmp_path)
    rows = [Ended(now_us(), record(n)) for n in range(3)]
    for _ in range(2):
        assert table.write(rows)
    assert len(table.newest(Wanted())) == 3
    store.close()


def test_it_is_bounded_by_number(tmp_path: Path) -> None:
    store, table, _ = log_at(tmp_path, Kept(30, 150))
    for batch in range(20):
        table.write([Ended(now_us(), record(batch * 50 + n)) for n in range(50)])
        (count,) = store.rows("SELECT count(*) FROM requests")[0]
        assert count <= 150 + request_table.LEAST_TO_PRUNE
    assert ids(table.newest(Wanted(last=1000))) == [f"req_{n}" for n in range(850, 1000)]
    table.write([Ended(now_us(), record(5000 + n)) for n in range(400)])  # more at once than are kept
    assert store.rows("SELECT count(*) FROM requests")[0] == (150,)
    store.close()


def test_it_is_bounded_by_age(tmp_path: Path) -> None:
    store, table, _ = log_at(tmp_path, Kept(1, 1000))
    table.write([Ended(now_us() - 2 * DAY_US, record(1)), Ended(now_us(), record(2))])
    assert ids(table.newest(Wanted())) == ["req_2"]
    assert store.rows("SELECT count(*) FROM requests")[0] == (1,)
    store.close()


def test_nothing_is_kept_where_nothing_is_to_be(tmp_path: Path) -> None:
    store, table, _ = log_at(tmp_path, Kept(1, 0))
    assert table.write([Ended(now_us(), record(1))])
    assert store.rows("SELECT count(*) FROM requests")[0] == (0,) and table.newest(Wanted()) == ()
    store.close()


def test_what_another_release_wrote_is_passed_over(tmp_path: Path) -> None:
    store, table, _ = log_at(tmp_path)
    table.write([Ended(now_us(), record(1))])
    store.change(
        lambda connection: connection.execute(
            "INSERT INTO requests (request_id, at_us, model, body) VALUES ('x', ?, 'm', '{\"a\": 1}')",
            (now_us(),),
        )
    )
    assert ids(table.newest(Wanted())) == ["req_1"]
    store.close()


# --- the log -----------------------------------------------------------------------------------------------


def test_what_waits_to_be_written_is_told_once(tmp_path: Path) -> None:
    store, table, log = log_at(tmp_path)

    async def story() -> None:
        for n in range(3):
            log.take(record(n))
        assert ids(await log.past(Wanted())) == ["req_0", "req_1", "req_2"]
        assert ids(await log.past(Wanted(last=2))) == ["req_1", "req_2"]
        assert await log.past(Wanted(last=0)) == ()
        assert await log.models() == ("qwen",)
        await log.flush()
        log.take(record(3, "other"))
        assert ids(await log.past(Wanted())) == ["req_0", "req_1", "req_2", "req_3"]
        assert ids(await log.past(Wanted("other"))) == ["req_3"]
        await log.close()
        log.take(record(4))

    run(story())
    assert len(table.newest(Wanted())) == 4
    store.close()


def test_what_asked_no_model_and_went_well_is_left_out(tmp_path: Path) -> None:
    store, table, log = log_at(tmp_path)

    async def story() -> None:
        log.take(record(1, ""))
        log.take(record(2, "", status=403, outcome=Outcome.REFUSED, code="foreign_origin"))
        await log.close()

    run(story())
    assert ids(table.newest(Wanted())) == ["req_2"]
    store.close()


def test_they_are_written_by_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BATCH_S", 0.0)
    store, table, log = log_at(tmp_path)
    written = asyncio.Event()
    write = table.write

    async def story() -> None:
        loop = asyncio.get_running_loop()

        def telling(rows: Any) -> bool:
            done = write(rows)
            loop.call_soon_threadsafe(written.set)
            return done

        monkeypatch.setattr(table, "write", telling)
        log.take(record(1))
        await written.wait()
        assert ids(table.newest(Wanted())) == ["req_1"]
        await log.close()

    run(story())
    store.close()


def test_a_full_disk_loses_nothing_else_and_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "WAITING_MOST", 50)
    store, table, log = log_at(tmp_path)

    async def story() -> None:
        stop_growing(store)
        for n in range(60):
            log.take(record(n))
        await log.flush()
        problem = log.problem()
        assert problem is not None and problem.code is ErrorCode.STATE_UNUSABLE
        assert problem.details == {"waiting": 50, "lost": 10} and "10 are lost" in problem.message
        assert ids(await log.past(Wanted(last=2))) == ["req_58", "req_59"]
        store.rows("PRAGMA max_page_count = 1000000")
        await log.flush()
        assert log.problem() is None
        await log.close()

    run(story())
    assert ids(table.newest(Wanted()))[0] == "req_10" and len(table.newest(Wanted())) == 50
    assert "10 requests were not recorded" in caplog.text
    store.close()


def test_what_cannot_be_written_at_the_end_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store, _, log = log_at(tmp_path)

    async def story() -> None:
        stop_growing(store)
        for n in range(60):
            log.take(record(n))
        await log.close()

    run(story())
    assert "requests could not be recorded" in caplog.text
    store.close()


def test_followers_are_told_each_once_until_the_end(tmp_path: Path) -> None:
    store, _, log = log_at(tmp_path)

    async def story() -> None:
        log.take(record(0))
        seen = []
        async for view in log.follow(Wanted("qwen")):
            seen.append(view.request_id)
            if len(seen) == 1:
                log.take(record(1, "other"))
                log.take(record(2))
            elif len(seen) == 2:
                log.end_following()
        assert seen == ["req_0", "req_2"]
        assert [view.request_id async for view in log.follow(Wanted("qwen"))] == ["req_0", "req_2"]
        await log.close()

    run(story())
    store.close()


def test_a_follower_that_does_not_read_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FOLLOWER_BACKLOG", 3)
    store, _, log = log_at(tmp_path)

    async def story() -> None:
        log.take(record(0))
        views = log.follow(Wanted())
        assert (await anext(views)).request_id == "req_0"
        for n in range(1, 10):
            log.take(record(n))
        assert [view.request_id async for view in views] == ["req_1", "req_2", "req_3"]
        await log.close()

    run(story())
    store.close()


# --- metrics -----------------------------------------------------------------------------------------------


def told(figures: GatewayFigures, lines: dict[str, Turns], in_flight: int) -> dict[tuple[str, ...], float]:
    text = exposition(
        Figures(Desk().view, Statistics(), (), 0), families(figures, lines, in_flight)
    ).decode()
    return {
        (
            sample.name.removeprefix("lllm3090_gateway_"),
            *(text for _, text in sorted(sample.labels.items())),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("lllm3090_gateway_")
    }


def test_what_is_scraped() -> None:
    figures = GatewayFigures()
    figures.ended(
        record(1, first_byte_s=0.2, total_s=3.0, load_s=7.0, prompt_tokens=100, generated_tokens=20)
    )
    figures.ended(record(2, first_byte_s=0.02, total_s=0.5, line_s=0.015, prompt_tokens=10))
    figures.ended(record(3, outcome=Outcome.CLIENT_CLOSED, total_s=9.0))
    figures.ended(record(4, "", status=404, outcome=Outcome.REFUSED, code="unknown_model"))
    found = told(figures, {"qwen": Turns("qwen", 2)}, 5)
    assert found["in_flight",] == 5
    assert found["in_work", "qwen"] == found["waiting", "qwen"] == 0
    assert found["requests_total", "qwen", "served"] == 2
    assert found["requests_total", "qwen", "client-closed"] == 1
    assert found["requests_total", "", "refused"] == 1
    assert found["refusals_total", "unknown_model"] == 1
    assert found["prompt_tokens_total", "qwen"] == 110 and found["generated_tokens_total", "qwen"] == 20
    assert found["first_byte_seconds_count", "qwen"] == 2
    assert found["first_byte_seconds_bucket", "0.05", "qwen"] == 1
    assert found["request_seconds_sum", "qwen"] == 3.5
    assert found["load_wait_seconds_sum", "qwen"] == 7.0
    assert found["line_wait_seconds_bucket", "0.01", "qwen"] == 1
    assert ("request_seconds_count", "") not in found


def test_labels_are_bounded() -> None:
    figures = GatewayFigures()
    for n in range(2 * MOST_MODELS):
        figures.ended(record(n, f"m{n}"))
    assert len(figures.models) == MOST_MODELS + 1
    assert figures.models[OTHERS].outcomes[Outcome.SERVED] == MOST_MODELS


# --- from a client's request to the control API ------------------------------------------------------------


async def _answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
    body = json.dumps(
        {
            "choices": [{"message": {"content": "secret answer"}}],
            "usage": {"prompt_tokens": 7, "completion_tokens": 3},
            "timings": {"predicted_n": 3, "predicted_ms": 1500.0},
        }
    ).encode()
    writer.write(
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    )
    writer.write(body)


def test_a_request_becomes_a_record_without_a_word_of_it(tmp_path: Path) -> None:
    async def story() -> Record:
        async with gateway_world(tmp_path, _answer) as world, ClientSession() as session:
            question = {"model": "small", "messages": [{"role": "user", "content": "secret question"}]}
            target = f"{world.address}/v1/chat/completions?secret=query"
            async with session.post(target, json=question) as answer:
                assert "secret answer" in await answer.text()
            return world.records[0]

    ended = run(story())
    store, table, _ = log_at(tmp_path)
    assert table.write([Ended(now_us(), ended)])
    (view,) = table.newest(Wanted())
    assert (view.model, view.status, view.outcome, view.route) == (
        "small",
        200,
        "served",
        "/v1/chat/completions",
    )
    assert (view.prompt_tokens, view.generated_tokens, view.tokens_per_s) == (7, 3, 2.0)
    store.close()
    assert b"secret" not in b"".join(path.read_bytes() for path in tmp_path.glob("state.db*"))


EVENTS = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}\n\n'


@pytest.mark.parametrize(
    ("last", "tokens"),
    [(b"data: [DONE]\n\n", (7, 3)), (b'data: {"delta": "data: [DONE]"}\n\n', (None, None))],
    ids=["all of it", "not all"],
)
def test_a_client_may_leave_with_the_last_event_before_the_body_ends(
    tmp_path: Path, last: bytes, tokens: tuple[int | None, int | None]
) -> None:
    """As libraries of clients do."""

    async def respond(_: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(EVENTS + b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in (USAGE, last)))
        await asyncio.Event().wait()

    async def story() -> Record:
        async with gateway_world(tmp_path, respond) as world:
            async with ClientSession() as session:
                question = {"model": "small", "messages": [], "stream": True}
                async with session.post(f"{world.address}/v1/chat/completions", json=question) as answer:
                    await answer.content.readuntil(last)
            async with asyncio.timeout(60):
                while not world.records:  # noqa: ASYNC110  # they are a list
                    await asyncio.sleep(0.01)
            return world.records[0]

    ended = run(story())
    assert (ended.prompt_tokens, ended.generated_tokens) == tokens


class House:
    """As much of a daemon and its gateway as the route asks for."""

    def __init__(self, log: RequestLog) -> None:
        self.requests = log
        self.settings = SimpleNamespace(aliases={"q": "qwen-27b"})
        self.lookup = self

    def resolve(self, name: str) -> Any:
        return resolve(name, (SimpleNamespace(name="on-disk"),), {})  # type: ignore[arg-type]  # a name is enough


async def _serving(path: Path, house: House, gateway: bool) -> AsyncIterator[ClientSession]:
    api = ControlApi(cast(Daemon, house), "252")
    api.gateway = cast(GatewayService, house) if gateway else None
    runner = web.AppRunner(api.application(), access_log=None)
    await runner.setup()
    try:
        await web.UnixSite(runner, str(path / "s")).start()
        async with ClientSession(connector=UnixConnector(str(path / "s"))) as session:
            yield session
    finally:
        await house.requests.close()
        await runner.cleanup()


def with_api(
    tmp_path: Path, story: Callable[[ClientSession, RequestLog], Awaitable[None]], *, gateway: bool = True
) -> None:
    store, _, log = log_at(tmp_path)

    async def main() -> None:
        async for session in _serving(tmp_path, House(log), gateway):
            await story(session, log)

    run(main())
    store.close()


async def lines(session: ClientSession, query: str) -> list[dict[str, Any]]:
    async with session.get(f"http://d/v1/requests{query}") as answer:
        return [json.loads(line) | {"http": answer.status} for line in (await answer.text()).splitlines()]


def test_the_control_api_tells_them(tmp_path: Path) -> None:
    async def story(session: ClientSession, log: RequestLog) -> None:
        log.take(record(1, "qwen-27b", priority=Priority.HIGH))
        log.take(record(2, "smol"))
        assert [each["request_id"] for each in await lines(session, "")] == ["req_1", "req_2"]
        (high,) = await lines(session, "?model=q")
        assert high["priority"] == "high" and "code" not in high
        assert [each["request_id"] for each in await lines(session, "?last=1")] == ["req_2"]
        later = time_text(now_us() + DAY_US)
        assert await lines(session, f"?since={later}") == await lines(session, "?model=on-disk") == []
        (unknown,) = await lines(session, "?model=nobody")
        assert unknown["http"] == 404 and unknown["code"] == "unknown_model"
        for bad in ("last=10001", "last=-1", "since=yesterday", "follow=2"):
            (problem,) = await lines(session, f"?{bad}")
            assert problem["http"] == 422 and problem["code"] == "invalid_request", bad

    with_api(tmp_path, story)


def test_a_follower_gets_them_as_they_end(tmp_path: Path) -> None:
    async def story(session: ClientSession, log: RequestLog) -> None:
        async with session.get("http://d/v1/requests?follow=1&last=0") as answer:
            log.take(record(1))
            assert json.loads(await answer.content.readline())["request_id"] == "req_1"
            log.end_following()
            assert await answer.content.read() == b""

    with_api(tmp_path, story)


def test_before_there_is_a_gateway(tmp_path: Path) -> None:
    async def story(session: ClientSession, _: RequestLog) -> None:
        (problem,) = await lines(session, "")
        assert problem["http"] == 503 and problem["code"] == "gateway_unavailable"

    with_api(tmp_path, story, gateway=False)
