"""What systemd's refusals mean, and what to do about them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from lllm3090d.bus.messages import RemoteError
from lllm3090d.bus.properties import PROPERTIES
from lllm3090d.errors import ErrorCode, LlmError

NAME = "org.freedesktop.systemd1"
# One of a name that it does not know is refused as a whole, with that name in the text.
UNKNOWN_PROPERTY = "org.freedesktop.DBus.Error.PropertyReadOnly"

_REFUSAL_HINTS: Mapping[str, str] = MappingProxyType(
    {
        NAME + ".UnitExists": "Look at `systemctl --user status {name}`; a failed one is cleared by "
        "`systemctl --user reset-failed {name}`.",
        NAME + ".ShuttingDown": "The user's systemd is ending; log in anew.",
        NAME + ".UnitMasked": "Unmask it: `systemctl --user unmask {name}`.",
        UNKNOWN_PROPERTY: "systemd {version} does not know that property; please report it.",
        "System.Error.ENXIO": "systemd {version} does not take the type of some property; please report it.",
        "org.freedesktop.DBus.Error.LimitsExceeded": "The session bus is at a limit; close other programs.",
    }
)
_REFUSAL_HINT = (
    "Look at `journalctl --user -n 20` for what systemd says, and report it if it is our request."
)


def refused(name: str, error: RemoteError, version: str) -> LlmError:
    """UNIT_REFUSED for what systemd of this version said of a unit, or of something else that was asked for."""
    hint = _REFUSAL_HINTS.get(error.name, _REFUSAL_HINT).format(name=name, version=version)
    return LlmError(
        ErrorCode.UNIT_REFUSED,
        f"systemd refused {name}: {error.message}",
        hint=hint,
        unit=name,
        dbus_error=error.name,
    )


def unknown_property(error: RemoteError) -> str | None:
    """The optional property for which a start was refused; None where it was another reason."""
    if error.name != UNKNOWN_PROPERTY:
        return None
    words = re.findall(r"\w+", error.message)
    return next((word for word in words if word in PROPERTIES and PROPERTIES[word].optional), None)
