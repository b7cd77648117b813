"""The table of unit properties: contracts with systemd, and what is refused."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lllm3090d.bus.messages import RemoteError
from lllm3090d.bus.properties import INFINITY, PROPERTIES, PropertyValue, encode, split_signature
from lllm3090d.bus.unit_errors import unknown_property

pytestmark = pytest.mark.unit
FACTS = Path(__file__).parent.parent / "data" / "systemd_properties_252.json"


def test_every_row_was_accepted_by_systemd_252_with_this_type() -> None:
    accepted = json.loads(FACTS.read_text(encoding="utf-8"))["accepted"]
    rows = {name: row.signature for name, row in PROPERTIES.items() if row.since <= 252}
    assert len(rows) > 30
    assert {
        name: signature for name, signature in rows.items() if signature not in accepted[name]["setter"]
    } == {}


def test_rows_for_newer_versions_were_unknown_to_systemd_252() -> None:
    accepted = json.loads(FACTS.read_text(encoding="utf-8"))["accepted"]
    newer = [name for name, row in PROPERTIES.items() if row.since > 252]
    assert newer
    assert [name for name in newer if name in accepted] == []


def test_values_become_variants_of_the_declared_types() -> None:
    encoded = encode(
        {
            "Description": "a model",
            "ExecStart": [("/bin/true", ("true", "a b", "ü"), False)],
            "Environment": ("A=1", "B=$x;%n"),
            "UMask": 0o077,
            "OOMScoreAdjust": -5,
            "MemoryMax": INFINITY,
            "NoNewPrivileges": True,
            "LogExtraFields": [b"LLLM3090_RUN=1"],
            "SuccessExitStatus": ((143,), ()),
            "SystemCallFilter": (True, ("@system-service",)),
        },
        252,
    )
    assert encoded.dropped == ()
    assert {name: (value.get_type_string(), value.unpack()) for name, value in encoded.variants} == {
        "Description": ("s", "a model"),
        "ExecStart": ("a(sasb)", [("/bin/true", ["true", "a b", "ü"], False)]),
        "Environment": ("as", ["A=1", "B=$x;%n"]),
        "UMask": ("u", 63),
        "OOMScoreAdjust": ("i", -5),
        "MemoryMax": ("t", (1 << 64) - 1),
        "NoNewPrivileges": ("b", True),
        "LogExtraFields": ("aay", [list(b"LLLM3090_RUN=1")]),
        "SuccessExitStatus": ("(aiai)", ([143], [])),
        "SystemCallFilter": ("(bas)", (True, ["@system-service"])),
    }


def test_what_this_systemd_is_too_old_for_is_left_out_and_named() -> None:
    values: dict[str, PropertyValue] = {"MemoryMax": 1, "MemoryZSwapMax": 0}
    old, new = encode(values, 252), encode(values, 253)
    assert ([name for name, _ in old.variants], old.dropped) == (["MemoryMax"], ("MemoryZSwapMax",))
    assert ([name for name, _ in new.variants], new.dropped) == (["MemoryMax", "MemoryZSwapMax"], ())


@pytest.mark.parametrize("version", [0, 249])
def test_a_systemd_that_is_older_or_does_not_say_gets_what_the_oldest_takes(version: int) -> None:
    encoded = encode({"ExecStart": [("/bin/true", ("true",), False)], "MemoryZSwapMax": 0}, version)
    assert ([name for name, _ in encoded.variants], encoded.dropped) == (["ExecStart"], ("MemoryZSwapMax",))


def test_what_this_systemd_has_refused_is_left_out() -> None:
    encoded = encode({"MemoryMax": 1, "RestrictRealtime": True}, 252, {"RestrictRealtime"})
    assert ([name for name, _ in encoded.variants], encoded.dropped) == (
        ["MemoryMax"],
        ("RestrictRealtime",),
    )


def refusal(name: str, text: str) -> RemoteError:
    return RemoteError(f"org.freedesktop.DBus.Error.{name}", text)


@pytest.mark.parametrize(
    ("error", "unknown"),
    [
        (
            refusal("PropertyReadOnly", "Cannot set property SystemCallFilter, or unknown property."),
            "SystemCallFilter",
        ),
        (refusal("PropertyReadOnly", "Cannot set property MemoryMax, or unknown property."), None),
        (refusal("PropertyReadOnly", "Cannot set property Moonlight, or unknown property."), None),
        (refusal("InvalidArgs", "Invalid SystemCallFilter setting: x"), None),
    ],
    ids=["hardening", "needed", "not ours", "a value"],
)
def test_only_hardening_that_is_unknown_may_be_left_out(error: RemoteError, unknown: str | None) -> None:
    assert unknown_property(error) == unknown


def test_a_dropped_property_is_checked_all_the_same() -> None:
    with pytest.raises(TypeError, match="MemoryZSwapMax takes an int, not str"):
        encode({"MemoryZSwapMax": "0"}, 252)


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("RestartSec", 1, ValueError, "RestartSec is not in the table"),
        ("MemoryMax", "1G", TypeError, "MemoryMax takes an int, not str"),
        ("MemoryMax", 1.5, TypeError, "MemoryMax takes an int, not float"),
        ("MemoryMax", True, TypeError, "MemoryMax takes an int, not bool"),
        ("MemoryMax", -1, ValueError, "MemoryMax = -1 is not within"),
        ("MemoryMax", 1 << 64, ValueError, "is not within"),
        ("UMask", 1 << 32, ValueError, "is not within"),
        ("NoNewPrivileges", 1, TypeError, "NoNewPrivileges takes a bool, not int"),
        ("Description", b"x", TypeError, "Description takes a str, not bytes"),
        ("Description", "a\0b", ValueError, "NUL"),
        ("WorkingDirectory", "/models/\udcff", ValueError, "not valid Unicode"),
        ("Environment", "A=1", TypeError, "Environment takes a sequence"),
        ("Environment", ["A=1", 2], TypeError, r"Environment\[1\] takes a str, not int"),
        ("Environment", {"A": "1"}, TypeError, "Environment takes a sequence"),
        ("LogExtraFields", ["A=1"], TypeError, r"LogExtraFields\[0\] takes bytes, not str"),
        ("ExecStart", [("/bin/true", ["true"])], ValueError, r"ExecStart\[0\] takes 3 members"),
        ("ExecStart", [("/bin/true", "true", False)], TypeError, r"ExecStart\[0\]\.1 takes a sequence"),
    ],
)
def test_wrong_properties_are_programming_errors_that_name_them(
    name: str, value: PropertyValue, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        encode({name: value}, 252)


def _compound(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    arrays = inner.map(lambda item: "a" + item)
    structures = st.lists(inner, min_size=1, max_size=3).map(lambda parts: f"({''.join(parts)})")
    return arrays | structures


@given(st.lists(st.recursive(st.sampled_from("sbutiy"), _compound), max_size=4))
def test_split_signature_undoes_concatenation(types: list[str]) -> None:
    assert split_signature("".join(types)) == tuple(types)
