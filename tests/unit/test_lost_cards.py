"""Cards that are lost when the daemon starts: known from the file, read once they are back."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from lllm3090d.doctor.examination import find_cards
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus import detect
from lllm3090d.gpus.known_cards import FILE_NAME, KnownCards, recall_cards, remember_cards
from lllm3090d.gpus.lost_cards import LostCards, MissingReader, is_missing
from lllm3090d.gpus.readings import Card, CardKind, MemoryReading, NoCardError, PcieLink, WatchesProcesses
from lllm3090d.gpus.sysfs import Roots, open_amd
from lllm3090d.gpus.xids import CardErrors, TellsErrors
from lllm3090d.serving.sleep_set import kernel_boot_id
from lllm3090d.settings import CardChoice, Settings
from tests.fakes.kernel import FakeKernel

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


class Unlisted(Reader):
    """Of a card that is not among those of its driver."""

    is_back = False

    def read(self) -> MemoryReading:
        if not self.is_back:
            raise LlmError(ErrorCode.CARD_UNREADABLE, "NVIDIA: Not Found (NVML error 6).", nvml_error=6)
        return self.reading


class Driver:
    """A driver that lists cards, or fails."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.asked = 0
        self.answer: list[Reader] | Exception = LOST

    def open(self, expected: Sequence[Card] = ()) -> list[Reader | MissingReader]:
        self.asked += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        listed = {each.card.uuid for each in self.answer}
        stand_ins = [MissingReader(Unlisted(card)) for card in expected if card.uuid not in listed]
        return [*self.answer, *stand_ins]

    @staticmethod
    def none(roots: Roots) -> list[Reader]:
        raise NoCardError("none")

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
    for _ in range(2):
        with pytest.raises(LlmError, match="not among the cards that its driver lists now"):
            reader.read()
    assert driver.answer[0].closed and is_missing(reader)
    driver.answer = [Reader(CARD)]
    driver.now_s = 10.0
    assert reader.read().total_bytes == 24 * GIB and not is_missing(reader)


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
    assert recall_cards(state) == KnownCards()
    remember_cards(state, [CARD, SECOND], "boot-1")
    known = recall_cards(state)
    assert known == KnownCards((CARD, SECOND), {"GPU-1": "boot-1", "GPU-2": "boot-1"})
    before = (state / FILE_NAME).stat()
    remember_cards(state, [CARD, SECOND], "boot-1")
    assert (state / FILE_NAME).stat().st_ino == before.st_ino
    remember_cards(state, [replace(CARD, total_bytes=0), SECOND], "boot-2")  # what was known is better
    assert recall_cards(state) == KnownCards((CARD, SECOND), {"GPU-1": "boot-2", "GPU-2": "boot-2"})
    remember_cards(state, [SECOND, replace(CARD, uuid="GPU-3", total_bytes=0)], "boot-2")
    assert recall_cards(state).cards == (SECOND,)
    remember_cards(state, [Card(CardKind.CPU, "host", "host memory", None)], "boot-3")
    assert recall_cards(state).cards == (SECOND,)  # host memory is no card that could be lost


@pytest.mark.parametrize(
    ("before", "now", "same"),
    [("a", "a", True), ("a", "b", False), ("", "b", True), ("a", "", True)],
)
def test_boots_are_told_apart_where_both_are_known(before: str, now: str, same: bool) -> None:
    assert KnownCards((CARD,), {CARD.uuid: before}).was_managed_in(CARD, now) is same
    assert KnownCards((CARD,)).was_managed_in(CARD, now)


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
    known = recall_cards(tmp_path)
    assert known.cards == () and known.problem is not None
    assert str(tmp_path / FILE_NAME) in known.problem.message and "rm " in (known.problem.hint or "")
    assert "is ignored" in caplog.text
    remember_cards(tmp_path, [CARD], "boot")
    assert recall_cards(tmp_path) == KnownCards((CARD,), {CARD.uuid: "boot"})


def test_what_is_no_file_neither_blocks_nor_stops_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    os.mkfifo(tmp_path / FILE_NAME)
    assert recall_cards(tmp_path).problem is not None
    (tmp_path / FILE_NAME).unlink()
    (tmp_path / FILE_NAME).mkdir()
    remember_cards(tmp_path, [CARD], "boot")
    assert "cannot be written" in caplog.text
    (tmp_path / FILE_NAME).rmdir()
    (tmp_path / "state").write_text("no directory")
    remember_cards(tmp_path / "state", [CARD], "boot")
    assert [each.name for each in tmp_path.iterdir()] == ["state"]


