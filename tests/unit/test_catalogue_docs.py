"""The reference of the catalogue says what entries, profiles and constants say."""

from __future__ import annotations

import itertools
import json
import re
from fractions import Fraction
from pathlib import Path

import pytest

from lllm3090d.checkpoints.catalogue import CatalogueEntry, load_catalogue, packaged_catalogue
from lllm3090d.engines.capabilities import Backend
from lllm3090d.gpus.profiles import VRAM_TOLERANCE_MIB, capacity_profile, known_profiles, named_profile
from lllm3090d.planning import catalogue_price, slots, verdict
from lllm3090d.planning.catalogue_price import PreviewCard, least_vram_mib, token_bytes
from lllm3090d.planning.speeds import shown_speed
from lllm3090d.planning.verdict import Verdict

pytestmark = pytest.mark.unit

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "catalogue.md"


def section(name: str) -> str:
    return PAGE.read_text(encoding="utf-8").split(f"\n## {name}\n", 1)[1].split("\n## ", 1)[0]


def table(name: str) -> list[list[str]]:
    """Rows of the tables of a section, without their heads."""
    lines = section(name).splitlines()
    rows = [
        line
        for before, line in itertools.pairwise(lines)
        if line.startswith("|") and before.startswith("|")  # not the head
    ]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows if "|---" not in row]


def row_of(entry: CatalogueEntry) -> list[str]:
    least = []
    for desktop in (True, False):
        card = PreviewCard(capacity_profile(24576), Backend.VULKAN, desktop_active=desktop)
        least.append(str(least_vram_mib(entry, card) or "none"))
    speed = entry.speeds[0]
    drafted = "" if speed.speculation == "none" else f", {speed.speculation}"
    return [
        f"`{entry.id}`",
        f"{entry.file_bytes / 1e9:.2f}",
        f"{entry.projector_bytes / 1e9:.2f}" if entry.has_projector else "-",
        str(entry.kind),
        str(entry.trained_context_tokens),
        *(f"{float(token_bytes(entry, backend)) / 1024:.3f}" for backend in (Backend.VULKAN, Backend.CUDA)),
        *least,
        f"{speed.tokens_per_s:g}{drafted}",
    ]


def test_every_packaged_model_is_in_the_reference_with_its_figures() -> None:
    assert table("Models") == [row_of(entry) for entry in packaged_catalogue().entries]


def test_every_constant_is_in_the_reference_with_its_value() -> None:
    written = {row[0].strip("`"): float(row[1]) for row in table("Price")}
    scalars = {
        name: float(value)
        for module in (catalogue_price, slots, verdict)
        for name, value in vars(module).items()
        if name.isupper() and isinstance(value, int | float | Fraction)
    }
    imported = {"MAX_SLOTS", "MIB", "PAGE_TOKENS"}
    cuda_only = {
        "BACKEND_FIXED_MIB": float(catalogue_price.BACKEND_FIXED_MIB[Backend.CUDA]),
        "BACKEND_KV_FACTOR": float(catalogue_price.BACKEND_KV_FACTOR[Backend.CUDA]),
    }
    assert written == {name: value for name, value in scalars.items() if name not in imported} | cuda_only


def test_every_known_card_is_in_the_reference() -> None:
    expected = [
        [
            f"`{card.id}`",
            card.name,
            str(card.vram_mib),
            str(card.compute_capability),
            str(card.bandwidth_gb_per_s),
            "yes" if card.measured else "no",
        ]
        for card in known_profiles()
    ]
    assert table("Cards") == expected
    assert f"within {VRAM_TOLERANCE_MIB} MiB" in section("Cards")


def test_every_verdict_is_in_the_reference_in_its_order() -> None:
    assert [row[0].strip("`") for row in table("Slots")] == [str(one) for one in Verdict]


def test_remarks_beside_speeds_are_those_of_the_reference() -> None:
    entry = packaged_catalogue().find("qwen3-8b")
    assert entry is not None
    remarks = []
    for card in ("rtx-3090", "rtx-4090"):
        for backend in (Backend.VULKAN, Backend.ROCM):
            shown = shown_speed(entry.speeds, named_profile(card), backend)
            assert shown is not None
            remarks.append(shown.qualifier)
    assert [row[2] for row in table("Speeds")] == remarks


def test_every_key_is_in_the_reference_and_the_example_is_valid(tmp_path: Path) -> None:
    text = section("Own entries")
    written = [row[0].strip("`") for row in table("Own entries")]
    assert written == list(CatalogueEntry.model_fields)
    example = re.search(r"```json\n(.*?)```", text, re.DOTALL)
    assert example is not None
    file = tmp_path / "catalogue.json"
    file.write_text(example[1], encoding="utf-8")
    found = load_catalogue(file).find("tiny")
    assert found is not None
    assert json.loads(example[1])["models"][0].keys() <= CatalogueEntry.model_fields.keys()
