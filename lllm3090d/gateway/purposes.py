"""Which address needs which kind of model: told before one is loaded for nothing. Pure."""

from __future__ import annotations

import urllib.parse
from collections.abc import Mapping
from types import MappingProxyType

from lllm3090d.checkpoints.purpose import Purpose
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gateway.routes import UPSTREAM, Duty, Route
from lllm3090d.serving.instance import ON_THE_WAY_UP, SERVING
from lllm3090d.serving.running import Instance

_EMBEDDINGS = ("/v1/embeddings", "/embeddings", "/embedding")
_RERANK = ("/v1/rerank", "/v1/reranking", "/rerank", "/reranking")
NEEDED: Mapping[str, Purpose] = MappingProxyType(
    dict.fromkeys(_EMBEDDINGS, Purpose.EMBEDDING) | dict.fromkeys(_RERANK, Purpose.RERANK)
)
_IS = {
    Purpose.CHAT: "a model that generates text",
    Purpose.EMBEDDING: "an embedding model, which turns text into vectors",
    Purpose.RERANK: "a rerank model, which scores texts for a question",
}
_ASK_AT = {
    Purpose.CHAT: "/v1/chat/completions",
    Purpose.EMBEDDING: "/v1/embeddings",
    Purpose.RERANK: "/v1/rerank",
}


def launched(instance: Instance | None) -> Purpose | None:
    """What a model serves by its launch, from its admission on; None where it is not up, nor on its way."""
    if instance is None or instance.state not in SERVING | ON_THE_WAY_UP:
        return None
    return instance.plan.launch.purpose


def needed(route: Route) -> Purpose | None:
    """What a model must be for to answer; None where any can (tokens, templates, properties)."""
    if route.pattern == UPSTREAM:
        path = urllib.parse.unquote(route.target.partition("?")[0])
        if path in NEEDED:
            return NEEDED[path]
    elif route.pattern in NEEDED:
        return NEEDED[route.pattern]
    return Purpose.CHAT if route.duty is Duty.WORK else None


def check(route: Route, name: str, purpose: Purpose) -> None:
    """Refuse what a model cannot answer.

    Args:
        route: of the request.
        name: of the model.
        purpose: what it serves, or would.

    Raises:
        LlmError: WRONG_PURPOSE with the address that it does answer.
    """
    wanted = needed(route)
    if wanted is None or wanted is purpose:
        return
    hint = f"Ask it at {_ASK_AT[purpose]}, or name {_IS[wanted]}; /v1/models tells the purpose of each."
    if purpose is Purpose.CHAT and wanted is Purpose.EMBEDDING:
        hint += f" To have vectors of it all the same: lllm3090ctl load {name} --purpose embedding."
    raise LlmError(
        ErrorCode.WRONG_PURPOSE,
        f"{name} serves as {_IS[purpose]}, and {route.target.partition('?')[0][:200]} needs {_IS[wanted]}.",
        hint=hint,
        field="model",
        model=name,
        purpose=str(purpose),
        needed=str(wanted),
    )
