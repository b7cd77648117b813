"""The engine's dry run: its arguments, its output as real builds print it, how it fails, what is remembered."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lllm3090d.engines.capabilities import Backend, Build, Capabilities, DryRunAbility
from lllm3090d.engines.dry_run import DryRun, DryRuns, dry_run_arguments, parse_projection, result_key
from lllm3090d.engines.help_text import parse_help
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.planning.cache import CacheType
from lllm3090d.planning.launch import Draft, Launch
from lllm3090d.planning.placement import Placement
from lllm3090d.planning.projection import Figures, Projection, Where
from lllm3090d.planning.units import MIB
from lllm3090d.store import FILE_NAME, Store
from tests.unit.engine_captures import WITH_DRY_RUN, Said, answers, write_program

pytestmark = pytest.mark.unit

LAUNCH = Launch(8192, 1, CacheType.Q8_0, CacheType.Q8_0, 2048, 512, 8, 1024)
FLAGS = parse_help(answers("b11434")["fit-help"].stdout)[0]
CHECKPOINT = Path("/models/smollm2.gguf")


def figures(weights: int, context: int, compute: int) -> Figures:
    return Figures(weights * MIB, context * MIB, compute * MIB)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path / "state" / FILE_NAME)
    yield made
    made.close()


def dry_run(directory: Path, *, where: Where = Where.HOST, flags: frozenset[str] = FLAGS) -> DryRun:
    program = directory / "llama-fit-params"
    return DryRun(
        build=Build(directory / "llama-server", (directory,), "test", locked=False),
        capabilities=Capabilities(
            "1", frozenset(), Backend.VULKAN, ("Vulkan0",), dry_run=DryRunAbility(program, flags)
        ),
        digest="e1-abc",
        checkpoint_path=CHECKPOINT,
        checkpoint="s1-def",
        launch=LAUNCH,
        where=where,
    )


def script(directory: Path, text: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    program = directory / "llama-fit-params"
    program.write_text(text, encoding="utf-8")
    program.chmod(0o755)
    return program


# --- output ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "where", "expected"),
    [
        ("b11434 smollm2 host", Where.HOST, Projection((), figures(92, 95, 109), Where.HOST)),
        ("b11434 gemma3 host", Where.HOST, Projection((), figures(235, 20, 527), Where.HOST)),
        (
            "debian vulkan full",
            Where.DEVICE,
            Projection((("Vulkan0", figures(92, 95, 108)),), figures(28, 0, 12), Where.DEVICE),
        ),
        (
            "debian vulkan partial",
            Where.DEVICE,
            Projection((("Vulkan0", figures(47, 28, 102)),), figures(73, 66, 12), Where.DEVICE),
        ),
        ("debian vulkan host", Where.HOST, Projection((), figures(92, 95, 109), Where.HOST)),
        # It was to use a device and saw none.
        ("debian no device", Where.DEVICE, Projection((), figures(92, 95, 109), Where.HOST)),
    ],
)
def test_real_output(name: str, where: Where, expected: Projection) -> None:
    said = answers("dry_runs")[name]
    assert said.status == 0
    assert parse_projection(said.stdout, where) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        answers("dry_runs")["b11434 fits"].stdout,  # what it prints without -fitp
        "Host 92 95",
        "Host 92 95 109 4",
        "Host 92 -95 109",
        "Host 92.5 95 109",
        "CUDA0 92 95 109\n",
        "Host 92 95 109\nCUDA0 92 95 109\n",
        "Host 92 95 109\nHost 92 95 109\n",
        "CUDA0 1 1 1\nCUDA0 1 1 1\nHost 92 95 109\n",
    ],
)
def test_output_of_another_form_is_not_guessed_at(text: str) -> None:
    assert parse_projection(text, Where.DEVICE) is None


def test_output_among_remarks_of_drivers() -> None:
    text = "ggml_cuda_init: found 2 CUDA devices\n  CUDA0 1 2 3 \nCUDA1 4 5 6\t\r\nWARNING radv\nHost 7 8 9 \n\n"
    found = parse_projection(text, Where.DEVICE)
    assert found is not None
    assert found.devices == (("CUDA0", figures(1, 2, 3)), ("CUDA1", figures(4, 5, 6)))
    assert found.device == figures(5, 7, 9)
    assert parse_projection(text, Where.HOST) is None  # it was to keep off them


# --- arguments -------------------------------------------------------------------------------------------------


def as_pairs(arguments: tuple[str, ...]) -> dict[str, str]:
    """Options with their values; empty for switches."""
    found: dict[str, str] = {}
    last = ""
    for argument in arguments:
        if argument.startswith("-"):
            last = argument
            found[last] = ""
        else:
            found[last] = argument
    return found


@pytest.mark.parametrize("build", WITH_DRY_RUN)
def test_arguments_are_those_that_real_builds_offer(build: str) -> None:
    ability = DryRunAbility(Path("/x"), parse_help(answers(build)["fit-help"].stdout)[0])
    launch = replace(
        LAUNCH,
        parallel=4,
        swa_full=True,
        draft=Draft(3),
        layers=Placement(layers_on_card=10, expert_layers_on_host=4, cache_on_host=True),
    )
    assert as_pairs(dry_run_arguments(launch, ability, Where.DEVICE)) == {
        "-fitp": "on",
        "-c": "8192",
        "-np": "4",
        "-ctk": "q8_0",
        "-ctv": "q8_0",
        "-b": "2048",
        "-ub": "512",
        "-fa": "on",
        "-nr": "",
        "--swa-full": "",
        "-ngl": "10",
        "-ncmoe": "4",
        "-nkvo": "",
    }
    assert as_pairs(dry_run_arguments(LAUNCH, ability, Where.DEVICE))["-ngl"] == "999"
    on_host = as_pairs(dry_run_arguments(launch, ability, Where.HOST))
    assert on_host["-dev"] == "none"
    assert not {"-ngl", "-ncmoe", "-nkvo"} & on_host.keys()


def test_what_its_arguments_cannot_express_is_refused() -> None:
    ability = DryRunAbility(Path("/x"), FLAGS)
    with pytest.raises(LlmError) as caught:
        dry_run_arguments(replace(LAUNCH, parallel=2, unified=True), ability, Where.HOST)
    assert caught.value.code is ErrorCode.UNSUPPORTED_COMBINATION
    assert dry_run_arguments(replace(LAUNCH, unified=True), ability, Where.HOST)
    with pytest.raises(ValueError, match="not allowed"):
        dry_run_arguments(LAUNCH, ability, Where.NOWHERE)
    with pytest.raises(LlmError) as caught:
        dry_run_arguments(LAUNCH, DryRunAbility(Path("/x"), FLAGS - {"-dev", "--device"}), Where.HOST)
    assert caught.value.code is ErrorCode.ENGINE_UNUSABLE
    assert caught.value.details["flag"] == "-dev"


# --- runs --------------------------------------------------------------------------------------------------------


def test_a_result_is_remembered_across_restarts(tmp_path: Path, store: Store) -> None:
    run = dry_run(tmp_path, where=Where.DEVICE)
    program = write_program(tmp_path / "llama-fit-params", {"-m": answers("dry_runs")["debian vulkan full"]})
    assert DryRuns(lambda: store).known(run) is None
    first = DryRuns(lambda: store).project(run)
    assert first.devices == (("Vulkan0", figures(92, 95, 108)),)
    store.close()
    again = Store(tmp_path / "state" / FILE_NAME)
    assert DryRuns(lambda: again).project(run) == first == DryRuns(lambda: again).known(run)
    assert Path(f"{program}.calls").read_text(encoding="utf-8") == "-m\n"  # asked once
    again.close()


def test_what_a_result_depends_on(tmp_path: Path) -> None:
    run = dry_run(tmp_path, where=Where.DEVICE)
    arguments = ("-c", "8192")
    key = result_key(run, arguments)
    assert result_key(replace(run, checkpoint_path=Path("/elsewhere.gguf")), arguments) == key
    others = [
        result_key(run, ("-c", "4096")),
        result_key(replace(run, checkpoint="s1-other"), arguments),
        result_key(replace(run, digest="e1-other"), arguments),
        result_key(replace(run, where=Where.HOST), arguments),
        result_key(replace(run, capabilities=replace(run.capabilities, devices=())), arguments),
    ]
    assert len({key, *others}) == 6


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("b11434 damaged", "failed to load model"),
        ("b11434 unknown architecture", "unknown model architecture: 'zlama'"),
        ("b11434 missing", "failed to load model from /models/none.gguf"),
        ("b11434 quantised v without flash attention", "quantized V cache requires flash_attn"),
    ],
)
def test_a_run_that_aborts_is_reported_with_the_engines_own_words(
    name: str, told: str, tmp_path: Path, store: Store
) -> None:
    said = answers("dry_runs")[name]
    assert said.status == -6
    for status in (said.status, 134):  # seen from a shell between
        write_program(tmp_path / "llama-fit-params", {"-m": replace(said, status=status)})
        with pytest.raises(LlmError) as caught:
            DryRuns(lambda: store).project(dry_run(tmp_path))
        assert caught.value.code is ErrorCode.ENGINE_FAILED
        assert "SIGABRT (the engine gave up by itself)" in caught.value.message
        assert told in caught.value.message
        assert caught.value.details["last_lines"]
    assert store.rows("SELECT count(*) FROM dry_runs") == [(0,)]


def test_a_run_whose_reason_was_lost_is_asked_again(tmp_path: Path, store: Store) -> None:
    count = tmp_path / "count"
    script(
        tmp_path,
        f"""#!/bin/sh
