"""The cards that were managed last, in ``cards.json`` of the state directory.

A daemon that starts while its card is lost goes by them: models that run are charged to the card they are on, nothing
is put anywhere else, and the card is known when it is back.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from lllm3090d.gpus.readings import Card
from lllm3090d.whole_files import replace_whole, settle_names

log = logging.getLogger(__name__)

FILE_NAME = "cards.json"
LARGEST_BYTES = 1 << 16


class _Known(BaseModel):
    """The file. Members that a later version adds are left alone."""

    model_config = ConfigDict(frozen=True)

    cards: tuple[Card, ...] = ()


def recall_cards(state_dir: Path) -> tuple[Card, ...]:
    """The cards that were managed last, in their order; none without a file that can be understood. Blocking."""
    file = state_dir / FILE_NAME
    try:
        # A FIFO or a device in its place must not block the start.
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        with os.fdopen(descriptor, "rb") as record:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ValueError("it is no regular file")
            content = record.read(LARGEST_BYTES + 1)
        if len(content) > LARGEST_BYTES:
            raise ValueError(f"it is longer than {LARGEST_BYTES} bytes")
        return _Known.model_validate_json(content).cards
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
