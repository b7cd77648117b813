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


def write_program(program: Path, said: dict[str, Said]) -> Path:
    """A script that says what was captured, by its first argument; ``*`` is any. A negative status is a signal."""
    cases = []
    for number, (argument, answer) in enumerate(said.items()):
        for stream, text in (("out", answer.stdout), ("err", answer.stderr)):
            Path(f"{program}.{number}.{stream}").write_text(text, encoding="utf-8", newline="")
        end = f"exit {answer.status}" if answer.status >= 0 else f"ulimit -c 0; kill {answer.status} $$"
        cases.append(f'{argument}) cat "$0.{number}.out"; cat "$0.{number}.err" >&2; {end};;\n')
    cases.sort(key=lambda case: case.startswith("*"))
    text = f'#!/bin/sh\necho "$1" >> "$0.calls"\ncase $1 in\n{"".join(cases)}*) exit 97;;\nesac\n'
    program.write_text(text, encoding="utf-8")
    program.chmod(0o755)
    return program


@cache
def answers(name: str) -> dict[str, Said]:
    """All that was captured under a name, by command."""
    with gzip.open(DIRECTORY / f"{name}.json.gz", "rt", encoding="utf-8") as file:
        document = json.load(file)
    return {
        command: Said(answer["status"], answer["stdout"], answer["stderr"])
        for command, answer in document["answers"].items()
    }
