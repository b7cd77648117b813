"""``inspect`` and ``models`` as text: what is asked for, the picture of the layers, what is incomplete."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lllm3090d import wire
from lllm3090d.checkpoints.classify import DraftMethod, Kind
from lllm3090d.checkpoints.facts import LayerKind
from lllm3090d.errors import ErrorCode, LlmError
from tests.fakes.control_server import INSPECTED, MODELS, STATUS, ControlServer, changed, ctl

pytestmark = pytest.mark.unit


def asked(argument: str) -> object:
    with ControlServer(inspect=INSPECTED) as server:
        assert ctl(server, "inspect", argument).exit_code == 0
        return server.next_request().body


def test_a_file_is_asked_for_by_its_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.gguf").touch()
    (tmp_path / "qwen").mkdir()
    (tmp_path / "dangling.gguf").symlink_to("nowhere")
    assert asked("m.gguf") == wire.InspectBody(path=f"{tmp_path}/m.gguf")
    assert asked("dangling.gguf") == wire.InspectBody(path=f"{tmp_path}/dangling.gguf")
    assert asked("./missing.gguf") == wire.InspectBody(path=f"{tmp_path}/./missing.gguf")
    assert asked("/elsewhere/m.gguf") == wire.InspectBody(path="/elsewhere/m.gguf")


def test_what_is_no_file_is_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory is no file, and names of models may contain slashes."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen").mkdir()
    assert asked("qwen") == wire.InspectBody(model="qwen")
    assert asked("org/model.gguf") == wire.InspectBody(model="org/model.gguf")


def test_nothing_is_no_file_and_no_name(tmp_path: Path) -> None:
    assert ctl(tmp_path / "none.sock", "inspect", "").exit_code == 2


def test_a_file_whose_path_is_no_utf8_is_asked_for_by_its_uri(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name, the directory, or both; what is no file is a model, named as the daemon lists it."""
    folder = tmp_path / os.fsdecode(b"d %\xff")
    folder.mkdir()
    (folder / os.fsdecode(b"m\xe9.gguf")).touch()
    (folder / "plain.gguf").touch()
    monkeypatch.chdir(folder)
    here = f"file://{tmp_path}/d%20%25%FF"
    assert asked("m\udce9.gguf") == wire.InspectBody(path=f"{here}/m%E9.gguf")
    assert asked("plain.gguf") == wire.InspectBody(path=f"{here}/plain.gguf")
    assert asked("./missing\udcff") == wire.InspectBody(path=f"{here}/./missing%FF")
    assert asked("missing\udcff") == wire.InspectBody(model="missing\\xff")
    assert asked("/elsewhere/m.gguf") == wire.InspectBody(path="/elsewhere/m.gguf")


def test_inspect_draws_the_layers() -> None:
    with ControlServer(inspect=INSPECTED) as server:
        lines = ctl(server, "inspect", "hybrid").stdout.splitlines()
    assert "kind          model moe mtp" in lines
    assert "size          41.0 MiB in 2 files" in lines
    assert "experts       256, of which 8 compute a token" in lines
    assert "heads         11 full: 24 of Q, 4 of K and V, of 256" in lines
    at = lines.index("WEIGHTS           MIB")
    assert [line.split() for line in lines[at + 1 : at + 5]] == [
        ["token", "embedding", "3.0"], ["output", "tied"], ["experts", "38.0"], ["sum", "41.0"],
    ]  # fmt: skip
    assert "a token at q8_0  10,880 bytes" in lines
    assert "a token at f16   20,480 bytes, and 1,024 for each in the window" in lines
    assert "state of a slot  66,060,288 bytes (63.0 MiB)" in lines
    assert lines[-3:] == [
        "   0  " + "RRRF" * 8,
        "  32  RRRFRRRFf",
        "      F full attention, R recurrent state, lower case: predicts a further token",
    ]


def test_inspect_draws_every_kind_and_what_it_does_not_know() -> None:
    first = INSPECTED.layers[0]
    layers = [first.model_copy(update={"kind": kind, "keeps_state": False}) for kind in LayerKind]
    layers.append(first.model_copy(update={"kind": "full", "keeps_state": True}))
    layers.append(first.model_copy(update={"kind": "spiral", "keeps_state": False}))
    newer = INSPECTED.model_copy(update={"layers": tuple(layers)})
    with pytest.warns(UserWarning, match="spiral"), ControlServer(inspect=newer) as server:
        lines = ctl(server, "inspect", "hybrid").stdout.splitlines()
    assert lines[-2] == "   0  FSL=R-B?"
    assert "B attention and recurrent state" in lines[-1]
    assert "? of a kind this client does not know" in lines[-1]


