"""From a plan to the engine's command line. The only place that knows flag names.

Every flag that decides what was priced is always emitted, so that no default of a build can differ from the
plan. Only flags that this build's ``--help`` offers are used: a missing optional one is dropped, a missing
required one refuses the build.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from lllm3090d.checkpoints.purpose import Purpose
from lllm3090d.engines.builds import library_environment
from lllm3090d.engines.capabilities import Backend, Build, Capabilities
from lllm3090d.engines.extra_arguments import ALTERED_BY_SYSTEMD, NOTHING, ExtraArguments
from lllm3090d.engines.process import FIXED_ENVIRONMENT
from lllm3090d.engines.tier_flags import (
    TIER_VARIABLES,
    ReasoningRules,
    TierArguments,
    reasoning_arguments,
    tier_arguments,
    tier_offer,
)
from lllm3090d.engines.visibility import DEVICE_VARIABLES, Sight
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.readings import Card
from lllm3090d.planning.launch import Launch as Sizes
from lllm3090d.planning.launch import SpecType
from lllm3090d.planning.planner import Plan
from lllm3090d.planning.request import Features, TierRoom
from lllm3090d.planning.split import on_one_card
from lllm3090d.planning.tier_conditions import HostMemory, TierMachine
from lllm3090d.planning.tier_speed import link_speed

ALL_LAYERS = "999"  # more layers than any model has; "all" is unknown to older builds
LAYER_SPELLINGS = ("-ngl", "--gpu-layers", "--n-gpu-layers")
EXPERT_SPELLINGS = ("--n-cpu-moe", "-ncmoe")
DRAFTER_SPELLINGS = ("-md", "--spec-draft-model", "--model-draft")
PURPOSE_SPELLINGS: Mapping[Purpose, tuple[str, ...]] = MappingProxyType(
    {Purpose.EMBEDDING: ("--embeddings", "--embedding"), Purpose.RERANK: ("--reranking", "--rerank")}
)
HOST_CACHE_SPELLINGS = ("--no-kv-offload", "-nkvo")
SOCKET_SUFFIX = ".sock"  # by this the engine tells a Unix socket from a host name
SOCKET_PATH_LIMIT_BYTES = 107  # sun_path of Linux, without its terminator
CONTROL_CHARACTERS = re.compile(r"[\x00-\x1f\x7f]")
# Inherited, they would change the launch behind the plan's back, or ask clients for a key.
ENGINE_VARIABLE_PREFIXES = ("LLAMA_", "MTMD_")
PROJECTOR_DEVICE_VARIABLE = "MTMD_BACKEND_DEVICE"
# CUDA numbers cards by their speed unless told otherwise; by bus they are in the order in which the driver lists them.
CARD_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


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
    drafter_path: Path | None = None,
    projector_path: Path | None = None,
    extra: ExtraArguments = NOTHING,
    inherited: Mapping[str, str] | None = None,
    sight: Sight | None = None,
    reasoning: ReasoningRules | None = None,
    reasoning_words: Sequence[str] = (),
) -> Launch:
    """The command line and environment that carry out a plan with this build.

    Args:
        build: the engine.
        capabilities: its answers.
        checkpoint_path: absolute path of the first or only shard.
        plan: what to launch.
        socket_path: absolute path of the Unix socket to listen on, ending in ``.sock``.
        alias: name of the model in the engine's own API.
        drafter_path: absolute path of the file that drafts; None where the model drafts for itself, or nobody does.
        projector_path: absolute path of the model's projector; needed where the plan has one.
        extra: further arguments of a person, checked; those with a price are in the plan.
        inherited: environment that the engine's unit starts from; None for this process's own.
        sight: how the launch is kept to its cards, in the order of the plan's; None where there is only one.
        reasoning: rules for what clients say about it; None for none.
        reasoning_words: what the model's chat template reads of it; () where nobody knows.

    Raises:
        ValueError: a path that is not absolute, a drafter for a plan without a draft, or no path for a plan with a
            projector.
        LlmError: ENGINE_UNUSABLE where the build lacks a required flag or has no device for a plan on the
            card, BAD_CHECKPOINT where the path cannot be passed on, RUNTIME_DIR_UNUSABLE or
            SOCKET_PATH_TOO_LONG where the socket cannot be named.
    """
    base = os.environ if inherited is None else inherited
    plan = plan if sight is None else _in_sight(plan, sight)
    _check_server(build)
    _check_device(build, capabilities, plan)
    line = _CommandLine(build, capabilities)
    line.required_text("LLAMA_ARG_HOST", _socket_text(socket_path), "--host")
    line.required_text("LLAMA_ARG_MODEL", _checkpoint_text(checkpoint_path), "-m", "--model")
    line.optional_text("LLAMA_ARG_ALIAS", _alias_text(alias), "--alias", "-a")
    sizes = plan.launch
    line.required(str(sizes.context_tokens), "-c", "--ctx-size")
    line.required(str(sizes.parallel), "--parallel", "-np")
    _share_pool(line, sizes)
    line.required(sizes.cache_type_k.value, "-ctk", "--cache-type-k")
    line.required(sizes.cache_type_v.value, "-ctv", "--cache-type-v")
    line.required(str(sizes.batch_tokens), "-b", "--batch-size")
    line.required(str(sizes.micro_batch_tokens), "-ub", "--ubatch-size")
    line.required_switch_or_value("on", "-fa", "--flash-attn")
    _place_layers(line, capabilities, plan)
    line.optional("off", "--fit", "-fit")
    line.optional(str(sizes.context_checkpoints), "--ctx-checkpoints", "--swa-checkpoints", "-ctxcp")
    line.optional(str(sizes.checkpoint_min_step_tokens), "--checkpoint-min-step", "-cms")
    line.optional(str(sizes.prompt_cache_mib), "--cache-ram", "-cram")
    _draft(line, plan, drafter_path)
    _project(line, plan, projector_path)
    _stretch(line, plan)
    _serve(line, sizes)
    line.optional_switch("--no-ui", "--no-webui")
    line.optional_switch("--jinja")
    line.optional_switch("--metrics")
    line.optional_switch("--slots")

    if plan.tier is not None:
        line.add(tier_arguments(plan.tier, build, capabilities))
    if reasoning is not None:
        line.add(reasoning_arguments(reasoning, reasoning_words, capabilities))
    line.arguments += extra.passed

    environment = {
        **library_environment(build, base),
        **dict(extra.environment),
        **line.environment,
        **(CARD_ORDER if plan.split is not None and capabilities.backend is Backend.CUDA else {}),
        **(dict(sight.environment) if sight is not None else {}),
        **FIXED_ENVIRONMENT,
    }
    read = {name for name in capabilities.variables if name.startswith(ENGINE_VARIABLE_PREFIXES)}
    read |= {name for name in base if name.startswith(ENGINE_VARIABLE_PREFIXES)} | set(TIER_VARIABLES)
    if sight is not None:
        read |= {name for name in base if name in DEVICE_VARIABLES}
    return Launch(
        argv=(str(build.server), *line.arguments),
        environment=tuple(sorted(environment.items())),
        unset=tuple(sorted(read - environment.keys())),
    )


def _in_sight(plan: Plan, sight: Sight) -> Plan:
    """The same plan with the engine's own names of its cards."""
    if plan.split is None or len(plan.split.devices) != len(sight.devices):
        if len(sight.devices) != 1:
            raise ValueError(f"{len(sight.devices)} devices for a plan on one card")
        return replace(plan, split=on_one_card(sight.devices[0], plan.quote))
    return replace(plan, split=replace(plan.split, devices=sight.devices))


