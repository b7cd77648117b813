"""What became of each load: counted once, whatever way it went, whether anybody listens or not."""

from __future__ import annotations

from pathlib import Path

import pytest

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.planning.reserves import Budget
from lllm3090d.serving.accounts import Accounts
from lllm3090d.serving.events import Admitted, CancelDone, Failed, Joined, LoadDone, Queued, Reply
from lllm3090d.serving.history import History
from lllm3090d.serving.statistics import LoadOutcome, QueueOutcome, Statistics
from lllm3090d.wire import EventKind
from tests.fakes.simulated_machine import model_facts

pytestmark = pytest.mark.unit

ADMITTED = Admitted("t", "r", model_facts(1.0), Budget((), ()), (str(Path("/bin/true")),))


class Book:
    """Accounts of one load after the other, with a clock."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.statistics = Statistics(0.0)
        self.history = History()
        self.accounts = Accounts(self.statistics, self.history, lambda: self.now_s)
        self.accounts.begin("t", "qwen")

    def answer(self, answer: Reply, after_s: float = 0.0, token: str = "t") -> None:
        self.now_s += after_s
        self.accounts.answered(token, answer)

    def fail(self, code: ErrorCode, after_s: float = 0.0) -> None:
        self.answer(Failed("t", LlmError(code, "why")), after_s)

    @property
    def waits(self) -> dict[QueueOutcome, float]:
        return {outcome: histogram.sum_s for outcome, histogram in self.statistics.waits.items()}

    @property
    def refused(self) -> list[tuple[str | None, str]]:
        return [(e.model, e.message) for e in self.history.since(0) if e.kind is EventKind.REFUSED]


@pytest.fixture
def book() -> Book:
    return Book()


def test_a_load_at_once(book: Book) -> None:
    book.answer(ADMITTED)
    book.answer(LoadDone("t", "r"), after_s=12.0)
    assert book.statistics.loads == {LoadOutcome.READY: 1}
    assert book.statistics.load_seconds["qwen"].sum_s == 12.0
    assert (book.waits, book.refused) == ({}, [])


def test_a_load_that_waits_is_timed_apart(book: Book) -> None:
    """From the first word of it on; what it waits for may change."""
    book.answer(Queued("t", "qwen", "gemma, which is busy"))
    assert book.statistics.waiting == 1
    book.answer(Queued("t", "qwen", "something else"), after_s=5.0)
    assert book.statistics.waiting == 1
    book.answer(ADMITTED, after_s=5.0)
    assert (book.statistics.waiting, book.waits) == (0, {QueueOutcome.SERVED: 10.0})
    book.answer(LoadDone("t", "r"), after_s=3.0)
    assert book.statistics.load_seconds["qwen"].sum_s == 3.0


def test_what_serves_already_is_no_load(book: Book) -> None:
    book.answer(LoadDone("t", "r"))
    assert book.statistics.loads == {}
    assert book.statistics.load_seconds == {}


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        (ErrorCode.QUEUE_TIMED_OUT, QueueOutcome.TIMED_OUT),
        (ErrorCode.LOAD_CANCELLED, QueueOutcome.CANCELLED),
        (ErrorCode.INSUFFICIENT_VRAM, QueueOutcome.REFUSED),
        (ErrorCode.CARD_RELEASED, QueueOutcome.REFUSED),
    ],
)
def test_what_does_not_get_its_turn(book: Book, code: ErrorCode, outcome: QueueOutcome) -> None:
    book.answer(Queued("t", "qwen", "room"))
    book.fail(code, after_s=7.0)
    assert book.waits == {outcome: 7.0}
    assert book.statistics.waiting == 0
    assert book.statistics.refusals == {code: 1}
    assert book.refused == [("qwen", "why")]


def test_what_is_refused_at_once_never_waited(book: Book) -> None:
    book.fail(ErrorCode.INSUFFICIENT_VRAM)
    assert (book.waits, book.statistics.waiting) == ({}, 0)
    assert book.statistics.refusals == {ErrorCode.INSUFFICIENT_VRAM: 1}
    assert book.refused == [("qwen", "why")]


def test_what_was_admitted_and_fails_was_not_refused(book: Book) -> None:
    book.answer(ADMITTED)
    book.fail(ErrorCode.ENGINE_FAILED)
    assert book.statistics.loads == {LoadOutcome.FAILED: 1}
    assert (book.statistics.refusals, book.refused) == ({}, [])


@pytest.mark.parametrize("ending", [LoadDone("t", "r"), Failed("t", LlmError(ErrorCode.ENGINE_FAILED, "x"))])
def test_one_that_shares_a_load_counts_none_of_its_own(book: Book, ending: LoadDone | Failed) -> None:
    book.answer(Queued("t", "qwen", "its turn"))
    book.answer(Joined("t", "r"), after_s=2.0)
    book.answer(ending, after_s=9.0)
    assert (book.waits, book.statistics.waiting) == ({QueueOutcome.SERVED: 2.0}, 0)
    assert (book.statistics.loads, book.statistics.refusals, book.refused) == ({}, {}, [])


def test_a_load_ends_once(book: Book) -> None:
    book.answer(ADMITTED)
    for _ in range(2):
        book.answer(LoadDone("t", "r"))
        book.fail(ErrorCode.ENGINE_FAILED)
    assert book.statistics.loads == {LoadOutcome.READY: 1}


def test_answers_to_other_requests_count_nothing(book: Book) -> None:
    book.answer(Failed("u", LlmError(ErrorCode.NOT_LOADED, "x")), token="u")
    book.answer(CancelDone("c", "t", stopped=True), token="c")
    assert (book.statistics.refusals, book.refused) == ({}, [])
    book.fail(ErrorCode.LOAD_CANCELLED)
    assert book.statistics.refusals == {ErrorCode.LOAD_CANCELLED: 1}
