"""The ledger against a model of it: whatever is held is charged in its memory, and given back exactly once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from lllm3090d.planning.quote import Evidence, LineItem, Place
from lllm3090d.serving.ledger import Ledger, Reservation, ReservationState, Share
from lllm3090d.serving.observation import HOST

pytestmark = pytest.mark.unit

CARD, OTHER = "GPU-1", "GPU-2"
MEMORIES = (CARD, OTHER, HOST)
SIZES = st.integers(min_value=0, max_value=1 << 50)
FIGURES = st.dictionaries(st.sampled_from(MEMORIES), SIZES)
LIVE = {ReservationState.HELD, ReservationState.CONFIRMED}


def share(where: str, size: int) -> Share:
    """A price of two lines."""
    half = size // 2
    return Share(
        where,
        (
            LineItem("weights", Place.CARD, half, Evidence.HEADER, ""),
            LineItem("kv cache", Place.CARD, size - half, Evidence.HEADER, ""),
        ),
    )


def holding(**sizes: int) -> Ledger:
    """A ledger in which each run holds so much of the card."""
    ledger = Ledger()
    for run, size in sizes.items():
        ledger.hold(run, f"model-{run}", [share(CARD, size)])
    return ledger


def one(ledger: Ledger, run: str, where: str = CARD) -> Reservation:
    held = ledger.get(run, where)
    assert held is not None
    return held


# --- holding -----------------------------------------------------------------------------------------------


def test_what_is_held_is_the_price_in_each_memory() -> None:
    ledger = Ledger()
    ledger.hold("a", "qwen", [share(CARD, 101), share(OTHER, 50), share(HOST, 7)], now_s=3.0)
    held = one(ledger, "a")
    assert (held.run, held.name, held.where, held.reserved_bytes) == ("a", "qwen", CARD, 101)
    assert (held.state, held.since_s, held.measured_bytes) == (ReservationState.HELD, 3.0, None)
    assert [item.name for item in held.items] == ["weights", "kv cache"]
    assert {each.where: each.reserved_bytes for each in ledger.of("a")} == {CARD: 101, OTHER: 50, HOST: 7}
    assert [ledger.charged_bytes(where) for where in MEMORIES] == [101, 50, 7]
    assert [each.where for each in ledger.on(HOST)] == [HOST]
    assert ledger.get("a", "GPU-3") is None
    assert ledger.of("b") == () == ledger.on("GPU-3")


def test_a_run_holds_once() -> None:
    ledger = holding(a=1)
    with pytest.raises(ValueError, match="run a"):
        ledger.hold("a", "gemma", [share(OTHER, 2)])
    assert [(r.name, r.where) for r in ledger] == [("model-a", CARD)]


def test_a_run_holds_one_memory_once_or_nothing_at_all() -> None:
    ledger = Ledger()
    with pytest.raises(ValueError, match="GPU-1 twice"):
        ledger.hold("a", "qwen", [share(HOST, 1), share(CARD, 1), share(CARD, 2)])
    assert list(ledger) == []
    ledger.hold("a", "qwen", [share(CARD, 1)])
    assert ledger.charged_bytes(CARD) == 1


def test_an_estimate_is_a_price_without_its_margins() -> None:
    items = tuple(
        LineItem(name, Place.CARD, size, Evidence.HEADER, "")
        for name, size in (("weights", 100), ("slack", 20), ("workspace floor", 3))
    )
    ledger = Ledger()
    ledger.hold("a", "qwen", [Share(CARD, items)])
    held = one(ledger, "a")
    assert (held.reserved_bytes, held.estimate_bytes) == (123, 100)


@pytest.mark.parametrize(("where", "at_ready"), [(CARD, 107), (HOST, 100)])
def test_what_conversations_fill_is_not_held_when_it_is_ready(where: str, at_ready: int) -> None:
    """On a card nothing comes later, whatever it is called."""
    sizes = {"weights": 100, "prompt cache": 4, "context checkpoints": 2, "draft checkpoint": 1, "slack": 9}
    items = tuple(LineItem(name, Place.CARD, size, Evidence.HEADER, "") for name, size in sizes.items())
    ledger = Ledger()
    ledger.hold("a", "qwen", [Share(where, items)])
    assert one(ledger, "a", where).at_ready_bytes == at_ready


# --- measuring ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("measured", "charged"), [(None, 100), (0, 100), (99, 100), (100, 100), (130, 130)])
def test_the_greater_of_price_and_measurement_is_charged(measured: int | None, charged: int) -> None:
    ledger = holding(a=100)
    ledger.confirm("a", {} if measured is None else {CARD: measured}, 5.0)
    held = one(ledger, "a")
    assert (held.measured_bytes, held.charged_bytes, held.state) == (
        measured,
        charged,
        ReservationState.CONFIRMED,
    )
    assert held.since_s == 5.0
    ledger.releasing("a", 6.0)
    assert one(ledger, "a").charged_bytes == ledger.charged_bytes(CARD) == charged


def test_a_higher_figure_is_never_forgotten() -> None:
    ledger = holding(a=100)
    ledger.saw("a", {CARD: 140})
    assert one(ledger, "a").state is ReservationState.HELD
    ledger.confirm("a", {CARD: 120})
    assert one(ledger, "a").measured_bytes == 140
    ledger.confirm("a", {CARD: 150})
    ledger.confirm("a", {})
    ledger.confirm("a", {CARD: 90})
    assert one(ledger, "a").charged_bytes == 150


def test_memories_are_measured_apart() -> None:
    ledger = Ledger()
    ledger.hold("a", "qwen", [share(CARD, 100), share(HOST, 10)])
    ledger.confirm("a", {HOST: 30, "GPU-9": 1000})
    assert [r.charged_bytes for r in ledger.of("a")] == [100, 30]


def test_what_is_seen_beyond_the_price_is_charged_at_once_and_keeps_the_age() -> None:
    ledger = holding(a=100, b=100)
    ledger.saw("a", {CARD: 101, HOST: 5})
    ledger.saw("b", {CARD: 100})
    ledger.saw("never-was", {CARD: 100})
    assert (one(ledger, "a").charged_bytes, one(ledger, "a").since_s) == (101, 0.0)
    assert one(ledger, "b").measured_bytes is None
    assert len(list(ledger)) == 2


def test_what_is_on_its_way_back_is_not_seen_as_more() -> None:
    ledger = holding(a=100)
    ledger.releasing("a")
    ledger.saw("a", {CARD: 500})
    assert ledger.charged_bytes(CARD) == 100


# --- giving back -------------------------------------------------------------------------------------------


def test_all_back_is_the_end() -> None:
    ledger = holding(a=100)
    ledger.releasing("a", 2.0)
    assert one(ledger, "a").state is ReservationState.RELEASING
    ledger.settle("a", {})
    assert list(ledger) == [] and ledger.charged_bytes(CARD) == 0
    with pytest.raises(KeyError):
        ledger.settle("a", {})


def test_what_is_missing_takes_the_place_of_the_reservation() -> None:
    ledger = Ledger()
    ledger.hold("a", "qwen", [share(CARD, 100), share(HOST, 10)])
    ledger.confirm("a", {CARD: 130})
    ledger.releasing("a", 10.0)
    ledger.settle("a", {CARD: 30}, 20.0)
    assert [r.where for r in ledger.of("a")] == [CARD]
    lost = one(ledger, "a")
    assert (lost.state, lost.charged_bytes, lost.items) == (ReservationState.QUARANTINED, 30, ())
    assert (ledger.charged_bytes(CARD), ledger.quarantined_bytes(CARD)) == (0, 30)
    assert ledger.charged_bytes(HOST) == ledger.quarantined_bytes(HOST) == 0


def test_quarantine_keeps_its_age_while_it_shrinks() -> None:
    ledger = holding(a=100)
    ledger.releasing("a", 10.0)
    ledger.settle("a", {CARD: 30}, 20.0)
    ledger.settle("a", {CARD: 10}, 90.0)
    ledger.settle("a", {CARD: 10}, 95.0)
    assert (one(ledger, "a").charged_bytes, one(ledger, "a").since_s) == (10, 20.0)
    ledger.settle("a", {CARD: 0}, 99.0)
    assert list(ledger) == []
    with pytest.raises(KeyError):
        ledger.settle("a", {CARD: 1})


def test_what_was_never_held_cannot_be_given_back() -> None:
    with pytest.raises(KeyError):
        holding(a=1).settle("b", {})


def test_the_ledger_may_change_while_it_is_read() -> None:
    ledger = holding(a=1, b=1, c=1)
    for reservation in ledger:
        ledger.settle(reservation.run, {})
    assert list(ledger) == []


# --- what is still to be taken -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("resident", "missing"),
    [({}, 100), ({"a": 0}, 100), ({"a": 30, "b": 9}, 70), ({"a": 100}, 0), ({"a": 101}, 0)],
)
def test_what_is_still_to_come_shrinks_as_the_engine_takes_it(
    resident: Mapping[str, int], missing: int
) -> None:
    ledger = holding(a=100)
    assert ledger.still_to_come_bytes(CARD, resident) == missing
    assert ledger.still_to_come_bytes(HOST, resident) == 0


def test_nothing_is_still_to_come_once_the_engine_was_measured() -> None:
    ledger = holding(a=100)
    ledger.confirm("a", {CARD: 50})
    assert ledger.still_to_come_bytes(CARD, {"a": 50}) == 0
    ledger.releasing("a")
    assert ledger.still_to_come_bytes(CARD, {}) == 0


def test_host_memory_is_taken_slowly_and_so_charged_until_the_end() -> None:
    """Of an engine that serves, too: its prompt cache fills with use."""
    ledger = Ledger()
    ledger.hold("a", "qwen", [share(HOST, 100)])
    ledger.hold("b", "gemma", [share(HOST, 10)])
    assert ledger.untaken_bytes(HOST, {"b": 4}) == 106
    ledger.confirm("a", {HOST: 30})
    assert ledger.untaken_bytes(HOST, {"a": 30, "b": 4}) == 76
    ledger.confirm("a", {HOST: 130})  # it takes more than its price
    assert ledger.untaken_bytes(HOST, {"a": 90, "b": 11}) == 40
    ledger.releasing("a")
    assert ledger.untaken_bytes(HOST, {}) == 10
    ledger.settle("a", {HOST: 5})
    assert ledger.untaken_bytes(HOST, {}) == 10
    assert ledger.untaken_bytes(CARD, {}) == 0


# --- any history ---------------------------------------------------------------------------------------------


@dataclass
class Account:
    """What one memory is charged for one run, told without the ledger."""

    price: int
    seen: list[int] = field(default_factory=list)
    state: ReservationState = ReservationState.HELD
    since_s: float = 0.0

    @property
    def charge(self) -> int:
        return max([self.price, *self.seen])


class LedgerMachine(RuleBasedStateMachine):
    """Any order of the calls that a daemon could make, beside a plain account of them."""

    runs = Bundle("runs")
    ended = Bundle("ended")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.now_s = 0.0
        self.count = 0
        self.accounts: dict[str, dict[str, Account]] = {}

    def passing(self) -> float:
        self.now_s += 1.0
        return self.now_s

    @rule(target=runs, sizes=st.dictionaries(st.sampled_from(MEMORIES), SIZES, min_size=1))
    def hold(self, sizes: dict[str, int]) -> str:
        self.count += 1
        run, now_s = f"run{self.count}", self.passing()
        self.ledger.hold(run, "qwen", [share(where, size) for where, size in sizes.items()], now_s)
        self.accounts[run] = {where: Account(size, since_s=now_s) for where, size in sizes.items()}
        return run

    @rule(run=runs, where=st.sampled_from(MEMORIES), size=SIZES)
    def hold_again(self, run: str, where: str, size: int) -> None:
        if run in self.accounts:
            with pytest.raises(ValueError, match=run):
                self.ledger.hold(run, "qwen", [share(where, size)])

    @rule(run=runs, measured=FIGURES)
    def confirm(self, run: str, measured: dict[str, int]) -> None:
        accounts = self.accounts.get(run, {})
        if all(each.state in LIVE for each in accounts.values()):
            now_s = self.passing()
            self.ledger.confirm(run, measured, now_s)
            for where, each in accounts.items():
                each.seen += [measured[where]] if where in measured else []
                each.state, each.since_s = ReservationState.CONFIRMED, now_s

    @rule(run=runs, held=FIGURES)
    def saw(self, run: str, held: dict[str, int]) -> None:
        self.ledger.saw(run, held)
        for where, each in self.accounts.get(run, {}).items():
            if each.state in LIVE:
                each.seen.append(held.get(where, 0))

    @rule(run=runs)
    def releasing(self, run: str) -> None:
        accounts = self.accounts.get(run, {})
        if all(each.state is not ReservationState.QUARANTINED for each in accounts.values()):
            now_s = self.passing()
            self.ledger.releasing(run, now_s)
            for each in accounts.values():
                each.state, each.since_s = ReservationState.RELEASING, now_s

    @rule(run=runs, missing=FIGURES)
    def settle_in_part(self, run: str, missing: dict[str, int]) -> None:
        if run not in self.accounts:
            return
        now_s = self.passing()
        self.ledger.settle(run, missing, now_s)
        left = {}
        for where, each in self.accounts[run].items():
            if missing.get(where):
                again = each.state is ReservationState.QUARANTINED
                since_s = each.since_s if again else now_s
                left[where] = Account(missing[where], [], ReservationState.QUARANTINED, since_s)
        self.accounts[run] = left
        if not left:
            del self.accounts[run]

    @rule(target=ended, run=consumes(runs))
    def settle(self, run: str) -> str:
        if run in self.accounts:
            before = sum(self.charged(where) for where in MEMORIES)
            given_back = sum(each.charged_bytes for each in self.ledger.of(run))
            self.ledger.settle(run, {}, self.passing())
            assert sum(self.charged(where) for where in MEMORIES) == before - given_back
            del self.accounts[run]
        return run

    def charged(self, where: str) -> int:
        return self.ledger.charged_bytes(where) + self.ledger.quarantined_bytes(where)

    @rule(run=ended, figures=FIGURES)
    def touch_after_the_end(self, run: str, figures: dict[str, int]) -> None:
        """Late news of what has ended changes nothing, and nothing is released twice."""
        before = tuple(self.ledger)
        with pytest.raises(KeyError):
            self.ledger.settle(run, figures)
        self.ledger.releasing(run)
        self.ledger.confirm(run, figures)
        self.ledger.saw(run, figures)
        assert tuple(self.ledger) == before
        assert self.ledger.of(run) == ()

    @invariant()
    def everything_is_as_in_the_account(self) -> None:
        told = {(r.run, r.where): (r.charged_bytes, r.state, r.since_s) for r in self.ledger}
        assert told == {
            (run, where): (each.charge, each.state, each.since_s)
            for run, accounts in self.accounts.items()
            for where, each in accounts.items()
        }

    @invariant()
    def the_sums_are_those_of_the_account(self) -> None:
        for where in MEMORIES:
            there = [accounts[where] for accounts in self.accounts.values() if where in accounts]
            lost = [each.charge for each in there if each.state is ReservationState.QUARANTINED]
            assert self.ledger.quarantined_bytes(where) == sum(lost)
            assert self.ledger.charged_bytes(where) == sum(each.charge for each in there) - sum(lost)

    @invariant()
    def what_is_still_to_come_is_part_of_what_is_charged(self) -> None:
        for where in MEMORIES:
            coming, untaken = (
                self.ledger.still_to_come_bytes(where, {}),
                self.ledger.untaken_bytes(where, {}),
            )
            assert 0 <= coming <= untaken <= self.ledger.charged_bytes(where)


TestLedgerMachine = LedgerMachine.TestCase
