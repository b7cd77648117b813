"""The build that a person chose, in ``engine.json`` of the state directory: ``{"dir": NAME}``.

The name is looked up in the list of builds that are offered and never used as a path. It lives in the state
directory so that a new installation does not reset it.
"""

from __future__ import annotations

import json
from pathlib import Path

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.whole_files import read_whole, replace_whole, settle_names

FILE_NAME = "engine.json"
LARGEST_BYTES = 4096
NAME_LIMIT = 255  # characters, as of a file name
FORGET_HINT = "Choose anew: lllm3090ctl engine select NAME, or: lllm3090ctl engine select --automatic"


def read_choice(state_dir: Path) -> str | None:
    """The name that was chosen, None where nothing was; blocking.

    Raises:
        LlmError: ENGINE_CHOICE_IGNORED where there is a record that cannot be understood.
    """
    file = state_dir / FILE_NAME
    try:
        members = json.loads(read_whole(file, LARGEST_BYTES))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ignored(file, f"it cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ignored(file, f"it is damaged: {error}") from error
    name = members.get("dir") if isinstance(members, dict) else None
    if not isinstance(name, str) or not name or len(name) > NAME_LIMIT or not name.isprintable():
        raise ignored(file, 'it is not of the form {"dir": NAME}')
    return name


def write_choice(state_dir: Path, name: str | None) -> None:
    """Remember a choice, or forget it with None; blocking.

    The record is replaced as a whole: whatever fails, the old one stays.

    Raises:
        LlmError: STATE_UNUSABLE where it cannot be written or removed.
    """
    file = state_dir / FILE_NAME
    try:
        if name is None:
            file.unlink(missing_ok=True)
        else:
            state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_whole(file, json.dumps({"dir": name}).encode() + b"\n")
        settle_names(state_dir)
    except OSError as error:
        done = "removed" if name is None else "written"
        raise LlmError(
            ErrorCode.STATE_UNUSABLE,
            f"The choice of the engine, {file}, cannot be {done}: {error.strerror}. What was chosen before stays.",
            hint="Make room on its disk or correct its permissions, then choose again.",
            path=str(file),
        ) from error


def ignored(file: Path, why: str, **details: object) -> LlmError:
    """A choice that counts for nothing, and why."""
    return LlmError(
        ErrorCode.ENGINE_CHOICE_IGNORED,
        f"The choice of an engine in {file} is ignored: {why}.",
        hint=FORGET_HINT,
        path=str(file),
        **details,
    )
