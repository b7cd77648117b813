"""Answers of builds outlive the daemon, and what must not be remembered is not; digests of binaries."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lllm3090d.engines import probe_cache
from lllm3090d.engines.binaries import binaries_digest, fingerprint, fit_params, has_gpu_library, libraries
from lllm3090d.engines.capabilities import Backend, Build
from lllm3090d.engines.probe import Texts
from lllm3090d.engines.probe_cache import ProbeCache, pack, surroundings, unpack
from lllm3090d.engines.visibility import DEVICE_VARIABLES
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.store import FILE_NAME, Store
from tests.fakes.gated import Gate

pytestmark = pytest.mark.unit

SERVER = """#!/bin/sh
echo "$1" >> "$0.calls"
case $1 in
--version) echo "version: $(cat "$0.version" 2>/dev/null || echo 11434) (abc)" >&2;;
--help) echo "--model FNAME   model";;
--list-devices)
  [ -e "$0.broken" ] && exit 1
  echo "Available devices:"; cat "$0.devices" 2>/dev/null || echo "  (none)";;
esac
"""
FIT_PARAMS = '#!/bin/sh\necho "$1" >> "$0.calls"\necho "--fit-print [on|off]    prints"\n'
DEVICE = "  CUDA0: NVIDIA GeForce RTX 3090 (24124 MiB, 23000 MiB free)\n"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path / "state" / FILE_NAME)
    yield made
    made.close()


def install(directory: Path, *, fit: bool = False) -> Build:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in (("llama-server", SERVER), ("llama-fit-params", FIT_PARAMS)):
        if name == "llama-server" or fit:
            (directory / name).write_text(text, encoding="utf-8")
            (directory / name).chmod(0o755)
    return Build(directory / "llama-server", (directory,), "test", locked=False)


def calls(build: Build, program: str = "llama-server") -> list[str]:
    """What was asked since the last time."""
    file = build.server.parent / f"{program}.calls"
    asked = file.read_text(encoding="utf-8").split() if file.exists() else []
    file.unlink(missing_ok=True)
    return sorted(asked)


def put(build: Build, suffix: str, text: str) -> None:
    Path(f"{build.server}.{suffix}").write_text(text, encoding="utf-8")


DEADLINE_S = 60.0
ALL = ["--help", "--list-devices", "--version"]


def test_a_restarted_daemon_asks_nothing(tmp_path: Path, store: Store) -> None:
    build = install(tmp_path / "b", fit=True)
    put(build, "devices", DEVICE)
    first = ProbeCache(store=lambda: store).get(build)
    assert first.backend is Backend.CUDA
    assert first.dry_run is not None
    assert first.dry_run.can_project
    assert (calls(build), calls(build, "llama-fit-params")) == (ALL, ["--help"])
    store.close()

    again = Store(tmp_path / "state" / FILE_NAME)
    cache = ProbeCache(store=lambda: again)
    assert cache.get(build) == cache.get(build) == first
    assert (calls(build), calls(build, "llama-fit-params")) == ([], [])
    again.close()


def test_devices_are_asked_again_after_a_boot(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = install(tmp_path / "b")
    put(build, "devices", DEVICE)
    assert ProbeCache(store=lambda: store).get(build).devices == ("CUDA0",)
    calls(build)
    boot = tmp_path / "boot_id"
    boot.write_text("another\n", encoding="ascii")
    monkeypatch.setattr(probe_cache, "BOOT_ID", boot)
    put(build, "devices", DEVICE.replace("CUDA0", "CUDA1"))
    assert ProbeCache(store=lambda: store).get(build).devices == ("CUDA1",)
    assert calls(build) == ["--list-devices"]


def test_variables_that_hide_devices_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plain = surroundings({"PATH": "/x"})
    assert surroundings({"PATH": "/y", "HOME": "/z"}) == plain
    others = [surroundings({name: "1"}) for name in (*DEVICE_VARIABLES, "LD_LIBRARY_PATH")]
    assert len({plain, *others}) == 1 + len(others)
    monkeypatch.setattr(probe_cache, "BOOT_ID", tmp_path / "gone")
    assert surroundings({}) != plain  # nobody can tell this boot from another


def test_a_list_that_failed_is_not_kept_and_the_rest_is(tmp_path: Path, store: Store) -> None:
    build = install(tmp_path / "b")
    put(build, "broken", "")
    cache = ProbeCache(store=lambda: store)
    assert cache.get(build).backend is Backend.UNKNOWN
    assert calls(build) == ALL
    assert cache.get(build).backend is Backend.UNKNOWN
    assert calls(build) == ["--list-devices"]
    Path(f"{build.server}.broken").unlink()
    assert ProbeCache(store=lambda: store).get(build).backend is Backend.CPU
    assert calls(build) == ["--list-devices"]
    assert ProbeCache(store=lambda: store).get(build).backend is Backend.CPU
    assert calls(build) == []


class Clock:
    """The real one, put forward."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


