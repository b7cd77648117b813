"""Foreign units and reconstructed models, as a person and a program see them."""

from __future__ import annotations

import json

import pytest

from lllm3090d import wire
from lllm3090d.wire_cards import ForeignUnitView, HeldView
from tests.fakes.control_server import INSTANCE, STATUS, ControlServer, changed, ctl

pytestmark = pytest.mark.unit

MIB = 1 << 20
WHY = "it carries no record, and it runs /bin/sleep, which is no llama-server"
THING = ForeignUnitView(
    unit="lllm3090-thing\x07.service",
    why=WHY,
    since="2026-11-30T11:20:00Z",
    active_state="active",
    main_pid=99,
    command="/bin/sleep",
    held=(
        HeldView(where="GPU-1", name="card", bytes=2000 * MIB),
        HeldView(where="GPU-2", name="card", bytes=500 * MIB),
        HeldView(where="host", name="host memory", bytes=3 * MIB),
    ),
)
LIGHT = changed(THING, unit="lllm3090-light.service", main_pid=None, held=[THING.held[2].model_dump()])
UNREAD = changed(THING, unit="lllm3090-unread.service", held=[])
REBUILT = changed(
    INSTANCE,
    reconstructed="its record is damaged",
    file_note="/m.gguf cannot be read any more: another start fails",
)


def page(arguments: list[str], **scripts: object) -> str:
    with ControlServer(**scripts) as server:  # type: ignore[arg-type]  # documents of the wire
        done = ctl(server, *arguments)
    assert (done.exit_code, done.stderr) == (0, "")
    return " ".join(done.stdout.split())


def test_ps_shows_what_each_holds_and_why_it_is_left_alone() -> None:
    listing = wire.Instances(instances=(), foreign_units=(THING, LIGHT, UNREAD))
    text = page(["ps"], instances=listing)
    assert "No model is loaded." in text
    assert "lllm3090-thing\\x07.service active 2,500.0 MiB 99" in text
    assert "lllm3090-light.service active 3.0 MiB -" in text
    assert "lllm3090-unread.service active - 99" in text
    assert "systemctl --user stop UNIT" in text
    with ControlServer(instances=listing) as server:
        told = json.loads(ctl(server, "ps", "--json").stdout)
    assert [each["why"] for each in told["foreign_units"]] == [WHY] * 3


def test_without_any_nothing_is_said_of_them() -> None:
    text = page(["ps"], instances=wire.Instances(instances=(INSTANCE,)))
    assert "FOREIGN" not in text and "reconstructed" not in text


def test_a_reconstructed_model_says_why_and_what_became_of_its_files() -> None:
    for text in (
        page(["ps"], instances=wire.Instances(instances=(REBUILT,))),
        page(["status"], status=changed(STATUS, instances=[REBUILT.model_dump()])),
    ):
        assert "ready, reconstructed" in text
        assert "SmolLM2-135M was reconstructed from its command line: its record is damaged." in text
        assert "SmolLM2-135M: /m.gguf cannot be read any more: another start fails." in text


def test_status_shows_them_too() -> None:
    assert "lllm3090-light.service active 3.0 MiB" in page(
        ["status"], status=changed(STATUS, foreign_units=[LIGHT.model_dump()])
    )


def test_a_release_says_what_it_has_left_alone() -> None:
    answer = wire.Released(
        names=(),
        released_bytes=0,
        until_resume=False,
        elapsed_s=0.1,
        foreign_units=("lllm3090-thing.service",),
    )
    assert "nobody here understands them: lllm3090-thing.service" in page(["release"], release=answer)
