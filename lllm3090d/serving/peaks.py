"""The most that a run was seen to hold, of each memory."""

from __future__ import annotations

from dataclasses import dataclass, field

from lllm3090d.serving.observation import HOST, Observation


@dataclass(slots=True)
class Peaks:
    """Of one run; fed with observations.

    Attributes:
        run: which.
        highest: bytes by memory; without those of which nothing is known.
    """

    run: str
    highest: dict[str, int] = field(default_factory=dict)

    def look(self, observation: Observation) -> int:
        """Remember what it holds now; returns what it holds of all cards together, 0 where that is not known."""
        on_cards = 0
        for state in observation.cards:
            held = state.resident.get(self.run)
            if held is not None:
                on_cards += held
                self._saw(state.card.uuid, held)
        beside = observation.host_in_use.get(self.run)
        if beside is not None:
            self._saw(HOST, beside)
        return on_cards

    def _saw(self, where: str, held: int) -> None:
        self.highest[where] = max(self.highest.get(where, 0), held)
