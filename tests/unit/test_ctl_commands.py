"""Every command against a server that speaks the contract: text for people, documents for programs."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from pydantic import BaseModel

from lllm3090d import wire
from lllm3090d.checkpoints.purpose import Purpose
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.planning.quote import Evidence
from lllm3090d.planning.verdict import Verdict
from lllm3090d.serving.instance import InstanceState
from tests.fakes.control_server import (
    ADMITTED,
    INSPECTED,
    INSTANCE,
    LOADING,
    MIB,
    MODELS,
    PLAN,
    PREVIEWED,
    READY,
    STATUS,
    TOO_LARGE,
    ControlServer,
    Cut,
    RawServer,
    Script,
    Stream,
    changed,
    ctl,
    event,
    load_line,
    name_in_target,
)

pytestmark = pytest.mark.unit

RESIDENT = {"expert_layers_on_host": 0, "cache_on_host": False}
UNLOADED = wire.Unloaded(name="SmolLM2-135M", run="k3f9", released_bytes=512 * MIB, elapsed_s=0.42)


@pytest.mark.parametrize(
    ("arguments", "scripts", "model"),
    [
        (["status"], {"status": STATUS}, wire.Status),
        (["models"], {"models": MODELS}, wire.Models),
        (["ps"], {"instances": wire.Instances(instances=(INSTANCE,))}, wire.Instances),
        (["inspect", "hybrid"], {"inspect": INSPECTED}, wire.InspectView),
        (["plan", "smol"], {"plan": PLAN}, wire.PlanView),
        (["unload", "smol"], {"unload": UNLOADED}, wire.Unloaded),
    ],
)
def test_json_is_the_document_of_the_wire(
    arguments: list[str], scripts: dict[str, Script], model: type[BaseModel]
) -> None:
    """One document, equal to what the daemon said."""
    with ControlServer(**scripts) as server:
        done = ctl(server, *arguments, "--json")
    assert done.exit_code == 0
    assert model.model_validate_json(done.stdout) == next(iter(scripts.values()))
    assert done.stderr == ""


def test_status_tells_daemon_card_engine_and_instances() -> None:
    """The figures of the card are in MiB and complete."""
    with ControlServer(status=STATUS) as server:
        done = ctl(server, "status")
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert lines[0] == "daemon     0.1.0, pid 321, since 2026-11-30T11:00:00Z, systemd 252"
    assert lines[1] == f"socket     {server.path}"
    assert "card       NVIDIA GeForce RTX 3090 (driver 580.95.05)" in lines
    assert (
        "memory     MiB: total 24,576.0, used 700.0, free 23,425.0, kept by the driver 451.0,"
        " reserved for models 512.0, available 22,000.0"
    ) in lines
    assert (
        "engine     /opt/llama/llama-server"
        " (version: 9870 (abc); cuda; CUDA0; from LLLM3090_LLAMA_DIR, locked)"
    ) in lines
    assert lines[-1].split() == [
        "SmolLM2-135M", "ready", "-", "8,192", "2", "512.0", "MiB", "498.0", "MiB", "4711", INSTANCE.unit,
    ]  # fmt: skip


def test_status_shows_problems_and_leaves_out_what_is_unknown() -> None:
    """A card that cannot be read has no figures, and none of them is shown as 0."""
    unreadable = LlmError(ErrorCode.CARD_UNREADABLE, "NVML says no.", hint="Reboot.").problem()
    missing = LlmError(ErrorCode.ENGINE_NOT_FOUND, "No llama-server.", hint="Build one.").problem()
    silent = dict.fromkeys(
        ("total_bytes", "used_bytes", "free_bytes", "reserved_by_driver_bytes", "available_bytes")
    )
    card = changed(STATUS.card, **silent, problem=unreadable)
    lost = LlmError(ErrorCode.STATE_UNUSABLE, "The disk is full.", hint="Make room.").problem()
    unknown = LlmError(ErrorCode.STATE_UNUSABLE, "cards.json is damaged.", hint="See nvidia-smi.").problem()
    answer = changed(
        STATUS,
        card=card,
        cards_problem=unknown,
        engine=None,
        engine_problem=missing,
        state_problem=lost,
        instances=(),
    )
    with ControlServer(status=answer) as server:
        done = ctl(server, "status")
    assert done.exit_code == 0
    assert "memory     MiB: reserved for models 512.0\n" in done.stdout
    assert "card: The card's memory cannot be read: NVML says no.\n  Hint: Reboot.\n" in done.stdout
    assert "engine: No llama-server was found: No llama-server.\n  Hint: Build one.\n" in done.stdout
    assert (
        "cards: What was learnt cannot be kept: cards.json is damaged.\n  Hint: See nvidia-smi.\n"
        in done.stdout
    )
    assert "state: What was learnt cannot be kept: The disk is full.\n  Hint: Make room.\n" in done.stdout
    assert done.stdout.endswith("\nNo model is loaded.\n")


def test_ps_shows_what_is_at_risk_and_why() -> None:
    risky = changed(INSTANCE, at_risk="RTX 3090 reported Xid 79: the card has fallen off the bus")
    with ControlServer(instances=wire.Instances(instances=(risky,))) as server:
        done = ctl(server, "ps")
    assert " ready, at risk " in done.stdout
    assert done.stdout.endswith(
        "SmolLM2-135M is at risk: RTX 3090 reported Xid 79: the card has fallen off the bus\n"
    )


@pytest.mark.parametrize("purpose", list(Purpose))
def test_ps_and_models_tell_what_else_than_text_a_model_serves(purpose: Purpose) -> None:
    told = "ready" if purpose is Purpose.CHAT else f"ready, {purpose}"
    listed = changed(MODELS, models=(changed(MODELS.models[0], state=InstanceState.READY, purpose=purpose),))
    with ControlServer(
        instances=wire.Instances(instances=(changed(INSTANCE, purpose=purpose),)), models=listed
    ) as server:
        assert re.search(rf" {told}  +", ctl(server, "ps").stdout)
        assert re.search(rf" {told}$", ctl(server, "models").stdout, re.MULTILINE)


def test_ps_shows_each_instance_and_why_one_failed() -> None:
    """Unknown states of a newer daemon are shown as they are; nothing measured is a dash."""
    died = LlmError(ErrorCode.ENGINE_FAILED, "Exit status 1.", hint="lllm3090ctl logs x").problem()
    failed = changed(
        INSTANCE, name="Broken", state="failed", main_pid=None, measured_bytes=None, failure=died
    )
    with ControlServer(instances=wire.Instances(instances=(INSTANCE, failed))) as server:
        done = ctl(server, "ps")
    header, first, second, note, hint = done.stdout.splitlines()
    assert header.split() == [
        "NAME",
        "STATE",
        "USE",
        "CONTEXT",
        "SLOTS",
        "RESERVED",
        "MEASURED",
        "PID",
        "UNIT",
    ]
    assert first.split()[:5] == ["SmolLM2-135M", "ready", "-", "8,192", "2"]
    assert second.split() == ["Broken", "failed", "-", "8,192", "2", "512.0", "MiB", "-", "-", failed.unit]
    assert (note, hint) == ("Broken: The engine ended: Exit status 1.", "  Hint: lllm3090ctl logs x")


def test_an_engines_end_is_one_sentence_and_advice_is_given_once() -> None:
    advice = "Try another build."
    died = LlmError(
        ErrorCode.ENGINE_FAILED,
        "the engine failed by a fault of its own; it was killed by SIGSEGV",
        hint=f"{advice} See: journalctl",
        advice=advice,
    ).problem()
    failed = changed(
        INSTANCE,
        name="x",
        state="latched",
        failure=died,
        latch_reason="why",
        way_out=f"{advice} Then: lllm3090ctl reset x",
    )
    with ControlServer(instances=wire.Instances(instances=(failed,))) as server:
        lines = ctl(server, "ps").stdout.splitlines()
    assert lines[2:] == [
        "x: the engine failed by a fault of its own; it was killed by SIGSEGV",
        "  Hint: See: journalctl",
        "x: is not started again: why.",
        f"  Hint: {advice} Then: lllm3090ctl reset x",
    ]


def test_nothing_there_says_what_to_do() -> None:
    """Empty tables are sentences."""
    with ControlServer(
        instances=wire.Instances(instances=()), models=wire.Models(models_dir="/m", models=())
    ) as server:
        assert "lllm3090ctl load NAME" in ctl(server, "ps").stdout
        listing = ctl(server, "models").stdout
    assert "no models in /m" in listing
    assert "/m/NAME/NAME.gguf" in listing


def test_models_tells_what_cannot_be_loaded() -> None:
    """The problem stands below the table, in one line."""
    with ControlServer(models=MODELS) as server:
        lines = ctl(server, "models").stdout.splitlines()
    assert lines[0].split() == [
        "NAME", "KIND", "SIZE", "ARCH", "QUANT", "CONTEXT", "B/TOKEN", "SLOT", "VERDICT", "PLAN", "TOKENS/S",
        "EVIDENCE", "STATE",
    ]  # fmt: skip
    assert lines[1].split() == [
        "SmolLM2-135M", "dense", "vision", "100.0", "MiB", "llama", "Q4_K_M", "8,192", "12,240", "-",
        "tight", "2", "x", "4,096", "210.5", "(other", "backend)", "header", "ready",
    ]  # fmt: skip
    assert lines[2].split() == ["page", "-", "3.0", "GiB", *["-"] * 9, "unusable"]
    assert lines[3] == "SmolLM2-135M: with projector mmproj.gguf, drafter mtp-smol.gguf"
    assert lines[4:6] == ["page: The model file is damaged: It is HTML.", "  Hint: Fetch it again."]
    assert lines[6] == "TOKENS/S were measured on RTX 3090 with Vulkan, and are never scaled."
    assert lines[7] == (
        "VERDICT and PLAN are for NVIDIA GeForce RTX 3090, 24.0 GiB, cuda, with nothing on it but a desktop;"
        " loaded models are not counted."
    )


def test_models_of_the_catalogue_say_where_they_can_be_had() -> None:
    """They are asked for, stand behind the others, and are not taken for what is on disk."""
    row = wire.ModelView(
        name="Gemma",
        aliases=("gemma",),
        size_bytes=17 << 30,
        shards=1,
        architecture=None,
        quantisation="Q4_K_S",
        trained_context_tokens=262144,
        on_disk=False,
        download=PREVIEWED.download,
        verdict=Verdict.TOO_BIG,
        evidence=Evidence.CATALOGUE,
    )
    unknown = LlmError(ErrorCode.UNSUPPORTED_ARCHITECTURE, "Latent.", hint="Download it.").problem()
    latent = changed(row, name="Latent", verdict=None, evidence=None, plan_problem=unknown)
    listing = changed(
        MODELS,
        models=(*MODELS.models, row, latent),
        catalogue_problem=LlmError(ErrorCode.SETTINGS_INVALID, "It is no file.", hint="Move it.").problem(),
    )
    with ControlServer(models=listing) as server:
        done = ctl(server, "models", "--catalogue")
        assert server.next_request().target == "/v1/models?catalogue=1"
    lines = done.stdout.splitlines()
    assert lines[3].split() == [
        "Gemma", "-", "17.0", "GiB", "-", "Q4_K_S", "262,144", "-", "-", "too-big", "-", "-", "catalogue",
        "download",
    ]  # fmt: skip
    assert "Gemma: to be had from somebody/Gemma-4-26B-A4B-GGUF, gemma.gguf, mmproj.gguf" in lines
    assert "Latent: Unsupported kind of model: Latent." in lines
    assert "  Hint: Download it." in lines
    assert lines[-2:] == ["The settings are not valid: It is no file.", "  Hint: Move it."]


def test_models_without_an_engine_say_why_nothing_is_planned() -> None:
    missing = LlmError(ErrorCode.ENGINE_NOT_FOUND, "There is none.", hint="Build one.").problem()
    with ControlServer(models=changed(MODELS, plan_problem=missing)) as server:
        last = ctl(server, "models").stdout.splitlines()[-2:]
    assert last == ["No llama-server was found: There is none.", "  Hint: Build one."]


def test_plan_is_a_ledger() -> None:
    """Items, budget with signs, verdict, and a command line that a shell reads back."""
    with ControlServer(plan=PLAN) as server:
        sizes = ("--context", "8192", "--parallel", "2", "--cache-type", "q8_0")
        done = ctl(server, "plan", "smol", *sizes, "--explain")
        asked = server.next_request()
    assert asked.body == wire.PlanBody.model_validate(
        {"model": "smol", "context_tokens": 8192, "parallel": 2, "cache_type": "q8_0"}
    )
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert "context     8,192 tokens (2 slots of 4,096, q8_0/f16 cache, trained for 8,192)" in lines
    assert "kv cache              412.0  card   header    30 layers [x] 8192" in lines
    assert "sum on the card       512.0" in lines
    assert "sum in host memory  1,024.0" in lines
    assert "total      +24,576.0  NVML" in lines
    assert "driver        -451.0  NVML, live" in lines
    assert "available   24,125.0" in lines
    assert "It fits, with 23,613.0 MiB to spare." in lines
    assert tuple(shlex.split(lines[-1])) == PLAN.argv


def test_plan_tells_what_it_gives() -> None:
    """Card, verdict, what limits it, and everything that is not as usual; without --explain no formula."""
    with ControlServer(plan=PLAN) as server:
        lines = ctl(server, "plan", "smol").stdout.splitlines()
    for line in (
        "card        NVIDIA GeForce RTX 3090, 24.0 GiB, cuda",
        "verdict     tight: too small a window for an agent",
        "limited by  the model: it is trained for 8,192 tokens",
        "placement   19 layers and the output on the card",
        "tier        4,096 tokens on the card, the others in 64.0 MiB of pinned host memory",
        "tier speed  11.4 tokens/s with the whole context in use, 19.5 with half of it. Speed predicted from a step;"
        " bus 23.7 GB/s, measured on PCIe 4.0 x16.",
        "drafting    draft-mtp, 3 tokens, q8_0/f16 cache",
        "projector   in host memory",
        "rope        yarn x 2.5, from 8,192 to 20,480 tokens",
        "speed       54.8 tokens/s (other card); measured: RTX 4090, Vulkan, drafting (mtp), code",
        "evidence    header",
        "Note: 2 slots, as no number was asked for.",
        "The window is too small.",
        "For an agent it needs a card of 12 GiB, which holds 40,960 tokens in one slot.",
        "ITEM                    MIB  PLACE  EVIDENCE",
        "total      +24,576.0",
    ):
        assert line in lines
    text = "\n".join(lines)
    assert "[x]" not in text
    assert "--parallel 1" not in text


def test_plan_explains_itself_when_asked() -> None:
    """Formula and origin of each line, the smallest card, and what else could be had, with how to ask for it."""
    with ControlServer(plan=PLAN) as server:
        lines = ctl(server, "plan", "smol", "--explain").stdout.splitlines()
        assert server.next_request().body == wire.PlanBody(model="smol")
    assert (
        "Smallest card for an agent: 12 GiB (11,900.0 MiB for 40,960 tokens in one slot, evidence header)."
    ) in lines
    head = lines.index("ASK           PLAN       ON THE CARD  DIFFERENCE")
    assert (
        lines[head + 1]
        == "--parallel 1  1 x 8,192    500.0 MiB  4,096 tokens of window more, 1 slot instead of 2"
    )
    head = lines.index("WAY         CONTEXT  ON THE CARD  TOKENS/S AT ITS END  WHY")
    assert lines[head + 1 : head + 3] == [
        "tier, q8_0    8,192        4,096                 11.4  It takes 512 MiB.",
        "q4_0, q4_0    8,192            -        cannot be had  No.",
    ]


def test_a_preview_is_marked_and_says_where_the_model_can_be_had() -> None:
    """No file, no command line, and a desktop that nobody has seen."""
    with ControlServer(plan=PREVIEWED) as server:
        done = ctl(server, "plan", "gemma")
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert lines[0] == "A preview: this model is not on disk."
    assert (
        "download    somebody/Gemma-4-26B-A4B-GGUF: gemma.gguf (16.0 GiB), mmproj.gguf (1.0 GiB)"
    ) in lines
    assert (
        "card        NVIDIA GeForce RTX 3090, 24.0 GiB, cuda, with nothing on it but a desktop, which is assumed"
    ) in lines
    assert "subagents   1 at a time" in lines
    assert "kind        moe vision, Q4_K_S" in lines
    assert not any(line.startswith(("file ", "The engine's command line")) for line in lines)


def test_a_card_that_cannot_compute_the_model_is_a_refusal() -> None:
    """It fits, and that does not help."""
    with ControlServer(plan=changed(PLAN, verdict="capability")) as server:
        done = ctl(server, "plan", "smol")
    assert done.exit_code == 5
    assert "It fits, with 23,613.0 MiB to spare, but the card cannot compute it." in done.stdout.splitlines()


def test_a_plan_of_an_older_daemon_is_shown() -> None:
    """Every new member is optional."""
    new = {
        name
        for name, field in wire.PlanView.model_fields.items()
        if not field.is_required() and name not in {"path", "architecture"}
    }
    old = PLAN.model_dump(mode="json", exclude=new)
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: "
    body = json.dumps(old).encode()
    with RawServer(head + str(len(body)).encode() + b"\r\n\r\n" + body) as server:
        done = ctl(server, "plan", "smol", "--explain")
    assert done.exit_code == 0
    assert "limited by  model" in done.stdout.splitlines()


PLAN_OPTIONS: dict[str, dict[str, object]] = {
    "--ctx 4096": {"context_tokens": 4096},
    "--slot-policy window": {"slot_policy": "window"},
    "--offload allowed": {"offload": "allowed"},
    "--gpu-layers 0": {"gpu_layers": 0},
    "--cpu-experts 12": {"cpu_experts": 12},
    "--cache-on-host": {"cache_on_host": True},
    "--draft off": {"drafting": "off"},
    "--draft-tokens 5": {"draft_tokens": 5},
    "--projector host": {"projector": "host"},
    "--unified": {"unified": True},
    "--swa-full": {"swa_full": True},
    "--purpose embedding": {"purpose": "embedding"},
    "--batch 4096": {"batch_tokens": 4096},
    "--micro-batch 1024": {"micro_batch_tokens": 1024},
    "--rope-scaling yarn": {"rope_scaling": "yarn"},
    "--tier": {"tiered": True},
    "-- --threads 4": {"arguments": ["--threads", "4"]},
}
CARD_OPTIONS: dict[str, dict[str, object]] = {
    "--card 'RTX 4090'": {"card": "RTX 4090"},
    "--vram 12GiB": {"vram": "12GiB"},
    "--desktop": {"desktop": True},
    "--headless": {"desktop": False},
    "--backend cuda": {"backend": "cuda"},
    "--check": {"check": True},
}


@pytest.mark.parametrize(("option", "asked"), (PLAN_OPTIONS | CARD_OPTIONS).items())
def test_each_option_is_a_member_of_the_request(option: str, asked: dict[str, object]) -> None:
    with ControlServer(plan=PLAN) as server:
        assert ctl(server, "plan", "smol", *shlex.split(option)).exit_code == 0
        seen = server.next_request().body
    assert seen is not None
    assert seen.model_dump(mode="json", exclude_unset=True) == {"model": "smol"} | asked


@pytest.mark.parametrize(("option", "asked"), PLAN_OPTIONS.items())
def test_load_takes_the_options_of_a_plan(option: str, asked: dict[str, object]) -> None:
    with ControlServer(load=Stream((READY,))) as server:
        assert ctl(server, "load", "smol", *shlex.split(option)).exit_code == 0
        seen = server.next_request().body
    assert seen is not None
    assert seen.model_dump(mode="json", exclude_unset=True, exclude={"token"}) == {"model": "smol"} | asked


def test_every_option_of_a_plan_is_tried_above() -> None:
    tried = {key for asked in (PLAN_OPTIONS | CARD_OPTIONS).values() for key in asked}
    assert tried | {"model", "parallel", "cache_type"} == set(wire.PlanBody.model_fields)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--gpu-layers", "-1"],
        ["--micro-batch", "31"],
        ["--draft-tokens", "0"],
        ["--offload", "maybe"],
        ["--rope-scaling", "yarnish"],
        ["--backend", "rocm"],
        ["--tier=yes"],
        ["--ctx", "0"],
        ["--card"],
    ],
)
def test_a_mistaken_option_asks_nothing(arguments: list[str]) -> None:
    with ControlServer(plan=PLAN) as server:
        done = ctl(server, "plan", "smol", *arguments)
        assert server.seen.empty()
    assert done.exit_code == 2
    assert arguments[0].partition("=")[0] in done.stderr


@pytest.mark.parametrize("option", CARD_OPTIONS)
def test_a_load_is_for_the_card_that_is_there(option: str) -> None:
    with ControlServer(load=Stream((READY,))) as server:
        assert ctl(server, "load", "smol", *shlex.split(option)).exit_code == 2


def test_plan_asks_only_for_what_was_chosen() -> None:
    """What is left out is the planner's choice, not a default of the client."""
    with ControlServer(plan=PLAN) as server:
        ctl(server, "plan", "smol")
        assert server.next_request().body == wire.PlanBody(model="smol")


