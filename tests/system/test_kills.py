"""The daemon is killed again and again while models load, serve, answer and are unloaded: bench.kills in short."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.kills import MOMENTS, MOVING, Kills, stand_ins

pytestmark = pytest.mark.system
ROUNDS = 2 * len(MOMENTS)
LOAD_S = 1.5


def test_no_engine_and_no_stream_notices_that_the_daemon_dies(tmp_path: Path) -> None:
    with stand_ins(tmp_path, LOAD_S) as service:
        kills = Kills(service, seed=1, words=40, load_s=LOAD_S, import_each_time=False)
        kills.run(ROUNDS)
    assert kills.problems == []
    assert kills.answers >= 2
    assert [each.moment for each in kills.rounds] == [*MOMENTS, *MOMENTS]
    assert {each.states[MOVING] for each in kills.rounds if each.moment == "busy"} <= {"ready", "busy"}
