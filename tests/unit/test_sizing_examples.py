"""Worked cases of another planner, Quartermaster: what of them holds here, what is replaced and by what.

Every case that a public test of that program asserts is in exactly one of three tables: a check of ours reproduces it,
a rule of ours deliberately replaces it, or nothing here computes such a thing yet. A rule is named by its number in the
list of that program's inconsistencies (I1 to I32), as the table of what is charged ("memory-model 8"), or as that of
growth beside loaded models ("pressure", :mod:`lllm3090d.serving.pressure`).
``pytest -rP -k every_case`` prints the list.
"""

from __future__ import annotations

import gzip
import json
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pytest

from lllm3090d.checkpoints.catalogue import AttentionShape, CatalogueEntry, ModelKind, packaged_catalogue
from lllm3090d.checkpoints.facts import CheckpointFacts, ProjectorFacts, VisionFacts, read_facts
from lllm3090d.checkpoints.projector import ProjectorWeights
from lllm3090d.engines.arguments import launch
from lllm3090d.engines.capabilities import Backend
from lllm3090d.engines.command_line import read_command_line
from lllm3090d.engines.extra_arguments import NOTHING, ExtraArguments, extra_arguments
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.profiles import capacity_profile
from lllm3090d.gpus.readings import Card, CardKind, CardProcess, MemoryReading
from lllm3090d.planning import cache as kv
from lllm3090d.planning import compute, costs, placement
from lllm3090d.planning.cache import CacheShape, CacheType, cache_shape
from lllm3090d.planning.cache_types import has_fast_kernel, resolve_cache_types
from lllm3090d.planning.catalogue_price import (
    PreviewCard,
    load_need_bytes,
    pool_tokens,
    preview,
    startup_need_bytes,
)
from lllm3090d.planning.devices import DeviceRoom, main_device, pooled_free_bytes
from lllm3090d.planning.launch import Launch as EngineLaunch
from lllm3090d.planning.placement import EVERYTHING, Placement
from lllm3090d.planning.planner import Plan, Planner, PlanPolicy, PlanRequest, Room
from lllm3090d.planning.projector import UNKNOWN_GRAPH_BYTES, projector_graph_bytes
from lllm3090d.planning.projector_place import ProjectorTrial, belongs_on_host
from lllm3090d.planning.quote import Evidence, LineItem, Place
from lllm3090d.planning.request import Features
from lllm3090d.planning.reserves import Budget, BudgetLine, ReservePolicy
from lllm3090d.planning.rope import RopeScaling, context_ceiling, rope_factor
from lllm3090d.planning.slots import SlotPlan, SlotPolicy, automatic_slots, requested_slots
from lllm3090d.planning.split import Division
from lllm3090d.planning.split_search import best_excess_bytes, best_shares
from lllm3090d.planning.stretch import stretch
from lllm3090d.planning.units import MIB, PAGE_TOKENS
from lllm3090d.serving.admission import Rooms
from lllm3090d.serving.ledger import Ledger, Share
from lllm3090d.serving.observation import CardState, Observation
from lllm3090d.serving.pressure import (
    SLACK_BYTES,
    Decision,
    ModelOnCard,
    Nothing,
    PressureReading,
    PressureWatch,
    Unload,
)
from lllm3090d.serving.room_table import RoomTable, room_table
from lllm3090d.serving.victims import Victim, fewest_victims
from lllm3090d.settings import PressurePolicy, Settings
from tests.fakes.gguf_files import Tensor, write_gguf
from tests.fakes.model_files import ModelSpec, Sheet, each, write
from tests.unit.engine_truth import POLICY, facts_of
from tests.unit.plans import launch_of
from tests.unit.test_command_line import BUILD, build_named

pytestmark = pytest.mark.unit

EXAMPLES = Path(__file__).parents[1] / "data" / "sizing_examples.json.gz"
GIB = 1 << 30
LLAMA = "llama-3.1-8b"  # 32 layers, 8 KV heads, 128 values: the plain model of the cases
MTP_27B = "qwen3.5-27b-mtp"  # one block for multi-token prediction, 4 KV heads, 256 values

Case = dict[str, Any]
Check = Callable[[Case], None]
CHECKS: dict[str, Check] = {}

