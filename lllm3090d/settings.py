"""Every setting: unit, default, environment variable, meaning. Read once at start and again on reload.

Precedence: environment (``LLLM3090_`` and the key in capitals), then ``config.toml``, then the default.
An unknown key or a bad value is an error that names the file, the key and what is allowed.
"""

from __future__ import annotations

import enum
import ipaddress
import json
import os
import stat
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from lllm3090d.engines.tier_flags import ReasoningRules, rules_fault
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gateway.filters import ReasoningOf, rules_of
from lllm3090d.gateway.guard import origin_fault
from lllm3090d.model_settings import ModelSettings, conflict
from lllm3090d.planning.cache import CacheType
from lllm3090d.planning.request import Drafting, Offload, ProjectorPlace
from lllm3090d.planning.slots import SlotPolicy
from lllm3090d.setting_faults import fault
from lllm3090d.setting_faults import unknown as unknown_setting

IN_ONE_TEXT = "with commas between them"  # in the description of every setting that is a list
ENVIRONMENT_PREFIX = "LLLM3090_"
PINNED_ENGINE = "b11434"  # upstream tag whose memory layout this release of the daemon knows to the byte
# Set for programs around the daemon (installer, client, tests), so not mistaken for a misspelt setting.
FOREIGN_VARIABLES = frozenset(
    {"LLLM3090_API_KEY", "LLLM3090_CONFIG", "LLLM3090_PREFIX", "LLLM3090_RECORD", "LLLM3090_RUN"}
)


class Desktop(enum.StrEnum):
    """Whether a desktop session is counted on the card."""

    AUTO = "auto"
    ACTIVE = "active"
    INACTIVE = "inactive"


class CardChoice(enum.StrEnum):
    """Which memory is managed."""

    AUTO = "auto"  # NVIDIA's cards where there are any, else AMD's, else Intel's, else host memory
    NVIDIA = "nvidia"  # NVIDIA's cards, or an error
    AMD = "amd"  # AMD's cards, or an error
    INTEL = "intel"  # Intel's cards, or an error
    CPU = "cpu"  # host memory, even where there is a card


class PressurePolicy(enum.StrEnum):
    """What is done when other programs take memory of the card while models are loaded."""

    WARN = "warn"  # tell it
    YIELD = "yield"  # tell it, and unload idle models where room is scarce
    IGNORE = "ignore"


class VerifyAfterLoad(enum.StrEnum):
    """How what an engine takes is held against its quote once it answers."""

    OFF = "off"  # not at all
    PEAK = "peak"  # the most that it was seen to hold while it loaded
    PROBE = "probe"  # and after a prompt of one batch, on a card


class HangPolicy(enum.StrEnum):
    """What becomes of a model that is at work and gets nowhere."""

    RESTART = "restart"  # tell it, and after a while stop it and start it again, once
    REPORT = "report"  # tell it, and touch nothing


class SuspendPolicy(enum.StrEnum):
    """What becomes of loaded models when the machine goes to sleep."""

    AUTO = "auto"  # unload on NVIDIA's cards, whose contents may be lost; keep on all other memory
    UNLOAD = "unload"  # unload everything before, load the same set after
    KEEP = "keep"  # leave them as they are
    STOP = "stop"  # unload everything before, load nothing after


class GatewayLoad(enum.StrEnum):
    """What becomes of a request for a model that is not loaded."""

    WAIT = "wait"  # it waits until the model is there
    RETRY = "retry"  # the model is loaded, and the client told to come again
    REFUSE = "refuse"  # it is refused, and nothing is loaded


class NoticeTopic(enum.StrEnum):
    """What the desktop's notifications tell."""

    REFUSED = "refused"  # a load that nobody was told of otherwise
    FAILED = "failed"  # a model ended by itself
    LATCHED = "latched"  # it stays down
    PRESSURE = "pressure"  # it was unloaded for other programs
    RESTORED = "restored"  # what became of the models after a sleep


ALL_NOTICES, NO_NOTICES = "all", "none"


