"""A launch as data: names that every layer accepts, and a record that every later release can read."""

from __future__ import annotations

import json
import os
import re
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lllm3090d.bus.properties import OLDEST_SYSTEMD, encode
from lllm3090d.checkpoints.library import Checkpoint
from lllm3090d.checkpoints.purpose import Pooling, Purpose
from lllm3090d.engines.arguments import Launch
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.readings import CardKind
from lllm3090d.planning.launch import Launch as Sizes
from lllm3090d.planning.placement import Placement
from lllm3090d.planning.planner import CacheType, CappedBy, Plan
from lllm3090d.planning.quote import Draft, Evidence, LineItem, Place, Quote, SpecType
from lllm3090d.planning.rope import RopeScaling
from lllm3090d.planning.stretch import Stretch
from lllm3090d.planning.tier import Tier, TierSizes
from lllm3090d.planning.units import MIB
from lllm3090d.serving.unit_spec import (
    MEMORY_MAX_SLACK_BYTES,
    MOST_BYTES,
    RECORD_SCHEMA,
    RECORD_VARIABLE,
    RUN_VARIABLE,
    SUN_PATH_BYTES,
    UNIT_PATTERN,
    Record,
    UnitSpec,
    identifier,
    memory_max_bytes,
    read_record,
    slug,
    socket_path,
    unit_name,
    unit_spec,
)

pytestmark = pytest.mark.unit

RUN = "0a1b2c3d"
PINNED = Path(__file__).parents[1] / "data" / "records" / "v1.0.json"
NASTY_NAMES = [
    "Qwen3.8-27B",
    "",
    " ",
    ".",
    "..",
    "-",
    "--help",
    "a b",
    'say "hi"',
    "$(reboot);`id`",
    "%n%i",
    "a/b/../c",
    "日本語",
    "模型-7B",
    "x" * 300,
    "é" * 300,
    "a" * 99 + "-.",
    "line\nbreak",
    "back\\slash",
    "@instance",
    "🦙" * 40,
]
names = st.text(max_size=300)
no_nul = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)))

QUOTE = Quote(
    (
        LineItem("weights", Place.CARD, 3_000 * MIB, Evidence.HEADER, "all tensors"),
        LineItem("kv cache", Place.CARD, 1_000 * MIB, Evidence.MEASURED, 'K "q8_0" · 2 = \\x'),
        LineItem("process", Place.HOST, 200 * MIB, Evidence.ENGINE, "code, heap; $HOME %n"),
    )
)
PLAN = Plan(
    launch=Sizes(
        context_tokens=32768,
        parallel=2,
        cache_type_k=CacheType.Q8_0,
        cache_type_v=CacheType.F16,
        batch_tokens=2048,
        micro_batch_tokens=512,
        context_checkpoints=8,
        prompt_cache_mib=1024,
    ),
    window_tokens=16384,
    on_card=True,
    capped_by=CappedBy.MEMORY,
    quote=QUOTE,
)
CHECKPOINT = Checkpoint(
    name='Qwen 3 "quoted" $HOME; ü',
    path=Path('/home/somebody/models/Qwen 3 "quoted" $HOME; ü/model-00001-of-00002.gguf'),
    shards=(
        Path('/home/somebody/models/Qwen 3 "quoted" $HOME; ü/model-00001-of-00002.gguf'),
        Path('/home/somebody/models/Qwen 3 "quoted" $HOME; ü/model-00002-of-00002.gguf'),
    ),
    size_bytes=3_000 * MIB,
)
SOCKET = Path(f"/run/user/1000/lllm3090d/engines/Qwen-3-quoted-HOME-{RUN}.sock")


def record_of(plan: Plan = PLAN) -> Record:
    return Record.of(
        run=RUN, checkpoint=CHECKPOINT, plan=plan, socket=SOCKET, engine_version="version: 7376 (380b4c984)"
    )


# --- names -------------------------------------------------------------------------------------------------


def check_unit_name(name: str) -> None:
    unit = unit_name(name, RUN)
    # systemd: these characters, 255 at most, and no template instance.
    assert re.fullmatch(r"lllm3090-[A-Za-z0-9_.][A-Za-z0-9_.-]*-0a1b2c3d\.service", unit)
    assert len(unit) <= 255
    assert Path(unit).match(UNIT_PATTERN)
    assert identifier(unit) + ".service" == unit


@pytest.mark.parametrize("name", NASTY_NAMES)
def test_unit_names_are_safe(name: str) -> None:
    check_unit_name(name)


@given(names)
def test_unit_names_are_safe_whatever_the_name(name: str) -> None:
    check_unit_name(name)


