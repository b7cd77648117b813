"""From a plan to the command line: every priced flag, only known flags, nothing systemd would alter."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lllm3090d.checkpoints.purpose import Pooling, Purpose
from lllm3090d.engines.arguments import Launch, features, launch
from lllm3090d.engines.capabilities import Backend, Build, Capabilities
from lllm3090d.engines.help_text import parse_help, parse_options
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.planning.launch import Launch as Sizes
from lllm3090d.planning.placement import Placement
from lllm3090d.planning.planner import CacheType, CappedBy, Plan
from lllm3090d.planning.quote import Draft, Quote, SpecType
from lllm3090d.planning.request import Features
from lllm3090d.planning.rope import RopeScaling
from lllm3090d.planning.stretch import Stretch
from tests.fakes.engine import Behaviour, help_text, parse
from tests.unit.engine_captures import BUILDS, answers

pytestmark = pytest.mark.unit

BUILD = Build(Path("/opt/llama.cpp/bin/llama-server"), (Path("/opt/llama.cpp/bin"),), "test", locked=False)
MODEL = Path("/models/SmolLM2/SmolLM2.gguf")
SOCKET = Path("/run/user/1000/lllm3090d/engines/smollm2-1a2b.sock")
PLAN = Plan(
    launch=Sizes(
        context_tokens=8192,
        parallel=2,
        cache_type_k=CacheType.Q8_0,
        cache_type_v=CacheType.Q4_0,
        batch_tokens=2048,
        micro_batch_tokens=512,
        context_checkpoints=8,
        prompt_cache_mib=1024,
    ),
    window_tokens=4096,
    on_card=False,
    capped_by=CappedBy.MODEL,
    quote=Quote(()),
)
ON_CARD = replace(PLAN, on_card=True)


def _with(plan: Plan, **changes: Any) -> Plan:
    """The plan with other values of its launch."""
    return replace(plan, launch=replace(plan.launch, **changes))


def _capabilities(*missing: str, backend: Backend = Backend.CPU) -> Capabilities:
    text = help_text(Behaviour(missing_flags=missing))
    flags, valued, variables = parse_help(text)
    return Capabilities("11434 (abc)", flags, backend, (), valued, variables, parse_options(text))


def _launch(
    capabilities: Capabilities | None = None,
    plan: Plan = PLAN,
    model: Path = MODEL,
    alias: str = "SmolLM2",
    inherited: dict[str, str] | None = None,
) -> Launch:
    return launch(
        BUILD, capabilities or _capabilities(), model, plan, SOCKET, alias, inherited=inherited or {}
    )


def _value(line: Launch, flag: str) -> str:
    return line.argv[line.argv.index(flag) + 1]


def test_every_priced_flag_is_emitted() -> None:
    line = _launch()

    assert line.argv[0] == str(BUILD.server)
    expected = {
        "--host": str(SOCKET),
        "-m": str(MODEL),
        "--alias": "SmolLM2",
        "-c": "8192",
        "--parallel": "2",
        "-ctk": "q8_0",
        "-ctv": "q4_0",
        "-b": "2048",
        "-ub": "512",
        "-fa": "on",
        "--fit": "off",
        "--ctx-checkpoints": "8",
        "--checkpoint-min-step": "8192",
        "--cache-ram": "1024",
    }
    assert {flag: _value(line, flag) for flag in expected} == expected
    assert {"--no-kv-unified", "--no-ui", "--jinja", "--metrics", "--slots"} <= set(line.argv)
    assert "--no-warmup" not in line.argv
    assert dict(line.environment) == {
        "GGML_NO_BACKTRACE": "1",
        "NODEVICE_SELECT": "1",
        "LD_LIBRARY_PATH": "/opt/llama.cpp/bin",
        "XDG_CONFIG_HOME": "/dev/null",  # where no config.ini can be
    }


def test_command_line_is_understood_as_meant() -> None:
    values = parse(list(_launch().argv[1:]), Behaviour())
    assert (values["--ctx-size"], values["--parallel"], values["--model"]) == ("8192", "2", str(MODEL))


def test_host_only_launch_keeps_off_the_card() -> None:
    on_cpu_build = _launch()
    assert _value(on_cpu_build, "--device") == "none"
    assert "-ngl" not in on_cpu_build.argv  # a CPU build would warn about it

    on_gpu_build = _launch(_capabilities(backend=Backend.CUDA))
    assert _value(on_gpu_build, "--device") == "none"
    assert _value(on_gpu_build, "-ngl") == "0"


@pytest.mark.parametrize("backend", [Backend.CUDA, Backend.VULKAN, Backend.UNKNOWN])
def test_all_layers_on_the_card(backend: Backend) -> None:
    line = _launch(_capabilities(backend=backend), ON_CARD)
    assert _value(line, "-ngl") == "999"
    assert "--device" not in line.argv


def test_cpu_build_cannot_carry_out_a_plan_for_the_card() -> None:
    with pytest.raises(LlmError) as caught:
        _launch(plan=ON_CARD)
    assert caught.value.code is ErrorCode.ENGINE_UNUSABLE
    assert "no device" in caught.value.message


@pytest.mark.parametrize(
    ("spellings", "named"),
    [
        (("--host",), "--host"),
        (("-m", "--model"), "-m"),
        (("-c", "--ctx-size"), "-c"),
        (("-np", "--parallel"), "--parallel"),
        (("-ctk", "--cache-type-k"), "-ctk"),
        (("-ctv", "--cache-type-v"), "-ctv"),
        (("-fa", "--flash-attn"), "-fa"),
        (("-b", "--batch-size"), "-b"),
        (("-ub", "--ubatch-size"), "-ub"),
    ],
)
def test_missing_required_flag_refuses_the_build(spellings: tuple[str, ...], named: str) -> None:
    with pytest.raises(LlmError) as caught:
        _launch(_capabilities(*spellings))
    assert caught.value.code is ErrorCode.ENGINE_UNUSABLE
    assert named in caught.value.message
    assert str(BUILD.server) in caught.value.message
    assert caught.value.details["flag"] == named


@pytest.mark.parametrize(
    ("spellings", "gone"),
    [
        (("--fit", "-fit"), "off"),
        (("-ctxcp", "--ctx-checkpoints", "--swa-checkpoints"), "8"),
        (("-cms", "--checkpoint-min-step"), "--checkpoint-min-step"),
        (("-cram", "--cache-ram"), "1024"),
        (("--no-kv-unified", "-no-kvu"), "--no-kv-unified"),
        (("--no-ui", "--no-webui"), "--no-ui"),
        (("--jinja",), "--jinja"),
        (("--metrics",), "--metrics"),
        (("--slots",), "--slots"),
        (("--device", "-dev"), "none"),
        (("-a", "--alias"), "SmolLM2"),
    ],
)
def test_missing_optional_flag_is_dropped_with_its_value(spellings: tuple[str, ...], gone: str) -> None:
    line = _launch(_capabilities(*spellings))
    assert not {*spellings, gone} & set(line.argv)
    parse(list(line.argv[1:]), Behaviour(missing_flags=spellings))


@pytest.mark.parametrize(
    ("missing", "used"),
    [
        (("--parallel",), "-np"),
        (("-ctk",), "--cache-type-k"),
        (("--ctx-checkpoints",), "--swa-checkpoints"),
        (("--no-ui",), "--no-webui"),
        (("--no-kv-unified",), "-no-kvu"),
        (("-m",), "--model"),
    ],
)
def test_other_spellings(missing: tuple[str, ...], used: str) -> None:
    assert used in _launch(_capabilities(*missing)).argv


DRAFT = _with(ON_CARD, draft=Draft(5, CacheType.Q8_0, CacheType.F16))
DRAFTER = Path("/models/SmolLM2/eagle3.gguf")


def _draft_launch(plan: Plan, drafter: Path | None, *missing: str) -> Launch:
    capabilities = _capabilities(*missing, backend=Backend.CUDA)
    return launch(BUILD, capabilities, MODEL, plan, SOCKET, "x", drafter_path=drafter, inherited={})


def test_a_model_that_drafts_for_itself() -> None:
    line = _draft_launch(DRAFT, None)
    expected = {"--spec-type": "draft-mtp", "--spec-draft-n-max": "5", "-ctkd": "q8_0", "-ctvd": "f16"}
    assert {flag: _value(line, flag) for flag in expected} == expected
    assert not {"-md", "-ngld", "--spec-draft-window"} & set(line.argv)
    parse(list(line.argv[1:]), Behaviour())
    assert not {*expected, "-md"} & set(_launch().argv)


@pytest.mark.parametrize("spec_type", SpecType)
def test_a_file_that_drafts(spec_type: SpecType) -> None:
    plan = _with(DRAFT, draft=Draft(3, spec_type=spec_type))
    line = _draft_launch(plan, DRAFTER)
    assert (_value(line, "--spec-type"), _value(line, "-md")) == (str(spec_type), str(DRAFTER))
    assert _value(line, "-ngld") == "999"
    parse(list(line.argv[1:]), Behaviour())
    assert "-ngld" not in _draft_launch(replace(plan, on_card=False), DRAFTER).argv


def test_the_path_of_a_drafter_is_treated_as_that_of_the_model() -> None:
    line = _draft_launch(DRAFT, Path("/models/a$b.gguf"))
    assert dict(line.environment)["LLAMA_ARG_SPEC_DRAFT_MODEL"] == "/models/a$b.gguf"
    assert "-md" not in line.argv
    with pytest.raises(ValueError, match="absolute"):
        _draft_launch(DRAFT, Path("drafter.gguf"))
    with pytest.raises(ValueError, match="without a draft"):
        _draft_launch(ON_CARD, DRAFTER)


@pytest.mark.parametrize(
    ("spellings", "named"),
    [
        (("--spec-type",), "--spec-type"),
        (("--spec-draft-n-max",), "--spec-draft-n-max"),
        (("--spec-draft-type-k", "-ctkd", "--cache-type-k-draft"), "-ctkd"),
        (("--spec-draft-type-v", "-ctvd", "--cache-type-v-draft"), "-ctvd"),
        (("--spec-draft-model", "-md", "--model-draft"), "-md"),
        (("--spec-draft-ngl", "-ngld", "--gpu-layers-draft", "--n-gpu-layers-draft"), "-ngld"),
    ],
)
def test_a_build_that_cannot_draft_refuses_a_draft(spellings: tuple[str, ...], named: str) -> None:
    with pytest.raises(LlmError) as caught:
        _draft_launch(DRAFT, DRAFTER, *spellings)
    assert caught.value.code is ErrorCode.ENGINE_UNUSABLE
    assert caught.value.details["flag"] == named


def test_a_draft_window_needs_a_build_that_has_it() -> None:
    plan = _with(DRAFT, draft=Draft(3, window_tokens=16_384))
    with pytest.raises(LlmError, match="--spec-draft-window"):
        _draft_launch(plan, None)
    able = _capabilities(backend=Backend.CUDA)
    able = replace(able, flags=able.flags | {"--spec-draft-window"})
    line = launch(BUILD, able, MODEL, plan, SOCKET, "x", inherited={})
    assert _value(line, "--spec-draft-window") == "16384"


def test_a_shared_pool_and_the_window_of_its_slots() -> None:
    plan = _with(PLAN, unified=True, slot_tokens=4096)
    line = _launch(plan=plan)
    assert "--kv-unified" in line.argv and "--no-kv-unified" not in line.argv
    assert _value(line, "--kv-unified-per-slot") == "4096"
    assert "--kv-unified-per-slot" not in _launch().argv
    for missing in (("--kv-unified", "-kvu"), ("--kv-unified-per-slot",)):
        with pytest.raises(LlmError, match=missing[0]):
            _launch(_capabilities(*missing), plan)


def test_what_stays_in_host_memory_is_said() -> None:
    plan = _with(ON_CARD, layers=Placement(layers_on_card=17))
    gpu = _capabilities(backend=Backend.CUDA)
    assert _value(_launch(gpu, plan), "-ngl") == "17"
    plan = _with(ON_CARD, layers=Placement(expert_layers_on_host=9, cache_on_host=True))
    line = _launch(gpu, plan)
    assert (_value(line, "-ngl"), _value(line, "--n-cpu-moe")) == ("999", "9")
    assert "--no-kv-offload" in line.argv
    parse(list(line.argv[1:]), Behaviour())
    assert not {"--n-cpu-moe", "--no-kv-offload"} & set(_launch(gpu, ON_CARD).argv)
    for missing in (("--n-cpu-moe", "-ncmoe"), ("--no-kv-offload", "-nkvo")):
        with pytest.raises(LlmError, match=missing[0]):
            _launch(_capabilities(*missing, backend=Backend.CUDA), plan)


def _projecting(plan: Plan, projector: Path | None, *missing: str) -> Launch:
    capabilities = _capabilities(*missing, backend=Backend.CUDA)
    return launch(BUILD, capabilities, MODEL, plan, SOCKET, "x", projector_path=projector, inherited={})


def test_a_projector_is_named_or_ruled_out() -> None:
    projector = Path("/models/SmolLM2/mmproj.gguf")
    plan = replace(_with(ON_CARD, image_max_tokens=256), with_projector=True)
    line = _projecting(plan, projector)
    assert (_value(line, "--mmproj"), _value(line, "--image-max-tokens")) == (str(projector), "256")
    assert not {"--no-mmproj", "--no-mmproj-offload"} & set(line.argv)
    parse(list(line.argv[1:]), Behaviour())
    beside = _with(plan, projector_on_card=False, image_max_tokens=0)
    line = _projecting(beside, projector)
    assert "--no-mmproj-offload" in line.argv and "--image-max-tokens" not in line.argv
    assert "--no-mmproj" in _projecting(ON_CARD, None).argv
    assert "--no-mmproj-offload" not in _projecting(replace(beside, on_card=False), projector).argv
    with pytest.raises(ValueError, match="no path"):
        _projecting(plan, None)
    with pytest.raises(LlmError, match="--mmproj"):
        _projecting(plan, projector, "--mmproj", "-mm")


def test_stretched_positions() -> None:
    plan = replace(ON_CARD, rope=Stretch(RopeScaling.YARN, 2.5, 32_768, 81_920))
    line = _launch(_capabilities(backend=Backend.CUDA), plan)
    expected = {"--rope-scaling": "yarn", "--rope-scale": "2.5", "--yarn-orig-ctx": "32768"}
    assert {flag: _value(line, flag) for flag in expected} == expected
    parse(list(line.argv[1:]), Behaviour())
    assert not expected.keys() & set(_launch().argv)
    for flag in expected:
        with pytest.raises(LlmError, match=flag):
            _launch(_capabilities(flag, backend=Backend.CUDA), plan)


@pytest.mark.parametrize(
    ("missing", "lost"),
    [
        (("--spec-type",), "drafts_itself"),
        (("--n-cpu-moe", "-ncmoe"), "places_experts"),
        (("--no-kv-offload", "-nkvo"), "keeps_cache_on_host"),
        (("--mmproj", "-mm"), "projects"),
        (("--kv-unified", "-kvu"), "shares_pool"),
        (("--rope-scaling",), "stretches"),
        (("--rope-scale",), "stretches"),
        (("--yarn-orig-ctx",), "stretches"),
    ],
)
def test_features_are_what_the_help_offers(missing: tuple[str, ...], lost: str) -> None:
    whole = features(_capabilities(backend=Backend.VULKAN))
    kinds = frozenset(kind.value for kind in SpecType)
    assert whole == Features(Backend.VULKAN, drafts_from=kinds, purposes=whole.purposes)
    less: dict[str, Any] = {lost: False}
    if lost == "drafts_itself":
        less["drafts_from"] = frozenset()
    assert features(_capabilities(*missing, backend=Backend.VULKAN)) == replace(whole, **less)


@pytest.mark.parametrize("build", BUILDS)
def test_features_of_real_builds(build: str) -> None:
    text = answers(build)["help"].stdout
    flags, valued, variables = parse_help(text)
    capabilities = Capabilities("x", flags, Backend.CUDA, (), valued, variables, parse_options(text))
    known = features(capabilities)
    assert known == Features(Backend.CUDA, drafts_from=known.drafts_from)
    assert known.drafts_from >= {"draft-simple", "draft-eagle3", "draft-mtp"}
    without_mtp = tuple(
        replace(option, allowed=("none", "draft-simple")) if "--spec-type" in option.names else option
        for option in capabilities.options
    )
    old = replace(capabilities, options=without_mtp)
    assert features(old) == Features(
        Backend.CUDA, drafts_itself=False, drafts_from=frozenset({"draft-simple"})
    )
    assert not features(
        replace(old, flags=flags - {"-md", "--spec-draft-model", "--model-draft"})
    ).drafts_from


def test_old_flash_attention_switch_takes_no_value() -> None:
    new = _capabilities()
    old = replace(new, valued_flags=new.valued_flags - {"-fa", "--flash-attn"})
    argv = _launch(old).argv
    assert "on" not in argv
    assert "-fa" in argv


@pytest.mark.parametrize("name", ["pay $HOME.gguf", "a;b.gguf", "$$; ${X}.gguf"])
def test_path_that_systemd_would_alter_goes_through_the_environment(name: str) -> None:
    model = Path("/models") / name
    line = _launch(model=model)

    assert dict(line.environment)["LLAMA_ARG_MODEL"] == str(model)
    assert not {"-m", "--model", str(model)} & set(line.argv)
    assert not [argument for argument in line.argv if "$" in argument or ";" in argument]
    assert "LLAMA_ARG_MODEL" not in line.unset


@pytest.mark.parametrize(
    "name", ["two words.gguf", 'it\'s "quoted".gguf', "back\\slash %n *~.gguf", "ünïcode\n.gguf"]
)
def test_other_odd_paths_stay_arguments(name: str) -> None:
    model = Path("/models") / name
    assert _value(_launch(model=model), "-m") == str(model)


def test_build_without_that_variable_refuses_the_path() -> None:
    capabilities = replace(_capabilities(), variables=frozenset())
    with pytest.raises(LlmError) as caught:
        _launch(capabilities, model=Path("/models/a$b.gguf"))
    assert caught.value.code is ErrorCode.ENGINE_UNUSABLE
    assert "LLAMA_ARG_MODEL" in caught.value.message
    assert "Rename" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("alias", "shown"), [("a,b", "a_b"), ("tab\tnew\nline", "tab_new_line"), ("-dash", "-dash"), ("ü", "ü")]
)
def test_alias_is_one_name(alias: str, shown: str) -> None:
    assert _value(_launch(alias=alias), "--alias") == shown


def test_alias_with_a_dollar_goes_through_the_environment_or_away() -> None:
    assert dict(_launch(alias="a$b").environment)["LLAMA_ARG_ALIAS"] == "a$b"

    without = replace(_capabilities(), variables=frozenset())
    line = _launch(without, alias="a$b")
    assert "--alias" not in line.argv
    assert "LLAMA_ARG_ALIAS" not in dict(line.environment)
    assert "--alias" not in _launch(alias="").argv


def test_path_that_is_no_utf8_is_refused() -> None:
    with pytest.raises(LlmError) as caught:
        _launch(model=Path("/models") / os.fsdecode(b"caf\xe9.gguf"))
    assert caught.value.code is ErrorCode.BAD_CHECKPOINT
    assert "UTF-8" in caught.value.message
    caught.value.message.encode("utf-8")  # printable everywhere


def test_relative_path_is_a_programming_error() -> None:
    with pytest.raises(ValueError, match="absolute"):
        _launch(model=Path("model.gguf"))


@pytest.mark.parametrize(
    ("socket", "code"),
    [
        ("/run/engine.socket", ErrorCode.RUNTIME_DIR_UNUSABLE),
        ("engine.sock", ErrorCode.RUNTIME_DIR_UNUSABLE),
        ("/run/a,b.sock", ErrorCode.RUNTIME_DIR_UNUSABLE),
        (os.fsdecode(b"/run/\xff.sock"), ErrorCode.RUNTIME_DIR_UNUSABLE),
        ("/run/" + "x" * 98 + ".sock", ErrorCode.SOCKET_PATH_TOO_LONG),
        ("/run/" + "ü" * 49 + ".sock", ErrorCode.SOCKET_PATH_TOO_LONG),
    ],
)
def test_socket_the_engine_cannot_take(socket: str, code: ErrorCode) -> None:
    with pytest.raises(LlmError) as caught:
        launch(BUILD, _capabilities(), MODEL, PLAN, Path(socket), "x", inherited={})
    assert caught.value.code is code


def test_longest_socket_path_is_taken() -> None:
    socket = Path("/run/" + "x" * 97 + ".sock")
    assert len(str(socket)) == 107
    assert str(socket) in launch(BUILD, _capabilities(), MODEL, PLAN, socket, "x", inherited={}).argv


def test_socket_with_a_dollar_goes_through_the_environment() -> None:
    line = launch(BUILD, _capabilities(), MODEL, PLAN, Path("/run/a$b.sock"), "x", inherited={})
    assert dict(line.environment)["LLAMA_ARG_HOST"] == "/run/a$b.sock"
    assert "--host" not in line.argv


def test_engine_in_a_directory_systemd_would_alter_is_refused() -> None:
    build = replace(BUILD, server=Path("/opt/a;b/llama-server"))
    with pytest.raises(LlmError) as caught:
        launch(build, _capabilities(), MODEL, PLAN, SOCKET, "x", inherited={})
    assert caught.value.code is ErrorCode.ENGINE_UNUSABLE


def test_inherited_environment() -> None:
    line = _launch(
        model=Path("/m/a$b.gguf"),
        inherited={
            "LD_LIBRARY_PATH": "/cuda",
            "LLAMA_ARG_NO_SUCH": "1",
            "LLAMA_API_KEY": "secret",
            "LLAMA_ARG_MODEL": "/other.gguf",
            "HOME": "/home/x",
        },
    )
    assert dict(line.environment)["LD_LIBRARY_PATH"] == "/opt/llama.cpp/bin:/cuda"
    assert {"LLAMA_ARG_NO_SUCH", "LLAMA_API_KEY", "LLAMA_ARG_CTX_SIZE", "LLAMA_ARG_HOST"} <= set(line.unset)
    assert not {"HOME", "LLAMA_ARG_MODEL"} & set(line.unset)


@pytest.mark.parametrize(
    ("purpose", "pooling", "words"),
    [
        (Purpose.EMBEDDING, Pooling.MEAN, ["--embeddings", "--pooling", "mean"]),
        (Purpose.EMBEDDING, None, ["--embeddings"]),
        (Purpose.RERANK, None, ["--reranking"]),
    ],
)
def test_what_it_serves_beside_text(purpose: Purpose, pooling: Pooling | None, words: list[str]) -> None:
    plan = replace(PLAN, launch=replace(PLAN.launch, purpose=purpose, pooling=pooling))
    plain = _capabilities()
    known = replace(plain, flags=plain.flags | {"--embeddings", "--reranking", "--pooling"})
    added = [word for word in _launch(known, plan).argv if word in words]
    assert added == words
    assert not {"--embeddings", "--reranking", "--pooling"} & set(_launch(known).argv)
    with pytest.raises(LlmError, match=words[0]):
        _launch(replace(plain, flags=plain.flags - {words[0], "--embedding", "--rerank"}), plan)
    assert features(known).purposes == {"embedding", "rerank"}
