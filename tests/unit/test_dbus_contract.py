"""The contract of the D-Bus API: the file, what the code offers, what the wire models say, and the manual are one."""

from __future__ import annotations

import asyncio
import configparser
import os
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from gi.repository import Gio, GLib
from hypothesis import given
from hypothesis import strategies as st

from lllm3090ctl.setup_files import Places, wanted
from lllm3090d.bus import service_page
from lllm3090d.bus.service_contract import (
    BUS_NAME,
    EMITS,
    FILE,
    JOB,
    JOBS,
    MANAGER,
    MODEL,
    MODELS,
    OBJECT_MANAGER,
    ROOT,
    Interface,
    complete_types,
    contract,
    escaped,
    path_of_job,
    path_of_model,
    text,
)
from lllm3090d.bus.service_values import LARGEST, ObjectPath, arguments, variant
from lllm3090d.doctor.systemd_checks import DBUS_NAME, SERVICE
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.surfaces.dbus_jobs import Job
from lllm3090d.surfaces.dbus_views import details, error_of, manager_state, model_properties
from lllm3090d.wire import InstanceView
from tests.fakes.dbus_world import Invocation, World, instance

pytestmark = pytest.mark.unit

REPOSITORY = Path(__file__).parents[2]
ACTIVATION = REPOSITORY / "packaging" / "dbus" / f"{BUS_NAME}.service"
REFERENCE = REPOSITORY / "docs" / "reference" / "dbus.md"
HOW_TO = REPOSITORY / "docs" / "how-to" / "dbus.md"
OURS = (MANAGER, MODEL, JOB)
PATHS = {MANAGER: ROOT, MODEL: path_of_model("alpha"), JOB: path_of_job("token-12"), OBJECT_MANAGER: ROOT}
SAMPLES: dict[str, Any] = {"s": "alpha", "a{sv}": {}}


def values_of(interface: Interface, values: dict[str, Any]) -> None:
    """Every property has a value of its type."""
    assert values.keys() == interface.properties.keys()
    for name, each in interface.properties.items():
        assert variant(each.signature, values[name]).get_type_string() == each.signature


def test_the_file_is_what_gio_takes_it_for_and_every_member_is_explained() -> None:
    infos = {each.name: each for each in Gio.DBusNodeInfo.new_for_xml(text()).interfaces}
    assert infos.keys() == contract().keys() == {*OURS, OBJECT_MANAGER}
    for name, interface in contract().items():
        info = infos[name]
        assert [each.name for each in info.methods] == list(interface.methods)
        assert [each.name for each in info.signals] == list(interface.signals)
        for method in info.methods:
            ours = interface.methods[method.name]
            assert [(each.name, each.signature) for each in method.in_args] == [
                (each.name, each.signature) for each in ours.takes
            ]
            assert [each.signature for each in method.out_args] == [each.signature for each in ours.gives]
        for told in info.signals:
            carries = interface.signals[told.name].carries
            assert [each.signature for each in told.args] == [each.signature for each in carries]
        for each in info.properties:
            ours_ = interface.properties[each.name]
            assert (each.signature, each.flags) == (ours_.signature, Gio.DBusPropertyInfoFlags.READABLE)
            assert Gio.DBusAnnotationInfo.lookup(each.annotations, EMITS) == ours_.emits
            assert ours_.emits in {"true", "invalidates", "const", "false"}
        docs = [interface.doc, *(each.doc for each in interface.methods.values())]
        docs += [each.doc for each in interface.properties.values()]
        docs += [each.doc for each in interface.signals.values()]
        assert all(each.endswith(".") for each in docs)


