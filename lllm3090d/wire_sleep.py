"""The wire model of sleep: what becomes of models when the machine is suspended.

The rules of :mod:`lllm3090d.wire` hold.
"""

from __future__ import annotations

import enum
from typing import Any

from pydantic import Field

from lllm3090d.settings import SuspendPolicy
from lllm3090d.wire_types import Response


class SuspendPhase(enum.StrEnum):
    """Where the machine and its models are between waking and sleeping; clients must show unknown ones by name."""

    AWAKE = "awake"
    GOING = "going"  # about to sleep: models are being unloaded, loads wait
    ASLEEP = "asleep"  # all that is to be done before is done; loads wait
    RESTORING = "restoring"  # awake again: what was unloaded is loaded one after the other
    BLOCKED = "blocked"  # awake again, and nothing is loaded: the card is in error, see `problem`


class SuspendView(Response):
    """What becomes of models when the machine is suspended, and what is under way of it."""

    policy: SuspendPolicy = Field(description="in force; never auto")
    phase: SuspendPhase
    delays: bool = Field(
        description="logind waits for models to be unloaded before it sleeps; false with the policy keep too"
    )
    delay_s: float = Field(description="how long at most (InhibitDelayMaxSec= of logind)")
    restoring: tuple[str, ...] = Field(default=(), description="models that are still to be loaded again")
    problem: dict[str, Any] | None = Field(
        default=None, description="why none of them is loaded: a card in error; it is read again meanwhile"
    )
    logind_problem: dict[str, Any] | None = Field(
        default=None, description="why sleep is not noticed, or not delayed"
    )
