"""The wire models of the gateway's keys. The rules of :mod:`lllm3090d.wire` hold."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from lllm3090d.wire_types import Request, Response

KeyName = Annotated[str, Field(min_length=1, max_length=64)]


class KeyView(Response):
    """A key of the gateway; what it is, nobody can tell."""

    name: str
    made: str = Field(description="when, RFC 3339 in UTC")


class KeysView(Response):
    """Answer of ``GET /v1/keys`` and ``POST /v1/keys/remove``."""

    keys: tuple[KeyView, ...] = Field(description="the oldest first; with none, none is asked for")


class KeyMade(Response):
    """Answer of ``POST /v1/keys/add``."""

    name: str
    made: str = Field(description="when, RFC 3339 in UTC")
    key: str = Field(description="what clients send; it is told this once")


class KeyBody(Request):
    """``POST /v1/keys/add`` and ``POST /v1/keys/remove``."""

    name: KeyName = Field(description="by which a person knows the key")
