"""A daemon on a stand-in card, with models that a stand-in engine fills it with: what the tests of admission share."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lllm3090d.surfaces.notices import Notice, Notices
from lllm3090d.wire import Event
from lllm3090d.wire_cards import Gpus, GpuView
from tests.fakes.engine import edited_state, install_fake_engine, set_behaviour
from tests.fakes.gguf_files import write_llama
from tests.fakes.nvml import FakeNvml
from tests.system.harness import (
    DAEMON_UNIT,
    Service,
    UnixConnection,
    eventually,
    http_request,
    model_units,
    running,
    systemctl,
)

MIB, GIB = 1 << 20, 1 << 30
DEVICE = "Vulkan0: NVIDIA GeForce RTX 3090 (24576 MiB, 24125 MiB free)"
TOTAL_MIB, DRIVER_MIB = 24_576, 451
ROOM_MIB = TOTAL_MIB - DRIVER_MIB
# What an engine takes of its price: the rest is slack and what comes with prompts.
TAKEN = 0.95
# Nothing is kept from being evicted by its age, so that no test waits for that; one that is about it says otherwise.
SETTINGS: Mapping[str, str] = {
    "desktop": "inactive",
    "least_residency_s": "0",
    "least_idle_s": "0",
    "verify_after_load": "off",
}

Lines = list[dict[str, Any]]


@dataclass
class Rig:
    """The daemon, its card, its engine, and clients."""

    service: Service
    nvml: FakeNvml
    clients: ThreadPoolExecutor
    engine: dict[str, Any] = field(default_factory=dict)

    # --- what there is ------------------------------------------------------------------------------------------------

    def add_model(self, name: str, gib: float) -> None:
        """A checkpoint of about so many GiB of weights, in a file that is a hole."""
        write_llama(
            self.service.models_dir / name / "model.gguf",
            blocks=max(1, round(gib * 1024 / 271)),  # MiB of a block of this width at Q8_0
            embedding_length=4096,
            head_count=32,
            kv_head_count=8,
            feed_forward_length=16384,
        )

    def behave(self, **behaviour: Any) -> None:
        """Change what engines do, from now on; those that run take over what concerns requests."""
        self.engine |= behaviour
        set_behaviour(self.service.directory / "engine", **self.engine)

    def price(self, *names: str) -> dict[str, int]:
        """What each model would cost on an empty card, MiB; its engine takes a little less from now on."""
        prices = {}
        for name in names:
            plan = self.service.request("POST", "/v1/plan", {"model": name}).json()
            assert plan["fits"], plan
            prices[name] = plan["card_bytes"] // MIB
        taken = {name: int(price * TAKEN) for name, price in prices.items()}
        self.behave(vram_mib_of=self.engine.get("vram_mib_of", {}) | taken)
        return prices

    def restart(self, **settings: str) -> None:
        """The daemon anew, with other settings."""
        self.service.configure(**settings)
        systemctl("restart", DAEMON_UNIT)

    def kill_daemon(self) -> None:
        """As a crash; systemd starts it again, and it has adopted what runs when this returns."""
        old = self.service.main_pid()
        os.kill(old, 9)
        eventually(lambda: self.service.main_pid() not in {0, old}, what="the daemon is back")
        eventually(lambda: systemctl("is-active", DAEMON_UNIT, check=False).strip() == "active")

    def kill_engine(self, instance: Mapping[str, Any]) -> None:
        """End one that would not end by itself."""
        os.kill(instance["main_pid"], signal.SIGKILL)

    def give_back(self, instance: Mapping[str, Any]) -> None:
        """The driver has all that an engine left on the card."""
        self.nvml.remove_process(instance["main_pid"])

    # --- clients ------------------------------------------------------------------------------------------------------

    def load(self, model: str, **options: Any) -> dict[str, Any]:
        """The last line of a load."""
        return self.service.load(model, **options)[-1]

    def load_later(self, model: str, **options: Any) -> Future[Lines]:
        """A load by a client of its own."""
        return self.clients.submit(self.service.load, model, **options)

    def load_ready(self, model: str, **options: Any) -> dict[str, Any]:
        """Load it; the instance."""
        last = self.load(model, **options)
        assert last.get("kind") == "ready", last
        instance: dict[str, Any] = last["instance"]
        return instance

    def unload(self, model: str) -> dict[str, Any]:
        """Unload it; the answer."""
        answer = self.service.request("POST", "/v1/unload", {"model": model})
        document: dict[str, Any] = answer.json()
        return document

    def ask_later(self, instance: Mapping[str, Any]) -> Future[Any]:
        """A question to an engine, which counts as busy until it is answered."""
        body = json.dumps({"messages": [], "max_tokens": 4}).encode()
        asked = self.clients.submit(
            http_request, instance["endpoint"], "POST", "/v1/chat/completions", body, 120
        )
        eventually(lambda: self.processing(instance) > 0, what="the engine is at work")
        return asked

    @staticmethod
    def processing(instance: Mapping[str, Any]) -> int:
        """How many requests an engine is at work on."""
        slots = http_request(instance["endpoint"], "GET", "/slots").json()
        return sum(slot["is_processing"] for slot in slots)

    # --- what is seen -------------------------------------------------------------------------------------------------

    def gpu(self) -> GpuView:
        """The card."""
        return Gpus.model_validate_json(self.service.request("GET", "/v1/gpus").body).gpus[0]

    def states(self) -> dict[str, str]:
        """State of each instance."""
        return {name: each["state"] for name, each in self.service.instances().items()}

    def pending(self) -> Lines:
        """Loads that wait for room."""
        found: Lines = self.service.request("GET", "/v1/instances").json()["pending"]
        return found

    def events(self, kind: str) -> Lines:
        """What happened of that kind since the daemon's start."""
        lines = self.service.request("GET", "/v1/events").body.splitlines()
        return [event for event in map(json.loads, lines) if event["kind"] == kind]

    def notices(self) -> list[Notice]:
        """What the desktop would be told of all that has happened."""
        told, lines = Notices(), self.service.request("GET", "/v1/events").body.splitlines()
        made = [told.of(Event.model_validate_json(line), 0.0) for line in lines]
        return [each for each in made if isinstance(each, Notice)]

    def until(self, model: str, *states: str) -> None:
        """Wait until a model is in one of these states."""
        eventually(lambda: self.states().get(model) in states, what=f"{model} is {' or '.join(states)}")

    def until_waits(self, model: str) -> dict[str, Any]:
        """Wait until a load of a model waits for room; how it is listed."""

        def waiting() -> dict[str, Any] | None:
            return next((each for each in self.pending() if each["name"] == model), None)

        return eventually(waiting, what=f"a load of {model} waits")

    def until_gone(self, *models: str) -> None:
        """Wait until nothing of these is left."""
        eventually(lambda: not set(models) & set(self.states()), what=f"{models} are gone")

    # --- the books ----------------------------------------------------------------------------------------------------

    def on_card(self) -> dict[int, int]:
        """Bytes of the card by process, of engines that live."""
        with edited_state(self.nvml.state) as lines:
            rows = [line.split() for line in lines if line.split()[:1] == ["process"]]
        return {int(row[2]): int(row[3]) for row in rows if row[3] != "na" and _runs(int(row[2]))}

    def check_books(self) -> GpuView:
        """Ledger, units and card tell the same story; the card as it is seen.

        For a moment at which nothing is on its way up or down.
        """
        instances = {each["name"]: each for each in self.service.instances().values()}
        serving = [each for each in instances.values() if each["state"] in {"ready", "busy"}]
        # A unit that has failed is reset beside everything else.
        units = {each["unit"] for each in serving}
        eventually(lambda: set(model_units()) == units, what=f"{units} are all units: {model_units()}")
        gpu = self.gpu()
        held = self.on_card()
        assert {each["main_pid"] for each in serving} <= set(held)
        by_run = {each["run"]: held[each["main_pid"]] for each in serving}
        assert {each.run: each.held_bytes for each in gpu.reservations} == by_run
        assert gpu.charged_bytes == sum(each.charged_bytes for each in gpu.reservations)
        assert gpu.still_to_come_bytes == gpu.quarantined_bytes == 0
        assert gpu.reading is not None
        assert gpu.foreign_bytes == gpu.reading.used_bytes - sum(by_run.values())
        driver = gpu.reading.reserved_by_driver_bytes or 0
        assert driver + gpu.charged_bytes + gpu.foreign_bytes <= gpu.reading.total_bytes
        assert sum(part.bytes for part in gpu.parts) == gpu.reading.total_bytes
        return gpu


