"""``lllm3090d --doctor`` as a process, with a card that is not there: through the real binding of NVML."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lllm3090d.doctor.findings import Check
from tests.fakes.nvml import LIB_RM_VERSION_MISMATCH, FakeCard, FakeNvml

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> FakeNvml:
    return FakeNvml(tmp_path_factory.mktemp("card"))


DOCTOR = ("-P", "-m", "lllm3090d", "--doctor")
# The same with less patience.
IMPATIENT = (
    "-c",
    "from lllm3090d.doctor import examination\n"
    "examination.examine.__kwdefaults__['facts_limit_s'] = 1.0\n"
    "examination.main(None)\n",
)


def examined(
    nvml: FakeNvml, directory: Path, command: tuple[str, ...] = DOCTOR
) -> dict[str, dict[str, Any]]:
    """The lines by their check; no systemd is reachable."""
    environment = dict(os.environ) | nvml.environment
    environment |= {
        "HOME": str(directory),
        "XDG_RUNTIME_DIR": str(directory),
        "DBUS_SESSION_BUS_ADDRESS": f"unix:path={directory}/none",
        "LLLM3090_LLAMA_DIR": str(directory),
    }
    done = subprocess.run(
        [sys.executable, *command],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    document = json.loads(done.stdout)
    assert document["environment"] == "shell"
    return {each["check"]: each for each in document["checks"]}


def test_a_card(nvml: FakeNvml, tmp_path: Path) -> None:
    nvml.write(FakeCard(), driver="535.54.03")
    lines = examined(nvml, tmp_path)
    assert list(lines) == list(map(str, Check))
    assert lines["driver"]["level"] == "warn"
    assert "RTX 3090, 24576 MiB, driver 535.54.03" in lines["driver"]["message"]
    assert "older than 550" in lines["driver"]["message"]
    if not Path("/dev/nvidiactl").exists():
        assert lines["devices"]["level"] == "fail"
        assert "/dev/nvidiactl" in lines["devices"]["message"]


def test_a_driver_that_was_upgraded_under_the_kernel(nvml: FakeNvml, tmp_path: Path) -> None:
    nvml.write(FakeCard(), failures={"nvmlInit": LIB_RM_VERSION_MISMATCH})
    driver = examined(nvml, tmp_path)["driver"]
    assert (driver["level"], driver["hint"]) == ("fail", "Reboot."), driver


def test_a_driver_that_never_answers(nvml: FakeNvml, tmp_path: Path) -> None:
    """The thread hangs inside the library; the process ends all the same, with all other lines."""
    nvml.state.unlink()
    os.mkfifo(nvml.state)
    try:
        lines = examined(nvml, tmp_path, IMPATIENT)
    finally:
        nvml.state.unlink()
    assert lines["driver"]["level"] == "fail"
    assert "does not answer" in lines["driver"]["message"]
    assert lines["settings"]["level"] == "ok"
    assert len(lines) == len(Check)
