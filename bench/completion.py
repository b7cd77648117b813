"""Processor time of one completion in bash: of the shell's function and of the client that it asks for names.

    packaging/dev/user-manager --private -- .venv/bin/python -m bench.completion

User and system time of ``lllm3090ctl load Smol<Tab>``, with the daemon and, after it was stopped, without it, when
systemd still listens on its socket; and of ``lllm3090ctl loa<Tab>``, which asks nobody. The start of a shell and its
reading of the file, which a person's shell has behind it, are in each figure, and measured alone.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys

from bench import _support as support
from tests.system.harness import BIN, DAEMON_UNIT, REPOSITORY, properties, systemctl

LIMIT_MS = 100.0
MS_PER_S = 1000.0
FILE = REPOSITORY / "packaging" / "completions" / "lllm3090ctl.bash"
# As readline calls it, so many times; prints what was offered last.
SCRIPT = """
source "$1"; count=$2; shift 2
COMP_LINE="$*" COMP_POINT=${#COMP_LINE} COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
for ((turn = 0; turn < count; turn++)); do
  COMPREPLY=()
  _lllm3090ctl lllm3090ctl "${COMP_WORDS[COMP_CWORD]}" ""
  wait $!  # the client runs beside the shell, which would leave its time to nobody
done
((${#COMPREPLY[@]} == 0)) || printf '%s\\n' "${COMPREPLY[@]}"
"""


def spent_ms(turns: int, *words: str) -> tuple[float, list[str]]:
    """Processor time of a shell that completes a line so often, and what it offers. Raises CalledProcessError."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("LLLM3090_")}
    environment["PATH"] = f"{BIN}:{environment['PATH']}"
    command = ["bash", "--norc", "-c", SCRIPT, "bash", str(FILE), str(turns), *words]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.stderr:
        raise RuntimeError(f"the shell complains: {done.stderr}")
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds * MS_PER_S, done.stdout.splitlines()


def completions(count: int, offered: list[str], *words: str) -> list[float]:
    """Processor time of each of so many completions, ms. Raises RuntimeError where others were offered."""
    found = []
    for _ in range(count):
        spent, told = spent_ms(1, *words)
        if told != offered:
            raise RuntimeError(f"{' '.join(words)}: {told} instead of {offered}")
        found.append(spent)
    return found


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="processor time of a completion in bash")
    parser.add_argument("--count", type=int, default=20, help="completions of each kind (default: 20)")
    count = parser.parse_args().count
    name = ("lllm3090ctl", "load", support.MODEL_NAME[:4])
    with support.daemon():
        measured = {"a name, daemon up": completions(count, [support.MODEL_NAME], *name)}
        systemctl("stop", DAEMON_UNIT)
        measured["a name, daemon down"] = completions(count, [], *name)
        if properties(DAEMON_UNIT, "ActiveState")["ActiveState"] != "inactive":
            raise RuntimeError("a completion has started the daemon")
    measured["a command"] = completions(count, ["load"], "lllm3090ctl", "loa")
    start = [spent_ms(0, *name)[0] for _ in range(count)]
    rows = {**measured, "shell and file alone": start}
    print(support.table(support.SPREAD_HEADS, support.spread_rows("ms", rows)))
    return support.report_targets(
        [
            support.Target(f"{kind}, median", statistics.median(times), LIMIT_MS, "ms")
            for kind, times in measured.items()
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
