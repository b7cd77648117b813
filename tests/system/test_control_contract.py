"""The control API against its own OpenAPI document: whatever is asked, each answer is one that it promises."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from requests.adapters import HTTPAdapter
from schemathesis import GenerationMode
from schemathesis.core.result import Ok
from urllib3 import HTTPResponse

from lllm3090d.errors import ErrorCode
from lllm3090d.surfaces.openapi import NDJSON, PROBLEM_JSON, ROUTES, document
from tests.system.harness import UnixConnection
from tests.system.rig import Rig, rigged

pytestmark = pytest.mark.system

MODELS = {"aster": 9.0, "birch": 9.0}
EXAMPLES = 6
BASE = "http://d"
# Where a body or a path names a model, this one is asked for often enough to reach what lies behind the name.
NAMED = "aster"
# There is no load that could be cancelled, nothing has failed for good, and the environment fixes the engine.
REFUSED = {"POST /v1/cancel", "POST /v1/models/{name}/reset", "POST /v1/engines/select"}
DOCUMENT = document()
OPERATIONS = {
    each.ok().label: each.ok()
    for each in schemathesis.openapi.from_dict(DOCUMENT).get_all_operations()
    if isinstance(each, Ok)
}
assert len(OPERATIONS) == len(ROUTES)
RIGHT, WRONG = GenerationMode.POSITIVE, GenerationMode.NEGATIVE
# Of a path alone nothing can be wrong: any text may be a name.
CASES = [(label, RIGHT) for label in OPERATIONS] + [
    (label, WRONG) for label, each in OPERATIONS.items() if list(each.body) or list(each.query)
]
VALIDATORS = {
    reference: jsonschema_rs.validator_for({"$ref": reference, "components": DOCUMENT["components"]})
    for reference in (f"#/components/schemas/{name}" for name in DOCUMENT["components"]["schemas"])
}


class UnixAdapter(HTTPAdapter):
    """Sends over the daemon's socket.

    Args:
        path: of the socket.
    """

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    def send(self, request: requests.PreparedRequest, *_: Any, **__: Any) -> requests.Response:
        """One request on a connection of its own."""
        assert request.method is not None and isinstance(request.body, str | bytes | None)
        connection = UnixConnection(self._path, timeout=100)
        try:
            connection.request(request.method, request.path_url, request.body, dict(request.headers))
            answer = connection.getresponse()
            body, headers = answer.read(), dict(answer.getheaders())
        finally:
            connection.close()
        made = HTTPResponse(io.BytesIO(body), headers, answer.status, preload_content=False)
        return self.build_response(request, made)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with rigged(tmp_path_factory.mktemp("rig"), MODELS) as made:
        yield made


@pytest.fixture(scope="module")
def session(rig: Rig) -> Iterator[requests.Session]:
    with requests.Session() as made:
        made.mount(BASE, UnixAdapter(str(rig.service.control_socket)))
        yield made


def bounded(case: Any, engine: str) -> None:
    """Nothing that goes on for ever, and half of what is asked is asked of what there is."""
    if case.query:
        case.query.pop("follow", None)
    names = case.path_parameters or {}
    if len(str(names.get("name", ""))) % 2:
        names["name"] = engine if "/engines/" in case.path else NAMED
    if isinstance(case.body, dict):
        for member, known in (("model", NAMED), ("engine", engine)):
            if len(str(case.body.get(member, ""))) % 2:
                case.body[member] = known
        if case.body.get("model") == NAMED and case.body.get("path"):
            del case.body["path"]  # an inspection takes one of them


@pytest.mark.parametrize(("label", "mode"), CASES)
def test_every_answer_is_promised(
    rig: Rig, session: requests.Session, label: str, mode: GenerationMode
) -> None:
    """Of requests that are as the document wants them, and of others."""
    operation = OPERATIONS[label]

    @seed(8)
    @settings(
        max_examples=EXAMPLES,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        bounded(case, engine)
        response = case.call(base_url=BASE, session=session)
        check(label, response)
        seen.add(response.status_code)

    seen = set[int]()
    engine = rig.service.request("GET", "/v1/engines").json()["engines"][0]["name"]
    if mode is RIGHT:
        rig.service.request("POST", "/v1/resume", {})
        if rig.states().get(NAMED) not in {"ready", "busy"}:
            rig.load_ready(NAMED)
    ask()
    assert mode is WRONG or 200 in seen or label in REFUSED, seen  # it was reached, and not only refused


def check(label: str, response: Any) -> None:
    """It is one of those that the document promises, and no mistake of ours."""
    method, path = label.split()
    answers = DOCUMENT["paths"][path][method.lower()]["responses"]
    told = answers["200"] if response.status_code == 200 else answers["default"]
    kind = response.headers["content-type"][0].partition(";")[0]
    assert kind in told["content"], (label, kind, response.content)
    assert response.status_code != 500, (label, response.content)
    lines = response.content.splitlines() if kind == NDJSON else [response.content]
    for line in lines:
        VALIDATORS[told["content"][kind]["schema"]["$ref"]].validate(json.loads(line))
    if response.status_code == 200:
        return
    problem = json.loads(response.content)
    assert kind == PROBLEM_JSON and problem["status"] == response.status_code
    assert problem["code"] != ErrorCode.INTERNAL
