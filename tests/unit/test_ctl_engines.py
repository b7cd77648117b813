"""``lllm3090ctl engine``: what it asks, shows and ends with; and what ``status`` says of engines."""

from __future__ import annotations

import json

import pytest

from lllm3090d.errors import ErrorCode, LlmError
from tests.fakes.control_server import ENGINE, ENGINES, STATUS, ControlServer, changed, ctl

pytestmark = pytest.mark.unit

LOCKED = LlmError(ErrorCode.ENGINE_LOCKED, "LLLM3090_LLAMA_DIR decides.", hint="Unset it.")
IGNORED = LlmError(ErrorCode.ENGINE_CHOICE_IGNORED, "x was chosen, but it is gone.", hint="Choose anew.")
MISSING = LlmError(ErrorCode.ENGINE_NOT_FOUND, "No llama-server.", hint="Build one.")


def test_list_shows_builds_and_what_is_wrong() -> None:
    with ControlServer(engines=ENGINES) as server:
        done = ctl(server, "engine", "list")
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["NAME", "VERSION", "RELEASE", "BACKEND", "USE"]
    assert "b11434" in lines[1] and "next" in lines[1]
    assert "b10434, stale" in lines[2] and "offered" in lines[2]
    assert lines[3].split() == ["path", "-", "-", "unknown", "unusable"]
    assert lines[4] == "b11434-cuda-sm86: /opt/engines/b11434-cuda-sm86/llama-server"
    assert lines[6] == "path: /usr/bin/llama-server"
    assert lines[7] == "The next start uses b11434-cuda-sm86 (chosen)."
    assert lines[8] == (
        "SmolLM2-135M runs with another engine, /usr/bin/llama-server (1 (old)), until it is loaded again."
    )
    assert lines[9:11] == ["path: This llama-server cannot be used: It dies.", "  Hint: Another one."]


@pytest.mark.parametrize(
    ("fit", "use", "told"),
    [
        (
            "never",
            "next, cannot run here",
            "sm86: no code for a card of this machine, so loads on it are refused",
        ),
        (
            "maybe",
            "next",
            "sm86: it runs on a card of this machine only if it holds PTX, which its name does not tell",
        ),
        ("runs", "next", "sm86"),
        (None, "next", "sm86"),
    ],
)
def test_a_build_for_another_architecture_is_marked(fit: str | None, use: str, told: str) -> None:
    build = changed(ENGINES.engines[0], code_fit=fit)
    with ControlServer(
        engines=changed(ENGINES, engines=(build,)), engine=changed(ENGINE, engine=build)
    ) as server:
        listed = ctl(server, "engine", "list").stdout
        shown = ctl(server, "engine", "show").stdout
    assert use in listed.splitlines()[1] and ("cannot run here" in listed) is (fit == "never")
    assert (f"b11434-cuda-sm86 was compiled for {told}." in listed) is (fit in {"never", "maybe"})
    assert f"compiled for  {told}\n" in shown


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"choice": None}, "uses b11434-cuda-sm86 (automatic)."),
        ({"locked": True, "choice": None}, "LLLM3090_LLAMA_DIR is set in the daemon's environment"),
        ({"locked": True}, "uses b11434-cuda-sm86 (locked)."),
        ({"choice": "x", "choice_problem": IGNORED.problem()}, "x was chosen, but it is gone."),
        ({"engines": (), "next": None, "next_problem": MISSING.problem()}, "No llama-server."),
        ({"engines": (), "next": None}, "No engine can be used."),
    ],
)
def test_list_says_how_it_came_to_this(changes: dict[str, object], told: str) -> None:
    with ControlServer(engines=changed(ENGINES, **changes)) as server:
        done = ctl(server, "engine", "list")
    assert done.exit_code == 0
    assert told in done.stdout


def test_show_asks_for_the_next_one_where_none_is_named() -> None:
    with ControlServer(engines=ENGINES, engine=ENGINE) as server:
        done = ctl(server, "engine", "show")
        assert [server.next_request().target for _ in range(2)] == [
            "/v1/engines",
            "/v1/engines/b11434-cuda-sm86",
        ]
        named = ctl(server, "engine", "show", "python:llama cpp/bin")
        assert server.next_request().target == "/v1/engines/python%3Allama%20cpp%2Fbin"
    assert done.exit_code == named.exit_code == 0
    assert "digest        e1-0123\n" in done.stdout
    assert "compiled for  sm86\n" in done.stdout
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["-fa,", "--flash-attn", "[on|off|auto]", "auto", "on,", "off,", "auto"] in rows
    assert ["--metrics", "disabled"] in rows


def test_show_without_any_engine_says_why() -> None:
    answer = changed(ENGINES, engines=(), next=None, next_problem=MISSING.problem())
    with ControlServer(engines=answer) as server:
        done = ctl(server, "engine", "show")
    assert done.exit_code == 6
    assert "No llama-server." in done.output


def test_select_sends_the_name_or_null() -> None:
    with ControlServer(select=ENGINES) as server:
        assert ctl(server, "engine", "select", "b11434-cuda-sm86").exit_code == 0
        done = ctl(server, "engine", "select", "--automatic", "--json")
        bodies = [server.next_request().body for _ in range(2)]
    assert [body.model_dump() for body in bodies if body] == [
        {"engine": "b11434-cuda-sm86"},
        {"engine": None},
    ]
    assert json.loads(done.stdout)["next"] == "b11434-cuda-sm86"


@pytest.mark.parametrize("arguments", [[], ["x", "--automatic"], [""], ["x", "y"]])
def test_select_takes_exactly_one_of_both(arguments: list[str]) -> None:
    with ControlServer() as server:
        assert ctl(server, "engine", "select", *arguments).exit_code == 2


def test_a_refused_choice_has_its_own_exit_status() -> None:
    with ControlServer(select=LOCKED) as server:
        done = ctl(server, "engine", "select", "x")
    assert done.exit_code == 5
    assert "LLLM3090_LLAMA_DIR decides." in done.output


def test_what_a_build_says_cannot_steer_the_terminal() -> None:
    bad = changed(ENGINES.engines[0], name="b\x1b[2J", version="1\n2", server="/x/\u202e")
    with ControlServer(engines=changed(ENGINES, engines=(bad,), next="b\x1b[2J")) as server:
        done = ctl(server, "engine", "list")
    assert "\x1b" not in done.stdout
    assert "\\x1b[2J" in done.stdout
    assert "\u202e" not in done.stdout


def test_status_tells_of_choice_staleness_and_other_engines() -> None:
    assert STATUS.engine is not None
    engine = changed(STATUS.engine, locked=False, source="engines_dir", name="x", tag="b10434", stale=True)
    answer = changed(
        STATUS, engine=engine, engine_choice="x", running_engines=ENGINES.running, engine_choice_problem=None
    )
    with ControlServer(status=answer) as server:
        done = ctl(server, "status")
    assert "; stale: b10434; from engines_dir, chosen)" in done.stdout
    assert "SmolLM2-135M runs with another engine, /usr/bin/llama-server (1 (old))" in done.stdout
    with ControlServer(status=changed(answer, engine_choice_problem=IGNORED.problem())) as server:
        done = ctl(server, "status")
    assert (
        "engine: The choice of an engine is ignored: x was chosen, but it is gone.\n  Hint: Choose anew."
        in done.stdout
    )