def test_a_gpu_build_without_a_device_is_asked_again(tmp_path: Path, store: Store) -> None:
    """Its driver may come later; cpu is what it is until then."""
    build = install(tmp_path / "b")
    (tmp_path / "b" / "libggml-cuda.so").write_bytes(b"library")
    assert has_gpu_library(build)
    clock = Clock()
    cache = ProbeCache(store=lambda: store, clock=clock)
    assert cache.get(build).backend is cache.get(build).backend is Backend.CPU
    assert calls(build) == ALL  # not at every call
    assert ProbeCache(store=lambda: store).get(build).backend is Backend.CPU
    assert calls(build) == ["--list-devices"]  # nor kept for the next daemon

    put(build, "devices", DEVICE)
    clock.ahead_s = probe_cache.NO_DEVICE_RETRY_S
    assert cache.get(build).backend is Backend.CUDA
    assert calls(build) == ["--list-devices"]


@pytest.mark.parametrize("change", ["server", "library", "fit-params"])
def test_another_file_is_another_build(change: str, tmp_path: Path, store: Store) -> None:
    build = install(tmp_path / "b", fit=True)
    library = tmp_path / "b" / "libllama.so.0"
    library.write_bytes(b"one")
    ProbeCache(store=lambda: store).get(build)
    calls(build)
    put(build, "version", "11500")
    file = {"server": build.server, "library": library, "fit-params": tmp_path / "b" / "llama-fit-params"}[
        change
    ]
    fresh = tmp_path / "fresh"
    fresh.write_bytes(file.read_bytes())
    fresh.chmod(0o755)
    fresh.rename(file)
    assert ProbeCache(store=lambda: store).get(build).version == "11500 (abc)"
    assert calls(build) == ALL


@pytest.mark.parametrize("body", [b"", b"not zlib", pack(Texts("1", "2"))[:-3]])
def test_a_damaged_entry_is_asked_again(body: bytes, tmp_path: Path, store: Store) -> None:
    build = install(tmp_path / "b")
    ProbeCache(store=lambda: store).get(build)
    calls(build)
    assert store.change(lambda connection: connection.execute("UPDATE engine_answers SET body = ?", (body,)))
    assert ProbeCache(store=lambda: store).get(build).version == "11434 (abc)"
    assert calls(build) == ALL


def test_entries_are_what_was_packed() -> None:
    texts = Texts("version: ü", "help", Path("/x/\udcff/llama-fit-params"), "usage")
    assert unpack(pack(texts)) == texts
    assert unpack(pack(Texts("", ""))) == Texts("", "")


def test_a_fit_params_that_fails_is_none(tmp_path: Path) -> None:
    build = install(tmp_path / "b", fit=True)
    (tmp_path / "b" / "llama-fit-params").write_text("#!/bin/sh\nexit 3\n", encoding="utf-8")
    assert ProbeCache().get(build).dry_run is None
    (tmp_path / "b" / "llama-fit-params").chmod(0o644)
    assert fit_params(build) is None


# --- builds that cannot be asked ---------------------------------------------------------------------------------


SILENT = '#!/bin/sh\necho "$1" >> "$0.calls"\nexec sleep 600\n'


def broken(directory: Path, text: str) -> Build:
    build = install(directory)
    build.server.write_text(text, encoding="utf-8")
    return build


def test_a_slow_failure_is_remembered_for_a_while(tmp_path: Path) -> None:
    build, clock = broken(tmp_path / "b", SILENT), Clock()
    cache = ProbeCache(time_limit_s=1.0, clock=clock)
    with pytest.raises(LlmError, match=r"within 1 s") as first:
        cache.get(build)
    assert calls(build) == ALL
    with pytest.raises(LlmError) as again:
        cache.get(build)
    assert again.value is first.value
    assert cache.ask_ahead(build).exception(0) is first.value
    assert calls(build) == []

    with pytest.raises(LlmError):
        cache.get(build, again=True)  # somebody means this one
    assert calls(build) == ALL
    clock.ahead_s = probe_cache.FAILURE_KEPT_S + 1
    with pytest.raises(LlmError):
        cache.get(build)
    assert calls(build) == ALL
    (build.server.parent / "libllama.so.0").write_bytes(b"another build")
    with pytest.raises(LlmError):
        cache.get(build)
    assert calls(build) == ALL


def test_a_build_that_answers_again_is_not_held_to_its_failure(tmp_path: Path) -> None:
    build = broken(tmp_path / "b", '#!/bin/sh\n[ -e "$0.ok" ] || exec sleep 600\n' + SERVER)
    cache = ProbeCache(time_limit_s=2.0)
    with pytest.raises(LlmError):
        cache.get(build)
    put(build, "ok", "")
    with pytest.raises(LlmError):
        cache.get(build)
    assert cache.get(build, again=True) == cache.get(build)


def test_a_failure_that_comes_at_once_is_found_anew(tmp_path: Path) -> None:
    """Its cause may be gone: a library that was missing was installed."""
    build = broken(tmp_path / "b", '#!/bin/sh\necho "$1" >> "$0.calls"\nexit 3\n')
    cache = ProbeCache()
    for _ in range(2):
        with pytest.raises(LlmError, match="exit status 3"):
            cache.get(build)
        assert calls(build) == ALL


