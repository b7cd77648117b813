"""Failures in the shape of the OpenAI API: every code, and nothing lost."""

from __future__ import annotations

import json

import pytest

from lllm3090d.errors import KINDS, ErrorCode, LlmError
from lllm3090d.surfaces.openai_errors import ABOUT_THE_MODEL, openai_error
from tests.unit.refusal_scenes import BESIDE_PINNED

pytestmark = pytest.mark.unit

every_code = pytest.mark.parametrize("code", list(ErrorCode))


@every_code
def test_every_code_has_the_shape(code: ErrorCode) -> None:
    error = LlmError(code, "it happened", hint="Do this.", needed_bytes=3)
    body = json.loads(openai_error(error).model_dump_json())
    assert body.keys() == {"error"}
    told = body["error"]
    assert told.keys() == {"message", "type", "param", "code", "hint", "details"}
    assert told["message"] == "it happened. Do this."
    assert (told["code"], told["hint"], told["details"]) == (str(code), "Do this.", {"needed_bytes": 3})
    assert told["param"] == ("model" if code in ABOUT_THE_MODEL else None)
    status = KINDS[code].http_status
    expected = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}.get(
        status, "server_error" if status >= 500 else "invalid_request_error"
    )
    assert told["type"] == expected


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (ErrorCode.UNKNOWN_MODEL, "invalid_request_error"),
        (ErrorCode.FORBIDDEN_PEER, "permission_error"),
        (ErrorCode.INSUFFICIENT_VRAM, "server_error"),
        (ErrorCode.INTERNAL, "server_error"),
    ],
)
def test_types_of_some(code: ErrorCode, kind: str) -> None:
    assert openai_error(LlmError(code, "No.")).error.type == kind


def test_a_field_at_fault_is_the_parameter() -> None:
    error = LlmError(ErrorCode.INVALID_REQUEST, "No.", field="max_tokens")
    assert openai_error(error).error.param == "max_tokens"
    assert openai_error(LlmError(ErrorCode.INVALID_REQUEST, "No.", field=3)).error.param is None


def test_what_is_missing_is_null() -> None:
    told = openai_error(LlmError(ErrorCode.INTERNAL, "It broke.")).error
    assert (told.message, told.hint, told.details) == ("It broke.", None, None)


def test_a_refusal_keeps_its_remedies() -> None:
    """A person reads the message, a program the details."""
    error = BESIDE_PINNED.refusal()
    body = json.loads(openai_error(error).model_dump_json())["error"]
    assert body["code"] == "insufficient_vram"
    assert "lllm3090ctl unload llama-3.1-8b" in body["message"]
    assert body["details"]["remedies"] == error.details["remedies"]
