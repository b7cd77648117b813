"""``/v1/release``, ``/v1/resume``, ``/v1/models/{name}/pin`` and ``/reset`` of the control API, on a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import quote

import pytest
from aiohttp import ClientSession, UnixConnector, web

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.planning.cache import CacheType
from lllm3090d.planning.request import PlanRequest
from lllm3090d.serving.daemon import Daemon
from lllm3090d.serving.events import ReleaseDone, ResetDone, UnloadDone
from lllm3090d.serving.wanted_set import Marked
from lllm3090d.serving.wanted_store import Mark
from lllm3090d.surfaces.control import ControlApi

pytestmark = pytest.mark.unit

DEADLINE_S = 60.0


class FakeDaemon:
    """The part of the daemon that is asked here; it remembers the questions."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.was_released = True
        self.problem: LlmError | None = None
        self.wanted = FakeWanted()
        self.scheduler = SimpleNamespace(released=False, instance=lambda _: None)
        self.foreign_units = SimpleNamespace(names=("lllm3090-thing.service",))

    async def release(self, *, until_resume: bool) -> ReleaseDone:
        """Two models go."""
        self.asked.append(("release", until_resume))
        return ReleaseDone("t", ("a", "b"), 7, problem=self.problem)

    async def unload(self, name: str, *, drain_s: float | None = None, force: bool = False) -> UnloadDone:
        """One model runs, another one waits for room."""
        self.asked.append(("unload", name, drain_s, force))
        return UnloadDone(
            "t", name, "0a1b", 7 if name == "runs" else 0, name == "waits", problem=self.problem
        )

    async def autoload(self, name: str, *, marked: bool) -> None:
        """Any model can be marked."""
        self.asked.append(("autoload", name, marked))
        if marked:
            self.wanted.marks[name] = Mark(name=name)

    async def resume(self) -> bool:
        """As the test says."""
        self.asked.append(("resume",))
        return self.was_released

    async def pin(self, name: str, *, pinned: bool) -> SimpleNamespace:
        """One model is loaded."""
        self.asked.append(("pin", name, pinned))
        if name != "dir/a model":
            raise LlmError(ErrorCode.NOT_LOADED, f"{name} is not loaded", hint="lllm3090ctl ps")
        return SimpleNamespace(name=name, run="0a1b")

    async def reset(self, name: str) -> ResetDone:
        """One model has failed, another runs."""
        self.asked.append(("reset", name))
        if name not in {"dir/a model", "runs"}:
            raise LlmError(ErrorCode.NOT_LOADED, f"{name} is not loaded", hint="lllm3090ctl ps")
        return ResetDone("t", name, "0a1b", starts=name != "runs")


def serve(directory: Path, daemon: FakeDaemon, test: Callable[[ClientSession], Awaitable[None]]) -> None:
    """Run a test against the application on a real socket."""

    async def main() -> None:
        runner = web.AppRunner(ControlApi(cast(Daemon, daemon), "252").application(), access_log=None)
        await runner.setup()
        try:
            await web.UnixSite(runner, str(directory / "s")).start()
            async with asyncio.timeout(DEADLINE_S):
                async with ClientSession(connector=UnixConnector(str(directory / "s"))) as session:
                    await test(session)
        finally:
            await runner.cleanup()

    asyncio.run(main())


def posted(directory: Path, daemon: FakeDaemon, target: str, body: str) -> tuple[int, dict[str, Any]]:
    """Status and document of one request."""
    found: list[tuple[int, dict[str, Any]]] = []

    async def test(session: ClientSession) -> None:
        async with session.post(f"http://d{target}", data=body) as answer:
            found.append((answer.status, await answer.json(content_type=None)))

    serve(directory, daemon, test)
    return found[0]


@pytest.mark.parametrize(("body", "until"), [("{}", False), ('{"until_resume": true}', True)])
def test_release(tmp_path: Path, body: str, until: bool) -> None:
    daemon = FakeDaemon()
    status, answer = posted(tmp_path, daemon, "/v1/release", body)
    assert daemon.asked == [("release", until)]
    assert answer.pop("elapsed_s") >= 0
    assert (status, answer) == (
        200,
        {
            "names": ["a", "b"],
            "released_bytes": 7,
            "until_resume": until,
            "was_released": False,
            "foreign_units": ["lllm3090-thing.service"],
            "problem": None,
        },
    )


@pytest.mark.parametrize(("name", "released"), [("runs", 7), ("waits", 0)])
def test_unload_tells_a_load_that_only_waited(tmp_path: Path, name: str, released: int) -> None:
    status, answer = posted(tmp_path, FakeDaemon(), "/v1/unload", f'{{"model": "{name}"}}')
    assert answer.pop("elapsed_s") >= 0
    assert (status, answer) == (
        200,
        {
            "name": name,
            "run": "0a1b",
            "released_bytes": released,
            "waited": name == "waits",
            "unfinished": None,
            "problem": None,
        },
    )


def test_what_could_not_be_written_down_is_in_the_answer(tmp_path: Path) -> None:
    daemon = FakeDaemon()
    daemon.problem = LlmError(ErrorCode.STATE_UNUSABLE, "the disk is full")
    for target, body in (("/v1/release", '{"until_resume": true}'), ("/v1/unload", '{"model": "runs"}')):
        status, answer = posted(tmp_path, daemon, target, body)
        assert (status, answer["problem"]["code"]) == (200, "state_unusable")