def test_two_runs_of_a_model_have_two_units() -> None:
    assert unit_name("qwen", "a") != unit_name("qwen", "b")


@given(names, st.integers(min_value=1, max_value=120))
@example("", 1)
@example("日本語", 3)
@example("a.b.c", 2)
def test_a_slug_is_never_empty_nor_longer_than_allowed(name: str, limit: int) -> None:
    short = slug(name, limit)
    assert 1 <= len(short) <= limit
    assert re.fullmatch(r"[A-Za-z0-9_.-]+", short)
    assert short[0] not in "-."
    assert short[-1] not in "-."


@pytest.mark.parametrize("name", ["Qwen3.8-27B", "gemma-3-270m_it.Q4_K_M"])
def test_a_harmless_name_stays_as_it_is(name: str) -> None:
    assert slug(name, 100) == name


def directory_of_length(length: int) -> Path:
    return Path("/" + "d" * (length - 1))


@given(names, st.integers(min_value=2, max_value=130))
@example(
    "日本語", SUN_PATH_BYTES - len(f"/{RUN}.sock") - 2
)  # room for one character of a name that has none
@example("qwen", SUN_PATH_BYTES - len(f"/{RUN}.sock"))
@example("qwen", SUN_PATH_BYTES - len(f"/{RUN}.sock") + 1)
def test_a_socket_path_fits_or_is_refused(name: str, length: int) -> None:
    directory = directory_of_length(length)
    fits = length + len(f"/{RUN}.sock") <= SUN_PATH_BYTES
    if not fits:
        with pytest.raises(LlmError) as caught:
            socket_path(directory, name, RUN)
        assert caught.value.code is ErrorCode.SOCKET_PATH_TOO_LONG
        assert caught.value.details["limit_bytes"] == SUN_PATH_BYTES
        assert "LLLM3090_RUNTIME_DIR" in str(caught.value.hint)
        json.dumps(caught.value.problem())
        return
    path = socket_path(directory, name, RUN)
    assert len(os.fsencode(path)) <= SUN_PATH_BYTES
    assert path.parent == directory
    assert path.name.endswith(f"{RUN}.sock")
    assert re.fullmatch(r"[A-Za-z0-9_.-]+", path.name)


def test_a_socket_is_named_after_its_model_where_there_is_room() -> None:
    path = socket_path(Path("/run/user/1000/lllm3090d/engines"), "Qwen3.8-27B", RUN)
    assert path.name == f"Qwen3.8-27B-{RUN}.sock"


def test_bytes_are_counted_not_characters() -> None:
    with pytest.raises(LlmError):
        socket_path(Path("/" + "ü" * 50), "qwen", RUN)
    with pytest.raises(LlmError):
        socket_path(Path(os.fsdecode(b"/\xff" + b"d" * 100)), "qwen", RUN)
    assert socket_path(Path(os.fsdecode(b"/\xff")), "qwen", RUN).name == f"qwen-{RUN}.sock"


# --- the record --------------------------------------------------------------------------------------------


def test_the_record_gives_back_checkpoint_and_plan() -> None:
    record = read_record([f"{RECORD_VARIABLE}={record_of().model_dump_json()}"])
    assert record == record_of()
    assert record is not None
    assert record.checkpoint() == CHECKPOINT
    assert record.plan() == PLAN
    assert record.schema_version == RECORD_SCHEMA


@given(
    st.builds(
        LineItem,
        no_nul,
        st.sampled_from(Place),
        st.integers(min_value=0, max_value=MOST_BYTES),
        st.sampled_from(Evidence),
        no_nul,
    ),
    st.sampled_from(CacheType),
    st.sampled_from(CappedBy),
    st.booleans(),
)
def test_any_plan_survives_the_record(
    item: LineItem, cache_type: CacheType, capped_by: CappedBy, on_card: bool
) -> None:
    plan = replace(
        PLAN,
        quote=Quote((item, *QUOTE.items)),
        launch=replace(PLAN.launch, cache_type_k=cache_type),
        capped_by=capped_by,
        on_card=on_card,
    )
    text = record_of(plan).model_dump_json()
    assert text.isprintable() or "\n" not in text
    record = read_record(["PATH=/bin", f"{RECORD_VARIABLE}={text}"])
    assert record is not None
    assert record.plan() == plan