def test_inspect_shows_what_cannot_be_priced() -> None:
    reason = LlmError(ErrorCode.UNSUPPORTED_ARCHITECTURE, "No rule.", hint="Choose another.").problem()
    bare = wire.InspectView(
        path="/x/\x1b[31m.gguf", kind=Kind.DRAFTER, draft_method=DraftMethod.EAGLE3,
        architecture="eagle3", title=None, quantisation=None, size_bytes=1 << 30, shards=1,
        tensor_count=3, weight_bytes=1 << 29, problem=reason,
    )  # fmt: skip
    with ControlServer(inspect=bare) as server:
        done = ctl(server, "inspect", "/x/d.gguf")
    assert done.exit_code == 0
    assert done.stdout.splitlines() == [
        "file          /x/\\x1b[31m.gguf",
        "kind          drafter (eagle3)",
        "architecture  eagle3",
        "quantisation  unknown",
        "size          1.0 GiB",
        "tensors       3, 512.0 MiB",
        "",
        "It cannot be planned: Unsupported kind of model: No rule.",
        "  Hint: Choose another.",
    ]


ROPE = wire.RopeView(base=1e6, dimensions=128, scaling="none", factor=1.0, own_factors=False)


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({}, "base 1,000,000, 128 values of a head"),
        ({"sections": (11, 11, 10, 0)}, "base 1,000,000, 128 values of a head, sections of 11, 11, 10"),
        (
            {"base": 500000.0, "own_factors": True},
            "base 500,000, 128 values of a head, factors of its own",
        ),
        (
            {"scaling": "yarn", "factor": 32.0, "original_context_tokens": 4096},
            "base 1,000,000, 128 values of a head, yarn x 32 from 4,096 tokens",
        ),
        (
            {"scaling": "linear", "factor": 8.0, "sliding_base": 10000.0},
            "base 1,000,000 (10,000 in sliding layers), 128 values of a head, linear x 8",
        ),
        ({"scaling": "\x1b[31m"}, "base 1,000,000, 128 values of a head, \\x1b[31m x 1"),
    ],
)
def test_inspect_shows_positions_in_one_line(changes: dict[str, object], shown: str) -> None:
    with ControlServer(inspect=changed(INSPECTED, rope=changed(ROPE, **changes))) as server:
        lines = ctl(server, "inspect", "hybrid").stdout.splitlines()
    assert [line for line in lines if line.startswith("rope")] == [f"rope          {shown}"]


SEES: dict[str, object] = {
    "type": "gemma3", "sees": True, "hears": False, "projection_length": 2560, "image_size": 896,
    "image_max_pixels": None, "patch_size": 14, "merge_size": 4, "image_tokens": 256,
    "embedding_length": 1152, "block_count": 27,
}  # fmt: skip
NOTHING = dict.fromkeys(wire.ProjectorView.model_fields) | {"sees": True, "hears": False}


@pytest.mark.parametrize(
    ("facts", "shown"),
    [
        (SEES, ["sees    gemma3, images of 896 x 896 pixels, 256 tokens each, into 2,560 values"]),
        (
            SEES | {"type": "qwen2.5vl_merger", "image_size": 560, "merge_size": 2, "image_tokens": None},
            [
                "sees    qwen2.5vl_merger, usual image 560 x 560 pixels, patches of 14 x 14 pixels,"
                " 4 to a token, into 2,560 values"
            ],
        ),
        (SEES | {"hears": True, "image_max_pixels": 1 << 20}, [
            "sees    gemma3, images of 896 x 896 pixels, 256 tokens each, at most 1,048,576 pixels,"
            " into 2,560 values",
            "hears   yes",
        ]),
        (NOTHING, ["sees    of an unknown type"]),
        (NOTHING | {"sees": False, "hears": True, "type": "ultravox"}, ["hears   ultravox"]),
    ],
)  # fmt: skip
def test_inspect_shows_what_a_projector_adds(facts: dict[str, object], shown: list[str]) -> None:
    with ControlServer(inspect=changed(INSPECTED, projector_facts=facts)) as server:
        lines = ctl(server, "inspect", "hybrid").stdout.splitlines()
    found = [line for line in lines if line.startswith(("sees", "hears"))]
    assert [line.split() for line in found] == [line.split() for line in shown]


def test_inspect_of_one_file_of_several() -> None:
    """The size is that of the file, as the others are missing."""
    error = LlmError(
        ErrorCode.INCOMPLETE_CHECKPOINT, "Shard 2 is missing.", hint="Fetch it.", missing=["m-2.gguf"]
    )
    with ControlServer(inspect=changed(INSPECTED, problem=error.problem())) as server:
        assert "size          41.0 MiB, one of 2 files" in ctl(server, "inspect", "x").stdout


