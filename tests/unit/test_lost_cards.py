"""Cards that are lost when the daemon starts: known from the file, read once they are back."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from lllm3090d.doctor.examination import find_cards
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus import detect
from lllm3090d.gpus.known_cards import FILE_NAME, recall_cards, remember_cards
from lllm3090d.gpus.lost_cards import LostCards
from lllm3090d.gpus.readings import Card, CardKind, MemoryReading, NoCardError, PcieLink
from lllm3090d.gpus.xids import CardErrors
from lllm3090d.settings import CardChoice, Settings

pytestmark = pytest.mark.unit

GIB = 1 << 30
CARD = Card(
    CardKind.NVIDIA,
    "GPU-1",
    "NVIDIA GeForce RTX 3090",
    "580.95",
    24 * GIB,
    "0000:01:00.0",
    "8.6",
    PcieLink(4, 16),
)
SECOND = replace(CARD, uuid="GPU-2", pci_address="0000:02:00.0")
LOST = LlmError(ErrorCode.CARD_UNREADABLE, "NVIDIA: GPU is lost.", hint="Restart.", nvml_error=15)


class Reader:
    """Of a card that is there."""

    def __init__(self, card: Card, total_bytes: int | None = None) -> None:
        self.card = card
        self.closed = False
        total = card.total_bytes if total_bytes is None else total_bytes
        self.reading = MemoryReading(0.0, total, 0, 0, total, ())

    def read(self) -> MemoryReading:
        return self.reading

    def errors(self) -> CardErrors:
        return CardErrors(returns=2, source="NVML")

    def close(self) -> None:
        self.closed = True


class Driver:
    """A driver that lists cards, or fails."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.asked = 0
        self.answer: list[Reader] | Exception = LOST

    def open(self) -> list[Reader]:
        self.asked += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def lost(self, *known: Card) -> LostCards:
        return LostCards(self.open, known, LOST, clock=lambda: self.now_s, pause_s=5.0)


def test_it_is_known_and_refused_until_it_is_back() -> None:
    driver = Driver()
    (reader,) = driver.lost(CARD).readers()
    assert reader.card == CARD
    with pytest.raises(LlmError, match=r"RTX 3090, which was managed before.*GPU is lost") as caught:
        reader.read()
    assert caught.value.code is ErrorCode.CARD_UNREADABLE
    assert caught.value.details["card"] == CARD.uuid and caught.value.details["nvml_error"] == 15
    assert 'card = "cpu"' in (caught.value.hint or "")
    assert driver.asked == 0  # it was asked a moment ago
    assert reader.errors() == CardErrors()
    driver.now_s = 5.0
    for _ in range(3):
        with pytest.raises(LlmError):
            reader.read()
    assert driver.asked == 1
    newer = replace(CARD, driver_version="590.1")  # it was lost because the driver was replaced
    driver.answer = [Reader(newer)]
    driver.now_s = 10.0
    assert reader.read().total_bytes == 24 * GIB
    assert reader.card == newer
    assert reader.errors() == CardErrors(returns=3, source="NVML")  # that it has come back counts
    reader.read()
    assert driver.asked == 2
    reader.close()
    assert driver.answer[0].closed


@pytest.mark.parametrize("error", [NoCardError("driver not loaded"), LOST])
def test_why_is_what_the_driver_says_now(error: Exception) -> None:
    driver = Driver()
    driver.answer = error
    (reader,) = driver.lost(CARD).readers()
    driver.now_s = 6.0
    with pytest.raises(LlmError, match=str(error).rstrip(".")):
        reader.read()


def test_one_of_two_comes_back_and_the_other_says_that_it_does_not() -> None:
    driver = Driver()
    first, second = driver.lost(CARD, SECOND).readers()
    driver.answer = [Reader(SECOND), Reader(replace(CARD, uuid="GPU-3"))]
    driver.now_s = 5.0
    assert second.read().total_bytes == 24 * GIB
    with pytest.raises(LlmError, match="not among the cards"):
        first.read()
    assert [each.closed for each in driver.answer] == [
        False,
        True,
    ]  # nobody has promised anything on the third
    assert driver.asked == 1


def test_other_cards_than_before_are_not_taken_for_it() -> None:
    driver = Driver()
    (reader,) = driver.lost(CARD).readers()
    driver.answer = [Reader(SECOND)]
    driver.now_s = 5.0
    with pytest.raises(LlmError, match="other cards than before"):
        reader.read()
    assert driver.answer[0].closed


def test_a_card_of_another_size_is_refused() -> None:
    driver = Driver()
    (reader,) = driver.lost(CARD).readers()
    driver.answer = [Reader(replace(CARD, total_bytes=0), 12 * GIB)]
    driver.now_s = 5.0
    with pytest.raises(LlmError, match="cannot be the same card"):
        reader.read()
    assert reader.card == CARD


