"""Which model a request means, before anybody looks whether there is such a model. Pure."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gateway.routes import Dialect

LONGEST_NAME = 512


def name_wanted(
    named: object, dialect: Dialect, serving: Sequence[str], default: str, meanings: Mapping[str, str]
) -> str:
    """The name by which a model is to be looked for.

    Args:
        named: what the request says: any JSON value; None or an empty text for nothing.
        dialect: llama.cpp's clients name no model where only one is loaded.
        serving: the models that serve.
        default: for requests that name none; empty for none.
        meanings: what names of clients stand for; names, or patterns in the order of the settings.

    Raises:
        LlmError: INVALID_REQUEST where it names none and none is meant, or what could be no name.
    """
    if named is None or named == "":
        named = default or None
        if named is None and dialect is Dialect.LLAMA and len(serving) == 1:
            return serving[0]
    if not isinstance(named, str) or not named or len(named) > LONGEST_NAME:
        raise LlmError(
            ErrorCode.INVALID_REQUEST,
            f"The request names no model{'' if named is None else ' that could be one'}.",
            hint='Give it as "model", one of those of /v1/models, or set gateway_default_model.',
            field="model",
            loaded=list(serving),
        )
    return meant(named, meanings)


def meant(name: str, meanings: Mapping[str, str]) -> str:
    """What the settings have a name mean; itself where they say nothing."""
    if name in meanings:
        return meanings[name]
    patterns = (
        model for pattern, model in meanings.items() if fnmatch.fnmatchcase(name.lower(), pattern.lower())
    )
    return next(patterns, name)