def _runs(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@contextlib.contextmanager
def rigged(
    directory: Path,
    models: Mapping[str, float],
    settings: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Rig]:
    """A daemon on a stand-in RTX 3090 without a desktop.

    Args:
        directory: of everything.
        models: GiB of weights, by name.
        settings: beside or instead of those of every rig.
        environment: of the daemon, beside its settings.
    """
    nvml = FakeNvml(directory / "card")
    install_fake_engine(directory / "engine")
    service = Service(
        directory,
        {"llama_dir": str(directory / "engine"), **SETTINGS, **(settings or {})},
        {**nvml.environment, **(environment or {})},
    )
    # Threads are left behind rather than waited for where a test fails while one waits for an answer.
    clients = ThreadPoolExecutor(16)
    rig = Rig(service, nvml, clients)
    for name, gib in models.items():
        rig.add_model(name, gib)
    rig.behave(devices=(DEVICE,), nvml_state=str(nvml.state))
    try:
        with running(service):
            rig.price(*models)
            yield rig
    finally:
        clients.shutdown(wait=False, cancel_futures=True)


class Follower:
    """Reads the events of a daemon as they come, in a thread of its own.

    Args:
        service: the daemon.
    """

    def __init__(self, service: Service) -> None:
        self.events: Lines = []
        self._connection = UnixConnection(service.control_socket, timeout=300)
        self._connection.request("GET", "/v1/events?follow=1")
        self._response = self._connection.getresponse()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # closed under its feet
            for line in self._response:
                self.events.append(json.loads(line))

    def close(self) -> None:
        """No more events."""
        if self._connection.sock is not None:
            with contextlib.suppress(OSError):
                self._connection.sock.shutdown(2)
        self._thread.join(60)
        self._connection.close()

    def until(self, state: str, models: Sequence[str]) -> None:
        """Wait until each of these was in a state."""
        wanted = set(models)
        eventually(lambda: wanted <= {each["model"] for each in self.events if each.get("state") == state})


def now_s() -> float:
    """A clock for bounds on what took how long."""
    return time.monotonic()
