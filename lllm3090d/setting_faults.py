"""What is wrong with a setting, in the words of who has to correct it. Pure."""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

SHOWN_CHARACTERS = 200  # of a value that is refused
_VALIDATOR = "Value error, "  # what pydantic puts before the words of our own validators


def unknown(key: str, where: str, known: Collection[str]) -> str:
    """A key that is none, with the one that was probably meant, or all that there are."""
    close = difflib.get_close_matches(key, known, n=1)
    guess = f"; did you mean {close[0]}?" if close else f"; known are {', '.join(known)}"
    return f"{where} is not a setting{guess}"


def fault(
    item: Any, origin: Mapping[str, str], members: Mapping[str, Collection[str]], lists: Collection[str]
) -> str:
    """One error of pydantic as a sentence: place, value, and what is allowed.

    Args:
        item: an element of ``ValidationError.errors()``.
        origin: where each key was set.
        members: of settings that are tables of sections, what a section may say.
        lists: settings that are lists, written as one text with commas.
    """
    place = tuple(map(str, item["loc"]))
    key = place[0] if place else ""
    where = ".".join([origin.get(key, key), *place[1:]])
    value = item.get("input")
    if item["type"] == "extra_forbidden" and key in members:
        return unknown(place[-1], where, members[key])
    said = str(item["msg"]).removeprefix(_VALIDATOR)
    if key in lists and len(place) == 1 and _is_words(value):
        said = f"it is one text with commas, such as {json.dumps(','.join(value), ensure_ascii=False)}"
    if isinstance(value, Mapping) and any(isinstance(each, Mapping) for each in value.values()):
        return f"{where} is not valid: {said}"  # sections: which of them is in the words
    return f"{where} = {shown(value)} is not valid: {said}"


def shown(value: object) -> str:
    """A value as it was written, or the beginning of a long one."""
    text = json.dumps(value) if isinstance(value, bool) else repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


def _is_words(value: object) -> bool:
    return (
        isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(x, str) for x in value)
    )
