"""The OpenAPI document: closed in itself, and the same routes as the application and the reference."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast, get_args

import pytest
from pydantic import BaseModel

from lllm3090d import wire
from lllm3090d.errors import KINDS, LlmError
from lllm3090d.serving.daemon import Daemon
from lllm3090d.surfaces import control, openapi
from lllm3090d.surfaces.openapi import NDJSON, PROBLEM_SCHEMA, ROUTES, document
from lllm3090d.version import VERSION

pytestmark = pytest.mark.unit

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "http-api.md"
ITSELF = ("get", "/v1/openapi.json")
METRICS = ("get", "/metrics")  # no JSON


def served_routes() -> set[tuple[str, str]]:
    """The application's own table; no handler is called, so no daemon is needed behind it."""
    application = control.ControlApi(cast(Daemon, None), "systemd 252").application()
    routes = {
        (route.method.lower(), route.resource.canonical)
        for route in application.router.routes()
        if route.resource is not None
    }
    # aiohttp answers HEAD wherever GET is.
    return {route for route in routes if route[0] != "head"}


def described_routes() -> set[tuple[str, str]]:
    return {(method, path) for path, methods in document()["paths"].items() for method in methods}


def operations() -> list[dict[str, Any]]:
    return [operation for methods in document()["paths"].values() for operation in methods.values()]


