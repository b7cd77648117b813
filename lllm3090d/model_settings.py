"""What the settings say of one model: a section ``[models."NAME"]`` of the file. Values only; nothing is looked up."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from lllm3090d.checkpoints.purpose import Purpose
from lllm3090d.planning.cache import CacheType
from lllm3090d.planning.request import Drafting, Offload, PlanRequest, ProjectorPlace, option_of
from lllm3090d.planning.slots import SlotPolicy

CHAT_TEMPLATE = "--chat-template-file"
_ASKED = (
    "context_tokens",
    "parallel",
    "cache_type",
    "slot_policy",
    "offload",
    "drafting",
    "draft_tokens",
    "projector",
    "purpose",
)
Word = Annotated[str, Field(min_length=1, max_length=256)]


class ModelSettings(BaseModel):
    """Defaults of one model; what is left out is as for all. Field descriptions are the reference documentation."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    aliases: tuple[Word, ...] = Field(default=(), description="short names, as in the setting `aliases`")
    context_tokens: Annotated[int, Field(ge=1, le=1 << 28)] | None = Field(
        default=None, description="total context of all slots, tokens"
    )
    parallel: Annotated[int, Field(ge=1, le=256)] | None = Field(default=None, description="slots")
    cache_type: CacheType | None = Field(default=None, description="type of the KV cache")
    slot_policy: SlotPolicy | None = Field(
        default=None, description="how slots are chosen where their number is open"
    )
    offload: Offload | None = Field(
        default=None, description="whether layers or experts may be left in host memory"
    )
    drafting: Drafting | None = Field(default=None, description="whether it drafts for itself")
    draft_tokens: Annotated[int, Field(ge=1, le=64)] | None = Field(
        default=None, description="longest draft"
    )
    projector: ProjectorPlace | None = Field(default=None, description="where its projector is")
    purpose: Purpose | None = Field(
        default=None, description="what it serves: chat, embedding or rerank; left out: what it was made for"
    )
    pin: bool = Field(default=False, description="it is pinned whenever it is loaded")
    idle_ttl_s: Annotated[float, Field(ge=0, le=86400)] | None = Field(
        default=None, description="seconds without use after which it is unloaded; 0 for never"
    )
    autoload: bool = Field(
        default=False, description="it is loaded at every login, after those that `autoload` names"
    )
    chat_template_file: Path | None = Field(
        default=None, description=f"absolute path of its chat template ({CHAT_TEMPLATE})"
    )
    extra_arguments: tuple[str, ...] = Field(
        default=(), description="further arguments for the engine, as in the setting `extra_arguments`"
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_flag_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool) and info.field_name not in {"pin", "autoload"}:
            raise ValueError("true and false are for flags only")
        return value

    @field_validator("chat_template_file", mode="after")
    @classmethod
    def _absolute(cls, path: Path | None) -> Path | None:
        if path is None:
            return None
        try:
            expanded = path.expanduser()
        except RuntimeError as error:
            raise ValueError(f"{path.parts[0]} has no home directory") from error
        if not expanded.is_absolute():
            raise ValueError("must be an absolute path (or begin with ~)")
        return expanded

    @property
    def request(self) -> PlanRequest:
        """What is asked of the planner where neither a load nor its arguments say it."""
        return PlanRequest(
            context_tokens=self.context_tokens,
            parallel=self.parallel,
            cache_type_k=self.cache_type,
            cache_type_v=self.cache_type,
            slot_policy=self.slot_policy,
            offload=self.offload,
            drafting=self.drafting,
            draft_tokens=self.draft_tokens,
            projector=self.projector,
            purpose=self.purpose,
        )

    @property
    def arguments(self) -> tuple[str, ...]:
        """All that the engine gets beside what is planned."""
        template = () if self.chat_template_file is None else (CHAT_TEMPLATE, str(self.chat_template_file))
        return (*template, *self.extra_arguments)


def is_pinned(sections: Mapping[str, ModelSettings], name: str) -> bool:
    """Whether a model is pinned whenever it is loaded."""
    return name in sections and sections[name].pin


def conflict(
    sections: Mapping[str, ModelSettings],
    aliases: Mapping[str, str],
    extra_arguments: Mapping[str, tuple[str, ...]],
    idle_ttl_of: Mapping[str, float],
) -> str | None:
    """What is said twice, in a section and in a table of all models, or in two sections; None where nothing is."""
    taken = dict(aliases)
    for name, section in sections.items():
        if section.arguments and name in extra_arguments:
            return f"{name}: arguments of this model stand in extra_arguments too"
        if section.idle_ttl_s is not None and name in idle_ttl_of:
            return f"{name}: idle_ttl_s of this model stands in idle_ttl_of too"
        for alias in section.aliases:
            if taken.setdefault(alias, name) != name:
                return f"{name}: the alias {alias} belongs to {taken[alias]}"
    return None


def told(name: str, section: ModelSettings, asked: PlanRequest, effective: PlanRequest) -> str | None:
    """What of a plan comes from a model's section, as a sentence; None where nothing does.

    Args:
        name: of the model.
        section: of it.
        asked: what the load and its arguments say.
        effective: what the planner is asked.
    """
    usual, own = PlanRequest(), section.request
    found = []
    for field in _ASKED:
        wanted = "cache_type_k" if field == "cache_type" else field
        value = getattr(own, wanted)
        is_open = getattr(asked, wanted) == getattr(usual, wanted)
        if value is not None and is_open and getattr(effective, wanted) == value:
            found.append(f"{option_of(wanted)} {value}")
    return f'config: {", ".join(found)} from [models."{name}"]' if found else None
