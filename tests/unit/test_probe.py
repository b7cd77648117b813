"""What a build's answers are taken to mean, and what is said about a build that cannot answer."""

from __future__ import annotations

import subprocess
import threading
import time
from pathlib import Path

import pytest

from lllm3090d.engines.capabilities import Backend, Build, Capabilities
from lllm3090d.engines.probe import (
    describe_status,
    fingerprint,
    parse_devices,
    parse_help,
    parse_version,
    probe,
)
from lllm3090d.engines.probe_cache import ProbeCache
from lllm3090d.errors import ErrorCode, LlmError
from tests.fakes.engine import install_fake_engine, set_behaviour

pytestmark = pytest.mark.unit

HELP = """\
----- common params -----

-h,    --help, --usage                  how to use it
-c,    --ctx-size N                     context, see --not-a-flag
                                        --neither-this
                                        (env: LLAMA_ARG_CTX_SIZE)
-kvo,  --kv-offload, -nkvo, --no-kv-offload
                                        two ways
-fitt, --fit-target MiB0,MiB1,MiB2,...
                                        margins
--cpu-strict <0|1>                      placement
-fa,   --flash-attn [on|off|auto]       attention (env: LLAMA_ARG_FLASH_ATTN)
--old, --older N                        the argument has been removed. use --new
                                        (env: LLAMA_ARG_OLD)
--spec-type none,simple
                                        kinds
"""


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "version: 0.6.0-dev (build 0, commit unknown)\nbuilt with GNU 12.2.0\n",
            "0.6.0-dev (build 0, commit unknown)",
        ),
        ("ggml_cuda_init: found 1 CUDA devices:\nversion: 11434 (abc1234)\n", "11434 (abc1234)"),
        ("\nVersion: 0.7.0-b11669\n", "0.7.0-b11669"),
        ("llama.cpp 0.8.1 (11900)\n", "llama.cpp 0.8.1 (11900)"),
        ("", "unknown"),
    ],
)
def test_version_formats(text: str, version: str) -> None:
    assert parse_version(text) == version


def test_help_options_values_and_variables() -> None:
    flags, valued, variables = parse_help(HELP)

    assert flags == {
        *("-h", "--help", "--usage", "-c", "--ctx-size", "-kvo", "--kv-offload", "-nkvo", "--no-kv-offload"),
        *("-fitt", "--fit-target", "--cpu-strict", "-fa", "--flash-attn", "--spec-type"),
    }
    assert valued == {
        *("-c", "--ctx-size", "-fitt", "--fit-target", "--cpu-strict", "-fa", "--flash-attn", "--spec-type"),
    }
    assert {"LLAMA_ARG_CTX_SIZE", "LLAMA_ARG_FLASH_ATTN"} <= variables


@pytest.mark.parametrize(
    ("text", "names", "backend"),
    [
        ("Available devices:\n  (none)\n", (), Backend.CPU),
        ("Available devices:\n", (), Backend.CPU),
        (
            "Available devices:\n  CUDA0: NVIDIA GeForce RTX 3090 (24124 MiB, 23000 MiB free)\n"
            "  CUDA1: NVIDIA GeForce RTX 3060: odd name (12044 MiB, 11900 MiB free)\n",
            ("CUDA0", "CUDA1"),
            Backend.CUDA,
        ),
        (
            "Available devices:\n  Vulkan0: llvmpipe (LLVM 15.0.6, 256 bits) (2048 MiB, 2048 MiB free)\n",
            ("Vulkan0",),
            Backend.VULKAN,
        ),
        ("Available devices:\n  ROCm0: AMD (24560 MiB, 24000 MiB free)\n", ("ROCm0",), Backend.ROCM),
        ("Available devices:\n  SYCL0: Intel (1 MiB, 1 MiB free)\n", ("SYCL0",), Backend.SYCL),
        ("Available devices:\n  MTL0: Apple M4 (1 MiB, 1 MiB free)\n", ("MTL0",), Backend.METAL),
        ("Available devices:\n  Metal: Apple M2 (1 MiB, 1 MiB free)\n", ("Metal",), Backend.METAL),
        ("Available devices:\n  BLAS: OpenBLAS (0 MiB, 0 MiB free)\n", ("BLAS",), Backend.CPU),
        (
            "Available devices:\n  BLAS: OpenBLAS (0 MiB, 0 MiB free)\n  CUDA0: X (1 MiB, 1 MiB free)\n",
            ("BLAS", "CUDA0"),
            Backend.CUDA,
        ),
        ("Available devices:\n  CANN0: Ascend (1 MiB, 1 MiB free)\n", ("CANN0",), Backend.UNKNOWN),
        ("Available devices:\n  in a new format\n", (), Backend.UNKNOWN),
        ("usage: something else\n", (), Backend.UNKNOWN),
    ],
)
def test_devices_and_backend(text: str, names: tuple[str, ...], backend: Backend) -> None:
    assert parse_devices(text) == (names, backend)


