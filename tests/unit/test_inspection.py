"""What is told of a file: kinds, badges, bytes by place, price of the context, and the reason where none is known."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from gguf import GGUFEndian, GGUFWriter
from pydantic import ValidationError

from lllm3090d.checkpoints.badges import Badge, model_badges, projector_badges
from lllm3090d.checkpoints.classify import DraftMethod, Kind
from lllm3090d.checkpoints.header import read_header
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.planning.cache import CacheType, cache_shape, kv_cache_bytes, state_bytes
from lllm3090d.planning.costs import context_cost, state_bytes_per_slot, unpriced, weights_by_place
from lllm3090d.serving.inspection import inspect, listed
from lllm3090d.serving.lookup import Lookup
from lllm3090d.serving.unplanned import unplanned
from lllm3090d.settings import Settings
from lllm3090d.wire import InspectBody, InspectView, ModelView, ProjectorView, RopeView
from tests.fakes.gguf_files import (
    Tensor,
    model_metadata,
    model_tensors,
    write_gemma3,
    write_gguf,
    write_llama,
    write_projector,
    write_split,
)
from tests.fakes.model_files import published, write
from tests.unit.engine_truth import facts_of

pytestmark = pytest.mark.unit

MODELS = sorted(published())


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    (tmp_path / "models").mkdir()
    return Settings(models_dir=tmp_path / "models", state_dir=tmp_path / "state")


@pytest.fixture
def lookup(settings: Settings) -> Iterator[Lookup]:
    lookup = Lookup(lambda: settings)
    yield lookup
    asyncio.run(lookup.close())


def by_path(lookup: Lookup, path: Path) -> InspectView:
    return inspect(lookup, InspectBody(path=str(path)))


def by_uri(lookup: Lookup, uri: str) -> InspectView:
    return inspect(lookup, InspectBody(path=uri))


def listing(lookup: Lookup, settings: Settings) -> dict[str, ModelView]:
    views = [listed(lookup, settings, checkpoint, None) for checkpoint in lookup.library().scan()]
    return {view.name: view for view in views}


# --- costs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_weights_by_place_are_all_weights(model: str) -> None:
    facts = facts_of(model)
    places = weights_by_place(facts)
    assert sum(places.values()) == facts.weight_bytes
    assert (places["experts"] > 0) == (facts.expert_count > 0)
    assert (places["mtp"] > 0) == bool(facts.mtp_layers)
    assert (places["recurrent"] > 0) == facts.keeps_state


@pytest.mark.parametrize("cache_type", [CacheType.Q8_0, CacheType.F16])
@pytest.mark.parametrize("model", MODELS)
def test_the_price_of_a_token_is_what_the_cache_grows_by(model: str, cache_type: CacheType) -> None:
    """Far beyond every window, where sliding layers no longer grow."""
    facts = facts_of(model)
    try:
        cost = context_cost(facts, cache_type)
    except LlmError as error:
        assert error.code is ErrorCode.UNSUPPORTED_COMBINATION
        return
    small, large = (
        cache_shape(facts, context_tokens=tokens, parallel=1, batch_tokens=512, micro_batch_tokens=512)
        for tokens in (65536, 131072)
    )
    grown = kv_cache_bytes(facts, large, cache_type, cache_type) - kv_cache_bytes(
        facts, small, cache_type, cache_type
    )
    assert grown == 65536 * cost.bytes_per_token
    rest = kv_cache_bytes(facts, small, cache_type, cache_type) - 65536 * cost.bytes_per_token
    assert rest == small.sliding_cells * cost.window_bytes_per_token
    assert (cost.window_bytes_per_token > 0) == (facts.sliding_window_tokens > 0)


@pytest.mark.parametrize("model", MODELS)
def test_the_state_of_a_slot_is_a_share_of_all_states(model: str) -> None:
    facts = facts_of(model)
    eight = cache_shape(facts, context_tokens=8192, parallel=8, batch_tokens=512, micro_batch_tokens=512)
    assert state_bytes(facts, eight) == 8 * state_bytes_per_slot(facts)
    assert (state_bytes_per_slot(facts) > 0) == facts.keeps_state


def test_encoders_without_a_formula_cannot_be_planned() -> None:
    encoder = facts_of("bge-large-en")
    error = unpriced(replace(encoder, architecture="modern-bert"))
    assert error is not None
    assert error.code is ErrorCode.UNSUPPORTED_ARCHITECTURE
    assert unpriced(encoder) is None
    assert unpriced(facts_of("llama-3.1-8b")) is None


# --- badges ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "badges"),
    [
        ("llama-3.1-8b", ("dense",)),
        ("gpt-oss-20b", ("moe",)),
        ("qwen3.5-27b-mtp", ("dense", "mtp")),
        ("qwen3.5-35b-a3b-mtp", ("moe", "mtp")),
    ],
)
def test_badges_of_models(model: str, badges: tuple[str, ...]) -> None:
    assert model_badges(facts_of(model)) == tuple(map(Badge, badges))


@pytest.mark.parametrize(
    ("keys", "badges"),
    [
        ({}, (Badge.VISION,)),
        ({"clip.has_vision_encoder": True}, (Badge.VISION,)),
        ({"clip.has_audio_encoder": True}, (Badge.AUDIO,)),
        ({"clip.has_vision_encoder": False, "clip.has_audio_encoder": True}, (Badge.AUDIO,)),
        ({"clip.has_vision_encoder": True, "clip.has_audio_encoder": True}, (Badge.VISION, Badge.AUDIO)),
    ],
)
def test_badges_of_projectors(tmp_path: Path, keys: dict[str, bool], badges: tuple[Badge, ...]) -> None:
    path = write_gguf(tmp_path / "p.gguf", {"general.architecture": "clip", **keys}, [Tensor("v.x", (32,))])
    assert projector_badges(read_header(path)) == badges


# --- one file ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "kinds"),
    [
        ("qwen3.5-35b-a3b-mtp", {"recurrent", "full"}),
        ("deepseek-v2-lite", {"latent"}),
        ("gpt-oss-20b", {"sliding", "full"}),
        ("gemma-3n-e4b", {"sliding", "full", "shared"}),
        ("nemotron-nano-9b-v2", {"recurrent", "full", "none"}),
    ],
)
def test_a_file_of_every_kind(tmp_path: Path, lookup: Lookup, model: str, kinds: set[str]) -> None:
    """Outside the library: a file needs no model's name."""
    facts = facts_of(model)
    view = by_path(lookup, write(tmp_path / "elsewhere" / "m.gguf", published()[model]))
    assert view.problem is None
    assert view.name is None
    assert view.kind is Kind.MODEL
    assert view.title == model
    assert {str(layer.kind) for layer in view.layers} == kinds
    assert len(view.layers) == view.block_count == len(facts.layers)
    assert sum(weight.bytes for weight in view.weights) == view.weight_bytes == facts.weight_bytes
    assert [cost.cache_type for cost in view.context_costs] == [CacheType.Q8_0, CacheType.F16]
    assert view.context_costs[1].bytes_per_token == context_cost(facts, CacheType.F16).bytes_per_token
    assert view.state_bytes_per_slot == state_bytes_per_slot(facts)
    assert view.output_tied is facts.output_is_tied


