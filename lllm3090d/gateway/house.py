"""What the gateway needs of the daemon."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from lllm3090d.checkpoints.purpose import Purpose
from lllm3090d.errors import LlmError
from lllm3090d.gateway.filters import ReasoningFilter
from lllm3090d.gateway.upstream import Engine
from lllm3090d.serving.answers import Answer
from lllm3090d.serving.events import CancelDone
from lllm3090d.serving.plan_requests import LoadWish
from lllm3090d.settings import Settings


@dataclass(frozen=True, slots=True)
class Served:
    """A model that serves, kept from being evicted for one request.

    Attributes:
        name: of the model.
        run: identity of the launch.
        engine: where it listens.
        slots: requests that it works on at a time.
        window_tokens: that one of them holds.
        lease: what keeps it.
        purpose: what it serves.
        reasoning: what is to be changed of requests; None for nothing.
    """

    name: str
    run: str
    engine: Engine
    slots: int
    window_tokens: int
    lease: str
    purpose: Purpose
    reasoning: ReasoningFilter | None = None


class House(Protocol):
    """The daemon, as the gateway sees it."""

    @property
    def settings(self) -> Settings:
        """The present ones."""
        ...

    def serving_names(self) -> tuple[str, ...]:
        """Names of the models that serve."""
        ...

    async def canonical(self, name: str) -> str:
        """The name of a model on disk, or of one that is loaded. Raises LlmError UNKNOWN_MODEL, AMBIGUOUS_MODEL."""
        ...

    def promised(self, name: str) -> Purpose | None:
        """What a model serves, or will by what is asked of it; None where only its file tells."""
        ...

    async def purpose(self, name: str) -> Purpose:
        """What a model serves; of one that is not loaded, what it would."""
        ...

    async def lease(self, name: str, lease: str) -> Served:
        """Keep a model that serves. Raises LlmError NOT_LOADED."""
        ...

    def give_back(self, lease: str, keep_alive_s: float | None = None) -> None:
        """The request has ended; for how long its model may stay without use, where it said so."""
        ...

    async def load(
        self, name: str, wish: LoadWish, token: str | None = None
    ) -> tuple[str, AsyncGenerator[Answer, None]]:
        """Have a model loaded; see :meth:`lllm3090d.serving.daemon.Daemon.load`."""
        ...

    async def comes_back(self, name: str, run: str) -> bool:
        """Of a launch whose engine cannot be reached: it has ended, and the model is started again."""
        ...

    def held_back(self, name: str, within_s: float) -> LlmError | None:
        """Why a load of a model is refused because it has ended by itself; None where it is not.

        Args:
            name: of the model.
            within_s: a start that is due so soon is waited for.
        """
        ...

    def has_ended(self, name: str) -> bool:
        """It has ended by itself, and is started again or stays down: a load waits for that, or is told why not."""
        ...

    async def cancel(self, load_token: str) -> CancelDone:
        """Withdraw a load. Raises LlmError NO_SUCH_LOAD."""
        ...
