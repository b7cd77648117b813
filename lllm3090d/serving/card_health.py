"""Whether a card can be trusted: what its driver reports, and when that is over. No I/O of its own.

A card is in error from an Xid that concerns it, or from the driver's word that it must be recovered, until it can be
read, the driver asks for nothing, and either it has been reset since or nothing more has come for a while
(:mod:`lllm3090d.gpus.xids`). It is judged anew with each reading; without readings nothing rests on it.

What was reported is remembered by this daemon alone. A card whose driver asks for a recovery is in error for the next
one too, for the driver says so again; any other may have been reset while nobody looked.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.readings import Card, CardReader
from lllm3090d.gpus.xids import ACTIONS, TellsErrors, Until, Xid, XidClass
from lllm3090d.serving.observation import CardState, Observation

log = logging.getLogger(__name__)

# Faults of memory and of the bus come in bursts over seconds; a card that was quiet this long under what runs is as
# good as it was before.
QUIET_S = 600.0
# An engine is ended by systemd within this time of the error that ended it.
EVIDENCE_S = 60.0
KEPT_XIDS = 32
WAY_OUT = (
    "End what uses the card (lllm3090ctl release), then reset it: sudo nvidia-smi -r, and restart lllm3090d; where that"
    " fails, restart the computer. The reason is in: journalctl -k --grep 'NVRM|Xid'"
)


@dataclass(frozen=True, slots=True)
class Noticed:
    """An Xid, and when it was noticed, on the clock of all times here."""

    xid: Xid
    at_s: float


@dataclass(frozen=True, slots=True)
class CardNews:
    """What the world should be told of a card.

    Attributes:
        card: which.
        text: for a person.
        is_bad: it is worse than before.
        details: for programs.
    """

    card: Card
    text: str
    is_bad: bool
    details: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Fault:
    """Why a card is in error, and since when."""

    why: str
    until: Until
    last_s: float  # of the last thing that was reported
    returns: int  # of the card, then
    xid: int | None = None


@dataclass(slots=True)
class _Watched:
    fault: _Fault | None = None
    unreadable: str = ""  # why; empty where it was read last
    action: int | None = None  # what the driver asked for last
    source: str | None = None  # who tells of errors; empty for nobody, None where none are to be had
    returns: int = 0
    noticed: deque[Noticed] = field(default_factory=lambda: deque(maxlen=KEPT_XIDS))


class CardHealth:
    """Judges cards, reading after reading.

    Args:
        tell: told what happened to a card.
        clock: monotonic, seconds.
        quiet_s: how long nothing must have come.
    """

    def __init__(
        self, tell: Callable[[CardNews], None], clock: Callable[[], float], quiet_s: float = QUIET_S
    ) -> None:
        self._tell = tell
        self._clock = clock
        self._quiet_s = quiet_s
        self._watched: dict[str, _Watched] = {}

    def judge(self, seen: Observation, readers: Sequence[CardReader]) -> Observation:
        """The observation, with the fault of each card that is in error; to be called right after the readings.

        Args:
            seen: the cards, in the order of their readers.
            readers: of the cards.
        """
        states = tuple(
            self._judged(state, reader) for state, reader in zip(seen.cards, readers, strict=True)
        )
        return replace(seen, cards=states)

    def risk(self, uuid: str) -> str | None:
        """Why what runs on a card cannot be trusted, as it was judged last; None where it can."""
        watched = self._watched.get(uuid)
        if watched is None:
            return None
        return watched.fault.why if watched.fault is not None else watched.unreadable or None

    def evidence(self, uuid: str, pids: frozenset[int]) -> str | None:
        """What a card has reported a moment ago that may have ended a process; None where nothing.

        Args:
            uuid: of the card.
            pids: of the process; an error that names another one is none of its.
        """
        watched = self._watched.get(uuid)
        since_s = self._clock() - EVIDENCE_S
        for each in reversed(watched.noticed if watched is not None else ()):
            mine = each.xid.pid is None or not pids or each.xid.pid in pids
            if each.at_s >= since_s and mine and each.xid.kind.concerns is not XidClass.NOTE:
                return each.xid.title
        return None

    @property
    def is_deaf(self) -> bool:
        """Nobody tells of errors of some card by himself."""
        return any(each.source == "" for each in self._watched.values())

    def hear(self, told: Sequence[tuple[str, Xid]], cards: Iterable[Card]) -> None:
        """Take what somebody else has found; what was heard before is not heard again.

        Args:
            told: each with the PCI address of its card.
            cards: that are managed.
        """
        for card in cards:
            address, watched = card.pci_address.partition(".")[0], self._watched.get(card.uuid)
            if not address or watched is None or watched.source is None:
                continue
            known = {each.xid for each in watched.noticed}
            for xid in (xid for where, xid in told if where.partition(".")[0] == address):
                if xid not in known:
                    self._see_xid(card, watched, xid, watched.returns)

    # --- one card ---------------------------------------------------------------------------------------------------

    def _judged(self, state: CardState, reader: CardReader) -> CardState:
        watched = self._watched.setdefault(state.card.uuid, _Watched())
        self._see_reading(state, watched)
        if not isinstance(reader, TellsErrors):
            return state
        errors = reader.errors()
        watched.action, watched.source, watched.returns = errors.action, errors.source, errors.returns
        for xid in errors.xids:
            self._see_xid(state.card, watched, xid, errors.returns)
        self._see_action(state.card, watched, errors.returns)
        fault = watched.fault
        if fault is not None and state.reading is not None and self._is_over(watched, fault, errors.returns):
            self._end(state.card, watched, fault)
        if watched.fault is None:
            return state
        return replace(state, fault=self._error(state.card.uuid, watched.fault, state.card.name))

    def _see_reading(self, state: CardState, watched: _Watched) -> None:
        why = state.error.message if state.error is not None else ""
        if why and not watched.unreadable:
            details = state.error.problem() if state.error is not None else {}
            self._say(state.card, f"the card cannot be read: {why}", True, {"problem": details})
        elif watched.unreadable and not why:
            self._say(state.card, f"{state.card.name} can be read again", False, {})
        watched.unreadable = why

    def _see_xid(self, card: Card, watched: _Watched, xid: Xid, returns: int) -> None:
        now = self._clock()
        watched.noticed.append(Noticed(xid, now))
        concerns, until = xid.kind.concerns, xid.kind.until
        # It may tell of a card that is well again: then the driver, which has been asked since, wants nothing.
        is_fault = concerns is XidClass.CARD and not (until is Until.WORD and watched.action == 0)
        told = f"{card.name} reported {xid.title}"
        details = {"xid": xid.number, "class": str(concerns), "pid": xid.pid, "line": xid.text or None}
        if is_fault:
            before = watched.fault
            # The first one is the reason; what it takes to end it is the most that any of them takes.
            hardest = until if before is None or before.until is not Until.RESET else before.until
            why = told if before is None else before.why
            number = xid.number if before is None else before.xid
            watched.fault = _Fault(why, hardest, now, returns, number)
            told += "; nothing is loaded on it until it is well, and models on it are at risk"
        self._say(card, told, concerns is not XidClass.NOTE, details)

    def _see_action(self, card: Card, watched: _Watched, returns: int) -> None:
        """The driver's own word makes a fault by itself, whether or not anybody heard of an Xid."""
        if watched.action in {None, 0} or watched.fault is not None:
            return
        asked = ACTIONS.get(watched.action or 0, f"recovery (action {watched.action})")
        why = f"the driver of {card.name} asks for {asked}"
        watched.fault = _Fault(why, Until.WORD, self._clock(), returns)
        self._say(card, f"{why}; nothing is loaded on it until then", True, {"action": watched.action})

    def _is_over(self, watched: _Watched, fault: _Fault, returns: int) -> bool:
        if watched.action not in {None, 0}:
            return False
        if returns > fault.returns:
            return True
        asks_nothing = watched.action == 0
        if fault.until is Until.WORD:
            return asks_nothing
        is_quiet = self._clock() - fault.last_s >= self._quiet_s
        return is_quiet and (asks_nothing or fault.until is Until.QUIET)

    def _end(self, card: Card, watched: _Watched, fault: _Fault) -> None:
        watched.fault = None
        self._say(card, f"{card.name} is well again; before, {fault.why}", False, {"xid": fault.xid})

    def _say(self, card: Card, text: str, is_bad: bool, details: Mapping[str, object]) -> None:
        known = {key: value for key, value in details.items() if value is not None}
        self._tell(CardNews(card, text, is_bad, {"card": card.uuid, **known}))

    def _error(self, uuid: str, fault: _Fault, name: str = "") -> LlmError:
        action = self._watched[uuid].action
        asks = f" The driver asks for {ACTIONS[action]}." if action is not None and action in ACTIONS else ""
        return LlmError(
            ErrorCode.CARD_AT_RISK,
            f"{fault.why}, so nothing is loaded on it.{asks}",
            hint=WAY_OUT,
            card=uuid,
            name=name or None,
            xid=fault.xid,
            action=action,
        )
