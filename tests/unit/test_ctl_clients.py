"""``env``, ``run`` and ``claude``: what programs are told of a model, and when an agent is refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lllm3090ctl import environment
from lllm3090ctl.environment import AGENT_FLOOR_TOKENS, Facts
from lllm3090d import wire
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.planning.units import PAGE_TOKENS, round_up
from lllm3090d.planning.verdict import AGENT_PROMPT_FLOOR_TOKENS, agent_ready, concurrent_subagents
from tests.fakes.control_server import (
    INSPECTED,
    INSTANCE,
    MODELS,
    PLAN,
    READY,
    STATUS,
    WAIT_S,
    ControlServer,
    Script,
    Stream,
    changed,
    ctl,
    spawn_ctl,
)
from tests.fakes.gateway_port import GatewayPort

pytestmark = pytest.mark.unit

NASTY = 'it\'s $HOME `id` "x" \\ ! ;#'
BIG = changed(INSTANCE, window_tokens=65_536, context_tokens=196_608, parallel=3)
BIG_READY = changed(READY, instance=BIG)
NO_ROOM = LlmError(ErrorCode.INSUFFICIENT_VRAM, "no room")


@contextmanager
def scene(gateway: GatewayPort | None = None, **scripts: Script | list[Script]) -> Iterator[ControlServer]:
    """A daemon whose gateway listens, with what is loaded."""
    with gateway or GatewayPort() as port:
        usual: dict[str, Any] = {
            "status": changed(STATUS, gateway={"address": port.url}),
            "instances": wire.Instances(instances=(BIG,)),
            "load": Stream((BIG_READY,)),
            "plan": PLAN,
            "models": MODELS,
            "inspect": changed(INSPECTED, name="SmolLM2-135M"),
        }
        with ControlServer(**(usual | scripts)) as server:
            yield server


def told(server: ControlServer, *arguments: str, env: Mapping[str, str] | None = None) -> Any:
    done = ctl(server, "env", *arguments, "--json", env=env)
    assert done.exit_code == 0, done.output
    return json.loads(done.output)


# --- facts -----------------------------------------------------------------------------------------------------------


def test_floor_is_that_of_the_daemon() -> None:
    assert round_up(AGENT_PROMPT_FLOOR_TOKENS + 1, PAGE_TOKENS) == AGENT_FLOOR_TOKENS
    assert environment.AGENT_PROMPT_TOKENS == AGENT_PROMPT_FLOOR_TOKENS
    assert agent_ready(AGENT_FLOOR_TOKENS) and not agent_ready(AGENT_FLOOR_TOKENS - 960)
    for slots in (1, 2, 4):
        assert Facts("m", 1, slots, "plan").subagents == concurrent_subagents(slots)


@pytest.mark.parametrize(
    ("window", "slots", "output", "subagents"),
    [
        (262_144, 4, 32_000, 3),
        (65_536, 2, 25_536, 1),
        (40_960, 1, 5120, 1),
        (8192, 1, 1024, 1),
        (256, 1, 32, 1),
    ],
)
def test_limits_come_from_the_window(window: int, slots: int, output: int, subagents: int) -> None:
    facts = Facts("m", window, slots, "plan")
    assert (facts.output_tokens, facts.subagents) == (output, subagents)
    values = environment.variables(facts, "http://h:1", "k")
    assert int(values["CLAUDE_CODE_MAX_OUTPUT_TOKENS"]) + environment.AGENT_PROMPT_TOKENS <= max(
        window, 45_120
    )
    assert values["CLAUDE_CODE_MAX_CONCURRENT_SUBAGENTS"] == str(subagents)


def test_env_tells_of_the_model_as_it_is_loaded() -> None:
    with scene() as server:
        document = told(server, "smol")
        url = document["environment"]["ANTHROPIC_BASE_URL"]
    assert (document["model"], document["basis"]) == ("SmolLM2-135M", "loaded")
    assert (document["window_tokens"], document["slots"], document["subagents"]) == (65_536, 3, 2)
    values = document["environment"]
    assert values["OPENAI_BASE_URL"] == f"{url}/v1"
    assert values["OPENAI_API_KEY"] == values["ANTHROPIC_AUTH_TOKEN"] == "not-needed"
    models = {name: value for name, value in values.items() if name.endswith("_MODEL")}
    assert set(models.values()) == {"SmolLM2-135M"} and len(models) == 7
    assert values["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "65536"
    assert "ANTHROPIC_API_KEY" in document["unset"]


def test_env_tells_what_a_load_would_get_else_what_the_empty_card_gives() -> None:
    nothing = wire.Instances(instances=())
    with scene(instances=nothing) as server:
        document = told(server, "smol")
        assert (document["basis"], document["window_tokens"]) == ("plan", PLAN.window_tokens)
    listed = changed(
        MODELS,
        models=[
            MODELS.models[0].model_dump() | {"name": "SmolLM2-135M", "window_tokens": 4096, "parallel": 2}
        ],
    )
    for plan in (NO_ROOM, changed(PLAN, fits=False)):
        with scene(instances=nothing, plan=plan, models=listed) as server:
            document = told(server, "smol")
            assert (document["basis"], document["window_tokens"], document["slots"]) == (
                "empty-card",
                4096,
                2,
            )
    unplanned = changed(listed, models=[listed.models[0].model_dump() | {"window_tokens": None}])
    with scene(instances=nothing, plan=NO_ROOM, models=unplanned) as server:
        assert ctl(server, "env", "smol").exit_code == 5
    with scene(instances=nothing, plan=LlmError(ErrorCode.UNKNOWN_MODEL, "none")) as server:
        assert ctl(server, "env", "smol").exit_code == 4


def test_env_of_a_model_that_generates_no_text_is_for_openais_libraries_alone() -> None:
    vectors = changed(BIG, purpose="embedding")
    nothing = wire.Instances(instances=())
    listed = MODELS.models[0].model_dump() | {"name": "SmolLM2-135M", "window_tokens": 512, "parallel": 2}
    scenes: tuple[tuple[str, dict[str, Any]], ...] = (
        ("loaded", {"instances": wire.Instances(instances=(vectors,))}),
        ("plan", {"instances": nothing, "plan": changed(PLAN, purpose="rerank")}),
        (
            "empty-card",
            {
                "instances": nothing,
                "plan": NO_ROOM,
                "models": changed(MODELS, models=[listed | {"purpose": "embedding"}]),
            },
        ),
    )
    for basis, scripts in scenes:
        with scene(**scripts) as server:
            document = told(server, "smol")
            text = ctl(server, "env", "smol").output
        assert (document["basis"], document["unset"]) == (basis, [])
        assert document["purpose"] == ("rerank" if basis == "plan" else "embedding")
        assert document["environment"].keys() == {"OPENAI_BASE_URL", "OPENAI_API_KEY"}
        assert (document["output_tokens"], document["subagents"]) == (None, None)
        assert len(text.splitlines()) == 2 and "unset" not in text
    inherited = {"ANTHROPIC_API_KEY": "own"}
    assert environment.changed(inherited, {"OPENAI_API_KEY": "k"})["ANTHROPIC_API_KEY"] == "own"


def test_claude_is_for_models_that_generate_text() -> None:
    vectors = changed(BIG, name="bge", purpose="embedding")
    with scene(instances=wire.Instances(instances=(vectors,))) as server:
        for more in ((), ("--anyway", "--no-load")):
            done = ctl(server, "claude", "--model", "bge", *more, "--json")
            problem = json.loads(done.output)
            assert (done.exit_code, problem["code"]) == (2, "wrong_purpose"), problem
            assert "bge is a model for embedding" in problem["detail"]
        # It is not taken for the only model that there is.
        assert json.loads(ctl(server, "claude", "--json").output)["code"] == "no_model_named"


# --- shells ----------------------------------------------------------------------------------------------------------

PROGRAM = f"{sys.executable} -c 'import json,os; print(json.dumps(dict(os.environ)))'"


@pytest.mark.parametrize(
    ("shell", "program"), [("sh", "sh"), ("sh", "bash"), ("fish", "fish"), ("csh", "tcsh")]
)
def test_shells_take_values_as_they_are(shell: str, program: str, tmp_path: Path) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    values = {"OPENAI_API_KEY": NASTY, "ANTHROPIC_MODEL": "a\nb", "X": "é"}
    script = tmp_path / "script"
    script.write_text(environment.commands(values, shell) + f"\n{PROGRAM}\n", encoding="utf-8")
    inherited = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "ANTHROPIC_API_KEY": "own",
        "LC_ALL": "C.UTF-8",
    }
    done = subprocess.run([program, str(script)], env=inherited, capture_output=True, text=True, check=True)
    seen = json.loads(done.stdout)
    assert {name: seen[name] for name in values} == values and "ANTHROPIC_API_KEY" not in seen


def test_env_can_be_evaluated() -> None:
    with scene() as server:
        process = spawn_ctl(server, "env", "smol")
        text, _ = process.communicate(timeout=WAIT_S)
        done = subprocess.run(
            ["sh", "-c", f'eval "$1"; {PROGRAM}', "sh", text], capture_output=True, text=True, check=True
        )
        assert json.loads(done.stdout)["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "65536"
        plain = json.loads(ctl(server, "env", "smol", "--shell", "json").output)
    assert plain["ANTHROPIC_MODEL"] == "SmolLM2-135M" and plain["ANTHROPIC_API_KEY"] is None


# --- the gateway and its key -----------------------------------------------------------------------------------------


def test_a_key_is_taken_from_file_or_environment_and_tried(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("sesame\n")
    with scene(GatewayPort(key="sesame")) as server:
        refused = ctl(server, "env", "smol")
        assert refused.exit_code == 9 and "asks for a key" in refused.output
        assert told(server, "smol", "--key-file", str(file))["environment"]["OPENAI_API_KEY"] == "sesame"
        document = told(server, "smol", env={"LLLM3090_API_KEY": "sesame"})
        assert document["environment"]["OPENAI_API_KEY"] == "sesame"
        for content in (b"", b"two words", b"\xff", b"x" * 5000):
            file.write_bytes(content)
            assert ctl(server, "env", "smol", "--key-file", str(file)).exit_code == 78
        missing = ctl(server, "env", "smol", "--key-file", str(tmp_path / "none"), "--json")
        assert json.loads(missing.output)["code"] == "key_unreadable"


def test_a_gateway_that_does_not_listen_is_told() -> None:
    taken = LlmError(ErrorCode.GATEWAY_UNAVAILABLE, "127.0.0.1:1919 is taken.").problem()
    for gateway, code in (
        ({"address": None}, "gateway_off"),
        ({"address": None, "problem": taken}, "gateway_unavailable"),
    ):
        with scene(status=changed(STATUS, gateway=gateway)) as server:
            done = ctl(server, "env", "smol", "--json")
            assert (done.exit_code, json.loads(done.output)["code"]) == (78, code)
    with scene(status=changed(STATUS, gateway={"address": "http://127.0.0.1:1"})) as server:
        done = ctl(server, "env", "smol", "--json")
        assert (done.exit_code, json.loads(done.output)["code"]) == (3, "gateway_unreachable")


# --- programs --------------------------------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A PATH with a ``claude`` that tells its arguments and its environment."""
    script = tmp_path / "bin" / "claude"
    script.parent.mkdir()
    script.write_text(
        f"#!{sys.executable}\n"
        "import json, os, signal, sys\n"
        "pipe = signal.getsignal(signal.SIGPIPE) == signal.SIG_DFL\n"
        "print(json.dumps([sys.argv[1:], dict(os.environ), os.environ.get('PYTHONSTARTUP'), pipe]))\n"
        "sys.exit(7)\n"
    )
    script.chmod(0o755)
    return f"{script.parent}:{os.environ['PATH']}"


