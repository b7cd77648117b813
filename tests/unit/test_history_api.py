"""``/v1/events``, ``/v1/models/{name}/history`` and the logs through HTTP on a real socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import quote

import pytest
from aiohttp import ClientSession, UnixConnector, web

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.serving import engine_logs, log_files
from lllm3090d.serving.daemon import Daemon
from lllm3090d.serving.engine_logs import EngineLogs
from lllm3090d.serving.history import History
from lllm3090d.serving.instance import InstanceState
from lllm3090d.serving.refusals import not_loaded
from lllm3090d.surfaces.control import ControlApi
from lllm3090d.wire import EventKind, RunHistory

pytestmark = pytest.mark.unit

DEADLINE_S = 60.0
S = InstanceState


class House:
    """As much of a daemon as these routes ask for, with one model at most."""

    def __init__(self, directory: Path) -> None:
        self.history = History()
        self.logs = EngineLogs(lambda: directory)
        self.settings = SimpleNamespace(aliases={"q": "Qwen3.8-27B"})
        self.scheduler = self
        self.instances: tuple[Any, ...] = ()

    def by_run(self, run: str) -> Any:
        return next((each for each in self.instances if each.run == run), None)

    def loaded(self, name: str) -> Any:
        for each in self.instances:
            if each.name == name:
                return each
        raise not_loaded(name, ())

    def launch(self, name: str, run: str) -> Path:
        self.instances = (SimpleNamespace(name=name, run=run, state=S.READY),)
        self.history.add(
            EventKind.STATE, model=name, run=run, state=S.RESERVED, previous=S.PLANNED, message="admitted"
        )
        self.history.add(EventKind.STATE, model=name, run=run, state=S.READY, previous=S.LOADING)
        path = log_files.log_file(self.logs._directory() or Path(), f"lllm3090-{name}-{run}")
        log_files.make(path)
        return path

    def end(self) -> None:
        (instance,) = self.instances
        instance.state = S.GONE
        self.history.add(
            EventKind.STATE, model=instance.name, run=instance.run, state=S.GONE, previous=S.RELEASING
        )
        self.instances = ()


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path / "logs")


def serve(directory: Path, house: House, test: Callable[[ClientSession], Awaitable[None]]) -> None:
    async def main() -> None:
        api = ControlApi(cast(Daemon, house), "252")
        runner = web.AppRunner(api.application(), access_log=None)
        await runner.setup()
        try:
            await web.UnixSite(runner, str(directory / "s")).start()
            async with asyncio.timeout(DEADLINE_S):
                async with ClientSession(connector=UnixConnector(str(directory / "s"))) as session:
                    await test(session)
        finally:
            house.history.close()
            await runner.cleanup()

    asyncio.run(main())


def get(directory: Path, house: House, target: str) -> tuple[int, list[dict[str, Any]]]:
    """Status and documents of an answer."""
    found: list[tuple[int, list[dict[str, Any]]]] = []

    async def test(session: ClientSession) -> None:
        async with session.get(f"http://d{target}") as answer:
            lines = (await answer.text()).splitlines()
            found.append((answer.status, [json.loads(line) for line in lines]))

    serve(directory, house, test)
    return found[0]


def test_events_since_a_number_or_a_moment_and_the_last_of_them(tmp_path: Path, house: House) -> None:
    for n in range(5):
        house.history.add(EventKind.SETTINGS, message=str(n))
    at = house.history.since(0)[0].at

    def asked(query: str) -> list[str]:
        status, lines = get(tmp_path, house, f"/v1/events{query}")
        assert status == 200
        return [line["message"] for line in lines]

    assert asked("") == list("01234")
    assert asked("?since=3") == list("34")
    assert asked("?last=2") == list("34")
    assert asked("?since=1&last=9") == list("1234")
    assert asked("?last=0") == []
    assert asked(f"?since={at}") == list("01234")
    assert asked("?since=2099-01-01T00:00:00%2B01:00") == []


@pytest.mark.parametrize(
    "query",
    [
        "since=-1",
        "since=",
        "since=1.5",
        "since=yesterday",
        "since=2026-11-30T11:00:00",
        "since=2026-11-30T11:00:00+01:00",  # a plus that is not encoded is a blank
        "since=" + "9" * 5000,
        "since=%D9%A1",  # a digit, but not of ASCII
        "since=\x1b%5B31m",
        "last=-1",
        "last=10001",
        "last=many",
        "follow=2",
    ],
)
def test_a_bad_start_is_refused(tmp_path: Path, house: House, query: str) -> None:
    status, (problem,) = get(tmp_path, house, f"/v1/events?{quote(query, safe='=%+&')}")
    assert (status, problem["code"]) == (422, "invalid_request")
    assert problem["hint"]
    assert len(problem["detail"]) < 300


def test_the_runs_of_a_model(tmp_path: Path, house: House) -> None:
    house.launch("Qwen3.8-27B", "a")
    house.end()
    house.launch("Qwen3.8-27B", "b")
    for name in ("Qwen3.8-27B", "q", "qwen"):
        status, (answer,) = get(tmp_path, house, f"/v1/models/{name}/history")
        view = RunHistory.model_validate(answer)
        assert (status, view.name) == (200, "Qwen3.8-27B")
        assert [(run.run, run.is_live) for run in view.runs] == [("b", True), ("a", False)]
    _, (answer,) = get(tmp_path, house, "/v1/models/q/history?runs=1")
    assert [run["run"] for run in answer["runs"]] == ["b"]


def test_a_model_that_nothing_is_known_of(tmp_path: Path, house: House) -> None:
    status, (problem,) = get(tmp_path, house, "/v1/models/other/history")
    assert status == 404
    house.launch("Qwen3.8-27B", "a")
    status, (problem,) = get(tmp_path, house, "/v1/models/other/history")
    assert (status, problem["code"]) == (404, "unknown_model")
    assert "Nothing is remembered" in problem["detail"]
    status, (problem,) = get(tmp_path, house, "/v1/models/qwen/history?runs=-1")
    assert (status, problem["code"]) == (422, "invalid_request")


def test_logs_of_what_runs_and_of_what_ran_last(tmp_path: Path, house: House) -> None:
    house.launch("m", "a").write_text("one\ntwo\n")
    assert get(tmp_path, house, "/v1/instances/m/logs?lines=1") == (200, [{"message": "two"}])
    house.end()
    assert get(tmp_path, house, "/v1/instances/m/logs") == (200, [{"message": "one"}, {"message": "two"}])
    # Nothing more can come of it, so following ends.
    assert get(tmp_path, house, "/v1/instances/m/logs?follow=1&lines=0") == (200, [])
    status, (problem,) = get(tmp_path, house, "/v1/instances/other/logs")
    assert (status, problem["code"]) == (404, "not_loaded")


@pytest.mark.parametrize("follow", [0, 1])
def test_a_file_has_no_times(tmp_path: Path, house: House, follow: int) -> None:
    house.launch("m", "a")
    target = f"/v1/instances/m/logs?since=2026-11-30T11:00:00Z&follow={follow}"
    status, (problem,) = get(tmp_path, house, target)
    assert (status, problem["code"]) == (422, "invalid_request")
    assert "no times" in problem["detail"]
    status, (problem,) = get(tmp_path, house, f"/v1/instances/m/logs?since=soon&follow={follow}")
    assert "no moment" in problem["detail"]


def test_following_a_log_ends_with_its_run(
    tmp_path: Path, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_logs, "FOLLOW_POLL_S", 0.001)
    path = house.launch("m", "a")

    async def test(session: ClientSession) -> None:
        async with session.get("http://d/v1/instances/m/logs?follow=1") as answer:
            append(path, "one\n")
            assert json.loads(await answer.content.readline()) == {"message": "one"}
            append(path, "last words\n")
            house.end()
            assert [json.loads(line)["message"] async for line in answer.content] == ["last words"]

    serve(tmp_path, house, test)


def append(path: Path, text: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def test_a_name_that_fits_several_is_refused(tmp_path: Path, house: House) -> None:
    house.launch("Qwen3.8-27B", "a")
    house.end()
    house.launch("Qwen3.8-7B", "b")
    house.end()
    status, (problem,) = get(tmp_path, house, "/v1/models/qwen/history")
    assert (status, problem["code"]) == (409, "ambiguous_model")
    status, (problem,) = get(tmp_path, house, "/v1/instances/qwen/logs")
    assert (status, problem["code"]) == (409, "ambiguous_model")


def test_a_log_that_cannot_be_read_is_a_problem(
    tmp_path: Path, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.launch("m", "a").unlink()

    async def closed(*_arguments: Any, **_named: Any) -> Any:
        raise LlmError(ErrorCode.LOGS_UNAVAILABLE, "closed")

    monkeypatch.setattr("lllm3090d.serving.journal.tail", closed)
    status, (problem,) = get(tmp_path, house, "/v1/instances/m/logs")
    assert problem["code"] == "logs_unavailable"
    assert status >= 500
