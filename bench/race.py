"""Two loads at the same instant, and cycles of eviction and reload, many times over: does the ledger stay true?

    packaging/dev/user-manager --private -- .venv/bin/python -m bench.race [--rounds N] [--cycles N]

Through the real API, a real systemd, a stand-in card and a stand-in engine. In each round two clients load different
models that fit alone and not together: both wait for their turn, or neither waits, or both are pinned. In each cycle
one model evicts the other and is evicted in turn. The first contradiction between answers, units, ledger and card ends
it with an AssertionError.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from bench import _support as support
from tests.system.rig import ROOM_MIB, rigged
from tests.system.rounds import RIVALS, cycles, race


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="races of two loads, cycles of eviction")
    parser.add_argument("--rounds", type=int, default=200, help="races (default: 200)")
    parser.add_argument("--cycles", type=int, default=100, help="evictions and reloads (default: 100)")
    parser.add_argument(
        "--seed", type=int, default=1, help="of the moments of the second client (default: 1)"
    )
    options = parser.parse_args()
    print(support.machine_line() + "\n")
    with tempfile.TemporaryDirectory(prefix="race-") as directory, rigged(Path(directory), RIVALS) as rig:
        tally = race(rig, options.rounds, options.seed)
        rows = [
            (kind, ", ".join(f"{count} {code}" for code, count in sorted(endings.items())))
            for kind, endings in tally.endings.items()
        ]
        print(f"{tally.rounds} races\n" + support.table(("", "answers"), rows))
        took = cycles(rig, options.cycles)
        print(f"\n{len(took)} cycles of eviction and reload: ledger and card equal after each\n")
    samples = {name: values for name, values in (("race", tally.seconds), ("cycle", took)) if values}
    print(support.table(support.SPREAD_HEADS, support.spread_rows("s", samples, 2)))
    most = support.Target("most reserved at once", tally.most_reserved_mib, ROOM_MIB, "MiB")
    return support.report_targets((most,))


if __name__ == "__main__":
    sys.exit(main())