def _script(directory: Path, text: str) -> Build:
    directory.mkdir(parents=True, exist_ok=True)
    server = directory / "llama-server"
    server.write_text(text, encoding="utf-8")
    server.chmod(0o755)
    return Build(server, (), "test", locked=False)


def _fake(directory: Path, **behaviour: object) -> Build:
    return Build(install_fake_engine(directory, **behaviour) / "llama-server", (), "test", locked=False)


def test_probe_of_a_cpu_build(tmp_path: Path) -> None:
    capabilities = probe(_fake(tmp_path, version="version: 11434 (abc1234)"))

    assert capabilities.version == "11434 (abc1234)"
    assert capabilities.backend is Backend.CPU
    assert {"-c", "--ctx-size", "--no-kv-unified", "--no-ui"} <= capabilities.flags
    assert "--flash-attn" in capabilities.valued_flags
    assert "--jinja" not in capabilities.valued_flags
    assert "LLAMA_ARG_MODEL" in capabilities.variables


def test_probe_of_a_cuda_build(tmp_path: Path) -> None:
    line = "CUDA0: NVIDIA GeForce RTX 3090 (24124 MiB, 23000 MiB free)"
    capabilities = probe(_fake(tmp_path, devices=(line,), missing_flags=("--fit", "-fit")))

    assert (capabilities.backend, capabilities.devices) == (Backend.CUDA, ("CUDA0",))
    assert not {"--fit", "-fit"} & capabilities.flags


def test_environment_of_the_probe_is_clean(tmp_path: Path) -> None:
    build = _script(
        tmp_path,
        '#!/bin/sh\ncase $1 in --help) echo "--x  y"; env > "$0.env";;'
        ' --list-devices) echo "Available devices:";; *) echo version: 1;; esac\n',
    )
    inherited = {
        "PATH": "/usr/bin:/bin",
        "LLAMA_ARG_CTX_SIZE": "7",
        "LLAMA_API_KEY": "secret",
        "LD_LIBRARY_PATH": "/cuda",
        "GGML_VK_VISIBLE_DEVICES": "0",
    }

    probe(Build(build.server, (tmp_path,), "test", locked=False), inherited=inherited)

    seen = Path(f"{build.server}.env").read_text(encoding="utf-8").splitlines()
    assert f"LD_LIBRARY_PATH={tmp_path}:/cuda" in seen
    assert {"GGML_NO_BACKTRACE=1", "GGML_VK_VISIBLE_DEVICES=0"} <= set(seen)
    assert not [line for line in seen if line.startswith("LLAMA_")]


def test_processor_mismatch_is_named(tmp_path: Path) -> None:
    with pytest.raises(LlmError) as caught:
        probe(_script(tmp_path, "#!/bin/sh\necho loading tensors >&2\nkill -ILL $$\n"))

    assert caught.value.code is ErrorCode.ENGINE_UNUSABLE
    assert "SIGILL" in caught.value.message
    assert caught.value.details["last_lines"] == ["loading tensors"]


