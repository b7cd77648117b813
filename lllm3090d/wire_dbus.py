"""The wire models of options that only the D-Bus surface has. The rules of :mod:`lllm3090d.wire` hold."""

from __future__ import annotations

from pydantic import Field

from lllm3090d.wire_types import Request, Token


class TokenBody(Request):
    """The option of a job that has no token of its own in the control API."""

    token: Token | None = Field(
        default=None, description="chosen by the client: the job's path ends with it"
    )


class ListBody(Request):
    """Options of ``ListModels``."""

    catalogue: bool = Field(default=False, description="models of the catalogue too, though not on disk")
