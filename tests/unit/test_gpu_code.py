"""A build for one GPU architecture and the card: what runs, what may, what never does, and who is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lllm3090d.engines.builds import Selection
from lllm3090d.engines.capabilities import Build, BuildKind
from lllm3090d.engines.gpu_code import CodeFit, best_fit, can_never_run, check_code, code_fit
from lllm3090d.engines.places import Find
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.readings import Card, CardKind
from lllm3090d.serving.admitting import Admit, Decider, Refuse
from lllm3090d.serving.engine_views import build_view
from lllm3090d.serving.engines import EngineState
from lllm3090d.serving.events import LoadRequested
from tests.fakes.scheduler_world import CUDA, TWO_CARDS, World

pytestmark = pytest.mark.unit

RUNS, MAYBE, NEVER = CodeFit.RUNS, CodeFit.MAYBE, CodeFit.NEVER


def build(architecture: str | None) -> Build:
    name = f"b11434-cuda-{architecture}"
    return Build(
        Path(f"/opt/{name}/llama-server"),
        (),
        "engines_dir",
        locked=False,
        name=name,
        kind=BuildKind.COMPILED,
        gpu_architecture=architecture,
    )


def card(capability: str | None) -> Card:
    return Card(CardKind.NVIDIA, "GPU-1", "NVIDIA card", "580.0", compute_capability=capability)


@pytest.mark.parametrize(
    ("architecture", "capability", "expected"),
    [
        ("sm86", "8.6", RUNS),
        ("sm80", "8.6", RUNS),  # machine code of a lower minor capability
        ("sm86", "8.9", RUNS),
        ("sm86", "8.0", NEVER),  # neither kind of code goes back
        ("sm86", "7.5", NEVER),
        ("sm86", "12.0", MAYBE),  # intermediate code would do, and nobody knows whether there is any
        ("sm75", "8.6", MAYBE),
        ("sm120", "12.0", RUNS),
        ("sm120", "8.6", NEVER),
        ("sm103", "10.3", RUNS),
        ("sm90a", "9.0", RUNS),
        ("sm90a", "12.0", NEVER),  # a letter is never carried over
        ("sm120a", "12.1", NEVER),
        ("sm100f", "10.3", RUNS),
        ("sm100f", "12.0", NEVER),
        ("sm100f", "9.0", NEVER),
        ("sm90x", "9.0", None),
        (None, "8.6", None),
        ("sm86", None, None),
        ("sm8", "8.6", None),
        ("sm86", "eight", None),
        ("", "", None),
    ],
)
def test_what_runs_where(architecture: str | None, capability: str | None, expected: CodeFit | None) -> None:
    assert code_fit(architecture, capability) is expected
    assert can_never_run(build(architecture), card(capability)) is (expected is NEVER)


@given(st.integers(1, 20), st.integers(0, 9), st.integers(1, 20), st.integers(0, 9), st.integers(0, 9))
def test_a_better_card_of_the_same_kind_never_runs_less(
    major: int, minor: int, has: int, low: int, more: int
) -> None:
    order = [NEVER, MAYBE, RUNS]
    before = code_fit(f"sm{major}{minor}", f"{has}.{low}")
    after = code_fit(f"sm{major}{minor}", f"{has}.{min(9, low + more)}")
    assert before is not None and after is not None
    assert order.index(after) >= order.index(before)


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        (("8.0", "8.6"), RUNS),
        (("8.0", "12.0"), MAYBE),
        (("8.0", "7.5"), NEVER),
        (("8.0", None), None),
        ((None, "8.6"), RUNS),
        ((), None),
    ],
)
def test_of_several_cards_the_one_on_which_it_runs_best(
    capabilities: tuple[str | None, ...], expected: CodeFit | None
) -> None:
    assert best_fit("sm86", capabilities) is expected


def test_a_launch_without_code_for_its_card_is_refused_with_what_to_do() -> None:
    with pytest.raises(LlmError) as caught:
        check_code(build("sm86"), card("7.5"))
    error = caught.value
    assert error.code is ErrorCode.ENGINE_UNUSABLE
    assert "b11434-cuda-sm86 was compiled for sm86" in error.message
    assert "compute capability 7.5" in error.message
    hint = error.hint or ""
    assert "engine select" in hint and "-DCMAKE_CUDA_ARCHITECTURES=75" in hint
    assert error.details["gpu_architecture"] == "sm86"


@pytest.mark.parametrize(
    ("architecture", "capability"),
    [("sm86", "8.6"), ("sm86", "12.0"), (None, "7.5"), ("sm86", None), ("sm90x", "7.5")],
)
def test_what_may_run_or_is_unknown_is_not_refused(architecture: str | None, capability: str | None) -> None:
    check_code(build(architecture), card(capability))


def test_a_build_is_marked_where_it_is_listed() -> None:
    found = Find("b1-cuda-sm86", BuildKind.COMPILED, "engines_dir", Path("/e/llama-server"), "b1", "sm86")
    state = EngineState(found, None, None, None)
    selection = Selection(None, None, None, None, locked=False)

    def fit(*cards: Card) -> CodeFit | None:
        return build_view(state, selection, "b1", cards).code_fit

    assert fit(card("7.5")) is NEVER
    assert fit(card("7.5"), card("8.6")) is RUNS
    assert fit(card(None)) is None and fit() is None


# --- a load ---


def outcome(world: World, event: LoadRequested, *capabilities: str | None) -> Admit | LlmError:
    """What becomes of a load where the cards have these capabilities."""
    seen = world.observation()
    states = tuple(
        replace(state, card=replace(state.card, compute_capability=capability))
        for state, capability in zip(seen.cards, capabilities, strict=True)
    )
    observation, scheduler = replace(seen, cards=states), world.scheduler
    decision = Decider(
        observation=observation,
        ledger=scheduler.ledger,
        policy=scheduler.policy,
        instances=scheduler.instances,
        now_s=world.now_s,
        planner=lambda load, room: scheduler.question(load, observation, room),
    ).decide(event)
    assert isinstance(decision, Admit | Refuse)
    return decision.error if isinstance(decision, Refuse) else decision


@pytest.mark.parametrize(
    ("capability", "is_refused"), [("7.5", True), ("8.6", False), ("12.0", False), (None, False)]
)
def test_a_load_is_refused_where_its_engine_has_no_code_for_the_card(
    capability: str | None, is_refused: bool
) -> None:
    world = World()
    event = replace(world.request("a", "t"), build=build("sm86"))
    made = outcome(world, event, capability)
    assert isinstance(made, LlmError) is is_refused
    if isinstance(made, LlmError):
        assert made.code is ErrorCode.ENGINE_UNUSABLE and "was compiled for sm86" in made.message


def test_of_two_cards_the_one_with_code_is_taken() -> None:
    world = World(cards=TWO_CARDS)
    event = replace(world.request("a", "t"), capabilities=CUDA, build=build("sm86"))
    first, second = (each.card.uuid for each in world.observation().cards)
    for capabilities, expected in ((("7.5", "8.6"), second), (("8.6", "7.5"), first)):
        made = outcome(world, event, *capabilities)
        assert isinstance(made, Admit) and made.cards == (expected,)
    assert isinstance(outcome(world, event, "7.5", "7.5"), LlmError)
    aimed = outcome(world, replace(event, card=first), "7.5", "8.6")
    assert isinstance(aimed, LlmError) and aimed.details["card"] == first
