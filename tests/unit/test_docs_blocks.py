"""Commands are found in the pages of the manual, and nothing else is taken for one."""

from __future__ import annotations

import pytest
from manual.blocks import BadBlockError, blocks, commands

pytestmark = pytest.mark.unit


def found(text: str) -> list[tuple[int, str]]:
    """Line and text of each command."""
    return [(each.line, each.text) for each in commands("page.md", text)]


def test_commands_of_a_shell_block() -> None:
    """Comments and empty lines are none; several lines may be one."""
    text = "# Page\n\n```sh\n# first\none --a   # why\n\ntwo \\\n  --b\nthree 'x\ny'\n```\n\nafter\n"
    assert found(text) == [(5, "one --a   # why"), (7, "two \\\n  --b"), (9, "three 'x\ny'")]


def test_a_here_document_is_one_command() -> None:
    """It ends with its word."""
    assert found("```sh\ncat >f <<'EOF'\nit's\nEOF\nnext\n```\n") == [
        (2, "cat >f <<'EOF'\nit's\nEOF"),
        (5, "next"),
    ]


def test_what_a_console_block_shows_is_no_command() -> None:
    """Only what stands behind a prompt is, with its further lines."""
    text = "```console\n$ one \\\n> --a\nls -l\n> quoted\n...\n$ two\n```\n"
    assert found(text) == [(2, "one \\\n--a"), (7, "two")]


def test_other_blocks_hold_none() -> None:
    """Whatever they look like."""
    assert found("```text\n$ rm -rf /\n```\n\n```toml\na = 1\n```\n") == []


def test_a_block_in_a_list_is_one_too() -> None:
    """Its indent is no part of it."""
    assert found("1. Do it\n\n   ```sh\n   one\n   ```\n") == [(4, "one")]


def test_where_blocks_are() -> None:
    """By their first line of text."""
    (block,) = blocks("page.md", "a\n\n~~~json\n{}\n~~~\n")
    assert (block.line, block.language, block.lines) == (4, "json", ("{}",))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("```sh\none\n", "page.md:1: a block that is not closed"),
        ("text\n\n    one\n", "page.md:3: code by indent"),
        ("```\none\n```\n", "page.md:2: name the language"),
        ("```bash\none\n```\n", "page.md:2: name the language"),
        ("```sh\none \\\n```\n", "page.md:2: the command does not end"),
        ("```sh\none 'x\n```\n", "page.md:2: the command does not end"),
        ("```sh\ncat <<EOF\n```\n", "page.md:2: the command does not end"),
        ("```console\n$ one \\\n$ two\n```\n", "page.md:2: the command does not end"),
        ("```console\nout\n```\n", "page.md:2: a console block begins"),
        ("```console\n```\n", "page.md:2: a console block begins"),
    ],
)
def test_what_is_not_clear_is_an_error(text: str, told: str) -> None:
    """With its place."""
    with pytest.raises(BadBlockError, match=told):
        found(text)
