"""The watch over the models directory, with the kernel's own inotify."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from inotify_simple import INotify

from lllm3090d.checkpoints import watch as watch_module
from lllm3090d.checkpoints.library import Library
from lllm3090d.checkpoints.watch import LibraryWatch
from tests.fakes.gguf_files import write_llama

pytestmark = pytest.mark.unit

DEADLINE_S = 20.0


@pytest.fixture(autouse=True)
def short_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "QUIET_S", 0.05)
    monkeypatch.setattr(watch_module, "PATIENCE_S", 0.5)


class Watched:
    """A watch, and the library that relies on it."""

    def __init__(self, models: Path) -> None:
        self.reported = asyncio.Event()
        self.watch = LibraryWatch(models, self.reported.set)
        self.library = Library(models, {}, changes=self.watch.generation)
        self.watch.start()

    async def settled(self) -> int:
        """Wait until the watch vouches for something."""
        async with asyncio.timeout(DEADLINE_S):
            return await self.watch.settled()

    async def sees(self, change: Callable[[], object]) -> None:
        """A change is reported, and from then on another generation holds."""
        before = await self.settled()
        self.reported.clear()
        change()
        async with asyncio.timeout(DEADLINE_S):
            await self.reported.wait()
        assert await self.settled() != before

    async def does_not_see(self, change: Callable[[], object], witness: Callable[[], object]) -> None:
        """Nothing is reported of a change; the witness, which comes later, is."""
        before = await self.settled()
        change()
        for _ in range(20):  # the loop has had every opportunity to read what the kernel has
            await asyncio.sleep(0)
        assert self.watch.generation() == before
        await self.sees(witness)

    def names(self) -> list[str]:
        return [checkpoint.name for checkpoint in self.library.scan()]


def run(models: Path, test: Callable[[Watched], Awaitable[None]]) -> None:
    async def main() -> None:
        watched = Watched(models)
        try:
            await test(watched)
        finally:
            await watched.watch.close()
        assert watched.watch.generation() is None

    asyncio.run(main())


def test_a_survey_is_kept_until_something_changes(tmp_path: Path) -> None:
    first = write_llama(tmp_path / "A" / "m.gguf")

    async def test(watched: Watched) -> None:
        await watched.settled()
        survey = watched.library.survey()
        assert watched.library.survey() is survey
        await watched.sees(lambda: write_llama(tmp_path / "A" / "n.gguf"))
        assert watched.names() == ["A/m", "A/n"]
        await watched.sees(first.unlink)
        assert watched.names() == ["A"]
        await watched.sees(lambda: (tmp_path / "A").rename(tmp_path / "B"))
        assert watched.names() == ["B"]
        await watched.sees(lambda: os.truncate(tmp_path / "B" / "n.gguf", 100))
        assert watched.library.survey().checkpoints[0].problem is not None
        await watched.sees(lambda: (tmp_path / "B" / "n.gguf").chmod(0o600))

    run(tmp_path, test)


def test_new_directories_are_watched_too(tmp_path: Path) -> None:
    async def test(watched: Watched) -> None:
        await watched.sees(lambda: (tmp_path / "a" / "b").mkdir(parents=True))
        await watched.sees(lambda: write_llama(tmp_path / "a" / "b" / "m.gguf"))
        assert watched.names() == ["a/b"]
        await watched.sees(lambda: write_llama(tmp_path / "a" / "b" / "c" / "m.gguf"))
        assert watched.names() == ["a/b", "a/b/c"]

    run(tmp_path, test)


def test_before_a_change_is_reported_nothing_old_is_served(tmp_path: Path) -> None:
    write_llama(tmp_path / "A" / "m.gguf")

    async def test(watched: Watched) -> None:
        await watched.settled()
        assert watched.names() == ["A"]
        write_llama(tmp_path / "B" / "m.gguf")  # the loop has not run since
        assert watched.names() == ["A", "B"]

    run(tmp_path, test)


def test_a_missing_directory_that_appears(tmp_path: Path) -> None:
    models = tmp_path / "later" / "models"

    async def test(watched: Watched) -> None:
        await watched.sees(models.parent.mkdir)
        await watched.sees(models.mkdir)
        await watched.sees(lambda: write_llama(models / "A" / "m.gguf"))
        assert watched.names() == ["A"]

    run(models, test)


def test_a_directory_that_is_replaced(tmp_path: Path) -> None:
    models, other = tmp_path / "models", tmp_path / "other"
    write_llama(models / "A" / "m.gguf")
    write_llama(other / "B" / "m.gguf")

    def replace() -> None:
        models.rename(tmp_path / "old")
        other.rename(models)

    async def test(watched: Watched) -> None:
        await watched.sees(replace)
        assert watched.names() == ["B"]
        await watched.sees(lambda: write_llama(models / "C" / "m.gguf"))
        assert watched.names() == ["B", "C"]

    run(models, test)


def test_a_link_to_the_directory_that_is_turned(tmp_path: Path) -> None:
    models, here, there = tmp_path / "models", tmp_path / "here", tmp_path / "there"
    write_llama(here / "A" / "m.gguf")
    write_llama(there / "B" / "m.gguf")
    models.symlink_to(here)

    def turn() -> None:
        (tmp_path / "new").symlink_to(there)
        (tmp_path / "new").rename(models)

    async def test(watched: Watched) -> None:
        await watched.sees(lambda: write_llama(here / "C" / "m.gguf"))
        assert watched.names() == ["A", "C"]
        await watched.sees(turn)
        assert watched.names() == ["B"]
        await watched.sees(lambda: there.rename(tmp_path / "gone"))

    run(models, test)


def test_what_happens_beside_the_models_is_nobodys_business(tmp_path: Path) -> None:
    models = tmp_path / "models"
    models.mkdir()

    async def test(watched: Watched) -> None:
        await watched.does_not_see(
            lambda: (tmp_path / "unrelated").write_text("x"), lambda: write_llama(models / "m.gguf")
        )

    run(models, test)


def test_reading_a_model_is_no_change(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "A" / "m.gguf")

    async def test(watched: Watched) -> None:
        await watched.does_not_see(path.read_bytes, lambda: write_llama(tmp_path / "B" / "m.gguf"))

    run(tmp_path, test)


def test_changes_that_do_not_end_are_reported_all_the_same(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "A" / "m.gguf")

    async def test(watched: Watched) -> None:
        before = await watched.settled()
        async with asyncio.timeout(DEADLINE_S):
            while not watched.reported.is_set():
                with path.open("ab") as file:
                    file.write(b"\0")
                await asyncio.sleep(0.01)
        assert watched.watch.generation() != before

    run(tmp_path, test)


def test_a_linked_file_that_changes_elsewhere(tmp_path: Path) -> None:
    store = write_llama(tmp_path / "store" / "blob", blocks=1)
    (tmp_path / "models" / "A").mkdir(parents=True)
    (tmp_path / "models" / "A" / "m.gguf").symlink_to(store)

    async def test(watched: Watched) -> None:
        await watched.settled()
        small = watched.library.survey()
        assert watched.library.survey() is small
        write_llama(store, blocks=2)
        assert watched.library.scan()[0].size_bytes == store.stat().st_size > small.checkpoints[0].size_bytes

    run(tmp_path / "models", test)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EMFILE])
def test_a_limit_that_is_reached(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_llama(tmp_path / "A" / "m.gguf")
    real = INotify.add_watch

    def add_watch(self: INotify, path: Path, mask: int) -> int:
        if number == errno.ENOSPC and Path(path).name == "A":
            raise OSError(number, os.strerror(number))
        added: int = real(self, path, mask)
        return added

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(INotify, "add_watch", add_watch)
    if number == errno.EMFILE:
        monkeypatch.setattr(watch_module, "INotify", refuse)

    async def test(watched: Watched) -> None:
        task = watched.watch._task
        assert task is not None
        async with asyncio.timeout(DEADLINE_S):
            await task
        assert watched.watch.generation() is None
        assert watched.names() == ["A"]
        write_llama(tmp_path / "B" / "m.gguf")
        assert watched.names() == ["A", "B"]

    with caplog.at_level(logging.WARNING):
        run(tmp_path, test)
    assert caplog.text.count("is reached; it is searched at each request instead") == 1
    assert ("max_user_watches" if number == errno.ENOSPC else "max_user_instances") in caplog.text


def test_closing_while_it_is_set_up_leaves_nothing_open(tmp_path: Path) -> None:
    descriptors = Path("/proc/self/fd")
    before = len(list(descriptors.iterdir()))

    async def once() -> None:
        watch = LibraryWatch(tmp_path)
        watch.start()
        await asyncio.sleep(0)
        await watch.close()
        await watch.close()

    body: Coroutine[Any, Any, None] = once()
    asyncio.run(body)
    assert len(list(descriptors.iterdir())) == before
