"""Further arguments of a person: checked, priced, handed on, or refused with the reason. Never ignored."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lllm3090d.engines.arguments import features, launch
from lllm3090d.engines.capabilities import Backend, Option
from lllm3090d.engines.command_line import UNPRICED, read_command_line
from lllm3090d.engines.extra_arguments import (
    NOTHING,
    PRICED,
    ExtraArguments,
    check_asked_once,
    chosen_for,
    extra_arguments,
    merged,
)
from lllm3090d.engines.option_kinds import FREE, OWNED
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.planning.cache import CacheType
from lllm3090d.planning.request import Drafting, PlanRequest, ProjectorPlace
from lllm3090d.planning.rope import RopeScaling
from tests.unit.engine_captures import BUILDS
from tests.unit.engine_truth import POLICY, facts_of
from tests.unit.plans import LLAMA_8B, MIXTURE, plan_of
from tests.unit.test_command_line import BUILD, build_named

pytestmark = pytest.mark.unit

OWNED_NAMES = tuple(name for names in OWNED for name in names)


def extra(line: str | list[str], *, model: str = LLAMA_8B, build: str = "b11434") -> ExtraArguments:
    words = line.split() if isinstance(line, str) else line
    return extra_arguments(words, build_named(build), facts_of(model))


def refused(line: str | list[str], build: str = "b11434") -> LlmError:
    with pytest.raises(LlmError) as caught:
        extra(line, build=build)
    assert caught.value.code is ErrorCode.INVALID_REQUEST
    assert caught.value.hint
    return caught.value


# --- kinds -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", BUILDS)
def test_every_option_of_a_build_is_of_one_kind(build: str) -> None:
    """A switch may be free in one form and without a price in the other; some are both the daemon's and unpriced."""
    for option in build_named(build).options:
        names = set(option.names)
        kinds = [bool(names & set(kind)) for kind in (FREE, PRICED, OWNED_NAMES)]
        pair = names & {"--repack", "--op-offload"}
        assert sum(kinds) + bool(names & set(UNPRICED) and not any(kinds)) == 1, option.names
        assert pair or not names & set(UNPRICED) & set((*FREE, *PRICED)), option.names


def test_no_name_is_that_of_no_option() -> None:
    """But for those of a fork."""
    known = {name for build in BUILDS for name in build_named(build).flags}
    fork = {"--spec-draft-window", "--spec-draft-n-max-tail", "--kv-vram-cells"}
    fork |= {"--reasoning-effort-allow", "--reasoning-effort-fallback", "--reasoning-max-tokens-floor"}
    assert {*FREE, *PRICED, *OWNED_NAMES} - known <= fork


def test_an_option_that_nobody_has_looked_at_is_refused() -> None:
    capabilities = build_named("b11434")
    newer = replace(capabilities, options=(*capabilities.options, Option(("--warp-cache",), "N")))
    with pytest.raises(LlmError, match="does not know the option"):
        extra_arguments(["--warp-cache", "3"], newer, facts_of(LLAMA_8B))


# --- what has a price ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "asked"),
    [
        ("-c 8192", PlanRequest(context_tokens=8192)),
        ("-c 4096 --ctx-size 8192", PlanRequest(context_tokens=8192)),
        ("-c 0 -ub 0 -np -1 -cms 0", PlanRequest()),  # the engine's defaults: nothing was asked
        ("-np 3 -b 1024 -ub 256", PlanRequest(parallel=3, batch_tokens=1024, micro_batch_tokens=256)),
        ("-ctk q8_0 -ctv f16", PlanRequest(cache_type_k=CacheType.Q8_0, cache_type_v=CacheType.F16)),
        ("-ngl 20", PlanRequest(gpu_layers=20)),
        ("-ngl 99", PlanRequest(gpu_layers=33)),
        ("-ngl all", PlanRequest(gpu_layers=33)),
        ("-ngl auto", PlanRequest()),
        ("-nkvo --kv-unified --swa-full", PlanRequest(cache_on_host=True, unified=True, swa_full=True)),
        ("--spec-type none", PlanRequest(drafting=Drafting.OFF)),
        (
            "--spec-type draft-mtp --spec-draft-n-max 5",
            PlanRequest(drafting=Drafting.ON, draft_tokens=5),
        ),
        ("--no-mmproj", PlanRequest(projector=ProjectorPlace.OFF)),
        ("--no-mmproj-offload", PlanRequest(projector=ProjectorPlace.HOST)),
        ("--mmproj-offload", PlanRequest(projector=ProjectorPlace.CARD)),
        ("--rope-scaling yarn", PlanRequest(rope_scaling=RopeScaling.YARN)),
        ("-fa on", PlanRequest()),
    ],
)
def test_what_has_a_price_is_asked_of_the_planner(line: str, asked: PlanRequest) -> None:
    found = extra(line)
    assert found.request == asked
    assert (found.passed, found.environment) == ((), ())