def test_inspect_says_where_a_cache_type_is_impossible() -> None:
    costs = [{"cache_type": "q8_0", "bytes_per_token": None, "window_bytes_per_token": None}]
    with ControlServer(inspect=changed(INSPECTED, context_costs=costs)) as server:
        assert "a token at q8_0  not possible with heads" in ctl(server, "inspect", "x").stdout


def test_models_tells_the_incomplete_from_the_unusable() -> None:
    missing = LlmError(ErrorCode.INCOMPLETE_CHECKPOINT, "Shard 2 is missing.", hint="Fetch it.").problem()
    encoder = LlmError(ErrorCode.UNSUPPORTED_ARCHITECTURE, "It cannot be priced.").problem()
    first, second = MODELS.models
    views = (
        changed(second, name="half", problem=missing),
        changed(second, name="bge", kind="embedding", badges=("dense",), problem=encoder),
        changed(
            first, name="hybrid", state=None, window_bytes_per_token=512, state_bytes_per_slot=63 << 20,
            projector=None, drafter=None,
        ),
    )  # fmt: skip
    with ControlServer(models=wire.Models(models_dir="/m", models=views)) as server:
        lines = [line.split() for line in ctl(server, "models").stdout.splitlines()]
    assert lines[1][-1] == "incomplete"
    assert lines[2][1:3] == ["embedding", "dense"]
    assert lines[2][-1] == "unusable"
    row = lines[3]
    assert row[row.index("12,240") :][:4] == ["12,240", "+512w", "63.0", "MiB"]
    assert row[-1] == "-"
    assert " ".join(lines[4]) == "half: Parts of the model are missing: Shard 2 is missing."
    assert " ".join(lines[5]) == "Hint: Fetch it."
    assert " ".join(lines[6]) == "bge: Unsupported kind of model: It cannot be priced."
    assert " ".join(lines[7]) == "TOKENS/S were measured on RTX 3090 with Vulkan, and are never scaled."
    assert len(lines) == 8


def test_what_only_the_engine_prices_is_told_so() -> None:
    first = changed(
        MODELS.models[0],
        name="kimi", verdict="dry-run", parallel=None, window_tokens=None, evidence=None, speed=None, state=None,
        projector=None, drafter=None,
    )  # fmt: skip
    with ControlServer(models=wire.Models(models_dir="/m", models=(first,))) as server:
        lines = ctl(server, "models").stdout.splitlines()
    assert "dry-run" in lines[1].split()
    assert lines[2:] == ["kimi: no rule prices it; `lllm3090ctl plan` asks the engine, by a dry run"]
    with ControlServer(inspect=changed(INSPECTED, dry_run_reason="it loops\x1b")) as server:
        last = ctl(server, "inspect", "x").stdout.splitlines()[-1]
    assert last == "No rule prices it (it loops\\x1b): plan and load ask the engine, by a dry run."


def test_models_of_an_older_daemon_are_listed() -> None:
    """Every new member is optional."""
    new = dict.fromkeys(("verdict", "parallel", "window_tokens", "evidence", "speed"))
    old = changed(
        MODELS.models[0],
        **new,
        kind=None,
        badges=(),
        kv_bytes_per_token=None,
        projector=None,
        drafter=None,
    )
    with ControlServer(models=wire.Models(models_dir="/m", models=(old,))) as server:
        assert ctl(server, "models").stdout.splitlines()[1].split() == [
            "SmolLM2-135M", "-", "100.0", "MiB", "llama", "Q4_K_M", "8,192", *["-"] * 6, "ready",
        ]  # fmt: skip


def test_models_and_status_tell_that_nobody_watches() -> None:
    reason = LlmError(ErrorCode.LIBRARY_UNWATCHED, "A limit is reached.", hint="Raise it.").problem()
    title = "The models directory is not watched"
    unwatched = wire.Models(models_dir="/m", models=MODELS.models, watch_problem=reason)
    empty = wire.Models(models_dir="/m", models=(), watch_problem=reason)
    with ControlServer(
        models=[unwatched, empty, MODELS], status=changed(STATUS, watch_problem=reason)
    ) as server:
        for _ in range(2):
            last = ctl(server, "models").stdout.splitlines()[-2:]
            assert last == [f"{title}: A limit is reached.", "  Hint: Raise it."]
        assert title not in ctl(server, "models").stdout
        assert f"models: {title}: A limit is reached.\n  Hint: Raise it." in ctl(server, "status").stdout
