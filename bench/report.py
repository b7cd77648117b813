"""All measurements, one after the other, each in a process of its own.

    packaging/dev/user-manager --private -- .venv/bin/python -m bench.report

Exit status 1 when one of them misses a target or cannot be done.
"""

from __future__ import annotations

import subprocess
import sys
import time

from bench import _support as support
from tests.system.harness import REPOSITORY

CHECKPOINTS = ("smollm2.gguf", "gemma3.gguf")


def main() -> int:
    """Run them all."""
    models = [str(support.checkpoint(name)) for name in CHECKPOINTS]
    fit_params = support.engine_dir() / "llama-fit-params"
    measurements = {
        "accuracy": ["--random", "200", "--partial", "--fit-params", str(fit_params), *models],
        "planning_truth": ["--contexts"],
        "rivals": [],
        "planning": [],
        "library": [],
        "client": [],
        "load_overhead": [],
        "adoption": [],
        "idle": [],
        "gateway": [],
        "scheduling": [],
        "race": [],
    }
    bad = []
    began = time.monotonic()
    for name, arguments in measurements.items():
        print(f"== {name}", flush=True)
        done = subprocess.run(
            [sys.executable, "-m", f"bench.{name}", *arguments], check=False, cwd=REPOSITORY
        )
        if done.returncode:
            bad.append(name)
        print(flush=True)
    print(f"{time.monotonic() - began:.0f} s; missed or failed: {', '.join(bad) or 'none'}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
