"""From plain Python values to what goes over the bus, by the signatures of the contract."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gi.repository import GLib

from lllm3090d.bus.service_contract import complete_types

LARGEST, SMALLEST = (1 << 63) - 1, -(1 << 63)


class ObjectPath(str):
    """Text that is an object path, where nothing else tells so: inside an ``a{sv}``."""

    __slots__ = ()


def variant(signature: str, value: Any) -> GLib.Variant:
    """A value as one of the signature, a single complete type.

    In an ``a{sv}`` the Python type decides: bool is ``b``, int ``x``, float ``d``, text ``s``, :class:`ObjectPath`
    ``o``, a sequence of texts ``as``; any other mapping or sequence is a JSON document in an ``s``.

    Raises:
        TypeError, ValueError, OverflowError: it is none.
    """
    return GLib.Variant(signature, _prepared(signature, value))


def arguments(signatures: Sequence[str], values: Sequence[Any]) -> GLib.Variant:
    """The body of a message. Raises as :func:`variant`; ValueError where one is missing or too many."""
    if len(signatures) != len(values):
        raise ValueError(f"{len(values)} values for the signature {''.join(signatures)!r}")
    return variant(f"({''.join(signatures)})", tuple(values))


def clean(text: str) -> str:
    """The text as D-Bus can carry it: what is no UTF-8, and NUL, become escapes."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")


def _prepared(signature: str, value: Any) -> Any:
    match signature[0]:
        case "v":
            return _any(value)
        case "s":
            return clean(value)
        case "(":
            types = complete_types(signature[1:-1])
            return tuple(_prepared(each, item) for each, item in zip(types, value, strict=True))
        case "a" if signature[1] == "{":
            key, item = complete_types(signature[2:-1])
            return {_prepared(key, name): _prepared(item, each) for name, each in value.items()}
        case "a":
            return [_prepared(signature[1:], each) for each in value]
    return value


def _any(value: Any) -> GLib.Variant:  # noqa: PLR0911  # one line for each kind
    match value:
        case GLib.Variant():
            return value
        case bool():
            return GLib.Variant("b", value)
        case int():
            return GLib.Variant("x", max(SMALLEST, min(LARGEST, value)))
        case float():
            return GLib.Variant("d", value)
        case ObjectPath():
            return GLib.Variant("o", value)
        case str():
            return GLib.Variant("s", clean(value))
        case list() | tuple() if all(isinstance(each, str) for each in value):
            return GLib.Variant("as", [clean(each) for each in value])
        case Mapping() | list() | tuple():
            return GLib.Variant("s", clean(json.dumps(value)))
    raise TypeError(f"nothing on the bus stands for {type(value).__name__}")
