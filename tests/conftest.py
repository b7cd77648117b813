"""What several test rooms share: the real parts that ``make test`` has set up."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes says nothing here: tests run beside each other, on machines that others use too.
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# For what decides whether a change may land: the same examples each time, and none that an earlier run has left.
settings.register_profile("ci", settings.get_profile("shared"), derandomize=True, database=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "shared"))

ROOT = Path(__file__).resolve().parents[1]
MODELS = ROOT / ".engine" / "models"


def _engine_program(name: str) -> Path:
    """A program of the engine: of the named build, else of the one that set-up chose, else of PATH."""
    named = os.environ.get("LLLM3090_LLAMA_DIR")
    places = (
        [Path(named) / below for below in ("", "bin", "build/bin")]
        if named
        else [ROOT / ".engine" / "llama"]
    )
    for place in places:
        if os.access(place / name, os.X_OK):
            return place / name
    found = None if named else shutil.which(name)
    if found is None:
        pytest.skip(
            f"no {name} in {', '.join(map(str, places))}{'' if named else ' or PATH'}; run: make test"
        )
    return Path(found)


def _checkpoint(name: str) -> Path:
    path = MODELS / name
    if not path.is_file():
        pytest.skip(f"{path} is not there; run: make test")
    return path


@pytest.fixture(scope="session")
def llama_server() -> Path:
    """A real engine."""
    return _engine_program("llama-server")


@pytest.fixture(scope="session")
def llama_fit_params() -> Path:
    """The engine's own dry run."""
    return _engine_program("llama-fit-params")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct, Q4_1: llama architecture, 98 MB."""
    return _checkpoint("smollm2.gguf")


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    """Gemma-3-270M, Q4_K_M: sliding-window attention, 253 MB."""
    return _checkpoint("gemma3.gguf")


@pytest.fixture(scope="session")
def coverage_environment() -> Mapping[str, str]:
    """Variables with which a Python process in a unit measures itself; empty where coverage is not run."""
    return {
        name: os.environ[name]
        for name in ("COVERAGE_PROCESS_START", "COVERAGE_FILE")
        if os.environ.get(name)
    }
