"""Requests at the moment in which their model goes because nobody has used it: is every one answered?

    packaging/dev/user-manager --private -- .venv/bin/python -m bench.idle_races [--rounds N]

Through the gateway of a real daemon, a real systemd, a stand-in card and a stand-in engine that loads at once. In each
round one client asks one model at a moment around the look that finds its time over: before it, or within the unload
that follows. Ten models are unloaded by the same look, so each look gives ten rounds. The first request that is not
answered ends it with an AssertionError. (With a clock of its own: ``tests/unit/test_idle_races.py``.)
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import math
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from bench import _support as support
from lllm3090d.serving.watching import LOOK_EVERY_S
from tests.system.harness import eventually, model_units
from tests.system.rig import Follower, Rig, rigged

TTL_S = 1.0
MODELS = {f"model-{number}": 1.0 for number in range(10)}
# Around the look that is expected next, and after the first unload that was seen.
BEFORE_S, AFTER_S = 0.3, 0.5


@dataclass(frozen=True, slots=True)
class Round:
    """What became of one request.

    Attributes:
        met: the state of its model when it was sent, as far as that can be told from outside.
        seconds: until the whole answer.
    """

    met: str
    seconds: float


def ask(port: int, model: str) -> float:
    """One request; the seconds until its answer was complete. Raises AssertionError where there was none."""
    began_s = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        body = json.dumps({"model": model, "messages": [], "max_tokens": 2})
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read()
    finally:
        connection.close()
    assert response.status == 200 and json.loads(text)["choices"], (model, response.status, text)
    return time.monotonic() - began_s


class Races:
    """Rounds on one daemon.

    Args:
        rig: the daemon, with the models of this module.
        seed: of all moments.
    """

    def __init__(self, rig: Rig, seed: int) -> None:
        self._rig = rig
        self._random = random.Random(seed)  # noqa: S311  # moments
        address = rig.service.request("GET", "/v1/status").json()["gateway"]["address"]
        self._port = int(address.rpartition(":")[2])
        self._follower = Follower(rig.service)

    def close(self) -> None:
        """No more of them."""
        self._follower.close()

    @property
    def unloads(self) -> int:
        """How many idle models were seen to be unloaded."""
        details = [each["details"] for each in list(self._follower.events) if each["kind"] == "eviction"]
        return sum(each.get("cause") == "idle" for each in details)

    def look_after(self, unloads: int) -> float:
        """When the look was that has unloaded more than so many; waited for."""
        eventually(lambda: self.unloads > unloads, within_s=30, what="idle models are unloaded")
        return time.monotonic()

    def load_all(self) -> None:
        """Every model is asked something."""
        for each in [self._rig.clients.submit(ask, self._port, name) for name in MODELS]:
            each.result(120)

    def run(self, count: int) -> list[Round]:
        """So many, one of each model at a time."""
        done: list[Round] = []
        self.load_all()
        look_s = self.look_after(0)
        while len(done) < count:
            self.load_all()
            look_s += LOOK_EVERY_S * max(
                1, math.ceil((time.monotonic() + 2 * TTL_S - look_s) / LOOK_EVERY_S)
            )
            unloads, names = self.unloads, list(MODELS)[: count - len(done)]
            asks = [
                self._rig.clients.submit(self._after, unloads, name, self._random.uniform(0.0, AFTER_S))
                if self._random.random() < 0.6
                else self._rig.clients.submit(
                    self._at, name, look_s + self._random.uniform(-BEFORE_S, BEFORE_S)
                )
                for name in names
            ]
            look_s = self.look_after(unloads)
            done += [each.result(150) for each in asks]
        return done

    def _after(self, unloads: int, name: str, after_s: float) -> Round:
        return self._at(name, self.look_after(unloads) + after_s)

    def _at(self, name: str, at_s: float) -> Round:
        time.sleep(max(0.0, at_s - time.monotonic()))  # not to wait for anything: to hit a moment
        state = self._rig.service.state(name)
        return Round(state or "not there", ask(self._port, name))


def main() -> int:
    """Race and print."""
    parser = argparse.ArgumentParser(description="requests around the unload of idle models")
    parser.add_argument("--rounds", type=int, default=50, help="requests (default: 50)")
    parser.add_argument("--seed", type=int, default=1, help="of their moments (default: 1)")
    options = parser.parse_args()
    print(support.machine_line() + "\n")
    with (
        tempfile.TemporaryDirectory(prefix="idle-") as directory,
        rigged(Path(directory), MODELS, {"idle_ttl_s": str(TTL_S)}) as rig,
        contextlib.closing(Races(rig, options.seed)) as races,
    ):
        done = races.run(options.rounds)
        unloads = races.unloads
        rig.until_gone(*MODELS)  # nobody asks any more
        eventually(lambda: not model_units(), what="no unit is left")
        assert rig.gpu().reservations == ()
    print(f"{len(done)} requests, all answered; {unloads} unloads of idle models\n")
    samples = {
        f"{met}, {sum(each.met == met for each in done)} times": [
            each.seconds for each in done if each.met == met
        ]
        for met in sorted({each.met for each in done})
    }
    print(support.table(support.SPREAD_HEADS, support.spread_rows("s", samples, 2)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