def test_a_list_of_devices_that_hangs_is_remembered_too(tmp_path: Path, store: Store) -> None:
    text = SERVER.replace("--list-devices)", '--list-devices) [ -e "$0.hang" ] && exec sleep 600')
    build, clock = broken(tmp_path / "b", text), Clock()
    put(build, "hang", "")
    cache = ProbeCache(time_limit_s=2.0, store=lambda: store, clock=clock)
    assert cache.get(build).backend is cache.get(build).backend is Backend.UNKNOWN
    assert calls(build) == ALL
    Path(f"{build.server}.hang").unlink()
    assert cache.get(build).backend is Backend.UNKNOWN
    assert cache.get(build, again=True).backend is Backend.CPU
    assert calls(build) == ["--list-devices"]


def test_no_build_waits_for_another(tmp_path: Path) -> None:
    good, cache = install(tmp_path / "good"), ProbeCache()
    gate = Gate(
        tmp_path / "slow" / "llama-server",
        'echo "version: 7 (abc)"',
        first='case $1 in --help) echo "--model FNAME   model"; exit;; --list-devices) exit 1;; esac',
    )
    slow = Build(gate.program, (), "test", locked=False)
    asked = cache.ask_ahead(slow)
    gate.wait_for_one()
    assert cache.get(good).backend is Backend.CPU
    assert cache.ask_ahead(slow) is asked  # once is enough
    assert not asked.done()
    gate.let_go()
    assert asked.result(DEADLINE_S).version == "7 (abc)"
    assert gate.passed() == 1


def test_a_file_that_is_gone_is_told_ahead_as_ever(tmp_path: Path) -> None:
    build = Build(tmp_path / "none" / "llama-server", (), "test", locked=False)
    with pytest.raises(LlmError) as caught:
        ProbeCache().ask_ahead(build).result(DEADLINE_S)
    assert caught.value.code is ErrorCode.ENGINE_UNUSABLE


# --- digests -------------------------------------------------------------------------------------------------------


def test_the_digest_tells_contents_and_nothing_else(tmp_path: Path, store: Store) -> None:
    one, two = install(tmp_path / "one"), install(tmp_path / "two")
    for directory in ("one", "two"):
        (tmp_path / directory / "libllama.so.0.6.0").write_bytes(b"library")
        (tmp_path / directory / "notes.txt").write_text(directory)
    digest = binaries_digest(one, store)
    assert digest.startswith("e1-")
    assert binaries_digest(two, store) == digest
    # A wheel gets the links of its libraries later.
    (tmp_path / "two" / "libllama.so").symlink_to("libllama.so.0.6.0")
    assert binaries_digest(two, store) == digest
    (tmp_path / "two" / "libllama.so.0.6.0").write_bytes(b"another")
    assert binaries_digest(two, store) != digest
    (tmp_path / "one" / "llama-server").write_text("#!/bin/sh\n", encoding="utf-8")
    assert binaries_digest(one, store) != digest


def test_files_are_read_once(tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    build = install(tmp_path / "b")
    (tmp_path / "b" / "libllama.so").write_bytes(b"library")
    digest = binaries_digest(build, store)

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("read again")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", fail)
        assert binaries_digest(build, store) == digest
        assert len(store.rows("SELECT path FROM engine_files")) == 2


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path, store: Store) -> None:
    build = install(tmp_path / "b")
    (tmp_path / "b" / "libllama.so").mkdir()
    with pytest.raises(LlmError) as caught:
        binaries_digest(build, store)
    assert caught.value.code is ErrorCode.ENGINE_UNUSABLE
    assert "libllama.so" in caught.value.message


def test_libraries_of_a_distribution_are_found_by_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Debian lays them out: server in /usr/bin, libraries and backends below /usr/lib/TRIPLET."""
    from lllm3090d.engines import binaries

    prefix = tmp_path / "usr"
    monkeypatch.setattr(binaries, "_is_shared", lambda directory: directory == prefix / "bin")
    build = install(prefix / "bin", fit=True)
    lib = prefix / "lib" / "x86_64-linux-gnu"
    files = [
        lib / "libllama.so.0.7.0",
        lib / "libggml.so.0",
        lib / "libmtmd.so.0",
        lib / "llama" / "libllama-server-impl.so",
        lib / "ggml" / "backends0" / "libggml-vulkan.so",
    ]
    for file in [*files, lib / "libc.so.6", prefix / "bin" / "unrelated.so"]:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"library")
    assert libraries(Build(build.server, (), "test", locked=False)) == set(files)
    assert has_gpu_library(Build(build.server, (), "test", locked=False))
    names = {row[0] for row in fingerprint(Build(build.server, (), "test", locked=False))}
    assert names == {*map(str, files), str(build.server), str(prefix / "bin" / "llama-fit-params")}
