"""Clocks jump: nothing is decided by the wall clock but what is about calendar time itself."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import lllm3090d

pytestmark = pytest.mark.unit
PACKAGE = Path(lllm3090d.__file__).parent
WALL = {
    ("time", "time"),
    ("time", "time_ns"),
    ("datetime", "now"),
    ("datetime", "utcnow"),
    ("datetime", "today"),
}
# Each with what a jump costs there.
ALLOWED = {
    "serving/moments.py": "when something happened, for a person; events are in order by their numbers",
    "serving/statistics.py": "since when is counted, for a person",
    "serving/learning.py": "the date of a measurement",
    "serving/calibrations.py": "want of memory is believed for 30 days; after a jump for less or more",
    "doctor/surroundings.py": "whether the clock is right",
    "serving/log_files.py": "files of ended runs are removed by their age, beside their number",
    "serving/model_files.py": "compared with the times of files, which are the wall clock's",
    "store.py": "the date of a change to the file, for a person",
}


def uses(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if (node.value.id, node.attr) in WALL:
                yield f"{node.value.id}.{node.attr}"
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            yield from (
                f"from time import {each.name}" for each in node.names if each.name in {"time", "time_ns"}
            )


def test_who_reads_the_wall_clock() -> None:
    found = {
        str(path.relative_to(PACKAGE)): names
        for path in sorted(PACKAGE.rglob("*.py"))
        if (names := list(uses(ast.parse(path.read_text(encoding="utf-8")))))
    }
    assert {path: names for path, names in found.items() if path not in ALLOWED} == {}


def test_what_counts_as_reading_it() -> None:
    assert list(uses(ast.parse("import time\ntime.time()\ntime.monotonic()\ndatetime.now(UTC)"))) == [
        "time.time",
        "datetime.now",
    ]
    assert list(uses(ast.parse("from time import monotonic, time"))) == ["from time import time"]