@pytest.mark.parametrize(
    "environment",
    [
        [],
        ["PATH=/bin", f"{RUN_VARIABLE}={RUN}"],
        [f"{RECORD_VARIABLE}="],
        [RECORD_VARIABLE],
        [f"{RECORD_VARIABLE}=not json"],
        [f"{RECORD_VARIABLE}=null"],
        [f"{RECORD_VARIABLE}=[]"],
        [f"{RECORD_VARIABLE}={{}}"],
        [f"{RECORD_VARIABLE}=" + "[" * 100_000],
        [f"X{RECORD_VARIABLE}={record_of().model_dump_json()}"],
        [f"{RECORD_VARIABLE}={record_of().model_dump_json()[:-1]}"],
        [f"{RECORD_VARIABLE}={record_of().model_copy(update={'schema_version': 2}).model_dump_json()}"],
        [f"{RECORD_VARIABLE}={record_of().model_dump_json().replace(':32768,', ':many,')}"],
        [f"{RECORD_VARIABLE}={record_of().model_dump_json().replace(':32768,', ':null,')}"],
        [f"{RECORD_VARIABLE}={record_of().model_dump_json(exclude={'socket'})}"],
    ],
)
def test_what_is_no_record_we_understand_is_none(environment: list[str]) -> None:
    assert read_record(environment) is None


def test_a_record_of_a_later_release_with_more_fields_is_read() -> None:
    values = record_of().model_dump(mode="json") | {"pinned": True}
    assert read_record([f"{RECORD_VARIABLE}={json.dumps(values)}"]) == record_of()


def test_the_pinned_record_of_schema_1_is_read_for_ever() -> None:
    # Written by the first release. Never change the file: units of that release may still run.
    text = PINNED.read_text(encoding="utf-8")
    record = read_record([f"{RECORD_VARIABLE}={text}"])
    assert record is not None
    assert record == record_of().model_copy(update={"launch": None, "minor": 0})
    assert record.plan() == PLAN
    pinned = json.loads(text)
    written = record_of().model_dump(mode="json")
    assert {key: written[key] for key in pinned} == pinned


def test_a_record_keeps_every_field_of_a_plan() -> None:
    """All of them differ from what an old record stands for; only the facts of a drafter are in its own file.

    Nor are the cards of a plan for several, whose shares the record has beside the plan; nor its price without what
    was learnt, which only the daemon that planned it compares with what it measures; nor what else its tier
    could have been.
    """
    draft = Draft(5, CacheType.Q4_0, CacheType.F32, window_tokens=16_384, spec_type=SpecType.DFLASH)
    plan = replace(
        PLAN,
        launch=replace(
            PLAN.launch,
            unified=True,
            swa_full=True,
            layers=Placement(layers_on_card=9, expert_layers_on_host=3, cache_on_host=True, with_mtp=True),
            draft=draft,
            projector_on_card=False,
            image_max_tokens=768,
            slot_tokens=8192,
            checkpoint_min_step_tokens=4096,
            line_tokens=16_384,
            tail_draft_tokens=4,
            purpose=Purpose.EMBEDDING,
            pooling=Pooling.MEAN,
        ),
        with_projector=True,
        rope=Stretch(RopeScaling.YARN, 2.5, 32_768, 81_920),
        tier=Tier(16_384, 32_768, TierSizes(1, 2, 3, 4), 5, 6, 7, 8, True, True, True),
        notes=("cache type f16 instead of q8_0", "ü"),
    )
    plain = replace(PLAN, launch=replace(PLAN.launch, context_tokens=1))
    unset = [
        f"{kind.__name__}.{field.name}"
        for kind, made, old in ((Plan, plan, plain), (Sizes, plan.launch, plain.launch))
        for field in fields(kind)
        if field.default is not MISSING and getattr(made, field.name) == getattr(old, field.name)
    ]
    assert unset == ["Plan.split", "Plan.uncalibrated", "Plan.ways", "Launch.drafter"]
    text = record_of(plan).model_dump_json()
    record = read_record([f"{RECORD_VARIABLE}={text}"])
    assert record is not None
    assert record == record_of(plan)
    assert record.plan() == plan


# --- the unit ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("card_mib", "host_mib", "kind", "expected_mib"),
    [
        (4000, 200, CardKind.NVIDIA, 200 + 512),
        (4000, 200, CardKind.CPU, 4000 + 512),
        (4000, 0, CardKind.NVIDIA, 512),
        (20480, 100, CardKind.CPU, 20480 + 2048),
        (20480, 10240, CardKind.NVIDIA, 10240 + 1024),
    ],
)
def test_memory_max_is_the_price_in_host_memory_and_some_room(
    card_mib: int, host_mib: int, kind: CardKind, expected_mib: int
) -> None:
    items = (
        LineItem("weights", Place.CARD, card_mib * MIB, Evidence.HEADER, ""),
        LineItem("process", Place.HOST, host_mib * MIB, Evidence.HEADER, ""),
    )
    assert memory_max_bytes(replace(PLAN, quote=Quote(items)), kind) == expected_mib * MIB


