"""``gpu``, ``explain`` and what waits in ``ps``, as text: whole pages at 80 columns, readable without colours."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from lllm3090ctl import cards, output, render
from lllm3090ctl.bars import widths
from lllm3090ctl.documents import Document
from lllm3090ctl.failures import Failure
from lllm3090ctl.text import Block
from lllm3090d import wire
from lllm3090d.planning.units import MIB
from lllm3090d.wire_cards import Gpus
from tests.fakes.card_scenes import LOST, Desk, explained, on_host
from tests.fakes.control_server import INSTANCE, STATUS, ControlServer, changed, ctl

pytestmark = pytest.mark.unit


class Terminal(io.StringIO):
    """A stream that says somebody watches it."""

    def isatty(self) -> bool:
        return True


def document(model: BaseModel) -> Document:
    return Document(json.loads(model.model_dump_json()))


def shown(blocks: Sequence[Block], stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("COLUMNS", "80")
    output.Screen(as_json=False)._blocks(blocks, stream)
    return stream.getvalue().splitlines()


GPU_PAGE = """\
card     0: NVIDIA GeForce RTX 3090, 24.0 GiB
uuid     GPU-1
bus      0000:01:00.0, PCIe 4 x16
driver   580.95.05, compute capability 8.6
profile  known: rtx-3090
read     0.2 s ago
[#xxxxxx?AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAaBb!-..............................]
   OWNER                     MIB  WHAT
#  driver                  451.0  kept by the driver
x  steam (pid 1234)      1,900.0  another program
?  other memory in use       1.0  used, and nobody is listed with it
A  Qwen3.8-27B          11,700.0  held by the model
a  Qwen3.8-27B             200.0  reserved for the model, not taken yet
B  SmolLM2-135M            120.0  held by the model
b  SmolLM2-135M            380.0  reserved for the model, not taken yet
!  old                     300.0  of a model that ended, not back yet, for 1 min
-  the desktop             147.0  kept free
.  free                  9,377.0
   total                24,576.0
A new model may take 9,377.0 MiB.

MODEL         ITEM                           MIB  EVIDENCE
Qwen3.8-27B   weights                    9,000.0  header
Qwen3.8-27B   kv cache                   1,500.0  header
Qwen3.8-27B   compute                      600.0  header
Qwen3.8-27B   runtime                      640.0  header
Qwen3.8-27B   slack                        128.0  header
Qwen3.8-27B   = reserved (confirmed)    11,868.0  header
Qwen3.8-27B   = measured at most        11,900.0
Qwen3.8-27B   = charged                 11,900.0
Qwen3.8-27B   = held now                11,700.0
"""
EXPLAIN_PAGE = """\
model     Qwen3.8-27B
state     ready
engine    0.6.0-dev (build 11434, commit abc)
evidence  header

NVIDIA GeForce RTX 3090, in MiB
ITEM      RESERVED    ENGINE  EVIDENCE  FORMULA
weights    9,000.0   8,998.2  header    the arithmetic of weights
kv cache   1,500.0   1,500.0  header    the arithmetic of kv cache
compute      600.0     571.2  header    the arithmetic of compute
runtime      640.0         -  header    the arithmetic of runtime
slack        128.0         -  header    the arithmetic of slack
sum       11,868.0  11,069.5

reserved   11,868.0
measured   11,900.0
held now   11,700.0
charged    11,900.0
deviation  +32.0 (+0.3%)

host memory, in MiB
ITEM             RESERVED  ENGINE  EVIDENCE  FORMULA
token embedding     300.0   299.5  header    the arithmetic of token embedding
prompt cache      2,048.0       -  header    the arithmetic of prompt cache
process             300.0       -  header    the arithmetic of process
output                  -     1.0            not foreseen by name
sum               2,648.0   300.5

reserved   2,648.0
measured   650.0
held now   400.0
charged    2,648.0
deviation  +50.0 (+8.3%)
           without prompts that are kept and checkpoints, which are taken later

Nothing was measured of this checkpoint with its engine on this card before.
"""


def test_the_page_of_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown(cards.gpus(document(Desk().view)), io.StringIO(), monkeypatch)
    expected = GPU_PAGE.splitlines()
    assert lines[: len(expected)] == expected
    assert "Of these it is not told how much they hold: Xorg of anna (pid 77)." in lines
    host = lines[lines.index("Host memory, 64.0 GiB") :]
    assert host[1].startswith("[???") and host[1].endswith("..]")
    assert "Qwen3.8-27B   = limit of its unit     3,160.0" in host


def test_the_page_of_a_price(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown(cards.explanation(document(explained())), io.StringIO(), monkeypatch)
    assert lines == EXPLAIN_PAGE.splitlines()


def test_on_a_terminal_nothing_is_wider_and_colours_say_nothing_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured = shown(cards.gpus(document(Desk().view)), Terminal(), monkeypatch)
    monkeypatch.setenv("NO_COLOR", "1")
    plain = shown(cards.gpus(document(Desk().view)), Terminal(), monkeypatch)
    assert any("\x1b[36mAAA" in line for line in coloured)
    assert not any("\x1b" in line for line in plain)
    assert [click.unstyle(line) for line in coloured] == plain
    assert max(map(len, plain)) <= 80


@pytest.mark.parametrize("columns", ["80", "40", "200"])
def test_a_bar_is_as_wide_as_the_terminal_within_reason(
    columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    output.Screen(as_json=False)._blocks(cards.gpus(document(Desk().view)), stream)
    bar = next(line for line in stream.getvalue().splitlines() if line.startswith("["))
    assert len(bar) == min(int(columns), 160)


def test_a_card_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown(cards.gpus(document(Desk(problem=LOST).view)), io.StringIO(), monkeypatch)
    card = lines[: lines.index("Host memory, 64.0 GiB")]
    told = card.index("The card's memory cannot be read: GPU is lost.")
    assert card[told + 1] == "  Hint: Restart the computer."
    assert not any(line.startswith("[") for line in card)
    assert not any(line.startswith(("read", "A new model")) for line in card)
    assert "Qwen3.8-27B   = charged                 11,900.0" in card
    assert "Qwen3.8-27B   = held now                       -" in card


def test_what_a_driver_leaves_open_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    view = Desk(attributed=False).view
    rounded = view.model_copy(
        update={"gpus": (view.gpus[0].model_copy(update={"rounding_bytes": 3 * MIB}),)}
    )
    text = "\n".join(shown(cards.gpus(document(rounded)), io.StringIO(), monkeypatch))
    assert cards.UNATTRIBUTED in text
    assert "figures add up to 3.0 MiB less than the total; the difference is counted as free" in text


def test_figures_that_do_not_add_up_to_the_tenth_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    little = 3 * MIB // 100
    desk = Desk(driver_bytes=451 * MIB + little, foreign_bytes=1901 * MIB + little, desktop_active=False)
    text = "\n".join(shown(cards.gpus(document(desk.view)), io.StringIO(), monkeypatch))
    assert cards.ROUNDED in text
    assert cards.ROUNDED not in "\n".join(
        shown(cards.gpus(document(on_host().view)), io.StringIO(), monkeypatch)
    )


def test_given_away_cards_are_called_so(monkeypatch: pytest.MonkeyPatch) -> None:
    view = Desk().view.model_copy(update={"released": True})
    lines = shown(cards.gpus(document(view)), io.StringIO(), monkeypatch)
    assert lines[0] == "The card is released: loads are refused until: lllm3090ctl resume"


def test_owners_of_a_newer_daemon_are_shown_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    members = json.loads(Desk().view.model_dump_json())
    members["gpus"][0]["parts"][0] |= {"kind": "firmware", "name": "the firmware"}
    lines = shown(cards.gpus(Document(members)), io.StringIO(), monkeypatch)
    assert "~  the firmware            451.0" in lines


def test_names_cannot_steer_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    members = json.loads(Desk().view.model_dump_json())
    for part in members["gpus"][0]["parts"]:
        part["name"] = "a\x1b[2Jb\n"
    for line in shown(cards.gpus(Document(members)), io.StringIO(), monkeypatch):
        assert line.isprintable()


def test_what_is_misshapen_is_a_failure() -> None:
    with pytest.raises(Failure):
        cards.gpus(Document({"gpus": [{"name": 1}]}))


# --- the commands ---


def test_commands_and_their_json() -> None:
    with ControlServer(gpus=Desk().view, explain=explained()) as server:
        page, told = ctl(server, "gpu"), ctl(server, "gpu", "--json")
        text, price = ctl(server, "explain", "qwen"), ctl(server, "explain", "qwen", "--json")
    assert [each.exit_code for each in (page, told, text, price)] == [0, 0, 0, 0]
    assert page.stdout.startswith(GPU_PAGE)
    assert Gpus.model_validate_json(told.stdout) == Desk().view
    assert text.stdout == EXPLAIN_PAGE
    assert wire.ExplainView.model_validate_json(price.stdout) == explained()


PENDING = wire.PendingView(
    name="Gemma", token="a-token-of-test", why="room: SmolLM2-135M is busy", waiting_s=75, remaining_s=45
)


def test_ps_tells_who_works_and_who_waits() -> None:
    busy = changed(INSTANCE, busy=True, pinned=True)
    idle = changed(INSTANCE, name="Idle", busy=False, idle_s=840.5)
    with ControlServer(instances=wire.Instances(instances=(busy, idle), pending=(PENDING,))) as server:
        lines = ctl(server, "ps").stdout.splitlines()
    assert lines[0].split()[:4] == ["NAME", "STATE", "USE", "CONTEXT"]
    assert lines[1].split()[:4] == ["SmolLM2-135M", "ready,", "pinned", "busy"]
    assert lines[2].split()[:5] == ["Idle", "ready", "idle", "14", "min"]
    assert lines[3] == ""
    assert lines[4] == "WAITING    FOR  AT MOST  WHY"
    assert lines[5] == "Gemma    1 min    2 min  room: SmolLM2-135M is busy"


def test_who_waits_is_told_where_nothing_runs_too() -> None:
    listing = wire.Instances(instances=(), pending=(PENDING,))
    blocks = render.instances(document(listing))
    assert len(blocks) == 3
    with ControlServer(status=changed(STATUS, pending=(PENDING,), released=True)) as server:
        text = ctl(server, "status").stdout
    assert "Gemma" in text
    assert text.endswith("lllm3090ctl resume\n")


# --- the bar ---


@given(st.lists(st.integers(0, 1 << 40), max_size=60), st.integers(1, 200))
def test_a_bar_is_full_and_shows_all_that_there_is(weights: list[int], cells: int) -> None:
    shown_cells = widths(weights, cells)
    assert len(shown_cells) == len(weights)
    assert all(each >= 0 for each in shown_cells)
    if not sum(weights):
        assert sum(shown_cells) == 0
        return
    assert sum(shown_cells) == cells
    something = [each for each, weight in zip(shown_cells, weights, strict=True) if weight]
    assert all(not each for each, weight in zip(shown_cells, weights, strict=True) if not weight)
    if len(something) <= cells:
        assert all(each >= 1 for each in something)


def test_shares_are_as_near_as_cells_allow() -> None:
    assert widths([1, 1, 1], 10) == [4, 3, 3]
    assert widths([999, 1], 10) == [9, 1]
    assert widths([50, 25, 25], 4) == [2, 1, 1]
