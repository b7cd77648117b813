"""A program that says that it has begun and goes on when it is let: to have it hang for as long as a test needs."""

from __future__ import annotations

import os
from pathlib import Path


class Gate:
    """The program.

    Args:
        program: where it is written.
        text: what it does once it was let go, a line of shell.
        first: what it does before, such as ending on some arguments.
    """

    def __init__(self, program: Path, text: str, *, first: str = ":") -> None:
        program.parent.mkdir(parents=True, exist_ok=True)
        self.program = program
        self._began, self._go = Path(f"{program}.began"), Path(f"{program}.go")
        self._log = Path(f"{program}.log")
        os.mkfifo(self._began)
        os.mkfifo(self._go)
        program.write_text(
            f'#!/bin/sh\n{first}\necho x >> "$0.log"\necho > "$0.began"\nread word < "$0.go"\n{text}\n',
            encoding="utf-8",
        )
        program.chmod(0o755)

    def wait_for_one(self) -> None:
        """Until one has begun; each is seen once."""
        self._began.read_text()

    def let_go(self) -> None:
        """The one that has begun goes on."""
        self._go.write_text("go\n")

    def passed(self) -> int:
        """How many have begun at all."""
        return len(self._log.read_text().splitlines()) if self._log.exists() else 0
