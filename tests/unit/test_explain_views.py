"""A price beside the engine's figures and the measurement."""

from __future__ import annotations

import pytest

from lllm3090d.engines.capabilities import Backend
from lllm3090d.engines.memory_log import MemoryLog, read_memory_log
from lllm3090d.planning import calibration
from lllm3090d.planning.calibration import Calibration, CalibrationScope, Seen
from lllm3090d.planning.units import MIB
from lllm3090d.serving.explain_views import PART_OF, SEVERAL_CARDS, SILENT, TAKEN_LATER, Learnt, explain_view
from lllm3090d.serving.ledger import Share
from lllm3090d.serving.observation import HOST
from lllm3090d.wire_cards import ExplainedMemoryView
from tests.fakes.card_scenes import CARD, LOG, QWEN, Desk, explained, instance, item, on_host
from tests.unit.test_memory_log import TABLE

pytestmark = pytest.mark.unit

NOTHING = Learnt(None)


def parts(memory: ExplainedMemoryView) -> dict[str, tuple[float, float | None]]:
    """Quoted and told, MiB."""
    return {
        each.part: (each.quoted_bytes / MIB, None if each.engine_bytes is None else each.engine_bytes / MIB)
        for each in memory.parts
    }


def test_price_engine_and_measurement_of_each_memory() -> None:
    view = explained()
    card, host = view.memories
    assert (card.where, card.name, host.where) == ("GPU-1", "NVIDIA GeForce RTX 3090", "host")
    assert parts(card) == {
        "model": (9000, 8998.25),
        "context": (1500, 1500),
        "compute": (600, 571.25),
    }
    assert parts(host)["model"] == (300, 299.5)
    assert parts(host)["output"] == (0, 1)
    assert [(each.name, each.part) for each in card.items] == [
        ("weights", "model"),
        ("kv cache", "context"),
        ("compute", "compute"),
        ("runtime", None),
        ("slack", None),
    ]
    assert (card.reserved_bytes, card.measured_bytes) == (11868 * MIB, 11900 * MIB)
    assert (card.held_bytes, card.charged_bytes) == (11700 * MIB, 11900 * MIB)
    assert (card.deviation_bytes, card.deviation) == (32 * MIB, 0.0027)
    assert view.engine_note == ""


def test_what_is_taken_with_conversations_is_no_deviation() -> None:
    _, host = explained().memories
    assert (host.reserved_bytes, host.comparable_bytes) == (2648 * MIB, 600 * MIB)
    assert (host.deviation_bytes, host.deviation) == (50 * MIB, 0.0833)
    assert TAKEN_LATER == calibration.TAKEN_LATER  # the same as what is learnt goes by


def test_a_silent_engine_is_told_how_to_make_speak() -> None:
    view = explained("srv  llama_server: model loaded\n")
    assert view.engine_note == SILENT.replace("NAME", "Qwen3.8-27B")
    assert "lllm3090ctl load Qwen3.8-27B -- -lv 4" in view.engine_note
    assert [memory.parts for memory in view.memories] == [(), ()]
    assert view.engine == ()


def test_a_summary_is_called_one() -> None:
    view = explained(TABLE)
    assert "rounded down" in view.engine_note
    assert parts(view.memories[0])["model"] == (9000, 9000)
    assert "output" not in parts(view.memories[0])


def test_a_log_that_cannot_be_read_is_told() -> None:
    desk = Desk()
    view = explain_view(
        desk.instances["q1"], desk.ledger, desk.observation, MemoryLog(), NOTHING, log_note="No journal."
    )
    assert view.engine_note == "No journal."


def test_where_host_memory_is_the_card_all_buffers_are_there() -> None:
    desk = on_host()
    log = read_memory_log(LOG.splitlines())
    (memory,) = explain_view(desk.instances["q1"], desk.ledger, desk.observation, log, NOTHING).memories
    assert memory.where == HOST
    assert parts(memory)["model"] == (9300, 8998.25 + 299.5)
    assert (memory.measured_bytes, memory.deviation_bytes) == (None, None)
    assert memory.held_bytes == 5000 * MIB


def test_on_several_cards_no_device_is_taken_for_a_card() -> None:
    desk = Desk()
    halves = [Share("GPU-1", (item("weights", 500),)), Share("GPU-2", (item("weights", 600),))]
    desk.ledger.hold("d1", "divided", halves)
    log = read_memory_log(LOG.splitlines())
    divided = instance("divided", "d1", (item("weights", 1100),))
    view = explain_view(divided, desk.ledger, desk.observation, log, NOTHING)
    assert [(memory.where, memory.parts) for memory in view.memories] == [("GPU-1", ()), ("GPU-2", ())]
    assert view.engine_note == SEVERAL_CARDS
    assert len(view.engine) == len(log.buffers)


def test_of_a_failed_model_the_plan_is_told() -> None:
    desk = Desk()
    view = explain_view(instance("dead", "x9", QWEN), desk.ledger, desk.observation, MemoryLog(), NOTHING)
    assert [(m.where, m.reserved_bytes // MIB, m.measured_bytes) for m in view.memories] == [
        (CARD.uuid, 11868, None),
        (HOST, 2648, None),
    ]


def test_what_was_learnt() -> None:
    scope = CalibrationScope("f", "d", Backend.CUDA, CARD.uuid)
    desk = Desk()

    def told(known: Calibration | None, note: str = "") -> tuple[object, str]:
        learnt = Learnt(known, "this", note)
        view = explain_view(desk.instances["q1"], desk.ledger, desk.observation, MemoryLog(), learnt)
        return view.calibration, view.calibration_note

    assert told(None, "No store.") == (None, "No store.")
    assert told(Calibration(scope)) == (None, "")
    seen = Seen("this", 11868 * MIB, peak_bytes=11900 * MIB, probe_tokens=512)
    view, _ = told(Calibration(scope, (seen, Seen("that", 1, peak_bytes=1))))
    assert view is not None
    assert view.model_dump() == {  # type: ignore[attr-defined]  # a wire model, whichever
        "peak_bytes": 11900 * MIB,
        "excess_bytes": max(seen.excess_bytes, Seen("that", 1, peak_bytes=1).excess_bytes),
        "launches": 2,
    }


def test_every_item_of_a_price_that_engines_tell_of_has_a_name_that_prices_have() -> None:
    """A renamed item would lose its figure without anybody noticing."""
    from pathlib import Path

    import lllm3090d.planning

    folder = Path(lllm3090d.planning.__file__).parent
    sources = "".join(path.read_text(encoding="utf-8") for path in folder.glob("*.py"))
    for name in (*PART_OF, *TAKEN_LATER):
        assert f'"{name}"' in sources, name
