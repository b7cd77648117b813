"""Registering objects with Gio and answering their calls, without the leak of older GLib. On the bus thread only.

In Python each call of an object that was registered with ``register_object`` leaves its ``GDBusMethodInvocation``
behind, about 2 KB: GLib counts on the language to drop a reference that the language does not know of. GLib 2.84 has
another function (``register_object_with_closures2``) that does without; GLib 2.82.3 had mended the old one and 2.82.4
broke it again for the sake of those who worked around it (https://gitlab.gnome.org/GNOME/glib/-/issues/3560).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gi.repository import Gio, GLib

MENDED = (2, 82, 3)
_REGISTER = getattr(Gio.DBusConnection, "register_object_with_closures2", Gio.DBusConnection.register_object)
LEAKS = (
    not hasattr(Gio.DBusConnection, "register_object_with_closures2")
    and (GLib.MAJOR_VERSION, GLib.MINOR_VERSION, GLib.MICRO_VERSION) != MENDED
)


def register(
    connection: Gio.DBusConnection, path: str, info: Gio.DBusInterfaceInfo, called: Callable[..., None]
) -> int:
    """Have ``called`` called for each method of an interface, those of properties included; a number to undo it by.

    Each invocation is to be given to :func:`answer` or :func:`refuse` once.
    """
    # Without functions for properties, their calls come as those of any other interface.
    return int(_REGISTER(connection, path, info, called, None, None))


def answer(invocation: Any, body: GLib.Variant) -> None:
    """Answer a call."""
    invocation.return_value(body)
    _drop(invocation)


def refuse(invocation: Any, name: str, message: str) -> None:
    """Answer a call with an error."""
    invocation.return_dbus_error(name, message)
    _drop(invocation)


def _drop(invocation: Any) -> None:
    if LEAKS:
        invocation._unref()
