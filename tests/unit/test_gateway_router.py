"""Properties of the router: which model and which address a request means, whatever is asked."""

from __future__ import annotations

import json
import string
import urllib.parse
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lllm3090d.checkpoints.library import Checkpoint
from lllm3090d.checkpoints.resolve import resolve
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gateway import dialects
from lllm3090d.gateway.naming import LONGEST_NAME, meant, name_wanted
from lllm3090d.gateway.routes import (
    CLOSED,
    READ_ONLY,
    ROUTES,
    UPSTREAM,
    Dialect,
    Duty,
    Route,
    Where,
    dialect_of,
    find,
)

pytestmark = pytest.mark.unit

KNOWN = ("qwen3.8-27b", "qwen3.8-27b-q4", "gemma-3-270m", "SmolLM2-135M-Instruct", "[odd]*name?", "größe")
HOSTILE = (
    "../../etc/passwd",
    "qwen3.8-27b/../x",
    "a\r\nX-Injected: 1",
    "\x00",
    "\x1b[31mred",
    "\ud800",
    "\u202eevil",
    "*",
    "[a-z]*",
    "?" * 300,
    "%2e%2e%2f",
    "qwen" * 200,
    "-" * LONGEST_NAME,
    " ",
    "'; drop table requests; --",
)
METHODS = st.sampled_from(["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "CONNECT", "get", ""])
names = st.text(max_size=40) | st.sampled_from(HOSTILE) | st.sampled_from(KNOWN)
texts = names.filter(bool).filter(lambda text: len(text) <= LONGEST_NAME)
serving_lists = st.lists(st.sampled_from(KNOWN), unique=True)
meanings_of = st.dictionaries(
    st.sampled_from(["gpt-4o", "claude-*", "*", "GPT-*", "[odd]*", "qwen3.8-27b"]), st.sampled_from(KNOWN)
)
no_names = st.one_of(
    st.integers(),
    st.floats(),
    st.booleans(),
    st.lists(st.text(max_size=3), max_size=3),
    st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2),
    st.just("x" * (LONGEST_NAME + 1)),
)
dialects_of = st.sampled_from(Dialect)


# --- which model ------------------------------------------------------------------------------------------------


@given(texts, dialects_of, serving_lists, st.sampled_from(["", *KNOWN]))
def test_a_name_is_itself_where_nothing_else_is_ruled(
    name: str, dialect: Dialect, serving: list[str], default: str
) -> None:
    """Neither what runs nor a default takes the place of what a client names."""
    assert name_wanted(name, dialect, serving, default, {}) == name


@given(st.sampled_from([None, ""]), dialects_of, serving_lists, st.sampled_from(["", *KNOWN]))
def test_no_name_means_the_default_else_the_only_one_that_runs(
    named: str | None, dialect: Dialect, serving: list[str], default: str
) -> None:
    """The latter only for clients of llama.cpp, which serves one."""
    if default:
        assert name_wanted(named, dialect, serving, default, {}) == default
    elif dialect is Dialect.LLAMA and len(serving) == 1:
        assert name_wanted(named, dialect, serving, default, {}) == serving[0]
    else:
        with pytest.raises(LlmError) as caught:
            name_wanted(named, dialect, serving, default, {})
        assert caught.value.code is ErrorCode.INVALID_REQUEST
        assert caught.value.details["loaded"] == serving


@given(no_names, dialects_of, serving_lists, st.sampled_from(["", *KNOWN]), meanings_of)
def test_what_can_be_no_name_is_refused_and_never_guessed(
    named: object, dialect: Dialect, serving: list[str], default: str, meanings: dict[str, str]
) -> None:
    with pytest.raises(LlmError) as caught:
        name_wanted(named, dialect, serving, default, meanings)
    assert caught.value.code is ErrorCode.INVALID_REQUEST
    assert "could be one" in caught.value.message


@given(texts, meanings_of)
def test_a_placeholder_is_what_the_settings_say(name: str, meanings: dict[str, str]) -> None:
    """A whole name before patterns, patterns in their order; a name from outside is never a pattern itself."""
    found = meant(name, meanings)
    assert found == name or found in meanings.values()
    if name in meanings:
        assert found == meanings[name]
    elif "*" in meanings and set(meanings) - {"*"} == set():
        assert found == meanings["*"]
    if not any(set(pattern) & set("*?[") for pattern in meanings):
        lowered = {pattern.lower(): model for pattern, model in reversed(meanings.items())}
        assert found == meanings.get(name, lowered.get(name.lower(), name))


@given(st.text(alphabet=string.ascii_letters + "*?[]-", min_size=1, max_size=12))
def test_a_pattern_reaches_no_further_than_it_says(name: str) -> None:
    found = meant(name, {"claude-*": "qwen3.8-27b"})
    assert (found == "qwen3.8-27b") is (name.lower().startswith("claude-") or name == "qwen3.8-27b")


def shelf() -> tuple[Checkpoint, ...]:
    paths = [Path(f"/models/{number}.gguf") for number in range(len(KNOWN))]
    return tuple(Checkpoint(name, path, (path,), 1) for name, path in zip(KNOWN, paths, strict=True))


@given(texts, dialects_of)
@example("\ud800", Dialect.OPENAI)
@example("qwen3.8-27c", Dialect.ANTHROPIC)
def test_an_unknown_name_is_told_in_every_dialect_without_harm(name: str, dialect: Dialect) -> None:
    """It is one that there is, or refused with names that there are; and what is said of it is one JSON document."""
    try:
        found = resolve(name, shelf(), {"small": "gemma-3-270m"})
    except LlmError as error:
        assert error.code in {ErrorCode.UNKNOWN_MODEL, ErrorCode.AMBIGUOUS_MODEL}
        told = error.details.get("close", error.details.get("candidates"))
        assert set(told) <= {*KNOWN, "small"}
        assert error.message.isprintable() and len(error.message) < 1500
        body = dialects.body(error, dialect, "req_1")
        assert body.count(b"\n") == 1 and name not in KNOWN
        assert json.loads(body)["error"]["code"] == error.code
        assert dialects.event(error, dialect, "req_1").count(b"\n\n") == 1
        assert all(value.isprintable() for value in dialects.headers(error).values())
    else:
        assert found.name in KNOWN


def test_near_names_are_told() -> None:
    with pytest.raises(LlmError) as caught:
        resolve("gema-3-270m", shelf(), {})
    assert caught.value.details["close"][0] == "gemma-3-270m"


# --- which address ----------------------------------------------------------------------------------------------

pieces = st.sampled_from(
    [
        *[
            "..",
            ".",
            "",
            "%2e%2e",
            "%2E.",
            "%2f",
            "%5c",
            "%00",
            "%0d%0a",
            "%25",
            "%ff",
            "cors-proxy",
            "tools",
        ],
        *[
            "%63ors-proxy",
            "props",
            "slots",
            "v1",
            "chat",
            "completions",
            "lora-adapters",
            "x",
            "\\",
            ";",
            "?",
            "#",
        ],
    ]
)
rests = st.lists(pieces, max_size=5).map("/".join) | st.text(max_size=20)


def found(method: str, raw: str) -> Route | None:
    """The route; None also where the gateway says that there is none."""
    try:
        return find(method, raw)
    except LlmError as error:
        assert error.code is ErrorCode.NO_SUCH_ROUTE
        assert error.message.isprintable()
        return None


@given(METHODS, st.text(max_size=60) | rests.map(lambda rest: "/" + rest))
def test_any_target_is_a_route_or_none(method: str, raw: str) -> None:
    route = found(method, raw)
    assert isinstance(dialect_of(raw), Dialect)
    path = raw.partition("?")[0]
    if route is None:
        return
    assert method in route.methods
    if route.pattern != UPSTREAM:
        assert route.pattern == path and path in ROUTES
        assert route.target == raw  # as it was sent


@given(METHODS, texts.filter(lambda text: text.isprintable()), rests)
def test_upstream_reaches_a_place_of_that_engine_and_no_other(method: str, name: str, rest: str) -> None:
    raw = f"{UPSTREAM}{urllib.parse.quote(name, safe='', errors='surrogatepass')}/{rest}"
    route = found(method, raw)
    if route is None:
        return
    assert (route.where, route.model, route.dialect) == (Where.PATH, name, Dialect.LLAMA)
    assert route.target == "/" + rest  # byte for byte
    place = urllib.parse.unquote(route.target.partition("?")[0])
    parts = place.split("/")
    assert place.startswith("/") and place.isprintable()
    assert not {".", ".."} & set(parts)
    assert parts[1] not in CLOSED
    assert method == "POST" or method in {"GET", "HEAD"}
    assert method != "POST" or parts[1] not in READ_ONLY


@given(texts.filter(lambda text: text.isprintable()), st.sampled_from(sorted(ROUTES)))
def test_what_takes_a_slot_takes_one_by_its_other_name_too(name: str, path: str) -> None:
    """Whatever the model's name contains, quoted or not as its address needs it."""
    row = ROUTES[path]
    method = min(row.methods)
    quoted = urllib.parse.quote(name, safe="")
    route = find(method, f"{UPSTREAM}{quoted}{path}?a=b")
    assert route is not None
    assert (route.duty, route.model, route.target) == (row.duty, name, f"{path}?a=b")
    assert route.duty is Duty.ASK or route.load
