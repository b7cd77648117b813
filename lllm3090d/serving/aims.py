"""What a load must get to be worth the room of others, and whether some room gives it. Pure."""

from __future__ import annotations

from collections.abc import Callable

from lllm3090d.planning.offload import USEFUL_DENSE_TOKENS
from lllm3090d.planning.planner import LEAST_DRAFTED_WINDOW_TOKENS
from lllm3090d.planning.units import PAGE_TOKENS
from lllm3090d.serving.fitting import Fitting, Made, is_satisfying
from lllm3090d.serving.reach import Reach
from lllm3090d.serving.room_table import Point

Gives = Callable[[Point], bool]


def content(fitting: Fitting, most: Point) -> Gives:
    """Whether a room gives a plan with which nothing better is worth another model.

    Args:
        fitting: the load.
        most: the most room that will be asked about.
    """
    request = fitting.event.request

    def is_planned(point: Point) -> bool:
        made = fitting.made(point)
        return isinstance(made, Made) and is_satisfying(made.plan, request)

    if fitting.has_size:
        return Reach(fitting, most) if fitting.is_whole else is_planned
    long = fitting.of_window(LEAST_DRAFTED_WINDOW_TOKENS)
    if long is None:
        return is_planned
    reach = Reach(long, most)
    useful = (
        None if len(fitting.usable) == 1 or fitting.is_mixture else fitting.of_window(USEFUL_DENSE_TOKENS)
    )
    if useful is None:
        return reach
    # What has a useful window on one card is not shared out, even where that is too short for an agent.
    alone = Reach(useful, most)
    return lambda point: (
        reach.fits_alone(point) or (not alone.fits_alone(point) and reach.fits_shared(point))
    )


def served(fitting: Fitting, most: Point) -> Gives:
    """Whether a room gives any plan at all; see :func:`content`."""

    def is_planned(point: Point) -> bool:
        return isinstance(fitting.made(point), Made)

    if fitting.has_size:
        # What is left in host memory is made in a way of its own for each room, so one says nothing of another.
        return Reach(fitting, most) if fitting.is_whole else is_planned
    least = fitting.of_window(PAGE_TOKENS)
    return is_planned if least is None else Reach(least, most)