# A rule of ours that differs on purpose, and where it is laid down.
REPLACED: Mapping[str, str] = {
    "S032": "I7: types are limited by what computes fast, and a pin that is not is no reason for another type",
    "S061": "I17: context checkpoints lie in host memory, so they shorten no window",
    "S062": "I17: as S061",
    "S063": "I17: as S061; I15: bytes of each layer from the tensor table",
    "S068": "I9: what was asked for is honoured exactly or refused; rounding down is left to the automatic plan",
    "S113": "I21: a sidecar is sized from its own header, cache included",
    "S115": "memory-model 8: a draft's graph is bounded by masks, residuals and its own blocks",
    "S116": "I21: as S113",
    "S117": "I5: missing dimensions refuse",
    "S120": "memory-model 8: as S115",
    "S127": "I15: the output counts as a layer, as it does for the engine: of 65 blocks 60 layers leave 6 behind",
    "S132": "I15: as S127, 65 of 65 blocks leave one in host memory",
    "S133": "I12: there is one placement, and layers of a mixture are placed by hand like those of any model",
    "S142": "I27: a target that is not set is no number",
    "S148": "I30: a plan is made at the start, and its command line is written once",
    "S149": "I30: as S148",
    "S150": "I30: as S148",
    "S151": "I9: a resident plan has the largest window that fits; a window that was asked for is never trimmed",
    "S155": "I29: bytes everywhere, rounding for display only",
    "S156": "I29: as S155",
    "S157": "I29: as S155",
    "S158": "I29: as S155",
    "S159": "I27: what a card can give is read for every plan, no budget is stored",
    "S160": "I27: as S159",
    "S161": "I27: without a reading there is no plan",
    "S171": "I27: free memory plus what our own units hold, no high-water mark",
    "S175": "memory-model 8: the runtime of a process is 640 MiB on CUDA; I25: charged to each card on its own",
    "S177": "I20: the backend is what the binary reports, not what its path contains",
    "S178": "I20: as S177",
    "S179": "I20: as S177",
    "S180": "I20: as S177",
    "S181": "I20: as S177",
    "S182": "I20: as S177",
    "S183": "I20: as S177",
    "S206": "memory-model 8: every price is that of flash attention, so -fa off is refused; the others are handed on",
    "S188": "I5: nothing is loaded without a price, so no resident is of unknown size",
    "S189": "I5: what has no price is refused, whoever runs",
    "S190": "I27: what a card can give is read for every load; without a reading nothing is admitted or unloaded",
    "S193": "I26: a reading that cannot be true is a refusal, not a reason to fall back on a budget",
    "S194": "I28: nobody is unloaded for what would not fit all the same",
    "S197": "I27: what other programs hold now is taken off whole, whatever they held before",
    "S198": "I27: as S197, and the workspace is kept by the price of each launch",
    "S199": "I27: as S197; without a budget of one's own the card's total is the only one",
    "S200": "pressure: 205 MiB are within the slack, where nothing is done; beyond it no reserve is asked for either",
    "S213": "I25: shares are whole layers, which the engine takes exactly, and follow from a ledger for each card",
    "S208": "I17: eight checkpoints, spaced as the engine does, unless the settings say otherwise",
}

# Nothing here computes it yet.
OPEN: Mapping[str, str] = {}


@cache
def cases() -> Mapping[str, Case]:
    return {row["id"]: row for row in json.loads(gzip.decompress(EXAMPLES.read_bytes()))["cases"]}


def asserted() -> set[str]:
    """Asserted by a test of the other program, not marked as superseded, and of any concern here."""
    return {
        name
        for name, row in cases().items()
        if row["basis"] == "test" and "superseded_by" not in row and row.get("scope") != "background"
    }


def checks(*names: str) -> Callable[[Check], Check]:
    """This function reproduces these cases."""

    def register(function: Check) -> Check:
        assert not CHECKS.keys() & set(names)
        CHECKS.update(dict.fromkeys(names, function))
        return function

    return register


# --- models of the cases -----------------------------------------------------------------------------------


def written(spec: ModelSpec) -> CheckpointFacts:
    with tempfile.TemporaryDirectory() as folder:
        return read_facts([write(Path(folder) / "model.gguf", spec)])


@cache
def lfm2_moe() -> CheckpointFacts:
    """LFM2.5-8B-A1B at Q4_K_M. The size of the vocabulary is the one with which the file has its 4.8 GiB."""
    heads = [8 if block in {2, 6, 10, 14, 18, 21} else 0 for block in range(24)]
    keys = {
        "context_length": 128_000,
        "block_count": 24,
        "embedding_length": 2048,
        "feed_forward_length": 7168,
        "attention.head_count": 32,
        "attention.head_count_kv": heads,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "shortconv.l_cache": 3,
        "expert_count": 32,
        "expert_used_count": 4,
        "expert_feed_forward_length": 1792,
        "leading_dense_block_count": 2,
        "expert_gating_func": 2,
    }
    sheet = Sheet(ModelSpec("LFM2.5-8B-A1B", "lfm2moe", 128_000, keys, tied=True))
    width = sheet.width
    sheet.tables("token_embd_norm")
    for block in each(sheet, "attn_norm", "ffn_norm"):
        if heads[block]:
            sheet.attention(block, qk_norm=True)
        else:
            sheet.vectors(block, shortconv__conv=(3, width))
            sheet.matrices(block, shortconv__in_proj=(width, 3 * width), shortconv__out_proj=(width, width))
        if block < 2:
            sheet.dense(block, 7168)
        else:
            sheet.experts(block, 1792, router="bias")
    # As llama-quantize does at Q4_K_M: some rows of V and of what goes down are finer.
    tensors = []
    for name, shape in sheet.shapes.items():
        kind = "F32" if name in sheet.plain else "Q4_K"
        block = int(name.split(".")[1]) if name.startswith("blk.") else 0
        finer = block < 3 or block >= 21 or (block - 3) % 3 == 2
        if name == "token_embd.weight" or (finer and ("attn_v" in name or "ffn_down" in name)):
            kind = "Q6_K"
        tensors.append(Tensor(name, shape, kind))
    metadata: dict[str, Any] = {
        "general.architecture": "lfm2moe",
        "general.name": "LFM2.5-8B-A1B",
        "lfm2moe.vocab_size": 128_000,
        "tokenizer.ggml.model": "none",
        **{f"lfm2moe.{key}": value for key, value in keys.items()},
    }
    with tempfile.TemporaryDirectory() as folder:
        return read_facts([write_gguf(Path(folder) / "model.gguf", metadata, tensors)])


