"""The preview of the catalogue against every worked row of the published arithmetic, corrected where it is flawed."""

from __future__ import annotations

import gzip
import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from lllm3090d.checkpoints.catalogue import AttentionShape, CatalogueEntry, ModelKind, packaged_catalogue
from lllm3090d.engines.capabilities import Backend
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.profiles import capacity_profile
from lllm3090d.planning.catalogue_price import (
    Q8_0_RATIO,
    Preview,
    PreviewCard,
    least_vram_mib,
    load_need_bytes,
    pool_tokens,
    preview,
    spare_bytes,
    startup_need_bytes,
    token_bytes,
)
from lllm3090d.planning.quote import Place
from lllm3090d.planning.slots import SlotPolicy
from lllm3090d.planning.units import MIB
from lllm3090d.planning.verdict import Verdict

pytestmark = pytest.mark.unit

EXAMPLES = Path(__file__).parents[1] / "data" / "pricing_examples.json.gz"


@cache
def examples() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(gzip.decompress(EXAMPLES.read_bytes()))
    return found


def rows(kind: str) -> list[Any]:
    return [pytest.param(row, id=row.get("id", row.get("model"))) for row in examples()[kind]]


def entry_of(row: dict[str, Any]) -> CatalogueEntry:
    """The packaged entry, or the model that a row brings along."""
    found = packaged_catalogue().find(row["model"])
    if found is not None:
        return found
    given = row["model_inputs"]
    layers = given["dims"]["full_attention_layers"]
    assert not given["mmproj"]
    assert not given["mtp"]
    return CatalogueEntry(
        id=given["name"],
        name=given["name"],
        repository="nobody/nothing",
        file="model.gguf",
        quantisation="Q4_K_M",
        file_bytes=round(given["size_gb"] * 10**9),
        kind=ModelKind.DENSE,
        total_parameters_b=30,
        active_parameters_b=30,
        trained_context_tokens=given["max_ctx"],
        block_count=layers,
        # The row gives K and V of all layers together: values of both, 2 bytes each.
        full_attention=AttentionShape(
            layers=layers, kv_heads=1, head_length=given["kv_kib_per_token"] * 1024 // (layers * 4)
        ),
    )


def card_of(row: dict[str, Any], vram_mib: int | None = None) -> PreviewCard:
    return PreviewCard(
        profile=capacity_profile(row["card_vram_mib"] if vram_mib is None else vram_mib),
        backend=Backend(row["backend"]),
        driver_reserve_mib=row["driver_reserve_mib"],
        desktop_active=row["desktop"],
    )


def state_bytes(row: dict[str, Any]) -> int:
    return round(float(row["state_mib_per_sequence"]) * MIB)


def plan_of(found: Preview) -> dict[str, Any]:
    """As the rows write a plan down."""
    slots = found.slots
    capped_by = ("rope" if slots.is_limited_by_model else "vram") if slots.fits else None
    return {
        "fits": slots.fits,
        "slots": slots.slots,
        "window": slots.window_tokens,
        "total": slots.total_tokens,
        "capped_by": capped_by,
    }


def test_the_examples_are_all_there() -> None:
    assert [len(examples()[kind]) for kind in ("rows", "ladders", "min_vram", "needs")] == [132, 4, 9, 9]
    flawed = [row for row in examples()["rows"] if row["flawed"]]
    assert len(flawed) == 3
    assert all(row["upstream_plan"] != row["plan"] for row in flawed)
    named = {row["model"] for row in examples()["rows"] if "model_inputs" not in row}
    assert named == {entry.name for entry in packaged_catalogue().entries}


@pytest.mark.parametrize("row", rows("rows"))
def test_price_spare_and_pools(row: dict[str, Any]) -> None:
    entry, card = entry_of(row), card_of(row)
    each = token_bytes(entry, card.backend)
    assert float(each) / 1024 == pytest.approx(row["price_kib_per_token"], abs=0.001)
    spare = spare_bytes(entry, card, row["slots_requested"] or 1, state_bytes(row))
    assert math.trunc(spare / MIB) == row["spare_mib"]
    assert pool_tokens(spare, each) == row["pool_q8"]
    assert pool_tokens(spare, each / Q8_0_RATIO) == row["pool_f16"]


@pytest.mark.parametrize("row", rows("rows"))
def test_plans(row: dict[str, Any]) -> None:
    entry, card, asked = entry_of(row), card_of(row), row["slots_requested"]

    def planned(policy: SlotPolicy) -> Preview:
        return preview(entry, card, policy, parallel=asked, state_bytes=state_bytes(row))

    if row["plan"].get("refused"):
        with pytest.raises(LlmError) as caught:
            planned(SlotPolicy.BALANCED)
        assert caught.value.code is ErrorCode.INSUFFICIENT_MEMORY
        assert caught.value.details["largest_parallel"] == row["plan"]["most_slots"]
        return
    found = planned(SlotPolicy.BALANCED)
    assert plan_of(found) == row["plan"]
    assert (found.pool_tokens, found.pool_f16_tokens) == (row["pool_q8"], row["pool_f16"])
    assert found.spare_mib == row["spare_mib"]
    if "plan_window_policy" in row:
        assert plan_of(planned(SlotPolicy.WINDOW)) == row["plan_window_policy"]


@pytest.mark.parametrize("ladder", rows("ladders"))
def test_ladders(ladder: dict[str, Any]) -> None:
    entry = entry_of(ladder)
    for point in ladder["points"]:
        card = card_of(ladder, point["card_vram_mib"])
        for policy, expected in (
            (SlotPolicy.BALANCED, point),
            (SlotPolicy.WINDOW, point["window_policy"]),
        ):
            found = plan_of(preview(entry, card, policy, state_bytes=state_bytes(ladder)))
            assert {key: found[key] for key in ("slots", "window", "total")} == {
                key: expected[key] for key in ("slots", "window", "total")
            }, (policy, point["card_vram_mib"])


@pytest.mark.parametrize("row", rows("min_vram"))
def test_least_vram(row: dict[str, Any]) -> None:
    entry = entry_of(row)
    for desktop, key in ((True, "desktop_mib"), (False, "headless_mib")):
        card = PreviewCard(capacity_profile(24576), Backend(row["backend"]), desktop_active=desktop)
        assert least_vram_mib(entry, card, state_bytes(row)) == row[key]


@pytest.mark.parametrize("row", rows("needs"))
def test_needs(row: dict[str, Any]) -> None:
    entry, backend = entry_of(row), Backend(row["backend"])
    card = PreviewCard(capacity_profile(24576), backend)
    size = (row["total_ctx"], row["slots"], state_bytes(row))
    load = load_need_bytes(entry, backend, *size)
    startup = startup_need_bytes(entry, card, *size)
    assert load / MIB == pytest.approx(row["load_need_mib"], abs=0.01)
    assert startup / MIB == pytest.approx(row["startup_need_mib"], abs=0.01)


@pytest.mark.parametrize("row", [row for row in rows("rows") if not row.values[0]["plan"].get("refused")])
def test_the_quote_is_the_startup_need_and_fits(row: dict[str, Any]) -> None:
    entry, card = entry_of(row), card_of(row)
    found = preview(
        entry, card, SlotPolicy.BALANCED, parallel=row["slots_requested"], state_bytes=state_bytes(row)
    )
    total = found.quote.total_bytes(Place.CARD)
    if found.verdict is Verdict.TOO_BIG:
        assert total > card.grantable_bytes
        return
    slots = found.slots
    assert total == startup_need_bytes(entry, card, slots.total_tokens, slots.slots, state_bytes(row))
    assert total <= card.grantable_bytes
