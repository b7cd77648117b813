"""Choosing an engine through the control API, with real files and builds that answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import ClientSession, UnixConnector, web

from lllm3090d.engines.choice import FILE_NAME, read_choice, write_choice
from lllm3090d.serving.daemon import Daemon
from lllm3090d.serving.engine_views import running_views
from lllm3090d.serving.instance import InstanceState
from lllm3090d.serving.lookup import Lookup
from lllm3090d.serving.running import Instance
from lllm3090d.settings import Settings, load_settings
from lllm3090d.surfaces.control import ControlApi
from tests.fakes.engine import install_fake_engine
from tests.fakes.gated import Gate

pytestmark = pytest.mark.unit

DEADLINE_S = 60.0
NAMES = ("managed", "b11434-vulkan", "b10434-cuda-sm86")


@pytest.fixture(autouse=True)
def nothing_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No engine that is installed here is found."""
    monkeypatch.setattr("lllm3090d.engines.places.DISTRIBUTION_DIRECTORIES", ())
    monkeypatch.setattr("lllm3090d.engines.places.sysconfig.get_path", lambda _: str(tmp_path / "site"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    yield


def settings_of(home: Path, **environment: str) -> Settings:
    values = {
        "LLLM3090_ENGINES_DIR": str(home / "engines"),
        "LLLM3090_STATE_DIR": str(home / "state"),
        "LLLM3090_MODELS_DIR": str(home / "models"),
        **environment,
    }
    found = load_settings(home / "config.toml", values)
    return found if environment else found.model_copy(update={"llama_dir": home / "llama.cpp"})


def install(home: Path) -> None:
    install_fake_engine(home / "llama.cpp", version="version: 11434 (abc)")
    install_fake_engine(home / "engines" / "b11434-vulkan", version="version: 1 (abc)")
    device = "CUDA0: NVIDIA GeForce RTX 3090 (24124 MiB, 23000 MiB free)"
    install_fake_engine(
        home / "engines" / "b10434-cuda-sm86", version="version: 10434 (abc)", devices=(device,)
    )
    install_fake_engine(home / "engines" / "b11500", version="version: 11500 (abc)")


def running(model: str, server: str | None, version: str, state: InstanceState) -> Instance:
    """What the views read of an instance."""
    record = SimpleNamespace(engine_server=server, engine_version=version)
    return cast(Instance, SimpleNamespace(name=model, run=f"{model}-1", record=record, state=state))


class Api:
    """Requests to the application on a real socket; of the daemon only lookup and instances are there."""

    def __init__(self, session: ClientSession) -> None:
        self._session = session

    async def get(self, target: str = "engines") -> tuple[int, Any]:
        async with self._session.get(f"http://d/v1/{target}") as answer:
            return answer.status, json.loads(await answer.read())

    async def select(self, body: object) -> tuple[int, Any]:
        async with self._session.post("http://d/v1/engines/select", json=body) as answer:
            return answer.status, json.loads(await answer.read())


def serve(
    home: Path, settings: Settings, test: Callable[[Api], Awaitable[None]], *instances: Instance
) -> None:
    async def main() -> None:
        lookup = Lookup(lambda: settings)
        daemon = SimpleNamespace(
            lookup=lookup, settings=settings, scheduler=SimpleNamespace(instances=instances), readers=()
        )
        runner = web.AppRunner(ControlApi(cast(Daemon, daemon), "252").application(), access_log=None)
        await runner.setup()
        try:
            await web.UnixSite(runner, str(home / "s")).start()
            async with asyncio.timeout(DEADLINE_S):
                async with ClientSession(connector=UnixConnector(str(home / "s"))) as session:
                    await test(Api(session))
        finally:
            await runner.cleanup()
            await lookup.close()

    asyncio.run(main())


def test_a_choice_counts_from_the_next_start(tmp_path: Path) -> None:
    install(tmp_path)
    settings = settings_of(tmp_path)
    managed = str(tmp_path / "llama.cpp" / "llama-server")

    async def test(api: Api) -> None:
        status, listing = await api.get()
        assert status == 200
        assert (listing["next"], listing["choice"], listing["locked"]) == ("managed", None, False)
        told = {
            each["name"]: (each["tag"], each["stale"], each["backend"], each["offered"])
            for each in listing["engines"]
        }
        assert told == {
            "managed": ("b11434", False, "cpu", True),
            "b11434-vulkan": ("b11434", False, "cpu", True),
            "b10434-cuda-sm86": ("b10434", True, "cuda", True),
            "b11500": ("b11500", True, "cpu", False),
        }
        assert [each["model"] for each in listing["running"] if each["is_next"]] == ["a"]

        status, listing = await api.select({"engine": "b10434-cuda-sm86"})
        assert status == 200
        assert listing["next"] == listing["choice"] == "b10434-cuda-sm86"
        assert [each["name"] for each in listing["engines"] if each["next"]] == ["b10434-cuda-sm86"]
        assert [each for each in listing["running"] if each["is_next"]] == []
        assert json.loads((settings.state_dir / FILE_NAME).read_bytes()) == {"dir": "b10434-cuda-sm86"}

        _, listing = await api.select({"engine": "managed"})
        assert (listing["next"], listing["choice"]) == ("managed", None)
        assert not (settings.state_dir / FILE_NAME).exists()

        await api.select({"engine": "b11434-vulkan"})
        _, listing = await api.select({"engine": None})
        assert (listing["next"], listing["choice"]) == ("managed", None)

    serve(
        tmp_path,
        settings,
        test,
        running("a", managed, "11434 (abc)", InstanceState.READY),
        running("b", managed, "11000 (old)", InstanceState.READY),
        running("c", None, "11434 (abc)", InstanceState.LOADING),
        running("d", managed, "11434 (abc)", InstanceState.FAILED),
    )


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"engine": "b11500"}, 404, "unknown_engine"),
        ({"engine": "nothing"}, 404, "unknown_engine"),
        ({"engine": "../llama.cpp"}, 404, "unknown_engine"),
        ({"engine": "/bin"}, 404, "unknown_engine"),
        ({"engine": "broken-cpu"}, 404, "unknown_engine"),
        ({"engine": "b1-cpu"}, 503, "engine_unusable"),
        ({"engine": "b2-cpu"}, 503, "engine_not_executable"),
        ({"engine": ""}, 422, "invalid_request"),
        ({"engine": 3}, 422, "invalid_request"),
        ({"engine": "x" * 256}, 422, "invalid_request"),
        ({}, 422, "invalid_request"),
        ({"engine": "managed", "force": True}, 422, "invalid_request"),
    ],
)
def test_what_cannot_be_chosen_changes_nothing(tmp_path: Path, body: object, status: int, code: str) -> None:
    install(tmp_path)
    settings = settings_of(tmp_path)
    for name, mode in (("b1-cpu", 0o755), ("b2-cpu", 0o644)):
        server = tmp_path / "engines" / name / "llama-server"
        server.parent.mkdir()
        server.write_text("#!/bin/sh\nexit 3\n", encoding="utf-8")
        server.chmod(mode)
    write_choice(settings.state_dir, "b11434-vulkan")

    async def test(api: Api) -> None:
        got, problem = await api.select(body)
        assert (got, problem["code"]) == (status, code)
        assert problem["hint"]
        _, listing = await api.get()
        assert listing["next"] == "b11434-vulkan"
        problems = {each["name"]: each["problem"]["code"] for each in listing["engines"] if each["problem"]}
        assert problems == {"b1-cpu": "engine_unusable", "b2-cpu": "engine_not_executable"}

    serve(tmp_path, settings, test)
    assert read_choice(settings.state_dir) == "b11434-vulkan"