@cache
def qwen_9b() -> CheckpointFacts:
    return written(
        ModelSpec(
            "Qwen3.5-9B",
            "qwen35",
            248_320,
            {
                "context_length": 262_144,
                "block_count": 32,
                "embedding_length": 4096,
                "feed_forward_length": 12_288,
                "attention.head_count": 16,
                "attention.head_count_kv": 4,
                "attention.key_length": 256,
                "attention.value_length": 256,
                "attention.layer_norm_rms_epsilon": 1e-6,
                "rope.dimension_count": 64,
                "rope.dimension_sections": [11, 11, 10, 0],
                "full_attention_interval": 4,
                "ssm.conv_kernel": 4,
                "ssm.state_size": 128,
                "ssm.group_count": 16,
                "ssm.time_step_rank": 32,
                "ssm.inner_size": 4096,
            },
        )
    )


def plain_shape(facts: CheckpointFacts, context: int, slots: int = 1) -> CacheShape:
    return cache_shape(
        facts, context_tokens=context, parallel=slots, batch_tokens=2048, micro_batch_tokens=512
    )


def cache_bytes(context: int, cache_type: CacheType, slots: int = 1) -> int:
    facts = facts_of(LLAMA)
    return kv.kv_cache_bytes(facts, plain_shape(facts, context, slots), cache_type, cache_type)


def entry_with(file_gib: float) -> CatalogueEntry:
    """A model of which only the size counts."""
    return CatalogueEntry(
        id="sized",
        name="Sized",
        repository="nobody/nothing",
        file="model.gguf",
        quantisation="any",
        file_bytes=round(file_gib * GIB),
        kind=ModelKind.DENSE,
        total_parameters_b=1,
        active_parameters_b=1,
        trained_context_tokens=131_072,
        block_count=32,
        full_attention=AttentionShape(layers=32, kv_heads=8, head_length=128),
    )


def gib(number: float | str) -> Fraction:
    """Bytes of a figure in GiB; ``0.6/131072`` is a quotient."""
    parts = [Fraction(part) for part in str(number).split("/")]
    return parts[0] / math.prod(parts[1:], start=Fraction(1)) * GIB


# --- cost of a context -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Kinds:
    full: int
    sliding: int
    recurrent: int


def kinds_of(facts: CheckpointFacts) -> _Kinds:
    names = [layer.kind.value for layer in facts.trunk]
    states = sum(layer.state_values > 0 for layer in facts.trunk)
    return _Kinds(names.count("full"), names.count("sliding"), states)


@checks("S002", "S003", "S004")
def _cost_of_a_token(row: Case) -> None:
    models: Mapping[str, Callable[[], CheckpointFacts]] = {
        "lfm2moe": lfm2_moe,
        "qwen35": qwen_9b,
        "mistral3": ministral,
    }
    facts = models[row["inputs"]["arch"]]()
    expected = row["expected"]
    cost = costs.context_cost(facts, CacheType.Q8_0)
    assert cost.window_bytes_per_token == 0
    slope = cost.bytes_per_token / GIB
    assert slope == pytest.approx(expected["slopeGB"], abs=row["tolerance"]["slopeGB"])
    assert kinds_of(facts) == _Kinds(
        expected["globalLayers"], expected["localLayers"], expected["ssmLayers"]
    )
    states = costs.state_bytes_per_slot(facts)
    if row["id"] == "S003":
        # I2: with the group term, as the engine has it; without, the figure of the case is left.
        groups = 24 * 3 * 2 * 16 * 128 * 4
        assert states == 50.25 * MIB
        assert (states - groups) / GIB == pytest.approx(expected["constGB"], abs=row["tolerance"]["constGB"])
    elif row["id"] == "S004":
        assert states == 0
    else:
        # Short convolutions keep the last values of each channel: 18 x 2 x 2048 f32, below the case's rounding.
        assert states == 18 * 2 * 2048 * 4
        assert states / GIB == pytest.approx(expected["constGB"], abs=3e-4)


def ministral() -> CheckpointFacts:
    keys = {
        "context_length": 262_144,
        "block_count": 40,
        "embedding_length": 5120,
        "feed_forward_length": 16_384,
        "attention.head_count": 32,
        "attention.head_count_kv": 8,
        "attention.key_length": 128,
        "attention.value_length": 128,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": 128,
    }
    return written(ModelSpec("Ministral-3-14B", "mistral3", 131_072, keys))


@checks("S011")
def _a_pinned_window_is_priced_exactly(row: Case) -> None:
    cost = costs.context_cost(facts_of(LLAMA), CacheType.Q8_0)
    assert cost.bytes_per_token * row["inputs"]["ctx"] / GIB == row["expected"]
    assert cost.bytes_per_token / GIB == row["inputs"]["slopeGB"]


@checks("S012")
def _room_is_rounded_down(row: Case) -> None:
    assert pool_tokens(row["inputs"]["ctx"], Fraction(1)) == row["expected"]


@checks("S070", "S071")
def _two_slots(row: Case) -> None:
    one = cache_bytes(8192, CacheType.F16)
    assert one == GIB
    if row["id"] == "S070":
        assert cache_bytes(2 * 8192, CacheType.F16, 2) == 2 * one
    else:
        shape = plain_shape(facts_of(LLAMA), 8192, 2)
        assert shape.window_tokens == row["expected"]["ctx"]
        assert cache_bytes(8192, CacheType.F16, 2) == one


