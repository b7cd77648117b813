"""``/v1/models`` in one form that the SDKs of OpenAI and Anthropic both read, with each model's real context."""

from __future__ import annotations

import urllib.parse
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from aiohttp import hdrs, web

from lllm3090d.checkpoints.classify import Kind
from lllm3090d.checkpoints.purpose import Purpose, purpose_of_kind
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gateway.house import House
from lllm3090d.gateway.routes import MODELS
from lllm3090d.serving.instance import SERVING
from lllm3090d.serving.listings import Listings
from lllm3090d.serving.running import Instance
from lllm3090d.wire import ModelView

OWNER = "lllm3090d"


class ModelsList:
    """Answers ``/v1/models`` and ``/v1/models/{id}``.

    Args:
        house: the daemon, for names.
        listings: the models on disk with what each would get on the card.
        instances: what runs.
    """

    def __init__(
        self, house: House, listings: Listings, instances: Callable[[], Iterable[Instance]]
    ) -> None:
        self._house = house
        self._listings = listings
        self._instances = instances

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """The list, or one of it.

        Raises:
            LlmError: NO_SUCH_ROUTE for a method that changes something, UNKNOWN_MODEL, MODELS_DIR_UNREADABLE.
        """
        if request.method not in {hdrs.METH_GET, hdrs.METH_HEAD}:
            raise LlmError(
                ErrorCode.NO_SUCH_ROUTE,
                f"{MODELS} takes GET, not {request.method}.",
                hint="Models are loaded by asking them something, or with lllm3090ctl load.",
                allow=["GET", "HEAD"],
            )
        path = request.raw_path.partition("?")[0]
        wanted = (
            urllib.parse.unquote(path.removeprefix(MODELS).strip("/")) if path.startswith(MODELS) else ""
        )
        name = await self._house.canonical(wanted) if wanted else None
        listed = await self._listings.models(with_catalogue=False)
        running = {each.name: each for each in self._instances()}
        entries = [
            entry(view, running.get(view.name), self._house.promised(view.name))
            for view in listed.models
            if view.on_disk
        ]
        if name is not None:
            found = next((each for each in entries if each["id"] == name), None)
            if found is None:
                raise LlmError(
                    ErrorCode.UNKNOWN_MODEL,
                    f"There is no model {name}.",
                    hint="See /v1/models.",
                    field="model",
                )
            return web.json_response(found)
        return web.json_response(document(entries))


def document(entries: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The list as both SDKs read it: all on one page."""
    data = list(entries)
    return {
        "object": "list",
        "data": data,
        "has_more": False,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
    }


def _moment(seconds: int) -> str:
    """RFC 3339; of a file from a time that no text has (a broken clock), as of one without a time."""
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
    except (OverflowError, ValueError, OSError):
        return _moment(0)


def entry(view: ModelView, instance: Instance | None, promised: Purpose | None = None) -> dict[str, Any]:
    """One model: what a conversation holds is what its launch has, or would get on the empty card.

    Args:
        view: of the list.
        instance: that it has, if any.
        promised: what it serves or would, where more than its file tells that.
    """
    serves = instance is not None and instance.state in SERVING
    window = instance.plan.window_tokens if instance is not None and serves else view.window_tokens
    slots = instance.plan.parallel if instance is not None and serves else view.parallel
    return {
        "id": view.name,
        "object": "model",
        "type": "model",
        # Both want a time; when the file came is what is known here.
        "created": view.modified_s or 0,
        "created_at": _moment(view.modified_s or 0),
        "owned_by": OWNER,
        "display_name": view.name,
        "aliases": list(view.aliases),
        "state": str(instance.state) if instance else None,
        "loaded": serves,
        # Per conversation, under the names by which clients look for it.
        "context_length": window or None,
        "max_model_len": window or None,
        "context_window": window or None,
        "slots": slots or None,
        "trained_context_tokens": view.trained_context_tokens,
        "kind": str(view.kind) if view.kind else None,
        "purpose": str(promised or purpose_of_kind(view.kind or Kind.MODEL)),
        "problem": (view.problem or view.plan_problem or {}).get("detail"),
    }