def test_all_experts() -> None:
    assert extra("--cpu-moe", model=MIXTURE).request.cpu_experts == 48
    assert extra("-ncmoe 7", model=MIXTURE).request.cpu_experts == 7


def test_what_stands_in_place_of_settings() -> None:
    found = extra("--ctx-checkpoints 0 -cms 256 --cache-ram 64 --image-max-tokens 512")
    policy = found.policy(POLICY)
    assert (policy.context_checkpoints, policy.checkpoint_min_step_tokens) == (0, 256)
    assert (policy.prompt_cache_mib, policy.image_max_tokens) == (64, 512)
    assert NOTHING.policy(POLICY) == POLICY


def test_they_change_the_plan_and_not_only_the_command_line() -> None:
    found = extra("-c 16384 -np 2 -ctk f16 --cache-ram 0 --threads 4 --temp 0.5")
    plan = plan_of(LLAMA_8B, found.request, backend=Backend.CUDA, policy=found.policy(POLICY))
    capabilities = build_named("b11434")
    line = launch(
        BUILD, capabilities, Path("/m.gguf"), plan, Path("/e.sock"), "x", extra=found, inherited={}
    )
    assert line.argv[-4:] == ("--threads", "4", "--temp", "0.5")
    back = read_command_line(line.argv[1:], capabilities, facts_of(LLAMA_8B))
    assert back.launch == plan.launch
    assert (back.launch.context_tokens, back.launch.cache_type_k) == (16_384, CacheType.F16)
    assert back.launch.prompt_cache_mib == 0
    assert features(capabilities).backend is Backend.CUDA


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--no-such-flag", "has no option"),
        ("-c", "lacks its value"),
        ("-c -np 2", "-c lacks its value (N): -np is an option"),
        ("-ctk q9_0", "'q9_0' is not among the values"),
        ("--reasoning-format loud", "'loud' is not among the values"),
        ("-c many", "whole number"),
        ("-m /x.gguf", "which files an engine loads"),
        ("-hf someone/model", "which files an engine loads"),
        ("--gpt-oss-20b-default", "which files an engine loads"),
        ("--host 0.0.0.0", "a socket of its own"),
        ("--port 8080", "a socket of its own"),
        ("--api-key secret", "locked out"),
        ("--fit on", "the plan is what was priced"),
        ("--device none", "which cards a model is on"),
        ("--no-slots", "watches its engines"),
        ("-md /d.gguf", "found beside their model"),
        ("--spec-type draft-simple", "only draft-mtp and none"),
        ("--spec-type ngram-mod", "only draft-mtp and none"),
        ("--spec-type draft-mtp,ngram-mod", "only draft-mtp and none"),
        ("-fa off", "flash attention"),
        ("-fa auto", "flash attention"),
        ("--cache-ram -1", "without a limit"),
        ("--cache-ram 2147483647", "more than 1073741824"),
        ("--ctx-checkpoints 257", "more than 256"),
        ("--image-max-tokens 2147483647", "more than 1048576"),
        ("--n-cpu-moe 10001", "more than 10000"),
        ("--ctx-checkpoints -1", "not negative"),
        ("--rope-scale 4", "follows from the context"),
        ("--load-mode mlock", "locked"),
        ("--lora /l.gguf", "has no price here yet"),
        ("--control-vector /c.gguf", "has no price here yet"),
        ("-ot x=CPU", "has no price here yet"),
        ("--embeddings", "has no price here yet"),
        ("--reranking", "has no price here yet"),
        ("-nr", "has no price here yet"),
        ("-ts 1,1", "--gpu names the only one"),
    ],
)
def test_refused_with_the_reason(line: str, words: str) -> None:
    assert words in refused(line).message


