"""The published worked rows, end to end: a stand-in card, its reading, the budget, the plan of a catalogue model.

The rows that charge recurrent states stay with the unit tests: without a header nobody knows these. So do other cards.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.nvml import FUNCTION_NOT_FOUND, FakeCard
from tests.system.rig import DRIVER_MIB, MIB, TOTAL_MIB, Rig, rigged

pytestmark = pytest.mark.system

EXAMPLES = Path(__file__).parents[1] / "data" / "pricing_examples.json.gz"
FALLBACK_MIB = 512  # where the driver does not tell what it keeps
CAPPED = {"vram": "memory", "rope": "model"}


def rows(driver_mib: int) -> tuple[dict[str, Any], ...]:
    """Those of this card."""
    found: Iterable[dict[str, Any]] = json.loads(gzip.decompress(EXAMPLES.read_bytes()))["rows"]
    return tuple(
        row
        for row in found
        if (row["card_vram_mib"], row["driver_reserve_mib"]) == (TOTAL_MIB, driver_mib)
        and row["state_mib_per_sequence"] == 0
        and "model_inputs" not in row
    )


def options(row: dict[str, Any]) -> list[str]:
    """A row as a person would ask for it."""
    asked = [
        row["model"],
        "--backend",
        row["backend"],
        "--desktop" if row["desktop"] else "--headless",
    ]
    slots = row["slots_requested"]
    return asked if slots is None else [*asked, "--parallel", str(slots)]


def body(row: dict[str, Any]) -> dict[str, Any]:
    """The same for the API."""
    wish = {"model": row["model"], "backend": row["backend"], "desktop": row["desktop"]}
    slots = row["slots_requested"]
    return wish if slots is None else {**wish, "parallel": slots}


def told(document: dict[str, Any]) -> dict[str, Any]:
    """A plan, or its refusal, as the rows write it down."""
    if "code" in document:
        details = document["details"]
        most = details.get("largest_parallel")
        return {"fits": False} if most is None else {"refused": True, "most_slots": most}
    return {
        "fits": True,
        "slots": document["parallel"],
        "window": document["window_tokens"],
        "total": document["context_tokens"],
        "capped_by": document["limit"]["by"],
    }


def expected(row: dict[str, Any]) -> dict[str, Any]:
    """What the row says."""
    plan = row["plan"]
    if plan.get("refused"):
        return {"refused": True, "most_slots": plan["most_slots"]}
    if not plan["fits"]:
        return {"fits": False}
    keys = ("fits", "slots", "window", "total")
    return {key: plan[key] for key in keys} | {"capped_by": CAPPED[plan["capped_by"]]}


def check(rig: Rig, driver_mib: int, count: int) -> None:
    chosen = rows(driver_mib)
    assert len(chosen) == count
    wrong = {}
    for row in chosen:
        document = rig.service.request("POST", "/v1/plan", body(row)).json()
        if told(document) != expected(row):
            wrong[row["id"]] = (told(document), expected(row))
        if "code" not in document:
            budget = {line["name"]: line["bytes"] // MIB for line in document["budget"]}
            assert (budget["total"], budget["driver"]) == (TOTAL_MIB, -driver_mib)
    assert wrong == {}
    # The client says the same: of each kind of card the first.
    kinds = {(row["backend"], row["desktop"]): row for row in reversed(chosen)}
    for row in kinds.values():
        assert told(rig.service.ctl_json("plan", *options(row))) == expected(row)


def test_with_what_the_driver_keeps(tmp_path: Path) -> None:
    with rigged(tmp_path, {}) as rig:
        check(rig, DRIVER_MIB, 48)


def test_where_the_driver_does_not_tell_what_it_keeps(tmp_path: Path) -> None:
    with rigged(tmp_path, {}) as rig:
        rig.nvml.write(
            FakeCard(reserved_bytes=0, failures={"nvmlDeviceGetMemoryInfo_v2": FUNCTION_NOT_FOUND})
        )
        rig.restart()
        assert rig.service.request("GET", "/v1/status").json()["card"]["reserved_by_driver_bytes"] is None
        check(rig, FALLBACK_MIB, 36)