def test_plan_that_does_not_fit_is_refused() -> None:
    """The ledger on stdout, status 5, and what is missing is rounded up."""
    tight = changed(PLAN, fits=False, available_bytes=512 * MIB - 1)
    with ControlServer(plan=tight) as server:
        done = ctl(server, "plan", "smol")
    assert done.exit_code == 5
    assert "It does not fit: 0.1 MiB are missing." in done.stdout.splitlines()


def test_refusal_shows_the_arithmetic() -> None:
    """Ledger, total, available, missing, hint; on stderr, with the status of the problem."""
    with ControlServer(load=TOO_LARGE) as server:
        done = ctl(server, "load", "huge")
    assert done.exit_code == 5
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert lines[0] == f"lllm3090ctl: It does not fit: {TOO_LARGE.message}"
    assert "weights          39,000.0  card   header    f" in lines
    assert "prompts           1,024.0  host   header    h" in lines
    assert "sum on the card  40,000.0" in lines
    assert "needed     40,000.0 MiB" in lines
    assert "available  24,125.0 MiB" in lines
    assert "missing    15,875.1 MiB" in lines
    assert lines[-1] == "Hint: Unload SmolLM2-135M: lllm3090ctl unload SmolLM2-135M"


def test_refusal_without_a_budget_still_adds_up() -> None:
    """The planner's own refusal names what could be granted, without its terms."""
    figures = {"items": TOO_LARGE.details["items"], "grantable_bytes": 1000 * MIB}
    with ControlServer(plan=LlmError(ErrorCode.INSUFFICIENT_MEMORY, "No.", **figures)) as server:
        lines = ctl(server, "plan", "huge").stderr.splitlines()
    assert lines[-3:] == ["needed     40,000.0 MiB", "available   1,000.0 MiB", "missing    39,000.1 MiB"]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["load", "huge"], "load"),
        (["plan", "huge"], "plan"),
        (["unload", "huge"], "unload"),
        (["ps"], "instances"),
        (["models"], "models"),
        (["status"], "status"),
        (["logs", "huge"], "logs"),
        (["events"], "events"),
    ],
)
def test_json_of_a_failure_is_the_problem_document(arguments: list[str], word: str) -> None:
    """On stdout, complete, with the same status as the text has."""
    with ControlServer(**{word: TOO_LARGE}) as server:
        done = ctl(server, *arguments, "--json")
    assert done.exit_code == 5
    assert json.loads(done.stdout) == json.loads(json.dumps(TOO_LARGE.problem()))
    assert done.stderr == ""


