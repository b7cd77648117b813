"""``GET /v1/names`` of the real application: names alone, of files and builds that are there."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import ClientSession, UnixConnector, web

from lllm3090d.checkpoints.library import Library
from lllm3090d.gateway.service import GatewayService
from lllm3090d.serving.daemon import Daemon
from lllm3090d.settings import load_settings
from lllm3090d.surfaces.control import ControlApi
from lllm3090d.wire import Names
from tests.fakes.gguf_files import write_llama

pytestmark = pytest.mark.unit

DEADLINE_S = 60.0


def named(*names: str) -> tuple[SimpleNamespace, ...]:
    return tuple(SimpleNamespace(name=name) for name in names)


def asked(home: Path, query: str, *, with_gateway: bool = True) -> tuple[int, dict[str, Any]]:
    """Status and answer; of the daemon there is what names are read from."""
    library = Library(home / "models", {"small": "SmolLM2"})
    daemon = SimpleNamespace(
        lookup=SimpleNamespace(library=lambda: library),
        scheduler=SimpleNamespace(instances=named("b", "a"), pending=named("c", "a")),
        settings=load_settings(home / "config.toml", {"LLLM3090_ENGINES_DIR": str(home / "engines")}),
    )

    async def main() -> tuple[int, dict[str, Any]]:
        api = ControlApi(cast(Daemon, daemon), "252")
        if with_gateway:
            api.gateway = cast(
                GatewayService, SimpleNamespace(keys=SimpleNamespace(listed=named("laptop", "desk")))
            )
        runner = web.AppRunner(api.application(), access_log=None)
        await runner.setup()
        try:
            await web.UnixSite(runner, str(home / "s")).start()
            connector = UnixConnector(str(home / "s"))
            async with asyncio.timeout(DEADLINE_S), ClientSession(connector=connector) as session:
                answer = await session.get(f"http://d/v1/names{query}")
                return answer.status, await answer.json(content_type=None)
        finally:
            await runner.cleanup()

    return asyncio.run(main())


def test_models_and_their_aliases(tmp_path: Path) -> None:
    for name in ("SmolLM2", "Qwen3.8-27B"):
        (tmp_path / "models" / name).mkdir(parents=True)
        write_llama(tmp_path / "models" / name / "model.gguf")
    expected = (200, {"names": ["Qwen3.8-27B", "SmolLM2", "small"]})
    assert asked(tmp_path, "?of=models") == expected
    assert asked(tmp_path, "") == expected


def test_what_runs_and_what_waits(tmp_path: Path) -> None:
    assert asked(tmp_path, "?of=instances") == (200, {"names": ["a", "b", "c"]})


def test_builds_that_can_be_chosen(tmp_path: Path) -> None:
    """A directory that is not named like a release is there for comparison only."""
    for build in ("b11434-vulkan", "mine"):
        server = tmp_path / "engines" / build / "llama-server"
        server.parent.mkdir(parents=True)
        server.write_text("#!/bin/sh\n")
        server.chmod(0o755)
    status, answer = asked(tmp_path, "?of=engines")
    names = Names.model_validate(answer | {"names": tuple(answer["names"])}).names
    assert status == 200
    assert "b11434-vulkan" in names
    assert "mine" not in names


def test_keys_of_the_gateway(tmp_path: Path) -> None:
    assert asked(tmp_path, "?of=keys") == (200, {"names": ["desk", "laptop"]})
    assert asked(tmp_path, "?of=keys", with_gateway=False) == (200, {"names": []})


def test_other_kinds_are_refused(tmp_path: Path) -> None:
    for query in ("?of=", "?of=plans", f"?of={'x' * 2000}"):
        status, answer = asked(tmp_path, query)
        assert (status, answer["code"]) == (422, "invalid_request")
        assert len(answer["detail"]) < 200


def test_a_models_directory_that_cannot_be_read_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("no directory")
    status, answer = asked(tmp_path, "?of=models")
    assert status >= 400
    assert answer["code"] == "models_dir_unreadable"
