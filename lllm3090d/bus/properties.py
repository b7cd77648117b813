"""The table of unit properties we set over D-Bus: type on the wire, and the systemd that first knew them.

A wrong type is answered by systemd with a nameless error, and one unknown name makes the whole call fail, so
every variant is built here and nowhere else. Names and types: ``org.freedesktop.systemd1(5)``; a contract
test compares the table with a real manager. Times are microseconds (``...USec``), sizes bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from gi.repository import GLib

# bool, int and str as they are; a sequence for an array or a structure; bytes for an array of bytes.
PropertyValue = bool | int | str | bytes | Sequence["PropertyValue"]

OLDEST_SYSTEMD = 252
INFINITY = (1 << 64) - 1  # no limit, of a ``t`` property


@dataclass(frozen=True, slots=True)
class Property:
    """A property as a setter takes it.

    Attributes:
        signature: D-Bus type of the value.
        since: first systemd version that accepts it; what the oldest one accepts is sent to any.
        optional: a start without it is better than none. A systemd that is built without seccomp does not know some.
    """

    signature: str
    since: int = OLDEST_SYSTEMD
    optional: bool = False


def _table() -> Mapping[str, Property]:
    signatures: dict[str, str] = {
        # Unit
        "Description": "s",
        "Documentation": "as",
        "SourcePath": "s",
        "CollectMode": "s",
        "Slice": "s",
        # Service
        "Type": "s",
        "ExecStart": "a(sasb)",  # path, argv with argv[0], ignore failure
        "Restart": "s",
        "TimeoutStartUSec": "t",
        "TimeoutStopUSec": "t",
        "SuccessExitStatus": "(aiai)",  # statuses, signals
        "OOMPolicy": "s",
        # Execution
        "Environment": "as",  # "NAME=value"
        "UnsetEnvironment": "as",
        "WorkingDirectory": "s",
        "UMask": "u",
        "OOMScoreAdjust": "i",
        "Nice": "i",
        "StandardInput": "s",
        "StandardOutput": "s",
        "StandardError": "s",
        "StandardOutputFileToAppend": "s",  # a path; of the three before only their words
        "StandardErrorFileToAppend": "s",
        "SyslogIdentifier": "s",
        "LogExtraFields": "aay",  # b"NAME=value"
        "LimitCORE": "t",
        "LimitNOFILE": "t",
        "LimitMEMLOCK": "t",
        # Control group
        "MemoryAccounting": "b",
        "MemoryHigh": "t",
        "MemoryMax": "t",
        "MemorySwapMax": "t",
        # Killing
        "KillMode": "s",
        "KillSignal": "i",
        "SendSIGKILL": "b",
    }
    table = {name: Property(signature) for name, signature in signatures.items()}
    table["MemoryZSwapMax"] = Property("t", since=253)
    hardening: dict[str, str] = {
        "NoNewPrivileges": "b",
        "LockPersonality": "b",
        "RestrictRealtime": "b",
        "RestrictSUIDSGID": "b",
        "RestrictNamespaces": "t",  # mask of the kinds that stay allowed
        "RestrictAddressFamilies": "(bas)",  # whether the list allows, list
        "SystemCallArchitectures": "as",
        "SystemCallFilter": "(bas)",
        "SystemCallErrorNumber": "i",
    }
    table |= {name: Property(signature, optional=True) for name, signature in hardening.items()}
    return MappingProxyType(table)


PROPERTIES = _table()
_INTEGERS = {
    "i": (-(1 << 31), (1 << 31) - 1),
    "u": (0, (1 << 32) - 1),
    "t": (0, (1 << 64) - 1),
    "y": (0, (1 << 8) - 1),
}


@dataclass(frozen=True, slots=True)
class Encoded:
    """Properties on their way to systemd.

    Attributes:
        variants: (name, value) pairs for an ``a(sv)``.
        dropped: names that this systemd is too old for, or does not know.
    """

    variants: tuple[tuple[str, GLib.Variant], ...]
    dropped: tuple[str, ...]


def encode(
    properties: Mapping[str, PropertyValue], systemd_version: int, unknown: Collection[str] = ()
) -> Encoded:
    """Turn Python values into the variants that systemd takes.

    Args:
        properties: by name.
        systemd_version: 0 where it is not known.
        unknown: names that this systemd has refused.

    Raises:
        ValueError: a name that is not in the table, or a value that D-Bus or the type cannot hold.
        TypeError: a value of the wrong Python type.
    """
    variants: list[tuple[str, GLib.Variant]] = []
    dropped: list[str] = []
    for name, value in properties.items():
        known = PROPERTIES.get(name)
        if known is None:
            raise ValueError(f"{name} is not in the table of unit properties")
        variant = GLib.Variant(known.signature, _checked(known.signature, value, name))
        if known.since > max(systemd_version, OLDEST_SYSTEMD) or name in unknown:
            dropped.append(name)
        else:
            variants.append((name, variant))
    return Encoded(tuple(variants), tuple(dropped))


def _checked(signature: str, value: object, where: str) -> object:
    """``value`` as GLib.Variant takes it for one complete type."""
    if signature in _INTEGERS:
        return _integer(signature, value, where)
    if signature == "b":
        if not isinstance(value, bool):
            raise _wrong(where, "a bool", value)
        return value
    if signature == "s":
        return _text(value, where)
    if signature == "ay":
        if not isinstance(value, bytes):
            raise _wrong(where, "bytes", value)
        return value
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise _wrong(where, f"a sequence for {signature}", value)
    if signature.startswith("a"):
        return [_checked(signature[1:], item, f"{where}[{index}]") for index, item in enumerate(value)]
    members = split_signature(signature[1:-1])
    if len(members) != len(value):
        raise ValueError(f"{where} takes {len(members)} members for {signature}, not {len(value)}")
    pairs = zip(members, value, strict=True)
    return tuple(_checked(member, item, f"{where}.{index}") for index, (member, item) in enumerate(pairs))


def _integer(signature: str, value: object, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong(where, "an int", value)
    lowest, highest = _INTEGERS[signature]
    if not lowest <= value <= highest:
        raise ValueError(f"{where} = {value} is not within {lowest} to {highest}")
    return int(value)


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise _wrong(where, "a str", value)
    if "\0" in value:
        raise ValueError(f"{where} = {value!r} contains a NUL character")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{where} = {value!r} is not valid Unicode, which D-Bus asks for") from error
    return str(value)


def split_signature(signature: str) -> tuple[str, ...]:
    """The complete types in a sequence of types, such as ``sasb`` -> ``s``, ``as``, ``b``."""
    types: list[str] = []
    begin = depth = 0
    for position, character in enumerate(signature):
        depth += (character == "(") - (character == ")")
        if depth == 0 and character != "a":
            types.append(signature[begin : position + 1])
            begin = position + 1
    return tuple(types)


def _wrong(where: str, wanted: str, value: object) -> TypeError:
    return TypeError(f"{where} takes {wanted}, not {type(value).__name__}")