@checks("S069")
def _an_exact_window_is_lighter_than_a_rounded_one_of_another_type(row: Case) -> None:
    asked = row["expected"]["ctx"]
    assert plain_shape(facts_of(LLAMA), asked).context_tokens - asked < kv.CELL_PADDING_TOKENS
    assert cache_bytes(asked, CacheType.Q8_0) < cache_bytes(4096, CacheType.F16)
    assert cache_bytes(asked, CacheType.Q8_0) / GIB == pytest.approx(
        row["expected"]["kvReserveGB"], rel=256 / asked
    )


# --- types of the cache ------------------------------------------------------------------------------------


@checks("S024")
def _the_default_type(row: Case) -> None:
    assert Settings().cache_type == row["expected"]


@checks("S025")
def _a_pin_wins(row: Case) -> None:
    pinned = CacheType(row["inputs"]["KvQuant"])
    assert Settings(cache_type=pinned).cache_type == row["expected"]
    kv.check_cache_types(facts_of(LLAMA), pinned, pinned)


@checks("S027", "S028", "S029", "S030")
def _one_side_mirrors_the_other(row: Case) -> None:
    given = row["inputs"]
    sides = [CacheType(given[key]) if given[key] else None for key in ("k", "v")]
    assert [*resolve_cache_types(sides[0], sides[1], CacheType(given["defK"]))] == row["expected"]


@checks("S034")
def _pairs_without_a_fast_kernel(row: Case) -> None:
    known = set(CacheType)
    for type_k, type_v in row["inputs"]["pairs"]:
        usable = {type_k, type_v} <= known and has_fast_kernel(CacheType(type_k), CacheType(type_v))
        assert usable is row["expected"]


# --- the largest window ------------------------------------------------------------------------------------


