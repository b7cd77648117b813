"""The gateway in a process of its own, in front of one engine that is loaded: what the measurements ask.

    python -m bench.gateway_process SOCKET SLOTS

Prints its port. Each line that it reads is answered with one line of JSON: what is in work, waits, is held, how the
requests so far ended, resident memory. It ends with its standard input. The code is the shipped one; of the daemon
there is only the lease.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import resource
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator
from pathlib import Path

from aiohttp import web

from lllm3090d.checkpoints.purpose import Purpose
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gateway.gateway import Gateway
from lllm3090d.gateway.guard import Rules
from lllm3090d.gateway.house import Served
from lllm3090d.gateway.port import Address, Port, bind
from lllm3090d.gateway.record import Record
from lllm3090d.gateway.upstream import Engine
from lllm3090d.serving.answers import Answer
from lllm3090d.serving.events import CancelDone
from lllm3090d.serving.plan_requests import LoadWish
from lllm3090d.serving.readiness import cgroups_of
from lllm3090d.settings import Settings

MODEL = "small"
RULES = Rules()


class OneModel:
    """A daemon with one model, which serves.

    Args:
        socket: where its engine listens.
        slots: requests that it works on at a time.
    """

    def __init__(self, socket: Path, slots: int) -> None:
        self.settings = Settings.model_validate({"gateway_queue": 1000})
        self.leases: set[str] = set()
        self._engine = Engine(MODEL, socket, min(cgroups_of(os.getpid())))
        self._slots = slots

    def serving_names(self) -> tuple[str, ...]:
        """The one."""
        return (MODEL,)

    async def canonical(self, name: str) -> str:
        """There is no other."""
        raise LlmError(ErrorCode.UNKNOWN_MODEL, f"There is no model {name}.", hint=f"Ask for {MODEL}.")

    def promised(self, name: str) -> Purpose:
        """It generates text."""
        return Purpose.CHAT

    async def comes_back(self, name: str, run: str) -> bool:
        """It never ends."""
        return False

    def held_back(self, name: str, within_s: float) -> LlmError | None:
        """Nothing is."""
        return None

    def has_ended(self, name: str) -> bool:
        """Nothing is started again here."""
        return False

    async def purpose(self, name: str) -> Purpose:
        """It generates text."""
        return Purpose.CHAT

    async def lease(self, name: str, lease: str) -> Served:
        """Keep it."""
        self.leases.add(lease)
        return Served(name, "run", self._engine, self._slots, 4096, lease, Purpose.CHAT)

    def give_back(self, lease: str, keep_alive_s: float | None = None) -> None:
        """A request has ended."""
        self.leases.discard(lease)

    async def load(
        self, name: str, wish: LoadWish, token: str | None = None
    ) -> tuple[str, AsyncGenerator[Answer, None]]:
        """It is loaded."""
        raise LlmError(ErrorCode.INTERNAL, f"{name} is loaded.", hint="")

    async def cancel(self, load_token: str) -> CancelDone:
        """There is none."""
        raise LlmError(ErrorCode.NO_SUCH_LOAD, f"There is no load {load_token}.", hint="")


async def _models(_: web.BaseRequest) -> web.StreamResponse:
    return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})


def _resident_kib() -> int:
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("VmRSS:"))


async def main() -> None:
    """Serve until the standard input ends."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    house = OneModel(Path(sys.argv[1]), int(sys.argv[2]))
    outcomes: Counter[str] = Counter()

    def ended(record: Record) -> None:
        outcomes[str(record.outcome)] += 1

    gateway = Gateway(house, lambda: RULES, _models, ended)
    port = Port(gateway, bind(Address("127.0.0.1", 0), has_keys=False))
    await port.start()
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    gc.freeze()
    print(port.address.port, flush=True)
    while await lines.readline():
        turns = gateway.seating.lines().get(MODEL)
        state = {
            "in_flight": len(gateway.in_flight),
            "in_work": turns.in_work if turns else 0,
            "waiting": turns.waiting if turns else 0,
            "leases": len(house.leases),
            "tasks": len(asyncio.all_tasks()) - 1,
            "outcomes": outcomes,
            "resident_kib": _resident_kib(),
            "processor_s": time.process_time(),
        }
        print(json.dumps(state), flush=True)
    await port.close()


if __name__ == "__main__":
    asyncio.run(main())
