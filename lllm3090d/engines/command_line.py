"""A command line of ``llama-server``, ours or anybody's, read back into the values that have a price. Pure.

What is absent has the engine's own default: four slots that share one pool, f16 caches, 32 context checkpoints with
8192 tokens between them, 8192 MiB of finished prompts, everything on the card, and whatever else fits changed to fit.
Options whose price is not known here are named, never ignored.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lllm3090d.checkpoints.facts import CheckpointFacts
from lllm3090d.checkpoints.purpose import Pooling, Purpose
from lllm3090d.engines.capabilities import Backend, Capabilities
from lllm3090d.engines.options import FALSE_WORDS, TRUE_WORDS, Given, OptionLine, read_options, whole_number
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.planning.cache import CacheType
from lllm3090d.planning.launch import (
    DEFAULT_CHECKPOINT_STEP_TOKENS,
    DEFAULT_DRAFT_TOKENS,
    Draft,
    Launch,
    SpecType,
)
from lllm3090d.planning.placement import EVERYTHING, Placement
from lllm3090d.planning.rope import RopeScaling

# Defaults of the engine, from b10068 to build 11669 of Debian.
DEFAULT_PARALLEL = -1  # "auto"
AUTO_SLOTS = 4  # which that means, in one pool
DEFAULT_BATCH_TOKENS = 2048
DEFAULT_MICRO_BATCH_TOKENS = 512
DEFAULT_CONTEXT_CHECKPOINTS = 32
DEFAULT_PROMPT_CACHE_MIB = 8192
DEFAULT_CACHE_TYPE = CacheType.F16

# What takes memory, or moves it, in a way that no formula here covers.
UNPRICED = (
    "--lora", "--lora-scaled", "--control-vector", "--control-vector-scaled", "--override-tensor",
    "--n-cpu-ffn", "--override-kv", "--rpc", "--no-host", "--no-repack", "--no-op-offload", "--split-mode",
    "--tensor-split", "--main-gpu", "--embeddings", "--reranking", "--pooling", "--moe-cache-mib",
    "--model-url", "--docker-repo", "--hf-repo", "--hf-file", "--mmproj-url", "--mmproj-device",
    "--spec-draft-hf", "--spec-draft-device", "--spec-draft-override-tensor", "--spec-draft-cpu-moe",
    "--spec-draft-n-cpu-moe", "--spec-draft-n-ubatch", "--mlock", "--image-min-tokens", "--spec-default",
    "--backend-sampling", "--mtmd-batch-max-tokens", "--models-dir", "--models-preset", "--kq-mask-packed",
)  # fmt: skip
# Priced where they divide a model among named cards by layers, the last card being the main one, as plans do.
_DIVISION = frozenset(
    {"--split-mode", "--tensor-split", "--main-gpu", "--spec-draft-device", "--mmproj-device"}
)
# Not a person's to give among other arguments (--purpose is), and read back from a launch.
_PURPOSES = frozenset({"--embeddings", "--reranking", "--pooling"})
# Switches whose negation is meant: the other spelling is the default.
_NEGATED = frozenset({"--no-repack", "--no-op-offload"})


class FlashAttention(enum.StrEnum):
    """``-fa``."""

    ON = "on"
    OFF = "off"
    AUTO = "auto"


@dataclass(frozen=True, slots=True)
class RopeArguments:
    """How positions are stretched: ``--rope-scaling``, ``--rope-scale``, ``--yarn-orig-ctx``; 0 where not given."""

    scaling: RopeScaling
    factor: float = 0.0
    original_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Reading:
    """What a command line says.

    Attributes:
        launch: all values that have a price. Its ``-c`` is the whole pool; 0 for what was trained.
        on_card: the engine may use a card.
        with_projector: a projector is loaded.
        devices: cards by name, in order; () where none is named.
        shares: of the layers, the output counting as one, for each of them; () where it is left to the engine.
        rope: how positions are stretched; None where that is left to the file.
        model, projector, drafter: their paths; None where none is given.
        flash_attention: the prices are those of ON; AUTO may turn it off for a backend that has no kernel.
        fits_itself: the engine may lower what was not given until it fits, so the price is an upper bound.
        unpriced: options that take memory, or move it, in a way that no price covers; as they were written.
    """

    launch: Launch
    on_card: bool
    with_projector: bool
    devices: tuple[str, ...]
    shares: tuple[float, ...]
    rope: RopeArguments | None
    model: str | None
    projector: str | None
    drafter: str | None
    flash_attention: FlashAttention
    fits_itself: bool
    unpriced: tuple[str, ...]


def read_command_line(
    arguments: Sequence[str],
    capabilities: Capabilities,
    facts: CheckpointFacts,
    *,
    environment: Mapping[str, str] | None = None,
    drafter: CheckpointFacts | None = None,
) -> Reading:
    """Read a command line back.

    Args:
        arguments: without the program.
        capabilities: of the build that it is for: its aliases, and what it computes on.
        facts: the checkpoint, for "all layers".
        environment: that the engine is started with.
        drafter: the file of ``-md``; needed for its price only.

    Raises:
        LlmError: INVALID_REQUEST for what the engine would refuse to read: an option that it does not have, one
            without its value, no number where one must be, a negative context.
    """
    return _Reader(
        read_options(arguments, capabilities, environment), capabilities, facts, drafter
    ).reading()


@dataclass(frozen=True, slots=True)
class _Reader:
    line: OptionLine
    capabilities: Capabilities
    facts: CheckpointFacts
    drafter: CheckpointFacts | None

    def reading(self) -> Reading:
        line = self.line
        projector, drafter = line.text("--mmproj"), line.text("--model-draft", "--spec-draft-model")
        on_card = self.capabilities.backend is not Backend.CPU and line.text("--device") != "none"
        draft, odd_types = self._draft(has_file=drafter is not None)
        return Reading(
            launch=self._launch(draft, on_card=on_card),
            on_card=on_card,
            with_projector=projector is not None,
            devices=self._devices(),
            shares=self._shares(),
            rope=self._rope(),
            model=line.text("--model"),
            projector=projector,
            drafter=drafter,
            flash_attention=self._flash_attention(),
            fits_itself=_word(line.text("--fit"), default=True),
            unpriced=(*self._unpriced(), *odd_types),
        )

    def _launch(self, draft: Draft | None, *, on_card: bool) -> Launch:
        line = self.line
        parallel = line.number(DEFAULT_PARALLEL, "--parallel")
        automatic = parallel < 0
        slots = AUTO_SLOTS if automatic else parallel
        slot_tokens = max(0, line.number(0, "--kv-unified-per-slot"))
        context = line.number(0, "--ctx-size")
        if line.last("--ctx-size") is None and slot_tokens:
            context = slots * slot_tokens
        image_tokens = line.number(-1, "--image-max-tokens")
        for name, value, least in (("--ctx-size", context, 0), ("--parallel", slots, 1)):
            if value < least:
                raise LlmError(
                    ErrorCode.INVALID_REQUEST,
                    f"{name} is {value}, and the engine starts with {least} at least.",
                    hint=f"Give {name} a larger number.",
                    option=name,
                )
        purpose, pooling = self._purpose()
        micro_batch = line.number(DEFAULT_MICRO_BATCH_TOKENS, "--ubatch-size")
        batch = line.number(DEFAULT_BATCH_TOKENS, "--batch-size")
        return Launch(
            purpose=purpose,
            pooling=pooling,
            context_tokens=context,
            parallel=slots,
            cache_type_k=self._cache_type("--cache-type-k"),
            cache_type_v=self._cache_type("--cache-type-v"),
            batch_tokens=batch if purpose is Purpose.CHAT else min(batch, micro_batch),
            micro_batch_tokens=micro_batch,
            context_checkpoints=line.number(DEFAULT_CONTEXT_CHECKPOINTS, "--ctx-checkpoints"),
            prompt_cache_mib=line.number(DEFAULT_PROMPT_CACHE_MIB, "--cache-ram"),
            unified=automatic or line.switch(False, "--kv-unified", "--no-kv-unified"),
            swa_full=line.switch(False, "--swa-full"),
            layers=self._placement() if on_card else EVERYTHING,
            draft=draft,
            projector_on_card=not on_card or line.switch(True, "--mmproj-offload", "--no-mmproj-offload"),
            image_max_tokens=max(0, image_tokens),
            slot_tokens=slot_tokens,
            checkpoint_min_step_tokens=line.number(DEFAULT_CHECKPOINT_STEP_TOKENS, "--checkpoint-min-step"),
            line_tokens=max(0, line.number(0, "--kv-vram-cells")),
            tail_draft_tokens=max(0, line.number(0, "--spec-draft-n-max-tail")),
            drafter=self.drafter if draft is not None else None,
        )

    def _purpose(self) -> tuple[Purpose, Pooling | None]:
        """What it serves, and the pooling where that is given; a pooling that nobody knows is an unpriced option."""
        line, word = self.line, self.line.text("--pooling")
        pooling = Pooling(word) if word in set(Pooling) else None
        if line.last("--reranking") is not None:
            return Purpose.RERANK, None
        return (Purpose.CHAT if line.last("--embeddings") is None else Purpose.EMBEDDING), pooling

    def _placement(self) -> Placement:
        line, blocks = self.line, len(self.facts.layers) + 1  # the output counts as one
        given = line.last("--gpu-layers", "--n-gpu-layers")
        count = None
        if given is not None and given.values[0] not in {"auto", "all"}:
            count = whole_number(given)
        experts = max((whole_number(each) for each in line.all("--n-cpu-moe")), default=0)  # they add up
        if line.last("--cpu-moe") is not None:
            experts = len(self.facts.layers)
        return Placement(
            layers_on_card=None if count is None or count < 0 or count >= blocks else count,
            expert_layers_on_host=experts,
            cache_on_host=not line.switch(True, "--kv-offload", "--no-kv-offload"),
        )

    def _draft(self, has_file: bool) -> tuple[Draft | None, tuple[str, ...]]:  # private, two callers
        """The draft, and types of drafts without a price."""
        line = self.line
        words = [word for each in line.all("--spec-type") for word in each.values[0].split(",")]
        kinds = [SpecType(word) for word in words if word in set(SpecType)]
        odd = [word for word in words if word not in {*SpecType, "none"}]
        if len(set(kinds)) > 1:
            odd += [str(kind) for kind in kinds[1:]]
        if not kinds and has_file:
            kinds = [self._kind_of_file()]
        if not kinds:
            return None, tuple(f"--spec-type {word}" for word in odd)
        draft = Draft(
            tokens=line.number(DEFAULT_DRAFT_TOKENS, "--spec-draft-n-max"),
            cache_type_k=self._cache_type("--cache-type-k-draft", "--spec-draft-type-k"),
            cache_type_v=self._cache_type("--cache-type-v-draft", "--spec-draft-type-v"),
            window_tokens=max(0, line.number(0, "--spec-draft-window")),
            spec_type=kinds[0],
        )
        return draft, tuple(f"--spec-type {word}" for word in odd)

    def _kind_of_file(self) -> SpecType:
        """What the engine takes from the drafter's own header where nobody says how to draft."""
        if self.drafter is None:
            return SpecType.SIMPLE
        if self.drafter.architecture == "dflash":
            return SpecType.DFLASH
        return SpecType.MTP if self.drafter.has_mtp else SpecType.SIMPLE

    def _cache_type(self, *spellings: str) -> CacheType:
        word = self.line.text(*spellings)
        if word is None:
            return DEFAULT_CACHE_TYPE
        if word not in set(CacheType):
            raise LlmError(
                ErrorCode.INVALID_REQUEST,
                f"{spellings[0]} is {word!r}, which is no type of a cache.",
                hint=f"Give one of {', '.join(CacheType)}.",
                option=spellings[0],
            )
        return CacheType(word)

    def _rope(self) -> RopeArguments | None:
        scaling, scale = self.line.text("--rope-scaling"), self.line.text("--rope-scale")
        original = self.line.number(0, "--yarn-orig-ctx")
        if scaling is None and scale is None:
            return None
        try:
            # Without a method the engine takes that of the file, or linear scaling.
            return RopeArguments(RopeScaling(scaling or RopeScaling.LINEAR), float(scale or 0), original)
        except ValueError as error:
            raise LlmError(
                ErrorCode.INVALID_REQUEST,
                f"Positions cannot be stretched by {scaling or ''} {scale or ''}: {error}.",
                hint="Give --rope-scaling one of none, linear and yarn, and --rope-scale a number.",
            ) from error

    def _flash_attention(self) -> FlashAttention:
        found = self.line.last("--flash-attn")
        if found is None:
            return FlashAttention.AUTO
        if not found.values:
            return FlashAttention.ON  # a switch in old builds
        word = found.values[0]
        if word in {"auto", "-1"}:
            return FlashAttention.AUTO
        return FlashAttention.ON if _word(word, default=True) else FlashAttention.OFF

    def _devices(self) -> tuple[str, ...]:
        named = self.line.text("--device")
        return () if named is None or named == "none" else tuple(named.split(","))

    def _shares(self) -> tuple[float, ...]:
        text = self.line.text("--tensor-split")
        try:
            # The engine takes a slash for a comma.
            return () if text is None else tuple(float(part) for part in re.split("[,/]", text))
        except ValueError as error:
            raise LlmError(
                ErrorCode.INVALID_REQUEST,
                f"--tensor-split is {text!r}, which are no numbers.",
                hint="Give a number for each card, with commas between them.",
                option="--tensor-split",
            ) from error

    def _is_divided_by_layers(self) -> bool:
        """Among named cards, each with its share, and what is not shared on the last."""
        line, devices = self.line, self._devices()
        main = devices[-1] if devices else None
        return (
            main is not None
            and len(self._shares()) in {0 if len(devices) == 1 else len(devices), len(devices)}
            and line.text("--split-mode") in {None, "layer"}
            and line.number(len(devices) - 1, "--main-gpu") == len(devices) - 1
            and line.text("--spec-draft-device", "--device-draft") in {None, main}
            and line.text("--mmproj-device") in {None, main}
        )

    def _unpriced(self) -> tuple[str, ...]:
        found, is_divided = [], self._is_divided_by_layers()
        for name in UNPRICED:
            given = self.line.last(name)
            if (
                name in _PURPOSES
                or given is None
                or not has_no_price(given)
                or (is_divided and name in _DIVISION)
            ):
                continue
            found.append(given.written)
        return tuple(dict.fromkeys(found))


def has_no_price(given: Given) -> bool:
    """It takes memory, or moves it, in a way that no formula here covers."""
    return given.names(*UNPRICED) and (given.is_negative or not given.names(*_NEGATED))


def _word(text: str | None, *, default: bool) -> bool:
    if text is None:
        return default
    if text not in TRUE_WORDS | FALSE_WORDS:
        raise LlmError(
            ErrorCode.INVALID_REQUEST,
            f"{text!r} is neither on nor off.",
            hint="Give on or off.",
        )
    return text in TRUE_WORDS
