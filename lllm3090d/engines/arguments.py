"""From a plan to the engine's command line. The only place that knows flag names.

Every flag that decides what was priced is always emitted, so that no default of a build can differ from the
plan. Only flags that this build's ``--help`` offers are used: a missing optional one is dropped, a missing
required one refuses the build.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lllm3090d.engines.builds import library_environment
from lllm3090d.engines.capabilities import Backend, Build, Capabilities
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.planning.planner import Plan

ALL_LAYERS = "999"  # more layers than any model has; "all" is unknown to older builds
SOCKET_SUFFIX = ".sock"  # by this the engine tells a Unix socket from a host name
SOCKET_PATH_LIMIT_BYTES = 107  # sun_path of Linux, without its terminator
# systemd expands $ in the arguments of a unit and rewrites ; when it reads the unit again; values in
# Environment= are exact in both cases.
ALTERED_BY_SYSTEMD = re.compile(r"[$;]")
CONTROL_CHARACTERS = re.compile(r"[\x00-\x1f\x7f]")
# Inherited, they would change the launch behind the plan's back, or ask clients for a key.
ENGINE_VARIABLE_PREFIXES = ("LLAMA_", "MTMD_")


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start the engine.

    Attributes:
        argv: the executable's path and its arguments; without ``$`` and ``;``.
        environment: variables to set, name and value, sorted by name.
        unset: variables that must not reach the engine: all that the build reads and ``environment`` does
            not set.
    """

    argv: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    unset: tuple[str, ...] = ()


def launch(  # noqa: PLR0917  # the six things a launch is made of, in a fixed order
    build: Build,
    capabilities: Capabilities,
    checkpoint_path: Path,
    plan: Plan,
    socket_path: Path,
    alias: str,
    *,
    inherited: Mapping[str, str] | None = None,
) -> Launch:
    """The command line and environment that carry out a plan with this build.

    Args:
        build: the engine.
        capabilities: its answers.
        checkpoint_path: absolute path of the first or only shard.
        plan: what to launch.
        socket_path: absolute path of the Unix socket to listen on, ending in ``.sock``.
        alias: name of the model in the engine's own API.
        inherited: environment that the engine's unit starts from; None for this process's own.

    Raises:
        LlmError: ENGINE_UNUSABLE where the build lacks a required flag or has no device for a plan on the
            card, BAD_CHECKPOINT where the path cannot be passed on, RUNTIME_DIR_UNUSABLE or
            SOCKET_PATH_TOO_LONG where the socket cannot be named.
    """
    base = os.environ if inherited is None else inherited
    _check_server(build)
    _check_device(build, capabilities, plan)
    line = _CommandLine(build, capabilities)
    line.required_text("LLAMA_ARG_HOST", _socket_text(socket_path), "--host")
    line.required_text("LLAMA_ARG_MODEL", _checkpoint_text(checkpoint_path), "-m", "--model")
    line.optional_text("LLAMA_ARG_ALIAS", _alias_text(alias), "--alias", "-a")
    line.required(str(plan.context_tokens), "-c", "--ctx-size")
    line.required(str(plan.parallel), "--parallel", "-np")
    line.optional_switch("--no-kv-unified", "-no-kvu")
    line.required(plan.cache_type_k.value, "-ctk", "--cache-type-k")
    line.required(plan.cache_type_v.value, "-ctv", "--cache-type-v")
    line.required(str(plan.batch_tokens), "-b", "--batch-size")
    line.required(str(plan.micro_batch_tokens), "-ub", "--ubatch-size")
    line.required_switch_or_value("on", "-fa", "--flash-attn")
    _place_layers(line, capabilities, plan)
    line.optional("off", "--fit", "-fit")
    line.optional(str(plan.context_checkpoints), "--ctx-checkpoints", "--swa-checkpoints", "-ctxcp")
    line.optional(str(plan.prompt_cache_mib), "--cache-ram", "-cram")
    line.optional_switch("--no-ui", "--no-webui")
    line.optional_switch("--jinja")
    line.optional_switch("--metrics")
    line.optional_switch("--slots")

    environment = {**library_environment(build, base), **line.environment, "GGML_NO_BACKTRACE": "1"}
    read = {name for name in capabilities.variables if name.startswith(ENGINE_VARIABLE_PREFIXES)}
    read |= {name for name in base if name.startswith(ENGINE_VARIABLE_PREFIXES)}
    return Launch(
        argv=(str(build.server), *line.arguments),
        environment=tuple(sorted(environment.items())),
        unset=tuple(sorted(read - environment.keys())),
    )


