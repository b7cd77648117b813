"""A driver that hangs: its card is unreadable and nothing else waits; it is read again once it answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.bounded import BoundedReader, opened_in_time
from lllm3090d.gpus.readings import Card, CardKind, MemoryReading
from lllm3090d.gpus.xids import CardErrors, Xid

pytestmark = pytest.mark.unit

PAUSE = threading.Event()  # never set
READING = MemoryReading(0.0, 24 << 30, 451 << 20, 0, 23 << 30, ())


class Driver:
    """Reads a card for as long as nobody holds it up."""

    card = Card(CardKind.NVIDIA, "GPU-1", "NVIDIA GeForce RTX 3090", "580.95")

    def __init__(self) -> None:
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.asked = 0
        self.closed = False

    def read(self) -> MemoryReading:
        self.asked += 1
        self.goes_on.wait()
        return READING

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def driver() -> Iterator[Driver]:
    made = Driver()
    yield made
    made.goes_on.set()


def test_a_reading_is_passed_on(driver: Driver) -> None:
    reader = BoundedReader(driver)
    assert reader.read() is READING
    assert reader.card is driver.card
    reader.close()
    assert driver.closed


def test_a_hang_is_an_error_of_the_card_and_waited_for_once(driver: Driver) -> None:
    reader = BoundedReader(driver, limit_s=0.2)
    driver.goes_on.clear()
    with pytest.raises(LlmError, match="has not answered") as first:
        reader.read()
    assert first.value.code is ErrorCode.CARD_UNREADABLE
    began = time.monotonic()
    for _ in range(20):
        with pytest.raises(LlmError, match="has not answered"):
            reader.read()
    assert time.monotonic() - began < 0.2 * 20
    assert driver.asked == 1
    reader.close()  # returns, whatever the driver does
    assert not driver.closed


def test_once_it_answers_it_is_read_again(driver: Driver) -> None:
    reader = BoundedReader(driver, limit_s=0.5)  # enough for one that answers
    driver.goes_on.clear()
    with pytest.raises(LlmError):
        reader.read()
    driver.goes_on.set()
    deadline = time.monotonic() + 20
    read = None
    while read is None and time.monotonic() < deadline:
        try:
            read = reader.read()
        except LlmError:  # the thread has not come round to it yet
            PAUSE.wait(0.005)
    assert read is READING
    assert driver.asked == 2
    reader.close()


def test_a_driver_that_hangs_when_it_is_opened() -> None:
    never = threading.Event()

    def opener() -> list[Driver]:
        never.wait()
        return []

    with pytest.raises(LlmError, match=r"has not answered for 0\.05 s"):
        opened_in_time(opener, limit_s=0.05)
    never.set()


def test_what_is_opened_is_bounded(driver: Driver) -> None:
    (reader,) = opened_in_time(lambda: [driver])
    assert isinstance(reader, BoundedReader)
    assert reader.read() is READING
    reader.close()


class Reporting(Driver):
    """Also reports errors; the list is what happened since it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.happened: list[Xid] = []
        self.lost: LlmError | None = None

    def read(self) -> MemoryReading:
        if self.lost is not None:
            raise self.lost
        return super().read()

    def errors(self) -> CardErrors:
        told, self.happened = tuple(self.happened), []
        return CardErrors(told, action=self.asked, source="NVML")


def test_errors_come_with_readings_and_none_is_lost() -> None:
    driver = Reporting()
    reader = BoundedReader(driver)
    assert reader.errors() == CardErrors()  # never read yet
    driver.happened = [Xid(13)]
    reader.read()
    driver.happened = [Xid(79)]
    driver.lost = LlmError(ErrorCode.CARD_UNREADABLE, "lost", hint="x")
    with pytest.raises(LlmError, match="lost"):
        reader.read()  # a reading that fails brings them too
    assert reader.errors() == CardErrors((Xid(13), Xid(79)), action=1, source="NVML")
    assert reader.errors() == CardErrors((), action=1, source="NVML")
    reader.close()


def test_a_driver_that_hangs_tells_its_errors_later() -> None:
    driver = Reporting()
    reader = BoundedReader(driver, limit_s=0.05)
    driver.goes_on.clear()
    driver.happened = [Xid(119)]
    with pytest.raises(LlmError, match="has not answered"):
        reader.read()
    assert reader.errors().xids == ()
    driver.goes_on.set()
    deadline = time.monotonic() + 10
    told: tuple[Xid, ...] = ()
    while not told and time.monotonic() < deadline:
        PAUSE.wait(0.01)
        told = reader.errors().xids
    assert told == (Xid(119),)
    reader.close()
