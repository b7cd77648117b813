"""System tests run in a private user manager, so that they never touch a person's own units."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.harness import Service, running
from tests.system.scenes import PrivateBus

# Set by packaging/dev/user-manager for what it runs under a private manager.
PRIVATE_MANAGER = "PRIVATE_USER_MANAGER"


@pytest.fixture(autouse=True)
def private_manager() -> None:
    """Skip outside a private user manager."""
    if os.environ.get(PRIVATE_MANAGER) != "1":
        pytest.skip("needs a private user manager; run: make test-system")
    state = subprocess.run(
        ["systemctl", "--user", "is-system-running"], capture_output=True, text=True, check=False
    ).stdout.strip()
    assert state in {"running", "degraded"}, f"the user manager is {state}"


@pytest.fixture
def service(tmp_path: Path, llama_server: Path, smollm2_path: Path) -> Iterator[Service]:
    """A running daemon with the real engine and one real model, SmolLM2."""
    made = Service(tmp_path, {"llama_dir": str(llama_server.parent)})
    put_model(made, "SmolLM2-135M-Instruct", smollm2_path)
    with running(made) as started:
        yield started


def put_model(service: Service, name: str, checkpoint: Path) -> Path:
    """Add a real checkpoint to the library."""
    directory = service.models_dir / name
    directory.mkdir(parents=True, exist_ok=True)
    link = directory / checkpoint.name
    link.symlink_to(checkpoint)
    return link


@pytest.fixture
def private_bus(tmp_path: Path) -> Iterator[PrivateBus]:
    """A message bus of the test, not yet started."""
    if shutil.which("dbus-daemon") is None:
        pytest.skip("dbus-daemon is not installed")
    bus = PrivateBus(tmp_path)
    yield bus
    bus.kill()
