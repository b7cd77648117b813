"""The wire models of the wanted set: what is to run, what is loaded at every login, and why one of these does not run.

The rules of :mod:`lllm3090d.wire` hold.
"""

from __future__ import annotations

import enum
from typing import Any

from pydantic import Field

from lllm3090d.serving.instance import InstanceState
from lllm3090d.wire_types import Request, Response


class WantedView(Response):
    """A model that is wanted, or loaded at every login, and has no instance now."""

    name: str
    wanted: bool = Field(description="it is loaded again by itself when what keeps it away is over")
    autoload: bool = Field(description="it is loaded at every login")
    why: str = Field(description="why it does not run, for a person")
    problem: dict[str, Any] | None = Field(
        default=None, description="why the last try to load it came to nothing"
    )


class Awaited(enum.StrEnum):
    """What models of a login wait for; clients must show unknown ones by name."""

    SESSION = "session"  # a graphical session, which may come
    TARGET = "target"  # graphical-session.target
    MEMORY = "memory"  # what other programs hold of the cards, until it stands still


class AutoloadWaitView(Response):
    """Models that are loaded at every login wait until the desktop has settled."""

    awaited: Awaited = Field(description="what is waited for now")
    why: str = Field(description="the same for a person")
    since: str = Field(description="since when, UTC")
    waiting_s: float
    remaining_s: float = Field(description="how long still at most; then they are loaded all the same")


class MarkOrigin(enum.StrEnum):
    """Who marks a model for every login; clients must show unknown ones by name."""

    SETTING = "setting"  # the setting autoload
    COMMAND = "command"  # lllm3090ctl autoload


class MarkView(Response):
    """A model that is loaded at every login."""

    name: str
    origin: MarkOrigin
    options: dict[str, Any] = Field(
        default_factory=dict, description="how it is loaded, beside what the settings say"
    )
    state: InstanceState | None = Field(default=None, description="of its instance; null where it has none")
    why: str = Field(default="", description="why it does not run, for a person; empty where it does")


class Autoload(Response):
    """Answer of ``GET /v1/autoload`` and ``POST /v1/models/{name}/autoload``."""

    models: tuple[MarkView, ...] = Field(description="in the order in which they are loaded")


class AutoloadBody(Request):
    """``POST /v1/models/{name}/autoload``."""

    autoload: bool = Field(
        description="load it at every login, as it is loaded now where it is; or no longer"
    )
