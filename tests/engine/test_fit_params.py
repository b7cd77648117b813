"""Weights and context of real checkpoints are what the engine's own dry run says, to the MiB."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.accuracy import CACHE_TYPES, CONTEXTS, ask_engine, compare, main
from lllm3090d.planning.cache import CacheType

pytestmark = pytest.mark.engine

MODELS = ("smollm2_path", "gemma3_path")


@pytest.mark.parametrize("context_tokens", CONTEXTS)
@pytest.mark.parametrize("cache_type", CACHE_TYPES)
@pytest.mark.parametrize("model", MODELS)
def test_our_figures_are_the_engines(
    model: str,
    cache_type: CacheType,
    context_tokens: int,
    llama_fit_params: Path,
    request: pytest.FixtureRequest,
) -> None:
    row = compare(llama_fit_params, request.getfixturevalue(model), context_tokens, cache_type)
    assert row.ours.weights == row.engine.weights
    assert row.ours.context == row.engine.context
    assert 0.98 * row.engine.compute <= row.ours.compute <= row.engine.compute


def test_the_table_is_printed(
    llama_fit_params: Path, smollm2_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--fit-params", str(llama_fit_params), str(smollm2_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(CONTEXTS) * len(CACHE_TYPES)
    assert all(line.endswith(" yes") for line in lines[2:])


def test_an_engine_that_fails_is_reported(llama_fit_params: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF" + bytes(20))
    with pytest.raises(RuntimeError, match="llama-fit-params ended with"):
        ask_engine(llama_fit_params, damaged, 4096, CacheType.F16, CacheType.F16)


def test_the_recorded_table_is_all_zeroes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines[1:-3]]
    assert lines[-1].startswith("worst row by context and weights: ") and lines[-1].endswith(", 0 B apart")
    assert len(rows) == 23
    assert sum(int(row[1]) for row in rows) == 1822
    assert {tuple(row[3:6]) for row in rows} == {("0", "0", "0")}


@pytest.mark.parametrize("arguments", [["m.gguf"], ["--random", "-1"], ["--fit-params", "x"]])
def test_a_call_without_sense_is_a_usage_error(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