def test_every_method_is_answered_with_what_the_contract_promises() -> None:
    async def scenario() -> None:
        world = World()
        world.api.run(instance())
        world.api.lines = [LlmError(ErrorCode.UNKNOWN_MODEL, "no")]
        world.service.publish(ROOT, (MANAGER, OBJECT_MANAGER))
        for name, interface in contract().items():
            for method in interface.methods.values():
                if name == JOB:
                    world.api.hold.clear()
                    options = {"token": "token-12"}
                    begun = await world.call("Unload", "alpha", options, path=ROOT, interface=MANAGER)
                    assert begun.answer == (PATHS[JOB],)
                values = [SAMPLES[each.signature] for each in method.takes]
                answer: Invocation = await world.call(method.name, *values, path=PATHS[name], interface=name)
                if name == JOB:
                    assert answer.error is not None and "cannot be withdrawn" in answer.error[1]
                    world.api.hold.set()
                    continue
                assert answer.error is None, (method.name, answer.error)
                gives = [each.signature for each in method.gives]
                assert arguments(gives, answer.answer).get_type_string() == f"({''.join(gives)})"
        await world.surface.end()

    asyncio.run(scenario())


def test_every_property_has_a_value_of_its_type() -> None:
    failure = LlmError(ErrorCode.ENGINE_FAILED, "it ended\x00 \udcff", hint="look").problem()
    for view in (instance(), instance(main_pid=7, measured_bytes=9, failure=failure, at_risk="Xid 79")):
        values_of(contract()[MODEL], model_properties(view))
    values_of(contract()[JOB], Job("load", "alpha", "token-12").properties())
    ended = Job("load", "alpha", "token-12", "completed", ("loading", 1, 2), details(instance()))
    values_of(contract()[JOB], ended.properties())

    async def manager() -> dict[str, Any]:
        world = World()
        return dict(await world.surface.properties(ROOT, MANAGER, contract()[MANAGER].properties))

    values_of(contract()[MANAGER], asyncio.run(manager()))


def test_a_model_says_what_the_wire_says() -> None:
    """By the same names, each a property in CamelCase."""
    view = instance(main_pid=7, measured_bytes=9, latch_reason="three times", at_risk="Xid 79", pinned=True)
    told = model_properties(view)
    for name in contract()[MODEL].properties.keys() - {"Failure"}:
        field = re.sub("([A-Z])", r"_\1", name).lower().removeprefix("_")
        assert field in InstanceView.model_fields
        assert told[name] == getattr(view, field)
    assert model_properties(instance())["MeasuredBytes"] == -1
    failed = instance(failure=LlmError(ErrorCode.ENGINE_FAILED, "it ended", hint="look").problem())
    assert model_properties(failed)["Failure"] == ("org.lllm3090.Error.EngineFailed", "it ended\nlook")


def test_details_leave_out_what_is_null_and_keep_the_rest() -> None:
    view = instance(main_pid=7, idle_s=1.5)
    body = variant("a{sv}", details(view))
    types = {key: body.lookup_value(key, None).get_type_string() for key in body.keys()}  # noqa: SIM118  # a variant
    assert types["main_pid"] == types["reserved_bytes"] == "x"
    assert (types["idle_s"], types["pinned"], types["name"]) == ("d", "b", "s")
    assert types["reservations"] in {"as", "s"}  # an empty list is one of nothing
    assert "failure" not in types and "measured_bytes" not in types
    assert body.unpack()["reserved_bytes"] == 1 << 40


@pytest.mark.parametrize(
    ("states", "waiting", "released", "word"),
    [
        ((), 0, False, "idle"),
        (("failed", "latched"), 0, False, "idle"),
        (("ready", "failed"), 0, False, "serving"),
        (("stalled",), 0, False, "serving"),
        (("ready", "loading"), 0, False, "changing"),
        (("stuck",), 0, False, "changing"),
        ((), 1, False, "changing"),
        (("stopping",), 0, True, "released"),
    ],
)
def test_the_state_in_a_word(states: tuple[str, ...], waiting: int, released: bool, word: str) -> None:
    found = [instance(state=state).state for state in states]
    assert manager_state(found, waiting, released=released) == word
    assert word in contract()[MANAGER].properties["State"].doc


