"""Whether a build that was compiled for one GPU architecture can run on a card. Pure.

What is known of such a build is its directory's name: ``b11434-cuda-sm86``. By NVIDIA's rules machine code (SASS) of an
architecture runs on cards of the same major compute capability and the same or a higher minor one; intermediate code
(PTX) is compiled by the driver for any card of the same or a higher capability. Whether a build has PTX beside its
SASS the name does not tell: ``CMAKE_CUDA_ARCHITECTURES=86`` gives both, ``86-real`` and ``native`` SASS alone. So a
card below the architecture can never run it, and one of a higher major capability perhaps. Code with a letter behind
its number is never carried over: ``a`` is for that one capability, ``f`` for cards of its major one.
"""

from __future__ import annotations

import enum
import re

from lllm3090d.engines.capabilities import Build
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.readings import Card

ARCHITECTURE = re.compile(r"sm(?P<major>\d{1,2})(?P<minor>\d)(?P<letter>[a-z]?)")
CAPABILITY = re.compile(r"(?P<major>\d{1,2})\.(?P<minor>\d{1,2})")
ONE_CARD, ONE_MAJOR = "a", "f"


class CodeFit(enum.StrEnum):
    """Whether a build's code runs on a card."""

    RUNS = "runs"
    MAYBE = "maybe"  # only if it has intermediate code, which the driver compiles at the first start
    NEVER = "never"


def code_fit(architecture: str | None, capability: str | None) -> CodeFit | None:
    """Whether code of an architecture runs on a card; None where either is unknown.

    Args:
        architecture: such as ``sm86`` or ``sm90a``; None for a build whose name says none.
        capability: of the card, such as ``8.6``; None where nobody tells.
    """
    code = ARCHITECTURE.fullmatch(architecture or "")
    card = CAPABILITY.fullmatch(capability or "")
    if code is None or card is None or code["letter"] not in {"", ONE_CARD, ONE_MAJOR}:
        return None
    built = (int(code["major"]), int(code["minor"]))
    has = (int(card["major"]), int(card["minor"]))
    if code["letter"] == ONE_CARD:
        return CodeFit.RUNS if has == built else CodeFit.NEVER
    if has < built:
        return CodeFit.NEVER
    if has[0] == built[0]:
        return CodeFit.RUNS
    return CodeFit.NEVER if code["letter"] == ONE_MAJOR else CodeFit.MAYBE


def best_fit(architecture: str | None, capabilities: tuple[str | None, ...]) -> CodeFit | None:
    """Of the cards of a machine, the one on which it runs best; None where one is unknown that might do better."""
    fits = [code_fit(architecture, capability) for capability in capabilities]
    if CodeFit.RUNS in fits:
        return CodeFit.RUNS
    if not fits or None in fits:
        return None
    return CodeFit.MAYBE if CodeFit.MAYBE in fits else CodeFit.NEVER


def can_never_run(build: Build, card: Card) -> bool:
    """The build has no code for the card, as far as its name says what it has."""
    return code_fit(build.gpu_architecture, card.compute_capability) is CodeFit.NEVER


def check_code(build: Build, card: Card) -> None:
    """Refuse a launch whose engine has no code for its card; it would load the model and die at the first kernel.

    Raises:
        LlmError: ENGINE_UNUSABLE.
    """
    if not can_never_run(build, card):
        return
    capability = card.compute_capability or ""
    raise LlmError(
        ErrorCode.ENGINE_UNUSABLE,
        f"{build.name or build.server} was compiled for {build.gpu_architecture}, as its name says, and the"
        f" {card.name} has compute capability {capability}: it has no code for that card.",
        hint="Choose another build (lllm3090ctl engine list, lllm3090ctl engine select NAME), or compile llama.cpp with"
        f" -DCMAKE_CUDA_ARCHITECTURES={capability.replace('.', '')} into a directory of engines_dir with sm"
        f"{capability.replace('.', '')} in its name.",
        path=str(build.server),
        gpu_architecture=build.gpu_architecture,
        compute_capability=card.compute_capability,
        card=card.uuid,
    )
