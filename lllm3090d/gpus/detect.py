"""Which memory is managed: the cards of one vendor, or host memory in their place."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.bounded import BoundedReader, opened_in_time
from lllm3090d.gpus.host import HostMemoryReader
from lllm3090d.gpus.lost_cards import LostCards
from lllm3090d.gpus.nvml import open_nvidia
from lllm3090d.gpus.readings import Card, CardKind, CardReader, NoCardError
from lllm3090d.gpus.sysfs import SYSTEM, Roots, open_amd, open_intel
from lllm3090d.planning.units import MIB
from lllm3090d.settings import CardChoice

log = logging.getLogger(__name__)

# With less no model that is worth a card fits; what an APU calls its video memory is mostly below it.
MIN_CARD_BYTES = 3072 * MIB
HINTS = {
    CardChoice.NVIDIA: "Install the NVIDIA driver and check nvidia-smi",
    CardChoice.AMD: "Check that the kernel's amdgpu drives the card (lspci -k)",
    CardChoice.INTEL: "Check that the kernel's xe drives the card (lspci -k) and that"
    " /sys/fs/cgroup/dmem.capacity lists it",
}


def open_cards(
    choice: CardChoice, roots: Roots = SYSTEM, *, known: Sequence[Card] = ()
) -> tuple[CardReader, ...]:
    """Open the cards that the setting ``card`` asks for, the one with the most memory first; never empty.

    With ``auto`` the first vendor with a card that can be managed is taken: NVIDIA, AMD, Intel; only a machine without
    any gets host memory. A driver that is there and does not answer is an error: to fall back silently would put a
    model meant for the card into host memory. Where the cards are known from before, they stand for themselves then:
    their readers fail until they are back. Cards with less than 3 GiB are left out.

    Args:
        choice: of the setting.
        roots: where the kernel's file systems are mounted.
        known: the cards that were managed last.

    Raises:
        LlmError: CARD_UNREADABLE where a driver is broken, or where a vendor is asked for and has no card here; not
            for cards that are known.
    """
    openers: dict[CardChoice, Callable[[], Sequence[CardReader]]] = {
        CardChoice.NVIDIA: lambda: _nvidia(known),
        CardChoice.AMD: lambda: open_amd(roots),
        CardChoice.INTEL: lambda: open_intel(roots),
    }
    if choice is CardChoice.CPU:
        return (HostMemoryReader(),)
    if choice is not CardChoice.AUTO:
        try:
            return _eligible(openers[choice]())
        except NoCardError as error:
            raise LlmError(
                ErrorCode.CARD_UNREADABLE,
                f'The setting card = "{choice}" asks for cards of a kind that this machine has none of: {error}.',
                hint=f'{HINTS[choice]}, or set card = "auto" or "cpu".',
                reason=str(error),
            ) from error
    for vendor, opener in openers.items():
        try:
            return _eligible(opener())
        except NoCardError as error:
            log.info("no card of %s: %s", vendor, error)
    return (HostMemoryReader(),)


def _nvidia(known: Sequence[Card]) -> tuple[CardReader, ...]:
    """NVIDIA's cards, or those that were there before. Raises NoCardError, LlmError where none were."""
    before = tuple(card for card in known if card.kind is CardKind.NVIDIA)
    try:
        return opened_in_time(open_nvidia)
    except (LlmError, NoCardError) as error:
        is_uninstalled = isinstance(error, NoCardError) and not error.is_installed
        if not before or is_uninstalled:
            raise
        lost = error
    for card in before:
        log.warning(
            "%s is lost: nothing is put on it until it is back", card.name, extra={"reason": str(lost)}
        )
    return tuple(BoundedReader(reader) for reader in LostCards(open_nvidia, before, lost).readers())


def _eligible(readers: Sequence[CardReader]) -> tuple[CardReader, ...]:
    """Those with memory enough; one that cannot be read now stays, and says so. Raises NoCardError for none."""
    chosen, small = [], []
    for reader in readers:
        card = reader.card
        if 0 < card.total_bytes < MIN_CARD_BYTES:
            small.append(
                f"{card.name} has {card.total_bytes // MIB} MiB of video memory, less than {MIN_CARD_BYTES // MIB}"
            )
            log.warning("a card is left out: %s", small[-1])
            reader.close()
        else:
            chosen.append(reader)
    if not chosen:
        raise NoCardError("; ".join(small))
    return tuple(chosen)
