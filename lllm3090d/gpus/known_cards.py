"""The cards that were managed last, in ``cards.json`` of the state directory.

A daemon that starts while a card is lost goes by them: models that run are charged to the card they are on, nothing is
put anywhere else, and the card is known when it is back. With each card is kept in which boot of the machine it was
managed: one that is missing in another boot, while its driver works, was taken out. No model can run on it any more.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.readings import Card, CardKind
from lllm3090d.whole_files import read_whole, replace_whole, settle_names

log = logging.getLogger(__name__)

FILE_NAME = "cards.json"
LARGEST_BYTES = 1 << 16
MOST_CARD_BYTES = 1 << 50


class _Known(BaseModel):
    """The file. Members that a later version adds are left alone."""

    model_config = ConfigDict(frozen=True)

    cards: tuple[Card, ...] = ()
    boots: dict[str, str] = Field(default_factory=dict)  # by UUID


@dataclass(frozen=True, slots=True)
class KnownCards:
    """The cards that were managed last.

    Attributes:
        cards: those, in their order.
        boots: by UUID, the boot in which each was managed last; none for one of a release that did not keep it.
        problem: why the file cannot be used, so that nobody knows whether there were any; None where it can.
    """

    cards: tuple[Card, ...] = ()
    boots: Mapping[str, str] = field(default_factory=dict)
    problem: LlmError | None = None

    def of_kind(self, kind: CardKind) -> tuple[Card, ...]:
        """Those of one vendor."""
        return tuple(card for card in self.cards if card.kind is kind)

    def was_managed_in(self, card: Card, boot_id: str) -> bool:
        """In this boot, or in one that is not known; so is every boot where the kernel does not tell."""
        before = self.boots.get(card.uuid, "")
        return not before or not boot_id or before == boot_id


NOTHING_KNOWN = KnownCards()


def recall_cards(state_dir: Path) -> KnownCards:
    """The cards that were managed last; none without a file that can be understood. Blocking."""
    file = state_dir / FILE_NAME
    try:
        known = _Known.model_validate_json(read_whole(file, LARGEST_BYTES))
        if not all(card.uuid and 0 < card.total_bytes <= MOST_CARD_BYTES for card in known.cards):
            raise ValueError("it names a card that cannot be")
        return KnownCards(known.cards, known.boots)
    except (FileNotFoundError, NotADirectoryError):
        return NOTHING_KNOWN
    except ValidationError as error:
        why = f"it is damaged ({error.error_count()} members)"
    except OSError as error:
        why = error.strerror or str(error)
    except ValueError as error:
        why = str(error)
    log.warning("%s is ignored: %s", file, why)
    return KnownCards(problem=_unusable(file, why))


def remember_cards(state_dir: Path, cards: Sequence[Card], boot_id: str) -> None:
    """Keep the cards that are managed, lost ones too; without a word where that is known already. Blocking.

    Where it cannot be written the daemon goes on without: only a later start with a lost card would want it.

    Args:
        state_dir: where it is kept.
        cards: all that are managed. Of one that could not be read what was known is better.
        boot_id: of this boot; empty where the kernel does not tell.
    """
    before = recall_cards(state_dir)
    known = {card.uuid: card for card in before.cards}
    told = (card if card.total_bytes else known.get(card.uuid) for card in cards)
    kept = tuple(card for card in told if card is not None)
    boots = {card.uuid: boot_id for card in kept if boot_id}
    if not kept or (kept == before.cards and boots == before.boots):
        return
    file = state_dir / FILE_NAME
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_whole(file, _Known(cards=kept, boots=boots).model_dump_json().encode() + b"\n")
        settle_names(state_dir)
    except OSError as error:
        log.warning(
            "%s cannot be written: %s; a start while the card is lost would not know it",
            file,
            error.strerror or error,
        )


def _unusable(file: Path, why: str) -> LlmError:
    return LlmError(
        ErrorCode.STATE_UNUSABLE,
        f"The record of the cards that were managed before ({file}) cannot be used: {why.rstrip('.')}. So nobody knows"
        " whether this machine had a card, and models are loaded into host memory.",
        hint="If it has one: see that its driver answers (nvidia-smi), then systemctl --user restart lllm3090d. If it"
        f" has none: rm {shlex.quote(str(file))}, then the same.",
        path=str(file),
    )
