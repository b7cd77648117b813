"""The reference of the gateway says what the code does: addresses, examples of failures, types."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from lllm3090d.checkpoints.library import Checkpoint, resolve
from lllm3090d.errors import LlmError
from lllm3090d.gateway import connections, dialects, gateway, naming
from lllm3090d.gateway.filters import CHANGED
from lllm3090d.gateway.routes import ROUTES, Dialect, Duty, Where
from lllm3090d.settings import SETTING_KEYS, GatewayLoad

pytestmark = pytest.mark.unit

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "gateway.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def example(name: str) -> object:
    found = re.search(rf"<!-- example: {re.escape(name)} -->\n```json\n(.*)\n```", PAGE)
    assert found is not None
    return json.loads(found[1])


def test_every_address_is_told_with_what_it_does() -> None:
    told = {}
    for row in re.findall(r"^\| (`/.*) \|$", section("Addresses"), re.MULTILINE):
        addresses, methods, dialect, model, slot, loads = row.split(" | ")
        for address in re.findall(r"`([^`]+)`", addresses):
            told[address] = (set(methods.split(", ")), dialect, model, slot == "yes", loads == "yes")
    known = {
        path: (set(row.methods), row.dialect.value, row.where.value, row.duty is Duty.WORK, row.load)
        for path, row in ROUTES.items()
    }
    assert told == known
    assert {where.value for where in Where} - {Where.PATH.value} == {each[2] for each in told.values()}


@pytest.mark.parametrize("dialect", Dialect)
def test_an_unknown_model_looks_as_it_is_shown(dialect: Dialect) -> None:
    with pytest.raises(LlmError) as caught:
        resolve("smolm2", (Checkpoint("smollm2-135m", Path("/m"), (), 0),), {})
    body = json.loads(dialects.body(caught.value, dialect, "req_4780e3bce720279db49b"))
    assert body == example(dialect.value)


def test_a_prompt_that_is_too_long_looks_as_it_is_shown() -> None:
    body = json.loads(dialects.body(dialects.too_long(3031, 1024), Dialect.OPENAI, "req_1"))
    assert body == example("too long")


def test_every_type_of_anthropic_is_told() -> None:
    told = section("Failures")
    for status, kind in dialects._ANTHROPIC_TYPES.items():
        assert re.search(rf"`{kind}` \([^)]*{status}", told), kind


def test_policies_headers_and_settings() -> None:
    assert re.findall(r"^\| `(\w+)` \|", section("A model that is not loaded"), re.MULTILINE) == [
        policy.value for policy in GatewayLoad
    ]
    headers = section("Headers")
    for header in (gateway.REQUEST_ID, gateway.PRIORITY, gateway.KEEP_ALIVE, CHANGED):
        assert f"| `{header}` |" in headers
    for setting in re.findall(r"`((?:gateway|idle)_\w+)`", PAGE):
        assert setting in SETTING_KEYS
    limits = section("Limits")
    assert f"{connections.LARGEST_LINE_BYTES >> 10} KiB" in limits
    assert f"{connections.MOST_HEADERS} headers" in limits and f"{naming.LONGEST_NAME} characters" in limits