def test_claude_gets_the_real_figures_and_its_arguments(path: str, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("sesame")
    own = {"PATH": path, "ANTHROPIC_API_KEY": "own", "CLAUDE_CODE_USE_BEDROCK": "1", "HOME": str(tmp_path)}
    with scene(GatewayPort(key="sesame")) as server:
        process = spawn_ctl(
            server, "claude", "--key-file", str(key), "--", "-p", "a b", "--model", "x", env=own
        )
        out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 7, err
    arguments, seen, _, _ = json.loads(out)
    assert arguments[0] == "--settings" and arguments[2:] == ["-p", "a b", "--model", "x"]
    settings = json.loads(arguments[1])["env"]
    assert seen["OPENAI_API_KEY"] == "sesame" and not any("sesame" in word for word in arguments)
    assert seen["ANTHROPIC_MODEL"] == settings["ANTHROPIC_MODEL"] == "SmolLM2-135M"
    assert settings["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "65536"
    assert settings["CLAUDE_CODE_MAX_CONCURRENT_SUBAGENTS"] == "2"
    assert not {"ANTHROPIC_API_KEY", "CLAUDE_CODE_USE_BEDROCK"} & set(seen)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["bin", "key"]  # nothing was written


def test_settings_of_the_person_on_the_command_line_are_left_alone(path: str) -> None:
    with scene() as server:
        process = spawn_ctl(
            server, "claude", "--model", "smol", "--settings", "mine.json", env={"PATH": path}
        )
        out, _ = process.communicate(timeout=WAIT_S)
    assert json.loads(out)[0] == ["--settings", "mine.json"]


def test_claude_is_refused_below_the_floor_before_anything_is_loaded(path: str) -> None:
    small = changed(INSTANCE, window_tokens=32_768, context_tokens=65_536, parallel=2)
    alone = {
        "ask": "--parallel 1",
        "window_tokens": 65_536,
        "parallel": 1,
        "card_bytes": 1,
        "gain": "longer",
    }
    plan = changed(PLAN, window_tokens=32_768, trained_context_tokens=131_072, alternatives=[alone])
    with scene(instances=wire.Instances(instances=(small,)), plan=plan) as server:
        done = ctl(server, "claude", "--model", "SmolLM2-135M", "--json")
        problem = json.loads(done.output)
        while not server.seen.empty():
            assert server.next_request().target != "/v1/load"
    assert done.exit_code == 5 and problem["code"] == "window_too_small"
    assert problem["details"] == {
        "model": "SmolLM2-135M", "window_tokens": 32_768, "floor_tokens": 40_960, "missing_tokens": 8192,
    }  # fmt: skip
    assert (
        "32,768 tokens (2 slots share 65,536)" in problem["detail"]
        and "8,192 are missing" in problem["detail"]
    )
    command = f"lllm3090ctl --socket {server.path}"
    assert (
        f"65,536 tokens: {command} unload SmolLM2-135M && {command} load SmolLM2-135M --parallel 1"
        in problem["hint"]
    )
    assert "--anyway" in problem["hint"]


def test_ways_out_that_are_none_are_not_offered() -> None:
    nothing = wire.Instances(instances=())
    short = changed(PLAN, trained_context_tokens=8192)
    smallest = {"gib": 32, "total_bytes": 32 << 30, "window_tokens": 40_960, "evidence": "header"}
    narrow = changed(PLAN, trained_context_tokens=131_072, smallest_card=smallest, alternatives=[])
    for plan, words in ((short, "trained for 8,192 tokens"), (narrow, "a card of 32 GiB")):
        with scene(instances=nothing, plan=plan) as server:
            hint = json.loads(ctl(server, "claude", "--model", "smol", "--json").output)["hint"]
        assert words in hint and " load " not in hint


def test_anyway_is_anyway_and_a_smaller_launch_than_planned_is_noticed(path: str) -> None:
    small = changed(READY, instance=changed(INSTANCE, window_tokens=8192))
    nothing, plan = wire.Instances(instances=()), changed(PLAN, window_tokens=65_536)
    with scene(instances=nothing, plan=plan, load=Stream((small,))) as server:
        process = spawn_ctl(server, "claude", "--model", "smol", env={"PATH": path})
        assert process.communicate(timeout=WAIT_S)[0] == "" and process.returncode == 5
        process = spawn_ctl(server, "claude", "--model", "smol", "--anyway", env={"PATH": path})
        out, _ = process.communicate(timeout=WAIT_S)
    assert json.loads(out)[1]["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "8192"


def test_claude_needs_a_model_and_a_program(tmp_path: Path) -> None:
    for instances in ((), (BIG, changed(BIG, name="other"))):
        with scene(instances=wire.Instances(instances=instances)) as server:
            done = ctl(server, "claude")
            assert done.exit_code == 2 and "claude --model NAME" in done.output
    with scene() as server:
        (tmp_path / "env").symlink_to(shutil.which("env") or "")
        process = spawn_ctl(server, "claude", env={"PATH": str(tmp_path)})
        _, err = process.communicate(timeout=WAIT_S)
        assert process.returncode == 4 and "npm install -g @anthropic-ai/claude-code" in err
        assert (
            ctl(server, "claude", "--no-load", "--model", "smol", env={"PATH": str(tmp_path)}).exit_code == 4
        )


def test_run_starts_any_program(path: str, tmp_path: Path) -> None:
    with scene() as server:
        process = spawn_ctl(server, "run", "smol", "--", "claude", "--json", "-x", env={"PATH": path})
        out, err = process.communicate(timeout=WAIT_S)
        arguments, seen, _, _ = json.loads(out)
        assert arguments == ["--json", "-x"] and seen["OPENAI_BASE_URL"].endswith("/v1"), err
        plain = tmp_path / "plain"
        plain.write_text("no program")
        done = ctl(server, "run", "smol", "--", str(plain), "--json")
        assert done.exit_code == 4 and "Permission denied" in done.output
        assert ctl(server, "run", "smol").exit_code == 2
    with scene(instances=wire.Instances(instances=())) as server:
        done = ctl(server, "run", "--no-load", "smol", "--", "true")
        assert done.exit_code == 4 and "--no-load" in done.output


def test_a_load_that_fails_starts_nothing(path: str) -> None:
    with scene(load=NO_ROOM) as server:
        process = spawn_ctl(server, "run", "smol", "--", "claude", env={"PATH": path})
        out, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, out) == (5, "") and "no room" in err
