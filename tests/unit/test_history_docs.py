"""The reference says what is true of events, their actors and their bounds, and of the files that logs go to."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lllm3090d import wire
from lllm3090d.serving import event_table, history, log_files, recorder
from lllm3090d.serving.journal import LINES_MAX
from lllm3090d.surfaces import history_api
from lllm3090d.wire import ActorKind

pytestmark = pytest.mark.unit

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"


def page(name: str) -> str:
    return " ".join((REFERENCE / name).read_text(encoding="utf-8").split())


def section(name: str, heading: str) -> str:
    text = (REFERENCE / name).read_text(encoding="utf-8")
    return text.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]


def test_every_actor_is_in_the_reference() -> None:
    assert re.findall(r"^\| `(\w+)` \|", section("events.md", "Actors"), re.M) == [
        k.value for k in ActorKind
    ]


def test_every_member_of_an_event_is_in_the_reference() -> None:
    first = (REFERENCE / "events.md").read_text(encoding="utf-8").split("\n## ", 1)[0]
    rows = re.findall(r"^\| ([a-z, ]+) \|", first, re.M)
    assert [name for row in rows for name in row.split(", ")] == list(wire.Event.model_fields)


def test_the_bounds_of_the_history_are_those_of_the_code() -> None:
    told = page("events.md")
    assert f"within {recorder.BATCH_S} s" in told
    assert f"{recorder.WAITING_MOST} events wait in memory" in told
    assert f"cut at {history.LONGEST_MESSAGE} characters" in told
    assert f"larger than {history.MOST_DETAILS_CHARACTERS:,} characters" in told
    assert f"falls {history.SUBSCRIBER_BACKLOG} events behind" in told
    assert event_table.ROUTINE_SHARE == 0.5 and "take half of that at most" in told
    assert event_table.PRUNE_FRACTION == 0.05 and "About a twentieth more" in page("settings.md")


def test_the_bounds_of_log_files_are_those_of_the_code() -> None:
    of_one = f"{log_files.MOST_BYTES >> 20} MiB of it at most"
    of_all = f"of {log_files.KEPT_FILES} ended runs, for {log_files.KEPT_DAYS} days"
    assert f"{of_one}, and {of_all}." in page("cli.md")


def test_the_limits_of_the_api_are_those_of_the_code() -> None:
    told = page("http-api.md")
    assert f"0 to {history_api.MOST_RUNS}; {history_api.DEFAULT_RUNS} without it" in told
    assert f"0 to {LINES_MAX}; {history_api.DEFAULT_LOG_LINES} without it" in told
    assert f"0 to {LINES_MAX}; all that are kept without it" in told


def test_every_figure_of_a_run_is_in_the_reference_or_means_what_it_says() -> None:
    told = (
        (REFERENCE / "http-api.md")
        .read_text(encoding="utf-8")
        .split("### `GET /v1/models/{name}/history`", 1)[1]
    )
    told = told.split("\n### ", 1)[0]
    plain = {
        "run",
        "unit",
        "ready_at",
        "context_tokens",
        "parallel",
        "reserved_bytes",
        "measured_bytes",
        "engine",
    }
    for name in wire.RunView.model_fields.keys() - plain - {"is_live"}:
        assert f"`{name}`" in told, name
