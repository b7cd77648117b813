"""The watch over the models directory, with the kernel's own inotify."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from inotify_simple import INotify

from lllm3090d.checkpoints import watch as watch_module
from lllm3090d.checkpoints.library import Library
from lllm3090d.checkpoints.watch import LibraryWatch
from lllm3090d.errors import ErrorCode, LlmError
from tests.fakes.gguf_files import write_llama

pytestmark = pytest.mark.unit

DEADLINE_S = 60.0


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


class Limit:
    """A limit of the kernel, which cannot be changed for one process: reached until it is raised."""

    def __init__(self, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached = True
        self.attempts = 0
        real = INotify.add_watch

        def add_watch(inotify: INotify, path: Path, mask: int) -> int:
            if self.reached and Path(path).name == "A":
                self.attempts += 1
                raise OSError(number, os.strerror(number))
            added: int = real(inotify, path, mask)
            return added

        def make(*arguments: Any, **options: Any) -> INotify:
            if self.reached:
                self.attempts += 1
                raise OSError(number, os.strerror(number))
            return INotify(*arguments, **options)

        if number == errno.ENOSPC:
            monkeypatch.setattr(INotify, "add_watch", add_watch)
        else:
            monkeypatch.setattr(watch_module, "INotify", make)


async def problem(watched: Watched, present: bool = True) -> LlmError | None:
    """What the watch says of itself, once there is something to say, or nothing any more."""
    async with asyncio.timeout(DEADLINE_S):
        while (watched.watch.problem() is not None) is not present:  # noqa: ASYNC110 - being asked is the point
            await asyncio.sleep(0.01)
    return watched.watch.problem()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EMFILE])
def test_a_limit_that_is_reached_and_raised(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_llama(tmp_path / "A" / "m.gguf")
    monkeypatch.setattr(watch_module, "RETRY_S", 0.01)
    limit = Limit(number, monkeypatch)

    async def test(watched: Watched) -> None:
        error = await problem(watched)
        assert error is not None
        assert error.code is ErrorCode.LIBRARY_UNWATCHED
        assert "searched at each request" in error.message
        assert "sudo sysctl fs.inotify.max_user_" in (error.hint or "")
        assert watched.watch.generation() is None
        assert watched.names() == ["A"]
        write_llama(tmp_path / "B" / "m.gguf")
        assert watched.names() == ["A", "B"]
        async with asyncio.timeout(DEADLINE_S):  # while it is asked for, it is tried
            while limit.attempts < 3:
                watched.names()
                await asyncio.sleep(0.01)
        limit.reached = False
        assert await problem(watched, present=False) is None
        survey = watched.library.survey()
        assert watched.library.survey() is survey
        await watched.sees(lambda: write_llama(tmp_path / "C" / "m.gguf"))
        assert watched.names() == ["A", "B", "C"]
        # What happened once may happen again.
        limit.reached = True
        write_llama(tmp_path / "D" / "m.gguf")
        assert await problem(watched) is not None
        assert watched.names() == ["A", "B", "C", "D"]

    with caplog.at_level(logging.INFO):
        run(tmp_path, test)
    assert caplog.text.count("is reached; it is searched at each request instead") == 2
    assert caplog.text.count("is watched again") == 1
    assert ("max_user_watches" if number == errno.ENOSPC else "max_user_instances") in caplog.text


def test_what_nobody_asks_for_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no sooner than the interval allows, which grows."""
    slept: list[float] = []
    real_sleep = asyncio.sleep

    async def sleep(seconds: float) -> None:
        if seconds >= 2:
            slept.append(seconds)
        await real_sleep(0 if seconds >= 2 else seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(watch_module, "RETRY_MOST_S", 9.0)
    limit = Limit(errno.EMFILE, monkeypatch)

    async def test(watched: Watched) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while len(slept) < 1:
                await real_sleep(0.01)
            for _ in range(100):
                await real_sleep(0)
            assert (limit.attempts, slept) == (1, [2.0])
            while len(slept) < 5:
                watched.names()
                await real_sleep(0.01)
        assert slept == [2.0, 4.0, 8.0, 9.0, 9.0]
        assert limit.attempts == 5

    run(tmp_path, test)


def test_the_kernels_own_limit(tmp_path: Path) -> None:
    """In a user namespace of its own, whose limits are its own."""
    (tmp_path / "A").mkdir()
    script = f"""
import asyncio
from pathlib import Path
from lllm3090d.checkpoints import watch
watch.RETRY_S = 0.01
limit = Path("/proc/sys/fs/inotify/max_user_watches")
before = limit.read_text()
limit.write_text("1")

async def main():
    library = watch.LibraryWatch(Path({str(tmp_path)!r}))
    library.start()
    async with asyncio.timeout({DEADLINE_S}):
        while library.problem() is None:
            await asyncio.sleep(0.01)
        print(library.problem().message)
        limit.write_text(before)
        while library.problem() is not None:
            await asyncio.sleep(0.01)
        print(await library.settled())
    await library.close()

asyncio.run(main())
"""
    program = ("unshare", "--user", "--map-root-user", sys.executable, "-c", script)
    done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=60)
    if "PermissionError" in done.stderr or "unshare" in done.stderr:
        pytest.skip("a namespace with limits of its own cannot be made here")
    assert done.returncode == 0, done.stderr
    assert "max_user_watches is reached" in done.stdout
    assert done.stdout.splitlines()[-1] == "1"


def test_closing_while_it_is_set_up_leaves_nothing_open(tmp_path: Path) -> None:
    descriptors = Path("/proc/self/fd")
    gc.collect()  # what other tests have left is not closed meanwhile
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
