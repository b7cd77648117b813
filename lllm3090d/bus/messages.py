"""What is said on the bus: whom to call, which signals to hear, and what went wrong."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from gi.repository import Gio, GLib

from lllm3090d.errors import ErrorCode, LlmError

UNREACHABLE_HINT = (
    "Look at `systemctl --user status dbus.service`, and log in anew if the session bus is gone."
)
# Answers of the bus itself that mean: the other side is not there.
_NOBODY_THERE = frozenset(
    "org.freedesktop.DBus.Error." + name
    for name in (
        "ServiceUnknown",
        "NameHasNoOwner",
        "NoReply",
        "Disconnected",
        "NoServer",
        "Timeout",
        "TimedOut",
    )
)


class RemoteError(Exception):
    """The other side answered a call with a D-Bus error."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(f"{name}: {message}")
        self.name = name
        self.message = message


@dataclass(frozen=True, slots=True)
class Target:
    """An interface of an object of a peer."""

    destination: str
    path: str
    interface: str


@dataclass(frozen=True, slots=True)
class Match:
    """Which signals are wanted.

    ``sender`` should be a well-known name: the bus resolves it, whoever owns it. ``path_prefix`` is compared
    as text on the bus thread, since a match rule knows only whole elements of a path.
    """

    sender: str
    interface: str
    member: str
    path: str | None = None
    path_namespace: str | None = None
    path_prefix: str = ""
    arg0: str | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            if "'" in (getattr(self, field.name) or ""):
                raise ValueError(f"a quote in {field.name} of a match rule: {getattr(self, field.name)}")

    @property
    def rule(self) -> str:
        """The match rule as the bus takes it."""
        keys = ("sender", "interface", "member", "path", "path_namespace", "arg0")
        pairs = [(key, getattr(self, key)) for key in keys]
        return ",".join(
            ["type='signal'", *(f"{key}='{value}'" for key, value in pairs if value is not None)]
        )


@dataclass(frozen=True, slots=True)
class Signal:
    """A signal that arrived; ``arguments`` are plain Python values, ``sender`` is a unique name.

    A match rule does not keep out what a peer sends to us alone, so whoever acts on a signal looks at its sender.
    """

    path: str
    interface: str
    member: str
    arguments: tuple[Any, ...]
    sender: str = ""


def unavailable(message: str, *, timed_out: bool = False) -> LlmError:
    """BUS_UNAVAILABLE with the usual hint; ``timed_out`` where somebody is there and does not answer."""
    text = message[0].upper() + message[1:] + "."
    details = {"timed_out": True} if timed_out else {}
    return LlmError(ErrorCode.BUS_UNAVAILABLE, text, hint=UNREACHABLE_HINT, **details)


def timed_out(error: LlmError) -> bool:
    """Whether a call was made and nobody answered, so that it may have been carried out or not."""
    return error.code is ErrorCode.BUS_UNAVAILABLE and error.details.get("timed_out") is True


def call_error(error: GLib.Error, what: str, timeout_s: float) -> Exception:
    """Tell an answer of the other side (:class:`RemoteError`) from its silence (BUS_UNAVAILABLE)."""
    name = Gio.DBusError.get_remote_error(error)
    if name is None:
        if error.matches(Gio.io_error_quark(), Gio.IOErrorEnum.TIMED_OUT):
            return unavailable(f"{what} was not answered within {timeout_s:g} s", timed_out=True)
        return unavailable(f"{what} could not be called: {error.message}")
    message = error.message.removeprefix(f"GDBus.Error:{name}: ")
    if name in _NOBODY_THERE:
        return unavailable(f"{what} could not be called: {message}")
    return RemoteError(name, message)