def features(
    capabilities: Capabilities, card: Card | None = None, host: HostMemory | None = None
) -> Features:
    """What of a plan this build can carry out, by the options its ``--help`` offers.

    Args:
        capabilities: of the build.
        card: that it would be on, and ``host``: memory of the machine; without them there is no tiered cache.
    """

    def offers(*spellings: str) -> bool:
        return any(flag in capabilities.flags for flag in spellings)

    spec_type = capabilities.option("--spec-type")
    kinds = frozenset() if spec_type is None else frozenset(spec_type.allowed)
    return Features(
        backend=capabilities.backend,
        drafts_itself=SpecType.MTP.value in kinds,
        drafts_from=kinds & {kind.value for kind in SpecType} if offers(*DRAFTER_SPELLINGS) else frozenset(),
        places_experts=offers(*EXPERT_SPELLINGS),
        keeps_cache_on_host=offers(*HOST_CACHE_SPELLINGS),
        projects=offers("--mmproj", "-mm"),
        shares_pool=offers("--kv-unified", "-kvu"),
        stretches=all(map(offers, ("--rope-scaling", "--rope-scale", "--yarn-orig-ctx"))),
        tier=_tier_room(capabilities, card, host),
        purposes=frozenset(
            purpose.value for purpose, spellings in PURPOSE_SPELLINGS.items() if offers(*spellings)
        ),
    )


