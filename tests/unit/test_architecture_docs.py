"""The reference of architectures says what the table of rules says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lllm3090d.checkpoints.architectures import ARCHITECTURES, REFUSED, UNRULED, Graph

pytestmark = pytest.mark.unit

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "architectures.md"


def named(section: str) -> list[str]:
    text = PAGE.read_text(encoding="utf-8").split(f"\n## {section}\n", 1)[1].split("\n## ", 1)[0]
    rows = [line for line in text.splitlines() if line.startswith("|")]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


def test_every_rule_is_in_the_reference_once() -> None:
    priced = {name for name, rule in ARCHITECTURES.items() if rule.graph is not Graph.NONE}
    assert sorted(named("Planned")) == sorted(priced)
    encoders = {name for name, rule in ARCHITECTURES.items() if not rule.has_memory} - priced
    assert sorted(named("Known, but not planned")) == sorted(encoders)
    by_engine = set(ARCHITECTURES) - priced - encoders
    assert sorted(named("Priced by the engine alone")) == sorted(by_engine | set(UNRULED))


def test_every_refusal_is_in_the_reference_with_its_reason() -> None:
    assert sorted(named("Refused")) == sorted(REFUSED)
    text = PAGE.read_text(encoding="utf-8")
    for name, reason in (REFUSED | UNRULED).items():
        assert f"| `{name}` | {reason} |" in text