class LogLevel(enum.StrEnum):
    """The least severe level that is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def runtime_base() -> Path:
    """``$XDG_RUNTIME_DIR``, or where systemd puts it."""
    return Path(os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}")


def _xdg(variable: str, fallback: str) -> Path:
    # The XDG specification has relative paths ignored.
    chosen = Path(os.environ.get(variable, ""))
    return chosen if chosen.is_absolute() else Path.home() / fallback


def default_config_file() -> Path:
    """``$LLLM3090_CONFIG``, else ``config.toml`` in ``lllm3090`` below the XDG configuration directory."""
    chosen = os.environ.get(ENVIRONMENT_PREFIX + "CONFIG")
    if not chosen:
        return _xdg("XDG_CONFIG_HOME", ".config") / "lllm3090" / "config.toml"
    try:
        return Path(chosen).expanduser()
    except RuntimeError as error:
        raise LlmError(
            ErrorCode.SETTINGS_INVALID,
            f"environment: {ENVIRONMENT_PREFIX}CONFIG = {chosen!r} names no home directory: {error}",
            hint="Give an absolute path.",
        ) from error


def default_control_socket() -> Path:
    """Where the control socket is when nobody chose another runtime directory; where the socket unit listens."""
    return runtime_base() / "lllm3090d" / "control.sock"


def _words(text: str) -> tuple[str, ...]:
    """Words with commas between them; the engine trims none, so blanks are no part of one here."""
    return tuple(word.strip() for word in text.split(",")) if text.strip() else ()


Mib = Annotated[int, Field(ge=0, le=1 << 30)]
Seconds = Annotated[float, Field(gt=0, le=86400)]
SecondsOrNone = Annotated[float, Field(ge=0, le=86400)]


class Settings(BaseModel):
    """All settings, validated and frozen. Field descriptions are the reference documentation."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    models_dir: Path = Field(
        default_factory=lambda: Path.home() / "models", description="directory with one directory per model"
    )
    state_dir: Path = Field(
        default_factory=lambda: _xdg("XDG_STATE_HOME", ".local/state") / "lllm3090",
        description="what the daemon has learnt",
    )
    runtime_dir: Path = Field(
        default_factory=lambda: runtime_base() / "lllm3090d",
        description="control socket, lock and engine sockets; private to the user",
    )
    llama_dir: Path = Field(
        default_factory=lambda: _xdg("XDG_DATA_HOME", ".local/share") / "lllm3090" / "llama.cpp",
        description="directory with the llama-server to use; set in the environment it outranks all else",
    )
    engines_dir: Path = Field(
        default_factory=lambda: _xdg("XDG_DATA_HOME", ".local/share") / "lllm3090" / "engines",
        description="further engine builds, one directory each",
    )
    catalogue_file: Path = Field(
        default_factory=lambda: _xdg("XDG_CONFIG_HOME", ".config") / "lllm3090" / "catalogue.json",
        description="further models of the catalogue, or other figures for those in it",
    )
    engine_pin: Annotated[str, Field(min_length=1, max_length=64)] = Field(
        default=PINNED_ENGINE,
        description="release of llama.cpp that is expected; builds of others are marked",
    )
    aliases: Mapping[str, str] = Field(
        default_factory=dict, description="short names: alias = name of a model below models_dir"
    )
    extra_arguments: Mapping[str, tuple[str, ...]] = Field(
        default_factory=dict,
        description="further arguments for the engine: name of a model, or * for all = list of words",
    )
    autoload: Annotated[str, Field(max_length=10_000)] = Field(
        default="",
        description="models that are loaded at every login, in this order, with commas between them; beside those that"
        " were marked by command",
    )
    autoload_wait_s: SecondsOrNone = Field(
        default=60.0,
        description="seconds that models of a login wait at most until the desktop has settled, where there is one; 0"
        " for no wait",
    )
    card: CardChoice = Field(default=CardChoice.AUTO, description="which memory is managed")
    desktop: Desktop = Field(
        default=Desktop.AUTO, description="whether a desktop session is counted on the card"
    )
    driver_reserve_mib: Mib = Field(
        default=512,
        description="MiB the driver keeps, where the card does not tell; measured 451 on an RTX 3090",
    )
    desktop_reserve_mib: Mib = Field(
        default=2400, description="MiB kept for the compositor and browser of an active desktop"
    )
    workspace_reserve_mib: Mib = Field(
        default=1024, description="least MiB for compute buffers and runtime of an engine on a card"
    )
    cache_type: CacheType = Field(
        default=CacheType.Q8_0, description="type of the KV cache unless another is asked for"
    )
    slot_policy: SlotPolicy = Field(
        default=SlotPolicy.BALANCED, description="how slots are chosen where nobody gives their number"
    )
    offload: Offload = Field(
        default=Offload.RESIDENT,
        description="whether layers or experts may be left in host memory for a useful window",
    )
    drafting: Drafting = Field(
        default=Drafting.AUTO,
        description="whether models with blocks for multi-token prediction draft for themselves",
    )
    draft_tokens: Annotated[int, Field(ge=1, le=64)] = Field(
        default=3, description="longest draft (--spec-draft-n-max)"
    )
    projector: ProjectorPlace = Field(
        default=ProjectorPlace.AUTO,
        description="where the projector of a model that sees is; auto is the card unless that costs a quarter of"
        " the window",
    )
    image_max_tokens: Annotated[int, Field(ge=0, le=1 << 20)] = Field(
        default=0,
        description="most tokens of an image (--image-max-tokens); 0 for what the projector's file says",
    )
    compute_buffer_factor: Annotated[float, Field(ge=1, le=4)] = Field(
        default=1.0, description="factor on the formulas of compute buffers, for builds that need more"
    )
    micro_batch_tokens: Annotated[int, Field(ge=32, le=8192)] = Field(
        default=512, description="tokens computed at once (-ub)"
    )
    batch_tokens: Annotated[int, Field(ge=32, le=65536)] = Field(
        default=2048, description="tokens accepted at once (-b)"
    )
    context_checkpoints: Annotated[int, Field(ge=0, le=256)] = Field(
        default=8, description="context checkpoints of one slot in host memory (--ctx-checkpoints)"
    )
    checkpoint_min_step_tokens: Annotated[int, Field(ge=0, le=1 << 30)] = Field(
        default=8192,
        description="least tokens between context checkpoints at older messages (--checkpoint-min-step)",
    )
    prompt_cache_mib: Mib = Field(
        default=1024, description="MiB of host memory for finished prompts (--cache-ram)"
    )
    reasoning_efforts: Annotated[str, Field(max_length=1000)] = Field(
        default="",
        description="words of reasoning_effort that may reach a chat template, with commas between them"
        " (--reasoning-effort-allow); empty for all",
    )
    reasoning_effort_fallback: Annotated[str, Field(max_length=100)] = Field(
        default="",
        description="which of them stands in for any other word (--reasoning-effort-fallback)",
    )
    reasoning_floor_tokens: Annotated[int, Field(ge=0, le=1 << 30)] = Field(
        default=0,
        description="least limit of generated tokens while a model thinks (--reasoning-max-tokens-floor); 0 for none",
    )
    load_timeout_s: Seconds = Field(
        default=600.0, description="seconds without progress after which a load is given up"
    )
    load_cap_s: SecondsOrNone = Field(
        default=0.0,
        description="seconds after which a load is given up although it gets on; 0 for what the files' size and their"
        " disk give",
    )
    stop_timeout_s: Seconds = Field(
        default=15.0, description="seconds from SIGTERM to SIGKILL when a model is unloaded"
    )
    drain_s: SecondsOrNone = Field(
        default=10.0,
        description="seconds that requests in flight may take when a model is unloaded; 0 for none",
    )
    verify_after_load: VerifyAfterLoad = Field(
        default=VerifyAfterLoad.PROBE,
        description="what the memory of a loaded model is measured by, for later plans; probe computes one prompt"
        " batch, on a card only",
    )
    release_timeout_s: Seconds = Field(
        default=10.0,
        description="seconds to wait for the card to show the memory of a stopped model as free",
    )
    pressure_policy: PressurePolicy = Field(
        default=PressurePolicy.WARN,
        description="what is done when other programs take more of the card than was kept for them while models are"
        " loaded",
    )
    pressure_grace_s: Seconds = Field(
        default=30.0, description="seconds for which they must hold it before anything is done"
    )
    queue_timeout_s: Seconds = Field(
        default=120.0, description="seconds that a load waits for room before it is given up"
    )
    least_residency_s: SecondsOrNone = Field(
        default=30.0,
        description="seconds that a model stays at least, before it may be unloaded for another one",
    )
    least_idle_s: SecondsOrNone = Field(
        default=5.0,
        description="seconds that a model must have been idle before it may be unloaded for another one",
    )
    serve_smaller: bool = Field(
        default=False,
        description="take a smaller context than the one that was asked for where that does not fit, down to the"
        " 40,960 tokens that an agent needs",
    )
    restart_failed: bool = Field(
        default=True,
        description="start a model again that served and ended by itself, each time after a longer pause, until"
        " that is of no use",
    )
    restart_pause_s: Annotated[float, Field(gt=0, le=300)] = Field(
        default=1.0,
        description="seconds before the first such start; each next pause of a row is four times as long, up to 300",
    )
    hang_policy: HangPolicy = Field(
        default=HangPolicy.RESTART,
        description="what becomes of a model that is at work and gets nowhere: restart it once, or only report it",
    )
    hang_patience_s: Seconds = Field(
        default=120.0,
        description="seconds at least without progress after which a model at work is stalled; more for slow ones",
    )
    device_memory_limit: bool = Field(
        default=True,
        description="limit a model's unit to its price and a margin on the card too, where the kernel can (dmem)",
    )
    suspend: SuspendPolicy = Field(
        default=SuspendPolicy.AUTO,
        description="what becomes of loaded models when the machine goes to sleep; auto is unload on NVIDIA's cards and"
        " keep on others",
    )
    history_days: Annotated[int, Field(ge=1, le=3650)] = Field(
        default=90, description="days for which it is remembered what happened to models"
    )
    history_mib: Annotated[int, Field(ge=1, le=1024)] = Field(
        default=16, description="MiB of the state file that this may take; the oldest goes first"
    )
    idle_ttl_s: SecondsOrNone = Field(
        default=0.0, description="seconds without use after which a model is unloaded; 0 for never"
    )
    idle_ttl_of: Mapping[str, SecondsOrNone] = Field(
        default_factory=dict, description="the same for single models: name = seconds"
    )
    models: Mapping[str, ModelSettings] = Field(
        default_factory=dict,
        description="defaults of single models: name = a section, see below",
    )
    gateway: bool = Field(
        default=True, description="whether the OpenAI/Anthropic-compatible address is served at all"
    )
    gateway_address: Annotated[str, Field(min_length=2, max_length=64)] = Field(
        default="127.0.0.1",
        description="IP address of the gateway; any but a loopback one needs a key (lllm3090ctl key add)",
    )
    gateway_port: Annotated[int, Field(ge=0, le=65535)] = Field(
        default=1919, description="its TCP port; 0 for any that is free"
    )
    gateway_hosts: Annotated[str, Field(max_length=4000)] = Field(
        default="",
        description="further names of this machine that a Host header may have, with commas between them",
    )
    gateway_origins: Annotated[str, Field(max_length=4000)] = Field(
        default="",
        description="pages that may ask, such as http://localhost:3000, with commas between them; * for all",
    )
    gateway_default_model: Annotated[str, Field(max_length=256)] = Field(
        default="", description="model of requests that name none; empty to refuse them"
    )
    gateway_models: Mapping[str, str] = Field(
        default_factory=dict,
        description="names that clients insist on = model that is meant; * stands for any text, as in claude-*",
    )
    gateway_reasoning: Mapping[str, ReasoningOf] = Field(
        default_factory=dict,
        description="models whose requests are kept to rules for reasoning where their engine has none: name = rules",
    )
    gateway_load: GatewayLoad = Field(
        default=GatewayLoad.WAIT, description="what becomes of a request for a model that is not loaded"
    )
    gateway_wait_s: Seconds = Field(
        default=900.0, description="seconds that a request waits at most for its model to be loaded"
    )
    gateway_starvation_s: SecondsOrNone = Field(
        default=60.0,
        description="seconds that a request waits for room before new requests of other models let it pass; 0 for"
        " never",
    )
    gateway_keepalive_s: Seconds = Field(
        default=15.0,
        description="seconds after which, and then between which, a waiting stream is sent a comment",
    )
    gateway_queue: Annotated[int, Field(ge=0, le=100000)] = Field(
        default=256, description="requests that may wait for a slot of one model; one more is refused"
    )
    gateway_body_mib: Annotated[int, Field(ge=1, le=65536)] = Field(
        default=512, description="largest body of a request, MiB"
    )
    gateway_access_log: bool = Field(
        default=False, description="write a line to the journal for each request, without a word of it"
    )
    requests_days: Annotated[int, Field(ge=1, le=3650)] = Field(
        default=30,
        description="days for which requests to the gateway are remembered, without a word of them",
    )
    requests_kept: Annotated[int, Field(ge=0, le=1_000_000)] = Field(
        default=20_000, description="requests that are remembered at most; the oldest go first"
    )
    notifications: Annotated[str, Field(min_length=1, max_length=200)] = Field(
        default=ALL_NOTICES,
        description="what the desktop's notifications tell: all, none, or some of refused, failed, latched, pressure,"
        " restored with commas between them",
    )
    stop_models_on_exit: bool = Field(
        default=False, description="stop the models when the daemon is stopped"
    )
    log_level: LogLevel = Field(default=LogLevel.INFO, description="least severe level that is logged")

    @field_validator("*", mode="before")
    @classmethod
    def _no_flag_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool) and info.field_name and setting_kind(info.field_name) != "flag":
            raise ValueError("true and false are for flags only")
        return value

    @field_validator(
        "models_dir", "state_dir", "runtime_dir", "llama_dir", "engines_dir", "catalogue_file", mode="after"
    )
    @classmethod
    def _absolute(cls, path: Path) -> Path:
        try:
            expanded = path.expanduser()
        except RuntimeError as error:
            raise ValueError(f"{path.parts[0]} has no home directory") from error
        if not expanded.is_absolute():
            raise ValueError("must be an absolute path (or begin with ~)")
        return expanded

    @field_validator("gateway_address", mode="after")
    @classmethod
    def _is_address(cls, text: str) -> str:
        return str(ipaddress.ip_address(text))

    @field_validator("notifications", mode="after")
    @classmethod
    def _are_topics(cls, text: str) -> str:
        words = _words(text)
        known = [str(each) for each in NoticeTopic]
        strange = [each for each in words if each not in known]
        if not words or (strange and text.strip() not in {ALL_NOTICES, NO_NOTICES}):
            raise ValueError(
                f"{', '.join(strange) or 'nothing'} is none of all, none, or some of {', '.join(known)}"
            )
        return text

    @field_validator("gateway_origins", mode="after")
    @classmethod
    def _are_origins(cls, text: str) -> str:
        for origin in _words(text):
            if fault := origin_fault(origin):
                raise ValueError(f"{origin!r} is none: {fault}")
        return text

    @field_validator("gateway_reasoning", mode="after")
    @classmethod
    def _are_rules(cls, table: Mapping[str, ReasoningOf], info: ValidationInfo) -> Mapping[str, ReasoningOf]:
        data = info.data
        if {"reasoning_efforts", "reasoning_effort_fallback", "reasoning_floor_tokens"} <= data.keys():
            general = ReasoningRules(
                _words(data["reasoning_efforts"]),
                data["reasoning_effort_fallback"] or None,
                data["reasoning_floor_tokens"],
            )
            for name, own in table.items():
                try:
                    rules_of(general, own)
                except LlmError as error:
                    raise ValueError(f"{name}: {error.message}") from error
        return table

    @field_validator("models", mode="after")
    @classmethod
    def _said_once(
        cls, sections: Mapping[str, ModelSettings], info: ValidationInfo
    ) -> Mapping[str, ModelSettings]:
        data = info.data
        if {"aliases", "extra_arguments", "idle_ttl_of"} <= data.keys():  # missing where bad themselves
            fault = conflict(sections, data["aliases"], data["extra_arguments"], data["idle_ttl_of"])
            if fault is not None:
                raise ValueError(fault)
        return sections

    @field_validator("reasoning_efforts", mode="after")
    @classmethod
    def _are_words(cls, text: str) -> str:
        efforts = _words(text)
        fault = rules_fault(efforts, efforts[0] if efforts else None, 0)
        if fault is not None:
            raise ValueError(fault)
        return text

    @field_validator("reasoning_effort_fallback", mode="after")
    @classmethod
    def _is_a_rule(cls, fallback: str, info: ValidationInfo) -> str:
        efforts = info.data.get("reasoning_efforts")  # missing where it is bad itself
        fault = None if efforts is None else rules_fault(_words(efforts), fallback or None, 0)
        if fault is not None:
            raise ValueError(fault)
        return fallback

    llama_dir_from_env: Annotated[bool, Field(exclude=True)] = Field(
        default=False, description="internal: llama_dir comes from the environment, so the choice is locked"
    )

    @property
    def reasoning(self) -> ReasoningRules:
        """What engines that can are to do with what clients say about reasoning."""
        return ReasoningRules(
            _words(self.reasoning_efforts),
            self.reasoning_effort_fallback or None,
            self.reasoning_floor_tokens,
        )

    @property
    def autoload_names(self) -> tuple[str, ...]:
        """Models that are loaded at every login, in order."""
        marked = (name for name, section in self.models.items() if section.autoload)
        return tuple(dict.fromkeys([*filter(None, _words(self.autoload)), *marked]))

    @property
    def notice_topics(self) -> frozenset[NoticeTopic]:
        """What the desktop's notifications tell."""
        if self.notifications.strip() == ALL_NOTICES:
            return frozenset(NoticeTopic)
        return frozenset(each for each in NoticeTopic if each in _words(self.notifications))

    @property
    def control_socket(self) -> Path:
        """Where the control API listens."""
        return self.runtime_dir / "control.sock"

    @property
    def engine_sockets_dir(self) -> Path:
        """Where engines listen; survives the daemon."""
        return self.runtime_dir / "engines"


