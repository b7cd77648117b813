"""Whether a card can be trusted, through readings as they come."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.readings import Card, CardKind, CardReader, MemoryReading
from lllm3090d.gpus.xids import CardErrors, Xid
from lllm3090d.serving.card_health import EVIDENCE_S, CardHealth, CardNews
from lllm3090d.serving.observation import CardState, Observation

pytestmark = pytest.mark.unit
QUIET_S = 600.0
GIB = 1 << 30
CARD = Card(CardKind.NVIDIA, "GPU-1", "RTX 3090", "580", 24 * GIB)
OTHER = Card(CardKind.NVIDIA, "GPU-2", "RTX 3080", "580", 10 * GIB)
LOST = LlmError(ErrorCode.CARD_UNREADABLE, "NVIDIA: RTX 3090 could not be read: GPU is lost.", hint="x")


@dataclass
class Driver:
    """A reader whose driver says what a test wants."""

    card: Card = CARD
    xids: list[Xid] = field(default_factory=list)
    action: int | None = None
    returns: int = 0
    error: LlmError | None = None
    source: str = "NVML"

    def errors(self) -> CardErrors:
        found, self.xids = tuple(self.xids), []
        return CardErrors(found, self.action, self.returns, self.source)

    def read(self) -> MemoryReading:
        if self.error is not None:
            raise self.error
        return MemoryReading(0.0, self.card.total_bytes, 0, 0, self.card.total_bytes, ())

    def close(self) -> None:
        """Nothing to give back."""


@dataclass
class Plain:
    """A reader of a card whose driver reports nothing."""

    card: Card = OTHER

    def read(self) -> MemoryReading:
        return MemoryReading(0.0, self.card.total_bytes, 0, 0, self.card.total_bytes, ())

    def close(self) -> None:
        """Nothing to give back."""


class Scene:
    """A judge, its clock and what it told."""

    def __init__(self, *drivers: CardReader) -> None:
        self.drivers = drivers
        self.now_s = 1000.0
        self.news: list[CardNews] = []
        self.health = CardHealth(self.news.append, lambda: self.now_s, QUIET_S)

    def look(self) -> Observation:
        states = []
        for driver in self.drivers:
            try:
                states.append(CardState(driver.card, driver.read()))
            except LlmError as error:
                states.append(CardState(driver.card, None, error))
        return self.health.judge(Observation(tuple(states), None), self.drivers)

    def is_bad(self) -> bool:
        return self.look().main.fault is not None


def test_a_card_that_fell_off_gives_nothing_until_it_was_reset() -> None:
    driver = Driver()
    scene = Scene(driver)
    assert not scene.is_bad()
    driver.xids = [Xid(79, 4711, "NVRM: Xid ...")]
    state = scene.look().main
    assert state.reading is not None  # what runs goes on being seen
    with pytest.raises(LlmError) as raised:
        state.usable()
    assert raised.value.code is ErrorCode.CARD_AT_RISK
    assert "Xid 79: the card has fallen off the bus" in raised.value.message
    assert raised.value.details["xid"] == 79
    assert scene.health.risk(CARD.uuid) == "RTX 3090 reported Xid 79: the card has fallen off the bus"
    scene.now_s += 100 * QUIET_S
    assert scene.is_bad()  # time alone does not heal it where the driver does not speak
    driver.error = LOST
    assert scene.look().main.problem is LOST
    driver.error, driver.returns = None, 1
    assert not scene.is_bad()
    assert scene.health.risk(CARD.uuid) is None
    assert [news.is_bad for news in scene.news] == [True, True, False, False]
    assert scene.news[-1].text.startswith("RTX 3090 is well again; before, RTX 3090 reported Xid 79")
    assert scene.news[0].details == {
        "card": "GPU-1", "xid": 79, "class": "card", "pid": 4711, "line": "NVRM: Xid ...",
    }  # fmt: skip


def test_time_heals_where_nothing_more_comes() -> None:
    driver = Driver()
    scene = Scene(driver)
    driver.xids = [Xid(48)]
    assert scene.is_bad()
    scene.now_s += QUIET_S - 1
    driver.xids = [Xid(48)]
    assert scene.is_bad()
    scene.now_s += QUIET_S - 1
    assert scene.is_bad()
    scene.now_s += 1
    assert not scene.is_bad()


def test_the_driver_s_word_and_time_stand_for_a_reset() -> None:
    driver = Driver(action=0)
    scene = Scene(driver)
    driver.xids = [Xid(62)]
    assert scene.is_bad()
    scene.now_s += QUIET_S
    assert not scene.is_bad()
    driver.xids, driver.action = [Xid(62)], 1
    scene.now_s += QUIET_S
    assert scene.is_bad()
    scene.now_s += QUIET_S
    state = scene.look().main
    assert state.fault is not None
    assert "asks for a reset of the card" in state.fault.message


def test_what_a_driver_asks_for_is_a_fault_without_any_xid() -> None:
    """Of a card that was broken before this daemon began."""
    driver = Driver(action=2)
    scene = Scene(driver)
    state = scene.look().main
    assert state.fault is not None
    assert "asks for a restart of the machine" in state.fault.message
    driver.action = 0
    assert not scene.is_bad()  # its word began it and ends it
    assert len(scene.news) == 2


@pytest.mark.parametrize(("action", "bad"), [(0, False), (1, True), (None, True)])
def test_a_changed_recovery_action_may_be_none(action: int | None, bad: bool) -> None:
    driver = Driver()
    scene = Scene(driver)
    scene.look()
    driver.xids, driver.action = [Xid(154)], action
    assert scene.is_bad() is bad


def test_the_hardest_of_several_must_be_over() -> None:
    driver = Driver()
    scene = Scene(driver)
    driver.xids = [Xid(48), Xid(79), Xid(48)]
    assert scene.is_bad()
    scene.now_s += 10 * QUIET_S
    assert scene.is_bad()
    assert "Xid 48" in (scene.health.risk(CARD.uuid) or "")  # the first is the reason


@pytest.mark.parametrize("number", [13, 31, 43, 45, 63, 94, 4711])
def test_what_one_process_did_leaves_the_card_alone(number: int) -> None:
    driver = Driver()
    scene = Scene(driver)
    driver.xids = [Xid(number)]
    assert not scene.is_bad()
    assert [news.details["xid"] for news in scene.news] == [number]


def test_cards_are_judged_by_themselves() -> None:
    driver = Driver()
    scene = Scene(driver, Plain())
    driver.xids = [Xid(95)]
    seen = scene.look()
    assert [state.fault is not None for state in seen.cards] == [True, False]
    assert scene.health.risk(OTHER.uuid) is None


def test_a_card_that_cannot_be_read_is_told_once_and_is_a_risk() -> None:
    driver = Driver(error=LOST)
    scene = Scene(driver)
    for _ in range(3):
        assert scene.look().main.problem is LOST
    assert scene.health.risk(CARD.uuid) == LOST.message
    driver.error = None
    scene.look()
    assert scene.health.risk(CARD.uuid) is None
    assert [news.text for news in scene.news] == [
        f"the card cannot be read: {LOST.message}",
        "RTX 3090 can be read again",
    ]


def test_evidence_of_an_end_is_recent_and_of_the_right_process() -> None:
    driver = Driver()
    scene = Scene(driver)
    scene.look()
    assert scene.health.evidence(CARD.uuid, frozenset({7})) is None
    driver.xids = [Xid(31, pid=7), Xid(45, pid=7)]
    scene.look()
    assert (scene.health.evidence(CARD.uuid, frozenset({7})) or "").startswith("Xid 31: ")
    assert scene.health.evidence(CARD.uuid, frozenset({8})) is None
    assert scene.health.evidence(CARD.uuid, frozenset()) is not None  # nobody knows whose it was
    assert scene.health.evidence("GPU-none", frozenset({7})) is None
    scene.now_s += EVIDENCE_S + 1
    assert scene.health.evidence(CARD.uuid, frozenset({7})) is None


def test_what_the_journal_tells_counts_once_and_for_its_card() -> None:
    card = replace(CARD, pci_address="0000:01:00.0")
    driver, plain = Driver(card, source=""), Plain(replace(OTHER, pci_address="0000:02:00.0"))
    scene = Scene(driver, plain)
    scene.look()
    assert scene.health.is_deaf
    hearing = Scene(Driver(), plain)
    hearing.look()
    assert not hearing.health.is_deaf
    told = (("0000:01:00.0", Xid(119, 7, "a")), ("0000:02:00.0", Xid(79, 8, "b")))
    scene.health.hear(told, (card, plain.card))
    scene.health.hear(told, (card, plain.card))
    assert len(scene.news) == 1
    assert [state.fault is not None for state in scene.look().cards] == [True, False]
    assert "Xid 119" in (scene.health.evidence(card.uuid, frozenset({7})) or "")
