"""``/v1/gpus``, ``/v1/models/{name}/explain`` and ``/metrics`` through HTTP on a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import ClientSession, UnixConnector, web
from prometheus_client.parser import text_string_to_metric_families

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.planning.units import MIB
from lllm3090d.serving import journal
from lllm3090d.serving.admission import rooms
from lllm3090d.serving.daemon import Daemon
from lllm3090d.serving.engine_logs import EngineLogs
from lllm3090d.serving.journal import JournalLine
from lllm3090d.serving.learnt import NO_BUILD
from lllm3090d.serving.statistics import Statistics
from lllm3090d.surfaces.control import PROBLEM_JSON, ControlApi
from lllm3090d.surfaces.openapi import document
from lllm3090d.wire_cards import ExplainView, Gpus
from tests.fakes.card_scenes import LOG, LOST, NOW_S, RESERVES, Desk

pytestmark = pytest.mark.unit

DEADLINE_S = 60.0


def daemon_of(desk: Desk, *, broken: LlmError | None = None) -> Daemon:
    """As much of a daemon as these routes ask for."""

    def made(observation: Any) -> Any:
        if broken is not None:
            raise broken
        return rooms(observation, desk.ledger, RESERVES)

    async def nothing() -> None:
        """No desktop is looked for."""

    def loaded(name: str) -> Any:
        for each in desk.instances.values():
            if each.name == name:
                return each
        raise LlmError(ErrorCode.NOT_LOADED, f"{name} is not loaded", hint="ps", name=name)

    scheduler = SimpleNamespace(
        ledger=desk.ledger,
        rooms=made,
        instances=tuple(desk.instances.values()),
        clock=lambda: NOW_S,
        released=True,
        pending=(1, 2),
        policy=SimpleNamespace(models={}),
    )
    return cast(
        Daemon,
        SimpleNamespace(
            scheduler=scheduler,
            statistics=Statistics(),
            observe=lambda: desk.observation,
            look_for_desktop=nothing,
            loaded=loaded,
            logs=EngineLogs(),
            lookup=SimpleNamespace(engines=SimpleNamespace(all=lambda: ())),
        ),
    )


def serve(directory: Path, daemon: Daemon, test: Callable[[ClientSession], Awaitable[None]]) -> None:
    """Run a test against the application."""

    async def main() -> None:
        runner = web.AppRunner(ControlApi(daemon, "252").application(), access_log=None)
        await runner.setup()
        try:
            await web.UnixSite(runner, str(directory / "s")).start()
            async with asyncio.timeout(DEADLINE_S):
                async with ClientSession(connector=UnixConnector(str(directory / "s"))) as session:
                    await test(session)
        finally:
            await runner.cleanup()

    asyncio.run(main())


def get(directory: Path, daemon: Daemon, target: str, status: int = 200) -> tuple[str, str]:
    """Media type and body of an answer."""
    found: list[tuple[str, str]] = []

    async def test(session: ClientSession) -> None:
        async with session.get(f"http://d{target}") as answer:
            assert answer.status == status
            found.append((answer.headers["Content-Type"], await answer.text()))

    serve(directory, daemon, test)
    return found[0]


def test_gpus(tmp_path: Path) -> None:
    desk = Desk()
    media, text = get(tmp_path, daemon_of(desk), "/v1/gpus")
    assert media.startswith("application/json")
    told = Gpus.model_validate_json(text)
    assert told.released
    assert told.model_copy(update={"released": False}) == desk.view


def test_a_card_that_is_lost_is_an_answer(tmp_path: Path) -> None:
    told = Gpus.model_validate_json(get(tmp_path, daemon_of(Desk(problem=LOST)), "/v1/gpus")[1])
    assert told.gpus[0].problem is not None
    assert told.gpus[0].grantable_bytes is None


def test_an_absurd_reading_grants_nothing_and_is_shown(tmp_path: Path) -> None:
    absurd = LlmError(ErrorCode.CARD_UNREADABLE, "used is more than total")
    told = Gpus.model_validate_json(get(tmp_path, daemon_of(Desk(), broken=absurd), "/v1/gpus")[1])
    assert told.gpus[0].reading is not None
    assert (told.gpus[0].grantable_bytes, told.host and told.host.grantable_bytes) == (None, None)


def test_another_fault_is_not_hidden(tmp_path: Path) -> None:
    other = LlmError(ErrorCode.INTERNAL, "a mistake")
    media, text = get(tmp_path, daemon_of(Desk(), broken=other), "/v1/gpus", 500)
    assert media.startswith(PROBLEM_JSON)
    assert "a mistake" in text


def explain(
    directory: Path, monkeypatch: pytest.MonkeyPatch, lines: tuple[str, ...] | LlmError
) -> ExplainView:
    asked: list[tuple[str, int]] = []

    async def tail(identifier: str, count: int, uid: int | None = None) -> tuple[JournalLine, ...]:
        asked.append((identifier, count))
        if isinstance(lines, LlmError):
            raise lines
        return tuple(JournalLine(0, line) for line in lines)

    monkeypatch.setattr(journal, "tail", tail)
    _, text = get(directory, daemon_of(Desk()), "/v1/models/Qwen3.8-27B/explain")
    assert asked == [("lllm3090-Qwen3.8-27B-q1", journal.LINES_MAX)]
    return ExplainView.model_validate_json(text)


def test_explain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = explain(tmp_path, monkeypatch, tuple(LOG.splitlines()))
    assert told.memories[0].parts[0].engine_bytes == 8998 * MIB + MIB // 4
    assert told.calibration_note == NO_BUILD


def test_explain_without_a_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = explain(tmp_path, monkeypatch, LlmError(ErrorCode.LOGS_UNAVAILABLE, "No journal."))
    assert told.engine_note == "No journal."
    assert told.memories[0].measured_bytes == 11900 * MIB


def test_explain_of_an_engine_that_has_written_too_much_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = explain(tmp_path, monkeypatch, ("chatter",) * journal.LINES_MAX)
    assert "too far back" in told.engine_note


def test_explain_of_what_is_not_loaded_points_to_the_plan(tmp_path: Path) -> None:
    _, text = get(tmp_path, daemon_of(Desk()), "/v1/models/nothing/explain", 404)
    assert "lllm3090ctl plan 'nothing' --explain" in text


def test_metrics(tmp_path: Path) -> None:
    media, text = get(tmp_path, daemon_of(Desk()), "/metrics")
    assert media == "text/plain; version=0.0.4; charset=utf-8"
    found = {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.labels
    }
    assert (found["lllm3090_queue_length"], found["lllm3090_released"]) == (2, 1)


def test_metrics_of_a_lost_card(tmp_path: Path) -> None:
    _, text = get(tmp_path, daemon_of(Desk(problem=LOST)), "/metrics")
    assert 'lllm3090_card_readable{card="GPU-1",name="NVIDIA GeForce RTX 3090"} 0.0' in text


def test_the_answers_are_described() -> None:
    schemas = document()["components"]["schemas"]
    assert {"Gpus", "GpuView", "HostView", "ExplainView", "MemoryPartView"} <= set(schemas)
