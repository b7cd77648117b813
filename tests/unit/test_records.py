"""Records of every version that was ever written: each is read, and none is added to unnoticed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lllm3090d.serving.observation import HOST
from lllm3090d.serving.unit_spec import RECORD_MINOR, RECORD_SCHEMA, RECORD_VARIABLE, Record, read_record

pytestmark = pytest.mark.unit

FOLDER = Path(__file__).parents[1] / "data" / "records"
MINORS = tuple(range(RECORD_MINOR + 1))


def fixture(minor: int) -> dict[str, Any]:
    """A record of that version with all its fields; never changed, for units of that release may still run."""
    path = FOLDER / f"v{RECORD_SCHEMA}.{minor}.json"
    assert path.exists(), f"add a fixture of the new version of the record: {path}"
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return values


def read(values: dict[str, Any]) -> Record | None:
    return read_record([f"{RECORD_VARIABLE}={json.dumps(values)}"])


def paths_of(value: object, prefix: str = "") -> set[str]:
    """Every field of a document, by its place."""
    if isinstance(value, dict):
        found = set()
        for name, inner in value.items():
            place = f"{prefix}.{name}" if prefix else name
            found |= {place} | paths_of(inner, place)
        return found
    if isinstance(value, list):
        return set().union(*(paths_of(each, f"{prefix}[]") for each in value))
    return set()


def fields_of(schema: dict[str, Any], types: dict[str, Any], prefix: str = "") -> set[str]:
    """Every field that a record may have, by its place."""
    if "$ref" in schema:
        schema = types[schema["$ref"].rsplit("/", 1)[1]]
    found: set[str] = set()
    for each in (*schema.get("anyOf", ()), *schema.get("allOf", ())):
        found |= fields_of(each, types, prefix)
    for each in (schema.get("items"), *schema.get("prefixItems", ())):
        if isinstance(each, dict):
            found |= fields_of(each, types, f"{prefix}[]")
    for name, inner in schema.get("properties", {}).items():
        place = f"{prefix}.{name}" if prefix else name
        found |= {place} | fields_of(inner, types, place)
    return found


@pytest.mark.parametrize("minor", MINORS)
def test_every_version_is_read_and_keeps_what_it_says(minor: int) -> None:
    values = fixture(minor)
    record = read(values)
    assert record is not None
    written = json.loads(record.model_dump_json())
    assert paths_of(values) <= paths_of(written)
    for place in paths_of(values):
        if "[]" not in place:
            assert _at(values, place) == _at(written, place), place
    plan, shares = record.plan(), record.shares("GPU-0")
    assert plan.context_tokens == values["context_tokens"]
    assert {each.where for each in shares} == ({"GPU-8d2f", HOST} if minor >= 3 else {"GPU-0", HOST})
    assert sum(each.bytes for each in shares) == sum(item["bytes"] for item in values["items"])


def _at(values: Any, place: str) -> Any:
    for name in place.split("."):
        values = values[name]
    return values if not isinstance(values, dict) else None


def test_the_newest_fixture_has_every_field_that_is_written_today() -> None:
    """A field that is added needs a default, the next RECORD_MINOR and a fixture with it, or this fails."""
    schema = Record.model_json_schema()
    assert fields_of(schema, schema.get("$defs", {})) == paths_of(fixture(RECORD_MINOR))
    assert fixture(RECORD_MINOR)["minor"] == RECORD_MINOR
    assert sorted(path.name for path in FOLDER.iterdir()) == [
        f"v{RECORD_SCHEMA}.{each}.json" for each in MINORS
    ]


@pytest.mark.parametrize("minor", MINORS[1:])
def test_versions_only_ever_add(minor: int) -> None:
    assert paths_of(fixture(minor - 1)) < paths_of(fixture(minor))


def test_a_later_minor_version_is_read_without_what_nobody_here_knows() -> None:
    values = fixture(RECORD_MINOR)
    later = json.loads(json.dumps(values)) | {"minor": RECORD_MINOR + 1, "mood": "good"}
    later["launch"]["colour"] = "red"
    later["launch"]["draft"]["colour"] = "red"
    later["launch"]["asked"]["colour"] = "red"
    later["items"][0]["colour"] = "red"
    known, found = read(values), read(later)
    assert known is not None and found is not None
    assert found == known.model_copy(update={"minor": RECORD_MINOR + 1})


def test_a_later_schema_or_a_value_that_nobody_here_knows_is_not_read() -> None:
    values = fixture(RECORD_MINOR)
    assert read(values | {"schema_version": RECORD_SCHEMA + 1}) is None
    assert read(values | {"cache_type_k": "q1_0"}) is None
    assert read(values | {"minor": -1}) is None
