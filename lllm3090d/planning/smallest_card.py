"""The smallest card on which an agent can work with a model, by the quote. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.readings import CardKind
from lllm3090d.planning.planner import Planner
from lllm3090d.planning.quote import Place
from lllm3090d.planning.request import Drafting, Offload, Room
from lllm3090d.planning.units import PAGE_TOKENS, round_up
from lllm3090d.planning.verdict import AGENT_PROMPT_FLOOR_TOKENS

GIB = 1 << 30
ENOUGH_BYTES = 1 << 60  # of a card that can hold anything


@dataclass(frozen=True, slots=True)
class SmallestCard:
    """A card that just suffices.

    Attributes:
        window_tokens: that it holds, in one slot.
        launch_bytes: what the launch takes of it.
        reserve_bytes: what driver and desktop keep.
    """

    window_tokens: int
    launch_bytes: int
    reserve_bytes: int

    @property
    def total_bytes(self) -> int:
        """Its memory."""
        return self.launch_bytes + self.reserve_bytes

    @property
    def gib(self) -> int:
        """The same as advice, GiB rounded up: a card that is a little too small is no advice."""
        return -(-self.total_bytes // GIB)


def agent_window_tokens(trained_context_tokens: int) -> int | None:
    """The least page above an agent's prompt, or all the model can serve; None where that is not above it."""
    if trained_context_tokens <= AGENT_PROMPT_FLOOR_TOKENS:
        return None
    return min(trained_context_tokens, round_up(AGENT_PROMPT_FLOOR_TOKENS + 1, PAGE_TOKENS))


def smallest_card(planner: Planner, *, driver_bytes: int, desktop_bytes: int) -> SmallestCard | None:
    """The smallest card for an agent with everything on it, in one slot; None where no card helps.

    What was asked for beside size and placement holds for it too: type of the cache, drafting, projector. Drafting
    that nobody insists on is no reason for a larger card: the planner gives it up where the window would not fit.

    Args:
        planner: the question, for a card of any size.
        driver_bytes: what the driver keeps.
        desktop_bytes: what is kept for a desktop; 0 without.
    """
    window = agent_window_tokens(planner.facts.trained_context_tokens)
    if window is None or planner.card_kind is CardKind.CPU:
        return None
    request = replace(
        planner.request,
        context_tokens=window,
        parallel=1,
        offload=Offload.RESIDENT,
        gpu_layers=None,
        cpu_experts=None,
        cache_on_host=False,
        rope_scaling=None,
        tiered=False,
    )
    drafting = request.drafting or planner.policy.drafting
    choices = (Drafting.AUTO, Drafting.OFF) if drafting is Drafting.AUTO else (drafting,)
    try:
        needs = [_need_bytes(replace(planner, request=replace(request, drafting=each))) for each in choices]
    except LlmError as error:
        if error.code is ErrorCode.UNSUPPORTED_COMBINATION:
            return None  # asked for like this, no card has such a window
        raise
    return SmallestCard(window, min(needs), driver_bytes + desktop_bytes)


def _need_bytes(planner: Planner) -> int:
    """What the launch takes of a card that can hold anything."""
    return replace(planner, room=Room(ENOUGH_BYTES)).plan().quote.total_bytes(Place.CARD)
