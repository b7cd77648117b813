"""Keys, values and texts of ``lllm3090ctl config``: what changes is what was meant, and nothing else does."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lllm3090ctl.config_keys import Shape, UnclearError, path_of, value_of
from lllm3090ctl.config_text import with_value, without

pytestmark = pytest.mark.unit

MINE = """# mine
batch_tokens = 64  # small
gateway = true

# names
[aliases]
q = "Q"  # the usual one

# words
[extra_arguments]
"*" = ["--threads", "8"]
"""


@pytest.mark.parametrize(
    ("path", "value", "old", "new"),
    [
        (("batch_tokens",), 128, "batch_tokens = 64  # small", "batch_tokens = 128  # small"),
        (("cache_type",), "f16", "gateway = true\n", 'gateway = true\ncache_type = "f16"\n'),
        (("aliases", "z.z"), "Z", "# the usual one\n", '# the usual one\n"z.z" = "Z"\n'),
        (
            ("aliases",),
            {"q": "R", "x": "X"},
            'q = "Q"  # the usual one\n',
            'q = "R"  # the usual one\nx = "X"\n',
        ),
        (("extra_arguments", "*"), ["-v"], '["--threads", "8"]', '["-v"]'),
        (("idle_ttl_of", "Q3.8"), 600, '"8"]\n', '"8"]\n\n[idle_ttl_of]\n"Q3.8" = 600\n'),
    ],
)
def test_a_value_comes_where_it_belongs(path: tuple[str, ...], value: Any, old: str, new: str) -> None:
    assert with_value(MINE, path, value) == MINE.replace(old, new)


@pytest.mark.parametrize(
    ("text", "path", "value", "result"),
    [
        ("", ("a",), 1, "a = 1\n"),
        ("# c", ("a",), 1, "# c\na = 1\n"),
        ("a = 1", ("b",), 2, "a = 1\nb = 2\n"),
        ("# head\n\n# of t\n[t]\nx = 1\n", ("a",), 1, "# head\n\na = 1\n\n# of t\n[t]\nx = 1\n"),
        ("t = {}", ("t", "n", "m"), 1, "t = {n = {m = 1}}"),
        ("[t.a]\nm = 1\n", ("t", "b.c", "m"), 2, '[t.a]\nm = 1\n\n[t."b.c"]\nm = 2\n'),
        ("t.x = 1\n", ("t", "y"), 2, "t.x = 1\nt.y = 2\n"),
        ("[t]\n# nothing yet\n", ("t", "y"), 2, "[t]\ny = 2\n# nothing yet\n"),
    ],
)
def test_a_value_in_files_of_all_kinds(text: str, path: tuple[str, ...], value: Any, result: str) -> None:
    assert with_value(text, path, value) == result


def test_taking_out_leaves_the_rest() -> None:
    assert without(MINE, ("batch_tokens",)) == MINE.replace("batch_tokens = 64  # small\n", "")
    assert without(MINE, ("aliases", "q")) == MINE.replace('q = "Q"  # the usual one\n', "")
    for path in (("cache_type",), ("aliases", "x"), ("idle_ttl_of", "x"), ("gateway", "x")):
        assert without(MINE, path) == MINE


@pytest.mark.parametrize(
    ("text", "path", "left"),
    [
        ('a = 1\n\n[m."Q-1.5"]\np = 2\n\n[t]\nq = 1\n', ("m", "Q-1.5", "p"), "a = 1\n\n[t]\nq = 1\n"),
        ('a = 1\n\n[m."Q-1.5"]\np = 2\n\n[t]\nq = 1\n', ("m", "Q-1.5"), "a = 1\n\n[t]\nq = 1\n"),
        ("[m]\n[m.x]\na = 1\n[m.y]\nb = 1\n", ("m", "x"), "[m]\n[m.y]\nb = 1\n"),
        ("[m.x]\na = 1\n\n# about t\n[t]\nb = 1\n", ("m", "x"), "# about t\n[t]\nb = 1\n"),
        ("[t]\nb = 1\n[m.x]\na = 1\n\n# the end\n", ("m", "x"), "[t]\nb = 1\n# the end\n"),
        ("[m.x]\n# mine\na = 1\n", ("m", "x", "a"), "[m.x]\n# mine\n"),
        ("[m.x]\na = 1\n\n# about t\n[t]\n", ("m", "x", "a"), "# about t\n[t]\n"),
        ("m = {a = {b = 1}, c = 2}\n", ("m", "a", "b"), "m = { c = 2}\n"),
        ("b = 1\nm.a = 1\n", ("m", "a"), "b = 1\n"),
    ],
)
def test_tables_that_are_empty_then_go_too(text: str, path: tuple[str, ...], left: str) -> None:
    assert without(text, path) == left


@pytest.mark.parametrize("text", ["a = ", "a = 1\na = 2\n", "[[a]]\n[a]\n"])
def test_what_is_no_toml_is_not_changed(text: str) -> None:
    with pytest.raises(UnclearError, match="no TOML"):
        with_value(text, ("b",), 1)
    with pytest.raises(UnclearError, match="no TOML"):
        without(text, ("a",))


def test_a_value_below_one_that_is_no_table() -> None:
    with pytest.raises(UnclearError, match="gateway is no table"):
        with_value(MINE, ("gateway", "x"), 1)


names = st.text(st.sampled_from("ab.-_ é\"'#]"), min_size=1, max_size=5)
words = st.text(st.characters(blacklist_categories=("Cs", "Cc")), max_size=8)
scalars = words | st.integers(-(2**62), 2**62) | st.booleans() | st.lists(words, max_size=3)
comments = st.lists(st.text(st.characters(blacklist_categories=("Cs", "Cc")), max_size=10), max_size=2)


def written(name: str) -> str:
    escaped = name.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def literal(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ", ".join(map(literal, value)) + "]"
    return written(value) if isinstance(value, str) else str(value)


@st.composite
def files(draw: st.DrawFn) -> str:
    """Lines and tables with comments before, behind and between them."""
    lines: list[str] = []
    for key in draw(st.lists(names, max_size=3, unique=True)):
        lines += [f"#{each}" for each in draw(comments)]
        lines.append(
            f"{written('k' + key)} = {literal(draw(scalars))}{draw(st.sampled_from(['', ' # behind']))}"
        )
    for table in draw(st.lists(names, max_size=3, unique=True)):
        lines += ["", *(f"#{each}" for each in draw(comments)), f"[{written('t' + table)}]"]
        for key in draw(st.lists(names, max_size=3, unique=True)):
            lines += [f"#{each}" for each in draw(comments)]
            lines.append(f"{written(key)} = {literal(draw(scalars))}")
    return "\n".join(lines) + draw(st.sampled_from(["", "\n"]))


def kept_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("#")]


@given(files(), names, names | st.none(), scalars)
def test_any_change_is_the_only_one_and_can_be_undone(
    text: str, key: str, below: str | None, value: Any
) -> None:
    """Every other line is as it was, in its order; and taking out what was added gives the same values again."""
    path = ("k" + key,) if below is None else ("t" + key, below)
    before = tomllib.loads(text)
    changed = with_value(text, path, value)
    after = tomllib.loads(changed)
    holder = after if below is None else after[path[0]]
    assert holder[path[-1]] == value
    assert kept_lines(changed) == kept_lines(text)
    had = before.get(path[0], {}) if below is not None else before
    if path[-1] not in had:
        rest = iter(changed.splitlines())
        assert all(line in rest for line in text.splitlines())  # in their order, with others between them
        undone = without(changed, path)
        assert kept_lines(undone) == kept_lines(text)
        # A table that was empty before is one that nobody misses.
        assert {key: each for key, each in tomllib.loads(undone).items() if each != {}} == {
            key: each for key, each in before.items() if each != {}
        }


# --- keys and values on the command line ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "depth", "path"),
    [
        ("cache_type", 0, ("cache_type",)),
        ("aliases.qwen", 1, ("aliases", "qwen")),
        ("idle_ttl_of.Qwen3.8-27B", 1, ("idle_ttl_of", "Qwen3.8-27B")),
        ("gateway_reasoning.Qwen3.8-27B.efforts", 2, ("gateway_reasoning", "Qwen3.8-27B", "efforts")),
        ("gateway_reasoning.qwen", 2, ("gateway_reasoning", "qwen")),
        ("gateway_reasoning.'Qwen3.8'", 2, ("gateway_reasoning", "Qwen3.8")),
        ('aliases."a b"', 1, ("aliases", "a b")),
        ("extra_arguments.*", 1, ("extra_arguments", "*")),
    ],
)
def test_keys(text: str, depth: int, path: tuple[str, ...]) -> None:
    assert path_of(text, depth) == path


@pytest.mark.parametrize("text", ["", ".", "aliases.", ".x", "a\nb = 1", 'aliases."a', "aliases.'a'b"])
def test_bad_keys(text: str) -> None:
    with pytest.raises(UnclearError, match="is no key"):
        path_of(text, 1)


@pytest.mark.parametrize(
    ("words", "kind", "value"),
    [
        (["8"], "whole number", 8),
        (["1_000"], "whole number", 1000),
        (["1.5"], "whole number", "1.5"),  # for the daemon's rules to refuse
        (["1.5"], "number", 1.5),
        (["600"], "number", 600),
        (["soon"], "number", "soon"),
        (["true"], "flag", True),
        (["OFF"], "flag", False),
        (["perhaps"], "flag", "perhaps"),
        (["8"], "text", "8"),
        (["--threads", "8"], "words", ["--threads", "8"]),
        (['{a = "b"}'], "table", {"a": "b"}),
    ],
)
def test_values(words: list[str], kind: str, value: Any) -> None:
    found = value_of(words, Shape(kind))
    assert found == value and type(found) is type(value)


def test_bad_values() -> None:
    with pytest.raises(UnclearError, match="one value"):
        value_of(["a", "b"], Shape("text"))
    with pytest.raises(UnclearError, match="no table"):
        value_of(["{a"], Shape("table"))


def test_shapes_of_what_is_in_tables() -> None:
    rules = Shape("table", members={"floor": Shape("whole number")})
    shape = Shape("table", element=rules)
    assert shape.below(("any", "floor")) == Shape("whole number")
    assert shape.below(("any", "other")) == Shape("text")
    assert shape.below(()) is shape