def test_a_locked_choice_is_said_everywhere(tmp_path: Path) -> None:
    install(tmp_path)
    own = install_fake_engine(tmp_path / "own")
    settings = settings_of(tmp_path, LLLM3090_LLAMA_DIR=str(own))
    write_choice(settings.state_dir, "b11434-vulkan")

    async def test(api: Api) -> None:
        _, listing = await api.get()
        assert listing["locked"]
        assert (listing["next"], listing["choice"]) == ("environment", "b11434-vulkan")
        assert not any(each["offered"] for each in listing["engines"])
        for body in ({"engine": "b10434-cuda-sm86"}, {"engine": None}):
            status, problem = await api.select(body)
            assert (status, problem["code"], problem["exit_status"]) == (409, "engine_locked", 5)
            assert str(own) in problem["detail"]

    serve(tmp_path, settings, test)
    assert read_choice(settings.state_dir) == "b11434-vulkan"


def test_a_dangling_choice_is_reported_and_another_build_used(tmp_path: Path) -> None:
    install(tmp_path)
    settings = settings_of(tmp_path)
    write_choice(settings.state_dir, "b9999-cuda-sm86")

    async def test(api: Api) -> None:
        _, listing = await api.get()
        assert (listing["next"], listing["choice"]) == ("managed", "b9999-cuda-sm86")
        assert listing["choice_problem"]["code"] == "engine_choice_ignored"
        assert "b9999-cuda-sm86" in listing["choice_problem"]["detail"]

    serve(tmp_path, settings, test)