def test_an_error_has_its_name_and_its_arithmetic() -> None:
    lines = [
        {"name": "total", "bytes": 24 << 30, "origin": "reading"},
        {"name": "driver", "bytes": -(451 << 20), "origin": "reading"},
    ]
    error = LlmError(ErrorCode.INSUFFICIENT_VRAM, "it needs more", hint="ask less", budget=lines)
    assert error_of(error.problem()) == (
        "org.lllm3090.Error.InsufficientVram",
        "it needs more\nCan be given: total 24,576.0, driver -451.0 = 24,125.0 MiB.\nask less",
    )
    assert error_of(LlmError(ErrorCode.INTERNAL, "x" * 100_000).problem())[1].endswith("x...")


@given(st.binary(max_size=30), st.binary(max_size=30))
def test_a_path_is_valid_and_stands_for_one_name(one: bytes, other: bytes) -> None:
    path = MODELS + escaped(one)
    assert GLib.Variant.is_object_path(path)
    assert (escaped(one) == escaped(other)) is (one == other)


def test_paths_of_names_that_are_odd() -> None:
    assert path_of_model("2b-ä") == MODELS + "_32b_2d_c3_a4"
    assert path_of_model(os.fsdecode(b"\xff/..")) == MODELS + "_ff_2f_2e_2e"
    assert path_of_job("my-token_1") == JOBS + "my_2dtoken_5f1"
    assert escaped(b"") == "_"
    example = re.search(r"`([^`]+)` is `(/org/[^`]+)`", REFERENCE.read_text(encoding="utf-8"))
    assert example is not None and path_of_model(example[1]) == example[2]


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
        max_leaves=8,
    )
)
def test_whatever_a_document_holds_can_be_said(value: Any) -> None:
    if value is not None:
        body = variant("a{sv}", {"it": value})
        assert body.get_type_string() == "a{sv}" and body.n_children() == 1


def test_values_that_cannot_be_said_as_they_are() -> None:
    body = variant("a{sv}", {"x": 1 << 70, "s": "a\0b\ud800", "o": ObjectPath("/a"), "as": ("a", "b")})
    assert body.unpack() == {"x": LARGEST, "s": "a\\x00b\\ud800", "o": "/a", "as": ["a", "b"]}
    assert body.lookup_value("o", None).get_type_string() == "o"
    with pytest.raises(TypeError, match="stands for object"):
        variant("v", object())
    with pytest.raises(ValueError, match="2 values for the signature 's'"):
        arguments(("s",), ("a", "b"))


def test_signatures_are_taken_apart() -> None:
    assert complete_types("sa{sv}(ss)aa(sx)v") == ("s", "a{sv}", "(ss)", "aa(sx)", "v")
    assert complete_types("") == ()
    for broken in ("a", "(s", "a{s"):
        with pytest.raises(ValueError, match="breaks off"):
            complete_types(broken)


def test_the_bus_starts_the_unit_of_the_daemon() -> None:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]  # keys keep their case
    parser.read_string(ACTIVATION.read_text(encoding="utf-8"))
    expected = {"Name": BUS_NAME, "Exec": "/bin/false", "SystemdService": SERVICE}
    assert dict(parser["D-BUS Service"]) == expected
    assert DBUS_NAME == BUS_NAME == ACTIVATION.stem
    assert (REPOSITORY / "systemd" / SERVICE).exists()


def test_the_file_goes_with_the_package_and_is_installed() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    shipped = project["tool"]["setuptools"]["package-data"]["lllm3090d"]
    assert str(FILE.relative_to(REPOSITORY / "lllm3090d")) in shipped
    home = Places(Path("/h"), Path("/h/.config"), Path("/h/.local/share"))
    installed = {file.path: file.content for file in wanted(home, Path("/venv/bin/lllm3090d"))}
    bus = home.data / "dbus-1"
    assert installed[bus / "services" / ACTIVATION.name] == ACTIVATION.read_bytes()
    assert installed[bus / "interfaces" / FILE.name] == FILE.read_bytes()


def test_the_manual_is_made_of_the_contract() -> None:
    page = REFERENCE.read_text(encoding="utf-8")
    assert page.endswith(service_page.reference())
    example = (HOW_TO.parent / "dbus_client.py").read_text(encoding="utf-8")
    assert f"```python\n{example}```" in HOW_TO.read_text(encoding="utf-8")