@given(st.integers(min_value=0, max_value=1 << 45))
def test_memory_max_leaves_room_at_every_size(price_bytes: int) -> None:
    quote = Quote((LineItem("process", Place.HOST, price_bytes, Evidence.HEADER, ""),))
    limit = memory_max_bytes(replace(PLAN, quote=quote), CardKind.NVIDIA)
    assert limit - price_bytes >= MEMORY_MAX_SLACK_BYTES
    assert (limit - price_bytes) * 10 >= price_bytes - 10


LAUNCH = Launch(
    argv=("/opt/llama/llama-server", "--alias", 'Qwen 3 "quoted"'),
    environment=(("LD_LIBRARY_PATH", "/opt/llama"), ("LLAMA_ARG_MODEL", str(CHECKPOINT.path))),
    unset=("LLAMA_ARG_CTX_SIZE", "LLAMA_API_KEY"),
)


def spec_of(inherited: dict[str, str] | None = None) -> UnitSpec:
    return unit_spec(
        record=record_of(), launch=LAUNCH, memory_max=5 * MIB, stop_timeout_s=2.5, inherited=inherited or {}
    )


def test_the_unit_carries_its_record_and_the_launch() -> None:
    spec = spec_of()
    assert spec.name == unit_name(CHECKPOINT.name, RUN)
    environment = spec.properties["Environment"]
    assert isinstance(environment, tuple)
    assert read_record(str(item) for item in environment) == record_of()
    assert environment[:2] == ("LD_LIBRARY_PATH=/opt/llama", f"LLAMA_ARG_MODEL={CHECKPOINT.path}")
    assert f"{RUN_VARIABLE}={RUN}" in environment
    assert spec.properties["ExecStart"] == ((LAUNCH.argv[0], LAUNCH.argv, False),)
    assert spec.properties["TimeoutStopUSec"] == 2_500_000
    assert spec.properties["MemoryMax"] == 5 * MIB
    assert spec.properties["Slice"] == "lllm3090.slice"
    assert spec.properties["Restart"] == "no"
    assert spec.properties["SyslogIdentifier"] == identifier(spec.name)


def test_the_oldest_systemd_takes_every_property() -> None:
    encoded = encode(spec_of().properties, OLDEST_SYSTEMD)
    assert encoded.dropped == ()
    assert {name for name, _ in encoded.variants} == set(spec_of().properties)


def test_the_engine_inherits_no_setting_of_ours_and_nothing_is_set_and_unset_at_once() -> None:
    inherited = {
        "PATH": "/bin",
        "LLLM3090_MODELS_DIR": "/m",
        "HF_TOKEN": "hf_secret",
        "OPENAI_API_KEY": "sk-secret",
        RECORD_VARIABLE: "of another unit",
        RUN_VARIABLE: "of another unit",
    }
    properties = spec_of(inherited).properties
    unset, environment = properties["UnsetEnvironment"], properties["Environment"]
    assert isinstance(unset, tuple)
    assert isinstance(environment, tuple)
    assert unset == (
        "HF_TOKEN",
        "LLAMA_API_KEY",
        "LLAMA_ARG_CTX_SIZE",
        "LLLM3090_MODELS_DIR",
        "OPENAI_API_KEY",
    )
    assert "secret" not in str(properties)
    assert {str(item).partition("=")[0] for item in environment}.isdisjoint(unset)


def test_nothing_ties_the_unit_to_the_daemon() -> None:
    tying = {"PartOf", "BindsTo", "Requires", "StopPropagatedFrom", "ConsistsOf", "After", "Upholds"}
    assert tying.isdisjoint(spec_of().properties)


@pytest.mark.parametrize(
    "change",
    [
        {"parallel": 257},
        {"context_tokens": 1 << 31},
        {"batch_tokens": 0},
        {"launch": {"slot_tokens": -5}},
        {"launch": {"line_tokens": -1}},
        {"launch": {"tail_draft_tokens": 1 << 31}},
        {"items": [{"name": "x", "place": "card", "bytes": 1 << 70, "evidence": "header", "formula": ""}]},
    ],
    ids=str,
)
def test_figures_that_no_launch_has_are_no_record(change: dict[str, Any]) -> None:
    """Somebody else may have written it: it must neither block the card nor end the daemon."""
    values = json.loads(record_of().model_dump_json()) | change
    assert read_record([f"{RECORD_VARIABLE}={json.dumps(values)}"]) is None