@pytest.mark.parametrize("code", list(ErrorCode))
def test_every_error_ends_in_its_exit_status(code: ErrorCode) -> None:
    """The table of the daemon is the client's; message and hint reach the person."""
    error = LlmError(code, "Why it is so.", hint="Do this.\nThen that.")
    with ControlServer(unload=error) as server:
        done = ctl(server, "unload", "x")
    assert done.exit_code == error.kind.exit_status
    assert (
        done.stderr == f"lllm3090ctl: {error.kind.title}: Why it is so.\nHint: Do this.\n      Then that.\n"
    )


def test_lists_in_details_are_shown() -> None:
    """Candidates of an ambiguous name, or the engine's last lines; not what the message has said."""
    error = LlmError(ErrorCode.AMBIGUOUS_MODEL, "Two fit.", candidates=["A-1\x1b[2J", "A-2"], count=2)
    with ControlServer(unload=error) as server:
        done = ctl(server, "unload", "a")
        assert done.stderr.splitlines()[1:] == ["candidates:", r"  A-1\x1b[2J", "  A-2"]
    said = LlmError(ErrorCode.AMBIGUOUS_MODEL, "It fits 2: A-1, A-2.", candidates=["A-1", "A-2"])
    with ControlServer(unload=said) as server:
        assert len(ctl(server, "unload", "a").stderr.splitlines()) == 1
    hinted = LlmError(
        ErrorCode.UNKNOWN_MODEL, "None.", hint="Fetch m.gguf.", files=["m.gguf"], fields=["draft"]
    )
    with ControlServer(unload=hinted) as server:
        assert ctl(server, "unload", "a").stderr.splitlines()[1:] == ["Hint: Fetch m.gguf."]


