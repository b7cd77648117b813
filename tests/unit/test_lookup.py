"""Looking up: what is remembered, what is watched, what is said of a model that cannot be loaded."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.serving.lookup import Lookup
from lllm3090d.settings import Settings
from lllm3090d.store import FILE_NAME, Store
from tests.fakes.gguf_files import write_llama, write_split

pytestmark = pytest.mark.unit

DEADLINE_S = 60.0


def settings(folder: Path, models: str = "models") -> Settings:
    (folder / models).mkdir(exist_ok=True)
    return Settings(models_dir=folder / models, state_dir=folder / "state", aliases={"x": "A"})


def cached_paths(folder: Path) -> set[str]:
    store = Store(folder / "state" / FILE_NAME)
    rows = store.rows("SELECT path FROM headers")
    store.close()
    return {Path(path.decode()).parent.name for (path,) in rows}


def test_headers_are_kept_for_the_next_start(tmp_path: Path) -> None:
    chosen = settings(tmp_path)
    write_llama(chosen.models_dir / "A" / "m.gguf")
    lookup = Lookup(lambda: chosen)
    checkpoint = lookup.library().resolve("x")
    assert checkpoint.name == "A"
    assert lookup.facts.get(checkpoint.shards).architecture == "llama"
    asyncio.run(lookup.close())
    assert cached_paths(tmp_path) == {"A"}


def test_a_survey_is_kept_while_the_directory_is_watched_and_settings_stay(tmp_path: Path) -> None:
    chosen = settings(tmp_path)
    write_llama(chosen.models_dir / "A" / "m.gguf")

    async def main() -> None:
        nonlocal chosen
        lookup = Lookup(lambda: chosen)
        assert lookup.library().survey() is not lookup.library().survey()
        lookup.watch()
        assert lookup._watch is not None
        async with asyncio.timeout(DEADLINE_S):
            await lookup._watch.settled()
        survey = lookup.library().survey()
        assert lookup.library().survey() is survey
        lookup.watch()  # of the same directory: nothing happens
        assert lookup.library().survey() is survey
        chosen = settings(tmp_path, "elsewhere")
        assert lookup.library().scan() == ()
        lookup.watch()
        assert lookup._watch.models_dir == chosen.models_dir
        await lookup.close()

    asyncio.run(main())


def test_what_cannot_be_loaded_is_refused_before_anything_is_priced(tmp_path: Path) -> None:
    chosen = settings(tmp_path)
    shards = write_split(chosen.models_dir / "A", "m", count=2)
    shards[1].unlink()
    lookup = Lookup(lambda: chosen)
    with pytest.raises(LlmError) as caught:
        asyncio.run(lookup.find("x"))
    assert caught.value.code is ErrorCode.INCOMPLETE_CHECKPOINT
    asyncio.run(lookup.close())


def test_without_a_state_directory_it_works_all_the_same(tmp_path: Path) -> None:
    chosen = settings(tmp_path)
    (tmp_path / "state").write_text("in the way")
    write_llama(chosen.models_dir / "A" / "m.gguf")
    lookup = Lookup(lambda: chosen)
    assert lookup.facts.get(lookup.library().resolve("A").shards).architecture == "llama"
    asyncio.run(lookup.close())
