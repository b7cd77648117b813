"""What the gateway adds to an engine's answers, and what it takes for many of them.

    .venv/bin/python -m bench.gateway [--seconds S] [--nginx PROGRAM]

An engine that answers at once (bench/gateway_engine.c), clients (bench/gateway_load.c), the gateway
(bench/gateway_process.py) and, where it is installed, nginx as a reverse proxy to the same socket are each a process of
their own. Each figure is taken in turns with the one without a proxy. See docs/reference/benchmarks.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from bench import _support as support
from bench.gateway_scene import Load, Program, Scene, Seen, quantile, scene

ROUNDS = 3
STREAMS = 32
# As an engine writes: a token every 25 ms, answers of 0.4 s.
PACED = Load(STREAMS, 0, pieces=16, interval_us=25_000, pause_us=50_000)
MANY = 1000
LEAVING = 500
LARGE_BYTES = 100_000_000
CHUNK_BYTES = 1 << 16
SETTLE_LIMIT_S = 20.0
FIRST_P50_LIMIT_MS, FIRST_P99_LIMIT_MS, NGINX_FACTOR = 2.0, 10.0, 5.0
PIECE_P99_LIMIT_MS = 1.0
# Bounds that a leak or a missing back-pressure breaks at once.
STREAM_LIMIT_KIB, HELD_LIMIT_MIB = 256.0, 32.0


@dataclass(slots=True)
class Report:
    """Targets so far, and what went wrong beyond them."""

    targets: list[support.Target] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def target(self, name: str, value: float, limit: float, unit: str) -> None:
        """A figure and its limit."""
        self.targets.append(support.Target(name, value, limit, unit))


def latency(made: Scene, seconds: float, report: Report) -> None:
    """Time to the first piece and of each further one, with 32 streams at a time."""
    ahead = made.go_first()
    print(
        f"{STREAMS} streams at a time, a piece each 25 ms, answers of 0.4 s; {ROUNDS} rounds of {seconds:g} s in turn"
        + (
            "; before other programs (SCHED_RR)"
            if ahead
            else "; beside other programs: SCHED_RR is not allowed"
        )
    )
    seen = {(name, keep): Seen() for name in made.places for keep in (False, True)}
    for _ in range(ROUNDS):
        for (name, keep), found in seen.items():
            load = replace(PACED, seconds=seconds, keep=keep)
            found.add(made.load(made.places[name], load, first=ahead))
    made.go_as_others()
    rows = []
    for (name, keep), found in seen.items():
        figures = (
            *(quantile(found.first_ms, part) for part in (0.5, 0.99)),
            *(quantile(found.piece_ms, part) for part in (0.5, 0.99)),
        )
        kind = "kept" if keep else "new"
        rows.append(
            (f"{name}, {kind} connection", *(f"{each:.2f}" for each in figures), f"{found.complete}")
        )
        if found.broken:
            report.faults.append(f"{found.broken} streams broke off at {name}")
    print(support.table(("ms", "first p50", "p99", "piece p50", "p99", "answers"), rows))
    for keep in (False, True):
        _added({name: seen[name, keep] for name in made.places}, "kept" if keep else "new", report)


def _added(seen: Mapping[str, Seen], kind: str, report: Report) -> None:
    direct, gateway, nginx = seen["direct"], seen["gateway"], seen.get("nginx")
    p50, p99 = (quantile(gateway.first_ms, part) - quantile(direct.first_ms, part) for part in (0.5, 0.99))
    piece = quantile(gateway.piece_ms, 0.99) - quantile(direct.piece_ms, 0.99)
    limit = FIRST_P99_LIMIT_MS
    if nginx is not None:
        ratios = [
            quantile(gateway.first_ms, 0.5) / quantile(nginx.first_ms, 0.5),
            quantile(gateway.first_ms, 0.99) / quantile(nginx.first_ms, 0.99),
            quantile(gateway.piece_ms, 0.99) / quantile(nginx.piece_ms, 0.99),
        ]
        print(
            f"gateway to nginx, {kind} connection: first p50 {ratios[0]:.1f}, p99 {ratios[1]:.1f}, "
            f"piece p99 {ratios[2]:.1f} times"
        )
        limit = max(limit, NGINX_FACTOR * (quantile(nginx.first_ms, 0.99) - quantile(direct.first_ms, 0.99)))
    report.target(f"first piece, p50 added, {kind} connection", p50, FIRST_P50_LIMIT_MS, "ms")
    report.target(f"first piece, p99 added, {kind} connection", p99, limit, "ms")
    report.target(f"further pieces, p99 added, {kind} connection", piece, PIECE_P99_LIMIT_MS, "ms")


def saturation(made: Scene, seconds: float, report: Report) -> None:
    """Requests a second, each client asking again at once."""
    print(f"\nshort answers, {STREAMS} clients that ask again at once, {seconds:g} s each")
    rows = []
    for name, place in made.places.items():
        figures = []
        for keep in (True, False):
            seen = made.load(place, Load(STREAMS, seconds, keep=keep))
            figures.append(f"{seen.complete / seconds:.0f}")
            if seen.broken:
                report.faults.append(f"{seen.broken} requests broke off at {name}")
        rows.append((name, *figures))
    print(support.table(("requests/s", "kept connection", "new connection"), rows))


def many(made: Scene, report: Report) -> None:
    """A thousand streams, each a piece a second: memory, and whether all come whole."""
    made.load(
        str(made.gateway.port), Load(200, 0, pieces=3, interval_us=100_000, keep=False)
    )  # as it has been used
    before = made.gateway.resident_mib()
    load = Load(MANY, 0, pieces=10, interval_us=1_000_000, keep=False)
    process = made.start_load(str(made.gateway.port), load)
    most_mib, most_open = before, 0
    while process.poll() is None and most_open < MANY:
        time.sleep(0.5)
        most_open = max(most_open, made.gateway.state()["in_flight"])
        most_mib = max(most_mib, made.gateway.resident_mib())
    seen = made.seen(process, load)
    most_mib = max(most_mib, made.gateway.resident_mib())
    per_stream = (most_mib - before) * 1024 / MANY
    print(
        f"\n{most_open} slow streams at a time: {seen.complete} whole, {seen.broken} broken, "
        f"{len(seen.piece_ms)} pieces, {before:.1f} to {most_mib:.1f} MiB, {per_stream:.1f} KiB a stream; "
        f"pieces p50 {quantile(seen.piece_ms, 0.5):.2f}, p99 {quantile(seen.piece_ms, 0.99):.2f} ms"
    )
    report.target("slow streams that were not open at once", MANY - most_open, 0, "")
    report.target("slow streams that were not whole", MANY - seen.complete, 0, "")
    report.target("memory of a slow stream", per_stream, STREAM_LIMIT_KIB, "KiB")


def _ask(port: int, script: str, length: int = 0, *, body: bytes = b"{}") -> socket.socket:
    """A connection with a request on it, whose body may be longer than what is sent of it here."""
    connection = socket.create_connection(("127.0.0.1", port))
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"X-Script: {script}\r\nContent-Length: {length or len(body)}\r\n\r\n"
    )
    connection.sendall(head.encode() + body)
    return connection


def slow_ones(made: Scene, seconds: float, report: Report) -> None:
    """A reader that stops and an engine that reads slowly, beside streams as before."""
    port, before = made.gateway.port, made.gateway.resident_mib()
    load = replace(PACED, clients=8, seconds=seconds)
    ahead = made.go_first()
    alone = made.load(str(port), load, first=ahead)
    script = f"{LARGE_BYTES // CHUNK_BYTES} 0 {CHUNK_BYTES} 0"
    model = b'{"model": "small", "x": "'
    slow = [_ask(port, script, body=model + b'"}') for _ in range(4)]
    uploads = [_ask(port, "0 0 0 2000000", LARGE_BYTES, body=model) for _ in range(4)]
    for upload in uploads:
        upload.setblocking(False)
    sent = 0
    process = made.start_load(str(port), load)
    most_mib, ends = before, time.monotonic() + seconds
    while time.monotonic() < ends:
        for upload in uploads:
            try:
                sent += upload.send(b"x" * CHUNK_BYTES)
            except BlockingIOError:
                continue
        most_mib = max(most_mib, made.gateway.resident_mib())
        time.sleep(0.005)
    beside = made.seen(process, load)
    made.go_as_others()
    for connection in (*slow, *uploads):
        connection.close()
    held, slower = most_mib - before, quantile(beside.piece_ms, 0.5) - quantile(alone.piece_ms, 0.5)
    print(
        f"\n4 readers that stop in 100 MB and 4 uploads of 100 MB to an engine that reads 2 MB/s ({sent / 1e6:.0f} MB "
        f"taken): {held:.1f} MiB more in the gateway;\nothers' pieces p50 {quantile(beside.piece_ms, 0.5):.2f} ms, p99 "
        f"{quantile(beside.piece_ms, 0.99):.2f} ms, without them {quantile(alone.piece_ms, 0.5):.2f} and "
        f"{quantile(alone.piece_ms, 0.99):.2f} ms"
    )
    report.target("memory held for slow readers and a slow engine", held, HELD_LIMIT_MIB, "MiB")
    report.target("slow ones add to others' pieces, p50", slower, PIECE_P99_LIMIT_MS, "ms")
    if beside.broken:
        report.faults.append(f"{beside.broken} streams broke off beside slow ones")


def leaving(made: Scene, report: Report) -> None:
    """Clients that leave at random points, before a model with 16 slots."""
    gateway = Program(made.socket, 16)
    try:
        began = made.counts()
        asyncio.run(_leave(gateway.port))
        ends = time.monotonic() + SETTLE_LIMIT_S
        while True:
            state, counts = gateway.state(), made.counts()
            left = (
                state["in_flight"]
                + state["in_work"]
                + state["waiting"]
                + state["leases"]
                + counts["working"]
            )
            if not left or time.monotonic() > ends:
                break
            time.sleep(0.05)
        print(
            f"\n{LEAVING} clients that left at random points: records {json.dumps(state['outcomes'])}; in flight "
            f"{state['in_flight']}, slots in use {state['in_work']}, in line {state['waiting']}, leases "
            f"{state['leases']}, the engine works on {counts['working']} and was told of "
            f"{counts['abandoned'] - began['abandoned']}"
        )
        report.target("left behind by clients that left", left, 0, "")
    finally:
        gateway.close()


async def _leave(port: int) -> None:
    chance = random.Random(5)  # noqa: S311  # to be the same each time
    body = json.dumps({"stream": True, "messages": ["x" * 3000], "model": "small"}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Script: 400 5000 200 0\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode()
    whole = head + body

    async def leave() -> None:
        await asyncio.sleep(chance.random() * 2)
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(whole if chance.random() < 0.7 else whole[: chance.randrange(len(whole))])
        await asyncio.sleep(chance.choice([0, 0.02, 1.0]) * chance.random())
        if chance.random() < 0.5:
            writer.transport.abort()
        else:
            writer.close()

    await asyncio.gather(*(leave() for _ in range(LEAVING)))


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="what the gateway adds, and what it takes")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a round (default: 3)")
    parser.add_argument("--nginx", default=shutil.which("nginx"), help="program (default: the one in PATH)")
    options = parser.parse_args()
    print(support.machine_line() + "\n")
    if options.nginx is None:
        print("no nginx here: its rows are left out (Debian: apt-get install nginx-light)")
    report = Report()
    with scene(options.nginx) as made:
        latency(made, options.seconds, report)
        saturation(made, options.seconds, report)
        many(made, report)
        slow_ones(made, options.seconds, report)
        leaving(made, report)
    for fault in report.faults:
        print(fault)
    return max(support.report_targets(report.targets), bool(report.faults))


if __name__ == "__main__":
    sys.exit(main())
