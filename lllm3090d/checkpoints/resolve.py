"""Finding the checkpoint that is meant by a name, an alias or parts of a name. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lllm3090d.checkpoints import names
from lllm3090d.checkpoints.cursor import printable, quoted
from lllm3090d.checkpoints.walk import SUFFIX
from lllm3090d.errors import ErrorCode, LlmError

if TYPE_CHECKING:
    from lllm3090d.checkpoints.library import Checkpoint

LIST_HINT = "`lllm3090ctl models` lists the models there are."
_NAMES_SHOWN = 10


def resolve(
    name: str,
    checkpoints: Sequence[Checkpoint],
    aliases: Mapping[str, str],
    *,
    models_dir: Path | None = None,
) -> Checkpoint:
    """Find the checkpoint that is meant: exact name, alias, exact but for case, then unambiguous parts.

    Args:
        name: what was asked for; the ending ``.gguf`` may be there.
        checkpoints: what there is.
        aliases: short name -> name (or parts of it).
        models_dir: for the hint when there are no checkpoints.

    Raises:
        LlmError: NO_MODELS; UNKNOWN_MODEL with close matches in ``details["close"]``; AMBIGUOUS_MODEL with
            ``details["candidates"]``. A bad alias is named in ``details["alias"]``.
    """
    if not checkpoints:
        place = printable(models_dir) if models_dir else "models_dir (~/models unless set)"
        raise LlmError(
            ErrorCode.NO_MODELS,
            f"There are no models, so {quoted(name)} cannot be found.",
            hint=f"Put each model, as GGUF, into a directory of its own below {place}.",
            name=printable(name),
        )
    by_name = {checkpoint.name: checkpoint for checkpoint in checkpoints}
    if name in by_name:
        return by_name[name]
    if name in aliases:
        return _resolve_alias(name, checkpoints, aliases[name])
    spellings = {names.fold(name), names.fold(name).removesuffix(SUFFIX)}
    found = [known for known in by_name if names.fold(known) in spellings]
    if not found:
        for alias, target in aliases.items():
            if names.fold(alias) in spellings:
                return _resolve_alias(alias, checkpoints, target)
        found = _by_parts(name, list(by_name))
    if len(found) == 1:
        return by_name[found[0]]
    raise _ambiguous(name, found) if found else _unknown(name, [*by_name, *aliases])


def _by_parts(name: str, known: Sequence[str]) -> list[str]:
    """The names that are meant; one that fits exactly goes before those that only begin like it."""
    query = name[: -len(SUFFIX)] if name.lower().endswith(SUFFIX) else name
    same = [candidate for candidate in known if names.same_pieces(query, candidate)]
    if len(same) == 1:
        return same
    fits = {candidate: names.fit(query, candidate) for candidate in known}
    exact = [candidate for candidate, fit in fits.items() if fit is names.Fit.EXACT]
    if len(exact) == 1:
        return exact
    return sorted(candidate for candidate, fit in fits.items() if fit is not names.Fit.NONE)


def _resolve_alias(alias: str, checkpoints: Sequence[Checkpoint], target: str) -> Checkpoint:
    try:
        return resolve(target, checkpoints, {})
    except LlmError as error:
        raise LlmError(
            error.code,
            f"The alias {quoted(alias)} points to {quoted(target)}. {error.message}",
            hint="Correct `aliases` in config.toml (LLLM3090_ALIASES).",
            **{**error.details, "alias": printable(alias), "target": printable(target)},
        ) from error


def _ambiguous(name: str, candidates: Sequence[str]) -> LlmError:
    more = f" and {len(candidates) - _NAMES_SHOWN} more" if len(candidates) > _NAMES_SHOWN else ""
    return LlmError(
        ErrorCode.AMBIGUOUS_MODEL,
        f"{quoted(name)} fits {len(candidates)} models: {', '.join(candidates[:_NAMES_SHOWN])}{more}.",
        hint="Give more of the name, or all of it.",
        name=printable(name),
        candidates=list(candidates),
    )


def _unknown(name: str, known: Sequence[str]) -> LlmError:
    shown = printable(name[: names.MAX_QUERY_CHARACTERS])
    close = names.suggestions(name, known)
    meant = f" Close to it: {', '.join(map(printable, close))}." if close else ""
    return LlmError(
        ErrorCode.UNKNOWN_MODEL,
        f"There is no model '{shown}'.{meant}",
        hint=LIST_HINT,
        name=shown,
        close=[printable(match) for match in close],
    )
