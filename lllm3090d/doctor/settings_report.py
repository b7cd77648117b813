"""What a settings file comes to for the daemon, as one line of JSON: for ``lllm3090ctl config``.

Runs as a process of its own (``lllm3090d --check --json``), in the environment that the daemon has or would have: its
variables outrank the file, and say which file it is.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from lllm3090d.doctor.examination import daemon_environment, read_units
from lllm3090d.doctor.surroundings import Units, ask
from lllm3090d.errors import ExitStatus, LlmError
from lllm3090d.setting_table import TAKES_EFFECT, TakesEffect, allowed, shape, unit
from lllm3090d.settings import (
    ENVIRONMENT_PREFIX,
    SETTING_KEYS,
    Settings,
    default_config_file,
    file_problems,
    load_settings,
    origins,
    setting_kind,
)

_SCHEMA_DIALECT = "http://json-schema.org/draft-07/schema#"


class SettingView(BaseModel):
    """One setting.

    Attributes:
        variable: of the environment, by which it can be set too.
        kind: as :func:`lllm3090d.settings.setting_kind`.
        shape: how its value is written, see :class:`lllm3090d.setting_table.Shape`.
        unit: of a number; None where it has none.
        allowed: the range of a number, in words.
        value: what counts; None where the settings are not valid.
        origin: of the value: ``default``, ``file`` or ``environment``; None where the settings are not valid.
        takes_effect: when a change of it counts.
    """

    model_config = ConfigDict(frozen=True)

    key: str
    variable: str
    kind: str
    shape: Mapping[str, Any]
    unit: str | None
    allowed: str
    default: Any
    value: Any
    origin: str | None
    takes_effect: TakesEffect
    description: str


class SettingsReport(BaseModel):
    """What a file comes to.

    Attributes:
        file: that was read.
        used_file: that the daemon reads, which is the same unless another one was named.
        exists: whether it is there; defaults apply where it is not.
        environment: whose variables counted: ``daemon`` (it runs), ``manager`` or ``shell``.
        problems: what is not valid, a sentence each; none where all is.
    """

    model_config = ConfigDict(frozen=True)

    file: str
    used_file: str
    exists: bool
    environment: str
    problems: tuple[str, ...]
    hint: str | None
    settings: tuple[SettingView, ...]


def main(config_file: Path | None) -> None:
    """Write the report, and end with status 0 where the settings are valid, else 78."""
    units, _ = read_units()
    environment, origin = daemon_environment(ask, os.environ, units)
    os.environ.clear()
    os.environ.update(environment)
    told = report(config_file, used_file(units), origin)
    sys.stdout.write(told.model_dump_json() + "\n")
    sys.stdout.flush()
    if told.problems:
        sys.exit(int(ExitStatus.CONFIG))


def report(config_file: Path | None, used: Path, environment_of: str) -> SettingsReport:
    """What a file comes to in this process's environment.

    Args:
        config_file: to be read; None for the daemon's own.
        used: the daemon's own.
        environment_of: whose environment this is.
    """
    file = config_file or used
    settings: Settings | None = None
    problems: tuple[str, ...] = ()
    hint: str | None = None
    found: Mapping[str, str] = {}
    try:
        settings = load_settings(file)
        found = origins(file)
        problems = file_problems(file)  # of what a variable outranks today
        hint = "Correct it; a variable outranks it, but only until that goes." if problems else None
    except LlmError as error:
        said = error.details.get("problems")
        problems = tuple(map(str, said)) if isinstance(said, list) else (error.message,)
        hint = error.hint
    return SettingsReport(
        file=str(file),
        used_file=str(used),
        exists=file.exists(),
        environment=environment_of,
        problems=problems,
        hint=hint,
        settings=_views(settings, found),
    )


def used_file(units: Units | None, proc: Path = Path("/proc")) -> Path:
    """The file that the daemon reads: as its command line says, else by its environment, which is this process's."""
    pid = (units.service.get("MainPID") if units else None) or "0"
    named = _named_file(proc, pid) if pid.isdecimal() and pid != "0" else None
    return named or default_config_file()


def schema() -> str:
    """The JSON schema of the file, for editors."""
    told = Settings.model_json_schema()
    for key in told["properties"].keys() - set(SETTING_KEYS):
        del told["properties"][key]
    for each in told["properties"].values():
        each.pop("format", None)  # "path", which schemas do not know
    told |= {"$schema": _SCHEMA_DIALECT, "title": "config.toml of lllm3090d"}
    told["description"] = "Settings of lllm3090d. All are described in lllm3090-config(5)."
    return json.dumps(told, indent=2) + "\n"


def _views(settings: Settings | None, found: Mapping[str, str]) -> tuple[SettingView, ...]:
    values = settings.model_dump(mode="json") if settings is not None else {}
    if settings is not None:  # what sections leave open is no value of theirs
        values["models"] = {
            name: section.model_dump(mode="json", exclude_unset=True)
            for name, section in settings.models.items()
        }
    defaults = Settings().model_dump(mode="json")
    return tuple(
        SettingView(
            key=key,
            variable=ENVIRONMENT_PREFIX + key.upper(),
            kind=setting_kind(key),
            shape=asdict(shape(key)),
            unit=unit(key),
            allowed=allowed(key),
            default=defaults[key],
            value=values.get(key),
            origin=_origin(key, values, defaults, found) if settings is not None else None,
            takes_effect=TAKES_EFFECT[key],
            description=Settings.model_fields[key].description or "",
        )
        for key in SETTING_KEYS
    )


def _origin(
    key: str, values: Mapping[str, Any], defaults: Mapping[str, Any], found: Mapping[str, str]
) -> str:
    """Tables have what sections of models say too, so their origin may be that of the sections."""
    if key in found:
        return found[key]
    return "default" if values[key] == defaults[key] else found.get("models", "default")


def _named_file(proc: Path, pid: str) -> Path | None:
    """FILE of ``--config FILE`` or ``--config=FILE``, where it is absolute."""
    try:
        words: Sequence[str] = [
            os.fsdecode(word) for word in (proc / pid / "cmdline").read_bytes().split(b"\0")
        ]
    except OSError:
        return None
    for word, after in zip(words, [*words[1:], ""], strict=True):
        text = after if word == "--config" else word.removeprefix("--config=")
        if word.startswith("--config") and text != word and Path(text).is_absolute():
            return Path(text)
    return None
