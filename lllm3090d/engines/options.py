"""The options of a command line of ``llama-server``, taken apart as the engine takes them. Pure.

As in the engine's own parser (``common/arg.cpp`` of b11434): variables of the environment first, then the arguments;
``_`` in a long option is ``-``; each option has its aliases; a number is what stands at the start of its text. A file
``config.ini`` that the engine may find is not known here.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from lllm3090d.engines.capabilities import Capabilities, Option
from lllm3090d.errors import ErrorCode, LlmError

TRUE_WORDS = frozenset({"on", "enabled", "true", "1"})
FALSE_WORDS = frozenset({"off", "disabled", "false", "0"})
# A switch and its negation are one option; these spellings are the negation.
NEGATION = re.compile(r"--?no-|-(nkvo|nocb|nr)\Z")
SEVERAL_VALUES = re.compile(
    r"[A-Z]+( [A-Z]+)+"
)  # ``START END``; other placeholders with blanks are one value
NUMBER = re.compile(r"\s*([+-]?\d+)")
LARGEST_NUMBER = (1 << 31) - 1  # the engine reads numbers into 32 bits and refuses larger ones
NAMES_SHOWN = 3
LEAST_LIKENESS = 0.75  # of a name that somebody may have meant


@dataclass(frozen=True, slots=True)
class Given:
    """One option as it was given.

    Attributes:
        option: of the build.
        written: the spelling, or the variable of the environment.
        values: as written; empty for a switch.
        is_negative: the negation of a switch.
    """

    option: Option
    written: str
    values: tuple[str, ...] = ()
    is_negative: bool = False

    def names(self, *spellings: str) -> bool:
        """It is the option that this build spells in one of these ways."""
        return any(spelling in self.option.names for spelling in spellings)


@dataclass(frozen=True, slots=True)
class OptionLine:
    """Options in the order in which the engine takes them; of each the last one counts, but for a few that add up."""

    given: tuple[Given, ...]

    def all(self, *spellings: str) -> Iterator[Given]:
        """Every occurrence of an option, in order."""
        return (each for each in self.given if each.names(*spellings))

    def last(self, *spellings: str) -> Given | None:
        """The one that counts; None where the option is absent."""
        return next((each for each in reversed(self.given) if each.names(*spellings)), None)

    def text(self, *spellings: str) -> str | None:
        """Its value; None where the option is absent, or is a switch."""
        found = self.last(*spellings)
        return found.values[0] if found is not None and found.values else None

    def number(self, default: int, *spellings: str) -> int:
        """Its value as a whole number. Raises LlmError INVALID_REQUEST where it is none."""
        found = self.last(*spellings)
        return default if found is None else whole_number(found)

    def switch(self, default: bool, *spellings: str) -> bool:
        """What the switch stands at."""
        found = self.last(*spellings)
        return default if found is None else not found.is_negative


def read_options(
    arguments: Sequence[str],
    capabilities: Capabilities,
    environment: Mapping[str, str] | None = None,
    *,
    strict: bool = False,
) -> OptionLine:
    """Take a command line apart.

    Args:
        arguments: without the program.
        capabilities: of the build that the line is for.
        environment: of the engine; None for an empty one.
        strict: no option is a value; the engine would take it for one, and nobody means that.

    Raises:
        LlmError: INVALID_REQUEST for an option that the build does not have, and for one without its value.
    """
    found = list(_of_environment(capabilities, environment or {}))
    position = 0
    while position < len(arguments):
        written = arguments[position]
        spelling = written.replace("_", "-") if written.startswith("--") else written
        option = capabilities.option(spelling)
        if option is None:
            raise _unknown(written, capabilities)
        count = value_count(option)
        values = tuple(arguments[position + 1 : position + 1 + count])
        instead = next((value for value in values if strict and value in capabilities.flags), None)
        if len(values) < count or instead is not None:
            follows = "" if instead is None else f": {instead} is an option"
            raise LlmError(
                ErrorCode.INVALID_REQUEST,
                f"{written} lacks its value ({option.value}){follows}.",
                hint=f"Give the value after {written}.",
                option=written,
            )
        found.append(Given(option, spelling, values, is_negative=_negates(option, spelling)))
        position += 1 + count
    return OptionLine(tuple(found))


def canonical(text: str, capabilities: Capabilities) -> str:
    """An option and its value in one text, in the spelling that the build's help names last."""
    spelling, blank, value = text.partition(" ")
    option = capabilities.option(spelling)
    if option is None:
        return text  # of another build
    same = [name for name in option.names if _negates(option, name) is _negates(option, spelling)]
    return f"{same[-1]}{blank}{value}"


def value_count(option: Option) -> int:
    """How many arguments follow the option."""
    if not option.value:
        return 0
    return len(option.value.split()) if SEVERAL_VALUES.fullmatch(option.value) else 1


def whole_number(given: Given) -> int:
    """The number at the start of a value, as the engine reads it.

    Raises:
        LlmError: INVALID_REQUEST where there is none, or none that the engine can hold.
    """
    text = given.values[0] if given.values else ""
    found = NUMBER.match(text)
    number = int(found[1]) if found and len(found[1]) <= len(str(LARGEST_NUMBER)) + 1 else None
    if number is None or not -LARGEST_NUMBER - 1 <= number <= LARGEST_NUMBER:
        raise LlmError(
            ErrorCode.INVALID_REQUEST,
            f"{given.written} takes a whole number of at most {LARGEST_NUMBER}, not {text!r}.",
            hint=f"Give {given.written} a number.",
            option=given.written,
        )
    return number


def _of_environment(capabilities: Capabilities, environment: Mapping[str, str]) -> Iterator[Given]:
    for option in capabilities.options:
        for variable in option.variables:
            value = environment.get(variable)
            negation = variable.replace("LLAMA_ARG_", "LLAMA_ARG_NO_", 1)
            if _is_pair(option) and negation in environment:
                yield Given(option, negation, is_negative=True)  # whatever its value
            elif value is None:
                continue
            elif option.value:
                yield Given(option, variable, (value,))
            elif _is_pair(option):
                yield Given(option, variable, is_negative=_truth(variable, value) is False)
            elif value in TRUE_WORDS:
                yield Given(option, variable, is_negative=_negates(option, option.names[-1]))


def _truth(variable: str, value: str) -> bool:
    if value not in TRUE_WORDS | FALSE_WORDS:
        raise LlmError(
            ErrorCode.INVALID_REQUEST,
            f"The variable {variable} is {value!r}, which the engine takes for neither yes nor no.",
            hint="Set it to 1 or 0.",
            variable=variable,
        )
    return value in TRUE_WORDS


def _is_pair(option: Option) -> bool:
    """A switch that has a negation among its spellings."""
    return not option.value and len({bool(NEGATION.match(name)) for name in option.names}) > 1


def _negates(option: Option, spelling: str) -> bool:
    """The spelling is a negation: of a pair, or of a switch that old builds have in this form alone.

    ``--no-host`` and the like, which negate nothing, are read by nobody here.
    """
    return not option.value and NEGATION.match(spelling) is not None


def _unknown(written: str, capabilities: Capabilities) -> LlmError:
    close = difflib.get_close_matches(written, sorted(capabilities.flags), NAMES_SHOWN, LEAST_LIKENESS)
    guess = f"Did you mean {' or '.join(close)}?" if close else "llama-server --help lists all options."
    return LlmError(
        ErrorCode.INVALID_REQUEST,
        f"This engine (version {capabilities.version}) has no option {written!r}.",
        hint=guess,
        option=written,
    )
