"""Tables at the widths of terminals: what is left out, what is folded, and that names stay whole."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lllm3090ctl import checkpoints, engines, plans, render
from lllm3090ctl.documents import Document
from lllm3090ctl.tables import align, cells, fit
from lllm3090ctl.text import Block, Column, Prose, Table
from lllm3090d import wire
from lllm3090d.planning.quote import Evidence
from lllm3090d.planning.verdict import Verdict
from tests.fakes.control_server import ENGINE, ENGINES, INSTANCE, MODELS, PLAN, PREVIEWED, changed

pytestmark = pytest.mark.unit

WIDTHS = (80, 100, 120)


def catalogued(
    name: str, badges: tuple[str, ...], quantisation: str, slots: int, window: int
) -> wire.ModelView:
    """A row as the catalogue gives it, on a machine that has another card."""
    return changed(
        MODELS.models[0],
        name=name,
        badges=badges,
        size_bytes=17 << 30,
        architecture=None,
        quantisation=quantisation,
        trained_context_tokens=262144,
        kv_bytes_per_token=None,
        state=None,
        on_disk=False,
        download=PREVIEWED.download,
        verdict=Verdict.OK,
        parallel=slots,
        window_tokens=window,
        evidence=Evidence.CATALOGUE,
        speed={
            "tokens_per_s": 54.8,
            "qualifier": "other card, measured on vulkan",
            "card": "rtx-3090",
            "backend": "vulkan",
            "speculation": "mtp",
        },
    )


CATALOGUE = changed(
    MODELS,
    models=(
        changed(MODELS.models[0], speed=None, badges=("dense", "template")),
        catalogued("Qwen3.6-35B-A3B-Q4KS", ("moe",), "UD-Q4_K_S", 1, 67584),
        catalogued("Gemma-4-26B-A4B", ("moe", "vision"), "UD-Q4_K_XL", 4, 262144),
    ),
)


def tables(blocks: Sequence[Block]) -> list[Table]:
    return [block for block in blocks if isinstance(block, Table)]


def view(model: object) -> Document:
    assert isinstance(
        model, wire.Models | wire.Engines | wire.EngineDetails | wire.Instances | wire.PlanView
    )
    return Document(model.model_dump(mode="json"))


@pytest.mark.parametrize("width", WIDTHS)
def test_models_have_a_line_each(width: int) -> None:
    """The columns that a choice is made by are always there, whole."""
    (table,) = tables(checkpoints.models(view(CATALOGUE)))
    text, left_out = fit(table, width)
    head, *rows = text.splitlines()
    assert all(cells(line) <= width for line in (head, *rows))
    assert len(rows) == len(CATALOGUE.models)
    assert {"NAME", "KIND", "QUANT", "VERDICT", "PLAN", "STATE"} <= set(head.split())
    assert not set(head.split()) & set(left_out)
    for row, model in zip(rows, CATALOGUE.models, strict=True):
        assert row.startswith(f"{model.name}  ")
        assert f" {model.quantisation}  " in row
        assert f"  {model.parallel} x {model.window_tokens:,}  " in row
    if width >= 120:
        assert rows[1].endswith("54.8 (other card)  download")
    assert "EVIDENCE" in left_out


def test_a_wide_terminal_has_every_column() -> None:
    (table,) = tables(checkpoints.models(view(CATALOGUE)))
    assert fit(table, 200) == (align(table), ())


def test_a_speed_says_once_where_it_was_measured() -> None:
    """And nothing where there is none."""
    said = "TOKENS/S were measured on RTX 3090 with Vulkan, and are never scaled."
    assert checkpoints.models(view(CATALOGUE)).count(Prose(said)) == 1
    without = changed(CATALOGUE, models=CATALOGUE.models[:1])
    assert Prose(said) not in checkpoints.models(view(without))


def test_a_long_name_leaves_use_and_reserved_in_the_list_of_instances() -> None:
    long = changed(INSTANCE, name="q" * 42)
    (table,) = tables(render.instances(view(wire.Instances(instances=(long,)))))
    text, left_out = fit(table, 80)
    assert max(map(len, text.splitlines())) <= 80
    assert left_out == ("SLOTS", "MEASURED", "UNIT")
    assert "USE" in text


@pytest.mark.parametrize("width", WIDTHS)
def test_tables_of_engines_instances_and_plans_fit(width: int) -> None:
    """Names whole, one line each, where a table has names."""
    instances = wire.Instances(instances=(INSTANCE, changed(INSTANCE, name="Qwen3.6-35B-A3B-Q4KS")))
    named = tables(engines.engines(view(ENGINES))) + tables(render.instances(view(instances)))
    assert len(named) == 2
    for table in named:
        text, _ = fit(table, width)
        rows = text.splitlines()[1:]
        assert [row.split()[0] for row in rows] == [cell for cell, *_ in table.rows]
        assert all(cells(row) <= width for row in rows)
    folded = tables(plans.plan(view(PLAN), explain=True)) + tables(engines.details(view(ENGINE)))
    assert len(folded) == 5
    for table in folded:
        text, left_out = fit(table, width)
        assert left_out == ()
        assert all(cells(line) <= width for line in text.splitlines())


def test_the_least_important_goes_first_and_room_is_used() -> None:
    table = Table(
        (Column("A"), Column("SECOND", drop=2), Column("FIRST", drop=1), Column("LAST", drop=3)),
        (("a", "b", "c", "d"),),
    )
    assert fit(table, 22)[1] == ()
    assert fit(table, 21)[1] == ("FIRST",)
    # Without SECOND there is room for FIRST.
    assert fit(table, 14)[1] == ("SECOND",)
    assert fit(table, 7)[1] == ("SECOND", "FIRST")
    assert fit(table, 1)[1] == ("SECOND", "FIRST", "LAST")


def test_only_free_text_is_folded() -> None:
    """Between words; a name that is too long makes the line too long instead."""
    table = Table((Column("NAME"), Column("TEXT", least=8)), (("n" * 30, "one two three fourteen"),))
    text, left_out = fit(table, 20)
    assert left_out == ()
    assert text.splitlines()[1:] == [
        "n" * 30 + "  one two",
        " " * 32 + "three",
        " " * 32 + "fourteen",
    ]


def test_a_word_that_is_too_long_loses_nothing() -> None:
    table = Table((Column("TEXT", least=4),), (("abcdefghij kl",),))
    assert fit(table, 4)[0].splitlines() == ["TEXT", "abcd", "efgh", "ij", "kl"]


def test_wide_characters_take_two_cells() -> None:
    """Columns stay aligned, and a combining mark takes none."""
    assert (cells("模型"), cells("e\u0301"), cells("ab")) == (4, 1, 2)
    assert align(Table((Column("A"), Column("B")), (("模型", "x"), ("abc", "y")))).splitlines() == [
        "A     B",
        "模型  x",
        "abc   y",
    ]


@given(
    st.lists(st.tuples(st.text("ab 模", max_size=30), st.text("cd ", max_size=30)), min_size=1, max_size=4),
    st.integers(1, 60),
)
def test_nothing_is_lost_at_any_width(rows: list[tuple[str, str]], width: int) -> None:
    """Every letter is drawn, and a table that can be folded so far has no line that is too long."""
    table = Table((Column("X", least=5), Column("Y", least=6)), tuple(rows))
    text, left_out = fit(table, width)
    assert left_out == ()
    for letter in "abcd模":
        assert text.count(letter) == sum(cell.count(letter) for row in rows for cell in row)
    assert all(cells(line) <= max(width, 5 + 2 + 6) for line in text.splitlines())
