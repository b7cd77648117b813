"""Whether chaos finds what it is there for: three bugs are put into the daemon, and each must be caught.

    packaging/dev/user-manager --private -- .venv/bin/python -m tests.chaos.planted

Each is a few lines that replace a method of the daemon before it starts, so nothing of the package is changed. Exit
status 1 when one is not caught.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.run import chaos
from tests.chaos.scene import launcher
from tests.system.harness import REPOSITORY

SECONDS = 90.0


@dataclass(frozen=True, slots=True)
class Bug:
    """A bug that is planted.

    Attributes:
        name: what it is.
        code: replaces something of the daemon.
        seed: of steps that meet it.
        kinds: of violations, of which one must be seen.
    """

    name: str
    code: str
    seed: int
    kinds: frozenset[str]


BUGS = (
    Bug(
        "the ledger forgets to release what has come back",
        """
from lllm3090d.serving.ledger import Ledger
Ledger.settle = lambda self, run, missing, now_s=0.0: None
""",
        1,
        frozenset({"untrue memory"}),
    ),
    Bug(
        "adoption passes over units that load",
        """
from lllm3090d.serving.lives import Lives
adopted = Lives._on_adopted
passed = set()
def only_ready(self, event):
    if event.status.active_state == "active" and not event.healthy:
        passed.add(event.status.name)
    if event.status.name not in passed:
        adopted(self, event)
Lives._on_adopted = only_ready
""",
        2,
        frozenset({"orphan"}),
    ),
    Bug(
        "the end of an engine that serves does not change its state",
        """
from lllm3090d.serving.instance import SERVING
from lllm3090d.serving.lives import Lives
ended = Lives._unit_ended
def not_of_a_serving_one(self, instance, status):
    if instance.state not in SERVING:
        ended(self, instance, status)
Lives._unit_ended = not_of_a_serving_one
""",
        3,
        frozenset({"untrue state"}),
    ),
)


def main() -> int:
    """Run each, tell what was caught."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.planted", description=__doc__)
    parser.add_argument(
        "--package", type=Path, default=REPOSITORY, help="directory of the lllm3090d to spoil"
    )
    parser.add_argument("--log", action="store_true", help="show the log of each run")
    options = parser.parse_args()
    if os.environ.get("PRIVATE_USER_MANAGER") != "1":
        sys.exit("needs a user manager of its own; run: packaging/dev/user-manager --private -- COMMAND")
    missed = 0
    for bug in BUGS:
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="chaos-") as directory:
            home = Path(directory, "scene")
            home.mkdir()
            program = launcher(Path(directory), options.package, bug.code)
            outcome = chaos(home, bug.seed, SECONDS, program=program, quiet=not options.log, stop_early=True)
        caught = [each for each in outcome.violations if each.kind in bug.kinds]
        missed += not caught
        took_s = time.monotonic() - began
        print(f"{'caught' if caught else 'MISSED'} after {took_s:3.0f} s: {bug.name} (seed {bug.seed})")  # noqa: T201
        for each in outcome.violations[:3]:
            print(f"    {each.at_s:7.2f} s  {each.kind}: {each.text}", flush=True)  # noqa: T201
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
