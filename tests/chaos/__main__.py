"""A run of chaos.

    packaging/dev/user-manager --private -- .venv/bin/python -m tests.chaos --seed 7 --seconds 900

Exit status 1 with each violation and the last lines of the log; the same seed does the same steps.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from tests.chaos.run import chaos
from tests.chaos.scene import launcher


def main() -> int:
    """Read the arguments, run, report."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of the steps (default: 1)")
    parser.add_argument(
        "--seconds", type=float, default=900.0, help="for which steps are begun (default: 900)"
    )
    parser.add_argument("--quiet", action="store_true", help="no log while it goes on")
    parser.add_argument(
        "--package", type=Path, help="directory of another copy of lllm3090d, to run that one"
    )
    options = parser.parse_args()
    if os.environ.get("PRIVATE_USER_MANAGER") != "1":
        sys.exit("needs a user manager of its own; run: packaging/dev/user-manager --private -- COMMAND")
    with tempfile.TemporaryDirectory(prefix="chaos-") as directory:
        home = Path(directory, "scene")
        home.mkdir()
        program = launcher(Path(directory), options.package) if options.package else None
        outcome = chaos(home, options.seed, options.seconds, program=program, quiet=options.quiet)
    print("\n" + outcome.report())  # noqa: T201  # its output
    return 1 if outcome.violations else 0


if __name__ == "__main__":
    sys.exit(main())