def test_heads_of_layers_are_those_of_the_file(lookup: Lookup, tmp_path: Path) -> None:
    view = by_path(lookup, write(tmp_path / "m.gguf", published()["llama-3.1-8b"]))
    layer = view.layers[0]
    assert (layer.head_count, layer.kv_head_count, layer.key_length, layer.value_length) == (32, 8, 128, 128)


def test_an_encoder_has_facts_and_no_cost_of_context(lookup: Lookup, settings: Settings) -> None:
    write(settings.models_dir / "bge" / "m.gguf", published()["bge-large-en"])
    view = inspect(lookup, InspectBody(model="bge"))
    assert (view.kind, view.context_costs, len(view.layers)) == (Kind.EMBEDDING, (), 24)
    assert view.problem is None
    row = listing(lookup, settings)["bge"]
    assert row.architecture == "bert"
    assert row.kv_bytes_per_token is None
    assert row.problem is None


def test_an_encoder_without_a_formula_has_a_reason() -> None:
    path = Path("/models/m.gguf")
    error = unplanned(path, Kind.EMBEDDING, replace(facts_of("bge-large-en"), architecture="modern-bert"))
    assert error is not None and error.hint is not None
    assert "m.gguf is an embedding model, which turns text into vectors" in error.message
    assert "does not run it: it cannot tell beforehand" in error.message
    assert f"llama-server --embeddings -m {path} " in error.hint