INTERNAL_KEYS = frozenset({"llama_dir_from_env"})
# Settings that are a table in the file and a JSON object in the environment.
EXAMPLES_OF_TABLES = {
    "aliases": '{"qwen": "Qwen3.8-27B"}',
    "extra_arguments": '{"*": ["--threads", "8"]}',
    "idle_ttl_of": '{"qwen-27b": 600}',
    "models": '{"qwen-27b": {"context_tokens": 65536, "parallel": 2, "pin": true}}',
    "gateway_models": '{"claude-*": "qwen-27b"}',
    "gateway_reasoning": '{"qwen-27b": {"efforts": "low,medium,xhigh", "fallback": "medium"}}',
}
SETTING_KEYS = tuple(key for key in Settings.model_fields if key not in INTERNAL_KEYS)


def load_settings(config_file: Path | None = None, environment: Mapping[str, str] | None = None) -> Settings:
    """Read the settings from the environment and the file.

    Args:
        config_file: the TOML file; None for the default place. It may be missing.
        environment: None for the process's own.

    Raises:
        LlmError: SETTINGS_INVALID, naming every bad key, where it was set and what is allowed.
    """
    file = config_file or default_config_file()
    env = os.environ if environment is None else environment
    values = _from_file(file)
    origin = {key: f"{file}: {key}" for key in values}
    for key, value in _from_environment(env).items():
        values[key] = value
        origin[key] = f"environment: {ENVIRONMENT_PREFIX}{key.upper()}"
    values["llama_dir_from_env"] = "llama_dir" in values and origin["llama_dir"].startswith("environment")
    try:
        return _with_sections(Settings.model_validate(values))
    except ValidationError as error:
        problems = [_fault(item, origin) for item in error.errors(include_url=False, include_context=False)]
        raise LlmError(
            ErrorCode.SETTINGS_INVALID,
            "; ".join(problems),
            hint="Correct it; every setting is described in: man lllm3090-config",
            problems=problems,
            file=str(file),
        ) from error


