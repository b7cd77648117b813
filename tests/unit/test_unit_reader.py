"""Units read back with real files and an engine that answers: what comes of them, and of what is in the way."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from lllm3090d.bus.unit_status import UnitStatus
from lllm3090d.gpus.readings import Card, CardKind
from lllm3090d.planning.planner import CacheType, PlanPolicy
from lllm3090d.serving import unit_reader
from lllm3090d.serving.adoption import NO_RECORD, Found, Rebuilt
from lllm3090d.serving.lookup import Lookup
from lllm3090d.serving.model_files import file_note, file_notes
from lllm3090d.serving.observation import HOST
from lllm3090d.serving.unit_reader import UnitReader
from lllm3090d.serving.unit_spec import Record
from lllm3090d.settings import Settings
from tests.fakes.engine import install_fake_engine
from tests.fakes.gguf_files import write_gguf, write_llama, write_split
from tests.unit.test_adoption import record, unit

pytestmark = pytest.mark.unit

POLICY = PlanPolicy(CacheType.Q8_0, 2048, 512, 8, 1024, 1024)
HOST_CARD = Card(CardKind.CPU, HOST, "host memory", None)


@dataclass
class Desk:
    """A reader, and the folder of everything."""

    folder: Path
    lookup: Lookup
    reader: UnitReader

    def unit(self, *words: str, model: Path | None = None, **changes: Any) -> UnitStatus:
        """A unit of the stand-in engine without a record."""
        argv: tuple[str, ...] = (
            str(self.folder / "engine" / "llama-server"),
            "--host",
            str(self.folder / "e.sock"),
        )
        if model is not None:
            argv += ("-m", str(model))
        return replace(unit("a", text=""), argv=(*argv, *words), **changes)

    def read(self, *words: str, model: Path | None = None, **changes: Any) -> Rebuilt:
        return self.reader.read(self.unit(*words, model=model, **changes))


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    install_fake_engine(tmp_path / "engine")
    settings = Settings(
        models_dir=tmp_path / "models", state_dir=tmp_path / "state", llama_dir=tmp_path / "engine"
    )
    lookup = Lookup(lambda: settings)
    yield Desk(tmp_path, lookup, UnitReader(lookup, lambda: (HOST_CARD,), lambda: POLICY))
    asyncio.run(lookup.close())


def made(found: Rebuilt) -> Record:
    assert found.record is not None, found.why_not
    return found.record


def test_a_model_wherever_it_lies_is_priced(desk: Desk) -> None:
    path = write_llama(desk.folder / "elsewhere" / "m.gguf")
    found = made(desk.read("-c", "1024", "-np", "1", "-a", "small", model=path))
    assert (found.name, found.path, found.shards) == ("small", path, (path,))
    assert found.size_bytes == path.stat().st_size
    assert found.context_tokens == 1024
    (share,) = found.shares(HOST)
    assert share.where == HOST and share.bytes > path.stat().st_size
    twice = made(desk.read("-c", "2048", "-np", "1", model=path))
    assert twice.shares(HOST)[0].bytes > share.bytes


def test_all_files_of_a_model_in_parts_are_found_and_none_may_be_missing(desk: Desk) -> None:
    shards = write_split(desk.folder, "m", count=3)
    found = made(desk.read(model=shards[0]))
    assert found.shards == tuple(shards)
    assert found.size_bytes == sum(each.stat().st_size for each in shards)
    shards[1].unlink()
    assert "missing" in desk.read(model=shards[0]).why_not


def test_a_model_that_is_gone_damaged_or_without_a_rule_is_not_understood(desk: Desk) -> None:
    gone = desk.folder / "gone.gguf"
    assert desk.read(model=gone).why_not == f"its file {gone} cannot be read: No such file or directory"
    damaged = desk.folder / "damaged.gguf"
    damaged.write_bytes(b"<html>")
    assert desk.read(model=damaged).record is None
    unknown = write_gguf(desk.folder / "unknown.gguf", {"general.architecture": "newest"}, [])
    assert desk.read(model=unknown).record is None
    path = write_llama(desk.folder / "m.gguf")
    assert "gone.gguf" in desk.read("--mmproj", str(gone), model=path).why_not
    assert "gone.gguf" in desk.read("-md", str(gone), model=path).why_not
    for found in (desk.read("-c", "many", model=path), desk.read("--no-such-option", model=path)):
        assert found.record is None and found.why_not


@pytest.mark.parametrize(
    "words",
    [
        ("--rope-scaling", "yarn", "--rope-scale", "nan"),
        ("--rope-scaling", "yarn", "--rope-scale", "inf"),
        ("--rope-scaling", "yarn", "--rope-scale", "1e308", "--yarn-orig-ctx", "999999999"),
        ("--rope-scaling", "yarn", "--rope-scale", "2", "--yarn-orig-ctx", "-5"),
        ("-c", "9" * 5000),
        ("--alias", "x" * 5000),
        ("--ubatch-size", "-7"),
    ],
)
def test_figures_that_no_launch_has_are_the_units_own_trouble(desk: Desk, words: tuple[str, ...]) -> None:
    found = desk.read(*words, model=write_llama(desk.folder / "m.gguf"))
    assert found.record is None and 0 < len(found.why_not) < 400


@pytest.mark.parametrize(
    "error", [OverflowError("o"), KeyError("k"), TypeError("t"), OSError(5, "e"), RecursionError()]
)
def test_whatever_goes_wrong_with_a_unit_is_told_of_it(
    desk: Desk, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: UnitStatus) -> Record:
        raise error

    monkeypatch.setattr(desk.reader, "_record", fail)
    assert desk.read().why_not.startswith("its command line cannot be taken: ")


def test_only_a_few_are_read_at_once(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """And those that come after wait their turn, within the same bound."""
    lock, now, most = threading.Lock(), 0, 0
    full = threading.Event()

    def read(_: UnitStatus) -> Rebuilt:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
            if now == unit_reader.MOST_AT_ONCE:
                full.set()
        assert full.wait(30)
        with lock:
            now -= 1
        return Rebuilt(None, "read")

    monkeypatch.setattr(desk.reader, "read", read)
    units = [replace(desk.unit(), name=f"lllm3090-{number}.service") for number in range(12)]
    found = asyncio.run(desk.reader.rebuild(units))
    assert [each.why_not for each in found.values()] == ["read"] * 12
    assert most == unit_reader.MOST_AT_ONCE


def test_an_engine_that_was_removed_is_read_by_the_options_of_the_next(desk: Desk) -> None:
    path = write_llama(desk.folder / "m.gguf")
    lost = desk.unit("-c", "1024", model=path)
    lost = replace(lost, argv=("/nowhere/llama-server", *lost.argv[1:]))
    found = made(desk.reader.read(lost))
    assert (found.context_tokens, found.engine_server) == (1024, "/nowhere/llama-server")
    (desk.folder / "engine" / "llama-server").unlink()
    assert desk.reader.read(lost).record is None


def test_only_those_that_need_it_are_read(desk: Desk) -> None:
    path = write_llama(desk.folder / "m.gguf")
    whole, sleep = unit("b"), replace(unit("c", text="garbage"), argv=("/bin/sleep", "1"))
    found = asyncio.run(desk.reader.rebuild([whole, sleep, desk.unit(model=path)]))
    assert set(found) == {sleep.name, unit("a").name}
    assert found[sleep.name].why_not == "it runs /bin/sleep, which is no llama-server"
    assert made(found[unit("a").name]).path == path


def test_what_hangs_is_waited_for_within_bounds(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a network mount that is dead: the daemon's start does not hang with it."""
    release = threading.Event()

    def hang(_: UnitStatus) -> Rebuilt:
        release.wait(30)
        return Rebuilt(None)

    monkeypatch.setattr(unit_reader, "READING_TIME_S", 0.05)
    monkeypatch.setattr(desk.reader, "read", hang)

    async def main() -> Rebuilt:
        try:
            return (await desk.reader.rebuild([desk.unit()]))[unit("a").name]
        finally:
            release.set()

    assert asyncio.run(main()).why_not == unit_reader.TOO_SLOW


