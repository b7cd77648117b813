"""Flags of the tiered cache and of reasoning: only what the build offers, and nothing that a plan counts on lost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lllm3090d.engines.capabilities import Backend, Build, Capabilities
from lllm3090d.engines.probe import parse_help
from lllm3090d.engines.tier_flags import (
    TIER_VARIABLES,
    ReasoningRules,
    TierArguments,
    reasoning_arguments,
    reports_virtual_memory,
    tier_arguments,
    tier_offer,
)
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.planning.tier import Tier, TierOffer, TierSizes
from lllm3090d.serving.events import Admitted
from tests.fakes.scheduler_world import World

pytestmark = pytest.mark.unit

BUILD = Build(Path("/opt/fork/llama-server"), (Path("/opt/fork"),), "a test", locked=False)
UPSTREAM = Capabilities(
    "version: 11434 (0000000)", frozenset({"-c", "--ctx-size", "--kv-unified"}), Backend.CUDA, ("CUDA0",)
)
DRAFT_FLAGS = {"--spec-draft-window", "--spec-draft-n-max-tail"}
REASONING = {"--reasoning-effort-allow", "--reasoning-effort-fallback", "--reasoning-max-tokens-floor"}
FORK = replace(UPSTREAM, flags=UPSTREAM.flags | {"--kv-vram-cells", *DRAFT_FLAGS})
LATEST = replace(FORK, flags=FORK.flags | {"--kq-mask-packed", "--checkpoint-every-nt", *REASONING})
TIER = Tier(113_152, 262_144, TierSizes(1, 1, 1, 16))


def test_an_upstream_build_offers_nothing() -> None:
    assert tier_offer(UPSTREAM) == TierOffer()


def test_a_draft_window_of_another_fork_counts_for_nothing() -> None:
    """Its flag has the same name, and nobody knows the sizes."""
    assert tier_offer(replace(UPSTREAM, flags=UPSTREAM.flags | DRAFT_FLAGS)) == TierOffer()


def test_what_the_fork_offers() -> None:
    assert tier_offer(FORK) == TierOffer(tier=True, draft_window=True, draft_tail=True)
    assert tier_offer(LATEST) == TierOffer(
        tier=True,
        draft_window=True,
        draft_tail=True,
        packed_mask=True,
        shared_pool=True,
        draft_micro_batch=True,
    )


def test_an_offer_is_read_from_a_help_text() -> None:
    """In the layout of the engine's --help, with the fork's words for its options."""
    text = (
        "--kv-vram-cells N                       tiered KV cache: keep the first N cells in VRAM\n"
        "                                        (env: LLAMA_ARG_KV_VRAM_CELLS)\n"
        "--spec-draft-window N                   draft (MTP) context keeps only the last N rows\n"
        "                                        (env: LLAMA_ARG_SPEC_DRAFT_WINDOW)\n"
        "-cent, --checkpoint-every-nt N          also create a context checkpoint\n"
    )
    flags, valued, variables = parse_help(text)
    offer = tier_offer(replace(UPSTREAM, flags=flags, valued_flags=valued, variables=variables))
    assert offer == TierOffer(tier=True, draft_window=True, shared_pool=True, draft_micro_batch=True)


def test_a_plain_tier() -> None:
    found = tier_arguments(TIER, BUILD, FORK)
    assert found == TierArguments(("--kv-vram-cells", "113152"), (), tuple(sorted(TIER_VARIABLES)))


def test_a_tier_with_everything() -> None:
    tier = replace(
        TIER,
        draft_window_tokens=16_384,
        draft_tail_tokens=4,
        draft_context_tokens=20_736,
        draft_micro_batch_tokens=256,
        batch_invariant=True,
        packed_mask=True,
        shared_pool=True,
    )
    found = tier_arguments(tier, BUILD, LATEST)
    assert found.arguments == (
        "--kv-vram-cells",
        "113152",
        "--spec-draft-window",
        "16384",
        "--spec-draft-n-max-tail",
        "4",
        "--kq-mask-packed",
    )
    assert found.environment == (
        ("GGML_CUDA_BATCH_INVARIANT", "1"),
        ("GGML_CUDA_SHARED_POOL", "1"),
        ("LLAMA_MTP_DRAFT_UBATCH", "256"),
    )
    assert not set(found.unset) & dict(found.environment).keys()
    assert "GGML_CUDA_KV_TIER_STAGING" in found.unset


@pytest.mark.parametrize(
    ("tier", "capabilities", "flag"),
    [
        (TIER, UPSTREAM, "--kv-vram-cells"),
        (
            replace(TIER, draft_window_tokens=16_384),
            replace(FORK, flags=FORK.flags - {"--spec-draft-window"}),
            "--spec-draft-window",
        ),
        (
            replace(TIER, draft_tail_tokens=4),
            replace(FORK, flags=FORK.flags - {"--spec-draft-n-max-tail"}),
            "--spec-draft-n-max-tail",
        ),
        (replace(TIER, packed_mask=True), FORK, "--kq-mask-packed"),
    ],
)
def test_a_flag_that_the_plan_counts_on_and_the_build_lacks(
    tier: Tier, capabilities: Capabilities, flag: str
) -> None:
    with pytest.raises(LlmError, match=flag) as caught:
        tier_arguments(tier, BUILD, capabilities)
    assert caught.value.code is ErrorCode.ENGINE_UNUSABLE


def test_a_pool_that_may_be_unsafe_is_not_shared() -> None:
    """Zero would switch it on in some builds, so the variable is removed."""
    tier = replace(TIER, shared_pool=True, draft_micro_batch_tokens=256)
    found = tier_arguments(tier, BUILD, FORK)
    assert found.environment == ()
    assert {"GGML_CUDA_SHARED_POOL", "LLAMA_MTP_DRAFT_UBATCH"} <= set(found.unset)


def test_a_micro_batch_that_the_engine_would_ignore_is_not_set() -> None:
    found = tier_arguments(replace(TIER, draft_micro_batch_tokens=31), BUILD, LATEST)
    assert found.environment == ()


# --- reasoning ---

WORDS = ("reasoning_effort", "reasoning_effort=low", "reasoning_effort=medium")
RULES = ReasoningRules(("low", "medium", "xhigh"), "medium", 24_576)


def test_rules_for_reasoning() -> None:
    assert reasoning_arguments(RULES, WORDS, LATEST).arguments == (
        "--reasoning-effort-allow",
        "low,medium,xhigh",
        "--reasoning-effort-fallback",
        "medium",
        "--reasoning-max-tokens-floor",
        "24576",
    )
    assert reasoning_arguments(RULES, WORDS, LATEST).environment == ()


def test_only_for_what_the_template_reads() -> None:
    """A template that knows no effort has none to be ruled; one that knows nothing of reasoning is left alone."""
    floor = ("--reasoning-max-tokens-floor", "24576")
    assert reasoning_arguments(RULES, ("enable_thinking",), LATEST).arguments == floor
    assert reasoning_arguments(RULES, (), LATEST).arguments == ()


def test_only_what_a_build_offers_and_nothing_that_is_off() -> None:
    assert reasoning_arguments(RULES, WORDS, UPSTREAM).arguments == ()
    assert reasoning_arguments(ReasoningRules(), WORDS, LATEST).arguments == ()
    half = replace(UPSTREAM, flags=frozenset({"--reasoning-effort-allow"}))
    assert reasoning_arguments(RULES, WORDS, half).arguments == ()
    floor = replace(UPSTREAM, flags=frozenset({"--reasoning-max-tokens-floor"}))
    assert reasoning_arguments(RULES, WORDS, floor).arguments == ("--reasoning-max-tokens-floor", "24576")


def test_a_load_passes_the_rules_of_the_settings_to_an_engine_that_has_them() -> None:
    """Through the scheduler, for a model whose template reads them and for one whose template does not."""
    world = World(reasoning=RULES)
    event = world.request("a", "t")
    able = replace(event.capabilities, flags=event.capabilities.flags | REASONING)
    assert event.ruled is not None and not event.ruled.reasoning
    reads = replace(event.ruled, reasoning=WORDS)
    lines = {}
    for name, changes in (
        ("both", {"facts": reads, "capabilities": able}),
        ("template", {"facts": reads}),
        ("engine", {"capabilities": able}),
    ):
        effects = World(reasoning=RULES).load("a", "t", **changes)
        (answer,) = (effect for effect in effects if isinstance(effect, Admitted))
        lines[name] = answer.argv
    start = lines["both"].index("--reasoning-effort-allow")
    assert lines["both"][start : start + 6] == reasoning_arguments(RULES, WORDS, LATEST).arguments
    assert not REASONING & {*lines["template"], *lines["engine"]}
    (plain,) = (
        effect
        for effect in World().load("a", "t", facts=reads, capabilities=able)
        if isinstance(effect, Admitted)
    )
    assert not REASONING & {*plain.argv}


@pytest.mark.parametrize(
    ("allowed", "fallback", "floor", "words"),
    [
        (("low", ""), "low", 0, "no word"),
        (("low,high",), "low,high", 0, "no word"),
        ((" low",), " low", 0, "no word"),
        (("low\n",), "low\n", 0, "no word"),
        (("$HOME",), "$HOME", 0, "no word"),
        (("--port",), "--port", 0, "no word"),
        (("é",), "é", 0, "no word"),
        (("x" * 65,), "x" * 65, 0, "no word"),
        (("low",), None, 0, "stand in"),
        (("low",), "medium", 0, "not among"),
        ((), "medium", 0, "not among"),
        ((), None, -1, "not negative"),
    ],
)
def test_rules_that_the_engine_would_take_and_misread(
    allowed: tuple[str, ...], fallback: str | None, floor: int, words: str
) -> None:
    with pytest.raises(LlmError, match=words) as caught:
        ReasoningRules(allowed, fallback, floor)
    assert caught.value.code is ErrorCode.SETTINGS_INVALID


# --- virtual memory ---


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("  Device 0: NVIDIA GeForce RTX 3090, compute capability 8.6, VMM: yes\n", True),
        ("  Device 0: NVIDIA GeForce RTX 3090, compute capability 8.6, VMM: yes, VRAM: 24135 MiB\n", True),
        ("  Device 0: NVIDIA GeForce RTX 3090, compute capability 8.6, VMM: no\n", False),
        (
            "ggml_cuda_init: found 2 CUDA devices:\n"
            "  Device 0: a card, compute capability 8.6, VMM: yes\n"
            "  Device 1: a card, compute capability 6.1, VMM: no\n",
            False,
        ),
        ("", None),
        ("Available devices:\n  CUDA0: NVIDIA GeForce RTX 3090 (24135 MiB, 23000 MiB free)\n", None),
        ("note: VMM: yes\n", None),
        ("  Device 0: x, VMM: yesterday\n", None),
        ("  Device 0: " + "x" * 1000 + ", VMM: yes\n", None),
        ("  Device 0: x\n, VMM: yes\n", None),
    ],
)
def test_whether_devices_have_virtual_memory(text: str, answer: bool | None) -> None:
    assert reports_virtual_memory(text) is answer