@pytest.mark.parametrize("details", [{"items": "no list"}, {"items": [{"name": 1}]}, {"budget": [{}]}])
def test_misshapen_details_do_not_hide_the_failure(details: dict[str, object]) -> None:
    """What can be read is shown; the rest is left out."""
    with ControlServer(
        unload=LlmError(ErrorCode.INSUFFICIENT_MEMORY, "No.", hint="Wait.", **details)
    ) as server:
        done = ctl(server, "unload", "a")
    assert done.exit_code == 5
    assert done.stderr == "lllm3090ctl: It does not fit: No.\nHint: Wait.\n"


def test_unload_says_what_was_released() -> None:
    """In MiB and seconds."""
    with ControlServer(unload=UNLOADED) as server:
        done = ctl(server, "unload", "smol")
        assert server.next_request().body == wire.UnloadBody(model="smol")
    assert done.stdout == "SmolLM2-135M is unloaded: 512.0 MiB released in 0.4 s\n"


def test_load_shows_progress_and_then_one_line() -> None:
    """Progress on stderr, the outcome on stdout."""
    starting = load_line("state", 0.15, state="starting")
    with ControlServer(load=Stream((ADMITTED, starting, LOADING, READY))) as server:
        done = ctl(server, "load", "smol", "--parallel", "2")
        body = server.next_request().body
    assert isinstance(body, wire.LoadBody)
    assert (body.model, body.parallel, body.context_tokens) == ("smol", 2, None)
    assert body.token
    assert done.exit_code == 0
    assert done.stderr.splitlines() == [
        "SmolLM2-135M: admitted, context 8,192 tokens (2 slots of 4,096, q8_0/f16 cache, trained for 8,192);"
        " 512.0 of 24,125.0 MiB",
        "smol: starting, 0.1 s",
        "smol: loading, 50.0 of 512.0 MiB, 0.2 s",
    ]
    assert done.stdout == (
        "SmolLM2-135M is ready after 0.9 s: context 8,192 tokens (2 slots of 4,096, q8_0 cache);"
        " reserved 512.0 MiB, measured 498.0 MiB; endpoint /run/user/1000/lllm3090d/engines/k3f9.sock\n"
    )