echo x >>{count}
echo '  what():  failed to load model' >&2
[ $(wc -l <{count}) -lt 2 ] || echo "0.00 E load: error loading model: unknown model architecture: 'new'" >&2
kill -ABRT $$
""",
    )
    with pytest.raises(LlmError, match="architecture: 'new'"):
        DryRuns(lambda: store).project(dry_run(tmp_path))
    assert len(count.read_text().split()) == 2


def test_a_run_that_never_tells_why_is_not_asked_for_ever(tmp_path: Path, store: Store) -> None:
    count = tmp_path / "count"
    script(tmp_path, f"#!/bin/sh\necho x >>{count}\nexit 1\n")
    with pytest.raises(LlmError, match="exit status 1"):
        DryRuns(lambda: store).project(dry_run(tmp_path))
    assert len(count.read_text().split()) == 3


def test_unknown_output_and_missing_ability_are_told(tmp_path: Path, store: Store) -> None:
    write_program(tmp_path / "llama-fit-params", {"-m": Said(0, "Host: 3 GiB\n", "")})
    with pytest.raises(LlmError, match="form that is not known") as caught:
        DryRuns(lambda: store).project(dry_run(tmp_path))
    assert caught.value.details["last_lines"] == ["Host: 3 GiB"]

    without = dry_run(tmp_path)
    for ability, words in (
        (None, "brings no llama-fit-params"),
        (DryRunAbility(Path("/x"), frozenset({"-c"})), "does not print"),
    ):
        run = replace(without, capabilities=replace(without.capabilities, dry_run=ability))
        with pytest.raises(LlmError, match=words) as caught:
            DryRuns(lambda: store).project(run)
        assert caught.value.code is ErrorCode.ENGINE_UNUSABLE


PAUSE = threading.Event()  # never set


def _is_dead(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return status.rsplit(")", 1)[1].split()[0] in {"Z", "X"}


def test_a_run_that_hangs_is_killed_with_its_children(tmp_path: Path, store: Store) -> None:
    script(tmp_path, '#!/bin/sh\necho thinking\nsleep 600 &\necho $! > "$0.child"\nwait\n')
    began = time.monotonic()
    with pytest.raises(LlmError, match=r"did not answer a dry run within 0\.5 s") as caught:
        DryRuns(lambda: store, time_limit_s=0.5).project(dry_run(tmp_path))
    assert time.monotonic() - began < 20
    assert caught.value.details["last_lines"] == ["thinking"]
    child = int((tmp_path / "llama-fit-params.child").read_text())
    deadline = time.monotonic() + 20
    while not _is_dead(child) and time.monotonic() < deadline:
        PAUSE.wait(0.005)  # the kernel has the signal, and takes a moment
    assert _is_dead(child)


def test_its_environment_is_clean(tmp_path: Path, store: Store) -> None:
    script(tmp_path, '#!/bin/sh\nenv > "$0.env"\necho Host 1 2 3\n')
    inherited = {
        "PATH": os.environ["PATH"],
        "LLAMA_ARG_CTX_SIZE": "7",
        "LLAMA_ARG_FIT_ESTIMATE": "off",
        "LLLM3090_STATE_DIR": "/x",
        "LD_LIBRARY_PATH": "/cuda",
        "CUDA_VISIBLE_DEVICES": "0",
    }
    DryRuns(lambda: store).project(dry_run(tmp_path), inherited=inherited)
    seen = (tmp_path / "llama-fit-params.env").read_text(encoding="utf-8").splitlines()
    assert {f"LD_LIBRARY_PATH={tmp_path}:/cuda", "GGML_NO_BACKTRACE=1", "CUDA_VISIBLE_DEVICES=0"} <= set(
        seen
    )
    assert not [line for line in seen if line.startswith(("LLAMA_", "LLLM3090_"))]


def test_a_program_that_cannot_be_started_is_told(tmp_path: Path, store: Store) -> None:
    with pytest.raises(LlmError) as caught:
        DryRuns(lambda: store).project(dry_run(tmp_path))
    assert caught.value.code is ErrorCode.ENGINE_UNUSABLE
    script(tmp_path, "").chmod(0o644)
    with pytest.raises(LlmError) as caught:
        DryRuns(lambda: store).project(dry_run(tmp_path))
    assert caught.value.code is ErrorCode.ENGINE_NOT_EXECUTABLE


def test_old_results_are_forgotten(tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lllm3090d.engines.dry_run.KEPT_RESULTS", 3)
    script(tmp_path, "#!/bin/sh\necho Host 1 2 3\n")
    runs = DryRuns(lambda: store)
    for context in range(1024, 1024 * 7, 1024):
        runs.project(replace(dry_run(tmp_path), launch=replace(LAUNCH, context_tokens=context)))
    assert store.rows("SELECT count(*) FROM dry_runs") == [(3,)]


def test_without_a_store_it_works_all_the_same(tmp_path: Path, store: Store) -> None:
    script(tmp_path, "#!/bin/sh\necho Host 1 2 3\n")
    store.close()
    assert DryRuns(lambda: store).project(dry_run(tmp_path)).host == figures(1, 2, 3)
