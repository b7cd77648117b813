"""The OpenAPI document of the control API, generated from the wire models."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from lllm3090d import wire
from lllm3090d.version import VERSION

NDJSON = "application/x-ndjson"
JSON = "application/json"
PROBLEM_JSON = "application/problem+json"
PROBLEM = {"$ref": "#/components/schemas/Problem"}
# method, path, summary, request model, response model, media type of the response
ROUTES: tuple[tuple[str, str, str, type[BaseModel] | None, type[BaseModel], str], ...] = (
    ("get", "/v1/version", "Version of the daemon and of this API", None, wire.Version, JSON),
    ("get", "/v1/status", "The daemon, the card, the engine and what runs", None, wire.Status, JSON),
    (
        "get",
        "/v1/gpus",
        "Cards and host memory: who holds what, and what can be given",
        None,
        wire.Gpus,
        JSON,
    ),
    (
        "get",
        "/v1/models/{name}/explain",
        "The price of a loaded model, what its engine says, and what was measured",
        None,
        wire.ExplainView,
        JSON,
    ),
    ("get", "/v1/models", "Checkpoints on disk, and on request the catalogue", None, wire.Models, JSON),
    ("get", "/v1/instances", "What runs", None, wire.Instances, JSON),
    ("get", "/v1/instances/{name}/logs", "Lines of an engine's log", None, wire.LogLine, NDJSON),
    ("get", "/v1/events", "What happened, and what happens", None, wire.Event, NDJSON),
    ("get", "/v1/requests", "Requests to the gateway that have ended", None, wire.RequestView, NDJSON),
    (
        "get",
        "/v1/models/{name}/history",
        "The last launches of a model, and why each ended",
        None,
        wire.RunHistory,
        JSON,
    ),
    ("get", "/v1/engines", "Engines, and which one the next start uses", None, wire.Engines, JSON),
    ("get", "/v1/engines/{name}", "Everything about one engine", None, wire.EngineDetails, JSON),
    (
        "post",
        "/v1/engines/select",
        "Choose the engine of the next start",
        wire.SelectEngineBody,
        wire.Engines,
        JSON,
    ),
    ("post", "/v1/inspect", "What a GGUF file is", wire.InspectBody, wire.InspectView, JSON),
    (
        "post",
        "/v1/plan",
        "The plan a load would get, now or on another card",
        wire.PlanBody,
        wire.PlanView,
        JSON,
    ),
    ("post", "/v1/load", "Load a model; streams until it is ready", wire.LoadBody, wire.LoadLine, NDJSON),
    ("post", "/v1/unload", "Unload; answers when its memory is back", wire.UnloadBody, wire.Unloaded, JSON),
    (
        "post",
        "/v1/release",
        "Unload everything; answers when the memory is back",
        wire.ReleaseBody,
        wire.Released,
        JSON,
    ),
    ("post", "/v1/resume", "Take loads again after a release", wire.ResumeBody, wire.Resumed, JSON),
    (
        "post",
        "/v1/models/{name}/pin",
        "Keep a loaded model from being unloaded to make room, or no longer",
        wire.PinBody,
        wire.Pinned,
        JSON,
    ),
    (
        "post",
        "/v1/models/{name}/reset",
        "Start a model again that failed or stays down, and forget what happened to it",
        wire.ResetBody,
        wire.Reset,
        JSON,
    ),
    ("get", "/v1/names", "Names to choose from", None, wire.Names, JSON),
    ("get", "/v1/keys", "Names of the gateway's keys", None, wire.KeysView, JSON),
    ("post", "/v1/keys/add", "Make a key of the gateway", wire.KeyBody, wire.KeyMade, JSON),
    ("post", "/v1/keys/remove", "Forget a key of the gateway", wire.KeyBody, wire.KeysView, JSON),
    ("get", "/v1/autoload", "Models that are loaded at every login", None, wire.Autoload, JSON),
    (
        "post",
        "/v1/models/{name}/autoload",
        "Load a model at every login, or no longer",
        wire.AutoloadBody,
        wire.Autoload,
        JSON,
    ),
    ("post", "/v1/cancel", "Withdraw a load by its token", wire.CancelBody, wire.Cancelled, JSON),
)
PARAMETERS: dict[str, list[dict[str, Any]]] = {
    "/v1/models": [
        {"name": "catalogue", "in": "query", "schema": {"type": "integer", "enum": [0, 1], "default": 0}},
    ],
    "/v1/names": [
        {
            "name": "of",
            "in": "query",
            "schema": {"type": "string", "enum": [*wire.NamesOf], "default": wire.NamesOf.MODELS},
        }
    ],
    "/v1/instances/{name}/logs": [
        {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}},
        {"name": "lines", "in": "query", "schema": {"type": "integer", "minimum": 0, "default": 100}},
        {"name": "since", "in": "query", "schema": {"type": "string", "format": "date-time"}},
        {"name": "follow", "in": "query", "schema": {"type": "integer", "enum": [0, 1], "default": 0}},
    ],
    "/v1/models/{name}/explain": [
        {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    ],
    "/v1/models/{name}/history": [
        {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}},
        {
            "name": "runs",
            "in": "query",
            "schema": {"type": "integer", "minimum": 0, "maximum": 1000, "default": 20},
        },
    ],
    "/v1/models/{name}/pin": [
        {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    ],
    "/v1/models/{name}/reset": [
        {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    ],
    "/v1/models/{name}/autoload": [
        {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    ],
    "/v1/requests": [
        {"name": "model", "in": "query", "schema": {"type": "string"}},
        {"name": "since", "in": "query", "schema": {"type": "string", "format": "date-time"}},
        {
            "name": "last",
            "in": "query",
            "schema": {"type": "integer", "minimum": 0, "maximum": 10000, "default": 100},
        },
        {"name": "follow", "in": "query", "schema": {"type": "integer", "enum": [0, 1], "default": 0}},
    ],
    "/v1/engines/{name}": [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}],
    "/v1/events": [
        {
            "name": "since",
            "in": "query",
            "schema": {
                "anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "format": "date-time"}],
                "default": 0,
            },
        },
        {"name": "last", "in": "query", "schema": {"type": "integer", "minimum": 0, "maximum": 10000}},
        {"name": "follow", "in": "query", "schema": {"type": "integer", "enum": [0, 1], "default": 0}},
    ],
}
PROBLEM_SCHEMA: dict[str, Any] = {
    "type": "object",
    "description": "RFC 9457 problem document; codes are listed in the manual, under Errors",
    "required": ["type", "title", "status", "detail", "code", "exit_status"],
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "code": {"type": "string"},
        "exit_status": {"type": "integer"},
        "hint": {"type": "string"},
        "details": {"type": "object"},
    },
}


@cache
def document() -> dict[str, Any]:
    """The document, made on first use."""
    models = {model for _, _, _, body, answer, _ in ROUTES for model in (body, answer) if model is not None}
    ordered = sorted(models, key=lambda model: model.__name__)
    references, definitions = models_json_schema(
        [(model, "validation") for model in ordered], ref_template="#/components/schemas/{model}"
    )
    paths: dict[str, Any] = {}
    for method, path, summary, body, answer, media in ROUTES:
        content = {media: {"schema": references[answer, "validation"]}}
        operation: dict[str, Any] = {
            "summary": summary,
            "operationId": answer.__name__.lower() + "_" + method,
            "responses": {
                "200": {"description": summary, "content": content},
                "default": {"description": "A problem", "content": {PROBLEM_JSON: {"schema": PROBLEM}}},
            },
        }
        if body is not None:
            content = {JSON: {"schema": references[body, "validation"]}}
            operation["requestBody"] = {"required": True, "content": content}
        if path in PARAMETERS:
            operation["parameters"] = PARAMETERS[path]
        paths.setdefault(path, {})[method] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "lllm3090d control API", "version": VERSION},
        "paths": paths,
        "components": {"schemas": {**definitions["$defs"], "Problem": PROBLEM_SCHEMA}},
    }
