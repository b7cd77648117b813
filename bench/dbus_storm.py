#!/usr/bin/env python3
"""A storm of D-Bus calls on a running daemon: whether every one is answered, and what becomes of the control API.

    bench/dbus_storm.py [--calls 5000] [--processes 4] [--json]

Each process makes its calls one after the other: properties, ListInstances, Introspect. Before, during and after the
storm GET /v1/version is asked on the control socket, once in 20 ms; the ratio of the medians and of the 99th
percentiles says what the storm costs others. Needs PyGObject, a session bus and a daemon.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import os
import socket
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

NAME, ROOT = "org.lllm3090.Manager1", "/org/lllm3090/Manager1"
PROPERTIES = "org.freedesktop.DBus.Properties"
PAUSE_S = 0.02
QUIET = 100  # questions before the storm, and after


def calls(number: int, out: Any) -> None:
    """One client."""
    from gi.repository import Gio, GLib

    address = os.environ.get("DBUS_SESSION_BUS_ADDRESS") or f"unix:path=/run/user/{os.getuid()}/bus"
    flags = Gio.DBusConnectionFlags.AUTHENTICATION_CLIENT | Gio.DBusConnectionFlags.MESSAGE_BUS_CONNECTION
    connection = Gio.DBusConnection.new_for_address_sync(address, flags, None, None)
    kinds = (
        (PROPERTIES, "Get", GLib.Variant("(ss)", (NAME, "State"))),
        (PROPERTIES, "GetAll", GLib.Variant("(s)", (NAME,))),
        (NAME, "ListInstances", None),
        ("org.freedesktop.DBus.Introspectable", "Introspect", None),
    )
    answered, errors, seconds = 0, 0, []
    for turn in range(number):
        interface, member, arguments = kinds[turn % len(kinds)]
        begin = time.monotonic()
        try:
            connection.call_sync(
                NAME, ROOT, interface, member, arguments, None, Gio.DBusCallFlags.NONE, 25_000, None
            )
            answered += 1
        except GLib.Error as error:
            errors += 1
            sys.stderr.write(f"{member}: {error.message}\n")
        seconds.append(time.monotonic() - begin)
    out.put((answered, errors, seconds))


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=60)
        self.path = path

    def connect(self) -> None:
        """Connect."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self.path)
        self.sock.settimeout(self.timeout)


def asked_s(connection: UnixConnection) -> float:
    """How long the control API takes for its cheapest answer."""
    begin = time.monotonic()
    connection.request("GET", "/v1/version")
    assert connection.getresponse().read()
    return time.monotonic() - begin


def asked_in_quiet(control: UnixConnection, pause: threading.Event) -> list[float]:
    """The same without a storm."""
    seconds = []
    for _ in range(QUIET):
        seconds.append(asked_s(control))
        pause.wait(PAUSE_S)
    return seconds


def percentile(seconds: list[float], part: float) -> float:
    """In milliseconds."""
    ordered = sorted(seconds)
    return 1000 * ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=5000, help="by each process")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}")
    control = UnixConnection(str(runtime / "lllm3090d" / "control.sock"))
    pause = threading.Event()  # never set
    asked_s(control)
    quiet = asked_in_quiet(control, pause)
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    processes = [context.Process(target=calls, args=(options.calls, out)) for _ in range(options.processes)]
    begin = time.monotonic()
    for process in processes:
        process.start()
    stormy: list[float] = []
    results: list[tuple[int, int, list[float]]] = []
    while len(results) < len(processes):
        stormy.append(asked_s(control))
        pause.wait(PAUSE_S)
        while not out.empty():
            results.append(out.get())
    took_s = time.monotonic() - begin
    for process in processes:
        process.join()
    quiet += asked_in_quiet(control, pause)  # before and after, for a machine that others use too
    seconds = [each for _, _, taken in results for each in taken]
    told = {
        "calls": options.calls * options.processes,
        "answered": sum(answered for answered, _, _ in results),
        "errors": sum(errors for _, errors, _ in results),
        "took_s": round(took_s, 2),
        "call_median_ms": round(1000 * statistics.median(seconds), 2),
        "call_p99_ms": round(percentile(seconds, 0.99), 2),
        "control_quiet_median_ms": round(percentile(quiet, 0.5), 2),
        "control_storm_median_ms": round(percentile(stormy, 0.5), 2),
        "control_quiet_p99_ms": round(percentile(quiet, 0.99), 2),
        "control_storm_p99_ms": round(percentile(stormy, 0.99), 2),
        "control_median_ratio": round(percentile(stormy, 0.5) / percentile(quiet, 0.5), 2),
        "control_p99_ratio": round(percentile(stormy, 0.99) / percentile(quiet, 0.99), 2),
    }
    if options.json:
        print(json.dumps(told))
    else:
        for name, value in told.items():
            print(f"{name:28} {value}")
    sys.exit(told["answered"] != told["calls"])


if __name__ == "__main__":
    main()