def references(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        for key, member in value.items():
            if key == "$ref":
                yield member
            else:
                yield from references(member)
    elif isinstance(value, list):
        for item in value:
            yield from references(item)


def resolve(reference: str) -> dict[str, Any]:
    assert reference.startswith("#/")
    found = document()
    for part in reference.removeprefix("#/").split("/"):
        found = found[part]
    return found


def test_every_route_is_described_but_the_description_itself() -> None:
    assert served_routes() == described_routes() | {ITSELF, METRICS}
    assert len(ROUTES) == len(described_routes())


def test_the_document_is_json() -> None:
    assert json.loads(json.dumps(document(), allow_nan=False)) == document()
    assert document()["openapi"].startswith("3.1.")
    assert document()["info"]["version"] == VERSION


def test_every_reference_resolves_and_every_schema_is_used() -> None:
    used = set(references(document()))
    for reference in used:
        assert resolve(reference)["type"] in {"object", "string"}
    schemas = {f"#/components/schemas/{name}" for name in document()["components"]["schemas"]}
    assert used == schemas


def test_operations_are_told_apart() -> None:
    identifiers = [operation["operationId"] for operation in operations()]
    assert len(set(identifiers)) == len(identifiers)
    assert all(re.fullmatch(r"[a-z_]+", identifier) for identifier in identifiers)


def test_every_operation_has_an_answer_and_a_problem() -> None:
    for operation in operations():
        answer, problem = operation["responses"]["200"], operation["responses"]["default"]
        assert answer["description"]
        (schema,) = (media["schema"] for media in answer["content"].values())
        assert resolve(schema["$ref"])["type"] == "object"
        assert problem["content"] == {
            "application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}
        }


def test_only_what_changes_something_or_asks_much_has_a_body() -> None:
    for path, methods in document()["paths"].items():
        for method, operation in methods.items():
            assert ("requestBody" in operation) == (method == "post"), path


def test_requests_refuse_unknown_fields() -> None:
    for operation in operations():
        if "requestBody" in operation:
            schema = resolve(operation["requestBody"]["content"]["application/json"]["schema"]["$ref"])
            assert schema["additionalProperties"] is False
            # Of model and path an inspection takes one, which a list of required fields cannot say.
            required = (
                {"model", "path"} if "path" in schema["properties"] else set(schema.get("required", ()))
            )
            if schema["title"] not in {
                "ReleaseBody",
                "ResumeBody",
                "ResetBody",
            }:  # which are complete when empty
                assert required & {"model", "token", "engine", "pinned", "autoload", "name"}


def test_every_parameter_of_a_path_is_described() -> None:
    for path, methods in document()["paths"].items():
        for operation in methods.values():
            described = {p["name"] for p in operation.get("parameters", ()) if p["in"] == "path"}
            assert described == set(re.findall(r"{(\w+)}", path))
            assert all(p["required"] for p in operation.get("parameters", ()) if p["in"] == "path")


def test_the_schema_of_problems_is_what_errors_say() -> None:
    properties, required = PROBLEM_SCHEMA["properties"], set(PROBLEM_SCHEMA["required"])
    names = {"string": str, "integer": int, "object": dict}
    for code in KINDS:
        bare = LlmError(code, "x").problem()
        full = LlmError(code, "x", hint="y", a=1).problem()
        assert set(bare) == required
        assert set(full) == set(properties)
        assert all(type(value) is names[properties[key]["type"]] for key, value in full.items())


def models_below(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    yield model
    for field in model.model_fields.values():
        for below in models_in(field.annotation):
            yield from models_below(below)


def models_in(annotation: object) -> Iterator[type[BaseModel]]:
    """The models that an annotation names, also inside unions and tuples."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from models_in(part)


def test_what_a_stream_may_leave_out_is_not_required() -> None:
    streamed = {below for *_, answer, media in ROUTES if media == NDJSON for below in models_below(answer)}
    assert {wire.LoadLine, wire.InstanceView, wire.PlanView, wire.Event, wire.LogLine} <= streamed
    for model in streamed:
        nullable = {name for name, field in model.model_fields.items() if "None" in repr(field.annotation)}
        required = {name for name, field in model.model_fields.items() if field.is_required()}
        assert nullable.isdisjoint(required), model


def test_media_types_are_those_that_are_sent() -> None:
    assert (openapi.NDJSON, openapi.PROBLEM_JSON) == (control.NDJSON, control.PROBLEM_JSON)


# --- the reference -----------------------------------------------------------------------------------------


def sections() -> dict[tuple[str, str], str]:
    parts = re.split(r"^### `(\w+) (\S+)`$", PAGE.read_text(), flags=re.MULTILINE)
    return {(parts[i].lower(), parts[i + 1]): parts[i + 2] for i in range(1, len(parts), 3)}


def test_the_reference_has_every_route_and_no_other() -> None:
    assert set(sections()) == described_routes() | {ITSELF, METRICS}


@pytest.mark.parametrize("route", sorted(sections()))
def test_the_reference_shows_each_route_with_curl(route: tuple[str, str]) -> None:
    method, path = route
    pattern = re.escape(path).replace(r"\{name\}", r"[^/ ]+")
    (line,) = re.findall(
        rf'^curl .*--unix-socket "\$S" "?http://d{pattern}.*$', sections()[route], re.MULTILINE
    )
    body = re.search(r"-d '(.*)'$", line)
    assert (body is not None) == (method == "post")
    models = {(m, p): (request, media) for m, p, _, request, _, media in ROUTES}
    request, media = models.get(route, (None, None))
    assert ("curl -N " in line) == (media == NDJSON)
    if body is not None:
        assert request is not None
        request.model_validate_json(body[1])


def test_the_reference_names_every_parameter_and_field() -> None:
    for path, parameters in openapi.PARAMETERS.items():
        section = next(text for (_, told), text in sections().items() if told == path)
        for parameter in parameters:
            assert f"- `{parameter['name']}`: " in section or parameter["in"] == "path"
    fields = re.findall(r"^\| (\w+) \|", sections()["post", "/v1/plan"], re.MULTILINE)
    assert fields == ["Field", *wire.PlanBody.model_fields]
    fields_of_inspect = re.findall(r"^\| (\w+) \|", sections()["post", "/v1/inspect"], re.MULTILINE)
    assert fields_of_inspect == ["Field", *wire.InspectBody.model_fields]
    of_load = re.findall(r"^\| (\w+) \|", sections()["post", "/v1/load"], re.MULTILINE)
    assert of_load[: of_load.index("Kind")] == ["Field", *of_load_alone()]
    assert of_load_alone()[0] == "token"


def of_load_alone() -> list[str]:
    """What a load can ask for and a plan cannot."""
    return [name for name in wire.LoadBody.model_fields if name not in wire.PlanBody.model_fields]


def test_the_reference_names_every_member_and_kind_of_a_line() -> None:
    table = sections()["post", "/v1/load"].split("| Kind |", 1)[1]
    for name in (*wire.LoadLine.model_fields, *wire.LoadLineKind):
        assert f"`{name}`" in table, name
