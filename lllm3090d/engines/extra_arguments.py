"""Further arguments of a person for the engine: checked against its ``--help``, and priced. Pure.

Every option is one of four kinds. What has a price becomes a part of the question to the planner, which honours it
exactly or refuses. What has none is handed to the engine as it is. What the daemon decides itself, and what has a price
that nobody knows, is refused with the reason; so is what a newer build has and nobody has looked at yet.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NoReturn

from lllm3090d.checkpoints.facts import CheckpointFacts
from lllm3090d.engines.capabilities import Capabilities
from lllm3090d.engines.command_line import has_no_price
from lllm3090d.engines.option_kinds import FREE, OWNED
from lllm3090d.engines.options import TRUE_WORDS, Given, read_options, whole_number
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.planning.cache import CacheType
from lllm3090d.planning.launch import PlanPolicy, SpecType
from lllm3090d.planning.request import Drafting, PlanRequest, ProjectorPlace, option_of
from lllm3090d.planning.rope import RopeScaling

# systemd expands $ in the arguments of a unit and rewrites ; when it reads the unit again; values in
# Environment= are exact in both cases.
ALTERED_BY_SYSTEMD = re.compile(r"[$;]")
CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
# Loaded with mmap or read, the bytes are the same; locked ones are no cache that the kernel may drop.
FREE_LOAD_MODES = frozenset({"auto", "none", "mmap", "dio"})
EVERY_MODEL = "*"
LARGEST_COUNT = 999  # more layers than any model has


@dataclass(frozen=True, slots=True)
class ExtraArguments:
    """What further arguments mean.

    Attributes:
        request: what of them the planner is asked; the rest of it is open.
        stated: names of all fields that they decide, also where that is the usual value.
        context_checkpoints, checkpoint_min_step_tokens, prompt_cache_mib, image_max_tokens: in place of the settings;
            None where not given.
        passed: for the engine as they are, without ``$`` and ``;``.
        environment: those whose value holds one of these, name and value.
        shown: everything that is handed on, an option and its value in one text.
    """

    request: PlanRequest = field(default_factory=PlanRequest)
    stated: frozenset[str] = frozenset()
    context_checkpoints: int | None = None
    checkpoint_min_step_tokens: int | None = None
    prompt_cache_mib: int | None = None
    image_max_tokens: int | None = None
    passed: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    shown: tuple[str, ...] = ()

    def policy(self, policy: PlanPolicy) -> PlanPolicy:
        """The settings with what stands in their place."""
        changes = {
            name: getattr(self, name)
            for name in (
                "context_checkpoints",
                "checkpoint_min_step_tokens",
                "prompt_cache_mib",
                "image_max_tokens",
            )
            if getattr(self, name) is not None
        }
        return replace(policy, **changes)


NOTHING = ExtraArguments()


def extra_arguments(
    arguments: Sequence[str], capabilities: Capabilities, facts: CheckpointFacts | None
) -> ExtraArguments:
    """Check further arguments and sort them.

    Args:
        arguments: options and their values, each a word of its own; of an option the last one counts.
        capabilities: of the build.
        facts: the checkpoint, for "all experts"; None of a model without a rule, whose layers nobody has counted.

    Raises:
        LlmError: INVALID_REQUEST for an option that the build does not have, a value that is missing or not among
            those that its help lists, and for an option that is not a person's to give, with the reason.
    """
    line = read_options(arguments, capabilities, strict=True)
    for given in line.given:
        _check_value(given)
    fields_of: dict[str, Any] = {}
    free: list[Given] = []
    for given in line.given:
        _refuse_unasked(given)
        found = _priced(given, facts)
        if found is None:
            free.append(given)
        else:
            fields_of |= found
    passed, environment = _handed_on(free)
    own = {each.name for each in fields(ExtraArguments)}
    return ExtraArguments(
        request=PlanRequest(**{name: value for name, value in fields_of.items() if name not in own}),
        stated=frozenset(fields_of),
        passed=passed,
        environment=environment,
        shown=tuple(" ".join((given.written, *given.values)) for given in free),
        **{name: value for name, value in fields_of.items() if name in own},
    )


def merged(upper: PlanRequest, lower: PlanRequest) -> PlanRequest:
    """A request in which ``lower`` fills what ``upper`` leaves open."""
    usual = PlanRequest()
    changes = {
        each.name: getattr(lower, each.name)
        for each in fields(PlanRequest)
        if getattr(upper, each.name) == getattr(usual, each.name)
    }
    return replace(upper, **changes)


def check_asked_once(request: PlanRequest, extra: ExtraArguments) -> None:
    """Refuse a load whose options and further arguments contradict each other.

    Raises:
        LlmError: INVALID_REQUEST, naming what was asked twice.
    """
    usual = PlanRequest()
    for each in fields(PlanRequest):
        one, other = getattr(request, each.name), getattr(extra.request, each.name)
        open_value = getattr(usual, each.name)
        is_stated = (
            other != open_value or each.name in extra.stated
        )  # -no-kvu says what is usual, but says it
        if one != open_value and is_stated and one != other:
            texts = ("on" if value is True else "off" if value is False else value for value in (one, other))
            raise LlmError(
                ErrorCode.INVALID_REQUEST,
                "{} was asked for twice: {}, and {} in the engine's arguments.".format(
                    option_of(each.name), *texts
                ),
                hint="Ask for it once.",
                field=each.name,
            )


def chosen_for(model: str, table: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """The arguments that the settings have for a model: those for every model, then its own."""
    return (*table.get(EVERY_MODEL, ()), *table.get(model, ()))


# --- what has a price ----------------------------------------------------------------------------------------------

Read = Callable[[Given, CheckpointFacts | None], Mapping[str, Any]]


def _positive(name: str) -> Read:
    """A number; one that is not positive asks for nothing, as the engine takes it for its default."""

    def read(given: Given, facts: CheckpointFacts | None) -> Mapping[str, Any]:
        number = whole_number(given)
        return {name: number} if number > 0 else {}

    return read


def _number(name: str, reason: str, most: int = 10_000) -> Read:
    """A number that must not be negative, nor above what the settings allow for the same."""

    def read(given: Given, facts: CheckpointFacts | None) -> Mapping[str, Any]:
        number = whole_number(given)
        if number < 0:
            _refuse(given, reason)
        if number > most:
            _refuse(given, f"{number} is more than {most}, the most that has a price")
        return {name: number}

    return read


def _layers(given: Given, facts: CheckpointFacts | None) -> Mapping[str, Any]:
    if given.values[0] == "auto":
        return {}
    everything = LARGEST_COUNT if facts is None else len(facts.layers) + 1
    number = everything if given.values[0] == "all" else whole_number(given)
    if number < 0:
        return {}
    if facts is None:
        if number < everything:
            _refuse_uncounted(given)
        return {}  # all of it, as without
    return {"gpu_layers": min(number, everything)}


def _all_experts(given: Given, facts: CheckpointFacts | None) -> Mapping[str, Any]:
    if facts is None:
        _refuse_uncounted(given)
    return {"cpu_experts": len(facts.trunk)}


def _spec_type(given: Given, facts: CheckpointFacts | None) -> Mapping[str, Any]:
    if given.values[0] == "none":
        return {"drafting": Drafting.OFF}
    if given.values[0] != SpecType.MTP:
        _refuse(
            given,
            f"only {SpecType.MTP} and none can be asked for here: a drafter in a file of its own lies beside its model"
            " and says itself how it drafts, and drafts by n-grams have no price yet",
        )
    return {"drafting": Drafting.ON}


def _flash_attention(given: Given, facts: CheckpointFacts | None) -> Mapping[str, Any]:
    if given.values and given.values[0] not in TRUE_WORDS:
        _refuse(given, "every price is that of flash attention, which is always on")
    return {}


def _rope_scaling(given: Given, facts: CheckpointFacts | None) -> Mapping[str, Any]:
    return {"rope_scaling": RopeScaling(given.values[0])}


_PRICED: Mapping[str, Read] = {
    "--ctx-size": _positive("context_tokens"),
    "--parallel": _positive("parallel"),
    "--batch-size": _positive("batch_tokens"),
    "--ubatch-size": _positive("micro_batch_tokens"),
    "--cache-type-k": lambda given, facts: {"cache_type_k": CacheType(given.values[0])},
    "--cache-type-v": lambda given, facts: {"cache_type_v": CacheType(given.values[0])},
    "--n-gpu-layers": _layers,
    "--n-cpu-moe": _number("cpu_experts", "a number of layers is not negative"),
    "--cpu-moe": _all_experts,
    "--no-kv-offload": lambda given, facts: {"cache_on_host": given.is_negative},
    "--kv-unified": lambda given, facts: {"unified": not given.is_negative},
    "--swa-full": lambda given, facts: {"swa_full": True},
    "--spec-type": _spec_type,
    "--spec-draft-n-max": _positive("draft_tokens"),
    "--no-mmproj": lambda given, facts: {"projector": ProjectorPlace.OFF} if given.is_negative else {},
    "--no-mmproj-offload": lambda given, facts: {
        "projector": ProjectorPlace.HOST if given.is_negative else ProjectorPlace.CARD
    },
    "--rope-scaling": _rope_scaling,
    "--flash-attn": _flash_attention,
    "--ctx-checkpoints": _number("context_checkpoints", "a number of checkpoints is not negative", 256),
    "--checkpoint-min-step": _number("checkpoint_min_step_tokens", "a distance is not negative", 1 << 30),
    "--cache-ram": _number("prompt_cache_mib", "finished prompts without a limit have no price", 1 << 30),
    "--image-max-tokens": _number("image_max_tokens", "a number of tokens is not negative", 1 << 20),
}
PRICED = tuple(_PRICED)


def _priced(given: Given, facts: CheckpointFacts | None) -> Mapping[str, Any] | None:
    """Fields of the request or of the settings; None for an option without a price."""
    for name, read in _PRICED.items():
        if given.names(name):
            try:
                return read(given, facts)
            except ValueError as error:  # a word that only a newer build knows
                _refuse(given, f"{error}", error)
    return None


# --- what is refused -------------------------------------------------------------------------------------------------


def _check_value(given: Given) -> None:
    option = given.option
    for value in given.values:
        if CONTROL_CHARACTERS.search(value):
            _refuse(given, "its value holds control characters, which a unit cannot carry")
    words = given.values[0].split(",") if given.names("--spec-type") else given.values
    odd = [word for word in words if option.allowed and word not in option.allowed]
    if odd:
        _refuse(given, f"{odd[0]!r} is not among the values that this engine lists", allowed=option.allowed)


def _refuse_uncounted(given: Given) -> NoReturn:
    _refuse(given, "no rule for this architecture tells how many layers there are")


def _refuse_unasked(given: Given) -> None:
    for names, reason in OWNED.items():
        if given.names(*names):
            _refuse(given, reason)
    if given.names("--load-mode") and given.values[0] not in FREE_LOAD_MODES:
        _refuse(given, "memory that is locked has another price, which is not known here")
    if has_no_price(given):
        _refuse(given, "it takes memory, or moves it, in a way that has no price here yet")
    if not given.names(*FREE, *_PRICED):
        _refuse(given, "this release does not know the option, so it cannot tell what it costs")


def _refuse(
    given: Given, reason: str, cause: Exception | None = None, *, allowed: Sequence[str] = ()
) -> NoReturn:
    hint = f"Give one of {', '.join(allowed)}." if allowed else f"Leave {given.written} out."
    raise LlmError(
        ErrorCode.INVALID_REQUEST,
        f"{given.written} cannot be given to the engine: {reason}.",
        hint=hint,
        option=given.written,
    ) from cause


# --- what is handed on -----------------------------------------------------------------------------------------------


def _handed_on(free: Sequence[Given]) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Arguments in order, and variables for values that systemd would alter as arguments."""
    arguments: list[str] = []
    environment: dict[str, str] = {}
    altered = {given.option for given in free if _is_altered(given)}
    for index, given in enumerate(free):
        if given.option not in altered:
            arguments += [given.written, *given.values]
            continue
        if any(later.option == given.option for later in free[index + 1 :]):
            continue  # an argument outranks the variable, so only the last one may be handed on
        if not _is_altered(given):
            arguments += [given.written, *given.values]
        elif not given.option.variables:
            _refuse(
                given, "its value holds '$' or ';', which a unit cannot carry, and no variable stands for it"
            )
        else:
            environment[given.option.variables[0]] = given.values[0]
    return tuple(arguments), tuple(sorted(environment.items()))


def _is_altered(given: Given) -> bool:
    return any(ALTERED_BY_SYSTEMD.search(value) for value in given.values)