def test_a_closed_reader_opens_nothing() -> None:
    driver = Driver()
    (reader,) = driver.lost(CARD).readers()
    reader.close()
    driver.now_s = 5.0
    with pytest.raises(LlmError, match="closed"):
        reader.read()
    assert driver.asked == 0


# --- the file --------------------------------------------------------------------------------------------------------


def test_cards_are_remembered_as_they_are(tmp_path: Path) -> None:
    state = tmp_path / "state"
    assert recall_cards(state) == ()
    remember_cards(state, [CARD, SECOND])
    assert recall_cards(state) == (CARD, SECOND)
    before = (state / FILE_NAME).stat()
    remember_cards(state, [CARD, SECOND])
    assert (state / FILE_NAME).stat().st_ino == before.st_ino
    remember_cards(state, [replace(CARD, total_bytes=0)])  # could not be read: what was known is better
    assert recall_cards(state) == (CARD, SECOND)
    remember_cards(state, [SECOND])
    assert recall_cards(state) == (SECOND,)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"cards": 1}',
        b'{"cards": [{"kind": "voodoo"}]}',
        *(
            json.dumps({"cards": [{"kind": "nvidia", "name": "x", "driver_version": "1", **odd}]}).encode()
            for odd in ({"uuid": "", "total_bytes": 1}, {"uuid": "G", "total_bytes": -1}, {"uuid": "G"})
        ),
        b"\xff\xfe",
        b" " * (1 << 17),
    ],
)
def test_a_bad_file_is_ignored_and_replaced(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    assert recall_cards(tmp_path) == ()
    assert "is ignored" in caplog.text
    remember_cards(tmp_path, [CARD])
    assert recall_cards(tmp_path) == (CARD,)


def test_what_is_no_file_neither_blocks_nor_stops_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    os.mkfifo(tmp_path / FILE_NAME)
    assert recall_cards(tmp_path) == ()
    (tmp_path / FILE_NAME).unlink()
    (tmp_path / FILE_NAME).mkdir()
    remember_cards(tmp_path, [CARD])
    assert "cannot be written" in caplog.text
    (tmp_path / FILE_NAME).rmdir()
    (tmp_path / "state").write_text("no directory")
    remember_cards(tmp_path / "state", [CARD])
    assert [each.name for each in tmp_path.iterdir()] == ["state"]


def test_members_of_a_later_version_are_no_damage(tmp_path: Path) -> None:
    remember_cards(tmp_path, [CARD])
    members = json.loads((tmp_path / FILE_NAME).read_bytes())
    members["more"] = 1
    (tmp_path / FILE_NAME).write_text(json.dumps(members))
    assert recall_cards(tmp_path) == (CARD,)


# --- the choice ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", [CardChoice.AUTO, CardChoice.NVIDIA])
@pytest.mark.parametrize("error", [LOST, NoCardError("not loaded", is_installed=True)])
def test_known_cards_stand_for_themselves(
    monkeypatch: pytest.MonkeyPatch, choice: CardChoice, error: Exception
) -> None:
    driver = Driver()
    driver.answer = error
    monkeypatch.setattr(detect, "open_nvidia", driver.open)
    amd = replace(SECOND, kind=CardKind.AMD)
    readers = detect.open_cards(choice, known=[CARD, amd])
    assert [each.card for each in readers] == [CARD]
    with pytest.raises(LlmError):
        readers[0].read()
    for each in readers:
        each.close()


def test_an_uninstalled_driver_or_a_persons_choice_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setattr(detect, "open_nvidia", driver.open)
    (reader,) = detect.open_cards(CardChoice.CPU, known=[CARD])
    assert reader.card.kind is CardKind.CPU
    driver.answer = NoCardError("no such library")
    with pytest.raises(LlmError, match="none of: no such library"):
        detect.open_cards(CardChoice.NVIDIA, known=[CARD])
    driver.answer = LOST
    with pytest.raises(LlmError, match="GPU is lost"):
        detect.open_cards(CardChoice.AUTO)


# --- the doctor ------------------------------------------------------------------------------------------------------


def test_the_doctor_says_of_a_lost_card_that_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And not that models go to host memory, as on a machine that never had one."""
    remember_cards(tmp_path, [CARD])
    driver = Driver()
    driver.answer = NoCardError("driver not loaded", is_installed=True)
    monkeypatch.setattr(detect, "open_nvidia", driver.open)
    settings = Settings(state_dir=tmp_path, card=CardChoice.AUTO)
    found = find_cards(settings)
    assert found.cards == ()
    assert found.problem is not None and "managed before" in found.problem.message
    assert "driver not loaded" in found.problem.message
    driver.answer = [Reader(CARD)]
    assert find_cards(settings).cards == (CARD,)
