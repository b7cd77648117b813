"""All cards at this moment, with what must be known beside the reading: whose processes run there, and what a card
has reported.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from lllm3090d.errors import LlmError
from lllm3090d.files import exhausted
from lllm3090d.gpus.readings import Card, CardReader
from lllm3090d.serving.admission import foreign_bytes
from lllm3090d.serving.card_health import EVIDENCE_S, CardHealth
from lllm3090d.serving.desktop import Sessions, UnitStates, desktop_active
from lllm3090d.serving.foreign_units import ForeignUnits
from lllm3090d.serving.instance import ENDED
from lllm3090d.serving.kernel_journal import recent_xids
from lllm3090d.serving.measure import observe
from lllm3090d.serving.observation import HOST, Observation, RunProcesses
from lllm3090d.serving.running import Instance
from lllm3090d.serving.scheduler import Scheduler
from lllm3090d.settings import Desktop
from lllm3090d.wire import ForeignUnitView

log = logging.getLogger(__name__)


class Observer:
    """Reads cards.

    Args:
        readers: one for each card, the one with the most memory first.
        scheduler: read, never changed.
        foreign_units: what else of ours, as it seems, holds memory.
        card_health: judges each reading.
        desktop: the present setting.
        units: the user's systemd.
        sessions: logind; None where there is none.
    """

    def __init__(
        self,
        *,
        readers: Sequence[CardReader],
        scheduler: Scheduler,
        foreign_units: ForeignUnits,
        card_health: CardHealth,
        desktop: Callable[[], Desktop],
        units: UnitStates,
        sessions: Sessions | None,
    ) -> None:
        self._readers = tuple(readers)
        self._scheduler = scheduler
        self._foreign_units = foreign_units
        self._card_health = card_health
        self._desktop = desktop
        self._units = units
        self._sessions = sessions
        self._desktop_active: bool | None = None
        self._seen: dict[str, Observation] = {}  # run -> the cards when it was last seen to hold something
        self._ended: dict[str, RunProcesses] = {}  # runs whose memory is not back yet

    @property
    def card(self) -> Card:
        """The card with the most memory, or host memory in its place."""
        return self._readers[0].card

    @property
    def cards(self) -> tuple[Card, ...]:
        """All of them."""
        return tuple(reader.card for reader in self._readers)

    async def look_for_desktop(self) -> None:
        """Find out whether a desktop session is on the card; what observe() says from now on."""
        self._desktop_active = await desktop_active(
            self._desktop(), self.card.kind, self._units, self._sessions
        )

    def observe(self) -> Observation:
        """All cards now; one that cannot be read says why.

        Raises:
            LlmError: CARD_UNREADABLE for host memory, FILES_EXHAUSTED.
        """
        # A driver may list a process that has ended: what it holds is that run's for as long as it is charged.
        self._ended = {run: each for run, each in self._ended.items() if self._scheduler.ledger.of(run)}
        runs = self._ended | {
            each.run: RunProcesses(each.main_pid, each.control_group) for each in self._scheduler.instances
        }
        try:
            seen = observe(self._readers, runs, self._desktop_active, foreign=self._foreign_units.processes)
        except (OSError, LlmError) as error:
            shortage = exhausted(error)
            if shortage is None:
                raise
            raise shortage from error
        seen = self._card_health.judge(seen, self._readers)
        for state in seen.cards:
            for run, held in state.resident.items():
                if held and run not in self._ended and run in runs:
                    self._seen[run] = seen
        return seen

    def has_ended(self, run: str) -> Observation | None:
        """A run's memory is waited for from now on; the cards when it was last seen to hold something."""
        instance = self._scheduler.by_run(run)
        if instance is not None:
            self._ended[run] = RunProcesses(instance.main_pid, instance.control_group)
        return self._seen.pop(run, None)

    def foreign_bytes(self) -> dict[str, int]:
        """What others hold of each card that can be read now, by its UUID."""
        seen = self._observed()
        if seen is None:
            return {}
        ledger = self._scheduler.ledger
        return {
            each.card.uuid: foreign_bytes(each, ledger) for each in seen.cards if each.reading is not None
        }

    def foreign_unit_views(self) -> tuple[ForeignUnitView, ...]:
        """Units that are left alone, with what they hold now where that can be read."""
        if not self._foreign_units.all:
            return ()
        return self._foreign_units.views(self._observed())

    def look_at_cards(self) -> None:
        """Judge the cards anew where models run, so that what is said of those is true now."""
        if any(each.state not in ENDED for each in self._scheduler.instances):
            self._observed()

    def risk_of(self, instance: Instance) -> str | None:
        """Why a card that a model runs on cannot be trusted, as it was judged last; None where all can."""
        if instance.state in ENDED:
            return None
        cards = (each.where for each in self._scheduler.ledger.of(instance.run))
        return next((risk for card in cards if (risk := self._card_health.risk(card)) is not None), None)

    async def evidence_of(self, instance: Instance) -> str | None:
        """What a card of a model that has just ended has reported a moment ago."""
        self._observed()
        if self._card_health.is_deaf:
            told = await recent_xids(EVIDENCE_S)
            self._card_health.hear(told, iter(self.cards))
        pids = frozenset(() if instance.main_pid is None else (instance.main_pid,))
        # Its memory may be back already, and the ledger has forgotten it.
        cards = {each.where for each in instance.record.shares(self.card.uuid)} - {HOST}
        found = (self._card_health.evidence(card, pids) for card in sorted(cards))
        return next((each for each in found if each is not None), None)

    def _observed(self) -> Observation | None:
        try:
            return self.observe()
        except LlmError as error:
            log.warning("host memory cannot be read", extra={"reason": error.message})
            return None
