"""What a load needs before the writer decides on it: found beside the writer, and given up where its client leaves."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.readings import Card, normal_pci_address
from lllm3090d.model_settings import is_pinned
from lllm3090d.serving.events import LoadRequested
from lllm3090d.serving.learning import learnt
from lllm3090d.serving.log_keeper import LogKeeper
from lllm3090d.serving.lookup import Lookup
from lllm3090d.serving.observer import Observer
from lllm3090d.serving.offering import Offers
from lllm3090d.serving.plan_requests import LoadWish
from lllm3090d.serving.policy import environment_of
from lllm3090d.serving.refusals import no_such_card
from lllm3090d.serving.scheduler import Scheduler
from lllm3090d.settings import Settings

log = logging.getLogger(__name__)

ENVIRONMENT_LIMIT_S = 0.5


class LoadLookup:
    """Loads that are not with the writer yet.

    Args:
        lookup: of models and engines.
        offers: plans of models without a rule.
        scheduler: its policy learns what units inherit.
        observer: reads the cards.
        log_keeper: knows where engines log, after a moment.
        environment: what units of the user inherit. May raise LlmError.
        settings: the present settings.
    """

    def __init__(
        self,
        *,
        lookup: Lookup,
        offers: Offers,
        scheduler: Scheduler,
        observer: Observer,
        log_keeper: LogKeeper,
        environment: Callable[[], Awaitable[Sequence[str]]],
        settings: Callable[[], Settings],
    ) -> None:
        self._lookup = lookup
        self._offers = offers
        self._scheduler = scheduler
        self._observer = observer
        self._log_keeper = log_keeper
        self._environment = environment
        self._settings = settings
        self._cancelled: dict[str, bool] = {}  # by token of each load that is looked up

    def __contains__(self, token: str) -> bool:
        return token in self._cancelled

    def withdraw(self, token: str) -> None:
        """Give up a load; nothing where it is not looked up."""
        if token in self._cancelled:
            self._cancelled[token] = True
            self._offers.withdraw(token)

    def refuse_all(self) -> None:
        """None of those that are looked up now is to be loaded."""
        for token in self._cancelled:
            self._cancelled[token] = True

    async def event(self, token: str, name: str, wish: LoadWish) -> LoadRequested:
        """A load as the scheduler must know it.

        Raises:
            LlmError: unknown, damaged, no engine, no such card, LOAD_CANCELLED, ...
        """
        self._cancelled[token] = False
        within_s = wish.restart_within_s
        restart_until_s = None if within_s is None else self._scheduler.clock() + within_s
        try:
            found = await self._lookup.find(name)
            await self._observer.look_for_desktop()
            await self._look_at_environment()
            await self._log_keeper.probed()
            event = LoadRequested(
                token=token,
                run=secrets.token_hex(4),
                checkpoint=found.checkpoint,
                facts=found.facts,
                request=wish.request,
                build=found.build,
                capabilities=found.capabilities,
                projector=found.projector,
                drafter=found.drafter,
                speeds=found.speeds,
                arguments=wish.arguments,
                card=card_named(wish.card, self._observer.cards),
                least_context_tokens=wish.least_context_tokens,
                lease=wish.lease,
                pinned=wish.pinned or is_pinned(self._settings().models, found.checkpoint.name),
                may_evict=wish.may_evict,
                may_wait=wish.may_wait,
                attempt=wish.attempt,
                idle_s=wish.idle_s,
                restart_until_s=restart_until_s,
            )
            observation = self._observer.observe()
            event = await learnt(event, self._lookup.learning, self._scheduler.policy, observation)
            event = await self._offers.offered(event, self._scheduler, self._observer.observe)
        finally:
            cancelled = self._cancelled.pop(token)
        if cancelled:
            raise LlmError(ErrorCode.LOAD_CANCELLED, f"the load of {name} was cancelled by its client")
        return event

    async def _look_at_environment(self) -> None:
        """A session that has begun since may have exported more for all units; what is not answered soon stays."""
        try:
            async with asyncio.timeout(ENVIRONMENT_LIMIT_S):
                assignments = await self._environment()
        except (LlmError, TimeoutError) as error:
            log.info("the environment of units is taken as it was", extra={"reason": str(error)})
            return
        inherited, policy = environment_of(assignments), self._scheduler.policy
        if inherited != policy.inherited_environment:
            self._scheduler.policy = replace(policy, inherited_environment=inherited)


def card_named(wanted: str | None, cards: tuple[Card, ...]) -> str | None:
    """The UUID of a card by its UUID, its PCI address or its number; None for none in particular.

    Raises:
        LlmError: INVALID_REQUEST.
    """
    if wanted is None:
        return None
    for number, card in enumerate(cards):
        if wanted.lower() in {str(number), card.uuid.lower()} or (
            card.pci_address and normal_pci_address(wanted) == card.pci_address
        ):
            return card.uuid
    raise no_such_card(wanted, cards)