def test_members_of_other_versions_are_no_damage(tmp_path: Path) -> None:
    remember_cards(tmp_path, [CARD], "boot")
    members = json.loads((tmp_path / FILE_NAME).read_bytes())
    members["more"] = 1
    del members["boots"]  # as before there was one
    (tmp_path / FILE_NAME).write_text(json.dumps(members))
    assert recall_cards(tmp_path) == KnownCards((CARD,))


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
    readers = detect.open_cards(choice, known=KnownCards((CARD, amd), {CARD.uuid: "before"}), boot_id="now")
    assert [each.card for each in readers] == [CARD]
    with pytest.raises(LlmError):
        readers[0].read()
    for each in readers:
        each.close()


def test_an_uninstalled_driver_or_a_persons_choice_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setattr(detect, "open_nvidia", driver.open)
    (reader,) = detect.open_cards(CardChoice.CPU, known=KnownCards((CARD,)))
    assert reader.card.kind is CardKind.CPU
    driver.answer = NoCardError("no such library")
    with pytest.raises(LlmError, match="none of: no such library"):
        detect.open_cards(CardChoice.NVIDIA, known=KnownCards((CARD,)))
    driver.answer = LOST
    with pytest.raises(LlmError, match="GPU is lost"):
        detect.open_cards(CardChoice.AUTO)


