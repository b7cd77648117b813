"""From what the scheduler knows at a moment to the refusal of a load for lack of memory. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from lllm3090d.errors import LlmError
from lllm3090d.planning.planner import Planner
from lllm3090d.serving.admission import Rooms, held_now
from lllm3090d.serving.commands import Wish
from lllm3090d.serving.events import LoadRequested
from lllm3090d.serving.extras import extra_of
from lllm3090d.serving.freeings import Holder
from lllm3090d.serving.instance import ENDED, ON_THE_WAY_DOWN, SERVING
from lllm3090d.serving.ledger import Ledger
from lllm3090d.serving.observation import CardState
from lllm3090d.serving.refusal_page import fits_with_more, in_more_room, refuse, serves_changed
from lllm3090d.serving.running import Instance
from lllm3090d.serving.unruled import OfferedPlan


def explained(
    error: LlmError,
    event: LoadRequested,
    state: CardState,
    given: Rooms,
    *,
    ledger: Ledger,
    instances: Iterable[Instance],
    now_s: float,
    planner: Planner | OfferedPlan,
) -> LlmError:
    """Why a load does not fit, and what would help.

    Args:
        error: the planner's refusal.
        event: the load.
        state: the card it would have been on, or the first of several.
        given: what each memory can give now.
        ledger: what is promised.
        instances: what runs.
        now_s: on the scheduler's clock.
        planner: the question that was refused.
    """
    return refuse(
        error,
        budget=given.cards[state.card.uuid],
        card=state,
        reservations=ledger.on(state.card.uuid),
        instances=holders(instances, now_s),
        fits=fits_with_more(planner),
        serves=serves_changed(planner),
        asked=wish_for(event),
        held=held_now(state, ledger),
        now_s=now_s,
        host=given.host,
        roomier=in_more_room(planner),
    )


def holders(instances: Iterable[Instance], now_s: float) -> tuple[Holder, ...]:
    """Our models that run, as a refusal tells of them."""
    return tuple(_holder(each, now_s) for each in instances if each.state not in ENDED)


def wish_for(event: LoadRequested) -> Wish:
    """What a load asks for, so that it can be asked again with a change."""
    more: list[str] = [] if event.card is None else ["--gpu", event.card]
    switches = (
        ("--pin", event.pinned),
        ("--no-evict", not event.may_evict),
        ("--no-wait", not event.may_wait),
    )
    return Wish(
        name=event.checkpoint.name,
        request=event.request,
        arguments=event.arguments,
        stated=extra_of(event, {}).stated,
        more=(*more, *(option for option, is_on in switches if is_on)),
    )


def _holder(instance: Instance, now_s: float) -> Holder:
    is_used = instance.state not in SERVING or bool(instance.busy) or bool(instance.leases)
    last = instance.last_used_s if instance.last_used_s is not None else instance.ready_since_s
    return Holder(
        name=instance.name,
        run=instance.run,
        idle_s=None if is_used else max(0.0, now_s - (last if last is not None else now_s)),
        pinned=instance.pinned,
        is_ending=instance.state in ON_THE_WAY_DOWN,
    )