def test_missing_library_is_named(tmp_path: Path) -> None:
    library, source = tmp_path / "libgone.so.1", tmp_path / "main.c"
    source.write_text("int gone(void); int main(void) { return gone(); }\n", encoding="utf-8")
    (tmp_path / "gone.c").write_text("int gone(void) { return 0; }\n", encoding="utf-8")
    shared = [
        "gcc",
        "-shared",
        "-fPIC",
        "-Wl,-soname,libgone.so.1",
        "-o",
        str(library),
        str(tmp_path / "gone.c"),
    ]
    subprocess.run(shared, check=True)
    server = tmp_path / "llama-server"
    subprocess.run(["gcc", "-o", str(server), str(source), str(library)], check=True)
    library.unlink()

    with pytest.raises(LlmError) as caught:
        probe(Build(server, (), "test", locked=False))

    assert caught.value.code is ErrorCode.ENGINE_UNUSABLE
    assert "exit status 127" in caught.value.message
    assert "libgone.so.1: cannot open shared object file" in caught.value.message
    assert "libgone.so.1" in (caught.value.hint or "")


@pytest.mark.parametrize(
    "content",
    [
        b"\x7fELF\x02\x01\x01"
        + bytes(9)
        + b"\x02\x00\xb7\x00"
        + bytes(100),  # an AArch64 executable's header
        b"<html>not a program</html>",
        b"",
    ],
)
def test_foreign_format_is_unusable(tmp_path: Path, content: bytes) -> None:
    server = tmp_path / "llama-server"
    server.write_bytes(content)
    server.chmod(0o755)

    with pytest.raises(LlmError) as caught:
        probe(Build(server, (), "test", locked=False))

    assert caught.value.code is ErrorCode.ENGINE_UNUSABLE
    assert "format" in caught.value.message


def test_missing_interpreter_is_unusable(tmp_path: Path) -> None:
    with pytest.raises(LlmError) as caught:
        probe(_script(tmp_path, "#!/no/such/interpreter\n"))

    assert caught.value.code is ErrorCode.ENGINE_UNUSABLE
    assert "interpreter" in caught.value.message


def test_directory_instead_of_a_program_cannot_be_executed(tmp_path: Path) -> None:
    with pytest.raises(LlmError) as caught:
        probe(Build(tmp_path, (), "test", locked=False))

    assert caught.value.code is ErrorCode.ENGINE_NOT_EXECUTABLE


def test_another_program_is_no_engine(tmp_path: Path) -> None:
    with pytest.raises(LlmError) as caught:
        probe(_script(tmp_path, "#!/bin/sh\necho hello\n"))

    assert caught.value.code is ErrorCode.ENGINE_UNUSABLE
    assert "no llama-server" in caught.value.message


def test_silent_build_is_given_up_with_its_children(tmp_path: Path) -> None:
    """The child keeps the pipes open: only killing the whole session ends the wait."""
    build = _script(tmp_path, "#!/bin/sh\necho thinking\nsleep 600 &\nwait\n")

    with pytest.raises(LlmError) as caught:
        probe(build, time_limit_s=1.5)

    assert caught.value.code is ErrorCode.ENGINE_UNUSABLE
    assert "within 1.5 s" in caught.value.message
    assert caught.value.details["last_lines"] == ["thinking"]


COUNTING = """#!/bin/sh
echo x >> "$0.calls"
case $1 in
--version) echo "version: $(cat "$0.version" 2>/dev/null || echo 1)" >&2;;
--help) echo "--model FNAME   model";;
--list-devices) [ -e "$0.broken" ] && exit 1; echo "Available devices:"; echo "  (none)";;
esac
"""


def _calls(build: Build) -> int:
    return len(Path(f"{build.server}.calls").read_text(encoding="utf-8").splitlines())


def test_answers_are_kept_until_a_file_changes(tmp_path: Path) -> None:
    build, cache = _script(tmp_path, COUNTING), ProbeCache()
    assert cache.get(build) == cache.get(build)
    assert _calls(build) == 3

    library = tmp_path / "libllama.so.0"
    library.write_bytes(b"one")
    cache.get(build)
    assert _calls(build) == 6

    Path(f"{build.server}.version").write_text("2", encoding="utf-8")
    fresh = tmp_path / "fresh"
    fresh.write_bytes(b"two")  # same size under the same name: the inode tells
    fresh.rename(library)
    assert cache.get(build).version == "2"
    assert _calls(build) == 9