def test_an_unknown_architecture_shows_its_header(lookup: Lookup, tmp_path: Path) -> None:
    keys = {
        "general.architecture": "spiral",
        "general.name": "Spiral",
        "spiral.context_length": 4096,
        "spiral.block_count": 7,
        "spiral.embedding_length": 64,
    }
    path = write_gguf(tmp_path / "m.gguf", keys, [Tensor("token_embd.weight", (64, 100), "F16")])
    view = by_path(lookup, path)
    assert view.problem is None
    assert view.dry_run_reason == "no rule says how the engine keeps its context"
    assert (view.architecture, view.title, view.trained_context_tokens) == ("spiral", "Spiral", 4096)
    assert (view.block_count, view.vocabulary_size, view.weight_bytes) == (7, 100, 64 * 100 * 2)
    assert (view.layers, view.weights, view.context_costs) == ((), (), ())


def test_companions_are_named_and_give_their_badge(lookup: Lookup, settings: Settings) -> None:
    folder = settings.models_dir / "seer"
    write_llama(folder / "m.gguf", embedding_length=64)
    write_projector(folder / "mmproj.gguf")
    by_name = inspect(lookup, InspectBody(model="seer"))
    assert by_name == by_path(lookup, folder / "m.gguf")
    assert by_name.projector == str(folder / "mmproj.gguf")
    assert Badge.VISION in by_name.badges
    row = listing(lookup, settings)["seer"]
    assert (row.projector, row.drafter, row.badges) == (by_name.projector, None, by_name.badges)
    projector = by_path(lookup, folder / "mmproj.gguf")
    assert (projector.kind, projector.badges) == (Kind.PROJECTOR, (Badge.VISION,))
    assert projector.problem is not None
    assert "projector" in projector.problem["detail"]


def test_a_projector_that_goes_after_the_scan_hides_no_model(lookup: Lookup, settings: Settings) -> None:
    folder = settings.models_dir / "seer"
    write_llama(folder / "m.gguf", embedding_length=64)
    write_projector(folder / "mmproj.gguf")
    (checkpoint,) = lookup.library().scan()
    (folder / "mmproj.gguf").unlink()
    row = listed(lookup, settings, checkpoint, None)
    assert (row.problem, row.badges) == (None, (Badge.DENSE,))


def test_a_drafter_says_how_it_drafts(lookup: Lookup, tmp_path: Path) -> None:
    keys = {"general.architecture": "eagle3", "eagle3.block_count": 1}
    view = by_path(lookup, write_gguf(tmp_path / "d.gguf", keys, [Tensor("fc.weight", (64, 32))]))
    assert (view.kind, view.draft_method) == (Kind.DRAFTER, DraftMethod.EAGLE3)


def test_any_shard_shows_the_same(lookup: Lookup, settings: Settings) -> None:
    first, *others = write_split(settings.models_dir / "big", "m")
    whole = by_path(lookup, first)
    assert (whole.shards, whole.name, whole.problem) == (3, "big", None)
    assert all(by_path(lookup, other) == whole for other in others)


def test_what_is_missing_is_said_and_what_is_there_is_shown(lookup: Lookup, settings: Settings) -> None:
    first, second, third = write_split(settings.models_dir / "big", "m")
    second.unlink()
    view = by_path(lookup, first)
    assert view.problem is not None
    assert view.problem["code"] == "incomplete_checkpoint"
    assert second.name in view.problem["detail"]
    assert (view.architecture, view.shards, view.layers) == ("llama", 3, ())
    assert by_path(lookup, third).architecture is None  # only the first says
    assert listing(lookup, settings)["big"].problem == view.problem