def _tier_room(capabilities: Capabilities, card: Card | None, host: HostMemory | None) -> TierRoom | None:
    offer = tier_offer(capabilities)
    if not offer.tier or card is None or host is None:
        return None
    machine = TierMachine(
        offered=True,
        backend=capabilities.backend,
        cards=len(capabilities.devices),
        virtual_memory=capabilities.virtual_memory,
        driver_version=card.driver_version,
    )
    link = None if card.link is None else link_speed(card.link.generation, card.link.width)
    return TierRoom(machine, offer, host, link=link)


class _CommandLine:
    """Collects arguments in the first spelling that the build offers."""

    def __init__(self, build: Build, capabilities: Capabilities) -> None:
        self._build = build
        self._capabilities = capabilities
        self.arguments: list[str] = []
        self.environment: dict[str, str] = {}

    def add(self, part: TierArguments) -> None:
        """What another module has worked out."""
        self.arguments += part.arguments
        self.environment |= dict(part.environment)

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

    def required_switch(self, *spellings: str) -> None:
        self.arguments.append(self._needed(spellings))

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

    def optional(self, value: str, *spellings: str) -> bool:
        """Add it where the build offers it; whether it does."""
        flag = self._spelling(spellings)
        if flag is not None:
            self.arguments += [flag, value]
        return flag is not None

    def optional_or_variable(self, value: str, variable: str, *spellings: str) -> None:
        """Through the environment where the build has no such option: some read a variable all the same."""
        if not self.optional(value, *spellings):
            self.environment[variable] = value

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


def _share_pool(line: _CommandLine, sizes: Sizes) -> None:
    if sizes.unified:
        line.required_switch("--kv-unified", "-kvu")
    else:
        line.optional_switch("--no-kv-unified", "-no-kvu")
    if sizes.slot_tokens:
        line.required(str(sizes.slot_tokens), "--kv-unified-per-slot")
    if sizes.swa_full:
        line.required_switch("--swa-full")


def _draft(line: _CommandLine, plan: Plan, drafter_path: Path | None) -> None:
    """How drafts are made, with every size that was priced; the build's own default is not to draft."""
    draft = plan.launch.draft
    if plan.launch.drafter is not None and drafter_path is None:
        raise ValueError("a plan with a drafter in a file of its own, and no path of one")
    if draft is None:
        if drafter_path is not None:
            raise ValueError("a drafter for a plan without a draft")
        return
    line.required(draft.spec_type.value, "--spec-type")
    line.required(str(draft.tokens), "--spec-draft-n-max")
    line.required(draft.cache_type_k.value, "-ctkd", "--spec-draft-type-k", "--cache-type-k-draft")
    line.required(draft.cache_type_v.value, "-ctvd", "--spec-draft-type-v", "--cache-type-v-draft")
    if draft.window_tokens and plan.tier is None:  # a tier names it itself
        line.required(str(draft.window_tokens), "--spec-draft-window")
    if drafter_path is None:
        return
    line.required_text(
        "LLAMA_ARG_SPEC_DRAFT_MODEL",
        _checkpoint_text(drafter_path),
        *DRAFTER_SPELLINGS,
    )
    if plan.split is not None and len(plan.split.devices) > 1:  # it would be shared out like the model
        line.required(plan.split.main, "-devd", "--spec-draft-device", "--device-draft")
    if plan.on_card:  # without a card the drafter follows --device none
        line.required(ALL_LAYERS, "-ngld", "--spec-draft-ngl", "--gpu-layers-draft", "--n-gpu-layers-draft")