def test_without_any_engine_the_list_is_empty_and_says_why(tmp_path: Path) -> None:
    async def test(api: Api) -> None:
        status, listing = await api.get()
        assert (status, listing["engines"], listing["next"]) == (200, [], None)
        assert listing["next_problem"]["code"] == "engine_not_found"

    serve(tmp_path, settings_of(tmp_path), test)


def test_details_of_a_build(tmp_path: Path) -> None:
    install(tmp_path)

    async def test(api: Api) -> None:
        status, view = await api.get("engines/b11434-vulkan")
        assert status == 200
        assert view["engine"]["name"] == "b11434-vulkan"
        assert view["digest"].startswith("e1-")
        assert view["dry_run_program"] is None
        options = {name: option for option in view["options"] for name in option["names"]}
        assert options["-c"]["value"] == "N"
        assert options["--metrics"]["value"] is None
        assert (await api.get("engines/b11500"))[0] == 200  # what cannot be chosen can be looked at
        status, problem = await api.get("engines/nothing")
        assert (status, problem["code"]) == (404, "unknown_engine")
        assert problem["details"]["offered"] == list(NAMES)
        assert (await api.get("engines/select"))[1]["code"] == "unknown_engine"

    serve(tmp_path, settings_of(tmp_path), test)


def test_nothing_runs_without_a_process() -> None:
    idle = [
        running(state, "/x", "1", state) for state in InstanceState if state in ("queued", "gone", "failed")
    ]
    assert running_views(idle, None, None) == ()
    (view,) = running_views([running("a", "/x", "1", InstanceState.STOPPING)], None, None)
    assert not view.is_next


def test_a_build_that_hangs_holds_up_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path)
    settings = settings_of(tmp_path)
    directory = tmp_path / "engines" / "b1-vulkan"

    def told(listing: Any, name: str) -> str:
        each = next(each for each in listing["engines"] if each["name"] == name)
        return str((each["problem"] or {}).get("detail", "well"))

    async def test(api: Api) -> None:
        await api.get()  # the others are known now
        fail = "ulimit -c 0; kill -SEGV $$"
        first = f'[ -e "$0.open" ] && {{ {fail}; }}; [ "$1" = --version ] || exit 3'
        gate = Gate(directory / "llama-server", fail, first=first)
        monkeypatch.setattr("lllm3090d.serving.engines.LIST_WAIT_S", 0.1)
        status, listing = await api.select({"engine": "b11434-vulkan"})
        assert (status, listing["next"], told(listing, "b11434-vulkan")) == (200, "b11434-vulkan", "well")
        assert "is still being asked" in told(listing, "b1-vulkan")

        chosen = asyncio.create_task(api.select({"engine": "b1-vulkan"}))  # who means it waits for it
        await asyncio.to_thread(gate.wait_for_one)
        assert (await api.select({"engine": "b10434-cuda-sm86"}))[0] == 200
        (directory / "llama-server.open").touch()
        await asyncio.to_thread(gate.let_go)
        status, problem = await chosen
        assert status == 503 and "SIGSEGV" in problem["detail"]
        assert (await api.get())[1]["next"] == "b10434-cuda-sm86"

    serve(tmp_path, settings, test)
