"""The wire model of a request that the gateway answered. It has no member for what was asked or answered."""

from __future__ import annotations

from pydantic import Field

from lllm3090d.wire_types import Response


class RequestView(Response):
    """A line of ``GET /v1/requests``: a request that has ended. Null is what nobody knows or what never came."""

    request_id: str = Field(description="sent to the client as x-request-id")
    at: str = Field(description="when it ended")
    route: str = Field(description="address without query; /upstream/ for what lies below it")
    model: str | None = Field(default=None, description="that was meant, as far as that was found out")
    run: str | None = Field(default=None, description="launch that was asked")
    priority: str = Field(default="normal", description="high, normal or low")
    status: int | None = Field(
        default=None, description="of HTTP; null where the client left before there was one"
    )
    outcome: str = Field(description="served, refused, engine-error or client-closed")
    code: str | None = Field(default=None, description="of a problem document, where we refused it")
    streamed: bool = Field(default=False, description="the answer is a stream of events")
    prompt_tokens: int | None = Field(
        default=None, description="as the answer tells, those of the cache among them"
    )
    generated_tokens: int | None = Field(default=None, description="as the answer tells")
    tokens_per_s: float | None = Field(
        default=None,
        description="generated, by the engine's own time, else from first to last byte of a stream",
    )
    load_s: float = Field(default=0.0, description="waited for the model to be loaded")
    line_s: float = Field(default=0.0, description="waited for a slot")
    first_byte_s: float | None = Field(
        default=None,
        description="from the request to the first byte of the engine's answer; of a stream the first token",
    )
    total_s: float = Field(description="from the request to its end")
    sent_bytes: int = Field(default=0, description="of the engine's answer")
