"""What a check found: plain data."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


class Level(enum.StrEnum):
    """How bad it is, in this order."""

    OK = "ok"
    WARN = "warn"  # it works, but less well than it could, or not for long
    FAIL = "fail"  # something that a person will want does not work


class Check(enum.StrEnum):
    """What is looked at, in the order of the report; described in ``docs/reference/cli.md``."""

    SETTINGS = "settings"
    MANAGER = "manager"
    SERVICE = "service"
    SOCKET = "socket"
    DBUS = "dbus"
    NOTIFICATIONS = "notifications"
    DELEGATION = "delegation"
    LINGER = "linger"
    JOURNAL = "journal"
    DRIVER = "driver"
    DEVICES = "devices"
    ENGINE = "engine"
    VULKAN = "vulkan"
    SUSPEND = "suspend"
    MODELS = "models"
    MODELS_DISK = "models-disk"
    STATE = "state"
    STATE_DISK = "state-disk"
    CLOCK = "clock"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        check: what was looked at.
        level: how bad it is.
        message: what is the case, for a person.
        hint: what to do; None where nothing needs doing.
    """

    check: Check
    level: Level
    message: str
    hint: str | None = None

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "check": str(self.check),
            "level": str(self.level),
            "message": self.message,
            "hint": self.hint,
        }


def ok(check: Check, message: str) -> Finding:
    """Nothing needs doing."""
    return Finding(check, Level.OK, message)


def warn(check: Check, message: str, hint: str) -> Finding:
    """It works, but not as well as it could."""
    return Finding(check, Level.WARN, message, hint)


def fail(check: Check, message: str, hint: str) -> Finding:
    """Something that a person will want does not work."""
    return Finding(check, Level.FAIL, message, hint)


def worst(levels: Iterable[Level]) -> Level:
    """The worst of them; OK of none."""
    order = list(Level)
    return max(levels, key=order.index, default=Level.OK)
