"""What real builds said, captured from their programs: ``tests/data/engines``, each file says of which.

The texts are those of llama.cpp (MIT licence, the ggml authors).
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

DIRECTORY = Path(__file__).parents[1] / "data" / "engines"
BUILDS = ("b10068", "b10092", "b10434", "b11434", "debian-11669", "debian-11669-llvmpipe")
WITH_DRY_RUN = ("b11434", "debian-11669", "debian-11669-llvmpipe")


@dataclass(frozen=True)
class Said:
    """One command's answer."""

    status: int
    stdout: str
    stderr: str

    @property
    def text(self) -> str:
        return self.stdout + self.stderr


@cache
def answers(name: str) -> dict[str, Said]:
    """All that was captured under a name, by command."""
    with gzip.open(DIRECTORY / f"{name}.json.gz", "rt", encoding="utf-8") as file:
        document = json.load(file)
    return {
        command: Said(answer["status"], answer["stdout"], answer["stderr"])
        for command, answer in document["answers"].items()
    }
