"""A command line read back: what we write, what others write, what the engine's defaults are, bad input."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lllm3090d.checkpoints.facts import CheckpointFacts, ProjectorFacts
from lllm3090d.checkpoints.purpose import Pooling, Purpose
from lllm3090d.engines.arguments import Launch as CommandLine
from lllm3090d.engines.arguments import features, launch
from lllm3090d.engines.capabilities import Backend, Build, Capabilities, Option
from lllm3090d.engines.command_line import (
    UNPRICED,
    FlashAttention,
    Reading,
    RopeArguments,
    read_command_line,
)
from lllm3090d.engines.extra_arguments import extra_arguments
from lllm3090d.engines.probe import Texts, capabilities_of
from lllm3090d.engines.tier_flags import ReasoningRules
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.planning.cache import CacheType
from lllm3090d.planning.launch import Draft, Launch, SpecType
from lllm3090d.planning.placement import EVERYTHING, Placement
from lllm3090d.planning.planner import CappedBy, Plan
from lllm3090d.planning.quote import Quote, price
from lllm3090d.planning.rope import RopeScaling
from lllm3090d.planning.split import DeviceSplit
from lllm3090d.planning.tier import Tier, TierSizes
from tests.fakes.random_plans import random_questions
from tests.unit.engine_captures import BUILDS, answers
from tests.unit.engine_truth import facts_of, priced_models
from tests.unit.plans import DRAFTING, LLAMA_8B, MIXTURE, projector_of

pytestmark = pytest.mark.unit

BUILD = Build(Path("/opt/llama.cpp/llama-server"), (), "test", locked=False)
FOLDER = Path("/models/a b")
BLOCKS = 32  # of LLAMA_8B
TIER_OPTIONS = (
    Option(("--kv-vram-cells",), "N"),
    Option(("--spec-draft-window",), "N"),
    Option(("--spec-draft-n-max-tail",), "N"),
)
REASONING_OPTIONS = (
    Option(("--reasoning-effort-allow",), "LIST"),
    Option(("--reasoning-effort-fallback",), "WORD"),
    Option(("--reasoning-max-tokens-floor",), "N"),
)
DEFAULTS = Launch(
    context_tokens=0,
    parallel=4,
    cache_type_k=CacheType.F16,
    cache_type_v=CacheType.F16,
    batch_tokens=2048,
    micro_batch_tokens=512,
    context_checkpoints=32,
    prompt_cache_mib=8192,
    unified=True,
    checkpoint_min_step_tokens=8192,
)


@cache
def build_named(name: str, backend: Backend = Backend.CUDA) -> Capabilities:
    said = answers(name)
    texts = Texts(said["version"].text, said["help"].text)
    return replace(capabilities_of(BUILD, texts, said["list-devices"].text), backend=backend)


def with_tier(capabilities: Capabilities) -> Capabilities:
    names = {name for option in TIER_OPTIONS for name in option.names}
    return replace(
        capabilities,
        options=(*capabilities.options, *TIER_OPTIONS),
        flags=capabilities.flags | names,
        valued_flags=capabilities.valued_flags | names,
    )


def read(
    line: str | list[str],
    *,
    model: str = LLAMA_8B,
    build: str = "b11434",
    backend: Backend = Backend.CUDA,
    environment: dict[str, str] | None = None,
    drafter: CheckpointFacts | None = None,
) -> Reading:
    words = line.split() if isinstance(line, str) else line
    return read_command_line(
        words, build_named(build, backend), facts_of(model), environment=environment, drafter=drafter
    )


def refused(line: str | list[str], environment: dict[str, str] | None = None) -> LlmError:
    with pytest.raises(LlmError) as caught:
        read(line, environment=environment)
    assert caught.value.code is ErrorCode.INVALID_REQUEST
    assert caught.value.hint
    return caught.value


# --- what we write ---------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_plans_own_command_line_is_that_plan(data: st.DataObject) -> None:
    """Of any model, request, settings, memory and build: the same launch, hence the same price."""
    model = data.draw(st.sampled_from(priced_models()))
    backend = data.draw(st.sampled_from((Backend.CPU, Backend.CUDA, Backend.VULKAN)))
    capabilities = build_named(data.draw(st.sampled_from(BUILDS)), backend)
    projector = data.draw(st.sampled_from((None, projector_of(400))))
    facts = facts_of(model)
    question = data.draw(
        random_questions(facts, backend, most_tokens=1 << 18, projects=projector is not None)
    )
    try:
        plan = question.plan(facts, features(capabilities), projector)
    except LlmError:
        return
    line = written(plan, capabilities, projector)
    found = read_command_line(line.argv[1:], capabilities, facts, environment=dict(line.environment))

    assert found.launch == plan.launch
    assert (found.on_card, found.with_projector) == (plan.on_card, plan.with_projector)
    rope = plan.rope and RopeArguments(plan.rope.scaling, plan.rope.factor, plan.rope.original_tokens)
    assert found.rope == rope
    assert found.flash_attention is FlashAttention.ON
    assert not found.fits_itself
    assert found.unpriced == ()
    assert (
        price(facts, found.launch, backend, question.policy, projector if found.with_projector else None)
        == plan.quote
    )


def written(plan: Plan, capabilities: Capabilities, projector: ProjectorFacts | None = None) -> CommandLine:
    return launch(
        BUILD,
        capabilities,
        FOLDER / "m$.gguf",
        plan,
        Path("/run/e.sock"),
        "x;y",
        projector_path=FOLDER / "p;.gguf" if projector else None,
        inherited={},
    )


def plan_with(sizes: Launch, tier: Tier | None = None) -> Plan:
    return Plan(sizes, 4096, on_card=True, capped_by=CappedBy.REQUEST, quote=Quote(()), tier=tier)


def test_a_tier_is_read_back() -> None:
    sizes = replace(
        DEFAULTS,
        context_tokens=65_536,
        line_tokens=32_768,
        tail_draft_tokens=4,
        draft=Draft(3, CacheType.Q8_0, CacheType.Q8_0, window_tokens=16_384),
    )
    tier = Tier(32_768, 65_536, TierSizes(1, 1, 1, 1), draft_window_tokens=16_384, draft_tail_tokens=4)
    capabilities = with_tier(build_named("b11434"))
    line = written(plan_with(sizes, tier), capabilities)
    found = read_command_line(line.argv[1:], capabilities, facts_of(DRAFTING))
    assert found.launch == sizes


def test_rules_for_reasoning_are_in_the_command_line_and_change_nothing_that_is_read_back() -> None:
    rules = ReasoningRules(("low", "medium"), "medium", 24_576)
    words = ("reasoning_effort", "reasoning_effort=low")
    given = REASONING_OPTIONS
    names = {name for option in given for name in option.names}
    plain = build_named("b11434")
    fork = replace(
        plain,
        options=(*plain.options, *given),
        flags=plain.flags | names,
        valued_flags=plain.valued_flags | names,
    )
    made = plan_with(replace(DEFAULTS, context_tokens=65_536))

    def line(capabilities: Capabilities, template: tuple[str, ...], *more: str) -> list[str]:
        extra = extra_arguments(more, capabilities, facts_of(LLAMA_8B))
        found = launch(
            BUILD,
            capabilities,
            FOLDER / "m.gguf",
            made,
            Path("/run/e.sock"),
            "x",
            inherited={},
            extra=extra,
            reasoning=rules,
            reasoning_words=template,
        )
        return list(found.argv[1:])

    ruled = line(fork, words)
    start = ruled.index("--reasoning-effort-allow")
    assert ruled[start:] == [
        *("--reasoning-effort-allow", "low,medium", "--reasoning-effort-fallback", "medium"),
        *("--reasoning-max-tokens-floor", "24576"),
    ]
    assert not names & {*line(plain, words)} and not names & {*line(fork, ())}
    found = read_command_line(ruled, fork, facts_of(LLAMA_8B))
    assert (found.launch, found.unpriced) == (made.launch, ())
    # A person's own arguments come last, so they count.
    own = line(fork, words, "--reasoning-max-tokens-floor", "100")
    assert own[-2:] == ["--reasoning-max-tokens-floor", "100"]
    assert read_command_line(own, fork, facts_of(LLAMA_8B)).unpriced == ()


@pytest.mark.parametrize(
    ("devices", "shares"),
    [(("CUDA0", "CUDA1"), (20, 13)), (("CUDA1",), (33,)), (("CUDA0", "CUDA1"), (1, 32))],
)
def test_cards_and_their_layers_are_read_back(devices: tuple[str, ...], shares: tuple[int, ...]) -> None:
    sizes = replace(DEFAULTS, context_tokens=8192)
    split = DeviceSplit(devices, shares, tuple(Quote(()) for _ in devices), Quote(()))
    capabilities = replace(build_named("b11434"), devices=("CUDA0", "CUDA1"))
    plan = replace(plan_with(sizes), split=split)
    line = written(plan, capabilities)
    found = read_command_line(line.argv[1:], capabilities, facts_of(LLAMA_8B))
    assert found.launch == sizes
    assert found.devices == devices
    assert found.shares == (shares if len(devices) > 1 else ())
    assert found.unpriced == ()


@pytest.mark.parametrize(
    ("line", "unpriced"),
    [
        ("-dev CUDA0,CUDA1 -ts 3,1 -sm row", ("-sm", "-ts")),
        ("-dev CUDA0,CUDA1 -ts 3,1,2", ("-ts",)),
        ("-dev CUDA0,CUDA1 -sm layer", ("-sm",)),
        ("-ts 3,1 -sm layer", ("-sm", "-ts")),
        ("-dev CUDA0,CUDA1 -ts 3/1 -mg 0", ("-ts", "-mg")),
        ("-dev CUDA0,CUDA1 -ts 3,1 -devd CUDA0", ("-ts", "-devd")),
        ("-dev CUDA0,CUDA1 -ts 3/1 -mg 1 -mmdev CUDA1", ()),
    ],
)
def test_other_ways_to_share_out_have_no_price(line: str, unpriced: tuple[str, ...]) -> None:
    assert read(line).unpriced == unpriced


@pytest.mark.parametrize("spec_type", SpecType)
def test_a_drafter_in_a_file_of_its_own_is_read_back(spec_type: SpecType) -> None:
    drafter = facts_of(LLAMA_8B)
    sizes = replace(DEFAULTS, draft=Draft(5, spec_type=spec_type), drafter=drafter)
    capabilities = build_named("b11434")
    line = launch(
        BUILD,
        capabilities,
        FOLDER / "m.gguf",
        plan_with(sizes),
        Path("/run/e.sock"),
        "x",
        drafter_path=FOLDER / "d.gguf",
        inherited={},
    )
    found = read_command_line(line.argv[1:], capabilities, facts_of(LLAMA_8B), drafter=drafter)
    assert found.launch == sizes
    assert (found.model, found.drafter) == (str(FOLDER / "m.gguf"), str(FOLDER / "d.gguf"))


# --- what others write ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", BUILDS)
def test_what_is_absent_has_the_engines_own_default(build: str) -> None:
    found = read("-m /m.gguf", build=build)
    assert found.launch == DEFAULTS
    assert found.on_card
    assert found.fits_itself
    assert found.flash_attention is FlashAttention.AUTO
    assert (found.rope, found.projector, found.drafter, found.unpriced) == (None, None, None, ())
    # The figures are those that the build's own help names.
    options = {
        "-b": DEFAULTS.batch_tokens,
        "-ub": DEFAULTS.micro_batch_tokens,
        "--ctx-checkpoints": DEFAULTS.context_checkpoints,
        "--cache-ram": DEFAULTS.prompt_cache_mib,
        "--checkpoint-min-step": DEFAULTS.checkpoint_min_step_tokens,
        "-c": 0,
        "-np": -1,
        "-ctk": "f16",
        "-ctkd": "f16",
        "--spec-draft-n-max": 3,
        "-fa": "auto",
        "--fit": "on",
        "-ngl": "auto",
    }
    for name, default in options.items():
        option = build_named(build).option(name)
        assert option is not None
        assert option.default == str(default), name


def test_the_last_one_counts_under_every_name() -> None:
    found = read("-c 4096 -ctk f16 --ctx-size 8192 --cache-type-k q8_0 --ctx_size 16384 -np 2 --parallel 3")
    assert (found.launch.context_tokens, found.launch.cache_type_k) == (16_384, CacheType.Q8_0)
    assert (found.launch.parallel, found.launch.unified) == (3, False)
    assert not read("-np 2 -kvu -no-kvu").launch.unified
    assert read("-np 2 --no-kv-unified --kv-unified").launch.unified


def test_automatic_slots_share_a_pool_whatever_else_is_said() -> None:
    assert read("-np -1 --no-kv-unified").launch.unified


def test_kinds_of_drafts_add_up() -> None:
    """The one option whose occurrences do."""
    found = read("--spec-type draft-mtp --spec-type ngram-mod", model=DRAFTING)
    assert found.launch.draft == Draft(3)
    assert found.unpriced == ("--spec-type ngram-mod",)
    assert read("--spec-type none").launch.draft is None
    two = read("--spec-type draft-mtp,draft-simple -md /d.gguf", model=DRAFTING)
    assert two.unpriced == ("--spec-type draft-simple",)


@pytest.mark.parametrize(
    ("drafter", "kind"), [(LLAMA_8B, SpecType.SIMPLE), (DRAFTING, SpecType.MTP), (None, SpecType.SIMPLE)]
)
def test_a_drafter_says_itself_how_it_drafts(drafter: str | None, kind: SpecType) -> None:
    facts = facts_of(drafter) if drafter else None
    found = read("-md /d.gguf --spec-draft-n-max 7 -ctkd q8_0", drafter=facts)
    assert found.launch.draft == Draft(7, CacheType.Q8_0, spec_type=kind)
    assert found.launch.drafter is facts


@pytest.mark.parametrize(
    ("line", "placed"),
    [
        ("", EVERYTHING),
        ("-ngl all", EVERYTHING),
        ("-ngl auto", EVERYTHING),
        ("-ngl -1", EVERYTHING),
        ("-ngl 99", EVERYTHING),
        (f"-ngl {BLOCKS + 1}", EVERYTHING),  # the output counts as one
        (f"--n-gpu-layers {BLOCKS}", Placement(layers_on_card=BLOCKS)),
        ("--gpu-layers 0", Placement(layers_on_card=0)),
        ("-nkvo", Placement(cache_on_host=True)),
        ("-nkvo --kv-offload", EVERYTHING),
    ],
)
def test_placement(line: str, placed: Placement) -> None:
    assert read(line).launch.layers == placed


def test_experts_in_host_memory() -> None:
    blocks = len(facts_of(MIXTURE).layers)
    assert read("--cpu-moe", model=MIXTURE).launch.layers == Placement(expert_layers_on_host=blocks)
    # Each adds its layers to those of the others.
    assert read("-ncmoe 7 --n-cpu-moe 3", model=MIXTURE).launch.layers == Placement(expert_layers_on_host=7)


def test_without_a_card_nothing_is_placed() -> None:
    for found in (read("-ngl 5 --device none"), read("-ngl 5", backend=Backend.CPU)):
        assert not found.on_card
        assert found.launch.layers == EVERYTHING


def test_a_context_of_slots() -> None:
    assert read("-np 3 --kv-unified-per-slot 4096").launch.context_tokens == 3 * 4096
    whole = read("-np 3 --kv-unified-per-slot 4096 -c 0").launch
    assert (whole.context_tokens, whole.slot_tokens) == (0, 4096)


def test_projectors() -> None:
    found = read("--mmproj /p.gguf --no-mmproj-offload --image-max-tokens 256 --no-mmproj")
    assert (found.with_projector, found.projector) == (
        True,
        "/p.gguf",
    )  # that switch is about looking for one
    assert not found.launch.projector_on_card
    assert found.launch.image_max_tokens == 256
    assert read("--image-max-tokens -1").launch.image_max_tokens == 0


def test_stretched_positions() -> None:
    assert read("--rope-scaling yarn --rope-scale 2.5 --yarn-orig-ctx 4096").rope == RopeArguments(
        RopeScaling.YARN, 2.5, 4096
    )
    assert read("--rope-scale 2").rope == RopeArguments(RopeScaling.LINEAR, 2.0)


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("-fa on", FlashAttention.ON),
        ("-fa 1", FlashAttention.ON),
        ("-fa off", FlashAttention.OFF),
        ("--flash-attn auto", FlashAttention.AUTO),
    ],
)
def test_flash_attention(line: str, answer: FlashAttention) -> None:
    assert read(line).flash_attention is answer


def test_the_switch_of_old_builds() -> None:
    new = build_named("b11434")
    options = [
        replace(option, value="", allowed=()) if "-fa" in option.names else option for option in new.options
    ]
    found = read_command_line(
        ["-fa", "-c", "8192"], replace(new, options=tuple(options)), facts_of(LLAMA_8B)
    )
    assert found.flash_attention is FlashAttention.ON
    assert found.launch.context_tokens == 8192


def test_the_environment_comes_first() -> None:
    environment = {
        "LLAMA_ARG_CTX_SIZE": "4096",
        "LLAMA_ARG_CACHE_TYPE_K": "q8_0",
        "LLAMA_ARG_KV_OFFLOAD": "0",
        "LLAMA_ARG_SWA_FULL": "1",
        "LLAMA_ARG_NO_MMPROJ_OFFLOAD": "0",  # its value counts for nothing
        "LLAMA_ARG_FIT": "off",
        "LLAMA_ARG_EMBEDDINGS": "0",
        "UNRELATED": "x",
    }
    found = read("-c 8192", environment=environment)
    assert found.launch.context_tokens == 8192
    assert found.launch.cache_type_k is CacheType.Q8_0
    assert found.launch.layers == Placement(cache_on_host=True)
    assert found.launch.swa_full
    assert not found.launch.projector_on_card
    assert not found.fits_itself
    assert found.unpriced == ()


def test_numbers_are_read_as_the_engine_reads_them() -> None:
    assert read(["-c", " 8192 tokens"]).launch.context_tokens == 8192


@pytest.mark.parametrize(
    "line",
    [
        "--lora /a.gguf",
        "-ot x=CPU",
        "-ncffn 3",
        "-sm row",
        "-ts 1,2",
        "--override-kv a=int:3",
        "-nr",
        "--no-op-offload",
        "-devd CUDA0",
        "--spec-default",
    ],
)
def test_what_has_no_price_is_named(line: str) -> None:
    assert read(line).unpriced == (line.split(maxsplit=1)[0],)


@pytest.mark.parametrize(
    ("line", "purpose", "pooling", "batch"),
    [
        ("--embeddings --pooling mean -b 1024 -ub 256", Purpose.EMBEDDING, Pooling.MEAN, 256),
        ("--embeddings -b 64 -ub 256", Purpose.EMBEDDING, None, 64),
        ("--reranking -b 512 -ub 512", Purpose.RERANK, None, 512),
        ("-b 1024 -ub 256", Purpose.CHAT, None, 1024),
    ],
)
def test_what_it_serves_is_read_back(
    line: str, purpose: Purpose, pooling: Pooling | None, batch: int
) -> None:
    """With vectors the engine itself makes a batch no larger than a micro batch."""
    found = read(line)
    assert found.unpriced == ()
    assert (found.launch.purpose, found.launch.pooling, found.launch.batch_tokens) == (
        purpose,
        pooling,
        batch,
    )


def test_the_opposite_of_what_has_no_price() -> None:
    assert read("--repack --op-offload").unpriced == ()


def test_every_name_without_a_price_is_that_of_an_option() -> None:
    known = {name for build in BUILDS for name in build_named(build).flags}
    assert set(UNPRICED) - known == {"--kq-mask-packed"}  # of a fork whose help is not captured


# --- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--ctx-sizes 1", "has no option '--ctx-sizes'"),
        ("model.gguf", "has no option 'model.gguf'"),
        ("-c", "-c lacks its value (N)"),
        ("--control-vector-layer-range 3", "lacks its value (START END)"),
        ("-c many", "whole number"),
        ("-c 2147483648", "whole number"),
        ("-c -5", "--ctx-size is -5"),
        ("-np 0", "--parallel is 0"),
        ("-ctk q9", "'q9', which is no type of a cache"),
        ("-fa maybe", "neither on nor off"),
        ("--fit maybe", "neither on nor off"),
        ("--rope-scaling cubic", "cannot be stretched"),
        ("--rope-scale far", "cannot be stretched"),
        ("-ts 1,much", "are no numbers"),
    ],
)
def test_what_the_engine_would_not_read(line: str, words: str) -> None:
    assert words in refused(line).message


def test_a_variable_that_is_neither_yes_nor_no() -> None:
    assert "LLAMA_ARG_KV_OFFLOAD" in refused("", {"LLAMA_ARG_KV_OFFLOAD": "maybe"}).message


def test_an_unknown_option_is_guessed() -> None:
    assert "--ctx-size" in (refused("--ctx-siz 1").hint or "")


@settings(max_examples=100, deadline=None)
@given(st.lists(st.one_of(st.text(max_size=8), st.sampled_from(sorted(build_named("b11434").flags)))))
def test_any_words_are_read_or_refused(words: list[str]) -> None:
    try:
        read(words)
    except LlmError as error:
        assert error.code is ErrorCode.INVALID_REQUEST