def test_what_is_loaded_already_is_not_said_to_have_been_loaded() -> None:
    """The first line of the stream is the last."""
    with ControlServer(load=Stream((READY,))) as server:
        done = ctl(server, "load", "smol")
    assert done.exit_code == 0
    assert done.stdout.startswith("SmolLM2-135M is loaded already: context 8,192 tokens (2 slots")


def test_that_a_loaded_model_is_pinned_now_is_said_where_that_was_asked_for() -> None:
    assert READY.instance is not None
    pinned = changed(READY, instance=changed(READY.instance, pinned=True))
    with ControlServer(load=Stream((pinned,))) as server:
        told = ctl(server, "load", "smol", "--pin").stdout
        untold = ctl(server, "load", "smol").stdout
    assert told.startswith("SmolLM2-135M is loaded already, and is pinned now: context")
    assert untold.startswith("SmolLM2-135M is loaded already: context")


@pytest.mark.parametrize("command", ["load", "plan"])
def test_an_option_of_the_engine_is_told_where_it_belongs(command: str) -> None:
    """Other commands take none."""
    with ControlServer(plan=PLAN) as server:
        done = ctl(server, command, "smol", "--threads", "2")
        other = ctl(server, "unload", "smol", "--threads")
        assert server.seen.empty()
    assert done.exit_code == other.exit_code == 2
    assert f"If it is for the engine: lllm3090ctl {command} NAME -- --threads ...\n" in done.stderr
    assert "for the engine" not in other.stderr


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"parallel": 1, "window_tokens": 8192}, "8,192 tokens (1 slot, "),
        ({"window_tokens": 8192}, "8,192 tokens (2 slots sharing 8,192, "),
        ({"context_tokens": 1}, "1 token (2 slots of 4,096, "),
    ],
)
def test_slots_of_an_instance(changes: dict[str, object], shown: str) -> None:
    """That they share one pool is seen from the window."""
    ready = load_line("ready", instance=changed(INSTANCE, **changes))
    with ControlServer(load=Stream((ready,))) as server:
        assert f"context {shown}" in ctl(server, "load", "smol").stdout


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        (
            {"unified": True},
            "context     8,192 tokens (2 slots sharing 8,192 with at most 4,096 each, q8_0/f16",
        ),
        ({"placement": {**RESIDENT, "layers_on_card": 0}}, "placement   no layers on the card\n"),
        ({"verdict": "ok"}, "verdict     ok: an agent can work in its window\n"),
        ({"verdict": "ok", "purpose": "embedding", "agent": None}, "verdict     ok: it fits\n"),
        ({"placement": {**RESIDENT, "layers_on_card": 1}}, "placement   the output on the card\n"),
        (
            {"placement": {"layers_on_card": 2, "expert_layers_on_host": 1, "cache_on_host": True}},
            "placement   1 layer and the output on the card, experts of 1 layer in host memory, cache in host memory\n",
        ),
        (
            {"argv": ("/x/llama-server", "--host", "/run/Smol-00000000.sock")},
            "(The zeros in the name of the socket",
        ),
    ],
)
def test_plan_says_in_words_what_is_unusual(changes: dict[str, object], shown: str) -> None:
    with ControlServer(plan=changed(PLAN, **changes)) as server:
        assert shown in ctl(server, "plan", "smol").stdout


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"qualifier": "measured"}, "54.8 tokens/s; measured: RTX 4090, Vulkan, drafting (mtp), code"),
        (
            {"qualifier": "other card, measured on vulkan", "speculation": "none", "build": "b1"},
            "54.8 tokens/s (other card and backend); measured: RTX 4090, Vulkan, no drafting, code, b1",
        ),
        (
            {"qualifier": "measured on cuda", "backend": "cuda", "workload": None},
            "54.8 tokens/s (other backend); measured: RTX 4090, CUDA, drafting (mtp)",
        ),
    ],
)
def test_a_speed_says_what_differs_and_where_it_was_measured(changes: dict[str, object], shown: str) -> None:
    assert PLAN.speed is not None
    with ControlServer(plan=changed(PLAN, speed=PLAN.speed.model_dump() | changes)) as server:
        assert f"speed       {shown}" in ctl(server, "plan", "smol").stdout.splitlines()


