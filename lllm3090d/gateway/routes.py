"""Which addresses there are, in whose dialect each answers, and where its model's name is. Pure."""

from __future__ import annotations

import enum
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from lllm3090d.errors import ErrorCode, LlmError


class Dialect(enum.Enum):
    """Whose API an address belongs to: how failures are told."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"
    LLAMA = "llama.cpp"


class Where(enum.Enum):
    """Where a request names its model."""

    BODY = "body"  # member ``model`` of a JSON object, or field of a form
    QUERY = "query"  # ``?model=``, else the only one that is loaded
    PATH = "path"  # /upstream/{model}/...


class Duty(enum.Enum):
    """What a request asks of the engine."""

    WORK = "work"  # takes a slot, and its turn
    ASK = "ask"  # is answered beside the work


@dataclass(frozen=True, slots=True)
class Route:
    """An address that is passed on.

    Attributes:
        target: path for the engine, and its query as it came.
        model: from query or path; None where the body tells, or nobody does.
        load: the model is loaded when it is not.
    """

    dialect: Dialect
    where: Where
    duty: Duty
    target: str
    methods: frozenset[str]
    model: str | None = None
    load: bool = True
    pattern: str = ""


_POST, _GET = frozenset({"POST"}), frozenset({"GET", "HEAD"})


@dataclass(frozen=True, slots=True)
class _Row:
    dialect: Dialect
    where: Where
    duty: Duty
    methods: frozenset[str] = _POST
    load: bool = True


_WORK = _Row(Dialect.OPENAI, Where.BODY, Duty.WORK)
_COUNT = _Row(Dialect.OPENAI, Where.BODY, Duty.ASK)
_MESSAGES = _Row(Dialect.ANTHROPIC, Where.BODY, Duty.WORK)
_LLAMA_WORK = _Row(Dialect.LLAMA, Where.BODY, Duty.WORK)
_LLAMA_TEXT = _Row(Dialect.LLAMA, Where.BODY, Duty.ASK)
# To look at an engine must not load one.
_LLAMA_LOOK = _Row(Dialect.LLAMA, Where.QUERY, Duty.ASK, _GET, load=False)

ROUTES: Mapping[str, _Row] = MappingProxyType(
    {
        "/v1/chat/completions": _WORK,
        "/chat/completions": _WORK,
        "/v1/completions": _WORK,
        "/v1/responses": _WORK,
        "/responses": _WORK,
        "/v1/embeddings": _WORK,
        "/v1/rerank": _WORK,
        "/v1/reranking": _WORK,
        "/rerank": _WORK,
        "/reranking": _WORK,
        "/v1/audio/transcriptions": _WORK,
        "/audio/transcriptions": _WORK,
        "/v1/chat/completions/input_tokens": _COUNT,
        "/chat/completions/input_tokens": _COUNT,
        "/v1/responses/input_tokens": _COUNT,
        "/responses/input_tokens": _COUNT,
        "/v1/messages": _MESSAGES,
        "/v1/messages/count_tokens": _Row(Dialect.ANTHROPIC, Where.BODY, Duty.ASK),
        "/completion": _LLAMA_WORK,
        "/completions": _LLAMA_WORK,
        "/infill": _LLAMA_WORK,
        "/embedding": _LLAMA_WORK,
        "/embeddings": _LLAMA_WORK,
        "/tokenize": _LLAMA_TEXT,
        "/detokenize": _LLAMA_TEXT,
        "/apply-template": _LLAMA_TEXT,
        "/props": _LLAMA_LOOK,
        "/slots": _LLAMA_LOOK,
        "/metrics": _LLAMA_LOOK,
    }
)
UPSTREAM = "/upstream/"
MODELS = "/v1/models"
MODELS_SHORT = "/models"
HEALTH = frozenset({"/health", "/v1/health"})
# Of an engine, by the first part of the path: what reaches beyond it, and what only the daemon may change.
CLOSED = frozenset({"cors-proxy", "tools"})
READ_ONLY = frozenset({"props", "slots", "lora-adapters"})


def find(method: str, raw_path: str) -> Route | None:
    """The route of a request; None where there is none.

    Args:
        method: of HTTP.
        raw_path: path and query as they were sent, undecoded.

    Raises:
        LlmError: NO_SUCH_ROUTE for a method that the address does not take, or a path that names no place; with the
            detail ``allow`` in the former case.
    """
    path, question, query = raw_path.partition("?")
    if path.startswith(UPSTREAM):
        return _upstream(method, path, question + query)
    row = ROUTES.get(path)
    if row is None:
        return None
    if method not in row.methods:
        raise _wrong_method(method, path, row.methods)
    return Route(
        row.dialect,
        row.where,
        row.duty,
        path + question + query,
        row.methods,
        _query_model(query),
        row.load,
        path,
    )


def dialect_of(raw_path: str) -> Dialect:
    """In whose words a request is refused, whether or not there is such an address."""
    path = raw_path.partition("?")[0]
    if path.startswith("/v1/messages"):
        return Dialect.ANTHROPIC
    row = ROUTES.get(path)
    return row.dialect if row is not None else Dialect.OPENAI


def _upstream(method: str, path: str, query: str) -> Route:
    name, slash, rest = path.removeprefix(UPSTREAM).partition("/")
    target = slash + rest
    decoded = urllib.parse.unquote(target)
    parts = decoded.split("/")[1:]
    is_place = name and slash and not {".", ".."} & set(parts) and decoded.isprintable()
    if not is_place or parts[0] in CLOSED:
        raise LlmError(
            ErrorCode.NO_SUCH_ROUTE,
            f"{path[:200]!r} is no place of an engine that can be reached from here.",
            hint=f"Ask for {UPSTREAM}MODEL/PATH, such as {UPSTREAM}qwen-27b/props.",
        )
    methods = _GET if parts[0] in READ_ONLY else _GET | _POST
    if method not in methods:
        raise _wrong_method(method, decoded, methods)
    model = urllib.parse.unquote(name)
    known = ROUTES.get(decoded)
    duty = known.duty if known is not None else Duty.ASK
    return Route(Dialect.LLAMA, Where.PATH, duty, target + query, methods, model, pattern=UPSTREAM)


def _query_model(query: str) -> str | None:
    found = urllib.parse.parse_qs(query, keep_blank_values=False).get("model")
    return found[-1] if found else None


def _wrong_method(method: str, path: str, methods: frozenset[str]) -> LlmError:
    allowed = ", ".join(sorted(methods))
    return LlmError(
        ErrorCode.NO_SUCH_ROUTE,
        f"{path} takes {allowed}, not {method}.",
        hint=f"Ask it with: {allowed}.",
        allow=sorted(methods),
    )
