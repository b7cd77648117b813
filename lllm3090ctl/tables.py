"""Tables as lines: whole, or fitted to the width of a terminal. Pure.

On a terminal columns that matter least are left out, free text is folded, and names are neither cut nor folded:
where they alone are wider than the terminal, the lines are.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence, Set

from lllm3090ctl.text import GAP, Column, Table


def align(table: Table) -> str:
    """The table as lines with aligned columns, without a trailing line feed."""
    return "\n".join(_lines(table, _natural(table)))


def fit(table: Table, width: int) -> tuple[str, tuple[str, ...]]:
    """The table as lines for a terminal, and the titles of the columns that were left out.

    Args:
        table: any.
        width: of the terminal, in cells.
    """
    kept = {i for i, column in enumerate(table.columns) if not column.drop}
    for i in sorted(set(range(len(table.columns))) - kept, key=lambda i: -table.columns[i].drop):
        if _least(_only(table, kept | {i})) <= width:
            kept.add(i)
    left_out = tuple(column.title for i, column in enumerate(table.columns) if i not in kept)
    table = _only(table, kept)
    widths, floors = _natural(table), _floors(table)
    while sum(widths) + _gaps(table) > width:
        folding = [i for i, floor in enumerate(floors) if widths[i] > floor]
        if not folding:
            break
        widths[max(folding, key=lambda i: widths[i])] -= 1
    return "\n".join(_lines(table, widths)), left_out


def cells(text: str) -> int:
    """How many cells of a terminal a text without control characters takes."""
    if text.isascii():
        return len(text)
    return sum(_cells(character) for character in text)


def _cells(character: str) -> int:
    if unicodedata.category(character) in {"Mn", "Me"}:
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def _natural(table: Table) -> list[int]:
    rows = (_titles(table), *table.rows)
    return [max(cells(row[i]) for row in rows) for i in range(len(table.columns))]


def _floors(table: Table) -> list[int]:
    """The least width of each column: of one that folds its own, of others all that is in it."""
    return [
        min(natural, max(column.least, cells(column.title))) if column.least else natural
        for natural, column in zip(_natural(table), table.columns, strict=True)
    ]


def _least(table: Table) -> int:
    return sum(_floors(table)) + _gaps(table)


def _gaps(table: Table) -> int:
    return len(GAP) * (len(table.columns) - 1)


def _titles(table: Table) -> tuple[str, ...]:
    return tuple(column.title for column in table.columns)


def _only(table: Table, kept: Set[int]) -> Table:
    """The table with some of its columns."""
    return Table(
        tuple(column for i, column in enumerate(table.columns) if i in kept),
        tuple(tuple(cell for i, cell in enumerate(row) if i in kept) for row in table.rows),
    )


def _lines(table: Table, widths: Sequence[int]) -> list[str]:
    lines = []
    for row in (_titles(table), *table.rows):
        folded = [
            fold(cell, width) if column.least else [cell]
            for cell, width, column in zip(row, widths, table.columns, strict=True)
        ]
        for number in range(max(map(len, folded))):
            parts = (
                _padded(lines_of_cell[number] if number < len(lines_of_cell) else "", width, column)
                for lines_of_cell, width, column in zip(folded, widths, table.columns, strict=True)
            )
            lines.append(GAP.join(parts).rstrip())
    return lines


def _padded(text: str, width: int, column: Column) -> str:
    blanks = " " * (width - cells(text))
    return blanks + text if column.right else text + blanks


def fold(text: str, width: int) -> list[str]:
    """Lines of at most so many cells, broken between words, or within words that are longer."""
    lines, line = [], ""
    for each in text.split(" "):
        word = each
        joined = f"{line} {word}" if line else word
        if cells(joined) <= width:
            line = joined
            continue
        if line:
            lines.append(line)
        while cells(word) > width:
            cut = len(word)
            while cut > 1 and cells(word[:cut]) > width:
                cut -= 1
            lines.append(word[:cut])
            word = word[cut:]
        line = word
    return [*lines, line]