def test_host_memory_in_place_of_a_card_is_not_called_a_card() -> None:
    """Nor is a second memory beside it, nor a driver that keeps some."""
    on_host = changed(PLAN, card_kind="cpu", host_bytes=0)
    host = changed(STATUS, card=changed(STATUS.card, kind="cpu", reserved_by_driver_bytes=0))
    with ControlServer(plan=on_host, status=host) as server:
        plan = ctl(server, "plan", "smol", "--explain").stdout
        status = ctl(server, "status").stdout
    assert "sum in host memory" not in plan
    assert "IN MEMORY  DIFFERENCE" in plan
    assert "kept by the driver" not in status


def test_no_card_helps_a_model_that_is_trained_for_too_little() -> None:
    """Said where alternatives are asked for; the smallest card is named once."""
    alone = changed(PLAN, smallest_card=None)
    with ControlServer(plan=[alone, PLAN, changed(alone, limit=None)]) as server:
        said = "no card helps, as the model is trained for 8,192 tokens."
        assert said in ctl(server, "plan", "smol", "--explain").stdout
        assert ctl(server, "plan", "smol", "--explain").stdout.count("12 GiB") == 1
        assert said not in ctl(server, "plan", "smol", "--explain").stdout


def test_two_loads_have_two_tokens() -> None:
    """Or one could cancel the other."""
    with ControlServer(load=Stream((READY,))) as server:
        tokens = set()
        for _ in range(2):
            ctl(server, "load", "smol")
            body = server.next_request().body
            assert isinstance(body, wire.LoadBody)
            tokens.add(body.token)
    assert len(tokens) == 2


