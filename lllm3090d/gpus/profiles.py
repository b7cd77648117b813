"""Known cards, and which of them a card is. Also cards that are not there: by name, or by their memory alone."""

from __future__ import annotations

import difflib
import functools
import re
from importlib import resources
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from lllm3090d.errors import ErrorCode, LlmError

REFERENCE_PROFILE = "rtx-3090"  # card on which every speed of the packaged catalogue was measured
VRAM_TOLERANCE_MIB = 512  # between nameplate and what the driver reports, for the same card
DETECTED_ID = "detected"  # a card that is there and in no list
NO_CARD_ID = "no-gpu"
SYNTHETIC_ID = "synthetic"  # of which somebody said the memory only
NAMELESS_IDS = frozenset({DETECTED_ID, NO_CARD_ID, SYNTHETIC_ID})
MAX_VRAM_MIB = 4 << 20  # 4 TiB: more is a slip of the hand
_VRAM = re.compile(r"(?P<number>[0-9]{1,7}(?:\.[0-9]{1,6})?)\s*(?P<unit>[A-Za-z]*)")
_UNITS_MIB = {"mib": 1, "gib": 1024, "tib": 1024 * 1024}


class CardProfile(BaseModel):
    """A kind of card.

    Attributes:
        id: what it is asked for by, such as ``rtx-4090``.
        name: as the driver reports it.
        compute_capability: such as ``8.6``; None where nobody says.
        vram_mib: nameplate, MiB.
        bandwidth_gb_per_s: of its memory, 10^9 bytes; None unknown.
        measured: speeds of the packaged catalogue were measured on it.
        remark: for a person.
        present: False where there is no card at all and this one's capacity is borrowed.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    id: Annotated[str, StringConstraints(pattern=r"^[a-z0-9-]{1,60}$")]
    name: Annotated[str, StringConstraints(min_length=1, max_length=200)]
    compute_capability: Annotated[str, StringConstraints(pattern=r"^\d{1,2}\.\d{1,2}$")] | None
    vram_mib: Annotated[int, Field(ge=1)]
    bandwidth_gb_per_s: Annotated[int, Field(ge=1)] | None = None
    measured: bool = False
    remark: str = ""
    present: bool = True

    def can_compute(self, least_capability: str | None) -> bool:
        """Its compute capability is not below the least that a model needs, or nobody knows one of them."""
        if least_capability is None or self.compute_capability is None:
            return True
        return _version(self.compute_capability) >= _version(least_capability)


class _ProfileFile(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    schema_: Annotated[Literal[1], Field(alias="schema")]
    profiles: tuple[CardProfile, ...]


ANY_CARD = "any card"
LEAST_LIKENESS = 0.8  # of a card that somebody may have meant: rtx-409, and not gtx-1080 for rtx-5080


@functools.cache
def known_profiles() -> tuple[CardProfile, ...]:
    """The cards of ``profiles.json``, the reference first; read once."""
    file = resources.files("lllm3090d.gpus") / "profiles.json"
    return _ProfileFile.model_validate_json(file.read_bytes()).profiles


def profile_of(name: str, vram_mib: int, compute_capability: str | None = None) -> CardProfile:
    """The profile of a card that is there: a known one, or one made of what the driver reports.

    Known is a card of the same name, of a capacity within 512 MiB, and of the same compute capability where it
    is reported. The name decides, not the size: a 3090 Ti is no 3090. The capacity is always the live one.

    Args:
        name: as the driver reports it.
        vram_mib: total memory, MiB.
        compute_capability: such as ``8.6``; None where the driver does not tell.
    """
    for known in known_profiles():
        if (
            _plain(known.name) == _plain(name)
            and abs(known.vram_mib - vram_mib) <= VRAM_TOLERANCE_MIB
            and compute_capability in (None, known.compute_capability)
        ):
            return known.model_copy(update={"vram_mib": vram_mib})
    return CardProfile(
        id=DETECTED_ID,
        name=name[:200] or "unnamed card",
        compute_capability=compute_capability,
        vram_mib=max(1, vram_mib),
    )


def absent_profile() -> CardProfile:
    """No card: the capacity of the reference is borrowed, and nothing counts as measured."""
    return without_card(named_profile(REFERENCE_PROFILE))


def without_card(borrowed: CardProfile) -> CardProfile:
    """A profile that stands in where there is no card: nothing counts as measured on it."""
    return borrowed.model_copy(update={"id": NO_CARD_ID, "present": False, "measured": False})


def capacity_profile(vram_mib: int) -> CardProfile:
    """A card of which only the memory is known (``--vram 12GiB``)."""
    name = f"{ANY_CARD} with {vram_mib / 1024:g} GiB"
    return CardProfile(id=SYNTHETIC_ID, name=name, compute_capability=None, vram_mib=vram_mib)


def named_profile(name: str) -> CardProfile:
    """The known card of this id or name (``--card rtx-4090``), in any spelling: ``RTX 4090`` too.

    Raises:
        LlmError: INVALID_REQUEST with the known ones and the nearest.
    """
    wanted = _plain(name)
    for known in known_profiles():
        if wanted and wanted in (_plain(known.id), _plain(known.name)):
            return known
    ids = [known.id for known in known_profiles()]
    near = difflib.get_close_matches(name.casefold(), ids, 1, LEAST_LIKENESS)
    raise LlmError(
        ErrorCode.INVALID_REQUEST,
        f"{name!r} is no card that is known here; known are {', '.join(ids)}.",
        hint=(f"Did you mean {near[0]}? " if near else "")
        + "Any other card goes by its memory: --vram 12GiB.",
        card=name,
        known=ids,
    )


def parse_vram(text: str) -> int:
    """MiB of a text such as ``12GiB``, ``11.5 GiB`` or ``12288MiB``, rounded down.

    GB is refused: of memory it usually means GiB, but says something 7 % smaller.

    Raises:
        LlmError: INVALID_REQUEST for anything else, and for no memory or more than 4 TiB.
    """
    match = _VRAM.fullmatch(text.strip())
    factor = _UNITS_MIB.get(match["unit"].casefold()) if match else None
    size = int(float(match["number"]) * factor) if match and factor else 0
    if not 1 <= size <= MAX_VRAM_MIB:
        raise LlmError(
            ErrorCode.INVALID_REQUEST,
            f"{text!r} is no amount of video memory.",
            hint="Give a number with MiB or GiB, such as 12GiB; a card sold with 12 GB has 12 GiB.",
            vram=text,
        )
    return size


def _plain(name: str) -> str:
    return "".join(character for character in name.casefold() if character.isalnum())


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))
