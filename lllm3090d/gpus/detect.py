"""Which memory is managed: the cards of one vendor, or host memory in their place."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.bounded import BoundedReader, opened_in_time
from lllm3090d.gpus.host import HostMemoryReader
from lllm3090d.gpus.known_cards import NOTHING_KNOWN, KnownCards
from lllm3090d.gpus.lost_cards import REBOOT, LostCards, is_missing
from lllm3090d.gpus.nvml import open_nvidia
from lllm3090d.gpus.pci import is_set_aside
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
    choice: CardChoice, roots: Roots = SYSTEM, *, known: KnownCards = NOTHING_KNOWN, boot_id: str = ""
) -> tuple[CardReader, ...]:
    """Open the cards that the setting ``card`` asks for, the one with the most memory first; never empty.

    With ``auto`` the first vendor with a card that can be managed is taken: NVIDIA, AMD, Intel; only a machine without
    any gets host memory. A driver that is there and does not answer is an error: to fall back silently would put a
    model meant for the card into host memory. Where cards are known from before, they stand for themselves then: their
    readers fail until they are back. So does one of several, and one of AMD or Intel, that is missing in the boot in
    which it was managed; in another boot it was taken out, and is forgotten. Cards with less than 3 GiB are left out.

    Args:
        choice: of the setting.
        roots: where the kernel's file systems are mounted.
        known: the cards that were managed last.
        boot_id: of this boot; empty where the kernel does not tell, and no card counts as taken out.

    Raises:
        LlmError: CARD_UNREADABLE where a driver is broken, or where a vendor is asked for and has no card here; not
            for cards that are known.
    """
    openers: dict[CardChoice, Callable[[], Sequence[CardReader]]] = {
        CardChoice.NVIDIA: lambda: _nvidia(known, boot_id, roots),
        CardChoice.AMD: lambda: _in_kernel(CardKind.AMD, open_amd, known, boot_id, roots),
        CardChoice.INTEL: lambda: _in_kernel(CardKind.INTEL, open_intel, known, boot_id, roots),
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


def _nvidia(known: KnownCards, boot_id: str, roots: Roots) -> tuple[CardReader, ...]:
    """NVIDIA's cards, and those that were there before. Raises NoCardError, LlmError where none were."""
    before = tuple(
        card for card in known.of_kind(CardKind.NVIDIA) if not is_set_aside(card.pci_address, roots.sys)
    )
    expected = tuple(card for card in before if known.was_managed_in(card, boot_id))
    try:
        readers = opened_in_time(functools.partial(open_nvidia, expected=expected))
    except (LlmError, NoCardError) as error:
        is_uninstalled = isinstance(error, NoCardError) and not error.is_installed
        if not before or is_uninstalled:
            raise
        # In another boot too: the driver may not be loaded yet.
        lost = LostCards(functools.partial(open_nvidia, expected=before), before, error)
        readers = tuple(BoundedReader(reader) for reader in lost.readers())
        _say_lost(before, str(error))
        return readers
    _say_lost([reader.card for reader in readers if is_missing(reader)], "its driver lists others only")
    return _in_order(readers, known, CardKind.NVIDIA)


def _in_kernel(
    kind: CardKind,
    opener: Callable[[Roots], Sequence[CardReader]],
    known: KnownCards,
    boot_id: str,
    roots: Roots,
) -> tuple[CardReader, ...]:
    """Cards whose driver is in the kernel, and those that were there before in this boot. Raises NoCardError."""
    readers: tuple[CardReader, ...] = ()
    none: NoCardError | None = None
    try:
        readers = tuple(opener(roots))
    except NoCardError as error:
        none = error
    there = {reader.card.uuid for reader in readers}
    missing = tuple(
        card
        for card in known.of_kind(kind)
        if card.uuid not in there
        and known.was_managed_in(card, boot_id)
        and not is_set_aside(card.pci_address, roots.sys)
    )
    why = none or NoCardError("the kernel lists it no more")
    if missing:
        _say_lost(missing, str(why))
        lost = LostCards(functools.partial(opener, roots), missing, why, beside=there, way_out=REBOOT)
        readers += lost.readers()
    elif none is not None:
        _say_forgotten(known.of_kind(kind))
        raise none
    return _in_order(readers, known, kind)


def _in_order(readers: Sequence[CardReader], known: KnownCards, kind: CardKind) -> tuple[CardReader, ...]:
    """The one with the most memory first; where some are missing, equal ones as before, so that all keep a number."""
    there = {reader.card.uuid for reader in readers}
    _say_forgotten([card for card in known.of_kind(kind) if card.uuid not in there])
    if not any(map(is_missing, readers)):
        return tuple(readers)
    place = {card.uuid: number for number, card in enumerate(known.cards)}

    def rank(reader: CardReader) -> tuple[int, int]:
        return -reader.card.total_bytes, place.get(reader.card.uuid, len(place))

    return tuple(sorted(readers, key=rank))


def _say_lost(cards: Sequence[Card], why: str) -> None:
    for card in cards:
        log.warning("%s is lost: nothing is put on it until it is back", card.name, extra={"reason": why})


def _say_forgotten(cards: Sequence[Card]) -> None:
    for card in cards:
        log.warning(
            "%s was managed before and was taken out since: it is forgotten",
            card.name,
            extra={"card": card.uuid},
        )


def unknown_problem(readers: Sequence[CardReader], known: KnownCards, choice: CardChoice) -> LlmError | None:
    """Why nobody knows whether host memory rightly takes the place of a card; None where it does, or there is one."""
    on_host = all(reader.card.kind is CardKind.CPU for reader in readers)
    return known.problem if on_host and choice is CardChoice.AUTO else None


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