def test_load_that_joins_another_says_so() -> None:
    """The caller knows that the plan is not its own."""
    with ControlServer(load=Stream((load_line("joined"), READY))) as server:
        done = ctl(server, "load", "smol")
    assert done.exit_code == 0
    assert done.stderr == "smol: is being loaded already, waiting for the same load\n"


def test_quiet_load_says_nothing_but_failures() -> None:
    """With JSON, the last line only."""
    failed = load_line(
        "failed", problem=LlmError(ErrorCode.ENGINE_FAILED, "It died.", hint="Look.").problem()
    )
    with ControlServer(
        load=[Stream((ADMITTED, READY)), Stream((ADMITTED, READY)), Stream((ADMITTED, failed))]
    ) as server:
        done = ctl(server, "load", "smol", "--quiet")
        assert (done.exit_code, done.output) == (0, "")
        done = ctl(server, "load", "smol", "--quiet", "--json")
        assert wire.LoadLine.model_validate_json(done.stdout) == READY
        done = ctl(server, "load", "smol", "--quiet")
        assert done.exit_code == 6
        assert done.output == "lllm3090ctl: The engine ended: It died.\nHint: Look.\n"


def test_json_of_a_load_is_its_stream() -> None:
    """Line by line, a failure included, and nothing else; the status is that of the problem."""
    failed = load_line("failed", problem=LlmError(ErrorCode.LOAD_TIMED_OUT, "Too slow.").problem())
    with ControlServer(load=Stream((ADMITTED, LOADING, failed))) as server:
        done = ctl(server, "load", "smol", "--json")
    assert done.exit_code == 8
    assert [wire.LoadLine.model_validate_json(line) for line in done.stdout.splitlines()] == [
        ADMITTED,
        LOADING,
        failed,
    ]
    assert done.stderr == ""


def test_admitted_line_may_carry_the_instance() -> None:
    """Instead of the plan; members that are null may be left out."""
    line = load_line("admitted", instance=INSTANCE).model_dump_json(exclude_none=True).encode() + b"\n"
    with ControlServer(load=Stream((line, b'{"kind": "admitted"}\n', READY))) as server:
        done = ctl(server, "load", "smol")
    assert done.exit_code == 0
    assert done.stderr.splitlines() == [
        "SmolLM2-135M: admitted, context 8,192 tokens (2 slots of 4,096, q8_0 cache); reserved 512.0 MiB",
        "SmolLM2-135M: admitted",
    ]


def test_unknown_kinds_of_line_are_ignored() -> None:
    """A newer daemon may say more."""
    strange = b'{"kind": "evicted", "elapsed_s": 0.1, "token": "t", "victim": "x"}\n'
    with ControlServer(load=Stream((strange, ADMITTED, READY))) as server:
        done = ctl(server, "load", "smol")
    assert done.exit_code == 0
    assert "evicted" not in done.output


@pytest.mark.parametrize("name", ["a/b", "Qwen 3.8 $x;'\"", "ü%2f?#", "..", "x\x1b[31m"])
def test_names_travel_whole(name: str) -> None:
    """In a path as one segment, in a body as text."""
    with ControlServer(logs=Stream((wire.LogLine(at="t", message="m"),)), unload=UNLOADED) as server:
        assert ctl(server, "logs", name).exit_code == 0
        seen = server.next_request().target
        assert name_in_target(seen) == name
        assert ctl(server, "unload", "--", name).exit_code == 0
        assert server.next_request().body == wire.UnloadBody(model=name)


def test_names_that_are_no_utf8_are_asked_for_as_they_are_listed() -> None:
    """The daemon shows such a model with escapes, and knows it by them."""
    gone = LlmError(ErrorCode.UNKNOWN_MODEL, "no such model", hint="look")
    with ControlServer(plan=PLAN, unload=gone, load=gone, logs=gone) as server:
        for command in ("plan", "load", "unload"):
            assert ctl(server, command, "caf\udce9 \udcff").exit_code == (0 if command == "plan" else 4)
            body = server.next_request().body
            assert body is not None
            assert body.model_dump()["model"] == "caf\\xe9 \\xff"
        assert ctl(server, "logs", "caf\udce9").exit_code == 4
        assert name_in_target(server.next_request().target) == "caf\\xe9"


def test_a_socket_whose_path_is_no_utf8(tmp_path: Path) -> None:
    """It works; what is said of it is text, and a command that names it can be typed."""
    with ControlServer(status=STATUS, events=Stream((event(1),))) as server:
        path = tmp_path / os.fsdecode(b"s\xff '$x'")
        path.symlink_to(server.path)
        assert f"socket     {tmp_path}/s\\xff '$x'\n" in ctl(path, "status").stdout
        hint = json.loads(ctl(path, "events", "--follow", "--json").stdout.splitlines()[-1])["hint"]
        path.unlink()
        problem = json.loads(ctl(path, "status", "--json").stdout)
    assert problem["details"]["socket"] == f"{tmp_path}/s\\xff '$x'"
    assert "s\\xff" in problem["detail"]
    typed = hint.split("--socket ")[1].split(" status")[0]
    bash = subprocess.run(["bash", "-c", f"printf %s {typed}"], capture_output=True, check=True)
    assert bash.stdout == os.fsencode(path)


