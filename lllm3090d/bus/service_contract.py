"""The contract of the daemon on the session bus, read from its one file, and object paths. No bus here."""

from __future__ import annotations

import os
import re
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType

FILE = Path(__file__).with_name("org.lllm3090.Manager1.xml")
BUS_NAME = "org.lllm3090.Manager1"
MANAGER = BUS_NAME
MODEL = BUS_NAME + ".Model"
JOB = BUS_NAME + ".Job"
PROPERTIES = "org.freedesktop.DBus.Properties"
OBJECT_MANAGER = "org.freedesktop.DBus.ObjectManager"
ROOT = "/org/lllm3090/Manager1"
MODELS = ROOT + "/model/"
JOBS = ROOT + "/job/"
DOC = "org.gtk.GDBus.DocString"
EMITS = "org.freedesktop.DBus.Property.EmitsChangedSignal"


@dataclass(frozen=True, slots=True)
class Argument:
    """Of a method or signal."""

    name: str
    signature: str


@dataclass(frozen=True, slots=True)
class Method:
    """What can be called."""

    name: str
    doc: str
    takes: tuple[Argument, ...]
    gives: tuple[Argument, ...]


@dataclass(frozen=True, slots=True)
class Property:
    """What can be read; ``emits`` is ``true``, ``invalidates``, ``const`` or ``false`` as D-Bus has it."""

    name: str
    doc: str
    signature: str
    emits: str


@dataclass(frozen=True, slots=True)
class Told:
    """A signal."""

    name: str
    doc: str
    carries: tuple[Argument, ...]


@dataclass(frozen=True, slots=True)
class Interface:
    """One interface of the contract, its members by name in the file's order."""

    name: str
    doc: str
    methods: Mapping[str, Method]
    properties: Mapping[str, Property]
    signals: Mapping[str, Told]


def text() -> str:
    """The file as it is."""
    return FILE.read_text(encoding="utf-8")


@cache
def contract() -> Mapping[str, Interface]:
    """The interfaces by name."""
    root = ET.fromstring(text())  # noqa: S314  # a file of this package
    return MappingProxyType({each.attrib["name"]: _interface(each) for each in root.iter("interface")})


def path_of_model(name: str) -> str:
    """The object of a model; any name, those that are no UTF-8 included, has one of its own."""
    return MODELS + escaped(os.fsencode(name))


def path_of_job(token: str) -> str:
    """The object of a job."""
    return JOBS + escaped(token.encode())


def escaped(name: bytes) -> str:
    """One element of an object path: letters and digits stay, any other byte is ``_`` and two hexadecimal digits.

    A leading digit is escaped too, as systemd does. Nothing at all is a single ``_``.
    """
    element = re.sub(rb"^[0-9]|[^A-Za-z0-9]", lambda found: b"_%02x" % found[0][0], name).decode()
    return element or "_"


def complete_types(signature: str) -> tuple[str, ...]:
    """The complete types that a signature consists of: ``sa{sv}(ss)`` is ``s``, ``a{sv}``, ``(ss)``.

    Raises:
        ValueError: it breaks off.
    """
    types, start, depth = [], 0, 0
    for position, letter in enumerate(signature):
        depth += (letter in "({") - (letter in ")}")
        if depth == 0 and letter != "a":
            types.append(signature[start : position + 1])
            start = position + 1
    if start != len(signature):
        raise ValueError(f"the signature {signature!r} breaks off")
    return tuple(types)


def _interface(element: ET.Element) -> Interface:
    return Interface(
        element.attrib["name"],
        _annotation(element, DOC),
        MappingProxyType({each.name: each for each in map(_method, element.findall("method"))}),
        MappingProxyType({each.name: each for each in map(_property, element.findall("property"))}),
        MappingProxyType({each.name: each for each in map(_told, element.findall("signal"))}),
    )


def _method(element: ET.Element) -> Method:
    takes = _arguments(element, "in")
    return Method(element.attrib["name"], _annotation(element, DOC), takes, _arguments(element, "out"))


def _property(element: ET.Element) -> Property:
    name, signature = element.attrib["name"], element.attrib["type"]
    return Property(name, _annotation(element, DOC), signature, _annotation(element, EMITS))


def _told(element: ET.Element) -> Told:
    return Told(element.attrib["name"], _annotation(element, DOC), _arguments(element, None))


def _arguments(element: ET.Element, direction: str | None) -> tuple[Argument, ...]:
    return tuple(
        Argument(each.attrib["name"], each.attrib["type"])
        for each in element.findall("arg")
        if each.get("direction") == direction
    )


def _annotation(element: ET.Element, name: str) -> str:
    found = (each for each in element.findall("annotation") if each.get("name") == name)
    return next((each.attrib["value"] for each in found), "")