def test_a_file_for_other_machines_is_no_model_for_this_one(lookup: Lookup, tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", "llama", endianess=GGUFEndian.BIG)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    view = by_path(lookup, tmp_path / "m.gguf")
    assert view.problem is not None
    assert "big-endian" in view.problem["detail"]
    assert (view.architecture, view.layers) == ("llama", ())


def test_a_link_into_the_library_is_its_model(lookup: Lookup, settings: Settings, tmp_path: Path) -> None:
    model = write_llama(settings.models_dir / "a" / "m.gguf")
    (tmp_path / "link.gguf").symlink_to(model)
    assert by_path(lookup, tmp_path / "link.gguf").name == "a"


def test_a_file_needs_no_library(tmp_path: Path) -> None:
    gone = Settings(models_dir=tmp_path / "gone", state_dir=tmp_path / "state")
    lookup = Lookup(lambda: gone)
    assert by_path(lookup, write_llama(tmp_path / "m.gguf")).architecture == "llama"
    asyncio.run(lookup.close())


@pytest.mark.parametrize("name", [b"m\xff.gguf", b"caf\xe9 %41?#.gguf", "m\u2028\u6a21.gguf".encode()])
def test_a_file_of_any_name_can_be_named(lookup: Lookup, settings: Settings, name: bytes) -> None:
    """By its URI, whatever its bytes; by its path where that is UTF-8. What is shown is text."""
    path = write_llama(settings.models_dir / "a" / os.fsdecode(name))
    (settings.models_dir / "a" / "mA.gguf").touch()
    views = [
        by_uri(lookup, path.as_uri()),
        by_uri(lookup, path.as_uri().replace("file://", "file://localhost")),
    ]
    try:
        name.decode()
        views.append(by_path(lookup, path))
    except UnicodeDecodeError:
        views.append(
            inspect(
                lookup,
                InspectBody(
                    model="a/" + path.stem.encode(errors="surrogateescape").decode(errors="backslashreplace")
                ),
            )
        )
    assert views[0] == views[1] == views[2]
    assert views[0].architecture == "llama"
    views[0].model_dump_json().encode()


def test_a_path_that_no_file_can_have(lookup: Lookup) -> None:
    for path in ("/" + "x" * 4095, "file:///" + "%FF" * 4095):
        with pytest.raises(LlmError, match="has 4096 bytes") as caught:
            inspect(lookup, InspectBody(path=path))
        assert caught.value.code is ErrorCode.INVALID_REQUEST


@pytest.mark.parametrize(
    "path",
    [
        "m.gguf",
        "./m.gguf",
        "~/m.gguf",
        "/a\0b.gguf",
        "file:///a%00b",
        "file://host/a",
        "file:/a",
        "http://a/b",
    ],
)
def test_a_path_must_be_absolute(lookup: Lookup, path: str) -> None:
    with pytest.raises(LlmError) as caught:
        inspect(lookup, InspectBody(path=path))
    assert caught.value.code is ErrorCode.INVALID_REQUEST


def test_what_has_no_header_is_refused(lookup: Lookup, tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("not a model")
    (tmp_path / "circle.gguf").symlink_to("circle.gguf")
    os.mkfifo(tmp_path / "fifo.gguf")
    names = ("text.gguf", "circle.gguf", "fifo.gguf", "n" * 300, ".")
    for path in (tmp_path / name for name in names):
        with pytest.raises(LlmError) as caught:
            by_path(lookup, path)
        assert caught.value.code is ErrorCode.BAD_CHECKPOINT
    for path in (tmp_path / "missing.gguf", tmp_path / "text.gguf/below.gguf"):
        with pytest.raises(LlmError) as caught:
            by_path(lookup, path)
        assert caught.value.code is ErrorCode.NO_SUCH_FILE
    with pytest.raises(LlmError) as caught:
        inspect(lookup, InspectBody(model="nobody"))
    assert caught.value.code in (ErrorCode.NO_MODELS, ErrorCode.UNKNOWN_MODEL)


@pytest.mark.parametrize("body", [{}, {"model": "a", "path": "/b"}, {"path": ""}, {"file": "/b"}])
def test_a_request_names_one_thing(body: dict[str, str]) -> None:
    with pytest.raises(ValidationError):
        InspectBody.model_validate(body)


# --- positions, and what accompanies a model --------------------------------------------------------------


def test_positions_are_those_of_the_file(lookup: Lookup, tmp_path: Path) -> None:
    plain = write_llama(tmp_path / "plain.gguf", metadata={"llama.rope.dimension_count": 16})
    view = by_path(lookup, plain).rope
    assert view == RopeView(base=10000.0, dimensions=16, scaling="none", factor=1.0, own_factors=False)
    keys = {
        "llama.rope.freq_base": 5e5,
        "llama.rope.dimension_count": 16,
        "llama.rope.dimension_sections": [11, 11, 10, 0],
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 32768,
        "llama.rope.freq_base_swa": 1e4,
    }
    assert by_path(lookup, write_llama(tmp_path / "all.gguf", metadata=keys)).rope == RopeView(
        base=5e5,
        sliding_base=1e4,
        dimensions=16,
        sections=(11, 11, 10, 0),
        scaling="yarn",
        factor=4.0,
        original_context_tokens=32768,
        own_factors=False,
    )


@pytest.mark.parametrize("model", ["bge-large-en", "mamba-2.8b"])
def test_where_the_file_says_nothing_of_positions_nothing_is_claimed(
    lookup: Lookup, tmp_path: Path, model: str
) -> None:
    assert by_path(lookup, write(tmp_path / "m.gguf", published()[model])).rope is None


def test_factors_of_a_file_are_told(lookup: Lookup, tmp_path: Path) -> None:
    keys = {"llama.rope.dimension_count": 16}
    metadata = model_metadata(metadata=keys)
    tensors = [*model_tensors(metadata), Tensor("rope_freqs.weight", (8,))]
    path = write_gguf(tmp_path / "m.gguf", metadata, tensors)
    rope = by_path(lookup, path).rope
    assert rope is not None
    assert rope.own_factors


def test_what_a_projector_adds_is_shown_of_it_and_of_its_model(lookup: Lookup, settings: Settings) -> None:
    folder = settings.models_dir / "seer"
    write_gemma3(folder / "m.gguf", embedding_length=64)
    keys = {
        "general.architecture": "clip",
        "clip.has_vision_encoder": True,
        "clip.has_audio_encoder": True,
        "clip.projector_type": "gemma3",
        "clip.vision.image_size": 896,
        "clip.vision.patch_size": 14,
        "clip.vision.projection_dim": 64,
    }
    write_gguf(folder / "mmproj.gguf", keys, [Tensor("mm.0.weight", (64, 64), "F16")])
    own = by_path(lookup, folder / "mmproj.gguf").projector_facts
    assert own == ProjectorView(
        type="gemma3", sees=True, hears=True, projection_length=64, image_size=896, image_max_pixels=None,
        patch_size=14, merge_size=4, image_tokens=256, embedding_length=None, block_count=None,
    )  # fmt: skip
    assert inspect(lookup, InspectBody(model="seer")).projector_facts == own
    assert by_path(lookup, write_llama(settings.models_dir / "alone" / "m.gguf")).projector_facts is None


def test_a_projector_with_a_malformed_header_says_so(lookup: Lookup, tmp_path: Path) -> None:
    keys = {"general.architecture": "clip", "clip.vision.image_size": "large"}
    path = write_gguf(tmp_path / "mmproj.gguf", keys, [Tensor("mm.0.weight", (64, 64), "F16")])
    view = by_path(lookup, path)
    assert view.projector_facts is None
    assert view.problem is not None
    assert "clip.vision.image_size" in view.problem["detail"]


# --- the list ----------------------------------------------------------------------------------------------


def test_the_list_prices_a_token_at_the_type_of_the_settings(lookup: Lookup, settings: Settings) -> None:
    write_gemma3(settings.models_dir / "g" / "m.gguf", window=512, head_count=2, kv_head_count=1)
    prices = {}
    for cache_type in (CacheType.Q8_0, CacheType.F16):
        row = listing(lookup, settings.model_copy(update={"cache_type": cache_type}))["g"]
        assert (row.cache_type, row.sliding_window_tokens, row.kind) == (cache_type, 512, Kind.MODEL)
        assert row.kv_bytes_per_token is not None
        assert row.window_bytes_per_token == 5 * row.kv_bytes_per_token  # five of six layers slide
        prices[cache_type] = row.kv_bytes_per_token
    assert prices[CacheType.F16] * 34 == prices[CacheType.Q8_0] * 64


def test_a_state_file_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "state").write_text("a file where a directory should be")
    chosen = Settings(models_dir=tmp_path / "models", state_dir=tmp_path / "state")
    lookup = Lookup(lambda: chosen)
    problem = lookup.state_problem()
    assert problem is not None
    assert problem.code is ErrorCode.STATE_UNUSABLE
    asyncio.run(lookup.close())


def test_a_sound_state_file_is_no_problem(lookup: Lookup) -> None:
    assert lookup.state_problem() is None


def test_switches_of_the_chat_template_are_shown(lookup: Lookup, tmp_path: Path) -> None:
    template = "{% if enable_thinking %}<think>{% endif %}{{ messages[0].content }}"
    path = write_llama(tmp_path / "m.gguf", metadata={"tokenizer.chat_template": template})
    assert by_path(lookup, path).reasoning == ("enable_thinking",)
    assert by_path(lookup, write_llama(tmp_path / "plain.gguf")).reasoning == ()
