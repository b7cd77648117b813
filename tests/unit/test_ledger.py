"""The ledger against a model of it: whatever is held is charged, and given back exactly once."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from lllm3090d.planning.quote import Evidence, LineItem, Place, Quote
from lllm3090d.serving.ledger import Ledger, ReservationState

pytestmark = pytest.mark.unit

SIZES = st.integers(min_value=0, max_value=1 << 50)


def quote(card_bytes: int, host_bytes: int = 0) -> Quote:
    """A price of two lines on the card and one beside it."""
    half = card_bytes // 2
    return Quote(
        (
            LineItem("weights", Place.CARD, half, Evidence.HEADER, ""),
            LineItem("kv cache", Place.CARD, card_bytes - half, Evidence.HEADER, ""),
            LineItem("process", Place.HOST, host_bytes, Evidence.HEADER, ""),
        )
    )


def test_what_is_held_is_the_price_on_the_card() -> None:
    ledger = Ledger()
    held = ledger.hold("a", "qwen", quote(101, host_bytes=1000))
    assert (held.run, held.name, held.reserved_bytes, held.state) == (
        "a",
        "qwen",
        101,
        ReservationState.HELD,
    )
    assert held.measured_bytes is None
    assert ledger.get("a") is held
    assert ledger.charged_bytes() == 101


def test_a_run_holds_once() -> None:
    ledger = Ledger()
    ledger.hold("a", "qwen", quote(1))
    with pytest.raises(ValueError, match="run a"):
        ledger.hold("a", "gemma", quote(2))
    assert [r.name for r in ledger] == ["qwen"]


@pytest.mark.parametrize(("measured", "charged"), [(None, 100), (0, 100), (99, 100), (100, 100), (130, 130)])
def test_the_greater_of_price_and_measurement_is_charged(measured: int | None, charged: int) -> None:
    ledger = Ledger()
    ledger.hold("a", "qwen", quote(100))
    assert ledger.confirm("a", measured).charged_bytes == charged
    assert ledger.releasing("a").charged_bytes == charged
    assert ledger.charged_bytes() == charged


def test_quarantine_takes_the_place_of_the_reservation() -> None:
    ledger = Ledger()
    ledger.hold("a", "qwen", quote(100))
    ledger.confirm("a", 130)
    ledger.releasing("a")
    ledger.quarantine("a", 30)
    assert (ledger.charged_bytes(), ledger.quarantined_bytes()) == (0, 30)
    ledger.quarantine("a", 10)
    assert ledger.quarantined_bytes() == 10
    ledger.release("a")
    assert (ledger.charged_bytes(), ledger.quarantined_bytes(), list(ledger)) == (0, 0, [])


@pytest.mark.parametrize(
    ("resident", "missing"),
    [({}, 100), ({"a": 0}, 100), ({"a": 30, "b": 9}, 70), ({"a": 100}, 0), ({"a": 101}, 0)],
)
def test_what_is_still_to_come_shrinks_as_the_engine_takes_it(
    resident: Mapping[str, int], missing: int
) -> None:
    ledger = Ledger()
    ledger.hold("a", "qwen", quote(100))
    assert ledger.still_to_come_bytes(resident) == missing


def test_nothing_is_still_to_come_once_the_engine_was_measured() -> None:
    ledger = Ledger()
    ledger.hold("a", "qwen", quote(100))
    ledger.confirm("a", 50)
    assert ledger.still_to_come_bytes({"a": 50}) == 0
    ledger.releasing("a")
    assert ledger.still_to_come_bytes({}) == 0


def test_the_ledger_may_change_while_it_is_read() -> None:
    ledger = Ledger()
    for run in ("a", "b", "c"):
        ledger.hold(run, run, quote(1))
    for reservation in ledger:
        ledger.release(reservation.run)
    assert list(ledger) == []


class LedgerMachine(RuleBasedStateMachine):
    """Any order of the calls that a daemon could make, beside a plain account of them."""

    runs = Bundle("runs")
    ended = Bundle("ended")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.count = 0
        self.price: dict[str, int] = {}
        self.measured: dict[str, int | None] = {}
        self.state: dict[str, ReservationState] = {}
        self.lost: dict[str, int] = {}

    @rule(target=runs, card_bytes=SIZES, host_bytes=SIZES)
    def hold(self, card_bytes: int, host_bytes: int) -> str:
        self.count += 1
        run = f"run{self.count}"
        self.ledger.hold(run, "qwen", quote(card_bytes, host_bytes))
        self.price[run], self.measured[run], self.state[run] = card_bytes, None, ReservationState.HELD
        return run

    @rule(run=runs, card_bytes=SIZES)
    def hold_again(self, run: str, card_bytes: int) -> None:
        with pytest.raises(ValueError, match=run):
            self.ledger.hold(run, "qwen", quote(card_bytes))

    @rule(run=runs, measured=st.none() | SIZES)
    def confirm(self, run: str, measured: int | None) -> None:
        if self.state[run] is ReservationState.HELD:
            self.ledger.confirm(run, measured)
            self.measured[run], self.state[run] = measured, ReservationState.CONFIRMED

    @rule(run=runs)
    def releasing(self, run: str) -> None:
        if self.state[run] is not ReservationState.QUARANTINED:
            self.ledger.releasing(run)
            self.state[run] = ReservationState.RELEASING

    @rule(run=runs, missing=SIZES)
    def quarantine(self, run: str, missing: int) -> None:
        self.ledger.quarantine(run, missing)
        self.state[run], self.lost[run] = ReservationState.QUARANTINED, missing

    @rule(target=ended, run=consumes(runs))
    def release(self, run: str) -> str:
        before = self.ledger.charged_bytes() + self.ledger.quarantined_bytes()
        given_back = self.ledger.release(run).charged_bytes
        assert self.ledger.charged_bytes() + self.ledger.quarantined_bytes() == before - given_back
        del self.state[run]
        return run

    @rule(run=ended)
    def touch_after_release(self, run: str) -> None:
        with pytest.raises(KeyError):
            self.ledger.release(run)
        with pytest.raises(KeyError):
            self.ledger.releasing(run)
        with pytest.raises(KeyError):
            self.ledger.confirm(run, 1)
        with pytest.raises(KeyError):
            self.ledger.quarantine(run, 1)
        assert self.ledger.get(run) is None

    @invariant()
    def the_sums_are_those_of_the_account(self) -> None:
        quarantined = {run for run, state in self.state.items() if state is ReservationState.QUARANTINED}
        charged = sum(
            max(self.price[run], self.measured[run] or 0) for run in self.state if run not in quarantined
        )
        assert self.ledger.charged_bytes() == charged
        assert self.ledger.quarantined_bytes() == sum(self.lost[run] for run in quarantined)
        assert {r.run: r.state for r in self.ledger} == self.state

    @invariant()
    def nothing_is_negative(self) -> None:
        assert all(reservation.charged_bytes >= 0 for reservation in self.ledger)
        assert self.ledger.charged_bytes() >= 0
        assert self.ledger.quarantined_bytes() >= 0

    @invariant()
    def what_is_still_to_come_is_part_of_what_is_charged(self) -> None:
        assert 0 <= self.ledger.still_to_come_bytes({}) <= self.ledger.charged_bytes()


TestLedgerMachine = LedgerMachine.TestCase