@checks("S015", "S016", "S017")
def _a_ceiling_and_what_fits(row: Case) -> None:
    given = row["inputs"]
    ladder = given["Ladder"] if isinstance(given["Ladder"], list) else []
    limit = min([given["ModelMax"], *ladder[:1]])  # I10: one ceiling
    spare = gib(given["TargetVramGB"] - given["FileSizeGB"] - given["Overhead"]) - gib(given["KvConstGB"])
    pool = pool_tokens(int(spare), gib(given["PerTokGB"]))
    found = requested_slots(1, lambda n: min(limit, pool // n), limit)
    assert found.window_tokens == row["expected"]["ctx"]
    assert found.is_limited_by_model


@checks("S022")
def _the_whole_card_is_used(row: Case) -> None:
    entry = packaged_catalogue().find("gemma-4-12b-qat")
    assert entry is not None
    mib = int(row["inputs"]["TargetVramGB"] * 1024)
    card = PreviewCard(capacity_profile(mib), Backend.CUDA, desktop_active=False)
    found = preview(entry, card, SlotPolicy.BALANCED, parallel=1)
    assert found.slots.window_tokens == row["expected"]["ctx"]


@checks("S064", "S065")
def _slots_share_what_there_is(row: Case) -> None:
    given = row["inputs"]
    slots = given["slots"]
    each = gib(given["perTokGB"]) / slots  # the case counts a token of all slots
    spare = gib(given["Target"] - given["FileSizeGB"] - given["Overhead"])
    pool, limit = pool_tokens(int(spare), each), given["modelMax"]

    def plan_of(count: int) -> SlotPlan:
        return requested_slots(count, lambda n: min(limit, pool // n // PAGE_TOKENS * PAGE_TOKENS), limit)

    found = plan_of(slots)
    if slots == 1:
        assert found.window_tokens == row["expected"]["ctx"]
        return
    assert row["expected"]["ctx"] <= found.window_tokens < plan_of(1).window_tokens
    assert found.total_tokens * each + given["FileSizeGB"] * GIB < given["Target"] * GIB


@checks("S035", "S036")
def _what_fits_whole(row: Case) -> None:
    given, expected = row["inputs"], row["expected"]
    overhead = round(given["CudaOverheadGB"] * 1024)
    card = PreviewCard(
        capacity_profile(round(given["TargetVramGB"] * 1024)),
        Backend.VULKAN,
        driver_reserve_mib=0,
        desktop_active=False,
        workspace_reserve_mib=overhead,
    )
    reserve = round(given["KvCacheReserveGB"] * GIB)
    need = startup_need_bytes(entry_with(given["FileSizeGB"]), card, 0, 1, reserve)
    assert need / GIB == pytest.approx(expected["estVramGB"], abs=row["tolerance"]["estVramGB"])
    assert need <= card.grantable_bytes


@checks("S066", "S067")
def _nothing_is_lost_between_card_and_host(row: Case) -> None:
    facts = facts_of(LLAMA)
    shape = plain_shape(facts, row["inputs"]["Ctx"])
    types = (CacheType(row["inputs"]["KvK"]), CacheType(row["inputs"]["KvV"]))

    def split(where: Placement) -> tuple[int, int]:
        weights = placement.weights(facts, where, Backend.CUDA)
        context = placement.context(facts, where, Backend.CUDA, shape, types)
        return weights.card + context.card, weights.host + context.host

    everything = split(EVERYTHING)
    # Everything but the table of embeddings, which is always in host memory.
    assert everything[1] == facts.token_embedding_bytes
    offloaded = row["inputs"].get("CpuOffload")
    if offloaded is None:
        assert row["expected"]["estRamGB"] == 0
        return
    some = split(Placement(layers_on_card=len(facts.layers) + 1 - offloaded))
    assert some[0] < everything[0]
    assert sum(some) / GIB == pytest.approx(sum(everything) / GIB, abs=row["tolerance"]["sum"])


@checks("S046")
def _share_of_the_experts(row: Case) -> None:
    facts = lfm2_moe()
    assert facts.file_bytes / GIB == pytest.approx(4.801, rel=0.003)
    share = costs.weights_by_place(facts)["experts"] / facts.weight_bytes
    assert share == pytest.approx(row["expected"], abs=row["tolerance"])


# --- stretched positions -----------------------------------------------------------------------------------


@checks("S072", "S073", "S074", "S075", "S076", "S077", "S078", "S079", "S080")
def _ceilings(row: Case) -> None:
    given, expected = row["inputs"], row["expected"]
    scaling = RopeScaling(given.get("scaling", given.get("RopeScaling")) or "none")
    asked = given.get("ctx", given.get("Ctx"))
    ceiling = context_ceiling(given["context_length"], scaling, asked)
    assert ceiling == (
        expected if isinstance(expected, int) else expected.get("ctx", expected.get("ctx_max"))
    )


@checks("S081", "S082", "S083", "S084", "S085")
def _factors(row: Case) -> None:
    assert rope_factor(row["inputs"]["context_length"], row["inputs"]["ctx"]) == row["expected"]


# --- projectors --------------------------------------------------------------------------------------------


def encoder(given: Case) -> ProjectorFacts:
    vision = VisionFacts(
        image_size=given.get("image_size", 0),
        patch_size=given.get("patch_size", 0),
        embedding_length=given.get("embd", 0),
        feed_forward_length=given.get("ffn", 0),
        head_count=given.get("heads", 0),
    )
    return ProjectorFacts("any", 0, ProjectorWeights(), vision, hears=False, file_bytes=0)


@checks("S094", "S095", "S096")
def _graph_of_an_encoder(row: Case) -> None:
    size, expected = projector_graph_bytes(encoder(row["inputs"])), row["expected"]
    if expected == 0:
        assert size == UNKNOWN_GRAPH_BYTES == GIB  # the flat reserve applies
        return
    assert size / GIB == pytest.approx(expected["exact"], abs=1e-5)
    if "range" in expected:
        assert expected["range"][0] <= size / GIB <= expected["range"][1]
    else:
        coarse = projector_graph_bytes(encoder(row["inputs"] | {"patch_size": 16}))
        assert size >= expected["min_ratio"] * coarse


@checks("S098", "S099", "S100", "S101", "S102")
def _what_a_projector_displaces(row: Case) -> None:
    given = row["inputs"]

    def trial(plan: Case, window: int) -> ProjectorTrial:
        return ProjectorTrial(max(0, 65 - plan["ngl"]), plan.get("nCpuMoe", 0), window)

    on_card, on_host = trial(given["gpuPlan"], given["gpuCtx"]), trial(given["cpuPlan"], given["cpuCtx"])
    assert belongs_on_host(on_card, on_host) is row["expected"]


# --- drafts ------------------------------------------------------------------------------------------------


def draft_bytes(context: int, cache_type: CacheType) -> int:
    facts = facts_of(MTP_27B)
    return kv.draft_context_bytes(facts, plain_shape(facts, context), cache_type, cache_type)


@checks("S109", "S110", "S111")
def _a_draft_has_a_cache_of_its_own(row: Case) -> None:
    expected = row["expected"]
    if row["id"] == "S109":
        assert draft_bytes(1024, CacheType.F16) == 1024 * expected["bytesPerToken"]
    elif row["id"] == "S110":
        ratio = draft_bytes(1024, CacheType.Q8_0) / draft_bytes(1024, CacheType.F16)
        assert ratio == expected["ratioToF16"]
    else:
        size = draft_bytes(row["inputs"]["ctx"], CacheType.F16) / GIB
        assert size == pytest.approx(expected, abs=row["tolerance"])


@checks("S112", "S114")
def _without_a_head_nothing_is_drafted(row: Case) -> None:
    facts = facts_of(LLAMA)
    assert facts.mtp_layers == ()
    with pytest.raises(LlmError) as caught:
        kv.draft_context_bytes(facts, plain_shape(facts, 4096), CacheType.F16, CacheType.F16)
    assert caught.value.code is ErrorCode.UNSUPPORTED_COMBINATION
    # And one that nobody asks to draft pays nothing for its head.
    with_head = facts_of(MTP_27B)
    context = placement.context(
        with_head, EVERYTHING, Backend.CUDA, plain_shape(with_head, 4096), (CacheType.F16, CacheType.F16)
    )
    trunk = kv.context_bytes(with_head, plain_shape(with_head, 4096), CacheType.F16, CacheType.F16)
    assert context.card - trunk == row["expected"]


@checks("S118", "S119")
def _a_second_context_and_what_it_caches(row: Case) -> None:
    if row["id"] == "S118":
        found = compute.SECOND_CONTEXT_BYTES + draft_bytes(row["inputs"]["ctx"], CacheType.Q8_0)
    else:
        found = draft_bytes(131_072, CacheType.Q8_0) - draft_bytes(32_768, CacheType.Q8_0)
    assert found / GIB == pytest.approx(row["expected"], abs=0.0005)


# --- cards -------------------------------------------------------------------------------------------------


@checks("S140", "S141")
def _the_smaller_of_target_and_free(row: Case) -> None:
    given = row["inputs"]
    sides = [(BudgetLine("all", int(given[key] * GIB), "case"),) for key in ("TargetVramGB", "freeGB")]
    assert Budget(lines=sides[0], live_lines=sides[1]).grantable_bytes == int(row["expected"] * GIB)


@checks("S167", "S168", "S169", "S170")
def _free_memory_of_all_cards(row: Case) -> None:
    rooms = [
        DeviceRoom(gpu["totalMB"] * MIB, (gpu["totalMB"] - gpu["usedMB"]) * MIB)
        for gpu in row["inputs"]["gpus"]
    ]
    assert pooled_free_bytes(rooms) == row["expected"] * GIB


FINE_LAYERS = 10_000  # so many that a share of them is exact to two decimals


@dataclass(frozen=True)
class _Even(Division):
    """A model of equal layers, beside which only the main card, the last one, takes anything: as the cases have it."""

    layer_bytes: int = 0
    main_bytes: int = 0

    @cached_property
    def layers(self) -> int:
        return FINE_LAYERS

    @cached_property
    def last_cut(self) -> int:
        return FINE_LAYERS - 1

    def need_bytes(self, begin: int, end: int) -> int:
        return (end - begin) * self.layer_bytes + (self.main_bytes if end == FINE_LAYERS else 0)


@checks("S172", "S173", "S174", "S176")
def _shares_of_several_cards(row: Case) -> None:
    """Of the largest model that fits: no card has anything left, so each has the share of what it could give."""
    given, expected = row["inputs"], row["expected"]
    free = [int(size * GIB) for size in given.get("free", given.get("liveFree"))]
    main_bytes = int(given.get("mainFixedGB", given.get("fixedGB")) * GIB)
    assert main_device(free) == len(free) - 1
    room = sum(free[:-1]) + max(0, free[-1] - main_bytes)
    even = _Even(
        facts_of(LLAMA),
        launch_of(32_768),
        Backend.CUDA,
        POLICY,
        layer_bytes=room // FINE_LAYERS,
        main_bytes=main_bytes,
    )
    if expected is None:
        assert best_excess_bytes(even, free) > 0
        return
    assert best_excess_bytes(even, free) <= even.layer_bytes  # the output is never parted from the main card
    shares = best_shares(even, free)
    assert sum(shares) == FINE_LAYERS
    if row["id"] == "S176":
        assert main_device(free) == expected["mainGpu"]
        expected = [float(share) for share in expected["split"].split(",")]
    assert [round(share / FINE_LAYERS, 2) for share in shares] == expected


# --- who goes ----------------------------------------------------------------------------------------------


CARD = Card(CardKind.NVIDIA, "GPU-0", "a card", "580.0")


def table_of(
    total_gib: float, residents: Mapping[str, float], *, foreign_gib: float = 0, taken: bool = True
) -> RoomTable:
    """What a card can give beside these models, by the arithmetic of admission; without a desktop and a driver."""
    ledger, held = Ledger(), {name: int(size * GIB) for name, size in residents.items() if taken}
    for name, size in residents.items():
        item = LineItem("weights", Place.CARD, int(size * GIB), Evidence.HEADER, "case")
        ledger.hold(name, name, [Share(CARD.uuid, (item,))])
        ledger.confirm(name, {})
    total, used = int(total_gib * GIB), sum(held.values()) + int(foreign_gib * GIB)
    reading = MemoryReading(
        0.0, total, 0, used, total - used, tuple(CardProcess(1, size) for size in held.values())
    )
    observation = Observation((CardState(CARD, reading, resident=held, in_use=held),), False)
    return room_table(observation, ledger, ReservePolicy(0, 0))


def evicted(row: Case, *, foreign_gib: float = 0, taken: bool = True) -> list[str]:
    """Who goes for the target; nobody is asked about where it fits as it is."""
    given = row["inputs"]
    names, pinned = given.get("running", given.get("running_lru_first")), given.get("persistent", [])
    residents = {name: given["est"][name] for name in names}
    need = int(given["est"][given["target"]] * GIB)

    table = table_of(given["budget"], residents, foreign_gib=foreign_gib, taken=taken)
    if table.now[0] >= need:
        return []
    victims = [
        Victim(name, name, float(index), int(residents[name] * GIB))
        for index, name in enumerate(names)
        if name not in pinned
    ]
    return [each.name for each in fewest_victims(victims, table, lambda point: point[0] >= need)]


@checks("S184", "S185", "S187")
def _evictions(row: Case) -> None:
    assert evicted(row) == row["expected"]


@checks("S191")
def _evictions_beside_other_programs(row: Case) -> None:
    """The ceiling is what others leave of the card; the promises to residents and theirs exceed it together."""
    given = row["inputs"]
    assert evicted(row, foreign_gib=given["budget"] - given["ceiling"], taken=False) == row["expected"]


@checks("S192")
def _free_memory_loosens_no_promise(row: Case) -> None:
    """All of the card is free, for what was promised is not taken yet."""
    assert len(evicted(row, taken=False)) == row["expected"]["evicted"]


@checks("S195", "S196")
def _least_recently_used_first(row: Case) -> None:
    """Who was never used counts as used when it became ready, here before all use."""
    given = row["inputs"]
    last = {name: float(when) for when, name in enumerate(given["served"], start=1)}
    victims = [Victim(name, name, last.get(name, 0.0), GIB) for name in given["ready"]]
    table = RoomTable(
        (CARD.uuid,), Rooms({}, None), (0,) * 4, {name: (1, 1, 0, 0) for name in given["ready"]}
    )
    chosen = fewest_victims(victims, table, lambda point: point[0] == len(victims))
    assert [each.name for each in chosen] == row["expected"]


def pressed(models: Sequence[ModelOnCard], *, growth_gib: float, free_gib: float) -> Decision:
    """What is decided once other programs have grown by so much for the time of grace."""
    watch, grace_s = PressureWatch(), 30.0
    decision: Decision = Nothing()
    for now_s, foreign, free in (
        (0.0, 0, free_gib + growth_gib),
        (1.0, growth_gib, free_gib),
        (1.0 + grace_s, growth_gib, free_gib),
    ):
        reading = PressureReading(now_s, CARD.uuid, int(foreign * GIB), int(free * GIB), 0, tuple(models))
        decision = watch.look(reading, PressurePolicy.YIELD, grace_s)
    return decision


@checks("S201", "S202", "S203")
def _who_makes_room_for_others(row: Case) -> None:
    """Models that held all of the card but for what others take now."""
    given, expected = row["inputs"], row["expected"]
    starting, busy = given.get("starting", ()), given.get("inflight", {})
    models = [
        ModelOnCard(
            name,
            name,
            int(size * GIB),
            0 if name in starting else int(size * GIB),
            idle=name not in busy,
            starting=name in starting,
        )
        for name, size in given["est"].items()
    ]
    total = sum(given["est"].values())
    still_to_come = sum(size for name, size in given["est"].items() if name in starting)
    # Free is only what a loading model has been promised and has not taken, less what others took of it.
    growth = 1 if starting else total - given["ceiling"]
    decision = pressed(models, growth_gib=growth, free_gib=max(0, still_to_come - growth))
    assert isinstance(decision, Unload)
    if isinstance(expected, dict):
        assert total == expected["total"]
        expected = expected["victims"]
    assert list(decision.runs) == expected


@checks("S204", "S205")
def _growth_within_the_slack(row: Case) -> None:
    given = row["inputs"]
    assert given["slackGB"] * GIB == SLACK_BYTES
    model = ModelOnCard("m", "m", int(given["resident"] * GIB), int(given["resident"] * GIB), idle=True)
    decision = pressed([model], growth_gib=given["resident"] - given["shedCeiling"], free_gib=0)
    assert isinstance(decision, Unload) is (row["expected"] == "armed")
    assert isinstance(decision, Unload | Nothing)


# --- command lines -----------------------------------------------------------------------------------------


def blocks_of(number: int) -> CheckpointFacts:
    """A plain model with so many blocks."""
    facts = facts_of(LLAMA)
    return replace(facts, layers=facts.layers[:1] * number)


def words_of(row: Case) -> list[str]:
    given = row["inputs"]
    text = given.get("cmd", given.get("args"))
    return [word for word in text.split() if word not in {"llama-server", "/"}]


def read_back(row: Case, facts: CheckpointFacts) -> EngineLaunch:
    return read_command_line(words_of(row), build_named("b11434"), facts).launch


def asked_by(row: Case, facts: CheckpointFacts) -> ExtraArguments:
    return extra_arguments(words_of(row), build_named("b11434"), facts)


def argv_of(plan: Plan, extra: ExtraArguments = NOTHING) -> str:
    line = launch(
        BUILD, build_named("b11434"), Path("/m.gguf"), plan, Path("/e.sock"), "x", extra=extra, inherited={}
    )
    return " ".join(line.argv)


@checks("S128", "S129", "S130")
def _what_was_left_behind(row: Case) -> None:
    facts, expected = blocks_of(row["inputs"].get("block_count", 65)), row["expected"]
    layers = read_back(row, facts).layers
    assert layers.layers_on_card is None
    assert layers.expert_layers_on_host == expected["n"]
    request = asked_by(row, facts).request
    assert request.places_by_hand is expected["ok"]


@checks("S131", "S134", "S135", "S136")
def _arguments_that_pin(row: Case) -> None:
    facts = blocks_of(row["inputs"].get("block_count", 65))
    found, expected = asked_by(row, facts), row["expected"]
    request = found.request
    if row["id"] == "S131":
        assert request.context_tokens is not None and request.parallel is not None
        assert request.context_tokens // request.parallel == expected["ctx"]
        # I15: the output counts as a layer, so one block more stays behind than that program counts.
        assert len(facts.layers) + 1 - (request.gpu_layers or 0) == expected["cpuOffload"] + 1
        assert request.micro_batch_tokens == expected["ub"]
        assert (found.context_checkpoints, found.checkpoint_min_step_tokens) == (
            expected["ctxCheckpoints"],
            expected["minStep"],
        )
    elif row["id"] == "S134":
        assert (request.cpu_experts, request.places_by_hand) == (0, True)
    elif row["id"] == "S135":
        assert (request.context_tokens, request.cache_type_k) == (expected["ctx"], expected["kvK"])
    else:
        assert request == PlanRequest()


@checks("S137", "S138", "S139", "S152")
def _a_foreign_command_line(row: Case) -> None:
    found, expected = read_back(row, facts_of(LLAMA)), row["expected"]
    if row["id"] == "S137":
        assert found.context_checkpoints == expected["ctxCheckpoints"]
        assert found.checkpoint_min_step_tokens == expected["checkpointMinStep"]
        assert found.layers.cache_on_host is expected["kvInRam"]
    elif row["id"] == "S152":
        assert found.parallel == expected
    else:
        assert found.parallel == expected["parallel"]
        assert found.shape(facts_of(LLAMA)).window_tokens == expected["ctx"]


def plan_for_card(
    model: str, request: PlanRequest, policy: PlanPolicy = POLICY, backend: Backend = Backend.CUDA
) -> Plan:
    return Planner(
        facts_of(model), request, policy, Features(backend), CardKind.NVIDIA, Room(1 << 50), None
    ).plan()


@checks("S207", "S209", "S210", "S211", "S212", "S214")
def _what_is_emitted(row: Case) -> None:
    given, expected = row["inputs"], row["expected"]
    if row["id"] == "S207":
        slots = given["parallel"]
        plan = plan_for_card(LLAMA, PlanRequest(context_tokens=given["ctxPerSlot"] * slots, parallel=slots))
        text = argv_of(plan)
    elif row["id"] == "S209":
        extra = extra_arguments(
            ["--ctx-checkpoints", "0", "--reasoning-format", "none", "--reasoning", "off"],
            build_named("b11434"),
            facts_of(LLAMA),
        )
        text = argv_of(plan_for_card(LLAMA, PlanRequest(), extra.policy(POLICY)), extra)
    elif row["id"] in {"S210", "S211"}:
        experts = given["nCpuMoe"]
        text = argv_of(plan_for_card("qwen3-30b-a3b", PlanRequest(cpu_experts=experts or None)))
        assert ("--load-mode" in text) is (experts == 0)
        if experts:
            return
    elif row["id"] == "S212":
        # On CUDA f16 is cheaper for a short draft's context, as q8_0 is converted; on Vulkan it is not.
        asked = PlanRequest(draft_tokens=2, cache_type_k=CacheType.Q8_0)
        text = argv_of(plan_for_card(MTP_27B, asked, backend=Backend.VULKAN))
    else:
        trained = replace(facts_of(LLAMA), trained_context_tokens=given["context_length"])
        stretched = stretch(trained, RopeScaling(given["ropeScaling"]), given["ctx"])
        assert stretched is not None
        text = argv_of(replace(plan_for_card(LLAMA, PlanRequest()), rope=stretched))
    for words in expected:
        assert words in text


# --- the list ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(CHECKS))
def test_reproduced(name: str) -> None:
    CHECKS[name](cases()[name])


def test_every_case_is_reproduced_or_replaced() -> None:
    assert not OPEN
    tables = [set(CHECKS), set(REPLACED), set(OPEN)]
    assert set().union(*tables) == asserted()
    assert sum(map(len, tables)) == len(asserted())  # each in one table only
    for name, reason in {**REPLACED, **OPEN}.items():
        print(name, cases()[name]["function"], "-", reason)  # noqa: T201  # shown by -rA: the list is the point
    reasons = [text.split(":")[0] for text in REPLACED.values()]
    assert all(
        reason in {"memory-model 8", "pressure"} or 1 <= int(reason.removeprefix("I")) <= 32
        for reason in reasons
    )


def test_the_others_are_superseded_derived_or_of_no_concern() -> None:
    """None is left out for another reason."""
    others = {name: row for name, row in cases().items() if name not in asserted()}
    assert len(cases()) == 214
    assert len(asserted()) + len(others) == 214
    for name, row in others.items():
        assert row.get("superseded_by") or row["basis"] == "derived" or row.get("scope") == "background", (
            name
        )


@pytest.mark.parametrize("name", ["S005", "S006", "S009", "S010", "S014"])
def test_derived_ones_that_cost_nothing_to_check(name: str) -> None:
    row = cases()[name]
    given, expected = row["inputs"], row["expected"]
    if row["function"] == "GetKvCostModel":
        cost = costs.context_cost(facts_of(LLAMA), CacheType(given["kvK"]))
        assert cost.bytes_per_token / GIB == expected["slopeGB"]
    elif row["function"] == "MaxCtxForBudget":
        spare = gib(given["budgetGB"]) - gib(given["constGB"])
        assert pool_tokens(int(spare), gib(given["slopeGB"])) == expected
    else:
        # Pages are of 1024 tokens here, so no more is lost than has to be.
        assert 0 <= pool_tokens(given["ctx"], Fraction(1)) - expected < 4096


def test_a_balanced_plan_agrees_where_one_conversation_is_the_question() -> None:
    """The other program has one slot unless asked; ``--parallel 1`` is the same question here."""
    window = automatic_slots(
        SlotPolicy.BALANCED, lambda n: 100_000 // n // PAGE_TOKENS * PAGE_TOKENS, 131_072
    )
    assert window.slots == 1
    assert load_need_bytes(entry_with(4), Backend.VULKAN, 0, 1) == 4 * GIB
