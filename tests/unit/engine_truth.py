"""The engine's own figures of ``tests/data/engine_truth.json.gz``, and the facts of the models in it."""

from __future__ import annotations

import gzip
import json
import tempfile
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from lllm3090d.checkpoints.facts import CheckpointFacts, Graph, read_facts
from lllm3090d.engines.capabilities import Backend
from lllm3090d.planning.cache import CacheShape, CacheType, cache_shape
from lllm3090d.planning.placement import Placement
from lllm3090d.planning.quote import PlanPolicy
from tests.fakes.model_files import published, write

DATA = Path(__file__).parent.parent / "data"

POLICY = PlanPolicy(
    cache_type=CacheType.Q8_0,
    batch_tokens=2048,
    micro_batch_tokens=512,
    context_checkpoints=8,
    prompt_cache_mib=1024,
    workspace_reserve_mib=1024,
)


@dataclass(frozen=True, slots=True)
class TruthRow:
    """One dry run of the engine; bytes and tokens. Figures are 0 where it refused."""

    model: str
    source: str
    backend: Backend
    mtp: bool
    context: int
    cache_type_k: CacheType
    cache_type_v: CacheType
    parallel: int
    batch: int
    micro_batch: int
    flash_attention: bool
    swa_full: bool
    unified: bool
    outputs: int
    rollback_tokens: int
    embeddings: bool
    draft_context: bool
    refused: bool
    n_ctx: int
    n_ctx_seq: int
    context_bytes: int
    weights_card_bytes: int
    weights_host_bytes: int
    compute_card_bytes: int
    compute_host_bytes: int

    @property
    def facts(self) -> CheckpointFacts:
        """The model of the row."""
        return facts_of(self.model)

    @property
    def shape(self) -> CacheShape:
        """Our own shape for the arguments of the row."""
        return cache_shape(
            self.facts,
            context_tokens=self.context,
            parallel=self.parallel,
            batch_tokens=self.batch,
            micro_batch_tokens=self.micro_batch,
            unified=self.unified,
            swa_full=self.swa_full,
            rollback_tokens=self.rollback_tokens,
        )

    @property
    def cache_types(self) -> tuple[CacheType, CacheType]:
        """Of K and V."""
        return self.cache_type_k, self.cache_type_v

    @property
    def placement(self) -> Placement:
        """Everything on the card."""
        return Placement(with_mtp=self.mtp)

    @property
    def graph_outputs(self) -> int:
        """Outputs of a micro batch; without a limit the engine plans for all of its tokens."""
        return self.outputs or self.shape.micro_batch_tokens

    def __str__(self) -> str:
        words = [self.model, self.source, str(self.backend), str(self.context)]
        words += [f"{self.cache_type_k}-{self.cache_type_v}", f"np{self.parallel}", f"ub{self.micro_batch}"]
        flags = ("mtp", "swa_full", "unified", "embeddings", "draft_context")
        words += [flag for flag in flags if getattr(self, flag)]
        return "-".join(words + ([] if self.flash_attention else ["no_fa"]))


@dataclass(frozen=True, slots=True)
class PartialRow:
    """One dry run with a part of the layers on a stand-in card."""

    model: str
    backend: Backend
    layers_on_card: int
    expert_layers_on_host: int
    mtp: bool
    weights_card_bytes: int
    weights_host_bytes: int
    context_card_bytes: int
    context_host_bytes: int
    compute_card_bytes: int
    compute_host_bytes: int

    @property
    def facts(self) -> CheckpointFacts:
        """The model of the row."""
        return facts_of(self.model)

    @property
    def placement(self) -> Placement:
        """What was on the card."""
        return Placement(
            layers_on_card=self.layers_on_card,
            expert_layers_on_host=self.expert_layers_on_host,
            with_mtp=self.mtp,
        )

    @property
    def shape(self) -> CacheShape:
        """The same for all rows."""
        return cache_shape(
            self.facts, context_tokens=8192, parallel=2, batch_tokens=2048, micro_batch_tokens=512
        )

    def __str__(self) -> str:
        mtp = "-mtp" if self.mtp else ""
        return f"{self.model}-{self.backend}-ngl{self.layers_on_card}-ncmoe{self.expert_layers_on_host}{mtp}"


PARTIAL_CACHE_TYPES = (CacheType.Q8_0, CacheType.Q8_0)
_READERS = {"Backend": Backend, "CacheType": CacheType, "bool": bool, "int": int, "str": str}


def _rows(kind: type[Any], document: dict[str, Any]) -> tuple[Any, ...]:
    names = [field.name for field in fields(kind)]
    assert document["columns"] == names
    readers = [_READERS[str(field.type)] for field in fields(kind)]
    return tuple(
        kind(*(read(value) for read, value in zip(readers, row, strict=True))) for row in document["rows"]
    )


@cache
def truth_rows() -> tuple[TruthRow, ...]:
    """All rows."""
    return _rows(TruthRow, json.loads(gzip.decompress((DATA / "engine_truth.json.gz").read_bytes())))


@cache
def partial_rows() -> tuple[PartialRow, ...]:
    """All rows with a part of the layers on the card."""
    text = (DATA / "partial_placements.json").read_text(encoding="utf-8")
    return _rows(PartialRow, json.loads(text))


@cache
def model_names() -> tuple[str, ...]:
    """The models of the rows."""
    return tuple(dict.fromkeys(row.model for row in truth_rows()))


@cache
def facts_of(model: str) -> CheckpointFacts:
    """The facts of a model, read from a file with its dimensions."""
    with tempfile.TemporaryDirectory() as folder:
        return read_facts([write(Path(folder) / f"{model}.gguf", published()[model])])


@cache
def priced_models() -> tuple[str, ...]:
    """The models that keep a context and whose every term has a formula; encoders have tests of their own."""
    unpriced = {Graph.NONE, Graph.ENCODER}
    return tuple(name for name in model_names() if facts_of(name).rule.graph not in unpriced)
