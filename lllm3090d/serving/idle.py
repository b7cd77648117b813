"""Models that nobody has used for as long as they may stay without use. Pure.

Measured from the end of the last request: from the gateway's last byte, or from the last look that found the engine at
work for somebody who asks it directly. A pinned model stays, and so does one that somebody uses or is about to.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

from lllm3090d.serving.events import YieldWanted
from lllm3090d.serving.instance import SERVING, InstanceState
from lllm3090d.serving.running import Instance

CAUSE = "idle"
FOR_EVER_S = math.inf
LONGEST_S = 366 * 86400.0
_UNITS_S: Mapping[str, float] = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
# Without a way back, and as a whole first: a client's text may be a header of 32 KiB.
_PART = re.compile(r"(\d++(?:\.\d++)?)(ms|s|m|h)")
_PARTS = re.compile(rf"(?:{_PART.pattern})++")


def idle_since_s(instance: Instance) -> float | None:
    """When its last use ended, on the scheduler's clock; None while it is used, or where nobody can tell."""
    may_go = instance.state in SERVING and instance.state is not InstanceState.STALLED
    if not may_go or instance.busy is not False or instance.leases:
        return None
    return instance.last_used_s if instance.last_used_s is not None else instance.ready_since_s


def ttl_s(instance: Instance, usual_s: float, named: Mapping[str, float]) -> float:
    """For how long a model may stay without use: by its last request, by its name, by what is usual; 0 is for ever."""
    if instance.keep_alive_s is not None:
        return instance.keep_alive_s
    found = named.get(instance.name, usual_s)
    return found if found > 0 else FOR_EVER_S


def expired(
    instances: Iterable[Instance], now_s: float, usual_s: float, named: Mapping[str, float]
) -> tuple[YieldWanted, ...]:
    """Those whose time is over, each with why."""
    found = []
    for each in instances:
        since_s, limit_s = idle_since_s(each), ttl_s(each, usual_s, named)
        if since_s is not None and not each.pinned and now_s - since_s >= limit_s:
            found.append(YieldWanted((each.run,), f"not used for {_shown(now_s - since_s)}", CAUSE, since_s))
    return tuple(found)


def keep_alive_s(value: object) -> float | None:
    """What a client means that says how long its model is to stay, in the ways of Ollama's API.

    Args:
        value: seconds as a number or a text, or a duration such as ``5m`` or ``1h30m``; below 0 is for ever.

    Returns:
        seconds, infinite for ever; None where it says nothing that could be understood.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    if isinstance(value, str):
        return _of_text(value.strip().lower())
    try:
        return _bounded(float(value))
    except OverflowError:  # an integer beyond all floats
        return FOR_EVER_S


def _of_text(text: str) -> float | None:
    sign, digits = (-1.0, text[1:]) if text.startswith("-") else (1.0, text)
    try:
        return _bounded(sign * float(digits))
    except ValueError:
        if not _PARTS.fullmatch(digits):
            return None
    return _bounded(sign * sum(float(number) * _UNITS_S[unit] for number, unit in _PART.findall(digits)))


def _bounded(seconds: float) -> float | None:
    if math.isnan(seconds):
        return None
    return FOR_EVER_S if seconds < 0 or seconds > LONGEST_S else seconds


def _shown(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