def test_a_value_that_a_unit_cannot_carry() -> None:
    assert "control characters" in refused(["--chat-template", "a\nb"]).message
    assert "no variable stands for it" in refused(["--grammar", "root ::= $"]).message


# --- what is handed on ------------------------------------------------------------------------------------------------


def test_the_rest_is_handed_on_as_it_is() -> None:
    found = extra("--threads 8 --no_warmup --repack --load-mode none -lv 4 --spec-draft-p-min 0.5")
    assert found.passed == (
        *("--threads", "8", "--no-warmup", "--repack", "--load-mode", "none", "-lv", "4"),
        *("--spec-draft-p-min", "0.5"),
    )
    assert found.request == PlanRequest()


def test_values_that_systemd_would_alter_go_through_the_environment() -> None:
    found = extra(["--chat-template-kwargs", '{"a": "$x; y"}', "--seed", "1"])
    assert found.passed == ("--seed", "1")
    assert found.environment == (("LLAMA_ARG_CHAT_TEMPLATE_KWARGS", '{"a": "$x; y"}'),)
    line = launch(
        BUILD,
        build_named("b11434"),
        Path("/m.gguf"),
        plan_of(LLAMA_8B, backend=Backend.CUDA),
        Path("/e.sock"),
        "x",
        extra=found,
        inherited={},
    )
    assert dict(line.environment)["LLAMA_ARG_CHAT_TEMPLATE_KWARGS"] == '{"a": "$x; y"}'
    assert "LLAMA_ARG_CHAT_TEMPLATE_KWARGS" not in line.unset


def test_of_an_option_with_such_a_value_only_the_last_is_handed_on() -> None:
    """The engine reads its environment first: an argument would win over a variable that came later."""
    plain, odd = ["--chat-template-kwargs", "{}"], ["--chat-template-kwargs", "$"]
    assert extra([*plain, *odd]).passed == ()
    assert extra([*odd, *plain]).passed == tuple(plain)
    assert extra([*odd, *plain]).environment == ()


# --- who asked ------------------------------------------------------------------------------------------------------


def test_what_was_asked_for_outranks_what_was_set() -> None:
    asked = PlanRequest(context_tokens=4096, unified=True)
    settings = extra("-c 8192 -np 3 -nkvo").request
    assert merged(asked, settings) == PlanRequest(
        context_tokens=4096, unified=True, parallel=3, cache_on_host=True
    )


def test_one_load_does_not_ask_twice() -> None:
    found = extra("-c 8192 -ctk q8_0")
    check_asked_once(PlanRequest(context_tokens=8192, parallel=2), found)
    with pytest.raises(LlmError, match="--context was asked for twice: 4096, and 8192") as caught:
        check_asked_once(PlanRequest(context_tokens=4096), found)
    assert caught.value.code is ErrorCode.INVALID_REQUEST


@pytest.mark.parametrize(
    ("asked", "line", "words"),
    [
        (PlanRequest(unified=True), "-no-kvu", "--unified was asked for twice: on, and off in"),
        (PlanRequest(unified=True), "-kvu -no-kvu", "--unified was asked for twice: on, and off in"),
        (PlanRequest(cache_on_host=True), "-kvo", "--cache-on-host was asked for twice: on, and off in"),
        (
            PlanRequest(drafting=Drafting.AUTO),
            "--spec-type none",
            "--draft was asked for twice: auto, and off",
        ),
    ],
)
def test_what_is_usual_contradicts_where_it_is_said(asked: PlanRequest, line: str, words: str) -> None:
    with pytest.raises(LlmError, match=words) as caught:
        check_asked_once(asked, extra(line))
    assert caught.value.code is ErrorCode.INVALID_REQUEST
    check_asked_once(PlanRequest(), extra(line))
    assert merged(PlanRequest(), extra(line).request) == extra(line).request


def test_what_nobody_says_contradicts_nothing() -> None:
    asked = PlanRequest(unified=True, cache_on_host=True, context_tokens=4096)
    for line in ("", "-kvu -nkvo", "-no-kvu -kvu", "-c 0", "--threads 4"):
        check_asked_once(asked, extra(line))


def test_settings_for_every_model_and_for_one() -> None:
    table = {"*": ["--threads", "8"], "qwen": ["--threads", "4"]}
    assert chosen_for("qwen", table) == ("--threads", "8", "--threads", "4")
    assert chosen_for("other", table) == ("--threads", "8")
    assert chosen_for("qwen", {}) == ()
