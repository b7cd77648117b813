"""The pictures of the manual show what the program shows now. ``make pictures`` makes them anew."""

from __future__ import annotations

from pathlib import Path

import pytest
from manual.pictures import DIRECTORY, PICTURES, shown, stale_ones, text_of

pytestmark = pytest.mark.system


def test_pictures_are_true(tmp_path: Path) -> None:
    """And a picture of something else is found."""
    made = shown(tmp_path)
    assert stale_ones(made) == []
    (first, *_) = PICTURES
    assert stale_ones(made | {first.name: made[first.name].replace("weights", "wights")}) == [first.name]
    assert {path.stem for path in DIRECTORY.glob("*.svg")} == {picture.name for picture in PICTURES}
    for picture in PICTURES:
        svg = picture.file.read_text(encoding="utf-8")
        assert f"lllm3090ctl {picture.command}" in text_of(svg)
        assert "http" not in svg.replace("http://www.w3.org/2000/svg", "").replace("://127.0.0.1", "")
