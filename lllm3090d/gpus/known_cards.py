"""The cards that were managed last, in ``cards.json`` of the state directory.

A daemon that starts while its card is lost goes by them: models that run are charged to the card they are on, nothing
is put anywhere else, and the card is known when it is back.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from lllm3090d.gpus.readings import Card
from lllm3090d.whole_files import read_whole, replace_whole, settle_names

log = logging.getLogger(__name__)

FILE_NAME = "cards.json"
LARGEST_BYTES = 1 << 16
MOST_CARD_BYTES = 1 << 50


class _Known(BaseModel):
    """The file. Members that a later version adds are left alone."""

    model_config = ConfigDict(frozen=True)

    cards: tuple[Card, ...] = ()


def recall_cards(state_dir: Path) -> tuple[Card, ...]:
    """The cards that were managed last, in their order; none without a file that can be understood. Blocking."""
    file = state_dir / FILE_NAME
    try:
        cards = _Known.model_validate_json(read_whole(file, LARGEST_BYTES)).cards
        if not all(card.uuid and 0 < card.total_bytes <= MOST_CARD_BYTES for card in cards):
            raise ValueError("it names a card that cannot be")
        return cards
    except (FileNotFoundError, NotADirectoryError):
        return ()
    except ValidationError as error:
        log.warning("%s is ignored: it is damaged (%d members)", file, error.error_count())
    except (OSError, ValueError) as error:
        log.warning("%s is ignored: %s", file, error)
    return ()


def remember_cards(state_dir: Path, cards: Sequence[Card]) -> None:
    """Keep the cards that are managed; without a word where that is known already. Blocking.

    Where it cannot be written the daemon goes on without: only a later start with a lost card would want it.
    """
    is_whole = all(
        card.total_bytes for card in cards
    )  # else one could not be read, and what was known is better
    if not is_whole or recall_cards(state_dir) == tuple(cards):
        return
    file = state_dir / FILE_NAME
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_whole(file, _Known(cards=tuple(cards)).model_dump_json().encode() + b"\n")
        settle_names(state_dir)
    except OSError as error:
        log.warning(
            "%s cannot be written: %s; a start while the card is lost would not know it",
            file,
            error.strerror or error,
        )