def _project(line: _CommandLine, plan: Plan, projector_path: Path | None) -> None:
    """The projector, and that it is none where the plan has none: a build may look for one by itself."""
    if not plan.with_projector:
        line.optional_switch("--no-mmproj", "--no-mmproj-auto")
        return
    if projector_path is None:
        raise ValueError("a plan with a projector, and no path of one")
    line.required_text("LLAMA_ARG_MMPROJ", _checkpoint_text(projector_path), "--mmproj", "-mm")
    if plan.on_card and not plan.launch.projector_on_card:
        line.required_switch("--no-mmproj-offload")
    elif plan.split is not None:
        # It would be on the first card of --device, with older builds on the first of the machine.
        line.optional_or_variable(plan.split.main, PROJECTOR_DEVICE_VARIABLE, "-mmdev", "--mmproj-device")
    if plan.launch.image_max_tokens:
        line.required(str(plan.launch.image_max_tokens), "--image-max-tokens")


def _serve(line: _CommandLine, sizes: Sizes) -> None:
    """What it serves beside text; the pooling only where the file's own is none that serves it."""
    if sizes.purpose is not Purpose.CHAT:
        line.required_switch(*PURPOSE_SPELLINGS[sizes.purpose])
    if sizes.pooling is not None:
        line.required(sizes.pooling.value, "--pooling")


def _stretch(line: _CommandLine, plan: Plan) -> None:
    rope = plan.rope
    if rope is not None:
        line.required(rope.scaling.value, "--rope-scaling")
        line.required(f"{rope.factor:g}", "--rope-scale")
        line.required(str(rope.original_tokens), "--yarn-orig-ctx")


def _place_layers(line: _CommandLine, capabilities: Capabilities, plan: Plan) -> None:
    if plan.on_card:
        _name_cards(line, plan)
        layers = plan.launch.layers
        count = ALL_LAYERS if layers.layers_on_card is None else str(layers.layers_on_card)
        line.required(count, *LAYER_SPELLINGS)
        if layers.expert_layers_on_host:
            line.required(str(layers.expert_layers_on_host), *EXPERT_SPELLINGS)
        if layers.cache_on_host:
            line.required_switch(*HOST_CACHE_SPELLINGS)
        if layers.is_full:
            _read_at_once(line)
        return
    # With no layers on the card a GPU build still computes large batches there: it takes "none" to keep it
    # off.
    line.optional("none", "--device", "-dev")
    if capabilities.backend is not Backend.CPU:
        line.optional("0", *LAYER_SPELLINGS)


def _read_at_once(line: _CommandLine) -> None:
    """Everything goes to the card: reading the file is faster than mapping it, and leaves no mapping behind."""
    if not line.optional("none", "--load-mode", "-lm"):
        line.optional_switch("--no-mmap")


def _name_cards(line: _CommandLine, plan: Plan) -> None:
    """On a machine with several cards, the ones the plan is for, and the layers of each."""
    split = plan.split
    if split is None:
        return
    line.required(",".join(split.devices), "--device", "-dev")
    if len(split.devices) > 1:
        line.required("layer", "-sm", "--split-mode")
        line.optional(str(len(split.devices) - 1), "--main-gpu", "-mg")
        line.required(",".join(map(str, split.shares)), "--tensor-split", "-ts")


def _check_device(build: Build, capabilities: Capabilities, plan: Plan) -> None:
    if plan.on_card and capabilities.backend is Backend.CPU:
        raise LlmError(
            ErrorCode.ENGINE_UNUSABLE,
            f"The model was planned for the card, but {build.server} (version {capabilities.version}) sees "
            "no device to compute on.",
            hint='Install a build for the card (CUDA or Vulkan), or set card = "cpu" in config.toml.',
            path=str(build.server),
        )
    missing = [] if plan.split is None else sorted({*plan.split.devices} - {*capabilities.devices})
    if missing:
        raise LlmError(
            ErrorCode.ENGINE_UNUSABLE,
            f"The model was planned for {', '.join(missing)}, and {build.server} (version {capabilities.version})"
            f" sees {', '.join(capabilities.devices) or 'no device'}.",
            hint="Plan it again: the cards of this machine, or its engine, have changed.",
            path=str(build.server),
            devices=missing,
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
        raise ValueError(f"the path of a model must be absolute, not {path}")
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
