"""What all wire models are made of: the bases of requests and answers, and numbers and names with their limits."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Tokens = Annotated[int, Field(ge=1, le=1 << 28)]
Slots = Annotated[int, Field(ge=1, le=256)]
Name = Annotated[str, Field(min_length=1, max_length=255)]
Token = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{8,64}$")]


class Response(BaseModel):
    """Base of everything the daemon says."""

    model_config = ConfigDict(frozen=True)


class Request(BaseModel):
    """Base of everything the daemon is asked: an unknown field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")
