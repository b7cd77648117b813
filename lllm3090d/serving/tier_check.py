"""After a start: has the engine split its cache as planned, or silently put all of it into VRAM? Pure.

The engine's own line about a tier is printed before it looks at a single layer, so it proves nothing. Proof is a
line for each layer with the bytes on both sides, and one for each staging buffer. The formats are those of the fork's
published source; no build of it was at hand.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from decimal import Decimal

from lllm3090d.engines.tier_flags import reports_virtual_memory
from lllm3090d.planning.tier import DEVICE_PAGE_BYTES, PARTS, Tier, TierSizes
from lllm3090d.planning.units import MIB

LONGEST_LINE = 2000  # characters; nothing that is looked for comes near
# Timestamp and severity, where the engine prints them.
START = r"\A(?:[0-9][0-9.]{0,30} )?(?:[DIWE] )?"
SIZE = r"[0-9]{1,9}\.[0-9]{1,3}"
ANNOUNCED = re.compile(
    START + r"[A-Za-z_]{1,60}: tiered KV: cells \[0, (?P<line>[0-9]{1,10})\) in VRAM,"
    r" \[[0-9]{1,10}, (?P<context>[0-9]{1,10})\) in host memory\Z"
)
SPLIT = re.compile(
    START + r"ggml_backend_cuda_tier_alloc: CUDA[0-9]{1,3}_tier_(?P<buffer>[A-Za-z0-9_]{1,100})"
    rf" {SIZE} MiB: (?P<card>{SIZE}) MiB VRAM \+ (?P<host>{SIZE}) MiB host"
    r" \([0-9]{1,6} runs, [0-9]{1,3} parts\)\Z"
)
LAYER = re.compile(r"_l(?P<layer>[0-9]{1,5})_[0-9]+_[0-9]+\Z")
STAGED = re.compile(
    START + r"ggml_cuda_tier_staging_handle: staging buffer (?P<buffer>[A-Za-z0-9_/]{1,100}):"
    rf" (?P<card>{SIZE}) MiB VRAM\Z"
)
UNSTAGED = re.compile(START + r"ggml_backend_cuda_tier_alloc: no staging alias for CUDA")
FAILED = re.compile(
    START + r"ggml_backend_cuda_tier_alloc: (?P<what>cuMem[A-Za-z]{1,40}(?:\([^)]{0,60}\))?) failed:"
    r" (?P<error>.{0,200})"
)
WITHOUT_MEMORY = re.compile(START + r"ggml_backend_cuda_tier_alloc: tiered buffers need CUDA VMM")
DRAFT_SIZED = re.compile(START + r"[A-Za-z_]{1,60}: draft context sized to (?P<tokens>[0-9]{1,10}) tokens\b")


@dataclass(frozen=True, slots=True)
class TierVerdict:
    """What a start's log says of its tier.

    Attributes:
        in_force: every layer is split.
        reason: why, or why not; a sentence for a person.
        found: bytes that the engine reports; zeros where it reports none.
        expected: bytes of the plan.
        differences: what is not as planned although the tier is in force, sentences; empty where all is.
        draft_context_tokens: cells of the draft's context as the engine reports it; None where it reports none.
    """

    in_force: bool
    reason: str
    found: TierSizes
    expected: TierSizes
    differences: tuple[str, ...] = ()
    draft_context_tokens: int | None = None


@dataclass(slots=True)
class _Seen:
    """What was found so far; of a second start in the same log, the later lines count."""

    announced: tuple[int, int] | None = None
    layers: dict[str, tuple[int, int]] = field(default_factory=dict)
    staging: dict[str, int] = field(default_factory=dict)
    unstaged: int = 0
    failure: str | None = None
    virtual_memory: bool | None = None
    draft_context_tokens: int | None = None

    def take(self, line: str) -> None:
        if found := SPLIT.match(line):
            layer = LAYER.search(found["buffer"])
            key = layer["layer"] if layer else found["buffer"]
            self.layers[key] = (_bytes(found["card"]), _bytes(found["host"]))
        elif found := STAGED.match(line):
            self.staging[found["buffer"]] = _bytes(found["card"])
        elif found := ANNOUNCED.match(line):
            self.announced = (int(found["line"]), int(found["context"]))
        elif found := DRAFT_SIZED.match(line):
            self.draft_context_tokens = int(found["tokens"])
        elif found := FAILED.match(line):
            self.failure = f"{found['what']} failed: {_printable(found['error'])}"
        elif UNSTAGED.match(line):
            self.unstaged += 1
        elif WITHOUT_MEMORY.match(line):
            self.failure = "this build has no virtual memory of the device"
        elif (answer := reports_virtual_memory(line)) is not None:
            self.virtual_memory = answer

    @property
    def sizes(self) -> TierSizes:
        cards, hosts = ([each[side] for each in self.layers.values()] for side in (0, 1))
        return TierSizes(sum(cards), sum(self.staging.values()), sum(hosts), len(self.layers))


def check_tier(tier: Tier, lines: Iterable[str]) -> TierVerdict:
    """Read the log of one start.

    Args:
        tier: of the plan.
        lines: of the log, in order, from the start on; anything may be among them.
    """
    seen = _Seen()
    for line in lines:
        if len(line) <= LONGEST_LINE:
            seen.take(line.rstrip("\r\n"))
    found, expected = seen.sizes, tier.sizes
    fault = _fault(seen, expected)
    if fault is not None:
        return TierVerdict(False, fault, found, expected, (), seen.draft_context_tokens)
    reason = (
        f"All {found.layers} layers are split: {_mib(found.head_bytes)} MiB in VRAM and {_mib(found.host_bytes)} MiB"
        f" in host memory, with {_mib(found.staging_bytes)} MiB of staging."
    )
    return TierVerdict(True, reason, found, expected, _differences(tier, seen), seen.draft_context_tokens)


def _fault(seen: _Seen, expected: TierSizes) -> str | None:
    """Why the tier is not in force; None where it is."""
    split = sum(host > 0 for _, host in seen.layers.values())
    if split >= expected.layers > 0:
        return None
    if seen.failure is not None:
        return f"The tier is not in force: {seen.failure}."
    if split:
        return f"The tier is not in force: {split} of {expected.layers} layers are split, the rest is in VRAM whole."
    if seen.virtual_memory is False:
        return "The tier is not in force: the device has no virtual memory, so the whole cache is in VRAM."
    if seen.announced is not None:
        return (
            f"The tier is not in force: the engine announced a line at {seen.announced[0]} cells and then split no"
            " layer, so the whole cache is in VRAM."
        )
    return "The tier is not in force as far as the log says: it has no line about one."


def _differences(tier: Tier, seen: _Seen) -> tuple[str, ...]:
    """What is not as planned although all layers are split."""
    found, expected = seen.sizes, tier.sizes
    differences = []
    if seen.announced is not None and seen.announced[0] != tier.line_tokens:
        differences.append(f"The line is at {seen.announced[0]} cells; planned were {tier.line_tokens}.")
    sides = (
        ("VRAM", found.head_bytes, expected.head_bytes),
        ("host memory", found.host_bytes, expected.host_bytes),
    )
    # Where a device has other pages, each part of each layer may be a page off.
    allowance = PARTS * DEVICE_PAGE_BYTES * expected.layers
    for name, is_bytes, planned_bytes in sides:
        if abs(is_bytes - planned_bytes) > allowance:
            differences.append(f"{_mib(is_bytes)} MiB are in {name}; planned were {_mib(planned_bytes)}.")
    if seen.unstaged or not found.staging_bytes:
        differences.append(
            "Host cells are read in place, without staging: beyond the line it is slower than predicted."
        )
    elif found.staging_bytes > expected.staging_bytes + PARTS * DEVICE_PAGE_BYTES:
        staging, planned = _mib(found.staging_bytes), _mib(expected.staging_bytes)
        differences.append(f"{staging} MiB of VRAM are for staging; planned were {planned}.")
    if tier.draft_context_tokens and seen.draft_context_tokens != tier.draft_context_tokens:
        has = seen.draft_context_tokens
        said = (
            "nothing of the draft's context" if has is None else f"that the draft's context has {has} tokens"
        )
        differences.append(f"The engine says {said}; planned were {tier.draft_context_tokens}.")
    return tuple(differences)


def _bytes(mib: str) -> int:
    return int(Decimal(mib) * MIB)


def _mib(size_bytes: int) -> int:
    return round(size_bytes / MIB)


def _printable(text: str) -> str:
    return (
        "".join(character if character.isprintable() else "?" for character in text).strip()
        or "no reason given"
    )