def test_unknown_backend_is_not_kept(tmp_path: Path) -> None:
    build, cache = _script(tmp_path, COUNTING), ProbeCache()
    broken = Path(f"{build.server}.broken")
    broken.touch()
    assert cache.get(build).backend is Backend.UNKNOWN

    broken.unlink()
    assert cache.get(build).backend is Backend.CPU
    assert _calls(build) == 4  # what it says of itself is known


def test_failure_is_not_kept(tmp_path: Path) -> None:
    build, cache = _script(tmp_path, "#!/bin/sh\nexit 3\n"), ProbeCache()
    with pytest.raises(LlmError, match="exit status 3"):
        cache.get(build)

    _script(tmp_path, COUNTING)
    assert cache.get(build).version == "1"


def test_simultaneous_callers_share_one_probe(tmp_path: Path) -> None:
    build, cache = _script(tmp_path, COUNTING), ProbeCache()
    answers: list[Capabilities] = []
    barrier = threading.Barrier(8)

    def ask() -> None:
        barrier.wait()
        answers.append(cache.get(build))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(answers) == 8
    assert _calls(build) == 3


def test_simultaneous_callers_share_one_failure(tmp_path: Path) -> None:
    """A build that hangs costs its time limit once, not once for each who waits."""
    build, cache = _script(tmp_path, "#!/bin/sh\nsleep 60\n"), ProbeCache(time_limit_s=1.0)
    failures: list[LlmError] = []
    barrier = threading.Barrier(6)

    def ask() -> None:
        barrier.wait()
        with pytest.raises(LlmError) as caught:
            cache.get(build)
        failures.append(caught.value)

    threads = [threading.Thread(target=ask) for _ in range(6)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(failures) == 6
    assert time.monotonic() - began < 6
    assert all(failure is failures[0] for failure in failures)


def test_fingerprint_covers_the_libraries(tmp_path: Path) -> None:
    build = _script(tmp_path / "bin", COUNTING)
    library = tmp_path / "lib" / "libggml.so"
    library.parent.mkdir()
    library.write_bytes(b"1")

    names = [row[0] for row in fingerprint(Build(build.server, (library.parent,), "test", locked=False))]

    assert names == sorted([str(build.server), str(library)])


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (1, "exit status 1"),
        (-11, "SIGSEGV (a memory error)"),
        (-15, "SIGTERM"),
        (-99, "signal 99"),
        (134, "exit status 134, SIGABRT (the engine gave up by itself)"),
        (200, "exit status 200"),
    ],
)
def test_status_in_words(status: int, text: str) -> None:
    assert describe_status(status) == text


def test_behaviour_can_change_without_a_new_probe(tmp_path: Path) -> None:
    """The fake's behaviour file is no part of the build."""
    build = _fake(tmp_path)
    before = fingerprint(build)
    set_behaviour(tmp_path, hang=True)
    assert fingerprint(build) == before


@pytest.mark.parametrize(("said", "expected"), [("yes", True), ("no", False), (None, None)])
def test_what_the_driver_says_of_virtual_memory(
    tmp_path: Path, said: str | None, expected: bool | None
) -> None:
    """It is said on stderr, before the list on stdout."""
    remark = f"  Device 0: NVIDIA GeForce RTX 3090, compute capability 8.6, VMM: {said}\n" if said else ""
    server = tmp_path / "llama-server"
    server.write_text(
        "#!/bin/sh\n"
        'case "$1" in\n'
        "--version) echo 'version: 1 (abc)' ;;\n"
        "--help) echo '-m,    --model FNAME                   path' ;;\n"
        f"*) printf '%s' 'ggml_cuda_init: found 1 CUDA devices:\n{remark}' >&2\n"
        "   printf 'Available devices:\\n  CUDA0: NVIDIA GeForce RTX 3090 (24124 MiB, 23000 MiB free)\\n' ;;\n"
        "esac\n"
    )
    server.chmod(0o755)
    found = probe(Build(server, (), "test", locked=False), inherited={"PATH": "/usr/bin:/bin"})
    assert (found.backend, found.devices, found.virtual_memory) == (Backend.CUDA, ("CUDA0",), expected)
