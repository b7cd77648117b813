"""How often a person may be told something: what was just said is not said again, and a flood is one notice. Pure."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from lllm3090d.settings import NoticeTopic
from lllm3090d.surfaces.notices import Notice

QUIET_S = 900.0  # a program that asks again and again is refused again and again
BURST = 10.0  # notices at once
EVERY_S = 15.0  # then one in so many seconds
REPLACING = 0.25  # of a notice: what one that takes the place of another counts
MORE_EVERY_S = 60.0
MORE_KEY = "more"
REMEMBERED = 500


@dataclass(slots=True)
class NoticePace:
    """Lets notices pass, or not."""

    _said: OrderedDict[tuple[str, str], float] = field(default_factory=OrderedDict)
    _left: float = BURST
    _at_s: float | None = None
    _more_at_s: float | None = None

    def forget(self, key: str) -> None:
        """What was said of it is no longer true, so that it is news when it is said again."""
        for each in [said for said in self._said if said[0] == key]:
            del self._said[each]

    def passes(self, notice: Notice, now_s: float) -> Notice | None:
        """The notice, one that stands for several, or None.

        Args:
            notice: what would be told.
            now_s: on a monotonic clock.
        """
        before = self._said.get((notice.key, notice.gist))
        if before is not None and now_s - before < QUIET_S:
            return None
        since_s = 0.0 if self._at_s is None else now_s - self._at_s
        self._left, self._at_s = min(BURST, self._left + since_s / EVERY_S), now_s
        replaces = any(key == notice.key and now_s - at_s < QUIET_S for (key, _), at_s in self._said.items())
        # What is to be seen by somebody, as nothing more happens by itself, is always told.
        cost = 0.0 if notice.lasting else REPLACING if replaces else 1.0
        if self._left >= cost:
            self._left -= cost
            self._said[notice.key, notice.gist] = now_s
            self._said.move_to_end((notice.key, notice.gist))
            while len(self._said) > REMEMBERED:
                self._said.popitem(last=False)
            return notice
        if self._more_at_s is not None and now_s - self._more_at_s < MORE_EVERY_S:
            return None
        self._more_at_s = now_s
        return Notice(
            key=MORE_KEY,
            topic=NoticeTopic.FAILED,
            summary="More has happened to models",
            body="Much happens at once, so not all of it is shown. All of it: lllm3090ctl events",
        )
