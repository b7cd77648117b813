"""Writes what is shipped and made from the program, or with ``--check`` says what is out of date (status 1)."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

# What the person has chosen for themselves is no default.
for variable in ("XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_DATA_HOME"):
    os.environ.pop(variable, None)

from shipped import bash, fish, pages, zsh  # noqa: E402
from shipped.tree import tree, valued  # noqa: E402

PROJECT = Path(__file__).parents[3]
PACKAGING = PROJECT / "packaging"
STATUSES = PROJECT / "docs" / "reference" / "exit-statuses.md"


def files() -> Mapping[Path, str]:
    """Every file with its text."""
    root = tree()
    with_value = valued(root)
    completions, manual = PACKAGING / "completions", PACKAGING / "man"
    return {
        completions / "lllm3090ctl.bash": bash.script(root, with_value),
        completions / "_lllm3090ctl": zsh.script(root),
        completions / "lllm3090ctl.fish": fish.script(root, with_value),
        manual / "lllm3090ctl.1": pages.client(root, STATUSES.read_text(encoding="utf-8")),
        manual / "lllm3090d.8": pages.daemon(),
        manual / "lllm3090-config.5": pages.config(),
        manual / "org.lllm3090.Manager1.5": pages.bus(),
    }


def main(arguments: list[str]) -> int:
    """Write, or check."""
    if arguments not in ([], ["--check"]):
        sys.stderr.write("usage: python -m shipped [--check]\n")
        return 2
    stale = [
        (path, text)
        for path, text in files().items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    for path, text in stale:
        if arguments:
            sys.stdout.write(f"{path.relative_to(PROJECT)} is out of date: make generated\n")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            sys.stdout.write(f"{path.relative_to(PROJECT)}\n")
    return 1 if stale and arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