def _with_sections(settings: Settings) -> Settings:
    """The settings with what sections of models say in the tables of all models, where everything looks for it."""
    aliases, arguments = dict(settings.aliases), dict(settings.extra_arguments)
    ttls = dict(settings.idle_ttl_of)
    for name, section in settings.models.items():
        aliases |= dict.fromkeys(section.aliases, name)
        if section.arguments:
            arguments[name] = section.arguments
        if section.idle_ttl_s is not None:
            ttls[name] = section.idle_ttl_s
    if not settings.models:
        return settings
    return settings.model_copy(
        update={"aliases": aliases, "extra_arguments": arguments, "idle_ttl_of": ttls}
    )


def origins(config_file: Path, environment: Mapping[str, str] | None = None) -> Mapping[str, str]:
    """Where each setting that is no default comes from: ``environment`` or ``file``. Raises as load_settings."""
    env = os.environ if environment is None else environment
    return dict.fromkeys(_from_file(config_file), "file") | dict.fromkeys(
        _from_environment(env), "environment"
    )


def file_problems(config_file: Path, environment: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """What is not valid in a file and not seen by load_settings, as a variable outranks it. Raises as that."""
    env = os.environ if environment is None else environment
    values, outranked = _from_file(config_file), _from_environment(env)
    try:
        Settings.model_validate(values)
    except ValidationError as error:
        origin = {key: f"{config_file}: {key}" for key in values}
        return tuple(
            _fault(item, origin)
            for item in error.errors(include_url=False, include_context=False)
            if item["loc"] and item["loc"][0] in outranked.keys() & values.keys()
        )
    return ()


def _from_file(file: Path) -> dict[str, Any]:
    try:
        if not stat.S_ISREG(file.stat().st_mode):  # reading a pipe or a device may never end
            raise OSError("it is no regular file")
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    # ValueError: no UTF-8, no TOML, or a number of thousands of digits.
    except (OSError, ValueError, RecursionError) as error:
        raise LlmError(
            ErrorCode.SETTINGS_INVALID,
            f"{file} cannot be read: {error}",
            hint="Correct the file or move it away.",
            file=str(file),
        ) from error
    unknown = [key for key in values if key not in SETTING_KEYS]
    if unknown:
        problems = [unknown_setting(key, f"{file}: {key}", SETTING_KEYS) for key in unknown]
        raise LlmError(
            ErrorCode.SETTINGS_INVALID,
            "; ".join(problems),
            hint="Remove or correct the key; every setting is described in: man lllm3090-config",
            problems=problems,
            file=str(file),
        )
    return values


def _from_environment(env: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    unknown: list[str] = []
    for name, text in env.items():
        if not name.startswith(ENVIRONMENT_PREFIX) or name in FOREIGN_VARIABLES:
            continue
        key = name.removeprefix(ENVIRONMENT_PREFIX).lower()
        if key not in SETTING_KEYS or name != ENVIRONMENT_PREFIX + key.upper():
            unknown.append(name)
        elif text == "":
            continue  # blanked is unset
        elif key in EXAMPLES_OF_TABLES:
            values[key] = _json_table(name, text, EXAMPLES_OF_TABLES[key])
        else:
            values[key] = text
    if unknown:
        names = tuple(ENVIRONMENT_PREFIX + key.upper() for key in SETTING_KEYS)
        problems = [unknown_setting(name, f"environment: {name}", names) for name in unknown]
        raise LlmError(
            ErrorCode.SETTINGS_INVALID,
            "; ".join(problems),
            hint="Unset the variable or correct its name.",
            problems=problems,
        )
    return values


def _json_table(name: str, text: str, example: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise LlmError(
            ErrorCode.SETTINGS_INVALID,
            f"environment: {name} is not a JSON object such as {example}: {error}",
            hint="Correct the variable.",
        ) from error


def _fault(item: Any, origin: Mapping[str, str]) -> str:
    lists = [key for key, field in Settings.model_fields.items() if IN_ONE_TEXT in (field.description or "")]
    members = {
        "models": tuple(ModelSettings.model_fields),
        "gateway_reasoning": tuple(ReasoningOf.model_fields),
    }
    return fault(item, origin, members, lists)


def setting_kind(key: str) -> str:
    """The type of a setting for the documentation, with the allowed words of an enumeration."""
    annotation = Settings.model_fields[key].annotation
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return " | ".join(str(member.value) for member in annotation)
    names: dict[Any, Literal["path", "text", "flag", "whole number", "number"]] = {
        Path: "path",
        str: "text",
        bool: "flag",
        int: "whole number",
        float: "number",
    }
    return names.get(annotation, "table")