# --- whether its files are as they were -----------------------------------------------------------------------------


def found_with(path: Path, **changes: Any) -> Found:
    known = record("qwen", "a").model_copy(
        update={"path": path, "shards": (path,), "size_bytes": path.stat().st_size}
    )
    return Found(replace(unit("a", started_s=0.0), **changes), known, NO_RECORD)


def test_a_file_that_is_as_it_was_is_not_worth_a_word(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"as it was")
    assert file_note(found_with(path)) == ""
    assert asyncio.run(file_notes([found_with(path)])) == {}


def test_a_file_that_was_removed_replaced_or_changed_is(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"as it was")
    found = found_with(path, exec_main_start_monotonic_s=time.monotonic() - 60)
    now = time.time()
    os.utime(path, (now, now - 30))
    assert file_note(found).startswith(f"{path} was changed after")
    os.utime(path, (now, now - 3600))
    assert file_note(found) == ""
    path.write_bytes(b"another one")
    os.utime(path, (now, now - 3600))
    assert "another file" in file_note(found)
    path.unlink()
    assert "cannot be read any more" in file_note(found)
    assert set(asyncio.run(file_notes([found]))) == {"a"}
    # Of what has ended nobody needs to know.
    assert asyncio.run(file_notes([replace(found, status=unit("a", "failed"))])) == {}
