"""Ask a build what it can do: ``--version``, ``--help``, ``--list-devices``. Blocking; callers use a thread.

On a CUDA build ``--list-devices`` opens a compute context in the short-lived child, never in the daemon.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from lllm3090d.engines.binaries import fingerprint, fit_params
from lllm3090d.engines.capabilities import Backend, Build, Capabilities, DryRunAbility
from lllm3090d.engines.help_text import (
    DEVICES_MARK,
    VARIABLE,
    parse_devices,
    parse_help,
    parse_listed,
    parse_options,
    parse_version,
)
from lllm3090d.engines.process import Answer, clean_environment, describe_status, last_lines, run_program
from lllm3090d.engines.tier_flags import reports_virtual_memory
from lllm3090d.errors import ErrorCode, LlmError

__all__ = [
    "TIME_LIMIT_S",
    "Texts",
    "ask",
    "ask_devices",
    "capabilities_of",
    "describe_status",
    "fingerprint",
    "parse_devices",
    "parse_help",
    "parse_version",
    "probe",
]

MISSING_LIBRARY = re.compile(r"error while loading shared libraries: (\S+):")
TIME_LIMIT_S = 20.0  # each command; a real build answers in 10 ms, a CUDA build in about a second


@dataclass(frozen=True, slots=True)
class Texts:
    """What a build says of itself, whatever the machine.

    Attributes:
        version: answer to ``--version``.
        usage: to ``--help``.
        dry_run_program: path of the program that projects memory; None without one.
        dry_run_usage: its answer to ``--help``.
    """

    version: str
    usage: str
    dry_run_program: Path | None = None
    dry_run_usage: str = ""


def probe(
    build: Build, *, inherited: Mapping[str, str] | None = None, time_limit_s: float = TIME_LIMIT_S
) -> Capabilities:
    """Run the build's informative commands, side by side.

    Args:
        build: the build.
        inherited: environment to start from, cleaned; None for the process's own.
        time_limit_s: seconds for each command.

    Returns:
        the capabilities; backend UNKNOWN where only ``--list-devices`` failed.

    Raises:
        LlmError: ENGINE_NOT_EXECUTABLE where the system forbids it, ENGINE_UNUSABLE where the build cannot
            run here (missing library, other processor, no such format, no answer in time), with its last
            lines.
    """
    texts, devices = ask(build, inherited=inherited, time_limit_s=time_limit_s)
    return capabilities_of(build, texts, devices)


def ask(
    build: Build, *, inherited: Mapping[str, str] | None = None, time_limit_s: float = TIME_LIMIT_S
) -> tuple[Texts, str | None]:
    """What :func:`capabilities_of` makes capabilities of; the list of devices is None where it failed."""
    environment = clean_environment(build, os.environ if inherited is None else inherited)
    options = ("--version", "--help", "--list-devices")
    program = fit_params(build)
    with ThreadPoolExecutor(max_workers=len(options) + 1, thread_name_prefix="probe") as pool:
        running = [
            pool.submit(run_program, build, build.server, (option,), environment, time_limit_s)
            for option in options
        ]
        if program is not None:
            running.append(pool.submit(run_program, build, program, ("--help",), environment, time_limit_s))
        version, usage, devices, *dry_run = (item.result() for item in running)
    for option, answer in (("--version", version), ("--help", usage)):
        if not answer.succeeded:
            raise _unusable(build, option, answer, time_limit_s)
    # One that does not work is as good as none: nothing depends on it.
    dry_run_usage = dry_run[0].text if dry_run and dry_run[0].succeeded else ""
    texts = Texts(version.text, usage.text, program if dry_run_usage else None, dry_run_usage)
    return texts, _device_list(devices)


def ask_devices(
    build: Build, *, inherited: Mapping[str, str] | None = None, time_limit_s: float = TIME_LIMIT_S
) -> str | None:
    """The list of devices, None where that failed. Raises as :func:`probe`."""
    environment = clean_environment(build, os.environ if inherited is None else inherited)
    return _device_list(run_program(build, build.server, ("--list-devices",), environment, time_limit_s))


def capabilities_of(build: Build, texts: Texts, devices: str | None) -> Capabilities:
    """What the answers of a build mean.

    Raises:
        LlmError: ENGINE_UNUSABLE where they are not those of a llama-server.
    """
    options = parse_options(texts.usage)
    if not options:
        raise LlmError(
            ErrorCode.ENGINE_UNUSABLE,
            f"{build.server} lists no options on --help, so it is no llama-server.",
            hint="Choose another build: set llama_dir in config.toml.",
            path=str(build.server),
            last_lines=last_lines(texts.usage),
        )
    names, backend = ((), Backend.UNKNOWN) if devices is None else parse_devices(devices)
    program = texts.dry_run_program
    return Capabilities(
        version=parse_version(texts.version),
        flags=frozenset(name for option in options for name in option.names),
        backend=backend,
        devices=names,
        valued_flags=frozenset(name for option in options if option.value for name in option.names),
        variables=frozenset(VARIABLE.findall(texts.usage)),
        options=options,
        dry_run=DryRunAbility(program, parse_help(texts.dry_run_usage)[0]) if program else None,
        virtual_memory=None if devices is None else reports_virtual_memory(devices),
        listed=() if devices is None else parse_listed(devices),
    )


def _device_list(answer: Answer) -> str | None:
    if not answer.succeeded:
        return None
    # The list is on stdout; the drivers' own remarks, which tell of virtual memory, are on stderr.
    return f"{answer.stderr}\n{answer.stdout}" if DEVICES_MARK in answer.stdout else answer.stderr


def _unusable(build: Build, option: str, answer: Answer, time_limit_s: float) -> LlmError:
    lines = answer.last_lines
    said = f" It said: {lines[-1]}" if lines else ""
    missing = MISSING_LIBRARY.search(answer.text)
    hint = "Install a build for this machine, or set llama_dir in config.toml to another one."
    if missing:
        hint = (
            f"Install the package that holds {missing[1]}, or use a build that brings its libraries with it."
        )
    return LlmError(
        ErrorCode.ENGINE_UNUSABLE,
        f"{build.server} {answer.how(option, time_limit_s)}.{said}",
        hint=hint,
        path=str(build.server),
        source=build.source,
        status=answer.status,
        last_lines=lines,
    )