def test_logs_pass_lines_on() -> None:
    """Tabs stay, escapes become visible; JSON is the wire's."""
    lines = (
        wire.LogLine(at="2026-11-30T11:20:00Z", message="a\tb\x1b[0m"),
        wire.LogLine(at="t", message=""),
    )
    with ControlServer(logs=Stream(lines)) as server:
        done = ctl(server, "logs", "smol", "-n", "7")
        assert server.next_request().target == "/v1/instances/smol/logs?lines=7&follow=0"
        assert done.stdout == "2026-11-30T11:20:00Z  a\tb\\x1b[0m\nt  \n"
        done = ctl(server, "logs", "smol", "-f", "--json")
        assert server.next_request().target == "/v1/instances/smol/logs?lines=100&follow=1"
    assert done.exit_code == 0
    assert tuple(wire.LogLine.model_validate_json(line) for line in done.stdout.splitlines()) == lines


def test_events_pass_lines_on() -> None:
    """One line each, in order, with what is known."""
    lines = (
        event(6, model="smol", state="loading", previous="starting"),
        event(7, kind="refused", model="huge", message="too large"),
        event(8, kind="settings"),
    )
    with ControlServer(events=Stream(lines)) as server:
        done = ctl(server, "events", "--since", "5")
        assert server.next_request().target == "/v1/events?since=5&follow=0"
        assert done.exit_code == 0
        assert done.stdout.splitlines() == [
            "6  2026-11-30T11:20:06Z  state  smol  starting -> loading",
            "7  2026-11-30T11:20:07Z  refused  huge  too large",
            "8  2026-11-30T11:20:08Z  settings",
        ]
        done = ctl(server, "events", "--json")
    assert tuple(wire.Event.model_validate_json(line) for line in done.stdout.splitlines()) == lines


@pytest.mark.parametrize("ending", [(), (Cut.CONNECTION,)])
def test_following_events_ends_with_the_daemon(ending: tuple[Cut, ...]) -> None:
    """However the daemon stops: a message and status 3, after the lines that came."""
    with ControlServer(events=Stream((event(1), *ending))) as server:
        done = ctl(server, "events", "--follow")
        assert server.next_request().target == "/v1/events?since=0&follow=1&last=100"
    assert done.exit_code == 3
    assert done.stdout.startswith("1  ")
    assert "The daemon went away" in done.stderr
    assert "Hint: Models that run go on running." in done.stderr


@pytest.mark.parametrize(("arguments", "word"), [(["logs", "x", "-f"], "logs"), (["events"], "events")])
def test_failure_after_a_stream_has_begun(arguments: list[str], word: str) -> None:
    """Its last line is an object with nothing but the problem; the status is that of the problem."""
    error = LlmError(ErrorCode.LOGS_UNAVAILABLE, "The journal is gone.", hint="Look.")
    begun = {"logs": wire.LogLine(at="t", message="m"), "events": event(1)}[word]
    last = json.dumps({"problem": error.problem()}).encode() + b"\n"
    with ControlServer(**{word: Stream((begun, last))}) as server:
        done = ctl(server, *arguments)
        assert done.exit_code == 1
        assert done.stderr == "lllm3090ctl: The journal cannot be read: The journal is gone.\nHint: Look.\n"
        done = ctl(server, *arguments, "--json")
    assert done.exit_code == 1
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        begun.model_dump(mode="json"),
        error.problem(),
    ]


def test_version_tells_both() -> None:
    """The client's own is there even when the daemon is not."""
    with ControlServer(version=wire.Version(version="9.9.9")) as server:
        done = ctl(server, "version")
        assert done.stdout == "lllm3090ctl  0.1.0\nlllm3090d    9.9.9 (api v1)\n"
        document = json.loads(ctl(server, "version", "--json").stdout)
        gone = server.path
    assert document == {"lllm3090ctl": {"version": "0.1.0"}, "lllm3090d": {"version": "9.9.9", "api": "v1"}}
    done = ctl(gone, "version")
    assert (done.exit_code, done.stdout) == (3, "lllm3090ctl  0.1.0\n")
    done = ctl(gone, "version", "--json")
    assert done.exit_code == 3
    assert json.loads(done.stdout)["problem"]["code"] == "daemon_unreachable"


@pytest.mark.parametrize(
    "arguments",
    [
        ["load"],
        ["load", ""],
        ["load", "x", "--context", "0"],
        ["load", "x", "--context", "many"],
        ["load", "x", "--parallel", "257"],
        ["load", "x", "--cache-type", "q9"],
        ["events", "--since", "-1"],
        ["logs", "x", "-n", "-1"],
        ["ps", "extra\x1b[31m"],
        ["no-such-command\x1b[31m"],
        ["--timeout", "0", "ps"],
        ["--timeout", "nan", "ps"],
        ["--socket", "", "ps"],
    ],
)
def test_usage_errors(arguments: list[str]) -> None:
    """Status 2, before anything is asked, and what is quoted cannot steer the terminal."""
    with ControlServer() as server:
        done = ctl(server, *arguments)
        assert server.seen.empty()
    assert done.exit_code == 2
    assert "Usage: lllm3090ctl" in done.stderr
    assert "\x1b" not in done.output