def test_one_of_two_stands_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the boot in which it was managed; of equal cards each keeps its number. In another boot it was taken out."""
    driver = Driver()
    driver.answer = [Reader(SECOND)]
    monkeypatch.setattr(detect, "open_nvidia", driver.open)
    known = KnownCards((CARD, SECOND), {CARD.uuid: "boot", SECOND.uuid: "boot"})
    readers = detect.open_cards(CardChoice.AUTO, known=known, boot_id="boot")
    assert [each.card for each in readers] == [CARD, SECOND]
    assert [is_missing(each) for each in readers] == [True, False]
    with pytest.raises(LlmError, match=r"which was managed before, cannot be opened.*Not Found") as caught:
        readers[0].read()
    assert caught.value.details["lost"] is True and "next boot" in (caught.value.hint or "")
    assert readers[1].read().total_bytes == 24 * GIB
    for each in readers:
        each.close()


def test_a_card_is_forgotten_in_another_boot(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver()
    driver.answer = [Reader(SECOND)]
    monkeypatch.setattr(detect, "open_nvidia", driver.open)
    known = KnownCards((CARD, SECOND), {CARD.uuid: "boot", SECOND.uuid: "boot"})
    (reader,) = detect.open_cards(CardChoice.AUTO, known=known, boot_id="later")
    assert reader.card == SECOND
    assert f"{CARD.name} was managed before and was taken out since" in caplog.text
    reader.close()


def test_a_card_that_was_given_to_a_virtual_machine_is_not_lost(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kernel = FakeKernel(tmp_path / "kernel")
    device = kernel.roots.sys / "bus/pci/devices" / CARD.pci_address
    device.mkdir(parents=True)
    (device / "driver").symlink_to("../../drivers/vfio-pci")
    driver = Driver()
    driver.answer = [Reader(SECOND)]
    monkeypatch.setattr(detect, "open_nvidia", driver.open)
    known = KnownCards((CARD, SECOND), {CARD.uuid: "boot"})
    (reader,) = detect.open_cards(CardChoice.AUTO, kernel.roots, known=known, boot_id="boot")
    assert reader.card == SECOND
    reader.close()


@pytest.mark.parametrize("choice", [CardChoice.AUTO, CardChoice.AMD])
def test_a_card_of_the_kernel_stands_for_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, choice: CardChoice
) -> None:
    """With none left beside it, the next vendor is not taken for it; in another boot it is."""
    driver = Driver()
    driver.answer = NoCardError("no such library")
    monkeypatch.setattr(detect, "open_nvidia", driver.open)
    kernel = FakeKernel(tmp_path / "kernel")
    for number in (0, 1):
        kernel.amd(number, address=f"0000:0{3 + number}:00.0")
    kernel.card(2, "0x8086", "xe", "0000:05:00.0")
    region = {"drm/0000:05:00.0/vram0": 12 * GIB}
    kernel.regions(region, dict.fromkeys(region, 0))
    cards = tuple(reader.card for reader in detect.open_cards(choice, kernel.roots))
    assert len(cards) == 2
    known = KnownCards(cards, dict.fromkeys((card.uuid for card in cards), "boot"))
    entries = [kernel.roots.sys / "class/drm" / f"card{number}" for number in (0, 1)]

    entries[0].rename(tmp_path / "card0")
    readers = detect.open_cards(choice, kernel.roots, known=known, boot_id="boot")
    assert [(each.card, is_missing(each)) for each in readers] == [(cards[0], True), (cards[1], False)]
    with pytest.raises(LlmError, match="the kernel lists it no more") as caught:
        readers[0].read()
    assert caught.value.details["lost"] is True
    entries[1].rename(tmp_path / "card1")
    readers = detect.open_cards(choice, kernel.roots, known=known, boot_id="boot")
    assert [(each.card, is_missing(each)) for each in readers] == [(cards[0], True), (cards[1], True)]
    with pytest.raises(LlmError, match="no card of AMD"):
        readers[0].read()
    if choice is CardChoice.AUTO:
        (other,) = detect.open_cards(choice, kernel.roots, known=known, boot_id="later")
        assert other.card.kind is CardKind.INTEL
    else:
        with pytest.raises(LlmError, match="has none of"):
            detect.open_cards(choice, kernel.roots, known=known, boot_id="later")

    lost = LostCards(
        lambda: open_amd(kernel.roots), cards, NoCardError("none"), clock=lambda: 0.0, pause_s=0.0
    )
    back = lost.readers()[1]
    (tmp_path / "card1").rename(entries[1])
    assert isinstance(back, WatchesProcesses) and isinstance(back, TellsErrors)
    back.watch([os.getpid()])  # of no use before it is there, and no error
    assert back.read().total_bytes == 24 * GIB and not is_missing(back)
    back.watch([os.getpid()])
    assert back.errors().returns == 1
    with pytest.raises(LlmError, match="not among the cards"):
        lost.readers()[0].read()
    (tmp_path / "card0").rename(entries[0])
    assert lost.readers()[0].read().total_bytes == 24 * GIB  # each is looked for until it is there


def test_a_missing_reader_is_a_reader_once_its_card_is_back() -> None:
    there = Unlisted(CARD)
    reader = MissingReader(there)
    with pytest.raises(LlmError, match="cannot be opened"):
        reader.read()
    there.is_back = True
    assert reader.read().total_bytes == 24 * GIB and not reader.is_missing
    assert reader.errors().source == "NVML"
    there.is_back = False
    with pytest.raises(LlmError, match=r"^NVIDIA: Not Found"):  # lost again, as any card may be
        reader.read()
    reader.close()
    assert there.closed


# --- the doctor ------------------------------------------------------------------------------------------------------


def test_the_doctor_says_of_a_lost_card_that_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And not that models go to host memory, as on a machine that never had one."""
    remember_cards(tmp_path, [CARD, SECOND], kernel_boot_id())
    driver = Driver()
    driver.answer = NoCardError("driver not loaded", is_installed=True)
    monkeypatch.setattr(detect, "open_nvidia", driver.open)
    settings = Settings(state_dir=tmp_path, card=CardChoice.AUTO)
    found = find_cards(settings)
    assert found.cards == ()
    assert found.problem is not None and "managed before" in found.problem.message
    assert "driver not loaded" in found.problem.message
    driver.answer = [Reader(CARD)]
    found = find_cards(settings)
    assert found.cards == (CARD,) and found.problem is None and found.xid_source == "NVML"
    assert found.lost is not None and found.lost.details["card"] == SECOND.uuid
    driver.answer = [Reader(CARD), Reader(SECOND)]
    assert find_cards(settings).cards == (CARD, SECOND) and find_cards(settings).lost is None


def test_the_doctor_says_that_nobody_knows_whether_there_was_a_card(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"{")
    driver = Driver()
    driver.answer = NoCardError("no such library")
    monkeypatch.setattr(detect, "open_nvidia", driver.open)
    for name in ("open_amd", "open_intel"):
        monkeypatch.setattr(detect, name, driver.none)
    found = find_cards(Settings(state_dir=tmp_path, card=CardChoice.AUTO))
    assert found.unknown is not None and "host memory" in found.unknown.message
    assert find_cards(Settings(state_dir=tmp_path, card=CardChoice.CPU)).unknown is None
    (tmp_path / FILE_NAME).unlink()
    assert find_cards(Settings(state_dir=tmp_path, card=CardChoice.AUTO)).unknown is None
