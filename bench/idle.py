"""What the daemon takes when nobody asks it for anything.

    packaging/dev/user-manager --private -- .venv/bin/python -m bench.idle

Resident memory (``VmRSS``) after the start and after one load and unload; then, with SmolLM2 loaded, the
processor time (utime + stime), the context switches and the threads over a minute without a request.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from bench import _support as support

RSS_LIMIT_MIB = 80.0
CPU_LIMIT_S = 0.1  # per minute
SETTLE_S = 2.0
KIB_PER_MIB = 1024
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
NS_PER_S = 1e9


@dataclass(frozen=True, slots=True)
class Counters:
    """What a process has used since it began, all of its threads."""

    cpu_s: float  # utime + stime, in ticks of 10 ms
    run_s: float  # on a processor by the scheduler's clock, to the nanosecond
    voluntary: int  # context switches: how often it went to sleep, and so was woken
    involuntary: int
    threads: int


def field_of(status: str, name: str) -> int:
    """A number in a ``status`` file."""
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(f"{name}:"))


def resident_mib(pid: int) -> float:
    """``VmRSS`` of a process."""
    return field_of(Path(f"/proc/{pid}/status").read_text(), "VmRSS") / KIB_PER_MIB


def counters(pid: int) -> Counters:
    """Read them. Threads that have ended count in the processor time only."""
    # The second field, the name in parentheses, may hold blanks; utime and stime are the 14th and 15th.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    tasks = list(Path(f"/proc/{pid}/task").iterdir())
    statuses = [(task / "status").read_text() for task in tasks]
    return Counters(
        cpu_s=(int(fields[11]) + int(fields[12])) / TICKS_PER_S,
        run_s=sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / NS_PER_S,
        voluntary=sum(field_of(status, "voluntary_ctxt_switches") for status in statuses),
        involuntary=sum(field_of(status, "nonvoluntary_ctxt_switches") for status in statuses),
        threads=len(tasks),
    )


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="memory and processor time of an idle daemon")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to watch (default: 60)")
    seconds = parser.parse_args().seconds
    with support.daemon() as service:
        pid = service.main_pid()
        started_mib = resident_mib(pid)
        support.load(service)
        support.unload(service)
        used_mib = resident_mib(pid)
        support.load(service)
        time.sleep(SETTLE_S)  # what a load leaves to do is not idling
        before = counters(pid)
        time.sleep(seconds)
        after = counters(pid)
        loaded_mib = resident_mib(pid)
        support.unload(service)
    per_minute = 60.0 / seconds
    cpu_s = (after.cpu_s - before.cpu_s) * per_minute
    rows = [
        ("resident after the start", f"{started_mib:.1f}", "MiB"),
        ("resident after a load and unload", f"{used_mib:.1f}", "MiB"),
        ("resident with a model loaded, in the end", f"{loaded_mib:.1f}", "MiB"),
        (f"processor time over {seconds:g} s (utime + stime)", f"{after.cpu_s - before.cpu_s:.2f}", "s"),
        ("  the same by the scheduler's clock", f"{(after.run_s - before.run_s):.4f}", "s"),
        ("voluntary context switches", f"{(after.voluntary - before.voluntary) * per_minute:.0f}", "/min"),
        (
            "involuntary context switches",
            f"{(after.involuntary - before.involuntary) * per_minute:.0f}",
            "/min",
        ),
        ("threads", f"{after.threads}", ""),
    ]
    print(support.table(("", "figure", "unit"), rows))
    return support.report_targets(
        (
            support.Target("resident after a load and unload", used_mib, RSS_LIMIT_MIB, "MiB"),
            support.Target("processor time in a minute", cpu_s, CPU_LIMIT_S, "s"),
        )
    )


if __name__ == "__main__":
    sys.exit(main())
