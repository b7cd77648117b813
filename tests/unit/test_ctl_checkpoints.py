"""``inspect`` and ``models`` as text: what is asked for, the picture of the layers, what is incomplete."""

from __future__ import annotations

from pathlib import Path

import pytest

from lllm3090d import wire
from lllm3090d.checkpoints.classify import DraftMethod, Kind
from lllm3090d.checkpoints.facts import LayerKind
from lllm3090d.errors import ErrorCode, LlmError
from tests.fakes.control_server import INSPECTED, MODELS, ControlServer, changed, ctl

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


@pytest.mark.parametrize("argument", ["", "caf\udce9", "/caf\udce9.gguf"])
def test_what_cannot_be_sent_is_refused_here(tmp_path: Path, argument: str) -> None:
    assert ctl(tmp_path / "none.sock", "inspect", argument).exit_code == 2


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
        "It cannot be planned: Unknown architecture: No rule. Hint: Choose another.",
    ]


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
    assert lines[3][-5:] == ["12,240", "+512w", "63.0", "MiB", "-"]
    assert " ".join(lines[4]) == "half: Parts of the model are missing: Shard 2 is missing. Hint: Fetch it."
    assert " ".join(lines[5]) == "bge: Unknown architecture: It cannot be priced."
    assert len(lines) == 6


def test_models_of_an_older_daemon_are_listed() -> None:
    """Every new member is optional."""
    old = changed(
        MODELS.models[0], kind=None, badges=(), kv_bytes_per_token=None, projector=None, drafter=None
    )
    with ControlServer(models=wire.Models(models_dir="/m", models=(old,))) as server:
        assert ctl(server, "models").stdout.splitlines()[1].split() == [
            "SmolLM2-135M", "-", "100.0", "MiB", "llama", "Q4_K_M", "8192", "-", "-", "ready",
        ]  # fmt: skip
