"""What is remembered of a request: never a word of it."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from http import HTTPStatus

from lllm3090d.gateway.turns import Priority


class Outcome(enum.StrEnum):
    """How a request ended."""

    SERVED = "served"
    REFUSED = "refused"  # by us, before the engine was asked
    ENGINE_ERROR = "engine-error"  # the engine answered with a failure, or not to the end
    CLIENT_CLOSED = "client-closed"  # the client left


@dataclass(slots=True)
class Record:
    """One request, from its head to its end.

    Attributes:
        request_id: ours, sent back as ``x-request-id``.
        path: of the route, without query.
        began_s: on the event loop's clock; times below are seconds.
        model: its name, as far as it was found.
        status: of the answer; 0 while there is none.
        load_s: waited for the model to be loaded.
        line_s: waited for its turn.
        first_byte_s: from the beginning to the first byte of the engine's body.
        total_s: to the end.
        sent_bytes: of the answer's body.
        streamed: it is a stream of events.
        begun: the head of the answer has been sent.
        keep_alive_s: for how long the model may stay without use from then on; None where the client did not say.
    """

    request_id: str
    path: str
    began_s: float
    model: str = ""
    run: str = ""
    priority: Priority = Priority.NORMAL
    status: int = 0
    code: str = ""
    outcome: Outcome = Outcome.SERVED
    load_s: float = 0.0
    line_s: float = 0.0
    first_byte_s: float | None = None
    total_s: float = 0.0
    sent_bytes: int = 0
    streamed: bool = False
    begun: bool = False
    keep_alive_s: float | None = None
    prompt_tokens: int | None = None
    generated_tokens: int | None = None
    # Seconds that the engine generated for, where its answer tells.
    generation_s: float | None = None

    def settle(self) -> None:
        """What an engine answered with a failure was not served."""
        if self.outcome is Outcome.SERVED and self.status >= HTTPStatus.BAD_REQUEST:
            self.outcome = Outcome.ENGINE_ERROR

    def tokens_per_s(self) -> float | None:
        """Tokens generated each second; None where the answer does not tell how many, or nothing how long.

        Of a single one there is no speed: engines count from the first on.
        """
        taken_s = self.generation_s
        if taken_s is None and self.streamed and self.first_byte_s is not None:
            taken_s = self.total_s - self.first_byte_s
        generated = self.generated_tokens or 0
        return generated / taken_s if generated > 1 and taken_s else None