class _CommandLine:
    """Collects arguments in the first spelling that the build offers."""

    def __init__(self, build: Build, capabilities: Capabilities) -> None:
        self._build = build
        self._capabilities = capabilities
        self.arguments: list[str] = []
        self.environment: dict[str, str] = {}

    def _spelling(self, spellings: tuple[str, ...]) -> str | None:
        return next((flag for flag in spellings if flag in self._capabilities.flags), None)

    def _needed(self, spellings: tuple[str, ...]) -> str:
        flag = self._spelling(spellings)
        if flag is None:
            raise LlmError(
                ErrorCode.ENGINE_UNUSABLE,
                f"{self._build.server} (version {self._capabilities.version}) does not offer "
                f"{spellings[0]}, which a launch needs.",
                hint="Install a newer llama.cpp, or set llama_dir in config.toml to another build.",
                path=str(self._build.server),
                flag=spellings[0],
            )
        return flag

    def required(self, value: str, *spellings: str) -> None:
        self.arguments += [self._needed(spellings), value]

    def required_switch_or_value(self, value: str, *spellings: str) -> None:
        """A switch in old builds, ``[on|off|auto]`` in newer ones."""
        flag = self._needed(spellings)
        self.arguments += [flag, value] if flag in self._capabilities.valued_flags else [flag]

    def required_text(self, variable: str, value: str, *spellings: str) -> None:
        """A free text: through the environment where systemd would alter it as an argument."""
        flag = self._needed(spellings)
        if not ALTERED_BY_SYSTEMD.search(value):
            self.arguments += [flag, value]
        elif variable in self._capabilities.variables:
            self.environment[variable] = value
        else:
            raise LlmError(
                ErrorCode.ENGINE_UNUSABLE,
                f"{value} holds '$' or ';', which a unit's arguments cannot carry, and {self._build.server} "
                f"(version {self._capabilities.version}) does not read {variable}.",
                hint="Rename the file or directory, or use a newer llama.cpp.",
                path=str(self._build.server),
                variable=variable,
            )

    def optional(self, value: str, *spellings: str) -> None:
        flag = self._spelling(spellings)
        if flag is not None:
            self.arguments += [flag, value]

    def optional_switch(self, *spellings: str) -> None:
        flag = self._spelling(spellings)
        if flag is not None:
            self.arguments.append(flag)

    def optional_text(self, variable: str, value: str, *spellings: str) -> None:
        if not value:
            return
        if not ALTERED_BY_SYSTEMD.search(value):
            self.optional(value, *spellings)
        elif variable in self._capabilities.variables:
            self.environment[variable] = value


def _place_layers(line: _CommandLine, capabilities: Capabilities, plan: Plan) -> None:
    spellings = ("-ngl", "--gpu-layers", "--n-gpu-layers")
    if plan.on_card:
        line.required(ALL_LAYERS, *spellings)
        return
    # With no layers on the card a GPU build still computes large batches there: it takes "none" to keep it
    # off.
    line.optional("none", "--device", "-dev")
    if capabilities.backend is not Backend.CPU:
        line.optional("0", *spellings)


def _check_device(build: Build, capabilities: Capabilities, plan: Plan) -> None:
    if plan.on_card and capabilities.backend is Backend.CPU:
        raise LlmError(
            ErrorCode.ENGINE_UNUSABLE,
            f"The model was planned for the card, but {build.server} (version {capabilities.version}) sees "
            "no device to compute on.",
            hint='Install a build for the card (CUDA or Vulkan), or set card = "cpu" in config.toml.',
            path=str(build.server),
        )


def _check_server(build: Build) -> None:
    text = _utf8(build.server)
    if text is None or ALTERED_BY_SYSTEMD.search(text):
        raise LlmError(
            ErrorCode.ENGINE_UNUSABLE,
            f"The path of the engine, {_printable(build.server)}, holds '$', ';' or bytes that are no "
            "UTF-8, which a unit cannot carry.",
            hint="Move the build to another directory, or reach it through a link with a plain name.",
            path=_printable(build.server),
        )


def _checkpoint_text(path: Path) -> str:
    if not path.is_absolute():
        raise ValueError(f"checkpoint_path must be absolute, not {path}")
    text = _utf8(path)
    if text is None:
        raise LlmError(
            ErrorCode.BAD_CHECKPOINT,
            f"The path {_printable(path)} is not valid UTF-8, so no unit can carry it.",
            hint="Rename the file or directory.",
            path=_printable(path),
        )
    return text


def _socket_text(path: Path) -> str:
    text = _utf8(path)
    if text is None or not path.is_absolute() or path.suffix != SOCKET_SUFFIX or "," in text:
        raise LlmError(
            ErrorCode.RUNTIME_DIR_UNUSABLE,
            f"The engine cannot listen on {_printable(path)}: it takes an absolute UTF-8 path that ends in "
            f"{SOCKET_SUFFIX} and holds no comma.",
            hint="Set runtime_dir to another directory.",
            path=_printable(path),
        )
    if len(os.fsencode(path)) > SOCKET_PATH_LIMIT_BYTES:
        raise LlmError(
            ErrorCode.SOCKET_PATH_TOO_LONG,
            f"The engine cannot listen on {text}: {len(os.fsencode(path))} bytes, and a socket's path "
            f"has at most {SOCKET_PATH_LIMIT_BYTES}.",
            hint="Set runtime_dir to a shorter path.",
            path=text,
        )
    return text


def _alias_text(alias: str) -> str:
    """The name in one piece and one line: of a comma the engine would make two names."""
    one_piece = CONTROL_CHARACTERS.sub("_", alias.replace(",", "_"))
    return one_piece.encode("utf-8", "replace").decode("utf-8").strip()


def _utf8(path: Path) -> str | None:
    text = str(path)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return None
    return text


def _printable(path: Path) -> str:
    return str(path).encode("utf-8", "backslashreplace").decode("utf-8")
