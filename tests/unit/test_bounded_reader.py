"""A driver that hangs: its card is unreadable and nothing else waits; it is read again once it answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.bounded import BoundedReader, opened_in_time
from lllm3090d.gpus.readings import Card, CardKind, MemoryReading

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
    reader = BoundedReader(driver, limit_s=0.05)
    driver.goes_on.clear()
    with pytest.raises(LlmError, match="has not answered") as first:
        reader.read()
    assert first.value.code is ErrorCode.CARD_UNREADABLE
    began = time.monotonic()
    for _ in range(20):
        with pytest.raises(LlmError, match="has not answered"):
            reader.read()
    assert time.monotonic() - began < 0.05 * 20
    assert driver.asked == 1
    reader.close()  # returns, whatever the driver does
    assert not driver.closed


def test_once_it_answers_it_is_read_again(driver: Driver) -> None:
    reader = BoundedReader(driver, limit_s=0.05)
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