class FakeWanted:
    """What is marked, all by command."""

    def __init__(self) -> None:
        self.marks: dict[str, Mark] = {}
        self.wants = ()

    async def marked(self) -> tuple[Marked, ...]:
        """In order."""
        return tuple(Marked(each, by_setting=False) for each in self.marks.values())


@pytest.mark.parametrize("marked", [True, False])
def test_autoload(tmp_path: Path, marked: bool) -> None:
    daemon = FakeDaemon()
    request = PlanRequest(
        context_tokens=8192, cache_type_k=CacheType.F16, cache_type_v=CacheType.F16, gpu_layers=0
    )
    daemon.wanted.marks["other"] = Mark(name="other", request=request, arguments=("-np", "1"), pinned=True)
    body = f'{{"autoload": {str(marked).lower()}}}'
    status, answer = posted(tmp_path, daemon, "/v1/models/dir%2Fa%20model/autoload", body)
    assert daemon.asked == [("autoload", "dir/a model", marked)]
    assert status == 200
    assert [each["name"] for each in answer["models"]] == ["other", "dir/a model"][: 1 + marked]
    assert answer["models"][0] == {
        "name": "other",
        "origin": "command",
        "options": {
            "context_tokens": 8192,
            "gpu_layers": 0,
            "cache_type": "f16",
            "arguments": ["-np", "1"],
            "pin": True,
        },
        "state": None,
        "why": "it is loaded at the next login",
    }


@pytest.mark.parametrize("body", ["{}", '{"autoload": "perhaps"}', '{"autoload": true, "more": 1}', "["])
def test_a_bad_mark_is_refused(tmp_path: Path, body: str) -> None:
    daemon = FakeDaemon()
    status, _ = posted(tmp_path, daemon, "/v1/models/x/autoload", body)
    assert status in {400, 422} and daemon.asked == []


def test_release_tells_that_the_card_was_released_before(tmp_path: Path) -> None:
    daemon = FakeDaemon()
    daemon.scheduler.released = True
    assert posted(tmp_path, daemon, "/v1/release", "{}")[1]["was_released"] is True


@pytest.mark.parametrize("was_released", [True, False])
def test_resume(tmp_path: Path, was_released: bool) -> None:
    daemon = FakeDaemon()
    daemon.was_released = was_released
    assert posted(tmp_path, daemon, "/v1/resume", "{}") == (200, {"was_released": was_released})
    assert daemon.asked == [("resume",)]


@pytest.mark.parametrize("pinned", [True, False])
def test_pin(tmp_path: Path, pinned: bool) -> None:
    daemon = FakeDaemon()
    body = f'{{"pinned": {str(pinned).lower()}}}'
    answer = posted(tmp_path, daemon, "/v1/models/dir%2Fa%20model/pin", body)
    assert answer == (200, {"name": "dir/a model", "run": "0a1b", "pinned": pinned})
    assert daemon.asked == [("pin", "dir/a model", pinned)]


def test_pin_of_what_is_not_loaded(tmp_path: Path) -> None:
    status, answer = posted(tmp_path, FakeDaemon(), "/v1/models/other/pin", '{"pinned": true}')
    assert (status, answer["code"], answer["exit_status"]) == (404, "not_loaded", 4)


@pytest.mark.parametrize(("name", "starts"), [("dir/a model", True), ("runs", False)])
def test_reset(tmp_path: Path, name: str, starts: bool) -> None:
    daemon = FakeDaemon()
    answer = posted(tmp_path, daemon, f"/v1/models/{quote(name, safe='')}/reset", "{}")
    assert answer == (200, {"name": name, "run": "0a1b", "starts": starts})
    assert daemon.asked == [("reset", name)]


def test_reset_of_what_is_not_loaded(tmp_path: Path) -> None:
    status, answer = posted(tmp_path, FakeDaemon(), "/v1/models/other/reset", "{}")
    assert (status, answer["code"], answer["exit_status"]) == (404, "not_loaded", 4)


@pytest.mark.parametrize(
    ("target", "body", "status"),
    [
        ("/v1/release", "", 400),
        ("/v1/models/a/reset", "", 400),
        ("/v1/models/a/reset", '{"name": "a"}', 422),
        ("/v1/models//reset", "{}", 404),
        ("/v1/release", '{"until_resume": 1}', 422),
        ("/v1/release", '{"until": true}', 422),
        ("/v1/release", "[]", 422),
        ("/v1/resume", "", 400),
        ("/v1/resume", '{"now": true}', 422),
        ("/v1/models/a/pin", "{}", 422),
        ("/v1/models/a/pin", '{"pinned": "yes"}', 422),
        ("/v1/models//pin", '{"pinned": true}', 404),
        ("/v1/models/a/nail", '{"pinned": true}', 404),
    ],
)
def test_bad_requests_never_reach_the_daemon(tmp_path: Path, target: str, body: str, status: int) -> None:
    daemon = FakeDaemon()
    assert posted(tmp_path, daemon, target, body)[0] == status
    assert daemon.asked == []
