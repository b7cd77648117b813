"""The admission of models without a rule: their plan was made before, with the engine's dry runs. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from lllm3090d.checkpoints.unruled import UnruledModel
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.readings import CardKind
from lllm3090d.planning.planner import Plan
from lllm3090d.planning.request import Room
from lllm3090d.planning.unruled import fitted


@dataclass(frozen=True, slots=True)
class OfferedPlan:
    """What stands in the place of a planner: the plan is there, and only has to fit.

    Attributes:
        offer: what :func:`lllm3090d.serving.offering.offer` has made; None where the model ran when it was asked for,
            and needed no plan.
        model: what is loaded.
        card_kind: whose memory is managed.
        room: what can be given now.
        explains: without effect, for the arithmetic of a refusal takes nothing here.
    """

    offer: Plan | None
    model: UnruledModel
    card_kind: CardKind
    room: Room
    explains: bool = True

    def plan(self) -> Plan:
        """The plan that was offered, where it fits still; on the card with the most room where there are several.

        Raises:
            LlmError: INSUFFICIENT_MEMORY with the ledger, where it does not fit; LOAD_CANCELLED where there is none.
        """
        if self.offer is None:
            raise LlmError(
                ErrorCode.LOAD_CANCELLED,
                f"{self.model.title} ran when it was asked for, and was gone before that could be answered.",
                hint="Load it again.",
            )
        return fitted(self.offer, self.model, self.room, self.card_kind)
