"""Which of several cards a plan is for: the fewest that will do. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.planning.request import Offload, PlanRequest, Room
from lllm3090d.planning.split import on_one_card
from lllm3090d.planning.split_search import card_rooms

if TYPE_CHECKING:
    from lllm3090d.planning.planner import Plan


def on_fewest_cards(
    room: Room,
    request: PlanRequest,
    plan: Callable[[Room, PlanRequest], Plan],
    is_enough: Callable[[Plan], bool],
    *,
    skips_single: bool = False,
) -> Plan:
    """The plan for the first set of cards for which it is enough; else, of all sets, the one that serves most.

    What fits on one card is never shared out: every boundary between cards costs time, and every card the memory of a
    process. For the same reason nothing is left in host memory before all cards are used, and a tiered cache, which the
    engine has on one card only, is planned for the card with most room.

    Args:
        room: with several cards.
        request: what was asked for.
        plan: the plan for a room and a request; raises LlmError: INSUFFICIENT_MEMORY where nothing fits.
        is_enough: more cards would be of no use to a plan.
        skips_single: it is known that nothing fits on a single card.

    Raises:
        LlmError: that of the plan with all cards where no set will do, and at once whatever is not for want of memory.
    """
    rooms = card_rooms(room)[: 1 if request.tiered else None]
    rooms = rooms[1:] if skips_single and len(rooms) > 1 else rooms
    best: Plan | None = None
    for tried in rooms[:-1]:
        try:
            made = _named(tried, plan(tried, replace(request, offload=Offload.RESIDENT)))
        except LlmError as error:
            if error.code is not ErrorCode.INSUFFICIENT_MEMORY:
                raise
            continue
        if is_enough(made):
            return made
        best = made if best is None or _served(made) > _served(best) else best
    try:
        made = _named(rooms[-1], plan(rooms[-1], request))
    except LlmError as error:
        if best is None or error.code is not ErrorCode.INSUFFICIENT_MEMORY:
            raise
        return best
    return made if best is None or is_enough(made) or _served(made) > _served(best) else best


def _served(plan: Plan) -> int:
    """Tokens of all slots together."""
    return plan.window_tokens * plan.parallel


def _named(room: Room, plan: Plan) -> Plan:
    """With the name of its card, where the room has one."""
    if plan.split is not None:
        return plan
    return replace(plan, split=on_one_card(room.cards[0].name, plan.quote))
