"""The wire models of names to choose from. The rules of :mod:`lllm3090d.wire` hold."""

from __future__ import annotations

import enum

from pydantic import Field

from lllm3090d.wire_types import Response


class NamesOf(enum.StrEnum):
    """What is named."""

    MODELS = "models"  # on disk, and their aliases
    INSTANCES = "instances"  # what runs, is on its way, or has failed; and loads that wait
    ENGINES = "engines"  # builds that can be chosen
    KEYS = "keys"  # of the gateway


class Names(Response):
    """Answer of ``GET /v1/names``."""

    names: tuple[str, ...] = Field(description="each once, in alphabetical order")
