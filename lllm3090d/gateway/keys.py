"""The gateway's keys, in ``keys.json`` of the state directory: names, and SHA-256 of each. Blocking, for threads.

They are not in the state database: what is in there can be learnt again, so a damaged one is begun anew, and that would
open the gateway. A file that cannot be read keeps it shut instead.

A key has 256 random bits, so its digest needs neither salt nor stretching.
"""

from __future__ import annotations

import logging
import re
import secrets
import threading
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gateway.guard import digest
from lllm3090d.serving.moments import now_text
from lllm3090d.whole_files import read_whole, replace_whole, settle_names

log = logging.getLogger(__name__)

FILE_NAME = "keys.json"
LARGEST_BYTES = 1 << 18
MOST_KEYS = 256
# So that programs that look for secrets know one when they see it.
PREFIX = "lllm3090_"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Key(BaseModel):
    """What is kept of a key.

    Attributes:
        name: by which a person knows it.
        digest: SHA-256, hexadecimal.
        made: when, RFC 3339 in UTC.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: Annotated[str, Field(pattern=rf"^{NAME.pattern}$")]
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    made: Annotated[str, Field(max_length=40)]


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    version: Annotated[int, Field(ge=1, le=1)] = 1
    keys: tuple[Key, ...] = ()


class Keys:
    """The keys, as they are kept.

    Args:
        state_dir: where their file is.
    """

    def __init__(self, state_dir: Path) -> None:
        self._file = state_dir / FILE_NAME
        self._lock = threading.Lock()
        self._keys: tuple[Key, ...] = ()
        # What is compared with what a client sends; another object where they have changed.
        self.digests: tuple[str, ...] = ()
        # Why they are not known; nobody is let in then.
        self.problem: LlmError | None = None

    @property
    def listed(self) -> tuple[Key, ...]:
        """The oldest first. Does not block."""
        return self._keys

    def read(self) -> None:
        """Learn which there are; a failure is :attr:`problem`."""
        with self._lock:
            try:
                self._know(_read(self._file))
            except (OSError, ValueError) as error:
                why = error.strerror if isinstance(error, OSError) else _why(error)
                self.problem = LlmError(
                    ErrorCode.STATE_UNUSABLE,
                    f"The keys of the gateway, {self._file}, cannot be read: {why}. Nobody is let in.",
                    hint="Correct that; or remove the file, make new keys (lllm3090ctl key add NAME), and then:"
                    " systemctl --user reload lllm3090d",
                    path=str(self._file),
                )
            else:
                self.problem = None

    def add(self, name: str) -> tuple[Key, str]:
        """Make a key; what is kept of it, and the key itself, which nobody can tell later.

        Raises:
            LlmError: INVALID_REQUEST for a bad name or one that is taken, STATE_UNUSABLE.
        """
        with self._lock:
            self._check()
            if not NAME.fullmatch(name):
                raise LlmError(
                    ErrorCode.INVALID_REQUEST,
                    f"{name[:80]!r} is no name for a key.",
                    hint="Up to 64 letters, digits, dots, dashes and underscores, beginning with a letter or a digit.",
                    field="name",
                )
            if any(key.name == name for key in self._keys):
                raise LlmError(
                    ErrorCode.INVALID_REQUEST,
                    f"There is a key {name} already; what it is cannot be told.",
                    hint=f"Take another name, or remove it first: lllm3090ctl key remove {name}",
                    field="name",
                )
            if len(self._keys) >= MOST_KEYS:
                raise LlmError(
                    ErrorCode.INVALID_REQUEST,
                    f"There are {MOST_KEYS} keys, which is all there may be.",
                    hint="Remove some: lllm3090ctl key remove NAME",
                )
            secret = PREFIX + secrets.token_hex(32)
            key = Key(name=name, digest=digest(secret), made=now_text())
            self._keep((*self._keys, key))
            return key, secret

    def remove(self, name: str) -> None:
        """Forget a key.

        Raises:
            LlmError: INVALID_REQUEST where there is none of that name, STATE_UNUSABLE.
        """
        with self._lock:
            self._check()
            left = tuple(key for key in self._keys if key.name != name)
            if left == self._keys:
                raise LlmError(
                    ErrorCode.INVALID_REQUEST,
                    f"There is no key {name[:80]!r}.",
                    hint="See which there are: lllm3090ctl key list",
                    field="name",
                )
            self._keep(left)

    def _check(self) -> None:
        if self.problem is not None:
            raise self.problem

    def _keep(self, keys: tuple[Key, ...]) -> None:
        content = _File(keys=keys).model_dump_json(indent=1).encode() + b"\n"
        try:
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_whole(self._file, content)
            settle_names(self._file.parent)
        except OSError as error:
            raise LlmError(
                ErrorCode.STATE_UNUSABLE,
                f"The keys of the gateway, {self._file}, cannot be written: {error.strerror}. They stay as they were.",
                hint="Make room on its disk or correct its permissions, then try again.",
                path=str(self._file),
            ) from error
        self._know(keys)

    def _know(self, keys: tuple[Key, ...]) -> None:
        self._keys, self.digests = keys, tuple(key.digest for key in keys)


def _read(file: Path) -> tuple[Key, ...]:
    """The keys of a file; none where there is no file. Raises OSError, ValueError."""
    try:
        content = read_whole(file, LARGEST_BYTES)
    except FileNotFoundError:
        return ()
    return _File.model_validate_json(content).keys


def _why(error: ValueError) -> str:
    """Without what the file has, for a person may have put a key into it."""
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or 'document'}: {first['msg']}"
