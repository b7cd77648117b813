"""The sleep set: which models are to be loaded again after a sleep, and how; kept beyond the daemon's life."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Iterable
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from lllm3090d.planning.request import PlanRequest
from lllm3090d.serving.instance import ON_THE_WAY_UP, SERVING
from lllm3090d.serving.observation import HOST
from lllm3090d.serving.plan_requests import LoadWish
from lllm3090d.serving.plausible import read_row
from lllm3090d.serving.running import Instance
from lllm3090d.serving.scheduler import Scheduler
from lllm3090d.serving.unit_spec import MOST_NAME_CHARACTERS
from lllm3090d.store import Store

log = logging.getLogger(__name__)

BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")


class Sleeper(BaseModel):
    """A model that was unloaded for a sleep, and what it takes to load it as it was.

    Attributes:
        name: of the model.
        run: the launch that ended.
        request: what its load asked for.
        arguments: further ones of a person.
        card: the only card that it was to be on; None left the choice.
        cards: the cards that it was on, by UUID.
        least_context_tokens: what it had, where that was less than it asked for.
        pinned: never to be evicted.
        idle_s: how long it had not been used.
    """

    model_config = ConfigDict(frozen=True)
    name: str = Field(min_length=1, max_length=MOST_NAME_CHARACTERS)
    run: str
    request: PlanRequest
    arguments: tuple[str, ...] = ()
    card: str | None = None
    cards: tuple[str, ...] = ()
    least_context_tokens: int | None = None
    pinned: bool = False
    idle_s: float = 0.0

    def wish(self) -> LoadWish:
        """How it is loaded again: like any other, but nothing is unloaded for it, and it holds up nobody who waits."""
        return LoadWish(
            request=self.request,
            arguments=self.arguments,
            card=self.card,
            least_context_tokens=self.least_context_tokens,
            pinned=self.pinned,
            may_evict=False,
            may_wait=False,
            idle_s=self.idle_s,
        )


def sleepers(scheduler: Scheduler) -> tuple[Sleeper, ...]:
    """What is loaded or on its way up now, that which was used last first; a load under way counts as in use."""
    now_s = scheduler.clock()
    found = [
        _sleeper(each, scheduler, now_s)
        for each in scheduler.instances
        if each.state in SERVING | ON_THE_WAY_UP
    ]
    return tuple(sorted(found, key=lambda one: one.idle_s))


def merged(present: Iterable[Sleeper], earlier: Iterable[Sleeper]) -> tuple[Sleeper, ...]:
    """What is there now, and behind it what was still to be loaded again after an earlier sleep."""
    now = tuple(present)
    names = {each.name for each in now}
    return now + tuple(each for each in earlier if each.name not in names)


def asked_for(instance: Instance) -> PlanRequest:
    """What its load asked for; of a release that did not write it down what it has."""
    plan, asked = instance.plan, instance.record.asked
    if asked is not None:
        return asked
    return PlanRequest(
        context_tokens=plan.context_tokens,
        parallel=plan.parallel,
        cache_type_k=plan.cache_type_k,
        cache_type_v=plan.cache_type_v,
    )


def _sleeper(instance: Instance, scheduler: Scheduler, now_s: float) -> Sleeper:
    plan, asked = instance.plan, asked_for(instance)
    is_smaller = asked.context_tokens is not None and plan.context_tokens < asked.context_tokens
    in_use = bool(instance.busy or instance.leases) or instance.state in ON_THE_WAY_UP
    idle_s = 0.0 if in_use or instance.last_used_s is None else max(0.0, now_s - instance.last_used_s)
    return Sleeper(
        name=instance.name,
        run=instance.run,
        request=asked,
        arguments=instance.words,
        card=instance.card,
        cards=tuple(each.where for each in scheduler.ledger.of(instance.run) if each.where != HOST),
        least_context_tokens=plan.context_tokens if is_smaller else None,
        pinned=instance.pinned,
        idle_s=idle_s,
    )


class SleepStore:
    """Keeps the set of a sleep for the next life of the daemon, within one boot. Blocking, for threads.

    Another boot has nothing to resume: what was loaded before a machine was switched off is not loaded by its next one.
    """

    def __init__(self, store: Callable[[], Store], boot_id: Callable[[], str] | None = None) -> None:
        """Nothing is read yet.

        Args:
            store: gives the place where it is kept.
            boot_id: tells one boot from another; None for the kernel's.
        """
        self._store = store
        self._boot_id = boot_id or kernel_boot_id

    def keep(self, members: Iterable[Sleeper]) -> bool:
        """Remember these, in this order, and no others; whether that outlives the daemon."""
        boot = self._boot_id()
        rows = [(number, boot, each.model_dump_json()) for number, each in enumerate(members)]

        def write(connection: sqlite3.Connection) -> None:
            connection.execute("DELETE FROM sleepers")
            connection.executemany("INSERT INTO sleepers VALUES (?, ?, ?)", rows)

        store = self._store()
        return store.change(write) and store.path is not None

    def kept(self) -> tuple[Sleeper, ...]:
        """What was remembered in this boot, in order; nothing where it cannot be read."""
        boot = self._boot_id()
        query = "SELECT body FROM sleepers WHERE boot = ? ORDER BY position"
        found = []
        for (body,) in self._store().rows(query, (boot,)):
            try:
                found.append(read_row(Sleeper, body))
            except ValueError as error:  # by another release, or by somebody else
                log.warning(
                    "a model that was unloaded for a sleep is not understood", extra={"why": str(error)}
                )
        return tuple(found)


def kernel_boot_id() -> str:
    """The same after a hibernation; empty where the kernel does not tell, so that every boot counts as this one."""
    try:
        return BOOT_ID_FILE.read_text(encoding="ascii").strip()
    except OSError as error:
        log.warning("the boot cannot be told from others", extra={"reason": str(error)})
        return ""
