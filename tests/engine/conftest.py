"""What the tests with a real engine share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.dry_run import DryRun, DryRunUnavailableError, build, dry_run


@pytest.fixture(scope="session")
def dry_run_engine(llama_server: Path) -> Path:
    """The directory of an engine that can be asked for exact bytes."""
    try:
        build(llama_server.parent)
    except DryRunUnavailableError as error:
        pytest.skip(f"bytes cannot be compared with this engine: {error}")
    return llama_server.parent


@pytest.fixture(scope="session")
def exact_engine(dry_run_engine: Path) -> Iterator[DryRun]:
    """The engine's own dry run in exact bytes."""
    with dry_run(dry_run_engine) as engine:
        yield engine
