"""The client's plain parts: exit statuses, checked documents, text for a terminal."""

from __future__ import annotations

import json

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lllm3090ctl import exits, tables, text
from lllm3090ctl.cli import cli
from lllm3090ctl.documents import Document, parse
from lllm3090ctl.failures import PROBLEM_TYPE_PREFIX, Failure, as_failure
from lllm3090ctl.plan_options import CACHE_TYPES
from lllm3090d import errors, wire
from lllm3090d.planning.planner import CacheType

pytestmark = pytest.mark.unit


def test_exit_statuses_are_those_of_the_daemon() -> None:
    """The table is written twice, because the client imports nothing of the daemon."""
    ours = {status.name: int(status) for status in exits.ExitStatus}
    assert ours == {status.name: int(status) for status in errors.ExitStatus}
    assert PROBLEM_TYPE_PREFIX == errors.PROBLEM_TYPE_PREFIX


def test_limits_of_options_are_those_of_the_wire() -> None:
    """What the client rejects as usage is what the daemon would reject, and nothing else."""
    assert set(CACHE_TYPES) == {str(each) for each in CacheType}
    ranges = {
        parameter.name: parameter.type
        for parameter in cli.commands["plan"].params
        if isinstance(parameter.type, click.IntRange)
    }
    assert {"context_tokens", "parallel", "gpu_layers", "draft_tokens", "micro_batch_tokens"} <= set(ranges)
    for name, limits in ranges.items():
        for least_or_most in (limits.min, limits.max):
            wire.PlanBody.model_validate({"model": "m", name: least_or_most})
        for beyond in ((limits.min or 0) - 1, (limits.max or 0) + 1):
            with pytest.raises(ValueError, match=rf"{name}\n.*than or equal"):
                wire.PlanBody.model_validate({"model": "m", name: beyond})


def test_words_of_options_are_those_of_the_wire() -> None:
    """Each choice of the client is one of the daemon, and none is missing."""
    schema = wire.PlanBody.model_json_schema()
    choices = [
        (parameter.name, parameter.type.choices)
        for parameter in cli.commands["plan"].params
        if isinstance(parameter.type, click.Choice)
    ]
    assert len(choices) == 8
    for name, offered in choices:
        (described,) = (part for part in schema["properties"][name]["anyOf"] if part.get("type") != "null")
        words = schema["$defs"][described["$ref"].rsplit("/", 1)[1]] if "$ref" in described else described
        assert sorted(offered) == sorted(words["enum"]), name


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "nothing"),
        (b"<html><body>It works!</body></html>", "<html>"),
        (b'{"a": NaN}', "not JSON"),
        (b"[1, 2]", "not a JSON object"),
        (b"[" * 100_000, "not JSON"),
        (b'{"a": ' + b"1" * 10_000 + b"}", "not JSON"),
        (b"\xff\xfe\x00", "not JSON"),
        (b"\x1b]0;title\x07", r"\x1b"),
    ],
)
def test_garbage_is_a_bad_answer(raw: bytes, says: str) -> None:
    """Whatever is not a JSON object is told as such, with its beginning."""
    with pytest.raises(Failure) as caught:
        parse(raw)
    assert caught.value.problem["code"] == "bad_answer"
    assert says in str(caught.value)
    assert str(caught.value).isprintable()


@given(
    st.dictionaries(
        st.text(), st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
    )
)
def test_parse_keeps_every_member(members: dict[str, object]) -> None:
    """Members that the client does not know reach ``--json`` unchanged."""
    if all(not isinstance(value, float) or abs(value) < 1e300 for value in members.values()):
        assert parse(json.dumps(members).encode()).members == members


def test_members_are_checked() -> None:
    """Types are exact: true is no integer, a missing member is not an empty one."""
    document = Document(
        {"t": "x", "n": 3, "f": 1.5, "b": True, "o": {"i": 1}, "l": [{"i": 1}], "s": ["a"], "z": None}
    )
    assert document.text("t") == "x"
    assert (document.whole("n"), document.real("n"), document.real("f")) == (3, 3.0, 1.5)
    assert document.truth("b") is True
    assert document.child("o").whole("i") == 1
    assert [each.whole("i") for each in document.children("l")] == [1]
    assert document.texts("s") == ("a",)
    assert (document.maybe_text("z"), document.maybe_whole("none"), document.maybe_child("z")) == (
        None,
        None,
        None,
    )
    for read in (
        lambda: document.text("n"),
        lambda: document.text("missing"),
        lambda: document.whole("b"),
        lambda: document.whole("f"),
        lambda: document.real("t"),
        lambda: document.real("b"),
        lambda: document.truth("n"),
        lambda: document.child("l"),
        lambda: document.children("s"),
        lambda: document.texts("l"),
        lambda: document.texts("t"),
        lambda: document.maybe_whole("t"),
    ):
        with pytest.raises(Failure, match="member"):
            read()


@pytest.mark.parametrize(
    ("given_status", "status"), [(5, 5), (0, 1), (256, 1), (-1, 1), (None, 1), ("5", 1), (True, 1), (42, 42)]
)
def test_exit_status_of_a_problem_is_usable(given_status: object, status: int) -> None:
    """A problem never ends in success, and a status of a newer daemon passes."""
    assert as_failure({"title": "t", "exit_status": given_status}).exit_status == status


def test_problem_without_words_is_a_bad_answer() -> None:
    """A document that says nothing is not shown as an empty message."""
    with pytest.raises(Failure, match="not which one"):
        as_failure({"status": 500})


@given(st.text())
def test_clean_text_cannot_steer_a_terminal(anything: str) -> None:
    """No control or format character survives, and ordinary text is not touched."""
    cleaned = text.clean(anything)
    assert cleaned.isprintable()
    cleaned.encode()
    assert cleaned == anything or not anything.isprintable()


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("\x1b[31mred", r"\x1b[31mred"),
        ("\x9b2J", r"\x9b2J"),
        ("a\u202eb", r"a\u202eb"),
        ("\ud800", r"\ud800"),
        ("a\nb\tc", r"a\nb\tc"),
        ("Größe 模型", "Größe 模型"),
    ],
)
def test_clean_shows_what_was_there(raw: str, shown: str) -> None:
    """Escapes are those of Python, so that the name can be told."""
    assert text.clean(raw) == shown


def test_clean_keeps_what_it_is_told() -> None:
    """Tabs in logs, line feeds in messages."""
    assert text.clean("a\tb\x07", keep="\t") == "a\tb\\x07"


@given(st.integers(min_value=1, max_value=1 << 50))
def test_what_is_missing_is_never_shown_as_nothing(size_bytes: int) -> None:
    """Rounded up, and by less than a tenth of a MiB."""
    shown = float(text.mib_up(size_bytes).replace(",", ""))
    assert 0 <= shown - size_bytes / text.MIB <= 0.1001


def test_sizes() -> None:
    """GiB from one GiB on."""
    assert text.size(100 * text.MIB) == "100.0 MiB"
    assert text.size(text.GIB) == "1.0 GiB"
    assert text.mib(24576 * text.MIB) == "24,576.0"


def test_columns_are_aligned() -> None:
    """Numbers to the right, no blanks at the ends of lines."""
    table = text.Table(
        (text.Column("NAME"), text.Column("MIB", right=True), text.Column("X")), (("ab", "1.0", ""),)
    )
    assert tables.align(table) == "NAME  MIB  X\nab    1.0"
